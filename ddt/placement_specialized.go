// SPDX-License-Identifier: Apache-2.0

package ddt

import (
	"fmt"
	"sort"
	"unsafe"
)

// specialized has a loop for each kind of flat type, which finds its first block by a
// closed form (SC 2019, section 3.2.3): division where all blocks have the same size,
// binary search where they do not.
type specialized struct {
	base
	node *Node // nil: no bytes
}

func newSpecialized(b base) (Placement, error) {
	n := b.c.fast
	if n != nil && !isLeaf(n) {
		return nil, fmt.Errorf("specialized is for blocks in a vector or a list, and this type is one of %d levels of them: "+
			"direct, hpu-local, ro-cp and rw-cp can do it", levels(b.c.fast))
	}
	return &specialized{b, n}, nil
}

func (p *specialized) Place(slot, hpu int, mem []byte, origin, first int64, stream []byte) (copies int64, err error) {
	if err := p.check(slot, hpu, mem, origin, first, stream); err != nil {
		return 0, err
	}
	if len(stream) == 0 {
		return 0, nil
	}
	to, from := unsafe.Pointer(unsafe.SliceData(mem)), unsafe.Pointer(unsafe.SliceData(stream))
	origin += p.c.origin
	switch n := p.node; n.Kind {
	case Contig:
		move(unsafe.Add(to, origin+first), from, int64(len(stream)))
		copies = 1
	case List:
		copies = n.specializedList(to, origin, first, from, int64(len(stream)))
	default:
		copies = n.specializedBlocks(to, origin, first, from, int64(len(stream)))
	}
	return copies, nil
}

// specializedBlocks is for vectors and indexes: the part of a block that is left of an
// earlier packet, whole blocks, and the part of one that this packet still has.
func (n *Node) specializedBlocks(to unsafe.Pointer, origin, first int64, from unsafe.Pointer, left int64) (copies int64) {
	size := n.Child.Size
	i := quotient(first, size)
	in := first - i*size
	pos := int64(0)
	if in > 0 {
		pos = min(size-in, left)
		move(unsafe.Add(to, origin+n.displ(i)+in), from, pos)
		left -= pos
		i++
		copies++
	}
	if k := quotient(left, size); k > 0 {
		if n.Kind == Vector {
			scatterVector(to, origin+i*n.Stride, n.Stride, k, size, from, pos)
		} else {
			scatterIndex(to, origin, n.Displs[i:i+k], size, from, pos)
		}
		pos += k * size
		left -= k * size
		i += k
		copies += k
	}
	if left > 0 {
		move(unsafe.Add(to, origin+n.displ(i)), unsafe.Add(from, pos), left)
		copies++
	}
	return copies
}

// specializedList is the same for blocks of different sizes.
func (n *Node) specializedList(to unsafe.Pointer, origin, first int64, from unsafe.Pointer, left int64) (copies int64) {
	i := sort.Search(len(n.Displs), func(i int) bool { return n.Starts[i+1] > first })
	last := first + left
	pos := int64(0)
	if in := first - n.Starts[i]; in > 0 {
		pos = min(n.Starts[i+1]-first, left)
		move(unsafe.Add(to, origin+n.Displs[i]+in), from, pos)
		i++
		copies++
	}
	j := i
	for j < len(n.Displs) && n.Starts[j+1] <= last {
		j++
	}
	if j > i {
		scatterList(to, origin, n.Displs[i:j], n.Starts[i:j+1], from, pos)
		pos += n.Starts[j] - n.Starts[i]
		copies += int64(j - i)
	}
	if pos < left {
		move(unsafe.Add(to, origin+n.Displs[j]), unsafe.Add(from, pos), left-pos)
		copies++
	}
	return copies
}

// displ returns where child i of a vector or an index is.
func (n *Node) displ(i int64) int64 {
	if n.Kind == Vector {
		return i * n.Stride
	}
	return n.Displs[i]
}
