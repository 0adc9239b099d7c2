// SPDX-License-Identifier: Apache-2.0

package mpq

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/xspin/xspin/spin"
)

// A message as one would keep it if time and memory cost nothing.
type model struct {
	e       *Entry
	state   State
	stopped bool
	claimed map[uint64]bool  // bytes
	done    map[uint64]bool  // bytes
	running []Segment        //
	gone    map[Segment]bool // finished segments
	held    []Segment        //
	size    int              // of regular segments
	other   bool             // it is not regular
	eom     *Segment         //
	high    uint64           //
	key     Key              //
}

type past struct {
	failed bool
	at     int64
}

// table drives a Table and the models of its messages with what data says.
func drive(t *testing.T, data []byte) {
	next := func() int {
		if len(data) == 0 {
			return 0
		}
		b := data[0]
		data = data[1:]
		return int(b)
	}
	c := Config{
		Messages: 1 + next()%4, Held: next()%6 - 1, Memory: 64 << (next() % 8), Words: 2,
		Timeout: 100, Linger: 20, Remember: 500, Incomplete: Incomplete(next() % 3),
	}
	if c.Held == 0 {
		c.Held = 1
	}
	held := max(c.Held, 0)
	q, tab := queue(t, c)
	live := map[Key]*model{}
	ended := map[Key]past{}
	now := int64(1)

	finished := func(m *model, failed, remembered bool) {
		delete(live, m.key)
		if remembered {
			ended[m.key] = past{failed, now}
		}
	}
	complete := func(m *model) bool {
		if m.eom == nil || len(m.running) > 0 {
			return false
		}
		return uint64(len(m.done)) == m.eom.End()
	}
	finish := func(m *model, i int) {
		s := m.running[i]
		m.running = slices.Delete(m.running, i, i+1)
		got := tab.Finish(m.e, s, now)
		if m.state == Failed {
			if got {
				t.Fatal("a failed message is complete")
			}
			if len(m.running) == 0 {
				finished(m, true, false)
			}
			return
		}
		m.gone[s] = true
		for b := uint64(s.Offset); b < s.End(); b++ {
			m.done[b] = true
		}
		if got != complete(m) {
			t.Fatalf("Finish %+v: complete %v, %d bytes of %+v", s, got, len(m.done), m.eom)
		}
		if got {
			m.state = Ending
		}
	}
	fail := func(m *model) {
		for range m.held {
			tab.Unhold(m.e)
		}
		m.held = nil
		tab.Fail(m.e, now)
		ended[m.key] = past{true, now}
		m.state = Failed
		if len(m.running) == 0 {
			finished(m, true, false)
		}
	}
	pick := func() *model {
		keys := make([]Key, 0, len(live))
		for k := range live {
			keys = append(keys, k)
		}
		if len(keys) == 0 {
			return nil
		}
		slices.SortFunc(keys, func(a, b Key) int { return slices.Compare(a[:], b[:]) })
		return live[keys[next()%len(keys)]]
	}
	check := func(m *model) {
		e := m.e
		contiguous := uint64(0)
		for m.done[contiguous] {
			contiguous++
		}
		// A segment without bytes that runs holds up the same way.
		if got := e.Contiguous(); got > contiguous {
			t.Fatalf("contiguous %d, want %d", got, contiguous)
		} else if len(m.running) == 0 && got != contiguous {
			t.Fatalf("contiguous %d, want %d", got, contiguous)
		} else if len(m.running) > 0 && !slices.ContainsFunc(m.running, func(s Segment) bool { return uint64(s.Offset) <= contiguous }) && got != contiguous {
			t.Fatalf("contiguous %d, want %d", got, contiguous)
		}
		contiguous = e.Contiguous()
		if e.Processed() != uint64(len(m.done)) {
			t.Fatalf("processed %d, want %d", e.Processed(), len(m.done))
		}
		length := m.high
		if m.eom != nil {
			length = m.eom.End()
		}
		if e.Missing() != length-uint64(len(m.done)) {
			t.Fatalf("missing %d, want %d", e.Missing(), length-uint64(len(m.done)))
		}
		if n, ok := e.Length(); ok != (m.eom != nil) || ok && n != length {
			t.Fatalf("length %d, %v, want %d", n, ok, length)
		}
		words := e.Bitmap(nil, 16)
		if len(words) < 1 || len(words) > 16 || len(words) > 1 && words[len(words)-1] == 0 {
			t.Fatalf("%d words", len(words))
		}
		for i := range len(words)*64 + 64 {
			at := contiguous + uint64(i+1)*uint64(m.size)
			want := m.size > 0 && !m.other && m.done[at] && i < 16*64
			got := i < len(words)*64 && words[i/64]>>(i%64)&1 != 0
			if got != want {
				t.Fatalf("bit %d, byte %d: %v, want %v: %x", i, at, got, want, words)
			}
		}
	}

	arrive := func(k Key, s Segment) {
		m := live[k]
		e, d, why := tab.Arrive(&k, s, now)
		if m != nil && e != m.e {
			t.Fatalf("another entry")
		}
		state := Free
		if m != nil {
			state = m.state
			if m.stopped && state != Deferred {
				state = Failed
			}
		}
		fresh, old, runs := true, true, false // its bytes
		if m != nil {
			for b := uint64(s.Offset); b < s.End(); b++ {
				fresh = fresh && !m.claimed[b]
				old = old && m.done[b]
			}
			for _, r := range m.running {
				runs = runs || r == s || max(r.Offset, s.Offset) < uint32(min(r.End(), s.End()))
			}
		}
		bad := func(format string, args ...any) {
			t.Helper()
			t.Fatalf("%v %+v in state %v: %v (%v): %s", k, s, state, d, why, fmt.Sprintf(format, args...))
		}
		p, remembered := ended[k]
		if m == nil && remembered {
			age := now - p.at
			switch {
			case d == Drop && why == spin.DropDead && p.failed, d == Again && e == nil && !p.failed:
				if age >= 3*int64(c.Remember) {
					bad("still known after %d", age)
				}
				ended[k] = past{p.failed, now}
				return
			case age < int64(c.Remember):
				bad("forgotten after %d", age)
			}
			delete(ended, k)
		}
		switch d {
		case Start:
			if state != Free && state != Waiting || s.Offset != 0 {
				bad("started")
			}
			if m == nil {
				m = &model{e: e, key: k}
				live[k] = m
			}
			m.claimed, m.done, m.gone = map[uint64]bool{}, map[uint64]bool{}, map[Segment]bool{}
			m.state = Starting
			if !s.EOM {
				m.size = s.Len
			}
		case Run:
			if state != Open || !fresh {
				bad("run twice, or too early")
			}
			if m.eom != nil && s.End() > m.eom.End() || s.EOM && (m.eom != nil || s.End() < m.high) {
				bad("two ends")
			}
			if s.Len > 0 && m.size > 0 && (int(s.Offset)%m.size != 0 || s.Len != m.size && !s.EOM || s.Len > m.size) {
				m.other = true
			}
		case Hold:
			if state != Starting && state != Waiting && (state != Free || s.Offset == 0) {
				bad("held")
			}
			if m == nil {
				m = &model{e: e, key: k, state: Waiting}
				live[k] = m
			}
			m.held = append(m.held, s)
		case Again:
			if m == nil || state != Open && state != Ending && state != Deferred || !old || runs || s.EOM {
				bad("its bytes are not processed")
			}
		case Wait:
			if !runs && !(s.EOM && m.eom != nil && *m.eom == s) {
				bad("nothing to wait for")
			}
			if state == Deferred && s.EOM && !m.stopped {
				bad("want notify")
			}
		case Notify:
			if state != Deferred || m.stopped || *m.eom != s {
				bad("notified")
			}
			m.state = Ending
		case Drop:
			switch why {
			case spin.DropMessages:
				if len(live) < c.Messages || m != nil {
					bad("%d messages", len(live))
				}
			case spin.DropDead:
				if state != Failed {
					bad("it is not dead")
				}
				if m.state == Failed { // a stopped one is remembered when it ends
					ended[k] = past{true, now}
				}
			case spin.DropNoHeader:
				if q.Held() < held {
					bad("%d held", q.Held())
				}
			case spin.DropOverlap:
				if fresh && !(s.EOM && m.eom != nil) {
					bad("nothing overlaps")
				}
				if m.gone[s] || slices.Contains(m.running, s) {
					bad("the very same came before")
				}
			case spin.DropTwoEnds:
				if m.eom != nil && s.End() <= m.eom.End() && (!s.EOM || s.End() == m.eom.End()) || m.eom == nil && (!s.EOM || s.End() >= m.high) {
					bad("one end")
				}
			case spin.DropMemory:
				if s.Len == 0 && c.Memory >= 1<<10 || c.Memory >= 4<<10 {
					bad("there is room")
				}
			default:
				bad("no reason")
			}
		}
		if d == Start || d == Run {
			for b := uint64(s.Offset); b < s.End(); b++ {
				m.claimed[b] = true
			}
			if s.Len > 0 {
				m.high = max(m.high, s.End())
			}
			if s.EOM {
				m.eom = &s
			}
			m.running = append(m.running, s)
		}
	}

	for len(data) > 0 {
		switch op := next() % 16; op {
		default: // a segment comes
			k := Key{uint32(next() % 2), uint32(next() % 3)}
			size := int(k[0])*3 + 1
			s := Segment{Offset: uint32(next() % 160 * size), Len: size}
			switch shape := next() % 16; {
			case shape < 4:
				s.Offset = 0
			case shape == 4:
				s.EOM = true
				s.Len = next() % (size + 1)
			case shape == 5:
				s.Offset, s.Len = uint32(next()), next()%16
			case shape == 6:
				s.Offset, s.Len, s.EOM = uint32(next()), next()%16, true
			case shape < 12:
				// What is missing.
				if m := live[k]; m != nil && m.claimed != nil {
					for m.claimed[uint64(s.Offset)] {
						s.Offset++
					}
				}
			}
			arrive(k, s)
		case 8, 9, 10: // a HER finishes
			if m := pick(); m != nil && len(m.running) > 0 && m.state != Starting {
				finish(m, next()%len(m.running))
			}
		case 11:
			m := pick()
			switch {
			case m == nil || m.stopped:
			case m.state == Starting && next()%8 == 0:
				for range m.held {
					tab.Unhold(m.e)
				}
				tab.Refuse(m.e)
				finished(m, false, false)
			case m.state == Starting:
				tab.Opened(m.e, now)
				m.state = Open
				h := m.held
				m.held = nil
				for range h {
					tab.Unhold(m.e)
				}
				for _, s := range h {
					arrive(m.key, s)
				}
			case m.state == Ending && next()%2 == 0:
				tab.Defer(m.e, now)
				m.state = Deferred
			case m.state == Ending:
				tab.End(m.e, now)
				finished(m, false, true)
			}
		case 12:
			if m := pick(); m != nil && m.state == Deferred {
				if tab.Retry(m.e) == m.stopped {
					t.Fatal("Retry")
				}
				m.state = Ending
			}
		case 13:
			if m := pick(); m != nil && next()%4 == 0 && m.state != Waiting && m.state != Deferred && m.state != Failed && !m.stopped {
				fail(m)
			}
		case 14, 15:
			now += int64(next())
			for {
				due := tab.Next()
				e := tab.Expired(now)
				if e == nil {
					break
				}
				if due > now {
					t.Fatalf("expired at %d, was not to be before %d", now, due)
				}
				m := live[*e.Key()]
				if m == nil || m.stopped || len(m.running) > 0 || m.state == Ending || m.state == Failed || e.State() != m.state {
					t.Fatalf("expired: %+v", m)
				}
				m.stopped = true
				for range m.held {
					tab.Unhold(e)
				}
				m.held = nil
				for s := range m.gone {
					arrive(m.key, s)
				}
				switch {
				case m.state == Waiting:
					tab.Refuse(e)
					finished(m, false, false)
				case m.state == Open && next()%4 == 0:
					tab.Fail(e, now)
					finished(m, true, true)
				default:
					failed := m.state != Deferred
					tab.End(e, now)
					finished(m, failed, true)
				}
			}
			for _, m := range live {
				if len(m.running) == 0 && (m.state == Open || m.state == Deferred) && !m.stopped && m.e.seen+int64(c.Timeout) <= now {
					t.Fatal("not expired")
				}
			}
		}
		n := 0
		for _, m := range live {
			n += len(m.held)
			if m.claimed != nil && m.state != Failed {
				check(m)
			}
		}
		st := q.Stats()
		if st.Open != len(live) || st.Open > c.Messages || st.HeldNow != n || n > held || st.Memory > c.Memory || len(live) == 0 && st.Memory != 0 {
			t.Fatalf("%+v, but %d live and %d held", st, len(live), n)
		}
	}
}

func random(seed uint64, n int) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func TestTableAgainstModel(t *testing.T) {
	end := time.Now().Add(2 * time.Second)
	for seed := uint64(0); seed < 2000 && time.Now().Before(end); seed++ {
		ok := t.Run(fmt.Sprint(seed), func(t *testing.T) { drive(t, random(seed, 3000)) })
		if !ok {
			t.Fatalf("seed %d", seed)
		}
	}
}

func FuzzTable(f *testing.F) {
	for seed := range uint64(8) {
		f.Add(random(seed, 500))
	}
	f.Fuzz(func(t *testing.T, data []byte) { drive(t, data[:min(len(data), 4000)]) })
}
