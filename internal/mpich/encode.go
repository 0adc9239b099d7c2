// SPDX-License-Identifier: Apache-2.0

// Package mpich compares with MPICH: it hands datatypes to it, builds the C programs that
// use it, and runs them.
package mpich

import (
	"strconv"

	"github.com/xspin/xspin/ddt"
)

// Encode writes a type for mpi_type_read of src/mpi_type.h, which has the format: a line
// for each type in it, however often it is used.
func Encode(t *ddt.Type) []byte {
	e := encoder{lines: map[*ddt.Type]int64{}}
	e.add(t)
	return append(append(strconv.AppendInt(nil, int64(len(e.lines)), 10), '\n'), e.text...)
}

type encoder struct {
	text  []byte
	lines map[*ddt.Type]int64 // their numbers
}

// add writes a type's line, if it has none, after those of what it is made of.
func (e *encoder) add(t *ddt.Type) {
	if _, ok := e.lines[t]; ok {
		return
	}
	c := t.Contents()
	for _, old := range c.Types {
		e.add(old)
	}
	e.lines[t] = int64(len(e.lines))

	if c.Combiner == ddt.CombinerNamed {
		e.text = append(append(append(e.text, "named "...), c.Name...), '\n')
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
			e.numbers(d, c.Blocklens[i], e.lines[c.Types[i]])
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
		e.numbers(e.lines[c.Types[0]])
	}
	e.text = append(e.text, '\n')
}

func (e *encoder) numbers(ns ...int64) {
	for _, n := range ns {
		e.text = strconv.AppendInt(append(e.text, ' '), n, 10)
	}
}
