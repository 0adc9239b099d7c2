// SPDX-License-Identifier: Apache-2.0

// Package clock reads time on the hot path: Monotonic is the kernel's
// CLOCK_MONOTONIC, comparable with bpf_ktime_get_ns; Ticks is the CPU's counter
// where it can be trusted, a few nanoseconds a read.
package clock

import (
	"os"
	"strings"
	"sync"
	"time"
	_ "unsafe" // for linkname
)

// Monotonic returns CLOCK_MONOTONIC in nanoseconds.
//
//go:linkname Monotonic runtime.nanotime
func Monotonic() int64

// A Scale converts ticks to nanoseconds. The zero value is not valid.
type Scale struct {
	counter bool    // ticks are the CPU's counter, else nanoseconds
	ns      float64 // per tick
}

// Calibrate returns the scale of Ticks. The first call takes 5 ms.
var Calibrate = sync.OnceValue(func() Scale {
	if !hasCounter || !steady() {
		return Scale{ns: 1}
	}
	t0, c0 := both()
	time.Sleep(5 * time.Millisecond)
	t1, c1 := both()
	if c1 <= c0 {
		return Scale{ns: 1}
	}
	return Scale{counter: true, ns: float64(t1-t0) / float64(c1-c0)}
})

// both reads clock and counter at about one time. The thread may lose its CPU between
// two readings: of several, those are taken that lie closest.
func both() (ns, ticks int64) {
	closest := int64(-1)
	for range 16 {
		before := Monotonic()
		c := counter()
		if d := Monotonic() - before; closest < 0 || d < closest {
			closest, ns, ticks = d, before+d/2, c
		}
	}
	return ns, ticks
}

// Ticks reads the counter. Only differences mean something.
func (s Scale) Ticks() int64 {
	if s.counter {
		return counter()
	}
	return Monotonic()
}

// Nanoseconds converts a difference of ticks.
func (s Scale) Nanoseconds(ticks int64) int64 { return int64(float64(ticks) * s.ns) }

// steady tells whether the counter runs at one speed on all CPUs, always.
func steady() bool {
	info, err := os.ReadFile("/proc/cpuinfo")
	return err == nil && strings.Contains(string(info), " constant_tsc") && strings.Contains(string(info), " nonstop_tsc")
}
