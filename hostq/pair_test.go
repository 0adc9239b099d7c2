// SPDX-License-Identifier: Apache-2.0

package hostq

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/xspin/xspin/spin"
	"golang.org/x/sys/unix"
)

// both makes both sides in memory that the race detector watches.
func both(t testing.TB, cfg PairConfig) (*Pair, *Host) {
	t.Helper()
	cfg.Lanes = max(cfg.Lanes, 1)
	if err := cfg.fill(); err != nil {
		t.Fatal(err)
	}
	mem := aligned(cfg.Size())
	p, err := newPair(cfg, mem)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	_, doorbell, lanes := p.Descriptors()
	h, err := newHost(cfg.Layout, mem, dup(t, doorbell)[0], dup(t, lanes...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close() })
	return p, h
}

func dup(t testing.TB, fds ...int) (dups []int) {
	t.Helper()
	for _, fd := range fds {
		n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			t.Fatal(err)
		}
		dups = append(dups, n)
	}
	return dups
}

func ask(t testing.TB, p *Pair, lane int, payload string, user any) uint64 {
	t.Helper()
	id, err := p.Request(lane, &Request{Tag: 7, Words: [2]uint64{8, 9}, HPU: 10, Reply: true, Payload: []byte(payload)}, user)
	if err != nil || id == 0 {
		t.Fatalf("request: id %d, %v", id, err)
	}
	return id
}

func next(t testing.TB, h *Host) *Call {
	t.Helper()
	var c Call
	if !h.Request(&c) {
		t.Fatal("there is no request")
	}
	return &c
}

// poll returns copies of what a lane has.
func poll(p *Pair, lane int) (rs []Response) {
	p.Poll(lane, 1<<20, func(r *Response) {
		c := *r
		c.Payload = bytes.Clone(r.Payload)
		rs = append(rs, c)
	})
	return rs
}

func TestRequest(t *testing.T) {
	p, h := both(t, PairConfig{Layout: Layout{Lanes: 3}})
	user := new(int)
	id := ask(t, p, 2, "question", user)
	if n := p.Outstanding(2); n != 1 || p.Outstanding(1) != 0 {
		t.Errorf("%d outstanding", n)
	}
	c := next(t, h)
	if c.Tag != 7 || c.Words != [2]uint64{8, 9} || c.HPU != 10 || !c.Reply || string(c.Payload) != "question" {
		t.Errorf("request %+v", c)
	}
	if h.Request(&Call{}) {
		t.Error("one more")
	}
	// In place, and longer than it was.
	answer := append(c.Payload[:0], "an answer that is longer"...)
	if err := h.Respond(c, -3, answer); err != nil {
		t.Fatal(err)
	}
	if err := h.Respond(c, -3, nil); err == nil {
		t.Error("answered twice")
	}
	if n := len(poll(p, 0)) + len(poll(p, 1)); n != 0 {
		t.Errorf("%d responses in the wrong lanes", n)
	}
	rs := poll(p, 2)
	if len(rs) != 1 || rs[0].ID != id || rs[0].Tag != 7 || rs[0].Status != -3 || rs[0].User != user || rs[0].Err != nil ||
		string(rs[0].Payload) != "an answer that is longer" {
		t.Errorf("responses %+v", rs)
	}
	if p.Outstanding(2) != 0 || len(poll(p, 2)) != 0 {
		t.Error("once more")
	}
	want := PairStats{Requests: 1, Responses: 1}
	if h.Request(&Call{}); p.Stats() != want {
		t.Errorf("stats %+v, want %+v", p.Stats(), want)
	}
}

func TestRequestLimits(t *testing.T) {
	p, h := both(t, PairConfig{Layout: Layout{Requests: 4, Payload: 10}, Outstanding: 3})
	for _, c := range []struct {
		name string
		lane int
		size int
		want error
	}{
		{"lane -1", -1, 0, spin.ErrBounds},
		{"lane 1 of 1", 1, 0, spin.ErrBounds},
		{"11 bytes", 0, 11, ErrTooLong},
		{"10 bytes", 0, 10, nil},
		{"none", 0, 0, nil},
		{"the third", 0, 0, nil},
		{"the fourth", 0, 0, ErrFull},
	} {
		if _, err := p.Request(c.lane, &Request{Reply: true, Payload: make([]byte, c.size)}, nil); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
	// One more that wants no response fits into the ring, and then none.
	for i, want := range []error{nil, ErrFull} {
		if _, err := p.Request(0, &Request{}, nil); err != want {
			t.Errorf("notification %d: %v, want %v", i, err, want)
		}
	}
	// A request that waits for room is tried again, and counted once.
	for _, reply := range []bool{false, true} {
		if _, err := p.Request(0, &Request{Reply: reply, Again: true}, nil); err != ErrFull {
			t.Errorf("again, with an answer %v: %v", reply, err)
		}
	}
	if n, err := p.Notify(make([]Request, 3)); n != 0 || err != ErrFull {
		t.Errorf("batch into a full ring: %d, %v", n, err)
	}
	if s := p.Stats(); s.Full != 3 || s.Waiting != 4 || s.Outstanding != 3 {
		t.Errorf("stats %+v", s)
	}
	// The slots of calls that are held are not free; Done gives them back early.
	calls := []*Call{next(t, h), next(t, h), next(t, h), next(t, h)}
	h.Done(calls[0])
	if n, err := p.Notify(make([]Request, 3)); n != 1 || err != ErrFull {
		t.Errorf("batch into a ring with room for one: %d, %v", n, err)
	}
	if err := h.Respond(calls[0], 1, make([]byte, 11)); !errors.Is(err, ErrTooLong) {
		t.Errorf("response of 11 bytes: %v", err)
	}
	for i, c := range calls {
		if err := h.Respond(c, int32(i), nil); err != nil {
			t.Errorf("response %d: %v", i, err)
		}
	}
	if rs := poll(p, 0); len(rs) != 3 || rs[0].Status != 0 || rs[2].Status != 2 {
		t.Errorf("responses %+v", rs)
	}
}

func TestLayouts(t *testing.T) {
	for _, c := range []struct {
		name string
		l    Layout
		ok   bool
	}{
		{"smallest", Layout{1, 1, 1, 1}, true},
		{"largest lanes", Layout{1, 1, 1, MaxLanes}, true},
		{"no lanes", Layout{1, 1, 1, 0}, false},
		{"too many lanes", Layout{1, 1, 1, MaxLanes + 1}, false},
		{"not a power", Layout{3, 1, 1, 1}, false},
		{"not a power either", Layout{1, 1025, 1, 1}, false},
		{"too many", Layout{2 * MaxSlots, 1, 1, 1}, false},
		{"negative", Layout{1, -1, 1, 1}, false},
		{"negative payload", Layout{1, 1, -1, 1}, false},
		{"payload too long", Layout{1, 1, MaxPayload + 1, 1}, false},
	} {
		if err := (&PairConfig{Layout: c.l}).fill(); (err == nil) != c.ok {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	largest := Layout{MaxSlots, MaxSlots, MaxPayload, MaxLanes}
	if largest.Size() < int64(MaxSlots)*MaxPayload*MaxLanes {
		t.Errorf("size of the largest is %d", largest.Size())
	}
	if unsafe.Sizeof(eventSlot{}) != 192 || unsafe.Sizeof(sharedCounter{}) != 64 || unsafe.Sizeof(shared{})%64 != 0 ||
		unsafe.Offsetof(shared{}.waiting)%128 != 0 || unsafe.Offsetof(shared{}.ended)%128 != 0 ||
		unsafe.Offsetof(shared{}.events)%128 != 0 || unsafe.Offsetof(shared{}.requests)%128 != 0 ||
		unsafe.Offsetof(shared{}.lanes)%128 != 0 || unsafe.Offsetof(shared{}.counters)%128 != 0 {
		t.Error("words of the two sides share cache lines")
	}
}

func TestEventsArriveAsTheyWere(t *testing.T) {
	p, h := both(t, PairConfig{})
	long := strings.Repeat("x", TextLen-1)
	for _, e := range []Event{
		{Kind: MessageEnded},
		{
			Kind: MessageEnded, Cause: 127, FlowControl: true, Number: 1<<32 - 1, Slot: 1<<32 - 2, Source: netip.MustParseAddrPort("1.2.3.4:65535"),
			Length: 1<<64 - 1, Dropped: 1<<64 - 2, Missing: 1<<64 - 3, User: 1<<64 - 4, Time: 1<<63 - 1, Text: long + "y",
		},
		{Kind: MessageFailed, Source: netip.MustParseAddrPort("[2001:db8::1]:1"), Text: "a text"},
		{Kind: ContextFault, Source: netip.MustParseAddrPort("[::ffff:1.2.3.4]:0"), Text: "b"},
		{Kind: Overflow, Lost: 1 << 63},
		{Kind: MessageEnded, Source: netip.MustParseAddrPort("0.0.0.0:0")},
	} {
		if !p.Event(&e) {
			t.Fatal("no room")
		}
		var got Event
		if !h.Event(&got) || got != e {
			t.Errorf("got %+v, want %+v", got, e)
		}
	}
	for text, want := range map[string]string{
		long + "yz": long[:TextLen-3] + "…",
		long[:TextLen-4] + "é" + "and much more": long[:TextLen-4] + "…", // no half runes
		"a\x00b": "a",
	} {
		p.Event(&Event{Text: text})
		var got Event
		if !h.Event(&got) || got.Text != want {
			t.Errorf("text %q, want %q", got.Text, want)
		}
	}
}

func TestOverflow(t *testing.T) {
	p, h := both(t, PairConfig{Layout: Layout{Events: 4}})
	for i := range 6 {
		if ok := p.Event(&Event{Kind: MessageEnded, Number: uint32(i)}); ok != (i < 4) {
			t.Errorf("event %d: %v", i, ok)
		} else if !ok {
			p.LoseEvent()
		}
	}
	take := func(want ...Event) {
		t.Helper()
		for _, w := range want {
			var e Event
			if !h.Event(&e) || e != w {
				t.Errorf("event %+v, want %+v", e, w)
			}
		}
	}
	// Room for one: the marker has it.
	take(Event{Kind: MessageEnded, Number: 0})
	h.eventRing.flush()
	if p.Event(&Event{Kind: MessageEnded, Number: 7}) {
		t.Error("an event that finds room for the marker only says that there was room")
	}
	take(Event{Kind: MessageEnded, Number: 1}, Event{Kind: MessageEnded, Number: 2},
		Event{Kind: MessageEnded, Number: 3}, Event{Kind: Overflow, Lost: 2})
	h.Event(&Event{})
	p.LoseEvent()
	if !p.Event(&Event{Kind: MessageEnded, Number: 8}) {
		t.Error("no room")
	}
	take(Event{Kind: Overflow, Lost: 1}, Event{Kind: MessageEnded, Number: 8})
	// A call that is about to sleep tells as well.
	p.LoseEvent()
	p.Arm(0)
	take(Event{Kind: Overflow, Lost: 1})
	// And when nothing else ever happens, it is told too.
	p.LoseEvents(0)
	p.LoseEvents(3)
	if err := h.Wait(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	take(Event{Kind: Overflow, Lost: 3})
	if s := p.Stats(); s.EventsFull != 3 || s.EventsLost != 7 || s.Events != 9 {
		t.Errorf("stats %+v", s)
	}
}

func TestCancel(t *testing.T) {
	p, h := both(t, PairConfig{Layout: Layout{Lanes: 2}})
	a, b := ask(t, p, 0, "a", "a"), ask(t, p, 0, "b", "b")
	if !p.Cancel(a) || p.Cancel(a) {
		t.Error("cancelled, and cancelled again")
	}
	for _, id := range []uint64{0, ^uint64(0), b + 1<<idGenShift, b + 1<<idLaneShift, b + 1, b &^ (1<<idGenShift - 1)} {
		if p.Cancel(id) {
			t.Errorf("cancelled %#x", id)
		}
	}
	again := ask(t, p, 0, "c", "c") // has a's entry
	if again&idIndex != a&idIndex || again == a {
		t.Errorf("ids %#x, %#x", a, again)
	}
	for range 3 {
		if err := h.Respond(next(t, h), 0, nil); err != nil {
			t.Fatal(err)
		}
	}
	rs := poll(p, 0)
	if len(rs) != 2 || rs[0].User != "b" || rs[1].User != "c" {
		t.Errorf("responses %+v", rs)
	}
	if p.Cancel(b) {
		t.Error("cancelled what has its response")
	}
	if s := p.Stats(); s.Late != 1 || s.Responses != 2 || s.Bogus != 0 || s.Outstanding != 0 {
		t.Errorf("stats %+v", s)
	}
}

func TestResponsesThatAnswerNothing(t *testing.T) {
	p, h := both(t, PairConfig{Layout: Layout{Lanes: 2, Payload: 100}, Outstanding: 5})
	id := ask(t, p, 0, "", "x")
	forge := func(lane int, id uint64, length uint32) {
		pos, _, err := h.lanes[lane].claim(1)
		if err != nil {
			t.Fatal(err)
		}
		*(*responseSlot)(unsafe.Pointer(unsafe.SliceData(h.lanes[lane].slot(pos)))) = responseSlot{id: id, length: length, lap: h.lanes[lane].unpublished(pos)}
		h.lanes[lane].publish(pos)
	}
	for _, c := range []struct {
		name        string
		lane        int
		id          uint64
		length      uint32
		late, bogus uint64
	}{
		{"no id", 0, 0, 0, 0, 1},
		{"too long", 0, id, 101, 0, 2},
		{"far too long", 0, id, 1<<32 - 1, 0, 3},
		{"from the wrong lane", 1, id, 0, 0, 4},
		{"as if of the wrong lane", 1, id + 1<<idLaneShift, 0, 0, 5},
		{"of a lane that is not there", 0, id + 9<<idLaneShift, 0, 0, 6},
		{"entry that is not there", 0, id&^idIndex | 5, 0, 0, 7},
		{"entry that was not used yet", 0, id&^idIndex | 3, 0, 0, 8},
		{"next generation", 0, id + 1<<idGenShift, 0, 0, 9},
		{"no generation", 0, id & idIndex, 0, 0, 10},
	} {
		forge(c.lane, c.id, c.length)
		if rs := poll(p, c.lane); len(rs) != 0 {
			t.Errorf("%s: %+v", c.name, rs)
		}
		if s := p.Stats(); s.Late != c.late || s.Bogus != c.bogus || s.Outstanding != 1 || s.Broken || s.Responses != 0 {
			t.Errorf("%s: stats %+v", c.name, s)
		}
	}
	forge(0, id, 100)
	forge(0, id, 100)
	if rs := poll(p, 0); len(rs) != 1 || rs[0].User != "x" || len(rs[0].Payload) != 100 {
		t.Errorf("answered twice: %+v", rs)
	}
	if s := p.Stats(); s.Late != 1 || s.Responses != 1 {
		t.Errorf("stats %+v", s)
	}
	// A flood of them does not keep Poll.
	for range 20 {
		forge(0, 0, 0)
	}
	if n := p.Poll(0, 5, func(*Response) {}); n != 0 || p.Stats().Bogus != 15 {
		t.Errorf("%d responses, stats %+v", n, p.Stats())
	}
}

func TestBreaking(t *testing.T) {
	for _, c := range []struct {
		name     string
		scribble func(p *Pair)
		find     func(p *Pair)
	}{
		{
			"head of the events beyond the tail",
			func(p *Pair) { p.shared.events = 1 << 40 },
			func(p *Pair) {
				for p.Event(&Event{}) {
				}
			},
		},
		{
			"head of the requests beyond the tail",
			func(p *Pair) { p.shared.requests = ^uint64(0) },
			func(p *Pair) {
				for range 9 {
					_, _ = p.Request(1, &Request{}, nil)
				}
			},
		},
		{
			"the same, and a batch",
			func(p *Pair) { p.shared.requests = 100 },
			func(p *Pair) { _, _ = p.Notify(make([]Request, 20)) },
		},
		{
			"lap of a response",
			func(p *Pair) { p.lanes[1].lap(0).Store(77) },
			func(p *Pair) {
				p.Arm(1)
				p.Poll(1, 9, func(*Response) {})
			},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, h := both(t, PairConfig{Layout: Layout{Lanes: 2, Events: 8, Requests: 8}})
			ask(t, p, 0, "", "left")
			if !p.Arm(0) {
				t.Fatal("not armed")
			}
			c.scribble(p)
			c.find(p)
			if s := p.Stats(); !s.Broken || !errors.Is(p.Err(), ErrBroken) {
				t.Fatalf("not broken: %v", p.Err())
			}
			t.Log(p.Err())
			if !readable(t, p.Doorbell(0)) {
				t.Error("the doorbell of the lane does not ring")
			}
			p.Disarm(0)
			if p.Arm(0) {
				t.Error("armed with something to poll")
			}
			if _, err := p.Request(0, &Request{Reply: true}, nil); err != ErrBroken {
				t.Errorf("request: %v", err)
			}
			if n, err := p.Notify(make([]Request, 1)); n != 0 || err != ErrBroken {
				t.Errorf("notify: %d, %v", n, err)
			}
			if p.Event(&Event{}) {
				t.Error("event")
			}
			if rs := poll(p, 0); len(rs) != 1 || rs[0].User != "left" || !errors.Is(rs[0].Err, ErrBroken) || !errors.Is(rs[0].Err, ErrDetached) {
				t.Errorf("what was outstanding: %+v", rs)
			}
			// And it does not spin, whatever lies there.
			for lane := range 2 {
				if !p.Arm(lane) {
					t.Errorf("lane %d is not armed with nothing to poll", lane)
				}
			}
			h.requestRing.next.Store(p.requestRing.tail.Load())
			h.eventRing.next.Store(p.eventRing.tail.Load())
			if err := h.Wait(t.Context(), 0); err != ErrBroken {
				t.Errorf("application's wait: %v", err)
			}
		})
	}
}

func readable(t testing.TB, fd int) bool {
	t.Helper()
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	if _, err := unix.Poll(fds, 0); err != nil {
		t.Fatal(err)
	}
	return fds[0].Revents&unix.POLLIN != 0
}

func TestDetach(t *testing.T) {
	p, h := both(t, PairConfig{Layout: Layout{Lanes: 2, Requests: 16}})
	for i := range 10 {
		ask(t, p, i%2, "", i)
	}
	if err := h.Respond(next(t, h), 5, nil); err != nil { // of request 0
		t.Fatal(err)
	}
	for range 9 {
		next(t, h)
	}
	waited := make(chan error)
	go func() { waited <- h.Wait(context.Background(), 0) }()
	p.Detach()
	p.Detach()
	if err := <-waited; err != ErrDetached {
		t.Errorf("application's wait: %v", err)
	}
	if err := h.Wait(t.Context(), time.Hour); err != ErrDetached {
		t.Errorf("application's wait that spins: %v", err)
	}
	if err := h.WaitCounter(t.Context(), 0, 1); err != ErrDetached {
		t.Errorf("application's wait for a counter: %v", err)
	}
	if err := h.Respond(&Call{Reply: true, id: 1 << idGenShift}, 0, nil); err != ErrDetached {
		t.Errorf("respond: %v", err)
	}
	if _, err := p.Request(0, &Request{}, nil); err != ErrDetached {
		t.Errorf("request: %v", err)
	}
	if p.Event(&Event{}) {
		t.Error("event")
	}
	// What was answered is, the others are not; in bounded pieces.
	var got []any
	for lane := range 2 {
		for range 5 {
			if p.Arm(lane) {
				t.Error("armed with something to poll")
			}
			if n := p.Poll(lane, 1, func(r *Response) {
				got = append(got, r.User)
				if want := r.User != 0; errors.Is(r.Err, ErrDetached) != want || r.Tag != 7 {
					t.Errorf("response %+v", r)
				}
			}); n != 1 {
				t.Errorf("%d at a time", n)
			}
		}
		if !p.Arm(lane) || p.Poll(lane, 9, nil) != 0 {
			t.Errorf("more in lane %d", lane)
		}
		// Whoever still has the memory keeps nobody from sleeping.
		pos, _, _ := h.lanes[lane].claim(1)
		h.lanes[lane].publish(pos)
		if !p.Arm(lane) || p.Poll(lane, 9, nil) != 0 {
			t.Errorf("lane %d is kept awake by one that is detached", lane)
		}
	}
	slices.SortFunc(got, func(a, b any) int { return a.(int) - b.(int) })
	if fmt.Sprint(got) != "[0 1 2 3 4 5 6 7 8 9]" {
		t.Errorf("responses to %v", got)
	}
}

// The application can fill a lane's doorbell, and make it blocking.
func TestDetachWithFullDoorbell(t *testing.T) {
	p, _ := both(t, PairConfig{})
	ask(t, p, 0, "", nil)
	edge := edges(t, p.Doorbell(0))
	_, _, lanes := p.Descriptors()
	full := binary.NativeEndian.AppendUint64(nil, 1<<64-2)
	if n, err := unix.Write(lanes[0], full); n != 8 {
		t.Fatal(err)
	}
	if _, err := unix.Write(lanes[0], full); err != unix.EAGAIN {
		t.Fatal(err)
	}
	if err := unix.SetNonblock(lanes[0], false); err != nil {
		t.Fatal(err)
	}
	if !p.Arm(0) {
		t.Fatal("not armed")
	}
	if !edge() {
		t.Fatal("no edge of the flood")
	}
	p.Disarm(0)
	if !p.Arm(0) {
		t.Fatal("not armed")
	}
	p.Detach()
	if !edge() {
		t.Fatal("no edge of the end")
	}
}

// edges returns what tells whether a descriptor had an edge since the last time.
func edges(t *testing.T, fd int) func() bool {
	t.Helper()
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(ep) })
	if err := unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET&0xffffffff}); err != nil {
		t.Fatal(err)
	}
	return func() bool {
		var events [1]unix.EpollEvent
		n, err := unix.EpollWait(ep, events[:], 0)
		if err != nil {
			t.Fatal(err)
		}
		return n == 1
	}
}

func TestDescriptorsEndWithExec(t *testing.T) {
	p := newTestPair(t, PairConfig{Layout: Layout{Lanes: 2}})
	fds := dup(t, p.fds()...)
	for _, fd := range fds { // as they come without MSG_CMSG_CLOEXEC, or through os.File
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, 0); err != nil {
			t.Fatal(err)
		}
	}
	h, err := OpenHost(p.Layout(), fds[0], fds[1], fds[2:])
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	all := append(p.fds(), h.mem.FD(), h.doorbell, h.kick, p.ring, p.self)
	for i := range p.lanes {
		all = append(all, h.doorbells[i], p.lanes[i].edges)
	}
	for _, fd := range all {
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("descriptor %d: flags %#x, %v", fd, flags, err)
		}
	}
}

func TestPollIsOneAtATime(t *testing.T) {
	p, h := both(t, PairConfig{})
	for i := range 3 {
		ask(t, p, 0, "", i)
		if err := h.Respond(next(t, h), 0, nil); err != nil {
			t.Fatal(err)
		}
	}
	n := p.Poll(0, 1, func(r *Response) {
		if p.Poll(0, 9, func(*Response) { t.Error("two poll") }) != 0 {
			t.Error("two poll")
		}
		if _, err := p.Request(0, &Request{Reply: true}, 9); err != nil { // asks again
			t.Error(err)
		}
	})
	if n != 1 {
		t.Error(n)
	}
	// A panic loses one response and leaves the lane usable.
	func() {
		defer func() { _ = recover() }()
		p.Poll(0, 9, func(*Response) { panic("handler") })
	}()
	if rs := poll(p, 0); len(rs) != 1 || rs[0].User != 2 {
		t.Errorf("after a panic: %+v", rs)
	}
}

func TestArmAndDoorbells(t *testing.T) {
	p, h := both(t, PairConfig{})
	edge := edges(t, p.Doorbell(0))
	// The NIC sleeps.
	ask(t, p, 0, "", nil)
	if !p.Arm(0) || edge() {
		t.Fatal("nothing to poll yet")
	}
	if err := h.Respond(next(t, h), 0, nil); err != nil {
		t.Fatal(err)
	}
	if !edge() || edge() {
		t.Error("the NIC was not woken, or twice")
	}
	p.Disarm(0)
	if p.Arm(0) {
		t.Error("armed with something to poll")
	}
	poll(p, 0)
	ask(t, p, 0, "", nil)
	if err := h.Respond(next(t, h), 0, nil); err != nil || edge() {
		t.Error("the doorbell rang for a side that is awake", err)
	}
	poll(p, 0)

	// Each time is an edge, whatever was before it.
	for range 3 {
		ask(t, p, 0, "", nil)
		if !p.Arm(0) {
			t.Fatal("not armed")
		}
		if err := h.Respond(next(t, h), 0, nil); err != nil || !edge() {
			t.Error("no edge", err)
		}
		p.Disarm(0)
		poll(p, 0)
	}

	// The application sleeps, and has shown what it is done with.
	if n := p.Stats().Waiting; n != 5 {
		t.Errorf("%d waiting", n)
	}
	if !h.Arm() || readable(t, h.FD()) {
		t.Fatal("nothing there yet")
	}
	if n := p.Stats().Waiting; n != 0 {
		t.Errorf("%d waiting", n)
	}
	for range 3 {
		p.Event(&Event{Kind: MessageEnded})
	}
	if !readable(t, h.FD()) || p.Stats().Rung != 1 {
		t.Errorf("rung %d times", p.Stats().Rung)
	}
	h.Disarm()
	if readable(t, h.FD()) || h.Arm() {
		t.Error("armed with something to take, or not emptied")
	}
	for h.Event(&Event{}) {
	}
	if !h.Arm() {
		t.Error("not armed")
	}
	if _, err := p.Request(0, &Request{}, nil); err != nil || !readable(t, h.FD()) {
		t.Error("not woken for a request", err)
	}
	h.Disarm()
	h.Done(next(t, h))
	if !h.Arm() {
		t.Error("not armed")
	}
	if n, err := p.Notify(make([]Request, 5)); n != 5 || err != nil || !readable(t, h.FD()) {
		t.Error("not woken for notifications", n, err)
	}
}

func TestWait(t *testing.T) {
	p, h := both(t, PairConfig{})
	p.Event(&Event{})
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := h.Wait(ended, 0); err != nil {
		t.Errorf("with something there: %v", err)
	}
	h.Event(&Event{})
	for _, spin := range []time.Duration{0, time.Hour} {
		if err := h.Wait(ended, spin); err != context.Canceled {
			t.Errorf("with a context that has ended, spin %v: %v", spin, err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		go cancel()
		if err := h.Wait(ctx, spin); err != context.Canceled {
			t.Errorf("with a context that ends, spin %v: %v", spin, err)
		}
	}
	// Several wait, for several things, with contexts of their own.
	var wg sync.WaitGroup
	for i := range 4 {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		wg.Go(func() {
			if err := h.WaitCounter(ctx, i/2, uint64(10*(i+1))); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Go(func() {
		for range 50 {
			for !h.Event(&Event{}) {
				if err := h.Wait(t.Context(), 0); err != nil {
					t.Error(err)
					return
				}
			}
		}
	})
	for range 50 {
		p.Counter(0).Add(1)
		p.Event(&Event{})
		h.Counter(1).Add(1)
		runtime.Gosched()
	}
	wg.Wait()

	done := make(chan error)
	go func() { done <- h.Wait(t.Context(), 0) }()
	go func() { done <- h.WaitCounter(t.Context(), 5, 1) }()
	go func() { done <- h.Wait(t.Context(), time.Hour) }()
	for asleep := false; !asleep; runtime.Gosched() {
		h.mu.Lock()
		asleep = h.leader && h.others != nil
		h.mu.Unlock()
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	for range 3 {
		if err := <-done; err != os.ErrClosed {
			t.Errorf("closed while waiting: %v", err)
		}
	}
	if err := h.Wait(t.Context(), time.Hour); err != os.ErrClosed {
		t.Errorf("wait after close: %v", err)
	}
	if h.Event(&Event{}) || h.Request(&Call{}) || h.Close() != nil {
		t.Error("alive after close")
	}
}

func TestCounters(t *testing.T) {
	p, h := both(t, PairConfig{})
	c, d := p.Counter(63), h.Counter(63)
	if c.Add(5) != 5 || d.Add(2) != 7 || c.Get() != 7 || d.Get() != 7 || h.Counter(62).Get() != 0 {
		t.Error("they do not count the same")
	}
	for _, v := range []uint64{0, 6, 7} {
		if err := h.WaitCounter(t.Context(), 63, v); err != nil {
			t.Error(err)
		}
	}
	for _, i := range []int{-1, Counters} {
		if err := h.WaitCounter(t.Context(), i, 0); !errors.Is(err, spin.ErrBounds) {
			t.Errorf("counter %d: %v", i, err)
		}
	}
	for i, raise := range []func(v uint64){
		func(uint64) { c.Add(1) },
		func(uint64) { d.Add(1) },
		c.Set,
		func(v uint64) { d.Set(v + 1) },
	} {
		v := c.Get() + 1
		done := make(chan error)
		go func() { done <- h.WaitCounter(t.Context(), 63, v) }()
		for h.counters[63].s.want.Load() != v {
			runtime.Gosched()
		}
		rung := p.Stats().Rung
		c.Set(0)
		c.Set(v - 1)
		if p.Stats().Rung != rung || h.counters[63].s.want.Load() != v {
			t.Errorf("%d: rung below the value", i)
		}
		raise(v)
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if n := p.Stats().Rung; n != 2 {
		t.Errorf("rung %d times by the NIC", n)
	}
}

func TestNoAllocations(t *testing.T) {
	p, h := both(t, PairConfig{})
	r := Request{Reply: true, Payload: make([]byte, 100)}
	e := Event{Kind: MessageEnded, Source: netip.MustParseAddrPort("1.2.3.4:5")}
	batch := make([]Request, 10)
	user := new(int)
	var c Call
	f := func(*Response) {}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_ = h.WaitCounter(ctx, 1, 0)
	if n := testing.AllocsPerRun(1000, func() {
		p.Event(&e)
		h.Event(&e)
		if _, err := p.Request(0, &r, user); err != nil {
			t.Fatal(err)
		}
		p.Arm(0)
		if err := h.Wait(ctx, 0); err != nil || !h.Request(&c) || h.Respond(&c, 0, c.Payload) != nil {
			t.Fatal(err)
		}
		p.Disarm(0)
		if p.Poll(0, 10, f) != 1 {
			t.Fatal("no response")
		}
		if _, err := p.Notify(batch); err != nil {
			t.Fatal(err)
		}
		for h.Request(&c) {
			h.Done(&c)
		}
		p.Counter(0).Add(1)
	}); n != 0 {
		t.Errorf("%g allocations", n)
	}
}

// Many threads of the NIC, for some lanes each, and an application of several.
func TestManyThreads(t *testing.T) {
	const lanes, asking, n = 2, 3, 2000
	p, h := both(t, PairConfig{Layout: Layout{Lanes: lanes, Requests: 16, Events: 16, Payload: 64}})
	ctx, cancel := context.WithCancel(t.Context())
	var hosts, nics sync.WaitGroup
	var events, noted atomic.Int64
	for range 2 {
		hosts.Go(func() {
			var c Call
			var e Event
			for {
				switch {
				case h.Event(&e):
					events.Add(1 + int64(e.Lost))
				case h.Request(&c):
					if !c.Reply {
						noted.Add(1)
						h.Done(&c)
					} else if string(c.Payload) != fmt.Sprint(c.Tag) {
						t.Errorf("request %d has %q", c.Tag, c.Payload)
					} else {
						// Cancelled requests take room as well.
						err := ErrFull
						for err == ErrFull {
							err = h.Respond(&c, int32(c.Tag), c.Payload)
						}
						if err != nil {
							t.Error(err)
						}
					}
				default:
					if h.Wait(ctx, 0) != nil {
						return
					}
				}
			}
		})
	}
	var answered, cancelled atomic.Int64
	for lane := range lanes {
		for id := range asking {
			nics.Go(func() {
				for i := 0; i < n; i++ {
					if !p.Event(&Event{Kind: MessageEnded}) {
						p.LoseEvent()
					}
					tag := uint64(id)<<20 | uint64(i)
					for {
						id, err := p.Request(lane, &Request{Tag: tag, Reply: i%3 > 0, Payload: fmt.Append(nil, tag)}, tag)
						if err == nil {
							if i%64 == 1 && p.Cancel(id) {
								cancelled.Add(1)
							}
							break
						}
						if err != ErrFull {
							t.Error(err)
							return
						}
						runtime.Gosched()
					}
				}
			})
		}
		nics.Go(func() {
			for answered.Load()+cancelled.Load() < lanes*asking*(n-(n+2)/3) {
				p.Poll(lane, 8, func(r *Response) {
					answered.Add(1)
					if r.User != r.Tag || r.Status != int32(r.Tag) || string(r.Payload) != fmt.Sprint(r.Tag) || r.Err != nil {
						t.Errorf("response %+v", r)
					}
				})
				runtime.Gosched()
			}
		})
	}
	nics.Wait()
	p.Arm(0)
	for p.Stats().Waiting > 0 || p.lost.Load() > 0 {
		p.Arm(0) // tells of what was lost
		runtime.Gosched()
	}
	cancel()
	hosts.Wait()
	if events.Load() < lanes*asking*n || noted.Load() != lanes*asking*((n+2)/3) {
		t.Errorf("%d events, %d notifications", events.Load(), noted.Load())
	}
	s := p.Stats()
	if s.Bogus != 0 || s.Broken || int64(s.Responses) != answered.Load() {
		t.Errorf("stats %+v, %d answered", s, answered.Load())
	}
}
