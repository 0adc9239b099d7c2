// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"fmt"
	"net/netip"
	"unsafe"

	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/mpq"
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
// Memory are; ErrRights says that the context may not use the window so. A handler asks
// for it once a packet:
//
//	w, ok := h.Window("in").(hpu.AtomicWindow)
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
// applications and Memory are.
type TransferWindow interface {
	Window
	StartRead(p []byte, off int64) (hostq.Transfer, error)
	StartWrite(p []byte, off int64) (hostq.Transfer, error)
}

// A SliceWindow is a Window whose bytes a handler may have as they are, to place many
// small pieces: bounds and rights are checked once for all of them. The slice is good
// until the handler returns. Others may write there at any time, so nothing that was read
// can be relied on to stay. Windows of applications and Memory are.
type SliceWindow interface {
	Window
	Slice(off, n int64, need hostq.Rights) ([]byte, error)
}

var (
	_ AtomicWindow   = (*hostq.Window)(nil)
	_ TransferWindow = (*hostq.Window)(nil)
	_ SliceWindow    = (*hostq.Window)(nil)
	_ AtomicWindow   = Memory(nil)
	_ TransferWindow = Memory(nil)
	_ SliceWindow    = Memory(nil)
)

// ErrBounds is returned, wrapped, for an access outside of a window, or outside of
// a message's place in it.
var ErrBounds = hostq.ErrBounds

// ErrRights is returned, wrapped, for an access that the context has no right to.
var ErrRights = hostq.ErrRights

// Memory is a Window on a slice.
type Memory []byte

// CompareAndSwap64 implements AtomicWindow.
func (m Memory) CompareAndSwap64(off int64, old, new uint64) (uint64, error) {
	w, err := hostq.WindowOn(m, hostq.Atomic)
	if err != nil {
		return 0, err
	}
	return w.CompareAndSwap64(off, old, new)
}

// FetchAdd64 implements AtomicWindow.
func (m Memory) FetchAdd64(off int64, delta uint64) (uint64, error) {
	w, err := hostq.WindowOn(m, hostq.Atomic)
	if err != nil {
		return 0, err
	}
	return w.FetchAdd64(off, delta)
}

// CompareAndSwap32 implements AtomicWindow.
func (m Memory) CompareAndSwap32(off int64, old, new uint32) (uint32, error) {
	w, err := hostq.WindowOn(m, hostq.Atomic)
	if err != nil {
		return 0, err
	}
	return w.CompareAndSwap32(off, old, new)
}

// FetchAdd32 implements AtomicWindow.
func (m Memory) FetchAdd32(off int64, delta uint32) (uint32, error) {
	w, err := hostq.WindowOn(m, hostq.Atomic)
	if err != nil {
		return 0, err
	}
	return w.FetchAdd32(off, delta)
}

// StartRead implements TransferWindow.
func (m Memory) StartRead(p []byte, off int64) (hostq.Transfer, error) {
	w, err := hostq.WindowOn(m, hostq.Read)
	if err != nil {
		return hostq.Transfer{}, err
	}
	return w.StartRead(p, off)
}

// StartWrite implements TransferWindow.
func (m Memory) StartWrite(p []byte, off int64) (hostq.Transfer, error) {
	w, err := hostq.WindowOn(m, hostq.Write)
	if err != nil {
		return hostq.Transfer{}, err
	}
	return w.StartWrite(p, off)
}

// Slice implements SliceWindow.
func (m Memory) Slice(off, n int64, need hostq.Rights) ([]byte, error) {
	if off < 0 || n < 0 || off > int64(len(m))-n {
		return nil, fmt.Errorf("slice of %d bytes at %d of memory of %d: %w", n, off, len(m), ErrBounds)
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
		return fmt.Errorf("%d bytes at %d of a window of %d: %w", n, off, len(m), ErrBounds)
	}
	return nil
}

// A Binding says where a message goes.
type Binding struct {
	Window Window // Optional
	Place  int64  // of the message's first byte in the window
	Size   int64  // bytes that the message may take there. 0: up to the window's end

	// Events hears of the message's end, and of its first error. The worker
	// does not wait: a message whose end finds no room is not over, and its
	// sender has no acknowledgement of EOM, until there is. Optional.
	Events EventSink

	User any // whatever the binder wants handlers and events to know
}

// room returns how many bytes the message may take.
func (b *Binding) room() int64 {
	if b.Window == nil {
		return 0
	}
	n := b.Window.Size() - b.Place
	if b.Size > 0 {
		n = min(n, b.Size)
	}
	return max(n, 0)
}

// A Binder binds messages when they start. Its methods are called by workers, for
// different messages at the same time, under the handlers' time limit.
type Binder interface {
	// Bind is called before the header handler. With an error the message is
	// refused: its packet is dropped and not acknowledged, so that the sender
	// tries again.
	Bind(*Message) (Binding, error)
	// Unbind is called when the message has ended in whatever way, after its
	// event, unless a handler returned Pending: then the binding stays.
	Unbind(*Message, *Result)
}

// A Cause says how a message ended.
type Cause uint8

// Causes.
const (
	Complete Cause = iota // every byte was processed
	TimedOut              // its sender went silent, or lingering is over
	Removed               // its context was removed, or the NIC closed
	Failed                // a handler failed: see the first error
)

func (c Cause) String() string {
	if int(c) < len(causes) {
		return causes[c]
	}
	return fmt.Sprintf("Cause(%d)", int(c))
}

var causes = []string{"complete", "timed out", "removed", "failed"}

// A Result is what is known of a message at its end.
type Result struct {
	Cause   Cause
	Length  uint64 // bytes, as EOM said; without EOM, up to the last that came
	Dropped uint64 // of these: bytes of packets for which a handler returned Drop
	Missing uint64 // of these: bytes that were not processed
	// FlowControl: the NIC had to drop packets of the message for lack of room.
	FlowControl bool
	// Time is when it ended, before the application was told: CLOCK_MONOTONIC in ns. 0
	// for completion handlers, to which it has not.
	Time int64
}

// A MessageEvent tells the application that a message has ended, or failed.
type MessageEvent struct {
	Result
	Context string         // name
	Source  netip.AddrPort // of the sender
	Number  uint32         // of the message with its sender
	Slot    int
	User    any   // of the binding
	Err     error // with Cause Failed: the first error
}

// An EventSink takes events of messages. Post does not wait: false says that there is
// no room. The event is good until it returns.
type EventSink interface {
	Post(*MessageEvent) bool
}

// EventChan is an EventSink.
type EventChan chan<- MessageEvent

// Post implements EventSink.
func (c EventChan) Post(e *MessageEvent) bool {
	select {
	case c <- *e:
		return true
	default:
		return false
	}
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
	binding Binding
	state   *byte     // of the slot, as many as the context says; nil: none. A slice would cost each message 16 bytes
	held    *[]*Kept  // guarded by messages.mu
	holds   uint32    // packets that the table holds for it
	waits   *deferred // complete, and the event found no room
	dropped uint64    // bytes
	ask     Ask       // of EOM
	bucket  int32     // that the message holds, or noBucket
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
// limit of messages, and no two at a time have the same.
func (m *Message) Slot() int { return m.entry.Slot() }

// State returns the message's own memory, as long as the context says; a copy of
// its initial state when the message starts.
func (m *Message) State() []byte {
	if m.state == nil {
		return nil
	}
	return unsafe.Slice(m.state, m.ctx.msgs.cfg.State)
}

// Binding returns where the message goes.
func (m *Message) Binding() Binding { return m.binding }

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
	Result
}

// A CompletionHandler runs once for a message, after all of its other handlers
// have finished. With anything but Success the message has failed.
type CompletionHandler func(*Completion) Code

// Ask is what a datagram asks of the receiver, in words of its protocol.
type Ask struct {
	Flags      uint32
	ID, Offset uint32
}

// An Outcome is what an answer tells about a segment.
type Outcome uint8

// Outcomes.
const (
	Processed Outcome = iota // its HER has finished; of EOM: the message is complete
	Waiting                  // not yet
)

// A Protocol reads what a frame says beside key, offset and EOM, and answers. It
// is a pure function of its arguments, called by all workers.
type Protocol interface {
	// Inspect reads the header that comes immediately before the payload.
	// False: the frame is no segment, but an acknowledgement, say.
	Inspect(header []byte) (Ask, bool)
	// Answer appends what is to be sent back, the payload of a datagram;
	// nothing if there is nothing to say. The entry is nil if the message
	// has ended.
	Answer(dst []byte, a Ask, o Outcome, e *mpq.Entry) []byte
}
