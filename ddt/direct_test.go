// SPDX-License-Identifier: Apache-2.0

package ddt_test

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/ddt/ddttest"
	"github.com/xspin/xspin/internal/testenv"
)

// An image is memory for a type, with some room around it, in which each byte differs
// from what comes there.
type image struct {
	mem    []byte
	origin int64
}

func imageFor(r *rand.Rand, places []int64) image {
	lo, hi := int64(0), int64(0)
	if len(places) > 0 {
		lo, hi = min(slices.Min(places), 0), max(slices.Max(places)+1, 0)
	}
	const room = 16
	m := image{mem: make([]byte, hi-lo+2*room), origin: room - lo}
	for i := range m.mem {
		m.mem[i] = byte(r.Uint32())
	}
	return m
}

// cuts returns where to cut a stream, 0 and its end included.
func cuts(r *rand.Rand, size int64) []int64 {
	all := []int64{0, size}
	if size > 1 {
		for range r.IntN(12) {
			all = append(all, r.Int64N(size))
		}
	}
	slices.Sort(all)
	return all
}

// seeds calls f for random types.
func seeds(t *testing.T, n int, o ddttest.Options, f func(t *testing.T, r *rand.Rand, c *ddt.Committed, places []int64)) {
	n *= testenv.Soak()
	for seed := range n {
		r := rand.New(rand.NewPCG(uint64(seed), 5))
		d, count := ddttest.Random(r, o)
		c, err := ddt.Commit(d, count)
		if err != nil {
			t.Fatalf("seed %d: %v: %v", seed, d, err)
		}
		f(t, r, c, ddttest.Places(d, count))
		if t.Failed() {
			t.Fatalf("seed %d: %d times %v, normal form %v", seed, count, d, c)
		}
	}
}

func TestEachByteGoesToItsPlace(t *testing.T) {
	seeds(t, 1000, ddttest.Options{}, func(t *testing.T, r *rand.Rand, c *ddt.Committed, places []int64) {
		if c.Size() != int64(len(places)) {
			t.Fatalf("%d bytes, want %d", c.Size(), len(places))
		}
		lo, hi := c.Bounds()
		if len(places) > 0 && (lo != slices.Min(places) || hi != slices.Max(places)+1) {
			t.Errorf("touches %d to %d, want %d to %d", lo, hi, slices.Min(places), slices.Max(places)+1)
		}
		m := imageFor(r, places)
		want := bytes.Clone(m.mem)
		stream := make([]byte, len(places))
		for i, p := range places {
			stream[i] = byte(r.Uint32())
			want[m.origin+p] = stream[i]
		}
		at := cuts(r, c.Size())
		var copies int64
		for i := range len(at) - 1 {
			n, err := c.Unpack(m.mem, m.origin, at[i], stream[at[i]:at[i+1]])
			if err != nil {
				t.Fatal(err)
			}
			copies += n
		}
		if !bytes.Equal(m.mem, want) {
			t.Error("unpacked in order, the memory differs")
		}
		if most := c.Blocks() + int64(len(at)); copies > most {
			t.Errorf("%d copies, want %d at most", copies, most)
		}
		packed := make([]byte, len(stream))
		for _, i := range r.Perm(len(at) - 1) {
			if _, err := c.Pack(packed[at[i]:at[i+1]], m.mem, m.origin, at[i]); err != nil {
				t.Fatal(err)
			}
		}
		for i, p := range places {
			if packed[i] != m.mem[m.origin+p] {
				t.Fatalf("packed byte %d is not that at %d", i, p)
			}
		}
		var walked []int64
		first, last := at[len(at)/3], at[len(at)-1-len(at)/3]
		c.Each(first, last, func(off, n int64) bool {
			for i := range n {
				walked = append(walked, off+i)
			}
			return true
		})
		if !slices.Equal(walked, places[first:last]) {
			t.Errorf("Each has other places for bytes %d to %d", first, last)
		}
	})
}

// Any order of any ranges, by several goroutines at a time, some of them twice.
func TestAnyOrderAndAtTheSameTime(t *testing.T) {
	seeds(t, 200, ddttest.Options{NoOverlap: true}, func(t *testing.T, r *rand.Rand, c *ddt.Committed, places []int64) {
		m := imageFor(r, places)
		want := bytes.Clone(m.mem)
		stream := make([]byte, len(places))
		for i, p := range places {
			stream[i] = byte(r.Uint32())
			want[m.origin+p] = stream[i]
		}
		at := cuts(r, c.Size())
		order := r.Perm(len(at) - 1)
		var wg sync.WaitGroup
		for k := range 3 {
			wg.Go(func() {
				for j := k; j < len(order); j += 3 {
					first, last := at[order[j]], at[order[j]+1]
					for range 1 + j%2 {
						if _, err := c.Unpack(m.mem, m.origin, first, stream[first:last]); err != nil {
							t.Error(err)
						}
					}
				}
			})
		}
		wg.Wait()
		if !bytes.Equal(m.mem, want) {
			t.Error("the memory differs")
		}
	})
}

func TestEachEnds(t *testing.T) {
	d, err := ddt.Parse("struct(0,1,vec(5 1 2)[int] 100,3,resized(0,9)[struct(0,1,char 2,1,short)] 200,1,double)")
	if err != nil {
		t.Fatal(err)
	}
	c, err := ddt.Commit(d, 3)
	if err != nil {
		t.Fatal(err)
	}
	var all [][2]int64
	c.Each(0, c.Size(), func(off, n int64) bool {
		all = append(all, [2]int64{off, n})
		return true
	})
	for want := 1; want <= len(all); want++ {
		var some [][2]int64
		c.Each(-5, c.Size()+5, func(off, n int64) bool {
			some = append(some, [2]int64{off, n})
			return len(some) < want
		})
		if !slices.Equal(some, all[:want]) {
			t.Errorf("%v, want %v", some, all[:want])
		}
	}
}

// FuzzCommit makes types of text: what is committed is as large as the type says, and
// stays in its bounds.
func FuzzCommit(f *testing.F) {
	for _, text := range []string{
		"byte", "vec(3 2 5)[int]", "hvec(2 1 -18432)[vec(32 6 8)[ctg(18)[float]]]", "idxb(2: 5 1 9)[resized(-3,40)[double]]",
		"struct(0,2,int 100,1,hidx(0,3 90,5)[char])", "subarray(1,2,5 0,3,4)[short]", "resized(9223372036854775807,-1)[byte]",
		"ctg(4611686018427387904)[int]", "hidx(-9223372036854775808,1)[byte]",
	} {
		f.Add(text, int64(1))
		f.Add(text, int64(3))
	}
	f.Fuzz(func(t *testing.T, text string, count int64) {
		d, err := ddt.Parse(text)
		if err != nil {
			return
		}
		c, err := ddt.Commit(d, count)
		if err != nil {
			return
		}
		if c.Size() != count*d.Size() {
			t.Errorf("%d bytes, want %d times %d", c.Size(), count, d.Size())
		}
		lo, hi := c.Bounds()
		left := int64(10000) // of what could be endless
		c.Each(0, c.Size(), func(off, n int64) bool {
			if n < 1 || off < lo || off > hi-n {
				t.Errorf("%d bytes at %d, outside of %d to %d", n, off, lo, hi)
			}
			left--
			return left > 0
		})
	})
}
