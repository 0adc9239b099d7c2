// SPDX-License-Identifier: Apache-2.0

package netns_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
)

// xdp tells whether a port has an XDP program.
func xdp(t *testing.T, p netns.Port) (on bool) {
	t.Helper()
	if err := p.NS.Do(func() error {
		l, err := netlink.LinkByIndex(p.Index)
		if err == nil {
			on = l.Attrs().Xdp != nil && l.Attrs().Xdp.Attached
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if wired, err := p.Wired(); err != nil || wired != on {
		t.Errorf("wired: %t, %v; want %t", wired, err, on)
	}
	return on
}

// That frames come through is seen where handlers in eBPF answer, in nic and daemon.
func TestWire(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	w, err := lab.Host.Wire()
	if err != nil {
		t.Fatal(err)
	}
	if !xdp(t, lab.Host) || xdp(t, lab.NIC) {
		t.Error("the host's end has no program, or the NIC's has one")
	}
	if _, err := lab.Host.Wire(); err == nil || !strings.Contains(err.Error(), "lab up --wire") {
		t.Errorf("wired by two processes: %v", err)
	}
	// lab up leaves the wire of a demo that runs.
	if err := errors.Join(lab.Host.SetWire(true), lab.Host.SetWire(false)); err != nil || !xdp(t, lab.Host) {
		t.Errorf("error %v, program there: %t", err, xdp(t, lab.Host))
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := errors.Join(lab.Host.SetWire(true), lab.Host.SetWire(true)); err != nil {
			t.Fatal(err)
		}
		// A demo takes what lab up has put there, and leaves it.
		w, err := lab.Host.Wire()
		if err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil || !xdp(t, lab.Host) {
			t.Errorf("error %v, program there: %t", err, xdp(t, lab.Host))
		}
		if err := errors.Join(lab.Host.SetWire(false), lab.Host.SetWire(false)); err != nil {
			t.Fatal(err)
		}
		if xdp(t, lab.Host) {
			t.Error("the program stays")
		}
	}
}

// A program of somebody else stays, and the error says what to do.
func TestWireLeavesOtherPrograms(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "somebody", Type: ebpf.XDP, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer prog.Close()
	for _, mode := range []int{unix.XDP_FLAGS_DRV_MODE, unix.XDP_FLAGS_SKB_MODE} {
		set := func(fd int) {
			t.Helper()
			if err := lab.Host.NS.Do(func() error {
				l, err := netlink.LinkByIndex(lab.Host.Index)
				if err != nil {
					return err
				}
				return netlink.LinkSetXdpFdWithFlags(l, fd, mode)
			}); err != nil {
				t.Fatal(err)
			}
		}
		set(prog.FD())
		_, err = lab.Host.Wire()
		for _, err := range []error{err, lab.Host.SetWire(true)} {
			if err == nil || !strings.Contains(err.Error(), "somebody") || !strings.Contains(err.Error(), "xspin lab down") {
				t.Errorf("error %v", err)
			}
		}
		if err := lab.Host.SetWire(false); err != nil {
			t.Error(err)
		}
		set(-1) // it is still there, or this would fail
	}
}
