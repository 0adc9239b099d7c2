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
//
// A segment is claimed when Arrive says Start or Run, and processed when it has
// been given to Finish. Both sets of bytes are kept exactly. As long as a message
// is regular, that is, cut into segments as long as its first one but for EOM,
// they take a bit for each segment behind the first hole. Other cuts are legal
// and are kept as intervals.
package mpq

import (
	"fmt"
	"math"
	"time"
)

// KeyWords is how many words a message key has.
const KeyWords = 8

// A Key is the whole identity of a message within its context: no two messages
// with different keys are ever taken for one. The last word in use is the
// message's number with its sender; the others say who that is.
type Key [KeyWords]uint32

// A Segment is what a packet brings: bytes [Offset, Offset+Len) of its message.
// The one with offset 0 is the header packet. Segments without bytes are legal,
// but only the header packet and EOM are run: no other can be told from its copy.
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
	// Try again, then End and acknowledge, or Defer once more. Until then
	// nobody else gets Notify for this message.
	Notify
)

func (d Decision) String() string {
	names := [...]string{"drop", "start", "run", "hold", "again", "wait", "notify"}
	if int(d) < len(names) {
		return names[d]
	}
	return fmt.Sprintf("Decision(%d)", uint8(d))
}

// Incomplete says what becomes of a message that stays incomplete.
type Incomplete uint8

const (
	// Abandon it when nothing new has come for Timeout: its completion
	// handler learns what is missing.
	Abandon Incomplete = iota
	// Linger: as Abandon, but already when Linger has passed since EOM.
	Linger
	// Discard it after Timeout, without any completion.
	Discard
)

// Config of a Queue. Zero fields take the defaults.
type Config struct {
	Messages   int           // in flight at most. Defaults to 4096
	Words      int           // of a key that are in use. Defaults to KeyWords
	Held       int           // packets held at most, of all messages. Defaults to 64; negative: none
	Memory     int           // bytes for holes, beyond what each entry has room for; one message gets an eighth, or 8 KiB. Defaults to 16 MiB
	Timeout    time.Duration // since the last new segment. Defaults to 10 s
	Remember   time.Duration // a finished message, at least. Defaults to 4 s
	Incomplete Incomplete
	Linger     time.Duration // with Incomplete: Linger. Defaults to 10 ms
}

// Bounds that are not configured.
const (
	// MaxIntervals is how many stretches of bytes an irregular message can
	// have behind its first hole.
	MaxIntervals = 256
	// HeaderWait is for how long packets wait for the header packet of their
	// message, at most.
	HeaderWait = time.Second
)

func (c *Config) complete() error {
	for _, d := range []struct {
		v    *int
		name string
		def  int
		max  int
	}{
		{&c.Messages, "messages in flight", 4096, 1 << 24},
		{&c.Words, "words of a key", KeyWords, KeyWords},
		{&c.Memory, "bytes for holes", 16 << 20, math.MaxInt},
	} {
		if *d.v == 0 {
			*d.v = d.def
		}
		if *d.v < 0 || *d.v > d.max {
			return fmt.Errorf("message queue: %d %s: want 1 to %d, or 0 for %d", *d.v, d.name, d.max, d.def)
		}
	}
	if c.Held == 0 {
		c.Held = 64
	}
	if c.Incomplete > Discard {
		return fmt.Errorf("message queue: invalid treatment %d of incomplete messages", c.Incomplete)
	}
	for _, d := range []struct {
		v    *time.Duration
		name string
		def  time.Duration
	}{{&c.Timeout, "timeout", 10 * time.Second}, {&c.Remember, "time to remember messages", 4 * time.Second}, {&c.Linger, "linger", 10 * time.Millisecond}} {
		if *d.v == 0 {
			*d.v = d.def
		}
		if *d.v < 0 {
			return fmt.Errorf("message queue: %s of %v: want a positive one, or 0 for %v", d.name, *d.v, d.def)
		}
	}
	return nil
}
