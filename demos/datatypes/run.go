// SPDX-License-Identifier: Apache-2.0

package datatypes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/demos/datatypes/gemm"
	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/internal/quantile"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/testbed"
)

// Config says what to measure. There are no defaults: the command has them.
type Config struct {
	Setup
	Transfers []Transfer // one after the other
	Runs      int        // rounds measured of each
	Verify    bool       // compare every byte of a round before the measured ones, and of one after
	Overlap   bool       // also measure with computation
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
		if err := t.Check(); err != nil {
			return err
		}
	}
	return nil
}

// warmup is how many rounds are done before the measured ones.
const warmup = 2

// Run measures one transfer after the other; progress, if not nil, is called before each
// step. When ctx ends, or something goes wrong, Run returns the results so far as well.
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
	return r, nil
}

// measure adds a result.
func (r *Report) measure(ctx context.Context, lab *netns.Lab, c Config, t Transfer, progress func(string)) (err error) {
	var m *model
	if t.modelled() {
		progress(t.name() + ": time between packets")
		if m, err = newModel(ctx, lab, c.Setup, t); err != nil {
			return err
		}
		t.Interval = m.interval
	}
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
	if m != nil {
		res.Model = &Model{int64(m.packet), int64(m.handler)}
	}
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
	// A failed verification is a result, too.
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
		if res.Overlap, err = s.overlap(ctx, c.Runs, time.Duration(res.Seconds.Median*float64(time.Second))); err != nil {
			return err
		}
		r.doubt(res)
	}
	return nil
}

// A model is what the checkpoint interval is chosen from (SC 2019, section 3.2.4), measured
// where it is used.
type model struct {
	packet   time.Duration // between packets, T
	handler  time.Duration // that places a packet, T_PH
	interval int64         // bytes of the stream
}

// newModel measures. The time between packets is that of the same messages with Deposit,
// whose handlers take next to none.
func newModel(ctx context.Context, lab *netns.Lab, setup Setup, t Transfer) (m *model, err error) {
	l, err := newLayout(t)
	if err != nil {
		return nil, err
	}
	t.Strategy = Deposit
	s, err := Open(ctx, lab, setup, t)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	var ns []float64
	for i := range warmup + 3 {
		round, err := s.Round(ctx, 0)
		if err != nil {
			return nil, err
		}
		if i >= warmup {
			ns = append(ns, float64(round.NIC)/float64(round.Segments))
		}
	}
	m = &model{
		packet:  max(time.Duration(quantile.Median(ns)), 1),
		handler: ddt.MeasureHandler(l.data, s.packet),
	}
	m.interval, err = ddt.Interval(l.data, s.packet, setup.HPUs, ddt.Model{PacketTime: m.packet, Handler: m.handler})
	if err != nil {
		return nil, fmt.Errorf("%w; an interval of your own goes before the model's", err)
	}
	return m, nil
}

func newReport(lab *netns.Lab, c Config) *Report {
	r := &Report{
		Schema: 1,
		Env: Env{
			Kernel: testbed.Kernel(), CPU: testbed.CPU(), CPUs: runtime.NumCPU(), Go: runtime.Version(),
			MTU: lab.MTU, Queues: lab.Queues, HPUs: c.HPUs, NICWait: c.Wait, NICCPUs: append([]int{}, c.NICCPUs...),
			AppCPU: c.AppCPU, SenderCPU: c.SenderCPU, Runs: c.Runs, Load: load(),
		},
		Results: []*Result{},
	}
	if c.Overlap {
		r.Env.GEMM = &GEMM{gemm.Library, gemm.Threads}
	}
	return r
}

// load returns the machine's load average over the last minute.
func load() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	minute, _, _ := strings.Cut(string(b), " ")
	return minute
}
