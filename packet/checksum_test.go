// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"
)

// naive is RFC 1071's sum, two bytes at a time, not complemented.
func naive(b []byte) uint16 {
	var s uint64
	for i, v := range b {
		if i%2 == 0 {
			s += uint64(v) << 8
		} else {
			s += uint64(v)
		}
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}

func TestChecksumVectors(t *testing.T) {
	for _, c := range []struct {
		name string
		data []byte
		want uint16
	}{
		{"nothing", nil, 0xffff},
		{"one byte is padded with zero", []byte{0x12}, ^uint16(0x1200)},
		{"zeros", make([]byte, 100), 0xffff},
		{"RFC 1071 section 3", []byte{0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7}, ^uint16(0xddf2)},
		{"IPv4 header", []byte{0x45, 0, 0, 0x73, 0, 0, 0x40, 0, 0x40, 0x11, 0, 0, 0xc0, 0xa8, 0, 1, 0xc0, 0xa8, 0, 0xc7}, 0xb861},
		{"IPv4 header with its checksum", []byte{0x45, 0, 0, 0x73, 0, 0, 0x40, 0, 0x40, 0x11, 0xb8, 0x61, 0xc0, 0xa8, 0, 1, 0xc0, 0xa8, 0, 0xc7}, 0},
	} {
		if got := ChecksumOf(c.data); got != c.want {
			t.Errorf("%s: %#04x, want %#04x", c.name, got, c.want)
		}
	}
}

func TestChecksumOfAnyLengthAndAlignment(t *testing.T) {
	r := newRand(t)
	buf := random(r, 400)
	ones := slices.Repeat([]byte{0xff}, 400) // carries everywhere
	for off := range 9 {
		for n := range 300 {
			for _, b := range [][]byte{buf[off : off+n], ones[off : off+n]} {
				if got, want := ChecksumOf(b), ^naive(b); got != want {
					t.Fatalf("%d bytes at %d: %#04x, want %#04x", n, off, got, want)
				}
			}
		}
	}
}

// Long runs of carries are rare in random data.
func TestChecksumCarries(t *testing.T) {
	words := []uint64{0, 1, 1 << 63, ^uint64(0) - 1, ^uint64(0)}
	r := newRand(t)
	for range 20000 {
		b := make([]byte, 8*(1+r.IntN(20)))
		for i := 0; i < len(b); i += 8 {
			binary.LittleEndian.PutUint64(b[i:], words[r.IntN(len(words))])
		}
		if got, want := ChecksumOf(b), ^naive(b); got != want {
			t.Fatalf("% x: %#04x, want %#04x", b, got, want)
		}
		c := Checksum{sum: ^uint64(0)}
		c.Add(b)
		if got, want := c.Folded(), naive(append(slices.Repeat([]byte{0xff}, 8), b...)); got != want {
			t.Fatalf("after all ones, % x: %#04x, want %#04x", b, got, want)
		}
	}
}

func TestChecksumOfPiecesEqualsTheWhole(t *testing.T) {
	r := newRand(t)
	b := random(r, 150)
	want := ^naive(b)
	for i := range len(b) + 1 {
		for j := i; j <= len(b); j++ {
			if got := ChecksumOf(b[:i], b[i:j], b[j:]); got != want {
				t.Fatalf("split at %d and %d: %#04x, want %#04x", i, j, got, want)
			}
		}
	}
	var c Checksum
	for _, v := range b {
		c.Add([]byte{v})
	}
	if c.Value() != want {
		t.Errorf("byte by byte: %#04x, want %#04x", c.Value(), want)
	}
}

func TestPseudoHeaderAtAnyPoint(t *testing.T) {
	r := newRand(t)
	for range 2000 {
		var src, dst [4]byte
		copy(src[:], random(r, 4))
		copy(dst[:], random(r, 4))
		proto, n := byte(r.Uint32()), uint16(r.Uint32())
		data := random(r, r.IntN(60))
		whole := slices.Concat(src[:], dst[:], []byte{0, proto, byte(n >> 8), byte(n)}, data)
		cut := r.IntN(len(data) + 1)
		var c Checksum
		c.Add(data[:cut])
		c.AddPseudo(src, dst, proto, int(n))
		c.Add(data[cut:])
		if got, want := c.Folded(), naive(whole); got != want {
			t.Fatalf("% x, pseudo-header after %d bytes: %#04x, want %#04x", whole, cut, got, want)
		}
	}
}

func TestUpdateChecksumVector(t *testing.T) {
	// RFC 1624 section 4: where equation 2 fails.
	if got := UpdateChecksum16(0xdd2f, 0x5555, 0x3285); got != 0 {
		t.Errorf("%#04x, want 0", got)
	}
}

func TestUpdateChecksumEqualsAFullComputation(t *testing.T) {
	r := newRand(t)
	pick := func() uint16 { // the ends are where ones' complement has two zeros
		return []uint16{0, 1, 0xfffe, 0xffff, uint16(r.Uint32())}[r.IntN(5)]
	}
	for range 50000 {
		b := make([]byte, 20)
		for i := 0; i < len(b); i += 2 {
			binary.BigEndian.PutUint16(b[i:], pick())
		}
		c := ChecksumOf(b)
		off, wide := 2*r.IntN(9), r.IntN(2) == 0
		if wide {
			before, after := binary.BigEndian.Uint32(b[off:]), uint32(pick())<<16|uint32(pick())
			binary.BigEndian.PutUint32(b[off:], after)
			c = UpdateChecksum32(c, before, after)
		} else {
			before, after := binary.BigEndian.Uint16(b[off:]), pick()
			binary.BigEndian.PutUint16(b[off:], after)
			c = UpdateChecksum16(c, before, after)
		}
		want := ChecksumOf(b)
		if naive(b) == 0 {
			want = 0 // the documented exception
		}
		if c != want {
			t.Fatalf("% x, offset %d: %#04x, want %#04x", b, off, c, want)
		}
	}
}

func FuzzChecksum(f *testing.F) {
	r := rand.New(rand.NewPCG(3, 4))
	for _, n := range []int{0, 1, 7, 8, 63, 64, 65, 129} {
		f.Add(random(r, n), uint16(n/3), uint16(r.Uint32()))
		f.Add(slices.Repeat([]byte{0xff}, n), uint16(n/2), uint16(0))
	}
	f.Fuzz(func(t *testing.T, b []byte, at, v uint16) {
		want := ^naive(b)
		cut := int(at) % (len(b) + 1)
		if got := ChecksumOf(b); got != want {
			t.Fatalf("%#04x, want %#04x", got, want)
		}
		if got := ChecksumOf(b[:cut], b[cut:]); got != want {
			t.Fatalf("split at %d: %#04x, want %#04x", cut, got, want)
		}
		if i := cut &^ 1; i+2 <= len(b) {
			before := binary.BigEndian.Uint16(b[i:])
			b = slices.Clone(b)
			binary.BigEndian.PutUint16(b[i:], v)
			got, want := UpdateChecksum16(want, before, v), ^naive(b)
			if got != want && naive(b) != 0 {
				t.Fatalf("update at %d: %#04x, want %#04x", i, got, want)
			}
		}
	})
}

func BenchmarkChecksum(b *testing.B) {
	for _, bm := range []struct {
		name string
		n    int
	}{{"20B", 20}, {"64B", 64}, {"1416B", 1416}} {
		b.Run(bm.name, func(b *testing.B) {
			data := random(rand.New(rand.NewPCG(5, 6)), bm.n)
			b.SetBytes(int64(bm.n))
			var c Checksum
			for b.Loop() {
				c.Add(data)
			}
			if c.odd {
				b.Fatal("even lengths only")
			}
		})
	}
}
