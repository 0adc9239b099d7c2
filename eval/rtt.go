// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/quantile"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// An rttCase compares round trips answered by a handler and by Linux.
type rttCase struct {
	name     string
	goal     bench.Goal
	proto    rtt.Proto
	size     int
	client   rtt.Wait
	interval time.Duration
	cpus     [2]int // of the client and of who answers, -1 for any
	nic      hpu.Wait
	host     rtt.Wait // of the UDP echo server
	hook     nic.Hook // of handlers in eBPF
}

// warmups are the pings of a run that nothing is reported of.
const warmups = 200

func benchRTT(ctx context.Context, lab *benchLab, cfg benchConfig, doc *bench.Document) error {
	cross := [2]int{lab.sender, lab.receiver}
	same := [2]int{lab.receiver, lab.receiver}
	loose := [2]int{-1, -1}
	const size = 16
	cases := []rttCase{
		{"rtt/udp_cross_core", bench.AtMost(0.60), rtt.UDP, size, rtt.Block, 0, cross, hpu.Adaptive, rtt.Block, 0},
		{"rtt/udp_same_core", bench.AtMost(1.4), rtt.UDP, size, rtt.Block, 0, same, hpu.Adaptive, rtt.Block, 0},
		{"rtt/udp_unpinned", bench.Lower, rtt.UDP, size, rtt.Block, 0, loose, hpu.Adaptive, rtt.Block, 0},
		{"rtt/udp_5ms_cross_core", bench.Lower, rtt.UDP, size, rtt.Block, 5 * time.Millisecond, cross, hpu.Adaptive, rtt.Block, 0},
		{"rtt/udp_5ms_same_core", bench.Lower, rtt.UDP, size, rtt.Block, 5 * time.Millisecond, same, hpu.Adaptive, rtt.Block, 0},
		{"rtt/udp_spin_over_spin", bench.AtMost(1.1), rtt.UDP, size, rtt.Spin, 0, cross, hpu.Spin, rtt.Spin, 0},
		{"rtt/icmp_sleeping_16", bench.Lower, rtt.ICMP, size, rtt.Spin, 0, cross, hpu.Sleep, "", 0},
	}
	for _, size := range []int{16, 516, 1016, 1416} {
		cases = append(cases, rttCase{fmt.Sprintf("rtt/icmp_awake_%d", size), bench.AtMost(2.0), rtt.ICMP, size, rtt.Spin, 0, cross, hpu.Spin, "", 0})
	}
	if lab.sender == lab.receiver {
		// Two that spin on one CPU wait for the scheduler's tick.
		cfg.warn("one CPU: cross-core rows are of the same core")
	}
	for _, c := range cases {
		if err := lab.roundTrips(ctx, cfg, doc, c); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

// rttRuns are the figures of one side, run by run.
type rttRuns struct {
	p50, p99, lost    []float64 // us, us, fraction
	dispatch, handler []float64 // us, of the NIC
	on                string
}

func (r *rttRuns) side(what string) bench.Side {
	s := bench.NewSide(what, "us", r.p50)
	lost := bench.NewSide("", "", r.lost).Median
	s.Lost, s.On = &lost, r.on
	s.Add("p99_us", r.p99)
	s.Add("arrival_to_handler_us", r.dispatch)
	s.Add("handler_mean_us", r.handler)
	return s
}

func (l *benchLab) roundTrips(ctx context.Context, cfg benchConfig, doc *bench.Document, c rttCase) error {
	var a, b rttRuns
	err := bench.Rounds(ctx, cfg.runs,
		func(ctx context.Context) error { return l.pingNIC(ctx, cfg, c, &a) },
		func(ctx context.Context) error { return l.pingHost(ctx, cfg, c, &b) })
	if err != nil {
		return err
	}
	threads := "a thread per CPU"
	if c.cpus[1] >= 0 {
		threads = "one thread"
	}
	host := "Linux's ICMP responder, which runs on the CPU that the request comes from"
	if c.proto == rtt.UDP {
		host = fmt.Sprintf("UDP echo server in a process of its own, socket, %s", waiting(string(c.host)))
	}
	row, err := bench.Ratio(c.name, c.goal, a.side(fmt.Sprintf("nic, %d HPUs on %s, %s; handler answers, arrivals stamped", nic.DefaultHPUs, threads, waiting(c.nic.String()))), b.side(host).Of("Linux"))
	conditions := fmt.Sprintf("%s echo, %d bytes of payload, median of a run's round trips; client in a process of its own, %s, %s; who answers is %s",
		c.proto, c.size, waiting(string(c.client)), where(c.cpus[0]), where(c.cpus[1]))
	if c.proto == rtt.ICMP {
		conditions = fmt.Sprintf("%s echo, %d bytes of payload, median of a run's round trips; client in a process of its own, %s, %s; HPUs are %s, and compute the checksum over the whole message",
			c.proto, c.size, waiting(string(c.client)), where(c.cpus[0]), where(c.cpus[1]))
	}
	if c.interval > 0 {
		conditions += fmt.Sprintf("; pings %v apart", c.interval)
	} else {
		conditions += "; back to back"
	}
	return doc.Add(conditions, row, err)
}

func waiting(wait string) string {
	return map[string]string{
		"block": "blocking", "spin": "spinning", "sleep": "sleeping whenever idle", "adaptive": "adaptive (spinning, then sleeping)",
	}[wait]
}

func where(cpu int) string {
	if cpu < 0 {
		return "not pinned"
	}
	return fmt.Sprintf("pinned on CPU %d", cpu)
}

// pingNIC measures a run with handlers that answer.
func (l *benchLab) pingNIC(ctx context.Context, cfg benchConfig, c rttCase, runs *rttRuns) (err error) {
	var timing echoTiming
	spec := nic.ContextSpec{
		Name: "bench", Rulesets: []matcher.Ruleset{matcher.UDPPort(benchPort)},
		Handlers: hpu.Handlers{Payload: timing.udp}, Timestamp: true,
	}
	if c.proto == rtt.ICMP {
		spec.Rulesets, spec.Handlers.Payload = []matcher.Ruleset{matcher.ICMPEcho()}, timing.icmp
	}
	config := nic.Config{Wait: c.nic}
	if c.cpus[1] >= 0 {
		config.CPUs = []int{c.cpus[1]}
		config.Workers = 1
	}
	n, err := l.open(config, spec)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	if err := l.ping(ctx, cfg, c, runs); err != nil {
		return err
	}
	s, err := n.Stats()
	if err != nil {
		return err
	}
	for _, x := range s.Contexts {
		if x.Handled > 0 {
			runs.dispatch = append(runs.dispatch, timing.median()/1e3)
			runs.handler = append(runs.handler, float64(x.HandlerSum)/float64(x.Handled)/1e3)
		}
	}
	return nil
}

// pingHost measures a run answered by Linux, or by a socket on it.
func (l *benchLab) pingHost(ctx context.Context, cfg benchConfig, c rttCase, runs *rttRuns) (err error) {
	if c.proto == rtt.UDP {
		echo, err2 := rtt.StartEcho(l.NIC.NS, rtt.EchoOptions{Addr: l.echoAddr(), Wait: c.host, CPU: c.cpus[1]})
		if err2 != nil {
			return err2
		}
		defer func() { err = errors.Join(err, echo.Close()) }()
	}
	return l.ping(ctx, cfg, c, runs)
}

func (l *benchLab) echoAddr() netip.AddrPort { return netip.AddrPortFrom(l.NIC.Addr.Addr(), benchPort) }

// ping measures a run.
func (l *benchLab) ping(ctx context.Context, cfg benchConfig, c rttCase, runs *rttRuns) (err error) {
	if runs.on, err = l.state(); err != nil {
		return err
	}
	o := rtt.Options{
		Proto: c.proto, Remote: l.echoAddr(), Size: c.size, Wait: c.client, CPU: c.cpus[0], Interval: c.interval,
		Warmup: warmups, Count: int(min(cfg.duration/time.Microsecond, rtt.MaxCount)),
	}
	budget := cfg.duration
	if c.interval > 0 {
		// Few pings, so that what the start of the process costs is not all.
		o.Warmup, o.Count = 10, int(max(5*cfg.duration/c.interval, 10))
		budget = time.Minute
	}
	var r rtt.Result
	// On a busy machine the start of the process may take all the time, and more.
	for ; ; budget *= 2 {
		within, cancel := context.WithTimeout(ctx, budget)
		r, err = rtt.Ping(within, l.Host.NS, o)
		cancel()
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			err = nil // the run is over
		}
		if err != nil {
			return err
		}
		if r.Sent > 0 || budget > 5*time.Second {
			break
		}
	}
	if len(r.Samples) == 0 || r.Bad > 0 {
		return fmt.Errorf("%d pings: %d answered, %d lost, %d answered wrongly", r.Sent, len(r.Samples), r.Lost, r.Bad)
	}
	slices.Sort(r.Samples)
	us := make([]float64, len(r.Samples))
	for i, ns := range r.Samples {
		us[i] = float64(ns) / 1e3
	}
	runs.p50 = append(runs.p50, quantile.At(us, 0.50))
	runs.p99 = append(runs.p99, quantile.At(us, 0.99))
	runs.lost = append(runs.lost, float64(r.Lost)/float64(r.Sent))
	return nil
}

// echoTiming answers, and keeps how long the latest packets took to the handler.
// Workers add while nobody takes.
type echoTiming struct {
	n        atomic.Uint64
	dispatch [1 << 12]atomic.Int64 // ns
}

func (e *echoTiming) note(h *hpu.HER) {
	e.dispatch[(e.n.Add(1)-1)%uint64(len(e.dispatch))].Store(h.Now() - h.Arrival())
}

func (e *echoTiming) median() float64 {
	ns := make([]float64, min(e.n.Load(), uint64(len(e.dispatch))))
	for i := range ns {
		ns[i] = float64(e.dispatch[i].Load())
	}
	return quantile.Median(ns)
}

func (e *echoTiming) udp(h *hpu.HER) spin.Code {
	e.note(h)
	if hdr := h.Headers(); hdr.UDP == nil || !hdr.ReplyUDP() || h.Send() != nil {
		return spin.Drop
	}
	return spin.Success
}

func (e *echoTiming) icmp(h *hpu.HER) spin.Code {
	e.note(h)
	if hdr := h.Headers(); hdr.ICMP == nil || !hdr.ReplyICMPEcho() || h.Send() != nil {
		return spin.Drop
	}
	return spin.Success
}
