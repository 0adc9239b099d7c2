// SPDX-License-Identifier: Apache-2.0

package page_test

import (
	"fmt"
	"os"
	"path/filepath"
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
	messages := func(typ string, alone, theirs, beside, theirsBeside float64) *report.Plot {
		at := func(name string, y float64) report.Series {
			return report.Series{Name: name, Points: []report.Point{report.NewPoint(1, []float64{y * y, y * y, y * y}), report.NewPoint(16, []float64{y, y, y})}}
		}
		return &report.Plot{Name: "datatypes-" + typ + "-parallel", Series: []report.Series{at("XsPIN", alone), at("XsPIN, with GEMMs", beside), at("Open MPI over TCP", theirs), at("Open MPI over TCP, with GEMMs", theirsBeside), at("MPICH over TCP, with GEMMs", 20)}}
	}
	r := &report.Report{Experiments: []*report.Experiment{
		{Rows: []bench.Row{
			ratioOf(t, "rtt/udp_cross_core", bench.Lower, 0.25), ratioOf(t, "rtt/udp_spin_over_spin", bench.Lower, 1.02), // one line
			ratioOf(t, "rtt/icmp_awake_16", bench.Lower, 2), ratioOf(t, "rtt/icmp_awake_1416", bench.Lower, 2.5), // one line
			ratioOf(t, "slmp/file_over_tcp_same_frames", bench.Higher, 0.97),
			ratioOf(t, "slmp/file_over_tcp", bench.Higher, 0.5),
			ratioOf(t, "ddt/place_over_unpack", bench.Higher, 1.5),
			absolute("ddt/strategy_hpus/Complex_apart/in_order/direct", 1, 1, 1), absolute("ddt/strategy_hpus/Complex_apart/in_order/direct_by_message", 4, 4, 4),
		}},
		{Plots: []*report.Plot{
			messages("simple", 4, 12, 10, 8), messages("complex", 3, 12, 5, 10), // alone: one line
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
Better: 1 8.00 [8.00 8.00] .
Better: 16 1.25 [1.25 1.25] .
Better: 1.50 [1.50 1.50] .
About the same: 0.97 [0.97 0.97] .
About the same: 10 1.00 [1.00 1.00] 0.12 [0.12 0.12] .
Worse: 16 2.00 [2.00 2.00] 1416 2.50 [2.50 2.50].
Worse: 0.50 [0.50 0.50] 3.00 [3.00 3.00] .
Worse: 16 0.50 [0.50 0.50] .
Worse: 0.25 [0.25 0.25] 1.56 [1.56 1.56].
Worse: 16 0.33 [0.33 0.33] 0.25 [0.25 0.25].
Worse: 0.25 [0.25 0.25] .`
	if s := strings.Join(got, "\n"); s != want {
		t.Errorf("got\n%s\nwant\n%s", s, want)
	}
	// A figure that is not to be trusted concludes nothing.
	const finding = "of Complex at a time, while the receiver computes"
	for _, doubt := range []string{"", "not settled"} {
		r.Experiments[1].Plots[1].Series[1].Points[1].Doubt = doubt
		if got := strings.Contains(page.Summary(r), finding); got != (doubt == "") {
			t.Errorf("doubt %q: it says %q: %v", doubt, finding, got)
		}
	}
}

// A quick run has no rows of round trips, but pings; and it says what it has left out, of the
// experiments that it has measured.
func TestQuickRunsConcludeFromWhatTheyHave(t *testing.T) {
	series := func(name string, points map[float64]float64) report.Series {
		s := report.Series{Name: name}
		for x, y := range points {
			s.Points = append(s.Points, report.NewPoint(x, []float64{y, y, y}))
		}
		return s
	}
	echo := func(proto string, linux, handlers, kernel float64) *report.Plot {
		at := func(name string, y float64) report.Series {
			return series(name, map[float64]float64{16: y, 516: 99})
		}
		return &report.Plot{Name: "pingpong-" + proto, Series: []report.Series{at("Linux", linux), at("handlers", handlers), at("handlers in eBPF", kernel)}}
	}
	r := &report.Report{Quick: true, Experiments: []*report.Experiment{
		{Name: "pingpong", Status: report.Done, Plots: []*report.Plot{echo("udp", 20, 4, 1), echo("icmp", 2, 4, 1.98)}},
		{Name: "loss", Status: report.Done, Plots: []*report.Plot{{Name: "loss-goodput", Series: []report.Series{series("SLMP", map[float64]float64{0: 4, 5: 3})}}}},
		{Name: "strategies", Status: report.Failed},
	}}
	want := `Better:
* UDP echo by a handler in Go takes 0.20 [0.20, 0.20] of the time of a socket that blocks, in runs of 100 pings.
* UDP echo by a handler in eBPF takes 0.0500 [0.0500, 0.0500] of the time of a socket that blocks, in runs of 100 pings.
About the same:
* ICMP echo by a handler in eBPF takes 0.99 [0.99, 0.99] of the time of Linux, in runs of 100 pings.
Worse:
* ICMP echo by a handler in Go takes 2.00 [2.00, 2.00] of the time of Linux, which answers on the client's CPU, in runs of 100 pings.
* With 5 % of the frames lost, SLMP has 0.75 [0.75, 0.75] of its goodput without loss.
Not measured in a quick run:
* UDP echo in longer runs, next to sockets that block and that spin.
* ICMP echo in longer runs.
* Goodput with 10 % of the frames lost.
`
	if got := page.Summary(r); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	// A full run that has the rows tells those, and does not speak of quick runs.
	r.Quick = false
	r.Experiments[0].Rows = []bench.Row{ratioOf(t, "rtt/udp_cross_core", bench.Lower, 0.3), ratioOf(t, "rtt/icmp_awake_16", bench.Lower, 2.1), ratioOf(t, "kernel/udp_echo_cross_core", bench.Lower, 0.07), ratioOf(t, "kernel/icmp_16", bench.Lower, 0.87)}
	got := page.Summary(r)
	for _, s := range []string{"on a CPU of its own, takes 0.30", "ICMP echo of 16 bytes by a handler in Go takes 2.10", "on the client's CPU, takes 0.0700", "ICMP echo by a handler in eBPF takes 0.87"} {
		if !strings.Contains(got, s) {
			t.Errorf("%q is not in\n%s", s, got)
		}
	}
	for _, s := range []string{"quick", "0.20", "2.00"} {
		if strings.Contains(got, s) {
			t.Errorf("%q is in\n%s", s, got)
		}
	}
}

// An interval around 1 that is wide does not say that both are about the same.
func TestWhatRunsDoNotTellIsSaid(t *testing.T) {
	for _, tc := range []struct {
		runs []float64
		want string
	}{
		{[]float64{0.9, 1, 1.1}, "About the same:"},
		{[]float64{0.3, 1, 1.6}, "Not clear, as runs differ:"},
		{[]float64{1.2, 2, 3}, "Better:"},
	} {
		row, err := bench.Ratio("slmp/file_over_tcp_same_frames", bench.Higher, bench.NewSide("a", "Gbit/s", tc.runs), bench.NewSide("b", "Gbit/s", []float64{1, 1, 1}))
		if err != nil {
			t.Fatal(err)
		}
		if got := page.Summary(&report.Report{Experiments: []*report.Experiment{{Rows: []bench.Row{row}}}}); !strings.HasPrefix(got, tc.want) {
			t.Errorf("%v: %s, want %s", tc.runs, got, tc.want)
		}
	}
}

// A ratio is called better in the summary and in the tables below it, or in neither.
func TestThereIsOneRuleForAboutTheSame(t *testing.T) {
	for _, tc := range []struct {
		ratio         float64
		better, worse bool
	}{{1.04, false, false}, {1.07, true, false}, {0.97, false, false}, {0.94, false, true}} {
		row := ratioOf(t, "slmp/file_over_tcp_same_frames", bench.Higher, tc.ratio)
		row.B.Peer = "TCP"
		r := &report.Report{Schema: report.Schema, Experiments: []*report.Experiment{{Name: "messages", Title: "Messages", Status: report.Done, Rows: []bench.Row{row}}}}
		dir := t.TempDir()
		if err := page.Write(dir, r); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(dir, page.Index))
		if err != nil {
			t.Fatal(err)
		}
		text, summary := string(b), page.Summary(r)
		for what, got := range map[string][2]bool{
			"summary": {strings.HasPrefix(summary, "Better:"), strings.HasPrefix(summary, "Worse:")},
			"tables":  {strings.Contains(text, "<h3>Faster than"), strings.Contains(text, "<h3>Slower than")},
		} {
			if got != [2]bool{tc.better, tc.worse} {
				t.Errorf("%g: the %s call it better, worse: %v; want %v, %v", tc.ratio, what, got, tc.better, tc.worse)
			}
		}
	}
}

func TestReasonsAreToldOnce(t *testing.T) {
	rows := []bench.Row{
		ratioOf(t, "rtt/icmp_awake_16", bench.AtMost(1), 2), ratioOf(t, "x", bench.AtMost(3), 2),
		ratioOf(t, "match/drop4x4_over_drop", bench.AtLeast(3), 2), ratioOf(t, "rtt/icmp_awake_516", bench.AtMost(1), 2), ratioOf(t, "y", bench.AtMost(1), 2),
	}
	n, why := page.Notes(rows)
	if fmt.Sprint(n) != "[1 0 2 1 3]" || len(why) != 3 || why[0] != page.Reason("rtt/icmp_awake_1016") || why[2] != page.Reason("") {
		t.Errorf("%v %q", n, why)
	}
}

// A reason of some rows is not that of others whose names begin alike.
func TestReasonsAreThoseOfTheLongestName(t *testing.T) {
	if page.Reason("slmp/file_over_tcp_same_frames") == page.Reason("slmp/file_over_tcp") || page.Reason("slmp/file") != page.Reason("") {
		t.Error("a row has the reason of another")
	}
}

// A user of a quick run found that this one was not explained.
func TestAllocationsOfShortRunsHaveAReason(t *testing.T) {
	for _, row := range []string{"slmp/allocs_per_packet_small", "rtt/icmp_awake_16"} {
		if page.Reason(row) == page.Reason("") {
			t.Errorf("%s has no reason", row)
		}
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
