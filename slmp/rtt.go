// SPDX-License-Identifier: Apache-2.0

package slmp

import (
	"slices"
	"time"
)

// initialRTO is the timeout before anything has been measured. RFC 6298 says 1 s,
// for the Internet; a LAN's round trips are a thousandth of this. Too early is
// harmless, see Sender: one segment more on the wire.
const initialRTO = 50 * time.Millisecond

// rtt estimates the round-trip time and the retransmission timeout (RFC 6298,
// section 2). Times are in ns. Samples come only from segments that were sent once
// (Karn): the caller sees to that.
type rtt struct {
	smoothed, variance int64 // 0: no sample yet
	min, max           int64 // of the timeout
}

func (r *rtt) sample(d int64) {
	d = max(d, 1)
	if r.smoothed == 0 {
		r.smoothed, r.variance = d, d/2
		return
	}
	diff := r.smoothed - d
	if diff < 0 {
		diff = -diff
	}
	r.variance += (diff - r.variance) / 4
	r.smoothed = max(r.smoothed+(d-r.smoothed)/8, 1)
}

// timeout returns the RTO after the given number of expiries in a row.
func (r *rtt) timeout(expiries int) int64 {
	t := int64(initialRTO)
	if r.smoothed != 0 {
		t = r.smoothed + 4*r.variance
	}
	t = min(max(t, r.min), r.max)
	for ; expiries > 0 && t < r.max; expiries-- {
		t *= 2
	}
	return min(t, r.max)
}

// A floor looks for the round-trip time of an empty path. The least of all samples
// will not do: where segments overtake each other, some are answered far too soon.
// So it is the least of the lower third of a few samples in a row.
type floor struct {
	block [15]int64
	n     int
	begun bool // a block was full before
}

// sample returns the bound of a lower third that d completes, 0 if it completes
// none. The first few samples complete one each.
func (f *floor) sample(d int64) int64 {
	f.block[f.n] = d
	f.n++
	if f.n < len(f.block) && f.begun {
		return 0
	}
	sorted := f.block
	slices.Sort(sorted[:f.n])
	low := sorted[f.n/3]
	if f.n == len(f.block) {
		f.n, f.begun = 0, true
	}
	return low
}
