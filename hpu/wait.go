// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/internal/clock"
)

const (
	// Like the kernel's halt polling: a sleep that was shorter than this
	// would better have been spun through.
	maxWindow   = int64(200 * time.Microsecond)
	firstWindow = int64(50 * time.Microsecond)

	// A spinning worker offers its CPU to others this often, and at once when it
	// begins to spin. If the peer that it waits for, or the application that it has
	// asked, wants the same CPU, that is what lets it run at all.
	yieldEvery = 16

	// How long to sleep while something is under way that wakes nobody: soon
	// for completions and a full tx ring, and longer and longer while these do
	// not move (the link may be down); later for buffers that may be lost.
	soon  = 1  // ms
	later = 20 // ms
)

// A waiter decides what its runner does when there is nothing to do.
type waiter struct {
	r      *runner
	left   int   // what tidy left the last time
	nap    int   // how long to sleep because of that, ms
	window int64 // how long to spin, ns
	since  int64 // when it began to be idle; 0: it is not
	spins  int
}

// worked says that there was something to do.
func (w *waiter) worked() { w.since = 0 }

// idle spins one round, or sleeps until something happens.
func (w *waiter) idle() {
	r := w.r
	now := clock.Monotonic()
	if w.since == 0 {
		w.since = now
		w.spins = 0
	}
	left := r.tidy()
	spin := false
	switch r.pool.cfg.Wait {
	case Spin:
		spin = true
	case Adaptive:
		spin = now-w.since < w.window
	}
	if spin {
		if w.spins++; w.spins%yieldEvery == 1 {
			unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		}
		r.look(now)
		return
	}
	if left == 0 && r.w.hasWork.Load() {
		return // it had to wait for the room that tidy has just made
	}
	timeout := -1
	if r.outstanding() || r.w.sweeps() {
		timeout = later
	}
	if nap := w.napFor(left); nap > 0 {
		timeout = nap
	}
	if due := r.nextTimer(); due >= 0 && (timeout < 0 || due < timeout) {
		timeout = due
	}
	if !r.arm() {
		return
	}
	r.sleep(timeout)
	r.disarm()
	woke := clock.Monotonic()
	w.adapt(woke - now)
	w.since = woke
}

// napFor returns how long to sleep, in ms, when left frames are there that wake
// nobody; 0: not at all.
func (w *waiter) napFor(left int) int {
	switch {
	case left == 0:
		w.nap = 0
	case left != w.left:
		w.nap = soon
	default:
		w.nap = min(2*w.nap, later)
	}
	w.left = left
	return w.nap
}

// adapt learns from a sleep.
func (w *waiter) adapt(slept int64) {
	if slept <= maxWindow {
		w.window = min(max(2*w.window, firstWindow), maxWindow)
	} else if w.window /= 2; w.window < firstWindow/8 {
		w.window = 0
	}
}

// sleep waits for a packet on one of the worker's rings, a call of wake, or the
// timeout in ms, -1 for none. Nothing is missed: the rings are level-triggered.
func (r *runner) sleep(timeout int) {
	var events [16]unix.EpollEvent
	n, err := unix.EpollWait(r.w.ep, events[:], timeout)
	if err != nil {
		return // EINTR
	}
	for _, e := range events[:n] {
		if int(e.Fd) == r.w.waker {
			var buf [8]byte
			_, _ = unix.Read(r.w.waker, buf[:])
		}
	}
}

// tidy takes completions, kicks rings that wanted another kick, and returns
// credit that leaked. It returns how many frames are left on their way out, or
// to a fill ring that does not take them.
func (r *runner) tidy() (left int) {
	for _, p := range r.w.ports {
		// A device that took no more a moment ago is not asked every round
		// of a worker that spins: each time is a system call.
		if p.unsent && clock.Monotonic()-p.kicked >= soon*int64(time.Millisecond) {
			r.kick(p)
		}
	}
	for i := range r.pool.inTx {
		if r.pool.inTx[i].Load() > 0 || len(r.w.due[i].frames) > 0 {
			r.exchange(i)
			left += max(int(r.pool.inTx[i].Load()), 0) + len(r.w.due[i].frames)
		}
	}
	if r.w.sweeps() {
		r.pool.leaky.Store(false)
		for i := range r.pool.contexts {
			if c := r.pool.contexts[i].Load(); c != nil && c.leaky.Load() {
				c.leaky.Store(false)
				if !r.pool.Idle(c) || !c.sweep(r.pool) {
					c.leaky.Store(true)
					r.pool.leaky.Store(true)
				}
			}
		}
	}
	return left
}

// look calls outstanding now and then: a worker that never sleeps loses packets
// too.
func (r *runner) look(now int64) {
	if now-r.looked >= int64(later*time.Millisecond) {
		r.looked = now
		r.outstanding()
	}
}

// outstanding looks after buffers that are out, perhaps lost, and tells whether
// there are any.
func (r *runner) outstanding() (any bool) {
	for _, p := range r.w.ports {
		if p.occupancy() != 0 {
			any = true
			r.checkLoss(p)
		}
	}
	return any
}
