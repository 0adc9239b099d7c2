// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/spin"
)

// Sizes in the maps of xspin_message.h, in bytes.
const (
	tallySize   = uint32(unsafe.Sizeof(bpf.MessageTally{}))
	scratchSize = uint32(unsafe.Sizeof(bpf.MessageScratch{}))
)

// MaxWindows is how many windows handlers of messages can be given.
const MaxWindows = len(bpf.MessagesWindows)

// A Protocol is what segments are answered in.
type Protocol uint32

// Protocols.
const (
	NoProtocol Protocol = iota // nothing is answered
	SLMP                       // docs/slmp.md
)

// Checksums is what is done about UDP checksums, as hpu.Checksums.
type Checksums uint32

// Checksums that are verified.
const (
	VerifyComplete Checksums = iota // those that are there, but for partial ones
	VerifyAll
	VerifyNone
)

// A WindowConfig is a window that handlers may use: bytes of a map as package hostq makes
// it. The map stays the caller's.
type WindowConfig struct {
	Map    *ebpf.Map
	Off    int64 // in the map, a multiple of 8
	Size   int64
	Rights spin.Rights
}

// MessagesConfig says how many messages a context takes, and where they go. Zero fields
// take the defaults.
type MessagesConfig struct {
	Messages  int           // most in flight. Defaults to 256
	Segments  int           // most of a message, rounded up to a multiple of 32. Defaults to 65536
	Remember  time.Duration // how long a message that has ended is remembered. Defaults to spin.DefaultRemember
	Handed    time.Duration // how long one without packets that was handed over. Defaults to 10 s more
	Protocol  Protocol
	Checksums Checksums
	Windows   []WindowConfig // at most MaxWindows. Messages go into the first that may be written
	Events    int            // bytes for events, notes and owed answers, a power of two and at least a page. 0: nobody reads any
	NotesOnly bool           // of Events: ends of messages are not told
}

// Bounds of MessagesConfig.
const (
	MaxMessages  = 1 << 16
	MaxSegments  = 1 << 22
	MaxClaims    = 1 << 28 // messages times segments
	endedEntries = 1 << 16

	defaultSegments = 1 << 16
)

// MostSegments returns how many segments a message may have if a MessagesConfig says so: there
// are bits for them in words of 32.
func MostSegments(segments int) int {
	return (cmp.Or(segments, defaultSegments) + 31) &^ 31
}

func (c *MessagesConfig) complete() error {
	for _, d := range []struct {
		v        *int
		name     string
		def, max int
	}{{&c.Messages, "messages in flight", 256, MaxMessages}, {&c.Segments, "segments of a message", defaultSegments, MaxSegments}} {
		if *d.v == 0 {
			*d.v = d.def
		}
		if *d.v < 0 || *d.v > d.max {
			return fmt.Errorf("%d %s: want 1 to %d, or 0 for %d", *d.v, d.name, d.max, d.def)
		}
	}
	c.Segments = MostSegments(c.Segments)
	if c.Remember == 0 {
		c.Remember = spin.DefaultRemember
	}
	if c.Handed == 0 {
		c.Handed = 10*time.Second + c.Remember // as long as it may be open, and then
	}
	switch {
	case c.Messages*c.Segments > MaxClaims:
		return fmt.Errorf("%d messages of %d segments: want a product of at most %d", c.Messages, c.Segments, MaxClaims)
	case c.Remember < 0 || c.Handed < 0:
		return fmt.Errorf("messages remembered for %v, and for %v if handed over: want positive times, or 0 for %v and 10s more", c.Remember, c.Handed, spin.DefaultRemember)
	case c.Protocol > SLMP:
		return fmt.Errorf("protocol %d: there is none", c.Protocol)
	case c.Checksums > VerifyNone:
		return fmt.Errorf("checksums %d: there is no such way", c.Checksums)
	case c.Events != 0 && (c.Events < 0 || c.Events&(c.Events-1) != 0 || c.Events < unix.Getpagesize() || c.Events > 1<<30):
		return fmt.Errorf("%d bytes for events: want a power of two, %d to %d", c.Events, unix.Getpagesize(), 1<<30)
	case len(c.Windows) > MaxWindows:
		return fmt.Errorf("%d windows: handlers in eBPF can be given %d", len(c.Windows), MaxWindows)
	}
	for i, w := range c.Windows {
		switch m := w.Map; {
		case m == nil || m.Type() != ebpf.Array || m.ValueSize() != memoryElement || m.Flags() != memoryFlags:
			return fmt.Errorf("window %d is on %v: want an array of elements of %d bytes with flags %#x", i, m, memoryElement, memoryFlags)
		case w.Off < 0 || w.Off%8 != 0 || w.Size <= 0 || w.Off > int64(m.MaxEntries())*memoryElement-w.Size:
			return fmt.Errorf("window %d has %d bytes at %d of a map of %d: want a range of it, from a multiple of 8 on", i, w.Size, w.Off, int64(m.MaxEntries())*memoryElement)
		}
	}
	return nil
}

// MessagesMemory returns about how many bytes the maps of its messages take, beside windows.
func (o *Object) MessagesMemory(c MessagesConfig) (int64, error) {
	if err := c.complete(); err != nil {
		return 0, err
	}
	cpus, err := PossibleCPUs()
	if err != nil {
		return 0, err
	}
	n := int64(c.Events) + int64(cpus)*int64(scratchSize+tallySize)
	for name, entries := range c.entries(o, cpus) {
		m := o.spec.Maps[name]
		if m == nil {
			continue
		}
		m = m.Copy()
		m.MaxEntries = uint32(entries)
		if name == bpf.MessagesState {
			m.ValueSize = o.declared.State
		}
		n += mapSize(m)
	}
	return n, nil
}

// entries are those of maps whose size the configuration says.
func (c *MessagesConfig) entries(o *Object, cpus int) map[string]int {
	handed, states := 1, 1
	if o.HandsOver() {
		handed = endedEntries
	}
	if o.declared.State > 0 {
		states = c.Messages
	}
	return map[string]int{
		bpf.MessagesTable: c.Messages, bpf.MessagesSlots: c.Messages, bpf.MessagesFree: c.Messages,
		bpf.MessagesBits: c.Messages * c.Segments / 32, bpf.MessagesEnded: endedEntries, bpf.MessagesHanded: handed,
		bpf.MessagesTallies: cpus, bpf.MessagesReceives: MaxReceives, bpf.MessagesState: states,
	}
}

// set sets constants and sizes, and adds the maps that are given.
func (c *MessagesConfig) set(o *Object, spec *ebpf.CollectionSpec, given map[string]*ebpf.Map, cpus int) error {
	if err := c.complete(); err != nil {
		return err
	}
	s := bpf.MessageSettings{
		Words: uint32(c.Segments / 32), Protocol: uint32(c.Protocol), Checksums: uint32(c.Checksums),
		Target: uint32(MaxWindows), Remember: uint64(c.Remember), Handed: uint64(c.Handed), State: o.declared.State,
	}
	if c.Events > 0 {
		s.Read = 1
		if !c.NotesOnly {
			s.Tell = 1
		}
		spec.Maps[bpf.MessagesEvents].MaxEntries = uint32(c.Events)
	}
	for i, name := range bpf.MessagesWindows {
		given[name] = nil
		if i >= len(c.Windows) {
			continue
		}
		w := c.Windows[i]
		given[name] = w.Map
		s.Window[i] = bpf.MessageRange{Off: uint64(w.Off), Size: uint64(w.Size), Rights: uint32(w.Rights)}
		if w.Rights&spin.Write != 0 && s.Target == uint32(MaxWindows) {
			s.Target = uint32(i)
		}
	}
	if err := spec.Variables[bpf.MessagesSettings].Set(s); err != nil {
		return err
	}
	for name, n := range c.entries(o, cpus) {
		if m := spec.Maps[name]; m != nil {
			m.MaxEntries = uint32(n)
		}
	}
	if m := spec.Maps[bpf.MessagesState]; m != nil {
		m.ValueSize = max(o.declared.State, 8)
	}
	return nil
}

// messages are those of a context, as user space sees them.
type messages struct {
	rooms    []bpf.MessageRoom  // mapped; 1
	slots    []bpf.MessageSlot  // mapped
	tallies  []bpf.MessageTally // mapped, by CPU
	receives *receives

	expire *ebpf.Program
	events *ebpf.Map

	remember time.Duration
	counts   []recordCount // of some moments, as far back as messages are remembered
	evicted  uint64
}

// openMessages maps what user space reads, and puts all slots on the list of free ones.
func openMessages(coll *ebpf.Collection, c *MessagesConfig, cpus int) (m *messages, err error) {
	m = &messages{remember: c.Remember, expire: coll.Programs[bpf.MessagesExpire], events: coll.Maps[bpf.MessagesEvents]}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.close())
		}
	}()
	if m.rooms, err = mapAll[bpf.MessageRoom](coll.Maps[bpf.MessagesRooms], 1); err != nil {
		return nil, err
	}
	m.rooms[0].Granted = math.MaxInt64 // until somebody says less
	m.counts = []recordCount{{at: monotonic()}}
	if m.slots, err = mapAll[bpf.MessageSlot](coll.Maps[bpf.MessagesSlots], c.Messages); err != nil {
		return nil, err
	}
	if m.tallies, err = mapAll[bpf.MessageTally](coll.Maps[bpf.MessagesTallies], cpus); err != nil {
		return nil, err
	}
	if m.receives, err = openReceives(coll, c.Windows); err != nil {
		return nil, err
	}
	free := coll.Maps[bpf.MessagesFree]
	for slot := range uint32(c.Messages) {
		if err := free.Update(nil, slot, ebpf.UpdateAny); err != nil {
			return nil, fmt.Errorf("free slot %d: %w", slot, err)
		}
	}
	return m, nil
}

// mapAll maps the first n elements of an array.
func mapAll[T any](m *ebpf.Map, n int) ([]T, error) {
	b, err := unix.Mmap(m.FD(), 0, n*int(unsafe.Sizeof(*new(T))), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %d elements of %v: %w", n, m, err)
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), n), nil
}

func unmapAll[T any](all []T) error {
	if all == nil {
		return nil
	}
	return unix.Munmap(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(all))), len(all)*int(unsafe.Sizeof(*new(T)))))
}

func (m *messages) close() error {
	if m == nil {
		return nil
	}
	err := errors.Join(unmapAll(m.rooms), unmapAll(m.slots), unmapAll(m.tallies), m.receives.close())
	m.rooms, m.slots, m.tallies, m.receives = nil, nil, nil, nil
	return err
}

// MessageTally counts what became of a context's segments and messages.
type MessageTally struct {
	spin.MessageStats
	Corrupt    uint64 // segments with a wrong checksum
	Unverified uint64 // segments without one, or with a partial one
	Stray      uint64 // frames that are no segments
	Headers    uint64 // handlers that ran
	Complete   uint64 // completion handlers that ran
	Acks       uint64 // answers
	Mute       uint64 // answers that were not sent: for lack of room in the frame
	Deferred   uint64 // times that an event found no room
	Lost       uint64 // events that were never told
	Leaked     uint64 // slots and entries that a map did not take, or give up
	Handed     uint64 // packets that were handed over to HPUs
	Busy       uint64 // segments that came while their message was beginning, or contended for: they come again
}

// Tally returns the sum of all CPUs; after Close what it was. Zero for handlers of packets.
func (h *Handlers) Tally() MessageTally {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.tally()
}

func (h *Handlers) tally() (t MessageTally) {
	switch {
	case h.messages == nil:
		return t
	case h.messages.tallies == nil:
		return h.finalTally
	}
	for i := range h.messages.tallies {
		c := &h.messages.tallies[i]
		for _, p := range []struct{ to, from *uint64 }{
			{&t.Started, &c.Started}, {&t.Ended, &c.Ended}, {&t.Failed, &c.Failed}, {&t.Abandoned, &c.Abandoned},
			{&t.Refused, &c.Refused}, {&t.Duplicates, &c.Duplicates}, {&t.Waits, &c.Waits}, {&t.Corrupt, &c.Corrupt},
			{&t.Unverified, &c.Unverified}, {&t.Stray, &c.Stray}, {&t.Headers, &c.Headers}, {&t.Complete, &c.Completions},
			{&t.Acks, &c.Acks}, {&t.Mute, &c.Mute}, {&t.Deferred, &c.Deferred}, {&t.Lost, &c.Lost}, {&t.Leaked, &c.Leaked}, {&t.Busy, &c.Busy}, {&t.Handed, &c.Handed},
			{&t.Forgotten, &c.Forgotten},
		} {
			*p.to += atomic.LoadUint64(p.from)
		}
		for r := range t.Dropped {
			t.Dropped[r] += atomic.LoadUint64(&c.Dropped[r])
		}
	}
	t.Open = int(t.Started - t.Ended - t.Failed - t.Abandoned)
	t.Forgotten += h.messages.evicted
	return t
}

// A recordCount is how many records of ended messages had been begun at a time.
type recordCount struct {
	at    int64
	begun uint64
}

// countEvicted estimates how many records of ended messages the kernel has dropped before their time: those that were begun
// while as many as there is room for are younger than messages are remembered. Each has a message at least.
func (m *messages) countEvicted(now int64) {
	if m.tallies == nil {
		return // it is closed
	}
	begun := uint64(0)
	for i := range m.tallies {
		begun += atomic.LoadUint64(&m.tallies[i].Records)
	}
	if n := len(m.counts); n > 0 && now-m.counts[n-1].at < int64(m.remember)/64 {
		return // so that there are no more than some 64
	}
	young := 0 // the first count that is young enough, and one before it
	for young+1 < len(m.counts) && now-m.counts[young+1].at > int64(m.remember) {
		young++
	}
	m.counts = append(m.counts[young:], recordCount{now, begun})
	last, first := begun, m.counts[0].begun
	if n := len(m.counts); n > 1 {
		last = m.counts[n-2].begun
	}
	if more := begun - first; more > endedEntries {
		m.evicted += min(begun-last, more-endedEntries)
	}
}

// States of a slot, in the lower half of its word: xspin_state_of.
const (
	slotOpen     = 2
	slotDeferred = 4
	slotFailed   = 5
	slotStopped  = 6
)

// An OpenMessage is one of which some segments have come.
type OpenMessage struct {
	Key   [8]uint32
	Bytes uint64 // that were processed
}

// OpenMessages returns those that are open, in the order in which they began if none has
// ended. What has changed meanwhile may be missing; after Close, and of handlers of packets,
// there are none.
func (h *Handlers) OpenMessages() (all []OpenMessage) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.messages == nil {
		return nil
	}
	for i := range h.messages.slots {
		s := &h.messages.slots[i]
		if word := atomic.LoadUint64(&s.Word); uint32(word) == slotOpen {
			m := OpenMessage{s.Key, atomic.LoadUint64(&s.Done) - uint64(atomic.LoadUint32(&s.EomDone))}
			if atomic.LoadUint64(&s.Word) == word {
				all = append(all, m)
			}
		}
	}
	return all
}

// A StoppedMessage is one that is to be ended.
type StoppedMessage struct {
	slot  uint32
	lap   uint32
	was   uint32 // its state
	cause spin.Cause
}

// Stop stops the messages that have had no new segment for so long, and finds those that
// have failed: of none of them a handler will begin to run. When those that run have
// returned, which takes a grace period of the kernel, Expire ends them. The cause is for
// messages that are not complete.
func (h *Handlers) Stop(idle time.Duration, cause spin.Cause) (all []StoppedMessage) {
	since := monotonic() - int64(idle)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.messages == nil {
		return nil
	}
	h.messages.countEvicted(monotonic())
	// None after Close.
	for i := range h.messages.slots {
		s := &h.messages.slots[i]
		word := atomic.LoadUint64(&s.Word)
		m := StoppedMessage{uint32(i), uint32(word >> 32), uint32(word), cause}
		switch m.was {
		case slotOpen:
		case slotDeferred:
			m.cause = spin.Complete
		case slotFailed:
			all = append(all, m)
			continue
		default:
			continue
		}
		if int64(atomic.LoadUint64(&s.Seen)) <= since &&
			atomic.CompareAndSwapUint64(&s.Word, word, uint64(m.lap)<<32|slotStopped) {
			all = append(all, m)
		}
	}
	return all
}

// monotonic is CLOCK_MONOTONIC in ns, as programs have it.
func monotonic() int64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // fails for other clocks
	return now.Nano()
}

// Expire ends messages that were stopped: their completion handlers learn what is missing,
// the application is told, and their slots are free. It returns how many there were. With an
// error, the others are as they were before Stop, which finds them again.
func (h *Handlers) Expire(all []StoppedMessage) (n int, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.messages == nil || h.messages.slots == nil {
		return 0, nil
	}
	for i, m := range all {
		ended, err := h.order(m.slot, m.lap, uint32(m.cause))
		if err != nil {
			for _, m := range all[i:] {
				lap := uint64(m.lap) << 32
				atomic.CompareAndSwapUint64(&h.messages.slots[m.slot].Word, lap|slotStopped, lap|uint64(m.was))
			}
			return n, fmt.Errorf("end the message of slot %d: %w", m.slot, err)
		}
		n += int(ended)
	}
	return n, nil
}

// order runs the program that ends messages for one of them, and returns what it did. The caller has mu.
func (h *Handlers) order(slot, lap, cause uint32) (did uint32, err error) {
	// A frame must have 14 bytes. Repeat is as in Run.
	data := (*[unsafe.Sizeof(bpf.MessageOrder{})]byte)(unsafe.Pointer(&bpf.MessageOrder{Slot: slot, Lap: lap, Cause: cause}))
	return h.messages.expire.Run(&ebpf.RunOptions{Data: data[:], Repeat: 1})
}

// Grant says how many ends of complete messages the application may have been told of in all, since Load; without it
// there is no limit. As many events are posted, and messages that are complete beyond that are deferred. It returns how many have been
// posted, and the last turn that a deferred message has.
func (h *Handlers) Grant(events uint64) (posted, turns uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.messages == nil || h.messages.rooms == nil {
		return 0, 0
	}
	room := &h.messages.rooms[0]
	atomic.StoreUint64(&room.Granted, events)
	return atomic.LoadUint64(&room.Posted), atomic.LoadUint64(&room.Turns)
}

// A DeferredMessage is complete, and waits for room in the application's queue.
type DeferredMessage struct {
	Slot, Lap uint32
	Turn      uint64 // messages are resumed in this order: that in which they were complete
}

// ByTurn compares deferred messages.
func ByTurn(a, b DeferredMessage) int { return cmp.Compare(a.Turn, b.Turn) }

// Deferred returns the messages that wait, by turn. It leaves out those whose turn is later than last, which were deferred
// while it looked: so none comes without the ones before it.
func (h *Handlers) Deferred() (all []DeferredMessage, last uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.messages == nil || h.messages.rooms == nil {
		return nil, 0
	}
	last = atomic.LoadUint64(&h.messages.rooms[0].Turns)
	for i := range h.messages.slots {
		s := &h.messages.slots[i]
		if word := atomic.LoadUint64(&s.Word); uint32(word) == slotDeferred {
			if turn := atomic.LoadUint64(&s.Turn); turn <= last {
				all = append(all, DeferredMessage{uint32(i), uint32(word >> 32), turn})
			}
		}
	}
	slices.SortFunc(all, ByTurn)
	return all, last
}

// resume is the order that ends a deferred message: XSPIN_RESUME.
const resume = 16

// A ResumeResult is what Resume made of a message.
type ResumeResult uint32

// Results of Resume.
const (
	ResumeTooLate ResumeResult = iota // it does not wait any more
	Resumed
	ResumeLater // the ring has no room for its event and its acknowledgement
)

// Resume ends a deferred message, for whose event there is room: it is posted, and behind it the acknowledgement that
// its sender waits for (ReadOwed).
func (h *Handlers) Resume(m DeferredMessage) ResumeResult {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.messages == nil || h.messages.slots == nil {
		return ResumeTooLate
	}
	did, err := h.order(m.Slot, m.Lap, resume)
	if err != nil { // of the kernel's memory
		return ResumeLater
	}
	return ResumeResult(did)
}

// What lies in the ring buffer of Events beside ends of messages: xspin_note_of.
const (
	notified = 4
	logged   = 5
	waiting  = 6
	owed     = 7
)

// ReadDeferred reads that a message was deferred, if that lies in the ring buffer of Events. False: it is something
// else.
func ReadDeferred(raw []byte) (m DeferredMessage, ok bool) {
	var e bpf.MessageEvent
	if !readEvent(raw, &e) || e.Cause != waiting {
		return m, false
	}
	return DeferredMessage{e.Slot, uint32(e.User), e.Length}, true
}

// ReadOwed reads a frame that is to be sent when what lay before it in the ring buffer of Events has been told. False:
// it is something else.
func ReadOwed(raw []byte) (frame []byte, ok bool) {
	var e bpf.MessageOwed
	if !readEvent(raw, &e) || e.Cause != owed || e.Len > uint32(len(e.Frame)) {
		return nil, false
	}
	return slices.Clone(e.Frame[:e.Len]), true
}

// ReadEvent reads the end of a message that lies in the ring buffer of Events. False: it is
// none.
func ReadEvent(raw []byte) (e bpf.MessageEvent, ok bool) {
	return e, readEvent(raw, &e) && e.Cause < notified
}

// EventFailure says in words how a message has failed.
func EventFailure(e *bpf.MessageEvent) string {
	return failure(e.Code>>16, spin.Code(int16(e.Code)), &e.Slip)
}

func readEvent[T any](raw []byte, to *T) bool {
	return copy(unsafe.Slice((*byte)(unsafe.Pointer(to)), unsafe.Sizeof(*to)), raw) == int(unsafe.Sizeof(*to))
}

// A Note is what a handler has to say: something to tell the application, or a line for
// the log.
type Note struct {
	HPU   int
	Tag   uint64
	Words [2]uint64
	Time  int64  // CLOCK_MONOTONIC in ns
	Text  string // of a line
	Log   bool   // it is one
}

// ReadNote reads a note that lies in the ring buffer of Events. False: it is none.
func ReadNote(raw []byte) (n Note, ok bool) {
	var e bpf.MessageNote
	if !readEvent(raw, &e) || e.Cause != notified && e.Cause != logged {
		return n, false
	}
	n = Note{HPU: int(e.Hpu), Tag: e.Tag, Words: e.Words, Time: int64(e.Time), Log: e.Cause == logged}
	if n.Log {
		n.Text = line(e.Text[:], n.Words)
	}
	return n, true
}

// line puts the words in the place of the first two of %u, %d and %x.
func line(text []int8, words [2]uint64) string {
	var b []byte
	for _, c := range text {
		if c == 0 {
			break
		}
		b = append(b, byte(c))
	}
	b = []byte(shown(string(b)))
	out, k := []byte(nil), 0
	for i := 0; i < len(b); i++ {
		if b[i] == '%' && i+1 < len(b) && k < len(words) {
			is := true
			switch b[i+1] {
			case 'u':
				out = strconv.AppendUint(out, words[k], 10)
			case 'd':
				out = strconv.AppendInt(out, int64(words[k]), 10)
			case 'x':
				out = strconv.AppendUint(out, words[k], 16)
			default:
				is = false
			}
			if is {
				i++
				k++
				continue
			}
		}
		out = append(out, b[i])
	}
	return string(out)
}

// Events returns the ring buffer in which ends of messages are told, see ReadEvent; nil for handlers of packets. It is good until Close.
func (h *Handlers) Events() *ebpf.Map {
	if h.messages == nil {
		return nil
	}
	return h.messages.events
}
