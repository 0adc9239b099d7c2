// SPDX-License-Identifier: Apache-2.0

package ddt

// Parse reads a type as text. The grammar is FPsPIN's (all but those marked *):
//
//	byte char short int long float double ...   predefined, see Predefined
//	ctg(count)[T]                               Contiguous
//	vec(count blocklen stride)[T]               NewVector, the stride in extents
//	hvec(count blocklen stride)[T]              HVector, the stride in bytes
//	idx(displ,blocklen ...)[T]                  Indexed, in extents *
//	hidx(displ,blocklen ...)[T]                 HIndexed, in bytes
//	idxb(blocklen: displ ...)[T]                IndexedBlock, in extents
//	hidxb(blocklen: displ ...)[T]               HIndexedBlock, in bytes *
//	struct(displ,blocklen,T ...)                Struct, in bytes
//	subarray(start,subsize,size ...)[T]         Subarray, C order
//	subarrayf(start,subsize,size ...)[T]        Subarray, Fortran order *
//	darray(size rank: gsize,distrib,psize ...)[T]  Darray, C order; distrib is
//	                                            block, block:arg, cyclic, cyclic:arg or none *
//	darrayf(...)[T]                             Fortran order *
//	resized(lb,extent)[T]                       Resized
//	dup[T]                                      Dup *
//
// A number of ctg, vec and hvec may be a range first:step:last, of which the first is
// taken. A comment begins with // and ends with its line. Errors are *SyntaxError.
func Parse(text string) (*Type, error) { panic("not yet") }

// A SyntaxError says where a text is no type, and why.
type SyntaxError struct {
	Line, Column int // from 1, in bytes
	Err          error
}

// String writes the type so that Parse reads the same.
func (t *Type) String() string { panic("not yet") }
