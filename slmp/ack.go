// SPDX-License-Identifier: Apache-2.0

package slmp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

const (
	// MaxWords is how many bitmap words an acknowledgement can have: they
	// say what has become of 1024 segments.
	MaxWords = 16
	// MaxAckLen is the length of the longest acknowledgement, in bytes.
	MaxAckLen = HeaderLen + 4 + 8*MaxWords
	// EndMax is the contiguous end that stands for all ends from here on. A
	// receiver that remembers of a message only that it has ended says this.
	EndMax = math.MaxUint32
)

// Errors of ParseAck. They are not wrapped in anything that allocates: anybody
// who can send a sender one datagram can send it many.
var (
	ErrNotAck  = errors.New("datagram is not an acknowledgement: the ACK flag is not set")
	ErrAckSize = errors.New("acknowledgement of wrong length: want 10 bytes, cumulative ones 14 bytes and 1 to 16 times 8")
)

// An Ack is an acknowledgement. Those of FPsPIN's echo the segment that they
// acknowledge; cumulative ones tell about the others too.
type Ack struct {
	ID, Offset uint32 // of the segment that it answers

	Cumulative bool
	Wait       bool   // with Cumulative: the segment that it answers is not acknowledged yet
	End        uint32 // with Cumulative: all bytes below are processed; EndMax: or more

	// Bitmap, with Cumulative, has 1 to MaxWords words. Bit i of word w: the
	// segment that begins at End + (64*w+i+1)*S has been processed, S being
	// the length of the message's first segment. Segments behind the last
	// word may or may not be.
	Bitmap []uint64
}

// ParseAck reads an acknowledgement.
func ParseAck(b []byte) (Ack, error) {
	var a Ack
	err := a.Parse(b)
	return a, err
}

// Parse reads an acknowledgement into a, into the bitmap that a has if it is
// large enough. After an error a is not to be used.
func (a *Ack) Parse(b []byte) error {
	if len(b) < HeaderLen {
		return ErrAckSize
	}
	h, err := ParseHeader(b)
	if err != nil {
		return err
	}
	if h.Flags&ACK == 0 {
		return ErrNotAck
	}
	a.ID, a.Offset = h.ID, h.Offset
	a.Cumulative = h.Flags&Cumulative != 0
	a.Wait, a.End, a.Bitmap = false, 0, a.Bitmap[:0]
	if !a.Cumulative {
		if len(b) != HeaderLen {
			return ErrAckSize
		}
		return nil
	}
	words := (len(b) - HeaderLen - 4) / 8
	if words < 1 || words > MaxWords || len(b) != HeaderLen+4+8*words {
		return ErrAckSize
	}
	a.Wait = h.Flags&Wait != 0
	a.End = binary.BigEndian.Uint32(b[HeaderLen:])
	for b = b[HeaderLen+4:]; len(b) > 0; b = b[8:] {
		a.Bitmap = append(a.Bitmap, binary.BigEndian.Uint64(b))
	}
	return nil
}

// Append appends the datagram to dst. A cumulative one gets at least one word;
// it panics when there are more than MaxWords, which is the caller's mistake.
func (a *Ack) Append(dst []byte) []byte {
	f := ACK
	if a.Cumulative {
		f |= Cumulative
		if a.Wait {
			f |= Wait
		}
	}
	dst = binary.BigEndian.AppendUint16(dst, uint16(f))
	dst = binary.BigEndian.AppendUint32(dst, a.ID)
	dst = binary.BigEndian.AppendUint32(dst, a.Offset)
	if !a.Cumulative {
		return dst
	}
	if len(a.Bitmap) > MaxWords {
		panic(fmt.Sprintf("SLMP acknowledgement with %d bitmap words, at most %d", len(a.Bitmap), MaxWords))
	}
	dst = binary.BigEndian.AppendUint32(dst, a.End)
	if len(a.Bitmap) == 0 {
		return binary.BigEndian.AppendUint64(dst, 0)
	}
	for _, w := range a.Bitmap {
		dst = binary.BigEndian.AppendUint64(dst, w)
	}
	return dst
}
