// SPDX-License-Identifier: Apache-2.0

package hostq

import "github.com/cilium/ebpf"

// Element is the size of an element of a Memory's map: eBPF programs reach 512 MiB of
// an element only, and any number of elements.
const Element = 1 << 20

// A Memory is memory that a NIC, eBPF programs and applications share: a BPF array
// map of elements of 1 MiB, mapped as one.
type Memory struct {
	m *ebpf.Map
	b []byte
}

// NewMemory makes zeroed memory of size bytes (some ms per MiB). The name is for bpftool.
func NewMemory(name string, size int64) (*Memory, error) { panic("not yet") }

// OpenMemory maps memory that another process made. It takes the descriptor, also if
// it fails.
func OpenMemory(fd int, size int64) (*Memory, error) { panic("not yet") }

// Bytes returns the memory, good until Close.
func (m *Memory) Bytes() []byte { return m.b }

// Size returns how many bytes it has.
func (m *Memory) Size() int64 { return int64(len(m.b)) }

// Map returns the map, for eBPF programs.
func (m *Memory) Map() *ebpf.Map { return m.m }

// FD returns the map's descriptor, which stays the Memory's.
func (m *Memory) FD() int { return m.m.FD() }

// Close unmaps it. Idempotent. Others that have mapped it keep it.
func (m *Memory) Close() error { panic("not yet") }

// A Window is a range of a Memory with rights. It is safe for concurrent use; bytes
// that two write at the same time are whatever they make of it.
type Window struct {
	b      []byte
	rights Rights
}

// Window returns a window on size bytes at off.
func (m *Memory) Window(off, size int64, r Rights) (*Window, error) { panic("not yet") }

// Size returns how many bytes it has.
func (w *Window) Size() int64 { return int64(len(w.b)) }

// Rights returns what it may be used for.
func (w *Window) Rights() Rights { return w.rights }

// ReadAt copies len(p) bytes from off. An error wraps ErrBounds or ErrRights; nothing
// is copied then.
func (w *Window) ReadAt(p []byte, off int64) (int, error) { panic("not yet") }

// WriteAt copies p to off. An error wraps ErrBounds or ErrRights; nothing is written then.
func (w *Window) WriteAt(p []byte, off int64) (int, error) { panic("not yet") }

// CompareAndSwap64 puts new into the word at off, which must be a multiple of 8, if
// old is there, and returns what was there.
func (w *Window) CompareAndSwap64(off int64, old, new uint64) (was uint64, err error) {
	panic("not yet")
}

// FetchAdd64 adds to the word at off, which must be a multiple of 8, and returns what
// was there.
func (w *Window) FetchAdd64(off int64, delta uint64) (was uint64, err error) { panic("not yet") }
