// SPDX-License-Identifier: Apache-2.0

package slmp

import (
	"fmt"
	"testing"

	"github.com/xspin/xspin/internal/testenv"
)

const second = int64(1e9)

// goodput sends one message, in simulated time, and returns bits per ns.
func goodput(t *testing.T, p *pipe, window int, length uint64) (float64, SenderStats) {
	t.Helper()
	h := p.add(t, SenderConfig{Payload: 1408, Window: window}, length, 1, 1)
	p.run(1000 * second)
	if h.finished != 1 {
		t.Fatalf("window %d: not delivered: %v, %+v", window, h.failed, h.s.Stats())
	}
	return float64(length) * 8 / float64(h.endedAt), h.s.Stats()
}

func ratePipe(rate float64, queue int, delay int64, loss float64) *pipe {
	p := newPipe(1)
	p.perSegment = int64(1408 * 8 / rate * 1e9)
	p.queue, p.delay, p.loss, p.wake = queue, delay, loss, 20*us
	return p
}

func TestAuto(t *testing.T) {
	for _, rate := range []float64{10e6, 100e6, 1e9, 10e9} {
		for _, delay := range []int64{0, ms, 20 * ms} {
			for _, loss := range []float64{0, 0.01} {
				t.Run(fmt.Sprintf("%g Mbit/s, %d ms, %g%%", rate/1e6, delay/1e6, 100*loss), func(t *testing.T) {
					length := uint64(rate / 8 * 3)
					windows := []int{4, 16, 64, 256, 1024}
					if rate >= 1e9 {
						if testing.Short() {
							t.Skip("slow")
						}
						if testenv.Race {
							t.Log("only without the race detector: one goroutine simulates all of it, for minutes")
							return
						}
						// The start counts for as much as it does in a file of 0.2 GB.
						length = 200e6
						windows = []int{64, 256, 1024, 2048, 4096}
						if delay > ms {
							windows = []int{1024, 4096}
						}
					}
					best, at := 0.0, 0
					for _, w := range windows {
						if g, _ := goodput(t, ratePipe(rate, 1000, delay, loss), w, length); g > best {
							best, at = g, w
						}
						if best > 0.97*(1-loss)*rate/1e9 {
							break // nearly all that the path carries: longer queues only lose more
						}
					}
					auto, st := goodput(t, ratePipe(rate, 1000, delay, loss), 0, length)
					t.Logf("auto %.3f Gbit/s, %.2f of the best, %.3f at %d: window %d, %d of %d again, %d timeouts",
						auto, auto/best, best, at, st.Window, st.Retransmitted, st.Segments, st.Timeouts)
					if auto < 0.85*best {
						t.Error("too slow")
					}
				})
			}
		}
	}
}

// Eight senders share a bottleneck.
func TestAutoShares(t *testing.T) {
	for _, c := range []struct {
		rate  float64
		delay int64
		queue int
	}{
		{10e6, 0, 256}, {10e6, ms, 256}, {100e6, ms, 2000}, {1e9, 0, 256}, {1e9, ms, 2000}, {5e9, 0, 256}, {5e9, 0, 2000}, {5e9, ms, 2000},
	} {
		for _, late := range []int{0, 4} {
			t.Run(fmt.Sprintf("%g Mbit/s, %d ms, queue %d, %d late", c.rate/1e6, c.delay/1e6, c.queue, late), func(t *testing.T) {
				p := ratePipe(c.rate, c.queue, c.delay, 0)
				end := 30 * second
				if c.rate > 50e6 {
					end = second / 2
				}
				for i := range 8 {
					if i == 8-late {
						p.run(end / 8)
					}
					p.add(t, SenderConfig{Payload: 1408}, MaxMessage, 1, 1)
				}
				p.run(end / 2)
				var before [8]uint64
				for i, h := range p.hosts {
					before[i] = h.bytes
				}
				p.run(end)
				var sum, squares float64
				for i, h := range p.hosts {
					x := float64(h.bytes - before[i])
					sum += x
					squares += x * x
				}
				jain, used := sum*sum/8/squares, sum*8/float64(end/2)*1e9/c.rate
				t.Logf("Jain %.3f, %.2f of the rate", jain, used)
				// Who comes late takes the others' queue for a longer path.
				if jain < 0.8 && late == 0 || jain < 0.75 || used < 0.9 {
					t.Error("unfair or slow")
				}
			})
		}
	}
}

// Chance is no reason to slow down, overload is.
func TestAutoLoss(t *testing.T) {
	for _, c := range []struct {
		loss        float64
		queue       int
		rate        float64 // at least, as a part of the bottleneck's
		retransmits float64 // at most
	}{
		{0.02, 2000, 0.9, 0.08},
		{0.05, 2000, 0.8, 0.2},
		{0, 50, 0.7, 0.15}, // a quarter of what the path holds
	} {
		p := ratePipe(100e6, c.queue, 10*ms, c.loss)
		g, st := goodput(t, p, 0, 50e6)
		again := float64(st.Retransmitted) / float64(st.Segments)
		t.Logf("loss %g, queue %d: %.3f Gbit/s, %.3f again, window %d", c.loss, c.queue, g, again, st.Window)
		if g < 0.1*c.rate || again > c.retransmits {
			t.Errorf("loss %g, queue %d: %.3f Gbit/s, %.3f of the segments again", c.loss, c.queue, g, again)
		}
	}
}

// The path becomes longer: nobody can tell that from a queue, until the probe.
func TestAutoProbe(t *testing.T) {
	p := ratePipe(20e6, 1000, ms, 0)
	h := p.add(t, SenderConfig{Payload: 1408}, MaxMessage, 1, 1)
	p.run(12 * second)
	if got := float64(h.bytes) * 8 / 12; got < 0.97*20e6 {
		t.Errorf("%.1f Mbit/s with one probe", got/1e6)
	}
	if m := h.s.win.minRTT; m > 2*ms+4*p.perSegment {
		t.Errorf("minimal round trip %d, the path's is 2 ms and a segment", m)
	}
	p.delay = 20 * ms
	p.run(30 * second)
	before := h.bytes
	p.run(32 * second)
	if got := float64(h.bytes-before) * 8 / 2; got < 0.9*20e6 {
		t.Errorf("%.1f Mbit/s after the path became longer: window %d, minimal round trip %d", got/1e6, h.s.win.size, h.s.win.minRTT)
	}
	p.delay = ms
	p.run(33 * second)
	before = h.bytes
	p.run(35 * second)
	if got := float64(h.bytes-before) * 8 / 2; got < 0.9*20e6 {
		t.Errorf("%.1f Mbit/s after it became shorter", got/1e6)
	}
}

// A sender that has little to say does not take that for what the path can carry.
func TestAutoIdle(t *testing.T) {
	p := ratePipe(1e9, 1000, ms, 0)
	h := p.add(t, SenderConfig{Payload: 1408}, 1408*4, 200, 1)
	p.run(1000 * second)
	if h.finished != 200 || h.s.win.size < initWindow || h.s.win.state != startup {
		t.Errorf("%d finished, window %d, state %d", h.finished, h.s.win.size, h.s.win.state)
	}
}
