// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// The request is the handler's own copy: what a handler writes to it changes nothing but what
// becomes of the frame, and functions of the header are about the segment that came.
func TestHandlersCannotChangeTheirMessage(t *testing.T) {
	atHooks(t, testHandlersCannotChangeTheirMessage)
}

func testHandlersCannotChangeTheirMessage(t *testing.T) {
	const all = "her->payload += 8; her->payload_len -= 8; her->offset ^= 64; her->slot ^= 1; her->flags ^= 1; her->len = 0; her->hpu = 99; for (int i = 0; i < 8; i++) her->key[i] = ~her->key[i]; "
	for name, body := range map[string]string{
		"a header handler":     "XSPIN_HEADER { " + all + "return XSPIN_SUCCESS; }\nXSPIN_PAYLOAD { return xspin_deposit(ctx, her); }\nXSPIN_MESSAGES(HEADER | PAYLOAD);",
		"a payload handler":    "XSPIN_PAYLOAD { " + all + "return xspin_deposit(ctx, her); }\nXSPIN_MESSAGES(PAYLOAD);",
		"a completion handler": "XSPIN_COMPLETION { struct xspin_info i; " + all + "return xspin_about(her, &i) && i.length == 150 && !i.missing ? XSPIN_SUCCESS : XSPIN_FAIL; }\nXSPIN_MESSAGES(COMPLETION);",
	} {
		t.Run(name, func(t *testing.T) {
			o := object(t, "#include \"xspin_message.h\"\n"+body+"\nXSPIN_LICENSE(\"GPL\");\n")
			cfg, mem := messagesConfig(t, 1<<20, MessagesConfig{Messages: 4, Segments: 64})
			h := load(t, o, cfg)
			want := make([]byte, 150)
			for i := range want {
				want[i] = byte(i + 1)
			}
			for id := range uint32(3) {
				if _, err := mem.WriteAt(make([]byte, 200), 0); err != nil {
					t.Fatal(err)
				}
				runs(t, h, segment{id: id, payload: want[:100], flags: slmp.SYN}, segment{id: id, offset: 100, payload: want[100:], flags: slmp.SYN | slmp.EOM})
				got := make([]byte, len(want))
				if _, err := mem.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
					t.Errorf("message %d: the window has % x, %v", id, got, err)
				}
			}
			if s := h.Tally(); s.Started != 3 || s.Ended != 3 || s.Failed != 0 || s.Leaked != 0 || s.Busy != 0 {
				t.Errorf("three whole messages: %+v", s)
			}
		})
	}
}

// An action that a handler sets itself to what there is not is a failure, told with the handler.
func TestWrongActionsOfMessages(t *testing.T) { atHooks(t, testWrongActionsOfMessages) }

func testWrongActionsOfMessages(t *testing.T) {
	for _, tc := range []struct {
		handler string
		action  int
		failed  bool
	}{
		{"HEADER", 0, true}, {"PAYLOAD", 4, true}, {"COMPLETION", 77, true},
		{"HEADER", 1, false}, {"PAYLOAD", 3, false}, {"COMPLETION", 2, false},
	} {
		t.Run(fmt.Sprintf("%d from %s", tc.action, tc.handler), func(t *testing.T) {
			o := object(t, fmt.Sprintf("#include \"xspin_message.h\"\nXSPIN_%s { her->action = %d; return XSPIN_SUCCESS; }\nXSPIN_MESSAGES(%s);\nXSPIN_LICENSE(\"GPL\");\n", tc.handler, tc.action, tc.handler))
			cfg, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: 4, Segments: 64})
			h := load(t, o, cfg)
			v, err := h.Run((&segment{payload: make([]byte, 10), flags: slmp.EOM}).frame())
			if err != nil {
				t.Fatal(err)
			}
			if tc.failed != (v.Code == spin.Fail) || tc.failed != (h.Tally().Failed == 1) {
				t.Errorf("%+v; %+v", v, h.Tally())
			}
			if want := "the " + strings.ToLower(tc.handler) + " handler set her->action"; tc.failed && !strings.Contains(v.Detail, want) {
				t.Errorf("it says %q, want %q", v.Detail, want)
			}
		})
	}
}

// Handlers reach a window from its first to its last byte, and with the rights that they have, however
// they ask: the memory around it is somebody else's.
func TestHandlersStayInTheirWindow(t *testing.T) { atHooks(t, testHandlersStayInTheirWindow) }

func testHandlersStayInTheirWindow(t *testing.T) {
	for name, tc := range map[string]struct {
		call   string
		rights spin.Rights
		good   bool
	}{
		"a store into it":                         {"xspin_window_store(0, 4088, &v, 8)", spin.Write, true},
		"a store behind it":                       {"xspin_window_store(0, 4089, &v, 8)", spin.Write, false},
		"a store before it":                       {"xspin_window_store(0, -8ULL, &v, 8)", spin.Write, false},
		"a store with the right to read alone":    {"xspin_window_store(0, 0, &v, 8)", spin.Read, false},
		"a load with the right to write alone":    {"xspin_window_load(0, 0, &v, 8)", spin.Write, false},
		"an addition without the right":           {"xspin_window_add64(0, 0, 1, &v)", spin.Read | spin.Write, false},
		"a window that there is not":              {"xspin_window_move(1 | XSPIN_SLIP_STORE << 8 | 8 << 16, 0, &v, 8)", spin.Write, false},
		"a window far beyond all":                 {"xspin_window_move(255 | XSPIN_SLIP_STORE << 8 | 8 << 16, 0, &v, 8)", spin.Write, false},
		"a store that says it is a load":          {"xspin_window_move(0 | XSPIN_SLIP_LOAD << 8 | 8 << 16, 0, &v, 8)", spin.Write, false},
		"a way that there is not":                 {"xspin_window_move(0 | 99 << 8 | 8 << 16, 0, &v, 8)", spin.Read, false},
		"a piece that there is not":               {"xspin_window_move(0 | XSPIN_SLIP_STORE << 8 | 3 << 16, 4089, &v, 8)", spin.Write, false},
		"a piece of which one byte is in it":      {"xspin_window_move(0 | XSPIN_SLIP_STORE << 8 | 8 << 16, 4095, &v, 1)", spin.Write, false},
		"pieces of which the last lies behind it": {"xspin_window_move(0 | XSPIN_SLIP_STORE << 8 | 4 << 16, 4090 + (her->len & 1), &v, 6)", spin.Write, false},
		"a frame's bytes behind it":               {"xspin_window_write(ctx, 0, 4090, 0, 8)", spin.Write, false},
		"a frame's bytes, more than there are":    {"xspin_window_write(ctx, 0, 0, 0, 4000)", spin.Write, false},
		"a word that is not aligned, atomically":  {"xspin_window_cas64(0, 4, 0, 1, &v)", spin.Atomic, false},
	} {
		t.Run(name, func(t *testing.T) {
			o := object(t, "#include \"xspin_message.h\"\nXSPIN_PAYLOAD { __u64 v = ~0ULL; (void)v; return "+tc.call+"; }\nXSPIN_MESSAGES(PAYLOAD);\nXSPIN_LICENSE(\"GPL\");\n")
			mem, err := hostq.NewMemory("test", 1<<20)
			if err != nil {
				t.Fatal(err)
			}
			defer mem.Close()
			h := load(t, o, HandlersConfig{Format: matcher.FormatByName("slmp"), Messages: MessagesConfig{Protocol: SLMP, Messages: 2, Segments: 64,
				Windows: []WindowConfig{{Map: mem.Map(), Off: 8192, Size: 4096, Rights: tc.rights}}}})
			v, err := h.Run((&segment{payload: make([]byte, 10), flags: slmp.EOM}).frame())
			if err != nil || tc.good != (v.Code == spin.Success) || !tc.good && v.Code != spin.Segv {
				t.Errorf("%+v, %v", v, err)
			}
			for i, b := range mem.Bytes() {
				if b != 0 && (i < 8192 || i >= 8192+4096) {
					t.Fatalf("byte %d is %#x: the window has 8192 to 12287", i, b)
				}
				if b != 0 && !tc.good && tc.rights&spin.Write == 0 {
					t.Fatalf("byte %d was written", i)
				}
			}
		})
	}
}

// scribble fills memory that a program and user space share with noise, until it is stopped.
func scribble(b []byte, seed uint64, stop <-chan struct{}) {
	r := rand.New(rand.NewPCG(seed, 1))
	for {
		select {
		case <-stop:
			return
		default:
		}
		for range 100 {
			n := r.IntN(len(b)/8) * 8
			v := r.Uint64()
			if r.IntN(2) == 0 {
				v = uint64(r.IntN(8))
			}
			*(*uint64)(unsafe.Pointer(&b[n])) = v
		}
	}
}

// Whatever stands in the memory that user space shares with the engine, nothing that user space does
// with it hangs, panics or reaches beyond.
func TestNoMappedNumberIsTrusted(t *testing.T) {
	o := object(t, tellingSource)
	cfg, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: 64, Segments: 64, Events: 1 << 14})
	h, err := o.Load(cfg)
	if err != nil {
		t.Fatal(err)
	}
	var maps [][]byte
	for _, name := range []string{bpf.HandlersCPU, bpf.MessagesSlots, bpf.MessagesTallies, bpf.MessagesReceives, bpf.MessagesPosted, bpf.MessagesBits} {
		m := h.coll.Maps[name]
		b, err := mapAll[byte](m, int(m.MaxEntries()*m.ValueSize()))
		if err != nil {
			t.Fatal(err)
		}
		defer unmapAll(b)
		maps = append(maps, b)
	}
	stop := make(chan struct{})
	var scribblers sync.WaitGroup
	for i, b := range maps {
		scribblers.Go(func() { scribble(b, uint64(i), stop) })
	}
	end := time.Now().Add(testenv.SoakTime(2 * time.Second))
	calls := map[string]func(){
		"Stats":        func() { h.Stats() },
		"Clear":        func() { h.Clear() },
		"Tally":        func() { h.Tally() },
		"OpenMessages": func() { h.OpenMessages() },
		"Posted":       func() { h.Posted() },
		"Post":         func() { _ = h.Post(Receive{Tag: 1}) },
		"Unpost":       func() { h.Unpost(Receive{Tag: 1}) },
		"Take":         func() { h.Take(1) },
		"Expire": func() {
			_, _ = h.Expire(h.Stop(0, spin.TimedOut))
		},
		"Run": func() { _, _ = h.Run((&segment{id: 1, payload: make([]byte, 24), flags: slmp.SYN | slmp.EOM}).frame()) },
	}
	for n := 0; time.Now().Before(end) || n == 0; n++ {
		for name, call := range calls {
			done := make(chan struct{})
			go func() { defer close(done); call() }()
			select {
			case <-done:
			case <-time.After(time.Minute * testenv.Slowness()):
				t.Fatalf("%s has taken a minute", name)
			}
		}
	}
	close(stop)
	scribblers.Wait()
	if err := h.Close(); err != nil {
		t.Error(err)
	}
}
