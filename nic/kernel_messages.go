// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf/ringbuf"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/spin"
)

const (
	defaultTimeout        = 10 * time.Second
	defaultKernelMessages = 256
	// eventBytes is the size of a context's ring of events: those of 2048 messages.
	eventBytes = 256 << 10
	// roomLook is how soon somebody who waits for room in the application's queue looks, and roomLookMost how
	// seldom, when there has been none for long.
	roomLook, roomLookMost = time.Millisecond, 8 * time.Millisecond
	// cedeTime is how long a place is left to others who have found none: longer than the pauses in which HPUs
	// try again. For as long after that none is left.
	cedeTime = 120 * time.Millisecond
	// stopPatience is how long events wait for room when their context is removed and the
	// application takes none.
	stopPatience = 100 * time.Millisecond
)

// resolveMessages judges what a context of messages in the kernel has, and has not.
func (s *ContextSpec) resolveMessages(wrong *spin.Problems) {
	if s.Events != nil && s.Resources.Host != nil {
		wrong.Add("queue", "events go to a channel or to an application, not to both")
	}
	if s.Events != nil && cap(s.Events) == 0 {
		wrong.Add("queue", "the channel of events has no buffer: handlers in eBPF acknowledge a message when its event has a place")
	}
	wrong.Between("messages", s.Messages, 1, loader.MaxMessages)
	wrong.Between("segments", s.Kernel.Segments, 1, loader.MaxSegments)
	if s.Timeout < 0 || s.Remember < 0 {
		wrong.Add("timeout", "%v, and ended messages remembered for %v: want positive times, or 0 for the defaults", s.Timeout, s.Remember)
	}
	s.Messages, s.Timeout = cmp.Or(s.Messages, defaultKernelMessages), cmp.Or(s.Timeout, defaultTimeout)
	if _, err := MessagesMemory(s.Kernel.Object, s.Messages, s.Kernel.Segments); err != nil && wrong.Err() == nil {
		wrong.Add("segments", "%w", err)
	}
	if err := CheckKernelWindows(len(s.messageWindows())); err != nil {
		wrong.Add("windows", "%w", err)
	}
	for _, w := range s.messageWindows() {
		if h, ok := w.Window.(*hostq.Window); !ok {
			wrong.Add("windows", "%s: want a window on a hostq.Memory: handlers in eBPF are given its map", w.Name)
		} else if mem, off := h.Memory(); mem == nil || off%8 != 0 || h.Size() == 0 {
			wrong.Add("windows", "%s: want a window on a hostq.Memory, not empty and from a multiple of 8: handlers in eBPF are given its map", w.Name)
		}
	}
}

// MessagesMemory returns about how many bytes the NIC takes for messages of handlers in
// eBPF, so many in flight and of so many segments, 0 for the defaults.
func MessagesMemory(o *Object, messages, segments int) (int64, error) {
	return o.MessagesMemory(loader.MessagesConfig{Messages: messages, Segments: segments, Events: eventBytes})
}

// CheckKernelWindows tells whether handlers of messages in eBPF can be given so many windows.
func CheckKernelWindows(n int) error {
	if n > loader.MaxWindows {
		return fmt.Errorf("%d, and handlers in eBPF can be given %d", n, loader.MaxWindows)
	}
	return nil
}

// messageWindows are the windows that handlers are given. Messages go into the first.
func (s *ContextSpec) messageWindows() (all []hpu.NamedWindow) {
	if s.Window != nil {
		all = append(all, hpu.NamedWindow{Name: "the window of messages", Window: s.Window})
	}
	return append(all, s.Resources.Windows...)
}

// messagesConfig is what the loader is told of them.
func (s *ContextSpec) messagesConfig() (cfg loader.MessagesConfig) {
	cfg = loader.MessagesConfig{
		Messages: s.Messages, Segments: s.Kernel.Segments, Remember: s.Remember,
		Handed:    s.Timeout + cmp.Or(s.Remember, spin.DefaultRemember),
		Checksums: loader.Checksums(s.Checksums),
	}
	if s.isFormat("slmp") {
		cfg.Protocol = loader.SLMP
	}
	cfg.NotesOnly = s.Events == nil && s.events() == nil
	if !cfg.NotesOnly || s.Kernel.Object.Notes() || cfg.Protocol != loader.NoProtocol {
		cfg.Events = eventBytes
	}
	for _, w := range s.messageWindows() {
		h := w.Window.(*hostq.Window) // see resolveMessages
		mem, off := h.Memory()
		cfg.Windows = append(cfg.Windows, loader.WindowConfig{Map: mem.Map(), Off: off, Size: h.Size(), Rights: h.Rights()})
	}
	return cfg
}

// receive is a receive as the loader has it.
func (s *ContextSpec) receive(r *spin.Receive) (loader.Receive, error) {
	out := loader.Receive{Tag: r.Tag, Ignore: r.Ignore, Keep: r.Keep, Place: r.Place, Size: r.Size}
	out.Window = slices.IndexFunc(s.messageWindows(), func(w hpu.NamedWindow) bool { return w.Window == r.Window })
	switch user := r.User.(type) {
	case nil:
	case uint64:
		out.User = user
	default:
		return out, fmt.Errorf("receive for context %q: its User is a %T: want a uint64, which is what handlers in eBPF can keep", s.Name, user)
	}
	switch {
	case out.Window < 0:
		return out, fmt.Errorf("receive for context %q: its window is none of the context's", s.Name)
	case r.Events != nil:
		return out, fmt.Errorf("receive for context %q: events of messages in the kernel go where the context says", s.Name)
	}
	return out, nil
}

// Post posts a receive to a context whose handlers are in eBPF: the next message that
// matches goes there. Before the first, messages go to the beginning of the context's window;
// from then on, one without a receive is refused. Contexts with handlers in Go have a Binder
// instead. The error wraps ErrReceives, ErrRights or ErrBounds of packages loader and spin.
func (c *Context) Post(r spin.Receive) error {
	if c.loaded == nil {
		return fmt.Errorf("receive for context %q: its handlers are in Go, and have the receives of its Binder", c.spec.Name)
	}
	q, err := c.spec.receive(&r)
	if err == nil {
		if err = c.loaded.Post(q); err != nil {
			err = fmt.Errorf("context %q: %w", c.spec.Name, err)
		}
	}
	return err
}

// Unpost takes back the first receive that is as r. False: there is none.
func (c *Context) Unpost(r spin.Receive) bool {
	if c.loaded == nil {
		return false
	}
	q, err := c.spec.receive(&r)
	return err == nil && c.loaded.Unpost(q)
}

// kernelMessages are the messages of a context in the kernel, as far as user space is
// concerned with them: it ends those that have become too old or have failed, and hands
// their events on. Two goroutines, from start to stop.
type kernelMessages struct {
	t      *kernelTier
	reader *ringbuf.Reader // nil: there are no events
	queue  eventQueue
	over   chan struct{} // closed by stop
	until  time.Time     // set before over is closed: how long forward waits for room
	given  time.Time     // the same, while the application takes nothing; forward's
	lost   atomic.Uint64 // events that the application had no room for
	heard  uint64        // events without room in the ring that unheard has told of; expire's, and then stop's

	failed  chan struct{} // a message has: expire is to end it
	unwatch func()        // of the queue's places
	flushed chan struct{} // forward has handed on what was in the ring
	last    atomic.Bool   // nothing more comes into the ring

	expiring, forwarding sync.WaitGroup

	requests, unasked atomic.Uint64 // notes that the application got, and those it had no room for

	mu       sync.Mutex               // guards what follows
	told     uint64                   // complete messages that forward has taken from the ring
	aside    int                      // places of the queue for those to come, and for those in the ring
	shares   bool                     // others fill the queue, too
	ceded    time.Time                // when the last of them had found no place
	deferred []loader.DeferredMessage // by turn
	turn     uint64                   // the last turn that was heard of
	scanned  uint64                   // how many had been deferred when all slots were looked through

	untold bool // forward's: a complete message could not be told of

	unsent atomic.Uint64 // answers that could not be sent
}

func (t *kernelTier) startMessages() (m *kernelMessages, err error) {
	m = &kernelMessages{
		t: t, queue: t.queue, over: make(chan struct{}), flushed: make(chan struct{}, 1),
		failed: make(chan struct{}, 1), unwatch: func() {},
		shares: t.spec.handsOver(),
	}
	if m.queue != nil {
		m.unwatch = m.queue.Places().Watch(m.cede)
	}
	m.resume()
	if t.spec.messagesConfig().Events > 0 {
		if m.reader, err = ringbuf.NewReader(t.handlers.Events()); err != nil {
			m.leave()
			return nil, fmt.Errorf("read the events of context %q: %w", t.spec.Name, err)
		}
		m.forwarding.Go(m.forward)
	}
	every := max(min(t.spec.Timeout/8, expireTick), time.Millisecond)
	m.expiring.Go(func() { m.expire(every) })
	return m, nil
}

// expireTick is how often expire looks at least; a variable for tests.
var expireTick = 250 * time.Millisecond

// expire ends messages whose time is up, and those that have failed. It looks so often at least.
func (m *kernelMessages) expire(every time.Duration) {
	timeout := m.t.spec.Timeout
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-m.over:
			return
		case <-tick.C:
		case <-m.failed:
		}
		m.end(timeout, spin.TimedOut)
		m.unheard()
		m.t.handlers.Posted() // closes gaps between receives
		m.adopt()
		m.resume()
	}
}

// end ends messages without news for so long. Whoever works for one of them has done so
// when a grace period is over.
func (m *kernelMessages) end(idle time.Duration, cause spin.Cause) {
	all := m.t.handlers.Stop(idle, cause)
	if len(all) == 0 {
		return
	}
	if err := m.t.n.ingress.Synchronize(); err != nil {
		time.Sleep(time.Second) // a run of the program takes microseconds
	}
	if _, err := m.t.handlers.Expire(all); err != nil {
		m.t.n.pool.Report(spin.Fault{Kind: spin.HandlerFailed, Context: m.t.id, Name: m.t.spec.Name, Detail: err.Error()})
	}
}

// adopt finds deferred messages of which the ring had no room to tell, and forgets those that wait no more.
func (m *kernelMessages) adopt() {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.t.handlers.Tally().Deferred
	if n == m.scanned && len(m.deferred) == 0 {
		return
	}
	m.scanned = n
	m.scan()
}

// scan looks through all slots for deferred messages. The caller has mu.
func (m *kernelMessages) scan() {
	all, last := m.t.handlers.Deferred()
	for _, d := range m.deferred {
		if d.Turn > last {
			all = append(all, d)
		}
	}
	m.deferred, m.turn = all, max(m.turn, last)
}

// enqueue puts a message in its place among those that wait, unless it is there.
func enqueue(all []loader.DeferredMessage, d loader.DeferredMessage) []loader.DeferredMessage {
	at, is := slices.BinarySearchFunc(all, d, loader.ByTurn)
	if is {
		return all
	}
	return slices.Insert(all, at, d)
}

// unheard tells the application of events that found no room in the kernel's ring. They
// never come here.
func (m *kernelMessages) unheard() {
	p := m.t.spec.events()
	if n := m.t.handlers.Tally().Lost; p != nil && n > m.heard {
		p.LoseEvents(n - m.heard)
		m.heard = n
	}
}

// forward hands events on. There are no more of complete messages in the ring than the application's queue has
// room for: others wait in their slots, and forward looks for room as long as any do.
func (m *kernelMessages) forward() {
	var rec ringbuf.Record
	pause := time.Duration(0) // while messages wait for room
	for {
		if waits := m.resume(); waits {
			pause = min(max(2*pause, roomLook), roomLookMost)
			m.reader.SetDeadline(time.Now().Add(pause))
		} else if pause > 0 {
			pause = 0
			m.reader.SetDeadline(time.Time{})
		}
		err := m.reader.ReadInto(&rec)
		switch {
		case errors.Is(err, ringbuf.ErrFlushed): // by drain, or by stop, whose own may be still to come
			if m.last.Load() {
				if m.reader.AvailableBytes() == 0 {
					return
				}
				_ = m.reader.Flush() // another has come, and this flush was before it
			}
			ask(m.flushed)
			continue
		case errors.Is(err, os.ErrDeadlineExceeded):
			continue
		case err != nil:
			return // it is closed
		}
		m.take(rec.RawSample)
	}
}

// take hands on what lay in the ring. The engine posts whole ones.
func (m *kernelMessages) take(sample []byte) {
	if raw, ok := loader.ReadEvent(sample); ok {
		e := m.event(&raw)
		if e.Cause == spin.Complete {
			m.tell(&e)
			return
		}
		if !m.queue.Post(&e) {
			m.lost.Add(1)
		}
		if e.Cause == spin.Failed { // its slot is to be free soon
			ask(m.failed)
		}
	} else if d, ok := loader.ReadDeferred(sample); ok {
		m.mu.Lock()
		if d.Turn > m.turn+1 {
			m.scan() // those before it go first: the ring had no room for their notes
		}
		m.deferred, m.turn = enqueue(m.deferred, d), max(m.turn, d.Turn)
		m.mu.Unlock()
	} else if ack, ok := loader.ReadOwed(sample); ok {
		if !m.untold { // else it may be that one's
			m.send(ack)
		}
	} else if n, ok := loader.ReadNote(sample); ok {
		m.note(&n)
	}
}

// tell tells of a complete message, for which a place was set aside. It waits only if somebody else fills the queue.
func (m *kernelMessages) tell(e *spin.MessageEvent) {
	told := false
	m.wait(func() bool {
		told = m.queue.PostAside(e)
		return told || m.queue.gone()
	}, true)
	m.mu.Lock()
	m.told++
	m.aside--
	m.mu.Unlock()
	if told {
		return
	}
	m.untold = true
	m.lost.Add(1)
	m.queue.Places().Give(1)
	if p := m.t.spec.events(); p != nil {
		p.LoseEvent()
	}
}

// resume sets places of the application's queue aside, and shares them out: first to messages that wait for one, then
// to those to come. It tells whether any still wait.
func (m *kernelMessages) resume() (waits bool) {
	if m.queue == nil {
		return false
	}
	waits, short := m.share()
	if short { // not with mu: others give up places, as this one does for them
		m.queue.Places().Short()
	}
	return waits
}

// share is resume, and tells whether it has found no place.
func (m *kernelMessages) share() (waits, short bool) {
	places := m.queue.Places()
	holders := places.Holders()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.queue.gone() { // nothing more is acknowledged
		m.recall()
		return false, false
	}
	if len(m.deferred) > 0 {
		m.recall() // none for others meanwhile
	}
	for full := false; len(m.deferred) > 0 && !full; {
		if short = places.Free() <= m.spare() || places.Take(1) == 0; short {
			break
		}
		m.aside++
		did := m.t.handlers.Resume(m.deferred[0])
		if did != loader.Resumed { // it is too late: a copy of its EOM was faster, or its time was up; or the ring is full
			m.giveBack(m.aside - 1)
		}
		if full = did == loader.ResumeLater; !full {
			m.deferred = m.deferred[1:]
		}
	}
	if len(m.deferred) > 0 {
		return true, short
	}
	m.deferred = nil
	// One that is deferred meanwhile goes first: its note is in the ring.
	if m.grant() <= m.turn {
		m.aside += places.Take(min(m.part(holders)-m.aside, places.Free()-m.spare()))
		if m.grant() > m.turn {
			m.recall()
		}
	}
	return false, false
}

// part is how many places the context may hold: as many as each of those that hold some. If others fill the queue, a
// quarter is left to them. The caller has mu.
func (m *kernelMessages) part(holders int) int {
	all := m.queue.size()
	if m.shares {
		all -= all / 4
	}
	return max(all/max(holders, 1), 1)
}

// grant gives what was set aside to messages to come. It returns the last turn that a deferred message has. The caller
// has mu.
func (m *kernelMessages) grant() (turn uint64) {
	_, turn = m.t.handlers.Grant(m.told + uint64(m.aside))
	return turn
}

// recall takes back what was set aside for messages to come. The caller has mu.
func (m *kernelMessages) recall() {
	posted, _ := m.t.handlers.Grant(m.told)
	m.giveBack(int(min(posted-m.told, uint64(m.aside)))) // events are in the ring
	m.grant()
}

// spare returns how many free places are left to others. The caller has mu.
func (m *kernelMessages) spare() int {
	if m.shares && time.Since(m.ceded) < cedeTime {
		return 1
	}
	return 0
}

// giveBack keeps so many places. The caller has mu.
func (m *kernelMessages) giveBack(keep int) {
	m.queue.Places().Give(m.aside - keep)
	m.aside = keep
}

// cede gives others who fill the queue a chance: what is free is anybody's until the next event, and one place for some
// time.
func (m *kernelMessages) cede() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.shares = true
	if now := time.Now(); now.Sub(m.ceded) > 2*cedeTime {
		m.ceded = now
	}
	m.recall()
}

// leave gives back all places.
func (m *kernelMessages) leave() {
	m.unwatch()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.queue != nil {
		m.giveBack(0)
	}
}

// ask wakes who waits at c.
func ask(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// send sends an acknowledgement that XDP could not send, as it had no frame for it.
func (m *kernelMessages) send(frame []byte) {
	if err := m.t.n.raw.send(frame); err != nil {
		m.unsent.Add(1)
	}
}

// wait has something done for which there may be no room, and tells whether it was. With
// patience it waits for room; when the context is being removed no longer than stopPatience, for
// all that there is, unless the application goes on taking.
func (m *kernelMessages) wait(try func() bool, patience bool) bool {
	for !try() {
		if !patience {
			return false
		}
		select {
		case <-m.over:
			now := time.Now()
			if m.given.IsZero() {
				m.given = now.Add(stopPatience)
			}
			if now.After(m.given) || now.After(m.until) {
				return false
			}
		default:
		}
		time.Sleep(roomLook)
	}
	m.given = time.Time{}
	return true
}

// note does with what a handler has to say as hpu.Task does with Notify and Logf.
func (m *kernelMessages) note(n *loader.Note) {
	r := &m.t.spec.Resources
	switch {
	case n.Log && r.Log != nil:
		r.Log.Log(n.Time, n.HPU, []byte(n.Text))
	case n.Log:
		m.t.n.cfg.Logger.Info(n.Text, "context", m.t.spec.Name, "hpu", n.HPU)
	case r.Host == nil:
		m.unasked.Add(1)
	default:
		var err error
		ask := hostq.Request{Tag: n.Tag, Words: n.Words, HPU: uint32(n.HPU)}
		if m.wait(func() bool { // one that wants no answer is of no lane
			_, err = r.Host.Request(0, &ask, nil)
			ask.Again = errors.Is(err, hostq.ErrFull)
			return !ask.Again
		}, r.Full == hpu.FullWaits) && err == nil {
			m.requests.Add(1)
		} else {
			m.unasked.Add(1)
		}
	}
}

// event is what the application is told.
func (m *kernelMessages) event(e *bpf.MessageEvent) spin.MessageEvent {
	s := m.t.spec
	out := spin.MessageEvent{
		Result: spin.Result{
			Cause: spin.Cause(e.Cause), Length: e.Length, Dropped: e.Dropped, Missing: e.Missing,
			FlowControl: e.Starved != 0, Time: int64(e.Time),
		},
		Context: s.Name,
		Number:  e.Key[max(len(s.Format.Key)-1, 0)],
		Slot:    int(e.Slot),
	}
	if e.User != 0 {
		out.User = e.User
	}
	if e.Source != 0 {
		var a [4]byte
		var port [2]byte
		binary.LittleEndian.PutUint32(a[:], e.Source)
		binary.LittleEndian.PutUint16(port[:], uint16(e.Port))
		out.Source = netip.AddrPortFrom(netip.AddrFrom4(a), binary.BigEndian.Uint16(port[:]))
	}
	if out.Cause == spin.Failed {
		out.Err = errors.New(loader.EventFailure(e))
	}
	return out
}

// drain waits until all that is in the ring has been handed on, and no longer than that.
func (m *kernelMessages) drain(d time.Duration) error {
	if m.reader == nil {
		return nil
	}
	select {
	case <-m.flushed: // of a drain that has not waited for it
	default:
	}
	if err := m.reader.Flush(); err != nil {
		return fmt.Errorf("events of context %q: %w", m.t.spec.Name, err)
	}
	select {
	case <-m.flushed:
		return nil
	case <-time.After(d):
		return fmt.Errorf("events of context %q were not handed on in %v", m.t.spec.Name, d)
	}
}

// stop ends all messages. No packet comes any more, and no handler runs. Events may wait so long
// for an application that takes them.
func (m *kernelMessages) stop(d time.Duration) {
	m.until = time.Now().Add(d)
	close(m.over)
	m.expiring.Wait() // what it has stopped it ends, and that is told
	m.end(0, spin.Removed)
	m.unheard()
	if m.reader != nil {
		m.last.Store(true)
		_ = m.reader.Flush() // forward takes what there is, and ends
		m.forwarding.Wait()
		_ = m.reader.Close()
	}
	m.leave()
}
