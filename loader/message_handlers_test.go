// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"encoding/binary"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/loader/objecttest"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// tellingSource uses all that xspin_message.h has for handlers.
const tellingSource = `#define XSPIN_STATE 16
#include "xspin_message.h"

struct state {
	__u64 bytes;
	__u64 segments;
};

XSPIN_HEADER
{
	struct xspin_info i;

	if (!xspin_about(her, &i) || i.known || i.length != her->payload_len || i.cause != XSPIN_COMPLETE)
		return XSPIN_FAIL;
	xspin_log("message %u, in slot %u: 100%", i.number, i.slot);
	return XSPIN_SUCCESS;
}

/* A payload of 24 bytes is an order: what to do, where, and with what. */
XSPIN_PAYLOAD
{
	struct state *s = xspin_state(her);
	__u64 o[3], was = 0;
	int code = XSPIN_FAIL;

	if (!s)
		return XSPIN_FAIL;
	__sync_fetch_and_add(&s->bytes, her->payload_len);
	__sync_fetch_and_add(&s->segments, 1);
	if (her->payload_len != sizeof(o))
		return XSPIN_SUCCESS;
	if (xspin_load(ctx, her->payload, o, sizeof(o)))
		return XSPIN_SEGV;
	switch (o[0]) {
	case 0:
		return xspin_window_write(ctx, 0, o[1], her->payload + 16, o[2]);
	case 1:
		return xspin_window_store(0, o[1], &o[2], 8);
	case 2:
		code = xspin_window_load(0, o[1], &was, 8);
		break;
	case 3:
		code = xspin_window_add64(0, o[1], o[2], &was);
		break;
	case 4:
		code = xspin_window_cas64(0, o[1], 5, o[2], &was);
		break;
	case 5: /* the second may be read, and no more */
		code = xspin_window_load(1, o[1], &was, 8);
		break;
	case 6:
		return xspin_window_store(1, o[1], &o[2], 8);
	case 7:
		return xspin_window_write(ctx, 1, o[1], her->payload + 16, 8);
	case 8:
		return xspin_window_add64(1, o[1], 1, &was);
	case 9: /* there is none */
		return xspin_window_load(2, o[1], &was, 8);
	}
	if (!code)
		xspin_notify(was, her->offset, 0);
	return code;
}

XSPIN_COMPLETION
{
	struct state *s = xspin_state(her);
	struct xspin_info i;

	if (!s || !xspin_about(her, &i))
		return XSPIN_FAIL;
	xspin_notify(1000 + i.cause, s->bytes << 32 | s->segments, i.length << 32 | i.missing);
	xspin_log("ends %d %x %u", -1, i.number);
	return XSPIN_SUCCESS;
}

XSPIN_MESSAGES(HEADER | PAYLOAD | COMPLETION);
XSPIN_LICENSE("GPL");
`

// telling loads such handlers with two windows, of which the second can be read only. The
// first begins 8 bytes into its memory, and goes on in the next MiB.
func telling(t *testing.T) (h *Handlers, first, second *hostq.Window) {
	t.Helper()
	cfg, first := messagesConfig(t, 1<<20, MessagesConfig{Messages: 2, Segments: 64, Events: 1 << 14})
	mem, err := hostq.NewMemory("test", 4096)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mem.Close() })
	if second, err = mem.Window(4000, 96, spin.All); err != nil {
		t.Fatal(err)
	}
	cfg.Messages.Windows = append(cfg.Messages.Windows, WindowConfig{Map: mem.Map(), Off: 4000, Size: 96, Rights: spin.Read})
	o := object(t, tellingSource)
	if !o.Notes() || depositObject(t).Notes() {
		t.Error("who has notes is not told")
	}
	return load(t, o, cfg), first, second
}

// notes reads all that handlers have said.
func notes(t *testing.T, h *Handlers) (all []Note) {
	t.Helper()
	r := eventReader(t, h)
	for {
		rec, err := r.Read()
		if err != nil {
			return all
		}
		if n, ok := ReadNote(rec.RawSample); ok {
			if n.Time == 0 || n.HPU > 1<<10 {
				t.Errorf("%+v", n)
			}
			n.Time, n.HPU = 0, 0
			all = append(all, n)
		} else if _, ok := ReadEvent(rec.RawSample); !ok {
			t.Errorf("neither note nor end: %x", rec.RawSample)
		}
	}
}

func word(v ...uint64) (b []byte) {
	for _, v := range v {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

// Handlers have memory of each message, which begins at 0, know their message, and say what
// they like; also when a message ends by its timeout.
func TestStateAndNotesOfMessages(t *testing.T) { atHooks(t, testStateAndNotesOfMessages) }

func testStateAndNotesOfMessages(t *testing.T) {
	h, _, _ := telling(t)
	ten := make([]byte, 10)
	const syn, eom = slmp.SYN, slmp.EOM
	for i, all := range [][]segment{
		{{id: 7, payload: ten}, {id: 7, payload: ten, offset: 10}, {id: 7, payload: ten[:3], offset: 20, flags: eom}},
		{{id: 8, flags: eom}},
		{{id: 9, payload: ten}, {id: 9, payload: ten, offset: 30, flags: eom}},
	} {
		runs(t, h, all...)
		cause := uint64(0)
		if i == 2 {
			cause = uint64(spin.Removed)
			if n, err := h.Expire(h.Stop(0, spin.Removed)); n != 1 || err != nil {
				t.Fatalf("%d ended, %v", n, err)
			}
		}
		id := uint64(7 + i)
		text := []string{"message 7, in slot 0: 100%", "message 8, in slot 1: 100%", "message 9, in slot 0: 100%"}[i]
		last := []string{"ends -1 7 %u", "ends -1 8 %u", "ends -1 9 %u"}[i]
		counts := [][2]uint64{{23<<32 | 3, 23 << 32}, {1, 0}, {20<<32 | 2, 40<<32 | 20}}[i]
		slot := uint64(i % 2)
		want := []Note{
			{Words: [2]uint64{id, slot}, Text: text, Log: true},
			{Tag: 1000 + cause, Words: counts},
			{Words: [2]uint64{^uint64(0), id}, Text: last, Log: true},
		}
		if got := notes(t, h); !slices.Equal(got, want) {
			t.Errorf("message %d: notes\n%+v\nwant\n%+v", id, got, want)
		}
	}
	if s := h.Stats(); s.Failed != 0 {
		t.Errorf("%+v", s)
	}
}

// What handlers do with windows is what package hostq does with the same: within bounds and
// rights, and nowhere else.
func TestWindowsOfMessages(t *testing.T) { atHooks(t, testWindowsOfMessages) }

func testWindowsOfMessages(t *testing.T) {
	h, first, second := telling(t)
	if _, err := first.WriteAt(word(5), 64); err != nil {
		t.Fatal(err)
	}
	if _, err := second.WriteAt(word(77), 88); err != nil {
		t.Fatal(err)
	}
	const size = 1 << 20
	const edge = size - 8 // of the first MiB of memory: the window begins 8 bytes into it
	for i, tt := range []struct {
		do, at, with uint64
		code         spin.Code
		tells        []uint64         // what was there
		is           map[int64]uint64 // in the first window
		why          string
	}{
		{1, 8, 123, spin.Success, nil, map[int64]uint64{8: 123}, ""},
		{1, 3, 0x0102030405060708, spin.Success, nil, map[int64]uint64{3: 0x0102030405060708}, ""},
		{2, 64, 0, spin.Success, []uint64{5}, nil, ""},
		{3, 64, 7, spin.Success, []uint64{5}, map[int64]uint64{64: 12}, ""},
		{4, 64, 9, spin.Success, []uint64{12}, map[int64]uint64{64: 12}, ""},
		{1, 64, 5, spin.Success, nil, map[int64]uint64{64: 5}, ""},
		{4, 64, 9, spin.Success, []uint64{5}, map[int64]uint64{64: 9}, ""},
		{0, 4096, 8, spin.Success, nil, map[int64]uint64{4096: 8, 4104: 0}, ""},
		{0, edge - 3, 8, spin.Success, nil, map[int64]uint64{edge - 3: 8}, ""}, // in two MiB
		{0, size - 8, 8, spin.Success, nil, map[int64]uint64{size - 8: 8}, ""},
		{5, 88, 0, spin.Success, []uint64{77}, nil, ""},

		{0, size - 7, 8, spin.Segv, nil, nil, "xspin_window_write of bytes 1048569 to 1048577 of window 0, which has 1048576: out of bounds"},
		{0, 1 << 63, 8, spin.Segv, nil, nil, "xspin_window_write of bytes 9223372036854775808 to 9223372036854775816 of window 0, which has 1048576: out of bounds"},
		{0, ^uint64(0) - 3, 8, spin.Segv, nil, nil, "xspin_window_write of 8 bytes from 18446744073709551612 on of window 0, which has 1048576: out of bounds"},
		{0, 0, 1<<14 + 1, spin.Segv, nil, nil, "xspin_window_write of bytes 68 to 16453 of a frame: only 16384 can be had"},
		{1, size - 7, 1, spin.Segv, nil, nil, "xspin_window_store of bytes 1048569 to 1048577 of window 0, which has 1048576: out of bounds"},
		{1, edge - 4, 1, spin.Segv, nil, nil, "xspin_window_store of bytes 1048564 to 1048572 of window 0, which lie in two MiB of its memory"}, // in two MiB
		{2, size, 0, spin.Segv, nil, nil, "xspin_window_load of bytes 1048576 to 1048584 of window 0, which has 1048576: out of bounds"},
		{3, 4, 1, spin.Segv, nil, nil, "xspin_window_add64 at 4 of window 0: want a multiple of 8"}, // not aligned
		{4, 1, 1, spin.Segv, nil, nil, "xspin_window_cas64 at 1 of window 0: want a multiple of 8"},
		{3, size, 1, spin.Segv, nil, nil, "xspin_window_add64 of bytes 1048576 to 1048584 of window 0, which has 1048576: out of bounds"},
		{5, 89, 0, spin.Segv, nil, nil, "xspin_window_load of bytes 89 to 97 of window 1, which has 96: out of bounds"},
		{6, 88, 1, spin.Segv, nil, nil, "xspin_window_store on window 1, whose handlers lack the right w, to write"},
		{7, 88, 1, spin.Segv, nil, nil, "xspin_window_write on window 1, whose handlers lack the right w, to write"},
		{8, 88, 1, spin.Segv, nil, nil, "xspin_window_add64 on window 1, whose handlers lack the right a, for atomic operations"},
		{9, 0, 1, spin.Segv, nil, nil, "xspin_window_load on window 2, which the context does not have"},
	} {
		before, err := first.Slice(0, size, spin.Read)
		if err != nil {
			t.Fatal(err)
		}
		was := bytes.Clone(before)
		failed := h.Stats().Failed
		v, err := h.Run((&segment{from: i, payload: word(tt.do, tt.at, tt.with), flags: slmp.EOM}).frame())
		if err != nil {
			t.Fatal(err)
		}
		if v.Code != tt.code || (h.Stats().Failed > failed) != (tt.code != spin.Success) {
			t.Errorf("order %d %#x %d: %v, want %v", tt.do, tt.at, tt.with, v.Code, tt.code)
		}
		if tt.why != "" && v.Detail != "the payload handler returned Segv: "+tt.why {
			t.Errorf("order %d %#x %d: %q, want %q behind the handler", tt.do, tt.at, tt.with, v.Detail, tt.why)
		}
		var told []uint64
		for _, n := range notes(t, h) {
			if !n.Log && n.Tag < 1000 {
				told = append(told, n.Tag)
			}
		}
		if !slices.Equal(told, tt.tells) {
			t.Errorf("order %d %#x %d: was %v, want %v", tt.do, tt.at, tt.with, told, tt.tells)
		}
		for at, want := range tt.is {
			binary.LittleEndian.PutUint64(was[at:], want)
		}
		if !bytes.Equal(before, was) {
			t.Errorf("order %d %#x %d: another window", tt.do, tt.at, tt.with)
		}
		if tt.code != spin.Success {
			if n, err := h.Expire(h.Stop(0, spin.Removed)); n != 1 || err != nil {
				t.Fatalf("%d ended, %v", n, err)
			}
		}
	}
	if b, err := second.Slice(88, 8, spin.Read); err != nil || !bytes.Equal(b, word(77)) {
		t.Errorf("the second window has %x, %v", b, err)
	}
}

// What a message's state may be.
func TestWrongStates(t *testing.T) {
	o := object(t, tellingSource)
	n, err := o.MessagesMemory(MessagesConfig{})
	d, derr := depositObject(t).MessagesMemory(MessagesConfig{})
	if err != nil || derr != nil || n-d != 256*16 {
		t.Errorf("%d bytes of maps with state, %d without: want 256 times 16 more", n, d)
	}
	if _, err := o.Load(HandlersConfig{Format: matcher.FormatByName("packet")}); err == nil {
		t.Error("loaded for packets")
	}
}

// What clang says of handlers that cannot work.
func TestWrongHandlersOfMessages(t *testing.T) {
	for body, want := range map[string]string{
		"__u64 w; return xspin_window_load(4, 0, &w, 8);":                           "windows have the numbers 0 to 3",
		"return xspin_window_write(ctx, 7, 0, 0, 8);":                               "windows have the numbers 0 to 3",
		`xspin_log("` + strings.Repeat("x", 72) + `", 0, 0); return XSPIN_SUCCESS;`: "a line is too long",
	} {
		if says := objecttest.Refusal(t, "#include \"xspin_message.h\"\nXSPIN_PAYLOAD { "+body+" }\nXSPIN_MESSAGES(PAYLOAD);\nXSPIN_LICENSE(\"GPL\");\n"); !strings.Contains(says, want) {
			t.Errorf("%s: clang says:\n%s", body, says)
		}
	}
}

func TestLinesOfHandlers(t *testing.T) {
	for text, want := range map[string]string{
		"":                                  "",
		"no words":                          "no words",
		"%u and %d":                         "18446744073709551615 and -2",
		"%x%x%x":                            "fffffffffffffffffffffffffffffffe%x",
		"%%u %s %u %":                       "%18446744073709551615 %s 18446744073709551614 %",
		"\u00e4\t100%\x00gone":              "\u00e4\t100%",
		"\x1b[2J\r\nred\x7f":                "?[2J??red?",
		"\u009b31m\xc3\xff %u \u202e\u00fc": "?31m?? 18446744073709551615 ?\u00fc",
	} {
		var b [72]int8
		for i := range len(text) {
			b[i] = int8(text[i])
		}
		if got := line(b[:], [2]uint64{1<<64 - 1, 1<<64 - 2}); got != want {
			t.Errorf("%q gives %q, want %q", text, got, want)
		}
	}
}

// A message that is handed over leaves nothing but the word that it was: its receive and its
// slot are others', and all its packets go the same way, until none has come for long.
func TestHandOver(t *testing.T) {
	o := object(t, `#include "xspin_message.h"

XSPIN_HEADER
{
	__u8 first = 0;

	if (xspin_load(ctx, her->payload, &first, 1))
		return XSPIN_SEGV;
	return first == 1 ? XSPIN_HAND_OVER : XSPIN_PROCEED;
}

XSPIN_MESSAGES(HEADER | HAND_OVER);
XSPIN_LICENSE("GPL");
`)
	if !o.HandsOver() || depositObject(t).HandsOver() {
		t.Error("who hands over is not told")
	}
	cfg, w := messagesConfig(t, 1<<20, MessagesConfig{Messages: 1, Segments: 64, Events: 1 << 14, Handed: 200 * time.Millisecond})
	h := load(t, o, cfg)
	for i := range 2 {
		if err := h.Post(Receive{Ignore: ^uint32(0), User: uint64(i + 1), Place: int64(100 * i)}); err != nil {
			t.Fatal(err)
		}
	}
	theirs, ours := bytes.Repeat([]byte{1}, 10), bytes.Repeat([]byte{2}, 10)
	send := func(s segment) bool {
		t.Helper()
		s.flags |= slmp.SYN
		return runs(t, h, s)[0] != nil
	}
	// Nobody takes them here: they are dropped, and come again.
	for range 3 {
		if send(segment{id: 7, payload: theirs}) || send(segment{id: 7, payload: theirs, offset: 10, flags: slmp.EOM}) {
			t.Error("a segment is answered that was handed over")
		}
	}
	if s := h.Tally(); s.Handed != 6 || s.Started != 0 || s.Open != 0 || s.Headers != 1 || s.Leaked != 0 || h.Posted() != 2 {
		t.Errorf("%+v, %d receives posted", s, h.Posted())
	}
	if !send(segment{id: 8, payload: ours, flags: slmp.EOM}) {
		t.Error("another message is not answered")
	}
	if e := event(t, h); e.User != 1 || byteAt(t, w, 0) != 2 {
		t.Errorf("it took receive %d, want the one that was given back", e.User)
	}
	// Handlers on HPUs take what messages here leave.
	if q, ok, ever := h.Take(99); !ok || !ever || q.User != 2 || q.Place != 100 || q.Window != 0 {
		t.Errorf("took %+v, %v, %v", q, ok, ever)
	}
	if _, ok, ever := h.Take(99); ok || !ever {
		t.Error("a receive was taken twice")
	}
	// While packets come it is known, then not any more.
	for range 10 {
		time.Sleep(50 * time.Millisecond)
		send(segment{id: 7, payload: theirs, offset: 10})
	}
	if s := h.Tally(); s.Handed != 16 || s.Dropped[spin.DropNoHeader] != 0 {
		t.Errorf("%+v", s)
	}
	time.Sleep(300 * time.Millisecond)
	send(segment{id: 7, payload: theirs, offset: 10})
	if s := h.Tally(); s.Handed != 16 || s.Dropped[spin.DropNoHeader] != 1 {
		t.Errorf("%+v", s)
	}
}
