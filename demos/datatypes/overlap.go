// SPDX-License-Identifier: Apache-2.0

package datatypes

import (
	"context"
	"math"
	"time"

	"github.com/xspin/xspin/demos/datatypes/gemm"
	"github.com/xspin/xspin/internal/quantile"
)

// FPsPIN's experiment asks for messages, and then multiplies matrices, at most 20 times,
// looking after each whether all messages are there. Before that it tunes the matrices'
// size until they are found in iteration 14 to 19, counted from 0, five times in a row.
// Here the next size follows from where they were found, instead of steps of 10 rows.
const (
	multiplications = 20
	firstHit        = 15 // GEMMs until all messages were found, counted from 1
	lastHit         = 20
	hitsInARow      = 5
	tuningRounds    = 40 // at most
	leastMatrix     = 8  // rows
	mostMatrix      = 4096
	attempts        = 3 // to tune, if more trials miss than hit then
)

// Tune returns GEMMs towards whose end transfer i gets done. took is how long a round takes
// without them. converged is false if the size had not settled after 40 rounds; then Tune
// returns the last one.
func (s *Session) Tune(ctx context.Context, i int, took time.Duration) (g GEMMs, converged bool, err error) {
	// How fast the application computes.
	probe := GEMMs{N: 192, Count: 4}
	alone, err := s.Compute(ctx, probe)
	if err != nil {
		return g, false, err
	}
	t := newTuning(took, alone/time.Duration(probe.Count), probe.N)
	for range tuningRounds {
		o, err := s.Overlap(ctx, i, t.gemms())
		if err != nil {
			return g, false, err
		}
		if t.learn(o) {
			return t.gemms(), true, nil
		}
	}
	return t.gemms(), false, nil
}

// aim is the GEMM after which all messages should be found.
const aim = (firstHit + lastHit) / 2.0

// A tuning looks for the size of matrices.
type tuning struct {
	size float64 // rows
	hits int     // in a row
}

// newTuning guesses from the time of a transfer, and of a GEMM of n rows.
func newTuning(transfer, gemm time.Duration, n int) *tuning {
	return &tuning{size: float64(n) * math.Cbrt(transfer.Seconds()/aim/gemm.Seconds())}
}

func (t *tuning) gemms() GEMMs {
	t.size = min(max(t.size, leastMatrix), mostMatrix)
	return GEMMs{N: int(math.Round(t.size)), Count: multiplications}
}

// learn learns from a round, and reports whether enough rounds in a row have hit.
func (t *tuning) learn(o *Overlapped) (converged bool) {
	if o.Hit && o.Multiplied >= firstHit {
		t.hits++
		return t.hits == hitsInARow
	}
	t.hits = 0
	// How many GEMMs of this size the transfer takes.
	n := float64(o.Multiplied)
	if !o.Hit {
		n *= o.Took.Seconds() / o.ComputeBefore.Seconds()
	}
	t.size *= math.Cbrt(min(max(n/aim, 0.5), 2))
	return false
}

// trialsOf returns the number of trials for a number of runs.
func trialsOf(runs int) int { return min(runs, 20) } // FPsPIN's: 20

// overlap does the experiment with the session's first transfer. took is how long a round
// takes alone. What is compared takes turns.
func (s *Session) overlap(ctx context.Context, runs int, took time.Duration) (o *Overlap, err error) {
	for range attempts {
		g, converged, err := s.Tune(ctx, 0, took)
		if err != nil {
			return nil, err
		}
		var all trials
		for range trialsOf(runs) {
			t, err := s.try(ctx, g)
			if err != nil {
				return nil, err
			}
			all = append(all, t)
		}
		o = newOverlap(g, converged, all)
		if 2*o.Misses <= len(all) {
			break
		}
		// The machine was busy with something else during the tuning.
	}
	return o, nil
}

// try does a trial.
func (s *Session) try(ctx context.Context, g GEMMs) (x trial, err error) {
	compute, err := s.Compute(ctx, g)
	if err != nil {
		return x, err
	}
	round, err := s.Round(ctx, 0)
	if err != nil {
		return x, err
	}
	both, err := s.Overlap(ctx, 0, g)
	if err != nil {
		return x, err
	}
	return trial{
		compute: compute, transfer: round.Took, both: both.Both, computed: both.Compute, detected: both.Took,
		nic: both.NIC, nicAlone: round.NIC, ratio: both.Ratio(), hit: both.Hit,
	}, nil
}

// A trial is each of what is compared, once.
type trial struct {
	compute  time.Duration // GEMMs alone
	transfer time.Duration // alone
	both     time.Duration // until both were done
	computed time.Duration // GEMMs during the transfer
	detected time.Duration // until the look, between GEMMs, that found all messages
	ratio    float64       // FPsPIN's
	hit      bool          // the look was before the last GEMM ended
	nic      time.Duration // until the last message ended, by the NIC's timestamp
	nicAlone time.Duration
}

type trials []trial

// of summarizes a figure of each.
func (t trials) of(f func(x trial) float64) Figure {
	var all []float64
	for _, x := range t {
		all = append(all, f(x))
	}
	return newFigure(all)
}

// unsteady is the factor by which the same GEMMs may seem faster during a transfer, on a
// machine that does nothing else.
const unsteady = 1.1

func newOverlap(g GEMMs, converged bool, all trials) *Overlap {
	o := &Overlap{
		N: g.N, Count: g.Count, Converged: converged,
		GEMMs:    all.of(func(x trial) float64 { return x.compute.Seconds() }),
		Transfer: all.of(func(x trial) float64 { return x.transfer.Seconds() }),
		Both:     all.of(func(x trial) float64 { return x.both.Seconds() }),
		NIC:      all.of(func(x trial) float64 { return x.nic.Seconds() }),
		Hidden: all.of(func(x trial) float64 {
			return (x.compute + x.transfer - x.both).Seconds() / x.transfer.Seconds()
		}),
		GEMMsSlower:    all.of(func(x trial) float64 { return x.computed.Seconds() / x.compute.Seconds() }),
		TransferSlower: all.of(func(x trial) float64 { return x.detected.Seconds() / x.transfer.Seconds() }),
		NICSlower:      all.of(func(x trial) float64 { return x.nic.Seconds() / x.nicAlone.Seconds() }),
		Ratio:          all.of(func(x trial) float64 { return x.ratio }),
	}
	for _, x := range all {
		if !x.hit {
			o.Misses++
		}
	}
	// A transfer cannot make GEMMs faster.
	o.Steady = o.GEMMsSlower.Median*unsteady >= 1
	o.GFLOPS = gemm.GFLOPS(g.N, g.Count, time.Duration(o.GEMMs.Median*float64(time.Second)))
	return o
}

// A Figure is the median of some runs, and the 95 % interval of a bootstrap.
type Figure struct {
	Median float64           `json:"median"`
	CI95   quantile.Interval `json:"ci95"`
}

func newFigure(runs []float64) Figure {
	s := quantile.Summarize(runs)
	return Figure{s.P50, s.CI95}
}
