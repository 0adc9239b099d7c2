// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/nic"
)

// Ruleset numbers say which of several rulesets that match gets a packet: the lowest.
// They are a context's from its installation to its removal, armed or not, so that who
// gets a packet depends on the configuration, and not on who attached when.

// A numbered is a context whose rulesets have numbers, or are to get some.
type numbered struct {
	name, iface string
	first       int   // that it asks for, 0: any
	count       int   // of rulesets
	numbers     []int // that it has; nil: to be dealt
}

func (b *contextPlan) numbered() numbered {
	return numbered{name: b.doc.Name, iface: b.iface, first: b.doc.First, count: len(b.spec.Rulesets)}
}

// deal gives numbers to contexts, by name: those that ask for some theirs, and the others
// the lowest that are left, in their order.
func deal(all []numbered) (map[string][]int, error) {
	type number struct {
		iface string
		n     int
	}
	taken := map[number]string{}
	dealt := map[string][]int{}
	for _, c := range all {
		numbers := c.numbers
		if numbers == nil && c.first > 0 {
			for n := range c.count {
				numbers = append(numbers, c.first+n)
			}
		}
		for _, n := range numbers {
			if other, twice := taken[number{c.iface, n}]; twice {
				return nil, failf(errBusy, "context %q: ruleset number %d is taken by context %q", c.name, n, other)
			}
			taken[number{c.iface, n}] = c.name
		}
		dealt[c.name] = numbers
	}
	next := map[string]int{} // all below are those of contexts before
	for _, c := range all {
		n := next[c.iface]
		for len(dealt[c.name]) < c.count {
			if n == matcher.MaxRulesets {
				return nil, failf(errBusy, "context %q: %w: there are %d numbers for rulesets of interface %s", c.name, nic.ErrTable, matcher.MaxRulesets, c.iface)
			}
			if _, used := taken[number{c.iface, n}]; !used {
				taken[number{c.iface, n}] = c.name
				dealt[c.name] = append(dealt[c.name], n)
			}
			n++
		}
		if c.first == 0 && len(dealt[c.name]) > 0 {
			n = max(n, slices.Max(dealt[c.name])+1)
		}
		next[c.iface] = n
	}
	return dealt, nil
}

// others are contexts that are not the file's, in the order in which they were installed.
// The caller has mu.
func (d *Daemon) others() []*managedContext {
	var all []*managedContext
	for _, h := range d.contexts {
		if !h.file {
			all = append(all, h)
		}
	}
	slices.SortFunc(all, func(a, b *managedContext) int { return cmp.Compare(a.seq, b.seq) })
	return all
}

// makeRoom finds numbers for a context that is not in the file: after all others that
// have not asked for theirs. If there are none left, those of contexts that are gone are
// closed up. The caller has reload.
func (d *Daemon) makeRoom(b *contextPlan) ([]int, error) {
	d.mu.RLock()
	var order []*managedContext
	for i := range d.cfg.Contexts {
		if h := d.contexts[d.cfg.Contexts[i].Name]; h != nil {
			order = append(order, h)
		}
	}
	order = append(order, d.others()...)
	d.mu.RUnlock()
	var all []numbered
	for _, h := range order {
		c := h.contextPlan().numbered()
		c.numbers = h.numbersNow()
		all = append(all, c)
	}
	all = append(all, b.numbered())
	dealt, err := deal(all)
	if err == nil {
		return dealt[b.doc.Name], nil
	}
	for i := range all {
		all[i].numbers = nil
	}
	if dealt, err = deal(all); err != nil {
		return nil, err
	}
	moves := map[*managedContext][]int{}
	for _, h := range order {
		if n := dealt[h.name]; !slices.Equal(n, h.numbersNow()) {
			moves[h] = n
		}
	}
	for _, h := range byName(moves) {
		if err := h.begin(); err != nil {
			return nil, err
		}
		defer h.end()
	}
	if _, err := d.renumber(moves, nil); err != nil {
		return nil, err
	}
	return dealt[b.doc.Name], nil
}

func byName(moves map[*managedContext][]int) []*managedContext {
	return slices.SortedFunc(maps.Keys(moves), func(a, b *managedContext) int { return cmp.Compare(a.name, b.name) })
}

// renumber gives contexts other numbers, and puts the lives that changes have loaded in the
// place of those before, where that is seamless: of a NIC all in one step. The caller has op
// of all of them.
func (d *Daemon) renumber(moves map[*managedContext][]int, changes []change) (undo func(), err error) {
	var done []func()
	undo = func() {
		for _, f := range slices.Backward(done) {
			f()
		}
	}
	for _, device := range d.devices {
		to, back := map[*nic.Context][]int{}, map[*nic.Context][]int{}
		for h, numbers := range moves {
			if h.device != device {
				continue
			}
			was := h.setNumbers(numbers)
			done = append(done, func() { h.setNumbers(was) })
			if h.ctx != nil { // and stays so, as the caller has op
				to[h.ctx], back[h.ctx] = numbers, was
			}
		}
		by, again := map[*nic.Context]*nic.Context{}, map[*nic.Context]*nic.Context{}
		for i := range changes {
			if c := &changes[i]; c.h.device == device && c.seamless() {
				by[c.ctx], again[c.next] = c.next, c.ctx
			}
		}
		if len(to) == 0 && len(by) == 0 {
			continue
		}
		if err := device.nic.Replace(by, to); err != nil {
			undo()
			return nil, kindError{errBusy, err}
		}
		done = append(done, func() {
			if err := device.nic.Replace(again, back); err != nil {
				d.logger.Error("rulesets keep numbers and contexts that they should not have", "error", err)
			}
		})
	}
	return undo, nil
}

func (h *managedContext) numbersNow() []int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.numbers
}

// setNumbers returns what they were.
func (h *managedContext) setNumbers(numbers []int) (was []int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	was, h.numbers = h.numbers, numbers
	return was
}

// dealAll deals numbers as for a start with a configuration; contexts that are there by
// other means come last.
func dealAll(file []*contextPlan, others []*managedContext) (map[string][]int, error) {
	var all []numbered
	for _, b := range file {
		all = append(all, b.numbered())
	}
	for _, h := range others {
		all = append(all, h.contextPlan().numbered())
	}
	dealt, err := deal(all)
	if err != nil {
		return nil, fmt.Errorf("ruleset numbers: %w", err)
	}
	return dealt, nil
}

// A ruled is a context with rulesets that have numbers.
type ruled struct {
	name, iface string
	rules       []matcher.Ruleset
	numbers     []int
}

// A shadow is a ruleset that gets no packet while another context is active, which has
// the same rules under a lower number.
type shadow struct{ name, ruleset, by string }

func (s shadow) String() string {
	return fmt.Sprintf("ruleset %s is shadowed by the same one of context %q: it gets packets only while that is not active", s.ruleset, s.by)
}

func shadows(all []ruled) (found []shadow) {
	// Of two contexts the one whose number is lower gets the packet.
	over := func(a, b *ruled, k int) bool {
		for i := range a.rules {
			if x, y := &a.rules[i], &b.rules[k]; a.numbers[i] < b.numbers[k] && x.Mode == y.Mode && slices.Equal(x.Rules, y.Rules) {
				return true
			}
		}
		return false
	}
	for i := range all {
		b := &all[i]
		for k := range b.rules {
			for j := range all {
				if a := &all[j]; i != j && a.iface == b.iface && over(a, b, k) {
					found = append(found, shadow{b.name, b.rules[k].Name, a.name})
					break
				}
			}
		}
	}
	return found
}

// Warnings are what the configuration is hardly meant to say, though it may.
func (cfg *Config) Warnings() (all []string) {
	plans := checkConfig(new(checker), cfg)
	dealt, err := dealAll(plans, nil)
	if err != nil {
		return nil // an error of Start
	}
	at := func(name string) int {
		return slices.IndexFunc(cfg.Contexts, func(c control.Context) bool { return c.Name == name })
	}
	var contexts []ruled
	for _, b := range plans {
		contexts = append(contexts, ruled{b.doc.Name, b.iface, b.spec.Rulesets, dealt[b.doc.Name]})
		for _, p := range b.hints {
			all = append(all, fmt.Sprintf("contexts[%d].%v", at(b.doc.Name), p))
		}
	}
	for _, s := range shadows(contexts) {
		all = append(all, fmt.Sprintf("contexts[%d]: %v", at(s.name), s))
	}
	return all
}

// warn tells of what is hardly meant of a context that was installed, and of shadows that it
// has got, or throws.
func (d *Daemon) warn(name string) (told []string) {
	var contexts []ruled
	for _, h := range d.all() {
		if h.name == name {
			for _, p := range h.contextPlan().hints {
				d.logger.Warn(p.Error(), "context", name)
				told = append(told, fmt.Sprintf("context %q: %v", name, p))
			}
		}
		contexts = append(contexts, ruled{h.name, h.device.key, h.contextPlan().spec.Rulesets, h.numbersNow()})
	}
	for _, s := range shadows(contexts) {
		if s.name == name || s.by == name {
			d.logger.Warn(s.String(), "context", s.name)
			told = append(told, fmt.Sprintf("context %q: %v", s.name, s))
		}
	}
	return told
}
