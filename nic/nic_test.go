// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// open opens a NIC on the NIC's end of a lab.
func open(t testing.TB, lab *netns.Lab, cfg nic.Config) *nic.NIC {
	t.Helper()
	var n *nic.NIC
	cfg.Interface = lab.NIC.Device
	if cfg.Limit == 0 {
		cfg.Limit = testenv.Slowness() * hpu.DefaultLimit
	}
	err := lab.NIC.NS.Do(func() (err error) {
		n, err = nic.Open(cfg)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// run installs and activates a context.
func run(t testing.TB, n *nic.NIC, spec nic.ContextSpec) *nic.Context {
	t.Helper()
	c, err := n.Install(spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Activate(c); err != nil {
		t.Fatal(err)
	}
	return c
}

// eventually waits for what is bound to happen, and fails when it does not.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(testenv.Slowness() * 20 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Errorf("never: %s", what)
}

// echo answers pings and UDP datagrams.
func echo(h *hpu.HER) spin.Code {
	hdr := h.Headers()
	ok := hdr.ICMP != nil && hdr.ReplyICMPEcho() || hdr.UDP != nil && hdr.ReplyUDP()
	if !ok || h.Send() != nil {
		return spin.Drop
	}
	return spin.Success
}

func ping(t testing.TB, lab *netns.Lab, args ...string) string {
	t.Helper()
	args = append(args, lab.NIC.Addr.Addr().String())
	out, err := lab.Host.NS.Command(context.Background(), "ping", args...).CombinedOutput()
	if err != nil {
		t.Errorf("ping %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

func TestPingIsAnsweredByHandlers(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{})
	c := run(t, n, nic.ContextSpec{Name: "icmp", Rulesets: []matcher.Ruleset{matcher.ICMPEcho()}, Handlers: hpu.Handlers{Payload: echo}})
	before, err := lab.NIC.NS.SNMP()
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{0, 16, 516, 1016, 1416, 1472} {
		ping(t, lab, "-c", "20", "-i", "0.002", "-s", fmt.Sprint(size))
	}
	ping(t, lab, "-f", "-c", "5000", "-q")
	after, err := lab.NIC.NS.SNMP()
	if err != nil {
		t.Fatal(err)
	}
	if b, a := before["Icmp"]["InEchos"], after["Icmp"]["InEchos"]; a != b {
		t.Errorf("the kernel saw %d echo requests", a-b)
	}
	eventually(t, "5120 handled and sent", func() bool {
		s := c.Stats()
		return s.Handled == 5120 && s.Sent == 5120
	})
}

func dialUDP(t testing.TB, lab *netns.Lab, port uint16) *net.UDPConn {
	t.Helper()
	var conn *net.UDPConn
	err := lab.Host.NS.Do(func() (err error) {
		conn, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(lab.NIC.Addr.Addr(), port)))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func TestUDPIsAnsweredByHandlers(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{})
	run(t, n, nic.ContextSpec{Name: "udp", Rulesets: []matcher.Ruleset{matcher.UDPPort(7)}, Handlers: hpu.Handlers{Payload: echo}})
	conn := dialUDP(t, lab, 7)
	buf := make([]byte, 2000)
	for i := range 500 {
		msg := []byte(strings.Repeat(fmt.Sprint(i%10), i*2+1))
		if _, err := conn.Write(msg); err != nil {
			t.Fatal(err)
		}
		conn.SetReadDeadline(time.Now().Add(testenv.Slowness() * 2 * time.Second))
		k, err := conn.Read(buf)
		if err != nil {
			t.Fatalf("datagram %d: %v", i, err)
		}
		if string(buf[:k]) != string(msg) {
			t.Fatalf("datagram %d: %d bytes came back changed", i, k)
		}
	}
}
