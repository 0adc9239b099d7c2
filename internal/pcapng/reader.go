// SPDX-License-Identifier: Apache-2.0

// Package pcapng reads captures, pcap and pcapng, and writes pcapng: blocks of
// frames with the direction of each, comments, and how many were lost before it
// (draft-ietf-opsawg-pcapng).
package pcapng

import (
	"bufio"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/google/gopacket/layers"
)

// ErrFile is wrapped by every error about a file that is no capture, is damaged,
// or holds no Ethernet frames.
var ErrFile = errors.New("capture file")

// No frame is longer than MaxFrame, which is tcpdump's limit, and no pcapng block
// of those that are read than MaxBlock. A file that claims more is damaged, or wants our memory.
const (
	MaxFrame = 256 << 10
	MaxBlock = 1 << 20
)

// A Frame of a capture. What pcap does not know is zero there.
type Frame struct {
	Number    int    // in the file, from 1 on: those that are no Ethernet count, as in tshark
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

// A Reader reads the Ethernet frames of a file one after the other. It is not safe for
// concurrent use.
type Reader struct {
	next    func(*Frame) (link int, err error)
	n       int // frames
	others  int // that are no Ethernet
	another int // the link type of the last of them
}

// NewReader reads what comes before the first frame. The file may be compressed by gzip.
func NewReader(r io.Reader) (*Reader, error) {
	buf := bufio.NewReaderSize(r, 1<<16)
	magic, _ := buf.Peek(2) // more is looked at below
	if len(magic) == 2 && magic[0] == 0x1f && magic[1] == 0x8b {
		z, err := gzip.NewReader(buf)
		if err != nil {
			return nil, fmt.Errorf("%w: gzip: %w", ErrFile, err)
		}
		buf = bufio.NewReaderSize(z, 1<<16)
	}
	magic, err := buf.Peek(24)
	if len(magic) < 12 {
		return nil, fmt.Errorf("%w: neither pcap nor pcapng: %d bytes: %w", ErrFile, len(magic), noEOF(err))
	}
	if binary.BigEndian.Uint32(magic) == blockSection {
		if _, err := orderOf(magic); err != nil {
			return nil, fmt.Errorf("%w: neither pcap nor pcapng: %w", ErrFile, err)
		}
		return &Reader{next: (&blocks{r: buf}).frame}, nil
	}
	old, err := newRecords(buf, magic)
	if err != nil {
		return nil, fmt.Errorf("%w: neither pcap nor pcapng: %w", ErrFile, err)
	}
	return &Reader{next: old.frame}, nil
}

// Next reads the next Ethernet frame into *f. The error is io.EOF at the end of an
// undamaged file.
func (r *Reader) Next(f *Frame) error {
	for {
		*f = Frame{Comments: f.Comments[:0]}
		link, err := r.next(f)
		switch {
		case err == io.EOF && r.others > 0 && r.others == r.n:
			return fmt.Errorf("%w: link type %d: rules count from the Ethernet header, so only link type 1 will do; capture on an Ethernet interface, not on any", ErrFile, r.another)
		case err == io.EOF:
			return io.EOF
		case err != nil:
			return fmt.Errorf("%w: damaged: %w", ErrFile, err)
		}
		r.n++
		if link != int(layers.LinkTypeEthernet) {
			r.others, r.another = r.others+1, link
			continue
		}
		f.Number = r.n
		f.Length = max(f.Length, len(f.Data))
		return nil
	}
}

// Skipped returns how many frames were left out so far, since they are no Ethernet.
func (r *Reader) Skipped() int { return r.others }

// records reads pcap: a header of the file, and one of each frame (man 5 pcap-savefile).
// pcapgo's own reader wants no frame that is longer than it was on the wire, which tshark
// reads, too. It is not safe for concurrent use.
type records struct {
	r     io.Reader
	order binary.ByteOrder
	link  int
	n     int
	head  [16]byte
	data  []byte
}

func newRecords(r io.Reader, head []byte) (*records, error) {
	c := &records{r: r}
	for _, order := range []binary.ByteOrder{binary.LittleEndian, binary.BigEndian} {
		switch order.Uint32(head) {
		case 0xa1b2c3d4, 0xa1b23c4d: // by microseconds, nanoseconds
			c.order = order
		}
	}
	switch {
	case c.order == nil:
		return nil, fmt.Errorf("it begins with % x", head[:4])
	case len(head) < 24:
		return nil, io.ErrUnexpectedEOF
	case c.order.Uint16(head[4:]) != 2:
		return nil, fmt.Errorf("version %d of pcap, want 2", c.order.Uint16(head[4:]))
	}
	c.link = int(c.order.Uint32(head[20:]) & 0xffff) // above are bits on the frames' checksums
	_, err := io.ReadFull(r, head[:24])
	return c, err
}

func (c *records) frame(f *Frame) (link int, err error) {
	if _, err := io.ReadFull(c.r, c.head[:]); err == io.EOF {
		return 0, err
	} else if err != nil {
		return 0, fmt.Errorf("header of frame %d: %w", c.n+1, err)
	}
	c.n++
	captured, wire := c.order.Uint32(c.head[8:]), c.order.Uint32(c.head[12:])
	if captured > MaxFrame {
		return 0, fmt.Errorf("frame %d has %d bytes, want at most %d", c.n, captured, MaxFrame)
	}
	if uint32(cap(c.data)) < captured {
		c.data = make([]byte, captured)
	}
	c.data = c.data[:captured]
	if _, err := io.ReadFull(c.r, c.data); err != nil {
		return 0, fmt.Errorf("frame %d of %d bytes: %w", c.n, captured, noEOF(err))
	}
	f.Data, f.Length = c.data, int(min(wire, 1<<31-1))
	return c.link, nil
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
	n      int // blocks
}

// ofBlock are bodies of the blocks that are read: how many bytes they have at least. Others are skipped.
var ofBlock = map[uint32]int{blockSection: 16, blockInterface: 8, blockObsolete: 20, blockSimple: 4, blockStats: 12, blockEnhanced: 20}

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
	n.n++
	least, read := ofBlock[kind]
	if total < 12 || total%4 != 0 || read && total > MaxBlock {
		return 0, nil, fmt.Errorf("block %d, of type %d: length %d, want a multiple of 4 from 12 to %d", n.n, kind, total, MaxBlock)
	}
	if !read {
		if _, err := io.CopyN(io.Discard, n.r, int64(total)); err != nil {
			return 0, nil, fmt.Errorf("block %d, of type %d: %w", n.n, kind, noEOF(err))
		}
		return kind, nil, nil
	}
	if uint32(cap(n.block)) < total {
		n.block = make([]byte, total)
	}
	n.block = n.block[:total]
	if _, err := io.ReadFull(n.r, n.block); err != nil {
		return 0, nil, fmt.Errorf("block %d, of type %d: %w", n.n, kind, noEOF(err))
	}
	body = n.block[8 : total-4]
	if len(body) < least {
		return 0, nil, fmt.Errorf("block %d, of type %d: %d bytes, want at least %d", n.n, kind, len(body), least)
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
			return 0, fmt.Errorf("block %d: frame of interface %d, the section has %d", n.n, id, len(n.ifaces))
		}
		if uint64(captured) > uint64(len(b)-fixed) || captured > MaxFrame {
			return 0, fmt.Errorf("block %d: frame of %d bytes in a block of %d: want at most %d", n.n, captured, len(b)-fixed, MaxFrame)
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
