// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/spin"
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
	more, ok := r.timers(*list)
	return worked || more, ok
}

// timers ends messages whose time is up, runs timer handlers, and tries events again
// that found no room. It returns whether a batch was not enough, so that the worker does
// not sleep, and false if the runner was abandoned.
func (r *runner) timers(list []*Context) (more, ok bool) {
	now := r.pool.scale.Ticks()
	if !r.more && r.pool.scale.Nanoseconds(now-r.timed) < int64(timerEvery) && r.pool.ending.Load() == 0 && r.pool.cfg.Clock == nil {
		return false, true
	}
	r.timed, r.more = now, false
	for _, c := range list {
		if c.halt.Load() != 0 {
			r.pool.flush(c)
			continue
		}
		if !r.tick1(c) || c.msgs != nil && !(r.expired(c) && r.retry(c)) {
			return false, false
		}
	}
	return r.more, true
}

// expired ends what is to end of a context's messages: a batch of each table's, for
// packets wait meanwhile. It notes if that was not all.
func (r *runner) expired(c *Context) bool {
	if r.w.portFor(c, nil) == nil {
		return true // none of the context's HPUs is this worker's
	}
	ms := c.msgs
	all := r.pool.ending.Load() > 0 && r.pool.isEnding(c)
	for i := range ms.tables {
		t := &ms.tables[i]
		if !ms.cfg.Shared && i != r.w.id {
			continue
		}
		for k := range batchSize {
			t.lock()
			var e *mpq.Entry
			h := her{job: expireJob, cause: spin.TimedOut}
			if all {
				h.cause = spin.Removed
				e = t.StopNext()
			} else {
				e = t.Expired(r.pool.now())
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
			r.more = r.more || k == batchSize-1
		}
	}
	return true
}

// expire ends a message whose time is up, or whose context ends: the HER has no
// packet. Its entry is ending already, so nobody else looks at the message.
func (r *runner) expire(c *Context, h *her) bool {
	t, m := h.msg.table, h.msg
	ms := c.msgs
	r.her.msg = m
	var res spin.Result
	switch was := m.entry.State(); {
	case was == mpq.Waiting: // no handler has seen it
		t.lock()
		r.disown(t, m)
		t.Refuse(m.entry)
		t.unlock()
		return true
	case was == mpq.Deferred: // its result is there
		res = m.waits.result
		if !r.event(m, spin.MessageEvent{Result: res}) {
			return r.fail(t, m, errNoEvent, true)
		}
	case ms.cfg.Incomplete == mpq.Discard && h.cause == spin.TimedOut:
		t.lock()
		res = m.sum(h.cause)
		t.unlock()
	default:
		t.lock()
		res = m.sum(h.cause)
		t.unlock()
		return r.complete(t, m, res)
	}
	if !r.unbind(m, res) {
		return false
	}
	t.lock()
	r.disown(t, m)
	t.End(m.entry, r.batch.base)
	t.unlock()
	return true
}

var errNoEvent = errors.New("complete, but the application did not take its event in time")

// A deferred message is complete, and waits for room in its event queue. It has
// one of these for so long, in the queue of the worker that completed it.
type deferred struct {
	t      *table
	m      *Message // not to be looked at when it is over: its slot may be another's
	result spin.Result
	over   atomic.Bool // set by whoever has the table
}

// waiting is the deferred messages of a context that a worker has completed, in that
// order. Only the first is tried, with pauses, until it is over: a context may have
// thousands, and as long as there is no room for one there is none for the others. One
// with an event queue of its own that has room is tried when its sender asks.
type waiting struct {
	list  []*deferred
	due   int64 // when the first is tried again
	pause time.Duration
}

// Pauses between two tries.
const (
	minPause = timerEvery
	maxPause = 100 * time.Millisecond
)

// add puts a message at the end.
func (q *waiting) add(d *deferred, now int64) {
	if q.first() == nil {
		q.pause = 0
		q.wait(now)
	}
	if len(q.list) == cap(q.list) {
		q.list = slices.DeleteFunc(q.list, (*deferred).isOver)
		q.list = slices.Grow(q.list, len(q.list)+1) // so the next time is far
	}
	q.list = append(q.list, d)
}

// first returns the message to be tried, nil if there is none.
func (q *waiting) first() *deferred {
	for len(q.list) > 0 {
		if d := q.list[0]; !d.isOver() {
			return d
		}
		q.list[0] = nil
		q.list = q.list[1:]
	}
	q.list = nil
	return nil
}

// hope has the first tried at once: there was room for another.
func (q *waiting) hope(now int64) { q.due, q.pause = now, 0 }

// wait has the first tried after a pause, longer than the last one.
func (q *waiting) wait(now int64) {
	q.pause = min(max(2*q.pause, minPause), maxPause)
	q.due = now + int64(q.pause)
}

func (d *deferred) isOver() bool { return d.over.Load() }

// retry tries to tell the application once more that messages of a context are
// complete: a batch of them, for packets wait meanwhile.
func (r *runner) retry(c *Context) bool {
	q := &c.msgs.waiting[r.w.id]
	for range batchSize {
		d := q.first()
		if d == nil || r.pool.now() < q.due {
			return true
		}
		var came *port
		d.t.lock()
		over := d.isOver()
		mine := !over && d.t.Retry(d.m.entry)
		if mine {
			came = d.m.port
		}
		d.t.unlock()
		if over {
			continue
		}
		if mine {
			h := her{msg: d.m, job: notifyJob}
			h.meta.Context = c.id
			if !r.serveOne(r.w.portFor(c, came), h) {
				return false
			}
		}
		if !d.isOver() {
			q.wait(r.pool.now())
			return true
		}
	}
	r.more = true
	return true
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
	if len(r.w.jobs) > 0 {
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
		if q := &c.msgs.waiting[r.w.id]; q.first() != nil && (next == 0 || q.due < next) {
			next = q.due
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
	return int(max(next-r.pool.now(), 0)/int64(time.Millisecond)) + 1
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
