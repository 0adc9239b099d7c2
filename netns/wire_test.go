// SPDX-License-Identifier: Apache-2.0

package netns_test

import (
	"errors"
	"testing"

	"github.com/vishvananda/netlink"

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
	if _, err := lab.Host.Wire(); err == nil {
		t.Error("wired twice")
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
		if !xdp(t, lab.Host) {
			t.Error("no program")
		}
		if err := errors.Join(lab.Host.SetWire(false), lab.Host.SetWire(false)); err != nil {
			t.Fatal(err)
		}
		if xdp(t, lab.Host) {
			t.Error("the program stays")
		}
	}
}
