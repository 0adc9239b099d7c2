// SPDX-License-Identifier: Apache-2.0

// Package pingpong is the first demo: ICMP and UDP echo answered by handlers on
// XsPIN's HPUs, alone or together with an application, or by handlers in eBPF, next to
// the same pings answered by Linux.
package pingpong

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/netns"
)

// Mode is who answers the pings.
type Mode string

const (
	// Host is the baseline: Linux's ICMP responder, and for UDP a socket
	// in a process of its own. No XDP program is on either end.
	Host Mode = "host"
	// NIC is handlers on the HPUs.
	NIC Mode = "nic"
	// XDP and TC are mode NIC with handlers in eBPF, at that hook. In a Result they are mode
	// NIC, of tier kernel.
	XDP Mode = "nic/xdp"
	TC  Mode = "nic/tc"
	// HostNIC is both: handlers swap the addresses, and an unprivileged
	// application in a process of its own computes the checksums.
	HostNIC Mode = "host+nic"
)

// Modes are all modes.
var Modes = []Mode{Host, NIC, XDP, TC, HostNIC}

// Port is where UDP echo listens, in all modes; FPsPIN's udp_ping has the same.
const Port = 15000

var (
	// ErrConfig is returned, wrapped, for an invalid Config.
	ErrConfig = errors.New("invalid ping-pong")
	// ErrReplies is returned, wrapped, with a complete Report, if pings were
	// lost or answered wrongly.
	ErrReplies = errors.New("pings not answered as they should")
)

// Config says what to measure. There are no defaults: the command has them.
type Config struct {
	Protos  []rtt.Proto
	Modes   []Mode
	Sizes   []int // payload, bytes
	Count   int   // pings per protocol, mode and size
	Warmup  int   // pings before those
	Timeout time.Duration
	// Interval is the least time from ping to ping, 0 for back to back.
	Interval   time.Duration
	ClientWait rtt.Wait
	ClientCPU  int // -1 for any
	Server     ServerConfig
}

// ServerConfig says how all modes but Host are set up. The UDP echo of mode Host
// uses only CPUs[0] of it: that server always blocks, as is usual.
type ServerConfig struct {
	Mode    Mode        // any but Host
	Protos  []rtt.Proto // answered on the NIC's address, UDP on Port
	HPUs    int
	Wait    string        // of the HPUs: adaptive, sleep or spin
	CPUs    []int         // for the threads that serve the HPUs, empty for any; the first is the application's too
	AppSpin time.Duration // of mode HostNIC: how long the application spins before it sleeps
	Stats   bool          // let `xspin stats` ask
}

// NICServer answers pings with handlers. Its methods are called by one
// goroutine at a time.
type NICServer interface {
	// Breakdown returns where the time of the replies of one protocol went since the
	// last call for it, and starts over. It waits a moment for that many replies.
	Breakdown(p rtt.Proto, replies int) Breakdown
	// Close drains the handlers and leaves the interface as it was.
	Close() error
}

// Breakdown is the part of round trips inside the NIC, in ns, reply by reply.
type Breakdown struct {
	ArrivalToHandler []int64 // frame in the XDP program to handler start
	Handler          []int64 // start to return of the handler, or to its request, and the continuation
	Host             []int64 // from the handler's request to the application to the answer; nil without one
}

// startNIC attaches a NIC to the NIC end of the lab and arms the echo handlers.
// It is a variable so that tests can measure without handlers.
var startNIC = start

func (c Config) check(mtu int) error {
	if len(c.Protos) == 0 || len(c.Modes) == 0 || len(c.Sizes) == 0 {
		return fmt.Errorf("%w: %d protocols, %d modes, %d sizes: want at least one of each", ErrConfig, len(c.Protos), len(c.Modes), len(c.Sizes))
	}
	for _, m := range c.Modes {
		if !slices.Contains(Modes, m) {
			return fmt.Errorf("%w: mode %q: want one of %q", ErrConfig, m, Modes)
		}
	}
	for _, s := range c.Sizes {
		if top := mtu - 28; s < rtt.MinSize || s > top {
			return fmt.Errorf("%w: size %d: want %d to %d bytes, so that it fits the MTU of %d", ErrConfig, s, rtt.MinSize, top, mtu)
		}
	}
	return nil
}

// Run measures every protocol and size in one mode after the other; progress,
// if not nil, is told before each. When ctx ends it returns the results it has,
// with ctx's error.
func Run(ctx context.Context, lab *netns.Lab, c Config, progress func(string)) (*Report, error) {
	if err := c.check(lab.MTU); err != nil {
		return nil, err
	}
	r := &Report{Schema: 1, Env: environment(lab, c), Results: []Result{}}
	for _, m := range c.Modes {
		if err := r.measure(ctx, lab, c, m, progress); err != nil {
			return r, fmt.Errorf("mode %s: %w", m, err)
		}
	}
	return r, r.verdict()
}

// measure adds the results of one mode.
func (r *Report) measure(ctx context.Context, lab *netns.Lab, c Config, m Mode, progress func(string)) (err error) {
	var nic NICServer
	remote := netip.AddrPortFrom(lab.NIC.Addr.Addr(), Port)
	switch {
	case m != Host:
		server := c.Server
		server.Mode, server.Protos = m, c.Protos
		if nic, err = startNIC(ctx, lab, server); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, nic.Close()) }()
	case slices.Contains(c.Protos, rtt.UDP):
		cpu := -1
		if len(c.Server.CPUs) > 0 {
			cpu = c.Server.CPUs[0]
		}
		echo, err2 := rtt.StartEcho(lab.NIC.NS, rtt.EchoOptions{Addr: remote, CPU: cpu})
		if err2 != nil {
			return err2
		}
		defer func() { err = errors.Join(err, echo.Close()) }()
	}
	if r.Env.Links[m], err = rtt.ReadLinks(lab); err != nil {
		return err
	}
	if m == Host {
		if err := rtt.NoXDP(r.Env.Links[m]); err != nil {
			return err
		}
	}

	for _, p := range c.Protos {
		for _, size := range c.Sizes {
			if progress != nil {
				progress(fmt.Sprintf("%s echo answered by %s, %d pings of %d bytes", p, m, c.Count, size))
			}
			if nic != nil {
				nic.Breakdown(p, 0)
			}
			pings, err := rtt.Ping(ctx, lab.Host.NS, rtt.Options{
				Proto: p, Remote: remote, Size: size, Count: c.Count, Warmup: c.Warmup,
				Timeout: c.Timeout, Interval: c.Interval, Wait: c.ClientWait, CPU: c.ClientCPU,
			})
			if err != nil {
				return err
			}
			res := newResult(p, m, size, pings)
			if nic != nil && res.Tier != "kernel" && res.RTT != nil {
				res.Breakdown = newMicros(nic.Breakdown(p, c.Warmup+len(pings.Samples)), pings.Samples, c.Warmup)
			}
			r.Results = append(r.Results, res)
		}
	}
	return nil
}

// Serve answers pings from the NIC until ctx ends. ready is called when it does.
func Serve(ctx context.Context, lab *netns.Lab, c ServerConfig, ready func()) error {
	c.Stats = true
	nic, err := startNIC(ctx, lab, c)
	if err != nil {
		return err
	}
	ready()
	<-ctx.Done()
	return nic.Close()
}
