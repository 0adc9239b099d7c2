// SPDX-License-Identifier: Apache-2.0

package ddt

import (
	"fmt"
	"slices"
	"strings"
)

// constructors are how texts write them: what follows the name.
var constructors = map[Combiner]string{
	CombinerContiguous:    "(count)[T]",
	CombinerVector:        "(count blocklen stride)[T]",
	CombinerHVector:       "(count blocklen stride)[T]",
	CombinerIndexed:       "(displ,blocklen ...)[T]",
	CombinerHIndexed:      "(displ,blocklen ...)[T]",
	CombinerIndexedBlock:  "(blocklen: displ ...)[T]",
	CombinerHIndexedBlock: "(blocklen: displ ...)[T]",
	CombinerStruct:        "(displ,blocklen,T ...)",
	CombinerSubarray:      "(start,subsize,size ...)[T]",
	CombinerSubarrayF:     "(start,subsize,size ...)[T]",
	CombinerDarray:        "(size rank: gsize,distrib,psize ...)[T]",
	CombinerDarrayF:       "(size rank: gsize,distrib,psize ...)[T]",
	CombinerResized:       "(lb,extent)[T]",
	CombinerDup:           "[T]",
}

// elsewhere are names that MPI and languages have for what has another name here: in
// lower case, without mpi_, type_ and create_.
var elsewhere = map[string]string{
	"contiguous": "ctg", "contig": "ctg", "vector": "vec", "hvector": "hvec",
	"indexed": "idx", "hindexed": "hidx", "indexed_block": "idxb", "hindexed_block": "hidxb",

	"signed_char": "schar", "unsigned_char": "uchar", "unsigned_short": "ushort",
	"unsigned_int": "unsigned", "unsigned_long": "ulong", "unsigned_long_long": "ulonglong",
	"long_long": "longlong", "long_long_int": "longlong", "long_double": "longdouble",
	"long_double_int": "longdouble_int", "2int": "int_int",
	"c_bool": "bool", "c_complex": "cfloat", "c_float_complex": "cfloat",
	"c_double_complex": "cdouble", "c_long_double_complex": "clongdouble",
	"datatype_null": "null",

	"uint": "unsigned", "size_t": "ulong", "float32": "float", "float64": "double",
	"complex64": "cfloat", "complex128": "cdouble",
}

// hint returns what somebody may have meant by a word that is no type, or "".
func hint(word string) string {
	lower := strings.ToLower(word)
	name, mpi := strings.CutPrefix(lower, "mpi_")
	name = strings.TrimPrefix(strings.TrimPrefix(name, "type_"), "create_")
	for _, s := range []string{elsewhere[name], name, strings.TrimSuffix(name, "_t")} {
		syntax, constructor := constructors[Combiner(s)]
		switch _, known := Lookup(s); {
		case constructor:
			return fmt.Sprintf("here it is %s, as in %s%s", s, s, syntax)
		case known:
			return "here it is " + s
		}
	}
	for _, a := range apps {
		if strings.EqualFold(a.Name, word) {
			return a.Name + " is an application's datatype, which is no part of others"
		}
	}
	if mpi {
		return ""
	}
	// Two letters of a short word are most of it.
	least, like := min(3, 1+(len(lower)+1)/4), ""
	consider := func(s string) {
		if d := distance(lower, strings.ToLower(s), least); d < least {
			least, like = d, s
		}
	}
	for _, s := range Predefined() {
		consider(s)
	}
	for _, c := range combiners {
		consider(string(c))
	}
	for _, a := range apps {
		consider(a.Name)
	}
	if like == "" {
		return ""
	}
	return "did you mean " + like + "?"
}

// distance returns how many letters are to be changed, added, taken away or swapped with
// the next one to make b of a, or most if it is that or more.
func distance(a, b string, most int) int {
	if len(a)-len(b) >= most || len(b)-len(a) >= most {
		return most
	}
	d := make([][]int, len(a)+1) // d[i][j] is from a[:i] to b[:j]
	for i := range d {
		d[i] = make([]int, len(b)+1)
		for j := range d[i] {
			switch {
			case i == 0 || j == 0:
				d[i][j] = i + j
			case a[i-1] == b[j-1]:
				d[i][j] = d[i-1][j-1]
			default:
				d[i][j] = 1 + min(d[i-1][j-1], d[i-1][j], d[i][j-1])
				if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
					d[i][j] = min(d[i][j], 1+d[i-2][j-2])
				}
			}
		}
	}
	return min(most, d[len(a)][len(b)])
}

// combiners are the constructors in the order of MPI.
var combiners = []Combiner{
	CombinerContiguous, CombinerVector, CombinerHVector, CombinerIndexed, CombinerHIndexed,
	CombinerIndexedBlock, CombinerHIndexedBlock, CombinerStruct, CombinerSubarray,
	CombinerSubarrayF, CombinerDarray, CombinerDarrayF, CombinerResized, CombinerDup,
}

func isConstructor(word string) bool { return slices.Contains(combiners, Combiner(word)) }
