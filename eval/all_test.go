// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/report"
	"github.com/xspin/xspin/netns/netnstest"
)

// fake is an experiment that finds one row, or fails after it, and notes that it ran.
func fake(name string, ran *[]string, err error) experiment {
	return experiment{
		report.Experiment{Name: name, Title: "Title of " + name}, pace{runs: 1, takes: time.Second}, pace{runs: 1, takes: time.Second}, nil,
		[]step{func(_ context.Context, t *trial) error {
			*ran = append(*ran, name)
			row, err2 := bench.Absolute(name+"/row", bench.AtLeast(1), bench.NewSide("it", "ns", []float64{1, 2, 3}))
			if err2 != nil {
				return err2
			}
			t.e.Rows = append(t.e.Rows, row)
			return err
		}},
	}
}

func TestBenchAllGoesOnWhereItStopped(t *testing.T) {
	netnstest.NeedRoot(t)
	dir := filepath.Join(t.TempDir(), "new", "report")
	var ran []string
	broken := errors.New("broken on purpose")
	a, b, c, d := fake("a", &ran, nil), fake("b", &ran, broken), fake("c", &ran, nil), fake("d", &ran, nil)
	// Someone stops it in the middle of c.
	interrupted := c
	interrupted.steps = []step{func(ctx context.Context, _ *trial) error {
		if err := unix.Kill(os.Getpid(), unix.SIGTERM); err != nil {
			return err
		}
		<-ctx.Done()
		return ctx.Err()
	}}
	run := func(want string, again bool, only []string, all ...experiment) *report.Report {
		t.Helper()
		ran = nil
		var told bytes.Buffer
		_, err := runAll(t.Context(), &told, all, dir, true, again, only)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("error %v, want %q; told %s", err, want, told.String())
		}
		r, err := report.Load(dir)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	did := func(r *report.Report, want, todo string) {
		t.Helper()
		if got := strings.Join(ran, " "); got != want || strings.Join(r.Todo, " ") != todo {
			t.Errorf("ran %q, left %q; want %q and %q", got, r.Todo, want, todo)
		}
	}

	r := run("interrupted at c, whose figures are lost", false, nil, a, b, interrupted, d)
	did(r, "a b", "c d")
	if e := r.Experiment("b"); e.Status != report.Failed || e.Why != broken.Error() || len(e.Rows) != 1 {
		t.Errorf("the broken one: %+v", e)
	}
	if _, err := os.Stat(filepath.Join(dir, "index.html")); err != nil {
		t.Error(err)
	}
	did(run("", false, []string{"d"}, a, b, c, d), "d", "c")
	did(run("interrupted before c: finish that first", false, []string{"a"}, a, b, c, d), "", "c")
	r = run("", false, nil, a, b, c, d)
	did(r, "c", "")
	if v := r.Verdicts(); len(v) != 4 || v[0].Verdict != "met" {
		t.Errorf("%+v", v)
	}
	did(run("b: broken on purpose", false, nil, a, b, c, d), "b", "") // failed: again
	b = fake("b", &ran, nil)
	did(run("", false, nil, a, b, c, d), "b", "")
	did(run("has all experiments: --only measures some of them again", false, nil, a, b, c, d), "", "")
	did(run("", false, []string{"b"}, a, b, c, d), "b", "")
	did(run("interrupted at c", false, []string{"a", "c"}, a, b, interrupted, d), "a", "c")
	did(run("", false, nil, a, b, c, d), "c", "")
	r = run("", true, nil, a, b, c, d)
	did(r, "a b c d", "")
	if len(r.Experiments) != 4 {
		t.Errorf("%+v", r.Experiments)
	}
	// The signal comes when all has been found.
	late := fake("a", &ran, nil)
	late.steps = append([]step{func(ctx context.Context, _ *trial) error {
		err := unix.Kill(os.Getpid(), unix.SIGTERM)
		<-ctx.Done()
		return err
	}}, late.steps...)
	did(run("interrupted after a: the same command goes on behind it", true, nil, late, b, c, d), "a", "b c d")

	// What is not ours, or of another machine, stays.
	r.Env.Kernel = "Linux 0.1"
	if err := r.Save(dir); err != nil {
		t.Fatal(err)
	}
	run("results.json is of another run, kernel Linux 0.1 and not Linux", false, nil, a)
	name := filepath.Join(dir, report.File)
	if err := os.WriteFile(name, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := runAll(t.Context(), new(bytes.Buffer), []experiment{a}, dir, true, false, nil); err == nil || !strings.Contains(err.Error(), "move it away, or take another --out") {
		t.Errorf("error %v", err)
	}
	if b, err := os.ReadFile(name); err != nil || string(b) != "mine" {
		t.Errorf("%q, error %v", b, err)
	}
	if _, err := runAll(t.Context(), new(bytes.Buffer), []experiment{a}, name, true, false, nil); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("a file for a directory: %v", err)
	}
	noBenchLab(t, os.Getpid())
}

func TestBenchAllRefusesUnknownExperiments(t *testing.T) {
	root := benchCmd()
	root.SetArgs([]string{"all", "--only", "packets,nothing", "--out", filepath.Join(t.TempDir(), "x")})
	root.SetOut(new(bytes.Buffer))
	root.SetErr(new(bytes.Buffer))
	if err := root.Execute(); err == nil || !strings.Contains(err.Error(), "bench all: --only nothing: want pingpong, ") {
		t.Errorf("error %v", err)
	}
}

// Figures 24 and 25 come out of real pings, in as little time as may be.
func TestPingpongMeasuresEveryRow(t *testing.T) {
	if !measures(t) {
		return
	}
	var e report.Experiment
	err := inLab(func(msg string) { t.Log(msg) }, func(lab *benchLab) error {
		return pingpongPlots(t.Context(), &trial{lab, benchConfig{runs: 1, warn: func(msg string) { t.Error(msg) }}, true, &e})
	})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, p := range e.Plots {
		names = append(names, p.Name)
		for _, s := range p.Series {
			if len(s.Points) != 4 || (s.Tier == "") != (s.Name == "Linux") {
				t.Errorf("%s: %+v", p.Name, s)
			}
		}
		if marks := map[bool]int{true: 12}[p.Name == "pingpong-icmp" || p.Name == "pingpong-udp"]; len(p.Marks) != marks {
			t.Errorf("%s: marks %+v", p.Name, p.Marks)
		}
	}
	if want := "pingpong-icmp pingpong-icmp-spread pingpong-icmp-parts-nic pingpong-icmp-parts-host-nic pingpong-udp pingpong-udp-spread pingpong-udp-parts-nic pingpong-udp-parts-host-nic"; strings.Join(names, " ") != want {
		t.Errorf("plots %q, want %s", names, want)
	}
}

func TestRowsOfExperimentsAreThere(t *testing.T) {
	for _, x := range experiments {
		for _, rows := range x.rows {
			for _, quick := range []bool{false, true} {
				if _, _, _, err := rows.plan(quick); err != nil {
					t.Errorf("%s: %v", x.Name, err)
				}
			}
		}
		for _, p := range []pace{x.full, x.quick} {
			if p.runs < 1 || p.takes <= 0 {
				t.Errorf("%s: %+v", x.Name, p)
			}
		}
	}
}
