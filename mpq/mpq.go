// SPDX-License-Identifier: Apache-2.0

// Package mpq knows the messages in flight of an execution context: which bytes
// of which message have come, and what is to be done with the next segment. It is
// a pure state machine, the same for the HPUs, for a socket and for a simulator:
// segments and the time go in, decisions come out; it runs nothing, holds no
// packet and reads no clock.
//
// A Queue is what a context has one of: limits, slots, counters and the memory of
// finished messages; it is safe for concurrent use. A Table is a part of the
// Queue's open messages, for one thread at a time: an HPU's own, or one behind a
// lock that HPUs share. A message lives in one table from start to end; who calls
// sees to it that all its segments go there. Finished messages are remembered by
// the Queue, so that a late duplicate is known in whichever table it comes.
//
// The life of a message:
//
//	        Arrive: Start        Opened             Finish: complete       End
//	(none) ───────────────► starting ────► open ────────────────────► ending ────► remembered
//	   │ Arrive: Hold          │ Refuse       │ Expired                 │ Defer: waits for room
//	   ▼                       ▼ Fail         ▼ Fail                    ▼ in the event queue
//	waiting for its         forgotten /    abandoned: ends             Arrive: Notify ──► End
//	header packet           remembered     with bytes missing
//	                        as failed
package mpq

import "time"

// KeyWords is how many words a message key has.
const KeyWords = 8

// A Key is the whole identity of a message within its context: no two messages
// with different keys are ever taken for one. The last word in use is the
// message's number with its sender; the others say who that is.
type Key [KeyWords]uint32

// A Segment is what a packet brings: bytes [Offset, Offset+Len) of its message.
type Segment struct {
	Offset uint32
	Len    int  // bytes, 0 is legal
	EOM    bool // the message ends where the segment ends
}

// End returns the position behind the segment's last byte.
func (s Segment) End() uint64 { return uint64(s.Offset) + uint64(s.Len) }

// A Decision says what is to be done with a segment that has arrived.
type Decision uint8

const (
	// Drop the packet, unacknowledged; the Reason is counted. If it was lost
	// only for now, its sender will send it again.
	Drop Decision = iota
	// Start: the header packet of a new message. Bind it and run its header
	// handler, then call Opened, Refuse or Fail; after Opened run the payload
	// handler for this same segment, and Finish it.
	Start
	// Run the payload handler, then Finish.
	Run
	// Hold: the header handler has not run yet. Keep the packet until the
	// message is Opened and let it Arrive again, after Unhold; or drop it,
	// with Unhold too.
	Hold
	// Again: its bytes are processed already. Acknowledge it, run nothing.
	// The entry is nil if the message has ended: then the acknowledgement of
	// any of its segments may be given.
	Again
	// Wait: a duplicate of a segment that is still being processed, or of EOM
	// when the message is not complete yet. Not to be acknowledged; the
	// sender may be told that somebody is there.
	Wait
	// Notify: EOM again of a complete message whose event found no room.
	// Try again, then End and acknowledge.
	Notify
)

// A Reason says why a packet was dropped.
type Reason uint8

// Reasons for Drop, see Stats.
const (
	None     Reason = iota
	Messages        // no room for another message
	Memory          // no room for another hole in the message, or too far ahead of the first
	NoHeader        // no room to hold it until the header packet comes
	Overlap         // bytes that came before, cut differently
	TwoEnds         // EOM at a place other than before, or bytes behind the end
	Beyond          // ends behind byte 4 GiB
	Dead            // of a message that has failed
	Reasons         // how many there are
)

// What becomes of a message that stays incomplete.
type Incomplete uint8

const (
	// Abandon it when nothing has come for Timeout: its completion handler
	// learns what is missing.
	Abandon Incomplete = iota
	// Linger: as Abandon, but already when Linger has passed since EOM.
	Linger
	// Discard it after Timeout, without any completion.
	Discard
)

// Config of a Queue. Zero fields take the defaults.
type Config struct {
	Messages   int           // in flight at most. Defaults to 4096
	Held       int           // packets held at most, of all messages. Defaults to 64; negative: none
	Memory     int           // bytes for holes, beyond what each entry has room for. Defaults to 16 MiB
	Timeout    time.Duration // since the last new segment. Defaults to 10 s
	Remember   time.Duration // a finished message, at least. Defaults to 4 s
	Incomplete Incomplete
	Linger     time.Duration // with Incomplete: Linger. Defaults to 10 ms
}
