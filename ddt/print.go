// SPDX-License-Identifier: Apache-2.0

package ddt

import "strconv"

// String writes the type as it was made, so that Parse reads the same. A type that is
// longer than MaxText, or has more constructors than MaxTypes, is cut off there and ends
// in "...", which Parse does not read: what is shared is written wherever it is used, and
// that may be more than fits anywhere.
func (t *Type) String() string {
	var p printer
	if !p.typ(t) {
		p.text = append(p.text[:min(len(p.text), MaxText)], "..."...)
	}
	return string(p.text)
}

type printer struct {
	text  []byte
	types int
}

// typ writes a type, unless there is no room.
func (p *printer) typ(t *Type) bool {
	c := t.Contents()
	if c.Combiner == CombinerNamed {
		return p.add(c.Name)
	}
	if p.types++; p.types > MaxTypes {
		return false
	}
	p.add(string(c.Combiner))
	if c.Combiner != CombinerDup && !p.arguments(c) {
		return false
	}
	return c.Combiner == CombinerStruct || p.add("[") && p.typ(c.Types[0]) && p.add("]")
}

func (p *printer) arguments(c Contents) bool {
	p.add("(")
	switch c.Combiner {
	case CombinerContiguous:
		p.tuple(' ', c.Count)
	case CombinerVector, CombinerHVector:
		p.tuple(' ', c.Count, c.Blocklen, c.Stride)
	case CombinerIndexed, CombinerHIndexed:
		return p.tuples(c.Displs, c.Blocklens) && p.add(")")
	case CombinerIndexedBlock, CombinerHIndexedBlock:
		p.tuple(' ', c.Blocklen)
		p.add(": ")
		return p.tuples(c.Displs) && p.add(")")
	case CombinerStruct:
		for i, t := range c.Types {
			p.space(i)
			p.tuple(',', c.Displs[i], c.Blocklens[i])
			if p.add(","); !p.typ(t) {
				return false
			}
		}
	case CombinerSubarray, CombinerSubarrayF:
		return p.tuples(c.Starts, c.Subsizes, c.Sizes) && p.add(")")
	case CombinerDarray, CombinerDarrayF:
		p.tuple(' ', c.Count, c.Rank)
		p.add(": ")
		for i, d := range c.Distribs {
			p.space(i)
			p.tuple(',', c.Sizes[i])
			p.add("," + distributions[d])
			if c.Dargs[i] != DefaultArg {
				p.add(":")
				p.tuple(',', c.Dargs[i])
			}
			p.add(",")
			if !p.tuple(',', c.Psizes[i]) {
				return false
			}
		}
	case CombinerResized:
		p.tuple(',', c.LB, c.Extent)
	}
	return p.add(")")
}

// tuples writes the entries of a list, given by column.
func (p *printer) tuples(columns ...[]int64) bool {
	for i := range columns[0] {
		p.space(i)
		for j, column := range columns {
			if j > 0 {
				p.add(",")
			}
			if !p.tuple(',', column[i]) {
				return false
			}
		}
	}
	return true
}

// tuple writes numbers.
func (p *printer) tuple(sep byte, numbers ...int64) bool {
	for i, n := range numbers {
		if i > 0 {
			p.text = append(p.text, sep)
		}
		p.text = strconv.AppendInt(p.text, n, 10)
	}
	return len(p.text) <= MaxText
}

// space writes one before all entries but the first.
func (p *printer) space(i int) {
	if i > 0 {
		p.text = append(p.text, ' ')
	}
}

// add tells whether there is still room.
func (p *printer) add(s string) bool {
	p.text = append(p.text, s...)
	return len(p.text) <= MaxText
}
