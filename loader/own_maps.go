// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/xspin/xspin/spin"
)

// mapNames are what bpftool calls the types that an object's maps may have.
var mapNames = map[ebpf.MapType]string{
	ebpf.Array: "array", ebpf.PerCPUArray: "percpu_array", ebpf.Hash: "hash", ebpf.PerCPUHash: "percpu_hash",
	ebpf.LRUHash: "lru_hash", ebpf.LRUCPUHash: "lru_percpu_hash",
}

// OwnMaps returns the object's own maps, sorted by name, and the sections of global variables that handlers
// may write.
func (o *Object) OwnMaps() (all []spin.OwnMap) {
	for name, m := range o.spec.Maps {
		if strings.HasPrefix(name, reserved) || strings.HasPrefix(name, ".rodata") {
			continue
		}
		all = append(all, spin.OwnMap{Name: name, Type: mapNames[m.Type], Key: m.KeySize, Value: m.ValueSize, Entries: m.MaxEntries})
	}
	slices.SortFunc(all, func(a, b spin.OwnMap) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// OwnMaps returns the maps of Object.OwnMaps with their numbers in the kernel, and counts the entries of hashes. It takes
// a system call for each, up to spin.MostCounted of a map. It returns nil after Close.
func (h *Handlers) OwnMaps() (all []spin.OwnMap, err error) {
	own := make([]*ebpf.Map, len(h.own))
	defer func() {
		for _, m := range own {
			m.Close() // may be nil
		}
	}()
	h.mu.Lock() // not while entries are counted: others want statistics
	for i := range h.own {
		if h.rows == nil || err != nil {
			break
		}
		own[i], err = h.coll.Maps[h.own[i].Name].Clone()
	}
	closed := h.rows == nil
	h.mu.Unlock()
	if closed || err != nil {
		return nil, err
	}
	all = slices.Clone(h.own)
	for i, m := range own {
		if err := look(&all[i], m); err != nil {
			return nil, fmt.Errorf("map %s: %w", all[i].Name, err)
		}
	}
	return all, nil
}

// look asks the kernel for what is not known of a map before it is there.
func look(own *spin.OwnMap, m *ebpf.Map) error {
	info, err := m.Info()
	if err != nil {
		return err
	}
	id, _ := info.ID()
	own.ID = int(id)
	if t := m.Type(); t == ebpf.Array || t == ebpf.PerCPUArray {
		return nil
	}
	// Handlers go on adding and deleting, and from a key that is gone the walk begins anew: hence the bound.
	n := 0
	var key []byte
	for ; n < spin.MostCounted; n++ {
		var at any // nil: the first
		if key != nil {
			at = key
		}
		if key, err = m.NextKeyBytes(at); err != nil {
			return err
		}
		if key == nil {
			break
		}
	}
	n = min(n, int(own.Entries))
	own.Used = &n
	return nil
}
