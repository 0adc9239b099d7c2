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
)

// lossPlots measures files through a bad network, next to TCP through the same.
func lossPlots(ctx context.Context, t *trial) error {
	size := pick[int64](t, 64<<20, 16<<20)
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
		ours, theirs := newLine("SLMP", "user"), newLine("TCP", "")
		oursTook, theirsTook := newLine("SLMP", "user"), newLine("TCP, computed from its goodput", "")
		var sides []func(context.Context) error
		for _, percent := range pick(t, []float64{0, 0.1, 0.5, 1, 2, 5, 10}, []float64{0, 1, 5}) {
			sides = append(sides, func(ctx context.Context) error {
				return b.lossPoint(ctx, percent, window, source, [2]*line{ours, theirs}, [2]*line{oursTook, theirsTook})
			})
		}
		if err := bench.Rounds(ctx, b.few(), sides...); err != nil {
			return err
		}
		x := report.Axis{Label: "frames lost, each way", Unit: "%"}
		t.plot(report.Plot{
			Name: "loss-goodput", Title: "Goodput under loss", X: x, Y: report.Axis{Label: "goodput", Unit: "Gbit/s", Log: true},
		}, ours, theirs)
		t.plot(report.Plot{
			Name: "loss-completion", Title: fmt.Sprintf("Time for %d KiB under loss", lossSmall>>10), X: x, Y: report.Axis{Label: "time until all is acknowledged", Unit: "ms", Log: true},
		}, oursTook, theirsTook)
		return nil
	})
}

// lossSmall is how many bytes are timed under loss, and lossPatience how long.
const (
	lossSmall    = 256 << 10
	lossPatience = 20 * time.Second
)

// lossPoint measures goodput and times at one loss, for SLMP and TCP.
func (b *slmpBench) lossPoint(ctx context.Context, percent float64, window []byte, source string, goodput, took [2]*line) (err error) {
	if err := b.reshape(&impair.Config{Loss: percent / 100}); err != nil {
		return err
	}
	var r sendRuns
	if err := b.transfer(ctx, &r, window, source); err != nil {
		return err
	}
	goodput[0].on = r.on
	goodput[0].add(percent, r.gbps[0], -1)
	small, err := b.file(lossSmall)
	if err != nil {
		return err
	}
	n, _, err := b.openContext(b.oneHPU(), depositSpec(window))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	var ms []float64
	for range lossTimes {
		s, err := b.send(ctx, small, lossPatience)
		if err != nil {
			return err
		}
		ms = append(ms, s.Seconds*1e3)
	}
	took[0].on = r.on
	took[0].add(percent, quantile.Median(ms), -1)
	if !b.tcp {
		return nil
	}
	// In whole seconds, as iperf3 has it; the NIC, which stays, takes TSO and GSO off.
	var tcp sendRuns
	if err := b.iperfTo(ctx, &tcp, false, "-t", "1"); err != nil {
		return err
	}
	goodput[1].on = tcp.on
	goodput[1].add(percent, tcp.gbps[0], -1)
	ms = nil
	for range lossTimes {
		ctx, cancel := context.WithTimeout(ctx, lossPatience)
		err := b.iperfTo(ctx, &tcp, false, "-n", strconv.Itoa(lossSmall))
		cancel()
		if err != nil {
			return fmt.Errorf("%d bytes by TCP at %g %% loss, for at most %v: %w", lossSmall, percent, lossPatience, err)
		}
		ms = append(ms, lossSmall*8/tcp.gbps[len(tcp.gbps)-1]/1e6)
	}
	took[1].on = tcp.on
	took[1].add(percent, quantile.Median(ms), -1)
	return nil
}

// lossTimes is how often a small file is timed a round, of which the median counts.
const lossTimes = 3
