// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/page"
	"github.com/xspin/xspin/eval/report"
	"github.com/xspin/xspin/internal/flags"
)

func newAllCmd() *cobra.Command {
	var (
		quick bool
		dir   string
		only  []string
	)
	var names []string
	for _, x := range experiments {
		names = append(names, x.Name)
	}
	cmd := &cobra.Command{
		Use:   "all",
		Short: "Every experiment, as a page with plots, tables and verdicts",
		Long: `Measures all experiments one after the other, in a lab of their own, and writes
index.html, a page that needs no network; results.json, with all runs of all
figures; each plot as SVG and PNG; and each table as CSV. The page is written again
after each experiment.

If it is interrupted, the same command goes on with the experiments that were not
finished. With --only, a report that is complete gets these experiments anew and
keeps the others. Leave the machine alone meanwhile.`,
		Example: `  sudo xspin bench all --quick
  sudo xspin bench all --out /srv/www/xspin
  sudo xspin bench all --only pingpong,rx`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, n := range only {
				if !slices.Contains(names, n) {
					return fmt.Errorf("bench all: %w", flags.Error("only", n, "want "+strings.Join(names, ", ")))
				}
			}
			if err := runAll(cmd.Context(), cmd.ErrOrStderr(), experiments, dir, quick, only); err != nil {
				return fmt.Errorf("bench all: %w", err)
			}
			_, err := fmt.Fprintln(cmd.OutOrStdout(), filepath.Join(dir, page.Index))
			return err
		},
	}
	cmd.Flags().BoolVar(&quick, "quick", false, "fewer and shorter runs: minutes rather than most of an hour")
	cmd.Flags().StringVar(&dir, "out", "xspin-bench", "the directory of the report")
	cmd.Flags().StringSliceVar(&only, "only", nil, "experiments to measure: "+strings.Join(names, ", ")+" (default all)")
	flags.ListOf(cmd.Flags(), "only", names)
	return cmd
}

// runAll measures what is missing in the report of a directory, tells how far it is, and
// keeps what it has found after each experiment.
func runAll(ctx context.Context, tell io.Writer, all []experiment, dir string, quick bool, only []string) error {
	if err := report.Prepare(dir); err != nil {
		return err
	}
	r, todo, err := begin(all, dir, quick, only)
	if err != nil {
		return err
	}
	if r.Env.Busy {
		fmt.Fprintf(tell, "warning: the machine is busy: a load of %s on %d CPUs. Others at work spoil the figures\n", r.Env.Load, r.Env.CPUs)
	}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer stop()
	var failed error
	for i, x := range todo {
		left := time.Duration(0)
		for _, y := range todo[i:] {
			left += y.pace(quick).takes
		}
		fmt.Fprintf(tell, "%d of %d  %s: about %v left\n", i+1, len(todo), x.Title, left.Round(time.Second))
		e, err := x.run(ctx, tell, quick)
		if ctx.Err() != nil {
			return fmt.Errorf("interrupted at %s: the same command goes on there, and keeps what was found", x.Name)
		}
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", x.Name, err))
			fmt.Fprintf(tell, "warning: %s failed: %v\n", x.Name, err)
		}
		r.Put(e)
		r.LoadAfter = bench.Environment("", 0, 0).Load
		r.Complete = i == len(todo)-1
		if err := errors.Join(r.Save(dir), page.Write(dir, r)); err != nil {
			return err
		}
	}
	return failed
}

// begin returns the report to go on with, and the experiments that it lacks.
func begin(all []experiment, dir string, quick bool, only []string) (*report.Report, []experiment, error) {
	chosen := slices.DeleteFunc(slices.Clone(all), func(x experiment) bool {
		return len(only) > 0 && !slices.Contains(only, x.Name)
	})
	fresh := &report.Report{
		Schema: report.Schema, Release: release(), Quick: quick, Env: bench.Environment("xspin bench all", 0, 0), Machine: machine(),
	}
	r, err := report.Load(dir)
	switch {
	case report.Absent(err):
		return fresh, chosen, nil
	case err != nil:
		return nil, nil, fmt.Errorf("%w: move it away, or take another --out", err)
	}
	if why := r.Differs(fresh); why != "" {
		return nil, nil, fmt.Errorf("%s is of another run, %s: move it away, or take another --out", filepath.Join(dir, report.File), why)
	}
	switch {
	case r.Complete && len(only) == 0:
		return fresh, chosen, nil
	case r.Complete:
		r.Complete = false
		return r, chosen, nil
	}
	return r, slices.DeleteFunc(chosen, func(x experiment) bool {
		e := r.Experiment(x.Name)
		return e != nil && e.Status == report.Done
	}), nil
}

func (x *experiment) pace(quick bool) pace {
	if quick {
		return x.quick
	}
	return x.full
}

// run measures the experiment. An error is in what it returns, too.
func (x *experiment) run(ctx context.Context, tell io.Writer, quick bool) (*report.Experiment, error) {
	p, e := x.pace(quick), x.Experiment
	// Peers that hang end with the context.
	ctx, cancel := context.WithTimeout(ctx, time.Minute+5*p.takes)
	defer cancel()
	e.Load = bench.Environment("", 0, 0).Load
	cfg := benchConfig{runs: p.runs, duration: p.duration, idle: 2 * time.Second, warn: func(msg string) {
		e.Warnings = append(e.Warnings, msg)
		fmt.Fprintln(tell, "warning:", msg)
	}}
	start := time.Now()
	err := inLab(cfg.warn, func(lab *benchLab) error { return x.measure(ctx, lab, p, cfg, &e) })
	e.Took = time.Since(start).Seconds()
	e.Status = report.Done
	switch {
	case err != nil:
		e.Status, e.Why = report.Failed, err.Error()
	case len(e.Rows)+len(e.Plots) == 0:
		e.Status, e.Why = report.Skipped, strings.Join(e.Warnings, "; ")
	}
	return &e, err
}

// release is of this binary.
func release() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		return "XsPIN " + info.Main.Version
	}
	return "XsPIN, unknown"
}

// machine returns the peers that are there.
func machine() (facts []report.Fact) {
	for _, c := range []*exec.Cmd{exec.Command("iperf3", "--version"), exec.Command("mpichversion"), exec.Command("cc", "--version")} {
		out, err := c.Output()
		line, _, _ := strings.Cut(string(out), "\n")
		if err != nil {
			line = "not there"
		}
		facts = append(facts, report.Fact{Name: c.Args[0], Value: strings.Join(strings.Fields(line), " ")})
	}
	return facts
}
