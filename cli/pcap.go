// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/google/gopacket/layers"
	"github.com/google/gopacket/pcapgo"
)

// errCapture is wrapped by every error about a file that is no capture, is
// damaged, or holds other frames than Ethernet.
var errCapture = errors.New("capture file")

// No frame is longer than maxFrame, which is tcpdump's limit, and no pcapng
// block than maxBlock. A file that claims more is damaged, or wants our memory.
const (
	maxFrame = 256 << 10
	maxBlock = 1 << 20
)

// capture reads the frames of a pcap or pcapng file one after the other. It is
// not safe for concurrent use.
type capture struct {
	// next returns the next frame, its length on the wire and its link type.
	next func() ([]byte, int, int, error)
}

// newCapture reads what comes before the first frame.
func newCapture(r io.Reader) (*capture, error) {
	buf := bufio.NewReaderSize(r, 1<<16)
	magic, err := buf.Peek(12)
	if len(magic) < 4 {
		return nil, fmt.Errorf("%w: neither pcap nor pcapng: too short", errCapture)
	}
	if binary.BigEndian.Uint32(magic) == ngSection {
		if len(magic) < 12 {
			return nil, fmt.Errorf("%w: neither pcap nor pcapng: %w", errCapture, err)
		}
		if _, err := ngOrder(magic); err != nil {
			return nil, fmt.Errorf("%w: neither pcap nor pcapng: %w", errCapture, err)
		}
		return &capture{next: (&ngReader{r: buf}).next}, nil
	}
	old, err := pcapgo.NewReader(buf)
	if err != nil {
		return nil, fmt.Errorf("%w: neither pcap nor pcapng: %w", errCapture, err)
	}
	// The file's own limit is often wrong, and may be 4 GiB.
	old.SetSnaplen(maxFrame)
	return &capture{next: func() ([]byte, int, int, error) {
		frame, ci, err := old.ReadPacketData()
		return frame, ci.Length, int(old.LinkType()), err
	}}, nil
}

// Next returns the next frame, which is valid until the next call, and the
// length it had on the wire, which is greater where the capture cut it. The
// error is io.EOF at the end of an undamaged file.
func (c *capture) Next() (frame []byte, length int, err error) {
	frame, length, link, err := c.next()
	switch {
	case err == io.EOF:
		return nil, 0, io.EOF
	case err != nil:
		return nil, 0, fmt.Errorf("%w: damaged: %w", errCapture, err)
	case link != int(layers.LinkTypeEthernet):
		return nil, 0, fmt.Errorf("%w: link type %d: rules count from the Ethernet header, so only link type 1 is possible; capture on an Ethernet interface, not on any", errCapture, link)
	}
	return frame, max(length, len(frame)), nil
}

// Types of pcapng blocks: draft-ietf-opsawg-pcapng, section 11.
const (
	ngSection   = 0x0a0d0d0a
	ngInterface = 1
	ngObsolete  = 2
	ngSimple    = 3
	ngEnhanced  = 6
)

// An ngReader reads pcapng. pcapgo's own reader believes every length, and
// panics for some time resolutions, which do not matter here. It is not safe
// for concurrent use.
type ngReader struct {
	r      *bufio.Reader
	order  binary.ByteOrder
	ifaces []ngIface // of the section
	block  []byte
}

type ngIface struct {
	link uint16
	snap uint32 // 0 for no limit
}

// ngOrder tells a section's byte order from the first 12 bytes of its header.
func ngOrder(head []byte) (binary.ByteOrder, error) {
	switch binary.BigEndian.Uint32(head[8:]) {
	case 0x1a2b3c4d:
		return binary.BigEndian, nil
	case 0x4d3c2b1a:
		return binary.LittleEndian, nil
	}
	return nil, fmt.Errorf("byte-order magic %#x of a section", head[8:12])
}

// readBlock returns the next block's type and body, valid until the next call.
func (n *ngReader) readBlock() (kind uint32, body []byte, err error) {
	head, err := n.r.Peek(12)
	if len(head) == 0 && err == io.EOF {
		return 0, nil, io.EOF
	}
	if len(head) < 12 {
		return 0, nil, fmt.Errorf("block header: %w", noEOF(err))
	}
	if binary.BigEndian.Uint32(head) == ngSection { // the same in both orders
		if n.order, err = ngOrder(head); err != nil {
			return 0, nil, err
		}
	}
	kind, total := n.order.Uint32(head), n.order.Uint32(head[4:])
	if total < 12 || total > maxBlock || total%4 != 0 {
		return 0, nil, fmt.Errorf("block of type %d: length %d, want a multiple of 4 from 12 to %d", kind, total, maxBlock)
	}
	if uint32(cap(n.block)) < total {
		n.block = make([]byte, total)
	}
	n.block = n.block[:total]
	if _, err := io.ReadFull(n.r, n.block); err != nil {
		return 0, nil, fmt.Errorf("block of type %d: %w", kind, noEOF(err))
	}
	return kind, n.block[8 : total-4], nil
}

// noEOF makes the end inside of something an error.
func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// next reads up to the next frame, as capture.next.
func (n *ngReader) next() (frame []byte, length, link int, err error) {
	for {
		kind, b, err := n.readBlock()
		if err != nil {
			return nil, 0, 0, err
		}
		var id, captured, wire uint32
		fixed := map[uint32]int{ngSection: 16, ngInterface: 8, ngObsolete: 20, ngSimple: 4, ngEnhanced: 20}[kind]
		if len(b) < fixed {
			return nil, 0, 0, fmt.Errorf("block of type %d: %d bytes, want at least %d", kind, len(b), fixed)
		}
		switch kind {
		case ngSection:
			if major := n.order.Uint16(b[4:]); major != 1 {
				return nil, 0, 0, fmt.Errorf("version %d of pcapng, want 1", major)
			}
			n.ifaces = n.ifaces[:0]
			continue
		case ngInterface:
			n.ifaces = append(n.ifaces, ngIface{n.order.Uint16(b), n.order.Uint32(b[4:])})
			continue
		case ngEnhanced:
			id, captured, wire = n.order.Uint32(b), n.order.Uint32(b[12:]), n.order.Uint32(b[16:])
		case ngObsolete:
			id, captured, wire = uint32(n.order.Uint16(b)), n.order.Uint32(b[12:]), n.order.Uint32(b[16:])
		case ngSimple:
			wire = n.order.Uint32(b)
			captured = wire
			if len(n.ifaces) > 0 && n.ifaces[0].snap > 0 {
				captured = min(wire, n.ifaces[0].snap)
			}
		default:
			continue
		}
		if uint64(id) >= uint64(len(n.ifaces)) {
			return nil, 0, 0, fmt.Errorf("frame of interface %d, the section has %d", id, len(n.ifaces))
		}
		if uint64(captured) > uint64(len(b)-fixed) || captured > maxFrame {
			return nil, 0, 0, fmt.Errorf("frame of %d bytes in a block of %d, with at most %d possible", captured, len(b)-fixed, maxFrame)
		}
		return b[fixed : fixed+int(captured)], int(wire), int(n.ifaces[id].link), nil
	}
}
