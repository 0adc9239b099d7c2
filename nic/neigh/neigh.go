// SPDX-License-Identifier: Apache-2.0

// Package neigh finds the way from an interface to other hosts for those who send frames
// past the kernel's stack: by the kernel's routes, and by its neighbour table, which
// it has the kernel keep. It also knows by which addresses others find the interface.
// It sends nothing itself.
package neigh

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/spin"
)

// Errors that asking again does not help against, for a while.
var (
	ErrNeighbour = errors.New("no such neighbour: it does not answer")
	ErrRoute     = errors.New("no route")
	ErrInterface = errors.New("the route leaves by another interface")
	ErrUnicast   = errors.New("not a host's address")
)

// However many addresses handlers ask for: what they cost.
const (
	maxCache   = 4096                 // destinations that are known
	maxPending = 64                   // next hops that the kernel is looking for
	maxAsks    = 256                  // destinations that wait to be looked up
	perRound   = 8                    // of these, that one round looks up
	perRecheck = 64                   // destinations that one round looks up again when routes have changed
	round      = 5 * time.Millisecond // apart, at least
)

const (
	failFor  = 3 * time.Second // that a neighbour that does not answer is not asked for again
	patience = 5 * time.Second // for the kernel to say that a neighbour does not answer: three requests, a second apart
)

// States of the interface.
const (
	Up        = "up"
	Down      = "down"       // somebody has set it so
	NoCarrier = "no carrier" // nothing at the other end
	Gone      = "gone"       // for good
)

// A way is what is known of a destination. It does not change.
type way struct {
	hop   spin.Hop
	err   error
	stale bool // the MAC was right, and should be asked for again
}

// An entry is a destination in the cache.
type entry struct {
	way   atomic.Pointer[way]
	asked atomic.Bool // while stale: somebody has asked for it

	// Only the run loop uses these.
	via   netip.Addr // next hop; not valid without one
	route way        // all but the MAC
}

// A neighbour is an entry of the kernel's neighbour table.
type neighbour struct {
	state int
	mac   [6]byte
}

// A failure is remembered for a while.
type failure struct {
	until time.Time
	err   error
}

// A Resolver is an spin.Resolver for one interface. Safe for concurrent use.
type Resolver struct {
	index  int
	name   string
	logger *slog.Logger
	nl     *netlink.Handle
	sub    *os.File // what the kernel tells
	news   chan []byte
	asks   chan netip.Addr
	done   chan struct{}
	gone   chan struct{} // closed when the interface is no more
	moved  chan struct{} // has something in it when local is another
	loss   sync.Once
	state  atomic.Pointer[string] // of the interface
	// There is something in it when the state has changed.
	turned chan struct{}
	wg     sync.WaitGroup
	fails  time.Duration

	// Copied when a destination comes or goes, so that handlers read without a
	// lock, and without making an interface of the address, which allocates.
	cache atomic.Pointer[map[netip.Addr]*entry]
	local atomic.Pointer[matcher.Local]
	mtu   atomic.Int64 // of the interface

	// Only the run loop uses these.
	link    netlink.LinkAttrs
	table   map[netip.Addr]neighbour // the kernel's, of the interface
	pending map[netip.Addr]time.Time // next hops that the kernel was asked for, until when to wait
	failed  map[netip.Addr]failure   // next hops that are not asked for
	recheck []netip.Addr             // destinations whose route may have changed
	unsure  bool                     // something could not be read: all of it is, in a while
	next    map[netip.Addr]*entry    // the cache to be, nil while it is as it was
}

// Open returns a resolver for an interface of the network namespace of the calling
// thread. To have the kernel ask for neighbours, it needs CAP_NET_ADMIN all its life. The
// logger is told of what it cannot learn.
func Open(iface *net.Interface, logger *slog.Logger) (*Resolver, error) {
	return open(iface, logger, failFor)
}

func open(iface *net.Interface, logger *slog.Logger, fails time.Duration) (_ *Resolver, err error) {
	r := &Resolver{
		index:   iface.Index,
		name:    iface.Name,
		logger:  logger,
		fails:   fails,
		news:    make(chan []byte, 64),
		asks:    make(chan netip.Addr, maxAsks),
		done:    make(chan struct{}),
		gone:    make(chan struct{}),
		moved:   make(chan struct{}, 1),
		turned:  make(chan struct{}, 1),
		table:   map[netip.Addr]neighbour{},
		pending: map[netip.Addr]time.Time{},
		failed:  map[netip.Addr]failure{},
	}
	r.cache.Store(&map[netip.Addr]*entry{})
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("routes and neighbours of %s: %w", iface.Name, err), r.Close())
		}
	}()
	if r.nl, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	if err := r.nl.SetSocketTimeout(patience); err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	// What changes from here on is heard of, so that nothing is missed.
	if r.sub, err = subscribe(); err != nil {
		return nil, err
	}
	if err := r.load(); err != nil {
		return nil, err
	}
	r.wg.Go(r.listen)
	r.wg.Go(r.run)
	return r, nil
}

// Close ends the resolver. What is in the cache stays good for whoever has it.
func (r *Resolver) Close() error {
	close(r.done)
	var err error
	if r.sub != nil {
		err = r.sub.Close()
	}
	r.wg.Wait()
	if r.nl != nil {
		r.nl.Close()
	}
	return err
}

// Gone is closed when the interface has left the network namespace, for good: one of the
// same name is another.
func (r *Resolver) Gone() <-chan struct{} { return r.gone }

// Local returns who the interface is: its MAC and its addresses, of which there may be
// more than a matching table takes. Nobody changes it.
func (r *Resolver) Local() *matcher.Local { return r.local.Load() }

// Moved receives when Local has changed: for one reader, who then asks for it again.
func (r *Resolver) Moved() <-chan struct{} { return r.moved }

// State says what the interface is: Up, Down, NoCarrier or Gone.
func (r *Resolver) State() string { return *r.state.Load() }

// MTU returns the interface's, as it is now.
func (r *Resolver) MTU() int { return int(r.mtu.Load()) }

// Turned has something for its one reader when State may have changed.
func (r *Resolver) Turned() <-chan struct{} { return r.turned }

// Resolve implements spin.Resolver: with a look into a map. What is not there is asked
// for, as far as there is room.
func (r *Resolver) Resolve(dst netip.Addr) (spin.Hop, error) {
	dst = dst.Unmap()
	e := (*r.cache.Load())[dst]
	if e == nil {
		if !dst.IsValid() || dst.Zone() != "" {
			return spin.Hop{}, errAddress
		}
		r.ask(dst)
		return spin.Hop{}, spin.ErrUnresolved
	}
	w := e.way.Load()
	if w.stale && !e.asked.Load() && e.asked.CompareAndSwap(false, true) && !r.ask(dst) {
		e.asked.Store(false)
	}
	return w.hop, w.err
}

// From implements spin.Resolver.
func (r *Resolver) From(src netip.Addr) (spin.Hop, bool) {
	local := r.local.Load()
	src = src.Unmap()
	return spin.Hop{Source: src, SourceMAC: local.MAC, MTU: int(r.mtu.Load())}, slices.Contains(local.Addrs, src)
}

var errAddress = fmt.Errorf("%w: an IPv4 or IPv6 address without a zone is", ErrUnicast)

func (r *Resolver) ask(dst netip.Addr) bool {
	select {
	case r.asks <- dst:
		return true
	default:
		return false
	}
}

// run does all that takes system calls. Rounds bound what a handler that asks for all
// addresses there are costs.
func (r *Resolver) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	resting := true // until the timer, nothing is looked up
	var retry <-chan time.Time
	for {
		if r.unsure && retry == nil {
			retry = time.After(again)
		}
		asks, was := r.asks, resting
		if resting {
			asks = nil
		}
		select {
		case <-r.done:
			return
		case m := <-r.news:
			r.hear(m)
			resting = resting || len(r.recheck) > 0 // routes change in bunches
		case <-retry:
			retry = nil
			r.hear(nil)
			resting = resting || len(r.recheck) > 0
		case dst := <-asks:
			r.lookUp(dst)
			for n := 1; n < perRound && len(asks) > 0; n++ {
				r.lookUp(<-asks)
			}
			resting = true
		case <-timer.C:
			was = false
			r.expire(time.Now())
			r.recheckSome()
			resting = len(r.recheck) > 0
		}
		if r.next != nil {
			next := r.next
			r.cache.Store(&next)
			r.next = nil
		}
		if resting && !was {
			timer.Reset(round)
		} else if left := r.expires(time.Now()); !resting && left > 0 {
			timer.Reset(left)
		}
	}
}

// recheckSome looks routes up again that may have changed.
func (r *Resolver) recheckSome() {
	n := min(len(r.recheck), perRecheck)
	for _, dst := range r.recheck[:n] {
		if e := r.known(dst); e != nil {
			r.find(dst, e)
			r.settle(dst, e)
		}
	}
	r.recheck = r.recheck[n:]
}

// known returns the entry of a destination, nil if there is none.
func (r *Resolver) known(dst netip.Addr) *entry {
	if r.next != nil {
		return r.next[dst]
	}
	return (*r.cache.Load())[dst]
}

// edit returns the cache to be.
func (r *Resolver) edit() map[netip.Addr]*entry {
	if r.next == nil {
		r.next = maps.Clone(*r.cache.Load())
	}
	return r.next
}

// lookUp answers somebody who has asked for a destination.
func (r *Resolver) lookUp(dst netip.Addr) {
	e := r.known(dst)
	if e == nil {
		e = new(entry)
		r.find(dst, e)
		if e.unresolved() {
			if !r.kick(e.via) {
				return // nobody looks for it: it may be asked for again
			}
			r.learn(e) // the kernel may have refused to
		}
		cache := r.edit()
		if len(cache) >= maxCache { // any will do: whoever needs it asks again
			for old := range cache {
				delete(cache, old)
				break
			}
		}
		cache[dst] = e
		return
	}
	if e.way.Load().stale {
		r.kick(e.via)
	}
}

// kick has the kernel look for a next hop. It returns false if it does not, because
// it looks for many already.
func (r *Resolver) kick(via netip.Addr) bool {
	if _, ok := r.pending[via]; ok {
		return true
	}
	if len(r.pending) >= maxPending {
		return false
	}
	// As if a socket had sent something to it.
	err := r.nl.NeighSet(&netlink.Neigh{LinkIndex: r.index, IP: via.AsSlice(), Flags: netlink.NTF_USE})
	if err != nil {
		r.failed[via] = failure{time.Now().Add(r.fails), fmt.Errorf("ask for neighbour %v on %s: %w", via, r.link.Name, err)}
		return true
	}
	r.pending[via] = time.Now().Add(patience)
	return true
}

// settle forgets a destination that nobody looks for: whoever needs it asks again.
func (r *Resolver) settle(dst netip.Addr, e *entry) {
	if _, ok := r.pending[e.via]; !ok && e.unresolved() {
		delete(r.edit(), dst)
	}
}

func (e *entry) unresolved() bool { return errors.Is(e.way.Load().err, spin.ErrUnresolved) }

// each calls f for all destinations behind a next hop.
func (r *Resolver) each(via netip.Addr, f func(dst netip.Addr, e *entry)) {
	all := *r.cache.Load()
	if r.next != nil {
		all = r.next
	}
	for dst, e := range all {
		if e.via == via {
			f(dst, e)
		}
	}
}

// expire forgets next hops that did not answer, and what lies behind them: who
// needs it asks again.
func (r *Resolver) expire(now time.Time) {
	forget := func(via netip.Addr) {
		r.each(via, func(dst netip.Addr, e *entry) {
			r.learn(e)
			r.settle(dst, e)
		})
	}
	for via, t := range r.pending {
		if now.After(t) { // the kernel has lost interest
			delete(r.pending, via)
			forget(via)
		}
	}
	for via, f := range r.failed {
		if now.After(f.until) {
			delete(r.failed, via)
			forget(via)
		}
	}
}

// expires returns when expire has something to do, 0 for never.
func (r *Resolver) expires(now time.Time) (left time.Duration) {
	soonest := func(t time.Time) {
		if d := max(t.Sub(now), round); left == 0 || d < left {
			left = d
		}
	}
	for _, t := range r.pending {
		soonest(t)
	}
	for _, f := range r.failed {
		soonest(f.until)
	}
	return left
}

// States of a neighbour with a MAC that may be used.
const valid = netlink.NUD_PERMANENT | netlink.NUD_NOARP | netlink.NUD_REACHABLE |
	netlink.NUD_PROBE | netlink.NUD_DELAY | netlink.NUD_STALE

// learn puts together what route and neighbour say about a destination.
func (r *Resolver) learn(e *entry) {
	w := e.route
	if n := r.table[e.via]; w.err != nil {
	} else if n.state&valid != 0 {
		w.hop.MAC = n.mac
		w.stale = n.state&netlink.NUD_STALE != 0
	} else if f, failed := r.failed[e.via]; failed {
		w = way{err: f.err}
	} else {
		w = way{err: spin.ErrUnresolved}
	}
	e.way.Store(&w)
	e.asked.Store(false)
}

// find asks the kernel for the route to a destination.
func (r *Resolver) find(dst netip.Addr, e *entry) {
	e.route, e.via = way{}, dst
	if err := r.routeTo(dst, e); err != nil {
		e.route, e.via = way{err: fmt.Errorf("route to %v from %s: %w", dst, r.link.Name, err)}, netip.Addr{}
	}
	r.learn(e)
}

func (r *Resolver) routeTo(dst netip.Addr, e *entry) error {
	if dst.IsMulticast() || dst.IsUnspecified() || dst == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		return ErrUnicast
	}
	routes, err := r.nl.RouteGet(dst.AsSlice())
	if err != nil {
		return fmt.Errorf("%w: %w", ErrRoute, err)
	}
	if len(routes) == 0 {
		return ErrRoute
	}
	switch to := &routes[0]; {
	case to.Type == unix.RTN_LOCAL:
		return fmt.Errorf("%w: it is one of this host's own", ErrUnicast)
	case to.Type != unix.RTN_UNICAST:
		return ErrUnicast
	case to.LinkIndex != r.index:
		return fmt.Errorf("%w, number %d", ErrInterface, to.LinkIndex)
	case to.Encap != nil:
		return fmt.Errorf("%w without encapsulation (%v)", ErrRoute, to.Encap)
	default:
		gw := to.Gw
		if via, ok := to.Via.(*netlink.Via); ok { // IPv4 by an IPv6 gateway
			gw = via.Addr
		}
		if a, ok := netip.AddrFromSlice(gw); ok {
			e.via = a.Unmap()
		}
		src, _ := netip.AddrFromSlice(to.Src)
		e.route.hop = spin.Hop{Source: src.Unmap(), MTU: r.link.MTU}
		copy(e.route.hop.SourceMAC[:], r.link.HardwareAddr)
		return nil
	}
}
