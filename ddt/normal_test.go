// SPDX-License-Identifier: Apache-2.0

package ddt

import (
	"errors"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// made returns what a constructor returns.
func made(t testing.TB) func(*Type, error) *Type {
	return func(d *Type, err error) *Type {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
}

func committed(t testing.TB, d *Type, count int64) *Committed {
	t.Helper()
	c, err := Commit(d, count)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// complexType is dt-0 of FPsPIN's evaluation.
func complexType(t testing.TB) *Type {
	m := made(t)
	d := m(NewVector(32, 6, 8, m(Contiguous(18, Float))))
	for _, stride := range []int64{6144, 12288, 18432} {
		d = m(HVector(2, 1, stride, d))
	}
	return d
}

func TestNormalForms(t *testing.T) {
	m := made(t)
	byteVector := m(HVector(4, 1, 8, m(Contiguous(3, Byte))))
	for _, tc := range []struct {
		name  string
		typ   *Type
		count int64
		want  string
	}{
		{"predefined", Int, 1, "ctg(4)[byte]"},
		{"one byte", Byte, 1, "byte"},
		{"nothing", Int, 0, "ctg(0)[byte]"},
		{"nothing of many", m(NewVector(1000, 0, 7, Int)), 5, "ctg(0)[byte]"},
		{"contiguous in contiguous", m(Contiguous(3, m(Contiguous(5, Double)))), 2, "ctg(240)[byte]"},
		{"a vector that touches", m(NewVector(7, 3, 3, Int)), 1, "ctg(84)[byte]"},
		{"a vector of one", m(NewVector(1, 3, 30, Int)), 1, "ctg(12)[byte]"},
		{"a vector", m(NewVector(7, 3, 4, Int)), 1, "hvec(7 1 16)[ctg(12)[byte]]"},
		{"backwards", m(NewVector(7, 1, -2, Int)), 1, "hvec(7 1 -8)[ctg(4)[byte]]"},
		{"elements that go on as the vector does", m(Resized(m(NewVector(7, 3, 4, Int)), 0, 7*16)), 9, "hvec(63 1 16)[ctg(12)[byte]]"},
		{"elements that do not", m(NewVector(7, 3, 4, Int)), 2, "hvec(2 1 108)[hvec(7 1 16)[ctg(12)[byte]]]"},
		{"resized of resized", m(Resized(m(Resized(Int, -8, 40)), 0, 4)), 5, "ctg(20)[byte]"},
		{"apart by resizing", m(Resized(Int, -8, 40)), 5, "hvec(5 1 40)[ctg(4)[byte]]"},
		{"an index that is a vector", m(Indexed([]int64{2, 2, 2}, []int64{0, 5, 10}, Int)), 1, "hvec(3 1 20)[ctg(8)[byte]]"},
		{"an index that touches", m(Indexed([]int64{2, 3, 4}, []int64{0, 2, 5}, Int)), 1, "ctg(36)[byte]"},
		{"an index", m(IndexedBlock(2, []int64{9, 0, 4}, Int)), 1, "hidxb(1: 36)[hidxb(1: 0 -36 -20)[ctg(8)[byte]]]"},
		{"lengths that differ", m(Indexed([]int64{1, 2}, []int64{1, 3}, Int)), 1, "hidxb(1: 4)[hidx(0,4 8,8)[byte]]"},
		{"empty entries", m(HIndexed([]int64{0, 2, 0, 2}, []int64{-1000, 0, 1 << 40, 5}, Byte)), 1, "hvec(2 1 5)[ctg(2)[byte]]"},
		{"a struct that is a block", m(Struct([]int64{1, 1, 4}, []int64{0, 8, 4}, []*Type{Int, Double, Byte})), 1, "hidx(0,4 8,8 4,4)[byte]"},
		{"a struct in order", m(Struct([]int64{1, 4, 1}, []int64{0, 4, 8}, []*Type{Int, Byte, Double})), 1, "ctg(16)[byte]"},
		{"a struct of vectors that continue", m(Struct([]int64{1, 1}, []int64{0, 32}, []*Type{byteVector, byteVector})), 1, "hvec(8 1 8)[ctg(3)[byte]]"},
		{"a struct of vectors that do not", m(Struct([]int64{1, 1}, []int64{0, 33}, []*Type{byteVector, byteVector})), 1, "hvec(2 1 33)[hvec(4 1 8)[ctg(3)[byte]]]"},
		{"a vector and one more", m(Struct([]int64{1, 1}, []int64{0, 32}, []*Type{byteVector, m(Contiguous(3, Byte))})), 1, "hvec(5 1 8)[ctg(3)[byte]]"},
		{"one more before", m(Struct([]int64{1, 1}, []int64{0, 8}, []*Type{m(Contiguous(3, Byte)), byteVector})), 1, "hvec(5 1 8)[ctg(3)[byte]]"},
		{"one more elsewhere", m(Struct([]int64{1, 1}, []int64{0, 33}, []*Type{byteVector, m(Contiguous(3, Byte))})), 1, "struct(0,1,hvec(4 1 8)[ctg(3)[byte]] 33,1,ctg(3)[byte])"},
		{"touching elements after others", m(HIndexed([]int64{1, 2, 3, 4, 5}, []int64{100, 0, 2, 5, 50}, Byte)), 1, "hidxb(1: 100)[hidx(0,1 -100,9 -50,5)[byte]]"},
		{"a struct of all kinds", m(Struct([]int64{1, 2}, []int64{40, 2}, []*Type{byteVector, Short})), 1, "hidxb(1: 40)[struct(0,1,hvec(4 1 8)[ctg(3)[byte]] -38,1,ctg(4)[byte])]"},
		{"a subarray", m(Subarray([]int64{10, 10}, []int64{4, 3}, []int64{1, 2}, C, Double)), 1, "hidxb(1: 96)[hvec(4 1 80)[ctg(24)[byte]]]"},
		{"whole rows", m(Subarray([]int64{10, 10}, []int64{4, 10}, []int64{1, 0}, C, Double)), 1, "hidxb(1: 80)[ctg(320)[byte]]"},
		{"all of an array", m(Subarray([]int64{10, 10, 10}, []int64{10, 10, 10}, []int64{0, 0, 0}, Fortran, Double)), 3, "ctg(24000)[byte]"},
		{"Complex", complexType(t), 1, "hvec(2 1 18432)[hvec(4 1 6144)[hvec(32 1 576)[ctg(432)[byte]]]]"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := committed(t, tc.typ, tc.count).String(); got != tc.want {
				t.Errorf("%s, want %s", got, tc.want)
			}
		})
	}
}

// What is made flat for speed has the same bytes in the same places.
func TestFlatPartsAreTheSame(t *testing.T) {
	m := made(t)
	few := m(HVector(3, 1, 10, Int))
	pair := m(Struct([]int64{1, 1}, []int64{0, 9}, []*Type{Int, Byte}))
	for name, d := range map[string]*Type{
		"all in a table":  m(HVector(5, 1, 100, m(HVector(4, 1, 30, few)))),
		"groups":          m(HVector(1000, 1, 100, few)),
		"groups and rest": m(HVector(1001, 1, 64, few)),
		"deep":            m(HVector(100, 1, 4000, m(HVector(7, 1, 500, m(HVector(3, 1, 100, few)))))),
		"no more groups":  m(Contiguous(33, m(Resized(m(Contiguous(4, m(HIndexed([]int64{2, 3}, []int64{8, 11}, Byte)))), 0, 36)))),
		"levels":          m(HVector(2, 1, 1<<20, m(HVector(3, 1, 1<<16, m(HVector(40, 1, 1000, m(NewVector(10, 1, 2, Long)))))))),
		"pairs":           m(Contiguous(3000, m(Resized(pair, 0, 24)))),
		"a list of small": m(Struct([]int64{1, 1, 3}, []int64{0, 90, 300}, []*Type{few, pair, few})),
		"a list of both":  m(Struct([]int64{1, 300, 1}, []int64{0, 900, 60000}, []*Type{few, m(Resized(few, 0, 77)), complexType(t)})),
		"an index":        m(HIndexedBlock(1, []int64{0, 1000, 50, 3000}, few)),
	} {
		t.Run(name, func(t *testing.T) {
			c := committed(t, d, 2)
			if c.fast == c.root {
				t.Error("nothing was made flat")
			}
			if c.fast.Size != c.root.Size || c.fast.Lo != c.root.Lo || c.fast.Hi != c.root.Hi || c.fast.Blocks > c.root.Blocks {
				t.Errorf("flat: %+v, was %+v", c.fast, c.root)
			}
			places := func(n *Node) (all []int64) {
				n.each(0, 0, n.Size, func(off, n int64) bool {
					for i := range n {
						all = append(all, off+i)
					}
					return true
				})
				return all
			}
			if !slices.Equal(places(c.fast), places(c.root)) {
				t.Error("other places")
			}
		})
	}
}

func TestCommitRefuses(t *testing.T) {
	m := made(t)
	deep := m(HVector(70000, 1, 2, Byte))
	for range 100 {
		deep = m(Struct([]int64{1, 1}, []int64{0, deep.Extent() + 2}, []*Type{deep, Byte}))
	}
	for _, tc := range []struct {
		name  string
		typ   *Type
		count int64
		want  string
	}{
		{"no type", nil, 1, "no type"},
		{"a negative count", Int, -1, "commit -1 elements"},
		{"sizes beyond 64 bits", Int, 1 << 61, "overflow"},
		{"all 64 bits", Byte, math.MaxInt64, "overflow"},
		{"places beyond 64 bits", m(Resized(Byte, 0, 1<<40)), 1 << 24, "overflow"},
		{"backwards beyond 64 bits", m(Resized(Byte, 0, -1<<40)), 1 << 24, "overflow"},
		{"as far back as there is", m(HIndexed([]int64{1}, []int64{math.MinInt64}, Byte)), 1, "overflow"},
		{"too deep", deep, 1, "nested types"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if _, err := Commit(tc.typ, tc.count); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v, want %q", err, tc.want)
			}
		})
	}
}

// A thousand types in each other, and a million entries, are no matter.
func TestCommitIsBounded(t *testing.T) {
	m := made(t)
	deep := Byte
	for i := range 1000 {
		deep = m(Struct([]int64{1, 1}, []int64{0, 3 * int64(i+1)}, []*Type{deep, Byte}))
	}
	if c := committed(t, deep, 1); c.Size() != 1001 || c.Blocks() != 1001 {
		t.Errorf("%d bytes in %d blocks", c.Size(), c.Blocks())
	}
	// As a graph it is small, as a tree it is not.
	graph := Byte
	for range 55 {
		graph = m(Struct([]int64{1, 1}, []int64{0, graph.Extent() + 1}, []*Type{graph, graph}))
	}
	if c := committed(t, graph, 1); c.Size() != 1<<55 || c.Memory() > 1<<20 {
		t.Errorf("%d bytes, takes %d", c.Size(), c.Memory())
	}
	r := rand.New(rand.NewPCG(1, 2))
	blocklens, displs := make([]int64, 1<<20), make([]int64, 1<<20)
	for i := range displs {
		blocklens[i], displs[i] = r.Int64N(5), r.Int64N(1<<40)
	}
	c := committed(t, m(Indexed(blocklens, displs, Double)), 1)
	if c.Memory() > 32<<20 {
		t.Errorf("takes %d bytes", c.Memory())
	}
	if s := c.String(); len(s) > longest+3 || !strings.HasSuffix(s, "...") {
		t.Errorf("%d bytes of text", len(s))
	}
}

// Commit takes memory as what was written does, also for what does not remain.
func TestCommitTakesLittleMemory(t *testing.T) {
	m := made(t)
	touching := make([]int64, 1<<18)
	for i := range touching {
		touching[i] = int64(i)
	}
	var small []*Type // each of which would be a table
	var displs []int64
	for i := range int64(10000) {
		small = append(small, m(HVector(32, 1, 1000+i, m(HVector(16, 1, 3, Byte)))))
		displs = append(displs, i<<20)
	}
	for name, tc := range map[string]struct {
		typ  *Type
		made uint64 // bytes
		kept int64
	}{
		"blocks that touch": {m(HIndexedBlock(1, touching, Byte)), 16 << 20, 1 << 10},
		"a lot of tables":   {m(Struct(slices.Repeat([]int64{1}, len(displs)), displs, small)), 64 << 20, 16 << 20},
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			c := committed(t, tc.typ, 1)
			runtime.ReadMemStats(&after)
			if n := after.TotalAlloc - before.TotalAlloc; n > tc.made {
				t.Errorf("%d bytes allocated, want %d at most", n, tc.made)
			}
			if n := c.Memory(); n > tc.kept {
				t.Errorf("takes %d bytes, want %d at most", n, tc.kept)
			}
		})
	}
}

func TestNothingOutOfBounds(t *testing.T) {
	m := made(t)
	d := m(HIndexed([]int64{4, 4}, []int64{-8, 8}, Byte)) // touches -8..11
	c := committed(t, d, 1)
	if lo, hi := c.Bounds(); lo != -8 || hi != 12 {
		t.Fatalf("touches %d to %d", lo, hi)
	}
	for _, tc := range []struct {
		name          string
		size          int
		origin, first int64
		n             int
		good          bool
	}{
		{"all of it", 20, 8, 0, 8, true},
		{"its end", 20, 8, 7, 1, true},
		{"nothing at its end", 20, 8, 8, 0, true},
		{"too long", 20, 8, 0, 9, false},
		{"beyond the end", 20, 8, 8, 1, false},
		{"before the begin", 20, 8, -1, 1, false},
		{"far beyond", 20, 8, math.MaxInt64, 1, false},
		{"far before", 20, 8, math.MinInt64, 1, false},
		{"memory too short", 19, 8, 0, 1, false},
		{"origin too low", 20, 7, 7, 1, false},
		{"origin too high", 20, 9, 0, 1, false},
		{"negative origin", 20, -1, 0, 1, false},
		{"origin far away", 20, math.MaxInt64, 0, 1, false},
		{"origin far before", 20, math.MinInt64, 0, 1, false},
		{"no memory", 0, 0, 0, 1, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			mem, stream := make([]byte, tc.size), slices.Repeat([]byte{1}, tc.n)
			for _, pack := range []bool{false, true} {
				copies, err := c.move(mem, tc.origin, tc.first, stream, pack)
				if tc.good != (err == nil) || err != nil && (!errors.Is(err, ErrBounds) || copies != 0) {
					t.Errorf("%d copies, %v", copies, err)
				}
				if !tc.good && (slices.Contains(mem, 1) || slices.Contains(stream, 0)) {
					t.Error("something was written")
				}
			}
		})
	}
	// The origin itself need not be there.
	far := committed(t, m(HIndexed([]int64{4}, []int64{1 << 40}, Byte)), 1)
	if _, err := far.Unpack(make([]byte, 10), 6-1<<40, 0, make([]byte, 4)); err != nil {
		t.Errorf("all that is touched is there: %v", err)
	}
	for _, origin := range []int64{7 - 1<<40, -1 - 1<<40, 0} {
		if _, err := far.Unpack(make([]byte, 10), origin, 0, make([]byte, 4)); !errors.Is(err, ErrBounds) {
			t.Errorf("origin %d: %v", origin, err)
		}
	}
	empty := committed(t, d, 0)
	if _, err := empty.Unpack(nil, 0, 0, nil); err != nil {
		t.Errorf("nothing into nothing: %v", err)
	}
}

func TestMoveDoesNotAllocate(t *testing.T) {
	c := committed(t, complexType(t), 3)
	_, hi := c.Bounds()
	mem, p := make([]byte, hi), make([]byte, 1408)
	if n := testing.AllocsPerRun(100, func() {
		if _, err := c.Unpack(mem, 0, 1001, p); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Pack(p, mem, 0, 1001); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
