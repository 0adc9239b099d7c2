// SPDX-License-Identifier: Apache-2.0

package slmp_test

import (
	"cmp"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// A keeper is a receiver of which there can be thousands: the table of messages and the
// protocol, without the engine between them.
type keeper struct {
	w     *world
	table *mpq.Table
	open  map[*mpq.Entry]*kept
	looks bool // it will, after those that have timed out

	began, ended map[name]int
}

// kept is a message that is open.
type kept struct {
	name
	held []func()         // segments that are to arrive again
	eom  *spin.AckRequest // what is to be answered when it is complete
}

func (w *world) newKeeper(remember time.Duration) *keeper {
	w.Helper()
	q, err := mpq.NewQueue(mpq.Config{Words: 3, Remember: remember})
	if err != nil {
		w.Fatal(err)
	}
	k := &keeper{w: w, table: q.NewTable(false), open: map[*mpq.Entry]*kept{}, began: map[name]int{}, ended: map[name]int{}}
	w.receive = k.receive
	return k
}

func (k *keeper) receive(from netip.AddrPort, b []byte) {
	w, t := k.w, k.table
	ask, ok := slmp.Protocol{}.Inspect(b[:slmp.HeaderLen])
	if !ok {
		w.Fatalf("no segment: %x", b)
	}
	n := name{from, ask.ID}
	ip := from.Addr().As4()
	key := mpq.Key{binary.BigEndian.Uint32(ip[:]), uint32(from.Port()), ask.ID}
	s := mpq.Segment{Offset: ask.Offset, Len: len(b) - slmp.HeaderLen, EOM: slmp.Flags(ask.Flags)&slmp.EOM != 0}
	e, d, _ := t.Arrive(&key, s, w.now)
	if e != nil && k.open[e] == nil {
		k.open[e] = &kept{name: n}
		k.look()
	}
	switch d {
	case mpq.Start:
		k.began[n]++
		k.soon(func() {
			m := k.open[e]
			held := m.held
			m.held = nil
			for range held {
				t.Unhold(e)
			}
			if w.chance(w.behave.fail) {
				k.fail(e, s)
				return
			}
			t.Opened(e, w.now)
			k.run(e, s, ask)
			for _, again := range held {
				again()
			}
		})
	case mpq.Run:
		k.soon(func() { k.run(e, s, ask) })
	case mpq.Hold:
		m := k.open[e]
		m.held = append(m.held, func() { k.receive(from, b) })
		k.answer(n, ask, false, e)
	case mpq.Again:
		k.answer(n, ask, true, e)
	case mpq.Wait:
		k.answer(n, ask, false, e)
	}
}

// soon calls a handler, now or later.
func (k *keeper) soon(f func()) {
	w := k.w
	if w.chance(w.behave.pending) {
		w.at(w.now+w.Int64N(w.behave.slow), f)
		return
	}
	f()
}

// run is the payload handler, and what follows.
func (k *keeper) run(e *mpq.Entry, s mpq.Segment, ask spin.AckRequest) {
	w, t, m := k.w, k.table, k.open[e]
	if e.State() != mpq.Failed && w.chance(w.behave.fail) {
		k.fail(e, s)
		return
	}
	complete := t.Finish(e, s, w.now)
	switch {
	case e.State() == mpq.Failed:
	case e.State() == mpq.Free:
		delete(k.open, e)
	case complete && w.chance(w.behave.fail):
		t.Fail(e, w.now)
		delete(k.open, e)
	case complete:
		t.End(e, w.now)
		delete(k.open, e)
		k.ended[m.name]++
		k.answer(m.name, ask, true, nil)
		if m.eom != nil {
			k.answer(m.name, *m.eom, true, nil)
		}
	case s.EOM:
		m.eom = &ask
		k.answer(m.name, ask, false, e)
	default:
		k.answer(m.name, ask, true, e)
	}
}

// fail is what the failure of a handler leads to, that ran for a segment.
func (k *keeper) fail(e *mpq.Entry, s mpq.Segment) {
	k.table.Fail(e, k.w.now)
	k.table.Finish(e, s, k.w.now)
	if e.State() == mpq.Free {
		delete(k.open, e)
	}
}

func (k *keeper) answer(n name, ask spin.AckRequest, processed bool, e *mpq.Entry) {
	b := slmp.Protocol{}.Answer(nil, ask, processed, e)
	if len(b) == 0 {
		return
	}
	for _, s := range k.w.senders {
		if s.addr == n.from {
			k.w.send(&k.w.back, b, s.acknowledge)
		}
	}
}

// look ends what has timed out, as long as something may.
func (k *keeper) look() {
	w, t := k.w, k.table
	if k.looks {
		return
	}
	k.looks = true
	w.at(w.now+lookEvery, func() {
		k.looks = false
		for e := t.Expired(w.now); e != nil; e = t.Expired(w.now) {
			if e.State() == mpq.Waiting {
				for range k.open[e].held {
					t.Unhold(e)
				}
				t.Refuse(e)
			} else {
				t.End(e, w.now)
			}
			delete(k.open, e)
		}
		if len(k.open) > 0 {
			k.look()
		}
	})
}

// pause sends a message whose last byte has to be waited for.
func (x *sender) pause(id uint32, size uint64, begins, ends int64) {
	x.size[id] = size
	x.open++
	x.w.at(begins, func() {
		o, err := x.s.Open(id)
		if err != nil {
			x.w.Fatal(err)
		}
		o.Supply(size-1, false)
		x.pump()
		x.w.at(ends, func() {
			if _, over := x.errs[id]; !over {
				o.Supply(size, true)
				x.pump()
			}
		})
	})
}

// An outage is when a path is down, and which way.
type outage struct {
	ways   string // that are down
	begins int64  // after the first messages
	lasts  time.Duration
	since  time.Duration // the receiver has run then: what it remembers, it clears from time to time
}

// through sends messages of all kinds through an outage, and returns which begin twice.
func (o outage) through(t *testing.T, remember time.Duration, seed uint64, outcomes map[string]int) (twice []name) {
	t.Helper()
	w := &world{T: t, Rand: rand.New(rand.NewPCG(seed, 7)), now: 1 + int64(o.since)}
	begun := w.now
	w.behave = behaviour{pending: 0.3, slow: msec, fail: 0.02}
	for _, l := range []*link{&w.there, &w.back} {
		*l = link{delay: 500 * usec, loss: 0.1, double: 0.1}
	}
	down := func(l *link) { l.deadFrom, l.deadTo = begun+o.begins, begun+o.begins+int64(o.lasts) }
	if o.ways != "back" {
		down(&w.there)
	}
	if o.ways != "there" {
		down(&w.back)
	}
	k := w.newKeeper(remember)
	for _, c := range []slmp.SenderConfig{
		{Window: 4}, {}, {Plain: true, Window: 4}, {Mode: slmp.FirstLast},
		{Window: 4, Retries: 90, Patience: time.Minute}, {Plain: true, Window: 4, Retries: 90}, // much longer than by default
	} {
		c.Payload = 100
		s := w.newSender(c)
		for id, size := range []uint64{0, 50, 50, 150, 150, 250, 1500} {
			s.message(uint32(id), size, begun+w.Int64N(4*msec), id%2 == 0)
		}
		s.pause(7, 150, begun+w.Int64N(4*msec), begun+int64(o.lasts)+w.Int64N(sec))
	}
	w.run(begun+1000*sec, w.all)
	for _, s := range w.senders {
		for id, err := range s.errs {
			n := name{s.addr, id}
			switch {
			case k.began[n] > 1:
				twice = append(twice, n)
			case err == nil && k.ended[n] != 1:
				t.Errorf("%v of %d bytes: success, but it has ended %d times, with an outage %+v", n, s.size[id], k.ended[n], o)
			case err == nil:
				outcomes["delivered"]++
			default:
				outcomes[errors.Unwrap(err).Error()]++
			}
		}
	}
	return twice
}

// The path goes down at any time of a message's life, for any time up to a minute.
func TestModelOutage(t *testing.T) {
	step := 500 * time.Millisecond / time.Duration(testenv.Soak())
	if testenv.Race || testing.Short() {
		step = 2 * time.Second
	}
	for _, tc := range []struct {
		name     string
		remember time.Duration // 0: the default
		twice    bool
	}{
		{"a receiver that remembers as long as it should begins no message twice", 0, false},
		{"one that forgets five seconds before senders give up does", slmp.MaxSilence - 5*time.Second, true},
		{"one that forgets after four seconds does", 4 * time.Second, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			outcomes := map[string]int{}
			remember := cmp.Or(tc.remember, spin.DefaultRemember)
			seed, twice := uint64(0), 0
			found := func() bool { return tc.twice && twice > 0 }
			for lasts := time.Duration(0); lasts <= time.Minute && !found(); lasts += step {
				for begins := int64(0); begins < 8*msec && !found(); begins += 500 * usec {
					seed++
					o := outage{
						ways: []string{"both", "there", "both", "back"}[seed%4], begins: begins, lasts: lasts,
						since: []time.Duration{remember / 2, remember - 20*time.Millisecond, remember - 5*time.Millisecond}[seed%3],
					}
					again := o.through(t, tc.remember, seed, outcomes)
					twice += len(again)
					if len(again) > 0 && !tc.twice {
						t.Fatalf("%v begin twice, with an outage %+v", again, o)
					}
				}
			}
			if tc.twice && twice == 0 {
				t.Error("none has begun twice")
			}
			t.Logf("%d outages, %d messages began twice; %v", seed, twice, outcomes)
		})
	}
}
