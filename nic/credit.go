// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"cmp"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/xspin/xspin/bpf"
)

// minCredit is what a context gets at least: less than a batch makes no sense.
const minCredit = 8

// credit is how many buffers of a context may be in flight on a queue, while it does not
// compete for HPUs; what it has of that is in the program's memory, see fair.
type credit struct {
	due     uint32 // see shares
	granted uint32 // of that, see deal
}

// rebalance deals out the credit of a queue again, when contexts have come or gone.
func (n *NIC) rebalance() error {
	err := n.shares()
	n.deal()
	return err
}

// shares says how much credit is due to each context: all together no more than a
// queue's rx rings and its fill ring hold, so that neither overflows. Contexts that
// asked for none share what is left. With an error all is as it was.
func (n *NIC) shares() error {
	total, equals := n.cfg.Ring, 0
	count := func(c *Context) {
		if c.spec.Credits == 0 && c.spec.credited() {
			equals++
		}
		total -= c.spec.Credits
	}
	n.each(count)
	each := 0
	if equals > 0 {
		each = total / equals
	}
	if total < 0 || equals > 0 && each < minCredit {
		return fmt.Errorf("%w: %d for each queue, contexts ask for %d, %d more share the rest, at least %d each: lower Credits or raise Config.Ring", ErrCredit, n.cfg.Ring, n.cfg.Ring-total, equals, minCredit)
	}
	n.each(func(c *Context) {
		if c.credit.due = uint32(each); c.spec.Credits > 0 || !c.spec.credited() {
			c.credit.due = uint32(c.spec.Credits)
		}
	})
	n.patience = time.Millisecond
	n.stir() // should deal find too little
	return nil
}

// each calls f for all who have credit: contexts, and those that left their place.
func (n *NIC) each(f func(*Context)) {
	for _, c := range n.contexts {
		f(c)
	}
	for c := range n.places {
		f(c)
	}
}

// deal gives contexts the credit that is due to them, of what nobody has: whoever has too
// much keeps that until its packets have come back, which an application may put off as
// long as it likes. What is missing is given later, see fair: nobody waits for it.
func (n *NIC) deal() {
	credit := n.ingress.Share().Credit[:]
	n.each(func(c *Context) {
		c.credit.granted = min(c.credit.granted, c.credit.due)
		if id := c.id; n.contexts[id] == c && atomic.LoadUint32(&credit[id]) > c.credit.granted {
			atomic.StoreUint32(&credit[id], c.credit.granted)
		}
	})
	free := n.cfg.Ring
	for q := range n.queues {
		used := 0
		n.each(func(c *Context) { used += max(int(c.credit.granted), n.onQueue(c, q)) })
		for _, c := range n.retired {
			if !n.places[c] {
				used += n.onQueue(c, q)
			}
		}
		free = min(free, n.cfg.Ring-used)
	}
	var short []*Context
	n.each(func(c *Context) {
		if c.credit.granted < c.credit.due {
			short = append(short, c)
		}
	})
	slices.SortFunc(short, func(a, b *Context) int {
		return cmp.Or(cmp.Compare(a.credit.granted, b.credit.granted), cmp.Compare(a.id, b.id))
	})
	n.short = false
	for _, c := range short {
		more := min(c.credit.due-c.credit.granted, uint32(max(free, 0)))
		c.credit.granted += more
		free -= int(more)
		if id := c.id; n.contexts[id] == c && !c.load.lowered {
			atomic.StoreUint32(&credit[id], c.credit.granted)
		}
		n.short = n.short || c.credit.granted < c.credit.due
	}
}

// onQueue returns the context's buffers in flight on a queue, also if it was removed.
func (n *NIC) onQueue(c *Context, q int) int {
	id := c.id
	if n.contexts[id] != c && n.retired[id] != c {
		return 0 // and its number may be another's
	}
	s := n.ingress.Queue(q)
	return int(atomic.LoadUint32(&s.Issued[id]) - atomic.LoadUint32(&s.Done[id]))
}

// inFlight returns them on the queue with the most.
func (n *NIC) inFlight(c *Context) (most int) {
	for q := range n.queues {
		most = max(most, n.onQueue(c, q))
	}
	return most
}

// out returns the context's buffers in flight, on all queues.
func (n *NIC) out(id uint16) (sum int) {
	for q := range n.queues {
		s := n.ingress.Queue(q)
		sum += int(int32(atomic.LoadUint32(&s.Issued[id]) - atomic.LoadUint32(&s.Done[id])))
	}
	return sum
}

// bucketRanges hands out ranges of buckets, powers of two, aligned: a buddy
// system without the bookkeeping, which few contexts need.
type bucketRanges struct{ used map[int]int }

func newBucketRanges() bucketRanges { return bucketRanges{used: map[int]int{}} }

func (a bucketRanges) take(size int) (bpf.Range, error) {
	for base := 0; base+size <= bpf.MaxBuckets; base += size {
		free := true
		for b, n := range a.used {
			if base < b+n && b < base+size {
				free = false
				break
			}
		}
		if free {
			a.used[base] = size
			return bpf.Range{Base: base, Size: size}, nil
		}
	}
	return bpf.Range{}, fmt.Errorf("no %d contiguous message buckets are free, of %d in all: lower Messages", size, bpf.MaxBuckets)
}

// give takes a range back. An empty one, of contexts without, is nobody's.
func (a bucketRanges) give(r bpf.Range) {
	if r.Size > 0 {
		delete(a.used, r.Base)
	}
}
