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
// All but Renumber and follow want the NIC's lock.

// rules are where a context's rulesets are in the matching table.
type rules struct {
	numbers []int    // that they are to have, nil for any
	slots   []int    // that they have, while the context is active
	matched []uint64 // by ruleset: what the program's counter was when the number became the context's
}

// arm puts the context's rulesets into the table.
func (n *NIC) arm(c *Context) error {
	slots, err := n.slotsFor(c)
	if err != nil {
		return err
	}
	n.warnOfAddresses(c)
	prog, err := n.ingress.Stats()
	if err != nil {
		return err
	}
	to := rules{numbers: c.rules.numbers, slots: slots}
	for _, s := range slots {
		to.matched = append(to.matched, prog.Matched[s])
	}
	return n.replace(map[*Context]rules{c: to})
}

// disarm takes the context's rulesets out of the table.
func (n *NIC) disarm(c *Context) error {
	return n.replace(map[*Context]rules{c: {numbers: c.rules.numbers}})
}

// replace changes the table, for all packets at once. With an error all is as before.
func (n *NIC) replace(to map[*Context]rules) error {
	before, changes := map[*Context]rules{}, false
	for c, r := range to {
		before[c] = c.rules
		changes = changes || len(c.rules.slots) > 0 || len(r.slots) > 0
		c.rules = r
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
	taken := n.taken()
	for c := range numbers {
		maps.DeleteFunc(taken, func(_ int, by *Context) bool { return by == c })
	}
	for c, to := range numbers {
		err := n.has(c)
		if err == nil {
			err = checkNumbers(to, len(c.spec.Rulesets))
		}
		if err != nil {
			return fmt.Errorf("context %q: %w", c.spec.Name, err)
		}
		if len(c.rules.slots) == 0 {
			continue
		}
		for _, s := range to {
			if by := taken[s]; by != nil {
				return fmt.Errorf("ruleset number %d is wanted for context %q, and taken by context %q", s, c.spec.Name, by.spec.Name)
			}
			taken[s] = c
		}
	}
	prog, err := n.ingress.Stats()
	if err != nil {
		return err
	}
	all := map[*Context]rules{}
	for c, to := range numbers {
		r := rules{numbers: slices.Clone(to)}
		for i, old := range c.rules.slots {
			r.slots = append(r.slots, to[i])
			r.matched = append(r.matched, prog.Matched[to[i]]-(prog.Matched[old]-c.rules.matched[i]))
		}
		all[c] = r
	}
	return n.replace(all)
}

// slotsFor finds the numbers of a context's rulesets.
func (n *NIC) slotsFor(c *Context) ([]int, error) {
	taken := n.taken()
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
		contexts[id] = c.spec.delivery(c.buckets)
		for i, s := range c.rules.slots {
			t.Entries[s] = matcher.Entry{Ruleset: c.spec.Rulesets[i], Context: id, Format: c.spec.Format}
		}
	}
	return n.ingress.Publish(t, contexts)
}

// delivery says how the program delivers the context's packets.
func (s *ContextSpec) delivery(buckets bpf.Range) loader.Delivery {
	if !s.onHPUs() {
		return loader.Delivery{Kernel: true}
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
