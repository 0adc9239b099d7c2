// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"

	"github.com/xspin/xspin/eval/bench"
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

// iperf runs one stream between the ends and returns what arrived, in Gbit/s. The
// arguments say how much, and -R which way.
func (l *benchLab) iperf(ctx context.Context, args ...string) (float64, error) {
	f, err := testbed.IPerf(ctx, l.Lab, l.sender, l.receiver, args...)
	return f.Gbps, err
}
