// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/handlers/handlerstest"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/loader/objecttest"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/packet"
	"github.com/xspin/xspin/spin"
)

// object compiles and checks a source of a user's.
func object(t *testing.T, source string) *Object {
	t.Helper()
	o, err := ReadObject("test.o", objecttest.Compile(t, source), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// load loads an object for a test.
func load(t *testing.T, o *Object, cfg HandlersConfig) *Handlers {
	t.Helper()
	netnstest.NeedRoot(t)
	if cfg.Format == nil {
		cfg.Format = matcher.FormatByName("packet")
	}
	if hookOf(t) == TC {
		cfg.Hook = TC
	}
	h, err := o.Load(cfg)
	if err != nil {
		var r *Rejection
		if errors.As(err, &r) {
			t.Log(strings.Join(r.Log, "\n"))
		}
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return h
}

// handlersOf returns handlers of a source, made whole by what every source has.
func handlersOf(t *testing.T, source string, cfg HandlersConfig) *Handlers {
	t.Helper()
	return load(t, object(t, "#include \"xspin_handler.h\"\nXSPIN_LICENSE(\"GPL\");\n"+source), cfg)
}

func builtin(t *testing.T, name string, params map[string]any) *Handlers {
	t.Helper()
	return builtinAt(t, XDP, name, params)
}

func builtinAt(t *testing.T, hook Hook, name string, params map[string]any) *Handlers {
	t.Helper()
	o, err := BuiltinObject(name)
	if err != nil {
		t.Fatal(err)
	}
	return load(t, o, HandlersConfig{Hook: hook, Parameters: params})
}

// hookOf is the hook that a test is for: see atHooks.
func hookOf(t *testing.T) Hook {
	if strings.Contains(t.Name()+"/", "/tc/") {
		return TC
	}
	return XDP
}

// atHooks runs a test at each hook: what it loads and attaches is for that.
func atHooks(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	for _, hook := range []Hook{XDP, TC} {
		t.Run(hook.String(), test)
	}
}

// newMemory makes HPU memory of 1 MiB.
func newMemory(t *testing.T) *ebpf.Map {
	t.Helper()
	m, err := hostq.NewMemory("test", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m.Map()
}

func possibleCPUs(t *testing.T) int {
	t.Helper()
	n, err := PossibleCPUs()
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func run(t *testing.T, h *Handlers, frame []byte) HandlersVerdict {
	t.Helper()
	v, err := h.Run(frame)
	if err != nil {
		t.Fatalf("%d bytes % x: %v", len(frame), frame, err)
	}
	return v
}

// ping and datagramOf are frames to start from.
func ping(n int) []byte {
	return handlerstest.ICMPEcho(handlerstest.PeerAddr, handlerstest.HereAddr, 7, 1, bytes.Repeat([]byte{0xa5}, n))
}

func datagramOf(n int) []byte {
	return handlerstest.UDP(handlerstest.Peer(4000), handlerstest.Here(7), bytes.Repeat([]byte{0x5a}, n))
}

// mutate returns frames like one that is answered, most of them with something that must
// keep it from that, or change how.
func mutate(rnd *rand.Rand, frame []byte) []byte {
	frame = bytes.Clone(frame)
	ip := packet.IPv4(frame[14:])
	for range 1 + rnd.IntN(2) {
		switch rnd.IntN(15) {
		case 0: // any bit of the headers
			frame[rnd.IntN(42)] ^= 1 << rnd.IntN(8)
		case 1:
			frame[rnd.IntN(42)] = byte(rnd.Uint32())
		case 2:
			frame[[]int{0, 6}[rnd.IntN(2)]] |= 1 // multicast MAC
		case 3:
			ip.SetSrc([][4]byte{{0, 1, 2, 3}, {127, 0, 0, 1}, {224, 0, 0, 1}, {255, 255, 255, 255}, {239, 1, 1, 1}, ip.Dst(), {223, 0, 0, 1}, {240, 0, 0, 1}}[rnd.IntN(8)])
		case 4:
			ip.SetDst([][4]byte{{0, 1, 2, 3}, {127, 0, 0, 1}, {224, 0, 0, 1}, {255, 255, 255, 255}, ip.Src(), {240, 0, 0, 1}}[rnd.IntN(6)])
		case 5:
			ip.SetTTL(uint8(rnd.IntN(4)))
		case 6: // fragments
			binary.BigEndian.PutUint16(ip[6:], uint16([]int{0x2000, 1, 0x4000, 0x8000, 0x3fff}[rnd.IntN(5)]))
		case 7:
			ip.SetTotalLen(uint16([]int{19, 20, 27, 28, len(frame) - 14, len(frame) - 13, 0, 0xffff}[rnd.IntN(8)]))
		case 8:
			ip[0] = byte([]int{0x44, 0x45, 0x46, 0x4f, 0x55}[rnd.IntN(5)])
		case 9:
			ip.SetProtocol([]uint8{packet.ProtocolICMP, packet.ProtocolUDP, packet.ProtocolTCP, 0}[rnd.IntN(4)])
		case 10: // UDP length
			binary.BigEndian.PutUint16(frame[38:], uint16([]int{7, 8, 9, len(frame) - 34, len(frame) - 33, 0}[rnd.IntN(6)]))
		case 11: // ports
			copy(frame[34:36], frame[36:38])
		case 12: // UDP checksum: none, or any
			binary.BigEndian.PutUint16(frame[40:], uint16(rnd.IntN(2)*rnd.IntN(1<<16)))
		case 13: // cut
			return frame[:14+rnd.IntN(len(frame)-13)]
		case 14: // options
			n := 4 * (1 + rnd.IntN(10))
			longer := append(append(bytes.Clone(frame[:34]), make([]byte, n)...), frame[34:]...)
			p := packet.IPv4(longer[14:])
			p[0] = byte(0x45 + n/4)
			p.SetTotalLen(uint16(ip.TotalLen() + n))
			return longer
		}
	}
	// Right sums again most of the time, or nothing else would be seen.
	if hdr := packet.Parse(frame, len(frame)); hdr.IPv4 != nil && rnd.IntN(4) > 0 {
		hdr.IPv4.SetChecksum(hdr.IPv4.HeaderChecksum())
		if sum, ok := hdr.UDPChecksum(); ok && rnd.IntN(4) > 0 {
			hdr.UDP.SetChecksum(sum)
		}
	}
	return frame
}

// twin is a built-in set's handlers in Go, which take every frame.
func twin(t *testing.T, name string, params handlers.Params) *handlerstest.NIC {
	t.Helper()
	r, ok := handlers.Lookup(name)
	if !ok {
		t.Fatalf("no set %s", name)
	}
	set, err := r.New(params, handlers.Env{})
	if err != nil {
		t.Fatal(err)
	}
	cfg := handlerstest.Of(set)
	cfg.Rulesets = []matcher.Ruleset{matcher.MatchAll()}
	return handlerstest.New(t, cfg)
}

// same runs a frame through both twins.
func same(t *testing.T, h *Handlers, n *handlerstest.NIC, frame []byte) (sent bool) {
	t.Helper()
	if h.Hook() == TC && len(frame) < 34 {
		return false // PROG_RUN takes none that has no room for an IPv4 header
	}
	out := n.Packet(frame)
	v := run(t, h, frame)
	var expect []byte
	action := ActionDrop
	if len(out.Sent) > 0 {
		action, expect = ActionSend, out.Sent[0]
	} else if len(out.Stack) > 0 {
		action, expect = ActionToStack, out.Stack[0]
	}
	if v.Action != action {
		t.Fatalf("frame of %d bytes % x\nkernel: %v, want %v (calls of the twin: %v)", len(frame), frame[:min(len(frame), 80)], v.Action, action, out.Calls)
	}
	if expect != nil && !bytes.Equal(v.Frame, expect) {
		t.Fatalf("frame of %d bytes % x\nkernel: % x\nwant:   % x", len(frame), frame, v.Frame, expect)
	}
	return action == ActionSend
}

// Echoes are right or wrong in their sums, so each length counts: an odd one, one with each
// power of two, and one that is as long as a frame in one piece may be.
var echoed = func() (all []int) {
	for n := range 70 {
		all = append(all, n)
	}
	return append(all, 127, 256, 504, 512, 1023, 1400, 1472, 2047, 3001, 3300)
}()

// damage flips bits of a frame, and reports those that it is answered with.
func damage(t *testing.T, one func(frame []byte) (answered bool), frame []byte) {
	t.Helper()
	for bit := 8 * 12; bit < 8*len(frame); bit += 1 + bit/800*37 {
		damaged := bytes.Clone(frame)
		damaged[bit/8] ^= 1 << (bit % 8)
		if one(damaged) {
			t.Errorf("%d bytes with bit %d of byte %d flipped are answered", len(frame), bit%8, bit/8)
		}
	}
}

func TestEchoUDPIsItsTwin(t *testing.T) { atHooks(t, testEchoUDPIsItsTwin) }

func testEchoUDPIsItsTwin(t *testing.T) {
	h := builtin(t, "echo-udp", nil)
	n := twin(t, "echo-udp", nil)
	one := func(frame []byte) bool { return same(t, h, n, frame) }
	for _, size := range echoed {
		whole, none, partial := datagramOf(size), datagramOf(size), datagramOf(size)
		hdr := packet.Parse(none, len(none))
		hdr.UDP.SetChecksum(0)
		hdr = packet.Parse(partial, len(partial))
		var pseudo packet.Checksum
		pseudo.AddPseudo(hdr.IPv4.Src(), hdr.IPv4.Dst(), packet.ProtocolUDP, hdr.UDP.Length())
		hdr.UDP.SetChecksum(pseudo.Folded())
		for _, frame := range [][]byte{whole, none, partial} {
			if !one(frame) {
				t.Errorf("%d bytes are not answered", size)
			}
		}
	}
	for _, size := range []int{21, 1400} {
		damage(t, one, datagramOf(size))
	}
	fuzz(t, func(rnd *rand.Rand) bool { return one(mutate(rnd, datagramOf(rnd.IntN(100)))) })
}

func TestEchoICMPIsItsTwin(t *testing.T) { atHooks(t, testEchoICMPIsItsTwin) }

func testEchoICMPIsItsTwin(t *testing.T) {
	h := builtin(t, "echo-icmp", nil)
	n := twin(t, "echo-icmp", nil)
	one := func(frame []byte) bool { return same(t, h, n, frame) }
	zeros := handlerstest.ICMPEcho(handlerstest.PeerAddr, handlerstest.HereAddr, 0, 0, make([]byte, 56))
	frames := [][]byte{zeros}
	for _, size := range echoed {
		frames = append(frames, ping(size))
	}
	for _, frame := range frames {
		if !one(frame) {
			t.Errorf("%d bytes are not answered", len(frame))
		}
	}
	if v := run(t, h, zeros); binary.BigEndian.Uint16(v.Frame[36:]) != 0xffff {
		t.Errorf("a ping of zeros is answered with the checksum % x, which Linux takes for wrong", v.Frame[36:38])
	}
	for _, size := range []int{21, 1400} {
		damage(t, one, ping(size))
	}
	last := ping(56)
	ip := packet.IPv4(last[packet.EthernetLen:])
	ip.SetTTL(1)
	ip.SetChecksum(ip.HeaderChecksum())
	if v := run(t, h, last); v.Action != ActionSend || packet.IPv4(v.Frame[packet.EthernetLen:]).TTL() != 64 {
		t.Errorf("a ping that has come by its last hop: %v % x", v.Action, v.Frame)
	}
	fuzz(t, func(rnd *rand.Rand) bool { return one(mutate(rnd, ping(rnd.IntN(100)))) })
}

// fuzz runs random frames, and fails if they were too much alike to prove anything.
func fuzz(t *testing.T, one func(*rand.Rand) (answered bool)) {
	t.Helper()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 3))
	var answered, all int
	for range 3000 {
		all++
		if one(rnd) {
			answered++
		}
	}
	if answered < all/20 || answered > all*19/20 {
		t.Errorf("%d of %d frames are answered: the generator has drifted", answered, all)
	}
}

func init() { loadTime *= testenv.Slowness() }

func TestCountIsItsTwin(t *testing.T) { atHooks(t, testCountIsItsTwin) }

func testCountIsItsTwin(t *testing.T) {
	for _, to := range []string{"stack", "drop"} {
		t.Run(to, func(t *testing.T) {
			h := builtin(t, "count", map[string]any{"to": to})
			n := twin(t, "count", handlers.Params{"to": to})
			for _, frame := range [][]byte{datagramOf(0), ping(300), datagramOf(1400)} {
				same(t, h, n, frame)
			}
			if got, want := h.Stats().User, n.Stats().User; got != want {
				t.Errorf("counters %v, the twin has %v", got, want)
			}
		})
	}
}

func TestNoopDrops(t *testing.T) { atHooks(t, testNoopDrops) }

func testNoopDrops(t *testing.T) {
	h := builtin(t, "noop", nil)
	frame := datagramOf(10)
	v := run(t, h, frame)
	if v.Action != ActionDrop || !v.Ran || v.Code != spin.Success || !bytes.Equal(v.Frame, frame) {
		t.Errorf("%+v", v)
	}
}

// header and completion return what bytes 0 and 2 of the frame say, and payload what byte 1
// does; byte 3 says what is asked for. Each leaves its mark.
const coded = `
static int code(struct xdp_md *ctx, __u32 at)
{
	__u8 b = 0;

	if (bpf_xdp_load_bytes(ctx, at, &b, 1))
		return XSPIN_FAIL;
	xspin_count(at, 1);
	return b == 255 ? -1 : b;
}

static void ask(struct xdp_md *ctx, struct xspin_her *her)
{
	__u8 b = 0;

	bpf_xdp_load_bytes(ctx, 3, &b, 1);
	if (b == 1)
		xspin_send(her);
	else if (b == 2)
		xspin_to_stack(her);
	else if (b)
		her->action = b;
}

XSPIN_HEADER { ask(ctx, her); return code(ctx, 0); }
XSPIN_PAYLOAD { return code(ctx, 1); }
XSPIN_COMPLETION { return code(ctx, 2); }
XSPIN_CONTEXT(HEADER | PAYLOAD | COMPLETION);
`

// What the codes of three handlers in a row and the action asked for lead to.
func TestCodesAndActions(t *testing.T) {
	h := handlersOf(t, coded, HandlersConfig{})
	const none = 0
	for _, tc := range []struct {
		name                        string
		header, payload, completion byte
		ask                         byte
		action                      Action
		code                        spin.Code
		failed                      string
		ran                         string // of h, p, c
	}{
		{"nothing is asked for", 0, 0, 0, none, ActionDrop, spin.Success, "", "hpc"},
		{"send", 0, 0, 0, 1, ActionSend, spin.Success, "", "hpc"},
		{"stack", 0, 0, 0, 2, ActionToStack, spin.Success, "", "hpc"},
		{"an action that is none", 0, 0, 0, 4, ActionDrop, spin.Fail, "completion", "hpc"},
		{"another", 0, 0, 0, 200, ActionDrop, spin.Fail, "completion", "hpc"},
		{"none, and a drop", 0, 1, 0, 4, ActionDrop, spin.Fail, "completion", "hpc"},
		{"header drops, the payload handler does not run", 1, 0, 0, 1, ActionSend, spin.Drop, "", "hc"},
		{"payload drops, and what was asked for holds", 0, 1, 0, 1, ActionSend, spin.Drop, "", "hpc"},
		{"completion drops", 0, 0, 1, 2, ActionToStack, spin.Drop, "", "hpc"},
		{"header fails", 2, 0, 0, 1, ActionDrop, spin.Fail, "header", "h"},
		{"payload fails", 0, 2, 0, 1, ActionDrop, spin.Fail, "payload", "hp"},
		{"completion fails", 0, 0, 2, 1, ActionDrop, spin.Fail, "completion", "hpc"},
		{"segv", 0, 3, 0, 2, ActionDrop, spin.Segv, "payload", "hp"},
		{"proceed, and there is no window", 4, 0, 0, 1, ActionDrop, spin.Proceed, "header", "h"},
		{"a code that is none", 0, 5, 0, 1, ActionDrop, 5, "payload", "hp"},
		{"a negative code", 0, 255, 0, 1, ActionDrop, -17, "payload", "hp"},
		{"pending alters nothing", 16, 16, 16, 1, ActionSend, spin.Success, "", "hpc"},
		{"pending and drop", 17, 0, 16, 1, ActionSend, spin.Drop, "", "hc"},
		{"pending and fail", 0, 18, 0, 1, ActionDrop, spin.Fail, "payload", "hp"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h.Clear()
			frame := make([]byte, 60)
			copy(frame, []byte{tc.header, tc.payload, tc.completion, tc.ask})
			v := run(t, h, frame)
			if v.Action != tc.action || v.Code != tc.code || v.Failed != tc.failed || !v.Ran {
				t.Errorf("%v, code %v, failed %q; want %v, %v, %q", v.Action, v.Code, v.Failed, tc.action, tc.code, tc.failed)
			}
			s, ran := h.Stats(), ""
			for i, c := range "hpc" {
				if s.User[i].Count > 0 {
					ran += string(c)
				}
			}
			if ran != tc.ran {
				t.Errorf("%q ran, want %q", ran, tc.ran)
			}
			is := func(b bool) uint64 {
				if b {
					return 1
				}
				return 0
			}
			want := HandlerStats{
				Handled: 1, Dropped: is(tc.code == spin.Drop), Failed: is(tc.failed != ""),
				Sent: is(tc.action == ActionSend), ToStack: is(tc.action == ActionToStack),
			}
			if tc.failed != "" {
				want.Fault = Fault{tc.failed, tc.code, fmt.Sprintf("the %s handler returned %v", tc.failed, tc.code)}
				if tc.ask > 2 {
					want.Fault.Detail = fmt.Sprintf("the %s handler set her->action to something else: want XDP_DROP, XDP_TX or XDP_PASS", tc.failed)
				}
			}
			s.User, s.Timed, s.HandlerSum, s.HandlerTime = want.User, 0, 0, want.HandlerTime
			if s != want {
				t.Errorf("statistics %+v, want %+v", s, want)
			}
		})
	}
	t.Run("flow runs the payload handler alone", func(t *testing.T) {
		h := handlersOf(t, coded, HandlersConfig{Format: matcher.FormatByName("flow")})
		frame := datagramOf(10)
		frame[1] = 1
		if v := run(t, h, frame); v.Code != spin.Drop || h.Stats().User[0].Count+h.Stats().User[2].Count != 0 {
			t.Errorf("%+v, %v", v, h.Stats())
		}
	})
}

// What a handler is called with is what the reference matcher says of the frame.
func TestRequestIsWhatTheFormatSays(t *testing.T) {
	source := `
XSPIN_PAYLOAD
{
	const __u32 *w = (void *)her;

	for (int i = 0; i < 16; i++)
		xspin_count(i, w[i]);
	return XSPIN_SUCCESS;
}
XSPIN_CONTEXT(PAYLOAD);
`
	fix := func(f func(*matcher.Format)) *matcher.Format {
		m := matcher.FormatByName("flow")
		f(m)
		return m
	}
	eom := matcher.Rule{Index: 2, Mask: 0xff, Start: 3, End: 90}
	never := matcher.False
	for _, tc := range []struct {
		name string
		f    *matcher.Format
		eom  *matcher.Rule
	}{
		{"packet", matcher.FormatByName("packet"), nil},
		{"packet that never ends", matcher.FormatByName("packet"), &never},
		{"packet that may end", matcher.FormatByName("packet"), &eom},
		{"flow", matcher.FormatByName("flow"), nil},
		{"all that there is", fix(func(f *matcher.Format) {
			f.Key = f.Key[:0]
			for i := range matcher.MaxKey {
				f.Key = append(f.Key, matcher.Field{Index: 3 + 2*i, Mask: 0xff00ff << i})
			}
			f.Offset = &matcher.Field{Index: 1, Mask: 0xff00}
			f.Length = &matcher.Length{Field: matcher.Field{Index: 0, Mask: 0x3f0}, From: 20}
			f.Header = 22
			f.EOM = nil
		}), nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := handlersOf(t, source, HandlersConfig{Format: tc.f, EOM: tc.eom})
			ref := matcher.MatchAll()
			ref.EOM = tc.eom
			table := &matcher.Table{Entries: map[int]matcher.Entry{0: {Ruleset: ref, Format: tc.f}}}
			rnd := rand.New(rand.NewPCG(1, 2))
			delivered := 0
			for range 300 {
				frame := make([]byte, 14+rnd.IntN(90))
				for i := range frame {
					frame[i] = byte(rnd.Uint32())
				}
				if rnd.IntN(2) == 0 {
					frame[2] = 0 // short lengths
				}
				h.Clear()
				want, got := table.Match(frame), run(t, h, frame)
				if got.Ran != (want.Action == matcher.Deliver) || !got.Ran && got.Action != ActionToStack {
					t.Fatalf("frame % x: %+v, the reference says %+v", frame, got, want)
				}
				if !got.Ran {
					continue
				}
				delivered++
				end := len(frame)
				if l := tc.f.Length; l != nil {
					n, _ := l.Number(frame)
					end = l.From + int(n)
				}
				words := []uint32{uint32(len(frame)), uint32(tc.f.Header), uint32(end - tc.f.Header), want.Offset}
				words = append(words, want.Key[:]...)
				words = append(words, map[bool]uint32{true: 1}[want.EOM])
				s := h.Stats()
				for i, w := range words {
					if s.User[i].Sum != uint64(w) {
						t.Fatalf("frame % x: word %d of the request is %#x, want %#x", frame, i, s.User[i].Sum, w)
					}
				}
				if cpu, n := s.User[13].Sum, s.User[14].Sum; n != uint64(possibleCPUs(t)) || cpu >= n {
					t.Fatalf("HPU %d of %d, want one of %d", cpu, n, possibleCPUs(t))
				}
			}
			if delivered < 30 || delivered > 297 && tc.f.Header != 14 {
				t.Errorf("%d of 300 frames: the generator has drifted", delivered)
			}
		})
	}
}

// xspin_headers finds what packet.Parse finds.
func TestHeadersAreThoseOfPackage(t *testing.T) {
	h := handlersOf(t, `
XSPIN_PAYLOAD
{
	struct xspin_headers h;

	xspin_headers(ctx, her, &h);
	xspin_count(0, h.ipv4);
	xspin_count(1, h.udp);
	xspin_count(2, h.icmp);
	xspin_count(3, h.tcp);
	xspin_count(4, h.payload);
	xspin_count(5, h.payload_len);
	return XSPIN_SUCCESS;
}
XSPIN_CONTEXT(PAYLOAD);
`, HandlersConfig{})
	tcp := make([]byte, 80)
	copy(tcp, datagramOf(0)[:34])
	packet.IPv4(tcp[14:]).SetProtocol(packet.ProtocolTCP)
	packet.IPv4(tcp[14:]).SetTotalLen(60)
	tcp[46] = 0x60
	bases := [][]byte{datagramOf(0), datagramOf(60), ping(0), ping(60), tcp}
	fuzz(t, func(rnd *rand.Rand) bool {
		frame := mutate(rnd, bases[rnd.IntN(len(bases))])
		if rnd.IntN(4) == 0 && len(frame) > 46 {
			frame[46] = byte(rnd.Uint32()) // of TCP: the length of its header
		}
		h.Clear()
		run(t, h, frame)
		hdr := packet.Parse(frame, len(frame))
		at := func(there bool, off int) uint64 {
			if there {
				return uint64(off)
			}
			return 0
		}
		want := [6]uint64{
			at(hdr.IPv4 != nil, 14), at(hdr.UDP != nil, hdr.Transport), at(hdr.ICMP != nil, hdr.Transport),
			at(hdr.TCP != nil, hdr.Transport), uint64(hdr.Payload), uint64(hdr.PayloadLen),
		}
		for i, w := range want {
			if got := h.Stats().User[i].Sum; got != w {
				t.Fatalf("frame of %d bytes % x: number %d is %d, want %d of %v", len(frame), frame, i, got, w, want)
			}
		}
		return hdr.UDP != nil || hdr.ICMP != nil || hdr.TCP != nil
	})
}

const paramsSource = `
enum colour { red, green = 7, blue = 0x80000000 };
const volatile _Bool flag = 1;
const volatile __u8 small = 3;
const volatile short negative = -5;
const volatile __u64 large = 1ULL << 40;
const volatile enum colour colour = green;
const volatile char name[8] = "ab";
const __u32 table[4] = { 1, 2, 3, 4 }; /* no parameter */

XSPIN_PAYLOAD
{
	xspin_count(0, flag);
	xspin_count(1, small);
	xspin_count(2, negative);
	xspin_count(3, large);
	xspin_count(4, colour);
	xspin_count(5, name[0] + name[6]);
	xspin_count(6, table[her->len & 3]);
	return XSPIN_SUCCESS;
}
XSPIN_CONTEXT(PAYLOAD);
`

func TestParameters(t *testing.T) {
	o := object(t, "#include \"xspin_handler.h\"\nXSPIN_LICENSE(\"GPL\");\n"+paramsSource)
	var text strings.Builder
	for _, p := range o.Parameters() {
		fmt.Fprintf(&text, "%s = %s: %s\n", p.Name, p.Default, p.Want)
	}
	if want := `colour = green: red, green, blue
flag = true: true or false
large = 1099511627776: whole number, 0 to 18446744073709551615
name = "ab": text of up to 7 bytes
negative = -5: whole number, -32768 to 32767
small = 3: whole number, 0 to 255
`; text.String() != want {
		t.Errorf("parameters:\n%swant:\n%s", text.String(), want)
	}
	for _, tc := range []struct {
		name, text string
		want       any // nil: an error
	}{
		{"flag", "false", false}, {"small", "0x10", uint64(16)}, {"negative", "-7", int64(-7)}, {"large", "18446744073709551615", uint64(math.MaxUint64)},
		{"colour", "red", "red"}, {"name", "7", "7"},
		{"flag", "2", nil}, {"small", "", nil}, {"small", "256", nil}, {"small", "-1", nil}, {"colour", "1", nil}, {"name", "12345678", nil},
	} {
		i := slices.IndexFunc(o.Parameters(), func(p Parameter) bool { return p.Name == tc.name })
		if got, err := o.Parameters()[i].Parse(tc.text); got != tc.want || (err == nil) != (tc.want != nil) {
			t.Errorf("%s=%s: %v, %v; want %v", tc.name, tc.text, got, err, tc.want)
		}
	}
	minus := func(n uint64) uint64 { return -n }
	for _, tc := range []struct {
		params map[string]any
		want   [6]uint64
	}{
		{nil, [6]uint64{1, 3, minus(5), 1 << 40, 7, 'a'}},
		{map[string]any{
			"flag": false, "small": 255, "negative": -32768.0, "large": uint64(math.MaxUint64), "colour": "blue", "name": "1234567",
		}, [6]uint64{0, 255, minus(32768), math.MaxUint64, 0x80000000, '1' + '7'}},
		{map[string]any{"name": "", "colour": "red", "negative": 32767, "large": int64(5)}, [6]uint64{1, 3, 32767, 5, 0, 0}},
	} {
		h := load(t, o, HandlersConfig{Parameters: tc.params})
		run(t, h, datagramOf(0))
		for i, w := range tc.want {
			if got := h.Stats().User[i].Sum; got != w {
				t.Errorf("%v: variable %d is %#x, want %#x", tc.params, i, got, w)
			}
		}
	}
	for _, tc := range []struct {
		name  string
		value any
		want  string
	}{
		{"smal", 1, `param "smal": no such parameter: there are colour (red, green, blue), flag`},
		{"table", 1, `param "table": no such parameter`},
		{"xspin", 1, `param "xspin": no such parameter`},
		{"small", 256, `param "small": 256: want whole number, 0 to 255`},
		{"small", -1, "-1: want"},
		{"small", 1.5, "1.5: want"},
		{"small", "1", `"1": want`},
		{"small", true, "true: want"},
		{"small", nil, "<nil>: want"},
		{"negative", 32768, "32768: want"},
		{"negative", -32769, "-32769: want"},
		{"flag", 1, "1: want true or false"},
		{"colour", "pink", `"pink": want red, green, blue`},
		{"colour", 7, "7: want red"},
		{"name", "12345678", `"12345678": want text of up to 7 bytes`},
		{"name", "a\x00b", `"a\x00b": want`},
		{"name", 5, "5: want text"},
	} {
		h, err := o.Load(HandlersConfig{Format: matcher.FormatByName("packet"), Parameters: map[string]any{tc.name: tc.value}})
		if err == nil {
			h.Close()
		}
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s = %v: %v, want %q in it", tc.name, tc.value, err, tc.want)
		}
	}
}

// Byte 14 on: an offset of 8 bytes, and which memory.
const memorySource = `
static int touch(__u64 *p)
{
	if (!p)
		return XSPIN_SEGV;
	*p += 1;
	return XSPIN_SUCCESS;
}

XSPIN_PAYLOAD
{
	struct { __u64 off; __u64 own; } at;

	if (xspin_load(ctx, 14, &at, sizeof(at)))
		return XSPIN_FAIL;
	return touch(at.own ? xspin_hpu_memory(her, at.off, 8) : xspin_memory(at.off, 8));
}
XSPIN_CONTEXT(PAYLOAD);
`

func TestHPUMemoryHasBounds(t *testing.T) {
	netnstest.NeedRoot(t)
	cpus := possibleCPUs(t)
	memory := func(size int64) *hostq.Memory {
		m, err := hostq.NewMemory("test", size)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { m.Close() })
		return m
	}
	const size, own = 2<<20 + 100, 4096
	shared, each := memory(size), memory(int64(cpus)*own)
	o := object(t, "#include \"xspin_handler.h\"\nXSPIN_LICENSE(\"GPL\");\n"+memorySource)
	h := load(t, o, HandlersConfig{Memory: shared.Map(), MemorySize: size, HPUMemory: each.Map(), HPUMemorySize: own})
	none := load(t, o, HandlersConfig{})
	at := func(off uint64, own uint64) []byte {
		frame := make([]byte, 60)
		binary.LittleEndian.PutUint64(frame[14:], off)
		binary.LittleEndian.PutUint64(frame[22:], own)
		return frame
	}
	for _, tc := range []struct {
		name string
		off  uint64
		own  uint64
		want spin.Code
	}{
		{"first", 0, 0, spin.Success},
		{"unaligned", 3, 0, spin.Success},
		{"last of an element", 1<<20 - 8, 0, spin.Success},
		{"first of the next", 1 << 20, 0, spin.Success},
		{"across elements", 1<<20 - 4, 0, spin.Segv},
		{"last", size - 8, 0, spin.Success},
		{"one too far, though the map goes on", size - 7, 0, spin.Segv},
		{"behind the map", 3 << 20, 0, spin.Segv},
		{"so large that the sum overflows", math.MaxUint64 - 3, 0, spin.Segv},
		{"4 GiB", 1 << 32, 0, spin.Segv},
		{"own, first", 0, 1, spin.Success},
		{"own, last", own - 8, 1, spin.Success},
		{"own, one too far: the next HPU's", own - 7, 1, spin.Segv},
		{"own, overflow", math.MaxUint64 - 3, 1, spin.Segv},
	} {
		t.Run(tc.name, func(t *testing.T) {
			clear(shared.Bytes()[:size])
			clear(each.Bytes())
			if v := run(t, h, at(tc.off, tc.own)); v.Code != tc.want {
				t.Errorf("code %v, want %v", v.Code, tc.want)
			}
			one := []byte{1}
			inShared, inEach := bytes.Count(shared.Bytes(), one), bytes.Count(each.Bytes(), one)
			switch at := bytes.IndexByte(each.Bytes(), 1); {
			case inShared+inEach != map[spin.Code]int{spin.Success: 1}[tc.want]:
				t.Errorf("%d and %d bytes were touched", inShared, inEach)
			case inEach > 0 && (tc.own == 0 || uint64(at%own) != tc.off):
				t.Errorf("byte %d of all HPUs' was touched", at)
			case inShared > 0 && shared.Bytes()[tc.off] != 1:
				t.Error("another byte was touched")
			}
			if v := run(t, none, at(tc.off, tc.own)); v.Code != spin.Segv {
				t.Errorf("without memory: code %v", v.Code)
			}
		})
	}
	other, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	for name, cfg := range map[string]HandlersConfig{
		"more than the map has":     {Memory: shared.Map(), MemorySize: 4 << 20},
		"a size without a map":      {MemorySize: 1},
		"a map without a size":      {Memory: shared.Map()},
		"a map of another kind":     {Memory: other, MemorySize: 8},
		"pieces that cross a MiB":   {HPUMemory: shared.Map(), HPUMemorySize: 3000},
		"more than the CPUs have":   {HPUMemory: each.Map(), HPUMemorySize: 1 << 20},
		"a size that is no size":    {Memory: shared.Map(), MemorySize: -1},
		"a size that is impossible": {Memory: shared.Map(), MemorySize: math.MaxInt64},
	} {
		if name == "more than the CPUs have" && cpus == 1 || name == "pieces that cross a MiB" && cpus == 1 {
			continue
		}
		cfg.Format = matcher.FormatByName("packet")
		if h, err := o.Load(cfg); err == nil {
			h.Close()
			t.Errorf("%s: it loads", name)
		} else if !strings.Contains(err.Error(), "emory") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestFormatsThatEndAreRefused(t *testing.T) {
	netnstest.NeedRoot(t)
	payload := object(t, "#include \"xspin_handler.h\"\nXSPIN_LICENSE(\"GPL\");\nXSPIN_PAYLOAD { return 0; }\nXSPIN_CONTEXT(PAYLOAD);\n")
	header := object(t, "#include \"xspin_handler.h\"\nXSPIN_LICENSE(\"GPL\");\nXSPIN_HEADER { return 0; }\nXSPIN_CONTEXT(HEADER);\n")
	for _, tc := range []struct {
		o      *Object
		format string
		want   string // in the error
	}{
		{payload, "slmp", "several packets"},
		{payload, "slmp6", "several packets"},
		{header, "flow", "no payload handler"},
		{header, "packet", ""},
		{payload, "flow", ""},
	} {
		h, err := tc.o.Load(HandlersConfig{Format: matcher.FormatByName(tc.format)})
		switch {
		case err == nil:
			h.Close()
			if tc.want != "" {
				t.Errorf("%s: it loads", tc.format)
			}
		case tc.want == "" || !strings.Contains(err.Error(), tc.want):
			t.Errorf("%s: %v", tc.format, err)
		}
	}
}

func TestFramesThatCannotBeRun(t *testing.T) {
	h := builtin(t, "noop", nil)
	for _, n := range []int{0, 13, 1 << 20} {
		if _, err := h.Run(make([]byte, n)); !errors.Is(err, ErrFrame) {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
}

// One packet in 64 of a CPU is timed, the first among them.
func TestHandlerTimeIsSampled(t *testing.T) {
	h := builtin(t, "noop", nil)
	cpus := uint64(possibleCPUs(t))
	for range 256 {
		run(t, h, datagramOf(0))
	}
	s := h.Stats()
	var sum uint64
	for _, n := range s.HandlerTime {
		sum += n
	}
	if s.Handled != 256 || s.Timed < 256/64 || s.Timed > 256/64+cpus || sum != s.Timed || s.HandlerSum <= 0 {
		t.Errorf("handled %d, timed %d (histogram %d), %v", s.Handled, s.Timed, sum, s.HandlerSum)
	}
}

// A program that is under way on another CPU never shows a sum without its count.
func TestPairsAreReadWhole(t *testing.T) {
	var p bpf.HandlerPair
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for n := uint64(1); ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			atomic.StoreUint64(&p.Begin, n)
			atomic.StoreUint64(&p.Sum, 3*n)
			atomic.StoreUint64(&p.Count, n)
			atomic.StoreUint64(&p.End, n)
		}
	}()
	for range 200_000 {
		if c, whole := tryPair(&p); whole && c.Sum != 3*c.Count {
			t.Errorf("sum %d, count %d", c.Sum, c.Count)
			break
		}
	}
	close(stop)
	<-done
}

// Statistics of a real program, read while it runs, are pairs.
func TestCountersUnderLoadArePairs(t *testing.T) {
	h := builtin(t, "count", nil)
	frame := datagramOf(0)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range 5000 {
			if _, err := h.prog.Run(&ebpf.RunOptions{Data: frame, Repeat: 1}); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	for running := true; running; {
		select {
		case <-done:
			running = false
		default:
		}
		if c := h.Stats().User[0]; c.Sum != uint64(len(frame))*c.Count {
			t.Fatalf("sum %d, count %d", c.Sum, c.Count)
		}
	}
	if s := h.Stats(); s.Handled != 5000 || s.User[0].Count != 5000 {
		t.Errorf("%+v", s)
	}
}

// A verifier that crashes never answers. Whoever waits goes on after a while, and what
// comes late is closed.
func TestKernelThatDoesNotAnswer(t *testing.T) {
	netnstest.NeedRoot(t)
	for _, fails := range []error{nil, errors.New("refused")} {
		answer, answered := make(chan struct{}), make(chan ebpf.MapID, 1)
		var late *ebpf.Map
		_, err := within(10*time.Millisecond, func() (*ebpf.Collection, error) {
			<-answer
			defer close(answered)
			if fails != nil {
				return nil, fails
			}
			var err error
			late, err = ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
			if err != nil {
				return nil, err
			}
			info, err := late.Info()
			if err != nil {
				return nil, err
			}
			id, _ := info.ID()
			answered <- id
			return &ebpf.Collection{Maps: map[string]*ebpf.Map{"late": late}}, nil
		})
		if want := "the kernel has not answered for 0.01 s: its verifier may have crashed; look at dmesg, and bound the handler's loops"; !errors.Is(err, ErrNoAnswer) || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
		close(answer)
		id, ok := <-answered
		if ok != (fails == nil) {
			t.Fatal("the late load has failed")
		}
		for ok { // until the kernel has no such map; the test's time limit ends this
			m, err := ebpf.NewMapFromID(id)
			m.Close()
			ok = !errors.Is(err, os.ErrNotExist)
		}
		runtime.KeepAlive(late) // or the garbage collector closes it
	}
	want := errors.New("refused")
	if _, err := within(time.Minute, func() (*ebpf.Collection, error) { return nil, want }); err != want {
		t.Errorf("%v, want the load's error", err)
	}
}

// The load may outlive the caller's maps.
func TestLoadHasMapsOfItsOwn(t *testing.T) {
	netnstest.NeedRoot(t)
	before := fds(t)
	memory := newMemory(t)
	h := load(t, object(t, around("", "\treturn xspin_memory(0, 8) ? XSPIN_SUCCESS : XSPIN_SEGV;")), HandlersConfig{Memory: memory, MemorySize: 4096})
	if v, err := h.Run(make([]byte, 64)); err != nil || v.Code != spin.Success {
		t.Errorf("%+v, %v", v, err)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	if n := fds(t) - before; n != 1 {
		t.Errorf("%d files are open more than before, want the memory's", n)
	}
}

func fds(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// An action that is none of the three is told of the last handler that ran.
func TestActionsThatAreNone(t *testing.T) {
	for source, failed := range map[string]string{
		"XSPIN_PAYLOAD { her->action = 0; return XSPIN_SUCCESS; }\nXSPIN_CONTEXT(PAYLOAD);\n":                                                           "payload",
		"XSPIN_HEADER { her->action = 4; return XSPIN_DROP; }\nXSPIN_PAYLOAD { return XSPIN_SUCCESS; }\nXSPIN_CONTEXT(HEADER | PAYLOAD);\n":             "header",
		"XSPIN_PAYLOAD { her->action = -1; return XSPIN_SUCCESS; }\nXSPIN_COMPLETION { return XSPIN_SUCCESS; }\nXSPIN_CONTEXT(PAYLOAD | COMPLETION);\n": "completion",
	} {
		h := load(t, object(t, include+source+licence), HandlersConfig{})
		if v := run(t, h, make([]byte, 64)); v.Action != ActionDrop || v.Failed != failed || v.Code != spin.Fail {
			t.Errorf("%s: %+v, want a failure of %s", source, v, failed)
		}
	}
}
