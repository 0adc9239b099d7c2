// SPDX-License-Identifier: Apache-2.0

package handlers

import (
	"net/netip"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/spin"
)

func init() {
	Register("push", "host-activated: sends a range of a window as datagrams; params to (address:port, required), port (9402, source)", newPush)
}

// push sends a range of a window (sPIN-Out): each slice of the triggered message is a
// datagram. The first word of the trigger, if it is not 0, is the port to send to.
type push struct {
	To   netip.AddrPort `param:"to,required"`
	Port uint16         `param:"port"`
}

func newPush(p Params) (*Set, error) {
	s := &push{Port: 9402}
	if err := p.Decode(s); err != nil {
		return nil, err
	}
	if !s.To.Addr().Is4() || s.To.Port() == 0 {
		return nil, badParam("to", "%v: want an IPv4 address and a port", s.To)
	}
	return &Set{Handlers: hpu.Handlers{Init: s.init, Header: s.begin, Payload: s.send}, Triggered: true}, nil
}

// init starts the resolution of the address, so that the first trigger finds it known.
func (s *push) init(t *hpu.Task) error {
	_, _ = t.Resolve(s.To.Addr())
	return nil
}

// begin fails a message whose destination is not resolved yet. The application is told,
// and can trigger it again.
func (s *push) begin(h *hpu.HER) spin.Code {
	if _, err := h.Resolve(s.To.Addr()); err != nil {
		h.Logf("push to %v: %v", s.To, err)
		return spin.Fail
	}
	return spin.ProcessData
}

func (s *push) send(h *hpu.HER) spin.Code {
	to := s.To
	if port := uint16(h.Message().Words()[0]); port != 0 {
		to = netip.AddrPortFrom(to.Addr(), port)
	}
	b, err := h.SendUDP(s.Port, to, h.PayloadLen())
	if err != nil {
		return spin.Drop // counted: the message's event says how many bytes
	}
	for part := range h.Payload() {
		b = b[copy(b, part):]
	}
	return spin.Success
}
