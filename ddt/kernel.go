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

// scatterVector copies count blocks of size bytes from the stream to places stride bytes
// apart.
func scatterVector(mem unsafe.Pointer, at, stride, count, size int64, stream unsafe.Pointer, pos int64) {
	switch {
	case size == 1:
		scatterVector1[uint8](mem, at, stride, count, stream, pos)
	case size == 2:
		scatterVector1[uint16](mem, at, stride, count, stream, pos)
	case size == 4:
		scatterVector1[uint32](mem, at, stride, count, stream, pos)
	case size == 8:
		scatterVector1[uint64](mem, at, stride, count, stream, pos)
	case size == 16:
		scatterVector1[b16](mem, at, stride, count, stream, pos)
	case size == 3:
		scatterVector2[uint16](mem, at, stride, count, size, stream, pos)
	case size < 8:
		scatterVector2[uint32](mem, at, stride, count, size, stream, pos)
	case size < 16:
		scatterVector2[uint64](mem, at, stride, count, size, stream, pos)
	case size <= 32:
		scatterVector2[b16](mem, at, stride, count, size, stream, pos)
	case size <= 48:
		scatterVector48(mem, at, stride, count, size, stream, pos)
	case size <= inRegisters:
		scatterVector16(mem, at, stride, count, size, stream, pos)
	default:
		for ; count > 0; count-- {
			move(unsafe.Add(mem, at), unsafe.Add(stream, pos), size)
			at += stride
			pos += size
		}
	}
}

// scatterVector1 is for blocks that are a T.
func scatterVector1[T any](mem unsafe.Pointer, at, stride, count int64, stream unsafe.Pointer, pos int64) {
	var t T
	size := int64(unsafe.Sizeof(t))
	for ; count >= 4; count -= 4 {
		*(*T)(unsafe.Add(mem, at)) = *(*T)(unsafe.Add(stream, pos))
		*(*T)(unsafe.Add(mem, at+stride)) = *(*T)(unsafe.Add(stream, pos+size))
		*(*T)(unsafe.Add(mem, at+2*stride)) = *(*T)(unsafe.Add(stream, pos+2*size))
		*(*T)(unsafe.Add(mem, at+3*stride)) = *(*T)(unsafe.Add(stream, pos+3*size))
		at += 4 * stride
		pos += 4 * size
	}
	for ; count > 0; count-- {
		*(*T)(unsafe.Add(mem, at)) = *(*T)(unsafe.Add(stream, pos))
		at += stride
		pos += size
	}
}

// scatterVector2 is for blocks of one to two T.
func scatterVector2[T any](mem unsafe.Pointer, at, stride, count, size int64, stream unsafe.Pointer, pos int64) {
	var t T
	tail := size - int64(unsafe.Sizeof(t))
	for ; count > 0; count-- {
		*(*T)(unsafe.Add(mem, at)) = *(*T)(unsafe.Add(stream, pos))
		*(*T)(unsafe.Add(mem, at+tail)) = *(*T)(unsafe.Add(stream, pos+tail))
		at += stride
		pos += size
	}
}

// scatterVector48 is for blocks of 33 to 48 bytes.
func scatterVector48(mem unsafe.Pointer, at, stride, count, size int64, stream unsafe.Pointer, pos int64) {
	tail := size - 16
	for ; count > 0; count-- {
		*(*b16)(unsafe.Add(mem, at)) = *(*b16)(unsafe.Add(stream, pos))
		*(*b16)(unsafe.Add(mem, at+16)) = *(*b16)(unsafe.Add(stream, pos+16))
		*(*b16)(unsafe.Add(mem, at+tail)) = *(*b16)(unsafe.Add(stream, pos+tail))
		at += stride
		pos += size
	}
}

// scatterVector16 is for blocks of more than 16 bytes, 16 at a time, the last of which may
// overlap those before.
func scatterVector16(mem unsafe.Pointer, at, stride, count, size int64, stream unsafe.Pointer, pos int64) {
	for ; count > 0; count-- {
		for i := int64(0); i < size-16; i += 16 {
			*(*b16)(unsafe.Add(mem, at+i)) = *(*b16)(unsafe.Add(stream, pos+i))
		}
		*(*b16)(unsafe.Add(mem, at+size-16)) = *(*b16)(unsafe.Add(stream, pos+size-16))
		at += stride
		pos += size
	}
}

// gatherVector is scatterVector the other way round.
func gatherVector(stream unsafe.Pointer, pos int64, mem unsafe.Pointer, at, stride, count, size int64) {
	switch {
	case size == 1:
		gatherVector1[uint8](stream, pos, mem, at, stride, count)
	case size == 2:
		gatherVector1[uint16](stream, pos, mem, at, stride, count)
	case size == 4:
		gatherVector1[uint32](stream, pos, mem, at, stride, count)
	case size == 8:
		gatherVector1[uint64](stream, pos, mem, at, stride, count)
	case size == 16:
		gatherVector1[b16](stream, pos, mem, at, stride, count)
	case size == 3:
		gatherVector2[uint16](stream, pos, mem, at, stride, count, size)
	case size < 8:
		gatherVector2[uint32](stream, pos, mem, at, stride, count, size)
	case size < 16:
		gatherVector2[uint64](stream, pos, mem, at, stride, count, size)
	case size <= 32:
		gatherVector2[b16](stream, pos, mem, at, stride, count, size)
	case size <= inRegisters:
		gatherVector16(stream, pos, mem, at, stride, count, size)
	default:
		for ; count > 0; count-- {
			move(unsafe.Add(stream, pos), unsafe.Add(mem, at), size)
			at += stride
			pos += size
		}
	}
}

func gatherVector1[T any](stream unsafe.Pointer, pos int64, mem unsafe.Pointer, at, stride, count int64) {
	var t T
	size := int64(unsafe.Sizeof(t))
	for ; count >= 4; count -= 4 {
		*(*T)(unsafe.Add(stream, pos)) = *(*T)(unsafe.Add(mem, at))
		*(*T)(unsafe.Add(stream, pos+size)) = *(*T)(unsafe.Add(mem, at+stride))
		*(*T)(unsafe.Add(stream, pos+2*size)) = *(*T)(unsafe.Add(mem, at+2*stride))
		*(*T)(unsafe.Add(stream, pos+3*size)) = *(*T)(unsafe.Add(mem, at+3*stride))
		at += 4 * stride
		pos += 4 * size
	}
	for ; count > 0; count-- {
		*(*T)(unsafe.Add(stream, pos)) = *(*T)(unsafe.Add(mem, at))
		at += stride
		pos += size
	}
}

func gatherVector2[T any](stream unsafe.Pointer, pos int64, mem unsafe.Pointer, at, stride, count, size int64) {
	var t T
	tail := size - int64(unsafe.Sizeof(t))
	for ; count > 0; count-- {
		*(*T)(unsafe.Add(stream, pos)) = *(*T)(unsafe.Add(mem, at))
		*(*T)(unsafe.Add(stream, pos+tail)) = *(*T)(unsafe.Add(mem, at+tail))
		at += stride
		pos += size
	}
}

func gatherVector16(stream unsafe.Pointer, pos int64, mem unsafe.Pointer, at, stride, count, size int64) {
	for ; count > 0; count-- {
		for i := int64(0); i < size-16; i += 16 {
			*(*b16)(unsafe.Add(stream, pos+i)) = *(*b16)(unsafe.Add(mem, at+i))
		}
		*(*b16)(unsafe.Add(stream, pos+size-16)) = *(*b16)(unsafe.Add(mem, at+size-16))
		at += stride
		pos += size
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
