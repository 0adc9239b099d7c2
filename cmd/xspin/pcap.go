// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// errCapture is wrapped by every error about a file that is no capture, is
// damaged, or holds other frames than Ethernet.
var errCapture = errors.New("capture file")

const (
	linkEthernet = 1 // LINKTYPE_ETHERNET

	sectionHeader = 0x0a0d0d0a // pcapng block type, the same in both byte orders

	// No snap length in use is longer; it keeps a damaged length field from
	// asking for gigabytes.
	maxBlock = 16 << 20
)

// capture reads the frames of a pcap or pcapng file (IETF drafts opsawg-pcap
// and opsawg-pcapng) one after the other. It is not safe for concurrent use.
type capture struct {
	r     *bufio.Reader
	order binary.ByteOrder
	ng    bool
	ifs   []captureIf // pcapng: of the current section. pcap: one
	block []byte      // reused
}

type captureIf struct {
	link uint16
	snap uint32
}

// newCapture reads what comes before the first frame.
func newCapture(r io.Reader) (*capture, error) {
	c := &capture{r: bufio.NewReaderSize(r, 1<<16)}
	magic, err := c.r.Peek(4)
	if err != nil {
		return nil, fmt.Errorf("%w: neither pcap nor pcapng: too short", errCapture)
	}
	switch m := binary.LittleEndian.Uint32(magic); m {
	case sectionHeader:
		c.ng = true
		return c, nil
	case 0xa1b2c3d4, 0xa1b23c4d: // micro- and nanoseconds
		c.order = binary.LittleEndian
	case 0xd4c3b2a1, 0x4d3cb2a1:
		c.order = binary.BigEndian
	default:
		return nil, fmt.Errorf("%w: neither pcap nor pcapng: begins with % x", errCapture, magic)
	}
	h, err := c.read(24)
	if err != nil {
		return nil, err
	}
	// The upper half of the link type word is about the frame check sequence.
	c.ifs = []captureIf{{link: uint16(c.order.Uint32(h[20:]))}}
	return c, nil
}

// Next returns the next frame, and the length it had on the wire, which is
// greater where the capture cut it. The frame is valid until the following
// call. The error is io.EOF at the end of an undamaged file.
func (c *capture) Next() (frame []byte, length int, err error) {
	if _, err := c.r.Peek(1); err == io.EOF {
		return nil, 0, io.EOF
	}
	if c.ng {
		return c.nextNG()
	}
	h, err := c.read(16)
	if err != nil {
		return nil, 0, err
	}
	captured, length32 := c.order.Uint32(h[8:]), c.order.Uint32(h[12:])
	frame, err = c.read(captured)
	if err != nil {
		return nil, 0, err
	}
	return c.frame(0, frame, captured, length32)
}

// nextNG reads blocks up to the next one that holds a frame.
func (c *capture) nextNG() ([]byte, int, error) {
	for {
		if _, err := c.r.Peek(1); err == io.EOF {
			return nil, 0, io.EOF
		}
		kind, body, err := c.readBlock()
		if err != nil {
			return nil, 0, err
		}
		u16, u32 := c.order.Uint16, c.order.Uint32
		short := func(n int) bool { return len(body) < n }
		switch kind {
		case 1: // interface description
			if short(8) {
				return nil, 0, damaged("interface description of %d bytes", len(body))
			}
			c.ifs = append(c.ifs, captureIf{link: u16(body), snap: u32(body[4:])})
		case 2: // packet, obsolete
			if short(20) {
				return nil, 0, damaged("packet block of %d bytes", len(body))
			}
			return c.frame(uint32(u16(body)), body[20:], u32(body[12:]), u32(body[16:]))
		case 3: // simple packet: as much of it as the snap length of the first interface allows
			if short(4) {
				return nil, 0, damaged("simple packet block of %d bytes", len(body))
			}
			length := u32(body)
			captured := min(length, uint32(len(body)-4))
			if len(c.ifs) > 0 && c.ifs[0].snap > 0 {
				captured = min(captured, c.ifs[0].snap)
			}
			return c.frame(0, body[4:], captured, length)
		case 6: // enhanced packet
			if short(20) {
				return nil, 0, damaged("enhanced packet block of %d bytes", len(body))
			}
			return c.frame(u32(body), body[20:], u32(body[12:]), u32(body[16:]))
		}
	}
}

// readBlock reads a pcapng block. A section header changes the byte order, and
// forgets the interfaces of the section before.
func (c *capture) readBlock() (kind uint32, body []byte, err error) {
	head, err := c.r.Peek(12)
	if err != nil {
		return 0, nil, damaged("the file ends within a block")
	}
	if binary.LittleEndian.Uint32(head) == sectionHeader {
		switch binary.LittleEndian.Uint32(head[8:]) {
		case 0x1a2b3c4d:
			c.order = binary.LittleEndian
		case 0x4d3c2b1a:
			c.order = binary.BigEndian
		default:
			return 0, nil, damaged("section header with byte order % x", head[8:12])
		}
		c.ifs = nil
	}
	kind = c.order.Uint32(head)
	total := c.order.Uint32(head[4:])
	if kind == sectionHeader && total < 28 {
		return 0, nil, damaged("section header of %d bytes", total)
	}
	if total < 12 || total%4 != 0 {
		return 0, nil, damaged("block of %d bytes", total)
	}
	b, err := c.read(total)
	if err != nil {
		return 0, nil, err
	}
	if again := c.order.Uint32(b[total-4:]); again != total {
		return 0, nil, damaged("block of %d bytes says %d at its end", total, again)
	}
	if kind == sectionHeader && c.order.Uint16(b[12:]) != 1 {
		return 0, nil, fmt.Errorf("%w: pcapng version %d.%d, only 1 is known", errCapture, c.order.Uint16(b[12:]), c.order.Uint16(b[14:]))
	}
	return kind, b[8 : total-4], nil
}

// frame checks what a packet's header claims.
func (c *capture) frame(iface uint32, data []byte, captured, length uint32) ([]byte, int, error) {
	if uint64(captured) > uint64(len(data)) {
		return nil, 0, damaged("frame of %d captured bytes where %d are left", captured, len(data))
	}
	if uint64(iface) >= uint64(len(c.ifs)) {
		return nil, 0, damaged("frame of interface %d, of which there are %d", iface, len(c.ifs))
	}
	if link := c.ifs[iface].link; link != linkEthernet {
		what := map[uint16]string{0: "loopback", 101: "raw IP", 105: "802.11", 108: "loopback", 113: "Linux cooked", 127: "radiotap", 228: "raw IPv4", 276: "Linux cooked v2"}[link]
		if what != "" {
			what = " (" + what + ")"
		}
		return nil, 0, fmt.Errorf("%w: link type %d%s: rules count from the Ethernet header, so only link type %d is possible; capture on an Ethernet interface, not on any",
			errCapture, link, what, linkEthernet)
	}
	return data[:captured], int(max(length, captured)), nil
}

// read returns the next n bytes, valid until the next call.
func (c *capture) read(n uint32) ([]byte, error) {
	if n > maxBlock {
		return nil, damaged("block of %d bytes, at most %d are possible", n, maxBlock)
	}
	if uint32(cap(c.block)) < n {
		c.block = make([]byte, n)
	}
	b := c.block[:n]
	if got, err := io.ReadFull(c.r, b); err == io.EOF || err == io.ErrUnexpectedEOF {
		return nil, damaged("the file ends %s too early", count(int(n)-got, "byte"))
	} else if err != nil {
		return nil, fmt.Errorf("%w: %w", errCapture, err)
	}
	return b, nil
}

func damaged(format string, args ...any) error {
	return fmt.Errorf("%w: damaged: %s", errCapture, fmt.Sprintf(format, args...))
}
