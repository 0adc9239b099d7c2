// SPDX-License-Identifier: Apache-2.0

package hostq

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"unicode/utf8"
	"unsafe"

	"golang.org/x/sys/unix"
)

// PairConfig describes a Pair. Zero fields get their defaults.
type PairConfig struct {
	Name        string // for bpftool
	Layout             // Lanes: Required
	Outstanding int    // requests without their response yet, of all lanes. Defaults to Requests
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

	bell, bellWrite int // the application reads, the NIC writes

	state  atomic.Uint32 // end* bits: 1 << endDetached, 1 << endBroken
	reason atomic.Pointer[error]

	// Requests that want a response, by index. free is a stack of those that are
	// not in use, linked by below: the index+1 of the top, and above it a count of
	// changes, so that a compare-and-swap does not take one top for another.
	table []entry
	free  atomic.Uint64

	lost   atomic.Uint64 // events, not told yet
	lostMu sync.Mutex

	eventsFull, eventsLost, full, responded, late, bogus, rung atomic.Uint64

	closeOnce sync.Once
	closeErr  error
}

// A lane is a response ring and who polls it.
type lane struct {
	ring        consumer
	waiting     *uint32
	outstanding atomic.Int64
	read, write int         // its bell: the NIC reads, the application writes
	owed        atomic.Bool // a byte is on its way into the bell

	// Of who has set busy.
	busy     atomic.Bool
	buf      []byte
	response Response
	cursor   int // into the table: where the search for abandoned requests goes on
	_        pad
}

// An entry is a request that wants a response.
type entry struct {
	// live is the request's id, 0 when it has none any more: whoever puts 0
	// there hands the response out, and has the entry.
	live       atomic.Uint64
	generation atomic.Uint32
	below      atomic.Uint32 // while it is free
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

// NewPair makes a pair with nobody attached. Events are queued nevertheless.
func NewPair(cfg PairConfig) (*Pair, error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	mem, err := NewMemory(cmp.Or(cfg.Name, "pair"), cfg.size())
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
	c.Outstanding = cmp.Or(c.Outstanding, c.Requests)
	if err := c.check(); err != nil {
		return err
	}
	if c.Outstanding < 1 || c.Outstanding > MaxSlots {
		return fmt.Errorf("queues: %d outstanding requests: want 1 to %d", c.Outstanding, MaxSlots)
	}
	return nil
}

// newPair makes a pair of a filled configuration in zeroed memory.
func newPair(cfg PairConfig, mem []byte) (*Pair, error) {
	p := &Pair{cfg: cfg, parts: cfg.cut(mem), bell: -1, bellWrite: -1}
	p.eventRing = producer{ring: p.parts.events, head: &p.shared.events}
	p.requestRing = producer{ring: p.parts.requests, head: &p.shared.requests}
	for i := range p.counters {
		p.counters[i] = Counter{s: &p.shared.counters[i], ring: p.wakeApplication}
	}

	p.table = make([]entry, cfg.Outstanding)
	for i := range p.table {
		p.table[i].below.Store(uint32(i)) // the index before this one, +1
	}
	p.free.Store(uint64(len(p.table)))

	p.lanes = make([]lane, cfg.Lanes)
	for i := range p.lanes {
		l := &p.lanes[i]
		l.read, l.write = -1, -1
		l.ring.init(p.responses[i], &p.shared.lanes[i].head)
		l.waiting = &p.shared.lanes[i].waiting
		l.buf = make([]byte, cfg.Payload)
	}

	var err error
	if p.bell, p.bellWrite, err = newPipe(); err != nil {
		return nil, err
	}
	for i := range p.lanes {
		l := &p.lanes[i]
		if l.read, l.write, err = newPipe(); err != nil {
			_ = p.Close()
			return nil, fmt.Errorf("bell of lane %d: %w", i, err)
		}
	}

	p.layout = cfg.words()
	p.magic = magic
	return p, nil
}

// Layout returns what the application's side needs to know.
func (p *Pair) Layout() Layout { return p.cfg.Layout }

// Descriptors returns what the application's side needs: the memory, the end of the
// bell that it reads, and for each lane the end of a bell that it writes. They stay
// the pair's.
func (p *Pair) Descriptors() (memory, bell int, lanes []int) {
	memory = -1
	if p.mem != nil {
		memory = p.mem.FD()
	}
	for i := range p.lanes {
		lanes = append(lanes, p.lanes[i].write)
	}
	return memory, p.bell, lanes
}

// wakeApplication rings the application's bell. Nobody else has its writing end, so it
// does not block.
func (p *Pair) wakeApplication() {
	p.rung.Add(1)
	_ = strike(p.bellWrite)
}

// Event tells the application something. False: there is no room, or nobody any more.
func (p *Pair) Event(e *Event) bool {
	if p.state.Load() != 0 || p.lost.Load() != 0 && !p.tellLost() || !p.put(e) {
		p.eventsFull.Add(1)
		return false
	}
	return true
}

// LoseEvent counts an event that nobody will get; an Overflow event says so as soon
// as there is room.
func (p *Pair) LoseEvent() {
	p.eventsLost.Add(1)
	p.lost.Add(1)
}

// tellLost queues the Overflow event that is due. While it does, and does not find
// room, others do not overtake it.
func (p *Pair) tellLost() bool {
	p.lostMu.Lock()
	defer p.lostMu.Unlock()
	n := p.lost.Load()
	if n == 0 {
		return true
	}
	if !p.put(&Event{Kind: Overflow, Lost: n}) {
		return false
	}
	p.lost.Add(-n)
	return true
}

// put queues an event.
func (p *Pair) put(e *Event) bool {
	pos, err := p.eventRing.claim()
	if err != nil {
		if err == ErrBroken {
			p.fail("events", &p.eventRing)
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
		n := min(len(e.Text), TextLen)
		for n < len(e.Text) && n > 0 && !utf8.RuneStart(e.Text[n]) {
			n--
		}
		copy(s.text[:], e.Text[:n])
		clear(s.text[n:])
	}
	s.kind, s.cause, s.port = kind, e.Cause, e.Source.Port()
	s.number, s.slot = e.Number, e.Slot
	s.length, s.user, s.dropped, s.missing = e.Length, e.User, e.Dropped, e.Missing
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
		return 0, fmt.Errorf("lane %d of %d: %w", lane, len(p.lanes), ErrBounds)
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
			p.full.Add(1)
			return 0, ErrFull
		}
	}
	pos, err := p.requestRing.claim()
	if err != nil {
		if err == ErrBroken {
			p.fail("requests", &p.requestRing)
		} else {
			p.full.Add(1)
		}
		if id != 0 && !p.Cancel(id) {
			// Somebody has guessed the id, and answered what was not asked yet.
			// Poll has handed that out.
			return id, nil
		}
		return 0, err
	}
	b := p.requestRing.slot(pos)
	s := (*requestSlot)(unsafe.Pointer(unsafe.SliceData(b)))
	s.length, s.id, s.tag, s.words, s.hpu = length, id, r.Tag, r.Words, r.HPU
	copy(b[requestHeader:], r.Payload)
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

// register makes an entry in the table, and returns its id; 0: there is no room.
func (p *Pair) register(lane int, tag uint64, user any) uint64 {
	var e *entry
	var index uint32
	for {
		top := p.free.Load()
		if uint32(top) == 0 {
			return 0
		}
		index = uint32(top) - 1
		e = &p.table[index]
		if p.free.CompareAndSwap(top, (top>>32+1)<<32|uint64(e.below.Load())) {
			break
		}
	}
	g := max(e.generation.Load()+1, 1)
	e.generation.Store(g)
	e.tag, e.user = tag, user
	p.lanes[lane].outstanding.Add(1)
	id := uint64(g)<<idGenShift | uint64(lane)<<idLaneShift | uint64(index)
	e.live.Store(id)
	return id
}

// answer ends a request: it is the caller that has its response. False: somebody else
// has, or there never was such a request of the lane.
func (p *Pair) answer(id uint64) (tag uint64, user any, ok bool) {
	index := uint32(id & idIndex)
	if id == 0 || index >= uint32(len(p.table)) {
		return 0, nil, false
	}
	e := &p.table[index]
	if !e.live.CompareAndSwap(id, 0) {
		return 0, nil, false
	}
	tag, user = e.tag, e.user
	e.user = nil
	p.lanes[idLane(id)].outstanding.Add(-1)
	for {
		top := p.free.Load()
		e.below.Store(uint32(top))
		if p.free.CompareAndSwap(top, (top>>32+1)<<32|uint64(index+1)) {
			return tag, user, true
		}
	}
}

func idLane(id uint64) int { return int(id >> idLaneShift & 0xff) }

// Cancel forgets a request: its response, if any comes, is counted as late. It
// returns false if Poll has handed out the response already.
func (p *Pair) Cancel(id uint64) bool {
	_, _, ok := p.answer(id)
	return ok
}

// Poll calls f for responses of a lane, up to most of them, and returns how many. When
// the application is gone, f gets what is outstanding, with ErrDetached. One thread at
// a time: if another polls the lane it returns 0. So f should come back: until then
// nobody gets anything out of the lane.
func (p *Pair) Poll(lane, most int, f func(*Response)) (n int) {
	l := &p.lanes[lane]
	if !p.pending(l) || !l.busy.CompareAndSwap(false, true) {
		return 0
	}
	defer l.unlock() // also if f panics

	// Slots count, not responses: somebody who answers nonsense faster than we can
	// read does not keep us.
	used := 0
	for ; used < most && !p.is(endBroken); used++ {
		pos, ok, err := l.ring.take()
		if err != nil {
			p.fail(fmt.Sprintf("responses of lane %d", lane), nil)
			break
		}
		if !ok {
			break
		}
		ok = p.accept(lane, l, pos)
		l.ring.release(pos)
		if ok {
			n++
			f(&l.response)
		}
	}
	if p.state.Load() == 0 {
		return n
	}
	for range p.table {
		if used >= most || l.outstanding.Load() == 0 {
			break
		}
		id := p.table[l.cursor].live.Load()
		l.cursor = (l.cursor + 1) % len(p.table)
		if id == 0 || idLane(id) != lane {
			continue
		}
		if tag, user, ok := p.answer(id); ok {
			used++
			n++
			l.response = Response{ID: id, Tag: tag, User: user, Err: p.abandoned()}
			f(&l.response)
		}
	}
	return n
}

// pending tells whether Poll has something to do. Two loads if not.
func (p *Pair) pending(l *lane) bool {
	switch {
	case p.state.Load() == 0:
		return l.ring.ready()
	case p.is(endBroken):
		return l.outstanding.Load() != 0
	default:
		return l.outstanding.Load() != 0 || l.ring.ready()
	}
}

func (l *lane) unlock() {
	l.response = Response{}
	l.ring.flush()
	l.busy.Store(false)
}

// accept makes l.response of a slot, unless it answers nothing.
func (p *Pair) accept(lane int, l *lane, pos uint64) bool {
	b := l.ring.slot(pos)
	s := (*responseSlot)(unsafe.Pointer(unsafe.SliceData(b)))
	// Once: the application may be writing.
	id := atomic.LoadUint64(&s.id)
	length := atomic.LoadUint32(&s.length)
	status := atomic.LoadInt32(&s.status)
	if length > uint32(p.cfg.Payload) || idLane(id) != lane {
		p.bogus.Add(1)
		return false
	}
	tag, user, ok := p.answer(id)
	if !ok {
		if p.known(id) {
			p.late.Add(1)
		} else {
			p.bogus.Add(1)
		}
		return false
	}
	payload := l.buf[:length]
	copy(payload, b[responseHeader:])
	l.response = Response{ID: id, Tag: tag, Status: status, Payload: payload, User: user}
	p.responded.Add(1)
	return true
}

// known tells whether there was a request of that id.
func (p *Pair) known(id uint64) bool {
	index, g := int(id&idIndex), uint32(id>>idGenShift)
	return g != 0 && index < len(p.table) && p.table[index].generation.Load()-g < 1<<31
}

// Outstanding returns how many requests of a lane have no response yet.
func (p *Pair) Outstanding(lane int) int { return int(p.lanes[lane].outstanding.Load()) }

// Bell returns a descriptor that becomes readable when the application rings for a
// lane that is armed, or when the pair ends. It is for epoll with EPOLLET, and never
// to be read. It does not report a hang-up, as the pair has the other end as well.
func (p *Pair) Bell(lane int) int { return p.lanes[lane].read }

// Arm says that the poller of a lane is about to sleep. It returns false, and is not
// armed, if there is something to poll.
func (p *Pair) Arm(lane int) bool {
	l := &p.lanes[lane]
	if p.lost.Load() != 0 {
		p.tellLost()
	}
	atomic.StoreUint32(l.waiting, 1)
	if p.pending(l) {
		p.Disarm(lane)
		return false
	}
	return true
}

// Disarm says that it is awake.
func (p *Pair) Disarm(lane int) {
	l := &p.lanes[lane]
	rung := atomic.SwapUint32(l.waiting, 0) == 0
	// The bell is emptied whenever somebody has rung, so that it cannot fill up: a
	// full pipe takes no byte, and without that there is no edge. The byte comes
	// after the word, so it may be still to come; then it wakes us once too often.
	if rung || l.owed.Load() {
		l.owed.Store(drain(l.read) == 0)
	}
}

// wake rings a lane's bell from this side. The writing end is the application's as
// well, which may have made it blocking, and the pipe full.
func (l *lane) wake() {
	atomic.StoreUint32(l.waiting, 0)
	for range 16 {
		n, err := unix.Pwritev2(l.write, [][]byte{one[:]}, -1, unix.RWF_NOWAIT)
		if n == 1 || err != nil && err != unix.EAGAIN && err != unix.EINTR {
			return
		}
		drain(l.read)
	}
	// Somebody keeps it full, and each byte is an edge.
}

// Counter returns counting event i, below Counters.
func (p *Pair) Counter(i int) *Counter { return &p.counters[i] }

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
	p.reason.CompareAndSwap(nil, &reason)
	atomic.StoreUint32(&p.shared.ended, uint32(why))
	p.wakeApplication()
	for i := range p.lanes {
		p.lanes[i].wake()
	}
}

// fail breaks the pair, because of the head of r, or of a lap word.
func (p *Pair) fail(what string, r *producer) {
	err := fmt.Errorf("%s: impossible state of a slot: %w", what, ErrBroken)
	if r != nil {
		err = fmt.Errorf("%s: head %d: was %d, and the tail is %d: %w", what,
			atomic.LoadUint64(r.head), r.seen.Load(), r.tail.Load(), ErrBroken)
	}
	p.end(endBroken, err)
}

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
		var errs []error
		fds := []int{p.bell, p.bellWrite}
		for i := range p.lanes {
			fds = append(fds, p.lanes[i].read, p.lanes[i].write)
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
	EventsFull  uint64 `json:"events_full"` // found no room
	EventsLost  uint64 `json:"events_lost"` // for good
	Requests    uint64 `json:"requests"`
	Full        uint64 `json:"full"`        // requests that found no room
	Responses   uint64 `json:"responses"`   // that somebody waited for
	Late        uint64 `json:"late"`        // that nobody waited for any more
	Bogus       uint64 `json:"bogus"`       // that answer nothing, or with impossible lengths
	Outstanding int    `json:"outstanding"` // requests, now
	Waiting     int    `json:"waiting"`     // events and requests that the application has not taken
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
		Responses:  p.responded.Load(),
		Late:       p.late.Load(),
		Bogus:      p.bogus.Load(),
		Waiting:    p.eventRing.held() + p.requestRing.held(),
		Rung:       p.rung.Load(),
		Broken:     p.is(endBroken),
	}
	for i := range p.lanes {
		s.Outstanding += int(p.lanes[i].outstanding.Load())
	}
	return s
}
