// SPDX-License-Identifier: Apache-2.0

package hostq

import (
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
)

// Places that were set aside are there to be filled, whatever others take, give and fill meanwhile.
func TestPlacesSetAsideAreThere(t *testing.T) {
	const slots, fillers, rounds = 16, 4, 20_000
	queue := make(chan int, slots)
	l := NewLedger(func(int) int { return cap(queue) - len(queue) })
	var fill sync.WaitGroup
	var full atomic.Int64
	for i := range fillers {
		fill.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(i)))
			for range rounds {
				aside := l.Take(1 + random.IntN(slots))
				if aside > 0 && random.IntN(4) == 0 { // not wanted
					l.Give(1)
					aside--
				}
				for range aside {
					runtime.Gosched() // others take places meanwhile
					select {
					case queue <- i:
					default:
						full.Add(1)
					}
					l.Give(1)
				}
			}
		})
	}
	go func() {
		fill.Wait()
		close(queue)
	}()
	for range queue {
	}
	if n := full.Load(); n > 0 {
		t.Errorf("%d places that were set aside were not there", n)
	}
	if n := l.Take(slots + 1); n != 0 && n != slots {
		t.Errorf("%d places are free in the end", n)
	}
}

func TestLedger(t *testing.T) {
	used := 0
	l := NewLedger(func(int) int { return 8 - used })
	asked := 0
	stop := l.Watch(func() { asked++ })
	l.Short()
	for _, step := range []struct {
		what       string
		take, want int
		give, fill int
		free       int
	}{
		{what: "none", take: 0, want: 0, free: 8},
		{what: "less than none", take: -3, want: 0, free: 8},
		{what: "some", take: 5, want: 5, free: 3},
		{what: "more than there are", take: 4, want: 3, free: 0},
		{what: "when there are none", take: 1, want: 0, free: 0},
		{what: "after some were given back", give: 2, take: 3, want: 2, free: 0},
		{what: "after some were filled", give: 3, fill: 3, take: 1, want: 0, free: 0},
		{what: "after some were taken out of the queue", fill: -2, take: 1, want: 1, free: 1},
		{what: "of a queue that is fuller than it can be", fill: 10, take: 1, want: 0, free: 0},
	} {
		used += step.fill
		l.Give(step.give)
		if n, free := l.Take(step.take), l.Free(); n != step.want || free != step.free {
			t.Errorf("%s: %d are set aside and %d free, want %d and %d", step.what, n, free, step.want, step.free)
		}
	}
	l.Short()
	stop()
	l.Short()
	if asked != 1 {
		t.Errorf("whoever holds places was asked %d times, want 1: when there were some", asked)
	}
}

// An event goes into a place that nobody has set aside, or into one's own; an Overflow event, too. Holders of places are
// asked for them.
func TestEventsAndPlaces(t *testing.T) {
	p, h := both(t, PairConfig{Layout: Layout{Lanes: 1, Events: 4}})
	asked := 0
	p.Places().Watch(func() { asked++ })
	aside := p.Places().Take(3)
	if aside != 3 || !p.Event(&Event{Number: 1}) || p.Event(&Event{Number: 2}) || asked != 1 {
		t.Fatalf("%d places set aside, asked %d times", aside, asked)
	}
	p.LoseEvent()
	if p.tellLost() {
		t.Error("an Overflow event took a place that is somebody's")
	}
	for n := range uint32(3) {
		if !p.EventAside(&Event{Number: 10 + n}) {
			t.Errorf("event %d has no place", n)
		}
	}
	if p.EventAside(&Event{}) {
		t.Error("there are more events than the queue has places")
	}
	for _, want := range []uint32{1, 10, 11, 12} {
		var e Event
		if !h.Event(&e) || e.Number != want {
			t.Errorf("event %d, want %d", e.Number, want)
		}
	}
	if !p.tellLost() {
		t.Error("the Overflow event has no place")
	}
	p.StopRequests()
	if _, err := p.Request(0, &Request{}, nil); err != ErrDetached {
		t.Errorf("a request: %v", err)
	}
	if !p.Event(&Event{Number: 20}) || p.Err() != nil {
		t.Errorf("events have ended with requests: %v", p.Err())
	}
	p.Detach()
	if p.Event(&Event{}) || p.EventAside(&Event{}) || p.Places().Take(1) != 0 {
		t.Error("there is no application, and room for an event")
	}
}
