// SPDX-License-Identifier: Apache-2.0

package report

import (
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/xspin/xspin/eval/bench"
)

func sample(t *testing.T) *Report {
	t.Helper()
	row, err := bench.Ratio("rx/ratio", bench.AtLeast(1), bench.NewSide("a", "ns", []float64{3, 4, 5}), bench.NewSide("b", "ns", []float64{1, 2, 3}))
	if err != nil {
		t.Fatal(err)
	}
	lost := 0.25
	pt := NewPoint(16, []float64{3, 1, 2})
	pt.Lost = &lost
	return &Report{
		Schema: Schema, Release: "XsPIN test", Env: bench.Environment("xspin bench all", 0, 0), Machine: []Fact{{"iperf3", "3.12", "TCP"}},
		Experiments: []*Experiment{{
			Name: "rx", Title: "Rate", Status: Done, Took: 1.5, Rows: []bench.Row{row},
			Plots: []*Plot{{Name: "rx-plot", X: Axis{Label: "size", Unit: "bytes", Log: true}, Series: []Series{{Name: "s", Points: []Point{pt}}}}},
		}},
	}
}

func TestReportsAreReadAsWritten(t *testing.T) {
	dir, r := t.TempDir(), sample(t)
	if _, err := Load(dir); !Absent(err) {
		t.Errorf("no report: %v", err)
	}
	for range 2 { // the second takes the place of the first
		if err := r.Save(dir); err != nil {
			t.Fatal(err)
		}
	}
	got, err := Load(dir)
	if err != nil || !reflect.DeepEqual(got, r) {
		t.Errorf("read %+v, error %v; wrote %+v", got, err, r)
	}
	if files, err := os.ReadDir(dir); len(files) != 1 || err != nil {
		t.Errorf("files %v, error %v", files, err)
	}
	if p := got.Experiments[0].Plots[0].Series[0].Points[0]; p.Y != 2 || p.CI95[0] != 1 || p.CI95[1] != 3 {
		t.Errorf("%+v: want the median and interval of 1, 2 and 3", p)
	}
	if v := got.Verdicts(); len(v) != 1 || v[0].Name != "rx/ratio" {
		t.Errorf("%+v", v)
	}
	if s := got.Spread(); math.Abs(s-(got.Verdicts()[0].CI95[1]-got.Verdicts()[0].CI95[0])/2/2) > 1e-9 || s == 0 {
		t.Errorf("spread %g", s)
	}
	if d := got.Duration().String(); d != "2s" {
		t.Errorf("took %s", d)
	}
}

func TestBadReportsAreRefused(t *testing.T) {
	plot := func(p string) string {
		return `{"schema":1,"experiments":[{"name":"e","status":"done","plots":[` + p + `]}]}`
	}
	for _, tc := range []struct{ text, want string }{
		{"", "not a report of xspin bench all: unexpected end"},
		{"{}", "not a report of xspin bench all"},
		{`{"schema":2}`, "schema 2: want 1"},
		{`{"schema":1,"experiments":[null]}`, "experiments[0]: no name"},
		{`{"schema":1,"experiments":[{"name":"../x"}]}`, "experiments[0]: no name that a file can have"},
		{`{"schema":1,"experiments":[{}]}`, "experiments[0]: no name"},
		{`{"schema":1,"experiments":[{"name":"e","status":"done","rows":[{"name":"r"}]}]}`, "experiment e: row r: no side a"},
		{plot("null"), "experiment e: a plot without a name that a file can have"},
		{plot(`{"name":"../x"}`), "experiment e: a plot without a name that a file can have"},
		{plot(`{"name":".."}`), "without a name that a file can have"},
		{plot(`{"name":"p"}`), "experiment e: plot p: no points"},
		{plot(`{"name":"p","series":[{"name":"s","points":[{"x":1,"y":1,"ci95":[3,3]}]}]}`), "plot p: series s: 1 is not in its interval [3, 3]"},
		{plot(`{"name":"p","x":{"log":true},"series":[{"name":"s","points":[{"x":1,"y":1,"ci95":[1,1]}]}],"marks":[{"name":"m"}]}`), "plot p: mark m: 0 at 0: a logarithmic axis needs"},
		{plot(`{"name":"p","series":[{"name":"s","points":[{"x":1e300,"y":1,"ci95":[1,1]}]}]}`), "1e+300: want a number of 1e+15 at most"},
		{`{"schema":1,"experiments":[{"name":"e"}]}`, `experiment e: status "": want done, skipped or failed`},
		{`{"schema":1,"experiments":[{"name":"e","status":"done"},{"name":"e","status":"done"}]}`, "experiment e: a second file of the name e-rows"},
		{plot(`{"name":"p","x":{"log":true},"series":[{"name":"s","points":[{"x":0,"y":1,"ci95":[1,1]}]}]}`), "series s: 1 at 0: a logarithmic axis needs 1e-09 or more"},
		{plot(`{"name":"p","y":{"log":true},"series":[{"name":"s","points":[{"x":1,"y":1,"ci95":[0,1]}]}]}`), "series s: 0 at 1: a logarithmic axis needs 1e-09 or more"},
		{plot(`{"name":"p","stack":true,"series":[{"name":"s","points":[{"x":1,"y":1,"ci95":[1,1],"doubt":"d"}]}]}`), "plot p: stacked bars cannot show doubts"},
	} {
		if _, err := Read(strings.NewReader(tc.text)); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v, want %q", tc.text, err, tc.want)
		}
	}
	// What cannot be kept does not take the rest with it.
	e := sample(t).Experiments[0]
	e.Plots = append(e.Plots, &Plot{Name: "p", Series: []Series{{Name: "s", Points: []Point{{Y: math.NaN()}}}}})
	nan := math.NaN()
	bad := e.Rows[0]
	bad.Name, bad.A = "bad", &bench.Side{Runs: []float64{1}, Lost: &nan}
	e.Rows = append(e.Rows, bad)
	err := e.Prune()
	if err == nil || !strings.Contains(err.Error(), "plot p: series s: NaN: want a number") || !strings.Contains(err.Error(), "row bad: NaN") {
		t.Errorf("error %v", err)
	}
	if len(e.Plots) != 1 || len(e.Rows) != 1 || e.Prune() != nil {
		t.Errorf("left %+v", e)
	}
}

func TestReportsOfOtherRunsAreTold(t *testing.T) {
	for want, change := range map[string]func(*Report){
		"":                                     func(*Report) {},
		"release XsPIN old and not XsPIN test": func(r *Report) { r.Release = "XsPIN old" },
		"--quick true and not false":           func(r *Report) { r.Quick = true },
	} {
		r := sample(t)
		change(r)
		if got := r.Differs(sample(t)); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestTheDirectoryIsTriedBefore(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	if err := Prepare(dir); err != nil {
		t.Fatal(err)
	}
	if files, err := os.ReadDir(dir); len(files) != 0 || err != nil {
		t.Errorf("left %v, error %v", files, err)
	}
	if err := Prepare("/proc/self"); err == nil {
		t.Error("a directory in which there can be no files is taken")
	}
}

func TestExperimentsAreReplaced(t *testing.T) {
	r := sample(t)
	r.Put(&Experiment{Name: "slmp"})
	r.Put(&Experiment{Name: "rx", Status: Failed})
	if len(r.Experiments) != 2 || r.Experiment("rx").Status != Failed || r.Experiment("none") != nil {
		t.Errorf("%+v", r.Experiments)
	}
}

func TestReportsAreComparedPointByPoint(t *testing.T) {
	r := sample(t)
	p := r.Experiments[0].Plots[0]
	p.Y.Unit = "us"
	doubted := NewPoint(32, []float64{9})
	doubted.Doubt = "it did not settle"
	p.Series[0].Points = append(p.Series[0].Points, doubted, doubted)
	if got := p.Doubts(); len(got) != 1 || got[0] != doubted.Doubt {
		t.Errorf("doubts %q", got)
	}
	other := *p
	other.Name, other.Y.Unit = "other", "share" // which does not say what is better
	r.Experiments[0].Plots = append(r.Experiments[0].Plots, &other)
	d := r.Document()
	if err := d.Check(); err != nil {
		t.Fatal(err)
	}
	if len(d.Results) != 2 || d.Results[1].Name != "rx-plot/s/16" || d.Results[1].Better != "lower" || d.Results[1].A.Median != 2 {
		t.Errorf("%+v", d.Results)
	}
}

func TestAxesSayWhichWayIsBetter(t *testing.T) {
	for _, tc := range []struct {
		Axis
		want string
	}{
		{Axis{Unit: "us"}, "lower"},
		{Axis{Unit: "s/million messages"}, "lower"},
		{Axis{Unit: "million/s"}, "higher"},
		{Axis{Unit: "ratio"}, ""},
		{Axis{Unit: "ratio", Better: "lower"}, "lower"},
	} {
		if got := tc.Goal(); got != tc.want {
			t.Errorf("%+v: %q, want %q", tc.Axis, got, tc.want)
		}
	}
	r := sample(t)
	r.Experiments[0].Plots[0].Y.Better = "bigger"
	if err := r.Experiments[0].Prune(); err == nil || !strings.Contains(err.Error(), `better "bigger": want higher or lower`) {
		t.Errorf("error %v", err)
	}
}
