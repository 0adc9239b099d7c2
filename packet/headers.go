// SPDX-License-Identifier: Apache-2.0

package packet

// Headers are the headers found in a frame. A layer that is absent is nil. At
// most one of UDP, ICMP and TCP is there, and only above IPv4.
//
// The views lie in the frame's first buffer and show what the frame holds now.
// Payload and PayloadLen are from the time of [Parse]: a handler that changes
// a header's length parses again. Not safe for concurrent use.
type Headers struct {
	Ethernet Ethernet
	IPv4     IPv4
	UDP      UDP
	ICMP     ICMP
	TCP      TCP

	// Transport is the offset in the frame of what IPv4 carries, behind its
	// options, in bytes; 0 without IPv4.
	Transport int
	// Payload is the offset in the frame of the payload of the innermost
	// layer that is there, in bytes. It may lie behind the first buffer.
	Payload int
	// PayloadLen is the length of that payload over all buffers, without
	// Ethernet padding if there is IPv4, in bytes.
	PayloadLen int

	head int // length of the first buffer
}

// Parse finds the headers in a frame whose first buffer is head and whose
// length over all its buffers is frameLen, in bytes. Bytes of head behind
// frameLen are ignored. It accepts any input. A layer is absent, and so are
// those above it, if
//
//   - its header, options included, is not wholly in head;
//   - a length in it is impossible: IHL below 5, TotalLen below the header's
//     length or beyond the frame, UDP Length below 8 or beyond TotalLen, a TCP
//     data offset below 5 or beyond TotalLen;
//   - it is not IPv4 although the EtherType says so;
//   - the frame has a VLAN tag, whatever its kind: the EtherType is then that
//     of the tag, and only Ethernet is there;
//   - it belongs to a fragment, also the first one: then IPv4 is the last layer.
//
// Checksums are not verified.
func Parse(head []byte, frameLen int) (h Headers) {
	frameLen = max(frameLen, 0)
	head = between(head, 0, frameLen)
	h.PayloadLen, h.head = frameLen, len(head)

	if len(head) < EthernetLen {
		return h
	}
	h.Ethernet = Ethernet(head)
	h.setPayload(EthernetLen, frameLen)
	if h.Ethernet.EtherType() != EtherTypeIPv4 {
		return h
	}

	p := IPv4(head[EthernetLen:])
	if len(p) < IPv4Len || p.Version() != 4 {
		return h
	}
	hlen, total := p.HeaderLen(), p.TotalLen()
	if hlen < IPv4Len || hlen > len(p) || total < hlen || total > frameLen-EthernetLen {
		return h
	}
	end := EthernetLen + total // of the packet; padding may follow
	h.IPv4 = IPv4(between(p, 0, total))
	h.Transport = EthernetLen + hlen
	h.setPayload(h.Transport, end)
	if p.IsFragment() {
		return h
	}

	b := h.IPv4[hlen:]
	switch p.Protocol() {
	case ProtocolUDP:
		if len(b) < UDPLen {
			return h
		}
		n := UDP(b).Length()
		if n < UDPLen || n > total-hlen {
			return h
		}
		h.UDP = UDP(between(b, 0, n))
		h.setPayload(h.Transport+UDPLen, h.Transport+n)
	case ProtocolICMP:
		if len(b) < ICMPLen {
			return h
		}
		h.ICMP = ICMP(b)
		h.setPayload(h.Transport+ICMPLen, end)
	case ProtocolTCP:
		if len(b) < TCPLen {
			return h
		}
		n := TCP(b).HeaderLen()
		if n < TCPLen || n > len(b) {
			return h
		}
		h.TCP = TCP(b)
		h.setPayload(h.Transport+n, end)
	}
	return h
}

func (h *Headers) setPayload(start, end int) {
	h.Payload, h.PayloadLen = start, end-start
}

// Contiguous says whether the payload lies wholly in the first buffer.
func (h *Headers) Contiguous() bool { return h.Payload+h.PayloadLen <= h.head }

// UDPChecksum computes the UDP checksum as it has to be sent: 0xffff where the
// sum yields 0. rest are the frame's buffers after the first one, in order;
// they may have padding at their end. It reports false if there is no UDP or
// if part of the datagram is missing from head and rest.
func (h *Headers) UDPChecksum(rest ...[]byte) (uint16, bool) {
	if h.UDP == nil {
		return 0, false
	}
	c := h.pseudo()
	c.Add(h.UDP[:6])
	if !h.addPayload(&c, h.UDP[UDPLen:], rest) {
		return 0, false
	}
	if v := c.Value(); v != 0 {
		return v, true
	}
	return 0xffff, true
}

// UDPChecksumValid says whether the datagram has a right checksum or none.
// rest is as for [Headers.UDPChecksum]. It is false for a partial checksum,
// so it condemns good packets of local senders: ask
// [Headers.UDPChecksumPartial] too.
func (h *Headers) UDPChecksumValid(rest ...[]byte) bool {
	if h.UDP == nil {
		return false
	}
	have := h.UDP.Checksum()
	if have == 0 {
		return true
	}
	want, ok := h.UDPChecksum(rest...)
	return ok && have == want
}

// UDPChecksumPartial says whether the checksum field holds the sum of the
// pseudo-header, as Linux leaves it for transmit checksum offload. False is
// certain. True is not: one complete checksum in 65535 has this value too. So
// replace the field when it is true, which is right in either case, and do not
// take it as proof that the sender is local or that the data is intact.
func (h *Headers) UDPChecksumPartial() bool {
	return h.UDP != nil && h.UDP.Checksum() == h.pseudo().Folded()
}

// ReplyUDP turns the frame into a reply with the same payload: it exchanges
// the MAC addresses, IPv4 addresses and ports. A complete checksum stays, and so
// does 0 for none; a partial one is completed if the datagram lies in head and rest,
// else set to 0. rest is as for [Headers.UDPChecksum]. IPv4 options, ID and TTL
// are kept: see [Headers.Hop].
//
// It reports false, and changes nothing, if there is no UDP; if a checksum is wrong,
// as Linux drops such a datagram; if part of one that has a complete checksum is missing
// from head and rest; or if an address is one that cannot be answered or answered from:
// broadcast, multicast or, as source, 0.0.0.0/8, 127.0.0.0/8 and the destination itself.
func (h *Headers) ReplyUDP(rest ...[]byte) bool {
	if h.UDP == nil || !h.Answerable() || !h.IPv4.ChecksumValid() {
		return false
	}
	if have := h.UDP.Checksum(); have != 0 {
		want, whole := h.UDPChecksum(rest...) // 0 if part of it is missing
		switch {
		case whole && have == want:
		case h.UDPChecksumPartial():
			h.UDP.SetChecksum(want)
		default:
			return false
		}
	}
	h.Ethernet.Swap()
	h.IPv4.SwapAddrs()
	h.UDP.SwapPorts()
	return true
}

// ReplyICMPEcho turns an echo request into its reply: it exchanges the MAC and
// IPv4 addresses, sets the type, computes the checksum over the whole message, and
// gives the reply 64 hops to live, as Linux does, however few the request had left.
// rest is as for [Headers.UDPChecksum]. IPv4 options and ID are kept.
//
// It reports false, and changes nothing, if this is no echo request, if part of
// it is missing from head and rest, if a checksum is wrong (a reply would
// vouch for damaged data; the same pass over the payload tells), or if an
// address cannot be answered, as for [Headers.ReplyUDP].
func (h *Headers) ReplyICMPEcho(rest ...[]byte) bool {
	m := h.ICMP
	if m == nil || m.Type() != ICMPEchoRequest || m.Code() != 0 || !h.Answerable() || !h.IPv4.ChecksumValid() {
		return false
	}
	// Type and code of the reply are 0 and add nothing to its sum.
	var reply, request Checksum
	reply.Add(m[4:ICMPLen])
	if !h.addPayload(&reply, m[ICMPLen:], rest) {
		return false
	}
	request.Add(m[:4])
	request.sum = add(request.sum, reply.sum)
	if request.Value() != 0 {
		return false
	}
	m.SetType(ICMPEchoReply)
	m.SetChecksum(reply.Value())
	h.Ethernet.Swap()
	h.IPv4.SwapAddrs()
	h.IPv4.live(replyTTL)
	return true
}

// replyTTL is how many hops the reply to an echo request has, as ip_default_ttl of Linux.
const replyTTL = 64

// Intact says whether no checksum refutes the packet: that of the IPv4 header, and that of
// the UDP datagram or ICMP message. UDP may have none, or a partial one, which Linux
// takes as well. rest is as for [Headers.UDPChecksum]. It is false if part of the
// data is missing, and if there is neither UDP nor ICMP.
//
// Whoever computes a new checksum over bytes that have come asks this first: the new
// one vouches for them.
func (h *Headers) Intact(rest ...[]byte) bool {
	switch {
	case h.IPv4 == nil || !h.IPv4.ChecksumValid():
	case h.UDP != nil:
		want, whole := h.UDPChecksum(rest...)
		have := h.UDP.Checksum()
		return whole && (have == want || have == 0 || h.UDPChecksumPartial())
	case h.ICMP != nil:
		var c Checksum
		c.Add(h.ICMP[:ICMPLen])
		return h.addPayload(&c, h.ICMP[ICMPLen:], rest) && c.Value() == 0
	}
	return false
}

// Turn turns a datagram or an echo request round, as [Headers.ReplyUDP] and
// [Headers.ReplyICMPEcho] do, but for the checksum: it is 0 afterwards, for somebody
// else to compute. rest is as for [Headers.UDPChecksum]. It reports false, and changes
// nothing, where there is nothing that can be answered, or if the packet is not
// [Headers.Intact].
func (h *Headers) Turn(rest ...[]byte) bool {
	echo := h.ICMP != nil && h.ICMP.Type() == ICMPEchoRequest && h.ICMP.Code() == 0
	if h.UDP == nil && !echo || !h.Answerable() || !h.Intact(rest...) {
		return false
	}
	if echo {
		h.ICMP.SetType(ICMPEchoReply)
		h.ICMP.SetChecksum(0)
		h.IPv4.live(replyTTL)
	} else {
		h.UDP.SetChecksum(0)
		h.UDP.SwapPorts()
	}
	h.Ethernet.Swap()
	h.IPv4.SwapAddrs()
	return true
}

// Hop takes a hop from the time to live of an answer that is the question turned round, and
// reports false if it is not to be sent. Anybody can forge a datagram that has two echoes
// answer each other without end: those of the same port are not answered, and for the
// others an answer lives one hop less than its question did.
func (h *Headers) Hop() bool {
	return h.UDP == nil || h.UDP.SrcPort() != h.UDP.DstPort() && h.IPv4.Hop()
}

// pseudo is the sum over the pseudo-header of the UDP datagram.
func (h *Headers) pseudo() Checksum {
	var c Checksum
	c.AddPseudo(h.IPv4.Src(), h.IPv4.Dst(), ProtocolUDP, h.UDP.Length())
	return c
}

// addPayload adds the payload to the sum: first what lies in the first buffer,
// then as much of rest as belongs to it. It reports whether that was all of it.
func (h *Headers) addPayload(c *Checksum, first []byte, rest [][]byte) bool {
	c.Add(first)
	n := h.PayloadLen - len(first)
	for _, b := range rest {
		b = between(b, 0, n)
		c.Add(b)
		n -= len(b)
	}
	return n == 0
}

// Answerable says whether a reply with exchanged addresses may be sent at all
// (RFC 1122, 3.2.1.3: no host sends from a broadcast or multicast address, nobody is
// reached at 0.0.0.0/8, and 127.0.0.0/8 is on no wire; nor do we hear ourselves there).
func (h *Headers) Answerable() bool {
	if h.IPv4 == nil {
		return false
	}
	esrc, edst := h.Ethernet.Src(), h.Ethernet.Dst()
	src, dst := h.IPv4.Src(), h.IPv4.Dst()
	return (esrc[0]|edst[0])&1 == 0 && src[0] != 0 && src[0] != 127 && src != dst && !group(src) && !group(dst)
}

// group says whether a is a multicast address or the limited broadcast.
func group(a [4]byte) bool {
	return a[0]>>4 == 0xe || a == [4]byte{255, 255, 255, 255}
}
