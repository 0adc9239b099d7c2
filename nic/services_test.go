// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/clock"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// application makes both ends of a pair. The NIC's must be closed after the NIC: make
// the pair first.
func application(t testing.TB, l hostq.Layout) (*hostq.Pair, *hostq.Host) {
	t.Helper()
	netnstest.NeedRoot(t)
	p, err := hostq.NewPair(hostq.PairConfig{Name: "test", Layout: l})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	dup := func(fd int) int {
		fd, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	memory, doorbell, lanes := p.Descriptors()
	var theirs []int
	for _, fd := range lanes {
		theirs = append(theirs, dup(fd))
	}
	h, err := hostq.OpenHost(p.Layout(), dup(memory), dup(doorbell), theirs)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close() })
	return p, h
}

// hostEvent waits for the application's next event.
func hostEvent(t testing.TB, h *hostq.Host) (e hostq.Event) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Slowness()*10*time.Second)
	defer cancel()
	for !h.Event(&e) {
		if err := h.Wait(ctx, 0); err != nil {
			t.Fatalf("waiting for an event: %v", err)
		}
	}
	return e
}

func stats(t testing.TB, n *nic.NIC) *nic.Stats {
	t.Helper()
	s, err := n.Stats()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestApplicationHearsOfItsMessages(t *testing.T) {
	pair, app := application(t, hostq.Layout{Lanes: 1, Events: 4})
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 2, Workers: 1})
	window := make(hpu.Memory, 1<<16)
	mine := make(chan spin.MessageEvent, 1)
	receives := new(hpu.Receives)
	if err := receives.Post(spin.Receive{Binding: spin.Binding{Window: window, User: uint64(42)}, Tag: 1}); err != nil {
		t.Fatal(err)
	}
	if err := receives.Post(spin.Receive{Binding: spin.Binding{Window: window, User: "text"}, Tag: 2}); err != nil {
		t.Fatal(err)
	}
	if err := receives.Post(spin.Receive{Binding: spin.Binding{Window: window, Events: spin.EventChan(mine)}, Tag: 3}); err != nil {
		t.Fatal(err)
	}
	if err := receives.Post(spin.Receive{Binding: spin.Binding{Window: window, User: uint64(7)}, Ignore: 0xffffffff, Keep: true}); err != nil {
		t.Fatal(err)
	}
	c := run(t, n, nic.ContextSpec{
		Name: "messages", Rulesets: sets(matcher.SLMP()), Binder: receives,
		Resources: hpu.Resources{Host: pair},
		Handlers: hpu.Handlers{Payload: func(h *hpu.HER) spin.Code {
			if h.Message().Number() >= 100 && h.Message().Number() < 200 {
				return spin.Fail
			}
			return spin.Success
		}},
	})
	conn := dialUDP(t, lab, slmp.Port)
	from := conn.LocalAddr().(interface{ AddrPort() netip.AddrPort }).AddrPort()
	send := func(id uint32, size int) { write(t, conn, raw(slmp.SYN|slmp.EOM, id, 0, noise(size))) }
	acked := func(id uint32) {
		t.Helper()
		if a := answer(t, conn); a.ID != id {
			t.Fatalf("acknowledgement of %d, want %d", a.ID, id)
		}
	}
	for id, user := range map[uint32]uint64{1: 42, 2: 0, 9: 7} {
		before := clock.Monotonic()
		send(id, 500)
		acked(id)
		want := hostq.Event{Kind: hostq.MessageEnded, Cause: uint8(spin.Complete), Number: id, Source: from, Length: 500, User: user}
		e := hostEvent(t, app)
		if e.Time < before || e.Time > clock.Monotonic() {
			t.Errorf("ended at %d, sent after %d", e.Time, before)
		}
		e.Time = 0
		if e != want {
			t.Errorf("%+v, want %+v", e, want)
		}
	}
	send(3, 10)
	acked(3)
	if e := nextEvent(t, mine); e.Number != 3 || e.Length != 10 {
		t.Errorf("%+v", e)
	}
	send(100, 10)
	if e := hostEvent(t, app); e.Kind != hostq.MessageFailed || e.Cause != uint8(spin.Failed) || e.Number != 100 || e.User != 7 || e.Text == "" {
		t.Errorf("%+v", e)
	}

	// There is room for four. The fifth is not acknowledged before there is more,
	// and of the one that fails only a marker is left.
	for id := range uint32(4) {
		send(200+id, 10)
		acked(200 + id)
	}
	send(204, 10)
	eventually(t, "its event found no room", func() bool { return pair.Stats().EventsFull > 0 })
	send(101, 10)
	eventually(t, "nor did that of the failed one", func() bool { return pair.Stats().EventsLost == 1 })
	eventually(t, "and the context counts it", func() bool { return c.Stats().EventsLost == 1 })
	conn.SetReadDeadline(time.Now())
	if k, err := conn.Read(make([]byte, 100)); err == nil {
		t.Errorf("%d bytes of an acknowledgement although the application has not been told", k)
	}
	var kinds []hostq.EventKind
	for range 6 {
		e := hostEvent(t, app)
		kinds = append(kinds, e.Kind)
		if e.Kind == hostq.Overflow && e.Lost != 1 {
			t.Errorf("%d lost, want 1", e.Lost)
		}
	}
	acked(204)
	slices.Sort(kinds)
	if want := []hostq.EventKind{1, 1, 1, 1, 1, hostq.Overflow}; !slices.Equal(kinds, want) {
		t.Errorf("events of kinds %v, want %v", kinds, want)
	}
}

// An application that takes no events: whose messages end then hear no more than they
// ask, and are given up in time. A marker says how many events were lost.
func TestApplicationThatTakesNoEvents(t *testing.T) {
	const room, more = 4, 60
	pair, app := application(t, hostq.Layout{Lanes: 1, Events: room})
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 2, Workers: 1})
	c := run(t, n, nic.ContextSpec{Name: "messages", Rulesets: sets(matcher.SLMP()), Resources: hpu.Resources{Host: pair}, Timeout: time.Second})
	conn := dialUDP(t, lab, slmp.Port)
	send := func(id uint32, wait bool) {
		t.Helper()
		write(t, conn, raw(slmp.SYN|slmp.EOM|slmp.Cumulative, id, 0, noise(10)))
		if a := answer(t, conn); a.ID != id || a.Wait != wait {
			t.Fatalf("message %d is answered with %+v", id, a)
		}
	}
	for id := range uint32(room) {
		send(id, false)
	}
	for id := uint32(room); id < room+more; id++ {
		send(id, true)
		send(id, true) // asked again
	}
	full := pair.Stats().EventsFull
	eventually(t, "it is tried again", func() bool { return pair.Stats().EventsFull > full+4 })
	conn.SetReadDeadline(time.Now().Add(time.Millisecond))
	var b [100]byte
	if k, err := conn.Read(b[:]); err == nil {
		t.Errorf("% x came unasked", b[:k])
	}

	eventually(t, "they are given up", func() bool { return messages(t, c).Open == 0 })
	if st := messages(t, c); st.Ended != room || st.Failed != more {
		t.Errorf("%+v", st)
	}
	for id := range uint32(room) {
		if e := hostEvent(t, app); e.Kind != hostq.MessageEnded || e.Number != id {
			t.Errorf("%+v, want the end of message %d", e, id)
		}
	}
	if e := hostEvent(t, app); e.Kind != hostq.Overflow || e.Lost != more {
		t.Errorf("%+v, want %d lost", e, more)
	}
	// What was given up is not acknowledged later.
	write(t, conn, raw(slmp.SYN|slmp.EOM, room, 0, noise(10)))
	eventually(t, "it is dropped", func() bool { return messages(t, c).Dropped[spin.DropDead] == 1 })
	silent(t, conn)
}

func TestApplicationHearsThatItsContextIsStopped(t *testing.T) {
	pair, app := application(t, hostq.Layout{Lanes: 1})
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1, Workers: 1, Limit: 20 * time.Millisecond})
	gate := make(chan struct{})
	c := run(t, n, nic.ContextSpec{
		Name: "stuck", Rulesets: sets(matcher.UDPPort(7)), Resources: hpu.Resources{Host: pair},
		Handlers: handle(func(*hpu.HER) spin.Code { <-gate; return spin.Success }),
	})
	t.Cleanup(func() {
		close(gate)
		idle(t, c)
		eventually(t, "the handler has returned", func() bool { return stats(t, n).Stuck == 0 })
	})
	write(t, dialUDP(t, lab, 7), []byte("x"))
	if e := hostEvent(t, app); e.Kind != hostq.ContextFault || !strings.Contains(e.Text, "20ms") {
		t.Errorf("%+v", e)
	}
	if e := <-n.Events(); e.Kind != spin.HandlerOverrun || e.Name != "stuck" {
		t.Errorf("%v", e)
	}
}

func TestPairNeedsALaneForEachWorker(t *testing.T) {
	pair, _ := application(t, hostq.Layout{Lanes: 3})
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 4, Workers: 2})
	if n.Workers() != 2 || n.HPUs() != 4 {
		t.Errorf("%d workers and %d HPUs, want 2 and 4", n.Workers(), n.HPUs())
	}
	_, err := n.Install(nic.ContextSpec{Name: "c", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(echo), Resources: hpu.Resources{Host: pair}})
	refused(t, err, "3 lanes", "2 workers")
}

func TestInitRunsOnceBeforeTheFirstPacket(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 2})
	broken := errors.New("no luck")
	var inits atomic.Int64
	memory, err := hostq.WindowOn(make([]byte, 8), spin.All)
	if err != nil {
		t.Fatal(err)
	}
	c, err := n.Install(nic.ContextSpec{
		Name: "init", Rulesets: sets(matcher.UDPPort(7)), Resources: hpu.Resources{Memory: memory},
		Handlers: hpu.Handlers{Payload: func(h *hpu.HER) spin.Code {
			if h.Memory()[0] != 42 {
				return spin.Fail
			}
			return echo(h)
		}, Init: func(task *hpu.Task) error {
			if inits.Add(1) == 1 {
				return broken
			}
			task.Memory()[0] = 42
			return nil
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Activate(c); !errors.Is(err, broken) || len(c.Rulesets()) != 0 || stats(t, n).Contexts[0].Active {
		t.Errorf("activated although init fails: %v, rulesets %v", err, c.Rulesets())
	}
	for range 2 {
		for range 2 { // the second does nothing
			if err := n.Activate(c); err != nil {
				t.Fatal(err)
			}
		}
		roundTrip(t, dialUDP(t, lab, 7), []byte("hello"))
		if err := n.Deactivate(c); err != nil {
			t.Fatal(err)
		}
	}
	if k := inits.Load(); k != 2 {
		t.Errorf("init has run %d times, want 2: a failure, and once", k)
	}
}

func TestHostActivatedContext(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{Queues: 1})
	n := open(t, lab, nic.Config{HPUs: 2, Ring: 64})
	window := make(hpu.Memory, 10_000)
	copy(window, noise(len(window)))
	events := make(chan spin.MessageEvent, 4)
	var mu sync.Mutex
	var got []byte
	var words [4]uint64
	spec := nic.ContextSpec{
		Name: "host", HostActivated: true, Events: events,
		Handlers: hpu.Handlers{Payload: func(h *hpu.HER) spin.Code {
			mu.Lock()
			defer mu.Unlock()
			words = h.Message().Words()
			for b := range h.Payload() {
				got = append(got, b...)
			}
			return spin.Success
		}},
	}
	c, err := n.Install(spec)
	if err != nil {
		t.Fatal(err)
	}
	order := hpu.Trigger{Words: [4]uint64{1, 2, 3, 4}, Window: window, Offset: 100, Length: 5000, Slice: 1000}
	if err := n.Trigger(c, order); !errors.Is(err, nic.ErrInactive) {
		t.Errorf("triggered before it is active: %v", err)
	}
	if err := n.Activate(c); err != nil {
		t.Fatal(err)
	}
	if err := n.Trigger(c, order); err != nil {
		t.Fatal(err)
	}
	if e := nextEvent(t, events); e.Cause != spin.Complete || e.Length != 5000 || e.Source.IsValid() {
		t.Errorf("%+v", e)
	}
	mu.Lock()
	if !bytes.Equal(got, window[100:5100]) || words != order.Words {
		t.Errorf("%d bytes, or others; words %v", len(got), words)
	}
	mu.Unlock()
	// Others have all of the ring: such a context needs no credit.
	other := run(t, n, nic.ContextSpec{Name: "other", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(echo), Credits: 64})
	if s := stats(t, n); s.Contexts[0].Credits != 0 || s.Contexts[1].Credits != 64 || !s.Contexts[0].Active {
		t.Errorf("%+v", s.Contexts)
	}
	if err := n.Trigger(other, order); err == nil {
		t.Error("a context with packets was triggered")
	}
	if err := n.Deactivate(c); err != nil {
		t.Fatal(err)
	}
	if err := n.Trigger(c, order); !errors.Is(err, nic.ErrInactive) {
		t.Errorf("triggered when it is no longer active: %v", err)
	}
	if err := n.Remove(c); err != nil {
		t.Fatal(err)
	}
	if err := n.Trigger(c, order); !errors.Is(err, nic.ErrRemoved) {
		t.Errorf("triggered when it is no longer there: %v", err)
	}
	for _, tc := range []struct {
		name   string
		change func(*nic.ContextSpec)
	}{
		{"rulesets", func(s *nic.ContextSpec) { s.Rulesets = sets(matcher.UDPPort(9)) }},
		{"format", func(s *nic.ContextSpec) { s.Format = matcher.FormatByName("slmp") }},
		{"credits", func(s *nic.ContextSpec) { s.Credits = 8 }},
		{"overload", func(s *nic.ContextSpec) { s.Overload = nic.OverloadSpills }},
		{"policy", func(s *nic.ContextSpec) { s.Policy = nic.BlockedRR }},
	} {
		bad := spec
		tc.change(&bad)
		if _, err := n.Install(bad); err == nil {
			t.Errorf("installed with %s", tc.name)
		}
	}
}

func TestDeactivatedContextKeepsItsMessages(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 2})
	events := make(chan spin.MessageEvent, 4)
	c := run(t, n, nic.ContextSpec{Name: "slmp", Rulesets: sets(matcher.SLMP()), Events: events, Handlers: handle(nil)})
	conn := dialUDP(t, lab, slmp.Port)
	write(t, conn, raw(slmp.SYN, 1, 0, noise(100)))
	answer(t, conn)
	if err := n.Deactivate(c); err != nil {
		t.Fatal(err)
	}
	if s := stats(t, n).Contexts[0]; s.Active || len(s.Rulesets) != 0 || s.Messages.Open != 1 {
		t.Errorf("%+v", s)
	}
	noPorts := snmp(t, lab.NIC.NS, "Udp", "NoPorts")
	write(t, conn, raw(slmp.SYN|slmp.EOM, 1, 100, noise(50)))
	eventually(t, "the stack has the packet", func() bool { return snmp(t, lab.NIC.NS, "Udp", "NoPorts") > noPorts })
	if err := n.Activate(c); err != nil {
		t.Fatal(err)
	}
	conn.Read(make([]byte, 1)) // what the stack has said
	write(t, conn, raw(slmp.SYN|slmp.EOM, 1, 100, noise(50)))
	if e := nextEvent(t, events); e.Cause != spin.Complete || e.Length != 150 || e.Missing != 0 {
		t.Errorf("%+v", e)
	}
}

// Whoever has to wait for handlers keeps nobody else waiting.
func TestOthersGoOnWhileAContextDrains(t *testing.T) {
	for _, tc := range []struct {
		name  string
		drain func(*nic.NIC, *nic.Context) error
	}{{"remove", (*nic.NIC).Remove}, {"deactivate", (*nic.NIC).Deactivate}, {"close", func(n *nic.NIC, c *nic.Context) error {
		// Which waits for whoever is at it.
		err := make(chan error, 1)
		go func() { err <- n.Deactivate(c) }()
		for len(c.Rulesets()) > 0 {
			time.Sleep(time.Millisecond)
		}
		return errors.Join(n.Close(), <-err)
	}}} {
		t.Run(tc.name, func(t *testing.T) {
			lab := netnstest.Temp(t, netns.LabConfig{Queues: 1})
			n := open(t, lab, nic.Config{HPUs: 2, Workers: 2, Limit: time.Minute})
			gate, entered := make(chan struct{}), make(chan struct{})
			c := run(t, n, nic.ContextSpec{
				Name: "slow", Rulesets: sets(matcher.UDPPort(7)), CoreMask: 1,
				Handlers: handle(func(*hpu.HER) spin.Code { close(entered); <-gate; return spin.Success }),
			})
			write(t, dialUDP(t, lab, 7), []byte("x"))
			<-entered
			done := make(chan error, 1)
			go func() { done <- tc.drain(n, c) }()
			eventually(t, "the rulesets are gone", func() bool { return len(c.Rulesets()) == 0 })
			if tc.name != "close" {
				if s := stats(t, n).Contexts[0]; s.Active || s.InFlight != 1 {
					t.Errorf("meanwhile: %+v", s)
				}
				other := run(t, n, nic.ContextSpec{Name: "other", Rulesets: sets(matcher.UDPPort(8)), CoreMask: 2, Handlers: handle(echo)})
				if other.ID() == c.ID() {
					t.Error("the number is another's already")
				}
				roundTrip(t, dialUDP(t, lab, 8), []byte("hello"))
			}
			select {
			case err := <-done:
				t.Fatalf("it did not wait: %v", err)
			default:
			}
			close(gate)
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}

func TestDeactivateGivesUpOnKeptPackets(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1})
	n.SetRemoveTime(100 * time.Millisecond)
	kept := make(chan *hpu.Kept, 1)
	c := run(t, n, nic.ContextSpec{Name: "keep", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(func(h *hpu.HER) spin.Code {
		k, err := h.Keep()
		if err != nil {
			return spin.Fail
		}
		kept <- k
		return spin.Success
	})})
	write(t, dialUDP(t, lab, 7), []byte("x"))
	k := <-kept
	refused(t, n.Deactivate(c), `"keep"`, "1 buffer")
	if stats(t, n).Contexts[0].Active {
		t.Error("it is active")
	}
	k.Release()
	idle(t, c)
}

func TestOverloadedContextSpills(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{Queues: 1})
	n := open(t, lab, nic.Config{HPUs: 1, Ring: 64, Limit: time.Minute})
	gate := make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(open)
	hold := handle(func(*hpu.HER) spin.Code { <-gate; return spin.Success })
	spills := run(t, n, nic.ContextSpec{Name: "spills", Rulesets: sets(matcher.UDPPort(7)), Credits: 16, Overload: nic.OverloadSpills, Handlers: hold})
	drops := run(t, n, nic.ContextSpec{Name: "drops", Rulesets: sets(matcher.UDPPort(8)), Credits: 16, Handlers: hold})
	server, none := listenUDP(t, lab.NIC, 7), listenUDP(t, lab.NIC, 8)
	to7, to8 := dialUDP(t, lab, 7), dialUDP(t, lab, 8)
	for i := range 40 {
		write(t, to7, fmt.Appendf(nil, "datagram %d", i))
		write(t, to8, []byte("x"))
	}
	for i := 16; i < 40; i++ {
		expect(t, server, fmt.Appendf(nil, "datagram %d", i))
	}
	eventually(t, "all are counted", func() bool { return stats(t, n).Contexts[1].Refused == 24 })
	s := stats(t, n)
	for i, want := range []struct{ refused, spilled uint64 }{{0, 24}, {24, 0}} {
		if c := s.Contexts[i]; c.Refused != want.refused || c.Spilled != want.spilled || c.InFlight != 16 {
			t.Errorf("%s: %d refused, %d spilled, %d in flight, want %d, %d and 16", c.Name, c.Refused, c.Spilled, c.InFlight, want.refused, want.spilled)
		}
	}
	p := s.Program
	if p.Spilled != 24 || p.Refused != 24 || p.Seen != p.Passed+p.Redirected+p.Refused+p.Spilled+p.Failed+p.Malformed+p.Oversize {
		t.Errorf("%+v", p)
	}
	none.SetReadDeadline(time.Now())
	if k, err := none.Read(make([]byte, 10)); err == nil {
		t.Errorf("the stack has %d bytes of what was to be dropped", k)
	}
	open()
	idle(t, spills)
	idle(t, drops)
	if k := spills.Stats().Handled; k != 16 {
		t.Errorf("%d handled, want 16", k)
	}
}

func TestHandlerSendsWhereNobodyHasAsked(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1})
	to := netip.AddrPortFrom(lab.Host.Addr.Addr(), 4000)
	var unresolved atomic.Int64
	run(t, n, nic.ContextSpec{
		Name: "timer", Rulesets: sets(matcher.UDPPort(7)), Resources: hpu.Resources{Timer: 5 * time.Millisecond},
		Handlers: hpu.Handlers{Payload: echo, Timer: func(task *hpu.Task) spin.Code {
			b, err := task.SendUDP(3000, to, 5)
			if errors.Is(err, spin.ErrUnresolved) {
				unresolved.Add(1)
				return spin.Success
			} else if err != nil {
				return spin.Fail
			}
			copy(b, "hello")
			return spin.Success
		}},
	})
	conn := listenUDP(t, lab.Host, 4000)
	expect(t, conn, []byte("hello"))
	if unresolved.Load() == 0 {
		t.Error("the neighbour was known from the start: this shows nothing")
	}
}

// The first datagram of a peer is answered: the way back is in it.
func TestHandlerAnswersWhoIsNew(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1})
	run(t, n, nic.ContextSpec{Name: "answer", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(func(h *hpu.HER) spin.Code {
		hdr := h.Headers()
		_, err := h.Task.Resolve(netip.AddrFrom4(hdr.IPv4.Src()))
		if !errors.Is(err, spin.ErrUnresolved) {
			t.Errorf("the peer was known from the start: this shows nothing: %v", err)
		}
		b, err := h.SendUDP(7, netip.AddrPortFrom(netip.AddrFrom4(hdr.IPv4.Src()), hdr.UDP.SrcPort()), 5)
		if err != nil {
			t.Error(err)
			return spin.Drop
		}
		copy(b, "hello")
		return spin.Success
	})})
	conn := listenUDP(t, lab.Host, 4000)
	if _, err := conn.WriteTo([]byte("who?"), net.UDPAddrFromAddrPort(netip.AddrPortFrom(lab.NIC.Addr.Addr(), 7))); err != nil {
		t.Fatal(err)
	}
	expect(t, conn, []byte("hello"))
}

func TestSharesAndPoliciesAreChecked(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1})
	for _, tc := range []struct {
		change func(*nic.ContextSpec)
		names  []string
	}{
		{func(s *nic.ContextSpec) { s.Share = -1 }, []string{"share: -1", "1 to 1000"}},
		{func(s *nic.ContextSpec) { s.Share = 1001 }, []string{"share: 1001", "1 to 1000"}},
		{func(s *nic.ContextSpec) { s.Overload = 2 }, []string{"2", "OverloadSpills"}},
		{func(s *nic.ContextSpec) { s.Resources.Timer = time.Second }, []string{"timer"}},
	} {
		spec := nic.ContextSpec{Name: "c", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(echo)}
		tc.change(&spec)
		_, err := n.Install(spec)
		refused(t, err, tc.names...)
	}
	if s := stats(t, n); len(s.Contexts) != 0 {
		t.Errorf("%+v", s.Contexts)
	}
}
