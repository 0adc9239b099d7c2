// SPDX-License-Identifier: Apache-2.0

package ddt_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/ddt/ddttest"
	"github.com/xspin/xspin/internal/testenv"
)

// sameContents tells whether two types were made in the same way.
func sameContents(a, b *ddt.Type) bool {
	x, y := a.Contents(), b.Contents()
	return x.Combiner == y.Combiner && x.Name == y.Name &&
		x.Count == y.Count && x.Blocklen == y.Blocklen && x.Stride == y.Stride &&
		slices.Equal(x.Blocklens, y.Blocklens) && slices.Equal(x.Displs, y.Displs) &&
		slices.Equal(x.Sizes, y.Sizes) && slices.Equal(x.Subsizes, y.Subsizes) && slices.Equal(x.Starts, y.Starts) &&
		x.Rank == y.Rank && slices.Equal(x.Distribs, y.Distribs) && slices.Equal(x.Dargs, y.Dargs) && slices.Equal(x.Psizes, y.Psizes) &&
		x.LB == y.LB && x.Extent == y.Extent && slices.EqualFunc(x.Types, y.Types, sameContents)
}

// must returns a function for what a constructor returns.
func must(t testing.TB) func(*ddt.Type, error) *ddt.Type {
	return func(d *ddt.Type, err error) *ddt.Type {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
}

// Each constructor has its text, and what the text has is what the constructor gets.
func TestParseAndString(t *testing.T) {
	m := must(t)
	vec := m(ddt.NewVector(2, 3, -4, ddt.Int))
	type list = []int64
	for text, want := range map[string]*ddt.Type{
		"byte":                                 ddt.Byte,
		"longdouble":                           ddt.LongDouble,
		"ctg(0)[int]":                          m(ddt.Contiguous(0, ddt.Int)),
		"vec(2 3 -4)[int]":                     vec,
		"hvec(2 1 18432)[vec(2 3 -4)[int]]":    m(ddt.HVector(2, 1, 18432, vec)),
		"idx(5,1 -2,3)[int]":                   m(ddt.Indexed(list{1, 3}, list{5, -2}, ddt.Int)),
		"hidx(5,1 -2,3)[int]":                  m(ddt.HIndexed(list{1, 3}, list{5, -2}, ddt.Int)),
		"hidx()[int]":                          m(ddt.HIndexed(nil, nil, ddt.Int)),
		"idxb(2: 7 0 -9)[int]":                 m(ddt.IndexedBlock(2, list{7, 0, -9}, ddt.Int)),
		"hidxb(2: 7 0 -9)[int]":                m(ddt.HIndexedBlock(2, list{7, 0, -9}, ddt.Int)),
		"hidxb(2: )[int]":                      m(ddt.HIndexedBlock(2, nil, ddt.Int)),
		"struct(8,2,int 0,1,vec(2 3 -4)[int])": m(ddt.Struct(list{2, 1}, list{8, 0}, []*ddt.Type{ddt.Int, vec})),
		"struct()":                             m(ddt.Struct(nil, nil, nil)),
		"subarray(1,2,3 0,4,5)[int]":           m(ddt.Subarray(list{3, 5}, list{2, 4}, list{1, 0}, ddt.C, ddt.Int)),
		"subarrayf(1,2,3 0,4,5)[int]":          m(ddt.Subarray(list{3, 5}, list{2, 4}, list{1, 0}, ddt.Fortran, ddt.Int)),
		"darray(6 5: 10,block,2 11,cyclic:4,3 12,none,1)[int]": m(ddt.Darray(6, 5, list{10, 11, 12},
			[]ddt.Distribution{ddt.Block, ddt.Cyclic, ddt.Whole}, list{ddt.DefaultArg, 4, ddt.DefaultArg}, list{2, 3, 1}, ddt.C, ddt.Int)),
		"darrayf(2 0: 10,block:7,2 9,cyclic,1)[int]": m(ddt.Darray(2, 0, list{10, 9},
			[]ddt.Distribution{ddt.Block, ddt.Cyclic}, list{7, ddt.DefaultArg}, list{2, 1}, ddt.Fortran, ddt.Int)),
		"resized(-8,24)[int]": m(ddt.Resized(ddt.Int, -8, 24)),
		"dup[int]":            ddt.Dup(ddt.Int),
		"resized(-9223372036854775808,9223372036854775807)[byte]": m(ddt.Resized(ddt.Byte, -1<<63, 1<<63-1)),
	} {
		if got := want.String(); got != text {
			t.Errorf("String is %s, want %s", got, text)
		}
		if got, err := ddt.Parse(text); err != nil {
			t.Errorf("%s: %v", text, err)
		} else if !sameContents(got, want) {
			t.Errorf("%s is %+v, want %+v", text, got.Contents(), want.Contents())
		}
	}
	for _, name := range ddt.Predefined() {
		if got, err := ddt.Parse(name); err != nil || got.String() != name {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

// What FPsPIN reads is read, and means the same.
func TestParseFPsPIN(t *testing.T) {
	for _, tt := range []struct {
		text, same   string
		size, extent int64
	}{
		{"hvec(2 1 18432)[hvec(2 1 12288)[hvec(2 1 6144)[vec(32 6 8)[ctg(18)[float]]]]]", "", 110592, 55152},
		{"ctg(27648)[float]", "", 110592, 110592},
		{"vec(2:3:9 1 4:4:64)[int]", "vec(2 1 4)[int]", 8, 20},
		{"ctg(-0)[int]", "ctg(0)[int]", 0, 0},
		{"hvec(3 1 -8)[double]", "", 24, 24},
		{"struct(0,1,int 8,2,struct(0,1,double 8,1,char)24,1,byte)", "struct(0,1,int 8,2,struct(0,1,double 8,1,char) 24,1,byte)", 23, 40},
		{" // a comment [\n ctg ( 2\t) // and ) another\r\n\n[ int32\n ]//", "ctg(2)[int32]", 8, 8},
		{"subarray(1,2,4 2,2,4)[int64]", "", 32, 128},
		{"idxb(2:0 5)[uchar]", "idxb(2: 0 5)[uchar]", 4, 7},
		{"hidx(0,1 8,2)[unsigned]", "", 12, 16},
		{"resized(0,100)[ulonglong]", "", 8, 100},
	} {
		got, err := ddt.Parse(tt.text)
		if err != nil {
			t.Errorf("%q: %v", tt.text, err)
			continue
		}
		if tt.same == "" {
			tt.same = tt.text
		}
		if got.String() != tt.same || got.Size() != tt.size || got.Extent() != tt.extent {
			t.Errorf("%q is %v, size %d, extent %d; want %s, %d, %d", tt.text, got, got.Size(), got.Extent(), tt.same, tt.size, tt.extent)
		}
	}
}

// An error has its place, what was found, and what is wanted.
func TestParseErrors(t *testing.T) {
	for _, tt := range []struct{ text, want string }{
		{"", `1:1: found the end, want a type: a name such as int or double, or a constructor such as vec or struct`},
		{"flaot", `1:1: found "flaot", want a type: did you mean float?`},
		{"dobule", `1:1: found "dobule", want a type: did you mean double?`},
		{"ctg(2)[vce(2 1 3)[int]]", `1:8: ctg: found "vce", want a type: did you mean vec?`},
		{"ctg(2)[abc(2 1 3)[int]]", `1:8: ctg: found "abc", want a type: a name`},
		{"x", `1:1: found "x", want a type: a name`},
		{"hvce(2 1 3)[int]", `1:1: found "hvce", want a type: did you mean hvec?`},
		{"Int", `1:1: found "Int", want a type: here it is int`},
		{"VEC(2 1 3)[int]", `1:1: found "VEC", want a type: here it is vec, as in vec(count blocklen stride)[T]`},
		{"vector(", `1:1: found "vector", want a type: here it is vec, as in vec(`},
		{"MPI_Type_vector(4,2,5)", `1:1: found "MPI_Type_vector", want a type: here it is vec, as in vec(`},
		{"MPI_Type_create_struct(", `1:1: found "MPI_Type_create_struct", want a type: here it is struct, as in struct(displ`},
		{"MPI_DOUBLE", `1:1: found "MPI_DOUBLE", want a type: here it is double`},
		{"ctg(2)[MPI_INT]", `1:8: ctg: found "MPI_INT", want a type: here it is int`},
		{"MPI_INT64_T", `1:1: found "MPI_INT64_T", want a type: here it is int64`},
		{"MPI_2INT", `1:1: found "MPI_2INT", want a type: here it is int_int`},
		{"MPI_LONG_DOUBLE", `1:1: found "MPI_LONG_DOUBLE", want a type: here it is longdouble`},
		{"float64", `1:1: found "float64", want a type: here it is double`},
		{"ctg(2)[milc]", `1:8: ctg: found "milc", want a type: MILC is an application's datatype, which is no part of others`},
		{"halo", `1:1: found "halo", want a type: a name such as int or double, or a constructor such as vec or struct`},
		{"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", `1:1: found "aaaaaaaaaaaaaaaaaaaaaaaa"..., want a type: a name`},
		{"ctg(3)[5]", `1:8: ctg: found "5", want a type: `},
		{"ctg(3)[\n  flaot]", `2:3: ctg: found "flaot", want a type: `},
		{"null", `1:1: null is MPI_DATATYPE_NULL`},
		{"dup[null]", `1:5: null is MPI_DATATYPE_NULL`},
		{"int int", `1:5: found "int", want the end after one type`},
		{"ctg(2)[int]]", `1:12: found "]", want the end after one type`},
		{"ctg[int]", `1:4: ctg: found "[", want "("`},
		{"ctg()[int]", `1:5: ctg: found ")", want count`},
		{"ctg(2[int]", `1:6: ctg: found "[", want ")"`},
		{"ctg(2)int", `1:7: ctg: found "int", want "["`},
		{"ctg(2)[int", `1:11: ctg: found the end, want "]"`},
		{"ctg(2)[int)", `1:11: ctg: found ")", want "]"`},
		{"vec(2 1)[int]", `1:8: vec: found ")", want stride`},
		{"vec(2, 1, 3)[int]", `1:6: vec: found ",", want blocklen: spaces, not commas, between numbers`},
		{"vec(2 1 3 4)[int]", `1:11: vec: found "4", want ")"`},
		{"vec(2 - 3)[int]", `1:7: vec: found "-", want blocklen`},
		{"vec(1-1 3)[int]", `1:6: vec: found "-1" right after count, want a space between`},
		{"vec(1 2x 3)[int]", `1:8: vec: found "x" right after blocklen, want a space between`},
		{"ctg(1.5)[int]", `1:6: ctg: found ".", want ")"`},
		{"ctg(1:2)[int]", `1:8: ctg: found ")", want ":" and the last of a range first:step:last`},
		{"ctg(1::2)[int]", `1:7: ctg: found ":", want step of a range first:step:last`},
		{"ctg(1:0:2)[int]", `1:6: ctg: range with step 0: want 1 or more`},
		{"ctg(3:1:2)[int]", `1:6: ctg: range from 3 to 2 has no number`},
		{"idxb(1:1:2)[int]", `1:9: idxb: found ":", want displ or ")"`},
		{"ctg(9223372036854775808)[int]", `1:5: ctg: count "9223372036854775808" does not fit in 64 bits`},
		{"ctg(2)[resized(0,-99999999999999999999999999)[int]]", `1:18: resized: extent "-99999999999999999999999"... does not fit in 64 bits`},
		{"hidx(0,1 8)[int]", `1:11: hidx: found ")", want "," and blocklen`},
		{"hidx(0,1,2,3)[int]", `1:9: hidx: found ",", want displ or ")"`},
		{"hidx(0,1 8,1[int]", `1:13: hidx: found "[", want displ or ")"`},
		{"idxb(1 2 3)[int]", `1:8: idxb: found "2", want ":"`},
		{"struct(0,1,int)[int]", `1:16: found "[", want the end after one type`},
		{"struct(0,int)", `1:10: struct: found "int", want blocklen`},
		{"struct(0,1,ctg(1)[int]", `1:23: struct: found the end, want displ or ")"`},
		{"struct(0,1,int,8,1,int)", `1:15: struct: found ",", want displ or ")"`},
		{"subarray(1,2)[int]", `1:13: subarray: found ")", want "," and size`},
		{"darray(4 0: 9,blocks,4)[int]", `1:15: darray: found "blocks", want block, cyclic or none`},
		{"darray(4: 9,block,4)[int]", `1:9: darray: found ":", want rank`},
		{"darray(4 0: 9,block:,4)[int]", `1:21: darray: found ",", want arg`},
		{"resized(0 4)[int]", `1:11: resized: found "4", want "," and extent`},
		{"dup(int)", `1:4: dup: found "(", want "["`},
		{"ctg(2)[\xff]", `1:8: ctg: found "\xff", want a type`},
		{"ctg(2)[é]", `1:8: ctg: found "é", want a type`},
		{"// only\n// comments", `2:12: found the end, want a type`},
		{"ctg(2)[int...", `1:11: ctg: found ".", want "]"`}, // what String cuts off
		{"/ ctg", `1:1: found "/", want a type`},

		// Of constructors: where they are, or a negative count.
		{"ctg(2)[vec(-1 1 1)[int]]", `1:12: vector of -1 blocks: want 0 or more`},
		{"vec(8 -1 8)[int]", `1:7: vector of blocks of -1 elements`},
		{"idx(-1,1 8,-2 9,-3)[int]", `1:12: indexed: entry 1 has -2 elements`},
		{"struct(0,1,int\n 8,1,ctg(-3)[int])", `2:10: contiguous of -3 elements`},
		{"struct(0,-2,int\n 8,1,ctg(3)[int])", `1:10: struct: entry 0 has -2 elements`},
		{"struct(0,-2,ctg(2)[int]\n 8,1,hvec(1 1 1)[int])", `1:10: struct: entry 0 has -2 elements`},
		{"ctg(4611686018427387904)[ctg(2)[int]]", `1:1: contiguous of 4611686018427387904 elements`},
		{"darray(4 9: 9,block,4)[int]", `1:1: `},
	} {
		got, err := ddt.Parse(tt.text)
		se := (*ddt.SyntaxError)(nil)
		if err == nil || !errors.As(err, &se) || !strings.HasPrefix(err.Error(), tt.want) {
			t.Errorf("%q is %v, error\n  %v, want\n  %s", tt.text, got, err, tt.want)
		}
	}
}

func TestRandomTypesRoundTrip(t *testing.T) {
	n := 3000
	if testing.Short() {
		n = 300
	}
	for seed := range n {
		d, _ := ddttest.Random(rand.New(rand.NewPCG(uint64(seed), 3)), ddttest.Options{})
		got, err := ddt.Parse(d.String())
		if err != nil {
			t.Fatalf("seed %d: %v: %v", seed, d, err)
		}
		if !sameContents(got, d) || got.String() != d.String() {
			t.Fatalf("seed %d: %v comes back as %v", seed, d, got)
		}
	}
}

// A normal form is text of the same grammar, for the same bytes in the same places.
func TestNormalFormsAreText(t *testing.T) {
	for seed := range 300 {
		d, count := ddttest.Random(rand.New(rand.NewPCG(uint64(seed), 4)), ddttest.Options{})
		c, err := ddt.Commit(d, count)
		if err != nil {
			t.Fatal(err)
		}
		n, err := ddt.Parse(c.String())
		if err != nil {
			t.Fatalf("seed %d: %v: %v", seed, c, err)
		}
		if !slices.Equal(ddttest.Places(n, 1), ddttest.Places(d, count)) {
			t.Fatalf("seed %d: %d times %v is not %v", seed, count, d, c)
		}
	}
}

// Long texts and deep ones are read, or refused, in proportion to their length.
func TestParseIsBounded(t *testing.T) {
	if testenv.Race {
		return // one thread, and minutes: make test runs it without
	}
	nested := func(n int) string { return strings.Repeat("ctg(1)[", n) + "int" + strings.Repeat("]", n) }
	d, err := ddt.Parse(nested(ddt.MaxDepth))
	if err != nil {
		t.Fatal(err)
	}
	if d.String() != nested(ddt.MaxDepth) {
		t.Error("a type as deep as can be comes back as another")
	}
	const entries = 1 << 17
	long := "hidxb(1:" + strings.Repeat(" 1234567", entries) + ")[int]"
	if d, err = ddt.Parse(long); err != nil {
		t.Fatal(err)
	}
	if len(d.Contents().Displs) != entries || d.String() != strings.Replace(long, ":", ": ", 1)[:9]+long[9:] {
		t.Error("a long list comes back as another")
	}
	for name, tt := range map[string]struct{ text, want string }{
		"deep":         {nested(ddt.MaxDepth + 1), fmt.Sprintf("1:%d: ctg is %d constructors deep", 7*ddt.MaxDepth+1, ddt.MaxDepth+1)},
		"deeper":       {strings.Repeat("ctg(1)[", 1<<20), fmt.Sprintf("1:%d: ctg is %d constructors deep", 7*ddt.MaxDepth+1, ddt.MaxDepth+1)},
		"structs":      {strings.Repeat("struct(0,1,", 1<<20), fmt.Sprintf("1:%d: struct is %d constructors deep", 11*ddt.MaxDepth+1, ddt.MaxDepth+1)},
		"long":         {strings.Repeat(" ", ddt.MaxText+1), "1:1: text of 67108865 bytes: want 67108864 or fewer"},
		"entries":      {"hidxb(1:" + strings.Repeat(" 0", ddt.MaxEntries+1) + ")[int]", fmt.Sprintf("1:%d: hidxb: more entries than %d", 9+2*ddt.MaxEntries+1, ddt.MaxEntries)},
		"constructors": {"struct(" + strings.Repeat("0,1,dup[int] ", ddt.MaxTypes) + ")", fmt.Sprintf("1:%d: dup is constructor number %d", 7+13*(ddt.MaxTypes-1)+5, ddt.MaxTypes+1)},
	} {
		if _, err := ddt.Parse(tt.text); err == nil || !strings.HasPrefix(err.Error(), tt.want) || len(err.Error()) > 200 {
			t.Errorf("%s: error is %.300v, want %s", name, err, tt.want)
		}
	}
}

// A type that is shared over and over has more text than there is memory.
func TestStringIsBounded(t *testing.T) {
	if testenv.Race {
		return // one thread, and minutes: make test runs it without
	}
	double := func(d *ddt.Type) *ddt.Type {
		return must(t)(ddt.Struct([]int64{1, 0}, []int64{0, 0}, []*ddt.Type{d, d}))
	}
	d := ddt.Int
	for range 100 {
		d = double(d)
	}
	if s := d.String(); !strings.HasPrefix(s, "struct(0,1,struct(") || !strings.HasSuffix(s, "...") || len(s) > ddt.MaxText+3 || strings.Count(s, "struct") > ddt.MaxTypes {
		t.Errorf("%d characters, ends in %q", len(s), s[max(0, len(s)-20):])
	}
	const far = -1 << 62 // many digits
	d = must(t)(ddt.HIndexedBlock(1, slices.Repeat([]int64{far}, ddt.MaxText/60), ddt.Int))
	d = must(t)(ddt.Struct([]int64{1, 1, 1, 1}, []int64{0, 0, 0, 0}, []*ddt.Type{d, d, d, d}))
	if s := d.String(); len(s) != ddt.MaxText+3 || !strings.HasSuffix(s, "...") {
		t.Errorf("%d characters, end in %q", len(s), s[max(0, len(s)-20):])
	}
}

func FuzzParse(f *testing.F) {
	for _, text := range []string{
		"hvec(2 1 18432)[hvec(2 1 12288)[hvec(2 1 6144)[vec(32 6 8)[ctg(18)[float]]]]]",
		"idx(0,1 5,2)[hidx(-8,1)[idxb(2: 0 5)[hidxb(1: 3 4)[double]]]]",
		"struct(0,1,int 8,2,struct(0,1,double 8,1,char)24,1,byte)",
		"subarray(1,2,4 2,2,4)[subarrayf(0,1,2)[dup[int]]]",
		"darray(6 5: 10,block,2 11,cyclic:4,3 12,none,1)[darrayf(1 0: 3,block:3,1)[byte]]",
		"resized(-8,24)[longdouble] // end",
		"vec(2:3:9 1 -4:4:64)\n[int_int]",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		d, err := ddt.Parse(text)
		if err != nil {
			var se *ddt.SyntaxError
			if !errors.As(err, &se) {
				t.Fatalf("%v is no SyntaxError", err)
			}
			lines := strings.Split(text, "\n")
			if se.Line < 1 || se.Line > len(lines) || se.Column < 1 || se.Column > len(lines[se.Line-1])+1 {
				t.Fatalf("%v is outside of the text", err)
			}
			return
		}
		again, err := ddt.Parse(d.String())
		if err != nil || !sameContents(d, again) || d.String() != again.String() {
			t.Fatalf("%v comes back as %v, %v", d, again, err)
		}
	})
}
