// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"fmt"
	"math"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/mpq"
)

// A Code is what a handler returns, see the table of return codes in
// docs/architecture.md.
type Code int

// Return codes.
const (
	Success Code = iota
	Drop         // the packet's bytes count as dropped; of a header handler: all packets' bytes
	Fail         // an error of the handler's: nothing it asked for is sent or kept
	Segv         // the same, for an access outside of a window
	Proceed      // of a header handler: put the payload into the window, no payload handler

	// ProcessData, of a header handler: run the payload handler.
	ProcessData = Success

	// Pending, added to a code of a header or completion handler: the
	// message's binding stays when the message has ended.
	Pending Code = 16
)

func (c Code) String() string {
	if c&Pending != 0 {
		return (c &^ Pending).String() + "|Pending"
	}
	if c >= 0 && int(c) < len(codes) {
		return codes[c]
	}
	return fmt.Sprintf("Code(%d)", int(c))
}

var codes = []string{"Success", "Drop", "Fail", "Segv", "Proceed"}

// A Handler runs once for a packet. The HER and all bytes reached through it are
// good until it returns.
type Handler func(*HER) Code

// Handlers of an execution context. In one with messages each may be nil: payload
// without a handler goes to the message's window, if it has one, and counts as
// processed. Where every packet is a whole message, the three run one after the
// other. In contexts without messages, and without end of one, there is Payload only.
type Handlers struct {
	Header     Handler           // once, with the packet of offset 0, before all others
	Payload    Handler           // for every packet, the first and the last included
	Completion CompletionHandler // once, after all payload HERs have finished

	// In contexts of all kinds.
	Init  func(*Task) error // once, before the context is activated
	Timer func(*Task) Code  // as often as Resources.Timer says, on one HPU
}

// UserCounters is how many counters the handlers of a context have.
const UserCounters = 16

// A UserCounter is FPsPIN's pair: how much, and how often.
type UserCounter struct {
	Sum   uint64 `json:"sum"`
	Count uint64 `json:"count"`
}

// Mean returns Sum/Count, and 0 for nothing counted.
func (c UserCounter) Mean() float64 {
	if c.Count == 0 {
		return 0
	}
	return float64(c.Sum) / float64(c.Count)
}

// HistogramBuckets is the number of buckets in a histogram of handler time.
const HistogramBuckets = 32

// A Histogram counts durations: bucket i those of less than 2^i ns, and not less
// than 2^(i-1). The last takes all longer ones.
type Histogram [HistogramBuckets]uint64

func (h *Histogram) add(ns int64) { h[min(bits.Len64(uint64(ns)), HistogramBuckets-1)]++ }

// ContextStats are what a context's handlers did.
type ContextStats struct {
	Handled  uint64 `json:"handled"`   // handlers that returned
	Dropped  uint64 `json:"dropped"`   // of these: Drop
	Failed   uint64 `json:"failed"`    // of these: Fail
	Panics   uint64 `json:"panics"`    // handlers that did not return but panicked
	Overruns uint64 `json:"overruns"`  // handlers that ran past their time limit
	Unrun    uint64 `json:"unrun"`     // packets given back without a handler: stopped or removed
	Lost     uint64 `json:"lost"`      // buffers that never reached the HPU, credit returned
	Sent     uint64 `json:"sent"`      // frames given to the tx ring
	SendFull uint64 `json:"send_full"` // sends refused because a ring or the spare frames ran out
	ToStack  uint64 `json:"to_stack"`  // packets handed to the Linux stack

	// In contexts with messages; see also Context.Messages.
	Headers     uint64 `json:"headers"`     // header handlers that returned
	Completions uint64 `json:"completions"` // completion handlers that returned
	Acks        uint64 `json:"acks"`        // answers given to a tx ring
	AckFull     uint64 `json:"ack_full"`    // answers not sent for lack of room
	Stray       uint64 `json:"stray"`       // packets that are no segments, such as acknowledgements
	Malformed   uint64 `json:"malformed"`   // packets whose lengths contradict each other
	Corrupt     uint64 `json:"corrupt"`     // packets dropped for their checksum
	Unverified  uint64 `json:"unverified"`  // packets without a complete checksum, taken nevertheless
	Unbound     uint64 `json:"unbound"`     // messages refused by the binder, once for each packet
	EventsLost  uint64 `json:"events_lost"` // of messages that failed or were abandoned: no room

	Requests   uint64 `json:"requests"`   // to the application
	Unasked    uint64 `json:"unasked"`    // of these, dropped because the ring was full
	Unanswered uint64 `json:"unanswered"` // of these, given up: no answer in time, or nobody there
	Timers     uint64 `json:"timers"`     // timer handlers that returned
	Triggers   uint64 `json:"triggers"`   // messages of the host's that were begun

	HandlerTime Histogram     `json:"handler_time_log2_ns"`
	HandlerSum  time.Duration `json:"handler_time_ns"`

	User [UserCounters]UserCounter `json:"user"`
}

func (s *ContextStats) merge(a *ContextStats) {
	s.Handled += a.Handled
	s.Dropped += a.Dropped
	s.Failed += a.Failed
	s.Panics += a.Panics
	s.Overruns += a.Overruns
	s.Unrun += a.Unrun
	s.Lost += a.Lost
	s.Sent += a.Sent
	s.SendFull += a.SendFull
	s.ToStack += a.ToStack
	s.Headers += a.Headers
	s.Completions += a.Completions
	s.Acks += a.Acks
	s.AckFull += a.AckFull
	s.Stray += a.Stray
	s.Malformed += a.Malformed
	s.Corrupt += a.Corrupt
	s.Unverified += a.Unverified
	s.Unbound += a.Unbound
	s.EventsLost += a.EventsLost
	s.Requests += a.Requests
	s.Unasked += a.Unasked
	s.Unanswered += a.Unanswered
	s.Timers += a.Timers
	s.Triggers += a.Triggers
	s.HandlerSum += a.HandlerSum
	if a.Handled > 0 {
		for i, n := range a.HandlerTime {
			s.HandlerTime[i] += n
		}
	}
	for i, c := range a.User {
		s.User[i].Sum += c.Sum
		s.User[i].Count += c.Count
	}
}

// Context is an execution context as the HPUs know it. Create it with
// [NewContext]; its methods are safe for concurrent use.
type Context struct {
	id       uint16
	name     string
	handlers Handlers
	buckets  bpf.Range      // of the program's buckets; empty for policies without
	hpus     uint64         // that it may use
	msgs     *messages      // nil without messages
	pins     []atomic.Int32 // by bucket: open messages that hold it
	res      Resources
	tap      atomic.Pointer[Tap]
	ready    atomic.Bool // Pool.Init has returned: timers run
	tick     int64       // when the timer is due, ns; its worker's

	stuck    atomic.Int64  // handlers that were given up and have not returned
	halt     atomic.Uint32 // why no handler may run any more
	crowded  atomic.Bool   // a handler has waited for room for a request in vain
	hostless atomic.Bool   // a handler has asked, and it was logged that there is nobody
	leaky    atomic.Bool   // its buckets may be held by packets that were lost

	mu    sync.Mutex
	stats ContextStats // merged once a batch, so that pairs are consistent

	gates [eventKinds]eventGate // of its events
}

// Bits of Context.halt.
const (
	haltStopped = 1 << iota // a handler ran past its time limit
	haltRemoved             // see Pool.Drain
)

// NewContext returns a context for Pool.Install. buckets is its range of the
// program's buckets, empty for policies that need none.
func NewContext(id uint16, name string, h Handlers, buckets bpf.Range) *Context {
	return &Context{id: id, name: name, handlers: h, buckets: buckets, hpus: math.MaxUint64}
}

// NewMessageContext returns a context with messages, whose handlers run on the
// HPUs of the mask.
func NewMessageContext(id uint16, name string, h Handlers, buckets bpf.Range, hpus uint64, cfg MessageConfig) (*Context, error) {
	ms, err := newMessages(cfg)
	if err != nil {
		return nil, err
	}
	c := NewContext(id, name, h, buckets)
	c.hpus = hpus
	c.msgs = ms
	if !cfg.Shared {
		c.pins = make([]atomic.Int32, buckets.Size)
	}
	return c, nil
}

// Messages returns what became of the context's messages, and false if it has
// none.
func (c *Context) Messages() (mpq.Stats, bool) {
	if c.msgs == nil {
		return mpq.Stats{}, false
	}
	return c.msgs.queue.Stats(), true
}

// ID returns the context's number in the matching table.
func (c *Context) ID() uint16 { return c.id }

// Name returns what the context is called in events and statistics.
func (c *Context) Name() string { return c.name }

// Stopped tells whether the context runs no handlers any more because one of
// them ran past its time limit.
func (c *Context) Stopped() bool { return c.halt.Load()&haltStopped != 0 }

// Stuck returns how many handlers of the context have run past their time limit and not
// returned.
func (c *Context) Stuck() int { return int(c.stuck.Load()) }

// Stats returns a consistent copy of the context's statistics.
func (c *Context) Stats() ContextStats {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stats
}

// ClearCounters zeroes the user counters and returns what they were.
func (c *Context) ClearCounters() [UserCounters]UserCounter {
	c.mu.Lock()
	defer c.mu.Unlock()
	old := c.stats.User
	c.stats.User = [UserCounters]UserCounter{}
	return old
}

// bucket returns the bucket of messages whose key hashes to hash.
func (c *Context) bucket(hash uint32) int32 {
	return int32(c.buckets.Base + int(hash&uint32(c.buckets.Size-1)))
}

func (c *Context) add(a *ContextStats) {
	c.mu.Lock()
	c.stats.merge(a)
	c.mu.Unlock()
}

// An eventGate lets one event a period through, and counts the others. It is safe for
// concurrent use.
type eventGate struct {
	next atomic.Int64 // when it lets the next one through, CLOCK_MONOTONIC
	held atomic.Uint64
	hpu  atomic.Int32 // of the last one held back
}

// pass tells whether an event may be told now, and how many were not since the last one.
func (g *eventGate) pass(now int64, period time.Duration, hpu int) (held uint64, ok bool) {
	if period < 0 {
		return 0, true
	}
	next := g.next.Load()
	if now < next || !g.next.CompareAndSwap(next, now+int64(period)) {
		g.hpu.Store(int32(hpu))
		g.held.Add(1)
		return 0, false
	}
	return g.held.Swap(0), true
}

// An EventKind says what happened.
type EventKind int

// Kinds of events.
const (
	HandlerFailed  EventKind = iota // a handler returned Fail or Segv
	HandlerPanic                    // contained: the packet is lost, the context goes on
	HandlerOverrun                  // past its time limit: the context is stopped
	MessageRefused                  // the binder refused a message
	eventKinds
)

func (k EventKind) String() string {
	switch k {
	case HandlerFailed:
		return "handler failed"
	case HandlerPanic:
		return "handler panic"
	case HandlerOverrun:
		return "handler overrun"
	case MessageRefused:
		return "message refused"
	}
	return fmt.Sprintf("EventKind(%d)", int(k))
}

// An Event tells the application what went wrong in a handler. It may happen with every
// packet, so a context has at most one event of a kind each Config.Faults. Those that were
// held back are in the next one, or in one of their own when that time, or the context, is
// over.
type Event struct {
	Kind    EventKind
	Context uint16
	Name    string // of the context
	HPU     int
	Detail  string // panic value and stack, the error, or the time; "" if there is More only
	More    uint64 // that were held back before it
}

func (e Event) String() string {
	return fmt.Sprintf("context %d (%s) on HPU %d: %s", e.Context, e.Name, e.HPU, e.Text())
}

// Text says what happened, and how often.
func (e Event) Text() string {
	switch {
	case e.More == 0:
		return fmt.Sprintf("%s: %s", e.Kind, e.Detail)
	case e.Detail == "":
		return fmt.Sprintf("%s: %d more", e.Kind, e.More)
	}
	return fmt.Sprintf("%s (and %d before it): %s", e.Kind, e.More, e.Detail)
}
