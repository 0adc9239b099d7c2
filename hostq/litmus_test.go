// SPDX-License-Identifier: Apache-2.0

package hostq

import (
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/netns/netnstest"
)

// The litmus test of the doorbells (store buffering, Dekker): one side publishes something
// and looks whether the other sleeps, the other says that it sleeps and looks for
// something, in two processes on two CPUs. If neither sees the other, a wakeup is
// lost. To prevent that each store must be in order with the load after it, which is
// the one order that x86 does not keep by itself.
//
// The test runs what the package has, for all who sleep and all who publish, and must
// never see that. Then it runs each of them with its store made a plain one, and must:
// else it would not notice if the package's were.

// Which side sleeps, and what is published to it.
const (
	litmusArm     = iota // Host.Arm: events, requests, batches of requests
	litmusWait           // Host.Wait: the same
	litmusCounter        // Host.WaitCounter: a counter is set, or added to
	litmusLane           // Pair.Arm: responses
)

var litmusNames = []string{"Host.Arm", "Host.Wait", "Host.WaitCounter", "Pair.Arm"}

// What is weak: a bit mask.
const (
	weakSleeper = 1 << iota
	weakPublisher
	weakBits = iota
)

// Counters of the test.
const (
	stepNIC = iota
	stepHost
	missed  // wakeups
	counted // under test
)

// plainStore stores a word as no atomic type lets anybody.
//
//go:noinline
func plainStore[W, V any](word *W, v V) { *(*V)(unsafe.Pointer(word)) = v }

// A side is what one process does in a round.
type side struct {
	prepare func() error       // when the other has ended the last round
	near    func()             // has the line that the other will store to, so that this takes a while
	act     func(round uint64) // is what is timed
	after   func() error       // when both have acted
}

// whoSleeps makes a side of somebody who sleeps: arm tells whether it would do so now,
// alone whether nobody has rung.
func whoSleeps(c *Counter, near func(), arm func(round uint64) bool, alone func() bool, after func() error) side {
	sleeps := false
	return side{
		prepare: func() error { return nil },
		near:    near,
		act:     func(round uint64) { sleeps = arm(round) },
		after: func() error {
			if sleeps && alone() {
				c.Add(1)
			}
			return after()
		},
	}
}

func whoPublishes(near func(), publish func(round uint64)) side {
	nothing := func() error { return nil }
	return side{nothing, near, publish, nothing}
}

// play plays a round. The sides leave each step together.
func (s *side) play(round uint64, mine, theirs *Counter) error {
	together := func(step uint64) {
		mine.Set(3*round + step)
		until(theirs, 3*round+step)
	}
	if err := s.prepare(); err != nil {
		return err
	}
	together(0)
	s.near()
	dawdle(round * 7919 % 61)
	s.act(round)
	together(1)
	if err := s.after(); err != nil {
		return fmt.Errorf("round %d: %w", round, err)
	}
	together(2)
	return nil
}

// until waits for a counter. On a CPU that is shared with others it yields.
func until(c *Counter, v uint64) {
	for i := 1; c.Get() < v; i++ {
		if i%4096 == 0 {
			unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		}
	}
}

//go:noinline
func dawdle(n uint64) {
	for range n {
	}
}

func onCPU(cpu int) error {
	runtime.LockOSThread()
	var set unix.CPUSet
	set.Set(cpu)
	return unix.SchedSetaffinity(0, &set)
}

// litmusSide is the application's side.
func (h *Host) litmusSide(who, weak int) side {
	var c Call
	look := func() { h.eventRing.ready(); h.requestRing.ready() }
	locked := func(i int, v uint64) bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		ok, _ := h.prepare(i, v)
		return !ok
	}
	plain := func(uint64) bool {
		plainStore[atomic.Uint32, uint32](&h.waiting, 1)
		ok, _ := h.status()
		return !ok
	}
	alone := func() bool { return h.waiting.Load() != 0 }
	take := func() error {
		h.Disarm()
		if h.Event(&Event{}) {
			return nil
		}
		if !h.Request(&c) {
			return fmt.Errorf("nothing was published: %w", h.over())
		}
		h.Done(&c)
		return nil
	}
	lost := h.Counter(missed)
	switch who {
	case litmusArm:
		arm := func(uint64) bool { return h.Arm() }
		if weak&weakSleeper != 0 {
			arm = plain
		}
		return whoSleeps(lost, look, arm, alone, take)

	case litmusWait:
		arm := func(uint64) bool { return locked(-1, 0) }
		if weak&weakSleeper != 0 {
			arm = plain
		}
		return whoSleeps(lost, look, arm, alone, take)

	case litmusCounter:
		s := h.counters[counted].s
		arm := func(round uint64) bool { return locked(counted, round) }
		if weak&weakSleeper != 0 {
			arm = func(round uint64) bool {
				plainStore(&s.want, round)
				ok, _ := h.reached(s, round)
				return !ok
			}
		}
		return whoSleeps(lost, func() { s.value.Load() }, arm,
			func() bool { return s.want.Load() != 0 },
			func() error { s.want.Store(0); h.Disarm(); return nil })
	}

	respond := func(uint64) { _ = h.Respond(&c, 0, nil) }
	if weak&weakPublisher != 0 {
		respond = func(uint64) {
			ring := &h.lanes[0]
			pos, _, err := ring.claim(1)
			if err != nil {
				return
			}
			s := (*responseSlot)(unsafe.Pointer(unsafe.SliceData(ring.slot(pos))))
			s.length, s.id, s.status = 0, c.id, 0
			plainStore(ring.lap(pos), ring.unpublished(pos)+1)
			if needed(&h.shared.lanes[0].waiting) {
				add(h.doorbells[0])
			}
			h.Done(&c)
		}
	}
	s := whoPublishes(func() { h.shared.lanes[0].waiting.Load() }, respond)
	s.prepare = func() error {
		for !h.Request(&c) {
			if err := h.over(); err != nil {
				return err
			}
		}
		return nil
	}
	return s
}

// litmusSide is the NIC's side.
func (p *Pair) litmusSide(who, weak int) side {
	switch who {
	case litmusArm, litmusWait:
		publish := func(round uint64) {
			switch round % 3 {
			case 0:
				p.Event(&Event{})
			case 1:
				_, _ = p.Request(0, &Request{}, nil)
			case 2:
				_, _ = p.Notify([]Request{{}})
			}
		}
		if weak&weakPublisher != 0 {
			publish = func(uint64) {
				pos, _, err := p.eventRing.claim(1)
				if err != nil {
					return
				}
				plainStore(p.eventRing.lap(pos), p.eventRing.unpublished(pos)+1)
				if needed(&p.waiting) {
					p.wakeApplication()
				}
			}
		}
		return whoPublishes(func() { p.waiting.Load() }, publish)

	case litmusCounter:
		c := p.Counter(counted)
		publish := func(round uint64) {
			if round%2 == 0 {
				c.Set(round)
			} else {
				c.Add(1)
			}
		}
		if weak&weakPublisher != 0 {
			publish = func(round uint64) {
				plainStore(&c.s.value, round)
				c.check(round)
			}
		}
		return whoPublishes(func() { c.s.want.Load() }, publish)
	}

	l := &p.lanes[0]
	arm := func(uint64) bool { return p.Arm(0) }
	if weak&weakSleeper != 0 {
		arm = func(uint64) bool {
			plainStore[atomic.Uint32, uint32](l.waiting, 1)
			return !p.pending(l, l.at.Load())
		}
	}
	s := whoSleeps(p.Counter(missed), func() { p.pending(l, l.at.Load()) }, arm,
		func() bool { return l.waiting.Load() != 0 },
		func() error {
			p.Disarm(0)
			if n := p.Poll(0, 1, func(*Response) {}); n != 1 {
				return fmt.Errorf("%d responses: %w", n, p.Err())
			}
			return nil
		})
	s.prepare = func() error {
		_, err := p.Request(0, &Request{Reply: true}, nil)
		return err
	}
	return s
}

func playLitmus(r *role) error {
	h, err := r.open()
	if err != nil {
		return err
	}
	if err := onCPU(r.CPU); err != nil {
		return err
	}
	s := h.litmusSide(r.Mode>>weakBits, r.Mode&(1<<weakBits-1))
	say("ready")
	for round := uint64(1); ; round++ {
		if err := s.play(round, h.Counter(stepHost), h.Counter(stepNIC)); err != nil {
			return err
		}
	}
}

// litmus returns how often neither side saw the other. What is weak runs until that
// happens.
func litmus(t *testing.T, who, weak int, rounds uint64, limit time.Duration) (lost, done uint64) {
	t.Helper()
	p := newTestPair(t, PairConfig{Layout: Layout{Lanes: 1}})
	o := play(t, role{Name: "litmus", Layout: p.Layout(), Mode: who<<weakBits | weak, CPU: 1}, 0, p.fds()...)
	defer o.kill()
	s := p.litmusSide(who, weak)
	result := make(chan error)
	go func() { // its thread ends with it
		if err := onCPU(0); err != nil {
			result <- err
			return
		}
		for end := time.Now().Add(limit); done < rounds; {
			if done%1024 == 0 && (time.Now().After(end) || weak != 0 && p.Counter(missed).Get() > 0) {
				break
			}
			if err := s.play(done+1, p.Counter(stepNIC), p.Counter(stepHost)); err != nil {
				result <- err
				return
			}
			done++
		}
		result <- nil
	}()
	if err := <-result; err != nil {
		t.Fatal(err)
	}
	return p.Counter(missed).Get(), done
}

func TestLitmus(t *testing.T) {
	netnstest.NeedRoot(t)
	if runtime.NumCPU() < 2 {
		t.Skip("one CPU: it sees its own stores in order")
	}
	limit := 4 * time.Second
	if testenv.Race {
		// The detector's calls between a store and a load may take longer than a
		// store takes to arrive: with it the test proves little.
		limit = time.Second / 2
	}
	for who, name := range litmusNames {
		t.Run(name, func(t *testing.T) {
			lost, done := litmus(t, who, 0, 1_000_000, limit)
			t.Logf("as it is: %d rounds", done)
			if lost > 0 {
				t.Errorf("%d of %d wakeups lost", lost, done)
			}
			if testenv.Race {
				t.Log("run it without the race detector too")
				return
			}
			for weak, what := range map[int]string{weakSleeper: "who sleeps", weakPublisher: "who publishes"} {
				lost, done := litmus(t, who, weak, 5_000_000, 8*time.Second)
				t.Logf("with a plain store of %s: lost within %d rounds: %v", what, done, lost > 0)
				if lost > 0 {
					continue
				}
				msg := fmt.Sprintf("%d rounds without a lost wakeup although the store of %s is plain: the litmus proves nothing on this machine", done, what)
				if os.Getenv("XSPIN_NO_SKIP") == "1" && runtime.GOARCH == "amd64" {
					t.Error(msg)
				} else {
					t.Skip(msg)
				}
			}
		})
	}
}
