// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// Errors that callers tell apart.
var (
	ErrClosed  = errors.New("NIC is closed")
	ErrRemoved = errors.New("context is not installed")
	ErrTable   = errors.New("matching table is full")
	ErrNumbers = errors.New("no context number is free")
	ErrCredit  = errors.New("not enough credit left")
)

// DefaultMessages is how many messages of a context can be in flight, and how many
// messages or flows the program tells apart when it keeps them on their HPUs.
const DefaultMessages = 4096

// minCredit is what a context gets at least: less than a batch makes no sense.
const minCredit = 8

// MaxShare is the largest weight of a context.
const MaxShare = 1000

// removeTime is how long Remove waits for packets that are on their way.
const removeTime = 2 * time.Second

// A ContextSpec describes an execution context.
type ContextSpec struct {
	Name string // in statistics, events and errors. Required

	// Rulesets that bring packets here: any of them. They are numbered when
	// the context is activated: as Numbers says, one for each; else First and up
	// if that is not 0; else the lowest free numbers. The lowest that matches a
	// packet wins, so without Numbers and First that depends on the order in which
	// contexts were activated. See also NIC.Renumber.
	Rulesets []matcher.Ruleset
	First    int
	Numbers  []int

	Format   *matcher.Format // of messages. Defaults to that of the rulesets, or to `packet`
	Handlers hpu.Handlers
	Policy   Policy // Defaults to ByMessage, which for `packet` is ByPacket
	CoreMask uint64 // bit h: HPU h may be used. 0 for all

	// Credits limit how many buffers of the context are in flight on a receive
	// queue. 0 for an equal share of what the other contexts leave. A frame that
	// spans more buffers than that is refused always. What others still have in
	// flight is missing at first, and given when it comes back. While contexts
	// compete for HPUs they have less, see Share.
	Credits int

	// Place is a context that was cleared, see NIC.Clear, or nil. The new context
	// gets the credit that is reserved for it.
	Place *Context

	Timestamp bool // have packets carry their time of arrival

	// Messages is how many messages can be in flight; beyond, new ones are
	// refused, unacknowledged. Defaults to DefaultMessages. The following are
	// for formats whose messages end, such as `slmp`.
	Messages int

	Protocol hpu.Protocol // acknowledges. Defaults to SLMP for the predefined formats of it, else nobody does

	Binder hpu.Binder               // says where messages go. Defaults to:
	Window spin.Window              // all of them to the begin of this window
	Events chan<- spin.MessageEvent // and their ends to this channel

	State        int    // bytes of state memory of each message
	InitialState []byte // what that begins with; the rest is 0

	Timeout    time.Duration  // after which an incomplete message ends, since its last news. Defaults to 10 s
	Incomplete mpq.Incomplete // how it ends. Defaults to mpq.Abandon
	Linger     time.Duration  // with mpq.Linger: how long to wait after EOM. Defaults to 10 ms
	Remember   time.Duration  // for how long late duplicates of a message are known. Defaults to 4 s
	Held       int            // packets that may wait for their message's header packet. Defaults to a quarter of the credits, 64 at most; negative: none
	Memory     int            // bytes for what of messages came behind a hole, all together. Defaults to 16 MiB
	Checksums  hpu.Checksums  // what is done about UDP checksums. Defaults to hpu.VerifyComplete

	// Resources are what handlers use beside packets. Its Host, if there is one,
	// gets the events of all messages whose binding names nobody else, with its
	// User if that is a uint64; its lanes must be NIC.Workers. A Resolver is there
	// without being named.
	Resources hpu.Resources

	Overload Overload // what happens to packets for which the context has no credit. Defaults to OverloadDrops

	// Share is the weight of the context, 1..MaxShare, when there is not enough
	// HPU time for all: those that bring more than can be done get handler time by
	// weight, over some 100 ms, whatever a packet costs them. Defaults to 1.
	Share int

	// HostActivated contexts have no rulesets, and a message format of their own:
	// see NIC.Trigger.
	HostActivated bool

	// With BlockedRR: a message is cut in sequences of so many bytes, which
	// are dealt out to so many virtual HPUs, each on one HPU at a time.
	Sequence uint32
	VHPUs    int
}

// A Policy tells how packets are spread over HPUs.
type Policy = loader.Policy

// Scheduling policies (D4.7 section 4.4.4).
const (
	ByMessage = loader.ByMessage // packets of a message stay on one HPU
	ByPacket  = loader.ByPacket  // packets go wherever there is room
	BlockedRR = loader.BlockedRR // sequences of a message stay on one (SC 2019, section 3.2.1)
)

// Overload says what happens to packets for which a context has no credit left.
type Overload int

// What happens to them.
const (
	OverloadDrops  Overload = iota // dropped, in the XDP program, and counted
	OverloadSpills                 // to the Linux stack, as if they had matched nothing, and counted
)

// A Context is an execution context that was installed. Its methods are safe
// for concurrent use.
type Context struct {
	spec   ContextSpec
	n      *NIC
	hpu    *hpu.Context
	bucket bpf.Range

	// Held by who activates, deactivates or removes it, which goes on without the
	// NIC's lock; taken before that.
	op     sync.Mutex
	inited bool // the init handler has run; guarded by op

	// Guarded by the NIC's lock.
	active  bool
	numbers []int // that its rulesets are to have, nil for any
	slots   []int // that they have, while it is active
	// What the program's counters were when the numbers became the context's.
	matched []uint64 // by ruleset
	refused uint64
	spilled uint64

	share  uint32 // of credit that is due to it, see rebalance
	credit uint32 // that it was given of that, see deal
	load   load   // see fair
}

// ID returns the context's number.
func (c *Context) ID() int { return int(c.hpu.ID()) }

// Name returns the context's name.
func (c *Context) Name() string { return c.spec.Name }

// Rulesets returns the numbers of the context's rulesets, none while it is not active.
func (c *Context) Rulesets() []int {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	return slices.Clone(c.slots)
}

// Stats returns what the context's handlers did.
func (c *Context) Stats() spin.ContextStats { return c.hpu.Stats() }

// Messages returns what became of the context's messages, and false if it has none.
func (c *Context) Messages() (spin.MessageStats, bool) { return c.hpu.Messages() }

// ClearCounters zeroes the context's user counters and returns what they were.
func (c *Context) ClearCounters() [spin.UserCounters]spin.UserCounter { return c.hpu.ClearCounters() }

// complete checks a spec and fills in what was left out.
func (s *ContextSpec) complete(hpus int) error {
	if s.Name == "" {
		return errors.New("no name")
	}
	if strings.ContainsFunc(s.Name, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return errors.New("the name has characters that cannot be printed")
	}
	if s.Policy != ByMessage && s.Policy != ByPacket && s.Policy != BlockedRR {
		return fmt.Errorf("scheduling policy %d: there are ByMessage, ByPacket and BlockedRR", s.Policy)
	}
	s.Rulesets = slices.Clone(s.Rulesets)
	if last := s.First + len(s.Rulesets) - 1; s.First < 0 || s.First > 0 && last >= matcher.MaxRulesets {
		return fmt.Errorf("ruleset numbers %d..%d: possible are 0..%d", s.First, last, matcher.MaxRulesets-1)
	}
	if s.Numbers != nil {
		if s.First != 0 {
			return fmt.Errorf("ruleset number %d is given by First, and there are Numbers: only one of them may be", s.First)
		}
		if err := checkNumbers(s.Numbers, len(s.Rulesets)); err != nil {
			return err
		}
		s.Numbers = slices.Clone(s.Numbers)
	}
	if s.HostActivated {
		if err := s.hostActivated(); err != nil {
			return err
		}
	} else if len(s.Rulesets) == 0 {
		return errors.New("no ruleset: no packet would ever come")
	}
	if n := len(s.Rulesets); n > matcher.MaxRulesets {
		return fmt.Errorf("%w: %d rulesets, possible are %d", ErrTable, n, matcher.MaxRulesets)
	}
	for i := range s.Rulesets {
		if err := s.Rulesets[i].Validate(); err != nil {
			return err
		}
	}
	if s.Format == nil {
		name := s.Rulesets[0].Format
		for _, r := range s.Rulesets {
			if r.Format != name {
				return fmt.Errorf("rulesets %s and %s have different message formats, %q and %q: name one", s.Rulesets[0].Name, r.Name, name, r.Format)
			}
		}
		if name == "" {
			name = "packet"
		}
		if s.Format = matcher.FormatByName(name); s.Format == nil {
			return fmt.Errorf("message format %q: there are %v", name, matcher.FormatNames())
		}
	}
	if err := s.Format.Validate(); err != nil {
		return err
	}
	if len(s.Format.Key) == 0 {
		s.Policy = ByPacket // every packet is a message
	}
	if s.Policy == BlockedRR && (s.Sequence < 1 || s.VHPUs < 1 || s.VHPUs > loader.MaxVHPUs || s.Format.Offset == nil) {
		return fmt.Errorf("blocked-rr with sequences of %d bytes on %d virtual HPUs in format %s: at least 1 byte, 1..%d virtual HPUs and a format with an offset are needed", s.Sequence, s.VHPUs, s.Format.Name, loader.MaxVHPUs)
	}
	if !s.ending() {
		switch {
		case s.Handlers.Payload == nil:
			return errors.New("no payload handler")
		case len(s.Format.Key) > 0 && (s.Handlers.Header != nil || s.Handlers.Completion != nil):
			return fmt.Errorf("messages of format %s never end: there can be no header and no completion handler", s.Format.Name)
		case s.Binder != nil || s.Window != nil || s.Events != nil || s.State != 0:
			return fmt.Errorf("format %s has no messages of several packets: no binder, window, events or state", s.Format.Name)
		}
	}
	all := uint64(math.MaxUint64) >> (64 - hpus)
	if s.CoreMask == 0 {
		s.CoreMask = all
	}
	if s.CoreMask&all == 0 {
		return fmt.Errorf("core mask %#x names no HPU: there are 0..%d", s.CoreMask, hpus-1)
	}
	if extra := s.CoreMask &^ all; extra != 0 {
		return fmt.Errorf("core mask %#x names HPUs that are not there (%#x): there are 0..%d", s.CoreMask, extra, hpus-1)
	}
	if s.Messages == 0 {
		s.Messages = DefaultMessages
	}
	if s.Messages < 1 || s.Messages > bpf.MaxBuckets {
		return fmt.Errorf("%d messages: possible are 1..%d", s.Messages, bpf.MaxBuckets)
	}
	if s.Credits < 0 {
		return fmt.Errorf("%d credits", s.Credits)
	}
	if s.Overload != OverloadDrops && s.Overload != OverloadSpills {
		return fmt.Errorf("overload policy %d: there are OverloadDrops and OverloadSpills", int(s.Overload))
	}
	if s.Share == 0 {
		s.Share = 1
	}
	if s.Share < 1 || s.Share > MaxShare {
		return fmt.Errorf("share %d: possible are 1..%d", s.Share, MaxShare)
	}
	return nil
}

// checkNumbers checks numbers for so many rulesets.
func checkNumbers(numbers []int, rulesets int) error {
	if len(numbers) != rulesets {
		return fmt.Errorf("%d numbers for %d rulesets", len(numbers), rulesets)
	}
	for i, s := range numbers {
		if s < 0 || s >= matcher.MaxRulesets {
			return fmt.Errorf("ruleset number %d: possible are 0..%d", s, matcher.MaxRulesets-1)
		}
		if slices.Contains(numbers[:i], s) {
			return fmt.Errorf("ruleset number %d is there twice", s)
		}
	}
	return nil
}

// hostActivated checks what such contexts cannot have, and completes them.
func (s *ContextSpec) hostActivated() error {
	switch {
	case len(s.Rulesets) > 0 || s.First > 0:
		return errors.New("it is host-activated: there can be no rulesets, the host brings its messages")
	case s.Format != nil || s.Protocol != nil:
		return errors.New("it is host-activated: its messages are no packets, and have neither another message format nor a protocol")
	case s.Credits > 0 || s.Overload != OverloadDrops || s.Policy == BlockedRR:
		return errors.New("it is host-activated: there are no packets to have credits, overload or blocked-rr")
	}
	s.Format = hostFormat()
	s.Held = -1
	s.Checksums = hpu.VerifyNone
	return nil
}

// Install makes a context: everything it needs but its rulesets, so that no
// packet comes before Activate.
func (n *NIC) Install(spec ContextSpec) (_ *Context, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("install context %q on %s: %w", spec.Name, n.iface.Name, err)
		}
	}()
	if err := spec.complete(n.cfg.HPUs); err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil, ErrClosed
	}
	n.reap()
	id, err := n.freeID()
	if err != nil {
		return nil, err
	}
	c := &Context{spec: spec, n: n, numbers: spec.Numbers}
	if spec.Policy != ByPacket && !spec.HostActivated {
		if c.bucket, err = n.buckets.take(min(pow2(spec.Messages), bpf.MaxBuckets)); err != nil {
			return nil, err
		}
		defer func() {
			if err != nil {
				n.buckets.give(c.bucket)
			}
		}()
	}
	if spec.Held == 0 {
		// Of its credit: packets that wait must leave some to those that come.
		credit := spec.Credits
		if credit == 0 {
			credit = n.cfg.Ring / (len(n.contexts) + 1)
		}
		if spec.Held = min(64, credit/4); spec.Held == 0 {
			spec.Held = -1
		}
	}
	if c.hpu, err = spec.context(id, c.bucket); err != nil {
		return nil, err
	}
	if c.spec.Resources.Resolver == nil {
		c.spec.Resources.Resolver = n.neigh
	}
	if err := c.hpu.SetResources(c.spec.Resources); err != nil {
		return nil, err
	}
	prog, err := n.ingress.Stats()
	if err != nil {
		return nil, err
	}
	c.refused, c.spilled = prog.Refused[id], prog.Spilled[id]
	atomic.StoreUint32(&n.ingress.Share().Quantum[id], 1) // until its handlers' time is known
	place := spec.Place
	c.spec.Place = nil // or a context would keep all of its lives
	if place != nil && !n.places[place] {
		return nil, fmt.Errorf("place of context %q: %w, or not cleared", place.spec.Name, ErrRemoved)
	}
	delete(n.places, place)
	n.contexts[id] = c
	back := func() {
		delete(n.contexts, id)
		if place != nil {
			n.places[place] = true
		}
	}
	if err := n.shares(); err != nil {
		back()
		return nil, err
	}
	if err := n.pool.Install(c.hpu); err != nil {
		back()
		return nil, errors.Join(err, n.shares())
	}
	if place != nil {
		c.credit = place.credit - min(place.credit, uint32(n.inFlight(place)))
		atomic.StoreUint32(&n.ingress.Share().Credit[id], c.credit)
	}
	n.deal()
	return c, nil
}

// ending tells whether the context has messages of several packets that end.
func (s *ContextSpec) ending() bool {
	return len(s.Format.Key) > 0 && s.Format.EOM != nil && *s.Format.EOM != matcher.False
}

// context makes the HPUs' part of a context.
func (s *ContextSpec) context(id uint16, buckets bpf.Range) (*hpu.Context, error) {
	if !s.ending() {
		return hpu.NewContext(id, s.Name, s.Handlers, buckets), nil
	}
	cfg := hpu.MessageConfig{
		Config: mpq.Config{
			Messages: s.Messages, Held: s.Held, Timeout: s.Timeout, Remember: s.Remember,
			Memory: s.Memory, Incomplete: s.Incomplete, Linger: s.Linger,
		},
		Format:    s.Format,
		Protocol:  s.Protocol,
		Binder:    s.Binder,
		Default:   spin.Binding{Window: s.Window},
		State:     s.State,
		Initial:   s.InitialState,
		Checksums: s.Checksums,
		Shared:    s.Policy != ByMessage,
	}
	if s.Events != nil {
		cfg.Default.Events = spin.EventChan(s.Events)
	} else if p := s.events(); p != nil {
		cfg.Default.Events = pairSink{p}
		if s.Binder != nil {
			cfg.Binder = sinkBinder{s.Binder, pairSink{p}}
		}
	}
	for _, name := range []string{"slmp", "slmp6"} {
		if s.Protocol == nil && reflect.DeepEqual(s.Format, matcher.FormatByName(name)) {
			cfg.Protocol = slmp.Protocol{}
		}
	}
	return hpu.NewMessageContext(id, s.Name, s.Handlers, buckets, s.CoreMask, cfg)
}

// freeID returns a context id of which nothing is on its way any more.
func (n *NIC) freeID() (uint16, error) {
	for id := range uint16(bpf.MaxContexts) {
		if n.contexts[id] == nil && n.retired[id] == nil {
			return id, nil
		}
	}
	return 0, fmt.Errorf("%w: there are %d", ErrNumbers, bpf.MaxContexts)
}

// reap frees numbers and buckets of removed contexts whose last packets have
// come back.
func (n *NIC) reap() {
	for id, old := range n.retired {
		if n.pool.Drain(old.hpu, 0) == nil {
			delete(n.retired, id)
			n.buckets.give(old.bucket)
		}
	}
}

// Activate arms the context's rulesets: from here on packets come. The first time,
// the context's init handler runs before that; with an error of it the context is
// not activated, and Activate may be tried again.
func (n *NIC) Activate(c *Context) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("activate context %q on %s: %w", c.spec.Name, n.iface.Name, err)
		}
	}()
	c.op.Lock()
	defer c.op.Unlock()
	if err := n.init(c); err != nil {
		return err
	}
	armed, err := n.arm(c)
	if armed {
		n.warnOfSockets(c)
		n.ops.Done()
	}
	return err
}

// arm puts the context's rulesets into the table, and says whether it has. If so, Close
// waits until the caller is done.
func (n *NIC) arm(c *Context) (armed bool, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.has(c); err != nil {
		return false, err
	}
	if c.active {
		return false, nil
	}
	if c.spec.HostActivated {
		c.active = true
		return false, nil
	}
	slots, err := n.slotsFor(c)
	if err != nil {
		return false, err
	}
	n.warnOfAddresses(c)
	prog, err := n.ingress.Stats()
	if err != nil {
		return false, err
	}
	c.slots, c.matched = slots, nil
	for _, s := range slots {
		n.slots[s] = c.hpu.ID()
		c.matched = append(c.matched, prog.Matched[s])
	}
	c.active = true
	if err := n.publish(); err != nil {
		for _, s := range slots {
			delete(n.slots, s)
		}
		c.active, c.slots = false, nil
		return false, err
	}
	n.stir()
	n.ops.Add(1)
	return true, nil
}

// init runs the context's init handler, if that has not been done. The handler may
// take its time: not under the NIC's lock.
func (n *NIC) init(c *Context) error {
	if c.inited {
		return nil
	}
	n.mu.Lock()
	err := n.has(c)
	if err == nil {
		n.ops.Add(1)
		defer n.ops.Done()
	}
	n.mu.Unlock()
	if err != nil {
		return err
	}
	if err := n.pool.Init(c.hpu); err != nil {
		return err
	}
	c.inited = true
	return nil
}

// disarm takes the context's rulesets out of the table. The caller has the lock.
func (n *NIC) disarm(c *Context) error {
	slots := c.slots
	c.slots = nil
	if slots != nil {
		if err := n.publish(); err != nil {
			c.slots = slots // still armed
			return err
		}
	}
	c.active = false
	for _, s := range slots {
		delete(n.slots, s)
	}
	return nil
}

func (n *NIC) has(c *Context) error {
	if n.closed {
		return ErrClosed
	}
	if n.contexts[c.hpu.ID()] != c {
		return ErrRemoved
	}
	return nil
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
	slots := map[int]uint16{}
	for s, id := range n.slots {
		if _, moves := numbers[n.contexts[id]]; !moves {
			slots[s] = id
		}
	}
	for c, to := range numbers {
		err := n.has(c)
		if err == nil {
			err = checkNumbers(to, len(c.spec.Rulesets))
		}
		if err != nil {
			return fmt.Errorf("context %q: %w", c.spec.Name, err)
		}
		for _, s := range to {
			if c.slots == nil {
				break
			}
			if id, used := slots[s]; used {
				return fmt.Errorf("ruleset number %d is wanted for context %q, and taken by context %q", s, c.spec.Name, n.contexts[id].spec.Name)
			}
			slots[s] = c.hpu.ID()
		}
	}
	prog, err := n.ingress.Stats()
	if err != nil {
		return err
	}
	type place struct {
		slots   []int
		matched []uint64
	}
	before, old := n.slots, map[*Context]place{}
	n.slots = slots
	for c, to := range numbers {
		if c.slots == nil {
			continue
		}
		old[c] = place{c.slots, c.matched}
		matched := make([]uint64, len(to))
		for i, s := range to {
			matched[i] = prog.Matched[s] - (prog.Matched[c.slots[i]] - c.matched[i])
		}
		c.slots, c.matched = slices.Clone(to), matched
	}
	if len(old) > 0 {
		if err := n.publish(); err != nil {
			n.slots = before
			for c, p := range old {
				c.slots, c.matched = p.slots, p.matched
			}
			return err
		}
	}
	for c, to := range numbers {
		c.numbers = slices.Clone(to)
	}
	return nil
}

// slotsFor finds the numbers of a context's rulesets.
func (n *NIC) slotsFor(c *Context) ([]int, error) {
	if c.numbers == nil {
		return n.freeSlots(c.spec.First, len(c.spec.Rulesets))
	}
	for _, s := range c.numbers {
		if id, used := n.slots[s]; used {
			return nil, fmt.Errorf("ruleset number %d is taken by context %q", s, n.contexts[id].spec.Name)
		}
	}
	return slices.Clone(c.numbers), nil
}

// freeSlots finds ruleset numbers: count in a row from first, or any.
func (n *NIC) freeSlots(first, count int) (slots []int, err error) {
	for s := first; s < matcher.MaxRulesets && len(slots) < count; s++ {
		if id, used := n.slots[s]; !used {
			slots = append(slots, s)
		} else if first > 0 {
			return nil, fmt.Errorf("ruleset number %d is taken by context %q", s, n.contexts[id].spec.Name)
		}
	}
	if len(slots) < count {
		return nil, fmt.Errorf("%w: %d rulesets wanted, %d of %d are free", ErrTable, count, matcher.MaxRulesets-len(n.slots), matcher.MaxRulesets)
	}
	return slots, nil
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
		if !n.closed && len(n.slots) > 0 {
			if err := n.publish(); err != nil {
				n.cfg.Logger.Error("the interface's addresses have changed, and the matching table goes by those that it had", "interface", n.iface.Name, "err", err)
			}
		}
		n.mu.Unlock()
	}
}

// publish puts the table of all active contexts in force.
func (n *NIC) publish() error {
	n.gen++
	t := &loader.Table{
		Generation: n.gen,
		Local:      n.local(),
		Rulesets:   map[int]loader.Binding{},
		Contexts:   map[uint16]loader.Context{},
	}
	for id, c := range n.contexts {
		if c.slots == nil { // not active, or without any
			continue
		}
		t.Contexts[id] = loader.Context{
			ID:        id,
			Format:    c.spec.Format,
			Policy:    c.spec.Policy,
			CoreMask:  c.spec.CoreMask,
			Buckets:   c.bucket,
			Sequence:  c.spec.Sequence,
			VHPUs:     c.spec.VHPUs,
			Timestamp: c.spec.Timestamp,
			Spill:     c.spec.Overload == OverloadSpills,
		}
		for i, s := range c.slots {
			t.Rulesets[s] = loader.Binding{Ruleset: c.spec.Rulesets[i], Context: id}
		}
	}
	return n.ingress.Publish(t)
}

// Remove takes a context away: first its rulesets, then, when the packets on
// their way have been handled, the rest. It returns after a bounded time, and
// then no handler of the context runs. An error says that packets are still
// held, by a handler that is stuck or by Keep; their memory and the context's
// number stay reserved until they come back. Of a context that was cleared it takes
// what Clear has left.
func (n *NIC) Remove(c *Context) error { return n.remove(c, false) }

// Clear is Remove, but that the context's credit stays reserved: for another one
// that is installed in its Place, or until it is removed. So one that begins anew
// finds what it had, whatever the others take meanwhile.
func (n *NIC) Clear(c *Context) error { return n.remove(c, true) }

func (n *NIC) remove(c *Context, keep bool) error {
	c.op.Lock()
	defer c.op.Unlock()
	n.mu.Lock()
	if n.places[c] && !keep && !n.closed {
		delete(n.places, c)
		err := n.rebalance()
		n.mu.Unlock()
		return err
	}
	err := n.has(c)
	if err == nil {
		err = n.disarm(c)
	}
	if err != nil {
		n.mu.Unlock()
		return fmt.Errorf("remove context %q: %w", c.spec.Name, err)
	}
	// Others need not wait. The context is there until it has drained, so that its
	// number and its credit are nobody else's.
	n.ops.Add(1)
	defer n.ops.Done()
	n.mu.Unlock()
	err = n.pool.Drain(c.hpu, n.drain)
	n.mu.Lock()
	defer n.mu.Unlock()
	id := c.hpu.ID()
	delete(n.contexts, id)
	atomic.StoreUint32(&n.ingress.Share().Credit[id], 0)
	if keep {
		n.places[c] = true
	}
	if err != nil {
		// The buckets go with the id: late packets still return their uses.
		n.retired[id] = c
		return errors.Join(fmt.Errorf("remove context %q: %w", c.spec.Name, err), n.rebalance())
	}
	n.buckets.give(c.bucket)
	return n.rebalance()
}

// rebalance deals out the credit of a queue anew, when contexts have come or gone.
func (n *NIC) rebalance() error {
	err := n.shares()
	n.deal()
	return err
}

// shares says how much credit is due to each context: all together no more than a
// queue's rx rings and its fill ring hold, so that neither overflows. Contexts that
// asked for none share what is left. With an error all is as it was.
func (n *NIC) shares() error {
	total, equals := n.cfg.Ring, 0
	count := func(c *Context) {
		if c.spec.Credits == 0 && !c.spec.HostActivated {
			equals++
		}
		total -= c.spec.Credits
	}
	n.each(count)
	each := 0
	if equals > 0 {
		each = total / equals
	}
	if total < 0 || equals > 0 && each < minCredit {
		return fmt.Errorf("%w: %d for each queue, contexts ask for %d, %d more share the rest, at least %d each: lower Credits or raise Config.Ring", ErrCredit, n.cfg.Ring, n.cfg.Ring-total, equals, minCredit)
	}
	n.each(func(c *Context) {
		if c.share = uint32(each); c.spec.Credits > 0 || c.spec.HostActivated {
			c.share = uint32(c.spec.Credits)
		}
	})
	n.patience = time.Millisecond
	n.stir() // should deal find too little
	return nil
}

// each calls f for all who have credit: contexts, and those that left their place.
func (n *NIC) each(f func(*Context)) {
	for _, c := range n.contexts {
		f(c)
	}
	for c := range n.places {
		f(c)
	}
}

// deal gives contexts the credit that is due to them, of what nobody has: who has too
// much keeps that until its packets have come back, which an application may put off as
// long as it likes. What is missing is given later, see fair: nobody waits for it.
func (n *NIC) deal() {
	credit := n.ingress.Share().Credit[:]
	n.each(func(c *Context) {
		c.credit = min(c.credit, c.share)
		if id := c.hpu.ID(); n.contexts[id] == c && atomic.LoadUint32(&credit[id]) > c.credit {
			atomic.StoreUint32(&credit[id], c.credit)
		}
	})
	free := n.cfg.Ring
	for q := range n.queues {
		used := 0
		n.each(func(c *Context) { used += max(int(c.credit), n.onQueue(c, q)) })
		for _, c := range n.retired {
			if !n.places[c] {
				used += n.onQueue(c, q)
			}
		}
		free = min(free, n.cfg.Ring-used)
	}
	var short []*Context
	n.each(func(c *Context) {
		if c.credit < c.share {
			short = append(short, c)
		}
	})
	slices.SortFunc(short, func(a, b *Context) int {
		return cmp.Or(cmp.Compare(a.credit, b.credit), cmp.Compare(a.hpu.ID(), b.hpu.ID()))
	})
	n.short = false
	for _, c := range short {
		more := min(c.share-c.credit, uint32(max(free, 0)))
		c.credit += more
		free -= int(more)
		if id := c.hpu.ID(); n.contexts[id] == c && !c.load.lowered {
			atomic.StoreUint32(&credit[id], c.credit)
		}
		n.short = n.short || c.credit < c.share
	}
}

// onQueue returns the context's buffers in flight on a queue, also if it was removed.
func (n *NIC) onQueue(c *Context, q int) int {
	id := c.hpu.ID()
	if n.contexts[id] != c && n.retired[id] != c {
		return 0 // and its number may be another's
	}
	s := n.ingress.Queue(q)
	return int(atomic.LoadUint32(&s.Issued[id]) - atomic.LoadUint32(&s.Done[id]))
}

// inFlight returns them on the queue with the most.
func (n *NIC) inFlight(c *Context) (most int) {
	for q := range n.queues {
		most = max(most, n.onQueue(c, q))
	}
	return most
}

// out returns the context's buffers in flight, on all queues.
func (n *NIC) out(id uint16) (sum int) {
	for q := range n.queues {
		s := n.ingress.Queue(q)
		sum += int(int32(atomic.LoadUint32(&s.Issued[id]) - atomic.LoadUint32(&s.Done[id])))
	}
	return sum
}

// An allocator hands out ranges of buckets, powers of two, aligned: a buddy
// system without the bookkeeping, which few contexts need.
type allocator struct{ used map[int]int }

func newAllocator() allocator { return allocator{used: map[int]int{}} }

func (a allocator) take(size int) (bpf.Range, error) {
	for base := 0; base+size <= bpf.MaxBuckets; base += size {
		free := true
		for b, n := range a.used {
			if base < b+n && b < base+size {
				free = false
				break
			}
		}
		if free {
			a.used[base] = size
			return bpf.Range{Base: base, Size: size}, nil
		}
	}
	return bpf.Range{}, fmt.Errorf("no %d message buckets in a row are free, there are %d in all: lower Messages", size, bpf.MaxBuckets)
}

// give takes a range back. An empty one, of contexts without, is nobody's.
func (a allocator) give(r bpf.Range) {
	if r.Size > 0 {
		delete(a.used, r.Base)
	}
}
