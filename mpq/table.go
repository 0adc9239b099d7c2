// SPDX-License-Identifier: Apache-2.0

package mpq

import (
	"iter"
	"math"
	"sync/atomic"

	"github.com/xspin/xspin/spin"
)

const (
	maxEnd = 1 << 32   // of a message
	maxLen = 1<<31 - 1 // of a segment
)

// A Table is a part of a Queue's open messages. It is for one thread at a time.
type Table struct {
	q    *Queue
	last *Entry // the one used last

	chains []*Entry // by hash; their number is a power of two
	n      int      // entries
	timers []timer  // a heap

	counters counters
}

// A timer says when to look at an entry. That may be too early: segments that come
// do not move it.
type timer struct {
	due int64
	e   *Entry
}

// counters are written by one thread, but for the Queue's readers.
type counters struct {
	_                                           [64]byte
	started, ended, failed, abandoned           atomic.Uint64
	discarded, refused, duplicates, waits, held atomic.Uint64
	dropped                                     [spin.DropReasons]atomic.Uint64
	_                                           [64]byte
}

// NewTable returns a table of the queue's.
func (q *Queue) NewTable() *Table {
	t := &Table{q: q, chains: make([]*Entry, 64)}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.tables = append(q.tables[:len(q.tables):len(q.tables)], t)
	return t
}

// Arrive says what is to be done with a segment. The entry may be nil with Drop
// and with Again. Times are ns of any epoch; they may go back by as much as
// threads disagree.
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
	// In order, nothing to remember.
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

// claimed notes what a newly claimed segment changes beside the set of bytes.
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

// claim takes the bytes of a segment, and what its EOM says. With Drop, Again and
// Wait nothing has changed.
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
		// EOM's acknowledgement would say more than that its bytes are there.
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
	e := q.take()
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

// Unhold says that a held packet was taken, to Arrive again or to be dropped. All
// must be before the entry is given back.
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

// Refuse is the end of a message after Start, for which there is no place, or of
// one that waited for its header packet until its time was up. It is forgotten as
// if it had never come.
func (t *Table) Refuse(e *Entry) {
	if e.state == Starting {
		t.counters.refused.Add(1)
	}
	t.free(e)
}

// Finish says that the HER of a segment, for which Arrive said Start or Run, has
// finished. With true the message is complete: its completion handler is to be
// run, then End, Defer or Fail. After Fail the last Finish gives the entry back.
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

// unblock sets the time of an entry whose time was up when it was busy.
func (t *Table) unblock(e *Entry) {
	if e.blocked {
		e.blocked = false
		t.setTimer(e, t.deadline(e))
	}
}

// Fail says that a handler has failed. Nothing more is to be run for the message,
// or to be acknowledged; it is remembered for that. The segments that run, that of
// the caller included, are still to Finish, the last of which gives the entry
// back; if there are none, it is gone on return.
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

// End is the end of a message that is complete, or was returned by Expired, or
// stopped. The entry is gone on return. Duplicates of a complete message's segments
// are acknowledged for a while; those of others are dropped.
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

// Defer says that a message is complete, but that its event found no room. It has
// Timeout from then on, and again when its sender asks: Notify.
func (t *Table) Defer(e *Entry, now int64) {
	e.state = Deferred
	if !e.late {
		e.late = true
		e.seen = now
	}
	t.unblock(e)
}

// Retry takes a deferred message, as Notify does: the event is to be tried again,
// then End, or Defer once more. It returns false if somebody else does so. It gives
// the message no time.
func (t *Table) Retry(e *Entry) bool {
	if e.state != Deferred || e.stopped {
		return false
	}
	e.state = Ending
	return true
}

// Expired returns a message whose time is up, nil if there is none. Nothing is
// accepted for it any more. What is to be done depends on its State:
//
//   - Open: its completion handler is to be told what is missing (not with
//     Discard), then End or Fail.
//   - Waiting: its held packets are to be dropped, with Unhold, then Refuse.
//   - Deferred: its event may be tried for the last time. Then End, or Fail if
//     there is no room still: without an event it is not to be acknowledged.
//
// Messages of which segments run, or that complete, have time.
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

// Stop ends a message before its time is up: it is as if Expired had returned it.
// It returns false if segments run, or it is ending already.
func (t *Table) Stop(e *Entry) bool {
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

// Next returns when Expired will have something to return at the earliest; 0:
// nothing waits.
func (t *Table) Next() int64 {
	if len(t.timers) == 0 {
		return 0
	}
	if d := t.timers[0].due; d != 0 {
		return d
	}
	return 1
}

// All returns the messages in the table. The current one may be given back
// meanwhile, no other.
func (t *Table) All() iter.Seq[*Entry] {
	return func(yield func(*Entry) bool) {
		for i := range t.chains {
			for e := t.chains[i]; e != nil; {
				next := e.next
				if !yield(e) {
					return
				}
				e = next
			}
		}
	}
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

// free gives an entry back.
func (t *Table) free(e *Entry) {
	if e.held != 0 {
		panic("message queue: a message ends, and packets of it are still held")
	}
	if e.state == Free {
		panic("message queue: a message ends that has ended")
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

// linger sees to it that a message of which EOM has come does not stay too long.
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
