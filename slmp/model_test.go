// SPDX-License-Identifier: Apache-2.0

package slmp_test

import (
	"container/heap"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xspin/xspin/handlers/handlerstest"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/packet"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// The model test: senders, and the message engine of a NIC that receives, on a random
// network in simulated time. Everything that happens follows from the seed.

var seeds = flag.Uint64("seeds", 0, "how many seeds the model tests run: 64; 32 with -race or -short")

const (
	usec = int64(time.Microsecond)
	msec = int64(time.Millisecond)
	sec  = int64(time.Second)
)

// A world is a simulation.
type world struct {
	*testing.T
	*rand.Rand
	now    int64
	events events
	count  int

	there, back link // to the receiver, from it
	senders     []*sender
	receivers   []*receiver // the last one is alive
	receive     func(from netip.AddrPort, b []byte)
	c           mpq.Config
	behave      behaviour
}

// behaviour of handlers and of the application.
type behaviour struct {
	pending  float64 // how many calls finish later
	slow     int64   // at most so much
	fail     float64 // how many calls fail
	refuse   float64 // how many messages have no place, at first
	room     int     // in the event queue
	readTime int64   // of an event
}

type event struct {
	at  int64
	seq int
	f   func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].seq < e[j].seq
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	n := len(*e) - 1
	x := (*e)[n]
	(*e)[n] = event{}
	*e = (*e)[:n]
	return x
}

func (w *world) at(t int64, f func()) {
	w.count++
	heap.Push(&w.events, event{max(t, w.now), w.count, f})
}

func (w *world) chance(p float64) bool { return p > 0 && w.Float64() < p }

// run lets time pass until done says so, or nothing happens any more.
func (w *world) run(limit int64, done func() bool) {
	w.Helper()
	for n := 0; len(w.events) > 0 && !done(); n++ {
		e := heap.Pop(&w.events).(event)
		if e.at > limit || n > 5_000_000 {
			w.Fatalf("no end after %v and %d events: %s", time.Duration(w.now), n, w.state())
		}
		w.now = e.at
		e.f()
		for _, x := range w.senders {
			if err := x.s.Bounds(len(x.size), x.wide); err != nil {
				w.Fatalf("bounds: sender %v: %v", x.addr, err)
			}
		}
	}
}

func (w *world) state() (s string) {
	for _, x := range w.senders {
		s += fmt.Sprintf("\nsender %v: %+v", x.addr, x.s.Stats())
	}
	for _, x := range w.receivers {
		s += fmt.Sprintf("\nreceiver: %+v", x.n.MessageStats())
	}
	return s
}

// A link loses, doubles, delays, reorders and corrupts datagrams.
type link struct {
	loss, double, reorder, corrupt float64
	delay, jitter                  int64
	perByte                        int64 // ns; 0: no limit
	queue                          int64 // ns of waiting at most
	free                           int64
	deadFrom, deadTo               int64
	corrupted                      int
}

// sum is the checksum of UDP.
func sum(b []byte) (s uint32) {
	for i := range b {
		s += uint32(b[i]) << (8 * (^i & 1))
	}
	for s>>16 != 0 {
		s = s&0xffff + s>>16
	}
	return s
}

func (w *world) send(l *link, b []byte, deliver func([]byte)) {
	if w.chance(l.loss) || w.now >= l.deadFrom && w.now < l.deadTo {
		return
	}
	if l.perByte > 0 {
		l.free = max(l.free, w.now)
		if l.free-w.now > l.queue {
			return
		}
		l.free += int64(len(b)) * l.perByte
	}
	copies := 1
	if w.chance(l.double) {
		copies++
	}
	for range copies {
		d := slices.Clone(b)
		check := sum(d)
		if w.chance(l.corrupt) {
			d[w.IntN(len(d))] ^= 1 << w.IntN(8)
			l.corrupted++
		}
		t := max(l.free, w.now) + l.delay
		if l.jitter > 0 {
			t += w.Int64N(l.jitter)
		}
		if w.chance(l.reorder) {
			t += w.Int64N(l.delay + 1000*usec)
		}
		w.at(t, func() {
			if sum(d) == check {
				deliver(d)
			}
		})
	}
}

// content is what is at a place of a message.
func content(id uint32, at uint64) byte { return byte(at) ^ byte(at>>8)*31 ^ byte(id)*7 }

// A sender drives a Sender.
type sender struct {
	w    *world
	c    slmp.SenderConfig
	s    *slmp.Sender
	addr netip.AddrPort
	wake int64
	dead bool
	wide int // segments of the largest window that it has had

	size map[uint32]uint64 // of messages
	open int
	errs map[uint32]error // of those that are over
}

func (w *world) newSender(c slmp.SenderConfig) *sender {
	w.Helper()
	s, err := slmp.NewSender(c)
	if err != nil {
		w.Fatal(err)
	}
	x := &sender{w: w, c: c, s: s, size: map[uint32]uint64{}, errs: map[uint32]error{}}
	x.addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(2 + len(w.senders)/2)}), uint16(1000+len(w.senders)))
	w.senders = append(w.senders, x)
	return x
}

// message sends a message, from time t on, all of it at once or as it comes.
func (x *sender) message(id uint32, size uint64, t int64, slowly bool) {
	x.size[id] = size
	x.open++
	w := x.w
	w.at(t, func() {
		o, err := x.s.Open(id)
		if err != nil {
			w.Fatal(err)
		}
		if !slowly {
			o.Supply(size, true)
			x.pump()
			return
		}
		var more func()
		n := uint64(0)
		more = func() {
			if x.dead {
				return
			}
			n = min(n+w.Uint64N(size/4+2), size)
			last := n == size && w.chance(0.5)
			o.Supply(n, last)
			x.pump()
			if !last {
				w.at(w.now+w.Int64N(5*msec), more)
			}
		}
		more()
	})
}

// pump sends what is to be sent.
func (x *sender) pump() {
	if x.dead {
		return
	}
	w := x.w
	x.wide = max(x.wide, x.s.Stats().Window)
	var out [16]slmp.Outbound
	for {
		n := x.s.Next(out[:], w.now)
		if n == 0 {
			break
		}
		for _, o := range out[:n] {
			b := make([]byte, slmp.HeaderLen+o.Len)
			o.Header.Put(b)
			for i := range b[slmp.HeaderLen:] {
				b[slmp.HeaderLen+i] = content(o.Header.ID, uint64(o.Header.Offset)+uint64(i))
			}
			w.send(&w.there, b, func(b []byte) { w.receive(x.addr, b) })
		}
	}
	for o := x.s.Finished(); o != nil; o = x.s.Finished() {
		x.errs[o.ID()] = o.Err()
		x.open--
		x.s.Recycle(o)
	}
	d := x.s.Deadline()
	if d != 0 && d <= w.now {
		w.Fatalf("%v: nothing to send at %d, but a deadline at %d", x.addr, w.now, d)
	}
	if d != 0 && (x.wake == 0 || d < x.wake || x.wake <= w.now) {
		x.wake = d
		w.at(d, func() {
			if x.wake <= w.now {
				x.wake = 0
			}
			x.pump()
		})
	}
}

func (x *sender) acknowledge(b []byte) {
	if !x.dead {
		_ = x.s.Acknowledge(b, x.w.now)
		x.pump()
	}
}

// name is a message.
type name struct {
	from netip.AddrPort
	id   uint32
}

// A record is what handlers have seen of a message.
type record struct {
	name
	opened, failed bool
	completing     bool
	completed      bool
	waits          bool // complete, and there was no room for its event
	queued         bool // its event, of a complete message
	told           bool // its event, of another
	running        int
	claimed        marks
	done           marks
	first          int // length of the header segment
	cause          spin.Cause
	missing        uint64
	size           uint64
	ours           bool  // size is that of a message of a sender
	seen           int64 // when a datagram of it came
	old            bool  // it may be forgotten
	over           int   // receiver.looks when it failed or was abandoned
}

func (r *record) String() string {
	return fmt.Sprintf("%v %d: opened %v, failed %v, completing %v, completed %v (%v, missing %d), queued %v, told %v, %d run, %d bytes done, header of %d, size %d (%v)",
		r.from, r.id, r.opened, r.failed, r.completing, r.completed, r.cause, r.missing, r.queued, r.told, r.running, r.done.count(), r.first, r.size, r.ours)
}

// marks are set on bytes of a message.
type marks map[uint64]*[1024]bool

func (m marks) set(at uint64) {
	p := m[at/1024]
	if p == nil {
		p = new([1024]bool)
		m[at/1024] = p
	}
	p[at%1024] = true
}

// on returns how many of n bytes from at are set.
func (m marks) on(at, n uint64) (c uint64) {
	for end := at + n; at < end; {
		stop := min(end, at/1024*1024+1024)
		p := m[at/1024]
		for ; p != nil && at < stop; at++ {
			if p[at%1024] {
				c++
			}
		}
		at = stop
	}
	return c
}

func (m marks) count() (n uint64) {
	for i := range m {
		n += m.on(i*1024, 1024)
	}
	return n
}

// A receiver drives a NIC, and checks what its message engine does. Handlers run while
// a method of the NIC does, on another goroutine: there is no other time that passes.
type receiver struct {
	w       *world
	n       *handlerstest.NIC
	now     atomic.Int64 // as the NIC sees it
	records map[name]*record
	all     []*record
	slots   map[int]*record // of open messages whose header handler has run
	kept    map[*hpu.Kept]bool
	looks   int  // that the NIC has had at the time
	looking bool // it will have another
	events  int  // in the queue
	stopped bool
}

const (
	lookEvery = 100 * msec
	mostKept  = 128 // half of the frames of an handlerstest.NIC
)

func (w *world) newReceiver() *receiver {
	w.Helper()
	x := &receiver{w: w, records: map[name]*record{}, slots: map[int]*record{}, kept: map[*hpu.Kept]bool{}}
	x.now.Store(w.now)
	x.n = handlerstest.New(w.T, handlerstest.Config{
		Handlers: hpu.Handlers{Header: whileAlive(x, x.header), Payload: whileAlive(x, x.payload), Completion: whileAlive(x, x.completion)},
		Rulesets: []matcher.Ruleset{matcher.SLMP()}, Binder: x, Limits: w.c, Queue: true, Clock: x.now.Load,
	})
	w.receivers = append(w.receivers, x)
	w.receive = x.receive
	return x
}

// whileAlive makes a handler that does nothing more when the receiver has stopped.
func whileAlive[T any](x *receiver, f func(T) spin.Code) func(T) spin.Code {
	return func(h T) spin.Code {
		if x.stopped {
			return spin.Success
		}
		return f(h)
	}
}

// stop is the end of a receiver: nobody hears of what is open.
func (x *receiver) stop() {
	x.stopped = true
	for k := range x.kept {
		k.Release()
	}
	x.n.Detach()
}

func (x *receiver) receive(from netip.AddrPort, b []byte) {
	if h, err := slmp.ParseHeader(b); err == nil {
		if r := x.records[name{from, h.ID}]; r != nil {
			over := r.failed || r.queued || r.told || x.w.c.Incomplete == mpq.Discard
			r.old = r.old || over && x.w.now-r.seen >= int64(spin.DefaultRemember)
			r.seen = x.w.now
		}
	}
	frame := handlerstest.UDP(from, handlerstest.Here(slmp.Port), b)
	x.do(func() *handlerstest.Outcome { return x.n.Packet(frame) })
}

// do has the NIC do something now, and look at the time.
func (x *receiver) do(f func() *handlerstest.Outcome) {
	w := x.w
	w.Helper()
	if x.stopped {
		return
	}
	x.looks++
	x.now.Store(w.now)
	out := f()
	for _, f := range out.Faults {
		if f.Kind != spin.HandlerFailed && f.Kind != spin.MessageRefused {
			w.Errorf("%+v", f)
		}
	}
	if w.Failed() { // Fatal is not for handlers
		w.FailNow()
	}
	for _, frame := range out.Sent {
		x.sent(frame)
	}
	s := x.n.MessageStats()
	if s.Open > w.c.Messages || s.HeldNow > max(w.c.Held, 0) || s.Memory > w.c.Memory {
		w.Fatalf("bounds: %+v", s)
	}
	if s.Open > 0 && !x.looking {
		x.looking = true
		w.at(w.now+lookEvery, func() {
			x.looking = false
			x.do(x.n.Settle)
		})
	}
}

// later does something after what a handler may take.
func (x *receiver) later(f func()) {
	w := x.w
	w.at(w.now+w.Int64N(w.behave.slow), func() {
		if !x.stopped {
			f()
			x.do(x.n.Settle)
		}
	})
}

func (x *receiver) size(n name) (uint64, bool) {
	for _, s := range x.w.senders {
		if s.addr == n.from {
			v, ok := s.size[n.id]
			return v, ok
		}
	}
	return 0, false
}

// Bind implements hpu.Binder.
func (x *receiver) Bind(m *hpu.Message) (spin.Binding, error) {
	if r := x.slots[m.Slot()]; r != nil {
		x.w.Errorf("slot %d: %v %d begins while it is %v's", m.Slot(), m.Source(), m.Number(), r)
	}
	if x.w.chance(x.w.behave.refuse) {
		return spin.Binding{}, errors.New("no place")
	}
	return spin.Binding{Events: x}, nil
}

// Unbind implements hpu.Binder.
func (x *receiver) Unbind(m *hpu.Message, _ *spin.Result) { delete(x.slots, m.Slot()) }

func (x *receiver) header(h *hpu.HER) spin.Code {
	w, m := x.w, h.Message()
	n := name{m.Source(), m.Number()}
	if old := x.records[n]; old != nil {
		switch {
		case old.old && old.failed:
			return spin.Fail
		case old.ours || !old.old:
			w.Errorf("begins twice: %v", old)
		}
	}
	if h.Offset() != 0 {
		w.Errorf("%v: header handler with offset %d", n, h.Offset())
	}
	r := &record{name: n, first: h.PayloadLen(), claimed: marks{}, done: marks{}}
	r.size, r.ours = x.size(n)
	x.records[n] = r
	x.all = append(x.all, r)
	x.slots[m.Slot()] = r
	if w.chance(w.behave.fail) {
		r.failed, r.over = true, x.looks
		return spin.Fail
	}
	r.opened = true
	return spin.Success
}

func (x *receiver) payload(h *hpu.HER) spin.Code {
	w := x.w
	r := x.slots[h.Message().Slot()]
	s := mpq.Segment{Offset: h.Offset(), Len: h.PayloadLen(), EOM: h.EOM()}
	switch {
	case !r.opened:
		w.Errorf("%v: payload handler before the header handler has returned: %+v", r.name, s)
	case r.failed || r.completing:
		w.Errorf("%v: payload handler after the end: %+v", r.name, s)
	case r.ours && s.End() > r.size, r.ours && s.EOM && s.End() != r.size:
		w.Errorf("%v: %+v of a message of %d bytes", r.name, s, r.size)
	}
	if n := r.claimed.on(uint64(s.Offset), uint64(s.Len)); n > 0 {
		w.Errorf("%v: %d bytes of %+v are delivered twice", r.name, n, s)
	}
	at := uint64(s.Offset)
	for b := range h.Payload() {
		for _, b := range b {
			r.claimed.set(at)
			if r.ours && b != content(r.id, at) {
				w.Errorf("%v: byte %d is wrong", r.name, at)
			}
			at++
		}
	}
	if at != s.End() {
		w.Errorf("%v: %+v with %d bytes", r.name, s, at-uint64(s.Offset))
	}
	if w.chance(w.behave.fail) {
		r.failed, r.over = true, x.looks
		return spin.Fail
	}
	finish := func() {
		r.running--
		for i := range s.Len {
			r.done.set(uint64(s.Offset) + uint64(i))
		}
	}
	r.running++
	if len(x.kept) == mostKept || !w.chance(w.behave.pending) {
		finish()
		return spin.Success
	}
	k, err := h.Keep()
	if err != nil {
		w.Error(err)
	}
	x.kept[k] = true
	x.later(func() {
		delete(x.kept, k)
		finish()
		k.Release()
	})
	return spin.Success
}

func (x *receiver) completion(c *hpu.Completion) spin.Code {
	w := x.w
	r := x.slots[c.Message().Slot()]
	n := r.done.count()
	_, known := c.Message().Length()
	switch {
	case r.completing || r.failed || !r.opened:
		w.Errorf("%v: completed twice, or after an error: %+v", r.name, r)
	case r.running > 0:
		w.Errorf("%v: completed while %d payload handlers run", r.name, r.running)
	case c.Length-c.Missing != n:
		w.Errorf("%v: %+v, but %d bytes were processed", r.name, c.Result, n)
	case c.Cause == spin.Complete && (c.Missing != 0 || r.ours && c.Length != r.size):
		w.Errorf("%v: %+v, want %d bytes", r.name, c.Result, r.size)
	case c.Cause != spin.Complete && r.ours && c.Missing == 0 && c.Length == r.size && r.size > 0 && known:
		w.Errorf("%v: %+v of a complete message", r.name, c.Result)
	}
	r.completing, r.cause, r.missing = true, c.Cause, c.Missing
	code := spin.Success
	if w.chance(w.behave.fail) {
		code = spin.Fail
	}
	finish := func() spin.Code {
		r.failed, r.completed, r.over = code != spin.Success, code == spin.Success, x.looks
		return code
	}
	if !w.chance(w.behave.pending) {
		return finish()
	}
	// It goes on when the application has answered, all that wait at once.
	if err := c.AskThen(0, nil, func(*hpu.Completion, *hpu.Reply) spin.Code { return finish() }); err != nil {
		return finish()
	}
	x.later(func() {
		x.n.Answer(func(handlerstest.Request) handlerstest.Answer { return handlerstest.Answer{} })
		x.do(x.n.Settle)
		x.n.Answer(nil)
	})
	return spin.Success
}

// Post implements spin.EventSink.
func (x *receiver) Post(e *spin.MessageEvent) bool {
	w := x.w
	r := x.slots[e.Slot]
	if x.stopped || r == nil { // began again when it was forgotten that it had failed
		return true
	}
	switch {
	case r.queued || r.told:
		w.Errorf("%v: a second event: %+v", r.name, e)
	case e.Cause == spin.Failed && !r.failed && !r.waits, e.Cause != spin.Failed && !r.completed:
		w.Errorf("%v: event %+v before its time: %+v", r.name, e, r)
	}
	if e.Cause == spin.Failed && !r.failed {
		r.failed, r.over = true, x.looks
	}
	if x.events == w.behave.room {
		r.waits = e.Cause == spin.Complete
		r.told = !r.waits // it is lost
		return false
	}
	x.events++
	w.at(w.now+1+w.Int64N(w.behave.readTime), func() {
		x.events--
		if w.chance(0.5) {
			x.do(x.n.Settle)
		}
	})
	r.queued = e.Cause == spin.Complete
	r.told = !r.queued
	return true
}

// sent checks what an acknowledgement says, and sends it.
func (x *receiver) sent(frame []byte) {
	w := x.w
	hdr := packet.Parse(frame, len(frame))
	if hdr.UDP == nil || !hdr.Intact() {
		w.Fatalf("sent: no intact datagram: %x", frame)
	}
	to := netip.AddrPortFrom(netip.AddrFrom4(hdr.IPv4.Dst()), hdr.UDP.DstPort())
	b := frame[hdr.Payload:][:hdr.PayloadLen]
	a, err := slmp.ParseAck(b)
	if err != nil {
		w.Fatal(err)
	}
	n := name{to, a.ID}
	r := x.records[n]
	var from *sender
	for _, s := range w.senders {
		if s.addr == to {
			from = s
		}
	}
	if a.Cumulative && from != nil && from.c.Plain {
		w.Fatalf("%v: %+v, but it was not offered", n, a)
	}
	bad := func(what string) {
		w.Helper()
		w.Fatalf("%v: acknowledged: %s: %+v; %+v", n, what, a, r)
	}
	switch {
	case r == nil && (!a.Wait || a.End != 0 || a.Bitmap[0] != 0):
		bad("a message that has not begun")
	case r == nil, r.old && a.Wait && a.End == 0 && a.Bitmap[0] == 0:
	case r.failed && r.over != x.looks: // else it may have been acknowledged first
		bad("a message that has failed")
	case r.completed && r.cause != spin.Complete && r.over != x.looks:
		bad("an abandoned message")
	case r.queued:
		// All of it may be.
	default:
		isDone := func(at, n uint64) bool { return r.done.on(at, n) == n }
		length := uint64(r.first)
		eom := false
		if r.ours {
			length = min(length, r.size-min(r.size, uint64(a.Offset)))
			eom = uint64(a.Offset)+length == r.size && (uint64(a.Offset)%uint64(max(r.first, 1)) == 0)
		} else {
			length = 1 // its cuts are not known
		}
		if !a.Wait && r.ours && eom {
			bad("EOM of a message whose event is not queued")
		}
		if !a.Wait && r.ours && !isDone(uint64(a.Offset), length) {
			bad("a segment that is not processed")
		}
		if a.Cumulative {
			if !isDone(0, uint64(a.End)) {
				bad("end")
			}
			for i := range len(a.Bitmap) * 64 {
				at := uint64(a.End) + uint64(i+1)*uint64(r.first)
				if a.Bitmap[i/64]>>(i%64)&1 == 0 {
					continue
				}
				l := uint64(r.first)
				if r.ours {
					l = min(l, r.size-min(r.size, at))
				} else {
					l = 1
				}
				if l == 0 || !isDone(at, l) {
					bad(fmt.Sprintf("bit %d", i))
				}
			}
		}
	}
	if from != nil {
		w.send(&w.back, slices.Clone(b), from.acknowledge)
	}
}

// newWorld makes a random one.
func newWorld(t *testing.T, seed uint64) *world {
	w := &world{T: t, Rand: rand.New(rand.NewPCG(seed, 42)), now: 1}
	pick := func(l ...float64) float64 { return l[w.IntN(len(l))] }
	net := func() link {
		l := link{
			loss: pick(0, 0, 0.01, 0.05, 0.2), double: pick(0, 0, 0.02, 0.2), reorder: pick(0, 0.03, 0.3),
			corrupt: pick(0, 0, 0.001, 0.05),
			delay:   int64(pick(10, 100, 2000, 20000)) * usec, jitter: int64(pick(0, 10, 500, 3000)) * usec,
		}
		if w.IntN(4) == 0 {
			l.perByte, l.queue = int64(pick(8, 80, 800)), int64(pick(1, 10, 50))*msec
		}
		if w.IntN(8) == 0 {
			l.deadFrom = w.Int64N(100 * msec)
			l.deadTo = l.deadFrom + w.Int64N(500*msec)
		}
		return l
	}
	w.there, w.back = net(), net()
	w.behave = behaviour{
		pending: pick(0, 0.1, 0.5, 1), slow: int64(pick(10, 100, 1000, 20000)) * usec,
		fail: pick(0, 0, 0, 0, 0.001, 0.02), refuse: pick(0, 0, 0, 0.3),
		room: int(pick(1, 4, 1000)), readTime: int64(pick(1, 100, 50000)) * usec,
	}
	w.c = mpq.Config{
		Messages: int(pick(2, 16, 4096)), Held: int(pick(-1, 4, 64)), Memory: int(pick(256, 64<<10, 16<<20)),
	}
	return w
}

// config makes a random sender's.
func (w *world) config() slmp.SenderConfig {
	pick := func(l ...int) int { return l[w.IntN(len(l))] }
	c := slmp.SenderConfig{
		Payload: pick(1, 7, 64, 500, 1408, 1462), Window: pick(0, 0, 1, 4, 16, 100, 1000), Plain: w.IntN(4) == 0,
		Retries: 40, // with so much loss in a row
	}
	if w.there.loss <= 0.05 && w.back.loss <= 0.05 && w.IntN(2) == 0 {
		c.Retries = 0 // the default
	}
	if w.IntN(8) == 0 {
		c.Gap = time.Duration(w.Int64N(200 * usec))
	}
	return c
}

// length makes a random message's length.
func (w *world) length(payload int) uint64 {
	p := uint64(payload)
	return min(200_000, []uint64{0, 1, p - 1, p, p + 1, 2 * p, w.Uint64N(5*p + 1), w.Uint64N(60*p + 1), w.Uint64N(600*p + 1)}[w.IntN(9)])
}

// settle waits until the receiver has nothing to do with anything any more, and
// checks that nothing is left.
func (w *world) settle() {
	w.Helper()
	x := w.receivers[len(w.receivers)-1]
	for range 20 {
		w.at(w.now+5*sec, func() { x.do(x.n.Settle) })
		end := w.now + 5*sec
		w.run(w.now+1000*sec, func() bool { return w.now >= end })
	}
	s := x.n.MessageStats()
	if s.Open != 0 || s.HeldNow != 0 || s.Memory != 0 {
		w.Fatalf("left in the receiver: %+v", s)
	}
	for _, r := range x.all {
		if r.running != 0 || r.opened && !r.failed && !r.completed && w.c.Incomplete != mpq.Discard {
			w.Fatalf("left: %+v", r)
		}
	}
	for _, x := range w.senders {
		if s := x.s.Stats(); !x.dead && (s.Open != 0 || s.InFlight != 0) {
			w.Fatalf("left in a sender: %+v", s)
		}
	}
}

// each runs a test for many seeds, or that part of them: each by itself with
// go test ./slmp -run 'TestModel$/seed=17$'.
func each(t *testing.T, part uint64, f func(t *testing.T, seed uint64)) {
	t.Helper()
	n := *seeds
	if n == 0 {
		n = 64 * uint64(testenv.Soak())
		if testenv.Race || testing.Short() {
			n = 32
		}
	}
	for s := uint64(1); s <= max(n/part, 1) && !t.Failed(); s++ {
		t.Run(fmt.Sprintf("seed=%d", s), func(t *testing.T) { f(t, s) })
	}
}

// Reliable senders on bad networks: all that does not fail arrives, and its sender
// says so.
func TestModel(t *testing.T) {
	var total slmp.SenderStats
	causes := map[string]int{}
	each(t, 1, func(t *testing.T, seed uint64) {
		w := newWorld(t, seed)
		w.newReceiver()
		for range 1 + w.IntN(3) {
			x := w.newSender(w.config())
			for id := range uint32(1 + w.IntN(6)) { // the same ids, from all senders
				x.message(id, w.length(x.c.Payload), w.Int64N(20*msec), w.IntN(5) == 0)
			}
		}
		w.run(600*sec, func() bool {
			for _, x := range w.senders {
				if x.open > 0 {
					return false
				}
			}
			return true
		})
		for _, x := range w.senders {
			st := x.s.Stats()
			total.Segments += st.Segments
			total.Retransmitted += st.Retransmitted
			for id, err := range x.errs {
				r := w.receivers[0].records[name{x.addr, id}]
				switch {
				case err == nil && (r == nil || !r.queued):
					t.Fatalf("%v %d: success, but %+v", x.addr, id, r)
				case err != nil && (r == nil || !r.failed):
					t.Fatalf("%v %d: %v; %v%s", x.addr, id, err, r, w.state())
				case err != nil:
					causes[errors.Unwrap(err).Error()]++
				default:
					causes["success"]++
				}
			}
		}
		w.settle()
	})
	t.Logf("%d segments, %d of them again; %v", total.Segments, total.Retransmitted, causes)
}

// all reports whether no message is open any more.
func (w *world) all() bool {
	return !slices.ContainsFunc(w.senders, func(x *sender) bool { return x.open > 0 && !x.dead })
}

// delivered reports whether some receiver has put the event of a complete message
// in the queue.
func (w *world) delivered(n name) bool {
	return slices.ContainsFunc(w.receivers, func(x *receiver) bool { r := x.records[n]; return r != nil && r.queued })
}

// A receiver that restarts knows nothing: the message is delivered to the old one or
// to the new one, or its sender gets an error.
func TestModelRestart(t *testing.T) {
	causes := map[string]int{}
	each(t, 2, func(t *testing.T, seed uint64) {
		w := newWorld(t, seed)
		w.behave.fail = 0
		w.newReceiver()
		for range 1 + w.IntN(2) {
			x := w.newSender(w.config())
			for id := range uint32(1 + w.IntN(3)) {
				x.message(id, w.length(x.c.Payload), w.Int64N(20*msec), w.IntN(5) == 0)
			}
		}
		for range 1 + w.IntN(2) {
			w.at(w.Int64N(100*msec), func() {
				w.receivers[len(w.receivers)-1].stop()
				w.newReceiver()
			})
		}
		w.run(600*sec, w.all)
		for _, x := range w.senders {
			for id, err := range x.errs {
				switch n := (name{x.addr, id}); {
				case err == nil && !w.delivered(n):
					t.Fatalf("%v: success, but nobody has received it", n)
				case err == nil:
					causes["success"]++
				case !errors.Is(err, slmp.ErrRestarted) && !errors.Is(err, slmp.ErrSilent):
					t.Fatalf("%v: %v", n, err)
				default:
					causes[errors.Unwrap(err).Error()]++
				}
			}
		}
		w.settle()
	})
	t.Log(causes)
}

// Senders that die leave nothing behind: what they had begun is completed with what
// is missing.
func TestModelDeath(t *testing.T) {
	causes := map[spin.Cause]int{}
	each(t, 2, func(t *testing.T, seed uint64) {
		w := newWorld(t, seed)
		w.c.Timeout = time.Duration(1+w.IntN(3)) * time.Second
		w.behave.room = 1000
		w.newReceiver()
		for range 2 + w.IntN(2) {
			x := w.newSender(w.config())
			for id := range uint32(1 + w.IntN(3)) {
				x.message(id, w.length(x.c.Payload), w.Int64N(20*msec), w.IntN(5) == 0)
			}
			if w.IntN(2) == 0 {
				w.at(w.Int64N(100*msec), func() { x.dead = true })
			}
		}
		w.run(600*sec, w.all)
		w.settle()
		for _, r := range w.receivers[0].all {
			causes[r.cause]++
			if r.opened && !r.failed && !r.queued && !r.told {
				t.Fatalf("%v ended without an event: %+v", r.name, r)
			}
			if r.cause == spin.TimedOut && r.completed && r.missing == 0 && r.done.count() == r.size && r.size > uint64(r.first) {
				// All but an EOM without bytes can be there.
				t.Fatalf("%v: nothing is missing: %+v", r.name, r)
			}
		}
	})
	t.Log(causes)
}

// What senders without retransmission lose is lost; whoever asks learns of it.
func TestModelModes(t *testing.T) {
	outcomes := map[string]int{}
	each(t, 2, func(t *testing.T, seed uint64) {
		w := newWorld(t, seed)
		w.c.Incomplete = mpq.Incomplete(w.IntN(3))
		w.c.Linger = time.Duration(w.Int64N(50 * msec))
		w.behave.fail, w.behave.refuse = 0, 0
		w.newReceiver()
		for range 1 + w.IntN(2) {
			c := w.config()
			c.Mode = slmp.FirstLast + slmp.Mode(w.IntN(2))
			c.Retries = 8
			x := w.newSender(c)
			for id := range uint32(1 + w.IntN(3)) {
				x.message(id, w.length(c.Payload), w.Int64N(20*msec), w.IntN(5) == 0)
			}
		}
		w.run(600*sec, w.all)
		w.settle()
		for _, x := range w.senders {
			for id, err := range x.errs {
				n := name{x.addr, id}
				switch {
				case err == nil && x.c.Mode == slmp.FirstLast && !w.delivered(n):
					t.Fatalf("%v: success, but %+v", n, w.receivers[0].records[n])
				case err == nil:
					outcomes[fmt.Sprint(x.c.Mode, ": success")]++
				default:
					outcomes[fmt.Sprint(x.c.Mode, ": ", errors.Unwrap(err))]++
				}
			}
		}
		for _, r := range w.receivers[0].all {
			switch {
			case w.c.Incomplete == mpq.Discard && r.completed && r.cause != spin.Complete:
				t.Fatalf("%v: completed though incomplete", r.name)
			case w.c.Incomplete != mpq.Discard && r.opened && !r.completed:
				t.Fatalf("%v: not completed: %+v", r.name, r)
			case r.completed:
				outcomes[fmt.Sprint("receiver: ", r.cause)]++
			}
		}
	})
	t.Log(outcomes)
}

// Somebody sends nonsense, of all kinds, and begins messages from addresses that do
// not exist. The others do not notice, unless there is no room for them.
func TestModelHostile(t *testing.T) {
	each(t, 2, func(t *testing.T, seed uint64) {
		w := newWorld(t, seed)
		w.c.Messages, w.c.Memory, w.c.Held = 4096, 16<<20, 64
		w.behave.fail, w.behave.refuse, w.behave.room = 0, 0, 1000
		x := w.newReceiver()
		for range 1 + w.IntN(2) {
			s := w.newSender(w.config())
			for id := range uint32(1 + w.IntN(3)) {
				s.message(id, w.length(s.c.Payload), w.Int64N(20*msec), w.IntN(5) == 0)
			}
		}
		size := uint32(1 + w.IntN(30))
		var nonsense func()
		n := 0
		nonsense = func() {
			from := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 9, 9, 9}), 7)
			h := slmp.Header{Flags: slmp.Flags(w.Uint32()) &^ slmp.ACK, ID: w.Uint32N(3), Offset: w.Uint32N(50) * size}
			b := make([]byte, slmp.HeaderLen+int(size))
			switch w.IntN(8) {
			case 0:
				b = b[:w.IntN(len(b)+1)]
			case 1:
				h.Offset = w.Uint32N(1500)
			case 2:
				h.Offset = w.Uint32()
			case 3:
				h.Flags |= slmp.ACK
			case 4:
				h.Offset = 0
			case 5, 6:
				h.Flags &^= slmp.EOM
			case 7: // an address of its own
				from = netip.AddrPortFrom(netip.AddrFrom4([4]byte{1, 2, byte(w.Uint32()), byte(w.Uint32())}), uint16(w.Uint32()))
			}
			if len(b) >= slmp.HeaderLen {
				h.Put(b)
			}
			x.receive(from, b)
			if n++; n < 600 {
				w.at(w.now+w.Int64N(100*usec), nonsense)
			}
		}
		w.at(0, nonsense)
		w.run(600*sec, w.all)
		for _, x := range w.senders {
			for id, err := range x.errs {
				if err != nil || !w.delivered(name{x.addr, id}) {
					t.Fatalf("%v %d: %v%s", x.addr, id, err, w.state())
				}
			}
		}
		w.run(w.now+sec, func() bool { return n == 600 })
		w.settle()
	})
}

// FuzzReceiver: whatever comes, whatever handlers do, the bounds hold and nothing is
// acknowledged that must not be.
func FuzzReceiver(f *testing.F) {
	for i := range uint64(4) {
		r := rand.New(rand.NewPCG(i, 7))
		b := make([]byte, 600)
		for j := range b {
			b[j] = byte(r.Uint32())
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		data = data[:min(len(data), 4000)]
		next := func() int {
			if len(data) == 0 {
				return 0
			}
			b := data[0]
			data = data[1:]
			return int(b)
		}
		w := &world{T: t, Rand: rand.New(rand.NewPCG(uint64(next()), 1)), now: sec}
		w.c = mpq.Config{
			Messages: 1 + next()%4, Held: 1 + next()%8, Memory: 64 << (next() % 8),
			Timeout: 100 * time.Millisecond, Incomplete: mpq.Incomplete(next() % 3),
		}
		w.behave = behaviour{pending: 0.5, slow: 20 * msec, fail: float64(next()%8) / 200, refuse: float64(next()%4) / 10, room: 1 + next()%3, readTime: 100 * msec}
		x := w.newReceiver()
		for len(data) > 0 {
			h := slmp.Header{Flags: slmp.Flags(next() << 8), ID: uint32(next() % 4), Offset: uint32(next()%64) * 8}
			n := 8
			switch next() % 16 {
			case 0:
				h.Offset = uint32(next())
				n = next()
			case 1:
				h.Offset = ^uint32(next())
			case 2, 3, 4:
				h.Offset = 0
			case 5:
				n = -next() % (slmp.HeaderLen + 1)
			}
			if next()%16 != 0 {
				h.Flags &^= slmp.ACK | slmp.EOM
			}
			b := make([]byte, slmp.HeaderLen+max(n, 0))
			h.Put(b)
			x.receive(handlerstest.Peer(uint16(1000+next()%2)), b[:slmp.HeaderLen+n])
			until := w.now + int64(next())*int64(next()%16)*10*usec
			w.at(until, func() {})
			w.run(w.now+1000*sec, func() bool { return w.now >= until })
		}
		w.settle()
	})
}
