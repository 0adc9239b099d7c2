// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/page/pagetest"
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
		_, err := runAll(t.Context(), &told, all, allOptions{dir, true, again, only})
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("error %v, want %q; told %s", err, want, told.String())
		}
		r, err := report.Load(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range r.Experiments {
			if _, err := os.Stat(filepath.Join(dir, e.Name+"-rows.csv")); err != nil {
				t.Error(err)
			}
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
	did(run("has all experiments, and the page is ", false, nil, a, b, c, d), "", "")
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

	// What it does not find any more has no file.
	bare := fake("a", &ran, nil)
	bare.steps = []step{func(_ context.Context, t *trial) error {
		l := newLine("it", "")
		l.add(1, 2, -1)
		t.plot(report.Plot{Name: "a-plot"}, l)
		return nil
	}}
	if _, err := runAll(t.Context(), new(bytes.Buffer), []experiment{bare}, allOptions{dir, true, true, []string{"a"}}); err != nil {
		t.Error(err)
	}
	for name, want := range map[string]error{"a-plot.csv": nil, "a-rows.csv": fs.ErrNotExist, "b-rows.csv": nil} {
		if _, err := os.Stat(filepath.Join(dir, name)); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
	}
	did(run("", true, []string{"a"}, a, b, c, d), "a", "b c d")

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
	if _, err := runAll(t.Context(), new(bytes.Buffer), []experiment{a}, allOptions{dir, true, false, nil}); err == nil || !strings.Contains(err.Error(), "move it away, or take another --out") {
		t.Errorf("error %v", err)
	}
	if b, err := os.ReadFile(name); err != nil || string(b) != "mine" {
		t.Errorf("%q, error %v", b, err)
	}
	if _, err := runAll(t.Context(), new(bytes.Buffer), []experiment{a}, allOptions{name, true, false, nil}); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("a file for a directory: %v", err)
	}
	noBenchLab(t, os.Getpid())
}

// It is what runs now that counts, and this test is.
func TestTheMachineIsLookedAtNow(t *testing.T) {
	var stop atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		for !stop.Load() {
		}
	}()
	e := environment("xspin bench test", 1, 0)
	stop.Store(true)
	<-done
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		t.Fatal(err)
	}
	// A thread that spins has a CPU to itself, or shares it with whoever else is at work.
	used := -1.0
	if e.Used != nil {
		used = *e.Used
	}
	if cpus := strings.Count(string(stat), "\ncpu"); used < 0.5/float64(cpus) || used > 1 {
		t.Errorf("of the time of %d CPUs %g was in use", cpus, used)
	}
}

func TestBenchAllRefusesUnknownExperiments(t *testing.T) {
	out := filepath.Join(t.TempDir(), "x")
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"--only", "packets,nothing", "--out", out}, "bench all: --only nothing: want pingpong, "},
		{[]string{"--only", "--out", out}, "bench all: --only needs names of experiments before --out: pingpong, "},
		{[]string{"--only", "--quick"}, "bench all: --only needs names of experiments before --quick: pingpong, "},
		{[]string{"packets"}, `unknown command "packets"`},
	} {
		root := benchCmd()
		root.SetArgs(append([]string{"all"}, tc.args...))
		root.SetOut(new(bytes.Buffer))
		root.SetErr(new(bytes.Buffer))
		if err := root.Execute(); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q: error %v, want %q", tc.args, err, tc.want)
		}
	}
}

// measured measures a step of an experiment once, as a quick run does, and returns its plots,
// see plotsOf.
func measured(t *testing.T, measure step, rows ...bench.Row) (*report.Experiment, []string) {
	t.Helper()
	e := &report.Experiment{Name: "test", Rows: rows}
	err := inLab(func(msg string) { t.Log(msg) }, func(lab *benchLab) error {
		return measure(t.Context(), &trial{lab, benchConfig{runs: 1, warn: func(msg string) { t.Error(msg) }}, true, e})
	})
	if err := errors.Join(err, e.Prune()); err != nil {
		t.Fatal(err)
	}
	return e, plotsOf(t, e)
}

// plotsOf returns the plots as "name: series of so many points, ..." each.
func plotsOf(t *testing.T, e *report.Experiment) (plots []string) {
	t.Helper()
	for _, p := range e.Plots {
		var series []string
		for _, s := range p.Series {
			series = append(series, fmt.Sprintf("%s %d", s.Name, len(s.Points)))
			ours := !strings.Contains(s.Name, "TCP") && !strings.Contains(s.Name, "XDP") && !strings.Contains(s.Name, "Linux")
			want := ""
			if strings.Contains(s.Name, "in eBPF") {
				want = "kernel"
			} else if ours {
				want = "user"
			}
			if s.Tier != want {
				t.Errorf("%s: tier %q of %s", p.Name, s.Tier, s.Name)
			}
			if !p.Stack && !strings.HasSuffix(p.Name, "-spread") && !strings.Contains(s.On, "XDP") {
				t.Errorf("%s, %s: on: %q", p.Name, s.Name, s.On)
			}
		}
		plots = append(plots, p.Name+": "+strings.Join(series, ", "))
	}
	return plots
}

func wantPlots(t *testing.T, got []string, want string) {
	t.Helper()
	if strings.Join(got, "\n") != strings.TrimSpace(want) {
		t.Errorf("plots\n%s\nwant\n%s", strings.Join(got, "\n"), want)
	}
}

// Figures 24 and 25 come out of real pings, in a page that reads.
func TestPingpongMeasuresEveryRow(t *testing.T) {
	if !measures(t) {
		return
	}
	const modes = "Linux 4, handlers 4, handlers in eBPF 4, handlers in eBPF at tc 4, handlers and an application 4"
	const nic, both = "wire and client 4, dispatch 4, handler 4", "wire and client 4, dispatch 4, handler 4, application 4"
	dir := t.TempDir()
	x := experiments[0]
	x.rows, x.quick.runs = nil, 1
	var told bytes.Buffer
	if _, err := runAll(t.Context(), &told, []experiment{x}, allOptions{dir: dir, quick: true}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"UDP echo by a handler in Go takes ", "UDP echo by a handler in eBPF takes ", "ICMP echo by a handler in Go takes ", "ICMP echo by a handler in eBPF takes ",
		"Not measured in a quick run:\n* UDP echo in longer runs, next to sockets that block and that spin.\n",
	} {
		if !strings.Contains(told.String(), want) {
			t.Errorf("at the end it did not say %q, but\n%s", want, &told)
		}
	}
	r, err := report.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	wantPlots(t, plotsOf(t, r.Experiments[0]), `
pingpong-icmp: `+modes+`
pingpong-icmp-spread: `+modes+`
pingpong-icmp-parts-nic: `+nic+`
pingpong-icmp-parts-host-nic: `+both+`
pingpong-udp: `+modes+`
pingpong-udp-spread: `+modes+`
pingpong-udp-parts-nic: `+nic+`
pingpong-udp-parts-host-nic: `+both)
	for _, p := range r.Experiments[0].Plots {
		if marks := map[bool]int{true: 12}[p.Name == "pingpong-icmp" || p.Name == "pingpong-udp"]; len(p.Marks) != marks {
			t.Errorf("%s: marks %+v", p.Name, p.Marks)
		}
		if len(p.Marks) > 0 && !p.Y.Log {
			t.Errorf("%s: FPsPIN's marks press the lines together", p.Name)
		}
		for _, s := range p.Series {
			for _, pt := range s.Points {
				if len(pt.Runs) != x.quick.runs { // those of two modes would be more
					t.Errorf("%s, %s at %g: runs %v, want %d", p.Name, s.Name, pt.X, pt.Runs, x.quick.runs)
				}
			}
		}
	}
	pagetest.Look(t, dir, x.Title, x.Shows, x.Method, "UDP echo: round trip by payload size", "Linux; handlers in eBPF at tc: ", "A quick run", "FPsPIN (D4.7, figure 24)")
}

func TestPacketsMeasureEveryRow(t *testing.T) {
	if !measures(t) {
		return
	}
	_, plots := measured(t, packetPlots)
	wantPlots(t, plots, `
packets-size: XDP_DROP: nobody receives 3, bare AF_XDP in C 3, bare AF_XDP in Go 3, handlers, 1 HPU 3, handlers in eBPF: the generator's CPU runs them 3
packets-hpus: handlers, all HPUs on CPU 1 3, handlers, HPUs on CPUs 1 and 0; the generator is on 0 too 2`)
}

func TestMessagesMeasureEveryRow(t *testing.T) {
	if !measures(t) {
		return
	}
	row := func(name string) bench.Row {
		r, err := bench.Ratio(name, bench.Higher, bench.NewSide("a", "Gbit/s", []float64{2}), bench.NewSide("b", "Gbit/s", []float64{1}))
		if err != nil {
			t.Fatal(err)
		}
		r.A.On, r.B.On = "XDP", "XDP"
		return r
	}
	all := []bench.Row{row("slmp/file"), row("slmp/file_plain"), row("slmp/file_stored"), row("slmp/file_over_tcp"), row("slmp/file_over_tcp_same_frames"), row("kernel/file")}
	e, plots := measured(t, func(ctx context.Context, t *trial) error {
		return errors.Join(messagePeers(ctx, t), messageWindows(ctx, t), messageSizes(ctx, t), messageParts(ctx, t))
	}, all...)
	wantPlots(t, plots, `
messages-peers: XsPIN 3, XsPIN, handlers in eBPF 1, Linux 3
messages-window: 1 message at a time 3, 8 messages at a time 3, handlers in eBPF, 1 message at a time 3
messages-size: 1 message at a time 3, 16 messages at a time 3, handlers in eBPF, 1 message at a time 3, handlers in eBPF, 16 messages at a time 3
messages-senders: 1 message at a time each 2, 16 messages at a time each 2, handlers in eBPF, 1 message at a time each 2, handlers in eBPF, 16 messages at a time each 2
messages-parts: packet 3, header and completion 3, copy 3, acknowledgement 3`)
	if p := e.Plots[0]; p.X.Names[int(p.Marks[1].X)] != "TCP" {
		t.Errorf("FPsPIN's TCP is beside %s", p.X.Names[int(p.Marks[1].X)])
	}
	if n := len(e.Plots[1].Marks); n != 7 {
		t.Errorf("%d marks of windows: %+v", n, e.Plots[1].Marks)
	}
}

func TestBystandersAreDrawn(t *testing.T) {
	e := &report.Experiment{Name: "test"}
	draw := func() {
		t.Helper()
		if err := bystanderPlot(t.Context(), &trial{e: e}); err != nil {
			t.Fatal(err)
		}
	}
	if draw(); len(e.Plots) != 0 {
		t.Errorf("plots of no rows: %+v", e.Plots)
	}
	side := func(what string, gbps float64) bench.Side {
		s := bench.NewSide(what, "Gbit/s", []float64{gbps, gbps})
		s.On = "XDP of " + what
		return s
	}
	for _, dir := range []string{"", "_out"} {
		for _, b := range []bench.Side{side("pass", 2), side("none", 3)} {
			row, err := bench.Ratio("bystander/tcp"+dir+"_over_"+b.What, bench.Higher, side("nic", 1), b)
			if err != nil {
				t.Fatal(err)
			}
			e.Rows = append(e.Rows, row)
		}
	}
	draw()
	wantPlots(t, plotsOf(t, e), "bystander-tcp: TCP into the interface 3, TCP out of the interface 3")
	s := e.Plots[0].Series[0]
	for x, want := range []float64{3, 2, 1} {
		if s.Points[x].Y != want {
			t.Errorf("at %s: %g, want %g", e.Plots[0].X.Names[x], s.Points[x].Y, want)
		}
	}
	if want := "no XDP program: XDP of none. a bare XDP program: XDP of pass. XsPIN's NIC: XDP of nic"; s.On != want {
		t.Errorf("on: %s, want %s", s.On, want)
	}
}

func TestLossMeasuresEveryRow(t *testing.T) {
	if !measures(t) {
		return
	}
	_, plots := measured(t, lossPlots)
	wantPlots(t, plots, `
loss-goodput: SLMP 3, SLMP, handlers in eBPF 3, TCP 3
loss-completion: SLMP 3, SLMP, handlers in eBPF 3, TCP, computed from its goodput 3`)
}

func TestScaleMeasuresEveryRow(t *testing.T) {
	if !measures(t) {
		return
	}
	e, plots := measured(t, scalePlots)
	wantPlots(t, plots, `
scale-messages: handlers in Go 3, handlers in eBPF 3
scale-contexts: handlers in Go 3, handlers in eBPF 3
scale-rulesets: handlers in Go 3, handlers in eBPF 3
scale-memory: message in flight, handlers in Go 2, context, handlers in Go 2, ruleset, handlers in Go 2, message in flight, handlers in eBPF 2, context, handlers in eBPF 2, ruleset, handlers in eBPF 2
scale-activation: handlers in Go 3, handlers in eBPF 3`)
	// Neither is a message forgotten, nor is memory of others counted.
	for _, p := range e.Plots[3].Series[0].Points {
		if p.Y < 100 || p.Y > 2000 {
			t.Errorf("%g bytes for each of %g messages", p.Y, p.X)
		}
	}
	// Handlers in eBPF have maps for a fixed number of segments, of which none came too many.
	for _, p := range e.Plots[3].Series[3].Points {
		if all := p.Y * p.X; all < scaleSegments/2 || all > 1<<26 {
			t.Errorf("%g bytes for %g messages in eBPF", all, p.X)
		}
	}
	for _, p := range e.Plots[0].Series[1].Points {
		if p.Lost == nil {
			t.Errorf("%g messages in eBPF: nobody says how much was lost", p.X)
		} else if *p.Lost > 0.01 {
			t.Errorf("%g messages in eBPF: a share of %g was lost", p.X, *p.Lost)
		}
	}
	_, plots = measured(t, scaleMatching)
	wantPlots(t, plots, `
scale-matching: XDP program, none matches, no two look at the same bits 3, XDP program, none matches, one but for its last word 3, XDP program, the last one matches 3`)
}

func TestAnatomyMeasuresEveryRow(t *testing.T) {
	if !measures(t) {
		return
	}
	e, plots := measured(t, func(ctx context.Context, t *trial) error {
		return errors.Join(anatomyPlots(ctx, t), anatomyRows(ctx, t))
	})
	wantPlots(t, plots, `
anatomy-parts: match 3, redirect 3, ring wait 3, dispatch 3, handler 3, copy 3, egress 3
anatomy-parts-busy: match 3, redirect 3, dispatch 3, handler 3, copy 3, egress 3`)
	var rows []string
	for _, r := range e.Rows {
		rows = append(rows, r.Name)
		if r.Name != "anatomy/memory_bytes" && r.Median <= 0 {
			t.Errorf("%s: %g", r.Name, r.Median)
		}
	}
	if got := strings.Join(rows, " "); got != "anatomy/open_ms anatomy/memory_bytes anatomy/maps anatomy/maps_bytes anatomy/descriptors" {
		t.Errorf("rows %s", got)
	}
}

func TestCostMeasuresEveryRow(t *testing.T) {
	if !measures(t) {
		return
	}
	e := &report.Experiment{Name: "test"}
	err := inLab(func(msg string) { t.Log(msg) }, func(lab *benchLab) error {
		return costPlots(t.Context(), &trial{lab, benchConfig{runs: 1, warn: func(msg string) { t.Error(msg) }}, true, e})
	})
	if err := errors.Join(err, e.Prune()); err != nil || len(e.Plots) != 2 {
		t.Fatalf("%d plots, error %v", len(e.Plots), err)
	}
	for i, want := range []string{"cost-bytes [SLMP, handlers SLMP, handlers in eBPF TCP TCP, same frames]", "cost-messages [SLMP, handlers SLMP, handlers in eBPF UDP sockets in C]"} {
		p := e.Plots[i]
		if got := fmt.Sprint(p.Name, " ", p.X.Names); got != want {
			t.Errorf("plot %s, want %s", got, want)
		}
		for _, s := range p.Series {
			if len(s.Points) != len(p.X.Names) || s.Points[0].Y+s.Points[1].Y <= 0 {
				t.Errorf("%s, %s: %+v", p.Name, s.Name, s.Points)
			}
			for i, peer := range p.X.Names[1:] { // what was on is told of each
				ours, rest, ok := strings.Cut(s.On, ". "+peer+": xs-nic: XDP ")
				if want := []string{"native", "none", "native"}[i]; !ok || !strings.HasPrefix(ours, "SLMP, handlers: xs-nic: XDP native") || !strings.HasPrefix(rest, want) {
					t.Errorf("%s, %s: on: %s", p.Name, s.Name, s.On)
				}
			}
		}
	}
}

func TestCPUSeconds(t *testing.T) {
	const stat = "cpu 9 9 9 9 9 9 9 9\ncpu0 1 2 3 1000 1000 4 5 1000 7 7\ncpu1 100 0 0 0 0 0 0 0 0 0\n"
	for cpu, want := range []float64{0.15, 1} {
		if got, err := cpuSeconds(stat, cpu); err != nil || got != want {
			t.Errorf("CPU %d: %g, error %v; want %g", cpu, got, err, want)
		}
	}
	if _, err := cpuSeconds(stat, 2); err == nil {
		t.Error("a CPU that is not there")
	}
}

func TestStagesAreDifferences(t *testing.T) {
	sides := []map[int][]float64{{1: {10, 10}}, {1: {15, 9}}, {1: {18, 14}}}
	if got := fmt.Sprint(stages(sides, 1)); got != "[[10 5 3] [10 0 4]]" {
		t.Errorf("stages %s", got)
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

// docs/evaluation.md has each experiment, and each key of results.json.
func TestTheEvaluationIsDocumented(t *testing.T) {
	b, err := os.ReadFile("../docs/evaluation.md")
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	for _, x := range experiments {
		if line := fmt.Sprintf("| `%s` | %s |", x.Name, x.Shows); !strings.Contains(text, line) {
			t.Errorf("no line %s", line)
		}
	}
	seen := map[reflect.Type]bool{}
	var keys func(reflect.Type)
	keys = func(typ reflect.Type) {
		switch typ.Kind() {
		case reflect.Pointer, reflect.Slice, reflect.Map:
			keys(typ.Elem())
		case reflect.Struct:
			for i := 0; i < typ.NumField() && !seen[typ]; i++ {
				name, _, _ := strings.Cut(typ.Field(i).Tag.Get("json"), ",")
				if name == "-" { // no key
					continue
				}
				if !strings.Contains(text, "`"+name+"`") {
					t.Errorf("%v: no key `%s`", typ, name)
				}
				keys(typ.Field(i).Type)
			}
			seen[typ] = true
		}
	}
	keys(reflect.TypeFor[report.Report]())
}
