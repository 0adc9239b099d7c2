// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/internal/capability"
	"github.com/xspin/xspin/matcher"
)

// ErrFrame says that the kernel cannot run a program over a frame like this.
var ErrFrame = errors.New("frame cannot be tested")

// A Tester runs the program over single frames, attached to nothing. Not safe
// for concurrent use.
type Tester struct {
	in   *Ingress
	last Stats
	data []byte
}

// NewTester loads the program with a table of rulesets. Every context gets as
// much credit as there is.
func NewTester(t *matcher.Table) (*Tester, error) {
	table := &Table{Generation: t.Generation, Rulesets: map[int]Binding{}, Contexts: map[uint16]Context{}}
	for slot, e := range t.Entries {
		if c, ok := table.Contexts[e.Context]; ok && c.Format != e.Format {
			return nil, fmt.Errorf("ruleset %d (%s): context %d has two message formats, %s and %s", slot, e.Name, e.Context, c.Format.Name, e.Format.Name)
		}
		table.Rulesets[slot] = Binding{Ruleset: e.Ruleset, Context: e.Context}
		table.Contexts[e.Context] = Context{ID: e.Context, Format: e.Format, Policy: ByPacket, CoreMask: 1}
	}
	return newTester(table, 1, 1)
}

func newTester(t *Table, queues, hpus int) (_ *Tester, err error) {
	if err := capability.Need("run the in-kernel program", capability.BPF, capability.NetAdmin, capability.Perfmon); err != nil {
		return nil, err
	}
	if err := checkKernel(); err != nil {
		return nil, err
	}
	in := &Ingress{cfg: Config{HPUs: hpus, Queues: queues, BufferSize: 1 << 16, MaxBuffers: 1}, mode: Native}
	defer func() {
		if err != nil {
			in.Close()
		}
	}()
	if err := in.load("xspin_verdict"); err != nil {
		return nil, err
	}
	if err := in.Publish(t); err != nil {
		return nil, err
	}
	for i := range in.Share().Credit {
		in.Share().Credit[i] = 1 << 31
	}
	return &Tester{in: in, data: make([]byte, bpf.MetaSize+1<<16)}, nil
}

// Verdict runs the program over a frame of at least 14 bytes.
func (t *Tester) Verdict(frame []byte) (matcher.Verdict, error) {
	v, _, err := t.run(frame)
	return v, err
}

// run also returns what came out: metadata, if any, and the frame.
func (t *Tester) run(frame []byte) (v matcher.Verdict, out []byte, err error) {
	if len(frame) < 14 {
		return v, nil, fmt.Errorf("%w: %d bytes, an Ethernet header has 14", ErrFrame, len(frame))
	}
	opts := &ebpf.RunOptions{Data: frame, DataOut: t.data[:bpf.MetaSize+len(frame)]}
	ret, err := t.in.objs.XspinIngress.Run(opts)
	if err != nil {
		return v, nil, fmt.Errorf("%w: %d bytes: %w", ErrFrame, len(frame), err)
	}
	stats, err := t.in.Stats()
	if err != nil {
		return v, nil, err
	}
	last := t.last
	t.last = stats
	switch ret {
	case xdpRedirect:
		meta := (*bpf.Meta)(unsafe.Pointer(&opts.DataOut[0]))
		if len(opts.DataOut) != bpf.MetaSize+len(frame) || meta.Magic != bpf.MetaMagic {
			return v, nil, fmt.Errorf("%d bytes of %d came back, magic %#x", len(opts.DataOut), bpf.MetaSize+len(frame), meta.Magic)
		}
		v = matcher.Verdict{
			Action:  matcher.Deliver,
			Ruleset: int(meta.Ruleset),
			Context: meta.Context,
			EOM:     meta.Flags&bpf.MetaEOM != 0,
			Key:     meta.Key,
			Offset:  meta.Offset,
		}
		v.NKey = len(t.in.table.Contexts[meta.Context].Format.Key)
	case xdpPass:
		if stats.Malformed == last.Malformed {
			break
		}
		v.Action = matcher.Malformed
		for slot, n := range stats.Matched {
			if n != last.Matched[slot] {
				v.Ruleset = slot
				v.Context = t.in.table.Rulesets[slot].Context
			}
		}
	default:
		return v, nil, fmt.Errorf("the program returned %d", ret)
	}
	return v, opts.DataOut, nil
}

// XDP verdicts, linux/bpf.h.
const (
	xdpPass     = 2
	xdpRedirect = 4
)

// Close frees the program.
func (t *Tester) Close() error { return t.in.Close() }
