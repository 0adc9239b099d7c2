// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/spin"
)

// A Handler runs once for a packet. The HER and all bytes reached through it are
// good until it returns.
type Handler func(*HER) spin.Code

// Handlers of an execution context. In one with messages each may be nil: payload
// without a handler goes to the message's window, if it has one, and counts as
// processed. Where every packet is a whole message, the three run one after the
// other. In contexts without messages, and without end of one, there is Payload only.
type Handlers struct {
	Header     Handler           // once, with the packet of offset 0, before all others
	Payload    Handler           // for every packet, the first and the last included
	Completion CompletionHandler // once, after all payload HERs have finished

	// In contexts of all kinds.
	Init  func(*Task) error     // once, before the context is activated
	Timer func(*Task) spin.Code // as often as Resources.Timer says, on one HPU
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
	memory   []byte // of res
	perHPU   []byte // of res
	tap      atomic.Pointer[Tap]
	ready    atomic.Bool // Pool.Init has returned: timers run
	tick     int64       // when the timer is due, ns; its worker's

	stuck    atomic.Int64  // handlers that were given up and have not returned
	halt     atomic.Uint32 // why no handler may run any more
	crowded  atomic.Bool   // a handler has waited for room for a request in vain
	hostless atomic.Bool   // a handler has asked, and it was logged that there is nobody
	leaky    atomic.Bool   // its buckets may be held by packets that were lost

	mu    sync.Mutex
	stats spin.ContextStats // merged once a batch, so that pairs are consistent

	gates [spin.FaultKinds]eventGate // of its events
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
func (c *Context) Messages() (spin.MessageStats, bool) {
	if c.msgs == nil {
		return spin.MessageStats{}, false
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
func (c *Context) Stats() spin.ContextStats {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stats
}

// bucket returns the bucket of messages whose key hashes to hash.
func (c *Context) bucket(hash uint32) int32 {
	return int32(c.buckets.Base + int(hash&uint32(c.buckets.Size-1)))
}

func (c *Context) add(a *spin.ContextStats) {
	c.mu.Lock()
	c.stats.Add(a)
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
