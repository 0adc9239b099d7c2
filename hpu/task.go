// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"errors"
	"fmt"

	"github.com/xspin/xspin/spin"
	"github.com/xspin/xspin/xsk"
)

// A Task is where a handler runs, and what it may do there. It belongs to one
// handler until that returns, and must not be used later or by other goroutines.
type Task struct {
	r    *runner
	ctx  *Context
	acc  *spin.ContextStats
	port *port
	msg  *Message
}

// HPU returns the number of the HPU that runs the handler.
func (t *Task) HPU() int { return t.port.hpu }

// HPUs returns how many HPUs the NIC has.
func (t *Task) HPUs() int { return len(t.r.pool.cfg.Queues[0].Rings) }

// Context returns the execution context that the handler belongs to.
func (t *Task) Context() *Context { return t.ctx }

// Message returns the message that the handler works on, and nil in contexts
// without messages.
func (t *Task) Message() *Message { return t.msg }

// Now returns CLOCK_MONOTONIC in nanoseconds, cheaply.
func (t *Task) Now() int64 { return t.r.now() }

// SendNew returns n bytes, of unknown content, of a new frame to be sent when
// the handler has returned, ahead of the packet itself. A handler that fails
// sends none of them.
func (t *Task) SendNew(n int) ([]byte, error) {
	if limit := t.r.pool.cfg.frameRoom(); n < 14 || n > limit {
		return nil, fmt.Errorf("send new frame of %d bytes: %w: want 14 to %d", n, ErrSize, limit)
	}
	if !t.r.batch.reserve(1) {
		t.acc.SendFull++
		return nil, fmt.Errorf("send new frame: HPU %d, queue %d: %w", t.port.hpu, t.port.queue, ErrFull)
	}
	addr, ok := t.r.takeSpare()
	if !ok {
		t.r.batch.room++
		t.acc.SendFull++
		return nil, fmt.Errorf("send new frame: %w", ErrFrames)
	}
	t.r.batch.add(xsk.Desc{Addr: addr, Len: uint32(n)})
	return t.r.pool.cfg.Memory.Bytes(addr, n), nil
}

// Count adds v to user counter i of the context, 0..UserCounters-1, and one to
// how often. Another i panics, which like any panic of a handler is contained.
func (t *Task) Count(i int, v uint64) {
	c := &t.acc.User[i]
	c.Sum += v
	c.Count++
}

// Fail says why the handler fails, and is what it returns: Segv if the error wraps
// ErrBounds, or else Fail.
//
//	return h.Fail(fmt.Errorf("a message of %d bytes: want %d", n, want))
func (t *Task) Fail(err error) spin.Code {
	t.r.why = err
	if errors.Is(err, spin.ErrBounds) {
		return spin.Segv
	}
	return spin.Fail
}

// Logf writes a line to the context's log.
func (t *Task) Logf(format string, args ...any) {
	if sink := t.ctx.res.Log; sink != nil {
		t.r.line = fmt.Appendf(t.r.line[:0], format, args...)
		sink.Log(t.Now(), t.port.hpu, t.r.line)
		return
	}
	t.r.pool.cfg.Logger.Info(fmt.Sprintf(format, args...), "context", t.ctx.name, "hpu", t.port.hpu)
}
