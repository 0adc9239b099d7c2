// SPDX-License-Identifier: Apache-2.0

package matcher_test

import (
	"encoding/binary"
	"errors"
	"strings"
	"testing"

	"github.com/xspin/xspin/matcher"
)

// ip4 returns an Ethernet and IPv4 header from 192.0.2.1 to 198.51.100.2, and
// the body behind it.
func ip4(proto byte, body ...byte) []byte {
	f := []byte{
		0x02, 0, 0, 0, 0, 2, 0x02, 0, 0, 0, 0, 1, 0x08, 0x00,
		0x45, 0, 0, 0, 0x12, 0x34, 0x40, 0, 64, proto, 0, 0, 192, 0, 2, 1, 198, 51, 100, 2,
	}
	binary.BigEndian.PutUint16(f[16:], uint16(20+len(body)))
	return append(f, body...)
}

// udp4 returns a UDP packet. Its UDP length is right.
func udp4(src, dst uint16, payload ...byte) []byte {
	h := make([]byte, 8)
	binary.BigEndian.PutUint16(h[0:], src)
	binary.BigEndian.PutUint16(h[2:], dst)
	binary.BigEndian.PutUint16(h[4:], uint16(8+len(payload)))
	return ip4(17, append(h, payload...)...)
}

// slmp4 returns an SLMP packet.
func slmp4(src uint16, flags uint16, id, offset uint32, payload ...byte) []byte {
	b := make([]byte, 10)
	binary.BigEndian.PutUint16(b[0:], flags)
	binary.BigEndian.PutUint32(b[2:], id)
	binary.BigEndian.PutUint32(b[6:], offset)
	return udp4(src, 9330, append(b, payload...)...)
}

// slmp6 returns an SLMP packet on IPv6 from 2001:db8::1:2 to 2001:db8::3:4.
func slmp6(src uint16, flags uint16, id, offset uint32, payload ...byte) []byte {
	f := make([]byte, 72)
	copy(f, []byte{0x02, 0, 0, 0, 0, 2, 0x02, 0, 0, 0, 0, 1, 0x86, 0xdd, 0x60})
	binary.BigEndian.PutUint16(f[18:], uint16(18+len(payload)))
	f[20], f[21] = 17, 64
	copy(f[22:], []byte{0x20, 1, 0x0d, 0xb8, 15: 2, 13: 1})
	copy(f[38:], []byte{0x20, 1, 0x0d, 0xb8, 15: 4, 13: 3})
	binary.BigEndian.PutUint16(f[54:], src)
	binary.BigEndian.PutUint16(f[56:], 9330)
	binary.BigEndian.PutUint16(f[58:], uint16(18+len(payload)))
	binary.BigEndian.PutUint16(f[62:], flags)
	binary.BigEndian.PutUint32(f[64:], id)
	binary.BigEndian.PutUint32(f[68:], offset)
	return append(f, payload...)
}

// patch returns a copy of the frame with bytes replaced from an offset on.
func patch(frame []byte, at int, b ...byte) []byte {
	f := append([]byte(nil), frame...)
	copy(f[at:], b)
	return f
}

func entry(rs matcher.Ruleset, context uint16, format string) matcher.Entry {
	return matcher.Entry{Ruleset: rs, Context: context, Format: matcher.FormatByName(format)}
}

func TestPredefinedRulesets(t *testing.T) {
	udp := udp4(1000, 7000, 'x')
	tcp := ip4(6, append([]byte{0x03, 0xe8, 0, 80}, make([]byte, 16)...)...)
	echo := ip4(1, 8, 0, 0, 0, 0x12, 0x34, 0, 1)
	six := slmp6(1000, 0x4000, 7, 0)
	for _, tt := range []struct {
		name  string
		rs    matcher.Ruleset
		frame []byte
		want  bool
	}{
		{"bypass takes nothing", matcher.Bypass(), udp, false},
		{"match-all takes anything", matcher.MatchAll(), make([]byte, 14), true},
		{"udp takes any port", matcher.UDP(), udp, true},
		{"udp does not take TCP", matcher.UDP(), tcp, false},
		{"udp does not take IPv6", matcher.UDP(), patch(udp, 12, 0x86, 0xdd), false},
		{"udp does not take a VLAN tag", matcher.UDP(), patch(udp, 12, 0x81, 0x00), false},
		{"udp does not take IP options", matcher.UDP(), patch(udp, 14, 0x46), false},
		{"udp does not take IHL 4", matcher.UDP(), patch(udp, 14, 0x44), false},
		{"udp does not take IP version 5", matcher.UDP(), patch(udp, 14, 0x55), false},
		{"udp does not take a first fragment", matcher.UDP(), patch(udp, 20, 0x20, 0), false},
		{"udp does not take a later fragment", matcher.UDP(), patch(udp, 20, 0, 1), false},
		{"udp does not take a later fragment of high offset", matcher.UDP(), patch(udp, 20, 0x10, 0), false},
		{"udp takes packets that may be fragmented", matcher.UDP(), patch(udp, 20, 0, 0), true},
		{"udp takes any DSCP and TTL", matcher.UDP(), patch(patch(udp, 15, 0xb8), 22, 1), true},
		{"udp takes a header without payload", matcher.UDP(), udp[:42], true},
		{"udp does not take a truncated header", matcher.UDP(), udp[:41], false},
		{"udp(7000) takes its port", matcher.UDPPort(7000), udp, true},
		{"udp(7000) does not take the next port", matcher.UDPPort(7001), udp, false},
		{"udp(1000) does not take the source port", matcher.UDPPort(1000), udp, false},
		{"udp(7000) does not take a truncated header", matcher.UDPPort(7000), udp[:41], false},
		{"tcp(80) takes its port", matcher.TCPPort(80), tcp, true},
		{"tcp(80) does not take the next port", matcher.TCPPort(81), tcp, false},
		{"tcp(80) does not take UDP", matcher.TCPPort(80), patch(tcp, 23, 17), false},
		{"tcp(80) does not take a truncated header", matcher.TCPPort(80), tcp[:53], false},
		{"icmp-echo takes a request", matcher.ICMPEcho(), echo, true},
		{"icmp-echo does not take a reply", matcher.ICMPEcho(), patch(echo, 34, 0), false},
		{"icmp-echo does not take another code", matcher.ICMPEcho(), patch(echo, 35, 1), false},
		{"icmp-echo does not take a truncated header", matcher.ICMPEcho(), echo[:41], false},
		{"icmp-echo does not take a fragment", matcher.ICMPEcho(), patch(echo, 20, 0x20, 0), false},
		{"slmp takes its port", matcher.SLMP(), slmp4(1000, 0x4000, 7, 0), true},
		{"slmp takes an ACK, as FPsPIN does", matcher.SLMP(), slmp4(1000, 0x2000, 7, 0), true},
		{"slmp does not take another port", matcher.SLMP(), udp, false},
		{"slmp does not take IPv6", matcher.SLMP(), six, false},
		{"slmp6 takes its port", matcher.SLMP6(), six, true},
		{"slmp6 takes an ACK, as slmp does", matcher.SLMP6(), patch(six, 62, 0x20), true},
		{"slmp6 takes any traffic class, flow label and hop limit", matcher.SLMP6(), patch(patch(six, 14, 0x6f, 0xff, 0xff, 0xff), 21, 1), true},
		{"slmp6 does not take IPv4", matcher.SLMP6(), slmp4(1000, 0x4000, 7, 0, make([]byte, 40)...), false},
		{"slmp6 does not take IP version 4 in the header", matcher.SLMP6(), patch(six, 14, 0x45), false},
		{"slmp6 does not take a VLAN tag", matcher.SLMP6(), patch(six, 12, 0x81, 0x00), false},
		{"slmp6 does not take the next port", matcher.SLMP6(), patch(six, 57, 0x73), false},
		{"slmp6 does not take the source port", matcher.SLMP6(), patch(slmp6(9330, 0, 7, 0), 56, 0, 1), false},
		{"slmp6 does not take TCP", matcher.SLMP6(), patch(six, 20, 6), false},
		{"slmp6 does not take a fragment", matcher.SLMP6(), patch(six, 20, 44), false},
		{"slmp6 does not take hop-by-hop options", matcher.SLMP6(), patch(six, 20, 0), false},
		{"slmp6 takes a truncated header, which its format refuses", matcher.SLMP6(), six[:58], true},
		{"slmp6 does not take one without ports", matcher.SLMP6(), six[:57], false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := tt.rs.Validate(); err != nil {
				t.Fatal(err)
			}
			if got := tt.rs.Match(tt.frame); got != tt.want {
				t.Errorf("Match is %v", got)
			}
		})
	}
}

func TestPredefinedFormats(t *testing.T) {
	for _, name := range matcher.FormatNames() {
		f := matcher.FormatByName(name)
		if err := f.Validate(); err != nil {
			t.Error(err)
		}
		f.Header = 77
		if matcher.FormatByName(name).Header == 77 {
			t.Errorf("a change to format %s is seen by others", name)
		}
	}
	if matcher.FormatByName("none") != nil {
		t.Error("there is a format none")
	}
}

func TestVerdict(t *testing.T) {
	frame := slmp4(0x1234, 0xc000, 0xcafe0001, 1408, 1, 2, 3, 4)
	key := [matcher.MaxKey]uint32{0xc000, 0x02010000, 0x1234, 0xcafe0001}
	padded := append(append([]byte(nil), frame...), make([]byte, 4)...)
	flow := matcher.Verdict{Action: matcher.Deliver, Context: 9, NKey: 5,
		Key: [matcher.MaxKey]uint32{17, 0xc000, 0x0201c633, 0x64021234, 9330 << 16}}
	malformed := matcher.Verdict{Action: matcher.Malformed, Context: 9}
	slmp := func(eom bool) matcher.Verdict {
		return matcher.Verdict{Action: matcher.Deliver, Context: 9, EOM: eom, Key: key, NKey: 4, Offset: 1408}
	}
	frame6 := slmp6(0x1234, 0xc000, 0xcafe0001, 1408, 1, 2, 3, 4)
	six := func(eom bool) matcher.Verdict {
		return matcher.Verdict{Action: matcher.Deliver, Context: 9, EOM: eom, NKey: 7, Offset: 1408,
			Key: [matcher.MaxKey]uint32{0x2001, 0x0db80000, 0, 1, 2 << 16, 0x1234, 0xcafe0001}}
	}
	never, noEOM := matcher.MatchAll(), matcher.MatchAll()
	never.EOM, noEOM.EOM = &matcher.False, nil

	for _, tt := range []struct {
		name   string
		rs     matcher.Ruleset
		format string
		frame  []byte
		want   matcher.Verdict
	}{
		{"SLMP with key, offset and EOM", matcher.SLMP(), "slmp", frame, slmp(true)},
		{"SLMP without EOM", matcher.SLMP(), "slmp", patch(frame, 42, 0x40), slmp(false)},
		{"SLMP with bytes behind its end, as padding has it", matcher.SLMP(), "slmp", padded, slmp(true)},
		{"SLMP whose UDP length is all of the frame and one more", matcher.SLMP(), "slmp", patch(frame, 38, 0, 23), malformed},
		{"SLMP whose UDP length is that of the header", matcher.SLMP(), "slmp", patch(frame, 38, 0, 18), slmp(true)},
		{"SLMP whose UDP length is one less", matcher.SLMP(), "slmp", patch(frame, 38, 0, 17), malformed},
		{"SLMP whose UDP length is 65535", matcher.SLMP(), "slmp", patch(frame, 38, 0xff, 0xff), malformed},
		{"SLMP that is cut before its end", matcher.SLMP(), "slmp", frame[:55], malformed},
		{"SLMP that is cut within the offset", matcher.SLMP(), "slmp", patch(frame, 38, 0, 17)[:51], malformed},
		{"UDP to the SLMP port without an SLMP header", matcher.SLMP(), "slmp", udp4(1, 9330), malformed},
		{"SLMP on IPv6 with key, offset and EOM", matcher.SLMP6(), "slmp6", frame6, six(true)},
		{"SLMP on IPv6 without EOM", matcher.SLMP6(), "slmp6", patch(frame6, 62, 0x40), six(false)},
		{"SLMP on IPv6 with bytes behind its end", matcher.SLMP6(), "slmp6", append(patch(frame6, 0), 0, 0), six(true)},
		{"SLMP on IPv6 to another address", matcher.SLMP6(), "slmp6", patch(frame6, 38, make([]byte, 16)...), six(true)},
		{"SLMP on IPv6 whose UDP length is all of the frame and one more", matcher.SLMP6(), "slmp6", patch(frame6, 58, 0, 23), malformed},
		{"SLMP on IPv6 whose UDP length is that of the header", matcher.SLMP6(), "slmp6", patch(frame6, 58, 0, 18), six(true)},
		{"SLMP on IPv6 whose UDP length is one less", matcher.SLMP6(), "slmp6", patch(frame6, 58, 0, 17), malformed},
		{"SLMP on IPv6 that is cut before its end", matcher.SLMP6(), "slmp6", frame6[:75], malformed},
		{"SLMP on IPv6 that is cut within the offset", matcher.SLMP6(), "slmp6", patch(frame6, 58, 0, 17)[:71], malformed},
		{"the ruleset's EOM rule goes before the format's", never, "packet", frame, matcher.Verdict{Action: matcher.Deliver, Context: 9}},
		{"without one the format decides", noEOM, "packet", frame, matcher.Verdict{Action: matcher.Deliver, Context: 9, EOM: true}},
		{"a frame shorter than the header of its format", noEOM, "packet", frame[:13], malformed},
		{"flow is the 5-tuple and has no end", noEOM, "flow", frame, flow},
		{"flow that is cut behind the destination port", noEOM, "flow", frame[:38], flow},
		{"flow that is cut within it", noEOM, "flow", frame[:37], malformed},
		{"nothing matches", matcher.Bypass(), "packet", frame, matcher.Verdict{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tab := matcher.Table{Entries: map[int]matcher.Entry{0: entry(tt.rs, 9, tt.format)}}
			if err := tab.Validate(); err != nil {
				t.Fatal(err)
			}
			if got := tab.Match(tt.frame); got != tt.want {
				t.Errorf("got  %+v\nwant %+v", got, tt.want)
			}
		})
	}
}

// The key is the sender's address, its port and the message id: every bit of
// them, and no other of the frame.
func TestKeyIsTheSenderAndTheMessage(t *testing.T) {
	for _, tt := range []struct {
		rs    matcher.Ruleset
		frame []byte
		key   [][2]int // bytes from, to
	}{
		{matcher.SLMP(), slmp4(1, 0, 7, 0, 'x'), [][2]int{{26, 30}, {34, 36}, {44, 48}}},
		{matcher.SLMP6(), slmp6(1, 0, 7, 0, 'x'), [][2]int{{22, 38}, {54, 56}, {64, 68}}},
	} {
		t.Run(tt.rs.Name, func(t *testing.T) {
			tab := matcher.Table{Entries: map[int]matcher.Entry{0: entry(tt.rs, 9, tt.rs.Format)}}
			before := tab.Match(tt.frame)
			for i := range 8 * len(tt.frame) {
				v := tab.Match(patch(tt.frame, i/8, tt.frame[i/8]^0x80>>(i%8)))
				if v.Action != matcher.Deliver {
					continue
				}
				want := false
				for _, k := range tt.key {
					want = want || i/8 >= k[0] && i/8 < k[1]
				}
				if (v.Key != before.Key) != want {
					t.Errorf("bit %d of byte %d: key %x, before %x", i%8, i/8, v.Key, before.Key)
				}
			}
		})
	}
}

func TestAFormatWithoutAnEOMRuleHasNoEnd(t *testing.T) {
	rs := matcher.MatchAll()
	rs.EOM = nil
	tab := matcher.Table{Entries: map[int]matcher.Entry{0: {Ruleset: rs, Format: &matcher.Format{Name: "bare"}}}}
	if v := tab.Match(make([]byte, 60)); v.EOM || v.Action != matcher.Deliver {
		t.Errorf("verdict is %+v", v)
	}
}

func TestOffsetsAndLengthsAreShiftedAndKeysAreNot(t *testing.T) {
	frame := []byte{0x12, 0x34, 0x56, 0x78, 0xff}
	f := &matcher.Format{
		Name:   "odd",
		Key:    []matcher.Field{{0, 0x00ff0000}},
		Offset: &matcher.Field{0, 0x0000fff0},
		Length: &matcher.Length{Field: matcher.Field{0, 0x0f000000}, From: 3}, // 3 + 2
	}
	tab := matcher.Table{Entries: map[int]matcher.Entry{0: {Ruleset: matcher.Ruleset{Name: "x"}, Format: f}}}
	want := matcher.Verdict{Action: matcher.Deliver, NKey: 1, Key: [matcher.MaxKey]uint32{0x00340000}, Offset: 0x567}
	if got := tab.Match(frame); got != want {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if got := tab.Match(frame[:4]); got.Action != matcher.Malformed {
		t.Errorf("one byte less gives %+v", got)
	}
}

func TestTheLowestNumberWins(t *testing.T) {
	tab := matcher.Table{Entries: map[int]matcher.Entry{
		3:   entry(matcher.TCPPort(80), 1, "packet"),
		70:  entry(matcher.UDPPort(7000), 2, "packet"),
		255: entry(matcher.MatchAll(), 3, "packet"),
	}}
	x, err := matcher.Compile(&tab)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		frame []byte
		want  int
	}{
		{udp4(1, 7000), 70},
		{udp4(1, 7001), 255},
	} {
		if got := tab.Match(tt.frame).Ruleset; got != tt.want {
			t.Errorf("the table says %d, want %d", got, tt.want)
		}
		if got, ok := x.Lookup(tt.frame); got != tt.want || !ok {
			t.Errorf("the index says %d %v, want %d", got, ok, tt.want)
		}
	}
}

func TestTableValidate(t *testing.T) {
	ok := entry(matcher.UDP(), 0, "packet")
	full := map[int]matcher.Entry{}
	for i := range matcher.MaxRulesets {
		full[i] = ok
	}
	over := map[int]matcher.Entry{256: ok}
	for i := range matcher.MaxRulesets {
		over[i] = ok
	}
	unnamed := ok
	unnamed.Name = ""
	badKey := ok
	badKey.Format = &matcher.Format{Name: "f", Key: []matcher.Field{{Index: 128, Mask: 1}}}
	for _, tt := range []struct {
		name    string
		entries map[int]matcher.Entry
		want    string
	}{
		{"no entries", nil, ""},
		{"256 entries", full, ""},
		{"257 entries", over, "257 rulesets: want at most 256"},
		{"number 255", map[int]matcher.Entry{255: ok}, ""},
		{"number 256", map[int]matcher.Entry{256: ok}, "number 256, want 0 to 255"},
		{"number -1", map[int]matcher.Entry{-1: ok}, "number -1, want 0 to 255"},
		{"context 255", map[int]matcher.Entry{0: entry(matcher.UDP(), 255, "packet")}, ""},
		{"context 256", map[int]matcher.Entry{0: entry(matcher.UDP(), 256, "packet")}, "context 256, want 0 to 255"},
		{"no format", map[int]matcher.Entry{5: entry(matcher.UDP(), 0, "")}, "ruleset udp (number 5) has no message format"},
		{"a bad ruleset", map[int]matcher.Entry{5: unnamed}, "ruleset number 5"},
		{"a bad format", map[int]matcher.Entry{5: badKey}, "key word 0: word 128"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tab := matcher.Table{Entries: tt.entries}
			err := tab.Validate()
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("error is %v, want %q", err, tt.want)
			}
			if err != nil && !errors.Is(err, matcher.ErrTable) {
				t.Error("error does not wrap ErrTable")
			}
			if _, cerr := matcher.Compile(&tab); (cerr == nil) != (err == nil) {
				t.Errorf("Validate says %v, Compile says %v", err, cerr)
			}
		})
	}
}

func TestFormatValidate(t *testing.T) {
	f := func(change func(*matcher.Format)) matcher.Format {
		f := *matcher.FormatByName("slmp")
		change(&f)
		return f
	}
	for _, tt := range []struct {
		name   string
		format matcher.Format
		want   string
	}{
		{"eight key words", f(func(f *matcher.Format) { f.Key = append(f.Key, f.Key...) }), ""},
		{"nine key words", f(func(f *matcher.Format) { f.Key = append(append(f.Key, f.Key...), f.Key[0]) }), "9 key words: want at most 8"},
		{"a key word that selects nothing", f(func(f *matcher.Format) { f.Key[1].Mask = 0 }), "key word 1: mask 0"},
		{"an offset too far", f(func(f *matcher.Format) { f.Offset.Index = 128 }), "offset: word 128"},
		{"a length that selects nothing", f(func(f *matcher.Format) { f.Length.Mask = 0 }), "length: mask 0"},
		{"a length from before the frame", f(func(f *matcher.Format) { f.Length.From = -1 }), "from byte -1"},
		{"a bad EOM rule", f(func(f *matcher.Format) { f.EOM.Index = 128 }), "EOM rule"},
		{"a header of 512 bytes", f(func(f *matcher.Format) { f.Header = 512 }), ""},
		{"a header of 513 bytes", f(func(f *matcher.Format) { f.Header = 513 }), "header of 513 bytes"},
		{"a negative user header", f(func(f *matcher.Format) { f.UserHeader = -1 }), "user header of -1 bytes"},
		{"no name", f(func(f *matcher.Format) { f.Name = "" }), "name is missing"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := tt.format.Validate()
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("error is %v, want %q", err, tt.want)
			}
			if err != nil && !errors.Is(err, matcher.ErrFormat) {
				t.Error("error does not wrap ErrFormat")
			}
		})
	}
}
