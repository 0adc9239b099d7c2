// SPDX-License-Identifier: Apache-2.0

package ddt

import (
	"math"
	"strings"
	"testing"
	"time"
)

// By hand: packets of 2 KiB, 2048 of them, 16 HPUs with 128 each. One every microsecond,
// handlers of 10: 1 + 15 d <= 0.2 * 128 * 10 = 256, so d <= 17. Then there are 121
// checkpoints, of 48 bytes.
func TestInterval(t *testing.T) {
	const k = 2048
	if headSize+frameSize != 48 {
		t.Fatalf("a checkpoint of a vector takes %d bytes", headSize+frameSize)
	}
	us := time.Microsecond
	paper := Model{Epsilon: 0.2, Memory: 1 << 20, PacketBuffer: 1 << 20, PacketTime: us, Handler: 10 * us}
	with := func(f func(*Model)) Model {
		m := paper
		f(&m)
		return m
	}
	for _, tc := range []struct {
		name    string
		size    int64
		hpus    int
		model   Model
		want    int64 // packets
		wantErr string
	}{
		{"overhead", 4 << 20, 16, paper, 17, ""},
		{"a packet more makes no difference", 4<<20 + 1, 16, paper, 17, ""}, // 129 for one HPU: 257/15
		{"sixteen more do", 4<<20 + 16*k*8, 16, paper, 18, ""},              // 136: 271/15
		{"twice the time", 4 << 20, 16, with(func(m *Model) { m.Handler *= 2 }), 34, ""},
		{"half the overhead", 4 << 20, 16, with(func(m *Model) { m.Epsilon /= 2 }), 8, ""},
		{"half as many packets", 4 << 20, 16, with(func(m *Model) { m.PacketTime *= 2 }), 8, ""},
		{"two HPUs", 4 << 20, 2, with(func(m *Model) { m.Handler = us }), 203, ""}, // 0.2 * 1024 - 1
		{"one HPU does not wait", 4 << 20, 1, paper, 2048, ""},
		{"work for all", 4 << 20, 16, with(func(m *Model) { m.Handler = time.Millisecond }), 128, ""},
		{"handlers too fast", 4 << 20, 16, with(func(m *Model) { m.Handler = us / 10 }), 1, ""},
		{"just fast enough", 4 << 20, 16, with(func(m *Model) { m.Handler = 625 * time.Nanosecond }), 1, ""}, // 16 = 16

		{"memory for all", 4 << 20, 16, with(func(m *Model) { m.Memory = 121 * 48 }), 17, ""},
		{"a byte less", 4 << 20, 16, with(func(m *Model) { m.Memory = 121*48 - 1 }), 0,
			"5807 bytes of memory for checkpoints of 48 need one of 18 packets or more, and a scheduling overhead of at most 0.2 of 128 handlers of 10µs, with a packet every 1µs and 16 HPUs allows 17: 1 bytes are missing"},
		{"memory for half of them", 4 << 20, 16, with(func(m *Model) { m.Memory = 60 * 48 }), 0, "need one of 35 packets or more"},
		{"memory for none", 4 << 20, 16, with(func(m *Model) { m.Memory = 47 }), 0, "1 less than a single checkpoint"},
		{"memory for one, one HPU", 4 << 20, 1, with(func(m *Model) { m.Memory = 48 }), 2048, ""},
		{"handlers too fast, no memory", 4 << 20, 16, with(func(m *Model) { m.Handler, m.Memory = us/10, 1024*48 }), 0, "need one of 2 packets or more"},

		{"room for what waits", 4 << 20, 16, with(func(m *Model) { m.PacketBuffer = 10 * k }), 17, ""},
		{"room for the interval", 4 << 20, 16, with(func(m *Model) { m.PacketBuffer = 10*k - 1 }), 9, ""},
		{"room for a packet", 4 << 20, 16, with(func(m *Model) { m.PacketBuffer = k }), 1, ""},
		{"room for less", 4 << 20, 16, with(func(m *Model) { m.PacketBuffer = k - 1 }), 0, "packet buffer of 2047 bytes is 1 less than a packet"},
		{"room, but no memory", 4 << 20, 16, with(func(m *Model) { m.PacketBuffer, m.Memory = 8*k, 255*48 }), 0,
			"of 9 packets or more, and a packet buffer of 16384 bytes, with handlers of 10µs and a packet every 1µs, allows 8: 48 bytes are missing"},

		{"no bytes", 0, 16, paper, 1, ""},
		{"one packet", 100, 16, paper, 1, ""},
		{"one packet, no memory", 100, 16, with(func(m *Model) { m.Memory = 1 }), 0, "47 less"},
		{"fewer packets than HPUs", 4 * k, 16, paper, 1, ""},
		{"which take long", 4 * k, 16, with(func(m *Model) { m.Handler = time.Second }), 1, ""},

		{"defaults", 4 << 20, 16, Model{Handler: 10 * us}, 17, ""},
		{"negative epsilon", 100, 1, Model{Epsilon: -1}, 0, "epsilon -1"},
		{"no epsilon", 100, 1, Model{Epsilon: math.NaN()}, 0, "epsilon NaN"},
		{"negative memory", 100, 1, Model{Memory: -1}, 0, "-1 bytes of memory"},
		{"negative buffer", 100, 1, Model{PacketBuffer: -1}, 0, "packet buffer of -1"},
		{"negative time", 100, 1, Model{PacketTime: -1}, 0, "packets every -1ns"},
		{"negative handler", 100, 1, Model{Handler: -1}, 0, "handlers of -1ns"},
		{"no HPUs", 100, 0, Model{}, 0, "0 HPUs"},
		{"as long as there is", math.MaxInt64 - 1, 1, paper, 1 << 52, "overflows"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := Interval(committed(t, Byte, tc.size), k, tc.hpus, tc.model)
			switch {
			case tc.wantErr == "" && (err != nil || got != tc.want*k):
				t.Errorf("%d, %v, want %d", got, err, tc.want*k)
			case tc.wantErr != "" && (err == nil || !strings.Contains(err.Error(), tc.wantErr)):
				t.Errorf("%d, %v, want %q", got, err, tc.wantErr)
			}
		})
	}
	if _, err := Interval(committed(t, Byte, 1), 0, 1, paper); err == nil {
		t.Error("packets of no bytes are fine")
	}
}

func TestMeasureHandler(t *testing.T) {
	m := made(t)
	for name, tc := range map[string]struct {
		typ    *Type
		count  int64
		packet int
	}{
		"a byte":                {Byte, 1, 1408},
		"Complex":               {complexType(t), 2, 1408},
		"a huge packet":         {m(HVector(1<<24, 1, 4, Short)), 1, math.MaxUint32},
		"far apart":             {m(HVector(1000, 1, 1<<40, Int)), 1, 1408},
		"far apart, backwards":  {m(HVector(1000, 1, -1<<40, Int)), 1, 1408},
		"blocks as wide as all": {m(HVector(4, 1, 1<<40, m(Contiguous(1<<39, Byte)))), 1, 1408},
		"all on one place":      {m(HVector(1<<40, 1, 0, Int)), 1, 1408},
		"more than fits":        {Byte, math.MaxInt64 - 1, 1408},
	} {
		t.Run(name, func(t *testing.T) {
			c := committed(t, tc.typ, tc.count)
			if d := MeasureHandler(c, tc.packet); d <= 0 || d > time.Minute {
				t.Errorf("a handler of %v", d)
			}
			n := standIn(c)
			if n.Hi-n.Lo > measureSpan+1<<20 {
				t.Errorf("%d bytes of memory", n.Hi-n.Lo)
			}
		})
	}
	if d := MeasureHandler(committed(t, Byte, 0), 1408); d != 0 {
		t.Errorf("a handler of %v without bytes", d)
	}
	// The stand-in has as many blocks in a packet.
	c := committed(t, m(HVector(1<<20, 1, 1<<30, m(Contiguous(48, Byte)))), 1)
	if n := standIn(c); n.Kind != Vector || n.Child.Size != 48 || n.Stride < 1024 {
		t.Errorf("%+v stands in for %v", n, c)
	}
}

// The interval that is chosen goes by what handlers are measured to take: blocks of one
// byte take a lot longer than a packet in one piece.
func TestIntervalGoesByTheHandler(t *testing.T) {
	m := made(t)
	interval := func(d *Type) int64 {
		n, err := Interval(committed(t, d, 1), 1408, 4, Model{})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	const size = 16 << 20
	short, long := interval(m(Contiguous(size, Byte))), interval(m(HVector(size, 1, 3, Byte)))
	if short >= long {
		t.Errorf("%d bytes for a block, %d for blocks of a byte", short, long)
	}
}
