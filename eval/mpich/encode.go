// SPDX-License-Identifier: Apache-2.0

// Package mpich compares with MPICH: it hands datatypes to it, builds the C programs that
// use it, and runs them. Those that transfer can be Open MPI's, too.
package mpich

import (
	"strconv"

	"github.com/xspin/xspin/ddt"
)

// Encode writes a type for mpi_type_read of src/mpi_type.h, which has the format: a line
// for each type in it, however often it is used.
//
// MPICH gives some types other bounds than MPI does. A MPI_Type_create_resized more puts
// those right. See bounds.
func Encode(t *ddt.Type) []byte {
	e := encoder{seen: map[*ddt.Type]seen{}}
	e.add(t)
	return append(append(strconv.AppendInt(nil, e.lines, 10), '\n'), e.text...)
}

type encoder struct {
	text  []byte
	lines int64
	seen  map[*ddt.Type]seen
}

type seen struct {
	line  int64
	bound bool // its bounds were set, by itself or by what it is made of
}

// bounds reports whether MPICH (4.0) must be told the bounds of a type.
//
// Bounds that were set, and be it on one entry, are all that makes a struct's bounds (MPI
// 3.1, section 4.1.6). To MPICH they are like the others, and it pads.
//
// What has no entries has no effect on bounds (section 4.1.2), unless some were set. MPICH
// has structs reach to where such an entry is, blocks of no elements to where they would
// begin, and forgets bounds of what is empty.
//
// Padding is up to the library. MPICH has none for structs of one type, or of several that
// are one to it; they look the same then.
func (e *encoder) bounds(t *ddt.Type, c ddt.Contents) bool {
	if c.Combiner != ddt.CombinerStruct {
		return t.Size() == 0 && !setsBounds(c)
	}
	alike := true
	for _, old := range c.Types {
		if e.seen[old].bound || old.Size() == 0 {
			return true
		}
		first := c.Types[0]
		alike = alike && old.Size() == first.Size() && old.LB() == first.LB() && old.UB() == first.UB()
	}
	return alike
}

func setsBounds(c ddt.Contents) bool {
	switch c.Combiner {
	case ddt.CombinerResized, ddt.CombinerSubarray, ddt.CombinerSubarrayF, ddt.CombinerDarray, ddt.CombinerDarrayF:
		return true
	}
	return false
}

// add writes a type's line, if it has none, after those of what it is made of.
func (e *encoder) add(t *ddt.Type) {
	if _, ok := e.seen[t]; ok {
		return
	}
	c := t.Contents()
	bound := setsBounds(c)
	for _, old := range c.Types {
		e.add(old)
		bound = bound || e.seen[old].bound
	}
	e.line(c)
	if e.bounds(t, c) {
		e.text = append(e.text, ddt.CombinerResized...)
		e.numbers(t.LB(), t.Extent(), e.lines-1)
		e.end()
	}
	e.seen[t] = seen{e.lines - 1, bound}
}

func (e *encoder) line(c ddt.Contents) {
	defer e.end()
	if c.Combiner == ddt.CombinerNamed {
		e.text = append(append(e.text, "named "...), c.Name...)
		return
	}
	e.text = append(e.text, c.Combiner...)
	switch c.Combiner {
	case ddt.CombinerContiguous:
		e.numbers(c.Count)
	case ddt.CombinerVector, ddt.CombinerHVector:
		e.numbers(c.Count, c.Blocklen, c.Stride)
	case ddt.CombinerIndexed, ddt.CombinerHIndexed:
		e.numbers(int64(len(c.Displs)))
		for i, d := range c.Displs {
			e.numbers(d, c.Blocklens[i])
		}
	case ddt.CombinerIndexedBlock, ddt.CombinerHIndexedBlock:
		e.numbers(int64(len(c.Displs)), c.Blocklen)
		e.numbers(c.Displs...)
	case ddt.CombinerStruct:
		e.numbers(int64(len(c.Displs)))
		for i, d := range c.Displs {
			e.numbers(d, c.Blocklens[i], e.seen[c.Types[i]].line)
		}
	case ddt.CombinerSubarray, ddt.CombinerSubarrayF:
		e.numbers(int64(len(c.Sizes)))
		for i, size := range c.Sizes {
			e.numbers(size, c.Subsizes[i], c.Starts[i])
		}
	case ddt.CombinerDarray, ddt.CombinerDarrayF:
		e.numbers(c.Count, c.Rank, int64(len(c.Sizes)))
		for i, size := range c.Sizes {
			e.numbers(size, int64(c.Distribs[i]), c.Dargs[i], c.Psizes[i])
		}
	case ddt.CombinerResized:
		e.numbers(c.LB, c.Extent)
	}
	if c.Combiner != ddt.CombinerStruct {
		e.numbers(e.seen[c.Types[0]].line)
	}
}

func (e *encoder) end() {
	e.text = append(e.text, '\n')
	e.lines++
}

func (e *encoder) numbers(ns ...int64) {
	for _, n := range ns {
		e.text = strconv.AppendInt(append(e.text, ' '), n, 10)
	}
}
