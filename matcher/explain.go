// SPDX-License-Identifier: Apache-2.0

package matcher

import (
	"fmt"
	"math/bits"
	"strings"
)

// Explain says in words what a ruleset matches. It names a field of a protocol's
// header only if the ruleset itself makes sure of the protocol: bytes 36-37 are
// the UDP destination port only with rules for IPv4, no options and UDP. Everything
// else is explained as bytes.
func Explain(rs *Ruleset) string {
	var b strings.Builder
	known := ethernet // the protocols that are certain
	if rs.Mode == And {
		known = established(rs.Rules)
	}
	switch {
	case known&udp != 0 && rs.Format == "slmp":
		known |= slmp
	case known&udp6 != 0 && rs.Format == "slmp6":
		known |= slmp6
	}

	var phrases []string
	size := 0
	for _, r := range rs.Rules {
		if rs.Mode == Or {
			phrases = append(phrases, join(describe(r, established([]Rule{r})), "and"))
		} else if r.onlyNeeds() {
			size = max(size, r.Need())
		} else {
			phrases = append(phrases, describe(r, known)...)
		}
	}
	switch {
	case len(rs.Rules) == 0 && rs.Mode == And:
		b.WriteString("every frame")
	case len(rs.Rules) == 0:
		return "no frame."
	case size > 0:
		fmt.Fprintf(&b, "frames of at least %d bytes", size)
	default:
		b.WriteString("frames")
	}
	if len(phrases) > 0 {
		b.WriteString(" with " + join(phrases, map[Mode]string{And: "and", Or: "or"}[rs.Mode]))
	}
	if rs.Local {
		b.WriteString(", addressed to the interface itself (its MAC and one of its IP addresses)")
	}
	b.WriteString(". ")

	switch {
	case rs.EOM == nil && rs.Format == "":
		b.WriteString("The context's message format decides which frame ends its message.")
	case rs.EOM == nil:
		fmt.Fprintf(&b, "The message format %s decides which frame ends its message.", rs.Format)
	case *rs.EOM == Empty:
		b.WriteString("Every frame ends its message.")
	case *rs.EOM == False:
		b.WriteString("No frame ends its message.")
	default:
		fmt.Fprintf(&b, "A frame with %s ends its message.", join(describe(*rs.EOM, known), "and"))
	}
	if rs.Format != "" && rs.EOM != nil {
		fmt.Fprintf(&b, " Written for message format %s.", rs.Format)
	}
	return b.String()
}

// layers is a set of protocols.
type layers uint

const (
	ethernet layers = 1 << iota
	ip
	icmp
	tcp
	udp
	slmp
	ip6
	udp6
	slmp6
)

// established returns the protocols that are certain when all rules hold.
func established(rules []Rule) layers {
	is := func(index int, mask, value uint32) bool {
		var m, v uint32
		for _, r := range rules {
			if r.Index == index && r.Start == r.End {
				m, v = m|r.Mask, v|r.Start
			}
		}
		return m&mask == mask && v&mask == value
	}
	set := ethernet
	if is(3, 0xffff0000, 0x86dd0000) {
		set |= ip6
		if is(5, 0xff000000, protoUDP<<24) { // and no extension headers
			set |= udp6
			if is(14, 0xffff0000, SLMPPort<<16) {
				set |= slmp6
			}
		}
		return set
	}
	if !is(3, 0xffff0000, 0x08000000) {
		return set
	}
	set |= ip
	if !is(3, 0x0000ff00, 0x4500) {
		return set // options may move what follows
	}
	switch {
	case is(5, 0xff, protoICMP):
		set |= icmp
	case is(5, 0xff, protoTCP):
		set |= tcp
	case is(5, 0xff, protoUDP):
		set |= udp
		if is(9, 0xffff0000, SLMPPort<<16) {
			set |= slmp
		}
	}
	return set
}

// header is a piece of a header that has a name.
type header struct {
	in    layers
	index int
	mask  uint32
	name  string
	value func(uint32) string // of the value, shifted down
}

var headers = []header{
	{ethernet, 0, 0xffffffff, "destination MAC", pattern("%02x:%02x:%02x:%02x:*:*", 4)},
	{ethernet, 1, 0xffff0000, "destination MAC", pattern("*:*:*:*:%02x:%02x", 2)},
	{ethernet, 1, 0x0000ffff, "source MAC", pattern("%02x:%02x:*:*:*:*", 2)},
	{ethernet, 2, 0xffffffff, "source MAC", pattern("*:*:%02x:%02x:%02x:%02x", 4)},
	{ethernet, 3, 0xffff0000, "EtherType", names("0x%04x", map[uint32]string{
		0x0800: "IPv4", 0x0806: "ARP", 0x8100: "VLAN tag", 0x86dd: "IPv6", 0x88a8: "VLAN tag"})},

	{ip, 3, 0x0000ff00, "IPv4 version/header length", names("0x%02x", map[uint32]string{0x45: "20 bytes, no options"})},
	{ip, 3, 0x000000ff, "IPv4 DSCP/ECN", names("0x%02x", nil)},
	{ip, 4, 0xffff0000, "IPv4 total length", decimal},
	{ip, 4, 0x0000ffff, "IPv4 identification", names("0x%04x", nil)},
	{ip, 5, 0x3fff0000, "IPv4 fragment bits", names("0x%04x", map[uint32]string{0: "not a fragment"})},
	{ip, 5, 0x40000000, "IPv4 flag DF", flag},
	{ip, 5, 0x20000000, "IPv4 flag MF", flag},
	{ip, 5, 0x1fff0000, "IPv4 fragment offset", decimal},
	{ip, 5, 0x0000ff00, "IPv4 TTL", decimal},
	{ip, 5, 0x000000ff, "IPv4 protocol", names("%d", map[uint32]string{protoICMP: "ICMP", protoTCP: "TCP", protoUDP: "UDP"})},
	{ip, 6, 0xffff0000, "IPv4 header checksum", names("0x%04x", nil)},
	{ip, 6, 0x0000ffff, "IPv4 source address", pattern("%d.%d.*.*", 2)},
	{ip, 7, 0xffff0000, "IPv4 source address", pattern("*.*.%d.%d", 2)},
	{ip, 7, 0x0000ffff, "IPv4 destination address", pattern("%d.%d.*.*", 2)},

	// The IPv4 destination address ends in the word in which the next header
	// starts, if there are no options.
	{ip, 8, 0xffff0000, "IPv4 destination address", pattern("*.*.%d.%d", 2)},
	{icmp, 8, 0x0000ff00, "ICMP type", names("%d", map[uint32]string{0: "echo reply", 3: "unreachable", 8: "echo request", 11: "time exceeded"})},
	{icmp, 8, 0x000000ff, "ICMP code", decimal},
	{icmp, 9, 0xffff0000, "ICMP checksum", names("0x%04x", nil)},
	{icmp, 9, 0x0000ffff, "ICMP identifier", names("0x%04x", nil)},
	{icmp, 10, 0xffff0000, "ICMP sequence number", decimal},
	{udp, 8, 0x0000ffff, "UDP source port", decimal},
	{udp, 9, 0xffff0000, "UDP destination port", names("%d", map[uint32]string{SLMPPort: "SLMP"})},
	{udp, 9, 0x0000ffff, "UDP length", decimal},
	{udp, 10, 0xffff0000, "UDP checksum", names("0x%04x", nil)},
	{tcp, 8, 0x0000ffff, "TCP source port", decimal},
	{tcp, 9, 0xffff0000, "TCP destination port", decimal},
	{tcp, 11, 0x0000f000, "TCP data offset", decimal},
	{tcp, 11, 0x00000020, "TCP flag URG", flag},
	{tcp, 11, 0x00000010, "TCP flag ACK", flag},
	{tcp, 11, 0x00000008, "TCP flag PSH", flag},
	{tcp, 11, 0x00000004, "TCP flag RST", flag},
	{tcp, 11, 0x00000002, "TCP flag SYN", flag},
	{tcp, 11, 0x00000001, "TCP flag FIN", flag},
	{tcp, 12, 0xffff0000, "TCP window", decimal},
	{slmp, 10, 0x00008000, "SLMP flag EOM", flag},
	{slmp, 10, 0x00004000, "SLMP flag SYN", flag},
	{slmp, 10, 0x00002000, "SLMP flag ACK", flag},
	{slmp, 11, 0xffffffff, "SLMP message id", names("0x%08x", nil)},
	{slmp, 12, 0xffffffff, "SLMP packet offset", decimal},

	{ip6, 3, 0x0000f000, "IP version", decimal},
	{ip6, 3, 0x00000ff0, "IPv6 traffic class", names("0x%02x", nil)},
	{ip6, 4, 0x0000ffff, "IPv6 payload length", decimal},
	{ip6, 5, 0xff000000, "IPv6 next header", names("%d", map[uint32]string{
		protoTCP: "TCP", protoUDP: "UDP", 44: "fragment", protoICMPv6: "ICMPv6"})},
	{ip6, 5, 0x00ff0000, "IPv6 hop limit", decimal},
	{ip6, 5, 0x0000ffff, "IPv6 source address", pattern("%02x%02x:*:*:*:*:*:*:*", 2)},
	{ip6, 6, 0xffffffff, "IPv6 source address", pattern("*:%02x%02x:%02x%02x:*:*:*:*:*", 4)},
	{ip6, 7, 0xffffffff, "IPv6 source address", pattern("*:*:*:%02x%02x:%02x%02x:*:*:*", 4)},
	{ip6, 8, 0xffffffff, "IPv6 source address", pattern("*:*:*:*:*:%02x%02x:%02x%02x:*", 4)},
	{ip6, 9, 0xffff0000, "IPv6 source address", pattern("*:*:*:*:*:*:*:%02x%02x", 2)},
	{ip6, 9, 0x0000ffff, "IPv6 destination address", pattern("%02x%02x:*:*:*:*:*:*:*", 2)},
	{ip6, 10, 0xffffffff, "IPv6 destination address", pattern("*:%02x%02x:%02x%02x:*:*:*:*:*", 4)},
	{ip6, 11, 0xffffffff, "IPv6 destination address", pattern("*:*:*:%02x%02x:%02x%02x:*:*:*", 4)},
	{ip6, 12, 0xffffffff, "IPv6 destination address", pattern("*:*:*:*:*:%02x%02x:%02x%02x:*", 4)},
	{ip6, 13, 0xffff0000, "IPv6 destination address", pattern("*:*:*:*:*:*:*:%02x%02x", 2)},
	{udp6, 13, 0x0000ffff, "UDP source port", decimal},
	{udp6, 14, 0xffff0000, "UDP destination port", names("%d", map[uint32]string{SLMPPort: "SLMP"})},
	{udp6, 14, 0x0000ffff, "UDP length", decimal},
	{udp6, 15, 0xffff0000, "UDP checksum", names("0x%04x", nil)},
	{slmp6, 15, 0x00008000, "SLMP flag EOM", flag},
	{slmp6, 15, 0x00004000, "SLMP flag SYN", flag},
	{slmp6, 15, 0x00002000, "SLMP flag ACK", flag},
	{slmp6, 16, 0xffffffff, "SLMP message id", names("0x%08x", nil)},
	{slmp6, 17, 0xffffffff, "SLMP packet offset", decimal},
}

func decimal(v uint32) string { return fmt.Sprint(v) }

func flag(v uint32) string {
	if v == 0 {
		return "clear"
	}
	return "set"
}

// names formats a value, and adds its name if it has one.
func names(format string, of map[uint32]string) func(uint32) string {
	return func(v uint32) string {
		s := fmt.Sprintf(format, v)
		if name, ok := of[v]; ok {
			s += " (" + name + ")"
		}
		return s
	}
}

// pattern formats the n bytes of a value one by one.
func pattern(format string, n int) func(uint32) string {
	return func(v uint32) string {
		args := make([]any, n)
		for i := range args {
			args[i] = v >> (8 * (n - 1 - i)) & 0xff
		}
		return fmt.Sprintf(format, args...)
	}
}

// onlyNeeds reports whether a rule holds for every frame that has its bytes.
func (r Rule) onlyNeeds() bool { return r.Mask != 0 && r.Start == 0 && r.End >= r.Mask }

// describe says in one phrase or several what a rule requires, given the protocols
// that are certain.
func describe(r Rule, known layers) []string {
	switch {
	case r.Mask == 0 && r.Match(nil):
		return []string{"a condition that always holds"}
	case r.Mask == 0:
		return []string{"a condition that never holds"}
	case r.onlyNeeds():
		return []string{fmt.Sprintf("at least %d bytes", r.Need())}
	}
	var phrases []string
	rest := r.Mask
	for _, h := range headers {
		shift := bits.TrailingZeros32(h.mask)
		switch {
		case h.index != r.Index || known&h.in == 0:
		case r.Start == r.End && rest&h.mask == h.mask:
			phrases = append(phrases, h.name+" "+h.value(r.Start&h.mask>>shift))
			rest &^= h.mask
		case r.Start != r.End && r.Mask == h.mask:
			// A bound need not be a value under the mask: take the nearest inside.
			first, _ := nextUnderMask(r.Start, r.Mask)
			return []string{fmt.Sprintf("%s %s to %s", h.name, h.value(first>>shift), h.value(min(r.End, r.Mask)>>shift))}
		}
	}
	if rest == 0 {
		return phrases
	}

	first, last := bits.LeadingZeros32(rest)/8, need(0, rest)-1
	s := fmt.Sprintf("bytes %d-%d", 4*r.Index+first, 4*r.Index+last)
	if first == last {
		s = fmt.Sprintf("byte %d", 4*r.Index+first)
	}
	// The numbers are those of the selected bytes, as they stand in the frame.
	shift := 8 * (3 - last)
	digits := 2 * (last - first + 1)
	if whole := uint32(1)<<(4*digits) - 1; rest>>shift != whole {
		s += fmt.Sprintf(" (masked with 0x%0*x)", digits, rest>>shift)
	}
	if r.Start == r.End {
		return append(phrases, fmt.Sprintf("%s equal to 0x%0*x", s, digits, r.Start&rest>>shift))
	}
	start, _ := nextUnderMask(r.Start, r.Mask)
	return append(phrases, fmt.Sprintf("%s from 0x%0*x to 0x%0*x", s, digits, start>>shift, digits, min(r.End, r.Mask)>>shift))
}

// join makes "a", "a and b", "a, b and c".
func join(s []string, word string) string {
	if len(s) == 1 {
		return s[0]
	}
	return strings.Join(s[:len(s)-1], ", ") + " " + word + " " + s[len(s)-1]
}
