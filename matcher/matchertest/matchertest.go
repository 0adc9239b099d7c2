// SPDX-License-Identifier: Apache-2.0

// Package matchertest makes random tables, and frames that come close to
// matching them, for tests that compare one matching engine with another.
package matchertest

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"

	"github.com/xspin/xspin/matcher"
)

// MaxFrame is the length of the longest frame that Frame makes. It extends beyond
// the last word that a rule can name.
const MaxFrame = 600

// Table returns a valid table: And and Or rulesets, equalities and ranges, odd
// masks, masks of 0, words that rulesets share or not, with and without EOM rules, all
// predefined formats and random ones, with and without an interface's addresses. Most
// tables are small, some are full.
func Table(rnd *rand.Rand) *matcher.Table {
	t := &matcher.Table{Generation: rnd.Uint32(), Local: local(rnd), Entries: map[int]matcher.Entry{}}
	n := rnd.IntN(12)
	switch rnd.IntN(16) {
	case 0:
		n = 60 + rnd.IntN(80) // around the edges of a vector's words
	case 1:
		n = matcher.MaxRulesets - rnd.IntN(3)
	}
	// Few words and masks per table, so that rulesets share fields and frames
	// have a chance to satisfy several rules at once.
	words := make([]matcher.Field, 1+rnd.IntN(6))
	for i := range words {
		words[i] = field(rnd)
	}
	for _, slot := range rnd.Perm(matcher.MaxRulesets)[:n] {
		e := matcher.Entry{
			Ruleset: matcher.Ruleset{Name: fmt.Sprintf("r%d", slot), Mode: matcher.Mode(rnd.IntN(2)), Local: rnd.IntN(2) == 0},
			Context: uint16(rnd.IntN(matcher.MaxContexts)),
			Format:  format(rnd),
		}
		for range rnd.IntN(matcher.MaxRules + 1) {
			e.Rules = append(e.Rules, rule(rnd, words))
		}
		if rnd.IntN(2) == 0 {
			eom := rule(rnd, words)
			e.EOM = &eom
		}
		t.Entries[slot] = e
	}
	return t
}

// Frame returns a frame of 14 to MaxFrame bytes. Usually it satisfies the rules
// of some ruleset of the table, or nearly: one bit is wrong, or bytes are missing
// at the end.
func Frame(rnd *rand.Rand, t *matcher.Table) []byte {
	buf := make([]byte, MaxFrame)
	for i := range buf {
		buf[i] = byte(rnd.Uint32())
	}
	n := 14 + rnd.IntN(MaxFrame-14+1)
	if rnd.IntN(2) == 0 {
		n = 14 + rnd.IntN(60)
	}
	if slots := t.Slots(); len(slots) > 0 && rnd.IntN(8) != 0 {
		e := t.Entries[slots[rnd.IntN(len(slots))]]
		after := rnd.IntN(2) == 0
		if !after {
			address(rnd, buf, t.Local)
		}
		for _, r := range e.Rules {
			Satisfy(rnd, buf, r)
			if rnd.IntN(4) == 0 { // end at the rule, or one byte before it
				n = r.Need() - rnd.IntN(2)
			}
		}
		if e.EOM != nil && rnd.IntN(2) == 0 {
			Satisfy(rnd, buf, *e.EOM)
		}
		if after {
			address(rnd, buf, t.Local)
		}
		switch rnd.IntN(8) {
		case 0, 1:
			n = e.Format.Need() - rnd.IntN(2)
		case 2:
			buf[rnd.IntN(64)] ^= 1 << rnd.IntN(8)
		}
		n = min(max(n, 14), MaxFrame)
		if l := e.Format.Length; l != nil && rnd.IntN(3) != 0 {
			claim(buf, *l, n-rnd.IntN(4)+rnd.IntN(2))
		}
	}
	return buf[:min(max(n, 14), MaxFrame)]
}

// local makes an interface, nil for a table without one.
func local(rnd *rand.Rand) *matcher.Local {
	if rnd.IntN(2) == 0 {
		return nil
	}
	l := &matcher.Local{}
	for i := range l.MAC {
		l.MAC[i] = byte(rnd.Uint32())
	}
	n := rnd.IntN(4)
	if rnd.IntN(16) == 0 {
		n = matcher.MaxLocal
	}
	for range n {
		var b [16]byte
		for i := range b {
			b[i] = byte(rnd.Uint32())
		}
		a := netip.AddrFrom16(b)
		if rnd.IntN(2) == 0 {
			a = netip.AddrFrom4([4]byte(b[:]))
		}
		l.Addrs = append(l.Addrs, a)
	}
	return l
}

// address addresses a frame to the interface, sometimes with one bit of the MAC or of
// the IP address wrong.
func address(rnd *rand.Rand, frame []byte, l *matcher.Local) {
	if l == nil {
		return
	}
	copy(frame, l.MAC[:])
	near := rnd.IntN(8)
	if near == 0 {
		frame[rnd.IntN(6)] ^= 1 << rnd.IntN(8)
	}
	if len(l.Addrs) == 0 {
		return
	}
	a := l.Addrs[rnd.IntN(len(l.Addrs))]
	ip := frame[38:54]
	binary.BigEndian.PutUint16(frame[12:], 0x86dd)
	if a.Is4() {
		ip = frame[30:34]
		binary.BigEndian.PutUint16(frame[12:], 0x0800)
	}
	copy(ip, a.AsSlice())
	if near == 1 {
		ip[rnd.IntN(len(ip))] ^= 1 << rnd.IntN(8)
	}
}

// Satisfy sets the bits under the rule's mask so that the rule holds. The rule
// must be valid; False stays false.
func Satisfy(rnd *rand.Rand, frame []byte, r matcher.Rule) {
	if r.Mask == 0 {
		return
	}
	v := r.Start
	switch rnd.IntN(4) {
	case 0:
		v = r.End
	case 1:
		if span := uint64(r.End) - uint64(r.Start) + 1; span > 1 {
			v += uint32(rnd.Uint64N(span))
		}
	}
	w := frame[4*r.Index:][:4]
	old := binary.BigEndian.Uint32(w)
	binary.BigEndian.PutUint32(w, old&^r.Mask|v&r.Mask)
}

// claim writes a length that says that the payload ends at byte end.
func claim(frame []byte, l matcher.Length, end int) {
	w := frame[4*l.Index:][:4]
	old := binary.BigEndian.Uint32(w)
	v := uint32(max(end-l.From, 0)) * (l.Mask & -l.Mask)
	binary.BigEndian.PutUint32(w, old&^l.Mask|v&l.Mask)
}

func rule(rnd *rand.Rand, words []matcher.Field) matcher.Rule {
	switch rnd.IntN(24) {
	case 0:
		return matcher.False
	case 1:
		return matcher.Empty
	}
	f := words[rnd.IntN(len(words))]
	if rnd.IntN(6) == 0 {
		f = field(rnd)
	}
	for {
		a, b := rnd.Uint32()&f.Mask, rnd.Uint32()&f.Mask
		switch rnd.IntN(6) {
		case 0, 1:
			b = a
		case 2: // few values, so that rulesets overlap
			a &= 0x01010101
			b = a
		case 3:
			a = 0
		case 4:
			b |= rnd.Uint32() // a bound need not lie under the mask
		}
		if a > b {
			a, b = b, a
		}
		r := matcher.Rule{Index: f.Index, Mask: f.Mask, Start: a, End: b}
		if r.Validate() == nil {
			return r
		}
	}
}

func field(rnd *rand.Rand) matcher.Field {
	f := matcher.Field{Index: rnd.IntN(16), Mask: 0xffffffff}
	if rnd.IntN(5) == 0 {
		f.Index = rnd.IntN(matcher.MaxIndex + 1)
	}
	switch rnd.IntN(6) {
	case 0:
		f.Mask = 0xffff << (16 * rnd.UintN(2))
	case 1:
		f.Mask = 0xff << (8 * rnd.UintN(4))
	case 2:
		f.Mask = 1 << rnd.UintN(32)
	case 3:
		f.Mask = rnd.Uint32() | 1<<rnd.UintN(32)
	}
	return f
}

func format(rnd *rand.Rand) *matcher.Format {
	if names := matcher.FormatNames(); rnd.IntN(2) == 0 {
		return matcher.FormatByName(names[rnd.IntN(len(names))])
	}
	f := &matcher.Format{Name: "random", Header: rnd.IntN(64), UserHeader: rnd.IntN(16)}
	for range rnd.IntN(matcher.MaxKey + 1) {
		f.Key = append(f.Key, field(rnd))
	}
	if rnd.IntN(2) == 0 {
		o := field(rnd)
		f.Offset = &o
	}
	if rnd.IntN(2) == 0 {
		f.Length = &matcher.Length{Field: matcher.Field{Index: rnd.IntN(16), Mask: 0xffff << (16 * rnd.UintN(2))}, From: rnd.IntN(40)}
	}
	if rnd.IntN(2) == 0 {
		r := rule(rnd, []matcher.Field{field(rnd)})
		f.EOM = &r
	}
	return f
}
