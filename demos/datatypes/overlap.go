// SPDX-License-Identifier: Apache-2.0

package datatypes

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/xspin/xspin/eval/gemm"
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

// Tune returns GEMMs during which transfer i just gets done. It takes for that is how long
// a round took without any. converged is false if the size had not settled after 40 rounds:
// the last one is returned then.
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

// newTuning guesses from what a transfer takes, and a GEMM of n rows.
func newTuning(transfer, gemm time.Duration, n int) *tuning {
	return &tuning{size: float64(n) * math.Cbrt(transfer.Seconds()/aim/gemm.Seconds())}
}

func (t *tuning) gemms() GEMMs {
	t.size = min(max(t.size, leastMatrix), mostMatrix)
	return GEMMs{N: int(math.Round(t.size)), Count: multiplications}
}

// learn takes a round with gemms, and tells whether there were enough in a row that hit.
func (t *tuning) learn(o *Overlapped) (converged bool) {
	if o.Hit && o.Multiplied >= firstHit {
		t.hits++
		return t.hits == hitsInARow
	}
	t.hits = 0
	// By how many such GEMMs it would have taken.
	n := float64(o.Multiplied)
	if !o.Hit {
		n *= o.Took.Seconds() / o.ComputeBefore.Seconds()
	}
	t.size *= math.Cbrt(min(max(n/aim, 0.5), 2))
	return false
}

// trialsOf is how often what is compared takes turns, of a number of runs.
func trialsOf(runs int) int { return min(runs, 20) } // FPsPIN's: 20

// overlap does the experiment of the session's first transfer. All that is compared takes
// turns. Without a peer there are no figures of it.
func (x *experiment) overlap(ctx context.Context, s *Session, took time.Duration) (o *Overlap, err error) {
	if x.peer != nil {
		if err := x.try(ctx, func() error { return x.peer.prepare(ctx, s.transfers[0].layout) }); err != nil {
			return nil, err
		}
	}
	for range attempts {
		g, converged, err := s.Tune(ctx, 0, took)
		if err != nil {
			return nil, err
		}
		var ours, theirs trials
		for range trialsOf(x.c.Runs) {
			t, err := s.try(ctx, g)
			if err != nil {
				return nil, err
			}
			ours = append(ours, t)
			if x.peer == nil {
				continue
			}
			if err := x.try(ctx, func() (err error) {
				t, err = x.peer.try(ctx, g)
				return err
			}); err != nil {
				return nil, err
			}
			theirs = append(theirs, t)
		}
		if x.peer == nil {
			theirs = nil // not all
		}
		o = newOverlap(g, converged, ours, theirs)
		if 2**o.XsPIN.Misses <= len(ours) {
			break
		}
		// The machine was busy with something else when it was tuned.
	}
	return o, nil
}

// try has the peer do something. If it cannot there is no peer any more, which is an error
// only if that is ctx's.
func (x *experiment) try(ctx context.Context, f func() error) error {
	err := f()
	if err == nil || ctx.Err() != nil {
		return err
	}
	x.report.note(missing(errors.Join(err, x.peer.close())))
	x.peer = nil
	return nil
}

// try measures all that is compared, once.
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
	computed time.Duration // GEMMs, with the transfer beside them
	detected time.Duration // until the look, between GEMMs, that found all messages
	ratio    float64       // FPsPIN's
	hit      bool          // XsPIN: there was such a look before the GEMMs were over
	nic      time.Duration // until the last message was over, by the NIC's timestamp; 0: no NIC
	nicAlone time.Duration
}

type trials []trial

// each returns a figure of each.
func (t trials) each(f func(x trial) float64) (all []float64) {
	for _, x := range t {
		all = append(all, f(x))
	}
	return all
}

// of summarizes a figure of each.
func (t trials) of(f func(x trial) float64) Figure { return newFigure(t.each(f)) }

func (t trials) summary() *Overlaps {
	o := &Overlaps{
		GEMMs:    t.of(func(x trial) float64 { return x.compute.Seconds() }),
		Transfer: t.of(func(x trial) float64 { return x.transfer.Seconds() }),
		Both:     t.of(func(x trial) float64 { return x.both.Seconds() }),
		Hidden: t.of(func(x trial) float64 {
			return (x.compute + x.transfer - x.both).Seconds() / x.transfer.Seconds()
		}),
		GEMMsSlower:    t.of(func(x trial) float64 { return x.computed.Seconds() / x.compute.Seconds() }),
		TransferSlower: t.of(func(x trial) float64 { return x.detected.Seconds() / x.transfer.Seconds() }),
		Ratio:          t.of(func(x trial) float64 { return x.ratio }),
	}
	if t[0].nic > 0 {
		misses := 0
		for _, x := range t {
			if !x.hit {
				misses++
			}
		}
		o.Misses = &misses
		nic := t.of(func(x trial) float64 { return x.nic.Seconds() })
		slower := t.of(func(x trial) float64 { return x.nic.Seconds() / x.nicAlone.Seconds() })
		o.NIC, o.NICSlower = &nic, &slower
	}
	return o
}

// unsteady is by how much the same GEMMs may differ that were computed next to each other,
// on a machine that does nothing else.
const unsteady = 1.1

// alike tells whether the same GEMMs alone took as long on both sides.
func (o *Overlap) alike() bool {
	a, b := o.XsPIN.GEMMs.Median, o.MPICH.GEMMs.Median
	return max(a, b) <= unsteady*min(a, b)
}

// newOverlap puts both sides together, whose trials were next to each other. theirs may be
// none.
func newOverlap(g GEMMs, converged bool, ours, theirs trials) *Overlap {
	o := &Overlap{N: g.N, GEMMs: g.Count, Converged: converged, XsPIN: ours.summary()}
	// Nothing makes GEMMs faster.
	o.Steady = o.XsPIN.GEMMsSlower.Median*unsteady >= 1
	o.GFLOPS = gemm.GFLOPS(g.N, g.Count, time.Duration(o.XsPIN.GEMMs.Median*float64(time.Second)))
	if len(theirs) == 0 {
		return o
	}
	o.MPICH = theirs.summary()
	both := func(x trial) float64 { return x.both.Seconds() }
	if ratio, ci, err := quantile.RatioCI(ours.each(both), theirs.each(both)); err == nil {
		o.XsPINOverMPICH = &Figure{ratio, ci}
	}
	o.Steady = o.Steady && o.alike()
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
