// SPDX-License-Identifier: Apache-2.0

package matcher_test

import (
	"math/rand/v2"
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
