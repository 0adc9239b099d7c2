// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/yardstick"
	"github.com/xspin/xspin/internal/flags"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/nic"
)

// kernelFlags adds the flags of `xspin bench kernel`.
func kernelFlags(fl *pflag.FlagSet) func() (measureFunc, error) {
	size := "256MiB"
	fl.StringVar(&size, "size", size, "of the files that part messages sends: 1MiB to 256MiB; those of part tc are four times as long")
	var file int64
	parts := []struct {
		name    string
		measure func(*benchLab, context.Context, benchConfig, *bench.Document) error
	}{ // in the order in which they are measured
		{"packets", (*benchLab).kernelDrops},
		{"echo", (*benchLab).kernelEchoes},
		{"messages", func(l *benchLab, ctx context.Context, cfg benchConfig, doc *bench.Document) error {
			return l.messageRows(ctx, cfg, doc, file)
		}},
		{"tc", func(l *benchLab, ctx context.Context, cfg benchConfig, doc *bench.Document) error {
			return l.tcRows(ctx, cfg, doc, file)
		}},
	}
	var names []string
	for _, p := range parts {
		names = append(names, p.name)
	}
	choice := onlyFlag(fl, names)
	return func() (measureFunc, error) {
		wanted, err := choice()
		if err != nil {
			return nil, err
		}
		if file, err = flags.Bytes("size", size, 1<<20, kernelSegments<<10); err != nil {
			return nil, err
		}
		return func(ctx context.Context, lab *benchLab, cfg benchConfig, doc *bench.Document) error {
			for _, p := range parts {
				if !wanted(p.name) {
					continue
				}
				if err := p.measure(lab, ctx, cfg, doc); err != nil {
					return fmt.Errorf("%s: %w", p.name, err)
				}
			}
			return nil
		}, nil
	}
}

// kernelEchoes are round trips next to a program that does nothing else, and to Linux.
func (l *benchLab) kernelEchoes(ctx context.Context, cfg benchConfig, doc *bench.Document) error {
	cross, same := [2]int{l.sender, l.receiver}, [2]int{l.receiver, l.receiver}
	const size = 16
	udp := func(name string, goal bench.Goal, cpus [2]int) rttCase {
		return rttCase{name: name, goal: goal, proto: rtt.UDP, size: size, client: rtt.Block, cpus: cpus, host: rtt.Block}
	}
	trips := []struct {
		rttCase
		bare bool // next to a program, else to Linux
	}{
		{udp("kernel/udp_echo_over_bare_tx", bench.AtMost(1.15), cross), true},
		{udp("kernel/udp_echo_cross_core", bench.AtMost(0.15), cross), false},
		{udp("kernel/udp_echo_same_core", bench.AtMost(0.50), same), false},
	}
	for _, size := range []int{16, 516, 1016, 1416} {
		c := rttCase{name: fmt.Sprintf("kernel/icmp_%d", size), goal: bench.AtMost(1.1), proto: rtt.ICMP, size: size, client: rtt.Spin, cpus: cross}
		trips = append(trips, struct {
			rttCase
			bare bool
		}{c, false})
	}
	for _, c := range trips {
		if err := l.kernelTrips(ctx, cfg, doc, c.rttCase, c.bare); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

// kernelSpec is a context of built-in handlers in eBPF.
func kernelSpec(name string, rs matcher.Ruleset) (spec nic.ContextSpec, err error) {
	o, err := nic.BuiltinObject(name)
	return nic.ContextSpec{Name: "bench", Rulesets: []matcher.Ruleset{rs}, Kernel: &nic.Kernel{Object: o}}, err
}

// A kernelDropper is a receiver whose handlers in eBPF drop every frame.
type kernelDropper struct {
	dropper
	n *nic.NIC
	c *nic.Context
}

func (l *benchLab) openKernelDropper() (receiver, error) {
	spec, err := kernelSpec("noop", matcher.UDPPort(benchPort))
	if err != nil {
		return nil, err
	}
	n, c, err := l.openContext(nic.Config{HPUs: 1, Workers: 1, CPUs: []int{l.receiver}}, spec)
	if err != nil {
		return nil, err
	}
	return kernelDropper{dropper{lab: l}, n, c}, nil
}

func (d kernelDropper) Close() error {
	err := d.n.Close()
	if s := d.c.Stats(); s.Handled == 0 {
		err = errors.Join(err, errors.New("the handlers have seen no frame"))
	}
	return err
}

// kernelDrops compares what handlers in eBPF cost with a program that does only what they do:
// rates of dropping, live.
func (l *benchLab) kernelDrops(ctx context.Context, cfg benchConfig, doc *bench.Document) error {
	g, err := l.generator()
	if err != nil {
		return err
	}
	defer g.Close()
	var a, b rxRuns
	side := func(runs *rxRuns, open func() (receiver, error)) func(context.Context) error {
		return func(context.Context) error { return l.receive(g, rxFrame, cfg.duration, runs, open) }
	}
	drop := func() (receiver, error) { return l.openDropper(plain(yardstick.Drop)) }
	if err := bench.Rounds(ctx, cfg.runs, side(&a, l.openKernelDropper), side(&b, drop)); err != nil {
		return err
	}
	row, err := bench.Ratio("kernel/noop_over_drop_64B", bench.AtLeast(0.70), a.side("nic, handler noop in eBPF"), b.side("XDP_DROP at once"))
	return doc.Add(fmt.Sprintf("%d-byte UDP frames from the in-kernel generator (live frames, batches of 64), sent and dropped on CPU %d; frames that the program saw per second of the generator's run; "+
		"no XDP program on the sending end; nobody sleeps", rxFrame, l.sender), row, err)
}

// kernelTrips compares round trips answered by handlers in eBPF, and by a program or Linux.
func (l *benchLab) kernelTrips(ctx context.Context, cfg benchConfig, doc *bench.Document, c rttCase, bare bool) error {
	var a, b rttRuns
	other, what := func(ctx context.Context) error { return l.pingHost(ctx, cfg, c, &b) }, "Linux's ICMP responder"
	switch {
	case bare:
		other, what = func(ctx context.Context) error { return l.pingBare(ctx, cfg, c, &b) }, "a program of 30 lines that sends each datagram to the port back"
	case c.proto == rtt.UDP:
		what = fmt.Sprintf("UDP echo server in a process of its own, socket, %s, %s", waiting(string(c.host)), where(c.cpus[1]))
	}
	if err := bench.Rounds(ctx, cfg.runs, func(ctx context.Context) error { return l.pingKernel(ctx, cfg, c, &a) }, other); err != nil {
		return err
	}
	side := b.side(what)
	if !bare {
		side = side.Of("Linux")
	}
	what, how := "XDP_TX", "; where XDP does, the client's end has a program that lets all pass, as a veth needs one to take its frames"
	if c.hook == nic.HookTC {
		what, how = "at tc", ""
	}
	row, err := bench.Ratio(c.name, c.goal, a.side(fmt.Sprintf("nic, handler %s in eBPF, %s", echoName(c.proto), what)), side)
	return doc.Add(fmt.Sprintf("%s echo, %d bytes of payload, median of a run's round trips; client in a process of its own, %s, %s; back to back; "+
		"the kernel answers on the CPU that the request comes from"+how,
		c.proto, c.size, waiting(string(c.client)), where(c.cpus[0])), row, err)
}

func echoName(p rtt.Proto) string { return "echo-" + string(p) }

// wired pings while the host's end takes what XDP sends.
func (l *benchLab) wired(ctx context.Context, cfg benchConfig, c rttCase, runs *rttRuns) (err error) {
	w, err := l.Host.Wire()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	return l.ping(ctx, cfg, c, runs)
}

// pingKernel measures a run with handlers in eBPF.
func (l *benchLab) pingKernel(ctx context.Context, cfg benchConfig, c rttCase, runs *rttRuns) (err error) {
	rs := matcher.UDPPort(benchPort)
	if c.proto == rtt.ICMP {
		rs = matcher.ICMPEcho()
	}
	spec, err := kernelSpec(echoName(c.proto), rs)
	if err != nil {
		return err
	}
	n, k, err := l.openContext(nic.Config{Hook: c.hook, HPUs: 1, Workers: 1, CPUs: []int{l.receiver}}, spec)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	ping := l.wired
	if c.hook == nic.HookTC {
		ping = l.ping
	}
	if err := ping(ctx, cfg, c, runs); err != nil {
		return err
	}
	s := k.Stats()
	if s.Handled == 0 || s.Sent != s.Handled {
		return fmt.Errorf("the handlers have answered %d of %d frames", s.Sent, s.Handled)
	}
	runs.handler = append(runs.handler, float64(s.HandlerSum)/float64(s.Handled)/float64(time.Microsecond))
	return nil
}

// pingBare measures a run answered by the plain program.
func (l *benchLab) pingBare(ctx context.Context, cfg benchConfig, c rttCase, runs *rttRuns) (err error) {
	y, err := l.attach(func() (*yardstick.Program, error) { return yardstick.LoadEcho(benchPort) })
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, y.Close()) }()
	return l.wired(ctx, cfg, c, runs)
}
