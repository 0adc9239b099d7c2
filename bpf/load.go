// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
)

// Load loads an object into the kernel. If the verifier refuses a program, the
// error is a [*VerifierError].
func Load(spec *ebpf.CollectionSpec) (*ebpf.Collection, error) { return LoadWith(spec, nil) }

// LoadWith is Load with maps that are there already, in the place of those of these names.
// They stay the caller's.
func LoadWith(spec *ebpf.CollectionSpec, instead map[string]*ebpf.Map) (*ebpf.Collection, error) {
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: instead})
	var ve *ebpf.VerifierError
	if errors.As(err, &ve) {
		return nil, &VerifierError{Release: release(), Tail: tail(ve.Log), Err: ve}
	}
	return coll, err
}

// A VerifierError says that the kernel's verifier refused one of our programs.
// That is a defect: please report it, with all of the text.
type VerifierError struct {
	Release string   // of Linux
	Tail    []string // the lines of the verifier's log that give the reason
	Err     *ebpf.VerifierError
}

func (e *VerifierError) Error() string {
	return fmt.Sprintf("the verifier of Linux %s refuses it, which is a defect of XsPIN, please report it: %v\n\t%s",
		e.Release, e.Err.Cause, strings.Join(e.Tail, "\n\t"))
}

func (e *VerifierError) Unwrap() error { return e.Err }

// release is the kernel's, as uname -r has it.
func release() string {
	b, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return "(" + err.Error() + ")"
	}
	return strings.TrimSpace(string(b))
}

// tail returns the lines with the reason and the place. Older verifiers have them
// last, before their statistics; later ones (seen: Linux 7.3) under a heading, before
// the way that led there and suggestions.
func tail(log []string) []string {
	const lines = 16
	log = slices.DeleteFunc(slices.Clone(log), func(l string) bool { return strings.TrimSpace(l) == "" })
	index := func(prefix string, from int) int {
		for i := from; i < len(log); i++ {
			if strings.HasPrefix(log[i], prefix) {
				return i
			}
		}
		return len(log)
	}
	if i := index("Verification failed", 0); i < len(log) {
		return log[i:min(index("Causal path:", i), index("Suggestion:", i), index("processed ", i), i+lines)]
	}
	end := index("processed ", 0)
	return log[max(0, end-lines/2):end]
}
