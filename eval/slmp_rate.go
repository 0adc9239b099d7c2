// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/yardstick"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns/testbed"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// rateRuns are the figures of one side that takes generated segments.
type rateRuns struct {
	kps, lost, busy, acks, us []float64
	waited                    []float64 // percent of the time that others took of the generator's CPU
	on                        string
}

func (r *rateRuns) side(what string) bench.Side {
	s := bench.NewSide(what, "k/s", r.kps)
	lost := bench.NewSide("", "", r.lost).Median
	s.Lost, s.On = &lost, r.on
	s.Add("busy_ns_per_segment", r.busy)
	s.Add("acks_per_segment", r.acks)
	s.Add("handler_us", r.us)
	s.Add("generator_waited_percent", r.waited)
	return s
}

// add adds a run of which so many segments were handled in the end.
func (r *rateRuns) add(f fed, handled uint64) {
	r.kps = append(r.kps, float64(f.done)/f.took.Seconds()/1e3)
	r.lost = append(r.lost, max(0, 1-float64(handled)/float64(max(f.sent, 1))))
}

// noopSLMP is a context whose three handlers do nothing.
func noopSLMP() nic.ContextSpec {
	return nic.ContextSpec{
		Name:     "bench",
		Rulesets: []matcher.Ruleset{matcher.SLMP()},
		Handlers: hpu.Handlers{
			Header:     func(*hpu.HER) spin.Code { return spin.Success },
			Payload:    func(*hpu.HER) spin.Code { return spin.Success },
			Completion: func(*hpu.Completion) spin.Code { return spin.Success },
		},
	}
}

const (
	longFrame = 1514 // bytes
	// noopSegments is how many segments the messages have whose handlers do
	// nothing.
	noopSegments = 1024
)

// noopRows compares handlers that do nothing with a loop that does nothing.
func (b *slmpBench) noopRows(ctx context.Context) (err error) {
	// As in benchRx: the generator and the receiver share this process.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(runtime.NumCPU() + 4))
	g, err := b.segmentGenerator()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.Close()) }()

	messages := func(size int, every int, ask slmp.Flags) yardstick.Segments {
		return yardstick.Segments{
			ID: 1, Count: noopSegments, Step: uint32(size - slmpHeaders), Every: uint32(every), Ask: uint16(ask), Last: uint16(slmp.EOM),
		}
	}
	var quiet, each, some, bare, long, longBare rateRuns
	full := func(r *rateRuns, size, every int, ask slmp.Flags) func(context.Context) error {
		return func(context.Context) error {
			return b.takeSegments(g, r, messages(size, every, ask), size, b.oneHPU(), noopSLMP(), b.short(), 0)
		}
	}
	empty := func(r *rateRuns, size int) func(context.Context) error {
		return func(context.Context) error { return b.takeBare(g, r, messages(size, 0, 0), size) }
	}
	const every = 32
	err = bench.Rounds(ctx, b.cfg.runs,
		full(&quiet, rxFrame, 0, 0), empty(&bare, rxFrame),
		full(&each, rxFrame, 1, slmp.SYN), full(&some, rxFrame, every, slmp.SYN|slmp.Cumulative),
		full(&long, longFrame, 0, 0), empty(&longBare, longFrame))
	if err != nil {
		return err
	}
	conditions := fmt.Sprintf("messages of %d segments from the in-kernel generator (live frames, batches of 64, checksum 0) on CPU %d, which also runs the XDP program, "+
		"no more than %d ahead of the receiver so that none is lost, for the bare loop too; received on CPU %d; "+
		"both wait alike: spin with yields, then sleep in poll; the HPU bounds the rate where busy_ns_per_segment is about its inverse, "+
		"else the generator, which other threads keep from its CPU for generator_waited_percent of the time; %d-byte frames", noopSegments, b.sender, ahead, b.receiver, rxFrame)
	other := bare.side("bare loop on package xsk: receive 64, exchange 64, one socket a queue")
	what := "nic, 1 HPU, adaptive, policy message, header, payload and completion handler that return Success"
	for _, c := range []struct {
		name string
		goal bench.Goal
		a, b bench.Side
		more string
	}{
		{"slmp/noop3_over_bare", bench.AtLeast(0.60), quiet.side(what), other, "no segment asks for an acknowledgement"},
		{"slmp/noop3_syn_over_bare", bench.Higher, each.side(what), other, "each segment is acknowledged, and the HPU sends each acknowledgement as a frame of its own, which takes it longer than all else; what comes back a program on the host's end drops"},
		{"slmp/noop3_cumulative_over_bare", bench.Higher, some.side(what), other, fmt.Sprintf("an aggregated acknowledgement for %d segments; what comes back a program on the host's end drops", every)},
		{"slmp/noop3_over_bare_1514B", bench.Higher, long.side(what), longBare.side(other.What), fmt.Sprintf("no acknowledgement; but frames of %d bytes", longFrame)},
	} {
		row, err := bench.Ratio(c.name, c.goal, c.a, c.b)
		if err := b.doc.Add(conditions+"; "+c.more, row, err); err != nil {
			return err
		}
	}
	return nil
}

// takeSegments measures a new NIC that takes generated segments.
func (b *slmpBench) takeSegments(g *yardstick.Generator, runs *rateRuns, s yardstick.Segments, size int, cfg nic.Config, spec nic.ContextSpec, d, nap time.Duration) (err error) {
	n, c, err := b.openContext(cfg, spec)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	if s.Every > 0 {
		// Else each acknowledgement would be answered by the host's stack,
		// that nobody listens.
		sink, err := b.attachHost()
		if err != nil {
			return err
		}
		defer sink.Close()
	}
	if runs.on, err = b.granted(n); err != nil {
		return err
	}
	if err := g.SetSegments(s); err != nil {
		return err
	}
	room, few := ahead, burst
	if nap > 0 {
		room, few = 1024, 64
	}
	f, err := b.feed(g, b.slmpFrame(size), d/8, nap, room, few, handled(c))
	if err != nil {
		return err
	}
	before, cBefore, err := settled(n, c, uint64(f.sent))
	if err != nil {
		return err
	}
	f, err = b.feed(g, b.slmpFrame(size), d, nap, room, few, handled(c))
	if err != nil {
		return err
	}
	after, cAfter, err := settled(n, c, cBefore.Handled+uint64(f.sent))
	if err != nil {
		return err
	}
	runs.add(f, cAfter.Handled-cBefore.Handled)
	runs.waited = append(runs.waited, b.waits.percent...)
	segments := float64(cAfter.Handled - cBefore.Handled)
	if segments == 0 {
		return fmt.Errorf("the NIC handled none of %d segments", f.sent)
	}
	runs.busy = append(runs.busy, float64(after.busy-before.busy)/segments)
	runs.acks = append(runs.acks, float64(cAfter.Acks-cBefore.Acks)/segments)
	runs.us = append(runs.us, float64(cAfter.HandlerSum-cBefore.HandlerSum)/segments/1e3)
	return nil
}

// settled waits until the NIC has handled so many segments, or no more for a while,
// and returns its counters.
func settled(n *nic.NIC, c *nic.Context, segments uint64) (received, spin.ContextStats, error) {
	last, moved := uint64(0), time.Now()
	for now := moved; now.Sub(moved) < stall; now = time.Now() {
		h := c.Stats().Handled
		if h >= segments {
			break
		}
		if h != last {
			last, moved = h, now
		}
		time.Sleep(time.Millisecond)
	}
	r, err := noop{n}.counters()
	return r, c.Stats(), err
}

// attachHost attaches a program to the host's end that drops all.
func (b *slmpBench) attachHost() (*yardstick.Program, error) {
	i, err := iface(b.Host)
	if err != nil {
		return nil, err
	}
	y, err := yardstick.LoadPlain(yardstick.Drop)
	if err != nil {
		return nil, err
	}
	if err := b.Host.NS.Do(func() error { return y.Attach(i) }); err != nil {
		return nil, errors.Join(err, y.Close())
	}
	return y, nil
}

// takeBare measures the bare loop with the same frames.
func (b *slmpBench) takeBare(g *yardstick.Generator, runs *rateRuns, s yardstick.Segments, size int) (err error) {
	r, err := b.openBare()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	state, err := b.state()
	if err != nil {
		return err
	}
	runs.on = state + "; AF_XDP " + r.on()
	if err := g.SetSegments(s); err != nil {
		return err
	}
	count := func() (uint64, error) {
		n, err := r.counters()
		return n.packets, err
	}
	if _, err := b.feed(g, b.slmpFrame(size), b.short()/8, 0, ahead, burst, count); err != nil {
		return err
	}
	before, err := settle(r)
	if err != nil {
		return err
	}
	f, err := b.feed(g, b.slmpFrame(size), b.short(), 0, ahead, burst, count)
	if err != nil {
		return err
	}
	after, err := settleAfter(r, before)
	if err != nil {
		return err
	}
	runs.add(f, after.packets-before.packets)
	runs.waited = append(runs.waited, b.waits.percent...)
	runs.busy = append(runs.busy, float64(after.busy-before.busy)/float64(max(after.packets-before.packets, 1)))
	return nil
}

// takeSpeed returns how many full segments a second an HPU puts into memory.
func (b *slmpBench) takeSpeed(memory []byte) (_ float64, err error) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(runtime.NumCPU() + 4))
	g, err := b.segmentGenerator()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	const payload = longFrame - slmpHeaders
	var runs rateRuns
	err = b.takeSegments(g, &runs, yardstick.Segments{
		ID: 1, Count: uint32(max(len(memory)/payload, 1)), Step: payload, Last: uint16(slmp.EOM),
	}, longFrame, b.oneHPU(), depositSpec(memory), b.short(), 0)
	if err != nil {
		return 0, err
	}
	return runs.kps[0] * 1e3, nil
}

// sendSpeed returns how many full segments a second are sent if nobody minds, into
// a program that drops them.
func (b *slmpBench) sendSpeed(ctx context.Context) (_ float64, err error) {
	y, err := b.attach(func() (*yardstick.Program, error) {
		return yardstick.LoadMatch(b.local(table([]matcher.Ruleset{matcher.SLMP()})))
	})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, y.Close()) }()
	source, err := b.file(b.o.size)
	if err != nil {
		return 0, err
	}
	r, err := b.send(ctx, source, 0, "--mode", "none")
	if err != nil {
		return 0, err
	}
	return float64(r.Segments) / r.Seconds, nil
}

// places is a binder that gives each message in flight a place of its own.
type places struct {
	memory hpu.Memory
	size   int64 // bytes of a place
}

// Bind implements hpu.Binder.
func (p places) Bind(m *hpu.Message) (spin.Binding, error) {
	return spin.Binding{Window: p.memory, Place: int64(m.Slot()) * p.size, Size: p.size}, nil
}

// Unbind implements hpu.Binder.
func (places) Unbind(*hpu.Message, *spin.Result) {}

// handlerTime is what the handlers of the policies take.
const handlerTime = 30 * time.Microsecond

// work is what these handlers do: some multiplications. A thread that does not run
// does none of it.
func work(rounds int) (x uint64) {
	x = 1
	for range rounds {
		x = x*6364136223846793005 + 1442695040888963407
	}
	return x
}

// rounds returns how much work takes handlerTime on the receiver's CPU.
func (b *slmpBench) rounds() (n int, err error) {
	err = testbed.OnCPU(b.receiver, func() error {
		const sample = 100_000
		best := time.Hour
		for range 50 {
			begin := time.Now()
			if work(sample) == 0 {
				return errors.New("work comes to nothing")
			}
			best = min(best, time.Since(begin))
		}
		n = int(int64(sample) * int64(handlerTime) / int64(max(best, 1)))
		return nil
	})
	return n, err
}

// policyRows compares a message whose packets run on two HPUs with one whose
// packets run one after the other.
func (b *slmpBench) policyRows(ctx context.Context) (err error) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(runtime.NumCPU() + 4))
	g, err := b.segmentGenerator()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	rounds, err := b.rounds()
	if err != nil {
		return err
	}
	const payload = longFrame - slmpHeaders
	segments := yardstick.Segments{ID: 1, Count: slmp.MaxMessage / payload, Step: payload, Last: uint16(slmp.EOM)}
	side := func(r *rateRuns, p nic.Policy, cfg nic.Config) func(context.Context) error {
		return func(context.Context) error {
			spec := nic.ContextSpec{
				Name: "bench", Rulesets: []matcher.Ruleset{matcher.SLMP()}, Policy: p,
				Handlers: hpu.Handlers{Payload: func(h *hpu.HER) spin.Code {
					h.Count(0, work(rounds)&1)
					return spin.Success
				}},
			}
			return b.takeSegments(g, r, segments, longFrame, cfg, spec, b.cfg.duration, 100*time.Microsecond)
		}
	}
	var two, one rateRuns
	err = bench.Rounds(ctx, b.cfg.runs,
		side(&two, nic.ByPacket, nic.Config{HPUs: 2, Workers: 2, CPUs: []int{b.sender, b.receiver}}),
		side(&one, nic.ByMessage, b.oneHPU()))
	if err != nil {
		return err
	}
	row, err := bench.Ratio("slmp/packet2_over_message1", bench.AtLeast(1.6),
		two.side(fmt.Sprintf("nic, 2 HPUs on CPUs %d and %d, adaptive, policy packet", b.sender, b.receiver)),
		one.side(fmt.Sprintf("nic, 1 HPU on CPU %d, adaptive, policy message", b.receiver)))
	return b.doc.Add(fmt.Sprintf("one large message of %d-byte frames, no segment asks for an acknowledgement; a handler of %v of multiplications (as measured on an idle CPU); "+
		"from the in-kernel generator on CPU %d, never more than 1024 segments ahead, so that the NIC always has some and none is lost", longFrame, handlerTime, b.sender), row, err)
}

const (
	stateMessages = 4096 // open at a time
	stateAhead    = 4096 // segments from a message's first to the one behind the hole
)

// stateRows measures what a message in flight costs.
func (b *slmpBench) stateRows(ctx context.Context) (err error) {
	g, err := b.segmentGenerator()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	var open, holes []float64
	var on string
	side := func(runs *[]float64, count int) func(context.Context) error {
		return func(context.Context) (err error) {
			x, o, err := b.heapOfMessages(g, count)
			*runs, on = append(*runs, x), o
			return err
		}
	}
	if err := bench.Rounds(ctx, b.few(), side(&open, 1), side(&holes, 2)); err != nil {
		return err
	}
	conditions := fmt.Sprintf("growth of the Go heap of the receiving process from none to %d messages open, tables and all, after garbage collection; no user state; from the in-kernel generator", stateMessages)
	s := bench.NewSide("messages of which the first segment has come", "bytes a message", open)
	s.On = on
	row, err := bench.Absolute("slmp/state_bytes", bench.AtMost(512), s)
	if err := b.doc.Add(conditions, row, err); err != nil {
		return err
	}
	s = bench.NewSide(fmt.Sprintf("messages of which the first segment and the one %d segments behind it have come", stateAhead), "bytes a message", holes)
	s.On = on
	row, err = bench.Absolute("slmp/state_bytes_hole", bench.AtMost(512+stateAhead/8), s)
	return b.doc.Add(fmt.Sprintf("%s; 512 bytes and a bit for each of %d segments", conditions, stateAhead), row, err)
}

// heapOfMessages returns by how much the heap grows for a message of which some
// segments have come.
func (b *slmpBench) heapOfMessages(g *yardstick.Generator, segments int) (bytes float64, on string, err error) {
	n, c, err := b.openContext(b.oneHPU(), stateSpec(stateMessages))
	if err != nil {
		return 0, "", err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	if on, err = b.granted(n); err != nil {
		return 0, "", err
	}
	before := heap()
	const payload = rxFrame - slmpHeaders
	if err := b.openMessages(g, n, c, yardstick.Segments{ID: 1, Count: uint32(segments), Step: (stateAhead - 1) * payload}, stateMessages, segments); err != nil {
		return 0, "", err
	}
	return (heap() - before) / stateMessages, on, nil
}

// stateSpec is a context for so many messages that do not end.
func stateSpec(messages int) nic.ContextSpec {
	return nic.ContextSpec{
		Name: "bench", Rulesets: []matcher.Ruleset{matcher.SLMP()}, Messages: messages, Timeout: time.Minute,
		Handlers: hpu.Handlers{Payload: func(*hpu.HER) spin.Code { return spin.Success }},
	}
}

// heap returns how many bytes of the Go heap are in use.
func heap() float64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // what pools held
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

// openMessages has the first segments come of so many messages, none of which ends.
func (b *slmpBench) openMessages(g *yardstick.Generator, n *nic.NIC, c *nic.Context, s yardstick.Segments, messages, segments int) error {
	if err := g.SetSegments(s); err != nil {
		return err
	}
	// Few at a time: none may be lost, however seldom the HPU has its CPU.
	const ahead, burst = 256, 64
	frame, want := b.slmpFrame(rxFrame), messages*segments
	err := b.Host.NS.Do(func() error {
		return testbed.OnCPU(b.sender, func() error {
			begin := time.Now()
			_, err := g.Feed(frame, func(sent int) int {
				for sent < want {
					if sent-int(c.Stats().Handled) <= ahead-burst {
						return min(burst, want-sent)
					}
					if time.Since(begin) > 10*time.Second {
						return 0
					}
					time.Sleep(100 * time.Microsecond)
				}
				return 0
			})
			return err
		})
	})
	if err != nil {
		return err
	}
	if _, _, err := settled(n, c, uint64(want)); err != nil {
		return err
	}
	if m, _ := c.Messages(); m.Open != messages || c.Stats().Handled != uint64(want) {
		return fmt.Errorf("%d messages are open and %d segments handled, want %d and %d", m.Open, c.Stats().Handled, messages, want)
	}
	return nil
}
