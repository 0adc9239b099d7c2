// SPDX-License-Identifier: Apache-2.0

package ddt

import (
	"fmt"
	"math"
	"slices"
	"time"
)

// Defaults of a Model.
const (
	DefaultEpsilon      = 0.2
	DefaultMemory       = 1 << 20
	DefaultPacketBuffer = 4 << 20
	DefaultPacketTime   = time.Microsecond
)

func (m *Model) check() error {
	switch {
	case m.Epsilon < 0 || math.IsNaN(m.Epsilon) || math.IsInf(m.Epsilon, 0):
		return fmt.Errorf("epsilon %v: want a number above 0", m.Epsilon)
	case m.Memory < 0:
		return fmt.Errorf("%d bytes of memory for checkpoints: want 1 or more", m.Memory)
	case m.PacketBuffer < 0:
		return fmt.Errorf("packet buffer of %d bytes: want 1 or more", m.PacketBuffer)
	case m.PacketTime < 0:
		return fmt.Errorf("packets every %v: want a time above 0", m.PacketTime)
	case m.Handler < 0:
		return fmt.Errorf("handlers of %v: want a time above 0", m.Handler)
	}
	return nil
}

// Interval chooses the checkpoint interval for a type: how many bytes of the stream, a
// multiple of packet, by section 3.2.4 of the SC 2019 paper. With
//
//	k     bytes of the stream in a packet        n    packets of a message, rounded up
//	T     time between packets, PacketTime       P    HPUs
//	T_PH  time of a payload handler, Handler     C    bytes of a checkpoint
//	d     packets in an interval
//
// it is the largest d k, and so takes the least memory, for which
//
//	T + d (P-1) T <= Epsilon ceil(n/P) T_PH      HPUs wait for work no longer than that
//	ceil(n/d) C <= Memory                        checkpoints fit
//	T_PH/T k <= PacketBuffer, or d k is          packets that wait for an HPU fit
//
// Three things go without saying in the paper. With d = 1 no packet waits for another, so
// that is always allowed, however long HPUs without work wait: the message is too short,
// or the handler too fast, for so many HPUs. With d above ceil(n/P) there would be no work
// for some HPUs, which the formula for the first takes for granted. And a single HPU does
// not wait.
//
// Working copies of checkpoints do not count, see Placement.Memory. An error tells which
// conditions contradict each other.
func Interval(c *Committed, packet, hpus int, m Model) (int64, error) {
	switch {
	case packet < 1:
		return 0, fmt.Errorf("checkpoint interval for packets of %d bytes: want 1 or more", packet)
	case hpus < 1:
		return 0, fmt.Errorf("checkpoint interval for %d HPUs: want 1 or more", hpus)
	}
	if err := m.check(); err != nil {
		return 0, err
	}
	m.defaults()
	k, size := int64(packet), checkpointSize(c)
	n := divide(c.Size(), k)
	if n == 0 {
		return k, nil
	}
	fit := m.Memory / size
	if fit == 0 {
		return 0, fmt.Errorf("checkpoint interval: %d bytes of memory are %d less than a single checkpoint takes", m.Memory, size-m.Memory)
	}
	least := divide(n, fit)

	handler := m.Handler
	if handler == 0 && n > 1 {
		handler = MeasureHandler(c, packet)
	}
	t, tPH := float64(m.PacketTime), float64(handler)
	most, why := n, ""
	if p := int64(hpus); p > 1 {
		share := divide(n, p)
		d := (m.Epsilon*float64(share)*tPH - t) / (float64(p-1) * t)
		most = int64(max(1, min(math.Floor(d+1e-9), float64(share))))
		why = fmt.Sprintf("a scheduling overhead of at most %v of %d handlers of %v, with a packet every %v and %d HPUs", m.Epsilon, share, handler, m.PacketTime, p)
	}
	if waiting := tPH / t * float64(k); waiting > float64(m.PacketBuffer) {
		d := m.PacketBuffer / k
		if d == 0 {
			return 0, fmt.Errorf("checkpoint interval: a packet buffer of %d bytes is %d less than a packet", m.PacketBuffer, k-m.PacketBuffer)
		}
		if d < most {
			most, why = d, fmt.Sprintf("a packet buffer of %d bytes, with handlers of %v and a packet every %v,", m.PacketBuffer, handler, m.PacketTime)
		}
	}
	if least > most {
		return 0, fmt.Errorf("checkpoint interval: %d bytes of memory for checkpoints of %d need one of %d packets or more, and %s allows %d: "+
			"%d bytes are missing", m.Memory, size, least, why, most, plus(times(divide(n, most), size), -m.Memory))
	}
	interval, ok := mul(most, k)
	if !ok {
		return 0, fmt.Errorf("checkpoint interval of %d packets of %d bytes: it overflows 64 bits", most, k)
	}
	return interval, nil
}

func (m *Model) defaults() {
	set := func(v *int64, to int64) {
		if *v == 0 {
			*v = to
		}
	}
	set(&m.Memory, DefaultMemory)
	set(&m.PacketBuffer, DefaultPacketBuffer)
	set((*int64)(&m.PacketTime), int64(DefaultPacketTime))
	if m.Epsilon == 0 {
		m.Epsilon = DefaultEpsilon
	}
}

const (
	measureTime   = 3 * time.Millisecond
	measureSpan   = 16 << 20 // bytes of memory
	measurePacket = 64 << 10 // bytes of the stream, at most
)

// MeasureHandler returns how long a payload handler takes to place a packet of a type on
// this machine, in order: T_PH of section 3.2.4, as the median of some milliseconds.
// Without bytes it is 0.
//
// The memory is the measurement's own. For a type that is wider than 16 MiB a vector
// stands in, with as many blocks in a packet and, as far as may be, as far apart.
func MeasureHandler(c *Committed, packet int) time.Duration {
	if c.Size() == 0 || packet < 1 {
		return 0
	}
	root := standIn(c)
	whole := min(int64(packet), c.Size())
	mem := make([]byte, root.Hi-root.Lo)
	stream := make([]byte, min(whole, root.Size, measurePacket))
	s := &newSegments(1, levels(root))[0]
	s.reset(root, -root.Lo)
	handle := func() {
		s.place(mem, 0, s.pos, stream[:min(int64(len(stream)), root.Size-s.pos)])
		if s.pos == root.Size {
			s.reset(root, -root.Lo)
		}
	}
	// The first pass touches memory, and finds how many packets there is time for.
	start := time.Now()
	var packets int
	var took time.Duration
	for packets == 0 || s.pos > 0 && took < measureTime/3 {
		handle()
		packets++
		took = time.Since(start)
	}
	packets *= 1 + int(20*time.Microsecond/max(took, 1)) // so that the clock does not count
	var passes []time.Duration
	for len(passes) < 3 || time.Since(start) < measureTime {
		s.reset(root, -root.Lo)
		from := time.Now()
		for range packets {
			handle()
		}
		passes = append(passes, time.Since(from)/time.Duration(packets))
	}
	slices.Sort(passes)
	scale := float64(whole) / float64(len(stream))
	return max(time.Duration(float64(passes[len(passes)/2])*scale), 1)
}

// standIn returns a node that takes as long to place, in measureSpan bytes of memory.
func standIn(c *Committed) *Node {
	width := c.root.Hi - c.root.Lo
	if width <= measureSpan {
		return c.fast
	}
	size := min(max(c.Size()/c.Blocks(), 1), measureSpan)
	stride := min(max(width/c.Blocks(), size), size+4096)
	count := min(c.Blocks(), max(measureSpan/stride, 1))
	block := &Node{Kind: Contig, Size: size, Hi: size, Blocks: 1, Depth: 1}
	if count == 1 {
		return block
	}
	return &Node{
		Kind: Vector, Size: count * size, Hi: (count-1)*stride + size, Blocks: count, Depth: 2,
		Count: count, Stride: stride, Child: block,
	}
}
