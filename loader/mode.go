// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"encoding/binary"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Generic netlink's family netdev: linux/netdev.h.
const (
	netdevGet         = 1 // NETDEV_CMD_DEV_GET
	netdevIfindex     = 1
	netdevXDPFeatures = 3
	xdpBasic          = 1 << 0 // the driver runs XDP programs, and knows their verdicts
)

// DriverMode tells which mode Auto comes to on an interface: Native, if its driver says that it has XDP, or Generic.
// Nothing is attached for that.
func DriverMode(iface *net.Interface) (Mode, error) {
	fail := func(err error) (Mode, error) {
		return Auto, fmt.Errorf("XDP features of %s: %w", iface.Name, err)
	}
	family, err := netlink.GenlFamilyGet("netdev")
	if err != nil {
		return fail(err)
	}
	r := nl.NewNetlinkRequest(int(family.ID), 0)
	// nl.Genlmsg has two bytes and writes four: the kernel wants the others to be 0.
	r.AddRawData(append([]byte{netdevGet, 1, 0, 0}, nl.NewRtAttr(netdevIfindex, nl.Uint32Attr(uint32(iface.Index))).Serialize()...))
	answers, err := r.Execute(unix.NETLINK_GENERIC, 0)
	if err != nil {
		return fail(err)
	}
	for _, a := range answers {
		if len(a) < nl.SizeofGenlmsg {
			continue
		}
		attrs, err := nl.ParseRouteAttr(a[nl.SizeofGenlmsg:])
		if err != nil {
			return fail(err)
		}
		for _, attr := range attrs {
			if attr.Attr.Type == netdevXDPFeatures && len(attr.Value) == 8 && binary.NativeEndian.Uint64(attr.Value)&xdpBasic != 0 {
				return Native, nil
			}
		}
	}
	return Generic, nil
}
