// SPDX-License-Identifier: Apache-2.0

package yardstick

import (
	"fmt"

	"github.com/cilium/ebpf"
)

// Maps returns how many maps programs have, by the programs' ids, and how many bytes they
// are charged for. One that several programs share counts once.
func Maps(programs []int) (maps int, bytes uint64, err error) {
	seen := map[ebpf.MapID]bool{}
	for _, id := range programs {
		ids, err := mapsOf(ebpf.ProgramID(id))
		if err != nil {
			return 0, 0, fmt.Errorf("maps of BPF program %d: %w", id, err)
		}
		for _, m := range ids {
			if seen[m] {
				continue
			}
			seen[m] = true
			n, err := charge(m)
			if err != nil {
				return 0, 0, fmt.Errorf("BPF map %d: %w", m, err)
			}
			bytes += n
		}
	}
	return len(seen), bytes, nil
}

func mapsOf(id ebpf.ProgramID) ([]ebpf.MapID, error) {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return nil, err
	}
	ids, _ := info.MapIDs()
	return ids, nil
}

func charge(id ebpf.MapID) (uint64, error) {
	m, err := ebpf.NewMapFromID(id)
	if err != nil {
		return 0, err
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return 0, err
	}
	n, _ := info.Memlock()
	return n, nil
}
