// SPDX-License-Identifier: Apache-2.0

package handlerstest

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/google/gopacket"
	"github.com/google/gopacket/layers"

	"github.com/xspin/xspin/slmp"
)

// The two hosts on the wire.
var (
	HereAddr = netip.AddrFrom4([4]byte{10, 0, 0, 1}) // the NIC
	PeerAddr = netip.AddrFrom4([4]byte{10, 0, 0, 2})
	HereMAC  = [6]byte{2, 0, 0, 0, 0, 1}
	PeerMAC  = [6]byte{2, 0, 0, 0, 0, 2}
)

// Here returns a port of the NIC.
func Here(port uint16) netip.AddrPort { return netip.AddrPortFrom(HereAddr, port) }

// Peer returns a port of the peer.
func Peer(port uint16) netip.AddrPort { return netip.AddrPortFrom(PeerAddr, port) }

// UDP returns a frame from the peer with a datagram and valid checksums. It has at
// least 60 bytes, as on a wire.
func UDP(from, to netip.AddrPort, payload []byte) []byte {
	udp := &layers.UDP{SrcPort: layers.UDPPort(from.Port()), DstPort: layers.UDPPort(to.Port())}
	ip := ipv4(from.Addr(), to.Addr(), layers.IPProtocolUDP)
	_ = udp.SetNetworkLayerForChecksum(ip) // fails for other layers only
	return serialize(ip, udp, payload)
}

// ICMPEcho returns a frame with a ping from the peer.
func ICMPEcho(from, to netip.Addr, id, seq uint16, payload []byte) []byte {
	icmp := &layers.ICMPv4{TypeCode: layers.CreateICMPv4TypeCode(layers.ICMPv4TypeEchoRequest, 0), Id: id, Seq: seq}
	return serialize(ipv4(from, to, layers.IPProtocolICMPv4), icmp, payload)
}

// Segment returns a frame with a segment of an SLMP message, to the NIC.
func Segment(from netip.AddrPort, h slmp.Header, payload []byte) []byte {
	b := make([]byte, slmp.HeaderLen, slmp.HeaderLen+len(payload))
	h.Put(b)
	return UDP(from, Here(slmp.Port), append(b, payload...))
}

// Message returns the frames of an SLMP message, in order: segments of n bytes, each
// with the flag SYN, which asks for an acknowledgement.
func Message(from netip.AddrPort, id uint32, content []byte, n int) (frames [][]byte) {
	for off := 0; ; off += n {
		end := min(off+n, len(content))
		h := slmp.Header{Flags: slmp.SYN, ID: id, Offset: uint32(off)}
		if end == len(content) {
			h.Flags |= slmp.EOM
		}
		frames = append(frames, Segment(from, h, content[off:end]))
		if end == len(content) {
			return frames
		}
	}
}

func ipv4(from, to netip.Addr, p layers.IPProtocol) *layers.IPv4 {
	return &layers.IPv4{Version: 4, TTL: 64, Protocol: p, SrcIP: net.IP(from.AsSlice()), DstIP: net.IP(to.AsSlice())}
}

func serialize(ip *layers.IPv4, l gopacket.SerializableLayer, payload []byte) []byte {
	eth := &layers.Ethernet{SrcMAC: PeerMAC[:], DstMAC: HereMAC[:], EthernetType: layers.EthernetTypeIPv4}
	buf := gopacket.NewSerializeBuffer()
	o := gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}
	if err := gopacket.SerializeLayers(buf, o, eth, ip, l, gopacket.Payload(payload)); err != nil {
		panic(fmt.Sprintf("handlerstest: frame from %v to %v: %v", ip.SrcIP, ip.DstIP, err)) // not IPv4, or too long
	}
	frame := buf.Bytes()
	for len(frame) < 60 {
		frame = append(frame, 0)
	}
	return frame
}
