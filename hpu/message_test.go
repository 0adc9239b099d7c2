// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/spin"
)

// echoing is SLMP as FPsPIN has it: whoever asks (0x4000) gets the header back.
type echoing struct{}

func (echoing) Inspect(header []byte) (spin.AckRequest, bool) {
	h := header[len(header)-10:]
	a := spin.AckRequest{Flags: uint32(binary.BigEndian.Uint16(h)), ID: binary.BigEndian.Uint32(h[2:]), Offset: binary.BigEndian.Uint32(h[6:])}
	return a, a.Flags&0x2000 == 0
}

func (echoing) Answer(dst []byte, a spin.AckRequest, processed bool, _ *mpq.Entry) []byte {
	if a.Flags&0x4000 == 0 || !processed {
		return dst[:0]
	}
	dst = binary.BigEndian.AppendUint16(dst, 0x2000)
	dst = binary.BigEndian.AppendUint32(dst, a.ID)
	return binary.BigEndian.AppendUint32(dst, a.Offset)
}

// segment makes a packet of message id from a peer: n bytes of its content.
func segment(ctx uint16, id, peer, offset uint32, n int, eom bool) pkt {
	const syn = 0x4000
	b := make([]byte, 52+n)
	be := binary.BigEndian
	copy(b, []byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45})
	be.PutUint16(b[16:], uint16(38+n))
	b[22], b[23] = 64, 17
	be.PutUint32(b[26:], peer)
	be.PutUint32(b[30:], 0x0a000001)
	be.PutUint16(b[34:], 4000)
	be.PutUint16(b[36:], 9330)
	be.PutUint16(b[38:], uint16(18+n))
	flags := uint16(syn)
	if eom {
		flags |= 0x8000
	}
	be.PutUint16(b[42:], flags)
	be.PutUint32(b[44:], id)
	be.PutUint32(b[48:], offset)
	for i := range n {
		b[52+i] = content(id, int(offset)+i)
	}
	return pkt{ctx: ctx, data: b, key: [bpf.MaxKey]uint32{peer >> 16, peer << 16, 4000, id}, hash: id, offset: offset, eom: eom}
}

func content(id uint32, i int) byte { return byte(i) ^ byte(i>>8) ^ byte(id*7) }

// cut makes the packets of a message of size bytes, in order.
func cut(ctx uint16, id, peer uint32, size, n int) (all []pkt) {
	for off := 0; ; off += n {
		m := min(n, size-off)
		all = append(all, segment(ctx, id, peer, uint32(off), m, off+m == size))
		if off+m == size {
			return all
		}
	}
}

// acks returns the (id, offset) pairs that were acknowledged, in order, and checks
// the frames.
func (r *rig) acks() (got [][2]uint32) {
	r.t.Helper()
	for _, f := range r.wireFrames() {
		b := f.data
		if len(b) != 60 || b[23] != 17 || binary.BigEndian.Uint16(b[34:]) != 9330 || binary.BigEndian.Uint16(b[36:]) != 4000 {
			r.t.Fatalf("no acknowledgement was sent: % x", b)
		}
		if checksum(b[14:34]) != 0 {
			r.t.Errorf("IP checksum of an acknowledgement is wrong")
		}
		if c := udpSum(b[:34], b[34:52]); c.Value() != 0 || binary.BigEndian.Uint16(b[40:]) == 0 {
			r.t.Errorf("UDP checksum of an acknowledgement is wrong")
		}
		got = append(got, [2]uint32{binary.BigEndian.Uint32(b[44:]), binary.BigEndian.Uint32(b[48:])})
	}
	return got
}

var testBuckets = bpf.Range{Base: 64, Size: 64}

// receiveMessages installs a context with messages.
func (r *rig) receiveMessages(id uint16, h Handlers, change func(*MessageConfig)) *Context {
	r.t.Helper()
	cfg := MessageConfig{Format: matcher.FormatByName("slmp"), Protocol: echoing{}}
	if change != nil {
		change(&cfg)
	}
	b := testBuckets
	if cfg.Shared {
		b = bpf.Range{}
	}
	c, err := NewMessageContext(id, fmt.Sprintf("msg%d", id), h, b, math.MaxUint64, cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	if err := c.SetResources(r.resources); err != nil {
		r.t.Fatal(err)
	}
	if err := r.Install(c); err != nil {
		r.t.Fatal(err)
	}
	return c
}

// TestMessages sends messages whose packets come in any order and more than once,
// to all policies, and looks at what handlers saw.
func TestMessages(t *testing.T) {
	for _, shared := range []bool{false, true} {
		for _, workers := range []int{1, 2} {
			for seed := range uint64(8) {
				t.Run(fmt.Sprintf("shared=%v,workers=%d,seed=%d", shared, workers, seed), func(t *testing.T) {
					testMessages(t, shared, workers, seed%2 == 1, rand.New(rand.NewPCG(seed, 1)))
				})
			}
		}
	}
}

// With asking, half of the handlers go on when an application has answered, which does
// so in any order.
func testMessages(t *testing.T, shared bool, workers int, asking bool, rnd *rand.Rand) {
	const messages, hpus = 9, 4
	r := newRig(t, rigConfig{hpus: hpus, perQueue: 512, rxSize: 512, Config: Config{Workers: workers}})
	host := newFakeHost(t, workers, 1000)
	r.resources.Host = host
	over := make(chan struct{})
	defer close(over)
	go func() {
		for {
			select {
			case <-over:
				return
			case <-time.After(100 * time.Microsecond):
			}
			asked := host.take(0)
			for _, i := range rand.Perm(len(asked)) {
				host.answer(asked[i], 0, "")
			}
		}
	}()
	type seen struct {
		header, completion int
		bytes              []int
		running            int
		result             spin.Result
	}
	var mu sync.Mutex
	got := map[uint32]*seen{}
	of := func(m *Message) *seen {
		s := got[m.Number()]
		if s == nil {
			s = &seen{bytes: make([]int, 64<<10)}
			got[m.Number()] = s
		}
		return s
	}
	memory := map[uint32]Memory{}
	binder := &Receives{}
	events := make(chan spin.MessageEvent, messages)
	for id := range uint32(messages) {
		memory[id] = make(Memory, 64<<10)
		if err := binder.Post(spin.Receive{Binding: spin.Binding{Window: memory[id], Events: spin.EventChan(events), User: id}, Tag: id}); err != nil {
			t.Fatal(err)
		}
	}
	deposit := func(h *HER) spin.Code {
		mu.Lock()
		s := of(h.Message())
		if s.header != 1 || s.completion != 0 {
			t.Errorf("message %d: payload handler after %d header and %d completion handlers", h.Message().Number(), s.header, s.completion)
		}
		if s.running++; s.running > 1 && !shared {
			t.Errorf("message %d: two handlers at a time", h.Message().Number())
		}
		for i := range h.PayloadLen() {
			s.bytes[int(h.Offset())+i]++
		}
		mu.Unlock()
		if err := h.Deposit(); err != nil {
			t.Error(err)
		}
		mu.Lock()
		s.running--
		mu.Unlock()
		return spin.Success
	}
	payload := func(h *HER) spin.Code {
		if asking && h.Offset()/100%2 == 0 {
			if err := h.AskThen(0, nil, func(h *HER, _ *Reply) spin.Code { return deposit(h) }); err != nil {
				t.Error(err)
			}
			return spin.Success
		}
		return deposit(h)
	}
	completion := func(c *Completion) spin.Code {
		mu.Lock()
		defer mu.Unlock()
		s := of(c.Message())
		s.completion++
		s.result = c.Result
		if s.running != 0 {
			t.Errorf("message %d completes while %d handlers run", c.Message().Number(), s.running)
		}
		return spin.Success
	}
	c := r.receiveMessages(1, Handlers{
		Header: func(h *HER) spin.Code {
			mu.Lock()
			defer mu.Unlock()
			s := of(h.Message())
			if s.header++; s.header > 1 || s.completion > 0 || h.Offset() != 0 {
				t.Errorf("message %d: header handler number %d, offset %d", h.Message().Number(), s.header, h.Offset())
			}
			return spin.ProcessData
		},
		Payload: payload,
		Completion: func(c *Completion) spin.Code {
			if asking && c.Message().Number()%2 == 0 {
				if err := c.AskThen(0, nil, func(c *Completion, _ *Reply) spin.Code { return completion(c) }); err != nil {
					t.Error(err)
				}
				return spin.Success
			}
			return completion(c)
		},
	}, func(cfg *MessageConfig) {
		cfg.Shared = shared
		cfg.Binder = binder
		cfg.Held = 200
	})
	var all []pkt
	sizes, last := map[uint32]int{}, map[uint32]uint32{}
	for id := range uint32(messages) {
		size := rnd.IntN(12000)
		sizes[id] = size
		p := cut(1, id, 0x0a000002, size, 100+rnd.IntN(1200))
		last[id] = p[len(p)-1].offset
		if rnd.IntN(2) == 0 {
			rnd.Shuffle(len(p), func(i, j int) { p[i], p[j] = p[j], p[i] })
		}
		all = append(all, p...)
		all = append(all, p[rnd.IntN(len(p))])
	}
	if rnd.IntN(2) == 0 {
		rnd.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	}
	for i := range all {
		if shared {
			all[i].hpu = rnd.IntN(hpus)
		} else {
			all[i].hpu = int(all[i].hash) % hpus
			all[i].bucket = &testBuckets
		}
	}
	for len(all) > 0 {
		n := min(1+rnd.IntN(40), len(all))
		for i := range n {
			for r.receive(all[i]) == 0 {
				time.Sleep(100 * time.Microsecond)
			}
		}
		all = all[n:]
	}
	for range messages {
		select {
		case e := <-events:
			id := e.Number
			if e.Cause != spin.Complete || e.Length != uint64(sizes[id]) || e.Missing != 0 || e.User != id || e.Context != "msg1" || e.Source.String() != "10.0.0.2:4000" {
				t.Errorf("event of message %d of %d bytes: %+v", id, sizes[id], e)
			}
		case <-time.After(patience):
			t.Fatalf("an event is missing: %+v", c.Stats())
		}
	}
	// Each segment has its acknowledgement, EOM too.
	eventually(t, "EOM of all messages is acknowledged", func() bool {
		n := 0
		for id := range sizes {
			if slices.Contains(r.acks(), [2]uint32{id, last[id]}) {
				n++
			}
		}
		return n == messages
	})
	eventually(t, "no message is open", func() bool { st, _ := c.Messages(); return st.Open == 0 })
	if st, _ := c.Messages(); st.Open != 0 || st.Ended != messages || st.HeldNow != 0 {
		t.Errorf("%+v", st)
	}
	r.settled()
	mu.Lock()
	defer mu.Unlock()
	for id, size := range sizes {
		s := got[id]
		if s.header != 1 || s.completion != 1 || s.result.Length != uint64(size) {
			t.Errorf("message %d of %d bytes: %d headers, %d completions, %+v", id, size, s.header, s.completion, s.result)
		}
		for i, n := range s.bytes {
			if want := i < size; (n == 1) != want || n > 1 {
				t.Fatalf("message %d of %d bytes: byte %d was handled %d times", id, size, i, n)
			}
			if i < size && memory[id][i] != content(id, i) {
				t.Fatalf("message %d: byte %d is %#x", id, i, memory[id][i])
			}
		}
	}
}
