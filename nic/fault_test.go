// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// event waits for the NIC's next event.
func event(t testing.TB, n *nic.NIC) spin.Fault {
	t.Helper()
	select {
	case e := <-n.Events():
		return e
	case <-time.After(testenv.Slowness() * 10 * time.Second):
		t.Fatal("no event")
	}
	panic("unreachable")
}

func TestPanicOfHandlerIsContained(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1})
	c := run(t, n, nic.ContextSpec{Name: "fragile", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(func(h *hpu.HER) spin.Code {
		code := echo(h) // asks for a send
		if b, err := h.SendNew(h.Len()); err == nil {
			copy(b, h.Head())
		}
		switch h.Head()[42] {
		case 'p':
			panic("of the handler's own")
		case 'i':
			return spin.Code(h.Head()[h.Len()]) // index out of range
		case 'f':
			return spin.Fail
		}
		return code
	})})
	conn := dialUDP(t, lab, 7)
	const rounds = 40
	for i := range rounds {
		for _, kind := range []string{"panic", "index", "fail"} {
			write(t, conn, fmt.Appendf(nil, "%s %d", kind, i)) // nothing comes of them
		}
		msg := fmt.Appendf(nil, "good %d", i)
		write(t, conn, msg)
		expect(t, conn, msg)
		expect(t, conn, msg)
	}
	eventually(t, "all counted", func() bool {
		s := c.Stats()
		return s.Panics == 2*rounds && s.Failed == rounds && s.Handled == 2*rounds && s.Sent == 2*rounds
	})
	idle(t, c)
	// One of many is an event, which says how many there were.
	count := map[spin.FaultKind]uint64{}
	for count[spin.HandlerPanic] < 2*rounds || count[spin.HandlerFailed] < rounds {
		e := event(t, n)
		if count[e.Kind] += e.More; e.Detail != "" {
			count[e.Kind]++
		}
		if e.Name != "fragile" || e.Context != uint16(c.ID()) || e.HPU != 0 {
			t.Errorf("event of something else: %v", e)
		}
		if e.Kind == spin.HandlerPanic && e.Detail != "" && !strings.Contains(e.Detail, "fault_test.go") {
			t.Errorf("a panic's event does not tell where: %s", e.Detail)
		}
	}
	if count[spin.HandlerPanic] != 2*rounds || count[spin.HandlerFailed] != rounds {
		t.Errorf("the events are of %v", count)
	}
}

// A handler that never returns costs its context and a thread, nothing else.
func TestEndlessHandlerIsGivenUp(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	p := spawn(t, lab, "forever")
	p.expect(t, "ready")
	before := snmp(t, lab.NIC.NS, "Icmp", "InEchos")
	ping(t, lab, "-c", "10", "-i", "0.002")
	conn := dialUDP(t, lab, 9)
	for range 5 {
		write(t, conn, []byte("stop here"))
	}
	line := p.expect(t, "event:")
	if !strings.Contains(line, spin.HandlerOverrun.String()) || !strings.Contains(line, "(stuck)") {
		t.Errorf("the event is %q", line)
	}
	for range 5 {
		write(t, conn, []byte("stopped"))
	}
	ping(t, lab, "-c", "100", "-i", "0.002")
	if k := snmp(t, lab.NIC.NS, "Icmp", "InEchos") - before; k != 0 {
		t.Errorf("the kernel answered %d pings", k)
	}
	p.stdin.Close()
	if line := p.expect(t, "closed:"); !strings.Contains(line, "1 handlers are stuck") {
		t.Errorf("Close says %q", line)
	}
	if err := p.Wait(); err != nil {
		t.Errorf("the child ended with %v", err)
	}
	ping(t, lab, "-c", "1")
	if k := snmp(t, lab.NIC.NS, "Icmp", "InEchos") - before; k != 1 {
		t.Errorf("the kernel answered %d of 1 pings after Close", k)
	}
}

// A handler may return after it was given up: what it held comes back once, and
// what it still writes does not reach anybody else's packet.
func TestHandlerReturnsAfterItWasGivenUp(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{MTU: 9000, Queues: 1})
	n := open(t, lab, nic.Config{HPUs: 1, Ring: 64, Limit: 50 * time.Millisecond})
	for _, ask := range []struct {
		name string
		what func(h *hpu.HER)
	}{
		{"nothing", func(*hpu.HER) {}},
		{"a send", func(h *hpu.HER) { h.Send() }},
		{"frames of its own", func(h *hpu.HER) { h.SendNew(100); h.SendNew(100) }},
		{"to keep it", func(h *hpu.HER) {
			if k, err := h.Keep(); err == nil {
				k.Release()
			}
		}},
	} {
		t.Run("having asked for "+ask.name, func(t *testing.T) {
			gate, entered := make(chan struct{}), make(chan struct{})
			returned := make(chan string, 1)
			var stuck atomic.Bool
			c := run(t, n, nic.ContextSpec{
				Name: "slow", Rulesets: sets(matcher.UDPPort(9)), Credits: 24, Format: matcher.FormatByName("flow"), Messages: 16,
				Handlers: handle(func(h *hpu.HER) spin.Code {
					if stuck.Swap(true) {
						return spin.Success
					}
					close(entered)
					<-gate
					last := h.Segment(h.Segments() - 1)
					returned <- string(last[len(last)-4:])
					for i := range h.Segments() {
						clear(h.Segment(i))
					}
					ask.what(h)
					return spin.Success
				}),
			})
			other := run(t, n, nic.ContextSpec{Name: "other", Rulesets: sets(matcher.UDPPort(7)), Credits: 24, Handlers: handle(echoAll)})
			defer n.Remove(other)
			conn := dialUDP(t, lab, 7)
			write(t, dialUDP(t, lab, 9), append(make([]byte, 8000), "mine"...))
			<-entered
			for event(t, n).Kind != spin.HandlerOverrun {
			}
			// The HPU goes on with other packets: its memory of the batch is new.
			for i := range 50 {
				roundTrip(t, conn, []byte(strings.Repeat(fmt.Sprintf("%07d ", i), 1000)))
			}
			if k := c.InFlight(); k != 3 {
				t.Errorf("%d buffers are out, want the 3 that the handler has", k)
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				for i := range 100 { // while the handler writes
					roundTrip(t, conn, []byte(strings.Repeat(fmt.Sprintf("%07d ", i), 1000)))
				}
			}()
			close(gate)
			if got := <-returned; got != "mine" {
				t.Errorf("the handler's packet ends with %q", got)
			}
			<-done
			eventually(t, "all buffers back", func() bool { return c.InFlight() == 0 })
			if err := n.Remove(c); err != nil {
				t.Error(err)
			}
			for i := range 100 { // every frame of the queue
				roundTrip(t, conn, []byte(strings.Repeat(fmt.Sprintf("%07d ", i), 1000)))
			}
			if s := c.Stats(); s.Overruns != 1 {
				t.Errorf("%d overruns", s.Overruns)
			}
			idle(t, other)
		})
	}
	if st, err := n.SocketStats(); err != nil || st[0].RxDropped+st[0].RxRingFull+st[0].TxInvalidDescs != 0 {
		t.Errorf("the kernel's counters: %+v, %v", st, err)
	}
}

// More packets than the ring has room for, let in by a credit that is too large:
// what the kernel dropped is found out, and every credit comes back.
func TestLostFramesGiveTheirCreditBack(t *testing.T) {
	for _, tc := range []struct {
		name, format string
		hpus         int
	}{
		{"one HPU, by packet", "packet", 1},
		{"several HPUs, by packet", "packet", 3},
		{"one HPU, by message", "flow", 1},
		{"several HPUs, by message", "flow", 3},
	} {
		t.Run(tc.name, func(t *testing.T) {
			lab := netnstest.Temp(t, netns.LabConfig{})
			n := open(t, lab, nic.Config{Mode: loader.Native, HPUs: tc.hpus, Ring: 64, Limit: time.Minute})
			var gate atomic.Pointer[chan struct{}]
			shut := make(chan struct{})
			gate.Store(&shut)
			c := run(t, n, nic.ContextSpec{
				Name: "flooded", Rulesets: sets(matcher.UDPPort(7)),
				Format: matcher.FormatByName(tc.format), Messages: 64,
				Handlers: handle(func(h *hpu.HER) spin.Code {
					<-*gate.Load()
					return echo(h)
				}),
			})
			credit := c.SetCredit(1 << 20)
			lost := func() (sum uint64) {
				st, err := n.SocketStats()
				if err != nil {
					t.Fatal(err)
				}
				for _, s := range st {
					sum += s.RxDropped + s.RxRingFull
				}
				return sum
			}
			sent := uint64(0)
			for range 10 { // flows
				conn := dialUDP(t, lab, 7)
				for range 150 {
					write(t, conn, []byte("flood"))
					sent++
				}
			}
			eventually(t, "the program has seen all", func() bool { return program(t, n).Redirected == sent })
			if lost() == 0 {
				t.Fatal("the kernel lost nothing: the test shows nothing")
			}
			c.SetCredit(credit)
			close(shut)
			eventually(t, "every buffer handled or known to be lost", func() bool {
				return c.InFlight() == 0 && c.Stats().Handled+c.Stats().Lost == sent
			})
			if got, want := c.Stats().Lost, lost(); got != want {
				t.Errorf("%d buffers counted as lost, the kernel lost %d", got, want)
			}
			eventually(t, "no bucket held", func() bool { return c.HeldBuckets() == 0 })
			conn := dialUDP(t, lab, 7)
			for i := range 300 {
				roundTrip(t, conn, fmt.Appendf(nil, "afterwards %d", i))
			}
			idle(t, c)
			if got, want := c.Stats().Lost, lost(); got != want {
				t.Errorf("afterwards %d buffers counted as lost, the kernel lost %d", got, want)
			}
			if err := n.Remove(c); err != nil {
				t.Error(err)
			}
		})
	}
}
