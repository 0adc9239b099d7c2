// SPDX-License-Identifier: Apache-2.0

package ddt

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"
)

// steps returns how many steps of catching up a placement took.
func steps(p Placement) (n int64) {
	var all []segment
	switch p := p.(type) {
	case *hpuLocal:
		all = p.segments
	case *roCP:
		all = p.scratch
	case *rwCP:
		all = p.segments
	}
	for i := range all {
		n += all[i].steps
	}
	return n
}

// stepsOf places packets of a message, in this order, each in equal parts, and returns
// the steps.
func stepsOf(t *testing.T, c *Committed, cfg Config, packets []int, parts int) int64 {
	t.Helper()
	p, err := NewPlacement(c, cfg)
	if err != nil {
		t.Fatal(err)
	}
	_, hi := c.Bounds()
	mem, stream := make([]byte, hi), make([]byte, c.Size())
	for _, i := range packets {
		packet := int64(i * cfg.Packet)
		end := min(packet+int64(cfg.Packet), c.Size())
		part := divide(end-packet, int64(parts))
		for first := packet; first < end; first += part {
			if _, err := p.Place(0, i%cfg.HPUs, mem, 0, packet, first, stream[first:min(first+part, end)]); err != nil {
				t.Fatal(err)
			}
		}
	}
	return steps(p)
}

// Catching up is what the strategies of the paper cost, and it is as much as it says.
func TestCatchingUp(t *testing.T) {
	const packet, packets, blocks = 1408, 200, 22 // blocks of a packet
	m := made(t)
	flat := committed(t, m(HVector(packets*blocks, 1, 128, m(Contiguous(64, Byte)))), 1)
	displs := make([]int64, packets*blocks)
	r := rand.New(rand.NewPCG(1, 2))
	for i, v := range r.Perm(len(displs)) {
		displs[i] = 100 * int64(v)
	}
	index := committed(t, m(HIndexedBlock(1, displs, m(Contiguous(64, Byte)))), 1)

	forward := make([]int, packets)
	for i := range forward {
		forward[i] = i
	}
	backward := slices.Clone(forward)
	slices.Reverse(backward)

	// Packets that a packet has to catch up by, all together.
	behind := func(sequence int) (n int64) {
		for i := range packets {
			n += int64(i % sequence)
		}
		return n
	}
	all := int64(packets * (packets - 1) / 2)
	for _, tc := range []struct {
		name     string
		strategy string
		hpus     int
		interval int64 // in packets
		order    []int
		want     int64 // packets caught up by
	}{
		{"one virtual HPU, in order", HPULocal, 1, 0, forward, 0},
		{"each is to catch up with the others", HPULocal, 4, 0, forward, 3*(packets-4) + 0 + 1 + 2 + 3},
		{"each begins again", HPULocal, 4, 0, backward, all},
		{"a checkpoint for each packet", ROCP, 4, 1, forward, 0},
		{"half the checkpoints", ROCP, 4, 2, forward, packets / 2},
		{"few checkpoints", ROCP, 4, 50, forward, behind(50)},
		{"one checkpoint", ROCP, 4, packets, forward, all},
		{"what is forgotten with one HPU, too", ROCP, 1, 50, forward, behind(50)},
		{"any order is the same", ROCP, 4, 50, backward, behind(50)},
		{"in order nothing is to catch up", RWCP, 4, 1, forward, 0},
		{"with any interval", RWCP, 4, 50, forward, 0},
		{"with one sequence", RWCP, 4, packets, forward, 0},
		{"out of order, a checkpoint for each packet", RWCP, 4, 1, backward, 0},
		{"out of order, few checkpoints", RWCP, 4, 50, backward, behind(50)},
		{"out of order, one checkpoint", RWCP, 4, packets, backward, all},
	} {
		for name, c := range map[string]*Committed{"vector": flat, "index": index} {
			t.Run(tc.strategy+"/"+name+"/"+tc.name, func(t *testing.T) {
				cfg := Config{Strategy: tc.strategy, HPUs: tc.hpus, Messages: 1, Packet: packet, Interval: tc.interval * packet}
				for _, parts := range []int{1, 3} { // a packet catches up once
					if got := stepsOf(t, c, cfg, tc.order, parts); got != tc.want*blocks {
						t.Errorf("%d steps, want %d, in %d parts", got, tc.want*blocks, parts)
					}
				}
			})
		}
	}
}

// Bad intervals cost with nested types, too. (That steps are counted there as well.)
func TestBadIntervals(t *testing.T) {
	c := committed(t, complexType(t), 4)
	const packet = 1460
	order := rand.New(rand.NewPCG(3, 4)).Perm(int(divide(c.Size(), packet)))
	for _, s := range []string{ROCP, RWCP} {
		cfg := Config{Strategy: s, HPUs: 2, Messages: 1, Packet: packet, Interval: packet}
		last := int64(-1)
		for ; cfg.Interval < c.Size(); cfg.Interval *= 4 {
			n := stepsOf(t, c, cfg, order, 1)
			if n < 3*last {
				t.Errorf("%s with a checkpoint every %d bytes: %d steps, and %d with a quarter of that", s, cfg.Interval, n, last)
			}
			last = n
		}
		if last == 0 {
			t.Errorf("%s: no steps at all", s)
		}
	}
}

// What Memory says is what is allocated.
func TestPlacementMemory(t *testing.T) {
	c := committed(t, complexType(t), 8)
	model := Model{Handler: time.Microsecond}
	allocated := func(cfg Config) (Memory, int64) {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		p, err := NewPlacement(c, cfg)
		runtime.ReadMemStats(&after)
		if err != nil {
			t.Fatal(err)
		}
		return p.Memory(), int64(after.TotalAlloc - before.TotalAlloc)
	}
	for _, s := range Strategies() {
		if s == Specialized {
			continue
		}
		cfg := Config{Strategy: s, HPUs: 16, Messages: 64, Packet: 1408, Interval: 5000, Model: model}
		m, n := allocated(cfg)
		if m.Type != c.Memory() || m.Total() != m.Type+m.Checkpoints+m.Segments {
			t.Errorf("%s: %+v of a type of %d bytes", s, m, c.Memory())
		}
		// The allocator rounds up, and somebody else may allocate.
		if want := m.Checkpoints + m.Segments; n < want || n > want+want/4+16<<10 {
			t.Errorf("%s takes %+v, and allocates %d", s, m, n)
		}
		cfg.Messages *= 2
		m2, _ := allocated(cfg)
		cfg.HPUs *= 2
		m3, _ := allocated(cfg)
		perMessage, perHPU := m2.Segments == 2*m.Segments, m3.Segments > m2.Segments
		if (s == HPULocal || s == RWCP) != (perMessage && m.Segments > 0) || (s == HPULocal || s == ROCP) != perHPU {
			t.Errorf("%s takes %+v, with twice the messages %+v, with twice the HPUs as well %+v", s, m, m2, m3)
		}
		if (s == ROCP || s == RWCP) != (m.Checkpoints > 0) || m2.Checkpoints != m.Checkpoints {
			t.Errorf("%s takes %+v, with twice the messages %+v", s, m, m2)
		}
	}
}
