// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
)

// runs are 11 samples around a figure, by a relative spread.
func runs(seed uint64, around, spread float64) []float64 {
	rnd := rand.New(rand.NewPCG(seed, 1))
	x := make([]float64, 11)
	for i := range x {
		x[i] = around * (1 + spread*(2*rnd.Float64()-1))
	}
	return x
}

func documentOf(rows ...Row) *Document {
	d := NewDocument(Environment("xspin bench test", 11, 1))
	d.Env.Load, d.Env.Busy = "0.00", false
	d.Results = rows
	return d
}

func must(r Row, err error) Row {
	if err != nil {
		panic(err)
	}
	return r
}

func TestCompareTellsChangesFromNoise(t *testing.T) {
	side := func(seed uint64, x float64) Side { return NewSide("it", "ns", runs(seed, x, 0.05)) }
	for _, tc := range []struct {
		name          string
		before, after Row
		want          string
		relative      float64
	}{
		{"faster", must(Absolute("r", Lower, side(1, 100))), must(Absolute("r", Lower, side(2, 80))), Better, -0.2},
		{"slower", must(Absolute("r", Lower, side(1, 100))), must(Absolute("r", Lower, side(2, 120))), Worse, 0.2},
		{"more", must(Absolute("r", Higher, side(1, 100))), must(Absolute("r", Higher, side(2, 120))), Better, 0.2},
		{"less", must(Absolute("r", AtLeast(1), side(1, 100))), must(Absolute("r", AtLeast(1), side(2, 80))), Worse, -0.2},
		{"the same", must(Absolute("r", Lower, side(1, 100))), must(Absolute("r", Lower, side(5, 100))), Noise, 0},
		{"ratio", must(Ratio("r", Higher, side(1, 100), side(2, 50))), must(Ratio("r", Higher, side(3, 100), side(4, 100))), Worse, -0.5},
		{"both sides slower", must(Ratio("r", Higher, side(1, 100), side(2, 50))), must(Ratio("r", Higher, side(3, 200), side(4, 100))), Noise, 0},
		{"four runs", must(Absolute("r", Lower, NewSide("it", "ns", []float64{100, 101, 102, 103}))), must(Absolute("r", Lower, NewSide("it", "ns", []float64{200, 201, 202, 203}))), TooFew, 1},
		{"difference", must(Difference("r", Lower, side(1, 1000), side(2, 500))), must(Difference("r", Lower, side(3, 1000), side(4, 100))), Worse, 0.8},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := Compare("a", documentOf(tc.before), "b", documentOf(tc.after))
			if len(c.Changes) != 1 || len(c.Others) != 0 || len(c.Differs) != 0 {
				t.Fatalf("%+v", c)
			}
			ch := c.Changes[0]
			if ch.Verdict != tc.want || *ch.Relative < tc.relative-0.15 || *ch.Relative > tc.relative+0.15 || ch.RelativeCI[0] > *ch.Relative || ch.RelativeCI[1] < *ch.Relative {
				t.Errorf("%+v, want %s and %g", ch, tc.want, tc.relative)
			}
		})
	}
}

// A figure that was 0 has no change in percent, and what has become of it is told.
func TestCompareFromZero(t *testing.T) {
	of := func(x float64, conditions string) *Document {
		r := must(Absolute("r", Lower, NewSide("it", "1/packet", []float64{x, x, x, x, x})))
		r.Conditions = conditions
		return documentOf(r)
	}
	c := Compare("a", of(0, "one"), "b", of(5, "two"))
	if ch := c.Changes[0]; ch.Verdict != Worse || ch.Relative != nil || ch.CI95 != [2]float64{5, 5} {
		t.Errorf("%+v", ch)
	}
	var b bytes.Buffer
	if err := c.WriteText(&b, false); err != nil || !strings.Contains(b.String(), "+5.00  [+5.00, +5.00]") || !strings.Contains(b.String(), "WARNING 1 row of r/*: other conditions") {
		t.Errorf("%s, error %v", b.String(), err)
	}
}

// Of rows that have not changed, one in twenty is called changed by chance, and not many
// more, however few the runs.
func TestCompareIsSeldomWrong(t *testing.T) {
	const rows = 100
	for _, n := range []int{5, 11} {
		wrong := 0
		for i := range uint64(rows) {
			row := func(seed uint64) Row {
				rnd := rand.New(rand.NewPCG(seed, 7))
				x := make([]float64, n)
				for i := range x {
					x[i] = 100 + 5*rnd.NormFloat64()
				}
				return must(Absolute("r", Lower, NewSide("it", "ns", x)))
			}
			if c := Compare("a", documentOf(row(2*i)), "b", documentOf(row(2*i+1))); c.Changes[0].Verdict != Noise {
				wrong++
			}
		}
		t.Logf("%d runs: %d of %d", n, wrong, rows)
		if wrong > rows/10 {
			t.Errorf("%d runs: %d of %d rows that have not changed are called changed", n, wrong, rows)
		}
	}
}

func TestCompareSaysWhatItDoesNotCompare(t *testing.T) {
	a := must(Absolute("gone", Lower, NewSide("it", "ns", []float64{1})))
	b := must(Absolute("new", Lower, NewSide("it", "ns", []float64{1})))
	us, ms := must(Absolute("unit", Lower, NewSide("it", "us", []float64{1}))), must(Absolute("unit", Lower, NewSide("it", "ms", []float64{1})))
	alone, paired := must(Absolute("sides", Lower, NewSide("it", "ns", []float64{1}))), must(Difference("sides", Lower, NewSide("it", "ns", []float64{2}), NewSide("it", "ns", []float64{1})))
	other := must(Absolute("other", Lower, NewSide("it", "ns", []float64{1})))
	opposite := other
	opposite.Better = "higher"
	forged := must(Absolute("forged", Lower, NewSide("it", "ns", []float64{1})))
	forged.Median = 2
	before, after := documentOf(a, us, alone, other, forged), documentOf(b, ms, paired, opposite, forged)
	before.Env.Kernel, before.Env.Busy = "Linux 0.1", true
	c := Compare("a.json", before, "b.json", after)
	var b1 bytes.Buffer
	if err := c.WriteText(&b1, true); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"new: only in b.json", "gone: only in a.json", "unit: in us before, in ms after", "sides: compares in one of the documents only",
		"other: better if lower before, better if higher after", "forged: a median of 2 is not that of its runs, 1",
		"WARNING kernel: Linux 0.1 before, ", "WARNING a.json: the machine was busy", "Rows: 0 worse, 0 better",
	} {
		if !strings.Contains(b1.String(), want) {
			t.Errorf("%q is not in\n%s", want, b1.String())
		}
	}
}

func TestDocumentsAreReadAsWritten(t *testing.T) {
	d := documentOf(must(Ratio("r", AtLeast(2), NewSide("a", "ns", runs(1, 5, 0.1)), NewSide("b", "ns", runs(2, 5, 0.1)))))
	var b bytes.Buffer
	if err := d.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	got, err := ReadDocument(&b)
	if err != nil || !reflect.DeepEqual(got, d) {
		t.Errorf("read %+v, error %v; wrote %+v", got, err, d)
	}
	c := Compare("a", d, "b", got)
	var j bytes.Buffer
	if err := c.WriteJSON(&j); err != nil || !json.Valid(j.Bytes()) || *c.Changes[0].Relative != 0 {
		t.Errorf("%s, error %v", j.String(), err)
	}
}

func TestBadDocumentsAreRefused(t *testing.T) {
	const row = `{"name":"r","unit":"ns","median":1,"ci95":[1,1],"better":"lower","a":{"what":"","unit":"ns","median":1,"runs":[1]}}`
	for _, tc := range []struct{ text, want string }{
		{"", "not the output of xspin bench --json: unexpected end"},
		{"rx 1 2 3", "not the output of xspin bench --json: invalid"},
		{`{"schema":2}`, "schema 2: want 1"},
		{`{}`, "neither the output of xspin bench X --json nor a report of xspin bench all"},
		{`{"name":"tool","version":"1.0"}`, "neither the output of xspin bench X --json nor a report of xspin bench all"},
		{`{"schema":1,"experiments":[]}`, "no rows: not the output of xspin bench X --json"},
		{`{"schema":1,"results":[{"name":"a\u001b[2J"}]}`, "results[0]: no name and unit that can be printed"},
		{fmt.Sprintf(`{"schema":1,"results":[%s,%s]}`, row, row), "results[1]: a second row r"},
		{`{"schema":1,"results":[{}]}`, "results[0]: no name and unit"},
		{`{"schema":1,"results":[{"name":"r","better":"lower"}]}`, "row r: no runs"},
		{`{"schema":1,"results":[{"name":"r","better":"lower","a":{"runs":[1,2]},"b":{"runs":[1]}}]}`, "row r: 2 runs of a and 1 of b"},
		{`{"schema":1,"results":[{"name":"r","better":"nicer","a":{"runs":[1]}}]}`, `row r: better "nicer"`},
	} {
		if _, err := ReadDocument(strings.NewReader(tc.text)); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v, want %q", tc.text, err, tc.want)
		}
	}
	if _, err := ReadDocument(strings.NewReader(strings.Repeat(" ", maxDocument+1))); err == nil || !strings.Contains(err.Error(), "more than") {
		t.Errorf("error %v", err)
	}
}

func TestWhatIsNeitherBetterNorWorseIsNotCompared(t *testing.T) {
	d := documentOf(must(Absolute("r", Neither, NewSide("it", "segments", []float64{1, 2, 3}))))
	if err := d.Check(); err != nil || d.Results[0].Better != "" || d.Results[0].Verdict != "" {
		t.Errorf("%+v, error %v", d.Results[0], err)
	}
	if c := Compare("a", d, "b", d); len(c.Changes) != 0 || len(c.Others) != 1 || c.Others[0].Why != "neither higher nor lower is better" {
		t.Errorf("%+v", c)
	}
}

// What has changed is on top, the largest first; the rest is counted, and listed if asked for.
func TestTextBeginsWithWhatHasChanged(t *testing.T) {
	side := func(seed uint64, x float64) Side { return NewSide("it", "ns", runs(seed, x, 0.05)) }
	few := NewSide("it", "ns", []float64{1, 2, 3})
	before := documentOf(must(Absolute("e/same", Lower, side(1, 100))), must(Absolute("e/few", Lower, few)),
		must(Absolute("e/faster", Lower, side(1, 100))), must(Absolute("e/slower", Lower, side(1, 100))), must(Absolute("e/slowest", Lower, side(1, 100))))
	after := documentOf(must(Absolute("e/same", Lower, side(5, 100))), must(Absolute("e/few", Lower, few)),
		must(Absolute("e/faster", Lower, side(2, 50))), must(Absolute("e/slower", Lower, side(2, 150))), must(Absolute("e/slowest", Lower, side(2, 300))))
	c := Compare("a", before, "b", after)
	var short, long, asJSON bytes.Buffer
	if err := errors.Join(c.WriteText(&short, false), c.WriteText(&long, true), c.WriteJSON(&asJSON)); err != nil {
		t.Fatal(err)
	}
	inOrder := func(text string, want ...string) {
		t.Helper()
		rest := text
		for _, w := range want {
			_, after, ok := strings.Cut(rest, w)
			if !ok {
				t.Errorf("%q is not where it should be in\n%s", w, text)
				return
			}
			rest = after
		}
	}
	summary := []string{"Rows: 2 worse, 1 better, 1 within noise, 1 too few runs.", "Too few runs: a verdict takes 5 or more on both sides. A full run has them for most rows.", "\nWorse\n", "e/slowest", "e/slower", "\nBetter\n", "e/faster"}
	inOrder(short.String(), append(summary, "--all lists the other rows, too.\n")...)
	if strings.Contains(short.String(), "e/same") || strings.Contains(short.String(), "e/few") {
		t.Errorf("rows that have not changed:\n%s", short.String())
	}
	inOrder(long.String(), append(summary, "\nWithin noise\n", "e/same", "\nToo few runs\n", "e/few")...)
	if strings.Contains(long.String(), "--all") {
		t.Errorf("all of it tells how to get all:\n%s", long.String())
	}
	if n := strings.Count(asJSON.String(), `"verdict"`); n != 5 {
		t.Errorf("%d rows in the JSON, want 5", n)
	}
}

// Runs that differ in experiments, or in pace, are told in a line for each experiment.
func TestWhatDiffersIsToldByExperiment(t *testing.T) {
	of := func(conditions string, quick bool, names ...string) *Document {
		d := documentOf()
		d.Quick = quick
		for _, n := range names {
			r := must(Absolute(n, Lower, NewSide("it", "ns", []float64{1, 1, 1, 1, 1})))
			r.Experiment, _, _ = strings.Cut(n, "-")
			r.Conditions = conditions
			d.Results = append(d.Results, r)
		}
		return d
	}
	text := func(c *Comparison, all bool) string {
		var b bytes.Buffer
		if err := c.WriteText(&b, all); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	a := of("one", false, "x-1", "x-2", "y-1", "y-2", "y-3", "z-1")
	for _, tc := range []struct {
		b       *Document
		want    string
		without string
	}{
		{of("two", false, "x-1", "x-2", "y-1", "v-1", "v-2"), `
WARNING 2 rows of experiment x: other conditions
WARNING 1 row of experiment y: other conditions
  only in B: experiment v, 2 rows
  only in A: 2 rows of experiment y
  only in A: experiment z, 1 row`, "y-2"},
		{of("two", true, "x-1", "x-2", "y-1", "y-2", "y-3", "z-1"), `
WARNING B is a quick run, A is a full one: a quick run has fewer and shorter runs, and leaves rows out`, "conditions"},
	} {
		c := Compare("A", a, "B", tc.b)
		var got strings.Builder
		short := text(c, false)
		for _, l := range strings.Split(short, "\n") {
			if strings.HasPrefix(l, "WARNING") || strings.HasPrefix(l, "  only in") {
				got.WriteString("\n" + l)
			}
		}
		if got.String() != tc.want || strings.Contains(short, tc.without) {
			t.Errorf("got%s\nwant%s\nwithout %s, in\n%s", got.String(), tc.want, tc.without, short)
		}
		for _, ch := range c.Changes {
			if ch.Other != "conditions" {
				t.Errorf("the JSON lacks that %s has other conditions: %q", ch.Name, ch.Other)
			}
		}
	}
	if all := text(Compare("A", a, "B", of("one", false, "x-1")), true); !strings.Contains(all, "  y-2: only in A\n") {
		t.Errorf("all rows:\n%s", all)
	}
}
