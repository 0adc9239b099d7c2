// SPDX-License-Identifier: Apache-2.0

package spin

import (
	"fmt"
	"strings"
)

// An OwnMap is a map of handlers in eBPF that is theirs alone, or a section of their global variables.
type OwnMap struct {
	Name    string `json:"name"` // of a section, with a dot: .bss
	Type    string `json:"type"` // as bpftool has it: hash, percpu_array, ...
	Key     uint32 `json:"key_bytes"`
	Value   uint32 `json:"value_bytes"`
	Entries uint32 `json:"entries"`        // at most
	ID      int    `json:"id,omitempty"`   // the kernel's number, while the map is there: bpftool map dump id N
	Used    *int   `json:"used,omitempty"` // entries of a hash, counted up to MostCounted, while packets come
}

// MostCounted is how far the entries of a map are counted.
const MostCounted = 1024

// IsSection tells whether the map has global variables.
func (m *OwnMap) IsSection() bool { return strings.HasPrefix(m.Name, ".") }

// String describes the map without its name.
func (m *OwnMap) String() string {
	var b strings.Builder
	if m.IsSection() {
		fmt.Fprintf(&b, "global variables, %d bytes", m.Value)
	} else {
		fmt.Fprintf(&b, "%s, keys of %d bytes, values of %d, ", m.Type, m.Key, m.Value)
		switch {
		case m.Used == nil:
			fmt.Fprintf(&b, "%d entries", m.Entries)
		case *m.Used == MostCounted && m.Entries > MostCounted:
			fmt.Fprintf(&b, "%d or more of %d entries", *m.Used, m.Entries)
		default:
			fmt.Fprintf(&b, "%d of %d entries", *m.Used, m.Entries)
		}
	}
	if m.ID != 0 {
		fmt.Fprintf(&b, ", the kernel's map %d", m.ID)
	}
	return b.String()
}
