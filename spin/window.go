// SPDX-License-Identifier: Apache-2.0

package spin

import (
	"errors"
	"fmt"
	"strings"
)

// A Window is memory of the application that handlers reach by offset. An access
// that is not wholly inside touches nothing and returns an error wrapping ErrBounds.
// Several HPUs may use a window at the same time; handlers must see to it that they
// do not write the same bytes.
type Window interface {
	ReadAt(p []byte, off int64) (int, error)
	WriteAt(p []byte, off int64) (int, error)
	Size() int64
}

// An AtomicWindow is a Window with atomic operations on aligned words of 8 and 4 bytes
// (SC 2017, appendix B.6). Windows of applications and hpu.Memory are; ErrRights says that
// the context may not use the window that way. A handler asks for it once per packet:
//
//	w, ok := h.Window("in").(spin.AtomicWindow)
type AtomicWindow interface {
	Window
	CompareAndSwap64(off int64, old, new uint64) (was uint64, err error)
	FetchAdd64(off int64, delta uint64) (was uint64, err error)
	CompareAndSwap32(off int64, old, new uint32) (was uint32, err error)
	FetchAdd32(off int64, delta uint32) (was uint32, err error)
}

// A TransferWindow is a Window whose reads and writes can be done in parts: the Transfer
// that StartRead and StartWrite return copies nothing until it is asked to. Windows of
// applications and hpu.Memory are.
type TransferWindow interface {
	Window
	StartRead(p []byte, off int64) (Transfer, error)
	StartWrite(p []byte, off int64) (Transfer, error)
}

// A SliceWindow is a Window that lends its bytes to a handler, to place many small pieces
// with one check of bounds and rights. The slice is valid until the handler returns.
// Others may write there at any time, so what was read may change. Windows of applications
// and hpu.Memory are.
type SliceWindow interface {
	Window
	Slice(off, n int64, need Rights) ([]byte, error)
}

// Errors of windows, and of anything else with bounds.
var (
	// ErrBounds is returned, wrapped, for an access outside a window, or outside a
	// message's place in it.
	ErrBounds = errors.New("out of bounds")
	// ErrRights is returned, wrapped, for an access that the context has no right to.
	ErrRights = errors.New("access not permitted")
)

// Rights say what a window may be used for.
type Rights uint8

// Rights.
const (
	Read Rights = 1 << iota
	Write
	Atomic // compare-and-swap, fetch-and-add
	All    = Read | Write | Atomic
)

const rightLetters = "rwa"

func (r Rights) String() string {
	var b strings.Builder
	for i, c := range rightLetters {
		if r>>i&1 != 0 {
			b.WriteRune(c)
		}
	}
	return b.String()
}

// ParseRights reads what String writes, such as "rw".
func ParseRights(s string) (r Rights, err error) {
	for _, c := range s {
		i := strings.IndexRune(rightLetters, c)
		if i < 0 || r>>i&1 != 0 {
			return 0, fmt.Errorf("rights %q: want r, w and a (atomic), each once", s)
		}
		r |= 1 << i
	}
	if r == 0 {
		return 0, errors.New("no rights: want r, w and a (atomic)")
	}
	return r, nil
}

// Piece is how many bytes Transfer.Test copies.
const Piece = 64 << 10

// A Transfer is a copy in progress. There is no DMA engine: the CPU that calls Test or
// Wait does the copying, so a handler can do other work in between, but nothing is copied
// meanwhile. It is not safe for concurrent use. The zero Transfer is done.
type Transfer struct {
	dst, src []byte // equally long
}

// NewTransfer returns a transfer of src to dst, which must be equally long and belong to
// it until it is done.
func NewTransfer(dst, src []byte) Transfer { return Transfer{dst: dst, src: src} }

// Left returns how many bytes are not yet copied.
func (t *Transfer) Left() int { return len(t.src) }

// Test copies up to Piece bytes, and reports whether those were the last.
func (t *Transfer) Test() bool {
	n := copy(t.dst, t.src[:min(len(t.src), Piece)])
	t.dst, t.src = t.dst[n:], t.src[n:]
	return len(t.src) == 0
}

// Wait copies what is left.
func (t *Transfer) Wait() {
	copy(t.dst, t.src)
	*t = Transfer{}
}
