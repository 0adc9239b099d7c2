// SPDX-License-Identifier: Apache-2.0

package rtt

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"

	"github.com/xspin/xspin/internal/ethtool"
	"github.com/xspin/xspin/netns"
)

// ErrXDP is returned, wrapped, when an XDP program on one end of a lab would spoil a
// comparison with Linux.
var ErrXDP = errors.New("an XDP program is in the way of the comparison")

// LinkState is the state of an interface that decides how fast packets pass it.
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

// NoXDP returns an error if one of the interfaces has an XDP program.
func NoXDP(states []LinkState) error {
	for _, s := range states {
		if s.XDP != "none" {
			return fmt.Errorf("%w: %s has one (%s, id %d): stop what attached it; xspin lab up takes off what xspin lab up --wire has put there",
				ErrXDP, s.Device, s.XDP, s.XDPProgram)
		}
	}
	return nil
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

	for _, f := range []struct {
		feature ethtool.Feature
		on      *OnOff
	}{
		{ethtool.TSO, &s.TSO},
		{ethtool.GSO, &s.GSO},
		{ethtool.GRO, &s.GRO},
		{ethtool.TxChecksum, &s.TxChecksum},
	} {
		on, err := f.feature.Enabled(device)
		if err != nil {
			return LinkState{}, err
		}
		*f.on = OnOff(on)
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
