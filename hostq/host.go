// SPDX-License-Identifier: Apache-2.0

package hostq

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/internal/clock"
	"github.com/xspin/xspin/spin"
)

// A Host is the application's side of a Pair. It is safe for concurrent use, but for
// Close: when that is called only Wait and WaitCounter may be running. FD is for
// callers that do not use Wait and WaitCounter.
type Host struct {
	layout Layout
	mem    *Memory // nil in tests that bring their own memory
	parts

	eventRing   consumer
	requestRing consumer
	lanes       []producer
	doorbells   []int // of the lanes
	counters    [Counters]Counter
	broken      atomic.Bool
	closed      atomic.Bool

	doorbell int // the NIC rings
	kick     int // an eventfd of our own: ctx, Close and Counter ring

	kickMu   sync.Mutex
	kickDead bool

	// One of those who wait sleeps in poll, and tells the others when it wakes.
	mu      sync.Mutex
	leader  bool
	others  chan struct{} // closed when it wakes; nil: there are none
	waiters sync.WaitGroup
	gone    bool            // the NIC's process
	watched <-chan struct{} // Done of the context that kicks when it ends
	unwatch func() bool
}

// A Call is a request as the application gets it. Calls may be answered in any order.
// Its slot of the ring is in use until Respond or Done: a caller that answers late should
// copy the payload and call Done first, lest the ring wait for that one slot.
type Call struct {
	Tag     uint64
	Words   [2]uint64
	HPU     uint32
	Reply   bool   // a response is wanted
	Payload []byte // in shared memory, good until Respond or Done; may be changed

	id   uint64
	pos  uint64
	held bool
}

// OpenHost maps the application's side. It takes the descriptors, also if it fails.
func OpenHost(l Layout, memory, doorbell int, lanes []int) (*Host, error) {
	fds := append([]int{doorbell}, lanes...)
	fail := func(err error) (*Host, error) {
		for _, fd := range fds {
			unix.Close(fd)
		}
		return nil, fmt.Errorf("queues to the NIC: %w", err)
	}
	if err := l.Check().Err(); err != nil {
		unix.Close(memory)
		return fail(err)
	}
	if len(lanes) != l.Lanes {
		unix.Close(memory)
		return fail(fmt.Errorf("%d descriptors for %d lanes", len(lanes), l.Lanes))
	}
	mem, err := OpenMemory(memory, l.Size())
	if err != nil {
		return fail(err)
	}
	for i, fd := range fds {
		is, what := isEvent, fmt.Sprintf("doorbell of lane %d", i-1)
		if i == 0 {
			is, what = isSocket, "doorbell"
		}
		if err := is(fd); err != nil {
			_ = mem.Close()
			return fail(fmt.Errorf("%s: descriptor %d: %w", what, fd, err))
		}
		unix.CloseOnExec(fd)
		// Made so by the NIC, but os.File.Fd on the way may have changed it.
		if err := unix.SetNonblock(fd, true); err != nil {
			_ = mem.Close()
			return fail(fmt.Errorf("%s: descriptor %d: %w", what, fd, err))
		}
	}
	h, err := newHost(l, mem.Bytes(), doorbell, fds[1:])
	if err != nil {
		_ = mem.Close()
		return fail(err)
	}
	h.mem = mem
	return h, nil
}

// newHost makes a host in a pair's memory.
func newHost(l Layout, mem []byte, doorbell int, doorbells []int) (*Host, error) {
	h := &Host{layout: l, parts: l.cut(mem), doorbell: doorbell, doorbells: doorbells}
	if m, w := h.magic, h.shared.layout; m != magic || w != l.words() {
		return nil, fmt.Errorf("memory of another version or layout: magic %#x, layout %d; want %#x, %d", m, w, uint64(magic), l.words())
	}
	var err error
	if h.kick, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, os.NewSyscallError("eventfd", err)
	}
	h.eventRing.init(h.parts.events, &h.shared.events)
	h.requestRing.init(h.parts.requests, &h.shared.requests)
	for i := range l.Lanes {
		h.lanes = append(h.lanes, producer{ring: h.responses[i], head: &h.shared.lanes[i].head})
	}
	for i := range h.counters {
		h.counters[i] = Counter{s: &h.shared.counters[i], ring: h.wake}
	}
	return h, nil
}

// take takes from a ring.
func (h *Host) take(c *consumer) (pos uint64, ok bool) {
	if h.closed.Load() {
		return 0, false
	}
	pos, ok, err := c.take()
	if err != nil {
		h.broken.Store(true)
	}
	return pos, ok
}

// Event takes the next event. False: there is none.
func (h *Host) Event(e *Event) bool {
	pos, ok := h.take(&h.eventRing)
	if !ok {
		return false
	}
	s := (*eventSlot)(unsafe.Pointer(unsafe.SliceData(h.eventRing.slot(pos))))
	kind, cause := s.kind, s.cause
	*e = Event{
		Kind:        EventKind(kind & eventKind),
		Cause:       cause &^ eventMissing,
		FlowControl: kind&eventFlow != 0,
		Number:      s.number,
		Slot:        s.slot,
		Length:      s.length,
		Dropped:     s.dropped,
		User:        s.user,
		Time:        s.time,
	}
	switch {
	case kind&eventIPv4 != 0:
		e.Source = netip.AddrPortFrom(netip.AddrFrom4([4]byte(s.address[:4])), s.port)
	case kind&eventIPv6 != 0:
		e.Source = netip.AddrPortFrom(netip.AddrFrom16(s.address), s.port)
	}
	if cause&eventMissing != 0 {
		e.Missing = s.missing
	}
	if kind&eventTexts != 0 {
		text := s.text
		n := bytes.IndexByte(text[:], 0)
		if n < 0 {
			n = len(text)
		}
		e.Text = string(text[:n])
	}
	if e.Kind == Overflow {
		e.Lost, e.Length = e.Length, 0
	}
	h.eventRing.release(pos)
	return true
}

// Request takes the next request. False: there is none.
func (h *Host) Request(c *Call) bool {
	pos, ok := h.take(&h.requestRing)
	if !ok {
		return false
	}
	b := h.requestRing.slot(pos)
	s := (*requestSlot)(unsafe.Pointer(unsafe.SliceData(b)))
	length := atomic.LoadUint32(&s.length)
	n := length &^ requestReply
	if n > uint32(h.layout.Payload) {
		h.broken.Store(true)
		h.requestRing.release(pos)
		return false
	}
	c.Tag, c.Words, c.HPU, c.id = s.tag, s.words, s.hpu, s.id
	c.Reply = length&requestReply != 0
	c.Payload = b[requestHeader : requestHeader+int(n) : requestHeader+h.layout.Payload]
	c.pos, c.held = pos, true
	return true
}

// Respond answers a request, and is Done with it. The payload is copied; it may be
// the request's own, which has room for the largest. ErrFull: the NIC has not taken
// other responses yet, try again; ErrTooLong, ErrDetached, ErrBroken: the call is not
// done with. A request that wants no response gets none.
func (h *Host) Respond(c *Call, status int32, payload []byte) error {
	if !c.Reply {
		h.Done(c)
		return nil
	}
	if c.id == 0 {
		return errors.New("request: it has a response already")
	}
	if len(payload) > h.layout.Payload {
		return fmt.Errorf("response of %d bytes, room for %d: %w", len(payload), h.layout.Payload, ErrTooLong)
	}
	if h.closed.Load() {
		return os.ErrClosed
	}
	if end := h.ended.Load(); end == endBroken {
		return ErrBroken
	} else if end != 0 {
		return ErrDetached
	}
	lane := idLane(c.id)
	if lane >= len(h.lanes) {
		h.broken.Store(true)
		return ErrBroken
	}
	ring := &h.lanes[lane]
	pos, _, err := ring.claim(1)
	if err != nil {
		if err == ErrBroken {
			h.broken.Store(true)
		}
		return err
	}
	b := ring.slot(pos)
	s := (*responseSlot)(unsafe.Pointer(unsafe.SliceData(b)))
	s.length, s.id, s.status = uint32(len(payload)), c.id, status
	copy(b[responseHeader:], payload)
	ring.publish(pos)
	if needed(&h.shared.lanes[lane].waiting) {
		add(h.doorbells[lane])
	}
	c.id = 0
	h.Done(c)
	return nil
}

// Done gives a request's slot back: its payload is gone. A request that wants a
// response still does, and can get it later.
func (h *Host) Done(c *Call) {
	if c.held && !h.closed.Load() {
		c.held, c.Payload = false, nil
		h.requestRing.release(c.pos)
	}
}

// status returns whether there is an event or a request, or why there will be none.
func (h *Host) status() (bool, error) {
	switch {
	case h.closed.Load():
		return false, os.ErrClosed
	case h.broken.Load():
		return false, ErrBroken
	case h.eventRing.ready() || h.requestRing.ready():
		return true, nil
	}
	h.eventRing.flush()
	h.requestRing.flush()
	return false, h.over()
}

// over returns why the NIC will not send any more, nil if it may.
func (h *Host) over() error {
	switch h.ended.Load() {
	case 0:
		return nil
	case endBroken:
		return ErrBroken
	}
	return ErrDetached
}

const (
	spinYield = 64      // looks between offers of the CPU to others
	spinPoll  = 1 << 12 // looks between system calls that find out whether the NIC is there
)

// Wait returns when there is an event or a request, ctx ends, or the NIC has gone
// (ErrDetached) or thrown us out (ErrBroken). It spins for so long before it sleeps.
// Events and requests are both to be taken: it does not wait while there is either.
func (h *Host) Wait(ctx context.Context, spin time.Duration) error {
	if !h.enter() {
		return os.ErrClosed
	}
	defer h.waiters.Done()
	ok, err := h.status()
	if !ok && err == nil && spin > 0 {
		ok, err = h.spin(ctx, spin)
	}
	if ok || err != nil {
		return err
	}
	return h.wait(ctx, -1, 0)
}

// enter keeps Close waiting until waiters.Done. False: it has been called.
func (h *Host) enter() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed.Load() {
		return false
	}
	h.waiters.Add(1)
	return true
}

// spin waits without sleeping.
func (h *Host) spin(ctx context.Context, spin time.Duration) (bool, error) {
	until := clock.Monotonic() + int64(spin)
	for i := 1; ; i++ {
		if h.eventRing.ready() || h.requestRing.ready() {
			return h.status()
		}
		if i%spinYield != 0 {
			continue
		}
		// The NIC may want this very CPU.
		unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		if ok, err := h.status(); ok || err != nil {
			return ok, err
		}
		if err := ctx.Err(); err != nil {
			return false, err
		}
		if i%spinPoll == 0 && h.hungUp() {
			return false, nil // wait finds out, and has a last look at the rings
		}
		if clock.Monotonic() >= until {
			return false, nil
		}
	}
}

func (h *Host) hungUp() bool {
	fds := [1]unix.PollFd{{Fd: int32(h.doorbell)}}
	_, err := unix.Poll(fds[:], 0)
	return err == nil && fds[0].Revents&unix.POLLHUP != 0
}

// WaitCounter returns when counter i is at least v.
func (h *Host) WaitCounter(ctx context.Context, i int, v uint64) error {
	if i < 0 || i >= Counters {
		return fmt.Errorf("counter %d of %d: %w", i, Counters, spin.ErrBounds)
	}
	if !h.enter() {
		return os.ErrClosed
	}
	defer h.waiters.Done()
	return h.wait(ctx, i, v)
}

// prepare has the NIC ring for counter i at v or, with i < 0, for events and requests,
// and then looks.
func (h *Host) prepare(i int, v uint64) (bool, error) {
	if i < 0 {
		arm(&h.waiting)
		ok, err := h.status()
		if ok || err != nil {
			// The word may stay set for another who waits; that only costs
			// a ring too many.
			if h.others == nil && !h.leader {
				h.waiting.Store(0)
			}
		}
		return ok, err
	}
	c := h.counters[i].s
	if c.value.Load() >= v {
		return true, nil
	}
	// The word has the lowest value that somebody waits for; all look at theirs
	// when one is reached.
	if w := c.want.Load(); w == 0 || w > v {
		armFor(&c.want, v)
	}
	return h.reached(c, v)
}

// reached returns whether a counter is at v, or why it never will be.
func (h *Host) reached(c *sharedCounter, v uint64) (bool, error) {
	switch {
	case c.value.Load() >= v:
		return true, nil
	case h.closed.Load():
		return false, os.ErrClosed
	case h.broken.Load():
		return false, ErrBroken
	}
	return false, h.over()
}

// wait sleeps until what prepare looks for is there.
func (h *Host) wait(ctx context.Context, i int, v uint64) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for {
		gone := h.gone // before the last look
		if ok, err := h.prepare(i, v); ok || err != nil {
			return err
		}
		if gone {
			return ErrDetached
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if h.leader {
			if h.others == nil {
				h.others = make(chan struct{})
			}
			woken := h.others
			h.mu.Unlock()
			select {
			case <-woken:
			case <-ctx.Done():
			}
			h.mu.Lock()
			continue
		}
		h.watch(ctx)
		h.leader = true
		h.mu.Unlock()
		gone, err := h.sleep()
		h.mu.Lock()
		h.leader = false
		h.gone = h.gone || gone
		if h.others != nil {
			close(h.others)
			h.others = nil
		}
		if err != nil {
			return err
		}
	}
}

// watch has the end of ctx wake the leader. A caller that waits again and again with
// the same context pays for it once.
func (h *Host) watch(ctx context.Context) {
	done := ctx.Done()
	if done == h.watched {
		return
	}
	if h.unwatch != nil {
		h.unwatch()
		h.unwatch = nil
	}
	if h.watched = done; done != nil {
		h.unwatch = context.AfterFunc(ctx, h.wake)
	}
}

// sleep waits for a doorbell, and empties it. A thread in poll wakes sooner than a
// goroutine that the runtime's poller has to find a thread for.
func (h *Host) sleep() (gone bool, err error) {
	fds := [2]unix.PollFd{
		{Fd: int32(h.doorbell), Events: unix.POLLIN},
		{Fd: int32(h.kick), Events: unix.POLLIN},
	}
	for {
		_, err := unix.Poll(fds[:], -1)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return false, fmt.Errorf("waiting for the NIC: %w", os.NewSyscallError("poll", err))
		}
		break
	}
	if fds[0].Revents&unix.POLLIN != 0 {
		drain(h.doorbell)
	}
	gone = fds[0].Revents&^unix.POLLIN != 0
	if fds[1].Revents != 0 {
		var b [8]byte
		_, _ = unix.Read(h.kick, b[:])
	}
	return gone, nil
}

// wake wakes the one that sleeps, from this side.
func (h *Host) wake() {
	h.kickMu.Lock()
	defer h.kickMu.Unlock()
	if !h.kickDead {
		_, _ = unix.Write(h.kick, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	}
}

// FD returns a descriptor for epoll: readable when there is something, after Arm has
// returned true. Disarm before taking anything. It reports a hang-up when the NIC's
// process has ended.
func (h *Host) FD() int { return h.doorbell }

// Arm says that the caller is about to wait for FD. It returns false, and is not
// armed, if there is something already, or if there will be nothing any more: Wait says
// which.
func (h *Host) Arm() bool {
	arm(&h.waiting)
	if ok, err := h.status(); ok || err != nil {
		h.waiting.Store(0)
		return false
	}
	return true
}

// Disarm says that the caller is awake, and empties FD.
func (h *Host) Disarm() {
	h.waiting.Store(0)
	drain(h.doorbell)
}

// Counter returns counting event i, below Counters.
func (h *Host) Counter(i int) *Counter { return &h.counters[i] }

// Close unmaps it. A Wait returns with os.ErrClosed. A process that uses the payload of a
// call, or a counter, after that dies of SIGSEGV. Idempotent.
func (h *Host) Close() error {
	h.mu.Lock()
	if h.closed.Swap(true) {
		h.mu.Unlock()
		return nil
	}
	if h.unwatch != nil {
		h.unwatch()
	}
	h.mu.Unlock()
	h.wake()
	h.waiters.Wait()

	h.kickMu.Lock()
	h.kickDead = true
	errs := []error{os.NewSyscallError("close", unix.Close(h.kick))}
	h.kickMu.Unlock()
	for _, fd := range append([]int{h.doorbell}, h.doorbells...) {
		errs = append(errs, os.NewSyscallError("close", unix.Close(fd)))
	}
	if h.mem != nil {
		errs = append(errs, h.mem.Close())
	}
	return errors.Join(errs...)
}
