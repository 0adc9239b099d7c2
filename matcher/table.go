// SPDX-License-Identifier: Apache-2.0

package matcher

import (
	"fmt"
	"maps"
	"slices"
)

// Entry binds a ruleset to the context that gets its frames.
type Entry struct {
	Ruleset
	Context uint16  // 0..MaxContexts-1; several rulesets may share a context
	Format  *Format // how the context's frames are read. Required
}

// Table is a set of numbered rulesets. Of those that match a frame, the one with
// the lowest number wins, so numbers are priorities. They need not be consecutive.
type Table struct {
	Generation uint32        // goes with every delivered frame
	Local      *Local        // the interface, for Ruleset.Local. Optional: if nil, every frame is to this host
	Entries    map[int]Entry // by ruleset number, 0..MaxRulesets-1
}

// Slots returns the ruleset numbers in use, lowest first.
func (t *Table) Slots() []int { return slices.Sorted(maps.Keys(t.Entries)) }

// Validate returns an error wrapping ErrTable, and the error of the entry at fault.
func (t *Table) Validate() error {
	// This comes first, because with too many rulesets some number is out of range
	// too, and that would be the less helpful error.
	if n := len(t.Entries); n > MaxRulesets {
		return fmt.Errorf("%w: %d rulesets: want at most %d", ErrTable, n, MaxRulesets)
	}
	if t.Local != nil && len(t.Local.Addrs) > MaxLocal {
		return fmt.Errorf("%w: the interface has %d addresses: want at most %d", ErrTable, len(t.Local.Addrs), MaxLocal)
	}
	for _, slot := range t.Slots() {
		e := t.Entries[slot]
		if slot < 0 || slot >= MaxRulesets {
			return fmt.Errorf("%w: ruleset %s has number %d, want 0 to %d", ErrTable, e.Name, slot, MaxRulesets-1)
		}
		if err := e.Ruleset.Validate(); err != nil {
			return fmt.Errorf("%w: ruleset number %d: %w", ErrTable, slot, err)
		}
		if e.Context >= MaxContexts {
			return fmt.Errorf("%w: ruleset %s (number %d) has context %d, want 0 to %d", ErrTable, e.Name, slot, e.Context, MaxContexts-1)
		}
		if e.Format == nil {
			return fmt.Errorf("%w: ruleset %s (number %d) has no message format: the predefined ones are %v", ErrTable, e.Name, slot, FormatNames())
		}
		if err := e.Format.Validate(); err != nil {
			return fmt.Errorf("%w: ruleset %s (number %d): %w", ErrTable, e.Name, slot, err)
		}
	}
	return nil
}

// Action is what becomes of a frame.
type Action uint8

const (
	Pass      Action = iota // no ruleset matches: to the Linux stack
	Malformed               // matched, but not what its format says: counted, to the Linux stack
	Deliver                 // to the context
)

// String returns "pass", "malformed" or "deliver".
func (a Action) String() string {
	switch a {
	case Pass:
		return "pass"
	case Malformed:
		return "malformed"
	case Deliver:
		return "deliver"
	}
	return fmt.Sprintf("action %d", uint8(a))
}

// Verdict is what the table decides about one frame. Verdicts compare with ==:
// fields that mean nothing for the action are zero.
type Verdict struct {
	Action  Action
	Ruleset int            // number of the ruleset; 0 for Pass
	Context uint16         // 0 for Pass
	EOM     bool           // Deliver only, as are the following
	Key     [MaxKey]uint32 // key words under their masks, unshifted
	NKey    int            // how many of them the format has
	Offset  uint32         // byte offset of the payload in its message
}

// Match decides about one frame by trying one ruleset after the other. It is
// the reference that the index and the XDP program are tested against. The
// table must be valid.
func (t *Table) Match(frame []byte) Verdict {
	for _, slot := range t.Slots() {
		if e := t.Entries[slot]; e.Ruleset.Match(frame) && (!e.Local || t.Local.Has(frame)) {
			return e.verdict(slot, frame)
		}
	}
	return Verdict{}
}

// verdict reads a frame that the entry's ruleset matches.
func (e *Entry) verdict(slot int, frame []byte) Verdict {
	v := Verdict{Action: Deliver, Ruleset: slot, Context: e.Context}
	if !e.Format.read(frame, &v) {
		return Verdict{Action: Malformed, Ruleset: slot, Context: e.Context}
	}
	eom := e.Ruleset.EOM
	if eom == nil {
		eom = e.Format.EOM
	}
	v.EOM = eom != nil && eom.Match(frame)
	return v
}
