// SPDX-License-Identifier: Apache-2.0

// Package slmp is the sPIN lightweight messaging protocol of FPsPIN (its report,
// sections 4.4.1 and 4.4.2): messages of up to 4 GiB over UDP, cut into segments
// that say where they belong. docs/slmp.md specifies the wire and both machines.
package slmp

import (
	"encoding/binary"
	"errors"
	"fmt"
)

const (
	// Port is the UDP port that receivers listen on.
	Port = 9330
	// HeaderLen is the length of the header of segments and acknowledgements, in bytes.
	HeaderLen = 10
	// MaxMessage is how long a message can be: its last byte has the last offset.
	MaxMessage = 1 << 32
)

// Flags are the first two bytes of the header.
type Flags uint16

// Flags of FPsPIN's, and ours on bits that it reserves.
const (
	EOM Flags = 0x8000 // segment: ends at the end of the message
	SYN Flags = 0x4000 // segment: asks to be acknowledged
	ACK Flags = 0x2000 // acknowledgement: echoes a segment's id and offset

	// Cumulative says on a SYN segment that its sender understands
	// aggregated acknowledgements, and marks an ACK as one.
	Cumulative Flags = 0x1000
	// Wait, on a cumulative ACK only: the segment that it echoes is not
	// acknowledged, not yet. The rest of the ACK holds. A receiver that is
	// alive and has nothing else to say says this.
	Wait Flags = 0x0800

	// Reserved bits are sent as 0 and ignored.
	Reserved Flags = 0x07ff
)

// Header is what every SLMP datagram begins with.
type Header struct {
	Flags  Flags
	ID     uint32 // of the message, chosen by its sender
	Offset uint32 // of the segment's first byte in the message
}

// ErrShort is returned, wrapped, for datagrams that cannot hold what they should.
var ErrShort = errors.New("datagram too short")

// ParseHeader reads the header of a datagram.
func ParseHeader(b []byte) (Header, error) {
	if len(b) < HeaderLen {
		return Header{}, fmt.Errorf("SLMP header: %w: %d bytes, want %d", ErrShort, len(b), HeaderLen)
	}
	return Header{
		Flags:  Flags(binary.BigEndian.Uint16(b)),
		ID:     binary.BigEndian.Uint32(b[2:]),
		Offset: binary.BigEndian.Uint32(b[6:]),
	}, nil
}

// Put writes the header to the first HeaderLen bytes of b.
func (h Header) Put(b []byte) {
	binary.BigEndian.PutUint16(b, uint16(h.Flags))
	binary.BigEndian.PutUint32(b[2:], h.ID)
	binary.BigEndian.PutUint32(b[6:], h.Offset)
}
