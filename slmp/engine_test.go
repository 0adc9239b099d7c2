// SPDX-License-Identifier: Apache-2.0

package slmp_test

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xspin/xspin/handlers/handlerstest"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/packet"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// A log writes down what a NIC does with segments, one by one: what handlers are called
// for, then what is sent.
type log struct {
	testing.TB
	n    *handlerstest.NIC
	now  atomic.Int64
	said []string
	data map[uint32][]byte // of messages, by id
	full bool              // there is no room for events
}

var alice, bob = handlerstest.Peer(1000), handlerstest.Peer(1001)

func newLog(t testing.TB, c mpq.Config) *log {
	t.Helper()
	l := &log{TB: t, data: map[uint32][]byte{}}
	l.now.Store(sec)
	l.n = handlerstest.New(t, handlerstest.Config{
		Handlers: hpu.Handlers{
			Header: func(h *hpu.HER) spin.Code { return l.say("header %d", h.Message().Number()) },
			Payload: func(h *hpu.HER) spin.Code {
				d, at := l.data[h.Message().Number()], int(h.Offset())
				if n := at + h.PayloadLen() - len(d); n > 0 {
					d = append(d, make([]byte, n)...)
				}
				for b := range h.Payload() {
					at += copy(d[at:], b)
				}
				l.data[h.Message().Number()] = d
				return l.say("payload %d:%d", h.Message().Number(), h.Offset())
			},
			Completion: func(c *hpu.Completion) spin.Code {
				return l.say("completion %d %v %d-%d", c.Message().Number(), c.Cause, c.Length, c.Missing)
			},
		},
		Rulesets: []matcher.Ruleset{matcher.SLMP()}, Binder: l, Limits: c, Clock: l.now.Load,
	})
	return l
}

func (l *log) say(format string, args ...any) spin.Code {
	l.said = append(l.said, fmt.Sprintf(format, args...))
	return spin.Success
}

// Bind implements hpu.Binder.
func (l *log) Bind(*hpu.Message) (spin.Binding, error) { return spin.Binding{Events: l}, nil }

// Unbind implements hpu.Binder.
func (l *log) Unbind(*hpu.Message, *spin.Result) {}

// Post implements spin.EventSink.
func (l *log) Post(e *spin.MessageEvent) bool {
	if l.full {
		l.say("no room %d", e.Number)
	} else {
		l.say("event %d %v", e.Number, e.Cause)
	}
	return !l.full
}

const (
	syn  = slmp.SYN
	end  = slmp.SYN | slmp.EOM
	offr = slmp.SYN | slmp.Cumulative
)

// from has a segment come whose payload is the id, n times.
func (l *log) from(who netip.AddrPort, f slmp.Flags, id, offset uint32, n int) *log {
	l.Helper()
	return l.sent(l.n.Packet(handlerstest.Segment(who, slmp.Header{Flags: f, ID: id, Offset: offset}, bytes.Repeat([]byte{byte(id)}, n))))
}

func (l *log) in(f slmp.Flags, id, offset uint32, n int) *log {
	l.Helper()
	return l.from(alice, f, id, offset, n)
}

// after lets time pass.
func (l *log) after(d time.Duration) *log {
	l.Helper()
	l.now.Add(int64(d))
	return l.sent(l.n.Settle())
}

func (l *log) sent(out *handlerstest.Outcome) *log {
	l.Helper()
	for _, frame := range out.Sent {
		hdr := packet.Parse(frame, len(frame))
		a, err := slmp.ParseAck(frame[hdr.Payload:][:hdr.PayloadLen])
		if err != nil {
			l.Fatal(err)
		}
		s := fmt.Sprintf("ack %d:%d", a.ID, a.Offset)
		if a.Wait {
			s = "wait" + s[3:]
		}
		if a.Cumulative {
			s += fmt.Sprintf(" %d %x", a.End, a.Bitmap)
		}
		if to := hdr.UDP.DstPort(); to != alice.Port() {
			s += fmt.Sprintf(" to %d", to)
		}
		l.say("%s", s)
	}
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

func TestSegmentsInOrder(t *testing.T) {
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

func TestSegmentsOutOfOrder(t *testing.T) {
	l := newLog(t, mpq.Config{})
	l.in(end|offr, 1, 300, 7).want("wait 1:300 0 [0]")
	l.in(syn, 1, 200, 100).want()
	l.in(offr, 1, 0, 100).want("header 1", "payload 1:0", "payload 1:300", "payload 1:200",
		"ack 1:0 100 [0]", "wait 1:300 100 [2]", "ack 1:200")
	l.in(end|offr, 1, 300, 7).want("wait 1:300 100 [3]")
	l.in(end, 1, 300, 7).want()
	l.in(syn, 1, 100, 100).want("payload 1:100", "completion 1 complete 307-0", "event 1 complete", "ack 1:100", "ack 1:300 307 [0]")
}

// The end of a message is acknowledged when the application has heard of it.
func TestEventsThatFindNoRoom(t *testing.T) {
	l := newLog(t, mpq.Config{Timeout: time.Second})
	l.full = true
	l.in(end, 1, 0, 5).want("header 1", "payload 1:0", "completion 1 complete 5-0", "no room 1")
	l.in(end|offr, 1, 0, 5).want("no room 1", "wait 1:0 5 [0]")
	l.after(100 * time.Millisecond).want("no room 1") // nobody asked
	l.full = false
	l.after(100*time.Millisecond).want("event 1 complete", "ack 1:0 5 [0]")
	l.after(100 * time.Millisecond).want()
}

func TestMessagesThatTimeOut(t *testing.T) {
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
			l.after(10 * time.Millisecond).want(want...)
		} else {
			l.after(time.Second - 1).want()
			l.after(1).want(want...)
		}
		l.in(offr, 1, 100, 100).in(syn, 1, 200, 100).in(end, 1, 300, 7).want()
		l.after(2 * time.Second).want()
		if s := l.n.MessageStats(); s.Open != 0 || s.HeldNow != 0 || s.Dropped[spin.DropNoHeader] != 1 {
			t.Errorf("%+v", s)
		}
	}
}

// The same id from somebody else is another message; from the same one, while the
// first lives or is remembered, it is the same message.
func TestSameNumberFromTwoSenders(t *testing.T) {
	l := newLog(t, mpq.Config{})
	l.in(syn, 1, 0, 100).want("header 1", "payload 1:0", "ack 1:0")
	l.from(bob, syn, 1, 0, 10).want("header 1", "payload 1:0", "ack 1:0 to 1001")
	l.from(bob, end, 1, 10, 1).want("payload 1:10", "completion 1 complete 11-0", "event 1 complete", "ack 1:10 to 1001")

	// A sender that begins again with an id that lives: the same cuts are
	// duplicates, others are dropped.
	l.in(syn, 1, 0, 100).want("ack 1:0")
	l.in(syn, 1, 0, 50).in(end, 1, 0, 30).in(end, 1, 50, 100).want()
	l.in(syn, 1, 100, 50).want("payload 1:100", "ack 1:100")
	l.in(syn, 1, 150, 100).want("payload 1:150", "ack 1:150")
	l.in(end, 1, 250, 0).want("payload 1:250", "completion 1 complete 250-0", "event 1 complete", "ack 1:250")
	l.in(end, 1, 0, 30).want("ack 1:0") // just after
	l.after(2*spin.DefaultRemember+time.Second).in(end, 1, 0, 30).want("header 1", "payload 1:0", "completion 1 complete 30-0", "event 1 complete", "ack 1:0")
	if s := l.n.MessageStats(); s.Dropped[spin.DropOverlap] != 2 || s.Dropped[spin.DropTwoEnds] != 1 {
		t.Errorf("%+v", s)
	}
}

func TestSegmentsOfNoUse(t *testing.T) {
	l := newLog(t, mpq.Config{})
	for n := range slmp.HeaderLen {
		l.sent(l.n.Packet(handlerstest.UDP(alice, handlerstest.Here(slmp.Port), make([]byte, n)))).want()
	}
	l.in(slmp.ACK, 1, 0, 0).in(slmp.ACK|end, 1, 0, 100).want()
	if s := l.n.Stats(); s.Stray != 2 {
		t.Errorf("%+v", s)
	}
	// Reserved bits change nothing.
	l.in(syn|slmp.Reserved, 1, 0, 100).want("header 1", "payload 1:0", "ack 1:0")
	l.in(end, 1, 500, 10).want("payload 1:500")
	// Two ends, bytes behind the end, behind 4 GiB: silence.
	l.in(end, 1, 500, 20).in(end, 1, 400, 10).in(syn, 1, 505, 10).in(syn, 1, 510, 10).in(offr, 1, 1<<32-1, 2).want()
	l.in(syn, 1, 50, 100).in(syn, 1, 450, 100).want()
	s := l.n.MessageStats()
	if s.Dropped[spin.DropTwoEnds] != 5 || s.Dropped[spin.DropBeyond] != 1 || s.Dropped[spin.DropOverlap] != 1 {
		t.Errorf("%+v", s)
	}
	l.in(syn, 1, 100, 400).want("payload 1:100", "completion 1 complete 510-0", "event 1 complete", "ack 1:100", "ack 1:500")
}
