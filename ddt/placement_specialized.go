// SPDX-License-Identifier: Apache-2.0

package ddt

import (
	"fmt"
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

func (p *specialized) Place(slot, hpu int, mem []byte, origin, packet, first int64, stream []byte) (copies int64, err error) {
	if err := p.check(slot, hpu, mem, origin, packet, first, stream); err != nil {
		return 0, err
	}
	if len(stream) == 0 {
		return 0, nil
	}
	to, from := unsafe.Pointer(unsafe.SliceData(mem)), unsafe.Pointer(unsafe.SliceData(stream))
	origin += p.c.origin
	left := int64(len(stream))
	switch n := p.node; n.Kind {
	case Contig:
		move(unsafe.Add(to, origin+first), from, left)
		copies = 1
	case List:
		copies = n.copyList(to, origin, first, from, 0, left, false)
	default:
		copies = n.copyBlocks(to, origin, first, from, 0, left, false)
	}
	return copies, nil
}
