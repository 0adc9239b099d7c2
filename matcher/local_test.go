// SPDX-License-Identifier: Apache-2.0

package matcher_test

import (
	"net/netip"
	"testing"

	"github.com/xspin/xspin/matcher"
)

// A ruleset that is local leaves frames to others to the rulesets behind it, which may
// not care.
func TestLocal(t *testing.T) {
	mine := netip.MustParseAddr
	us := &matcher.Local{
		MAC:   [6]byte{2, 0, 0, 0, 0, 1},
		Addrs: []netip.Addr{mine("192.0.2.9"), mine("198.51.100.2"), mine("2001:db8::2"), mine("fe80::1")},
	}
	v4 := func(dst string) []byte {
		f := slmp4(1, 0, 7, 0, 'x')
		copy(f, us.MAC[:])
		a := mine(dst).As4()
		return patch(f, 30, a[:]...)
	}
	v6 := func(dst string) []byte {
		f := slmp6(1, 0, 7, 0, 'x')
		copy(f, us.MAC[:])
		a := mine(dst).As16()
		return patch(f, 38, a[:]...)
	}
	arp := make([]byte, 60)
	copy(arp, us.MAC[:])
	arp[12], arp[13] = 8, 6
	for _, tt := range []struct {
		name  string
		frame []byte
		want  bool
	}{
		{"to the first address", v4("192.0.2.9"), true},
		{"to the second", v4("198.51.100.2"), true},
		{"to another host, as a router gets it", v4("198.51.100.3"), false},
		{"to everybody", patch(v4("255.255.255.255"), 0, 255, 255, 255, 255, 255, 255), false},
		{"to everybody, with our MAC", v4("255.255.255.255"), false},
		{"to a group", patch(v4("224.0.0.1"), 0, 1, 0, 0x5e, 0, 0, 1), false},
		{"to our address, with another MAC, as a switch floods it", patch(v4("192.0.2.9"), 5, 2), false},
		{"to our address on IPv6", v6("2001:db8::2"), true},
		{"to our link-local address", v6("fe80::1"), true},
		{"to another host on IPv6", v6("2001:db8::3"), false},
		{"to our prefix and our interface identifier, of two addresses", v6("fe80::2"), false},
		{"an IPv4 packet that is cut within the address", v4("192.0.2.9")[:33], false},
		{"an IPv6 packet that is cut within the address", v6("2001:db8::2")[:53], false},
		{"no IP packet, to our MAC", arp, true},
		{"no IP packet, to another MAC", patch(arp, 0, 4), false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, mode := range []matcher.Mode{matcher.And, matcher.Or} {
				local := matcher.Ruleset{Name: "x", Mode: mode, Local: true}
				if mode == matcher.Or {
					local.Rules = []matcher.Rule{matcher.Empty}
				}
				tab := matcher.Table{Local: us, Entries: map[int]matcher.Entry{
					3: entry(local, 1, "packet"),
					9: entry(matcher.MatchAll(), 2, "packet"),
				}}
				want := 9
				if tt.want {
					want = 3
				}
				x, err := matcher.Compile(&tab)
				if err != nil {
					t.Fatal(err)
				}
				if got := tab.Match(tt.frame).Ruleset; got != want {
					t.Errorf("%s: the table says %d, want %d", mode, got, want)
				}
				if got, ok := x.Lookup(tt.frame); got != want || !ok {
					t.Errorf("%s: the index says %d %v, want %d", mode, got, ok, want)
				}
				// Nobody has said who this host is.
				tab.Local = nil
				if got := tab.Match(tt.frame).Ruleset; got != 3 {
					t.Errorf("%s: without addresses the table says %d, want 3", mode, got)
				}
			}
		})
	}
}

func TestPredefinedRulesetsAreLocal(t *testing.T) {
	for _, rs := range []matcher.Ruleset{matcher.UDP(), matcher.UDPPort(7), matcher.TCPPort(80), matcher.ICMPEcho(), matcher.SLMP(), matcher.SLMP6()} {
		if !rs.Local {
			t.Errorf("%s takes frames to other hosts", rs.Name)
		}
	}
	if matcher.MatchAll().Local {
		t.Error("match-all does not match all")
	}
}
