// SPDX-License-Identifier: Apache-2.0

package spin

import (
	"fmt"
	"net/netip"
)

// A Binding says where a message goes.
type Binding struct {
	Window Window // Optional
	Place  int64  // of the message's first byte in the window
	Size   int64  // bytes that the message may take there. 0: up to the window's end

	// Events hears of the message's end, and of its first error. The worker
	// does not wait: a message whose end finds no room is not over, and its
	// sender has no acknowledgement of EOM, until there is. Optional.
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
	// the message id) equals Tag in all bits that Ignore leaves.
	Tag, Ignore uint32
	// Keep leaves the receive posted when a message has taken it.
	Keep bool
}

// A Cause says how a message ended.
type Cause uint8

// Causes.
const (
	Complete Cause = iota // every byte was processed
	TimedOut              // its sender went silent, or lingering is over
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
	Length  uint64 // bytes, as EOM said; without EOM, up to the last that came
	Dropped uint64 // of these: bytes of packets for which a handler returned Drop
	Missing uint64 // of these: bytes that were not processed
	// FlowControl: the NIC had to drop packets of the message for lack of room.
	FlowControl bool
	// Time is when it ended, before the application was told: CLOCK_MONOTONIC in ns. 0
	// for completion handlers, to which it has not.
	Time int64
}

// A MessageEvent tells the application that a message has ended, or failed.
type MessageEvent struct {
	Result
	Context string         // name
	Source  netip.AddrPort // of the sender
	Number  uint32         // of the message with its sender
	Slot    int
	User    any   // of the binding
	Err     error // with Cause Failed: the first error
}

// An EventSink takes events of messages. Post does not wait: false says that there is
// no room. The event is good until it returns.
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

// An AckRequest is what a datagram asks of the receiver, in words of its protocol.
type AckRequest struct {
	Flags      uint32
	ID, Offset uint32
}
