// SPDX-License-Identifier: Apache-2.0

package ddt

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// A Placement unpacks the messages of a context with one of the strategies. Messages are
// known by slots, 0 to Config.Messages-1. Different messages may be placed at the same
// time, and packets of one message as Scheduling allows it. What is left in a slot by a
// message that is over, or was given up, does not matter to the next.
type Placement interface {
	// Place unpacks bytes of a message's stream, as Committed.Unpack does. They are a
	// packet that begins at byte packet of the stream, or a part of it: it goes by the
	// packet which state a strategy uses, as it does which HPU processes it. hpu is
	// the HPU that asks, 0 to Config.HPUs-1; it does one thing at a time.
	Place(slot, hpu int, mem []byte, origin, packet, first int64, stream []byte) (copies int64, err error)
	Scheduling() Scheduling
	Memory() Memory
}

// A Scheduling says which packets of a message a strategy needs to have processed one
// after the other. If it asks for anything, Place relies on it: a policy that does not
// keep to it has HPUs write the same state at the same time, and bytes go anywhere in the
// type's bounds, or beyond. One message on one HPU at a time (the policy message) is
// always good enough.
type Scheduling struct {
	// Sequence is how many bytes of the stream belong together: at no time two HPUs
	// process packets that begin in the same sequence (the policy blocked-rr, SC 2019,
	// section 3.2.1). Where a packet ends does not matter. 0: nor does any of this (the
	// policy packet).
	Sequence uint32
	// VHPUs is how many virtual HPUs there are, between which sequences go around: at
	// no time two HPUs process packets of the same one.
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

// ErrMemory is wrapped by errors of placements that would take more than they may.
var ErrMemory = errors.New("not enough memory")

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

	// Most is how many bytes the placement may take, as Memory has them. 0:
	// MaxPlacementMemory, which holds in any case. Negative: none.
	Most int64

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

// Limits of placements. Errors of NewPlacement name them.
const (
	MaxHPUs            = 1<<16 - 1 // real or virtual ones
	MaxPlacementMemory = 1 << 30   // bytes of Memory that a placement is allowed
	MaxWalk            = 1 << 30   // blocks of a type whose checkpoints can be made: some seconds
	MaxCatchUp         = 1 << 24   // steps of catching up for a packet: a good part of a second
)

// NewPlacement returns a placement of messages that are c.
func NewPlacement(c *Committed, cfg Config) (Placement, error) {
	if cfg.Strategy == "" {
		cfg.Strategy = Direct
	}
	switch {
	case c == nil:
		return nil, errors.New("placement: no type")
	case !slices.Contains(Strategies(), cfg.Strategy):
		return nil, fmt.Errorf("strategy %q: want one of %s", cfg.Strategy, strings.Join(Strategies(), ", "))
	case cfg.HPUs < 1 || cfg.HPUs > MaxHPUs:
		return nil, fmt.Errorf("%s with %d HPUs: want 1 to %d", cfg.Strategy, cfg.HPUs, MaxHPUs)
	case cfg.Messages < 1:
		return nil, fmt.Errorf("%s for %d messages in flight: want 1 or more", cfg.Strategy, cfg.Messages)
	case cfg.Packet < 1 || int64(cfg.Packet) > math.MaxUint32:
		return nil, fmt.Errorf("%s with packets of %d bytes: want 1 to %d", cfg.Strategy, cfg.Packet, uint32(math.MaxUint32))
	case cfg.Interval < 0:
		return nil, fmt.Errorf("checkpoint interval of %d bytes: want 1 or more, or 0 to have it chosen", cfg.Interval)
	}
	if err := cfg.Model.check(); err != nil {
		return nil, err
	}
	form := *c
	form.typ = nil // else it would stay as long as the placement, and may be large
	b := base{c: &form, hpus: cfg.HPUs, messages: cfg.Messages, most: MaxPlacementMemory}
	if cfg.Most != 0 {
		b.most = min(b.most, max(cfg.Most, 0))
	}
	b.memory.Type = c.Memory()
	if err := b.allot(cfg.Strategy, 0, 0); err != nil {
		return nil, err
	}
	switch cfg.Strategy {
	case Specialized:
		return newSpecialized(b)
	case HPULocal:
		return newHPULocal(b, cfg)
	case ROCP:
		return newROCP(b, cfg)
	case RWCP:
		return newRWCP(b, cfg)
	}
	return &direct{b}, nil
}

// base is what all placements have.
type base struct {
	c              *Committed
	hpus, messages int
	most           int64 // bytes of memory
	scheduling     Scheduling
	memory         Memory
}

func (b *base) Scheduling() Scheduling { return b.scheduling }
func (b *base) Memory() Memory         { return b.memory }

// check is what Place does first.
func (b *base) check(slot, hpu int, mem []byte, origin, packet, first int64, stream []byte) error {
	if err := b.who(slot, hpu, packet, first); err != nil {
		return err
	}
	return b.c.Check(int64(len(mem)), origin, first, int64(len(stream)))
}

func (b *base) who(slot, hpu int, packet, first int64) error {
	switch {
	case uint(slot) >= uint(b.messages):
		return fmt.Errorf("message in slot %d of a placement for %d messages", slot, b.messages)
	case uint(hpu) >= uint(b.hpus):
		return fmt.Errorf("HPU %d of a placement for %d HPUs", hpu, b.hpus)
	case packet < 0 || packet > first:
		return fmt.Errorf("bytes from %d of a packet that begins at %d: %w", first, packet, ErrBounds)
	}
	return nil
}

// allot notes what a placement needs before it is made, or refuses.
func (b *base) allot(strategy string, checkpoints, segments int64) error {
	b.memory.Checkpoints, b.memory.Segments = checkpoints, segments
	sum := plus(plus(b.memory.Type, checkpoints), segments)
	if sum <= b.most {
		return nil
	}
	hint := ""
	if checkpoints > 0 || segments > 0 {
		hint = "; direct needs no more than the description"
	}
	return fmt.Errorf("%w: %s of this type for %d messages takes %d bytes (%d of description, %d of checkpoints, %d of segments), at most %d%s",
		ErrMemory, strategy, b.messages, sum, b.memory.Type, checkpoints, segments, b.most, hint)
}
