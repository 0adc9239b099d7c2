// SPDX-License-Identifier: Apache-2.0

package xsk

import (
	"errors"
	"math"
	"strings"
	"testing"
)

func TestNewUMEMRefuses(t *testing.T) {
	for _, tc := range []struct {
		name string
		cfg  UMEMConfig
		want []string // nil: no error
	}{
		{"the smaller frame size", UMEMConfig{Frames: 3, FrameSize: 2048}, nil},
		{"the larger frame size", UMEMConfig{Frames: 1, FrameSize: 4096}, nil},
		{"frames of no power of two", UMEMConfig{Frames: 1, FrameSize: 3000}, []string{"3000", "2048 or 4096"}},
		{"frames that are too small", UMEMConfig{Frames: 1, FrameSize: 1024}, []string{"1024"}},
		{"frames larger than a page", UMEMConfig{Frames: 1, FrameSize: 8192}, []string{"8192"}},
		{"no frames", UMEMConfig{FrameSize: 2048}, []string{"0 frames"}},
		{"fewer than no frames", UMEMConfig{Frames: -1, FrameSize: 2048}, []string{"-1 frames"}},
		{"the largest headroom", UMEMConfig{Frames: 1, FrameSize: 2048, Headroom: 2048 - 257}, nil},
		{"headroom that leaves no data", UMEMConfig{Frames: 1, FrameSize: 2048, Headroom: 2048 - 256}, []string{"1792", "0 to 1791"}},
		{"negative headroom", UMEMConfig{Frames: 1, FrameSize: 2048, Headroom: -1}, []string{"-1"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			u, err := NewUMEM(tc.cfg)
			if (err == nil) != (tc.want == nil) || (u == nil) != (err != nil) {
				t.Fatalf("UMEM %v, error %v", u != nil, err)
			}
			if err == nil {
				if got := u.Config(); got != tc.cfg {
					t.Errorf("config %+v, want %+v", got, tc.cfg)
				}
				if err := u.Close(); err != nil {
					t.Error(err)
				}
				return
			}
			if !errors.Is(err, ErrConfig) {
				t.Errorf("%v does not wrap ErrConfig", err)
			}
			for _, w := range tc.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q does not say %q", err, w)
				}
			}
		})
	}
}

func TestBytesNeverLeavesTheFrame(t *testing.T) {
	u, err := NewUMEM(UMEMConfig{Frames: 4, FrameSize: 2048})
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name  string
		addr  uint64
		n     int
		front bool
		ok    bool
	}{
		{"a whole frame", 2048, 2048, false, true},
		{"a byte more than a frame", 2048, 2049, false, false},
		{"the end of a frame", 2048 + 2040, 8, false, true},
		{"a byte over the end of a frame", 2048 + 2041, 8, false, false},
		{"the last byte of the UMEM", 4*2048 - 1, 1, false, true},
		{"nothing at the last byte", 4*2048 - 1, 0, false, true},
		{"a byte behind the UMEM", 4 * 2048, 1, false, false},
		{"nothing behind the UMEM", 4 * 2048, 0, false, false},
		{"a negative length", 100, -1, false, false},
		{"the smallest length there is", 100, math.MinInt, false, false},
		{"the largest length there is", 100, math.MaxInt, false, false},
		{"the largest address there is", math.MaxUint64, 1, false, false},
		{"an address that wraps", math.MaxUint64 - 3, 8, false, false},
		{"metadata up to the start of the frame", 2048 + 64, 64, true, true},
		{"metadata from the frame before", 2048 + 64, 65, true, false},
		{"metadata that is all in the frame before", 2048 + 2, 8, true, false},
		{"metadata of a frame's first byte", 2048, 8, true, false},
		{"metadata before the UMEM", 4, 8, true, false},
		{"metadata of a negative length", 2048 + 64, -8, true, false},
		{"metadata behind the UMEM", 4*2048 + 64, 8, true, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			get, first := u.Bytes, tc.addr
			if tc.front {
				get, first = u.Front, tc.addr-uint64(tc.n)
			}
			b := get(tc.addr, tc.n)
			if (b != nil) != tc.ok || len(b) != cap(b) || tc.ok && len(b) != tc.n {
				t.Fatalf("%d bytes of %d, nil %v", len(b), cap(b), b == nil)
			}
			if tc.ok && tc.n > 0 && &b[0] != &u.mem[first] {
				t.Error("not the bytes asked for")
			}
		})
	}
	if f, a := u.Frame(3*2048+2047), u.Addr(3); f != 3 || a != 3*2048 {
		t.Errorf("frame %d, address %d", f, a)
	}
	if err := errors.Join(u.Close(), u.Close(), (*UMEM)(nil).Close()); err != nil {
		t.Error(err)
	}
	if b := u.Bytes(0, 1); b != nil {
		t.Error("bytes of a closed UMEM")
	}
}

func TestSocketConfigsAreRefusedWithNumbers(t *testing.T) {
	u, err := NewUMEM(UMEMConfig{Frames: 64, FrameSize: 2048})
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	good := QueueConfig{Ifindex: 1, FillSize: 64, CompletionSize: 64}
	sock := SocketConfig{RxSize: 64}
	for _, tc := range []struct {
		name string
		q    func(*QueueConfig)
		s    SocketConfig
		want string
	}{
		{"no interface", func(q *QueueConfig) { q.Ifindex = 0 }, sock, "interface index 0: want"},
		{"negative queue", func(q *QueueConfig) { q.Queue = -2 }, sock, "-2"},
		{"unknown mode", func(q *QueueConfig) { q.Mode = 7 }, sock, "Mode(7): want 0 to 2"},
		{"generic zero-copy", func(q *QueueConfig) { q.Generic, q.Mode = true, ZeroCopy }, sock, "generic"},
		{"fill ring of no power of two", func(q *QueueConfig) { q.FillSize = 48 }, sock, "fill ring of 48"},
		{"no fill ring", func(q *QueueConfig) { q.FillSize = 0 }, sock, "fill ring of 0"},
		{"no completion ring", func(q *QueueConfig) { q.CompletionSize = 0 }, sock, "completion ring of 0"},
		{"a fill ring larger than the UMEM", func(q *QueueConfig) { q.FillSize = 128 }, sock, "128 entries for 64 frames"},
		{"more initial frames than places", func(q *QueueConfig) { q.FillSize, q.Initial = 1, []uint64{0, 2048} }, sock, "2 initial frames for a fill ring of 1"},
		{"an initial frame that does not exist", func(q *QueueConfig) { q.Initial = []uint64{64 * 2048} }, sock, "frame 64: want 0 to 63"},
		{"no ring at all", func(q *QueueConfig) {}, SocketConfig{}, "want at least one ring"},
		{"receive ring of no power of two", func(q *QueueConfig) {}, SocketConfig{RxSize: 100}, "receive ring of 100"},
		{"transmit ring of no power of two", func(q *QueueConfig) {}, SocketConfig{TxSize: -4}, "transmit ring of -4"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := good
			tc.q(&cfg)
			_, _, err := u.OpenQueue(cfg, tc.s)
			if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v, want ErrConfig and %q", err, tc.want)
			}
		})
	}
}
