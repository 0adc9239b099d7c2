// SPDX-License-Identifier: Apache-2.0

// Package slmptest has a receiver of SLMP for tests of receivers: what others answer is
// compared with what it answers.
package slmptest

import (
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// A Receiver does with one segment after the other what the message engine of HPUs does, and
// nothing at the same time.
type Receiver struct {
	table  *mpq.Table
	window []byte
}

// New returns a receiver of that many messages in flight, each of which goes to the start
// of the window. Nothing waits for a header packet.
func New(messages int, window []byte) *Receiver {
	q, err := mpq.NewQueue(mpq.Config{Messages: messages, Words: 4, Held: -1})
	if err != nil {
		panic(err) // the configuration is this test's
	}
	return &Receiver{q.NewTable(false), window}
}

// Take returns the answer to a segment, the payload of a datagram; nil: there is none.
func (r *Receiver) Take(key mpq.Key, h slmp.Header, payload []byte) []byte {
	seg := mpq.Segment{Offset: h.Offset, Len: len(payload), EOM: h.Flags&slmp.EOM != 0}
	ask := spin.AckRequest{Flags: uint32(h.Flags), ID: h.ID, Offset: h.Offset}
	say := func(processed bool, e *mpq.Entry) []byte { return slmp.Protocol{}.Answer(nil, ask, processed, e) }
	e, d, _ := r.table.Arrive(&key, seg, 1)
	switch d {
	case mpq.Start, mpq.Run:
		if d == mpq.Start {
			r.table.Opened(e, 1)
			e.User = nil
		}
		if seg.EOM {
			e.User = ask
		}
		copy(r.window[h.Offset:], payload)
		if !r.table.Finish(e, seg, 1) {
			return say(!seg.EOM, e)
		}
		if eom := e.User; !seg.EOM && eom != nil {
			// One packet has one answer: that of EOM says all.
			if a := eom.(spin.AckRequest); slmp.Flags(a.Flags)&slmp.SYN != 0 {
				ask = a
			}
		}
		answer := say(true, e)
		r.table.End(e, 1)
		return answer
	case mpq.Again:
		return say(true, e)
	case mpq.Wait:
		return say(false, e)
	}
	return nil
}
