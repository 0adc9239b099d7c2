// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/matcher/matchertest"
	"github.com/xspin/xspin/netns/netnstest"
)

// retable gives a tester another table, at a tenth of the price of a new one.
func (t *Tester) retable(tb testing.TB, ref *matcher.Table) {
	tb.Helper()
	table := &Table{Generation: ref.Generation, Rulesets: map[int]Binding{}, Contexts: map[uint16]Context{}}
	for slot, e := range ref.Entries {
		table.Rulesets[slot] = Binding{Ruleset: e.Ruleset, Context: e.Context}
		table.Contexts[e.Context] = Context{ID: e.Context, Format: e.Format, Policy: ByPacket, CoreMask: 1}
	}
	if err := t.in.Publish(table); err != nil {
		tb.Fatal(err)
	}
}

// The in-kernel program and the Go reference give the same verdict, metadata
// and bytes for random tables and frames that come close to matching.
func TestProgramAgreesWithReference(t *testing.T) {
	netnstest.NeedRoot(t)
	const tables, frames = 1000, 210
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 2))
	tester, err := NewTester(&matcher.Table{})
	if err != nil {
		t.Fatal(err)
	}
	defer tester.Close()
	var count [3]int
	eom := 0
	for range tables {
		ref := matchertest.Table(rnd)
		for slot, e := range ref.Entries {
			e.Context = uint16(slot) // the generator's contexts have several formats
			ref.Entries[slot] = e
		}
		tester.retable(t, ref)
		for range frames {
			frame := matchertest.Frame(rnd, ref)
			want := ref.Match(frame)
			got, out, err := tester.run(frame)
			if err != nil {
				t.Fatal(err)
			}
			if got != want {
				t.Fatalf("seed %d: frame % x\ntable %+v\nprogram   %+v\nreference %+v", seed, frame, ref, got, want)
			}
			count[want.Action]++
			if want.EOM {
				eom++
			}
			if want.Action == matcher.Deliver {
				meta := (*bpf.Meta)(unsafe.Pointer(&out[0]))
				if meta.Generation != ref.Generation {
					t.Fatalf("generation %d, want %d", meta.Generation, ref.Generation)
				}
				out = out[bpf.MetaSize:]
			}
			if !bytes.Equal(out, frame) {
				t.Fatalf("seed %d: the frame was changed", seed)
			}
		}
	}
	t.Logf("%d pairs: %d pass, %d malformed, %d deliver (%d EOM)", tables*frames, count[0], count[1], count[2], eom)
	for a, n := range count {
		if n < tables*frames/100 {
			t.Errorf("only %d of the frames are %v: the generator has drifted", n, matcher.Action(a))
		}
	}
}
