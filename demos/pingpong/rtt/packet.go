// SPDX-License-Identifier: Apache-2.0

package rtt

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
)

const (
	icmpHeader    = 8
	icmpEchoReply = 0
	icmpEcho      = 8
)

// verdict is what became of a ping, or how a received packet relates to it.
type verdict uint8

const (
	answered verdict = iota
	lost
	bad
	late    // a reply of this run to an earlier ping
	foreign // an ICMP message to another client
	stopped
)

// shifts is how many different payloads one pattern gives.
const shifts = 251

// fill makes the pattern of a run. It is noise, so that bytes that are swapped, shifted
// or left over from another packet do not look right by chance.
func fill(pattern []byte, id uint32) {
	src := rand.NewPCG(uint64(id), 0)
	for i := range pattern {
		pattern[i] = byte(src.Uint64() >> 32)
	}
}

// contents returns what follows the two numbers in the payload of ping seq.
func (c *Client) contents(seq uint32) []byte {
	return c.pattern[seq%shifts:][:c.o.Size-MinSize]
}

// compose makes the packet for ping seq in c.tx.
func (c *Client) compose(seq uint32) {
	p := c.tx[c.head:]
	binary.BigEndian.PutUint32(p, seq)
	binary.BigEndian.PutUint32(p[4:], c.id)
	copy(p[MinSize:], c.contents(seq))
	if c.o.Proto == ICMP {
		h := c.tx
		h[0], h[1], h[2], h[3] = icmpEcho, 0, 0, 0
		binary.BigEndian.PutUint16(h[4:], uint16(c.id))
		binary.BigEndian.PutUint16(h[6:], uint16(seq))
		binary.BigEndian.PutUint16(h[2:], ^sum(h))
	}
}

// judge says how a received packet relates to ping seq. A raw socket delivers the
// IPv4 header too, and before the kernel has checked the ICMP checksum.
func (c *Client) judge(b []byte, seq uint32) verdict {
	if c.o.Proto == ICMP {
		if len(b) < 20 || len(b) < int(b[0]&0xf)*4+icmpHeader {
			return foreign
		}
		b = b[int(b[0]&0xf)*4:]
		if b[0] != icmpEchoReply || binary.BigEndian.Uint16(b[4:]) != uint16(c.id) {
			return foreign
		}
		if sum(b) != 0xffff || b[1] != 0 {
			return bad
		}
		if len(b) >= icmpHeader+4 && binary.BigEndian.Uint16(b[6:]) != binary.BigEndian.Uint16(b[icmpHeader+2:]) {
			return bad
		}
		b = b[icmpHeader:]
	}
	if len(b) != c.o.Size || binary.BigEndian.Uint32(b[4:]) != c.id {
		return bad
	}
	got := binary.BigEndian.Uint32(b)
	switch {
	case got > seq || !bytes.Equal(b[MinSize:], c.contents(got)):
		return bad
	case got < seq:
		return late
	}
	return answered
}

// sum is the ones' complement sum of RFC 1071 over b read as big-endian 16-bit
// words, a last odd byte padded with zero. It adds eight bytes at a time, which
// the RFC allows: carries come back in at the end.
func sum(b []byte) uint16 {
	var s, carry uint64
	for ; len(b) >= 8; b = b[8:] {
		s, carry = bits.Add64(s, binary.BigEndian.Uint64(b), carry)
	}
	var tail [8]byte
	copy(tail[:], b)
	s, carry = bits.Add64(s, binary.BigEndian.Uint64(tail[:]), carry)
	s, carry = bits.Add64(s, 0, carry)
	s += carry
	s = s>>32 + s&0xffffffff
	s = s>>32 + s&0xffffffff
	s = s>>16 + s&0xffff
	s = s>>16 + s&0xffff
	return uint16(s)
}
