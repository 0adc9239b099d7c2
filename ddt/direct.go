// SPDX-License-Identifier: Apache-2.0

package ddt

import (
	"errors"
	"fmt"
	"unsafe"
)

// ErrBounds is wrapped by errors about bytes outside of the stream, or of the memory.
var ErrBounds = errors.New("out of bounds")

// Unpack puts bytes of the stream, from position first on, where they belong. mem[origin]
// is the buffer's origin: the place of displacement 0, which may be outside of mem if the
// type does not touch it. It returns in how many pieces. An error wraps ErrBounds, and
// nothing is written then: bytes that the stream does not have, or a type that reaches
// outside of mem, even if these bytes do not.
//
// Where a type overlaps itself, later bytes of stream win. Stream and mem must not share
// memory.
func (c *Committed) Unpack(mem []byte, origin, first int64, stream []byte) (copies int64, err error) {
	return c.move(mem, origin, first, stream, false)
}

// Pack fills stream with the bytes of the stream from position first on. It is Unpack the
// other way round.
func (c *Committed) Pack(stream, mem []byte, origin, first int64) (copies int64, err error) {
	return c.move(mem, origin, first, stream, true)
}

func (c *Committed) move(mem []byte, origin, first int64, stream []byte, pack bool) (int64, error) {
	n := int64(len(stream))
	if first < 0 || first > c.size-n || origin < c.before || origin > int64(len(mem))-c.after {
		return 0, c.refuse(int64(len(mem)), origin, first, n)
	}
	if n == 0 {
		return 0, nil
	}
	return c.fast.copy(unsafe.Pointer(unsafe.SliceData(mem)), origin+c.origin, first, unsafe.Pointer(unsafe.SliceData(stream)), 0, n, pack), nil
}

// Check tells whether n bytes of the stream from position first on can be placed in
// size bytes of memory, of which byte origin is the buffer's origin. The error wraps
// ErrBounds.
func (c *Committed) Check(size, origin, first, n int64) error {
	if first < 0 || n < 0 || first > c.size-n || origin < c.before || size < 0 || origin > size-c.after {
		return c.refuse(size, origin, first, n)
	}
	return nil
}

// refuse makes the error of Check.
func (c *Committed) refuse(size, origin, first, n int64) error {
	if first < 0 || n < 0 || first > c.size-n {
		return &rangeError{first: first, n: n, size: c.size}
	}
	lo, hi := c.Bounds()
	return &placeError{lo: lo, hi: hi, origin: origin, size: size}
}

// Made only when told: whoever sends may make a lot of them.
type rangeError struct{ first, n, size int64 }

func (e *rangeError) Error() string {
	return fmt.Sprintf("%d bytes at %d of a stream of %d: %v", e.n, e.first, e.size, ErrBounds)
}

func (e *rangeError) Unwrap() error { return ErrBounds }

type placeError struct{ lo, hi, origin, size int64 }

func (e *placeError) Error() string {
	return fmt.Sprintf("type touches bytes %d to %d of a buffer at %d of %d bytes of memory: %v", e.lo, e.hi-1, e.origin, e.size, ErrBounds)
}

func (e *placeError) Unwrap() error { return ErrBounds }

// What follows goes through bytes of a stream: it seeks to where they begin, by division
// where a level is regular and by search where it is not, and then goes from piece to
// piece. There is no state of a stream, so any bytes can be next.
//
// Nothing is checked: the bytes of a node that is at offset at of the memory are inside
// of it, because all of what was committed is, see Check. (Offsets, not pointers: those
// could be beyond the end of memory, which the garbage collector forbids.)

// copy places left bytes of a node's stream from position first on, or fetches them if
// it is to pack: stream has them at pos. It returns how many pieces they are. All
// arguments are in registers.
func (n *Node) copy(mem unsafe.Pointer, at, first int64, stream unsafe.Pointer, pos, left int64, pack bool) (copies int64) {
	switch {
	case n.Kind == Contig:
		copyBlock(mem, at+first, stream, pos, left, pack)
		return 1
	case n.Kind == List:
		return n.copyList(mem, at, first, stream, pos, left, pack)
	case n.Child.Kind == Contig:
		return n.copyBlocks(mem, at, first, stream, pos, left, pack)
	}
	size := n.Child.Size
	i := quotient(first, size)
	for first -= i * size; left > 0; i++ {
		k := min(size-first, left)
		copies += n.Child.copy(mem, at+n.displ(i), first, stream, pos, k, pack)
		pos += k
		left -= k
		first = 0
	}
	return copies
}

// copyBlocks is copy for vectors and indexes of blocks: what is left of the first, whole
// ones, and the start of the last.
func (n *Node) copyBlocks(mem unsafe.Pointer, at, first int64, stream unsafe.Pointer, pos, left int64, pack bool) (copies int64) {
	size := n.Child.Size
	i, whole := int64(0), n.Count
	if left != n.Size {
		i = quotient(first, size)
		if first -= i * size; first > 0 {
			k := min(size-first, left)
			copyBlock(mem, at+n.displ(i)+first, stream, pos, k, pack)
			pos += k
			left -= k
			i++
			copies++
		}
		whole = quotient(left, size)
	}
	if whole > 0 {
		switch {
		case n.Kind == Vector && pack:
			copyVector(stream, pos, size, mem, at+i*n.Stride, n.Stride, whole, size)
		case n.Kind == Vector:
			copyVector(mem, at+i*n.Stride, n.Stride, stream, pos, size, whole, size)
		case pack:
			gatherIndex(stream, pos, mem, at, n.Displs[i:i+whole], size)
		default:
			scatterIndex(mem, at, n.Displs[i:i+whole], size, stream, pos)
		}
		pos += whole * size
		left -= whole * size
		i += whole
		copies += whole
	}
	if left > 0 {
		copyBlock(mem, at+n.displ(i), stream, pos, left, pack)
		copies++
	}
	return copies
}

// copyList is copy for lists.
func (n *Node) copyList(mem unsafe.Pointer, at, first int64, stream unsafe.Pointer, pos, left int64, pack bool) (copies int64) {
	i := n.find(first)
	first -= n.Starts[i]
	if n.Children != nil {
		for ; left > 0; i++ {
			k := min(n.Children[i].Size-first, left)
			copies += n.Children[i].copy(mem, at+n.Displs[i], first, stream, pos, k, pack)
			pos += k
			left -= k
			first = 0
		}
		return copies
	}
	if first > 0 {
		k := min(n.Starts[i+1]-n.Starts[i]-first, left)
		copyBlock(mem, at+n.Displs[i]+first, stream, pos, k, pack)
		pos += k
		left -= k
		i++
		copies++
	}
	j := i
	for j < len(n.Displs) && n.Starts[j+1]-n.Starts[i] <= left {
		j++
	}
	if j > i {
		if pack {
			gatherList(stream, pos, mem, at, n.Displs[i:j], n.Starts[i:j+1])
		} else {
			scatterList(mem, at, n.Displs[i:j], n.Starts[i:j+1], stream, pos)
		}
		whole := n.Starts[j] - n.Starts[i]
		pos += whole
		left -= whole
		copies += int64(j - i)
	}
	if left > 0 {
		copyBlock(mem, at+n.Displs[j], stream, pos, left, pack)
		copies++
	}
	return copies
}

// copyBlock copies n bytes in a row.
func copyBlock(mem unsafe.Pointer, at int64, stream unsafe.Pointer, pos, n int64, pack bool) {
	dst, src := unsafe.Add(mem, at), unsafe.Add(stream, pos)
	if pack {
		dst, src = src, dst
	}
	move(dst, src, n)
}

// displ returns where child i of a vector or an index is.
func (n *Node) displ(i int64) int64 {
	if n.Kind == Vector {
		return i * n.Stride
	}
	return n.Displs[i]
}

// quotient divides what is not negative. Of 64 bits that takes longer on many CPUs.
func quotient(a, b int64) int64 {
	if uint64(a|b)>>32 == 0 {
		return int64(uint32(a) / uint32(b))
	}
	return a / b
}

// find returns which part of a list byte pos of its stream is in. Parts are often about
// as long as each other, so it begins to search where it would be then.
func (n *Node) find(pos int64) int {
	starts := n.Starts
	// What is at low or before begins at pos or before, what is at high or behind
	// begins behind it.
	low, high := 0, len(starts)-1
	i, step := int(float64(pos)/float64(n.Size)*float64(high)), 1
	i = min(i, high-1)
	if starts[i] <= pos {
		for low = i; i+step < high && starts[i+step] <= pos; step *= 2 {
			low = i + step
		}
		high = min(high, i+step)
	} else {
		for high = i; i-step > 0 && starts[i-step] > pos; step *= 2 {
			high = i - step
		}
		low = max(0, i-step)
	}
	for high-low > 1 {
		if middle := int(uint(low+high) / 2); starts[middle] <= pos {
			low = middle
		} else {
			high = middle
		}
	}
	return low
}

// Each calls f for the pieces of bytes first to last-1 of the stream in order, until it
// returns false: n bytes in a row, at off from the buffer's origin. Neighbouring pieces
// may touch. What is not in the stream is left out.
func (c *Committed) Each(first, last int64, f func(off, n int64) bool) {
	first, last = max(first, 0), min(last, c.Size())
	if first < last {
		c.root.each(c.origin, first, last-first, f)
	}
}

// each calls f for the pieces of left bytes of a node's stream from position first on. It
// returns whether f always has returned true.
func (n *Node) each(at, first, left int64, f func(off, n int64) bool) bool {
	var i int64
	switch n.Kind {
	case Contig:
		return f(at+first, left)
	case List:
		i = int64(n.find(first))
		first -= n.Starts[i]
	default:
		i = first / n.Child.Size
		first -= i * n.Child.Size
	}
	for ; left > 0; i++ {
		var k int64
		var more bool
		switch {
		case n.Kind != List:
			k = min(n.Child.Size-first, left)
			more = n.Child.each(at+n.displ(i), first, k, f)
		case n.Children != nil:
			k = min(n.Children[i].Size-first, left)
			more = n.Children[i].each(at+n.Displs[i], first, k, f)
		default:
			k = min(n.Starts[i+1]-n.Starts[i]-first, left)
			more = f(at+n.Displs[i]+first, k)
		}
		if !more {
			return false
		}
		left -= k
		first = 0
	}
	return true
}
