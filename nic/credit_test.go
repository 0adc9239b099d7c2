// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// A context goes and comes again while another one has packets of which it lets go when
// it likes: that neither fails nor waits, and what is missing comes with the packets.
func TestContextBeginsAnewWhileAnotherHoldsCredit(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{Queues: 1})
	n := open(t, lab, nic.Config{HPUs: 1, Ring: 64})
	kept := make(chan *hpu.Kept, 64)
	holder := run(t, n, nic.ContextSpec{Name: "holder", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(func(h *hpu.HER) spin.Code {
		k, err := h.Keep()
		if err != nil {
			return spin.Fail
		}
		kept <- k
		return spin.Success
	})})
	run(t, n, nic.ContextSpec{Name: "other", Rulesets: sets(matcher.UDPPort(9)), Handlers: handle(echo)})
	spec := nic.ContextSpec{Name: "again", Rulesets: sets(matcher.UDPPort(8)), Handlers: handle(echo)}
	again := run(t, n, spec)
	credits := func(name string) uint32 {
		t.Helper()
		for _, c := range stats(t, n).Contexts {
			if c.Name == name {
				return c.Credits
			}
		}
		t.Fatalf("no context %s", name)
		return 0
	}
	has := func(name string, want uint32) {
		t.Helper()
		eventually(t, fmt.Sprintf("%s has %d credits", name, want), func() bool { return credits(name) == want })
	}
	hold := dialUDP(t, lab, 7)
	// holds has the holder keep all it may.
	holds := func(want int) {
		t.Helper()
		eventually(t, fmt.Sprintf("%d packets are held", want), func() bool {
			write(t, hold, []byte("mine"))
			return len(kept) == want
		})
	}
	install := func(spec nic.ContextSpec) *nic.Context {
		t.Helper()
		start := time.Now()
		c := run(t, n, spec)
		if d := time.Since(start); d > 500*time.Millisecond {
			t.Errorf("a context waited %v for credit", d)
		}
		return c
	}
	has("holder", 21)
	holds(21)

	// Its place is kept: nobody has got more, and it finds what it had.
	if err := n.Clear(again); err != nil {
		t.Fatal(err)
	}
	if got := credits("holder"); got != 21 {
		t.Errorf("the holder has %d credits while another's are reserved", got)
	}
	spec.Place = again
	next := install(spec)
	if got := credits("again"); got != 21 {
		t.Errorf("%d credits of the 21 that were reserved", got)
	}
	if _, err := n.Install(spec); !errors.Is(err, nic.ErrRemoved) {
		t.Errorf("a place was given twice: %v", err)
	}
	roundTrip(t, dialUDP(t, lab, 8), []byte("in its place"))

	// Its place is given up: the others have half of the ring each, and the holder
	// does not give it back.
	if err := n.Clear(next); err != nil {
		t.Fatal(err)
	}
	if err := n.Remove(next); err != nil {
		t.Fatal(err)
	}
	if err := n.Remove(next); !errors.Is(err, nic.ErrRemoved) {
		t.Errorf("a place was given up twice: %v", err)
	}
	has("holder", 32)
	holds(32)
	spec.Place = nil
	install(spec)
	if got := credits("again"); got != 64-32-21 {
		t.Errorf("%d credits of the %d that nobody has", got, 64-32-21)
	}
	roundTrip(t, dialUDP(t, lab, 8), []byte("with what is left"))
	for range 5 {
		(<-kept).Release()
	}
	has("again", 64-32-21+5)
	for range 27 {
		(<-kept).Release()
	}
	has("again", 21)
	has("holder", 21)
	idle(t, holder)
	for _, s := range stats(t, n).Contexts {
		if s.Credits != 21 || s.Granted != 21 {
			t.Errorf("%s has %d credits of %d, want 21", s.Name, s.Credits, s.Granted)
		}
	}
	if s := stats(t, n).Sockets; s.RxDropped != 0 || s.RxRingFull != 0 {
		t.Errorf("rings were too small for the credit: %+v", s)
	}
}
