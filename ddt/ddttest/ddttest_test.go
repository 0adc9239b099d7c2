// SPDX-License-Identifier: Apache-2.0

package ddttest

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xspin/xspin/ddt"
)

func parse(t *testing.T, text string) *ddt.Type {
	t.Helper()
	d, err := ddt.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// Type maps by hand; the first are MPI 3.1's, examples 4.2 to 4.5.
func TestPlaces(t *testing.T) {
	const dc = "struct(0,1,double 8,1,byte)"
	for _, tc := range []struct {
		text   string
		count  int64
		each   int64 // bytes in a row
		begins []int64
		lb, ub int64
	}{
		{"ctg(3)[" + dc + "]", 1, 9, []int64{0, 16, 32}, 0, 48},
		{"vec(2 3 4)[" + dc + "]", 1, 9, []int64{0, 16, 32, 64, 80, 96}, 0, 112},
		{"vec(3 1 -2)[" + dc + "]", 1, 9, []int64{0, -32, -64}, -64, 16},
		{"idx(4,3 0,1)[" + dc + "]", 1, 9, []int64{64, 80, 96, 0}, 0, 112},
		{"hidx(10,2)[" + dc + "]", 2, 9, []int64{10, 26, 42, 58}, 10, 42},

		{"struct(0,2,byte 16,1,short 26,3,byte)", 1, 1, []int64{0, 1, 16, 17, 26, 27, 28}, 0, 30},
		{"ctg(2)[resized(-3,9)[byte]]", 2, 1, []int64{0, 9, 18, 27}, -3, 15},
		{"struct(0,1,resized(-3,9)[byte] 40,1,short)", 2, 1, []int64{0, 40, 41, 9, 49, 50}, -3, 6},
		{"hvec(2 2 5)[byte]", 2, 1, []int64{0, 1, 5, 6, 7, 8, 12, 13}, 0, 7},
		{"idxb(2: 3 -1)[short]", 1, 1, []int64{6, 7, 8, 9, -2, -1, 0, 1}, -2, 10},
		{"hidxb(1: 3 -1)[short]", 1, 1, []int64{3, 4, -1, 0}, -1, 5},
		{"subarray(1,2,3 2,2,5)[byte]", 1, 1, []int64{7, 8, 12, 13}, 0, 15},
		{"subarrayf(1,2,3 2,2,5)[byte]", 1, 1, []int64{7, 8, 10, 11}, 0, 15},
		{"darray(4 1: 3,block,2 5,cyclic:2,2)[byte]", 1, 1, []int64{2, 3, 7, 8}, 0, 15},
		{"darrayf(4 1: 3,block,2 5,cyclic:2,2)[byte]", 1, 1, []int64{6, 7, 9, 10}, 0, 15},
		{"darray(2 1: 3,cyclic,2 2,none,1)[byte]", 2, 1, []int64{2, 3, 8, 9}, 0, 6},
		{"dup[resized(2,3)[byte]]", 3, 1, []int64{0, 3, 6}, 2, 5},
		{"short_int", 2, 1, []int64{0, 1, 4, 5, 6, 7, 8, 9, 12, 13, 14, 15}, 0, 8},
		{"hidx(50,1)[ctg(0)[int]]", 3, 1, nil, 0, 0},
	} {
		var want []int64
		for _, begin := range tc.begins {
			for i := range tc.each {
				want = append(want, begin+i)
			}
		}
		d := parse(t, tc.text)
		if got := Places(d, tc.count); !slices.Equal(got, want) {
			t.Errorf("%d times %s: at %v, want %v", tc.count, tc.text, got, want)
		}
		if lb, ub := Bounds(d); lb != tc.lb || ub != tc.ub {
			t.Errorf("%s: from %d to %d, want %d to %d", tc.text, lb, ub, tc.lb, tc.ub)
		}
	}
}

func TestOverlaps(t *testing.T) {
	for _, tc := range []struct {
		places []int64
		want   bool
	}{
		{nil, false},
		{[]int64{-3}, false},
		{[]int64{4, -3, 5}, false},
		{[]int64{4, -3, 4}, true},
		{[]int64{1 << 60, -1 << 40, 7}, false},
		{[]int64{1 << 60, -1 << 40, 1 << 60}, true},
	} {
		if got := Overlaps(tc.places); got != tc.want {
			t.Errorf("%v: %v, want %v", tc.places, got, tc.want)
		}
	}
}

// Random types are within what was asked for, and nothing is missing among them.
func TestRandom(t *testing.T) {
	const n = 600
	for _, o := range []Options{{}, {NoOverlap: true}, {Depth: 2, MaxBytes: 100, MaxExtent: 300}} {
		var (
			combiners                              = map[ddt.Combiner]int{}
			depths                                 = map[int]int{}
			none, several, overlap, before, shared int
			most                                   int64
		)
		limits := o
		if o.Depth == 0 {
			limits = Options{Depth: 6, MaxBytes: 16 << 10, MaxExtent: 1 << 20}
		}
		for seed := range uint64(n) {
			d, count := Random(rand.New(rand.NewPCG(seed, 2)), o)
			if again, m := Random(rand.New(rand.NewPCG(seed, 2)), o); m != count || again.String() != d.String() {
				t.Fatalf("seed %d: %d of %v, and then %d of %v", seed, count, d, m, again)
			}
			seen := map[*ddt.Type]bool{}
			var walk func(d *ddt.Type) int
			walk = func(d *ddt.Type) (depth int) {
				c := d.Contents()
				combiners[c.Combiner]++
				if c.Combiner != ddt.CombinerNamed && seen[d] {
					shared++
				}
				seen[d] = true
				for _, child := range c.Types {
					depth = max(depth, walk(child)+1)
				}
				return depth
			}
			depth := walk(d)
			depths[depth]++
			places := Places(d, count)
			size := int64(len(places))
			most = max(most, size)
			if size == 0 {
				none++
			} else if extent := slices.Max(places) - slices.Min(places) + 1; extent > limits.MaxExtent {
				t.Fatalf("seed %d: true extent %d, want %d at most", seed, extent, limits.MaxExtent)
			} else if slices.Min(places) < 0 {
				before++
			}
			if size > limits.MaxBytes || depth > limits.Depth {
				t.Fatalf("seed %d: %d bytes, %d deep, want %d and %d at most", seed, size, depth, limits.MaxBytes, limits.Depth)
			}
			if count > 1 {
				several++
			}
			if Overlaps(places) {
				overlap++
			}
		}
		if o.NoOverlap && overlap > 0 {
			t.Errorf("%+v: %d types overlap themselves", o, overlap)
		}
		if !o.NoOverlap && overlap < n/20 {
			t.Errorf("%+v: %d types overlap themselves, want more", o, overlap)
		}
		if len(combiners) != 15 || len(depths) != limits.Depth+1 {
			t.Errorf("%+v: combiners %v, depths %v", o, combiners, depths)
		}
		if none < n/100 || none > n/4 || several < n/4 || before < n/20 || shared == 0 || most < limits.MaxBytes/2 {
			t.Errorf("%+v: %d are empty, %d of several, %d begin before the origin, %d share types, the largest has %d bytes",
				o, none, several, before, shared, most)
		}
	}
}
