// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"sync/atomic"
	"time"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/internal/clock"
)

// account says whose credit a buffer has used: what returns when the buffer is
// on the fill ring again.
type account struct {
	ctx    uint16
	hpu    uint8
	paid   bool  // returned already, or never taken
	bucket int32 // of a message, whose use ends with this buffer; or noBucket
}

const (
	noBucket = -1

	// What records hold for frames that came from Config.Spare: those of
	// handlers, and the NIC's own.
	spareRecord = 1 << 63
	ownRecord   = spareRecord | 1
)

// pack makes a record of an account, for a frame on its way through a tx ring:
// its completion may be taken by another worker. Atomic, because what orders
// the two is the kernel.
func (a account) pack() uint64 {
	v := uint64(a.ctx)<<40 | uint64(a.hpu)<<32 | uint64(uint32(a.bucket))
	if a.paid {
		v |= 1 << 56
	}
	return v
}

func unpack(v uint64) account {
	return account{ctx: uint16(v >> 40), hpu: uint8(v >> 32), paid: v>>56&1 == 1, bucket: int32(uint32(v))}
}

// account of a packet of context c, nil for one that is gone, that came to a port.
func (p *port) account(c *Context, meta *bpf.Meta, late bool) account {
	a := account{ctx: meta.Context, hpu: uint8(p.hpu), paid: late, bucket: noBucket}
	if c != nil && c.buckets.Size > 0 {
		a.bucket = c.bucket(meta.Hash)
	}
	return a
}

func (h *HER) account() account { return h.origin().account(h.ctx, &h.meta, h.late) }

// due is what a worker has to give back to a queue.
type due struct {
	frames []uint64 // for the fill ring
	owed   []debt   // credits, when these are on it
}

type debt struct {
	account
	n uint32
}

// owe notes a credit that is due when the frames are on the fill ring. Runs of
// equal ones become one.
func (d *due) owe(a account) {
	if a.paid {
		return
	}
	if n := len(d.owed); n > 0 && d.owed[n-1].account == a {
		d.owed[n-1].n++
		return
	}
	d.owed = append(d.owed, debt{a, 1})
}

// pay returns the credits that are owed. Done goes last: whoever finds a context idle, to
// sweep it or to forget it, finds no use of a bucket that is still to be given back.
func (r *runner) pay(queue int) {
	q := r.pool.cfg.Queues[queue].Shared
	deq := &r.pool.cfg.Share.Dequeued[queue]
	due := &r.w.due[queue]
	for _, d := range due.owed {
		if d.bucket != noBucket {
			atomic.AddUint64(&r.pool.cfg.Buckets[d.bucket], -uint64(d.n)<<32)
		}
		atomic.AddUint32(&deq[d.hpu], d.n)
		atomic.AddUint32(&q.Done[d.ctx], d.n)
	}
	due.owed = due.owed[:0]
}

// exchange puts the frames that are due on the fill ring of a queue and takes
// what the kernel has sent, until neither is left; then it returns the credits.
func (r *runner) exchange(queue int) {
	q, due, done := &r.pool.cfg.Queues[queue], &r.w.due[queue], r.w.done
	for {
		filled, completed := q.Frames.Exchange(due.frames, done)
		due.frames = append(due.frames[:0], due.frames[filled:]...)
		if completed == 0 {
			break
		}
		r.pool.inTx[queue].Add(-int64(completed))
		for _, addr := range done[:completed] {
			frame := r.pool.cfg.Memory.Frame(addr)
			if frame >= len(r.pool.records) {
				continue // no frame of ours: nothing to give back
			}
			rec := r.pool.records[frame].Load()
			if rec&spareRecord != 0 {
				r.unspend(rec, addr)
				continue
			}
			due.frames = append(due.frames, addr)
			due.owe(unpack(rec))
		}
	}
	// The fill ring has room for every frame of the queue, see nic.Open. If it
	// refuses some nevertheless, its indices are corrupt: no credit until it
	// takes them, see tidy.
	if len(due.frames) == 0 {
		r.pay(queue)
	}
	if len(r.spare) > spareCache {
		r.returnSpare()
	}
}

// lost returns the credit of buffers that the program sent to a port and that
// never came: the kernel dropped them between the program and the ring.
func (r *runner) lost(p *port, ctx uint16, n uint32) {
	atomic.AddUint32(&p.shared.Done[ctx], n)
	atomic.AddUint32(p.dequeued, n)
	if c := r.pool.contexts[ctx].Load(); c != nil {
		r.books.of(r.pool, c).Lost += uint64(n)
		if c.buckets.Size > 0 {
			// Which messages they were of nobody knows.
			c.leaky.Store(true)
			r.pool.leaky.Store(true)
		}
	}
}

// A lossSuspicion is half of the proof that the last buffers of some contexts
// are lost: what the program had counted when the kernel's drop counters were
// seen to have grown. What has not come lossGrace later will not come.
type lossSuspicion struct {
	drops  uint64 // already accounted for
	seen   uint64
	since  int64 // ns; 0: no suspicion
	issued []uint32
}

// A frame reaches the ring, or is dropped, before the driver's poll that ran the
// program is over: a matter of microseconds, which a busy host may stretch. Too
// short would do no harm either: see her.late.
const lossGrace = int64(100 * time.Millisecond)

// checkLoss finds losses that no later packet reveals: of a port with buffers
// out, a few times a second.
func (r *runner) checkLoss(p *port) {
	s := &p.suspect
	seq := &p.shared.Seq[p.hpu]
	if s.since == 0 {
		st, err := p.ring.Stats()
		if err != nil {
			return
		}
		if drops := st.RxDropped + st.RxRingFull; drops != s.drops {
			s.seen, s.since = drops, clock.Monotonic()
			s.issued = s.issued[:0]
			for i := range seq {
				s.issued = append(s.issued, atomic.LoadUint32(&seq[i]))
			}
		}
		return
	}
	// The ring must have been empty since then, but need not be so now: other
	// packets may be keeping it busy.
	empty := p.emptied
	if p.ring.RxAvailable() == 0 {
		empty = clock.Monotonic()
	}
	if empty-s.since < lossGrace {
		return
	}
	for ctx, issued := range s.issued {
		if missing := int32(issued - p.expect[ctx]); missing > 0 {
			r.lost(p, uint16(ctx), uint32(missing))
			p.expect[ctx] = issued
		}
	}
	s.drops, s.since = s.seen, 0
	r.books.publish(r.pool)
}

// sweep frees the buckets that lost packets of the context hold. The context
// must be idle, and stay so, or nothing happens.
func (c *Context) sweep(p *Pool) bool {
	mine := p.cfg.Buckets[c.buckets.Base:][:c.buckets.Size]
	for i := range mine {
		// In this order. The program counts a packet as issued before it takes a use of the bucket, and it is
		// counted as done behind giving that back: so if a use of what was read is a packet's, the context is not idle.
		before := atomic.LoadUint64(&mine[i])
		open := uint64(0)
		if c.pins != nil {
			open = uint64(c.pins[i].Load())
		}
		if before>>32 <= open {
			continue
		}
		if !p.Idle(c) || !atomic.CompareAndSwapUint64(&mine[i], before, before&0xff|open<<32) {
			return false
		}
	}
	return true
}
