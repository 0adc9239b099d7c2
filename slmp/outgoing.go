// SPDX-License-Identifier: Apache-2.0

package slmp

import "math/bits"

// few is how many segments a message has room for without a ring of its own.
const few = 4

// An Outgoing is a message that a Sender sends.
type Outgoing struct {
	// Data is the caller's.
	Data any

	s        *Sender
	id       uint32
	supplied uint64 // bytes
	known    bool   // supplied is all of it
	over     bool
	err      error

	// Segments are numbered from 0.
	end  int // how many can be sent; with known: how many there are
	next int // the first that was never sent
	una  int // the first that is not acknowledged. EOM is not until everything is

	// The state of segments una to next, at their number modulo the length.
	ring   []record
	bits   []uint64 // those acknowledged
	flight list     // on their way for the first time
	repeat list     // not for the first time
	gone   list     // on their way no more, but whether they arrived is not known
	lost   list

	inflight int // segments in flight and repeat
	acked    int // segments
	unasked  int // segments since the last SYN
	turn     int // segments since it got its turn
	covered  int // of segments below, acknowledgements tell

	order     uint32 // transmissions
	rackOrder uint32 // of these, the last that was acknowledged
	racked    bool
	rackAgain bool  // that was a retransmission
	rackSent  int64 // and sent then
	rackAt    int64 // and acknowledged then

	stalled      bool  // a timeout has not been answered
	probes       uint8 // what it sends
	expiries     int   // since something was acknowledged
	unanswered   int   // expiries since anything was answered
	everAnswered bool
	answerAt     int64
	startAt      int64
	timerAt      int64 // the retransmission timer runs since
	reorderAt    int64 // when lost segments are to be looked for; 0: not
	timer        int64 // key in timers: not after due
	timerSlot    int   // its position there + 1

	// Since the last timeout:
	answered bool
	low      bool // by an End below una
	fine     bool // by another

	contradicted  int // timeouts with low only
	reached       int // segments below are processed, says the peer
	reachedBefore int // the last time that it timed out
	stuck         int // timeouts without progress, in mode FirstLast

	segments, retransmitted uint64

	links [queueKinds]link
	few   [few]record
	word  [1]uint64
}

const (
	probeOldest uint8 = 1 << iota
	probeAlive        // an acknowledged one, whose answer shows that somebody is there
)

// A record is the state of a segment.
type record struct {
	snapshot
	order      uint32 // of its last transmission
	prev, next uint32 // in its list: segment numbers, their low 32 bits
	state      uint8
	again      bool // sent more than once
	asked      bool // the last time with SYN
}

const (
	flightSegment uint8 = iota
	repeatSegment
	goneSegment
	lostSegment
	seenSegment // EOM, arrived
	ackedSegment
)

// ID returns the message's number.
func (o *Outgoing) ID() uint32 { return o.id }

// Err returns why a finished message was not delivered, a *MessageError or what
// Abandon was given; nil if it was.
func (o *Outgoing) Err() error { return o.err }

// Segments returns how many segments were sent, each counted once.
func (o *Outgoing) Segments() uint64 { return o.segments }

// Retransmitted returns how many segments were sent again.
func (o *Outgoing) Retransmitted() uint64 { return o.retransmitted }

// Acked returns how many bytes are acknowledged, wherever they are.
func (o *Outgoing) Acked() uint64 {
	if o.over && o.err == nil && o.s.c.Mode != Unacknowledged {
		return o.supplied
	}
	return min(uint64(max(o.acked, o.reached))*uint64(o.s.c.Payload), o.supplied)
}

// Supply says that the first n bytes of the message can be sent; last: that is all
// of it. n never becomes smaller. The last segment that is full is sent when it is
// known whether there are more: it may have to carry EOM.
func (o *Outgoing) Supply(n uint64, last bool) {
	if o.over || o.known {
		return
	}
	if n > MaxMessage {
		o.s.fail(o, ErrTooLong, o.answerAt)
		return
	}
	size := uint64(o.s.c.Payload)
	o.supplied = max(o.supplied, n)
	switch {
	case o.supplied > 0:
		o.end = int((o.supplied - 1) / size)
		if last {
			o.end++
		}
	case last:
		o.end = 1
	}
	o.known = last
	o.s.enqueue(o)
}

// Unacked returns the length of what is never asked for again: the caller may
// forget the bytes below.
func (o *Outgoing) Unacked() uint64 {
	k := o.una
	if o.over {
		return o.supplied
	}
	if o.s.peer != cumulative && o.s.c.Mode == EverySegment && k > 0 {
		k-- // the sign of life
	}
	return min(uint64(k)*uint64(o.s.c.Payload), o.supplied)
}

// Abandon ends the message with an error, which must not be nil.
func (o *Outgoing) Abandon(err error) {
	if !o.over {
		o.s.finish(o, err)
	}
}

// forgottenAt returns when a receiver that does not answer may have forgotten the message:
// from then on its first segment must not be sent.
func (o *Outgoing) forgottenAt() int64 { return o.answerAt + int64(MaxSilence) }

// last returns the number of EOM's segment, or one that no segment has.
func (o *Outgoing) last() int {
	if o.known {
		return o.end - 1
	}
	return int(MaxMessage)
}

// sendable reports whether the next segment can be sent, as far as this message
// is concerned.
func (o *Outgoing) sendable() bool {
	s := o.s
	if o.over || o.stalled || o.next >= o.end {
		return false
	}
	switch s.c.Mode {
	case Unacknowledged:
		return true
	case FirstLast:
		return o.next == 0 || o.una > 0
	}
	if s.peer != cumulative {
		if o.next > 0 && o.una == 0 || o.next == o.last() && o.una < o.next {
			return false
		}
	}
	return o.roomAhead()
}

// roomAhead reports whether the window has room for the next segment. Beyond a
// hole there is room for some round trips more.
func (o *Outgoing) roomAhead() bool {
	w := o.s.c.Window
	if o.s.auto {
		w = o.s.win.size
	} else if o.inflight >= w {
		return false
	}
	return o.next-o.una < min(4*w, 4*MaxWindow)
}

// pipe changes how many segments are in flight.
func (o *Outgoing) pipe(n int) {
	o.inflight += n
	if !o.stalled {
		o.s.inflight += n
	}
}

// segment returns the number whose low 32 bits are given.
func (o *Outgoing) segment(low uint32) int { return o.una + int(low-uint32(o.una)) }

func (o *Outgoing) isAcked(k int) bool {
	return k < o.una || o.bits[k>>6&(len(o.bits)-1)]>>(k&63)&1 != 0
}

// ackedFrom returns which of segments k to k+63 are acknowledged.
func (o *Outgoing) ackedFrom(k int) uint64 {
	m := len(o.bits) - 1
	i, shift := k>>6, k&63
	w := o.bits[i&m] >> shift
	if shift != 0 {
		w |= o.bits[(i+1)&m] << (64 - shift)
	}
	return w
}

// inBitmap reports whether segment k has its bit.
func (o *Outgoing) inBitmap(end int, words []uint64, k int) bool {
	i := k - end - 1
	return i >= 0 && i < 64*len(words) && words[i>>6]>>(i&63)&1 != 0
}

// A list is one of segments, linked through their records.
type list struct {
	head, tail uint32
	n          int
}

func (o *Outgoing) push(l *list, k int) {
	mask := uint32(len(o.ring) - 1)
	r := &o.ring[uint32(k)&mask]
	if l.n == 0 {
		l.head = uint32(k)
	} else {
		o.ring[l.tail&mask].next = uint32(k)
		r.prev = l.tail
	}
	l.tail = uint32(k)
	l.n++
}

func (o *Outgoing) drop(l *list, r *record) {
	mask := uint32(len(o.ring) - 1)
	l.n--
	if l.n == 0 {
		return
	}
	switch {
	case &o.ring[l.head&mask] == r:
		l.head = r.next
	case &o.ring[l.tail&mask] == r:
		l.tail = r.prev
	default:
		o.ring[r.prev&mask].next = r.next
		o.ring[r.next&mask].prev = r.prev
	}
}

// unlist takes a segment out of the list that it is in, and of the pipe.
func (o *Outgoing) unlist(r *record) {
	switch r.state {
	case flightSegment:
		o.drop(&o.flight, r)
		o.pipe(-1)
	case repeatSegment:
		o.drop(&o.repeat, r)
		o.pipe(-1)
	case goneSegment:
		o.drop(&o.gone, r)
	case lostSegment:
		o.drop(&o.lost, r)
	}
}

// grow makes room for another segment.
func (s *Sender) grow(o *Outgoing) {
	old, oldBits := o.ring, o.bits
	o.ring = s.take(2 * len(old))
	if n := len(o.ring) / 64; n > len(oldBits) {
		o.bits = make([]uint64, n)
	}
	for k := o.una; k < o.una+len(old); k++ {
		o.ring[k&(len(o.ring)-1)] = old[k&(len(old)-1)]
		if len(o.bits) != len(oldBits) && oldBits[k>>6&(len(oldBits)-1)]>>(k&63)&1 != 0 {
			o.bits[k>>6&(len(o.bits)-1)] |= 1 << (k & 63)
		}
	}
	s.release(old)
}

// take returns a ring of n records, n being a power of two.
func (s *Sender) take(n int) []record {
	c := &s.rings[bits.Len(uint(n))]
	if i := len(*c) - 1; i >= 0 {
		r := (*c)[i]
		*c = (*c)[:i]
		return r
	}
	return make([]record, n)
}

// release takes a ring back.
func (s *Sender) release(r []record) {
	if len(r) > few {
		c := &s.rings[bits.Len(uint(len(r)))]
		*c = append(*c, r)
	}
}

// Queues of messages.
const (
	ready   = iota // have segments that were never sent, and room for them
	losing         // have lost ones
	probing        // timed out
	done           // finished
	free           // recycled; and how many kinds there are
	queueKinds
)

type link struct {
	prev, next *Outgoing
	in         bool
}

// A queue of messages, linked through themselves.
type queue struct {
	kind        int
	first, tail *Outgoing
}

// put sees to it that o is in the queue, at its end if it was not, or is not.
func (q *queue) put(o *Outgoing, in bool) {
	if in {
		q.push(o)
	} else {
		q.remove(o)
	}
}

func (q *queue) push(o *Outgoing) {
	l := &o.links[q.kind]
	if l.in {
		return
	}
	*l = link{prev: q.tail, in: true}
	if q.tail == nil {
		q.first = o
	} else {
		q.tail.links[q.kind].next = o
	}
	q.tail = o
}

func (q *queue) remove(o *Outgoing) {
	l := &o.links[q.kind]
	if !l.in {
		return
	}
	if l.prev == nil {
		q.first = l.next
	} else {
		l.prev.links[q.kind].next = l.next
	}
	if l.next == nil {
		q.tail = l.prev
	} else {
		l.next.links[q.kind].prev = l.prev
	}
	*l = link{}
}

func (q *queue) pop() *Outgoing {
	o := q.first
	if o != nil {
		q.remove(o)
	}
	return o
}

// rotate moves the first to the end.
func (q *queue) rotate() {
	if o := q.first; o != q.tail {
		q.remove(o)
		q.push(o)
	}
}

// timers is a heap of messages by their timer.
type timers []*Outgoing

// set puts o where it belongs, with a new key.
func (t *timers) set(o *Outgoing, at int64) {
	o.timer = at
	if o.timerSlot == 0 {
		*t = append(*t, o)
		o.timerSlot = len(*t)
	}
	t.down(t.up(o.timerSlot - 1))
}

func (t *timers) remove(o *Outgoing) {
	i := o.timerSlot - 1
	if i < 0 {
		return
	}
	h := *t
	n := len(h) - 1
	h[i] = h[n]
	h[i].timerSlot = i + 1
	h[n] = nil
	*t = h[:n]
	if i < n {
		t.down(t.up(i))
	}
	o.timerSlot = 0
}

func (t *timers) up(i int) int {
	h := *t
	for i > 0 {
		p := (i - 1) / 2
		if h[p].timer <= h[i].timer {
			break
		}
		t.swap(i, p)
		i = p
	}
	return i
}

func (t *timers) down(i int) {
	h := *t
	for {
		c := 2*i + 1
		if c >= len(h) {
			return
		}
		if c+1 < len(h) && h[c+1].timer < h[c].timer {
			c++
		}
		if h[i].timer <= h[c].timer {
			return
		}
		t.swap(i, c)
		i = c
	}
}

func (t *timers) swap(i, j int) {
	h := *t
	h[i], h[j] = h[j], h[i]
	h[i].timerSlot, h[j].timerSlot = i+1, j+1
}
