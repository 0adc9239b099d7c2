// SPDX-License-Identifier: Apache-2.0

package ddt

import "unsafe"

// The copy loops. Strategies share them, so that they differ in how they find places
// only. All take offsets into memory and stream, at which there is room; memory and
// stream do not overlap each other.
//
// Blocks are copied by loads and stores of the widest type that is not longer than the
// block, the last of which overlaps those before: no call for each block. 16 bytes are
// the widest that the compiler has a register for. Long blocks are left to the runtime's
// memmove.

type b16 = [16]byte

// inRegisters is up to how many bytes memmove is not worth its call.
const inRegisters = 256

// copyVector copies count blocks of size bytes: dst has them at to, every toStride bytes,
// and src at from, every fromStride. One of the strides is the blocks' size.
func copyVector(dst unsafe.Pointer, to, toStride int64, src unsafe.Pointer, from, fromStride, count, size int64) {
	switch {
	case size == 1:
		copyVector1[uint8](dst, to, toStride, src, from, fromStride, count)
	case size == 2:
		copyVector1[uint16](dst, to, toStride, src, from, fromStride, count)
	case size == 4:
		copyVector1[uint32](dst, to, toStride, src, from, fromStride, count)
	case size == 8:
		copyVector1[uint64](dst, to, toStride, src, from, fromStride, count)
	case size == 16:
		copyVector1[b16](dst, to, toStride, src, from, fromStride, count)
	case size == 3:
		copyVector2[uint16](dst, to, toStride, src, from, fromStride, count, size)
	case size < 8:
		copyVector2[uint32](dst, to, toStride, src, from, fromStride, count, size)
	case size < 16:
		copyVector2[uint64](dst, to, toStride, src, from, fromStride, count, size)
	case size <= 32:
		copyVector2[b16](dst, to, toStride, src, from, fromStride, count, size)
	case size <= 48:
		copyVector3(dst, to, toStride, src, from, fromStride, count, size)
	case size <= inRegisters:
		for ; count > 0; count-- {
			move16(unsafe.Add(dst, to), unsafe.Add(src, from), size)
			to += toStride
			from += fromStride
		}
	default:
		for ; count > 0; count-- {
			move(unsafe.Add(dst, to), unsafe.Add(src, from), size)
			to += toStride
			from += fromStride
		}
	}
}

// copyVector1 is for blocks that are a T.
func copyVector1[T any](dst unsafe.Pointer, to, toStride int64, src unsafe.Pointer, from, fromStride, count int64) {
	for ; count >= 4; count -= 4 {
		*(*T)(unsafe.Add(dst, to)) = *(*T)(unsafe.Add(src, from))
		*(*T)(unsafe.Add(dst, to+toStride)) = *(*T)(unsafe.Add(src, from+fromStride))
		*(*T)(unsafe.Add(dst, to+2*toStride)) = *(*T)(unsafe.Add(src, from+2*fromStride))
		*(*T)(unsafe.Add(dst, to+3*toStride)) = *(*T)(unsafe.Add(src, from+3*fromStride))
		to += 4 * toStride
		from += 4 * fromStride
	}
	for ; count > 0; count-- {
		*(*T)(unsafe.Add(dst, to)) = *(*T)(unsafe.Add(src, from))
		to += toStride
		from += fromStride
	}
}

// copyVector2 is for blocks of one to two T.
func copyVector2[T any](dst unsafe.Pointer, to, toStride int64, src unsafe.Pointer, from, fromStride, count, size int64) {
	var t T
	tail := size - int64(unsafe.Sizeof(t))
	for ; count > 0; count-- {
		*(*T)(unsafe.Add(dst, to)) = *(*T)(unsafe.Add(src, from))
		*(*T)(unsafe.Add(dst, to+tail)) = *(*T)(unsafe.Add(src, from+tail))
		to += toStride
		from += fromStride
	}
}

// copyVector3 is for blocks of 33 to 48 bytes.
func copyVector3(dst unsafe.Pointer, to, toStride int64, src unsafe.Pointer, from, fromStride, count, size int64) {
	tail := size - 16
	for ; count > 0; count-- {
		*(*b16)(unsafe.Add(dst, to)) = *(*b16)(unsafe.Add(src, from))
		*(*b16)(unsafe.Add(dst, to+16)) = *(*b16)(unsafe.Add(src, from+16))
		*(*b16)(unsafe.Add(dst, to+tail)) = *(*b16)(unsafe.Add(src, from+tail))
		to += toStride
		from += fromStride
	}
}

// scatterIndex copies a block of size bytes from the stream to each displacement.
func scatterIndex(mem unsafe.Pointer, at int64, displs []int64, size int64, stream unsafe.Pointer, pos int64) {
	switch {
	case size == 4:
		scatterIndex1[uint32](mem, at, displs, stream, pos)
	case size == 8:
		scatterIndex1[uint64](mem, at, displs, stream, pos)
	case size == 16:
		scatterIndex1[b16](mem, at, displs, stream, pos)
	case size < 4:
		for _, d := range displs {
			move(unsafe.Add(mem, at+d), unsafe.Add(stream, pos), size)
			pos += size
		}
	case size < 8:
		scatterIndex2[uint32](mem, at, displs, size, stream, pos)
	case size < 16:
		scatterIndex2[uint64](mem, at, displs, size, stream, pos)
	case size <= 32:
		scatterIndex2[b16](mem, at, displs, size, stream, pos)
	case size <= inRegisters:
		scatterIndex16(mem, at, displs, size, stream, pos)
	default:
		for _, d := range displs {
			move(unsafe.Add(mem, at+d), unsafe.Add(stream, pos), size)
			pos += size
		}
	}
}

func scatterIndex1[T any](mem unsafe.Pointer, at int64, displs []int64, stream unsafe.Pointer, pos int64) {
	var t T
	size := int64(unsafe.Sizeof(t))
	for len(displs) >= 4 {
		d := (*[4]int64)(displs)
		*(*T)(unsafe.Add(mem, at+d[0])) = *(*T)(unsafe.Add(stream, pos))
		*(*T)(unsafe.Add(mem, at+d[1])) = *(*T)(unsafe.Add(stream, pos+size))
		*(*T)(unsafe.Add(mem, at+d[2])) = *(*T)(unsafe.Add(stream, pos+2*size))
		*(*T)(unsafe.Add(mem, at+d[3])) = *(*T)(unsafe.Add(stream, pos+3*size))
		pos += 4 * size
		displs = displs[4:]
	}
	for _, d := range displs {
		*(*T)(unsafe.Add(mem, at+d)) = *(*T)(unsafe.Add(stream, pos))
		pos += size
	}
}

func scatterIndex2[T any](mem unsafe.Pointer, at int64, displs []int64, size int64, stream unsafe.Pointer, pos int64) {
	var t T
	tail := size - int64(unsafe.Sizeof(t))
	for _, d := range displs {
		*(*T)(unsafe.Add(mem, at+d)) = *(*T)(unsafe.Add(stream, pos))
		*(*T)(unsafe.Add(mem, at+d+tail)) = *(*T)(unsafe.Add(stream, pos+tail))
		pos += size
	}
}

func scatterIndex16(mem unsafe.Pointer, at int64, displs []int64, size int64, stream unsafe.Pointer, pos int64) {
	for _, d := range displs {
		move16(unsafe.Add(mem, at+d), unsafe.Add(stream, pos), size)
		pos += size
	}
}

// gatherIndex is scatterIndex the other way round.
func gatherIndex(stream unsafe.Pointer, pos int64, mem unsafe.Pointer, at int64, displs []int64, size int64) {
	switch {
	case size == 4:
		gatherIndex1[uint32](stream, pos, mem, at, displs)
	case size == 8:
		gatherIndex1[uint64](stream, pos, mem, at, displs)
	case size == 16:
		gatherIndex1[b16](stream, pos, mem, at, displs)
	case size < 4:
		for _, d := range displs {
			move(unsafe.Add(stream, pos), unsafe.Add(mem, at+d), size)
			pos += size
		}
	case size < 8:
		gatherIndex2[uint32](stream, pos, mem, at, displs, size)
	case size < 16:
		gatherIndex2[uint64](stream, pos, mem, at, displs, size)
	case size <= 32:
		gatherIndex2[b16](stream, pos, mem, at, displs, size)
	case size <= inRegisters:
		gatherIndex16(stream, pos, mem, at, displs, size)
	default:
		for _, d := range displs {
			move(unsafe.Add(stream, pos), unsafe.Add(mem, at+d), size)
			pos += size
		}
	}
}

func gatherIndex1[T any](stream unsafe.Pointer, pos int64, mem unsafe.Pointer, at int64, displs []int64) {
	var t T
	size := int64(unsafe.Sizeof(t))
	for _, d := range displs {
		*(*T)(unsafe.Add(stream, pos)) = *(*T)(unsafe.Add(mem, at+d))
		pos += size
	}
}

func gatherIndex2[T any](stream unsafe.Pointer, pos int64, mem unsafe.Pointer, at int64, displs []int64, size int64) {
	var t T
	tail := size - int64(unsafe.Sizeof(t))
	for _, d := range displs {
		*(*T)(unsafe.Add(stream, pos)) = *(*T)(unsafe.Add(mem, at+d))
		*(*T)(unsafe.Add(stream, pos+tail)) = *(*T)(unsafe.Add(mem, at+d+tail))
		pos += size
	}
}

func gatherIndex16(stream unsafe.Pointer, pos int64, mem unsafe.Pointer, at int64, displs []int64, size int64) {
	for _, d := range displs {
		move16(unsafe.Add(stream, pos), unsafe.Add(mem, at+d), size)
		pos += size
	}
}

// scatterList copies blocks from the stream to displacements: block i has starts[i+1] -
// starts[i] bytes.
func scatterList(mem unsafe.Pointer, at int64, displs, starts []int64, stream unsafe.Pointer, pos int64) {
	pos -= starts[0]
	starts = starts[:len(displs)+1]
	for i, d := range displs {
		move(unsafe.Add(mem, at+d), unsafe.Add(stream, pos+starts[i]), starts[i+1]-starts[i])
	}
}

// gatherList is scatterList the other way round.
func gatherList(stream unsafe.Pointer, pos int64, mem unsafe.Pointer, at int64, displs, starts []int64) {
	pos -= starts[0]
	starts = starts[:len(displs)+1]
	for i, d := range displs {
		move(unsafe.Add(stream, pos+starts[i]), unsafe.Add(mem, at+d), starts[i+1]-starts[i])
	}
}

// move copies n bytes, at least 1, that do not overlap.
func move(dst, src unsafe.Pointer, n int64) {
	switch {
	case n > inRegisters:
		copy(unsafe.Slice((*byte)(dst), n), unsafe.Slice((*byte)(src), n))
	case n >= 16:
		move16(dst, src, n)
	case n >= 8:
		move2[uint64](dst, src, n)
	case n >= 4:
		move2[uint32](dst, src, n)
	case n >= 2:
		move2[uint16](dst, src, n)
	default:
		*(*byte)(dst) = *(*byte)(src)
	}
}

func move2[T any](dst, src unsafe.Pointer, n int64) {
	var t T
	tail := n - int64(unsafe.Sizeof(t))
	*(*T)(dst) = *(*T)(src)
	*(*T)(unsafe.Add(dst, tail)) = *(*T)(unsafe.Add(src, tail))
}

// move16 copies at least 16 bytes, 16 at a time, the last of which may overlap those
// before.
func move16(dst, src unsafe.Pointer, n int64) {
	for i := int64(0); i < n-16; i += 16 {
		*(*b16)(unsafe.Add(dst, i)) = *(*b16)(unsafe.Add(src, i))
	}
	*(*b16)(unsafe.Add(dst, n-16)) = *(*b16)(unsafe.Add(src, n-16))
}
