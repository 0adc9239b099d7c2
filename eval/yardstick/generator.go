// SPDX-License-Identifier: Apache-2.0

package yardstick

import (
	"fmt"
	"net"
	"runtime"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/loader"
	"golang.org/x/sys/unix"
)

// MaxGenerated is the longest frame that a Generator sends.
const MaxGenerated = loader.MaxInject

const (
	// Up to 192 frames in a row lost nothing into a veth ring of 256.
	generatorBatch = 64
	// A run cannot be stopped: it is short.
	generatorRun = 1 << 15
)

// Segments say which segments of SLMP messages a Generator sends: as many messages
// as it takes, of Count segments each, one after the other, or Among of them at a time.
type Segments struct {
	ID    uint32 // of the first message; each has the next
	Count uint32 // segments of a message, at least 1
	Among uint32 // messages whose segments take turns. 0: 1
	Step  uint32 // bytes from a segment's offset to the next one's
	Every uint32 // so many segments ask once for an acknowledgement, and a message's last. 0: none
	Ask   uint16 // SLMP flags of those that ask
	Last  uint16 // SLMP flags of a message's last segment
}

// A Generator sends frames from inside the kernel. It is good for traffic at the
// speed of the receiver. Not safe for concurrent use.
type Generator struct {
	coll     *ebpf.Collection
	prog     *ebpf.Program
	segments *ebpf.Variable // nil if it sends copies
	link     link.Link
	out      *net.Interface
}

// NewGenerator returns a generator that sends copies of a frame out of an
// interface. If that is an end of a veth pair, the other end must have an XDP
// program to get anything. The calling thread must be in the interface's network
// namespace, whose loopback interface serves the generator and carries no traffic
// while it lives.
func NewGenerator(out *net.Interface) (*Generator, error) {
	return newGenerator(bpf.BenchProgXspinSend, out)
}

// NewSegmentGenerator returns a generator that writes an SLMP header into each
// frame, behind the headers of Ethernet, IPv4 and UDP, as SetSegments says. All
// else is as with NewGenerator.
func NewSegmentGenerator(out *net.Interface) (*Generator, error) {
	g, err := newGenerator(bpf.BenchProgXspinSegments, out)
	if err != nil {
		return nil, err
	}
	g.segments = g.coll.Variables[bpf.BenchVarSegments]
	return g, nil
}

func newGenerator(program string, out *net.Interface) (*Generator, error) {
	coll, err := loader.LoadBench(program, map[string]any{bpf.BenchVarTarget: uint32(out.Index)})
	if err != nil {
		return nil, err
	}
	g := &Generator{coll: coll, prog: coll.Programs[program], out: out}
	// A program that is attached nowhere enters and leaves the kernel's XDP
	// dispatcher with every run, which takes two RCU grace periods.
	lo, err := net.InterfaceByName("lo")
	if err == nil {
		g.link, err = link.AttachXDP(link.XDPOptions{Program: g.prog, Interface: lo.Index, Flags: link.XDPGenericMode})
	}
	if err != nil {
		coll.Close()
		return nil, fmt.Errorf("keep %s in the XDP dispatcher: attach to lo: %w", program, err)
	}
	return g, nil
}

// SetSegments says what comes next.
func (g *Generator) SetSegments(s Segments) error {
	if g.segments == nil || s.Count == 0 {
		return fmt.Errorf("generate messages of %d segments: want at least 1, from a generator of segments", s.Count)
	}
	err := g.segments.Set(bpf.BenchXspinSegments{Id: s.ID, Count: s.Count, Among: s.Among, Step: s.Step, Every: s.Every, Ask: s.Ask, Last: s.Last})
	if err != nil {
		return fmt.Errorf("configure segments: %w", err)
	}
	return nil
}

// Send sends frames for a time, and returns how many there were and how long it
// took. The calling CPU sends, and runs also what receives them, up to the XDP
// program and its redirect. The calling thread must be in the interface's network
// namespace.
func (g *Generator) Send(frame []byte, d time.Duration) (sent int, took time.Duration, err error) {
	start := time.Now()
	sent, err = g.Feed(frame, func(int) int {
		if took = time.Since(start); took >= d {
			return 0
		}
		return generatorRun
	})
	return sent, took, err
}

// Feed is Send with a say in how many frames go: next is told how many have been
// sent, and returns how many more there are to be at once, 0 for no more at all. A
// call costs as much as 60 frames.
func (g *Generator) Feed(frame []byte, next func(sent int) int) (sent int, err error) {
	if len(frame) < 14 || len(frame) > MaxGenerated {
		return 0, fmt.Errorf("generate frames of %d bytes: want 14 to %d", len(frame), MaxGenerated)
	}
	// Struct xdp_md of linux/bpf.h.
	md := struct{ Data, DataEnd, DataMeta, IngressIfindex, RxQueueIndex, EgressIfindex uint32 }{
		DataEnd:        uint32(len(frame)),
		IngressIfindex: uint32(g.out.Index),
	}
	opts := &ebpf.RunOptions{
		Data: frame, Context: md, BatchSize: generatorBatch,
		Flags: unix.BPF_F_TEST_XDP_LIVE_FRAMES,
	}
	// A signal ends a run, and the whole of it is repeated: nobody would know how
	// many frames there were. The Go runtime sends some to its threads.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all, before unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^all.Val[i]
	}
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &all, &before); err != nil {
		return 0, fmt.Errorf("block signals: %w", err)
	}
	defer func() { _ = unix.PthreadSigmask(unix.SIG_SETMASK, &before, nil) }() // worked a moment ago
	for n := next(0); n > 0; n = next(sent) {
		opts.Repeat = uint32(n)
		if _, err := g.prog.Run(opts); err != nil {
			return sent, fmt.Errorf("generate frames out of %s: %w", g.out.Name, err)
		}
		sent += n
	}
	return sent, nil
}

// Close frees the generator.
func (g *Generator) Close() error {
	err := g.link.Close()
	g.coll.Close()
	return err
}
