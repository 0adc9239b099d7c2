// SPDX-License-Identifier: Apache-2.0

package packet

import "encoding/binary"

var be = binary.BigEndian

// EtherTypes (IEEE 802 numbers).
const (
	EtherTypeIPv4 uint16 = 0x0800
	EtherTypeARP  uint16 = 0x0806
	EtherTypeVLAN uint16 = 0x8100 // 802.1Q tag
	EtherTypeIPv6 uint16 = 0x86dd
)

// Protocols above IPv4 (IANA protocol numbers).
const (
	ProtocolICMP uint8 = 1
	ProtocolTCP  uint8 = 6
	ProtocolUDP  uint8 = 17
)

// ICMP types (RFC 792).
const (
	ICMPEchoReply   uint8 = 0
	ICMPEchoRequest uint8 = 8
)

// Length of the fixed part of each header, in bytes.
const (
	EthernetLen = 14
	IPv4Len     = 20
	UDPLen      = 8
	ICMPLen     = 8
	TCPLen      = 20
)

// Ethernet is a view of a frame from its destination address on. Accessors
// panic if it is shorter than [EthernetLen]; those from [Parse] never are.
type Ethernet []byte

// Dst is the destination address.
func (e Ethernet) Dst() [6]byte { return [6]byte(e[0:6]) }

// SetDst writes the destination address.
func (e Ethernet) SetDst(a [6]byte) { *(*[6]byte)(e[0:6]) = a }

// Src is the source address.
func (e Ethernet) Src() [6]byte { return [6]byte(e[6:12]) }

// SetSrc writes the source address.
func (e Ethernet) SetSrc(a [6]byte) { *(*[6]byte)(e[6:12]) = a }

// EtherType is the type field as it stands: [EtherTypeVLAN] for a tagged
// frame, a length below 0x600 for an 802.3 frame.
func (e Ethernet) EtherType() uint16 { return be.Uint16(e[12:14]) }

// SetEtherType writes the type field.
func (e Ethernet) SetEtherType(t uint16) { be.PutUint16(e[12:14], t) }

// Swap exchanges source and destination address.
func (e Ethernet) Swap() {
	dst, src := e.Dst(), e.Src()
	e.SetDst(src)
	e.SetSrc(dst)
}

// Payload is what follows the header, with any padding.
func (e Ethernet) Payload() []byte { return e[EthernetLen:] }

// IPv4 is a view of an IPv4 packet: header, options and the part of the
// payload that lies in the frame's first buffer, without Ethernet padding.
// Accessors panic if it is shorter than [IPv4Len]; those from [Parse] never
// are. Setters leave the header checksum alone: finish with
// SetChecksum(HeaderChecksum()), or use [UpdateChecksum16].
type IPv4 []byte

// Version is the version field, 4 in every view from [Parse].
func (p IPv4) Version() uint8 { return p[0] >> 4 }

// HeaderLen is the length of the header with its options, in bytes, as the
// IHL field has it.
func (p IPv4) HeaderLen() int { return int(p[0]&0x0f) * 4 }

// TotalLen is the length of the packet with its header, in bytes.
func (p IPv4) TotalLen() int { return int(be.Uint16(p[2:4])) }

// SetTotalLen writes the length of the packet with its header, in bytes.
func (p IPv4) SetTotalLen(n uint16) { be.PutUint16(p[2:4], n) }

// ID is the identification that the fragments of a datagram share.
func (p IPv4) ID() uint16 { return be.Uint16(p[4:6]) }

// SetID writes the identification.
func (p IPv4) SetID(id uint16) { be.PutUint16(p[4:6], id) }

// DontFragment is the DF flag.
func (p IPv4) DontFragment() bool { return p[6]&0x40 != 0 }

// MoreFragments is the MF flag.
func (p IPv4) MoreFragments() bool { return p[6]&0x20 != 0 }

// FragmentOffset is where the payload belongs in its datagram, in bytes.
func (p IPv4) FragmentOffset() int { return int(be.Uint16(p[6:8])&0x1fff) * 8 }

// IsFragment says whether this is a fragment, the first one included.
func (p IPv4) IsFragment() bool { return be.Uint16(p[6:8])&0x3fff != 0 }

// TTL is the number of hops left.
func (p IPv4) TTL() uint8 { return p[8] }

// SetTTL writes the number of hops left.
func (p IPv4) SetTTL(ttl uint8) { p[8] = ttl }

// Hop takes one from the number of hops left, and keeps the checksum as right or wrong
// as it is. It reports false, and changes nothing, if none would be left.
func (p IPv4) Hop() bool {
	if p[8] <= 1 {
		return false
	}
	p.live(p[8] - 1)
	return true
}

// live sets the number of hops left, and keeps the checksum as right or wrong as it is.
func (p IPv4) live(ttl uint8) {
	before := be.Uint16(p[8:10])
	p[8] = ttl
	p.SetChecksum(UpdateChecksum16(p.Checksum(), before, be.Uint16(p[8:10])))
}

// Protocol is the protocol of the payload, such as [ProtocolUDP].
func (p IPv4) Protocol() uint8 { return p[9] }

// SetProtocol writes the protocol of the payload.
func (p IPv4) SetProtocol(proto uint8) { p[9] = proto }

// Checksum is the header checksum as it stands in the packet.
func (p IPv4) Checksum() uint16 { return be.Uint16(p[10:12]) }

// SetChecksum writes the header checksum.
func (p IPv4) SetChecksum(c uint16) { be.PutUint16(p[10:12], c) }

// Src is the source address; netip.AddrFrom4 makes a netip.Addr of it.
func (p IPv4) Src() [4]byte { return [4]byte(p[12:16]) }

// SetSrc writes the source address.
func (p IPv4) SetSrc(a [4]byte) { *(*[4]byte)(p[12:16]) = a }

// Dst is the destination address; netip.AddrFrom4 makes a netip.Addr of it.
func (p IPv4) Dst() [4]byte { return [4]byte(p[16:20]) }

// SetDst writes the destination address.
func (p IPv4) SetDst(a [4]byte) { *(*[4]byte)(p[16:20]) = a }

// SwapAddrs exchanges source and destination address. No checksum changes by
// it: neither the header's nor UDP's or TCP's.
func (p IPv4) SwapAddrs() {
	src, dst := p.Src(), p.Dst()
	p.SetSrc(dst)
	p.SetDst(src)
}

// Options is what stands between the fixed header and the payload, empty in
// most packets.
func (p IPv4) Options() []byte { return between(p, IPv4Len, p.HeaderLen()) }

// Payload is the part of the payload that lies in the view, bounded by
// TotalLen.
func (p IPv4) Payload() []byte { return between(p, p.HeaderLen(), p.TotalLen()) }

// header is the header with its options, or what the view holds of it.
func (p IPv4) header() []byte { return between(p, 0, max(p.HeaderLen(), IPv4Len)) }

// HeaderChecksum computes the header checksum, options included, whatever
// the checksum field holds.
func (p IPv4) HeaderChecksum() uint16 {
	h := p.header()
	var c Checksum
	c.Add(h[:10])
	c.Add(h[12:])
	return c.Value()
}

// ChecksumValid says whether the header checksum is right.
func (p IPv4) ChecksumValid() bool { return ChecksumOf(p.header()) == 0 }

// UDP is a view of a UDP datagram: the header and the part of the payload
// that lies in the frame's first buffer. Accessors panic if it is shorter than
// [UDPLen]; those from [Parse] never are. Setters leave the checksum alone.
type UDP []byte

// SrcPort is the source port.
func (u UDP) SrcPort() uint16 { return be.Uint16(u[0:2]) }

// SetSrcPort writes the source port.
func (u UDP) SetSrcPort(port uint16) { be.PutUint16(u[0:2], port) }

// DstPort is the destination port.
func (u UDP) DstPort() uint16 { return be.Uint16(u[2:4]) }

// SetDstPort writes the destination port.
func (u UDP) SetDstPort(port uint16) { be.PutUint16(u[2:4], port) }

// Length is the length of the datagram with its header, in bytes.
func (u UDP) Length() int { return int(be.Uint16(u[4:6])) }

// SetLength writes the length of the datagram with its header, in bytes.
func (u UDP) SetLength(n uint16) { be.PutUint16(u[4:6], n) }

// Checksum is the checksum as it stands in the datagram: complete, 0 for
// none, or partial (see the package comment).
func (u UDP) Checksum() uint16 { return be.Uint16(u[6:8]) }

// SetChecksum writes the checksum; 0 means none.
func (u UDP) SetChecksum(c uint16) { be.PutUint16(u[6:8], c) }

// SwapPorts exchanges source and destination port. A complete checksum stays
// right.
func (u UDP) SwapPorts() {
	src, dst := u.SrcPort(), u.DstPort()
	u.SetSrcPort(dst)
	u.SetDstPort(src)
}

// Payload is the part of the payload that lies in the view, bounded by
// Length.
func (u UDP) Payload() []byte { return between(u, UDPLen, u.Length()) }

// ICMP is a view of an ICMP message: the header and the part of the payload
// that lies in the frame's first buffer. Accessors panic if it is shorter than
// [ICMPLen]; those from [Parse] never are. Setters leave the checksum alone.
type ICMP []byte

// Type is the message type, such as [ICMPEchoRequest].
func (i ICMP) Type() uint8 { return i[0] }

// SetType writes the message type.
func (i ICMP) SetType(t uint8) { i[0] = t }

// Code is the code within the type.
func (i ICMP) Code() uint8 { return i[1] }

// SetCode writes the code within the type.
func (i ICMP) SetCode(c uint8) { i[1] = c }

// Checksum is the checksum as it stands in the message.
func (i ICMP) Checksum() uint16 { return be.Uint16(i[2:4]) }

// SetChecksum writes the checksum.
func (i ICMP) SetChecksum(c uint16) { be.PutUint16(i[2:4], c) }

// ID is the identifier of an echo request or reply.
func (i ICMP) ID() uint16 { return be.Uint16(i[4:6]) }

// SetID writes the identifier of an echo request or reply.
func (i ICMP) SetID(id uint16) { be.PutUint16(i[4:6], id) }

// Seq is the sequence number of an echo request or reply.
func (i ICMP) Seq() uint16 { return be.Uint16(i[6:8]) }

// SetSeq writes the sequence number of an echo request or reply.
func (i ICMP) SetSeq(seq uint16) { be.PutUint16(i[6:8], seq) }

// Payload is the part of the payload that lies in the view.
func (i ICMP) Payload() []byte { return i[ICMPLen:] }

// TCP is a view of a TCP segment: the header and the part of the payload that
// lies in the frame's first buffer. It serves to tell connections apart, not to
// rewrite them. Accessors panic if it is shorter than [TCPLen]; those from
// [Parse] never are.
type TCP []byte

// SrcPort is the source port.
func (t TCP) SrcPort() uint16 { return be.Uint16(t[0:2]) }

// DstPort is the destination port.
func (t TCP) DstPort() uint16 { return be.Uint16(t[2:4]) }

// HeaderLen is the length of the header with its options, in bytes.
func (t TCP) HeaderLen() int { return int(t[12]>>4) * 4 }

// Payload is the part of the payload that lies in the view.
func (t TCP) Payload() []byte { return between(t, t.HeaderLen(), len(t)) }

// between is b[lo:hi] with both ends moved into b: header fields that a
// handler has just rewritten must not make an accessor panic.
func between(b []byte, lo, hi int) []byte {
	lo = min(lo, len(b))
	hi = min(max(hi, lo), len(b))
	return b[lo:hi:hi]
}
