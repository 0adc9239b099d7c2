// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"fmt"
	"runtime/debug"
	"time"

	"github.com/xspin/xspin/spin"
)

// call is a kind of call into the code of a context.
type call uint8

const (
	payloadCall call = iota
	headerCall
	completionCall
	depositCall
	bindCall
	unbindCall
	contCall // of a payload handler
	lastCall // continuation of a completion handler
	initCall
	timerCall
)

func (c call) String() string {
	return [...]string{"payload", "header", "completion", "deposit", "bind", "unbind", "continued payload", "continued completion", "init", "timer"}[c]
}

// enter says that the runner is about to run, or has run, code of a context for
// HER k. It returns false if the runner was abandoned in the meantime.
func (r *runner) enter(id uint16, k int) bool {
	r.tick++
	r.calm = false
	return stateOf(r.state.Swap(herState(running, r.tick, id, k))) != abandoned
}

// back says that no code of the context runs, and that HER k is not over: what
// follows writes what others read. It returns false if the runner was abandoned.
func (r *runner) back(id uint16, k int) bool {
	if r.calm {
		return true
	}
	r.calm = true
	r.tick++
	return stateOf(r.state.Swap(herState(between, r.tick, id, k))) != abandoned
}

// call is invoke for HER k of a context with messages, and back. mine is false if
// the runner was abandoned.
func (r *runner) call(c *Context, what call, k int) (code spin.Code, ok, mine bool) {
	if r.calm && !r.enter(c.id, k) {
		return 0, false, false
	}
	code, ok = r.invoke(c, what)
	return code, ok, r.back(c.id, k)
}

// invoke makes a call into the code of a context, and accounts for it. A call that
// fails has sent and kept nothing. It returns false if it panicked.
func (r *runner) invoke(c *Context, what call) (code spin.Code, ok bool) {
	req := &r.her
	acc := r.account(c)
	mark, before := r.made, req.action
	r.what = what
	if code, ok = r.contain(c, what); ok {
		r.sum(mark) // the handler's time
	}
	now := r.pool.scale.Ticks()
	ns := r.pool.scale.Nanoseconds(now - r.ticks)
	r.ticks = now
	acc.HandlerSum += time.Duration(ns)
	if ok && (what == payloadCall || what == depositCall) {
		acc.Handled++
		acc.HandlerTime.Add(ns)
	}
	plain := code &^ spin.Pending
	if what == payloadCall || what == depositCall || what == headerCall || what == contCall {
		r.verdict = verdictOf(plain, ok)
	}
	// Whoever asked for init is told; a timer has nothing to drop.
	if ok && plain != spin.Success && plain != spin.Proceed && what != initCall && (what != timerCall || plain != spin.Drop) {
		r.complain(c, r.port, plain, acc)
	}
	if !ok || plain == spin.Fail || plain == spin.Segv {
		r.unsend(mark)
		if before == recycle {
			switch {
			case req.action == send:
				req.action = recycle
				r.room += len(req.segs)
			case req.action == keep && req.kept.cont != nil:
				req.kept.job = releaseJob
				if r.unask(req.kept.cont) {
					req.action = recycle
				}
			case req.action == keep:
				req.kept.job = releaseJob
				if req.kept.finish() {
					req.action = recycle
				}
			}
		}
	}
	if p := r.pending; p != nil && (!ok || plain != spin.Success) {
		p.job = releaseJob
		r.unask(p)
		r.pending = nil
	}
	n := r.made - mark
	if before == recycle && req.action == send {
		n++
	}
	acc.Sent += uint64(n)
	r.sent += n
	return code, ok
}

// contain makes a call and contains its panics.
func (r *runner) contain(c *Context, what call) (code spin.Code, ok bool) {
	defer func() {
		if ok {
			return
		}
		r.panicked = recover()
		r.account(c).Panics++
		r.pool.emit(spin.HandlerPanic, c, r.port.hpu, func() string { return fmt.Sprintf("%v\n%s", r.panicked, debug.Stack()) })
	}()
	r.why = nil
	switch what {
	case payloadCall:
		code = c.handlers.Payload(&r.her)
	case headerCall:
		code = c.handlers.Header(&r.her)
	case completionCall:
		code = c.handlers.Completion(&r.done)
	case depositCall:
		if err := r.her.Deposit(); err != nil {
			code = r.her.Fail(err)
		}
	case bindCall:
		m := r.her.msg
		m.binding, r.bindErr = c.msgs.cfg.Binder.Bind(m)
	case unbindCall:
		c.msgs.cfg.Binder.Unbind(r.unbinding, &r.unbound)
	case contCall:
		code = r.cont.then(&r.her, &r.cont.reply)
	case lastCall:
		code = r.cont.last(&r.done, &r.cont.reply)
	case initCall:
		if r.initErr = c.handlers.Init(&r.her.Task); r.initErr != nil {
			code = spin.Fail // what it has sent is not
		}
	case timerCall:
		code = c.handlers.Timer(&r.her.Task)
	}
	return code, true
}

func (r *runner) complain(c *Context, p *port, code spin.Code, acc *spin.ContextStats) {
	if code == spin.Drop {
		acc.Dropped++
		return
	}
	acc.Failed++
	r.pool.emit(spin.HandlerFailed, c, p.hpu, func() string {
		if r.why != nil {
			return fmt.Sprintf("the handler returned %v: %v", code, r.why)
		}
		return fmt.Sprintf("the handler returned %v", code)
	})
}

// fault makes the error of a call that failed.
func (r *runner) fault(call call, code spin.Code, ok bool) error {
	if !ok {
		return fmt.Errorf("%v handler: panic: %v", call, r.panicked)
	}
	if r.why != nil {
		return r.why
	}
	return fmt.Errorf("%v handler: %v", call, code)
}
