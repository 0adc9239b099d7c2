// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/xspin/xspin/demos/pingpong"
	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/report"
)

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
	pingpong.Host: "Linux", pingpong.NIC: "handlers", pingpong.XDP: "handlers in eBPF", pingpong.TC: "handlers in eBPF at tc", pingpong.HostNIC: "handlers and an application",
}

// pingpongParts are the parts of a round trip, bottom up.
var pingpongParts = []struct {
	name string
	of   func(*pingpong.Micros) float64
}{
	{"wire and client", func(m *pingpong.Micros) float64 { return m.WireAndClient }},
	{"dispatch", func(m *pingpong.Micros) float64 { return m.ArrivalToHandler }},
	{"handler", func(m *pingpong.Micros) float64 { return m.Handler }},
	{"application", func(m *pingpong.Micros) float64 { return m.Host }},
}

// pingpongQuantiles are what is told of the distribution.
var pingpongQuantiles = []struct {
	name string
	of   func(*pingpong.RTT) float64
}{
	{"minimum", func(r *pingpong.RTT) float64 { return r.Min }},
	{"median", func(r *pingpong.RTT) float64 { return r.P50 }},
	{"95th percentile", func(r *pingpong.RTT) float64 { return r.P95 }},
	{"99th percentile", func(r *pingpong.RTT) float64 { return r.P99 }},
}

// pingpongPlots measures figures 24 and 25 of D4.7: round trips by size, and their parts.
func pingpongPlots(ctx context.Context, t *trial) error {
	sizes := pick(t, sweep(16, 1416, 100), []int{16, 516, 1016, 1416})
	type key struct {
		proto rtt.Proto
		mode  pingpong.Mode
	}
	medians, spread, parts := map[key]*line{}, map[key]*line{}, map[key][]*line{}
	protos := []rtt.Proto{rtt.ICMP, rtt.UDP}
	for _, p := range protos {
		for _, m := range pingpong.Modes {
			tier := map[pingpong.Mode]string{pingpong.NIC: "user", pingpong.XDP: "kernel", pingpong.TC: "kernel", pingpong.HostNIC: "user"}[m]
			k := key{p, m}
			medians[k], spread[k] = newLine(pingpongNames[m], tier), newLine(pingpongNames[m], tier)
			for _, part := range pingpongParts {
				parts[k] = append(parts[k], newLine(part.name, tier))
			}
		}
	}
	err := bench.Rounds(ctx, t.runs, func(ctx context.Context) error {
		r, err := pingpong.Run(ctx, t.Lab, pingpong.Config{
			Protos: protos, Modes: pingpong.Modes, Sizes: sizes, Count: pingpongCount, Warmup: pingpongWarmup,
			Timeout: time.Second, ClientWait: rtt.Spin, ClientCPU: t.sender,
			Server: pingpong.ServerConfig{HPUs: pingpongHPUs, Wait: "adaptive", CPUs: []int{t.receiver}, AppSpin: pingpongSpin},
		}, nil)
		switch {
		case errors.Is(err, pingpong.ErrReplies): // the others are good
			t.benchConfig.warn(err.Error())
		case err != nil:
			return err
		}
		for _, res := range r.Results {
			if res.RTT == nil || res.Bad > 0 {
				continue
			}
			k := key{res.Proto, res.Measured()}
			medians[k].on = linkStates(r.Env.Links[k.mode])
			medians[k].add(float64(res.Size), res.RTT.P50, float64(res.Lost)/float64(res.Count))
			if res.Size == sizes[0] {
				for i, q := range pingpongQuantiles {
					spread[k].add(float64(i), q.of(res.RTT), -1)
				}
			}
			if res.Breakdown == nil {
				continue
			}
			for i, part := range pingpongParts {
				if us := part.of(res.Breakdown); us > 0 {
					parts[k][i].add(float64(res.Size), us, -1)
				}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, proto := range protos {
		echo := strings.ToUpper(string(proto)) + " echo"
		plot := report.Plot{
			Name: "pingpong-" + string(proto), Title: echo + ": round trip by payload size",
			X: report.Axis{Label: "payload", Unit: "bytes"}, Y: report.Axis{Label: "round trip, median", Unit: "us", Log: true}, // or FPsPIN's marks would press the lines together
		}
		var lines, quantiles []*line
		for _, mode := range pingpong.Modes {
			lines, quantiles = append(lines, medians[key{proto, mode}]), append(quantiles, spread[key{proto, mode}])
			for _, size := range sizes {
				if us, ok := fpspinRTT[proto][mode][size]; ok {
					plot.Marks = append(plot.Marks, report.Mark{
						Name: "FPsPIN: " + pingpongNames[mode], X: float64(size), Y: us, Source: "FPsPIN (D4.7, figure 24), an FPGA at 40 MHz and a Ryzen 7 2700: another machine",
					})
				}
			}
		}
		t.plot(plot, lines...)
		x := report.Axis{Label: "of the 100 pings of a run"}
		for _, q := range pingpongQuantiles {
			x.Names = append(x.Names, q.name)
		}
		t.plot(report.Plot{
			Name: fmt.Sprintf("pingpong-%s-spread", proto), Title: fmt.Sprintf("%s, %d bytes: distribution of round trips", echo, sizes[0]),
			X: x, Y: report.Axis{Label: "round trip", Unit: "us", Log: true},
		}, quantiles...)
		for _, mode := range []pingpong.Mode{pingpong.NIC, pingpong.HostNIC} {
			t.plot(report.Plot{
				Name:  fmt.Sprintf("pingpong-%s-parts-%s", proto, strings.ReplaceAll(string(mode), "+", "-")),
				Title: fmt.Sprintf("%s by %s: where the time goes", echo, pingpongNames[mode]), Stack: true,
				X: report.Axis{Label: "payload", Unit: "bytes"}, Y: report.Axis{Label: "part of the round trip, mean of the middle half", Unit: "us"},
			}, parts[key{proto, mode}]...)
		}
	}
	return nil
}

func sweep(from, to, step int) (all []int) {
	for x := from; x <= to; x += step {
		all = append(all, x)
	}
	return all
}
