// SPDX-License-Identifier: Apache-2.0

package slmp

import (
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/spin"
)

// Protocol is SLMP as a message engine sees it: an hpu.Protocol.
type Protocol struct{}

// Inspect implements hpu.Protocol.
func (Protocol) Inspect(header []byte) (spin.AckRequest, bool) {
	h, err := ParseHeader(header[max(len(header)-HeaderLen, 0):])
	if err != nil || h.Flags&ACK != 0 {
		return spin.AckRequest{}, false
	}
	return spin.AckRequest{Flags: uint32(h.Flags), ID: h.ID, Offset: h.Offset}, true
}

// Answer implements hpu.Protocol.
func (Protocol) Answer(dst []byte, a spin.AckRequest, processed bool, e *mpq.Entry) []byte {
	b, _ := Answer(dst, Header{Flags: Flags(a.Flags), ID: a.ID, Offset: a.Offset}, processed, e)
	return b
}
