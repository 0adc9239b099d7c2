// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"encoding/binary"
	"fmt"

	"github.com/xspin/xspin/packet"
)

// Checksums tells what a context does about the UDP checksums of its packets.
type Checksums int

const (
	// VerifyComplete verifies checksums that are there and complete. Packets
	// without one, and those of local senders that left it to a device
	// (only the pseudo-header's sum is in the field), are taken as they are.
	VerifyComplete Checksums = iota
	// VerifyAll takes nothing but complete and right checksums.
	VerifyAll
	// VerifyNone does not look.
	VerifyNone
)

var checksums = []string{"complete", "all", "none"}

// Valid tells whether it is one of the above.
func (c Checksums) Valid() bool { return c >= 0 && int(c) < len(checksums) }

func (c Checksums) String() string {
	if !c.Valid() {
		return fmt.Sprintf("Checksums(%d)", int(c))
	}
	return checksums[c]
}

// MarshalText implements encoding.TextMarshaler.
func (c Checksums) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (c *Checksums) UnmarshalText(b []byte) error {
	for i, name := range checksums {
		if string(b) == name {
			*c = Checksums(i)
			return nil
		}
	}
	return fmt.Errorf("checksums %q: want %v", b, checksums)
}

// A state of a UDP checksum.
type sumState uint8

const (
	sumNone    sumState = iota // there is none, or this is not UDP
	sumPartial                 // of the pseudo-header alone
	sumRight
	sumWrong
)

func checksum(b []byte) uint16 { return packet.ChecksumOf(b) }

// pseudo adds the pseudo-header of UDP, whose addresses lie at the end of the
// headers of a frame.
func pseudo(c *packet.Checksum, headers []byte, length int) {
	addrs := 8
	if len(headers) != 34 {
		addrs = 32
	}
	c.Add(headers[len(headers)-addrs:])
	tail := [4]byte{0, protocolUDP, byte(length >> 8), byte(length)}
	c.Add(tail[:])
}

// udpSum sums a datagram up.
func udpSum(headers, udp []byte) (c packet.Checksum) {
	pseudo(&c, headers, len(udp))
	c.Add(udp)
	return c
}

// verify looks at the UDP checksum of the HER's packet: IPv4 without options, or
// IPv6 without extension headers, which is what the rulesets for messages match.
// One complete checksum in 65536 is the same as the pseudo-header's sum; only with
// thorough it is told from that.
func (h *HER) verify(thorough bool) sumState {
	head := h.head
	at := 34
	switch {
	case len(head) >= 42 && head[12] == 0x08 && head[13] == 0 && head[14] == 0x45 && head[23] == protocolUDP:
	case len(head) >= 62 && head[12] == 0x86 && head[13] == 0xdd && head[20] == protocolUDP:
		at = 54
	default:
		return sumNone
	}
	udp := head[at:]
	have := binary.BigEndian.Uint16(udp[6:])
	if have == 0 {
		return sumNone
	}
	n := int(binary.BigEndian.Uint16(udp[4:]))
	if n < 8 || at+n > h.size {
		return sumWrong
	}
	var c packet.Checksum
	pseudo(&c, head[:at], n)
	partial := c.Folded() == have
	if partial && !thorough {
		return sumPartial
	}
	first := udp[:min(n, len(udp))]
	c.Add(first)
	for i, n := 1, n-len(first); n > 0 && i < len(h.segs); i++ {
		b := h.Segment(i)
		b = b[:min(n, len(b))]
		c.Add(b)
		n -= len(b)
	}
	switch {
	case c.Value() == 0:
		return sumRight
	case partial:
		return sumPartial
	}
	return sumWrong
}
