// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/report"
	"github.com/xspin/xspin/eval/yardstick"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns/testbed"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

func benchBystander(ctx context.Context, lab *benchLab, cfg benchConfig, doc *bench.Document) error {
	if _, err := exec.LookPath("iperf3"); err != nil {
		cfg.warn(fmt.Sprintf("no rows bystander/*: iperf3 is needed (apt-get install iperf3): %v", err))
		return nil
	}
	for _, dir := range []struct {
		suffix, flow string
		args         []string
		goal         bench.Goal
	}{
		{"", "into the interface: the NIC's end receives the data", nil, bench.AtLeast(0.95)},
		{"_out", "out of the interface: the NIC's end sends the data and receives acknowledgements", []string{"-R"}, bench.Higher},
	} {
		type figures struct {
			gbit []float64
			on   string
		}
		var with, pass, none figures
		side := func(f *figures, attach func() (func() error, error)) func(context.Context) error {
			return func(ctx context.Context) (err error) {
				detach, err := attach()
				if err != nil {
					return err
				}
				defer func() { err = errors.Join(err, detach()) }()
				if f.on, err = lab.state(); err != nil {
					return err
				}
				gbit, err := lab.iperf(ctx, append(dir.args, "-t", strconv.Itoa(int(cfg.duration.Seconds())))...)
				f.gbit = append(f.gbit, gbit)
				return err
			}
		}
		err := bench.Rounds(ctx, cfg.runs,
			side(&with, func() (func() error, error) {
				n, err := lab.open(nic.Config{}, nic.ContextSpec{
					Name: "bench", Rulesets: []matcher.Ruleset{matcher.UDPPort(benchPort)},
					Handlers: hpu.Handlers{Payload: func(*hpu.HER) spin.Code { return spin.Success }},
				})
				if err != nil {
					return nil, err
				}
				return n.Close, nil
			}),
			side(&pass, func() (func() error, error) {
				y, err := lab.attach(plain(yardstick.Pass))
				if err != nil {
					return nil, err
				}
				return y.Close, nil
			}),
			side(&none, func() (func() error, error) { return func() error { return nil }, nil }))
		if err != nil {
			return err
		}
		describe := func(f *figures, what string) bench.Side {
			s := bench.NewSide(what, "Gbit/s", f.gbit)
			s.On = f.on
			return s
		}
		a := describe(&with, fmt.Sprintf("nic, %d HPUs, adaptive, one active context that matches nothing", nic.DefaultHPUs))
		b := describe(&pass, "a program that passes everything")
		c := describe(&none, "no XDP program")
		conditions := fmt.Sprintf("iperf3, one TCP stream, %s; client on CPU %d in the host's namespace, server on CPU %d in the NIC's", dir.flow, lab.sender, lab.receiver)
		row, err := bench.Ratio("bystander/tcp"+dir.suffix+"_over_pass", dir.goal, a, b)
		if err := doc.Add(conditions, row, err); err != nil {
			return err
		}
		row, err = bench.Ratio("bystander/tcp"+dir.suffix+"_over_none", bench.Higher, a, c)
		if err := doc.Add(conditions+"; any XDP program on one end of a veth pair takes TSO and GSO from the other end, as the driver has it, so that each segment is a frame: this is what costs, and a physical NIC, where the other end is on another machine, does not have it", row, err); err != nil {
			return err
		}
	}
	return nil
}

// bystanderPlot draws the rows: what TCP carries beside nothing, a bare program and a NIC.
func bystanderPlot(_ context.Context, t *trial) error {
	p := report.Plot{
		Name: "bystander-tcp", Title: "TCP through the interface, with and without XsPIN attached",
		X: report.Axis{Label: "attached to the interface", Names: []string{"no XDP program", "a bare XDP program", "XsPIN's NIC"}},
		Y: report.Axis{Label: "goodput of TCP", Unit: "Gbit/s"},
	}
	var lines []*line
	for _, dir := range []struct{ suffix, name string }{{"", "TCP into the interface"}, {"_out", "TCP out of the interface"}} {
		none, pass := t.row("bystander/tcp"+dir.suffix+"_over_none"), t.row("bystander/tcp"+dir.suffix+"_over_pass")
		if none == nil || pass == nil {
			continue // no iperf3, and it has been said
		}
		l := newLine(dir.name, "")
		var on []string
		for x, s := range []*bench.Side{none.B, pass.B, pass.A} {
			l.row(float64(x), s)
			on = append(on, p.X.Names[x]+": "+s.On)
		}
		l.on = strings.Join(on, ". ")
		lines = append(lines, l)
	}
	t.plot(p, lines...)
	return nil
}

// iperf runs one stream between the ends and returns what arrived, in Gbit/s. The
// arguments say how much, and -R which way.
func (l *benchLab) iperf(ctx context.Context, args ...string) (float64, error) {
	f, err := testbed.IPerf(ctx, l.Lab, l.sender, l.receiver, args...)
	return f.Gbps, err
}
