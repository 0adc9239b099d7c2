// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/matcher"
)

// The matching table: which ruleset has which number, and what the program goes by.
// All but Renumber, Replace and follow want the NIC's lock.

// rules are where a context's rulesets are in the matching table.
type rules struct {
	numbers []int    // that they are to have, nil for any
	slots   []int    // that they have, while the context is active
	matched []uint64 // by ruleset: what the program's counter was when the number became the context's
}

// A step is a change of the table.
type step struct {
	off     []*Context         // leave it
	numbers map[*Context][]int // that contexts have from now on, or will have
	on      []*Context         // come into it
}

// take changes the table, for all packets at once. With an error all is as before.
func (n *NIC) take(s step) error {
	to, changes := map[*Context]rules{}, false
	taken := n.taken()
	leaves := func(c *Context) {
		maps.DeleteFunc(taken, func(_ int, by *Context) bool { return by == c })
	}
	for _, c := range s.off {
		changes = changes || len(c.rules.slots) > 0
		to[c] = rules{numbers: c.rules.numbers}
		leaves(c)
	}
	for c := range s.numbers {
		leaves(c)
	}
	var prog loader.Stats
	if len(s.numbers) > 0 || len(s.on) > 0 {
		var err error
		if prog, err = n.ingress.Stats(); err != nil {
			return err
		}
	}
	for c, numbers := range s.numbers {
		r := rules{numbers: slices.Clone(numbers)}
		for i, old := range c.rules.slots {
			s := numbers[i]
			if by := taken[s]; by != nil {
				return fmt.Errorf("ruleset number %d is wanted for context %q, and taken by context %q", s, c.spec.Name, by.spec.Name)
			}
			taken[s], changes = c, true
			r.slots = append(r.slots, s)
			r.matched = append(r.matched, prog.Matched[s]-(prog.Matched[old]-c.rules.matched[i]))
		}
		to[c] = r
	}
	for _, c := range s.on {
		slots, err := c.slots(taken)
		if err != nil {
			return err
		}
		n.warnOfAddresses(c)
		r := rules{numbers: c.rules.numbers, slots: slots}
		for _, s := range slots {
			taken[s], changes = c, true
			r.matched = append(r.matched, prog.Matched[s])
		}
		to[c] = r
	}
	before := map[*Context]rules{}
	for c, r := range to {
		before[c], c.rules = c.rules, r
	}
	if !changes {
		return nil
	}
	if err := n.publish(); err != nil {
		for c, r := range before {
			c.rules = r
		}
		return err
	}
	return nil
}

// taken says whose each ruleset number is.
func (n *NIC) taken() map[int]*Context {
	all := map[int]*Context{}
	for _, c := range n.contexts {
		for _, s := range c.rules.slots {
			all[s] = c
		}
	}
	return all
}

// Renumber gives contexts other ruleset numbers, one for each ruleset: those that are
// active in one step, so that they can change places, and a packet is matched by the old
// numbers or by the new ones; the others when they are activated. With an error all are
// as before. Packets that come at this very moment may be missing in RulesetStats.
func (n *NIC) Renumber(numbers map[*Context][]int) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("renumber rulesets on %s: %w", n.iface.Name, err)
		}
	}()
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.mayHave(numbers); err != nil {
		return err
	}
	return n.take(step{numbers: numbers})
}

// Replace puts contexts in the place of others, which are deactivated as these are activated,
// and gives more of them other numbers, as Renumber does: all in one step, so that a packet is
// handled by an old one or by a new one, and none by nobody. When it returns no handler of the
// old ones runs any more, and they can be removed. All of them are contexts in the kernel
// whose packets HPUs do not get. With an error all is as before.
func (n *NIC) Replace(old map[*Context]*Context, numbers map[*Context][]int) (err error) {
	if len(old) == 0 {
		return n.Renumber(numbers)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("replace contexts on %s: %w", n.iface.Name, err)
		}
	}()
	s := step{numbers: numbers}
	for c, by := range old {
		s.off, s.on = append(s.off, c), append(s.on, by)
	}
	all := slices.Concat(s.off, s.on)
	for i, c := range all {
		if _, is := numbers[c]; is || slices.Contains(all[:i], c) {
			return fmt.Errorf("context %q is there twice", c.spec.Name)
		}
		if c.spec.onHPUs() {
			return fmt.Errorf("context %q: HPUs have packets of it: deactivate it, then activate another", c.spec.Name)
		}
	}
	n.replacing.Lock() // or two of these might wait for each other's contexts
	defer n.replacing.Unlock()
	for _, c := range all {
		c.op.Lock()
		defer c.op.Unlock()
	}
	if err := n.change(s); err != nil {
		return err
	}
	defer n.ops.Done()
	for _, c := range s.on {
		n.warnOfSockets(c)
	}
	return nil
}

// change takes a step between contexts in the kernel, and enters.
func (n *NIC) change(s step) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.mayHave(s.numbers); err != nil {
		return err
	}
	for _, side := range []struct {
		contexts []*Context
		active   bool
	}{{s.off, true}, {s.on, false}} {
		for _, c := range side.contexts {
			if err := n.has(c); err != nil {
				return fmt.Errorf("context %q: %w", c.spec.Name, err)
			}
			if c.active != side.active {
				return fmt.Errorf("context %q: active is %v, want %v", c.spec.Name, c.active, side.active)
			}
		}
	}
	if err := n.take(s); err != nil {
		return err
	}
	for _, c := range s.off {
		c.active = false
	}
	for _, c := range s.on {
		c.active, c.inited = true, true // no init: none is in Go
	}
	n.stir()
	n.ops.Add(1)
	return nil
}

// mayHave tells whether contexts can have these numbers, but for who has them now.
func (n *NIC) mayHave(numbers map[*Context][]int) error {
	for c, to := range numbers {
		err := n.has(c)
		if err == nil {
			err = checkNumbers(to, len(c.spec.Rulesets))
		}
		if err != nil {
			return fmt.Errorf("context %q: %w", c.spec.Name, err)
		}
	}
	return nil
}

// slots finds the numbers of the context's rulesets, beside those that are taken.
func (c *Context) slots(taken map[int]*Context) ([]int, error) {
	if c.rules.numbers == nil {
		return freeSlots(taken, c.spec.First, len(c.spec.Rulesets))
	}
	for _, s := range c.rules.numbers {
		if by := taken[s]; by != nil {
			return nil, fmt.Errorf("ruleset number %d is taken by context %q", s, by.spec.Name)
		}
	}
	return slices.Clone(c.rules.numbers), nil
}

// freeSlots finds ruleset numbers: count in a row from first, or any.
func freeSlots(taken map[int]*Context, first, count int) (slots []int, err error) {
	for s := first; s < matcher.MaxRulesets && len(slots) < count; s++ {
		if by := taken[s]; by == nil {
			slots = append(slots, s)
		} else if first > 0 {
			return nil, fmt.Errorf("ruleset number %d is taken by context %q", s, by.spec.Name)
		}
	}
	if len(slots) < count {
		return nil, fmt.Errorf("%w: %d rulesets wanted, %d of %d are free", ErrTable, count, matcher.MaxRulesets-len(taken), matcher.MaxRulesets)
	}
	return slots, nil
}

// publish puts the table of all active contexts in force.
func (n *NIC) publish() error {
	n.gen++
	t := &matcher.Table{Generation: n.gen, Local: n.local(), Entries: map[int]matcher.Entry{}}
	contexts := map[uint16]loader.Delivery{}
	for id, c := range n.contexts {
		if len(c.rules.slots) == 0 { // not active, or without any
			continue
		}
		contexts[id] = c.spec.delivery(c.buckets, c.hook)
		for i, s := range c.rules.slots {
			t.Entries[s] = matcher.Entry{Ruleset: c.spec.Rulesets[i], Context: id, Format: c.spec.Format}
		}
	}
	return n.ingress.Publish(t, contexts)
}

// delivery says how the program delivers the context's packets.
func (s *ContextSpec) delivery(buckets bpf.Range, hook loader.Hook) loader.Delivery {
	if !s.onHPUs() {
		return loader.Delivery{Kernel: true, Hook: hook}
	}
	return loader.Delivery{
		Kernel:    s.Kernel != nil,
		HandsOver: s.Kernel != nil,
		Policy:    s.Policy,
		CoreMask:  s.CoreMask,
		Buckets:   buckets,
		Sequence:  s.Sequence,
		VHPUs:     s.VHPUs,
		Timestamp: s.Timestamp,
		Spill:     s.Overload == OverloadSpills,
	}
}

// local is who the interface is, as far as a table takes that.
func (n *NIC) local() *matcher.Local {
	l := *n.neigh.Local()
	if len(l.Addrs) > matcher.MaxLocal {
		n.manyAddresses.Do(func() {
			n.cfg.Logger.Warn(fmt.Sprintf("the interface has %d addresses: packets to all but the first %d go to Linux, unless a ruleset has `dst any`", len(l.Addrs), matcher.MaxLocal), "interface", n.iface.Name)
		})
		l.Addrs = l.Addrs[:matcher.MaxLocal]
	}
	return &l
}

// follow puts the table in force again when the interface gets another address.
func (n *NIC) follow() {
	for {
		select {
		case <-n.done:
			return
		case <-n.neigh.Moved():
		}
		n.mu.Lock()
		if !n.closed && len(n.taken()) > 0 {
			if err := n.publish(); err != nil {
				n.cfg.Logger.Error("the interface's addresses have changed, but the matching table still has the old ones", "interface", n.iface.Name, "err", err)
			}
		}
		n.mu.Unlock()
	}
}

// warnOfAddresses tells of rulesets that take nothing for want of an address.
func (n *NIC) warnOfAddresses(c *Context) {
	addrs := n.neigh.Local().Addrs
	for i := range c.spec.Rulesets {
		rs := &c.spec.Rulesets[i]
		family, has := "IPv4", netip.Addr.Is4
		switch et, ok := rs.EtherType(); {
		case !rs.Local || !ok:
			continue
		case et == unix.ETH_P_IPV6:
			family, has = "IPv6", netip.Addr.Is6
		case et != unix.ETH_P_IP:
			continue
		}
		if !slices.ContainsFunc(addrs, has) {
			n.cfg.Logger.Warn("the interface has no "+family+" address, so the ruleset takes nothing: give it one, or write `; dst any` where the addresses are another interface's, such as a bridge's",
				"interface", n.iface.Name, "context", c.spec.Name, "ruleset", rs.Name)
		}
	}
}
