// SPDX-License-Identifier: Apache-2.0

package ddt

// hpuLocal has a segment for each virtual HPU of a message, of which there are as many as
// real ones, and gives each every so-many-th packet (SC 2019, section 3.2.4). So each
// catches up by the packets of all others before it places one of its own, and begins
// again if one comes that is before the last.
type hpuLocal struct {
	base
	slots    slots
	sequence int64
	segments []segment // message after message
}

func newHPULocal(b base, cfg Config) (Placement, error) {
	b.scheduling = Scheduling{Sequence: uint32(cfg.Packet), VHPUs: cfg.HPUs}
	depth := levels(b.c.fast)
	each := plus(slotSize, times(int64(cfg.HPUs), segmentMemory(depth)))
	if err := b.allot(HPULocal, 0, times(int64(cfg.Messages), each)); err != nil {
		return nil, err
	}
	return &hpuLocal{
		base: b, slots: newSlots(cfg.Messages), sequence: int64(cfg.Packet),
		segments: newSegments(cfg.Messages*cfg.HPUs, depth),
	}, nil
}

func (p *hpuLocal) Begin(slot int) { p.slots.begin(slot) }

func (p *hpuLocal) Place(slot, hpu int, mem []byte, origin, first int64, stream []byte) (copies int64, err error) {
	if err := p.check(slot, hpu, mem, origin, first, stream); err != nil {
		return 0, err
	}
	if len(stream) == 0 {
		return 0, nil
	}
	vhpu := quotient(first, p.sequence) % int64(p.hpus)
	s := &p.segments[int64(slot)*int64(p.hpus)+vhpu]
	if message := p.slots[slot].message; s.message != message || first < s.pos {
		s.reset(p.c.fast, p.c.origin)
		s.message = message
	}
	return s.place(mem, origin, first, stream), nil
}
