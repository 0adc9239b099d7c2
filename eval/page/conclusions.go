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

const (
	// level is how far from 1 a ratio is that still is about the same.
	level = 0.05
	// unclear is how many times lower the low end of an interval around 1 is than the high
	// one, if nothing can be said.
	unclear = 1.5
)

// standing is 1 if a ratio is better than about the same, with its whole interval, -1 if it is
// worse, and else 0.
func standing(r *bench.Row) int {
	sign := 0
	switch {
	case r.CI95[0] > 1+level:
		sign = 1
	case r.CI95[1] < 1-level:
		sign = -1
	}
	if r.Better == "lower" {
		return -sign
	}
	return sign
}

// Conclude returns what a report says about XsPIN next to its peers: where it is better, the
// same and worse, by the intervals of ratios, what these do not tell, and what only a full run
// would. What was not measured for another reason is left out.
func Conclude(r *report.Report) (all []Conclusions) {
	all = []Conclusions{{Heading: "Better"}, {Heading: "About the same"}, {Heading: "Worse"}, {Heading: "Not clear, as runs differ"}, {Heading: "Not measured in a quick run"}}
	for _, f := range findings {
		parts := f.parts
		head, ok := parts[0].of(r)
		if e := r.Experiment(f.experiment); !ok && r.Quick && f.full != "" && e != nil && e.Status == report.Done {
			all[4].Lines = append(all[4].Lines, f.full+".")
		}
		if !ok && len(f.instead) > 0 {
			parts = f.instead
			head, ok = parts[0].of(r)
		}
		if !ok {
			continue
		}
		var line []string
		for _, p := range parts {
			if row, ok := p.of(r); ok {
				figure := fmt.Sprintf("%s [%s, %s]", bench.Figure(row.Median), bench.Figure(row.CI95[0]), bench.Figure(row.CI95[1]))
				line = append(line, strings.Replace(p.text, "{}", figure, 1))
			}
		}
		i := 1 - standing(&head)
		if i == 1 && head.CI95[1] > unclear*head.CI95[0] {
			i = 3
		}
		all[i].Lines = append(all[i].Lines, strings.Join(line, "; ")+".")
	}
	return slices.DeleteFunc(all, func(c Conclusions) bool { return len(c.Lines) == 0 })
}

// Summary is what a report says about XsPIN, for a terminal.
func Summary(r *report.Report) string {
	var b strings.Builder
	for _, c := range Conclude(r) {
		fmt.Fprintf(&b, "%s:\n", c.Heading)
		for _, l := range c.Lines {
			fmt.Fprintf(&b, "* %s\n", l)
		}
	}
	return b.String()
}

// A finding is one line: the first of its parts says whether that is good news.
type finding struct {
	parts      []part
	instead    []part // if the first part was not measured
	experiment string // that measures the parts
	full       string // what they tell that a quick run does not, "" if it does
}

// A part has a ratio in place of its {}.
type part struct {
	text string
	of   func(*report.Report) (bench.Row, bool)
}

var findings = []finding{
	{
		parts: []part{
			{"UDP echo by a handler in Go, on a CPU of its own, takes {} of the time of a socket that blocks, if the client blocks, too", row("rtt/udp_cross_core")},
			{"if socket and client spin, as the handler does, {}", row("rtt/udp_spin_over_spin")},
		},
		instead:    []part{{"UDP echo by a handler in Go takes {} of the time of a socket that blocks, in runs of 100 pings", pings("udp", "handlers")}},
		experiment: "pingpong", full: "UDP echo in longer runs, next to sockets that block and that spin",
	},
	{
		parts:   []part{{"UDP echo by a handler in eBPF, on the client's CPU, takes {} of the time of a socket on another CPU, if client and socket block", row("kernel/udp_echo_cross_core")}},
		instead: []part{{"UDP echo by a handler in eBPF takes {} of the time of a socket that blocks, in runs of 100 pings", pings("udp", "handlers in eBPF")}},
	},
	{
		parts: []part{
			{"ICMP echo of 16 bytes by a handler in Go takes {} of the time of Linux, which answers on the client's CPU", row("rtt/icmp_awake_16")},
			{"of 1416 bytes {}", row("rtt/icmp_awake_1416")},
		},
		instead:    []part{{"ICMP echo by a handler in Go takes {} of the time of Linux, which answers on the client's CPU, in runs of 100 pings", pings("icmp", "handlers")}},
		experiment: "pingpong", full: "ICMP echo in longer runs",
	},
	{
		parts:   []part{{"ICMP echo by a handler in eBPF takes {} of the time of Linux; both answer on the client's CPU", row("kernel/icmp_16")}},
		instead: []part{{"ICMP echo by a handler in eBPF takes {} of the time of Linux, in runs of 100 pings", pings("icmp", "handlers in eBPF")}},
	},
	{parts: []part{{"A file by SLMP has {} of the goodput of TCP in frames of the same size", row("slmp/file_over_tcp_same_frames")}}},
	{parts: []part{
		{"A file by SLMP has {} of the goodput of TCP with TSO", row("slmp/file_over_tcp")},
		{"a gigabyte takes {} times the CPU time", costOfBytes},
	}},
	{parts: []part{{"With 1 % of the frames lost, SLMP has {} of the goodput of TCP", lossOverTCP(1)}}},
	{
		parts:      []part{{"With 10 % of the frames lost, SLMP has {} of the goodput of TCP", lossOverTCP(10)}, {"{} of its own without loss", loss(10)}},
		instead:    []part{{"With 5 % of the frames lost, SLMP has {} of its goodput without loss", loss(5)}},
		experiment: "loss", full: "Goodput with 10 % of the frames lost",
	},
	{parts: []part{
		{"A file into a window, by handlers in eBPF at tc, has {} of the goodput of TCP with TSO", row("tc/file_over_tcp")},
		{"a gigabyte takes {} of the CPU time", row("tc/cpu_per_gb_over_tcp")},
	}},
	{parts: []part{{"Two files at once, into windows, by handlers in eBPF at tc, have {} of the goodput of one TCP stream or two, whichever is faster", row("tc/two_files_over_tcp")}}},
	{parts: []part{{"Messages of 4 MiB, one at a time, by handlers in eBPF at tc, have {} of the goodput of MPICH", row("tc/message_4MiB_one_at_a_time")}}},
	{parts: []part{{"Other TCP traffic into a veth interface has {} of its goodput while a context is at tc", row("tc/bystander_tcp")}}},
	{parts: []part{{"Other TCP traffic into a veth interface has {} of its goodput while a context is at xdp, as those on HPUs are: any XDP program there turns TSO off, on a veth pair but not on a physical NIC", row("bystander/tcp_over_none")}}},
	{
		parts:      []part{{"16 MPI messages (Simple) and what the receiver computes meanwhile take {} of the time with MPICH", row("ddt/overlap_simple_over_mpich")}},
		experiment: "datatypes", full: "The time that MPI messages take and what the receiver computes meanwhile, next to MPICH",
	},
	{parts: []part{{"16 MPI messages of Simple at a time, while the receiver computes, have {} of the goodput of Open MPI", messages("simple", ", with GEMMs", 16, "Open MPI")}}},
	{parts: []part{{"16 MPI messages of Complex at a time, while the receiver computes, have {} of the goodput of Open MPI", messages("complex", ", with GEMMs", 16, "Open MPI")}}},
	{parts: []part{
		{"One MPI message of Simple at a time, while the receiver computes, has {} of the goodput of MPICH", messages("simple", ", with GEMMs", 1, "MPICH")},
		{"of Open MPI {}", messages("simple", ", with GEMMs", 1, "Open MPI")},
	}},
	{
		parts:      []part{{"If the receiver computes nothing and lends the NIC its CPU, messages of Simple have {} of the goodput of MPICH, over TCP with TSO", row("ddt/goodput_simple_over_mpich")}},
		experiment: "datatypes", full: "Goodput of MPI messages if the receiver computes nothing, next to MPICH",
	},
	{parts: []part{
		{"If the receiver computes nothing, and the NIC shares the sender's CPU, 16 messages of Simple at a time have {} of the goodput of Open MPI", messages("simple", "", 16, "Open MPI")},
		{"of Complex {}", messages("complex", "", 16, "Open MPI")},
	}},
	{
		parts:      []part{{"Scattering a message in memory has {} of the speed of MPI_Unpack, in the geometric mean of all types", row("ddt/place_over_unpack")}},
		experiment: "strategies", full: "Scattering a message in memory next to MPI_Unpack, in the mean of all types",
	},
	{
		parts:      []part{{"Two HPUs that share each message place {} of the packets of two that have messages of their own", sharedMessages}},
		instead:    []part{{"Two HPUs that share each message of 1 MiB place {} of the bytes of two that have messages of their own", sharedBytes}},
		experiment: "strategies", full: "Two HPUs that share messages, with packets in order and shuffled",
	},
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
	if p.Plot == nil {
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

// pings is the round trip of 16 bytes that somebody of the ping-pong's plots answers, to that
// of Linux.
func pings(proto, who string) func(*report.Report) (bench.Row, bool) {
	return func(r *report.Report) (bench.Row, bool) {
		const size = 16
		p := plot(r, "pingpong-"+proto)
		return ratio(bench.Lower, p.runs(who, size), p.runs("Linux", size))
	}
}

// loss is the goodput of SLMP with so many percent of the frames lost, to that without loss.
func loss(percent float64) func(*report.Report) (bench.Row, bool) {
	return func(r *report.Report) (bench.Row, bool) {
		p := plot(r, "loss-goodput")
		return ratio(bench.Higher, p.runs("SLMP", percent), p.runs("SLMP", 0))
	}
}

// lossOverTCP is the goodput of SLMP with so many percent of the frames lost, to that of TCP.
func lossOverTCP(percent float64) func(*report.Report) (bench.Row, bool) {
	return func(r *report.Report) (bench.Row, bool) {
		p := plot(r, "loss-goodput")
		return ratio(bench.Higher, p.runs("SLMP", percent), p.runs("TCP", percent))
	}
}

// messages is the goodput of so many messages of a datatype at a time, to that with an MPI library.
func messages(typ, with string, atATime float64, peer string) func(*report.Report) (bench.Row, bool) {
	return func(r *report.Report) (bench.Row, bool) {
		p := plot(r, "datatypes-"+typ+"-parallel")
		return ratio(bench.Higher, p.runs("XsPIN"+with, atATime), p.runs(peer+" over TCP"+with, atATime))
	}
}

// sharedBytes is how fast two HPUs place that share messages, to two that do not.
func sharedBytes(r *report.Report) (bench.Row, bool) {
	p := plot(r, "strategies-hpus")
	return ratio(bench.Higher, p.runs("direct, XsPIN's own", 2), p.runs("direct, each HPU with messages of its own", 2))
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

// figures are those of a plot, which may be nil: then it has none.
type figures struct{ *report.Plot }

func plot(r *report.Report, name string) figures {
	for _, e := range r.Experiments {
		for _, p := range e.Plots {
			if p.Name == name {
				return figures{p}
			}
		}
	}
	return figures{}
}

// runs are those of a series at x, nil if it was not measured there or cannot be trusted.
func (f figures) runs(series string, x float64) []float64 {
	if f.Plot == nil {
		return nil
	}
	for _, s := range f.Series {
		if s.Name == series {
			return runsAt(&s, x)
		}
	}
	return nil
}

func runsAt(s *report.Series, x float64) []float64 {
	for _, p := range s.Points {
		if p.X == x && p.Doubt == "" {
			return p.Runs
		}
	}
	return nil
}
