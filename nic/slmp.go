// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// slmpProtocol is what the HPUs need to know of SLMP.
type slmpProtocol struct{}

// Inspect implements hpu.Protocol.
func (slmpProtocol) Inspect(header []byte) (spin.AckRequest, bool) {
	h, err := slmp.ParseHeader(header[max(len(header)-slmp.HeaderLen, 0):])
	if err != nil || h.Flags&slmp.ACK != 0 {
		return spin.AckRequest{}, false
	}
	return spin.AckRequest{Flags: uint32(h.Flags), ID: h.ID, Offset: h.Offset}, true
}

// Answer implements hpu.Protocol.
func (slmpProtocol) Answer(dst []byte, a spin.AckRequest, o hpu.Outcome, e *mpq.Entry) []byte {
	h := slmp.Header{Flags: slmp.Flags(a.Flags), ID: a.ID, Offset: a.Offset}
	b, _ := slmp.Answer(dst, h, o == hpu.Processed, e)
	return b
}
