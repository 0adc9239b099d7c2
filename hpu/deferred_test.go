// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"encoding/binary"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/spin"
)

// telling is echoing for senders that take cumulative acknowledgements, and so hear
// that a segment has to wait.
type telling struct{ echoing }

func (p telling) Answer(dst []byte, a spin.AckRequest, processed bool, e *mpq.Entry) []byte {
	b := p.echoing.Answer(dst, a, true, e)
	if !processed && len(b) > 0 {
		binary.BigEndian.PutUint16(b, 0x2800)
	}
	return b
}

// A gate is an EventSink that takes nothing until it is opened, and counts how often it
// was tried.
type gate struct {
	mu    sync.Mutex
	tries int
	open  bool
	took  []uint32 // messages
}

func (g *gate) Post(e *spin.MessageEvent) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.tries++
	if g.open {
		g.took = append(g.took, e.Number)
	}
	return g.open
}

func (g *gate) tried() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.tries
}

// more waits until the gate was tried n times more.
func (g *gate) more(t *testing.T, n int) {
	t.Helper()
	n += g.tried()
	eventually(t, "it is tried again", func() bool { return g.tried() >= n })
}

// newGated returns a bench on whose events wait n complete messages, 1 to n.
func newGated(t *testing.T, shared bool, n int, timeout time.Duration) (*bench, *gate) {
	g := new(gate)
	b := newBench(t, benchConfig{shared: shared, change: func(m *MessageConfig) {
		m.Protocol = telling{}
		m.Default.Events = g
		m.Timeout = timeout
	}})
	b.ask(n)
	return b, g
}

// answers returns how many answers there were, or would be with room for them.
func (b *bench) answers() uint64 {
	s := b.c.Stats()
	return s.Acks + s.AckFull
}

// ask has EOM of messages 1 to n come.
func (b *bench) ask(n int) {
	b.t.Helper()
	for id := range uint32(n) {
		b.send(segment(1, id+1, peerA, 0, 10, true))
	}
	b.quiet(0)
}

// As long as there is no room for events, a sender is told so when a message ends, and
// when it asks. Nobody asks for what the NIC tries by itself.
func TestAnswersAreBoundedWhileEventsWait(t *testing.T) {
	bothTables(t, func(t *testing.T, shared bool) {
		const n, times = 100, 3
		b, g := newGated(t, shared, n, time.Minute)
		g.more(t, 5)
		if k := b.answers(); k != n {
			t.Errorf("%d answers to a sender that sent %d messages and asked nothing", k, n)
		}
		for range times {
			b.ask(n)
		}
		g.more(t, 5)
		if k := b.answers(); k != n+times*n {
			t.Errorf("%d answers to %d segments", k, n+times*n)
		}
		g.mu.Lock()
		g.open = true
		g.mu.Unlock()
		eventually(t, "all are acknowledged", func() bool { return b.answers() == n+times*n+n })
		b.over()
		if len(g.took) != n || !slices.IsSorted(g.took) {
			t.Errorf("%d events, of messages %v", len(g.took), g.took)
		}
	})
}

// However many messages wait, one is tried at a time, and not more than once a
// millisecond. So others have the worker.
func TestMessagesWhoseEventsWaitCostOthersLittle(t *testing.T) {
	bothTables(t, func(t *testing.T, shared bool) {
		const n, packets = 1000, 50
		start := time.Now()
		b, g := newGated(t, shared, n, time.Minute)
		other := b.install(2, func(h *HER) spin.Code { return spin.Success })
		for i := range uint64(packets) {
			time.Sleep(time.Millisecond)
			b.receive(pkt{ctx: 2, data: numbered(i, 60)})
			eventually(t, "the other context's packet is handled", func() bool { return other.Stats().Handled == i+1 })
		}
		if k, most := g.tried()-n, int(time.Since(start)/time.Millisecond)+1; k > most {
			t.Errorf("%d events tried again while another context had %d packets: at most %d", k, packets, most)
		}
	})
}

func TestMessagesWhoseEventsWaitAreAbandoned(t *testing.T) {
	bothTables(t, func(t *testing.T, shared bool) {
		const n = 100
		b, _ := newGated(t, shared, n, 50*time.Millisecond)
		b.over()
		st, _ := b.c.Messages()
		if lost := b.c.Stats().EventsLost; st.Failed != n || st.Ended != 0 || lost != n {
			t.Errorf("%d of %d failed, %d ended, %d events lost", st.Failed, n, st.Ended, lost)
		}
		if k := b.answers(); k != n {
			t.Errorf("%d answers", k)
		}
		if q := &b.c.msgs.waiting[0]; len(q.list) > 0 {
			t.Errorf("%d notes are left", len(q.list))
		}
	})
}

// What comes and goes behind a message that stays leaves nothing.
func TestNotesOfMessagesThatAreOverGo(t *testing.T) {
	var q waiting
	first := new(deferred)
	q.add(first, 1)
	for range 10_000 {
		d := new(deferred)
		q.add(d, 1)
		d.over.Store(true)
	}
	if len(q.list) > 16 {
		t.Errorf("%d notes of one message", len(q.list))
	}
	if q.first() != first {
		t.Error("it is not the first")
	}
	first.over.Store(true)
	if q.first() != nil || q.list != nil {
		t.Errorf("%d notes of none", len(q.list))
	}
}
