// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// floodPing pings the NIC's end as fast as it answers, until the test ends.
func floodPing(t testing.TB, lab *netns.Lab) {
	t.Helper()
	cmd := lab.Host.NS.Command(context.Background(), "ping", "-f", "-q", lab.NIC.Addr.Addr().String())
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
}

func TestRemovedContextRunsNoHandlerAnyMore(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 4})
	floodPing(t, lab)
	var runs atomic.Int64
	for round := range 25 {
		// All there is of buckets: the next round needs them back.
		c := run(t, n, nic.ContextSpec{
			Name: fmt.Sprintf("round %d", round), Rulesets: sets(matcher.ICMPEcho()),
			Format: matcher.FormatByName("flow"), Messages: nic.MaxBuckets,
			Handlers: handle(func(h *hpu.HER) spin.Code { runs.Add(1); return echo(h) }),
		})
		if c.ID() != 0 || len(c.Rulesets()) != 1 || c.Rulesets()[0] != 0 {
			t.Fatalf("round %d: context %d with rulesets %v, want 0 with 0", round, c.ID(), c.Rulesets())
		}
		before := runs.Load()
		eventually(t, "handlers run", func() bool { return runs.Load() > before+10 })
		if err := n.Remove(c); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		after := runs.Load()
		echos := snmp(t, lab.NIC.NS, "Icmp", "InEchos")
		eventually(t, "the kernel answers again", func() bool { return snmp(t, lab.NIC.NS, "Icmp", "InEchos") > echos+10 })
		if now := runs.Load(); now != after {
			t.Fatalf("round %d: %d handlers ran after Remove", round, now-after)
		}
		if k := c.InFlight(); k != 0 {
			t.Fatalf("round %d: %d buffers are still out", round, k)
		}
		if err := n.Remove(c); !errors.Is(err, nic.ErrRemoved) {
			t.Fatalf("round %d: removed again: %v", round, err)
		}
		if err := n.Activate(c); !errors.Is(err, nic.ErrRemoved) {
			t.Fatalf("round %d: activated after removal: %v", round, err)
		}
	}
}

func TestRemovedContextLeavesItsPacketsToTheStack(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 4})
	c := run(t, n, nic.ContextSpec{Name: "udp", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(echo)})
	other := run(t, n, nic.ContextSpec{Name: "icmp", Rulesets: sets(matcher.ICMPEcho()), Handlers: handle(echo)})
	conn := dialUDP(t, lab, 7)
	roundTrip(t, conn, []byte("handler"))
	if err := n.Remove(c); err != nil {
		t.Fatal(err)
	}
	write(t, conn, []byte("stack"))
	conn.SetReadDeadline(time.Now().Add(testenv.Slowness() * 5 * time.Second))
	if _, err := conn.Read(make([]byte, 10)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a datagram to no socket: %v, want %v", err, syscall.ECONNREFUSED)
	}
	ping(t, lab, "-c", "10", "-i", "0.002")
	eventually(t, "the other context goes on", func() bool { return other.Stats().Handled == 10 })
}

// A handler that is busy when its context is removed finishes first. Packets
// behind it are handled as long as there is time, and then no more.
func TestRemoveWaitsForHandlers(t *testing.T) {
	for _, tc := range []struct {
		name string
		late bool
	}{{"that return in time", false}, {"that return late", true}} {
		t.Run(tc.name, func(t *testing.T) {
			const soon = 100 * time.Millisecond
			lab := netnstest.Temp(t, netns.LabConfig{Queues: 1})
			n := open(t, lab, nic.Config{HPUs: 1, Limit: time.Minute})
			n.SetRemoveTime(time.Minute)
			if tc.late {
				n.SetRemoveTime(soon)
			}
			gate, entered := make(chan struct{}), make(chan struct{}, 1000)
			var inside atomic.Int64
			c := run(t, n, nic.ContextSpec{Name: "slow", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(func(*hpu.HER) spin.Code {
				inside.Add(1)
				defer inside.Add(-1)
				entered <- struct{}{}
				<-gate
				return spin.Success
			})})
			conn := dialUDP(t, lab, 7)
			write(t, conn, []byte("first"))
			<-entered
			for range 10 {
				write(t, conn, []byte("behind it"))
			}
			eventually(t, "all on their way", func() bool { return c.InFlight() == 11 })
			removed := make(chan error)
			go func() { removed <- n.Remove(c) }()
			eventually(t, "the rulesets go first", func() bool {
				before := program(t, n).Passed
				write(t, conn, []byte("too late"))
				return program(t, n).Passed > before
			})
			if tc.late {
				time.Sleep(3 * soon) // it is over time, and waits for the handler still
			}
			var err error
			select {
			case err = <-removed:
				t.Error("Remove returned with a handler running")
				close(gate)
			default:
				close(gate)
				err = <-removed
			}
			if k := inside.Load(); k != 0 {
				t.Errorf("%d handlers run after Remove", k)
			}
			if !tc.late && err != nil {
				t.Error(err)
			}
			idle(t, c)
			if tc.late {
				// The others are given back; those that the runner comes to when the
				// context has left the table are nobody's to count.
				if s, came := c.Stats(), program(t, n).Redirected; s.Handled != 1 || s.Handled+s.Unrun > came {
					t.Errorf("%d packets handled, %d given back, after the time for that was over", s.Handled, s.Unrun)
				}
				return
			}
			eventually(t, "all that came are handled", func() bool {
				s, came := c.Stats(), program(t, n).Redirected
				return s.Handled == came && came >= 11 && s.Unrun == 0
			})
		})
	}
}

// What Keep holds outlives its context. The number is used again only when all
// has come back.
func TestRemoveGivesUpOnKeptPackets(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{Queues: 1})
	n := open(t, lab, nic.Config{HPUs: 1, Ring: 64})
	n.SetRemoveTime(100 * time.Millisecond)
	kept := make(chan *hpu.Kept, 1)
	spec := nic.ContextSpec{
		Name: "keep", Rulesets: sets(matcher.UDPPort(7)), Format: matcher.FormatByName("flow"), Messages: nic.MaxBuckets / 2,
		Handlers: handle(func(h *hpu.HER) spin.Code {
			k, err := h.Keep()
			if err != nil {
				return spin.Fail
			}
			kept <- k
			return spin.Success
		}),
	}
	c := run(t, n, spec)
	conn := dialUDP(t, lab, 7)
	write(t, conn, []byte("kept"))
	k := <-kept
	err := n.Remove(c)
	if err == nil {
		t.Error("no error although a packet is kept")
	} else {
		t.Log(err)
	}
	if string(k.Segment(0)[42:]) != "kept" {
		t.Errorf("the packet is now %q", k.Segment(0)[42:])
	}
	second := run(t, n, spec)
	if second.ID() == c.ID() {
		t.Errorf("context number %d is used again although a packet is out", c.ID())
	}
	k.Release()
	idle(t, c)
	write(t, conn, []byte("second"))
	k = <-kept
	if string(k.Segment(0)[42:]) != "second" {
		t.Errorf("kept %q", k.Segment(0)[42:])
	}
	k.Release()
	idle(t, second)
	if err := n.Remove(second); err != nil {
		t.Error(err)
	}
	// Numbers and buckets of both are free again.
	spec.Messages = nic.MaxBuckets
	if third := run(t, n, spec); third.ID() != c.ID() {
		t.Errorf("context number %d is not used again: %d", c.ID(), third.ID())
	}
}
