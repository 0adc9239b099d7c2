// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/hpu"
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

// Handlers of a datatype see whole messages, and each HPU has its own.
func TestHPUsPlaceMessages(t *testing.T) {
	typ, err := ddt.Parse("vec(100 64 128)[byte]")
	if err != nil {
		t.Fatal(err)
	}
	c, err := ddt.Commit(typ, 1)
	if err != nil {
		t.Fatal(err)
	}
	_, hi := c.Bounds()
	set, err := handlers.Datatype(c, handlers.DatatypeOptions{HPUs: 2, Messages: Messages, Window: hi})
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
	wrong := atomic.Int64{}
	completion := h.Completion
	h.Completion = func(m *hpu.Completion) hpu.Code {
		b := m.Message().Binding()
		place, err := b.Window.(hpu.SliceWindow).Slice(b.Place, hi, 0)
		if err != nil || !bytes.Equal(place, want) {
			wrong.Add(1)
		}
		clear(place)
		if completion == nil {
			return hpu.Success
		}
		return completion(m)
	}
	for n := 1; n <= 2; n++ {
		stats, err := Run(t.Context(), Config{Handlers: h, Stream: stream, Packet: 1408, Flights: 3, Place: hi, CPUs: cpus(t, n)}, 20*time.Millisecond)
		if err != nil {
			t.Fatal(err)
		}
		if len(stats) != n {
			t.Fatalf("%d HPUs", len(stats))
		}
		for i, s := range stats {
			if s.Handled == 0 || s.Handled%15 != 0 || s.Busy <= 0 || s.CPU <= 0 {
				t.Errorf("HPU %d of %d: %+v", i, n, s)
			}
		}
	}
	if n := wrong.Load(); n > 0 {
		t.Errorf("%d messages were not placed as they should", n)
	}
}

func TestRunSaysWhatIsWrong(t *testing.T) {
	good := Config{
		Handlers: hpu.Handlers{Payload: func(*hpu.HER) hpu.Code { return hpu.Success }},
		Stream:   make([]byte, 3000), Packet: 1408, Flights: 1, Place: 4096, CPUs: cpus(t, 1),
	}
	for want, change := range map[string]func(*Config){
		"0 CPUs: want 1 to":                        func(c *Config) { c.CPUs = nil },
		"0 messages of 3000 bytes in flight":       func(c *Config) { c.Flights = 0 },
		"packets of 2000 bytes: at most":           func(c *Config) { c.Packet = 2000 },
		"message 0: failed":                        func(c *Config) { c.Payload = func(h *hpu.HER) hpu.Code { return h.Fail(errors.New("no")) } },
		"CPU -1 is not one that this process may ": func(c *Config) { c.CPUs = []int{-1} },
	} {
		cfg := good
		change(&cfg)
		if _, err := Run(t.Context(), cfg, time.Millisecond); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Run(ctx, good, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}
