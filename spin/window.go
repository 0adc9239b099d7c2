// SPDX-License-Identifier: Apache-2.0

package spin

import (
	"errors"
	"fmt"
	"strings"
)

// A Window is memory of the application that handlers reach by offset. An access
// that is not wholly inside is an error wrapping ErrBounds, and touches nothing.
// Several HPUs may use a window at the same time; that they do not write the same
// bytes is the handlers' business.
type Window interface {
	ReadAt(p []byte, off int64) (int, error)
	WriteAt(p []byte, off int64) (int, error)
	Size() int64
}

// An AtomicWindow is a Window with atomic operations on words of 8 and of 4 bytes, whose
// offsets are multiples of that (SC 2017, appendix B.6). Windows of applications and
// hpu.Memory are; ErrRights says that the context may not use the window so. A handler asks
// for it once a packet:
//
//	w, ok := h.Window("in").(spin.AtomicWindow)
type AtomicWindow interface {
	Window
	CompareAndSwap64(off int64, old, new uint64) (was uint64, err error)
	FetchAdd64(off int64, delta uint64) (was uint64, err error)
	CompareAndSwap32(off int64, old, new uint32) (was uint32, err error)
	FetchAdd32(off int64, delta uint32) (was uint32, err error)
}

// A TransferWindow is a Window whose reads and writes do not wait: they begin, the
// Transfer's Test copies a part and tells whether that was the last, and Wait copies the
// rest. It is the handler's CPU that copies, so nothing happens in between. Windows of
// applications and hpu.Memory are.
type TransferWindow interface {
	Window
	StartRead(p []byte, off int64) (Transfer, error)
	StartWrite(p []byte, off int64) (Transfer, error)
}

// A SliceWindow is a Window whose bytes a handler may have as they are, to place many
// small pieces: bounds and rights are checked once for all of them. The slice is good
// until the handler returns. Others may write there at any time, so nothing that was read
// can be relied on to stay. Windows of applications and hpu.Memory are.
type SliceWindow interface {
	Window
	Slice(off, n int64, need Rights) ([]byte, error)
}

// Errors of windows, and of whatever has bounds.
var (
	// ErrBounds is returned, wrapped, for an access outside of a window, or outside of
	// a message's place in it.
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

// A Transfer is a copy that is under way. Here a CPU copies, and it is the one that
// calls Test: a handler that does so between other things does them sooner, and
// nothing happens unless it calls. Not for concurrent use. The zero Transfer is done.
type Transfer struct {
	dst, src []byte // as long as each other
}

// NewTransfer returns a transfer of src to dst, which are as long as each other and are
// left alone until it is done.
func NewTransfer(dst, src []byte) Transfer { return Transfer{dst: dst, src: src} }

// Left returns how many bytes are not yet copied.
func (t *Transfer) Left() int { return len(t.src) }

// Test copies a Piece, and tells whether that was the last.
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
