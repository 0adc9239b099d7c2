// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// resources are what one life of a context uses: memory that nobody else has, but for
// shared windows. It is freed when the last who refers to it drops it: the context,
// sessions (which pass its descriptors on), and whoever reads or writes it.
type resources struct {
	d        *Daemon
	windows  []heldWindow
	memory   *memory     // nil: none
	perHPU   *memory     // nil: none
	pair     *hostq.Pair // nil: none
	receives *receives
	set      *handlers.Set
	spec     nic.ContextSpec // that was installed
	bytes    int64           // of its own
	queue    *charge         // of these: the pair's; nil: none
	reserved *charge         // and the handlers'; nil: none

	refs atomic.Int32
	kept atomic.Int64 // bytes of its own that a process may keep
}

type heldWindow struct {
	windowUse
	mem *memory
	win *hostq.Window
}

// hold makes what a context needs. It takes some ms per MiB.
func (d *Daemon) hold(b *contextPlan, set *handlers.Set, lanes int) (_ *resources, err error) {
	// What handlers reserve may be measured, and differ from what was checked.
	reserved := roundUpToElement(b.reserved(set))
	bytes := b.charge() - roundUpToElement(b.reserve) + reserved
	// First of all: giving back a part of it would have others try again for nothing.
	if err := d.enough(bytes); err != nil {
		return nil, err
	}
	has := &resources{d: d, set: set, bytes: bytes}
	has.refs.Store(1)
	defer func() {
		if err != nil {
			has.drop()
		}
	}()
	for _, use := range b.windows {
		w := heldWindow{windowUse: use}
		if use.shared {
			if w.mem = d.shared(use.name, use.size); w.mem == nil {
				return nil, failf(errBusy, "shared window %q has changed meanwhile", use.name)
			}
		} else if w.mem, err = d.newMemory(use.name, use.size); err != nil {
			return nil, fmt.Errorf("window %q: %w", use.name, err)
		}
		has.windows = append(has.windows, w)
		if has.windows[len(has.windows)-1].win, err = w.mem.Window(0, use.size, use.rights); err != nil {
			return nil, fmt.Errorf("window %q: %w", use.name, err)
		}
	}
	if b.memory > 0 {
		if has.memory, err = d.newMemory(b.doc.Name, b.memory); err != nil {
			return nil, fmt.Errorf("HPU memory: %w", err)
		}
	}
	if b.perHPU > 0 {
		if has.perHPU, err = d.newMemory(b.doc.Name, b.perHPU*int64(b.hpus)); err != nil {
			return nil, fmt.Errorf("memory of HPUs: %w", err)
		}
	}
	if reserved > 0 {
		if has.reserved, err = d.charge(reserved); err != nil {
			return nil, fmt.Errorf("memory of handlers: %w", err)
		}
	}
	if b.queue != nil {
		cfg := *b.queue
		cfg.Lanes = lanes
		if has.queue, err = d.charge(queueBytes(cfg.Layout)); err != nil {
			return nil, fmt.Errorf("queue: %w", err)
		}
		if has.pair, err = hostq.NewPair(cfg); err != nil {
			return nil, fmt.Errorf("queue: %w", err)
		}
	}
	has.receives = &receives{}
	for i := range has.windows {
		if w := has.windows[i].win; w.Rights()&spin.Write != 0 {
			has.receives.first = w
			break
		}
	}
	return has, nil
}

// equip gives handlers what they may use.
func (has *resources) equip(r *hpu.Resources) {
	for i := range has.windows {
		r.Windows = append(r.Windows, hpu.NamedWindow{Name: has.windows[i].name, Window: has.windows[i].win})
	}
	if has.memory != nil {
		r.Memory = has.memory.Whole()
	}
	if has.perHPU != nil {
		r.PerHPU = has.perHPU.Whole()
	}
	if has.pair != nil {
		r.Host = has.pair
	}
}

// ref keeps it from being freed, until drop. The caller knows that it is not yet.
func (has *resources) ref() { has.refs.Add(1) }

func (has *resources) drop() {
	if has.refs.Add(-1) > 0 {
		return
	}
	for _, w := range has.windows {
		w.mem.drop()
	}
	has.memory.drop()
	has.perHPU.drop()
	has.reserved.free()
	if has.pair != nil {
		if err := has.pair.Close(); err != nil {
			has.d.logger.Error("a queue is not freed", "error", err)
			return
		}
	}
	has.queue.free()
}

// quiet is for a context that has them, and is about to end. The end of the context waits for
// packets that are still on their way after a bounded time.
func (has *resources) quiet(n *nic.NIC, ctx *nic.Context) {
	if has.pair != nil {
		has.pair.StopRequests()
	}
	_ = n.Deactivate(ctx)
}

// window finds a window by name, the first if there is none.
func (has *resources) window(name string) (*heldWindow, error) {
	for i := range has.windows {
		if w := &has.windows[i]; name == "" || w.name == name {
			return w, nil
		}
	}
	if name == "" {
		return nil, failf(errInvalid, "the context has no window")
	}
	return nil, failf(errInvalid, "the context has no window %q", name)
}

// receives bind messages. Until the application has posted its first receive, messages
// go to the first window that handlers may write, at place 0: FPsPIN's way, for handlers
// that place what they get themselves. From then on each message takes a posted receive,
// and is refused if none matches, so that its sender tries again: an application that
// posts receives is never overwritten.
//
// Handlers in eBPF have receives of their own, of which the same is true.
type receives struct {
	hpu.Receives
	first  spin.Window  // nil: none
	posted atomic.Bool  // ever
	kernel *nic.Context // whose handlers are in eBPF; nil: they are in Go
}

// Bind implements hpu.Binder.
func (l *receives) Bind(m *hpu.Message) (spin.Binding, error) {
	if !l.posted.Load() {
		return spin.Binding{Window: l.first}, nil
	}
	return l.Receives.Bind(m)
}

func (l *receives) post(r spin.Receive) error {
	if l.kernel != nil {
		if err := l.kernel.Post(r); err != nil {
			return kindError{errBusy, cause(err)}
		}
		return nil
	}
	l.posted.Store(true) // first: no message may take the window meanwhile
	if err := l.Post(r); err != nil {
		return kindError{errBusy, err}
	}
	return nil
}

// unpost takes back the first receive that is as r.
func (l *receives) unpost(r spin.Receive) bool {
	if l.kernel != nil {
		return l.kernel.Unpost(r)
	}
	return l.Unpost(r.Tag, r.Ignore, func(p *spin.Receive) bool {
		return p.Keep == r.Keep && p.User == r.User && p.Window == r.Window && p.Place == r.Place && p.Size == r.Size
	})
}

// An attachment is a process attached to a context.
type attachment struct {
	h    *managedContext
	has  *resources
	peer control.Peer
	over chan string // why the daemon ends it; room for one
	once sync.Once
}

func (a *attachment) String() string {
	what := "application"
	if a.peer.Observer {
		what = "observer"
	}
	return fmt.Sprintf("%s (pid %d, uid %d)", what, a.peer.PID, a.peer.UID)
}

// admit attaches a process to a context. There is one application at a time; observers
// do not disturb it.
func (d *Daemon) admit(name string, p control.Peer, observer bool) (attached, error) {
	h, err := d.find(name)
	if err != nil {
		return nil, err
	}
	if h.allows(p, observer) == nil {
		if err := h.taken(observer); err != nil {
			return nil, err // before waiting for what may take seconds
		}
	}
	if err := h.begin(); err != nil {
		return nil, err
	}
	defer h.end()
	// Only now: a reload that fails changes for a while who may.
	if err := h.allows(p, observer); err != nil {
		return nil, err
	}
	if err := h.taken(observer); err != nil {
		return nil, err
	}
	b := h.contextPlan()
	p.Observer, p.Since = observer, time.Now()
	a := &attachment{h: h, peer: p, over: make(chan string, 1)}
	d.mu.RLock()
	closing := d.closing
	d.mu.RUnlock()
	h.mu.Lock()
	h.fault(overrunText)
	switch {
	case closing:
		err = failf(errBusy, "%s", whyClosing)
	case h.device.lost() != nil:
		err = h.device.lost()
	case h.starved:
		err = failf(errBusy, "context %q waits for memory: %s", name, h.why)
	case h.state == stopped || h.state == failed:
		err = failf(errBusy, "context %q is %s (%s): it starts over when it is activated, with `xspin ctx activate %[1]s`", name, h.state, h.why)
	case h.has == nil:
		err = failf(errBusy, "context %q is %s", name, h.state)
	}
	if err != nil {
		h.mu.Unlock()
		return nil, err
	}
	a.has = h.has
	a.has.ref()
	if observer {
		h.observers[a] = true
	} else {
		h.owner = a
	}
	arm := !observer && h.state == installed && b.doc.Activate == atAttach && !h.off
	h.mu.Unlock()
	if arm {
		if err := h.arm(); err != nil {
			h.mu.Lock()
			h.owner = nil
			h.mu.Unlock()
			a.has.drop()
			return nil, err
		}
	}
	d.logger.Info("attached", "context", name, "pid", p.PID, "uid", p.UID, "observer", observer)
	return a, nil
}

// allows says whether the process may attach.
func (h *managedContext) allows(p control.Peer, observer bool) error {
	if h.d.isAdmin(p) {
		return nil
	}
	b := h.contextPlan()
	switch {
	case !b.attach.has(p):
		return failf(errDenied, "context %q is not for user %d: see attach in its configuration", h.name, p.UID)
	case observer && !b.doc.Attach.Observers:
		return failf(errDenied, "context %q takes no observers: see attach.observers in its configuration", h.name)
	}
	return nil
}

// taken says that somebody else is the application.
func (h *managedContext) taken(observer bool) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if a := h.owner; a != nil && !observer {
		return failf(errBusy, "context %q is taken: %v is attached since %s", h.name, a, a.peer.Since.Format(time.TimeOnly))
	}
	return nil
}

// mapped tells whether the process gets a window's descriptor. Observers get none: a
// descriptor that can be mapped can be written.
func (a *attachment) mapped(w *heldWindow) bool { return w.app == appMapped && !a.peer.Observer }

// reply is the first document of the session.
func (a *attachment) reply() control.AttachReply {
	r := control.AttachReply{Context: a.h.name, Windows: []control.AttachWindow{}, HPUs: a.h.device.nic.HPUs()}
	for i := range a.has.windows {
		w := &a.has.windows[i]
		if w.app == appNone {
			continue
		}
		app := appCopies
		if a.mapped(w) {
			app = appMapped
		}
		r.Windows = append(r.Windows, control.AttachWindow{Name: w.name, Size: w.size, App: app, Rights: w.rights.String()})
	}
	if a.has.pair != nil && !a.peer.Observer {
		l := a.has.pair.Layout()
		r.Pair = &l
	}
	return r
}

// descriptors are those that come with reply: of the windows that are mapped, then the
// pair's memory, doorbell, and a doorbell for each lane. They are there until release.
func (a *attachment) descriptors() (fds []int) {
	for i := range a.has.windows {
		if w := &a.has.windows[i]; a.mapped(w) {
			fds = append(fds, w.mem.FD())
		}
	}
	if a.has.pair != nil && !a.peer.Observer {
		memory, doorbell, lanes := a.has.pair.Descriptors()
		fds = append(append(fds, memory, doorbell), lanes...)
	}
	return fds
}

// handOver says that the descriptors are about to be passed to the process at the other
// end. Their memory counts until that has ended, even if it detaches before.
func (a *attachment) handOver(c *net.UnixConn) error {
	var charges []*charge
	var own int64
	for i := range a.has.windows {
		if w := &a.has.windows[i]; a.mapped(w) {
			charges = append(charges, w.mem.charge)
			if !w.shared {
				own += w.mem.charge.n
			}
		}
	}
	if a.has.pair != nil && !a.peer.Observer {
		charges = append(charges, a.has.queue)
		own += a.has.queue.n
	}
	if charges == nil {
		return nil
	}
	a.has.kept.Store(own)
	return a.h.d.tenants.add(c, a.peer.PID, charges, a.h.d.logger)
}

// ended says that the daemon ends the session, and why.
func (a *attachment) ended() <-chan string { return a.over }

// dismiss ends the session.
func (a *attachment) dismiss(why string) {
	select {
	case a.over <- why:
	default: // it is ending
	}
}

// do does what the session asks.
func (a *attachment) do(ask *control.Ask) control.Answer {
	ans := control.Answer{Seq: ask.Seq}
	var err error
	switch ask.Do {
	case "stats":
		i := a.h.info(a.h.device.stats())
		ans.Info = &i
	case "read":
		ans.Data, err = a.read(ask.Read)
	case "counters":
		ans.Data, err = a.counters()
	case "post", "unpost", "trigger", "activate", "deactivate":
		if a.peer.Observer {
			err = failf(errDenied, "%s: observers cannot", ask.Do)
			break
		}
		switch ask.Do {
		case "post", "unpost":
			err = a.post(ask.Do, ask.Receive)
		case "trigger":
			err = a.trigger(ask.Trigger)
		default:
			err = a.arm(ask.Do == "activate")
		}
	default:
		err = failf(errInvalid, "%q: want post, unpost, read, trigger, activate, deactivate, stats, counters", ask.Do)
	}
	if err != nil {
		ans.Error = err.Error()
	}
	return ans
}

// arm activates or deactivates the context, as long as it is this session's.
func (a *attachment) arm(on bool) error {
	h := a.h
	if err := h.begin(); err != nil {
		return err
	}
	defer h.end()
	h.mu.Lock()
	mine, state, off, why := h.owner == a && h.has == a.has, h.state, h.off, h.why
	h.mu.Unlock()
	switch {
	case !mine:
		return failf(errBusy, "the session is over")
	case on && off:
		return failf(errBusy, "context %q was deactivated by an administrator, who can undo that: `xspin ctx activate %[1]s`", h.name)
	case on && state == installed:
		return h.arm()
	case !on && state == active:
		return h.disarm()
	case state == installed || state == active:
		return nil
	}
	return failf(errBusy, "context %q is %s: %s", h.name, state, why)
}

func (a *attachment) read(r *control.Range) ([]byte, error) {
	if r == nil || r.Offset < 0 || r.Length < 0 || r.Length > control.MaxRead {
		return nil, failf(errInvalid, "read: want a range of a window, of up to %d bytes", control.MaxRead)
	}
	w, err := a.window(r.Window)
	if err != nil {
		return nil, err
	}
	if r.Offset > w.size || r.Length > w.size-r.Offset {
		return nil, failf(errInvalid, "%d bytes at %d of window %q of %d: %w", r.Length, r.Offset, w.name, w.size, spin.ErrBounds)
	}
	b := make([]byte, r.Length)
	copy(b, w.mem.Bytes()[r.Offset:])
	return b, nil
}

// window finds a window that the application may use.
func (a *attachment) window(name string) (*heldWindow, error) {
	w, err := a.has.window(name)
	if err == nil && w.app == appNone {
		return nil, failf(errDenied, "window %q is not for applications", w.name)
	}
	return w, err
}

// trigger activates the context with what the application may see itself.
func (a *attachment) trigger(t *control.Trigger) error {
	if t == nil {
		return failf(errInvalid, "trigger: what is missing")
	}
	if t.Window != "" {
		if _, err := a.window(t.Window); err != nil {
			return err
		}
	}
	return a.h.trigger(t)
}

// counters are all counting events, of 8 bytes each, the least significant first.
func (a *attachment) counters() ([]byte, error) {
	if a.has.pair == nil {
		return nil, failf(errInvalid, "the context has no queue to the application, and no counters")
	}
	var b []byte
	for i := range hostq.Counters {
		b = binary.LittleEndian.AppendUint64(b, a.has.pair.Counter(i).Get())
	}
	return b, nil
}

func (a *attachment) post(do string, r *control.Receive) error {
	if r == nil {
		return failf(errInvalid, "%s: the receive is missing", do)
	}
	if !a.h.contextPlan().ending {
		return failf(errInvalid, "%s: the context's messages never end, and go nowhere", do)
	}
	w, err := a.window(r.Window)
	switch {
	case err != nil:
		return err
	case w.rights&spin.Write == 0:
		return failf(errInvalid, "handlers cannot write window %q: %w", w.name, spin.ErrRights)
	case r.Place < 0 || r.Place > w.size || r.Size < 0 || r.Size > w.size-r.Place:
		return failf(errInvalid, "%d bytes at %d of window %q of %d: %w", r.Size, r.Place, w.name, w.size, spin.ErrBounds)
	}
	rcv := spin.Receive{
		Binding: spin.Binding{Window: w.win, Place: r.Place, Size: r.Size, User: r.User},
		Tag:     r.Tag, Ignore: r.Ignore, Keep: r.Keep,
	}
	if do == "post" {
		return a.has.receives.post(rcv)
	}
	if !a.has.receives.unpost(rcv) {
		return failf(errNotFound, "no such receive is posted: a message has taken it, or it never was")
	}
	return nil
}

// release says that the process is gone, in whatever way. When it returns nothing of the
// process is left in the context, which starts over: whoever attaches next waits for that,
// and finds nothing of this one. Its memory is new, so that whoever has kept the old one harms
// nobody. Idempotent.
func (a *attachment) release(reason string) { a.once.Do(func() { a.leave(reason) }) }

const stoppedText = "detached, and the context is stopped: it starts over when it is activated"

func (a *attachment) leave(reason string) {
	h, d := a.h, a.h.d
	log := d.logger.With("context", h.name, "pid", a.peer.PID, "uid", a.peer.UID, "reason", reason)
	if a.peer.Observer {
		h.mu.Lock()
		delete(h.observers, a)
		h.mu.Unlock()
		a.has.drop()
		log.Info("observer detached")
		return
	}
	h.op <- struct{}{} // all that holds it is bounded
	h.mu.Lock()
	h.owner = nil
	gone, state := h.gone, h.state
	mine := h.has == a.has
	h.mu.Unlock()
	a.has.drop() // so that it can be freed before the next is made
	d.mu.RLock()
	closing := d.closing
	d.mu.RUnlock()
	switch {
	case gone || closing || !mine:
		log.Info("detached")
		h.end()
		return
	case h.device.lost() != nil:
		h.silence()
		log.Info("detached")
		h.end()
		return
	case state == stopped:
		h.silence()
		log.Warn(stoppedText)
		h.end()
		return
	}
	// Those who look on look at what is about to be no more.
	h.mu.Lock()
	for o := range h.observers {
		o.dismiss("the application has detached, and its windows go with it")
	}
	h.mu.Unlock()
	l, had := h.empty()
	log = log.With("messages_ended", l.messages, "requests_failed", l.requests)
	if l.overran { // only who may activate has it start over
		h.set(stopped, overrunText)
		log.Warn(stoppedText)
		h.end()
		return
	}
	go func() { // in the background: the process need not wait for memory that is another's
		defer h.end()
		h.again(l, had, log)
	}()
}

// again gives the context a new life after its application has left. The caller has op.
func (h *managedContext) again(l loss, had *resources, log *slog.Logger) {
	err := h.fill(l, had)
	h.mu.Lock()
	arm := h.b.doc.Activate == atStart && !h.off
	h.mu.Unlock()
	if err == nil && arm {
		if err = h.arm(); err != nil {
			h.set(failed, err.Error())
		}
	}
	switch {
	case errors.Is(err, errMemory):
		log.Warn("detached, and the context waits for memory to start over", "error", err)
	case err != nil:
		log.Error("detached, and the context could not start over", "error", err)
	default:
		log.Info("detached, and the context has started over", "state", h.currentState())
	}
}

func (h *managedContext) currentState() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.state
}
