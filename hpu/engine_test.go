// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/internal/clock"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/spin"
)

const (
	peerA = 0x0a000002
	peerB = 0x0a000003
)

// A bench is a rig with a context whose handlers write down that they run.
type bench struct {
	*rig
	c      *Context
	shared bool
	events chan spin.MessageEvent

	mu  sync.Mutex
	log []string
}

// A benchConfig says what the handlers do: nil for Success, and no handler
// for one that is out.
type benchConfig struct {
	shared          bool
	rig             rigConfig
	header, payload Handler
	completion      CompletionHandler
	noHeader        bool
	noPayload       bool
	events          int // how many there is room for; 0 for 100
	change          func(*MessageConfig)
	resources       Resources
}

func newBench(t testing.TB, cfg benchConfig) *bench {
	t.Helper()
	if cfg.events == 0 {
		cfg.events = 100
	}
	b := &bench{rig: newRig(t, cfg.rig), shared: cfg.shared, events: make(chan spin.MessageEvent, cfg.events)}
	h := Handlers{
		Header: func(h *HER) spin.Code {
			b.write("header %d", h.Message().Number())
			if cfg.header == nil {
				return spin.Success
			}
			return cfg.header(h)
		},
		Payload: func(h *HER) spin.Code {
			b.write("payload %d at %d", h.Message().Number(), h.Offset())
			if cfg.payload == nil {
				return spin.Success
			}
			return cfg.payload(h)
		},
		Completion: func(c *Completion) spin.Code {
			b.write("completion %d: %v, %d bytes, %d dropped, %d missing", c.Message().Number(), c.Cause, c.Length, c.Dropped, c.Missing)
			if cfg.completion == nil {
				return spin.Success
			}
			return cfg.completion(c)
		},
	}
	if cfg.noHeader {
		h.Header = nil
	}
	if cfg.noPayload {
		h.Payload = nil
	}
	b.resources = cfg.resources
	b.c = b.receiveMessages(1, h, func(m *MessageConfig) {
		m.Shared = cfg.shared
		m.Default.Events = spin.EventChan(b.events)
		if cfg.change != nil {
			cfg.change(m)
		}
	})
	return b
}

func (b *bench) write(format string, args ...any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.log = append(b.log, fmt.Sprintf(format, args...))
}

// ran returns what has run since the last call.
func (b *bench) ran() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.log
	b.log = nil
	return l
}

// send has packets come, all at once if there is credit for them.
func (b *bench) send(ps ...pkt) {
	for _, p := range ps {
		if !b.shared && p.bucket == nil && len(b.c.pins) > 0 {
			p.bucket = &testBuckets
			p.hpu = int(p.hash) % len(b.kernel.queues[0].rings)
		}
		for b.receive(p) == 0 {
			time.Sleep(100 * time.Microsecond)
		}
	}
}

// quiet waits until all but so many packets have been dealt with.
func (b *bench) quiet(but int) {
	b.t.Helper()
	eventually(b.t, fmt.Sprintf("all packets but %d are dealt with", but), func() bool {
		return b.inFlight(b.c) == but
	})
}

// expect waits for quiet, and for the handlers to have run as said.
func (b *bench) expect(but int, want ...string) {
	b.t.Helper()
	b.quiet(but)
	if but > 0 { // packets that are kept count as before they were handled
		eventually(b.t, fmt.Sprintf("%d handlers run", len(want)), func() bool {
			b.mu.Lock()
			defer b.mu.Unlock()
			return len(b.log) >= len(want)
		})
	}
	if got := b.ran(); !slices.Equal(got, want) {
		b.t.Errorf("these handlers ran:\n  %s\nwant:\n  %s", strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}

// acked checks what was acknowledged so far: offsets of message 1, in order.
func (b *bench) acked(want ...uint32) {
	b.t.Helper()
	var got []uint32
	for _, a := range b.acks() {
		if a[0] == 1 {
			got = append(got, a[1])
		}
	}
	if !slices.Equal(got, want) {
		b.t.Errorf("acknowledged %v, want %v", got, want)
	}
}

// event takes the next event, which must be there.
func (b *bench) event() spin.MessageEvent {
	b.t.Helper()
	select {
	case e := <-b.events:
		return e
	case <-time.After(patience):
		b.t.Fatalf("no event: %+v", b.c.Stats())
		panic("unreachable")
	}
}

func (b *bench) noEvent() {
	b.t.Helper()
	select {
	case e := <-b.events:
		b.t.Errorf("an event too many: %+v", e)
	default:
	}
}

// over checks that nothing is left of any message.
func (b *bench) over() {
	b.t.Helper()
	eventually(b.t, "no message is open, no packet held", func() bool {
		st, _ := b.c.Messages()
		return st.Open == 0 && st.HeldNow == 0
	})
	b.noEvent()
	b.settled()
}

func bothTables(t *testing.T, f func(t *testing.T, shared bool)) {
	for _, shared := range []bool{false, true} {
		t.Run(fmt.Sprintf("shared=%v", shared), func(t *testing.T) { f(t, shared) })
	}
}

func TestPacketsThatComeBeforeTheirHeaderWait(t *testing.T) {
	bothTables(t, func(t *testing.T, shared bool) {
		b := newBench(t, benchConfig{shared: shared, change: func(m *MessageConfig) { m.Held = 4; m.Timeout = time.Minute }})
		p := cut(1, 1, peerA, 7*100, 100)
		b.send(p[1:]...)
		b.expect(4)
		if st, _ := b.c.Messages(); st.Open != 1 || st.HeldNow != 4 || st.Dropped[spin.DropNoHeader] != 2 {
			t.Errorf("with 4 packets held: %+v", st)
		}
		b.acked()
		b.send(p[0])
		b.expect(0, "header 1", "payload 1 at 0", "payload 1 at 100", "payload 1 at 200", "payload 1 at 300", "payload 1 at 400")
		b.acked(0, 100, 200, 300, 400)
		b.send(p[6], p[5])
		b.expect(0, "payload 1 at 600", "payload 1 at 500", "completion 1: complete, 700 bytes, 0 dropped, 0 missing")
		if e := b.event(); e.Cause != spin.Complete || !e.FlowControl {
			t.Errorf("two packets were dropped for lack of room: %+v", e)
		}
		b.over()
	})
}

func TestHeldPacketsAreDroppedIfNoHeaderComes(t *testing.T) {
	bothTables(t, func(t *testing.T, shared bool) {
		b := newBench(t, benchConfig{shared: shared, change: func(m *MessageConfig) { m.Timeout = 10 * time.Millisecond }})
		b.send(cut(1, 1, peerA, 700, 100)[1:]...)
		b.expect(0)
		b.acked()
		if st, _ := b.c.Messages(); st.Dropped[spin.DropNoHeader] != 6 || st.Refused != 0 {
			t.Errorf("%+v", st)
		}
		// Nothing is remembered: the message may come after all.
		b.send(cut(1, 1, peerA, 200, 100)...)
		b.quiet(0)
		b.acked(0, 100)
		b.event()
		b.over()
	})
}

// Held packets of a message that goes to another HPU stay on the context's.
func TestHeldPacketsRunOnTheContextsHPUs(t *testing.T) {
	r := newRig(t, rigConfig{hpus: 4, Config: Config{Workers: 2}})
	var on [4]atomic.Int64
	c, err := NewMessageContext(1, "masked", Handlers{Payload: func(h *HER) spin.Code {
		on[h.HPU()].Add(1)
		return spin.Success
	}}, bpf.Range{}, 0b0110, MessageConfig{Format: matcher.FormatByName("slmp"), Shared: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Install(c); err != nil {
		t.Fatal(err)
	}
	p := cut(1, 1, peerA, 500, 100)
	for i := range p {
		p[i].hpu = 1 // the second worker's
	}
	p[0].hpu = 2
	r.receive(p[1:]...)
	eventually(t, "4 are held", func() bool { st, _ := c.Messages(); return st.HeldNow == 4 })
	r.receive(p[0])
	r.settled()
	if n := on[1].Load() + on[2].Load(); n != 5 {
		t.Errorf("%d of 5 packets ran on HPUs 1 and 2; 0 had %d, 3 had %d", n, on[0].Load(), on[3].Load())
	}
}

func TestAcknowledgementWaitsForTheRelease(t *testing.T) {
	bothTables(t, func(t *testing.T, shared bool) {
		for _, tc := range []struct {
			name string
			how  func(k *Kept)
			late bool // released by the test
		}{
			{"in the handler", func(k *Kept) { k.Release() }, false},
			{"in a goroutine", func(k *Kept) { go k.Release() }, false},
			{"later", nil, true},
		} {
			t.Run(tc.name, func(t *testing.T) {
				kept := make(chan *Kept, 10)
				keep := func(h *HER) spin.Code {
					k, err := h.Keep()
					if err != nil {
						t.Error(err)
					}
					if tc.late {
						kept <- k
					} else {
						tc.how(k)
					}
					return spin.Success
				}
				b := newBench(t, benchConfig{shared: shared, payload: keep})
				p := cut(1, 1, peerA, 300, 100)
				b.send(p...)
				if tc.late {
					b.expect(3, "header 1", "payload 1 at 0", "payload 1 at 100", "payload 1 at 200")
					b.acked()
					b.send(p[1]) // a copy waits too
					b.expect(3)
					b.acked()
					first, second, third := <-kept, <-kept, <-kept
					third.Release() // EOM
					b.quiet(2)
					b.acked()
					second.Release()
					b.quiet(1)
					b.acked(100)
					b.noEvent()
					first.Release()
				}
				b.event()
				b.quiet(0)
				got := b.acks()
				if n := len(got); n < 3 || got[n-1] != [2]uint32{1, 200} {
					t.Errorf("acknowledged %v: want all three, EOM last", got)
				}
				b.over()
			})
		}
	})
}

// What a handler keeps, or the header handler kept before the payload handler
// failed, is the holder's still; the segment has finished.
func TestKeptPacketOfAFailedMessage(t *testing.T) {
	bothTables(t, func(t *testing.T, shared bool) {
		for _, tc := range []string{"kept by the header handler", "kept by an earlier payload handler"} {
			t.Run(tc, func(t *testing.T) {
				kept := make(chan *Kept, 1)
				keep := func(h *HER) spin.Code {
					k, err := h.Keep()
					if err != nil {
						t.Error(err)
					}
					kept <- k
					return spin.Success
				}
				cfg := benchConfig{shared: shared}
				if strings.Contains(tc, "header") {
					cfg.header, cfg.payload = keep, func(*HER) spin.Code { return spin.Fail }
				} else {
					cfg.payload = func(h *HER) spin.Code {
						if h.Offset() == 0 {
							return keep(h)
						}
						return spin.Fail
					}
				}
				b := newBench(t, cfg)
				b.send(cut(1, 1, peerA, 300, 100)...)
				k := <-kept
				if e := b.event(); e.Cause != spin.Failed || e.Err == nil {
					t.Errorf("%+v", e)
				}
				b.quiet(1)
				if k.Segment(0) == nil || k.Segment(0)[52] != content(1, 0) {
					t.Error("the packet is gone")
				}
				k.Release()
				b.quiet(0)
				b.acked()
				b.over()
			})
		}
	})
}

func TestFullEventQueueDelaysTheEndOfMessages(t *testing.T) {
	bothTables(t, func(t *testing.T, shared bool) {
		for _, again := range []bool{false, true} {
			t.Run(fmt.Sprintf("eom comes again=%v", again), func(t *testing.T) {
				b := newBench(t, benchConfig{shared: shared, events: 1})
				b.events <- spin.MessageEvent{Number: 77}
				p := cut(1, 1, peerA, 300, 100)
				b.send(p...)
				b.expect(0, "header 1", "payload 1 at 0", "payload 1 at 100", "payload 1 at 200", "completion 1: complete, 300 bytes, 0 dropped, 0 missing")
				for range 200 {
					b.send(p[2])
				}
				b.expect(0)
				b.acked(0, 100)
				if e := b.event(); e.Number != 77 {
					t.Fatalf("%+v", e)
				}
				if again {
					b.send(p[2])
				}
				if e := b.event(); e.Number != 1 || e.Cause != spin.Complete || e.Length != 300 {
					t.Errorf("%+v", e)
				}
				eventually(t, "EOM is acknowledged", func() bool { return slices.Contains(b.acks(), [2]uint32{1, 200}) })
				b.over()
				if n := len(b.c.msgs.waiting[0].list); n > 1 {
					t.Errorf("%d notes of one message", n)
				}
			})
		}
	})
}

// A channel without buffer has room when somebody waits for it.
func TestUnbufferedEventChannel(t *testing.T) {
	ch := make(chan spin.MessageEvent)
	b := newBench(t, benchConfig{change: func(m *MessageConfig) { m.Default.Events = spin.EventChan(ch) }})
	b.send(cut(1, 1, peerA, 100, 100)...)
	b.quiet(0)
	b.acked()
	select {
	case <-ch:
	case <-time.After(patience):
		t.Fatal("no event")
	}
	eventually(t, "EOM is acknowledged", func() bool { return len(b.acks()) == 1 })
	b.over()
}

// A worker with nothing but an event that nobody takes, of a context that was
// removed, sleeps.
func TestDeferredMessageOfARemovedContextIsForgotten(t *testing.T) {
	b := newBench(t, benchConfig{events: 1})
	b.events <- spin.MessageEvent{}
	b.send(cut(1, 1, peerA, 100, 100)...)
	b.expect(0, "header 1", "payload 1 at 0", "completion 1: complete, 100 bytes, 0 dropped, 0 missing")
	b.c.halt.Or(haltRemoved)
	b.close()
	if ms := b.workers[0].current.Load().nextTimer(); ms != -1 {
		t.Errorf("its worker has something to do in %d ms", ms)
	}
}

func TestFailuresEndTheMessage(t *testing.T) {
	fails := map[string]func() spin.Code{
		"Fail":  func() spin.Code { return spin.Fail },
		"Segv":  func() spin.Code { return spin.Segv },
		"panic": func() spin.Code { panic("on purpose") },
		"what":  func() spin.Code { return 11 },
	}
	bothTables(t, func(t *testing.T, shared bool) {
		for how, f := range fails {
			for _, where := range []string{"header", "payload", "completion"} {
				t.Run(where+" "+how, func(t *testing.T) {
					cfg := benchConfig{shared: shared}
					var unbound atomic.Int64
					var bnd *funcBinder
					want := []string{"header 1"}
					acks := []uint32{}
					switch where {
					case "header":
						cfg.header = func(*HER) spin.Code { return f() }
					case "payload":
						cfg.payload = func(h *HER) spin.Code {
							if h.Offset() == 100 {
								return f()
							}
							return spin.Success
						}
						want = append(want, "payload 1 at 0", "payload 1 at 100")
						acks = append(acks, 0)
					case "completion":
						cfg.completion = func(*Completion) spin.Code { return f() }
						want = append(want, "payload 1 at 0", "payload 1 at 100", "payload 1 at 200", "completion 1: complete, 300 bytes, 0 dropped, 0 missing")
						acks = append(acks, 0, 100)
					}
					var b *bench
					bnd = &funcBinder{unbind: func(_ *Message, r *spin.Result) {
						if unbound.Add(1) == 1 && r.Cause != spin.Failed {
							t.Errorf("unbound: %+v", *r)
						}
					}}
					cfg.change = func(m *MessageConfig) { bnd.b = spin.Binding{Events: m.Default.Events}; m.Binder = bnd }
					b = newBench(t, cfg)
					p := cut(1, 1, peerA, 300, 100)
					b.send(p...)
					b.expect(0, want...)
					b.send(p...)
					b.expect(0)
					b.acked(acks...)
					e := b.event()
					if e.Cause != spin.Failed || e.Err == nil || !strings.Contains(e.Err.Error(), where) {
						t.Errorf("%+v", e)
					}
					if st, _ := b.c.Messages(); st.Failed != 1 || st.Dropped[spin.DropDead] == 0 || unbound.Load() != 1 {
						t.Errorf("%+v, unbound %d times", st, unbound.Load())
					}
					// Others are not harmed, even in the same slot.
					if where == "payload" {
						b.send(cut(1, 2, peerA, 90, 100)...)
						b.expect(0, "header 2", "payload 2 at 0", "completion 2: complete, 90 bytes, 0 dropped, 0 missing")
						if e := b.event(); e.Cause != spin.Complete || e.Err != nil {
							t.Errorf("%+v", e)
						}
						unbound.Store(1)
					}
					b.over()
				})
			}
		}
	})
}

// A funcBinder binds all messages to b, if bind has no objection.
type funcBinder struct {
	b      spin.Binding
	bind   func(*Message) error
	unbind func(*Message, *spin.Result)
}

func (f *funcBinder) Bind(m *Message) (spin.Binding, error) {
	if f.bind != nil {
		if err := f.bind(m); err != nil {
			return spin.Binding{}, err
		}
	}
	return f.b, nil
}

func (f *funcBinder) Unbind(m *Message, r *spin.Result) {
	if f.unbind != nil {
		f.unbind(m, r)
	}
}

// While Unbind of a failed message still runs, its slot is nobody else's, and a
// copy of its segments on another HPU finds nothing to be acknowledged.
func TestFailedMessageIsUnboundBeforeItsSlotIsUsedAgain(t *testing.T) {
	for _, expired := range []bool{false, true} {
		t.Run(fmt.Sprintf("timed out=%v", expired), func(t *testing.T) {
			in, out := make(chan uint32), make(chan struct{})
			bnd := &funcBinder{unbind: func(m *Message, r *spin.Result) {
				if r.Cause == spin.Failed {
					in <- m.Number()
					<-out
				}
			}}
			b := newBench(t, benchConfig{
				shared: true, rig: rigConfig{hpus: 2, Config: Config{Workers: 2, Limit: time.Minute}},
				completion: func(c *Completion) spin.Code {
					if c.Message().Number() == 1 {
						return spin.Fail
					}
					return spin.Success
				},
				change: func(m *MessageConfig) {
					m.Messages, m.State, m.Binder = 1, 8, bnd
					bnd.b = spin.Binding{Events: m.Default.Events}
					if expired {
						m.Timeout = 200 * time.Millisecond
					}
				},
			})
			p := cut(1, 1, peerA, 300, 100)
			if expired {
				p = p[:2]
			}
			b.send(p...)
			select {
			case n := <-in:
				if n != 1 {
					t.Errorf("message %d is unbound", n)
				}
			case <-time.After(patience):
				t.Fatal("not unbound")
			}
			b.event()
			acks := len(b.acks())
			// Which worker is the busy one? Whoever is not takes these.
			other := cut(1, 2, peerA, 100, 100)[0]
			for h := range 2 {
				for _, q := range append(slices.Clone(p), other) {
					q.hpu = h
					b.send(q)
				}
			}
			st := func() spin.MessageStats { s, _ := b.c.Messages(); return s }
			eventually(t, "the other HPU has dealt with its copies", func() bool { return st().Dropped[spin.DropMessages] >= 1 })
			if n := len(b.acks()); n != acks {
				t.Errorf("%d acknowledgements of a failed message", n-acks)
			}
			if st().Started != 1 {
				t.Errorf("%d messages in one slot", st().Started)
			}
			close(out)
			b.quiet(0)
			b.ran()
			b.send(other)
			b.quiet(0)
			if e := b.event(); e.Number != 2 || e.Cause != spin.Complete {
				t.Errorf("%+v", e)
			}
			eventually(t, "over", func() bool { return st().Open == 0 })
			for len(b.events) > 0 {
				<-b.events
			}
			b.over()
		})
	}
}

func TestDroppedBytesAreCountedAndAcknowledged(t *testing.T) {
	bothTables(t, func(t *testing.T, shared bool) {
		b := newBench(t, benchConfig{shared: shared, header: func(h *HER) spin.Code {
			if h.Message().Number() == 1 {
				return spin.Drop
			}
			return spin.Success
		}, payload: func(h *HER) spin.Code {
			if h.Offset() == 100 {
				return spin.Drop
			}
			return spin.Success
		}})
		b.send(cut(1, 1, peerA, 250, 100)...)
		b.expect(0, "header 1", "completion 1: complete, 250 bytes, 250 dropped, 0 missing")
		b.acked(0, 100, 200)
		if e := b.event(); e.Dropped != 250 {
			t.Errorf("%+v", e)
		}
		b.send(cut(1, 2, peerA, 250, 100)...)
		b.expect(0, "header 2", "payload 2 at 0", "payload 2 at 100", "payload 2 at 200", "completion 2: complete, 250 bytes, 100 dropped, 0 missing")
		if e := b.event(); e.Dropped != 100 {
			t.Errorf("%+v", e)
		}
		if n := len(b.acks()); n != 6 {
			t.Errorf("%d of 6 acknowledged", n)
		}
		b.over()
	})
}

// What a handler says of its failure is what the application hears, whichever handler it
// is, and when its message ended.
func TestHandlersSayWhyTheyFail(t *testing.T) {
	why := errors.New("no such luck")
	for _, tc := range []struct {
		name string
		err  error
		code spin.Code
	}{
		{"fail", why, spin.Fail},
		{"outside", fmt.Errorf("at 7: %w", spin.ErrBounds), spin.Segv},
	} {
		for _, handler := range []string{"header", "payload", "completion"} {
			t.Run(tc.name+" "+handler, func(t *testing.T) {
				bothTables(t, func(t *testing.T, shared bool) {
					fail := func(what string, task *Task) spin.Code {
						if what != handler {
							return spin.Success
						}
						code := task.Fail(tc.err)
						if code != tc.code {
							t.Errorf("Fail returned %v, want %v", code, tc.code)
						}
						return code
					}
					before := clock.Monotonic()
					b := newBench(t, benchConfig{
						shared:     shared,
						header:     func(h *HER) spin.Code { return fail("header", &h.Task) },
						payload:    func(h *HER) spin.Code { return fail("payload", &h.Task) },
						completion: func(c *Completion) spin.Code { return fail("completion", &c.Task) },
					})
					b.send(cut(1, 1, peerA, 100, 1000)...)
					b.quiet(0)
					e := b.event()
					if e.Cause != spin.Failed || e.Err != tc.err || e.Time < before || e.Time > clock.Monotonic() {
						t.Errorf("%+v, want %v, after %d", e, tc.err, before)
					}
				})
			})
		}
	}
}

func TestPayloadIsDepositedWhereTheBindingSays(t *testing.T) {
	for _, tc := range []struct {
		name    string
		b       spin.Binding
		fits    bool
		proceed bool
	}{
		{"proceed", spin.Binding{Place: 1000}, true, true},
		{"no handler", spin.Binding{Place: 1000}, true, false},
		{"just fits", spin.Binding{Place: 4096 - 2500}, true, true},
		{"its place is enough", spin.Binding{Place: 5, Size: 2500}, true, true},
		{"one byte too long for the window", spin.Binding{Place: 4096 - 2499}, false, true},
		{"one byte too long for its place", spin.Binding{Place: 5, Size: 2499}, false, true},
		{"far outside", spin.Binding{Place: 1 << 40}, false, true},
		{"negative", spin.Binding{Place: -1}, false, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			bothTables(t, func(t *testing.T, shared bool) {
				mem := bytes.Repeat([]byte{0xee}, 4096+64)
				b := newBench(t, benchConfig{
					shared: shared, noPayload: !tc.proceed, noHeader: !tc.proceed,
					header: func(*HER) spin.Code { return spin.Proceed },
					change: func(m *MessageConfig) {
						ev := m.Default.Events
						m.Default = tc.b
						m.Default.Window, m.Default.Events = Memory(mem[:4096:4096]), ev
					},
				})
				p := cut(1, 1, peerA, 2500, 1000)
				for i := range p {
					p[i].segs = 1 + i // the payload may span buffers
				}
				b.send(p...)
				b.quiet(0)
				e := b.event()
				ran := b.ran()
				for _, l := range ran {
					if strings.HasPrefix(l, "payload") {
						t.Errorf("a payload handler ran: %s", l)
					}
				}
				place := tc.b.Place
				if tc.fits {
					if e.Cause != spin.Complete {
						t.Errorf("%+v", e)
					}
					b.acked(0, 1000, 2000)
					for i := range 2500 {
						if mem[int(place)+i] != content(1, i) {
							t.Fatalf("byte %d is wrong", i)
						}
					}
					mem = append(mem[:place:place], mem[place+2500:]...)
				} else {
					if e.Cause != spin.Failed || !errors.Is(e.Err, spin.ErrBounds) {
						t.Errorf("%+v", e)
					}
					if slices.Contains(b.acks(), [2]uint32{1, 2000}) {
						t.Error("EOM is acknowledged")
					}
					mem = mem[4096:]
				}
				if n := bytes.Count(mem, []byte{0xee}); n != len(mem) {
					t.Errorf("%d bytes outside were written", len(mem)-n)
				}
				b.over()
			})
		})
	}
}

func TestPendingLeavesTheBinding(t *testing.T) {
	for _, tc := range []struct {
		header, completion spin.Code
		unbound            int64
	}{
		{spin.Success, spin.Success, 1}, {spin.Success | spin.Pending, spin.Success, 0}, {spin.Success, spin.Success | spin.Pending, 0},
		{spin.Drop | spin.Pending, spin.Success, 0}, {spin.Proceed | spin.Pending, spin.Success, 0}, {spin.Fail | spin.Pending, spin.Success, 0},
	} {
		t.Run(fmt.Sprint(tc.header, " ", tc.completion), func(t *testing.T) {
			var unbound atomic.Int64
			bnd := &funcBinder{unbind: func(*Message, *spin.Result) { unbound.Add(1) }}
			b := newBench(t, benchConfig{
				header:     func(*HER) spin.Code { return tc.header },
				completion: func(*Completion) spin.Code { return tc.completion },
				change:     func(m *MessageConfig) { bnd.b.Events = m.Default.Events; m.Binder = bnd },
			})
			b.send(cut(1, 1, peerA, 100, 100)...)
			b.event()
			b.over()
			if n := unbound.Load(); n != tc.unbound {
				t.Errorf("unbound %d times, want %d", n, tc.unbound)
			}
		})
	}
}

func TestRefusedMessageMayComeAgain(t *testing.T) {
	bothTables(t, func(t *testing.T, shared bool) {
		var open atomic.Bool
		var refusals atomic.Int64
		bnd := &funcBinder{bind: func(m *Message) error {
			if !open.Load() {
				if refusals.Add(1) == 3 {
					panic("the binder's own")
				}
				return errors.New("not yet")
			}
			return nil
		}}
		b := newBench(t, benchConfig{shared: shared, change: func(m *MessageConfig) {
			bnd.b.Events = m.Default.Events
			m.Binder = bnd
			m.Timeout = time.Minute
		}})
		p := cut(1, 1, peerA, 300, 100)
		for range 4 {
			b.send(p[0])
			b.expect(0)
		}
		b.send(p[1]) // held, and given back with the refusal
		b.expect(1)
		b.send(p[0])
		b.expect(0)
		b.acked()
		if st, _ := b.c.Messages(); st.Open != 0 || st.Refused != 5 || b.c.Stats().Unbound != 5 {
			t.Errorf("%+v, %d unbound", st, b.c.Stats().Unbound)
		}
		open.Store(true)
		b.send(p...)
		b.quiet(0)
		b.acked(0, 100, 200)
		b.event()
		b.over()
		kinds := map[spin.FaultKind]uint64{}
		for e := range b.Events() {
			if kinds[e.Kind] += e.More; e.Detail != "" {
				kinds[e.Kind]++
			}
		}
		if kinds[spin.MessageRefused] != 4 || kinds[spin.HandlerPanic] != 1 {
			t.Errorf("events: %v", kinds)
		}
	})
}

func TestReceivesMatchInOrder(t *testing.T) {
	var l Receives
	for i, r := range []spin.Receive{
		{Tag: 5},
		{Tag: 5},
		{Tag: 0x100, Ignore: 0xff},
		{Tag: 0x200, Ignore: 0xff, Keep: true},
	} {
		r.User = i
		if err := l.Post(r); err != nil {
			t.Fatal(err)
		}
	}
	b := newBench(t, benchConfig{change: func(m *MessageConfig) { m.Binder = &l }, header: func(h *HER) spin.Code {
		h.Count(h.Message().Binding().User.(int), 1)
		return spin.Success
	}})
	for i, id := range []uint32{5, 4, 5, 5, 0x1ff, 0x100, 0x200, 0x2aa, 0x300, 0x2ff} {
		p := cut(1, id, peerA, 10, 100)
		p[0].key[1]++ // who sends it does not matter
		p[0].key[2] += uint32(i)
		b.send(p...)
	}
	b.quiet(0)
	st := b.c.Stats()
	got := [4]uint64{}
	for i := range got {
		got[i] = st.User[i].Count
	}
	if want := [4]uint64{1, 1, 1, 3}; got != want || st.Unbound != 4 || l.Posted() != 1 {
		t.Errorf("taken %v, want %v; %d refused, %d posted", got, want, st.Unbound, l.Posted())
	}
	b.over()
}

func TestStateBeginsAnewWithEachMessage(t *testing.T) {
	bothTables(t, func(t *testing.T, shared bool) {
		seen := make(chan string, 10)
		b := newBench(t, benchConfig{shared: shared, header: func(h *HER) spin.Code {
			seen <- fmt.Sprint(h.Message().Slot(), " ", string(h.Message().State()))
			return spin.Success
		}, payload: func(h *HER) spin.Code {
			s := h.Message().State()
			for i := range s {
				s[i] = 'x'
			}
			return spin.Success
		}, change: func(m *MessageConfig) { m.State, m.Initial = 6, []byte("abc") }})
		for id := range uint32(3) {
			b.send(cut(1, id, peerA, 10, 100)...)
			b.event()
			b.quiet(0)
			if got := <-seen; got != "0 abc\x00\x00\x00" {
				t.Errorf("message %d: slot and state are %q", id, got)
			}
		}
		b.over()
	})
}

func TestIncompleteMessagesEndInTime(t *testing.T) {
	bothTables(t, func(t *testing.T, shared bool) {
		for _, tc := range []struct {
			name   string
			change func(*MessageConfig)
			want   []string
			events int
		}{
			{"abandon", func(m *MessageConfig) { m.Timeout = 20 * time.Millisecond },
				[]string{"completion 1: timed out, 500 bytes, 0 dropped, 200 missing"}, 1},
			{"linger", func(m *MessageConfig) { m.Incomplete, m.Linger, m.Timeout = mpq.Linger, time.Millisecond, time.Hour },
				[]string{"completion 1: timed out, 500 bytes, 0 dropped, 200 missing"}, 1},
			{"discard", func(m *MessageConfig) { m.Incomplete, m.Timeout = mpq.Discard, 20*time.Millisecond }, nil, 0},
		} {
			t.Run(tc.name, func(t *testing.T) {
				var unbound atomic.Int64
				bnd := &funcBinder{unbind: func(_ *Message, r *spin.Result) {
					if unbound.Add(1); r.Cause != spin.TimedOut || r.Missing != 200 || r.Length != 500 {
						t.Errorf("unbound: %+v", *r)
					}
				}}
				b := newBench(t, benchConfig{shared: shared, change: func(m *MessageConfig) {
					tc.change(m)
					bnd.b.Events = m.Default.Events
					m.Binder = bnd
				}})
				p := cut(1, 1, peerA, 500, 100)
				b.send(p[0], p[3], p[4])
				eventually(t, "the message ends", func() bool {
					st, _ := b.c.Messages()
					return st.Open == 0 && st.Abandoned+st.Discarded == 1
				})
				b.expect(0, append([]string{"header 1", "payload 1 at 0", "payload 1 at 300", "payload 1 at 400"}, tc.want...)...)
				for range tc.events {
					if e := b.event(); e.Cause != spin.TimedOut || e.Missing != 200 || e.Err != nil {
						t.Errorf("%+v", e)
					}
				}
				b.send(p...)
				b.expect(0)
				b.acked(0, 300)
				if unbound.Load() != 1 {
					t.Errorf("unbound %d times", unbound.Load())
				}
				b.over()
			})
		}
	})
}

// All messages end, those of which packets are held or kept as far as can be.
func TestDrainEndsMessages(t *testing.T) {
	bothTables(t, func(t *testing.T, shared bool) {
		kept := make(chan *Kept, 1)
		b := newBench(t, benchConfig{shared: shared, rig: rigConfig{hpus: 2, Config: Config{Workers: 2}}, payload: func(h *HER) spin.Code {
			if h.Message().Number() == 3 && h.Offset() == 100 {
				k, _ := h.Keep()
				kept <- k
			}
			return spin.Success
		}, change: func(m *MessageConfig) { m.Timeout = time.Minute }})
		b.send(cut(1, 1, peerA, 300, 100)[:2]...)
		b.send(cut(1, 2, peerA, 300, 100)[0])
		held := cut(1, 4, peerA, 300, 100)[1:]
		for i := range held {
			held[i].segs = 2
		}
		b.send(held...)
		b.send(cut(1, 3, peerA, 300, 100)...)
		k := <-kept
		b.quiet(5)
		b.ran()
		err := b.Drain(b.c, 500*time.Millisecond)
		if err == nil || !strings.Contains(err.Error(), "1 buffers") {
			t.Errorf("with a packet kept: %v", err)
		}
		got := b.ran()
		slices.Sort(got)
		if want := []string{"completion 1: removed, 200 bytes, 0 dropped, 0 missing", "completion 2: removed, 100 bytes, 0 dropped, 0 missing"}; !slices.Equal(got, want) {
			t.Errorf("%q ran, want %q", got, want)
		}
		for range 2 {
			if e := b.event(); e.Cause != spin.Removed || e.Number > 2 {
				t.Errorf("%+v", e)
			}
		}
		k.Release()
		b.quiet(0)
		if err := b.Drain(b.c, 0); err != nil {
			t.Error(err)
		}
		b.noEvent()
		b.settled()
		b.acks()
	})
}

// A context that is given up leaves nothing behind, whichever call it was that
// did not return, and others go on.
func TestCallsThatDoNotReturn(t *testing.T) {
	bothTables(t, func(t *testing.T, shared bool) {
		for _, where := range []string{"bind", "header", "payload", "completion", "unbind"} {
			t.Run(where, func(t *testing.T) {
				stuck, gate := make(chan struct{}), make(chan struct{})
				stop := func(here string) {
					if here == where {
						close(stuck)
						<-gate
					}
				}
				bnd := &funcBinder{
					bind:   func(m *Message) error { stop("bind"); return nil },
					unbind: func(*Message, *spin.Result) { stop("unbind") },
				}
				b := newBench(t, benchConfig{
					shared: shared, rig: rigConfig{hpus: 2, Config: Config{Workers: 1, Limit: shortLimit}},
					header: func(h *HER) spin.Code { stop("header"); return spin.Success },
					payload: func(h *HER) spin.Code {
						if h.Offset() == 0 {
							stop("payload")
						}
						return spin.Success
					},
					completion: func(*Completion) spin.Code { stop("completion"); return spin.Success },
					change:     func(m *MessageConfig) { bnd.b.Events = m.Default.Events; m.Binder = bnd },
				})
				other := b.install(2, echo)
				b.send(cut(1, 9, peerA, 300, 100)[1:]...) // held for ever
				b.send(cut(1, 1, peerA, 300, 100)...)
				<-stuck
				eventually(t, "the context is stopped", b.c.Stopped)
				b.receive(pkt{ctx: 2, data: numbered(1, 64)})
				eventually(t, "another context goes on", func() bool { return other.Stats().Handled == 1 })
				b.send(cut(1, 2, peerA, 300, 100)...)
				out := 1
				b.quiet(out) // what was held came back too
				before := b.ran()
				close(gate)
				b.quiet(0)
				if got := b.ran(); len(got) > 0 {
					t.Errorf("after that ran %q; before %q", got, before)
				}
				eventually(t, "nothing is stuck", func() bool { return b.Stuck() == 0 })
				if err := b.Drain(b.c, time.Hour); err != nil { // its messages do not end, and nobody waits for that
					t.Error(err)
				}
				eventually(t, "the echo has left", func() bool { return b.Idle(other) })
				b.settled()
				b.with(func() { // acknowledgements only, beside the echo
					b.sent = slices.DeleteFunc(b.sent, func(f wireFrame) bool { return len(f.data) == 64 })
				})
				for _, a := range b.acks() {
					if a[1] == 200 && where != "unbind" {
						t.Errorf("EOM is acknowledged")
					}
				}
				if st := b.c.Stats(); st.Acks != uint64(len(b.acks())) || st.Overruns != 1 {
					t.Errorf("%d acknowledgements on the wire: %+v", len(b.acks()), st)
				}
			})
		}
	})
}

// Buckets of lost packets are freed, that of an open message is not.
func TestSweepLeavesOpenMessagesTheirBuckets(t *testing.T) {
	b := newBench(t, benchConfig{rig: rigConfig{hpus: 2, Config: Config{Workers: 2}}})
	p := cut(1, 1, peerA, 400, 100)
	b.send(p[0])
	lost, other := p[1], segment(1, 2, peerA, 0, 100, false)
	lost.lose, other.lose = true, true
	b.send(lost, other)
	bucket := func(id uint32) uint64 { return atomic.LoadUint64(&b.buckets[testBuckets.Base+int(id)]) >> 32 }
	eventually(t, "the lost packets hold nothing any more", func() bool { return bucket(2) == 0 && bucket(1) == 1 })
	time.Sleep(10 * time.Millisecond)
	if n := bucket(1); n != 1 {
		t.Errorf("the open message's bucket has %d users", n)
	}
	b.send(p[1:]...)
	b.event()
	b.over()
}

func TestHandlersSendBesideAcknowledgements(t *testing.T) {
	bothTables(t, func(t *testing.T, shared bool) {
		b := newBench(t, benchConfig{shared: shared, payload: func(h *HER) spin.Code {
			f, err := h.SendNew(100)
			if err != nil {
				return spin.Fail
			}
			copy(f, numbered(uint64(h.Offset())<<8|1, 100))
			if h.Offset() != 100 {
				if h.Send() != nil {
					return spin.Fail
				}
				return spin.Success
			}
			return spin.Drop
		}, completion: func(c *Completion) spin.Code {
			f, err := c.SendNew(200)
			if err != nil {
				return spin.Fail
			}
			copy(f, numbered(2, 200))
			return spin.Success
		}})
		b.send(cut(1, 1, peerA, 300, 100)...)
		b.event()
		b.quiet(0)
		b.over()
		sizes := map[int]int{}
		for _, f := range b.wireFrames() {
			sizes[len(f.data)]++
			if len(f.data) == 152 && f.data[52] != content(1, int(binary.BigEndian.Uint32(f.data[48:]))) {
				t.Error("a packet that the handler sent was overwritten")
			}
		}
		if want := map[int]int{100: 3, 152: 2, 200: 1, 60: 3}; fmt.Sprint(sizes) != fmt.Sprint(want) {
			t.Errorf("frames by size %v, want %v", sizes, want)
		}
		if st := b.c.Stats(); st.Sent != 6 || st.Acks != 3 {
			t.Errorf("%d sent, %d acknowledgements", st.Sent, st.Acks)
		}
	})
}

func TestAcknowledgementsWithoutRoomAreCountedAndGivenLater(t *testing.T) {
	b := newBench(t, benchConfig{rig: rigConfig{txSize: 4}})
	ring := b.kernel.queues[0].rings[0]
	b.with(func() { ring.down = true })
	p := cut(1, 1, peerA, 1000, 100)
	b.send(p...)
	b.quiet(4)
	b.event()
	if st := b.c.Stats(); st.Acks != 4 || st.AckFull != 6 || st.SendFull != 0 || st.Handled != 10 {
		t.Errorf("%+v", st)
	}
	b.with(func() { ring.down = false })
	b.quiet(0)
	b.acked(0, 100, 200, 300)
	for _, q := range p[4:] {
		b.send(q)
		b.quiet(0)
	}
	b.acked(0, 100, 200, 300, 400, 500, 600, 700, 800, 900)
	b.over()
}

// In the format where every packet is a message.
func TestThreeHandlersOfOnePacket(t *testing.T) {
	for _, tc := range []struct {
		header, payload spin.Code
		want            string
		dropped         bool
	}{
		{spin.Success, spin.Success, "hpc", false},
		{spin.Success, spin.Drop, "hpc", true},
		{spin.Success, spin.Fail, "hp", false},
		{spin.Success, spin.Segv, "hp", false},
		{spin.Drop, spin.Success, "hc", true},
		{spin.Proceed, spin.Success, "hc", false},
		{spin.Success | spin.Pending, spin.Success, "hpc", false},
		{spin.Fail, spin.Success, "h", false},
		{spin.Segv, spin.Success, "h", false},
		{11, spin.Success, "h", false},
	} {
		t.Run(fmt.Sprint(tc.header, " ", tc.payload), func(t *testing.T) {
			r := newRig(t, rigConfig{})
			var mu sync.Mutex
			var ran string
			note := func(s string) { mu.Lock(); ran += s; mu.Unlock() }
			c := NewContext(1, "three", Handlers{
				Header:  func(*HER) spin.Code { note("h"); return tc.header },
				Payload: func(*HER) spin.Code { note("p"); return tc.payload },
				Completion: func(c *Completion) spin.Code {
					note("c")
					if c.Length != 30 || (c.Dropped == 30) != tc.dropped || c.Message() != nil {
						t.Errorf("%+v", c.Result)
					}
					return spin.Success
				},
			}, bpf.Range{})
			if err := r.Install(c); err != nil {
				t.Fatal(err)
			}
			r.receive(pkt{ctx: 1, data: segment(1, 1, peerA, 0, 20, true).data})
			r.settled()
			if ran != tc.want {
				t.Errorf("%q ran, want %q", ran, tc.want)
			}
		})
	}
}

func TestChecksumsOfMessages(t *testing.T) {
	sum := func(p pkt) pkt {
		binary.BigEndian.PutUint16(p.data[40:], 0)
		c := udpSum(p.data[:34], p.data[34:])
		binary.BigEndian.PutUint16(p.data[40:], c.Value())
		return p
	}
	partial := func(p pkt) pkt {
		var c = udpSum(p.data[:34], nil)
		_ = c
		n := len(p.data) - 34
		tail := []byte{0, 17, byte(n >> 8), byte(n)}
		v := ^checksum(append(slices.Clone(p.data[26:34]), tail...))
		binary.BigEndian.PutUint16(p.data[40:], v)
		return p
	}
	flip := func(p pkt) pkt { p = sum(p); p.data[60] ^= 4; return p }
	// unlucky has a complete checksum that looks like a partial one: bytes that make it so are looked for once.
	found := 0
	unlucky := func(p pkt) pkt {
		p = partial(p)
		want := binary.BigEndian.Uint16(p.data[40:])
		for v := found; v < 1<<16; v++ {
			binary.BigEndian.PutUint16(p.data[60:], uint16(v))
			if p = sum(p); binary.BigEndian.Uint16(p.data[40:]) == want {
				found = v
				return p
			}
		}
		t.Fatal("there is none")
		return p
	}
	for _, tc := range []struct {
		name   string
		make   func(pkt) pkt
		accept [3]bool // by Checksums
		plain  bool    // counted as unverified
	}{
		{"right", sum, [3]bool{true, true, true}, false},
		{"wrong", flip, [3]bool{false, false, true}, false},
		{"partial", partial, [3]bool{true, false, true}, true},
		{"none", func(p pkt) pkt { return p }, [3]bool{true, false, true}, true},
		{"unlucky", unlucky, [3]bool{true, true, true}, true},
	} {
		for mode := VerifyComplete; mode <= VerifyNone; mode++ {
			for segs := 1; segs < 4; segs++ {
				t.Run(fmt.Sprintf("%s,%v,%d buffers", tc.name, mode, segs), func(t *testing.T) {
					b := newBench(t, benchConfig{change: func(m *MessageConfig) { m.Checksums = mode }})
					p := tc.make(segment(1, 1, peerA, 0, 601, true))
					p.segs = segs
					b.send(p)
					b.quiet(0)
					st := b.c.Stats()
					if (st.Handled == 1) != tc.accept[mode] || (st.Corrupt == 1) == tc.accept[mode] {
						t.Errorf("%d handled, %d corrupt", st.Handled, st.Corrupt)
					}
					if plain := tc.plain && mode == VerifyComplete; (st.Unverified == 1) != plain {
						t.Errorf("%d unverified", st.Unverified)
					}
					if tc.accept[mode] {
						b.event()
					}
					b.over()
				})
			}
		}
	}
	t.Run("held packets are looked at once", func(t *testing.T) {
		b := newBench(t, benchConfig{})
		p := cut(1, 1, peerA, 200, 100)
		b.send(p[1])
		b.quiet(1)
		b.send(p[0])
		b.event()
		b.quiet(0)
		if n := b.c.Stats().Unverified; n != 2 {
			t.Errorf("%d of 2 packets have no checksum", n)
		}
		b.over()
	})
}

func TestSegmentsThatContradictThemselves(t *testing.T) {
	b := newBench(t, benchConfig{})
	short := segment(1, 1, peerA, 0, 0, true)
	short.data = short.data[:50]
	lying := segment(1, 1, peerA, 0, 100, true)
	binary.BigEndian.PutUint16(lying.data[38:], 2000)
	tiny := segment(1, 1, peerA, 0, 100, true)
	binary.BigEndian.PutUint16(tiny.data[38:], 9)
	ack := segment(1, 1, peerA, 0, 0, false)
	ack.data[42] |= 0x20
	b.send(short, lying, tiny, ack)
	b.expect(0)
	if st := b.c.Stats(); st.Malformed != 3 || st.Stray != 1 {
		t.Errorf("%d malformed, %d stray", st.Malformed, st.Stray)
	}
	b.acked()
	b.over()
}

// Handlers of all HPUs may ask for the length while segments come.
func TestLengthOfASharedMessage(t *testing.T) {
	r := newRig(t, rigConfig{hpus: 2, Config: Config{Workers: 2}})
	c := r.receiveMessages(1, Handlers{Payload: func(h *HER) spin.Code {
		if n, ok := h.Message().Length(); ok && n != 800 {
			t.Errorf("length %d", n)
		}
		return spin.Success
	}}, func(m *MessageConfig) { m.Shared, m.Held = true, 256 })
	for id := range uint32(200) {
		p := cut(1, id, peerA, 800, 100)
		for i := range p {
			p[i].hpu = i % 2
			for r.receive(p[i]) == 0 {
				runtime.Gosched()
			}
		}
	}
	eventually(t, "all messages end", func() bool { st, _ := c.Messages(); return st.Ended == 200 })
	r.settled()
}

func TestStatePerMessage(t *testing.T) {
	n := unsafe.Sizeof(Message{}) + unsafe.Sizeof(mpq.Entry{})
	n += unsafe.Sizeof((*Message)(nil)) + 2*unsafe.Sizeof((*mpq.Entry)(nil)) + 16 // lists of slots, chains, timers
	t.Logf("%d bytes", n)
	if n > 512 {
		t.Errorf("a message in flight costs %d bytes, more than 512", n)
	}
}

func TestReceivingAllocatesNothing(t *testing.T) {
	bothTables(t, func(t *testing.T, shared bool) {
		for _, small := range []bool{false, true} {
			t.Run(fmt.Sprintf("one packet each=%v", small), func(t *testing.T) {
				mem := make(Memory, 1<<20)
				// The handlers of newBench print, so: others.
				r := newRig(t, rigConfig{rxSize: 256})
				r.with(func() { r.quiet = true })
				ev := make(chan spin.MessageEvent, 64)
				c := r.receiveMessages(1, Handlers{
					Header:     func(*HER) spin.Code { return spin.Success },
					Payload:    func(h *HER) spin.Code { _ = h.Deposit(); return spin.Success },
					Completion: func(*Completion) spin.Code { return spin.Success },
				}, func(m *MessageConfig) {
					m.Shared, m.Default = shared, spin.Binding{Window: mem, Events: spin.EventChan(ev)}
				})
				n := 64
				all := make([]pkt, n)
				next := uint32(0)
				round := func() {
					for i := range all {
						if small {
							next++
							all[i].key[3] = next
							binary.BigEndian.PutUint32(all[i].data[44:], next)
						} else {
							all[i].key[3] = next
						}
					}
					next++
					r.receive(all...)
					for !r.idle() {
						runtime.Gosched()
					}
					for len(ev) > 0 {
						<-ev
					}
				}
				for i := range all {
					if small {
						all[i] = segment(1, 0, peerA, 0, 100, true)
					} else {
						all[i] = segment(1, 0, peerA, uint32(i*1000), 1000, i == n-1)
					}
					if !shared {
						all[i].bucket = &testBuckets
					}
				}
				allocs := testing.AllocsPerRun(50, round)
				t.Logf("%.1f allocations for %d packets", allocs, n)
				if allocs > 4 {
					t.Errorf("%.1f allocations for %d packets", allocs, n)
				}
				if st := c.Stats(); st.Handled != uint64(51*n) {
					t.Errorf("%d of %d handled", st.Handled, 51*n)
				}
				r.settled()
			})
		}
	})
}

// BenchmarkMessages has messages of one packet, and of many, received into a window.
func BenchmarkMessages(b *testing.B) {
	for _, packets := range []int{1, 64} {
		b.Run(fmt.Sprintf("packets=%d", packets), func(b *testing.B) {
			r := newRig(b, rigConfig{rxSize: 256, Config: Config{Wait: Spin}})
			r.kernel.quiet, r.kernel.free = true, true
			r.receiveMessages(1, Handlers{
				Header:     func(*HER) spin.Code { return spin.Success },
				Payload:    func(h *HER) spin.Code { _ = h.Deposit(); return spin.Success },
				Completion: func(*Completion) spin.Code { return spin.Success },
			}, func(m *MessageConfig) { m.Default.Window = make(Memory, 1<<20) })
			ps := make([]pkt, 64)
			for i := range ps {
				k := i % packets
				ps[i] = segment(1, 0, peerA, uint32(k*100), 100, k == packets-1)
				ps[i].bucket = &testBuckets
			}
			b.ReportAllocs()
			b.ResetTimer()
			next := uint32(0)
			for n := 0; n < b.N; n += len(ps) {
				for i := range ps {
					if i%packets == 0 {
						next++
					}
					ps[i].key[3] = next
					binary.BigEndian.PutUint32(ps[i].data[44:], next)
				}
				traffic(r, len(ps), ps)
			}
			b.StopTimer()
			hpus, _ := r.Stats()
			b.ReportMetric(float64(hpus[0].Busy)/float64(hpus[0].Handled), "busy-ns/op")
		})
	}
}
