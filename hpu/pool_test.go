// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/spin"
	"github.com/xspin/xspin/xsk"
)

// shortLimit is a time limit for handlers that get stuck, and still long enough
// for the others on a busy machine.
const shortLimit = 25 * time.Millisecond

func swallow(*HER) spin.Code { return spin.Success }

func echo(h *HER) spin.Code {
	if err := h.Send(); err != nil {
		return spin.Drop
	}
	return spin.Success
}

func TestPacketsOfAnHPUAreHandledInOrderAndTheirFramesGoRound(t *testing.T) {
	for _, wait := range []Wait{Adaptive, Sleep, Spin} {
		t.Run(wait.String(), func(t *testing.T) {
			r := newRig(t, rigConfig{queues: 2, hpus: 3, Config: Config{Workers: 2, Wait: wait}})
			var next [2][3]atomic.Uint64
			c := r.install(7, func(h *HER) spin.Code {
				if got, want := number(h.Head()), next[h.port.queue][h.HPU()].Add(1); got != want {
					t.Errorf("packet %d comes as number %d", got, want)
				}
				return echo(h)
			})
			const each = 1000 // several times the frames of a queue
			for i := range uint64(each) {
				for q := range 2 {
					for h := range 3 {
						p := pkt{queue: q, hpu: h, ctx: 7, data: numbered(i+1, 64)}
						for r.receive(p) == 0 {
							runtime.Gosched() // out of credit
						}
					}
				}
			}
			r.settled()
			if st := c.Stats(); st.Handled != 6*each || st.Sent != 6*each || st.Lost+st.SendFull != 0 {
				t.Errorf("handled %d, sent %d, lost %d, full %d; want %d, %[5]d, 0, 0", st.Handled, st.Sent, st.Lost, st.SendFull, 6*each)
			}
			if n := len(r.wireFrames()); n != 6*each {
				t.Errorf("%d frames on the wire, want %d", n, 6*each)
			}
			hpus, _ := r.Stats()
			for _, s := range hpus {
				if s.Handled != 2*each || s.Occupancy != 0 || s.Batches == 0 || s.Busy <= 0 {
					t.Errorf("HPU %d: %+v", s.HPU, s)
				}
			}
		})
	}
}

func TestCreditReturnsWhenASendIsCompleteAndNotBefore(t *testing.T) {
	r := newRig(t, rigConfig{})
	r.kernel.queues[0].hold = true
	c := r.install(1, echo)
	r.receive(pkt{ctx: 1, data: numbered(1, 64)})
	eventually(t, "the frame is on the wire", func() bool { return len(r.wireFrames()) == 1 })
	time.Sleep(5 * time.Millisecond)
	if r.Idle(c) {
		t.Error("credit is back while the frame is on the wire")
	}
	r.with(func() { r.kernel.queues[0].hold = false })
	r.settled()
}

func TestAFullTxRingIsAResultAndNothingIsLost(t *testing.T) {
	r := newRig(t, rigConfig{txSize: 8})
	for _, ring := range r.kernel.queues[0].rings {
		ring.down = true
	}
	var sent, full atomic.Int64
	c := r.install(1, func(h *HER) spin.Code {
		switch err := h.Send(); {
		case err == nil:
			sent.Add(1)
		case errors.Is(err, ErrFull):
			full.Add(1)
		default:
			t.Error(err)
		}
		return spin.Success
	})
	var ps []pkt
	for i := range 12 {
		ps = append(ps, pkt{ctx: 1, data: numbered(uint64(i), 64)})
	}
	r.receive(ps...)
	eventually(t, "all are handled", func() bool { return c.Stats().Handled == 12 })
	if sent.Load() != 8 || full.Load() != 4 {
		t.Errorf("%d sent, %d refused; want 8 and 4", sent.Load(), full.Load())
	}
	r.with(func() { r.kernel.queues[0].rings[0].down = false })
	r.settled()
	if st := c.Stats(); st.Sent != 8 || st.SendFull != 4 || len(r.wireFrames()) != 8 {
		t.Errorf("stats say %d sent and %d refused, %d on the wire", st.Sent, st.SendFull, len(r.wireFrames()))
	}
}

func TestADeadLinkCostsFewKicks(t *testing.T) {
	r := newRig(t, rigConfig{})
	ring := r.kernel.queues[0].rings[0]
	ring.down = true
	r.install(1, echo)
	begin := time.Now()
	r.receive(pkt{ctx: 1, data: numbered(1, 64)})
	const kicks = 12
	eventually(t, "the ring is kicked again and again", func() (ok bool) {
		r.with(func() { ok = ring.kicks >= kicks })
		return ok
	})
	took := time.Since(begin)
	n := 0
	r.with(func() { n, ring.down = ring.kicks, false })
	// Pauses double from soon to later. How many kicks there can be in a time is bounded
	// by them, however slow the machine is.
	pauses := time.Duration(0)
	for i, nap := 0, soon; i < kicks-2; i, nap = i+1, min(2*nap, later) {
		pauses += time.Duration(nap) * time.Millisecond
	}
	if took < pauses/2 {
		t.Errorf("%d kicks in %v: %v of pauses belong between %d", n, took, pauses, kicks)
	}
	r.settled()
}

func TestADeviceThatTakesNothingIsNotKickedInALoop(t *testing.T) {
	r := newRig(t, rigConfig{})
	ring := r.kernel.queues[0].rings[0]
	ring.budget = 0
	c := r.install(1, echo)
	r.receive(pkt{ctx: 1, data: numbered(1, 64)})
	eventually(t, "the packet is handled", func() bool { return c.Stats().Handled == 1 })
	r.with(func() {
		if ring.kicks > 20 {
			t.Errorf("%d kicks for one frame that does not go", ring.kicks)
		}
		ring.budget = 1
	})
	r.settled()
}

func TestSendNewGoesAheadAndAFailedHandlerSendsNothing(t *testing.T) {
	r := newRig(t, rigConfig{})
	c := r.install(1, func(h *HER) spin.Code {
		n := number(h.Head())
		for range 2 {
			b, err := h.SendNew(64)
			if err != nil {
				t.Error(err)
				return spin.Drop
			}
			copy(b, numbered(1000+n, 64))
		}
		if err := h.Send(); err != nil {
			t.Error(err)
		}
		switch n {
		case 2:
			return spin.Fail
		case 3:
			panic("three")
		}
		return spin.Success
	})
	var ps []pkt
	for i := range uint64(5) {
		ps = append(ps, pkt{ctx: 1, data: numbered(i, 64)})
	}
	r.receive(ps...)
	r.settled()
	var got []uint64
	for _, f := range r.wireFrames() {
		got = append(got, number(f.data))
	}
	if want := []uint64{1000, 1000, 0, 1001, 1001, 1, 1004, 1004, 4}; !slices.Equal(got, want) {
		t.Errorf("sent %v, want %v", got, want)
	}
	st := c.Stats()
	if st.Handled != 4 || st.Failed != 1 || st.Panics != 1 || st.Sent != 9 {
		t.Errorf("handled %d, failed %d, panics %d, sent %d; want 4, 1, 1, 9", st.Handled, st.Failed, st.Panics, st.Sent)
	}
	var kinds []spin.FaultKind
	for e := range r.Events() {
		kinds = append(kinds, e.Kind)
		if e.Kind == spin.HandlerPanic && !strings.HasPrefix(e.Detail, "three\n") {
			t.Errorf("event says %q", e)
		}
	}
	if want := []spin.FaultKind{spin.HandlerFailed, spin.HandlerPanic}; !slices.Equal(kinds, want) {
		t.Errorf("events %v, want %v", kinds, want)
	}
}

func TestRoomOfAFailedHandlerGoesToTheNext(t *testing.T) {
	r := newRig(t, rigConfig{txSize: 3})
	c := r.install(1, func(h *HER) spin.Code {
		for range 2 {
			if b, err := h.SendNew(64); err == nil {
				clear(b)
			}
		}
		_ = h.Send()
		if number(h.Head()) == 0 {
			return spin.Fail
		}
		return spin.Success
	})
	r.receive(pkt{ctx: 1, data: numbered(0, 64)}, pkt{ctx: 1, data: numbered(1, 64)}, pkt{ctx: 1, data: numbered(2, 64)})
	r.settled()
	if st := c.Stats(); st.Sent != 3 || st.SendFull != 3 {
		t.Errorf("sent %d, refused %d; want 3, 3", st.Sent, st.SendFull)
	}
}

func TestATakeoverKeepsTheRoomThatWasReserved(t *testing.T) {
	r := newRig(t, rigConfig{txSize: 5, Config: Config{Limit: shortLimit}})
	release := make(chan struct{})
	r.install(1, func(*HER) spin.Code { <-release; return spin.Success })
	c := r.install(2, func(h *HER) spin.Code {
		if b, err := h.SendNew(64); err == nil {
			clear(b)
		}
		return echo(h)
	})
	var ps []pkt
	for i := range uint64(4) {
		ps = append(ps, pkt{ctx: 2, data: numbered(i, 64)})
	}
	ps[1].ctx = 1
	r.receive(ps...)
	eventually(t, "the others are handled", func() bool { return c.Stats().Handled == 2 && r.Stuck() == 1 })
	close(release)
	r.settled()
	if st := c.Stats(); st.Sent != 5 || st.SendFull != 1 || len(r.wireFrames()) != 5 {
		t.Errorf("counted %d sent and %d refused, %d on the wire; want 5, 1, 5", st.Sent, st.SendFull, len(r.wireFrames()))
	}
}

func TestSendNewRunsOutOfFramesAndOfPlaces(t *testing.T) {
	for _, tc := range []struct {
		name  string
		spare int
		want  int
	}{
		{"spare frames run out", 5, 5},
		{"places of a batch run out", 128, spareCache},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, rigConfig{spare: tc.spare})
			var made atomic.Int64
			r.install(1, func(h *HER) spin.Code {
				for {
					b, err := h.SendNew(14)
					if err != nil {
						if !errors.Is(err, ErrFrames) {
							t.Error(err)
						}
						return spin.Success
					}
					clear(b)
					made.Add(1)
				}
			})
			r.receive(pkt{ctx: 1, data: numbered(0, 64)})
			r.settled()
			if int(made.Load()) != tc.want {
				t.Errorf("%d frames made, want %d", made.Load(), tc.want)
			}
		})
	}
}

func TestSizesThatNoFrameHasAreRefused(t *testing.T) {
	r := newRig(t, rigConfig{})
	r.install(1, func(h *HER) spin.Code {
		for _, n := range []int{-1, 0, 13, 2049} {
			if _, err := h.SendNew(n); !errors.Is(err, ErrSize) {
				t.Errorf("SendNew(%d): %v", n, err)
			}
		}
		for _, n := range []int{-1, 0, 13, 65} {
			if err := h.Truncate(n); !errors.Is(err, ErrSize) {
				t.Errorf("Truncate(%d) of 64: %v", n, err)
			}
		}
		if err := h.Truncate(14); err != nil || h.Len() != 14 || len(h.Head()) != 14 {
			t.Errorf("Truncate(14): %v, %d bytes", err, h.Len())
		}
		if err := h.ToStack(); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("ToStack without a stack: %v", err)
		}
		return spin.Success
	})
	r.receive(pkt{ctx: 1, data: numbered(0, 64)})
	r.settled()
	r2 := newRig(t, rigConfig{})
	for _, n := range []int{0, 13, 2049} {
		if err := r2.Transmit(make([]byte, n)); !errors.Is(err, ErrSize) {
			t.Errorf("Transmit of %d bytes: %v", n, err)
		}
	}
}

func TestFramesOfSeveralBuffers(t *testing.T) {
	whole := numbered(9, 3000)
	for _, tc := range []struct {
		name string
		do   func(h *HER) int // how many bytes are sent
	}{
		{"come back whole", func(h *HER) int { return 3000 }},
		{"end inside the last buffer", func(h *HER) int { return 2500 }},
		{"end inside the middle buffer", func(h *HER) int { return 1500 }},
		{"end with the first buffer", func(h *HER) int { return 1000 }},
		{"end inside the first buffer", func(h *HER) int { return 20 }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, rigConfig{})
			var want int
			r.install(1, func(h *HER) spin.Code {
				if h.Len() != 3000 || h.Segments() != 3 {
					t.Errorf("%d bytes in %d buffers", h.Len(), h.Segments())
				}
				got := make([]byte, 1500)
				if n := h.CopyTo(got, 900); n != 1500 || !bytes.Equal(got, whole[900:2400]) {
					t.Errorf("CopyTo copied %d bytes, or other ones", n)
				}
				want = tc.do(h)
				if err := h.Truncate(want); err != nil {
					t.Error(err)
				}
				return echo(h)
			})
			small := numbered(1, 64)
			r.receive(pkt{ctx: 1, data: whole, segs: 3}, pkt{ctx: 2, data: small})
			r.settled()
			if f := r.wireFrames(); len(f) != 1 || !bytes.Equal(f[0].data, whole[:want]) {
				t.Errorf("%d frames sent, or other bytes", len(f))
			}
		})
	}
}

func TestAFrameMayGoOnInTheNextReceive(t *testing.T) {
	for left := 1; left <= 4; left++ {
		r := newRig(t, rigConfig{})
		var got []int
		c := r.install(1, func(h *HER) spin.Code {
			got = append(got, h.Segments())
			return echo(h)
		})
		ring := r.kernel.queues[0].rings[0]
		var rest []xsk.Desc
		r.with(func() {
			r.receiveOne(&pkt{ctx: 1, data: numbered(1, 64)})
			r.receiveOne(&pkt{ctx: 1, data: numbered(2, 5000), segs: 5})
			rest = r.split(ring, left)
		})
		eventually(t, "the packet in front is handled", func() bool { return c.Stats().Handled == 1 })
		for i, d := range rest { // one by one
			r.with(func() { ring.push(d) })
			if i < len(rest)-1 {
				eventually(t, "it is taken", func() bool { return ring.RxAvailable() == 0 })
			}
		}
		r.settled()
		if !slices.Equal(got, []int{1, 5}) {
			t.Errorf("handlers saw frames of %v buffers", got)
		}
		if f := r.wireFrames(); len(f) != 2 || !bytes.Equal(f[1].data, numbered(2, 5000)) {
			t.Error("the frame was not put together")
		}
	}
}

func TestAnEndlessFrameIsGivenBack(t *testing.T) {
	r := newRig(t, rigConfig{})
	r.kernel.free = true
	c := r.install(1, echo)
	r.with(func() {
		r.receiveOne(&pkt{foreign: true, data: make([]byte, 100), segs: 100})
		r.receiveOne(&pkt{ctx: 1, data: numbered(1, 64)})
	})
	r.settled()
	if st := c.Stats(); st.Handled != 1 {
		t.Errorf("the packet behind it was handled %d times", st.Handled)
	}
}

func TestForeignFramesGoBackWithoutAHandler(t *testing.T) {
	r := newRig(t, rigConfig{})
	r.kernel.free = true
	c := r.install(0, swallow)
	r.receive(pkt{foreign: true, data: numbered(1, 64)}, pkt{data: numbered(2, 64)}, pkt{foreign: true, data: numbered(3, 300), segs: 3})
	eventually(t, "all are back", func() bool {
		n := 0
		r.with(func() { n = len(r.kernel.queues[0].fill) })
		return n == 256
	})
	r.settled()
	if st := c.Stats(); st.Handled != 1 {
		t.Errorf("%d handled, want the one with metadata", st.Handled)
	}
}

func TestPacketsOfNoContextGoBack(t *testing.T) {
	r := newRig(t, rigConfig{})
	none := NewContext(3, "none", Handlers{}, bpf.Range{})
	if err := r.Install(none); err != nil {
		t.Fatal(err)
	}
	r.receive(pkt{ctx: 2, data: numbered(1, 64)}, pkt{ctx: 3, data: numbered(1, 64)})
	r.settled()
	if st := none.Stats(); st.Unrun != 1 {
		t.Errorf("%d not run, want 1", st.Unrun)
	}
}

func TestKeptPacketsHoldTheirCreditUntilReleased(t *testing.T) {
	r := newRig(t, rigConfig{hpus: 2, Config: Config{Workers: 2}})
	kept := make(chan *Kept, 64)
	c := r.install(1, func(h *HER) spin.Code {
		k, err := h.Keep()
		if err != nil {
			t.Error(err)
			return spin.Drop
		}
		if err := h.Send(); !errors.Is(err, ErrTwice) {
			t.Errorf("send of what is kept: %v", err)
		}
		if _, err := h.Keep(); !errors.Is(err, ErrTwice) {
			t.Errorf("keep of what is kept: %v", err)
		}
		kept <- k
		return spin.Success
	}, bpf.Range{Base: 64, Size: 16})
	b := bpf.Range{Base: 64, Size: 16}
	for i := range 16 {
		r.receive(pkt{hpu: i % 2, ctx: 1, data: numbered(uint64(i), 1000), segs: 1 + i%3, bucket: &b, hash: uint32(i)})
	}
	var all []*Kept
	for range 16 {
		all = append(all, <-kept)
	}
	eventually(t, "the batches are over", func() bool { return c.Stats().Handled == 16 })
	if r.Idle(c) {
		t.Error("credit is back while packets are kept")
	}
	var wg sync.WaitGroup
	for _, k := range all {
		wg.Add(1)
		go func() {
			defer wg.Done()
			var data []byte
			for i := range k.Segments() {
				data = append(data, k.Segment(i)...)
			}
			if k.Len() != 1000 || !bytes.Equal(data, numbered(number(data), 1000)) {
				t.Error("a kept packet is not what came")
			}
			part := make([]byte, 400)
			if n := k.CopyTo(part, 500); n != 400 || !bytes.Equal(part, data[500:900]) {
				t.Errorf("CopyTo copied %d bytes, or other ones", n)
			}
			if n := k.CopyTo(part, 990); n != 10 {
				t.Errorf("CopyTo copied %d bytes of the last 10", n)
			}
			k.Release()
			k.Release()
			if k.Segment(0) != nil || k.CopyTo(part, 0) != 0 {
				t.Error("bytes of a released packet")
			}
		}()
	}
	wg.Wait()
	r.settled()
}

func TestAHandlerThatFailsKeepsNothing(t *testing.T) {
	for _, tc := range []struct {
		name     string
		end      func() spin.Code
		released bool // by the handler
		kept     int
	}{
		{name: "it succeeds", end: func() spin.Code { return spin.Success }, kept: 1},
		{name: "it drops", end: func() spin.Code { return spin.Drop }, kept: 1},
		{name: "it fails", end: func() spin.Code { return spin.Fail }},
		{name: "it panics", end: func() spin.Code { panic("kept") }},
		{name: "it succeeds and has released", end: func() spin.Code { return spin.Success }, released: true},
		{name: "it fails and has released", end: func() spin.Code { return spin.Fail }, released: true},
		{name: "it panics and has released", end: func() spin.Code { panic("released") }, released: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := bpf.Range{Base: 64, Size: 16}
			r := newRig(t, rigConfig{})
			var k *Kept
			c := r.install(1, func(h *HER) spin.Code {
				var err error
				if k, err = h.Keep(); err != nil {
					t.Error(err)
				}
				if tc.released {
					k.Release()
				}
				return tc.end()
			}, b)
			r.receive(pkt{ctx: 1, data: numbered(1, 3000), segs: 3, bucket: &b})
			eventually(t, "the handler has ended", func() bool { s := c.Stats(); return s.Handled+s.Panics == 1 })
			if tc.kept == 0 {
				eventually(t, "the credit is back", func() bool { return r.Idle(c) })
			} else if r.Idle(c) {
				t.Error("credit of a kept packet is back")
			}
			if n := r.Kept(); n != tc.kept {
				t.Errorf("%d kept, want %d", n, tc.kept)
			}
			if (k.Segment(0) != nil) != (tc.kept == 1) {
				t.Errorf("segment has %d bytes", len(k.Segment(0)))
			}
			k.Release()
			if n := r.Kept(); n != 0 {
				t.Errorf("%d kept after Release, want 0", n)
			}
			r.settled()
		})
	}
}

func TestReleaseAndTransmitAfterCloseDoNothing(t *testing.T) {
	r := newRig(t, rigConfig{})
	kept := make(chan *Kept, 1)
	r.install(1, func(h *HER) spin.Code {
		k, _ := h.Keep()
		kept <- k
		return spin.Success
	})
	r.receive(pkt{ctx: 1, data: numbered(1, 64)})
	k := <-kept
	r.close()
	// Somebody else's file gets the number that was the waker's.
	waker := r.workers[0].waker
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if fd != waker {
		if err := unix.Dup3(fd, waker, unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
		defer unix.Close(waker)
	}
	k.Release()
	if err := r.Transmit(make([]byte, 64)); !errors.Is(err, errClosed) {
		t.Errorf("transmit after close: %v", err)
	}
	r.wake()
	r.Close() // again
	var b [8]byte
	if _, err := unix.Read(fd, b[:]); err != unix.EAGAIN {
		t.Errorf("somebody wrote to a file of others: %v", err)
	}
}

func TestStuckHandlerIsGivenUpInTheMiddleOfABatch(t *testing.T) {
	for _, tc := range []struct {
		name string
		do   func(h *HER) // before it gets stuck
		then spin.Code
		boom bool
	}{
		{name: "and returns later", do: func(*HER) {}},
		{name: "after Send", do: func(h *HER) { _ = h.Send() }},
		{name: "after SendNew", do: func(h *HER) { _, _ = h.SendNew(64); _, _ = h.SendNew(64) }},
		{name: "after SendNew and Send, and fails", do: func(h *HER) { _, _ = h.SendNew(64); _ = h.Send() }, then: spin.Fail},
		{name: "and panics later", do: func(h *HER) { _, _ = h.SendNew(64) }, boom: true},
		{name: "after Keep, and fails", do: func(h *HER) { _, _ = h.Keep() }, then: spin.Fail},
		{name: "after Keep, and panics later", do: func(h *HER) { _, _ = h.Keep() }, boom: true},
		{name: "after Keep and Release", do: func(h *HER) {
			k, _ := h.Keep()
			k.Release()
		}},
	} {
		for _, at := range []int{0, 3, 7} { // first, middle, last
			t.Run(fmt.Sprintf("%s, packet %d", tc.name, at), func(t *testing.T) {
				procs := runtime.GOMAXPROCS(0)
				r := newRig(t, rigConfig{Config: Config{Limit: shortLimit}})
				release := make(chan struct{})
				bad := r.install(1, func(h *HER) spin.Code {
					tc.do(h)
					<-release
					// Whatever it does now must not be seen by anybody.
					_ = h.Send()
					_, _ = h.SendNew(100)
					_ = h.Truncate(20)
					h.Count(0, 1)
					if h.action != keep && !bytes.Equal(h.Head(), numbered(uint64(at), 600)[:20]) {
						t.Error("the packet has changed under its handler")
					}
					if tc.boom {
						panic("late")
					}
					return tc.then
				})
				var order []uint64
				var mu sync.Mutex
				good := r.install(2, func(h *HER) spin.Code {
					mu.Lock()
					order = append(order, number(h.Head()))
					mu.Unlock()
					if b, err := h.SendNew(64); err == nil {
						copy(b, numbered(100+number(h.Head()), 64))
					}
					return echo(h)
				})
				var ps []pkt
				for i := range 8 {
					p := pkt{ctx: 2, data: numbered(uint64(i), 600), segs: 1 + i%3}
					if i == at {
						p.ctx = 1
					}
					ps = append(ps, p)
				}
				r.receive(ps...)
				eventually(t, "the others are handled", func() bool { return len(r.wireFrames()) == 14 })
				if !bad.Stopped() || good.Stopped() || r.Stuck() != 1 {
					t.Errorf("stopped: %v and %v, stuck %d; want true, false, 1", bad.Stopped(), good.Stopped(), r.Stuck())
				}
				// More traffic goes through the buffers that the batch was in.
				for i := range 200 {
					for r.receive(pkt{ctx: 2, data: numbered(uint64(8+i), 64)}) == 0 {
						runtime.Gosched()
					}
				}
				r.receive(pkt{ctx: 1, data: numbered(1, 64)}) // of the stopped context
				eventually(t, "these are handled too", func() bool { return len(r.wireFrames()) == 414 || good.Stopped() })
				eventually(t, "the stopped context's packet is not", func() bool { return bad.Stats().Unrun == 1 })
				eventually(t, "the good context is idle", func() bool { return r.Idle(good) })
				if tc.name != "after Keep and Release" && r.Idle(bad) {
					t.Error("credit of the stuck packet is back")
				}
				close(release)
				r.settled()
				if good.Stopped() {
					t.Error("a context that did nothing wrong was stopped")
				}
				want := uint64(0)
				for _, n := range order {
					if want == uint64(at) {
						want++
					}
					if n != want {
						t.Fatalf("order %v", order)
					}
					want++
				}
				st := bad.Stats()
				if st.Overruns != 1 || st.Sent != 0 || st.User[0].Count != 1 {
					t.Errorf("overruns %d, sent %d, counted %d; want 1, 0, 1", st.Overruns, st.Sent, st.User[0].Count)
				}
				if now := runtime.GOMAXPROCS(0); now != procs {
					t.Errorf("GOMAXPROCS is %d, was %d", now, procs)
				}
			})
		}
	}
}

func TestSeveralStuckHandlersOfOneBatch(t *testing.T) {
	r := newRig(t, rigConfig{Config: Config{Limit: shortLimit}})
	release := make(chan struct{})
	var ps []pkt
	for id := range uint16(6) {
		r.install(id, func(h *HER) spin.Code {
			_, _ = h.SendNew(64)
			if id%2 == 1 {
				<-release
			}
			return echo(h)
		})
		ps = append(ps, pkt{ctx: id, data: numbered(uint64(id), 64)})
	}
	r.receive(ps...)
	eventually(t, "three are given up and three answered", func() bool {
		return r.Stuck() == 3 && len(r.wireFrames()) == 6
	})
	close(release)
	r.settled()
}

func TestManyTakeoversUnderTraffic(t *testing.T) {
	// Handlers that take about as long as they may: returns and takeovers race.
	r := newRig(t, rigConfig{hpus: 2, Config: Config{Workers: 2, Limit: time.Millisecond}})
	var contexts []*Context
	for id := range uint16(64) {
		contexts = append(contexts, r.install(id, func(h *HER) spin.Code {
			n := number(h.Head())
			if n%16 == 0 {
				time.Sleep(time.Duration(500+n%1500) * time.Microsecond)
			}
			if n%3 == 0 {
				if b, err := h.SendNew(64); err == nil {
					clear(b)
				}
			}
			if n%5 == 0 {
				if k, err := h.Keep(); err == nil {
					go k.Release()
				}
				return spin.Success
			}
			return echo(h)
		}))
	}
	for id := range contexts {
		r.share.Credit[id] = 4
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range 3000 {
		p := pkt{hpu: i % 2, ctx: uint16(rng.IntN(64)), data: numbered(rng.Uint64N(1<<30), 900), segs: 1 + rng.IntN(3)}
		for end := time.Now().Add(patience); r.receive(p) == 0; runtime.Gosched() {
			if time.Now().After(end) {
				t.Fatal("no credit comes back")
			}
		}
	}
	r.settled()
	var sum spin.ContextStats
	for _, c := range contexts {
		st := c.Stats()
		sum.Add(&st)
	}
	// An overrun whose handler returned after all is counted as handled too.
	if sum.Handled+sum.Unrun < 3000-sum.Overruns || sum.Handled+sum.Unrun > 3000 {
		t.Errorf("%d handled, %d not run, %d overruns of 3000", sum.Handled, sum.Unrun, sum.Overruns)
	}
	if got := uint64(len(r.wireFrames())); got != sum.Sent {
		t.Errorf("%d frames on the wire, counted %d", got, sum.Sent)
	}
}

func TestCloseDoesNotWaitForAStuckHandlerNorTrafficToEnd(t *testing.T) {
	r := newRig(t, rigConfig{Config: Config{Limit: shortLimit}})
	release := make(chan struct{})
	r.install(1, func(h *HER) spin.Code {
		<-release
		panic("after Close")
	})
	c := r.install(2, func(h *HER) spin.Code { // the ring is never empty
		r.receive(pkt{ctx: 2, data: numbered(1, 64)})
		return echo(h)
	})
	r.share.Credit[2] = 100
	r.receive(pkt{ctx: 1, data: numbered(1, 64)}, pkt{ctx: 2, data: numbered(1, 64)})
	eventually(t, "traffic flows behind the stuck handler", func() bool { return c.Stats().Handled > 10 })
	r.close()
	if r.Stuck() != 1 {
		t.Errorf("%d stuck, want 1", r.Stuck())
	}
	close(release)
	eventually(t, "the handler has ended", func() bool { return r.Stuck() == 0 })
}

func TestDrain(t *testing.T) {
	t.Run("returns when the context is idle", func(t *testing.T) {
		b := bpf.Range{Base: 16, Size: 8}
		r := newRig(t, rigConfig{hpus: 2, Config: Config{Workers: 2}})
		c := r.install(1, echo, b)
		for i := range 100 {
			r.receive(pkt{hpu: i % 2, ctx: 1, data: numbered(uint64(i), 64), bucket: &b, hash: uint32(i)})
		}
		if err := r.Drain(c, patience); err != nil {
			t.Error(err)
		}
		if st := c.Stats(); st.Handled != 100 {
			t.Errorf("%d handled, want 100", st.Handled)
		}
		if err := r.Install(NewContext(1, "next", Handlers{}, bpf.Range{})); err != nil {
			t.Error(err)
		}
		r.settled()
	})
	t.Run("is bounded when a packet is kept", func(t *testing.T) {
		r := newRig(t, rigConfig{})
		kept := make(chan *Kept, 1)
		c := r.install(1, func(h *HER) spin.Code {
			k, _ := h.Keep()
			kept <- k
			return spin.Success
		})
		r.receive(pkt{ctx: 1, data: numbered(1, 64)})
		k := <-kept
		if err := r.Drain(c, 5*time.Millisecond); err == nil || !strings.Contains(err.Error(), "1 buffers still in flight") {
			t.Errorf("drained with a packet kept: %v", err)
		}
		k.Release()
		r.settled()
	})
	t.Run("waits for the handler that runs and lets no other begin", func(t *testing.T) {
		r := newRig(t, rigConfig{Config: Config{Limit: 5 * time.Second}})
		entered, release := make(chan struct{}), make(chan struct{})
		var in atomic.Int64
		c := r.install(1, func(h *HER) spin.Code {
			in.Add(1)
			defer in.Add(-1)
			if number(h.Head()) == 0 {
				close(entered)
				<-release
			}
			return spin.Success
		})
		r.receive(pkt{ctx: 1, data: numbered(0, 64)}, pkt{ctx: 1, data: numbered(1, 64)})
		<-entered
		time.AfterFunc(20*time.Millisecond, func() { close(release) })
		_ = r.Drain(c, time.Millisecond)
		if n := in.Load(); n != 0 {
			t.Errorf("%d handlers run after Drain", n)
		}
		r.settled()
		if st := c.Stats(); st.Handled != 1 {
			t.Errorf("%d handled, want 1", st.Handled)
		}
	})
	t.Run("sees a handler of a stopped context on another HPU", func(t *testing.T) {
		r := newRig(t, rigConfig{hpus: 2, Config: Config{Workers: 2, Limit: 100 * time.Millisecond}})
		release := make(chan struct{})
		var in atomic.Int64
		c := r.install(1, func(h *HER) spin.Code {
			if h.HPU() == 0 {
				<-release
				return spin.Success
			}
			in.Add(1)
			time.Sleep(50 * time.Millisecond)
			in.Add(-1)
			return spin.Success
		})
		r.receive(pkt{hpu: 0, ctx: 1, data: numbered(0, 64)})
		eventually(t, "the first handler is stopped", func() bool { // until just before, the other HPU runs handlers
			r.receive(pkt{hpu: 1, ctx: 1, data: numbered(1, 64)})
			return c.Stopped()
		})
		_ = r.Drain(c, time.Millisecond)
		if n := in.Load(); n != 0 {
			t.Errorf("%d handlers run after Drain", n)
		}
		close(release)
		r.settled()
	})
	t.Run("reports an overrun that it waits for", func(t *testing.T) {
		r := newRig(t, rigConfig{Config: Config{Limit: 10 * time.Millisecond}})
		entered, release := make(chan struct{}), make(chan struct{})
		c := r.install(1, func(h *HER) spin.Code {
			close(entered)
			<-release
			return spin.Success
		})
		r.receive(pkt{ctx: 1, data: numbered(0, 64)})
		<-entered
		if err := r.Drain(c, time.Millisecond); err == nil {
			t.Error("drained with a handler stuck")
		}
		eventually(t, "the overrun is counted", func() bool { return c.Stopped() && c.Stats().Overruns == 1 })
		close(release)
		r.settled()
	})
}

func TestLostPackets(t *testing.T) {
	for _, wait := range []Wait{Sleep, Adaptive, Spin} {
		t.Run(wait.String(), func(t *testing.T) {
			t.Run("in the middle are found by the next packet", func(t *testing.T) {
				r := newRig(t, rigConfig{Config: Config{Wait: wait}})
				c := r.install(1, swallow)
				r.receive(pkt{ctx: 1, data: numbered(0, 64)}, pkt{ctx: 1, lose: true, mute: true, segs: 3}, pkt{ctx: 1, data: numbered(1, 64)})
				r.settled()
				if st := c.Stats(); st.Lost != 3 || st.Handled != 2 {
					t.Errorf("lost %d, handled %d; want 3, 2", st.Lost, st.Handled)
				}
			})
			t.Run("at the end are found by the drop counter", func(t *testing.T) {
				r := newRig(t, rigConfig{Config: Config{Wait: wait}})
				c := r.install(1, swallow)
				r.receive(pkt{ctx: 1, data: numbered(0, 64)})
				eventually(t, "it is handled and the worker idle", func() bool { return r.Idle(c) })
				if wait != Spin {
					r.asleep()
				}
				r.receive(pkt{ctx: 1, lose: true}, pkt{ctx: 1, lose: true, segs: 2})
				r.settled()
				if st := c.Stats(); st.Lost != 3 || st.Handled != 1 {
					t.Errorf("lost %d, handled %d; want 3, 1", st.Lost, st.Handled)
				}
			})
		})
	}
	t.Run("at the end are found while another context keeps the HPU busy", func(t *testing.T) {
		r := newRig(t, rigConfig{})
		c := r.install(1, swallow)
		var enough atomic.Bool
		r.install(2, func(h *HER) spin.Code {
			if !enough.Load() { // the ring is never empty
				r.receive(pkt{ctx: 2, data: numbered(1, 64)})
			}
			return spin.Success
		})
		r.share.Credit[2] = 100
		r.receive(pkt{ctx: 1, lose: true}, pkt{ctx: 2, data: numbered(1, 64)})
		eventually(t, "the loss is found", func() bool { return c.Stats().Lost == 1 })
		enough.Store(true)
		r.settled()
	})
	t.Run("without a drop counted nothing is taken for lost", func(t *testing.T) {
		r := newRig(t, rigConfig{})
		c := r.install(1, swallow)
		r.receive(pkt{ctx: 1, lose: true, mute: true})
		time.Sleep(300 * time.Millisecond)
		if st := c.Stats(); st.Lost != 0 {
			t.Errorf("%d taken for lost", st.Lost)
		}
		r.receive(pkt{ctx: 1, data: numbered(1, 64)})
		r.settled()
	})
	for _, tail := range []bool{false, true} {
		t.Run(fmt.Sprintf("of messages free their buckets, at the end: %v", tail), func(t *testing.T) {
			b := bpf.Range{Base: 32, Size: 4}
			r := newRig(t, rigConfig{hpus: 2, Config: Config{Workers: 2, Wait: Sleep}})
			c := r.install(1, swallow, b)
			// On the HPU of the worker that does not sweep.
			ps := []pkt{
				{hpu: 1, ctx: 1, bucket: &b, hash: 1, lose: true},
				{hpu: 1, ctx: 1, bucket: &b, hash: 2, data: numbered(1, 64)},
			}
			if tail {
				ps[0], ps[1] = ps[1], ps[0]
			}
			r.asleep()
			r.receive(ps...)
			eventually(t, "the loss is found and swept", func() bool {
				return r.Idle(c) && atomic.LoadUint64(&r.kernel.buckets[33])>>32 == 0
			})
			r.settled()
		})
	}
}

// Whoever finds a context idle may set its buckets to 0: no use of one may be given back later,
// or it has 2^32 - 1 users.
func TestIdleContextsHaveGivenTheirBucketsBack(t *testing.T) {
	b := bpf.Range{Base: 32, Size: 1}
	r := newRig(t, rigConfig{Config: Config{Wait: Spin}})
	c := r.install(1, swallow, b)
	data := numbered(1, 64)
	// Some 1 s; a worker that has to share its CPU takes milliseconds for each packet.
	for i, end := 0, time.Now().Add(5*time.Second); i < 20_000 && time.Now().Before(end); i++ {
		r.receive(pkt{ctx: 1, bucket: &b, data: data})
		for begin := time.Now(); !r.Idle(c); {
			if time.Since(begin) > patience {
				t.Fatalf("packet %d is not handled", i)
			}
		}
		if n := atomic.LoadUint64(&r.kernel.buckets[b.Base]) >> 32; n != 0 {
			t.Fatalf("packet %d: the context is idle, its bucket has %d users", i, n)
		}
	}
	r.settled()
}

func TestALatePacketIsHandledAndPaidOnce(t *testing.T) {
	r := newRig(t, rigConfig{})
	r.kernel.free = true
	var got []uint64
	c := r.install(1, func(h *HER) spin.Code {
		got = append(got, number(h.Head()))
		return echo(h)
	})
	ring := r.kernel.queues[0].rings[0]
	r.with(func() {
		for i := range uint64(3) {
			r.receiveOne(&pkt{ctx: 1, data: numbered(i, 64)})
		}
		ring.rx[0], ring.rx[1], ring.rx[2] = ring.rx[1], ring.rx[2], ring.rx[0]
	})
	r.settled()
	if st := c.Stats(); !slices.Equal(got, []uint64{1, 2, 0}) || st.Lost != 1 || st.Handled != 3 {
		t.Errorf("handled %v, lost %d; want [1 2 0], 1", got, st.Lost)
	}
}

func TestAFillRingThatRefusesDelaysTheCredit(t *testing.T) {
	r := newRig(t, rigConfig{queues: 2})
	q := r.kernel.queues[0]
	q.refuse = true
	c := r.install(1, swallow)
	r.receive(pkt{ctx: 1, data: numbered(0, 64)}, pkt{ctx: 1, queue: 1, data: numbered(0, 64)})
	eventually(t, "both are handled", func() bool { return c.Stats().Handled == 2 })
	if r.Idle(c) {
		t.Error("credit is back, its frame is not")
	}
	r.with(func() { q.refuse = false })
	r.settled()
}

func TestCountersAreConsistentPairs(t *testing.T) {
	r := newRig(t, rigConfig{hpus: 2, Config: Config{Workers: 2}})
	r.kernel.quiet = true
	c := r.install(1, func(h *HER) spin.Code {
		h.Count(3, 5)
		h.Count(15, 7)
		return spin.Success
	})
	check := func(u [spin.UserCounters]spin.UserCounter) {
		for i, x := range []int{3, 15} {
			if u[x].Sum != u[x].Count*uint64(5+2*i) {
				t.Errorf("counter %d: sum %d, count %d", x, u[x].Sum, u[x].Count)
			}
		}
	}
	const n = 2000
	for i := range n {
		for r.receive(pkt{hpu: i % 2, ctx: 1, data: numbered(0, 64)}) == 0 {
			runtime.Gosched()
		}
		check(c.Stats().User)
	}
	r.settled()
	u := c.Stats().User
	check(u)
	if u[3].Count != n || u[15].Count != n {
		t.Errorf("counted %+v and %+v, want %d each", u[3], u[15], n)
	}
	if m := (spin.UserCounter{Sum: 3, Count: 2}).Mean(); m != 1.5 {
		t.Errorf("mean %g", m)
	}
}

func TestEventsThatNobodyTakesAreCounted(t *testing.T) {
	r := newRig(t, rigConfig{Config: Config{Faults: -1}})
	r.install(1, func(*HER) spin.Code { panic("again") })
	for i := range 100 {
		r.receive(pkt{ctx: 1, data: numbered(uint64(i), 64)})
	}
	r.settled()
	kept := 0
	for range r.Events() {
		kept++
	}
	if _, lost := r.Stats(); kept != 64 || lost != 36 {
		t.Errorf("%d events kept, %d lost; want 64, 36", kept, lost)
	}
}

func TestAnEventGateLetsOneThroughAPeriodAndCountsTheOthers(t *testing.T) {
	const s = int64(time.Second)
	var g eventGate
	for i, step := range []struct {
		now  int64
		ok   bool
		held uint64
	}{
		{s / 2, true, 0}, // the first, whatever the clock says
		{s / 2, false, 0}, {s, false, 0}, {s/2 + s - 1, false, 0},
		{s/2 + s, true, 3},
		{s/2 + s + 1, false, 0},
		{10 * s, true, 1},
		{11 * s, true, 0},
	} {
		if held, ok := g.pass(step.now, time.Second, 0); ok != step.ok || held != step.held {
			t.Errorf("event %d: passes %v with %d held back, want %v, %d", i, ok, held, step.ok, step.held)
		}
	}
}

// Of many faults, the first is told and the number of the others: at the end of the period,
// of the context, or of the pool, whichever comes first.
func TestFaultsThatAreNotToldOneByOneAreCounted(t *testing.T) {
	const never = time.Hour
	for _, c := range []struct {
		name   string
		period time.Duration
		end    func(r *rig, c *Context) // nil: nothing but time
	}{
		{"the period ends", 50 * time.Millisecond, nil},
		{"the context ends", never, func(r *rig, c *Context) { _ = r.Drain(c, 10*time.Second) }},
		{"the pool ends", never, func(r *rig, _ *Context) { r.Close() }},
	} {
		for kind, handler := range map[spin.FaultKind]Handler{
			spin.HandlerPanic:  func(*HER) spin.Code { panic("often") },
			spin.HandlerFailed: func(*HER) spin.Code { return spin.Fail },
		} {
			t.Run(fmt.Sprintf("%v, %s", kind, c.name), func(t *testing.T) {
				var log bytes.Buffer // read when the pool is closed
				r := newRig(t, rigConfig{Config: Config{Faults: c.period, Logger: slog.New(slog.NewTextHandler(&log, nil))}})
				ctx := r.install(1, handler)
				r.install(2, handler)
				for i := range 10 {
					r.receive(pkt{ctx: 1 + uint16(i)%2, data: numbered(uint64(i), 64)})
				}
				eventually(t, "all have run", r.idle)
				if c.end != nil {
					c.end(r, ctx)
				}
				told, lines, timeout := map[uint16]int{}, 0, time.After(10*time.Second)
				for told[1] < 5 || c.period != never && told[2] < 5 {
					select {
					case e := <-r.Events():
						told[e.Context] += int(e.More)
						if lines++; e.Detail != "" {
							told[e.Context]++
						}
						if e.Kind != kind || (e.Detail == "") != strings.HasSuffix(e.Text(), " more") {
							t.Errorf("an event says %q", e.Text())
						}
					case <-timeout:
						t.Fatalf("%v told of 5 of each context", told)
					}
				}
				if c.period == never && lines > 4 {
					t.Errorf("%d events: there is one in an hour, and the last", lines)
				}
				r.Close()
				if c.period == never && !strings.Contains(log.String(), "context=ctx1 hpu=0 more=4") {
					t.Errorf("the log does not say how many more:\n%s", &log)
				}
			})
		}
	}
}

func TestACounterThatIsNotThereIsAPanicOfTheHandler(t *testing.T) {
	r := newRig(t, rigConfig{})
	c := r.install(1, func(h *HER) spin.Code {
		h.Count([]int{-1, 0, spin.UserCounters - 1, spin.UserCounters}[number(h.Head())], 1)
		return spin.Success
	})
	for i := range uint64(4) {
		r.receive(pkt{ctx: 1, data: numbered(i, 64)})
	}
	r.settled()
	if st := c.Stats(); st.Handled != 2 || st.Panics != 2 {
		t.Errorf("handled %d, panics %d; want 2, 2", st.Handled, st.Panics)
	}
}

func TestHandlerTimeIsCountedAndSetsTheQuantum(t *testing.T) {
	r := newRig(t, rigConfig{})
	slow := r.install(1, func(*HER) spin.Code { time.Sleep(time.Millisecond); return spin.Success })
	fast := r.install(2, func(*HER) spin.Code {
		for end := time.Now().Add(2 * time.Microsecond); time.Now().Before(end); {
		}
		return spin.Success
	})
	r.share.Quantum[1] = 7
	var ps []pkt
	for range 64 {
		ps = append(ps, pkt{ctx: 2, data: numbered(0, 64)})
	}
	r.receive(ps...)
	r.receive(pkt{ctx: 1, data: numbered(0, 64)})
	r.settled()
	st := slow.Stats()
	n := uint64(0)
	for i, c := range st.HandlerTime {
		n += c
		if c > 0 && (int64(st.HandlerSum) >= 1<<i || int64(st.HandlerSum) < 1<<(i-1)) {
			t.Errorf("%v counted as less than %d ns", st.HandlerSum, int64(1)<<i)
		}
	}
	if n != 1 || st.HandlerSum < time.Millisecond {
		t.Errorf("%d handlers timed, %v in all", n, st.HandlerSum)
	}
	if q := r.share.Quantum[1]; q != 1 {
		t.Errorf("quantum of a slow handler is %d, want 1", q)
	}
	fs := fast.Stats()
	if fs.Handled != 64 {
		t.Errorf("%d handled", fs.Handled)
	}
	// The exact values are those of the next test.
	if q := r.share.Quantum[2]; q < 1 || q > 10 {
		t.Errorf("quantum of a handler of at least 2 us is %d, want 1..10", q)
	}
}

func TestQuantumIsWhatTwentyMicrosecondsHold(t *testing.T) {
	for _, tc := range []struct {
		mean time.Duration
		want uint32
	}{
		{-1, 512}, {0, 512}, {1, 512}, {39, 512}, {40, 500}, {100, 200}, {333, 60}, {1000, 20},
		{2000, 10}, {6666, 3}, {6667, 2}, {10000, 2}, {10001, 1}, {20000, 1}, {20001, 1}, {time.Hour, 1},
	} {
		if got := quantum(tc.mean); got != tc.want {
			t.Errorf("quantum of handlers of %v is %d, want %d", tc.mean, got, tc.want)
		}
	}
}

func TestHistogramBuckets(t *testing.T) {
	for _, tc := range []struct {
		ns   int64
		want int
	}{{0, 0}, {1, 1}, {2, 2}, {3, 2}, {4, 3}, {1<<30 - 1, 30}, {1 << 30, 31}, {1 << 40, 31}} {
		var h spin.Histogram
		h.Add(tc.ns)
		if h[tc.want] != 1 {
			t.Errorf("%d ns is in none of %v", tc.ns, h)
		}
	}
}

func TestOwnFramesLeaveBehindOrBetweenThoseOfHandlers(t *testing.T) {
	for _, tc := range []struct {
		egress Egress
		name   string
		want   []uint64
	}{
		{HandlersFirst, "behind", []uint64{0, 1, 2, 3, 100, 101}},
		{RoundRobin, "between", []uint64{0, 100, 1, 101, 2, 3}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, rigConfig{Config: Config{Egress: tc.egress}})
			entered, release := make(chan struct{}), make(chan struct{})
			r.install(1, func(h *HER) spin.Code {
				if number(h.Head()) == 0 {
					close(entered)
					<-release
				}
				return echo(h)
			})
			var ps []pkt
			for i := range uint64(4) {
				ps = append(ps, pkt{ctx: 1, data: numbered(i, 64)})
			}
			r.receive(ps...)
			<-entered
			for i := range uint64(2) {
				if err := r.Transmit(numbered(100+i, 64)); err != nil {
					t.Fatal(err)
				}
			}
			close(release)
			r.settled()
			var got []uint64
			for _, f := range r.wireFrames() {
				got = append(got, number(f.data))
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("sent %v, want %v", got, tc.want)
			}
		})
	}
}

func TestTransmitWakesASleepingPoolAndRunsOutOfFrames(t *testing.T) {
	r := newRig(t, rigConfig{spare: 8, txSize: 2, hpus: 2, Config: Config{Workers: 2, Wait: Sleep}})
	r.kernel.queues[0].rings[0].down = true
	for i := range uint64(4) {
		if err := r.Transmit(numbered(i, 64)); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.Transmit(numbered(9, 64)); !errors.Is(err, ErrFrames) {
		t.Errorf("a fifth frame of the four that may be out: %v", err)
	}
	eventually(t, "the worker naps, frames in front of a ring that does not move", func() (ok bool) {
		r.with(func() { ok = r.kernel.queues[0].rings[0].kicks > 5 })
		return ok
	})
	r.with(func() { r.kernel.queues[0].rings[0].down = false })
	r.settled()
	if n := len(r.wireFrames()); n != 4 {
		t.Errorf("%d sent, want 4", n)
	}
	if n := r.ownOut.Load(); n != 0 {
		t.Errorf("%d frames are still counted as out", n)
	}
}

func TestOwnFramesThatCannotLeaveDoNotKeepHandlersFromSending(t *testing.T) {
	for _, egress := range []Egress{HandlersFirst, RoundRobin} {
		t.Run(egress.String(), func(t *testing.T) {
			const size, own = 300, 256 // more than the ring holds beside a batch
			r := newRig(t, rigConfig{spare: 2 * own, txSize: size, Config: Config{Egress: egress}})
			ring := r.kernel.queues[0].rings[0]
			r.with(func() { ring.down = true })
			for i := range uint64(own) {
				if err := r.Transmit(numbered(1000+i, 64)); err != nil {
					t.Fatal(err)
				}
			}
			eventually(t, "the ring has taken what it may", func() (ok bool) {
				r.with(func() { ok = len(ring.tx) == size-(batchSize+chainSize) && ring.kicks > 5 })
				return ok
			})
			// Frames on the tx ring count as well as those that wait for it.
			if err := r.Transmit(numbered(0, 64)); !errors.Is(err, ErrFrames) {
				t.Errorf("transmit of more than half of the spare frames: %v", err)
			}
			c := r.install(1, func(h *HER) spin.Code {
				b, err := h.SendNew(64)
				if err != nil {
					t.Error(err)
					return spin.Drop
				}
				clear(b)
				return echo(h)
			})
			var ps []pkt
			for i := range uint64(batchSize / 2) {
				ps = append(ps, pkt{ctx: 1, data: numbered(i, 64)})
			}
			r.receive(ps...)
			eventually(t, "all are handled", func() bool { return c.Stats().Handled == batchSize/2 })
			if st := c.Stats(); st.Sent != batchSize || st.SendFull != 0 {
				t.Errorf("sent %d, refused %d; want %d, 0", st.Sent, st.SendFull, batchSize)
			}
			r.with(func() { ring.down = false })
			r.settled()
			if n := len(r.wireFrames()); n != own+batchSize {
				t.Errorf("%d sent, want %d", n, own+batchSize)
			}
		})
	}
}

func TestConfigsThatMakeNoSenseAreRefused(t *testing.T) {
	k, _ := newKernel(t, 2, 2, 8, 0, 8, 8)
	rings := []Ring{k.queues[0].rings[0], k.queues[0].rings[1]}
	for _, tc := range []struct {
		name string
		cfg  Config
	}{
		{"no queue", Config{}},
		{"no HPU", Config{Queues: []Queue{{}}}},
		{"fewer rings on the second queue", Config{Queues: []Queue{{Rings: rings}, {Rings: rings[:1]}}}},
		{"more workers than HPUs", Config{Queues: []Queue{{Rings: rings}}, Workers: 3}},
		{"a negative number of workers", Config{Queues: []Queue{{Rings: rings}}, Workers: -1}},
		{"a limit below a tick", Config{Queues: []Queue{{Rings: rings}}, Limit: time.Microsecond}},
		{"no way of waiting", Config{Queues: []Queue{{Rings: rings}}, Wait: 3}},
		{"a negative way of waiting", Config{Queues: []Queue{{Rings: rings}}, Wait: -1}},
		{"no order of egress", Config{Queues: []Queue{{Rings: rings}}, Egress: 2}},
		{"a negative order of egress", Config{Queues: []Queue{{Rings: rings}}, Egress: -1}},
		{"a CPU that is not there", Config{Queues: []Queue{{Rings: rings}}, CPUs: []int{-1}}},
	} {
		if p, err := New(tc.cfg); err == nil {
			p.Close()
			t.Errorf("%s: no error", tc.name)
		}
	}
	r := newRig(t, rigConfig{})
	r.install(1, swallow)
	if err := r.Install(NewContext(1, "again", Handlers{}, bpf.Range{})); err == nil {
		t.Error("one id for two contexts")
	}
	if err := r.Install(NewContext(256, "large", Handlers{}, bpf.Range{})); err == nil {
		t.Error("an id that no packet can carry")
	}
}

func TestWaitsAndOrdersOfEgressHaveNames(t *testing.T) {
	for _, w := range []Wait{Adaptive, Sleep, Spin} {
		if got, err := ParseWait(w.String()); err != nil || got != w {
			t.Errorf("%v reads as %v, %v", w, got, err)
		}
	}
	if _, err := ParseWait("nap"); err == nil {
		t.Error("nap is a way of waiting")
	}
	for want, s := range map[string]fmt.Stringer{
		"Wait(-1)": Wait(-1), "Wait(9)": Wait(9),
		"handlers first": HandlersFirst, "round robin": RoundRobin,
		"Egress(-1)": Egress(-1), "Egress(9)": Egress(9),
	} {
		if got := s.String(); got != want {
			t.Errorf("%q is called %q", want, got)
		}
	}
}
