// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/peers"
	"github.com/xspin/xspin/eval/yardstick"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/clock"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/testbed"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
	"github.com/xspin/xspin/xsk"
)

// A receiver is one side of the rx benchmark: something that takes frames.
type receiver interface {
	// counters are of all it ever took; busy is 0 where nobody measures it.
	counters() (received, error)
	// on says what AF_XDP was granted, "" without it.
	on() string
	Close() error
}

type received struct {
	packets, batches uint64
	busy             time.Duration // in rounds that had packets
}

// rxRuns are the figures of one side, run by run.
type rxRuns struct {
	mpps, lost, busy, batch, allocs []float64
	waited                          []float64 // percent of the time that others took of the generator's CPU
	on                              string
}

func (r *rxRuns) side(what string) bench.Side {
	s := bench.NewSide(what, "Mpps", r.mpps)
	lost := bench.NewSide("", "", r.lost).Median
	s.Lost = &lost
	s.On = r.on
	s.Add("packets_per_batch", r.batch)
	s.Add("busy_ns_per_packet", r.busy)
	s.Add("generator_waited_percent", r.waited)
	return s
}

const rxFrame = 64 // bytes

func benchRx(ctx context.Context, lab *benchLab, cfg benchConfig, doc *bench.Document) error {
	// The generator and the receiver under test share this process. Neither may
	// have to wait for the other's turn in the Go scheduler, which would be
	// measured as the receiver's doing.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(runtime.NumCPU() + 4))
	g, err := lab.generator()
	if err != nil {
		return err
	}
	defer g.Close()

	var full, bare, c rxRuns
	side := func(runs *rxRuns, open func() (receiver, error)) func(context.Context) error {
		return func(context.Context) error { return lab.receive(g, rxFrame, cfg.duration, runs, open) }
	}
	sides := []func(context.Context) error{
		side(&full, func() (receiver, error) { return lab.openNoop() }),
		side(&bare, func() (receiver, error) { return lab.openBare() }),
	}
	peer, err := buildPeer(ctx, "xsk_rx", peers.XSKReceive)
	if err != nil {
		cfg.warn(fmt.Sprintf("no row rx/bare_over_c: %v", err))
	} else {
		sides = append(sides, side(&c, func() (receiver, error) { return lab.openC(peer) }))
	}
	if err := bench.Rounds(ctx, cfg.runs, sides...); err != nil {
		return err
	}

	conditions := fmt.Sprintf("%d-byte UDP frames, checksum 0, from the in-kernel generator (live frames, batches of 64) on CPU %d, which also runs the XDP program; "+
		"received on CPU %d; delivered per second of the generator's run: where next to none is lost, the generator's CPU is the bound; no XDP program on the sending end; "+
		"all wait alike: spin with yields, then sleep in poll; rings of %d",
		rxFrame, lab.sender, lab.receiver, nic.DefaultRing)
	a := full.side("nic, 1 HPU, adaptive, policy packet, handler returns Success")
	b := bare.side("bare loop on package xsk: receive 64, exchange 64, one socket a queue")
	row, err := bench.Ratio("rx/noop_over_bare_64B", bench.AtLeast(0.80), a, b)
	if err := doc.Add(conditions, row, err); err != nil {
		return err
	}
	busy := func(r *rxRuns, s bench.Side) bench.Side {
		d := bench.NewSide(s.What, "ns", r.busy)
		d.On = s.On
		d.Add("packets_per_batch", r.batch)
		return d
	}
	row, err = bench.Difference("rx/busy_ns_over_bare", bench.AtMost(150), busy(&full, a), busy(&bare, b))
	if err := doc.Add("time in receive rounds that had packets, per packet, same clock; "+conditions, row, err); err != nil {
		return err
	}
	if peer != "" {
		row, err = bench.Ratio("rx/bare_over_c", bench.AtLeast(0.60), b, c.side("the bare loop in C, plain UAPI, cc -O2"))
		if err := doc.Add(conditions, row, err); err != nil {
			return err
		}
		row, err = bench.Absolute("rx/c_64B", bench.Higher, c.side("the bare loop in C"))
		if err := doc.Add(conditions, row, err); err != nil {
			return err
		}
	}
	for _, abs := range []struct {
		name string
		side bench.Side
	}{{"rx/noop_64B", a}, {"rx/bare_64B", b}} {
		row, err = bench.Absolute(abs.name, bench.Higher, abs.side)
		if err := doc.Add(conditions, row, err); err != nil {
			return err
		}
	}
	perPacket := func(r *rxRuns, s bench.Side) bench.Side {
		var ns []float64
		for _, mpps := range r.mpps {
			ns = append(ns, 1e3/mpps)
		}
		d := bench.NewSide(s.What, "ns", ns)
		d.Lost, d.On = s.Lost, s.On
		return d
	}
	row, err = bench.Difference("rx/ns_over_bare", bench.Lower, perPacket(&full, a), perPacket(&bare, b))
	if err := doc.Add("time a packet, the inverse of the rate: of the slower of the two CPUs; "+conditions, row, err); err != nil {
		return err
	}
	row, err = allocsRow(full.allocs)
	if err := doc.Add(conditions, row, err); err != nil {
		return err
	}
	return lab.idle(ctx, cfg, doc)
}

// strayAllocs is how many allocations per packet are the rest of the process:
// the generator's system calls, a hundred thousand packets apart, and the runtime.
const strayAllocs = 0.001

// allocsRow holds allocations against those of the rest of the process: packets have none.
func allocsRow(runs []float64) (bench.Row, error) {
	return bench.Absolute("rx/allocs_per_packet", bench.AtMost(strayAllocs), bench.NewSide(
		fmt.Sprintf("allocations of the whole process, generator included; %g or less are not of packets", strayAllocs), "1/packet", runs))
}

// receive measures one run of frames of a size. Opening and closing are not part of it.
func (l *benchLab) receive(g *yardstick.Generator, size int, d time.Duration, runs *rxRuns, open func() (receiver, error)) error {
	r, err := open()
	if err != nil {
		return err
	}
	return errors.Join(l.flood(g, l.udpFrame(size), d, runs, r), r.Close())
}

// flood sends a receiver more frames than it can take.
func (l *benchLab) flood(g *yardstick.Generator, frame []byte, d time.Duration, runs *rxRuns, r receiver) error {
	state, err := l.state()
	if err != nil {
		return err
	}
	runs.on = state
	if on := r.on(); on != "" {
		runs.on += "; AF_XDP " + on
	}

	if _, _, err := l.generate(g, frame, d/8); err != nil {
		return err
	}
	before, err := settle(r)
	if err != nil {
		return err
	}
	var m0, m1 runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m0)
	sent, took, err := l.generate(g, frame, d)
	if err != nil {
		return err
	}
	runtime.ReadMemStats(&m1)
	after, err := settleAfter(r, before)
	if err != nil {
		return err
	}

	packets := float64(after.packets - before.packets)
	if packets == 0 {
		return fmt.Errorf("%T received none of %d frames", r, sent)
	}
	runs.mpps = append(runs.mpps, packets/took.Seconds()/1e6)
	runs.waited = append(runs.waited, l.waits.percent...)
	runs.lost = append(runs.lost, max(0, 1-packets/float64(sent)))
	if after.batches > before.batches {
		runs.batch = append(runs.batch, packets/float64(after.batches-before.batches))
	}
	runs.allocs = append(runs.allocs, float64(m1.Mallocs-m0.Mallocs)/packets)
	if after.busy > before.busy {
		runs.busy = append(runs.busy, float64(after.busy-before.busy)/packets)
	}
	return nil
}

// settle waits until nothing is under way and returns the counters.
func settle(r receiver) (now received, err error) {
	last, err := r.counters()
	for range 100 {
		if err != nil {
			return now, err
		}
		time.Sleep(2 * time.Millisecond)
		if now, err = r.counters(); now.packets == last.packets {
			break
		}
		last = now
	}
	return now, err
}

// settleAfter is settle for a receiver to which something was sent: one that others have kept
// off its CPU all the while still finds a full ring.
func settleAfter(r receiver, before received) (after received, err error) {
	for end := time.Now().Add(2 * time.Second); ; {
		after, err = settle(r)
		if err != nil || after.packets != before.packets || time.Now().After(end) {
			return after, err
		}
	}
}

func noopSpec() nic.ContextSpec {
	return nic.ContextSpec{
		Name:     "bench",
		Rulesets: []matcher.Ruleset{matcher.UDPPort(benchPort)},
		Handlers: hpu.Handlers{Payload: func(*hpu.HER) spin.Code { return spin.Success }},
		Policy:   loader.ByPacket,
	}
}

// noop is the full path with a handler that does nothing.
type noop struct{ *nic.NIC }

func (l *benchLab) openNoop() (receiver, error) { return l.openHPUs(1) }

// openHPUs is a NIC whose HPUs are all one thread's, on the receiver's CPU.
func (l *benchLab) openHPUs(n int) (receiver, error) {
	return l.openNIC(nic.Config{HPUs: n, Workers: 1, CPUs: []int{l.receiver}})
}

func (l *benchLab) openNIC(cfg nic.Config) (receiver, error) {
	n, err := l.open(cfg, noopSpec())
	if err != nil {
		return nil, err
	}
	return noop{n}, nil
}

func (n noop) counters() (sum received, err error) {
	s, err := n.Stats()
	if err != nil {
		return sum, err
	}
	for _, h := range s.HPUs {
		sum.packets += h.Handled
		sum.batches += h.Batches
		sum.busy += h.Busy
	}
	return sum, nil
}

func (n noop) on() string {
	s, err := n.Stats()
	if err != nil {
		return "?"
	}
	return granted(s.ZeroCopy)
}

func granted(zeroCopy bool) string {
	return map[bool]string{true: "zero-copy", false: "copy"}[zeroCopy]
}

// bareLoop receives and recycles, one socket a queue.
type bareLoop struct {
	program *yardstick.Program
	umem    *xsk.UMEM
	queues  []*xsk.Queue
	sockets []*xsk.Socket
	scale   clock.Scale
	stop    atomic.Bool
	done    chan error

	packets, batches, busy atomic.Int64 // written by the loop
}

func (l *benchLab) openBare() (_ receiver, err error) {
	b := &bareLoop{scale: clock.Calibrate()}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.Close())
		}
	}()
	if b.program, err = l.attach(plain(yardstick.Bare)); err != nil {
		return nil, err
	}
	dev, err := iface(l.NIC)
	if err != nil {
		return nil, err
	}
	const ring = nic.DefaultRing
	if b.umem, err = xsk.NewUMEM(xsk.UMEMConfig{Frames: l.Queues * ring, FrameSize: 2048}); err != nil {
		return nil, err
	}
	if err := l.NIC.NS.Do(func() error { return b.open(dev, l.Queues, ring) }); err != nil {
		return nil, err
	}
	b.done = make(chan error, 1)
	go func() { b.done <- testbed.OnCPU(l.receiver, b.run) }()
	return b, nil
}

func (b *bareLoop) open(dev *net.Interface, queues, ring int) error {
	for i := range queues {
		frames := make([]uint64, ring)
		for k := range frames {
			frames[k] = b.umem.Addr(i*ring + k)
		}
		q, s, err := b.umem.OpenQueue(xsk.QueueConfig{
			Ifindex: dev.Index, Queue: i, FillSize: ring, CompletionSize: 64, Initial: frames,
		}, xsk.SocketConfig{RxSize: ring})
		if err != nil {
			return err
		}
		b.queues, b.sockets = append(b.queues, q), append(b.sockets, s)
		if err := b.program.SetSocket(i, s.FD()); err != nil {
			return err
		}
	}
	return nil
}

// How long the bare loops spin when there is nothing to do: the most that a
// worker of the NIC does, in the same manner.
const (
	bareSpin  = 200 * time.Microsecond
	bareYield = 16 // rounds
)

func (b *bareLoop) run() error {
	descs, addrs := make([]xsk.Desc, 64), make([]uint64, 64)
	fds := make([]unix.PollFd, len(b.sockets))
	for i, s := range b.sockets {
		fds[i] = unix.PollFd{Fd: int32(s.FD()), Events: unix.POLLIN}
	}
	since, spins := int64(0), 0
	for !b.stop.Load() {
		worked := false
		for i, s := range b.sockets {
			if s.RxAvailable() == 0 {
				continue
			}
			worked = true
			start := b.scale.Ticks()
			n := s.Receive(descs)
			for k := range descs[:n] {
				addrs[k] = descs[k].Addr
			}
			// There are as many frames as entries: all go back.
			b.queues[i].Exchange(addrs[:n], nil)
			b.packets.Store(b.packets.Load() + int64(n))
			b.batches.Store(b.batches.Load() + 1)
			b.busy.Store(b.busy.Load() + b.scale.Ticks() - start)
		}
		if worked {
			since = 0
			continue
		}
		now := clock.Monotonic()
		switch {
		case since == 0:
			since, spins = now, 0
		case now-since < int64(bareSpin):
			if spins++; spins%bareYield == 0 {
				unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
			}
		default:
			if _, err := unix.Poll(fds, 20); err != nil && err != unix.EINTR {
				return fmt.Errorf("poll: %w", err)
			}
			since = 0
		}
	}
	return nil
}

func (b *bareLoop) counters() (received, error) {
	return received{uint64(b.packets.Load()), uint64(b.batches.Load()), time.Duration(b.scale.Nanoseconds(b.busy.Load()))}, nil
}

func (b *bareLoop) on() string { return granted(b.queues[0].Granted().ZeroCopy) }

func (b *bareLoop) Close() error {
	var errs []error
	b.stop.Store(true)
	if b.done != nil {
		errs = append(errs, <-b.done)
	}
	if b.program != nil {
		errs = append(errs, b.program.Close())
	}
	for _, s := range b.sockets {
		errs = append(errs, s.Close())
	}
	return errors.Join(append(errs, b.umem.Close())...)
}

// cLoop is the bare loop in a process of its own, written in C.
type cLoop struct {
	program *yardstick.Program
	cmd     *netns.Cmd
	stdin   io.Closer
	memory  []byte // of its counters
	mode    string // as the kernel granted it
}

func (l *benchLab) openC(path string) (_ receiver, err error) {
	c := &cLoop{}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	if c.program, err = l.attach(plain(yardstick.Bare)); err != nil {
		return nil, err
	}
	sockets, err := c.program.Sockets()
	if err != nil {
		return nil, err
	}
	defer sockets.Close()
	fd, err := unix.MemfdCreate("counters", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	counters := os.NewFile(uintptr(fd), "counters")
	defer counters.Close()
	if err := counters.Truncate(4096); err != nil {
		return nil, err
	}
	if c.memory, err = unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED); err != nil {
		return nil, fmt.Errorf("map counters: %w", err)
	}
	cmd := l.NIC.NS.Command(context.Background(), path, l.NIC.Device, strconv.Itoa(l.Queues), strconv.Itoa(nic.DefaultRing), strconv.Itoa(l.receiver))
	cmd.ExtraFiles = []*os.File{sockets, counters}
	cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true} // Ctrl-C is for us
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if c.stdin, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	c.cmd = cmd
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		err = errors.Join(err, c.Close()) // the process has ended: stderr is complete
		*c = cLoop{}
		return nil, fmt.Errorf("%s: %w: %s", filepath.Base(path), err, strings.TrimSpace(stderr.String()))
	}
	c.mode = strings.TrimSpace(line)
	return c, nil
}

func (c *cLoop) counters() (received, error) {
	return received{packets: binary.NativeEndian.Uint64(c.memory), batches: binary.NativeEndian.Uint64(c.memory[8:])}, nil
}

func (c *cLoop) on() string { return c.mode }

func (c *cLoop) Close() error {
	var errs []error
	if c.cmd != nil {
		c.stdin.Close()
		kill := time.AfterFunc(2*time.Second, func() { c.cmd.Process.Kill() })
		errs = append(errs, c.cmd.Wait())
		kill.Stop()
	}
	if c.program != nil {
		errs = append(errs, c.program.Close())
	}
	if c.memory != nil {
		errs = append(errs, unix.Munmap(c.memory))
	}
	return errors.Join(errs...)
}

// buildPeer compiles a C program, once for each version of it, and returns where
// it is.
func buildPeer(ctx context.Context, name string, source []byte) (string, error) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		return "", fmt.Errorf("no C compiler: %w", err)
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		dir = os.TempDir()
	}
	dir = filepath.Join(dir, "xspin")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	sum := sha256.Sum256(source)
	path := filepath.Join(dir, fmt.Sprintf("%s-%x", name, sum[:8]))
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	tmp, err := os.MkdirTemp(dir, "build-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	out := filepath.Join(tmp, name)
	cmd := exec.CommandContext(ctx, cc, "-O2", "-Wall", "-x", "c", "-o", out, "-")
	cmd.Stdin = bytes.NewReader(source)
	if msg, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%s: %w: %s", cc, err, bytes.TrimSpace(msg))
	}
	return path, os.Rename(out, path)
}

// idleCommand is the hidden command of idleNIC.
const idleCommand = "_idle-nic"

// idle adds what a NIC of 16 HPUs costs that has nothing to do.
func (l *benchLab) idle(ctx context.Context, cfg benchConfig, doc *bench.Document) (err error) {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := l.NIC.NS.Command(context.Background(), self, idleCommand, l.NIC.Device)
	cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	defer func() {
		stdin.Close()
		kill := time.AfterFunc(5*time.Second, func() { cmd.Process.Kill() })
		defer kill.Stop()
		if e := cmd.Wait(); e != nil {
			err = errors.Join(err, fmt.Errorf("idle NIC: %w: %s", e, strings.TrimSpace(stderr.String())))
		}
	}()
	if _, err := bufio.NewReader(stdout).ReadString('\n'); err != nil {
		return fmt.Errorf("idle NIC: %w", err)
	}
	pause := func(d time.Duration) error {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(d):
			return nil
		}
	}
	// What belongs to starting is over, and the workers sleep.
	if err := pause(min(time.Second, cfg.idle)); err != nil {
		return err
	}
	before, err := cpuTime(cmd.Process.Pid)
	if err != nil {
		return err
	}
	start := time.Now()
	if err := pause(cfg.idle); err != nil {
		return err
	}
	after, err := cpuTime(cmd.Process.Pid)
	if err != nil {
		return err
	}
	took := time.Since(start)
	rss, err := resident(cmd.Process.Pid)
	if err != nil {
		return err
	}
	conditions := fmt.Sprintf("a process of its own, 16 HPUs on %d queues, adaptive, one active context, no traffic, watched for %v", l.Queues, cfg.idle)
	percent := bench.NewSide("user and system time of all its threads", "% of a core", []float64{100 * (after - before).Seconds() / took.Seconds()})
	row, err := bench.Absolute("idle/cpu_percent", bench.AtMost(1), percent)
	if err := doc.Add(conditions, row, err); err != nil {
		return err
	}
	row, err = bench.Absolute("idle/rss_mib", bench.AtMost(120), bench.NewSide("resident memory", "MiB", []float64{rss}))
	return doc.Add(conditions, row, err)
}

// cpuTime is what a process has used, by proc(5).
func cpuTime(pid int) (time.Duration, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The second field, the command in parentheses, may have spaces.
	_, rest, _ := strings.Cut(string(stat), ") ")
	f := strings.Fields(rest)
	const utime, stime = 14 - 3, 15 - 3
	if len(f) <= stime {
		return 0, fmt.Errorf("/proc/%d/stat: %q", pid, stat)
	}
	u, err1 := strconv.ParseInt(f[utime], 10, 64)
	s, err2 := strconv.ParseInt(f[stime], 10, 64)
	const tick = 10 * time.Millisecond // USER_HZ is 100 wherever Go runs
	return time.Duration(u+s) * tick, errors.Join(err1, err2)
}

// resident is the memory of a process that is in RAM, in MiB.
func resident(pid int) (float64, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(status)) {
		if v, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, err := strconv.ParseFloat(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(v), "kB")), 64)
			return kib / 1024, err
		}
	}
	return 0, fmt.Errorf("/proc/%d/status has no VmRSS", pid)
}
