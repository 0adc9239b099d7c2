// SPDX-License-Identifier: Apache-2.0

package matcher

import (
	"errors"
	"fmt"
)

// CheckTrain returns why the ruleset cannot be matched after Linux has taken a frame in: there a VLAN tag is out of the
// frame, and a train, several packets of one flow in one frame, is matched by the first of them. nil: all packets of a
// train match alike.
func (rs *Ruleset) CheckTrain() error {
	e, fixed := rs.EtherType()
	if fixed && (e == 0x8100 || e == 0x88a8) {
		return errors.New("it asks for a VLAN tag, which Linux has taken out of the frame by then")
	}
	v4, v6 := !fixed || e == 0x0800, !fixed || e == 0x86dd
	if p, ok := rs.fixed(5, 0xff); ok && v4 && !v6 && p != protoUDP && p != protoTCP {
		return nil
	}
	for i, r := range rs.Rules {
		if r.onlyNeeds() {
			continue
		}
		if v4 && r.Mask&ownIPv4(r.Index) != 0 || v6 && r.Mask&ownIPv6(r.Index) != 0 {
			return fmt.Errorf("its rule %d looks at bytes in word %d that differ from packet to packet of a train, and a train is matched by its first packet", i, r.Index)
		}
	}
	return nil
}

// ownIPv4 returns the bits of a word in which packets of one UDP or TCP flow over IPv4 differ: length and identification,
// header checksum, and all from the UDP length.
func ownIPv4(word int) uint32 {
	switch {
	case word == 4 || word >= 10:
		return 0xffffffff
	case word == 6:
		return 0xffff0000
	case word == 9:
		return 0x0000ffff
	}
	return 0
}

// ownIPv6 is ownIPv4 for IPv6: payload length, and all from the UDP length.
func ownIPv6(word int) uint32 {
	switch {
	case word >= 15:
		return 0xffffffff
	case word == 4 || word == 14:
		return 0x0000ffff
	}
	return 0
}
