// SPDX-License-Identifier: Apache-2.0

package handlers

import (
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/spin"
)

func init() {
	Register("count", "counts packets and bytes, also for an application; param to (stack, or drop)", newCount)
}

// Counting events of "count". User counter 0 has the same numbers.
const (
	CountPackets = iota
	CountBytes
)

func newCount(p Params) (*Set, error) {
	c := struct {
		To string `param:"to"`
	}{"stack"}
	if err := p.Decode(&c); err != nil {
		return nil, err
	}
	if c.To != "stack" && c.To != "drop" {
		return nil, badParam("to", "%q: want stack or drop", c.To)
	}
	toStack := c.To == "stack"
	return &Set{Handlers: hpu.Handlers{Payload: func(h *hpu.HER) spin.Code {
		h.Count(0, uint64(h.Len()))
		if packets := h.Counter(CountPackets); packets != nil { // there is an application
			packets.Add(1)
			h.Counter(CountBytes).Add(uint64(h.Len()))
		}
		if toStack && h.ToStack() == nil {
			return spin.Success
		}
		return spin.Drop
	}}}, nil
}
