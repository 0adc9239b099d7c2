// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/loader/objecttest"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/impair"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// depositing is a context in the kernel that puts messages of SLMP into a window.
func depositing(t testing.TB, size int64) (spec nic.ContextSpec, w *hostq.Window, events chan spin.MessageEvent) {
	t.Helper()
	o, err := nic.BuiltinObject("deposit")
	if err != nil {
		t.Fatal(err)
	}
	mem, err := hostq.NewMemory("test", size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mem.Close() })
	events = make(chan spin.MessageEvent, 100)
	w = mem.Whole()
	return nic.ContextSpec{
		Name: "deposit", Rulesets: sets(matcher.SLMP()), Kernel: &nic.Kernel{Object: o}, Window: w, Events: events,
	}, w, events
}

// The sender's messages are in the window, whatever the network does to them, and all of
// them began and ended in the kernel.
func TestMessagesInTheKernelThroughABadNetwork(t *testing.T) {
	const size = 4 << 20
	for _, tt := range []struct {
		name string
		path *impair.Config
	}{
		{"a wire", nil},
		{"everything", &impair.Config{Loss: 0.02, Duplicate: 0.02, Corrupt: 0.01, Reorder: 0.03, Delay: time.Millisecond, Seed: 3}},
		{"loss", &impair.Config{Loss: 0.03, Seed: 4}},
		{"loss out of trains", &impair.Config{Loss: 0.03, Duplicate: 0.05, Seed: 4, Trains: true}},
	} {
		for _, plain := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, plain=%v", tt.name, plain), func(t *testing.T) {
				lab := netnstest.Temp(t, netns.LabConfig{Path: tt.path})
				if tt.path == nil {
					wire(t, lab)
				}
				n := open(t, lab, nic.Config{HPUs: 1})
				spec, w, events := depositing(t, size)
				if tt.path != nil && !tt.path.Trains { // whose checksums are partial
					spec.Checksums = hpu.VerifyAll
				}
				c := run(t, n, spec)
				conn := connect(t, lab, slmp.Port, slmp.Config{Plain: plain})
				lengths := []int{0, 1, conn.Stats().Payload, conn.Stats().Payload + 1, 300_000, 1, size}
				for _, length := range lengths {
					data := noise(length)
					if _, err := conn.SendBytes(patient(t), data, slmp.Options{}); err != nil {
						t.Fatalf("%d bytes: %v\n%+v\n%+v\n%+v", length, err, conn.Stats(), messages(t, c), c.Stats())
					}
					if e := nextEvent(t, events); e.Cause != spin.Complete || e.Length != uint64(length) || e.Missing != 0 || e.Source != conn.LocalAddr() || e.Context != "deposit" {
						t.Errorf("%d bytes: event %+v", length, e)
					}
					got := make([]byte, length)
					if _, err := w.ReadAt(got, 0); err != nil || !bytes.Equal(got, data) {
						t.Errorf("%d bytes: others are in the window, %v", length, err)
					}
				}
				st, cs := messages(t, c), c.Stats()
				if all := uint64(len(lengths)); st.Started != all || st.Ended != all || st.Open != 0 || cs.Headers != all || cs.Failed != 0 || cs.EventsLost != 0 {
					t.Errorf("%+v\n%+v", st, cs)
				}
				if damaged := tt.path != nil && tt.path.Corrupt > 0; (cs.Corrupt > 0) != damaged || damaged && st.Duplicates == 0 {
					t.Errorf("%+v\n%+v", st, cs)
				}
				if len(events) > 0 {
					t.Errorf("%d more events: %+v", len(events), <-events)
				}
			})
		}
	}
}

// Several at a time take slots of their own.
func TestManyMessagesInTheKernel(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	wire(t, lab)
	n := open(t, lab, nic.Config{HPUs: 1})
	spec, _, _ := depositing(t, 1<<20)
	spec.Messages, spec.Events = 8, nil
	c := run(t, n, spec)
	var wg sync.WaitGroup
	const senders, each = 4, 200
	for i := range senders {
		conn := connect(t, lab, slmp.Port, slmp.Config{})
		wg.Go(func() {
			for k := range each {
				if _, err := conn.SendBytes(patient(t), noise(1+(i+k)%5*1000), slmp.Options{}); err != nil {
					t.Errorf("sender %d, message %d: %v", i, k, err)
					return
				}
			}
		})
	}
	wg.Wait()
	if st := messages(t, c); st.Ended != senders*each || st.Open != 0 {
		t.Errorf("%+v", st)
	}
}

// Eight senders' trains, with segments lost out of them and trains that come twice: each message is where
// its receive says.
func TestSendersThroughANetworkThatLosesFromTrains(t *testing.T) {
	const senders, size, rounds = 8, 1 << 20, 4
	lab := netnstest.Temp(t, netns.LabConfig{Path: &impair.Config{Loss: 0.01, Duplicate: 0.05, Seed: 9, Trains: true}})
	n := open(t, lab, nic.Config{HPUs: 1, Hook: nic.HookTC})
	spec, w, events := depositing(t, senders*size)
	spec.Messages = 2 * senders
	c := run(t, n, spec)
	var conns [senders]*slmp.Conn
	for i := range conns {
		conns[i] = connect(t, lab, slmp.Port, slmp.Config{})
	}
	for round := range rounds {
		for i := range senders {
			if err := c.Post(spin.Receive{Ignore: ^uint32(0), Binding: spin.Binding{Window: w, Place: int64(i) * size, Size: size, User: uint64(i + 1)}}); err != nil {
				t.Fatal(err)
			}
		}
		data := map[netip.AddrPort][]byte{}
		var wg sync.WaitGroup
		for i, conn := range conns {
			b := noise(size - 1000*i - round)
			data[conn.LocalAddr()] = b
			wg.Go(func() {
				if _, err := conn.SendBytes(patient(t), b, slmp.Options{}); err != nil {
					t.Errorf("sender %d, round %d: %v", i, round, err)
				}
			})
		}
		wg.Wait()
		for range senders {
			e := nextEvent(t, events)
			want := data[e.Source]
			got := make([]byte, len(want))
			if e.Cause != spin.Complete || e.Length != uint64(len(want)) {
				t.Fatalf("event %+v", e)
			}
			if _, err := w.ReadAt(got, int64(e.User.(uint64)-1)*size); err != nil || !bytes.Equal(got, want) {
				t.Errorf("round %d: others than %v's bytes are in the window, %v", round, e.Source, err)
			}
		}
	}
	// Each frame that the path counts is a segment, and a device counts a train once.
	var packets uint64
	err := lab.Host.NS.Do(func() error {
		l, err := netlink.LinkByName(lab.Host.Device)
		if err == nil {
			packets = l.Attrs().Statistics.TxPackets
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	st, path := messages(t, c), pathOf(t, lab)
	if packets*5 > path.Frames {
		t.Errorf("the host sent %d packets of %d segments: no trains", packets, path.Frames)
	}
	if st.Ended != senders*rounds || st.Open != 0 || st.Duplicates == 0 || path.Lost == 0 {
		t.Errorf("%+v\n%+v", st, path)
	}
}

// pathOf returns what happened to what the host sent.
func pathOf(t *testing.T, lab *netns.Lab) impair.Counters {
	t.Helper()
	st, err := lab.PathState()
	if err != nil {
		t.Fatal(err)
	}
	return st.FromHost
}

// A message that stays incomplete ends, by its timeout or with its context, and what is
// missing is told.
func TestIncompleteMessagesInTheKernel(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	wire(t, lab)
	n := open(t, lab, nic.Config{HPUs: 1})
	begin := func(id uint32, ks ...int) {
		t.Helper()
		sock := dialUDP(t, lab, slmp.Port)
		for _, k := range ks {
			b := make([]byte, slmp.HeaderLen+100)
			slmp.Header{ID: id, Offset: uint32(100 * k)}.Put(b)
			if _, err := sock.Write(b); err != nil {
				t.Fatal(err)
			}
		}
	}
	spec, _, events := depositing(t, 1<<20)
	spec.Timeout = 100 * time.Millisecond
	c := run(t, n, spec)
	begin(7, 0, 1, 3)
	if e := nextEvent(t, events); e.Cause != spin.TimedOut || e.Number != 7 || e.Length != 400 || e.Missing != 100 {
		t.Errorf("event %+v", e)
	}
	if st := messages(t, c); st.Abandoned != 1 || st.Open != 0 {
		t.Errorf("%+v", st)
	}
	if err := n.Remove(c); err != nil {
		t.Fatal(err)
	}

	spec.Timeout = 0
	c = run(t, n, spec)
	begin(8, 0)
	begin(9, 0, 2)
	eventually(t, "both have begun", func() bool { return messages(t, c).Open == 2 && c.Stats().Handled == 3 })
	if err := n.Remove(c); err != nil {
		t.Fatal(err)
	}
	missing := map[uint32]uint64{}
	for range 2 {
		e := nextEvent(t, events)
		if e.Cause != spin.Removed {
			t.Errorf("event %+v", e)
		}
		missing[e.Number] = e.Missing
	}
	if missing[8] != 0 || missing[9] != 100 || len(missing) != 2 {
		t.Errorf("missing: %v", missing)
	}
	if st := messages(t, c); st.Abandoned != 2 || st.Open != 0 {
		t.Errorf("after removal: %+v", st)
	}
}

// EOM is acknowledged when the application can know, and not before.
func TestEventsOfTheKernelWaitForRoom(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	wire(t, lab)
	n := open(t, lab, nic.Config{HPUs: 1})
	spec, _, _ := depositing(t, 1<<20)
	events := make(chan spin.MessageEvent, 1)
	spec.Events = events
	c := run(t, n, spec)
	conn := connect(t, lab, slmp.Port, slmp.Config{})
	const some, last = 20, 100
	var acked atomic.Int64
	post := func(n int) {
		t.Helper()
		for range n {
			if err := conn.Post(noise(100), func(err error) {
				if err == nil {
					acked.Add(1)
				}
			}); err != nil {
				t.Fatal(err)
			}
		}
	}
	post(some)
	for k := range some {
		if e := nextEvent(t, events); e.Length != 100 {
			t.Errorf("%+v", e)
		}
		if n := acked.Load(); int(n) > k+2 { // the next may have been told meanwhile
			t.Fatalf("%d messages are acknowledged, and %d were told", n, k+1)
		}
	}
	eventually(t, "all are acknowledged", func() bool { return acked.Load() == some })
	post(last)
	eventually(t, "the last have come", func() bool { return messages(t, c).Started == some+last })
	begun := time.Now()
	if err := n.Remove(c); err != nil {
		t.Fatal(err)
	}
	// It waits, but not once for each.
	if took := time.Since(begun); took > testenv.Slowness()*3*time.Second {
		t.Errorf("Remove took %v, with %d events that nobody takes", took, last)
	}
	if lost := c.Stats().EventsLost; lost != last-1 {
		t.Errorf("%d events are lost, want the last %d", lost, last-1)
	}
	select {
	case f := <-n.Events():
		if f.Kind != spin.EventsLost || !strings.Contains(f.Detail, fmt.Sprintf("%d messages ended and were not told", last-1)) {
			t.Errorf("%+v", f)
		}
	case <-time.After(testenv.Slowness() * 5 * time.Second):
		t.Error("nobody is told that events are lost")
	}
	if n := acked.Load(); n > some+1 {
		t.Errorf("%d messages of the last are acknowledged, and one has room", n-some)
	}
}

// When Deactivate returns, the application has been told of all that was acknowledged; but
// it does not wait for one that has no room.
func TestDeactivateWaitsForEventsOfTheKernel(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	wire(t, lab)
	n := open(t, lab, nic.Config{HPUs: 1})
	const all = 64
	for _, tt := range []struct {
		name string
		room int
		hand bool // it may hand messages over
	}{
		{"an application with room for one", 1, false},
		{"one with room", all, false},
		{"one with room for one, of a context that hands over", 1, true},
		{"one with room, of a context that hands over", all, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			spec, _, _ := depositing(t, 1<<20)
			events := make(chan spin.MessageEvent, tt.room)
			spec.Events = events
			if tt.hand {
				o, err := nic.ReadObject("test.o", objecttest.Compile(t, `#include "xspin_message.h"
XSPIN_HEADER { xspin_log("begins", 0, 0); return her->payload_len ? XSPIN_PROCEED : XSPIN_HAND_OVER; }
XSPIN_MESSAGES(HEADER | HAND_OVER);
XSPIN_LICENSE("GPL");
`), nic.ObjectMemory)
				if err != nil {
					t.Fatal(err)
				}
				spec.Kernel, spec.Resources.Log = &nic.Kernel{Object: o}, slowLog{}
			}
			c := run(t, n, spec)
			conn := connect(t, lab, slmp.Port, slmp.Config{})
			for round := range 4 {
				acked := make(chan error, all)
				for range all {
					if err := conn.Post(noise(100), func(err error) { acked <- err }); err != nil {
						t.Fatal(err)
					}
				}
				hear := func() {
					for range all {
						if err := <-acked; err != nil {
							t.Fatal(err)
						}
					}
				}
				if tt.room == all {
					hear()
				} else {
					eventually(t, "all have come", func() bool { return messages(t, c).Started == uint64(round+1)*all })
				}
				if err := n.Deactivate(c); err != nil {
					t.Fatal(err)
				}
				if len(events) != tt.room {
					t.Errorf("Deactivate has returned, and %d of %d events are there", len(events), tt.room)
				}
				for range all {
					nextEvent(t, events)
				}
				if tt.room < all { // they were not before
					hear()
				}
				if err := n.Activate(c); err != nil {
					t.Fatal(err)
				}
			}
			if err := n.Remove(c); err != nil {
				t.Fatal(err)
			}
			if s := c.Stats(); s.EventsLost != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// Messages that wait for room go on in the order in which they were complete, as soon as there is some: whether
// nobody looks through all slots meanwhile, or all the time.
func TestDeferredMessagesGoOnInTurn(t *testing.T) {
	for name, tick := range map[string]time.Duration{"without a look at all slots": time.Hour, "with many": time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			defer nic.SetExpireTick(tick)()
			lab := netnstest.Temp(t, netns.LabConfig{})
			wire(t, lab)
			n := open(t, lab, nic.Config{HPUs: 1})
			spec, _, _ := depositing(t, 1<<20)
			events := make(chan spin.MessageEvent, 2)
			spec.Events, spec.Messages, spec.Timeout = events, 16, 24*time.Hour
			c := run(t, n, spec)
			sock := dialUDP(t, lab, slmp.Port)
			id := uint32(0)
			send := func(count int) {
				for range count {
					write(t, sock, raw(slmp.SYN|slmp.EOM, id, 0, noise(10)))
					id++
				}
				eventually(t, "they have come", func() bool { return messages(t, c).Started == uint64(id) })
			}
			// So that later ones are not in slots from 0 on.
			send(5)
			told := uint32(0)
			take := func() {
				t.Helper()
				if e := nextEvent(t, events); e.Number != told || e.Cause != spin.Complete {
					t.Fatalf("message %d is told (%v), and it is the turn of %d", e.Number, e.Cause, told)
				}
				told++
			}
			for told < id {
				take()
			}
			send(14)
			for told < id {
				time.Sleep(3 * time.Millisecond) // looks at all slots, meanwhile
				take()
			}
			acked := map[uint32]int{}
			for range id {
				acked[answer(t, sock).ID]++
			}
			if len(acked) != int(id) {
				t.Errorf("acknowledgements by message: %v", acked)
			}
		})
	}
}

// A failed message leaves its slot when its failure is told, and not with the next look at all messages.
func TestFailedMessagesLeaveTheirSlots(t *testing.T) {
	defer nic.SetExpireTick(time.Hour)()
	lab := netnstest.Temp(t, netns.LabConfig{})
	wire(t, lab)
	n := open(t, lab, nic.Config{HPUs: 1})
	o, err := nic.ReadObject("test.o", objecttest.Compile(t, "#include \"xspin_message.h\"\nXSPIN_PAYLOAD { return XSPIN_FAIL; }\nXSPIN_MESSAGES(PAYLOAD);\nXSPIN_LICENSE(\"GPL\");\n"), nic.ObjectMemory)
	if err != nil {
		t.Fatal(err)
	}
	events := make(chan spin.MessageEvent, 10)
	c := run(t, n, nic.ContextSpec{
		Name: "failing", Rulesets: sets(matcher.SLMP()), Kernel: &nic.Kernel{Object: o}, Events: events, Messages: 1, Timeout: 24 * time.Hour,
	})
	sock := dialUDP(t, lab, slmp.Port)
	for id := range uint32(3) {
		eventually(t, "the slot is free", func() bool {
			write(t, sock, raw(slmp.EOM, id, 0, noise(10)))
			time.Sleep(time.Millisecond)
			return messages(t, c).Started == uint64(id)+1
		})
		if e := nextEvent(t, events); e.Cause != spin.Failed || e.Number != id {
			t.Errorf("%+v", e)
		}
	}
}

// A slowLog takes its time for each line, and so keeps what comes after it waiting.
type slowLog struct{}

func (slowLog) Log(int64, int, []byte) { time.Sleep(500 * time.Microsecond) }

// A message that is ending by its timeout while its context is removed is told.
func TestRemovalWhileMessagesTimeOut(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	wire(t, lab)
	n := open(t, lab, nic.Config{HPUs: 1})
	spec, _, events := depositing(t, 1<<20)
	spec.Timeout = 20 * time.Millisecond
	rounds := 8
	if testing.Short() {
		rounds = 4
	}
	causes := map[spin.Cause]int{}
	for i := range rounds {
		c := run(t, n, spec)
		sock := dialUDP(t, lab, slmp.Port)
		write(t, sock, raw(0, uint32(i), 0, noise(100)))
		eventually(t, "it has begun", func() bool { return messages(t, c).Started == 1 })
		time.Sleep(time.Duration(2+5*i%20) * time.Millisecond)
		if err := n.Remove(c); err != nil {
			t.Fatal(err)
		}
		if st, cs := messages(t, c), c.Stats(); st.Abandoned != 1 || st.Open != 0 || cs.EventsLost != 0 {
			t.Errorf("%+v\n%+v", st, cs)
		}
		if len(events) != 1 {
			t.Fatalf("round %d: %d events, want one", i, len(events))
		}
		causes[(<-events).Cause]++
	}
	t.Logf("causes: %v", causes)
}

// Messages go where receives say, in whichever of the context's windows, and one for which
// there is none comes again.
func TestReceivesOfMessagesInTheKernel(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	wire(t, lab)
	n := open(t, lab, nic.Config{HPUs: 1})
	spec, first, events := depositing(t, 1<<20)
	_, second, _ := depositing(t, 1<<20)
	spec.Resources.Windows = []hpu.NamedWindow{{Name: "second", Window: second}}
	c := run(t, n, spec)
	conn := connect(t, lab, slmp.Port, slmp.Config{})
	send := func(length int) error {
		_, err := conn.SendBytes(patient(t), noise(length), slmp.Options{})
		return err
	}
	any := spin.Receive{Ignore: ^uint32(0)}
	for i, b := range []spin.Binding{{Window: second, Place: 5000, Size: 3000, User: uint64(7)}, {Window: first, Place: 1001, User: uint64(8)}} {
		r := any
		r.Binding = b
		if err := c.Post(r); err != nil {
			t.Fatal(err)
		}
		if err := send(3000 + i); err != nil {
			t.Fatal(err)
		}
		if e := nextEvent(t, events); e.User != b.User || e.Length != uint64(3000+i) {
			t.Errorf("event %+v", e)
		}
		got := make([]byte, 3000+i)
		if _, err := b.Window.(*hostq.Window).ReadAt(got, b.Place); err != nil || !bytes.Equal(got, noise(3000+i)) {
			t.Errorf("others are in the window, %v", err)
		}
	}
	sent := make(chan error)
	go func() { sent <- send(100) }()
	eventually(t, "a message is refused", func() bool { return messages(t, c).Refused > 0 })
	late := any
	late.Window, late.Place = first, 1<<20-100
	if err := c.Post(late); err != nil {
		t.Fatal(err)
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	if e := nextEvent(t, events); e.User != nil || e.Length != 100 {
		t.Errorf("event %+v", e)
	}
	if c.Unpost(late) {
		t.Error("a receive is taken back that a message has taken")
	}

	none, _, _ := depositing(t, 4096)
	for _, tt := range []struct {
		what string
		set  func(r *spin.Receive)
		want string
	}{
		{"another's window", func(r *spin.Receive) { r.Window = none.Window }, "its window is none of the context's"},
		{"no window", func(r *spin.Receive) { r.Window = nil }, "its window is none of the context's"},
		{"its own events", func(r *spin.Receive) { r.Events = spin.EventChan(events) }, "go where the context says"},
		{"a pointer", func(r *spin.Receive) { r.User = t }, "its User is a *testing.T: want a uint64"},
		{"behind the end", func(r *spin.Receive) { r.Place = 1 << 40 }, "out of bounds"},
	} {
		r := late
		tt.set(&r)
		if err := c.Post(r); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.what, err, tt.want)
		}
		if c.Unpost(r) {
			t.Errorf("%s: taken back", tt.what)
		}
	}
	spec.Kernel, spec.Name, spec.Rulesets, spec.Handlers.Payload = nil, "go", sets(matcher.UDPPort(9)), func(*hpu.HER) spin.Code { return spin.Success }
	spec.Resources.Windows, spec.Window, spec.Events = nil, nil, nil
	if c := run(t, n, spec); c.Post(late) == nil || c.Unpost(late) {
		t.Error("a context in Go takes the receive")
	}
}

// lines keep what handlers log.
type lines struct {
	mu  sync.Mutex
	all []string
}

// A triedPair counts how often a request was tried.
type triedPair struct {
	*hostq.Pair
	requests atomic.Int64
}

func (p *triedPair) Request(lane int, r *hostq.Request, user any) (uint64, error) {
	p.requests.Add(1)
	return p.Pair.Request(lane, r, user)
}

// Log implements hpu.LogSink.
func (l *lines) Log(now int64, _ int, text []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.all = append(l.all, string(text)); now == 0 {
		l.all = append(l.all, "without a time")
	}
}

// Handlers in eBPF tell the application what they like, and write to the context's log. What
// has no room in the application's queue is counted, and harms no message.
func TestNotesOfHandlersInTheKernel(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	wire(t, lab)
	n := open(t, lab, nic.Config{HPUs: 1})
	o, err := nic.ReadObject("test.o", objecttest.Compile(t, `#include "xspin_message.h"

XSPIN_PAYLOAD
{
	if (!her->offset)
		xspin_log("begins with %u bytes", her->payload_len, 0);
	xspin_notify(7, her->offset, her->payload_len);
	return XSPIN_SUCCESS;
}

XSPIN_MESSAGES(PAYLOAD);
XSPIN_LICENSE("GPL");
`), nic.ObjectMemory)
	if err != nil {
		t.Fatal(err)
	}
	pair, app := application(t, hostq.Layout{Lanes: 1, Events: 8, Requests: 4})
	log := &lines{}
	spec := nic.ContextSpec{
		Name: "telling", Rulesets: sets(matcher.SLMP()), Kernel: &nic.Kernel{Object: o},
		Resources: hpu.Resources{Host: pair, Log: log},
	}
	c := run(t, n, spec)
	conn := connect(t, lab, slmp.Port, slmp.Config{})
	first := conn.Stats().Payload
	for _, length := range []int{first + 10, 5, 20 * first} {
		if _, err := conn.SendBytes(patient(t), noise(length), slmp.Options{}); err != nil {
			t.Fatal(err)
		}
		if e := hostEvent(t, app); e.Kind != hostq.MessageEnded || e.Length != uint64(length) {
			t.Errorf("%+v", e)
		}
		if length > 10*first {
			break // too many to be told
		}
		for off := 0; off < length; off += first {
			var call hostq.Call
			eventually(t, "the application is told", func() bool { return app.Request(&call) })
			if call.Tag != 7 || call.Reply || call.Words != [2]uint64{uint64(off), uint64(min(first, length-off))} {
				t.Errorf("%+v", call)
			}
			app.Done(&call)
		}
	}
	eventually(t, "all is told or counted", func() bool { s := c.Stats(); return s.Requests+s.Unasked == 2+1+20 })
	if s := c.Stats(); s.Requests != 2+1+4 || s.EventsLost != 0 || s.Failed != 0 {
		t.Errorf("%+v", s)
	}
	log.mu.Lock()
	if want := fmt.Sprintf("[begins with %d bytes begins with 5 bytes begins with %[1]d bytes]", first); fmt.Sprint(log.all) != want {
		t.Errorf("log %q, want %s", log.all, want)
	}
	log.mu.Unlock()
	if err := n.Remove(c); err != nil {
		t.Fatal(err)
	}

	// A request that waits for room is counted once.
	spec.Resources.Full = hpu.FullWaits
	pair, app = application(t, hostq.Layout{Lanes: 1, Events: 8, Requests: 4})
	tried := &triedPair{Pair: pair}
	spec.Resources.Host = tried
	c = run(t, n, spec)
	if _, err := conn.SendBytes(patient(t), noise(6*first), slmp.Options{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "one finds no room, and waits", func() bool { return tried.requests.Load() >= 4+3 })
	for range 6 {
		var call hostq.Call
		eventually(t, "the application is told", func() bool { return app.Request(&call) })
		app.Done(&call)
	}
	if n := pair.Stats().Full; n > 2 {
		t.Errorf("%d requests have found no room, and two have waited", n)
	}
	if err := n.Remove(c); err != nil {
		t.Fatal(err)
	}

	// Nobody is there who could be told.
	spec.Resources = hpu.Resources{Log: log}
	c = run(t, n, spec)
	if _, err := conn.SendBytes(patient(t), noise(10), slmp.Options{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is counted", func() bool { return c.Stats().Unasked == 1 })
	if st := messages(t, c); st.Ended != 1 || c.Stats().EventsLost != 0 {
		t.Errorf("%+v", st)
	}
}

// Of a message that has more segments than it may, there is a fault, long before its end.
func TestMessagesWithTooManySegmentsAreTold(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	wire(t, lab)
	n := open(t, lab, nic.Config{HPUs: 1})
	spec, _, _ := depositing(t, 1<<20)
	spec.Kernel.Segments = 10
	c := run(t, n, spec)
	conn := connect(t, lab, slmp.Port, slmp.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	sent := make(chan error, 1)
	go func() {
		_, err := conn.SendBytes(ctx, noise(40*conn.Stats().Payload), slmp.Options{})
		sent <- err
	}()
	select {
	case e := <-n.Events():
		if e.Kind != spin.MessageTooLong || e.Name != c.Name() || !regexp.MustCompile(`^message too long: dropped \d+ segments beyond the 32 that a message may have: raise segments$`).MatchString(e.Text()) {
			t.Errorf("%+v", e)
		}
	case <-time.After(testenv.Slowness() * 8 * time.Second):
		t.Errorf("nothing is told: %+v", messages(t, c))
	}
	cancel()
	if err := <-sent; err == nil {
		t.Error("the message was sent")
	}
}

// What handlers of messages in eBPF do not do is refused with its key.
func TestWrongMessagesInTheKernel(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1})
	own, err := hostq.WindowOn(make([]byte, 4096), spin.All)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		what string
		set  func(s *nic.ContextSpec)
		want string
	}{
		{"packets", func(s *nic.ContextSpec) { s.Rulesets = sets(matcher.UDPPort(7)) }, "format: messages of format packet do not end"},
		{"IPv6", func(s *nic.ContextSpec) { s.Rulesets = sets(matcher.SLMP6()) }, "format: format slmp6: handlers in eBPF answer over IPv4 only: want slmp, or handlers in Go (tier: user)"},
		{"a binder", func(s *nic.ContextSpec) { s.Binder = &hpu.Receives{} }, "binder: handlers in eBPF put messages into the context's window"},
		{"a protocol of its own", func(s *nic.ContextSpec) { s.Protocol = ownProtocol{} }, "protocol: handlers in eBPF acknowledge messages of format slmp"},
		{"memory for tracking", func(s *nic.ContextSpec) { s.Memory = 1 << 20 }, "tracking: handlers in eBPF have a bit for each segment"},
		{"lingering", func(s *nic.ContextSpec) { s.Incomplete = mpq.Linger }, "incomplete: handlers in eBPF abandon"},
		{"memory of its own", func(s *nic.ContextSpec) { s.Window = own }, "windows: the window of messages: want a window on a hostq.Memory"},
		{"too many messages", func(s *nic.ContextSpec) { s.Messages = 1 << 20 }, "messages: 1048576: want 1 to 65536"},
		{"too many segments", func(s *nic.ContextSpec) { s.Kernel.Segments = 1 << 30 }, "segments: 1073741824: want 1 to 4194304"},
		{"too much of both", func(s *nic.ContextSpec) { s.Messages, s.Kernel.Segments = 1<<16, 1<<22 }, "65536 messages of 4194304 segments: want a product of at most"},
		{"credits", func(s *nic.ContextSpec) { s.Credits = 4 }, "credits: it is about HPUs"},
	} {
		spec, _, _ := depositing(t, 1<<20)
		k := *spec.Kernel
		spec.Kernel = &k
		tt.set(&spec)
		if c, err := n.Install(spec); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.what, err, tt.want)
			if err == nil {
				_ = n.Remove(c)
			}
		}
	}
}

// Acknowledged messages are told, whoever else fills the application's queue. The application takes nothing until all
// contexts are gone, and then it finds all that was acknowledged.
func TestAcknowledgedIsToldWhoeverFillsTheQueue(t *testing.T) {
	const room, port, count = 16, 9400, 40
	deposit := func(h *hpu.HER) spin.Code {
		if h.Deposit() != nil {
			return spin.Fail
		}
		return spin.Success
	}
	for name, others := range map[string]func(spec *nic.ContextSpec){
		"two contexts in eBPF": func(*nic.ContextSpec) {},
		"a context in eBPF and one in Go": func(spec *nic.ContextSpec) {
			spec.Kernel, spec.Handlers.Payload = nil, deposit
		},
		"two contexts, and HPUs of one": func(spec *nic.ContextSpec) {
			spec.Kernel, spec.Handlers.Payload = &nic.Kernel{Object: handsOdd(t)}, deposit
		},
	} {
		t.Run(name, func(t *testing.T) {
			lab := netnstest.Temp(t, netns.LabConfig{})
			wire(t, lab)
			n := open(t, lab, nic.Config{HPUs: 2})
			events := make(chan spin.MessageEvent, room)
			specs := []nic.ContextSpec{{Name: "one"}, {Name: "other"}}
			acked := make([]map[uint32]bool, len(specs))
			var all []*nic.Context
			var socks []*net.UDPConn
			for i := range specs {
				spec, _, _ := depositing(t, 1<<20)
				spec.Name, spec.Events, spec.Messages, spec.Timeout = specs[i].Name, events, 64, 24*time.Hour
				spec.Rulesets = sets(matcher.SLMP())
				to := uint16(slmp.Port)
				if i == 1 {
					spec.Rulesets, to = sets(slmpAt(port)), port
					others(&spec)
				}
				all = append(all, run(t, n, spec))
				socks = append(socks, dialUDP(t, lab, to))
				acked[i] = map[uint32]bool{}
			}
			for id := range uint32(count) {
				for _, s := range socks {
					write(t, s, raw(slmp.SYN|slmp.EOM, id, 0, []byte{byte(id)}))
				}
			}
			b := make([]byte, 100)
			listen := func() (n int) {
				for i, s := range socks {
					for {
						s.SetReadDeadline(time.Now().Add(time.Millisecond))
						k, err := s.Read(b)
						if err != nil {
							break
						}
						a, err := slmp.ParseAck(b[:k])
						if err != nil {
							t.Fatal(err)
						}
						acked[i][a.ID] = true
					}
					n += len(acked[i])
				}
				return n
			}
			eventually(t, "the queue is full, and as many are acknowledged", func() bool { return listen() >= room && len(events) == room })
			for _, c := range all {
				if err := n.Remove(c); err != nil {
					t.Error(err)
				}
			}
			if k := listen(); k != room {
				t.Errorf("%d are acknowledged, and %d have room", k, room)
			}
			for range len(events) {
				e := <-events
				i := slices.IndexFunc(specs, func(s nic.ContextSpec) bool { return s.Name == e.Context })
				if !acked[i][e.Number] {
					t.Errorf("message %d of context %q is told, and was not acknowledged", e.Number, e.Context)
				}
				delete(acked[i], e.Number)
			}
			for i, left := range acked {
				if len(left) > 0 {
					t.Errorf("context %q: acknowledged and not told: %v", specs[i].Name, left)
				}
			}
		})
	}
}

// A context that holds places and has no use for them gives them to whoever has: to the only message of another
// context, and to a failure on an HPU, which does not wait.
func TestIdleContextsCedeTheirPlaces(t *testing.T) {
	const port = 9400
	for _, room := range []int{1, 2, 16} {
		t.Run(fmt.Sprintf("a queue of %d", room), func(t *testing.T) {
			lab := netnstest.Temp(t, netns.LabConfig{})
			wire(t, lab)
			n := open(t, lab, nic.Config{HPUs: 1})
			events := make(chan spin.MessageEvent, room)
			idle, _, _ := depositing(t, 1<<20)
			idle.Name, idle.Events = "idle", events
			run(t, n, idle)
			busy, _, _ := depositing(t, 1<<20)
			busy.Name, busy.Events, busy.Rulesets, busy.Timeout = "busy", events, sets(slmpAt(port)), 24*time.Hour
			busy.Kernel, busy.Handlers = &nic.Kernel{Object: handsOdd(t)}, handle(func(*hpu.HER) spin.Code { return spin.Fail })
			run(t, n, busy)
			sock := dialUDP(t, lab, port)
			for id, want := range []spin.Cause{spin.Complete, spin.Failed, spin.Complete, spin.Failed} {
				write(t, sock, raw(slmp.SYN|slmp.EOM, uint32(id), 0, []byte{byte(id), 0}))
				if e := nextEvent(t, events); e.Cause != want || e.Number != uint32(id) {
					t.Errorf("message %d: %+v, want it %v", id, e, want)
				}
			}
		})
	}
}

// Deferred messages that find the kernel's ring full wait for their turn there.
func TestDeferredMessagesWaitForTheRing(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	wire(t, lab)
	n := open(t, lab, nic.Config{HPUs: 1})
	const room = 4096 // more than the ring has
	spec, _, _ := depositing(t, 1<<20)
	events := make(chan spin.MessageEvent, room)
	spec.Events, spec.Messages, spec.Timeout, spec.Kernel.Segments = events, 2*room, 24*time.Hour, 32
	c := run(t, n, spec)
	sock := dialUDP(t, lab, slmp.Port)
	for id := range uint32(2 * room) {
		write(t, sock, raw(slmp.SYN|slmp.EOM, id, 0, []byte{1}))
		if id%64 == 63 {
			eventually(t, "they have come", func() bool { return messages(t, c).Started == uint64(id)+1 })
		}
	}
	for id := range uint32(2 * room) {
		if e := nextEvent(t, events); e.Number != id || e.Cause != spin.Complete {
			t.Fatalf("message %d is told (%v), and it is the turn of %d", e.Number, e.Cause, id)
		}
	}
}
