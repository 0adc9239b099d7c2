// SPDX-License-Identifier: Apache-2.0

package quantile

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

func TestAt(t *testing.T) {
	for _, tc := range []struct {
		name   string
		sorted []float64
		p      float64
		want   float64
	}{
		{"one sample is every quantile", []float64{7}, 0.99, 7},
		{"median of an odd number is the middle one", []float64{1, 2, 9}, 0.5, 2},
		{"median of an even number is halfway between the middle two", []float64{1, 2, 4, 9}, 0.5, 3},
		{"quantile 0 is the minimum", []float64{1, 2, 4, 9}, 0, 1},
		{"quantile 1 is the maximum", []float64{1, 2, 4, 9}, 1, 9},
		{"quantiles between samples interpolate as NumPy does", []float64{1, 2, 4, 9}, 0.95, 8.25},
		{"the quarter of five samples is the second", []float64{10, 20, 30, 40, 50}, 0.25, 20},
		{"no samples have no quantile", nil, 0.5, math.NaN()},
		{"a quantile below 0 does not exist", []float64{1}, -0.1, math.NaN()},
		{"a quantile above 1 does not exist", []float64{1}, 1.1, math.NaN()},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := At(tc.sorted, tc.p)
			if math.Abs(got-tc.want) > 1e-12 || math.IsNaN(got) != math.IsNaN(tc.want) {
				t.Errorf("At(%v, %g) = %g, want %g", tc.sorted, tc.p, got, tc.want)
			}
		})
	}
}

func TestSummarizeLeavesItsArgumentAlone(t *testing.T) {
	x := []float64{9, 1, 4, 2}
	s := Summarize(x)
	if !slices.Equal(x, []float64{9, 1, 4, 2}) {
		t.Errorf("samples are now %v", x)
	}
	if s.N != 4 || s.Min != 1 || s.P50 != 3 || math.Abs(s.P95-8.25) > 1e-12 || math.Abs(s.P99-8.85) > 1e-12 {
		t.Errorf("Summarize(%v) = %+v", x, s)
	}
	if s.CI95[0] > s.P50 || s.CI95[1] < s.P50 {
		t.Errorf("median %g outside its own interval %v", s.P50, s.CI95)
	}
	if zero := Summarize(nil); zero != (Summary{}) {
		t.Errorf("Summarize(nil) = %+v, want the zero Summary", zero)
	}
}

// The textbook bootstrap, drawing n samples per replicate, is the reference for
// the order statistics that MedianCI draws instead.
func TestMedianCIAgreesWithTheTextbookBootstrap(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{1, 2, 3, 4, 9, 10, 101, 200} {
		x := make([]float64, n)
		for i := range x {
			x[i] = math.Exp(rnd.NormFloat64())
		}
		slices.Sort(x)

		re := make([]float64, n)
		medians := make([]float64, 20000)
		for i := range medians {
			for j := range re {
				re[j] = x[rnd.IntN(n)]
			}
			slices.Sort(re)
			medians[i] = At(re, 0.5)
		}
		slices.Sort(medians)

		// An end of the interval estimated from 2000 replicates is itself off by
		// up to one percentage point, so it has to lie between the reference's
		// quantiles that far to either side.
		got := MedianCI(x)
		for end, p := range []float64{0.025, 0.975} {
			lo, hi := At(medians, max(p-0.012, 0)), At(medians, min(p+0.012, 1))
			if got[end] < lo || got[end] > hi {
				t.Errorf("n=%d: end %d is %g, textbook says %g to %g", n, end, got[end], lo, hi)
			}
		}
	}
}

func TestMedianCICoversTheTrueMedian(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	const trials, n = 400, 60
	covered := 0
	for range trials {
		x := make([]float64, n)
		for i := range x {
			x[i] = rnd.NormFloat64()
		}
		slices.Sort(x)
		if ci := MedianCI(x); ci[0] <= 0 && 0 <= ci[1] {
			covered++
		}
	}
	if share := float64(covered) / trials; share < 0.91 || share > 0.99 {
		t.Errorf("95 %% intervals cover the median in %.1f %% of trials", 100*share)
	}
}

func TestIntervalsAreReproducible(t *testing.T) {
	x := []float64{1, 2, 3, 5, 8, 13, 21}
	if a, b := MedianCI(x), MedianCI(x); a != b {
		t.Errorf("two intervals of the same samples: %v and %v", a, b)
	}
	if ci := MedianCI(nil); !math.IsNaN(ci[0]) || !math.IsNaN(ci[1]) {
		t.Errorf("MedianCI(nil) = %v", ci)
	}
}

func TestRatioCI(t *testing.T) {
	ramp := []float64{10, 20, 30, 40, 50, 60, 70, 80, 90}
	half := make([]float64, len(ramp))
	for i := range ramp {
		half[i] = ramp[i] / 2
	}
	for _, tc := range []struct {
		name  string
		a, b  []float64
		ratio float64
		ci    *Interval // nil: only that it holds the ratio and is not a point
		bad   bool
	}{
		{"a constant ratio has a point for an interval, whatever its runs drift", half, ramp, 0.5, &Interval{0.5, 0.5}, false},
		{"equal runs have the ratio one", ramp, ramp, 1, &Interval{1, 1}, false},
		{"noise widens the interval", []float64{9, 10, 11, 12, 10}, []float64{20, 19, 22, 20, 21}, 0.5, nil, false},
		{"a run without partner is refused", ramp, ramp[1:], 0, nil, true},
		{"no runs are refused", nil, nil, 0, nil, true},
		{"a zero run is refused", []float64{1, 0}, []float64{1, 1}, 0, nil, true},
		{"a zero divisor is refused", []float64{1, 1}, []float64{1, 0}, 0, nil, true},
		{"a run that is no number is refused", []float64{math.NaN()}, []float64{1}, 0, nil, true},
		{"an infinite run is refused", []float64{1}, []float64{math.Inf(1)}, 0, nil, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ratio, ci, err := RatioCI(tc.a, tc.b)
			if tc.bad {
				if !errors.Is(err, ErrSamples) {
					t.Fatalf("error %v, want ErrSamples", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if math.Abs(ratio-tc.ratio) > 1e-12 {
				t.Errorf("ratio %g, want %g", ratio, tc.ratio)
			}
			if tc.ci != nil && ci != *tc.ci {
				t.Errorf("interval %v, want %v", ci, *tc.ci)
			}
			if tc.ci == nil && !(ci[0] <= ratio && ratio <= ci[1] && ci[0] < ci[1]) {
				t.Errorf("interval %v of ratio %g", ci, ratio)
			}
		})
	}
}
