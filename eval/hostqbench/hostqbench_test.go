// SPDX-License-Identifier: Apache-2.0

package hostqbench_test

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/xspin/xspin/eval/hostqbench"
	"github.com/xspin/xspin/netns/netnstest"
)

// places are where the two sides run. Ping-pong of two that spin on one CPU measures
// the scheduler.
func places(spin bool) map[string]hostqbench.Place {
	p := map[string]hostqbench.Place{}
	if runtime.NumCPU() > 1 {
		p["cross"] = hostqbench.Place{NIC: 0, Host: 1}
	}
	if !spin {
		p["same"] = hostqbench.Place{}
	}
	return p
}

// What the benchmarks measure with works.
func TestBench(t *testing.T) {
	netnstest.NeedRoot(t)
	at := hostqbench.Place{NIC: 0, Host: runtime.NumCPU() - 1}
	ctx := t.Context()
	duration := func(d time.Duration, err error) (float64, error) { return float64(d), err }
	for name, f := range map[string]func() (float64, error){
		"ping-pong":        func() (float64, error) { return duration(hostqbench.PingPong(ctx, at, 1, 200)) },
		"ping-pong of two": func() (float64, error) { return duration(hostqbench.PingPong(ctx, at, 2, 200)) },
		"eventfd":          func() (float64, error) { return duration(hostqbench.Eventfd(ctx, at, 200)) },
		"polling": func() (float64, error) {
			return duration(hostqbench.RoundTrip(ctx, at, hostqbench.Waits{}, 100, 2000))
		},
		"sleeping": func() (float64, error) {
			return duration(hostqbench.RoundTrip(ctx, at, hostqbench.Waits{NIC: true, Host: true}, 0, 200))
		},
		"notify": func() (float64, error) { return hostqbench.Notify(ctx, at, 64, 20000) },
		"ring":   func() (float64, error) { return hostqbench.Ring(ctx, at, 64, 20000) },
	} {
		if x, err := f(); err != nil || x <= 0 {
			t.Errorf("%s: %g, %v", name, x, err)
		}
	}
}

func roundTrip(b *testing.B, f func(at hostqbench.Place, n int) (time.Duration, error), spin bool) {
	netnstest.NeedRoot(b)
	for name, at := range places(spin) {
		b.Run(name, func(b *testing.B) {
			d, err := f(at, b.N)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(d), "ns/op")
		})
	}
}

func BenchmarkPingPong(b *testing.B) {
	for words := 1; words <= 2; words++ {
		b.Run(fmt.Sprintf("words=%d", words), func(b *testing.B) {
			roundTrip(b, func(at hostqbench.Place, n int) (time.Duration, error) {
				return hostqbench.PingPong(b.Context(), at, words, n)
			}, true)
		})
	}
}

func BenchmarkEventfd(b *testing.B) {
	roundTrip(b, func(at hostqbench.Place, n int) (time.Duration, error) {
		return hostqbench.Eventfd(b.Context(), at, n)
	}, false)
}

func BenchmarkRoundTrip(b *testing.B) {
	for _, c := range []struct {
		name  string
		waits hostqbench.Waits
	}{
		{"polling", hostqbench.Waits{}},
		{"host-sleeps", hostqbench.Waits{Host: true}},
		{"both-sleep", hostqbench.Waits{NIC: true, Host: true}},
	} {
		for _, payload := range []int{0, 16, 1408} {
			b.Run(fmt.Sprintf("%s/%d", c.name, payload), func(b *testing.B) {
				roundTrip(b, func(at hostqbench.Place, n int) (time.Duration, error) {
					return hostqbench.RoundTrip(b.Context(), at, c.waits, payload, n)
				}, c.waits == hostqbench.Waits{})
			})
		}
	}
}

func BenchmarkNotify(b *testing.B) {
	netnstest.NeedRoot(b)
	for _, payload := range []int{16, 64, 1408} {
		for _, c := range []struct {
			name string
			f    func(at hostqbench.Place, payload, n int) (float64, error)
		}{
			{"hostq", func(at hostqbench.Place, payload, n int) (float64, error) {
				return hostqbench.Notify(b.Context(), at, payload, n)
			}},
			{"bare", func(at hostqbench.Place, payload, n int) (float64, error) {
				return hostqbench.Ring(b.Context(), at, payload, n)
			}},
		} {
			b.Run(fmt.Sprintf("%d/%s", payload, c.name), func(b *testing.B) {
				rate, err := c.f(hostqbench.Place{NIC: 0, Host: runtime.NumCPU() - 1}, payload, max(b.N, 10*hostqbench.Batch))
				if err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(rate/1e6, "M/s")
			})
		}
	}
}
