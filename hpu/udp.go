// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/xspin/xspin/packet"
)

var errNoResolver = fmt.Errorf("resolve: %w", errors.ErrUnsupported)

// Resolve returns the way to an address. It does not wait: errors that wrap
// ErrUnresolved say that the neighbour is being asked.
func (t *Task) Resolve(dst netip.Addr) (Hop, error) {
	if t.ctx.res.Resolver == nil {
		return Hop{}, errNoResolver
	}
	return t.ctx.res.Resolver.Resolve(dst)
}

// udpHeaders is how many bytes are in front of the payload of SendUDP.
const udpHeaders = packet.EthernetLen + packet.IPv4Len + packet.UDPLen

// SendUDP is SendNew for a datagram with n bytes of payload from a port of this
// interface's address, to wherever: its headers are there, and the payload is
// returned, of unknown content. IPv4 only; without a checksum.
func (t *Task) SendUDP(from uint16, to netip.AddrPort, n int) ([]byte, error) {
	if !to.Addr().Is4() {
		return nil, fmt.Errorf("send datagram to %v: %w: IPv4 only", to, errors.ErrUnsupported)
	}
	hop, err := t.Resolve(to.Addr())
	if err != nil {
		return nil, err
	}
	if most := hop.MTU - packet.IPv4Len - packet.UDPLen; n < 0 || n > most {
		return nil, fmt.Errorf("send datagram of %d bytes to %v: %w: 0..%d", n, to, ErrSize, most)
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
