// SPDX-License-Identifier: Apache-2.0

package slmp

import (
	"math/rand/v2"
	"testing"
)

func TestRTT(t *testing.T) {
	r := rtt{min: 5 * ms, max: second}
	if got := r.timeout(0); got != int64(initialRTO) {
		t.Errorf("RTO %d before any sample, want %d", got, int64(initialRTO))
	}
	for _, c := range []struct{ sample, smoothed, variance, timeout int64 }{
		{80 * ms, 80 * ms, 40 * ms, 240 * ms},     // RFC 6298, 2.2
		{80 * ms, 80 * ms, 30 * ms, 200 * ms},     // 2.3, alpha 1/8, beta 1/4
		{160 * ms, 90 * ms, 42500 * us, 260 * ms}, //
		{10 * ms, 80 * ms, 51875 * us, 287500 * us},
	} {
		r.sample(c.sample)
		if r.smoothed != c.smoothed || r.variance != c.variance || r.timeout(0) != c.timeout {
			t.Errorf("after %d: smoothed %d, variance %d, RTO %d, want %d, %d, %d", c.sample, r.smoothed, r.variance, r.timeout(0), c.smoothed, c.variance, c.timeout)
		}
	}
	for range 1000 {
		r.sample(100 * us)
	}
	for i, want := range []int64{5 * ms, 10 * ms, 20 * ms, 40 * ms, 80 * ms, 160 * ms, 320 * ms, 640 * ms, second, second} {
		if got := r.timeout(i); got != want {
			t.Errorf("RTO after %d expiries %d, want %d", i, got, want)
		}
	}
	if got := r.timeout(1 << 30); got != second {
		t.Errorf("RTO after very many expiries %d", got)
	}
}

// TestFloor: answers to segments that overtook others do not lower the floor, an
// emptier path does.
func TestFloor(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	var f floor
	least := int64(0)
	take := func(d int64) {
		if low := f.sample(d); low != 0 && (least == 0 || low < least) {
			least = low
		}
	}
	take(5000)
	if least != 5000 {
		t.Errorf("%d after one sample of 5000", least)
	}
	for range 10000 {
		d := 4000 + rng.Int64N(1000)
		if rng.IntN(100) < 6 {
			d = 100
		}
		take(d)
	}
	if least < 4000 {
		t.Errorf("%d: too soon are 6 in 100 only", least)
	}
	for range 2 * len(f.block) {
		take(2000)
	}
	if least != 2000 {
		t.Errorf("%d after some samples of 2000", least)
	}
}
