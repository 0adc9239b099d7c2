// SPDX-License-Identifier: Apache-2.0

package hostq

import (
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/netns/netnstest"
)

// The litmus test of the bells (store buffering, Dekker): the NIC publishes an event
// and looks at the waiting word, the application sets the word and looks for an event,
// in two processes on two CPUs. If neither sees the other, a wakeup is lost. To prevent
// that each store must be in order with the load after it, which is the one order that
// x86 does not keep by itself.
//
// The test runs what the package has, and must never see that. Then it runs with either
// store made a plain one, and must: else it would not notice if the package's were.

// raced says that the race detector is there. Its calls between a store and a load take
// longer than a store takes to arrive: with it the test proves nothing.
var raced bool

const (
	litmusReal    = iota
	litmusArm     // the application's store is plain
	litmusPublish // the NIC's is
)

// Counters that keep the two in step: the round that a side is in, and round<<1|result.
const (
	stepNIC = iota
	stepHost
	sawNIC
	sawHost
)

//go:noinline
func plainStore(p *uint32, v uint32) { *p = v }

// weakPut is Pair.put of an empty event, with a plain store.
func (p *Pair) weakPut() {
	pos, _, err := p.eventRing.claim(1)
	if err != nil {
		return
	}
	plainStore(p.eventRing.lap(pos), p.eventRing.unpublished(pos)+1)
	if needed(&p.waiting) {
		p.wakeApplication()
	}
}

// weakArm is Host.Arm with a plain store.
func (h *Host) weakArm() bool {
	plainStore(&h.waiting, 1)
	if ok, err := h.status(); ok || err != nil {
		atomic.StoreUint32(&h.waiting, 0)
		return false
	}
	return true
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

func playLitmus(r *role) error {
	h, err := r.open()
	if err != nil {
		return err
	}
	if err := onCPU(r.CPU); err != nil {
		return err
	}
	arm := h.Arm
	if r.Mode == litmusArm {
		arm = h.weakArm
	}
	say("ready")
	for round := uint64(1); ; round++ {
		h.Counter(stepHost).Set(round)
		until(h.Counter(stepNIC), round)
		h.eventRing.ready() // the line is here, so that the NIC's store takes a while
		dawdle(round % 61)
		saw := round << 1
		if !arm() {
			saw |= 1
		}
		h.Counter(sawHost).Set(saw)
		until(h.Counter(sawNIC), round<<1)
		h.Disarm()
		if !h.Event(&Event{}) {
			return fmt.Errorf("round %d: no event", round)
		}
	}
}

// litmus returns how often neither side saw the other.
func litmus(t *testing.T, mode int, rounds uint64, limit time.Duration) (missed, done uint64) {
	p := newTestPair(t, PairConfig{Layout: Layout{Lanes: 1}})
	o := play(t, role{Name: "litmus", Layout: p.Layout(), Mode: mode, CPU: 1}, 0, p.fds()...)
	defer o.kill()
	result := make(chan error)
	go func() { // its thread ends with it
		if err := onCPU(0); err != nil {
			result <- err
			return
		}
		end := time.Now().Add(limit)
		rung := uint64(0)
		for round := uint64(1); round <= rounds; round++ {
			if round%1024 == 0 && (time.Now().After(end) || mode != litmusReal && missed > 0) {
				break
			}
			p.Counter(stepNIC).Set(round)
			until(p.Counter(stepHost), round)
			_ = atomic.LoadUint32(&p.waiting)
			dawdle(round % 53)
			if mode == litmusPublish {
				p.weakPut()
			} else {
				p.Event(&Event{})
			}
			saw := round << 1
			if r := p.rung.Load(); r != rung {
				rung = r
				saw |= 1
			}
			p.Counter(sawNIC).Set(saw)
			until(p.Counter(sawHost), round<<1)
			if saw&1 == 0 && p.Counter(sawHost).Get()&1 == 0 {
				missed++
			}
			done++
		}
		result <- nil
	}()
	if err := <-result; err != nil {
		t.Fatal(err)
	}
	return missed, done
}

func TestLitmus(t *testing.T) {
	netnstest.NeedRoot(t)
	if runtime.NumCPU() < 2 {
		t.Skip("one CPU: it sees its own stores in order")
	}
	limit := 4 * time.Second
	if raced {
		limit = time.Second
	}
	missed, done := litmus(t, litmusReal, 1_000_000, limit)
	t.Logf("as it is: %d rounds", done)
	if missed > 0 {
		t.Errorf("%d of %d wakeups lost", missed, done)
	}
	if raced {
		t.Log("run it without the race detector too")
		return
	}
	for mode, what := range map[int]string{litmusArm: "who sleeps", litmusPublish: "who publishes"} {
		missed, done := litmus(t, mode, 5_000_000, 8*time.Second)
		t.Logf("with a plain store of %s: lost within %d rounds: %v", what, done, missed > 0)
		if missed > 0 {
			continue
		}
		msg := fmt.Sprintf("%d rounds without a lost wakeup although the store of %s is plain: the litmus proves nothing on this machine", done, what)
		if os.Getenv("XSPIN_NO_SKIP") == "1" && runtime.GOARCH == "amd64" {
			t.Error(msg)
		} else {
			t.Skip(msg)
		}
	}
}
