// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/spin"
)

// overrun has the watchdog give up on a worker, which must be in a handler.
func (r *rig) overrun(w *worker) {
	r.t.Helper()
	now := w.current.Load()
	s := now.state.Load()
	if stateOf(s) != running {
		r.t.Fatal("the worker runs no handler")
	}
	r.abandon(w, now, s)
}

// A handler that runs while its context is stopped ends its message afterwards:
// what was held for that was given back meanwhile, by another worker.
func TestMessageEndsAfterWhatItHeldWasFlushed(t *testing.T) {
	for _, halt := range []string{"drained", "overrun on another HPU"} {
		for _, end := range []string{"header fails", "payload fails", "complete"} {
			t.Run(halt+", "+end, func(t *testing.T) {
				bothTables(t, func(t *testing.T, shared bool) {
					in, out := make(chan uint32), make(chan struct{})
					stay := func(h *HER) {
						in <- h.Message().Number()
						<-out
					}
					b := newBench(t, benchConfig{
						shared: shared, rig: rigConfig{hpus: 2, Config: Config{Workers: 2, Limit: time.Hour}},
						header: func(h *HER) spin.Code {
							if h.Message().Number() == 2 {
								stay(h)
								if end == "header fails" {
									return spin.Fail
								}
							}
							return spin.Success
						},
						payload: func(h *HER) spin.Code {
							switch {
							case h.Message().Number() == 1:
								stay(h)
							case end == "payload fails":
								return spin.Fail
							}
							return spin.Success
						},
						change: func(m *MessageConfig) { m.Timeout = time.Hour },
					})
					release := sync.OnceFunc(func() { close(out) })
					t.Cleanup(release)
					// It lies behind the end of the message, but who knows that
					// without the header packet? So it is held.
					b.send(segment(1, 2, peerA, 100, 100, false))
					b.quiet(1)
					b.send(segment(1, 2, peerA, 0, 100, true))
					<-in
					drained := make(chan struct{})
					if halt == "drained" {
						go func() {
							defer close(drained)
							_ = b.Drain(b.c, 0) // something is out, and told when all is over
						}()
					} else {
						close(drained)
						other := segment(1, 1, peerA, 0, 100, false)
						other.hpu = 1
						b.send(other)
						<-in
						b.overrun(b.workers[1])
					}
					eventually(t, "what was held is given back", func() bool {
						b.Pool.wake()
						b.c.msgs.mu.Lock()
						defer b.c.msgs.mu.Unlock()
						return b.c.msgs.flushed
					})
					b.noEvent()
					release()
					want := spin.Failed
					if end == "complete" {
						want = spin.Complete
					}
					if e := b.event(); e.Number != 2 || e.Cause != want {
						t.Errorf("%+v", e)
					}
					b.quiet(0)
					<-drained
					if err := b.Drain(b.c, 0); err != nil {
						t.Error(err)
					}
					open := 1 // of the handler that was given up nothing more is believed
					if halt == "drained" {
						open = 0
					}
					if st, _ := b.c.Messages(); st.HeldNow != 0 || st.Open != open {
						t.Errorf("%d packets are held, %d messages open: want 0 and %d", st.HeldNow, st.Open, open)
					}
					b.noEvent()
					b.settled()
				})
			})
		}
	}
}

// Messages wait for room in the event queue of one context. That of another one
// has room again, but then Unbind does not return.
func TestMessagesWaitOnAfterACallThatDoesNotReturn(t *testing.T) {
	bothTables(t, func(t *testing.T, shared bool) {
		stuck, out := make(chan struct{}), make(chan struct{})
		bnd := &funcBinder{unbind: func(*Message, *spin.Result) {
			close(stuck)
			<-out
		}}
		b := newBench(t, benchConfig{
			shared: shared, events: 1, rig: rigConfig{Config: Config{Limit: time.Hour}},
			change: func(m *MessageConfig) {
				m.Timeout = time.Hour
				bnd.b.Events = m.Default.Events
				m.Binder = bnd
			},
		})
		events := make(chan spin.MessageEvent, 1)
		buckets := bpf.Range{Base: testBuckets.Base + testBuckets.Size, Size: 64}
		if shared {
			buckets = bpf.Range{}
		}
		c, err := NewMessageContext(2, "waiting", Handlers{}, buckets, math.MaxUint64, MessageConfig{
			Config: mpq.Config{Timeout: time.Hour}, // at its end the event is tried in any case
			Format: matcher.FormatByName("slmp"), Protocol: echoing{}, Shared: shared, Default: spin.Binding{Events: spin.EventChan(events)},
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Install(c); err != nil {
			t.Fatal(err)
		}
		release := sync.OnceFunc(func() { close(out) })
		t.Cleanup(release)
		wait := func(id uint32) {
			t.Helper()
			p := segment(2, id, peerA, 0, 100, true)
			if !shared {
				p.bucket = &buckets
			}
			b.receive(p)
			eventually(t, "the packet is dealt with", func() bool { return b.Idle(c) })
		}
		b.events <- spin.MessageEvent{Number: 77}
		events <- spin.MessageEvent{Number: 77}

		// They wait in the same list, before and after the one that goes wrong.
		wait(10)
		b.send(segment(1, 1, peerA, 0, 100, true))
		b.quiet(0)
		wait(11)
		wait(12)
		if e := b.event(); e.Number != 77 {
			t.Fatalf("%+v", e)
		}
		<-stuck
		b.overrun(b.workers[0])
		if e := b.event(); e.Number != 1 || e.Cause != spin.Complete {
			t.Errorf("%+v", e)
		}
		var got []uint32
		for range 4 {
			select {
			case e := <-events:
				got = append(got, e.Number)
			case <-time.After(patience):
				t.Fatalf("events of %v, no more: %+v", got, c.Stats())
			}
		}
		if slices.Sort(got[1:]); !slices.Equal(got, []uint32{77, 10, 11, 12}) {
			t.Errorf("events of %v", got)
		}
		eventually(t, "their ends are acknowledged", func() bool {
			acks := b.acks()
			slices.SortFunc(acks, func(x, y [2]uint32) int { return int(x[0]) - int(y[0]) })
			return fmt.Sprint(acks) == "[[10 0] [11 0] [12 0]]"
		})
		if st, _ := c.Messages(); st.Open != 0 {
			t.Errorf("%+v", st)
		}
		release()
		eventually(t, "nothing is stuck", func() bool { return b.Stuck() == 0 })
		if err := b.Drain(b.c, 0); err != nil {
			t.Error(err)
		}
		b.settled()
	})
}
