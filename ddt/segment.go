// SPDX-License-Identifier: Apache-2.0

package ddt

import (
	"math"
	"unsafe"
)

// A segment is how far a message is placed: what MPITypes calls so, the state in which the
// strategies of the SC 2019 paper process a type (section 3.2.4, figure 5). It is the path
// from the root to the leaf that the next byte belongs to. A leaf is a node that consists
// of blocks, and not of nodes.
//
// It moves forward only, and node by node, while a Committed finds any position by
// dividing and searching. Nothing of it is shared: whoever has the segment may use it. The
// position is all that it knows of a message, so it does for the next one as well.
type segment struct {
	head
	steps  int64   // that catching up took, ever
	frames []frame // frames[:top+1] are the path

	// HPUs have neighbours in an array, and this keeps them out of each other's cache
	// lines, also where the allocator puts a word of its own before the first.
	_ [8]byte
}

var _ [64]byte = [segmentSize]byte{}

// nowhere is the position of a segment that has no path: a new one, and one that unpacks,
// for a handler may panic there and leave it.
const nowhere = math.MaxInt64

// A head is what a segment has in addition to its path.
type head struct {
	pos int64 // in the stream, or nowhere
	in  int64 // how many bytes of the leaf's block are done
	top int   // the leaf's frame. -1: the end
}

// A frame is a node on the path.
type frame struct {
	node *Node
	base int64 // of the node's origin, from the buffer's
	i    int64 // part of it; in a leaf, a block of it
}

const (
	frameSize   = int64(unsafe.Sizeof(frame{}))
	headSize    = int64(unsafe.Sizeof(head{}))
	segmentSize = int64(unsafe.Sizeof(segment{}))

	// gap is how many frames lie unused between those of two segments, lest HPUs
	// share a cache line.
	gap = (64 + frameSize - 1) / frameSize
)

// isLeaf tells whether a node consists of blocks.
func isLeaf(n *Node) bool {
	switch n.Kind {
	case Vector, Index:
		return n.Child.Kind == Contig
	case List:
		return n.Children == nil
	}
	return true
}

// levels returns how many nodes the paths from a node have, at most: a block is part of
// its leaf.
func levels(n *Node) int {
	if n == nil {
		return 0
	}
	return max(n.Depth-1, 1)
}

// segmentMemory returns what newSegments takes for each.
func segmentMemory(depth int) int64 { return segmentSize + (int64(depth)+gap)*frameSize }

// newSegments returns n segments for paths of depth nodes. They are nowhere.
func newSegments(n, depth int) []segment {
	s := make([]segment, n)
	stride := depth + int(gap)
	frames := make([]frame, n*stride)
	for i := range s {
		s[i].pos = nowhere
		s[i].frames = frames[i*stride : i*stride+depth]
	}
	return s
}

// reset brings it to the beginning of the stream.
func (s *segment) reset(root *Node, origin int64) {
	s.head = head{}
	s.frames[0] = frame{node: root, base: origin}
	s.descend()
}

// descend goes from a node's part to the first leaf in there.
func (s *segment) descend() {
	for {
		f := &s.frames[s.top]
		n, child, at := f.node, f.node.Child, f.base
		if isLeaf(n) {
			return
		}
		switch n.Kind {
		case Vector:
			at += f.i * n.Stride
		case Index:
			at += n.Displs[f.i]
		case List:
			at += n.Displs[f.i]
			child = n.Children[f.i]
		}
		s.top++
		s.frames[s.top] = frame{node: child, base: at}
	}
}

// leave goes from the end of a leaf to the next one, and returns how many nodes it went
// through.
func (s *segment) leave() (steps int64) {
	for s.top--; s.top >= 0; s.top-- {
		steps++
		f := &s.frames[s.top]
		if f.i++; f.i < f.node.Count {
			from := s.top
			s.descend()
			return steps + int64(s.top-from)
		}
	}
	return steps
}

// block returns the place of block i of a leaf, and its length.
func (f *frame) block() (at, size int64) {
	n := f.node
	switch n.Kind {
	case Vector:
		return f.base + f.i*n.Stride, n.Child.Size
	case Index:
		return f.base + n.Displs[f.i], n.Child.Size
	case List:
		return f.base + n.Displs[f.i], n.Starts[f.i+1] - n.Starts[f.i]
	}
	return f.base, n.Size
}

// blocks returns how many blocks a leaf has.
func (n *Node) blocks() int64 {
	if n.Kind == Contig {
		return 1
	}
	return n.Count
}

// catchUp moves forward to a position. As in MPITypes it takes a step for each block on
// the way, in leaves as well: a position could be had for a division there, but then it
// would not be the strategies of the paper, which are up to nine tenths of their time at
// it (section 5.2, figure 12).
func (s *segment) catchUp(to int64) {
	var steps int64
	left := to - s.pos
	for left > 0 {
		f := &s.frames[s.top]
		for end := f.node.blocks(); f.i < end; f.i++ {
			_, size := f.block()
			if size -= s.in; left < size {
				s.in += left
				left = 0
				break
			}
			left -= size
			s.in = 0
			steps++
		}
		if f.i == f.node.blocks() {
			steps += s.leave()
		}
	}
	s.pos = to
	s.steps += steps
}

// unpack puts the bytes of the stream from its position on, which are there and have
// room, where they belong, and moves behind them. It returns in how many pieces.
func (s *segment) unpack(mem unsafe.Pointer, origin int64, stream []byte) (copies int64) {
	from := unsafe.Pointer(unsafe.SliceData(stream))
	end := int64(len(stream))
	then := s.pos + end
	s.pos = nowhere
	for pos := int64(0); pos < end; {
		f := &s.frames[s.top]
		n := f.node
		at, size := f.block()
		switch left := end - pos; {
		case s.in > 0 || left < size || n.Kind == Contig: // a part of a block, or all there is
			k := min(left, size-s.in)
			move(unsafe.Add(mem, origin+at+s.in), unsafe.Add(from, pos), k)
			pos += k
			copies++
			if s.in += k; s.in == size {
				s.in = 0
				f.i++
			}
		case n.Kind == Vector:
			k := min(n.Count-f.i, quotient(left, size))
			copyVector(mem, origin+at, n.Stride, from, pos, size, k, size)
			pos += k * size
			f.i += k
			copies += k
		case n.Kind == Index:
			k := min(n.Count-f.i, quotient(left, size))
			scatterIndex(mem, origin+f.base, n.Displs[f.i:f.i+k], size, from, pos)
			pos += k * size
			f.i += k
			copies += k
		default:
			start, j := n.Starts[f.i], f.i+1
			for j < n.Count && n.Starts[j+1]-start <= left {
				j++
			}
			scatterList(mem, origin+f.base, n.Displs[f.i:j], n.Starts[f.i:j+1], from, pos)
			pos += n.Starts[j] - start
			copies += j - f.i
			f.i = j
		}
		if f.i == n.blocks() {
			s.leave()
		}
	}
	s.pos = then
	return copies
}

// place unpacks a stretch of the stream that is not before the segment's position.
func (s *segment) place(mem []byte, origin, first int64, stream []byte) (copies int64) {
	if first > s.pos {
		s.catchUp(first)
	}
	return s.unpack(unsafe.Pointer(unsafe.SliceData(mem)), origin, stream)
}
