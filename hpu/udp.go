// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/xspin/xspin/packet"
	"github.com/xspin/xspin/spin"
)

var errNoResolver = fmt.Errorf("resolve: %w", errors.ErrUnsupported)

// Resolve returns the way to an address. It does not wait: errors that wrap
// ErrUnresolved say that the neighbour is being asked.
func (t *Task) Resolve(dst netip.Addr) (spin.Hop, error) {
	if t.ctx.res.Resolver == nil {
		return spin.Hop{}, errNoResolver
	}
	return t.ctx.res.Resolver.Resolve(dst)
}

// Resolve is Task.Resolve, which knows one neighbour more: the packet came from it. Who
// sent the packet, and where it came from another network the router, is reached at the
// MAC in it while the interface's own neighbour is still being asked.
func (h *HER) Resolve(dst netip.Addr) (spin.Hop, error) {
	hop, err := h.Task.Resolve(dst)
	if err != nil && errors.Is(err, spin.ErrUnresolved) {
		if back, ok := h.back(dst); ok {
			return back, nil
		}
	}
	return hop, err
}

// back returns the way to dst if the packet is between it and this interface, whether the
// handler has turned it round yet or not.
func (h *HER) back(dst netip.Addr) (spin.Hop, bool) {
	hdr := h.Headers()
	if hdr.IPv4 == nil {
		return spin.Hop{}, false
	}
	peer, here := netip.AddrFrom4(hdr.IPv4.Src()), netip.AddrFrom4(hdr.IPv4.Dst())
	if here == dst {
		peer, here = here, peer
	}
	hop, own := h.ctx.res.Resolver.From(here)
	hop.MAC = hdr.Ethernet.Src()
	if hop.MAC == hop.SourceMAC {
		hop.MAC = hdr.Ethernet.Dst()
	} else if hdr.Ethernet.Dst() != hop.SourceMAC {
		own = false
	}
	return hop, own && peer == dst && hop.MAC != [6]byte{} && hop.MAC[0]&1 == 0
}

// udpHeaders is how many bytes are in front of the payload of SendUDP and Reply.
const udpHeaders = packet.EthernetLen + packet.IPv4Len + packet.UDPLen

// SendUDP is SendNew for a datagram with n bytes of payload from a port of this
// interface's address, to wherever: its headers are there, and the payload is
// returned, of unknown content. IPv4 only; without a checksum.
func (t *Task) SendUDP(from uint16, to netip.AddrPort, n int) ([]byte, error) {
	return t.sendUDP(t, from, to, n)
}

// SendUDP is Task.SendUDP by way of HER.Resolve.
func (h *HER) SendUDP(from uint16, to netip.AddrPort, n int) ([]byte, error) {
	return h.sendUDP(h, from, to, n)
}

func (t *Task) sendUDP(by interface {
	Resolve(netip.Addr) (spin.Hop, error)
}, from uint16, to netip.AddrPort, n int) ([]byte, error) {
	if !to.Addr().Is4() {
		return nil, fmt.Errorf("send datagram to %v: %w: IPv4 only", to, errors.ErrUnsupported)
	}
	hop, err := by.Resolve(to.Addr())
	if err != nil {
		return nil, err
	}
	return t.datagram(&hop, from, to, ttl, n)
}

// ErrReply says that a packet is not answered: it is no datagram on IPv4, a checksum
// refutes it, one of its addresses is nobody's, such as a broadcast, or it had no hop left
// for an answer.
var ErrReply = errors.New("no intact datagram from a host that can be answered")

// Reply is SendNew for the answer to the packet, a datagram: with the addresses and ports
// exchanged, and n bytes of payload, which are returned, of unknown content. Their
// checksum is computed when the handler has returned. The packet stays as it is, and may
// be read meanwhile; change its headers after Reply, if at all. The error is ErrReply for
// what should not be answered: with a new checksum, an answer would vouch for the bytes.
// The answer has a hop less to live than the packet had: anybody can forge a datagram that
// has two handlers answer each other, and it comes to an end.
func (h *HER) Reply(n int) ([]byte, error) {
	hdr := h.Headers()
	var room [chainSize][]byte
	if hdr.UDP == nil || !hdr.Answerable() || !hdr.Intact(h.Rest(room[:0])...) || hdr.IPv4.TTL() <= 1 {
		return nil, ErrReply
	}
	hop := spin.Hop{MTU: h.r.pool.cfg.frameRoom() - packet.EthernetLen}
	here := netip.AddrFrom4(hdr.IPv4.Dst())
	if res := h.ctx.res.Resolver; res != nil {
		hop, _ = res.From(here)
	}
	// Whoever was asked answers, even if that is not the interface.
	hop.Source, hop.SourceMAC, hop.MAC = here, hdr.Ethernet.Dst(), hdr.Ethernet.Src()
	b, err := h.datagram(&hop, hdr.UDP.DstPort(), netip.AddrPortFrom(netip.AddrFrom4(hdr.IPv4.Src()), hdr.UDP.SrcPort()), min(ttl, hdr.IPv4.TTL()-1), n)
	if err == nil {
		h.r.batch.unsummed[h.r.batch.made-1] = true
	}
	return b, err
}

// sum computes the checksums of the replies among the frames that were made since mark.
func (r *runner) sum(mark int) {
	for i := mark; i < r.batch.made; i++ {
		if r.batch.unsummed[i] {
			frame := r.pool.cfg.Memory.Bytes(r.batch.sends[i].Addr, int(r.batch.sends[i].Len))
			hdr := packet.Parse(frame, len(frame))
			if sum, ok := hdr.UDPChecksum(); ok {
				hdr.UDP.SetChecksum(sum)
			}
		}
	}
}

// datagram makes a frame for a datagram, without a checksum, and returns its payload.
func (t *Task) datagram(hop *spin.Hop, from uint16, to netip.AddrPort, ttl uint8, n int) ([]byte, error) {
	if most := hop.MTU - packet.IPv4Len - packet.UDPLen; n < 0 || n > most {
		return nil, fmt.Errorf("send datagram of %d bytes to %v: %w: want 0 to %d", n, to, ErrSize, most)
	}
	frame, err := t.SendNew(max(udpHeaders+n, minFrame))
	if err != nil {
		return nil, err
	}
	clear(frame[udpHeaders+n:]) // padding
	eth := packet.Ethernet(frame)
	eth.SetDst(hop.MAC)
	eth.SetSrc(hop.SourceMAC)
	eth.SetEtherType(packet.EtherTypeIPv4)
	ip := frame[packet.EthernetLen:][:packet.IPv4Len]
	clear(ip)
	ip[0], ip[6], ip[8], ip[9] = 0x45, 0x40, ttl, protocolUDP // don't fragment
	binary.BigEndian.PutUint16(ip[2:], uint16(packet.IPv4Len+packet.UDPLen+n))
	src, dst := hop.Source.As4(), to.Addr().As4()
	copy(ip[12:], src[:])
	copy(ip[16:], dst[:])
	binary.BigEndian.PutUint16(ip[10:], packet.ChecksumOf(ip))
	udp := frame[packet.EthernetLen+packet.IPv4Len:]
	binary.BigEndian.PutUint16(udp, from)
	binary.BigEndian.PutUint16(udp[2:], to.Port())
	binary.BigEndian.PutUint16(udp[4:], uint16(packet.UDPLen+n))
	udp[6], udp[7] = 0, 0
	return udp[packet.UDPLen:][:n], nil
}
