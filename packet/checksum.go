// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"math/bits"
)

var le = binary.LittleEndian

// Checksum accumulates an Internet checksum (RFC 1071) over any number of
// pieces of any length, an odd one in the middle included. The zero value is
// an empty sum. Not safe for concurrent use; copying it forks the sum.
//
// The sum is taken over little-endian words, eight bytes at a time, and turned
// around at the end: a ones' complement sum does not mind the byte order of
// its words (RFC 1071, 2(B)).
type Checksum struct {
	sum uint64
	odd bool // an odd number of bytes so far
}

// Add appends bytes to what is summed.
func (c *Checksum) Add(b []byte) {
	if !c.odd {
		c.sum = sum(c.sum, b)
	} else {
		// Each byte of b counts in the other half of its word. Rotating
		// the sum multiplies it by 256 modulo 2^64-1, hence modulo 2^16-1.
		c.sum = add(c.sum, bits.RotateLeft64(sum(0, b), 8))
	}
	c.odd = c.odd != (len(b)&1 == 1)
}

// AddPseudo adds the pseudo-header of UDP and TCP over IPv4 (RFC 768): the
// addresses, the protocol and the length of the datagram with its header, in
// bytes. It may come at any point, also after an odd number of bytes.
func (c *Checksum) AddPseudo(src, dst [4]byte, proto uint8, length int) {
	a := uint64(le.Uint32(src[:])) + uint64(le.Uint32(dst[:]))
	a += uint64(proto)<<8 + uint64(bits.ReverseBytes16(uint16(length)))
	c.sum = add(c.sum, a)
}

// Folded is the 16-bit ones' complement sum. It is 0 only if every byte was.
func (c Checksum) Folded() uint16 {
	s := c.sum>>32 + c.sum&0xffffffff
	s = s>>32 + s&0xffffffff
	s = s>>16 + s&0xffff
	s = s>>16 + s&0xffff
	return bits.ReverseBytes16(uint16(s))
}

// Value is the checksum, the complement of the sum. Over data that holds a
// right checksum it is 0.
func (c Checksum) Value() uint16 { return ^c.Folded() }

// ChecksumOf is the checksum over the pieces, one after the other.
func ChecksumOf(pieces ...[]byte) uint16 {
	var c Checksum
	for _, b := range pieces {
		c.Add(b)
	}
	return c.Value()
}

// UpdateChecksum16 is the checksum c after a 16-bit word of the data, at an
// even offset, has changed from before to after (RFC 1624, equation 3). It
// equals a full computation, except that data which has become zero throughout
// yields 0 instead of 0xffff; no header with a protocol or a version in it
// does. For UDP, send 0xffff if the result is 0, and leave a checksum of 0 and
// a partial one alone (see the package comment).
func UpdateChecksum16(c, before, after uint16) uint16 {
	s := uint32(^c) + uint32(^before) + uint32(after)
	s = s>>16 + s&0xffff
	s = s>>16 + s&0xffff
	return ^uint16(s)
}

// UpdateChecksum32 is [UpdateChecksum16] for 32 bits at an even offset, such as
// an IPv4 address read as a big-endian number.
func UpdateChecksum32(c uint16, before, after uint32) uint16 {
	c = UpdateChecksum16(c, uint16(before>>16), uint16(after>>16))
	return UpdateChecksum16(c, uint16(before), uint16(after))
}

// add is ones' complement addition.
func add(a, b uint64) uint64 {
	s, carry := bits.Add64(a, b, 0)
	return s + carry // cannot overflow: with a carry, s is at most 2^64-2
}

// sum adds b, as little-endian words and padded with zeros, to s.
func sum(s uint64, b []byte) uint64 {
	var c uint64
	for len(b) >= 64 { // one chain of add-with-carry instructions
		s, c = bits.Add64(s, le.Uint64(b[0:8]), 0)
		s, c = bits.Add64(s, le.Uint64(b[8:16]), c)
		s, c = bits.Add64(s, le.Uint64(b[16:24]), c)
		s, c = bits.Add64(s, le.Uint64(b[24:32]), c)
		s, c = bits.Add64(s, le.Uint64(b[32:40]), c)
		s, c = bits.Add64(s, le.Uint64(b[40:48]), c)
		s, c = bits.Add64(s, le.Uint64(b[48:56]), c)
		s, c = bits.Add64(s, le.Uint64(b[56:64]), c)
		s += c // no overflow: with a carry out, only one in could make s all ones
		b = b[64:]
	}
	for len(b) >= 8 {
		s = add(s, le.Uint64(b[0:8]))
		b = b[8:]
	}
	if len(b) == 0 {
		return s
	}
	var last uint64
	shift := 0
	if len(b) >= 4 {
		last = uint64(le.Uint32(b[0:4]))
		shift = 32
		b = b[4:]
	}
	for _, v := range b {
		last |= uint64(v) << shift
		shift += 8
	}
	return add(s, last)
}
