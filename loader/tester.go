// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/xspin/xspin/bpf"
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
	// One buffer takes whatever the kernel is able to run a program over.
	return newTester(t, onOneHPU(t), Config{Mode: Native, HPUs: 1, Queues: 1, BufferSize: 1 << 20, MaxBuffers: 1})
}

func newTester(t *matcher.Table, contexts map[uint16]Delivery, cfg Config) (_ *Tester, err error) {
	if err := needToRun("run the in-kernel program"); err != nil {
		return nil, err
	}
	in := &Ingress{cfg: cfg, mode: cfg.Mode}
	defer func() {
		if err != nil {
			in.Close()
		}
	}()
	if err := in.load("xspin_verdict"); err != nil {
		return nil, err
	}
	if err := in.Publish(t, contexts); err != nil {
		return nil, err
	}
	for i := range in.Share().Credit {
		in.Share().Credit[i] = 1 << 31
	}
	return &Tester{in: in}, nil
}

// Verdict runs the program over a frame. The kernel takes 14 bytes to some
// 70 KiB; for any other length the error wraps ErrFrame.
func (t *Tester) Verdict(frame []byte) (matcher.Verdict, error) {
	v, _, err := t.run(frame, nil)
	return v, err
}

// run also returns what came out: metadata, if any, and the frame. md is nil or
// an xdpMD.
func (t *Tester) run(frame []byte, md any) (v matcher.Verdict, out []byte, err error) {
	if len(frame) < 14 {
		return v, nil, fmt.Errorf("%w: %d bytes, an Ethernet header has 14", ErrFrame, len(frame))
	}
	n := bpf.MetaSize + len(frame)
	if n > cap(t.data) {
		t.data = make([]byte, n)
	}
	opts := &ebpf.RunOptions{Data: frame, DataOut: t.data[:n], Context: md}
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
		if len(opts.DataOut) != n {
			return v, nil, fmt.Errorf("%d bytes of %d came back", len(opts.DataOut), n)
		}
		meta := bpf.MetaOf(opts.DataOut)
		if meta.Magic != bpf.MetaMagic {
			return v, nil, fmt.Errorf("metadata with magic %#x came back, want %#x", meta.Magic, bpf.MetaMagic)
		}
		v = matcher.Verdict{
			Action:  matcher.Deliver,
			Ruleset: int(meta.Ruleset),
			Context: meta.Context,
			EOM:     meta.Flags&bpf.MetaEOM != 0,
			Key:     meta.Key,
			Offset:  meta.Offset,
		}
		v.NKey = len(t.in.table.Entries[v.Ruleset].Format.Key)
	case xdpPass:
		if stats.Malformed == last.Malformed {
			break
		}
		v.Action = matcher.Malformed
		for slot, n := range stats.Matched {
			if n != last.Matched[slot] {
				v.Ruleset = slot
				v.Context = t.in.table.Entries[slot].Context
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

// LoadMatch loads the matching engine alone with a table, attached to nothing: a frame that
// a ruleset matches is dropped, all others pass. Its program is for benchmarks.
func LoadMatch(t *matcher.Table) (*Ingress, error) {
	const program = bpf.IngressProgXspinMatch
	if err := needToRun("load " + program); err != nil {
		return nil, err
	}
	in := &Ingress{cfg: Config{HPUs: 1, Queues: 1, BufferSize: 1 << 16, MaxBuffers: 1}, mode: Native}
	err := in.load(program)
	if err == nil {
		err = in.Publish(t, onOneHPU(t))
	}
	if err != nil {
		return nil, errors.Join(err, in.Close())
	}
	return in, nil
}

// Program is the program that was loaded. It lives until Close.
func (in *Ingress) Program() *ebpf.Program { return in.objs.XspinIngress }

// onOneHPU has all contexts of a table on HPU 0.
func onOneHPU(t *matcher.Table) map[uint16]Delivery {
	contexts := map[uint16]Delivery{}
	for _, e := range t.Entries {
		contexts[e.Context] = Delivery{Policy: ByPacket, CoreMask: 1}
	}
	return contexts
}
