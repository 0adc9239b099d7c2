// SPDX-License-Identifier: Apache-2.0

package slmp

import (
	"bytes"
	"errors"
	"slices"
	"testing"
)

func TestAck(t *testing.T) {
	for _, c := range []struct {
		name string
		wire []byte
		ack  Ack
		err  error
	}{
		{"FPsPIN's", []byte{0x20, 0, 0, 0, 0, 7, 0, 0, 5, 0x80}, Ack{ID: 7, Offset: 1408}, nil},
		{"cumulative",
			[]byte{0x30, 0, 0, 0, 0, 7, 0, 0, 5, 0x80, 0, 0, 0x0b, 0, 0, 0, 0, 0, 0, 0, 0, 5},
			Ack{ID: 7, Offset: 1408, Cumulative: true, End: 2816, Bitmap: []uint64{5}}, nil},
		{"wait, two words",
			[]byte{0x38, 0, 0, 0, 0, 7, 0, 0, 5, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0x80, 0, 0, 0, 0, 0, 0, 0},
			Ack{ID: 7, Offset: 1408, Cumulative: true, Wait: true, Bitmap: []uint64{1, 1 << 63}}, nil},
		{"nothing", nil, Ack{}, ErrAckSize},
		{"short", make([]byte, 9), Ack{}, ErrAckSize},
		{"a segment", []byte{0xc0, 0, 0, 0, 0, 7, 0, 0, 5, 0x80}, Ack{}, ErrNotAck},
		{"plain but longer", []byte{0x20, 0, 0, 0, 0, 7, 0, 0, 5, 0x80, 0}, Ack{}, ErrAckSize},
		{"cumulative but short", []byte{0x30, 0, 0, 0, 0, 7, 0, 0, 5, 0x80}, Ack{}, ErrAckSize},
		{"no word", append([]byte{0x30, 0}, make([]byte, 12)...), Ack{}, ErrAckSize},
		{"17 words", append([]byte{0x30, 0}, make([]byte, 12+17*8)...), Ack{}, ErrAckSize},
		{"half a word", append([]byte{0x30, 0}, make([]byte, 12+12)...), Ack{}, ErrAckSize},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, err := ParseAck(c.wire)
			if !errors.Is(err, c.err) {
				t.Fatalf("error %v, want %v", err, c.err)
			}
			if err != nil {
				return
			}
			if !sameAck(a, c.ack) {
				t.Errorf("parsed %+v, want %+v", a, c.ack)
			}
			if b := c.ack.Append(nil); !bytes.Equal(b, c.wire) {
				t.Errorf("written % x, want % x", b, c.wire)
			}
		})
	}
}

func sameAck(a, b Ack) bool {
	return a.ID == b.ID && a.Offset == b.Offset && a.Cumulative == b.Cumulative && a.Wait == b.Wait && a.End == b.End && slices.Equal(a.Bitmap, b.Bitmap)
}

func FuzzParseAck(f *testing.F) {
	f.Add([]byte{0x20, 0, 0, 0, 0, 7, 0, 0, 5, 0x80})
	f.Add([]byte{0x38, 0, 0, 0, 0, 7, 0, 0, 5, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := ParseAck(b)
		if err != nil {
			return
		}
		w := a.Append(nil)
		if len(w) != len(b) || len(w) > MaxAckLen {
			t.Fatalf("% x written as % x", b, w)
		}
		again, err := ParseAck(w)
		if err != nil || !sameAck(a, again) {
			t.Errorf("%+v came back as %+v, %v", a, again, err)
		}
	})
}
