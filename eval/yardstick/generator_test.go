// SPDX-License-Identifier: Apache-2.0

package yardstick

import (
	"encoding/binary"
	"net"
	"slices"
	"testing"

	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
)

// Segments come in the order of their messages, and say so.
func TestGeneratedSegments(t *testing.T) {
	netnstest.NeedRoot(t)
	lab := netnstest.Temp(t, netns.LabConfig{})
	err := lab.Host.NS.Do(func() error {
		lo, err := net.InterfaceByName("lo")
		if err != nil {
			return err
		}
		g, err := NewSegmentGenerator(lo)
		if err != nil {
			return err
		}
		defer g.Close()
		type segment struct {
			flags      uint16
			id, offset uint32
		}
		const syn, eom = 0x4000, 0x8000
		for _, tc := range []struct {
			name string
			s    Segments
			want []segment
		}{
			{"messages of three, all quiet", Segments{ID: 7, Count: 3, Step: 100, Ask: syn, Last: eom},
				[]segment{{0, 7, 0}, {0, 7, 100}, {eom, 7, 200}, {0, 8, 0}, {0, 8, 100}, {eom, 8, 200}, {0, 9, 0}}},
			{"every one asks", Segments{ID: 1, Count: 2, Step: 1462, Every: 1, Ask: syn, Last: eom},
				[]segment{{syn, 1, 0}, {syn | eom, 1, 1462}, {syn, 2, 0}}},
			{"every second and the last", Segments{ID: 1, Count: 5, Step: 10, Every: 2, Ask: syn, Last: eom},
				[]segment{{0, 1, 0}, {syn, 1, 10}, {0, 1, 20}, {syn, 1, 30}, {syn | eom, 1, 40}, {0, 2, 0}, {syn, 2, 10}}},
			{"no end, one segment each", Segments{ID: 0xffffffff, Count: 1, Step: 4},
				[]segment{{0, 0xffffffff, 0}, {0, 0, 0}, {0, 1, 0}}},
			{"two messages in turn", Segments{ID: 1, Count: 2, Among: 2, Step: 10, Every: 2, Ask: syn, Last: eom},
				[]segment{{0, 1, 0}, {0, 2, 0}, {syn | eom, 1, 10}, {syn | eom, 2, 10}, {0, 3, 0}, {0, 4, 0}}},
		} {
			if err := g.SetSegments(tc.s); err != nil {
				t.Errorf("%s: %v", tc.name, err)
				continue
			}
			var got []segment
			for range tc.want {
				frame := slices.Repeat([]byte{0xee}, 64)
				_, out, err := g.prog.Test(frame)
				if err != nil {
					return err
				}
				got = append(got, segment{binary.BigEndian.Uint16(out[42:]), binary.BigEndian.Uint32(out[44:]), binary.BigEndian.Uint32(out[48:])})
				if !slices.Equal(out[:42], frame[:42]) || !slices.Equal(out[52:64], frame[52:]) {
					t.Errorf("%s: more than the SLMP header was written: % x", tc.name, out)
				}
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("%s: %+v\nwant %+v", tc.name, got, tc.want)
			}
		}
		if err := g.SetSegments(Segments{}); err == nil {
			t.Error("messages without segments")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
