// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"slices"

	"github.com/xspin/xspin/internal/clock"
	"github.com/xspin/xspin/xsk"
)

// takeSpare takes a frame for a handler that sends a new one.
func (r *runner) takeSpare() (uint64, bool) {
	if r.batch.made == len(r.batch.sends) {
		return 0, false
	}
	if len(r.spare) == 0 {
		r.pool.mu.Lock()
		n := min(len(r.pool.spare), spareCache/2)
		r.spare = append(r.spare, r.pool.spare[len(r.pool.spare)-n:]...)
		r.pool.spare = r.pool.spare[:len(r.pool.spare)-n]
		r.pool.mu.Unlock()
	}
	n := len(r.spare)
	if n == 0 {
		return 0, false
	}
	addr := r.spare[n-1]
	r.spare = r.spare[:n-1]
	return addr, true
}

// unspend takes back a spare frame that has left, or could not.
func (r *runner) unspend(rec, addr uint64) {
	if rec == ownRecord {
		r.pool.ownOut.Add(-1)
	}
	r.spare = append(r.spare, addr)
}

// unsend takes back frames that a handler made before it failed.
func (r *runner) unsend(mark int) {
	for _, d := range r.batch.sends[mark:r.batch.made] {
		r.spare = append(r.spare, d.Addr)
		r.batch.room++
	}
	r.batch.made = mark
}

// transmit sends what is in txq.
func (r *runner) transmit(p *port) {
	txq := r.w.txq
	if len(txq) == 0 {
		return
	}
	n := p.ring.Send(txq)
	r.pool.inTx[p.queue].Add(int64(n))
	for _, d := range txq[n:] { // cannot be: see reserve
		r.drop(p.queue, d)
	}
	r.w.txq = txq[:0]
	r.kick(p)
}

// drop recycles a frame that was to be sent.
func (r *runner) drop(queue int, d xsk.Desc) {
	rec := r.pool.records[r.pool.cfg.Memory.Frame(d.Addr)].Load()
	if rec&spareRecord != 0 {
		r.unspend(rec, d.Addr)
		return
	}
	due := &r.w.due[queue]
	due.frames = append(due.frames, d.Addr)
	due.owe(unpack(rec))
}

// kick has the kernel send what is on the port's tx ring. If it cannot take all
// of it now, tidy tries again.
func (r *runner) kick(p *port) {
	p.unsent, p.kicked = true, clock.Monotonic()
	free := -1
	for range kicks {
		pending, err := p.ring.Kick()
		if err != nil {
			return // link down: the frames stay on the ring until it is up
		}
		if !pending {
			p.unsent = false
			return
		}
		r.exchange(p.queue) // the completion ring may be what is full
		was := free
		if free = p.ring.TxFree(); free == was {
			return // the device takes no more
		}
	}
}

// ownPort tells whether the NIC's own frames leave by this port.
func (r *runner) ownPort(p *port) bool { return r.w.id == 0 && p == r.w.ports[0] }

// takeOwn takes up to n of the NIC's own frames.
func (r *runner) takeOwn(n int) []xsk.Desc {
	r.pool.mu.Lock()
	defer r.pool.mu.Unlock()
	n = min(n, len(r.pool.own))
	own := slices.Clone(r.pool.own[:n])
	r.pool.own = append(r.pool.own[:0], r.pool.own[n:]...)
	for _, d := range own {
		r.pool.records[r.pool.cfg.Memory.Frame(d.Addr)].Store(ownRecord)
	}
	return own
}

// interleave puts the NIC's own frames between those in txq, one by one.
func (r *runner) interleave(p *port) {
	if !r.w.hasWork.Load() {
		return
	}
	txq := r.w.txq
	own := r.takeOwn(min(len(txq), p.ring.TxFree()-len(txq)))
	if len(own) == 0 {
		return
	}
	mixed := make([]xsk.Desc, 0, cap(txq))
	i := 0
	for _, d := range txq {
		mixed = append(mixed, d)
		if d.Options&xsk.Continued == 0 && i < len(own) {
			mixed = append(mixed, own[i])
			i++
		}
	}
	r.w.txq = append(mixed, own[i:]...)
}

// housework takes back packets that were kept, and sends the NIC's own frames. It
// returns true if there was something to do.
func (r *runner) housework() (worked bool) {
	r.pool.mu.Lock()
	kept := r.w.returned
	r.w.returned = nil
	r.w.chores = append(r.w.chores, r.w.errands...)
	r.w.errands = nil
	r.w.hasWork.Store(r.w.id == 0 && len(r.pool.own) > 0)
	r.pool.mu.Unlock()
	if len(kept) > 0 {
		worked = true
		r.w.jobs = append(r.w.jobs, kept...)
	}
	if r.w.id != 0 {
		return worked
	}
	p := r.w.ports[0]
	// Room for a batch stays free: frames that wait for a slow link must not
	// make handlers wait too.
	room := max(p.ring.TxFree()-r.w.aside, 0)
	if own := r.takeOwn(min(room, cap(r.w.txq))); len(own) > 0 {
		worked = true
		r.w.txq = append(r.w.txq, own...)
		r.transmit(p)
		r.exchange(p.queue)
	}
	return worked
}
