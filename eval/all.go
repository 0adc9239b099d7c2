// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"errors"
	"fmt"
	"io"
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
	"github.com/xspin/xspin/eval/peers"
	"github.com/xspin/xspin/eval/report"
	"github.com/xspin/xspin/internal/flags"
)

func newAllCmd() *cobra.Command {
	var (
		o       allOptions
		install bool
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
finished. In a directory that has a report already, experiments that have failed are
measured again; --only names others, and --again measures all. What is measured takes
the place of what was found before. Leave the machine alone meanwhile.

Beside the kernel XsPIN is compared with iperf3, MPICH, Open MPI and programs in C,
which are compiled first. Lines and rows of what is not installed are left out, and a
warning names it; --install-peers installs it.

Intervals are over the runs of this one process: what differs from one process to the
next is not in them.`,
		Example: `  sudo xspin bench all --quick
  sudo xspin bench all --out /srv/www/xspin
  sudo xspin bench all --only pingpong,packets`,
		Args: func(cmd *cobra.Command, args []string) error {
			// A flag that was left without names takes the next one for a name.
			for _, n := range o.only {
				if strings.HasPrefix(n, "-") {
					return fmt.Errorf("bench all: --only needs names of experiments before %s: %s", n, strings.Join(names, ", "))
				}
			}
			return cobra.NoArgs(cmd, args)
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, n := range o.only {
				if !slices.Contains(names, n) {
					return fmt.Errorf("bench all: %w", flags.Error("only", n, "want "+strings.Join(names, ", ")))
				}
			}
			if missing := peers.Missing(); install && len(missing) > 0 {
				if err := peers.Install(cmd.Context(), missing, cmd.ErrOrStderr()); err != nil {
					return fmt.Errorf("bench all: %w", err)
				}
			}
			written, err := runAll(cmd.Context(), cmd.ErrOrStderr(), experiments, o)
			if written {
				_, err2 := fmt.Fprintln(cmd.OutOrStdout(), filepath.Join(o.dir, page.Index))
				err = errors.Join(err, err2)
			}
			if err != nil {
				return fmt.Errorf("bench all: %w", err)
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&o.quick, "quick", false, "fewer and shorter runs: four minutes rather than forty")
	cmd.Flags().BoolVar(&o.again, "again", false, "measure what the report has already, too")
	cmd.Flags().StringVar(&o.dir, "out", "xspin-bench", "the directory of the report")
	cmd.Flags().StringSliceVar(&o.only, "only", nil, "experiments to measure: "+strings.Join(names, ", ")+" (default all)")
	flags.ListOf(cmd.Flags(), "only", names)
	cmd.Flags().BoolVar(&install, "install-peers", false, "first install, with apt-get, what XsPIN is compared with: "+strings.Join(peers.Packages(peers.All), ", "))
	return cmd
}

// allOptions are what can be chosen of `xspin bench all`.
type allOptions struct {
	dir          string
	quick, again bool
	only         []string
}

// runAll measures what the report of a directory lacks, tells how far it is and, at the end, in
// short what it has found, which it keeps after each experiment. It tells whether there is a page now.
func runAll(ctx context.Context, tell io.Writer, all []experiment, o allOptions) (written bool, err error) {
	if err := report.Prepare(o.dir); err != nil {
		return false, err
	}
	now := environment("xspin bench all", 0, 0)
	r, todo, err := begin(all, o, now)
	if err != nil {
		return false, err
	}
	if w := now.Warning(); w != "" {
		fmt.Fprintf(tell, "warning: %s. Other programs make the figures less reliable\n", w)
	}
	for _, p := range peers.Missing() {
		fmt.Fprintf(tell, "warning: %s is not installed, so %s is not measured: --install-peers installs it, or apt-get install %s\n", p.Name, p.For, strings.Join(p.Packages, " "))
	}
	if err := r.Save(o.dir); err != nil { // with what is to be done
		return false, err
	}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer stop()
	var failed error
	for i, x := range todo {
		left := time.Duration(0)
		for _, y := range todo[i:] {
			left += y.pace(o.quick).takes
		}
		told := startCountdown(tell, fmt.Sprintf("%d of %d  %s", i+1, len(todo), x.Title), left)
		e, err := x.run(ctx, told.warn, o.quick)
		told.end()
		if err != nil && ctx.Err() != nil {
			return written, fmt.Errorf("interrupted at %s, whose figures are lost; those before it are kept. The same command goes on with %s", x.Name, x.Name)
		}
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", x.Name, err))
			fmt.Fprintf(tell, "warning: %s failed: %v\n", x.Name, err)
		}
		old := r.Experiment(x.Name)
		r.Put(e)
		r.Todo = slices.DeleteFunc(r.Todo, func(n string) bool { return n == x.Name })
		// In this order: what the results have, the page and its files have.
		if err := errors.Join(page.Write(o.dir, r, x.Name), r.Save(o.dir)); err != nil {
			return written, errors.Join(failed, err)
		}
		written = true
		if old != nil {
			if err := page.Remove(o.dir, old, e); err != nil {
				return written, errors.Join(failed, err)
			}
		}
		if ctx.Err() != nil {
			return written, errors.Join(failed, fmt.Errorf("interrupted after %s: the same command goes on behind it", x.Name))
		}
	}
	fmt.Fprint(tell, page.Summary(r))
	return written, failed
}

// begin returns the report to go on with, and the experiments to measure.
func begin(all []experiment, o allOptions, now bench.Env) (r *report.Report, todo []experiment, err error) {
	fresh := &report.Report{
		Schema: report.Schema, Release: release(), Quick: o.quick, Env: now, Machine: machine(),
	}
	r, err = report.Load(o.dir)
	switch {
	case report.Absent(err):
		r = fresh
	case err != nil:
		return nil, nil, fmt.Errorf("%w: move it away, or take another --out", err)
	default:
		if why := r.Differs(fresh); why != "" {
			return nil, nil, fmt.Errorf("%s is of another run, %s: move it away, or take another --out", filepath.Join(o.dir, report.File), why)
		}
	}
	interrupted := len(r.Todo) > 0
	for _, x := range all {
		e := r.Experiment(x.Name)
		wanted := o.again || e == nil || e.Status == report.Failed
		switch {
		case interrupted && !o.again:
			wanted = slices.Contains(r.Todo, x.Name)
		case len(o.only) > 0:
			wanted = true
		}
		if wanted && (len(o.only) == 0 || slices.Contains(o.only, x.Name)) {
			todo = append(todo, x)
			if !slices.Contains(r.Todo, x.Name) {
				r.Todo = append(r.Todo, x.Name)
			}
		}
	}
	switch {
	case len(todo) > 0:
		return r, todo, nil
	case interrupted:
		return nil, nil, fmt.Errorf("%s is of a run that was interrupted before %s: finish that first, without --only", filepath.Join(o.dir, report.File), strings.Join(r.Todo, ", "))
	}
	return nil, nil, fmt.Errorf("%s has all experiments, and the page is %s: --only measures some of them again, --again all", filepath.Join(o.dir, report.File), filepath.Join(o.dir, page.Index))
}

func (x *experiment) pace(quick bool) pace {
	if quick {
		return x.quick
	}
	return x.full
}

// run measures the experiment. An error is in what it returns, too.
func (x *experiment) run(ctx context.Context, warn func(string), quick bool) (*report.Experiment, error) {
	p, e := x.pace(quick), x.Experiment
	// Peers that hang end with the context.
	ctx, cancel := context.WithTimeout(ctx, time.Minute+5*p.takes)
	defer cancel()
	e.Started, e.Runs = time.Now().Format(time.RFC3339), p.runs
	cfg := benchConfig{runs: p.runs, idle: 5 * time.Second, warn: func(msg string) {
		e.Warnings = append(e.Warnings, msg)
		warn(msg)
	}}
	if quick {
		cfg.idle = 2 * time.Second
	}
	w := watch()
	start := time.Now()
	err := inLab(cfg.warn, func(lab *benchLab) error {
		t := &trial{lab, cfg, quick, &e}
		var errs []error
		for _, rows := range x.rows {
			errs = append(errs, rows.measure(ctx, t))
		}
		for _, measure := range x.steps {
			errs = append(errs, measure(ctx, t))
		}
		if msg := lab.waits.warning(lab.sender); msg != "" {
			cfg.warn(msg)
		}
		return errors.Join(errs...)
	})
	err = errors.Join(err, e.Prune())
	e.Took = time.Since(start).Seconds()
	e.Weather = w.stop()
	e.Status = report.Done
	switch {
	case err != nil:
		e.Status, e.Why = report.Failed, err.Error()
	case len(e.Rows)+len(e.Plots) == 0:
		e.Status, e.Why = report.Skipped, strings.Join(e.Warnings, "; ")
		if quick && e.Why == "" {
			e.Why = "a quick run does without"
		}
	}
	return &e, err
}

// release is of this binary: its version or, of a build that has none, its commit.
func release() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "XsPIN, unknown"
	}
	version, commit, modified := info.Main.Version, "", ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			commit = s.Value[:min(len(s.Value), 12)]
		case s.Key == "vcs.modified" && s.Value == "true":
			modified = ", modified"
		}
	}
	if commit != "" && !strings.Contains(version, commit) {
		version += ", commit " + commit + modified
	}
	return "XsPIN " + version
}

// machine returns the versions of the peers, "" of those that are not there.
func machine() (facts []report.Fact) {
	for _, p := range peers.All {
		facts = append(facts, report.Fact{Name: p.Name, Value: p.Version(), For: p.For})
	}
	return facts
}
