// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/xspin/xspin/bpf"
)

// The steps that the verifier counts bound how many instructions a packet takes, and not how long:
// a step may copy megabytes. So each call has a bound, too, and an object whose steps
// and calls could keep a CPU for longer than MaxPacketTime is refused.

// MaxPacketTime is how long the handlers of an object may take for a packet at most: the calls outside of loops,
// and the steps that the verifier counts, as if as many of them as can be were the dearest call in a loop.
const MaxPacketTime = 20 * time.Millisecond

// Bounds of an object's own maps, in bytes, so that no call takes long. A hash for each CPU
// clears the values of all CPUs when it gets an entry.
const (
	maxKey          = 512
	maxValue        = 4096
	maxPerCPUValues = 16 << 10 // of all CPUs, of a hash for each CPU
)

// A cost is what an instruction or a call takes at most, and the fewest steps that go into one: a call leaves none
// of the registers that the next one reads, so each of these takes an instruction.
type cost struct {
	name  string
	ns    int64
	steps int64
}

// plain is what any other instruction takes.
var plain = cost{"an instruction", 2, 1}

// of returns what so many steps take at most.
func (c cost) of(steps int64) int64 {
	n := (steps + c.steps - 1) / c.steps
	return n*c.ns + (steps-n)*plain.ns
}

// dearer returns the one that makes many steps take longer. With both in a loop they take no longer than with this one alone.
func (c cost) dearer(other cost) cost {
	const many = 1 << 20
	if other.of(many) > c.of(many) {
		return other
	}
	return c
}

// A timeBound is what is known of the time that handlers take, before the verifier counts steps.
type timeBound struct {
	once     int64 // ns, at most, of calls outside of loops
	dearest  cost  // in loops
	accesses bool  // there are loads or stores in loops
	// Where the dearest is, and the first of the accesses.
	dearestAt, accessAt spot
}

// A spot is an instruction of a function, as the user knows it: place and source are "" if he does not.
type spot struct{ fn, place, source string }

// spotOf returns where instruction i of a function is.
func spotOf(fn string, insns asm.Instructions, i int) spot {
	offset := 0
	for k, iter := 0, insns.Iterate(); iter.Next() && k <= i; k++ {
		offset = int(iter.Offset)
	}
	place, source := usersLine(insns, fn, offset)
	return spot{fn, shown(place), shown(source)}
}

// String returns what follows a reason, in the form that a Rejection has.
func (s spot) String() string {
	return (&Rejection{Handler: s.fn, Place: s.place, Source: s.source}).where()
}

// callTimes returns what calls and instructions of an object's functions take at most: two to three times
// what was measured on Linux 6.18 (BenchmarkDearCalls).
func callTimes(object *ebpf.CollectionSpec) func(*asm.Instruction) cost {
	lookup, update := int64(20), int64(40)
	for name, m := range object.Maps {
		if isSection(name) {
			continue
		}
		n := int64(m.ValueSize)
		if isPerCPUHash(m.Type) {
			n = maxPerCPUValues
		}
		hash, chain := int64(0), chainTime(m)
		if m.Type != ebpf.Array && m.Type != ebpf.PerCPUArray {
			hash = 100 + int64(m.KeySize)/2
		}
		lookup = max(lookup, 20+hash+chain)
		if isLRU(m.Type) {
			chain *= 2 // that of the element which makes room, too
		}
		update = max(update, 40+3*hash+n/8+chain)
	}
	// Another CPU takes the line away each time; a ninth one makes it worse, but that is not the object's alone.
	cpus, err := PossibleCPUs()
	if err != nil {
		cpus = 8
	}
	atomics := 50 * int64(min(cpus, 8))
	return func(ins *asm.Instruction) cost {
		switch class := ins.OpCode.Class(); {
		case class == asm.StXClass && ins.OpCode.Mode() == asm.AtomicMode:
			return cost{"an atomic operation", atomics, 1}
		case class.IsALU():
			switch ins.OpCode.ALUOp() {
			case asm.Div, asm.SDiv, asm.Mod, asm.SMod: // Intel's before Ice Lake take up to 90 cycles for 64 bits
				return cost{"a division", map[asm.Class]int64{asm.ALUClass: 10, asm.ALU64Class: 30}[class], 1}
			}
		case ins.IsFunctionCall():
			switch ref := ins.Reference(); ref {
			case "xspin_notify", "xspin_log_line":
				return cost{ref, 500, 1 + 3}
			case "xspin_csum_diff":
				return cost{"bpf_csum_diff", 150, 1 + 5}
			case "xspin_load", "xspin_store": // a frame is in one piece: some 3,500 bytes at most
				return cost{ref, 200, 1 + 4}
			case "xspin_deposit", "xspin_window_frame":
				return cost{ref, 200, 1 + 2}
			case "xspin_reply_udp", "xspin_reply_icmp_echo": // all of the frame is summed up, in pieces
				return cost{ref, 2500, 1 + 2} // 15 of bpf_csum_diff, and some
			}
			// The function's instructions are counted.
		case ins.IsBuiltinCall():
			f := asm.BuiltinFunc(ins.Constant)
			switch name := helperName(f); f {
			case asm.FnMapLookupElem:
				return cost{name, lookup, 1 + 2}
			case asm.FnMapUpdateElem:
				return cost{name, update, 1 + 4}
			case asm.FnMapDeleteElem:
				return cost{name, update, 1 + 2}
			case asm.FnXdpLoadBytes, asm.FnXdpStoreBytes: // a frame is in one piece: some 3,500 bytes at most
				return cost{name, 200, 1 + 4}
			case asm.FnXdpGetBuffLen:
				return cost{name, 80, 1 + 1}
			case asm.FnKtimeGetNs, asm.FnKtimeGetCoarseNs: // with the TSC; measured: 44
				return cost{name, 100, 1}
			default: // without arguments
				return cost{name, 80, 1}
			}
		}
		return plain
	}
}

// boundTime finds what an object's functions may take: the calls of each, as often as it is called itself.
func boundTime(user functions, object *ebpf.CollectionSpec) timeBound {
	t := timeBound{dearest: plain}
	for name, m := range object.Maps {
		if !isSection(name) && isLRU(m.Type) {
			t.once += lruBatch * chainTime(m)
		}
	}
	times := callTimes(object)
	loops, places := map[string][]bool{}, map[string]map[string]int{"": {}}
	for fn, insns := range user {
		loops[fn], places[fn] = inLoops(insns), map[string]int{}
		if handlerFuncs[fn] != "" {
			places[""][fn] = 1
		}
		for i := range insns {
			if !insns[i].IsFunctionCall() {
				continue
			}
			if callee := insns[i].Reference(); loops[fn][i] {
				places[fn][callee] = mostWays + 1
			} else {
				places[fn][callee]++
			}
		}
	}
	ways := waysTo("", places)
	for _, fn := range slices.Sorted(maps.Keys(user)) { // of equals the same one is told each time
		insns := user[fn]
		dearest, access := -1, -1
		for i := range insns {
			c := times(&insns[i])
			if !loops[fn][i] && ways[fn] <= mostWays {
				t.once += int64(ways[fn]) * c.ns
				continue
			}
			if d := t.dearest.dearer(c); d != t.dearest {
				t.dearest, dearest = d, i
			}
			if class := insns[i].OpCode.Class(); !t.accesses && (class == asm.LdXClass || class.IsStore()) {
				t.accesses, access = true, i
			}
		}
		if dearest >= 0 {
			t.dearestAt = spotOf(fn, insns, dearest)
		}
		if access >= 0 {
			t.accessAt = spotOf(fn, insns, access)
		}
	}
	return t
}

// A lookup in a hash also looks at elements with other keys in the same bucket. The hash has a seed that nobody is
// told, so who wants many in one finds them by measuring: mostChain of them take hours.
const (
	mostChain = 1000
	hop       = 2   // ns; measured: 1.4
	lruBatch  = 128 // elements for which an LRU hash makes room at once, and so that many before updates that need it
)

// chainTime returns what a walk through the longest chain of a map takes, in ns.
func chainTime(m *ebpf.MapSpec) int64 {
	if m.Type == ebpf.Array || m.Type == ebpf.PerCPUArray {
		return 0
	}
	return hop * int64(min(m.MaxEntries, mostChain))
}

func isLRU(t ebpf.MapType) bool { return t == ebpf.LRUHash || t == ebpf.LRUCPUHash }

func isPerCPUHash(t ebpf.MapType) bool { return t == ebpf.PerCPUHash || t == ebpf.LRUCPUHash }

// engineSteps returns how many of the steps that the verifier counts are the engine's own of messages, or fewer: all
// of a program's whose handlers do nothing. Handlers are verified by themselves, so they make no difference.
func engineSteps(cfg *HandlersConfig) int {
	noop, err := BuiltinObject("noop-messages")
	if err != nil {
		return 0
	}
	idle := HandlersConfig{Hook: cfg.Hook, Format: cfg.Format, EOM: cfg.EOM, Messages: cfg.Messages}
	idle.Messages.Messages, idle.Messages.Segments = 1, 0
	h, err := noop.Load(idle)
	if err != nil {
		return 0
	}
	defer h.Close()
	_, steps, err := h.Instructions()
	if err != nil {
		return 0
	}
	return steps
}

// cached is how many bytes are in a cache, when they are used all the time; an access to more may take uncached ns.
const (
	cached   = 256 << 10
	uncached = 100
)

// of returns how long a packet takes at most that takes so many steps of handlers, which reach so many bytes, and
// what takes longest, and where.
func (t *timeBound) of(steps int, reach int64) (time.Duration, cost, spot) {
	dearest, at := t.dearest, t.dearestAt
	if t.accesses && reach > cached {
		if d := dearest.dearer(cost{"a load or store that is in no cache", uncached, 1}); d != dearest {
			dearest, at = d, t.accessAt
		}
	}
	return time.Duration(t.once + dearest.of(int64(max(steps, 0)))), dearest, at
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
	t, dearest, at := o.time.of(steps, reach)
	if t > MaxPacketTime && o.messages { // not before, as it takes a program more
		t, dearest, at = o.time.of(steps-engineSteps(cfg), reach)
	}
	if t > MaxPacketTime {
		at.fn = handlerOf(o.spec.Programs[bpf.HandlersProgram].Instructions, at.fn)
		return fmt.Errorf("a packet may take %v, and the limit is %v: the verifier counts %d steps, calls outside of loops take up to %v, and memory has %d bytes; bound the loops, use less memory, or call outside of loops what is dearest in them: %s, which takes up to %d ns%v",
			t.Round(time.Microsecond), MaxPacketTime, steps, time.Duration(o.time.once), reach, dearest.name, dearest.ns, at)
	}
	return nil
}
