// SPDX-License-Identifier: Apache-2.0

package slmp

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

const (
	us = int64(1000)
	ms = int64(1e6)
)

// A desk is a Sender with what tests want to say to it in short. Payload is 100.
type desk struct {
	*testing.T
	s   *Sender
	now int64
}

func newDesk(t *testing.T, c SenderConfig) *desk {
	t.Helper()
	c.Payload = 100
	s, err := NewSender(c)
	if err != nil {
		t.Fatal(err)
	}
	return &desk{t, s, second}
}

func (d *desk) open(id uint32, length uint64) *Outgoing {
	d.Helper()
	o, err := d.s.Open(id)
	if err != nil {
		d.Fatal(err)
	}
	o.Supply(length, true)
	return o
}

// next returns all that is to be sent now, as "id:offset" and S, C, E for the
// flags, r for again.
func (d *desk) next() string {
	var dst [7]Outbound
	var all []string
	for {
		n := d.s.Next(dst[:], d.now)
		if n == 0 {
			return strings.Join(all, " ")
		}
		for _, o := range dst[:n] {
			x := fmt.Sprintf("%d:%d", o.Header.ID, o.Header.Offset)
			for _, f := range []struct {
				f Flags
				c string
			}{{SYN, "S"}, {Cumulative, "C"}, {EOM, "E"}} {
				if o.Header.Flags&f.f != 0 {
					x += f.c
				}
			}
			if o.Again {
				x += "r"
			}
			all = append(all, x)
		}
	}
}

func (d *desk) sends(want string) {
	d.Helper()
	if got := d.next(); got != want {
		d.Fatalf("at %v sends %q, want %q", time.Duration(d.now-second), got, want)
	}
}

// after lets time pass.
func (d *desk) after(ns int64) *desk { d.now += ns; return d }

// deadline lets time pass until Deadline, several times if it is early.
func (d *desk) deadline(want string) {
	d.Helper()
	for range 10 {
		t := d.s.Deadline()
		if t == 0 {
			break
		}
		d.now = max(d.now, t)
		if got := d.next(); got == want {
			return
		} else if got != "" {
			d.Fatalf("at %v sends %q, want %q", time.Duration(d.now-second), got, want)
		}
	}
	d.Fatalf("at %v sends nothing, want %q", time.Duration(d.now-second), want)
}

func (d *desk) take(a Ack, want error) {
	d.Helper()
	if err := d.s.Acknowledge(a.Append(nil), d.now); !errors.Is(err, want) {
		d.Fatalf("%+v: error %v, want %v", a, err, want)
	}
}

func (d *desk) plain(id, offset uint32) {
	d.Helper()
	d.take(Ack{ID: id, Offset: offset}, nil)
}

func (d *desk) cumulative(id, offset, end uint32, words ...uint64) {
	d.Helper()
	d.take(Ack{ID: id, Offset: offset, Cumulative: true, End: end, Bitmap: words}, nil)
}

func (d *desk) wait(id, offset, end uint32, words ...uint64) {
	d.Helper()
	d.take(Ack{ID: id, Offset: offset, Cumulative: true, Wait: true, End: end, Bitmap: words}, nil)
}

// over expects one finished message, that ended with the error.
func (d *desk) over(id uint32, want error) *Outgoing {
	d.Helper()
	o := d.s.Finished()
	if o == nil {
		d.Fatal("message is not over")
	}
	if o.ID() != id || !errors.Is(o.Err(), want) {
		d.Fatalf("message %d ended with %v, want %d, %v", o.ID(), o.Err(), id, want)
	}
	return o
}

func (d *desk) nothingOver() {
	d.Helper()
	if o := d.s.Finished(); o != nil {
		d.Fatalf("message %d is over: %v", o.ID(), o.Err())
	}
}

// meet makes the peer known as one that speaks Cumulative, 1 ms away.
func (d *desk) meet() {
	d.Helper()
	d.open(999, 1)
	d.next()
	d.after(ms).cumulative(999, 0, 1, 0)
	d.s.Recycle(d.over(999, nil))
}

func TestSenderConfig(t *testing.T) {
	for _, c := range []SenderConfig{
		{},
		{Payload: MaxPayload + 1},
		{Payload: 1, Window: -1},
		{Payload: 1, Window: MaxWindow + 1},
		{Payload: 1, Mode: 3},
		{Payload: 1, Gap: -1},
		{Payload: 1, MinRTO: 2 * time.Second, MaxRTO: time.Second},
	} {
		if _, err := NewSender(c); err == nil {
			t.Errorf("%+v: no error", c)
		}
	}
}

func TestUnknownPeer(t *testing.T) {
	d := newDesk(t, SenderConfig{Window: 8})
	d.open(1, 950)
	d.open(2, 100)
	d.sends("1:0SC 2:0SCE")
	d.after(ms).cumulative(2, 0, 100, 0)
	d.over(2, nil)
	// It speaks Cumulative, but message 1 has begun with the other assumption.
	d.cumulative(1, 0, 100, 0)
	// One SYN for each quarter of the window, and at its end.
	d.sends("1:100 1:200SC 1:300 1:400SC 1:500 1:600SC 1:700 1:800SC")
	d.after(ms).cumulative(1, 800, 900, 0)
	d.sends("1:900SCE")
	d.after(ms).cumulative(1, 900, 950, 0)
	d.over(1, nil)
	// Now all at once.
	d.open(3, 350)
	d.sends("3:0 3:100SC 3:200 3:300SCE")
	if st := d.s.Stats(); !st.Cumulative || st.Completed != 2 || st.Retransmitted != 0 || st.InFlight != 4 || st.RTT != time.Millisecond {
		t.Errorf("%+v", st)
	}
}

func TestPlainPeer(t *testing.T) {
	for _, config := range []bool{false, true} {
		t.Run(fmt.Sprint("configured ", config), func(t *testing.T) {
			d := newDesk(t, SenderConfig{Window: 3, Plain: config})
			o := d.open(1, 450)
			if config {
				d.sends("1:0S")
			} else {
				d.sends("1:0SC")
			}
			d.after(ms).plain(1, 0)
			d.sends("1:100S 1:200S 1:300S")
			d.plain(1, 300)
			d.sends("")
			d.plain(1, 100)
			d.sends("")
			if n := o.Unacked(); n != 100 {
				t.Errorf("may forget %d bytes, want 100: the segment before is the sign of life", n)
			}
			d.plain(1, 200)
			d.sends("1:400SE")
			if !config {
				// Late: from when it was offered.
				d.cumulative(1, 0, 100, 0)
				d.open(2, 50)
				d.sends("2:0SE")
			}
			d.plain(1, 400)
			d.over(1, nil)
			if d.s.Stats().Cumulative {
				t.Error("takes the peer for one that speaks Cumulative")
			}
		})
	}
}

func TestPlainAfterCumulative(t *testing.T) {
	d := newDesk(t, SenderConfig{Window: 8})
	d.meet()
	d.open(1, 1000)
	d.sends("1:0 1:100SC 1:200 1:300SC 1:400 1:500SC 1:600 1:700SC")
	d.plain(1, 100)
	d.cumulative(1, 300, 400, 0)
	d.sends("1:800 1:900SCE")
}

func TestSupply(t *testing.T) {
	type step struct {
		n     uint64
		last  bool
		sends string
	}
	for _, c := range []struct {
		name  string
		steps []step
	}{
		{"empty", []step{{0, false, ""}, {0, true, "1:0SCE"}}},
		{"one byte", []step{{1, true, "1:0SCE"}}},
		{"exactly one segment", []step{{100, false, ""}, {100, true, "1:0SCE"}}},
		{"more than one", []step{{101, false, "1:0SC"}, {101, true, "1:100SCE"}}},
		{"as it comes", []step{{150, false, "1:0SC"}, {250, false, "1:100SC"}, {451, false, "1:200 1:300SC"}, {500, true, "1:400SCE"}}},
		{"last is last", []step{{250, true, "1:0 1:100 1:200SCE"}, {450, true, ""}, {450, false, ""}}},
		{"not fewer", []step{{350, false, "1:0 1:100 1:200SC"}, {100, false, ""}, {400, true, "1:300SCE"}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := newDesk(t, SenderConfig{Window: 32})
			d.meet()
			o, err := d.s.Open(1)
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range c.steps {
				o.Supply(s.n, s.last)
				d.sends(s.sends)
			}
		})
	}
}

func TestTooLong(t *testing.T) {
	d := newDesk(t, SenderConfig{})
	o, err := d.s.Open(1)
	if err != nil {
		t.Fatal(err)
	}
	o.Supply(MaxMessage+1, false)
	var e *MessageError
	if !errors.As(d.over(1, ErrTooLong).Err(), &e) {
		t.Error("no MessageError")
	}
	if _, err := d.s.Open(1); err != nil {
		t.Error(err)
	}
	if _, err := d.s.Open(1); !errors.Is(err, ErrInUse) {
		t.Errorf("error %v of the same id twice, want ErrInUse", err)
	}
}

// What is lost shows when later ones are acknowledged and reordering has had time.
func TestLoss(t *testing.T) {
	d := newDesk(t, SenderConfig{Window: 8})
	d.meet()
	d.open(1, 2000)
	for range 4 {
		d.after(100 * us)
		var dst [2]Outbound
		if n := d.s.Next(dst[:], d.now); n != 2 {
			t.Fatal(n)
		}
	}
	// 0 to 700 are on their way. 200 is lost.
	d.after(700*us).cumulative(1, 100, 200, 0)
	d.sends("1:800 1:900SC")
	d.after(100*us).cumulative(1, 300, 200, 1)
	// Sent at the same time as one that has arrived: a quarter of 1 ms more.
	d.sends("1:1000SC")
	d.after(100*us).cumulative(1, 500, 200, 7)
	d.sends("1:1100 1:1200SC")
	d.after(100*us).cumulative(1, 700, 200, 31)
	d.sends("1:1300 1:1400SC")
	d.deadline("1:200SCr")
	if st := d.s.Stats(); st.Retransmitted != 1 || st.Timeouts != 0 {
		t.Errorf("%+v", st)
	}
	d.after(ms).cumulative(1, 200, 1500, 0)
	d.sends("1:1500 1:1600SC 1:1700 1:1800SC 1:1900SCE")
}

func TestReordering(t *testing.T) {
	d := newDesk(t, SenderConfig{Window: 8})
	d.meet()
	d.open(1, 800)
	d.sends("1:0 1:100SC 1:200 1:300SC 1:400 1:500SC 1:600 1:700SCE")
	d.after(ms).cumulative(1, 300, 0, 6) // 200, 300: 0 and 100 are late
	d.sends("")
	d.after(200*us).cumulative(1, 100, 500, 0)
	d.sends("")
	d.cumulative(1, 700, 800, 0)
	d.over(1, nil)
	if st := d.s.Stats(); st.Retransmitted != 0 {
		t.Errorf("%+v", st)
	}
}

// Behind the bitmap's last word nothing is said.
func TestBitmapReach(t *testing.T) {
	d := newDesk(t, SenderConfig{Window: 256})
	d.meet()
	d.open(1, 25600)
	d.next()
	// The receiver's bitmap has one word, and the segment it answers is far behind it.
	d.after(ms).cumulative(1, 15900, 100, ^uint64(1))
	d.after(2 * ms)
	if got := d.next(); !strings.HasPrefix(got, "1:100SCr 1:200SCr") || strings.Contains(got, "1:6600") {
		t.Fatalf("sends %q, want 100 and 200 again, nothing behind 6500", got)
	}
	// What is missing shows when the bitmap comes there.
	d.after(ms).cumulative(1, 100, 6600, ^uint64(0)>>1)
	d.after(2 * ms)
	if got := d.next(); !strings.Contains(got, "1:6600SCr") || strings.Contains(got, "1:6700") || !strings.Contains(got, "1:13000SCr") {
		t.Fatalf("sends %q, want 6600 and 13000 again", got)
	}
}

// Where the bitmap does not reach, each segment is asked for itself.
func TestBitmapTooShort(t *testing.T) {
	d := newDesk(t, SenderConfig{Window: 2048})
	d.meet()
	d.open(1, 1e6)
	n := strings.Count(d.next(), "S")
	d.after(ms).cumulative(1, 12700, 0, ^uint64(0), 1<<63-1) // 0 is lost
	all := strings.Fields(d.next())
	if n != 64 || len(all) != 127 || strings.Count(strings.Join(all, ""), "S") != 127 {
		t.Errorf("%d SYN among the first 2048, then %q", n, all)
	}
}

func TestTimeout(t *testing.T) {
	d := newDesk(t, SenderConfig{Window: 4})
	d.meet()
	d.open(1, 1000)
	d.sends("1:0SC 1:100SC 1:200SC 1:300SC")
	start := d.now
	var at []time.Duration
	for range 5 {
		d.deadline("1:0SCr")
		at = append(at, time.Duration(d.now-start).Round(100*time.Microsecond))
	}
	want := []time.Duration{5 * time.Millisecond, 15 * time.Millisecond, 35 * time.Millisecond, 75 * time.Millisecond, 155 * time.Millisecond}
	if !slices.Equal(at, want) {
		t.Errorf("probes at %v, want %v", at, want)
	}
	rtt := d.s.Stats().RTT
	// The answer to a segment that was sent several times is no sample. It may be
	// the first one's: the others get a round trip.
	d.after(3*ms).cumulative(1, 0, 100, 0)
	if got := d.s.Stats().RTT; got != rtt {
		t.Errorf("round trip %v after an answer to a retransmission, was %v", got, rtt)
	}
	d.sends("1:400SC")
	d.deadline("1:100SCr 1:200SCr 1:300SCr")
	// Something was acknowledged: it begins with 5 ms again.
	start = d.now
	d.cumulative(1, 400, 100, 4)
	d.sends("1:500SC")
	d.deadline("1:100SCr")
	if got := time.Duration(d.now - start); got != 5*time.Millisecond {
		t.Errorf("probe %v after the last answer, want 5ms", got)
	}
}

// It was the first transmission that was acknowledged after the timeout, and the
// others come one by one.
func TestSpuriousTimeoutSlow(t *testing.T) {
	d := newDesk(t, SenderConfig{Window: 4, Plain: true})
	d.open(0, 1)
	d.next()
	d.after(ms).plain(0, 0)
	d.open(1, 1000)
	d.next()
	d.after(ms).plain(1, 0)
	d.sends("1:100S 1:200S 1:300S 1:400S")
	d.deadline("1:100Sr")
	d.after(2*ms).plain(1, 100)
	for _, k := range []uint32{200, 300, 400} {
		d.after(800 * us)
		d.sends(fmt.Sprintf("1:%dS", k+300))
		d.plain(1, k)
	}
}

// A receiver that was away for a while costs its probes, no more.
func TestSpuriousTimeout(t *testing.T) {
	for _, plain := range []bool{false, true} {
		p := newPipe(1)
		p.perSegment, p.queue, p.delay, p.plain = 10*us, 1000, 100*us, plain
		h := p.add(t, SenderConfig{Payload: 1000, Window: 64}, 2e6, 1, 1)
		p.run(5 * ms)
		p.stall(40 * ms)
		p.run(10 * second)
		if st := h.s.Stats(); h.finished != 1 || st.Timeouts == 0 || st.Retransmitted > st.Timeouts+1 {
			t.Errorf("plain %v: %d finished, %v, %+v", plain, h.finished, h.failed, st)
		}
	}
}

func TestSilence(t *testing.T) {
	for _, c := range []struct {
		name    string
		answer  bool
		config  SenderConfig
		retries uint64
		least   time.Duration
	}{
		{"never there", false, SenderConfig{Window: 4}, 8, 2 * time.Second},
		{"gone", true, SenderConfig{Window: 4}, 8, 2 * time.Second},
		{"patient", true, SenderConfig{Window: 4, Retries: 3, Patience: time.Second}, 3, time.Second},
		{"impatient", true, SenderConfig{Window: 4, Retries: 3, Patience: -1}, 3, 75 * time.Millisecond},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := newDesk(t, c.config)
			d.open(1, 1000)
			d.sends("1:0SC")
			if c.answer {
				d.after(ms).cumulative(1, 0, 100, 0)
				d.next()
			}
			start := d.now
			var o *Outgoing
			for o == nil && d.s.Deadline() != 0 {
				d.now = d.s.Deadline()
				d.next()
				o = d.s.Finished()
			}
			var e *MessageError
			if o == nil || !errors.As(o.Err(), &e) || !errors.Is(e, ErrSilent) {
				t.Fatalf("ended with %v", o.Err())
			}
			if e.ID != 1 || e.Answered != c.answer || e.Silent < c.least || e.Silent != time.Duration(d.now-start) ||
				e.Retransmitted < c.retries || e.Total != 1000 || (e.Acked == 100) != c.answer {
				t.Errorf("%+v", e)
			}
			if !strings.Contains(e.Error(), "message 1") || !strings.Contains(e.Error(), "1000 bytes") {
				t.Error(e)
			}
			if st := d.s.Stats(); st.InFlight != 0 || st.Open != 0 || d.s.Deadline() != 0 {
				t.Errorf("left behind: %+v", st)
			}
		})
	}
}

// The first segment would begin a message once more with a receiver that has ended and
// forgotten it. It is not sent later than the contract allows, whatever a sender's patience.
func TestFirstSegmentIsNotSentForLong(t *testing.T) {
	const window = 4
	for _, c := range []struct {
		name   string
		config SenderConfig
		length uint64
		meet   func(d *desk) // what the peer answers, a millisecond after what was sent
		first  bool          // it is sent again until shortly before the limit
		beyond bool          // others are sent after it
	}{
		{"a peer that was never there, by default", SenderConfig{Window: window}, 50, nil, false, false},
		{"and with patience", SenderConfig{Window: window, Retries: 1000}, 50, nil, true, false},
		{"and with more of it", SenderConfig{Window: window, Retries: 1000, Patience: time.Hour}, 1000, nil, true, false},
		{"and a plain one", SenderConfig{Window: window, Retries: 1000, Plain: true}, 1000, nil, true, false},
		{"and one whose segments are sent again after a minute", SenderConfig{Window: window, Retries: 1000, MinRTO: time.Minute, MaxRTO: time.Minute}, 50, nil, false, false},
		{"a peer that has said to wait", SenderConfig{Window: window, Retries: 1000}, 50, func(d *desk) { d.wait(1, 0, 0, 0) }, true, false},
		{"a peer that has acknowledged the first", SenderConfig{Window: window, Retries: 40}, 1000, func(d *desk) { d.cumulative(1, 0, 100, 0) }, false, true},
		{"a plain one that has", SenderConfig{Window: window, Retries: 40, Plain: true}, 1000, func(d *desk) { d.plain(1, 0) }, false, true},
		{"a plain one that has, and only EOM is open", SenderConfig{Window: window, Retries: 40, Plain: true}, 150, func(d *desk) { d.plain(1, 0) }, true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := newDesk(t, c.config)
			d.open(1, c.length)
			d.next()
			if c.meet != nil {
				c.meet(d.after(ms))
			}
			heard := d.now
			var first, last int64
			var o *Outgoing
			for ; o == nil; o = d.s.Finished() {
				d.now = max(d.now, d.s.Deadline())
				for _, s := range strings.Fields(d.next()) {
					if strings.HasPrefix(s, "1:0") {
						first = d.now - heard
					}
					last = d.now - heard
				}
			}
			if !errors.Is(o.Err(), ErrSilent) {
				t.Errorf("it ends with %v", o.Err())
			}
			limit := int64(MaxSilence)
			if first >= limit || c.first && first < limit-2*second {
				t.Errorf("the first segment is sent until %v after the last answer, the limit is %v", time.Duration(first), MaxSilence)
			}
			if (last >= limit) != c.beyond {
				t.Errorf("others are sent until %v after the last answer, the limit is %v", time.Duration(last), MaxSilence)
			}
			if silent := d.now - heard; !c.beyond && silent > limit {
				t.Errorf("it is given up after %v", time.Duration(silent))
			}
		})
	}
}

// A receiver that has no room for a message says nothing; it is asked longer
// when it answers others.
func TestRefused(t *testing.T) {
	d := newDesk(t, SenderConfig{Window: 4, Retries: 2, Patience: -1})
	d.meet()
	d.open(1, 50)
	d.sends("1:0SCE")
	d.open(2, 1000)
	d.sends("2:0SC 2:100SC 2:200SC 2:300SC")
	d.after(ms).cumulative(2, 0, 100, 0)
	for range 8 {
		d.deadlineOf(1)
		d.cumulative(2, 0, 100, 0)
	}
	d.nothingOver()
	d.cumulative(1, 0, 50, 0)
	d.over(1, nil)
}

// deadlineOf lets time pass until a message sends again.
func (d *desk) deadlineOf(id uint32) {
	d.Helper()
	for range 100 {
		d.now = max(d.now, d.s.Deadline())
		if strings.Contains(" "+d.next(), fmt.Sprintf(" %d:", id)) {
			return
		}
	}
	d.Fatalf("message %d sends nothing", id)
}

func TestOnlyEOMOpen(t *testing.T) {
	d := newDesk(t, SenderConfig{Window: 8})
	d.meet()
	o := d.open(1, 250)
	d.sends("1:0 1:100SC 1:200SCE")
	d.after(ms).cumulative(1, 100, 200, 0)
	d.wait(1, 200, 250, 0)
	if o.Unacked() != 200 {
		t.Errorf("may forget %d bytes, want 200", o.Unacked())
	}
	for range 100 {
		d.deadline("1:200SCEr")
		d.after(ms).wait(1, 200, 250, 0)
	}
	d.nothingOver()
	d.cumulative(1, 200, EndMax, 0) // all that it remembers
	if o := d.over(1, nil); o.Unacked() != 250 || o.Acked() != 250 || o.Retransmitted() != 100 || o.Segments() != 3 {
		t.Errorf("unacked %d, acked %d", o.Unacked(), o.Acked())
	}
}

func TestOnlyEOMOpenPlain(t *testing.T) {
	d := newDesk(t, SenderConfig{Window: 8, Plain: true})
	d.open(1, 250)
	d.sends("1:0S")
	d.after(ms).plain(1, 0)
	d.sends("1:100S")
	d.plain(1, 100)
	d.sends("1:200SE")
	for range 50 {
		d.deadline("1:200SEr 1:100Sr")
		d.after(ms).plain(1, 100)
	}
	d.nothingOver()
	d.plain(1, 200)
	d.over(1, nil)
}

func TestRestart(t *testing.T) {
	d := newDesk(t, SenderConfig{Window: 4})
	d.meet()
	d.open(1, 1000)
	d.next()
	d.after(ms).cumulative(1, 300, 400, 0)
	d.sends("1:400SC 1:500SC 1:600SC 1:700SC")
	// An old answer, once.
	d.cumulative(1, 100, 200, 0)
	for range restarts - 1 {
		d.deadline("1:400SCr")
		d.wait(1, 400, 0, 0)
	}
	d.nothingOver()
	// It was the network.
	d.deadline("1:400SCr")
	d.cumulative(1, 400, 800, 0)
	d.sends("1:800SC 1:900SCE")
	for range restarts {
		d.nothingOver()
		d.deadline("1:800SCr")
		d.wait(1, 800, 0, 0)
	}
	d.now = d.s.Deadline()
	d.sends("")
	var e *MessageError
	if err := d.over(1, ErrRestarted).Err(); !errors.As(err, &e) || !strings.Contains(err.Error(), "restarted") {
		t.Error(err)
	}
}

func TestHostile(t *testing.T) {
	for _, c := range []struct {
		name string
		b    []byte
		err  error
	}{
		{"not an ACK", Header{Flags: SYN, ID: 1}.bytes(), ErrNotAck},
		{"short", []byte{0x20, 0}, ErrAckSize},
		{"longer", append(Header{Flags: ACK, ID: 1}.bytes(), 0), ErrAckSize},
		{"unknown id", (&Ack{ID: 2}).Append(nil), ErrStray},
		{"offset never sent", (&Ack{ID: 1, Offset: 800}).Append(nil), ErrNeverSent},
		{"EOM never sent", (&Ack{ID: 1, Offset: 1900}).Append(nil), ErrNeverSent},
		{"offset between", (&Ack{ID: 1, Offset: 150}).Append(nil), ErrNeverSent},
		{"last offset", (&Ack{ID: 1, Offset: EndMax}).Append(nil), ErrNeverSent},
		{"end never sent", (&Ack{ID: 1, Cumulative: true, End: 900}).Append(nil), ErrNeverSent},
		{"end between", (&Ack{ID: 1, Cumulative: true, End: 150}).Append(nil), ErrNeverSent},
		{"end of all", (&Ack{ID: 1, Cumulative: true, End: 1950}).Append(nil), ErrNeverSent},
		{"largest end", (&Ack{ID: 1, Cumulative: true, End: EndMax}).Append(nil), ErrNeverSent},
		{"bit never sent", (&Ack{ID: 1, Cumulative: true, End: 100, Bitmap: []uint64{1 << 6}}).Append(nil), ErrNeverSent},
		{"bit far away", (&Ack{ID: 1, Cumulative: true, End: 100, Bitmap: []uint64{0, 1}}).Append(nil), ErrNeverSent},
		{"all that was sent and more", (&Ack{ID: 1, Offset: 700, Cumulative: true, End: 800, Bitmap: []uint64{1}}).Append(nil), ErrNeverSent},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := newDesk(t, SenderConfig{Window: 8})
			d.meet()
			o := d.open(1, 1950)
			d.sends("1:0 1:100SC 1:200 1:300SC 1:400 1:500SC 1:600 1:700SC")
			st := d.s.Stats()
			d.after(ms)
			if err := d.s.Acknowledge(c.b, d.now); !errors.Is(err, c.err) {
				t.Fatalf("error %v, want %v", err, c.err)
			}
			now := d.s.Stats()
			if now.Malformed+now.Stray+now.NeverSent != 1 {
				t.Errorf("not counted once: %+v", now)
			}
			now.Malformed, now.Stray, now.NeverSent = 0, 0, 0
			if now != st || o.Acked() != 0 || o.Unacked() != 0 {
				t.Errorf("changed: %+v, was %+v", now, st)
			}
			d.sends("")
			if n := testing.AllocsPerRun(10, func() { _ = d.s.Acknowledge(c.b, d.now) }); n != 0 {
				t.Errorf("%v allocations", n)
			}
		})
	}
	t.Run("cumulative, not offered", func(t *testing.T) {
		d := newDesk(t, SenderConfig{Window: 8, Plain: true})
		d.open(1, 1950)
		d.next()
		d.take(Ack{ID: 1, Cumulative: true, End: 100}, ErrUnasked)
		d.sends("")
	})
}

func (h Header) bytes() []byte {
	b := make([]byte, HeaderLen)
	h.Put(b)
	return b
}

// Acknowledgements that are true, but come twice, late, or out of order.
func TestHarmless(t *testing.T) {
	d := newDesk(t, SenderConfig{Window: 8})
	d.meet()
	o := d.open(1, 1000)
	d.next()
	d.after(ms).cumulative(1, 700, 800, 0)
	d.sends("1:800 1:900SCE")
	for range 3 {
		d.cumulative(1, 700, 800, 0)
		d.cumulative(1, 100, 200, 0)
		d.cumulative(1, 300, 200, 3)
		d.wait(1, 900, 800, 1)
	}
	if o.Acked() != 800 || o.Unacked() != 800 {
		t.Errorf("%d acked, %d unacked", o.Acked(), o.Unacked())
	}
	d.nothingOver()
	d.cumulative(1, 900, 1000, 0)
	d.over(1, nil)
	d.take(Ack{ID: 1, Offset: 900, Cumulative: true, End: 1000}, ErrStray)
}

func TestFirstLast(t *testing.T) {
	d := newDesk(t, SenderConfig{Mode: FirstLast, Gap: 100 * time.Microsecond})
	o := d.open(1, 450)
	d.sends("1:0SC")
	d.deadline("1:0SCr")
	d.after(ms).cumulative(1, 0, 100, 0)
	d.sends("1:100")
	for _, want := range []string{"1:200", "1:300", "1:400SCE"} {
		at := d.now + 100*us
		d.deadline(want)
		if d.now != at {
			t.Errorf("%s at %v, want %v", want, d.now, at)
		}
	}
	if o.Unacked() != 400 {
		t.Errorf("may forget %d bytes, want 400", o.Unacked())
	}
	d.deadline("1:400SCEr")
	d.cumulative(1, 400, 450, 0)
	d.over(1, nil)

	// The second loses 200.
	d.open(2, 450)
	d.sends("2:0SC")
	d.cumulative(2, 0, 100, 0)
	d.deadline("2:100")
	d.deadline("2:200")
	d.deadline("2:300")
	d.deadline("2:400SCE")
	for range 9 {
		d.wait(2, 400, 200, 2)
		d.deadline("2:400SCEr")
	}
	d.wait(2, 400, 200, 2)
	d.now = d.s.Deadline()
	d.sends("")
	var e *MessageError
	if err := d.over(2, ErrIncomplete).Err(); !errors.As(err, &e) || e.Acked != 200 {
		t.Error(err)
	}
}

func TestFirstLastPlain(t *testing.T) {
	for _, length := range []uint64{450, 150} {
		d := newDesk(t, SenderConfig{Mode: FirstLast, Plain: true, Retries: 2, Patience: -1})
		d.open(1, length)
		d.sends("1:0S")
		d.plain(1, 0)
		d.next()
		for range 3 {
			d.now = d.s.Deadline()
			d.next()
		}
		want := ErrIncomplete
		if length == 150 {
			want = ErrSilent // nothing could be lost
		}
		d.over(1, want)
	}
}

func TestUnacknowledged(t *testing.T) {
	d := newDesk(t, SenderConfig{Mode: Unacknowledged, Gap: time.Millisecond})
	d.open(1, 250)
	d.sends("1:0")
	if d.s.Deadline() != d.now+ms {
		t.Errorf("deadline %d, want %d", d.s.Deadline(), d.now+ms)
	}
	d.after(ms / 2).sends("")
	d.after(ms / 2).sends("1:100")
	d.nothingOver()
	// Late: it catches up, but not with everything.
	d.open(2, 10000)
	d.after(50 * ms)
	if n := len(strings.Fields(d.next())); n != catchUp+1 {
		t.Errorf("%d segments at once, want %d", n, catchUp+1)
	}
	d.over(1, nil)
	d.take(Ack{ID: 2}, ErrNeverSent)
}

func TestFairness(t *testing.T) {
	d := newDesk(t, SenderConfig{})
	d.meet()
	d.s.win.size = 4 * quantum
	for id := range uint32(4) {
		d.open(id, 1e6)
	}
	n := map[byte]int{}
	for _, x := range strings.Fields(d.next()) {
		n[x[0]]++
	}
	for id := range 4 {
		if n[byte('0'+id)] != quantum {
			t.Errorf("segments of the messages: %v, want %d of each", n, quantum)
		}
	}
}

func TestAbandon(t *testing.T) {
	d := newDesk(t, SenderConfig{})
	d.meet()
	o := d.open(1, 1000)
	d.next()
	cancelled := errors.New("cancelled")
	o.Abandon(cancelled)
	o.Abandon(errors.New("twice"))
	o.Supply(2000, true)
	d.sends("")
	d.over(1, cancelled)
	if st := d.s.Stats(); st.InFlight != 0 || d.s.Deadline() != 0 {
		t.Errorf("left behind: %+v", st)
	}
}

// The whole of 4 GiB: offsets and ends do not wrap.
func TestLargest(t *testing.T) {
	for _, length := range []uint64{MaxMessage, MaxMessage - 1, MaxMessage - 2} {
		s, err := NewSender(SenderConfig{Payload: 65000, Window: 64})
		if err != nil {
			t.Fatal(err)
		}
		o, err := s.Open(1)
		if err != nil {
			t.Fatal(err)
		}
		o.Supply(length, true)
		var dst [44]Outbound
		var sum, next uint64
		now := second
		for s.Finished() == nil {
			n := s.Next(dst[:], now)
			if n == 0 {
				t.Fatalf("stuck at %d: %+v", next, s.Stats())
			}
			now += us
			for _, x := range dst[:n] {
				if uint64(x.Header.Offset) != next {
					t.Fatalf("offset %d, want %d", x.Header.Offset, next)
				}
				next += uint64(x.Len)
				sum += uint64(x.Len)
				if x.Header.Flags&SYN != 0 {
					a := Ack{ID: 1, Offset: x.Header.Offset, Cumulative: true, End: uint32(min(next, EndMax))}
					if err := s.Acknowledge(a.Append(nil), now); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
		if o.Err() != nil || sum != length {
			t.Errorf("%d bytes of %d, %v", sum, length, o.Err())
		}
	}
}

// Everything that a network does, in every mode that is reliable.
func TestNetworks(t *testing.T) {
	for _, plain := range []bool{false, true} {
		for _, window := range []int{0, 1, 5, 300, 4096} {
			for _, c := range []struct {
				name          string
				length        uint64
				messages      uint32
				parallel      int
				loss, late    float64
				delay, lateBy int64
				again         float64 // of the segments, at most
			}{
				{"loss", 500e3, 4, 2, 0.1, 0, ms, 0, 0.6},
				{"reordering", 2e6, 1, 1, 0, 0.03, ms, 300 * us, 0.06},
				{"both", 500e3, 4, 4, 0.02, 0.03, 100 * us, 500 * us, 0.3},
				{"many small ones", 100, 2000, 500, 0.02, 0.03, 100 * us, 500 * us, 0.3},
				{"ten thousand", 2500, 10000, 10000, 0.01, 0, 100 * us, 0, 1},
			} {
				if testing.Short() && c.messages > 100 {
					continue
				}
				t.Run(fmt.Sprintf("%s, window %d, plain %v", c.name, window, plain), func(t *testing.T) {
					p := newPipe(7)
					p.perSegment, p.queue, p.wake, p.plain = 10*us, 5000, 20*us, plain
					p.loss, p.late, p.delay, p.lateBy = c.loss, c.late, c.delay, c.lateBy
					h := p.add(t, SenderConfig{Payload: 1000, Window: window}, c.length, c.messages, c.parallel)
					p.run(1000 * second)
					st := h.s.Stats()
					if h.finished != int(c.messages) {
						t.Fatalf("%d finished, %v, %+v", h.finished, h.failed[:min(len(h.failed), 3)], st)
					}
					if st.InFlight != 0 || st.Open != 0 {
						t.Errorf("left behind: %+v", st)
					}
					if x := float64(st.Retransmitted) / float64(st.Segments); x > c.again {
						t.Errorf("%.2f of the segments sent again: %+v", x, st)
					}
				})
			}
		}
	}
}

// A receiver has room for fewer messages than are sent at once, and says nothing
// about the others until they have it.
func TestLimit(t *testing.T) {
	for _, window := range []int{0, 4} {
		p := newPipe(3)
		p.perSegment, p.queue, p.delay, p.loss, p.limit = 10*us, 5000, 100*us, 0.01, 16
		h := p.add(t, SenderConfig{Payload: 1000, Window: window}, 20e3, 300, 300)
		p.run(1000 * second)
		if h.finished != 300 || h.endedAt > 60*second {
			t.Errorf("window %d: %d finished after %v, %v", window, h.finished, time.Duration(h.endedAt), h.failed[:min(len(h.failed), 3)])
		}
	}
}

func FuzzAcknowledge(f *testing.F) {
	f.Add([]byte{10, 0x30, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 100, 0, 0, 0, 0, 0, 0, 0, 1}, uint16(950), false)
	f.Add([]byte{3, 0x20, 0, 0, 0, 0, 1, 0, 0, 0, 0}, uint16(300), true)
	f.Fuzz(func(t *testing.T, script []byte, length uint16, plain bool) {
		s, err := NewSender(SenderConfig{Payload: 100, Plain: plain, Window: 8})
		if err != nil {
			t.Fatal(err)
		}
		o, err := s.Open(1)
		if err != nil {
			t.Fatal(err)
		}
		o.Supply(uint64(length), true)
		now := second
		eom := false // sent
		var high int // bytes sent
		var dst [16]Outbound
		for len(script) > 0 {
			now += int64(script[0]) * 200 * us
			for {
				n := s.Next(dst[:], now)
				if n == 0 {
					break
				}
				for _, x := range dst[:n] {
					eom = eom || x.Header.Flags&EOM != 0
					high = max(high, int(x.Header.Offset)+x.Len)
					if x.Len < 0 || x.Len > 100 || high > int(length) {
						t.Fatalf("sends %+v of %d bytes", x, length)
					}
				}
			}
			n := 10
			if len(script) > 1 && script[1]&0x10 != 0 {
				n = 22
			}
			n = min(n, len(script)-1)
			_ = s.Acknowledge(script[1:1+n], now)
			script = script[1+n:]
			if !o.over && (o.Acked() > uint64(high) || o.Unacked() > uint64(high)) {
				t.Fatalf("%d bytes acknowledged, %d forgotten, %d sent", o.Acked(), o.Unacked(), high)
			}
			inFlight := o.flight.n + o.repeat.n
			if o.inflight != inFlight && !o.over || inFlight < 0 {
				t.Fatalf("%d in flight, lists have %d", o.inflight, inFlight)
			}
		}
		if o.over && o.Err() == nil && !eom {
			t.Error("complete, but EOM was never sent")
		}
	})
}
