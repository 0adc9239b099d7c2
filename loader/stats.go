// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"

	"github.com/xspin/xspin/bpf"
)

// Stats are the programs' counters, in frames, summed over hooks and CPUs since they were
// attached. A train is one frame. What the program at xdp leaves to the one at tc is counted there. Seen is the sum of Passed, Redirected, Failed, Malformed, Oversize,
// Trains and all of Refused, of Spilled and of Kernel.
type Stats struct {
	Seen       uint64
	Passed     uint64                  // no ruleset matched
	Redirected uint64                  // on their way to an HPU
	Failed     uint64                  // matched, could not be redirected, passed on
	Malformed  uint64                  // matched, against their message format, passed on
	Oversize   uint64                  // matched, more buffers than handlers get, passed on
	Trains     uint64                  // matched, several packets in one that nobody here cuts, passed on: see Ingress.Trains
	Matched    [bpf.MaxRulesets]uint64 // by ruleset
	Refused    [bpf.MaxContexts]uint64 // by context: dropped for lack of credit
	Spilled    [bpf.MaxContexts]uint64 // by context: passed on for lack of credit
	Kernel     [bpf.MaxContexts]uint64 // by context: to its handlers in eBPF
}

// Stats reads the program's counters.
func (in *Ingress) Stats() (Stats, error) {
	var cpus []bpf.Stats
	if err := in.objs.Counters.Lookup(uint32(0), &cpus); err != nil {
		return Stats{}, fmt.Errorf("read the program's counters: %w", err)
	}
	in.loading.Lock()
	tc := in.tc.Counters
	in.loading.Unlock()
	if tc != nil {
		var more []bpf.Stats
		if err := tc.Lookup(uint32(0), &more); err != nil {
			return Stats{}, fmt.Errorf("read the counters of the program at tc: %w", err)
		}
		cpus = append(cpus, more...)
	}
	var sum Stats
	for i := range cpus {
		c := &cpus[i]
		sum.Seen += c.Seen
		sum.Passed += c.Passed
		sum.Redirected += c.Redirected
		sum.Failed += c.Failed
		sum.Malformed += c.Malformed
		sum.Oversize += c.Oversize
		sum.Trains += c.Trains
		for k, n := range c.Matched {
			sum.Matched[k] += n
		}
		for k, n := range c.Refused {
			sum.Refused[k] += n
		}
		for k, n := range c.Spilled {
			sum.Spilled[k] += n
		}
		for k, n := range c.Kernel {
			sum.Kernel[k] += n
		}
	}
	return sum, nil
}
