// SPDX-License-Identifier: Apache-2.0

package slmp

import (
	"math"
	"time"
)

// What window is made of. Segments and ns, unless said otherwise.
const (
	minWindow  = 8
	maxWindow  = 4096
	initWindow = 32

	// hostTime is what the window covers at least. Threads that sleep and
	// wake, and batches on either end, make the round trips of a fast LAN
	// differ by more than they take. At 10 Mbit/s it is one segment, at 10
	// Gbit/s 800.
	hostTime = int64(time.Millisecond)

	rateRounds = 10                      // a delivery rate is remembered for
	minRTTLife = int64(10 * time.Second) // a minimal round trip is believed for
	probeTime  = int64(10 * time.Millisecond)

	// More loss than this in a round is overload: something drops because too
	// much is on its way. And how many segments at least to judge by.
	overloadPer64 = 3 // 4.7 %
	judgeBy       = 200
)

// window says how many segments may be in flight: the congestion controller of a
// Sender with Window 0, for all its messages together.
//
// It is model-based, after BBR (draft-cardwell-iccrg-bbr-congestion-control): what
// the path can carry is measured, the largest rate of delivery during the last ten
// round trips and the smallest round-trip time during the last ten seconds, and
// the window is 5/4 of their product, whether a segment is lost now and then or
// not. There is no pacing: acknowledgements are the clock.
//
//	          rate grows by less than 1/4 in three rounds, or overload
//	startup ──────────────────────────────────────────────────────► steady ◄──► probe
//	doubles                                                 minimal RTT 10 s old:
//	every round                                             little in flight for 10 ms
//
// Beyond the product there is an allowance for acknowledgements that come many at
// once (the most that came more than the rate explains), and one that grows with
// the root of the product: of flows that share a bottleneck those with little gain
// more from it than those with much, which makes their shares equal after a while.
//
// Loss of 5 % in a round is not chance but overload: it cuts the window to 0.7 of
// what it was, not below the product. This ceiling goes up again by 1/16 each round.
type window struct {
	size int // segments in flight, at most

	delivered   uint64 // segments acknowledged, ever
	deliveredAt int64  // when the last was
	firstSent   int64  // when the last acknowledged one was sent
	limited     uint64 // up to this many delivered, samples show only what there was to send

	round    uint64              // number
	roundEnd uint64              // delivered: ends when a segment sent at or after it is acknowledged
	rates    [rateRounds]float64 // highest rate of each round, segments per ns
	extras   [rateRounds]int     // highest aggregation of each round
	rate     float64             // highest of rates
	extra    int                 // highest of extras
	burstAt  int64               // since when aggregation is measured
	burst    uint64              // acknowledged since

	floor    floor
	trial    floor // of the current probe
	minRTT   int64 // 0: not known
	minRTTAt int64
	fresh    int64 // smallest of the current probe

	state     uint8
	fullRate  float64 // in startup: rate when it last grew
	fullCount int     // rounds since
	probeEnd  int64   // 0: waiting until enough has been acknowledged

	ceiling  float64 // from overload; 0: none
	judged   uint64  // delivered when loss was last judged
	judgedAt uint64  // round when it was
	lost     int     // since
}

const (
	startup uint8 = iota
	steady
	probe
)

// A snapshot is what a segment remembers of the window when it is sent.
type snapshot struct {
	sent, firstSent, deliveredAt int64
	delivered                    uint64
	limited                      bool
}

// sending returns the snapshot for a segment that is sent now, inflight others
// being on their way.
func (w *window) sending(now int64, inflight int) snapshot {
	if inflight == 0 {
		w.firstSent, w.deliveredAt = now, now
	}
	return snapshot{sent: now, firstSent: w.firstSent, deliveredAt: w.deliveredAt,
		delivered: w.delivered, limited: w.limited > w.delivered}
}

// idle says that there is nothing to send though the window has room.
func (w *window) idle(inflight int) { w.limited = w.delivered + uint64(inflight) }

// sample says how long a round trip took.
func (w *window) sample(d, now int64) {
	if low := w.floor.sample(d); low != 0 && (w.minRTT == 0 || low <= w.minRTT) {
		w.minRTT, w.minRTTAt = low, now
	}
	if low := w.trial.sample(d); low != 0 && (w.fresh == 0 || !w.trial.begun || low < w.fresh) {
		w.fresh = low
	}
}

// lose counts segments found lost.
func (w *window) lose(n int) { w.lost += n }

// acked takes n segments as delivered; newest is what the one sent last of them
// remembers. inflight is how many are still on their way.
func (w *window) acked(n int, newest *snapshot, inflight int, now int64) {
	w.delivered += uint64(n)
	w.deliveredAt, w.firstSent = now, newest.sent
	limited := newest.limited || w.delivered <= w.limited

	ended := newest.delivered >= w.roundEnd
	if ended {
		w.round++
		w.roundEnd = w.delivered
		i := w.round % rateRounds
		w.rates[i], w.extras[i] = 0, 0
	}
	w.measure(newest, limited, now)
	w.aggregation(n, now)
	if ended {
		w.rate, w.extra = 0, 0
		for i := range w.rates {
			w.rate, w.extra = max(w.rate, w.rates[i]), max(w.extra, w.extras[i])
		}
		w.judge()
	}

	switch w.state {
	case startup:
		if ended && !limited {
			if w.rate >= w.fullRate*1.25 {
				w.fullRate, w.fullCount = w.rate, 0
			} else if w.fullCount++; w.fullCount == 3 {
				w.state = steady
			}
		}
	case steady:
		if now-w.minRTTAt > minRTTLife {
			w.state, w.probeEnd = probe, 0
		}
	case probe:
		switch {
		case w.probeEnd == 0 && inflight <= w.probeSize():
			w.probeEnd = now + max(probeTime, w.minRTT)
			w.fresh, w.trial = 0, floor{}
		case w.probeEnd != 0 && now >= w.probeEnd:
			w.state, w.minRTTAt = steady, now
			if w.fresh != 0 {
				w.minRTT = w.fresh
			}
		}
	}
	w.resize(n, limited)
}

// measure takes the rate of delivery over the newest segment's round trip.
func (w *window) measure(newest *snapshot, limited bool, now int64) {
	interval := max(now-newest.deliveredAt, newest.sent-newest.firstSent)
	if interval <= 0 || interval < w.minRTT {
		return
	}
	r := float64(w.delivered-newest.delivered) / float64(interval)
	if i := w.round % rateRounds; r > w.rates[i] && (!limited || r > w.rate) {
		w.rates[i] = r
		w.rate = max(w.rate, r)
	}
}

// aggregation measures how much more comes at once than the rate explains.
func (w *window) aggregation(n int, now int64) {
	expected := w.rate * float64(now-w.burstAt)
	if float64(w.burst) <= expected {
		w.burstAt, w.burst, expected = now, 0, 0
	}
	w.burst += uint64(n)
	// What a filled hole sets free at once is no aggregation.
	extra := min(int(float64(w.burst)-expected), int(w.rate*float64(w.minRTT)/4)+64)
	i := w.round % rateRounds
	w.extras[i] = max(w.extras[i], extra)
	w.extra = max(w.extra, extra)
}

// judge looks at the loss since it last did, at the end of a round.
func (w *window) judge() {
	n := int(w.delivered-w.judged) + w.lost
	if n < judgeBy {
		return
	}
	if w.lost*64 > n*overloadPer64 {
		// Never below what the path is known to carry.
		w.ceiling = max(0.7*float64(w.size), w.rate*float64(w.minRTT), minWindow)
		w.state = max(w.state, steady)
	} else if w.ceiling > 0 {
		// One step for each round that this was about.
		for range min(w.round-w.judgedAt, 16) {
			w.ceiling += w.ceiling/16 + 0.25
		}
		if w.ceiling > maxWindow {
			w.ceiling = 0
		}
	}
	w.judged, w.judgedAt, w.lost = w.delivered, w.round, 0
}

func (w *window) probeSize() int {
	return max(minWindow/2, int(w.rate*float64(w.minRTT+hostTime)/2))
}

// target returns the window that is gain times what the path carries.
func (w *window) target(gain float64) int {
	product := w.rate * float64(w.minRTT)
	host := w.rate * float64(hostTime)
	return int(max(gain*product+float64(w.extra), host)+3*math.Sqrt(max(product, host))) + minWindow
}

func (w *window) resize(n int, limited bool) {
	switch w.state {
	case startup:
		if !limited {
			w.size = min(w.size+n, max(2*w.target(1.5), initWindow))
		}
	case steady:
		w.size = min(w.size+n, w.target(1.25))
	case probe:
		w.size = min(w.size, w.probeSize())
		return
	}
	if w.ceiling > 0 {
		w.size = min(w.size, int(w.ceiling))
	}
	w.size = min(max(w.size, minWindow), maxWindow)
}
