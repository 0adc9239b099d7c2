// SPDX-License-Identifier: Apache-2.0

package packet_test

import (
	"encoding/hex"
	"fmt"
	"net/netip"

	"github.com/xspin/xspin/packet"
)

// A handler answers a UDP datagram in the memory it arrived in.
func ExampleHeaders_ReplyUDP() {
	frame, _ := hex.DecodeString("020000000002" + "020000000001" + "0800" +
		"4500001f1234400040111498" + "0a000001" + "0a000002" + // IPv4
		"0fa02472000b0000" + "616263") // UDP, no checksum
	h := packet.Parse(frame, len(frame))
	if h.UDP == nil || !h.ReplyUDP() {
		return // not for this handler
	}
	src := netip.AddrFrom4(h.IPv4.Src())
	dst := netip.AddrFrom4(h.IPv4.Dst())
	fmt.Printf("%s:%d > %s:%d %q\n", src, h.UDP.SrcPort(), dst, h.UDP.DstPort(), h.UDP.Payload())
	fmt.Println("header checksum valid:", h.IPv4.ChecksumValid())
	// Output:
	// 10.0.0.2:9330 > 10.0.0.1:4000 "abc"
	// header checksum valid: true
}
