// SPDX-License-Identifier: Apache-2.0

// Package hpu runs handlers: it takes matched packets from the rx rings of the
// HPUs, calls the handlers of their execution contexts, and sees to it that
// every frame and every credit finds its way back.
//
// An HPU is rings and state. A worker, one goroutine on one thread, serves
// several HPUs and is the only one to touch their rings. Frames go
//
//	fill ring -> (kernel) -> rx ring -> handler -> fill ring
//	                                       '-> tx ring -> (kernel) -> completion -> fill ring
//
// and are owned by exactly one of these at a time. The credit that the XDP
// program took for a packet returns when its frames are on the fill ring again,
// never earlier: so the fill ring cannot run empty, see docs/scheduling.md.
package hpu

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/internal/clock"
	"github.com/xspin/xspin/spin"
	"github.com/xspin/xspin/xsk"
)

// Ring is the receive and transmit ring of one HPU on one queue; *xsk.Socket
// is one.
type Ring interface {
	Receive([]xsk.Desc) int
	RxAvailable() uint32
	Send([]xsk.Desc) int
	TxFree() int
	Kick() (pending bool, err error)
	FD() int
	Stats() (xsk.Stats, error)
}

// Exchanger is the fill and completion ring of one queue; *xsk.Queue is one.
type Exchanger interface {
	Exchange(recycle, done []uint64) (filled, completed int)
}

// Stack takes packets for the Linux stack. copyTo copies the packet's bytes
// from an offset on and is good during the call only.
type Stack interface {
	Inject(size int, copyTo func(dst []byte, off int) int) error
}

// Queue is a receive queue of the interface.
type Queue struct {
	Rings  []Ring // by HPU
	Frames Exchanger
	Shared *bpf.Queue // counters shared with the program
}

// Wait tells what a worker does when there is nothing to do.
type Wait int

// Ways of waiting.
const (
	Adaptive Wait = iota // spin for as long as that has paid off lately, then sleep
	Sleep                // sleep at once
	Spin                 // never sleep
)

var waits = []string{"adaptive", "sleep", "spin"}

func (w Wait) valid() bool { return w >= 0 && int(w) < len(waits) }

func (w Wait) String() string {
	if !w.valid() {
		return fmt.Sprintf("Wait(%d)", int(w))
	}
	return waits[w]
}

// ParseWait reads what String writes.
func ParseWait(s string) (Wait, error) {
	for i, name := range waits {
		if s == name {
			return Wait(i), nil
		}
	}
	return 0, fmt.Errorf("wait %q: want %v", s, waits)
}

// Egress tells who goes first on a tx ring.
type Egress int

// Orders of egress.
const (
	HandlersFirst Egress = iota // the NIC's own frames take what handlers leave
	RoundRobin                  // one of the handlers', one of the NIC's
)

var egresses = []string{"handlers first", "round robin"}

func (e Egress) valid() bool { return e >= 0 && int(e) < len(egresses) }

func (e Egress) String() string {
	if !e.valid() {
		return fmt.Sprintf("Egress(%d)", int(e))
	}
	return egresses[e]
}

// DefaultLimit is how long a handler may run.
const DefaultLimit = time.Second

// Config of a Pool. The pool owns the rings' user side, and the frames that
// come through them, until Close.
type Config struct {
	Memory  *xsk.UMEM
	Queues  []Queue    // all with the same number of rings
	Share   *bpf.Share // credits and load, shared with the program
	Buckets []uint64   // which HPU messages are on, shared with the program
	Spare   []uint64   // frames for sends that are not of a received frame
	Stack   Stack      // Optional: without, ToStack is not supported
	Workers int        // 1..HPUs. Defaults to the lesser of HPUs and GOMAXPROCS
	CPUs    []int      // worker i runs on CPUs[i modulo their number] only. Optional: on any
	Wait    Wait
	Egress  Egress
	// Limit is how long a handler may run, at least 1 ms. Defaults to
	// DefaultLimit. For each handler that has run for longer and has not
	// returned, GOMAXPROCS of the whole process is one higher, so that the
	// thread it occupies is not missing elsewhere.
	Limit time.Duration
	// Faults is how far apart events of a context and kind are at least, see Event.
	// Defaults to a second; negative: there is one for each.
	Faults time.Duration
	// Clock says what time it is for messages, timers and handlers, in ns. Workers
	// ask it when they look for work, not when it moves: it is for tests that have a
	// time of their own. Defaults to CLOCK_MONOTONIC.
	Clock  func() int64
	Logger *slog.Logger // Optional. Defaults to slog.Default
}

// frameRoom returns how long a frame in one buffer may be.
func (c *Config) frameRoom() int { return c.Memory.Config().FrameSize }

// Pool is all HPUs of a NIC and the workers that serve them. Its methods are
// safe for concurrent use.
type Pool struct {
	cfg      Config
	scale    clock.Scale
	workers  []*worker
	contexts [bpf.MaxContexts]atomic.Pointer[Context]
	records  []atomic.Uint64 // of frames on a tx ring: see account.pack
	evMu     sync.Mutex
	events   chan spin.Fault
	evClosed bool           // stuck handlers may outlive the channel
	lostEv   atomic.Uint64  // events that found the channel full
	heldEv   atomic.Bool    // some were held back
	inTx     []atomic.Int64 // frames sent and not completed, by queue
	stop     chan struct{}  // of the watchdog
	watched  chan struct{}  // closed when it has stopped
	wg       sync.WaitGroup // runners that were not abandoned
	closed   atomic.Bool
	stuck    atomic.Int64 // handlers that were given up and have not returned
	kept     atomic.Int64 // packets that Keep gave out, not released
	leaky    atomic.Bool  // some context is
	ownOut   atomic.Int64 // spare frames that Transmit took and that are not back

	mu    sync.Mutex
	spare []uint64
	own   []xsk.Desc // the NIC's own frames, waiting for worker 0

	timed   atomic.Pointer[[]*Context] // contexts with messages or a timer; written under mu
	hosting atomic.Pointer[[]*Context] // contexts with an application; written under mu
	ending  atomic.Int32               // how many of them end all their messages
}

// New returns a pool that runs.
func New(cfg Config) (*Pool, error) {
	if len(cfg.Queues) == 0 || len(cfg.Queues[0].Rings) == 0 {
		return nil, errors.New("hpu: no queue, or no HPU")
	}
	hpus := len(cfg.Queues[0].Rings)
	for i := range cfg.Queues {
		if n := len(cfg.Queues[i].Rings); n != hpus {
			return nil, fmt.Errorf("hpu: queue %d has %d rings, queue 0 has %d: one for each HPU", i, n, hpus)
		}
	}
	if cfg.Workers == 0 {
		cfg.Workers = min(hpus, runtime.GOMAXPROCS(0))
	}
	if cfg.Workers < 1 || cfg.Workers > hpus {
		return nil, fmt.Errorf("hpu: %d workers for %d HPUs: want 1 to %d", cfg.Workers, hpus, hpus)
	}
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, fmt.Errorf("hpu: CPUs of this process: %w", err)
	}
	for _, cpu := range cfg.CPUs {
		if cpu < 0 || !set.IsSet(cpu) {
			return nil, fmt.Errorf("hpu: CPU %d is not one that this process may use", cpu)
		}
	}
	if !cfg.Wait.valid() {
		return nil, fmt.Errorf("hpu: %v is not a way of waiting: want %v", cfg.Wait, waits)
	}
	if !cfg.Egress.valid() {
		return nil, fmt.Errorf("hpu: %v is not an order of egress: want %q", cfg.Egress, egresses)
	}
	if cfg.Limit == 0 {
		cfg.Limit = DefaultLimit
	}
	if cfg.Limit < time.Millisecond {
		return nil, fmt.Errorf("hpu: handler time limit %v: at least 1ms", cfg.Limit)
	}
	if cfg.Faults == 0 {
		cfg.Faults = time.Second
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	p := &Pool{
		cfg:     cfg,
		scale:   clock.Calibrate(),
		records: make([]atomic.Uint64, cfg.Memory.Config().Frames),
		events:  make(chan spin.Fault, 64),
		inTx:    make([]atomic.Int64, len(cfg.Queues)),
		stop:    make(chan struct{}),
		watched: make(chan struct{}),
		spare:   slices.Clone(cfg.Spare),
	}
	for i := range cfg.Workers {
		w, err := newWorker(p, i)
		if err != nil {
			for _, w := range p.workers {
				w.free()
			}
			return nil, fmt.Errorf("hpu: worker %d: %w", i, err)
		}
		p.workers = append(p.workers, w)
	}
	for _, w := range p.workers {
		p.launch(w, nil)
	}
	go p.watch()
	return p, nil
}

// now returns the time in ns.
func (p *Pool) now() int64 {
	if p.cfg.Clock != nil {
		return p.cfg.Clock()
	}
	return clock.Monotonic()
}

// Install makes a context known, so that its packets find their handlers.
func (p *Pool) Install(c *Context) error {
	if int(c.id) >= bpf.MaxContexts {
		return fmt.Errorf("context id %d: want 0 to %d", c.id, bpf.MaxContexts-1)
	}
	if c.msgs != nil && c.msgs.tables == nil {
		c.msgs.open(len(p.workers))
	}
	if l, ok := c.res.Host.(interface{ Layout() hostq.Layout }); ok && l.Layout().Lanes != len(p.workers) {
		return fmt.Errorf("the pair of context %d has %d lanes: one for each of the %d workers is needed", c.id, l.Layout().Lanes, len(p.workers))
	}
	if !p.contexts[c.id].CompareAndSwap(nil, c) {
		return fmt.Errorf("context id %d is in use", c.id)
	}
	if err := p.doorbells(c, unix.EPOLL_CTL_ADD); err != nil {
		p.contexts[c.id].Store(nil)
		return err
	}
	p.keepTime(c, true)
	return nil
}

// doorbells has the workers hear an application that answers, or no longer.
func (p *Pool) doorbells(c *Context, op int) error {
	if c.res.Host == nil {
		return nil
	}
	if list := p.hosting.Load(); list != nil && slices.ContainsFunc(*list, func(o *Context) bool { return o != c && o.res.Host == c.res.Host }) {
		return nil // contexts may share an application
	}
	for _, w := range p.workers {
		fd := c.res.Host.Doorbell(w.id)
		if fd < 0 {
			continue
		}
		// Edge-triggered: nobody has to read for it to be quiet again.
		ev := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET, Fd: int32(fd)}
		if err := unix.EpollCtl(w.ep, op, fd, &ev); err != nil {
			return fmt.Errorf("epoll_ctl: doorbell of context %d, descriptor %d: %w", c.id, fd, err)
		}
	}
	return nil
}

// Idle tells whether no packet of the context is on its way, in a handler or
// in a send.
func (p *Pool) Idle(c *Context) bool {
	return p.inFlight(c) == 0
}

// inFlight returns how many buffers of a context are out.
func (p *Pool) inFlight(c *Context) (n int) {
	for _, q := range p.cfg.Queues {
		n += int(atomic.LoadUint32(&q.Shared.Issued[c.id]) - atomic.LoadUint32(&q.Shared.Done[c.id]))
	}
	return n
}

// Drain waits until the context is idle, and ends its open messages: no more
// packets will come. Its rulesets must be out of the table.
// When the time is up it runs no further handler, waits for those that are
// running (the time limit sees to it that this ends), and returns an error that
// says what is still out: its id must not be used again before Idle.
func (p *Pool) Drain(c *Context, d time.Duration) error {
	deadline := time.Now().Add(d)
	half := deadline.Add(-d / 2)
	// Messages of a context that was stopped do not end any more.
	for (!p.Idle(c) || c.open() > 0 && c.halt.Load() == 0) && time.Now().Before(deadline) {
		// Has what was on its way been seen? Packets that handlers keep cannot
		// be told from it, but do not last for ever.
		if c.msgs != nil && (p.inFlight(c) <= c.msgs.queue.Held() || time.Now().After(half)) {
			p.setEnding(c, true)
		}
		if c.res.Host != nil && time.Now().After(half) {
			c.res.Host.Detach() // do not wait for outstanding answers
		}
		p.wake()
		time.Sleep(time.Millisecond)
	}
	c.halt.Or(haltRemoved)
	p.setEnding(c, false)
	// A runner looks at this after it has said what it runs: one that says
	// nothing of the context now will run no handler of it. The context stays
	// in the table for so long, for the watchdog.
	for _, w := range p.workers {
		for {
			r := w.current.Load()
			id, running := r.running()
			if stateOf(r.state.Load()) != abandoned && (!running || id != c.id) {
				break // one that was abandoned is replaced when all is counted
			}
			time.Sleep(time.Millisecond)
		}
	}
	if p.contexts[c.id].CompareAndSwap(c, nil) {
		p.emitHeldOf(c, math.MaxInt64)
		p.keepTime(c, false)
		_ = p.doorbells(c, unix.EPOLL_CTL_DEL) // the application may have the other end for longer
		p.unvisited()
		p.endRequests(c)
	}
	if p.Idle(c) {
		for i := range c.buckets.Size {
			atomic.StoreUint64(&p.cfg.Buckets[c.buckets.Base+i], 0)
		}
		return nil
	}
	return fmt.Errorf("context %d (%s): %d buffers still in flight after %v", c.id, c.name, p.inFlight(c), d)
}

// Transmit sends a frame that the NIC has made, at least 14 bytes; the bytes are
// copied. It leaves on queue 0, behind what handlers send or alternating with
// it, see Config.Egress. ErrFrames if half of the spare frames are waiting or on
// their way already: the others are for handlers.
func (p *Pool) Transmit(frame []byte) error {
	if limit := p.cfg.frameRoom(); len(frame) < 14 || len(frame) > limit {
		return fmt.Errorf("transmit %d bytes: %w: want 14 to %d", len(frame), ErrSize, limit)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed.Load() {
		return fmt.Errorf("transmit: %w", errClosed)
	}
	if most := (len(p.cfg.Spare) + 1) / 2; p.ownOut.Load() >= int64(most) {
		return fmt.Errorf("transmit: %d frames are waiting or on their way, which is the limit: try when some have left: %w", most, ErrFrames)
	}
	n := len(p.spare)
	if n == 0 {
		return fmt.Errorf("transmit: %w", ErrFrames)
	}
	addr := p.spare[n-1]
	p.spare = p.spare[:n-1]
	copy(p.cfg.Memory.Bytes(addr, len(frame)), frame)
	p.ownOut.Add(1)
	p.own = append(p.own, xsk.Desc{Addr: addr, Len: uint32(len(frame))})
	p.workers[0].hasWork.Store(true)
	p.workers[0].wake()
	return nil
}

var errClosed = errors.New("pool closed")

// Events returns what went wrong in handlers. It is closed by Close. Events that
// nobody takes are counted, see Stats.
func (p *Pool) Events() <-chan spin.Fault { return p.events }

// emit makes an event of the context and logs it, if its time has come; detail is called
// for nothing else.
func (p *Pool) emit(kind spin.FaultKind, c *Context, hpu int, detail func() string) {
	held, ok := c.gates[kind].pass(clock.Monotonic(), p.cfg.Faults, hpu)
	if !ok {
		p.heldEv.Store(true)
		return
	}
	p.Report(spin.Fault{Kind: kind, Context: c.id, Name: c.name, HPU: hpu, Detail: detail(), More: held})
}

// emitHeld tells of events that were held back, when nothing has come for as long as
// they are to be apart.
func (p *Pool) emitHeld() {
	if !p.heldEv.Swap(false) {
		return
	}
	now := clock.Monotonic()
	for i := range p.contexts {
		if c := p.contexts[i].Load(); c != nil && !p.emitHeldOf(c, now) {
			p.heldEv.Store(true)
		}
	}
}

// emitHeldOf does so for a context. It returns false if there is something whose time has
// not come.
func (p *Pool) emitHeldOf(c *Context, now int64) (all bool) {
	all = true
	for k := range c.gates {
		g := &c.gates[k]
		switch {
		case g.held.Load() == 0:
		case now < g.next.Load():
			all = false
		default:
			if n := g.held.Swap(0); n > 0 { // else one has told of them just now
				p.Report(spin.Fault{Kind: spin.FaultKind(k), Context: c.id, Name: c.name, HPU: int(g.hpu.Load()), More: n})
			}
		}
	}
	return all
}

// Report makes and logs an event, also for handlers that are not the pool's.
func (p *Pool) Report(e spin.Fault) {
	p.evMu.Lock()
	if p.evClosed {
		p.lostEv.Add(1)
	} else {
		select {
		case p.events <- e:
		default:
			p.lostEv.Add(1)
		}
	}
	p.evMu.Unlock()
	args := []any{"context", e.Name, "hpu", e.HPU}
	if e.More > 0 {
		args = append(args, "more", e.More)
	}
	if e.Detail != "" {
		args = append(args, "detail", e.Detail)
	}
	p.cfg.Logger.Warn(e.Kind.String(), args...)
}

func (p *Pool) giveBack(k *Kept) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed.Load() {
		return // nobody is left to take it, and the waker may be gone
	}
	w := k.worker
	w.returned = append(w.returned, k)
	w.hasWork.Store(true)
	w.wake()
}

// wake wakes the workers, while there are any.
func (p *Pool) wake() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed.Load() {
		return
	}
	for _, w := range p.workers {
		w.wake()
	}
}

// Close stops the workers and waits for them, but not for handlers that were
// given up: those keep the memory they may still touch, and Stuck tells so.
func (p *Pool) Close() {
	if list := p.hosting.Load(); list != nil {
		for _, c := range *list {
			c.res.Host.Detach() // continuations run now
		}
	}
	p.mu.Lock()
	first := !p.closed.Swap(true)
	p.mu.Unlock()
	if !first {
		return
	}
	for _, w := range p.workers {
		w.wake()
	}
	p.wg.Wait() // the watchdog sees to it that this ends
	close(p.stop)
	<-p.watched
	for i := range p.contexts {
		if c := p.contexts[i].Load(); c != nil {
			p.emitHeldOf(c, math.MaxInt64)
		}
	}
	for _, w := range p.workers {
		w.free()
	}
	p.evMu.Lock()
	defer p.evMu.Unlock()
	p.evClosed = true
	close(p.events)
}

// Kept returns how many packets handlers have kept and not released.
func (p *Pool) Kept() int { return int(p.kept.Load()) }

// Stuck returns how many handlers ran past their limit and have not returned.
func (p *Pool) Stuck() int { return int(p.stuck.Load()) }

// Stats of an HPU since the pool was made.
type Stats struct {
	HPU       int           `json:"hpu"`
	Handled   uint64        `json:"handled"`   // HERs
	Batches   uint64        `json:"batches"`   // that they came in
	Busy      time.Duration `json:"busy_ns"`   // from a batch's first look to its end
	Occupancy uint32        `json:"occupancy"` // buffers on their way to it or held by it, now
}

// Stats returns the statistics of all HPUs and the number of events lost.
func (p *Pool) Stats() (hpus []Stats, lostEvents uint64) {
	hpus = make([]Stats, len(p.cfg.Queues[0].Rings))
	for _, w := range p.workers {
		for _, pt := range w.ports {
			s := &hpus[pt.hpu]
			s.HPU = pt.hpu
			s.Handled += pt.handled.Load()
			s.Batches += pt.batches.Load()
			s.Busy += time.Duration(p.scale.Nanoseconds(pt.busy.Load()))
			s.Occupancy += pt.occupancy()
		}
	}
	return hpus, p.lostEv.Load()
}

// epoll registers what can wake a worker.
func epoll(fds ...int) (int, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("epoll_create1: %w", err)
	}
	for _, fd := range fds {
		ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}
		if err := unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
			unix.Close(ep)
			return -1, fmt.Errorf("epoll_ctl: descriptor %d: %w", fd, err)
		}
	}
	return ep, nil
}
