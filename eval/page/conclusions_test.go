// SPDX-License-Identifier: Apache-2.0

package page_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/page"
	"github.com/xspin/xspin/eval/report"
)

func ratioOf(t *testing.T, name string, g bench.Goal, x float64) bench.Row {
	t.Helper()
	r, err := bench.Ratio(name, g, bench.NewSide("a", "ns", []float64{x, x, x}), bench.NewSide("b", "ns", []float64{1, 1, 1}))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestConclusionsAreThoseOfTheRows(t *testing.T) {
	if c := page.Conclude(&report.Report{}); len(c) != 0 {
		t.Errorf("of nothing: %+v", c)
	}
	absolute := func(name string, runs ...float64) bench.Row {
		r, err := bench.Absolute(name, bench.Higher, bench.NewSide("a", "Mpps", runs))
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	series := func(name string, y ...float64) report.Series {
		s := report.Series{Name: name}
		for i, x := range []float64{0, 1, 10}[:len(y)] {
			s.Points = append(s.Points, report.NewPoint(x, []float64{y[i], y[i], y[i]}))
		}
		return s
	}
	r := &report.Report{Experiments: []*report.Experiment{
		{Rows: []bench.Row{
			ratioOf(t, "rtt/udp_cross_core", bench.Lower, 0.25), ratioOf(t, "rtt/udp_spin_over_spin", bench.Lower, 1.02), // one line
			ratioOf(t, "rtt/icmp_awake_16", bench.Lower, 2),
			ratioOf(t, "slmp/file_over_tcp_same_frames", bench.Higher, 0.97),
			ratioOf(t, "slmp/file_over_tcp", bench.Higher, 0.5),
			ratioOf(t, "ddt/place_over_unpack", bench.Higher, 1.5),
			absolute("ddt/strategy_hpus/Complex_apart/in_order/direct", 1, 1, 1), absolute("ddt/strategy_hpus/Complex_apart/in_order/direct_by_message", 4, 4, 4),
		}},
		{Plots: []*report.Plot{
			{Name: "loss-goodput", Series: []report.Series{series("TCP", 1, 1, 1), series("SLMP", 8, 8, 1)}},
			{Name: "cost-bytes", X: report.Axis{Names: []string{"SLMP, handlers", "TCP"}}, Series: []report.Series{series("sender's CPU", 2, 1), series("receiver's CPU", 4, 1)}},
		}},
	}}
	var got []string
	for _, c := range page.Conclude(r) {
		for _, l := range c.Lines {
			got = append(got, c.Heading+": "+strings.Join(strings.FieldsFunc(l, func(r rune) bool { return !strings.ContainsRune("0123456789.[]", r) }), " "))
		}
	}
	want := `Better: 0.25 [0.25 0.25] 1.02 [1.02 1.02].
Better: 1.50 [1.50 1.50] .
About the same: 0.97 [0.97 0.97] .
Worse: 2.00 [2.00 2.00] .
Worse: 0.50 [0.50 0.50] 3.00 [3.00 3.00] .
Worse: 10 0.12 [0.12 0.12] .
Worse: 0.25 [0.25 0.25] .`
	if s := strings.Join(got, "\n"); s != want {
		t.Errorf("got\n%s\nwant\n%s", s, want)
	}
}

func TestReasonsAreToldOnce(t *testing.T) {
	rows := []bench.Row{
		ratioOf(t, "rtt/icmp_awake_16", bench.AtMost(1), 2), ratioOf(t, "x", bench.AtMost(3), 2),
		ratioOf(t, "ddt/scale/hpu0", bench.AtLeast(3), 2), ratioOf(t, "rtt/icmp_awake_516", bench.AtMost(1), 2), ratioOf(t, "y", bench.AtMost(1), 2),
	}
	n, why := page.Notes(rows)
	if fmt.Sprint(n) != "[1 0 2 1 3]" || len(why) != 3 || why[0] != page.Reason("rtt/icmp_awake_1016") || why[2] != page.Reason("") {
		t.Errorf("%v %q", n, why)
	}
}

func TestBytesAreShownInUnitsOfTheirSize(t *testing.T) {
	for x, want := range map[float64]string{506: "506 bytes \u2264 2048", 20 << 10: "20.0 KiB \u2264 2.00", 7632848: "7.28 MiB \u2264 0.0020", 20107264: "19.2 MiB \u2264 0.0020"} {
		r, err := bench.Absolute("m", bench.AtMost(2048), bench.NewSide("a", "bytes", []float64{x, x, x}))
		if err != nil {
			t.Fatal(err)
		}
		if s := page.Show(r); s.Median+" "+s.Unit+" "+s.Target != want || s.Low != s.Median || s.High != s.Median {
			t.Errorf("%g: %+v, want %s", x, s, want)
		}
	}
}
