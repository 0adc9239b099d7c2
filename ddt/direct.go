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
	w := walker{mem: unsafe.Pointer(unsafe.SliceData(mem)), stream: unsafe.Pointer(unsafe.SliceData(stream)), pack: pack}
	w.part(c.fast, origin+c.origin, first, first+n)
	return w.copies, nil
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

// Each calls f for the pieces of bytes first to last-1 of the stream in order, until it
// returns false: n bytes in a row, at off from the buffer's origin. Neighbouring pieces
// may touch. What is not in the stream is left out.
func (c *Committed) Each(first, last int64, f func(off, n int64) bool) {
	first, last = max(first, 0), min(last, c.Size())
	if first < last {
		w := walker{each: f}
		w.part(c.root, c.origin, first, last)
	}
}

// A walker goes through bytes of a stream: it seeks to where they begin, by division
// where a level is regular and by binary search where it is not, and then goes from piece
// to piece. It has no state of a stream, so any bytes can be next.
//
// Nothing is checked here: bytes lo to hi-1 of a node that is at offset at of the memory
// are inside of both, because all of what was committed is, see Check. (Offsets, not
// pointers that could be beyond the end of memory, which the garbage collector forbids.)
type walker struct {
	mem    unsafe.Pointer
	stream unsafe.Pointer
	pos    int64 // in stream
	copies int64
	pack   bool                    // from memory to stream
	each   func(off, n int64) bool // instead of copying
	ended  bool                    // each has returned false
}

// part goes through bytes lo to hi-1 of a node's stream.
func (w *walker) part(n *Node, at, lo, hi int64) {
	switch n.Kind {
	case Contig:
		w.block(at+lo, hi-lo)
	case Vector:
		child := n.Child
		i := quotient(lo, child.Size)
		if r := lo - i*child.Size; r != 0 {
			end := min(hi-lo+r, child.Size)
			w.inside(child, at+i*n.Stride, r, end)
			lo += end - r
			i++
		}
		whole := quotient(hi-lo, child.Size)
		if whole > 0 {
			w.vector(child, at+i*n.Stride, n.Stride, whole)
			lo += whole * child.Size
			i += whole
		}
		if lo < hi {
			w.inside(child, at+i*n.Stride, 0, hi-lo)
		}
	case Index:
		child := n.Child
		i := quotient(lo, child.Size)
		if r := lo - i*child.Size; r != 0 {
			end := min(hi-lo+r, child.Size)
			w.inside(child, at+n.Displs[i], r, end)
			lo += end - r
			i++
		}
		whole := quotient(hi-lo, child.Size)
		if whole > 0 {
			w.index(child, at, n.Displs[i:i+whole])
			lo += whole * child.Size
			i += whole
		}
		if lo < hi {
			w.inside(child, at+n.Displs[i], 0, hi-lo)
		}
	case List:
		i := n.find(lo)
		if start := n.Starts[i]; start != lo {
			end := min(hi, n.Starts[i+1])
			w.inList(n, i, at, lo-start, end-start)
			lo = end
			i++
		}
		j := i
		for j < len(n.Displs) && n.Starts[j+1] <= hi {
			j++
		}
		if j > i {
			w.list(n, at, i, j)
			lo = n.Starts[j]
		}
		if lo < hi {
			w.inList(n, j, at, 0, hi-lo)
		}
	}
}

// inside is part of a child, which most often is a block.
func (w *walker) inside(n *Node, at, lo, hi int64) {
	if n.Kind == Contig {
		w.block(at+lo, hi-lo)
	} else {
		w.part(n, at, lo, hi)
	}
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

// inList goes through bytes of part i of a list.
func (w *walker) inList(n *Node, i int, at, lo, hi int64) {
	if n.Children == nil {
		w.block(at+n.Displs[i]+lo, hi-lo)
	} else {
		w.part(n.Children[i], at+n.Displs[i], lo, hi)
	}
}

// whole goes through all of a node.
func (w *walker) whole(n *Node, at int64) {
	switch n.Kind {
	case Contig:
		w.block(at, n.Size)
	case Vector:
		w.vector(n.Child, at, n.Stride, n.Count)
	case Index:
		w.index(n.Child, at, n.Displs)
	case List:
		w.list(n, at, 0, len(n.Displs))
	}
}

// vector goes through count children, stride bytes apart.
func (w *walker) vector(child *Node, at, stride, count int64) {
	if child.Kind == Contig && w.each == nil {
		w.copies += count
		if w.pack {
			gatherVector(w.stream, w.pos, w.mem, at, stride, count, child.Size)
		} else {
			scatterVector(w.mem, at, stride, count, child.Size, w.stream, w.pos)
		}
		w.pos += count * child.Size
		return
	}
	for ; count > 0 && !w.ended; count-- {
		w.whole(child, at)
		at += stride
	}
}

// index goes through children at these displacements.
func (w *walker) index(child *Node, at int64, displs []int64) {
	if child.Kind == Contig && w.each == nil {
		w.copies += int64(len(displs))
		if w.pack {
			gatherIndex(w.stream, w.pos, w.mem, at, displs, child.Size)
		} else {
			scatterIndex(w.mem, at, displs, child.Size, w.stream, w.pos)
		}
		w.pos += int64(len(displs)) * child.Size
		return
	}
	for _, d := range displs {
		if w.ended {
			return
		}
		w.whole(child, at+d)
	}
}

// list goes through parts i to j-1.
func (w *walker) list(n *Node, at int64, i, j int) {
	if n.Children == nil && w.each == nil {
		w.copies += int64(j - i)
		if w.pack {
			gatherList(w.stream, w.pos, w.mem, at, n.Displs[i:j], n.Starts[i:j+1])
		} else {
			scatterList(w.mem, at, n.Displs[i:j], n.Starts[i:j+1], w.stream, w.pos)
		}
		w.pos += n.Starts[j] - n.Starts[i]
		return
	}
	for ; i < j && !w.ended; i++ {
		if n.Children == nil {
			w.block(at+n.Displs[i], n.Starts[i+1]-n.Starts[i])
		} else {
			w.whole(n.Children[i], at+n.Displs[i])
		}
	}
}

// block goes through n bytes in a row.
func (w *walker) block(at, n int64) {
	switch {
	case w.ended:
		return
	case w.each != nil:
		w.ended = !w.each(at, n)
		return
	case w.pack:
		move(unsafe.Add(w.stream, w.pos), unsafe.Add(w.mem, at), n)
	default:
		move(unsafe.Add(w.mem, at), unsafe.Add(w.stream, w.pos), n)
	}
	w.copies++
	w.pos += n
}
