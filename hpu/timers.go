// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/xspin/xspin/internal/clock"
	"github.com/xspin/xspin/mpq"
)

// timerEvery is how often workers look at the time of messages.
const timerEvery = time.Millisecond

// errandsAndTimers runs what is not a packet from a ring. It returns whether there was
// something to do, and false if the runner was abandoned.
func (r *runner) errandsAndTimers() (worked, ok bool) {
	if jobs := r.w.jobs; len(jobs) > 0 {
		worked = true
		r.w.jobs, r.w.spent = r.w.spent, nil // these may make new ones
		if !r.serveJobs(jobs) {
			return worked, false
		}
		clear(jobs)
		r.w.spent = jobs[:0]
	}
	if len(r.w.chores) > 0 || len(r.w.triggers) > 0 {
		worked = true
		if !r.errands() {
			return worked, false
		}
	}
	list := r.pool.timed.Load()
	if list == nil {
		return worked, true
	}
	return worked, r.timers(*list)
}

// timers ends messages whose time is up, runs timer handlers, and does what was put
// off. It returns false if the runner was abandoned.
func (r *runner) timers(list []*Context) bool {
	now := r.pool.scale.Ticks()
	if r.pool.scale.Nanoseconds(now-r.timed) < int64(timerEvery) && r.pool.ending.Load() == 0 {
		return true
	}
	r.timed = now
	for _, c := range list {
		if c.halt.Load() != 0 {
			r.pool.flush(c)
			continue
		}
		if !r.tick1(c) || c.msgs != nil && !r.expired(c) {
			return false
		}
	}
	// Each once. What retry does not get to is the next runner's.
	for range len(r.w.deferred) {
		d := r.w.deferred[0]
		r.w.deferred = slices.Delete(r.w.deferred, 0, 1)
		if !r.retry(d) {
			return false
		}
	}
	return true
}

// expired ends what is to end of a context's messages: a batch of each table's, for
// packets wait meanwhile.
func (r *runner) expired(c *Context) bool {
	if r.w.portFor(c, nil) == nil {
		return true // the worker has no HPU of the context's
	}
	ms := c.msgs
	all := r.pool.ending.Load() > 0 && r.pool.isEnding(c)
	for i := range ms.tables {
		t := &ms.tables[i]
		if !ms.cfg.Shared && i != r.w.id {
			continue
		}
		for range batchSize {
			t.lock()
			var e *mpq.Entry
			h := her{job: expireJob, cause: TimedOut}
			if all {
				h.cause = Removed
				for open := range t.All() {
					if t.Stop(open) {
						e = open
						break
					}
				}
			} else {
				e = t.Expired(clock.Monotonic())
			}
			var came *port
			if e != nil {
				h.msg = ms.message(c, e)
				came = h.msg.port
			}
			t.unlock()
			if e == nil {
				break
			}
			h.meta.Context = c.id
			if !r.serveOne(r.w.portFor(c, came), h) {
				return false
			}
		}
	}
	return true
}

// expire ends a message whose time is up, or whose context ends: HER k has no
// packet. Its entry is ending already, so nobody else looks at the message.
func (r *runner) expire(c *Context, h *her, k int) bool {
	t, m := h.msg.table, h.msg
	ms := c.msgs
	r.her.msg = m
	switch was := m.entry.State(); {
	case was == mpq.Waiting: // no handler has seen it
		t.lock()
		r.disown(t, m)
		t.Refuse(m.entry)
		t.unlock()
		return true
	case was == mpq.Deferred: // its result is there
		r.result = m.waits.result
		if !r.event(m, MessageEvent{Result: r.result}) {
			return r.fail(t, m, k, errNoEvent, true)
		}
	case ms.cfg.Incomplete == mpq.Discard && h.cause == TimedOut:
		t.lock()
		r.result = m.sum(h.cause)
		t.unlock()
	default:
		t.lock()
		r.result = m.sum(h.cause)
		t.unlock()
		return r.complete(t, m, k)
	}
	if !r.unbind(m, r.result, k) {
		return false
	}
	t.lock()
	r.disown(t, m)
	t.End(m.entry, r.base)
	t.unlock()
	return true
}

var errNoEvent = errors.New("complete, but nobody took its event in time")

// A deferred message is complete, and waits for room in its event queue. It has
// one of these for so long, in the list of the worker that completed it.
type deferred struct {
	t      *table
	m      *Message // not to be looked at when it is over: its slot may be another's
	result Result
	over   bool // whoever has the table
}

// retry tries to tell the application once more that a message is complete.
func (r *runner) retry(d *deferred) bool {
	c := d.m.ctx
	if c.halt.Load() != 0 {
		return true
	}
	var came *port
	d.t.lock()
	over := d.over
	mine := !over && d.t.Retry(d.m.entry, clock.Monotonic())
	if !over {
		came = d.m.port
	}
	d.t.unlock()
	if over {
		return true
	}
	r.w.deferred = append(r.w.deferred, d)
	if !mine {
		return true
	}
	h := her{msg: d.m, job: notifyJob, deferred: d}
	h.meta.Context = c.id
	return r.serveOne(r.w.portFor(c, came), h)
}

// flush gives back what is held for messages of a context that was stopped: its
// tables are not touched any more, and nothing more is held.
func (p *Pool) flush(c *Context) {
	ms := c.msgs
	if ms == nil {
		return
	}
	ms.mu.Lock()
	var held []*Kept
	if !ms.flushed {
		ms.flushed = true
		for _, m := range ms.slots {
			if m != nil && m.held != nil {
				held = append(held, *m.held...)
				m.held = nil
			}
		}
	}
	ms.mu.Unlock()
	for _, k := range held {
		k.job = releaseJob
		p.giveBack(k)
	}
}

// nextTimer returns in how many ms timers has something to do, -1 for never.
func (r *runner) nextTimer() int {
	if len(r.w.deferred) > 0 || len(r.w.jobs) > 0 {
		return soon
	}
	list := r.pool.timed.Load()
	if list == nil {
		return -1
	}
	next := int64(0)
	for _, c := range *list {
		if c.halt.Load() != 0 {
			continue
		}
		if c.res.Timer != 0 && c.ready.Load() && r.pool.home(c) == r.w && (next == 0 || c.tick < next) {
			next = max(c.tick, 1)
		}
		if c.msgs == nil {
			continue
		}
		for i := range c.msgs.tables {
			t := &c.msgs.tables[i]
			if !t.shared && i != r.w.id {
				continue
			}
			t.lock()
			n := t.Next()
			t.unlock()
			if n != 0 && (next == 0 || n < next) {
				next = n
			}
		}
	}
	if next == 0 {
		return -1
	}
	return int(max(next-clock.Monotonic(), 0)/int64(time.Millisecond)) + 1
}

// Ending contexts: see Drain.

func (p *Pool) isEnding(c *Context) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return c.msgs.ending
}

func (p *Pool) setEnding(c *Context, on bool) {
	if c.msgs == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if c.msgs.ending == on {
		return
	}
	c.msgs.ending = on
	if on {
		p.ending.Add(1)
	} else {
		p.ending.Add(-1)
	}
}

// keepTime keeps the lists of contexts with messages or timers, and of those with an
// application.
func (p *Pool) keepTime(c *Context, on bool) {
	if !on {
		defer p.flush(c) // no worker will
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if c.msgs != nil || c.res.Timer != 0 {
		enlist(&p.timed, c, on)
	}
	if c.res.Host != nil {
		enlist(&p.hosting, c, on)
	}
}

// enlist adds a context to a list, or takes it away. Nil is the empty list.
func enlist(to *atomic.Pointer[[]*Context], c *Context, on bool) {
	var list []*Context
	if old := to.Load(); old != nil {
		list = slices.Clone(*old)
	}
	list = slices.DeleteFunc(list, func(x *Context) bool { return x == c })
	if on {
		list = append(list, c)
	}
	if len(list) == 0 {
		to.Store(nil)
		return
	}
	to.Store(&list)
}

// open returns how many messages the context has in flight.
func (c *Context) open() int {
	if c.msgs == nil {
		return 0
	}
	return c.msgs.queue.Open()
}
