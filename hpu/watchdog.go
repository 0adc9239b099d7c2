// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"fmt"
	"runtime"
	"time"
)

// watch looks after handlers that do not return. It wakes a few times in each
// time limit; the runners pay one atomic swap a packet for it.
func (p *Pool) watch() {
	defer close(p.watched)
	tick := time.NewTicker(max(p.cfg.Limit/4, time.Millisecond))
	defer tick.Stop()
	type look struct {
		state uint64
		since time.Time
	}
	last := make([]look, len(p.workers))
	for {
		select {
		case <-p.stop:
			return
		case <-tick.C:
		}
		now := time.Now()
		for i, w := range p.workers {
			r := w.current.Load()
			s := r.state.Load()
			if s != last[i].state || stateOf(s) != running {
				last[i] = look{s, now}
				continue
			}
			if now.Sub(last[i].since) >= p.cfg.Limit {
				p.abandon(w, r, s)
			}
		}
	}
}

// abandon gives up on a runner that has been in one handler for too long. Its
// context stops; the worker's HPUs go on with another thread.
func (p *Pool) abandon(w *worker, r *runner, s uint64) {
	c := p.contexts[contextOf(s)].Load()
	if !r.state.CompareAndSwap(s, abandoned) {
		return // it has returned after all
	}
	p.stuck.Add(1)
	// The stuck thread may keep a processor busy for ever. Leave the others
	// as many as they had.
	runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + 1)
	if c != nil {
		c.stopped.Store(true)
		c.add(&ContextStats{Overruns: 1})
		p.emit(Event{
			Kind: HandlerOverrun, Context: c.id, Name: c.name, HPU: r.port.hpu,
			Detail: fmt.Sprintf("a handler has run for more than %v: the context is stopped, its thread replaced", p.cfg.Limit),
		})
	}
	p.launch(w, &takeover{from: r, k: indexOf(s)})
	p.wg.Done() // r's
}
