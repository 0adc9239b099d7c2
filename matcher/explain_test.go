// SPDX-License-Identifier: Apache-2.0

package matcher_test

import (
	"testing"

	"github.com/xspin/xspin/matcher"
)

func TestExplain(t *testing.T) {
	const ip = "EtherType 0x0800 (IPv4), IPv4 version/header length 0x45 (20 bytes, no options), IPv4 fragment bits 0x0000 (not a fragment), "
	const ip6 = "EtherType 0x86dd (IPv6), IP version 6, "
	const local = ", addressed to the interface itself (its MAC and one of its IP addresses)"
	const open = ". The context's message format decides which frame ends its message."
	for _, tt := range []struct{ text, want string }{
		{"x: all", "every frame" + open},
		{"x: match-all", "every frame. Every frame ends its message."},
		{"x: bypass", "no frame."},
		{"x: udp(7000)", "frames of at least 42 bytes with " + ip + "IPv4 protocol 17 (UDP) and UDP destination port 7000" + local + open},
		{"x: udp(7000); dst any", "frames of at least 42 bytes with " + ip + "IPv4 protocol 17 (UDP) and UDP destination port 7000" + open},
		{"x: all; dst local", "every frame" + local + open},
		{"x: icmp-echo; eom false", "frames of at least 42 bytes with " + ip + "IPv4 protocol 1 (ICMP), ICMP type 8 (echo request) and ICMP code 0" + local + ". No frame ends its message."},
		{"x: slmp", "frames with " + ip + "IPv4 protocol 17 (UDP) and UDP destination port 9330 (SLMP)" + local + ". " +
			"A frame with SLMP flag EOM set ends its message. Written for message format slmp."},
		{"x: slmp6", "frames with " + ip6 + "IPv6 next header 17 (UDP) and UDP destination port 9330 (SLMP)" + local + ". " +
			"A frame with SLMP flag EOM set ends its message. Written for message format slmp6."},
		{"x: 3&0xfffff000=0x86dd6000 && 5&0xff000000=0x11000000 && 14&0xffff0000=0x1b580000; eom 15&0xc000=0x8000; format slmp6",
			"frames with " + ip6 + "IPv6 next header 17 (UDP) and UDP destination port 7000. " +
				"A frame with SLMP flag EOM set and SLMP flag SYN clear ends its message. Written for message format slmp6."},
		{"x: 3&0xffff0ff0=0x86dd0b80 && 4&0xffff=8 && 5&0xff000000=0x2c000000 && 14&0xffff0000=0x1b580000",
			"frames with EtherType 0x86dd (IPv6), IPv6 traffic class 0xb8, IPv6 payload length 8, IPv6 next header 44 (fragment) and bytes 56-57 equal to 0x1b58" + open},
		{"x: 3&0xffff0000=0x86dd0000 && 5&0xffffff=0x40fe80 && 6=0x00000001 && 7=0x00020003 && 8=0x00040005 && 9=0x00062001 && 13&0xffff0000=0xabcd0000",
			"frames with EtherType 0x86dd (IPv6), IPv6 hop limit 64, IPv6 source address fe80:*:*:*:*:*:*:*, IPv6 source address *:0000:0001:*:*:*:*:*, " +
				"IPv6 source address *:*:*:0002:0003:*:*:*, IPv6 source address *:*:*:*:*:0004:0005:*, IPv6 source address *:*:*:*:*:*:*:0006, " +
				"IPv6 destination address 2001:*:*:*:*:*:*:* and IPv6 destination address *:*:*:*:*:*:*:abcd" + open},
		{"x: 3&0xffff0000=0x08060000; format flow", "frames with EtherType 0x0806 (ARP). The message format flow decides which frame ends its message."},
		// Not IPv4 for certain, so bytes 36-37 are just bytes.
		{"x: 5&0xff=17 && 9&0xffff0000=0x1b580000", "frames with byte 23 equal to 0x11 and bytes 36-37 equal to 0x1b58" + open},
		// IPv4 with options moves them.
		{"x: 3&0xffff0000=0x08000000 && 5&0xff=17 && 9&0xffff0000=0x1b580000",
			"frames with EtherType 0x0800 (IPv4), IPv4 protocol 17 (UDP) and bytes 36-37 equal to 0x1b58" + open},
		// In an Or ruleset no rule can count on another.
		{"x: 3&0xffff0000=0x08000000 || 5&0xff=17", "frames with EtherType 0x0800 (IPv4) or byte 23 equal to 0x11" + open},
		{"x: tcp(80); eom 11&0x11=0x10", "frames of at least 54 bytes with " + ip + "IPv4 protocol 6 (TCP) and TCP destination port 80" + local + ". " +
			"A frame with TCP flag ACK set and TCP flag FIN clear ends its message."},
		{"x: 3&0xffffff00=0x08004500 && 5&0xff=17 && 9&0xffff0000=0x1b580000:0x1b59ffff",
			"frames with EtherType 0x0800 (IPv4), IPv4 version/header length 0x45 (20 bytes, no options), IPv4 protocol 17 (UDP) and UDP destination port 7000 to 7001" + open},
		{"x: 3&0xffff0000=0x08000000 && 6&0xffff=0x0a00 && 7&0xffff0000=0x00010000",
			"frames with EtherType 0x0800 (IPv4), IPv4 source address 10.0.*.* and IPv4 source address *.*.0.1" + open},
		{"x: 20&0x0ff0=0x0120", "frames with bytes 82-83 (masked with 0x0ff0) equal to 0x0120" + open},
		{"x: 20&0xff00=0x0100:0xffffffff", "frames with byte 82 from 0x01 to 0xff" + open},
		{"x: true || false", "frames with a condition that always holds or a condition that never holds" + open},
	} {
		t.Run(tt.text, func(t *testing.T) {
			rs, err := matcher.ParseRuleset(tt.text)
			if err != nil {
				t.Fatal(err)
			}
			if got := matcher.Explain(&rs); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}
