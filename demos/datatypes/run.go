// SPDX-License-Identifier: Apache-2.0

package datatypes

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/internal/testbed"
	"github.com/xspin/xspin/netns"
)

// Config says what to measure. There are no defaults: the command has them.
type Config struct {
	Setup
	Transfers []Transfer // one after the other
	Runs      int        // rounds measured of each
	Verify    bool       // compare every byte of a round before those, and of one after
	Overlap   bool       // also with computation, next to MPICH if that is installed
}

// MaxRuns bounds Config.Runs.
const MaxRuns = 1000

func (c Config) check() error {
	switch {
	case len(c.Transfers) == 0:
		return fmt.Errorf("%w: no type", ErrConfig)
	case c.Runs < 1 || c.Runs > MaxRuns:
		return fmt.Errorf("%w: %d runs: want 1 to %d", ErrConfig, c.Runs, MaxRuns)
	}
	for _, t := range c.Transfers {
		if _, err := newLayout(t); err != nil {
			return err
		}
	}
	return nil
}

// warmup is how many rounds are made before those that are measured.
const warmup = 2

// Run measures one transfer after the other; progress, if not nil, is told before each
// step. When ctx ends, or something goes wrong, it returns the results it has by then too.
func Run(ctx context.Context, lab *netns.Lab, c Config, progress func(string)) (*Report, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	if progress == nil {
		progress = func(string) {}
	}
	r := newReport(lab, c)
	for _, t := range c.Transfers {
		if err := r.measure(ctx, lab, c, t, progress); err != nil {
			return r, fmt.Errorf("%s: %w", t.name(), err)
		}
	}
	if c.Overlap {
		return r, r.mpich(ctx, lab, c, progress)
	}
	return r, nil
}

// measure adds a result.
func (r *Report) measure(ctx context.Context, lab *netns.Lab, c Config, t Transfer, progress func(string)) (err error) {
	progress(t.name() + ": transfers")
	s, err := Open(ctx, lab, c.Setup, t)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if r.Env.Links, err = rtt.ReadLinks(lab); err != nil {
		return err
	}
	res := newResult(s.Info(0))
	res.transfer = s.transfers[0]
	verify := func() error {
		if !c.Verify {
			return nil
		}
		_, err := s.Verify(ctx, 0)
		good := err == nil
		if good || errors.Is(err, ErrContents) {
			res.Verified = &good
		}
		return err
	}
	// What is not as it must be is a result, too.
	defer func() {
		if err == nil || errors.Is(err, ErrContents) {
			r.Results = append(r.Results, res)
		}
	}()
	if err := verify(); err != nil {
		return err
	}
	for range warmup {
		if _, err := s.Round(ctx, 0); err != nil {
			return err
		}
	}
	for range c.Runs {
		round, err := s.Round(ctx, 0)
		if err != nil {
			return err
		}
		res.add(round)
	}
	if err := verify(); err != nil {
		return err
	}
	if c.Overlap {
		progress(t.name() + ": overlap with GEMMs")
		if res.Overlap, err = overlap(ctx, s, c.Runs, time.Duration(res.Seconds.Median*float64(time.Second))); err != nil {
			return err
		}
	}
	return nil
}

func newReport(lab *netns.Lab, c Config) *Report {
	return &Report{
		Schema: 1,
		Env: Env{
			Kernel: testbed.Kernel(), CPU: testbed.CPU(), CPUs: runtime.NumCPU(), Go: runtime.Version(),
			MTU: lab.MTU, Queues: lab.Queues, HPUs: c.HPUs, NICWait: c.Wait, NICCPUs: append([]int{}, c.NICCPUs...),
			AppCPU: c.AppCPU, SenderCPU: c.SenderCPU, Runs: c.Runs,
		},
		Results: []*Result{},
	}
}
