// SPDX-License-Identifier: Apache-2.0

package ddt

import (
	"fmt"
	"slices"
)

// Subarray is MPI_Type_create_subarray. As with MPICH, subsizes may be 0.
func Subarray(sizes, subsizes, starts []int64, o Order, t *Type) (*Type, error) {
	if err := usable("subarray", t); err != nil {
		return nil, err
	}
	if len(sizes) == 0 || len(subsizes) != len(sizes) || len(starts) != len(sizes) {
		return nil, fmt.Errorf("subarray of %d sizes, %d subsizes and %d starts: want as many of each, and 1 or more",
			len(sizes), len(subsizes), len(starts))
	}
	combiner, err := order("subarray", CombinerSubarray, CombinerSubarrayF, o)
	if err != nil {
		return nil, err
	}
	for i, size := range sizes {
		if size < 1 {
			return nil, fmt.Errorf("subarray: size %d in dimension %d: want 1 or more", size, i)
		}
		if subsizes[i] < 0 || subsizes[i] > size {
			return nil, fmt.Errorf("subarray: subsize %d in dimension %d: want 0 to its size, %d", subsizes[i], i, size)
		}
		if starts[i] < 0 || starts[i] > size-subsizes[i] {
			return nil, fmt.Errorf("subarray: start %d in dimension %d: want 0 to %d, for %d of %d",
				starts[i], i, size-subsizes[i], subsizes[i], size)
		}
	}
	c := Contents{
		Combiner: combiner,
		Sizes:    slices.Clone(sizes),
		Subsizes: slices.Clone(subsizes),
		Starts:   slices.Clone(starts),
		Types:    []*Type{t},
	}
	part, place, stride := t, int64(0), t.Extent()
	for _, i := range dimensions(len(sizes), o) {
		if part, err = HVector(subsizes[i], 1, stride, part); err != nil {
			return nil, fmt.Errorf("subarray: in dimension %d: %w", i, err)
		}
		// Both are less than the next stride.
		place += starts[i] * stride
		var ok bool
		if stride, ok = mul(stride, sizes[i]); !ok {
			return nil, fmt.Errorf("subarray of sizes %v, extent %d: too large for 64 bits", sizes, t.Extent())
		}
	}
	return inArray(c, part, place, stride)
}

// Darray is MPI_Type_create_darray: what rank has of an array that is distributed among
// size processes. Ranks are in row-major order in the grid of processes, whatever the
// order of the array.
func Darray(size, rank int64, gsizes []int64, distribs []Distribution, dargs, psizes []int64, o Order, t *Type) (*Type, error) {
	if err := usable("darray", t); err != nil {
		return nil, err
	}
	dims := len(gsizes)
	if dims == 0 || len(distribs) != dims || len(dargs) != dims || len(psizes) != dims {
		return nil, fmt.Errorf("darray of %d sizes, %d distributions, %d arguments and %d process counts: want as many of each, and 1 or more",
			dims, len(distribs), len(dargs), len(psizes))
	}
	combiner, err := order("darray", CombinerDarray, CombinerDarrayF, o)
	if err != nil {
		return nil, err
	}
	if size < 1 {
		return nil, fmt.Errorf("darray among %d processes: want 1 or more", size)
	}
	if rank < 0 || rank >= size {
		return nil, fmt.Errorf("darray of rank %d: want 0 to %d", rank, size-1)
	}
	left := size // processes not yet given to a dimension
	block := make([]int64, dims)
	for i := range dims {
		if block[i], err = blockSize(gsizes[i], distribs[i], dargs[i], psizes[i]); err != nil {
			return nil, fmt.Errorf("darray: in dimension %d: %w", i, err)
		}
		if left%psizes[i] != 0 {
			return nil, fmt.Errorf("darray: a grid of %v processes: want %d in all", psizes, size)
		}
		left /= psizes[i]
	}
	if left != 1 {
		return nil, fmt.Errorf("darray: a grid of %v processes: want %d in all", psizes, size)
	}
	coords := make([]int64, dims)
	for i := dims - 1; i >= 0; i-- {
		coords[i] = rank % psizes[i]
		rank /= psizes[i]
	}

	c := Contents{
		Combiner: combiner,
		Count:    size,
		Sizes:    slices.Clone(gsizes),
		Distribs: slices.Clone(distribs),
		Dargs:    slices.Clone(dargs),
		Psizes:   slices.Clone(psizes),
		Types:    []*Type{t},
	}
	for i, p := range psizes {
		c.Rank = c.Rank*p + coords[i]
	}
	part, place, stride := t, int64(0), t.Extent()
	for _, i := range dimensions(dims, o) {
		above, ok := mul(stride, gsizes[i])
		if !ok {
			return nil, fmt.Errorf("darray of sizes %v, extent %d: too large for 64 bits", gsizes, t.Extent())
		}
		var start int64
		if part, start, err = cyclic(gsizes[i], block[i], psizes[i], coords[i], stride, part); err != nil {
			return nil, fmt.Errorf("darray: in dimension %d: %w", i, err)
		}
		place += start * stride
		stride = above
	}
	return inArray(c, part, place, stride)
}

// blockSize returns how many elements in a row of a dimension go to the same process.
func blockSize(gsize int64, d Distribution, arg, processes int64) (int64, error) {
	if gsize < 1 {
		return 0, fmt.Errorf("size %d: want 1 or more", gsize)
	}
	if processes < 1 {
		return 0, fmt.Errorf("%d processes: want 1 or more", processes)
	}
	if arg < 1 && arg != DefaultArg {
		return 0, fmt.Errorf("distribution argument %d: want 1 or more, or DefaultArg", arg)
	}
	least := (gsize-1)/processes + 1
	switch d {
	case Block:
		if arg == DefaultArg {
			return least, nil
		}
		if arg < least {
			return 0, fmt.Errorf("%d elements in blocks of %d for %d processes: want blocks of %d or more",
				gsize, arg, processes, least)
		}
		return arg, nil
	case Cyclic:
		if arg == DefaultArg {
			return 1, nil
		}
		return arg, nil
	case Whole:
		if processes != 1 {
			return 0, fmt.Errorf("%d processes, but it is not distributed: want 1", processes)
		}
		return gsize, nil
	}
	return 0, fmt.Errorf("unknown distribution %d: want Block, Cyclic or Whole", d)
}

// cyclic returns what process coord of some has of a dimension: of gsize times t, stride
// bytes apart, each block elements to the next process. start is the index of the first of
// them, where the type that it returns has its origin.
func cyclic(gsize, block, processes, coord, stride int64, t *Type) (part *Type, start int64, err error) {
	if coord > (gsize-1)/block {
		part, err = HVector(0, 1, stride, t) // nothing
		return part, 0, err
	}
	start = coord * block
	left := gsize - start // from the first one on, those of others included
	// A round is a block of each process. It may be longer than the array, and beyond
	// 64 bits, if there is no second one.
	full, rest, round := int64(0), min(left, block), int64(0)
	if turn, ok := mul(block, processes); ok && turn < left {
		full, rest = left/turn, min(left%turn, block)
		round = turn * stride
	}
	if rest == block {
		full, rest = full+1, 0
	}
	if full > 0 {
		if part, err = HVector(block, 1, stride, t); err != nil {
			return nil, 0, err
		}
		if part, err = HVector(full, 1, round, part); err != nil || rest == 0 {
			return part, start, err
		}
	}
	last, err := HVector(rest, 1, stride, t)
	if err != nil || full == 0 {
		return last, start, err
	}
	// Not by Struct, which would pad.
	p := parts{blocklens: []int64{1}, displs: []int64{0, full * round}, children: []*Type{part, last}}
	part, err = newListed(Contents{Combiner: CombinerHIndexed}, p)
	return part, start, err
}

// inArray returns a part of an array with the whole array's bounds.
func inArray(c Contents, part *Type, place, extent int64) (*Type, error) {
	part, err := HIndexedBlock(1, []int64{place}, part)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.Combiner.long(), err)
	}
	return newSame(c, part, 0, extent)
}

// dimensions returns the numbers of dimensions, the fastest first.
func dimensions(n int, o Order) []int {
	d := make([]int, n)
	for i := range d {
		d[i] = i
	}
	if o == C {
		slices.Reverse(d)
	}
	return d
}

func order(what string, c, fortran Combiner, o Order) (Combiner, error) {
	switch o {
	case C:
		return c, nil
	case Fortran:
		return fortran, nil
	}
	return "", fmt.Errorf("%s of unknown order %d: want C or Fortran", what, o)
}
