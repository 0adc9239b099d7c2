// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/spin"
)

// fakeHost is an application in the same process, with the manners of hostq.Pair.
type fakeHost struct {
	t         testing.TB
	doorbells []int

	mu       sync.Mutex
	next     uint64
	room     int // for requests that nobody has taken
	full     int // requests that found none
	asked    []fakeRequest
	live     map[uint64]fakeRequest // that want a response
	replies  [][]hostq.Response     // by lane
	armed    []bool
	detached bool
	cancels  int
}

type fakeRequest struct {
	hostq.Request
	id   uint64
	lane int
	user any
}

func newFakeHost(t testing.TB, lanes, room int) *fakeHost {
	h := &fakeHost{t: t, room: room, live: map[uint64]fakeRequest{}, replies: make([][]hostq.Response, lanes), armed: make([]bool, lanes)}
	for range lanes {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			t.Fatal(err)
		}
		h.doorbells = append(h.doorbells, fd)
	}
	t.Cleanup(func() {
		for _, fd := range h.doorbells {
			unix.Close(fd)
		}
	})
	return h
}

func (h *fakeHost) Request(lane int, r *hostq.Request, user any) (uint64, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.detached:
		return 0, hostq.ErrDetached
	case len(h.asked) >= h.room:
		if !r.Again {
			h.full++
		}
		return 0, hostq.ErrFull
	}
	h.next++
	q := fakeRequest{Request: *r, id: h.next, lane: lane, user: user}
	q.Payload = slices.Clone(r.Payload)
	h.asked = append(h.asked, q)
	if r.Reply {
		h.live[q.id] = q
	}
	return q.id, nil
}

func (h *fakeHost) Poll(lane, most int, f func(*hostq.Response)) int {
	h.mu.Lock()
	if h.detached {
		for id, q := range h.live {
			if q.lane == lane {
				h.replies[lane] = append(h.replies[lane], hostq.Response{ID: id, Tag: q.Tag, User: q.user, Err: hostq.ErrDetached})
				delete(h.live, id)
			}
		}
	}
	list := h.replies[lane]
	n := min(len(list), most)
	h.replies[lane] = slices.Clone(list[n:])
	h.mu.Unlock()
	for i := range list[:n] {
		f(&list[i])
		clear(list[i].Payload) // good until f returns
	}
	return n
}

func (h *fakeHost) Cancel(id uint64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, ok := h.live[id]
	delete(h.live, id)
	h.cancels++
	return ok
}

func (h *fakeHost) Outstanding(lane int) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, q := range h.live {
		if q.lane == lane {
			n++
		}
	}
	return n + len(h.replies[lane])
}

func (h *fakeHost) Doorbell(lane int) int { return h.doorbells[lane] }

func (h *fakeHost) Arm(lane int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.armed[lane] = len(h.replies[lane]) == 0 && !h.detached
	return h.armed[lane]
}

func (h *fakeHost) Disarm(lane int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.armed[lane] = false
}

func (h *fakeHost) Counter(int) *hostq.Counter { return nil }

func (h *fakeHost) Detach() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.detached = true
	for lane := range h.doorbells {
		h.ring(lane)
	}
}

func (h *fakeHost) ring(lane int) {
	if h.armed[lane] {
		h.armed[lane] = false
		_, _ = unix.Write(h.doorbells[lane], []byte{1, 0, 0, 0, 0, 0, 0, 0})
	}
}

// take returns the requests that came since the last call, at least n of them.
func (h *fakeHost) take(n int) []fakeRequest {
	h.t.Helper()
	eventually(h.t, fmt.Sprintf("%d requests come", n), func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.asked) >= n
	})
	h.mu.Lock()
	defer h.mu.Unlock()
	q := h.asked
	h.asked = nil
	return q
}

// answer answers a request, and wakes its worker if it sleeps.
func (h *fakeHost) answer(q fakeRequest, status int32, payload string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.live[q.id]; !ok {
		return
	}
	delete(h.live, q.id)
	h.replies[q.lane] = append(h.replies[q.lane], hostq.Response{ID: q.id, Tag: q.Tag, Status: status, Payload: []byte(payload), User: q.user})
	h.ring(q.lane)
}

// withResources installs a context without messages.
func (r *rig) withResources(id uint16, h Handlers, res Resources) *Context {
	r.t.Helper()
	c := NewContext(id, fmt.Sprintf("ctx%d", id), h, bpf.Range{})
	if err := c.SetResources(res); err != nil {
		r.t.Fatal(err)
	}
	if err := r.Install(c); err != nil {
		r.t.Fatal(err)
	}
	return c
}

func TestContinuationRunsWithThePacket(t *testing.T) {
	r := newRig(t, rigConfig{hpus: 4, Config: Config{Workers: 2}})
	host := newFakeHost(t, 2, 100)
	var mu sync.Mutex
	ran := map[uint64]int{} // HPU of the continuation
	c := r.withResources(1, Handlers{Payload: func(h *HER) spin.Code {
		asker := h.HPU()
		if err := h.AskThen(number(h.Head()), h.Head()[14:22], func(h *HER, a *Reply) spin.Code {
			if a.Err != nil || a.Status != 5 || a.Tag != number(h.Head()) || h.HPU() != asker {
				t.Errorf("reply %+v to %d on HPU %d, asked on %d", a, number(h.Head()), h.HPU(), asker)
			}
			mu.Lock()
			ran[a.Tag]++
			mu.Unlock()
			copy(h.Head()[22:], a.Payload)
			if h.Send() != nil {
				return spin.Drop
			}
			return spin.Success
		}); err != nil {
			t.Error(err)
		}
		if h.Send() == nil || h.AskThen(0, nil, nil) == nil {
			t.Error("the packet is the continuation's")
		}
		return spin.Success
	}}, Resources{Host: host})
	const n = 50
	for i := range n {
		if r.receive(pkt{ctx: 1, hpu: i % 4, data: numbered(uint64(i), 100)}) != 1 {
			t.Fatal("no credit")
		}
	}
	var q []fakeRequest
	for len(q) < n {
		q = append(q, host.take(1)...)
	}
	if got := r.inFlight(c); got != n || len(r.wireFrames()) != 0 {
		t.Errorf("before any answer %d of %d packets are out, %d sent", got, n, len(r.wireFrames()))
	}
	for i := range q {
		host.answer(q[n-1-i], 5, fmt.Sprintf("answer to %x", q[n-1-i].Payload))
	}
	eventually(t, "all are sent", func() bool { return len(r.wireFrames()) == n })
	for _, f := range r.wireFrames() {
		want := fmt.Sprintf("answer to %016x", number(f.data))
		if got := string(f.data[22:][:len(want)]); got != want {
			t.Errorf("packet %d has %q, want %q", number(f.data), got, want)
		}
	}
	for i := range uint64(n) {
		if ran[i] != 1 {
			t.Errorf("the continuation of packet %d ran %d times", i, ran[i])
		}
	}
	eventually(t, "all is counted", func() bool { return c.Stats().Sent == n })
	if st := c.Stats(); st.Requests != n || st.Handled != n || st.Unanswered != 0 {
		t.Errorf("%+v", st)
	}
	r.settled()
}

func TestContinuationsMayAskAgain(t *testing.T) {
	r := newRig(t, rigConfig{})
	host := newFakeHost(t, 1, 100)
	var steps []uint64
	var step Then
	step = func(h *HER, a *Reply) spin.Code {
		steps = append(steps, a.Tag)
		if a.Tag == 4 {
			return spin.Success
		}
		if err := h.AskThen(a.Tag+1, nil, step); err != nil {
			t.Error(err)
		}
		return spin.Success
	}
	r.withResources(1, Handlers{Payload: func(h *HER) spin.Code {
		if err := h.AskThen(1, nil, step); err != nil {
			t.Error(err)
		}
		return spin.Success
	}}, Resources{Host: host})
	r.receive(pkt{ctx: 1, data: numbered(1, 60)})
	for range 4 {
		host.answer(host.take(1)[0], 0, "")
	}
	r.settled()
	if !slices.Equal(steps, []uint64{1, 2, 3, 4}) {
		t.Errorf("steps %v", steps)
	}
}

// The segment is acknowledged when its continuation has returned, and the message
// completes after all of them.
func TestMessageWaitsForContinuations(t *testing.T) {
	bothTables(t, func(t *testing.T, shared bool) {
		host := newFakeHost(t, 1, 100)
		b := newBench(t, benchConfig{shared: shared, rig: rigConfig{Config: Config{Workers: 1}},
			payload: func(h *HER) spin.Code {
				if err := h.AskThen(uint64(h.Offset()), nil, func(h *HER, a *Reply) spin.Code {
					if h.Offset() != uint32(a.Tag) || h.PayloadLen() != 100 {
						t.Errorf("the continuation of %d has offset %d and %d bytes", a.Tag, h.Offset(), h.PayloadLen())
					}
					if a.Tag == 100 {
						return spin.Drop
					}
					return spin.Success
				}); err != nil {
					t.Error(err)
				}
				return spin.Success
			}, resources: Resources{Host: host}})
		b.send(cut(1, 1, peerA, 300, 100)...)
		q := host.take(3)
		b.acked()
		host.answer(q[2], 0, "")
		host.answer(q[1], 0, "")
		eventually(t, "one is acknowledged", func() bool { return len(b.acks()) == 1 })
		b.acked(100)
		b.noEvent()
		host.answer(q[0], 0, "")
		if e := b.event(); e.Cause != spin.Complete || e.Length != 300 || e.Dropped != 100 {
			t.Errorf("%+v", e)
		}
		b.over()
		b.acked(100, 0, 200)
	})
}

// EOM is acknowledged, and the event sent, when the continuation of the completion
// handler has returned.
func TestCompletionWaitsForTheApplication(t *testing.T) {
	bothTables(t, func(t *testing.T, shared bool) {
		for _, good := range []bool{true, false} {
			host := newFakeHost(t, 1, 100)
			b := newBench(t, benchConfig{shared: shared,
				completion: func(c *Completion) spin.Code {
					if err := c.AskThen(9, []byte("sum?"), func(c *Completion, a *Reply) spin.Code {
						if string(a.Payload) != "42" || c.Length != 300 || c.Message().Number() != 1 {
							t.Errorf("%+v of message %d with %d bytes", a, c.Message().Number(), c.Length)
						}
						if !good {
							return spin.Fail
						}
						return spin.Success
					}); err != nil {
						t.Error(err)
					}
					return spin.Success
				}, resources: Resources{Host: host}})
			b.send(cut(1, 1, peerA, 300, 100)...)
			q := host.take(1)
			b.quiet(0)
			b.acked(0, 100)
			b.noEvent()
			host.answer(q[0], 0, "42")
			want := spin.Complete
			if !good {
				want = spin.Failed
			}
			if e := b.event(); e.Cause != want {
				t.Errorf("%+v", e)
			}
			b.over()
			if good {
				b.acked(0, 100, 200)
			} else {
				b.acked(0, 100)
			}
		}
	})
}

func TestAskWaits(t *testing.T) {
	r := newRig(t, rigConfig{Config: Config{Limit: 200 * time.Millisecond}})
	host := newFakeHost(t, 1, 100)
	got := make(chan string, 10)
	c := r.withResources(1, Handlers{Payload: func(h *HER) spin.Code {
		var dst [8]byte
		n, status, err := h.Ask(number(h.Head()), []byte("q"), dst[:])
		got <- fmt.Sprintf("%s %d %v", dst[:n], status, errors.Is(err, ErrTime))
		return spin.Success
	}}, Resources{Host: host})
	r.receive(pkt{ctx: 1, data: numbered(1, 60)})
	host.answer(host.take(1)[0], 3, "a long answer")
	if g := <-got; g != "a long a 3 false" {
		t.Error(g)
	}
	// Nobody answers: the handler is told before its time is up.
	r.receive(pkt{ctx: 1, data: numbered(2, 60)})
	late := host.take(1)
	if g := <-got; g != " 0 true" {
		t.Error(g)
	}
	host.answer(late[0], 0, "late")
	r.settled()
	if st := c.Stats(); st.Unanswered != 1 || st.Requests != 2 || c.Stopped() {
		t.Errorf("%+v", st)
	}
}

func TestApplicationThatGoesEndsAllWaiting(t *testing.T) {
	for _, how := range []string{"detach", "remove", "close"} {
		t.Run(how, func(t *testing.T) {
			r := newRig(t, rigConfig{hpus: 2, Config: Config{Workers: 2}})
			host := newFakeHost(t, 2, 100)
			var mu sync.Mutex
			gone := 0
			c := r.withResources(1, Handlers{Payload: func(h *HER) spin.Code {
				if err := h.AskThen(1, nil, func(h *HER, a *Reply) spin.Code {
					if errors.Is(a.Err, hostq.ErrDetached) {
						mu.Lock()
						gone++
						mu.Unlock()
					}
					return spin.Success
				}); err != nil {
					t.Error(err)
				}
				return spin.Success
			}}, Resources{Host: host})
			for i := range 6 {
				r.receive(pkt{ctx: 1, hpu: i % 2, data: numbered(1, 60)})
			}
			for n := 0; n < 6; {
				n += len(host.take(1))
			}
			switch how {
			case "detach":
				host.Detach()
			case "remove":
				if err := r.Drain(c, time.Second); err != nil {
					t.Error(err)
				}
			case "close":
				r.close()
				if n := r.Kept(); n != 0 {
					t.Errorf("%d packets are kept", n)
				}
			}
			eventually(t, "all continuations have run", func() bool {
				mu.Lock()
				defer mu.Unlock()
				return gone == 6
			})
			if how != "close" {
				r.settled()
			}
		})
	}
}

func TestHandlerThatFailsHasNotAsked(t *testing.T) {
	host := newFakeHost(t, 1, 100)
	b := newBench(t, benchConfig{payload: func(h *HER) spin.Code {
		if err := h.AskThen(1, nil, func(*HER, *Reply) spin.Code { t.Error("continued"); return spin.Success }); err != nil {
			t.Error(err)
		}
		return spin.Fail
	}, resources: Resources{Host: host}})
	b.send(cut(1, 1, peerA, 300, 100)...)
	if e := b.event(); e.Cause != spin.Failed {
		t.Errorf("%+v", e)
	}
	for _, q := range host.take(1) {
		host.answer(q, 0, "")
	}
	b.over()
	b.acked()
	if host.cancels != 1 {
		t.Errorf("%d requests cancelled", host.cancels)
	}
}

func TestNoRoomForRequests(t *testing.T) {
	for _, full := range []Full{FullFails, FullDrops, FullWaits} {
		t.Run(fmt.Sprint(full), func(t *testing.T) {
			r := newRig(t, rigConfig{Config: Config{Limit: 100 * time.Millisecond}})
			host := newFakeHost(t, 1, 1)
			errs := make(chan error, 10)
			c := r.withResources(1, Handlers{Payload: func(h *HER) spin.Code {
				errs <- h.Notify(1, h.Head())
				return spin.Success
			}}, Resources{Host: host, Full: full})
			for range 2 {
				r.receive(pkt{ctx: 1, data: numbered(1, 60)})
			}
			if err := <-errs; err != nil {
				t.Error(err)
			}
			err := <-errs
			want := map[Full]error{FullFails: ErrFull, FullDrops: nil, FullWaits: ErrTime}[full]
			if !errors.Is(err, want) {
				t.Errorf("%v, want %v", err, want)
			}
			r.settled()
			if st := c.Stats(); st.Requests != 1 || st.Unasked != 1 || c.Stopped() {
				t.Errorf("%+v", st)
			}
			if host.full != 1 {
				t.Errorf("one request counts as %d that found no room", host.full)
			}
		})
	}
}

// A batch of packets asks an application that takes nothing, and waits for room once.
func TestNoRoomIsWaitedForOnce(t *testing.T) {
	const limit = 200 * time.Millisecond
	r := newRig(t, rigConfig{Config: Config{Limit: limit}})
	host := newFakeHost(t, 1, 1)
	errs := make(chan error, 100)
	c := r.withResources(1, Handlers{Payload: func(h *HER) spin.Code {
		errs <- h.Notify(1, h.Head())
		return spin.Success
	}}, Resources{Host: host, Full: FullWaits})
	send := func(n int) (late, full int) {
		t.Helper()
		var batch []pkt
		for range n {
			batch = append(batch, pkt{ctx: 1, data: numbered(1, 60)})
		}
		r.receive(batch...)
		for range n {
			switch err := <-errs; {
			case errors.Is(err, ErrTime):
				late++
			case errors.Is(err, ErrFull):
				full++
			case err != nil:
				t.Error(err)
			}
		}
		return late, full
	}
	if late, full := send(1); late+full != 0 {
		t.Fatal("there was room for one")
	}
	if late, full := send(20); late != 1 || full != 19 {
		t.Errorf("%d handlers have waited in vain and %d not at all, want 1 and 19", late, full)
	}
	if late, full := send(20); late != 0 || full != 20 {
		t.Errorf("again: %d handlers have waited in vain and %d not at all", late, full)
	}
	// The application takes something: it is worth waiting for again.
	host.take(1)
	if late, full := send(2); late != 1 || full != 0 {
		t.Errorf("after there was room: %d handlers have waited in vain and %d not at all, want 1 and 0", late, full)
	}
	r.settled()
	if st := c.Stats(); st.Requests != 2 || st.Unasked != 41 || c.Stopped() {
		t.Errorf("%+v", st)
	}
}

func TestWhereNobodyCanAsk(t *testing.T) {
	host := newFakeHost(t, 1, 100)
	var errs []error
	b := newBench(t, benchConfig{header: func(h *HER) spin.Code {
		errs = append(errs, h.AskThen(1, nil, nil))
		return spin.Success
	}, resources: Resources{Host: host}})
	b.send(cut(1, 1, peerA, 100, 100)...)
	b.event()
	b.over()
	if len(errs) != 1 || !errors.Is(errs[0], ErrHere) {
		t.Error(errs)
	}
	r := newRig(t, rigConfig{})
	none := make(chan error, 1)
	r.withResources(1, Handlers{Payload: func(h *HER) spin.Code { none <- h.Notify(1, nil); return spin.Success }}, Resources{})
	r.receive(pkt{ctx: 1, data: numbered(1, 60)})
	if err := <-none; !errors.Is(err, ErrNoHost) {
		t.Error(err)
	}
}

// A continuation that does not return is given up like any other handler.
func TestContinuationThatHangs(t *testing.T) {
	r := newRig(t, rigConfig{Config: Config{Limit: 20 * time.Millisecond}})
	host := newFakeHost(t, 1, 100)
	release := make(chan struct{})
	c := r.withResources(1, Handlers{Payload: func(h *HER) spin.Code {
		if err := h.AskThen(1, nil, func(h *HER, a *Reply) spin.Code { <-release; return spin.Success }); err != nil {
			t.Error(err)
		}
		return spin.Success
	}}, Resources{Host: host})
	for range 3 {
		r.receive(pkt{ctx: 1, data: numbered(1, 60)})
	}
	for _, q := range host.take(3) {
		host.answer(q, 0, "")
	}
	eventually(t, "the context is stopped", c.Stopped)
	close(release)
	r.settled()
}

func TestAskingCostsNoAllocation(t *testing.T) {
	r := newRig(t, rigConfig{})
	host := &quickHost{fakeHost: newFakeHost(t, 1, 100)}
	then := func(h *HER, a *Reply) spin.Code { return spin.Success }
	r.withResources(1, Handlers{Payload: func(h *HER) spin.Code {
		_ = h.AskThen(1, h.Head(), then)
		return spin.Success
	}}, Resources{Host: host})
	data := numbered(1, 60)
	one := func() {
		r.receive(pkt{ctx: 1, data: data})
		for !r.idle() {
			time.Sleep(10 * time.Microsecond)
		}
	}
	for range 100 {
		one()
	}
	bare := newRig(t, rigConfig{})
	bare.install(1, func(*HER) spin.Code { return spin.Success })
	base := testing.AllocsPerRun(300, func() {
		bare.receive(pkt{ctx: 1, data: data})
		for !bare.idle() {
			time.Sleep(10 * time.Microsecond)
		}
	})
	if n := testing.AllocsPerRun(300, one) - base; n >= 1 {
		t.Errorf("%v allocations for a request", n)
	}
}

// quickHost answers at once, without allocating.
type quickHost struct {
	*fakeHost
	user any
	resp hostq.Response
}

func (h *quickHost) Request(_ int, r *hostq.Request, user any) (uint64, error) {
	h.user = user
	return 1, nil
}

func (h *quickHost) Poll(_, _ int, f func(*hostq.Response)) int {
	if h.user == nil {
		return 0
	}
	h.resp = hostq.Response{ID: 1, User: h.user}
	h.user = nil
	f(&h.resp)
	return 1
}

func (h *quickHost) Outstanding(int) int { return 1 }

func (h *quickHost) Arm(int) bool { return h.user == nil }

// A handler that is given up while it asks: its successor polls the same lane, and each
// gets its own answers.
func TestTwoThreadsAskOnOneLane(t *testing.T) {
	r := newRig(t, rigConfig{Config: Config{Limit: 20 * time.Millisecond}})
	host := newFakeHost(t, 1, 100)
	stuck := make(chan struct{})
	old := r.withResources(1, Handlers{Payload: func(h *HER) spin.Code {
		<-stuck // past its time
		if n, _, err := h.Ask(1, nil, make([]byte, 8)); err == nil {
			t.Errorf("a handler that was given up got %d bytes", n)
		}
		return spin.Success
	}}, Resources{Host: host})
	got := make(chan string, 100)
	r.withResources(2, Handlers{Payload: func(h *HER) spin.Code {
		var dst [8]byte
		n, _, err := h.Ask(number(h.Head()), nil, dst[:])
		got <- fmt.Sprintf("%s %v", dst[:n], err)
		return spin.Success
	}}, Resources{Host: host})
	r.receive(pkt{ctx: 1, data: numbered(1, 60)})
	eventually(t, "the first context is stopped", old.Stopped)
	close(stuck)
	for i := range uint64(20) {
		r.receive(pkt{ctx: 2, data: numbered(100+i, 60)})
		for answered := false; !answered; {
			for _, q := range host.take(1) {
				if q.Tag >= 100 {
					host.answer(q, 0, fmt.Sprint(q.Tag))
					answered = true
				}
			}
		}
		if g, want := <-got, fmt.Sprintf("%d <nil>", 100+i); g != want {
			t.Errorf("got %q, want %q", g, want)
		}
	}
	r.settled()
}
