// SPDX-License-Identifier: Apache-2.0

package hpu

import "slices"

// job says what a HER of a batch is about.
type job uint8

const (
	packetJob  job = iota // a packet from a ring
	replayJob             // a packet that was held
	releaseJob            // a packet to be given back
	finishJob             // a packet that its payload handler had kept
	expireJob             // a message whose time is up
	notifyJob             // a message whose event waits
	contJob               // a continuation whose answer has come
	initJob               // the init handler
	timerJob              // the timer handler
	triggerJob            // a slice of a host message
)

// serveJobs runs HERs of packets that come from elsewhere than from a ring.
func (r *runner) serveJobs(jobs []*Kept) bool {
	for len(jobs) > 0 {
		p := r.portOf(jobs[0])
		r.begin(p)
		n := 0
		for len(jobs) > 0 && r.batch.count < batchSize && r.portOf(jobs[0]) == p && n+len(jobs[0].all) <= len(r.batch.descs) {
			k := jobs[0]
			jobs = jobs[1:]
			h := &r.batch.hers[r.batch.count]
			*h = her{first: n, last: n + len(k.all), meta: k.meta, late: k.account.paid, from: k.port, job: k.job, kept: k, msg: k.msg}
			if k.cont != nil {
				h.owner = k.cont.ctx
			}
			n += copy(r.batch.descs[n:], k.all)
			r.batch.count++
		}
		r.w.rest = jobs // the next runner's, should a handler not return
		if !r.run(0) || !r.settle() {
			return false
		}
	}
	r.w.rest = nil
	return true
}

// portOf returns where a packet is to be run: where it came, or on another HPU of
// its context's that the worker serves.
func (r *runner) portOf(k *Kept) *port {
	if c := r.pool.contexts[k.meta.Context].Load(); c != nil {
		if p := r.w.portFor(c, k.port); p != nil {
			return p
		}
	}
	return r.w.portFor(nil, k.port)
}

// serveOne runs a HER without a packet.
func (r *runner) serveOne(p *port, h her) bool {
	r.begin(p)
	r.batch.hers[0] = h
	r.batch.count = 1
	return r.run(0) && r.settle()
}

// portFor returns the worker's port for work of a context's (nil for any) that has
// to do with a port (nil for any): that one, or one on the same queue. It returns
// nil if the worker serves no HPU of the context.
func (w *worker) portFor(c *Context, like *port) *port {
	if like != nil && slices.Contains(w.ports, like) {
		return like
	}
	var found *port
	for _, p := range w.ports {
		if c != nil && c.hpus>>p.hpu&1 == 0 {
			continue
		}
		if like == nil || p.queue == like.queue {
			return p
		}
		if found == nil {
			found = p
		}
	}
	return found
}
