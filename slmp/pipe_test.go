// SPDX-License-Identifier: Apache-2.0

package slmp

import (
	"container/heap"
	"math/rand/v2"
	"testing"
)

// A pipe is a simulated path with one bottleneck and a receiver of the simplest
// kind at its end, in simulated time: what the windows are tried on. Protocol
// matters are tried elsewhere.
type pipe struct {
	perSegment int64   // ns that the bottleneck needs for one; 0: none
	queue      int     // segments that wait before it; more are dropped
	delay      int64   // ns, each way
	loss       float64 // each way
	late       float64 // segments that come later, by
	lateBy     int64
	wake       int64 // ns until a host that sleeps looks at what came
	plain      bool
	limit      int // messages that a receiver has open; it is silent about more. 0: none

	rng          *rand.Rand
	now          int64
	seq          int
	events       events
	busy         int64 // the bottleneck, until
	hosts        []*pipeHost
	dropped      int
	stalledUntil int64
}

// A pipeHost sends messages of the given length, one after the other or many at once.
type pipeHost struct {
	s        *Sender
	payload  int
	length   uint64
	parallel int
	opened   uint32
	limit    uint32 // messages
	finished int
	failed   []error
	bytes    uint64 // delivered, of all messages
	endedAt  int64
	timer    int64
	in       [][]byte // acknowledgements that wait for the host
	asleep   bool
	got      map[uint32]*pipeMessage
	open     int
	arrived  []Outbound
	awake    bool // the receiver's wake event is out
}

type pipeMessage struct {
	have  []bool
	end   int // contiguous
	total int // segments, 0: not known
	bytes uint64
	ended bool
}

type event struct {
	at   int64
	seq  int
	kind uint8
	host *pipeHost
	out  Outbound
	ack  []byte
}

const (
	arrives uint8 = iota
	processes
	answers
	wakes
	timesOut
)

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].seq < e[j].seq
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	o := *e
	x := o[len(o)-1]
	*e = o[:len(o)-1]
	return x
}

func newPipe(seed uint64) *pipe {
	return &pipe{rng: rand.New(rand.NewPCG(seed, 1)), now: 1000, queue: 1 << 30}
}

func (p *pipe) add(t testing.TB, c SenderConfig, length uint64, messages uint32, parallel int) *pipeHost {
	s, err := NewSender(c)
	if err != nil {
		t.Fatal(err)
	}
	h := &pipeHost{s: s, payload: c.Payload, length: length, limit: messages, parallel: parallel, got: map[uint32]*pipeMessage{}}
	p.hosts = append(p.hosts, h)
	return h
}

func (p *pipe) at(t int64, e event) {
	p.seq++
	e.at, e.seq = t, p.seq
	heap.Push(&p.events, e)
}

// run until all messages are over, or until the given time.
func (p *pipe) run(until int64) {
	for _, h := range p.hosts {
		p.drive(h)
	}
	for len(p.events) > 0 && p.events[0].at <= until {
		e := heap.Pop(&p.events).(event)
		p.now = e.at
		h := e.host
		switch e.kind {
		case arrives:
			h.arrived = append(h.arrived, e.out)
			if !h.awake {
				h.awake = true
				p.at(p.now+p.wake, event{kind: processes, host: h})
			}
		case processes:
			h.awake = false
			for _, o := range h.arrived {
				if ack := h.receive(o, p); ack != nil && p.rng.Float64() >= p.loss {
					p.at(p.now+p.delay, event{kind: answers, host: h, ack: ack})
				}
			}
			h.arrived = h.arrived[:0]
		case answers:
			h.in = append(h.in, e.ack)
			if !h.asleep {
				h.asleep = true
				p.at(p.now+p.wake, event{kind: wakes, host: h})
			}
		case wakes:
			h.asleep = false
			for _, b := range h.in {
				_ = h.s.Acknowledge(b, p.now)
			}
			h.in = h.in[:0]
			p.drive(h)
		case timesOut:
			if h.timer == p.now {
				h.timer = 0
				p.drive(h)
			}
		}
	}
	p.now = max(p.now, 0)
}

// drive does what a driver does.
func (p *pipe) drive(h *pipeHost) {
	for h.opened < h.limit && int(h.opened)-h.finished-len(h.failed) < h.parallel {
		o, err := h.s.Open(h.opened)
		if err != nil {
			panic(err)
		}
		h.opened++
		o.Supply(h.length, true)
	}
	var dst [44]Outbound
	for {
		n := h.s.Next(dst[:], p.now)
		if n == 0 {
			break
		}
		for _, o := range dst[:n] {
			o.Message = nil
			p.send(h, o)
		}
	}
	over := false
	for o := h.s.Finished(); o != nil; o = h.s.Finished() {
		if o.Err() != nil {
			h.failed = append(h.failed, o.Err())
		} else {
			h.finished++
		}
		h.endedAt = p.now
		h.s.Recycle(o)
		over = true
	}
	if over && h.opened < h.limit {
		p.drive(h)
		return
	}
	if t := h.s.Deadline(); t != 0 && (h.timer == 0 || t < h.timer) {
		h.timer = max(t, p.now+1)
		p.at(h.timer, event{kind: timesOut, host: h})
	}
}

// send puts a segment on the path.
func (p *pipe) send(h *pipeHost, o Outbound) {
	if p.rng.Float64() < p.loss {
		p.dropped++
		return
	}
	t := p.now
	if p.perSegment > 0 {
		if p.busy-p.now > int64(p.queue)*p.perSegment {
			p.dropped++
			return
		}
		p.busy = max(p.busy, p.now) + p.perSegment
		t = p.busy
	}
	if p.late > 0 && p.rng.Float64() < p.late {
		t += p.lateBy
	}
	p.at(max(t+p.delay, p.stalledUntil), event{kind: arrives, host: h, out: o})
}

// receive is the receiver: it acknowledges what asks for it.
func (h *pipeHost) receive(o Outbound, p *pipe) []byte {
	m := h.got[o.Header.ID]
	if m == nil {
		if p.limit > 0 && h.open >= p.limit {
			return nil
		}
		h.open++
		m = &pipeMessage{}
		h.got[o.Header.ID] = m
	}
	k := int(o.Header.Offset) / h.payload
	for len(m.have) <= k {
		m.have = append(m.have, false)
	}
	if !m.have[k] {
		m.have[k] = true
		m.bytes += uint64(o.Len)
		h.bytes += uint64(o.Len)
	}
	if o.Header.Flags&EOM != 0 {
		m.total = k + 1
	}
	for m.end < len(m.have) && m.have[m.end] {
		m.end++
	}
	if m.total > 0 && m.end == m.total && !m.ended {
		m.ended = true
		h.open--
	}
	if o.Header.Flags&SYN == 0 {
		return nil
	}
	wait := o.Header.Flags&EOM != 0 && m.end != m.total
	a := Ack{ID: o.Header.ID, Offset: o.Header.Offset}
	if o.Header.Flags&Cumulative == 0 || p.plain {
		if wait {
			return nil
		}
		return a.Append(nil)
	}
	a.Cumulative, a.Wait = true, wait
	end := uint64(m.end) * uint64(h.payload)
	if m.total > 0 && m.end == m.total {
		end = m.bytes
	}
	a.End = uint32(min(end, EndMax))
	for w := 0; w < MaxWords && m.end+1+64*w < len(m.have); w++ {
		var x uint64
		for i := range 64 {
			if k := m.end + 1 + 64*w + i; k < len(m.have) && m.have[k] {
				x |= 1 << i
			}
		}
		a.Bitmap = append(a.Bitmap, x)
	}
	return a.Append(nil)
}

// stall keeps the receivers from doing anything for so long; what comes waits.
func (p *pipe) stall(ns int64) {
	for i := range p.events {
		if e := &p.events[i]; e.kind == arrives || e.kind == processes {
			e.at = max(e.at, p.now+ns)
		}
	}
	heap.Init(&p.events)
	p.stalledUntil = p.now + ns
}
