// SPDX-License-Identifier: Apache-2.0

package hostq

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"
)

// aligned returns zeroed memory that the race detector watches.
func aligned(n int64) []byte {
	w := make([]uint64, (n+7)/8)
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(w))), n)
}

// newTestRing makes both ends of a ring of words.
func newTestRing(slots int) (*producer, *consumer) {
	r := newRing(aligned(int64(slots*64)), slots, 64)
	head := new(uint64)
	c := new(consumer)
	c.init(r, head)
	return &producer{ring: r, head: head}, c
}

func word(b []byte) *uint64 { return (*uint64)(unsafe.Pointer(&b[8])) }

func TestRingManyProducersManyConsumers(t *testing.T) {
	for _, c := range []struct {
		slots, producers, consumers, n int
		batch                          uint64
	}{
		{1, 1, 1, 1000, 1},
		{1, 3, 1, 1000, 3},
		{2, 4, 1, 2000, 1},
		{8, 4, 4, 5000, 3},
		{64, 8, 1, 5000, 1},
		{1024, 3, 2, 20000, 64},
	} {
		p, cons := newTestRing(c.slots)
		var wg sync.WaitGroup
		for id := range c.producers {
			wg.Go(func() {
				for i := 0; i < c.n; {
					pos, k, err := p.claim(min(c.batch, uint64(c.n-i)))
					if err == ErrFull {
						runtime.Gosched()
						continue
					} else if err != nil {
						t.Error(err)
						return
					}
					for j := range k {
						*word(p.slot(pos + j)) = uint64(id)<<32 | uint64(i)
						i++
					}
					for j := range k {
						p.publish(pos + j)
					}
				}
			})
		}
		var taken atomic.Int64
		seen := make([][][]uint64, c.consumers)
		for id := range c.consumers {
			seen[id] = make([][]uint64, c.producers)
			wg.Go(func() {
				var held []uint64 // released in any order
				for taken.Load() < int64(c.producers*c.n) {
					pos, ok, err := cons.take()
					if err != nil {
						t.Error(err)
						return
					}
					if ok {
						taken.Add(1)
						v := *word(cons.slot(pos))
						seen[id][v>>32] = append(seen[id][v>>32], v&0xffffffff)
						held = append(held, pos)
					} else {
						runtime.Gosched()
					}
					for len(held) > 0 && (!ok || len(held) > c.slots/4) {
						i := rand.IntN(len(held))
						cons.release(held[i])
						held = slices.Delete(held, i, i+1)
					}
				}
				for _, pos := range held {
					cons.release(pos)
				}
			})
		}
		wg.Wait()
		cons.flush()
		if n := p.held(); n != 0 {
			t.Errorf("%+v: %d are held in the end", c, n)
		}
		for id := range c.producers {
			var all []uint64
			for _, s := range seen {
				if !slices.IsSorted(s[id]) {
					t.Errorf("%+v: out of order", c)
				}
				all = append(all, s[id]...)
			}
			slices.Sort(all)
			for i := range all {
				if all[i] != uint64(i) {
					t.Fatalf("%+v: of producer %d, %d is in place of %d", c, id, all[i], i)
				}
			}
			if len(all) != c.n {
				t.Fatalf("%+v: %d of producer %d came", c, len(all), id)
			}
		}
	}
}

func TestRingHeads(t *testing.T) {
	const slots = 8
	for _, c := range []struct {
		name string
		head uint64
		want error
	}{
		{"all free", 12, nil},
		{"one free", 5, nil},
		{"none free", 4, ErrFull},
		{"backwards", 3, ErrBroken},
		{"beyond the tail", 13, ErrBroken},
		{"far beyond", ^uint64(0), ErrBroken},
		{"a lap back", 0, ErrBroken},
	} {
		// Eight are claimed, after four that were taken.
		p, _ := newTestRing(slots)
		for i := range 12 {
			if i == 8 {
				*p.head = 4
			}
			pos, k, err := p.claim(1)
			if err != nil || pos != uint64(i) || k != 1 {
				t.Fatal(pos, k, err)
			}
			p.publish(pos)
		}
		*p.head = c.head
		if _, _, err := p.claim(1); err != c.want {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
		if n := p.held(); n < 0 || n > slots {
			t.Errorf("%s: %d held", c.name, n)
		}
	}
}

func TestRingLaps(t *testing.T) {
	for lap := uint32(0); lap < 5; lap++ {
		p, c := newTestRing(2)
		for range 5 { // two laps, and position 5 is the next
			pos, _, _ := p.claim(1)
			p.publish(pos)
			pos, ok, err := c.take()
			if !ok || err != nil {
				t.Fatal(ok, err)
			}
			c.release(pos)
		}
		c.lap(5).Store(lap)
		_, ok, err := c.take()
		switch {
		case lap == 2 && (ok || err != nil),
			lap == 3 && (!ok || err != nil),
			lap != 2 && lap != 3 && (ok || err != ErrBroken):
			t.Errorf("lap word %d of position 5: %v, %v", lap, ok, err)
		}
	}
}

func TestRingReleaseOutOfOrder(t *testing.T) {
	p, c := newTestRing(4)
	var pos []uint64
	for range 4 {
		x, _, _ := p.claim(1)
		p.publish(x)
		y, _, _ := c.take()
		pos = append(pos, y)
	}
	for _, step := range []struct {
		release int
		held    int
	}{{2, 4}, {1, 4}, {0, 1}, {3, 0}} {
		c.release(pos[step.release])
		c.flush()
		if n := p.held(); n != step.held {
			t.Errorf("after the release of %d: %d held, want %d", step.release, n, step.held)
		}
	}
}
