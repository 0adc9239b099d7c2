// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"bytes"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/packet"
)

// udpToOther is udpTo, to another MAC and address.
func udpToOther(lab *netns.Lab, port uint16, mac net.HardwareAddr, addr netip.Addr) []byte {
	b := udpTo(lab, port)
	packet.Ethernet(b).SetDst([6]byte(mac))
	ip := packet.IPv4(b[14:])
	ip.SetDst(addr.As4())
	ip.SetChecksum(ip.HeaderChecksum())
	return b
}

// Linux gets what is to others, or to everybody, as it did without us.
func TestFramesToOthersAreLeftToLinux(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{})
	own := run(t, n, nic.ContextSpec{Name: "own", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(echo)})
	all, err := matcher.ParseRuleset("all: udp(8); dst any")
	if err != nil {
		t.Fatal(err)
	}
	any := run(t, n, nic.ContextSpec{Name: "any", Rulesets: sets(all), Handlers: handle(echo)})
	var linux *net.UDPConn
	err = lab.NIC.NS.Do(func() (err error) {
		linux, err = net.ListenUDP("udp4", &net.UDPAddr{Port: 7})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer linux.Close()
	send := rawSocket(t, lab)
	us, everybody := lab.NIC.Addr.Addr(), netip.MustParseAddr("255.255.255.255")
	for _, to := range []struct {
		name  string
		mac   net.HardwareAddr
		addr  netip.Addr
		linux bool // has a socket that wants it
	}{
		{"another host, as a router gets it", lab.NIC.MAC, netip.MustParseAddr("192.0.2.1"), false},
		{"another MAC, as a switch floods it", net.HardwareAddr{2, 0, 0, 0, 0, 9}, us, false},
		{"everybody", net.HardwareAddr{255, 255, 255, 255, 255, 255}, everybody, true},
		{"the subnet's broadcast address", net.HardwareAddr{255, 255, 255, 255, 255, 255}, netip.MustParseAddr("10.0.0.255"), true},
	} {
		before, got := program(t, n).Passed, any.Stats().Handled
		send(udpToOther(lab, 7, to.mac, to.addr))
		if to.linux {
			expect(t, linux, make([]byte, 18))
		}
		eventually(t, to.name+": passed to Linux", func() bool { return program(t, n).Passed == before+1 })
		send(udpToOther(lab, 8, to.mac, to.addr))
		eventually(t, to.name+": taken, where any is", func() bool { return any.Stats().Handled == got+1 })
	}
	roundTrip(t, dialUDP(t, lab, 7), []byte("ours"))
	eventually(t, "ours handled", func() bool { return own.Stats().Handled == 1 })
}

// Whoever gives the addresses to a bridge hears why nothing comes.
func TestRulesetsWithoutAnAddressAreTold(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	err := lab.NIC.NS.Do(func() error {
		l, err := netlink.LinkByName(lab.NIC.Device)
		if err != nil {
			return err
		}
		return netlink.AddrDel(l, &netlink.Addr{IPNet: &net.IPNet{IP: lab.NIC.Addr.Addr().AsSlice(), Mask: net.CIDRMask(24, 32)}})
	})
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	n := open(t, lab, nic.Config{Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))})
	any := matcher.ICMPEcho()
	any.Local = false
	run(t, n, nic.ContextSpec{Name: "any", Rulesets: sets(any), Handlers: handle(echo)})
	if log.Len() > 0 {
		t.Errorf("logged: %s", &log)
	}
	run(t, n, nic.ContextSpec{Name: "own", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(echo)})
	if !strings.Contains(log.String(), "the interface has no IPv4 address") {
		t.Errorf("logged: %s", &log)
	}
}

// An interface gets addresses, loses them, and gets another MAC, while it works.
func TestRulesetsFollowTheAddresses(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{})
	c := run(t, n, nic.ContextSpec{Name: "echo", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(echo)})
	send := rawSocket(t, lab)
	taken := func(mac net.HardwareAddr, to netip.Addr) bool {
		before, passed := c.Stats().Handled, program(t, n).Passed
		send(udpToOther(lab, 7, mac, to))
		for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(100 * time.Microsecond) {
			if c.Stats().Handled > before {
				return true
			}
			if program(t, n).Passed > passed {
				return false
			}
		}
		t.Fatal("a datagram is lost")
		return false
	}
	change := func(f func(netlink.Link) error) {
		t.Helper()
		err := lab.NIC.NS.Do(func() error {
			l, err := netlink.LinkByName(lab.NIC.Device)
			if err != nil {
				return err
			}
			return f(l)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	second := &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 0, 0, 77).To4(), Mask: net.CIDRMask(24, 32)}}
	to := netip.MustParseAddr("10.0.0.77")
	if taken(lab.NIC.MAC, to) {
		t.Error("taken before it was ours")
	}
	change(func(l netlink.Link) error { return netlink.AddrAdd(l, second) })
	eventually(t, "a new address is ours", func() bool { return taken(lab.NIC.MAC, to) })
	change(func(l netlink.Link) error { return netlink.AddrDel(l, second) })
	eventually(t, "an address that has gone is not", func() bool { return !taken(lab.NIC.MAC, to) })

	mac := net.HardwareAddr{2, 0, 0, 0, 0, 0x55}
	change(func(l netlink.Link) error { return netlink.LinkSetHardwareAddr(l, mac) })
	eventually(t, "a new MAC is ours", func() bool { return taken(mac, lab.NIC.Addr.Addr()) })
	if taken(lab.NIC.MAC, lab.NIC.Addr.Addr()) {
		t.Error("the old MAC is still ours")
	}
}
