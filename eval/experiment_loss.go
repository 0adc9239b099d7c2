// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/report"
	"github.com/xspin/xspin/internal/quantile"
	"github.com/xspin/xspin/netns/impair"
	"github.com/xspin/xspin/nic"
)

// lossPlots measures files through a bad network, next to TCP through the same.
func lossPlots(ctx context.Context, t *trial) error {
	size := pick[int64](t, 64<<20, 16<<20)
	times := pick(t, 3, 1) // that a small file is sent; the median counts
	return t.withSLMP(time.Second, size, func(b *slmpBench) (err error) {
		source, err := b.file(size)
		if err != nil {
			return err
		}
		window, free, err := memory(size)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, free(), b.reshape(nil)) }()
		mem, inKernel, err := kernelDeposit(size)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, mem.Close()) }()
		tiers := []lossTier{
			{depositSpec(window), window, newLine("SLMP", "user"), newLine("SLMP", "user")},
			{inKernel, mem.Bytes(), newLine("SLMP, handlers in eBPF", "kernel"), newLine("SLMP, handlers in eBPF", "kernel")},
		}
		theirs, theirsTook := newLine("TCP", ""), newLine("TCP, computed from its goodput", "")
		var sides []func(context.Context) error
		for _, percent := range pick(t, []float64{0, 0.1, 0.5, 1, 2, 5, 10}, []float64{0, 1, 5}) {
			sides = append(sides, func(ctx context.Context) (err error) {
				if err := b.reshape(&impair.Config{Loss: percent / 100}); err != nil {
					return err
				}
				n, err := b.openEmpty(b.oneHPU())
				if err != nil {
					return err
				}
				defer func() { err = errors.Join(err, n.Close()) }()
				for _, tier := range tiers {
					if err := b.lossOf(ctx, n, percent, times, source, tier); err != nil {
						return err
					}
				}
				return b.lossOfTCP(ctx, percent, times, theirs, theirsTook)
			})
		}
		if err := bench.Rounds(ctx, b.few(), sides...); err != nil {
			return err
		}
		x := report.Axis{Label: "frames lost, each way", Unit: "%"}
		t.plot(report.Plot{
			Name: "loss-goodput", Title: "Goodput under loss", X: x, Y: report.Axis{Label: "goodput", Unit: "Gbit/s", Log: true},
		}, tiers[0].goodput, tiers[1].goodput, theirs)
		t.plot(report.Plot{
			Name: "loss-completion", Title: fmt.Sprintf("Time for %d KiB under loss", lossSmall>>10), X: x, Y: report.Axis{Label: "time until all is acknowledged", Unit: "ms", Log: true},
		}, tiers[0].took, tiers[1].took, theirsTook)
		return nil
	})
}

// lossSmall is how many bytes are timed under loss, and lossPatience how long.
const (
	lossSmall    = 256 << 10
	lossPatience = 20 * time.Second
)

// A lossTier is a context that takes files, into a window of these bytes.
type lossTier struct {
	spec          nic.ContextSpec
	window        []byte
	goodput, took *line
}

// lossOf measures goodput of SLMP at one loss and the time for a small file, the median of
// so many times.
func (b *slmpBench) lossOf(ctx context.Context, n *nic.NIC, percent float64, times int, source string, tier lossTier) (err error) {
	var r sendRuns
	if err := b.transferOn(ctx, n, &r, tier.spec, tier.window, source); err != nil {
		return err
	}
	tier.goodput.on = r.on
	tier.goodput.add(percent, r.gbps[0], -1)
	small, err := b.file(lossSmall)
	if err != nil {
		return err
	}
	c, err := activate(n, tier.spec)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Remove(c)) }()
	var ms []float64
	for range times {
		s, err := b.send(ctx, small, lossPatience)
		if err != nil {
			return err
		}
		ms = append(ms, s.Seconds*1e3)
	}
	tier.took.on = r.on
	tier.took.add(percent, quantile.Median(ms), -1)
	return nil
}

// lossOfTCP is lossOf for TCP, without TSO and GSO: a NIC is open.
func (b *slmpBench) lossOfTCP(ctx context.Context, percent float64, times int, goodput, took *line) error {
	if !b.tcp {
		return nil
	}
	// In whole seconds, as iperf3 has it.
	var tcp sendRuns
	if err := b.iperfTo(ctx, &tcp, false, "-t", "1"); err != nil {
		return err
	}
	goodput.on = tcp.on
	goodput.add(percent, tcp.gbps[0], -1)
	var ms []float64
	for range times {
		ctx, cancel := context.WithTimeout(ctx, lossPatience)
		err := b.iperfTo(ctx, &tcp, false, "-n", strconv.Itoa(lossSmall))
		cancel()
		if err != nil {
			return fmt.Errorf("%d bytes by TCP at %g %% loss, for at most %v: %w", lossSmall, percent, lossPatience, err)
		}
		ms = append(ms, lossSmall*8/tcp.gbps[len(tcp.gbps)-1]/1e6)
	}
	took.on = tcp.on
	took.add(percent, quantile.Median(ms), -1)
	return nil
}
