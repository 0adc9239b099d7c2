// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/nic"
)

// A plan is what a reload has to do.
type plan struct {
	cfg     *Config
	windows []control.Window // to be made
	drop    []string         // windows that go
	add     []*contextPlan
	remove  []*managedContext
	change  []change
	who     []change                  // of whom only attach changes: their packets notice nothing
	numbers map[string][]int          // of all contexts' rulesets
	moves   map[*managedContext][]int // contexts that do not change, but for their numbers
	changes []string                  // for people
}

type change struct {
	h *managedContext
	b *contextPlan
	// The life before, while both are there.
	ctx     *nic.Context
	has     *resources
	old     *contextPlan
	state   string
	since   time.Time
	starved bool
	// The life after, while it is not the only one.
	next  *nic.Context
	needs *resources
	// Of the rulesets, now and before.
	numbers, was []int
}

// Reload reads the file again and does what has changed: all of it, or nothing.
// Contexts that have not changed are not touched and lose no packet. Contexts that
// were installed by other means than the file stay as they are.
func (d *Daemon) Reload() (changes []string, err error) {
	if d.opts.File == "" {
		return nil, failf(errInvalid, "reload: the daemon was started without a configuration file")
	}
	d.reload.Lock()
	defer d.reload.Unlock()
	notifyReloading(d.logger)
	defer notifyReady(d.logger)
	defer func() {
		if err != nil {
			d.logger.Error("reload failed, and nothing was changed", "file", d.opts.File, "error", err)
			err = fmt.Errorf("reload: nothing was changed: %w", err)
			return
		}
		d.logger.Info("reloaded", "file", d.opts.File, "changes", changes)
	}()
	cfg, err := Load(d.opts.File)
	if err != nil {
		return nil, kindError{errInvalid, err}
	}
	p, err := d.plan(cfg)
	if err != nil {
		return nil, err
	}
	if err := d.apply(p); err != nil {
		return nil, err
	}
	for _, w := range cfg.Warnings() {
		d.logger.Warn(w)
	}
	changes = p.changes
	for _, c := range d.devices {
		if err := c.lost(); err != nil {
			changes = append(changes, err.Error()) // a reload is no help against that
		}
	}
	return changes, nil
}

// plan compares a configuration with what is there. Its errors are why it cannot be,
// all of them.
func (d *Daemon) plan(cfg *Config) (*plan, error) {
	var c checker
	plans := checkConfig(&c, cfg)
	if err := c.err(); err != nil { // the file was just read: a user has gone since
		return nil, kindError{errInvalid, err}
	}
	p := &plan{cfg: cfg}
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.closing {
		return nil, failf(errBusy, "%s", whyClosing)
	}
	var reasons []error
	refuse := func(kind error, format string, args ...any) { reasons = append(reasons, failf(kind, format, args...)) }
	told := func(format string, args ...any) { p.changes = append(p.changes, fmt.Sprintf(format, args...)) }

	old := d.cfg
	for _, f := range []struct {
		what     string
		old, new any
	}{
		{"socket", old.Socket, cfg.Socket},
		{"metrics", old.Metrics, cfg.Metrics},
		{"user", old.User, cfg.User},
		{"log", old.Log, cfg.Log},
		{"kernel", cmp.Or(old.Kernel, "off"), cmp.Or(cfg.Kernel, "off")},
		{"interfaces", old.Interfaces, cfg.Interfaces},
	} {
		if !same(f.old, f.new) {
			refuse(errInvalid, "%s has changed: that takes a restart", f.what)
		}
	}
	if !same(old.Admins, cfg.Admins) {
		told("admins")
	}
	if !same(old.Limits, cfg.Limits) {
		told("limits")
	}

	renewed := map[string]bool{} // shared windows
	for _, w := range cfg.Windows {
		switch m := d.windows[w.Name]; {
		case m == nil:
			p.windows = append(p.windows, w)
			told("window %s added", w.Name)
		case m.Size() != int64(w.Size):
			p.windows = append(p.windows, w)
			renewed[w.Name] = true
			told("window %s changed", w.Name)
		}
	}
	for name := range d.windows {
		if !slices.ContainsFunc(cfg.Windows, func(w control.Window) bool { return w.Name == name }) {
			p.drop = append(p.drop, name)
			renewed[name] = true
		}
	}
	slices.Sort(p.drop)
	for _, name := range p.drop {
		told("window %s removed", name)
	}

	wanted := map[string]bool{}
	for _, b := range plans {
		name := b.doc.Name
		wanted[name] = true
		h := d.contexts[name]
		switch {
		case h == nil:
			p.add = append(p.add, b)
			told("context %s added", name)
		case !h.file:
			refuse(errBusy, "context %q was installed by other means than the file: remove it first", name)
		default:
			was := h.contextPlan()
			a, z := was.doc, b.doc
			a.Attach, z.Attach = nil, nil
			uses := slices.ContainsFunc(b.windows, func(w windowUse) bool { return w.shared && renewed[w.name] })
			switch {
			case h.device.key != b.iface:
				p.remove, p.add = append(p.remove, h), append(p.add, b)
				told("context %s moved to interface %s: began anew", name, b.iface)
			case uses || !same(a, z):
				p.change = append(p.change, change{h: h, b: b})
				told("context %s changed: began anew", name)
			case !same(was.doc.Attach, b.doc.Attach):
				p.who = append(p.who, change{h: h, b: b})
				told("context %s changed: who may attach", name)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(d.contexts)) {
		h := d.contexts[name]
		b := h.contextPlan()
		if h.file && !wanted[name] {
			p.remove = append(p.remove, h)
			told("context %s removed", name)
		} else if !h.file && slices.ContainsFunc(b.windows, func(w windowUse) bool { return w.shared && renewed[w.name] }) {
			refuse(errBusy, "context %q, which is not the file's, uses a shared window that changes: remove it first", name)
		}
	}
	var err error
	if p.numbers, err = dealAll(plans, d.others()); err != nil {
		reasons = append(reasons, err)
	}
	if err := errors.Join(append(reasons, d.lively(p))...); err != nil {
		return nil, err
	}
	p.moves = map[*managedContext][]int{}
	touched := p.touched()
	var moved []string
	for name, h := range d.contexts {
		if n := p.numbers[name]; !slices.Contains(touched, h) && !slices.Equal(n, h.numbersNow()) {
			p.moves[h] = n
			moved = append(moved, name)
		}
	}
	if slices.Sort(moved); len(moved) > 0 {
		told("other ruleset numbers: %s", strings.Join(moved, ", "))
	}
	for i := range p.change {
		p.change[i].numbers = p.numbers[p.change[i].h.name]
	}
	return p, nil
}

// lively says which contexts of a plan must not be touched now, nil if none.
func (d *Daemon) lively(p *plan) error {
	var reasons []error
	for _, h := range p.touched() {
		if why := h.live(); why != "" {
			reasons = append(reasons, failf(errBusy, "context %q would be changed or removed, and it is live: %s", h.name, why))
		}
	}
	return errors.Join(reasons...)
}

// touched are the contexts that a plan changes or removes, by name.
func (p *plan) touched() (all []*managedContext) {
	all = append(all, p.remove...)
	for _, c := range p.change {
		all = append(all, c.h)
	}
	slices.SortFunc(all, func(a, b *managedContext) int { return cmp.Compare(a.name, b.name) })
	return all
}

// same compares what configurations say.
func same(a, b any) bool {
	if reflect.DeepEqual(a, b) {
		return true
	}
	// Params may be the same number as an int and as a float.
	x, err1 := json.Marshal(a)
	y, err2 := json.Marshal(b)
	return err1 == nil && err2 == nil && string(x) == string(y)
}

// apply does what the plan says. New contexts, and new lives of those that change, are made
// while the old ones go on, as that takes its time and may fail: a verifier takes seconds for
// some objects. The old ones are disarmed then, or replaced while packets come, and end when
// nothing can fail any more. With an error all is as it was.
func (d *Daemon) apply(p *plan) (err error) {
	var end []*managedContext
	defer func() {
		for _, h := range end {
			h.end()
		}
	}()
	// Before the operations end: whoever waits for them attaches to what stays.
	var undo []func()
	defer func() {
		if err != nil {
			for _, f := range slices.Backward(undo) {
				f()
			}
		}
	}()
	busy := append(p.touched(), slices.Collect(maps.Keys(p.moves))...)
	slices.SortFunc(busy, func(a, b *managedContext) int { return cmp.Compare(a.name, b.name) })
	for _, h := range busy {
		if err := h.begin(); err != nil {
			return err
		}
		end = append(end, h)
	}
	// Nobody attaches from here on.
	if err := d.lively(p); err != nil {
		return err
	}

	// Old and new memory are there at the same time, and that is all right.
	old := d.bytesOf(p)
	d.memory.lend(old)
	defer d.memory.lend(-old)
	limits := d.cfg.Limits.complete()
	d.memory.setLimit(int64(p.cfg.Limits.complete().Memory))
	undo = append(undo, func() { d.memory.setLimit(int64(limits.Memory)) })

	var gone []*memory
	d.mu.RLock()
	for _, name := range p.drop {
		gone = append(gone, d.windows[name])
	}
	d.mu.RUnlock()
	for i := range p.windows {
		w := &p.windows[i]
		d.mu.RLock()
		old := d.windows[w.Name]
		d.mu.RUnlock()
		if err := d.share(w); err != nil {
			return err
		}
		undo = append(undo, func() {
			d.mu.Lock()
			m := d.windows[w.Name]
			if d.windows[w.Name] = old; old == nil {
				delete(d.windows, w.Name)
			}
			d.mu.Unlock()
			m.drop()
		})
		if old != nil {
			gone = append(gone, old)
		}
	}

	for i := range p.change {
		c := &p.change[i]
		c.begin()
		undo = append(undo, c.unload)
		if err := c.load(); err != nil {
			return fmt.Errorf("context %q: %w", c.h.name, err)
		}
	}
	var added []*managedContext
	for _, b := range p.add {
		h, err := d.describe(b, true, p.numbers[b.doc.Name])
		if err != nil {
			return err
		}
		if err := h.install(); err != nil { // without op: nobody else knows it
			return fmt.Errorf("context %q: %w", h.name, err)
		}
		added = append(added, h)
		undo = append(undo, h.withdraw)
	}
	// Messages may have begun meanwhile.
	if err := d.lively(p); err != nil {
		return err
	}

	// All are disarmed before any is armed: ruleset numbers may be dealt out again.
	for _, h := range p.remove {
		if h.currentState() == active {
			undo = append(undo, h.rearm)
			if err := h.disarm(); err != nil {
				return fmt.Errorf("context %q: %w", h.name, err)
			}
		}
		d.hide(h)
		undo = append(undo, func() { d.show(h) })
	}
	for i := range p.change {
		c := &p.change[i]
		c.begin() // again: a handler may have stopped it meanwhile
		if c.state == active && !c.seamless() {
			undo = append(undo, c.h.rearm)
			if err := c.h.disarm(); err != nil {
				return fmt.Errorf("context %q: %w", c.h.name, err)
			}
		}
	}
	// Contexts that only move do so before others take their numbers.
	back, err := d.renumber(p.moves, p.change)
	if err != nil {
		return err
	}
	undo = append(undo, back)
	for i := range p.change {
		undo = append(undo, p.change[i].undo)
		if err := p.change[i].do(); err != nil {
			return fmt.Errorf("context %q: %w", p.change[i].h.name, err)
		}
	}
	for _, h := range added {
		if err := d.enter(h); err != nil {
			return err
		}
		undo = append(undo, h.withdraw) // before others get their numbers back
		if err := h.start(); err != nil {
			return err
		}
	}
	// The new contexts may be used from here on, but nothing fails any more.
	d.setConfig(p.cfg)
	for _, c := range p.who {
		c.h.mu.Lock()
		c.h.b = c.b
		c.h.mu.Unlock()
	}
	for _, c := range p.change {
		c.h.finish(c.ctx, c.has, false)
	}
	for _, h := range p.remove {
		h.retire(whyReloaded)
	}
	d.mu.Lock()
	for _, name := range p.drop {
		delete(d.windows, name)
	}
	d.mu.Unlock()
	for _, m := range gone {
		m.drop()
	}
	return nil
}

// bytesOf returns how much memory goes by a plan. The caller has op of its contexts.
func (d *Daemon) bytesOf(p *plan) (n int64) {
	for _, h := range p.touched() {
		if h.has != nil {
			n += h.has.bytes
		}
	}
	d.mu.RLock()
	defer d.mu.RUnlock()
	add := func(name string) {
		if m := d.windows[name]; m != nil {
			n += m.charge.n
		}
	}
	for _, name := range p.drop {
		add(name)
	}
	for i := range p.windows {
		add(p.windows[i].Name)
	}
	return n
}

func (d *Daemon) setConfig(cfg *Config) {
	admins := checkWho(new(checker), "", &cfg.Admins)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.cfg, d.admins = cfg, admins
}

// hide lets another context have the name, and show takes it back.
func (d *Daemon) hide(h *managedContext) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.contexts, h.name)
}

func (d *Daemon) show(h *managedContext) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.contexts[h.name] = h
}

// withdraw takes a context away that was added, unless it is gone.
func (h *managedContext) withdraw() {
	if h.begin() == nil {
		h.retire(whyReloaded)
		h.end()
	}
}

// rearm activates a context that was active, on the way back from a reload.
func (h *managedContext) rearm() {
	if err := h.arm(); err != nil {
		h.set(failed, err.Error())
		h.d.logger.Error("context is not active any more", "context", h.name, "error", err)
	}
}

// begin remembers the life that the context has.
func (c *change) begin() {
	c.h.mu.Lock()
	defer c.h.mu.Unlock()
	c.ctx, c.has, c.old, c.state, c.since, c.starved = c.h.ctx, c.h.has, c.h.b, c.h.state, c.h.since, c.h.starved
}

// seamless tells whether the new life takes the old one's place in one step, so that no
// packet is nobody's: in the kernel nothing has to be waited for, and no init runs.
func (c *change) seamless() bool {
	return c.state == active && c.b.doc.Activate == atStart && !c.old.onHPUs() && !c.b.onHPUs()
}

// load makes the new life, while the old one goes on.
func (c *change) load() (err error) {
	c.next, c.needs, err = c.h.build(c.b, c.numbers)
	return err
}

// unload ends the new life, if there is one.
func (c *change) unload() {
	if c.next != nil {
		c.h.finish(c.next, c.needs, c.ctx == nil)
		c.next, c.needs = nil, nil
	}
}

// do makes the new life the context's, and activates it. The old one stays there, disarmed.
func (c *change) do() error {
	h := c.h
	h.mu.Lock()
	off := h.off
	h.b = c.b
	c.was, h.numbers = h.numbers, c.numbers
	h.adopt(c.next, c.needs)
	h.mu.Unlock()
	if c.b.doc.Activate == atStart && !off {
		return h.arm()
	}
	return nil
}

// undo makes the old life the context's again: disarmed, or as it was if renumber takes the
// last step.
func (c *change) undo() {
	h := c.h
	h.mu.Lock()
	h.b, h.ctx, h.has, h.numbers = c.old, c.ctx, c.has, c.was
	h.state, h.since, h.starved = c.state, time.Now(), c.starved
	if c.seamless() {
		h.since = c.since
		h.mu.Unlock()
		return
	}
	if c.state == active {
		h.state = installed
	}
	h.mu.Unlock()
	c.unload()
}
