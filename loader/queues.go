// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"net"

	"github.com/vishvananda/netlink"

	"github.com/xspin/xspin/internal/ethtool"
)

// Queues returns how many receive queues of the interface are in use. The
// calling thread must be in the interface's network namespace.
func Queues(iface *net.Interface) (int, error) {
	n, err := ethtool.RxQueues(iface.Name)
	if err != nil || n > 0 {
		return n, err
	}
	// The driver does not tell: then all that the device has.
	l, err := netlink.LinkByIndex(iface.Index)
	if err != nil {
		return 0, fmt.Errorf("queues of %s: %w", iface.Name, err)
	}
	return max(l.Attrs().NumRxQueues, 1), nil
}
