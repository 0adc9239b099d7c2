// SPDX-License-Identifier: Apache-2.0

package ddt

import "fmt"

// hpuLocal has a segment for each virtual HPU of a message, of which there are as many as
// real ones, and gives each every so-many-th packet (SC 2019, section 3.2.4). So each
// catches up by the packets of all others before it places one of its own, and begins
// again if one comes that is before the last.
type hpuLocal struct {
	base
	sequence int64
	segments []segment // message after message
}

func newHPULocal(b base, cfg Config) (Placement, error) {
	b.scheduling = Scheduling{Sequence: uint32(cfg.Packet), VHPUs: cfg.HPUs}
	if n := b.c.Blocks(); n > MaxCatchUp {
		return nil, fmt.Errorf("hpu-local catches up from the beginning of a message, and this type has %d blocks: at most %d; direct need not", n, int64(MaxCatchUp))
	}
	depth := levels(b.c.fast)
	each := times(int64(cfg.HPUs), segmentMemory(depth))
	if err := b.allot(HPULocal, 0, times(int64(cfg.Messages), each)); err != nil {
		return nil, err
	}
	return &hpuLocal{b, int64(cfg.Packet), newSegments(cfg.Messages*cfg.HPUs, depth)}, nil
}

func (p *hpuLocal) Place(slot, hpu int, mem []byte, origin, packet, first int64, stream []byte) (copies int64, err error) {
	if err := p.check(slot, hpu, mem, origin, packet, first, stream); err != nil {
		return 0, err
	}
	if len(stream) == 0 {
		return 0, nil
	}
	vhpu := quotient(packet, p.sequence) % int64(p.hpus)
	s := &p.segments[int64(slot)*int64(p.hpus)+vhpu]
	if first < s.pos {
		s.reset(p.c.fast, p.c.origin)
	}
	return s.place(mem, origin, first, stream), nil
}
