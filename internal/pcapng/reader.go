// SPDX-License-Identifier: Apache-2.0

// Package pcapng reads captures, pcap and pcapng, and writes pcapng: blocks of
// frames with the direction of each, comments, and how many were lost before it
// (draft-ietf-opsawg-pcapng).
package pcapng

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/google/gopacket/layers"
	"github.com/google/gopacket/pcapgo"
)

// ErrFile is wrapped by every error about a file that is no capture, is damaged,
// or holds other frames than Ethernet.
var ErrFile = errors.New("capture file")

// No frame is longer than MaxFrame, which is tcpdump's limit, and no pcapng block
// than MaxBlock. A file that claims more is damaged, or wants our memory.
const (
	MaxFrame = 256 << 10
	MaxBlock = 1 << 20
)

// A Frame of a capture. What pcap does not know is zero there.
type Frame struct {
	Data      []byte // good until the next one is read, as are Comments
	Length    int    // on the wire: greater than len(Data) where the capture cut it
	Interface int    // in the order of the section
	Direction Direction
	Comments  []string
	Dropped   uint64 // frames that the capture lost between this one and the one before
}

// Direction says which way a frame went.
type Direction uint8

// Directions, as the flags of a block number them.
const (
	Unknown Direction = iota
	In
	Out
)

// A Reader reads the frames of a file one after the other. It is not safe for
// concurrent use.
type Reader struct {
	old *pcapgo.Reader // pcap; else:
	ng  blocks
}

// NewReader reads what comes before the first frame.
func NewReader(r io.Reader) (*Reader, error) {
	buf := bufio.NewReaderSize(r, 1<<16)
	magic, err := buf.Peek(12)
	if len(magic) < 4 {
		return nil, fmt.Errorf("%w: neither pcap nor pcapng: too short", ErrFile)
	}
	if binary.BigEndian.Uint32(magic) == blockSection {
		if len(magic) < 12 {
			return nil, fmt.Errorf("%w: neither pcap nor pcapng: %w", ErrFile, err)
		}
		if _, err := orderOf(magic); err != nil {
			return nil, fmt.Errorf("%w: neither pcap nor pcapng: %w", ErrFile, err)
		}
		return &Reader{ng: blocks{r: buf}}, nil
	}
	old, err := pcapgo.NewReader(buf)
	if err != nil {
		return nil, fmt.Errorf("%w: neither pcap nor pcapng: %w", ErrFile, err)
	}
	// The file's own limit is often wrong, and may be 4 GiB.
	old.SetSnaplen(MaxFrame)
	return &Reader{old: old}, nil
}

// Next reads the next frame into *f. The error is io.EOF at the end of an
// undamaged file.
func (r *Reader) Next(f *Frame) error {
	*f = Frame{Comments: f.Comments[:0]}
	var link int
	var err error
	if r.old != nil {
		data, ci, e := r.old.ReadPacketData()
		f.Data, f.Length, link, err = data, ci.Length, int(r.old.LinkType()), e
	} else {
		link, err = r.ng.frame(f)
	}
	switch {
	case err == io.EOF:
		return io.EOF
	case err != nil:
		return fmt.Errorf("%w: damaged: %w", ErrFile, err)
	case link != int(layers.LinkTypeEthernet):
		return fmt.Errorf("%w: link type %d: rules count from the Ethernet header, so only link type 1 will do; capture on an Ethernet interface, not on any", ErrFile, link)
	}
	f.Length = max(f.Length, len(f.Data))
	return nil
}

// Types of blocks: section 11 of the draft.
const (
	blockSection   = 0x0a0d0d0a
	blockInterface = 1
	blockObsolete  = 2
	blockSimple    = 3
	blockStats     = 5
	blockEnhanced  = 6
)

// Options. Each block has numbers of its own, but for the first two.
const (
	optEnd     = 0
	optComment = 1

	optApplication = 4 // of a section

	optName        = 2 // of an interface
	optDescription = 3
	optResolution  = 9
	optFilter      = 11

	optFlags   = 2 // of a frame
	optDropped = 4

	optStatsReceived = 4 // of statistics
	optStatsDropped  = 5
)

const byteOrderMagic = 0x1a2b3c4d

// blocks reads pcapng. pcapgo's own reader believes every length, and panics for
// some time resolutions, which do not matter here. It is not safe for concurrent use.
type blocks struct {
	r      *bufio.Reader
	order  binary.ByteOrder
	ifaces []ifaceBlock // of the section
	block  []byte
}

type ifaceBlock struct {
	link uint16
	snap uint32 // 0 for no limit
}

// orderOf tells a section's byte order from the first 12 bytes of its header.
func orderOf(head []byte) (binary.ByteOrder, error) {
	switch binary.BigEndian.Uint32(head[8:]) {
	case byteOrderMagic:
		return binary.BigEndian, nil
	case 0x4d3c2b1a:
		return binary.LittleEndian, nil
	}
	return nil, fmt.Errorf("byte-order magic %#x of a section", head[8:12])
}

// next reads the next block, whole, into n.block, and returns its type and body.
func (n *blocks) next() (kind uint32, body []byte, err error) {
	head, err := n.r.Peek(12)
	if len(head) == 0 && err == io.EOF {
		return 0, nil, io.EOF
	}
	if len(head) < 12 {
		return 0, nil, fmt.Errorf("block header: %w", noEOF(err))
	}
	if binary.BigEndian.Uint32(head) == blockSection { // the same in both orders
		if n.order, err = orderOf(head); err != nil {
			return 0, nil, err
		}
	}
	if n.order == nil {
		return 0, nil, errors.New("no section header")
	}
	kind, total := n.order.Uint32(head), n.order.Uint32(head[4:])
	if total < 12 || total > MaxBlock || total%4 != 0 {
		return 0, nil, fmt.Errorf("block of type %d: length %d, want a multiple of 4 from 12 to %d", kind, total, MaxBlock)
	}
	if uint32(cap(n.block)) < total {
		n.block = make([]byte, total)
	}
	n.block = n.block[:total]
	if _, err := io.ReadFull(n.r, n.block); err != nil {
		return 0, nil, fmt.Errorf("block of type %d: %w", kind, noEOF(err))
	}
	body = n.block[8 : total-4]
	if least := map[uint32]int{blockSection: 16, blockInterface: 8, blockObsolete: 20, blockSimple: 4, blockStats: 12, blockEnhanced: 20}[kind]; len(body) < least {
		return 0, nil, fmt.Errorf("block of type %d: %d bytes, want at least %d", kind, len(body), least)
	}
	return kind, body, nil
}

// noEOF makes the end inside of something an error.
func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// frame reads up to the next frame, and returns its link type.
func (n *blocks) frame(f *Frame) (link int, err error) {
	for {
		kind, b, err := n.next()
		if err != nil {
			return 0, err
		}
		var id, captured, wire uint32
		fixed := 20
		switch kind {
		case blockSection:
			if major := n.order.Uint16(b[4:]); major != 1 {
				return 0, fmt.Errorf("version %d of pcapng, want 1", major)
			}
			n.ifaces = n.ifaces[:0]
			continue
		case blockInterface:
			n.ifaces = append(n.ifaces, ifaceBlock{n.order.Uint16(b), n.order.Uint32(b[4:])})
			continue
		case blockEnhanced:
			id, captured, wire = n.order.Uint32(b), n.order.Uint32(b[12:]), n.order.Uint32(b[16:])
		case blockObsolete:
			id, captured, wire = uint32(n.order.Uint16(b)), n.order.Uint32(b[12:]), n.order.Uint32(b[16:])
		case blockSimple:
			fixed = 4
			wire = n.order.Uint32(b)
			captured = wire
			if len(n.ifaces) > 0 && n.ifaces[0].snap > 0 {
				captured = min(wire, n.ifaces[0].snap)
			}
		default:
			continue
		}
		if uint64(id) >= uint64(len(n.ifaces)) {
			return 0, fmt.Errorf("frame of interface %d, the section has %d", id, len(n.ifaces))
		}
		if uint64(captured) > uint64(len(b)-fixed) || captured > MaxFrame {
			return 0, fmt.Errorf("frame of %d bytes in a block of %d: want at most %d", captured, len(b)-fixed, MaxFrame)
		}
		f.Data, f.Length, f.Interface = b[fixed:fixed+int(captured)], int(wire), int(id)
		if kind == blockEnhanced {
			n.options(b[min(fixed+pad(int(captured)), len(b)):], func(code uint16, v []byte) {
				switch {
				case code == optComment:
					f.Comments = append(f.Comments, string(v))
				case code == optFlags && len(v) == 4:
					f.Direction = Direction(n.order.Uint32(v) & 3)
				case code == optDropped && len(v) == 8:
					f.Dropped = n.order.Uint64(v)
				}
			})
		}
		return int(n.ifaces[id].link), nil
	}
}

// options calls f for each option in b. They are a bonus: where they make no sense,
// the rest is ignored, and what they are about is good nevertheless.
func (n *blocks) options(b []byte, f func(code uint16, value []byte)) {
	for len(b) >= 4 {
		code, size := n.order.Uint16(b), int(n.order.Uint16(b[2:]))
		if b = b[4:]; code == optEnd || size > len(b) {
			return
		}
		f(code, b[:size])
		b = b[min(pad(size), len(b)):]
	}
}

// pad returns n, rounded up to what blocks and options are aligned to.
func pad(n int) int { return (n + 3) &^ 3 }
