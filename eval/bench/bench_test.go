// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/internal/quantile"
)

func TestTargetsAreMetByTheMedian(t *testing.T) {
	for _, tc := range []struct {
		name   string
		goal   Goal
		median float64
		better string
		target any
		met    any
	}{
		{"at least, above", AtLeast(0.8), 0.81, "higher", 0.8, true},
		{"at least, exactly", AtLeast(0.8), 0.8, "higher", 0.8, true},
		{"at least, below", AtLeast(0.8), 0.79, "higher", 0.8, false},
		{"at most, below", AtMost(150), 149, "lower", 150.0, true},
		{"at most, exactly", AtMost(150), 150, "lower", 150.0, true},
		{"at most, above", AtMost(150), 151, "lower", 150.0, false},
		{"at most nothing", AtMost(0), 0, "lower", 0.0, true},
		{"higher is better", Higher, 1, "higher", nil, nil},
		{"lower is better", Lower, 1, "lower", nil, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			row, err := Absolute("x", tc.goal, NewSide("x", "u", []float64{tc.median}))
			if err != nil {
				t.Fatal(err)
			}
			text, err := json.Marshal(row)
			if err != nil {
				t.Fatal(err)
			}
			var got map[string]any
			if err := json.Unmarshal(text, &got); err != nil {
				t.Fatal(err)
			}
			if got["better"] != tc.better || got["target"] != tc.target || got["met"] != tc.met {
				t.Errorf("%s", text)
			}
		})
	}
}

// A target that lies in the interval is neither met nor missed.
func TestAVerdictLooksAtTheInterval(t *testing.T) {
	runs := []float64{0.7, 0.8, 0.9} // the interval is all of them
	for _, c := range []struct {
		goal Goal
		want string
	}{
		{AtLeast(0.6), "met"}, {AtLeast(0.75), "within noise"}, {AtLeast(0.85), "within noise"}, {AtLeast(0.95), "missed"},
		{AtMost(0.6), "missed"}, {AtMost(0.75), "within noise"}, {AtMost(0.85), "within noise"}, {AtMost(0.95), "met"},
		{Higher, ""},
	} {
		row, err := Absolute("x", c.goal, NewSide("x", "u", runs))
		if err != nil || row.Verdict != c.want {
			t.Errorf("%+v of %v: %q, error %v, want %q", c.goal, row.CI95, row.Verdict, err, c.want)
		}
	}
}

// Who reads the figures of a busy machine is warned.
func TestABusyMachineIsWarnedOf(t *testing.T) {
	for load, want := range map[string]bool{"0.20": false, "1.00": false, "1.01": true, "17.3": true, "unknown": false} {
		e := Env{Load: load, CPUs: 4, Busy: busy(load, 4)}
		var out strings.Builder
		if err := NewDocument(e).WriteText(&out, false); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(out.String(), "WARNING: the machine was busy: a load of "+load+" on 4 CPUs") != want {
			t.Errorf("load %s: %s", load, &out)
		}
	}
}

// What has ended by now is in the load average still, and spoils nothing.
func TestThePresentCountsAndNotTheMinuteBefore(t *testing.T) {
	for _, tc := range []struct {
		used float64
		busy bool
		want string
	}{{0.02, true, ""}, {0.6, false, "the machine was busy: 60 % of the time of its CPUs was in use just before"}} {
		e := Env{Load: "1.90", CPUs: 2, Busy: tc.busy, Used: &tc.used}
		if got := e.Warning(); got != tc.want {
			t.Errorf("%g in use: %q, want %q", tc.used, got, tc.want)
		}
	}
}

func TestRowsCompareRunByRun(t *testing.T) {
	a, b := NewSide("a", "ns", []float64{10, 40, 30}), NewSide("b", "ns", []float64{5, 20, 10})
	ratio, err := Ratio("r", Higher, a, b)
	if err != nil || ratio.Median != 3 || ratio.Unit != "ratio" {
		t.Errorf("ratio %+v, error %v", ratio, err)
	}
	// The median of 5, 20, 20, not the difference of the medians 30 and 10.
	b.Runs[2] = 25
	diff, err := Difference("d", Lower, a, b)
	if err != nil || diff.Median != 5 || diff.Unit != "ns" || diff.CI95 != (quantile.Interval{5, 20}) {
		t.Errorf("difference %+v, error %v", diff, err)
	}
	abs, err := Absolute("m", Higher, a)
	if err != nil || abs.Median != 30 || abs.CI95 != (quantile.Interval{10, 40}) || abs.B != nil {
		t.Errorf("absolute %+v, error %v", abs, err)
	}
}

func TestRowsRefuseWhatIsNoFigure(t *testing.T) {
	side := func(x ...float64) Side { return NewSide("", "ns", x) }
	for name, err := range map[string]error{
		"ratio of different numbers of runs":      second(Ratio("x", Higher, side(1, 2), side(1))),
		"ratio to zero":                           second(Ratio("x", Higher, side(1), side(0))),
		"difference of different numbers of runs": second(Difference("x", Higher, side(1), side(1, 2))),
		"difference of nothing":                   second(Difference("x", Higher, side(), side())),
		"absolute of nothing":                     second(Absolute("x", Higher, side())),
		"absolute of infinity":                    second(Absolute("x", Higher, side(math.Inf(1)))),
	} {
		if !errors.Is(err, quantile.ErrSamples) || !strings.Contains(err.Error(), "row x") {
			t.Errorf("%s: error %v", name, err)
		}
	}
	d := NewDocument(Env{})
	boom := errors.New("boom")
	if err := d.Add("", Row{}, boom); !errors.Is(err, boom) || len(d.Results) != 0 {
		t.Errorf("error %v, %d rows", err, len(d.Results))
	}
}

func second(_ Row, err error) error { return err }

func TestSidesTakeTurns(t *testing.T) {
	var order string
	side := func(name string, err error) func(context.Context) error {
		return func(context.Context) error { order += name; return err }
	}
	if err := Rounds(t.Context(), 3, side("A", nil), side("B", nil)); err != nil || order != "ABABAB" {
		t.Errorf("order %s, error %v", order, err)
	}
	order = ""
	boom := errors.New("boom")
	if err := Rounds(t.Context(), 3, side("A", nil), side("B", boom)); !errors.Is(err, boom) || order != "AB" {
		t.Errorf("order %s, error %v", order, err)
	}
	order = ""
	ctx, cancel := context.WithCancel(t.Context())
	stop := func(context.Context) error { order += "S"; cancel(); return nil }
	if err := Rounds(ctx, 3, side("A", nil), stop, side("B", nil)); !errors.Is(err, context.Canceled) || order != "AS" {
		t.Errorf("order %s, error %v", order, err)
	}
}

func document(t *testing.T) *Document {
	t.Helper()
	d := NewDocument(Environment("xspin bench x", 3, time.Second))
	a, b := NewSide("what a is", "Mpps", []float64{2, 4, 3}), NewSide("what b is", "Mpps", []float64{4, 5, 6})
	lost := 0.25
	a.Lost, a.On = &lost, "XDP native"
	a.Add("packets_per_batch", []float64{64, 1, 32})
	a.Add("nothing", nil)
	row, err := Ratio("x/a_over_b", AtLeast(0.8), a, b)
	if err := d.Add("how it was done", row, err); err != nil {
		t.Fatal(err)
	}
	row, err = Absolute("x/b", Higher, b)
	if err := d.Add("how it was done", row, err); err != nil {
		t.Fatal(err)
	}
	return d
}

func TestJSONHasTheCommonShape(t *testing.T) {
	var out bytes.Buffer
	if err := document(t).WriteJSON(&out); err != nil {
		t.Fatal(err)
	}
	var got struct {
		Schema  int
		Env     map[string]any
		Results []map[string]any
	}
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if got.Schema != 1 || len(got.Results) != 2 {
		t.Fatalf("%s", out.String())
	}
	for _, key := range []string{"kernel", "cpu", "cpus", "arch", "go", "gomaxprocs", "command", "runs", "duration_s", "started", "load"} {
		if v := got.Env[key]; v == nil || v == "" {
			t.Errorf("env has %s = %v", key, v)
		}
	}
	r := got.Results[0]
	a := r["a"].(map[string]any)
	if r["name"] != "x/a_over_b" || r["unit"] != "ratio" || r["median"] != 0.6 || len(r["ci95"].([]any)) != 2 || r["target"] != 0.8 || r["met"] != false ||
		r["conditions"] != "how it was done" || r["b"] == nil ||
		a["median"] != 3.0 || len(a["runs"].([]any)) != 3 || a["lost"] != 0.25 || a["on"] != "XDP native" {
		t.Errorf("%v", r)
	}
	if more := a["more"].(map[string]any); len(more) != 1 || more["packets_per_batch"] != 32.0 {
		t.Errorf("more: %v", more)
	}
	r = got.Results[1]
	for _, key := range []string{"target", "met", "b"} {
		if _, there := r[key]; there {
			t.Errorf("an absolute row without target has %s", key)
		}
	}
	out.Reset()
	if err := NewDocument(Env{}).WriteJSON(&out); err != nil || !strings.Contains(out.String(), `"results": []`) {
		t.Errorf("without rows: %s, error %v", out.String(), err)
	}
}

func TestTextHasEveryRowAndEachNoteOnce(t *testing.T) {
	var out strings.Builder
	if err := document(t).WriteText(&out, true); err != nil {
		t.Fatal(err)
	}
	text := out.String()
	for _, want := range []string{"0.60    a / b", ">= 0.80  within noise", "x/a_over_b [1]\n    a  3.00 Mpps, 25.0 % lost: what a is [2]\n       packets_per_batch 32.0\n    b  5.00 Mpps: what b is\n", "x/b [1]", "2  XDP native\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q", want)
		}
	}
	for _, once := range []string{"how it was done", "XDP native"} {
		if n := strings.Count(text, once); n != 1 {
			t.Errorf("%q is there %d times", once, n)
		}
	}
	if t.Failed() {
		t.Log(text)
	}
	out.Reset()
	if err := document(t).WriteText(&out, false); err != nil || strings.Contains(strings.ToLower(out.String()), "target") || strings.Contains(out.String(), ">=") {
		t.Errorf("targets that nobody asked for, error %v:\n%s", err, out.String())
	}
}

func TestFiguresHaveThreeDigits(t *testing.T) {
	var got []string
	for _, x := range []float64{0, 0.00012, 0.0999, 0.1, -2.345, 12.34, 123.4, 13841, -99.96} {
		got = append(got, Figure(x))
	}
	want := []string{"0", "0.0001", "0.0999", "0.10", "-2.35", "12.3", "123", "13841", "-100.0"}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
