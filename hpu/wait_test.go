// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/spin"
)

func TestTheSpinningWindowFollowsTheSleeps(t *testing.T) {
	const us = int64(time.Microsecond)
	for _, tc := range []struct {
		name   string
		window int64
		slept  []int64
		want   int64
	}{
		{"a short sleep opens it", 0, []int64{150 * us}, firstWindow},
		{"more of them double it", 0, []int64{us, us}, 2 * firstWindow},
		{"it has a limit", 0, []int64{us, us, us, us, us}, maxWindow},
		{"a sleep of the limit still counts as short", 0, []int64{maxWindow}, firstWindow},
		{"a longer one halves it", maxWindow, []int64{maxWindow + 1}, maxWindow / 2},
		{"many long ones close it", maxWindow, []int64{1e9, 1e9, 1e9, 1e9, 1e9, 1e9}, 0},
		{"it stays closed", 0, []int64{1e9}, 0},
	} {
		w := waiter{window: tc.window}
		for _, s := range tc.slept {
			w.adapt(s)
		}
		if w.window != tc.want {
			t.Errorf("%s: %d ns, want %d", tc.name, w.window, tc.want)
		}
	}
}

func TestNapsGrowWhileNothingMoves(t *testing.T) {
	var w waiter
	for i, step := range []struct{ left, nap int }{
		{5, 1}, {5, 2}, {5, 4}, {5, 8}, {5, 16}, {5, 20}, {5, 20},
		{4, 1}, {4, 2}, // something moved
		{0, 0}, {4, 1},
	} {
		if got := w.napFor(step.left); got != step.nap {
			t.Errorf("nap %d, with %d frames left, lasts %d ms, want %d", i, step.left, got, step.nap)
		}
	}
}

// switches returns how often a thread, or all of this process, have gone to sleep.
func switches(t *testing.T, who int) int64 {
	var ru unix.Rusage
	if err := unix.Getrusage(who, &ru); err != nil {
		t.Error(err)
	}
	return ru.Nvcsw
}

func TestAnIdlePoolSleeps(t *testing.T) {
	r := newRig(t, rigConfig{hpus: 16, Config: Config{Workers: 2}})
	c := r.install(1, swallow)
	for i := range 16 {
		r.receive(pkt{hpu: i, ctx: 1, data: numbered(0, 64)})
	}
	eventually(t, "the pool is idle", func() bool { return r.Idle(c) })
	r.asleep()
	exchanges := func() (n int) {
		r.with(func() { n = r.kernel.queues[0].exchanges })
		return n
	}
	before, n := exchanges(), switches(t, unix.RUSAGE_SELF)
	time.Sleep(500 * time.Millisecond)
	if d := exchanges() - before; d != 0 {
		t.Errorf("%d exchanges while idle", d)
	}
	// Two looks of the watchdog, and what the Go runtime does for them.
	if d := switches(t, unix.RUSAGE_SELF) - n; d > 100 {
		t.Errorf("threads went to sleep %d times in half a second", d)
	}
}

// A context that ends has many messages open: its worker does not sleep between them.
func TestAWorkerEndsMessagesWithoutSleeping(t *testing.T) {
	const messages = 256 * batchSize
	var first, last int64 // the worker's
	b := newBench(t, benchConfig{
		rig: rigConfig{Config: Config{Wait: Sleep}}, events: messages,
		completion: func(*Completion) spin.Code {
			last = switches(t, unix.RUSAGE_THREAD)
			if first == 0 {
				first = last
			}
			return spin.Success
		},
		change: func(m *MessageConfig) { m.Messages, m.Timeout = messages, time.Hour },
	})
	for id := range uint32(messages) {
		b.send(segment(1, id, peerA, 0, 10, false))
	}
	eventually(t, "the pool is idle", func() bool { return b.Idle(b.c) })
	if err := b.Drain(b.c, patience); err != nil {
		t.Fatal(err)
	}
	if st, _ := b.c.Messages(); st.Open != 0 || st.Abandoned != messages {
		t.Errorf("%+v", st)
	}
	if d := last - first; d > messages/batchSize/2 {
		t.Errorf("it went to sleep %d times for %d batches of messages", d, messages/batchSize)
	}
}

// traffic sends n packets of each size through a rig, batches at a time.
func traffic(r *rig, n int, ps []pkt) {
	for sent := 0; sent < n; {
		k := min(len(ps), n-sent)
		got := r.receive(ps[:k]...)
		sent += got
		if got == 0 {
			runtime.Gosched()
		}
	}
	for !r.idle() {
		runtime.Gosched()
	}
}

// steady is a handler that uses most of what there is.
func steady(h *HER) spin.Code {
	h.Count(0, uint64(h.Len()))
	if h.Headers() == nil || h.Now() == 0 {
		return spin.Fail
	}
	if b, err := h.SendNew(64); err == nil {
		b[0] = 1
	}
	if h.Segments() > 1 {
		_ = h.Truncate(h.Len() - 1)
	}
	return echo(h)
}

func TestSteadyStateAllocatesNothing(t *testing.T) {
	b := bpf.Range{Base: 0, Size: 16}
	r := newRig(t, rigConfig{Config: Config{Wait: Spin}})
	r.kernel.quiet = true
	r.install(1, steady, b)
	ps := make([]pkt, 32)
	for i := range ps {
		ps[i] = pkt{ctx: 1, data: numbered(uint64(i), 600), segs: 1 + i%3, bucket: &b, hash: uint32(i)}
	}
	traffic(r, 10000, ps)
	const n = 20000
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	traffic(r, n, ps)
	runtime.ReadMemStats(&after)
	// Some are the runtime's own.
	if got := after.Mallocs - before.Mallocs; got > n/50 { // a batch has 32
		t.Errorf("%d allocations for %d packets", got, n)
	}
}

func BenchmarkHandler(b *testing.B) {
	for _, bm := range []struct {
		name string
		h    Handler
	}{{"swallow", swallow}, {"echo", echo}} {
		b.Run(bm.name, func(b *testing.B) {
			r := newRig(b, rigConfig{Config: Config{Wait: Spin}})
			r.kernel.quiet = true
			r.kernel.free = true // no checks
			r.install(1, bm.h)
			ps := make([]pkt, 64)
			for i := range ps {
				ps[i] = pkt{ctx: 1, data: numbered(uint64(i), 64)}
			}
			b.ReportAllocs()
			b.ResetTimer()
			traffic(r, b.N, ps)
			b.StopTimer()
			hpus, _ := r.Stats()
			b.ReportMetric(float64(hpus[0].Busy)/float64(b.N), "busy-ns/op")
		})
	}
}

// FuzzSchedule plays random schedules of packets, losses, failures, releases and
// holdups, and finds every frame and credit in its place at the end.
func FuzzSchedule(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
	f.Add([]byte("the quick brown fox jumps over the lazy dog"))
	rng := rand.New(rand.NewPCG(3, 4))
	for range 20 {
		b := make([]byte, 400)
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		f.Add(b)
	}
	f.Fuzz(playSchedule)
}
