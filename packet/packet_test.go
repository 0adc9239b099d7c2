// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"net"
	"slices"
	"testing"

	"github.com/google/gopacket"
	"github.com/google/gopacket/layers"
)

var (
	clientMAC = [6]byte{2, 0, 0, 0, 0, 1}
	nicMAC    = [6]byte{2, 0, 0, 0, 0, 2}
	clientIP  = [4]byte{10, 0, 0, 1}
	nicIP     = [4]byte{10, 0, 0, 2}
)

// spec says what build puts into a frame.
type spec struct {
	proto   uint8
	payload []byte
	options []byte // multiple of 4 bytes
	frag    uint16 // offset in units of 8 bytes
	flags   layers.IPv4Flag
	etype   layers.EthernetType // IPv4 unless set
}

// build has gopacket write a frame with right lengths and checksums.
func build(tb testing.TB, s spec) []byte {
	tb.Helper()
	eth := &layers.Ethernet{SrcMAC: clientMAC[:], DstMAC: nicMAC[:], EthernetType: layers.EthernetTypeIPv4}
	if s.etype != 0 {
		eth.EthernetType = s.etype
	}
	ip := &layers.IPv4{Version: 4, TTL: 64, Id: 0x1234, Protocol: layers.IPProtocol(s.proto),
		SrcIP: clientIP[:], DstIP: nicIP[:], FragOffset: s.frag, Flags: s.flags}
	if len(s.options) > 0 {
		// An experimental option (type 0x9e, RFC 4727) around the bytes.
		ip.Options = []layers.IPv4Option{{OptionType: 0x9e, OptionLength: uint8(len(s.options)), OptionData: s.options[2:]}}
	}
	stack := []gopacket.SerializableLayer{eth, ip}
	switch s.proto {
	case ProtocolUDP:
		udp := &layers.UDP{SrcPort: 4000, DstPort: 9330}
		if err := udp.SetNetworkLayerForChecksum(ip); err != nil {
			tb.Fatal(err)
		}
		stack = append(stack, udp)
	case ProtocolICMP:
		stack = append(stack, &layers.ICMPv4{TypeCode: layers.CreateICMPv4TypeCode(8, 0), Id: 77, Seq: 3})
	case ProtocolTCP:
		tcp := &layers.TCP{SrcPort: 4000, DstPort: 80, SYN: true,
			Options: []layers.TCPOption{{OptionType: layers.TCPOptionKindMSS, OptionLength: 4, OptionData: []byte{5, 0xb4}}}}
		if err := tcp.SetNetworkLayerForChecksum(ip); err != nil {
			tb.Fatal(err)
		}
		stack = append(stack, tcp)
	}
	buf := gopacket.NewSerializeBuffer()
	err := gopacket.SerializeLayers(buf, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true},
		append(stack, gopacket.Payload(s.payload))...)
	if err != nil {
		tb.Fatal(err)
	}
	frame := slices.Clone(buf.Bytes())
	if h := Parse(frame, len(frame)); h.UDP != nil && h.UDP.Checksum() == 0 {
		h.UDP.SetChecksum(0xffff) // gopacket writes the sum 0 as it is, which says that there is none (RFC 768)
	}
	return frame[:EthernetLen+int(binary.BigEndian.Uint16(frame[16:]))] // gopacket pads to 60 bytes
}

func random(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func newRand(tb testing.TB) *rand.Rand {
	seed := rand.Uint64()
	tb.Cleanup(func() {
		if tb.Failed() {
			tb.Logf("seed %d", seed)
		}
	})
	return rand.New(rand.NewPCG(seed, 0))
}

// poke returns a copy of b with the bytes v at off.
func poke(b []byte, off int, v ...byte) []byte {
	b = slices.Clone(b)
	copy(b[off:], v)
	return b
}

// present names the layers that Parse found.
func present(h Headers) string {
	s := ""
	for _, l := range []struct {
		name string
		view []byte
	}{{"E", h.Ethernet}, {"4", h.IPv4}, {"U", h.UDP}, {"I", h.ICMP}, {"T", h.TCP}} {
		if l.view != nil {
			s += l.name
		}
	}
	return s
}

func TestParse(t *testing.T) {
	data := []byte("payload")
	udp := build(t, spec{proto: ProtocolUDP, payload: data})
	icmp := build(t, spec{proto: ProtocolICMP, payload: data})
	tcp := build(t, spec{proto: ProtocolTCP, payload: data})
	opts := build(t, spec{proto: ProtocolUDP, payload: data, options: make([]byte, 40)})
	empty := build(t, spec{proto: ProtocolUDP})
	padded := append(slices.Clone(udp), make([]byte, 60-len(udp))...)
	tagged := append(append(slices.Clone(udp[:12]), 0x81, 0x00, 0x00, 0x05), udp[12:]...)

	const all = -1
	for _, c := range []struct {
		name       string
		frame      []byte
		head, flen int // all: the whole frame
		want       string
		payload    int // offset
		payloadLen int
	}{
		{"empty frame", nil, all, all, "", 0, 0},
		{"negative length", udp, all, -5, "", 0, 0},
		{"13 bytes are no Ethernet header", udp, 13, 13, "", 0, 13},
		{"14 bytes are one", udp, 14, 14, "E", 14, 0},
		{"33 bytes hold no IPv4 header", udp, 33, all, "E", 14, len(udp) - 14},
		{"34 bytes hold one", udp, 34, all, "E4", 34, 15},
		{"41 bytes hold no UDP header", udp, 41, all, "E4", 34, 15},
		{"42 bytes hold one, the payload is in the next buffer", udp, 42, all, "E4U", 42, 7},
		{"whole UDP", udp, all, all, "E4U", 42, 7},
		{"the last byte of the payload is in the next buffer", udp, len(udp) - 1, all, "E4U", 42, 7},
		{"UDP without payload", empty, all, all, "E4U", 42, 0},
		{"UDP with Ethernet padding", padded, all, all, "E4U", 42, 7},
		{"frame longer than head says it is", padded, all, len(udp), "E4U", 42, 7},
		{"frame one byte too short for TotalLen", udp, all, len(udp) - 1, "E", 14, len(udp) - 15},
		{"41 bytes hold no ICMP header", icmp, 41, all, "E4", 34, 15},
		{"42 bytes hold one of ICMP", icmp, 42, all, "E4I", 42, 7},
		{"whole ICMP", icmp, all, all, "E4I", 42, 7},
		{"57 bytes hold no TCP header with options", tcp, 57, all, "E4", 34, len(tcp) - 34},
		{"58 bytes hold one", tcp, 58, all, "E4T", 58, 7},
		{"whole TCP", tcp, all, all, "E4T", 58, 7},
		{"TCP data offset 4", poke(tcp, 46, 0x40), all, all, "E4", 34, len(tcp) - 34},
		{"TCP data offset beyond the packet", poke(tcp, 46, 0xf0), all, all, "E4", 34, len(tcp) - 34},
		{"options", opts, all, all, "E4U", 82, 7},
		{"options cut by the first buffer", opts, 73, all, "E", 14, len(opts) - 14},
		{"options just in the first buffer", opts, 74, all, "E4", 74, 15},
		{"IHL 4", poke(udp, 14, 0x44), all, all, "E", 14, len(udp) - 14},
		{"IHL 0", poke(udp, 14, 0x40), all, all, "E", 14, len(udp) - 14},
		{"IHL beyond the packet", poke(udp, 14, 0x4f), all, all, "E", 14, len(udp) - 14},
		{"version 6", poke(udp, 14, 0x65), all, all, "E", 14, len(udp) - 14},
		{"ARP", poke(udp, 12, 0x08, 0x06), all, all, "E", 14, len(udp) - 14},
		{"802.3 length", poke(udp, 12, 0, 100), all, all, "E", 14, len(udp) - 14},
		{"VLAN tag", tagged, all, all, "E", 14, len(tagged) - 14},
		{"TotalLen 19", poke(udp, 16, 0, 19), all, all, "E", 14, len(udp) - 14},
		{"TotalLen 0", poke(udp, 16, 0, 0), all, all, "E", 14, len(udp) - 14},
		{"TotalLen 20 leaves nothing for UDP", poke(udp, 16, 0, 20), all, all, "E4", 34, 0},
		{"TotalLen 27 leaves too little for UDP", poke(udp, 16, 0, 27), all, all, "E4", 34, 7},
		{"TotalLen one beyond the frame", poke(udp, 16, 0, 36), all, all, "E", 14, len(udp) - 14},
		{"TotalLen one beyond UDP, in the padding", poke(padded, 16, 0, 36), all, all, "E4U", 42, 7},
		{"UDP length 7", poke(udp, 38, 0, 7), all, all, "E4", 34, 15},
		{"UDP length 0", poke(udp, 38, 0, 0), all, all, "E4", 34, 15},
		{"UDP length 8 hides the payload", poke(udp, 38, 0, 8), all, all, "E4U", 42, 0},
		{"UDP length one beyond TotalLen, in the padding", poke(padded, 38, 0, 16), all, all, "E4", 34, 15},
		{"first fragment", poke(udp, 20, 0x20, 0), all, all, "E4", 34, 15},
		{"last fragment", poke(udp, 20, 0, 1), all, all, "E4", 34, 15},
		{"don't fragment is no fragment", poke(udp, 20, 0x40, 0), all, all, "E4U", 42, 7},
		{"reserved flag is no fragment", poke(udp, 20, 0x80, 0), all, all, "E4U", 42, 7},
		{"GRE", poke(udp, 23, 47), all, all, "E4", 34, 15},
	} {
		t.Run(c.name, func(t *testing.T) {
			head, flen := c.frame, len(c.frame)
			if c.head != all {
				head = head[:c.head]
			}
			if c.flen != all {
				flen = c.flen
			}
			h := Parse(head, flen)
			if got := present(h); got != c.want {
				t.Fatalf("found layers %q, want %q", got, c.want)
			}
			if h.Payload != c.payload || h.PayloadLen != c.payloadLen {
				t.Errorf("payload %d+%d, want %d+%d", h.Payload, h.PayloadLen, c.payload, c.payloadLen)
			}
			checkInvariants(t, head, flen, h)
		})
	}
	if got := Parse(tagged, len(tagged)).Ethernet.EtherType(); got != EtherTypeVLAN {
		t.Errorf("EtherType of a tagged frame is %#x", got)
	}
}

// checkInvariants checks what has to hold for any input.
func checkInvariants(t *testing.T, head []byte, frameLen int, h Headers) {
	t.Helper()
	avail := head[:max(0, min(len(head), frameLen))]
	// in checks that view lies in the available head at off.
	in := func(name string, view []byte, off, atLeast int) {
		if view == nil {
			return
		}
		if len(view) < atLeast || off+len(view) > len(avail) || cap(view) != len(view) || &view[0] != &avail[off] {
			t.Errorf("%s: %d bytes (capacity %d) at %d do not lie in the head of %d", name, len(view), cap(view), off, len(avail))
		}
	}
	// ends checks that view goes on to the end of its layer or of the head.
	ends := func(name string, view []byte, off, length int) {
		if view != nil && len(view) != min(length, len(avail)-off) {
			t.Errorf("%s: view of %d bytes at %d, length %d, head %d", name, len(view), off, length, len(avail))
		}
	}
	in("Ethernet", h.Ethernet, 0, EthernetLen)
	ends("Ethernet", h.Ethernet, 0, frameLen)
	in("IPv4", h.IPv4, EthernetLen, IPv4Len)
	in("UDP", h.UDP, h.Transport, UDPLen)
	in("ICMP", h.ICMP, h.Transport, ICMPLen)
	in("TCP", h.TCP, h.Transport, TCPLen)
	if h.Payload < 0 || h.PayloadLen < 0 || h.Payload+h.PayloadLen > max(frameLen, 0) {
		t.Errorf("payload %d+%d in a frame of %d", h.Payload, h.PayloadLen, frameLen)
	}
	if h.Contiguous() != (h.Payload+h.PayloadLen <= len(avail)) {
		t.Error("Contiguous is wrong")
	}
	if h.IPv4 != nil {
		if h.Transport != EthernetLen+h.IPv4.HeaderLen() || len(h.IPv4.Options()) != h.IPv4.HeaderLen()-IPv4Len {
			t.Errorf("transport at %d, options %d, header %d", h.Transport, len(h.IPv4.Options()), h.IPv4.HeaderLen())
		}
		if h.Transport > len(avail) || EthernetLen+h.IPv4.TotalLen() > frameLen {
			t.Error("IPv4 longer than the frame")
		}
		ends("IPv4", h.IPv4, EthernetLen, h.IPv4.TotalLen())
		ends("ICMP", h.ICMP, h.Transport, h.IPv4.TotalLen()-h.IPv4.HeaderLen())
		ends("TCP", h.TCP, h.Transport, h.IPv4.TotalLen()-h.IPv4.HeaderLen())
		if h.UDP != nil {
			ends("UDP", h.UDP, h.Transport, h.UDP.Length())
		}
		h.IPv4.ChecksumValid()
		h.IPv4.HeaderChecksum()
	} else if h.Transport != 0 || h.UDP != nil || h.ICMP != nil || h.TCP != nil {
		t.Error("a layer without IPv4 below it")
	}
	// The innermost layer's Payload is the part of the payload in the head.
	var inner []byte
	switch {
	case h.UDP != nil:
		inner = h.UDP.Payload()
	case h.ICMP != nil:
		inner = h.ICMP.Payload()
	case h.TCP != nil:
		inner = h.TCP.Payload()
	case h.IPv4 != nil:
		inner = h.IPv4.Payload()
	case h.Ethernet != nil:
		inner = h.Ethernet.Payload()
	default:
		return
	}
	if want := max(0, min(h.PayloadLen, len(avail)-h.Payload)); len(inner) != want {
		t.Errorf("payload view has %d bytes, want %d", len(inner), want)
	}
}

// compare checks a parsed frame, whole in one buffer, against gopacket's
// decoding of it.
func compare(t *testing.T, frame []byte, h Headers) {
	t.Helper()
	p := gopacket.NewPacket(frame, layers.LayerTypeEthernet, gopacket.NoCopy)
	if p.ErrorLayer() != nil {
		return // it decodes some frames in parts that Parse takes as a whole or not
	}
	// gopacket cuts a frame with a lying length and only marks it.
	truncated := p.Metadata().Truncated
	eth, _ := p.Layer(layers.LayerTypeEthernet).(*layers.Ethernet)
	if (eth != nil) != (h.Ethernet != nil) {
		t.Fatalf("Ethernet: gopacket %v, we %v", eth != nil, h.Ethernet != nil)
	}
	if eth == nil {
		return
	}
	if dst, src := h.Ethernet.Dst(), h.Ethernet.Src(); !bytes.Equal(dst[:], eth.DstMAC) || !bytes.Equal(src[:], eth.SrcMAC) {
		t.Errorf("MAC addresses %x %x, gopacket %v %v", dst, src, eth.DstMAC, eth.SrcMAC)
	}
	ip, _ := p.Layer(layers.LayerTypeIPv4).(*layers.IPv4)
	direct := eth.NextLayerType() == layers.LayerTypeIPv4 && ip != nil
	if h.IPv4 == nil {
		// TotalLen 0 is segmentation offload to gopacket; it does not look at the version.
		if direct && !truncated && ip.Version == 4 && be.Uint16(frame[16:18]) != 0 {
			t.Errorf("gopacket decodes an IPv4 header, we do not")
		}
		return
	}
	if !direct {
		t.Fatal("we decode an IPv4 header, gopacket does not")
	}
	v := h.IPv4
	src, dst := v.Src(), v.Dst()
	if v.HeaderLen() != int(ip.IHL)*4 || v.TotalLen() != int(ip.Length) || v.ID() != ip.Id || v.TTL() != ip.TTL ||
		v.Protocol() != uint8(ip.Protocol) || v.Checksum() != ip.Checksum || v.FragmentOffset() != int(ip.FragOffset)*8 ||
		v.MoreFragments() != (ip.Flags&layers.IPv4MoreFragments != 0) || v.DontFragment() != (ip.Flags&layers.IPv4DontFragment != 0) ||
		!net.IP(src[:]).Equal(ip.SrcIP) || !net.IP(dst[:]).Equal(ip.DstIP) || !bytes.Equal(v.Payload(), ip.Payload) {
		t.Errorf("IPv4 % x, gopacket %+v", v, ip)
	}
	if v.IsFragment() {
		return // gopacket decodes no fragment, except one with offset 0 of some protocols
	}
	// Layers deeper down (tunnels, embedded packets) are not ours.
	if udp, _ := p.Layer(layers.LayerTypeUDP).(*layers.UDP); v.Protocol() == ProtocolUDP && udp != nil && h.UDP != nil {
		if h.UDP.SrcPort() != uint16(udp.SrcPort) || h.UDP.DstPort() != uint16(udp.DstPort) || h.UDP.Length() != int(udp.Length) ||
			h.UDP.Checksum() != udp.Checksum || !bytes.Equal(h.UDP.Payload(), udp.Payload) {
			t.Errorf("UDP % x, gopacket %+v", h.UDP, udp)
		}
	} else if v.Protocol() == ProtocolUDP && !truncated && udp != nil && udp.Length != 0 { // 0 is a jumbogram to gopacket
		t.Error("gopacket decodes UDP, we do not")
	} else if h.UDP != nil {
		t.Error("we decode UDP, gopacket does not")
	}
	if icmp, _ := p.Layer(layers.LayerTypeICMPv4).(*layers.ICMPv4); (icmp != nil) != (h.ICMP != nil) {
		if v.Protocol() == ProtocolICMP {
			t.Errorf("ICMP: gopacket %v, we %v", icmp != nil, h.ICMP != nil)
		}
	} else if icmp != nil && (h.ICMP.Type() != icmp.TypeCode.Type() || h.ICMP.Code() != icmp.TypeCode.Code() || h.ICMP.Checksum() != icmp.Checksum ||
		h.ICMP.ID() != icmp.Id || h.ICMP.Seq() != icmp.Seq || !bytes.Equal(h.ICMP.Payload(), icmp.Payload)) {
		t.Errorf("ICMP % x, gopacket %+v", h.ICMP, icmp)
	}
	if tcp, _ := p.Layer(layers.LayerTypeTCP).(*layers.TCP); (tcp != nil) != (h.TCP != nil) {
		if v.Protocol() == ProtocolTCP {
			t.Errorf("TCP: gopacket %v, we %v", tcp != nil, h.TCP != nil)
		}
	} else if tcp != nil && (h.TCP.SrcPort() != uint16(tcp.SrcPort) || h.TCP.DstPort() != uint16(tcp.DstPort) ||
		h.TCP.HeaderLen() != int(tcp.DataOffset)*4 || !bytes.Equal(h.TCP.Payload(), tcp.Payload)) {
		t.Errorf("TCP % x, gopacket %+v", h.TCP, tcp)
	}
}

func TestParseAgreesWithGopacketOnRandomPackets(t *testing.T) {
	r := newRand(t)
	wants := map[uint8]string{ProtocolUDP: "E4U", ProtocolICMP: "E4I", ProtocolTCP: "E4T", 253: "E4"}
	protos := []uint8{ProtocolUDP, ProtocolICMP, ProtocolTCP, 253}
	for range 2000 {
		s := spec{proto: protos[r.IntN(len(protos))], payload: random(r, r.IntN(1400))}
		if n := r.IntN(11) * 4; n > 0 && r.IntN(2) == 0 {
			s.options = random(r, n)
		}
		frame := build(t, s)
		want := wants[s.proto]
		if r.IntN(4) == 0 { // padding
			frame = append(frame, random(r, r.IntN(20))...)
		}
		h := Parse(frame, len(frame))
		if got := present(h); got != want {
			t.Fatalf("%+v: layers %q, want %q", s, got, want)
		}
		if !bytes.Equal(frame[h.Payload:h.Payload+h.PayloadLen], s.payload) {
			t.Fatalf("%+v: payload differs", s)
		}
		if !h.IPv4.ChecksumValid() || h.IPv4.HeaderChecksum() != h.IPv4.Checksum() {
			t.Fatalf("%+v: header checksum is not gopacket's", s)
		}
		if s.proto == ProtocolUDP {
			if c, ok := h.UDPChecksum(); !ok || c != h.UDP.Checksum() || !h.UDPChecksumValid() {
				t.Fatalf("%+v: UDP checksum %#x %v, gopacket has %#x", s, c, ok, h.UDP.Checksum())
			}
		}
		checkInvariants(t, frame, len(frame), h)
		compare(t, frame, h)
		if t.Failed() {
			t.Fatalf("%+v", s)
		}
		// Damaged anywhere, it may be anything, but both must say the same.
		for range 4 {
			frame[r.IntN(min(len(frame), 60))] = byte(r.Uint32())
		}
		h = Parse(frame, len(frame))
		checkInvariants(t, frame, len(frame), h)
		compare(t, frame, h)
		if t.Failed() {
			t.Fatalf("% x", frame)
		}
	}
}

func TestSettersWriteWhatAccessorsRead(t *testing.T) {
	frame := build(t, spec{proto: ProtocolUDP, payload: []byte("payload")})
	h := Parse(frame, len(frame))
	e, p, u, i := h.Ethernet, h.IPv4, h.UDP, ICMP(h.UDP)
	var a, b [6]byte
	copy(a[:], "abcdef")
	copy(b[:], "ghijkl")
	e.SetDst(a)
	e.SetSrc(b)
	e.SetEtherType(0x1234)
	if e.Dst() != a || e.Src() != b || e.EtherType() != 0x1234 {
		t.Errorf("Ethernet % x", e[:EthernetLen])
	}
	e.Swap()
	if e.Dst() != b || e.Src() != a || string(frame[:12]) != "ghijklabcdef" {
		t.Errorf("swapped Ethernet % x", e[:EthernetLen])
	}

	p.SetTotalLen(0x1112)
	p.SetID(0x1314)
	p.SetTTL(0x15)
	p.SetProtocol(0x16)
	p.SetChecksum(0x1718)
	p.SetSrc([4]byte{1, 2, 3, 4})
	p.SetDst([4]byte{5, 6, 7, 8})
	want := []byte{0x45, 0, 0x11, 0x12, 0x13, 0x14, 0, 0, 0x15, 0x16, 0x17, 0x18, 1, 2, 3, 4, 5, 6, 7, 8}
	if !bytes.Equal(frame[14:34], want) {
		t.Errorf("IPv4 % x, want % x", frame[14:34], want)
	}
	if p.TotalLen() != 0x1112 || p.ID() != 0x1314 || p.TTL() != 0x15 || p.Protocol() != 0x16 || p.Checksum() != 0x1718 {
		t.Errorf("IPv4 accessors disagree with % x", frame[14:34])
	}
	p.SwapAddrs()
	if p.Src() != [4]byte{5, 6, 7, 8} || p.Dst() != [4]byte{1, 2, 3, 4} {
		t.Errorf("swapped IPv4 % x", p[:IPv4Len])
	}

	u.SetSrcPort(0x2122)
	u.SetDstPort(0x2324)
	u.SetLength(0x2526)
	u.SetChecksum(0x2728)
	if want := []byte{0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28}; !bytes.Equal(frame[34:42], want) {
		t.Errorf("UDP % x, want % x", frame[34:42], want)
	}
	u.SwapPorts()
	if u.SrcPort() != 0x2324 || u.DstPort() != 0x2122 || u.Length() != 0x2526 || u.Checksum() != 0x2728 {
		t.Errorf("swapped UDP % x", u[:UDPLen])
	}

	i.SetType(1)
	i.SetCode(2)
	i.SetChecksum(0x0304)
	i.SetID(0x0506)
	i.SetSeq(0x0708)
	if want := []byte{1, 2, 3, 4, 5, 6, 7, 8}; !bytes.Equal(frame[34:42], want) {
		t.Errorf("ICMP % x, want % x", frame[34:42], want)
	}
	if i.Type() != 1 || i.Code() != 2 || i.Checksum() != 0x0304 || i.ID() != 0x0506 || i.Seq() != 0x0708 {
		t.Error("ICMP accessors disagree")
	}
}

func TestPayloadStaysInTheViewWhateverLengthsSay(t *testing.T) {
	frame := build(t, spec{proto: ProtocolUDP, payload: []byte("payload")})
	h := Parse(frame, len(frame))
	for _, n := range []uint16{0, 7, 8, 12, 0xffff} {
		h.IPv4.SetTotalLen(n)
		h.UDP.SetLength(n)
		if got, want := len(h.UDP.Payload()), max(0, min(int(n)-8, 7)); got != want {
			t.Errorf("UDP length %d: payload of %d bytes, want %d", n, got, want)
		}
		if got, want := len(h.IPv4.Payload()), max(0, min(int(n)-20, 15)); got != want {
			t.Errorf("TotalLen %d: payload of %d bytes, want %d", n, got, want)
		}
	}
	h.IPv4[0] = 0x4f // a handler's mistake: 60 bytes of header in 35
	if len(h.IPv4.Payload()) != 0 || len(h.IPv4.Options()) != 15 {
		t.Errorf("IHL beyond the view: options %d, payload %d", len(h.IPv4.Options()), len(h.IPv4.Payload()))
	}
	h.IPv4.HeaderChecksum()
	h.IPv4[0] = 0x40
	h.IPv4.HeaderChecksum()
	h.IPv4.ChecksumValid()
}

// decodeReply has gopacket decode a reply to a frame of build and checks
// addresses and IPv4 checksum.
func decodeReply(t *testing.T, frame []byte) gopacket.Packet {
	t.Helper()
	p := gopacket.NewPacket(frame, layers.LayerTypeEthernet, gopacket.Default)
	if p.ErrorLayer() != nil {
		t.Fatal(p.ErrorLayer().Error())
	}
	eth := p.LinkLayer().(*layers.Ethernet)
	ip := p.NetworkLayer().(*layers.IPv4)
	if !bytes.Equal(eth.DstMAC, clientMAC[:]) || !bytes.Equal(eth.SrcMAC, nicMAC[:]) ||
		!ip.DstIP.Equal(net.IP(clientIP[:])) || !ip.SrcIP.Equal(net.IP(nicIP[:])) {
		t.Errorf("reply goes %v > %v, %v > %v", eth.SrcMAC, eth.DstMAC, ip.SrcIP, ip.DstIP)
	}
	if naive(frame[14:14+int(ip.IHL)*4]) != 0xffff {
		t.Error("IPv4 checksum of the reply is wrong")
	}
	return p
}

// rightUDP says whether the UDP checksum in a frame without options is right,
// by the naive sum.
func rightUDP(frame []byte) bool {
	n := binary.BigEndian.Uint16(frame[38:40])
	b := append([]byte{}, frame[26:34]...)
	b = append(b, 0, 17, byte(n>>8), byte(n))
	return naive(append(b, frame[34:34+n]...)) == 0xffff
}

// partial puts the pseudo-header's sum into the UDP checksum field.
func partial(frame []byte) {
	b := append([]byte{}, frame[26:34]...)
	binary.BigEndian.PutUint16(frame[40:], naive(append(b, 0, 17, frame[38], frame[39])))
}

// resum has the checksum of a frame's IPv4 header right.
func resum(frame []byte) []byte {
	p := IPv4(frame[EthernetLen:])
	p.SetChecksum(p.HeaderChecksum())
	return frame
}

func TestReplyUDP(t *testing.T) {
	const (
		complete = iota
		none
		isPartial
		wrong
		wrongHeader
	)
	for _, c := range []struct {
		name     string
		checksum int
		split    int // length of the first buffer, 0 for all
		lost     bool
		zero     bool // expected: none
		right    bool // expected; with neither: no reply
	}{
		{"a complete checksum is kept", complete, 0, false, false, true},
		{"a complete checksum is kept across buffers", complete, 50, false, false, true},
		{"a complete checksum cannot be verified when the rest is not given", complete, 50, true, false, false},
		{"no checksum stays none", none, 0, false, true, false},
		{"no checksum stays none when the rest is not given", none, 43, true, true, false},
		{"a partial checksum is completed", isPartial, 0, false, false, true},
		{"a partial checksum is completed across buffers", isPartial, 43, false, false, true},
		{"a partial checksum is removed when the rest is not given", isPartial, 43, true, true, false},
		{"a wrong checksum has no reply", wrong, 0, false, false, false},
		{"a wrong checksum of the IPv4 header has no reply", wrongHeader, 0, false, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, payload := range []string{"", "payload", "payloads", "\x00"} {
				frame := build(t, spec{proto: ProtocolUDP, payload: []byte(payload)})
				switch c.checksum {
				case none:
					frame[40], frame[41] = 0, 0
				case isPartial:
					partial(frame)
				case wrong:
					frame[41] ^= 0x55
				case wrongHeader:
					frame[24] ^= 0x55
				}
				if c.split > 0 && c.split >= len(frame) {
					continue
				}
				flen := len(frame)
				frame = append(frame, "padding"...) // of the last buffer
				before := slices.Clone(frame)
				head, rest := frame, [][]byte(nil)
				if c.split > 0 {
					head, rest = frame[:c.split], [][]byte{frame[c.split : c.split+1], frame[c.split+1:]}
				}
				if c.lost {
					rest = nil
				}
				h := Parse(head, flen)
				if got := h.UDPChecksumPartial(); got != (c.checksum == isPartial) {
					t.Errorf("payload %q: partial is %v", payload, got)
				}
				if got, want := h.UDPChecksumValid(rest...), c.checksum == none || (c.checksum == complete || c.checksum == wrongHeader) && !c.lost; got != want {
					t.Errorf("payload %q: valid is %v, want %v", payload, got, want)
				}
				if got, want := h.ReplyUDP(rest...), c.zero || c.right; got != want {
					t.Fatalf("payload %q: reply %v, want %v", payload, got, want)
				} else if !got {
					if !bytes.Equal(frame, before) {
						t.Errorf("payload %q: the frame was changed", payload)
					}
					continue
				}
				udp := decodeReply(t, frame).TransportLayer().(*layers.UDP)
				if udp.SrcPort != 9330 || udp.DstPort != 4000 || string(udp.Payload) != payload {
					t.Errorf("payload %q: reply %v > %v %q", payload, udp.SrcPort, udp.DstPort, udp.Payload)
				}
				if zero := udp.Checksum == 0; zero != c.zero || rightUDP(frame) != c.right {
					t.Errorf("payload %q: reply has checksum %#x, right %v", payload, udp.Checksum, rightUDP(frame))
				}
			}
		})
	}
}

// A complete checksum may by chance be the pseudo-header's sum. The reply has
// to be right then too.
func TestReplyUDPWhenACompleteChecksumLooksPartial(t *testing.T) {
	for v := range 0x10000 {
		frame := build(t, spec{proto: ProtocolUDP, payload: []byte{byte(v >> 8), byte(v)}})
		h := Parse(frame, len(frame))
		if !h.UDPChecksumPartial() {
			continue
		}
		if !h.ReplyUDP() || !rightUDP(frame) {
			t.Fatal("the reply's checksum is wrong")
		}
		return
	}
	t.Fatal("no payload of two bytes makes the checksum look partial")
}

func TestUDPChecksumOfZeroIsSentAsOnes(t *testing.T) {
	for v := range 0x10000 {
		frame := build(t, spec{proto: ProtocolUDP, payload: []byte{byte(v >> 8), byte(v)}})
		frame[40], frame[41] = 0, 0
		h := Parse(frame, len(frame))
		switch c, ok := h.UDPChecksum(); {
		case !ok || c == 0:
			t.Fatalf("payload %#x: checksum %#x, %v", v, c, ok)
		case c == 0xffff:
			h.UDP.SetChecksum(c)
			if !h.UDPChecksumValid() || !rightUDP(frame) {
				t.Errorf("payload %#x: 0xffff is not valid", v)
			}
			return
		}
	}
	t.Fatal("no payload of two bytes has a checksum of 0")
}

func TestReplyICMPEcho(t *testing.T) {
	long := random(newRand(t), 1417)
	for _, c := range []struct {
		name   string
		split  int
		lost   bool
		change func(frame []byte)
		reply  bool
	}{
		{"an echo request is answered", 0, false, nil, true},
		{"a request over several buffers is answered", 51, false, nil, true},
		{"part of the message missing", 51, true, nil, false},
		{"a damaged request", 0, false, func(f []byte) { f[45] ^= 1 }, false},
		{"a damaged IPv4 header", 0, false, func(f []byte) { f[18] ^= 1 }, false},
		{"the last hop is no hindrance", 0, false, func(f []byte) { resum(poke(f, 22, 1)) }, true},
		{"as many hops as can be", 0, false, func(f []byte) { resum(poke(f, 22, 255)) }, true},
		{"an echo reply", 0, false, func(f []byte) { f[34] = 0; f[36] += 8 }, false},
		{"an echo request with a code", 0, false, func(f []byte) { f[35] = 1; f[37]-- }, false},
		{"a first fragment", 0, false, func(f []byte) { f[20] = 0x20 }, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, payload := range [][]byte{long[:16], long[:17], long[:1416], long} {
				frame := build(t, spec{proto: ProtocolICMP, payload: payload})
				if c.change != nil {
					c.change(frame)
				}
				flen := len(frame)
				frame = append(frame, "padding"...)
				before := slices.Clone(frame)
				head, rest := frame, [][]byte(nil)
				if c.split > 0 {
					head, rest = frame[:c.split], [][]byte{frame[c.split : c.split+3], frame[c.split+3:]}
				}
				if c.lost {
					rest = rest[:1]
				}
				h := Parse(head, flen)
				if got := h.ReplyICMPEcho(rest...); got != c.reply {
					t.Fatalf("%d bytes: reply %v, want %v", len(payload), got, c.reply)
				}
				if !c.reply {
					if !bytes.Equal(frame, before) {
						t.Errorf("%d bytes: the frame was changed", len(payload))
					}
					continue
				}
				reply := decodeReply(t, frame)
				if ip := reply.NetworkLayer().(*layers.IPv4); ip.TTL != 64 || !h.IPv4.ChecksumValid() {
					t.Errorf("%d bytes: %d hops, want 64; checksum right %v", len(payload), ip.TTL, h.IPv4.ChecksumValid())
				}
				icmp := reply.Layer(layers.LayerTypeICMPv4).(*layers.ICMPv4)
				if icmp.TypeCode != 0 || icmp.Id != 77 || icmp.Seq != 3 || !bytes.Equal(icmp.Payload, payload) {
					t.Errorf("%d bytes: reply %+v", len(payload), icmp)
				}
				if naive(frame[34:flen]) != 0xffff {
					t.Errorf("%d bytes: checksum %#x is wrong", len(payload), icmp.Checksum)
				}
			}
		})
	}
}

func TestRepliesAreRefusedWhereTheyMustNotGo(t *testing.T) {
	for _, c := range []struct {
		name  string
		off   int
		v     []byte
		reply bool
	}{
		{"unicast", 0, nil, true},
		{"to the broadcast MAC address", 0, []byte{255, 255, 255, 255, 255, 255}, false},
		{"to a multicast MAC address", 0, []byte{1, 0, 0x5e}, false},
		{"from a multicast MAC address", 6, []byte{1}, false},
		{"to a locally administered MAC address", 0, []byte{6}, true},
		{"to 255.255.255.255", 30, []byte{255, 255, 255, 255}, false},
		{"to 224.0.0.1", 30, []byte{224, 0, 0, 1}, false},
		{"to 239.255.255.255", 30, []byte{239, 255, 255, 255}, false},
		{"to 223.255.255.255", 30, []byte{223, 255, 255, 255}, true},
		{"to 240.0.0.1", 30, []byte{240, 0, 0, 1}, true},
		{"from 0.0.0.0", 26, []byte{0, 0, 0, 0}, false},
		{"from 1.0.0.0", 26, []byte{1, 0, 0, 0}, true},
		{"from 224.0.0.1", 26, []byte{224, 0, 0, 1}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, proto := range []uint8{ProtocolUDP, ProtocolICMP} {
				frame := poke(build(t, spec{proto: proto}), c.off, c.v...)
				resum(frame)
				if h := Parse(frame, len(frame)); h.UDP != nil {
					c, _ := h.UDPChecksum()
					h.UDP.SetChecksum(c)
				}
				before := slices.Clone(frame)
				h := Parse(frame, len(frame))
				got := h.ReplyICMPEcho()
				if proto == ProtocolUDP {
					got = h.ReplyUDP()
				}
				if got != c.reply || got == bytes.Equal(frame, before) {
					t.Errorf("protocol %d: reply %v, want %v; changed %v", proto, got, c.reply, !bytes.Equal(frame, before))
				}
			}
		})
	}
	for _, proto := range []uint8{ProtocolTCP, ProtocolUDP, ProtocolICMP} {
		frame := build(t, spec{proto: proto})
		h := Parse(frame, len(frame))
		if proto != ProtocolUDP && h.ReplyUDP() || proto != ProtocolICMP && h.ReplyICMPEcho() {
			t.Errorf("a frame of protocol %d was answered as another", proto)
		}
	}
	var h Headers
	if _, ok := h.UDPChecksum(); ok || h.ReplyUDP() || h.ReplyICMPEcho() || h.UDPChecksumPartial() || h.UDPChecksumValid() {
		t.Error("no headers, but an answer")
	}
}

func TestNothingAllocates(t *testing.T) {
	udp := build(t, spec{proto: ProtocolUDP, payload: make([]byte, 1416)})
	complete := slices.Clone(udp)
	icmp := build(t, spec{proto: ProtocolICMP, payload: make([]byte, 1416)})
	var sink uint16
	for name, f := range map[string]func(){
		"ReplyUDP": func() {
			h := Parse(udp, len(udp))
			h.UDP.SetChecksum(h.pseudo().Folded())
			if !h.ReplyUDP() {
				t.Error("no reply")
			}
		},
		"ReplyUDP with a complete checksum over buffers": func() {
			h := Parse(complete[:101], len(complete))
			if !h.ReplyUDP(complete[101:]) {
				t.Error("no reply")
			}
		},
		"UDPChecksum over buffers": func() {
			h := Parse(udp[:100], len(udp))
			c, ok := h.UDPChecksum(udp[100:201], udp[201:])
			if !ok {
				t.Error("no checksum")
			}
			h.UDP.SetChecksum(c)
			if !h.UDPChecksumValid(udp[100:201], udp[201:]) {
				t.Error("not valid")
			}
		},
		"ReplyICMPEcho": func() {
			h := Parse(icmp[:101], len(icmp))
			if !h.ReplyICMPEcho(icmp[101:]) {
				t.Error("no reply")
			}
			h.ICMP.SetType(ICMPEchoRequest)
			h.ICMP.SetChecksum(UpdateChecksum16(h.ICMP.Checksum(), 0, 0x0800))
			h.IPv4.SetChecksum(h.IPv4.HeaderChecksum())
		},
		"ChecksumOf": func() { sink += ChecksumOf(udp, icmp) },
		"Checksum": func() {
			var c Checksum
			c.Add(udp[:33])
			c.AddPseudo(clientIP, nicIP, ProtocolUDP, 100)
			sink += c.Value()
		},
	} {
		if n := testing.AllocsPerRun(100, f); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func FuzzParse(f *testing.F) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, s := range []spec{
		{proto: ProtocolUDP, payload: random(r, 30)},
		{proto: ProtocolUDP, options: random(r, 40)},
		{proto: ProtocolICMP, payload: random(r, 31)},
		{proto: ProtocolTCP, payload: random(r, 5)},
		{proto: ProtocolUDP, frag: 3, flags: layers.IPv4MoreFragments, payload: random(r, 16)},
		{proto: 47, payload: random(r, 16)},
		{proto: ProtocolUDP, etype: layers.EthernetTypeDot1Q},
		{proto: ProtocolUDP, etype: layers.EthernetTypeARP},
	} {
		frame := build(f, s)
		f.Add(frame, len(frame))
		f.Add(frame[:40], len(frame))
		f.Add(frame, len(frame)-1)
		f.Add(append(frame, make([]byte, 18)...), len(frame)+18)
	}
	f.Fuzz(func(t *testing.T, head []byte, frameLen int) {
		before := slices.Clone(head)
		h := Parse(head, frameLen)
		checkInvariants(t, head, frameLen, h)
		h.UDPChecksumPartial()
		h.UDPChecksumValid()
		if !bytes.Equal(head, before) {
			t.Fatal("reading changed the frame")
		}
		if len(head) > 0 && frameLen == len(head) {
			compare(t, head, h)
		}

		// Replying twice must give the frame back, but for checksums.
		valid := h.UDPChecksumValid()
		wasPartial := h.UDPChecksumPartial()
		if h.ReplyUDP() {
			if h.Contiguous() && (valid || wasPartial) && !h.UDPChecksumValid() {
				t.Error("the reply's checksum is wrong")
			}
			h.Ethernet.Swap()
			h.IPv4.SwapAddrs()
			h.UDP.SwapPorts()
			h.UDP.SetChecksum(UDP(before[h.Transport:]).Checksum())
		}
		if h.ReplyICMPEcho() {
			m := head[h.Transport : EthernetLen+h.IPv4.TotalLen()]
			if naive(m) != 0xffff && naive(m) != 0 {
				t.Error("the reply's checksum is wrong")
			}
			h.Ethernet.Swap()
			h.IPv4.SwapAddrs()
			h.ICMP.SetType(ICMPEchoRequest)
			h.ICMP.SetChecksum(ICMP(before[h.Transport:]).Checksum())
			if h.IPv4.TTL() != 64 || !h.IPv4.ChecksumValid() {
				t.Errorf("the reply has %d hops, the checksum of its header is right: %v", h.IPv4.TTL(), h.IPv4.ChecksumValid())
			}
			was := IPv4(before[EthernetLen:])
			h.IPv4.SetTTL(was.TTL())
			h.IPv4.SetChecksum(was.Checksum())
		}
		if !bytes.Equal(head, before) {
			t.Error("a reply changed more than addresses, ports, type, hops and checksum")
		}
	})
}

func BenchmarkParse(b *testing.B) {
	frame := build(b, spec{proto: ProtocolUDP, payload: make([]byte, 16)})
	for b.Loop() {
		h := Parse(frame, len(frame))
		if h.UDP == nil {
			b.Fatal("no UDP")
		}
	}
}

func BenchmarkReplyICMPEcho1416(b *testing.B) {
	frame := build(b, spec{proto: ProtocolICMP, payload: make([]byte, 1416)})
	h := Parse(frame, len(frame))
	b.SetBytes(1416)
	for b.Loop() {
		if !h.ReplyICMPEcho() {
			b.Fatal("no reply")
		}
		h.ICMP.SetType(ICMPEchoRequest)
		h.ICMP.SetChecksum(h.ICMP.Checksum() - 0x0800)
	}
}

// source changes where an IPv4 packet comes from.
func source(f []byte, addr ...byte) {
	ip := IPv4(f[EthernetLen:])
	ip.SetSrc([4]byte(addr))
	ip.SetChecksum(ip.HeaderChecksum())
	if h := Parse(f, len(f)); h.UDP != nil {
		sum, _ := h.UDPChecksum()
		h.UDP.SetChecksum(sum)
	}
}

// Turn does what the replies do, and leaves the checksum to somebody else.
func TestTurn(t *testing.T) {
	for _, c := range []struct {
		name   string
		proto  uint8
		change func(frame []byte)
		reply  bool
	}{
		{"a datagram", ProtocolUDP, nil, true},
		{"a partial checksum", ProtocolUDP, partial, true},
		{"an echo request", ProtocolICMP, nil, true},
		{"an echo reply", ProtocolICMP, func(f []byte) { f[34] = 0; f[36] += 8 }, false},
		{"an echo request with a code", ProtocolICMP, func(f []byte) { f[35] = 1; f[37]-- }, false},
		{"to everybody", ProtocolUDP, func(f []byte) { copy(f[30:], []byte{255, 255, 255, 255}) }, false},
		{"from loopback", ProtocolUDP, func(f []byte) { source(f, 127, 0, 0, 1) }, false},
		{"ping from loopback", ProtocolICMP, func(f []byte) { source(f, 127, 1, 2, 3) }, false},
		{"from nobody", ProtocolUDP, func(f []byte) { source(f, 0, 0, 0, 1) }, false},
		{"from ourselves", ProtocolUDP, func(f []byte) { source(f, f[30:34]...) }, false},
		{"ping to a group", ProtocolICMP, func(f []byte) { f[0] |= 1 }, false},
		{"TCP", ProtocolTCP, nil, false},
	} {
		frame := build(t, spec{proto: c.proto, payload: []byte("payload")})
		if c.change != nil {
			c.change(frame)
		}
		turned, reply := slices.Clone(frame), slices.Clone(frame)
		h := Parse(turned, len(turned))
		if got := h.Turn(); got != c.reply {
			t.Errorf("%s: turned %v, want %v", c.name, got, c.reply)
		}
		at := 40
		r := Parse(reply, len(reply))
		if c.proto == ProtocolICMP {
			at = 36
			r.ReplyICMPEcho()
		} else {
			r.ReplyUDP()
		}
		if c.reply {
			reply[at], reply[at+1] = 0, 0
		}
		if !bytes.Equal(turned, reply) {
			t.Errorf("%s: turned to\n% x, want\n% x", c.name, turned, reply)
		}
	}
}

// Each bit behind the MAC addresses that differs from what was sent is refuted, in one
// piece and in several.
func TestIntact(t *testing.T) {
	for _, proto := range []uint8{ProtocolUDP, ProtocolICMP} {
		frame := build(t, spec{proto: proto, payload: []byte("odd sized")})
		for bit := 8 * 12; bit < 8*len(frame); bit++ {
			if bit == 8*12 {
				h := Parse(frame, len(frame))
				if !h.Intact() {
					t.Fatalf("protocol %d: % x is refuted", proto, frame)
				}
				h = Parse(frame[:45], len(frame))
				if !h.Intact(frame[45:48], frame[48:]) || h.Intact(frame[45:48]) {
					t.Errorf("protocol %d: wrong about a frame in pieces", proto)
				}
			}
			frame[bit/8] ^= 1 << (bit % 8)
			if h := Parse(frame, len(frame)); h.Intact() {
				t.Errorf("protocol %d: bit %d of byte %d is not missed", proto, bit%8, bit/8)
			}
			frame[bit/8] ^= 1 << (bit % 8)
		}
	}
	frame := build(t, spec{proto: ProtocolUDP, payload: []byte("payload")})
	frame[40], frame[41] = 0, 0
	if h := Parse(frame, len(frame)); !h.Intact() {
		t.Error("a datagram without checksum is refuted")
	}
	partial(frame)
	if h := Parse(frame, len(frame)); !h.Intact() {
		t.Error("a datagram with a partial checksum is refuted")
	}
	tcp := build(t, spec{proto: ProtocolTCP, payload: []byte("payload")})
	if h := Parse(tcp, len(tcp)); h.Intact() {
		t.Error("nothing is known of TCP")
	}
}
