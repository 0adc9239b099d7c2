// SPDX-License-Identifier: Apache-2.0

package handlers

import (
	"encoding/binary"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/packet"
	"github.com/xspin/xspin/spin"
)

func init() {
	Register("echo-icmp", "answers pings", newEchoICMP)
	Register("echo-udp", "sends each datagram back; param port (7)", newEchoUDP)
	Register("echo-host", "sends packets back with checksums that the application computes; params proto (udp, or icmp), port (7)", newEchoHost)
}

func newEchoICMP(p Params) (*Set, error) {
	if err := p.Decode(&struct{}{}); err != nil {
		return nil, err
	}
	return &Set{
		Handlers: hpu.Handlers{Payload: echoICMP},
		Rulesets: []matcher.Ruleset{matcher.ICMPEcho()},
	}, nil
}

// echoICMP answers a ping: it swaps the addresses, sets type 0, and computes the checksum.
func echoICMP(h *hpu.HER) spin.Code {
	var room [4][]byte
	if !h.Headers().ReplyICMPEcho(h.Rest(room[:0])...) || h.Send() != nil {
		return spin.Drop
	}
	return spin.Success
}

func newEchoUDP(p Params) (*Set, error) {
	c := struct {
		Port uint16 `param:"port"`
	}{7}
	if err := p.Decode(&c); err != nil {
		return nil, err
	}
	return &Set{
		Handlers: hpu.Handlers{Payload: echoUDP},
		Rulesets: []matcher.Ruleset{matcher.UDPPort(c.Port)},
	}, nil
}

// echoUDP answers a datagram: it swaps the addresses and ports, which leaves a UDP
// checksum that is right as it is.
func echoUDP(h *hpu.HER) spin.Code {
	var room [4][]byte
	hdr := h.Headers()
	if !hdr.Hop() || !hdr.ReplyUDP(h.Rest(room[:0])...) || h.Send() != nil {
		return spin.Drop
	}
	return spin.Success
}

func newEchoHost(p Params) (*Set, error) {
	c := struct {
		Proto string `param:"proto"`
		Port  uint16 `param:"port"`
	}{"udp", 7}
	if err := p.Decode(&c); err != nil {
		return nil, err
	}
	s := &Set{Handlers: hpu.Handlers{Payload: echoHost}, Queue: true}
	switch c.Proto {
	case "icmp":
		s.Rulesets = []matcher.Ruleset{matcher.ICMPEcho()}
	case "udp":
		s.Rulesets = []matcher.Ruleset{matcher.UDPPort(c.Port)}
	default:
		return nil, badParam("proto", "%q: want udp or icmp", c.Proto)
	}
	return s, nil
}

// echoHost is the NIC's half of an echo: it turns the packet into the reply, with a
// checksum of 0, and asks the application for the checksum. The HPU does not wait for
// the answer.
func echoHost(h *hpu.HER) spin.Code {
	if h.Segments() > 1 || !h.Headers().Hop() || !h.Headers().Turn() || h.AskThen(uint64(h.Headers().IPv4.Protocol()), h.Head(), echoSum) != nil {
		return spin.Drop
	}
	return spin.Success
}

// echoSum gets the answer, a checksum of two bytes.
func echoSum(h *hpu.HER, r *hpu.Reply) spin.Code {
	if r.Err != nil || r.Status != 0 || len(r.Payload) != 2 {
		return spin.Drop
	}
	sum := binary.BigEndian.Uint16(r.Payload)
	if hdr := h.Headers(); hdr.UDP != nil {
		hdr.UDP.SetChecksum(sum)
	} else {
		hdr.ICMP.SetChecksum(sum)
	}
	if h.Send() != nil {
		return spin.Drop
	}
	return spin.Success
}

// EchoSum is the application's half of "echo-host": it appends the answer to a request to
// dst. frame is the request's payload. It returns false if that frame cannot be answered.
func EchoSum(dst, frame []byte) ([]byte, bool) {
	hdr := packet.Parse(frame, len(frame))
	switch {
	case hdr.UDP != nil:
		sum, ok := hdr.UDPChecksum()
		return binary.BigEndian.AppendUint16(dst, sum), ok
	case hdr.ICMP != nil && hdr.Contiguous():
		message := frame[hdr.Transport : hdr.Payload+hdr.PayloadLen]
		return binary.BigEndian.AppendUint16(dst, packet.ChecksumOf(message)), true
	}
	return dst, false
}
