// SPDX-License-Identifier: Apache-2.0

package spin

import (
	"fmt"
	"strings"
)

// A Problem is what is wrong with a description, and where in it: Path is made of keys as
// a configuration file has them, such as "vhpus" or "queue.events".
type Problem struct {
	Path string
	Err  error
}

func (p Problem) Error() string { return p.Path + ": " + p.Err.Error() }

func (p Problem) Unwrap() error { return p.Err }

// Problems are all that is wrong with a description. The zero value says that nothing is.
type Problems []Problem

// Add adds one.
func (all *Problems) Add(path, format string, args ...any) {
	*all = append(*all, Problem{path, fmt.Errorf(format, args...)})
}

// Between adds one if v is not 0, which is left out, and not lo to hi.
func (all *Problems) Between(path string, v, lo, hi int) {
	if v != 0 && (v < lo || v > hi) {
		all.Add(path, "%d: want %d to %d", v, lo, hi)
	}
}

// Err returns them as an error, nil if there is none.
func (all Problems) Err() error {
	if len(all) == 0 {
		return nil
	}
	return all
}

func (all Problems) Error() string {
	var b strings.Builder
	for i, p := range all {
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(p.Error())
	}
	return b.String()
}

// Unwrap has errors.Is look at each.
func (all Problems) Unwrap() []error {
	errs := make([]error, len(all))
	for i, p := range all {
		errs[i] = p
	}
	return errs
}
