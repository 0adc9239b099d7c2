// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/spin"
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

// HPUTime returns what a look charges to the context, of all that its handlers took.
func (c *Context) HPUTime() time.Duration {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	c.measure(time.Millisecond, false)
	return c.load.handlers
}

// LoadBy has objects loaded by another function than Object.Load.
func (n *NIC) LoadBy(f func(*Object, loader.HandlersConfig) (*loader.Handlers, error)) { n.load = f }

// A Recorder is a tier that runs nothing: it notes what it is asked for.
type Recorder struct {
	mu    sync.Mutex
	calls []string
	fails map[string]error // by call
	runs  spin.ContextStats
}

// ServeBy has contexts that are installed from now on served by a recorder; nil for HPUs.
func (n *NIC) ServeBy(r *Recorder) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.serve = n.newTier
	if r != nil {
		n.serve = func(*Context) (tier, error) { return r, nil }
	}
}

// Calls returns what it was asked for since the last time.
func (r *Recorder) Calls() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	calls := r.calls
	r.calls = nil
	return calls
}

// Fail has a call fail; nil ends that.
func (r *Recorder) Fail(call string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fails == nil {
		r.fails = map[string]error{}
	}
	r.fails[call] = err
}

// Count counts a handler that has returned, and 5 in user counter 3.
func (r *Recorder) Count() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.runs.Handled++
	r.runs.User[3].Sum += 5
	r.runs.User[3].Count++
}

func (r *Recorder) note(call string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, call)
	return r.fails[call]
}

func (r *Recorder) install() error            { return r.note("install") }
func (r *Recorder) arm() error                { return r.note("arm") }
func (r *Recorder) drain(time.Duration) error { return r.note("drain") }
func (r *Recorder) stop(time.Duration) error  { return r.note("stop") }
func (r *Recorder) close(time.Duration)       {}

func (r *Recorder) Stats() spin.ContextStats {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.runs
}

func (r *Recorder) Messages() (spin.MessageStats, bool) { return spin.MessageStats{Started: 7}, true }
func (r *Recorder) hpuTime() time.Duration              { return 0 }
func (r *Recorder) Stopped() bool                       { return false }
func (r *Recorder) Stuck() int                          { return 2 }

// SetExpireTick has NICs look seldom for messages whose time is up, until the function that it returns is called.
func SetExpireTick(d time.Duration) (undo func()) {
	was := expireTick
	expireTick = d
	return func() { expireTick = was }
}

// SetHookPatience sets for how long a program stays attached that no context needs.
func (n *NIC) SetHookPatience(d time.Duration) {
	n.hooks.mu.Lock()
	defer n.hooks.mu.Unlock()
	n.hooks.patience = d
}
