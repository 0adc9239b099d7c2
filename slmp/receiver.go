// SPDX-License-Identifier: Apache-2.0

package slmp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/spin"
)

// A Code is what a handler returns.
type Code uint8

const (
	Success Code = iota
	// Fail: no handler runs for the message any more, and nothing of it is
	// acknowledged.
	Fail
	// Refuse, from a header handler: there is no place for the message now.
	// It is forgotten; its sender tries again.
	Refuse
	// Pending: the handler's work goes on. Receiver.Done says when it is over.
	Pending
)

// A Cause says why a message has ended.
type Cause uint8

const (
	Complete  Cause = iota
	TimedOut        // nothing new came any more
	Stopped         // by Receiver.Stop
	HasFailed       // a handler failed
)

func (c Cause) String() string {
	names := [...]string{"complete", "timed out", "stopped", "failed"}
	if int(c) < len(names) {
		return names[c]
	}
	return fmt.Sprintf("Cause(%d)", uint8(c))
}

// An Ending is what is known of a message that ends.
type Ending struct {
	Cause   Cause
	Length  uint64 // bytes; if EOM has not come, up to the last one seen
	Missing uint64 // of these
}

// Handlers are called for messages, by the methods of Receiver: the header handler
// once, before all others; then the payload handler for every segment, that of the
// header among them, none twice; then the completion handler once, when they have
// all finished, or when the message is given up. At last the event. Handlers must
// not call the Receiver. All but Event may return Pending: then other calls follow
// meanwhile, and Receiver.Done is to be called with the same *Call. Nil ones do
// nothing, with success.
type Handlers struct {
	Header     func(*Call) Code
	Payload    func(*Call) Code
	Completion func(*Call) Code
	// Event tells the application that a message has ended. False: it has no
	// room for that. A complete message is then not acknowledged, and Event
	// is called again when its sender asks, and by Receiver.Retry, which
	// gives it no time; of others it is not.
	Event func(*Incoming, Ending) bool
}

// An Incoming is a message that a Receiver receives. It is valid until its last
// handler has finished and Event has returned true, and is then used for others.
type Incoming struct {
	// Data is the handlers'. It is nil when the header handler is called.
	Data any

	entry  *mpq.Entry
	source netip.AddrPort
	id     uint32
	eom    Header // of the last EOM that came
	ending Ending
	held   []*Call
	late   bool // among Receiver.deferred
}

// Source returns the sender's address.
func (m *Incoming) Source() netip.AddrPort { return m.source }

// ID returns the message's number with its sender.
func (m *Incoming) ID() uint32 { return m.id }

// Slot returns a number 0..Config.Messages-1, of no other message in flight.
func (m *Incoming) Slot() int { return m.entry.Slot() }

// Length returns how long the message is, known once EOM has come.
func (m *Incoming) Length() (n uint64, known bool) { return m.entry.Length() }

// A Call is a handler's. It is valid until the handler has returned something
// other than Pending, or Done was called.
type Call struct {
	Message *Incoming
	Segment mpq.Segment // of header and payload handlers
	Payload []byte      // its bytes, only until the handler returns
	Ending  Ending      // of completion handlers

	kind   callKind
	header Header
	copied []byte // of the payload
}

type callKind uint8

const (
	headerCall callKind = iota
	payloadCall
	completionCall
)

// ReceiverConfig of a Receiver.
type ReceiverConfig struct {
	mpq.Config // Words is set by NewReceiver
	Handlers
	// Send is given acknowledgements, which it must not keep. What it cannot
	// send it may drop. Nil: nothing is acknowledged, but by Serve, which has
	// a socket.
	Send func(to netip.AddrPort, b []byte)
}

// ReceiverStats are what a Receiver counts.
type ReceiverStats struct {
	Datagrams  uint64            `json:"datagrams"`
	Short      uint64            `json:"short"` // shorter than a header
	Stray      uint64            `json:"stray"` // acknowledgements
	Acks       uint64            `json:"acks"`  // sent, those with Wait too
	EventsLost uint64            `json:"events_lost"`
	Messages   spin.MessageStats `json:"messages"`
}

// A Receiver receives messages of any number of senders. It is a pure state
// machine, but for what the handlers do: datagrams and the time go in, calls and
// acknowledgements come out; it reads no clock. It decides as the NIC does: by
// package mpq, and Answer. Times are ns of any epoch. It is not safe for concurrent
// use.
type Receiver struct {
	c        ReceiverConfig
	queue    *mpq.Queue
	table    *mpq.Table
	zones    map[string]uint32
	deferred []*Incoming
	calls    []*Call // free ones
	buf      []byte
	stats    ReceiverStats
}

// NewReceiver returns a Receiver.
func NewReceiver(c ReceiverConfig) (*Receiver, error) {
	c.Words = 7
	q, err := mpq.NewQueue(c.Config)
	if err != nil {
		return nil, fmt.Errorf("SLMP receiver: %w", err)
	}
	return &Receiver{c: c, queue: q, table: q.NewTable(), zones: map[string]uint32{"": 0}, buf: make([]byte, 0, MaxAckLen)}, nil
}

// Stats returns the counters.
func (r *Receiver) Stats() ReceiverStats {
	s := r.stats
	s.Messages = r.queue.Stats()
	return s
}

// key makes the identity of a message: who, and which.
func (r *Receiver) key(from netip.AddrPort, id uint32) (k mpq.Key) {
	a := from.Addr().As16()
	for i := range 4 {
		k[i] = binary.BigEndian.Uint32(a[4*i:])
	}
	zone, ok := r.zones[from.Addr().Zone()]
	if !ok { // there are as many as interfaces
		zone = uint32(len(r.zones))
		r.zones[from.Addr().Zone()] = zone
	}
	k[4], k[5], k[6] = zone, uint32(from.Port()), id
	return k
}

// Receive takes a datagram, whose checksum is right. It does not keep it.
func (r *Receiver) Receive(from netip.AddrPort, b []byte, now int64) {
	r.stats.Datagrams++
	h, err := ParseHeader(b)
	switch {
	case err != nil:
		r.stats.Short++
	case h.Flags&ACK != 0:
		r.stats.Stray++
	default:
		r.segment(from, h, b[HeaderLen:], now)
	}
}

func (r *Receiver) segment(from netip.AddrPort, h Header, payload []byte, now int64) {
	key := r.key(from, h.ID)
	s := mpq.Segment{Offset: h.Offset, Len: len(payload), EOM: h.Flags&EOM != 0}
	e, d, _ := r.table.Arrive(&key, s, now)
	var m *Incoming
	if e != nil {
		m = r.message(e, from, h.ID)
	}
	switch d {
	case mpq.Again:
		r.answer(from, h, true, e)
	case mpq.Wait:
		r.answer(from, h, false, e)
	case mpq.Hold:
		c := r.call(m, payloadCall, h, s)
		c.copied = append(c.copied[:0], payload...)
		m.held = append(m.held, c)
		r.answer(from, h, false, e)
	case mpq.Start:
		c := r.call(m, headerCall, h, s)
		c.Payload = payload
		r.invoke(c, now)
	case mpq.Run:
		c := r.call(m, payloadCall, h, s)
		c.Payload = payload
		r.invoke(c, now)
	case mpq.Notify:
		m.eom = h
		r.notify(m, now)
	}
}

// message returns what belongs to an entry.
func (r *Receiver) message(e *mpq.Entry, from netip.AddrPort, id uint32) *Incoming {
	m, ok := e.User.(*Incoming)
	if !ok {
		m = &Incoming{entry: e}
		e.User = m
	}
	if !m.source.IsValid() {
		m.source, m.id = from, id
	}
	return m
}

// reset prepares for another message, when the entry is given back.
func (m *Incoming) reset() {
	*m = Incoming{entry: m.entry, late: m.late}
}

func (r *Receiver) call(m *Incoming, kind callKind, h Header, s mpq.Segment) *Call {
	var c *Call
	if n := len(r.calls) - 1; n >= 0 {
		c, r.calls = r.calls[n], r.calls[:n]
	} else {
		c = new(Call)
	}
	*c = Call{Message: m, Segment: s, kind: kind, header: h, copied: c.copied}
	return c
}

func (r *Receiver) release(c *Call) {
	*c = Call{copied: c.copied[:0]}
	r.calls = append(r.calls, c)
}

// invoke runs a handler.
func (r *Receiver) invoke(c *Call, now int64) {
	var f func(*Call) Code
	switch c.kind {
	case headerCall:
		f = r.c.Header
	case payloadCall:
		f = r.c.Payload
	case completionCall:
		f = r.c.Completion
	}
	code := Success
	if f != nil {
		code = f(c)
	}
	if code != Pending {
		r.finished(c, code, now)
		return
	}
	if c.kind == headerCall { // the payload handler will want the bytes
		c.copied = append(c.copied[:0], c.Payload...)
		c.Payload = c.copied
	} else {
		c.Payload = nil
	}
}

// Done says that the work of a handler that returned Pending is over, and how it
// went.
func (r *Receiver) Done(c *Call, code Code, now int64) {
	if c.Message == nil {
		panic("SLMP receiver: Done of a call that is over")
	}
	r.finished(c, code, now)
}

func (r *Receiver) finished(c *Call, code Code, now int64) {
	m := c.Message
	e := m.entry
	switch c.kind {
	case headerCall:
		switch code {
		case Success:
			r.table.Opened(e, now)
			held, from := r.unhold(m), m.source // which it may end before
			c.kind = payloadCall
			r.invoke(c, now)
			for _, h := range held {
				r.segment(from, h.header, h.copied, now)
				r.release(h)
			}
			return
		case Refuse:
			r.dropHeld(m)
			m.reset()
			r.table.Refuse(e)
		default:
			r.fail(m, now)
			r.finish(c, now)
		}
	case payloadCall:
		if c.Segment.EOM {
			m.eom = c.header
		}
		if code != Success {
			r.fail(m, now)
		}
		if r.finish(c, now) {
			m.ending = Ending{Cause: Complete, Length: e.Processed()}
			r.complete(m, now)
		}
	case completionCall:
		if code != Success {
			r.fail(m, now)
		} else {
			r.notify(m, now)
		}
	}
	r.release(c)
}

// finish ends the HER of a segment. It returns true if the message is complete.
func (r *Receiver) finish(c *Call, now int64) (complete bool) {
	m := c.Message
	e, from := m.entry, m.source
	failed := e.State() == mpq.Failed
	complete = r.table.Finish(e, c.Segment, now)
	switch {
	case failed:
		if e.State() == mpq.Free {
			m.reset()
		}
	case !c.Segment.EOM:
		r.answer(from, c.header, true, e)
	case !complete:
		r.answer(from, c.header, false, e)
	}
	return complete
}

// complete runs the completion handler.
func (r *Receiver) complete(m *Incoming, now int64) {
	c := r.call(m, completionCall, Header{}, mpq.Segment{})
	c.Ending = m.ending
	r.invoke(c, now)
}

// notify tells the application that a message has ended, and then its sender.
func (r *Receiver) notify(m *Incoming, now int64) {
	queued := r.event(m)
	switch {
	case m.ending.Cause != Complete:
		r.end(m, now)
	case queued:
		r.answer(m.source, m.eom, true, m.entry)
		r.end(m, now)
	default:
		r.table.Defer(m.entry, now)
		r.answer(m.source, m.eom, false, m.entry)
		if !m.late {
			m.late = true
			r.deferred = append(r.deferred, m)
		}
	}
}

func (r *Receiver) event(m *Incoming) bool {
	if r.c.Event == nil || r.c.Event(m, m.ending) {
		return true
	}
	if m.ending.Cause != Complete {
		r.stats.EventsLost++
	}
	return false
}

// end gives a message's entry back.
func (r *Receiver) end(m *Incoming, now int64) {
	m.reset()
	r.table.End(m.entry, now)
}

// fail ends a message because of a handler, once.
func (r *Receiver) fail(m *Incoming, now int64) {
	e := m.entry
	if e.State() == mpq.Failed {
		return
	}
	r.dropHeld(m)
	m.ending = r.ending(e, HasFailed)
	r.event(m)
	r.table.Fail(e, now)
	if e.State() == mpq.Free {
		m.reset()
	}
}

func (r *Receiver) ending(e *mpq.Entry, cause Cause) Ending {
	missing := e.Missing()
	return Ending{Cause: cause, Length: e.Processed() + missing, Missing: missing}
}

// unhold takes the packets that are held for a message.
func (r *Receiver) unhold(m *Incoming) []*Call {
	held := m.held
	m.held = nil
	for range held {
		r.table.Unhold(m.entry)
	}
	return held
}

func (r *Receiver) dropHeld(m *Incoming) {
	for _, c := range r.unhold(m) {
		r.release(c)
	}
}

// Deadline returns when Expire is to be called, at the latest. It may be early. 0:
// never.
func (r *Receiver) Deadline() int64 { return r.table.Next() }

// Expire ends the messages whose time is up.
func (r *Receiver) Expire(now int64) {
	for {
		e := r.table.Expired(now)
		if e == nil {
			return
		}
		r.abandon(e.User.(*Incoming), TimedOut, now)
	}
}

// Stop ends all messages, but those of which calls are pending.
func (r *Receiver) Stop(now int64) {
	for e := range r.table.All() {
		if r.table.Stop(e) {
			r.abandon(e.User.(*Incoming), Stopped, now)
		}
	}
}

// abandon ends a message that is not accepted any more.
func (r *Receiver) abandon(m *Incoming, why Cause, now int64) {
	switch m.entry.State() {
	case mpq.Waiting:
		r.dropHeld(m)
		m.reset()
		r.table.Refuse(m.entry)
	case mpq.Deferred:
		if r.event(m) {
			r.end(m, now)
			return
		}
		r.stats.EventsLost++
		r.table.Fail(m.entry, now)
		m.reset()
	default:
		m.ending = r.ending(m.entry, why)
		if why == TimedOut && r.c.Incomplete == mpq.Discard {
			r.end(m, now)
			return
		}
		r.complete(m, now)
	}
}

// Retry says that there may be room for events again: those that found none are tried
// in the order in which their messages became complete, up to the first that finds none.
func (r *Receiver) Retry(now int64) {
	for len(r.deferred) > 0 {
		m := r.deferred[0]
		if r.table.Retry(m.entry) {
			if !r.event(m) {
				r.table.Defer(m.entry, now)
				return
			}
			r.answer(m.source, m.eom, true, m.entry)
			r.end(m, now)
		}
		m.late = false
		r.deferred[0] = nil
		r.deferred = r.deferred[1:]
	}
}

// answer sends the answer to a segment, if there is one.
func (r *Receiver) answer(to netip.AddrPort, h Header, processed bool, e *mpq.Entry) {
	if r.c.Send == nil {
		return
	}
	if b, ok := Answer(r.buf[:0], h, processed, e); ok {
		r.stats.Acks++
		r.c.Send(to, b)
	}
}

// Serve receives from a socket until the context is cancelled, and then ends all
// messages. Acknowledgements go out through the socket, not through Send. No
// handler may return Pending.
func (r *Receiver) Serve(ctx context.Context, c *net.UDPConn) error {
	start := time.Now()
	now := func() int64 { return int64(time.Since(start)) + 1 }
	r.c.Send = func(to netip.AddrPort, b []byte) { _, _ = c.WriteToUDPAddrPort(b, to) }
	defer context.AfterFunc(ctx, func() { _ = c.SetReadDeadline(time.Unix(1, 0)) })()
	b := make([]byte, 1<<16)
	for ctx.Err() == nil {
		// Cancelled after this, the deadline that was set then is gone: so
		// none is far away.
		wait := 100 * time.Millisecond
		if d := r.Deadline(); d != 0 {
			wait = max(min(wait, time.Duration(d-now())), 0)
		}
		if err := c.SetReadDeadline(time.Now().Add(wait)); err != nil {
			return fmt.Errorf("SLMP receiver: %w", err)
		}
		n, from, err := c.ReadFromUDPAddrPort(b)
		switch {
		case err == nil:
			r.Receive(from, b[:n], now())
		case !errors.Is(err, os.ErrDeadlineExceeded):
			r.Stop(now())
			return fmt.Errorf("SLMP receiver: %w", err)
		}
		if len(r.deferred) > 0 {
			r.Retry(now())
		}
		r.Expire(now())
	}
	r.Stop(now())
	return ctx.Err()
}
