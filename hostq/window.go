// SPDX-License-Identifier: Apache-2.0

package hostq

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/xspin/xspin/spin"
)

// A Window is a range of a Memory with rights. It is safe for concurrent use; bytes
// that two write at the same time are whatever they make of it.
type Window struct {
	mem    *Memory // nil: the window is on memory of this process alone
	off    int64   // in mem
	b      []byte
	rights spin.Rights
}

// Window returns a window on size bytes at off. For atomic operations off must be a
// multiple of 8.
func (m *Memory) Window(off, size int64, r spin.Rights) (*Window, error) {
	if off < 0 || size < 0 || off > m.Size()-size {
		return nil, fmt.Errorf("window of %d bytes at %d of a memory of %d: %w", size, off, m.Size(), spin.ErrBounds)
	}
	if r&spin.Atomic != 0 && off%8 != 0 {
		return nil, fmt.Errorf("window at %d: for atomic operations it must be at a multiple of 8: %w", off, spin.ErrBounds)
	}
	return &Window{mem: m, off: off, b: m.b[off : off+size : off+size], rights: r}, nil
}

// Whole returns a window on all of the memory, with all rights.
func (m *Memory) Whole() *Window { return &Window{mem: m, b: m.b, rights: spin.All} }

// WindowOn returns a window on memory of this process alone, for tests of handlers and for
// handlers without an application. For atomic operations it must begin at a multiple of
// 8, as what make returns does.
func WindowOn(b []byte, r spin.Rights) (*Window, error) {
	if r&spin.Atomic != 0 && uintptr(unsafe.Pointer(unsafe.SliceData(b)))%8 != 0 {
		return nil, fmt.Errorf("window on %d bytes: for atomic operations they must begin at a multiple of 8: %w", len(b), errUnaligned)
	}
	return &Window{b: b, rights: r}, nil
}

// Memory returns the memory that the window is on, whose Map eBPF programs can be given,
// and where in it the window begins. nil: the window is on memory of this process alone.
func (w *Window) Memory() (m *Memory, off int64) { return w.mem, w.off }

// Size returns how many bytes it has.
func (w *Window) Size() int64 { return int64(len(w.b)) }

// Rights returns what it may be used for.
func (w *Window) Rights() spin.Rights { return w.rights }

// An accessError says what was wrong. Made only when told: handlers may try a lot.
type accessError struct {
	why          error
	need         spin.Rights
	n, off, size int64
}

func (e *accessError) Error() string {
	return fmt.Sprintf("window of %d bytes: access (%v) to %d bytes at %d: %v", e.size, e.need, e.n, e.off, e.why)
}

func (e *accessError) Unwrap() error { return e.why }

// Slice returns the n bytes at off, which are good as long as the window is. An error
// wraps ErrBounds or ErrRights: need is Read, Write or both.
func (w *Window) Slice(off, n int64, need spin.Rights) ([]byte, error) { return w.at(off, n, need) }

// at returns n bytes at off. All that is checked is checked here.
func (w *Window) at(off, n int64, need spin.Rights) ([]byte, error) {
	if need == 0 || w.rights&need != need {
		return nil, &accessError{spin.ErrRights, need, n, off, w.Size()}
	}
	// Not off+n > len, which overflows.
	if off < 0 || n < 0 || off > int64(len(w.b))-n {
		return nil, &accessError{spin.ErrBounds, need, n, off, w.Size()}
	}
	return w.b[off : off+n : off+n], nil
}

// ReadAt copies len(p) bytes from off. An error wraps ErrBounds or ErrRights; nothing
// is copied then.
func (w *Window) ReadAt(p []byte, off int64) (int, error) {
	b, err := w.at(off, int64(len(p)), spin.Read)
	if err != nil {
		return 0, err
	}
	return copy(p, b), nil
}

// WriteAt copies p to off. An error wraps ErrBounds or ErrRights; nothing is written then.
func (w *Window) WriteAt(p []byte, off int64) (int, error) {
	b, err := w.at(off, int64(len(p)), spin.Write)
	if err != nil {
		return 0, err
	}
	return copy(b, p), nil
}

// word returns the address of n bytes at off, for an atomic operation.
func (w *Window) word(off int64, n int) (unsafe.Pointer, error) {
	b, err := w.at(off, int64(n), spin.Atomic)
	if err != nil {
		return nil, err
	}
	if off%int64(n) != 0 {
		return nil, &accessError{errUnaligned, spin.Atomic, int64(n), off, w.Size()}
	}
	return unsafe.Pointer(unsafe.SliceData(b)), nil
}

// CompareAndSwap64 puts new into the word at off, which must be a multiple of 8, if
// old is there, and returns what was there.
func (w *Window) CompareAndSwap64(off int64, old, new uint64) (was uint64, err error) {
	p, err := w.word(off, 8)
	if err != nil {
		return 0, err
	}
	for {
		// Somebody who keeps changing the word there and back can make this go
		// round, but not for long: each round the odds are his to lose.
		if atomic.CompareAndSwapUint64((*uint64)(p), old, new) {
			return old, nil
		}
		if was = atomic.LoadUint64((*uint64)(p)); was != old {
			return was, nil
		}
	}
}

// FetchAdd64 adds to the word at off, which must be a multiple of 8, and returns what
// was there.
func (w *Window) FetchAdd64(off int64, delta uint64) (was uint64, err error) {
	p, err := w.word(off, 8)
	if err != nil {
		return 0, err
	}
	return atomic.AddUint64((*uint64)(p), delta) - delta, nil
}

// CompareAndSwap32 is CompareAndSwap64 for 32 bits at a multiple of 4.
func (w *Window) CompareAndSwap32(off int64, old, new uint32) (was uint32, err error) {
	p, err := w.word(off, 4)
	if err != nil {
		return 0, err
	}
	for {
		if atomic.CompareAndSwapUint32((*uint32)(p), old, new) {
			return old, nil
		}
		if was = atomic.LoadUint32((*uint32)(p)); was != old {
			return was, nil
		}
	}
}

// FetchAdd32 is FetchAdd64 for 32 bits at a multiple of 4.
func (w *Window) FetchAdd32(off int64, delta uint32) (was uint32, err error) {
	p, err := w.word(off, 4)
	if err != nil {
		return 0, err
	}
	return atomic.AddUint32((*uint32)(p), delta) - delta, nil
}

// StartRead begins to copy len(p) bytes from off. Errors are as of ReadAt; p must be
// left alone until the transfer is done.
func (w *Window) StartRead(p []byte, off int64) (spin.Transfer, error) {
	b, err := w.at(off, int64(len(p)), spin.Read)
	if err != nil {
		return spin.Transfer{}, err
	}
	return spin.NewTransfer(p, b), nil
}

// StartWrite begins to copy p to off. Errors are as of WriteAt; p must be left alone
// until the transfer is done.
func (w *Window) StartWrite(p []byte, off int64) (spin.Transfer, error) {
	b, err := w.at(off, int64(len(p)), spin.Write)
	if err != nil {
		return spin.Transfer{}, err
	}
	return spin.NewTransfer(b, p), nil
}
