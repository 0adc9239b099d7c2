// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/peers"
	"github.com/xspin/xspin/eval/report"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/netns/testbed"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// cpuSeconds returns how long a CPU has not been idle since boot, interrupts included, in
// steps of 10 ms.
func cpuSeconds(stat string, cpu int) (float64, error) {
	for line := range strings.Lines(stat) {
		f := strings.Fields(line)
		if len(f) < 8 || f[0] != "cpu"+strconv.Itoa(cpu) {
			continue
		}
		ticks := 0.0
		for i, s := range f[1:8] { // user, nice, system, idle, iowait, irq, softirq
			x, err := strconv.ParseFloat(s, 64)
			if err != nil {
				return 0, fmt.Errorf("/proc/stat: %q: %w", line, err)
			}
			if i != 3 && i != 4 {
				ticks += x
			}
		}
		return ticks / 100, nil // USER_HZ is 100 wherever Go runs
	}
	return 0, fmt.Errorf("/proc/stat has no CPU %d", cpu)
}

// costOf returns the CPU seconds of sender and receiver while something runs.
func (l *benchLab) costOf(run func() error) (cost [2]float64, err error) {
	for _, sign := range []float64{-1, 1} {
		if sign > 0 {
			if err := run(); err != nil {
				return cost, err
			}
		}
		stat, err := os.ReadFile("/proc/stat")
		if err != nil {
			return cost, err
		}
		for i, cpu := range []int{l.sender, l.receiver} {
			s, err := cpuSeconds(string(stat), cpu)
			if err != nil {
				return cost, err
			}
			cost[i] += sign * s
		}
	}
	return cost, nil
}

// costPlots says what CPU time bytes and messages cost, on both ends.
func costPlots(ctx context.Context, t *trial) error {
	if t.sender == t.receiver {
		t.benchConfig.warn("cost is not measured: sender and receiver need a CPU each")
		return nil
	}
	const size = 256 << 20
	return t.withSLMP(pick(t, time.Second, 300*time.Millisecond), size, func(b *slmpBench) (err error) {
		window, free, err := memory(size)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, free()) }()
		source, err := b.file(size)
		if err != nil {
			return err
		}
		peer, err := buildPeer(ctx, "udp_batch", peers.UDPBatch)
		if err != nil {
			b.cfg.warn(fmt.Sprintf("cost of UDP sockets is not measured: %v", err))
		}
		var sides []func(context.Context) error
		plot := func(unit string) (*report.Plot, []*line) {
			return &report.Plot{Y: report.Axis{Label: "CPU time", Unit: unit}}, []*line{newLine("sender's CPU", ""), newLine("receiver's CPU", "")}
		}
		ons := map[*report.Plot]map[string]string{} // of the contestants of a plot, what was on
		gigabyte, perByte := plot("s/GB")
		million, perMessage := plot("s/million messages")
		// contestant adds one to a plot: what it runs says how many units were done, and what was on.
		contestant := func(p *report.Plot, lines []*line, name string, run func(context.Context, func(func() error) error) (float64, string, error)) {
			x := float64(len(p.X.Names))
			p.X.Names = append(p.X.Names, name)
			sides = append(sides, func(ctx context.Context) error {
				var cost [2]float64
				units, on, err := run(ctx, func(f func() error) (err error) {
					cost, err = b.costOf(f)
					return err
				})
				if err == nil && units <= 0 {
					err = errors.New("nothing was done")
				}
				if err != nil {
					return fmt.Errorf("%s: %w", name, err)
				}
				if ons[p] == nil {
					ons[p] = map[string]string{}
				}
				ons[p][name] = name + ": " + on
				for i, l := range lines {
					l.add(x, cost[i]/units, -1)
				}
				return nil
			})
		}
		const outstanding = 256
		mem, inKernel, err := kernelDeposit(size)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, mem.Close()) }()
		inKernel.Messages = 2 * outstanding
		// slmpTo has a context take what is sent.
		slmpTo := func(spec nic.ContextSpec, send func(context.Context) (units float64, err error)) func(context.Context, func(func() error) error) (float64, string, error) {
			return func(ctx context.Context, watched func(func() error) error) (units float64, on string, err error) {
				n, _, err := b.openContext(b.oneHPU(), spec)
				if err != nil {
					return 0, "", err
				}
				defer func() { err = errors.Join(err, n.Close()) }()
				unwire, err := b.wireFor(spec)
				if err != nil {
					return 0, "", err
				}
				defer func() { err = errors.Join(err, unwire()) }()
				if on, err = b.granted(n); err != nil {
					return 0, "", err
				}
				err = watched(func() (err error) {
					units, err = send(ctx)
					return err
				})
				return units, on, err
			}
		}
		file := func(ctx context.Context) (float64, error) {
			_, err := b.send(ctx, source, 0)
			return size / 1e9, err
		}
		contestant(gigabyte, perByte, "SLMP, handlers", slmpTo(depositSpec(window), file))
		contestant(gigabyte, perByte, "SLMP, handlers in eBPF", slmpTo(inKernel, file))
		tcp := func(ctx context.Context, watched func(func() error) error) (gb float64, on string, err error) {
			if on, err = b.state(); err != nil {
				return 0, "", err
			}
			err = watched(func() error {
				f, err := testbed.IPerf(ctx, b.Lab, b.sender, b.receiver, "-t", "1")
				gb = f.Gbps * f.Seconds / 8
				return err
			})
			return gb, on, err
		}
		if b.tcp {
			contestant(gigabyte, perByte, "TCP", tcp)
			contestant(gigabyte, perByte, "TCP, same frames", func(ctx context.Context, watched func(func() error) error) (gb float64, on string, err error) {
				n, _, err := b.openContext(b.oneHPU(), depositSpec(nil))
				if err != nil {
					return 0, "", err
				}
				defer func() { err = errors.Join(err, n.Close()) }()
				return tcp(ctx, watched)
			})
		}
		small := func(ctx context.Context) (done float64, err error) {
			reports, err := b.runLoads(ctx, 1, load{Size: smallSize, Outstanding: outstanding, Warmup: b.cfg.duration / 10, For: b.cfg.duration})
			for _, r := range reports {
				done += float64(r.Completed) / 1e6
			}
			return done, err
		}
		onHPU := depositSpec(make([]byte, smallSize))
		onHPU.Handlers.Completion = func(*hpu.Completion) spin.Code { return spin.Success }
		contestant(million, perMessage, "SLMP, handlers", slmpTo(onHPU, small))
		contestant(million, perMessage, "SLMP, handlers in eBPF", slmpTo(inKernel, small))
		if peer != "" {
			contestant(million, perMessage, "UDP sockets in C", func(ctx context.Context, watched func(func() error) error) (float64, string, error) {
				var r smallRuns
				if err := watched(func() error { return b.smallEcho(ctx, peer, outstanding, &r) }); err != nil {
					return 0, "", err
				}
				return r.all[0] / 1e6, r.on, nil
			})
		}
		if err := bench.Rounds(ctx, t.runs, sides...); err != nil {
			return err
		}
		for p, lines := range map[*report.Plot][]*line{gigabyte: perByte, million: perMessage} {
			var all []string
			for _, name := range p.X.Names {
				all = append(all, ons[p][name])
			}
			for _, l := range lines {
				l.on = strings.Join(all, ". ")
			}
		}
		gigabyte.Name, gigabyte.Title = "cost-bytes", "CPU time per gigabyte"
		million.Name, million.Title = "cost-messages", fmt.Sprintf("CPU time per million messages of %d bytes", smallSize)
		t.plot(*gigabyte, perByte...)
		t.plot(*million, perMessage...)
		return nil
	})
}
