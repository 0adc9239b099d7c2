// SPDX-License-Identifier: Apache-2.0

package ddttest

import "github.com/xspin/xspin/ddt"

// Disputed says why MPICH 4.0.2 gives a type, or one that it is made of, other bounds than
// MPI does, or "" if it does not. Bytes are in other places then too, wherever an extent
// is used. It may name a reason where both happen to agree.
func Disputed(t *ddt.Type) string {
	seen := map[*ddt.Type]bool{}
	var walk func(t *ddt.Type) string
	walk = func(t *ddt.Type) string {
		if seen[t] {
			return ""
		}
		seen[t] = true
		for _, child := range t.Contents().Types {
			if why := walk(child); why != "" {
				return why
			}
		}
		return disputed(t)
	}
	return walk(t)
}

// disputed looks at one constructor only.
func disputed(t *ddt.Type) string {
	c := t.Contents()
	switch c.Combiner {
	case ddt.CombinerNamed, ddt.CombinerResized, ddt.CombinerDup,
		ddt.CombinerSubarray, ddt.CombinerSubarrayF, ddt.CombinerDarray, ddt.CombinerDarrayF:
		return ""
	}
	x := expander{}
	marked, plain, equal := false, false, true
	for i, child := range c.Types {
		if c.Combiner == ddt.CombinerStruct && c.Blocklens[i] == 0 {
			equal = equal && child == c.Types[0]
			continue
		}
		m := x.expand(child)
		if len(m.places) == 0 {
			return "elements without bytes: MPICH has them count at their displacement, or drops their bounds"
		}
		marked = marked || m.marked
		plain = plain || !m.marked
		equal = equal && child == c.Types[0]
	}
	switch c.Combiner {
	case ddt.CombinerVector, ddt.CombinerHVector, ddt.CombinerIndexedBlock, ddt.CombinerHIndexedBlock:
		if c.Blocklen == 0 {
			return "blocks without elements: MPICH has their displacements count"
		}
	case ddt.CombinerStruct:
		if marked && plain {
			return "a struct with bounds set in some of it: MPICH has the others count too"
		}
		if marked {
			return "a struct with bounds set in it: MPICH rounds up its extent nevertheless"
		}
		if equal {
			return "a struct of one type: MPICH does not round up its extent"
		}
	}
	return ""
}
