// SPDX-License-Identifier: Apache-2.0

package ddt_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/ddt/ddttest"
	"github.com/xspin/xspin/internal/testenv"
)

// made is for types that are good.
func made(t *ddt.Type, err error) *ddt.Type {
	if err != nil {
		panic(err)
	}
	return t
}

func named(t *testing.T, name string) *ddt.Type {
	t.Helper()
	d, ok := ddt.Lookup(name)
	if !ok {
		t.Fatalf("no type %s", name)
	}
	return d
}

// checkBounds wants what MPI_Type_size, MPI_Type_get_extent and
// MPI_Type_get_true_extent return.
func checkBounds(t *testing.T, d *ddt.Type, size, lb, extent, trueLB, trueExtent int64) {
	t.Helper()
	have := []int64{d.Size(), d.LB(), d.Extent(), d.TrueLB(), d.TrueExtent()}
	if want := []int64{size, lb, extent, trueLB, trueExtent}; !slices.Equal(have, want) {
		t.Errorf("size, lower bound, extent, true lower bound and extent are %d, want %d", have, want)
	}
	if d.UB() != lb+extent {
		t.Errorf("upper bound %d, want %d", d.UB(), lb+extent)
	}
}

func TestPredefined(t *testing.T) {
	type row struct{ size, extent, align int64 }
	rows := map[string]row{
		"byte": {1, 1, 1}, "packed": {1, 1, 1}, "char": {1, 1, 1}, "schar": {1, 1, 1}, "uchar": {1, 1, 1},
		"bool": {1, 1, 1}, "int8": {1, 1, 1}, "uint8": {1, 1, 1}, "character": {1, 1, 1},
		"short": {2, 2, 2}, "ushort": {2, 2, 2}, "int16": {2, 2, 2}, "uint16": {2, 2, 2},
		"int": {4, 4, 4}, "unsigned": {4, 4, 4}, "int32": {4, 4, 4}, "uint32": {4, 4, 4}, "wchar": {4, 4, 4},
		"float": {4, 4, 4}, "integer": {4, 4, 4}, "real": {4, 4, 4}, "logical": {4, 4, 4},
		"long": {8, 8, 8}, "ulong": {8, 8, 8}, "longlong": {8, 8, 8}, "ulonglong": {8, 8, 8},
		"int64": {8, 8, 8}, "uint64": {8, 8, 8}, "aint": {8, 8, 8}, "offset": {8, 8, 8}, "count": {8, 8, 8},
		"double": {8, 8, 8}, "double_precision": {8, 8, 8}, "longdouble": {16, 16, 16},
		"cfloat": {8, 8, 4}, "cdouble": {16, 16, 8}, "clongdouble": {32, 32, 16},
		"complex": {8, 8, 4}, "double_complex": {16, 16, 8},
		"float_int": {8, 8, 4}, "int_int": {8, 8, 4}, "short_int": {6, 8, 4},
		"double_int": {12, 16, 8}, "long_int": {12, 16, 8}, "longdouble_int": {20, 32, 16},
	}
	for _, name := range ddt.Predefined() {
		want, ok := rows[name]
		if !ok {
			t.Errorf("%s: a type that nobody asked for", name)
		}
		delete(rows, name)
		d := named(t, name)
		if c := d.Contents(); c.Combiner != ddt.CombinerNamed || c.Name != name {
			t.Errorf("%s: contents %+v", name, c)
		}
		have := row{size: d.Size(), extent: d.Extent()}
		// A char after it takes as much as its alignment.
		have.align = made(ddt.Struct([]int64{1, 1}, []int64{0, want.extent}, []*ddt.Type{d, ddt.Char})).Extent() - want.extent
		if have != want {
			t.Errorf("%s: %+v, want %+v", name, have, want)
		}
		if d.LB() != 0 || d.TrueLB() != 0 {
			t.Errorf("%s begins at %d, %d, want 0", name, d.LB(), d.TrueLB())
		}
	}
	for name := range rows {
		t.Errorf("%s is not there", name)
	}
	if d, ok := ddt.Lookup("real128"); ok {
		t.Errorf("there is a type %v", d)
	}
	// The index is where C puts it.
	checkBounds(t, named(t, "short_int"), 6, 0, 8, 0, 8)
	if got, want := ddttest.Places(named(t, "short_int"), 1), []int64{0, 1, 4, 5, 6, 7}; !slices.Equal(got, want) {
		t.Errorf("short_int is at %v, want %v", got, want)
	}
	checkBounds(t, named(t, "longdouble_int"), 20, 0, 32, 0, 20)
}

func TestBounds(t *testing.T) {
	var (
		// MPI 3.1, examples 4.1 to 4.7: {(double, 0), (char, 8)}.
		dc = made(ddt.Struct([]int64{1, 1}, []int64{0, 8}, []*ddt.Type{ddt.Double, ddt.Char}))
		// Section 4.1.7: {(lb_marker, -3), (int, 0), (ub_marker, 6)}.
		marked = made(ddt.Resized(ddt.Int, -3, 9))
		back   = made(ddt.Resized(ddt.Int, 5, -3))
		none   = made(ddt.Contiguous(0, ddt.Double))
		bounds = made(ddt.Resized(none, -3, 16)) // and nothing else

		one, two = []int64{1}, []int64{1, 1}
	)
	darray := func(rank int64) *ddt.Type {
		return made(ddt.Darray(6, rank, []int64{100, 200, 300}, []ddt.Distribution{ddt.Cyclic, ddt.Whole, ddt.Block},
			[]int64{10, ddt.DefaultArg, ddt.DefaultArg}, []int64{2, 1, 3}, ddt.Fortran, ddt.Double))
	}
	for _, tc := range []struct {
		name                                 string
		typ                                  *ddt.Type
		size, lb, extent, trueLB, trueExtent int64
	}{
		{"example 4.1", dc, 9, 0, 16, 0, 9},
		{"example 4.2", made(ddt.Contiguous(3, dc)), 27, 0, 48, 0, 41},
		{"example 4.3", made(ddt.NewVector(2, 3, 4, dc)), 54, 0, 112, 0, 105},
		{"example 4.4", made(ddt.NewVector(3, 1, -2, dc)), 27, -64, 80, -64, 73},
		{"example 4.5", made(ddt.Indexed([]int64{3, 1}, []int64{4, 0}, dc)), 36, 0, 112, 0, 105},
		{"example 4.6", made(ddt.Struct([]int64{2, 1, 3}, []int64{0, 16, 26}, []*ddt.Type{ddt.Float, dc, ddt.Char})), 20, 0, 32, 0, 29},
		{"bounds that were set", marked, 4, -3, 9, 0, 4},
		{"two of them", made(ddt.Contiguous(2, marked)), 8, -3, 18, 0, 13},
		{"set again", made(ddt.Resized(marked, 1, 2)), 4, 1, 2, 0, 4},
		{"dup", ddt.Dup(marked), 4, -3, 9, 0, 4},
		{"section 4.1.4, first process", darray(0), 8e6, 0, 48e6, 0, 8 * (99*20000 + 199*100 + 90)},
		{"section 4.1.4, last process", darray(5), 8e6, 0, 48e6, 8 * (200*20000 + 10), 8 * (99*20000 + 199*100 + 90)},

		{"Simple", made(ddt.Contiguous(27648, ddt.Float)), 110592, 0, 110592, 0, 110592},
		{"Complex", fpspinComplex(), 110592, 0, 55152, 0, 55152},

		{"hvector", made(ddt.HVector(3, 2, 10, ddt.Int)), 24, 0, 28, 0, 28},
		{"backwards", made(ddt.HVector(3, 2, -10, marked)), 24, -23, 38, -20, 33},
		{"extents below 0", made(ddt.Contiguous(3, back)), 12, -1, 3, -6, 10},
		{"a vector of them", made(ddt.HVector(3, 2, 7, back)), 24, 2, 14, -3, 21},
		{"extent 0", made(ddt.Contiguous(1e6, made(ddt.Resized(ddt.Int, 0, 0)))), 4e6, 0, 0, 0, 4},
		{"hindexed", made(ddt.HIndexed([]int64{2, 1}, []int64{-9, 30}, ddt.Int)), 12, -9, 43, -9, 43},
		{"indexed in extents that were set", made(ddt.Indexed(one, []int64{-2}, marked)), 4, -21, 9, -18, 4},
		{"indexed_block", made(ddt.IndexedBlock(2, []int64{7, -1}, ddt.Short)), 8, -2, 20, -2, 20},
		{"hindexed_block", made(ddt.HIndexedBlock(2, []int64{7, -1}, ddt.Short)), 8, -1, 12, -1, 12},

		// Nothing has no place, wherever it is.
		{"no elements", none, 0, 0, 0, 0, 0},
		{"no bytes, but bounds", bounds, 0, -3, 16, 0, 0},
		{"three of these", made(ddt.Contiguous(3, bounds)), 0, -3, 48, 0, 0},
		{"no blocks", made(ddt.HVector(0, 3, 100, ddt.Int)), 0, 0, 0, 0, 0},
		{"blocks of nothing", made(ddt.HVector(3, 0, 100, marked)), 0, 0, 0, 0, 0},
		{"entries of nothing", made(ddt.HIndexed([]int64{0, 1, 0}, []int64{-100, 8, 100}, ddt.Int)), 4, 8, 4, 8, 4},
		{"nothing but these", made(ddt.HIndexed([]int64{0, 0}, []int64{-100, 100}, marked)), 0, 0, 0, 0, 0},
		{"blocks of nothing, listed", made(ddt.HIndexedBlock(0, []int64{-100, 100}, ddt.Int)), 0, 0, 0, 0, 0},
		{"an empty list", made(ddt.Indexed(nil, nil, ddt.Int)), 0, 0, 0, 0, 0},
		{"an empty struct", made(ddt.Struct(nil, nil, nil)), 0, 0, 0, 0, 0},
		{"a struct with entries of nothing", made(ddt.Struct([]int64{0, 1}, []int64{-100, 8}, []*ddt.Type{ddt.LongDouble, ddt.Char})), 1, 8, 1, 8, 1},
		{"a struct with a type of nothing", made(ddt.Struct(two, []int64{-100, 8}, []*ddt.Type{none, ddt.Char})), 1, 8, 1, 8, 1},
		{"a struct with bounds only", made(ddt.Struct(two, []int64{-100, 8}, []*ddt.Type{bounds, ddt.Char})), 1, -103, 16, 8, 1},

		// A struct's padding, and that it has none with bounds that were set.
		{"padding", made(ddt.Struct(two, []int64{0, 8}, []*ddt.Type{ddt.LongDouble, ddt.Char})), 17, 0, 16, 0, 16},
		{"padding from its lower bound", made(ddt.Struct(two, []int64{-3, 9}, []*ddt.Type{ddt.Double, ddt.Char})), 9, -3, 16, -3, 13},
		{"padding in it", made(ddt.Struct(two, []int64{0, 16}, []*ddt.Type{dc, ddt.Short})), 11, 0, 24, 0, 18},
		{"padding for vectors", made(ddt.Struct(two, []int64{0, 30}, []*ddt.Type{made(ddt.HVector(2, 1, 9, ddt.Double)), ddt.Char})), 17, 0, 32, 0, 31},
		{"padding of equals", made(ddt.Struct(two, []int64{0, 5}, []*ddt.Type{ddt.Int, ddt.Int})), 8, 0, 12, 0, 9},
		{"no padding of lists", made(ddt.HIndexed(two, []int64{0, 5}, ddt.Int)), 8, 0, 9, 0, 9},
		{"bounds in a struct", made(ddt.Struct(two, []int64{0, 40}, []*ddt.Type{marked, ddt.Char})), 5, -3, 9, 0, 41},
		{"in either order", made(ddt.Struct(two, []int64{40, 0}, []*ddt.Type{ddt.Char, marked})), 5, -3, 9, 0, 41},
		{"of two entries", made(ddt.Struct([]int64{2, 1, 1}, []int64{0, -90, 40}, []*ddt.Type{marked, ddt.Char, back})), 13, -3, 45, -90, 134},
		{"deeper", made(ddt.Struct(two, []int64{0, 40}, []*ddt.Type{made(ddt.HVector(2, 1, 20, marked)), ddt.Char})), 9, -3, 29, 0, 41},

		// Arrays.
		{"subarray", made(ddt.Subarray([]int64{3, 5}, []int64{2, 2}, []int64{1, 1}, ddt.C, ddt.Char)), 4, 0, 15, 6, 7},
		{"in Fortran's order", made(ddt.Subarray([]int64{3, 5}, []int64{2, 2}, []int64{1, 1}, ddt.Fortran, ddt.Char)), 4, 0, 15, 4, 5},
		{"of bounds that were set", made(ddt.Subarray([]int64{3, 5}, []int64{2, 2}, []int64{1, 1}, ddt.C, marked)), 16, 0, 135, 54, 58},
		{"with nothing in it", made(ddt.Subarray([]int64{3, 5}, []int64{2, 0}, []int64{1, 5}, ddt.C, ddt.Int)), 0, 0, 60, 0, 0},
		{"of nothing", made(ddt.Subarray([]int64{3, 5}, []int64{2, 2}, []int64{1, 1}, ddt.C, bounds)), 0, 0, 240, 0, 0},
		{"backwards in memory", made(ddt.Subarray([]int64{3, 5}, []int64{2, 2}, []int64{1, 1}, ddt.C, back)), 16, 0, -45, -36, 22},
		{"in a struct", made(ddt.Struct(two, []int64{0, 60}, []*ddt.Type{made(ddt.Subarray([]int64{3}, one, one, ddt.C, ddt.Char)), ddt.Int})), 5, 0, 3, 1, 63},
		{"no part of an array", made(ddt.Darray(4, 3, []int64{5}, []ddt.Distribution{ddt.Block}, []int64{ddt.DefaultArg}, []int64{4}, ddt.C, ddt.Int)), 0, 0, 20, 0, 0},
		{"the last, short block", made(ddt.Darray(4, 2, []int64{5}, []ddt.Distribution{ddt.Block}, []int64{ddt.DefaultArg}, []int64{4}, ddt.C, ddt.Int)), 4, 0, 20, 16, 4},
		{"a block longer than the array", made(ddt.Darray(2, 0, []int64{5}, []ddt.Distribution{ddt.Cyclic}, []int64{math.MaxInt64}, []int64{2}, ddt.C, ddt.Int)), 20, 0, 20, 0, 20},
		{"and the next", made(ddt.Darray(2, 1, []int64{5}, []ddt.Distribution{ddt.Cyclic}, []int64{math.MaxInt64}, []int64{2}, ddt.C, ddt.Int)), 0, 0, 20, 0, 0},
		{"rounds", made(ddt.Darray(2, 1, []int64{11}, []ddt.Distribution{ddt.Cyclic}, []int64{3}, []int64{2}, ddt.C, ddt.Int)), 20, 0, 44, 12, 32},

		// At the end of 64 bits.
		{"all there is", made(ddt.Contiguous(math.MaxInt64, ddt.Byte)), math.MaxInt64, 0, math.MaxInt64, 0, math.MaxInt64},
		{"the lowest place", made(ddt.HIndexed(one, []int64{math.MinInt64}, ddt.Byte)), 1, math.MinInt64, 1, math.MinInt64, 1},
		{"far away, but nothing", made(ddt.HIndexed([]int64{0}, []int64{math.MinInt64}, ddt.Int)), 0, 0, 0, 0, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			checkBounds(t, tc.typ, tc.size, tc.lb, tc.extent, tc.trueLB, tc.trueExtent)
		})
	}
}

// fpspinComplex is the second type of FPsPIN's evaluation.
func fpspinComplex() *ddt.Type {
	t := made(ddt.NewVector(32, 6, 8, made(ddt.Contiguous(18, ddt.Float))))
	for _, stride := range []int64{6144, 12288, 18432} {
		t = made(ddt.HVector(2, 1, stride, t))
	}
	return t
}

func TestComplexOverlapsItself(t *testing.T) {
	places := ddttest.Places(fpspinComplex(), 1)
	slices.Sort(places)
	if n := len(slices.Compact(places)); n != 52272 {
		t.Errorf("%d bytes are touched, want 52272", n)
	}
}

func TestRefused(t *testing.T) {
	null := named(t, "null")
	huge := made(ddt.Contiguous(1<<40, ddt.Byte))
	wide := made(ddt.Resized(ddt.Byte, 0, 1<<40))
	low := made(ddt.Resized(ddt.Byte, math.MinInt64, 0))
	block := []ddt.Distribution{ddt.Block}
	type list = []int64
	tooMany := make(list, ddt.MaxEntries+1)
	for _, tc := range []struct {
		err  func() (*ddt.Type, error)
		want string // in the text
	}{
		{func() (*ddt.Type, error) { return ddt.Contiguous(-1, ddt.Int) }, "contiguous of -1 elements: want 0 or more"},
		{func() (*ddt.Type, error) { return ddt.NewVector(-2, 1, 1, ddt.Int) }, "vector of -2 blocks: want 0 or more"},
		{func() (*ddt.Type, error) { return ddt.NewVector(1, -2, 1, ddt.Int) }, "vector of blocks of -2 elements: want 0 or more"},
		{func() (*ddt.Type, error) { return ddt.HVector(-3, 1, 1, ddt.Int) }, "hvector of -3 blocks: want 0 or more"},
		{func() (*ddt.Type, error) { return ddt.HVector(1, -3, 1, ddt.Int) }, "hvector of blocks of -3 elements: want 0 or more"},
		{func() (*ddt.Type, error) { return ddt.Indexed(list{1, -4}, list{0, 1}, ddt.Int) }, "indexed: entry 1 has -4 elements"},
		{func() (*ddt.Type, error) { return ddt.HIndexed(list{-5}, list{0}, ddt.Int) }, "hindexed: entry 0 has -5 elements"},
		{func() (*ddt.Type, error) { return ddt.IndexedBlock(-6, list{0}, ddt.Int) }, "indexed_block of blocks of -6 elements"},
		{func() (*ddt.Type, error) { return ddt.HIndexedBlock(-7, list{0}, ddt.Int) }, "hindexed_block of blocks of -7 elements"},
		{func() (*ddt.Type, error) { return ddt.Struct(list{-8}, list{0}, []*ddt.Type{ddt.Int}) }, "struct: entry 0 has -8 elements"},
		{func() (*ddt.Type, error) { return ddt.Indexed(list{1}, list{0, 1}, ddt.Int) }, "indexed of 1 block lengths at 2 displacements"},
		{func() (*ddt.Type, error) { return ddt.HIndexed(list{1}, nil, ddt.Int) }, "hindexed of 1 block lengths at 0 displacements"},
		{func() (*ddt.Type, error) { return ddt.Struct(list{1}, list{1, 2}, []*ddt.Type{ddt.Int, ddt.Int}) }, "struct of 1 block lengths at 2"},
		{func() (*ddt.Type, error) { return ddt.Struct(list{1, 1}, list{1, 2}, []*ddt.Type{ddt.Int}) }, "struct of 1 types at 2"},

		{func() (*ddt.Type, error) { return ddt.Contiguous(1, nil) }, "contiguous of a nil type"},
		{func() (*ddt.Type, error) { return ddt.NewVector(1, 1, 1, nil) }, "vector of a nil type"},
		{func() (*ddt.Type, error) { return ddt.HVector(1, 1, 1, nil) }, "hvector of a nil type"},
		{func() (*ddt.Type, error) { return ddt.Indexed(nil, nil, nil) }, "indexed of a nil type"},
		{func() (*ddt.Type, error) { return ddt.HIndexed(nil, nil, nil) }, "hindexed of a nil type"},
		{func() (*ddt.Type, error) { return ddt.IndexedBlock(1, nil, nil) }, "indexed_block of a nil type"},
		{func() (*ddt.Type, error) { return ddt.HIndexedBlock(1, nil, nil) }, "hindexed_block of a nil type"},
		{func() (*ddt.Type, error) { return ddt.Struct(list{0}, list{0}, []*ddt.Type{nil}) }, "entry 0: struct of a nil type"},
		{func() (*ddt.Type, error) { return ddt.Subarray(list{1}, list{1}, list{0}, ddt.C, nil) }, "subarray of a nil type"},
		{func() (*ddt.Type, error) {
			return ddt.Darray(1, 0, list{1}, block, list{1}, list{1}, ddt.C, nil)
		}, "darray of a nil type"},
		{func() (*ddt.Type, error) { return ddt.Resized(nil, 0, 0) }, "resized of a nil type"},
		{func() (*ddt.Type, error) { return ddt.Contiguous(1, null) }, "MPI_DATATYPE_NULL"},
		{func() (*ddt.Type, error) { return ddt.Contiguous(1, ddt.Dup(null)) }, "MPI_DATATYPE_NULL"},
		{func() (*ddt.Type, error) { return ddt.Struct(list{0}, list{0}, []*ddt.Type{null}) }, "MPI_DATATYPE_NULL"},
		{func() (*ddt.Type, error) { return ddt.Resized(null, 0, 0) }, "MPI_DATATYPE_NULL"},

		{func() (*ddt.Type, error) { return ddt.Contiguous(1<<23, huge) }, "contiguous of 8388608 elements of 1099511627776 bytes"},
		{func() (*ddt.Type, error) { return ddt.Contiguous(1<<24, wide) }, "contiguous of 16777216 elements of 1 bytes, extent 1099511627776"},
		{func() (*ddt.Type, error) { return ddt.Contiguous(2, made(ddt.Resized(ddt.Byte, 0, math.MinInt64))) }, "too large for 64 bits"},
		{func() (*ddt.Type, error) { return ddt.NewVector(2, 1, 1<<23, wide) }, "vector with a stride of 8388608 extents of 1099511627776 bytes"},
		{func() (*ddt.Type, error) { return ddt.HVector(1<<32, 1<<31, 0, ddt.Byte) }, "hvector of 4294967296 blocks of 2147483648 elements"},
		{func() (*ddt.Type, error) { return ddt.HVector(4, 1, 1<<62, ddt.Byte) }, "stride of 4611686018427387904 bytes"},
		{func() (*ddt.Type, error) { return ddt.HVector(2, 1, math.MaxInt64, ddt.Byte) }, "stride of 9223372036854775807 bytes"},
		{func() (*ddt.Type, error) { return ddt.HVector(2, 1, math.MinInt64, ddt.Byte) }, "stride of -9223372036854775808 bytes"},
		{func() (*ddt.Type, error) { return ddt.Indexed(list{1}, list{1 << 23}, wide) }, "indexed: entry 0 at 8388608 extents"},
		{func() (*ddt.Type, error) { return ddt.IndexedBlock(1, list{0, -1<<23 - 1}, wide) }, "indexed_block: entry 1 at -8388609 extents"},
		{func() (*ddt.Type, error) { return ddt.HIndexed(list{1, 1}, list{0, math.MaxInt64}, ddt.Byte) }, "hindexed: entry 1, 1 elements of 1 bytes, extent 1, at 9223372036854775807"},
		{func() (*ddt.Type, error) { return ddt.HIndexed(list{1, 1}, list{-1 << 62, 1 << 62}, ddt.Byte) }, "hindexed: entry 1"},
		{func() (*ddt.Type, error) { return ddt.HIndexed(list{1 << 62, 1 << 62}, list{0, 0}, ddt.Byte) }, "hindexed: entry 1"},
		{func() (*ddt.Type, error) { return ddt.HIndexed(list{1}, list{-1}, low) }, "hindexed: entry 0"},
		{func() (*ddt.Type, error) {
			return ddt.HIndexedBlock(3, list{1 << 62}, made(ddt.Resized(ddt.Byte, 0, 1<<61)))
		}, "hindexed_block: entry 0, 3 elements"},
		{func() (*ddt.Type, error) {
			return ddt.Struct(list{1, 1}, list{0, math.MaxInt64 - 1}, []*ddt.Type{ddt.LongDouble, ddt.Byte})
		}, "with its padding too large for 64 bits"},
		{func() (*ddt.Type, error) { return ddt.Struct(list{1}, list{math.MaxInt64}, []*ddt.Type{ddt.Int}) }, "struct: entry 0"},
		{func() (*ddt.Type, error) { return ddt.Resized(ddt.Int, 1, math.MaxInt64) }, "resized with a lower bound of 1 and an extent of 9223372036854775807"},
		{func() (*ddt.Type, error) { return ddt.Resized(ddt.Int, -1, math.MinInt64) }, "resized with a lower bound of -1"},
		{func() (*ddt.Type, error) {
			return ddt.Subarray(list{1 << 31, 1 << 31, 4}, list{1, 1, 1}, list{0, 0, 0}, ddt.C, ddt.Int)
		}, "subarray of sizes [2147483648 2147483648 4], extent 4"},
		{func() (*ddt.Type, error) {
			return ddt.Subarray(list{math.MaxInt64}, list{1}, list{math.MaxInt64 - 1}, ddt.Fortran, ddt.Int)
		}, "subarray of sizes [9223372036854775807], extent 4"},
		{func() (*ddt.Type, error) {
			return ddt.Darray(1, 0, list{1 << 31, 1 << 31}, []ddt.Distribution{ddt.Block, ddt.Cyclic}, list{-1, -1}, list{1, 1}, ddt.C, ddt.Double)
		}, "darray of sizes [2147483648 2147483648], extent 8"},

		{func() (*ddt.Type, error) { return ddt.Subarray(nil, nil, nil, ddt.C, ddt.Int) }, "subarray of 0 sizes"},
		{func() (*ddt.Type, error) { return ddt.Subarray(list{1, 2}, list{1}, list{0, 0}, ddt.C, ddt.Int) }, "2 sizes, 1 subsizes and 2 starts"},
		{func() (*ddt.Type, error) { return ddt.Subarray(list{1}, list{1}, list{0, 0}, ddt.C, ddt.Int) }, "1 sizes, 1 subsizes and 2 starts"},
		{func() (*ddt.Type, error) { return ddt.Subarray(list{0}, list{0}, list{0}, ddt.C, ddt.Int) }, "size 0 in dimension 0"},
		{func() (*ddt.Type, error) { return ddt.Subarray(list{9, 4}, list{9, 5}, list{0, 0}, ddt.C, ddt.Int) }, "subsize 5 in dimension 1: want 0 to its size, 4"},
		{func() (*ddt.Type, error) { return ddt.Subarray(list{4}, list{-1}, list{0}, ddt.C, ddt.Int) }, "subsize -1 in dimension 0"},
		{func() (*ddt.Type, error) { return ddt.Subarray(list{4}, list{3}, list{2}, ddt.C, ddt.Int) }, "start 2 in dimension 0: want 0 to 1, for 3 of 4"},
		{func() (*ddt.Type, error) { return ddt.Subarray(list{4}, list{3}, list{-1}, ddt.C, ddt.Int) }, "start -1 in dimension 0"},
		{func() (*ddt.Type, error) { return ddt.Subarray(list{4}, list{3}, list{0}, 2, ddt.Int) }, "subarray of unknown order 2"},

		{func() (*ddt.Type, error) { return ddt.Darray(1, 0, nil, nil, nil, nil, ddt.C, ddt.Int) }, "darray of 0 sizes"},
		{func() (*ddt.Type, error) {
			return ddt.Darray(1, 0, list{1}, block, list{1}, list{1, 1}, ddt.C, ddt.Int)
		}, "1 arguments and 2 process counts"},
		{func() (*ddt.Type, error) { return ddt.Darray(0, 0, list{1}, block, list{1}, list{1}, ddt.C, ddt.Int) }, "darray among 0 processes"},
		{func() (*ddt.Type, error) { return ddt.Darray(4, 4, list{1}, block, list{1}, list{4}, ddt.C, ddt.Int) }, "rank 4: want 0 to 3"},
		{func() (*ddt.Type, error) { return ddt.Darray(4, -1, list{1}, block, list{1}, list{4}, ddt.C, ddt.Int) }, "rank -1: want 0 to 3"},
		{func() (*ddt.Type, error) { return ddt.Darray(4, 0, list{1}, block, list{1}, list{3}, ddt.C, ddt.Int) }, "grid of [3] processes: want 4 in all"},
		{func() (*ddt.Type, error) { return ddt.Darray(4, 0, list{1}, block, list{1}, list{2}, ddt.C, ddt.Int) }, "grid of [2] processes: want 4 in all"},
		{func() (*ddt.Type, error) {
			return ddt.Darray(1, 0, list{1, 1}, []ddt.Distribution{ddt.Block, ddt.Block}, list{1, 1}, list{1 << 32, 1 << 32}, ddt.C, ddt.Int)
		}, "want 1 in all"},
		{func() (*ddt.Type, error) { return ddt.Darray(4, 0, list{0}, block, list{1}, list{4}, ddt.C, ddt.Int) }, "in dimension 0: size 0"},
		{func() (*ddt.Type, error) { return ddt.Darray(4, 0, list{4}, block, list{1}, list{0}, ddt.C, ddt.Int) }, "in dimension 0: 0 processes"},
		{func() (*ddt.Type, error) { return ddt.Darray(4, 0, list{4}, block, list{0}, list{4}, ddt.C, ddt.Int) }, "distribution argument 0"},
		{func() (*ddt.Type, error) { return ddt.Darray(4, 0, list{9}, block, list{2}, list{4}, ddt.C, ddt.Int) }, "9 elements in blocks of 2 for 4 processes: want blocks of 3 or more"},
		{func() (*ddt.Type, error) {
			return ddt.Darray(2, 0, list{9}, []ddt.Distribution{ddt.Whole}, list{-1}, list{2}, ddt.C, ddt.Int)
		}, "2 processes, but it is not distributed"},
		{func() (*ddt.Type, error) {
			return ddt.Darray(2, 0, list{9}, []ddt.Distribution{7}, list{-1}, list{2}, ddt.C, ddt.Int)
		}, "unknown distribution 7"},
		{func() (*ddt.Type, error) { return ddt.Darray(4, 0, list{4}, block, list{1}, list{4}, -1, ddt.Int) }, "darray of unknown order -1"},

		{func() (*ddt.Type, error) { return ddt.Indexed(tooMany, tooMany, ddt.Int) }, "indexed of 16777217 entries: want 16777216 at most"},
		{func() (*ddt.Type, error) { return ddt.HIndexed(tooMany, tooMany, ddt.Int) }, "hindexed of 16777217 entries"},
		{func() (*ddt.Type, error) { return ddt.IndexedBlock(1, tooMany, ddt.Int) }, "indexed_block of 16777217 entries"},
		{func() (*ddt.Type, error) { return ddt.HIndexedBlock(1, tooMany, ddt.Int) }, "hindexed_block of 16777217 entries"},
		{func() (*ddt.Type, error) { return ddt.Struct(tooMany, tooMany, make([]*ddt.Type, len(tooMany))) }, "struct of 16777217 entries"},
	} {
		t.Run(tc.want, func(t *testing.T) {
			d, err := tc.err()
			if err == nil {
				t.Fatalf("got a type of %d bytes from %d to %d, want an error", d.Size(), d.LB(), d.UB())
			}
			if d != nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, %q, want %q", d, err, tc.want)
			}
		})
	}
}

func TestDepth(t *testing.T) {
	d := ddt.Int
	for range ddt.MaxDepth {
		d = made(ddt.HVector(1, 1, 0, d))
	}
	for _, f := range []func() (*ddt.Type, error){
		func() (*ddt.Type, error) { return ddt.Contiguous(1, d) },
		func() (*ddt.Type, error) { return ddt.HIndexed([]int64{0}, []int64{0}, d) },
		func() (*ddt.Type, error) { return ddt.Resized(d, 0, 4) },
		func() (*ddt.Type, error) { return ddt.Subarray([]int64{1}, []int64{1}, []int64{0}, ddt.C, d) },
	} {
		if _, err := f(); err == nil || !strings.Contains(err.Error(), "4097 constructors deep: want 4096 at most") {
			t.Errorf("error %v, want one of 4097 constructors", err)
		}
	}
	if ddt.Dup(d) != d {
		t.Error("a duplicate is deeper than all others")
	}
	if d.Size() != 4 || d.TrueExtent() != 4 {
		t.Errorf("%d bytes in %d", d.Size(), d.TrueExtent())
	}
}

// What a caller does with its slices afterwards, and what a type was made of.
func TestContents(t *testing.T) {
	lens, displs, types := []int64{1, 2}, []int64{3, 10}, []*ddt.Type{ddt.Int, ddt.Char}
	sizes, subsizes, starts := []int64{4, 5}, []int64{2, 3}, []int64{1, 0}
	distribs, dargs, psizes := []ddt.Distribution{ddt.Cyclic, ddt.Whole}, []int64{2, ddt.DefaultArg}, []int64{2, 1}
	one := []*ddt.Type{ddt.Int}
	got := []*ddt.Type{
		made(ddt.Contiguous(3, ddt.Int)),
		made(ddt.NewVector(3, 2, -4, ddt.Int)),
		made(ddt.HVector(3, 2, -4, ddt.Int)),
		made(ddt.Indexed(lens, displs, ddt.Int)),
		made(ddt.HIndexed(lens, displs, ddt.Int)),
		made(ddt.IndexedBlock(2, displs, ddt.Int)),
		made(ddt.HIndexedBlock(2, displs, ddt.Int)),
		made(ddt.Struct(lens, displs, types)),
		made(ddt.Subarray(sizes, subsizes, starts, ddt.C, ddt.Int)),
		made(ddt.Subarray(sizes, subsizes, starts, ddt.Fortran, ddt.Int)),
		made(ddt.Darray(2, 1, sizes, distribs, dargs, psizes, ddt.C, ddt.Int)),
		made(ddt.Darray(2, 1, sizes, distribs, dargs, psizes, ddt.Fortran, ddt.Int)),
		made(ddt.Resized(ddt.Int, -1, 9)),
		ddt.Dup(ddt.Int),
	}
	var before [][]int64
	for _, d := range got {
		before = append(before, pieces(t, d))
	}
	for _, s := range [][]int64{lens, displs, sizes, subsizes, starts, dargs, psizes} {
		clear(s)
	}
	clear(types)
	distribs[0], distribs[1] = ddt.Block, ddt.Block
	for i, want := range []ddt.Contents{
		{Combiner: ddt.CombinerContiguous, Count: 3, Types: one},
		{Combiner: ddt.CombinerVector, Count: 3, Blocklen: 2, Stride: -4, Types: one},
		{Combiner: ddt.CombinerHVector, Count: 3, Blocklen: 2, Stride: -4, Types: one},
		{Combiner: ddt.CombinerIndexed, Blocklens: []int64{1, 2}, Displs: []int64{3, 10}, Types: one},
		{Combiner: ddt.CombinerHIndexed, Blocklens: []int64{1, 2}, Displs: []int64{3, 10}, Types: one},
		{Combiner: ddt.CombinerIndexedBlock, Blocklen: 2, Displs: []int64{3, 10}, Types: one},
		{Combiner: ddt.CombinerHIndexedBlock, Blocklen: 2, Displs: []int64{3, 10}, Types: one},
		{Combiner: ddt.CombinerStruct, Blocklens: []int64{1, 2}, Displs: []int64{3, 10}, Types: []*ddt.Type{ddt.Int, ddt.Char}},
		{Combiner: ddt.CombinerSubarray, Sizes: []int64{4, 5}, Subsizes: []int64{2, 3}, Starts: []int64{1, 0}, Types: one},
		{Combiner: ddt.CombinerSubarrayF, Sizes: []int64{4, 5}, Subsizes: []int64{2, 3}, Starts: []int64{1, 0}, Types: one},
		{Combiner: ddt.CombinerDarray, Count: 2, Rank: 1, Sizes: []int64{4, 5}, Distribs: []ddt.Distribution{ddt.Cyclic, ddt.Whole}, Dargs: []int64{2, -1}, Psizes: []int64{2, 1}, Types: one},
		{Combiner: ddt.CombinerDarrayF, Count: 2, Rank: 1, Sizes: []int64{4, 5}, Distribs: []ddt.Distribution{ddt.Cyclic, ddt.Whole}, Dargs: []int64{2, -1}, Psizes: []int64{2, 1}, Types: one},
		{Combiner: ddt.CombinerResized, LB: -1, Extent: 9, Types: one},
		{Combiner: ddt.CombinerDup, Types: one},
	} {
		if c := got[i].Contents(); !reflect.DeepEqual(c, want) {
			t.Errorf("contents %+v, want %+v", c, want)
		}
		if after := pieces(t, got[i]); !slices.Equal(after, before[i]) {
			t.Errorf("%s is at %v, was at %v", want.Combiner, after, before[i])
		}
	}
}

// pieces returns where the bytes of a type are, as they are unpacked.
func pieces(t *testing.T, d *ddt.Type) (places []int64) {
	t.Helper()
	c, err := ddt.Commit(d, 1)
	if err != nil {
		t.Fatal(err)
	}
	c.Each(0, c.Size(), func(off, n int64) bool {
		for i := range n {
			places = append(places, off+i)
		}
		return true
	})
	return places
}

// All processes together have each element of an array once.
func TestDarrayIsAPartition(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 0))
		dims, order := 1+r.IntN(3), ddt.Order(r.IntN(2))
		var gsizes, dargs, psizes []int64
		var distribs []ddt.Distribution
		all, processes := int64(1), int64(1)
		for range dims {
			g, p, arg := 1+r.Int64N(9), 1+r.Int64N(4), int64(ddt.DefaultArg)
			d := ddt.Distribution(r.IntN(3))
			switch {
			case d == ddt.Whole:
				p = 1
			case d == ddt.Block && r.IntN(2) == 0:
				arg = (g+p-1)/p + r.Int64N(2)
			case d == ddt.Cyclic && r.IntN(2) == 0:
				arg = 1 + r.Int64N(g+1)
			}
			gsizes, dargs, psizes, distribs = append(gsizes, g), append(dargs, arg), append(psizes, p), append(distribs, d)
			all *= g
			processes *= p
		}
		owners := make([]int, all*2)
		name := fmt.Sprintf("seed %d: %v in %v %v among %v, order %d", seed, gsizes, distribs, dargs, psizes, order)
		for rank := range processes {
			d, err := ddt.Darray(processes, rank, gsizes, distribs, dargs, psizes, order, ddt.Short)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			last := int64(-1)
			for _, p := range pieces(t, d) {
				owners[p]++
				if p <= last {
					t.Fatalf("%s: byte %d comes after %d", name, p, last)
				}
				last = p
			}
		}
		for p, n := range owners {
			if n != 1 {
				t.Fatalf("%s: byte %d belongs to %d processes", name, p, n)
			}
		}
	}
}

// What constructors say of random types is what the definitions say.
func TestBoundsOfRandomTypes(t *testing.T) {
	for _, o := range []ddttest.Options{{}, {NoOverlap: true, MaxBytes: 2048}, {MaxExtent: 256, MaxBytes: 512}} {
		for seed := range 300 * uint64(testenv.Soak()) {
			d, count := ddttest.Random(rand.New(rand.NewPCG(seed, 1)), o)
			places := ddttest.Places(d, 1)
			if d.Size() != int64(len(places)) {
				t.Fatalf("seed %d of %+v: %v: size %d, want %d", seed, o, d, d.Size(), len(places))
			}
			if lb, ub := ddttest.Bounds(d); d.LB() != lb || d.UB() != ub || d.Extent() != ub-lb {
				t.Fatalf("seed %d of %+v: %v: from %d to %d, want %d to %d", seed, o, d, d.LB(), d.UB(), lb, ub)
			}
			var lo, hi int64
			if len(places) > 0 {
				lo, hi = slices.Min(places), slices.Max(places)+1
			}
			if d.TrueLB() != lo || d.TrueExtent() != hi-lo {
				t.Fatalf("seed %d of %+v: %v: bytes from %d, %d in all, want from %d to %d", seed, o, d, d.TrueLB(), d.TrueExtent(), lo, hi-1)
			}
			all, err := ddt.Contiguous(count, d)
			if err != nil || all.Size() != count*d.Size() {
				t.Fatalf("seed %d of %+v: %d of it: %v", seed, o, count, err)
			}
		}
	}
}

func TestMillionEntries(t *testing.T) {
	const n = 1_000_000
	lens, displs, types := make([]int64, n), make([]int64, n), make([]*ddt.Type, n)
	for i := range displs {
		lens[i], displs[i], types[i] = int64(i%3), int64(n-i)*8, ddt.Int
	}
	for _, d := range []*ddt.Type{
		made(ddt.HIndexed(lens, displs, ddt.Int)),
		made(ddt.Struct(lens, displs, types)),
	} {
		checkBounds(t, d, 4*(n-1), 16, 8*n-20, 16, 8*n-20)
	}
}
