// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"time"

	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/spin"
)

// Handlers that no packet calls: init, timers, and host messages. Each runs
// as a HER without a packet, on the worker that has the lowest HPU of the context.

// DefaultSlice is how many bytes a payload HER of a triggered message has.
const DefaultSlice = 1408

// maxSlice bounds it.
const maxSlice = 64 << 10

// A Trigger activates a context from the host's side (FPsPIN report, section 4.4.7): a message
// without packets, for which all handlers run. Its payload is a range of a window, cut
// in slices, each of which is a payload HER with a private copy of it.
type Trigger struct {
	Words  [4]uint64   // for handlers: Message.Words
	Window spin.Window // Optional: without, the message is empty
	Offset int64
	Length int64 // less than 4 GiB
	Slice  int   // bytes. Defaults to DefaultSlice
}

// triggered is a host message on its way through the handlers.
type triggered struct {
	Trigger
	key  mpq.Key
	next int64 // how much of it has become HERs
}

// errand is a task for a worker, whose caller waits for the answer.
type errand struct {
	c    *Context
	trig *triggered // nil: run the init handler
	done chan error // with room for one
}

var errGone = errors.New("the context runs no handlers any more")

// Init runs the init handler of a context, if it has one, on one of its HPUs, and
// returns what that returns. From then on its timer runs.
func (p *Pool) Init(c *Context) error {
	if c.handlers.Init != nil {
		if err := p.run(&errand{c: c}); err != nil {
			return fmt.Errorf("init handler: %w", err)
		}
	}
	c.ready.Store(true)
	p.wake()
	return nil
}

// Trigger runs a context's handlers for a host message. It returns when the
// message has been accepted: its end is an event like that of others. The context must
// have messages.
func (p *Pool) Trigger(c *Context, t Trigger) error {
	if t.Slice == 0 {
		t.Slice = DefaultSlice
	}
	switch {
	case c.msgs == nil:
		return errors.New("trigger: the context has no messages")
	case t.Slice < 1 || t.Slice > maxSlice:
		return fmt.Errorf("trigger: slices of %d bytes: want 1 to %d", t.Slice, maxSlice)
	case t.Length < 0 || t.Length > math.MaxUint32:
		return fmt.Errorf("trigger: message of %d bytes: want 0 to %d", t.Length, uint32(math.MaxUint32))
	case t.Window == nil && (t.Length != 0 || t.Offset != 0):
		return fmt.Errorf("trigger: %d bytes at %d, but no window is given", t.Length, t.Offset)
	case t.Window != nil && (t.Offset < 0 || t.Length > t.Window.Size()-t.Offset):
		return fmt.Errorf("trigger: %d bytes at %d of a window of %d: %w", t.Length, t.Offset, t.Window.Size(), spin.ErrBounds)
	}
	if err := p.run(&errand{c: c, trig: &triggered{Trigger: t}}); err != nil {
		return fmt.Errorf("trigger: %w", err)
	}
	return nil
}

// run has a worker do an errand, and waits for it: no longer than the watchdog lets
// a handler run.
func (p *Pool) run(e *errand) error {
	e.done = make(chan error, 1)
	w := p.home(e.c)
	p.mu.Lock()
	if p.closed.Load() {
		p.mu.Unlock()
		return errClosed
	}
	w.errands = append(w.errands, e)
	w.hasWork.Store(true)
	w.wake()
	p.mu.Unlock()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case err := <-e.done:
			return err
		case <-tick.C:
			if e.c.halt.Load() != 0 || p.contexts[e.c.id].Load() != e.c || p.closed.Load() {
				select {
				case err := <-e.done:
					return err
				default:
					return errGone
				}
			}
		}
	}
}

// home returns the worker for what has no packet.
func (p *Pool) home(c *Context) *worker {
	hpus := len(p.cfg.Queues[0].Rings)
	low := bits.TrailingZeros64(c.hpus)
	if low >= hpus {
		low = 0
	}
	return p.workers[low%len(p.workers)]
}

// errand does what somebody waits for. It returns false if the runner was abandoned.
func (r *runner) errand(e *errand) bool {
	c := e.c
	p := r.w.portFor(c, nil)
	if p == nil || r.pool.contexts[c.id].Load() != c || c.halt.Load() != 0 {
		e.done <- errGone
		return true
	}
	h := her{job: initJob, errand: e}
	if e.trig != nil {
		r.w.numbers++
		e.trig.key = hostKey(len(c.msgs.cfg.Format.Key), r.w.numbers)
		h.job, h.trig = triggerJob, e.trig
	}
	h.meta.Context, h.owner = c.id, c
	if !r.serveOne(p, h) {
		return false
	}
	select {
	case e.done <- errGone: // it was stopped, and did not answer
	default:
	}
	if t := e.trig; t != nil && t.next < t.Length {
		r.w.triggers = append(r.w.triggers, hostMessage{c, t})
	}
	return true
}

// hostKey returns the key of a message that no peer can have sent: with SLMP, from
// 255.255.255.255 and port 65535.
func hostKey(words int, number uint32) (k mpq.Key) {
	for i := range words {
		k[i] = math.MaxUint32
	}
	k[words-1] = number
	return k
}

// hostMessage is a triggered message of which something is left.
type hostMessage struct {
	c *Context
	t *triggered
}

// errands does what was asked for, and continues with host messages: some
// slices of each, for packets wait meanwhile. It returns false if the runner was
// abandoned.
func (r *runner) errands() bool {
	w := r.w
	for len(w.chores) > 0 {
		e := w.chores[0]
		w.chores = slices.Delete(w.chores, 0, 1)
		if !r.errand(e) {
			return false
		}
	}
	for range len(w.triggers) {
		m := w.triggers[0]
		w.triggers = slices.Delete(w.triggers, 0, 1)
		for range batchSize / 4 {
			p := w.portFor(m.c, nil)
			if m.t.next >= m.t.Length || m.c.halt.Load() != 0 || r.pool.contexts[m.c.id].Load() != m.c || r.pool.isEnding(m.c) {
				m.t = nil
				break
			}
			h := her{job: triggerJob, trig: m.t}
			h.meta.Context, h.owner = m.c.id, m.c
			if !r.serveOne(p, h) {
				return false
			}
		}
		if m.t != nil {
			w.triggers = append(w.triggers, m)
		}
	}
	return true
}

// hostSlice runs the HER, a slice of a host message.
func (r *runner) hostSlice(c *Context, h *her) bool {
	req, t := &r.her, h.trig
	first := t.next == 0
	n := min(int64(t.Slice), t.Length-t.next)
	if cap(r.slice) < int(n) {
		r.slice = make([]byte, n)
	}
	req.data = r.slice[:n]
	if n > 0 {
		if _, err := t.Window.ReadAt(req.data, t.Offset+t.next); err != nil {
			t.next = t.Length // the message will be abandoned
			h.answer(err)
			return true
		}
	}
	req.seg = mpq.Segment{Offset: uint32(t.next), Len: int(n), EOM: t.next+n == t.Length}
	req.meta.Key = t.key
	req.meta.Offset = req.seg.Offset
	req.ask, req.payload = spin.AckRequest{}, 0
	t.next += n
	if first {
		req.acc.Triggers++
	}
	req.trig = t
	req.refused = false
	if !r.arrive(c) {
		return false
	}
	if req.refused {
		t.next = t.Length
		h.answer(fmt.Errorf("refused: no room for another message, or no receive is posted for it: %w", ErrFull))
	} else {
		h.answer(nil)
	}
	return true
}

// answer tells whoever waits for the errand, if anybody does.
func (h *her) answer(err error) {
	if h.errand != nil {
		h.errand.done <- err
	}
}

// called runs the HER, the init or the timer handler.
func (r *runner) called(h *her) bool {
	if h.job == timerJob {
		if o := r.invoke(call{kind: timerCall}); o.end == returned {
			r.her.acc.Timers++
		}
		return true
	}
	o := r.invoke(call{kind: initCall})
	err := r.why
	if o.end == panicked {
		err = fmt.Errorf("panic: %w", err)
	}
	h.answer(err)
	return true
}

// tick1 runs the context's timer handler if it is due. It returns false if the runner
// was abandoned.
func (r *runner) tick1(c *Context) bool {
	if c.res.Timer == 0 || !c.ready.Load() || r.pool.home(c) != r.w {
		return true
	}
	now := r.pool.now()
	switch {
	case c.tick == 0:
		c.tick = now + int64(c.res.Timer)
	case now >= c.tick:
		// What was missed is not made up for.
		c.tick = max(c.tick+int64(c.res.Timer), now+1)
		h := her{job: timerJob}
		h.meta.Context, h.owner = c.id, c
		return r.serveOne(r.w.portFor(c, nil), h)
	}
	return true
}
