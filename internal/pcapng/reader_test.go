// SPDX-License-Identifier: Apache-2.0

package pcapng

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"io"
	"runtime"
	"slices"
	"strings"
	"testing"
)

type frameOf struct {
	data   []byte
	length int
}

// pcapFile makes a classic capture.
func pcapFile(order binary.AppendByteOrder, magic uint32, link uint32, frames ...frameOf) []byte {
	b := order.AppendUint32(nil, magic)
	b = order.AppendUint16(b, 2)
	b = order.AppendUint16(b, 4)
	b = append(b, make([]byte, 8)...)
	b = order.AppendUint32(b, 262144)
	b = order.AppendUint32(b, link)
	for _, f := range frames {
		b = append(b, make([]byte, 8)...)
		b = order.AppendUint32(b, uint32(len(f.data)))
		b = order.AppendUint32(b, uint32(f.length))
		b = append(b, f.data...)
	}
	return b
}

// block makes a pcapng block.
func block(order binary.AppendByteOrder, kind uint32, body ...byte) []byte {
	for len(body)%4 != 0 {
		body = append(body, 0)
	}
	total := uint32(12 + len(body))
	b := order.AppendUint32(nil, kind)
	b = order.AppendUint32(b, total)
	b = append(b, body...)
	return order.AppendUint32(b, total)
}

// section makes a section header with one interface.
func section(order binary.AppendByteOrder, link uint16, snap uint32) []byte {
	h := order.AppendUint32(nil, 0x1a2b3c4d)
	h = order.AppendUint16(h, 1)
	h = order.AppendUint16(h, 0)
	h = order.AppendUint64(h, 1<<64-1)
	i := order.AppendUint16(nil, link)
	i = order.AppendUint16(i, 0)
	i = order.AppendUint32(i, snap)
	return append(block(order, 0x0a0d0d0a, h...), block(order, 1, i...)...)
}

func enhanced(order binary.AppendByteOrder, iface uint32, f frameOf) []byte {
	b := order.AppendUint32(nil, iface)
	b = append(b, make([]byte, 8)...)
	b = order.AppendUint32(b, uint32(len(f.data)))
	b = order.AppendUint32(b, uint32(f.length))
	return block(order, 6, append(b, f.data...)...)
}

func simple(order binary.AppendByteOrder, f frameOf) []byte {
	return block(order, 3, append(order.AppendUint32(nil, uint32(f.length)), f.data...)...)
}

func obsolete(order binary.AppendByteOrder, f frameOf) []byte {
	b := order.AppendUint16(nil, 0)
	b = order.AppendUint16(b, 7) // drops
	b = append(b, make([]byte, 8)...)
	b = order.AppendUint32(b, uint32(len(f.data)))
	b = order.AppendUint32(b, uint32(f.length))
	return block(order, 2, append(b, f.data...)...)
}

func readAll(data []byte) (frames []frameOf, err error) {
	c, err := NewReader(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	for {
		var f Frame
		if err := c.Next(&f); err == io.EOF {
			return frames, nil
		} else if err != nil {
			return frames, err
		}
		frames = append(frames, frameOf{bytes.Clone(f.Data), f.Length})
	}
}

func gzipped(data []byte) []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, err := z.Write(data)
	if err = errors.Join(err, z.Close()); err != nil {
		panic(err)
	}
	return b.Bytes()
}

// Frames have the numbers that tshark gives them, whatever lies between.
func TestFramesAreNumberedAsInTheFile(t *testing.T) {
	le := binary.LittleEndian
	a := frameOf{[]byte("frame a"), 7}
	c, err := NewReader(bytes.NewReader(cat(section(le, 113, 0), section(le, 1, 0)[28:], enhanced(le, 0, a), enhanced(le, 1, a), enhanced(le, 0, a), enhanced(le, 1, a))))
	if err != nil {
		t.Fatal(err)
	}
	var got []int
	var f Frame
	for err = c.Next(&f); err == nil; err = c.Next(&f) {
		got = append(got, f.Number)
	}
	if err != io.EOF || !slices.Equal(got, []int{2, 4}) || c.Skipped() != 2 {
		t.Errorf("frames %d, %d skipped: %v", got, c.Skipped(), err)
	}
}

func cat(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

func TestReader(t *testing.T) {
	le, be := binary.LittleEndian, binary.BigEndian
	a, b, cut := frameOf{[]byte("frame a"), 7}, frameOf{[]byte("frame bb"), 8}, frameOf{[]byte("cut"), 1514}
	for _, tt := range []struct {
		name string
		data []byte
		want []frameOf
	}{
		{"pcap, little-endian", pcapFile(le, 0xa1b2c3d4, 1, a, b, cut), []frameOf{a, b, cut}},
		{"pcap, big-endian, nanoseconds", pcapFile(be, 0xa1b23c4d, 1, a, b), []frameOf{a, b}},
		{"pcap, little-endian, nanoseconds, checksum bits beside the link type", pcapFile(le, 0xa1b23c4d, 0x24000001, a), []frameOf{a}},
		{"pcap, big-endian, no frames", pcapFile(be, 0xa1b2c3d4, 1), nil},
		{"pcap, more bytes than there were on the wire", pcapFile(le, 0xa1b2c3d4, 1, frameOf{a.data, 3}, b), []frameOf{a, b}},
		{"pcap, compressed", gzipped(pcapFile(le, 0xa1b2c3d4, 1, a, b)), []frameOf{a, b}},
		{"pcapng, compressed", gzipped(cat(section(le, 1, 0), enhanced(le, 0, a))), []frameOf{a}},
		{"pcapng, more bytes than there were on the wire", cat(section(le, 1, 0), enhanced(le, 0, frameOf{a.data, 3})), []frameOf{a}},
		{"pcapng, secrets of 2 MiB", cat(section(le, 1, 0), block(le, 10, make([]byte, 2<<20)...), enhanced(le, 0, a)), []frameOf{a}},
		{"pcapng, frames that are not Ethernet between", cat(section(le, 113, 0), section(le, 1, 0)[28:], enhanced(le, 0, b), enhanced(le, 1, a), enhanced(le, 0, b)), []frameOf{a}},
		{"pcapng, little-endian", cat(section(le, 1, 0), enhanced(le, 0, a), enhanced(le, 0, cut)), []frameOf{a, cut}},
		{"pcapng, big-endian", cat(section(be, 1, 0), enhanced(be, 0, a), enhanced(be, 0, b)), []frameOf{a, b}},
		{"pcapng, simple packets", cat(section(le, 1, 3), simple(le, cut)), []frameOf{cut}},
		{"pcapng, a simple packet without snap length, padded", cat(section(le, 1, 0), simple(le, a)), []frameOf{a}},
		{"pcapng, obsolete packets", cat(section(le, 1, 0), obsolete(le, a)), []frameOf{a}},
		{"pcapng, unknown blocks between", cat(section(le, 1, 0), block(le, 0x0bad, 1, 2, 3, 4), enhanced(le, 0, a)), []frameOf{a}},
		{"pcapng, two sections of different byte order", cat(section(le, 1, 0), enhanced(le, 0, a), section(be, 1, 0), enhanced(be, 0, b)), []frameOf{a, b}},
		{"pcapng, an interface whose clock's unit is no number", cat(section(le, 1, 0)[:28], block(le, 1, 1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 1, 0, 0xff, 0, 0, 0), enhanced(le, 0, a)), []frameOf{a}},
		{"pcapng, an unused interface that is not Ethernet", cat(section(le, 113, 0), section(le, 1, 0)[28:], enhanced(le, 1, a)), []frameOf{a}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := readAll(tt.data)
			if err != nil {
				t.Fatal(err)
			}
			if len(got) != len(tt.want) {
				t.Fatalf("%d frames, want %d", len(got), len(tt.want))
			}
			for i := range got {
				if !bytes.Equal(got[i].data, tt.want[i].data) || got[i].length != tt.want[i].length {
					t.Errorf("frame %d is %q of %d, want %q of %d", i+1, got[i].data, got[i].length, tt.want[i].data, tt.want[i].length)
				}
			}
		})
	}
}

func TestDamagedCaptures(t *testing.T) {
	le := binary.LittleEndian
	a := frameOf{[]byte("frame a"), 7}
	pcap := pcapFile(le, 0xa1b2c3d4, 1, a)
	ng := cat(section(le, 1, 0), enhanced(le, 0, a))
	at := func(b []byte, i int, v uint32) []byte {
		b = bytes.Clone(b)
		le.PutUint32(b[i:], v)
		return b
	}
	for _, tt := range []struct {
		name, want string
		data       []byte
	}{
		{"an empty file", "neither pcap nor pcapng: 0 bytes", nil},
		{"compressed, and cut", "EOF", gzipped(pcap)[:30]},
		{"compressed, and no gzip", "gzip", []byte{0x1f, 0x8b, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}},
		{"pcap of version 3", "version 3", at(pcap, 4, 3)},
		{"the second frame cut", "frame 2 of 8 bytes", pcapFile(le, 0xa1b2c3d4, 1, a, frameOf{[]byte("frame bb"), 8})[:24+16+7+16+5]},
		{"pcapng: secrets that are cut", "block 3, of type 10", cat(section(le, 1, 0), block(le, 10, make([]byte, 100)...)[:50])},
		{"a text file", "neither pcap nor pcapng", []byte("# a rules file")},
		{"a cut file header", "EOF", pcap[:20]},
		{"a cut frame header", "EOF", pcap[:39]},
		{"a cut frame", "EOF", pcap[:len(pcap)-2]},
		{"a frame of 4 GiB", "damaged", at(pcap, 32, 0xffffffff)},
		{"a frame of 4 GiB, allowed by the file", "damaged", at(at(at(pcap, 16, 0xffffffff), 32, 0xffffffff), 36, 0xffffffff)},
		{"a frame of a byte more than 256 KiB", "damaged", at(at(pcap, 32, MaxFrame+1), 36, MaxFrame+1)},
		{"Linux cooked frames", "link type 113", pcapFile(le, 0xa1b2c3d4, 113, a)},
		{"pcapng: Linux cooked frames", "only link type 1", cat(section(le, 276, 0), enhanced(le, 0, a))},
		{"pcapng: a link type of more than 8 bits", "link type 257", cat(section(le, 257, 0), enhanced(le, 0, a))},
		{"pcapng: version 2", "version 2", at(ng, 12, 2)},
		{"pcapng: no byte order", "neither", at(ng, 8, 0)},
		{"pcapng: a cut file header", "EOF", ng[:11]},
		{"pcapng: a cut block header", "EOF", ng[:len(section(le, 1, 0))+7]},
		{"pcapng: a cut block", "EOF", ng[:len(ng)-2]},
		{"pcapng: a block of 4 GiB", "length 4294967292", at(ng, 52, 0xfffffffc)},
		{"pcapng: a block of 1 MiB and a bit", "length 1048580", at(ng, 52, MaxBlock+4)},
		{"pcapng: a block of 8 bytes", "length 8", at(ng, 52, 8)},
		{"pcapng: a block of no whole words", "length 43", at(ng, 52, 43)},
		{"pcapng: a block too short for its type", "want at least 20", cat(section(le, 1, 0), block(le, blockEnhanced, make([]byte, 16)...))},
		{"pcapng: a frame of 4 GiB", "frame of 4294967295 bytes", at(at(ng, 68, 0xffffffff), 72, 0xffffffff)},
		{"pcapng: a frame longer than its block", "frame of 9 bytes in a block of 8", at(ng, 68, 9)},
		{"pcapng: a simple packet of 4 GiB", "frame of 4294967295 bytes", cat(section(le, 1, 0), simple(le, frameOf{a.data, 1<<32 - 1}))},
		{"pcapng: a simple packet without interface", "the section has 0", cat(section(le, 1, 0)[:28], simple(le, a))},
		{"pcapng: an unknown interface", "frame of interface 1, the section has 1", cat(section(le, 1, 0), enhanced(le, 1, a))},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := readAll(tt.data)
			runtime.ReadMemStats(&after)
			if n := after.TotalAlloc - before.TotalAlloc; n > 4<<20 {
				t.Errorf("took %d bytes of memory for a file of %d", n, len(tt.data))
			}
			if !errors.Is(err, ErrFile) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error is %v, want %q", err, tt.want)
			}
		})
	}
}

func FuzzReader(f *testing.F) {
	le, be := binary.LittleEndian, binary.BigEndian
	a, cut := frameOf{[]byte("frame a"), 7}, frameOf{[]byte("cut"), 1514}
	f.Add(pcapFile(be, 0xa1b23c4d, 1, a, cut))
	f.Add(cat(section(le, 1, 2), enhanced(le, 0, a), simple(le, cut), obsolete(le, a), section(be, 1, 0), enhanced(be, 0, cut)))
	f.Fuzz(func(t *testing.T, data []byte) {
		frames, err := readAll(data)
		if err != nil && !errors.Is(err, ErrFile) {
			t.Fatal(err)
		}
		total := 0
		for _, fr := range frames {
			if total += len(fr.data); fr.length < len(fr.data) {
				t.Fatalf("%d bytes captured of %d", len(fr.data), fr.length)
			}
		}
		if total > len(data) && !bytes.HasPrefix(data, []byte{0x1f, 0x8b}) {
			t.Fatalf("%d bytes out of a file of %d", total, len(data))
		}
	})
}
