// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/xspin/xspin/spin"
)

// maxTick bounds how long a worker may sleep while buffers are out that came
// after it had fallen asleep, and were lost.
const maxTick = 250 * time.Millisecond

// watch looks after handlers that do not return, and after workers that nothing
// wakes. It looks a few times in each time limit; the runners pay one atomic
// swap a packet for it.
func (p *Pool) watch() {
	defer close(p.watched)
	every := min(max(p.cfg.Limit/4, time.Millisecond), maxTick)
	tick := time.NewTicker(every)
	defer tick.Stop()
	// The time alone proves nothing: the whole process may have been stopped.
	enough := int(p.cfg.Limit / every)
	type look struct {
		state uint64
		since time.Time
		count int // of looks that found the same again
	}
	last := make([]look, len(p.workers))
	for {
		select {
		case <-p.stop:
			return
		case <-tick.C:
		}
		p.emitHeld()
		now := time.Now()
		for i, w := range p.workers {
			r := w.current.Load()
			s, l := r.state.Load(), &last[i]
			switch {
			case stateOf(s) != running:
				*l = look{}
				if w.occupied() || w.sweeps() {
					w.wake()
				}
			case s != l.state:
				*l = look{state: s, since: now}
			default:
				l.count++
				if l.count >= enough && now.Sub(l.since) >= p.cfg.Limit {
					p.abandon(w, r, s)
					*l = look{} // its successor counts from 0, and its state may be the same word
				}
			}
		}
	}
}

// abandon gives up on a runner that has been in one handler for too long. Its
// context stops; the worker's HPUs continue on another thread.
func (p *Pool) abandon(w *worker, r *runner, s uint64) {
	c := p.contexts[contextOf(s)].Load()
	r.stuckIn = c // before leave can look
	if c != nil {
		c.stuck.Add(1)
	}
	if !r.state.CompareAndSwap(s, abandoned) {
		if c != nil {
			c.stuck.Add(-1)
		}
		return // it has returned after all
	}
	p.stuck.Add(1)
	// The stuck thread may keep a processor busy for ever. Leave the others
	// as many as they had.
	addProcs(1)
	if c != nil {
		c.halt.Or(haltStopped)
		c.add(&spin.ContextStats{Overruns: 1})
		p.emit(spin.HandlerOverrun, c, r.batch.port.hpu, func() string {
			return fmt.Sprintf("a handler has run for more than %v: the context is stopped, its thread replaced", p.cfg.Limit)
		})
	}
	p.launch(w, &takeover{from: r, k: indexOf(s)})
	p.wg.Done() // r's
}

var procs sync.Mutex

// addProcs changes how many threads run Go code at the same time.
func addProcs(n int) {
	procs.Lock()
	defer procs.Unlock()
	runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + n)
}
