// SPDX-License-Identifier: Apache-2.0

package matcher

import (
	"fmt"
	"math/bits"
	"strconv"
)

// SLMPPort is the UDP destination port of SLMP.
const SLMPPort = 9330

// The rules that the predefined rulesets are made of. FPsPIN checks only
// EtherType and protocol, so with IP options, or in any but the first fragment,
// it takes other bytes for ports. Here such frames do not match: the IPv4 header
// must be 20 bytes long, and neither "more fragments" nor a fragment offset may be
// set. "Don't fragment" and the reserved bit may have any value. FPsPIN ignores the
// destination address, which does no harm on its point-to-point links; here all
// rulesets but bypass and match-all are Local.
func ipv4() Rule                     { return Rule{3, 0xffffff00, 0x08004500, 0x08004500} }
func unfragmented(proto uint32) Rule { return Rule{5, 0x3fff00ff, proto, proto} }
func dstPort(port uint16) Rule       { return Rule{9, 0xffff0000, uint32(port) << 16, uint32(port) << 16} }

// A rule that every value satisfies still needs its bytes. These require a whole
// header of 8 bytes (UDP, ICMP) or 20 bytes (TCP) after the 20 bytes of IPv4, so
// that handlers never see a truncated one.
func header8() Rule  { return Rule{10, 0xffff0000, 0, 0xffff0000} }
func header20() Rule { return Rule{13, 0xffff0000, 0, 0xffff0000} }

const (
	protoICMP = 1
	protoTCP  = 6
	protoUDP  = 17

	protoICMPv6 = 58
)

// Bypass matches nothing, like FPsPIN's fpspin_ruleset_bypass.
func Bypass() Ruleset { return Ruleset{Name: "bypass", Mode: Or} }

// MatchAll matches every frame, and every frame ends its message, as with FPsPIN's
// fpspin_ruleset_match. That includes ARP: while it is active on an interface, the
// Linux stack receives nothing there.
func MatchAll() Ruleset {
	eom := Empty
	return Ruleset{Name: "match-all", EOM: &eom}
}

// UDP matches UDP over IPv4 to any port, with the whole UDP header present. The
// message format decides which packet is EOM; with FPsPIN's fpspin_ruleset_udp
// none is.
func UDP() Ruleset {
	return Ruleset{Name: "udp", Rules: []Rule{ipv4(), unfragmented(protoUDP), header8()}, Local: true}
}

// UDPPort matches UDP over IPv4 to one destination port, with the whole UDP
// header present. FPsPIN has no such ruleset.
func UDPPort(port uint16) Ruleset {
	return Ruleset{
		Name:  fmt.Sprintf("udp-%d", port),
		Rules: []Rule{ipv4(), unfragmented(protoUDP), dstPort(port), header8()},
		Local: true,
	}
}

// UDPPort returns the UDP port that all frames that the ruleset matches go to, if its
// rules name one, as those of [UDPPort], [SLMP] and [SLMP6] do.
func (rs *Ruleset) UDPPort() (port uint16, ok bool) {
	is := func(word int, mask, want uint32) bool {
		v, ok := rs.fixed(word, mask)
		return ok && v == want
	}
	var v uint32
	switch {
	case is(3, 0xffffff00, 0x08004500) && is(5, 0xff, protoUDP):
		v, ok = rs.fixed(9, 0xffff0000)
	case is(3, 0xfffff000, 0x86dd6000) && is(5, 0xff000000, protoUDP<<24):
		v, ok = rs.fixed(14, 0xffff0000)
	}
	return uint16(v >> 16), ok
}

// EtherType returns the EtherType of all frames that the ruleset matches, if its rules
// name one.
func (rs *Ruleset) EtherType() (uint16, bool) {
	v, ok := rs.fixed(3, 0xffff0000)
	return uint16(v >> 16), ok
}

// fixed returns the bits of a word under mask, if a rule leaves them one value.
func (rs *Ruleset) fixed(word int, mask uint32) (v uint32, ok bool) {
	if rs.Mode != And {
		return 0, false
	}
	for _, r := range rs.Rules {
		free := uint32(1)<<bits.Len32(r.Start^r.End) - 1
		if r.Index == word && r.Mask&^free&mask == mask {
			return r.Start & mask, true
		}
	}
	return 0, false
}

// TCPPort matches TCP over IPv4 to one destination port, with the first 20 bytes
// of the TCP header present. FPsPIN's test bench takes the ACK flag for EOM; here
// the message format decides.
func TCPPort(port uint16) Ruleset {
	return Ruleset{
		Name:  fmt.Sprintf("tcp-%d", port),
		Rules: []Rule{ipv4(), unfragmented(protoTCP), dstPort(port), header20()},
		Local: true,
	}
}

// ICMPEcho matches ICMP echo requests over IPv4 with the whole ICMP header
// present. FPsPIN's ping example compares only the type, this one also requires
// code 0. The message format decides which packet is EOM; in FPsPIN none is.
func ICMPEcho() Ruleset {
	return Ruleset{
		Name:  "icmp-echo",
		Rules: []Rule{ipv4(), unfragmented(protoICMP), {8, 0xffff, 0x0800, 0x0800}, header8()},
		Local: true,
	}
}

// SLMP matches UDP over IPv4 to port 9330, with EOM from the flags. As in FPsPIN
// the other flags are ignored, so ACKs to this port match too, though they normally
// go to the sender's ephemeral port. A frame too short for the SLMP header matches;
// it is malformed by its format, and so it is counted.
func SLMP() Ruleset {
	eom := *FormatByName("slmp").EOM
	return Ruleset{
		Name:   "slmp",
		Rules:  []Rule{ipv4(), unfragmented(protoUDP), dstPort(SLMPPort)},
		Local:  true,
		EOM:    &eom,
		Format: "slmp",
	}
}

// SLMP6 is SLMP over IPv6: UDP to port 9330 directly after the IPv6 header. A
// packet with extension headers, which includes every fragment, does not match.
// A context has one message format, so IPv4 and IPv6 take two contexts, which may
// share handlers.
func SLMP6() Ruleset {
	eom := *FormatByName("slmp6").EOM
	const port = uint32(SLMPPort) << 16
	return Ruleset{
		Name: "slmp6",
		Rules: []Rule{
			{3, 0xfffff000, 0x86dd6000, 0x86dd6000},
			{5, 0xff000000, protoUDP << 24, protoUDP << 24},
			{14, 0xffff0000, port, port},
		},
		Local:  true,
		EOM:    &eom,
		Format: "slmp6",
	}
}

// predefined are the rulesets that the text form knows by name. Those with a
// port take it in parentheses; of udp it is optional.
var predefined = []struct {
	name string
	make func() Ruleset       // without a port; nil if one is required
	port func(uint16) Ruleset // with a port; nil if it takes none
}{
	{"bypass", Bypass, nil},
	{"match-all", MatchAll, nil},
	{"udp", UDP, UDPPort},
	{"tcp", nil, TCPPort},
	{"icmp-echo", ICMPEcho, nil},
	{"slmp", SLMP, nil},
	{"slmp6", SLMP6, nil},
}

const predefinedUsage = "bypass, match-all, udp, udp(PORT), tcp(PORT), icmp-echo, slmp, slmp6"

// lookupPredefined returns a predefined ruleset, or what is wrong. arg is the text in
// parentheses, and hasArg says whether there were any.
func lookupPredefined(name, arg string, hasArg bool) (rs Ruleset, msg string) {
	for _, p := range predefined {
		switch {
		case p.name != name:
			continue
		case !hasArg && p.make == nil:
			return rs, fmt.Sprintf("%s needs a port: %s(PORT)", name, name)
		case !hasArg:
			return p.make(), ""
		case p.port == nil:
			return rs, fmt.Sprintf("%s takes no argument", name)
		}
		port, err := strconv.ParseUint(arg, 10, 16)
		if err != nil || arg != strconv.FormatUint(port, 10) {
			return rs, fmt.Sprintf("port %q: want a decimal number, 0 to 65535", arg)
		}
		return p.port(uint16(port)), ""
	}
	return rs, fmt.Sprintf("no predefined ruleset %q: want %s", name, predefinedUsage)
}
