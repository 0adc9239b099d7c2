// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/internal/capability"
	"github.com/xspin/xspin/matcher"
)

// A Plain is one of the programs that XsPIN is compared with.
type Plain string

// Plain programs.
const (
	Pass Plain = bpf.BenchProgXspinPass // every frame to the stack
	Drop Plain = bpf.BenchProgXspinDrop // every frame away
	Bare Plain = bpf.BenchProgXspinBare // every frame to the AF_XDP socket of its queue
)

// A Yardstick is a program to measure with: a plain one, or the matching engine
// alone. Not safe for concurrent use.
type Yardstick struct {
	prog    *ebpf.Program
	sockets *ebpf.Map // of Bare
	link    link.Link
	owner   io.Closer
}

// needToRun tells why programs cannot be loaded and run here.
func needToRun(op string) error {
	if err := capability.Need(op, capability.NetAdmin, capability.BPF, capability.Perfmon); err != nil {
		return err
	}
	return checkKernel()
}

// LoadPlain loads a plain program, attached to nothing.
func LoadPlain(p Plain) (*Yardstick, error) {
	coll, err := loadBench(string(p), nil)
	if err != nil {
		return nil, err
	}
	return &Yardstick{prog: coll.Programs[string(p)], sockets: coll.Maps[bpf.BenchMapBareSockets], owner: closer(coll.Close)}, nil
}

// LoadMatch loads the matching engine with a table: a frame that a ruleset
// matches is dropped, all others pass.
func LoadMatch(t *matcher.Table) (*Yardstick, error) {
	const program = bpf.IngressProgXspinMatch
	if err := needToRun("load " + program); err != nil {
		return nil, err
	}
	in := &Ingress{cfg: Config{HPUs: 1, Queues: 1, BufferSize: 1 << 16, MaxBuffers: 1}, mode: Native}
	err := in.load(program)
	if err == nil {
		err = in.Publish(onePerContext(t))
	}
	if err != nil {
		return nil, errors.Join(err, in.Close())
	}
	return &Yardstick{prog: in.objs.XspinIngress, owner: in}, nil
}

// onePerContext gives each ruleset a context of its own, since contexts have one
// message format and the entries of a table may differ.
func onePerContext(t *matcher.Table) *Table {
	table := &Table{Generation: t.Generation, Local: t.Local, Rulesets: map[int]Binding{}, Contexts: map[uint16]Context{}}
	for slot, e := range t.Entries {
		id := uint16(slot)
		table.Rulesets[slot] = Binding{Ruleset: e.Ruleset, Context: id}
		table.Contexts[id] = Context{ID: id, Format: e.Format, Policy: ByPacket, CoreMask: 1}
	}
	return table
}

// loadBench loads one program of the bench object.
func loadBench(program string, vars map[string]any) (*ebpf.Collection, error) {
	if err := needToRun("load " + program); err != nil {
		return nil, err
	}
	spec, err := bpf.LoadBench()
	if err != nil {
		return nil, fmt.Errorf("read bench object: %w", err)
	}
	for name := range spec.Programs {
		if name != program {
			delete(spec.Programs, name)
		}
	}
	for name, value := range vars {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, fmt.Errorf("configure %s: %w", program, err)
		}
	}
	coll, err := bpf.Load(spec)
	if err != nil {
		return nil, fmt.Errorf("load %s: %w", program, loadError(err))
	}
	return coll, nil
}

type closer func()

func (c closer) Close() error { c(); return nil }

// Attach attaches the program to an interface in native mode. The link dies
// with the process.
func (y *Yardstick) Attach(iface *net.Interface) (err error) {
	y.link, err = link.AttachXDP(link.XDPOptions{Program: y.prog, Interface: iface.Index, Flags: link.XDPDriverMode})
	if err != nil {
		return fmt.Errorf("attach %v to %s: %w", y.prog, iface.Name, err)
	}
	return nil
}

// SetSocket has frames that arrive on a queue go to an AF_XDP socket. For Bare.
func (y *Yardstick) SetSocket(queue, fd int) error {
	if err := y.sockets.Put(uint32(queue), uint32(fd)); err != nil {
		return fmt.Errorf("socket %d for queue %d: %w", fd, queue, err)
	}
	return nil
}

// Sockets returns a descriptor of the map of sockets, by queue, for another
// process. The caller closes it. For Bare.
func (y *Yardstick) Sockets() (*os.File, error) {
	fd, err := unix.FcntlInt(uintptr(y.sockets.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate the map of sockets: %w", err)
	}
	return os.NewFile(uintptr(fd), "sockets"), nil
}

// Time runs the program over a frame again and again on the calling CPU, with
// nothing around it, and returns its verdict and what a run took on average,
// in whole nanoseconds as the kernel tells it.
func (y *Yardstick) Time(frame []byte, repeat int) (verdict uint32, each time.Duration, err error) {
	verdict, each, err = y.prog.Benchmark(frame, repeat, nil)
	if err != nil {
		return 0, 0, fmt.Errorf("run %v %d times: %w", y.prog, repeat, err)
	}
	return verdict, each, nil
}

// Close detaches the program and frees it.
func (y *Yardstick) Close() error {
	var err error
	if y.link != nil {
		err = y.link.Close()
	}
	return errors.Join(err, y.owner.Close())
}

// MaxGenerated is the longest frame that a Generator sends.
const MaxGenerated = MaxInject

const (
	// Up to 192 frames in a row lost nothing into a veth ring of 256.
	generatorBatch = 64
	// A run cannot be stopped: it is short.
	generatorRun = 1 << 15
)

// Segments say which segments of SLMP messages a Generator sends: as many messages
// as it takes, of Count segments each, one after the other.
type Segments struct {
	ID    uint32 // of the first message; each has the next
	Count uint32 // segments of a message, at least 1
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
	coll, err := loadBench(program, map[string]any{bpf.BenchVarTarget: uint32(out.Index)})
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
	err := g.segments.Set(bpf.BenchXspinSegments{Id: s.ID, Count: s.Count, Step: s.Step, Every: s.Every, Ask: s.Ask, Last: s.Last})
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
		return 0, fmt.Errorf("generate frames of %d bytes: possible are 14..%d", len(frame), MaxGenerated)
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
