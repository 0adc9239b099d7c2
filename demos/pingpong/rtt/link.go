// SPDX-License-Identifier: Apache-2.0

package rtt

import (
	"fmt"
	"runtime"
	"unsafe"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/netns"
)

// LinkState is what of an interface decides how fast packets pass it.
type LinkState struct {
	Device     string `json:"device"`
	MTU        int    `json:"mtu"`              // bytes
	XDP        string `json:"xdp"`              // none, native, generic, offloaded or several
	XDPProgram uint32 `json:"xdp_id,omitempty"` // id of the program, 0 if none or several
	TSO        OnOff  `json:"tso"`              // TCP segmentation offload
	GSO        OnOff  `json:"gso"`              // generic segmentation offload
	GRO        OnOff  `json:"gro"`              // generic receive offload
	TxChecksum OnOff  `json:"tx_checksum"`      // offloaded: checksums on a veth are partial
}

// OnOff is a bool that is printed as on or off.
type OnOff bool

func (b OnOff) String() string {
	if b {
		return "on"
	}
	return "off"
}

// Checksums says how frames leave the interface.
func (s LinkState) Checksums() string {
	if s.TxChecksum {
		return "partial"
	}
	return "real"
}

// ReadLinks reads both ends of a lab, the NIC's first.
func ReadLinks(lab *netns.Lab) ([]LinkState, error) {
	var states []LinkState
	for _, p := range []netns.Port{lab.NIC, lab.Host} {
		if err := p.NS.Do(func() error {
			s, err := ReadLink(p.Device)
			states = append(states, s)
			return err
		}); err != nil {
			return nil, err
		}
	}
	return states, nil
}

// ReadLink reads the state of an interface in the network namespace of the
// calling thread.
func ReadLink(device string) (LinkState, error) {
	l, err := netlink.LinkByName(device)
	if err != nil {
		return LinkState{}, fmt.Errorf("read interface %s: %w", device, err)
	}
	s := LinkState{Device: device, MTU: l.Attrs().MTU, XDP: "none"}
	if x := l.Attrs().Xdp; x != nil && x.Attached {
		s.XDP, s.XDPProgram = attachMode(x.AttachMode), x.ProgId
	}

	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return LinkState{}, fmt.Errorf("open ethtool socket: %w", err)
	}
	defer unix.Close(fd)
	for _, f := range []struct {
		cmd uint32
		on  *OnOff
	}{
		{unix.ETHTOOL_GTSO, &s.TSO},
		{unix.ETHTOOL_GGSO, &s.GSO},
		{unix.ETHTOOL_GGRO, &s.GRO},
		{unix.ETHTOOL_GTXCSUM, &s.TxChecksum},
	} {
		if *f.on, err = ethtoolFlag(fd, device, f.cmd); err != nil {
			return LinkState{}, err
		}
	}
	return s, nil
}

func attachMode(m uint32) string {
	switch m {
	case nl.XDP_ATTACHED_DRV:
		return "native"
	case nl.XDP_ATTACHED_SKB:
		return "generic"
	case nl.XDP_ATTACHED_HW:
		return "offloaded"
	}
	return "several" // XDP_ATTACHED_MULTI
}

// ethtoolFlag asks one on/off question. A driver that does not know the
// question has not got the feature.
func ethtoolFlag(fd int, device string, cmd uint32) (OnOff, error) {
	value := struct{ cmd, data uint32 }{cmd: cmd} // struct ethtool_value
	req := struct {                               // struct ifreq
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: unsafe.Pointer(&value)}
	copy(req.name[:unix.IFNAMSIZ-1], device)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req)))
	runtime.KeepAlive(&value)
	if errno != 0 && errno != unix.EOPNOTSUPP {
		return false, fmt.Errorf("ethtool request %#x on %s: %w", cmd, device, errno)
	}
	return errno == 0 && value.data != 0, nil
}
