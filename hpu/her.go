// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"sync/atomic"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/packet"
	"github.com/xspin/xspin/spin"
	"github.com/xspin/xspin/xsk"
)

// What a handler may be told when it asks for something.
var (
	ErrFull   = hostq.ErrFull                  // no room on the tx ring or for the stack: try with a later packet
	ErrFrames = errors.New("no frame left")    // all frames for sends of handlers are on their way
	ErrSize   = errors.New("size not allowed") // longer than a frame, or than the packet
	ErrTwice  = errors.New("already sent, kept or handed on")
)

// what becomes of the packet's frame when its handler has returned
type action uint8

const (
	recycle action = iota
	send
	keep
	giveUp // its handler never returned
)

// HER is a handler execution request: one packet, and what its handler may do
// with it. It belongs to one handler until that returns, and must not be used
// later or by other goroutines.
//
// What does not need a packet are methods of the [Task] in it, for all handlers
// alike: memory (Memory, HPUMemory, Window, Message), the application (Ask, Notify,
// Counter), new frames (SendNew, SendUDP, Resolve), Logf, Count and
// Fail. docs/handlers.md has all of them in one table.
type HER struct {
	Task
	meta bpf.Meta
	all  []xsk.Desc // the buffers that came
	segs []xsk.Desc // the first of these, as far as Truncate left them
	head []byte     // bytes of the first
	size int

	seg     mpq.Segment // in contexts with messages
	ask     spin.AckRequest
	trig    *triggered // the message is the host's
	payload int        // where it begins
	data    []byte     // payload that is not in a frame: see Trigger
	from    *port      // where the packet came from, if that is not the batch's port
	late    bool       // see her
	parsed  bool
	headers packet.Headers
	action  action
	kept    *Kept // with action keep, if the handler kept it

	k       int    // its place in the batch
	acked   int    // answers among its frames
	sent    int    // frames of its handlers, counted as sent
	refused bool   // there was no place for its segment
	verdict string // on it, for a tap
}

// Ruleset returns the number of the ruleset that the packet matched.
func (h *HER) Ruleset() int { return int(h.meta.Ruleset) }

// EOM tells whether the packet is the last of its message.
func (h *HER) EOM() bool { return h.meta.Flags&bpf.MetaEOM != 0 }

// Key returns the words that name the packet's message, as many as the message
// format has; the rest is 0.
func (h *HER) Key() *[bpf.MaxKey]uint32 { return &h.meta.Key }

// Offset returns the position of the packet's payload in its message, in bytes.
func (h *HER) Offset() uint32 { return h.meta.Offset }

// Arrival returns when the XDP program saw the packet: CLOCK_MONOTONIC in ns,
// and 0 unless the context asked for it.
func (h *HER) Arrival() int64 { return int64(h.meta.Arrival) }

// Len returns the length of the packet in bytes, Ethernet header included.
func (h *HER) Len() int { return h.size }

// Head returns the bytes of the packet's first buffer: all of it, unless it is
// too long for one, and the headers in any case. The handler may change them.
func (h *HER) Head() []byte { return h.head }

// Segments returns how many buffers the packet spans.
func (h *HER) Segments() int { return len(h.segs) }

// Segment returns the bytes of buffer i, which the handler may change.
func (h *HER) Segment(i int) []byte {
	if i == 0 {
		return h.head
	}
	return h.r.pool.cfg.Memory.Bytes(h.segs[i].Addr, int(h.segs[i].Len))
}

// Rest appends the packet's buffers after the first to room, for functions of package packet
// that need all of its bytes, such as [packet.Headers.ReplyUDP]. Room for 4 is enough for
// frames of up to 14 KiB, so that nothing is allocated.
func (h *HER) Rest(room [][]byte) [][]byte {
	for i := 1; i < len(h.segs); i++ {
		room = append(room, h.Segment(i))
	}
	return room
}

// CopyTo copies the packet's bytes from offset off into dst and returns how
// many there were.
func (h *HER) CopyTo(dst []byte, off int) int {
	return copyTo(h.r.pool.cfg.Memory, h.segs, dst, off)
}

func copyTo(mem *xsk.UMEM, segs []xsk.Desc, dst []byte, off int) int {
	n := 0
	for _, d := range segs {
		b := mem.Bytes(d.Addr, int(d.Len))
		if off >= len(b) {
			off -= len(b)
			continue
		}
		n += copy(dst[n:], b[off:])
		off = 0
		if n == len(dst) {
			break
		}
	}
	return n
}

// PayloadLen returns how many bytes the packet brings to its message.
func (h *HER) PayloadLen() int {
	if h.msg == nil {
		return h.Headers().PayloadLen
	}
	return h.seg.Len
}

// Payload yields the bytes that the packet brings to its message, buffer by buffer.
func (h *HER) Payload() iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		if len(h.data) > 0 {
			yield(h.data)
			return
		}
		off, n := h.payload, h.seg.Len
		if h.msg == nil {
			off, n = h.Headers().Payload, h.Headers().PayloadLen
		}
		for i := 0; n > 0 && i < len(h.segs); i++ {
			b := h.Segment(i)
			if off >= len(b) {
				off -= len(b)
				continue
			}
			b = b[off:min(off+n, len(b))]
			off = 0
			n -= len(b)
			if !yield(b) {
				return
			}
		}
	}
}

// Deposit writes the payload to its offset in the message's place in the window.
// An error wraps ErrBounds if it does not fit there; nothing is written then.
func (h *HER) Deposit() error {
	err := h.deposit()
	h.r.why = err // for the message's first error, if the handler fails
	return err
}

func (h *HER) deposit() error {
	if h.msg == nil || h.msg.binding.Window == nil {
		return fmt.Errorf("deposit: %w", errNoWindow)
	}
	b := &h.msg.binding
	if room := b.Room(); int64(h.seg.End()) > room {
		return fmt.Errorf("deposit bytes %d to %d of a message with room for %d: %w", h.seg.Offset, h.seg.End(), room, spin.ErrBounds)
	}
	at := b.Place + int64(h.seg.Offset)
	// The usual case is one buffer: no iterator needed.
	if off, n := h.payload, h.seg.Len; h.data == nil && off+n <= len(h.head) {
		_, err := b.Window.WriteAt(h.head[off:off+n], at)
		return err
	}
	for p := range h.Payload() {
		if _, err := b.Window.WriteAt(p, at); err != nil {
			return err
		}
		at += int64(len(p))
	}
	return nil
}

var errNoPacket = fmt.Errorf("send, keep or hand on a host message: %w: there is no packet", ErrHere)

var errNoWindow = errors.New("the message has no window")

// Headers returns the packet's headers, parsed when first asked for.
func (h *HER) Headers() *packet.Headers {
	if !h.parsed {
		h.headers = packet.Parse(h.head, h.size)
		h.parsed = true
	}
	return &h.headers
}

// Truncate makes the packet n bytes long, at least 14. It cannot grow.
func (h *HER) Truncate(n int) error {
	// The kernel does not look before it sends: a frame must have its header.
	if n < 14 || n > h.size {
		return fmt.Errorf("truncate %d bytes to %d: %w", h.size, n, ErrSize)
	}
	h.size = n
	for i := range h.segs {
		s := &h.segs[i]
		if int(s.Len) >= n {
			s.Len = uint32(n)
			s.Options &^= xsk.Continued
			h.segs = h.segs[:i+1] // the others are recycled with the HER
			break
		}
		n -= int(s.Len)
	}
	h.head = h.head[:h.segs[0].Len]
	h.parsed = false
	return nil
}

// Send has the packet, as the handler leaves it, sent from where it is when the
// handler has returned, on the queue it came from. Its HER finishes when it has
// left. ErrFull if the tx ring has no room; the packet is then recycled as if
// nothing had been asked for.
func (h *HER) Send() error {
	if h.action != recycle {
		return fmt.Errorf("send: %w", ErrTwice)
	}
	if len(h.segs) == 0 {
		return errNoPacket
	}
	if !h.r.batch.reserve(len(h.segs)) {
		h.acc.SendFull++
		return fmt.Errorf("send: HPU %d, queue %d: %w", h.port.hpu, h.port.queue, ErrFull)
	}
	h.action = send
	return nil
}

// ToStack hands a copy of the packet to the Linux stack, as if it had come in on
// the interface and matched nothing. A partial checksum is completed first, in
// the packet itself.
func (h *HER) ToStack() error {
	if h.r.pool.cfg.Stack == nil {
		return fmt.Errorf("hand packet to the stack: %w", errors.ErrUnsupported)
	}
	if len(h.segs) == 0 {
		return errNoPacket
	}
	h.completeChecksum()
	if err := h.r.pool.cfg.Stack.Inject(h.size, h.CopyTo); err != nil {
		return fmt.Errorf("hand packet to the stack: %w", err)
	}
	h.acc.ToStack++
	return nil
}

// completeChecksum computes the checksum that a local sender has left to the
// device. The kernel keeps a note with its own frames that nothing is wrong with this;
// the note does not come through XDP, and without it the stack would drop the packet.
func (h *HER) completeChecksum() {
	hdr := packet.Parse(h.head, h.size) // the handler may have changed lengths
	switch {
	case hdr.UDPChecksumPartial():
		var room [1][]byte
		sum, _ := hdr.UDPChecksum(h.Rest(room[:0])...) // 0, for none, if part of it is missing
		hdr.UDP.SetChecksum(sum)
	case hdr.TCP != nil && hdr.Contiguous(): // as all are that the stack can take
		var c packet.Checksum
		c.AddPseudo(hdr.IPv4.Src(), hdr.IPv4.Dst(), packet.ProtocolTCP, len(hdr.TCP))
		field := hdr.TCP[16:18]
		if binary.BigEndian.Uint16(field) == c.Folded() {
			c.Add(hdr.TCP[:16])
			c.Add(hdr.TCP[18:])
			binary.BigEndian.PutUint16(field, c.Value())
		}
	}
}

// Keep lets the handler return and keep the packet: its HER finishes, and its
// credit returns, only when Release is called. Kept packets are few: they are
// paid for with the context's credit. A handler that returns Fail or panics has
// kept nothing: the packet is taken back, as if by Release, so let nobody else
// have the Kept before the handler is sure to succeed.
//
// A kept packet can be read, changed and released, not sent: the tx ring that
// it would leave by belongs to a worker. Answer with [Pool.Transmit], which copies.
func (h *HER) Keep() (*Kept, error) {
	if h.action != recycle {
		return nil, fmt.Errorf("keep: %w", ErrTwice)
	}
	if len(h.segs) == 0 {
		return nil, errNoPacket
	}
	h.action = keep
	h.kept = h.keep()
	if h.msg != nil {
		h.kept.job = finishJob
	}
	h.kept.pool.kept.Add(1)
	return h.kept, nil
}

// keep makes a Kept of the packet.
func (h *HER) keep() *Kept {
	k := new(Kept)
	h.keepAs(k)
	return k
}

func (h *HER) keepAs(k *Kept) {
	k.pool = h.r.pool
	k.worker = h.r.w
	k.port = h.origin()
	k.account = h.account()
	k.size = h.size
	k.meta = h.meta
	k.job = releaseJob
	k.msg, k.seg, k.ask = h.msg, h.seg, h.ask
	k.all = append(k.all[:0], h.all...)
	k.segs = k.all[:len(h.segs)]
}

// hold keeps the packet until the header handler of its message has run.
func (h *HER) hold() *Kept {
	k := h.keep()
	k.job = replayJob
	h.action = keep
	return k
}

func (h *HER) origin() *port {
	if h.from != nil {
		return h.from
	}
	return h.port
}

// Kept is a packet that outlived its handler. It may be used by any one
// goroutine until Release.
type Kept struct {
	pool    *Pool
	worker  *worker // that runs its handler, and takes it back: not before that returns
	port    *port
	account account
	all     []xsk.Desc
	segs    []xsk.Desc
	size    int
	done    atomic.Bool

	// For the worker that takes it back.
	job  job
	meta bpf.Meta
	msg  *Message
	seg  mpq.Segment
	ask  spin.AckRequest
	drop bool          // its handler said Drop
	cont *continuation // that it is part of
	data []byte        // with cont: payload that is not in a frame
}

// Len returns the packet's length in bytes.
func (k *Kept) Len() int { return k.size }

// Segments returns how many buffers the packet spans.
func (k *Kept) Segments() int { return len(k.segs) }

// Segment returns the bytes of buffer i, and nil after Release. What it has
// returned must not be used after Release either.
func (k *Kept) Segment(i int) []byte {
	if k.done.Load() {
		return nil
	}
	return k.pool.cfg.Memory.Bytes(k.segs[i].Addr, int(k.segs[i].Len))
}

// CopyTo copies the packet's bytes from offset off into dst and returns how
// many there were: none after Release.
func (k *Kept) CopyTo(dst []byte, off int) int {
	if k.done.Load() {
		return 0
	}
	return copyTo(k.pool.cfg.Memory, k.segs, dst, off)
}

// Release finishes the HER. Idempotent.
func (k *Kept) Release() {
	if k.finish() {
		k.pool.giveBack(k)
	}
}

// finish ends the use of the packet. It returns true to the first caller, which
// must recycle the packet.
func (k *Kept) finish() bool {
	if k.done.Swap(true) {
		return false
	}
	k.pool.kept.Add(-1)
	return true
}
