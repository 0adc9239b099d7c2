// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/report"
	"github.com/xspin/xspin/eval/yardstick"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/clock"
	"github.com/xspin/xspin/internal/quantile"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns/testbed"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// anatomyParts are the stages of a packet's way, bottom up.
var anatomyParts = []string{"match", "redirect", "ring wait", "dispatch", "handler", "copy", "egress"}

// anatomyPlots says where the nanoseconds of a packet go.
func anatomyPlots(ctx context.Context, t *trial) (err error) {
	// As in benchRx: the generator and the receiver share this process.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(runtime.NumCPU() + 4))
	b := &slmpBench{benchLab: t.benchLab, cfg: t.benchConfig}
	g, err := b.generator()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	d := pick(t, 100*time.Millisecond, 40*time.Millisecond)
	sizes := pick(t, []int{64, 256, 512, 1024, 1514}, []int{64, 512, 1514})
	spec := func(f hpu.Handler) nic.ContextSpec {
		s := noopSpec()
		s.Handlers.Payload = f
		return s
	}
	var parts []*line
	for _, name := range anatomyParts {
		parts = append(parts, newLine(name, "user"))
	}
	hidden := 0 // runs that do not tell how long a ring takes
	var sides []func(context.Context) error
	for _, size := range sizes {
		frame := b.udpFrame(size)
		sides = append(sides, func(context.Context) error {
			match, err := b.matchNS(frame, d)
			if err != nil {
				return err
			}
			drop, err := b.dropNS(g, frame, d)
			if err != nil {
				return err
			}
			noop, err := b.bursts(g, frame, d, spec(func(*hpu.HER) spin.Code { return spin.Success }))
			if err != nil {
				return err
			}
			buf := make([]byte, size)
			copied, err := b.bursts(g, frame, d, spec(func(h *hpu.HER) spin.Code { h.CopyTo(buf, 0); return spin.Success }))
			if err != nil {
				return err
			}
			sent, err := b.bursts(g, frame, d, spec(func(h *hpu.HER) spin.Code {
				if h.Send() != nil {
					return spin.Drop
				}
				return spin.Success
			}))
			if err != nil {
				return err
			}
			arrival, ok, err := b.arrivalNS(g, frame, d)
			if err != nil {
				return err
			}
			if !ok {
				hidden++
			}
			redirect := max(0, noop.sender-drop-match)
			dispatch := max(0, noop.busy-noop.handler)
			for i, ns := range []float64{match, redirect, max(0, arrival-redirect-dispatch), dispatch, noop.handler, max(0, copied.handler-noop.handler), max(0, sent.busy-noop.busy)} {
				parts[i].on = noop.on
				if anatomyParts[i] == "ring wait" && !ok {
					continue
				}
				parts[i].add(float64(size), ns, -1)
			}
			return nil
		})
	}
	if err := bench.Rounds(ctx, t.runs, sides...); err != nil {
		return err
	}
	if hidden > 0 {
		t.benchConfig.warn(fmt.Sprintf("%d of %d runs say nothing of the ring wait: another program had the HPU's CPU whenever a frame came", hidden, t.runs*len(sizes)))
	}
	x, y := report.Axis{Label: "frame size", Unit: "bytes"}, report.Axis{Label: "time per packet", Unit: "ns"}
	t.plot(report.Plot{Name: "anatomy-parts", Title: "Where a packet's time goes", Stack: true, X: x, Y: y}, parts...)
	t.plot(report.Plot{Name: "anatomy-parts-busy", Title: "Where a packet's time goes, without waiting in rings", Stack: true, X: x, Y: y}, append(parts[:2:2], parts[3:]...)...)
	return nil
}

// matchNS returns what matching takes, over a program that passes everything.
func (b *slmpBench) matchNS(frame []byte, d time.Duration) (ns float64, err error) {
	table := b.local(table([]matcher.Ruleset{matcher.UDPPort(benchPort)}))
	for _, p := range []struct {
		load func() (*yardstick.Program, error)
		want uint32
		sign float64
	}{{func() (*yardstick.Program, error) { return yardstick.LoadMatch(table) }, xdpDrop, 1}, {plain(yardstick.Pass), xdpPass, -1}} {
		t, err := b.timer(p.load, frame, p.want, d/4)
		if err != nil {
			return 0, err
		}
		if err := errors.Join(t.time(context.Background()), t.Close()); err != nil {
			return 0, err
		}
		ns += p.sign * t.runs[0]
	}
	return max(0, ns), nil
}

// dropNS returns what a frame takes that is generated and dropped at once.
func (b *slmpBench) dropNS(g *yardstick.Generator, frame []byte, d time.Duration) (ns float64, err error) {
	y, err := b.attach(plain(yardstick.Drop))
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, y.Close()) }()
	return b.burst(g, frame, d, burst, func(int) bool { return true })
}

// burst sends frames, so many at once whenever all before are done, and returns what one
// takes its sender, which runs the XDP program and the redirect too: in the median of the
// bursts, since whoever takes the CPU meanwhile is in some of them.
func (b *slmpBench) burst(g *yardstick.Generator, frame []byte, d time.Duration, many int, done func(sent int) bool) (float64, error) {
	var each []float64
	begin := time.Now()
	var since time.Time
	err := b.Host.NS.Do(func() error {
		return testbed.OnCPU(b.sender, func() error {
			_, err := g.Feed(frame, func(sent int) int {
				now := time.Now()
				if sent > 0 {
					each = append(each, float64(now.Sub(since))/float64(many))
				}
				for !done(sent) {
					if time.Since(now) > stall {
						return 0
					}
					unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
				}
				if len(each) > 0 && time.Since(begin) > d { // one at least, however busy the machine is
					return 0
				}
				since = time.Now()
				return many
			})
			return err
		})
	})
	if err == nil && len(each) == 0 {
		err = fmt.Errorf("bursts of %d frames: none was done in %v", many, stall)
	}
	return quantile.Median(each), err
}

// A burstRun is what a packet takes, in ns.
type burstRun struct {
	sender, busy, handler float64
	on                    string
}

// bursts measures a NIC whose HPU takes a burst before the next one comes.
func (b *slmpBench) bursts(g *yardstick.Generator, frame []byte, d time.Duration, spec nic.ContextSpec) (r burstRun, err error) {
	n, c, err := b.openContext(b.oneHPU(), spec)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	sink, err := b.attachHost()
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, sink.Close()) }()
	if r.on, err = b.granted(n); err != nil {
		return r, err
	}
	var busy, handler []float64
	var last time.Duration
	var before spin.ContextStats
	var failed error
	r.sender, err = b.burst(g, frame, d, burst, func(sent int) bool {
		stats := c.Stats()
		if int(stats.Handled) < sent {
			return false
		}
		all, err := noop{n}.counters()
		failed = errors.Join(failed, err)
		if sent > 0 {
			busy = append(busy, float64(all.busy-last)/burst)
			handler = append(handler, float64(stats.HandlerSum-before.HandlerSum)/burst)
		}
		last, before = all.busy, stats
		return true
	})
	if err := errors.Join(err, failed); err != nil {
		return r, err
	}
	if len(busy) == 0 {
		return r, fmt.Errorf("the HPU did not handle a burst of %d frames in %v", burst, stall)
	}
	r.busy, r.handler = quantile.Median(busy), quantile.Median(handler)
	return r, nil
}

// arrivalNS returns what passes from the XDP program to the handler, of frames one by one to
// an HPU that spins: the median. An HPU that finds nothing to do gives its CPU to whoever
// wants it, and a frame that comes meanwhile waits for that program, for milliseconds, which
// says nothing of rings. So the HPU is a real-time thread, as far as the kernel allows it, to
// which ordinary ones have to leave the CPU. Frames that waited for another program
// nonetheless do not count. If all are such, ok is false.
func (b *slmpBench) arrivalNS(g *yardstick.Generator, frame []byte, d time.Duration) (ns float64, ok bool, err error) {
	if b.sender == b.receiver {
		return 0, false, nil
	}
	var waits []float64 // the HPU's, until the NIC is closed
	var usage unix.Rusage
	switches := int64(-1)
	var clean atomic.Bool // there is one
	spec := noopSpec()
	spec.Timestamp = true
	spec.Handlers.Payload = func(h *hpu.HER) spin.Code {
		ns := float64(clock.Monotonic() - h.Arrival())
		before := switches
		if before < 0 { // the first frame
			_ = unix.SchedSetAttr(0, &unix.SchedAttr{Policy: unix.SCHED_FIFO, Priority: 1, Flags: unix.SCHED_FLAG_RESET_ON_FORK}, 0)
		}
		if unix.Getrusage(unix.RUSAGE_THREAD, &usage) == nil {
			switches = int64(usage.Nvcsw) + int64(usage.Nivcsw)
		}
		if switches == before {
			waits = append(waits, ns)
			clean.Store(true)
		}
		return spin.Success
	}
	cfg := b.oneHPU()
	cfg.Wait = hpu.Spin
	n, c, err := b.openContext(cfg, spec)
	if err != nil {
		return 0, false, err
	}
	const patience = 20 // times as long, if there is no such frame
	for try := 0; err == nil && try < patience && !clean.Load(); try++ {
		before := c.Stats().Handled // when the last burst is done: all
		_, err = b.burst(g, frame, d, 1, func(sent int) bool { return c.Stats().Handled-before >= uint64(sent) })
	}
	if err := errors.Join(err, n.Close()); err != nil {
		return 0, false, err
	}
	if len(waits) == 0 {
		return 0, false, nil
	}
	return quantile.Median(waits), true, nil
}

// anatomyRows says what a NIC takes: time to open it, memory, maps and descriptors.
func anatomyRows(ctx context.Context, t *trial) error {
	figures := []struct {
		name, unit, what string
		runs             []float64
	}{
		{name: "anatomy/open_ms", unit: "ms", what: "time until a NIC is open and one context is active"},
		{name: "anatomy/memory_bytes", unit: "bytes", what: "growth of the process's resident memory (statm), buffers and rings in it as far as they were touched"},
		{name: "anatomy/maps", unit: "maps", what: "BPF maps of its programs"},
		{name: "anatomy/maps_bytes", unit: "bytes", what: "what the kernel charges for these maps (memlock)"},
		{name: "anatomy/descriptors", unit: "descriptors", what: "file descriptors, of sockets, maps and all"},
	}
	err := bench.Rounds(ctx, t.runs, func(context.Context) error {
		heap()
		fds, maps, bytes, err := descriptors()
		if err != nil {
			return err
		}
		resident, err := residentBytes()
		if err != nil {
			return err
		}
		begin := time.Now()
		n, err := t.open(nic.Config{}, noopSpec())
		if err != nil {
			return err
		}
		took := time.Since(begin)
		fds2, maps2, bytes2, err := descriptors()
		resident2, err2 := residentBytes()
		if err := errors.Join(err, err2, n.Close()); err != nil {
			return err
		}
		for i, v := range []float64{took.Seconds() * 1e3, max(0, resident2-resident), maps2 - maps, bytes2 - bytes, fds2 - fds} {
			figures[i].runs = append(figures[i].runs, v)
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, f := range figures {
		row, err := bench.Absolute(f.name, bench.Lower, bench.NewSide(f.what, f.unit, f.runs))
		if err != nil {
			return err
		}
		row.Conditions = fmt.Sprintf("a NIC with %d HPUs on %d queues, rings of %d", nic.DefaultHPUs, t.Queues, nic.DefaultRing)
		t.e.Rows = append(t.e.Rows, row)
	}
	return nil
}

// descriptors counts those of this process, and the maps that they and its BPF programs hold,
// with what these are charged for.
func descriptors() (all, maps, bytes float64, err error) {
	const dir = "/proc/self/fd"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, 0, 0, err
	}
	var programs []int
	for _, e := range entries {
		all++
		if to, err := os.Readlink(filepath.Join(dir, e.Name())); err != nil || to != "anon_inode:bpf-prog" {
			continue // or it is that of the directory, which is closed
		}
		info, err := os.ReadFile(filepath.Join("/proc/self/fdinfo", e.Name()))
		if err != nil {
			return 0, 0, 0, err
		}
		for line := range strings.Lines(string(info)) {
			if v, ok := strings.CutPrefix(line, "prog_id:"); ok {
				id, err := strconv.Atoi(strings.TrimSpace(v))
				if err != nil {
					return 0, 0, 0, fmt.Errorf("/proc/self/fdinfo/%s: %w", e.Name(), err)
				}
				programs = append(programs, id)
			}
		}
	}
	n, charged, err := yardstick.Maps(programs)
	return all, float64(n), float64(charged), err
}

// residentBytes is what of this process is in memory.
func residentBytes() (float64, error) {
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0, err
	}
	var size, pages float64
	if _, err := fmt.Sscan(string(b), &size, &pages); err != nil {
		return 0, fmt.Errorf("/proc/self/statm: %w", err)
	}
	return pages * float64(os.Getpagesize()), nil
}
