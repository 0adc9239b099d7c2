// SPDX-License-Identifier: Apache-2.0

package hostq

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/spin"
)

// A role is what the test binary does when it is started as another process. Its
// descriptors begin at 3.
type role struct {
	Name   string
	Layout Layout
	Spin   time.Duration
	Mode   int
	CPU    int
}

const roleEnv = "XSPIN_HOSTQ_ROLE"

var roles = map[string]func(*role) error{
	"host": playHost, "silent": playSilent, "nic": playNIC, "scribbler": playScribbler, "litmus": playLitmus,
}

// PlayRole plays a role, if the process was started for one.
func PlayRole() {
	s := os.Getenv(roleEnv)
	if s == "" {
		return
	}
	var r role
	err := json.Unmarshal([]byte(s), &r)
	if err == nil {
		go func() { // the test has gone
			_, _ = io.Copy(io.Discard, os.Stdin)
			os.Exit(3)
		}()
		err = roles[r.Name](&r)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "role %s: %v\n", r.Name, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func (r *role) open() (*Host, error) {
	var lanes []int
	for i := range r.Layout.Lanes {
		lanes = append(lanes, 5+i)
	}
	return OpenHost(r.Layout, 3, 4, lanes)
}

type player struct {
	t     testing.TB
	cmd   *exec.Cmd
	lines *bufio.Scanner
}

// play starts a process for a role, as a user.
func play(t testing.TB, r role, uid uint32, fds ...int) *player {
	t.Helper()
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleEnv+"="+string(text))
	cmd.Stderr = os.Stderr
	if uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	}
	for _, fd := range dup(t, fds...) {
		f := os.NewFile(uintptr(fd), "")
		defer f.Close()
		cmd.ExtraFiles = append(cmd.ExtraFiles, f)
	}
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &player{t, cmd, bufio.NewScanner(out)}
	t.Cleanup(p.kill)
	p.hear("ready")
	return p
}

// hear waits for a line.
func (p *player) hear(want string) {
	p.t.Helper()
	if !p.lines.Scan() || p.lines.Text() != want {
		p.t.Fatalf("the other process said %q: want %q (%v)", p.lines.Text(), want, p.cmd.Wait())
	}
}

// kill kills it, and waits until it is gone.
func (p *player) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

func say(s string) { fmt.Println(s) }

func newTestPair(t testing.TB, cfg PairConfig) *Pair {
	t.Helper()
	netnstest.NeedRoot(t)
	cfg.Lanes = max(cfg.Lanes, 1)
	p, err := NewPair(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func (p *Pair) fds() []int {
	m, b, lanes := p.Descriptors()
	return append([]int{m, b}, lanes...)
}

// The NIC writes the number of an event to a place in a window before it sends the
// event. There are more places than events fit into the ring.
const windowSize = 256 * 4096

func windowPlace(seq uint64) int { return int(seq%256)*4096 + int(seq%4000) }

// playHost answers requests with their payload reversed, counts events in counter 0, waits
// for counter 1 to be 1000, and ends when it is thrown out.
func playHost(r *role) error {
	h, err := r.open()
	if err != nil {
		return err
	}
	window, err := OpenMemory(5+r.Layout.Lanes, windowSize)
	if err != nil {
		return err
	}
	counted := make(chan error, 1)
	go func() {
		err := h.WaitCounter(context.Background(), 1, 1000)
		h.Counter(2).Set(1)
		counted <- err
	}()
	say("ready")
	var c Call
	var e Event
	for seq := uint64(0); ; {
		if err := h.Wait(context.Background(), r.Spin); errors.Is(err, ErrDetached) {
			if err := <-counted; err != nil {
				return err
			}
			say(fmt.Sprintf("thrown out after %d events", seq))
			return h.Close()
		} else if err != nil {
			return err
		}
		for h.Event(&e) {
			if e.User != seq {
				return fmt.Errorf("event %d instead of %d", e.User, seq)
			}
			// What was written before the event is there.
			if v := binary.NativeEndian.Uint64(window.Bytes()[windowPlace(seq):]); v != seq {
				return fmt.Errorf("event %d: the window has %d", seq, v)
			}
			seq++
			h.Counter(0).Add(1)
		}
		for h.Request(&c) {
			for i, j := 0, len(c.Payload)-1; i < j; i, j = i+1, j-1 {
				c.Payload[i], c.Payload[j] = c.Payload[j], c.Payload[i]
			}
			if err := h.Respond(&c, int32(c.Tag), c.Payload); err != nil {
				return err
			}
		}
	}
}

// sleeper polls a lane as an HPU does: it sleeps in epoll.
type sleeper struct{ ep int }

func newSleeper(t testing.TB, p *Pair, lane int) *sleeper {
	t.Helper()
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(ep) })
	if err := unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, p.Doorbell(lane), &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET&0xffffffff}); err != nil {
		t.Fatal(err)
	}
	return &sleeper{ep}
}

// wait returns whether there was an edge before the time, in ms, was up.
func (s *sleeper) wait(ms int) bool {
	var events [1]unix.EpollEvent
	for {
		n, err := unix.EpollWait(s.ep, events[:], ms)
		if err != unix.EINTR {
			return n > 0
		}
	}
}

func TestTwoProcesses(t *testing.T) {
	for _, c := range []struct {
		name   string
		spin   time.Duration
		sleeps bool // the NIC
		uid    uint32
	}{
		{"both poll", time.Hour, false, 0},
		{"the host sleeps", 0, false, 0},
		{"the NIC sleeps", time.Hour, true, 0},
		{"both sleep, the host is nobody", 0, true, 65534},
		{"the host spins a while, and is nobody", 20 * time.Microsecond, true, 65534},
	} {
		t.Run(c.name, func(t *testing.T) {
			const n = 5000
			p := newTestPair(t, PairConfig{Layout: Layout{Lanes: 2, Requests: 64, Events: 64, Payload: 512}})
			mem, err := NewMemory("window", windowSize)
			if err != nil {
				t.Fatal(err)
			}
			defer mem.Close()
			window, err := mem.Window(0, windowSize, spin.Write)
			if err != nil {
				t.Fatal(err)
			}
			o := play(t, role{Name: "host", Layout: p.Layout(), Spin: c.spin}, c.uid, append(p.fds(), mem.FD())...)
			var wg sync.WaitGroup
			for lane := range 2 {
				s := newSleeper(t, p, lane)
				wg.Go(func() {
					rng := rand.New(rand.NewPCG(1, uint64(lane)))
					buf := make([]byte, 512)
					asked, answered := 0, 0
					for answered < n {
						for asked < n && asked-answered < 1+rng.IntN(8) {
							payload := buf[:rng.IntN(len(buf)+1)]
							for i := range payload {
								payload[i] = byte(asked + i)
							}
							if _, err := p.Request(lane, &Request{Tag: uint64(asked), Reply: true, Payload: payload}, len(payload)); err != nil {
								t.Error(err)
								return
							}
							asked++
						}
						k := p.Poll(lane, 4, func(r *Response) {
							ok := r.Err == nil && r.Status == int32(r.Tag) && len(r.Payload) == r.User
							for i := range r.Payload {
								ok = ok && r.Payload[len(r.Payload)-1-i] == byte(int(r.Tag)+i)
							}
							if !ok {
								t.Errorf("response %+v", r)
							}
						})
						answered += k
						if k == 0 && c.sleeps && p.Arm(lane) {
							if !s.wait(20000) {
								t.Error("no wakeup in 20 s")
								return
							}
							p.Disarm(lane)
						}
					}
				})
			}
			wg.Go(func() {
				var b [8]byte
				for i := uint64(0); i < n; i++ {
					binary.NativeEndian.PutUint64(b[:], i)
					if _, err := window.WriteAt(b[:], int64(windowPlace(i))); err != nil {
						t.Error(err)
					}
					for !p.Event(&Event{Kind: MessageEnded, User: i}) {
						runtime.Gosched()
					}
				}
			})
			wg.Wait()
			for range 1000 {
				p.Counter(1).Add(1)
			}
			for p.Counter(0).Get() < n || p.Counter(2).Get() < 1 {
				runtime.Gosched()
			}
			p.Detach()
			o.hear(fmt.Sprintf("thrown out after %d events", n))
			if err := o.cmd.Wait(); err != nil {
				t.Error(err)
			}
			if s := p.Stats(); s.Bogus+s.Late != 0 || s.Broken || s.Responses != 2*n || s.Outstanding != 0 {
				t.Errorf("stats %+v", s)
			}
		})
	}
}

// playSilent takes what there is and answers nothing.
func playSilent(r *role) error {
	h, err := r.open()
	if err != nil {
		return err
	}
	say("ready")
	for {
		if err := h.Wait(context.Background(), r.Spin); err != nil {
			return err
		}
		var c Call
		for h.Request(&c) {
			h.Done(&c)
		}
		for h.Event(&Event{}) {
		}
	}
}

func TestHostIsKilled(t *testing.T) {
	for _, spin := range []time.Duration{0, time.Hour} {
		p := newTestPair(t, PairConfig{Layout: Layout{Lanes: 2}})
		o := play(t, role{Name: "silent", Layout: p.Layout(), Spin: spin}, 65534, p.fds()...)
		s := newSleeper(t, p, 1)
		for i := range 5 {
			ask(t, p, 1, "", i)
		}
		for p.requestRing.held() > 0 && spin == 0 { // it has taken them, and sleeps
			runtime.Gosched()
		}
		if !p.Arm(1) {
			t.Fatal("not armed")
		}
		o.kill()
		if s.wait(0) {
			t.Error("an edge of a process that ended: the NIC has the other end of the doorbell too")
		}
		p.Event(&Event{}) // to nobody
		p.Detach()
		if !s.wait(10000) {
			t.Fatal("the end does not wake the lane")
		}
		p.Disarm(1)
		rs := poll(p, 1)
		if len(rs) != 5 {
			t.Errorf("%d responses", len(rs))
		}
		for _, r := range rs {
			if r.Err != ErrDetached {
				t.Errorf("response %+v", r)
			}
		}
		if !p.Arm(1) || s.wait(0) {
			t.Error("the lane does not sleep any more")
		}
	}
}

// playNIC makes a pair, sends its descriptors to the socket at 3, and tells of an
// event.
func playNIC(*role) error {
	p, err := NewPair(PairConfig{Layout: Layout{Lanes: 1}})
	if err != nil {
		return err
	}
	p.Event(&Event{Kind: MessageEnded})
	say("ready")
	text, _ := json.Marshal(p.Layout())
	if err := unix.Sendmsg(3, text, unix.UnixRights(p.fds()...), nil, 0); err != nil {
		return err
	}
	select {}
}

func TestNICIsKilled(t *testing.T) {
	netnstest.NeedRoot(t)
	for name, wait := range map[string]func(h *Host) error{
		"asleep":               func(h *Host) error { return h.Wait(context.Background(), 0) },
		"spinning":             func(h *Host) error { return h.Wait(context.Background(), time.Hour) },
		"asleep for a counter": func(h *Host) error { return h.WaitCounter(context.Background(), 3, 1) },
	} {
		t.Run(name, func(t *testing.T) {
			socks, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(socks[0])
			o := play(t, role{Name: "nic"}, 0, socks[1])
			unix.Close(socks[1])
			text, oob := make([]byte, 1000), make([]byte, 1000)
			n, oobn, _, _, err := unix.Recvmsg(socks[0], text, oob, unix.MSG_CMSG_CLOEXEC)
			if err != nil {
				t.Fatal(err)
			}
			var l Layout
			if err := json.Unmarshal(text[:n], &l); err != nil {
				t.Fatal(err)
			}
			msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
			if err != nil {
				t.Fatal(err)
			}
			fds, err := unix.ParseUnixRights(&msgs[0])
			if err != nil {
				t.Fatal(err)
			}
			h, err := OpenHost(l, fds[0], fds[1], fds[2:])
			if err != nil {
				t.Fatal(err)
			}
			defer h.Close()
			if err := h.Wait(t.Context(), 0); err != nil || !h.Event(&Event{}) {
				t.Fatal("no event", err)
			}
			done := make(chan error)
			go func() { done <- wait(h) }()
			if strings.HasPrefix(name, "asleep") {
				for asleep := false; !asleep; runtime.Gosched() {
					h.mu.Lock()
					asleep = h.leader
					h.mu.Unlock()
				}
			}
			o.kill()
			if err := <-done; err != ErrDetached {
				t.Errorf("%v", err)
			}
			if err := wait(h); err != ErrDetached {
				t.Errorf("once more: %v", err)
			}
		})
	}
}

// Modes of the scribbler.
const (
	everything = iota
	plausible  // small numbers
	contents   // what does not break a pair at once; and a host answers as it should
	modes
)

// playScribbler writes over all that it can reach.
func playScribbler(r *role) error {
	m, err := OpenMemory(3, r.Layout.Size())
	if err != nil {
		return err
	}
	var lanes []int
	for i := range r.Layout.Lanes {
		lanes = append(lanes, 5+i)
	}
	h, err := newHost(r.Layout, m.Bytes(), 4, lanes)
	if err != nil {
		return err
	}
	say("ready")
	scribble(h, m.Bytes(), r.Mode, func() bool {
		for _, fd := range lanes {
			_, _ = unix.Write(fd, make([]byte, rand.IntN(100)))
		}
		return true
	})
	return nil
}

// scribble writes as long as more says so, which is asked now and then.
func scribble(h *Host, mem []byte, mode int, more func() bool) {
	l := h.layout
	keep := map[int]bool{}
	if mode == contents {
		place := func(p unsafe.Pointer) int { return int(uintptr(p)-uintptr(unsafe.Pointer(&mem[0]))) / 8 }
		keep[place(unsafe.Pointer(&h.shared.events))] = true
		keep[place(unsafe.Pointer(&h.shared.requests))] = true
		keep[place(unsafe.Pointer(&h.ended))] = true
		rings := []*ring{&h.eventRing.ring, &h.requestRing.ring}
		for i := range h.lanes {
			rings = append(rings, &h.lanes[i].ring)
			keep[place(unsafe.Pointer(h.lanes[i].head))] = true
		}
		for _, r := range rings {
			for pos := range r.slots() {
				keep[place(unsafe.Pointer(r.lap(pos)))] = true
			}
		}
	}
	words := len(mem) / 8
	for i := 0; ; i++ {
		if i%1000 == 0 && !more() {
			return
		}
		if mode == contents {
			var c Call
			h.Event(&Event{})
			if h.Request(&c) {
				if rand.IntN(2) == 0 {
					c.id ^= 1 << rand.IntN(64)
				}
				_ = h.Respond(&c, 0, c.Payload)
				h.Done(&c)
			}
			h.eventRing.flush()
			h.requestRing.flush()
		}
		at := rand.IntN(words)
		if keep[at] {
			continue
		}
		v := rand.Uint64()
		if mode == plausible {
			v = rand.Uint64N(4) | rand.Uint64N(4)<<32
			if rand.IntN(2) == 0 {
				v |= rand.Uint64N(uint64(l.Lanes)) << idLaneShift
			}
		}
		atomic.StoreUint64((*uint64)(unsafe.Pointer(&mem[at*8])), v)
	}
}

// trial uses a pair whose other side is hostile, from several threads, and checks what
// must hold whatever that does.
func trial(t *testing.T, p *Pair, d time.Duration) {
	t.Helper()
	const most = 5
	l := p.Layout()
	type asked struct{ answers atomic.Int32 }
	var mu sync.Mutex
	all := map[*asked]bool{}
	check := func(lane int) func(*Response) {
		return func(r *Response) {
			a := r.User.(*asked)
			if a.answers.Add(1) != 1 {
				t.Error("a request with two answers")
			}
			if len(r.Payload) > l.Payload || idLane(r.ID) != lane || r.Tag != 5 {
				t.Errorf("response %+v in lane %d", r, lane)
			}
		}
	}
	end := time.Now().Add(d)
	var wg sync.WaitGroup
	for lane := range l.Lanes {
		f := check(lane)
		wg.Go(func() {
			payload := make([]byte, l.Payload)
			type open struct {
				id uint64
				a  *asked
			}
			var opens []open
			cancel := func(o open) {
				if p.Cancel(o.id) && o.a.answers.Add(1) != 1 {
					t.Error("cancelled what has an answer")
				}
			}
			for time.Now().Before(end) {
				p.Event(&Event{Kind: MessageEnded, Text: "text"})
				for range 3 {
					a := new(asked)
					mu.Lock()
					all[a] = true
					mu.Unlock()
					id, err := p.Request(lane, &Request{Tag: 5, Reply: true, Payload: payload}, a)
					if err != nil {
						if a.answers.Add(1) != 1 {
							t.Error("an answer to what was refused")
						}
						for _, o := range opens { // those that got no answer, or a wrong one
							cancel(o)
						}
						opens = opens[:0]
					} else if rand.IntN(8) == 0 {
						cancel(open{id, a})
					} else {
						opens = append(opens, open{id, a})
					}
				}
				if n := p.Poll(lane, most, f); n > most {
					t.Errorf("%d responses at a time", n)
				}
				if p.Arm(lane) {
					p.Disarm(lane)
				}
				p.Counter(lane).Add(1)
				s := p.Stats()
				if n := p.Outstanding(lane); n < 0 || n > p.cfg.Outstanding {
					t.Errorf("%d outstanding", n)
				}
				if s.Waiting < 0 || s.Waiting > l.Events+l.Requests || s.Outstanding < 0 {
					t.Errorf("stats %+v", s)
				}
			}
		})
	}
	wg.Wait()
	p.Detach()
	for lane := range l.Lanes {
		for p.Outstanding(lane) > 0 {
			p.Poll(lane, most, check(lane))
		}
	}
	for a := range all {
		if n := a.answers.Load(); n != 1 {
			t.Fatalf("a request with %d answers", n)
		}
	}
}

func TestHostileProcess(t *testing.T) {
	d := 400 * time.Millisecond
	// Somebody else's, all the time.
	good := newTestPair(t, PairConfig{Layout: Layout{Lanes: 1, Requests: 16}})
	mem, err := NewMemory("window", windowSize)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	play(t, role{Name: "host", Layout: good.Layout()}, 65534, append(good.fds(), mem.FD())...)
	stop := make(chan bool)
	var wg sync.WaitGroup
	wg.Go(func() {
		payload, seq := make([]byte, 1500), uint64(0)
		for {
			select {
			case <-stop:
				return
			default:
			}
			seq++
			for i := range payload {
				payload[i] = byte(uint64(i) * seq)
			}
			ask(t, good, 0, string(payload), nil)
			for good.Poll(0, 1, func(r *Response) {
				for i := range r.Payload {
					if r.Payload[len(payload)-1-i] != payload[i] {
						t.Error("a neighbour's data has changed")
						return
					}
				}
			}) == 0 {
				runtime.Gosched()
			}
		}
	})
	for mode := range modes {
		for range 2 {
			p := newTestPair(t, PairConfig{Layout: Layout{Lanes: 2, Requests: 16, Events: 8, Payload: 100}})
			o := play(t, role{Name: "scribbler", Layout: p.Layout(), Mode: mode}, 65534, p.fds()...)
			trial(t, p, d)
			o.kill()
			t.Logf("mode %d: %+v: %v", mode, p.Stats(), p.Err())
		}
	}
	close(stop)
	wg.Wait()
	if s := good.Stats(); s.Bogus+s.Late != 0 || s.Broken {
		t.Errorf("the neighbour's stats %+v", s)
	}
}

// The same in one process, with many pairs: each breaks soon.
func TestScribbling(t *testing.T) {
	for i := range 150 {
		cfg := PairConfig{Layout: Layout{Lanes: 2, Requests: 4, Events: 2, Payload: 40}}
		if err := cfg.fill(); err != nil {
			t.Fatal(err)
		}
		// Not of Go's: the race detector would be right.
		mem, err := unix.Mmap(-1, 0, int(cfg.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANON)
		if err != nil {
			t.Fatal(err)
		}
		p, err := newPair(cfg, mem)
		if err != nil {
			t.Fatal(err)
		}
		_, doorbell, lanes := p.Descriptors()
		h, err := newHost(cfg.Layout, mem, dup(t, doorbell)[0], dup(t, lanes...))
		if err != nil {
			t.Fatal(err)
		}
		var over atomic.Bool
		var wg sync.WaitGroup
		wg.Go(func() { scribble(h, mem, i%modes, func() bool { return !over.Load() }) })
		trial(t, p, 5*time.Millisecond)
		over.Store(true)
		wg.Wait()
		if err := errors.Join(h.Close(), p.Close(), unix.Munmap(mem)); err != nil {
			t.Fatal(err)
		}
	}
}

// A hostile NIC does not have the application die either.
func TestHostileNIC(t *testing.T) {
	for i := range 150 {
		cfg := PairConfig{Layout: Layout{Lanes: 2, Requests: 4, Events: 2, Payload: 40}}
		p, h := both(t, cfg)
		mem := unsafe.Slice((*byte)(unsafe.Pointer(p.shared)), p.cfg.Size())
		rng := rand.New(rand.NewPCG(uint64(i), 0))
		for range 2000 {
			at := rng.IntN(len(mem)/8) * 8
			v := rng.Uint64() >> rng.IntN(64)
			if rng.IntN(4) > 0 { // the laps, mostly
				at = int(uintptr(unsafe.Pointer(h.requestRing.lap(h.requestRing.next.Load()))) - uintptr(unsafe.Pointer(p.shared)))
				v = uint64(h.requestRing.unpublished(h.requestRing.next.Load())+1) | rng.Uint64N(60)<<32 | rng.Uint64N(2)<<63
			}
			binary.NativeEndian.PutUint64(mem[at:], v)
			var c Call
			var e Event
			h.Event(&e)
			if h.Request(&c) {
				if len(c.Payload) > 40 || cap(c.Payload) > 40 {
					t.Fatalf("payload of %d bytes", len(c.Payload))
				}
				_ = h.Respond(&c, 0, c.Payload)
				h.Done(&c)
			}
			_ = h.Arm()
			h.Disarm()
			h.Counter(3).Add(1)
		}
	}
}

func TestOpenHostRefuses(t *testing.T) {
	p := newTestPair(t, PairConfig{Layout: Layout{Lanes: 1, Events: 16, Requests: 16, Payload: 64}})
	m, b, lanes := p.Descriptors()
	small, err := NewMemory("small", 100)
	if err != nil {
		t.Fatal(err)
	}
	defer small.Close()
	l := p.Layout()
	other, wrong, huge := l, l, l
	other.Events, wrong.Events, huge.Requests = 8, 3, 1<<12
	for _, c := range []struct {
		name          string
		l             Layout
		mem, doorbell int
		lanes         []int
		ok            bool
	}{
		{"right", l, m, b, lanes, true},
		{"another layout", other, m, b, lanes, false},
		{"impossible layout", wrong, m, b, lanes, false},
		{"layout larger than the memory", huge, m, b, lanes, false},
		{"memory of something else", l, small.FD(), b, lanes, false},
		{"memory that is a socket", l, b, b, lanes, false},
		{"doorbell that is the memory", l, m, m, lanes, false},
		{"doorbell that is a lane's", l, m, lanes[0], lanes, false},
		{"lane that is the doorbell", l, m, b, []int{b}, false},
		{"lane that is the memory", l, m, b, []int{m}, false},
		{"no lane", l, m, b, nil, false},
		{"a lane more", l, m, b, []int{lanes[0], lanes[0]}, false},
	} {
		before := descriptors(t)
		h, err := OpenHost(c.l, dup(t, c.mem)[0], dup(t, c.doorbell)[0], dup(t, c.lanes...))
		if (err == nil) != c.ok {
			t.Errorf("%s: %v", c.name, err)
		}
		if h != nil {
			h.Close()
		} else {
			t.Logf("%s: %v", c.name, err)
		}
		if after := descriptors(t); after != before {
			t.Errorf("%s: %d descriptors, and then %d", c.name, before, after)
		}
	}
}

func descriptors(t testing.TB) int {
	t.Helper()
	es, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(es)
}

// mappings counts those of BPF maps.
func mappings(t testing.TB) int {
	t.Helper()
	text, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Count(text, []byte("bpf-map"))
}

func TestNothingLeaks(t *testing.T) {
	netnstest.NeedRoot(t)
	n := 1000
	if testing.Short() {
		n = 50
	}
	fds, maps := descriptors(t), mappings(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for i := range n {
		p, err := NewPair(PairConfig{Layout: Layout{Lanes: 2, Events: 16, Requests: 16, Payload: 64}})
		if err != nil {
			t.Fatal(err)
		}
		dups := dup(t, p.fds()...)
		h, err := OpenHost(p.Layout(), dups[0], dups[1], dups[2:])
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 && mappings(t) != maps+2 {
			t.Fatal("the mappings of BPF maps have another name here")
		}
		p.Event(&Event{})
		if err := h.Wait(ctx, 0); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(h.Close(), p.Close(), p.Close()); err != nil {
			t.Fatal(err)
		}
	}
	if f, m := descriptors(t), mappings(t); f != fds || m != maps {
		t.Errorf("%d descriptors and %d mappings, and then %d and %d", fds, maps, f, m)
	}
}
