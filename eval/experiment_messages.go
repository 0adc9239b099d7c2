// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/report"
	"github.com/xspin/xspin/eval/yardstick"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns/testbed"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// Of FPsPIN, whose sender and receiver share a Ryzen 7 2700, in Gbit/s: the medians of the
// data that its repository ships, the best over message sizes and threads, by window.
var fpspinWindow = map[int]float64{1: 0.528, 4: 1.79, 16: 4.74, 64: 5.76, 256: 6.68, 1024: 6.40}

const fpspinSLMP = "FPsPIN (D4.7, section 4.5.2), an FPGA at 40 MHz and a Ryzen 7 2700: another machine"

// withSLMP measures messages in runs of a length, with files no longer than size, and takes
// the rows that it adds.
func (t *trial) withSLMP(d time.Duration, size int64, measure func(*slmpBench) error) (err error) {
	cfg, o := t.benchConfig, slmpDefaults()
	cfg.duration, o.size = d, size
	doc := bench.NewDocument(bench.Env{})
	b, err := newSLMPBench(t.benchLab, cfg, o, doc)
	if err != nil {
		return err
	}
	err = errors.Join(measure(b), b.close())
	t.e.Rows = append(t.e.Rows, doc.Results...)
	return err
}

// messagePeers draws what part file has measured, and UDP beside.
func messagePeers(ctx context.Context, t *trial) error {
	if t.row("slmp/file_over_tcp") == nil {
		return nil // it has no iperf3, and has said so
	}
	p := report.Plot{
		Name: "messages-peers", Title: "Goodput of a file",
		Y: report.Axis{Label: "goodput", Unit: "Gbit/s"},
	}
	ours, inKernel, theirs := newLine("XsPIN", "user"), newLine("XsPIN, handlers in eBPF", "kernel"), newLine("Linux", "")
	bar := func(l *line, name string, s *bench.Side) {
		for _, gbps := range s.Runs {
			l.add(float64(len(p.X.Names)), gbps, -1)
		}
		l.on = strings.TrimPrefix(l.on+". "+name+": "+s.On, ". ")
		p.X.Names = append(p.X.Names, name)
	}
	bar(ours, "SLMP", t.row("slmp/file").A)
	bar(ours, "one ack per segment", t.row("slmp/file_plain").A)
	bar(ours, "into a file", t.row("slmp/file_stored").A)
	if r := t.row("kernel/file"); r != nil {
		bar(inKernel, "handlers in eBPF", r.A)
	}
	p.Marks = []report.Mark{
		{Name: "FPsPIN: SLMP", X: 0, Y: 6.7, Source: fpspinSLMP},
		{Name: "FPsPIN: TCP", X: float64(len(p.X.Names)), Y: 8.4, Source: fpspinSLMP},
	}
	bar(theirs, "TCP", t.row("slmp/file_over_tcp").B)
	bar(theirs, "TCP without TSO/GSO", t.row("slmp/file_over_tcp_same_frames").B)
	x := float64(len(p.X.Names))
	p.X.Names = append(p.X.Names, "UDP")
	err := bench.Rounds(ctx, t.runs, func(ctx context.Context) error {
		f, err := testbed.IPerf(ctx, t.Lab, t.sender, t.receiver, "-u", "-b", "0", "-l", "1408", "-t", "1")
		if err == nil {
			theirs.add(x, f.Gbps, f.Lost)
		}
		return err
	})
	if err != nil {
		return err
	}
	t.plot(p, ours, inKernel, theirs)
	return nil
}

// messageWindows sweeps windows, next to the one that FPsPIN's report predicts.
func messageWindows(ctx context.Context, t *trial) error {
	err := t.withSLMP(pick(t, 500*time.Millisecond, 100*time.Millisecond), pick[int64](t, 256<<20, 64<<20), func(b *slmpBench) error {
		b.o.candidates = pick(t, b.o.candidates, []int{1, 16, 256})
		b.o.parallels = pick(t, b.o.parallels, []int{1, 8})
		// All of them are for xspin bench slmp --only auto, and take three minutes more.
		b.o.rates, b.o.delays = []uint64{100e6, 1e9, 0}, []time.Duration{0, 20 * time.Millisecond}
		if err := b.windowRows(ctx); err != nil || t.quick {
			return err
		}
		b.o.candidates = b.o.candidates[2:] // those before are not the best on any of these paths
		return b.autoRows(ctx)
	})
	if err != nil {
		return err
	}
	p := report.Plot{
		Name: "messages-window", Title: "Goodput by window",
		X: report.Axis{Label: "window", Unit: "segments", Log: true}, Y: report.Axis{Label: "goodput", Unit: "Gbit/s"},
	}
	var lines []*line
	most := 0.0
	for _, r := range t.e.Rows {
		var window, parallel int
		prefix, tier := "", "user"
		if n, _ := fmt.Sscanf(r.Name, "slmp/window/%d/%d", &window, &parallel); n != 2 {
			if n, _ := fmt.Sscanf(r.Name, "kernel/window/%d/%d", &window, &parallel); n != 2 {
				continue
			}
			prefix, tier = "handlers in eBPF, ", "kernel"
		}
		name := prefix + atATime(parallel)
		i := slices.IndexFunc(lines, func(l *line) bool { return l.name == name })
		if i < 0 {
			i = len(lines)
			lines = append(lines, newLine(name, tier))
		}
		for _, gbps := range r.A.Runs {
			lines[i].add(float64(window), gbps, -1)
		}
		lines[i].on = r.A.On
		most = max(most, r.Median)
	}
	if r := t.row("slmp/predicted_window"); r != nil {
		p.Marks = append(p.Marks, report.Mark{Name: fmt.Sprintf("the window that FPsPIN's report predicts, %.0f", max(r.Median, 1)), X: max(r.Median, 1), Y: most, Source: "equations 1 to 3 of FPsPIN's report, with speeds measured here"})
	}
	for w, gbps := range fpspinWindow {
		p.Marks = append(p.Marks, report.Mark{Name: "FPsPIN", X: float64(w), Y: gbps, Source: fpspinSLMP})
	}
	slices.SortFunc(p.Marks, func(a, b report.Mark) int { return strings.Compare(b.Name, a.Name) })
	t.plot(p, lines...)
	return nil
}

// atATime says how many messages are on their way.
func atATime(messages int) string {
	if messages == 1 {
		return "1 message at a time"
	}
	return fmt.Sprintf("%d messages at a time", messages)
}

// messageSizes sweeps the size of messages and the number of senders.
func messageSizes(ctx context.Context, t *trial) error {
	d := pick(t, 200*time.Millisecond, 100*time.Millisecond)
	return t.withSLMP(d, 1<<20, func(b *slmpBench) (err error) {
		sizes := pick(t, []int{64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20}, []int{64, 8 << 10, 1 << 20})
		most := int64(sizes[len(sizes)-1])
		window, free, err := memory(most)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, free()) }()
		mem, inKernel, err := kernelDeposit(most)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, mem.Close()) }()
		inKernel.Messages, inKernel.Kernel.Segments = 512, 0 // 16 at a time of each of 16 senders, and those that end
		onHPU := depositSpec(window)
		n, err := b.openEmpty(b.oneHPU()) // once: it takes as long as a run
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, n.Close()) }()
		goodput := func(ctx context.Context, l *line, x float64, spec nic.ContextSpec, senders, size, outstanding int) (err error) {
			c, err := activate(n, spec)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, n.Remove(c)) }()
			unwire, err := b.wireFor(spec)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, unwire()) }()
			if l.on, err = b.granted(n); err != nil {
				return err
			}
			reports, err := b.runLoads(ctx, senders, load{Size: size, Outstanding: outstanding, Warmup: d / 4, For: d})
			if err != nil {
				return fmt.Errorf("%s, %d senders, %d messages of %d bytes at a time: %w", l.name, senders, outstanding, size, err)
			}
			sum := 0.0
			for _, r := range reports {
				sum += float64(r.Messages) * float64(size) * 8 / 1e9 / r.Seconds
			}
			l.add(x, sum, -1)
			return nil
		}
		var bySize, bySenders []*line
		var sides []func(context.Context) error
		const size = 256 << 10
		for _, c := range []struct {
			prefix, tier string
			spec         nic.ContextSpec
		}{{"", "user", onHPU}, {"handlers in eBPF, ", "kernel", inKernel}} {
			for _, outstanding := range []int{1, 16} {
				one, many := newLine(c.prefix+atATime(outstanding), c.tier), newLine(c.prefix+atATime(outstanding)+" each", c.tier)
				bySize, bySenders = append(bySize, one), append(bySenders, many)
				for _, size := range sizes {
					sides = append(sides, func(ctx context.Context) error {
						return goodput(ctx, one, float64(size), c.spec, 1, size, outstanding)
					})
				}
				for _, senders := range pick(t, []int{1, 2, 4, 8, 16}, []int{1, 4}) {
					sides = append(sides, func(ctx context.Context) error {
						return goodput(ctx, many, float64(senders), c.spec, senders, size, outstanding)
					})
				}
			}
		}
		if err := bench.Rounds(ctx, b.few(), sides...); err != nil {
			return err
		}
		y := report.Axis{Label: "goodput", Unit: "Gbit/s"}
		t.plot(report.Plot{
			Name: "messages-size", Title: "Goodput by message size", X: report.Axis{Label: "message size", Unit: "bytes", Log: true}, Y: y,
		}, bySize...)
		t.plot(report.Plot{
			Name: "messages-senders", Title: fmt.Sprintf("Goodput of %d KiB messages, by number of sending processes on one CPU", size>>10),
			X: report.Axis{Label: "sending processes", Log: true}, Y: y,
		}, bySenders...)
		return nil
	})
}

// messageParts says where an HPU's time for a message goes, as FPsPIN's breakdown does. The
// parts are differences of the HPU's busy time between contexts that do one thing more.
func messageParts(ctx context.Context, t *trial) error {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(runtime.NumCPU() + 4))
	d := pick(t, 150*time.Millisecond, 60*time.Millisecond)
	return t.withSLMP(d, 1<<20, func(b *slmpBench) (err error) {
		const payload = longFrame - slmpHeaders
		counts := pick(t, []int{1, 4, 16, 64, 256, 1024}, []int{1, 16, 256})
		window, free, err := memory(int64(counts[len(counts)-1] * payload))
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, free()) }()
		g, err := b.segmentGenerator()
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, g.Close()) }()
		success := func(*hpu.HER) spin.Code { return spin.Success }
		packets := nic.ContextSpec{Name: "bench", Rulesets: []matcher.Ruleset{matcher.SLMP()}, Handlers: hpu.Handlers{Payload: success}}
		three := packets
		three.Handlers.Header = success
		three.Handlers.Completion = func(*hpu.Completion) spin.Code { return spin.Success }
		copied := three
		copied.Handlers.Header = func(*hpu.HER) spin.Code { return spin.Proceed }
		copied.Handlers.Payload = nil
		copied.Window = hpu.Memory(window)
		specs := []nic.ContextSpec{packets, three, copied, copied}
		// Of the last one each message asks for an acknowledgement.
		asks := []bool{false, false, false, true}
		busy := make([]map[int][]float64, len(specs))
		on := ""
		var sides []func(context.Context) error
		for i, spec := range specs {
			busy[i] = map[int][]float64{}
			for _, n := range counts {
				sides = append(sides, func(context.Context) error {
					s := yardstick.Segments{ID: 1, Count: uint32(n), Step: payload, Last: uint16(slmp.EOM)}
					if asks[i] {
						s.Every, s.Ask = uint32(n), uint16(slmp.SYN|slmp.Cumulative)
					}
					var r rateRuns
					if err := b.takeSegments(g, &r, s, longFrame, b.oneHPU(), spec, d, 0); err != nil {
						return err
					}
					on = r.on
					busy[i][n] = append(busy[i][n], r.busy[0])
					return nil
				})
			}
		}
		if err := bench.Rounds(ctx, b.few(), sides...); err != nil {
			return err
		}
		names := []string{"packet", "header and completion", "copy", "acknowledgement"}
		var parts []*line
		for i, name := range names {
			l := newLine(name, "user")
			l.on = on
			for _, n := range counts {
				for _, ns := range stages(busy, n) {
					l.add(float64(n), ns[i], -1)
				}
			}
			parts = append(parts, l)
		}
		t.plot(report.Plot{
			Name: "messages-parts", Title: "Where an HPU's time for a segment goes, by message length", Stack: true,
			X: report.Axis{Label: "message length", Unit: fmt.Sprintf("segments of %d bytes", payload)}, Y: report.Axis{Label: "busy time for a segment", Unit: "ns"},
		}, parts...)
		return nil
	})
}

// stages returns, run by run, how much longer each of some sides takes than the one before,
// of which all do what that one does and more: never less than nothing, so that noise does
// not make a part negative.
func stages(sides []map[int][]float64, at int) (runs [][]float64) {
	for run := range sides[0][at] {
		var parts []float64
		before := 0.0
		for _, s := range sides {
			parts = append(parts, max(0, s[at][run]-before))
			before = max(before, s[at][run])
		}
		runs = append(runs, parts)
	}
	return runs
}
