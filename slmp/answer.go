// SPDX-License-Identifier: Apache-2.0

package slmp

import "github.com/xspin/xspin/mpq"

// Answer appends to dst what a receiver answers to a segment with header h, and
// reports whether there is something to be sent. It allocates nothing if dst has
// room for MaxAckLen bytes.
//
// processed says that the segment is acknowledged: its HER has finished, or had
// when it came again; of EOM, that the message is complete, and its event is
// queued. The entry is that of its message, nil if the message has ended. What is
// dropped is never answered.
//
//	              processed                  not processed
//	no SYN        -                          -
//	SYN           echo                       -
//	Cumulative    echo, end and bitmap       Wait, end and bitmap
//	 of an ended
//	 message      echo, everything           -
//	of a failed
//	message       -                          -
func Answer(dst []byte, h Header, processed bool, e *mpq.Entry) ([]byte, bool) {
	a := Ack{ID: h.ID, Offset: h.Offset, Cumulative: h.Flags&Cumulative != 0, Wait: !processed}
	switch {
	case h.Flags&SYN == 0, h.Flags&ACK != 0,
		!processed && (!a.Cumulative || e == nil),
		e != nil && e.State() == mpq.Failed:
		return dst, false
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
	return a.Append(dst), true
}
