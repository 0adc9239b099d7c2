// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/xspin/xspin/demos/file"
	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/yardstick"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns/impair"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/slmp"
)

const (
	kernelMessages = 64
	kernelSegments = 1 << 18
)

// messagesSpec is a context of built-in handlers of messages in eBPF.
func messagesSpec(name string, window *hostq.Window) (spec nic.ContextSpec, err error) {
	o, err := nic.BuiltinObject(name)
	if err != nil {
		return spec, err
	}
	spec = nic.ContextSpec{
		Name: "bench", Rulesets: []matcher.Ruleset{matcher.SLMP()}, Messages: kernelMessages,
		Kernel: &nic.Kernel{Object: o, Segments: kernelSegments},
	}
	if window != nil {
		spec.Window = window
	}
	return spec, nil
}

// kernelDeposit is a context whose handlers in eBPF put messages into a window of so many bytes.
func kernelDeposit(size int64) (mem *hostq.Memory, spec nic.ContextSpec, err error) {
	if mem, err = hostq.NewMemory("bench", size); err != nil {
		return nil, spec, err
	}
	if spec, err = messagesSpec("deposit", mem.Whole()); err != nil {
		return nil, spec, errors.Join(err, mem.Close())
	}
	return mem, spec, nil
}

// messageRows measure messages that handlers in eBPF get, and files of a size.
func (l *benchLab) messageRows(ctx context.Context, cfg benchConfig, doc *bench.Document, size int64) (err error) {
	o := slmpDefaults()
	o.size = size
	cfg.warn = func(string) {} // TCP is not among these
	b, err := newSLMPBench(l, cfg, o, doc)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	mem, err := hostq.NewMemory("bench", size)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, mem.Close()) }()
	if err := b.kernelRates(ctx, mem.Whole()); err != nil {
		return err
	}
	if err := b.kernelFiles(ctx, mem); err != nil {
		return err
	}
	return b.kernelShare(ctx, mem)
}

// kernelRates compares what takes generated segments with a program that drops them.
func (b *slmpBench) kernelRates(ctx context.Context, window *hostq.Window) (err error) {
	g, err := b.segmentGenerator()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	side := func(runs *rxRuns, size int, open func() (receiver, error)) func(context.Context) error {
		return func(context.Context) error {
			if err := g.SetSegments(yardstick.Segments{ID: 1, Count: noopSegments, Step: uint32(size - slmpHeaders), Last: uint16(slmp.EOM)}); err != nil {
				return err
			}
			r, err := open()
			if err != nil {
				return err
			}
			return errors.Join(b.flood(g, b.slmpFrame(size), b.cfg.duration, runs, r), r.Close())
		}
	}
	in := func(name string) func() (receiver, error) {
		return func() (receiver, error) {
			spec, err := messagesSpec(name, window)
			if err != nil {
				return nil, err
			}
			n, c, err := b.openContext(nic.Config{HPUs: 1, Workers: 1, CPUs: []int{b.receiver}}, spec)
			if err != nil {
				return nil, err
			}
			return kernelDropper{dropper{lab: b.benchLab}, n, c}, nil
		}
	}
	drop := func() (receiver, error) { return b.openDropper(plain(yardstick.Drop)) }
	var noop, bare, deposit, bareLong rxRuns
	if err := bench.Rounds(ctx, b.cfg.runs,
		side(&noop, rxFrame, in("noop-messages")), side(&bare, rxFrame, drop),
		side(&deposit, longFrame, in("deposit")), side(&bareLong, longFrame, drop)); err != nil {
		return err
	}
	conditions := fmt.Sprintf("messages of %d segments from the in-kernel generator (live frames, batches of 64, checksum 0), sent and taken on CPU %d; frames that the program saw per second of the generator's run; "+
		"no segment asks for an acknowledgement; no XDP program on the sending end; nobody sleeps", noopSegments, b.sender)
	for _, c := range []struct {
		name string
		goal bench.Goal
		a, b bench.Side
		more string
	}{
		{"kernel/slmp_noop3_over_drop", bench.AtLeast(0.50), noop.side("nic, header, payload and completion handler in eBPF that return Success"), bare.side("XDP_DROP at once"), fmt.Sprintf("%d-byte frames", rxFrame)},
		{"kernel/slmp_deposit_over_drop_1514B", bench.Higher, deposit.side("nic, messages put into a window in eBPF"), bareLong.side("XDP_DROP at once"), fmt.Sprintf("%d-byte frames", longFrame)},
	} {
		row, err := bench.Ratio(c.name, c.goal, c.a, c.b)
		if err := b.doc.Add(conditions+"; "+c.more, row, err); err != nil {
			return err
		}
	}
	return nil
}

// kernelFiles compares a file transfer to handlers in eBPF with one to HPUs, and what loss
// costs the former.
func (b *slmpBench) kernelFiles(ctx context.Context, mem *hostq.Memory) (err error) {
	source, err := b.file(b.o.size)
	if err != nil {
		return err
	}
	kernel, err := messagesSpec("deposit", mem.Whole())
	if err != nil {
		return err
	}
	user := depositSpec(nil)
	user.Window = mem.Whole()
	side := func(runs *sendRuns, spec nic.ContextSpec) func(context.Context) error {
		return func(ctx context.Context) error { return b.transferTo(ctx, runs, spec, mem.Bytes(), source) }
	}
	var inKernel, onHPU sendRuns
	if err := bench.Rounds(ctx, b.cfg.runs, side(&inKernel, kernel), side(&onHPU, user)); err != nil {
		return err
	}
	conditions := fmt.Sprintf("one message of %d bytes from a file in memory (tmpfs), from the first byte to the acknowledgement of EOM, into a window that a BPF map is, window auto, acknowledgements aggregated; %s; what arrived was compared after each run", b.o.size, b.pinning())
	a := inKernel.side("SLMP, handlers in eBPF, acknowledged by XDP; the sender's end has a program that lets all pass, as a veth needs one to take its frames")
	row, err := bench.Ratio("kernel/file_over_user_tier", bench.Higher, a, onHPU.side("SLMP, default deposit on an HPU"))
	if err := b.doc.Add(conditions, row, err); err != nil {
		return err
	}
	row, err = bench.Absolute("kernel/file", bench.Higher, a)
	if err := b.doc.Add(conditions, row, err); err != nil {
		return err
	}

	defer func() { err = errors.Join(err, b.reshape(nil)) }()
	var bad, good sendRuns
	through := func(runs *sendRuns, path impair.Config) func(context.Context) error {
		return func(ctx context.Context) error {
			if err := b.reshape(&path); err != nil {
				return err
			}
			return b.transferTo(ctx, runs, kernel, mem.Bytes(), source)
		}
	}
	if err := bench.Rounds(ctx, b.cfg.runs, through(&bad, impair.Config{Loss: 0.01}), through(&good, impair.Config{})); err != nil {
		return err
	}
	row, err = bench.Ratio("kernel/file_loss1_over_loss0", bench.AtLeast(0.50), bad.side("SLMP, handlers in eBPF, 1 % loss"), good.side("SLMP, handlers in eBPF, 0 % loss"))
	return b.doc.Add("through the impairment stage, a third namespace with programs at tc ingress, at 1 % loss of frames each way, and at 0 %; otherwise: "+conditions, row, err)
}

// kernelShare tells how many of the messages that begin in the kernel end there, through a bad
// network.
func (b *slmpBench) kernelShare(ctx context.Context, mem *hostq.Memory) (err error) {
	path := impair.Config{Loss: 0.01, Reorder: 0.03, Delay: time.Millisecond}
	l := load{Size: 8 << 10, Outstanding: 16, For: b.cfg.duration}
	defer func() { err = errors.Join(err, b.reshape(nil)) }()
	if err := b.reshape(&path); err != nil {
		return err
	}
	var share, completed, again []float64
	var on string
	if err := bench.Rounds(ctx, b.cfg.runs, func(ctx context.Context) (err error) {
		spec, err := messagesSpec("deposit", mem.Whole())
		if err != nil {
			return err
		}
		n, c, err := b.openContext(b.oneHPU(), spec)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, n.Close()) }()
		if on, err = b.granted(n); err != nil {
			return err
		}
		reports, err := b.runLoads(ctx, 1, l)
		if err != nil {
			return err
		}
		st, _ := c.Messages()
		r := reports[0]
		share = append(share, float64(st.Ended)/float64(max(st.Started, 1)))
		completed = append(completed, float64(r.Completed))
		again = append(again, 100*float64(r.Retransmitted)/float64(max(r.Segments, 1)))
		return nil
	}); err != nil {
		return err
	}
	a := bench.NewSide("SLMP, handlers in eBPF", "share", share)
	a.On = on
	a.Add("completed", completed)
	a.Add("sent_again_percent", again)
	row, err := bench.Absolute("kernel/messages_ended_loss1_reorder3", bench.AtLeast(0.95), a)
	return b.doc.Add(fmt.Sprintf("of the messages that began in XDP, those that were complete there and told to the application; messages of %d bytes, %d at a time, those included that were on their way when the sender stopped; "+
		"through the impairment stage, 1 %% loss and 3 %% reordering each way, delay %v; %s", l.Size, l.Outstanding, path.Delay, b.pinning()), row, err)
}

// transferTo sends a file to a context, on a NIC of its own, whose window has these bytes.
func (b *slmpBench) transferTo(ctx context.Context, runs *sendRuns, spec nic.ContextSpec, window []byte, source string, args ...string) (err error) {
	n, err := b.openEmpty(b.oneHPU())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	return b.transferOn(ctx, n, runs, spec, window, source, args...)
}

// transferOn is transferTo on a NIC that is open.
func (b *slmpBench) transferOn(ctx context.Context, n *nic.NIC, runs *sendRuns, spec nic.ContextSpec, window []byte, source string, args ...string) (err error) {
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
	clear(window)
	if runs.on, err = b.granted(n); err != nil {
		return err
	}
	runtime.GC()
	r, err := b.send(ctx, source, 0, args...)
	if err != nil {
		return err
	}
	runs.allocs = append(runs.allocs, b.allocs/float64(max(r.Segments, 1)))
	st := c.Stats()
	runs.unverified = append(runs.unverified, 100*float64(st.Unverified)/float64(max(st.Handled, 1)))
	runs.add(r)
	runs.on += "; sent by " + r.Offload
	if !bytes.Equal(window, b.bytes[:len(window)]) {
		return fmt.Errorf("%w: what arrived in memory", file.ErrContents)
	}
	return nil
}

// wireFor has the sender take what handlers in eBPF send, if a context has them, until what it
// returns is called. Behind a third namespace that needs nothing, nor does tc.
func (b *slmpBench) wireFor(spec nic.ContextSpec) (unwire func() error, err error) {
	if spec.Kernel == nil || b.Path != nil || b.hook == nic.HookTC {
		return func() error { return nil }, nil
	}
	w, err := b.Host.Wire()
	if err != nil {
		return nil, err
	}
	return w.Close, nil
}
