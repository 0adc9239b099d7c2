// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/packet"
	"github.com/xspin/xspin/spin"
)

func windowOn(t *testing.T, b []byte, r spin.Rights) *hostq.Window {
	t.Helper()
	w, err := hostq.WindowOn(b, r)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func TestInitRunsOnAnHPU(t *testing.T) {
	r := newRig(t, rigConfig{hpus: 4, Config: Config{Workers: 2, Limit: 50 * time.Millisecond}})
	bad := errors.New("no table")
	memory := make([]byte, 16)
	c := r.withResources(1, Handlers{Payload: func(h *HER) spin.Code { return spin.Success }, Init: func(t *Task) error {
		copy(t.Memory(), "ready")
		copy(t.HPUMemory(), fmt.Sprint(t.HPU(), len(t.HPUMemory())))
		return bad
	}}, Resources{Memory: windowOn(t, memory, spin.All), PerHPU: windowOn(t, make([]byte, 40), spin.All)})
	if err := r.Init(c); !errors.Is(err, bad) {
		t.Errorf("the init handler's error is %v", err)
	}
	if !strings.HasPrefix(string(memory), "ready") || !strings.HasPrefix(string(c.perHPU), "0 10") {
		t.Errorf("memory is %q, %q", memory, c.perHPU)
	}
	panics := r.withResources(2, Handlers{Init: func(*Task) error { panic("no") }}, Resources{})
	if err := r.Init(panics); err == nil || !strings.Contains(err.Error(), "panic: no") {
		t.Error(err)
	}
	release := make(chan struct{})
	hangs := r.withResources(3, Handlers{Init: func(*Task) error { <-release; return nil }}, Resources{})
	if err := r.Init(hangs); !errors.Is(err, errGone) || !hangs.Stopped() {
		t.Errorf("%v, stopped: %v", err, hangs.Stopped())
	}
	close(release)
	r.settled()
}

func TestTimersRunWhenTheContextIsReady(t *testing.T) {
	r := newRig(t, rigConfig{hpus: 4, Config: Config{Workers: 2}})
	var n atomic.Int64
	c := r.withResources(1, Handlers{Timer: func(task *Task) spin.Code {
		if n.Add(1) == 3 {
			frame, err := task.SendNew(60)
			if err != nil {
				t.Error(err)
				return spin.Fail
			}
			copy(frame, numbered(77, 60))
			return spin.Success
		}
		return spin.Drop // there is nothing to drop
	}}, Resources{Timer: time.Millisecond})
	other := r.withResources(2, Handlers{Payload: func(*HER) spin.Code { return spin.Success }}, Resources{})
	if err := r.Init(other); err != nil {
		t.Fatal(err)
	}
	r.receive(pkt{ctx: 2, data: numbered(1, 60)})
	eventually(t, "the packet is handled", r.idle)
	if n.Load() != 0 {
		t.Error("the timer ran before Init")
	}
	if err := r.Init(c); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the timer runs, and what it sends leaves", func() bool {
		f := r.wireFrames()
		return len(f) == 1 && number(f[0].data) == 77
	})
	eventually(t, "it is counted", func() bool { return c.Stats().Timers >= 3 })
	if st := c.Stats(); st.Dropped != 0 || st.Handled != 0 {
		t.Errorf("timers count as packets: %+v", st)
	}
	if err := r.Drain(c, time.Second); err != nil {
		t.Fatal(err)
	}
	after := n.Load()
	r.receive(pkt{ctx: 2, data: numbered(1, 60)})
	r.settled()
	if n.Load() != after {
		t.Error("the timer ran after Drain")
	}
}

func TestResourcesThatMakeNoSense(t *testing.T) {
	timer := func(*Task) spin.Code { return spin.Success }
	for _, tc := range []struct {
		name string
		h    Handlers
		r    Resources
	}{
		{"timer too fast", Handlers{Timer: timer}, Resources{Timer: time.Microsecond}},
		{"timer without handler", Handlers{}, Resources{Timer: time.Second}},
		{"handler without timer", Handlers{Timer: timer}, Resources{}},
		{"full", Handlers{}, Resources{Full: 7}},
		{"memory that cannot be written", Handlers{}, Resources{Memory: windowOn(t, make([]byte, 8), spin.Read|spin.Atomic)}},
		{"memory of HPUs that cannot be read", Handlers{}, Resources{PerHPU: windowOn(t, make([]byte, 8), spin.Write)}},
	} {
		if err := NewContext(1, "x", tc.h, bpf.Range{}).SetResources(tc.r); err == nil {
			t.Errorf("%s: no error", tc.name)
		}
	}
	r := newRig(t, rigConfig{hpus: 2, Config: Config{Workers: 2}})
	c := NewContext(1, "x", Handlers{}, bpf.Range{})
	_ = c.SetResources(Resources{Host: layoutHost{newFakeHost(t, 1, 1)}})
	if err := r.Install(c); err == nil || !strings.Contains(err.Error(), "1 lanes") {
		t.Error(err)
	}
}

type layoutHost struct{ *fakeHost }

func (layoutHost) Layout() hostq.Layout { return hostq.Layout{Lanes: 1} }

// The host activates a context: all handlers run for the range of a window, in order.
func TestTriggeredMessage(t *testing.T) {
	bothTables(t, func(t *testing.T, shared bool) {
		window := make(Memory, 10000)
		for i := range window {
			window[i] = content(3, i)
		}
		var got bytes.Buffer
		var words [][4]uint64
		b := newBench(t, benchConfig{shared: shared, rig: rigConfig{hpus: 4, Config: Config{Workers: 2}},
			payload: func(h *HER) spin.Code {
				host := h.Message().Words() != [4]uint64{}
				if host && (int(h.Offset()) != got.Len() || h.PayloadLen() > 100 || len(h.Head()) != 0) {
					t.Errorf("payload of %d bytes at %d after %d, %d bytes of packet", h.PayloadLen(), h.Offset(), got.Len(), len(h.Head()))
				}
				for p := range h.Payload() {
					got.Write(p)
				}
				words = append(words, h.Message().Words())
				if host && (h.Send() == nil || h.ToStack() == nil) {
					t.Error("sent a packet that is not there")
				}
				return spin.Success
			}})
		for i, n := range []int64{5000, 0, 100, 101} {
			got.Reset()
			words = nil
			if err := b.Trigger(b.c, Trigger{Words: [4]uint64{1, 2, 3, uint64(i)}, Window: window, Offset: 77, Length: n, Slice: 100}); err != nil {
				t.Fatal(err)
			}
			if e := b.event(); e.Cause != spin.Complete || e.Length != uint64(n) || e.Source.IsValid() || e.Missing != 0 {
				t.Errorf("%d bytes: %+v", n, e)
			}
			if !bytes.Equal(got.Bytes(), window[77:77+n]) {
				t.Errorf("%d bytes: the handlers saw something else", n)
			}
			for _, w := range words {
				if w != [4]uint64{1, 2, 3, uint64(i)} {
					t.Errorf("%d bytes: words %v", n, w)
				}
			}
			if want := max(1, (n+99)/100); int64(len(words)) != want {
				t.Errorf("%d bytes: %d payload HERs, want %d", n, len(words), want)
			}
		}
		// Packets have no words.
		words = nil
		got.Reset()
		b.send(cut(1, 1, peerA, 100, 100)[0])
		b.event()
		if len(words) != 1 || words[0] != [4]uint64{} {
			t.Errorf("words of a packet: %v", words)
		}
		if st := b.c.Stats(); st.Triggers != 4 {
			t.Errorf("%d triggers", st.Triggers)
		}
		b.over()
	})
}

func TestTriggersThatCannotBe(t *testing.T) {
	window := make(Memory, 100)
	full := errors.New("nowhere")
	b := newBench(t, benchConfig{change: func(m *MessageConfig) {
		m.Binder = &funcBinder{bind: func(*Message) error { return full }}
	}})
	plain := b.install(2, func(*HER) spin.Code { return spin.Success })
	for _, tc := range []struct {
		name string
		c    *Context
		t    Trigger
		want error
	}{
		{"no messages", plain, Trigger{}, nil},
		{"no window", b.c, Trigger{Length: 1}, nil},
		{"behind the end", b.c, Trigger{Window: window, Offset: 1, Length: 100}, spin.ErrBounds},
		{"before the begin", b.c, Trigger{Window: window, Offset: -1, Length: 1}, spin.ErrBounds},
		{"negative", b.c, Trigger{Window: window, Offset: 10, Length: -1}, nil},
		{"far", b.c, Trigger{Window: window, Offset: 1 << 62, Length: 1 << 62}, nil},
		{"slice", b.c, Trigger{Window: window, Length: 1, Slice: 1 << 20}, nil},
		{"unbound", b.c, Trigger{Window: window, Length: 100, Slice: 10}, ErrFull},
	} {
		err := b.Trigger(tc.c, tc.t)
		if err == nil || tc.want != nil && !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", tc.name, err, tc.want)
		}
	}
	b.over()
	b.close()
	if err := b.Trigger(b.c, Trigger{}); !errors.Is(err, errClosed) {
		t.Error(err)
	}
}

// A long host message does not keep packets waiting, and ends with its context.
func TestLongTriggerEndsWithItsContext(t *testing.T) {
	window := make(Memory, 1<<20)
	var n atomic.Int64
	b := newBench(t, benchConfig{payload: func(h *HER) spin.Code { n.Add(1); time.Sleep(10 * time.Microsecond); return spin.Success }})
	seen := make(chan struct{}, 10)
	b.install(2, func(*HER) spin.Code { seen <- struct{}{}; return spin.Success })
	if err := b.Trigger(b.c, Trigger{Window: window, Length: 1 << 20, Slice: 1}); err != nil {
		t.Fatal(err)
	}
	b.receive(pkt{ctx: 2, data: numbered(1, 60)})
	<-seen
	if err := b.Drain(b.c, time.Second); err != nil {
		t.Fatal(err)
	}
	if e := b.event(); e.Cause != spin.Removed || n.Load() >= 1<<20 {
		t.Errorf("%+v after %d slices", e, n.Load())
	}
	b.over()
}

// A tap sees frames as they came, what became of them, and what was sent.
func TestTap(t *testing.T) {
	b := newBench(t, benchConfig{payload: func(h *HER) spin.Code {
		h.Head()[52] ^= 0xff
		if h.Offset() == 100 {
			return spin.Drop
		}
		return spin.Success
	}})
	tap := &recorder{}
	b.c.SetTap(tap)
	p := cut(1, 1, peerA, 300, 100)
	b.send(p...)
	b.event()
	b.send(p[1])
	b.quiet(0)
	b.c.SetTap(nil)
	b.send(p[2])
	b.over()
	tap.mu.Lock()
	defer tap.mu.Unlock()
	var in, out []string
	for i, r := range tap.records {
		if r.Out {
			out = append(out, r.Verdict)
			continue
		}
		in = append(in, fmt.Sprintf("%d at %d: %s", r.Number, r.Offset, r.Verdict))
		if !bytes.Equal(tap.frames[i], p[r.Offset/100].data) || !r.Message || r.Size != len(p[r.Offset/100].data) {
			t.Errorf("frame at %d is not as it came", r.Offset)
		}
	}
	if got, want := fmt.Sprint(in), "[1 at 0: success 1 at 100: drop 1 at 200: success 1 at 100: duplicate]"; got != want {
		t.Errorf("saw %s, want %s", got, want)
	}
	if len(out) != 4 {
		t.Errorf("%d answers seen, want 4", len(out))
	}
}

type recorder struct {
	mu      sync.Mutex
	records []TapRecord
	frames  [][]byte
}

func (r *recorder) Packet(rec *TapRecord, frame []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.records = append(r.records, *rec)
	r.frames = append(r.frames, bytes.Clone(frame))
}

type lines struct {
	mu   sync.Mutex
	text []string
}

func (l *lines) Log(now int64, hpu int, text []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = append(l.text, fmt.Sprintf("%d %v %s", hpu, now > 0, text))
}

type oneHop struct{ mac [6]byte }

func (o oneHop) Resolve(dst netip.Addr) (spin.Hop, error) {
	if dst != netip.MustParseAddr("10.9.9.9") {
		return spin.Hop{}, fmt.Errorf("%v: %w", dst, spin.ErrUnresolved)
	}
	return spin.Hop{Source: netip.MustParseAddr("10.0.0.1"), SourceMAC: [6]byte{2, 1}, MAC: o.mac, MTU: 1500}, nil
}

func (o oneHop) From(src netip.Addr) (spin.Hop, bool) {
	return spin.Hop{Source: src, SourceMAC: [6]byte{2, 1}, MTU: 1500}, src == netip.MustParseAddr("10.0.0.1")
}

func TestLogAndDatagramsOfHandlers(t *testing.T) {
	r := newRig(t, rigConfig{})
	log := &lines{}
	c := r.withResources(1, Handlers{Payload: func(h *HER) spin.Code {
		h.Logf("packet %d", number(h.Head()))
		if _, err := h.SendUDP(1, netip.MustParseAddrPort("10.9.9.8:2"), 5); !errors.Is(err, spin.ErrUnresolved) {
			t.Error(err)
		}
		if _, err := h.SendUDP(1, netip.MustParseAddrPort("10.9.9.9:2"), 1473); !errors.Is(err, ErrSize) {
			t.Error(err)
		}
		p, err := h.SendUDP(1000, netip.MustParseAddrPort("10.9.9.9:2000"), 5)
		if err != nil {
			t.Error(err)
			return spin.Fail
		}
		copy(p, "hello")
		return spin.Success
	}}, Resources{Log: log, Resolver: oneHop{[6]byte{2, 9}}})
	r.receive(pkt{ctx: 1, data: numbered(5, 60)})
	eventually(t, "the datagram leaves", func() bool { return len(r.wireFrames()) == 1 })
	f := r.wireFrames()[0].data
	if want := []byte{2, 9, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 8, 0, 0x45, 0, 0, 33}; !bytes.HasPrefix(f, want) || checksum(f[14:34]) != 0 ||
		!bytes.Equal(f[26:42], []byte{10, 0, 0, 1, 10, 9, 9, 9, 1000 >> 8, 1000 & 255, 2000 >> 8, 2000 & 255, 0, 13, 0, 0}) ||
		string(f[42:47]) != "hello" || len(f) != 60 {
		t.Errorf("sent % x", f)
	}
	r.settled()
	if len(log.text) != 1 || log.text[0] != "0 true packet 5" {
		t.Errorf("logged %q", log.text)
	}
	_ = c
}

// Who sent a packet is reached where it came from, a router if need be.
func TestSenderIsReachedWhereItCameFrom(t *testing.T) {
	us, router, other := [6]byte{2, 1}, [6]byte{2, 7}, [6]byte{2, 8}
	here, peer, nobody := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("10.0.0.3")
	for _, tt := range []struct {
		name     string
		dst, src [6]byte
		from, to netip.Addr
		ask      netip.Addr
		turn, ok bool
	}{
		{"its sender", us, router, peer, here, peer, false, true},
		{"its sender, turned round", us, router, peer, here, peer, true, true},
		{"somebody else", us, router, peer, here, nobody, false, false},
		{"ourselves", us, router, peer, here, here, false, false},
		{"to another host", us, router, peer, nobody, peer, false, false},
		{"to another MAC", other, router, peer, here, peer, false, false},
		{"to all", [6]byte{255, 255, 255, 255, 255, 255}, router, peer, here, peer, false, false},
		{"from a group", us, [6]byte{3}, peer, here, peer, false, false},
		{"from no MAC", us, [6]byte{}, peer, here, peer, false, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, rigConfig{})
			frame := make([]byte, 60)
			eth := packet.Ethernet(frame)
			eth.SetDst(tt.dst)
			eth.SetSrc(tt.src)
			eth.SetEtherType(packet.EtherTypeIPv4)
			ip := packet.IPv4(frame[14:])
			ip[0], ip[3], ip[9] = 0x45, 46, packet.ProtocolUDP
			ip.SetSrc(tt.from.As4())
			ip.SetDst(tt.to.As4())
			packet.UDP(ip[20:]).SetLength(26)
			type answer struct {
				hop spin.Hop
				err error
			}
			got := make(chan answer, 1)
			r.withResources(1, Handlers{Payload: func(h *HER) spin.Code {
				if tt.turn {
					h.Headers().Ethernet.Swap()
					h.Headers().IPv4.SwapAddrs()
				}
				hop, err := h.Resolve(tt.ask)
				got <- answer{hop, err}
				return spin.Success
			}}, Resources{Resolver: oneHop{}})
			r.receive(pkt{ctx: 1, data: frame})
			a := <-got
			want := spin.Hop{Source: here, SourceMAC: us, MAC: router, MTU: 1500}
			if tt.ok && (a.err != nil || a.hop != want) || !tt.ok && !errors.Is(a.err, spin.ErrUnresolved) {
				t.Errorf("%+v, %v", a.hop, a.err)
			}
			r.settled()
		})
	}
}
