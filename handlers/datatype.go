// SPDX-License-Identifier: Apache-2.0

package handlers

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/spin"
)

func init() {
	RegisterEnv("datatype", "puts the bytes of SLMP messages where an MPI datatype says; params type, count, strategy, interval, epsilon, packet, packet_time, partial", newDatatype)
}

// User counters of "datatype".
const (
	DatatypeCopies = iota // contiguous pieces that a packet was copied in
	DatatypeBytes         // bytes of the packet
)

// DatatypeOptions say how messages of a datatype are placed. Zero fields take their
// defaults.
type DatatypeOptions struct {
	Strategy string // one of ddt.Strategies. Defaults to ddt.Direct
	HPUs     int    // of the NIC. Defaults to 16, the default of a NIC
	Messages int    // what the context has: most in flight. Defaults to 4096, the default of a context
	Packet   int    // bytes of a message in most packets. Defaults to hpu.DefaultSlice
	Interval int64  // bytes between checkpoints. Defaults to what Model computes
	Model    ddt.Model
	Partial  bool  // messages may be shorter than the type
	Window   int64 // see Env: a type that does not fit is an error
	Memory   int64 // see Env: a strategy that needs more is an error. Defaults to ddt.MaxPlacementMemory
}

func newDatatype(p Params, env Env) (*Set, error) {
	const unsaid = math.MinInt64
	c := struct {
		Type       string        `param:"type,required"`
		Count      int64         `param:"count"`
		Strategy   string        `param:"strategy"`
		Interval   int64         `param:"interval"`
		Epsilon    float64       `param:"epsilon"`
		Packet     int           `param:"packet"`
		PacketTime time.Duration `param:"packet_time"`
		Partial    bool          `param:"partial"`
	}{Count: unsaid, Strategy: ddt.Direct, Packet: hpu.DefaultSlice}
	if err := p.Decode(&c); err != nil {
		return nil, err
	}
	if !slices.Contains(ddt.Strategies(), c.Strategy) {
		return nil, badParam("strategy", "%q: want %s", c.Strategy, strings.Join(ddt.Strategies(), ", "))
	}
	typ, count, err := ddt.Resolve(c.Type)
	if err != nil {
		wrong := &ParamError{Param: "type", Err: err}
		var syntax *ddt.SyntaxError
		if errors.As(err, &syntax) {
			wrong.Line, wrong.Column, wrong.Err = syntax.Line, syntax.Column, syntax.Err
		}
		return nil, wrong
	}
	if c.Count != unsaid {
		count = c.Count
	}
	committed, err := ddt.Commit(typ, count)
	if err != nil {
		return nil, fmt.Errorf("params type and count: %w", err)
	}
	return Datatype(committed, DatatypeOptions{
		Strategy: c.Strategy, HPUs: env.HPUs, Messages: env.Messages, Packet: c.Packet,
		Interval: c.Interval, Model: ddt.Model{Epsilon: c.Epsilon, PacketTime: c.PacketTime}, Partial: c.Partial,
		Window: env.Window, Memory: env.Memory,
	})
}

// Datatype returns handlers that put the bytes of messages where c says, relative to the
// place of each message in its window. The place is that of c's displacement 0; a type
// may have bytes before it. Reserved has the memory that the set uses.
//
// The strategies hpu-local and rw-cp set Sequence and VHPUs. They have state that only one
// HPU at a time may use, so the context's policy must be message, or blocked-rr with just
// these numbers; nothing here checks that. With the policy packet, or other numbers, bytes
// go to wrong places, outside windows as well.
//
// A message that does not fit in its place fails before anything is written. One that is
// not as long as c (with o.Partial: that is longer than c) fails as soon as that is known.
// Only bytes of c are ever written.
func Datatype(c *ddt.Committed, o DatatypeOptions) (*Set, error) {
	o.Strategy = cmp.Or(o.Strategy, ddt.Direct)
	o.HPUs, o.Messages, o.Packet = cmp.Or(o.HPUs, 16), cmp.Or(o.Messages, 4096), cmp.Or(o.Packet, hpu.DefaultSlice)
	if c == nil {
		return nil, errors.New("datatype: no type")
	}
	d := &datatype{size: c.Size(), hpus: o.HPUs, messages: o.Messages, partial: o.Partial}
	d.lo, d.hi = c.Bounds()
	switch {
	case o.Window < 0:
		return nil, errors.New("handlers may not write any of the windows")
	case o.Window > 0 && d.hi-d.lo > o.Window:
		return nil, fmt.Errorf("the type touches %s, and the largest window has %d: make it larger, or count smaller", d.touched(), o.Window)
	}
	var err error
	d.placement, err = ddt.NewPlacement(c, ddt.Config{
		Strategy: o.Strategy, HPUs: o.HPUs, Messages: o.Messages, Packet: o.Packet, Most: o.Memory, Interval: o.Interval, Model: o.Model,
	})
	if err != nil {
		return nil, err
	}
	s, m := d.placement.Scheduling(), d.placement.Memory()
	return &Set{
		Handlers: hpu.Handlers{Header: d.header, Payload: d.payload, Completion: d.completion},
		Rulesets: []matcher.Ruleset{matcher.SLMP()},
		Queue:    true,
		Window:   true,
		Sequence: s.Sequence,
		VHPUs:    s.VHPUs,
		Reserved: map[string]int64{"type": m.Type, "checkpoints": m.Checkpoints, "segments": m.Segments},
	}, nil
}

// datatype has the handlers of a context. HPUs share it: only the placement, which has
// state for each message, changes.
type datatype struct {
	placement      ddt.Placement
	size, lo, hi   int64 // of the committed type
	hpus, messages int   // that the placement is made for
	partial        bool
}

// header makes sure that there is room for the whole message.
func (d *datatype) header(h *hpu.HER) spin.Code {
	m := h.Message()
	if err := d.admit(h, m); err != nil {
		return h.Fail(err)
	}
	return spin.ProcessData
}

func (d *datatype) admit(h *hpu.HER, m *hpu.Message) error {
	switch {
	case m == nil:
		return errors.New("packets of this format do not form messages that start and end: use slmp")
	case h.HPUs() > d.hpus:
		return fmt.Errorf("the NIC has %d HPUs, but the handlers were made for %d", h.HPUs(), d.hpus)
	case m.Slot() >= d.messages:
		return fmt.Errorf("slot %d for messages, but the handlers were made for %d: make them for as many messages as the context has", m.Slot(), d.messages)
	}
	b := m.Binding()
	if err := d.fits(&b); err != nil {
		return err
	}
	if _, _, err := d.place(&b); err != nil {
		return err
	}
	if n, known := m.Length(); known {
		return d.length(n)
	}
	return nil
}

// fits says what is wrong with a message's place. Its errors start with the numbers,
// because the application sees only the first 120 bytes.
func (d *datatype) fits(b *spin.Binding) error {
	if b.Window == nil {
		return errNoWindow
	}
	if b.Size < 0 || b.Size > 0 && (d.lo < 0 || d.hi > b.Size) {
		return fmt.Errorf("%s of a place of %d: %w", d.touched(), b.Size, spin.ErrBounds)
	}
	n, at := b.Window.Size(), b.Place+d.lo
	if overflow := b.Place < 0 && d.lo < 0; overflow || at < 0 || at > n-(d.hi-d.lo) {
		return fmt.Errorf("%s from %d of a window of %d: %w", d.touched(), b.Place, n, spin.ErrBounds)
	}
	return nil
}

// touched names the bytes that the type touches, the last one included.
func (d *datatype) touched() string {
	if d.lo == d.hi {
		return "no bytes"
	}
	return fmt.Sprintf("bytes %d to %d", d.lo, d.hi-1)
}

var (
	errNoWindow = errors.New("the message has no window: give the context one")
	errNoSlices = errors.New("the message's window does not lend its bytes to handlers")
)

// place returns the bytes from the first to the last that the type touches. Displacement
// 0 is at mem[origin], which may lie outside mem.
func (d *datatype) place(b *spin.Binding) (mem []byte, origin int64, err error) {
	w, ok := b.Window.(spin.SliceWindow)
	if !ok {
		return nil, 0, errNoSlices
	}
	mem, err = w.Slice(b.Place+d.lo, d.hi-d.lo, spin.Write)
	return mem, -d.lo, err
}

// length returns an error unless a message may have that length.
func (d *datatype) length(n uint64) error {
	if n == uint64(d.size) || d.partial && n < uint64(d.size) {
		return nil
	}
	return fmt.Errorf("a message of %d bytes, and the type has %d", n, d.size)
}

// payload places a packet.
func (d *datatype) payload(h *hpu.HER) spin.Code {
	packet, n := int64(h.Offset()), int64(h.PayloadLen())
	first := packet
	if h.EOM() {
		if err := d.length(uint64(first + n)); err != nil {
			return h.Fail(err)
		}
	} else if first+n > d.size {
		return h.Fail(fmt.Errorf("a message of %d bytes or more, and the type has %d", first+n, d.size))
	}
	m := h.Message()
	b := m.Binding()
	mem, origin, err := d.place(&b)
	if err != nil {
		return h.Fail(err)
	}
	copies := int64(0)
	for part := range h.Payload() {
		k, err := d.placement.Place(m.Slot(), h.HPU(), mem, origin, packet, first, part)
		if err != nil {
			return h.Fail(err)
		}
		copies += k
		first += int64(len(part))
	}
	h.Count(DatatypeCopies, uint64(copies))
	h.Count(DatatypeBytes, uint64(n))
	return spin.Success
}

// completion checks the length of a complete message, because a host message has no
// last packet to check it by. For incomplete ones, the event says how much is missing.
func (d *datatype) completion(c *hpu.Completion) spin.Code {
	if c.Cause != spin.Complete {
		return spin.Success
	}
	if err := d.length(c.Length); err != nil {
		return c.Fail(err)
	}
	return spin.Success
}
