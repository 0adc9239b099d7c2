// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"sync"

	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/spin"
)

// An eventQueue is where an application is told of the ends of messages. Several contexts may fill one, and a context that
// hands over fills one from XDP and from HPUs; so all take their places from one ledger.
type eventQueue interface {
	spin.EventSink // takes the place, too

	// Places is the queue's ledger.
	Places() *hostq.Ledger

	// PostAside is Post for an event whose place was set aside. If it returns true, the place is used up.
	PostAside(*spin.MessageEvent) bool

	size() int  // places in all
	gone() bool // nobody will take an event any more
}

// queue returns where the ends of a context's messages go, nil for nowhere, until it is let go.
func (s *ContextSpec) queue() (q eventQueue, letGo func()) {
	if s.Events != nil {
		return queueOf(s.Events)
	}
	if p := s.events(); p != nil {
		q = pairQueue{p}
	}
	return q, func() {}
}

// A chanQueue is a channel.
type chanQueue struct {
	spin.EventChan
	places *hostq.Ledger
}

// chanLedgers are the ledgers of channels that contexts have, of whatever NIC, and how many contexts have each.
var chanLedgers struct {
	sync.Mutex
	of map[spin.EventChan]*chanLedger
}

type chanLedger struct {
	*hostq.Ledger
	users int
}

// queueOf returns the queue of a channel, until it is let go.
func queueOf(c spin.EventChan) (q chanQueue, letGo func()) {
	chanLedgers.Lock()
	defer chanLedgers.Unlock()
	if chanLedgers.of == nil {
		chanLedgers.of = map[spin.EventChan]*chanLedger{}
	}
	l := chanLedgers.of[c]
	if l == nil {
		l = &chanLedger{Ledger: hostq.NewLedger(func(int) int { return cap(c) - len(c) })}
		chanLedgers.of[c] = l
	}
	l.users++
	return chanQueue{c, l.Ledger}, sync.OnceFunc(func() {
		chanLedgers.Lock()
		defer chanLedgers.Unlock()
		if l.users--; l.users == 0 {
			delete(chanLedgers.of, c)
		}
	})
}

func (q chanQueue) Places() *hostq.Ledger { return q.places }
func (q chanQueue) size() int             { return cap(q.EventChan) }
func (q chanQueue) gone() bool            { return false }

// Post implements spin.EventSink. A channel without a buffer has no places: somebody waits for the event, or not.
func (q chanQueue) Post(e *spin.MessageEvent) bool {
	if cap(q.EventChan) == 0 {
		return q.EventChan.Post(e)
	}
	if !q.places.Claim() {
		return false
	}
	defer q.places.Give(1)
	return q.EventChan.Post(e)
}

// PostAside implements eventQueue.
func (q chanQueue) PostAside(e *spin.MessageEvent) bool {
	ok := q.EventChan.Post(e)
	if ok {
		q.places.Give(1)
	}
	return ok
}

// A pair is what of a hostq.Pair takes events.
type pair interface {
	Event(*hostq.Event) bool
	EventAside(*hostq.Event) bool
	Places() *hostq.Ledger
	LoseEvent()
	LoseEvents(n uint64)
	Layout() hostq.Layout
	Err() error
}

// A pairQueue is an application's queue of events.
type pairQueue struct{ pair }

func (q pairQueue) size() int  { return q.Layout().Events }
func (q pairQueue) gone() bool { return q.Err() != nil }

// Post implements spin.EventSink. The end of a complete message waits for room, and
// EOM's acknowledgement with it; what else happens to messages does not, and the
// application is told that it has missed something.
func (q pairQueue) Post(e *spin.MessageEvent) bool {
	out := hostEvent(e)
	if q.Event(&out) {
		return true
	}
	if e.Cause != spin.Complete {
		q.LoseEvent()
	}
	return false
}

// PostAside implements eventQueue.
func (q pairQueue) PostAside(e *spin.MessageEvent) bool {
	out := hostEvent(e)
	return q.EventAside(&out)
}

// hostEvent is what an application's queue has of an event.
func hostEvent(e *spin.MessageEvent) hostq.Event {
	out := hostq.Event{
		Kind:        hostq.MessageEnded,
		Cause:       uint8(e.Cause),
		FlowControl: e.FlowControl,
		Number:      e.Number,
		Slot:        uint32(e.Slot),
		Source:      e.Source,
		Length:      e.Length,
		Dropped:     e.Dropped,
		Missing:     e.Missing,
		Time:        e.Time,
	}
	out.User, _ = e.User.(uint64)
	if e.Cause == spin.Failed {
		out.Kind = hostq.MessageFailed
		if e.Err != nil {
			out.Text = e.Err.Error()
		}
	}
	return out
}

// A queueBinder gives bindings that name nobody for their events the context's queue.
type queueBinder struct {
	hpu.Binder
	queue spin.EventSink
}

// Bind implements hpu.Binder.
func (b queueBinder) Bind(m *hpu.Message) (spin.Binding, error) {
	to, err := b.Binder.Bind(m)
	if to.Events == nil {
		to.Events = b.queue
	}
	return to, err
}
