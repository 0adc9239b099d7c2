// SPDX-License-Identifier: Apache-2.0

// Package matcher decides which frames belong to which execution context.
//
// A [Rule] compares one masked 32-bit word of a frame with a range, a [Ruleset]
// combines up to [MaxRules] of them with AND or OR, and a [Format] says where a
// matching frame carries the key of its message, its offset and its end. A
// [Table] binds numbered rulesets to contexts. [Table.Match] is the reference:
// slow, and meant to be obviously right. [Compile] turns a table into the
// [Index] that the XDP program walks.
//
// Words are counted from the first byte of the frame, Ethernet header included,
// read big-endian and compared as numbers. FPsPIN's hardware compares
// byte-swapped numbers, so the two agree on equality and on ranges within the
// lowest byte, and differ on other ranges. Here 0x1000:0x2000 means what it says.
//
// The values of this package are plain data. Reading them from several
// goroutines is safe, changing them while others read is not.
package matcher

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
)

// The limits of a table. The XDP program's maps are sized by the same numbers.
const (
	MaxRulesets   = 256 // rulesets in a table
	MaxRules      = 8   // rules in a ruleset, not counting its EOM rule
	MaxIndex      = 127 // highest word a rule may name: the first 512 bytes
	MaxKey        = 8   // words in a message key
	MaxContexts   = 256 // context ids are 0..MaxContexts-1
	MaxName       = 63  // bytes in the name of a ruleset or a format
	MaxLocal      = 256 // addresses of an interface that Ruleset.Local goes by
	MaxTableRules = MaxRulesets * MaxRules
)

var (
	// ErrRule is wrapped by every error about a single rule.
	ErrRule = errors.New("invalid rule")
	// ErrRuleset is wrapped by every error about a ruleset.
	ErrRuleset = errors.New("invalid ruleset")
	// ErrFormat is wrapped by every error about a message format.
	ErrFormat = errors.New("invalid message format")
	// ErrTable is wrapped by every error about a table.
	ErrTable = errors.New("invalid table")
)

// Rule holds for a frame when Start <= word[Index] & Mask <= End.
//
// Every byte the mask selects must be present, or the rule does not hold. A
// rule with Mask 0 reads nothing and compares 0.
type Rule struct {
	Index      int    // 32-bit word, counted from frame byte 0; 0..MaxIndex
	Mask       uint32 // applied to the word before it is compared
	Start, End uint32 // inclusive bounds
}

// False never holds and Empty always does. Both read no byte of the frame.
var (
	False = Rule{Index: 0, Mask: 0, Start: 1, End: 0}
	Empty = Rule{Index: 0, Mask: 0, Start: 0, End: 0}
)

// Need returns the number of bytes a frame must have for the rule to be
// compared at all, 0 for a rule with Mask 0.
func (r Rule) Need() int { return need(r.Index, r.Mask) }

// Match reports whether the rule holds for the frame.
func (r Rule) Match(frame []byte) bool {
	v, ok := masked(frame, r.Index, r.Mask)
	return ok && r.Start <= v && v <= r.End
}

// Validate returns an error, wrapping ErrRule, for a rule that reads outside
// the first MaxIndex+1 words, and for one that no frame can satisfy: that is a
// mistake, unless the rule is False.
func (r Rule) Validate() error {
	if _, msg := r.fault(); msg != "" {
		return fmt.Errorf("%w: %s", ErrRule, msg)
	}
	return nil
}

// part names the piece of a rule's text that an error is about.
type part int

const (
	partIndex part = iota
	partStart
)

// fault returns what is wrong with a rule, and with which piece of it, or "".
func (r Rule) fault() (part, string) {
	switch {
	case r == False:
		return 0, ""
	case r.Index < 0 || r.Index > MaxIndex:
		return partIndex, fmt.Sprintf("word %d is out of range: rules reach words 0 to %d, the first %d bytes of the frame",
			r.Index, MaxIndex, 4*(MaxIndex+1))
	case r.Start > r.End:
		return partStart, fmt.Sprintf("start 0x%08x is greater than end 0x%08x", r.Start, r.End)
	}
	if v, ok := nextUnderMask(r.Start, r.Mask); ok && v <= r.End {
		return 0, ""
	}
	if r.Start == r.End {
		return partStart, fmt.Sprintf("value 0x%08x has bits 0x%08x outside mask 0x%08x, so it can never be equal",
			r.Start, r.Start&^r.Mask, r.Mask)
	}
	return partStart, fmt.Sprintf("no word under mask 0x%08x lies in 0x%08x:0x%08x, so it can never match",
		r.Mask, r.Start, r.End)
}

// nextUnderMask returns the lowest v >= start that has no bit outside mask.
func nextUnderMask(start, mask uint32) (v uint32, ok bool) {
	out := start &^ mask
	if out == 0 {
		return start, true
	}
	// Below the highest stray bit everything is free: keep what is above it,
	// and count one up within the mask.
	below := uint32(1)<<bits.Len32(out) - 1
	v = (start | ^mask | below) + 1
	return v & mask, v != 0
}

// need returns how many bytes of a frame a mask on a word reaches.
func need(index int, mask uint32) int {
	if mask == 0 {
		return 0
	}
	return 4*index + 4 - bits.TrailingZeros32(mask)/8
}

// masked returns the word under the mask, and whether the frame has every byte
// that the mask selects.
func masked(frame []byte, index int, mask uint32) (uint32, bool) {
	if mask == 0 {
		return 0, true
	}
	if len(frame) < need(index, mask) {
		return 0, false
	}
	var w [4]byte // zero beyond the end of the frame, where the mask is zero too
	copy(w[:], frame[4*index:])
	return binary.BigEndian.Uint32(w[:]) & mask, true
}

// Mode says how the rules of a ruleset are combined.
type Mode uint8

const (
	And Mode = iota // all rules must hold
	Or              // at least one rule must hold
)

// String returns "and" or "or".
func (m Mode) String() string {
	switch m {
	case And:
		return "and"
	case Or:
		return "or"
	}
	return fmt.Sprintf("mode %d", uint8(m))
}

// Ruleset selects frames. FPsPIN has three match rules and always an EOM rule;
// here there are up to MaxRules, and the EOM rule is optional. FPsPIN's library
// never programs the mode register, so its OR cannot be used.
type Ruleset struct {
	Name   string
	Mode   Mode
	Rules  []Rule // at most MaxRules. Without rules, And matches everything and Or nothing
	Local  bool   // only frames to this host, see the type Local. True for most predefined rulesets
	EOM    *Rule  // holds for the last packet of a message. Optional: nil leaves it to the message format
	Format string // predefined message format this ruleset is written for. Optional
}

// Match reports whether the frame satisfies the rules. It ignores EOM, and Local,
// which [Table.Match] checks because the table has the addresses.
func (rs *Ruleset) Match(frame []byte) bool {
	for _, r := range rs.Rules {
		if r.Match(frame) != (rs.Mode == And) {
			return rs.Mode == Or
		}
	}
	return rs.Mode == And
}

// Validate returns an error wrapping ErrRuleset, and ErrRule where a rule is at
// fault.
func (rs *Ruleset) Validate() error {
	if msg := badName(rs.Name); msg != "" {
		return fmt.Errorf("%w: %s", ErrRuleset, msg)
	}
	if rs.Mode > Or {
		return fmt.Errorf("%w %s: %s is neither And nor Or", ErrRuleset, rs.Name, rs.Mode)
	}
	if n := len(rs.Rules); n > MaxRules {
		return fmt.Errorf("%w %s: %d rules: want at most %d", ErrRuleset, rs.Name, n, MaxRules)
	}
	for i, r := range rs.Rules {
		if err := r.Validate(); err != nil {
			return fmt.Errorf("%w %s: rule %d: %w", ErrRuleset, rs.Name, i, err)
		}
	}
	if rs.EOM != nil {
		if err := rs.EOM.Validate(); err != nil {
			return fmt.Errorf("%w %s: EOM rule: %w", ErrRuleset, rs.Name, err)
		}
	}
	if rs.Format != "" && FormatByName(rs.Format) == nil {
		return fmt.Errorf("%w %s: %s", ErrRuleset, rs.Name, unknownFormat(rs.Format))
	}
	return nil
}

// badName returns what is wrong with the name of a ruleset or format, or "".
func badName(s string) string {
	if s == "" {
		return "the name is missing"
	}
	if len(s) > MaxName {
		return fmt.Sprintf("the name is %d bytes long: want at most %d", len(s), MaxName)
	}
	for i := range len(s) {
		if !nameByte(s[i]) {
			return fmt.Sprintf("name %q: want only letters, digits and _ . -", s)
		}
	}
	return ""
}

func nameByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '.' || c == '-'
}
