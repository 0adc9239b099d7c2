// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/spin"
)

// A pair is what of a hostq.Pair takes events.
type pair interface {
	Event(*hostq.Event) bool
	EventRoom() int
	LoseEvent()
	LoseEvents(n uint64)
}

// events returns where the application of a context takes its events, nil if
// there is none that does.
func (s *ContextSpec) events() pair {
	p, _ := s.Resources.Host.(pair)
	return p
}

// A pairSink puts the ends of messages into the application's queue of events.
type pairSink struct{ pair }

// Room implements roomySink.
func (s pairSink) Room() int { return s.EventRoom() }

// tries implements roomySink.
func (pairSink) tries() uint64 { return 0 }

// Post implements spin.EventSink. The end of a complete message waits for room, and
// EOM's acknowledgement with it; what else happens to messages does not, and the
// application is told that it has missed something.
func (s pairSink) Post(e *spin.MessageEvent) bool {
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
	if s.Event(&out) {
		return true
	}
	if e.Cause != spin.Complete {
		s.LoseEvent()
	}
	return false
}

// A sinkBinder gives bindings that name nobody for their events the context's sink.
type sinkBinder struct {
	hpu.Binder
	sink spin.EventSink
}

// Bind implements hpu.Binder.
func (b sinkBinder) Bind(m *hpu.Message) (spin.Binding, error) {
	to, err := b.Binder.Bind(m)
	if to.Events == nil {
		to.Events = b.sink
	}
	return to, err
}

// forward hands on what went wrong in handlers, until the pool is closed: to who
// asks Events, and to the application whose context does no more.
func (n *NIC) forward() {
	defer close(n.events)
	for e := range n.pool.Events() {
		if e.Kind == spin.HandlerOverrun && e.Detail != "" { // not one that only counts others
			n.fault(e)
		}
		select {
		case n.events <- e:
		default:
			n.eventsLost.Add(1)
		}
	}
}

// fault tells an application that its context is stopped. With the lock, so that
// its pair is not used after Remove or Close.
func (n *NIC) fault(e spin.Fault) {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := n.contexts[e.Context]
	if n.closed || c == nil || c.spec.Name != e.Name || !c.tier.Stopped() { // the number is another's by now
		return
	}
	if p := c.spec.events(); p != nil && !p.Event(&hostq.Event{Kind: hostq.ContextFault, Text: e.Detail}) {
		p.LoseEvent()
	}
}
