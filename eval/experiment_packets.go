// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/peers"
	"github.com/xspin/xspin/eval/report"
	"github.com/xspin/xspin/eval/yardstick"
	"github.com/xspin/xspin/nic"
)

// packetPlots sweeps the size of frames and the number of HPUs, which FPsPIN never did.
func packetPlots(ctx context.Context, t *trial) error {
	// As in benchRx: the generator and the receiver share this process.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(runtime.NumCPU() + 4))
	g, err := t.generator()
	if err != nil {
		return err
	}
	defer g.Close()
	d := pick(t, 200*time.Millisecond, 50*time.Millisecond)
	var sides []func(context.Context) error
	// measure adds a side that measures a receiver with frames of a size, as the point x of a line.
	measure := func(l *line, x float64, size int, open func() (receiver, error)) {
		sides = append(sides, func(context.Context) error {
			var r rxRuns
			if err := t.receive(g, size, d, &r, open); err != nil {
				return fmt.Errorf("%s, %d bytes: %w", l.name, size, err)
			}
			l.on = r.on
			l.add(x, r.mpps[0], r.lost[0])
			return nil
		})
	}

	type contestant struct {
		*line
		open func() (receiver, error)
	}
	contestants := []contestant{
		{newLine("XDP_DROP: nobody receives", ""), func() (receiver, error) { return t.openDropper(plain(yardstick.Drop)) }},
	}
	if peer, err := buildPeer(ctx, "xsk_rx", peers.XSKReceive); err != nil {
		t.benchConfig.warn(fmt.Sprintf("bare AF_XDP in C is not measured: %v", err))
	} else {
		contestants = append(contestants, contestant{newLine("bare AF_XDP in C", ""), func() (receiver, error) { return t.openC(peer) }})
	}
	contestants = append(contestants,
		contestant{newLine("bare AF_XDP in Go", ""), t.openBare},
		contestant{newLine("handlers, 1 HPU", "user"), t.openNoop},
		contestant{newLine("handlers in eBPF: the generator's CPU runs them", "kernel"), t.openKernelDropper})
	var bySize []*line
	for _, c := range contestants {
		bySize = append(bySize, c.line)
		for _, size := range pick(t, []int{64, 128, 256, 512, 1024, 1514}, []int{64, 512, 1514}) {
			measure(c.line, float64(size), size, c.open)
		}
	}

	one := newLine(fmt.Sprintf("handlers, all HPUs on CPU %d", t.receiver), "user")
	byHPUs := []*line{one}
	counts := pick(t, []int{1, 2, 4, 8, 16, 32, 64}, []int{1, 4, 16})
	for _, n := range counts {
		measure(one, float64(n), rxFrame, func() (receiver, error) { return t.openHPUs(n) })
	}
	if t.sender != t.receiver {
		two := newLine(fmt.Sprintf("handlers, HPUs on CPUs %d and %d; the generator is on %d too", t.receiver, t.sender, t.sender), "user")
		byHPUs = append(byHPUs, two)
		for _, n := range counts {
			if n > 1 {
				measure(two, float64(n), rxFrame, func() (receiver, error) {
					return t.openNIC(nic.Config{HPUs: n, Workers: 2, CPUs: []int{t.receiver, t.sender}})
				})
			}
		}
	}

	if err := bench.Rounds(ctx, t.runs, sides...); err != nil {
		return err
	}
	y := report.Axis{Label: "packets per second", Unit: "million"}
	t.plot(report.Plot{
		Name: "packets-size", Title: "Packets per second by frame size",
		X: report.Axis{Label: "frame size", Unit: "bytes", Log: true}, Y: y,
	}, bySize...)
	t.plot(report.Plot{
		Name: "packets-hpus", Title: fmt.Sprintf("Frames of %d bytes per second, by number of HPUs", rxFrame),
		X: report.Axis{Label: "HPUs", Log: true}, Y: y,
	}, byHPUs...)
	return nil
}
