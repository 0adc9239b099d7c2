// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"sync/atomic"
	"time"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/spin"
)

// books is what a runner has counted for contexts and not yet told them.
type books struct {
	acc   [bpf.MaxContexts]*spin.ContextStats
	owner [bpf.MaxContexts]*Context // whose acc it is
	dirty []uint16
}

// of returns where to count for a context until the next publish.
func (b *books) of(p *Pool, c *Context) *spin.ContextStats {
	if b.owner[c.id] == c {
		return b.acc[c.id]
	}
	if b.owner[c.id] != nil { // the id has a new owner
		b.publish(p)
	}
	if b.acc[c.id] == nil {
		b.acc[c.id] = new(spin.ContextStats)
	}
	b.owner[c.id] = c
	b.dirty = append(b.dirty, c.id)
	return b.acc[c.id]
}

// publish merges what was counted into the contexts, and tells the program how
// many packets to put on one HPU before it looks for another: as many as are
// handled in about the time of a wakeup.
func (b *books) publish(p *Pool) {
	for _, id := range b.dirty {
		c, a := b.owner[id], b.acc[id]
		c.add(a)
		if a.Handled > 0 {
			n := quantum(a.HandlerSum / time.Duration(a.Handled))
			if q := &p.cfg.Share.Quantum[id]; atomic.LoadUint32(q) != n {
				atomic.StoreUint32(q, n)
			}
		}
		*a = spin.ContextStats{}
		b.owner[id] = nil
	}
	b.dirty = b.dirty[:0]
}

const (
	quantumTime = 20 * time.Microsecond
	maxQuantum  = 512
)

// quantum returns how many handlers that take mean each fill quantumTime, at
// least one and at most maxQuantum.
func quantum(mean time.Duration) uint32 {
	return uint32(min(max(quantumTime/max(mean, 1), 1), maxQuantum))
}
