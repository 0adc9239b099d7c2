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
	// Whatever comes between the readings: ticks inside last less long than the clock's
	// time outside, and the other way round.
	t0, c0 := Monotonic(), s.Ticks()
	c1, t1 := s.Ticks(), Monotonic()
	time.Sleep(20 * time.Millisecond)
	t2, c2 := Monotonic(), s.Ticks()
	c3, t3 := s.Ticks(), Monotonic()
	least, most := float64(t2-t1), float64(t3-t0)
	if got := float64(s.Nanoseconds(c3 - c0)); got < 0.9*least {
		t.Errorf("%g ns by ticks, in which the clock passes %g", got, least)
	}
	if got := float64(s.Nanoseconds(c2 - c1)); got > 1.1*most {
		t.Errorf("%g ns by ticks, within %g by the clock", got, most)
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
