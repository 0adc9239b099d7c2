// SPDX-License-Identifier: Apache-2.0

// Package ddttest has random datatypes, and what MPI's definitions make of a datatype,
// computed the slow way. It is for tests.
package ddttest

import (
	"fmt"
	"slices"

	"github.com/xspin/xspin/ddt"
)

// Places returns for every byte of the stream of count elements its place, from the
// buffer's origin. It follows the definitions of type maps (MPI 3.1, section 4.1) and of
// what it is told only the type's contents. It takes memory in proportion to the stream,
// and time in proportion to the elements that are written, those without bytes too.
func Places(t *ddt.Type, count int64) []int64 {
	var all typeMap
	all.repeat(count, expander{}.expand(t), 0)
	return all.places
}

// Bounds returns the lower and the upper bound of a type by the same definitions.
func Bounds(t *ddt.Type) (lb, ub int64) {
	m := expander{}.expand(t)
	return m.lb, m.ub
}

// Overlaps reports whether a place occurs twice.
func Overlaps(places []int64) bool {
	if len(places) == 0 {
		return false
	}
	lo, hi := slices.Min(places), slices.Max(places)
	if hi-lo < 64*int64(len(places)) {
		seen := make([]bool, hi-lo+1)
		for _, p := range places {
			if seen[p-lo] {
				return true
			}
			seen[p-lo] = true
		}
		return false
	}
	seen := make(map[int64]bool, len(places))
	for _, p := range places {
		if seen[p] {
			return true
		}
		seen[p] = true
	}
	return false
}

// A typeMap is MPI's, with bytes for entries.
type typeMap struct {
	places []int64
	lb, ub int64
	marked bool  // it has entries lb_marker and ub_marker, which make lb and ub
	align  int64 // the greatest k_j; 0 without entries that are data
}

func (m *typeMap) extent() int64 { return m.ub - m.lb }

// empty reports whether there are no entries.
func (m *typeMap) empty() bool { return len(m.places) == 0 && !m.marked }

// put appends another type map, displaced.
func (m *typeMap) put(c *typeMap, displ int64) {
	if c.empty() {
		return
	}
	lb, ub := displ+c.lb, displ+c.ub
	switch {
	case m.empty(), c.marked && !m.marked:
		m.lb, m.ub = lb, ub
	case c.marked == m.marked:
		m.lb, m.ub = min(m.lb, lb), max(m.ub, ub)
	}
	m.marked = m.marked || c.marked
	m.align = max(m.align, c.align)
	for _, p := range c.places {
		m.places = append(m.places, p+displ)
	}
}

// repeat appends n copies, an extent apart.
func (m *typeMap) repeat(n int64, c *typeMap, displ int64) {
	for j := range n {
		m.put(c, displ+j*c.extent())
	}
}

// mark sets the bounds.
func (m *typeMap) mark(lb, ub int64) { m.lb, m.ub, m.marked = lb, ub, true }

// round gives a struct its epsilon.
func (m *typeMap) round() {
	if m.marked || m.empty() {
		return
	}
	for m.extent()%m.align != 0 {
		m.ub++
	}
}

// An expander has the type maps of types that occur more than once.
type expander map[*ddt.Type]*typeMap

func (x expander) expand(t *ddt.Type) *typeMap {
	m, ok := x[t]
	if !ok {
		m = x.build(t)
		x[t] = m
	}
	return m
}

func (x expander) build(t *ddt.Type) *typeMap {
	c := t.Contents()
	if c.Combiner == ddt.CombinerNamed {
		return leaf(c.Name, t.Size())
	}
	var of []*typeMap
	for _, child := range c.Types {
		of = append(of, x.expand(child))
	}
	m := &typeMap{}
	switch c.Combiner {
	case ddt.CombinerContiguous:
		m.repeat(c.Count, of[0], 0)
	case ddt.CombinerVector:
		for i := range c.Count {
			m.repeat(c.Blocklen, of[0], i*c.Stride*of[0].extent())
		}
	case ddt.CombinerHVector:
		for i := range c.Count {
			m.repeat(c.Blocklen, of[0], i*c.Stride)
		}
	case ddt.CombinerIndexed:
		for i, d := range c.Displs {
			m.repeat(c.Blocklens[i], of[0], d*of[0].extent())
		}
	case ddt.CombinerHIndexed:
		for i, d := range c.Displs {
			m.repeat(c.Blocklens[i], of[0], d)
		}
	case ddt.CombinerIndexedBlock:
		for _, d := range c.Displs {
			m.repeat(c.Blocklen, of[0], d*of[0].extent())
		}
	case ddt.CombinerHIndexedBlock:
		for _, d := range c.Displs {
			m.repeat(c.Blocklen, of[0], d)
		}
	case ddt.CombinerStruct:
		for i, d := range c.Displs {
			m.repeat(c.Blocklens[i], of[i], d)
		}
		m.round()
	case ddt.CombinerSubarray, ddt.CombinerSubarrayF:
		has := func(dim int, index int64) bool {
			return c.Starts[dim] <= index && index < c.Starts[dim]+c.Subsizes[dim]
		}
		m.array(c.Sizes, c.Combiner == ddt.CombinerSubarrayF, of[0], has)
	case ddt.CombinerDarray, ddt.CombinerDarrayF:
		m.array(c.Sizes, c.Combiner == ddt.CombinerDarrayF, of[0], owner(c))
	case ddt.CombinerResized:
		m.put(of[0], 0)
		m.mark(c.LB, c.LB+c.Extent)
	case ddt.CombinerDup:
		m.put(of[0], 0)
	default:
		panic(fmt.Sprintf("ddttest: unknown combiner %q", c.Combiner))
	}
	return m
}

// array appends those elements of an array that are there in all dimensions, in the order
// of the array, and marks the bounds of it.
func (m *typeMap) array(sizes []int64, fortran bool, of *typeMap, has func(dim int, index int64) bool) {
	dims := make([]int, len(sizes)) // the slowest first
	for i := range dims {
		dims[i] = i
		if fortran {
			dims[i] = len(sizes) - 1 - i
		}
	}
	var walk func(level int, linear int64)
	walk = func(level int, linear int64) {
		if level == len(dims) {
			m.put(of, linear*of.extent())
			return
		}
		dim := dims[level]
		for index := range sizes[dim] {
			if has(dim, index) {
				walk(level+1, linear*sizes[dim]+index)
			}
		}
	}
	walk(0, 0)
	ub := of.extent()
	for _, size := range sizes {
		ub *= size
	}
	m.mark(0, ub)
}

// owner returns which elements of a distributed array are the rank's, after High
// Performance Fortran.
func owner(c ddt.Contents) func(dim int, index int64) bool {
	coords := make([]int64, len(c.Psizes))
	rank := c.Rank
	for i := len(coords) - 1; i >= 0; i-- {
		coords[i] = rank % c.Psizes[i]
		rank /= c.Psizes[i]
	}
	return func(dim int, index int64) bool {
		block := c.Dargs[dim]
		switch c.Distribs[dim] {
		case ddt.Whole:
			return true
		case ddt.Block:
			if block == ddt.DefaultArg {
				block = (c.Sizes[dim] + c.Psizes[dim] - 1) / c.Psizes[dim]
			}
			return index/block == coords[dim]
		case ddt.Cyclic:
			if block == ddt.DefaultArg {
				block = 1
			}
			return index/block%c.Psizes[dim] == coords[dim]
		}
		panic(fmt.Sprintf("ddttest: unknown distribution %d", c.Distribs[dim]))
	}
}

// leaf returns the type map of a predefined type.
func leaf(name string, size int64) *typeMap {
	if value, ok := map[string]int64{
		"float_int":      4,
		"double_int":     8,
		"long_int":       8,
		"int_int":        4,
		"short_int":      2,
		"longdouble_int": 16,
	}[name]; ok {
		m := &typeMap{}
		m.put(leaf("", value), 0)
		m.put(leaf("", 4), max(value, 4))
		m.round()
		return m
	}
	m := &typeMap{ub: size, align: size}
	switch name {
	case "cfloat", "cdouble", "clongdouble", "complex", "double_complex":
		m.align = size / 2
	}
	for i := range size {
		m.places = append(m.places, i)
	}
	return m
}
