// SPDX-License-Identifier: Apache-2.0

package ddt

// The predefined types, by the C ABI of amd64 Linux. Lookup finds them, and those of
// Fortran and of pairs, by the names that they have in Parse.
var (
	Byte       *Type
	Char       *Type
	Int        *Type
	Float      *Type
	Double     *Type
	LongDouble *Type
)

// Lookup returns the predefined type of a name.
func Lookup(name string) (t *Type, ok bool) { panic("not yet") }

// Predefined returns the names of all predefined types.
func Predefined() []string { panic("not yet") }

// Contiguous is MPI_Type_contiguous. Like all constructors it refuses negative counts,
// and sizes, places and extents beyond 64 bits.
func Contiguous(count int64, t *Type) (*Type, error) { panic("not yet") }

// NewVector is MPI_Type_vector: the stride is in extents of t.
func NewVector(count, blocklen, stride int64, t *Type) (*Type, error) { panic("not yet") }

// HVector is MPI_Type_create_hvector: the stride is in bytes.
func HVector(count, blocklen, stride int64, t *Type) (*Type, error) { panic("not yet") }

// Indexed is MPI_Type_indexed: displacements are in extents of t.
func Indexed(blocklens, displs []int64, t *Type) (*Type, error) { panic("not yet") }

// HIndexed is MPI_Type_create_hindexed: displacements are in bytes.
func HIndexed(blocklens, displs []int64, t *Type) (*Type, error) { panic("not yet") }

// IndexedBlock is MPI_Type_create_indexed_block.
func IndexedBlock(blocklen int64, displs []int64, t *Type) (*Type, error) { panic("not yet") }

// HIndexedBlock is MPI_Type_create_hindexed_block.
func HIndexedBlock(blocklen int64, displs []int64, t *Type) (*Type, error) { panic("not yet") }

// Struct is MPI_Type_create_struct: displacements are in bytes. As with MPICH, unless a
// bound was set by Resized its extent is rounded up to the widest alignment in it.
func Struct(blocklens, displs []int64, types []*Type) (*Type, error) { panic("not yet") }

// Subarray is MPI_Type_create_subarray.
func Subarray(sizes, subsizes, starts []int64, o Order, t *Type) (*Type, error) { panic("not yet") }

// Darray is MPI_Type_create_darray.
func Darray(size, rank int64, gsizes []int64, distribs []Distribution, dargs, psizes []int64, o Order, t *Type) (*Type, error) {
	panic("not yet")
}

// Resized is MPI_Type_create_resized.
func Resized(t *Type, lb, extent int64) (*Type, error) { panic("not yet") }

// Dup is MPI_Type_dup.
func Dup(t *Type) *Type { panic("not yet") }
