// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"errors"
	"slices"
	"strings"
	"sync"
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

// What a context is, whoever runs its handlers: a number, rulesets, credit, counters and
// a life. The tier notes what it is asked for and runs nothing; the program, the table,
// the packets, and the context beside it are real.
func TestTierServesWhatTheNICOwns(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 2, Ring: 64})
	beside := run(t, n, nic.ContextSpec{Name: "icmp", Rulesets: sets(matcher.ICMPEcho()), Handlers: handle(echo), Credits: 16})
	rec := &nic.Recorder{}
	n.ServeBy(rec)
	spec := nic.ContextSpec{
		Name: "recorded", Rulesets: sets(matcher.UDPPort(7)), First: 5, Credits: 48,
		Handlers: handle(func(*hpu.HER) spin.Code { t.Error("a handler ran on an HPU"); return spin.Success }),
	}
	asked := func(when string, want ...string) {
		t.Helper()
		if got := rec.Calls(); !slices.Equal(got, want) {
			t.Fatalf("%s: asked for %v, want %v", when, got, want)
		}
	}
	broken := errors.New("broken")

	// A tier that fails leaves nothing: number and credit are there the next time.
	rec.Fail("install", broken)
	if _, err := n.Install(spec); !errors.Is(err, broken) {
		t.Fatalf("installed with %v, want %v", err, broken)
	}
	rec.Fail("install", nil)
	asked("an install that failed", "install")
	c, err := n.Install(spec)
	if err != nil {
		t.Fatal(err)
	}
	asked("install", "install")
	if c.ID() != 1 || len(c.Rulesets()) != 0 {
		t.Errorf("context %d with rulesets %v, want 1 without", c.ID(), c.Rulesets())
	}

	rec.Fail("arm", broken)
	if err := n.Activate(c); !errors.Is(err, broken) || len(c.Rulesets()) != 0 {
		t.Errorf("activated with %v, rulesets %v; want %v and none", err, c.Rulesets(), broken)
	}
	rec.Fail("arm", nil)
	if err := n.Activate(c); err != nil {
		t.Fatal(err)
	}
	asked("activate, twice", "arm", "arm")
	if r := c.Rulesets(); !slices.Equal(r, []int{5}) {
		t.Errorf("rulesets %v, want 5", r)
	}

	// The packets are the context's, and nobody's credit is lost when no HPU knows it.
	conn := dialUDP(t, lab, 7)
	mine := func() nic.ContextStats {
		all := stats(t, n).Contexts
		i := slices.IndexFunc(all, func(s nic.ContextStats) bool { return s.Name == "recorded" })
		return all[i]
	}
	send := func(k int) {
		for range k {
			if _, err := conn.Write(make([]byte, 32)); err != nil {
				t.Fatal(err)
			}
		}
	}
	send(100)
	eventually(t, "100 packets are matched", func() bool {
		s := mine()
		return len(s.Rulesets) == 1 && s.Rulesets[0].Matched == 100
	})
	eventually(t, "their buffers are back", func() bool { return c.InFlight() == 0 })

	rec.Count()
	if s := mine(); !s.Active || s.Handled != 1 || s.User[3] != (spin.UserCounter{Sum: 5, Count: 1}) || s.Messages == nil || s.Messages.Started != 7 || s.Granted != 48 {
		t.Errorf("statistics %+v are not the tier's and the NIC's", s)
	}
	if c.Stuck() != 2 {
		t.Errorf("%d handlers are stuck, the tier says 2", c.Stuck())
	}
	if err := n.Trigger(c, hpu.Trigger{}); err == nil || !strings.Contains(err.Error(), "not host-activated") {
		t.Errorf("triggered: %v", err)
	}
	c.SetTap(nil)

	// Renumbered and deactivated by the NIC alone; it is armed once.
	if err := n.Renumber(map[*nic.Context][]int{c: {9}}); err != nil {
		t.Fatal(err)
	}
	if s := mine(); s.Rulesets[0].Number != 9 || s.Rulesets[0].Matched != 100 {
		t.Errorf("renumbered: %+v, want 9 with 100 packets", s.Rulesets)
	}
	asked("statistics and numbers")
	rec.Fail("drain", broken)
	if err := n.Deactivate(c); !errors.Is(err, broken) || len(c.Rulesets()) != 0 {
		t.Errorf("deactivated with %v, rulesets %v; want %v and none", err, c.Rulesets(), broken)
	}
	rec.Fail("drain", nil)
	if err := n.Activate(c); err != nil {
		t.Fatal(err)
	}
	if err := n.Deactivate(c); err != nil {
		t.Fatal(err)
	}
	asked("deactivate, activate, deactivate", "drain", "drain")

	// What it cannot give back keeps its number, until it can.
	rec.Fail("stop", broken)
	if err := n.Remove(c); !errors.Is(err, broken) {
		t.Errorf("removed with %v, want %v", err, broken)
	}
	if n.Drained(c) {
		t.Error("drained while the tier says that it is not")
	}
	asked("remove, and a look", "stop", "stop")
	other, err := n.Install(spec)
	if err != nil {
		t.Fatal(err)
	}
	if other.ID() != 2 {
		t.Errorf("context %d, want 2: number 1 is not free", other.ID())
	}
	asked("install beside it", "stop", "install")
	rec.Fail("stop", nil)
	if !n.Drained(c) {
		t.Error("not drained after the tier has given all back")
	}
	if err := n.Remove(other); err != nil {
		t.Fatal(err)
	}
	asked("a look, and remove", "stop", "stop")

	n.ServeBy(nil)
	spec.Handlers = handle(echo)
	if c := run(t, n, spec); c.ID() != 1 {
		t.Errorf("context %d, want 1, which is free", c.ID())
	}
	send(1)
	conn.SetReadDeadline(time.Now().Add(testenv.Slowness() * 20 * time.Second))
	if _, err := conn.Read(make([]byte, 100)); err != nil {
		t.Errorf("on HPUs again: %v", err)
	}
	ping(t, lab, "-c", "3", "-i", "0.01")
	eventually(t, "the context beside it has handled 3 packets", func() bool { return beside.Stats().Handled == 3 })
}

// Clearing loses nothing and splits no pair, while somebody counts.
func TestCountersAreClearedInPairs(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1})
	rec := &nic.Recorder{}
	n.ServeBy(rec)
	c, err := n.Install(nic.ContextSpec{Name: "counting", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(echo)})
	if err != nil {
		t.Fatal(err)
	}
	const counts = 20_000
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		for range counts {
			rec.Count()
		}
	})
	var cleared uint64
	take := func(u [spin.UserCounters]spin.UserCounter) uint64 {
		if u[3].Sum != 5*u[3].Count || u[3].Count > counts {
			t.Errorf("sum %d, count %d", u[3].Sum, u[3].Count)
		}
		return u[3].Count
	}
	for c.Stats().Handled < counts && !t.Failed() {
		take(c.Stats().User)
		cleared += take(c.ClearCounters())
	}
	if cleared += take(c.ClearCounters()); cleared != counts {
		t.Errorf("cleared %d counts, want %d", cleared, counts)
	}
	if left := take(c.Stats().User); left != 0 {
		t.Errorf("%d counts are left after clearing", left)
	}
}
