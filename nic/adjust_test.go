// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"fmt"
	"math"
	"testing"
)

// Contexts that all have a queue get of the time what their credit, their handlers and
// their places in the workers' turns make of it. Whatever the turns are, adjust finds the
// credits with which they get what their weights say.
func TestAdjustGivesWhatWeightsSay(t *testing.T) {
	for _, tc := range []struct {
		shares []int
		turns  []float64 // by how much the turns prefer them
	}{
		{[]int{1, 1}, []float64{1, 1}},
		{[]int{1, 1}, []float64{1, 20}},
		{[]int{3, 1}, []float64{1, 1}},
		{[]int{3, 1}, []float64{1, 8}},
		{[]int{1, 2, 5}, []float64{4, 1, 0.5}},
	} {
		t.Run(fmt.Sprint(tc.shares, tc.turns), func(t *testing.T) {
			group := make([]rival, len(tc.shares))
			for i, share := range tc.shares {
				group[i].c = &Context{spec: ContextSpec{Share: share}, load: load{bias: 1, queued: 1}}
			}
			work := func() {
				sum := 0.0
				for i, r := range group { // credits are such that this is by weight
					r.c.load.use = tc.turns[i] * float64(r.c.spec.Share) / r.c.load.bias
					sum += r.c.load.use
				}
				for _, r := range group {
					r.c.load.use /= sum
				}
			}
			total := 0
			for _, share := range tc.shares {
				total += share
			}
			for range 30 {
				work()
				adjust(group)
			}
			work()
			for i, r := range group {
				if want := float64(tc.shares[i]) / float64(total); math.Abs(r.c.load.use-want) > 0.01 {
					t.Errorf("context %d gets %.3f of the time, want %.3f; bias %.2f", i, r.c.load.use, want, r.c.load.bias)
				}
				if b := r.c.load.bias; b < 1 || b > maxBias {
					t.Errorf("context %d has bias %g", i, b)
				}
			}
		})
	}

	// Who has no queue takes what it wants, and is nobody's measure.
	group := []rival{
		{c: &Context{spec: ContextSpec{Share: 1}, load: load{bias: 1, queued: 1, use: 0.9}}},
		{c: &Context{spec: ContextSpec{Share: 1}, load: load{bias: 1, queued: 0.1, use: 0.1}}},
	}
	adjust(group)
	for i, r := range group {
		if r.c.load.bias != 1 {
			t.Errorf("context %d of one with a queue and one without has bias %g", i, r.c.load.bias)
		}
	}
}
