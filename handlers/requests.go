// SPDX-License-Identifier: Apache-2.0

package handlers

import (
	"encoding/binary"
	"errors"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/packet"
	"github.com/xspin/xspin/spin"
)

func init() {
	Register("requests", "has the application answer datagrams; params port (required), mtu (1500, of answers with their IP header; the interface's limits it)", newRequests)
}

// udpHeaders is the length of the headers of a datagram over IPv4 without options.
const udpHeaders = packet.EthernetLen + packet.IPv4Len + packet.UDPLen

// requests has the application answer datagrams. Each becomes a request with the source,
// address and port, as its tag; the answer is sent back, unless its status is not 0.
type requests struct {
	Port uint16 `param:"port,required"`
	MTU  int    `param:"mtu"`

	then hpu.Then // reply; a method value allocates, so it is made only once
}

func newRequests(p Params) (*Set, error) {
	s := &requests{MTU: 1500}
	if err := p.Decode(s); err != nil {
		return nil, err
	}
	if s.MTU < 68 || s.MTU > 65535 {
		return nil, badParam("mtu", "%d: want 68 to 65535", s.MTU)
	}
	s.then = s.reply
	return &Set{
		Handlers: hpu.Handlers{Payload: s.ask},
		Rulesets: []matcher.Ruleset{matcher.UDPPort(s.Port)},
		Queue:    true,
	}, nil
}

func (s *requests) ask(h *hpu.HER) spin.Code {
	hdr := h.Headers()
	if hdr.UDP == nil || hdr.Payload != udpHeaders || !hdr.Contiguous() {
		return spin.Drop
	}
	// Do not bother the application if the answer could not be sent.
	source := binary.BigEndian.Uint32(hdr.IPv4[12:16])
	tag := uint64(source)<<16 | uint64(hdr.UDP.SrcPort())
	if !hdr.Answerable() || !hdr.Intact() || h.AskThen(tag, hdr.UDP.Payload(), s.then) != nil {
		return spin.Drop
	}
	return spin.Success
}

// reply sends the answer.
func (s *requests) reply(h *hpu.HER, r *hpu.Reply) spin.Code {
	n := len(r.Payload)
	if r.Err != nil || r.Status != 0 {
		return spin.Drop
	}
	if most := s.MTU - (udpHeaders - packet.EthernetLen); n > most {
		h.Logf("requests: an answer of %d bytes is dropped: want at most %d, see the parameter mtu", n, most)
		return spin.Drop
	}
	b, err := h.Reply(n)
	if err != nil {
		if errors.Is(err, hpu.ErrSize) {
			h.Logf("requests: an answer is dropped: %v", err)
		}
		return spin.Drop
	}
	copy(b, r.Payload)
	return spin.Success
}
