// SPDX-License-Identifier: Apache-2.0

package slmp

import (
	"errors"
	"fmt"
	"math/bits"
	"time"

	"github.com/xspin/xspin/spin"
)

// A Mode says which segments ask to be acknowledged.
type Mode uint8

const (
	// EverySegment is reliable: all segments are acknowledged, and sent again
	// until they are. A peer that speaks Cumulative is asked for an
	// acknowledgement now and then only, which tells about all of them.
	EverySegment Mode = iota
	// FirstLast: the first and the last. What is lost in between stays lost,
	// and then the receiver does not acknowledge the last.
	FirstLast
	// Unacknowledged: none. Nobody knows what has arrived.
	Unacknowledged
)

func (m Mode) String() string {
	switch m {
	case EverySegment:
		return "every segment"
	case FirstLast:
		return "first and last"
	case Unacknowledged:
		return "unacknowledged"
	}
	return fmt.Sprintf("Mode(%d)", uint8(m))
}

// Limits of a SenderConfig.
const (
	MaxPayload = 65507 - HeaderLen // what UDP over IPv4 can carry
	MaxWindow  = 1 << 14           // receivers look no further than four times this
)

// A message begins with its first segment, at offset 0. A receiver that has ended a message
// and forgotten it would begin it once more with a copy of that segment. So how long senders
// send one again and how long receivers remember are one contract.
const (
	// MaxSilence is the longest that a message's first segment is sent again while the peer
	// does not answer, since its last answer about the message: its acknowledgement may
	// have been lost. Then the message is given up.
	MaxSilence = spin.DefaultRemember - PathTime
	// PathTime is what the contract leaves to the path, for a segment that is late and an
	// answer that was: what is longer on its way may be taken for new.
	PathTime = 5 * time.Second
)

// SenderConfig of a Sender. Zero fields but Payload take the defaults.
type SenderConfig struct {
	Mode    Mode
	Payload int           // bytes in each segment but the last. Required
	Window  int           // segments in flight of each message. 0: auto, for all messages together
	Gap     time.Duration // between two segments. After a delay, up to 16 segments catch up
	Plain   bool          // never offer Cumulative: one acknowledgement for each segment, as FPsPIN

	// A message is given up after Retries timeouts in a row without any
	// answer, but not before Patience is over. As long as its first segment is not
	// acknowledged, it is given up after MaxSilence whatever they say.
	Retries  int           // Defaults to 8
	Patience time.Duration // Defaults to 2 s; negative: none

	// Limits of the retransmission timeout. RFC 6298 says 1 s for the lower
	// one, for the Internet. On a LAN that would make every lost last segment
	// a second's delay. A timeout that came too early costs one segment.
	MinRTO time.Duration // Defaults to 5 ms
	MaxRTO time.Duration // Defaults to 1 s
}

// What became of a message, wrapped in a *MessageError.
var (
	ErrSilent     = errors.New("peer does not answer")
	ErrRestarted  = errors.New("peer has forgotten the message")
	ErrIncomplete = errors.New("segments that are not sent again were lost")
	ErrTooLong    = errors.New("message too long for SLMP") // more than MaxMessage bytes
)

// ErrInUse is returned, wrapped, by Open for the id of a message that is not over.
var ErrInUse = errors.New("being sent already")

// Errors of Acknowledge. They allocate nothing: anybody who can send a sender one
// datagram can send it many.
var (
	ErrStray     = errors.New("acknowledgement of no message that is being sent")
	ErrNeverSent = errors.New("acknowledgement of a segment that was never sent")
	ErrUnasked   = errors.New("cumulative acknowledgement, but none was offered")
)

// A MessageError says why a message was not delivered.
type MessageError struct {
	ID            uint32
	Err           error         // one of the above
	Silent        time.Duration // since the peer's last answer, or the first segment
	Answered      bool          // there was one
	Acked, Total  uint64        // bytes; Total is what is known of the message
	Retransmitted uint64        // segments
}

func (e *MessageError) Error() string {
	s := fmt.Sprintf("SLMP message %d: %v: %d of %d bytes acknowledged, %d segments sent again",
		e.ID, e.Err, e.Acked, e.Total, e.Retransmitted)
	switch {
	case errors.Is(e.Err, ErrSilent) && !e.Answered:
		return s + fmt.Sprintf(": no answer for %v: check address and port, that a receiver runs there and has room for another message, and that its segments are no longer than the path allows", e.Silent)
	case errors.Is(e.Err, ErrSilent):
		return s + fmt.Sprintf(": no answer for %v: the receiver has stopped or restarted, its handlers refuse the message (too long, perhaps: its own log tells), or the path is down or loses so much that more retries are needed. A message that is sent again needs another id", e.Silent)
	case errors.Is(e.Err, ErrRestarted):
		return s + ": it answers, but knows less than it has acknowledged: the receiver has restarted or abandoned the message. Send it again under another id"
	case errors.Is(e.Err, ErrIncomplete):
		return s + fmt.Sprintf(": the receiver waits for them, its last answer is %v old. Use a longer gap, or the mode that acknowledges every segment", e.Silent)
	case errors.Is(e.Err, ErrTooLong):
		return s + fmt.Sprintf(": at most %d bytes. Cut it in several", uint64(MaxMessage))
	}
	return s
}

func (e *MessageError) Unwrap() error { return e.Err }

// SenderStats are since NewSender, or now. They are what a Sender counts.
type SenderStats struct {
	Segments      uint64 `json:"segments"`      // sent, retransmissions included
	Retransmitted uint64 `json:"retransmitted"` // segments sent again
	Spurious      uint64 `json:"spurious"`      // of these, acknowledged too soon after: the first one had arrived
	Timeouts      uint64 `json:"timeouts"`
	Completed     uint64 `json:"completed"` // messages
	Failed        uint64 `json:"failed"`    // messages

	Acks       uint64 `json:"acks"`       // valid ones
	Waits      uint64 `json:"waits"`      // of these, that say only that somebody is there
	Malformed  uint64 `json:"malformed"`  // no acknowledgement, or of wrong length
	Stray      uint64 `json:"stray"`      // of no message that is being sent; late duplicates among them
	NeverSent  uint64 `json:"never_sent"` // of what was never sent
	Cumulative bool   `json:"cumulative"` // the peer speaks it

	RTT      time.Duration `json:"rtt_ns"` // smoothed
	RTTVar   time.Duration `json:"rttvar_ns"`
	MinRTT   time.Duration `json:"min_rtt_ns"`
	RTO      time.Duration `json:"rto_ns"`
	Window   int           `json:"window"` // segments
	InFlight int           `json:"in_flight"`
	Open     int           `json:"open"` // messages
}

// An Outbound is a segment to be sent now: Header, then Len bytes of the message
// from Header.Offset on.
type Outbound struct {
	Message *Outgoing
	Header  Header
	Len     int
	Again   bool
}

type peerKind uint8

const (
	unknown    peerKind = iota
	plain               // has answered without Cumulative, or is not asked
	cumulative          // has answered with
)

const (
	quantum = 32 // segments of a message before it is another's turn
	// A cumulative peer is asked once for as many segments as the path delivers in askTime, within these bounds.
	askEvery = 32
	askMost  = 176
	askTime  = 100 * time.Microsecond

	catchUp    = 16 // segments after a Gap that took longer
	restarts   = 4  // timeouts with contradicting answers only, until the peer is believed to have restarted
	patience   = 4  // times Retries, for a message that was never answered while others are
	reorderMin = int64(50 * time.Microsecond)
)

// A Sender sends messages to one peer. It is a pure state machine: it reads no
// clock, sends nothing, holds no bytes. Times are ns > 0, of any epoch, that never
// go backwards. It is not safe for concurrent use.
//
// The caller calls Next until it returns 0, sends what it was given, and calls
// Next again after each Acknowledge and Supply and at Deadline. The segments of a
// message:
//
//	          Next                 echo, End or Bitmap
//	(unsent) ──────► in flight ─────────────────────────► acknowledged
//	                  │    ▲                                 ▲
//	  later ones were │    │ Next, before anything new       │ late
//	  acknowledged    ▼    │                                 │
//	                  lost ──────────────────────────────────┘
//
// and the message:
//
//	Open         first segment               all but EOM               EOM's ACK
//	─────► first ────────────► sending ──────────────► only EOM open ───────────► Finished
//	         │                    │                         │
//	         └────────────────────┴── timeouts: one segment ┘ ── silence, restart ──► Finished with Err
//
// With a peer that does not speak Cumulative the first segment is acknowledged
// before others are sent, and EOM is sent when all others are acknowledged: FPsPIN
// takes what comes first for the beginning and EOM for the end of a message. A peer
// that does, gets all of them as they come, so that a message that fits the window
// takes one round trip.
//
// A segment is lost when one sent later (counting the last time of each) has been
// acknowledged, and so much time has passed as reordering may take: RACK (RFC 8985),
// a quarter of the smallest round trip, more after it was wrong. An acknowledgement
// with a bitmap does not cover segments beyond it: they have left, but whether they
// are lost shows later.
//
// A timeout retransmits only the oldest segment; the answer tells what to do with
// the others. Until it comes they do not count as in flight for other messages.
type Sender struct {
	c    SenderConfig
	auto bool
	peer peerKind

	messages map[uint32]*Outgoing
	recent   *Outgoing // the last one looked up
	queues   [queueKinds]queue
	timers   timers
	rings    [32][][]record // given back, by log2 of their length

	inflight int // of messages that are not stalled
	win      window
	rtt      rtt
	floor    floor
	minRTT   int64 // least of floor's
	gapAt    int64 // no segment before
	waiting  bool  // there were some when Next returned

	answerAt  int64 // the last valid one of any message
	reorder   int64 // quarters of minRTT that a segment may be late
	reorderAt int64 // when it was last found too small
	patient   int   // losses until it is 1 again

	ack   Ack
	stats SenderStats
}

// NewSender returns a Sender for one peer.
func NewSender(c SenderConfig) (*Sender, error) {
	if c.Mode > Unacknowledged {
		return nil, fmt.Errorf("SLMP sender: %v: no such mode", c.Mode)
	}
	if c.Payload < 1 || c.Payload > MaxPayload {
		return nil, fmt.Errorf("SLMP sender: payload of %d bytes a segment: want 1 to %d", c.Payload, MaxPayload)
	}
	if c.Window < 0 || c.Window > MaxWindow {
		return nil, fmt.Errorf("SLMP sender: window of %d segments: want 1 to %d, or 0 for auto", c.Window, MaxWindow)
	}
	if c.Gap < 0 || c.Retries < 0 || c.MinRTO < 0 || c.MaxRTO < 0 {
		return nil, fmt.Errorf("SLMP sender: gap %v, %d retries, timeouts %v to %v: want no negative ones", c.Gap, c.Retries, c.MinRTO, c.MaxRTO)
	}
	if c.Retries == 0 {
		c.Retries = 8
	}
	if c.Patience == 0 {
		c.Patience = 2 * time.Second
	}
	if c.MinRTO == 0 {
		c.MinRTO = 5 * time.Millisecond
	}
	if c.MaxRTO == 0 {
		c.MaxRTO = max(time.Second, c.MinRTO)
	}
	if c.MaxRTO < c.MinRTO {
		return nil, fmt.Errorf("SLMP sender: largest timeout %v is smaller than smallest, %v", c.MaxRTO, c.MinRTO)
	}
	s := &Sender{
		c:        c,
		auto:     c.Window == 0 && c.Mode == EverySegment,
		messages: make(map[uint32]*Outgoing),
		rtt:      rtt{min: int64(c.MinRTO), max: int64(c.MaxRTO)},
		win:      window{size: initWindow},
		reorder:  1,
		ack:      Ack{Bitmap: make([]uint64, 0, MaxWords)},
	}
	for i := range s.queues {
		s.queues[i].kind = i
	}
	if c.Plain {
		s.peer = plain
	}
	return s, nil
}

// Open begins a message. ErrInUse: choose another id. An id must not come again from the same
// port while the peer may remember the message: it would take the new one for the old one, and
// acknowledge it. Receivers remember for spin.DefaultRemember, some for up to three times as long.
func (s *Sender) Open(id uint32) (*Outgoing, error) {
	if s.messages[id] != nil {
		return nil, fmt.Errorf("SLMP message %d: %w", id, ErrInUse)
	}
	o := s.queues[free].pop()
	if o == nil {
		o = &Outgoing{s: s}
		o.ring = o.few[:]
		o.bits = o.word[:]
	}
	o.id = id
	s.messages[id] = o
	return o, nil
}

// Finished returns the next message that is over, nil if there is none. Recycle
// gives it back. In mode Unacknowledged a message is over when Next has returned
// its last segment: it is still to be sent.
func (s *Sender) Finished() *Outgoing { return s.queues[done].pop() }

// Recycle gives a finished message back, for another Open. It must not be used any
// more. To call it is not necessary.
func (s *Sender) Recycle(o *Outgoing) {
	if !o.over || o.s != s {
		panic(fmt.Sprintf("SLMP message %d: recycled while it is being sent, or twice", o.id))
	}
	*o = Outgoing{s: s}
	o.ring, o.bits = o.few[:], o.word[:]
	s.queues[free].push(o)
}

// Next writes to dst what is to be sent now, and counts it as sent. It returns how
// many there are; 0: nothing before an Acknowledge, a Supply, or Deadline.
func (s *Sender) Next(dst []Outbound, now int64) int {
	s.expire(now)
	n := 0
	for n < len(dst) {
		o := s.queues[probing].first
		if o == nil {
			break
		}
		dst[n] = s.probe(o, now)
		n++
	}
	if s.c.Gap > 0 {
		since := now
		if s.waiting {
			since -= catchUp * int64(s.c.Gap)
		}
		s.gapAt = max(s.gapAt, since)
	}
	for n < len(dst) && s.mayGo(now) {
		o := s.queues[losing].first
		if o == nil {
			break
		}
		dst[n] = s.transmit(o, o.segment(o.lost.head), true, now)
		n++
		s.enqueue(o)
	}
	for n < len(dst) && s.mayGo(now) {
		o := s.queues[ready].first
		if o == nil {
			break
		}
		dst[n] = s.transmit(o, o.next, false, now)
		n++
		s.enqueue(o)
		if o.turn++; o.turn >= quantum {
			o.turn = 0
			if s.queues[ready].first == o {
				s.queues[ready].rotate()
			}
		}
		if s.c.Mode == Unacknowledged && o.known && o.next == o.end {
			s.finish(o, nil)
		}
	}
	s.waiting = s.queues[ready].first != nil || s.queues[losing].first != nil
	if s.auto && !s.waiting && s.inflight < s.win.size {
		s.win.idle(s.inflight)
	}
	return n
}

// mayGo reports whether the window of all messages, and the gap, allow a segment.
func (s *Sender) mayGo(now int64) bool {
	return s.fits() && (s.c.Gap == 0 || now >= s.gapAt)
}

// fits reports whether the window of all messages has room.
func (s *Sender) fits() bool { return !s.auto || s.inflight < s.win.size }

// Deadline returns when Next is to be called again, at the latest. It may be
// early. 0: never.
func (s *Sender) Deadline() int64 {
	t := s.timer()
	if s.c.Gap > 0 && s.fits() && (s.queues[ready].first != nil || s.queues[losing].first != nil) && (t == 0 || s.gapAt < t) {
		t = max(s.gapAt, 1)
	}
	return t
}

// timer returns when the first timer expires, 0 if there is none.
func (s *Sender) timer() int64 {
	if len(s.timers) == 0 {
		return 0
	}
	return max(s.timers[0].timer, 1)
}

// transmit sends segment k.
func (s *Sender) transmit(o *Outgoing, k int, again bool, now int64) Outbound {
	h := Header{ID: o.id, Offset: uint32(uint64(k) * uint64(s.c.Payload))}
	size := s.c.Payload
	eom := o.known && k == o.end-1
	if eom {
		h.Flags = EOM
		size = int(o.supplied - uint64(k)*uint64(s.c.Payload))
	}
	s.stats.Segments++
	if again {
		s.stats.Retransmitted++
		o.retransmitted++
	} else {
		if k == 0 {
			o.startAt, o.answerAt = now, now
		}
		o.next++
		o.segments++
	}
	if s.c.Gap > 0 {
		s.gapAt += int64(s.c.Gap)
	}
	if s.c.Mode != EverySegment && !(s.c.Mode == FirstLast && (eom || k == 0)) {
		o.una = o.next
		return Outbound{o, h, size, again}
	}

	if o.una == k && !again {
		o.timerAt = now
	}
	if k >= o.una {
		s.record(o, k, again, now)
		s.arm(o)
	}
	if s.asks(o, k, eom, again) {
		o.unasked = 0
		if k >= o.una {
			o.ring[k&(len(o.ring)-1)].asked = true
		}
		h.Flags |= SYN
		if s.peer != plain {
			h.Flags |= Cumulative
		}
	} else {
		o.unasked++
	}
	return Outbound{o, h, size, again}
}

// asks reports whether a segment that has just been recorded carries SYN.
func (s *Sender) asks(o *Outgoing, k int, eom, again bool) bool {
	if s.peer != cumulative || eom || again || s.c.Mode == FirstLast {
		return true
	}
	w := s.c.Window
	if s.auto {
		w = s.win.size / max(1, min(len(s.timers), s.win.size))
		if s.inflight >= s.win.size {
			return true
		}
	}
	if o.next-o.una > 64*MaxWords && o.acked > o.una {
		// There is a hole, and this one is out of the bitmap's reach: only
		// its own acknowledgement tells about it.
		return true
	}
	every := askEvery
	if s.auto {
		every = min(max(every, int(s.win.rate*float64(askTime))), askMost)
	}
	return o.unasked+1 >= min(max(w/4, 1), every) ||
		o.turn+1 >= quantum && s.queues[ready].first != s.queues[ready].tail || o.next == o.end || !o.roomAhead()
}

// record notes that segment k is on its way.
func (s *Sender) record(o *Outgoing, k int, again bool, now int64) {
	if !again && o.next-o.una > len(o.ring) {
		s.grow(o)
	}
	slot := k & (len(o.ring) - 1)
	r := &o.ring[slot]
	if !again {
		o.bits[k>>6&(len(o.bits)-1)] &^= 1 << (k & 63)
	}
	switch {
	case !again:
		o.push(&o.flight, k)
		o.pipe(1)
		r.state = flightSegment
	case r.state != seenSegment:
		o.unlist(r)
		o.push(&o.repeat, k)
		o.pipe(1)
		r.state = repeatSegment
	}
	o.order++
	r.order, r.again, r.asked = o.order, again, false
	if s.auto {
		r.snapshot = s.win.sending(now, s.inflight-1)
	} else {
		r.sent = now
	}
}

// probe sends what a timeout asks for.
func (s *Sender) probe(o *Outgoing, now int64) Outbound {
	k := o.una
	if o.probes&probeOldest != 0 {
		o.probes &^= probeOldest
	} else {
		o.probes &^= probeAlive
		k = o.una - 1
	}
	if o.probes == 0 {
		s.queues[probing].remove(o)
	}
	return s.transmit(o, k, true, now)
}

// expire handles the timers that are due.
func (s *Sender) expire(now int64) {
	for len(s.timers) > 0 && s.timers[0].timer <= now {
		o := s.timers[0]
		if t := s.due(o); t > now {
			s.timers.set(o, t)
			continue
		}
		if o.reorderAt != 0 && o.reorderAt <= now {
			s.detect(o, now)
			s.enqueue(o)
		} else {
			s.timeout(o, now)
		}
		if !o.over {
			s.timers.set(o, s.due(o))
		}
	}
}

// due returns when a message's timer expires.
func (s *Sender) due(o *Outgoing) int64 {
	t := o.timerAt + s.rtt.timeout(o.expiries)
	if o.una == 0 {
		t = min(t, o.forgottenAt())
	}
	if o.reorderAt != 0 && o.reorderAt < t {
		return o.reorderAt
	}
	return t
}

// arm sees to it that the timer does not expire late. Early is as good: what it
// was set for is looked up when it does.
func (s *Sender) arm(o *Outgoing) {
	if t := s.due(o); o.timerSlot == 0 || t < o.timer {
		s.timers.set(o, t)
	}
}

// timeout is the expiry of the retransmission timer.
func (s *Sender) timeout(o *Outgoing, now int64) {
	s.stats.Timeouts++
	o.expiries++
	o.unanswered++
	o.timerAt = now

	if o.low && !o.fine {
		if o.contradicted++; o.contradicted >= restarts {
			s.fail(o, ErrRestarted, now)
			return
		}
	} else if o.fine {
		o.contradicted = 0
	}
	if s.c.Mode == FirstLast && o.answered && o.reached < o.end {
		if o.reached > o.reachedBefore {
			o.stuck = 0
		} else if o.stuck++; o.stuck > s.c.Retries {
			s.fail(o, ErrIncomplete, now)
			return
		}
		o.reachedBefore = o.reached
	}
	o.low, o.fine, o.answered = false, false, false

	retries := s.c.Retries
	if !o.everAnswered && s.answerAt > o.startAt {
		retries *= patience
	}
	forgotten := now >= o.forgottenAt()
	if o.una == 0 && forgotten || o.unanswered > retries && now-o.answerAt >= int64(s.c.Patience) {
		err := ErrSilent
		if s.c.Mode == FirstLast && s.peer == plain && o.everAnswered && o.end > 2 {
			err = ErrIncomplete // most probably: a plain peer is silent then
		}
		s.fail(o, err, now)
		return
	}

	if !o.stalled {
		o.stalled = true
		s.inflight -= o.inflight
	}
	o.probes = probeOldest
	if s.peer != cumulative && s.c.Mode == EverySegment && o.known && o.una == o.end-1 && o.una > 0 && !(o.una == 1 && forgotten) {
		o.probes |= probeAlive
	}
	s.queues[probing].push(o)
	s.enqueue(o)
}

// enqueue puts a message in the queues that it belongs in.
func (s *Sender) enqueue(o *Outgoing) {
	s.queues[ready].put(o, o.sendable())
	s.queues[losing].put(o, o.lost.n > 0 && !o.stalled && (s.auto || o.inflight < s.c.Window))
}

// Acknowledge takes a datagram from the peer. One that does not fit what was sent
// is an error, and changes nothing but a counter.
func (s *Sender) Acknowledge(b []byte, now int64) error {
	a := &s.ack
	if err := a.Parse(b); err != nil {
		s.stats.Malformed++
		return err
	}
	o := s.recent
	if o == nil || o.id != a.ID {
		if o = s.messages[a.ID]; o == nil {
			s.stats.Stray++
			return ErrStray
		}
		s.recent = o
	}
	if a.Cumulative && s.c.Plain {
		s.stats.NeverSent++
		return ErrUnasked
	}
	echo, end, ok := s.check(o, a)
	if !ok {
		s.stats.NeverSent++
		return ErrNeverSent
	}

	s.stats.Acks++
	if s.peer == unknown {
		s.peer = plain
		if a.Cumulative {
			s.peer = cumulative
		}
	}
	s.answerAt, o.answerAt = now, now
	o.unanswered = 0
	o.answered, o.everAnswered = true, true
	if a.Cumulative {
		if end < o.una && s.c.Mode == EverySegment {
			o.low = true
		} else {
			o.fine = true
		}
		o.reached = max(o.reached, end)
	} else if s.peer == plain {
		o.covered = o.next
	}
	if a.Wait {
		s.stats.Waits++
	}

	e := evidence{echo: echo}
	if o.known && echo == o.end-1 && !a.Wait {
		// Everything is.
		s.echoed(o, echo, now)
		for k := o.una; k < o.next; k++ {
			s.settle(o, k, &e, now)
		}
		o.una = o.next
		s.delivered(o, &e, now)
		s.finish(o, nil)
		return nil
	}
	if !a.Wait && echo >= o.una {
		s.echoed(o, echo, now)
		s.settle(o, echo, &e, now)
	}
	if a.Cumulative && s.c.Mode == EverySegment {
		for k := o.una; k < min(end, o.last()); k++ {
			s.settle(o, k, &e, now)
		}
		s.bitmap(o, end, a.Bitmap, &e, now)
	}
	if e.n == 0 {
		return nil
	}
	for o.una < o.last() && o.una < o.next && o.isAcked(o.una) {
		o.una++
	}
	o.expiries = 0
	o.timerAt = now
	if o.stalled {
		o.stalled = false
		s.inflight += o.inflight
	}
	s.delivered(o, &e, now)
	s.detect(o, now)
	if o.una == o.next {
		s.timers.remove(o)
	} else {
		s.arm(o)
	}
	s.enqueue(o)
	return nil
}

// check tells which segment an acknowledgement echoes and how many segments from
// the first on are processed, and whether all that it says can be true.
func (s *Sender) check(o *Outgoing, a *Ack) (echo, end int, ok bool) {
	size := uint64(s.c.Payload)
	echo = int(uint64(a.Offset) / size)
	if s.c.Mode == Unacknowledged || echo >= o.next || uint64(a.Offset)%size != 0 {
		return 0, 0, false
	}
	if !a.Cumulative {
		return echo, 0, true
	}
	end = int(uint64(a.End) / size)
	all := o.known && o.next == o.end
	switch {
	case all && (uint64(a.End) == min(o.supplied, EndMax) || a.End == EndMax):
		end = o.end
		if o.supplied == 0 {
			end = 0
		}
	case uint64(a.End)%size != 0 || end > o.next || all && end == o.end:
		return 0, 0, false
	}
	for i := len(a.Bitmap) - 1; i >= 0; i-- {
		if w := a.Bitmap[i]; w != 0 {
			if end+64*i+bits.Len64(w) >= o.next {
				return 0, 0, false
			}
			break
		}
	}
	return echo, end, true
}

// echoed takes a round-trip time from the segment that is answered, if it was sent
// only once.
func (s *Sender) echoed(o *Outgoing, k int, now int64) {
	if k < o.una || o.isAcked(k) {
		return
	}
	r := &o.ring[k&(len(o.ring)-1)]
	if r.again {
		return
	}
	d := max(now-r.sent, 1)
	s.rtt.sample(d)
	if low := s.floor.sample(d); low != 0 && (s.minRTT == 0 || low < s.minRTT) {
		s.minRTT = low
	}
	if s.auto {
		s.win.sample(d, now)
	}
}

// evidence is what one acknowledgement brings.
type evidence struct {
	echo   int       // the segment that is answered
	n      int       // segments newly acknowledged
	fresh  int       // of these, counted in flight or lost until now
	newest *snapshot // of the one sent last
}

// settle takes segment k as acknowledged.
func (s *Sender) settle(o *Outgoing, k int, e *evidence, now int64) {
	if o.isAcked(k) {
		return
	}
	r := &o.ring[k&(len(o.ring)-1)]
	e.n++
	if r.state != goneSegment {
		e.fresh++
	}
	o.unlist(r)
	r.state = ackedSegment
	o.bits[k>>6&(len(o.bits)-1)] |= 1 << (k & 63)
	o.acked++
	if e.newest == nil || r.sent >= e.newest.sent {
		e.newest = &r.snapshot
	}
	if r.again && now-r.sent < s.minRTT {
		// The first transmission had arrived. What was sent after it says
		// nothing about those sent before this one.
		s.early(now)
		return
	}
	if r.again && k != e.echo {
		return // which of them arrived, nobody knows
	}
	if o.racked && int32(r.order-o.rackOrder) <= 0 {
		return
	}
	o.racked, o.rackAgain = true, r.again
	o.rackOrder, o.rackSent, o.rackAt = r.order, r.sent, now
}

// early widens what counts as reordering.
func (s *Sender) early(now int64) {
	s.stats.Spurious++
	if now-s.reorderAt > s.rtt.smoothed {
		s.reorder++
		s.reorderAt = now
	}
	s.patient = 16
}

// bitmap takes what is acknowledged beyond the contiguous end.
func (s *Sender) bitmap(o *Outgoing, end int, words []uint64, e *evidence, now int64) {
	for i, w := range words {
		base := end + 64*i + 1
		if i == 0 && base < o.una {
			// Late: it knows less than we do.
			if o.una-base >= 64*len(words) {
				return
			}
		}
		for w &^= o.ackedFrom(base); w != 0; w &= w - 1 {
			k := base + bits.TrailingZeros64(w)
			if k >= o.una && k != o.last() {
				s.settle(o, k, e, now)
			}
		}
	}
	o.covered = max(o.covered, end+64*len(words)+1)
	if end > o.last() || o.known && o.next == o.end && o.inBitmap(end, words, o.last()) {
		s.seen(o)
	}
}

// seen notes that EOM has arrived: only what it means is open.
func (s *Sender) seen(o *Outgoing) {
	k := o.last()
	r := &o.ring[k&(len(o.ring)-1)]
	o.unlist(r)
	r.state = seenSegment
}

// delivered tells the window.
func (s *Sender) delivered(o *Outgoing, e *evidence, now int64) {
	if s.auto && e.fresh > 0 {
		s.win.acked(e.fresh, e.newest, s.inflight, now)
	}
}

// detect looks for lost segments: those that would have been acknowledged by now.
func (s *Sender) detect(o *Outgoing, now int64) {
	o.reorderAt = 0
	if !o.racked {
		return
	}
	late := min(max(s.reorder*s.minRTT/4, reorderMin), max(s.rtt.smoothed, reorderMin))
	limit := o.rackSent - late + (now - o.rackAt) // sent before it: lost
	if o.rackAgain {
		// It may be the first transmission that was acknowledged. If so,
		// acknowledgements of others are on the way, and make the smoothed
		// round trip as long as it was.
		if wait := o.rackAt + s.rtt.smoothed; wait > now {
			o.reorderAt = wait
			return
		}
		limit = now
	}
	lost := o.lost.n
	for _, l := range [2]*list{&o.flight, &o.repeat} {
		for l.n > 0 {
			k := o.segment(l.head)
			r := &o.ring[k&(len(o.ring)-1)]
			if int32(r.order-o.rackOrder) > 0 {
				break
			}
			if r.sent > limit {
				if t := now + r.sent - limit; o.reorderAt == 0 || t < o.reorderAt {
					o.reorderAt = t
				}
				break
			}
			o.drop(l, r)
			o.pipe(-1)
			if k >= o.covered && !r.asked {
				o.push(&o.gone, k)
				r.state = goneSegment
				s.win.delivered++ // most probably
			} else {
				o.push(&o.lost, k)
				r.state = lostSegment
			}
		}
	}
	for o.gone.n > 0 {
		k := o.segment(o.gone.head)
		if k >= o.covered {
			break
		}
		r := &o.ring[k&(len(o.ring)-1)]
		o.drop(&o.gone, r)
		o.push(&o.lost, k)
		r.state = lostSegment
	}
	if n := o.lost.n - lost; n > 0 {
		if s.auto {
			s.win.lose(n)
		}
		if s.patient > 0 {
			if s.patient--; s.patient == 0 {
				s.reorder = 1
			}
		}
	}
}

func (s *Sender) fail(o *Outgoing, err error, now int64) {
	s.finish(o, &MessageError{
		ID: o.id, Err: err, Silent: time.Duration(now - o.answerAt), Answered: o.everAnswered,
		Acked: o.Acked(), Total: o.supplied, Retransmitted: o.retransmitted,
	})
}

// finish ends a message.
func (s *Sender) finish(o *Outgoing, err error) {
	if err == nil {
		s.stats.Completed++
	} else {
		s.stats.Failed++
	}
	o.err, o.over = err, true
	if !o.stalled {
		s.inflight -= o.inflight
	}
	o.inflight = 0
	for i := range s.queues {
		s.queues[i].remove(o)
	}
	s.timers.remove(o)
	delete(s.messages, o.id)
	if s.recent == o {
		s.recent = nil
	}
	s.release(o.ring)
	o.ring, o.bits = nil, nil
	s.queues[done].push(o)
}

// Stats returns the counters.
func (s *Sender) Stats() SenderStats {
	st := s.stats
	st.Cumulative = s.peer == cumulative
	st.RTT, st.RTTVar = time.Duration(s.rtt.smoothed), time.Duration(s.rtt.variance)
	st.MinRTT, st.RTO = time.Duration(s.minRTT), time.Duration(s.rtt.timeout(0))
	st.Window, st.InFlight, st.Open = s.c.Window, s.inflight, len(s.messages)
	if s.auto {
		st.Window = s.win.size
	}
	return st
}
