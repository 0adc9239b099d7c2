// SPDX-License-Identifier: Apache-2.0

package spin

import (
	"encoding/json"
	"fmt"
	"math/bits"
	"time"
)

// UserCounters is how many counters the handlers of a context have.
const UserCounters = 16

// A UserCounter is FPsPIN's pair: what was added up, and how often.
type UserCounter struct {
	Sum   uint64 `json:"sum"`
	Count uint64 `json:"count"`
}

// Mean returns Sum/Count, or 0 if nothing was counted.
func (c UserCounter) Mean() float64 {
	if c.Count == 0 {
		return 0
	}
	return float64(c.Sum) / float64(c.Count)
}

// HistogramBuckets is the number of buckets in a histogram of handler time.
const HistogramBuckets = 32

// A Histogram counts durations: bucket i those from 2^(i-1) ns to just below 2^i ns, the
// last bucket all longer ones.
type Histogram [HistogramBuckets]uint64

// Add counts a duration of ns.
func (h *Histogram) Add(ns int64) { h[min(bits.Len64(uint64(ns)), HistogramBuckets-1)]++ }

// ContextStats count what a context's handlers did.
type ContextStats struct {
	Handled  uint64 `json:"handled"`   // handlers that returned
	Dropped  uint64 `json:"dropped"`   // of these: Drop
	Failed   uint64 `json:"failed"`    // of these: Fail or Segv
	Panics   uint64 `json:"panics"`    // handlers that panicked
	Overruns uint64 `json:"overruns"`  // handlers that ran past their time limit
	Unrun    uint64 `json:"unrun"`     // packets given back unhandled: the context is stopped or removed
	Lost     uint64 `json:"lost"`      // buffers that never reached the HPU, credit returned
	Sent     uint64 `json:"sent"`      // frames given to the tx ring
	SendFull uint64 `json:"send_full"` // sends refused because a ring or the spare frames ran out
	ToStack  uint64 `json:"to_stack"`  // packets handed to the Linux stack

	HandedOver uint64 `json:"handed_over,omitempty"` // packets that handlers in eBPF left to those on HPUs
	Uncut      uint64 `json:"uncut,omitempty"`       // trains at tc that went to Linux, as handlers would write to their packets
	Mixed      uint64 `json:"mixed,omitempty"`       // trains at tc that were dropped, as handlers wanted different things of their packets

	// In contexts with messages; see also MessageStats.
	Headers     uint64 `json:"headers"`     // header handlers that returned
	Completions uint64 `json:"completions"` // completion handlers that returned
	Acks        uint64 `json:"acks"`        // answers given to a tx ring
	AckFull     uint64 `json:"ack_full"`    // answers not sent for lack of room
	Stray       uint64 `json:"stray"`       // packets that are not segments, such as acknowledgements
	Malformed   uint64 `json:"malformed"`   // packets whose lengths contradict each other
	Corrupt     uint64 `json:"corrupt"`     // packets dropped for their checksum
	Unverified  uint64 `json:"unverified"`  // packets accepted without a complete checksum
	Unbound     uint64 `json:"unbound"`     // messages refused by the binder, each time they start
	EventsLost  uint64 `json:"events_lost"` // events of failed or abandoned messages that found no room

	Requests   uint64 `json:"requests"`   // to the application
	Unasked    uint64 `json:"unasked"`    // of these, dropped because the ring was full
	Unanswered uint64 `json:"unanswered"` // of these, given up: no answer in time, or no application
	Timers     uint64 `json:"timers"`     // timer handlers that returned
	Triggers   uint64 `json:"triggers"`   // host messages that were started

	HandlerTime Histogram     `json:"handler_time_log2_ns"`
	HandlerSum  time.Duration `json:"handler_time_ns"`

	User [UserCounters]UserCounter `json:"user"`
}

// Add adds the counters of a.
func (s *ContextStats) Add(a *ContextStats) {
	s.Handled += a.Handled
	s.Dropped += a.Dropped
	s.Failed += a.Failed
	s.Panics += a.Panics
	s.Overruns += a.Overruns
	s.Unrun += a.Unrun
	s.Lost += a.Lost
	s.Sent += a.Sent
	s.SendFull += a.SendFull
	s.ToStack += a.ToStack
	s.HandedOver += a.HandedOver
	s.Headers += a.Headers
	s.Completions += a.Completions
	s.Acks += a.Acks
	s.AckFull += a.AckFull
	s.Uncut += a.Uncut
	s.Mixed += a.Mixed
	s.Stray += a.Stray
	s.Malformed += a.Malformed
	s.Corrupt += a.Corrupt
	s.Unverified += a.Unverified
	s.Unbound += a.Unbound
	s.EventsLost += a.EventsLost
	s.Requests += a.Requests
	s.Unasked += a.Unasked
	s.Unanswered += a.Unanswered
	s.Timers += a.Timers
	s.Triggers += a.Triggers
	s.HandlerSum += a.HandlerSum
	if a.Handled > 0 {
		for i, n := range a.HandlerTime {
			s.HandlerTime[i] += n
		}
	}
	for i, c := range a.User {
		s.User[i].Sum += c.Sum
		s.User[i].Count += c.Count
	}
}

// Add adds what became of others.
func (s *MessageStats) Add(a *MessageStats) {
	s.Started += a.Started
	s.Ended += a.Ended
	s.Failed += a.Failed
	s.Abandoned += a.Abandoned
	s.Discarded += a.Discarded
	s.Refused += a.Refused
	s.Duplicates += a.Duplicates
	s.Waits += a.Waits
	s.Held += a.Held
	for i, n := range a.Dropped {
		s.Dropped[i] += n
	}
	s.Forgotten += a.Forgotten
	s.Open += a.Open
	s.HeldNow += a.HeldNow
	s.Memory += a.Memory
}

// A DropReason says why a packet of a message was dropped.
type DropReason uint8

// Reasons.
const (
	NotDropped   DropReason = iota
	DropMessages            // no room for another message
	DropMemory              // no room for another hole in the message, or for more segments
	DropNoHeader            // no room to hold it until the header packet arrives, or that did not arrive
	DropOverlap             // bytes that arrived before, cut differently
	DropTwoEnds             // EOM in another place than before, or bytes beyond the end
	DropBeyond              // ends beyond 4 GiB, or is longer than 2 GiB
	DropDead                // of a message that has failed, or was abandoned
	DropReasons             // number of reasons
)

var reasons = [DropReasons]string{"none", "messages", "memory", "no_header", "overlap", "two_ends", "beyond", "dead"}

func (r DropReason) String() string {
	if r < DropReasons {
		return reasons[r]
	}
	return fmt.Sprintf("DropReason(%d)", uint8(r))
}

var dropHelp = [DropReasons]string{
	DropMessages: "no room for another message",
	DropMemory:   "no room for another hole, or too far ahead; in the kernel: beyond segments",
	DropNoHeader: "no room to hold it until the header packet arrives, or that did not arrive",
	DropOverlap:  "bytes that arrived before, cut differently",
	DropTwoEnds:  "EOM in two places, or bytes beyond it",
	DropBeyond:   "ends beyond 4 GiB, or is longer than 2 GiB",
	DropDead:     "of a message that has failed or was abandoned",
}

// Help explains a reason to users.
func (r DropReason) Help() string { return dropHelp[r] }

// Drops counts packets by reason.
type Drops [DropReasons]uint64

// MarshalJSON writes an object with a member for each reason.
func (d Drops) MarshalJSON() ([]byte, error) {
	b := []byte{'{'}
	for r := NotDropped + 1; r < DropReasons; r++ {
		if r > 1 {
			b = append(b, ',')
		}
		b = fmt.Appendf(b, "%q:%d", reasons[r], d[r])
	}
	return append(b, '}'), nil
}

// UnmarshalJSON reads what MarshalJSON writes.
func (d *Drops) UnmarshalJSON(b []byte) error {
	var m map[string]uint64
	if err := json.Unmarshal(b, &m); err != nil {
		return err
	}
	for r := range d {
		d[r] = m[reasons[r]]
	}
	return nil
}

// MessageStats count what became of a context's messages. The counters are not read all
// at once, so sums of several may be off by what happens meanwhile.
type MessageStats struct {
	Started    uint64 `json:"started"`    // messages whose header packet arrived
	Ended      uint64 `json:"ended"`      // of these, complete
	Failed     uint64 `json:"failed"`     // a handler failed
	Abandoned  uint64 `json:"abandoned"`  // incomplete, or stopped
	Discarded  uint64 `json:"discarded"`  // incomplete, in mode Discard
	Refused    uint64 `json:"refused"`    // the binder had no place for them
	Duplicates uint64 `json:"duplicates"` // segments that had been processed before
	Waits      uint64 `json:"waits"`      // duplicates of segments still being processed, or of EOM too early
	Held       uint64 `json:"held"`       // packets that arrived before their message was open
	Dropped    Drops  `json:"dropped"`    // packets
	Forgotten  uint64 `json:"forgotten"`  // finished messages forgotten early, for lack of room
	Open       int    `json:"open"`       // messages in flight now
	HeldNow    int    `json:"held_now"`   // packets held now
	Memory     int    `json:"memory"`     // bytes in use for holes now
}
