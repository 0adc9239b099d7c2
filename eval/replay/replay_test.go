// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/spin"
)

// cpus returns n CPUs, which may be the same.
func cpus(t *testing.T, n int) (list []int) {
	t.Helper()
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		t.Fatal(err)
	}
	var all []int
	for cpu := range 1024 {
		if set.IsSet(cpu) {
			all = append(all, cpu)
		}
	}
	for i := range n {
		list = append(list, all[i%len(all)])
	}
	return list
}

const blocks, packets = 3000, 137 // of a message

// placed returns a message of a datatype in which blocks are 64 bytes, and handlers that
// count those that were not placed as they should.
func placed(t *testing.T, o handlers.DatatypeOptions, wrong *atomic.Int64) (*handlers.Set, Config) {
	t.Helper()
	typ, err := ddt.Parse("ctg(3)[vec(1000 64 128)[byte]]")
	if err != nil {
		t.Fatal(err)
	}
	c, err := ddt.Commit(typ, 1)
	if err != nil {
		t.Fatal(err)
	}
	_, hi := c.Bounds()
	o.HPUs, o.Messages, o.Window = 2, Messages, hi
	set, err := handlers.Datatype(c, o)
	if err != nil {
		t.Fatal(err)
	}
	stream := make([]byte, c.Size())
	for i := range stream {
		stream[i] = byte(1 + i%250)
	}
	want := make([]byte, hi)
	if _, err := c.Unpack(want, 0, 0, stream); err != nil {
		t.Fatal(err)
	}
	// The completion handler sees the memory as messages leave it.
	h := set.Handlers
	completion := h.Completion
	h.Completion = func(m *hpu.Completion) spin.Code {
		b := m.Message().Binding()
		place, err := b.Window.(spin.SliceWindow).Slice(b.Place, hi, spin.Read|spin.Write)
		if err != nil || !bytes.Equal(place, want) {
			wrong.Add(1)
		}
		clear(place)
		return completion(m)
	}
	return set, Config{Handlers: h, Stream: stream, Packet: 1408, Flights: 3, Place: hi}
}

// orders of a message's packets: in order, and with the first one somewhere later.
func orders() [][]int { return [][]int{nil, rand.New(rand.NewPCG(1, 1)).Perm(packets)} }

// Handlers of a datatype see whole messages, and each HPU has its own.
func TestHPUsPlaceMessages(t *testing.T) {
	var wrong atomic.Int64
	_, cfg := placed(t, handlers.DatatypeOptions{}, &wrong)
	for _, cfg.Order = range orders() {
		held := false // packets that came before their message's first
		for n := 1; n <= 2; n++ {
			cfg.CPUs = cpus(t, n)
			done, err := Run(t.Context(), cfg, 20*time.Millisecond)
			if err != nil {
				t.Fatal(err)
			}
			if len(done) != n {
				t.Fatalf("%d HPUs", len(done))
			}
			for i, d := range done {
				if d.Packets == 0 || d.Packets%(3*packets) != 0 || d.Handled < d.Packets || d.Busy <= 0 || d.CPU <= 0 {
					t.Errorf("HPU %d of %d: %+v", i, n, d)
				}
				held = held || d.Handled > d.Packets
				if d.Begin <= 0 || d.Begin >= done[0].End || done[0].Begin >= d.End {
					t.Errorf("HPU %d of %d was at it from %v to %v, HPU 0 from %v to %v", i, n, d.Begin, d.End, done[0].Begin, done[0].End)
				}
			}
		}
		if ordered := cfg.Order == nil; held == ordered {
			t.Errorf("in order %v, and packets came before their message's first: %v", ordered, held)
		}
	}
	if n := wrong.Load(); n > 0 {
		t.Errorf("%d messages were not placed as they should", n)
	}
}

// All HPUs have packets of a message, unless it is a single sequence; then they are
// processed one after the other.
func TestHPUsShareMessages(t *testing.T) {
	for _, o := range []handlers.DatatypeOptions{
		{Strategy: ddt.Direct}, {Strategy: ddt.HPULocal}, {Strategy: ddt.ROCP},
		{Strategy: ddt.RWCP, Interval: 10 * 1408}, {Strategy: ddt.RWCP, Interval: blocks * 64},
	} {
		var wrong atomic.Int64
		set, cfg := placed(t, o, &wrong)
		// Which HPUs are at a sequence, and at which time.
		const most = 1000
		var at [most]atomic.Int32
		var both, clash atomic.Int64
		var by [2]atomic.Int64
		payload := cfg.Payload
		cfg.Payload = func(h *hpu.HER) spin.Code {
			by[h.HPU()].Add(1)
			if set.Sequence > 0 {
				s := &at[int(h.Offset()/set.Sequence)%set.VHPUs%most]
				if s.Add(1) > 1 {
					clash.Add(1)
				}
				defer s.Add(-1)
			}
			if by[1-h.HPU()].Load() > 0 {
				both.Add(1)
			}
			return payload(h)
		}
		for _, cfg.Order = range orders() {
			cfg.CPUs = cpus(t, 2)
			done, err := RunShared(t.Context(), Shared{Config: cfg, Sequence: set.Sequence, VHPUs: set.VHPUs}, 20*time.Millisecond)
			if err != nil {
				t.Fatalf("%+v: %v", o, err)
			}
			if done.Packets == 0 || done.Packets%packets != 0 || done.Took <= 0 || len(done.HPUs) != 2 {
				t.Errorf("%+v: %+v", o, done)
			}
		}
		if set.VHPUs != 1 && both.Load() == 0 {
			t.Errorf("%+v: one HPU has done all", o)
		}
		if n := clash.Load(); n > 0 {
			t.Errorf("%+v: %d times two HPUs were at the same sequence", o, n)
		}
		if n := wrong.Load(); n > 0 {
			t.Errorf("%+v: %d messages were not placed as they should", o, n)
		}
	}
}

// A message in a sequence of its own is one HPU's, which may be another one for the next.
func TestASequenceStaysOnItsHPU(t *testing.T) {
	var wrong atomic.Int64
	_, cfg := placed(t, handlers.DatatypeOptions{}, &wrong)
	cfg.CPUs = cpus(t, 2)
	var mu sync.Mutex
	on, moved := map[uint32]int{}, 0
	payload := cfg.Payload
	cfg.Payload = func(h *hpu.HER) spin.Code {
		mu.Lock()
		if was, ok := on[h.Message().Number()]; ok && was != h.HPU() {
			moved++
		}
		on[h.Message().Number()] = h.HPU()
		mu.Unlock()
		return payload(h)
	}
	if _, err := RunShared(t.Context(), Shared{Config: cfg, Sequence: blocks * 64, VHPUs: 1}, 20*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if moved > 0 || len(on) == 0 || wrong.Load() > 0 {
		t.Errorf("%d packets of %d messages came to another HPU, %d messages are wrong", moved, len(on), wrong.Load())
	}
}

// What handlers keep for good does not come again, and Run does not wait for it for ever.
func TestRunEndsWhenPacketsDoNotComeBack(t *testing.T) {
	defer func(d time.Duration) { patience = d }(patience)
	patience = 50 * time.Millisecond
	cfg := Config{
		Handlers: hpu.Handlers{Payload: func(h *hpu.HER) spin.Code { _, _ = h.Keep(); return spin.Success }},
		Stream:   make([]byte, 3000), Packet: 1408, Flights: 1, Place: 4096, CPUs: cpus(t, 1),
	}
	const want = "the packets of the last messages are not processed after 50ms"
	if _, err := Run(t.Context(), cfg, time.Millisecond); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want %q", err, want)
	}
	if _, err := RunShared(t.Context(), Shared{Config: cfg}, time.Millisecond); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("shared: error %v, want %q", err, want)
	}
}

func TestRunSaysWhatIsWrong(t *testing.T) {
	good := Config{
		Handlers: hpu.Handlers{Payload: func(*hpu.HER) spin.Code { return spin.Success }},
		Stream:   make([]byte, 3000), Packet: 1408, Flights: 1, Place: 4096, CPUs: cpus(t, 1),
	}
	for want, change := range map[string]func(*Config){
		"0 CPUs: want 1 to":                        func(c *Config) { c.CPUs = nil },
		"0 messages of 3000 bytes in flight":       func(c *Config) { c.Flights = 0 },
		"packets of 2000 bytes: at most":           func(c *Config) { c.Packet = 2000 },
		"message 0: failed":                        func(c *Config) { c.Payload = func(h *hpu.HER) spin.Code { return h.Fail(errors.New("no")) } },
		"order of 3 of 3 packets: want each once":  func(c *Config) { c.Order = []int{0, 2, 2} },
		"order of 2 of 3 packets":                  func(c *Config) { c.Order = []int{0, 1} },
		"CPU -1 is not one that this process may ": func(c *Config) { c.CPUs = []int{-1} },
	} {
		cfg := good
		change(&cfg)
		if _, err := Run(t.Context(), cfg, 50*time.Millisecond); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
		if cfg.Flights == 0 {
			continue // which it is not asked for
		}
		if _, err := RunShared(t.Context(), Shared{Config: cfg}, 50*time.Millisecond); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("shared: error %v, want %q", err, want)
		}
	}
	if _, err := RunShared(t.Context(), Shared{Config: good, Sequence: 1}, 50*time.Millisecond); err == nil || !strings.Contains(err.Error(), "for 0 virtual HPUs: want") {
		t.Errorf("error %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Run(ctx, good, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	if _, err := RunShared(ctx, Shared{Config: good}, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("shared: error %v", err)
	}
}
