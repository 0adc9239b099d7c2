// SPDX-License-Identifier: Apache-2.0

// Package daemon owns NICs, and lets unprivileged applications attach to their
// execution contexts.
package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/daemon/web"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/nic/neigh"
	"github.com/xspin/xspin/spin"
)

// A kindError is an error that is errNotFound, errDenied, errBusy or errInvalid as well,
// without saying so.
type kindError struct{ kind, err error }

func (e kindError) Error() string   { return e.err.Error() }
func (e kindError) Unwrap() []error { return []error{e.kind, e.err} }

func failf(kind error, format string, args ...any) error {
	return kindError{kind, fmt.Errorf(format, args...)}
}

// A Daemon is a running one.
//
// Locks, in the order in which they are taken: reload, then op of contexts by their
// names, then mu, then mu of a context. The first two are held while something takes
// its time; the others never.
type Daemon struct {
	logger  *slog.Logger
	opts    Options
	started time.Time
	socket  string
	uid     int // that has started it, before it becomes somebody else
	server  *server
	metrics *metricsServer // nil without
	web     *web.Server    // nil without
	devices []*device
	memory  budget
	leaks   leaks
	tenants tenants
	revived chan struct{} // closed when nobody revives contexts any more; nil: nobody did
	stop    chan struct{} // closed when that is to end
	made    atomic.Uint64 // contexts, ever

	reload sync.Mutex // also held by installs

	mu       sync.RWMutex
	cfg      *Config // in force
	admins   who
	windows  map[string]*memory // shared ones
	contexts map[string]*managedContext
	closing  bool
	closed   sync.Once
	closeErr error
}

// A device is an interface with its NIC.
type device struct {
	key   string
	nic   *nic.NIC
	limit time.Duration // of handlers
	done  chan struct{} // closed when its events have ended
	gone  atomic.Bool   // the interface is, for good
}

// lost is an error if the interface is gone.
func (c *device) lost() error {
	if !c.gone.Load() {
		return nil
	}
	return failf(errBusy, "interface %s is gone: restart the daemon when it is there again", c.key)
}

// Options of Start.
type Options struct {
	File    string // that Reload reads; Optional
	Version string
	Logger  *slog.Logger
	Web     string // address of the live page, "[ADDRESS:]PORT"; none if left out
	// KeepPrivileges: do not drop capabilities, as tests and demos want that go
	// on in the same process.
	KeepPrivileges bool
}

// CheckWeb says what is wrong with an address of the live page.
func CheckWeb(address string) error {
	_, err := web.Address(address)
	return err
}

// Start opens the NICs, installs the contexts and listens. After that it needs no
// other privileges than a few capabilities, and gives the rest up.
func Start(cfg *Config, o Options) (_ *Daemon, err error) {
	var c checker
	plans := checkConfig(&c, cfg)
	if err := c.err(); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	var tail web.Tail
	if o.Web != "" {
		o.Logger = tail.Keep(o.Logger)
	}
	d := &Daemon{
		logger:   o.Logger,
		opts:     o,
		started:  time.Now(),
		uid:      os.Getuid(),
		socket:   cmp.Or(cfg.Socket, control.Socket),
		memory:   budget{limit: int64(cfg.Limits.complete().Memory), freed: make(chan struct{}, 1)},
		stop:     make(chan struct{}),
		cfg:      cfg,
		admins:   checkWho(new(checker), "", &cfg.Admins),
		windows:  map[string]*memory{},
		contexts: map[string]*managedContext{},
	}
	defer func() {
		if err != nil {
			ctx, cancel := context.WithTimeout(context.Background(), closeTime)
			defer cancel()
			err = errors.Join(err, d.Close(ctx))
		}
	}()
	// First of all: a second daemon shall not touch the first one's interfaces.
	if d.server, err = newServer(d.socket, d, d.logger); err != nil {
		return nil, err
	}
	if o.Web != "" {
		if d.web, err = web.Listen(o.Web, d.logger); err != nil {
			return nil, err
		}
	}
	for i := range cfg.Interfaces {
		if err := d.open(&cfg.Interfaces[i]); err != nil {
			return nil, err
		}
	}
	for i := range cfg.Windows {
		if err := d.share(&cfg.Windows[i]); err != nil {
			return nil, err
		}
	}
	numbers, err := dealAll(plans, nil)
	if err != nil {
		return nil, err
	}
	var contexts []*managedContext
	for _, b := range plans {
		h, err := d.make(b, true, numbers[b.doc.Name])
		if err != nil {
			return nil, err
		}
		contexts = append(contexts, h)
	}
	for _, w := range cfg.Warnings() {
		d.logger.Warn(w)
	}
	if cfg.Metrics != "" {
		if d.metrics, err = listenMetrics(cfg.Metrics, d, d.logger); err != nil {
			return nil, err
		}
	}
	if err := d.dropPrivileges(); err != nil {
		return nil, err
	}
	// Start serving only now, with the final user and capabilities, so that files
	// belong to that user.
	for _, h := range contexts {
		if err := h.start(); err != nil {
			return nil, err
		}
	}
	if d.metrics != nil {
		d.metrics.serve()
	}
	if d.web != nil {
		d.web.Serve(web.Source{Status: d.status, Stats: d.stats, Contexts: d.infos, Log: &tail})
		d.logger.Info("the live page is at "+d.web.URL(), "url", d.web.URL())
	}
	d.revived = make(chan struct{})
	go d.revive()
	d.server.serve()
	notifyReady(d.logger)
	return d, nil
}

// Logger is Options.Logger, whose lines the live page shows, too.
func (d *Daemon) Logger() *slog.Logger { return d.logger }

// open makes a NIC of an interface.
func (d *Daemon) open(f *Interface) error {
	cfg := nic.Config{
		Interface: f.Name,
		Mode:      modes[f.Mode],
		Hook:      hooks[f.Hook],
		Order:     orders[f.Order],
		HPUs:      f.HPUs,
		Workers:   f.Workers,
		CPUs:      f.CPUs,
		Wait:      waits[f.Wait],
		Ring:      f.Ring,
		Limit:     time.Duration(f.Limit),
		Logger:    d.logger,
	}
	c := &device{key: f.key(), limit: cmp.Or(time.Duration(f.Limit), hpu.DefaultLimit), done: make(chan struct{})}
	open := func() (err error) {
		c.nic, err = nic.Open(cfg)
		return err
	}
	if f.Netns != "" {
		ns, err := netns.OpenNamespace(f.Netns)
		if err != nil {
			return fmt.Errorf("interface %s: %w", c.key, err)
		}
		defer ns.Close()
		// What the NIC opens belongs to the namespace for good.
		if err := ns.Do(open); err != nil {
			return fmt.Errorf("interface %s: %w", c.key, err)
		}
	} else if err := open(); err != nil {
		return fmt.Errorf("interface %s: %w", c.key, err)
	}
	d.devices = append(d.devices, c)
	go d.listen(c)
	go d.watch(c)
	return nil
}

// share makes a window that several contexts may use.
func (d *Daemon) share(w *control.Window) error {
	m, err := d.newMemory(w.Name, int64(w.Size))
	if err != nil {
		return fmt.Errorf("window %q: %w", w.Name, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.windows[w.Name] = m
	return nil
}

// shared returns a window that several contexts may use, for the caller to drop.
func (d *Daemon) shared(name string, size int64) *memory {
	d.mu.RLock()
	defer d.mu.RUnlock()
	m := d.windows[name]
	if m == nil || m.Size() != size {
		return nil
	}
	m.refs.Add(1)
	return m
}

// A memory counts for limits.memory, until all who refer to it have dropped it.
type memory struct {
	*hostq.Memory
	d      *Daemon
	refs   atomic.Int32
	charge *charge
}

func (d *Daemon) newMemory(name string, size int64) (*memory, error) {
	charge, err := d.charge(roundUpToElement(size))
	if err != nil {
		return nil, err
	}
	m, err := hostq.NewMemory(name, size)
	if err != nil {
		charge.free()
		return nil, err
	}
	one := &memory{Memory: m, d: d, charge: charge}
	one.refs.Store(1)
	return one, nil
}

// drop frees the memory if nobody else refers to it. A nil memory is none.
func (m *memory) drop() {
	if m == nil || m.refs.Add(-1) > 0 {
		return
	}
	size := m.Size()
	if err := m.Close(); err != nil {
		m.d.logger.Error("memory is not freed", "bytes", size, "error", err)
		return
	}
	m.charge.free()
}

// listen hears what goes wrong in handlers of a NIC, until that is closed. The NIC has
// logged it.
func (d *Daemon) listen(c *device) {
	defer close(c.done)
	for e := range c.nic.Events() {
		d.mu.RLock()
		h := d.contexts[e.Name] // also while the daemon ends, and the NIC tells the rest
		d.mu.RUnlock()
		if h == nil || h.device != c {
			continue
		}
		h.record(e)
		if e.Kind == spin.HandlerOverrun && e.Detail != "" { // not one that only counts others
			h.overrun(e.Detail)
		}
	}
}

// watch tells when the interface goes down and comes up, and ends sessions when it is gone,
// until its NIC is closed. Nothing that is gone comes back by itself: the next interface of
// the name is another one.
func (d *Daemon) watch(c *device) {
	was := neigh.Up
	for gone := false; !gone; {
		select {
		case <-c.done:
			return
		case <-c.nic.LinkTurned():
			is := c.nic.Link()
			switch {
			case is == was || is == neigh.Gone:
				continue
			case is == neigh.Up:
				d.logger.Info("interface "+c.key+" is up again", "interface", c.key)
			case is == neigh.NoCarrier:
				d.logger.Warn("interface "+c.key+" has no carrier: no packets come until there is one", "interface", c.key)
			default:
				d.logger.Warn("interface "+c.key+" is down: no packets come until it is up", "interface", c.key)
			}
			was = is
		case <-c.nic.Gone():
			gone = true
		}
	}
	c.gone.Store(true)
	d.logger.Error("interface "+c.key+" is gone: no packets come any more, until the daemon is restarted", "interface", c.key)
	for _, h := range d.all() {
		if h.device == c {
			h.dismiss(c.lost().Error())
		}
	}
}

// Socket returns where it listens.
func (d *Daemon) Socket() string { return d.socket }

// status returns what the daemon tells of itself.
func (d *Daemon) status() control.Status {
	s := control.Status{
		Version:    d.opts.Version,
		PID:        os.Getpid(),
		Started:    d.started,
		Config:     d.opts.File,
		Interfaces: []string{},
		Links:      []string{},
		Handlers:   []control.Registration{},
	}
	for _, c := range d.devices {
		s.Interfaces = append(s.Interfaces, c.key)
		s.Links = append(s.Links, c.nic.Link())
	}
	for _, r := range handlers.All() {
		s.Handlers = append(s.Handlers, control.Registration{Name: r.Name, Help: r.Help})
	}
	return s
}

// stats returns the counters of all NICs.
func (d *Daemon) stats() ([]nic.Stats, error) {
	all := []nic.Stats{}
	for _, c := range d.devices {
		s, err := c.nic.Stats()
		if err != nil {
			return nil, err
		}
		s.Interface = c.key
		all = append(all, *s)
	}
	return all, nil
}

// mayAdmin returns an error unless a peer may do everything.
func (d *Daemon) mayAdmin(p control.Peer) error {
	if d.isAdmin(p) {
		return nil
	}
	return failf(errDenied, "user %d may not do this: only root and users in the configuration's admins may", p.UID)
}

func (d *Daemon) isAdmin(p control.Peer) bool {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return p.UID == 0 || p.UID == d.uid || d.admins.has(p)
}

// mayRead returns an error unless a peer may see what handlers of a context print and
// keep in memory: who may attach to it.
func (d *Daemon) mayRead(p control.Peer, name string) error {
	h, err := d.find(name)
	if err != nil {
		return err
	}
	if d.isAdmin(p) || h.mayAttach(p) {
		return nil
	}
	return failf(errDenied, "context %q is not for user %d: only root and users in its attach or in admins may see it", name, p.UID)
}

const (
	closeTime   = 10 * time.Second
	whyClosing  = "the daemon is ending"
	whyRemoved  = "the context was removed"
	whyReloaded = "the context was changed by a reload"
	whyOver     = "the context starts over, without what the session had"
)

// Close detaches applications, drains contexts and closes the NICs. Handlers that are
// stuck, and what they may still touch, are left behind and are an error. Idempotent.
func (d *Daemon) Close(ctx context.Context) error {
	d.closed.Do(func() { d.closeErr = d.close(ctx) })
	return d.closeErr
}

func (d *Daemon) close(ctx context.Context) error {
	notifyStopping(d.logger)
	// A reload ends first, and nothing begins any more.
	d.reload.Lock()
	defer d.reload.Unlock()
	d.mu.Lock()
	d.closing = true
	var all []*managedContext
	for _, h := range d.contexts {
		all = append(all, h)
	}
	d.mu.Unlock()
	var quiet sync.WaitGroup // all at once: one time limit for all
	for _, h := range all {
		quiet.Go(h.quiet)
	}
	quiet.Wait()
	for _, h := range all {
		h.dismiss(whyClosing)
	}
	var errs []error
	if d.server != nil {
		errs = append(errs, d.server.close(ctx, whyClosing))
	}
	if d.metrics != nil {
		d.metrics.close(ctx)
	}
	if d.web != nil {
		d.web.Close(ctx)
	}
	if d.revived != nil {
		close(d.stop)
		<-d.revived
	}
	d.tenants.close()
	// No transition is under way from here on.
	for _, h := range all {
		h.op <- struct{}{}
		h.silence()
	}
	left := d.leaks.close()
	for _, c := range d.devices {
		err := c.nic.Close() // drains all of its contexts
		errs = append(errs, err)
		<-c.done
		if err != nil {
			continue // handlers may still run
		}
		for _, h := range all {
			if h.device == c {
				h.letGo()
			}
		}
		for _, l := range left {
			if l.device == c {
				l.has.drop()
			}
		}
	}
	for _, h := range all {
		h.book.close()
		h.end()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close the daemon: %w", err) // handlers may use windows
	}
	for _, m := range d.windows {
		m.drop()
	}
	return nil
}

// find returns a context by name.
func (d *Daemon) find(name string) (*managedContext, error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.closing {
		return nil, failf(errBusy, "%s", whyClosing)
	}
	if h := d.contexts[name]; h != nil {
		return h, nil
	}
	there := "there is none"
	if len(d.contexts) > 0 {
		there = "the daemon has " + strings.Join(slices.Sorted(maps.Keys(d.contexts)), ", ")
	}
	return nil, failf(errNotFound, "no context %q: %s", name, there)
}

// all returns the contexts by name.
func (d *Daemon) all() []*managedContext {
	d.mu.RLock()
	defer d.mu.RUnlock()
	var all []*managedContext
	for _, h := range d.contexts {
		all = append(all, h)
	}
	slices.SortFunc(all, func(a, b *managedContext) int { return cmp.Compare(a.name, b.name) })
	return all
}
