// SPDX-License-Identifier: Apache-2.0

package hostq

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"
	"unsafe"

	"github.com/xspin/xspin/spin"
	"golang.org/x/sys/unix"
)

// PairConfig describes a Pair. Zero fields get their defaults.
type PairConfig struct {
	Name   string // for bpftool
	Layout        // Lanes: Required

	// Requests without their response yet, of each lane. Defaults to 7/8 of Requests
	// or more: so many that the application always has room for a response, unless
	// requests are cancelled.
	Outstanding int
}

// A Pair is the NIC's side of the queues to one application: events and requests go
// to it, responses come back. All may be called by any number of threads at the same
// time. Nothing waits, and nothing but Poll runs foreign code.
type Pair struct {
	cfg PairConfig
	mem *Memory // nil in tests that bring their own memory
	parts

	eventRing   producer
	requestRing producer
	lanes       []lane
	counters    [Counters]Counter

	doorbell, ring int // sockets: the application's, and the one that rings it
	self           int // an eventfd of the pair's own, which rings all lanes

	places Ledger // of eventRing

	state  atomic.Uint32 // end* bits: 1 << endDetached, 1 << endBroken, 1 << endAsking
	reason atomic.Pointer[error]

	lost   atomic.Uint64 // events, not told yet
	lostMu sync.Mutex

	lostTimer *time.Timer // guarded by lostMu
	closed    bool        // guarded by lostMu

	eventsFull, eventsLost, full, late, bogus, rung atomic.Uint64

	closeOnce sync.Once
	closeErr  error
}

// A lane is a response ring, the requests that will be answered there, and the doorbell of
// the worker that polls it.
type lane struct {
	ring
	head     *uint64 // shared: ours, never read
	waiting  *atomic.Uint32
	doorbell int // an eventfd: the application rings
	edges    int // an epoll that has it, and the pair's own

	_ pad
	// at is the next position to take <<1, and whether somebody is polling.
	at atomic.Uint64

	// Of who polls.
	buf      []byte
	response Response
	pos      uint64
	shown    uint64 // what head says, at most lag less than pos
	cursor   int    // into the table: where the search for abandoned requests continues

	// The lock is held for a few instructions, and mostly by the thread that polls.
	// What it guards could be had with compare-and-swap, but with more of them, and
	// it is these that take the time.
	mu    sync.Mutex
	table []entry
	free  []uint32 // indices of table
	_     pad
}

// An entry is a request that wants a response.
type entry struct {
	id         uint64 // 0: it has one, or there is no request
	generation uint32
	tag        uint64
	user       any
}

// An id is generation<<32 | lane<<24 | index. It is not 0, as generations begin at 1.
const (
	idLaneShift = 24
	idIndex     = 1<<idLaneShift - 1
	idGenShift  = 32
)

// errAbandoned is ErrDetached as well, for callers that need not care why.
var errAbandoned = fmt.Errorf("%w: %w", ErrDetached, ErrBroken)

// NewPair makes a pair with nobody attached. Events are queued nevertheless. It takes
// memory for Requests of the largest payload, and again for each lane: with the
// defaults 2 MiB each, and some ms per MiB to make.
func NewPair(cfg PairConfig) (*Pair, error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	mem, err := NewMemory(cmp.Or(cfg.Name, "pair"), cfg.Size())
	if err != nil {
		return nil, fmt.Errorf("queues %s: %w", cfg.Name, err)
	}
	p, err := newPair(cfg, mem.Bytes())
	if err != nil {
		_ = mem.Close()
		return nil, fmt.Errorf("queues %s: %w", cfg.Name, err)
	}
	p.mem = mem
	return p, nil
}

func (c *PairConfig) fill() error {
	c.Events = cmp.Or(c.Events, DefaultEvents)
	c.Requests = cmp.Or(c.Requests, DefaultRequests)
	c.Payload = cmp.Or(c.Payload, DefaultPayload)
	// No more than response slots that are certain to be seen free.
	c.Outstanding = cmp.Or(c.Outstanding, max(c.Requests+1-int(lag(uint64(c.Requests))), 1))
	if err := c.Check().Err(); err != nil {
		return fmt.Errorf("queues: %w", err)
	}
	if c.Outstanding < 1 || c.Outstanding > MaxSlots {
		return fmt.Errorf("queues: %d outstanding requests: want 1 to %d", c.Outstanding, MaxSlots)
	}
	return nil
}

// newPair makes a pair of a filled configuration in zeroed memory.
func newPair(cfg PairConfig, mem []byte) (*Pair, error) {
	p := &Pair{cfg: cfg, parts: cfg.cut(mem), doorbell: -1, ring: -1, self: -1}
	p.eventRing = producer{ring: p.parts.events, head: &p.shared.events}
	p.places.init(p.freeEvents)
	p.requestRing = producer{ring: p.parts.requests, head: &p.shared.requests}
	for i := range p.counters {
		p.counters[i] = Counter{s: &p.shared.counters[i], ring: p.wakeApplication}
	}

	p.lanes = make([]lane, cfg.Lanes)
	for i := range p.lanes {
		l := &p.lanes[i]
		l.doorbell, l.edges = -1, -1
		l.ring = p.responses[i]
		l.head = &p.shared.lanes[i].head
		l.waiting = &p.shared.lanes[i].waiting
		l.buf = make([]byte, cfg.Payload)
		l.table = make([]entry, cfg.Outstanding)
		for i := range l.table {
			l.free = append(l.free, uint32(i))
		}
	}

	var err error
	if p.doorbell, p.ring, err = newSockets(); err != nil {
		return nil, fmt.Errorf("doorbell: %w", err)
	}
	if p.self, err = newEvent(); err != nil {
		_ = p.Close()
		return nil, fmt.Errorf("doorbell: %w", err)
	}
	for i := range p.lanes {
		l := &p.lanes[i]
		if l.doorbell, err = newEvent(); err == nil {
			l.edges, err = newEpoll(l.doorbell, p.self)
		}
		if err != nil {
			_ = p.Close()
			return nil, fmt.Errorf("doorbell of lane %d: %w", i, err)
		}
	}

	p.layout = cfg.words()
	p.magic = magic
	return p, nil
}

// Layout returns what the application's side needs to know.
func (p *Pair) Layout() Layout { return p.cfg.Layout }

// Descriptors returns what the application's side needs: the memory, the socket that is its
// doorbell, and for each lane the eventfd that is the NIC's. They stay the pair's.
func (p *Pair) Descriptors() (memory, doorbell int, lanes []int) {
	memory = -1
	if p.mem != nil {
		memory = p.mem.FD()
	}
	for i := range p.lanes {
		lanes = append(lanes, p.lanes[i].doorbell)
	}
	return memory, p.doorbell, lanes
}

// wakeApplication rings the application's doorbell.
func (p *Pair) wakeApplication() {
	p.rung.Add(1)
	strike(p.ring)
}

// Event tells the application something. False: there is no room that nobody has set aside, or no application any more.
func (p *Pair) Event(e *Event) bool {
	if p.tells() && (p.lost.Load() == 0 || p.tellLost()) && p.places.Claim() {
		ok := p.put(e)
		p.places.Give(1)
		if ok {
			return true
		}
	}
	p.eventsFull.Add(1)
	return false
}

// EventAside is Event for somebody who has set a place aside in Places. If it returns true, the place is used up.
func (p *Pair) EventAside(e *Event) bool {
	if !p.tells() || !p.put(e) {
		p.eventsFull.Add(1)
		return false
	}
	p.places.Give(1)
	return true
}

// Places are those of the application's queue of events. None is free when the application is gone.
func (p *Pair) Places() *Ledger { return &p.places }

// freeEvents is for places.
func (p *Pair) freeEvents(want int) int {
	if !p.tells() {
		return 0
	}
	free, ok := p.eventRing.free(want)
	if !ok {
		p.failHead("events", &p.eventRing)
	}
	return free
}

// LoseEvent counts an event that nobody will get; an Overflow event says so as soon
// as there is room.
func (p *Pair) LoseEvent() { p.LoseEvents(1) }

// LoseEvents is LoseEvent for n of them.
func (p *Pair) LoseEvents(n uint64) {
	if n == 0 {
		return
	}
	p.eventsLost.Add(n)
	if p.lost.Add(n) == n {
		// There may never be another event that it can go ahead of.
		p.lostMu.Lock()
		defer p.lostMu.Unlock()
		p.tellLater()
	}
}

// tellEvery is how often it is tried to tell of lost events.
const tellEvery = 20 * time.Millisecond

// tellLater has tellLost called again, until there was room. The caller has lostMu.
func (p *Pair) tellLater() {
	if !p.closed && p.tells() {
		p.lostTimer = time.AfterFunc(tellEvery, func() { p.tellLost() })
	}
}

// tellLost queues the Overflow event that is due. While it does, and does not find
// room, others do not overtake it.
func (p *Pair) tellLost() bool {
	p.lostMu.Lock()
	defer p.lostMu.Unlock()
	if p.lostTimer != nil {
		p.lostTimer.Stop()
	}
	n := p.lost.Load()
	if n == 0 || p.closed {
		return true
	}
	told := p.places.Claim()
	if told {
		told = p.put(&Event{Kind: Overflow, Lost: n})
		p.places.Give(1)
	}
	if !told {
		p.tellLater()
		return false
	}
	if p.lost.Add(-n) != 0 {
		p.tellLater()
	}
	return true
}

// put queues an event.
func (p *Pair) put(e *Event) bool {
	pos, _, err := p.eventRing.claim(1)
	if err != nil {
		if err == ErrBroken {
			p.failHead("events", &p.eventRing)
		}
		return false
	}
	s := (*eventSlot)(unsafe.Pointer(unsafe.SliceData(p.eventRing.slot(pos))))
	kind := uint8(e.Kind) & eventKind
	if e.FlowControl {
		kind |= eventFlow
	}
	if a := e.Source.Addr(); a.Is4() {
		kind |= eventIPv4
		*(*[4]byte)(s.address[:]) = a.As4()
	} else if a.IsValid() {
		kind |= eventIPv6
		s.address = a.As16()
	}
	if e.Text != "" {
		kind |= eventTexts
		n := copy(s.text[:], e.Text)
		if n < len(e.Text) {
			const more = "…"
			for n = TextLen - len(more); n > 0 && !utf8.RuneStart(e.Text[n]); n-- {
			}
			n += copy(s.text[n:], more)
		}
		clear(s.text[n:])
	}
	s.kind, s.cause, s.port = kind, e.Cause&^eventMissing, e.Source.Port()
	if e.Missing != 0 {
		s.cause |= eventMissing
		s.missing = e.Missing
	}
	s.number, s.slot = e.Number, e.Slot
	s.length, s.user, s.dropped, s.time = e.Length, e.User, e.Dropped, e.Time
	if e.Kind == Overflow {
		s.length = e.Lost
	}
	p.eventRing.publish(pos)
	if needed(&p.waiting) {
		p.wakeApplication()
	}
	return true
}

// Request asks the application something. The response will come out of Poll of the
// lane, with user. ErrFull: no slot is free, or as many requests are outstanding as
// there may be; ErrDetached, ErrBroken, ErrTooLong.
func (p *Pair) Request(lane int, r *Request, user any) (id uint64, err error) {
	if uint(lane) >= uint(len(p.lanes)) {
		return 0, fmt.Errorf("lane %d of %d: %w", lane, len(p.lanes), spin.ErrBounds)
	}
	if len(r.Payload) > p.cfg.Payload {
		return 0, fmt.Errorf("request of %d bytes, room for %d: %w", len(r.Payload), p.cfg.Payload, ErrTooLong)
	}
	if p.state.Load() != 0 {
		return 0, p.ended()
	}
	length := uint32(len(r.Payload))
	if r.Reply {
		length |= requestReply
		if id = p.register(lane, r.Tag, user); id == 0 {
			p.countFull(r)
			return 0, ErrFull
		}
	}
	pos, _, err := p.requestRing.claim(1)
	if err != nil {
		if err == ErrBroken {
			p.failHead("requests", &p.requestRing)
		} else {
			p.countFull(r)
		}
		if id != 0 && !p.Cancel(id) {
			// Somebody has guessed the id, and answered what was not asked yet.
			// Poll has handed that out.
			return id, nil
		}
		return 0, err
	}
	p.fillRequest(pos, r, length, id)
	p.requestRing.publish(pos)
	if needed(&p.waiting) {
		p.wakeApplication()
	}
	// Either Poll finds the request when the pair ends, or it is seen here.
	if p.state.Load() != 0 && id != 0 && p.Cancel(id) {
		return 0, p.ended()
	}
	return id, nil
}

// countFull counts a request that finds no room, once however often it is tried.
func (p *Pair) countFull(r *Request) {
	if !r.Again {
		p.full.Add(1)
	}
}

func (p *Pair) fillRequest(pos uint64, r *Request, length uint32, id uint64) {
	b := p.requestRing.slot(pos)
	s := (*requestSlot)(unsafe.Pointer(unsafe.SliceData(b)))
	s.length, s.id, s.tag, s.words, s.hpu = length, id, r.Tag, r.Words, r.HPU
	copy(b[requestHeader:], r.Payload)
}

// Notify sends requests that want no response, whatever their Reply says, and returns
// how many: with an error as of Request if not all. It is faster than as many Requests,
// as the application sees nothing of them before all are written.
func (p *Pair) Notify(rs []Request) (n int, err error) {
	for i := range rs {
		if l := len(rs[i].Payload); l > p.cfg.Payload {
			return 0, fmt.Errorf("request of %d bytes, room for %d: %w", l, p.cfg.Payload, ErrTooLong)
		}
	}
	for n < len(rs) {
		if p.state.Load() != 0 {
			return n, p.ended()
		}
		pos, k, err := p.requestRing.claim(min(uint64(len(rs)-n), p.requestRing.slots()))
		if err != nil {
			if err == ErrBroken {
				p.failHead("requests", &p.requestRing)
			} else {
				p.full.Add(1)
			}
			return n, err
		}
		for i := range k {
			r := &rs[n+int(i)]
			p.fillRequest(pos+i, r, uint32(len(r.Payload)), 0)
		}
		for i := range k {
			p.requestRing.publish(pos + i)
		}
		if needed(&p.waiting) {
			p.wakeApplication()
		}
		n += int(k)
	}
	return n, nil
}

// register makes an entry in the lane's table, and returns its id; 0: there is no room.
func (p *Pair) register(lane int, tag uint64, user any) (id uint64) {
	l := &p.lanes[lane]
	l.mu.Lock()
	if n := len(l.free); n > 0 {
		index := l.free[n-1]
		l.free = l.free[:n-1]
		e := &l.table[index]
		e.generation = max(e.generation+1, 1)
		e.tag, e.user = tag, user
		id = uint64(e.generation)<<idGenShift | uint64(lane)<<idLaneShift | uint64(index)
		e.id = id
	}
	l.mu.Unlock()
	return id
}

// answer ends a request: it is the caller that has its response. Not ok: somebody else
// has; or there never was such a request, then it is not known either.
func (l *lane) answer(id uint64) (tag uint64, user any, ok, known bool) {
	index, g := uint32(id&idIndex), uint32(id>>idGenShift)
	if index >= uint32(len(l.table)) || g == 0 {
		return 0, nil, false, false
	}
	e := &l.table[index]
	l.mu.Lock()
	if ok = e.id == id; ok {
		tag, user = e.tag, e.user
		e.id, e.user = 0, nil
		l.free = append(l.free, index)
	}
	known = e.generation-g < 1<<31
	l.mu.Unlock()
	return tag, user, ok, known
}

func idLane(id uint64) int { return int(id >> idLaneShift & 0xff) }

// Cancel forgets a request: its response, if any comes, is counted as late. It
// returns false if Poll has handed out the response already.
func (p *Pair) Cancel(id uint64) (ok bool) {
	if lane := idLane(id); lane < len(p.lanes) {
		_, _, ok, _ = p.lanes[lane].answer(id)
	}
	return ok
}

// Poll calls f for responses of a lane, up to most of them, and returns how many. When
// the application is gone, f gets what is outstanding, with ErrDetached. One thread at
// a time: if another polls the lane it returns 0. So f should come back: until then
// nobody gets anything out of the lane.
func (p *Pair) Poll(lane, most int, f func(*Response)) (n int) {
	l := &p.lanes[lane]
	at := l.at.Load()
	if !p.pending(l, at) || at&1 != 0 || !l.at.CompareAndSwap(at, at|1) {
		return 0
	}
	l.pos = at >> 1
	defer l.unlock() // also if f panics

	// Slots count, not responses: somebody who answers nonsense faster than we can
	// read does not keep us.
	for end := l.pos + uint64(max(most, 0)); l.pos != end && !p.is(endBroken); {
		lap := l.unpublished(l.pos)
		got := l.lap(l.pos).Load()
		if got == lap {
			break
		}
		if got != lap+1 {
			p.fail(fmt.Errorf("responses of lane %d: slot of position %d is in lap %d: want %d or the next: %w",
				lane, l.pos, got, lap, ErrBroken))
			break
		}
		ok := p.accept(lane, l)
		l.pos++
		if ok {
			n++
			f(&l.response)
		}
	}
	if p.state.Load() == 0 {
		return n
	}
	// What is not answered yet never will be.
	for range l.table {
		if n >= most {
			break
		}
		l.mu.Lock()
		id := l.table[l.cursor].id
		l.mu.Unlock()
		l.cursor = (l.cursor + 1) % len(l.table)
		if tag, user, ok, _ := l.answer(id); ok {
			n++
			l.response = Response{ID: id, Tag: tag, User: user, Err: p.abandoned()}
			f(&l.response)
		}
	}
	return n
}

// pending tells whether Poll has something to do. Two loads if not.
func (p *Pair) pending(l *lane, at uint64) bool {
	if p.state.Load() != 0 {
		// Not what lies in the ring: nobody stops the other side from adding to it.
		return l.outstanding() != 0
	}
	return l.lap(at>>1).Load() != l.unpublished(at>>1)
}

// unlock ends a Poll.
func (l *lane) unlock() {
	l.response.User = nil
	if l.pos-l.shown >= lag(l.slots()) {
		l.shown = l.pos
		atomic.StoreUint64(l.head, l.pos)
	}
	l.at.Store(l.pos << 1)
}

// accept makes l.response of the slot at l.pos, unless it answers nothing.
func (p *Pair) accept(lane int, l *lane) bool {
	b := l.slot(l.pos)
	s := (*responseSlot)(unsafe.Pointer(unsafe.SliceData(b)))
	// Once: the application may be writing.
	id := atomic.LoadUint64(&s.id)
	length := atomic.LoadUint32(&s.length)
	status := atomic.LoadInt32(&s.status)
	if length > uint32(len(l.buf)) || idLane(id) != lane {
		p.bogus.Add(1)
		return false
	}
	tag, user, ok, known := l.answer(id)
	if !ok {
		if known {
			p.late.Add(1)
		} else {
			p.bogus.Add(1)
		}
		return false
	}
	r := &l.response
	r.ID, r.Tag, r.Status, r.User, r.Err = id, tag, status, user, nil
	r.Payload = l.buf[:length]
	copy(r.Payload, b[responseHeader:])
	return true
}

func (l *lane) outstanding() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.table) - len(l.free)
}

// Outstanding returns how many requests of a lane have no response yet.
func (p *Pair) Outstanding(lane int) int { return p.lanes[lane].outstanding() }

// Doorbell returns a descriptor that has an edge when the application rings for a lane that
// is armed, or when the pair ends. It is for epoll with EPOLLET, and only that: it is always
// readable once it has rung.
func (p *Pair) Doorbell(lane int) int { return p.lanes[lane].edges }

// Arm says that the poller of a lane is about to sleep. It returns false, and is not
// armed, if there is something to poll.
func (p *Pair) Arm(lane int) bool {
	l := &p.lanes[lane]
	if p.lost.Load() != 0 {
		p.tellLost()
	}
	arm(l.waiting)
	if p.pending(l, l.at.Load()) {
		p.Disarm(lane)
		return false
	}
	return true
}

// Disarm says that it is awake.
func (p *Pair) Disarm(lane int) { p.lanes[lane].waiting.Swap(0) }

// Counter returns counting event i, below Counters.
func (p *Pair) Counter(i int) *Counter { return &p.counters[i] }

// tells tells whether events go to the application.
func (p *Pair) tells() bool { return p.state.Load()&^(1<<endAsking) == 0 }

func (p *Pair) is(end int) bool { return p.state.Load()>>end&1 != 0 }

// ended returns the error for requests.
func (p *Pair) ended() error {
	if p.is(endBroken) {
		return ErrBroken
	}
	return ErrDetached
}

// abandoned returns the error for requests that will not be answered.
func (p *Pair) abandoned() error {
	if p.is(endBroken) {
		return errAbandoned
	}
	return ErrDetached
}

// end ends the pair, and wakes all that sleep because of it.
func (p *Pair) end(why int, reason error) {
	if p.state.Or(1<<why)>>why&1 != 0 {
		return
	}
	if why != endAsking {
		p.reason.CompareAndSwap(nil, &reason)
		p.shared.ended.Store(uint32(why))
		p.wakeApplication()
	}
	for i := range p.lanes {
		p.lanes[i].waiting.Store(0)
	}
	add(p.self)
}

// fail breaks the pair.
func (p *Pair) fail(reason error) { p.end(endBroken, reason) }

// failHead breaks it because of the head of r.
func (p *Pair) failHead(what string, r *producer) {
	p.fail(fmt.Errorf("%s: head %d: it was %d, and the tail is %d: %w", what,
		atomic.LoadUint64(r.head), r.seen.Load(), r.tail.Load(), ErrBroken))
}

// StopRequests has nobody wait for the application any more: requests fail as after Detach, and events go on. Final.
func (p *Pair) StopRequests() { p.end(endAsking, nil) }

// Detach says that there is no application any more: requests fail, and those that
// are outstanding get ErrDetached from Poll. Final.
func (p *Pair) Detach() { p.end(endDetached, ErrDetached) }

// Err returns nil as long as the pair works, and then why not: it is ErrDetached, or
// wraps ErrBroken and says which rule was broken.
func (p *Pair) Err() error {
	if e := p.reason.Load(); e != nil {
		return *e
	}
	return nil
}

// Close frees the pair. Nobody may use it any more.
func (p *Pair) Close() error {
	p.closeOnce.Do(func() {
		p.lostMu.Lock()
		p.closed = true // what a timer calls does not touch the memory any more
		p.lostMu.Unlock()
		var errs []error
		fds := []int{p.doorbell, p.ring, p.self}
		for i := range p.lanes {
			fds = append(fds, p.lanes[i].edges, p.lanes[i].doorbell)
		}
		for _, fd := range fds {
			if fd >= 0 {
				errs = append(errs, os.NewSyscallError("close", unix.Close(fd)))
			}
		}
		if p.mem != nil {
			errs = append(errs, p.mem.Close())
		}
		p.closeErr = errors.Join(errs...)
	})
	return p.closeErr
}

// PairStats are counters of a pair.
type PairStats struct {
	Events      uint64 `json:"events"`      // given to the application
	EventsFull  uint64 `json:"events_full"` // times that one found no room; it may be tried again
	EventsLost  uint64 `json:"events_lost"` // for good
	Requests    uint64 `json:"requests"`
	Full        uint64 `json:"full"`        // requests that found no room, each once: some got it later
	Responses   uint64 `json:"responses"`   // that somebody waited for
	Late        uint64 `json:"late"`        // that nobody waited for any more
	Bogus       uint64 `json:"bogus"`       // that answer nothing, or with impossible lengths
	Outstanding int    `json:"outstanding"` // requests, now
	Waiting     int    `json:"waiting"`     // events and requests that the application is not done with, as far as it says
	Rung        uint64 `json:"rung"`        // system calls to wake the application
	Broken      bool   `json:"broken"`      // see ErrBroken
}

// Stats returns the counters.
func (p *Pair) Stats() PairStats {
	s := PairStats{
		Events:     p.eventRing.tail.Load(),
		EventsFull: p.eventsFull.Load(),
		EventsLost: p.eventsLost.Load(),
		Requests:   p.requestRing.tail.Load(),
		Full:       p.full.Load(),
		Late:       p.late.Load(),
		Bogus:      p.bogus.Load(),
		Waiting:    p.eventRing.held() + p.requestRing.held(),
		Rung:       p.rung.Load(),
		Broken:     p.is(endBroken),
	}
	for i := range p.lanes {
		l := &p.lanes[i]
		s.Outstanding += l.outstanding()
		s.Responses += l.at.Load() >> 1
	}
	s.Responses -= min(s.Late+s.Bogus, s.Responses)
	return s
}
