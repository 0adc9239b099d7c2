// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/xspin/xspin/demos/pingpong"
	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/report"
	"github.com/xspin/xspin/internal/quantile"
)

// An experiment of `xspin bench all`.
type experiment struct {
	report.Experiment      // name and texts
	full, quick       pace // how much of it
	measure           func(context.Context, *benchLab, pace, benchConfig, *report.Experiment) error
}

// A pace is how much of an experiment is measured.
type pace struct {
	runs     int           // of each side
	duration time.Duration // of a run
	parts    string        // of a bench that has some; none: all
	sizes    []int         // of payloads, if the experiment sweeps them
	takes    time.Duration // about, all together
}

// experiments are those of `xspin bench all`, in the order of the page.
var experiments = []experiment{
	{
		report.Experiment{
			Name: "pingpong", Title: "Round trips by payload size",
			Shows: "How long a ping takes that is answered by Linux, by handlers on the NIC, or by handlers that ask an application, for each size of payload.",
			Method: "ICMP and UDP echo between two namespaces. The client, in a process of its own, spins; it is on one CPU, and who answers is on another. " +
				"A point is the median of the medians of all runs, of 100 pings each after 20 that do not count. Runs of the three take turns. " +
				"Linux answers UDP by a socket in a process of its own that blocks, and ICMP in the kernel, on the client's CPU. HPUs spin, then sleep. The application shares the CPU of the HPUs, so they wait for each other. " +
				"Of the parts of a round trip, dispatch is from the frame's arrival in the XDP program to the start of the handler.",
		},
		pace{runs: 20, sizes: sweep(16, 1416, 100), takes: 4 * time.Minute},
		pace{runs: 5, sizes: []int{16, 516, 1016, 1416}, takes: 12 * time.Second},
		pingpongPlots,
	},
	rowsOf("rtt", "Round trips next to Linux", pace{runs: 11, duration: 200 * time.Millisecond, takes: 2 * time.Minute}, pace{runs: 5, duration: 50 * time.Millisecond, takes: 30 * time.Second}),
	rowsOf("rx", "Packets a second", pace{runs: 11, duration: 300 * time.Millisecond, takes: 40 * time.Second}, pace{runs: 5, duration: 100 * time.Millisecond, takes: 15 * time.Second}),
	rowsOf("match", "Matching", pace{runs: 11, duration: 200 * time.Millisecond, takes: 40 * time.Second}, pace{runs: 5, duration: 50 * time.Millisecond, takes: 10 * time.Second}),
	rowsOf("slmp", "Files and messages", pace{runs: 5, duration: 2 * time.Second, takes: 15 * time.Minute}, pace{runs: 5, duration: 100 * time.Millisecond, parts: "file,noop,small,policy,fairness", takes: 60 * time.Second}),
	rowsOf("hostq", "Handlers and applications", pace{runs: 11, duration: 200 * time.Millisecond, takes: 2 * time.Minute}, pace{runs: 5, duration: 50 * time.Millisecond, takes: 30 * time.Second}),
	rowsOf("ddt", "MPI datatypes", pace{runs: 5, duration: time.Second, takes: 10 * time.Minute}, pace{runs: 5, duration: 50 * time.Millisecond, parts: "place,loop,commit", takes: 60 * time.Second}),
	rowsOf("bystander", "What others lose", pace{runs: 11, duration: time.Second, takes: 2 * time.Minute}, pace{runs: 5, duration: time.Second, takes: 30 * time.Second}),
}

func sweep(from, to, step int) (all []int) {
	for x := from; x <= to; x += step {
		all = append(all, x)
	}
	return all
}

// rowsOf makes an experiment of the bench of a name.
func rowsOf(name, title string, full, quick pace) experiment {
	b := benches[slices.IndexFunc(benches, func(b benchCommand) bool { return b.name == name })]
	return experiment{
		report.Experiment{Name: name, Title: title, Shows: b.short + ".", Method: b.long + " The rows are those of xspin bench " + name + "."},
		full, quick,
		func(ctx context.Context, lab *benchLab, p pace, cfg benchConfig, e *report.Experiment) error {
			measure := b.measure
			if b.flags != nil {
				fl := pflag.NewFlagSet(name, pflag.ContinueOnError)
				judge := b.flags(fl)
				if p.parts != "" {
					if err := fl.Parse([]string{"--only", p.parts}); err != nil {
						return err
					}
				}
				var err error
				if measure, err = judge(); err != nil {
					return err
				}
			}
			doc := bench.NewDocument(bench.Env{})
			err := measure(ctx, lab, cfg, doc)
			e.Rows = doc.Results
			return err
		},
	}
}

// pingpongCount and the others are those of FPsPIN's evaluation: 100 pings 20 times.
const (
	pingpongCount  = 100
	pingpongWarmup = 20
	pingpongHPUs   = 16
	pingpongSpin   = 20 * time.Microsecond
)

// Of FPsPIN on a Ryzen 7 2700 and an FPGA at 40 MHz, in microseconds by payload size:
// medians of the data that its repository ships, which figure 24 of D4.7 draws.
var fpspinRTT = map[rtt.Proto]map[pingpong.Mode]map[int]float64{
	rtt.ICMP: {
		pingpong.Host:    {16: 40, 516: 41, 1016: 41, 1416: 42},
		pingpong.HostNIC: {16: 39, 516: 46, 1016: 53, 1416: 59},
		pingpong.NIC:     {16: 27, 516: 47, 1016: 67, 1416: 83},
	},
	rtt.UDP: {
		pingpong.Host:    {16: 83, 516: 84, 1016: 82, 1416: 85},
		pingpong.HostNIC: {16: 60, 516: 63, 1016: 65, 1416: 62},
		pingpong.NIC:     {16: 42, 516: 42, 1016: 36, 1416: 36},
	},
}

// pingpongNames are the modes, as the legend has them.
var pingpongNames = map[pingpong.Mode]string{
	pingpong.Host: "Linux", pingpong.NIC: "handlers", pingpong.HostNIC: "handlers and an application",
}

// pingpongPlots measures figures 24 and 25 of D4.7: round trips by size, and their parts.
func pingpongPlots(ctx context.Context, lab *benchLab, p pace, cfg benchConfig, e *report.Experiment) error {
	type key struct {
		proto rtt.Proto
		mode  pingpong.Mode
		size  int
	}
	medians, lost, parts := map[key][]float64{}, map[key][]float64{}, map[key][]*pingpong.Micros{}
	on := map[pingpong.Mode]string{}
	protos := []rtt.Proto{rtt.ICMP, rtt.UDP}
	for range p.runs {
		r, err := pingpong.Run(ctx, lab.Lab, pingpong.Config{
			Protos: protos, Modes: pingpong.Modes, Sizes: p.sizes, Count: pingpongCount, Warmup: pingpongWarmup,
			Timeout: time.Second, ClientWait: rtt.Spin, ClientCPU: lab.sender,
			Server: pingpong.ServerConfig{HPUs: pingpongHPUs, Wait: "adaptive", CPUs: []int{lab.receiver}, AppSpin: pingpongSpin},
		}, nil)
		if err != nil {
			return err
		}
		for _, res := range r.Results {
			k := key{res.Proto, res.Mode, res.Size}
			medians[k] = append(medians[k], res.RTT.P50)
			lost[k] = append(lost[k], float64(res.Lost)/float64(res.Count))
			if res.Breakdown != nil {
				parts[k] = append(parts[k], res.Breakdown)
			}
		}
		for m, links := range r.Env.Links {
			on[m] = linkStates(links)
		}
	}
	for _, proto := range protos {
		plot := &report.Plot{
			Name: "pingpong-" + string(proto), Title: fmt.Sprintf("%s echo: round trip by payload size", strings.ToUpper(string(proto))),
			X: report.Axis{Label: "payload", Unit: "bytes"}, Y: report.Axis{Label: "round trip, median", Unit: "us"},
		}
		for _, mode := range pingpong.Modes {
			s := report.Series{Name: pingpongNames[mode], On: on[mode]}
			if mode != pingpong.Host {
				s.Tier = "user"
			}
			for _, size := range p.sizes {
				k := key{proto, mode, size}
				pt := report.NewPoint(float64(size), medians[k])
				l := quantile.Median(lost[k])
				pt.Lost = &l
				s.Points = append(s.Points, pt)
				if us, ok := fpspinRTT[proto][mode][size]; ok {
					plot.Marks = append(plot.Marks, report.Mark{
						Name: "FPsPIN: " + pingpongNames[mode], X: float64(size), Y: us, Source: "FPsPIN (D4.7, figure 24), an FPGA at 40 MHz and a Ryzen 7 2700: another machine",
					})
				}
			}
			plot.Series = append(plot.Series, s)
		}
		e.Plots = append(e.Plots, plot)
		for _, mode := range []pingpong.Mode{pingpong.NIC, pingpong.HostNIC} {
			plot := &report.Plot{
				Name:  fmt.Sprintf("pingpong-%s-parts-%s", proto, strings.ReplaceAll(string(mode), "+", "-")),
				Title: fmt.Sprintf("%s echo by %s: parts of a round trip", strings.ToUpper(string(proto)), pingpongNames[mode]), Stack: true,
				X: report.Axis{Label: "payload", Unit: "bytes"}, Y: report.Axis{Label: "part of the median round trip", Unit: "us"},
			}
			for _, part := range []struct {
				name string
				of   func(*pingpong.Micros) float64
			}{
				{"wire and client", func(m *pingpong.Micros) float64 { return m.WireAndClient }},
				{"dispatch", func(m *pingpong.Micros) float64 { return m.ArrivalToHandler }},
				{"handler", func(m *pingpong.Micros) float64 { return m.Handler }},
				{"application", func(m *pingpong.Micros) float64 { return m.Host }},
			} {
				if part.name == "application" && mode == pingpong.NIC {
					continue
				}
				s := report.Series{Name: part.name, Tier: "user", On: on[mode]}
				for _, size := range p.sizes {
					var runs []float64
					for _, m := range parts[key{proto, mode, size}] {
						runs = append(runs, part.of(m))
					}
					if len(runs) > 0 {
						s.Points = append(s.Points, report.NewPoint(float64(size), runs))
					}
				}
				plot.Series = append(plot.Series, s)
			}
			e.Plots = append(e.Plots, plot)
		}
	}
	return nil
}
