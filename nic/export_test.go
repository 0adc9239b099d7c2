// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"sync/atomic"
	"time"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/xsk"
)

// Program returns the counters of the NIC's XDP program.
func (n *NIC) Program() (loader.Stats, error) { return n.ingress.Stats() }

// InFlight returns the context's buffers that the program has handed out and
// that have not come back, summed over all queues.
func (c *Context) InFlight() (sum int) {
	for q := range c.n.queues {
		s := c.n.ingress.Queue(q)
		sum += int(int32(atomic.LoadUint32(&s.Issued[c.id]) - atomic.LoadUint32(&s.Done[c.id])))
	}
	return sum
}

// HeldBuckets returns how many of the context's buckets have users.
func (c *Context) HeldBuckets() (held int) {
	buckets := c.n.ingress.Buckets()[c.buckets.Base:][:c.buckets.Size]
	for i := range buckets {
		if atomic.LoadUint64(&buckets[i])>>32 != 0 {
			held++
		}
	}
	return held
}

// SetCredit overrules what deal gave to the context and returns that.
func (c *Context) SetCredit(n uint32) uint32 {
	return atomic.SwapUint32(&c.n.ingress.Share().Credit[c.id], n)
}

// SocketStats returns the statistics of all sockets.
func (n *NIC) SocketStats() (all []xsk.Stats, err error) {
	for _, s := range n.sockets {
		st, err := s.Stats()
		if err != nil {
			return nil, err
		}
		all = append(all, st)
	}
	return all, nil
}

// SpareFrames is how many frames there are for sends of handlers and of the NIC.
const SpareFrames = spare

// MaxBuckets is what all contexts share.
const MaxBuckets = bpf.MaxBuckets

// SetRemoveTime sets how long Remove, Deactivate and Close wait for packets.
func (n *NIC) SetRemoveTime(d time.Duration) { n.drain = d }

// SetUnfair has contexts that compete for HPUs keep all of their credit.
func (n *NIC) SetUnfair(on bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.unfair = on
}
