// SPDX-License-Identifier: Apache-2.0

// Package nic is the SmartNIC: the matching engine, the AF_XDP sockets and the
// HPUs, put together on a network interface. It is the package that an
// application imports.
//
//	n, err := nic.Open(nic.Config{Interface: "eth1"})
//	c, err := n.Install(nic.ContextSpec{
//		Name:     "echo",
//		Rulesets: []matcher.Ruleset{matcher.UDPPort(7)},
//		Handlers: hpu.Handlers{Payload: echo},
//	})
//	err = n.Activate(c)
package nic

import (
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/capability"
	"github.com/xspin/xspin/internal/nicsock"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/nic/neigh"
	"github.com/xspin/xspin/spin"
	"github.com/xspin/xspin/xsk"
)

// Defaults of Config.
const (
	DefaultHPUs = 16 // FPsPIN's
	DefaultRing = 2048
)

// A Mode is how the XDP program is attached.
type Mode = loader.Mode

// Attach modes.
const (
	Auto    = loader.Auto    // native XDP if the driver has it, else generic
	Native  = loader.Native  // in the driver
	Generic = loader.Generic // in the stack: slower, on every interface
)

// An Order is where the program at tc stands among those of others.
type Order = loader.Order

// Orders. A program that returns a verdict of its own keeps a packet from those behind it.
const (
	Last  = loader.Last
	First = loader.First
)

// MaxHPUs is how many HPUs a NIC can have.
const MaxHPUs = bpf.MaxHPUs

// MaxRing is how many buffers a receive queue can have.
const MaxRing = 1 << 15

const (
	headroom   = 256  // that the kernel leaves in front of a received frame: XDP_PACKET_HEADROOM
	maxBuffers = 40   // of one frame: 64 KiB in the smallest buffers
	txRing     = 512  // a batch's sends must fit, and some batches more
	spare      = 1024 // frames for sends that are not of a received frame
	reserve    = 64   // frames of a queue that are always there for the driver
)

// Config of a NIC. The zero value of a field is its default.
type Config struct {
	Interface string        // name, in the network namespace of the calling thread. Required
	Mode      Mode          // how the program at xdp is attached. Defaults to Auto
	Hook      Hook          // of contexts that name none. Defaults to HookAuto
	Order     Order         // of the program at tc among those of others. Defaults to Last
	HPUs      int           // 1 to 64. Defaults to DefaultHPUs
	Workers   int           // threads that serve the HPUs. Defaults to GOMAXPROCS, at most one per HPU
	CPUs      []int         // that these threads run on, in turn. Defaults to any
	Wait      hpu.Wait      // what they do when idle. Defaults to Adaptive
	Egress    hpu.Egress    // order of frames on tx rings. Defaults to HandlersFirst
	Limit     time.Duration // that a handler may run, see hpu.Config. Defaults to hpu.DefaultLimit
	Ring      int           // buffers in flight on a receive queue, a power of two. Defaults to DefaultRing
	Logger    *slog.Logger  // Defaults to slog.Default
}

// A NIC is one XsPIN instance on one network interface. Its methods are safe for
// concurrent use.
type NIC struct {
	cfg      Config
	iface    *net.Interface
	ingress  *loader.Ingress
	hooks    hooks
	umem     *xsk.UMEM
	queues   []*xsk.Queue
	sockets  []*xsk.Socket // queue by queue, HPU by HPU
	pool     *hpu.Pool
	injector *loader.Injector
	control  *nicsock.Server
	raw      *rawSocket
	neigh    *neigh.Resolver
	diag     *netlink.Handle              // see warnOfSockets
	stirred  chan struct{}                // see fair
	serve    func(*Context) (tier, error) // newTier, but for tests
	load     loadFunc                     // Object.Load, but for tests
	done     chan struct{}                // closed when the NIC closes

	events     chan spin.Fault
	eventsLost atomic.Uint64

	// Calls that continue without the lock, and that Close waits for. Added to with
	// the lock, while not closed.
	ops sync.WaitGroup

	closing   sync.Mutex // held by Close
	replacing sync.Mutex // held by Replace, which holds several contexts
	mu        sync.Mutex // guards what follows, by the file that owns it

	// life
	closed   bool
	contexts map[uint16]*Context
	retired  map[uint16]*Context // removed, with buffers still out
	buckets  bucketRanges
	places   map[*Context]bool // cleared, with credit that is reserved
	drain    time.Duration     // removeTime, but for tests

	// table
	gen           uint32    // of the one in force
	manyAddresses sync.Once // told

	// credit
	short    bool          // somebody has less than is due to it
	patience time.Duration // until there may be some

	unfair bool // for tests: see fair
}

// Open makes a NIC of an interface. Until a context is activated all its traffic
// goes to Linux as before. Nothing of the interface is changed but the programs at its hooks,
// which the kernel detaches when the process ends, whichever way that is. A NIC at xdp has one
// there, and each has one at a hook while a context needs it.
func Open(cfg Config) (_ *NIC, err error) {
	if err := cfg.complete(); err != nil {
		return nil, fmt.Errorf("open NIC: %w", err)
	}
	iface, err := net.InterfaceByName(cfg.Interface)
	if err != nil {
		return nil, fmt.Errorf("open NIC: interface %q in this network namespace: %w", cfg.Interface, err)
	}
	mode := cfg.Mode
	if mode == Auto {
		if mode, err = loader.DriverMode(iface); err != nil {
			return nil, fmt.Errorf("open NIC: %w", err)
		}
	}
	if cfg.Hook == HookAuto {
		cfg.Hook = HookXDP
		if mode == Generic || isVeth(iface) { // generic XDP is never better
			cfg.Hook = HookTC
		}
	}
	check := loader.Check
	if cfg.Hook == HookTC {
		check = loader.CheckTC
	}
	if err := errors.Join(check(iface), capability.Need("open sockets on "+iface.Name, capability.NetRaw)); err != nil {
		return nil, fmt.Errorf("open NIC: %w", err)
	}
	n := &NIC{
		cfg:      cfg,
		iface:    iface,
		contexts: map[uint16]*Context{},
		retired:  map[uint16]*Context{},
		buckets:  newBucketRanges(),
		places:   map[*Context]bool{},
		drain:    removeTime,
		hooks:    hooks{patience: hookPatience},
		stirred:  make(chan struct{}, 1),
		done:     make(chan struct{}),
		events:   make(chan spin.Fault, 64),
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.Close())
		}
	}()
	queues, err := loader.Queues(iface)
	if err != nil {
		return nil, fmt.Errorf("open NIC: %w", err)
	}
	spares, err := n.openSockets(queues)
	if errors.Is(err, unix.ENOBUFS) { // so says the kernel
		err = errors.Join(err, capability.Need("lock more memory than RLIMIT_MEMLOCK allows", capability.IPCLock))
	}
	if err != nil {
		return nil, fmt.Errorf("open NIC: %s: %w", iface.Name, err)
	}
	most := 1
	if n.queues[0].Granted().MultiBuffer {
		most = maxBuffers
	}
	n.ingress, err = loader.Load(loader.Config{
		Interface:  iface,
		Mode:       mode,
		HPUs:       cfg.HPUs,
		Queues:     queues,
		BufferSize: n.umem.Config().FrameSize - headroom,
		MaxBuffers: most,
	})
	if err != nil {
		return nil, fmt.Errorf("open NIC: %w", err)
	}
	if cfg.Hook == HookXDP {
		if err := n.useHook(loader.XDP); err != nil { // for as long as the NIC is there
			return nil, fmt.Errorf("open NIC: %w", err)
		}
	}
	if mode == Generic && cfg.Mode == Auto {
		cfg.Logger.Warn("the driver has no native XDP: handlers on HPUs are slower, in generic mode, and hand nothing over to the stack", "interface", iface.Name)
	}
	pool := hpu.Config{
		Memory:  n.umem,
		Share:   n.ingress.Share(),
		Buckets: n.ingress.Buckets(),
		Spare:   spares,
		Workers: cfg.Workers,
		CPUs:    cfg.CPUs,
		Wait:    cfg.Wait,
		Egress:  cfg.Egress,
		Limit:   cfg.Limit,
		Logger:  cfg.Logger.With("interface", iface.Name),
	}
	for q := range n.queues {
		hq := hpu.Queue{Frames: n.queues[q], Shared: n.ingress.Queue(q)}
		for h := range cfg.HPUs {
			s := n.sockets[q*cfg.HPUs+h]
			hq.Rings = append(hq.Rings, s)
			if err := n.ingress.SetSocket(q, h, s.FD()); err != nil {
				return nil, fmt.Errorf("open NIC: %w", err)
			}
		}
		pool.Queues = append(pool.Queues, hq)
	}
	if mode == Native {
		if n.injector, err = loader.NewInjector(iface); err != nil {
			return nil, fmt.Errorf("open NIC: %w", err)
		}
		pool.Stack = n.injector
	}
	if n.raw, err = openRaw(iface); err != nil {
		return nil, fmt.Errorf("open NIC: %w", err)
	}
	if n.neigh, err = neigh.Open(iface, cfg.Logger); err != nil {
		return nil, fmt.Errorf("open NIC: %w", err)
	}
	// For warnOfSockets, which does without.
	if diag, err := netlink.NewHandle(unix.NETLINK_INET_DIAG); err == nil {
		n.diag = diag
	}
	if n.pool, err = hpu.New(pool); err != nil {
		return nil, fmt.Errorf("open NIC: %w", err)
	}
	n.serve, n.load = n.newTier, (*Object).Load
	go n.forward()
	go n.follow()
	go n.fair()
	if n.ingress.Trains() {
		go n.watchTrains()
	}
	return n, nil
}

// complete fills in the defaults and checks what was given.
func (c *Config) complete() error {
	if c.Interface == "" {
		return errors.New("no interface named")
	}
	if c.Mode != Auto && c.Mode != Native && c.Mode != Generic {
		return fmt.Errorf("XDP mode %d: want Auto, Native or Generic", int(c.Mode))
	}
	if c.Hook < HookAuto || c.Hook > HookTC {
		return fmt.Errorf("hook %d: want HookAuto, HookXDP or HookTC", int(c.Hook))
	}
	if c.Order != Last && c.Order != First {
		return fmt.Errorf("order %d: want Last or First", int(c.Order))
	}
	if c.HPUs == 0 {
		c.HPUs = DefaultHPUs
	}
	if c.HPUs < 1 || c.HPUs > MaxHPUs {
		return fmt.Errorf("%d HPUs: want 1 to %d", c.HPUs, MaxHPUs)
	}
	if c.Workers == 0 {
		c.Workers = min(c.HPUs, runtime.GOMAXPROCS(0))
	}
	if c.Workers < 0 || c.Workers > c.HPUs {
		return fmt.Errorf("%d workers for %d HPUs: want 1 to %d, or 0 for the default", c.Workers, c.HPUs, c.HPUs)
	}
	if c.Ring == 0 {
		c.Ring = DefaultRing
	}
	if c.Ring < 64 || c.Ring > MaxRing || c.Ring&(c.Ring-1) != 0 {
		return fmt.Errorf("ring of %d buffers: want a power of two, 64 to %d", c.Ring, MaxRing)
	}
	if c.Limit < 0 {
		return fmt.Errorf("handler time limit %v is negative", c.Limit)
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return nil
}

// openSockets makes the UMEM and a socket for each HPU on each queue.
//
// Frames have a home: those of a queue go round through its fill ring, the
// spare ones through tx rings only. A queue's frames are as many as the program
// may have in flight on it, since a credit returns only when its frame is back
// on the fill ring; so that ring never runs empty under the program, and an rx
// ring of the same size never overflows.
func (n *NIC) openSockets(queues int) (spares []uint64, err error) {
	size := 2048
	if n.iface.MTU+14+4 > size-headroom {
		size = 4096
	}
	perQueue := n.cfg.Ring + reserve
	fill := pow2(perQueue)
	// A fill ring has no more entries than there are frames: this matters on an
	// interface of one queue.
	spare := max(spare, fill-queues*perQueue)
	n.umem, err = xsk.NewUMEM(xsk.UMEMConfig{Frames: queues*perQueue + spare, FrameSize: size})
	if err != nil {
		return nil, err
	}
	ring := xsk.SocketConfig{RxSize: n.cfg.Ring, TxSize: txRing}
	for q := range queues {
		initial := make([]uint64, perQueue)
		for i := range initial {
			initial[i] = n.umem.Addr(q*perQueue + i)
		}
		queue, s, err := n.umem.OpenQueue(xsk.QueueConfig{
			Ifindex:        n.iface.Index,
			Queue:          q,
			FillSize:       fill,
			CompletionSize: pow2(perQueue + spare),
			Generic:        n.cfg.Mode == Generic,
			Initial:        initial,
		}, ring)
		if err != nil {
			return nil, err
		}
		n.queues = append(n.queues, queue)
		n.sockets = append(n.sockets, s)
		for range n.cfg.HPUs - 1 {
			s, err := queue.Open(ring)
			if err != nil {
				return nil, err
			}
			n.sockets = append(n.sockets, s)
		}
	}
	for i := range spare {
		spares = append(spares, n.umem.Addr(queues*perQueue+i))
	}
	return spares, nil
}

// pow2 returns the smallest power of two that is not less than n.
func pow2(n int) int { return 1 << bits.Len(uint(n-1)) }

// Interface returns the interface that the NIC sits on.
func (n *NIC) Interface() *net.Interface { return n.iface }

// Transmit sends a frame that the application has made, Ethernet header included. It
// is copied, and waits its turn behind, or between, the frames of handlers. At
// most 512 can be under way.
func (n *NIC) Transmit(frame []byte) error { return n.pool.Transmit(frame) }

// Gone is closed when the interface is deleted, or goes to another network namespace:
// nothing comes any more, and the NIC is only good to be closed.
func (n *NIC) Gone() <-chan struct{} { return n.neigh.Gone() }

// Link says what the interface is: "up", "down", "no carrier", or "gone".
func (n *NIC) Link() string { return n.neigh.State() }

// LinkTurned has something for its one reader when Link may have changed.
func (n *NIC) LinkTurned() <-chan struct{} { return n.neigh.Turned() }

// Events returns what went wrong in handlers. Events that nobody takes are
// counted as lost.
func (n *NIC) Events() <-chan spin.Fault { return n.events }

// Close detaches the program, ends open messages as Remove does, stops the HPUs and
// frees everything. Handlers that are stuck, and packets that were kept and not
// released, are left behind with the memory that they lie in, and are an error.
// Idempotent.
func (n *NIC) Close() error {
	n.closing.Lock()
	defer n.closing.Unlock()
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		return nil
	}
	n.closed = true
	asked := n.control
	n.control = nil
	n.mu.Unlock()
	close(n.done)
	n.ops.Wait() // nobody begins any more
	var errs []error
	if asked != nil {
		errs = append(errs, asked.Close()) // waits for a last report, which takes the lock
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	// Frames stop coming first; then the workers end; then the memory goes.
	if n.ingress != nil {
		errs = append(errs, n.leaveHooks(), n.ingress.ClearSockets())
	}
	stuck, kept := 0, 0
	if n.pool != nil {
		var drains sync.WaitGroup // all at once: one time limit for all
		for _, c := range n.contexts {
			drains.Go(func() {
				c.tier.close(n.drain)
				c.letGo()
			})
		}
		drains.Wait()
		n.pool.Close()
		stuck, kept = n.pool.Stuck(), n.pool.Kept()
	}
	if n.neigh != nil {
		errs = append(errs, n.neigh.Close())
	}
	errs = append(errs, n.raw.close())
	if n.diag != nil {
		n.diag.Close()
	}
	if n.injector != nil {
		errs = append(errs, n.injector.Close())
	}
	var wg sync.WaitGroup // all at once: see xsk.Socket.Close
	failed := make([]error, len(n.sockets))
	for i, s := range n.sockets {
		wg.Go(func() { failed[i] = s.Close() })
	}
	wg.Wait()
	errs = append(errs, failed...)
	if stuck > 0 || kept > 0 {
		return errors.Join(append(errs, fmt.Errorf("close NIC: %d handlers are stuck and %d packets kept: the memory that they may touch is not freed", stuck, kept))...)
	}
	if n.ingress != nil {
		errs = append(errs, n.ingress.Close())
	}
	if n.umem != nil {
		errs = append(errs, n.umem.Close())
	}
	return errors.Join(errs...)
}
