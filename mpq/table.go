// SPDX-License-Identifier: Apache-2.0

package mpq

import (
	"math"
	"sync/atomic"

	"github.com/xspin/xspin/spin"
)

const (
	maxEnd = 1 << 32   // of a message
	maxLen = 1<<31 - 1 // of a segment
)

// A Table has some of a Queue's open messages. It is for one thread at a time.
type Table struct {
	q    *Queue
	last *Entry // used last, where the next segment is likely to go

	chains   []*Entry // by hash; their number is a power of two
	n        int      // entries
	stopping int      // the chain that StopNext was at
	list     *list    // of free entries: own, or the Queue's shared
	own      list
	timers   []timer // a heap

	counters counters
}

// A timer says when to look at an entry. That may be too early: segments that arrive
// do not move it.
type timer struct {
	due int64
	e   *Entry
}

// counters are written by the table's thread and read by Queue.Stats.
type counters struct {
	_                                           [64]byte
	started, ended, failed, abandoned           atomic.Uint64
	discarded, refused, duplicates, waits, held atomic.Uint64
	dropped                                     [spin.DropReasons]atomic.Uint64
	_                                           [64]byte
}

// NewTable adds a table to the queue. Tables are never removed. Shared says that
// several threads use it, in turn.
func (q *Queue) NewTable(shared bool) *Table {
	t := &Table{q: q, chains: make([]*Entry, 64)}
	t.list = &t.own
	if shared {
		t.list = &q.shared
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.tables = append(q.tables[:len(q.tables):len(q.tables)], t)
	return t
}

// Arrive says what to do with a segment. The entry may be nil with Drop and Again.
// Times are in ns since any epoch; they may go backwards by as much as the threads'
// clocks disagree.
func (t *Table) Arrive(key *Key, s Segment, now int64) (*Entry, Decision, spin.DropReason) {
	e := t.last
	if e == nil || e.key != *key {
		if e = t.find(key); e == nil {
			return t.unknown(key, s, now)
		}
		t.last = e
	}
	if s.Len > maxLen || s.Len < 0 || s.End() > maxEnd {
		return t.drop(e, spin.DropBeyond)
	}
	// The fast path: in order, of a regular message without holes.
	if e.state == Open && uint64(s.Offset) == e.low && s.Len == int(e.size) && s.Len != 0 &&
		!s.EOM && !e.eom && !e.stopped && e.beyond == 0 && len(e.running) < cap(e.running) {
		e.low += uint64(e.size)
		e.high = max(e.high, e.low)
		e.seen = now
		e.run(s)
		return e, Run, spin.NotDropped
	}
	return t.known(e, s, now)
}

// known is Arrive for messages that have an entry.
func (t *Table) known(e *Entry, s Segment, now int64) (*Entry, Decision, spin.DropReason) {
	state := e.state
	if e.stopped && state != Deferred {
		state = Failed
	}
	switch state {
	case Waiting:
		if s.Offset == 0 {
			return t.start(e, s, now)
		}
		return t.hold(e)
	case Starting:
		if !e.runs(s) {
			return t.hold(e)
		}
	case Deferred:
		if s.EOM && e.isEOM(s) && !e.stopped {
			e.state = Ending
			e.seen = now
			return e, Notify, spin.NotDropped
		}
	case Failed:
		if e.state == Failed { // others are remembered when they end
			t.q.done.add(t.q, &e.key, true, now)
		}
		return t.drop(e, spin.DropDead)
	}
	d, r := t.claim(e, s)
	switch d {
	case Drop:
		return t.drop(e, r)
	case Again:
		t.counters.duplicates.Add(1)
	case Wait:
		t.counters.waits.Add(1)
	case Run:
		t.claimed(e, s, now)
	}
	return e, d, spin.NotDropped
}

// claimed notes what a newly claimed segment changes besides the set of bytes.
func (t *Table) claimed(e *Entry, s Segment, now int64) {
	if s.Len > 0 {
		e.high = max(e.high, s.End())
	}
	e.seen = now
	e.run(s)
	if s.EOM {
		e.eomSeen = now
		t.linger(e)
	}
}

// isEOM reports whether s is the segment that ended the message.
func (e *Entry) isEOM(s Segment) bool {
	return e.eom && s.Offset == e.eomOffset && s.End() == e.length
}

// claim claims a segment's bytes, and the end that its EOM gives. With Drop, Again
// and Wait it claims nothing.
func (t *Table) claim(e *Entry, s Segment) (Decision, spin.DropReason) {
	start, end := uint64(s.Offset), s.End()
	switch {
	case s.EOM && e.eom:
		if end != e.length {
			return Drop, spin.DropTwoEnds
		}
		if !e.isEOM(s) {
			return Drop, spin.DropOverlap
		}
		return Wait, spin.NotDropped
	case e.eom && end > e.length, s.EOM && end < e.high:
		return Drop, spin.DropTwoEnds
	case s.Len == 0 && !s.EOM:
		if e.runs(s) {
			return Wait, spin.NotDropped
		}
		return Again, spin.NotDropped
	}

	size := uint64(e.size)
	regular := size != 0 && start%size == 0 && (s.Len == int(size) || s.EOM && s.Len <= int(size))
	if s.Len > 0 {
		var all, some bool
		switch {
		case regular:
			some = start < e.low || e.has(start/size)
			all = some
		case size != 0:
			some = start < e.low || e.hasAny(start/size, (end-1)/size)
		default:
			all, some = e.cover(start, end-1)
		}
		// Acknowledging EOM would say more than that its bytes have been processed.
		all = all && !s.EOM && !(e.eom && end > uint64(e.eomOffset))
		switch {
		case all && e.runs(s):
			return Wait, spin.NotDropped
		case all:
			return Again, spin.NotDropped
		case some:
			return Drop, spin.DropOverlap
		}
	}

	// New.
	q := t.q
	if !e.runRoom(q) {
		return Drop, spin.DropMemory
	}
	if s.Len > 0 && !regular && size != 0 && !e.convert(q) {
		return Drop, spin.DropMemory
	}
	if s.EOM {
		e.eom, e.eomOffset, e.length = true, s.Offset, end
	}
	ok := true
	switch {
	case s.Len == 0:
	case !regular:
		ok = e.insert(q, start, end-1)
	case start == e.low:
		e.advance(q)
	default:
		ok = e.mark(q, start/size)
	}
	if !ok {
		if s.EOM {
			e.eom, e.eomOffset, e.length = false, 0, 0
		}
		return Drop, spin.DropMemory
	}
	return Run, spin.NotDropped
}

// unknown is Arrive for messages that have no entry.
func (t *Table) unknown(key *Key, s Segment, now int64) (*Entry, Decision, spin.DropReason) {
	q := t.q
	if s.Len > maxLen || s.Len < 0 || s.End() > maxEnd {
		return t.drop(nil, spin.DropBeyond)
	}
	if known, failed := q.done.get(q, key, now); failed {
		return t.drop(nil, spin.DropDead)
	} else if known {
		t.counters.duplicates.Add(1)
		return nil, Again, spin.NotDropped
	}
	if s.Offset != 0 && !t.reserve() {
		return t.drop(nil, spin.DropNoHeader)
	}
	e := q.take(t)
	if e == nil {
		if s.Offset != 0 {
			q.held.Add(-1)
		}
		return t.drop(nil, spin.DropMessages)
	}
	*e = Entry{User: e.User, slot: e.slot, key: *key, hash: q.hash(key), state: Waiting, started: now, seen: now}
	e.set, e.running = e.bit[:], e.few[:0]
	t.add(e)
	t.setTimer(e, t.deadline(e))
	if s.Offset == 0 {
		return t.start(e, s, now)
	}
	e.held++
	t.counters.held.Add(1)
	return e, Hold, spin.NotDropped
}

// start begins a message with its header packet.
func (t *Table) start(e *Entry, s Segment, now int64) (*Entry, Decision, spin.DropReason) {
	t.counters.started.Add(1)
	e.state = Starting
	if !s.EOM {
		e.size = uint32(s.Len)
	} else {
		e.eom, e.length = true, s.End()
	}
	e.low = s.End()
	t.claimed(e, s, now)
	return e, Start, spin.NotDropped
}

// hold keeps a packet until the message is Open, if there is room.
func (t *Table) hold(e *Entry) (*Entry, Decision, spin.DropReason) {
	if !t.reserve() {
		return t.drop(e, spin.DropNoHeader)
	}
	e.held++
	t.counters.held.Add(1)
	return e, Hold, spin.NotDropped
}

func (t *Table) reserve() bool {
	if t.q.held.Add(1) > int64(t.q.c.Held) {
		t.q.held.Add(-1)
		return false
	}
	return true
}

func (t *Table) drop(e *Entry, r spin.DropReason) (*Entry, Decision, spin.DropReason) {
	t.counters.dropped[r].Add(1)
	return e, Drop, r
}

// Unhold says that a packet is no longer held: it is to Arrive again, or is dropped.
// It must be called for every held packet before the entry is freed.
func (t *Table) Unhold(e *Entry) {
	if e.held == 0 {
		panic("message queue: Unhold of a message of which no packet is held")
	}
	e.held--
	t.q.held.Add(-1)
}

// Opened says that the header handler has returned: payload handlers may run.
func (t *Table) Opened(e *Entry, now int64) {
	e.state = Open
	e.seen = now
	t.linger(e)
}

// Refuse ends a message after Start if there is no place for it, or after Expired if
// its header packet did not arrive. It is forgotten as if it had never come.
func (t *Table) Refuse(e *Entry) {
	if e.state == Starting {
		t.counters.refused.Add(1)
	}
	t.free(e)
}

// Finish says that the HER of a segment, for which Arrive said Start or Run, has
// finished. If it returns true the message is complete: run its completion handler,
// then call End, Defer or Fail. After Fail, the last Finish frees the entry.
func (t *Table) Finish(e *Entry, s Segment, now int64) (complete bool) {
	e.stop(t.q, s)
	if e.state == Failed {
		if e.idle() {
			t.free(e)
		}
		return false
	}
	e.processed += uint64(s.Len)
	e.seen = now
	if !e.idle() {
		return false
	}
	if e.eom && e.low == e.length {
		e.state = Ending
		return true
	}
	t.unblock(e)
	return false
}

// unblock sets the timer of an entry that was due to expire while it was busy.
func (t *Table) unblock(e *Entry) {
	if e.blocked {
		e.blocked = false
		t.setTimer(e, t.deadline(e))
	}
}

// Fail says that a handler has failed. Nothing more of the message is run or
// acknowledged, and it is remembered as failed. The segments that run, the caller's
// included, must still Finish, and the last one frees the entry; if none runs, Fail
// frees it.
func (t *Table) Fail(e *Entry, now int64) {
	if e.state == Failed {
		return
	}
	t.counters.failed.Add(1)
	t.q.done.add(t.q, &e.key, true, now)
	t.clearTimer(e)
	e.state, e.stopped = Failed, false
	if e.idle() {
		t.free(e)
	}
}

// End ends a message that is complete, has expired or was stopped, and frees the
// entry. While the message is remembered, duplicates of its segments get Again if it
// was complete, and are dropped if not.
func (t *Table) End(e *Entry, now int64) {
	failed := e.stopped && e.state != Deferred
	switch {
	case e.discard:
		t.counters.discarded.Add(1)
	case failed:
		t.counters.abandoned.Add(1)
	default:
		t.counters.ended.Add(1)
	}
	t.q.done.add(t.q, &e.key, failed, now)
	t.free(e)
}

// Defer says that a message is complete, but its event found no room. It then has
// Timeout to find some, counted again from each EOM that its sender repeats (Notify).
func (t *Table) Defer(e *Entry, now int64) {
	e.state = Deferred
	if !e.late {
		e.late = true
		e.seen = now
	}
	t.unblock(e)
}

// Retry takes up a deferred message, as Notify does: post the event again, then End,
// or Defer again. It returns false if another caller is at it, or if the message has
// expired. Unlike Notify, it does not extend the timeout.
func (t *Table) Retry(e *Entry) bool {
	if e.state != Deferred || e.stopped {
		return false
	}
	e.state = Ending
	return true
}

// Expired returns a message that has timed out, or nil. Nothing more is accepted for
// it. What to do depends on its State:
//
//   - Open: tell its completion handler what is missing (not with Discard), then End
//     or Fail.
//   - Waiting: drop its held packets, with Unhold, then Refuse.
//   - Deferred: try its event for the last time, then End; or Fail if there is still
//     no room, because without an event it must not be acknowledged.
//
// Messages do not expire while segments of them run, or while they are Ending.
func (t *Table) Expired(now int64) *Entry {
	for len(t.timers) > 0 && t.timers[0].due <= now {
		e := t.timers[0].e
		if !e.idle() || e.state == Ending {
			e.blocked = true
			t.setTimer(e, now+int64(t.q.c.Timeout))
			continue
		}
		if d := t.deadline(e); d > now {
			t.setTimer(e, d)
			continue
		}
		e.discard = e.state == Open && t.q.c.Incomplete == Discard
		t.halt(e)
		return e
	}
	return nil
}

// StopNext stops a message before its timeout, as if Expired had returned it, and returns
// it. It returns nil if there is none but those of which segments run, or that are stopped,
// failed or ending already.
func (t *Table) StopNext() *Entry {
	for range t.chains {
		// From where the last one was, or all that were would be passed each time.
		t.stopping &= len(t.chains) - 1
		for e := t.chains[t.stopping]; e != nil; e = e.next {
			if t.stop(e) {
				return e
			}
		}
		t.stopping++
	}
	return nil
}

func (t *Table) stop(e *Entry) bool {
	if !e.idle() || e.stopped || e.state == Ending || e.state == Failed {
		return false
	}
	t.halt(e)
	return true
}

func (t *Table) halt(e *Entry) {
	t.clearTimer(e)
	e.stopped = true
	if e.state == Waiting {
		t.counters.dropped[spin.DropNoHeader].Add(uint64(e.held))
	}
}

// Next returns the earliest time at which Expired may return a message, 0 if there
// is none to wait for.
func (t *Table) Next() int64 {
	if len(t.timers) == 0 {
		return 0
	}
	if d := t.timers[0].due; d != 0 {
		return d
	}
	return 1
}

func (t *Table) chain(hash uint64) **Entry { return &t.chains[hash&uint64(len(t.chains)-1)] }

func (t *Table) find(key *Key) *Entry {
	h := t.q.hash(key)
	e := *t.chain(h)
	for e != nil && (e.hash != h || e.key != *key) {
		e = e.next
	}
	return e
}

func (t *Table) add(e *Entry) {
	if t.n++; t.n > len(t.chains) {
		old := t.chains
		t.chains = make([]*Entry, 2*len(old))
		for _, o := range old {
			for o != nil {
				next := o.next
				c := t.chain(o.hash)
				o.next, *c = *c, o
				o = next
			}
		}
	}
	c := t.chain(e.hash)
	e.next, *c = *c, e
	t.last = e
}

// free removes an entry from the table and returns it to the queue.
func (t *Table) free(e *Entry) {
	if e.held != 0 {
		panic("message queue: a message ends while packets of it are held")
	}
	if e.state == Free {
		panic("message queue: a message ends twice")
	}
	e.state = Free
	t.clearTimer(e)
	e.release(t.q)
	c := t.chain(e.hash)
	for *c != e {
		c = &(*c).next
	}
	*c = e.next
	t.n--
	if t.last == e {
		t.last = nil
	}
	t.q.give(e)
}

// deadline returns when a message's time is up.
func (t *Table) deadline(e *Entry) int64 {
	c := &t.q.c
	if e.state == Waiting {
		return e.started + int64(min(c.Timeout, HeaderWait))
	}
	d := e.seen + int64(c.Timeout)
	if c.Incomplete == Linger && e.eom && e.state == Open {
		d = min(d, e.eomSeen+int64(c.Linger))
	}
	return d
}

// linger advances the timer of a message once EOM has come, if Incomplete is Linger.
func (t *Table) linger(e *Entry) {
	if t.q.c.Incomplete != Linger || !e.eom {
		return
	}
	if d := t.deadline(e); e.timer != 0 && d < t.timers[e.timer-1].due {
		t.setTimer(e, d)
	}
}

// setTimer sets when an entry is looked at.
func (t *Table) setTimer(e *Entry, due int64) {
	if e.timer == 0 {
		if len(t.timers) == math.MaxInt32 {
			panic("message queue: too many timers")
		}
		t.timers = append(t.timers, timer{})
		e.timer = int32(len(t.timers))
	}
	t.place(int(e.timer-1), timer{due, e})
}

func (t *Table) clearTimer(e *Entry) {
	i := int(e.timer) - 1
	if i < 0 {
		return
	}
	e.timer = 0
	n := len(t.timers) - 1
	last := t.timers[n]
	t.timers[n] = timer{}
	t.timers = t.timers[:n]
	if i < n {
		t.place(i, last)
	}
}

// place puts a timer at position i of the heap, or where it belongs instead.
func (t *Table) place(i int, v timer) {
	h := t.timers
	for i > 0 && h[(i-1)/2].due > v.due {
		h[i] = h[(i-1)/2]
		h[i].e.timer = int32(i + 1)
		i = (i - 1) / 2
	}
	for {
		c := 2*i + 1
		if c+1 < len(h) && h[c+1].due < h[c].due {
			c++
		}
		if c >= len(h) || h[c].due >= v.due {
			break
		}
		h[i] = h[c]
		h[i].e.timer = int32(i + 1)
		i = c
	}
	h[i] = v
	v.e.timer = int32(i + 1)
}
