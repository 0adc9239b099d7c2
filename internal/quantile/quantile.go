// SPDX-License-Identifier: Apache-2.0

// Package quantile turns samples of a noisy quantity into the figures that the
// demos and benches print: quantiles, and intervals for a median and for a
// ratio of medians by the percentile bootstrap.
//
// The bootstrap is seeded with a constant, so the same samples always give the
// same interval. All functions are safe for concurrent use as long as nobody
// writes the slices meanwhile; none of them changes its arguments.
package quantile

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"gonum.org/v1/gonum/stat/distuv"
)

// resamples is how many bootstrap replicates stand behind an interval: with
// 2000, fifty of them lie beyond each end of a 95 % interval.
const resamples = 2000

// ErrSamples is returned, wrapped, for samples that no figure can be made of.
var ErrSamples = errors.New("unusable samples")

// Interval is a 95 % confidence interval, lower end first, in the unit of the
// samples.
type Interval [2]float64

// Summary describes a set of samples, in their unit.
type Summary struct {
	N                  int
	Min, P50, P95, P99 float64
	CI95               Interval // of P50
}

// Summarize describes x. Without samples the Summary is zero: N tells.
func Summarize(x []float64) Summary {
	if len(x) == 0 {
		return Summary{}
	}
	s := slices.Sorted(slices.Values(x))
	return Summary{
		N:    len(s),
		Min:  s[0],
		P50:  At(s, 0.50),
		P95:  At(s, 0.95),
		P99:  At(s, 0.99),
		CI95: MedianCI(s),
	}
}

// Median returns the median of x, NaN without samples.
func Median(x []float64) float64 {
	return At(slices.Sorted(slices.Values(x)), 0.5)
}

// At returns the quantile p, 0 to 1, of sorted samples by linear interpolation
// between the two nearest ones (type 7 of Hyndman and Fan 1996, the default of
// R and NumPy), NaN without samples. gonum's stat.Quantile offers only types 1
// and 4, whose median of an even number of samples is not the middle of the two.
func At(sorted []float64, p float64) float64 {
	if len(sorted) == 0 || !(p >= 0 && p <= 1) {
		return math.NaN()
	}
	h := p * float64(len(sorted)-1)
	i := int(h)
	if i+1 == len(sorted) {
		return sorted[i]
	}
	return sorted[i] + (h-float64(i))*(sorted[i+1]-sorted[i])
}

// MedianCI returns the percentile bootstrap interval of the median of sorted
// samples, NaN without any.
//
// A replicate costs O(1) instead of a resample of n: drawing from the samples
// is drawing sorted[floor(n*U)] with U uniform on [0,1), so the k-th smallest
// of a resample is sorted[floor(n*B)] with B the k-th smallest of n uniforms,
// which is Beta(k, n+1-k) distributed. Given B, the next larger one is the
// smallest of the n-k uniforms left above it. This is the bootstrap itself, not
// an approximation to it.
func MedianCI(sorted []float64) Interval {
	n := len(sorted)
	if n == 0 {
		return Interval{math.NaN(), math.NaN()}
	}
	k := (n + 1) / 2
	src := newSource()
	lower := distuv.Beta{Alpha: float64(k), Beta: float64(n + 1 - k), Src: src}
	rnd := rand.New(src)
	at := func(u float64) float64 { return sorted[min(int(float64(n)*u), n-1)] }

	return percentile(func() float64 {
		b := lower.Rand()
		if n%2 == 1 {
			return at(b)
		}
		next := b + (1-b)*(1-math.Pow(rnd.Float64(), 1/float64(n-k)))
		return (at(b) + at(next)) / 2
	})
}

// RatioCI compares runs of A and B that alternated: a[i] and b[i], each the
// figure of one run (its median, its rate), were measured next to each other
// and share the weather of that moment. It returns median(a)/median(b) and the
// interval from a bootstrap that draws pairs. The unit is a pure number.
func RatioCI(a, b []float64) (float64, Interval, error) {
	if len(a) != len(b) || len(a) == 0 {
		return 0, Interval{}, fmt.Errorf("ratio of %d runs to %d: want pairs: %w", len(a), len(b), ErrSamples)
	}
	for i := range a {
		if !(a[i] > 0 && b[i] > 0) || math.IsInf(a[i], 1) || math.IsInf(b[i], 1) {
			return 0, Interval{}, fmt.Errorf("ratio: run %d is %g to %g: want positive numbers: %w", i, a[i], b[i], ErrSamples)
		}
	}

	ra, rb := make([]float64, len(a)), make([]float64, len(b))
	ci := Bootstrap(func(rnd *rand.Rand) float64 {
		for i := range ra {
			j := rnd.IntN(len(a))
			ra[i], rb[i] = a[j], b[j]
		}
		slices.Sort(ra)
		slices.Sort(rb)
		return At(ra, 0.5) / At(rb, 0.5)
	})
	return Median(a) / Median(b), ci, nil
}

// Bootstrap returns the percentile bootstrap interval of a figure: replicate draws samples
// with the generator, as many as there are and each perhaps more than once, and returns the
// figure of those.
func Bootstrap(replicate func(*rand.Rand) float64) Interval {
	rnd := rand.New(newSource())
	return percentile(func() float64 { return replicate(rnd) })
}

func newSource() rand.Source { return rand.NewPCG(0x5850494e, 95) }

// percentile draws the replicates and cuts 2.5 % off at either end.
func percentile(replicate func() float64) Interval {
	r := make([]float64, resamples)
	for i := range r {
		r[i] = replicate()
	}
	return Percentile(r)
}

// Percentile returns the interval of replicates that were drawn, which it sorts.
func Percentile(r []float64) Interval {
	slices.Sort(r)
	return Interval{At(r, 0.025), At(r, 0.975)}
}
