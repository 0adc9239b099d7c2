// SPDX-License-Identifier: Apache-2.0

package handlers_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"weak"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/ddt/ddttest"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/handlers/handlerstest"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// commit commits a type that is written as text.
func commit(t testing.TB, text string, count int64) *ddt.Committed {
	t.Helper()
	typ, err := ddt.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	c, err := ddt.Commit(typ, count)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// stream returns bytes that differ from each other, and from what is in memory before.
func stream(n int64, seed byte) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

func untouched(n int64) []byte { return bytes.Repeat([]byte{0xa5}, int(n)) }

// Messages are placed as the definition of their type says, whatever the strategy, the
// packets, their order and the HPUs, with all else as it was.
func TestDatatypePlaces(t *testing.T) {
	for _, c := range []struct {
		text  string
		count int64
		flat  bool
	}{
		{"ctg(5000)[byte]", 1, true},
		{"hvec(40 3 50)[int]", 3, false},
		{"hvec(700 3 -17)[byte]", 1, true}, // from its origin down
		{"hidx(4000,300 -900,211 80,1 -30,7)[int]", 1, true},
		{"idxb(5: 100 0 20 -40)[short]", 70, false},
		{"struct(8,3,double -150,100,char 300,2,hvec(6 1 33)[hvec(3 2 9)[byte]])", 9, false},
		{"resized(-8,100)[hvec(7 1 11)[double]]", 20, false},
		{"subarray(1,5,9 2,30,50 0,3,7)[float]", 2, false},
		{"ctg(0)[int]", 1, true},
	} {
		for _, strategy := range ddt.Strategies() {
			if strategy == ddt.Specialized && !c.flat {
				continue
			}
			t.Run(c.text+", "+strategy, func(t *testing.T) {
				committed := commit(t, c.text, c.count)
				for seed, cut := range []int{1000, 77} {
					placeMessages(t, committed, handlers.DatatypeOptions{Strategy: strategy, HPUs: 5, Messages: 3, Packet: 500, Interval: 1000}, cut, byte(seed))
				}
			})
		}
	}
}

// placeMessages sends as many messages as there can be at the same time, in segments of
// cut bytes.
func placeMessages(t *testing.T, c *ddt.Committed, o handlers.DatatypeOptions, cut int, seed byte) {
	t.Helper()
	messages := int64(o.Messages)
	set, err := handlers.Datatype(c, o)
	if err != nil {
		t.Fatal(err)
	}
	lo, hi := c.Bounds()
	room := hi - lo + 100
	memory := untouched(messages * room)
	want := bytes.Clone(memory)
	places := ddttest.Places(c.Type(), c.Count())
	var receives hpu.Receives
	events := make(chan spin.MessageEvent, 8)
	cfg := handlerstest.Of(set)
	cfg.HPUs, cfg.Limits.Messages, cfg.Binder = o.HPUs, o.Messages, &receives
	if seed%2 == 1 {
		cfg.Buffer = 64 // several for each packet
	}
	n := handlerstest.New(t, cfg)
	rnd := rand.New(rand.NewPCG(uint64(seed), uint64(cut)))
	var first, rest [][]byte
	for id := range uint32(messages) {
		at := int64(id)*room + 50 - lo
		if err := receives.Post(spin.Receive{Binding: spin.Binding{Window: hpu.Memory(memory), Place: at, Events: spin.EventChan(events)}, Tag: id}); err != nil {
			t.Fatal(err)
		}
		data := stream(c.Size(), seed+byte(id))
		for i, p := range places {
			want[at+p] = data[i]
		}
		frames := handlerstest.Message(handlerstest.Peer(1), id, data, cut)
		first, rest = append(first, frames[0]), append(rest, frames[1:]...)
	}
	rnd.Shuffle(len(rest), func(i, j int) { rest[i], rest[j] = rest[j], rest[i] })
	// Some come before the first of their message.
	all := slices.Concat(rest[:min(len(rest), 10)], first, rest[min(len(rest), 10):])
	for some := range slices.Chunk(all, 50) {
		for _, call := range n.Packet(some...).Calls {
			if call.Code != spin.Success {
				t.Fatalf("segments of %d bytes: %+v", cut, call)
			}
		}
	}
	for range messages {
		select {
		case e := <-events:
			if e.Cause != spin.Complete || e.Length != uint64(c.Size()) {
				t.Errorf("segments of %d bytes: %+v", cut, e)
			}
		default:
			t.Fatalf("segments of %d bytes: a message is not over", cut)
		}
	}
	if !bytes.Equal(memory, want) {
		t.Errorf("segments of %d bytes: memory differs first at %d", cut, differs(memory, want))
	}
	s := n.Stats().User
	if b := s[handlers.DatatypeBytes]; b.Sum != uint64(messages*c.Size()) || b.Count != s[handlers.DatatypeCopies].Count {
		t.Errorf("counted %+v bytes of %d messages of %d", b, messages, c.Size())
	}
	if copies := s[handlers.DatatypeCopies]; c.Size() > 0 && copies.Sum < copies.Count {
		t.Errorf("%d copies of %d packets", copies.Sum, copies.Count)
	}
}

func differs(a, b []byte) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}

// plainWindow is a window whose bytes nobody gets.
type plainWindow struct{ spin.Window }

// Messages that are not as their type or their place wants them fail, with the numbers,
// and nothing is written where it must not be.
func TestDatatypeRefuses(t *testing.T) {
	const size = 1000
	readOnly := func(b []byte) spin.Window {
		w, err := hostq.WindowOn(b, spin.Read)
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
	writeOnly := func(b []byte) spin.Window {
		w, err := hostq.WindowOn(b, spin.Write)
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
	inMemory := func(b []byte) spin.Window { return hpu.Memory(b) }
	column := "hvec(30 1 10)[int]"   // 120 bytes, 0 to 294
	down := "hidx(-40,5 100,5)[int]" // 40 bytes, -40 to 120
	for _, c := range []struct {
		name        string
		text        string
		window      func([]byte) spin.Window // nil: none
		place, size int64
		options     handlers.DatatypeOptions
		sent        int64
		last        bool // the last packet comes right behind the first
		err         string
		why         error
		begun       bool // bytes inside may have been written
	}{
		{name: "hit", text: column, window: inMemory, place: size - 294, sent: 120},
		{name: "hit, from below", text: down, window: inMemory, place: 40, sent: 40},
		{name: "hit, and no more", text: down, window: inMemory, place: size - 120, sent: 40},
		{name: "hit, in its place", text: column, window: inMemory, place: 3, size: 294, sent: 120},
		{name: "hit, from an origin before the window", text: "hidx(5000,5 5100,5)[int]", window: inMemory, place: -5000, sent: 40},
		{name: "hit, from an origin behind it", text: "hidx(-5000,5 -4900,5)[int]", window: inMemory, place: 5880, sent: 40},
		{name: "beyond the window from before it", text: "hidx(5000,5 5100,5)[int]", window: inMemory, place: -5001, sent: 40,
			err: "bytes 5000 to 5119 from -5001 of a window of 1000: out of bounds", why: spin.ErrBounds},
		{name: "nowhere", text: column, window: inMemory, place: math.MinInt64, sent: 120,
			err: "bytes 0 to 293 from -9223372036854775808 of a window of 1000: out of bounds", why: spin.ErrBounds},
		{name: "hit, and no more, from before the window", text: "hidx(5000,5 5100,5)[int]", window: inMemory, place: -4120, sent: 40},
		{name: "beyond the window, from before it", text: "hidx(5000,5 5100,5)[int]", window: inMemory, place: -4119, sent: 40,
			err: "bytes 5000 to 5119 from -4119 of a window of 1000: out of bounds", why: spin.ErrBounds},
		{name: "nowhere, both from below", text: "hidx(-9223372036854775807,1)[byte]", window: inMemory, place: math.MinInt64, sent: 1,
			err: "bytes -9223372036854775807 to -9223372036854775807 from -9223372036854775808 of a window of 1000: out of bounds", why: spin.ErrBounds},
		{name: "nowhere, both from above", text: "hidx(9223372036854775800,1)[byte]", window: inMemory, place: math.MaxInt64, sent: 1,
			err: "bytes 9223372036854775800 to 9223372036854775800 from 9223372036854775807 of a window of 1000: out of bounds", why: spin.ErrBounds},
		{name: "hit, the lowest of places", text: "hidx(9223372036854775806,1)[byte]", window: inMemory, place: -math.MaxInt64 + 1, sent: 1},
		{name: "a place of less than nothing", text: column, window: inMemory, size: -5, sent: 120,
			err: "bytes 0 to 293 of a place of -5: out of bounds", why: spin.ErrBounds},
		{name: "hit, may write only", text: column, window: writeOnly, sent: 120},
		{name: "no window", text: column, sent: 120, err: "the message has no window: give the context one"},
		{name: "may not write", text: column, window: readOnly, sent: 120, err: "access not permitted", why: spin.ErrRights},
		{name: "no bytes to be had", text: column, window: func(b []byte) spin.Window { return plainWindow{hpu.Memory(b)} }, sent: 120,
			err: "the message's window does not lend its bytes to handlers"},
		{name: "beyond the window", text: column, window: inMemory, place: size - 293, sent: 120,
			err: "bytes 0 to 293 from 707 of a window of 1000: out of bounds", why: spin.ErrBounds},
		{name: "before the window", text: down, window: inMemory, place: 39, sent: 40,
			err: "bytes -40 to 119 from 39 of a window of 1000: out of bounds", why: spin.ErrBounds},
		{name: "beyond its place", text: column, window: inMemory, place: 3, size: 293, sent: 120,
			err: "bytes 0 to 293 of a place of 293: out of bounds", why: spin.ErrBounds},
		{name: "before its place", text: down, window: inMemory, place: 100, size: 500, sent: 40,
			err: "bytes -40 to 119 of a place of 500: out of bounds", why: spin.ErrBounds},
		{name: "a place behind the window", text: "ctg(0)[int]", window: inMemory, place: size + 1, sent: 0,
			err: "no bytes from 1001 of a window of 1000: out of bounds", why: spin.ErrBounds},
		{name: "a place before the window", text: column, window: inMemory, place: -1, sent: 120,
			err: "bytes 0 to 293 from -1 of a window of 1000: out of bounds", why: spin.ErrBounds},
		{name: "huge", text: "hvec(2 1 9000000000000000000)[int]", window: inMemory, place: 400, sent: 8,
			err: "bytes 0 to 9000000000000000003 from 400 of a window of 1000: out of bounds", why: spin.ErrBounds},
		{name: "too short", text: column, window: inMemory, sent: 119, err: "a message of 119 bytes, and the type has 120", begun: true},
		{name: "too short, as is known soon", text: column, window: inMemory, sent: 119, last: true, err: "a message of 119 bytes, and the type has 120", begun: true},
		{name: "too short for a packet", text: column, window: inMemory, sent: 40, err: "a message of 40 bytes, and the type has 120"},
		{name: "nothing", text: column, window: inMemory, sent: 0, err: "a message of 0 bytes, and the type has 120"},
		{name: "too long", text: column, window: inMemory, sent: 121, err: "a message of 121 bytes, and the type has 120", begun: true},
		{name: "much too long", text: column, window: inMemory, sent: 500, err: "a message of 150 bytes or more, and the type has 120", begun: true},
		{name: "much too long, as is known soon", text: column, window: inMemory, sent: 500, last: true, err: "a message of 500 bytes, and the type has 120", begun: true},
		{name: "too long by a packet's length", text: "ctg(20)[byte]", window: inMemory, sent: 21, err: "a message of 21 bytes, and the type has 20"},
		{name: "partial", text: column, window: inMemory, options: handlers.DatatypeOptions{Partial: true}, sent: 119},
		{name: "partial, nothing", text: column, window: inMemory, options: handlers.DatatypeOptions{Partial: true}, sent: 0},
		{name: "partial, whole", text: column, window: inMemory, options: handlers.DatatypeOptions{Partial: true}, sent: 120},
		{name: "partial, too long", text: column, window: inMemory, options: handlers.DatatypeOptions{Partial: true}, sent: 121,
			err: "a message of 121 bytes, and the type has 120", begun: true},
		{name: "more HPUs", text: column, window: inMemory, options: handlers.DatatypeOptions{HPUs: 1}, sent: 120,
			err: "the NIC has 2 HPUs, but the handlers were made for 1"},
	} {
		for _, strategy := range []string{ddt.Direct, ddt.Specialized, ddt.HPULocal, ddt.ROCP, ddt.RWCP} {
			if c.name == "huge" && strategy != ddt.Direct || strings.HasPrefix(c.text, "hidx") && strategy == ddt.Specialized {
				continue
			}
			t.Run(c.name+", "+strategy, func(t *testing.T) {
				committed := commit(t, c.text, 1)
				c.options.Strategy, c.options.Messages = strategy, 4
				set, err := handlers.Datatype(committed, c.options)
				if err != nil {
					t.Fatal(err)
				}
				cfg := handlerstest.Of(set)
				cfg.HPUs = 2
				events := make(chan spin.MessageEvent, 4)
				memory := untouched(size)
				want := bytes.Clone(memory)
				data := stream(c.sent, 1)
				to := spin.Binding{Place: c.place, Size: c.size, Events: spin.EventChan(events)}
				if c.window != nil {
					to.Window = c.window(memory)
				}
				var receives hpu.Receives
				if err := receives.Post(spin.Receive{Binding: to, Tag: 7}); err != nil {
					t.Fatal(err)
				}
				cfg.Binder = &receives
				n := handlerstest.New(t, cfg)
				frames := handlerstest.Message(handlerstest.Peer(1), 7, data, 50)
				if c.last {
					frames = slices.Insert(frames, 1, frames[len(frames)-1])
				}
				for _, f := range frames {
					n.Packet(f)
				}
				var e spin.MessageEvent
				select {
				case e = <-events:
				default:
					t.Fatal("the message is not over")
				}
				if c.err == "" {
					if e.Cause != spin.Complete || e.Length != uint64(c.sent) {
						t.Errorf("%+v", e)
					}
				} else if e.Cause != spin.Failed || !strings.HasSuffix(e.Err.Error(), c.err) || len(e.Err.Error()) > hostq.TextLen {
					t.Errorf("%v, want %q", e.Err, c.err)
				} else if c.why != nil && !errors.Is(e.Err, c.why) {
					t.Errorf("%v is no %v", e.Err, c.why)
				}
				if ran := n.Stats().Handled; c.err != "" && !c.begun && ran > 0 {
					t.Errorf("%d payload handlers of a message that could be refused", ran)
				}
				places := ddttest.Places(committed.Type(), 1)
				for i, p := range places[:min(len(places), len(data))] {
					switch at := c.place + p; {
					case c.err == "":
						want[at] = data[i]
					case c.begun && memory[at] == data[i]:
						want[at] = data[i]
					}
				}
				if !bytes.Equal(memory, want) {
					t.Errorf("memory differs first at %d", differs(memory, want))
				}
			})
		}
	}
}

// The strategy has no slot for a message that was not reckoned with.
func TestDatatypeHasSlotsForSoManyMessages(t *testing.T) {
	set, err := handlers.Datatype(commit(t, "ctg(100)[byte]", 1), handlers.DatatypeOptions{Strategy: ddt.RWCP, Messages: 1})
	if err != nil {
		t.Fatal(err)
	}
	cfg := handlerstest.Of(set)
	cfg.Limits.Messages = 2
	cfg.Windows = []hpu.NamedWindow{{Name: "in", Window: make(hpu.Memory, 100)}}
	n := handlerstest.New(t, cfg)
	for id, want := range []string{"", "slot 1 for messages, but the handlers were made for 1: make them for as many messages as the context has"} {
		out := n.Packet(handlerstest.Message(handlerstest.Peer(1), uint32(id), make([]byte, 100), 50)[0])
		if want == "" && len(out.Messages) == 0 {
			continue
		}
		if len(out.Messages) != 1 || out.Messages[0].Err == nil || out.Messages[0].Err.Error() != want {
			t.Errorf("message %d: %+v, want %q", id+1, out.Messages, want)
		}
	}
}

func TestDatatypeNeedsMessages(t *testing.T) {
	set, err := handlers.Datatype(commit(t, "int", 1), handlers.DatatypeOptions{})
	if err != nil {
		t.Fatal(err)
	}
	cfg := handlerstest.Of(set)
	cfg.Rulesets = []matcher.Ruleset{matcher.UDPPort(7)}
	out := handlerstest.New(t, cfg).Packet(handlerstest.UDP(handlerstest.Peer(1), handlerstest.Here(7), []byte("1234")))
	if len(out.Faults) != 1 || !strings.Contains(out.Faults[0].Detail, "packets of this format do not form messages") {
		t.Errorf("%+v", out.Faults)
	}
}

// The host's messages are placed as well: so a part of a window is unpacked into another.
func TestDatatypeOfTheHosts(t *testing.T) {
	c := commit(t, "hvec(100 3 7)[byte]", 1)
	set, err := handlers.Datatype(c, handlers.DatatypeOptions{})
	if err != nil {
		t.Fatal(err)
	}
	memory := make(hpu.Memory, 700)
	cfg := handlerstest.Of(set)
	cfg.Windows = []hpu.NamedWindow{{Name: "in", Window: memory}}
	n := handlerstest.New(t, cfg)
	data := stream(300, 1)
	out := n.Trigger(hpu.Trigger{Window: hpu.Memory(data), Length: 300})
	if len(out.Messages) != 1 || out.Messages[0].Cause != spin.Complete {
		t.Fatalf("%+v", out.Messages)
	}
	want := make([]byte, 700)
	copies, err := c.Unpack(want, 0, 0, data)
	if err != nil || !bytes.Equal(memory, want) {
		t.Errorf("memory differs first at %d: %v", differs(memory, want), err)
	}
	if counted := n.Stats().User[handlers.DatatypeCopies]; counted.Sum != uint64(copies) || counted.Count != 1 {
		t.Errorf("%d copies are counted as %+v", copies, counted)
	}
	for _, short := range []int64{0, 299} {
		out := n.Trigger(hpu.Trigger{Window: hpu.Memory(data), Length: short, Slice: 64})
		if len(out.Messages) != 1 || out.Messages[0].Cause != spin.Failed {
			t.Errorf("%d of 300 bytes: %+v", short, out.Messages)
		}
	}
}

func TestDatatypeOfNothing(t *testing.T) {
	if set, err := handlers.Datatype(nil, handlers.DatatypeOptions{}); err == nil || set != nil || err.Error() != "datatype: no type" {
		t.Errorf("%v, %v", set, err)
	}
}

// A set keeps the normal form, and not the type.
func TestDatatypeKeepsNoType(t *testing.T) {
	set, typ := func() (*handlers.Set, weak.Pointer[ddt.Type]) {
		c := commit(t, "hvec(1000 3 7)[byte]", 1)
		set, err := handlers.Datatype(c, handlers.DatatypeOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return set, weak.Make(c.Type())
	}()
	runtime.GC()
	if typ.Value() != nil {
		t.Error("the set keeps the type")
	}
	runtime.KeepAlive(set)
}

// Placing a packet takes no memory, in a packet of one buffer and of several, and in an
// application's window and the NIC's own.
func TestDatatypeAllocatesNothing(t *testing.T) {
	for i, strategy := range slices.Repeat(ddt.Strategies(), 2) {
		for _, buffer := range []int{0, 100} {
			set, err := handlers.Datatype(commit(t, "hvec(1000 3 7)[byte]", 1), handlers.DatatypeOptions{Strategy: strategy, Messages: 2})
			if err != nil {
				t.Fatal(err)
			}
			cfg := handlerstest.Of(set)
			cfg.Buffer = buffer
			var w spin.Window = make(hpu.Memory, 7000)
			if i < len(ddt.Strategies()) {
				if w, err = hostq.WindowOn(make([]byte, 7000), spin.Write); err != nil {
					t.Fatal(err)
				}
			}
			cfg.Windows = []hpu.NamedWindow{{Name: "in", Window: w}}
			ran := 0
			cfg.Payload = func(h *hpu.HER) spin.Code {
				ran++
				if allocs := testing.AllocsPerRun(100, func() { set.Payload(h) }); allocs != 0 {
					t.Errorf("%s, buffers of %d bytes, into a %T: %v allocations for a packet", strategy, buffer, w, allocs)
				}
				return set.Payload(h)
			}
			handlerstest.New(t, cfg).Packet(handlerstest.Message(handlerstest.Peer(1), 1, stream(3000, 1), 1000)...)
			if ran != 3 {
				t.Errorf("%d of 3 packets", ran)
			}
		}
	}
}

func TestDatatypeSaysWhatItNeeds(t *testing.T) {
	c := commit(t, "hvec(1000 3 7)[byte]", 1)
	for _, strategy := range ddt.Strategies() {
		o := handlers.DatatypeOptions{Strategy: strategy, HPUs: 4, Messages: 10, Packet: 100, Interval: 300}
		set, err := handlers.Datatype(c, o)
		if err != nil {
			t.Fatal(err)
		}
		p, err := ddt.NewPlacement(c, ddt.Config{Strategy: strategy, HPUs: 4, Messages: 10, Packet: 100, Interval: 300})
		if err != nil {
			t.Fatal(err)
		}
		s, m := p.Scheduling(), p.Memory()
		if set.Sequence != s.Sequence || set.VHPUs != s.VHPUs || set.ReservedBytes() != m.Total() || set.Reserved["segments"] != m.Segments {
			t.Errorf("%s needs %d, %d, %v: the placement %+v, %+v", strategy, set.Sequence, set.VHPUs, set.Reserved, s, m)
		}
		if stateful := strategy == ddt.HPULocal || strategy == ddt.RWCP; stateful != (set.Sequence > 0) {
			t.Errorf("%s needs sequences of %d bytes", strategy, set.Sequence)
		}
		if !set.Queue || !set.Window || len(set.Rulesets) != 1 {
			t.Errorf("%s: %+v", strategy, set)
		}
	}
}

// The configuration's parameters are what the options are, and errors say which is wrong.
// Twice as many packets in a time, or twice as much time for each, is about twice the
// interval.
func TestDatatypePacketTime(t *testing.T) {
	r, _ := handlers.Lookup("datatype")
	sequence := func(every string) uint32 {
		set, err := r.New(handlers.Params{"type": "vec(1000000 1 2)[short]", "strategy": "rw-cp", "packet_time": every}, handlers.Env{HPUs: 4, Messages: 1})
		if err != nil {
			t.Fatal(err)
		}
		return set.Sequence
	}
	if seldom, often := sequence("1ms"), sequence("10ns"); seldom >= often {
		t.Errorf("a sequence has %d bytes with a packet every ms, and %d with one every 10 ns", seldom, often)
	}
	if _, err := r.New(handlers.Params{"type": "int", "strategy": "rw-cp", "packet_time": "-1us"}, handlers.Env{}); err == nil || !strings.Contains(err.Error(), "-1") {
		t.Errorf("a packet every -1 us: %v", err)
	}
}

func TestDatatypeParams(t *testing.T) {
	r, ok := handlers.Lookup("datatype")
	if !ok {
		t.Fatal("there is no datatype")
	}
	for _, c := range []struct {
		params handlers.Params
		env    handlers.Env
		bytes  int64 // of a message that is taken
		err    string
	}{
		{handlers.Params{"type": "vec(3 1 2)[int]"}, handlers.Env{}, 12, ""},
		{handlers.Params{"type": "vec(3 1 2)[int]", "count": 5}, handlers.Env{Window: 1000}, 60, ""},
		{handlers.Params{"type": "vec(3 1 2)[int]", "count": 0}, handlers.Env{}, 0, ""},
		{handlers.Params{"type": "MILC"}, handlers.Env{}, resolved(t, "MILC", -1), ""},
		{handlers.Params{"type": "MILC", "count": 2}, handlers.Env{}, resolved(t, "MILC", 2), ""},
		{handlers.Params{"type": "int", "partial": true, "strategy": "rw-cp", "interval": 1000, "epsilon": 0.1, "packet": 1000}, handlers.Env{HPUs: 2, Messages: 3}, 4, ""},
		{nil, handlers.Env{}, 0, `param "type": is missing: want string`},
		{handlers.Params{"type": "vec(3 1)[int]"}, handlers.Env{}, 0, `param "type":1:`},
		{handlers.Params{"type": "ctg(2)[\n ctg(3)[itn]]"}, handlers.Env{}, 0, `param "type":2:9: `},
		{handlers.Params{"type": "MILC(x=3)"}, handlers.Env{}, 0, `param "type"`},
		{handlers.Params{"type": "int", "count": -1}, handlers.Env{}, 0, `count`},
		{handlers.Params{"type": "int", "strategy": "fast"}, handlers.Env{}, 0, `param "strategy": "fast": want direct, specialized, hpu-local, ro-cp, rw-cp`},
		{handlers.Params{"type": "int", "strategy": "rw-cp", "interval": -3}, handlers.Env{}, 0, `interval of -3 bytes`},
		{handlers.Params{"type": "int", "strategy": "ro-cp", "epsilon": -0.5}, handlers.Env{}, 0, `epsilon -0.5`},
		{handlers.Params{"type": "int", "packet": -1}, handlers.Env{}, 0, `packets of -1 bytes`},
		{handlers.Params{"type": "vec(3 1 2)[int]", "count": 51}, handlers.Env{Window: 1019}, 0, "the type touches bytes 0 to 1019, and the largest window has 1019"},
		{handlers.Params{"type": "int", "strategy": "hpu-local"}, handlers.Env{HPUs: 2, Messages: 3, Memory: 10 << 10}, 4, ""},
		{handlers.Params{"type": "int", "strategy": "hpu-local"}, handlers.Env{HPUs: 2, Messages: 300, Memory: 10 << 10}, 0, "at most 10240; direct needs no more"},
		{handlers.Params{"type": "int"}, handlers.Env{Memory: 10}, 0, "at most 10"},
		{handlers.Params{"type": "int"}, handlers.Env{Memory: -1}, 0, "at most 0"},
		{handlers.Params{"type": "int"}, handlers.Env{Window: -1}, 0, "handlers may not write any of the windows"},
	} {
		set, err := r.New(c.params, c.env)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%v: %v, want %q", c.params, err, c.err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%v: %v", c.params, err)
			continue
		}
		cfg := handlerstest.Of(set)
		cfg.Windows = []hpu.NamedWindow{{Name: "in", Window: make(hpu.Memory, 8<<20)}}
		n := handlerstest.New(t, cfg)
		id := uint32(0)
		for _, size := range []int64{c.bytes, c.bytes + 1} {
			// Whole segments count, not bytes: the last says how long the message is.
			id++
			cause := spin.Complete
			if size > c.bytes {
				cause = spin.Failed
			}
			var out *handlerstest.Outcome
			if size <= 1000 {
				out = n.Packet(handlerstest.Message(handlerstest.Peer(1), id, make([]byte, size), 1000)...)
			} else if size > c.bytes {
				out = n.Packet(handlerstest.Segment(handlerstest.Peer(1), slmp.Header{Flags: slmp.SYN, ID: id}, make([]byte, 1000)),
					handlerstest.Segment(handlerstest.Peer(1), slmp.Header{Flags: slmp.SYN | slmp.EOM, ID: id, Offset: uint32(size - 1)}, make([]byte, 1)))
			} else {
				continue
			}
			if len(out.Messages) != 1 || out.Messages[0].Cause != cause {
				t.Errorf("%v: a message of %d bytes: %+v, want it %v", c.params, size, out.Messages, cause)
			}
		}
	}
}

// resolved returns how many bytes a message has that a name says.
func resolved(t *testing.T, name string, count int64) int64 {
	typ, n, err := ddt.Resolve(name)
	if err != nil {
		t.Fatal(err)
	}
	if count >= 0 {
		n = count
	}
	return typ.Size() * n
}

// Random types come as the definition says.
func TestDatatypeRandom(t *testing.T) {
	for seed := range uint64(16) {
		typ, count := ddttest.Random(rand.New(rand.NewPCG(seed, 1)), ddttest.Options{NoOverlap: true, MaxBytes: 8 << 10, MaxExtent: 256 << 10})
		c, err := ddt.Commit(typ, count)
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		for _, strategy := range ddt.Strategies() {
			o := handlers.DatatypeOptions{Strategy: strategy, HPUs: 3, Messages: 2, Packet: 300, Interval: 600}
			if _, err := handlers.Datatype(c, o); err != nil && strategy == ddt.Specialized {
				continue
			}
			t.Run(fmt.Sprintf("seed %d, %s", seed, strategy), func(t *testing.T) {
				placeMessages(t, c, o, 1+int(seed)*37%700, byte(seed))
			})
		}
	}
}
