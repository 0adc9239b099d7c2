// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/loader"
)

// removeTime is how long Remove waits for packets that are on their way.
const removeTime = 2 * time.Second

// Install makes a context: everything it needs but its rulesets, so that no
// packet comes before Activate.
func (n *NIC) Install(spec ContextSpec) (_ *Context, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("install context %q on %s: %w", spec.Name, n.iface.Name, err)
		}
	}()
	if spec, err = spec.Resolve(n.cfg.HPUs); err != nil {
		return nil, err
	}
	hook, why := n.hookOf(&spec)
	if !spec.HostActivated { // these have no packets
		// Without the lock, as what follows: a verifier takes seconds for some objects, and may crash.
		if err := n.useHook(hook); err != nil {
			return nil, err
		}
		defer func() {
			if err != nil {
				n.leaveHook(hook)
			}
		}()
	}
	var loaded *loader.Handlers
	if spec.Kernel != nil {
		var failed error
		if loaded, failed, err = n.loadAnywhere(&spec, hook); err != nil {
			return nil, err
		}
		if failed != nil {
			hook, why = loader.XDP, failed
		}
		defer func() {
			if err != nil {
				_ = loaded.Close()
			}
		}()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil, ErrClosed
	}
	n.reap()
	id, err := n.freeID()
	if err != nil {
		return nil, err
	}
	c := &Context{n: n, spec: spec, id: id, loaded: loaded, hook: hook, why: why, rules: rules{numbers: spec.Numbers}}
	c.queue, c.letGo = spec.queue()
	defer func() {
		if err != nil {
			c.letGo()
		}
	}()
	if spec.Policy != ByPacket && !spec.HostActivated {
		if c.buckets, err = n.buckets.take(min(pow2(spec.Messages), bpf.MaxBuckets)); err != nil {
			return nil, err
		}
		defer func() {
			if err != nil {
				n.buckets.give(c.buckets)
			}
		}()
	}
	if c.tier, err = n.serve(c); err != nil {
		return nil, err
	}
	prog, err := n.ingress.Stats()
	if err != nil {
		return nil, err
	}
	c.refused, c.spilled = prog.Refused[id], prog.Spilled[id]
	place := spec.Place
	c.spec.Place = nil // or a context would keep all of its lives
	if place != nil && !n.places[place] {
		return nil, fmt.Errorf("place of context %q: %w, or not cleared", place.spec.Name, ErrRemoved)
	}
	delete(n.places, place)
	n.contexts[id] = c
	back := func() {
		delete(n.contexts, id)
		if place != nil {
			n.places[place] = true
		}
	}
	if err := n.shares(); err != nil {
		back()
		return nil, err
	}
	if err := c.tier.install(); err != nil {
		back()
		return nil, errors.Join(err, n.shares())
	}
	if place != nil {
		c.credit.granted = place.credit.granted - min(place.credit.granted, uint32(n.inFlight(place)))
		atomic.StoreUint32(&n.ingress.Share().Credit[id], c.credit.granted)
	}
	n.deal()
	return c, nil
}

// freeID returns a context id of which nothing is on its way any more.
func (n *NIC) freeID() (uint16, error) {
	for id := range uint16(bpf.MaxContexts) {
		if n.contexts[id] == nil && n.retired[id] == nil {
			return id, nil
		}
	}
	return 0, fmt.Errorf("%w: all %d are taken", ErrNumbers, bpf.MaxContexts)
}

// reap frees numbers and buckets of removed contexts whose last packets have
// come back.
func (n *NIC) reap() {
	for id, old := range n.retired {
		if old.tier.stop(0) == nil {
			old.letGo()
			delete(n.retired, id)
			n.buckets.give(old.buckets)
		}
	}
}

// Activate arms the context's rulesets: from here on packets come. The first time,
// the context's init handler runs before that; with an error of it the context is
// not activated, and Activate may be tried again.
func (n *NIC) Activate(c *Context) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("activate context %q on %s: %w", c.spec.Name, n.iface.Name, err)
		}
	}()
	c.op.Lock()
	defer c.op.Unlock()
	if err := n.init(c); err != nil {
		return err
	}
	news := false
	err = n.enter(c, func() error {
		if c.active {
			return nil
		}
		if err := n.take(step{on: []*Context{c}}); err != nil {
			return err
		}
		c.active, news = true, true
		n.stir()
		return nil
	})
	if err != nil {
		return err
	}
	defer n.ops.Done()
	if news {
		n.warnOfSockets(c)
		for _, w := range n.warnings(c) {
			n.cfg.Logger.Warn(w, "interface", n.iface.Name, "context", c.spec.Name)
		}
	}
	return nil
}

// init runs the context's init handler, if that has not been done. The handler may
// take its time: not under the NIC's lock.
func (n *NIC) init(c *Context) error {
	if c.inited {
		return nil
	}
	if err := n.enter(c, func() error { return nil }); err != nil {
		return err
	}
	defer n.ops.Done()
	if err := c.tier.arm(); err != nil {
		return err
	}
	c.inited = true
	return nil
}

func (n *NIC) has(c *Context) error {
	if n.closed {
		return ErrClosed
	}
	if n.contexts[c.id] != c {
		return ErrRemoved
	}
	return nil
}

// enter has f look at or change a context that is there. If it returns nil, Close waits
// for ops.Done: what takes longer happens until then, without the NIC's lock.
func (n *NIC) enter(c *Context, f func() error) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	err := n.has(c)
	if err == nil {
		err = f()
	}
	if err == nil {
		n.ops.Add(1)
	}
	return err
}

// deactivate takes the context's rulesets out of the table, and enters.
func (n *NIC) deactivate(c *Context) error {
	return n.enter(c, func() error {
		if err := n.take(step{off: []*Context{c}}); err != nil {
			return err
		}
		c.active = false
		return nil
	})
}

// Deactivate disarms the context's rulesets, whose numbers are free from then on, and
// waits, for a bounded time, until what was on its way has been handled, and the
// application told, if it has room; an error says what has not. Messages stay open, and
// timers run. It can be activated again.
func (n *NIC) Deactivate(c *Context) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("deactivate context %q on %s: %w", c.spec.Name, n.iface.Name, err)
		}
	}()
	c.op.Lock()
	defer c.op.Unlock()
	if err := n.deactivate(c); err != nil {
		return err
	}
	defer n.ops.Done()
	return c.tier.drain(n.drain)
}

// Remove takes a context away: first its rulesets, then, when the packets on
// their way have been handled, the rest. It returns after a bounded time, and
// then no handler of the context runs. An error says that packets are still
// held, by a handler that is stuck or by Keep; their memory and the context's
// number stay reserved until they come back. Of a context that was cleared it takes
// what Clear has left.
func (n *NIC) Remove(c *Context) error { return n.remove(c, false) }

// Clear is Remove, but that the context's credit stays reserved: for another one
// that is installed in its Place, or until it is removed. So one that starts over
// finds what it had, whatever the others take meanwhile.
func (n *NIC) Clear(c *Context) error { return n.remove(c, true) }

func (n *NIC) remove(c *Context, keep bool) error {
	c.op.Lock()
	defer c.op.Unlock()
	n.mu.Lock()
	if n.places[c] && !keep && !n.closed {
		delete(n.places, c)
		err := n.rebalance()
		n.mu.Unlock()
		return err
	}
	n.mu.Unlock()
	if err := n.deactivate(c); err != nil {
		return fmt.Errorf("remove context %q: %w", c.spec.Name, err)
	}
	defer n.ops.Done()
	// Others need not wait. The context is there until it has drained, so that its
	// number and its credit are nobody else's.
	err := c.tier.stop(n.drain)
	if err == nil {
		c.letGo()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	id := c.id
	delete(n.contexts, id)
	if !c.spec.HostActivated {
		n.leaveHook(c.hook)
	}
	atomic.StoreUint32(&n.ingress.Share().Credit[id], 0)
	if keep {
		n.places[c] = true
	}
	if err != nil {
		// The buckets go with the id: late packets still return their uses.
		n.retired[id] = c
		return errors.Join(fmt.Errorf("remove context %q: %w", c.spec.Name, err), n.rebalance())
	}
	n.buckets.give(c.buckets)
	return n.rebalance()
}

// Drained tells whether all packets have come back of a context that was removed: if
// Remove has returned an error, they may take their time. False once the NIC is closed.
func (n *NIC) Drained(c *Context) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return false
	}
	n.reap()
	return n.contexts[c.id] != c && n.retired[c.id] != c
}
