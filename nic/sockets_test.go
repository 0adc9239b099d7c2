// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// A socket of Linux that gets nothing because of a ruleset is told, and no other.
func TestASocketOnTheSamePortIsTold(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	listen := func(addr string, port uint16) {
		t.Helper()
		err := lab.NIC.NS.Do(func() error {
			s, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(addr), port)))
			if err == nil {
				t.Cleanup(func() { _ = s.Close() })
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	listen("0.0.0.0", matcher.SLMPPort)
	listen("::", 700)
	listen(lab.NIC.Addr.Addr().String(), 701)
	listen("127.0.0.1", 702)
	var log bytes.Buffer // written by Activate only
	n := open(t, lab, nic.Config{HPUs: 1, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	for _, c := range []struct {
		name  string
		rules matcher.Ruleset
		port  int // of which there is a warning, 0 for none
	}{
		{"slmp", matcher.SLMP(), matcher.SLMPPort},
		{"any address", matcher.UDPPort(700), 700},
		{"this address", matcher.UDPPort(701), 701},
		{"an address of lo", matcher.UDPPort(702), 0},
		{"nobody's port", matcher.UDPPort(703), 0},
		{"TCP", matcher.TCPPort(700), 0},
		{"no port", matcher.UDP(), 0},
	} {
		log.Reset()
		ctx := run(t, n, nic.ContextSpec{Name: "taker", Rulesets: sets(c.rules), Handlers: handle(func(*hpu.HER) spin.Code { return spin.Success })})
		said := log.String()
		if strings.Contains(said, "a Linux socket") != (c.port != 0) {
			t.Errorf("%s: the log says %q", c.name, said)
		}
		for _, want := range []string{"context=taker", "ruleset=" + c.rules.Name, fmt.Sprintf("port=%d", c.port), fmt.Sprintf("(pid %d)", os.Getpid())} {
			if c.port != 0 && !strings.Contains(said, want) {
				t.Errorf("%s: the log says %q, want %q", c.name, said, want)
			}
		}
		if err := n.Remove(ctx); err != nil {
			t.Fatal(err)
		}
	}
}
