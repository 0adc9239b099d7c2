// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/demos/pingpong"
	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/hostqbench"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/netns/testbed"
	"github.com/xspin/xspin/spin"
)

// hostqParts are what --only chooses from, in the order in which they are measured.
var hostqParts = []struct {
	name    string
	measure func(*hostqBench, context.Context) error
}{
	{"polling", (*hostqBench).pollingRows},
	{"sleeping", (*hostqBench).sleepingRows},
	{"notify", (*hostqBench).notifyRows},
	{"pingpong", (*hostqBench).pingpongRows},
	{"window", (*hostqBench).windowRows},
}

// hostqFlags adds the flags of `xspin bench hostq`.
func hostqFlags(fl *pflag.FlagSet) func() (measureFunc, error) {
	var names []string
	for _, p := range hostqParts {
		names = append(names, p.name)
	}
	choice := onlyFlag(fl, names)
	return func() (measureFunc, error) {
		wanted, err := choice()
		if err != nil {
			return nil, err
		}
		return func(ctx context.Context, lab *benchLab, cfg benchConfig, doc *bench.Document) error {
			b := &hostqBench{lab, cfg, doc}
			if lab.sender == lab.receiver {
				cfg.warn("one CPU: cross-core rows are of the same core")
			}
			for _, p := range hostqParts {
				if !wanted(p.name) {
					continue
				}
				if err := p.measure(b, ctx); err != nil {
					return fmt.Errorf("%s: %w", p.name, err)
				}
			}
			return nil
		}, nil
	}
}

// hostqBench is one run of `xspin bench hostq`. The NIC's side is on the lab's
// receiver, and the host's on the sender, or on the same.
type hostqBench struct {
	*benchLab
	cfg benchConfig
	doc *bench.Document
}

// times returns how often something is to be done that takes about so long.
func (b *hostqBench) times(long time.Duration) int {
	return max(int(b.cfg.duration/long), 10)
}

func (b *hostqBench) cross() hostqbench.Place {
	return hostqbench.Place{NIC: b.receiver, Host: b.sender}
}

func (b *hostqBench) same() hostqbench.Place {
	return hostqbench.Place{NIC: b.receiver, Host: b.receiver}
}

func atPlace(p hostqbench.Place) string {
	if p.NIC == p.Host {
		return fmt.Sprintf("both sides pinned on CPU %d", p.NIC)
	}
	return fmt.Sprintf("the NIC's side pinned on CPU %d, the host's on CPU %d", p.NIC, p.Host)
}

// compare measures two sides, which take turns.
func (b *hostqBench) compare(ctx context.Context, name string, goal bench.Goal, conditions string, one, two func(context.Context) (float64, error), sides func(one, two []float64) (bench.Side, bench.Side)) error {
	var x, y []float64
	side := func(runs *[]float64, f func(context.Context) (float64, error)) func(context.Context) error {
		return func(ctx context.Context) error {
			v, err := f(ctx)
			*runs = append(*runs, v)
			return err
		}
	}
	if err := bench.Rounds(ctx, b.cfg.runs, side(&x, one), side(&y, two)); err != nil {
		return err
	}
	sx, sy := sides(x, y)
	row, err := bench.Ratio(name, goal, sx, sy)
	return b.doc.Add(conditions, row, err)
}

// asked is what a request and its response carry in the rows of round trips.
const asked = 16

// roundTrips compares requests and their responses with something barer.
func (b *hostqBench) roundTrips(ctx context.Context, name string, goal bench.Goal, at hostqbench.Place, waits hostqbench.Waits, long time.Duration,
	bare func(context.Context, hostqbench.Place, int) (time.Duration, error), what, conditions string) error {
	n := b.times(long)
	ns := func(d time.Duration, err error) (float64, error) { return float64(d), err }
	state := map[bool]string{true: "sleeping", false: "polling"}
	return b.compare(ctx, name, goal, conditions+"; "+atPlace(at),
		func(ctx context.Context) (float64, error) { return ns(hostqbench.RoundTrip(ctx, at, waits, asked, n)) },
		func(ctx context.Context) (float64, error) { return ns(bare(ctx, at, n)) },
		func(x, y []float64) (bench.Side, bench.Side) {
			return bench.NewSide(fmt.Sprintf("hostq.Pair, NIC's side %s, and hostq.Host in another process, %s: request and response of %d bytes each", state[waits.NIC], state[waits.Host], asked), "ns", x),
				bench.NewSide(what, "ns", y)
		})
}

const tripConditions = "round trip, median of the blocks of a run"

func (b *hostqBench) pollingRows(ctx context.Context) error {
	if b.sender == b.receiver {
		b.cfg.warn("no rows hostq/polling_over_*: two that poll need a CPU each")
		return nil
	}
	for words, r := range []struct {
		name string
		goal bench.Goal
		what string
	}{
		{"hostq/polling_over_atomic", bench.AtMost(3), "one atomic word to and fro between two threads of a process"},
		{"hostq/polling_over_two_atomics", bench.Lower, "two atomic words, one for each direction, as queues have them, between two threads of a process"},
	} {
		hop := func(ctx context.Context, at hostqbench.Place, n int) (time.Duration, error) {
			return hostqbench.PingPong(ctx, at, words+1, n)
		}
		if err := b.roundTrips(ctx, r.name, r.goal, b.cross(), hostqbench.Waits{}, 500*time.Nanosecond, hop, r.what, tripConditions); err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
	}
	return nil
}

func (b *hostqBench) sleepingRows(ctx context.Context) error {
	both := hostqbench.Waits{NIC: true, Host: true}
	for _, r := range []struct {
		name  string
		goal  bench.Goal
		at    hostqbench.Place
		waits hostqbench.Waits
		long  time.Duration
	}{
		{"hostq/sleeping_over_eventfd", bench.AtMost(1.3), b.cross(), both, 50 * time.Microsecond},
		{"hostq/sleeping_over_eventfd_same_core", bench.AtMost(1.3), b.same(), both, 10 * time.Microsecond},
		{"hostq/sleeping_host_over_eventfd", bench.Lower, b.cross(), hostqbench.Waits{Host: true}, 50 * time.Microsecond},
	} {
		if err := b.roundTrips(ctx, r.name, r.goal, r.at, r.waits, r.long,
			hostqbench.Eventfd, "two eventfds to and fro between two processes, both blocking in read", tripConditions); err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
	}
	return nil
}

// notified is the payload of a notification: with its header it is one or two
// cache lines.
var notified = []int{16, 64}

func (b *hostqBench) notifyRows(ctx context.Context) error {
	at, n := b.cross(), b.times(50*time.Nanosecond)
	for i, payload := range notified {
		name, goal := "hostq/notify_over_spsc", bench.AtLeast(0.5)
		if i > 0 {
			name, goal = fmt.Sprintf("%s_%dB", name, payload), bench.Higher
		}
		mega := func(f func(context.Context, hostqbench.Place, int, int) (float64, error)) func(context.Context) (float64, error) {
			return func(ctx context.Context) (float64, error) {
				rate, err := f(ctx, at, payload, n)
				return rate / 1e6, err
			}
		}
		if err := b.compare(ctx, name, goal,
			fmt.Sprintf("%d records a run with %d bytes of payload each, in batches of %d, one producer, one consumer in another process, which polls; %s", n, payload, hostqbench.Batch, atPlace(at)),
			mega(hostqbench.Notify), mega(hostqbench.Ring),
			func(x, y []float64) (bench.Side, bench.Side) {
				return bench.NewSide("hostq.Pair.Notify, hostq.Host.Request and Done", "M/s", x),
					bench.NewSide("a bare ring for one producer and one consumer in shared memory, the same record, head and tail published in batches", "M/s", y)
			}); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// pingpongRows compares the modes of the demo.
func (b *hostqBench) pingpongRows(ctx context.Context) error {
	for _, r := range []struct {
		name   string
		goal   bench.Goal
		client int
		wait   rtt.Wait
	}{
		{"hostq/pingpong_over_host", bench.AtMost(0.60), b.sender, rtt.Spin},
		{"hostq/pingpong_over_host_client_blocks", bench.Lower, b.sender, rtt.Block},
		{"hostq/pingpong_over_host_same_core", bench.Lower, b.receiver, rtt.Block},
	} {
		if r.client == b.receiver {
			r.wait = rtt.Block // who spins on one CPU waits for the scheduler's tick
		}
		if err := b.pingpong(ctx, r.name, r.goal, r.client, r.wait); err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
	}
	return nil
}

func (b *hostqBench) pingpong(ctx context.Context, name string, goal bench.Goal, client int, wait rtt.Wait) error {
	server := pingpong.ServerConfig{HPUs: 16, Wait: "adaptive", CPUs: []int{b.receiver}, AppSpin: 100 * time.Microsecond} // as of the demo
	const size = 16
	cfg := pingpong.Config{
		Protos: []rtt.Proto{rtt.UDP}, Sizes: []int{size}, Count: b.times(50 * time.Microsecond), Warmup: warmups, Timeout: time.Second,
		ClientWait: wait, ClientCPU: client, Server: server,
	}
	var p99, host, lost [2][]float64
	var on [2]string
	mode := func(i int, m pingpong.Mode) func(context.Context) (float64, error) {
		return func(ctx context.Context) (float64, error) {
			c := cfg
			c.Modes = []pingpong.Mode{m}
			r, err := pingpong.Run(ctx, b.Lab, c, nil)
			if err != nil {
				return 0, err
			}
			res := r.Results[0]
			on[i] = linkStates(r.Env.Links[m])
			p99[i] = append(p99[i], res.RTT.P99)
			lost[i] = append(lost[i], float64(res.Lost)/float64(res.Count))
			if res.Breakdown != nil {
				host[i] = append(host[i], res.Breakdown.Host)
			}
			return res.RTT.P50, nil
		}
	}
	return b.compare(ctx, name, goal,
		fmt.Sprintf("UDP echo, %d bytes of payload, median of %d round trips, back to back, by xspin demo pingpong; client in a process of its own, %s, %s; who answers is %s",
			size, cfg.Count, waiting(string(wait)), where(client), where(b.receiver)),
		mode(0, pingpong.HostNIC), mode(1, pingpong.Host),
		func(x, y []float64) (bench.Side, bench.Side) {
			sides := [2]bench.Side{
				bench.NewSide(fmt.Sprintf("host+nic: daemon with %d HPUs, %s, swaps addresses; application in a process of its own, user %d, spins %v before it sleeps, computes the checksum; all on this CPU",
					server.HPUs, waiting(server.Wait), rtt.Nobody, server.AppSpin), "us", x),
				bench.NewSide("host: UDP echo server in a process of its own, socket, blocking", "us", y).Of("Linux"),
			}
			for i := range sides {
				l := bench.NewSide("", "", lost[i]).Median
				sides[i].Lost, sides[i].On = &l, on[i]
				sides[i].Add("p99_us", p99[i])
				sides[i].Add("host_us", host[i])
			}
			return sides[0], sides[1]
		})
}

// windowSize is more than a last-level cache has.
const windowSize = 256 << 20

// windowCopy is what is copied at a time.
const windowCopy = 1400

func (b *hostqBench) windowRows(ctx context.Context) (err error) {
	mem, err := hostq.NewMemory("bench", windowSize)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, mem.Close()) }()
	w, err := mem.Window(0, windowSize, spin.All)
	if err != nil {
		return err
	}
	ordinary, err := unix.Mmap(-1, 0, windowSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("map %d bytes: %w", windowSize, err)
	}
	defer func() { err = errors.Join(err, unix.Munmap(ordinary)) }()
	for _, m := range [][]byte{mem.Bytes(), ordinary} { // all pages are there, in either
		for i := 0; i < len(m); i += 4096 {
			m[i] = 1
		}
	}
	n := b.times(200 * time.Nanosecond)
	var buf [windowCopy]byte
	for i := range buf {
		buf[i] = byte(i)
	}
	const span = windowSize - windowCopy
	gbit := func(copies func() error) func(context.Context) (float64, error) {
		return func(context.Context) (v float64, err error) {
			err = testbed.OnCPU(b.receiver, func() error {
				begin := time.Now()
				if err := copies(); err != nil {
					return err
				}
				v = float64(n) * windowCopy * 8 / float64(time.Since(begin))
				return nil
			})
			return v, err
		}
	}
	// Offsets of both sides are the same ones: a multiplication and a shift each.
	next := func(x uint64) uint64 { return x*6364136223846793005 + 1442695040888963407 }
	at := func(x uint64) int64 { return int64(x >> 32 * span >> 32) }
	return b.compare(ctx, "hostq/window_over_memcpy", bench.AtLeast(0.8),
		fmt.Sprintf("%d copies a run of %d bytes, from a buffer in the cache to random offsets in %d MiB, pinned on CPU %d", n, windowCopy, windowSize>>20, b.receiver),
		gbit(func() error {
			for i, x := 0, uint64(1); i < n; i++ {
				x = next(x)
				if _, err := w.WriteAt(buf[:], at(x)); err != nil {
					return err
				}
			}
			return nil
		}),
		gbit(func() error {
			for i, x := 0, uint64(1); i < n; i++ {
				x = next(x)
				copy(ordinary[at(x):], buf[:])
			}
			return nil
		}),
		func(x, y []float64) (bench.Side, bench.Side) {
			return bench.NewSide("hostq.Window.WriteAt, into a mapped BPF array map", "Gbit/s", x),
				bench.NewSide("copy, into anonymous memory, mapped as the kernel does without advice", "Gbit/s", y)
		})
}
