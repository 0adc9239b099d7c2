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
	"unsafe"

	"github.com/cilium/ebpf"
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

// headerMaps are the maps of xspin_handler.h and xspin_message.h.
var headerMaps = map[string]ebpf.MapSpec{
	bpf.HandlersCPU:    {Type: ebpf.Array, KeySize: 4, ValueSize: uint32(unsafe.Sizeof(bpf.HandlerCounters{})), MaxEntries: 1, Flags: unix.BPF_F_MMAPABLE},
	bpf.HandlersShared: {Type: ebpf.Array, KeySize: 4, ValueSize: memoryElement, MaxEntries: 1, Flags: memoryFlags},
	bpf.HandlersOwn:    {Type: ebpf.Array, KeySize: 4, ValueSize: memoryElement, MaxEntries: 1, Flags: memoryFlags},

	bpf.MessagesTable:      {Type: ebpf.Hash, KeySize: messageKey, ValueSize: 8, MaxEntries: 1},
	bpf.MessagesSlots:      {Type: ebpf.Array, KeySize: 4, ValueSize: slotSize, MaxEntries: 1, Flags: unix.BPF_F_MMAPABLE},
	bpf.MessagesBits:       {Type: ebpf.Array, KeySize: 4, ValueSize: claimsSize, MaxEntries: 1, Flags: unix.BPF_F_MMAPABLE},
	bpf.MessagesFree:       {Type: ebpf.Queue, ValueSize: 4, MaxEntries: 1},
	bpf.MessagesEnded:      {Type: ebpf.LRUHash, KeySize: messageKey, ValueSize: 8, MaxEntries: 1},
	bpf.MessagesHanded:     {Type: ebpf.LRUHash, KeySize: messageKey, ValueSize: 8, MaxEntries: 1},
	bpf.MessagesUser:       {Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1},
	bpf.MessagesEvents:     {Type: ebpf.RingBuf, MaxEntries: 4096},
	bpf.MessagesTallies:    {Type: ebpf.Array, KeySize: 4, ValueSize: tallySize, MaxEntries: 1, Flags: unix.BPF_F_MMAPABLE},
	bpf.MessagesBuffer:     {Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: scratchSize, MaxEntries: 1},
	bpf.MessagesReceives:   {Type: ebpf.Array, KeySize: 4, ValueSize: receiveSize, MaxEntries: MaxReceives, Flags: unix.BPF_F_MMAPABLE},
	bpf.MessagesPosted:     {Type: ebpf.Array, KeySize: 4, ValueSize: ringSize, MaxEntries: 1, Flags: unix.BPF_F_MMAPABLE},
	bpf.MessagesWindows[0]: {Type: ebpf.Array, KeySize: 4, ValueSize: memoryElement, MaxEntries: 1, Flags: memoryFlags},
	bpf.MessagesWindows[1]: {Type: ebpf.Array, KeySize: 4, ValueSize: memoryElement, MaxEntries: 1, Flags: memoryFlags},
	bpf.MessagesWindows[2]: {Type: ebpf.Array, KeySize: 4, ValueSize: memoryElement, MaxEntries: 1, Flags: memoryFlags},
	bpf.MessagesWindows[3]: {Type: ebpf.Array, KeySize: 4, ValueSize: memoryElement, MaxEntries: 1, Flags: memoryFlags},
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

// checkMaps takes the maps that no program uses out of the specification, checks
// the others, and returns how many bytes they take.
func checkMaps(spec *ebpf.CollectionSpec, limit int64) (size int64, err error) {
	used := map[string]bool{}
	for _, prog := range spec.Programs {
		for i := range prog.Instructions {
			if ins := &prog.Instructions[i]; ins.IsLoadFromMap() {
				used[ins.Reference()] = true
			}
		}
	}
	var errs []error
	var kconfig *btf.Datasec // becomes a map when the object is loaded
	if spec.Types.TypeByName(".kconfig", &kconfig) == nil {
		errs = append(errs, errors.New("it refers to the kernel's configuration, and handlers may refer to nothing there"))
	}
	for _, name := range slices.Sorted(maps.Keys(spec.Maps)) {
		if !used[name] {
			delete(spec.Maps, name)
			for v := range spec.Variables {
				if spec.Variables[v].SectionName == name {
					delete(spec.Variables, v)
				}
			}
			continue
		}
		m := spec.Maps[name]
		var err error
		if isHeaderMap := strings.HasPrefix(name, reserved); isHeaderMap {
			err = checkHeaderMap(name, m)
		} else if err = checkOwnMap(m); err == nil {
			size += mapSize(m)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("map %s: %w", name, err))
		}
	}
	if len(errs) == 0 && size > limit {
		errs = append(errs, fmt.Errorf("its maps take %d bytes for each context, and the limit is %d", size, limit))
	}
	return size, errors.Join(errs...)
}

func checkHeaderMap(name string, m *ebpf.MapSpec) error {
	want, ok := headerMaps[name]
	if size := m.ValueSize; name == bpf.MessagesState && size > 0 && size <= mostState && size%8 == 0 {
		want, ok = ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: size, MaxEntries: 1}, true
	}
	switch {
	case !ok:
		return fmt.Errorf("names that begin with %s are xspin_handler.h's", reserved)
	case m.Type != want.Type, m.KeySize != want.KeySize, m.ValueSize != want.ValueSize, m.MaxEntries != want.MaxEntries, m.Flags != want.Flags, m.Pinning != ebpf.PinNone:
		return fmt.Errorf("%v is not what xspin_handler.h makes: `xspin object new` writes the original", m)
	}
	return nil
}

func checkOwnMap(m *ebpf.MapSpec) error {
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
	if what := special(m.Value, map[btf.Type]bool{}); what != "" {
		return fmt.Errorf("its values hold %s: handlers may have plain values only, without timers, locks and pointers into the kernel", what)
	}
	return nil
}

// special finds in a type what the kernel would treat as more than bytes: structures of
// its own, all of whose names begin with bpf_, and pointers with a tag (kptr). It does
// not look behind plain pointers, which are but numbers in a map.
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
