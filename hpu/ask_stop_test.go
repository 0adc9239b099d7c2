// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/spin"
)

// Requests and continuations of contexts that end, and of handlers that hang.

// block installs a context with a handler that does not return before the gate opens.
func (r *rig) block(id uint16) (in, gate chan struct{}) {
	in, gate = make(chan struct{}), make(chan struct{})
	r.install(id, func(*HER) spin.Code { in <- struct{}{}; <-gate; return spin.Success })
	return in, gate
}

// The continuation of one context hangs; those of others in the same batch of jobs run.
func TestJobsBehindOneThatHangs(t *testing.T) {
	r := newRig(t, rigConfig{hpus: 2, Config: Config{Workers: 1, Limit: 50 * time.Millisecond}})
	h1, h2 := newFakeHost(t, 1, 100), newFakeHost(t, 1, 100)
	release := make(chan struct{})
	var ran atomic.Int32
	bad := r.withResources(1, Handlers{Payload: func(h *HER) spin.Code {
		_ = h.AskThen(1, nil, func(*HER, *Reply) spin.Code { <-release; return spin.Success })
		return spin.Success
	}}, Resources{Host: h1})
	r.withResources(2, Handlers{Payload: func(h *HER) spin.Code {
		_ = h.AskThen(1, nil, func(*HER, *Reply) spin.Code { ran.Add(1); return spin.Success })
		return spin.Success
	}}, Resources{Host: h2})
	in, gate := r.block(3)
	r.receive(pkt{ctx: 1, data: numbered(1, 60)})
	r.receive(pkt{ctx: 2, hpu: 1, data: numbered(1, 60)})
	a, b := h1.take(1)[0], h2.take(1)[0]
	r.receive(pkt{ctx: 3, data: numbered(1, 60)})
	<-in // both answers come in one look
	h1.answer(a, 0, "")
	h2.answer(b, 0, "")
	close(gate)
	eventually(t, "the one that hangs is given up", bad.Stopped)
	eventually(t, "the continuation of the other context runs", func() bool { return ran.Load() == 1 })
	close(release)
	r.settled()
}

// An answer is on its way to a worker that is busy when Drain's time is up: when the
// worker looks at it, the context's number may be another's.
func TestNothingRunsAfterDrain(t *testing.T) {
	host := newFakeHost(t, 1, 100)
	var drained atomic.Bool
	var b *bench
	b = newBench(t, benchConfig{noHeader: true, rig: rigConfig{hpus: 2, Config: Config{Workers: 1, Limit: 10 * time.Second}},
		payload: func(h *HER) spin.Code {
			if h.Message().Number() == 2 { // takes the answer for message 1 while it waits for its own
				host.answer(host.take(1)[0], 0, "")
				go func() { host.answer(host.take(1)[0], 0, "") }()
				if _, _, err := h.Ask(5, nil, nil); err != nil {
					t.Error(err)
				}
			}
			return spin.Success
		},
		completion: func(c *Completion) spin.Code {
			if c.Message().Number() == 1 {
				if err := c.AskThen(1, nil, func(c *Completion, a *Reply) spin.Code {
					if drained.Load() {
						t.Errorf("a continuation of %s runs in %s, after Drain", b.c.Name(), c.Context().Name())
					}
					return spin.Success
				}); err != nil {
					t.Error(err)
				}
			}
			return spin.Success
		}, resources: Resources{Host: host}})
	in, gate := b.block(3)
	p1, p2 := cut(1, 1, peerA, 100, 100)[0], cut(1, 2, peerA, 100, 100)[0]
	p1.bucket, p2.bucket = &testBuckets, &testBuckets
	b.receive(p1, p2, pkt{ctx: 3, hpu: 1, data: numbered(1, 60)})
	<-in
	if err := b.Drain(b.c, 20*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	drained.Store(true)
	next := NewContext(1, "next", Handlers{Payload: func(*HER) spin.Code { return spin.Success }}, bpf.Range{})
	if err := b.Install(next); err != nil {
		t.Fatal(err)
	}
	close(gate)
	b.receive(pkt{ctx: 1, data: numbered(9, 60)})
	b.settled()
}

// Nobody polls for a context that is drained; what waits for its application comes back.
func TestWhatWaitsIsTakenBackAfterDrain(t *testing.T) {
	t.Run("busy worker", func(t *testing.T) {
		r := newRig(t, rigConfig{hpus: 2, Config: Config{Workers: 1, Limit: 10 * time.Second}})
		host := newFakeHost(t, 1, 100)
		c := r.withResources(1, Handlers{Payload: func(h *HER) spin.Code {
			_ = h.AskThen(1, nil, func(*HER, *Reply) spin.Code { return spin.Success })
			return spin.Success
		}}, Resources{Host: host})
		in, gate := r.block(3)
		r.receive(pkt{ctx: 1, data: numbered(1, 60)})
		host.take(1)
		r.receive(pkt{ctx: 3, hpu: 1, data: numbered(1, 60)})
		<-in
		if r.Drain(c, 10*time.Millisecond) == nil {
			t.Error("the packet was still out")
		}
		close(gate)
		eventually(t, "its packet comes back", func() bool { return r.Idle(c) && r.Kept() == 0 })
		r.settled()
	})
	t.Run("stopped context", func(t *testing.T) {
		host := newFakeHost(t, 1, 100)
		release := make(chan struct{})
		b := newBench(t, benchConfig{noHeader: true, rig: rigConfig{Config: Config{Limit: 20 * time.Millisecond}},
			payload: func(h *HER) spin.Code {
				if h.Message().Number() == 2 {
					<-release
				}
				return spin.Success
			},
			completion: func(c *Completion) spin.Code {
				_ = c.AskThen(1, nil, func(*Completion, *Reply) spin.Code { return spin.Success })
				return spin.Success
			}, resources: Resources{Host: host}})
		b.send(cut(1, 1, peerA, 100, 100)...)
		host.take(1)
		b.send(cut(1, 2, peerA, 100, 100)...)
		eventually(t, "the context is stopped", b.c.Stopped)
		close(release)
		b.quiet(0)
		if err := b.Drain(b.c, time.Second); err != nil {
			t.Fatal(err)
		}
		eventually(t, "nothing is kept", func() bool { return b.Kept() == 0 })
	})
}

// A handler that is given up is counted before Drain says that nothing runs: whoever
// frees memory afterwards looks at that count.
func TestDrainCountsHandlersThatHang(t *testing.T) {
	r := newRig(t, rigConfig{Config: Config{Limit: 20 * time.Millisecond}})
	for range 40 {
		var inside atomic.Bool
		release := make(chan struct{})
		c := r.withResources(1, Handlers{Timer: func(*Task) spin.Code {
			inside.Store(true)
			<-release
			inside.Store(false)
			return spin.Success
		}}, Resources{Timer: time.Millisecond})
		if err := r.Init(c); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the handler runs", inside.Load)
		if err := r.Drain(c, 0); err == nil && c.Stats().Overruns == 0 && inside.Load() {
			t.Fatal("Drain says that nothing runs, and no handler was given up, but one runs")
		}
		close(release)
		eventually(t, "the handler has returned", func() bool { return !inside.Load() && r.Stuck() == 0 })
	}
	r.settled()
}

// A packet comes back to its continuation as the handler has left it.
func TestTruncatedPacketStaysSo(t *testing.T) {
	r := newRig(t, rigConfig{})
	host := newFakeHost(t, 1, 100)
	r.withResources(1, Handlers{Payload: func(h *HER) spin.Code {
		if err := h.Truncate(60); err != nil {
			t.Error(err)
		}
		if err := h.AskThen(1, nil, func(h *HER, a *Reply) spin.Code {
			if h.Len() != 60 || h.Segments() != 1 {
				t.Errorf("the packet has %d bytes in %d buffers, the handler has left 60 in 1", h.Len(), h.Segments())
			}
			if err := h.Send(); err != nil {
				t.Error(err)
			}
			return spin.Success
		}); err != nil {
			t.Error(err)
		}
		return spin.Success
	}}, Resources{Host: host})
	r.receive(pkt{ctx: 1, data: numbered(1, 3000), segs: 3})
	host.answer(host.take(1)[0], 0, "")
	eventually(t, "one frame is sent", func() bool { return len(r.wireFrames()) > 0 })
	r.settled()
	if f := r.wireFrames(); len(f) != 1 || len(f[0].data) != 60 {
		t.Errorf("%d frames are sent, the first of %d bytes", len(f), len(f[0].data))
	}
}
