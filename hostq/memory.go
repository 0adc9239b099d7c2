// SPDX-License-Identifier: Apache-2.0

package hostq

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Element is the size of an element of a Memory's map: eBPF programs reach 512 MiB of
// an element only, and any number of elements.
const Element = 1 << 20

// A Memory is memory that a NIC, eBPF programs and applications share: a BPF array
// map of elements of 1 MiB, mapped as one. Unlike a file it has a size for ever, so that
// nobody can cut it and have the others die of SIGBUS.
type Memory struct {
	m    *ebpf.Map
	b    []byte // nil after Close
	once sync.Once
	err  error
}

const mapFlags = unix.BPF_F_MMAPABLE | unix.BPF_F_INNER_MAP

// NewMemory makes zeroed memory of size bytes (some ms per MiB). The name is for bpftool.
func NewMemory(name string, size int64) (*Memory, error) {
	n, err := elements(size)
	if err != nil {
		return nil, err
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{
		Name:       mapName(name),
		Type:       ebpf.Array,
		KeySize:    4,
		ValueSize:  Element,
		MaxEntries: n,
		// Inner: maps of any number of elements fit into one map of maps.
		Flags: mapFlags,
	})
	if err != nil {
		return nil, fmt.Errorf("memory of %d MiB (map %s; needs CAP_BPF, and so much memory in the cgroup): %w", n, name, err)
	}
	return mapMemory(m, size)
}

// OpenMemory maps memory that another process made. It takes the descriptor, also if
// it fails.
func OpenMemory(fd int, size int64) (*Memory, error) {
	n, err := elements(size)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	m, err := ebpf.NewMapFromFD(fd) // asks the kernel what it is
	if err != nil {
		return nil, fmt.Errorf("memory: descriptor %d is no BPF map: %w", fd, err)
	}
	unix.CloseOnExec(m.FD())
	if m.Type() != ebpf.Array || m.ValueSize() != Element || m.Flags()&unix.BPF_F_MMAPABLE == 0 || m.MaxEntries() < n {
		err := fmt.Errorf("memory: descriptor %d is %v with flags %#x: want an array of %d elements of %d bytes or more that can be mapped",
			fd, m, m.Flags(), n, Element)
		_ = m.Close()
		return nil, err
	}
	return mapMemory(m, size)
}

// mapMemory takes the map.
func mapMemory(m *ebpf.Map, size int64) (*Memory, error) {
	b, err := unix.Mmap(m.FD(), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		_ = m.Close()
		return nil, fmt.Errorf("memory: mapping %d bytes of %v (a descriptor for reading only cannot be mapped): %w",
			size, m, os.NewSyscallError("mmap", err))
	}
	return &Memory{m: m, b: b}, nil
}

func elements(size int64) (uint32, error) {
	if size <= 0 || size > math.MaxUint32*Element || size != int64(int(size)) {
		return 0, fmt.Errorf("invalid memory size: %d bytes", size)
	}
	return uint32((size + Element - 1) / Element), nil
}

// mapName makes a name that the kernel takes: it may have 15 letters, figures, _ and dots.
func mapName(s string) string {
	s = strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' {
			return r
		}
		return '_'
	}, s)
	return s[:min(len(s), unix.BPF_OBJ_NAME_LEN-1)]
}

// Bytes returns the memory, good until Close.
func (m *Memory) Bytes() []byte { return m.b }

// Size returns how many bytes it has.
func (m *Memory) Size() int64 { return int64(len(m.b)) }

// Map returns the map, for eBPF programs.
func (m *Memory) Map() *ebpf.Map { return m.m }

// FD returns the map's descriptor, which stays the Memory's.
func (m *Memory) FD() int { return m.m.FD() }

// Close unmaps it: a process that still uses Bytes, or a window, dies of SIGSEGV.
// Idempotent. Others that have mapped it keep it.
func (m *Memory) Close() error {
	m.once.Do(func() {
		err := unix.Munmap(m.b)
		m.b = nil
		m.err = errors.Join(os.NewSyscallError("munmap", err), m.m.Close())
	})
	return m.err
}
