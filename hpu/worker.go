// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/hostq"
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

// her is a packet of a batch.
type her struct {
	first, last int // runner.descs[first:last]; none if it is without a packet
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
	numbers  uint32 // of messages of the host's

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
//	            who waits for the context's handlers to end waits for this too
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

// result is what a handler wants done with its packet.
type result struct {
	action action
	segs   int // buffers to send, of those that came
	sends  int // frames it made are runner.sends[mark:sends]
}

// A runner is a worker's goroutine, locked to a thread. When its handler gets
// stuck, a new one takes its place.
type runner struct {
	pool *Pool
	w    *worker
	port *port // of the batch

	state atomic.Uint64
	tick  uint64

	stuckIn *Context // whose handler it was abandoned in: the watchdog's until then

	// A batch: what was received, cut into packets. Nobody changes it while
	// handlers run, but for the buffers of the handler's own packet, so that
	// another runner can go on with a copy.
	descs [batchSize + chainSize]xsk.Desc
	hers  [batchSize + chainSize]her
	count int // of hers

	// Of the batch. Written before and after handlers, each entry once, so
	// that the next runner may read those of the handlers before this one.
	results [batchSize + chainSize]result
	marks   [batchSize + chainSize]int // frames made before handler k
	sends   [spareCache]xsk.Desc       // frames made by handlers

	// Private: never read by anybody else.
	her      HER
	made     int              // of sends
	unsummed [spareCache]bool // sends whose checksum is computed when the handler has returned
	room     int              // left on the tx ring of the port
	spare    []uint64
	acc      [bpf.MaxContexts]*spin.ContextStats // not yet merged
	of       [bpf.MaxContexts]*Context           // whose acc it is
	dirty    []uint16
	base     int64 // the pool's time at baseT
	baseT    int64
	looked   int64 // for lost packets, CLOCK_MONOTONIC
	ticks    int64 // when the last handler ended
	waited   int64 // for room for requests, by handlers of this batch, ticks
	timed    int64 // when it looked at the time of messages, ticks

	// Of the call into the code of a context that runs: what it may ask for, and what
	// it says. It is over with the call, see outcome.
	calm  bool // none runs
	what  callKind
	why   error         // that it returns Fail
	asked *continuation // that a completion handler waits for

	// What code of a context gets pointers to: so it is not on the heap each time.
	done    Completion
	unbound spin.Result
	note    spin.MessageEvent
	slice   []byte // of a message of the host's
	frame   []byte // as it came, for a tap
	line    []byte // of the log
	record  TapRecord

	// Requests to applications.
	ask       hostq.Request
	onReply   func(*hostq.Response)
	polling   bool            // no handler runs: what is the worker's may be touched
	conts     []*continuation // to use again
	peer      peer
	buf, buf2 [256]byte
}

// running returns the id of the context whose handler runs, or may run next.
func (r *runner) running() (ctx uint16, ok bool) {
	s := r.state.Load()
	return contextOf(s), stateOf(s) == running || stateOf(s) == between
}

func (r *runner) now() int64 {
	return r.base + r.pool.scale.Nanoseconds(r.pool.scale.Ticks()-r.baseT)
}

// takeover is a batch that was cut short by a handler that did not return.
type takeover struct {
	from *runner
	k    int // the HER that was given up
}

// launch starts a thread for the worker, which goes on with a batch first.
func (p *Pool) launch(w *worker, cut *takeover) {
	r := &runner{
		pool:  p,
		w:     w,
		spare: make([]uint64, 0, 2*spareCache),
		dirty: make([]uint16, 0, bpf.MaxContexts),
		conts: make([]*continuation, 0, 2*batchSize),
	}
	r.onReply = r.reply
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
		// What came before Close has one more round, what goes on coming none.
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
			r.look(r.base)
		default:
			wait.idle()
		}
	}
}

// serve takes a batch from a ring and runs it. It returns false if the runner
// was abandoned.
func (r *runner) serve(p *port) bool {
	start := r.pool.scale.Ticks()
	r.begin(p, start)
	r.take(p)
	return r.run(p, 0) && r.settle(p, start)
}

func (r *runner) begin(p *port, ticks int64) {
	r.port = p
	r.base, r.baseT = r.pool.now(), ticks
	r.waited = 0
	r.made = 0
	// Now, and not when a handler asks: that one may have been given up, and
	// the ring be another runner's.
	r.room = p.ring.TxFree()
	if r.pool.cfg.Egress == RoundRobin && r.ownPort(p) && r.w.hasWork.Load() {
		r.room /= 2
	}
	r.room = min(r.room, cap(r.w.txq))
}

// take receives descriptors and cuts them into packets.
func (r *runner) take(p *port) {
	copy(r.descs[:], p.tail[:p.carry])
	n := p.ring.Receive(r.descs[p.carry : p.carry+batchSize])
	if n < batchSize {
		p.emptied = r.base
	}
	n += p.carry
	r.count = 0
	i := 0
	for i < n {
		j := i
		for j < n && r.descs[j].Options&xsk.Continued != 0 {
			j++
		}
		if j == n {
			break // the rest of the frame is still to come
		}
		h := &r.hers[r.count]
		h.first, h.last = i, j+1
		i = j + 1
		h.job, h.from, h.kept, h.msg, h.errand, h.owner = packetJob, nil, nil, nil, nil, nil
		if r.inspect(p, h) {
			r.count++
		}
	}
	p.carry = n - i
	if p.carry >= chainSize {
		// The program passes on what is as long as this: not one of ours.
		r.discard(p, r.descs[i:n])
		p.carry = 0
	}
	copy(p.tail[:], r.descs[i:i+p.carry])
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
	front := mem.Front(r.descs[h.first].Addr, bpf.MetaSize)
	for _, d := range r.descs[h.first:h.last] {
		if mem.Bytes(d.Addr, int(d.Len)) == nil {
			front = nil // not in any frame: what the kernel says is checked once, here
		}
	}
	if front == nil {
		r.discard(p, r.descs[h.first:h.last])
		return false
	}
	h.meta = *(*bpf.Meta)(unsafe.Pointer(unsafe.SliceData(front)))
	if h.meta.Magic != bpf.MetaMagic || int(h.meta.Context) >= bpf.MaxContexts {
		r.discard(p, r.descs[h.first:h.last])
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

// run runs the handlers of the batch from HER k on. It returns false if the
// runner was abandoned: then nothing of the batch is its own any more.
func (r *runner) run(p *port, k int) bool {
	n := r.count
	r.ticks = r.pool.scale.Ticks()
	for ; k < n; k++ {
		h := &r.hers[k]
		id := h.meta.Context
		r.marks[k] = r.made
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
		req.all = r.descs[h.first:h.last:h.last]
		req.segs, req.head, req.size = req.all, nil, 0
		req.action, req.kept, req.data, req.trig = recycle, nil, nil, nil
		req.sent, req.acked = 0, 0
		fromRing := h.job == packetJob || h.job == replayJob
		if c == nil || c.halt.Load() != 0 || h.job == releaseJob || fromRing && c.msgs == nil && c.handlers.Payload == nil {
			r.results[k] = result{sends: r.made}
			if c != nil && fromRing {
				r.account(c).Unrun++
			}
			continue
		}
		req.acc = r.account(c)
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
		} else if !r.her1(c, h) {
			return false
		}
		r.results[k] = result{action: req.action, segs: len(req.segs), sends: r.made}
	}
	return stateOf(r.state.Swap(owned)) != abandoned
}

// her1 runs the HER. It returns false if the runner was abandoned.
func (r *runner) her1(c *Context, h *her) bool {
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

// resume goes on with the batch of a runner that was abandoned in handler k.
func (r *runner) resume(cut *takeover) bool {
	start := r.pool.scale.Ticks()
	p, k := cut.from.port, cut.k
	r.begin(p, start)
	r.count = cut.from.count
	r.hers = cut.from.hers
	given := &r.hers[k] // its buffers are no business of ours, and may change
	copy(r.descs[:given.first], cut.from.descs[:given.first])
	copy(r.descs[given.last:], cut.from.descs[given.last:])
	copy(r.results[:k], cut.from.results[:k])
	copy(r.marks[:k+1], cut.from.marks[:k+1])
	r.made = r.marks[k]
	copy(r.sends[:r.made], cut.from.sends[:r.made])
	r.results[k] = result{action: giveUp, sends: r.made}
	// What the handlers before have reserved comes off the room.
	r.room -= r.made
	for i := range k {
		if r.results[i].action == send {
			r.room -= r.results[i].segs
		}
	}
	return r.run(p, k+1) && r.settle(p, start)
}

// leave is the end of an abandoned runner whose handler has returned after all:
// nothing that it asked for is sent, and what it still holds goes back by way of
// its successor.
func (r *runner) leave() {
	h := &r.her
	for _, d := range r.sends[r.marks[h.k]:r.made] {
		r.spare = append(r.spare, d.Addr)
	}
	h.acc.Sent -= uint64(h.sent)
	h.acc.Acks -= uint64(h.acked)
	if h.action != keep && len(h.all) > 0 {
		k := h.keep()
		k.job = releaseJob
		r.pool.giveBack(k)
	}
	r.publish()
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
func (r *runner) settle(p *port, start int64) bool {
	mem, w := r.pool.cfg.Memory, r.w
	due := &w.due[p.queue]
	made := 0
	for k := range r.count {
		h, res := &r.hers[k], &r.results[k]
		c := r.pool.contexts[h.meta.Context].Load()
		var tap *Tap
		if c != nil {
			tap = c.tap.Load()
		}
		for ; made < res.sends; made++ {
			d := r.sends[made]
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
		all := r.descs[h.first:h.last]
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
	if r.pool.cfg.Egress == RoundRobin && r.ownPort(p) {
		r.interleave(p)
	}
	r.transmit(p)
	r.publish() // before the credit: whoever sees that return may look
	r.exchange(p.queue)
	p.handled.Store(p.handled.Load() + uint64(r.count))
	p.batches.Store(p.batches.Load() + 1)
	p.busy.Store(p.busy.Load() + r.pool.scale.Ticks() - start)
	return true
}
