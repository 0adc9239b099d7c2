// SPDX-License-Identifier: Apache-2.0

package spin

import (
	"fmt"
	"net/netip"
	"time"
)

// A Binding says where a message goes.
type Binding struct {
	Window Window // Optional
	Place  int64  // offset of the message's first byte in the window
	Size   int64  // bytes that the message may take there. 0: up to the window's end

	// Events is told of the message's end, and of its first error. The worker
	// does not wait for room: until the event fits, the message is not over and
	// its EOM is not acknowledged. Optional.
	Events EventSink

	User any // whatever the binder wants handlers and events to know
}

// Room returns how many bytes the message may take.
func (b *Binding) Room() int64 {
	if b.Window == nil {
		return 0
	}
	n := b.Window.Size() - b.Place
	if b.Size > 0 {
		n = min(n, b.Size)
	}
	return max(n, 0)
}

// A Receive is a binding that waits for its message.
type Receive struct {
	Binding
	// A message matches if its number (the last word of its key; with SLMP
	// the message id) equals Tag in all bits but those of Ignore.
	Tag, Ignore uint32
	// Keep leaves the receive posted after a message has taken it.
	Keep bool
}

// DefaultRemember is how long a message that has ended is remembered after the last segment
// of it, so that a copy is known for one. Senders count on it: see slmp.MaxSilence.
const DefaultRemember = 20 * time.Second

// A Cause says how a message ended.
type Cause uint8

// Causes.
const (
	Complete Cause = iota // every byte was processed
	TimedOut              // its sender fell silent, or its linger time is over
	Removed               // its context was removed, or the NIC closed
	Failed                // a handler failed: see the first error
)

func (c Cause) String() string {
	if int(c) < len(causes) {
		return causes[c]
	}
	return fmt.Sprintf("Cause(%d)", int(c))
}

var causes = []string{"complete", "timed out", "removed", "failed"}

// A Result is what is known of a message at its end.
type Result struct {
	Cause   Cause
	Length  uint64 // bytes, as EOM said; without EOM, up to the last that arrived
	Dropped uint64 // of these: bytes of packets for which a handler returned Drop
	Missing uint64 // of these: bytes that were not processed
	// FlowControl: the NIC had to drop packets of the message for lack of room.
	FlowControl bool
	// Time is when the message ended, before the application was told, in ns of
	// CLOCK_MONOTONIC. 0 in completion handlers, which run before that.
	Time int64
}

// Lack says what is missing of a message that is not complete, whose first bytes, length of them,
// are known. An event does not tell whether the end has come: if nothing before it is
// missing, either it has not, or the application was told too late.
func Lack(missing, length uint64) string {
	switch {
	case missing > 0:
		return fmt.Sprintf("%d of its first %d bytes are missing", missing, length)
	case length > 0:
		return fmt.Sprintf("its first %d bytes are there, but its end has not come, or found no room to be told", length)
	}
	return "its end has not come, or found no room to be told"
}

// A MessageEvent tells the application that a message has ended, or failed.
type MessageEvent struct {
	Result
	Context string         // name
	Source  netip.AddrPort // of the sender
	Number  uint32         // the last word of the message's key
	Slot    int            // of the message's state while it was in flight
	User    any            // of the binding
	Err     error          // with Cause Failed: the first error
}

// An EventSink takes events of messages. Post does not wait: it returns false if there is
// no room. The event is only valid until it returns.
type EventSink interface {
	Post(*MessageEvent) bool
}

// EventChan is an EventSink.
type EventChan chan<- MessageEvent

// Post implements EventSink.
func (c EventChan) Post(e *MessageEvent) bool {
	select {
	case c <- *e:
		return true
	default:
		return false
	}
}

// An AckRequest is the acknowledgement that a packet asks for, in its protocol's terms.
type AckRequest struct {
	Flags      uint32
	ID, Offset uint32
}
