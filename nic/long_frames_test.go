// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// Frames in several buffers go to Linux, and both sides say so: the NIC as long as its interface
// lets them come, and the sender when Linux has answered that nobody listens.
func TestLongFramesAreToldOf(t *testing.T) {
	const most = 4096 - 256 - 320 - 14 // MTU of what is in one page
	if os.Getpagesize() != 4096 {
		t.Skip("the numbers are of pages of 4096 bytes")
	}
	lab := netnstest.Temp(t, netns.LabConfig{MTU: 9000})
	wire(t, lab)
	var log bytes.Buffer // written by Activate only
	n := open(t, lab, nic.Config{HPUs: 1, Hook: nic.HookXDP, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	spec, _, events := depositing(t, 1<<20)
	c := run(t, n, spec)
	said := func() (all string) { return strings.Join(statsOf(t, n, c).Warnings, "\n") }
	for _, text := range []string{said(), log.String()} {
		if !strings.Contains(text, fmt.Sprintf("the MTU of 9000 lets frames come in several buffers: handlers in eBPF get those in one, of up to some %d bytes", most+14)) || !strings.Contains(text, fmt.Sprintf("lower the MTU to %d", most)) {
			t.Errorf("the NIC says %q", text)
		}
	}
	conn := connect(t, lab, slmp.Port, slmp.Config{Offload: slmp.OffloadNone})
	_, err := conn.SendBytes(t.Context(), noise(20000), slmp.Options{})
	if !errors.Is(err, slmp.ErrRefused) || !strings.Contains(err.Error(), "If one does at hook xdp, its NIC has left the segments to Linux: their frames have 9014 bytes") {
		t.Errorf("the sender says: %v", err)
	}
	if s := stats(t, n); s.Program.Oversize == 0 {
		t.Errorf("%+v", s.Program)
	}

	// What both say helps: shorter segments, or a smaller MTU.
	send := func(how string, cfg slmp.Config) {
		t.Helper()
		conn := connect(t, lab, slmp.Port, cfg)
		if _, err := conn.SendBytes(t.Context(), noise(20000), slmp.Options{}); err != nil {
			t.Errorf("%s: %v", how, err)
		} else if e := nextEvent(t, events); e.Cause != spin.Complete || e.Length != 20000 {
			t.Errorf("%s: event %+v", how, e)
		}
	}
	send("shorter segments", slmp.Config{Payload: most + 14 - 52})
	for _, p := range []netns.Port{lab.NIC, lab.Host} {
		onLink(t, p, func(l netlink.Link) error { return netlink.LinkSetMTU(l, most) })
	}
	eventually(t, "the NIC says nothing any more", func() bool { return said() == "" })
	send("a smaller MTU", slmp.Config{})

	// A context on HPUs takes frames in several buffers.
	echo := run(t, n, nic.ContextSpec{Name: "echo", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(echoAll)})
	onLink(t, lab.NIC, func(l netlink.Link) error { return netlink.LinkSetMTU(l, most+1) })
	eventually(t, "the NIC says it again", func() bool { return said() != "" })
	if s := statsOf(t, n, echo); len(s.Warnings) != 0 {
		t.Errorf("of a context on HPUs it says %q", s.Warnings)
	}
}
