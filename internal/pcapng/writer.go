// SPDX-License-Identifier: Apache-2.0

package pcapng

import (
	"encoding/binary"
	"fmt"
	"io"

	"github.com/google/gopacket/layers"
)

// An Interface of a capture: Ethernet, with times in nanoseconds.
type Interface struct {
	Name        string
	Description string
	Filter      string // text, that only what it matches was captured
	Snap        int    // bytes of a frame, 0 for all
}

// maxText is what of a text is written: an option has 16 bits for its length.
const maxText = 4 << 10

// A Writer writes pcapng, one section. It is not safe for concurrent use.
type Writer struct {
	w      io.Writer
	ifaces int
	buf    []byte
	err    error
}

// flushAt is how much a Writer keeps back before it writes.
const flushAt = 64 << 10

var le = binary.LittleEndian

// NewWriter writes a file's head: which application wrote it, and the interfaces.
// Nothing is sure to be written before Flush.
func NewWriter(w io.Writer, application string, ifaces ...Interface) *Writer {
	n := &Writer{w: w, ifaces: len(ifaces)}
	n.block(blockSection, func() {
		n.u32(byteOrderMagic)
		n.u32(1)          // version 1.0
		n.u64(^uint64(0)) // length of the section: unknown
		n.text(optApplication, application)
		n.u32(optEnd)
	})
	for _, i := range ifaces {
		n.block(blockInterface, func() {
			n.u32(uint32(layers.LinkTypeEthernet))
			n.u32(uint32(i.Snap))
			n.text(optName, i.Name)
			n.text(optDescription, i.Description)
			n.option(optResolution, []byte{9})
			if i.Filter != "" {
				n.text(optFilter, "\x00"+i.Filter) // 0: a text, see the draft
			}
			n.u32(optEnd)
		})
	}
	return n
}

// Frame writes a frame. at is when it was captured, in nanoseconds after 1970.
func (n *Writer) Frame(f *Frame, at int64) error {
	if f.Interface < 0 || f.Interface >= n.ifaces {
		return fmt.Errorf("frame of interface %d, the section has %d", f.Interface, n.ifaces)
	}
	if len(f.Data) > MaxFrame {
		return fmt.Errorf("frame of %d bytes: want at most %d", len(f.Data), MaxFrame)
	}
	n.block(blockEnhanced, func() {
		n.u32(uint32(f.Interface))
		n.time(at)
		n.u32(uint32(len(f.Data)))
		n.u32(uint32(max(f.Length, len(f.Data))))
		n.bytes(f.Data)
		for _, c := range f.Comments {
			n.text(optComment, c)
		}
		if f.Direction != Unknown {
			n.option32(optFlags, uint32(f.Direction))
		}
		if f.Dropped > 0 {
			n.option64(optDropped, f.Dropped)
		}
		n.u32(optEnd)
	})
	if len(n.buf) >= flushAt {
		return n.Flush()
	}
	return n.err
}

// Statistics writes how many frames of an interface were meant to be captured
// until now, and how many of them were lost. The last one of a file counts.
func (n *Writer) Statistics(iface int, at int64, received, dropped uint64) {
	n.block(blockStats, func() {
		n.u32(uint32(iface))
		n.time(at)
		n.option64(optStatsReceived, received)
		n.option64(optStatsDropped, dropped)
		n.u32(optEnd)
	})
}

// Flush writes what has been kept back. An error is for good.
func (n *Writer) Flush() error {
	if n.err == nil && len(n.buf) > 0 {
		_, n.err = n.w.Write(n.buf)
	}
	n.buf = n.buf[:0]
	return n.err
}

func (n *Writer) u32(v uint32) { n.buf = le.AppendUint32(n.buf, v) }
func (n *Writer) u64(v uint64) { n.buf = le.AppendUint64(n.buf, v) }

func (n *Writer) time(at int64) {
	n.u32(uint32(uint64(at) >> 32))
	n.u32(uint32(at))
}

var zeros [4]byte

func (n *Writer) bytes(b []byte) {
	n.buf = append(n.buf, b...)
	n.buf = append(n.buf, zeros[:pad(len(b))-len(b)]...)
}

func (n *Writer) option(code uint16, v []byte) {
	n.u32(uint32(code) | uint32(len(v))<<16)
	n.bytes(v)
}

func (n *Writer) option32(code uint16, v uint32) {
	n.u32(uint32(code) | 4<<16)
	n.u32(v)
}

func (n *Writer) option64(code uint16, v uint64) {
	n.u32(uint32(code) | 8<<16)
	n.u64(v)
}

func (n *Writer) text(code uint16, s string) {
	if s = s[:min(len(s), maxText)]; s != "" {
		n.option(code, []byte(s))
	}
}

// block writes a block around what body writes.
func (n *Writer) block(kind uint32, body func()) {
	start := len(n.buf)
	n.u32(kind)
	n.u32(0)
	body()
	total := uint32(len(n.buf) - start + 4)
	n.u32(total)
	le.PutUint32(n.buf[start+4:], total)
}
