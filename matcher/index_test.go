// SPDX-License-Identifier: Apache-2.0

package matcher_test

import (
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/matcher/matchertest"
)

func TestTheIndexAgreesWithTheReference(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	actions := map[matcher.Action]int{}
	early := 0
	for range 1000 {
		tab := matchertest.Table(rnd)
		x, err := matcher.Compile(tab)
		if err != nil {
			t.Fatal(err)
		}
		for range 200 {
			frame := matchertest.Frame(rnd, tab)
			want := tab.Match(frame)
			slot, ok := x.Lookup(frame)
			if ok != (want.Action != matcher.Pass) || slot != want.Ruleset {
				t.Fatalf("index says %d %v, reference %+v\ntable %+v\nframe %x", slot, ok, want, tab, frame)
			}
			actions[want.Action]++
			if want.EOM {
				early++
			}
		}
	}
	// The comparison is worth something only if every verdict is common.
	for _, a := range []matcher.Action{matcher.Pass, matcher.Malformed, matcher.Deliver} {
		if actions[a] < 10000 {
			t.Errorf("only %d of 200000 verdicts are %s", actions[a], a)
		}
	}
	if early < 10000 || early > actions[matcher.Deliver]-10000 {
		t.Errorf("%d of %d delivered frames end their message", early, actions[matcher.Deliver])
	}
	t.Log(actions, early)
}

func table(t *testing.T, lines ...string) *matcher.Table {
	t.Helper()
	tab := &matcher.Table{Entries: map[int]matcher.Entry{}}
	for i, line := range lines {
		rs, err := matcher.ParseRuleset(line)
		if err != nil {
			t.Fatal(err)
		}
		tab.Entries[10*i] = matcher.Entry{Ruleset: rs, Format: matcher.FormatByName("packet")}
	}
	return tab
}

func compile(t *testing.T, tab *matcher.Table) *matcher.Index {
	t.Helper()
	x, err := matcher.Compile(tab)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func TestTheLayoutOfAnIndex(t *testing.T) {
	got := compile(t, table(t,
		"a: 3&0xffff0000=0x08000000 && 5&0xff=17",
		"b: 3&0xffff0000=0x08000000:0x08060000",
		"c: 9=5:0xfffffffe || 9=0",
		"d: 3=1 && false", // never, so word 3 is not a field
		"e: 3=2 || true",  // always
		"f: none",
		"g: all",
	))
	want := &matcher.Index{
		Fields: []matcher.IndexField{
			{Index: 9, Need: 40, Mask: 0xffffffff, First: 0, N: 4},
			{Index: 3, Need: 14, Mask: 0xffff0000, First: 4, N: 4},
			{Index: 5, Need: 24, Mask: 0xff, First: 8, N: 3},
		},
		LastOr: 1,
		Bounds: []uint32{0, 1, 5, 0xffffffff, 0, 0x08000000, 0x08000001, 0x08060001, 0, 17, 18},
		// Bits: a 1, b 2, c 4, g 64.
		Vec:    []uint64{71, 67, 71, 67, 64, 67, 66, 64, 66, 67, 66},
		Absent: []uint64{67, 64, 66},
		Users:  []uint64{4, 3, 1},
		Words:  1,
		Cand:   [4]uint64{67},
		Hit:    [4]uint64{16},
		Or:     [4]uint64{4 + 16 + 32},
		Slots:  []int{0, 10, 20, 30, 40, 50, 60},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%+v\nwant\n%+v", got, want)
	}
}

func TestFieldsThatManyRulesetsShareComeFirst(t *testing.T) {
	x := compile(t, table(t,
		"a: 9=1 && 7=1 && 7=1:9 && 7=0:9", // three rules on word 7 are one ruleset
		"b: 9=2 && 5=1",
		"c: 9=3 && 5=2",
		"d: 4=3 && 9=3",
		"e: 8=1 || 6=1",
	))
	var order []int
	for _, f := range x.Fields {
		order = append(order, f.Index)
	}
	if want := []int{6, 8, 9, 5, 4, 7}; !slices.Equal(order, want) || x.LastOr != 2 {
		t.Errorf("order is %v, want %v, LastOr %d", order, want, x.LastOr)
	}
}

func TestEqualIntervalsAreOne(t *testing.T) {
	x := compile(t, table(t, "a: 9=1 || 9=2 || 9=3:7 || 9=5:6"))
	if f := x.Fields[0]; f.N != 3 || !slices.Equal(x.Bounds, []uint32{0, 1, 8}) {
		t.Errorf("bounds are %v", x.Bounds)
	}
}

// The worst tables there are: every rule cuts as often as it can.
func TestFullTablesFit(t *testing.T) {
	for _, tt := range []struct {
		name              string
		rule              func(i int) matcher.Rule
		fields, intervals int
	}{
		{"all rules on one field", func(i int) matcher.Rule {
			return matcher.Rule{5, 0xffffffff, uint32(10*i + 5), uint32(10*i + 6)}
		}, 1, 2*matcher.MaxTableRules + 1},
		{"each rule on a field of its own", func(i int) matcher.Rule {
			return matcher.Rule{i % 128, 0xffff0000 | uint32(i/128), 0x10000, 0x20000}
		}, matcher.MaxTableRules, 3 * matcher.MaxTableRules},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tab := &matcher.Table{Entries: map[int]matcher.Entry{}}
			for slot := range matcher.MaxRulesets {
				rs := matcher.Ruleset{Name: "x", Mode: matcher.Or}
				for i := range matcher.MaxRules {
					rs.Rules = append(rs.Rules, tt.rule(slot*matcher.MaxRules+i))
				}
				tab.Entries[slot] = matcher.Entry{Ruleset: rs, Format: matcher.FormatByName("packet")}
			}
			x := compile(t, tab)
			if len(x.Fields) != tt.fields || len(x.Bounds) != tt.intervals || x.Words != matcher.MaxWords {
				t.Errorf("%d fields, %d intervals of %d words", len(x.Fields), len(x.Bounds), x.Words)
			}
			if len(x.Fields) > matcher.MaxFields || len(x.Bounds) > matcher.MaxIntervals {
				t.Error("that is more than fits")
			}
			if len(x.Vec) != len(x.Bounds)*x.Words || len(x.Absent) != len(x.Fields)*x.Words {
				t.Errorf("%d and %d words of vectors", len(x.Vec), len(x.Absent))
			}
		})
	}
}

func TestAnEmptyTableMatchesNothing(t *testing.T) {
	x := compile(t, &matcher.Table{})
	if _, ok := x.Lookup(make([]byte, 60)); ok || x.Words != 1 {
		t.Errorf("index is %+v", x)
	}
}

func TestLookupDoesNotAllocate(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	tab := matchertest.Table(rnd)
	for len(tab.Entries) < 50 {
		tab = matchertest.Table(rnd)
	}
	x, frame := compile(t, tab), matchertest.Frame(rnd, tab)
	if n := testing.AllocsPerRun(100, func() { x.Lookup(frame) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
