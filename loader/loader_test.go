// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"net"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/netns"
)

// inside runs fn on a thread in the namespace of a port.
func inside(t *testing.T, p netns.Port, fn func(iface *net.Interface)) {
	t.Helper()
	if err := p.NS.Do(func() error {
		iface, err := net.InterfaceByName(p.Device)
		if err == nil {
			fn(iface)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// foreign attaches a program of somebody else's for the rest of the test.
func foreign(t *testing.T, iface *net.Interface, mode Mode) (id ebpf.ProgramID, detach func()) {
	t.Helper()
	spec, err := bpf.LoadBench()
	if err != nil {
		t.Fatal(err)
	}
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(coll.Close)
	prog := coll.Programs[bpf.BenchProgXspinPass]
	info, err := prog.Info()
	if err != nil {
		t.Fatal(err)
	}
	flags := link.XDPDriverMode
	if mode == Generic {
		flags = link.XDPGenericMode
	}
	l, err := link.AttachXDP(link.XDPOptions{Program: prog, Interface: iface.Index, Flags: flags})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	id, _ = info.ID()
	return id, func() { l.Close() }
}
