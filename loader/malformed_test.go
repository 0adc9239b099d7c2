// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns/netnstest"
)

const (
	protoICMP = 1
	protoTCP  = 6
	protoUDP  = 17
)

// ipv4 returns a frame with a 20-byte IPv4 header and, behind it, n bytes that
// start with a header for port (UDP, TCP) or an echo request (ICMP).
func ipv4(proto byte, port uint16, n int) []byte {
	b := make([]byte, 34+n)
	copy(b, []byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0})
	binary.BigEndian.PutUint16(b[16:], uint16(20+n))
	b[22], b[23] = 64, proto
	copy(b[26:], []byte{10, 0, 0, 2, 10, 0, 0, 1})
	l4 := b[34:]
	switch proto {
	case protoICMP:
		l4[0] = 8
	case protoUDP:
		binary.BigEndian.PutUint16(l4[4:], uint16(n))
		fallthrough
	default:
		binary.BigEndian.PutUint16(l4, 40000)
		binary.BigEndian.PutUint16(l4[2:], port)
	}
	return b
}

// A kind is a predefined ruleset, a frame that it matches, and what it ought to
// match, written down once more as a parser would.
type kind struct {
	name   string
	rs     matcher.Ruleset
	format string
	frame  []byte
	wanted func(l4 []byte) matcher.Action // of whole IPv4 packets without options, from here
}

func kinds() []kind {
	ports := func(header int, port uint16) func([]byte) matcher.Action {
		return func(l4 []byte) matcher.Action {
			if len(l4) < header || port != 0 && binary.BigEndian.Uint16(l4[2:]) != port {
				return matcher.Pass
			}
			return matcher.Deliver
		}
	}
	return []kind{
		{"udp", matcher.UDP(), "flow", ipv4(protoUDP, 7, 100), ports(8, 0)},
		{"udp(7)", matcher.UDPPort(7), "packet", ipv4(protoUDP, 7, 100), ports(8, 7)},
		{"tcp(80)", matcher.TCPPort(80), "flow", ipv4(protoTCP, 80, 100), ports(20, 80)},
		{"icmp-echo", matcher.ICMPEcho(), "packet", ipv4(protoICMP, 0, 100), func(l4 []byte) matcher.Action {
			if len(l4) < 8 || l4[0] != 8 || l4[1] != 0 {
				return matcher.Pass
			}
			return matcher.Deliver
		}},
		{"slmp", matcher.SLMP(), "slmp", ipv4(protoUDP, matcher.SLMPPort, 100), func(l4 []byte) matcher.Action {
			if len(l4) < 4 || binary.BigEndian.Uint16(l4[2:]) != matcher.SLMPPort {
				return matcher.Pass
			}
			if len(l4) < 18 || int(binary.BigEndian.Uint16(l4[4:])) > len(l4) || binary.BigEndian.Uint16(l4[4:]) < 18 {
				return matcher.Malformed
			}
			return matcher.Deliver
		}},
	}
}

// verdict parses the frame from the start.
func (k *kind) verdict(frame []byte) matcher.Action {
	switch {
	case len(frame) < 34,
		frame[12] != 8 || frame[13] != 0,
		frame[14] != 0x45,
		frame[20]&0x3f != 0 || frame[21] != 0,
		frame[23] != k.frame[23]:
		return matcher.Pass
	}
	return k.wanted(frame[34:])
}

// check runs a frame through the program and adds the counters up.
func (k *kind) check(t *testing.T, tester *Tester, what string, frame []byte, want matcher.Action) {
	t.Helper()
	v, err := tester.Verdict(frame)
	if err != nil {
		t.Fatalf("%s: %s: %v", k.name, what, err)
	}
	if v.Action != want || want != matcher.Pass && (v.Ruleset != 7 || v.Context != 9) {
		t.Errorf("%s: %s: %+v, want %v\n% x", k.name, what, v, want, frame[:min(len(frame), 80)])
	}
	addUp(t, tester.in)
}

// addUp checks that every frame seen was counted once more, under what became
// of it.
func addUp(t *testing.T, in *Ingress) Stats {
	t.Helper()
	s, err := in.Stats()
	if err != nil {
		t.Fatal(err)
	}
	sum, matched := s.Passed+s.Redirected+s.Failed+s.Malformed+s.Oversize, s.Redirected+s.Failed+s.Malformed+s.Oversize
	for i := range s.Refused {
		sum += s.Refused[i] + s.Spilled[i] + s.Kernel[i]
		matched += s.Refused[i] + s.Spilled[i] + s.Kernel[i]
	}
	for _, n := range s.Matched {
		matched -= n
	}
	if s.Seen != sum || matched != 0 {
		t.Errorf("%d seen, %d accounted for, %d more matched than by ruleset: %+v", s.Seen, sum, int64(matched), s)
	}
	return s
}

func TestMalformedFrames(t *testing.T) {
	netnstest.NeedRoot(t)
	const pass, malformed, deliver = matcher.Pass, matcher.Malformed, matcher.Deliver
	set := func(off int, v ...byte) func([]byte) []byte {
		return func(b []byte) []byte { copy(b[off:], v); return b }
	}
	// behind puts bytes behind the first n.
	behind := func(n int, v ...byte) func([]byte) []byte {
		return func(b []byte) []byte { return append(append(append([]byte(nil), b[:n]...), v...), b[n:]...) }
	}
	cases := []struct {
		name   string
		change func([]byte) []byte
		want   matcher.Action
		slmp   matcher.Action // its format reads the UDP length
	}{
		{"as it should be", set(0), deliver, deliver},
		{"IHL 0", set(14, 0x40), pass, pass},
		{"IHL 4", set(14, 0x44), pass, pass},
		{"IHL 6 with four bytes of options", func(b []byte) []byte { return behind(34, 1, 1, 1, 0)(set(14, 0x46)(b)) }, pass, pass},
		{"IHL 15 with forty bytes of options", func(b []byte) []byte { return behind(34, make([]byte, 40)...)(set(14, 0x4f)(b)) }, pass, pass},
		{"IHL 15 and no options", set(14, 0x4f), pass, pass},
		{"IP version 6 in the header", set(14, 0x65), pass, pass},
		{"another type of service", set(15, 0xff), deliver, deliver},
		{"first fragment", set(20, 0x20, 0), pass, pass},
		{"middle fragment", set(20, 0x20, 1), pass, pass},
		{"last fragment", set(20, 0, 1), pass, pass},
		{"last fragment, far out", set(20, 0x1f, 0), pass, pass},
		{"do not fragment", set(20, 0x40, 0), deliver, deliver},
		{"IP length 0", set(16, 0, 0), deliver, deliver},
		{"IP length beyond the frame", set(16, 0xff, 0xff), deliver, deliver},
		{"IP length within the header", set(16, 0, 19), deliver, deliver},
		{"UDP length 0", set(38, 0, 0), deliver, malformed},
		{"UDP length within the header", set(38, 0, 7), deliver, malformed},
		{"UDP length within the SLMP header", set(38, 0, 17), deliver, malformed},
		{"UDP length that is the SLMP header", set(38, 0, 18), deliver, deliver},
		{"UDP length that is the frame's", set(38, 0, 100), deliver, deliver},
		{"UDP length a byte beyond the frame", set(38, 0, 101), deliver, malformed},
		{"UDP length 65535", set(38, 0xff, 0xff), deliver, malformed},
		{"padding behind the packet", func(b []byte) []byte { return append(b, make([]byte, 30)...) }, deliver, deliver},
		{"VLAN tag", behind(12, 0x81, 0, 0, 5), pass, pass},
		{"two VLAN tags", behind(12, 0x88, 0xa8, 0, 5, 0x81, 0, 0, 5), pass, pass},
		{"VLAN tag and nothing behind it", func(b []byte) []byte { return set(12, 0x81, 0)(b)[:16] }, pass, pass},
		{"ARP", set(12, 8, 6), pass, pass},
		{"IPv6", set(12, 0x86, 0xdd), pass, pass},
		{"another protocol", set(23, 132), pass, pass},
	}
	for _, k := range kinds() {
		t.Run(k.name, func(t *testing.T) {
			tester, err := NewTester(one(k.rs, k.format))
			if err != nil {
				t.Fatal(err)
			}
			defer tester.Close()
			for _, c := range cases {
				want := c.want
				if k.format == "slmp" {
					want = c.slmp
				}
				k.check(t, tester, c.name, c.change(append([]byte(nil), k.frame...)), want)
			}
			for n := 14; n <= len(k.frame); n++ {
				frame := append([]byte(nil), k.frame[:n]...)
				k.check(t, tester, "truncated", frame, k.verdict(frame))
				if n >= 40 && k.frame[23] == protoUDP { // and honest about it
					binary.BigEndian.PutUint16(frame[38:], uint16(n-34))
					k.check(t, tester, "short", frame, k.verdict(frame))
				}
			}
			huge := append(append([]byte(nil), k.frame...), make([]byte, 65550-len(k.frame))...)
			k.check(t, tester, "64 KiB", huge, deliver)

			seed := rand.Uint64()
			rnd := rand.New(rand.NewPCG(seed, 3))
			t.Logf("seed %d", seed)
			delivered := 0
			for i := range 1500 {
				frame := make([]byte, 14+rnd.IntN(200))
				for j := range frame {
					frame[j] = byte(rnd.Uint32())
				}
				if i%3 != 0 { // a good frame with some bytes wrong
					copy(frame, k.frame)
					for range rnd.IntN(3) {
						frame[rnd.IntN(min(len(frame), 60))] = byte(rnd.Uint32() & rnd.Uint32())
					}
				}
				want := k.verdict(frame)
				k.check(t, tester, "random", frame, want)
				if want == deliver {
					delivered++
				}
			}
			if delivered < 100 {
				t.Errorf("only %d of the random frames were delivered: the generator has drifted", delivered)
			}
			if s := addUp(t, tester.in); s.Failed != 0 || s.Oversize != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// ipv6 returns a frame with an IPv6 header and, behind it, n bytes that start
// with a UDP header to port.
func ipv6(port uint16, n int) []byte {
	b := make([]byte, 54+n)
	copy(b, []byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x86, 0xdd, 0x60})
	binary.BigEndian.PutUint16(b[18:], uint16(n))
	b[20], b[21] = protoUDP, 64
	copy(b[22:], []byte{0xfd, 15: 2})
	copy(b[38:], []byte{0xfd, 15: 1})
	binary.BigEndian.PutUint16(b[54:], 40000)
	binary.BigEndian.PutUint16(b[56:], port)
	binary.BigEndian.PutUint16(b[58:], uint16(n))
	return b
}

// As TestMalformedFrames, for SLMP on IPv6: what a parser makes of a frame, what
// the reference makes of it, and what the program does.
func TestMalformedSLMP6(t *testing.T) {
	netnstest.NeedRoot(t)
	table := one(matcher.SLMP6(), "slmp6")
	tester, err := NewTester(table)
	if err != nil {
		t.Fatal(err)
	}
	defer tester.Close()
	parse := func(b []byte) matcher.Action {
		switch {
		case len(b) < 58,
			b[12] != 0x86 || b[13] != 0xdd,
			b[14]>>4 != 6,
			b[20] != protoUDP,
			binary.BigEndian.Uint16(b[56:]) != matcher.SLMPPort:
			return matcher.Pass
		}
		if udp := b[54:]; len(udp) < 18 || int(binary.BigEndian.Uint16(udp[4:])) > len(udp) || binary.BigEndian.Uint16(udp[4:]) < 18 {
			return matcher.Malformed
		}
		return matcher.Deliver
	}
	check := func(what string, frame []byte, want matcher.Action) {
		t.Helper()
		v, err := tester.Verdict(frame)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if ref := table.Match(frame); v.Action != want || v != ref {
			t.Errorf("%s: %+v, reference %+v, want %v\n% x", what, v, ref, want, frame[:min(len(frame), 80)])
		}
	}
	good := ipv6(matcher.SLMPPort, 100)
	for _, c := range []struct {
		name string
		at   int
		b    []byte
		want matcher.Action
	}{
		{"as it should be", 0, nil, matcher.Deliver},
		{"IP version 4", 14, []byte{0x45}, matcher.Pass},
		{"another traffic class and flow", 14, []byte{0x6f, 0xff, 0xff, 0xff}, matcher.Deliver},
		{"IPv4", 12, []byte{8, 0}, matcher.Pass},
		{"VLAN tag", 12, []byte{0x81, 0}, matcher.Pass},
		{"hop-by-hop options", 20, []byte{0}, matcher.Pass},
		{"fragment", 20, []byte{44}, matcher.Pass},
		{"destination options", 20, []byte{60}, matcher.Pass},
		{"TCP", 20, []byte{protoTCP}, matcher.Pass},
		{"the next port", 57, []byte{0x73}, matcher.Pass},
		{"IP length 0, which is a jumbogram", 18, []byte{0, 0}, matcher.Deliver},
		{"UDP length 0", 58, []byte{0, 0}, matcher.Malformed},
		{"UDP length within the SLMP header", 58, []byte{0, 17}, matcher.Malformed},
		{"UDP length that is the SLMP header", 58, []byte{0, 18}, matcher.Deliver},
		{"UDP length a byte beyond the frame", 58, []byte{0, 101}, matcher.Malformed},
		{"UDP length 65535", 58, []byte{0xff, 0xff}, matcher.Malformed},
	} {
		frame := append([]byte(nil), good...)
		copy(frame[c.at:], c.b)
		if p := parse(frame); p != c.want {
			t.Errorf("%s: the parser says %v, want %v", c.name, p, c.want)
		}
		check(c.name, frame, c.want)
	}
	for n := 14; n <= len(good); n++ {
		frame := append([]byte(nil), good[:n]...)
		check("truncated", frame, parse(frame))
		if n >= 60 { // and honest about it
			binary.BigEndian.PutUint16(frame[58:], uint16(n-54))
			check("short", frame, parse(frame))
		}
	}
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 4))
	t.Logf("seed %d", seed)
	var count [3]int
	for range 1500 {
		frame := append([]byte(nil), good[:54+rnd.IntN(101)]...)
		if len(frame) > 60 && rnd.IntN(2) == 0 {
			binary.BigEndian.PutUint16(frame[58:], uint16(len(frame)-54))
		}
		for range rnd.IntN(4) {
			frame[rnd.IntN(min(len(frame), 80))] = byte(rnd.Uint32() & rnd.Uint32())
		}
		want := parse(frame)
		check("random", frame, want)
		count[want]++
	}
	if min(count[0], count[1], count[2]) < 50 {
		t.Errorf("random frames by what became of them: %v: the generator has drifted", count)
	}
	addUp(t, tester.in)
}
