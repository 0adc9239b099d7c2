// SPDX-License-Identifier: Apache-2.0

package xsk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// canary decides once, without the code under test, whether this process may
// do what these tests need: a network namespace and an XDP program.
var canary = sync.OnceValue(func() error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		done <- unix.Unshare(unix.CLONE_NEWNET)
	}()
	if err := <-done; err != nil {
		return err
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}})
	if err != nil {
		return err
	}
	return p.Close()
})

const etherType = 0x88b5 // local experimental

// A lab is a network namespace of its own with the two ends of a veth pair:
//
//	tx (frames are sent here) ── rx (XDP program, sockets under test)
//
// The test's goroutine is in it, and so must open sockets; subtests are not.
type lab struct {
	tx, rx int // interface indices
	xsks   *ebpf.Map
	packet int // AF_PACKET socket on tx
}

const perQueue = 4 // XSKMAP entries per queue

type labConfig struct {
	queues, mtu, meta int
	frags             bool
}

func newLab(t *testing.T, cfg labConfig) *lab {
	t.Helper()
	if err := canary(); err != nil {
		if os.Getenv("XSPIN_NO_SKIP") == "1" {
			t.Fatalf("needs root: %v", err)
		}
		t.Skipf("needs root: %v", err)
	}
	runtime.LockOSThread()
	home, err := netns.Get()
	must(t, err)
	ns, err := netns.New()
	must(t, err)
	t.Cleanup(func() {
		ns.Close()
		if err := netns.Set(home); err != nil {
			t.Errorf("return to the test's namespace: %v", err) // and keep the thread locked: it dies
		} else {
			runtime.UnlockOSThread()
		}
		home.Close()
	})
	// Silence on the wire: no neighbour discovery.
	must(t, os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("1"), 0))

	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = "rx", max(cfg.mtu, 1500)
	attrs.NumRxQueues, attrs.NumTxQueues = max(cfg.queues, 1), max(cfg.queues, 1)
	veth := netlink.NewVeth(attrs)
	veth.PeerName, veth.PeerMTU = "tx", uint32(attrs.MTU)
	veth.PeerNumRxQueues, veth.PeerNumTxQueues = uint32(attrs.NumRxQueues), uint32(attrs.NumTxQueues)
	must(t, netlink.LinkAdd(veth))
	l := &lab{}
	for name, index := range map[string]*int{"tx": &l.tx, "rx": &l.rx} {
		dev, err := netlink.LinkByName(name)
		must(t, err)
		must(t, netlink.LinkSetUp(dev))
		*index = dev.Attrs().Index
	}
	t.Cleanup(func() { netlink.LinkDel(veth) })

	l.xsks, err = ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.XSKMap, KeySize: 4, ValueSize: 4, MaxEntries: 16})
	must(t, err)
	t.Cleanup(func() { l.xsks.Close() })
	prog, err := ebpf.NewProgram(redirect(l.xsks.FD(), cfg))
	must(t, err)
	t.Cleanup(func() { prog.Close() })
	x, err := link.AttachXDP(link.XDPOptions{Program: prog, Interface: l.rx, Flags: link.XDPDriverMode})
	must(t, err)
	t.Cleanup(func() { x.Close() })
	l.packet = packetSocket(t, l.tx)
	return l
}

// redirect returns a program that writes cfg.meta bytes in front of frames of
// our type, its first and last word set, and redirects them to the socket that
// the last byte of the destination address names among those of the queue.
func redirect(fd int, cfg labConfig) *ebpf.ProgramSpec {
	const data, dataEnd, dataMeta, rxQueue = 0, 4, 8, 16 // of struct xdp_md
	typ := int32(binary.NativeEndian.Uint16([]byte{etherType >> 8, etherType & 0xff}))
	ins := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R2, asm.R6, data, asm.Word),
		asm.LoadMem(asm.R3, asm.R6, dataEnd, asm.Word),
		asm.Mov.Reg(asm.R4, asm.R2),
		asm.Add.Imm(asm.R4, 14),
		asm.JGT.Reg(asm.R4, asm.R3, "pass"),
		asm.LoadMem(asm.R4, asm.R2, 12, asm.Half),
		asm.JNE.Imm(asm.R4, typ, "pass"),
		asm.LoadMem(asm.R7, asm.R2, 5, asm.Byte),
	}
	if n := int32(cfg.meta); n > 0 {
		ins = append(ins,
			asm.Mov.Reg(asm.R1, asm.R6),
			asm.Mov.Imm(asm.R2, -n),
			asm.FnXdpAdjustMeta.Call(),
			asm.JNE.Imm(asm.R0, 0, "pass"),
			asm.LoadMem(asm.R2, asm.R6, dataMeta, asm.Word),
			asm.LoadMem(asm.R3, asm.R6, data, asm.Word),
			asm.Mov.Reg(asm.R4, asm.R2),
			asm.Add.Imm(asm.R4, n),
			asm.JGT.Reg(asm.R4, asm.R3, "pass"),
			asm.StoreMem(asm.R2, 0, asm.R7, asm.DWord),
			asm.StoreImm(asm.R2, int16(n-4), 0x5eed, asm.Word),
		)
	}
	ins = append(ins,
		asm.LoadMem(asm.R2, asm.R6, rxQueue, asm.Word),
		asm.Mul.Imm(asm.R2, perQueue),
		asm.Add.Reg(asm.R2, asm.R7),
		asm.LoadMapPtr(asm.R1, fd),
		asm.Mov.Imm(asm.R3, 1), // XDP_DROP where there is no socket
		asm.FnRedirectMap.Call(),
		asm.Return(),
		asm.Mov.Imm(asm.R0, 2).WithSymbol("pass"),
		asm.Return(),
	)
	spec := &ebpf.ProgramSpec{Type: ebpf.XDP, License: "GPL", Instructions: ins}
	if cfg.frags {
		spec.Flags = unix.BPF_F_XDP_HAS_FRAGS
	}
	return spec
}

func packetSocket(t *testing.T, ifindex int) int {
	t.Helper()
	proto := binary.NativeEndian.Uint16([]byte{etherType >> 8, etherType & 0xff})
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, int(proto))
	must(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	must(t, unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: proto, Ifindex: ifindex}))
	return fd
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// frame returns n bytes for socket to, with seq and a pattern made from it.
func frame(n int, to byte, seq uint32) []byte {
	b := make([]byte, n)
	copy(b, []byte{2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, 1, etherType >> 8, etherType & 0xff})
	binary.BigEndian.PutUint32(b[14:], seq)
	for i := 18; i < n; i++ {
		b[i] = byte(uint32(i)*31 + seq*7)
	}
	return b
}

func (l *lab) send(t *testing.T, b []byte) {
	t.Helper()
	if _, err := unix.Write(l.packet, b); err != nil {
		t.Fatalf("send %d bytes: %v", len(b), err)
	}
}

func (l *lab) plug(t *testing.T, queue, slot int, s *Socket) {
	t.Helper()
	must(t, l.xsks.Put(uint32(queue*perQueue+slot), uint32(s.FD())))
	t.Cleanup(func() { l.xsks.Delete(uint32(queue*perQueue + slot)) })
}

func newUMEM(t *testing.T, frames, size int) *UMEM {
	t.Helper()
	u, err := NewUMEM(UMEMConfig{Frames: frames, FrameSize: size})
	must(t, err)
	t.Cleanup(func() {
		if err := u.Close(); err != nil {
			t.Error(err)
		}
	})
	return u
}

// frames returns the addresses of n frames from the first one.
func (u *UMEM) frames(first, n int) (addrs []uint64) {
	for i := range n {
		addrs = append(addrs, u.Addr(first+i))
	}
	return addrs
}

func openQueue(t *testing.T, u *UMEM, cfg QueueConfig, sc SocketConfig) (*Queue, *Socket) {
	t.Helper()
	q, s, err := u.OpenQueue(cfg, sc)
	must(t, err)
	closing(t, s)
	return q, s
}

func closing(t *testing.T, s *Socket) {
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}

// patience is how long a test waits for something that will come.
const patience = 10 * time.Second

// receive waits for n descriptors.
func receive(t *testing.T, s *Socket, n int) []Desc {
	t.Helper()
	descs := make([]Desc, n)
	got := 0
	for until := time.Now().Add(patience); got < n; {
		if k := s.Receive(descs[got:]); k > 0 {
			got += k
			continue
		}
		if time.Now().After(until) {
			st, err := s.Stats()
			t.Fatalf("received %d of %d descriptors; %+v, %v", got, n, st, err)
		}
		unix.Poll([]unix.PollFd{{Fd: int32(s.FD()), Events: unix.POLLIN}}, 10)
	}
	return descs
}

// transmit sends descs and returns the addresses completed, in order.
func transmit(t *testing.T, q *Queue, s *Socket, descs []Desc) (completed []uint64) {
	t.Helper()
	done := make([]uint64, 16)
	want := len(descs)
	for until := time.Now().Add(patience); len(completed) < want; {
		descs = descs[s.Send(descs):]
		pending, err := s.Kick()
		must(t, err)
		if !pending && len(descs) == 0 && s.TxOutstanding() > 0 {
			t.Fatalf("nothing pending, yet %d outstanding", s.TxOutstanding())
		}
		_, n := q.Exchange(nil, done)
		completed = append(completed, done[:n]...)
		if time.Now().After(until) {
			st, err := s.Stats()
			t.Fatalf("%d of %d completed; %+v, %v", len(completed), want, st, err)
		}
	}
	return completed
}

func addrsOf(descs []Desc) (addrs []uint64) {
	for _, d := range descs {
		addrs = append(addrs, d.Addr)
	}
	return addrs
}

func TestSocketsOfOneQueueWithMetadata(t *testing.T) {
	for _, meta := range []int{0, 8, 64} {
		l := newLab(t, labConfig{meta: meta})
		const headroom = 48
		u, err := NewUMEM(UMEMConfig{Frames: 64, FrameSize: 2048, Headroom: headroom})
		must(t, err)
		t.Cleanup(func() { must(t, u.Close()) })
		q, first := openQueue(t, u, QueueConfig{Ifindex: l.rx, FillSize: 64, CompletionSize: 64, Initial: u.frames(0, 64)}, SocketConfig{RxSize: 16})
		socks := []*Socket{first}
		for _, sc := range []SocketConfig{{RxSize: 16, TxSize: 16}, {RxSize: 16}} {
			s, err := q.Open(sc)
			must(t, err)
			closing(t, s)
			socks = append(socks, s)
		}
		for i, s := range socks {
			l.plug(t, 0, i, s)
			if g := s.Granted(); g.ZeroCopy || !g.NeedWakeup || !g.MultiBuffer {
				t.Errorf("granted %+v on veth", g)
			}
		}
		// Many times around the UMEM, so that every frame is recycled.
		for round := range uint32(100) {
			for i := range socks {
				for k := range uint32(5) {
					l.send(t, frame(60+int(round), byte(i), round*5+k))
				}
			}
			for i, s := range socks {
				descs := receive(t, s, 5)
				for k, d := range descs {
					want := frame(60+int(round), byte(i), round*5+uint32(k))
					if got := u.Bytes(d.Addr, int(d.Len)); !bytes.Equal(got, want) || d.Options != 0 {
						t.Fatalf("meta %d, socket %d: got %x (%+v)\nwant %x", meta, i, got, d, want)
					}
					if off := d.Addr % 2048; off != PacketHeadroom+headroom {
						t.Fatalf("data at %d of the frame, want %d+%d", off, PacketHeadroom, headroom)
					}
					if meta == 0 {
						continue
					}
					m := u.Front(d.Addr, meta)
					if m == nil || m[0] != byte(i) || binary.NativeEndian.Uint32(m[meta-4:]) != 0x5eed {
						t.Fatalf("socket %d: metadata of %d bytes is %x", i, meta, m)
					}
				}
				if n := s.RxAvailable(); n != 0 {
					t.Fatalf("socket %d has %d descriptors too many", i, n)
				}
				if filled, _ := q.Exchange(addrsOf(descs), nil); filled != 5 {
					t.Fatalf("recycled %d of 5", filled)
				}
			}
		}
		for i, s := range socks {
			st, err := s.Stats()
			must(t, err)
			if st != (Stats{}) {
				t.Errorf("socket %d: %+v", i, st)
			}
		}
	}
}

func TestTwoQueuesOfOneUMEM(t *testing.T) {
	l := newLab(t, labConfig{queues: 2})
	// Sent from the queues of one UMEM to the queues of another one: veth
	// receives on queue n what was sent on queue n.
	from, to := newUMEM(t, 32, 4096), newUMEM(t, 64, 2048)
	for round := range 3 {
		for queue := range 2 {
			_, rx := openQueue(t, to, QueueConfig{Ifindex: l.rx, Queue: queue, FillSize: 32, CompletionSize: 2, Initial: to.frames(queue*32, 32)}, SocketConfig{RxSize: 32})
			l.plug(t, queue, 0, rx)
			q, tx := openQueue(t, from, QueueConfig{Ifindex: l.tx, Queue: queue, FillSize: 1, CompletionSize: 16}, SocketConfig{TxSize: 16})
			var descs []Desc
			for i := range 16 {
				addr := from.Addr(queue*16 + i)
				n := copy(from.Bytes(addr, 4096), frame(100, 0, uint32(queue*100+i)))
				descs = append(descs, Desc{Addr: addr, Len: uint32(n)})
			}
			transmit(t, q, tx, descs)
			for i, d := range receive(t, rx, 16) {
				if want := frame(100, 0, uint32(queue*100+i)); !bytes.Equal(to.Bytes(d.Addr, int(d.Len)), want) {
					t.Errorf("queue %d, frame %d: %x", queue, i, to.Bytes(d.Addr, int(d.Len)))
				}
				if f := to.Frame(d.Addr); f/32 != queue {
					t.Errorf("queue %d received into frame %d, which the other queue has", queue, f)
				}
			}
		}
		// The first queue closes and opens again beside the second one.
		must(t, to.queues[0].sockets[0].Close())
		_, rx := openQueue(t, to, QueueConfig{Ifindex: l.rx, FillSize: 32, CompletionSize: 2, Initial: to.frames(0, 32)}, SocketConfig{RxSize: 32})
		l.plug(t, 0, 0, rx)
		b := frame(60, 0, 1)
		for queue, q := range from.queues {
			s := q.sockets[0]
			addr := from.Addr(queue * 16)
			copy(from.Bytes(addr, 60), b)
			transmit(t, q, s, []Desc{{Addr: addr, Len: 60}})
		}
		for _, q := range to.queues {
			d := receive(t, q.sockets[0], 1)[0]
			if got := to.Bytes(d.Addr, int(d.Len)); !bytes.Equal(got, b) {
				t.Errorf("queue %d after reopening queue 0: %x", q.cfg.Queue, got)
			}
		}
		// A further socket on the queue that is not the UMEM's first.
		for _, q := range from.queues {
			s, err := q.Open(SocketConfig{TxSize: 1})
			must(t, err)
			transmit(t, q, s, []Desc{{Addr: from.Addr(q.cfg.Queue * 16), Len: 60}})
		}
		// Everything again on the same UMEMs.
		for _, u := range []*UMEM{to, from} {
			if err := u.Close(); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), "2 queues") {
				t.Fatalf("round %d: close of a UMEM in use: %v", round, err)
			}
			for len(u.queues) > 0 {
				must(t, u.queues[0].sockets[0].Close())
			}
		}
	}
}

func TestFullReceiveRingIsCounted(t *testing.T) {
	l := newLab(t, labConfig{})
	u := newUMEM(t, 64, 2048)
	q, s := openQueue(t, u, QueueConfig{Ifindex: l.rx, FillSize: 64, CompletionSize: 2, Initial: u.frames(0, 8)}, SocketConfig{RxSize: 4})
	idle, err := q.Open(SocketConfig{RxSize: 64})
	must(t, err)
	closing(t, idle)
	l.plug(t, 0, 0, s)
	l.plug(t, 0, 1, idle)
	for i := range uint32(10) {
		l.send(t, frame(60, 0, i))
	}
	stats := func(s *Socket, done func(Stats) bool) Stats {
		t.Helper()
		for until := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
			st, err := s.Stats()
			must(t, err)
			if done(st) {
				return st
			}
			if time.Now().After(until) {
				t.Fatalf("%+v", st)
			}
		}
	}
	stats(s, func(st Stats) bool { return st == Stats{RxRingFull: 6} })
	stats(idle, func(st Stats) bool { return st == Stats{} })
	receive(t, s, 4) // and keep them: 4 of 8 frames remain

	for i := range uint32(7) {
		l.send(t, frame(60, 1, i))
	}
	st := stats(idle, func(st Stats) bool { return st.RxFillRingEmpty > 0 && st.RxDropped == 3 })
	if other, _ := s.Stats(); other.RxFillRingEmpty != st.RxFillRingEmpty || other.RxDropped != 0 {
		t.Errorf("the empty fill ring is the queue's: %+v and %+v", st, other)
	}
}

func TestFramesOfSeveralDescriptors(t *testing.T) {
	l := newLab(t, labConfig{mtu: 9000, frags: true, meta: 8})
	u := newUMEM(t, 64, 4096)
	q, s := openQueue(t, u, QueueConfig{Ifindex: l.rx, FillSize: 64, CompletionSize: 64, Initial: u.frames(0, 64)}, SocketConfig{RxSize: 64})
	l.plug(t, 0, 0, s)
	room := 4096 - PacketHeadroom

	check := func(n int, seq uint32) {
		t.Helper()
		descs := receive(t, s, (n+room-1)/room)
		var got []byte
		for i, d := range descs {
			if last := i == len(descs)-1; (d.Options&Continued == 0) != last {
				t.Errorf("%d bytes, descriptor %d of %d: options %#x", n, i, len(descs), d.Options)
			}
			got = append(got, u.Bytes(d.Addr, int(d.Len))...)
		}
		if !bytes.Equal(got, frame(n, 0, seq)) {
			t.Errorf("%d bytes: got %d other ones", n, len(got))
		}
		if m := u.Front(descs[0].Addr, 8); binary.NativeEndian.Uint32(m[4:]) != 0x5eed {
			t.Errorf("%d bytes: metadata %x", n, m)
		}
		q.Exchange(addrsOf(descs), nil)
	}
	for i, n := range []int{60, room, room + 1, 2 * room, 2*room + 1, 9014} {
		l.send(t, frame(n, 0, uint32(i)))
		check(n, uint32(i))
	}

	// And sent from several descriptors.
	from := newUMEM(t, 16, 2048)
	tq, tx := openQueue(t, from, QueueConfig{Ifindex: l.tx, FillSize: 1, CompletionSize: 16}, SocketConfig{TxSize: 16})
	var descs []Desc
	for seq := range uint32(3) {
		for b := frame(5000, 0, seq); len(b) > 0; {
			d := Desc{Addr: from.Addr(len(descs)), Options: Continued}
			d.Len = uint32(copy(from.Bytes(d.Addr, 2048), b))
			if b = b[d.Len:]; len(b) == 0 {
				d.Options = 0
			}
			descs = append(descs, d)
		}
	}
	completed := transmit(t, tq, tx, descs)
	for i, d := range descs {
		if completed[i] != d.Addr {
			t.Errorf("completion %d is %#x, want %#x", i, completed[i], d.Addr)
		}
	}
	for seq := range uint32(3) {
		check(5000, seq)
	}
}

func TestEveryFrameSentCompletes(t *testing.T) {
	l := newLab(t, labConfig{})
	u := newUMEM(t, 128, 2048)
	// A completion ring this short stops the kernel in the middle of a burst.
	q, s := openQueue(t, u, QueueConfig{Ifindex: l.rx, FillSize: 1, CompletionSize: 16}, SocketConfig{TxSize: 128})
	second, err := q.Open(SocketConfig{TxSize: 4})
	must(t, err)
	closing(t, second)
	var descs []Desc
	for i := range 100 {
		d := Desc{Addr: u.Addr(i) + uint64(i), Len: 80}
		copy(u.Bytes(d.Addr, 80), frame(80, 0, uint32(i)))
		descs = append(descs, d)
	}
	completed := transmit(t, q, s, descs)
	for i, d := range descs {
		if u.Frame(completed[i]) != u.Frame(d.Addr) { // not the address: odd ones come back even
			t.Fatalf("completion %d is %#x, want %#x", i, completed[i], d.Addr)
		}
	}
	// The other end of the veth sees them, in order.
	buf := make([]byte, 2048)
	for i := range 100 {
		pfd := []unix.PollFd{{Fd: int32(l.packet), Events: unix.POLLIN}}
		unix.Poll(pfd, int(patience.Milliseconds()))
		n, err := unix.Read(l.packet, buf)
		if err != nil || !bytes.Equal(buf[:n], frame(80, 0, uint32(i))) {
			t.Fatalf("frame %d: %x, %v", i, buf[:max(n, 0)], err)
		}
	}
	st, err := s.Stats()
	must(t, err)
	if st.Kicks == 0 || st.KickFailures != 0 || st.TxInvalidDescs != 0 {
		t.Errorf("%+v", st)
	}
	// Completions are the queue's: of the second socket's frames too.
	completed = transmit(t, q, second, descs[:10])
	if len(completed) != 10 || u.Frame(completed[9]) != 9 {
		t.Errorf("%d completions of the second socket: %#x", len(completed), completed)
	}
}

func TestInvalidDescriptorIsCountedAndStopsNobody(t *testing.T) {
	l := newLab(t, labConfig{})
	u := newUMEM(t, 8, 2048)
	q, s := openQueue(t, u, QueueConfig{Ifindex: l.rx, FillSize: 1, CompletionSize: 8}, SocketConfig{TxSize: 8})
	s.Send([]Desc{{Addr: 2000, Len: 60}, {Addr: 2048, Len: 60}, {Addr: 4096}, {Addr: 3 * 2048, Len: 60}})
	good := map[uint64]bool{2048: true, 3 * 2048: true}
	for until := time.Now().Add(patience); len(good) > 0; {
		_, err := s.Kick()
		must(t, err)
		done := make([]uint64, 8)
		_, n := q.Exchange(nil, done)
		for _, addr := range done[:n] {
			delete(good, addr) // the bad ones complete too on some kernels
		}
		if time.Now().After(until) {
			t.Fatalf("good frames never completed: %v", good)
		}
	}
	if st, err := s.Stats(); err != nil || st.TxInvalidDescs != 2 {
		t.Errorf("%+v, %v", st, err)
	}
}

func TestKernelErrorsCarryNumbers(t *testing.T) {
	l := newLab(t, labConfig{})
	u := newUMEM(t, 9, 2048)
	cfg := QueueConfig{Ifindex: l.rx, FillSize: 8, CompletionSize: 8, Initial: u.frames(0, 8)}
	sc := SocketConfig{RxSize: 8, TxSize: 8}
	before, maps := countFDs(t), countMaps(t)
	try := func(name string, u *UMEM, change func(*QueueConfig), errno error, words ...string) {
		t.Helper()
		c := cfg
		change(&c)
		_, _, err := u.OpenQueue(c, sc)
		var op *OpError
		if !errors.Is(err, errno) || !errors.As(err, &op) || op.Op != "bind" {
			t.Errorf("%s: %v, want %v of bind", name, err, errno)
			return
		}
		for _, w := range words {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q does not say %q", name, err, w)
			}
		}
	}
	try("no such interface", u, func(c *QueueConfig) { c.Ifindex = 4711 }, unix.ENODEV, "ifindex 4711", "no such interface")
	try("no such queue", u, func(c *QueueConfig) { c.Queue = 9 }, unix.EINVAL, "queue 9", "ethtool -l")
	try("zero-copy on veth", u, func(c *QueueConfig) { c.Mode = ZeroCopy }, unix.EOPNOTSUPP, "Copy or Auto")
	if n := countFDs(t); n != before {
		t.Errorf("%d descriptors before the failures, %d after", before, n)
	}
	if n := countMaps(t); n != maps {
		t.Errorf("%d mappings before the failures, %d after", maps, n)
	}

	cfg.Mode, cfg.Generic = Auto, true
	q, s := openQueue(t, u, cfg, sc) // the frames of the failures are ours again
	if g := q.Granted(); g.ZeroCopy {
		t.Errorf("granted %+v", g)
	}
	cfg.Initial = nil
	try("the queue has a UMEM", newUMEM(t, 8, 2048), func(c *QueueConfig) {}, unix.EBUSY, "another UMEM")

	// The interface goes down under a socket: an error, and no panic.
	dev, err := netlink.LinkByIndex(l.rx)
	must(t, err)
	must(t, netlink.LinkSetDown(dev))
	s.Send([]Desc{{Addr: u.Addr(8), Len: 60}})
	pending, err := s.Kick()
	if !pending || !errors.Is(err, unix.ENETDOWN) || !strings.Contains(err.Error(), "set the interface up") {
		t.Errorf("kick on an interface that is down: pending %v, %v", pending, err)
	}
	if st, err := s.Stats(); err != nil || st.KickFailures != 1 {
		t.Errorf("%+v, %v", st, err)
	}
	must(t, netlink.LinkSetUp(dev))

	must(t, s.Close())
	if _, err := q.Open(sc); !errors.Is(err, ErrClosed) {
		t.Errorf("open on a closed queue: %v", err)
	}
	if _, err := s.Stats(); !errors.Is(err, ErrClosed) {
		t.Errorf("statistics of a closed socket: %v", err)
	}
	must(t, u.Close())
	if _, _, err := u.OpenQueue(cfg, sc); !errors.Is(err, ErrClosed) {
		t.Errorf("open on a closed UMEM: %v", err)
	}
}

func countFDs(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(entries)
}

func countMaps(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	must(t, err)
	return bytes.Count(b, []byte("socket:["))
}

func TestCloseLeavesNothing(t *testing.T) {
	l := newLab(t, labConfig{})
	u := newUMEM(t, 32, 2048)
	cfg := QueueConfig{Ifindex: l.rx, FillSize: 16, CompletionSize: 16}
	sc := SocketConfig{RxSize: 16, TxSize: 16}
	fds, maps := countFDs(t), countMaps(t)
	for round := range 20 {
		cfg.Initial = u.frames(0, 16)
		q, first, err := u.OpenQueue(cfg, sc)
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		second, err := q.Open(sc)
		must(t, err)
		for _, s := range []*Socket{first, second} {
			flags, err := unix.FcntlInt(uintptr(s.FD()), unix.F_GETFD, 0)
			if err != nil || flags&unix.FD_CLOEXEC == 0 {
				t.Errorf("descriptor flags %#x, %v: not close-on-exec", flags, err)
			}
		}
		// The first socket goes, the second one still receives, by the rings
		// that came with the first, and a third one can join.
		l.plug(t, 0, 0, first)
		must(t, l.xsks.Delete(uint32(0)))
		if n := countMaps(t); n != maps+6 {
			t.Errorf("%d mappings for two sockets of a queue, want 6", n-maps)
		}
		must(t, first.Close())
		must(t, first.Close())
		if q.wakeFD != second.FD() {
			t.Errorf("the queue is woken by descriptor %d, want %d", q.wakeFD, second.FD())
		}
		third, err := q.Open(SocketConfig{RxSize: 16})
		must(t, err)
		l.plug(t, 0, 1, second)
		l.plug(t, 0, 2, third)
		for i := range uint32(20) {
			l.send(t, frame(60, byte(1+i%2), i))
			s := []*Socket{second, third}[i%2]
			d := receive(t, s, 1)
			if got := u.Bytes(d[0].Addr, int(d[0].Len)); !bytes.Equal(got, frame(60, byte(1+i%2), i)) {
				t.Fatalf("frame %d: %x", i, got)
			}
			q.Exchange(addrsOf(d), nil)
		}
		if first.Receive(make([]Desc, 1)) != 0 || first.Send(make([]Desc, 1)) != 0 || first.FD() != -1 {
			t.Error("a closed socket receives or sends")
		}
		must(t, second.Close())
		must(t, third.Close())
		if filled, _ := q.Exchange(u.frames(0, 1), nil); filled != 0 {
			t.Error("a closed queue takes frames")
		}
	}
	if n := countFDs(t); n != fds {
		t.Errorf("%d descriptors before, %d after", fds, n)
	}
	if n := countMaps(t); n != maps {
		t.Errorf("%d mappings of sockets before, %d after", maps, n)
	}
	must(t, (*Socket)(nil).Close())
}

// All at once, as a NIC closes them, and each twice. Then the queue is free.
func TestSocketsThatCloseAtTheSameTimeLeaveNothing(t *testing.T) {
	l := newLab(t, labConfig{})
	u := newUMEM(t, 32, 2048)
	cfg := QueueConfig{Ifindex: l.rx, FillSize: 16, CompletionSize: 16}
	sc := SocketConfig{RxSize: 16, TxSize: 16}
	fds, maps := countFDs(t), countMaps(t)
	for round := range 5 {
		cfg.Initial = u.frames(0, 16)
		q, first, err := u.OpenQueue(cfg, sc)
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		sockets := []*Socket{first}
		for range 7 {
			s, err := q.Open(sc)
			must(t, err)
			sockets = append(sockets, s)
		}
		var wg sync.WaitGroup
		for _, s := range slices.Concat(sockets, sockets) {
			wg.Go(func() {
				if err := s.Close(); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if f, m := countFDs(t), countMaps(t); f != fds || m != maps {
			t.Fatalf("round %d: %d descriptors and %d mappings are left", round, f-fds, m-maps)
		}
	}
	must(t, u.Close())
}

func TestCloseWhilePolling(t *testing.T) {
	l := newLab(t, labConfig{})
	u := newUMEM(t, 32, 2048)
	cfg := QueueConfig{Ifindex: l.rx, FillSize: 16, CompletionSize: 16, Initial: u.frames(0, 16)}
	_, s := openQueue(t, u, cfg, SocketConfig{RxSize: 16})
	fd := int32(s.FD())
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	must(t, err)
	defer unix.Close(wake)
	polling, polled := make(chan int), make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		polling <- unix.Gettid()
		for {
			_, err := unix.Poll([]unix.PollFd{{Fd: fd, Events: unix.POLLIN}, {Fd: int32(wake), Events: unix.POLLIN}}, -1)
			if err != unix.EINTR {
				polled <- err
				return
			}
		}
	}()
	tid := <-polling
	waitAsleep(t, tid)
	must(t, s.Close())
	select {
	case err := <-polled:
		t.Errorf("poll returned at Close, %v: the documentation says otherwise", err)
	default:
	}
	_, err = unix.Write(wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	must(t, err)
	must(t, <-polled)
	// With poll gone the socket is, and the queue is free.
	openQueue(t, u, cfg, SocketConfig{RxSize: 16})
}

// waitAsleep waits until a thread of this process sleeps in poll.
func waitAsleep(t *testing.T, tid int) {
	t.Helper()
	for until := time.Now().Add(patience); time.Now().Before(until); time.Sleep(time.Millisecond) {
		b, err := os.ReadFile("/proc/self/task/" + strconv.Itoa(tid) + "/syscall")
		must(t, err)
		if n, _, _ := strings.Cut(string(b), " "); n == strconv.Itoa(unix.SYS_POLL) || n == strconv.Itoa(unix.SYS_PPOLL) {
			return
		}
	}
	t.Fatal("the thread never polls")
}
