// SPDX-License-Identifier: Apache-2.0

package ddt

// A Kind is what a Node is.
type Kind uint8

// Kinds of nodes. In each, stream order is the order of parts.
const (
	Contig Kind = iota // Size bytes in a row, at the origin
	Vector             // Count times Child, Stride bytes apart, the first at the origin
	Index              // Child at each of Displs
	List               // parts of different lengths, at Displs
)

// A Node is a part of a normal form. It is plain data: whoever wants to interpret it
// elsewhere, in a kernel program say, finds all there is to know in its fields. Places
// are in bytes from the node's own origin.
//
// Nodes are shared: a tree may be a graph.
type Node struct {
	Kind   Kind
	Size   int64 // bytes of the stream, at least 1
	Lo, Hi int64 // it touches bytes Lo to Hi-1 and none outside
	Blocks int64 // pieces in a row that it is placed in; saturates
	Depth  int   // of nodes, 1 for Contig

	Count  int64   // Vector: at least 2. Index and List: len(Displs)
	Stride int64   // Vector; may be negative
	Displs []int64 // Index, List; at least 2
	Child  *Node   // Vector, Index

	// List: part i has the stream's bytes Starts[i] to Starts[i+1]-1. It is
	// Children[i], or if there are no Children as many bytes in a row.
	Starts   []int64
	Children []*Node
}

// A Committed is some elements of a type in normal form. It does not change.
type Committed struct {
	typ    *Type
	count  int64
	root   *Node // nil: no bytes
	origin int64 // of root, from the buffer's
}

// Commit brings count elements of a type to normal form: what is a vector, however it was
// written, becomes one, and what touches becomes one block. It takes time and memory in
// proportion to what was written, not to what that describes.
func Commit(t *Type, count int64) (*Committed, error) { panic("not yet") }

// Type returns what was committed.
func (c *Committed) Type() *Type { return c.typ }

// Count returns how many elements of the type it has.
func (c *Committed) Count() int64 { return c.count }

// Root returns the normal form, and how far it is from the buffer's origin. Without any
// bytes there is none.
func (c *Committed) Root() (root *Node, origin int64) { return c.root, c.origin }

// Size returns how many bytes the stream has.
func (c *Committed) Size() int64 { panic("not yet") }

// Bounds returns which bytes it touches, from the buffer's origin: lo to hi-1.
func (c *Committed) Bounds() (lo, hi int64) { panic("not yet") }

// Blocks returns in how many pieces in a row the stream is placed.
func (c *Committed) Blocks() int64 { panic("not yet") }

// Memory returns how many bytes the normal form takes.
func (c *Committed) Memory() int64 { panic("not yet") }

// String writes the normal form, in the grammar of Parse.
func (c *Committed) String() string { panic("not yet") }

// Unpack puts bytes of the stream, from position first on, where they belong. mem[origin]
// is the buffer's origin: the place of displacement 0. It returns in how many pieces. An
// error wraps ErrBounds, and nothing is written then: bytes that the stream does not have,
// or a type that reaches outside of mem, even if these bytes do not.
//
// Where a type overlaps itself, later bytes of stream win.
func (c *Committed) Unpack(mem []byte, origin, first int64, stream []byte) (copies int64, err error) {
	panic("not yet")
}

// Pack fills stream with the bytes of the stream from position first on. It is Unpack the
// other way round.
func (c *Committed) Pack(stream, mem []byte, origin, first int64) (copies int64, err error) {
	panic("not yet")
}

// Each calls f for the pieces of bytes first to last-1 of the stream in order, until it
// returns false: n bytes in a row, at off from the buffer's origin. Neighbouring pieces
// may touch.
func (c *Committed) Each(first, last int64, f func(off, n int64) bool) { panic("not yet") }
