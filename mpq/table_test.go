// SPDX-License-Identifier: Apache-2.0

package mpq

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/xspin/xspin/spin"
)

const ms = int64(time.Millisecond)

// queue returns a table of a new queue.
func queue(t testing.TB, c Config) (*Queue, *Table) {
	t.Helper()
	q, err := NewQueue(c)
	if err != nil {
		t.Fatal(err)
	}
	return q, q.NewTable(false)
}

func seg(offset uint32, n int) Segment { return Segment{Offset: offset, Len: n} }
func eom(offset uint32, n int) Segment { return Segment{Offset: offset, Len: n, EOM: true} }

// arrive lets a segment arrive, and wants a decision.
func arrive(t testing.TB, tab *Table, k *Key, s Segment, now int64, want Decision, why spin.DropReason) *Entry {
	t.Helper()
	e, d, r := tab.Arrive(k, s, now)
	if d != want || r != why {
		t.Fatalf("%+v: %v (%v), want %v (%v)", s, d, r, want, why)
	}
	return e
}

// begin starts a message with its header packet, which stays unfinished.
func begin(t testing.TB, tab *Table, k *Key, s Segment, now int64) *Entry {
	t.Helper()
	e := arrive(t, tab, k, s, now, Start, spin.NotDropped)
	tab.Opened(e, now)
	return e
}

// run lets a new segment arrive, and finishes it.
func run(t testing.TB, tab *Table, k *Key, s Segment, now int64) (complete bool) {
	t.Helper()
	return tab.Finish(arrive(t, tab, k, s, now, Run, spin.NotDropped), s, now)
}

func TestMessageInOrder(t *testing.T) {
	q, tab := queue(t, Config{})
	k := Key{1, 2, 3}
	e := begin(t, tab, &k, seg(0, 100), 1)
	if tab.Finish(e, seg(0, 100), 1) {
		t.Fatal("complete after the first segment")
	}
	for i := uint32(1); i < 10; i++ {
		if run(t, tab, &k, seg(100*i, 100), 1) {
			t.Fatalf("complete after %d segments", i+1)
		}
	}
	if !run(t, tab, &k, eom(1000, 7), 1) {
		t.Fatal("not complete after EOM")
	}
	if n, ok := e.Length(); n != 1007 || !ok || e.Missing() != 0 || e.State() != Ending {
		t.Errorf("length %d, %v, missing %d, %v", n, ok, e.Missing(), e.State())
	}
	arrive(t, tab, &k, eom(1000, 7), 1, Wait, spin.NotDropped)
	arrive(t, tab, &k, seg(100, 100), 1, Again, spin.NotDropped)
	tab.End(e, 2)
	if e := arrive(t, tab, &k, eom(1000, 7), 2, Again, spin.NotDropped); e != nil {
		t.Errorf("entry %p of an ended message", e)
	}
	if s := q.Stats(); s.Started != 1 || s.Ended != 1 || s.Open != 0 || s.Duplicates != 2 || s.Waits != 1 {
		t.Errorf("%+v", s)
	}
}

// Segments of every kind, in every state of a message's bytes.
func TestDecisions(t *testing.T) {
	const far = 16 << 20 / 8 * 8 // segments: a bit each, in an eighth of the memory
	type step struct {
		s    Segment
		d    Decision
		r    spin.DropReason
		keep bool // it is not finished
	}
	for name, steps := range map[string][]step{
		"out of order": {
			{seg(0, 10), Start, spin.NotDropped, false}, {seg(30, 10), Run, spin.NotDropped, false}, {eom(40, 5), Run, spin.NotDropped, false},
			{seg(30, 10), Again, spin.NotDropped, false}, {eom(40, 5), Wait, spin.NotDropped, false},
			{seg(10, 10), Run, spin.NotDropped, false}, {seg(20, 10), Run, spin.NotDropped, false},
		},
		"other cuts of a regular message": {
			{seg(0, 10), Start, spin.NotDropped, false}, {seg(20, 10), Run, spin.NotDropped, false},
			{seg(20, 5), Drop, spin.DropOverlap, false}, {seg(0, 5), Drop, spin.DropOverlap, false}, {seg(5, 10), Drop, spin.DropOverlap, false},
			{seg(15, 10), Drop, spin.DropOverlap, false}, {seg(25, 10), Drop, spin.DropOverlap, false}, {seg(10, 20), Drop, spin.DropOverlap, false},
			{eom(20, 10), Drop, spin.DropOverlap, false}, {seg(0, 10), Again, spin.NotDropped, false},
			{seg(10, 10), Run, spin.NotDropped, false}, {eom(30, 0), Run, spin.NotDropped, false},
		},
		"becomes irregular": {
			{seg(0, 10), Start, spin.NotDropped, false}, {seg(30, 10), Run, spin.NotDropped, false}, {seg(50, 10), Run, spin.NotDropped, false},
			{seg(10, 7), Run, spin.NotDropped, false}, {seg(17, 3), Run, spin.NotDropped, false}, {seg(10, 10), Again, spin.NotDropped, false},
			{seg(25, 10), Drop, spin.DropOverlap, false}, {seg(20, 10), Run, spin.NotDropped, false}, {eom(60, 1), Run, spin.NotDropped, false},
			{seg(41, 8), Run, spin.NotDropped, false}, {seg(40, 1), Run, spin.NotDropped, false}, {seg(49, 1), Run, spin.NotDropped, false},
		},
		"becomes irregular behind EOM's bytes": {
			{seg(0, 10), Start, spin.NotDropped, false}, {eom(30, 5), Run, spin.NotDropped, false},
			{seg(30, 5), Drop, spin.DropOverlap, false}, {seg(25, 10), Drop, spin.DropOverlap, false}, {seg(31, 2), Drop, spin.DropOverlap, false},
			{seg(10, 20), Run, spin.NotDropped, false},
		},
		"two ends": {
			{seg(0, 10), Start, spin.NotDropped, false}, {seg(20, 10), Run, spin.NotDropped, false},
			{eom(10, 10), Drop, spin.DropTwoEnds, false}, {eom(30, 5), Run, spin.NotDropped, false},
			{seg(30, 5), Drop, spin.DropOverlap, false}, {eom(30, 6), Drop, spin.DropTwoEnds, false}, {eom(20, 10), Drop, spin.DropTwoEnds, false}, {seg(30, 10), Drop, spin.DropTwoEnds, false},
			{seg(40, 10), Drop, spin.DropTwoEnds, false}, {eom(31, 4), Drop, spin.DropOverlap, false}, {seg(10, 10), Run, spin.NotDropped, false},
		},
		"EOM's bytes without EOM": {
			{seg(0, 10), Start, spin.NotDropped, false}, {eom(20, 10), Run, spin.NotDropped, false}, {seg(20, 10), Drop, spin.DropOverlap, false},
			{seg(10, 10), Run, spin.NotDropped, false},
		},
		"EOM's bytes without EOM, irregular": {
			{seg(0, 10), Start, spin.NotDropped, false}, {seg(15, 5), Run, spin.NotDropped, false}, {eom(20, 10), Run, spin.NotDropped, false},
			{seg(20, 10), Drop, spin.DropOverlap, false}, {seg(22, 3), Drop, spin.DropOverlap, false}, {seg(15, 10), Drop, spin.DropOverlap, false},
			{seg(10, 5), Run, spin.NotDropped, false},
		},
		"empty message":              {{eom(0, 0), Start, spin.NotDropped, false}},
		"one segment":                {{eom(0, 9), Start, spin.NotDropped, false}},
		"empty EOM":                  {{seg(0, 10), Start, spin.NotDropped, false}, {eom(10, 0), Run, spin.NotDropped, false}},
		"empty EOM first":            {{seg(0, 10), Start, spin.NotDropped, false}, {eom(20, 0), Run, spin.NotDropped, false}, {eom(20, 0), Wait, spin.NotDropped, false}, {seg(10, 10), Run, spin.NotDropped, false}},
		"empty header packet":        {{seg(0, 0), Start, spin.NotDropped, false}, {seg(0, 0), Again, spin.NotDropped, false}, {seg(0, 9), Run, spin.NotDropped, false}, {eom(9, 1), Run, spin.NotDropped, false}},
		"empty header packet, empty": {{seg(0, 0), Start, spin.NotDropped, true}, {seg(0, 0), Wait, spin.NotDropped, false}, {eom(0, 0), Run, spin.NotDropped, true}, {eom(0, 0), Wait, spin.NotDropped, false}},
		"empty segments": {
			{seg(0, 10), Start, spin.NotDropped, false}, {seg(10, 0), Again, spin.NotDropped, false}, {seg(30, 0), Again, spin.NotDropped, false},
			{eom(10, 5), Run, spin.NotDropped, true}, {seg(16, 0), Drop, spin.DropTwoEnds, false},
		},
		"while it runs": {
			{seg(0, 10), Start, spin.NotDropped, true}, {seg(0, 10), Wait, spin.NotDropped, false}, {seg(20, 10), Run, spin.NotDropped, true},
			{seg(20, 10), Wait, spin.NotDropped, false}, {seg(10, 10), Run, spin.NotDropped, true}, {seg(10, 10), Wait, spin.NotDropped, false},
			{eom(30, 10), Run, spin.NotDropped, true}, {eom(30, 10), Wait, spin.NotDropped, false},
		},
		"irregular while it runs": {
			{seg(0, 10), Start, spin.NotDropped, true}, {seg(12, 3), Run, spin.NotDropped, true}, {seg(12, 3), Wait, spin.NotDropped, false},
			{seg(13, 1), Wait, spin.NotDropped, false}, {seg(10, 2), Run, spin.NotDropped, true}, {seg(9, 4), Wait, spin.NotDropped, false}, {eom(15, 1), Run, spin.NotDropped, true},
		},
		"too long": {
			{seg(math.MaxUint32, 2), Drop, spin.DropBeyond, false}, {seg(0, 10), Start, spin.NotDropped, false},
			{seg(math.MaxUint32, 2), Drop, spin.DropBeyond, false}, {seg(0, 1<<31), Drop, spin.DropBeyond, false}, {seg(0, -1), Drop, spin.DropBeyond, false},
			{seg(10, 10), Run, spin.NotDropped, false}, {eom(20, 0), Run, spin.NotDropped, false},
		},
		"too far": {
			{seg(0, 1), Start, spin.NotDropped, false}, {seg(far+2, 1), Drop, spin.DropMemory, false}, {seg(far+1, 1), Run, spin.NotDropped, false},
			{eom(far+2, 1), Drop, spin.DropMemory, false}, {seg(1, 1), Run, spin.NotDropped, false}, {eom(far+2, 1), Run, spin.NotDropped, false},
			{seg(2, far-1), Run, spin.NotDropped, false},
		},
		"up to the last byte": {
			{seg(0, 1<<30), Start, spin.NotDropped, false}, {seg(2<<30, 1<<30), Run, spin.NotDropped, false}, {eom(3<<30, 1<<30), Run, spin.NotDropped, false},
			{seg(1<<30, 1<<30), Run, spin.NotDropped, false},
		},
	} {
		t.Run(name, func(t *testing.T) {
			q, tab := queue(t, Config{})
			k := Key{7}
			var e *Entry
			var kept []Segment
			complete := false
			for i, s := range steps {
				got, d, r := tab.Arrive(&k, s.s, 1)
				if d != s.d || r != s.r {
					t.Fatalf("step %d, %+v: %v (%v), want %v (%v)", i, s.s, d, r, s.d, s.r)
				}
				if d == Start {
					e = got
					tab.Opened(e, 1)
				}
				if d != Start && d != Run {
					continue
				}
				if complete {
					t.Fatalf("step %d, %+v: of a complete message", i, s.s)
				}
				if s.keep {
					kept = append(kept, s.s)
				} else {
					complete = tab.Finish(e, s.s, 1)
				}
			}
			for i, s := range kept {
				if complete = tab.Finish(e, s, 1); complete && i < len(kept)-1 {
					t.Fatalf("complete, but %d segments run", len(kept)-i)
				}
			}
			if len(kept) > 0 && name == "empty segments" {
				complete = e.State() == Ending
			}
			if !complete {
				t.Fatalf("not complete: %+v", e)
			}
			if n, _ := e.Length(); e.Processed() != n || e.Contiguous() != n || e.Missing() != 0 {
				t.Errorf("length %d, processed %d, contiguous %d, missing %d", n, e.Processed(), e.Contiguous(), e.Missing())
			}
			tab.End(e, 1)
			if s := q.Stats(); s.Open != 0 || s.Memory != 0 {
				t.Errorf("left: %+v", s)
			}
		})
	}
}

func TestHold(t *testing.T) {
	q, tab := queue(t, Config{Held: 2, Messages: 2})
	a, b, c := Key{1}, Key{2}, Key{3}
	e := arrive(t, tab, &a, seg(10, 10), 1, Hold, spin.NotDropped)
	if e.State() != Waiting {
		t.Errorf("%v", e.State())
	}
	arrive(t, tab, &a, eom(20, 10), 1, Hold, spin.NotDropped)
	arrive(t, tab, &a, seg(30, 10), 1, Drop, spin.DropNoHeader)
	if e := arrive(t, tab, &b, seg(10, 10), 1, Drop, spin.DropNoHeader); e != nil {
		t.Error("an entry for a message of which nothing is held")
	}
	if arrive(t, tab, &a, seg(0, 10), 1, Start, spin.NotDropped) != e {
		t.Error("another entry")
	}
	arrive(t, tab, &a, seg(0, 10), 1, Wait, spin.NotDropped)
	arrive(t, tab, &a, seg(10, 10), 1, Drop, spin.DropNoHeader)
	tab.Opened(e, 1)
	tab.Finish(e, seg(0, 10), 1)
	tab.Unhold(e)
	tab.Unhold(e)
	run(t, tab, &a, seg(10, 10), 1)

	// All that waits for a header packet that does not come.
	w := arrive(t, tab, &b, seg(10, 10), 1, Hold, spin.NotDropped)
	arrive(t, tab, &c, seg(0, 10), 1, Drop, spin.DropMessages)
	arrive(t, tab, &c, seg(10, 10), 1, Drop, spin.DropMessages)
	if q.Held() != 1 || q.Open() != 2 {
		t.Errorf("held %d, open %d", q.Held(), q.Open())
	}
	if x := tab.Expired(int64(HeaderWait)); x != nil {
		t.Errorf("expired too soon")
	}
	if n := tab.Next(); n != int64(HeaderWait)+1 {
		t.Errorf("next at %d", n)
	}
	if x := tab.Expired(int64(HeaderWait) + 1); x != w || x.State() != Waiting {
		t.Fatalf("expired: %p", x)
	}
	arrive(t, tab, &b, seg(0, 10), 1, Drop, spin.DropDead)
	tab.Unhold(w)
	tab.Refuse(w)
	if s := q.Stats(); s.Dropped[spin.DropNoHeader] != 4 || s.Refused != 0 || s.HeldNow != 0 || s.Held != 3 {
		t.Errorf("%+v", s)
	}
	arrive(t, tab, &b, seg(0, 10), 1, Start, spin.NotDropped)
}

func TestRefuseIsForgotten(t *testing.T) {
	q, tab := queue(t, Config{})
	k := Key{1}
	tab.Refuse(arrive(t, tab, &k, seg(0, 10), 1, Start, spin.NotDropped))
	tab.Refuse(arrive(t, tab, &k, seg(0, 10), 1, Start, spin.NotDropped))
	if s := q.Stats(); s.Refused != 2 || s.Open != 0 {
		t.Errorf("%+v", s)
	}
}

func TestFail(t *testing.T) {
	q, tab := queue(t, Config{})
	k := Key{1}
	e := begin(t, tab, &k, seg(0, 10), 1)
	arrive(t, tab, &k, seg(10, 10), 1, Run, spin.NotDropped)
	tab.Fail(e, 1)
	tab.Fail(e, 1)
	if e.State() != Failed || q.Open() != 1 {
		t.Fatalf("%v, open %d", e.State(), q.Open())
	}
	arrive(t, tab, &k, seg(0, 10), 1, Drop, spin.DropDead)
	arrive(t, tab, &k, eom(20, 10), 1, Drop, spin.DropDead)
	if tab.Finish(e, seg(10, 10), 1) || q.Open() != 1 || tab.Finish(e, seg(0, 10), 1) || q.Open() != 0 {
		t.Fatal("a failed message ends with the last segment that runs, and is never complete")
	}
	arrive(t, tab, &k, seg(0, 10), 1, Drop, spin.DropDead)

	// In the header handler, and in the completion handler.
	k = Key{2}
	e = arrive(t, tab, &k, eom(0, 10), 1, Start, spin.NotDropped)
	tab.Fail(e, 1)
	tab.Finish(e, eom(0, 10), 1)
	arrive(t, tab, &k, eom(0, 10), 1, Drop, spin.DropDead)
	k = Key{3}
	e = begin(t, tab, &k, eom(0, 10), 1)
	if !tab.Finish(e, eom(0, 10), 1) {
		t.Fatal("not complete")
	}
	tab.Fail(e, 1)
	arrive(t, tab, &k, eom(0, 10), 1, Drop, spin.DropDead)
	if s := q.Stats(); s.Failed != 3 || s.Ended != 0 || s.Open != 0 || s.Dropped[spin.DropDead] != 5 {
		t.Errorf("%+v", s)
	}
}

func TestDefer(t *testing.T) {
	q, tab := queue(t, Config{Timeout: time.Second})
	k := Key{1}
	e := begin(t, tab, &k, seg(0, 10), 1)
	tab.Finish(e, seg(0, 10), 1)
	if !run(t, tab, &k, eom(10, 10), 1) {
		t.Fatal("not complete")
	}
	tab.Defer(e, 1)
	if e.State() != Deferred {
		t.Errorf("%v", e.State())
	}
	arrive(t, tab, &k, seg(0, 10), 1, Again, spin.NotDropped)
	arrive(t, tab, &k, eom(10, 10), 900*ms, Notify, spin.NotDropped)
	arrive(t, tab, &k, eom(10, 10), 900*ms, Wait, spin.NotDropped) // one at a time
	if tab.Retry(e) || tab.stop(e) || tab.Expired(5000*ms) != nil {
		t.Error("taken twice")
	}
	tab.Defer(e, 900*ms)
	if !tab.Retry(e) {
		t.Error("Retry refused")
	}
	tab.Defer(e, 900*ms)
	// It has time as long as its sender asks.
	if tab.Expired(7000*ms) != e || e.State() != Deferred {
		t.Fatal("not expired")
	}
	arrive(t, tab, &k, eom(10, 10), 7000*ms, Wait, spin.NotDropped)
	tab.End(e, 7000*ms)
	arrive(t, tab, &k, eom(10, 10), 7000*ms, Again, spin.NotDropped)
	if s := q.Stats(); s.Ended != 1 {
		t.Errorf("%+v", s)
	}
}

// A deferred message has Timeout since its sender last wanted something. What the
// receiver tries by itself does not count.
func TestDeferredMessageIsAbandonedInTime(t *testing.T) {
	again := func(t *testing.T, tab *Table, k *Key, e *Entry) {
		for now := 100 * ms; now < 1000*ms; now += 100 * ms {
			if tab.Expired(now) != nil || !tab.Retry(e) {
				t.Fatalf("it is over at %d ms", now/ms)
			}
			tab.Defer(e, now)
		}
	}
	for name, tc := range map[string]struct {
		meanwhile func(*testing.T, *Table, *Key, *Entry)
		deferred  int64 // first
		due       int64
	}{
		"nobody asks":     {nil, 0, 1000 * ms},
		"it is retried":   {again, 0, 1000 * ms},
		"it ended slowly": {nil, 5500 * ms, 6500 * ms},
		"its sender asks": {func(t *testing.T, tab *Table, k *Key, e *Entry) {
			arrive(t, tab, k, eom(10, 10), 900*ms, Notify, spin.NotDropped)
			tab.Defer(e, 950*ms)
		}, 0, 1900 * ms},
		"it is tried when it would be looked at": {func(t *testing.T, tab *Table, _ *Key, e *Entry) {
			if tab.Expired(999*ms) != nil || !tab.Retry(e) || tab.Expired(1200*ms) != nil {
				t.Fatal("it is over")
			}
			tab.Defer(e, 1300*ms)
		}, 500 * ms, 1500 * ms},
	} {
		t.Run(name, func(t *testing.T) {
			_, tab := queue(t, Config{Timeout: time.Second})
			k := Key{1}
			e := begin(t, tab, &k, seg(0, 10), 0)
			tab.Finish(e, seg(0, 10), 0)
			if !run(t, tab, &k, eom(10, 10), 0) {
				t.Fatal("not complete")
			}
			if tab.Expired(tc.deferred) != nil {
				t.Fatal("expired while its completion handler runs")
			}
			tab.Defer(e, tc.deferred)
			if tc.meanwhile != nil {
				tc.meanwhile(t, tab, &k, e)
			}
			if tab.Expired(tc.due-1) != nil {
				t.Fatalf("expired before %d ms", tc.due/ms)
			}
			if tab.Expired(tc.due) != e {
				t.Fatalf("not expired at %d ms", tc.due/ms)
			}
		})
	}
}

func TestTimeout(t *testing.T) {
	for _, how := range []Incomplete{Abandon, Linger, Discard} {
		q, tab := queue(t, Config{Timeout: 100 * time.Millisecond, Linger: 5 * time.Millisecond, Incomplete: how, Messages: 8})
		k := Key{uint32(how)}
		if tab.Next() != 0 {
			t.Errorf("%d: something to wait for in an empty table", how)
		}
		e := begin(t, tab, &k, seg(0, 10), ms)
		if tab.Expired(1000*ms) != nil {
			t.Fatal("expired while a segment runs")
		}
		tab.Finish(e, seg(0, 10), 1000*ms)
		run(t, tab, &k, seg(20, 10), 1050*ms)
		arrive(t, tab, &k, seg(20, 10), 1149*ms, Again, spin.NotDropped) // nothing new
		if tab.Expired(1149*ms) != nil {
			t.Fatal("expired too soon")
		}
		end := 1150 * ms
		if how == Linger {
			end = 1065 * ms
			run(t, tab, &k, eom(30, 5), 1060*ms)
			if n := tab.Next(); n > end {
				t.Errorf("next at %d, want %d", n, end)
			}
			if tab.Expired(end-1) != nil {
				t.Fatal("expired too soon after EOM")
			}
		} else if n := tab.Next(); n == 0 || n > end {
			t.Errorf("next at %d, want at most %d", n, end)
		}
		if tab.Expired(end) != e || e.State() != Open {
			t.Fatalf("%d: not expired", how)
		}
		if tab.Expired(end) != nil || tab.stop(e) {
			t.Error("expired twice")
		}
		arrive(t, tab, &k, seg(10, 10), end, Drop, spin.DropDead)
		if e.Missing() != 10 {
			t.Errorf("missing %d", e.Missing())
		}
		tab.End(e, end)
		arrive(t, tab, &k, seg(10, 10), end, Drop, spin.DropDead)
		arrive(t, tab, &k, seg(20, 10), end, Drop, spin.DropDead)
		s := q.Stats()
		if want := map[bool]uint64{true: 1}[how == Discard]; s.Discarded != want || s.Abandoned != 1-want || s.Ended != 0 {
			t.Errorf("%d: %+v", how, s)
		}
	}
}

// A message that lingers while a kept packet of it runs ends when that is done.
func TestLingerWhileRunning(t *testing.T) {
	_, tab := queue(t, Config{Incomplete: Linger, Linger: 5 * time.Millisecond})
	k := Key{1}
	e := begin(t, tab, &k, seg(0, 10), ms)
	run(t, tab, &k, eom(20, 10), ms)
	if tab.Expired(100*ms) != nil {
		t.Fatal("expired while a segment runs")
	}
	tab.Finish(e, seg(0, 10), 200*ms)
	if n := tab.Next(); n > 200*ms {
		t.Errorf("next at %v, want at once", time.Duration(n))
	}
	if tab.Expired(200*ms) != e {
		t.Fatal("not expired")
	}
	tab.End(e, 200*ms)
}

func TestStopNext(t *testing.T) {
	q, tab := queue(t, Config{})
	var running []*Entry
	for i := range uint32(500) {
		k := Key{i}
		e := begin(t, tab, &k, seg(0, 10), 1)
		if i%2 == 0 {
			tab.Finish(e, seg(0, 10), 1)
		} else {
			running = append(running, e)
		}
	}
	stop := func(want int) {
		t.Helper()
		n := 0
		for e := tab.StopNext(); e != nil; e = tab.StopNext() {
			n++
			tab.End(e, 1)
		}
		if s := q.Stats(); n != want || s.Open != len(running) {
			t.Errorf("stopped %d, want %d: %+v", n, want, s)
		}
	}
	stop(250) // those of which no segment runs
	stop(0)
	for _, e := range running {
		tab.Finish(e, seg(0, 10), 1)
	}
	running = nil
	stop(250)
}

// All messages of a table are stopped when their context ends: each costs the same,
// however many there are.
func BenchmarkStopNext(b *testing.B) {
	for _, n := range []int{1 << 10, 1 << 17} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				_, tab := queue(b, Config{Messages: n})
				for i := range uint32(n) {
					tab.Finish(begin(b, tab, &Key{i}, seg(0, 10), 1), seg(0, 10), 1)
				}
				b.StartTimer()
				for e := tab.StopNext(); e != nil; e = tab.StopNext() {
					tab.End(e, 1)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/message")
		})
	}
}

func TestBitmap(t *testing.T) {
	_, tab := queue(t, Config{})
	k := Key{1}
	e := begin(t, tab, &k, seg(0, 10), 1)
	check := func(end uint64, words ...uint64) {
		t.Helper()
		if got := e.Bitmap(nil, 16); e.Contiguous() != end || !slices.Equal(got, words) {
			t.Errorf("contiguous %d, bitmap %x, want %d, %x", e.Contiguous(), got, end, words)
		}
	}
	check(0, 0) // it runs
	tab.Finish(e, seg(0, 10), 1)
	check(10, 0)
	run(t, tab, &k, seg(20, 10), 1)
	check(10, 1)
	run(t, tab, &k, seg(20+64*10, 10), 1)
	check(10, 1, 1)
	run(t, tab, &k, seg(20+127*10, 10), 1)
	check(10, 1, 1|1<<63)
	run(t, tab, &k, eom(20+128*10, 3), 1)
	check(10, 1, 1|1<<63, 1)
	if got := e.Bitmap([]uint64{5}, 2); !slices.Equal(got, []uint64{5, 1, 1 | 1<<63}) {
		t.Errorf("two words: %x", got)
	}
	for i := range uint32(2000) {
		if o := 10 * i; i > 2 && e.has(uint64(i)) == false && o < 1300 {
			run(t, tab, &k, seg(o, 10), 1)
		}
	}
	check(10, ^uint64(0), ^uint64(0), 1)
	arrive(t, tab, &k, seg(10, 10), 1, Run, spin.NotDropped)
	check(10, ^uint64(0), ^uint64(0), 1)
	if !tab.Finish(e, seg(10, 10), 1) {
		t.Fatal("not complete")
	}
	check(1303, 0)
	tab.End(e, 1)

	// What runs is not processed.
	k = Key{2}
	e = begin(t, tab, &k, seg(0, 10), 1)
	tab.Finish(e, seg(0, 10), 1)
	for i := range uint32(9) {
		arrive(t, tab, &k, seg(10*(i+1), 10), 1, Run, spin.NotDropped)
	}
	for _, i := range []uint32{3, 5, 9} {
		tab.Finish(e, seg(10*i, 10), 1)
	}
	check(10, 1<<1|1<<3|1<<7)
	tab.Finish(e, seg(10, 10), 1)
	check(20, 1<<0|1<<2|1<<6)

	// Other cuts.
	arrive(t, tab, &k, seg(200, 7), 1, Run, spin.NotDropped)
	check(20, 0)
}

// A ring as long as can be, with every place taken, tells of its own segments only.
func TestFullRing(t *testing.T) {
	for _, n := range []uint32{64, 128, 1024, 1 << 16} {
		_, tab := queue(t, Config{})
		k := Key{1}
		e := begin(t, tab, &k, seg(0, 4), 1)
		tab.Finish(e, seg(0, 4), 1)
		for i := n + 1; i > 1; i-- {
			run(t, tab, &k, seg(4*i, 4), 1)
			arrive(t, tab, &k, seg(4*i, 4), 1, Again, spin.NotDropped)
			arrive(t, tab, &k, seg(4*i+1, 2), 1, Drop, spin.DropOverlap)
		}
		b := e.Bitmap(nil, int(n))
		if len(b) != int(n/64) || e.Contiguous() != 4 {
			t.Fatalf("%d words, contiguous %d", len(b), e.Contiguous())
		}
		for _, w := range b {
			if w != ^uint64(0) {
				t.Fatalf("%x", b)
			}
		}
		run(t, tab, &k, seg(5, 1), 1) // irregular
		run(t, tab, &k, seg(4, 1), 1)
		run(t, tab, &k, seg(6, 2), 1)
		if e.Contiguous() != 4*uint64(n+2) {
			t.Fatalf("contiguous %d", e.Contiguous())
		}
	}
}

func TestIntervalBound(t *testing.T) {
	q, tab := queue(t, Config{})
	k := Key{1}
	e := begin(t, tab, &k, seg(0, 3), 1)
	for i := uint32(1); i <= MaxIntervals; i++ {
		run(t, tab, &k, seg(3+7*i, 2), 1)
	}
	arrive(t, tab, &k, seg(3+7*(MaxIntervals+1), 2), 1, Drop, spin.DropMemory)
	run(t, tab, &k, seg(3, 7), 1) // closes a hole
	run(t, tab, &k, seg(3+7*(MaxIntervals+1), 2), 1)
	if m := q.Stats().Memory; m > 8*2*MaxIntervals {
		t.Errorf("%d bytes", m)
	}
	// A regular message with too many stretches does not become irregular.
	k = Key{2}
	begin(t, tab, &k, seg(0, 10), 1)
	for i := uint32(1); i <= MaxIntervals; i++ {
		run(t, tab, &k, seg(20*i, 10), 1)
	}
	arrive(t, tab, &k, seg(10, 5), 1, Drop, spin.DropMemory)
	run(t, tab, &k, seg(30, 10), 1)
	run(t, tab, &k, seg(10, 5), 1)
	_ = e
}

func TestMemoryLimit(t *testing.T) {
	q, tab := queue(t, Config{Memory: 1 << 10})
	dropped := 0
	for i := range uint32(100) {
		k := Key{i}
		begin(t, tab, &k, seg(0, 1), 1)
		if e, d, r := tab.Arrive(&k, seg(100, 1), 1); d == Drop && r == spin.DropMemory {
			dropped++
		} else {
			tab.Finish(e, seg(100, 1), 1)
		}
		if m := q.Stats().Memory; m > 1<<10 {
			t.Fatalf("%d bytes", m)
		}
		run(t, tab, &k, seg(2, 1), 1) // fits the entry
	}
	if dropped != 100-1<<10/16 {
		t.Errorf("%d dropped", dropped)
	}
	if k := (Key{200}); true {
		begin(t, tab, &k, seg(0, 1), 1)
		arrive(t, tab, &k, seg(1, 1), 1, Run, spin.NotDropped)
		arrive(t, tab, &k, seg(2, 1), 1, Drop, spin.DropMemory) // no room for a third that runs
	}
}

func TestStoreKeepsToTheLimit(t *testing.T) {
	s := store{limit: 1 << 12}
	for n := 1; n <= 512; n *= 2 {
		b := s.take(n)
		if b == nil {
			t.Fatalf("no room for %d words", n)
		}
		b[0] = 1
		s.give(b)
		if s.used+s.kept > s.limit {
			t.Errorf("%d used and %d kept, the limit is %d", s.used, s.kept, s.limit)
		}
	}
	if b := s.take(512); b == nil || b[0] != 0 {
		t.Error("what was kept is not in order")
	}
	if s.take(1) != nil {
		t.Error("beyond the limit")
	}
}

func TestRemembered(t *testing.T) {
	q, tab := queue(t, Config{Remember: time.Second, Words: 2})
	end := func(k Key, now int64, fail bool) {
		t.Helper()
		e := begin(t, tab, &k, eom(0, 1), now)
		if fail {
			tab.Fail(e, now)
		}
		if tab.Finish(e, eom(0, 1), now) {
			tab.End(e, now)
		}
	}
	want := func(k Key, now int64, d Decision, r spin.DropReason) {
		t.Helper()
		e := arrive(t, tab, &k, eom(0, 1), now, d, r)
		if d == Start {
			tab.Refuse(e)
		}
	}
	for i := range uint32(200) {
		end(Key{1, i}, 0, i%3 == 0)
	}
	for i := range uint32(200) {
		if i%3 == 0 {
			want(Key{1, i}, 999*ms, Drop, spin.DropDead)
		} else {
			want(Key{1, i}, 999*ms, Again, spin.NotDropped)
		}
		want(Key{2, i}, 999*ms, Start, spin.NotDropped)
	}
	// Not sooner than a second after it ended, or was last asked for; later,
	// when the sender's next message comes.
	end(Key{1, 1000}, 1900*ms, false)
	want(Key{1, 4}, 1998*ms, Again, spin.NotDropped)
	want(Key{1, 4}, 2997*ms, Again, spin.NotDropped)
	want(Key{1, 1000}, 2899*ms, Again, spin.NotDropped)
	want(Key{1, 4}, 4998*ms, Start, spin.NotDropped)
	want(Key{1, 1000}, 4900*ms, Start, spin.NotDropped)
	if f := q.Stats().Forgotten; f != 0 {
		t.Errorf("%d forgotten", f)
	}
}

// Copies tell that a sender is still at it, also while segments of a failed message run.
func TestCopiesAreRemembered(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(tab *Table, e *Entry, now int64) // once
		over int64                                 // when the last segment that ran is over
		d    Decision
		r    spin.DropReason
	}{
		{"a complete message", func(tab *Table, e *Entry, now int64) {
			tab.Finish(e, eom(0, 1), now)
			tab.End(e, now)
		}, 0, Again, spin.NotDropped},
		{"a failed message", func(tab *Table, e *Entry, now int64) {
			tab.Fail(e, now)
			tab.Finish(e, eom(0, 1), now)
		}, 0, Drop, spin.DropDead},
		{"a failed message of which a segment runs", func(tab *Table, e *Entry, now int64) { tab.Fail(e, now) }, 6000 * ms, Drop, spin.DropDead},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, tab := queue(t, Config{Remember: time.Second, Words: 2})
			k := Key{1, 1}
			e := begin(t, tab, &k, eom(0, 1), 10*ms)
			c.end(tab, e, 10*ms)
			last := int64(0)
			for now := 900 * ms; now < 10_000*ms; now += 990 * ms {
				arrive(t, tab, &k, eom(0, 1), now, c.d, c.r)
				if last = now; c.over > 0 && now > c.over {
					tab.Finish(e, eom(0, 1), now)
					c.over = 0
				}
			}
			arrive(t, tab, &k, eom(0, 1), last+4000*ms, Start, spin.NotDropped)
		})
	}
}

func TestMemoryIsBounded(t *testing.T) {
	q, err := NewQueue(Config{})
	if err != nil {
		t.Fatal(err)
	}
	const n = 1_200_000
	for i := range uint32(n) {
		q.done.add(q, &Key{i}, false, 1)
	}
	records := 0
	for i := range q.done.shards {
		for j := range q.done.shards[i].gen {
			records += len(q.done.shards[i].gen[j].records)
		}
	}
	if want := 2 * 2 * shards * maxRecords; records > want {
		t.Errorf("%d records, at most %d wanted", records, want)
	}
	known := uint64(0)
	for i := range uint32(n) {
		if ok, _ := q.done.get(q, &Key{i}, 1); ok {
			known++
		}
		if ok, _ := q.done.get(q, &Key{n - 1}, 1); !ok {
			t.Fatal("the last one is not known")
		}
	}
	if f := q.Stats().Forgotten; f+known < n || f > n {
		t.Errorf("%d known, %d forgotten", known, f)
	}
	// 64 numbers in a row cost one record.
	q, _ = NewQueue(Config{})
	for i := range uint32(n) {
		q.done.add(q, &Key{7: i}, false, 1)
	}
	for i := range uint32(n) {
		if ok, _ := q.done.get(q, &Key{7: i}, 1); !ok {
			t.Fatalf("%d of one sender is not known", i)
		}
	}
}

func TestSlots(t *testing.T) {
	q, a := queue(t, Config{Messages: 100})
	b := q.NewTable(false)
	seen := map[int]bool{}
	var entries []*Entry
	for i := range uint32(100) {
		tab := a
		if i%2 == 1 {
			tab = b
		}
		e := begin(t, tab, &Key{i}, seg(0, 1), 1)
		if e.Slot() < 0 || e.Slot() >= 100 || seen[e.Slot()] {
			t.Fatalf("slot %d", e.Slot())
		}
		seen[e.Slot()] = true
		e.User = e.Slot()
		entries = append(entries, e)
	}
	arrive(t, b, &Key{1000}, seg(0, 1), 1, Drop, spin.DropMessages)
	tab, e := b, entries[1]
	tab.Finish(e, seg(0, 1), 1)
	tab.stop(e)
	tab.End(e, 1)
	if f := begin(t, a, &Key{1000}, seg(0, 1), 1); f != e || f.User != e.Slot() || *f.Key() != (Key{1000}) {
		t.Error("the slot was not reused with what the user kept there")
	}
}

// Tables that are not shared keep apart what they write; those that are use few slots.
func TestSlotsOfTables(t *testing.T) {
	for _, tc := range []struct {
		shared   bool
		messages int
		want     []int // of a, b, a and b in turn, each ended before the next
	}{
		{false, 4096, []int{0, slab, 0, slab}},
		{false, 16, []int{0, 8, 0, 8}},
		{false, 1, []int{0, 0, 0, 0}},
		{true, 4096, []int{0, 0, 0, 0}},
	} {
		q, err := NewQueue(Config{Messages: tc.messages})
		if err != nil {
			t.Fatal(err)
		}
		tables := []*Table{q.NewTable(tc.shared), q.NewTable(tc.shared)}
		var got []int
		for i := range uint32(4) {
			tab := tables[i%2]
			e := begin(t, tab, &Key{i}, seg(0, 1), 1)
			got = append(got, e.Slot())
			tab.Finish(e, seg(0, 1), 1)
			tab.stop(e)
			tab.End(e, 1)
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("shared %v, %d messages: slots %v, want %v", tc.shared, tc.messages, got, tc.want)
		}
	}
}

// A table that needs more than its part takes entries of others, which get them back.
func TestSlotsAreGivenBack(t *testing.T) {
	q, a := queue(t, Config{Messages: 4})
	b := q.NewTable(false)
	var all []*Entry
	for i := range uint32(4) {
		all = append(all, begin(t, a, &Key{i}, seg(0, 1), 1))
	}
	arrive(t, b, &Key{9}, seg(0, 1), 1, Drop, spin.DropMessages)
	for _, e := range all {
		a.Finish(e, seg(0, 1), 1)
		a.stop(e)
		a.End(e, 1)
	}
	for i := range uint32(2) { // b has a's, and then gives them back
		e := begin(t, b, &Key{10 + i}, seg(0, 1), 1)
		b.Finish(e, seg(0, 1), 1)
		b.stop(e)
		b.End(e, 1)
	}
	if e := begin(t, a, &Key{20}, seg(0, 1), 1); q.owners[e.Slot()] != a.list || a.list.first == nil {
		t.Errorf("a has slot %d, and its list is empty: %v", e.Slot(), a.list.first == nil)
	}
	if q.Open() != 1 || len(q.owners) != 4 {
		t.Errorf("%d open, %d slots; want 1 and 4", q.Open(), len(q.owners))
	}
}

func TestSizes(t *testing.T) {
	if n := unsafe.Sizeof(Entry{}); n > 256 {
		t.Errorf("an entry has %d bytes", n)
	}
	// What else a message has: its place in the chains and in the timers.
	if n := unsafe.Sizeof(timer{}); n > 16 {
		t.Errorf("a timer has %d bytes", n)
	}
}

// In the steady state nothing is allocated, in order or not, nor when messages
// begin and end.
func TestAllocations(t *testing.T) {
	_, tab := queue(t, Config{})
	id := uint32(0)
	message := func(order []uint32) func() {
		return func() {
			id++
			k := Key{id / 1000, id % 1000}
			e := begin(t, tab, &k, seg(0, 10), 1)
			tab.Finish(e, seg(0, 10), 1)
			var run [200]Segment
			n := 0
			for _, i := range order {
				s := Segment{Offset: 10 * i, Len: 10, EOM: int(i) == len(order)}
				if _, d, _ := tab.Arrive(&k, s, 1); d != Run {
					t.Fatal(d)
				}
				run[n] = s
				if n++; n == len(run) || i%7 == 0 {
					for _, s := range run[:n] {
						tab.Finish(e, s, 1)
					}
					n = 0
				}
			}
			for _, s := range run[:n] {
				tab.Finish(e, s, 1)
			}
			if e.State() != Ending {
				t.Fatal(e.State())
			}
			tab.End(e, 1)
		}
	}
	inOrder, backwards := make([]uint32, 500), make([]uint32, 500)
	for i := range inOrder {
		inOrder[i], backwards[len(backwards)-1-i] = uint32(i+1), uint32(i+1)
	}
	for name, order := range map[string][]uint32{"in order": inOrder, "backwards": backwards} {
		f := message(order)
		for range 300 {
			f()
		}
		if n := testing.AllocsPerRun(1000, f); n != 0 {
			t.Errorf("%s: %v allocations per message", name, n)
		}
	}
}

func TestConfig(t *testing.T) {
	for want, c := range map[string]Config{
		"messages":   {Messages: -1},
		"words":      {Words: 9},
		"bytes":      {Memory: -1},
		"incomplete": {Incomplete: 3},
		"timeout":    {Timeout: -1},
		"remember":   {Remember: -1},
		"linger":     {Linger: -1},
	} {
		if _, err := NewQueue(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want something about %s", c, err, want)
		}
	}
	_, tab := queue(t, Config{Held: -1})
	arrive(t, tab, &Key{}, seg(1, 1), 1, Drop, spin.DropNoHeader)
}

func TestStatsJSON(t *testing.T) {
	s := spin.MessageStats{Started: 3, Open: 1}
	s.Dropped[spin.DropOverlap] = 5
	b, err := json.Marshal(s)
	if err != nil || !strings.Contains(string(b), `"overlap":5`) {
		t.Fatalf("%s, %v", b, err)
	}
	var back spin.MessageStats
	if err := json.Unmarshal(b, &back); err != nil || back != s {
		t.Errorf("%+v, %v", back, err)
	}
}

func TestMisuse(t *testing.T) {
	for name, f := range map[string]func(tab *Table, e *Entry){
		"finish what does not run": func(tab *Table, e *Entry) { tab.Finish(e, seg(10, 10), 1) },
		"unhold nothing":           func(tab *Table, e *Entry) { tab.Unhold(e) },
		"end twice":                func(tab *Table, e *Entry) { tab.Refuse(e); tab.Refuse(e) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			_, tab := queue(t, Config{})
			f(tab, arrive(t, tab, &Key{1}, seg(0, 10), 1, Start, spin.NotDropped))
		}()
	}
}

// Several threads, each with a table of its own, share limits and memory.
func TestThreads(t *testing.T) {
	q, err := NewQueue(Config{Messages: 50, Held: 8, Memory: 4 << 10})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for thread := range uint32(4) {
		tab := q.NewTable(false)
		wg.Go(func() {
			for i := range uint32(2000) {
				k := Key{thread, i}
				for j := range uint32(20) {
					s := seg((j^3)*10, 10)
					e, d, _ := tab.Arrive(&k, s, int64(i))
					switch d {
					case Start:
						tab.Opened(e, int64(i))
						tab.Finish(e, s, int64(i))
						for range e.held {
							tab.Unhold(e)
						}
					case Run:
						tab.Finish(e, s, int64(i))
					}
				}
				if i%20 == 19 {
					for e := tab.StopNext(); e != nil; e = tab.StopNext() {
						for range e.held {
							tab.Unhold(e)
						}
						if e.State() == Waiting {
							tab.Refuse(e)
						} else {
							tab.End(e, int64(i))
						}
					}
				}
				if s := q.Stats(); s.Open > 50 || s.HeldNow > 8 || s.Memory > 4<<10 {
					t.Errorf("%+v", s)
					return
				}
			}
		})
	}
	wg.Wait()
	if s := q.Stats(); s.Open != 0 || s.HeldNow != 0 || s.Memory != 0 || s.Started == 0 || s.Abandoned != s.Started {
		t.Errorf("%+v", s)
	}
}

func BenchmarkInOrder(b *testing.B) {
	_, tab := queue(b, Config{})
	k := Key{1, 2, 3}
	e := begin(b, tab, &k, seg(0, 1), 1)
	tab.Finish(e, seg(0, 1), 1)
	s := seg(1, 1)
	for b.Loop() {
		e, d, _ := tab.Arrive(&k, s, 1)
		if d != Run {
			b.Fatal(d)
		}
		tab.Finish(e, s, 1)
		s.Offset++
	}
}

func BenchmarkManyInOrder(b *testing.B) {
	_, tab := queue(b, Config{})
	const n = 1024
	keys := make([]Key, n)
	for i := range keys {
		keys[i] = Key{0, 0, 0, uint32(i)}
		e := begin(b, tab, &keys[i], seg(0, 1), 1)
		tab.Finish(e, seg(0, 1), 1)
	}
	s := seg(1, 1)
	for i := 0; b.Loop(); i++ {
		if i == n {
			i = 0
			s.Offset++
		}
		e, d, _ := tab.Arrive(&keys[i], s, 1)
		if d != Run {
			b.Fatal(d)
		}
		tab.Finish(e, s, 1)
	}
}

func BenchmarkSmallMessages(b *testing.B) {
	_, tab := queue(b, Config{})
	k := Key{1, 2, 3}
	s := eom(0, 64)
	for b.Loop() {
		k[7]++
		e, _, _ := tab.Arrive(&k, s, 1)
		tab.Opened(e, 1)
		tab.Finish(e, s, 1)
		tab.End(e, 1)
	}
}

func BenchmarkReordered(b *testing.B) {
	_, tab := queue(b, Config{})
	k := Key{1, 2, 3}
	e := begin(b, tab, &k, seg(0, 1), 1)
	tab.Finish(e, seg(0, 1), 1)
	for i := uint32(1); b.Loop(); i++ {
		s := seg((i-1)^3+1, 1) // 4 3 2 1, 8 7 6 5
		e, d, _ := tab.Arrive(&k, s, 1)
		if d != Run {
			b.Fatal(d)
		}
		tab.Finish(e, s, 1)
	}
}
