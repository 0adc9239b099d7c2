// SPDX-License-Identifier: Apache-2.0

// Package ddt knows MPI's derived datatypes: where in memory each byte of a message
// belongs. It needs neither MPI nor a NIC.
//
// A Type is built by constructors that are MPI's (MPI 3.1, chapter 4), or parsed from
// text. Commit brings some elements of it to a normal form, a Committed, which any number
// of goroutines may use at once to unpack any range of the stream, in any order, and to
// pack it. A Placement does the same with one of the strategies of the SC 2019 paper
// (section 3.2), to which Committed is the answer.
package ddt

// An Order says which index of an array is the fastest.
type Order int

// Orders.
const (
	C       Order = iota // the last index
	Fortran              // the first index
)

// A Distribution says how Darray gives a dimension to processes.
type Distribution int

// Distributions.
const (
	Block Distribution = iota
	Cyclic
	Whole // MPI_DISTRIBUTE_NONE
)

// DefaultArg is MPI_DISTRIBUTE_DFLT_DARG.
const DefaultArg = -1

// Limits of types. An error of a constructor that meets one names it.
const (
	MaxEntries = 1 << 24 // of an index list or a struct
	MaxDepth   = 4096    // of constructors in each other
)

// A Type is an MPI datatype. It does not change, and may be shared. Two types are
// interchangeable if their String is the same.
type Type struct {
	contents Contents // as it was written
	parts             // as it is meant

	size           int64 // bytes of the stream
	lb, ub         int64 // of what it occupies, in bytes from its origin; set by Resized
	trueLB, trueUB int64 // of what it really touches; both 0 for no bytes
	align          int64 // of the widest predefined type in it, by the C ABI of amd64
	depth          int   // of constructors
	resized        bool  // lb and ub were set somewhere: structs do not pad
}

// parts are what a type consists of, in the order of the stream, whatever constructor
// made it. There are four kinds.
type parts struct {
	kind partsKind

	// regular: count times blocklen times child, the blocks stride bytes apart, and
	// child's extent from one child to the next.
	count, blocklen, stride int64

	// listed: entry i is blocklens[i] times children[i], displs[i] bytes from the
	// origin. One blocklen, or one child, is that of all entries.
	blocklens, displs []int64
	children          []*Type
}

type partsKind uint8

const (
	predefined partsKind = iota // size bytes at 0. Pair types are listed, and predefined by name only
	regular                     // children[0]
	listed
	same // children[0], with other bounds
)

// Size returns how many bytes it takes in the stream.
func (t *Type) Size() int64 { return t.size }

// Extent returns how far apart two of them in a row are.
func (t *Type) Extent() int64 { return t.ub - t.lb }

// LB returns the lower bound, which may be negative.
func (t *Type) LB() int64 { return t.lb }

// UB returns the upper bound.
func (t *Type) UB() int64 { return t.ub }

// TrueLB returns the place of the first byte that it touches, from its origin.
func (t *Type) TrueLB() int64 { return t.trueLB }

// TrueExtent returns how many bytes there are from the first that it touches to the last.
func (t *Type) TrueExtent() int64 { return t.trueUB - t.trueLB }
