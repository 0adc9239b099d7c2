// SPDX-License-Identifier: Apache-2.0

// Package mpq tracks the messages in flight of an execution context: which bytes
// of each message have arrived, and what to do with the next segment. It is a
// pure state machine: segments and the time go in, decisions come out. It runs
// nothing, holds no packet and reads no clock, so that NICs and simulations use
// the same code.
//
// A context has one Queue: limits, slots, counters and the record of finished
// messages. It is safe for concurrent use. A Table holds some of the Queue's open
// messages, for one thread at a time: an HPU's own, or one that HPUs share behind
// a lock. A message stays in one table from start to end; the caller must take all
// its segments there. The Queue remembers finished messages, so that a late
// duplicate is recognised in any table.
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
// been given to Finish. Both sets of bytes are kept exactly. A message is regular
// as long as all its segments are as long as the first, except EOM, which may be
// shorter: then the sets take a bit for each segment beyond the first hole. Other
// cuts are legal and are kept as intervals.
package mpq

import (
	"fmt"
	"math"
	"time"

	"github.com/xspin/xspin/spin"
)

// KeyWords is how many words a message key has.
const KeyWords = 8

// A Key is the identity of a message within its context. Keys are compared in
// full, so different messages are never taken for one. The last word in use is
// the message's number; the others identify its sender.
type Key [KeyWords]uint32

// A Segment is what a packet brings: bytes [Offset, Offset+Len) of its message.
// The one with offset 0 is the header packet. Segments without bytes are legal,
// but only the header packet and EOM are run: of others, a duplicate could not be
// recognised.
type Segment struct {
	Offset uint32
	Len    int  // bytes, 0 is legal
	EOM    bool // the message ends where the segment ends
}

// End returns the position after the segment's last byte.
func (s Segment) End() uint64 { return uint64(s.Offset) + uint64(s.Len) }

// A Decision says what to do with a segment that has arrived.
type Decision uint8

const (
	// Drop the packet, unacknowledged; the reason is counted. If the lack is
	// temporary, a retransmission may be accepted.
	Drop Decision = iota
	// Start: the header packet of a new message. Bind it and run its header
	// handler, then call Opened, Refuse or Fail; after Opened run the payload
	// handler for this segment too, and Finish it.
	Start
	// Run the payload handler, then Finish.
	Run
	// Hold: the header handler has not finished. Keep the packet until the
	// message is Opened, then Unhold it and let it Arrive again. A held packet
	// that is dropped instead needs Unhold too.
	Hold
	// Again: its bytes have been processed. Acknowledge it, run nothing. The
	// entry is nil if the message has ended; then any of its segments may be
	// acknowledged, EOM included.
	Again
	// Wait: a duplicate of a segment that is still being processed, or of EOM
	// while the message is not complete. Do not acknowledge it; the sender may
	// be told to wait.
	Wait
	// Notify: a duplicate of EOM, of a complete message whose event found no
	// room. Post the event again, then End and acknowledge, or Defer again.
	// Until then no other caller gets Notify for this message.
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
	// handler learns how much is missing.
	Abandon Incomplete = iota
	// Linger: as Abandon, but no later than Config.Linger after EOM.
	Linger
	// Discard it after Timeout, without calling the completion handler.
	Discard
)

// Config of a Queue. Zero fields take the defaults.
type Config struct {
	Messages   int           // most in flight. Defaults to 4096
	Words      int           // words of a key in use. Defaults to KeyWords
	Held       int           // most packets held, of all messages. Defaults to 64; negative: none
	Memory     int           // bytes for holes that do not fit in entries; a message gets an eighth at most, or 8 KiB. Defaults to 16 MiB
	Timeout    time.Duration // since the last new segment. Defaults to 10 s
	Remember   time.Duration // how long a finished message is remembered, unless room runs out. Defaults to spin.DefaultRemember
	Incomplete Incomplete
	Linger     time.Duration // since EOM, if Incomplete is Linger. Defaults to 10 ms
}

// Bounds that are not configured.
const (
	// MaxIntervals is the most stretches of bytes that an irregular message
	// can have beyond its first hole.
	MaxIntervals = 256
	// HeaderWait is the longest that packets wait for the header packet of
	// their message.
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
	}{{&c.Timeout, "timeout", 10 * time.Second}, {&c.Remember, "time to remember messages", spin.DefaultRemember}, {&c.Linger, "linger", 10 * time.Millisecond}} {
		if *d.v == 0 {
			*d.v = d.def
		}
		if *d.v < 0 {
			return fmt.Errorf("message queue: %s of %v: want a positive one, or 0 for %v", d.name, *d.v, d.def)
		}
	}
	return nil
}
