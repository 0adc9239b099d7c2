// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/netns/testbed"
)

// What handlers in eBPF need of the kernel, a mechanism a test, the least demanding
// first: a program calls another that comes and goes, while packets flow. If a kernel
// cannot do one of these, nothing else is worth a try, so this file is the first by name.
func TestMechanismsAreTestedFirst(t *testing.T) {
	all, err := filepath.Glob("*_test.go") // sorted, as the tests are
	if err != nil {
		t.Fatal(err)
	}
	if len(all) > 0 && all[0] != "first_test.go" { // none where only the compiled tests are
		t.Errorf("the tests of %s are before these", all[0])
	}
}

// riskyFile is where risky writes, beside the tests or in the folder that XSPIN_RISKY names:
// not among temporary files, which may be in memory.
const riskyFile = "risky-test"

// risky writes the name of the test to a file, and has it on the disk before the test goes
// on. So if the machine stops, it says where; of a test that ends, nothing is left.
func risky(t *testing.T) {
	t.Helper()
	dir := cmp.Or(os.Getenv("XSPIN_RISKY"), ".")
	name := filepath.Join(dir, riskyFile)
	onDisk := func(name string) {
		t.Helper()
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := f.Sync(); err != nil && !errors.Is(err, unix.EINVAL) { // no disk
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(name, []byte(t.Name()+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	onDisk(name)
	onDisk(dir) // it has the name of the file
	t.Cleanup(func() { os.Remove(name) })
}

func TestRiskyTestsLeaveTheirName(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("XSPIN_RISKY", dir)
	t.Run("risk", func(t *testing.T) {
		risky(t)
		if b, err := os.ReadFile(filepath.Join(dir, riskyFile)); err != nil || string(b) != t.Name()+"\n" {
			t.Errorf("the file says %q, %v", b, err)
		}
	})
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("%v is left, %v", left, err)
	}
}

const handled = 3 // the number of the context in these tests

// inKernel is a table that brings datagrams to port 7 to handlers in eBPF.
func inKernel(t *testing.T, in *Ingress) {
	t.Helper()
	table := &matcher.Table{Generation: 1, Entries: map[int]matcher.Entry{
		9: {Ruleset: matcher.UDPPort(7), Context: handled, Format: matcher.FormatByName("packet")},
	}}
	if err := in.Publish(table, map[uint16]Delivery{handled: {Kernel: true, Hook: hookOf(t)}}); err != nil {
		t.Fatal(err)
	}
}

// onLab attaches an ingress program to the NIC's end of a lab.
func onLab(t *testing.T) (lab *netns.Lab, in *Ingress) {
	t.Helper()
	lab = netnstest.Temp(t, netns.LabConfig{})
	inside(t, lab.NIC, func(nic *net.Interface) {
		var err error
		if in, err = Load(config(nic, Native)); err != nil {
			t.Fatal(err)
		}
		if hookOf(t) == TC {
			err = in.AttachTC(Last)
		} else {
			err = in.AttachXDP()
		}
		if err != nil {
			t.Fatal(err)
		}
	})
	t.Cleanup(func() {
		if err := in.Close(); err != nil {
			t.Error(err)
		}
	})
	return lab, in
}

// withClient is onLab with handlers for UDP port 7, and a client at the other end.
func withClient(t *testing.T) (lab *netns.Lab, in *Ingress, client *net.UDPConn) {
	t.Helper()
	lab, in = onLab(t)
	inKernel(t, in)
	return lab, in, clientOf(t, lab)
}

func (in *Ingress) mustStats(t *testing.T) Stats {
	t.Helper()
	s, err := in.Stats()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// send sends datagrams of two bytes; a refusal of one before, told by ICMP, is no matter.
func sendTo(t *testing.T, client *net.UDPConn, n int) {
	t.Helper()
	for sent := 0; sent < n; {
		if _, err := client.Write([]byte("hi")); err == nil {
			sent++
		}
	}
}

func soon(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(testenv.Slowness() * 20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// The ingress program has subprograms, and both take frames in fragments.
func TestIngressCallsHandlers(t *testing.T) { atHooks(t, testIngressCallsHandlers) }

func testIngressCallsHandlers(t *testing.T) {
	risky(t)
	_, in, client := withClient(t)
	sendTo(t, client, 10)
	soon(t, "10 frames find no program", func() bool { return in.mustStats(t).Failed == 10 })

	h := builtin(t, "noop", nil)
	if err := in.SetHandlers(handled, h); err != nil {
		t.Fatal(err)
	}
	sendTo(t, client, 100)
	soon(t, "100 frames are handled", func() bool { return h.Stats().Handled == 100 })
	if s := addUp(t, in); s.Kernel[handled] != 100 || s.Failed != 10 || s.Matched[9] != 110 {
		t.Errorf("%d to the handlers, %d failed, %d matched; want 100, 10 and 110", s.Kernel[handled], s.Failed, s.Matched[9])
	}

	for range 2 {
		if err := in.ClearHandlers(handled); err != nil {
			t.Fatal(err)
		}
	}
	sendTo(t, client, 5)
	soon(t, "5 frames find no program", func() bool { return in.mustStats(t).Failed == 15 })
	if n := h.Stats().Handled; n != 100 {
		t.Errorf("%d handled, want the 100 of before", n)
	}
}

// Each frame meets one of the programs, or none, and is counted there.
func TestHandlersAreReplacedUnderLoad(t *testing.T) { atHooks(t, testHandlersAreReplacedUnderLoad) }

func testHandlersAreReplacedUnderLoad(t *testing.T) {
	risky(t)
	_, in, client := withClient(t)
	a, b := builtin(t, "noop", nil), builtin(t, "count", nil)
	var stop atomic.Bool
	var sent uint64
	var wg sync.WaitGroup
	wg.Go(func() {
		for !stop.Load() {
			if _, err := client.Write([]byte("hi")); err == nil {
				sent++
			}
		}
	})
	changes := 0
	for end := time.Now().Add(time.Second); time.Now().Before(end); changes++ {
		var err error
		switch changes % 3 {
		case 0:
			err = in.SetHandlers(handled, a)
		case 1:
			err = in.SetHandlers(handled, b)
		case 2:
			err = in.ClearHandlers(handled)
		}
		if err != nil {
			t.Error(err)
		}
		time.Sleep(time.Millisecond)
	}
	stop.Store(true)
	wg.Wait()
	soon(t, "all frames are counted", func() bool {
		s := in.mustStats(t)
		return s.Matched[9] == sent && s.Kernel[handled]+s.Failed == sent
	})
	na, nb := a.Stats().Handled, b.Stats().Handled
	if s := addUp(t, in); na+nb != s.Kernel[handled] || na == 0 || nb == 0 || s.Failed == 0 {
		t.Errorf("%d and %d handled, %d without a program, of %d; the ingress program says %d", na, nb, s.Failed, sent, s.Kernel[handled])
	}
	t.Logf("%d changes, %d frames", changes, sent)
}

// What comes out of the ingress program is what comes out of the handlers by themselves,
// and a frame that the handlers cannot have in one piece is the stack's.
func TestRunsGoThroughTheTailCall(t *testing.T) {
	netnstest.NeedRoot(t)
	risky(t)
	in := &Ingress{cfg: Config{Mode: Native, HPUs: 1, Queues: 1, BufferSize: 2000, MaxBuffers: 1}, mode: Native}
	if err := in.load(bpf.IngressProgXspinIngress); err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	inKernel(t, in)
	h, alone := builtin(t, "echo-udp", nil), builtin(t, "echo-udp", nil)
	if err := in.SetHandlers(handled, h); err != nil {
		t.Fatal(err)
	}
	through := func(frame []byte) (Action, []byte) {
		opts := &ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)), Repeat: 1}
		ret, err := in.objs.XspinIngress.Run(opts)
		if err != nil {
			t.Fatal(err)
		}
		return Action(ret), opts.DataOut
	}
	for _, n := range []int{0, 1, 64, 1400} {
		frame := datagramOf(n)
		action, out := through(frame)
		if want := run(t, alone, frame); action != want.Action || action != ActionSend || !bytes.Equal(out, want.Frame) {
			t.Errorf("%d bytes: %v % x\nwant %v % x", n, action, out[:42], want.Action, want.Frame[:42])
		}
	}
	before := in.mustStats(t)
	if action, out := through(ping(10)); action != ActionToStack || !bytes.Equal(out, ping(10)) {
		t.Errorf("not matched: %v % x", action, out)
	}
	long := datagramOf(9000)
	if action, out := through(long); action != ActionToStack || !bytes.Equal(out, long) {
		t.Errorf("in fragments: %v", action)
	}
	if s := addUp(t, in); s.Passed != before.Passed+1 || s.Oversize != before.Oversize+1 || s.Kernel[handled] != 4 {
		t.Errorf("%d passed, %d oversize, %d to handlers; want 1, 1 and 4", s.Passed, s.Oversize, s.Kernel[handled])
	}
	if n := h.Stats().Sent; n != 4 {
		t.Errorf("%d sent, want 4", n)
	}
}

// The other end takes what XDP sends if it has a program, too.
func TestHandlersAnswerFromXDP(t *testing.T) {
	risky(t)
	lab, in, client := withClient(t)
	inside(t, lab.Host, func(host *net.Interface) { foreign(t, host, Native) })
	h := builtin(t, "echo-udp", nil)
	if err := in.SetHandlers(handled, h); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 2000)
	for i := range 200 {
		msg := bytes.Repeat([]byte{byte(i)}, 1+7*i)
		if _, err := client.Write(msg); err != nil {
			t.Fatal(err)
		}
		client.SetReadDeadline(time.Now().Add(testenv.Slowness() * 5 * time.Second))
		if n, err := client.Read(buf); err != nil || !bytes.Equal(buf[:n], msg) {
			t.Fatalf("%d bytes sent, %d came back: %v", len(msg), n, err)
		}
	}
	if s := h.Stats(); s.Handled != 200 || s.Sent != 200 {
		t.Errorf("%d handled, %d sent; want 200", s.Handled, s.Sent)
	}
}

// What handlers of messages need besides, each by itself: events, answers of another length,
// and agreement between CPUs, and with Go, about words, free slots and what has ended.

// mechanism is a program of instructions.
func mechanism(t *testing.T, ins ...asm.Instruction) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.XDP, License: "GPL", Instructions: ins})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// atomically changes *dst with src. cilium/ebpf 0.22 encodes an instruction made in Go
// without its atomic operation (those from objects keep it), so it is put into the constant.
func atomically(op asm.AtomicOp, dst, src asm.Register) asm.Instruction {
	ins := op.Mem(dst, src, asm.DWord, 0)
	ins.Constant = int64(op >> 8)
	return ins
}

// mapLike is a map, of keys of 4 bytes if it has keys.
func mapLike(t *testing.T, spec ebpf.MapSpec) *ebpf.Map {
	t.Helper()
	if spec.Type != ebpf.RingBuf && spec.Type != ebpf.Queue {
		spec.KeySize = 4
	}
	m, err := ebpf.NewMap(&spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// runOnce is a program's verdict on a frame, and what it made of it.
func runOnce(p *ebpf.Program, frame []byte) (Action, []byte, error) {
	opts := &ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+64), Repeat: 1}
	ret, err := p.Run(opts)
	return Action(ret), opts.DataOut, err
}

// attachTo attaches a program to an end of a lab.
func attachTo(t *testing.T, end netns.Port, p *ebpf.Program) {
	t.Helper()
	inside(t, end, func(iface *net.Interface) {
		l, err := link.AttachXDP(link.XDPOptions{Program: p, Interface: iface.Index, Flags: link.XDPDriverMode})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
	})
}

// clientOf sends to UDP port 7 at the NIC's end of a lab.
func clientOf(t *testing.T, lab *netns.Lab) (client *net.UDPConn) {
	t.Helper()
	if err := lab.Host.NS.Do(func() (err error) {
		client, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(lab.NIC.Addr.Addr(), 7)))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

// onTwoCPUs runs fn on two CPUs at the same time, so many times on each.
func onTwoCPUs(t *testing.T, times int, fn func() error) {
	t.Helper()
	errs := make(chan error, 2)
	for cpu := range 2 {
		go func() {
			errs <- testbed.OnCPU(cpu%runtime.NumCPU(), func() error {
				for range times {
					if err := fn(); err != nil {
						return err
					}
				}
				return nil
			})
		}()
	}
	for range 2 {
		if err := <-errs; err != nil {
			t.Fatal(err)
		}
	}
}

// Records come out in order until the ring is full, which the program is told; then, of
// frames from the wire, whoever sent them, there is one each.
func TestRingBufferFromXDPAndRuns(t *testing.T) {
	risky(t)
	lab := netnstest.Temp(t, netns.LabConfig{Queues: 1}) // on two, records might overtake
	ring := mapLike(t, ebpf.MapSpec{Type: ebpf.RingBuf, MaxEntries: 1 << 16})
	count := mapLike(t, ebpf.MapSpec{Type: ebpf.Array, ValueSize: 8, MaxEntries: 1})
	p := mechanism(t,
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.LoadMapPtr(asm.R1, count.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "full"),
		asm.Mov.Imm(asm.R1, 1),
		atomically(asm.FetchAdd, asm.R0, asm.R1),
		asm.StoreMem(asm.RFP, -16, asm.R1, asm.DWord),
		asm.LoadMapPtr(asm.R1, ring.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -16),
		asm.Mov.Imm(asm.R3, 8),
		asm.Mov.Imm(asm.R4, 0),
		asm.FnRingbufOutput.Call(),
		asm.JNE.Imm(asm.R0, 0, "full"),
		asm.Mov.Imm(asm.R0, int32(ActionToStack)),
		asm.Return(),
		asm.Mov.Imm(asm.R0, int32(ActionDrop)).WithSymbol("full"),
		asm.Return(),
	)
	r, err := ringbuf.NewReader(ring)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	next := uint64(0)
	read := func() (n int) {
		for r.AvailableBytes() > 0 {
			rec, err := r.Read()
			if err != nil {
				t.Fatal(err)
			}
			if got := binary.NativeEndian.Uint64(rec.RawSample); len(rec.RawSample) != 8 || got != next {
				t.Fatalf("record %x, want %d", rec.RawSample, next)
			}
			next++
			n++
		}
		return n
	}
	filled := 0
	for ; ; filled++ {
		action, _, err := runOnce(p, ping(10))
		if err != nil {
			t.Fatal(err)
		}
		if action == ActionDrop {
			break
		}
		if action != ActionToStack || filled > 1<<16 {
			t.Fatalf("record %d: %v", filled, action)
		}
	}
	if n := read(); n != filled || n == 0 {
		t.Errorf("%d records are read, %d were written", n, filled)
	}
	next++ // that one found no room
	attachTo(t, lab.NIC, p)
	const frames = 100
	sendTo(t, clientOf(t, lab), frames)
	live := 0
	soon(t, "a record for each frame", func() bool { live += read(); return live >= frames })
}

// A frame from a socket is cut and sent back: it arrives as cut.
func TestTailIsAdjustedThenSent(t *testing.T) {
	risky(t)
	lab := netnstest.Temp(t, netns.LabConfig{})
	const header, sent, cut = 14 + 20 + 8, 200, 30
	p := mechanism(t,
		asm.LoadMem(asm.R2, asm.R1, 0, asm.Word), // data
		asm.LoadMem(asm.R3, asm.R1, 4, asm.Word), // data_end
		asm.Add.Imm(asm.R2, header+sent),
		asm.JNE.Reg(asm.R2, asm.R3, "other"),
		asm.Mov.Imm(asm.R2, -cut),
		asm.FnXdpAdjustTail.Call(),
		asm.JNE.Imm(asm.R0, 0, "failed"),
		asm.Mov.Imm(asm.R0, int32(ActionSend)),
		asm.Return(),
		asm.Mov.Imm(asm.R0, int32(ActionToStack)).WithSymbol("other"),
		asm.Return(),
		asm.Mov.Imm(asm.R0, int32(ActionDrop)).WithSymbol("failed"),
		asm.Return(),
	)
	frame := datagramOf(sent)
	if action, out, err := runOnce(p, frame); err != nil || action != ActionSend || !bytes.Equal(out, frame[:header+sent-cut]) {
		t.Errorf("run: %v, %d bytes, %v", action, len(out), err)
	}
	if action, out, err := runOnce(p, ping(10)); err != nil || action != ActionToStack || !bytes.Equal(out, ping(10)) {
		t.Errorf("another frame: %v, %d bytes, %v", action, len(out), err)
	}

	attachTo(t, lab.NIC, p)
	sock := -1
	inside(t, lab.Host, func(host *net.Interface) {
		foreign(t, host, Native) // without, XDP_TX arrives nowhere
		var err error
		all := uint16(unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8) // big-endian
		if sock, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, int(all)); err != nil {
			t.Fatal(err)
		}
		if err := unix.Bind(sock, &unix.SockaddrLinklayer{Protocol: all, Ifindex: host.Index}); err != nil {
			t.Fatal(err)
		}
	})
	defer unix.Close(sock)
	client := clientOf(t, lab)
	msg := bytes.Repeat([]byte("tail"), sent/4)
	const frames = 50
	for range frames {
		if _, err := client.Write(msg); err != nil {
			t.Fatal(err)
		}
	}
	back := 0
	buf := make([]byte, 2000)
	soon(t, "all come back", func() bool {
		for {
			n, _, err := unix.Recvfrom(sock, buf, 0)
			if err != nil {
				return back == frames
			}
			if n == header+sent-cut {
				if back++; !bytes.Equal(buf[header:n], msg[:sent-cut]) {
					t.Fatalf("came back: % x", buf[:n])
				}
			}
		}
	})
}

// A word that Go has mapped is counted up by compare-and-swap from there and from runs of a
// program, on two CPUs: none is lost, none counted twice.
func TestWordIsSwappedFromGoAndRuns(t *testing.T) {
	netnstest.NeedRoot(t)
	risky(t)
	m := mapLike(t, ebpf.MapSpec{Type: ebpf.Array, ValueSize: 8, MaxEntries: 1, Flags: unix.BPF_F_MMAPABLE})
	mem, err := unix.Mmap(m.FD(), 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	word := (*atomic.Uint64)(unsafe.Pointer(unsafe.SliceData(mem)))
	p := mechanism(t,
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.LoadMapPtr(asm.R1, m.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "lost"),
		asm.Mov.Reg(asm.R6, asm.R0),
		asm.LoadMem(asm.R0, asm.R6, 0, asm.DWord),
		asm.Mov.Reg(asm.R7, asm.R0),
		asm.Mov.Reg(asm.R2, asm.R0),
		asm.Add.Imm(asm.R2, 1),
		atomically(asm.CmpXchg, asm.R6, asm.R2), // with R0, which gets what was there
		asm.JNE.Reg(asm.R0, asm.R7, "lost"),
		asm.Mov.Imm(asm.R0, int32(ActionToStack)),
		asm.Return(),
		asm.Mov.Imm(asm.R0, int32(ActionDrop)).WithSymbol("lost"),
		asm.Return(),
	)
	frame := ping(10)
	const times, ours = 10_000, 20
	var theirs, won, lost atomic.Uint64
	onTwoCPUs(t, times, func() error {
		action, _, err := runOnce(p, frame)
		if err != nil {
			return err
		}
		if action == ActionToStack {
			won.Add(1)
			theirs.Add(1)
		} else {
			lost.Add(1)
		}
		for range ours {
			if v := word.Load(); word.CompareAndSwap(v, v+1) {
				won.Add(1)
			} else {
				lost.Add(1)
			}
		}
		return nil
	})
	if n := word.Load(); n != won.Load() || won.Load()+lost.Load() != 2*times*(1+ours) || theirs.Load() < times {
		t.Errorf("the word is %d; %d were counted, %d of them by programs, %d were not", n, won.Load(), theirs.Load(), lost.Load())
	}
	t.Logf("%d counted, %d lost the race", won.Load(), lost.Load())
}

// Two CPUs take slots from a queue, have each for themselves, note it in a map that forgets
// the oldest, and give the slot back: none is had twice or lost, and the map stays small.
func TestQueueAndLRUOnTwoCPUs(t *testing.T) {
	netnstest.NeedRoot(t)
	risky(t)
	const slots, remembered = 4, 128
	free := mapLike(t, ebpf.MapSpec{Type: ebpf.Queue, ValueSize: 4, MaxEntries: slots})
	owners := mapLike(t, ebpf.MapSpec{Type: ebpf.Array, ValueSize: 8, MaxEntries: slots})
	ended := mapLike(t, ebpf.MapSpec{Type: ebpf.LRUHash, ValueSize: 4, MaxEntries: remembered})
	for i := range uint32(slots) {
		if err := free.Put(nil, i); err != nil {
			t.Fatal(err)
		}
	}
	const empty, twice, unpushed, full, none = 10, 11, 12, 13, 14
	fail := func(at string, code int32) asm.Instructions {
		return asm.Instructions{asm.Mov.Imm(asm.R0, code).WithSymbol(at), asm.Return()}
	}
	ins := asm.Instructions{
		asm.LoadMapPtr(asm.R1, free.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapPopElem.Call(),
		asm.JNE.Imm(asm.R0, 0, "empty"),
		asm.LoadMapPtr(asm.R1, owners.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "none"),
		asm.Mov.Reg(asm.R6, asm.R0),
		asm.Mov.Imm(asm.R1, 1),
		atomically(asm.FetchAdd, asm.R6, asm.R1),
		asm.JNE.Imm(asm.R1, 0, "twice"),
		asm.FnGetPrandomU32.Call(), // a key, which is the value, too
		asm.StoreMem(asm.RFP, -8, asm.R0, asm.Word),
		asm.StoreMem(asm.RFP, -12, asm.R0, asm.Word),
		asm.LoadMapPtr(asm.R1, ended.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -8),
		asm.Mov.Reg(asm.R3, asm.RFP),
		asm.Add.Imm(asm.R3, -12),
		asm.Mov.Imm(asm.R4, 0),
		asm.FnMapUpdateElem.Call(),
		asm.Mov.Reg(asm.R7, asm.R0),
		asm.Mov.Imm(asm.R1, -1),
		atomically(asm.AddAtomic, asm.R6, asm.R1),
		asm.LoadMapPtr(asm.R1, free.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnMapPushElem.Call(),
		asm.JNE.Imm(asm.R0, 0, "unpushed"),
		asm.JNE.Imm(asm.R7, 0, "full"),
		asm.Mov.Imm(asm.R0, int32(ActionToStack)),
		asm.Return(),
	}
	ins = slices.Concat(ins, fail("empty", empty), fail("twice", twice), fail("unpushed", unpushed), fail("full", full), fail("none", none))
	p := mechanism(t, ins...)
	frame := ping(10)
	var results [16]atomic.Uint64
	const times = 20_000
	onTwoCPUs(t, times, func() error {
		action, _, err := runOnce(p, frame)
		results[action&15].Add(1)
		return err
	})
	if done := results[ActionToStack].Load(); done != 2*times {
		t.Errorf("of %d: no slot %d, no such slot %d, a slot that another had %d, not given back %d, not remembered %d", 2*times,
			results[empty].Load(), results[none].Load(), results[twice].Load(), results[unpushed].Load(), results[full].Load())
	}
	var all, left []uint32
	for i := range uint32(slots) {
		all = append(all, i)
	}
	for v := uint32(0); free.LookupAndDelete(nil, &v) == nil; {
		left = append(left, v)
	}
	slices.Sort(left)
	if !slices.Equal(left, all) {
		t.Errorf("the slots at the end: %v", left)
	}
	n := 0
	var k, v uint32
	entries := ended.Iterate()
	for ; entries.Next(&k, &v); n++ {
		if k != v {
			t.Errorf("%#x has the value of %#x", k, v)
		}
	}
	if err := entries.Err(); err != nil || n < 2 || n > remembered {
		t.Errorf("%d are remembered, want 2 to %d: %v", n, remembered, err)
	}
}
