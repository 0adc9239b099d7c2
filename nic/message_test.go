// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/ethtool"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// A messageID says which message of which sender.
type messageID struct {
	from netip.AddrPort
	id   uint32
}

// A witness is the handlers of a context, which see to it that a message's come in
// order and that each byte comes once.
type witness struct {
	t         testing.TB
	exclusive bool // handlers of a message do not run at the same time

	mu  sync.Mutex
	all map[messageID]*seen
}

type seen struct {
	headers, completions, running int
	data                          []byte
	count                         []byte
	result                        spin.Result
}

func newWitness(t testing.TB, exclusive bool) *witness {
	return &witness{t: t, exclusive: exclusive, all: map[messageID]*seen{}}
}

// of returns what is known of a message. The caller has the lock.
func (w *witness) of(m *hpu.Message) *seen {
	id := messageID{m.Source(), m.Number()}
	s := w.all[id]
	if s == nil {
		s = new(seen)
		w.all[id] = s
	}
	return s
}

func (w *witness) handlers() hpu.Handlers {
	return hpu.Handlers{
		Header: func(h *hpu.HER) spin.Code {
			w.mu.Lock()
			defer w.mu.Unlock()
			s := w.of(h.Message())
			if s.headers++; s.headers > 1 || len(s.data) > 0 || s.completions > 0 || h.Offset() != 0 {
				w.t.Errorf("message %d: header handler at %d: %d so far, %d bytes, %d completions", h.Message().Number(), h.Offset(), s.headers, len(s.data), s.completions)
			}
			return spin.ProcessData
		},
		Payload: func(h *hpu.HER) spin.Code {
			w.mu.Lock()
			s := w.of(h.Message())
			s.running++
			if s.headers != 1 || s.completions > 0 || w.exclusive && s.running > 1 {
				w.t.Errorf("message %d: payload handler at %d: after %d headers, %d completions, beside %d others", h.Message().Number(), h.Offset(), s.headers, s.completions, s.running-1)
			}
			at := int(h.Offset())
			if end := at + h.PayloadLen(); end > len(s.data) {
				s.data = append(s.data, make([]byte, end-len(s.data))...)
				s.count = append(s.count, make([]byte, end-len(s.count))...)
			}
			for b := range h.Payload() {
				for i := range b {
					s.count[at+i]++
				}
				at += copy(s.data[at:], b)
			}
			w.mu.Unlock()
			w.mu.Lock()
			s.running--
			w.mu.Unlock()
			return spin.Success
		},
		Completion: func(c *hpu.Completion) spin.Code {
			w.mu.Lock()
			defer w.mu.Unlock()
			s := w.of(c.Message())
			s.result = c.Result
			if s.completions++; s.completions > 1 || s.running > 0 || s.headers != 1 {
				w.t.Errorf("message %d: %d completion handlers, beside %d others, after %d headers", c.Message().Number(), s.completions, s.running, s.headers)
			}
			return spin.Success
		},
	}
}

// check says that a message has come as it was sent, and forgets it.
func (w *witness) check(id messageID, want []byte) {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.all[id]
	if s == nil {
		w.t.Errorf("message %v has not come", id)
		return
	}
	delete(w.all, id)
	if s.completions != 1 || s.result.Cause != spin.Complete || s.result.Length != uint64(len(want)) || s.result.Missing != 0 {
		w.t.Errorf("message %v of %d bytes: %d completions: %+v", id, len(want), s.completions, s.result)
	}
	if !bytes.Equal(s.data, want) {
		w.t.Errorf("message %v: %d bytes have come, or others than the %d that were sent", id, len(s.data), len(want))
	}
	for i, n := range s.count {
		if n != 1 {
			w.t.Errorf("message %v: byte %d was handled %d times", id, i, n)
			return
		}
	}
}

// connect dials an SLMP port of the lab's NIC from its host.
func connect(t testing.TB, lab *netns.Lab, port int, cfg slmp.Config) *slmp.Conn {
	t.Helper()
	var conn *slmp.Conn
	err := lab.Host.NS.Do(func() (err error) {
		conn, err = slmp.Dial(context.Background(), netip.AddrPortFrom(lab.NIC.Addr.Addr(), uint16(port)).String(), cfg)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func noise(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{byte(n), byte(n >> 8)}).Read(b)
	return b
}

// patient is a context that a test fails to send to, not the sender's patience.
func patient(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Slowness()*30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func messages(t testing.TB, c *nic.Context) spin.MessageStats {
	t.Helper()
	st, ok := c.Messages()
	if !ok {
		t.Fatal("the context has no messages")
	}
	return st
}

func nextEvent(t testing.TB, events <-chan spin.MessageEvent) spin.MessageEvent {
	t.Helper()
	select {
	case e := <-events:
		return e
	case <-time.After(testenv.Slowness() * 20 * time.Second):
		t.Fatal("no event of a message")
	}
	panic("unreachable")
}

// raw makes a segment.
func raw(flags slmp.Flags, id, offset uint32, payload []byte) []byte {
	b := make([]byte, slmp.HeaderLen+len(payload))
	slmp.Header{Flags: flags, ID: id, Offset: offset}.Put(b)
	copy(b[slmp.HeaderLen:], payload)
	return b
}

// answer reads an acknowledgement.
func answer(t testing.TB, conn net.Conn) slmp.Ack {
	t.Helper()
	conn.SetReadDeadline(time.Now().Add(testenv.Slowness() * 5 * time.Second))
	var b [200]byte
	n, err := conn.Read(b[:])
	if err != nil {
		t.Fatalf("waiting for an acknowledgement: %v", err)
	}
	a, err := slmp.ParseAck(b[:n])
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// silent says that nothing was sent back: what comes next is the answer to a
// whole message that is sent for this. It may run on another HPU than what was
// sent before, so wait for that first.
func silent(t testing.TB, conn net.Conn) {
	t.Helper()
	id := rand.Uint32()
	write(t, conn, raw(slmp.SYN|slmp.EOM, id, 0, []byte("marker")))
	if a := answer(t, conn); a.ID != id {
		t.Errorf("acknowledged: message %d at %d", a.ID, a.Offset)
	}
}

type policy struct {
	name string
	spec nic.ContextSpec
}

func policies() []policy {
	p := []policy{
		{"message", nic.ContextSpec{Policy: nic.ByMessage}},
		{"packet", nic.ContextSpec{Policy: nic.ByPacket}},
	}
	for _, v := range []int{1, 7} {
		p = append(p, policy{fmt.Sprintf("blocked-rr %d", v), nic.ContextSpec{Policy: nic.BlockedRR, Sequence: 10000, VHPUs: v}})
	}
	return p
}

func TestMessagesOfEveryModeToEveryPolicy(t *testing.T) {
	for _, p := range policies() {
		t.Run(p.name, func(t *testing.T) {
			lab := netnstest.Temp(t, netns.LabConfig{})
			n := open(t, lab, nic.Config{HPUs: 3, Workers: 2})
			w := newWitness(t, p.spec.Policy == nic.ByMessage)
			events := make(chan spin.MessageEvent, 100)
			spec := p.spec
			spec.Name, spec.Rulesets, spec.Events, spec.Handlers = "slmp", sets(matcher.SLMP()), events, w.handlers()
			spec.Held = 1024
			c := run(t, n, spec)
			sent := 0
			for _, mode := range []slmp.Mode{slmp.EverySegment, slmp.FirstLast, slmp.Unacknowledged} {
				for _, window := range []int{1, 16, 256, 0} {
					for _, plain := range []bool{false, true} {
						cfg := slmp.Config{Mode: mode, Window: window, Plain: plain}
						if mode != slmp.EverySegment {
							if window > 1 || plain {
								continue // there is none
							}
							cfg.Gap = 20 * time.Microsecond
						}
						conn := connect(t, lab, slmp.Port, cfg)
						payload := conn.Stats().Payload
						long := 1 << 20
						if window == 1 {
							long >>= 3 // one segment after the other
						}
						for _, size := range []int{0, 1, payload - 1, payload, payload + 1, long} {
							data := noise(size)
							d, err := conn.SendBytes(patient(t), data, slmp.Options{})
							if err != nil {
								t.Fatalf("%v, window %d, plain %v, %d bytes: %v\n%+v\n%+v", mode, window, plain, size, err, messages(t, c), c.Stats())
							}
							sent++
							if e := nextEvent(t, events); e.Number != d.ID || e.Cause != spin.Complete || e.Length != uint64(size) {
								t.Errorf("%d bytes: event %+v", size, e)
							}
							w.check(messageID{conn.LocalAddr(), d.ID}, data)
						}
						conn.Close()
					}
				}
			}
			eventually(t, "all ended", func() bool { st := messages(t, c); return st.Open == 0 && st.Ended == uint64(sent) })
			idle(t, c)
			eventually(t, "no bucket is held", func() bool { return c.HeldBuckets() == 0 })
		})
	}
}

func TestMessagesInParallel(t *testing.T) {
	for _, p := range policies()[:3] {
		t.Run(p.name, func(t *testing.T) {
			lab := netnstest.Temp(t, netns.LabConfig{})
			n := open(t, lab, nic.Config{HPUs: 4, Workers: 2})
			w := newWitness(t, p.spec.Policy == nic.ByMessage)
			spec := p.spec
			spec.Name, spec.Rulesets, spec.Handlers = "slmp", sets(matcher.SLMP()), w.handlers()
			c := run(t, n, spec)
			conn := connect(t, lab, slmp.Port, slmp.Config{})
			var wg sync.WaitGroup
			for i := range 64 {
				wg.Go(func() {
					data := noise(10000 + i*1111)
					d, err := conn.SendBytes(patient(t), data, slmp.Options{})
					if err != nil {
						t.Error(err)
						return
					}
					w.check(messageID{conn.LocalAddr(), d.ID}, data)
				})
			}
			wg.Wait()
			if st := messages(t, c); st.Ended != 64 || st.Open != 0 {
				t.Errorf("%+v", st)
			}
			idle(t, c)
		})
	}
}

func TestTenThousandMessagesAtATime(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 4, Workers: 2})
	const senders, each = 10, 1000
	events := make(chan spin.MessageEvent, senders*each)
	var sum atomic.Uint64
	c := run(t, n, nic.ContextSpec{
		Name: "many", Rulesets: sets(matcher.SLMP()), Messages: 16384, State: 8, Timeout: time.Minute, Events: events,
		Handlers: hpu.Handlers{
			Header: func(h *hpu.HER) spin.Code {
				binary.NativeEndian.PutUint64(h.Message().State(), uint64(h.Message().Number()))
				return spin.Success
			},
			Completion: func(c *hpu.Completion) spin.Code {
				sum.Add(binary.NativeEndian.Uint64(c.Message().State()))
				return spin.Success
			},
		},
	})
	var conns []*net.UDPConn
	for range senders {
		conns = append(conns, dialUDP(t, lab, slmp.Port))
	}
	handled := func() uint64 { s := messages(t, c); return s.Started + s.Ended }
	for phase, want := range []uint64{0, senders * each} {
		for id := range each {
			for s, conn := range conns {
				b := raw(0, uint32(id+s*each), uint32(phase*100), noise(100))
				if phase == 1 {
					b = raw(slmp.EOM, uint32(id+s*each), 100, noise(17))
				}
				write(t, conn, b)
			}
			if id%50 == 49 { // no faster than they are handled
				eventually(t, "they are handled", func() bool { return handled() == want+uint64((id+1)*senders) })
			}
		}
		if st := messages(t, c); phase == 0 && (st.Open != senders*each || st.Started != senders*each) {
			t.Fatalf("%+v", st)
		}
	}
	for range senders * each {
		if e := nextEvent(t, events); e.Cause != spin.Complete || e.Length != 117 {
			t.Fatalf("%+v", e)
		}
	}
	if want := uint64(senders * each * (senders*each - 1) / 2); sum.Load() != want {
		t.Errorf("the states sum up to %d, want %d", sum.Load(), want)
	}
	idle(t, c)
	eventually(t, "no bucket is held", func() bool { return c.HeldBuckets() == 0 })
}

func TestForgedStartsOfMessages(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 2, Workers: 2})
	w := newWitness(t, true)
	const room, forged = 1024, 25_000
	started := make(chan struct{})
	h := w.handlers()
	header := h.Header
	var once sync.Once
	h.Header = func(h *hpu.HER) spin.Code {
		if h.PayloadLen() > 4 {
			once.Do(func() { close(started) })
			return header(h)
		}
		return spin.Drop
	}
	h.Completion = nil
	c := run(t, n, nic.ContextSpec{
		Name: "attacked", Rulesets: sets(matcher.SLMP()), Messages: room, Handlers: h, Timeout: time.Minute,
	})
	conn := connect(t, lab, slmp.Port, slmp.Config{})
	data := noise(4 << 20)
	sent := make(chan error, 1)
	go func() {
		_, err := conn.SendBytes(patient(t), data, slmp.Options{})
		sent <- err
	}()
	<-started
	attacker := dialUDP(t, lab, slmp.Port)
	for i := range forged {
		offset := uint32(0)
		if i%3 == 0 {
			offset = 1000 // and packets that wait for their header
		}
		write(t, attacker, raw(slmp.SYN, uint32(i*7919), offset, []byte("x")))
	}
	st := messages(t, c)
	refused := program(t, n).Refused[c.ID()]
	t.Logf("%d refused for credit; %+v", refused, st)
	if st.Open > room || st.HeldNow > 64 || st.Memory > 1<<20 {
		t.Errorf("%+v", st)
	}
	if err := <-sent; err != nil {
		t.Errorf("the transfer under way: %v; sender %+v, receiver %+v", err, conn.Stats(), messages(t, c))
	}
	w.mu.Lock()
	for _, s := range w.all {
		if len(s.data) == len(data) && !bytes.Equal(s.data, data) {
			t.Error("the transfer under way has other bytes")
		}
	}
	w.mu.Unlock()
	eventually(t, "all are handled, or counted", func() bool {
		st := messages(t, c)
		k := program(t, n).Refused[c.ID()] + overflowed(t, lab.Host)
		return st.Started-1+st.Dropped[spin.DropMessages]+st.Dropped[spin.DropNoHeader]+k+uint64(st.HeldNow) >= forged
	})
	if st := messages(t, c); st.Dropped[spin.DropMessages] == 0 || st.Dropped[spin.DropNoHeader] == 0 {
		t.Errorf("%+v", st)
	}
	if err := n.Remove(c); err != nil {
		t.Error(err)
	}
}

// overflowed is how many frames of a device the other end of its veth pair had no room for.
func overflowed(t testing.TB, port netns.Port) (frames uint64) {
	t.Helper()
	err := port.NS.Do(func() error {
		l, err := netlink.LinkByName(port.Device)
		if err == nil {
			frames = l.Attrs().Statistics.TxDropped
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return frames
}

func TestNumbersOfMessagesAreReused(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 2})
	w := newWitness(t, true)
	const remember = 300 * time.Millisecond
	c := run(t, n, nic.ContextSpec{Name: "slmp", Rulesets: sets(matcher.SLMP()), Handlers: w.handlers(), Remember: remember})
	a, b := dialUDP(t, lab, slmp.Port), dialUDP(t, lab, slmp.Port)
	of := func(c *net.UDPConn) netip.AddrPort { return c.LocalAddr().(*net.UDPAddr).AddrPort() }

	// Two senders, one number.
	write(t, a, raw(slmp.SYN, 7, 0, []byte("from a, ")))
	write(t, b, raw(slmp.SYN, 7, 0, []byte("from b")))
	answer(t, a)
	answer(t, b)
	// A copy, and another message under the number of one that is live.
	write(t, a, raw(slmp.SYN, 7, 0, []byte("from a, ")))
	write(t, a, raw(slmp.SYN, 7, 0, []byte("reused! ")))
	answer(t, a)
	answer(t, a)
	write(t, b, raw(slmp.SYN|slmp.EOM, 7, 6, []byte(" is this")))
	write(t, a, raw(slmp.SYN|slmp.EOM, 7, 8, []byte("and over")))
	answer(t, a)
	answer(t, b)
	w.check(messageID{of(a), 7}, []byte("from a, and over"))
	w.check(messageID{of(b), 7}, []byte("from b is this"))

	// Just after: a duplicate, as far as one can know.
	write(t, a, raw(slmp.SYN|slmp.EOM, 7, 0, []byte("next")))
	if k := answer(t, a); k.ID != 7 || k.Offset != 0 {
		t.Errorf("%+v", k)
	}
	if st := messages(t, c); st.Started != 2 || st.Duplicates != 3 {
		t.Errorf("%+v", st)
	}
	// When it is forgotten.
	eventually(t, "the number is good again", func() bool {
		time.Sleep(3 * remember)
		write(t, a, raw(slmp.SYN|slmp.EOM, 7, 0, []byte("next")))
		answer(t, a)
		return messages(t, c).Started == 3
	})
	w.check(messageID{of(a), 7}, []byte("next"))
}

func TestSenderThatDies(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 2})
	events := make(chan spin.MessageEvent, 10)
	c := run(t, n, nic.ContextSpec{Name: "slmp", Rulesets: sets(matcher.SLMP()), Events: events, Timeout: 50 * time.Millisecond})
	conn := dialUDP(t, lab, slmp.Port)
	write(t, conn, raw(slmp.SYN, 1, 0, noise(100)))
	write(t, conn, raw(slmp.SYN, 1, 300, noise(100)))
	answer(t, conn)
	answer(t, conn)
	if e := nextEvent(t, events); e.Cause != spin.TimedOut || e.Length != 400 || e.Missing != 200 || e.Source.Port() != uint16(conn.LocalAddr().(*net.UDPAddr).Port) {
		t.Errorf("%+v", e)
	}
	write(t, conn, raw(slmp.SYN, 1, 100, noise(100)))
	write(t, conn, raw(slmp.SYN|slmp.EOM, 1, 200, noise(100)))
	// The marker of silent may run on the other HPU, ahead of these.
	eventually(t, "what comes late is dropped", func() bool { return messages(t, c).Dropped[spin.DropDead] == 2 })
	silent(t, conn)
	nextEvent(t, events)
	if st := messages(t, c); st.Open != 0 || st.Abandoned != 1 || st.Dropped[spin.DropDead] != 2 {
		t.Errorf("%+v", st)
	}
	eventually(t, "no bucket is held", func() bool { return c.HeldBuckets() == 0 })
}

func TestContextIsReplacedInTheMiddleOfAMessage(t *testing.T) {
	for _, plain := range []bool{false, true} {
		t.Run(fmt.Sprintf("plain=%v", plain), func(t *testing.T) {
			lab := netnstest.Temp(t, netns.LabConfig{})
			n := open(t, lab, nic.Config{HPUs: 2})
			gate, half := make(chan struct{}), make(chan struct{})
			var once sync.Once
			var endings atomic.Int64
			events := make(chan spin.MessageEvent, 10)
			spec := nic.ContextSpec{
				Name: "slmp", Rulesets: sets(matcher.SLMP()), Events: events,
				Handlers: hpu.Handlers{Payload: func(h *hpu.HER) spin.Code {
					if h.Offset() > 1<<20 {
						once.Do(func() { close(half) })
						<-gate
					}
					return spin.Success
				}, Completion: func(c *hpu.Completion) spin.Code {
					if c.Cause == spin.Removed {
						endings.Add(1)
					}
					return spin.Success
				}},
			}
			c := run(t, n, spec)
			conn := connect(t, lab, slmp.Port, slmp.Config{Patience: 300 * time.Millisecond, Retries: 4, Plain: plain})
			sent := make(chan error, 1)
			go func() {
				_, err := conn.SendBytes(patient(t), noise(8<<20), slmp.Options{})
				sent <- err
			}()
			<-half
			removed := make(chan error)
			go func() { removed <- n.Remove(c) }()
			eventually(t, "the rulesets are gone", func() bool { return len(c.Rulesets()) == 0 })
			close(gate)
			if err := <-removed; err != nil {
				t.Error(err)
			}
			if e := nextEvent(t, events); e.Cause != spin.Removed || endings.Load() != 1 || e.Length < 1<<20 {
				t.Errorf("%+v, %d completion handlers", e, endings.Load())
			}
			c = run(t, n, spec)
			err := <-sent
			if !errors.Is(err, slmp.ErrRestarted) && !errors.Is(err, slmp.ErrSilent) && !errors.Is(err, slmp.ErrRefused) {
				t.Errorf("the sender's error: %v", err)
			}
			t.Log(err)
			if _, err := conn.SendBytes(patient(t), noise(5000), slmp.Options{}); err != nil {
				t.Errorf("another message: %v", err)
			}
			eventually(t, "nothing is left", func() bool { return messages(t, c).Open == 0 })
		})
	}
}

func TestStrayAcknowledgements(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 2})
	w := newWitness(t, true)
	c := run(t, n, nic.ContextSpec{Name: "slmp", Rulesets: sets(matcher.SLMP()), Handlers: w.handlers()})
	storm := dialUDP(t, lab, slmp.Port)
	conn := connect(t, lab, slmp.Port, slmp.Config{})
	const rounds = 100
	for i := range rounds {
		for j := range 100 {
			flags := slmp.ACK | slmp.Flags(j)<<9&(slmp.SYN|slmp.EOM|slmp.Cumulative|slmp.Wait)
			write(t, storm, raw(flags, uint32(j), uint32(i), noise(j)))
		}
		data := noise(1000 + i)
		d, err := conn.SendBytes(patient(t), data, slmp.Options{})
		if err != nil {
			t.Fatal(err)
		}
		w.check(messageID{conn.LocalAddr(), d.ID}, data)
	}
	eventually(t, "all are counted", func() bool {
		return c.Stats().Stray+program(t, n).Refused[c.ID()] == rounds*100
	})
	if st := messages(t, c); st.Started != rounds || st.Held != 0 || c.Stats().Stray == 0 {
		t.Errorf("%+v", st)
	}
	storm.SetReadDeadline(time.Now().Add(time.Millisecond))
	if k, err := storm.Read(make([]byte, 100)); err == nil {
		t.Errorf("%d bytes came back", k)
	}
}

func TestSegmentsThatContradictEachOther(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 2})
	w := newWitness(t, true)
	c := run(t, n, nic.ContextSpec{Name: "slmp", Rulesets: sets(matcher.SLMP()), Handlers: w.handlers()})
	sink := listenUDP(t, lab.NIC, slmp.Port) // Linux gets what is too short
	conn := dialUDP(t, lab, slmp.Port)
	from := conn.LocalAddr().(*net.UDPAddr).AddrPort()
	for k := range slmp.HeaderLen {
		write(t, conn, raw(slmp.SYN, 1, 0, nil)[:k])
		expect(t, sink, raw(slmp.SYN, 1, 0, nil)[:k])
	}
	if k := program(t, n).Malformed; k != slmp.HeaderLen {
		t.Errorf("%d malformed", k)
	}
	data := noise(300)
	write(t, conn, raw(slmp.SYN|slmp.Reserved, 2, 0, data[:100]))
	if a := answer(t, conn); a.ID != 2 || a.Cumulative {
		t.Errorf("%+v", a)
	}
	before := messages(t, c)
	for _, s := range [][]byte{
		raw(slmp.SYN, 2, 1<<32-50, noise(100)),     // beyond
		raw(slmp.SYN, 3, 1<<32-1, noise(2)),        // of a new message
		raw(slmp.SYN, 2, 50, noise(100)),           // overlaps
		raw(slmp.SYN|slmp.EOM, 2, 50, noise(20)),   // ends before what came
		raw(slmp.EOM, 2, 200, data[200:]),          // the end
		raw(slmp.SYN|slmp.EOM, 2, 200, noise(101)), // another one
		raw(slmp.SYN, 2, 300, noise(100)),          // behind it
		raw(slmp.SYN|slmp.EOM, 2, 100, noise(200)), // overlaps, the end is right
	} {
		write(t, conn, s)
	}
	eventually(t, "each is dropped for its reason", func() bool {
		st := messages(t, c)
		return st.Dropped[spin.DropBeyond] == 2 && st.Dropped[spin.DropTwoEnds] == 3 && st.Dropped[spin.DropOverlap]-before.Dropped[spin.DropOverlap] == 2
	})
	silent(t, conn)
	write(t, conn, raw(slmp.SYN, 2, 100, data[100:200]))
	if a := answer(t, conn); a.ID != 2 || a.Offset != 100 {
		t.Errorf("%+v", a)
	}
	w.check(messageID{from, 2}, data)
}

func TestCorruptSegments(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	if err := lab.Host.NS.Do(func() error { return ethtool.TxChecksum.Enable(lab.Host.Device, false) }); err != nil {
		t.Fatal(err)
	}
	n := open(t, lab, nic.Config{HPUs: 2})
	w := newWitness(t, true)
	c := run(t, n, nic.ContextSpec{Name: "slmp", Rulesets: sets(matcher.SLMP()), Handlers: w.handlers(), Checksums: hpu.VerifyAll})
	conn := connect(t, lab, slmp.Port, slmp.Config{})
	data := noise(100_000)
	d, err := conn.SendBytes(patient(t), data, slmp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	w.check(messageID{conn.LocalAddr(), d.ID}, data)
	if st := c.Stats(); st.Unverified != 0 || st.Corrupt != 0 {
		t.Errorf("with complete checksums %d are unverified, %d corrupt", st.Unverified, st.Corrupt)
	}
	// The host's device is the NIC's peer: what it sends is what comes.
	good := func() []byte {
		b := datagram(lab, 4000, slmp.Port, raw(slmp.SYN|slmp.EOM, 5, 0, noise(333)))
		copy(b, lab.NIC.MAC)
		copy(b[6:], lab.Host.MAC)
		b[29], b[33] = 2, 1 // the sum is the same
		return b
	}
	frames := rawSocket(t, lab)
	const bad = 200
	for i := range bad {
		b := good()
		b[42+i] ^= 1 << (i % 8)
		frames(b)
	}
	eventually(t, "all are counted", func() bool { return c.Stats().Corrupt == bad })
	if st := messages(t, c); st.Started != 1 {
		t.Errorf("%+v", st)
	}
	frames(good())
	eventually(t, "a good one", func() bool { return messages(t, c).Ended == 2 })
}

func TestApplicationThatIsSlow(t *testing.T) {
	for _, plain := range []bool{false, true} {
		t.Run(fmt.Sprintf("plain=%v", plain), func(t *testing.T) {
			lab := netnstest.Temp(t, netns.LabConfig{})
			n := open(t, lab, nic.Config{HPUs: 2})
			events := make(chan spin.MessageEvent, 1)
			events <- spin.MessageEvent{}
			c := run(t, n, nic.ContextSpec{Name: "slmp", Rulesets: sets(matcher.SLMP()), Events: events, Timeout: time.Minute})
			conn := connect(t, lab, slmp.Port, slmp.Config{Patience: 50 * time.Millisecond, Retries: 5, MaxRTO: 50 * time.Millisecond, Plain: plain})
			if plain {
				// Without Wait nobody can tell a slow receiver from a dead one.
				conn = connect(t, lab, slmp.Port, slmp.Config{Patience: 20 * time.Second, MaxRTO: 50 * time.Millisecond, Plain: true})
			}
			sent := make(chan error, 1)
			go func() {
				_, err := conn.SendBytes(patient(t), noise(100_000), slmp.Options{})
				sent <- err
			}()
			// EOM comes again and again.
			before := func() uint64 { s := conn.Stats(); return s.Timeouts }
			for start, end := before(), time.Now().Add(20*time.Second); before() < start+15 && time.Now().Before(end); {
				time.Sleep(10 * time.Millisecond)
			}
			select {
			case err := <-sent:
				t.Fatalf("the message has ended: %v, although nobody took its event: %+v", err, c.Stats())
			default:
			}
			<-events
			if err := <-sent; err != nil {
				t.Error(err)
			}
			if e := nextEvent(t, events); e.Length != 100_000 || e.Cause != spin.Complete {
				t.Errorf("%+v", e)
			}
		})
	}
}

func TestMessagesOverIPv6(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	for _, p := range []struct {
		port netns.Port
		addr string
	}{{lab.NIC, "fd00::1/64"}, {lab.Host, "fd00::2/64"}} {
		if err := p.port.NS.Do(func() error {
			return os.WriteFile("/proc/sys/net/ipv6/conf/"+p.port.Device+"/disable_ipv6", []byte("0"), 0)
		}); err != nil {
			t.Fatal(err)
		}
		if out, err := p.port.NS.Command(context.Background(), "ip", "-6", "addr", "add", p.addr, "dev", p.port.Device, "nodad").CombinedOutput(); err != nil {
			t.Fatalf("ip: %v: %s", err, out)
		}
	}
	n := open(t, lab, nic.Config{HPUs: 2})
	w := newWitness(t, true)
	six := run(t, n, nic.ContextSpec{Name: "slmp6", Rulesets: sets(matcher.SLMP6()), Handlers: w.handlers()})
	four := run(t, n, nic.ContextSpec{Name: "slmp", Rulesets: sets(matcher.SLMP()), Handlers: w.handlers()})
	var conn *slmp.Conn
	if err := lab.Host.NS.Do(func() (err error) {
		conn, err = slmp.Dial(context.Background(), "fd00::1", slmp.Config{})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	old := connect(t, lab, slmp.Port, slmp.Config{})
	for _, size := range []int{0, 1, 5000, 1 << 20} {
		data := noise(size)
		for _, via := range []*slmp.Conn{conn, old} {
			d, err := via.SendBytes(patient(t), data, slmp.Options{})
			if err != nil {
				t.Fatal(err)
			}
			w.check(messageID{via.LocalAddr(), d.ID}, data)
		}
	}
	for _, c := range []*nic.Context{six, four} {
		if st := messages(t, c); st.Ended != 4 {
			t.Errorf("%s: %+v", c.Name(), st)
		}
	}
}

func TestFloodedMessagesDoNotHurtAnotherContext(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{Queues: 1})
	n := open(t, lab, nic.Config{HPUs: 2, Workers: 2, Ring: 512, Limit: time.Minute})
	gate := make(chan struct{})
	slow := run(t, n, nic.ContextSpec{
		Name: "flooded", Rulesets: sets(matcher.SLMP()), Credits: 128, CoreMask: 1, Messages: 256,
		Handlers: handle(func(*hpu.HER) spin.Code { <-gate; return spin.Success }),
	})
	w := newWitness(t, true)
	fast := run(t, n, nic.ContextSpec{Name: "other", Rulesets: sets(slmpAt(9331)), CoreMask: 2, Handlers: w.handlers()})
	stop := make(chan struct{})
	var wg sync.WaitGroup
	flood := dialUDP(t, lab, slmp.Port)
	wg.Go(func() {
		for i := uint32(0); ; i++ {
			select {
			case <-stop:
				return
			default:
				flood.Write(raw(slmp.SYN, i, i%2*100, noise(100)))
			}
		}
	})
	conn := connect(t, lab, 9331, slmp.Config{})
	for i := range 20 {
		data := noise(100_000 + i)
		d, err := conn.SendBytes(patient(t), data, slmp.Options{})
		if err != nil {
			t.Error(err)
			break
		}
		w.check(messageID{conn.LocalAddr(), d.ID}, data)
	}
	close(stop)
	wg.Wait()
	close(gate)
	if k := program(t, n).Refused[slow.ID()]; k == 0 {
		t.Error("the flood was no flood")
	}
	if k := program(t, n).Refused[fast.ID()]; k != 0 {
		t.Logf("the other context was refused %d packets", k)
	}
	idle(t, fast)
	if err := n.Remove(slow); err != nil {
		t.Error(err)
	}
}

// slmpAt is matcher.SLMP of another port.
func slmpAt(port uint16) matcher.Ruleset {
	rs := matcher.SLMP()
	rs.Name = fmt.Sprintf("slmp-%d", port)
	for i := range rs.Rules {
		if r := &rs.Rules[i]; r.Index == 9 && r.Start == slmp.Port<<16 {
			r.Start, r.End = uint32(port)<<16, uint32(port)<<16
		}
	}
	return rs
}

// rawSocket returns a function that sends frames from the lab's host.
func rawSocket(t testing.TB, lab *netns.Lab) func([]byte) {
	t.Helper()
	var fd int
	err := lab.Host.NS.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	to := &unix.SockaddrLinklayer{Ifindex: lab.Host.Index, Protocol: 0x0008} // IPv4
	return func(b []byte) {
		t.Helper()
		if err := unix.Sendto(fd, b, 0, to); err != nil {
			t.Fatal(err)
		}
	}
}
