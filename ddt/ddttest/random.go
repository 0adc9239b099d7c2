// SPDX-License-Identifier: Apache-2.0

package ddttest

import (
	"math"
	"math/rand/v2"

	"github.com/xspin/xspin/ddt"
)

// Options of Random. Zero fields take their defaults.
type Options struct {
	Depth     int   // of constructors in each other, at most. Defaults to 6
	MaxBytes  int64 // of the stream. Defaults to 16 KiB
	MaxExtent int64 // true extent of all elements, bytes. Defaults to 1 MiB
	NoOverlap bool  // no two bytes of the stream have the same place
}

// Random returns a type of any constructors in each other, and how many elements of it to
// take. Few of them are sane. What it returns depends on r and o alone.
func Random(r *rand.Rand, o Options) (t *ddt.Type, count int64) {
	if o.Depth == 0 {
		o.Depth = 6
	}
	if o.MaxBytes == 0 {
		o.MaxBytes = 16 << 10
	}
	if o.MaxExtent == 0 {
		o.MaxExtent = 1 << 20
	}
	g := &generator{Rand: r, Options: o, names: ddt.Predefined()}
	depth := 1 + r.IntN(o.Depth)
	if g.one(30) {
		depth = 0
	}
	t = g.nested(depth)
	count = 1
	for range 4 {
		n := g.log(g.room(t, 1))
		if g.one(40) {
			n = 0
		}
		if all, err := ddt.Contiguous(n, t); err == nil && g.good(all) {
			return t, n
		}
	}
	return t, count
}

type generator struct {
	*rand.Rand
	Options
	names  []string
	shared []*ddt.Type // all that were made
}

// nested returns a type that is up to depth constructors deep, mostly just that.
func (g *generator) nested(depth int) *ddt.Type {
	if n := len(g.shared); n > 0 && g.one(6) {
		if t := g.shared[g.IntN(n)]; g.depth(t) <= depth {
			return t
		}
	}
	if depth == 0 {
		for {
			// Mostly those that programs are full of.
			name := []string{"byte", "int", "float", "double"}[g.IntN(4)]
			if g.one(3) {
				name = g.names[g.IntN(len(g.names))]
			}
			if t, _ := ddt.Lookup(name); t.Size() <= g.MaxBytes && t.TrueExtent() <= g.MaxExtent {
				return t
			}
		}
	}
	child := g.nested(depth - 1)
	for range 8 {
		t, err := g.around(child, depth)
		if err == nil && g.good(t) {
			g.shared = append(g.shared, t)
			return t
		}
	}
	return child
}

func (g *generator) depth(t *ddt.Type) int {
	d := 0
	for _, c := range t.Contents().Types {
		d = max(d, g.depth(c)+1)
	}
	return d
}

// good reports whether a type is within the limits.
func (g *generator) good(t *ddt.Type) bool {
	far := 4 * g.MaxExtent
	for _, place := range []int64{t.LB(), t.UB(), t.TrueLB(), t.TrueLB() + t.TrueExtent()} {
		if place < -far || place > far {
			return false
		}
	}
	if t.Size() > g.MaxBytes || t.TrueExtent() > g.MaxExtent {
		return false
	}
	return !g.NoOverlap || !Overlaps(Places(t, 1))
}

// one is true one time out of n.
func (g *generator) one(n int) bool { return g.IntN(n) == 0 }

// log returns a number from 1 to n, small ones more often.
func (g *generator) log(n int64) int64 {
	return max(1, int64(math.Exp(g.Float64()*math.Log(float64(n+1)))))
}

// room returns how many elements fit into a level, if depth levels are still to come.
func (g *generator) room(t *ddt.Type, depth int) int64 {
	n := float64(g.MaxBytes) / float64(max(t.Size(), 16))
	return max(1, int64(math.Pow(n, 1/float64(depth))))
}

// near returns a displacement of either sign, up to a few times n.
func (g *generator) near(n int64) int64 { return g.Int64N(8*n+1) - 4*n }

// apart returns a distance for things that are n bytes, or extents, long: mostly such that
// they do not touch, backwards at times.
func (g *generator) apart(n int64) int64 {
	var d int64
	switch g.IntN(6) {
	case 0:
		d = n
	case 1:
		d = g.near(n)
	default:
		d = n + g.Int64N(n+1)
	}
	if g.one(4) {
		return -d
	}
	return d
}

// places returns where things of these lengths may go.
func (g *generator) places(sizes []int64) []int64 {
	displs := make([]int64, len(sizes))
	if !g.NoOverlap && g.one(4) {
		for i := range displs {
			displs[i] = g.near(sizes[i])
		}
		return displs
	}
	at := g.Int64N(65) - 32
	order := make([]int, len(sizes))
	for i := range order {
		order[i] = i
	}
	if g.one(2) {
		g.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	}
	for _, i := range order {
		displs[i] = at
		at += sizes[i]
		if g.one(2) {
			at += g.Int64N(sizes[i] + 1)
		}
	}
	return displs
}

// blocklens returns n lengths, some 0.
func (g *generator) blocklens(n, most int64) []int64 {
	lens := make([]int64, n)
	for i := range lens {
		if !g.one(8) {
			lens[i] = g.log(most)
		}
	}
	return lens
}

// length returns how many bytes n elements of a type take at most, at least 1.
func length(t *ddt.Type, n int64) int64 {
	e := t.Extent()
	return max(e, -e)*max(n-1, 0) + max(t.TrueExtent(), e, 1)
}

// around returns a constructor around a type, which may be refused.
func (g *generator) around(t *ddt.Type, depth int) (*ddt.Type, error) {
	count, blocklen := g.log(g.room(t, depth)), int64(1)
	if g.one(2) {
		blocklen = g.log(count)
		count = max(1, count/blocklen)
	}
	if g.one(100) {
		count = 0
	}
	if g.one(100) {
		blocklen = 0
	}
	switch g.IntN(13) {
	case 0:
		return ddt.Contiguous(count, t)
	case 1:
		return ddt.NewVector(count, blocklen, g.apart(max(blocklen, 1)), t)
	case 2:
		return ddt.HVector(count, blocklen, g.apart(length(t, blocklen)), t)
	case 3:
		lens := g.blocklens(count, blocklen)
		return ddt.Indexed(lens, g.places(lens), t)
	case 4:
		lens := g.blocklens(count, blocklen)
		return ddt.HIndexed(lens, g.places(lengths(t, lens)), t)
	case 5:
		return ddt.IndexedBlock(blocklen, g.places(repeated(count, blocklen)), t)
	case 6:
		return ddt.HIndexedBlock(blocklen, g.places(repeated(count, length(t, blocklen))), t)
	case 7:
		return g.structOf(t, depth)
	case 8:
		return g.subarray(t, count)
	case 9:
		return g.darray(t, count)
	case 10, 11:
		return g.resized(t)
	default:
		return ddt.Dup(t), nil
	}
}

func lengths(t *ddt.Type, lens []int64) []int64 {
	bytes := make([]int64, len(lens))
	for i, n := range lens {
		bytes[i] = length(t, n)
	}
	return bytes
}

func repeated(n, x int64) []int64 {
	s := make([]int64, n)
	for i := range s {
		s[i] = x
	}
	return s
}

func (g *generator) structOf(t *ddt.Type, depth int) (*ddt.Type, error) {
	n := 1 + g.Int64N(5)
	types := make([]*ddt.Type, n)
	lens := g.blocklens(n, 1+g.room(t, depth)/n)
	bytes := make([]int64, n)
	for i := range types {
		types[i] = t
		if g.one(2) {
			types[i] = g.nested(g.IntN(depth))
		}
		bytes[i] = length(types[i], lens[i])
	}
	g.Shuffle(len(types), func(i, j int) {
		types[i], types[j] = types[j], types[i]
		lens[i], lens[j] = lens[j], lens[i]
		bytes[i], bytes[j] = bytes[j], bytes[i]
	})
	return ddt.Struct(lens, g.places(bytes), types)
}

// resized also makes extents that are smaller than what is there, as one would to
// interleave columns.
func (g *generator) resized(t *ddt.Type) (*ddt.Type, error) {
	lb, extent := t.LB(), t.Extent()
	if g.one(2) {
		lb = g.Int64N(129) - 64
	}
	switch g.IntN(8) {
	case 0: // as it was
	case 1:
		extent = g.Int64N(17)
	case 2:
		extent = -extent
	case 3:
		extent = g.near(16)
	case 4:
		extent = t.TrueExtent()
	default:
		extent = t.TrueExtent() + g.Int64N(64)
	}
	return ddt.Resized(t, lb, extent)
}

// sizes returns those of an array of about n elements in some dimensions, and an order.
func (g *generator) sizes(n int64) ([]int64, ddt.Order) {
	sizes := make([]int64, 1+g.IntN(4))
	for i := range sizes {
		sizes[i] = 1 + g.Int64N(2*int64(math.Pow(float64(n), 1/float64(len(sizes))))+1)
	}
	return sizes, ddt.Order(g.IntN(2))
}

func (g *generator) subarray(t *ddt.Type, n int64) (*ddt.Type, error) {
	sizes, order := g.sizes(n)
	subsizes := make([]int64, len(sizes))
	starts := make([]int64, len(sizes))
	for i, size := range sizes {
		subsizes[i] = 1 + g.Int64N(size)
		if g.one(200) {
			subsizes[i] = 0
		}
		starts[i] = g.Int64N(size - subsizes[i] + 1)
	}
	return ddt.Subarray(sizes, subsizes, starts, order, t)
}

func (g *generator) darray(t *ddt.Type, n int64) (*ddt.Type, error) {
	gsizes, order := g.sizes(n)
	dims := len(gsizes)
	distribs := make([]ddt.Distribution, dims)
	dargs := make([]int64, dims)
	psizes := make([]int64, dims)
	processes := int64(1)
	for i, size := range gsizes {
		distribs[i] = ddt.Distribution(g.IntN(3))
		psizes[i] = 1 + g.Int64N(3)
		dargs[i] = ddt.DefaultArg
		switch {
		case distribs[i] == ddt.Whole:
			psizes[i] = 1
		case g.one(2):
			dargs[i] = 1 + g.Int64N(size+1)
		}
		processes *= psizes[i]
	}
	return ddt.Darray(processes, g.Int64N(processes), gsizes, distribs, dargs, psizes, order, t)
}
