// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/spin"
	"github.com/xspin/xspin/xsk"
)

// A batch is what a runner works at: packets from a ring, or other HERs. Should it be
// abandoned in one of them, the next runner continues with a copy.
type batch struct {
	port  *port
	base  int64 // when it began, the pool's time
	start int64 // ticks, then

	// What was received, cut into packets. Nobody changes it while handlers run, but
	// for the buffers of the handler's own packet.
	descs [batchSize + chainSize]xsk.Desc
	hers  [batchSize + chainSize]her
	count int // of hers

	// Written before and after handlers, each entry once, so that the next runner may
	// read those of the handlers before this one.
	results [batchSize + chainSize]result
	marks   [batchSize + chainSize]int // frames made before handler k
	sends   [spareCache]xsk.Desc       // frames made by handlers

	// Of its runner only.
	made     int              // of sends
	unsummed [spareCache]bool // sends whose checksum is computed when the handler has returned
	room     int              // left on the tx ring of the port
	waited   int64            // for room for requests, by handlers, ticks
}

// her is a packet of a batch.
type her struct {
	first, last int // batch.descs[first:last]; none if it is without a packet
	meta        bpf.Meta
	late        bool // credit was returned already: it had been taken for lost

	job   job
	from  *port // with a packet that is not from the batch's port
	kept  *Kept // what it was, if it was held or kept
	msg   *Message
	cause spin.Cause

	trig   *triggered // with triggerJob
	errand *errand    // that somebody waits for; Optional
	owner  *Context   // of what has no packet
}

// result is what a handler wants done with its packet.
type result struct {
	action action
	segs   int // buffers to send, of those that came
	sends  int // frames it made are batch.sends[mark:sends]
}

// from makes the batch what another runner leaves that was abandoned in HER k. That one's
// buffers are no business of ours, and may change.
func (b *batch) from(old *batch, k int) {
	b.count = old.count
	b.hers = old.hers
	given := &b.hers[k]
	copy(b.descs[:given.first], old.descs[:given.first])
	copy(b.descs[given.last:], old.descs[given.last:])
	copy(b.results[:k], old.results[:k])
	copy(b.marks[:k+1], old.marks[:k+1])
	b.made = b.marks[k]
	copy(b.sends[:b.made], old.sends[:b.made])
	b.results[k] = result{action: giveUp, sends: b.made}
	// What the handlers before have reserved comes off the room.
	b.room -= b.made
	for _, res := range b.results[:k] {
		if res.action == send {
			b.room -= res.segs
		}
	}
}

// reserve takes room for n descriptors on the tx ring of the port. Nobody else sends
// there during the batch, so what is reserved can be sent.
func (b *batch) reserve(n int) bool {
	if b.room < n {
		return false
	}
	b.room -= n
	return true
}

// add notes a frame that a handler makes.
func (b *batch) add(d xsk.Desc) {
	b.sends[b.made] = d
	b.unsummed[b.made] = false
	b.made++
}

// begin begins a batch of a port's.
func (r *runner) begin(p *port) {
	b := &r.batch
	b.port = p
	b.base, b.start = r.pool.now(), r.pool.scale.Ticks()
	b.count, b.made, b.waited = 0, 0, 0
	// Now, and not when a handler asks: that one may have been given up, and
	// the ring be another runner's.
	b.room = p.ring.TxFree()
	if r.pool.cfg.Egress == RoundRobin && r.ownPort(p) && r.w.hasWork.Load() {
		b.room /= 2
	}
	b.room = min(b.room, cap(r.w.txq))
}

// take receives descriptors and cuts them into packets.
func (r *runner) take() {
	b := &r.batch
	p := b.port
	copy(b.descs[:], p.tail[:p.carry])
	n := p.ring.Receive(b.descs[p.carry : p.carry+batchSize])
	if n < batchSize {
		p.emptied = b.base
	}
	n += p.carry
	r.touch(b.descs[p.carry:n])
	i := 0
	for i < n {
		j := i
		for j < n && b.descs[j].Options&xsk.Continued != 0 {
			j++
		}
		if j == n {
			break // the rest of the frame is still to come
		}
		h := &b.hers[b.count]
		h.first, h.last = i, j+1
		i = j + 1
		h.job, h.from, h.kept, h.msg, h.errand, h.owner = packetJob, nil, nil, nil, nil, nil
		if r.inspect(p, h) {
			b.count++
		}
	}
	p.carry = n - i
	if p.carry >= chainSize {
		// The program passes on what is as long as this: not one of ours.
		r.discard(p, b.descs[i:n])
		p.carry = 0
	}
	copy(p.tail[:], b.descs[i:i+p.carry])
}

// touch reads a byte of the metadata of each buffer. Another CPU has just written that,
// so the first read of it waits for the cache line. In a loop as short as this the
// processor waits for many of them at once; in that of take only for one or two, and how
// many hangs on a single instruction more in it.
func (r *runner) touch(descs []xsk.Desc) {
	mem, sum := r.pool.cfg.Memory, byte(0)
	for i := range descs {
		if front := mem.Front(descs[i].Addr, bpf.MetaSize); front != nil {
			sum += front[0]
		}
	}
	r.touched = sum
}

// discard gives buffers back that no credit was taken for.
func (r *runner) discard(p *port, descs []xsk.Desc) {
	due := &r.w.due[p.queue]
	for _, d := range descs {
		due.frames = append(due.frames, d.Addr)
	}
	r.exchange(p.queue)
}

// inspect reads the metadata of a packet. It returns false, and gives the
// packet's buffers back, if it did not come through the ingress program.
func (r *runner) inspect(p *port, h *her) bool {
	mem := r.pool.cfg.Memory
	front := mem.Front(r.batch.descs[h.first].Addr, bpf.MetaSize)
	for _, d := range r.batch.descs[h.first:h.last] {
		if mem.Bytes(d.Addr, int(d.Len)) == nil {
			front = nil // not in any frame: what the kernel says is checked once, here
		}
	}
	if front == nil {
		r.discard(p, r.batch.descs[h.first:h.last])
		return false
	}
	h.meta = *bpf.MetaOf(front)
	if h.meta.Magic != bpf.MetaMagic || int(h.meta.Context) >= bpf.MaxContexts {
		r.discard(p, r.batch.descs[h.first:h.last])
		return false
	}
	n := uint32(h.last - h.first)
	expect := &p.expect[h.meta.Context]
	gap := int32(h.meta.Seq - *expect)
	h.late = gap < 0
	if gap > 0 {
		r.lost(p, h.meta.Context, uint32(gap))
	}
	if gap >= 0 {
		*expect = h.meta.Seq + n
	}
	return true
}
