// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"fmt"
	"net/netip"
	"unsafe"

	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/spin"
)

var (
	_ spin.AtomicWindow   = (*hostq.Window)(nil)
	_ spin.TransferWindow = (*hostq.Window)(nil)
	_ spin.SliceWindow    = (*hostq.Window)(nil)
	_ spin.AtomicWindow   = Memory(nil)
	_ spin.TransferWindow = Memory(nil)
	_ spin.SliceWindow    = Memory(nil)
)

// Memory is a Window on a slice.
type Memory []byte

// CompareAndSwap64 implements AtomicWindow.
func (m Memory) CompareAndSwap64(off int64, old, new uint64) (uint64, error) {
	w, err := hostq.WindowOn(m, spin.Atomic)
	if err != nil {
		return 0, err
	}
	return w.CompareAndSwap64(off, old, new)
}

// FetchAdd64 implements AtomicWindow.
func (m Memory) FetchAdd64(off int64, delta uint64) (uint64, error) {
	w, err := hostq.WindowOn(m, spin.Atomic)
	if err != nil {
		return 0, err
	}
	return w.FetchAdd64(off, delta)
}

// CompareAndSwap32 implements AtomicWindow.
func (m Memory) CompareAndSwap32(off int64, old, new uint32) (uint32, error) {
	w, err := hostq.WindowOn(m, spin.Atomic)
	if err != nil {
		return 0, err
	}
	return w.CompareAndSwap32(off, old, new)
}

// FetchAdd32 implements AtomicWindow.
func (m Memory) FetchAdd32(off int64, delta uint32) (uint32, error) {
	w, err := hostq.WindowOn(m, spin.Atomic)
	if err != nil {
		return 0, err
	}
	return w.FetchAdd32(off, delta)
}

// StartRead implements TransferWindow.
func (m Memory) StartRead(p []byte, off int64) (spin.Transfer, error) {
	w, err := hostq.WindowOn(m, spin.Read)
	if err != nil {
		return spin.Transfer{}, err
	}
	return w.StartRead(p, off)
}

// StartWrite implements TransferWindow.
func (m Memory) StartWrite(p []byte, off int64) (spin.Transfer, error) {
	w, err := hostq.WindowOn(m, spin.Write)
	if err != nil {
		return spin.Transfer{}, err
	}
	return w.StartWrite(p, off)
}

// Slice implements SliceWindow.
func (m Memory) Slice(off, n int64, need spin.Rights) ([]byte, error) {
	if off < 0 || n < 0 || off > int64(len(m))-n {
		return nil, fmt.Errorf("slice of %d bytes at %d of memory of %d: %w", n, off, len(m), spin.ErrBounds)
	}
	return m[off : off+n : off+n], nil
}

// ReadAt implements Window.
func (m Memory) ReadAt(p []byte, off int64) (int, error) {
	if err := m.check(len(p), off); err != nil {
		return 0, fmt.Errorf("read: %w", err)
	}
	return copy(p, m[off:]), nil
}

// WriteAt implements Window.
func (m Memory) WriteAt(p []byte, off int64) (int, error) {
	if err := m.check(len(p), off); err != nil {
		return 0, fmt.Errorf("write: %w", err)
	}
	return copy(m[off:], p), nil
}

// Size implements Window.
func (m Memory) Size() int64 { return int64(len(m)) }

func (m Memory) check(n int, off int64) error {
	if off < 0 || off > int64(len(m)) || int64(n) > int64(len(m))-off {
		return fmt.Errorf("%d bytes at %d of a window of %d: %w", n, off, len(m), spin.ErrBounds)
	}
	return nil
}

// A Binder binds messages when they start. Its methods are called by workers, for
// different messages at the same time, under the handlers' time limit.
type Binder interface {
	// Bind is called before the header handler. With an error the message is
	// refused: its packet is dropped and not acknowledged, so that the sender
	// tries again.
	Bind(*Message) (spin.Binding, error)
	// Unbind is called when the message has ended in whatever way, after its
	// event, unless a handler returned Pending: then the binding stays.
	Unbind(*Message, *spin.Result)
}

// A Message is a message in flight, as its handlers share it. Good until its
// completion handler has returned; of the methods, only State gives memory that
// handlers may write, and with policies other than ByMessage several do at the
// same time.
//
// With an entry of mpq it is what a message in flight costs: at most 512 bytes.
type Message struct {
	entry   *mpq.Entry
	ctx     *Context
	table   *table // that the entry is in
	port    *port  // of its latest packet
	binding spin.Binding
	state   *byte           // of the slot, as many as the context says; nil: none. A slice would cost each message 16 bytes
	held    *[]*Kept        // guarded by messages.mu
	holds   uint32          // packets that the table holds for it
	waits   *deferred       // complete, and the event found no room
	dropped uint64          // bytes
	ask     spin.AckRequest // of EOM
	bucket  int32           // that the message holds, or noBucket
	bound   bool
	deposit bool // the header handler said Proceed
	discard bool // it said Drop
	pending bool
	starved bool
	asked   bool // ask is there
	live    bool // the slot has a message
	failed  bool
	peer    peer
}

// Slot returns the message's number among those in flight: 0 up to the context's
// limit of messages, and no two at a time have the same. In a context that hands messages over
// from eBPF those in the kernel have these numbers, and those here as many behind them.
func (m *Message) Slot() int { return m.ctx.msgs.cfg.FirstSlot + m.entry.Slot() }

// State returns the message's own memory, as long as the context says; a copy of
// its initial state when the message starts.
func (m *Message) State() []byte {
	if m.state == nil {
		return nil
	}
	return unsafe.Slice(m.state, m.ctx.msgs.cfg.State)
}

// Binding returns where the message goes.
func (m *Message) Binding() spin.Binding { return m.binding }

// Key returns the words that name the message.
func (m *Message) Key() mpq.Key { return *m.entry.Key() }

// Number returns the last word of the key: which of its sender's messages it is.
func (m *Message) Number() uint32 { return m.entry.Key()[len(m.ctx.msgs.cfg.Format.Key)-1] }

// Source returns the address and port that the message comes from; not valid if
// it does not come over UDP or TCP.
func (m *Message) Source() netip.AddrPort { return m.peer.addr() }

// Length returns how long the message is, in bytes, if EOM has come.
func (m *Message) Length() (n uint64, known bool) {
	m.table.lock()
	defer m.table.unlock()
	return m.entry.Length()
}

// A Completion is what a completion handler gets: a message, and no packet.
type Completion struct {
	Task
	spin.Result
}

// A CompletionHandler runs once for a message, after all of its other handlers
// have finished. With anything but Success the message has failed.
type CompletionHandler func(*Completion) spin.Code

// A Protocol reads what a frame says in addition to key, offset and EOM, and answers.
// It is a pure function of its arguments, called by all workers. slmp.Protocol is one.
type Protocol interface {
	// Inspect reads the header that comes immediately before the payload.
	// False: the frame is no segment, but an acknowledgement, say.
	Inspect(header []byte) (spin.AckRequest, bool)
	// Answer appends what is to be sent back, the payload of a datagram;
	// nothing if there is nothing to say. The segment is processed when its HER
	// has finished; that with EOM, when the message is complete. The entry is
	// nil if the message has ended.
	Answer(dst []byte, a spin.AckRequest, processed bool, e *mpq.Entry) []byte
}
