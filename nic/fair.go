// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"math"
	"math/bits"
	"slices"
	"sync/atomic"
	"time"
)

// Fair sharing of HPU time.
//
// Rings are first come, first served, and contexts share them. So what a context gets
// of the HPUs' time is its part of the work that is queued; and the queue of one that
// brings more than can be done is as long as its credit allows. With equal credits, who
// has the slowest handlers gets the most. While contexts compete, their credits are
// therefore lowered such that
//
//	credit * handler time of a buffer / weight
//
// is the same for all of them. That is not all of it, because a worker takes batches
// from its rings in turn, and contexts may be on different ones: so what contexts
// then get is looked at, and who gets more than others has its credit lowered further.
//
// This costs packets nothing: the program reads credits anyway, and handler time is
// accounted anyway. Nobody gets more than deal gave. There are bounds: nobody gets
// less than floor, so a context whose handlers take a thousand times as long as
// another's has the larger part still; and what handlers wait for by AskThen or Keep
// counts as if it were queued.

const (
	fairTick = 10 * time.Millisecond  // between two looks, while somebody has a queue
	fairIdle = 100 * time.Millisecond // and while nobody has
	fairHold = time.Second            // a context that has competed does so for this long
	fairMean = 100 * time.Millisecond // over which loads are averaged

	saturated = 0.85 // of the time of a worker
	maxBias   = 64
)

// load is what is known of a context's use of the HPUs.
type load struct {
	handlers time.Duration // in handlers, in all, at the last look
	done     uint32        // buffers come back, in all, at the last look

	// Of late: what is long ago counts less.
	time    float64 // ns in handlers
	buffers float64 // that it was for
	use     float64 // HPUs that the handlers kept busy
	queued  float64 // part of the time that it had a queue

	bias    float64   // by how much its credit is lowered beyond what handler times say; 0: it does not compete
	until   time.Time // it competes, because it had a queue
	over    time.Time // it had more in flight than its credit by now is
	lowered bool      // its credit is less than it was given, by fair
}

// each returns what a buffer costs, in ns of handler time, 0 if that is not known.
func (l *load) each() float64 {
	if l.buffers == 0 {
		return 0
	}
	return l.time / l.buffers
}

// fairness is what the loop keeps of the NIC.
type fairness struct {
	looked time.Time
	busy   []time.Duration // by worker, at the last look
	part   []float64       // of its time of late that a worker was busy
	until  []time.Time     // by worker: saturated
	step   time.Time       // when biases change next
}

// stir has the loop look at contexts that have come or gone.
func (n *NIC) stir() {
	select {
	case n.stirred <- struct{}{}:
	default:
	}
}

// fair shares out HPU time until the NIC is closed, and credit that comes back late.
// With less than two contexts, which have what is due to them, it sleeps.
func (n *NIC) fair() {
	f := &fairness{
		busy:  make([]time.Duration, n.cfg.Workers),
		part:  make([]float64, n.cfg.Workers),
		until: make([]time.Time, n.cfg.Workers),
	}
	timer := time.NewTimer(fairIdle)
	defer timer.Stop()
	for {
		select {
		case <-n.done:
			return
		case <-n.stirred:
		case <-timer.C:
		}
		if d := n.look(f, time.Now()); d > 0 {
			timer.Reset(d)
		}
	}
}

// look measures and sets credits. It returns when to do so again, 0 for when there
// are other contexts.
func (n *NIC) look(f *fairness, now time.Time) time.Duration {
	if !n.mu.TryLock() { // credits may be changing: not worth waiting for
		return fairTick
	}
	defer n.mu.Unlock()
	if n.closed {
		return 0
	}
	if n.short {
		n.deal()
		n.patience = min(2*n.patience, fairIdle)
	}
	passed := now.Sub(f.looked)
	f.looked = now
	f.work(n, passed, now)
	active, queued := 0, false
	for id, c := range n.contexts {
		if len(c.rules.slots) == 0 || !c.spec.credited() {
			continue
		}
		active++
		credit := atomic.LoadUint32(&n.ingress.Share().Credit[id])
		out := n.inFlight(c)
		if out > int(credit) {
			c.load.over = now
		}
		full := !c.tier.Stopped() && 2*out >= int(credit)
		if full {
			queued = true
			c.load.until = now.Add(fairHold)
		}
		c.measure(passed, full)
	}
	n.shareOut(f, now)
	again := fairIdle
	if active < 2 {
		again = 0
	} else if queued {
		again = fairTick
	}
	if n.short && (again == 0 || n.patience < again) {
		return n.patience
	}
	return again
}

// work measures how busy the workers are.
func (f *fairness) work(n *NIC, passed time.Duration, now time.Time) {
	hpus, _ := n.pool.Stats()
	busy := make([]time.Duration, len(f.busy))
	for h, s := range hpus {
		busy[n.workerOf(h)] += s.Busy
	}
	w := weight(passed)
	for i, b := range busy {
		f.part[i] += w * (float64(b-f.busy[i])/float64(passed) - f.part[i])
		f.busy[i] = b
		if f.part[i] >= saturated {
			f.until[i] = now.Add(fairHold)
		}
	}
}

// weight of the last so much time in an average.
func weight(d time.Duration) float64 { return float64(d) / float64(d+fairMean) }

// workerOf returns which worker serves an HPU.
func (n *NIC) workerOf(h int) int { return h % n.cfg.Workers }

// measure takes in what the context's handlers did since the last look, and whether
// there is a queue for them.
func (c *Context) measure(passed time.Duration, queued bool) {
	l, w := &c.load, weight(passed)
	handlers, done := c.tier.hpuTime(), uint32(0)
	for q := range c.n.queues {
		done += atomic.LoadUint32(&c.n.ingress.Queue(q).Done[c.id])
	}
	l.use += w * (float64(handlers-l.handlers)/float64(passed) - l.use)
	if n := done - l.done; n > 0 { // else what is known stays as good as it was
		l.time = (1-w)*l.time + float64(handlers-l.handlers)
		l.buffers = (1-w)*l.buffers + float64(n)
		l.done = done
	} else {
		l.time += float64(handlers - l.handlers)
	}
	l.handlers = handlers
	l.queued *= 1 - w
	if queued {
		l.queued += w
	}
}

// A rival is a context that competes for HPUs.
type rival struct {
	c       *Context
	workers uint64
	cost    float64 // of a unit of credit, by weight
	floor   float64 // least credit
}

// shareOut sets the credits of all contexts.
func (n *NIC) shareOut(f *fairness, now time.Time) {
	full := uint64(0)
	for w, until := range f.until {
		if now.Before(until) {
			full |= 1 << w
		}
	}
	var rivals []rival
	for _, c := range n.contexts {
		if !now.Before(c.load.until) || c.load.each() == 0 || c.tier.Stopped() || n.unfair {
			n.setCredit(c, c.credit.granted)
			c.load.bias = 0
			continue
		}
		if c.load.bias == 0 {
			c.load.bias, c.load.over = 1, now
		}
		r := rival{c: c, cost: c.load.each() * c.load.bias / float64(c.spec.Share)}
		for h := range n.cfg.HPUs {
			if c.spec.CoreMask>>h&1 != 0 {
				r.workers |= 1 << n.workerOf(h)
			}
		}
		// Some packets, of whatever size, for each worker, or those that have
		// nothing else to do would wait for them.
		least := max(minCredit, 2*bits.OnesCount64(r.workers), 2*n.frameBuffers())
		r.floor = float64(min(uint32(least), c.credit.granted))
		rivals = append(rivals, r)
	}
	step := !now.Before(f.step)
	if step {
		f.step = now.Add(2 * fairMean)
	}
	for len(rivals) > 0 {
		var group []rival
		group, rivals = split(rivals)
		share := math.Inf(1)
		shared := uint64(0)
		for _, r := range group {
			share = min(share, r.cost*float64(r.c.credit.granted))
			shared |= r.workers
		}
		if len(group) < 2 || shared&full == 0 {
			share = math.Inf(1)
		}
		// A context with very little credit does not bring all others down to
		// where floors decide.
		for _, r := range group {
			share = max(share, r.cost*r.floor)
		}
		for _, r := range group {
			n.setCredit(r.c, uint32(min(max(share/r.cost, r.floor), float64(r.c.credit.granted))))
		}
		// Packets queued under other credits would distort the adjustment.
		if step && !slices.ContainsFunc(group, func(r rival) bool { return now.Sub(r.c.load.over) < 3*fairMean }) {
			adjust(group)
		}
	}
}

// adjust changes the biases of those of a group who have a queue all the time: half
// the way, on a scale of ratios, to where all get what their weights say.
func adjust(group []rival) {
	mean, n, least := 0.0, 0, math.Inf(1)
	gets := func(l *load, share int) float64 { return l.use / float64(share) }
	for _, r := range group {
		if l := &r.c.load; l.queued > 0.5 && l.use > 0 {
			mean += math.Log(gets(l, r.c.spec.Share))
			n++
		}
	}
	mean = math.Exp(mean / float64(n))
	for _, r := range group {
		l := &r.c.load
		if l.queued > 0.5 && l.use > 0 && n > 1 {
			l.bias *= min(max(math.Sqrt(gets(l, r.c.spec.Share)/mean), 0.5), 2)
		}
		least = min(least, l.bias)
	}
	for _, r := range group {
		r.c.load.bias = min(r.c.load.bias/least, maxBias)
	}
}

// split takes those out who compete with the first, directly or by way of others.
func split(rivals []rival) (group, rest []rival) {
	group, rest = rivals[:1:1], rivals[1:]
	for found, workers := true, group[0].workers; found; {
		found = false
		var others []rival
		for _, r := range rest {
			if r.workers&workers == 0 {
				others = append(others, r)
				continue
			}
			group = append(group, r)
			workers |= r.workers
			found = true
		}
		rest = others
	}
	return group, rest
}

// setCredit sets what a context has of what deal gave it.
func (n *NIC) setCredit(c *Context, credit uint32) {
	if lowered := credit < c.credit.granted; lowered || c.load.lowered {
		c.load.lowered = lowered
		atomic.StoreUint32(&n.ingress.Share().Credit[c.id], credit)
	}
}

// frameBuffers returns how many buffers a frame of the interface's MTU spans.
func (n *NIC) frameBuffers() int {
	size := n.umem.Config().FrameSize - headroom
	return (n.iface.MTU+14+4-1)/size + 1
}
