// SPDX-License-Identifier: Apache-2.0

package handlerstest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/packet"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

func echo(h *hpu.HER) spin.Code {
	if !h.Headers().ReplyUDP() || h.Send() != nil {
		return spin.Drop
	}
	return spin.Success
}

func payload(h hpu.Handler) Config { return Config{Handlers: hpu.Handlers{Payload: h}} }

var hello = UDP(Peer(4000), Here(7), []byte("hello"))

// TestPacket handles packets one by one and many at once, of which only those that
// match come.
func TestPacket(t *testing.T) {
	c := payload(echo)
	c.Rulesets = []matcher.Ruleset{matcher.Bypass(), matcher.UDPPort(7)}
	n := New(t, c)
	before := bytes.Clone(hello)
	for range 1000 { // more than there are frames
		out := n.Packet(hello)
		if out.Code() != spin.Success || len(out.Sent) != 1 || len(out.Calls) != 1 || out.Verdicts[0].Ruleset != 1 {
			t.Fatalf("%+v", out)
		}
		h := packet.Parse(out.Sent[0], len(out.Sent[0]))
		if h.UDP == nil || h.UDP.DstPort() != 4000 || string(h.UDP.Payload()) != "hello" || !h.UDPChecksumValid() {
			t.Fatalf("sent % x", out.Sent[0])
		}
	}
	if !bytes.Equal(hello, before) {
		t.Error("the test's frame was changed")
	}
	out := n.Packet(UDP(Peer(4000), Here(8), nil), hello, hello)
	if len(out.Calls) != 2 || len(out.Sent) != 2 || out.Verdicts[0].Action != matcher.Pass || out.Verdicts[2].Action != matcher.Deliver {
		t.Errorf("%+v", out)
	}
	if s := n.Stats(); s.Handled != 1002 || s.Sent != 1002 {
		t.Errorf("handled %d, sent %d", s.Handled, s.Sent)
	}
	if out := n.Settle(); len(out.Calls)+len(out.Sent)+len(out.Verdicts) != 0 {
		t.Errorf("nothing was done: %+v", out)
	}
	if n.Settle().Code() != -1 {
		t.Error("a code of nothing")
	}
}

// TestHPUs spreads packets, and keeps those of a message together.
func TestHPUs(t *testing.T) {
	h := func(h *hpu.HER) spin.Code {
		h.HPUMemory()[0]++
		if h.HPUMemory()[0] > 250 || h.HPUs() != 4 {
			return spin.Fail
		}
		return spin.Success
	}
	c := payload(h)
	c.HPUs, c.HPUMemory, c.Memory = 4, 1, []byte("shared")
	out := New(t, c).Packet(hello, hello, hello, hello, hello)
	var on []int
	for _, call := range out.Calls {
		on = append(on, call.HPU)
	}
	slices.Sort(on)
	if !slices.Equal(on, []int{0, 0, 1, 2, 3}) {
		t.Errorf("packets on HPUs %v", on)
	}
	c.Rulesets = []matcher.Ruleset{matcher.SLMP()}
	n := New(t, c)
	used := map[int]bool{}
	for id := range uint32(20) {
		out := n.Packet(Message(Peer(1), id, make([]byte, 1000), 100)...)
		for _, call := range out.Calls {
			if call.HPU != out.Calls[0].HPU {
				t.Fatalf("message %d on HPUs %d and %d", id, call.HPU, out.Calls[0].HPU)
			}
		}
		used[out.Calls[0].HPU] = true
	}
	if len(used) != 4 {
		t.Errorf("messages on HPUs %v only", used)
	}
}

// TestMessage runs all handlers of a message, with state, a window and acknowledgements.
func TestMessage(t *testing.T) {
	window := make(hpu.Memory, 4096)
	var sum uint32
	n := New(t, Config{
		Handlers: hpu.Handlers{
			Header: func(h *hpu.HER) spin.Code {
				if string(h.Message().State()) != "ab\x00\x00" {
					t.Errorf("state %q", h.Message().State())
				}
				clear(h.Message().State())
				return spin.ProcessData
			},
			Payload: func(h *hpu.HER) spin.Code {
				s := h.Message().State()
				binary.BigEndian.PutUint32(s, binary.BigEndian.Uint32(s)+uint32(h.PayloadLen()))
				if h.Deposit() != nil {
					return spin.Segv
				}
				return spin.Success
			},
			Completion: func(c *hpu.Completion) spin.Code {
				sum = binary.BigEndian.Uint32(c.Message().State())
				return spin.Success
			},
		},
		Rulesets: []matcher.Ruleset{matcher.SLMP()},
		State:    4, Initial: []byte("ab"),
		Windows: []hpu.NamedWindow{{Name: "in", Window: window}},
	})
	content := []byte(strings.Repeat("message ", 300))
	frames := Message(Peer(4000), 9, content, 999)
	out := n.Packet(frames[1:]...) // no handler runs before the first packet has come
	if len(out.Calls) != 0 || len(out.Messages) != 0 {
		t.Fatalf("%+v", out)
	}
	out = n.Packet(frames[0])
	var names []string
	for _, c := range out.Calls {
		names = append(names, c.Handler)
	}
	if got := strings.Join(names, " "); got != "header payload payload payload completion" {
		t.Errorf("calls: %s", got)
	}
	if len(out.Messages) != 1 || out.Messages[0].Cause != spin.Complete || out.Messages[0].Number != 9 || int(sum) != len(content) {
		t.Errorf("events %+v, %d bytes handled", out.Messages, sum)
	}
	if !bytes.Equal(window[:len(content)], content) {
		t.Error("the window has something else")
	}
	offsets := map[uint32]bool{}
	for _, f := range out.Sent {
		h := packet.Parse(f, len(f))
		ack, err := slmp.ParseAck(h.UDP.Payload())
		if err != nil || ack.ID != 9 {
			t.Errorf("%+v, %v", ack, err)
		}
		offsets[ack.Offset] = true
	}
	if len(offsets) != 3 {
		t.Errorf("acknowledged: %v", offsets)
	}
	// It is over: again, nothing runs.
	if out := n.Packet(frames...); len(out.Calls) != 0 || len(out.Sent) != 3 {
		t.Errorf("%+v", out)
	}
}

// TestRemove ends a message of which a part is missing.
func TestRemove(t *testing.T) {
	var missing uint64
	n := New(t, Config{
		Handlers: hpu.Handlers{Completion: func(c *hpu.Completion) spin.Code {
			missing = c.Missing
			return spin.Success
		}},
		Rulesets: []matcher.Ruleset{matcher.SLMP()},
	})
	frames := Message(Peer(4000), 9, make([]byte, 300), 100)
	n.Packet(frames[0], frames[2])
	out := n.Remove()
	if out.Code() != spin.Success || missing != 100 || len(out.Messages) != 1 || out.Messages[0].Cause != spin.Removed {
		t.Errorf("missing %d: %+v", missing, out)
	}
}

// TestBuffers has frames span several buffers.
func TestBuffers(t *testing.T) {
	c := payload(func(h *hpu.HER) spin.Code {
		if h.Segments() != 4 {
			t.Errorf("%d buffers", h.Segments())
		}
		if h.Headers().Contiguous() || !h.Headers().ReplyUDP(h.Segment(1), h.Segment(2), h.Segment(3)) || h.Send() != nil {
			return spin.Drop
		}
		return spin.Success
	})
	c.Buffer = 100
	out := New(t, c).Packet(UDP(Peer(1), Here(2), bytes.Repeat([]byte("x"), 300)))
	if out.Code() != spin.Success || len(out.Sent) != 1 || len(out.Sent[0]) != 342 {
		t.Errorf("%+v", out)
	}
}

// TestFaults has handlers panic and fail: they send nothing, and it is told.
func TestFaults(t *testing.T) {
	fail := false
	n := New(t, payload(func(h *hpu.HER) spin.Code {
		if echo(h) != spin.Success {
			t.Error("no echo")
		}
		if fail {
			return spin.Fail
		}
		panic("ouch")
	}))
	out := n.Packet(hello)
	if out.Code() != spin.Fail || out.Calls[0].Panic != "ouch" || len(out.Sent) != 0 || len(out.Faults) != 1 || out.Faults[0].Kind != spin.HandlerPanic {
		t.Errorf("%+v", out)
	}
	fail = true
	out = n.Packet(hello)
	if out.Code() != spin.Fail || out.Calls[0].Panic != nil || len(out.Sent) != 0 || len(out.Faults) != 1 || out.Faults[0].Kind != spin.HandlerFailed {
		t.Errorf("%+v", out)
	}
}

// TestOverrun has a handler run for too long: the context is stopped.
func TestOverrun(t *testing.T) {
	free := make(chan struct{})
	c := payload(func(*hpu.HER) spin.Code {
		<-free
		return spin.Success
	})
	c.Limit = 20 * time.Millisecond
	n := New(t, c)
	out := n.Packet(hello, hello)
	if len(out.Calls) != 0 || len(out.Faults) != 1 || out.Faults[0].Kind != spin.HandlerOverrun {
		t.Errorf("%+v", out)
	}
	close(free)
}

// TestGoexit has a handler end its goroutine, as t.Fatal does: the test goes on.
func TestGoexit(t *testing.T) {
	c := payload(func(*hpu.HER) spin.Code {
		runtime.Goexit()
		return spin.Success
	})
	c.Limit = 20 * time.Millisecond
	n := New(t, c)
	out := n.Packet(hello)
	if out.Code() != spin.Fail || out.Calls[0].Panic != nil || len(out.Faults) == 0 || out.Faults[len(out.Faults)-1].Kind != spin.HandlerOverrun {
		t.Errorf("%+v", out)
	}
}

// TestKeep keeps a packet over the end of its handler.
func TestKeep(t *testing.T) {
	var kept *hpu.Kept
	n := New(t, payload(func(h *hpu.HER) (code spin.Code) {
		var err error
		if kept, err = h.Keep(); err != nil {
			return spin.Fail
		}
		return spin.Success
	}))
	for range 1000 {
		n.Packet(hello)
		b := make([]byte, 100)
		if got := b[:kept.CopyTo(b, 0)]; !bytes.Equal(got, hello) {
			t.Fatalf("kept % x", got)
		}
		if n.pool.Idle(n.ctx) {
			t.Fatal("it is not kept")
		}
		kept.Release()
		if n.Settle(); !n.pool.Idle(n.ctx) {
			t.Fatal("settled, and it is not back")
		}
	}
}

// A fakeT notes the errors of a test.
type fakeT struct {
	testing.TB
	errors  []string
	cleanup []func()
}

func (f *fakeT) Helper()                      {}
func (f *fakeT) Cleanup(g func())             { f.cleanup = append(f.cleanup, g) }
func (f *fakeT) Errorf(s string, args ...any) { f.errors = append(f.errors, fmt.Sprintf(s, args...)) }
func (f *fakeT) Fatal(args ...any)            { panic(fmt.Sprint(args...)) }
func (f *fakeT) Fatalf(s string, args ...any) { panic(fmt.Sprintf(s, args...)) }

func (f *fakeT) end() {
	for _, g := range slices.Backward(f.cleanup) {
		g()
	}
}

// fatal returns how f ends the test.
func fatal(f func(*fakeT)) (msg string) {
	ft := &fakeT{}
	defer ft.end()
	defer func() { msg = fmt.Sprint(recover()) }()
	f(ft)
	return ""
}

// TestMistakes has tests make mistakes, which end them.
func TestMistakes(t *testing.T) {
	keep := payload(func(h *hpu.HER) spin.Code {
		if _, err := h.Keep(); err != nil {
			return spin.Fail
		}
		return spin.Success
	})
	ft := &fakeT{}
	New(ft, keep).Packet(hello, hello)
	ft.end()
	if len(ft.errors) != 1 || !strings.Contains(ft.errors[0], "kept 2 packets and not released them") {
		t.Errorf("a packet that is never released: %q", ft.errors)
	}
	for _, c := range []struct {
		name, want string
		do         func(*fakeT)
	}{
		{"too many kept", "handlers have kept", func(ft *fakeT) {
			n := New(ft, keep)
			for range frames + 1 {
				n.Packet(hello)
			}
		}},
		{"no timer", "no timer handler", func(ft *fakeT) { New(ft, payload(echo)).Tick() }},
		{"no application", "see Config.Queue", func(ft *fakeT) { New(ft, payload(echo)).Answer(nil) }},
		{"end of no application", "see Config.Queue", func(ft *fakeT) { New(ft, payload(echo)).Detach() }},
		{"trigger without messages", "no messages", func(ft *fakeT) { New(ft, payload(echo)).Trigger(hpu.Trigger{}) }},
		{"HPUs", "want", func(ft *fakeT) { New(ft, Config{HPUs: -1}) }},
		{"buffer", "want", func(ft *fakeT) { New(ft, Config{Buffer: 10}) }},
		{"format", "message format", func(ft *fakeT) {
			New(ft, Config{Rulesets: []matcher.Ruleset{{Name: "x", Format: "y"}}})
		}},
		{"ruleset", "invalid", func(ft *fakeT) { New(ft, Config{Rulesets: []matcher.Ruleset{{}}}) }},
		{"header handler of a flow", "never end", func(ft *fakeT) {
			New(ft, Config{Handlers: hpu.Handlers{Header: echo}, Format: matcher.FormatByName("flow")})
		}},
		{"init", "init handler: no", func(ft *fakeT) {
			New(ft, Config{Handlers: hpu.Handlers{Init: func(*hpu.Task) error { return errors.New("no") }}})
		}},
	} {
		if got := fatal(c.do); !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// TestUnknownPeers has handlers send to who sent the packet, at once, and to others, who
// are being resolved at first.
func TestUnknownPeers(t *testing.T) {
	to := Peer(4000)
	n := New(t, Config{Handlers: hpu.Handlers{Payload: func(h *hpu.HER) spin.Code {
		b, err := h.SendUDP(7, to, 2)
		if err != nil {
			h.Logf("%v", err)
			return spin.Drop
		}
		copy(b, "hi")
		return spin.Success
	}}})
	question := UDP(Peer(4000), Here(7), []byte("hello"))
	if out := n.Packet(question); len(out.Sent) != 1 || !bytes.Equal(out.Sent[0][:12], append(PeerMAC[:], HereMAC[:]...)) {
		t.Errorf("to the sender: %+v", out)
	}
	to = netip.MustParseAddrPort("10.9.9.9:1")
	if out := n.Packet(question, question); len(out.Sent) != 0 || len(out.Log) != 2 || out.Log[1] != spin.ErrUnresolved.Error() {
		t.Errorf("to somebody else: %+v", out)
	}
	if out := n.Packet(question); len(out.Sent) != 1 {
		t.Errorf("to somebody else who has been asked: %+v", out)
	}
}

// TestReply has datagrams answered with other payloads, whatever buffers they come in.
func TestReply(t *testing.T) {
	for _, buffer := range []int{0, 64} {
		size := 0
		n := New(t, Config{Buffer: buffer, Handlers: hpu.Handlers{Payload: func(h *hpu.HER) spin.Code {
			if size == 12 { // with enough room for all of them
				if a := testing.AllocsPerRun(20, func() { _, _ = h.Reply(size) }); a != 0 {
					t.Errorf("%v allocations", a)
				}
				return spin.Fail
			}
			b, err := h.Reply(size)
			if err != nil {
				h.Logf("%v", err)
				return spin.Drop
			}
			for i := range b {
				b[i] = byte(i)
			}
			return spin.Success
		}}})
		question := UDP(Peer(4000), Here(7), bytes.Repeat([]byte("question"), 20))
		for _, size = range []int{0, 1, 300, 1472} {
			out := n.Packet(bytes.Clone(question))
			if len(out.Sent) != 1 {
				t.Fatalf("%d bytes: %+v", size, out)
			}
			h := packet.Parse(out.Sent[0], len(out.Sent[0]))
			if h.UDP == nil || len(h.UDP.Payload()) != size || !h.Intact() || h.UDP.Checksum() == 0 || h.UDP.SrcPort() != 7 || h.UDP.DstPort() != 4000 ||
				h.Ethernet.Dst() != PeerMAC || h.Ethernet.Src() != HereMAC || h.IPv4.Dst() != PeerAddr.As4() || h.IPv4.Src() != HereAddr.As4() {
				t.Errorf("%d bytes: sent % x", size, out.Sent[0])
			}
		}
		for _, hops := range []struct{ question, answer byte }{{255, 64}, {65, 64}, {64, 63}, {2, 1}, {1, 0}, {0, 0}} {
			q := bytes.Clone(question)
			hdr := packet.Parse(q, len(q))
			hdr.IPv4.SetTTL(hops.question)
			hdr.IPv4.SetChecksum(0)
			hdr.IPv4.SetChecksum(packet.ChecksumOf(hdr.IPv4[:packet.IPv4Len]))
			out := n.Packet(q)
			if sent := len(out.Sent) == 1; sent != (hops.answer > 0) || sent && packet.IPv4(out.Sent[0][packet.EthernetLen:]).TTL() != hops.answer {
				t.Errorf("%d hops left: want an answer with %d: %+v", hops.question, hops.answer, out)
			}
		}
		size = 1473
		if out := n.Packet(bytes.Clone(question)); len(out.Sent) != 0 || !strings.Contains(out.Log[0], "0 to 1472") {
			t.Errorf("%d bytes: %+v", size, out)
		}
		size = 1
		damaged, broadcast := bytes.Clone(question), bytes.Clone(question)
		damaged[len(damaged)-1] ^= 1
		broadcast[0] = 0xff
		for name, f := range map[string][]byte{"damaged": damaged, "broadcast": broadcast, "ping": ICMPEcho(PeerAddr, HereAddr, 1, 1, nil)} {
			if out := n.Packet(f); len(out.Sent) != 0 || len(out.Log) != 1 || out.Log[0] != hpu.ErrReply.Error() {
				t.Errorf("%s: %+v", name, out)
			}
		}
		size = 12
		if out := n.Packet(question); len(out.Sent) != 0 || len(out.Faults) != 1 {
			t.Errorf("a handler that fails has sent %d frames: %+v", len(out.Sent), out.Faults)
		}
	}
}

// TestTimer runs init and timer handlers, which have no packet.
func TestTimer(t *testing.T) {
	begun, code := 0, spin.Success
	n := New(t, Config{Handlers: hpu.Handlers{
		Init: func(t *hpu.Task) error {
			begun++
			t.Logf("begun on HPU %d of %d", t.HPU(), t.HPUs())
			if _, err := t.Resolve(Peer(2).Addr()); !errors.Is(err, spin.ErrUnresolved) {
				return fmt.Errorf("asked for the first time: %v", err)
			}
			return nil
		},
		Timer: func(t *hpu.Task) spin.Code {
			b, err := t.SendUDP(1, Peer(2), 4)
			if err != nil {
				return spin.Fail
			}
			copy(b, "tick")
			return code
		},
	}})
	out := n.Tick()
	if begun != 1 || len(out.Log) != 1 || out.Log[0] != "begun on HPU 0 of 1" {
		t.Errorf("begun %d times: %q", begun, out.Log)
	}
	if len(out.Sent) != 1 || !bytes.Contains(out.Sent[0], []byte("tick")) || out.Code() != spin.Success {
		t.Errorf("%+v", out)
	}
	code = spin.Fail
	if out := n.Tick(); len(out.Sent) != 0 || out.Code() != spin.Fail {
		t.Errorf("%+v", out)
	}
}

// TestTrigger runs the handlers of a host message.
func TestTrigger(t *testing.T) {
	var got []byte
	n := New(t, Config{
		Handlers: hpu.Handlers{Payload: func(h *hpu.HER) spin.Code {
			for b := range h.Payload() {
				got = append(got, b...)
			}
			got = append(got, byte('0'+h.Message().Words()[3]))
			return spin.Success
		}},
		Format: matcher.FormatByName("slmp"),
	})
	out := n.Trigger(hpu.Trigger{Words: [4]uint64{3: 7}, Window: hpu.Memory("0123456789"), Offset: 1, Length: 8, Slice: 3})
	if string(got) != "12374567787" || len(out.Messages) != 1 || len(out.Calls) != 3 {
		t.Errorf("%q, %+v", got, out)
	}
}

// TestAsk has handlers ask and wait, ask and go on, and tell.
func TestAsk(t *testing.T) {
	c := payload(func(h *hpu.HER) spin.Code {
		if h.Notify(1, []byte("told")) != nil {
			return spin.Fail
		}
		var buf [8]byte
		n, status, err := h.Ask(2, []byte("question"), buf[:])
		if err != nil || status != 5 {
			return spin.Drop
		}
		b, err := h.SendNew(60)
		if err != nil {
			return spin.Fail
		}
		clear(b)
		copy(b, buf[:n])
		if h.AskThen(3, buf[:n], func(h *hpu.HER, r *hpu.Reply) spin.Code {
			if r.Err != nil {
				h.Logf("%v", r.Err)
				return spin.Drop
			}
			return echo(h)
		}) != nil {
			return spin.Drop
		}
		return spin.Success
	})
	c.Queue = true
	n := New(t, c)
	var asked []string
	n.Answer(func(r Request) Answer {
		asked = append(asked, fmt.Sprintf("%d %s %v", r.Tag, r.Payload, r.Reply))
		return Answer{Status: 5, Payload: []byte("answer")}
	})
	out := n.Packet(hello)
	for range 1000 { // the test always waits for the whole of it
		if out := n.Packet(hello); len(out.Sent) != 2 || len(out.Requests) != 3 {
			t.Fatalf("%+v", out)
		}
	}
	if got := strings.Join(asked[:3], ", "); got != "1 told false, 2 question true, 3 answer true" {
		t.Errorf("asked %s", got)
	}
	if len(out.Sent) != 2 || !bytes.HasPrefix(out.Sent[0], []byte("answer")) || len(out.Requests) != 3 {
		t.Errorf("%+v", out)
	}
	n.Detach()
	if out := n.Packet(hello); out.Code() != spin.Fail {
		t.Errorf("without application: %v", out.Code())
	}
}

// TestDetach is the end of the application while handlers wait for it.
func TestOf(t *testing.T) {
	var got string
	set := &handlers.Set{
		Handlers: hpu.Handlers{Payload: func(h *hpu.HER) spin.Code {
			got = fmt.Sprintf("%s, %d, %d", h.Message().State(), len(h.Memory()), len(h.HPUMemory()))
			if err := h.Notify(1, nil); err != nil {
				t.Error(err)
			}
			return spin.Success
		}},
		Rulesets: []matcher.Ruleset{matcher.SLMP()}, State: 5, Initial: []byte("state"), Memory: 100, HPUMemory: 30, Queue: true,
	}
	n := New(t, Of(set))
	if out := n.Packet(Message(Peer(4000), 1, []byte("hello"), 100)...); out.Code() != spin.Success || len(out.Requests) != 1 || got != "state, 100, 30" {
		t.Errorf("%v, %d requests, %s", out.Code(), len(out.Requests), got)
	}
}

// What a continuation returns is in the statistics: the outcome has the handler's.
func TestContinuationsAreCounted(t *testing.T) {
	for _, format := range []string{"packet", "slmp"} {
		for _, c := range []struct {
			code            spin.Code
			dropped, failed uint64
		}{{spin.Success, 0, 0}, {spin.Drop, 1, 0}, {spin.Fail, 0, 1}} {
			n := New(t, Config{Queue: true, Format: matcher.FormatByName(format), Handlers: hpu.Handlers{Payload: func(h *hpu.HER) spin.Code {
				if err := h.AskThen(1, nil, func(*hpu.HER, *hpu.Reply) spin.Code { return c.code }); err != nil {
					t.Error(err)
				}
				return spin.Success
			}}})
			n.Answer(func(Request) Answer { return Answer{} })
			out := n.Packet(Message(Peer(4000), 1, []byte("hello"), 100)...)
			if s := n.Stats(); out.Code() != spin.Success || len(out.Calls) != 1 || s.Dropped != c.dropped || s.Failed != c.failed {
				t.Errorf("%s, %v: outcome %v, %d calls; %d handled, %d dropped, %d failed", format, c.code, out.Code(), len(out.Calls), s.Handled, s.Dropped, s.Failed)
			}
		}
	}
}

func TestDetach(t *testing.T) {
	c := payload(func(h *hpu.HER) spin.Code {
		if h.AskThen(3, nil, func(h *hpu.HER, r *hpu.Reply) spin.Code {
			if !errors.Is(r.Err, hostq.ErrDetached) {
				t.Errorf("answer %+v", r)
			}
			h.Logf("gone")
			return spin.Drop
		}) != nil {
			return spin.Drop
		}
		return spin.Success
	})
	c.Queue = true
	n := New(t, c)
	if out := n.Packet(hello, hello); len(out.Requests) != 2 {
		t.Fatalf("%+v", out)
	}
	if out := n.Detach(); len(out.Log) != 2 {
		t.Errorf("%+v", out)
	}
	if s := n.Stats(); s.Unanswered != 2 {
		t.Errorf("%d unanswered", s.Unanswered)
	}
}

// TestFullRings has handlers want more than there is room for.
func TestFullRings(t *testing.T) {
	var errs []error
	c := payload(func(h *hpu.HER) spin.Code {
		for range 3 {
			_, err := h.SendNew(60)
			errs = append(errs, err, h.Notify(0, nil))
		}
		return spin.Success
	})
	c.TxRing, c.Queue, c.Requests = 2, true, 2
	out := New(t, c).Packet(hello)
	if len(out.Sent) != 2 || !errors.Is(errs[4], hpu.ErrFull) || !errors.Is(errs[5], hpu.ErrFull) || errors.Join(errs[:4]...) != nil {
		t.Errorf("%d sent, %v", len(out.Sent), errs)
	}
}

// TestStack hands a packet on.
func TestStack(t *testing.T) {
	out := New(t, payload(func(h *hpu.HER) spin.Code {
		if h.ToStack() != nil {
			return spin.Fail
		}
		return spin.Success
	})).Packet(hello)
	if len(out.Stack) != 1 || !bytes.Equal(out.Stack[0], hello) {
		t.Errorf("%+v", out)
	}
}

// TestSequences has packets of a message go to several HPUs, those of a sequence to one.
func TestSequences(t *testing.T) {
	set := &handlers.Set{
		Handlers: hpu.Handlers{Payload: func(*hpu.HER) spin.Code { return spin.Success }},
		Rulesets: []matcher.Ruleset{matcher.SLMP()}, Sequence: 1000, VHPUs: 3,
	}
	c := Of(set)
	c.HPUs = 4
	n := New(t, c)
	frames := Message(Peer(1), 1, make([]byte, 12_000), 500)
	on := map[int]int{} // HPU of a virtual HPU
	for i, f := range frames {
		call := n.Packet(f).Calls[0]
		vhpu := i / 2 % 3
		if first, ok := on[vhpu]; ok && first != call.HPU {
			t.Errorf("packet %d, of virtual HPU %d, on HPU %d and before on %d", i, vhpu, call.HPU, first)
		}
		on[vhpu] = call.HPU
	}
	if len(map[int]bool{on[0]: true, on[1]: true, on[2]: true}) < 2 {
		t.Errorf("all on one HPU: %v", on)
	}
}

// TestMessages bounds the messages in flight.
func TestMessages(t *testing.T) {
	c := payload(func(*hpu.HER) spin.Code { return spin.Success })
	c.Rulesets, c.Limits.Messages = []matcher.Ruleset{matcher.SLMP()}, 2
	n := New(t, c)
	for id := range uint32(3) {
		out := n.Packet(Message(Peer(1), id, make([]byte, 200), 100)[0])
		if ran := len(out.Calls) > 0; ran != (id < 2) {
			t.Errorf("message %d of 2 in flight: %+v", id+1, out)
		}
	}
}
