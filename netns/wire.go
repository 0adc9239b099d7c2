// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"
	"fmt"
	"io"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// A veth takes what an XDP program at the other end of its link sends back only if it has
// a program itself. This one lets every frame pass.
const wireProgram = "xspin_wire"

func loadWire() (*ebpf.Program, error) {
	const xdpPass = 2 // XDP_PASS of linux/bpf.h
	return ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: wireProgram, Type: ebpf.XDP, AttachType: ebpf.AttachXDP, License: "Apache-2.0",
		Flags:        unix.BPF_F_XDP_HAS_FRAGS, // or the other end's MTU would be limited
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, xdpPass), asm.Return()},
	})
}

// Wire has a port take what XDP at the other end of its link sends, until the result is
// closed or the process ends.
func (p Port) Wire() (io.Closer, error) {
	l, err := p.wire()
	if err != nil {
		return nil, fmt.Errorf("wire %s in namespace %s: %w", p.Device, p.NS.Name(), err)
	}
	return l, nil
}

func (p Port) wire() (l link.Link, err error) {
	prog, err := loadWire()
	if err != nil {
		return nil, err
	}
	defer prog.Close()
	err = p.NS.Do(func() (err error) {
		l, err = link.AttachXDP(link.XDPOptions{Program: prog, Interface: p.Index, Flags: link.XDPDriverMode})
		return err
	})
	return l, err
}

// Wired tells whether a port takes what XDP at the other end of its link sends: whether it
// has an XDP program in its driver, from whomever.
func (p Port) Wired() (on bool, err error) {
	err = p.NS.Do(func() error {
		l, err := netlink.LinkByIndex(p.Index)
		if err == nil {
			x := l.Attrs().Xdp
			on = x != nil && x.AttachMode == nl.XDP_ATTACHED_DRV
		}
		return err
	})
	if err != nil {
		return false, fmt.Errorf("wire %s in namespace %s: %w", p.Device, p.NS.Name(), err)
	}
	return on, nil
}

// SetWire is Wire for as long as the port is there, or ends that. Another program stays, and
// so does that of a process which has called Wire.
func (p Port) SetWire(on bool) error {
	err := p.NS.Do(func() error {
		l, err := netlink.LinkByIndex(p.Index)
		if err != nil {
			return err
		}
		wired := false
		if x := l.Attrs().Xdp; x != nil && x.Attached {
			old, err := ebpf.NewProgramFromID(ebpf.ProgramID(x.ProgId))
			if err != nil {
				return err
			}
			defer old.Close()
			info, err := old.Info()
			if err != nil {
				return err
			}
			if wired = info.Name == wireProgram; !wired && on {
				return fmt.Errorf("another XDP program is attached: %q", info.Name)
			}
		}
		switch {
		case on && !wired:
			prog, err := loadWire()
			if err != nil {
				return err
			}
			defer prog.Close()
			return netlink.LinkSetXdpFdWithFlags(l, prog.FD(), unix.XDP_FLAGS_UPDATE_IF_NOEXIST|unix.XDP_FLAGS_DRV_MODE)
		case !on && wired:
			err := netlink.LinkSetXdpFdWithFlags(l, -1, unix.XDP_FLAGS_DRV_MODE)
			if errors.Is(err, unix.EBUSY) { // what a link has attached goes with that link
				return nil
			}
			return err
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("wire %s in namespace %s: %w", p.Device, p.NS.Name(), err)
	}
	return nil
}
