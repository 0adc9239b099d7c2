// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/report"
)

func TestBenchCompare(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, runs ...float64) string {
		d := bench.NewDocument(bench.Environment("xspin bench rx", len(runs), 1))
		r, err := bench.Absolute("rx/ns", bench.Lower, bench.NewSide("it", "ns", runs))
		if err := d.Add("none", r, err); err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if err := d.WriteJSON(&b); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	before, after := write("before.json", 10, 11, 12, 13, 14), write("after.json", 20, 21, 22, 23, 24)
	for name, runs := range map[string][]float64{"old": {10, 11, 12, 13, 14}, "new": {5, 6, 7, 8, 9}} {
		r := &report.Report{Schema: report.Schema, Experiments: []*report.Experiment{{Name: "e", Status: report.Done, Plots: []*report.Plot{
			{Name: "p", Y: report.Axis{Unit: "us"}, Series: []report.Series{{Name: "s", Points: []report.Point{report.NewPoint(1, runs)}}}},
		}}}}
		if err := errors.Join(os.Mkdir(filepath.Join(dir, name), 0o755), r.Save(filepath.Join(dir, name))); err != nil {
			t.Fatal(err)
		}
	}
	report1, report2 := filepath.Join(dir, "old", report.File), filepath.Join(dir, "new", report.File)
	text := filepath.Join(dir, "text")
	if err := os.WriteFile(text, []byte("rx 1"), 0o600); err != nil {
		t.Fatal(err)
	}
	other, lookalike := filepath.Join(dir, "other.json"), filepath.Join(dir, "lookalike.json")
	if err := errors.Join(os.WriteFile(other, []byte(`{"name":"tool"}`), 0o600), os.WriteFile(lookalike, []byte(`{"experiments":[]}`), 0o600)); err != nil {
		t.Fatal(err)
	}
	svg, png := filepath.Join(dir, "a.svg"), filepath.Join(dir, "a.png")
	for _, tc := range []struct {
		args []string
		want string // in the output, or in the error
		bad  bool
	}{
		{[]string{before, after}, "Rows: 1 worse, 0 better, 0 within noise", false},
		{[]string{after, before}, "Rows: 0 worse, 1 better, 0 within noise", false},
		{[]string{before, before}, "Rows: 0 worse, 0 better, 1 within noise", false},
		{[]string{before, after, "--plot", svg}, "Rows: 1 worse, 0 better, 0 within noise, 0 too few runs.", false},
		{[]string{before, after, "--plot", png, "--json"}, `"verdict": "worse"`, false},
		{[]string{report1, report2}, "Rows: 0 worse, 1 better, 0 within noise", false},
		{[]string{filepath.Join(dir, "old"), filepath.Join(dir, "new")}, "Rows: 0 worse, 1 better, 0 within noise", false},
		{[]string{dir, after}, "bench compare: open " + dir + "/results.json: no such file", true},
		{[]string{other, after}, "bench compare: " + other + ": neither the output of xspin bench X --json nor a report of xspin bench all", true},
		{[]string{lookalike, after}, "bench compare: " + lookalike + ": not a report of xspin bench all", true},
		{[]string{before, before, "--all"}, "\nWithin noise\n", false},
		{[]string{"--help"}, "A verdict takes 5 runs", false},
		{[]string{"--help"}, "what differs from one process to the next", false},
		{[]string{before}, "bench compare: want two results, and have 1", true},
		{[]string{before, filepath.Join(dir, "none")}, "bench compare: open " + dir + "/none: no such file", true},
		{[]string{text, after}, "bench compare: " + text + ": not the output of xspin bench --json", true},
		{[]string{before, after, "--plot", "a.pdf"}, "bench compare: --plot: a.pdf: want a name that ends with .svg or .png", true},
		{[]string{before, after, "--plot", filepath.Join(dir, "none", "a.svg")}, "bench compare: --plot: open " + dir + "/none/a.svg: no such file", true},
	} {
		root := benchCmd()
		root.SetArgs(append([]string{"compare"}, tc.args...))
		var out bytes.Buffer
		root.SetOut(&out)
		root.SetErr(&out)
		got := ""
		if err := root.Execute(); err != nil {
			got = err.Error()
		}
		if (got != "") != tc.bad {
			t.Errorf("%q: error %q", tc.args, got)
		}
		if !tc.bad {
			got = out.String()
		}
		if !strings.Contains(got, tc.want) {
			t.Errorf("%q: %q is not in\n%s", tc.args, tc.want, got)
		}
		if tc.want[0] == '"' && !json.Valid(out.Bytes()) {
			t.Errorf("not JSON: %s", got)
		}
	}
	for path, begin := range map[string]string{svg: "<?xml", png: "\x89PNG"} {
		if b, err := os.ReadFile(path); err != nil || !strings.HasPrefix(string(b), begin) {
			t.Errorf("%s begins with %.10q, error %v", path, b, err)
		}
	}
}
