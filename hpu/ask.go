// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/spin"
)

// A Reply is the application's answer to a request.
type Reply struct {
	Tag     uint64
	Status  int32
	Payload []byte // good until the continuation returns
	Err     error  // there is no answer: wraps hostq.ErrDetached
}

// Then is a continuation of a packet's handler: it runs on the HPU that asked, when the
// answer has come or is sure not to come, with the packet as the handler has left it.
// It may do what a payload handler may, also ask again. Only when it has returned does
// the packet's HER finish.
type Then func(h *HER, r *Reply) spin.Code

// ThenComplete is a continuation of a completion handler. The message ends when it has
// returned.
type ThenComplete func(c *Completion, r *Reply) spin.Code

// A continuation waits for its answer. Its packet, if it has one, is in the Kept.
type continuation struct {
	Kept
	ctx    *Context
	id     uint64
	then   Then
	last   ThenComplete
	result spin.Result // with last
	reply  Reply
	buf    []byte // of the reply
}

// asking is a handler that waits for its answer.
type asking struct {
	dst    []byte
	n      int
	status int32
	err    error
	done   atomic.Bool // the above is there
}

var (
	errNoRoom   = fmt.Errorf("request to the application: %w", ErrFull)
	errNoHost   = fmt.Errorf("request to the application: %w", ErrNoHost)
	errAskTime  = fmt.Errorf("request to the application: %w", ErrTime)
	errAskAgain = fmt.Errorf("ask: %w", ErrTwice)
	errAskHere  = fmt.Errorf("ask with a continuation: %w: only payload and completion handlers, and their continuations, can", ErrHere)
)

// Notify sends a request to the application that wants no answer. The payload is copied.
func (t *Task) Notify(tag uint64, payload []byte) error {
	_, err := t.request(tag, payload, false, nil)
	if err != nil && t.ctx.res.Full == FullDrops && errors.Is(err, ErrFull) {
		return nil // counted as unasked
	}
	return err
}

// Ask sends a request to the application and waits for its answer, of which it copies
// into dst what fits. The HPU does nothing else meanwhile; it waits until three quarters
// of the handler's time are over at most, and then returns ErrTime.
func (t *Task) Ask(tag uint64, payload, dst []byte) (n int, status int32, err error) {
	r := t.r
	a := new(asking) // an answer may be copied into it after it was given up
	a.dst = dst
	id, err := t.request(tag, payload, true, a)
	if err != nil {
		return 0, 0, err
	}
	host := t.ctx.res.Host
	for spins := 0; !a.done.Load(); spins++ {
		if host.Poll(r.w.id, batchSize, r.asks.onReply) == 0 && !r.patient(spins) && host.Cancel(id) {
			t.acc.Unanswered++
			return 0, 0, errAskTime
		}
	}
	if a.err != nil {
		t.acc.Unanswered++
	}
	return a.n, a.status, a.err
}

// AskThen sends a request to the application, and has then run when the answer comes.
// Until then the packet is kept and its HER does not finish; nobody waits. After that
// the handler can neither send, keep nor hand on the packet; it must return Success or
// Drop, of which what the continuation returns takes the place. Not in header handlers.
func (h *HER) AskThen(tag uint64, payload []byte, then Then) error {
	if h.r.what != payloadCall && h.r.what != contCall {
		return errAskHere
	}
	if h.action != recycle {
		return errAskAgain
	}
	c := h.r.newContinuation()
	h.keepAs(&c.Kept)
	c.data = append(c.data[:0], h.data...)
	c.then = then
	if err := h.r.askThen(&h.Task, c, tag, payload); err != nil {
		return err
	}
	h.action = keep
	h.kept = &c.Kept
	return nil
}

// AskThen sends a request to the application, and has then run when the answer comes:
// only then is the message over. The handler must return Success.
func (c *Completion) AskThen(tag uint64, payload []byte, then ThenComplete) error {
	r := c.r
	if r.what != completionCall && r.what != lastCall || c.msg == nil {
		return errAskHere
	}
	if r.asked != nil {
		return errAskAgain
	}
	k := r.newContinuation()
	k.pool, k.worker, k.port = r.pool, r.w, c.port
	k.meta = r.her.meta
	k.meta.Context = c.ctx.id
	k.account = account{ctx: c.ctx.id, paid: true, bucket: noBucket}
	k.msg, k.all, k.segs = c.msg, nil, nil
	k.last, k.result = then, c.Result
	if err := r.askThen(&c.Task, k, tag, payload); err != nil {
		return err
	}
	r.asked = k
	return nil
}

// asks is a runner's end of requests to applications.
type asks struct {
	request hostq.Request
	onReply func(*hostq.Response)
	polling bool            // no handler runs: what is the worker's may be touched
	spare   []*continuation // to use again
}

// newContinuation takes one that is over, or makes one.
func (r *runner) newContinuation() *continuation {
	if n := len(r.asks.spare); n > 0 {
		c := r.asks.spare[n-1]
		r.asks.spare = r.asks.spare[:n-1]
		return c
	}
	c := new(continuation)
	c.cont = c
	return c
}

// over puts a continuation by, of which nobody has a pointer any more.
func (r *runner) over(c *continuation) {
	if len(r.asks.spare) == cap(r.asks.spare) {
		return
	}
	*c = continuation{Kept: Kept{all: c.all[:0], data: c.data[:0]}, buf: c.buf[:0]}
	c.cont = c
	r.asks.spare = append(r.asks.spare, c)
}

func (r *runner) askThen(t *Task, c *continuation, tag uint64, payload []byte) error {
	c.job = contJob
	c.ctx = t.ctx
	c.pool.kept.Add(1)
	id, err := t.request(tag, payload, true, c)
	if err != nil {
		c.finish()
		r.over(c)
		return err
	}
	// Its answer cannot have been looked at yet: this worker does that, later.
	// (A runner that was abandoned in Ask may, and does not look at id.)
	c.id = id
	return nil
}

// unask takes a request back whose handler has failed after all. It returns false
// if the answer is here already: then the Kept comes back by itself.
func (r *runner) unask(c *continuation) bool {
	if r.her.ctx.res.Host.Cancel(c.id) {
		c.finish()
		r.over(c)
		return true
	}
	return false
}

// request sends a request, or waits for room if the context says so.
func (t *Task) request(tag uint64, payload []byte, reply bool, user any) (id uint64, err error) {
	r, host := t.r, t.ctx.res.Host
	if host == nil {
		if !t.ctx.hostless.Swap(true) {
			t.Logf("a handler asks the application, and the context has no queue to one: with the daemon, its set needs Queue: true, or the context queue: {}")
		}
		return 0, errNoHost
	}
	r.asks.request = hostq.Request{Tag: tag, HPU: uint32(t.port.hpu), Reply: reply, Payload: payload}
	id, err = host.Request(r.w.id, &r.asks.request, user)
	if errors.Is(err, hostq.ErrFull) && t.ctx.res.Full == FullWaits {
		id, err = t.awaitRoom(user)
	}
	switch {
	case err == nil:
		t.acc.Requests++
		if t.ctx.crowded.Load() {
			t.ctx.crowded.Store(false)
		}
	case errors.Is(err, hostq.ErrFull):
		t.acc.Unasked++
		err = errNoRoom
	case errors.Is(err, ErrTime):
		t.acc.Unasked++
	}
	return id, err
}

// awaitRoom sends r.asks.request when there is room. All who share the HPU's thread wait with it:
// so a batch of packets waits no longer than one handler may, and after the first time in
// vain nobody does until there was room.
func (t *Task) awaitRoom(user any) (id uint64, err error) {
	r, host := t.r, t.ctx.res.Host
	r.asks.request.Again = true
	start := r.pool.scale.Ticks()
	defer func() { r.batch.waited += r.pool.scale.Ticks() - start }()
	for spins := 0; ; spins++ {
		id, err = host.Request(r.w.id, &r.asks.request, user)
		if !errors.Is(err, hostq.ErrFull) || t.ctx.crowded.Load() {
			return id, err
		}
		// Answers that wait make room too.
		if host.Poll(r.w.id, batchSize, r.asks.onReply) == 0 && !r.patient(spins) {
			t.ctx.crowded.Store(true)
			return 0, errAskTime
		}
	}
}

// patient is a round of waiting in a handler. It returns false when that and what the
// batch has waited for room before have had three quarters of its time, or it was given up.
func (r *runner) patient(spins int) bool {
	if spins%yieldEvery != yieldEvery-1 {
		return true
	}
	unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
	ns := r.pool.scale.Nanoseconds(r.batch.waited + r.pool.scale.Ticks() - r.ticks)
	return ns < int64(r.pool.cfg.Limit)/4*3 && stateOf(r.state.Load()) != abandoned
}

// answered takes an answer: to a handler that waits for it, maybe another runner's, or
// for a continuation, which becomes a HER of the worker's.
func (r *runner) answered(a *hostq.Response) {
	switch u := a.User.(type) {
	case *asking:
		u.n, u.status, u.err = copy(u.dst, a.Payload), a.Status, a.Err
		u.done.Store(true)
	case *continuation:
		u.buf = append(u.buf[:0], a.Payload...)
		u.reply = Reply{Tag: a.Tag, Status: a.Status, Payload: u.buf, Err: a.Err}
		if !u.finish() {
			return
		}
		if r.asks.polling {
			r.w.jobs = append(r.w.jobs, &u.Kept)
		} else { // a handler runs: what is the worker's may be somebody else's by now
			r.pool.giveBack(&u.Kept)
		}
	}
}

// visit returns the contexts with an application, whose pairs stay until left is called:
// see Pool.unvisited. nil for none: then there is nothing to leave.
func (r *runner) visit() []*Context {
	if r.pool.hosting.Load() == nil {
		return nil
	}
	r.w.visits.Add(1)
	if list := r.pool.hosting.Load(); list != nil && len(*list) > 0 {
		return *list
	}
	r.left()
	return nil
}

func (r *runner) left() { r.w.visits.Add(1) }

// unvisited waits until no worker looks at a list of applications that was in force
// before. After that no worker uses an application that was taken out of it.
func (p *Pool) unvisited() {
	for _, w := range p.workers {
		for v := w.visits.Load(); v&1 == 1 && w.visits.Load() == v; {
			time.Sleep(50 * time.Microsecond)
		}
	}
}

// replies takes the answers of all applications.
func (r *runner) replies() (worked bool) {
	list := r.visit()
	if list == nil {
		return false
	}
	r.asks.polling = true
	for _, c := range list {
		for c.res.Host.Poll(r.w.id, batchSize, r.asks.onReply) > 0 {
			worked = true
			if !r.pool.closed.Load() {
				break
			}
		}
	}
	r.asks.polling = false
	r.left()
	return worked
}

// arm says that the worker is about to sleep. It returns false if there are answers.
func (r *runner) arm() bool {
	list := r.visit()
	if list == nil {
		return true
	}
	armed := true
	for _, c := range list {
		if h := c.res.Host; h.Outstanding(r.w.id) > 0 && !h.Arm(r.w.id) {
			armed = false
			break
		}
	}
	r.left()
	if !armed {
		r.disarm()
	}
	return armed
}

func (r *runner) disarm() {
	list := r.visit()
	if list == nil {
		return
	}
	for _, c := range list {
		c.res.Host.Disarm(r.w.id)
	}
	r.left()
}

// resumed runs the HER, a continuation.
func (r *runner) resumed(c *Context, h *her, cont *continuation) bool {
	req := &r.her
	if cont.reply.Err != nil {
		req.acc.Unanswered++
	}
	req.data = cont.data
	if n := len(cont.segs); n < len(req.segs) { // the handler has truncated it
		req.segs, req.size = req.all[:n], cont.size
	}
	switch {
	case cont.last != nil:
		return r.completed(h.msg, cont)
	case c.msgs == nil:
		return r.afterPayload(c, r.invoke(call{kind: contCall, cont: cont}))
	}
	req.msg, req.seg, req.ask = h.msg, cont.seg, cont.ask
	req.payload = c.msgs.cfg.Format.Header
	if len(req.all) == 0 {
		req.payload = 0
	}
	t := c.msgs.table(r.w, (*mpq.Key)(&h.meta.Key))
	t.lock()
	failed := h.msg.failed
	t.unlock()
	if failed { // no handler runs for it any more
		return r.back() && r.finished(t, h.msg, false, false)
	}
	return r.payloadReturned(t, h.msg, r.call(call{kind: contCall, cont: cont}))
}

// completed runs the continuation of a completion handler, and ends the message.
func (r *runner) completed(m *Message, cont *continuation) bool {
	r.her.msg = m
	r.done.Task = r.her.Task
	r.done.Result = cont.result
	return r.concluded(m.table, m, cont.result, r.call(call{kind: lastCall, cont: cont}))
}

// endRequests ends the requests of a context that no worker looks after any more.
func (p *Pool) endRequests(c *Context) {
	h := c.res.Host
	if list := p.hosting.Load(); h == nil || list != nil && slices.ContainsFunc(*list, func(o *Context) bool { return o.res.Host == h }) {
		return
	}
	h.Detach()
	for _, w := range p.workers {
		for h.Poll(w.id, batchSize, func(a *hostq.Response) {
			switch u := a.User.(type) {
			case *asking:
				u.err = hostq.ErrDetached
				u.done.Store(true)
			case *continuation:
				u.job = releaseJob
				if u.finish() {
					p.giveBack(&u.Kept)
				}
			}
		}) > 0 {
		}
	}
}
