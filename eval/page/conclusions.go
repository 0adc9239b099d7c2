// SPDX-License-Identifier: Apache-2.0

package page

import (
	"fmt"
	"slices"
	"strings"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/report"
)

// Conclusions are sentences about what XsPIN is good for and what not, by what was measured.
type Conclusions struct {
	Heading string
	Lines   []string
}

// level is how far from 1 a ratio is that still is about the same.
const level = 0.05

// Conclude returns what a report says about XsPIN next to its peers: where it is better, the
// same and worse, by the intervals of ratios. What was not measured is left out.
func Conclude(r *report.Report) (all []Conclusions) {
	all = []Conclusions{{Heading: "Better"}, {Heading: "About the same"}, {Heading: "Worse"}}
	for _, f := range findings {
		head, ok := f[0].of(r)
		if !ok {
			continue
		}
		var line []string
		for _, p := range f {
			if row, ok := p.of(r); ok {
				figure := fmt.Sprintf("%s [%s, %s]", bench.Figure(row.Median), bench.Figure(row.CI95[0]), bench.Figure(row.CI95[1]))
				line = append(line, strings.Replace(p.text, "{}", figure, 1))
			}
		}
		i := 1
		switch low, high := head.CI95[0], head.CI95[1]; {
		case low > 1+level && head.Better == "higher", high < 1-level && head.Better == "lower":
			i = 0
		case low > 1+level, high < 1-level:
			i = 2
		}
		all[i].Lines = append(all[i].Lines, strings.Join(line, "; ")+".")
	}
	return slices.DeleteFunc(all, func(c Conclusions) bool { return len(c.Lines) == 0 })
}

// A finding is one line: the first of its parts says whether that is good news.
type finding []part

// A part has a ratio in place of its {}.
type part struct {
	text string
	of   func(*report.Report) (bench.Row, bool)
}

var findings = []finding{
	{
		{"UDP echo by a handler in Go, on a CPU of its own, takes {} of the time of a socket that blocks", row("rtt/udp_cross_core")},
		{"of one that spins, as the handler does, {}", row("rtt/udp_spin_over_spin")},
	},
	{{"ICMP echo by a handler in Go takes {} of the time of Linux, which answers on the client's CPU", row("rtt/icmp_awake_16")}},
	{{"A file by SLMP has {} of the goodput of TCP in frames of the same size", row("slmp/file_over_tcp_same_frames")}},
	{{"A file by SLMP has {} of the goodput of TCP with TSO", row("slmp/file_over_tcp")}, {"a gigabyte takes {} times the CPU time", costOfBytes}},
	{{"With 10 % of the frames lost, SLMP has {} of its goodput without loss", lossOfTenth}},
	{{"Other TCP traffic into a veth interface has {} of its goodput once XsPIN is attached: any XDP program there turns TSO off, on a veth pair but not on a physical NIC", row("bystander/tcp_over_none")}},
	{{"16 MPI messages (Simple) and what the receiver computes meanwhile take {} of the time with MPICH", row("ddt/overlap_simple_over_mpich")}},
	{{"If the receiver computes nothing, such messages have {} of the goodput of MPICH, over TCP with TSO", row("ddt/goodput_simple_over_mpich")}},
	{{"Scattering a message in memory has {} of the speed of MPI_Unpack, in the geometric mean of all types", row("ddt/place_over_unpack")}},
	{{"Two HPUs that share each message place {} of the packets of two that have messages of their own", sharedMessages}},
}

// row finds a row by its name.
func row(name string) func(*report.Report) (bench.Row, bool) {
	return func(r *report.Report) (bench.Row, bool) {
		for _, e := range r.Experiments {
			for _, row := range e.Rows {
				if row.Name == name {
					return row, true
				}
			}
		}
		return bench.Row{}, false
	}
}

// costOfBytes is the CPU time of SLMP for a gigabyte, of both ends, to that of TCP with TSO.
func costOfBytes(r *report.Report) (bench.Row, bool) {
	p := plot(r, "cost-bytes")
	if p == nil {
		return bench.Row{}, false
	}
	var sides [2][]float64 // by run
	for i, name := range []string{"SLMP, handlers", "TCP"} {
		for _, s := range p.Series {
			runs := runsAt(&s, float64(slices.Index(p.X.Names, name)))
			if sides[i] == nil {
				sides[i] = make([]float64, len(runs))
			}
			if len(runs) != len(sides[i]) {
				return bench.Row{}, false
			}
			for run, x := range runs {
				sides[i][run] += x
			}
		}
	}
	return ratio(bench.Lower, sides[0], sides[1])
}

// lossOfTenth is the goodput of SLMP with a tenth of the frames lost, to that without loss.
func lossOfTenth(r *report.Report) (bench.Row, bool) {
	if p := plot(r, "loss-goodput"); p != nil {
		for _, s := range p.Series {
			if s.Name == "SLMP" {
				return ratio(bench.Higher, runsAt(&s, 10), runsAt(&s, 0))
			}
		}
	}
	return bench.Row{}, false
}

// sharedMessages is how fast two HPUs are that share messages, to two that do not.
func sharedMessages(r *report.Report) (bench.Row, bool) {
	const rows = "ddt/strategy_hpus/Complex_apart/in_order/direct"
	shared, ok := row(rows)(r)
	own, ok2 := row(rows + "_by_message")(r)
	if !ok || !ok2 {
		return bench.Row{}, false
	}
	return ratio(bench.Higher, shared.A.Runs, own.A.Runs)
}

func ratio(g bench.Goal, a, b []float64) (bench.Row, bool) {
	row, err := bench.Ratio("", g, bench.NewSide("", "", a), bench.NewSide("", "", b))
	return row, err == nil
}

func plot(r *report.Report, name string) *report.Plot {
	for _, e := range r.Experiments {
		for _, p := range e.Plots {
			if p.Name == name {
				return p
			}
		}
	}
	return nil
}

func runsAt(s *report.Series, x float64) []float64 {
	for _, p := range s.Points {
		if p.X == x {
			return p.Runs
		}
	}
	return nil
}
