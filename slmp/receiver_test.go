// SPDX-License-Identifier: Apache-2.0

package slmp_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// A log writes down what a Receiver does.
type log struct {
	testing.TB
	r    *slmp.Receiver
	now  int64
	said []string
	data map[uint32][]byte // of messages, by id
	late map[string]*slmp.Call

	codes map[string]slmp.Code // by what is said of a call
	full  bool
}

var alice, bob = netip.MustParseAddrPort("10.0.0.2:1000"), netip.MustParseAddrPort("10.0.0.2:1001")

func newLog(t testing.TB, c mpq.Config) *log {
	t.Helper()
	l := &log{TB: t, now: sec, data: map[uint32][]byte{}, late: map[string]*slmp.Call{}, codes: map[string]slmp.Code{}}
	say := func(c *slmp.Call, format string, args ...any) slmp.Code {
		s := fmt.Sprintf(format, args...)
		l.said = append(l.said, s)
		code := l.codes[s]
		if code == slmp.Pending {
			l.late[s] = c
		}
		return code
	}
	r, err := slmp.NewReceiver(slmp.ReceiverConfig{
		Config: c,
		Handlers: slmp.Handlers{
			Header: func(c *slmp.Call) slmp.Code { return say(c, "header %d", c.Message.ID()) },
			Payload: func(c *slmp.Call) slmp.Code {
				d := l.data[c.Message.ID()]
				if n := int(c.Segment.End()) - len(d); n > 0 && n < 1<<20 {
					d = append(d, make([]byte, n)...)
				}
				copy(d[c.Segment.Offset:], c.Payload)
				l.data[c.Message.ID()] = d
				return say(c, "payload %d:%d", c.Message.ID(), c.Segment.Offset)
			},
			Completion: func(c *slmp.Call) slmp.Code {
				return say(c, "completion %d %v %d-%d", c.Message.ID(), c.Ending.Cause, c.Ending.Length, c.Ending.Missing)
			},
			Event: func(m *slmp.Incoming, e slmp.Ending) bool {
				if l.full {
					say(nil, "no room %d", m.ID())
				} else {
					say(nil, "event %d %v", m.ID(), e.Cause)
				}
				return !l.full
			},
		},
		Send: func(to netip.AddrPort, b []byte) {
			a, err := slmp.ParseAck(b)
			if err != nil {
				t.Fatal(err)
			}
			s := fmt.Sprintf("ack %d:%d", a.ID, a.Offset)
			if a.Wait {
				s = "wait" + s[3:]
			}
			if a.Cumulative {
				s += fmt.Sprintf(" %d %x", a.End, a.Bitmap)
			}
			if to != alice {
				s += " to " + to.String()
			}
			l.said = append(l.said, s)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	l.r = r
	return l
}

const (
	syn  = slmp.SYN
	end  = slmp.SYN | slmp.EOM
	offr = slmp.SYN | slmp.Cumulative
)

// datagram makes a segment whose payload is the id, n times.
func datagram(f slmp.Flags, id, offset uint32, n int) []byte {
	b := bytes.Repeat([]byte{byte(id)}, slmp.HeaderLen+n)
	slmp.Header{Flags: f, ID: id, Offset: offset}.Put(b)
	return b
}

func (l *log) from(who netip.AddrPort, f slmp.Flags, id, offset uint32, n int) *log {
	l.r.Receive(who, datagram(f, id, offset, n), l.now)
	return l
}

func (l *log) in(f slmp.Flags, id, offset uint32, n int) *log {
	return l.from(alice, f, id, offset, n)
}

func (l *log) done(what string, code slmp.Code) *log {
	l.Helper()
	c := l.late[what]
	if c == nil {
		l.Fatalf("%q is not pending", what)
	}
	l.r.Done(c, code, l.now)
	return l
}

// want compares what was said since the last time.
func (l *log) want(want ...string) {
	l.Helper()
	if !slices.Equal(l.said, want) {
		l.Fatalf("got\n\t%s\nwant\n\t%s", strings.Join(l.said, "\n\t"), strings.Join(want, "\n\t"))
	}
	l.said = nil
}

func TestReceiverInOrder(t *testing.T) {
	l := newLog(t, mpq.Config{})
	l.in(syn, 1, 0, 100).want("header 1", "payload 1:0", "ack 1:0")
	l.in(syn, 1, 100, 100).want("payload 1:100", "ack 1:100")
	l.in(0, 1, 200, 100).want("payload 1:200")
	l.in(syn, 1, 100, 100).want("ack 1:100")
	l.in(end, 1, 300, 1).want("payload 1:300", "completion 1 complete 301-0", "event 1 complete", "ack 1:300")
	l.in(end, 1, 300, 1).want("ack 1:300")
	l.in(offr, 1, 0, 100).want("ack 1:0 4294967295 [0]")
	if d := l.data[1]; len(d) != 301 || bytes.Count(d, []byte{1}) != 301 {
		t.Errorf("%d bytes: %x", len(d), d)
	}
	l.in(end, 2, 0, 0).want("header 2", "payload 2:0", "completion 2 complete 0-0", "event 2 complete", "ack 2:0")
}

func TestReceiverOutOfOrder(t *testing.T) {
	l := newLog(t, mpq.Config{})
	l.in(end|offr, 1, 300, 7).want("wait 1:300 0 [0]")
	l.in(syn, 1, 200, 100).want()
	l.in(offr, 1, 0, 100).want("header 1", "payload 1:0", "ack 1:0 100 [0]",
		"payload 1:300", "wait 1:300 100 [2]", "payload 1:200", "ack 1:200")
	l.in(end|offr, 1, 300, 7).want("wait 1:300 100 [3]")
	l.in(end, 1, 300, 7).want()
	l.in(syn, 1, 100, 100).want("payload 1:100", "ack 1:100", "completion 1 complete 307-0", "event 1 complete", "ack 1:300 307 [0]")
}

// Everything takes its time.
func TestReceiverPending(t *testing.T) {
	l := newLog(t, mpq.Config{})
	for _, s := range []string{"header 1", "payload 1:0", "payload 1:100", "payload 1:200", "completion 1 complete 300-0"} {
		l.codes[s] = slmp.Pending
	}
	l.in(syn, 1, 0, 100).want("header 1")
	l.in(offr, 1, 100, 100).want("wait 1:100 0 [0]")
	l.in(syn, 1, 0, 100).want()
	l.done("header 1", slmp.Success).want("payload 1:0", "payload 1:100")
	l.in(offr, 1, 0, 100).want("wait 1:0 0 [0]")
	l.in(end|offr, 1, 200, 100).want("payload 1:200")
	l.done("payload 1:100", slmp.Success).want("ack 1:100 0 [1]")
	l.done("payload 1:200", slmp.Success).want("wait 1:200 0 [3]")
	l.done("payload 1:0", slmp.Success).want("ack 1:0", "completion 1 complete 300-0")
	l.in(end|offr, 1, 200, 100).want("wait 1:200 300 [0]")
	l.r.Stop(l.now)
	l.want()
	l.done("completion 1 complete 300-0", slmp.Success).want("event 1 complete", "ack 1:200 300 [0]")
	if d := l.data[1]; len(d) != 300 || bytes.Count(d, []byte{1}) != 300 {
		t.Errorf("%d bytes: %x", len(d), d)
	}
}

func TestReceiverErrors(t *testing.T) {
	l := newLog(t, mpq.Config{})
	l.codes["header 1"] = slmp.Fail
	l.in(syn, 1, 0, 100).want("header 1", "event 1 failed")
	l.in(offr, 1, 0, 100).in(syn, 1, 100, 100).want()

	l.codes["payload 2:0"], l.codes["payload 2:100"] = slmp.Pending, slmp.Fail
	l.in(syn, 2, 0, 100).in(offr, 2, 100, 100).want("header 2", "payload 2:0", "payload 2:100", "event 2 failed")
	l.in(offr, 2, 200, 100).want()
	l.done("payload 2:0", slmp.Success).want()

	l.codes["completion 3 complete 5-0"] = slmp.Fail
	l.in(end, 3, 0, 5).want("header 3", "payload 3:0", "completion 3 complete 5-0", "event 3 failed")
	l.in(end, 3, 0, 5).want()

	// Refused is not failed. What is held goes with it.
	l.codes["header 4"] = slmp.Pending
	l.in(syn, 4, 0, 100).in(syn, 4, 100, 100).done("header 4", slmp.Refuse).want("header 4")
	l.codes["header 4"] = slmp.Success
	l.in(end, 4, 0, 5).want("header 4", "payload 4:0", "completion 4 complete 5-0", "event 4 complete", "ack 4:0")
	if s := l.r.Stats().Messages; s.Failed != 3 || s.Refused != 1 || s.Open != 0 || s.HeldNow != 0 {
		t.Errorf("%+v", s)
	}
}

func TestReceiverEventQueueFull(t *testing.T) {
	l := newLog(t, mpq.Config{Timeout: time.Second})
	l.full = true
	l.in(end, 1, 0, 5).want("header 1", "payload 1:0", "completion 1 complete 5-0", "no room 1")
	l.in(end|offr, 1, 0, 5).want("no room 1", "wait 1:0 5 [0]")
	l.r.Retry(l.now)
	l.want("no room 1") // nobody asked
	l.full = false
	l.r.Retry(l.now)
	l.want("event 1 complete", "ack 1:0 5 [0]")
	l.r.Retry(l.now)
	l.want()

	// Nobody asks any more, and there is no room still: it was not told, so it
	// is not acknowledged.
	l.full = true
	l.in(end, 2, 0, 5)
	l.said = nil
	l.now += 2 * sec
	l.r.Expire(l.now)
	l.want("no room 2")
	l.full = false
	l.in(end, 2, 0, 5).want()
	l.r.Retry(l.now)
	l.want()
	if s := l.r.Stats(); s.EventsLost != 1 || s.Messages.Open != 0 {
		t.Errorf("%+v", s)
	}
	// There is, at last.
	l.full = true
	l.in(end, 3, 0, 5)
	l.said, l.full = nil, false
	l.now += 2 * sec
	l.r.Expire(l.now)
	l.want("event 3 complete")
	l.in(end, 3, 0, 5).want("ack 3:0")
}

// However many messages wait for room, one is tried at a time, and what is tried by
// itself gives them no time.
func TestReceiverTriesOneEventAtATime(t *testing.T) {
	l := newLog(t, mpq.Config{Timeout: time.Second})
	l.full = true
	for id := range uint32(3) {
		l.in(end|offr, id+1, 0, 5)
	}
	l.said = nil
	for range 9 {
		l.now += sec / 10
		l.r.Expire(l.now)
		l.r.Retry(l.now)
		l.want("no room 1")
	}
	l.in(end|offr, 2, 0, 5).want("no room 2", "wait 2:0 5 [0]")
	l.now += sec / 10
	l.r.Expire(l.now)
	l.want("no room 1", "no room 3")
	l.full = false
	l.in(end|offr, 4, 0, 5)
	l.said = nil
	l.r.Retry(l.now)
	l.want("event 2 complete", "ack 2:0 5 [0]")
	l.r.Retry(l.now)
	l.want()
	if s := l.r.Stats(); s.EventsLost != 2 || s.Messages.Open != 0 {
		t.Errorf("%+v", s)
	}
}

func TestReceiverTimeout(t *testing.T) {
	for how, want := range map[mpq.Incomplete][]string{
		mpq.Abandon: {"completion 1 timed out 307-100", "event 1 timed out"},
		mpq.Linger:  {"completion 1 timed out 307-100", "event 1 timed out"},
		mpq.Discard: nil,
	} {
		l := newLog(t, mpq.Config{Timeout: time.Second, Incomplete: how})
		l.in(syn, 1, 0, 100).in(syn, 1, 200, 100).in(end, 1, 300, 7)
		l.in(syn, 2, 200, 100) // without a beginning
		l.said = nil
		if how == mpq.Linger {
			l.now += 10 * msec
		} else {
			l.now += sec
		}
		if d := l.r.Deadline(); d == 0 || d > l.now {
			t.Errorf("deadline %d, want %d at most", d, l.now)
		}
		l.r.Expire(l.now)
		l.want(want...)
		l.in(offr, 1, 100, 100).in(syn, 1, 200, 100).in(end, 1, 300, 7).want()
		l.now += 2 * sec
		l.r.Expire(l.now)
		l.want()
		if s := l.r.Stats().Messages; s.Open != 0 || s.HeldNow != 0 || s.Dropped[spin.DropNoHeader] != 1 {
			t.Errorf("%+v", s)
		}
	}
	l := newLog(t, mpq.Config{})
	l.in(syn, 1, 0, 100).in(syn, 1, 200, 100).in(syn, 2, 10, 10)
	l.said = nil
	l.r.Stop(l.now)
	l.want("completion 1 stopped 300-100", "event 1 stopped")
}

// The same id from somebody else is another message; from the same one, while the
// first lives or is remembered, it is the same message.
func TestReceiverSameID(t *testing.T) {
	l := newLog(t, mpq.Config{})
	l.in(syn, 1, 0, 100).want("header 1", "payload 1:0", "ack 1:0")
	l.from(bob, syn, 1, 0, 10).want("header 1", "payload 1:0", "ack 1:0 to 10.0.0.2:1001")
	for i, who := range []string{"[fe80::2%a]:1000", "[fe80::2%b]:1000", "[fe80::2]:1000", "[::a00:2]:1000"} {
		l.from(netip.MustParseAddrPort(who), 0, 1, 0, 10).want("header 1", "payload 1:0")
		if n := l.r.Stats().Messages.Open; n != i+3 {
			t.Errorf("%d messages", n)
		}
	}
	l.from(netip.MustParseAddrPort("[::ffff:10.0.0.2]:1001"), end, 1, 10, 1). // an IPv4 address
											want("payload 1:10", "completion 1 complete 11-0", "event 1 complete", "ack 1:10 to 10.0.0.2:1001")

	// A sender that begins again with an id that lives: the same cuts are
	// duplicates, others are dropped.
	l.in(syn, 1, 0, 100).want("ack 1:0")
	l.in(syn, 1, 0, 50).in(end, 1, 0, 30).in(end, 1, 50, 100).want()
	l.in(syn, 1, 100, 50).in(syn, 1, 150, 100).want("payload 1:100", "ack 1:100", "payload 1:150", "ack 1:150")
	l.in(end, 1, 250, 0).want("payload 1:250", "completion 1 complete 250-0", "event 1 complete", "ack 1:250")
	l.in(end, 1, 0, 30).want("ack 1:0") // just after
	l.now += 9 * sec
	l.in(end, 1, 0, 30).want("header 1", "payload 1:0", "completion 1 complete 30-0", "event 1 complete", "ack 1:0")
	if s := l.r.Stats().Messages; s.Dropped[spin.DropOverlap] != 2 || s.Dropped[spin.DropTwoEnds] != 1 {
		t.Errorf("%+v", s)
	}
}

func TestReceiverBadInput(t *testing.T) {
	l := newLog(t, mpq.Config{})
	for n := range slmp.HeaderLen {
		l.r.Receive(alice, make([]byte, n), l.now)
	}
	l.in(slmp.ACK, 1, 0, 0).in(slmp.ACK|end, 1, 0, 100).want()
	if s := l.r.Stats(); s.Short != uint64(slmp.HeaderLen) || s.Stray != 2 || s.Datagrams != uint64(slmp.HeaderLen)+2 {
		t.Errorf("%+v", s)
	}
	// Reserved bits change nothing.
	l.in(syn|slmp.Reserved, 1, 0, 100).want("header 1", "payload 1:0", "ack 1:0")
	l.in(end, 1, 500, 10).want("payload 1:500")
	// Two ends, bytes behind the end, behind 4 GiB: silence.
	l.in(end, 1, 500, 20).in(end, 1, 400, 10).in(syn, 1, 505, 10).in(syn, 1, 510, 10).in(offr, 1, 1<<32-1, 2).want()
	l.in(syn, 1, 50, 100).in(syn, 1, 450, 100).want()
	s := l.r.Stats().Messages
	if s.Dropped[spin.DropTwoEnds] != 5 || s.Dropped[spin.DropBeyond] != 1 || s.Dropped[spin.DropOverlap] != 1 {
		t.Errorf("%+v", s)
	}
	l.in(syn, 1, 100, 400).want("payload 1:100", "ack 1:100", "completion 1 complete 510-0", "event 1 complete", "ack 1:500")
}

// 100,000 messages that somebody begins and does not mean: no more room than was
// granted, and the one that is being received ends well.
func TestReceiverFlood(t *testing.T) {
	l := newLog(t, mpq.Config{Timeout: time.Second})
	l.in(syn, 1, 0, 100).want("header 1", "payload 1:0", "ack 1:0")
	for i := range uint32(100_000) {
		from := netip.AddrPortFrom(netip.AddrFrom4([4]byte{1, byte(i >> 16), byte(i >> 8), byte(i)}), 9)
		l.from(from, syn, i, i%2*100, 100)
	}
	l.said = nil
	l.data = map[uint32][]byte{}
	s := l.r.Stats().Messages
	if s.Open != 4096 || s.HeldNow != 64 || s.Dropped[spin.DropMessages] == 0 || s.Dropped[spin.DropNoHeader] == 0 || s.Memory != 0 {
		t.Errorf("%+v", s)
	}
	l.in(end, 1, 100, 100).want("payload 1:100", "completion 1 complete 200-0", "event 1 complete", "ack 1:100")
	l.now += 2 * sec
	l.r.Expire(l.now)
	if s := l.r.Stats().Messages; s.Open != 0 || s.HeldNow != 0 {
		t.Errorf("%+v", s)
	}
	l.said = nil
	l.in(end, 2, 0, 1).want("header 2", "payload 2:0", "completion 2 complete 1-0", "event 2 complete", "ack 2:0")
}

// 10,000 messages at a time, their segments mixed.
func TestReceiverManyMessages(t *testing.T) {
	const n, segments = 10_000, 5
	l := newLog(t, mpq.Config{Messages: n})
	r := rand.New(rand.NewPCG(1, 2))
	for s := range uint32(segments) {
		for _, id := range r.Perm(n) {
			offset := (s + uint32(id)) % segments
			if s == 0 {
				offset = 0
			} else if offset == 0 {
				offset = uint32(id) % segments
			}
			f := slmp.Flags(0)
			if offset == segments-1 {
				f = slmp.EOM
			}
			l.in(f, uint32(id), offset*3, 3)
		}
		if s == 0 && l.r.Stats().Messages.Open != n {
			t.Fatalf("%+v", l.r.Stats())
		}
	}
	if s := l.r.Stats().Messages; s.Started != n || s.Ended != n || s.Open != 0 || s.Memory != 0 {
		t.Errorf("%+v", s)
	}
	for id, d := range l.data {
		if len(d) != 3*segments || bytes.Count(d, []byte{byte(id)}) != len(d) {
			t.Fatalf("message %d: %x", id, d)
		}
	}
}

// What is received costs no allocation, answered or not.
func TestReceiverAllocations(t *testing.T) {
	r, err := slmp.NewReceiver(slmp.ReceiverConfig{Send: func(netip.AddrPort, []byte) {}})
	if err != nil {
		t.Fatal(err)
	}
	const size = 64
	b := make([]byte, slmp.HeaderLen+size)
	id := uint32(0)
	message := func() {
		id++
		for i := range uint32(100) {
			f := offr
			if i == 99 {
				f |= slmp.EOM
			}
			k := i
			if i > 0 && i < 99 {
				k = 99 - i // backwards
			}
			slmp.Header{Flags: f, ID: id, Offset: k * size}.Put(b)
			r.Receive(alice, b, 1)
		}
	}
	for range 100 {
		message()
	}
	if n := testing.AllocsPerRun(200, message); n != 0 {
		t.Errorf("%v allocations for a message", n)
	}
	if s := r.Stats().Messages; s.Ended != uint64(id) {
		t.Errorf("%+v", s)
	}
}

func TestReceiverConfig(t *testing.T) {
	var c slmp.ReceiverConfig
	r, err := slmp.NewReceiver(c)
	if err != nil {
		t.Fatal(err)
	}
	r.Receive(alice, datagram(end, 1, 0, 1), sec) // and there is no Send
	if s := r.Stats(); s.Messages.Ended != 1 || s.Acks != 0 {
		t.Errorf("%+v", s)
	}
	c.Messages = -1
	if _, err := slmp.NewReceiver(c); err == nil || !strings.Contains(err.Error(), "SLMP receiver") {
		t.Error(err)
	}
}

func TestServe(t *testing.T) {
	here, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	causes := make(chan slmp.Cause, 2)
	c := slmp.ReceiverConfig{Send: func(netip.AddrPort, []byte) { t.Error("Send, not the socket") }}
	c.Event = func(_ *slmp.Incoming, e slmp.Ending) bool { causes <- e.Cause; return true }
	r, err := slmp.NewReceiver(c)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- r.Serve(ctx, here) }()

	there, err := net.DialUDP("udp4", nil, here.LocalAddr().(*net.UDPAddr))
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	for i, f := range []slmp.Flags{syn, end} {
		b := datagram(f, 1, uint32(i)*10, 10)
		for {
			if _, err := there.Write(b); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, 100)
			there.SetReadDeadline(time.Now().Add(time.Second))
			n, err := there.Read(got)
			if err != nil {
				continue
			}
			if a, err := slmp.ParseAck(got[:n]); err != nil || a.ID != 1 || a.Offset != uint32(i)*10 {
				t.Fatalf("%+v, %v", a, err)
			}
			break
		}
	}
	if c := <-causes; c != slmp.Complete {
		t.Errorf("%v", c)
	}
	if _, err := there.Write(datagram(syn, 2, 0, 10)); err != nil {
		t.Fatal(err)
	}
	there.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := there.Read(make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if c := <-causes; c != slmp.Stopped {
		t.Errorf("%v", c)
	}
	if s := r.Stats(); s.Messages.Open != 0 || s.Messages.Ended != 1 {
		t.Errorf("%+v", s)
	}
}

// FuzzReceiver: whatever comes, whatever handlers do, the bounds hold and nothing is
// acknowledged that must not be.
func FuzzReceiver(f *testing.F) {
	for i := range uint64(4) {
		r := rand.New(rand.NewPCG(i, 7))
		b := make([]byte, 600)
		for j := range b {
			b[j] = byte(r.Uint32())
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		data = data[:min(len(data), 4000)]
		next := func() int {
			if len(data) == 0 {
				return 0
			}
			b := data[0]
			data = data[1:]
			return int(b)
		}
		w := &world{T: t, Rand: rand.New(rand.NewPCG(uint64(next()), 1)), now: sec}
		w.c.Config = mpq.Config{
			Messages: 1 + next()%4, Held: 1 + next()%8, Memory: 64 << (next() % 8),
			Timeout: 100 * time.Millisecond, Incomplete: mpq.Incomplete(next() % 3),
		}
		w.behave = behaviour{pending: 0.5, slow: 20 * msec, fail: float64(next()%8) / 200, refuse: float64(next()%4) / 10, room: 1 + next()%3, readTime: 100 * msec}
		x := w.newReceiver()
		for len(data) > 0 {
			h := slmp.Header{Flags: slmp.Flags(next() << 8), ID: uint32(next() % 4), Offset: uint32(next()%64) * 8}
			n := 8
			switch next() % 16 {
			case 0:
				h.Offset = uint32(next())
				n = next()
			case 1:
				h.Offset = ^uint32(next())
			case 2, 3, 4:
				h.Offset = 0
			case 5:
				n = -next() % (slmp.HeaderLen + 1)
			}
			if next()%16 != 0 {
				h.Flags &^= slmp.ACK | slmp.EOM
			}
			b := make([]byte, slmp.HeaderLen+max(n, 0))
			h.Put(b)
			x.receive([]netip.AddrPort{alice, bob}[next()%2], b[:slmp.HeaderLen+n])
			until := w.now + int64(next())*int64(next()%16)*10*usec
			w.at(until, func() {})
			w.run(w.now+1000*sec, func() bool { return w.now >= until })
			if s := x.r.Stats().Messages; s.Open > w.c.Messages || s.HeldNow > w.c.Held || s.Memory > w.c.Memory {
				t.Fatalf("bounds: %+v", s)
			}
		}
		w.settle()
	})
}
