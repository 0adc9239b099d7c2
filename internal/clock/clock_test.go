// SPDX-License-Identifier: Apache-2.0

package clock

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestMonotonicIsTheKernels(t *testing.T) {
	var ts unix.Timespec
	a := Monotonic()
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		t.Fatal(err)
	}
	b := Monotonic()
	if k := ts.Nano(); k < a || k > b {
		t.Errorf("kernel says %d, not between %d and %d", k, a, b)
	}
}

func TestTicksMeasureTime(t *testing.T) {
	s := Calibrate()
	t0, c0 := Monotonic(), s.Ticks()
	time.Sleep(20 * time.Millisecond)
	c1, t1 := s.Ticks(), Monotonic()
	want, got := float64(t1-t0), float64(s.Nanoseconds(c1-c0))
	if r := got / want; r < 0.9 || r > 1.1 {
		t.Errorf("%g ns by ticks are %g by the clock", got, want)
	}
}

func BenchmarkMonotonic(b *testing.B) {
	for b.Loop() {
		Monotonic()
	}
}

func BenchmarkTicks(b *testing.B) {
	s := Calibrate()
	for b.Loop() {
		s.Ticks()
	}
}
