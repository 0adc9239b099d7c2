// SPDX-License-Identifier: Apache-2.0

package ddt

import (
	"fmt"
	"math"
)

// checkpoints are copies of a segment that has gone through a type, at regular
// distances in the stream. They are for all messages, and do not change.
type checkpoints struct {
	every  int64 // bytes from one to the next
	depth  int
	heads  []head
	frames []frame // depth of each
}

// checkpointSize returns how many bytes a checkpoint takes: C of section 3.2.4.
func checkpointSize(c *Committed) int64 { return headSize + int64(levels(c.fast))*frameSize }

// divide is a/b, rounded up. a is not negative.
func divide(a, b int64) int64 {
	q := a / b
	if a%b > 0 {
		q++
	}
	return q
}

// newCheckpoints goes through all of a type once. There is memory for n. It refuses a type
// that has a packet catch up by too much: one may come that begins at the end of an
// interval.
func newCheckpoints(strategy string, c *Committed, every, n int64) (*checkpoints, error) {
	depth := levels(c.fast)
	p := &checkpoints{every: every, depth: depth, heads: make([]head, n), frames: make([]frame, n*int64(depth))}
	if n == 0 {
		return p, nil
	}
	s := &newSegments(1, depth)[0]
	s.reset(c.fast, c.origin)
	for i := range p.heads {
		p.heads[i] = s.head
		copy(p.frames[i*depth:(i+1)*depth], s.frames[:s.top+1])
		before := s.steps
		s.catchUp(min(plus(s.pos, every), c.Size()))
		if steps := s.steps - before; steps > MaxCatchUp {
			return nil, fmt.Errorf("%s with a checkpoint every %d bytes: from one to the next are %d steps through the type, and a packet may have to catch up by at most %d; "+
				"a shorter interval has fewer, and direct needs none", strategy, every, steps, int64(MaxCatchUp))
		}
	}
	return p, nil
}

// load brings a segment to a checkpoint.
func (p *checkpoints) load(s *segment, i int64) {
	s.head = p.heads[i]
	copy(s.frames[:s.top+1], p.frames[i*int64(p.depth):])
}

// interval returns the checkpoint interval that is configured or, by default, chosen, and
// refuses types that are too long to go through.
func (b *base) interval(cfg Config) (int64, error) {
	if n := b.c.Blocks(); n > MaxWalk {
		return 0, fmt.Errorf("%s goes through all of a type for its checkpoints, and this one has %d blocks: at most %d; "+
			"direct need not", cfg.Strategy, n, int64(MaxWalk))
	}
	every := cfg.Interval
	if every == 0 {
		var err error
		if every, err = Interval(b.c, cfg.Packet, cfg.HPUs, cfg.Model); err != nil {
			return 0, fmt.Errorf("%s: %w", cfg.Strategy, err)
		}
	}
	return max(min(every, b.c.Size()), 1), nil
}

// roCP copies the last checkpoint that is not behind a packet, catches up from there, and
// forgets it with the next packet (RO-CP, section 3.2.4).
type roCP struct {
	base
	*checkpoints
	scratch []segment // of each HPU, which does one thing at a time
}

func newROCP(b base, cfg Config) (Placement, error) {
	every, err := b.interval(cfg)
	if err != nil {
		return nil, err
	}
	n, depth := divide(b.c.Size(), every), levels(b.c.fast)
	err = b.allot(ROCP, times(n, checkpointSize(b.c)), times(int64(cfg.HPUs), segmentMemory(depth)))
	if err != nil {
		return nil, err
	}
	cp, err := newCheckpoints(ROCP, b.c, every, n)
	if err != nil {
		return nil, err
	}
	return &roCP{b, cp, newSegments(cfg.HPUs, depth)}, nil
}

func (p *roCP) Place(slot, hpu int, mem []byte, origin, packet, first int64, stream []byte) (copies int64, err error) {
	if err := p.check(slot, hpu, mem, origin, packet, first, stream); err != nil {
		return 0, err
	}
	if len(stream) == 0 {
		return 0, nil
	}
	s := &p.scratch[hpu]
	if first == packet || first != s.pos { // it is not there from the packet's last part
		p.load(s, quotient(first, p.every))
	}
	return s.place(mem, origin, first, stream), nil
}

// rwCP makes of each checkpoint interval a sequence, which one HPU at a time works on,
// and gives it a copy of the checkpoint to advance. In order, nothing catches up and
// nothing else is copied. For a packet that is before what was placed last the copy is
// made again (RW-CP, section 3.2.4).
//
// It is the packet's first byte that says which: one that reaches into the next interval
// goes on with the checkpoint that it began with.
type rwCP struct {
	base
	*checkpoints
	segments []segment // of each checkpoint, message after message
}

func newRWCP(b base, cfg Config) (Placement, error) {
	every, err := b.interval(cfg)
	if err != nil {
		return nil, err
	}
	// Whole packets, so that none reaches into the next sequence.
	packet := int64(cfg.Packet)
	sequence, ok := mul(divide(every, packet), packet)
	if !ok || sequence > math.MaxUint32 {
		return nil, fmt.Errorf("rw-cp with a checkpoint every %d bytes: it is how long a sequence of packets is, at most %d", every, uint32(math.MaxUint32))
	}
	every = sequence
	n, depth := divide(b.c.Size(), every), levels(b.c.fast)
	each := times(n, segmentMemory(depth))
	if err := b.allot(RWCP, times(n, checkpointSize(b.c)), times(int64(cfg.Messages), each)); err != nil {
		return nil, err
	}
	cp, err := newCheckpoints(RWCP, b.c, every, n)
	if err != nil {
		return nil, err
	}
	// A virtual HPU for each sequence. If that is more than there can be, some have
	// several, which is as good.
	b.scheduling = Scheduling{Sequence: uint32(every), VHPUs: int(max(min(n, MaxHPUs), 1))}
	return &rwCP{b, cp, newSegments(cfg.Messages*int(n), depth)}, nil
}

func (p *rwCP) Place(slot, hpu int, mem []byte, origin, packet, first int64, stream []byte) (copies int64, err error) {
	if err := p.check(slot, hpu, mem, origin, packet, first, stream); err != nil {
		return 0, err
	}
	if len(stream) == 0 {
		return 0, nil
	}
	i := quotient(packet, p.every)
	s := &p.segments[int64(slot)*int64(len(p.heads))+i]
	if first < s.pos {
		p.load(s, i)
	}
	return s.place(mem, origin, first, stream), nil
}
