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
// closed or the process ends. What SetWire has put there will do, and stays.
func (p Port) Wire() (io.Closer, error) {
	l, err := p.wire()
	if err != nil {
		return nil, fmt.Errorf("wire %s in namespace %s: %w", p.Device, p.NS.Name(), err)
	}
	return l, nil
}

func (p Port) wire() (w io.Closer, err error) {
	prog, err := loadWire()
	if err != nil {
		return nil, err
	}
	defer prog.Close()
	err = p.NS.Do(func() error {
		l, err := link.AttachXDP(link.XDPOptions{Program: prog, Interface: p.Index, Flags: link.XDPDriverMode})
		if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST) { // the latter of a generic one
			w = wired{}
			return p.lasting()
		}
		w = l
		return err
	})
	if err != nil {
		return nil, err
	}
	return w, nil
}

// wired is the wire of a port that has one without it.
type wired struct{}

func (wired) Close() error { return nil }

// lasting returns an error unless the port's program is one that SetWire has put there. It
// runs in the port's namespace.
func (p Port) lasting() error {
	l, err := netlink.LinkByIndex(p.Index)
	if err != nil {
		return err
	}
	prog, name, err := attached(l)
	if err != nil {
		return err
	}
	if prog == nil {
		return errors.New("an XDP program was attached, and is gone: try again")
	}
	defer prog.Close()
	if name != wireProgram {
		return foreign(name)
	}
	// Puts it in its own place, which the kernel refuses while a link of some process holds it.
	err = netlink.LinkSetXdpFdWithFlags(l, prog.FD(), unix.XDP_FLAGS_DRV_MODE)
	if errors.Is(err, unix.EBUSY) {
		return errors.New("another process has wired it, and would end that when it ends: stop it, or let xspin lab up --wire do it beforehand")
	}
	return err
}

// attached returns a link's XDP program and its name, or nil if there is none.
func attached(l netlink.Link) (prog *ebpf.Program, name string, err error) {
	x := l.Attrs().Xdp
	if x == nil || !x.Attached {
		return nil, "", nil
	}
	if prog, err = ebpf.NewProgramFromID(ebpf.ProgramID(x.ProgId)); err != nil {
		return nil, "", err
	}
	info, err := prog.Info()
	if err != nil {
		return nil, "", errors.Join(err, prog.Close())
	}
	return prog, info.Name, nil
}

// foreign is the error of a port that has a program which is not a wire's.
func foreign(name string) error {
	return fmt.Errorf("another XDP program is attached, %q: stop what attached it, or make the lab anew (xspin lab down, xspin lab up --wire)", name)
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
		old, name, err := attached(l)
		if err != nil {
			return err
		}
		wired := name == wireProgram
		if old != nil {
			defer old.Close()
			if !wired && on {
				return foreign(name)
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
