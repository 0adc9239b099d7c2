// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/spin"
)

// FuzzMessages plays schedules of packets, kernels and handlers. What must hold at
// any time is the fake kernel's rules, see step and watchCredit, and the order of
// handlers; in the end nothing may be left.
func FuzzMessages(f *testing.F) {
	rnd := rand.New(rand.NewPCG(3, 4))
	for range 60 {
		script := make([]byte, 200+rnd.IntN(600))
		for i := range script {
			script[i] = byte(rnd.Uint32())
		}
		f.Add(script)
	}
	f.Fuzz(playMessages)
}

// messageLife is what a test knows of a message.
type messageLife struct {
	headers, completions, running int
	payload                       [8]int
	failed                        bool
}

func playMessages(t *testing.T, script []byte) {
	if len(script) < 8 || len(script) > 1000 {
		return
	}
	s := &bytesOf{script}
	conf, _ := s.next()
	more, _ := s.next()
	r := newRig(t, rigConfig{
		queues: 1 + int(conf&1), hpus: 3, perQueue: 96, spare: 24, rxSize: 96, txSize: 16,
		Config: Config{
			Workers: 1 + int(conf>>1&1),
			Wait:    Wait(conf >> 2 & 1), // Adaptive or Sleep
			Limit:   2 * time.Millisecond,
			Logger:  slog.New(slog.NewTextHandler(io.Discard, nil)),
		},
	})
	const contexts, numbers, segments, size = 3, 6, 8, 50
	var (
		mu     sync.Mutex
		lives  [contexts + 1][numbers]messageLife
		kept   []*Kept
		stuck  = make(chan struct{})
		rolled atomic.Uint32
		all    [contexts + 1]*Context
	)
	events := make(chan spin.MessageEvent, 1+more&3)
	roll := func() byte { return byte(rolled.Add(1) * 0x9e3779b1 >> 20) }
	life := func(m *Message) *messageLife { return &lives[m.ctx.id][m.Number()] }
	keep := func(h *HER) {
		if k, err := h.Keep(); err == nil {
			mu.Lock()
			kept = append(kept, k)
			mu.Unlock()
		}
	}
	// act does what a byte says, and returns what to return.
	act := func(h *HER, what byte) spin.Code {
		switch what & 31 {
		case 0, 1:
			return spin.Drop
		case 2:
			return spin.Fail
		case 3:
			if _, err := h.SendNew(30); err == nil {
				_ = h.Send()
			}
			panic("scheduled")
		case 4, 5, 6:
			keep(h)
		case 7:
			if k, err := h.Keep(); err == nil {
				go k.Release()
			}
		case 8:
			_ = h.Send()
		case 9:
			if b, err := h.SendNew(64); err == nil {
				clear(b)
			}
		case 10:
			if h.ctx.id == contexts {
				<-stuck
			}
		case 11:
			keep(h)
			return spin.Fail
		case 12:
			time.Sleep(time.Duration(what>>5) * 100 * time.Microsecond)
		}
		return spin.Success
	}
	failed := func(m *Message, c spin.Code) spin.Code {
		if c == spin.Fail {
			mu.Lock()
			life(m).failed = true
			mu.Unlock()
		}
		return c
	}
	enter := func(m *Message) (leave func()) {
		mu.Lock()
		l := life(m)
		l.running++
		if l.running > 1 && !m.ctx.msgs.cfg.Shared {
			t.Errorf("context %d, message %d: %d handlers at a time", m.ctx.id, m.Number(), l.running)
		}
		mu.Unlock()
		return func() {
			mu.Lock()
			l.running--
			mu.Unlock()
		}
	}
	handlers := Handlers{
		Header: func(h *HER) spin.Code {
			defer enter(h.Message())()
			mu.Lock()
			l := life(h.Message())
			if l.headers++; l.headers > 1 || l.payload != [8]int{} || l.completions > 0 {
				t.Errorf("context %d: header of message %d: %+v", h.ctx.id, h.Message().Number(), *l)
			}
			mu.Unlock()
			b := h.Head()[53]
			if b&0xe0 == 0 {
				return spin.Proceed
			}
			return failed(h.Message(), act(h, b))
		},
		Payload: func(h *HER) spin.Code {
			defer enter(h.Message())()
			mu.Lock()
			l := life(h.Message())
			p := &l.payload[h.Offset()/size]
			if *p++; *p > 1 || l.headers != 1 || l.completions > 0 || l.failed && !h.Message().ctx.msgs.cfg.Shared {
				t.Errorf("context %d: payload of message %d at %d: %+v", h.ctx.id, h.Message().Number(), h.Offset(), *l)
			}
			mu.Unlock()
			_, _ = h.Message().Length()
			return failed(h.Message(), act(h, h.Head()[52]))
		},
		Completion: func(c *Completion) spin.Code {
			defer enter(c.Message())()
			mu.Lock()
			l := life(c.Message())
			if l.completions++; l.completions > 1 || l.headers != 1 || l.running > 1 {
				t.Errorf("context %d: completion of message %d: %+v: %+v", c.ctx.id, c.Message().Number(), *l, c.Result)
			}
			mu.Unlock()
			switch roll() & 15 {
			case 0:
				return failed(c.Message(), spin.Fail)
			case 1:
				if _, err := c.SendNew(40); err == nil {
					panic("scheduled")
				}
			case 2:
				if c.ctx.id == contexts {
					<-stuck
				}
			}
			return spin.Success
		},
	}
	for id := uint16(1); id <= contexts; id++ {
		r.share.Credit[id] = 32
		cfg := MessageConfig{
			Format: matcher.FormatByName("slmp"), Protocol: echoing{}, State: 4,
			Shared: more>>(id+1)&1 == 0,
			Config: mpq.Config{
				Messages: 4, Held: 6, Remember: time.Minute,
				Timeout: []time.Duration{time.Minute, 3 * time.Millisecond}[more>>5&1],
				Linger:  time.Millisecond, Incomplete: mpq.Incomplete(more >> 6 % 3),
			},
		}
		cfg.Binder = &funcBinder{b: spin.Binding{Window: make(Memory, segments*size-10), Events: spin.EventChan(events)}, bind: func(*Message) error {
			if roll()&7 == 0 {
				return errors.New("refused")
			}
			return nil
		}}
		var b bpf.Range
		if !cfg.Shared {
			b = bpf.Range{Base: int(id) * 8, Size: 8}
		}
		c, err := NewMessageContext(id, "fuzzed", handlers, b, 0b111, cfg)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Install(c); err != nil {
			t.Fatal(err)
		}
		all[id] = c
	}
	release := func(n int) {
		mu.Lock()
		defer mu.Unlock()
		for ; n > 0 && len(kept) > 0; n-- {
			go kept[0].Release()
			kept = kept[1:]
		}
	}
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
				what, _ := s.next()
				id := 1 + uint16(b)%contexts
				num, seg := uint32(b/contexts)%numbers, uint32(what^arg)%segments
				p := segment(id, num, peerA, seg*size, size, seg == segments-1)
				p.data[52], p.data[53] = what, what^b
				p.queue, p.hpu, p.segs, p.lose = q.id, int(arg)%3, 1, b == 77
				if what&0xc0 == 0 {
					p.segs = 2
				}
				if c := all[id]; c.buckets.Size > 0 {
					p.bucket = &c.buckets
				}
				ps = append(ps, p)
			}
			r.receive(ps...)
		case 7, 8:
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
			for range arg % 4 {
				select {
				case <-events:
				default:
				}
			}
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
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { // packets may be kept by handlers that run only now
		for {
			release(100)
			select {
			case <-stop:
				return
			case <-events:
			case <-time.After(time.Millisecond):
			}
		}
	})
	eventually(t, "no handler is stuck", func() bool { return r.Stuck() == 0 })
	for id := uint16(1); id <= contexts; id++ {
		c := all[id]
		if err := r.Drain(c, patience); err != nil {
			t.Error(err)
		}
		if st, _ := c.Messages(); !c.Stopped() && (st.Open != 0 || st.HeldNow != 0) {
			t.Errorf("context %d: %+v", id, st)
		}
	}
	r.settled()
	close(stop)
	wg.Wait()
	mu.Lock()
	defer mu.Unlock()
	for _, fr := range r.wireFrames() {
		b := fr.data
		if len(b) != 60 || binary.BigEndian.Uint16(b[34:]) != 9330 {
			continue // of a handler
		}
		if c := udpSum(b[:34], b[34:52]); c.Value() != 0 {
			t.Errorf("an acknowledgement with a wrong checksum")
		}
	}
}
