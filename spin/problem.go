// SPDX-License-Identifier: Apache-2.0

package spin

import (
	"fmt"
	"strings"
)

// A Problem is something wrong with a description. Path says where, in the keys of a
// configuration file, such as "vhpus" or "queue.events".
type Problem struct {
	Path string
	Err  error
}

func (p Problem) Error() string { return p.Path + ": " + p.Err.Error() }

func (p Problem) Unwrap() error { return p.Err }

// Problems are all that is wrong with a description. The zero value has none.
type Problems []Problem

// Add adds one.
func (all *Problems) Add(path, format string, args ...any) {
	*all = append(*all, Problem{path, fmt.Errorf(format, args...)})
}

// Between adds one if v is outside lo to hi. It accepts 0, which means left out.
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

// Unwrap lets errors.Is and errors.As look at each.
func (all Problems) Unwrap() []error {
	errs := make([]error, len(all))
	for i, p := range all {
		errs[i] = p
	}
	return errs
}
