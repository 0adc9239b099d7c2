// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"io"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/spin"
)

// bytesOf hands out the bytes of a schedule, and ends with it.
type bytesOf struct{ b []byte }

func (s *bytesOf) next() (byte, bool) {
	if len(s.b) == 0 {
		return 0, false
	}
	b := s.b[0]
	s.b = s.b[1:]
	return b, true
}

// playSchedule runs one schedule. Rules that must hold at any time are the fake
// kernel's: see step and watchCredit.
func playSchedule(t *testing.T, script []byte) {
	if len(script) < 4 || len(script) > 1000 {
		return
	}
	s := &bytesOf{script}
	conf, _ := s.next()
	buckets := bpf.Range{Base: 0, Size: 8}
	r := newRig(t, rigConfig{
		queues: 1 + int(conf&1), hpus: 3, perQueue: 96, spare: 24, rxSize: 96, txSize: 16,
		Config: Config{
			Workers: 1 + int(conf>>1&1),
			Wait:    Wait(conf >> 2 & 1), // Adaptive or Sleep
			Egress:  Egress(conf >> 3 & 1),
			Limit:   2 * time.Millisecond,
			Logger:  slog.New(slog.NewTextHandler(io.Discard, nil)),
		},
	})
	const contexts = 4
	var (
		mu    sync.Mutex
		kept  []*Kept
		seen  [2][3][contexts]uint64
		stuck = make(chan struct{})
	)
	handler := func(h *HER) spin.Code {
		n := number(h.Head())
		mu.Lock()
		last := &seen[h.port.queue][h.HPU()][h.Context().ID()]
		if n>>8 <= *last {
			t.Errorf("packet %d comes after %d", n>>8, *last)
		}
		*last = n >> 8
		mu.Unlock()
		what := byte(n)
		if what&1 != 0 {
			if b, err := h.SendNew(20 + int(what)); err == nil {
				clear(b)
			}
		}
		if what&2 != 0 {
			_ = h.Truncate(24 + int(what)%(h.Len()-23))
		}
		h.Count(int(what&15), 1)
		switch what >> 4 {
		case 0, 1:
			return spin.Drop
		case 2:
			return spin.Fail
		case 3:
			_ = h.Send()
			panic("scheduled")
		case 4, 5:
			if k, err := h.Keep(); err == nil {
				mu.Lock()
				kept = append(kept, k)
				mu.Unlock()
			}
			if what&4 != 0 {
				panic("with the packet kept")
			}
		case 6:
			if h.Context().ID() == 3 { // the one that may be stopped
				<-stuck
			}
		default:
			return echo(h)
		}
		return spin.Success
	}
	for id := range uint16(contexts) {
		r.share.Credit[id] = 24
		var b bpf.Range
		if id%2 == 1 {
			b = buckets
			b.Base = int(id) * 8
		}
		r.install(id, handler, b)
	}
	release := func(n int) {
		mu.Lock()
		defer mu.Unlock()
		for ; n > 0 && len(kept) > 0; n-- {
			go kept[0].Release()
			kept = kept[1:]
		}
	}
	count := uint64(0)
	for {
		op, ok := s.next()
		if !ok {
			break
		}
		arg, _ := s.next()
		q := r.kernel.queues[int(op>>7)%len(r.kernel.queues)]
		switch op & 15 {
		default: // a batch
			var ps []pkt
			for range 1 + op>>4&7 {
				b, _ := s.next()
				count++
				id := uint16(b) % contexts
				p := pkt{
					queue: q.id, hpu: int(arg) % 3, ctx: id, hash: uint32(b >> 4), segs: 1 + int(b>>2)%3,
					data: numbered(count<<8|uint64(b^arg), 60+int(b)),
					lose: b == 77,
				}
				if id%2 == 1 {
					p.bucket = &bpf.Range{Base: int(id) * 8, Size: 8}
				}
				ps = append(ps, p)
			}
			r.receive(ps...)
		case 8:
			release(int(arg % 8))
		case 9:
			r.with(func() { q.hold = true })
		case 10:
			r.with(func() { q.hold = false })
		case 11:
			r.with(func() { q.rings[arg%3].down = true })
		case 12:
			r.with(func() { q.rings[arg%3].down = false })
		case 13:
			_ = r.Transmit(numbered(0, 64))
		case 14:
			r.with(func() { q.refuse = arg&1 == 1 })
		case 15:
			time.Sleep(time.Duration(arg) * 10 * time.Microsecond)
			runtime.Gosched()
		}
	}
	close(stuck)
	for _, q := range r.kernel.queues {
		r.with(func() {
			q.hold, q.refuse = false, false
			for _, ring := range q.rings {
				ring.down = false
			}
		})
	}
	// Packets may still be kept by handlers that run only now.
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		for {
			release(100)
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
		}
	}()
	eventually(t, "lost packets have freed their buckets", func() bool {
		for i := range r.kernel.buckets {
			if atomic.LoadUint64(&r.kernel.buckets[i])>>32 != 0 {
				return false
			}
		}
		return true
	})
	r.settled()
	close(stop)
	wg.Wait()
}
