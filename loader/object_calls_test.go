// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"testing"
	"time"

	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
)

// manyCalls is a program of functions each of which calls the next one at so many places. The last is global.
func manyCalls(functions, places int) (insns asm.Instructions) {
	name := func(i int) string { return fmt.Sprint("f", i) }
	for i := range functions {
		first := len(insns)
		for range places {
			insns = append(insns, asm.Call.Label(name((i+1)%functions)))
		}
		insns = append(insns, asm.Return())
		linkage := btf.StaticFunc
		if i == functions-1 {
			linkage = btf.GlobalFunc
		}
		insns[first] = btf.WithFuncMetadata(insns[first].WithSymbol(name(i)), &btf.Func{Name: name(i), Linkage: linkage})
	}
	return insns
}

// The check of calls looks at each instruction a few times, however functions call each other: next to a walk that looks once
// it takes a few times as long, whatever the machine.
func TestCallsAreLookedAtOnce(t *testing.T) {
	insns := manyCalls(256, 250)
	fastest := func(f func()) time.Duration {
		best := time.Hour
		for range 5 {
			start := time.Now()
			f()
			best = min(best, time.Since(start))
		}
		return best
	}
	once := fastest(func() { callees(insns) })
	all := fastest(func() { checkCalls(insns) })
	t.Logf("%d instructions: %.1f times as long as a look at each", len(insns), float64(all)/float64(once))
	if all > 60*once {
		t.Errorf("it takes %v, and a look at each instruction %v", all, once)
	}
}
