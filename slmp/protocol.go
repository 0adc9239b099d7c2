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

// Answer implements hpu.Protocol. It allocates nothing if dst has room for MaxAckLen
// bytes. What is dropped is never answered.
//
//	              processed                  not processed
//	no SYN        -                          -
//	SYN           echo                       -
//	Cumulative    echo, end and bitmap       Wait, end and bitmap
//	 of an ended
//	 message      echo, everything           -
//	of a failed
//	message       -                          -
func (Protocol) Answer(dst []byte, r spin.AckRequest, processed bool, e *mpq.Entry) []byte {
	flags := Flags(r.Flags)
	a := Ack{ID: r.ID, Offset: r.Offset, Cumulative: flags&Cumulative != 0, Wait: !processed}
	switch {
	case flags&SYN == 0, flags&ACK != 0,
		!processed && (!a.Cumulative || e == nil),
		e != nil && e.State() == mpq.Failed:
		return dst
	}
	var words [MaxWords]uint64
	switch {
	case !a.Cumulative:
	case e == nil:
		a.End = EndMax
	default:
		a.End = uint32(min(e.Contiguous(), EndMax))
		a.Bitmap = e.Bitmap(words[:0], MaxWords)
	}
	return a.Append(dst)
}
