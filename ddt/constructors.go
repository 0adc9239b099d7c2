// SPDX-License-Identifier: Apache-2.0

package ddt

import (
	"fmt"
	"slices"
)

// Contiguous is MPI_Type_contiguous. Like all constructors it refuses negative counts,
// and sizes, places and extents beyond 64 bits.
func Contiguous(count int64, t *Type) (*Type, error) {
	if err := elements("contiguous", count, t); err != nil {
		return nil, err
	}
	c := Contents{Combiner: CombinerContiguous, Count: count, Types: []*Type{t}}
	return newRegular(c, 1, count, 0)
}

// NewVector is MPI_Type_vector: the stride is in extents of t.
func NewVector(count, blocklen, stride int64, t *Type) (*Type, error) {
	if err := blocks("vector", count, blocklen, t); err != nil {
		return nil, err
	}
	bytes, ok := mul(stride, t.Extent())
	if !ok {
		return nil, fmt.Errorf("vector with a stride of %d extents of %d bytes: too far for 64 bits",
			stride, t.Extent())
	}
	c := Contents{Combiner: CombinerVector, Count: count, Blocklen: blocklen, Stride: stride, Types: []*Type{t}}
	return newRegular(c, count, blocklen, bytes)
}

// HVector is MPI_Type_create_hvector: the stride is in bytes.
func HVector(count, blocklen, stride int64, t *Type) (*Type, error) {
	if err := blocks("hvector", count, blocklen, t); err != nil {
		return nil, err
	}
	c := Contents{Combiner: CombinerHVector, Count: count, Blocklen: blocklen, Stride: stride, Types: []*Type{t}}
	return newRegular(c, count, blocklen, stride)
}

// Indexed is MPI_Type_indexed: displacements are in extents of t.
func Indexed(blocklens, displs []int64, t *Type) (*Type, error) {
	if err := lists("indexed", blocklens, displs, t); err != nil {
		return nil, err
	}
	bytes, err := inBytes("indexed", displs, t)
	if err != nil {
		return nil, err
	}
	c := Contents{
		Combiner:  CombinerIndexed,
		Blocklens: slices.Clone(blocklens),
		Displs:    slices.Clone(displs),
		Types:     []*Type{t},
	}
	return newListed(c, parts{blocklens: c.Blocklens, displs: bytes, children: c.Types})
}

// HIndexed is MPI_Type_create_hindexed: displacements are in bytes.
func HIndexed(blocklens, displs []int64, t *Type) (*Type, error) {
	if err := lists("hindexed", blocklens, displs, t); err != nil {
		return nil, err
	}
	c := Contents{
		Combiner:  CombinerHIndexed,
		Blocklens: slices.Clone(blocklens),
		Displs:    slices.Clone(displs),
		Types:     []*Type{t},
	}
	return newListed(c, parts{blocklens: c.Blocklens, displs: c.Displs, children: c.Types})
}

// IndexedBlock is MPI_Type_create_indexed_block: displacements are in extents of t.
func IndexedBlock(blocklen int64, displs []int64, t *Type) (*Type, error) {
	if err := sameBlocks("indexed_block", blocklen, displs, t); err != nil {
		return nil, err
	}
	bytes, err := inBytes("indexed_block", displs, t)
	if err != nil {
		return nil, err
	}
	c := Contents{
		Combiner: CombinerIndexedBlock,
		Blocklen: blocklen,
		Displs:   slices.Clone(displs),
		Types:    []*Type{t},
	}
	return newListed(c, parts{blocklens: []int64{blocklen}, displs: bytes, children: c.Types})
}

// HIndexedBlock is MPI_Type_create_hindexed_block: displacements are in bytes.
func HIndexedBlock(blocklen int64, displs []int64, t *Type) (*Type, error) {
	if err := sameBlocks("hindexed_block", blocklen, displs, t); err != nil {
		return nil, err
	}
	c := Contents{
		Combiner: CombinerHIndexedBlock,
		Blocklen: blocklen,
		Displs:   slices.Clone(displs),
		Types:    []*Type{t},
	}
	return newListed(c, parts{blocklens: []int64{blocklen}, displs: c.Displs, children: c.Types})
}

// Struct is MPI_Type_create_struct: displacements are in bytes.
//
// If bounds were set by Resized, Subarray or Darray somewhere in it, these alone make its
// bounds, whatever else there is (MPI 3.1, section 4.1.6). Otherwise its extent is rounded
// up to the widest alignment in it; of all constructors only this one does so. Where MPICH
// differs docs/datatypes.md says.
func Struct(blocklens, displs []int64, types []*Type) (*Type, error) {
	if len(types) != len(displs) {
		return nil, fmt.Errorf("struct of %d types at %d displacements: want as many", len(types), len(displs))
	}
	if err := counts("struct", blocklens, displs); err != nil {
		return nil, err
	}
	for i, t := range types {
		if err := usable("struct", t); err != nil {
			return nil, fmt.Errorf("entry %d: %w", i, err)
		}
	}
	c := Contents{
		Combiner:  CombinerStruct,
		Blocklens: slices.Clone(blocklens),
		Displs:    slices.Clone(displs),
		Types:     slices.Clone(types),
	}
	return newListed(c, parts{blocklens: c.Blocklens, displs: c.Displs, children: c.Types})
}

// Resized is MPI_Type_create_resized. The extent may be negative.
func Resized(t *Type, lb, extent int64) (*Type, error) {
	if err := usable("resized", t); err != nil {
		return nil, err
	}
	ub, ok := add(lb, extent)
	if !ok {
		return nil, fmt.Errorf("resized with a lower bound of %d and an extent of %d: ends beyond 64 bits", lb, extent)
	}
	c := Contents{Combiner: CombinerResized, LB: lb, Extent: extent, Types: []*Type{t}}
	return newSame(c, t, lb, ub)
}

// Dup is MPI_Type_dup. Of nil, of null and of what is MaxDepth deep it returns t itself.
func Dup(t *Type) *Type {
	if t == nil || t == null || t.depth == MaxDepth {
		return t
	}
	d := *t
	d.contents = Contents{Combiner: CombinerDup, Types: []*Type{t}}
	d.parts = parts{kind: same, children: d.contents.Types}
	d.depth++
	return &d
}

// newRegular returns count blocks of blocklen elements, stride bytes apart, of the type
// that c has.
func newRegular(c Contents, count, blocklen, stride int64) (*Type, error) {
	child := c.Types[0]
	if count == 0 || blocklen == 0 {
		count, blocklen, stride = 0, 0, 0
	}
	t := &Type{
		contents: c,
		parts:    parts{kind: regular, count: count, blocklen: blocklen, stride: stride, children: c.Types},
	}
	var b bounds
	n, ok := mul(count, blocklen)
	lo, hi, ok2 := span(count, stride)
	ok = ok && ok2 && b.add(lo, hi, n, blocklen, child)
	if !ok || !b.fit() {
		if c.Combiner == CombinerContiguous {
			return nil, fmt.Errorf("contiguous of %d elements of %d bytes, extent %d: too large for 64 bits",
				blocklen, child.size, child.Extent())
		}
		return nil, fmt.Errorf("%s of %d blocks of %d elements of %d bytes, extent %d, with a stride of %d bytes: too large for 64 bits",
			c.Combiner.long(), count, blocklen, child.size, child.Extent(), stride)
	}
	return b.finish(t)
}

// newListed returns what p lists.
func newListed(c Contents, p parts) (*Type, error) {
	p.kind = listed
	t := &Type{contents: c, parts: p}
	var b bounds
	for i, displ := range p.displs {
		blocklen, child := p.entry(i)
		if !b.add(displ, displ, blocklen, blocklen, child) || !b.fit() {
			return nil, fmt.Errorf("%s: entry %d, %d elements of %d bytes, extent %d, at %d: too large or too far for 64 bits",
				c.Combiner.long(), i, blocklen, child.size, child.Extent(), displ)
		}
	}
	if c.Combiner == CombinerStruct && !b.round() {
		return nil, fmt.Errorf("struct from %d to %d: with its padding too large for 64 bits", b.lb, b.ub)
	}
	return b.finish(t)
}

// newSame returns child with other bounds.
func newSame(c Contents, child *Type, lb, ub int64) (*Type, error) {
	t := *child
	t.contents = c
	t.parts = parts{kind: same, children: []*Type{child}}
	t.lb, t.ub, t.resized = lb, ub, true
	t.depth++
	return checkDepth(&t)
}

// Bounds of a type, as its elements come in.
type bounds struct {
	size           int64
	lb, ub         int64
	trueLB, trueUB int64
	align          int64
	depth          int
	bounded        bool // there are lb and ub
	resized        bool // and they were set
}

// add tells of n elements of a type, in blocks of blocklen, that begin at lo to hi. It
// reports whether all that comes of it fits into 64 bits.
func (b *bounds) add(lo, hi, n, blocklen int64, t *Type) bool {
	b.depth = max(b.depth, t.depth)
	if n == 0 || t.empty() {
		return true
	}
	size, ok := mul(n, t.size)
	if !ok {
		return false
	}
	if b.size, ok = add(b.size, size); !ok {
		return false
	}
	first, last, ok := span(blocklen, t.Extent())
	if !ok {
		return false
	}
	if lo, ok = add(lo, first); !ok {
		return false
	}
	if hi, ok = add(hi, last); !ok {
		return false
	}
	if t.size > 0 {
		trueLB, ok1 := add(lo, t.trueLB)
		trueUB, ok2 := add(hi, t.trueUB)
		if !ok1 || !ok2 {
			return false
		}
		if b.size == size {
			b.trueLB, b.trueUB = trueLB, trueUB
		}
		b.trueLB = min(b.trueLB, trueLB)
		b.trueUB = max(b.trueUB, trueUB)
		b.align = max(b.align, t.align)
	}
	if b.resized && !t.resized {
		return true // what was set is all that counts
	}
	lb, ok1 := add(lo, t.lb)
	ub, ok2 := add(hi, t.ub)
	if !ok1 || !ok2 {
		return false
	}
	if !b.bounded || b.resized != t.resized {
		b.lb, b.ub = lb, ub
	}
	b.lb = min(b.lb, lb)
	b.ub = max(b.ub, ub)
	b.bounded, b.resized = true, t.resized
	return true
}

// fit reports whether the extents fit.
func (b *bounds) fit() bool {
	_, ok1 := sub(b.ub, b.lb)
	_, ok2 := sub(b.trueUB, b.trueLB)
	return ok1 && ok2
}

// round makes the extent what C makes of a struct, and reports whether it fits.
func (b *bounds) round() (ok bool) {
	if b.resized || b.size == 0 {
		return true
	}
	if over := (b.ub - b.lb) % b.align; over > 0 {
		if b.ub, ok = add(b.ub, b.align-over); !ok {
			return false
		}
	}
	return b.fit()
}

// finish gives the bounds to t.
func (b *bounds) finish(t *Type) (*Type, error) {
	t.size = b.size
	t.lb, t.ub = b.lb, b.ub
	t.trueLB, t.trueUB = b.trueLB, b.trueUB
	t.align = max(b.align, 1)
	t.depth = b.depth + 1
	t.resized = b.resized
	return checkDepth(t)
}

// empty reports whether a type map has no entries, not even bounds. Such a type is
// nowhere.
func (t *Type) empty() bool { return t.size == 0 && !t.resized }

// entry returns entry i of a list.
func (p *parts) entry(i int) (blocklen int64, child *Type) {
	blocklen, child = p.blocklens[0], p.children[0]
	if len(p.blocklens) > 1 {
		blocklen = p.blocklens[i]
	}
	if len(p.children) > 1 {
		child = p.children[i]
	}
	return blocklen, child
}

// usable says what is wrong with a type that a constructor was given.
func usable(what string, t *Type) error {
	if t == nil {
		return fmt.Errorf("%s of a nil type: want a type", what)
	}
	if t == null {
		return fmt.Errorf("%s of null, which is MPI_DATATYPE_NULL: want a type", what)
	}
	return nil
}

func checkDepth(t *Type) (*Type, error) {
	if t.depth > MaxDepth {
		return nil, fmt.Errorf("%s makes it %d constructors deep: want %d at most",
			t.contents.Combiner.long(), t.depth, MaxDepth)
	}
	return t, nil
}

func elements(what string, count int64, t *Type) error {
	if count < 0 {
		return fmt.Errorf("%s of %d elements: want 0 or more", what, count)
	}
	return usable(what, t)
}

func blocks(what string, count, blocklen int64, t *Type) error {
	if count < 0 {
		return fmt.Errorf("%s of %d blocks: want 0 or more", what, count)
	}
	if blocklen < 0 {
		return fmt.Errorf("%s of blocks of %d elements: want 0 or more", what, blocklen)
	}
	return usable(what, t)
}

func sameBlocks(what string, blocklen int64, displs []int64, t *Type) error {
	if len(displs) > MaxEntries {
		return fmt.Errorf("%s of %d entries: want %d at most", what, len(displs), MaxEntries)
	}
	return blocks(what, int64(len(displs)), blocklen, t)
}

func lists(what string, blocklens, displs []int64, t *Type) error {
	if err := counts(what, blocklens, displs); err != nil {
		return err
	}
	return usable(what, t)
}

func counts(what string, blocklens, displs []int64) error {
	if len(blocklens) != len(displs) {
		return fmt.Errorf("%s of %d block lengths at %d displacements: want as many", what, len(blocklens), len(displs))
	}
	if len(displs) > MaxEntries {
		return fmt.Errorf("%s of %d entries: want %d at most", what, len(displs), MaxEntries)
	}
	for i, n := range blocklens {
		if n < 0 {
			return fmt.Errorf("%s: entry %d has %d elements: want 0 or more", what, i, n)
		}
	}
	return nil
}

// inBytes returns displacements in bytes that are given in extents of t.
func inBytes(what string, displs []int64, t *Type) ([]int64, error) {
	bytes := make([]int64, len(displs))
	for i, d := range displs {
		var ok bool
		if bytes[i], ok = mul(d, t.Extent()); !ok {
			return nil, fmt.Errorf("%s: entry %d at %d extents of %d bytes: too far for 64 bits", what, i, d, t.Extent())
		}
	}
	return bytes, nil
}

// span returns the least and the greatest of 0, stride, ... (n-1)*stride.
func span(n, stride int64) (lo, hi int64, ok bool) {
	if n <= 1 {
		return 0, 0, true
	}
	d, ok := mul(n-1, stride)
	return min(d, 0), max(d, 0), ok
}
