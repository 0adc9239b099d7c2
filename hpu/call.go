// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"fmt"
	"runtime/debug"
	"time"

	"github.com/xspin/xspin/spin"
)

// A call is one into the code of a context, for the HER that runs.
type call struct {
	kind callKind
	msg  *Message      // of bindCall and unbindCall
	cont *continuation // of contCall and lastCall
}

type callKind uint8

const (
	payloadCall callKind = iota
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

func (c callKind) String() string {
	return [...]string{"payload", "header", "completion", "deposit", "bind", "unbind", "continued payload", "continued completion", "init", "timer"}[c]
}

// An outcome is what a call has led to; until the next call, runner.why has the error
// that belongs to it. The zero value is a success. It is made for each packet and
// stays in registers.
type outcome struct {
	code  spin.Code
	kind  callKind
	end   ending
	asked bool // a completion handler waits for an answer
}

type ending uint8

const (
	returned ending = iota
	panicked
	givenUp // it took too long: the runner was abandoned, and must touch nothing more
)

// fault makes the error of the last call, which failed.
func (r *runner) fault(o outcome) error {
	switch {
	case o.end == panicked:
		return fmt.Errorf("%v handler: panic: %w", o.kind, r.why)
	case r.why != nil:
		return r.why
	}
	return fmt.Errorf("%v handler: %v", o.kind, o.code)
}

// enter says that the runner is about to run, or has run, code of a context for
// HER k. It returns false if the runner was abandoned in the meantime.
func (r *runner) enter(id uint16, k int) bool {
	r.tick++
	r.calm = false
	return stateOf(r.state.Swap(herState(running, r.tick, id, k))) != abandoned
}

// back says that no code of the context runs, and that the HER is not over: what
// follows writes what others read. It returns false if the runner was abandoned.
func (r *runner) back() bool {
	if r.calm {
		return true
	}
	r.calm = true
	r.tick++
	return stateOf(r.state.Swap(herState(between, r.tick, r.her.ctx.id, r.her.k))) != abandoned
}

// call is invoke for a context with messages, and back.
func (r *runner) call(x call) outcome {
	if r.calm && !r.enter(r.her.ctx.id, r.her.k) {
		return outcome{end: givenUp}
	}
	o := r.invoke(x)
	if !r.back() {
		o.end = givenUp
	}
	return o
}

// without is call where there is nothing to call, with the code that stands for it.
func (r *runner) without(code spin.Code) outcome {
	o := outcome{code: code}
	if !r.back() {
		o.end = givenUp
	}
	return o
}

// invoke makes a call into the code of a context, and accounts for it. A call that
// fails has sent and kept nothing.
func (r *runner) invoke(x call) outcome {
	req := &r.her
	c := req.ctx
	acc := r.books.of(r.pool, c)
	mark, before := r.batch.made, req.action
	r.what = x.kind
	code, ok := r.contain(c, x)
	o := outcome{code: code, kind: x.kind, end: panicked}
	if ok {
		o.end = returned
		r.sum(mark) // the handler's time
	}
	now := r.pool.scale.Ticks()
	ns := r.pool.scale.Nanoseconds(now - r.ticks)
	r.ticks = now
	acc.HandlerSum += time.Duration(ns)
	if ok && (x.kind == payloadCall || x.kind == depositCall) {
		acc.Handled++
		acc.HandlerTime.Add(ns)
	}
	plain := o.code &^ spin.Pending
	if x.kind == payloadCall || x.kind == depositCall || x.kind == headerCall || x.kind == contCall {
		req.verdict = verdictOf(plain, o.end)
	}
	// Whoever asked for init is told; a timer has nothing to drop.
	if ok && plain != spin.Success && plain != spin.Proceed && x.kind != initCall && (x.kind != timerCall || plain != spin.Drop) {
		r.complain(c, plain, acc)
	}
	if !ok || plain == spin.Fail || plain == spin.Segv {
		r.unsend(mark)
		if before == recycle {
			switch {
			case req.action == send:
				req.action = recycle
				r.batch.room += len(req.segs)
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
	if p := r.asked; p != nil {
		r.asked = nil
		if o.asked = ok && plain == spin.Success; !o.asked {
			p.job = releaseJob
			r.unask(p)
		}
	}
	n := r.batch.made - mark
	if before == recycle && req.action == send {
		n++
	}
	acc.Sent += uint64(n)
	req.sent += n
	return o
}

// contain makes a call and contains its panics: ok is false if it did panic.
func (r *runner) contain(c *Context, x call) (code spin.Code, ok bool) {
	defer func() {
		if ok {
			return
		}
		v := recover()
		r.why = fmt.Errorf("%v", v)
		r.books.of(r.pool, c).Panics++
		r.pool.emit(spin.HandlerPanic, c, r.batch.port.hpu, func() string { return fmt.Sprintf("%v\n%s", v, debug.Stack()) })
	}()
	r.why = nil
	switch x.kind {
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
		x.msg.binding, r.why = c.msgs.cfg.Binder.Bind(x.msg)
	case unbindCall:
		c.msgs.cfg.Binder.Unbind(x.msg, &r.unbound)
	case contCall:
		code = x.cont.then(&r.her, &x.cont.reply)
	case lastCall:
		code = x.cont.last(&r.done, &x.cont.reply)
	case initCall:
		if r.why = c.handlers.Init(&r.her.Task); r.why != nil {
			code = spin.Fail // what it has sent is not
		}
	case timerCall:
		code = c.handlers.Timer(&r.her.Task)
	}
	return code, true
}

func (r *runner) complain(c *Context, code spin.Code, acc *spin.ContextStats) {
	if code == spin.Drop {
		acc.Dropped++
		return
	}
	acc.Failed++
	r.pool.emit(spin.HandlerFailed, c, r.batch.port.hpu, func() string {
		if r.why != nil {
			return fmt.Sprintf("the handler returned %v: %v", code, r.why)
		}
		return fmt.Sprintf("the handler returned %v", code)
	})
}
