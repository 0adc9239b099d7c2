// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// The steps that the verifier counts bound how many instructions a packet takes, and not how long:
// a step may copy megabytes. So each call has a bound, too, and an object whose steps
// and calls could keep a CPU for longer than MaxPacketTime is refused.

// MaxPacketTime is how long the handlers of an object may take for a packet at most: the calls outside of loops,
// and the steps that the verifier counts, as if every other one were the dearest call in a loop.
const MaxPacketTime = 20 * time.Millisecond

// Bounds of an object's own maps, in bytes, so that no call takes long. A hash for each CPU
// clears the values of all CPUs when it gets an entry.
const (
	maxKey          = 512
	maxValue        = 4096
	maxPerCPUValues = 16 << 10 // of all CPUs, of a hash for each CPU
)

// A timeBound is what is known of the time that handlers take, before the verifier counts steps.
type timeBound struct {
	once     int64  // ns, at most, of calls outside of loops
	dearest  string // call in a loop
	each     int64  // ns that it takes, at most
	accesses bool   // there are loads or stores in loops
}

// callTimes returns what calls of an object's functions take at most, in ns: two to three times
// what was measured on Linux 6.18 (BenchmarkDearCalls).
func callTimes(object *ebpf.CollectionSpec) func(*asm.Instruction) (name string, ns int64) {
	lookup, update := int64(20), int64(40)
	for name, m := range object.Maps {
		if isSection(name) {
			continue
		}
		n := int64(m.ValueSize)
		if isPerCPUHash(m.Type) {
			n = maxPerCPUValues
		}
		hash := int64(0)
		if m.Type != ebpf.Array && m.Type != ebpf.PerCPUArray {
			hash = 100 + int64(m.KeySize)/2
		}
		lookup = max(lookup, 20+hash)
		update = max(update, 40+3*hash+n/8)
	}
	// Another CPU takes the line away each time; a ninth one makes it worse, but that is not the object's alone.
	cpus, err := PossibleCPUs()
	if err != nil {
		cpus = 8
	}
	atomics := 50 * int64(min(cpus, 8))
	return func(ins *asm.Instruction) (string, int64) {
		switch {
		case ins.OpCode.Class() == asm.StXClass && ins.OpCode.Mode() == asm.AtomicMode:
			return "an atomic operation", atomics
		case ins.IsFunctionCall():
			switch ref := ins.Reference(); ref {
			case "xspin_notify", "xspin_log_line":
				return ref, 500
			case "xspin_csum_diff":
				return "bpf_csum_diff", 150
			}
			return ins.Reference(), 0 // its instructions are counted
		case ins.IsBuiltinCall():
			f := asm.BuiltinFunc(ins.Constant)
			switch name := helperName(f); f {
			case asm.FnMapLookupElem:
				return name, lookup
			case asm.FnMapUpdateElem, asm.FnMapDeleteElem:
				return name, update
			case asm.FnXdpLoadBytes, asm.FnXdpStoreBytes: // a frame is in one piece: some 3,500 bytes at most
				return name, 200
			default:
				return name, 80
			}
		}
		return "an instruction", 2
	}
}

// boundTime finds what an object's functions may take. Those that are no handlers may be called in
// loops, so all that they call is.
func boundTime(user functions, object *ebpf.CollectionSpec) timeBound {
	t := timeBound{dearest: "an instruction", each: 2}
	times := callTimes(object)
	for _, fn := range slices.Sorted(maps.Keys(user)) {
		loops := inLoops(user[fn])
		for i := range user[fn] {
			name, ns := times(&user[fn][i])
			if handlerFuncs[fn] != "" && !loops[i] {
				t.once += ns
			} else {
				if ns > t.each {
					t.dearest, t.each = name, ns
				}
				if class := user[fn][i].OpCode.Class(); class == asm.LdXClass || class.IsStore() {
					t.accesses = true
				}
			}
		}
	}
	return t
}

func isPerCPUHash(t ebpf.MapType) bool { return t == ebpf.PerCPUHash || t == ebpf.LRUCPUHash }

// engineSteps are fewer than the engine's own of the steps that a verifier counts.
func engineSteps(messages bool) int { return map[bool]int{true: 50_000}[messages] }

// cached is how many bytes are in a cache, when they are used all the time; an access to more may take uncached ns.
const (
	cached   = 256 << 10
	uncached = 100
)

// of returns how long a packet takes at most that takes so many steps of handlers, which reach so many bytes.
func (t *timeBound) of(steps int, reach int64) time.Duration {
	each := t.each
	if t.accesses && reach > cached {
		each = max(each, uncached)
	}
	return time.Duration(t.once + int64(max(steps, 0))/2*(each+2))
}

// checkTime refuses a program in which a packet may take too long.
func (o *Object) checkTime(h *Handlers, cfg *HandlersConfig) error {
	_, steps, err := h.Instructions()
	if err != nil {
		return err
	}
	if steps == 0 { // the kernel does not tell; it takes no more than these
		steps = 1_000_000
	}
	reach := o.memory
	if shared, each := o.UsesMemory(); shared || each {
		reach += cfg.MemorySize + cfg.HPUMemorySize
	}
	if t := o.time.of(steps-engineSteps(o.messages), reach); t > MaxPacketTime {
		return fmt.Errorf("a packet may take %v, and the limit is %v: the verifier counts %d steps, the dearest call in a loop is %s, which takes up to %d ns, and memory has %d bytes: bound the loops, call it outside of them, or use less memory",
			t.Round(time.Microsecond), MaxPacketTime, steps, o.time.dearest, o.time.each, reach)
	}
	return nil
}
