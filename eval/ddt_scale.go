// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/replay"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/internal/clock"
	"github.com/xspin/xspin/netns/testbed"
)

// scaleFlights is how many messages of an HPU are in flight.
const scaleFlights = 4

// threadDone is what a thread has done next to others.
type threadDone struct {
	packets    uint64
	busy, cpu  time.Duration
	begin, end time.Duration // CLOCK_MONOTONIC
}

// together returns the share of the time of a thread in which all others were at it too.
func together(all []threadDone, i int) float64 {
	begin, end := all[i].begin, all[i].end
	for _, s := range all {
		begin, end = max(begin, s.begin), min(end, s.end)
	}
	return float64(max(end-begin, 0)) / float64(all[i].end-all[i].begin)
}

// scaledRuns are the figures of a thread, run by run.
type scaledRuns struct{ busy, cpu, together []float64 } // Mpps, Mpps, share

func (r *scaledRuns) add(all []threadDone, i int) {
	s := all[i]
	r.busy = append(r.busy, float64(s.packets)/s.busy.Seconds()/1e6)
	r.cpu = append(r.cpu, float64(s.packets)/s.cpu.Seconds()/1e6)
	r.together = append(r.together, together(all, i))
}

func (r *scaledRuns) side(what string) bench.Side {
	s := bench.NewSide(what+": packets per busy second", "Mpps", r.busy)
	s.Add("per_cpu_second_Mpps", r.cpu)
	s.Add("together_share", r.together)
	return s
}

// scaleRows says what an HPU does while another one does the same.
func (b *ddtBench) scaleRows(ctx context.Context) error {
	if b.sender == b.receiver {
		b.cfg.warn("no rows ddt/scale/* and ddt/scale_copies/*: two HPUs need a CPU each")
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
	hpus := func(ctx context.Context, cpus []int) (all []threadDone, err error) {
		cfg := cfg
		cfg.CPUs = cpus
		done, err := replay.Run(ctx, cfg, b.cfg.duration)
		for _, d := range done {
			all = append(all, threadDone{d.Packets, d.Busy, d.CPU, d.Begin, d.End})
		}
		return all, err
	}
	packets := int((c.Size() + ddtPacket - 1) / ddtPacket)
	copiers := func(ctx context.Context, cpus []int) ([]threadDone, error) {
		return copies(ctx, cpus, packets*scaleFlights, int(hi)*scaleFlights, b.cfg.duration)
	}

	conditions := fmt.Sprintf("packets of %d bytes of messages of %d, replayed from memory by the HPU's own worker, which writes the metadata of each packet too: no kernel, no acknowledgements; "+
		"%d messages of each HPU in flight, their packets taking turns; handler set datatype, direct, blocks of %d bytes %d apart; policy message; ", ddtPacket, c.Size(), scaleFlights, block, stride)
	if err := b.scale(ctx, "ddt/scale", bench.AtLeast(0.85), hpus, "HPU",
		conditions+"busy: from taking packets off the ring to giving them back, by the clock, so with what interrupts and other threads took of the CPU meanwhile; per_cpu_second: of the thread's CPU time; together_share: of its time, both were at it"); err != nil {
		return err
	}
	return b.scale(ctx, "ddt/scale_copies", bench.Higher, copiers, "thread",
		fmt.Sprintf("control of ddt/scale: threads that do nothing but copy %d bytes (memmove) from one packet of %d in memory after the other to places that are as far apart as an HPU's, in as much memory; "+
			"what it is below 1 is what shared caches and units of the CPUs, and others at work, cost any two threads; busy: all of the time, by the clock", ddtPacket, packets*scaleFlights))
}

// scale adds a row for each of two CPUs: what a thread does there with one on the other,
// by what it does alone.
func (b *ddtBench) scale(ctx context.Context, name string, goal bench.Goal, run func(context.Context, []int) ([]threadDone, error), what, conditions string) error {
	cpus := []int{b.receiver, b.sender}
	var one, two [2]scaledRuns
	on := func(cpus []int, to ...*scaledRuns) func(context.Context) error {
		return func(ctx context.Context) error {
			all, err := run(ctx, cpus)
			if err != nil {
				return err
			}
			for i := range to {
				to[i].add(all, i)
			}
			return nil
		}
	}
	if err := bench.Rounds(ctx, b.cfg.runs, on(cpus[:1], &one[0]), on(cpus, &two[0], &two[1]), on(cpus[1:], &one[1])); err != nil {
		return err
	}
	for i, cpu := range cpus {
		if err := b.ratio(fmt.Sprintf("%s/hpu%d", name, i), goal, conditions,
			two[i].side(fmt.Sprintf("one of two %ss, on CPU %d", what, cpu)), one[i].side(fmt.Sprintf("the only %s, on CPU %d", what, cpu))); err != nil {
			return err
		}
	}
	return nil
}

// copies has a thread on each CPU copy packets for a time, all at the same time, from and
// to memory of its own.
func copies(ctx context.Context, cpus []int, packets, room int, d time.Duration) ([]threadDone, error) {
	const frame = 2048
	all, errs := make([]threadDone, len(cpus)), make([]error, len(cpus))
	var stop atomic.Bool
	var ready, begun, done sync.WaitGroup
	ready.Add(len(cpus))
	begun.Add(len(cpus))
	for i, cpu := range cpus {
		done.Go(func() {
			from, to := make([]byte, packets*frame), make([]byte, room)
			clear(from) // now, and not while it is measured
			clear(to)
			var once, first sync.Once
			defer first.Do(begun.Done)
			defer once.Do(ready.Done)
			errs[i] = testbed.OnCPU(cpu, func() error {
				once.Do(ready.Done)
				ready.Wait()
				s := threadDone{begin: time.Duration(clock.Monotonic())}
				used := threadCPU()
				for k := 0; s.packets == 0 || !stop.Load(); k = (k + 1) % packets {
					copy(to[k*(room-ddtPacket)/packets:][:ddtPacket], from[k*frame:])
					if s.packets++; s.packets == 1 {
						first.Do(begun.Done)
					}
				}
				s.cpu = threadCPU() - used
				s.end = time.Duration(clock.Monotonic())
				s.busy = s.end - s.begin
				all[i] = s
				return nil
			})
		})
	}
	begun.Wait() // one may be kept off its CPU for longer than all of it takes
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
	stop.Store(true)
	done.Wait()
	for _, err := range append(errs, ctx.Err()) {
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

// threadCPU returns the CPU time of the thread.
func threadCPU() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts) // cannot fail
	return time.Duration(ts.Nano())
}
