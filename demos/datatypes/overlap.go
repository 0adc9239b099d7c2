// SPDX-License-Identifier: Apache-2.0

package datatypes

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/xspin/xspin/internal/mpich"
	"github.com/xspin/xspin/internal/quantile"
	"github.com/xspin/xspin/netns"
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
	tuning          = 40 // rounds, at most
	leastMatrix     = 8  // rows
	mostMatrix      = 4096
	attempts        = 3 // to tune, if more trials miss than hit then
)

// Tune returns GEMMs during which transfer i just gets done. It takes for that is how long
// a round took without any.
func (s *Session) Tune(ctx context.Context, i int, took time.Duration) (GEMMs, error) {
	// How fast the application computes.
	probe := GEMMs{N: 192, Count: 4}
	alone, err := s.Compute(ctx, probe)
	if err != nil {
		return GEMMs{}, err
	}
	const aim = (firstHit + lastHit) / 2.0
	size := float64(probe.N) * math.Cbrt(took.Seconds()/aim/(alone.Seconds()/float64(probe.Count)))
	clamp := func() GEMMs {
		size = min(max(size, leastMatrix), mostMatrix)
		return GEMMs{N: int(math.Round(size)), Count: multiplications}
	}
	for round, hits := 0, 0; round < tuning && hits < hitsInARow; round++ {
		o, err := s.Overlap(ctx, i, clamp())
		if err != nil {
			return GEMMs{}, err
		}
		if o.Hit && o.Multiplied >= firstHit {
			hits++
			continue
		}
		hits = 0
		// By how many such GEMMs it would have taken.
		n := float64(o.Multiplied)
		if !o.Hit {
			n *= o.Took.Seconds() / o.ComputeBefore.Seconds()
		}
		size *= math.Cbrt(min(max(n/aim, 0.5), 2))
	}
	return clamp(), nil
}

// trialsOf is how often what is compared takes turns, of a number of runs.
func trialsOf(runs int) int { return min(runs, 20) } // FPsPIN's: 20

// overlap does the experiment of a session's transfer. What is compared takes turns.
func overlap(ctx context.Context, s *Session, runs int, took time.Duration) (o *Overlap, err error) {
	for range attempts {
		var g GEMMs
		if g, err = s.Tune(ctx, 0, took); err != nil {
			return nil, err
		}
		var t trials
		for range trialsOf(runs) {
			x, err := s.try(ctx, g)
			if err != nil {
				return nil, err
			}
			t = append(t, x)
		}
		o = &Overlap{N: g.N, GEMMs: g.Count, XsPIN: t.summary()}
		o.GFLOPS = gflops(g, o.XsPIN.GEMMs.Median)
		if 2**o.XsPIN.Misses <= len(t) {
			break
		}
		// The machine was busy with something else when it was tuned.
	}
	return o, nil
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

func gflops(g GEMMs, seconds float64) float64 {
	n := float64(g.N)
	return 2 * n * n * n * float64(g.Count) / seconds / 1e9
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

// of summarizes a figure of each.
func (t trials) of(f func(x trial) float64) Figure {
	var all []float64
	for _, x := range t {
		all = append(all, f(x))
	}
	return newFigure(all)
}

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

// mpich adds what MPICH does of the same, over TCP between the same namespaces, with
// receives that are posted before and tested between the GEMMs. Where it cannot run there
// are no such figures.
func (r *Report) mpich(ctx context.Context, lab *netns.Lab, c Config, progress func(string)) error {
	progress("overlap with MPICH's receives")
	err := r.measureMPICH(ctx, lab, c)
	if err != nil && ctx.Err() == nil {
		r.note("no figures of MPICH: " + err.Error())
		return nil
	}
	return err
}

func (r *Report) measureMPICH(ctx context.Context, lab *netns.Lab, c Config) (err error) {
	p, err := mpich.Start(ctx, mpich.PairConfig{Lab: lab, ReceiverCPU: c.AppCPU, SenderCPU: c.SenderCPU})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	for _, res := range r.Results {
		if res.Overlap.MPICH, err = mpichOverlap(ctx, p, res, c.Runs); err != nil {
			return err
		}
	}
	return nil
}

func mpichOverlap(ctx context.Context, p *mpich.Pair, res *Result, runs int) (*Overlaps, error) {
	if err := p.Prepare(ctx, mpich.Transfer{Type: res.transfer.data.Type(), Count: res.Elements, Messages: res.Parallel}); err != nil {
		return nil, err
	}
	g := mpich.Compute{Dim: res.Overlap.N, GEMMs: res.Overlap.GEMMs}
	var t trials
	for range trialsOf(runs) {
		compute, err := p.Compute(ctx, g, 1)
		if err != nil {
			return nil, err
		}
		rounds, err := p.Receive(ctx, 1)
		if err != nil {
			return nil, err
		}
		both, err := p.Overlap(ctx, g, 1)
		if err != nil {
			return nil, err
		}
		fpspin, err := p.Detect(ctx, g, 1)
		if err != nil {
			return nil, err
		}
		o := both[0]
		t = append(t, trial{
			compute: compute[0], transfer: rounds.Times[0], both: o.Total, computed: o.Computed, detected: o.Detected,
			ratio: fpspin[0].Ratio(),
		})
	}
	return t.summary(), nil
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
