// SPDX-License-Identifier: Apache-2.0

package matcher

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"
)

// Sizes of a compiled index. Every rule with a mask belongs to exactly one
// field, and r rules cut the value axis of their field in at most 2r+1
// intervals. So a full table has at most MaxTableRules = 2048 fields, and
// 2*2048 + 2048 = 6144 intervals, which MaxIntervals holds: Compile cannot
// fail on a valid table for want of room.
const (
	MaxFields    = MaxTableRules
	MaxIntervals = 8192
	MaxWords     = MaxRulesets / 64 // uint64 words in the longest bit vector
)

// IndexField is a word under a mask that some rule compares. Its value axis is
// cut into N intervals, within each of which every rule gives one answer. Interval
// k covers [Bounds[First+k], Bounds[First+k+1]); the last one reaches 2^32-1, and
// Bounds[First] is 0.
type IndexField struct {
	Index int    // 32-bit word, counted from frame byte 0
	Need  int    // bytes that a frame must have to carry the field
	Mask  uint32 // never 0
	First int    // position of the first boundary in Bounds
	N     int    // intervals, at least 1
}

// Index is a table prepared for matching in the manner of Lakshman and
// Stiliadis ("High-speed policy-based packet forwarding using efficient
// multi-dimensional range matching", SIGCOMM 1998): one bit per ruleset, and
// for each interval of each field the vector of the rulesets that are still
// possible. The cost of a frame depends on the number of distinct fields, not of
// rules, and a frame that no ruleset matches is done after the first few.
//
// Bit b stands for the ruleset with the b-th lowest number, Slots[b]. Bit b of
// a vector is word b/64, bit b%64. The arrays are flat, to be copied into the
// maps of the XDP program. An Index is immutable, and safe for concurrent use.
type Index struct {
	Fields []IndexField
	LastOr int      // the first LastOr fields, and no others, have rules of Or rulesets
	Bounds []uint32 // starts of intervals, ascending within a field
	Vec    []uint64 // interval i of Bounds has Vec[i*Words:][:Words]
	Absent []uint64 // vector i, at i*Words, is that of field i for frames too short to have it
	Users  []uint64 // vector i, at i*Words, has the rulesets with a rule on field i
	Words  int      // uint64 words per vector, 1..MaxWords

	Cand [MaxWords]uint64 // And rulesets, without those that never match
	Hit  [MaxWords]uint64 // Or rulesets that match every frame
	Or   [MaxWords]uint64 // Or rulesets
	// Local rulesets, if the table has a Local. A frame's addresses are compared
	// last, and once for all of them.
	Local [MaxWords]uint64
	local *Local
	// Slots has the ruleset number of each bit.
	Slots []int
}

// Lookup returns the lowest-numbered ruleset that matches the frame.
//
// And rulesets start as candidates, and each field may remove some. Or rulesets
// start without a hit, and each field may add some. The result is final when no
// candidate is left and the fields of Or rulesets are done.
func (x *Index) Lookup(frame []byte) (slot int, ok bool) {
	cand, hit := x.Cand, x.Hit
	for i := range x.Fields {
		if i >= x.LastOr && cand == [MaxWords]uint64{} {
			break
		}
		if !x.matters(i, &cand, &hit) {
			continue
		}
		vec := x.vector(i, frame)
		for w, v := range vec {
			hit[w] |= v & x.Or[w]
			cand[w] &= v
		}
	}
	for w := range x.Words {
		v := cand[w] | hit[w]
		if v&x.Local[w] != 0 && !x.local.Has(frame) {
			v &^= x.Local[w]
		}
		if v != 0 {
			return x.Slots[64*w+bits.TrailingZeros64(v)], true
		}
	}
	return 0, false
}

// matters reports whether field i can change the result: whether a candidate, or an
// Or ruleset without a hit, has a rule on it.
func (x *Index) matters(i int, cand, hit *[MaxWords]uint64) bool {
	for w, users := range x.Users[i*x.Words:][:x.Words] {
		if users&(cand[w]|x.Or[w]&^hit[w]) != 0 {
			return true
		}
	}
	return false
}

// vector returns the vector of the interval of field i that the frame's value is in.
func (x *Index) vector(i int, frame []byte) []uint64 {
	f := &x.Fields[i]
	v, ok := masked(frame, f.Index, f.Mask)
	if !ok {
		return x.Absent[i*x.Words:][:x.Words]
	}
	k, found := slices.BinarySearch(x.Bounds[f.First:f.First+f.N], v)
	if !found {
		k-- // Bounds[First] is 0, so k was at least 1
	}
	return x.Vec[(f.First+k)*x.Words:][:x.Words]
}

// bitRule is a rule and the bit of its ruleset.
type bitRule struct {
	Rule
	bit int
}

// draft is a field while its rules are collected.
type draft struct {
	index int
	mask  uint32
	rules []bitRule // in bit order
	or    bool      // some Or ruleset uses the field
	ands  int       // And rulesets that use it
}

// Compile builds the index of a table. It fails only if the table is not valid.
func Compile(t *Table) (*Index, error) {
	if err := t.Validate(); err != nil {
		return nil, fmt.Errorf("compile: %w", err)
	}
	x := &Index{Slots: t.Slots(), local: t.Local}
	x.Words = max(1, (len(x.Slots)+63)/64)

	var drafts []*draft
	byField := make(map[Field]*draft)
	for bit, slot := range x.Slots {
		e := t.Entries[slot]
		if e.Local && t.Local != nil {
			x.Local[bit/64] |= 1 << (bit % 64)
		}
		if x.start(bit, &e.Ruleset) {
			continue // known without looking at the frame
		}
		for _, r := range e.Rules {
			if r.Mask == 0 {
				continue
			}
			key := Field{r.Index, r.Mask}
			d := byField[key]
			if d == nil {
				d = &draft{index: r.Index, mask: r.Mask}
				byField[key] = d
				drafts = append(drafts, d)
			}
			if e.Mode == Or {
				d.or = true
			} else if n := len(d.rules); n == 0 || d.rules[n-1].bit != bit {
				d.ands++
			}
			d.rules = append(d.rules, bitRule{r, bit})
		}
	}

	// Fields of Or rulesets must all be looked at, so they come first. Then come those
	// that the most And rulesets use, so that frames that match nothing end early.
	slices.SortFunc(drafts, func(a, b *draft) int {
		if a.or != b.or {
			if a.or {
				return -1
			}
			return 1
		}
		return cmp.Or(-cmp.Compare(a.ands, b.ands), cmp.Compare(a.index, b.index), -cmp.Compare(a.mask, b.mask))
	})
	for _, d := range drafts {
		if d.or {
			x.LastOr++
		}
		x.add(d)
	}
	return x, nil
}

// start sets the start vectors for one ruleset, and reports whether its rules with
// mask 0, which no frame changes, decide it.
func (x *Index) start(bit int, rs *Ruleset) (decided bool) {
	w, b := bit/64, uint64(1)<<(bit%64)
	for _, r := range rs.Rules {
		if r.Mask == 0 && r.Match(nil) != (rs.Mode == And) {
			decided = true
		}
	}
	if rs.Mode == Or {
		x.Or[w] |= b
		if decided {
			x.Hit[w] |= b
		}
	} else if !decided {
		x.Cand[w] |= b
	}
	return decided
}

// add appends a field with its intervals and vectors.
func (x *Index) add(d *draft) {
	f := IndexField{Index: d.index, Need: need(d.index, d.mask), Mask: d.mask, First: len(x.Bounds)}

	starts := []uint32{0}
	users := make([]uint64, x.Words)
	for _, r := range d.rules {
		users[r.bit/64] |= 1 << (r.bit % 64)
		starts = append(starts, r.Start)
		// A field has no value beyond its mask.
		if r.End < d.mask {
			starts = append(starts, r.End+1)
		}
	}
	x.Users = append(x.Users, users...)
	slices.Sort(starts)
	for _, s := range slices.Compact(starts) {
		vec := x.evaluate(d, func(r Rule) bool { return r.Start <= s && s <= r.End })
		last := len(x.Vec) - x.Words
		if f.N > 0 && slices.Equal(vec, x.Vec[last:]) {
			continue
		}
		x.Bounds = append(x.Bounds, s)
		x.Vec = append(x.Vec, vec...)
		f.N++
	}
	x.Absent = append(x.Absent, x.evaluate(d, func(Rule) bool { return false })...)
	x.Fields = append(x.Fields, f)
}

// evaluate returns the vector of an interval: And rulesets stay candidates unless one
// of their rules on the field fails, Or rulesets are hit if one of theirs holds.
func (x *Index) evaluate(d *draft, holds func(Rule) bool) []uint64 {
	vec := make([]uint64, x.Words)
	for w := range vec {
		vec[w] = x.Cand[w]
	}
	for _, r := range d.rules {
		w, b := r.bit/64, uint64(1)<<(r.bit%64)
		switch ok := holds(r.Rule); {
		case x.Or[w]&b != 0 && ok:
			vec[w] |= b
		case x.Or[w]&b == 0 && !ok:
			vec[w] &^= b
		}
	}
	return vec
}

// Gate reports whether field i decides alike for all rulesets: each requires its
// value to be in [start, end], and nothing else of it. A frame outside matches
// nothing; for one inside, the field need not be looked at again.
func (x *Index) Gate(i int) (start, end uint32, ok bool) {
	if x.Or != [MaxWords]uint64{} {
		return 0, 0, false
	}
	f := x.Fields[i]
	for _, w := range x.Absent[i*x.Words:][:x.Words] {
		if w != 0 {
			return 0, 0, false
		}
	}
	for k := f.First; k < f.First+f.N; k++ {
		vec := x.Vec[k*x.Words:][:x.Words]
		switch {
		case slices.Equal(vec, make([]uint64, x.Words)):
		case ok || !slices.Equal(vec, x.Cand[:x.Words]):
			return 0, 0, false // some rulesets only, or a second interval
		default:
			start, end, ok = x.Bounds[k], math.MaxUint32, true
			if k+1 < f.First+f.N {
				end = x.Bounds[k+1] - 1
			}
		}
	}
	return start, end, ok
}
