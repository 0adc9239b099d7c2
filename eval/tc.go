// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"time"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/demos/datatypes"
	"github.com/xspin/xspin/demos/file"
	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/mpich"
	"github.com/xspin/xspin/eval/peers"
	"github.com/xspin/xspin/eval/report"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns/impair"
	"github.com/xspin/xspin/netns/testbed"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// tcFiles is how many times longer the files of part tc are than those of the other parts: 1 GiB.
const tcFiles = 4

// tcRows measure handlers in eBPF at tc, where a sender's trains come whole, next to TCP, which has TSO and GSO then, to
// Linux, to MPICH and to xdp. size is that of the files of the other parts.
func (l *benchLab) tcRows(ctx context.Context, cfg benchConfig, doc *bench.Document, size int64) (err error) {
	o := slmpDefaults()
	o.size = size * tcFiles
	s, err := newSLMPBench(l, cfg, o, doc)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	b := &tcBench{slmpBench: s}
	s.hook = nic.HookTC
	if b.mem, err = hostq.NewMemory("bench", 2*o.size); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.mem.Close()) }()
	for _, part := range []func(context.Context) error{b.fileRows, b.mpichRow, b.bystanderRows, b.echoRows, b.smallRow, b.lossRow} {
		if err := part(ctx); err != nil {
			return err
		}
	}
	return nil
}

// tcBench is one run of part tc.
type tcBench struct {
	*slmpBench
	mem *hostq.Memory // two files long
}

// unpinned is the bench with nothing pinned. Its lab must not be reshaped.
func (b *tcBench) unpinned() *tcBench {
	l := *b.benchLab
	l.sender, l.receiver = -1, -1
	s := *b.slmpBench
	s.benchLab = &l
	return &tcBench{&s, b.mem}
}

// deposit is a context that puts messages into the window.
func (b *tcBench) deposit(messages int) (nic.ContextSpec, error) {
	spec, err := messagesSpec("deposit", b.mem.Whole())
	if err == nil {
		spec.Messages, spec.Kernel.Segments = messages, tcFiles*kernelSegments
	}
	return spec, err
}

// costs are CPU seconds of the machine for a GB, run by run.
type costs []float64

// of adds what f takes, which moves so many bytes.
func (c *costs) of(bytes int64, f func() error) error {
	before, err := datatypes.BusyCPUs()
	if err != nil {
		return err
	}
	if err := f(); err != nil {
		return err
	}
	after, err := datatypes.BusyCPUs()
	*c = append(*c, (after-before).Seconds()/(float64(bytes)/1e9))
	return err
}

// receive opens a NIC with a window, in which n files arrive that send sends.
func (b *tcBench) receive(runs *sendRuns, n int, send func(events <-chan spin.MessageEvent) error) (err error) {
	size := b.o.size
	spec, err := b.deposit(2 * n)
	if err != nil {
		return err
	}
	events := make(chan spin.MessageEvent, n)
	spec.Events = events
	nc, c, err := b.openContext(b.oneHPU(), spec)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, nc.Close()) }()
	for i := range int64(n) {
		if err := c.Post(spin.Receive{Binding: spin.Binding{Window: spec.Window, Place: i * size, Size: size}, Ignore: ^uint32(0)}); err != nil {
			return err
		}
	}
	clear(b.mem.Bytes())
	if runs.on, err = b.state(); err != nil {
		return err
	}
	runtime.GC()
	if err := send(events); err != nil {
		return err
	}
	for i := range int64(n) {
		if !bytes.Equal(b.mem.Bytes()[i*size:][:size], b.bytes[:size]) {
			return fmt.Errorf("%w: what arrived in memory", file.ErrContents)
		}
	}
	return nil
}

// fileRows compare files with TCP.
func (b *tcBench) fileRows(ctx context.Context) error {
	if !b.tcp {
		return nil // it was said
	}
	size := b.o.size
	source, err := b.file(size)
	if err != nil {
		return err
	}
	free := b.unpinned()
	var one, two, stored, tcp, best, kept sendRuns
	var ours, theirs costs
	end := func(n int64) []string { return []string{"-n", strconv.FormatInt(n*size, 10)} }
	path := filepath.Join(b.dir, "stored")
	defer os.Remove(path)
	err = bench.Rounds(ctx, b.cfg.runs,
		func(ctx context.Context) error {
			return free.receive(&one, 1, func(<-chan spin.MessageEvent) error {
				return ours.of(size, func() error {
					r, err := free.send(ctx, source, 0)
					one.add(r)
					return err
				})
			})
		},
		func(ctx context.Context) error {
			return theirs.of(size, func() error { return free.iperfTo(ctx, &tcp, false, end(1)...) })
		},
		func(ctx context.Context) error {
			return free.receive(&two, 2, func(<-chan spin.MessageEvent) error { return free.sendTwo(ctx, &two, source) })
		},
		func(ctx context.Context) error {
			if err := free.iperfTo(ctx, &best, false, append(end(2), "-P", "2")...); err != nil {
				return err
			}
			last := len(best.gbps) - 1
			best.gbps[last] = max(best.gbps[last], tcp.gbps[last])
			return nil
		},
		func(ctx context.Context) error {
			return free.receive(&stored, 1, func(events <-chan spin.MessageEvent) error {
				return free.sendStored(ctx, &stored, events, source, path)
			})
		},
		func(ctx context.Context) (err error) {
			if kept.on, err = free.state(); err != nil {
				return err
			}
			f, err := testbed.IPerfStored(ctx, free.Lab, -1, -1, path, end(1)...)
			kept.gbps = append(kept.gbps, f.Gbps)
			return err
		})
	if err != nil {
		return err
	}
	conditions := fmt.Sprintf("a file of %d bytes in memory (tmpfs), as one message, by xspin send, from the first byte to the acknowledgement of EOM, into a window that a BPF map is; handlers in eBPF at tc; "+
		"iperf3, as many bytes from its own memory; nothing pinned; MTU %d; no XDP program on either end; what arrived was compared after each run", size, b.MTU)
	a, t := one.side("SLMP, one message"), tcp.side("iperf3, one TCP stream").Of("TCP")
	row, err := bench.Ratio("tc/file_over_tcp", bench.AtLeast(1), a, t)
	if err := b.doc.Add(conditions, row, err); err != nil {
		return err
	}
	row, err = bench.Ratio("tc/two_files_over_tcp", bench.AtLeast(1.7), two.side("SLMP, two messages of two processes, each to a place of its own; bytes of both in the time of the one that took longer"),
		best.side("iperf3, one TCP stream or two, whichever was faster in this turn").Of("TCP"))
	if err := b.doc.Add(conditions, row, err); err != nil {
		return err
	}
	cost := func(c costs, of bench.Side) bench.Side {
		s := bench.NewSide(of.What, "s/GB", c).Of(of.Peer)
		s.On = of.On
		return s
	}
	row, err = bench.Ratio("tc/cpu_per_gb_over_tcp", bench.AtMost(0.65), cost(ours, a), cost(theirs, t))
	if err := b.doc.Add("CPU seconds of the machine for a GB, both ends and softirq included, from the start of the processes to their end, from /proc/stat, in steps of 10 ms; "+conditions, row, err); err != nil {
		return err
	}
	row, err = bench.Ratio("tc/file_stored_over_tcp", bench.AtLeast(0.8), stored.side("SLMP, one message; when it has come, the receiver writes the window to a file in memory, by two threads, and the time ends then"),
		kept.side("iperf3 -F, one TCP stream into a file in memory").Of("TCP"))
	if err := b.doc.Add(conditions, row, err); err != nil {
		return err
	}
	row, err = bench.Absolute("tc/file", bench.Higher, a)
	return b.doc.Add(conditions, row, err)
}

// sendTwo sends a file from two processes at once.
func (b *tcBench) sendTwo(ctx context.Context, runs *sendRuns, source string) error {
	var reports [2]sendReport
	var errs [2]error
	var wg sync.WaitGroup
	for i := range reports {
		wg.Go(func() { reports[i], errs[i] = b.send(ctx, source, 0) })
	}
	wg.Wait()
	both := reports[0]
	both.Seconds = max(both.Seconds, reports[1].Seconds)
	both.Segments += reports[1].Segments
	both.Retransmitted += reports[1].Retransmitted
	both.Gbps = float64(2*b.o.size) * 8 / 1e9 / both.Seconds
	runs.add(both)
	return errors.Join(errs[0], errs[1])
}

// sendStored sends a file, and writes it to another one when it has come.
func (b *tcBench) sendStored(ctx context.Context, runs *sendRuns, events <-chan spin.MessageEvent, source, path string) error {
	written := make(chan error, 1)
	var end time.Time
	go func() {
		select {
		case e := <-events:
			err := e.Err
			if err == nil && e.Cause != spin.Complete {
				err = fmt.Errorf("the message ended as %+v", e)
			}
			if err == nil {
				err = storeFile(path, b.mem.Bytes()[:b.o.size])
			}
			end = time.Now()
			written <- err
		case <-ctx.Done():
			written <- ctx.Err()
		}
	}()
	r, err := b.send(ctx, source, 0)
	if err != nil {
		return err
	}
	acknowledged := time.Now() // and the process has ended, a few ms later
	if err := <-written; err != nil {
		return err
	}
	r.Seconds += max(end.Sub(acknowledged), 0).Seconds()
	r.Gbps = float64(b.o.size) * 8 / 1e9 / r.Seconds
	runs.add(r)
	return nil
}

// storeFile writes a file by two threads. As iperf3 does, it truncates one that is there first.
func storeFile(path string, data []byte) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	var errs [2]error
	var wg sync.WaitGroup
	half := len(data) / 2
	for i, part := range [][]byte{data[:half], data[half:]} {
		wg.Go(func() { _, errs[i] = f.WriteAt(part, int64(i*half)) })
	}
	wg.Wait()
	return errors.Join(errs[0], errs[1], f.Close())
}

// mpichRow compares messages of 4 MiB, one at a time.
func (b *tcBench) mpichRow(ctx context.Context) (err error) {
	const size = 4 << 20
	typ, _, err := ddt.Resolve(fmt.Sprintf("ctg(%d)[byte]", size))
	if err != nil {
		return err
	}
	var ours, theirs sendRuns
	err = bench.Rounds(ctx, b.cfg.runs,
		func(ctx context.Context) error {
			r, on, err := b.loaded(ctx, load{Size: size, Outstanding: 1, Warmup: b.cfg.duration / 10, For: b.cfg.duration})
			ours.on = on
			ours.gbps = append(ours.gbps, float64(r.Messages)*size*8/1e9/r.Seconds)
			ours.rtt = append(ours.rtt, r.RTT.Smoothed)
			return err
		},
		func(ctx context.Context) (err error) {
			if theirs.on, err = b.state(); err != nil {
				return err
			}
			p, err := mpich.Start(ctx, mpich.PairConfig{Lab: b.Lab, ReceiverCPU: b.receiver, SenderCPU: b.sender, Library: mpich.MPICH})
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, p.Close()) }()
			if err := p.Prepare(ctx, mpich.Transfer{Type: typ, Count: 1, Messages: 1}); err != nil {
				return err
			}
			if _, err := p.Receive(ctx, 2); err != nil {
				return err
			}
			r, err := p.Receive(ctx, int(max(b.cfg.duration/(5*time.Millisecond), 2)))
			took := time.Duration(0)
			for _, t := range r.Times {
				took += t
			}
			theirs.gbps = append(theirs.gbps, float64(len(r.Times))*size*8/1e9/took.Seconds())
			return err
		})
	if errors.Is(err, mpich.ErrMissing) {
		b.cfg.warn(fmt.Sprintf("no row tc/message_4MiB_one_at_a_time: %v", err))
		return nil
	}
	if err != nil {
		return err
	}
	row, err := bench.Ratio("tc/message_4MiB_one_at_a_time", bench.AtLeast(1), ours.side("SLMP, handlers in eBPF at tc put each message into a window; the next is sent when it is acknowledged"),
		theirs.side("MPICH over TCP, MPI_Irecv of contiguous bytes, from ready-to-send until the message is there; waits spinning").Of("MPICH"))
	return b.doc.Add(fmt.Sprintf("messages of %d bytes, one at a time; sender on CPU %d, receiver on CPU %d (handlers at tc run on the sender's); no XDP program on either end", size, b.sender, b.receiver), row, err)
}

// loaded has a process send messages into the window.
func (b *tcBench) loaded(ctx context.Context, l load) (r loadReport, on string, err error) {
	spec, err := b.deposit(2 * l.Outstanding)
	if err != nil {
		return r, "", err
	}
	spec.Kernel.Segments = kernelSegments
	n, _, err := b.openContext(b.oneHPU(), spec)
	if err != nil {
		return r, "", err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	if on, err = b.state(); err != nil {
		return r, "", err
	}
	reports, err := b.runLoads(ctx, 1, l)
	if err != nil {
		return r, "", err
	}
	return reports[0], on + "; sent by " + reports[0].Offload, nil
}

// bystanderRows tell what TCP through the interface loses.
func (b *tcBench) bystanderRows(ctx context.Context) error {
	if !b.tcp {
		return nil // it was said
	}
	for _, dir := range []struct {
		suffix, flow string
		args         []string
	}{
		{"", "into the interface", nil},
		{"_out", "out of the interface", []string{"-R"}},
	} {
		var with, none sendRuns
		args := append(dir.args, "-t", strconv.Itoa(int(max(b.cfg.duration.Seconds(), 1))))
		err := bench.Rounds(ctx, b.cfg.runs,
			func(ctx context.Context) (err error) {
				spec, err := kernelSpec("echo-udp", matcher.UDPPort(benchPort))
				if err != nil {
					return err
				}
				n, _, err := b.openContext(b.oneHPU(), spec)
				if err != nil {
					return err
				}
				defer func() { err = errors.Join(err, n.Close()) }()
				return b.iperfTo(ctx, &with, false, args...)
			},
			func(ctx context.Context) error { return b.iperfTo(ctx, &none, false, args...) })
		if err != nil {
			return err
		}
		row, err := bench.Ratio("tc/bystander_tcp"+dir.suffix, bench.AtLeast(0.95), with.side("nic, one active context of handlers in eBPF at tc, which matches nothing"), none.side("nothing attached"))
		if err := b.doc.Add(fmt.Sprintf("iperf3, one TCP stream %s; client on CPU %d in the host's namespace, server on CPU %d in the NIC's", dir.flow, b.sender, b.receiver), row, err); err != nil {
			return err
		}
	}
	return nil
}

// echoRows compare round trips with those of handlers at xdp, and with Linux.
func (b *tcBench) echoRows(ctx context.Context) error {
	cross := [2]int{b.sender, b.receiver}
	for _, size := range []int{16, 1416} {
		c := rttCase{name: fmt.Sprintf("tc/udp_echo_over_xdp_%d", size), goal: bench.AtMost(0.9), proto: rtt.UDP, size: size, client: rtt.Spin, cpus: cross, hook: nic.HookTC}
		x := c
		x.hook = nic.HookXDP
		var at, before rttRuns
		if err := bench.Rounds(ctx, b.cfg.runs,
			func(ctx context.Context) error { return b.pingKernel(ctx, b.cfg, c, &at) },
			func(ctx context.Context) error { return b.pingKernel(ctx, b.cfg, x, &before) }); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		row, err := bench.Ratio(c.name, c.goal, at.side("nic, handler echo-udp in eBPF at tc"), before.side("the same at xdp, where the client's end has a program that lets all pass"))
		if err := b.doc.Add(fmt.Sprintf("UDP echo, %d bytes of payload, median of a run's round trips; client in a process of its own, spinning, %s; back to back; the kernel answers on the CPU that the request comes from", size, where(b.sender)), row, err); err != nil {
			return err
		}
	}
	for _, size := range []int{16, 516, 1016, 1416} {
		c := rttCase{name: fmt.Sprintf("tc/icmp_over_linux_%d", size), goal: bench.AtMost(1), proto: rtt.ICMP, size: size, client: rtt.Spin, cpus: cross, hook: nic.HookTC}
		if err := b.kernelTrips(ctx, b.cfg, b.doc, c, false); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

// smallRow compares small messages with UDP echo.
func (b *tcBench) smallRow(ctx context.Context) error {
	const outstanding = 256
	peer, err := buildPeer(ctx, "udp_batch", peers.UDPBatch)
	if err != nil {
		b.cfg.warn(fmt.Sprintf("no row tc/small_messages_over_udp_echo: %v", err))
		return nil
	}
	var ours, theirs smallRuns
	if err := bench.Rounds(ctx, b.cfg.runs,
		func(ctx context.Context) error {
			r, on, err := b.loaded(ctx, load{Size: smallSize, Outstanding: outstanding, Warmup: b.cfg.duration / 10, For: b.cfg.duration})
			ours.on = on
			ours.kps = append(ours.kps, float64(r.Messages)/r.Seconds/1e3)
			ours.rtt = append(ours.rtt, r.RTT.Smoothed)
			ours.again = append(ours.again, 100*float64(r.Retransmitted)/float64(max(r.Segments, 1)))
			return err
		},
		func(ctx context.Context) error { return b.smallEcho(ctx, peer, outstanding, &theirs) }); err != nil {
		return err
	}
	row, err := bench.Ratio("tc/small_messages_over_udp_echo", bench.Higher, ours.side("SLMP messages completed: slmp.Conn.Post to handlers in eBPF at tc that put them into a window"),
		theirs.side("UDP datagrams echoed: recvmmsg and sendmmsg at both ends, in C, which spin and then sleep").Of("UDP sockets in C"))
	return b.doc.Add(fmt.Sprintf("%d bytes, %d outstanding; one sending process on CPU %d, one receiver on CPU %d (handlers at tc run on the sender's); after a warmup of a tenth of the time",
		smallSize, outstanding, b.sender, b.receiver), row, err)
}

// lossRow tells what loss costs.
func (b *tcBench) lossRow(ctx context.Context) (err error) {
	size := b.o.size / tcFiles
	source, err := b.file(size)
	if err != nil {
		return err
	}
	spec, err := b.deposit(2)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.reshape(nil)) }()
	var bad, good sendRuns
	through := func(runs *sendRuns, path impair.Config) func(context.Context) error {
		return func(ctx context.Context) error {
			if err := b.reshape(&path); err != nil {
				return err
			}
			return b.transferTo(ctx, runs, spec, b.mem.Bytes()[:size], source)
		}
	}
	if err := bench.Rounds(ctx, b.cfg.runs, through(&bad, impair.Config{Loss: 0.01, Trains: true}), through(&good, impair.Config{Trains: true})); err != nil {
		return err
	}
	row, err := bench.Ratio("tc/file_loss1_over_loss0", bench.AtLeast(0.6), bad.side("SLMP, handlers in eBPF at tc, 1 % loss"), good.side("SLMP, handlers in eBPF at tc, 0 % loss"))
	return b.doc.Add(fmt.Sprintf("through the impairment stage, a third namespace with programs at tc ingress, which lets trains pass whole, at 1 %% loss of segments each way, and at 0 %%; a file of %d bytes in memory (tmpfs), as one message, into a window; %s", size, b.pinning()), row, err)
}

// tcPlot draws the rows of files.
func tcPlot(_ context.Context, t *trial) error {
	one, two, stored := t.row("tc/file_over_tcp"), t.row("tc/two_files_over_tcp"), t.row("tc/file_stored_over_tcp")
	if one == nil || two == nil || stored == nil {
		return nil // no iperf3, and it has been said
	}
	p := report.Plot{
		Name: "tc-files", Title: "Files of 1 GiB by handlers in eBPF at tc, and by TCP",
		X: report.Axis{Label: "what is sent", Names: []string{"one file", "two at once", "one, stored"}},
		Y: report.Axis{Label: "goodput", Unit: "Gbit/s"},
	}
	if t.quick {
		p.Title = "Files by handlers in eBPF at tc, and by TCP"
	}
	ours, theirs := newLine("SLMP, handlers in eBPF at tc", "kernel"), newLine("TCP", "")
	for x, r := range []*bench.Row{one, two, stored} {
		ours.row(float64(x), r.A)
		theirs.row(float64(x), r.B)
	}
	t.plot(p, ours, theirs)
	return nil
}
