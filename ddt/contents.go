// SPDX-License-Identifier: Apache-2.0

package ddt

// A Combiner is the constructor that made a type, by the name that it has in Parse.
type Combiner string

// Combiners.
const (
	CombinerNamed         Combiner = ""          // predefined: Name
	CombinerContiguous    Combiner = "ctg"       // Count
	CombinerVector        Combiner = "vec"       // Count, Blocklen, Stride in extents
	CombinerHVector       Combiner = "hvec"      // Count, Blocklen, Stride in bytes
	CombinerIndexed       Combiner = "idx"       // Blocklens, Displs in extents
	CombinerHIndexed      Combiner = "hidx"      // Blocklens, Displs in bytes
	CombinerIndexedBlock  Combiner = "idxb"      // Blocklen, Displs in extents
	CombinerHIndexedBlock Combiner = "hidxb"     // Blocklen, Displs in bytes
	CombinerStruct        Combiner = "struct"    // Blocklens, Displs in bytes, Types
	CombinerSubarray      Combiner = "subarray"  // Sizes, Subsizes, Starts; C order
	CombinerSubarrayF     Combiner = "subarrayf" // the same in Fortran order
	CombinerDarray        Combiner = "darray"    // Count processes, Rank, Sizes, Distribs, Dargs, Psizes; C order
	CombinerDarrayF       Combiner = "darrayf"   // the same in Fortran order
	CombinerResized       Combiner = "resized"   // LB, Extent
	CombinerDup           Combiner = "dup"
)

// long returns the constructor's name in MPI.
func (c Combiner) long() string {
	switch c {
	case CombinerContiguous:
		return "contiguous"
	case CombinerVector:
		return "vector"
	case CombinerHVector:
		return "hvector"
	case CombinerIndexed:
		return "indexed"
	case CombinerHIndexed:
		return "hindexed"
	case CombinerIndexedBlock:
		return "indexed_block"
	case CombinerHIndexedBlock:
		return "hindexed_block"
	case CombinerSubarrayF:
		return "subarray"
	case CombinerDarrayF:
		return "darray"
	}
	return string(c)
}

// Contents are what a constructor was given, as MPI_Type_get_contents has them. The
// slices are the type's own: leave them alone.
type Contents struct {
	Combiner Combiner
	Name     string // predefined types

	Count, Blocklen, Stride int64
	Blocklens, Displs       []int64
	Sizes, Subsizes, Starts []int64 // arrays; Sizes of Darray as well

	Rank     int64
	Distribs []Distribution
	Dargs    []int64
	Psizes   []int64

	LB, Extent int64

	Types []*Type // what it is made of: one, but of Struct
}

// Contents returns how the type was made.
func (t *Type) Contents() Contents { return t.contents }
