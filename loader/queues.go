// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"net"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ethtoolChannels is struct ethtool_channels of linux/ethtool.h.
type ethtoolChannels struct {
	Cmd                                         uint32
	MaxRx, MaxTx, MaxOther, MaxCombined         uint32
	RxCount, TxCount, OtherCount, CombinedCount uint32
}

// Queues returns how many receive queues of the interface are in use. The
// calling thread must be in the interface's network namespace.
func Queues(iface *net.Interface) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("queues of %s: socket: %w", iface.Name, err)
	}
	defer unix.Close(fd)
	ch := ethtoolChannels{Cmd: unix.ETHTOOL_GCHANNELS}
	req := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: unsafe.Pointer(&ch)}
	copy(req.name[:], iface.Name)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req)))
	if n := int(ch.RxCount + ch.CombinedCount); errno == 0 && n > 0 {
		return n, nil
	}
	// The driver does not tell: then all that the device has.
	l, err := netlink.LinkByIndex(iface.Index)
	if err != nil {
		return 0, fmt.Errorf("queues of %s: %w", iface.Name, err)
	}
	return max(l.Attrs().NumRxQueues, 1), nil
}
