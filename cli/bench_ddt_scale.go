// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/internal/bench"
	"github.com/xspin/xspin/internal/replay"
)

// scaleFlights is how many messages of an HPU are in flight.
const scaleFlights = 4

// scaleRows says what an HPU does while another one does the same.
func (b *ddtBench) scaleRows(ctx context.Context) error {
	if b.sender == b.receiver {
		b.cfg.warn("no rows ddt/scale/*: two HPUs need a CPU each")
		return nil
	}
	const blocks, block, stride = 1024, 64, 128
	typ, err := ddt.HVector(blocks, block, stride, ddt.Byte)
	if err != nil {
		return err
	}
	c, err := ddt.Commit(typ, 1)
	if err != nil {
		return err
	}
	_, hi := c.Bounds()
	set, err := handlers.Datatype(c, handlers.DatatypeOptions{HPUs: 2, Messages: replay.Messages, Window: hi})
	if err != nil {
		return err
	}
	cfg := replay.Config{Handlers: set.Handlers, Stream: make([]byte, c.Size()), Packet: ddtPacket, Flights: scaleFlights, Place: hi}

	cpus := []int{b.receiver, b.sender}
	type runs struct{ busy, cpu []float64 } // packets per second of either
	var one, two [2]runs                    // by HPU
	replayed := func(on []int, to ...*runs) func(context.Context) error {
		return func(ctx context.Context) error {
			cfg := cfg
			cfg.CPUs = on
			done, err := replay.Run(ctx, cfg, b.cfg.duration)
			if err != nil {
				return err
			}
			for i, d := range done {
				to[i].busy = append(to[i].busy, float64(d.Handled)/d.Busy.Seconds()/1e6)
				to[i].cpu = append(to[i].cpu, float64(d.Handled)/d.CPU.Seconds()/1e6)
			}
			return nil
		}
	}
	if err := bench.Rounds(ctx, b.cfg.runs,
		replayed(cpus[:1], &one[0]), replayed(cpus, &two[0], &two[1]), replayed(cpus[1:], &one[1])); err != nil {
		return err
	}
	side := func(what string, r *runs) bench.Side {
		s := bench.NewSide(what+": packets per busy second", "Mpps", r.busy)
		s.Add("per_cpu_second_Mpps", r.cpu)
		return s
	}
	for i, cpu := range cpus {
		if err := b.ratio(fmt.Sprintf("ddt/scale/hpu%d", i), bench.AtLeast(0.85),
			fmt.Sprintf("packets of %d bytes of messages of %d, replayed from memory by the HPU's own worker, which writes the metadata of each packet too: no kernel, no acknowledgements; "+
				"%d messages of each HPU in flight, their packets taking turns; handler set datatype, direct, blocks of %d bytes %d apart; policy message", ddtPacket, c.Size(), scaleFlights, block, stride),
			side(fmt.Sprintf("one of two HPUs, on CPU %d", cpu), &two[i]), side(fmt.Sprintf("the only HPU, on CPU %d", cpu), &one[i])); err != nil {
			return err
		}
	}
	return nil
}
