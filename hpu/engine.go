// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/spin"
)

// The message engine: what happens to a packet of a context with messages.
//
// The segment goes to the table that has its message, which decides; handlers run
// in the order that the table's answers give; what a protocol wants answered is
// answered when the segment's HER has finished. With policy `message` a table
// belongs to a worker, because all packets of a message in flight come to one HPU:
// an open message holds its bucket. With other policies tables are shared by all
// workers, each behind a lock that is not held while handlers run.
//
// Everything that handlers are run for is a HER of some batch: packets from the
// rings; packets that were held until their message's header handler had run, or
// kept by a handler and released; and messages whose time is up, which are HERs
// without a packet. So the watchdog and the takeover know one case only.

// MessageConfig says how a context deals with messages.
type MessageConfig struct {
	mpq.Config
	Format    *matcher.Format // with a key and an EOM rule. Required
	Protocol  Protocol        // Optional: without, nothing is acknowledged
	Binder    Binder          // Optional: without, messages have the binding Default
	Default   spin.Binding
	State     int    // bytes of state memory of each message
	Initial   []byte // what it begins with, the rest 0; at most State bytes
	FirstSlot int    // of Message.Slot: others may have those before it
	Checksums Checksums
	// Shared: packets of a message may come to several HPUs at a time.
	Shared bool
}

// sharedTables is how many tables the workers share: the more, the less they wait
// for each other.
const sharedTables = 8

// messages is the message engine of a context.
type messages struct {
	cfg     MessageConfig
	queue   *mpq.Queue
	tables  []table   // one a worker; or shared
	waiting []waiting // by worker, which has it
	ending  bool      // guarded by Pool.mu: all messages are to end, no more will come

	mu       sync.Mutex
	hasWords atomic.Bool       // there are words
	words    map[int][4]uint64 // by slot, of host messages
	slots    []*Message        // by slot, nil if it was not used yet
	flushed  bool              // the context was stopped, its held packets are given back
}

// table is a part of a context's messages.
type table struct {
	*mpq.Table
	shared bool
	mu     sync.Mutex
}

func (t *table) lock() {
	if t.shared {
		t.mu.Lock()
	}
}

func (t *table) unlock() {
	if t.shared {
		t.mu.Unlock()
	}
}

func newMessages(cfg MessageConfig) (*messages, error) {
	f := cfg.Format
	switch {
	case f == nil:
		return nil, errors.New("no message format")
	case !f.Ends():
		return nil, fmt.Errorf("message format %s has no key, or no end of a message", f.Name)
	case cfg.State < 0 || cfg.State > 1<<20:
		return nil, fmt.Errorf("%d bytes of state for each message: want 0 to %d", cfg.State, 1<<20)
	case len(cfg.Initial) > cfg.State:
		return nil, fmt.Errorf("the initial state has %d bytes, the state of a message %d", len(cfg.Initial), cfg.State)
	case !cfg.Checksums.Valid():
		return nil, fmt.Errorf("%v: want %v", cfg.Checksums, checksums)
	}
	cfg.Words = len(f.Key)
	q, err := mpq.NewQueue(cfg.Config)
	if err != nil {
		return nil, err
	}
	return &messages{cfg: cfg, queue: q}, nil
}

// open makes the tables.
func (ms *messages) open(workers int) {
	n := workers
	if ms.cfg.Shared {
		n = sharedTables
	}
	ms.tables = make([]table, n)
	for i := range ms.tables {
		ms.tables[i].Table = ms.queue.NewTable(ms.cfg.Shared)
		ms.tables[i].shared = ms.cfg.Shared
	}
	ms.waiting = make([]waiting, workers)
}

// table returns the one for a message that came to a worker. (The program's hash
// will not do: with blocked-rr it is not the same for all packets of a message.)
func (ms *messages) table(w *worker, key *mpq.Key) *table {
	if !ms.cfg.Shared {
		return &ms.tables[w.id]
	}
	h := uint32(0)
	for _, v := range key {
		h = h*31 + v
	}
	return &ms.tables[h*0x9e3779b1>>29%sharedTables]
}

// message returns what the engine keeps for an entry, made when its slot is first
// used. The caller has the table.
func (ms *messages) message(c *Context, e *mpq.Entry) *Message {
	if e.User != nil {
		return e.User.(*Message)
	}
	m := &Message{entry: e, ctx: c, bucket: noBucket}
	if n := ms.cfg.State; n > 0 {
		m.state = unsafe.SliceData(make([]byte, n))
	}
	e.User = m
	ms.mu.Lock()
	for len(ms.slots) <= e.Slot() {
		ms.slots = append(ms.slots, nil)
	}
	ms.slots[e.Slot()] = m
	ms.mu.Unlock()
	return m
}

// adopt prepares for a message that begins. The caller has the table.
func (r *runner) adopt(t *table, m *Message) {
	ms, req := m.ctx.msgs, &r.her
	m.live = true
	m.table = t
	m.port = req.port
	m.binding = ms.cfg.Default
	m.dropped = 0
	m.bound, m.deposit, m.discard, m.pending, m.starved, m.asked, m.failed = false, false, false, false, false, false, false
	state := m.State()
	clear(state[copy(state, ms.cfg.Initial):])
	m.peer.learn(req.head)
	ms.setWords(m, req.trig)
	if !ms.cfg.Shared && m.ctx.buckets.Size > 0 {
		m.bucket = m.ctx.bucket(req.meta.Hash)
		r.pool.pin(m.ctx, m.bucket, 1)
	}
}

// setWords notes the words of a host message, whose trigger is t.
func (ms *messages) setWords(m *Message, t *triggered) {
	if t == nil && !ms.hasWords.Load() {
		return
	}
	ms.mu.Lock()
	defer ms.mu.Unlock()
	if t == nil {
		delete(ms.words, m.Slot())
		return
	}
	if ms.words == nil {
		ms.words = map[int][4]uint64{}
		ms.hasWords.Store(true)
	}
	ms.words[m.Slot()] = t.Words
}

// Words returns the words of the trigger that made the message; zero for others.
func (m *Message) Words() [4]uint64 {
	ms := m.ctx.msgs
	ms.mu.Lock()
	defer ms.mu.Unlock()
	return ms.words[m.Slot()]
}

// disown is the end of a message, but for its entry: of the hold on its bucket,
// and of packets that waited for it. The caller has the table, and t may be used.
func (r *runner) disown(t *table, m *Message) {
	m.live = false
	if m.waits != nil {
		m.waits.over.Store(true)
		m.waits = nil
	}
	if m.bucket != noBucket {
		r.pool.pin(m.ctx, m.bucket, -1)
		m.bucket = noBucket
	}
	for _, k := range m.takeHeld(t) {
		k.job = releaseJob
		r.w.jobs = append(r.w.jobs, k)
	}
}

// pin holds a bucket for an open message, or lets go of it: in such an order that
// a sweep in between never sees more users than there are pins.
func (p *Pool) pin(c *Context, bucket int32, n int) {
	pins := &c.pins[int(bucket)-c.buckets.Base]
	if n > 0 {
		pins.Add(int32(n))
	}
	atomic.AddUint64(&p.cfg.Buckets[bucket], uint64(n)<<32)
	if n < 0 {
		pins.Add(int32(n))
	}
}

// takeHeld takes the packets that are held for the message, from its table too. Of
// those that the table counts, flush may have taken some already. The caller has
// the table.
func (m *Message) takeHeld(t *table) []*Kept {
	for ; m.holds > 0; m.holds-- {
		t.Unhold(m.entry)
	}
	ms := m.ctx.msgs
	ms.mu.Lock()
	defer ms.mu.Unlock()
	held := m.held
	m.held = nil
	if held == nil {
		return nil
	}
	return *held
}

// segment runs the HER, a packet of a context with messages. Like all from which the
// code of a context is called, it returns false if the runner was abandoned, and
// must then touch nothing more.
func (r *runner) segment(c *Context) bool {
	req, ms := &r.her, c.msgs
	f := ms.cfg.Format
	end := req.size
	if f.Length != nil {
		n, _ := f.Length.Number(req.head)
		end = f.Length.From + int(n)
	}
	if len(req.head) < f.Header || end < f.Header || end > req.size {
		req.acc.Malformed++ // the program lets none through
		req.verdict = "malformed"
		return true
	}
	req.payload = f.Header
	req.seg = mpq.Segment{Offset: req.meta.Offset, Len: end - f.Header, EOM: req.EOM()}
	if ms.cfg.Checksums != VerifyNone && r.batch.hers[req.k].job == packetJob {
		switch s := req.verify(ms.cfg.Checksums == VerifyAll); {
		case s == sumWrong || s != sumRight && ms.cfg.Checksums == VerifyAll:
			req.acc.Corrupt++
			req.verdict = "corrupt"
			return true
		case s != sumRight:
			req.acc.Unverified++
		}
	}
	if ms.cfg.Protocol != nil {
		var ok bool
		if req.ask, ok = ms.cfg.Protocol.Inspect(req.head[:f.Header]); !ok {
			req.acc.Stray++
			req.verdict = "stray"
			return true
		}
	}
	return r.arrive(c)
}

// arrive gives the segment of the HER to its message.
func (r *runner) arrive(c *Context) bool {
	req, ms := &r.her, c.msgs
	t := ms.table(r.w, (*mpq.Key)(&req.meta.Key))
	t.lock()
	e, d, why := t.Arrive((*mpq.Key)(&req.meta.Key), req.seg, r.batch.base)
	if e == nil {
		var buf []byte
		req.verdict = "duplicate"
		if d == mpq.Again {
			buf = r.say(ms, req.ask, true, nil)
		} else {
			req.verdict = why.String()
			req.refused = true
		}
		t.unlock()
		if len(buf) > 0 {
			r.reply.to.learn(req.head)
			r.answer(&r.reply.to, buf)
		}
		return true
	}
	m := ms.message(c, e)
	if !m.live && d != mpq.Drop {
		r.adopt(t, m)
	}
	if m.port != req.port { // mostly it is: neighbours read this cache line
		m.port = req.port
	}
	req.msg = m
	switch d {
	case mpq.Drop:
		m.starved = m.starved || why == spin.DropMemory || why == spin.DropNoHeader
		req.verdict = why.String()
		req.refused = true
	case mpq.Hold:
		m.holds++
		req.verdict = "held"
		ms.mu.Lock()
		if !ms.flushed { // else nobody would ever give it back
			if m.held == nil {
				m.held = new([]*Kept)
			}
			*m.held = append(*m.held, req.hold())
		}
		ms.mu.Unlock()
		buf := r.say(ms, req.ask, false, e)
		r.reply.to = m.peer
		t.unlock()
		r.answerNew(&r.reply.to, buf)
		return true
	case mpq.Again, mpq.Wait:
		req.verdict = "duplicate"
		var buf []byte
		if !m.failed {
			buf = r.say(ms, req.ask, d == mpq.Again, e)
		}
		r.reply.to = m.peer
		t.unlock()
		r.answer(&r.reply.to, buf)
		return true
	case mpq.Start:
		t.unlock()
		return r.start(t, m)
	case mpq.Run:
		t.unlock()
		return r.payload(t, m)
	case mpq.Notify:
		m.ask, m.asked = req.ask, true
		res := m.waits.result
		t.unlock()
		return r.back() && r.notify(t, m, res)
	}
	t.unlock()
	return true
}

// start opens a message with its header packet.
func (r *runner) start(t *table, m *Message) bool {
	c := m.ctx
	ms, req := c.msgs, &r.her
	if ms.cfg.Binder != nil {
		o := r.call(call{kind: bindCall, msg: m})
		if o.end == givenUp {
			return false
		}
		if r.why != nil {
			req.acc.Unbound++
			req.refused = true
			req.verdict = "unbound"
			if o.end == returned {
				r.pool.emit(spin.MessageRefused, c, r.batch.port.hpu, r.why.Error)
			}
			t.lock()
			r.disown(t, m)
			t.Refuse(m.entry)
			t.unlock()
			return true
		}
		m.bound = true
	}
	var o outcome
	if c.handlers.Header != nil {
		if o = r.call(call{kind: headerCall}); o.end == givenUp {
			return false
		}
		m.pending = o.code&spin.Pending != 0
		o.code &^= spin.Pending
		req.acc.Headers++
	} else if !r.back() {
		return false
	}
	switch {
	case o.end == panicked || o.code != spin.Success && o.code != spin.Drop && o.code != spin.Proceed:
		if !r.fail(t, m, r.fault(o), false) {
			return false
		}
		t.lock()
		t.Finish(m.entry, req.seg, r.batch.base)
		t.unlock()
		return true
	case o.code == spin.Drop:
		m.discard = true
	case o.code == spin.Proceed || c.handlers.Payload == nil:
		m.deposit = true
	}
	t.lock()
	t.Opened(m.entry, r.batch.base)
	held := m.takeHeld(t)
	t.unlock()
	for _, k := range held {
		// On the HPU that it came to: with blocked-rr others of its virtual HPU
		// come there.
		if k.worker == r.w {
			r.w.jobs = append(r.w.jobs, k)
		} else {
			r.pool.giveBack(k)
		}
	}
	return r.payload(t, m)
}

// payload runs the payload handler, or what takes its place, for a segment that
// was claimed.
func (r *runner) payload(t *table, m *Message) bool {
	var o outcome
	switch {
	case m.discard:
		o = r.without(spin.Drop)
	case !m.deposit:
		o = r.call(call{kind: payloadCall})
	case m.binding.Window != nil:
		o = r.call(call{kind: depositCall})
	default:
		o = r.without(spin.Success)
	}
	return r.payloadReturned(t, m, o)
}

// payloadReturned is the rest of payload, when a handler has returned.
func (r *runner) payloadReturned(t *table, m *Message, o outcome) bool {
	req := &r.her
	if o.end == givenUp {
		return false
	}
	ok := o.end == returned && (o.code == spin.Success || o.code == spin.Drop)
	if !ok {
		if req.action == keep && req.kept != nil {
			req.kept.job = releaseJob // the header handler's: the segment finishes now
		}
		if !r.fail(t, m, r.fault(o), false) {
			return false
		}
	}
	if req.action == keep && ok {
		// Its HER finishes when it is released.
		req.kept.drop = o.code == spin.Drop
		return true
	}
	return r.finished(t, m, o.code == spin.Drop, ok)
}

// finished is the end of a HER of a message.
func (r *runner) finished(t *table, m *Message, drop, ok bool) bool {
	ms, req := m.ctx.msgs, &r.her
	t.lock()
	if drop {
		m.dropped += uint64(req.seg.Len)
	}
	if req.seg.EOM {
		m.ask, m.asked = req.ask, true
	}
	live := m.live // if not, Finish may give the slot away
	if t.Finish(m.entry, req.seg, r.batch.base) {
		res := m.sum(spin.Complete)
		t.unlock()
		return r.complete(t, m, res)
	}
	var buf []byte
	if ok && live {
		buf = r.say(ms, req.ask, !req.seg.EOM, m.entry)
		r.reply.to = m.peer // the message may end, and its slot be another's, before the answer is made
	}
	t.unlock()
	r.answer(&r.reply.to, buf)
	return true
}

// sum makes the result of a message. The caller has the table.
func (m *Message) sum(cause spin.Cause) spin.Result {
	r := spin.Result{Cause: cause, Dropped: m.dropped, Missing: m.entry.Missing(), FlowControl: m.starved}
	r.Length, _ = m.entry.Length()
	if r.Length == 0 {
		r.Length = m.entry.Processed() + r.Missing
	}
	return r
}

// complete ends a message of which nothing is missing, or nothing will come any
// more.
func (r *runner) complete(t *table, m *Message, res spin.Result) bool {
	if m.ctx.handlers.Completion == nil {
		return r.notify(t, m, res)
	}
	r.done.Task = r.her.Task
	r.done.Result = res
	o := r.call(call{kind: completionCall})
	if o.end != givenUp {
		r.her.acc.Completions++
	}
	return r.concluded(t, m, res, o)
}

// concluded is the rest of complete, when a handler has returned.
func (r *runner) concluded(t *table, m *Message, res spin.Result, o outcome) bool {
	if o.end == givenUp {
		return false
	}
	m.pending = m.pending || o.code&spin.Pending != 0
	if o.code &^= spin.Pending; o.end == panicked || o.code != spin.Success {
		return r.fail(t, m, r.fault(o), true)
	}
	if o.asked { // it continues when the application has answered
		return true
	}
	return r.notify(t, m, res)
}

// notify tells the application that a message has ended, and its sender. If the
// application has no room for that, it is tried again now and then; the sender is told
// so if it was a packet that brought the message here.
func (r *runner) notify(t *table, m *Message, res spin.Result) bool {
	req, ms := &r.her, m.ctx.msgs
	if res.Time == 0 { // not when it has to be told again
		res.Time = r.now()
	}
	if !r.event(m, spin.MessageEvent{Result: res}) {
		if res.Cause == spin.Complete {
			t.lock()
			if m.waits == nil {
				m.waits = &deferred{t: t, m: m, result: res}
				ms.waiting[r.w.id].add(m.waits, r.pool.now())
			}
			t.Defer(m.entry, r.batch.base)
			var buf []byte
			if r.batch.hers[req.k].job != notifyJob {
				buf = r.say(ms, m.ask, false, m.entry)
			}
			r.reply.to = m.peer
			t.unlock()
			r.answer(&r.reply.to, buf)
			return true
		}
		req.acc.EventsLost++ // a sender that is gone does not come again
	} else if q := &ms.waiting[r.w.id]; len(q.list) > 0 {
		q.hope(r.pool.now())
	}
	if !r.unbind(m, res) {
		return false
	}
	var own, eom []byte
	t.lock()
	if res.Cause == spin.Complete {
		if m.asked {
			eom = r.say(ms, m.ask, true, m.entry)
		}
		if len(req.all) > 0 && !req.seg.EOM && req.msg == m {
			own = ms.say(r.reply.own[:0], req.ask, true, m.entry)
		}
	}
	r.reply.to = m.peer
	r.disown(t, m)
	t.End(m.entry, r.batch.base)
	t.unlock()
	if len(eom) > 0 {
		r.answerNew(&r.reply.to, own) // such frames leave before the packet's own
		own = eom
	}
	r.answer(&r.reply.to, own)
	return true
}

// event gives an event to the application. False: there is no room.
func (r *runner) event(m *Message, e spin.MessageEvent) bool {
	if m.binding.Events == nil {
		return true
	}
	e.Context, e.Source, e.Number, e.Slot, e.User = m.ctx.name, m.Source(), m.Number(), m.Slot(), m.binding.User
	r.note = e // not on the heap
	return m.binding.Events.Post(&r.note)
}

// unbind ends the binding. Whatever Unbind does, the message has ended.
func (r *runner) unbind(m *Message, res spin.Result) bool {
	if !m.bound || m.pending {
		return true
	}
	m.bound = false
	r.unbound = res
	return r.call(call{kind: unbindCall, msg: m}).end != givenUp
}

// fail ends a message because of an error: no handler runs for it any more and
// nothing is acknowledged. Segments that run finish later. last says that none
// does, that of this HER included: its entry is gone on return.
func (r *runner) fail(t *table, m *Message, err error, last bool) bool {
	t.lock()
	if m.failed { // another HPU was first
		t.unlock()
		return true
	}
	m.failed = true
	res := m.sum(spin.Failed)
	if !last {
		// While the segment of this HER runs, the entry stays.
		r.disown(t, m)
		t.Fail(m.entry, r.batch.base)
	}
	t.unlock()
	res.Time = r.now()
	if !r.event(m, spin.MessageEvent{Result: res, Err: err}) {
		r.her.acc.EventsLost++
	}
	if !r.unbind(m, res) {
		return false
	}
	if last {
		t.lock()
		r.disown(t, m)
		t.Fail(m.entry, r.batch.base)
		t.unlock()
	}
	return true
}
