// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"errors"
	"slices"
	"sync"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/spin"
)

// Errors that callers tell apart.
var (
	ErrClosed  = errors.New("NIC is closed")
	ErrRemoved = errors.New("context is not installed")
	ErrTable   = errors.New("matching table is full")
	ErrNumbers = errors.New("no context number is free")
	ErrCredit  = errors.New("not enough credit left")
)

// A Context is an execution context that was installed. Its methods are safe
// for concurrent use.
type Context struct {
	n      *NIC
	spec   ContextSpec      // as completed, and nobody's to change after Install
	loaded *loader.Handlers // in the kernel, nil for handlers in Go
	hook   loader.Hook      // that its packets come from
	why    error            // that is not the NIC's own hook; nil: it is
	tier   tier
	queue  eventQueue // where ends of messages go; nil: nowhere
	letGo  func()     // of queue

	// What it has of the program, from Install until its last packet is back.
	id      uint16
	buckets bpf.Range

	// Held while it is activated, deactivated or removed, which happens without the
	// NIC's lock; taken before that.
	op     sync.Mutex
	inited bool // the tier is armed; guarded by op

	// Guarded by the NIC's lock. Each has one file that writes it: life, table,
	// credit and fair.
	active bool
	rules  rules
	credit credit
	load   load

	// What is not the context's of counters that only grow.
	refused, spilled uint64     // by the program's counters, before the number was this context's
	counting         sync.Mutex // guards what follows
	cleared          [spin.UserCounters]spin.UserCounter
}

// ID returns the context's number.
func (c *Context) ID() int { return int(c.id) }

// Name returns the context's name.
func (c *Context) Name() string { return c.spec.Name }

// Rulesets returns the numbers of the context's rulesets, none while it is not active.
func (c *Context) Rulesets() []int {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	return slices.Clone(c.rules.slots)
}

// Stats returns what the context's handlers did, less what was cleared.
func (c *Context) Stats() spin.ContextStats {
	c.counting.Lock()
	defer c.counting.Unlock()
	s := c.tier.Stats()
	for i, old := range c.cleared {
		s.User[i].Sum -= old.Sum
		s.User[i].Count -= old.Count
	}
	return s
}

// Messages returns what became of the context's messages, and false if it has none.
func (c *Context) Messages() (spin.MessageStats, bool) { return c.tier.Messages() }

// OwnMaps returns the maps of handlers in eBPF that are theirs alone, and sections of their global variables. It
// counts the entries of hashes, which takes a system call for each. It returns nil if the context has none, or is removed.
func (c *Context) OwnMaps() ([]spin.OwnMap, error) {
	if t, ok := c.tier.(mapped); ok {
		return t.ownMaps()
	}
	return nil, nil
}

// ClearCounters zeroes the context's user counters and returns what they were.
func (c *Context) ClearCounters() [spin.UserCounters]spin.UserCounter {
	c.counting.Lock()
	defer c.counting.Unlock()
	now := c.tier.Stats().User
	was := now
	for i, old := range c.cleared {
		was[i].Sum -= old.Sum
		was[i].Count -= old.Count
	}
	c.cleared = now
	return was
}

// Stuck returns how many handlers of the context are past their limit and have not
// returned, also of one that was removed.
func (c *Context) Stuck() int { return c.tier.Stuck() }

// SetTap has a tap see the context's frames; nil ends that. It sees none in a tier that
// does not take frames to user space.
func (c *Context) SetTap(t hpu.Tap) {
	if tier, ok := c.tier.(tappable); ok {
		tier.SetTap(t)
	}
}
