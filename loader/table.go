// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"reflect"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/spin"
)

// A Policy tells how the program picks the HPU of a packet.
type Policy uint8

// Scheduling policies (FPsPIN report, section 4.4.4; BlockedRR: sPIN, SC 2019, section 3.2.1).
const (
	// ByMessage: packets of a message stay on one HPU.
	ByMessage = Policy(bpf.PolicyMessage)
	// ByPacket: packets go wherever there is room.
	ByPacket = Policy(bpf.PolicyPacket)
	// BlockedRR: a message is cut in sequences of as many bytes each, which are
	// dealt out to virtual HPUs in turn. A virtual HPU is on one HPU for as long
	// as any of its packets is in flight, and on any the next time. A packet
	// belongs to the sequence that its first byte lies in.
	BlockedRR = Policy(bpf.PolicyBlocked)
)

// MaxVHPUs is how many virtual HPUs a context with BlockedRR can have.
const MaxVHPUs = 1<<16 - 1

// CheckPolicy says what is wrong with a policy and what goes with it, for messages of a
// format (nil: unknown).
func CheckPolicy(p Policy, sequence uint32, vhpus int, f *matcher.Format) (wrong spin.Problems) {
	switch {
	case p == BlockedRR:
		if sequence < 1 {
			wrong.Add("sequence", "blocked-rr needs the bytes of a sequence")
		}
		if vhpus < 1 || vhpus > MaxVHPUs {
			wrong.Add("vhpus", "blocked-rr with %d virtual HPUs: want 1 to %d", vhpus, MaxVHPUs)
		}
		if f != nil && f.Offset == nil {
			wrong.Add("policy", "blocked-rr needs a message format with offsets, and %s has none", f.Name)
		}
	case p != ByMessage && p != ByPacket:
		wrong.Add("policy", "%d: want ByMessage, ByPacket or BlockedRR", p)
	case sequence != 0 || vhpus != 0:
		wrong.Add("policy", "sequence and vhpus go with blocked-rr")
	}
	return wrong
}

// A Delivery says how the program delivers the frames of an execution context: to HPUs,
// or to handlers in eBPF.
type Delivery struct {
	// Kernel has handlers in eBPF called, see Ingress.SetHandlers. What follows is about HPUs:
	// it has a meaning, and any value, if they hand messages over.
	Kernel    bool
	HandsOver bool
	Hook      Hook // that these are at

	Policy    Policy
	CoreMask  uint64    // HPUs it may use, bit h for HPU h
	Buckets   bpf.Range // for ByMessage and BlockedRR
	Sequence  uint32    // for BlockedRR: bytes, at least 1
	VHPUs     int       // for BlockedRR: of each message, 1..MaxVHPUs
	Timestamp bool      // stamp frames with their arrival time
	Spill     bool      // frames for which there is no credit pass to the stack; else they are dropped
}

// compile turns a table, and the contexts that it names, into the structure that the
// program reads.
func compile(t *matcher.Table, contexts map[uint16]Delivery) (*bpf.Table, error) {
	x, err := matcher.Compile(t)
	if err != nil {
		return nil, err
	}
	out := &bpf.Table{
		Generation: t.Generation,
		LastOr:     uint32(x.LastOr),
		Cand:       x.Cand,
		Hit:        x.Hit,
		Or:         x.Or,
		Local:      x.Local,
	}
	if l := t.Local; l != nil {
		for i := range 3 {
			out.Mac[i] = binary.NativeEndian.Uint16(l.MAC[2*i:])
		}
		for i, a := range l.Addrs {
			b := a.As16()
			for w := range out.Addresses[i].W {
				out.Addresses[i].W[w] = binary.NativeEndian.Uint32(b[4*w:])
			}
		}
		out.Naddresses = uint32(len(l.Addrs))
	}
	// The program knows two shapes of vector: one word or four.
	stride := 1
	if x.Words > 1 {
		out.Wide = 1
		stride = bpf.VecWords
	}
	for i, f := range x.Fields {
		k := bpf.IndexField{
			Field: field(matcher.Field{Index: f.Index, Mask: f.Mask}),
			First: uint32(f.First),
			Count: uint32(f.N),
		}
		copy(k.Users[:], x.Users[i*x.Words:][:x.Words])
		copy(k.Absent[:], x.Absent[i*x.Words:][:x.Words])
		// Each ruleset has a rule on a gate, so there are no more than MaxRules.
		if start, end, ok := x.Gate(i); ok {
			out.Gates[out.Ngates] = bpf.Rule{Field: k.Field, Start: start, End: end}
			out.Ngates++
			continue
		}
		out.Fields[out.Nfields] = k
		out.Nfields++
	}
	var later [bpf.VecWords]uint64
	for i := int(out.Nfields) - 1; i >= 0; i-- {
		f := &out.Fields[i]
		f.After = later
		for w, users := range f.Users {
			later[w] |= users
		}
	}
	copy(out.Bounds[:], x.Bounds)
	for i := range x.Bounds {
		copy(out.Vec[i*stride:][:stride], x.Vec[i*x.Words:][:x.Words])
	}
	formats := map[uint16]*matcher.Format{}
	for bit, slot := range x.Slots {
		e := t.Entries[slot]
		eom := e.EOM
		if eom == nil {
			eom = e.Format.EOM
		}
		if eom == nil {
			eom = &matcher.False
		}
		out.Rulesets[bit] = bpf.Ruleset{
			Slot:    uint8(slot),
			Context: e.Context,
			Eom: bpf.Rule{
				Field: field(matcher.Field{Index: eom.Index, Mask: eom.Mask}),
				Start: eom.Start,
				End:   eom.End,
			},
		}
		if f := formats[e.Context]; f != nil {
			if !reflect.DeepEqual(f, e.Format) {
				return nil, fmt.Errorf("ruleset %d (%s): context %d has two message formats, %s and %s", slot, e.Name, e.Context, f.Name, e.Format.Name)
			}
			continue
		}
		formats[e.Context] = e.Format
		d, ok := contexts[e.Context]
		if !ok {
			return nil, fmt.Errorf("ruleset %d (%s): context %d is missing", slot, e.Name, e.Context)
		}
		if err := d.fill(&out.Contexts[e.Context], e.Format); err != nil {
			return nil, fmt.Errorf("context %d: %w", e.Context, err)
		}
	}
	return out, nil
}

func field(f matcher.Field) bpf.Field {
	return bpf.Field{Off: uint16(4 * f.Index), Need: uint16(f.Need()), Mask: f.Mask}
}

// fill writes what the program needs to know of a context and its message format.
func (d *Delivery) fill(out *bpf.Context, f *matcher.Format) error {
	if d.Kernel {
		out.Flags |= bpf.ContextKernel
		if d.Hook == TC {
			out.Flags |= bpf.ContextTC
		}
	}
	onHPUs := !d.Kernel || d.HandsOver
	if !onHPUs {
		if *d != (Delivery{Kernel: true, Hook: d.Hook}) {
			return errors.New("handlers in eBPF are not on HPUs: want nothing but Kernel and Hook")
		}
	} else if d.Hook != XDP {
		return errors.New("HPUs get frames by XDP: want it for Hook")
	} else if err := CheckPolicy(d.Policy, d.Sequence, d.VHPUs, f).Err(); err != nil {
		return err
	}
	if d.HandsOver {
		out.Flags |= bpf.ContextHands
	}
	out.Sequence = d.Sequence
	out.Vhpus = uint16(d.VHPUs)
	if onHPUs && d.Policy != ByPacket {
		if n := d.Buckets.Size; n <= 0 || n&(n-1) != 0 || d.Buckets.Base < 0 || d.Buckets.Base+n > bpf.MaxBuckets {
			return fmt.Errorf("buckets %d+%d: want a power of two within 0 to %d", d.Buckets.Base, n, bpf.MaxBuckets)
		}
		out.BucketBase = uint32(d.Buckets.Base)
		out.BucketMask = uint32(d.Buckets.Size - 1)
	}
	out.CoreMask = d.CoreMask
	out.Policy = uint8(d.Policy)
	out.Header = uint16(f.Header)
	out.Need = uint16(f.Need())
	out.Nkey = uint8(len(f.Key))
	for i, k := range f.Key {
		out.Key[i] = field(k)
	}
	if f.Offset != nil {
		out.HasOffset = 1
		out.Offset = field(*f.Offset)
		out.OffsetShift = uint8(bits.TrailingZeros32(f.Offset.Mask))
	}
	if f.Length != nil {
		out.HasLength = 1
		out.Length = field(f.Length.Field)
		out.LengthShift = uint8(bits.TrailingZeros32(f.Length.Mask))
		out.LengthFrom = uint32(f.Length.From)
	}
	if d.Timestamp {
		out.Flags |= bpf.ContextTimestamp
	}
	if d.Spill {
		out.Flags |= bpf.ContextSpill
	}
	return nil
}
