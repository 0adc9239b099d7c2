// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/clock"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// States of a context.
//
//	           install          activate
//	installing ──────► installed ◄────► active
//	    ▲  │                  │            │  its application goes, or it is removed
//	    │  │ error            └──► draining ◄─┘
//	    │  ▼                          │
//	    │ failed                      │
//	    └───────────── renew ◄────────┘
//
// A handler that runs past its limit makes it stopped, until somebody activates it:
// an application that could have it start again by attaching could have it hang for
// ever, a thread each time.
const (
	installing = "installing"
	installed  = "installed"
	active     = "active"
	draining   = "draining"
	stopped    = "stopped"
	failed     = "failed"
	// Reported instead of the real state once the interface is gone.
	ifaceGone = "gone"
)

// overrunText is said of a stopped context if the event that said more was lost.
const overrunText = "a handler ran past its time limit"

// opTime is how long anybody waits until a context has done what it is doing.
const opTime = 15 * time.Second

// A managedContext is a context that the daemon owns.
type managedContext struct {
	d      *Daemon
	name   string
	device *device
	book   *logBook // of all its lives
	file   bool     // it is the configuration file's, and a reload may change it
	seq    uint64   // the order in which contexts were made

	// Held while the state changes: making memory and draining take their time.
	op chan struct{}

	mu        sync.Mutex
	b         *contextPlan // changed by a reload, for those who may attach
	numbers   []int        // of its rulesets, armed or not
	state     string
	why       string // of stopped and failed
	starved   bool   // it has failed for want of memory, and starts over when there is some
	since     time.Time
	gone      bool // removed: nobody finds it any more
	off       bool // an administrator has deactivated it, and it stays so
	ctx       *nic.Context
	place     *nic.Context // of the life before, with its credit, while there is no other; nil: none
	has       *resources
	owner     *attachment
	observers map[*attachment]bool
	tap       hpu.Tap
	captures  *captures // see Daemon.capture
}

// begin waits until no operation on the context is under way, and keeps it so until end.
func (h *managedContext) begin() error {
	t := time.NewTimer(opTime)
	defer t.Stop()
	select {
	case h.op <- struct{}{}:
	case <-t.C:
		h.mu.Lock()
		defer h.mu.Unlock()
		return failf(errBusy, "context %q is %s, and another operation on it goes on", h.name, h.state)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.gone {
		<-h.op
		return failf(errNotFound, "no context %q", h.name)
	}
	return nil
}

func (h *managedContext) end() { <-h.op }

func (h *managedContext) set(state, why string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.state, h.why, h.since, h.starved = state, why, time.Now(), false
}

// add makes a context, and starts it. With an error nothing of it is left.
func (d *Daemon) add(b *contextPlan, file bool, numbers []int) (*managedContext, error) {
	h, err := d.make(b, file, numbers)
	if err != nil {
		return nil, err
	}
	return h, h.start()
}

// make makes a context and installs it. With an error nothing of it is left.
func (d *Daemon) make(b *contextPlan, file bool, numbers []int) (_ *managedContext, err error) {
	h, err := d.describe(b, file, numbers)
	if err != nil {
		return nil, err
	}
	h.op <- struct{}{}
	defer h.end()
	if err := d.enter(h); err != nil {
		return nil, err
	}
	if err := h.install(); err != nil {
		return nil, h.undo(err)
	}
	return h, nil
}

// describe describes a context that nobody knows yet, and of which there is nothing.
func (d *Daemon) describe(b *contextPlan, file bool, numbers []int) (*managedContext, error) {
	h := &managedContext{
		d: d, name: b.doc.Name, file: file, seq: d.made.Add(1), b: b, numbers: numbers,
		op: make(chan struct{}, 1), state: installing, since: time.Now(),
		observers: map[*attachment]bool{},
	}
	for _, c := range d.devices {
		if c.key == b.iface {
			h.device = c
		}
	}
	if h.device == nil {
		return nil, failf(errInvalid, "context %q: the daemon has no interface %q", h.name, b.iface)
	}
	h.book = newLogBook(h.name, max(h.device.nic.HPUs(), b.hpus, b.cpus), d.logConfig())
	return h, nil
}

// start has the context's log written to a file, and packets come, if its configuration
// says so. With an error nothing of the context is left.
func (h *managedContext) start() error {
	if err := h.begin(); err != nil {
		return err
	}
	defer h.end()
	if cfg := h.d.logConfig(); cfg.Dir != "" {
		h.book.keep(cfg.Dir, h.name, h.d.logger)
	}
	if h.contextPlan().doc.Activate != atStart {
		return nil
	}
	if err := h.arm(); err != nil {
		h.tearDown(false)
		return h.undo(err)
	}
	return nil
}

// undo takes a context away that could not be made. The caller has op.
func (h *managedContext) undo(err error) error {
	h.d.leave(h)
	h.book.close()
	return fmt.Errorf("context %q: %w", h.name, err)
}

func (d *Daemon) logConfig() Log {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.cfg.Log
}

// enter takes the context's name.
func (d *Daemon) enter(h *managedContext) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closing {
		return failf(errBusy, "%s", whyClosing)
	}
	if old := d.contexts[h.name]; old != nil {
		return failf(errBusy, "context %q is there already", h.name)
	}
	d.contexts[h.name] = h
	return nil
}

// leave gives the name back.
func (d *Daemon) leave(h *managedContext) {
	h.mu.Lock()
	h.gone = true
	h.mu.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.contexts[h.name] == h {
		delete(d.contexts, h.name)
	}
}

// install gives a life to the context, which has none. The caller has op.
func (h *managedContext) install() error {
	ctx, has, err := h.build(h.contextPlan(), h.numbersNow())
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.adopt(ctx, has)
	return nil
}

// build makes the memory of a life and installs it on the NIC, beside the life that the
// context may have, which goes on. The caller has op, and continues with adopt or finish.
func (h *managedContext) build(b *contextPlan, numbers []int) (*nic.Context, *resources, error) {
	if err := h.device.lost(); err != nil {
		return nil, nil, err
	}
	set, err := h.makeHandlers(b)
	if err != nil {
		return nil, nil, err
	}
	spec := b.spec
	if wrong := b.schedule(&spec, set); wrong != nil {
		return nil, nil, kindError{errInvalid, wrong}
	}
	has, err := h.d.hold(b, set, h.device.nic.Workers())
	if err != nil {
		return nil, nil, err
	}
	if !spec.HostActivated {
		spec.Numbers = numbers
	}
	spec.Handlers = set.Handlers
	spec.Timestamp = set.Timestamp
	spec.Resources = hpu.Resources{Timer: b.timer, Full: b.full}
	if spec.Kernel == nil || b.ending { // or they print nothing
		spec.Resources.Log = h.book
	}
	has.equip(&spec.Resources)
	if b.ending {
		spec.State, spec.InitialState = set.State, set.Initial
		if spec.Kernel == nil {
			spec.Binder = has.receives
		}
	}
	h.mu.Lock()
	spec.Place = h.place
	h.mu.Unlock()
	ctx, err := h.device.nic.Install(spec)
	if err != nil {
		has.drop()
		return nil, nil, kindError{errBusy, cause(err)}
	}
	spec.Place = nil
	has.spec = spec
	if spec.Kernel != nil {
		has.receives.kernel = ctx
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.place = nil
	return ctx, has, nil
}

// adopt makes a life that was built the context's. The caller has op and mu.
func (h *managedContext) adopt(ctx *nic.Context, has *resources) {
	if h.tap != nil {
		ctx.SetTap(h.tap)
	}
	h.ctx, h.has = ctx, has
	h.state, h.why, h.since, h.starved = installed, "", time.Now(), false
}

// cause is an error of the NIC's without what it begins with: which context it is about.
func cause(err error) error { return cmp.Or(errors.Unwrap(err), err) }

// makeHandlers makes the context's set, if there is memory for all that the context needs.
func (h *managedContext) makeHandlers(b *contextPlan) (*handlers.Set, error) {
	if err := h.d.enough(b.charge()); err != nil {
		return nil, err
	}
	if !b.onHPUs() {
		return b.kernelSet(), nil
	}
	env := b.env
	env.Memory = spare(h.d.memory.room() - b.charge() + roundUpToElement(b.reserve))
	set, err := b.makeSet(env)
	if err == nil && b.maps > 0 {
		set.Reserved = maps.Clone(set.Reserved)
		if set.Reserved == nil {
			set.Reserved = map[string]int64{}
		}
		set.Reserved["maps"] = b.maps
	}
	if err == nil {
		return set, nil
	}
	short := errors.Is(err, handlers.ErrMemory)
	err = fmt.Errorf("handler %s: %w", b.doc.Handler, err)
	if short {
		return nil, kindError{errMemory, kindError{errBusy, err}}
	}
	return nil, kindError{errInvalid, err}
}

// arm activates the context. The caller has op.
func (h *managedContext) arm() error {
	if err := h.device.lost(); err != nil {
		return err
	}
	h.d.mu.RLock()
	closing := h.d.closing
	h.d.mu.RUnlock()
	if closing { // it would acknowledge what nobody is told of
		return failf(errBusy, "%s", whyClosing)
	}
	if err := h.device.nic.Activate(h.ctx); err != nil {
		return kindError{errBusy, cause(err)}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.state == installed { // not if a handler was too slow already
		h.state, h.since = active, time.Now()
	}
	return nil
}

// disarm deactivates it. The caller has op.
func (h *managedContext) disarm() error {
	err := h.device.nic.Deactivate(h.ctx)
	if err != nil && len(h.ctx.Rulesets()) > 0 {
		return kindError{errBusy, err}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.state == active {
		h.state, h.since = installed, time.Now()
	}
	if err != nil {
		// It is not active, but not idle either: the caller wants to know.
		return kindError{errBusy, err}
	}
	return nil
}

// A loss is what had to be ended.
type loss struct {
	messages, requests int
	leaked             bool // memory is kept until stuck handlers have returned
	overran            bool // a handler has run past its limit, perhaps as the context was drained
}

// tearDown ends the context's life. Its credit stays the context's with keep. The caller
// has op.
func (h *managedContext) tearDown(keep bool) loss {
	h.mu.Lock()
	ctx, has := h.ctx, h.has
	h.ctx, h.has = nil, nil
	h.mu.Unlock()
	return h.finish(ctx, has, keep)
}

// finish takes a life of the context from the NIC and frees what it had, or leaves
// that to the sweep behind stuck handlers. Sessions of that life end with it. Its
// place stays with keep, and is given up without.
func (h *managedContext) finish(ctx *nic.Context, has *resources, keep bool) (l loss) {
	h.mu.Lock()
	place := h.place
	if h.place = nil; keep {
		h.place = cmp.Or(ctx, place)
	}
	h.mu.Unlock()
	if ctx != nil {
		if m, ok := ctx.Messages(); ok {
			l.messages = m.Open
		}
		if has.pair != nil {
			l.requests = has.pair.Stats().Outstanding
		}
		has.quiet(h.device.nic, ctx)
	}
	h.mu.Lock()
	if a := h.owner; a != nil && a.has == has {
		a.dismiss(whyOver)
	}
	for a := range h.observers {
		if a.has == has {
			a.dismiss(whyOver)
		}
	}
	h.mu.Unlock()
	if place != nil && !keep {
		if err := h.device.nic.Remove(place); err != nil {
			h.d.logger.Error("credit is not given up", "context", h.name, "error", err)
		}
	}
	if ctx == nil {
		return l
	}
	remove := h.device.nic.Remove
	if keep {
		remove = h.device.nic.Clear
	}
	err := remove(ctx)
	if has.pair != nil {
		has.pair.Detach()
	}
	if l.overran = ctx.Stats().Overruns > 0; err == nil && !l.overran {
		has.drop()
		return l
	}
	l.leaked = true
	h.d.logger.Warn("handlers of a context may still run: its memory is kept until they have returned",
		"context", h.name, "bytes", has.bytes, "error", err)
	h.d.leaks.add(&leak{d: h.d, device: h.device, ctx: ctx, has: has, name: h.name, since: time.Now()})
	return l
}

// renew has the context start over, with memory in which there is nothing. The caller
// has op.
func (h *managedContext) renew() error {
	l, had := h.empty()
	return h.fill(l, had)
}

// empty ends the life of the context. It returns the resources that sessions may still
// refer to, nil if there are none. The caller has op, and continues with fill.
func (h *managedContext) empty() (loss, *resources) {
	h.set(draining, "")
	h.mu.Lock()
	had := h.has
	h.mu.Unlock()
	l := h.tearDown(true)
	h.set(installing, "")
	return l, had
}

// fill gives the context a new life after empty. That takes as long as the kernel needs
// to clear the memory, some 1 s for each GB. The caller has op.
func (h *managedContext) fill(l loss, had *resources) error {
	if !l.leaked && had != nil && had.refs.Load() > 0 {
		// Sessions of observers that are about to end still refer to what it had: that
		// is no reason to wait. Memory that a process keeps is one.
		n := had.bytes - had.kept.Load()
		h.d.memory.lend(n)
		defer h.d.memory.lend(-n)
	}
	err := h.install()
	if err != nil {
		h.set(failed, err.Error())
		h.mu.Lock()
		h.starved = errors.Is(err, errMemory)
		h.mu.Unlock()
	}
	return err
}

// revive has contexts start over that have failed for want of memory, whenever some has
// become free.
func (d *Daemon) revive() {
	defer close(d.revived)
	for {
		select {
		case <-d.stop:
			return
		case <-d.memory.freed:
		}
		for _, h := range d.all() {
			h.mu.Lock()
			starved := h.starved
			h.mu.Unlock()
			if !starved || h.begin() != nil {
				continue
			}
			h.comeBack()
			h.end()
		}
	}
}

// comeBack has a context start over that has failed for want of memory, if it still has.
// The caller has op.
func (h *managedContext) comeBack() {
	h.d.mu.RLock()
	closing := h.d.closing
	h.d.mu.RUnlock()
	h.mu.Lock()
	starved, off, mode := h.starved, h.off, h.b.doc.Activate
	h.mu.Unlock()
	if closing || !starved {
		return
	}
	err := h.renew()
	if err == nil && mode == atStart && !off {
		if err = h.arm(); err != nil {
			h.set(failed, err.Error())
		}
	}
	switch {
	case err == nil:
		h.d.logger.Info("there is memory again, and the context has started over", "context", h.name, "state", h.currentState())
	case !errors.Is(err, errMemory):
		h.d.logger.Error("the context could not start over", "context", h.name, "error", err)
	}
}

// record writes what went wrong in a handler to the context's log, line by line.
func (h *managedContext) record(e spin.Fault) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := clock.Monotonic()
	for line := range strings.Lines(e.Text()) {
		h.book.Log(now, e.HPU, []byte(line))
	}
}

// overrun ends the sessions of a context of which a handler ran past its limit.
func (h *managedContext) overrun(detail string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.fault(detail); h.state == stopped && h.why == overrunText {
		h.why = detail // somebody has looked between the two
	}
}

// fault says that the context is stopped, if it is: an event may come late, when the
// context has started over, or be lost. The caller has mu.
func (h *managedContext) fault(detail string) {
	if h.ctx == nil || h.state != installed && h.state != active || h.ctx.Stats().Overruns == 0 {
		return
	}
	h.state, h.why, h.since = stopped, detail, time.Now()
	h.tell("the context is stopped: " + detail)
}

// dismiss ends all sessions.
func (h *managedContext) dismiss(why string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tell(why)
}

func (h *managedContext) tell(why string) {
	if h.owner != nil {
		h.owner.dismiss(why)
	}
	for a := range h.observers {
		a.dismiss(why)
	}
}

// quiet has no packet come to the context any more, and nobody wait for its application, which still learns of all that
// has come before.
func (h *managedContext) quiet() {
	h.mu.Lock()
	ctx, has := h.ctx, h.has
	if ctx != nil {
		has.ref()
	}
	h.mu.Unlock()
	if ctx != nil {
		defer has.drop()
		has.quiet(h.device.nic, ctx)
	}
}

// silence has nobody wait for the application any more: there is none.
func (h *managedContext) silence() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.has != nil && h.has.pair != nil {
		h.has.pair.Detach()
	}
}

// letGo frees what a context had whose NIC is closed.
func (h *managedContext) letGo() {
	h.mu.Lock()
	has := h.has
	h.ctx, h.has = nil, nil
	h.mu.Unlock()
	if has != nil {
		has.drop()
	}
}

func (h *managedContext) contextPlan() *contextPlan {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.b
}

func (h *managedContext) mayAttach(p control.Peer) bool { return h.contextPlan().attach.has(p) }

// live says why nobody may take the context away without being asked, and what somebody who wants to
// can do. It returns "" if there is nothing.
func (h *managedContext) live() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	attached := func(a *attachment) string {
		return fmt.Sprintf("%v is attached; stop it, or `xspin ctx rm %s`, which detaches it, and reload again", a, h.name)
	}
	if a := h.owner; a != nil {
		return attached(a)
	}
	for a := range h.observers {
		return attached(a)
	}
	if h.ctx != nil {
		if m, ok := h.ctx.Messages(); ok && m.Open > 0 {
			return fmt.Sprintf("%d messages are open; wait for their ends, or `xspin ctx rm %s`, which ends them, and reload again", m.Open, h.name)
		}
	}
	return ""
}

// install installs a context that is none of the configuration file's.
func (d *Daemon) install(doc *control.Context) (*control.ContextInfo, error) {
	d.reload.Lock() // as it deals out numbers
	defer d.reload.Unlock()
	b, err := d.check(doc)
	if err != nil {
		return nil, err
	}
	if _, err := d.find(doc.Name); !errors.Is(err, errNotFound) {
		return nil, cmp.Or(err, failf(errBusy, "context %q is there already", doc.Name))
	}
	numbers, err := d.makeRoom(b)
	if err != nil {
		return nil, err
	}
	if _, err := d.add(b, false, numbers); err != nil {
		return nil, err
	}
	told := d.warn(doc.Name)
	i, err := d.info(doc.Name)
	if err == nil {
		i.Warnings = append(told, i.Warnings...)
	}
	return i, err
}

// check checks a context against the configuration in force.
func (d *Daemon) check(doc *control.Context) (*contextPlan, error) {
	d.mu.RLock()
	env := &surroundings{kernel: d.cfg.Kernel == kernelAdmins, limits: d.cfg.Limits.complete(), interfaces: d.cfg.Interfaces, windows: map[string]control.Size{}}
	for name, m := range d.windows {
		env.windows[name] = control.Size(m.Size())
	}
	d.mu.RUnlock()
	env.left = d.memory.room()
	var c checker
	c.name("name", doc.Name, "context", map[string]string{})
	b := checkContext(&c, "", doc, env)
	if err := c.err(); err != nil {
		return nil, kindError{errInvalid, err}
	}
	return b, nil
}

// withContext calls f with a context of which op is held.
func (d *Daemon) withContext(name string, f func(*managedContext) error) error {
	h, err := d.find(name)
	if err != nil {
		return err
	}
	if err := h.begin(); err != nil {
		return err
	}
	defer h.end()
	return f(h)
}

// activate arms a context. One that is stopped or has failed starts over.
func (d *Daemon) activate(name string) error {
	return d.withContext(name, func(h *managedContext) error {
		h.mu.Lock()
		h.off = false
		state := h.state
		h.mu.Unlock()
		if state == stopped || state == failed {
			if err := h.renew(); err != nil {
				return err
			}
		}
		return h.arm()
	})
}

// deactivate disarms a context, which stays so until somebody activates it.
func (d *Daemon) deactivate(name string) error {
	return d.withContext(name, func(h *managedContext) error {
		h.mu.Lock()
		h.off = true
		state := h.state
		h.mu.Unlock()
		if state != active {
			return nil
		}
		return h.disarm()
	})
}

// remove takes a context away, whoever is attached.
func (d *Daemon) remove(name string) error {
	return d.withContext(name, func(h *managedContext) error {
		h.retire(whyRemoved)
		return nil
	})
}

// retire ends sessions and the context. The caller has op.
func (h *managedContext) retire(why string) {
	h.set(draining, "")
	h.quiet() // before its application hears that it is over
	h.dismiss(why)
	l := h.tearDown(false)
	h.d.leave(h)
	h.book.close()
	h.d.logger.Info("context is removed", "context", h.name, "messages_ended", l.messages, "requests_failed", l.requests)
}

// trigger activates a host-activated context.
func (d *Daemon) trigger(name string, t control.Trigger) error {
	h, err := d.find(name)
	if err != nil {
		return err
	}
	return h.trigger(&t)
}

func (h *managedContext) trigger(t *control.Trigger) error {
	if err := h.device.lost(); err != nil {
		return err
	}
	h.mu.Lock()
	ctx, has, state, b := h.ctx, h.has, h.state, h.b
	if ctx == nil || state != active {
		h.mu.Unlock()
		return failf(errBusy, "context %q is %s: it must be active to be triggered", h.name, state)
	}
	has.ref()
	h.mu.Unlock()
	defer has.drop()
	if !b.doc.Triggered {
		return failf(errInvalid, "context %q is not host-activated: its messages come from packets", h.name)
	}
	call := hpu.Trigger{Words: t.Words, Offset: t.Offset, Length: t.Length, Slice: t.Slice}
	if t.Window != "" {
		w, err := has.window(t.Window)
		if err != nil {
			return err
		}
		call.Window = w.win
	}
	if err := h.device.nic.Trigger(ctx, call); err != nil {
		return kindError{errInvalid, err}
	}
	return nil
}

// withMemory calls f with HPU memory, the context's if hpu is -1. The memory is there
// until f returns, but perhaps nobody's any more.
func (d *Daemon) withMemory(name string, hpu int, f func([]byte) error) error {
	h, err := d.find(name)
	if err != nil {
		return err
	}
	h.mu.Lock()
	has, state, b := h.has, h.state, h.b
	if has == nil {
		h.mu.Unlock()
		return failf(errBusy, "context %q is %s", name, state)
	}
	has.ref()
	h.mu.Unlock()
	defer has.drop()
	switch {
	case hpu >= b.hpus:
		return failf(errInvalid, "HPU %d: want 0 to %d", hpu, b.hpus-1)
	case hpu < 0 && has.memory == nil:
		return failf(errInvalid, "context %q has no HPU memory: see memory in its configuration", name)
	case hpu >= 0 && has.perHPU == nil:
		return failf(errInvalid, "the HPUs of context %q have no memory: see hpu_memory in its configuration", name)
	case hpu < 0:
		return f(has.memory.Bytes())
	}
	return f(has.perHPU.Bytes()[int64(hpu)*b.perHPU:][:b.perHPU])
}

// log calls f for lines of a context's log, until it has seen all of them, or with follow
// until ctx ends or the context is removed.
func (d *Daemon) log(ctx context.Context, name string, hpu int, follow bool, f func(control.LogLine) error) error {
	h, err := d.find(name)
	if err != nil {
		return err
	}
	return h.book.follow(ctx, hpu, follow, f)
}

// setTap has a tap see the context's frames, through all of its lives; nil ends that.
func (h *managedContext) setTap(t hpu.Tap) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tap = t
	if h.ctx != nil {
		h.ctx.SetTap(t)
	}
}

// infos tells of all contexts, by name.
func (d *Daemon) infos() []control.ContextInfo {
	all := []control.ContextInfo{}
	stats := map[*device]map[int]*nic.ContextStats{}
	for _, h := range d.all() {
		if stats[h.device] == nil {
			stats[h.device] = h.device.stats()
		}
		all = append(all, h.info(stats[h.device]))
	}
	return all
}

// info tells of one.
func (d *Daemon) info(name string) (*control.ContextInfo, error) {
	h, err := d.find(name)
	if err != nil {
		return nil, err
	}
	i := h.info(h.device.stats())
	h.mu.Lock()
	ctx := h.ctx
	h.mu.Unlock()
	if ctx != nil { // it may end while its maps are looked at
		if i.Maps, err = ctx.OwnMaps(); err != nil {
			return nil, fmt.Errorf("context %q: %w", name, err)
		}
	}
	return &i, nil
}

// stats returns what the NIC knows of its contexts, by number.
func (c *device) stats() map[int]*nic.ContextStats {
	all := map[int]*nic.ContextStats{}
	s, err := c.nic.Stats()
	if err != nil {
		return all // it is closing
	}
	for i := range s.Contexts {
		all[s.Contexts[i].ID] = &s.Contexts[i]
	}
	return all
}

func (h *managedContext) info(stats map[int]*nic.ContextStats) control.ContextInfo {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fault(overrunText)
	i := control.ContextInfo{
		Context: h.b.doc, ID: -1, State: h.state, Error: h.why, Since: h.since,
		Rules: []control.Rule{}, Attached: []control.Peer{},
	}
	if err := h.device.lost(); err != nil {
		i.State, i.Error = ifaceGone, err.Error()
	}
	if i.Object != nil {
		i.Object = &control.Object{Name: i.Object.Name}
	}
	i.Interface, i.Link = h.device.key, h.device.nic.Link()
	i.Memory, i.HPUMemory = control.Size(h.b.memory), control.Size(h.b.perHPU) // its handlers may have asked for it
	var s *nic.ContextStats
	if h.ctx != nil {
		i.ID = h.ctx.ID()
		s = stats[i.ID]
		i.HandlerStats = h.ctx.Stats()
		if m, ok := h.ctx.Messages(); ok {
			i.MessageStats = &m
		}
		if h.has.pair != nil {
			p := h.has.pair.Stats()
			i.Pair = &p
		}
		i.Reserved = h.has.set.Reserved
		if s := &h.has.spec; s.Policy == nic.BlockedRR { // its handlers may have asked for that
			i.Policy, i.Sequence, i.VHPUs = "blocked-rr", s.Sequence, s.VHPUs
		}
	}
	if s != nil && s.Name == h.name {
		i.At, i.AtWhy, i.CPUs, i.Warnings = s.Hook, s.HookWhy, s.CPUs, s.Warnings
	}
	for k, r := range h.b.spec.Rulesets {
		rule := control.Rule{Number: -1, Text: r.String()}
		if s != nil && s.Name == h.name && k < len(s.Rulesets) {
			rule.Number, rule.Matched = s.Rulesets[k].Number, s.Rulesets[k].Matched
		}
		i.Rules = append(i.Rules, rule)
	}
	if h.owner != nil {
		i.Attached = append(i.Attached, h.owner.peer)
	}
	for a := range h.observers {
		i.Attached = append(i.Attached, a.peer)
	}
	slices.SortStableFunc(i.Attached, func(a, b control.Peer) int {
		if a.Observer != b.Observer {
			if b.Observer {
				return -1
			}
			return 1
		}
		return cmp.Compare(a.PID, b.PID)
	})
	return i
}

// A leak is memory that a stuck handler may still touch.
type leak struct {
	d      *Daemon
	device *device
	ctx    *nic.Context
	has    *resources
	name   string
	since  time.Time
}

// free tells whether nothing can touch the memory any more.
func (l *leak) free() bool {
	return l.ctx.Stuck() == 0 && l.device.nic.Drained(l.ctx) && time.Since(l.since) > 2*l.device.limit
}

// leaks sweeps up behind stuck handlers, once a second while there are any.
type leaks struct {
	mu     sync.Mutex
	list   []*leak
	busy   bool
	closed bool
	done   sync.WaitGroup
	stop   chan struct{}
}

func (k *leaks) add(l *leak) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.list = append(k.list, l)
	if k.busy || k.closed {
		return
	}
	k.busy = true
	if k.stop == nil {
		k.stop = make(chan struct{})
	}
	k.done.Go(k.sweep)
}

func (k *leaks) sweep() {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-k.stop:
			return
		case <-tick.C:
		}
		k.mu.Lock()
		k.list = slices.DeleteFunc(k.list, func(l *leak) bool {
			if !l.free() {
				return false
			}
			l.has.drop()
			l.d.logger.Info("the handlers have returned: their memory is free", "context", l.name, "bytes", l.has.bytes)
			return true
		})
		if len(k.list) == 0 {
			k.busy = false
			k.mu.Unlock()
			return
		}
		k.mu.Unlock()
	}
}

// close ends the sweeping, and returns what is left.
func (k *leaks) close() []*leak {
	k.mu.Lock()
	if !k.closed && k.stop != nil {
		close(k.stop)
	}
	k.closed = true
	k.mu.Unlock()
	k.done.Wait()
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.list
}
