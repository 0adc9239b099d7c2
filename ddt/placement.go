// SPDX-License-Identifier: Apache-2.0

package ddt

import "time"

// A Placement unpacks the messages of a context with one of the strategies. Messages are
// known by slots, 0 to Config.Messages-1. It promises nothing for concurrent calls but
// what its Scheduling asks for; different messages may be placed at the same time.
type Placement interface {
	// Begin is called when a message begins, before its first Place.
	Begin(slot int)
	// Place unpacks bytes of a message's stream, as Committed.Unpack does. hpu is
	// who asks, 0 to Config.HPUs-1.
	Place(slot, hpu int, mem []byte, origin, first int64, stream []byte) (copies int64, err error)
	Scheduling() Scheduling
	Memory() Memory
}

// A Scheduling says which packets of a message a strategy needs to have processed one
// after the other.
type Scheduling struct {
	// Sequence is how many bytes of the stream belong together: at no time two HPUs
	// process packets of the same sequence (the policy blocked-rr, SC 2019, section
	// 3.2.1). 0: it does not matter (the policy packet).
	Sequence uint32
	// VHPUs is how many virtual HPUs there are, between which sequences go around.
	VHPUs int
}

// Memory is what a placement takes of the NIC's memory, in bytes.
type Memory struct {
	Type        int64 `json:"type"`        // the description
	Checkpoints int64 `json:"checkpoints"` // of one type, for all messages
	Segments    int64 `json:"segments"`    // state of messages
}

// Total returns the sum.
func (m Memory) Total() int64 { return m.Type + m.Checkpoints + m.Segments }

// Strategies.
const (
	Direct      = "direct"      // seeks to any position; no state
	Specialized = "specialized" // one loop for a flat vector or list, none for others
	HPULocal    = "hpu-local"   // a segment for each virtual HPU, which catches up
	ROCP        = "ro-cp"       // copies the nearest checkpoint for each packet
	RWCP        = "rw-cp"       // each sequence of packets owns a checkpoint, which advances
)

// Strategies returns the names of all of them.
func Strategies() []string { return []string{Direct, Specialized, HPULocal, ROCP, RWCP} }

// Config of a Placement.
type Config struct {
	Strategy string // Defaults to Direct
	HPUs     int    // that call Place
	Messages int    // in flight at the same time
	Packet   int    // bytes of the stream in a packet, as a rule

	// For ro-cp and rw-cp: the checkpoint interval in bytes of the stream, 0 to have
	// it chosen by Interval from what follows.
	Interval int64
	Model
}

// A Model is what the checkpoint interval is chosen from (SC 2019, section 3.2.4). Zero
// fields take their defaults.
type Model struct {
	Epsilon      float64       // scheduling overhead that is allowed. Defaults to 0.2
	Memory       int64         // for checkpoints, bytes. Defaults to 1 MiB
	PacketBuffer int64         // bytes. Defaults to 4 MiB
	PacketTime   time.Duration // between packets. Defaults to 1 us
	// Handler is the time of a payload handler, T_PH. Defaults to what MeasureHandler
	// finds.
	Handler time.Duration
}

// NewPlacement returns a placement of messages that are c.
func NewPlacement(c *Committed, cfg Config) (Placement, error) { panic("not yet") }
