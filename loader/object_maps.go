// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"math/bits"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
)

// memoryElement is the size of an element of HPU memory, as package hostq makes it.
const memoryElement = 1 << 20

// memoryFlags are those of the maps of HPU memory.
const memoryFlags = unix.BPF_F_MMAPABLE | unix.BPF_F_INNER_MAP

// HPU memory that handlers have if they use it and their context does not say how much.
const (
	DefaultMemory    = 64 << 10
	DefaultHPUMemory = 4 << 10 // of each HPU
)

// MemoryFor returns how much HPU memory a context has that asks for so much, or for none
// with 0: in all, and of each HPU. The latter is rounded up to what handlers can reach: no
// part of it may lie in two elements of the memory.
func (o *Object) MemoryFor(shared, each int64) (int64, int64) {
	usesShared, usesEach := o.UsesMemory()
	if usesShared && shared == 0 {
		shared = DefaultMemory
	}
	if usesEach && each == 0 {
		each = DefaultHPUMemory
	}
	switch {
	case each == 0:
	case each > memoryElement:
		each = (each + memoryElement - 1) / memoryElement * memoryElement
	default:
		each = max(8, int64(1)<<bits.Len64(uint64(each-1)))
	}
	return shared, each
}

// mostState is how many bytes of state a message may have.
const mostState = 1024

// mapTypes are those that an object may have of its own, and the flags that they may have.
var mapTypes = map[ebpf.MapType]uint32{
	ebpf.Array:       unix.BPF_F_MMAPABLE | unix.BPF_F_RDONLY_PROG,
	ebpf.PerCPUArray: 0,
	ebpf.Hash:        unix.BPF_F_NO_PREALLOC,
	ebpf.PerCPUHash:  unix.BPF_F_NO_PREALLOC,
	ebpf.LRUHash:     unix.BPF_F_NO_COMMON_LRU,
	ebpf.LRUCPUHash:  unix.BPF_F_NO_COMMON_LRU,
}

// isSection tells whether a map holds global variables.
func isSection(name string) bool { return strings.HasPrefix(name, ".") }

// checkMaps checks that an object has no names of the engine's, nor settings of the kernel's, and checks the maps
// that its functions use. The types of all maps are looked at once.
func checkMaps(user functions, object *ebpf.CollectionSpec, e *engine) error {
	var errs []error
	var kconfig *btf.Datasec // becomes a map when the object is loaded
	if object.Types.TypeByName(".kconfig", &kconfig) == nil {
		errs = append(errs, errors.New("it refers to the kernel's configuration, and handlers may refer to nothing there"))
	}
	used, plain := map[string]bool{}, map[btf.Type]bool{}
	for _, insns := range user {
		usedMaps(insns, used)
	}
	for _, name := range slices.Sorted(maps.Keys(object.Maps)) {
		switch {
		case name == bpf.HandlersSection:
		case strings.HasPrefix(name, reserved) || e.spec.Maps[name] != nil:
			errs = append(errs, fmt.Errorf("map %s: names that begin with %s are xspin_handler.h's", name, reserved))
		case used[name]:
			if err := checkOwnMap(name, object.Maps[name], plain); err != nil {
				errs = append(errs, fmt.Errorf("map %s: %w", name, err))
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(object.Variables)) {
		if v := object.Variables[name]; e.spec.Variables[name] != nil && v.SectionName != bpf.HandlersSection {
			errs = append(errs, fmt.Errorf("variable %s: names that begin with %s are xspin_handler.h's", name, reserved))
		}
	}
	return errors.Join(errs...)
}

// usedMaps adds the names of the maps that instructions use.
func usedMaps(insns asm.Instructions, used map[string]bool) {
	for i := range insns {
		if ins := &insns[i]; ins.IsLoadFromMap() {
			used[ins.Reference()] = true
		}
	}
}

// keepMaps takes the maps that no program uses out of the specification, and returns how many bytes the object's
// own among the others take. What it does for each map and for each variable takes a fixed time.
func keepMaps(spec *ebpf.CollectionSpec, e *engine, limit int64) (size int64, err error) {
	used := map[string]bool{}
	for _, prog := range spec.Programs {
		usedMaps(prog.Instructions, used)
	}
	unused := func(name string) bool { return spec.Maps[name] != nil && !used[name] }
	maps.DeleteFunc(spec.Variables, func(_ string, v *ebpf.VariableSpec) bool { return unused(v.SectionName) })
	maps.DeleteFunc(spec.Maps, func(name string, _ *ebpf.MapSpec) bool { return unused(name) })
	for name, m := range spec.Maps {
		if e.spec.Maps[name] == nil {
			size += mapSize(m)
		}
	}
	if size > limit {
		err = fmt.Errorf("its maps take %d bytes for each context, and the limit is %d", size, limit)
	}
	return size, err
}

// checkOwnMap checks a map. Types that were found in others, and are plain or told of, are in plain.
func checkOwnMap(name string, m *ebpf.MapSpec, plain map[btf.Type]bool) error {
	flags, ok := mapTypes[m.Type]
	switch {
	case !ok:
		return fmt.Errorf("type %v: want an array, a hash or an LRU hash, or one of these per CPU", m.Type)
	case m.Pinning != ebpf.PinNone:
		return errors.New("it would be pinned in the file system: contexts have maps of their own")
	case m.Flags&^flags != 0:
		return fmt.Errorf("flags %#x: a map of type %v may have %#x", m.Flags, m.Type, flags)
	case m.InnerMap != nil, m.MapExtra != 0:
		return errors.New("it has more than key, value, entries and flags")
	}
	// Of globals, which no call copies, the size is a matter of memory.
	if !isSection(name) {
		most := uint32(maxValue)
		if isPerCPUHash(m.Type) {
			cpus, err := PossibleCPUs()
			if err != nil {
				return err
			}
			most = min(most, uint32(maxPerCPUValues/cpus)&^7)
		}
		if m.KeySize > maxKey || m.ValueSize > most {
			return fmt.Errorf("keys of %d bytes and values of %d: a call copies them, so want at most %d and %d; what is larger is for global variables, or HPU memory", m.KeySize, m.ValueSize, maxKey, most)
		}
	}
	if what := special(m.Value, plain); what != "" {
		return fmt.Errorf("its values hold %s: handlers may have plain values only, without timers, locks and pointers into the kernel", what)
	}
	return nil
}

// special finds in a type what the kernel would treat as more than bytes: structures of
// its own, all of whose names begin with bpf_, and pointers with a tag (kptr). It does
// not look behind plain pointers, which are but numbers in a map, nor at what was seen:
// if there was something, that has been told.
func special(t btf.Type, seen map[btf.Type]bool) string {
	if t == nil || seen[t] {
		return ""
	}
	seen[t] = true
	members := func(name string, all []btf.Member) string {
		if strings.HasPrefix(name, "bpf_") {
			return "a struct " + name
		}
		for _, m := range all {
			if what := special(m.Type, seen); what != "" {
				return what
			}
		}
		return ""
	}
	switch t := t.(type) {
	case *btf.Struct:
		return members(t.Name, t.Members)
	case *btf.Union:
		return members(t.Name, t.Members)
	case *btf.Array:
		return special(t.Type, seen)
	case *btf.Datasec:
		for _, v := range t.Vars {
			if what := special(v.Type, seen); what != "" {
				return what
			}
		}
	case *btf.Var:
		return special(t.Type, seen)
	case *btf.Typedef:
		return special(t.Type, seen)
	case *btf.Const:
		return special(t.Type, seen)
	case *btf.Volatile:
		return special(t.Type, seen)
	case *btf.Restrict:
		return special(t.Type, seen)
	case *btf.TypeTag:
		return fmt.Sprintf("a type with the tag %q", t.Value)
	case *btf.Pointer:
		if tag, ok := t.Target.(*btf.TypeTag); ok {
			return special(tag, seen)
		}
	}
	return ""
}

// mapSize is about what a map takes in the kernel.
func mapSize(m *ebpf.MapSpec) int64 {
	const element = 64 // of a hash, beside key and value
	round := func(n uint32) uint64 { return (uint64(n) + 7) &^ 7 }
	n := round(m.ValueSize)
	switch m.Type {
	case ebpf.PerCPUArray, ebpf.PerCPUHash, ebpf.LRUCPUHash:
		cpus, err := PossibleCPUs()
		if err != nil {
			cpus = 1
		}
		n *= uint64(cpus)
	}
	if m.Type != ebpf.Array && m.Type != ebpf.PerCPUArray {
		n += round(m.KeySize) + element
	}
	// Below 2^32 entries of at most 2^32 bytes on 2^16 CPUs: may not fit.
	if n > math.MaxInt64/max(1, uint64(m.MaxEntries)) {
		return math.MaxInt64 / 1024
	}
	return int64(n) * int64(m.MaxEntries)
}

// PossibleCPUs returns how many CPUs the kernel may ever have: as many HPUs do handlers
// in eBPF have.
func PossibleCPUs() (int, error) {
	n, err := ebpf.PossibleCPU()
	if err != nil {
		return 0, fmt.Errorf("how many CPUs there may be: %w", err)
	}
	return n, nil
}
