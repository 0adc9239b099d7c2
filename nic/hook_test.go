// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/internal/ethtool"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/loader/objecttest"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// cuts tells whether senders at the other end of a lab have to cut their TCP.
func cuts(t testing.TB, lab *netns.Lab) bool {
	t.Helper()
	var on bool
	if err := lab.Host.NS.Do(func() (err error) {
		on, err = ethtool.TSO.Enabled(lab.Host.Device)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return !on
}

// A NIC at tc has a program at xdp for as long as a context needs one, and so long only the other end's offloads are gone.
func TestXDPIsThereForWhoNeedsIt(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	if cuts(t, lab) {
		t.Fatal("the other end has no TSO to begin with")
	}
	n := open(t, lab, nic.Config{Hook: nic.HookTC})
	n.SetHookPatience(10 * time.Millisecond)
	kernel := run(t, n, builtin(t, "echo-udp", matcher.UDPPort(7)))
	conn := dialUDP(t, lab, 7)
	answers := func() {
		t.Helper()
		if got := ask(t, conn, []byte("hello")); string(got) != "hello" {
			t.Errorf("%q", got)
		}
	}
	answers()
	triggered := run(t, n, nic.ContextSpec{Name: "triggered", HostActivated: true, Handlers: handle(echo)})
	if s := statsOf(t, n, triggered); s.Hook != "" || s.HookWhy != "" {
		t.Errorf("a context without packets is at %q: %s", s.Hook, s.HookWhy)
	}
	if s := statsOf(t, n, kernel); cuts(t, lab) || stats(t, n).Mode != "off" || s.Hook != "tc" || s.HookWhy != "" {
		t.Errorf("TSO is gone: %v; XDP is %s, the context at %s", cuts(t, lab), stats(t, n).Mode, s.Hook)
	}
	for range 2 {
		user := run(t, n, nic.ContextSpec{Name: "user", Rulesets: sets(matcher.UDPPort(8)), Handlers: handle(echo)})
		if s := statsOf(t, n, user); !cuts(t, lab) || stats(t, n).Mode != "native" || s.Hook != "xdp" || !strings.Contains(s.HookWhy, "handlers are on HPUs") {
			t.Errorf("TSO is gone: %v; XDP is %s, the context at %s: %s", cuts(t, lab), stats(t, n).Mode, s.Hook, s.HookWhy)
		}
		answers()
		if got := ask(t, dialUDP(t, lab, 8), []byte("user")); string(got) != "user" {
			t.Errorf("%q", got)
		}
		p := stats(t, n).Program
		if p.Seen != p.Passed+p.Redirected+p.Kernel+p.Failed+p.Malformed+p.Oversize+p.Trains+p.Refused+p.Spilled {
			t.Errorf("%+v", p)
		}
		if err := n.Remove(user); err != nil {
			t.Fatal(err)
		}
		eventually(t, "TSO is back", func() bool { return !cuts(t, lab) })
		answers()
	}
	explicit := builtin(t, "echo-udp", matcher.UDPPort(9))
	explicit.Name, explicit.Hook = "explicit", nic.HookXDP
	c := run(t, n, explicit)
	wire(t, lab)
	if s := statsOf(t, n, c); s.Hook != "xdp" || s.HookWhy != "it asks for that" || string(ask(t, dialUDP(t, lab, 9), []byte("x"))) != "x" {
		t.Errorf("%+v", s)
	}
	wrong := nic.ContextSpec{Name: "user", Hook: nic.HookTC, Rulesets: sets(matcher.UDPPort(10)), Handlers: handle(echo)}
	if _, err := n.Install(wrong); err == nil || !strings.Contains(err.Error(), "tc: its handlers are on HPUs") {
		t.Error(err)
	}
}

// The lowest-numbered ruleset decides, whichever hook its context is at.
func TestRulesetsOfBothHooks(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{Hook: nic.HookTC})
	wire(t, lab)
	at := func(hook nic.Hook, name string, first int) *nic.Context {
		spec := builtin(t, name, matcher.UDPPort(7))
		spec.Name, spec.Hook, spec.First = fmt.Sprint(name, hook, first), hook, first
		return run(t, n, spec)
	}
	conn := dialUDP(t, lab, 7)
	var last *nic.Context
	for i, hook := range []nic.Hook{nic.HookXDP, nic.HookTC, nic.HookXDP, nic.HookTC} {
		last = at(hook, "echo-udp", 20-i)
		for k := range 10 {
			if got := ask(t, conn, []byte{byte(k)}); got[0] != byte(k) {
				t.Error(got)
			}
		}
		if s := last.Stats(); s.Handled != 10 {
			t.Errorf("ruleset %d, at %v: %d handled, want 10", 20-i, hook, s.Handled)
		}
	}
	if s := statsOf(t, n, last); s.Rulesets[0].Matched != 10 {
		t.Errorf("%+v", s.Rulesets)
	}
	if p := stats(t, n).Program; p.Kernel != 40 || p.Seen != p.Kernel+p.Passed+p.Malformed {
		t.Errorf("%+v", p)
	}
}

// Messages come to tc in trains.
func TestMessagesInTrains(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{Hook: nic.HookTC})
	const size = 4 << 20
	spec, w, events := depositing(t, size)
	c := run(t, n, spec)
	msg := make([]byte, size)
	rng := rand.New(rand.NewPCG(1, 1))
	for i := range msg {
		msg[i] = byte(rng.Uint32())
	}
	for _, plain := range []bool{false, true} {
		var conn *slmp.Conn
		if err := lab.Host.NS.Do(func() (err error) {
			conn, err = slmp.Dial(context.Background(), netip.AddrPortFrom(lab.NIC.Addr.Addr(), slmp.Port).String(), slmp.Config{Plain: plain})
			return err
		}); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			if _, err := w.WriteAt(make([]byte, size), 0); err != nil {
				t.Fatal(err)
			}
			if _, err := conn.SendBytes(t.Context(), msg, slmp.Options{}); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, size)
			e := <-events
			if _, err := w.ReadAt(got, 0); err != nil || e.Cause != spin.Complete || e.Length != size || !bytes.Equal(got, msg) {
				t.Errorf("%v, %+v", err, e)
			}
		}
		conn.Close()
	}
	if s := statsOf(t, n, c); s.Hook != "tc" || s.Failed != 0 || s.AckFull != 0 {
		t.Errorf("%+v", s)
	}
	p := stats(t, n).Program
	if segments := c.Stats().Handled; p.Kernel >= segments/4 {
		t.Errorf("%d segments came in %d frames: the sender's trains are cut before", segments, p.Kernel)
	}
}

// Linux joins datagrams that came alone, and a context at tc takes them apart.
func TestTrainsThatLinuxHasJoined(t *testing.T) {
	testenv.NeedTime(t) // datagrams have to come while GRO waits
	lab := netnstest.Temp(t, netns.LabConfig{})
	if err := lab.NIC.NS.Do(func() error {
		return errors.Join(ethtool.GRO.Enable(lab.NIC.Device, true), ethtool.UDPForwarding.Enable(lab.NIC.Device, true))
	}); err != nil {
		t.Fatal(err)
	}
	// Each datagram is a poll of its own here: GRO has to wait for the next.
	class := "/sys/class/net/" + lab.NIC.Device
	if out, err := exec.Command("ip", "netns", "exec", lab.NIC.NS.Name(), "sh", "-c",
		"echo 2000000 > "+class+"/gro_flush_timeout; echo 1 > "+class+"/napi_defer_hard_irqs").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	n := open(t, lab, nic.Config{Hook: nic.HookTC})
	const size = 1 << 20
	spec, w, events := depositing(t, size)
	c := run(t, n, spec)
	conn := connect(t, lab, slmp.Port, slmp.Config{Offload: slmp.OffloadCalls})
	for i := range 3 {
		msg := noise(size - i)
		if _, err := conn.SendBytes(patient(t), msg, slmp.Options{}); err != nil {
			t.Fatalf("%v\n%+v\n%+v", err, messages(t, c), stats(t, n).Program)
		}
		got := make([]byte, len(msg))
		if e := nextEvent(t, events); e.Cause != spin.Complete || e.Length != uint64(len(msg)) {
			t.Errorf("event %+v", e)
		}
		if _, err := w.ReadAt(got, 0); err != nil || !bytes.Equal(got, msg) {
			t.Errorf("other bytes are in the window, %v", err)
		}
	}
	if s := statsOf(t, n, c); s.Mixed != 0 || s.Uncut != 0 || s.Failed != 0 {
		t.Errorf("%+v", s)
	}
	if p, segments := stats(t, n).Program, c.Stats().Handled; p.Kernel >= segments/2 {
		t.Errorf("%d segments came in %d frames: nothing was joined", segments, p.Kernel)
	}
}

// A filter of somebody else's, of the older kind, gets what XsPIN passes on, and nothing else.
func TestFiltersBesideTC(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	drop, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "drop", Type: ebpf.SchedCLS, License: "Apache-2.0",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2 /* TC_ACT_SHOT */), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer drop.Close()
	n := open(t, lab, nic.Config{Hook: nic.HookTC})
	run(t, n, builtin(t, "echo-udp", matcher.UDPPort(7)))
	var linux *net.UDPConn
	if err := lab.NIC.NS.Do(func() (err error) {
		linux, err = net.ListenUDP("udp4", &net.UDPAddr{Port: 8})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer linux.Close()
	ours, theirs := dialUDP(t, lab, 7), dialUDP(t, lab, 8)
	comes := func(from, at *net.UDPConn) bool {
		t.Helper()
		if _, err := from.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 100)
		at.SetReadDeadline(time.Now().Add(testenv.Slowness() * 300 * time.Millisecond))
		k, err := at.Read(b)
		return err == nil && string(b[:k]) == "hello"
	}
	if !comes(ours, ours) || !comes(theirs, linux) {
		t.Fatal("no echo, or no datagram, before there is a filter")
	}
	filter := &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: lab.NIC.Index, Parent: netlink.HANDLE_MIN_INGRESS, Handle: netlink.MakeHandle(0, 1), Priority: 1, Protocol: unix.ETH_P_ALL},
		Fd:          drop.FD(), Name: "drop", DirectAction: true,
	}
	if err := lab.NIC.NS.Do(func() error {
		return errors.Join(netlink.QdiscAdd(&netlink.GenericQdisc{QdiscType: "clsact", QdiscAttrs: netlink.QdiscAttrs{LinkIndex: lab.NIC.Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}),
			netlink.FilterAdd(filter))
	}); err != nil {
		t.Fatal(err)
	}
	if !comes(ours, ours) {
		t.Error("the filter has what was for a context")
	}
	if comes(theirs, linux) {
		t.Error("the filter does not have what was for Linux")
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	if err := lab.NIC.NS.Do(func() error {
		list, err := netlink.FilterList(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Index: lab.NIC.Index}}, netlink.HANDLE_MIN_INGRESS)
		if err == nil && len(list) != 1 {
			err = fmt.Errorf("%d filters are left", len(list))
		}
		return err
	}); err != nil {
		t.Error(err)
	}
}

// Where nothing is said, handlers in eBPF are at tc on a veth and where the driver has no XDP, and at xdp elsewhere.
func TestHooksThatNobodyHasChosen(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	if err := lab.NIC.NS.Do(func() error {
		tap := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "t0"}, Mode: netlink.TUNTAP_MODE_TAP}
		return errors.Join(netlink.LinkAdd(tap), netlink.LinkSetUp(tap))
	}); err != nil {
		t.Fatal(err)
	}
	tag := matcher.Ruleset{Name: "tag", Rules: []matcher.Rule{{Index: 3, Mask: 0xffff0000, Start: 0x81000000, End: 0x81000000}}}
	for _, tt := range []struct {
		device string
		mode   nic.Mode
		rules  matcher.Ruleset
		want   string
	}{
		{lab.NIC.Device, nic.Auto, matcher.UDPPort(7), "tc"},
		{lab.NIC.Device, nic.Native, matcher.UDPPort(7), "tc"},
		{lab.NIC.Device, nic.Auto, tag, "xdp"},
		{"lo", nic.Auto, matcher.UDPPort(7), "tc"},
		{"lo", nic.Generic, matcher.UDPPort(7), "tc"},
		{"t0", nic.Auto, matcher.UDPPort(7), "xdp"},
		{"t0", nic.Generic, matcher.UDPPort(7), "tc"},
	} {
		var n *nic.NIC
		if err := lab.NIC.NS.Do(func() (err error) {
			n, err = nic.Open(nic.Config{Interface: tt.device, Mode: tt.mode})
			return err
		}); err != nil {
			t.Fatal(tt.device, err)
		}
		s := statsOf(t, n, run(t, n, builtin(t, "echo-udp", tt.rules)))
		if s.Hook != tt.want {
			t.Errorf("%s, mode %v, %s: at %s, want %s", tt.device, tt.mode, tt.rules.Name, s.Hook, tt.want)
		}
		spec := builtin(t, "echo-udp", tag)
		spec.Name, spec.Hook = "tagged", nic.HookTC
		if _, err := n.Install(spec); err == nil || !strings.Contains(err.Error(), `ruleset "tag": it asks for a VLAN tag`) {
			t.Error(err)
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
	// A program at xdp would have a driver begin anew.
	for _, device := range []string{"lo", "t0"} {
		if err := lab.NIC.NS.Do(func() error {
			n, err := nic.Open(nic.Config{Interface: device, Hook: nic.HookTC})
			if err != nil {
				return err
			}
			if mode := stats(t, n).Mode; mode != "off" {
				t.Errorf("%s: the program at xdp of a NIC at tc is attached: %s", device, mode)
			}
			return n.Close()
		}); err != nil {
			t.Error(err)
		}
	}
}

// atTC returns how many programs are at tc of the NIC's end.
func atTC(t *testing.T, lab *netns.Lab) (n int) {
	t.Helper()
	if err := lab.NIC.NS.Do(func() error {
		i, err := net.InterfaceByName(lab.NIC.Device)
		if err != nil {
			return err
		}
		q, err := link.QueryPrograms(link.QueryOptions{Target: i.Index, Attach: ebpf.AttachTCXIngress})
		if err == nil {
			n = len(q.Programs)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return n
}

// A NIC that is killed in the middle of a transfer leaves nothing at either hook, and the other end as it was.
func TestKilledNICsLeaveNothingAtTC(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	here, err := lab.NIC.NS.Command(t.Context(), "ip", "link", "show", lab.NIC.Device).Output()
	if err != nil {
		t.Fatal(err)
	}
	for range 3 * testenv.Soak() {
		p := spawn(t, lab, "deposit")
		p.expect(t, "ready")
		conn := connect(t, lab, slmp.Port, slmp.Config{})
		var acked atomic.Int64
		var again func(error)
		again = func(err error) {
			if err == nil {
				acked.Add(1)
				_ = conn.Post(make([]byte, transferred), again)
			}
		}
		for range 4 {
			if err := conn.Post(make([]byte, transferred), again); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, "messages arrive", func() bool { return acked.Load() > 8 })
		if n := atTC(t, lab); n != 1 {
			t.Errorf("%d programs are at tc while it runs", n)
		}
		p.kill()
		conn.Close()
		if n, id := atTC(t, lab), attached(t, lab); n != 0 || id != 0 || cuts(t, lab) {
			t.Fatalf("it was killed: %d programs at tc, program %d at xdp, TSO is gone: %v", n, id, cuts(t, lab))
		}
		ping(t, lab, "-c", "1")
	}
	if now, err := lab.NIC.NS.Command(t.Context(), "ip", "link", "show", lab.NIC.Device).Output(); err != nil || string(now) != string(here) {
		t.Errorf("%v; the interface is\n%s, and was\n%s", err, now, here)
	}
}

// Fragments match no ruleset of a protocol: Linux puts them together and answers.
func TestFragmentsAtTCGoToLinux(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{Hook: nic.HookTC})
	pings := run(t, n, builtin(t, "echo-icmp", matcher.ICMPEcho()))
	udp := run(t, n, builtin(t, "echo-udp", matcher.UDPPort(7)))
	linux := listenUDP(t, lab.NIC, 7)
	before := snmp(t, lab.NIC.NS, "Icmp", "InEchos")
	ping(t, lab, "-c", "5", "-i", "0.01", "-s", "4000")
	if got := snmp(t, lab.NIC.NS, "Icmp", "InEchos") - before; got != 5 {
		t.Errorf("Linux has got %d echo requests, want 5", got)
	}
	conn, msg := dialUDP(t, lab, 7), noise(4000)
	write(t, conn, msg)
	got := make([]byte, 5000)
	linux.SetReadDeadline(time.Now().Add(testenv.Slowness() * 5 * time.Second))
	if k, err := linux.Read(got); err != nil || !bytes.Equal(got[:k], msg) {
		t.Errorf("Linux has got %d bytes: %v", k, err)
	}
	if p, u := pings.Stats(), udp.Stats(); p.Handled+u.Handled != 0 {
		t.Errorf("handlers have got %d and %d packets", p.Handled, u.Handled)
	}
	if got := ask(t, conn, msg[:1000]); !bytes.Equal(got, msg[:1000]) {
		t.Error("a datagram that is whole is not answered")
	}
}

// A context that may be at either hook is at xdp if the kernel takes its handlers there alone.
func TestHandlersThatFailAtTCRunAtXDP(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{})
	spec := func(size int, hook nic.Hook) nic.ContextSpec {
		code := objecttest.Compile(t, fmt.Sprintf(`#include "xspin_handler.h"
XSPIN_PAYLOAD
{
	__u8 b[%d];

	__builtin_memset(b, 0, sizeof(b));
	if (xspin_load(ctx, 0, b, 42 + (her->len & 1)))
		return XSPIN_DROP;
	return b[41] == 255 ? XSPIN_FAIL : XSPIN_SUCCESS;
}
XSPIN_CONTEXT(PAYLOAD);
XSPIN_LICENSE("GPL");
`, size))
		o, err := nic.ReadObject("test.o", code, nic.ObjectMemory)
		if err != nil {
			t.Fatal(err)
		}
		return nic.ContextSpec{Name: fmt.Sprint(hook), Hook: hook, Rulesets: sets(matcher.UDPPort(7)), Kernel: &nic.Kernel{Object: o}}
	}
	for size := 440; ; size -= 24 { // at tc other functions lie between the kernel and the handler
		if size < 100 {
			t.Fatal("no size that one hook takes, and the other does not")
		}
		if _, err := n.Install(spec(size, nic.HookXDP)); err != nil {
			continue
		}
		if _, err := n.Install(spec(size, nic.HookTC)); err == nil {
			t.Fatalf("%d bytes of stack are taken at both hooks", size)
		}
		c, err := n.Install(spec(size, nic.HookAuto))
		if err != nil {
			t.Fatal(err)
		}
		if s := statsOf(t, n, c); s.Hook != "xdp" || !strings.Contains(s.HookWhy, "stack") || strings.Contains(s.HookWhy, "\n") {
			t.Errorf("%d bytes of stack: at %s: %s", size, s.Hook, s.HookWhy)
		}
		return
	}
}
