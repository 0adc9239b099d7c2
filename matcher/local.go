// SPDX-License-Identifier: Apache-2.0

package matcher

import (
	"encoding/binary"
	"net/netip"
	"slices"
)

// Local is an interface's MAC and its IP addresses. A ruleset with Local set matches
// only frames to them: none that this host is to forward, that a switch has flooded,
// or that are broadcast or multicast.
type Local struct {
	MAC   [6]byte
	Addrs []netip.Addr // at most MaxLocal
}

// Has reports whether a frame is to this host: to its MAC, and if it is an IPv4 or
// IPv6 packet, to one of its addresses. A nil Local has every frame.
func (l *Local) Has(frame []byte) bool {
	if l == nil {
		return true
	}
	if len(frame) < 14 || [6]byte(frame) != l.MAC {
		return false
	}
	at, size := 0, 0
	switch binary.BigEndian.Uint16(frame[12:]) {
	case 0x0800:
		at, size = 30, 4
	case 0x86dd:
		at, size = 38, 16
	default:
		return true
	}
	if len(frame) < at+size {
		return false
	}
	to, _ := netip.AddrFromSlice(frame[at : at+size])
	return slices.ContainsFunc(l.Addrs, func(a netip.Addr) bool { return a.Unmap() == to.Unmap() })
}
