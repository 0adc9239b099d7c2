// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"time"

	"github.com/xspin/xspin/demos/file"
	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/netns/impair"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/slmp"
)

// countMallocs counts the allocations of this process from now on.
func countMallocs() func() float64 {
	var before runtime.MemStats
	runtime.ReadMemStats(&before)
	return func() float64 {
		var after runtime.MemStats
		runtime.ReadMemStats(&after)
		return float64(after.Mallocs - before.Mallocs)
	}
}

// allocsRow holds allocations of the receiver against those that are not of packets.
func (b *slmpBench) allocsRow(name string, runs []float64) (bench.Row, error) {
	row, err := allocsRow(runs)
	row.Name = name
	if row.A != nil {
		row.A.What = fmt.Sprintf("allocations of the whole receiving process, while the sender's process runs; %g or less are not of packets", strayAllocs)
	}
	return row, err
}

// pinning says where sender and receiver are.
func (b *slmpBench) pinning() string {
	return fmt.Sprintf("sender (xspin send, a process of its own, or iperf3's client) on CPU %d, receiver (a NIC with 1 HPU, adaptive, policy message; or iperf3's server) on CPU %d; "+
		"MTU %d, UDP checksums verified where they are complete", b.sender, b.receiver, b.MTU)
}

const sameFrames = "iperf3, one TCP stream, as many bytes, with the NIC attached: no TSO, no GSO, so a frame for each segment"

// fileRows compares a file transfer with TCP.
func (b *slmpBench) fileRows(ctx context.Context) (err error) {
	source, err := b.file(b.o.size)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(b.bytes[:b.o.size])
	window, free, err := memory(b.o.size)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, free()) }()

	var cumulative, plain, stored, frames, tcp sendRuns
	sides := []func(context.Context) error{
		func(ctx context.Context) error { return b.transfer(ctx, &cumulative, window, source) },
		func(ctx context.Context) error { return b.transfer(ctx, &plain, window, source, "--plain") },
		func(ctx context.Context) error { return b.store(ctx, &stored, source, hex.EncodeToString(sum[:])) },
	}
	if b.tcp {
		end := []string{"-n", strconv.FormatInt(b.o.size, 10)}
		sides = append(sides,
			func(ctx context.Context) error { return b.iperfTo(ctx, &frames, true, end...) },
			func(ctx context.Context) error { return b.iperfTo(ctx, &tcp, false, end...) })
	}
	if err := bench.Rounds(ctx, b.cfg.runs, sides...); err != nil {
		return err
	}

	conditions := fmt.Sprintf("one message of %d bytes from a file in memory (tmpfs), from the first byte to the acknowledgement of EOM, window auto; %s; what arrived was compared after each run", b.o.size, b.pinning())
	a := cumulative.side("SLMP, aggregated acknowledgements, put into memory (default deposit)")
	p := plain.side("SLMP, one acknowledgement for each segment, put into memory")
	s := stored.side("SLMP, aggregated acknowledgements, the file demo's receiver: a file in tmpfs, its memory prepared before, renamed before EOM is acknowledged")
	if b.tcp {
		f, t := frames.side(sameFrames).Of("TCP"), tcp.side("iperf3, one TCP stream, as many bytes, no XDP program on either end").Of("TCP")
		for _, c := range []struct {
			name string
			goal bench.Goal
			a, b bench.Side
		}{
			{"slmp/file_over_tcp_same_frames", bench.AtLeast(1), a, f},
			{"slmp/file_over_tcp", bench.AtLeast(0.40), a, t},
			{"slmp/file_plain_over_tcp_same_frames", bench.Higher, p, f},
			{"slmp/file_stored_over_tcp_same_frames", bench.AtLeast(1), s, f},
			{"slmp/file_stored_over_tcp", bench.AtLeast(0.40), s, t},
		} {
			row, err := bench.Ratio(c.name, c.goal, c.a, c.b)
			if err := b.doc.Add(conditions, row, err); err != nil {
				return err
			}
		}
	}
	for _, c := range []struct {
		name string
		side bench.Side
	}{{"slmp/file", a}, {"slmp/file_plain", p}, {"slmp/file_stored", s}} {
		row, err := bench.Absolute(c.name, bench.Higher, c.side)
		if err := b.doc.Add(conditions, row, err); err != nil {
			return err
		}
	}
	row, err := b.allocsRow("slmp/allocs_per_packet", cumulative.allocs)
	return b.doc.Add(conditions, row, err)
}

// transfer sends a file into a window of a new NIC.
func (b *slmpBench) transfer(ctx context.Context, runs *sendRuns, window []byte, source string, args ...string) error {
	return b.transferTo(ctx, runs, depositSpec(window), window, source, args...)
}

// store sends a file to the file demo's receiver.
func (b *slmpBench) store(ctx context.Context, runs *sendRuns, source, sum string) (err error) {
	dir, err := os.MkdirTemp(b.dir, "received-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	ended := make(chan file.Received, 1)
	server, err := file.Start(b.Lab, file.ServerConfig{
		// Some more than the file, so that it need not grow at all.
		Store: file.StoreConfig{Dir: dir, MaxSize: b.o.size, Prepare: b.o.size, Ended: func(r file.Received) { ended <- r }},
		HPUs:  1, Wait: "adaptive", CPUs: []int{b.receiver},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	if runs.on, err = b.state(); err != nil {
		return err
	}
	r, err := b.send(ctx, source, 0)
	if err != nil {
		return err
	}
	runs.add(r)
	select {
	case got := <-ended:
		if got.Err != nil {
			return got.Err
		}
		if got.SHA256 != sum {
			return fmt.Errorf("%w: SHA-256 %s, want %s", file.ErrContents, got.SHA256, sum)
		}
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(time.Minute):
		return errors.New("the sender says that all is acknowledged, but there is no file")
	}
	return nil
}

// iperfTo measures TCP, with a NIC attached that matches none of it, or without.
func (b *slmpBench) iperfTo(ctx context.Context, runs *sendRuns, attached bool, end ...string) (err error) {
	if attached {
		n, _, err2 := b.openContext(b.oneHPU(), depositSpec(nil))
		if err2 != nil {
			return err2
		}
		defer func() { err = errors.Join(err, n.Close()) }()
	}
	if runs.on, err = b.state(); err != nil {
		return err
	}
	gbit, err := b.iperf(ctx, end...)
	runs.gbps = append(runs.gbps, gbit)
	return err
}

// lossRows says what 1 % loss costs.
func (b *slmpBench) lossRows(ctx context.Context) (err error) {
	source, err := b.file(b.o.size)
	if err != nil {
		return err
	}
	window, free, err := memory(b.o.size)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, free(), b.reshape(nil)) }()
	type path struct {
		config    impair.Config
		ours, tcp sendRuns
		overload  []float64 // percent
	}
	bad, good := path{config: impair.Config{Loss: 0.01}}, path{}
	side := func(p *path) func(context.Context) error {
		return func(ctx context.Context) error {
			if err := b.reshape(&p.config); err != nil {
				return err
			}
			if err := b.transfer(ctx, &p.ours, window, source); err != nil {
				return err
			}
			st, err := b.PathState()
			if err != nil {
				return err
			}
			p.overload = append(p.overload, overloaded(st))
			if !b.tcp {
				return nil
			}
			// In whole seconds, as iperf3 has it. With loss a number of bytes
			// might take for ever.
			return b.iperfTo(ctx, &p.tcp, true, "-t", strconv.Itoa(int(max(b.cfg.duration.Seconds(), 1))))
		}
	}
	if err := bench.Rounds(ctx, b.cfg.runs, side(&bad), side(&good)); err != nil {
		return err
	}
	conditions := fmt.Sprintf("through the impairment stage, a third namespace with programs at tc ingress, at 1 %% loss of frames each way, and at 0 %%; a file of %d bytes, put into memory; %s", b.o.size, b.pinning())
	a, o := bad.ours.side("SLMP, 1 % loss"), good.ours.side("SLMP, 0 % loss")
	a.Add("stage_overloaded_percent", bad.overload)
	o.Add("stage_overloaded_percent", good.overload)
	row, err := bench.Ratio("slmp/loss1_over_loss0", bench.AtLeast(0.50), a, o)
	if err := b.doc.Add(conditions, row, err); err != nil || !b.tcp {
		return err
	}
	ta, to := bad.tcp.side("iperf3, one TCP stream, 1 % loss").Of("TCP"), good.tcp.side("iperf3, one TCP stream, 0 % loss")
	row, err = bench.Ratio("tcp/loss1_over_loss0", bench.Higher, ta, to)
	if err := b.doc.Add(conditions, row, err); err != nil {
		return err
	}
	row, err = bench.Ratio("slmp/loss1_over_tcp_loss1", bench.Higher, a, ta)
	return b.doc.Add(conditions, row, err)
}

// overloaded returns which part of the frames the stage could not take although the
// configuration would have let them pass, percent.
func overloaded(st *impair.State) float64 {
	frames, lost := uint64(0), uint64(0)
	for _, c := range []impair.Counters{st.FromHost, st.ToHost} {
		frames += c.Frames
		lost += c.Overflowed + c.Unserved + c.LinkDropped
	}
	return 100 * float64(lost) / float64(max(frames, 1))
}

// autoRows compares window auto with the best of fixed ones, on many paths.
func (b *slmpBench) autoRows(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, b.reshape(nil)) }()
	for _, rate := range b.o.rates {
		for _, delay := range b.o.delays {
			for _, loss := range b.o.losses {
				c := impair.Config{Rate: rate, Delay: delay, Loss: loss}
				if err := b.autoCell(ctx, c); err != nil {
					return fmt.Errorf("%s: %w", c, err)
				}
			}
		}
	}
	return nil
}

// unlimited is what an unlimited path is taken to carry, in bit/s, to choose how
// much is sent.
const unlimited = 2e9

func (b *slmpBench) autoCell(ctx context.Context, path impair.Config) (err error) {
	if err := b.reshape(&path); err != nil {
		return err
	}
	rate := float64(path.Rate)
	if rate == 0 {
		rate = unlimited
	}
	size := min(int64(rate/8*b.cfg.duration.Seconds()), b.o.size)
	source, err := b.file(size)
	if err != nil {
		return err
	}
	window, free, err := memory(size)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, free()) }()
	n, _, err := b.openContext(b.oneHPU(), depositSpec(window))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	on, err := b.granted(n)
	if err != nil {
		return err
	}

	// A window that is slow must not take its time: how far it comes will do.
	patience := 10*b.cfg.duration + 5*time.Second
	first, err := b.send(ctx, source, patience)
	if err != nil {
		return err
	}
	limit := min(time.Duration(1.25*first.Seconds*float64(time.Second))+100*time.Millisecond, patience)
	best, most, scan := 0, -1.0, map[string][]float64{}
	for _, w := range b.o.candidates {
		r, err := b.send(ctx, source, limit, "--window", strconv.Itoa(w))
		if err != nil {
			return err
		}
		scan[fmt.Sprintf("window_%d_gbps", w)] = []float64{r.Gbps}
		if r.Gbps > most {
			best, most = w, r.Gbps
		}
	}

	auto, fixed := sendRuns{on: on}, sendRuns{on: on}
	before, err := b.PathState()
	if err != nil {
		return err
	}
	err = bench.Rounds(ctx, b.few(),
		func(ctx context.Context) error {
			r, err := b.send(ctx, source, patience)
			auto.add(r)
			return err
		},
		func(ctx context.Context) error {
			r, err := b.send(ctx, source, patience, "--window", strconv.Itoa(best))
			fixed.add(r)
			return err
		})
	if err != nil {
		return err
	}
	after, err := b.PathState()
	if err != nil {
		return err
	}
	a, o := auto.side("window auto"), fixed.side(fmt.Sprintf("window %d, the best of %v in a run each before", best, b.o.candidates))
	for name, x := range scan {
		o.Add(name, x)
	}
	a.Add("stage_overloaded_percent_of_both", []float64{overloaded(difference(before, after))})
	name := "unlimited"
	if path.Rate > 0 {
		name = impair.FormatRate(path.Rate)
	}
	row, err := bench.Ratio(fmt.Sprintf("slmp/auto_over_best/%s/%dms/loss%g", name, path.Delay.Milliseconds(), 100*path.Loss), bench.AtLeast(0.85), a, o)
	return b.doc.Add(fmt.Sprintf("path: %s, delay and loss each way, relay of frames that wait in the receiver's process; a file of %d bytes, from the first byte to the acknowledgement of EOM; %s", b.Path, size, b.pinning()), row, err)
}

// difference returns what happened between two states.
func difference(before, after *impair.State) *impair.State {
	sub := func(a, b impair.Counters) impair.Counters {
		return impair.Counters{
			Frames: a.Frames - b.Frames, Overflowed: a.Overflowed - b.Overflowed,
			Unserved: a.Unserved - b.Unserved, LinkDropped: a.LinkDropped - b.LinkDropped,
		}
	}
	return &impair.State{Config: after.Config, FromHost: sub(after.FromHost, before.FromHost), ToHost: sub(after.ToHost, before.ToHost)}
}

// kneeAt is the share of the best goodput from which a window counts as large
// enough.
const kneeAt = 0.90

// windowRows sweeps windows and messages at a time, next to the window that
// FPsPIN's report predicts (equations 1 to 3).
func (b *slmpBench) windowRows(ctx context.Context) (err error) {
	memory, free, err := memory(b.o.size)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, free()) }()
	mem, inKernel, err := kernelDeposit(b.o.size)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, mem.Close()) }()
	type cell struct {
		prefix, what     string
		window, parallel int
		runs             sendRuns
	}
	var cells []*cell
	var sides []func(context.Context) error
	sweep := func(prefix, what string, parallel int, spec nic.ContextSpec) {
		for _, w := range b.o.candidates {
			c := &cell{prefix: prefix, what: what, window: w, parallel: parallel}
			cells = append(cells, c)
			sides = append(sides, func(ctx context.Context) error { return b.sweep(ctx, &c.runs, spec, w, parallel) })
		}
	}
	for _, p := range b.o.parallels {
		spec := depositSpec(nil)
		spec.Window, spec.Binder = nil, places{memory, b.o.size / int64(p)}
		sweep("slmp", "SLMP, fixed window", p, spec)
	}
	sweep("kernel", "SLMP, fixed window, handlers in eBPF", 1, inKernel) // which have no binder
	var sendRate, takeRate []float64
	sides = append(sides, func(ctx context.Context) error {
		v, err := b.sendSpeed(ctx)
		if err != nil {
			return err
		}
		sendRate = append(sendRate, v)
		if v, err = b.takeSpeed(memory); err != nil {
			return err
		}
		takeRate = append(takeRate, v)
		return nil
	})
	if err := bench.Rounds(ctx, b.few(), sides...); err != nil {
		return err
	}

	conditions := fmt.Sprintf("window/WINDOW/PARALLEL: %d bytes in as many messages as are sent at a time, each with a window of its own, until all is acknowledged or %v are over; %s", b.o.size, b.cfg.duration, b.pinning())
	for _, c := range cells {
		row, err := bench.Absolute(fmt.Sprintf("%s/window/%d/%d", c.prefix, c.window, c.parallel), bench.Higher, c.runs.side(c.what))
		if err := b.doc.Add(conditions, row, err); err != nil {
			return err
		}
	}

	knees := make([]float64, b.few())
	for run := range knees {
		most := 0.0
		for _, c := range cells {
			if c.prefix == "slmp" && c.parallel == b.o.parallels[0] {
				most = max(most, c.runs.gbps[run])
			}
		}
		for _, c := range cells {
			if c.prefix == "slmp" && c.parallel == b.o.parallels[0] && c.runs.gbps[run] >= kneeAt*most {
				knees[run] = float64(c.window)
				break
			}
		}
	}
	predicted := make([]float64, len(sendRate))
	for run := range predicted {
		predicted[run] = predictWindow(sendRate[run], takeRate[run])
	}
	p := bench.NewSide("S_wnd = S_recv v_send / (v_send - v_recv)", "segments", predicted)
	p.Add("v_send_kps", scaled(sendRate, 1e-3))
	p.Add("v_recv_kps", scaled(takeRate, 1e-3))
	p.Add("s_recv_segments", []float64{nic.DefaultRing})
	p.Add("measured_knee", knees)
	row, err := bench.Absolute("slmp/predicted_window", bench.Neither, p)
	if err := b.doc.Add(fmt.Sprintf("FPsPIN's report, equations 1 to 3: S_recv the credit of a queue, v_send by xspin send --mode none into a program that drops, v_recv segments of as many bytes from the in-kernel generator put into memory by 1 HPU; "+
		"%d, the largest that can be asked for, where the receiver is the faster one and its buffer never fills", slmp.MaxWindow), row, err); err != nil {
		return err
	}
	k := bench.NewSide(fmt.Sprintf("the smallest window swept with %g %% of the best goodput", 100*kneeAt), "segments", knees)
	k.Add("predicted_window", predicted)
	row, err = bench.Absolute("slmp/window_knee", bench.Neither, k)
	return b.doc.Add(fmt.Sprintf("of the sweep of windows with %s; %s", atATime(b.o.parallels[0]), conditions), row, err)
}

// sweep measures a window with a number of messages at a time, for as long as a run
// takes at most.
func (b *slmpBench) sweep(ctx context.Context, runs *sendRuns, spec nic.ContextSpec, window, parallel int) (err error) {
	source, err := b.file(b.o.size / int64(parallel))
	if err != nil {
		return err
	}
	n, _, err := b.openContext(b.oneHPU(), spec)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	unwire, err := b.wireFor(spec)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unwire()) }()
	if runs.on, err = b.granted(n); err != nil {
		return err
	}
	many := strconv.Itoa(parallel)
	r, err := b.send(ctx, source, b.cfg.duration, "--window", strconv.Itoa(window), "--parallel", many, "--repeat", many)
	runs.add(r)
	return err
}

func scaled(x []float64, by float64) []float64 {
	y := make([]float64, len(x))
	for i := range x {
		y[i] = x[i] * by
	}
	return y
}

// predictWindow returns what equation 3 of FPsPIN's report says, in segments, for speeds in
// segments a second.
func predictWindow(send, receive float64) float64 {
	if send <= receive {
		return slmp.MaxWindow
	}
	return min(nic.DefaultRing*send/(send-receive), slmp.MaxWindow)
}
