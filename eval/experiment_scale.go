// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"time"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/report"
	"github.com/xspin/xspin/eval/yardstick"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// noopTiers are handlers that do nothing, as a context is given them: for messages if it says
// how many.
var noopTiers = []struct {
	name, tier string
	messages   int // most in flight
	handlers   func(*nic.ContextSpec) error
}{
	{"handlers in Go", "user", math.MaxInt, func(s *nic.ContextSpec) error {
		s.Handlers.Payload = func(*hpu.HER) spin.Code { return spin.Success }
		return nil
	}},
	{"handlers in eBPF", "kernel", loader.MaxMessages, func(s *nic.ContextSpec) (err error) {
		s.Kernel = &nic.Kernel{}
		object := "noop"
		if s.Messages > 0 {
			object = "noop-messages"
			s.Kernel.Segments = min(loader.MaxSegments, scaleSegments/s.Messages)
		}
		s.Kernel.Object, err = nic.BuiltinObject(object)
		return err
	}},
}

// scaleSegments is how many segments messages in eBPF can have together: more than come.
const scaleSegments = 4 << 20

// scale is where it is measured how cost grows with the number of things.
type scale struct {
	*slmpBench
	generator *yardstick.Generator // as there can be one only
	d         time.Duration        // of a run
}

// A growth is what is measured of one kind of thing, by how many there are.
type growth struct {
	rate   *line // of packets
	memory *line // of each of them
}

// add adds the last of runs, with so many there that took so much memory together.
func (g growth) add(many int, r *rxRuns, bytes float64) {
	g.rate.on, g.memory.on = r.on, r.on
	last := len(r.mpps) - 1
	g.rate.add(float64(many), r.mpps[last], r.lost[last])
	if many >= fewest {
		g.memory.add(float64(many), bytes/float64(many), -1)
	}
}

// fewest is of how many things memory is told: of fewer it would be what else the process
// happens to hold.
const fewest = 10

// scalePlots says how cost grows with the number of messages, contexts and rulesets.
func scalePlots(ctx context.Context, t *trial) (err error) {
	// As in benchRx: the generator and the receiver share this process.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(runtime.NumCPU() + 4))
	b := &slmpBench{benchLab: t.benchLab, cfg: t.benchConfig}
	manyMessages := pick(t, []int{1, 10, 100, 1000, 10_000, 100_000}, []int{1, 1000, 100_000})
	manyContexts := pick(t, []int{1, 4, 16, 64, matcher.MaxContexts}, []int{1, 16, 64})
	manyRulesets := pick(t, []int{1, 4, 16, 64, matcher.MaxRulesets}, []int{1, 16, matcher.MaxRulesets})
	s := &scale{b, nil, pick(t, 200*time.Millisecond, 100*time.Millisecond)}
	var messages, contexts, rulesets, memory, activation []*line
	var inTurn, copies []func(context.Context) error
	for _, tier := range noopTiers {
		grows := func(rates *[]*line, what string) growth {
			g := growth{newLine(tier.name, tier.tier), newLine(what+", "+tier.name, tier.tier)}
			*rates, memory = append(*rates, g.rate), append(memory, g.memory)
			return g
		}
		m, c, r := grows(&messages, "message in flight"), grows(&contexts, "context"), grows(&rulesets, "ruleset")
		a := newLine(tier.name, tier.tier)
		activation = append(activation, a)
		for _, n := range manyMessages {
			inTurn = append(inTurn, func(context.Context) error { return s.messages(min(n, tier.messages), tier.handlers, m) })
		}
		inTurn = append(inTurn, func(ctx context.Context) error { return s.contexts(ctx, manyContexts, tier.handlers, c, a) })
		for _, n := range manyRulesets {
			copies = append(copies, func(context.Context) error { return s.rulesets(n, tier.handlers, r) })
		}
	}
	if err := s.rounds(ctx, b.segmentGenerator, inTurn); err != nil {
		return err
	}
	if err := s.rounds(ctx, b.benchLab.generator, copies); err != nil {
		return err
	}
	rate := report.Axis{Label: "packets handled", Unit: "million/s"}
	for _, p := range []struct {
		name, title, x string
		lines          []*line
	}{
		{"scale-messages", "Packets per second by number of messages in flight", "messages in flight, whose packets take turns", messages},
		{"scale-contexts", "Packets per second by number of contexts", "active contexts, whose packets take turns", contexts},
		{"scale-rulesets", "Packets per second by number of rulesets", "rulesets of a context; the last one matches", rulesets},
	} {
		t.plot(report.Plot{Name: p.name, Title: p.title, X: report.Axis{Label: p.x, Log: true}, Y: rate}, p.lines...)
	}
	t.plot(report.Plot{
		Name: "scale-memory", Title: "Memory for each message, context and ruleset, by how many there are",
		X: report.Axis{Label: "how many there are", Log: true}, Y: report.Axis{Label: "memory for each", Unit: "bytes", Log: true},
	}, memory...)
	t.plot(report.Plot{
		Name: "scale-activation", Title: "Time to install and activate a context, by how many there are",
		X: report.Axis{Label: "active contexts", Log: true}, Y: report.Axis{Label: "time for each", Unit: "ms"},
	}, activation...)
	return nil
}

// rounds has the sides take turns, with a generator.
func (s *scale) rounds(ctx context.Context, open func() (*yardstick.Generator, error), sides []func(context.Context) error) (err error) {
	if s.generator, err = open(); err != nil {
		return err
	}
	return errors.Join(bench.Rounds(ctx, s.few(), sides...), s.generator.Close())
}

// messages measures packets that go round so many messages, none of which ends.
func (s *scale) messages(many int, handlers func(*nic.ContextSpec) error, g growth) (err error) {
	n, err := s.openEmpty(s.oneHPU())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	before, err := held()
	if err != nil {
		return err
	}
	spec := stateSpec(many)
	spec.Handlers = hpu.Handlers{} // others
	if err := handlers(&spec); err != nil {
		return err
	}
	c, err := activate(n, spec)
	if err != nil {
		return err
	}
	var r rxRuns
	if r.on, err = s.granted(n); err != nil {
		return err
	}
	const payload = rxFrame - slmpHeaders
	if err := s.openMessages(s.generator, n, c, yardstick.Segments{ID: 1, Count: math.MaxUint32, Among: uint32(many), Step: payload}, many, 1); err != nil {
		return err
	}
	after, err := held()
	if err != nil {
		return err
	}
	f, err := s.feed(s.generator, s.slmpFrame(rxFrame), s.d, 0, ahead, burst, handled(c))
	if err != nil {
		return err
	}
	_, stats, err := settled(n, c, uint64(many+f.sent))
	if err != nil {
		return err
	}
	r.mpps = []float64{float64(f.done) / f.took.Seconds() / 1e6}
	r.lost = []float64{max(0, 1-float64(stats.Handled-uint64(many))/float64(f.sent))}
	g.add(many, &r, after-before)
	return nil
}

// held returns how many bytes this process has on the Go heap, and in the maps of its BPF programs.
func held() (float64, error) {
	bytes := heap()
	_, _, maps, err := descriptors()
	return bytes + maps, err
}

// contexts is a receiver that counts what contexts have handled, on HPUs or in the kernel.
type contexts struct {
	noop
	contexts []*nic.Context
}

// add makes one more, with handlers.
func (c *contexts) add(spec nic.ContextSpec, handlers func(*nic.ContextSpec) error) error {
	if err := handlers(&spec); err != nil {
		return err
	}
	one, err := activate(c.NIC, spec)
	c.contexts = append(c.contexts, one)
	return err
}

func (c contexts) counters() (sum received, _ error) {
	for _, one := range c.contexts {
		sum.packets += one.Stats().Handled
	}
	return sum, nil
}

// contexts measures packets that go round contexts, while there are more and more.
func (s *scale) contexts(ctx context.Context, many []int, handlers func(*nic.ContextSpec) error, g growth, activation *line) (err error) {
	n, err := s.openEmpty(s.oneHPU())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	before, err := held()
	if err != nil {
		return err
	}
	all := contexts{noop: noop{n}}
	for _, want := range many {
		begin, more := time.Now(), want-len(all.contexts)
		for have := len(all.contexts); have < want; have++ {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			spec := nic.ContextSpec{Name: fmt.Sprint("bench-", have), Rulesets: []matcher.Ruleset{numbered(have)}}
			if err := all.add(spec, handlers); err != nil {
				return err
			}
		}
		activation.add(float64(want), time.Since(begin).Seconds()*1e3/float64(more), -1)
		after, err := held()
		if err != nil {
			return err
		}
		if err := s.generator.SetSegments(yardstick.Segments{Count: math.MaxUint32, Among: uint32(want)}); err != nil {
			return err
		}
		var r rxRuns
		if err := s.flood(s.generator, s.udpFrame(rxFrame), s.d, &r, all); err != nil {
			return fmt.Errorf("%d contexts: %w", want, err)
		}
		g.add(want, &r, after-before)
		activation.on = r.on
	}
	return nil
}

// numbered matches generated segments of messages whose number has this last byte.
func numbered(id int) matcher.Ruleset {
	const word = 11 // behind Ethernet, IPv4, UDP and the SLMP flags
	r := matcher.UDPPort(benchPort)
	r.Name = fmt.Sprint("number-", id)
	r.Rules = append(r.Rules, matcher.Rule{Index: word, Mask: 0xff, Start: uint32(id), End: uint32(id)})
	return r
}

// rulesets measures packets that the last of a context's rulesets matches.
func (s *scale) rulesets(many int, handlers func(*nic.ContextSpec) error, g growth) (err error) {
	n, err := s.openEmpty(s.oneHPU())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	before, err := held()
	if err != nil {
		return err
	}
	all := contexts{noop: noop{n}}
	if err := all.add(nic.ContextSpec{Name: "bench", Rulesets: s.services(many)}, handlers); err != nil {
		return err
	}
	after, err := held()
	if err != nil {
		return err
	}
	var r rxRuns
	if err := s.flood(s.generator, s.full256Frame(many-1), s.d, &r, all); err != nil {
		return fmt.Errorf("%d rulesets: %w", many, err)
	}
	g.add(many, &r, after-before)
	return nil
}

// scaleMatching says what matching costs by the number of rulesets.
func scaleMatching(ctx context.Context, t *trial) (err error) {
	d := pick(t, 50*time.Millisecond, 20*time.Millisecond)
	type pair struct {
		line        *line
		x           float64
		match, pass *timer
	}
	var pairs []pair
	var sides []func(context.Context) error
	defer func() {
		for _, s := range pairs {
			err = errors.Join(err, s.match.Close(), s.pass.Close())
		}
	}()
	timed := func(l *line, many int, table *matcher.Table, frame []byte, verdict uint32) error {
		match, err := t.timer(func() (*yardstick.Program, error) { return yardstick.LoadMatch(table) }, frame, verdict, d)
		if err != nil {
			return fmt.Errorf("%s, %d rulesets: %w", l.name, many, err)
		}
		pass, err := t.timer(plain(yardstick.Pass), frame, xdpPass, d)
		if err != nil {
			return errors.Join(err, match.Close())
		}
		pairs = append(pairs, pair{l, float64(many), match, pass})
		sides = append(sides, match.time, pass.time)
		return nil
	}
	program := func(what string) *line {
		l := newLine("XDP program, "+what, "")
		l.on = "the matching engine of the XDP program alone"
		return l
	}
	worst, late, hit := program("none matches, no two look at the same bits"), program("none matches, one but for its last word"), program("the last one matches")
	for _, many := range pick(t, []int{1, 2, 4, 8, 16, 32, 64, 128, matcher.MaxRulesets}, []int{1, 16, matcher.MaxRulesets}) {
		hard, frame := hardTable(many)
		services := table(t.services(many))
		err := errors.Join(
			timed(hit, many, services, t.full256Frame(many-1), xdpDrop),
			timed(late, many, services, t.lateFrame(), xdpPass),
			timed(worst, many, hard, frame, xdpPass))
		if err != nil {
			return err
		}
	}
	if err := bench.Rounds(ctx, min(t.runs, 5), sides...); err != nil { // they differ by a few ns
		return err
	}
	for _, s := range pairs {
		for i, ns := range s.match.runs {
			s.line.add(s.x, max(ns-s.pass.runs[i], 1), -1) // whole ns
		}
	}
	t.plot(report.Plot{
		Name: "scale-matching", Title: "Time to match a packet, by number of rulesets",
		X: report.Axis{Label: "rulesets of 8 rules and EOM", Log: true}, Y: report.Axis{Label: "time to match", Unit: "ns", Log: true},
	}, worst, late, hit)
	return nil
}
