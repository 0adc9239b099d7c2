// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/spin"
	"github.com/xspin/xspin/xsk"
)

const (
	batchSize = 64  // descriptors taken from a ring at once
	chainSize = 64  // longest frame, in descriptors
	kicks     = 128 // of the tx ring in a row; a kick sends 16 to 32 frames

	spareCache = 64 // frames for sends of handlers that a runner has at hand
)

// A port is an HPU on a queue: where packets come from. The worker of the HPU
// owns all of it but the counters.
type port struct {
	hpu, queue int
	ring       Ring
	shared     *bpf.Queue
	enqueued   *uint32 // of this HPU on this queue, shared with the program
	dequeued   *uint32

	tail  [chainSize]xsk.Desc // an unfinished frame, as far as it has come
	carry int                 // how many descriptors of it there are

	unsent  bool  // the tx ring wants another kick
	kicked  int64 // when it had the last one, ns
	emptied int64 // when the rx ring was last seen to be empty, ns

	// What the program's counter of buffers for (queue, HPU, context) should
	// be when the next packet comes; a gap is what was lost.
	expect  [bpf.MaxContexts]uint32
	suspect lossSuspicion

	handled, batches atomic.Uint64
	busy             atomic.Int64 // ticks
}

func (p *port) occupancy() uint32 {
	return atomic.LoadUint32(p.enqueued) - atomic.LoadUint32(p.dequeued)
}

// A worker is a thread's worth of work: HPUs, and what wakes who serves them.
type worker struct {
	pool  *Pool
	id    int
	ports []*port
	ep    int // epoll on all rings and on waker
	waker int // eventfd

	// Used by the runner of the day, and never while a handler runs.
	due      []due // by queue
	txq      []xsk.Desc
	done     []uint64
	aside    int     // of the room on a tx ring: what the NIC's own frames leave to handlers
	jobs     []*Kept // packets to run, or run again
	rest     []*Kept // of those that serveJobs is at, not begun
	spent    []*Kept // room for the next jobs
	chores   []*errand
	triggers []hostMessage
	numbers  uint32 // of host messages

	returned []*Kept     // finished behind the worker's back; guarded by Pool.mu
	errands  []*errand   // guarded by Pool.mu
	hasWork  atomic.Bool // returned, errands, and for worker 0 Pool.own, may have some

	visits  atomic.Uint32 // odd while the list of applications is looked at
	current atomic.Pointer[runner]
}

func newWorker(p *Pool, id int) (_ *worker, err error) {
	w := &worker{
		pool:  p,
		id:    id,
		ep:    -1,
		waker: -1,
		due:   make([]due, len(p.cfg.Queues)),
		txq:   make([]xsk.Desc, 0, 2*(batchSize+chainSize)+spareCache),
		done:  make([]uint64, batchSize),
	}
	for i := range w.due {
		w.due[i].frames = make([]uint64, 0, 2*(batchSize+chainSize))
		w.due[i].owed = make([]debt, 0, 2*(batchSize+chainSize))
	}
	fds := []int{}
	for h := id; h < len(p.cfg.Queues[0].Rings); h += p.cfg.Workers {
		for i := range p.cfg.Queues {
			q := &p.cfg.Queues[i]
			w.ports = append(w.ports, &port{
				hpu: h, queue: i, ring: q.Rings[h], shared: q.Shared,
				enqueued: &p.cfg.Share.Enqueued[i][h],
				dequeued: &p.cfg.Share.Dequeued[i][h],
			})
			fds = append(fds, q.Rings[h].FD())
		}
	}
	// Rings are empty now, and half of a small one is enough.
	w.aside = min(batchSize+chainSize, w.ports[0].ring.TxFree()/2)
	if w.waker, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	if w.ep, err = epoll(append(fds, w.waker)...); err != nil {
		unix.Close(w.waker)
		return nil, err
	}
	return w, nil
}

// occupied tells whether buffers are on their way to the worker's HPUs.
func (w *worker) occupied() bool {
	return slices.ContainsFunc(w.ports, func(p *port) bool { return p.occupancy() != 0 })
}

// sweeps tells whether the worker has buckets to free: see Context.sweep.
func (w *worker) sweeps() bool { return w.id == 0 && w.pool.leaky.Load() }

func (w *worker) free() {
	unix.Close(w.ep)
	unix.Close(w.waker)
}

// wake ends the worker's sleep, now or the next one.
func (w *worker) wake() {
	one := [8]byte{1}
	_, _ = unix.Write(w.waker, one[:])
}

// The state of a runner is one word: who may touch what the worker owns, and
// which HER of the batch is being run.
//
//	owned       the runner does the worker's business
//	running     it runs handlers one after the other and writes only what is its own
//	abandoned   its handler ran past the limit; another runner has taken over and
//	            this one must end without a trace
//	between     it does, between handlers of a message, what must not be cut short;
//	            whoever waits for the context's handlers to end waits for this too
//
// Only the watchdog abandons, and only a runner that is running. The runner
// learns of it when its handler returns and it swaps its state.
const (
	owned = iota
	running
	abandoned
	between

	stateBits   = 2
	indexBits   = 16 // of the HER in its batch
	contextBits = 16
)

func herState(state int, tick uint64, ctx uint16, k int) uint64 {
	return (tick<<contextBits|uint64(ctx))<<(indexBits+stateBits) | uint64(k)<<stateBits | uint64(state)
}

func stateOf(s uint64) int      { return int(s & (1<<stateBits - 1)) }
func indexOf(s uint64) int      { return int(s >> stateBits & (1<<indexBits - 1)) }
func contextOf(s uint64) uint16 { return uint16(s >> (stateBits + indexBits)) }

// A runner is a worker's goroutine, locked to a thread. When its handler gets
// stuck, a new one takes its place.
//
// Others read state and stuckIn, and of one that was abandoned the batch: the watchdog
// and the next runner.
type runner struct {
	pool *Pool
	w    *worker

	state atomic.Uint64
	tick  uint64

	stuckIn *Context // whose handler it was abandoned in: the watchdog's until then

	batch  batch
	spare  []uint64 // frames for sends of handlers
	books  books
	looked int64 // for lost packets, CLOCK_MONOTONIC
	timed  int64 // when it looked at the time of messages, ticks
	more   bool  // a batch was not enough then
	ticks  int64 // when the last handler ended

	touched byte // so that the compiler leaves touch's loads in

	// Of the HER that runs, and of the call into the code of its context: what that
	// may ask for, and what it says. It is over with the call, see outcome.
	her   HER
	calm  bool // none runs
	what  callKind
	why   error         // what Bind or Init returned, a panic was about, or why it returns Fail
	asked *continuation // that a completion handler waits for

	// What code of a context gets pointers to: so it is not on the heap each time.
	done    Completion
	unbound spin.Result
	note    spin.MessageEvent
	slice   []byte // of a host message
	frame   []byte // as it came, for a tap
	line    []byte // of the log
	record  TapRecord

	reply reply
	asks  asks
}

// running returns the id of the context whose handler runs, or may run next.
func (r *runner) running() (ctx uint16, ok bool) {
	s := r.state.Load()
	return contextOf(s), stateOf(s) == running || stateOf(s) == between
}

func (r *runner) now() int64 {
	return r.batch.base + r.pool.scale.Nanoseconds(r.pool.scale.Ticks()-r.batch.start)
}

// takeover is a batch that was cut short by a handler that did not return.
type takeover struct {
	from *runner
	k    int // the HER that was given up
}

// launch starts a thread for the worker, which first continues with a batch.
func (p *Pool) launch(w *worker, cut *takeover) {
	r := &runner{
		pool:  p,
		w:     w,
		spare: make([]uint64, 0, 2*spareCache),
		books: books{dirty: make([]uint16, 0, bpf.MaxContexts)},
		asks:  asks{spare: make([]*continuation, 0, 2*batchSize)},
	}
	r.asks.onReply = r.answered
	w.current.Store(r)
	p.wg.Add(1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with it
		if n := len(p.cfg.CPUs); n > 0 {
			var set unix.CPUSet
			set.Set(p.cfg.CPUs[w.id%n])
			_ = unix.SchedSetaffinity(0, &set) // checked by New; what has changed since is not worth failing for
		}
		if r.main(cut) {
			p.wg.Done() // else the watchdog has done so
		}
	}()
}

// main serves the worker's HPUs until the pool is closed. It returns false if
// it was abandoned.
func (r *runner) main(cut *takeover) bool {
	if cut != nil && !r.resume(cut) {
		r.leave()
		return false
	}
	r.w.jobs, r.w.rest = append(slices.Clone(r.w.rest), r.w.jobs...), nil
	wait := waiter{r: r}
	for {
		// Packets that came before Close get one more round, later ones none.
		closing := r.pool.closed.Load()
		worked := false
		for _, p := range r.w.ports {
			if p.ring.RxAvailable() == 0 {
				continue
			}
			worked = true
			if !r.serve(p) {
				r.leave()
				return false
			}
		}
		if r.w.hasWork.Load() && r.housework() {
			worked = true
		}
		if r.replies() {
			worked = true
		}
		did, ok := r.errandsAndTimers()
		if !ok {
			r.leave()
			return false
		}
		worked = worked || did
		switch {
		case closing:
			r.returnSpare()
			return true
		case worked:
			wait.worked()
			r.look(r.batch.base)
		default:
			wait.idle()
		}
	}
}

// serve takes a batch from a ring and runs it. It returns false if the runner
// was abandoned.
func (r *runner) serve(p *port) bool {
	r.begin(p)
	r.take()
	return r.run(0) && r.settle()
}

// run runs the handlers of the batch from HER k on. It returns false if the
// runner was abandoned: then nothing of the batch is its own any more.
func (r *runner) run(k int) bool {
	p, n := r.batch.port, r.batch.count
	r.ticks = r.pool.scale.Ticks()
	for ; k < n; k++ {
		h := &r.batch.hers[k]
		id := h.meta.Context
		r.batch.marks[k] = r.batch.made
		if !r.enter(id, k) {
			return false // in the HER before this one, which r.her still is
		}
		// After that: whoever takes the context away and then sees no runner
		// in it can be sure that none will be.
		c := r.pool.contexts[id].Load()
		if c != nil && (h.msg != nil && h.msg.ctx != c || h.owner != nil && h.owner != c) {
			c = nil // the number is another's by now
		}
		req := &r.her
		req.r, req.ctx, req.port, req.msg, req.k = r, c, p, nil, k
		req.meta, req.late, req.from = h.meta, h.late, h.from
		req.all = r.batch.descs[h.first:h.last:h.last]
		req.segs, req.head, req.size = req.all, nil, 0
		req.action, req.kept, req.data, req.trig = recycle, nil, nil, nil
		req.sent, req.acked = 0, 0
		fromRing := h.job == packetJob || h.job == replayJob
		if c == nil || c.halt.Load() != 0 || h.job == releaseJob || fromRing && c.msgs == nil && c.handlers.Payload == nil {
			r.batch.results[k] = result{sends: r.batch.made}
			if c != nil && fromRing {
				r.books.of(r.pool, c).Unrun++
			}
			continue
		}
		req.acc = r.books.of(r.pool, c)
		if len(req.all) > 0 {
			req.size = int(req.all[0].Len)
			for _, d := range req.all[1:] {
				req.size += int(d.Len)
			}
			req.head = r.pool.cfg.Memory.Bytes(req.all[0].Addr, int(req.all[0].Len))
		}
		req.parsed = false
		if tap := c.tap.Load(); tap != nil && h.job == packetJob {
			if !r.tapped(*tap, c, h) {
				return false
			}
		} else if !r.dispatch(c, h) {
			return false
		}
		r.batch.results[k] = result{action: req.action, segs: len(req.segs), sends: r.batch.made}
	}
	return stateOf(r.state.Swap(owned)) != abandoned
}

// dispatch runs the HER. It returns false if the runner was abandoned.
func (r *runner) dispatch(c *Context, h *her) bool {
	switch {
	case h.job == contJob:
		cont := h.kept.cont
		if !r.resumed(c, h, cont) {
			return false
		}
		r.over(cont)
		return true
	case h.job == triggerJob:
		return r.hostSlice(c, h)
	case h.job == initJob || h.job == timerJob:
		return r.called(h)
	case c.msgs == nil:
		return r.packet(c)
	case h.job == packetJob || h.job == replayJob:
		return r.segment(c)
	case !r.back():
		return false
	case h.job == finishJob:
		req := &r.her
		req.msg, req.seg, req.ask = h.msg, h.kept.seg, h.kept.ask
		return r.finished(c.msgs.table(r.w, (*mpq.Key)(&h.meta.Key)), h.msg, h.kept.drop, true)
	case h.job == expireJob:
		return r.expire(c, h)
	case h.job == notifyJob:
		r.her.msg = h.msg
		return r.notify(h.msg.table, h.msg, h.msg.waits.result)
	}
	return true
}

// packet runs the HER of a context without messages: a packet that is a whole
// message, or one of an endless one.
func (r *runner) packet(c *Context) bool {
	req := &r.her
	var o outcome
	if c.handlers.Header != nil {
		if o = r.invoke(call{kind: headerCall}); o.end == panicked {
			return true // the next swap of the state tells whether it was abandoned
		}
		if !r.enter(c.id, req.k) {
			return false
		}
		req.acc.Headers++
		o.code &^= spin.Pending
	}
	switch o.code {
	case spin.Success:
		return r.afterPayload(c, r.invoke(call{kind: payloadCall}))
	case spin.Drop, spin.Proceed: // no payload handler, and there is no window
		return r.afterPayload(c, o)
	}
	return true
}

// afterPayload is the rest of packet, when the payload handler has finished.
func (r *runner) afterPayload(c *Context, o outcome) bool {
	req := &r.her
	asked := req.action == keep && req.kept.cont != nil
	if c.handlers.Completion == nil || asked || o.end == panicked || o.code != spin.Success && o.code != spin.Drop && o.code != spin.Proceed {
		return true
	}
	if !r.enter(c.id, req.k) {
		return false
	}
	r.done.Task = req.Task
	r.done.Result = spin.Result{Length: uint64(req.Headers().PayloadLen)}
	if o.code == spin.Drop {
		r.done.Dropped = r.done.Length
	}
	r.invoke(call{kind: completionCall})
	req.acc.Completions++
	return true
}

// resume continues the batch of a runner that was abandoned in handler k.
func (r *runner) resume(cut *takeover) bool {
	r.begin(cut.from.batch.port)
	r.batch.from(&cut.from.batch, cut.k)
	return r.run(cut.k+1) && r.settle()
}

// leave is the end of an abandoned runner whose handler has returned after all:
// nothing that it asked for is sent, and what it still holds goes back by way of
// its successor.
func (r *runner) leave() {
	h := &r.her
	for _, d := range r.batch.sends[r.batch.marks[h.k]:r.batch.made] {
		r.spare = append(r.spare, d.Addr)
	}
	h.acc.Sent -= uint64(h.sent)
	h.acc.Acks -= uint64(h.acked)
	if h.action != keep && len(h.all) > 0 {
		k := h.keep()
		k.job = releaseJob
		r.pool.giveBack(k)
	}
	r.books.publish(r.pool)
	r.returnSpare()
	addProcs(-1)
	r.pool.stuck.Add(-1)
	if r.stuckIn != nil {
		r.stuckIn.stuck.Add(-1)
	}
}

// returnSpare gives the runner's spare frames to whoever comes next.
func (r *runner) returnSpare() {
	r.pool.mu.Lock()
	r.pool.spare = append(r.pool.spare, r.spare...)
	r.pool.mu.Unlock()
	r.spare = r.spare[:0]
}

// settle does what the handlers of the batch asked for.
func (r *runner) settle() bool {
	p, mem, w := r.batch.port, r.pool.cfg.Memory, r.w
	due := &w.due[p.queue]
	made := 0
	for k := range r.batch.count {
		h, res := &r.batch.hers[k], &r.batch.results[k]
		c := r.pool.contexts[h.meta.Context].Load()
		var tap *Tap
		if c != nil {
			tap = c.tap.Load()
		}
		for ; made < res.sends; made++ {
			d := r.batch.sends[made]
			if tap != nil {
				r.tapOut(*tap, p, h, mem.Bytes(d.Addr, int(d.Len)))
			}
			r.pool.records[mem.Frame(d.Addr)].Store(spareRecord)
			w.txq = append(w.txq, d)
		}
		from := p
		if h.from != nil {
			from = h.from
		}
		acct := from.account(c, &h.meta, h.late)
		all := r.batch.descs[h.first:h.last]
		sent := 0
		switch res.action {
		case keep, giveUp:
			continue
		case send:
			sent = res.segs
			if tap != nil {
				if r.frame == nil {
					r.frame = make([]byte, maxFrame)
				}
				r.tapOut(*tap, p, h, r.frame[:copyTo(mem, all[:sent], r.frame, 0)])
			}
		}
		for i, d := range all {
			a := acct
			if i != len(all)-1 {
				a.bucket = noBucket // with the last buffer
			}
			if i < sent {
				r.pool.records[mem.Frame(d.Addr)].Store(a.pack())
				w.txq = append(w.txq, d)
			} else {
				due.frames = append(due.frames, d.Addr)
				due.owe(a)
			}
		}
	}
	// Before the credit, since whoever sees that return may look: and credit of what is sent
	// returns by the queue's completion ring, to whichever worker looks there first.
	r.books.publish(r.pool)
	if r.pool.cfg.Egress == RoundRobin && r.ownPort(p) {
		r.interleave(p)
	}
	r.transmit(p)
	r.exchange(p.queue)
	p.handled.Store(p.handled.Load() + uint64(r.batch.count))
	p.batches.Store(p.batches.Load() + 1)
	p.busy.Store(p.busy.Load() + r.pool.scale.Ticks() - r.batch.start)
	return true
}
