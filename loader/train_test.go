// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/handlers/handlerstest"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/packet"
	"github.com/xspin/xspin/spin"
)

// trainOf is a datagram with n bytes of payload as Linux's stack has it, with a partial checksum, and with
// options of IPv4.
func trainOf(rnd *rand.Rand, n, options int) []byte {
	payload := make([]byte, n)
	for i := range payload {
		payload[i] = byte(rnd.Uint32())
	}
	f := handlerstest.UDP(handlerstest.Peer(4000), handlerstest.Here(7), payload)[:42+n] // nothing is padded before it is cut
	if options > 0 {
		f = append(append(bytes.Clone(f[:34]), bytes.Repeat([]byte{1}, options)...), f[34:]...)
		f[14] = byte(0x45 + options/4)
		packet.IPv4(f[14:]).SetTotalLen(uint16(len(f) - 14))
	}
	packet.IPv4(f[14:]).SetID(uint16(rnd.Uint32()))
	partial(f)
	return f
}

// over6 is the same datagram over IPv6.
func over6(train []byte) []byte {
	f := append(bytes.Clone(train[:14]), make([]byte, 40)...)
	f = append(f, train[packet.Parse(train, len(train)).Payload-8:]...)
	f[12], f[13], f[14], f[20] = 0x86, 0xdd, 0x60, packet.ProtocolUDP
	f[14+8+15], f[14+24+15] = 1, 2
	partial(f)
	return f
}

// partial gives a datagram the sums that Linux's stack leaves to the device.
func partial(f []byte) {
	if f[12] == 0x86 {
		binary.BigEndian.PutUint16(f[18:], uint16(len(f)-54))
		var sum packet.Checksum
		sum.Add(f[22:54])
		sum.Add([]byte{0, packet.ProtocolUDP, f[58], f[59]})
		binary.BigEndian.PutUint16(f[60:], sum.Folded())
		return
	}
	h := packet.Parse(f, len(f))
	h.IPv4.SetChecksum(h.IPv4.HeaderChecksum())
	var sum packet.Checksum
	sum.AddPseudo(h.IPv4.Src(), h.IPv4.Dst(), packet.ProtocolUDP, h.UDP.Length())
	h.UDP.SetChecksum(sum.Folded())
}

// cut cuts a train as Linux's stack does.
func cut(train []byte, gso int) (segments [][]byte) {
	head := 62
	if train[12] == 8 {
		head = 14 + packet.IPv4(train[14:]).HeaderLen() + 8
	}
	for rest, i := train[head:], 0; len(rest) > 0; i++ {
		n := min(gso, len(rest))
		f := append(bytes.Clone(train[:head]), rest[:n]...)
		rest = rest[n:]
		if train[12] == 8 {
			ip := packet.IPv4(f[14:])
			ip.SetTotalLen(uint16(len(f) - 14))
			ip.SetID(ip.ID() + uint16(i))
		}
		binary.BigEndian.PutUint16(f[head-4:], uint16(8+n))
		partial(f)
		segments = append(segments, f)
	}
	return segments
}

func runTrain(t *testing.T, h *Handlers, train []byte, gso int) HandlersVerdict {
	t.Helper()
	v, err := h.RunTrain(train, gso)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// It writes what it sees of each packet into HPU memory, one entry after the other.
const seen = `
struct seen {
	__u32 len, payload, payload_len, key, offset, flags;
	struct xspin_headers h;
	long got[6];
	__u8 bytes[6][128];
};

static const volatile __u32 from[6] = { 0, 14, 34, 10, 60, 100 };

XSPIN_PAYLOAD
{
	__u64 *n = xspin_memory(0, 8);
	struct seen *s = n ? xspin_memory(8 + *n * sizeof(*s), sizeof(*s)) : 0;
	struct xspin_headers h;

	if (!s)
		return XSPIN_FAIL;
	xspin_headers(ctx, her, &h);
	s->len = her->len, s->payload = her->payload, s->payload_len = her->payload_len;
	s->key = her->key[0], s->offset = her->offset, s->flags = her->flags;
	s->h = h;
	for (int i = 0; i < 6; i++) {
		s->got[i] = xspin_load(ctx, from[i], s->bytes[i], i == 3 ? 7 : i == 2 ? 8 : i == 1 ? 128 : 64) < 0;
		if (s->got[i])
			__builtin_memset(s->bytes[i], 0, 128);
	}
	*n += 1;
	return xspin_to_stack(her);
}
XSPIN_CONTEXT(PAYLOAD);
`

// A train's packets are to handlers what they are when they come alone.
func TestTrainsAreTheirPackets(t *testing.T) {
	memories := [2]*hostq.Memory{}
	var at [2]*Handlers
	o := object(t, "#include \"xspin_handler.h\"\nXSPIN_LICENSE(\"GPL\");\n"+seen)
	for i := range at {
		m, err := hostq.NewMemory("test", 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { m.Close() })
		memories[i] = m
		at[i] = load(t, o, HandlersConfig{Hook: Hook(1 - i), Memory: m.Map(), MemorySize: 1 << 20})
	}
	trains, alone := at[0], at[1]
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	for range 3000 * testenv.Soak() {
		n, gso := 1+rnd.IntN(3000), 1+rnd.IntN(200)
		if rnd.IntN(4) == 0 {
			gso = 1 + rnd.IntN(n+10)
		}
		n = min(n, gso*128)
		train := trainOf(rnd, n, 4*rnd.IntN(2)*rnd.IntN(11))
		if rnd.IntN(4) == 0 {
			train = over6(train)
		}
		for _, m := range memories {
			clear(m.Bytes())
		}
		v := runTrain(t, trains, train, gso)
		if v.Action != ActionToStack || !bytes.Equal(v.Frame, train) {
			t.Fatalf("a train of %d bytes, cut every %d: %v", n, gso, v.Action)
		}
		for _, f := range cut(train, gso) {
			run(t, alone, f)
		}
		if !bytes.Equal(memories[0].Bytes(), memories[1].Bytes()) {
			i := 0
			for memories[0].Bytes()[i] == memories[1].Bytes()[i] {
				i++
			}
			t.Fatalf("a train of %d bytes (% x), cut every %d: entry %d, byte %d is %x in the train, %x alone; %d and %d packets", n, train[:60], gso,
				(i-8)/(24+24+48+768), (i-8)%(24+24+48+768), memories[0].Bytes()[i], memories[1].Bytes()[i], memories[0].Bytes()[0], memories[1].Bytes()[0])
		}
	}
}

// A train that is echoed is the train of what is echoed of each packet.
func TestTrainsAreEchoed(t *testing.T) {
	h := builtinAt(t, TC, "echo-udp", nil)
	n := twin(t, "echo-udp", handlers.Params(nil))
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		size, gso := 1+rnd.IntN(3000), 30+rnd.IntN(1400)
		train := trainOf(rnd, size, 4*rnd.IntN(2)*rnd.IntN(11))
		if rnd.IntN(8) == 0 {
			packet.IPv4(train[14:]).SetTTL(1) // is not answered
			partial(train)
		}
		v := runTrain(t, h, train, gso)
		var want [][]byte
		for _, f := range cut(train, gso) {
			want = append(want, n.Packet(f).Sent...)
		}
		if len(want) == 0 {
			if v.Action != ActionDrop {
				t.Fatalf("%v, want none", v.Action)
			}
			continue
		}
		if v.Action != ActionSend {
			t.Fatalf("a train of %d bytes, cut every %d: %v", size, gso, v.Action)
		}
		for i, f := range cut(v.Frame, gso) {
			partial(want[i]) // whoever echoes it alone completes the sum
			if !bytes.Equal(f, want[i]) {
				t.Fatalf("packet %d of %d bytes, cut every %d:\n% x, want\n% x", i, size, gso, f, want[i])
			}
		}
	}
	if s := h.Stats(); s.Mixed != 0 || s.Uncut != 0 {
		t.Errorf("%d mixed, %d uncut", s.Mixed, s.Uncut)
	}
}

// byContent wants of a packet what its first byte of payload says, and writes to it.
const byContent = `
XSPIN_PAYLOAD
{
	__u8 b[3];

	if (xspin_load(ctx, 42, b, 3))
		return XSPIN_FAIL;
	xspin_count(0, b[0]);
	if (b[1] && xspin_store(ctx, 8, &b[1], 1))
		return XSPIN_FAIL;
	if (b[2] && xspin_store(ctx, 44, "!!", 2))
		return XSPIN_FAIL;
	return b[0] == 1 ? XSPIN_DROP : b[0] == 2 ? xspin_send(her) : b[0] == 3 ? xspin_to_stack(her) : XSPIN_FAIL;
}
XSPIN_CONTEXT(PAYLOAD);
`

func TestTrainsOfWhichPacketsWantDifferentThings(t *testing.T) {
	h := handlersOf(t, byContent, HandlersConfig{Hook: TC})
	packets := func(list ...[3]byte) []byte {
		var payload []byte
		for _, b := range list {
			payload = append(append(payload, b[:]...), 0, 0)
		}
		f := handlerstest.UDP(handlerstest.Peer(4000), handlerstest.Here(7), payload)[:42+len(payload)]
		partial(f)
		return f
	}
	for _, tc := range []struct {
		name    string
		packets [][3]byte
		want    Action
		mixed   uint64
	}{
		{"all dropped", [][3]byte{{1}, {1}, {1}}, ActionDrop, 0},
		{"all sent", [][3]byte{{2}, {2}, {2}}, ActionSend, 0},
		{"all to Linux", [][3]byte{{3}, {3}, {3}}, ActionToStack, 0},
		{"all fail", [][3]byte{{4}, {4}}, ActionDrop, 0},
		{"one is sent", [][3]byte{{1}, {2}, {1}}, ActionDrop, 1},
		{"the last goes to Linux", [][3]byte{{2}, {2}, {3}}, ActionDrop, 1},
		{"all have the same address written to them", [][3]byte{{2, 7}, {2, 7}}, ActionSend, 0},
		{"one has another address written to it", [][3]byte{{2, 7}, {2, 8}}, ActionDrop, 1},
		{"one has an address written to it, and one has not", [][3]byte{{3}, {3, 1}}, ActionDrop, 1},
		{"some have their payload written to", [][3]byte{{2}, {2, 0, 1}, {2}, {2, 0, 1}}, ActionSend, 0},
	} {
		before := h.Stats()
		train := packets(tc.packets...)
		v := runTrain(t, h, train, 5)
		s := h.Stats()
		if v.Action != tc.want || s.Mixed-before.Mixed != tc.mixed || s.Handled-before.Handled != uint64(len(tc.packets)) {
			t.Errorf("%s: %v, %d mixed, %d handled", tc.name, v.Action, s.Mixed-before.Mixed, s.Handled-before.Handled)
		}
		if v.Action == ActionDrop {
			continue
		}
		want := bytes.Clone(train)
		for i, p := range tc.packets {
			if p[1] != 0 {
				want[8] = p[1]
			}
			if p[2] != 0 {
				copy(want[42+5*i+2:], "!!")
			}
		}
		if !bytes.Equal(v.Frame, want) {
			t.Errorf("%s:\n% x, want\n% x", tc.name, v.Frame, want)
		}
	}
}

// A train that nobody can cut comes whole to handlers that only look. It goes to Linux if handlers would write to it.
func TestTrainsThatAreNotCut(t *testing.T) {
	count, echo := builtinAt(t, TC, "count", map[string]any{"to": "drop"}), builtinAt(t, TC, "echo-udp", nil)
	whole := handlersOf(t, `XSPIN_PAYLOAD { return xspin_reply_udp(ctx, her) ? xspin_send(her) : XSPIN_DROP; } XSPIN_CONTEXT(PAYLOAD | TRAINS);`, HandlersConfig{Hook: TC})
	rnd := rand.New(rand.NewPCG(1, 3))
	change := func(change func(f []byte)) []byte {
		f := trainOf(rnd, 1000, 0)
		change(f)
		packet.IPv4(f[14:]).SetChecksum(packet.IPv4(f[14:]).HeaderChecksum())
		return f
	}
	for _, tc := range []struct {
		name  string
		frame []byte
		gso   int
		uncut bool
	}{
		{"a train", trainOf(rnd, 1000, 0), 100, false},
		{"as long as its only packet", trainOf(rnd, 1000, 0), 1000, false},
		{"shorter than a packet of it", trainOf(rnd, 1000, 0), 65535, false},
		{"of 128 packets", trainOf(rnd, 1024, 0), 8, false},
		{"of 129 packets", trainOf(rnd, 1025, 0), 8, true},
		{"of a byte each", trainOf(rnd, 1000, 0), 1, true},
		{"TCP", change(func(f []byte) { packet.IPv4(f[14:]).SetProtocol(packet.ProtocolTCP) }), 100, true},
		{"a UDP length that is too long", change(func(f []byte) { f[38]++ }), 100, true},
		{"a UDP length that is too short", change(func(f []byte) { f[39]-- }), 100, true},
		{"an IPv4 length that is too short", change(func(f []byte) { packet.IPv4(f[14:]).SetTotalLen(500) }), 100, true},
		{"a fragment", change(func(f []byte) { f[20] = 0x20 }), 100, true},
		{"a header that is cut off", change(func(f []byte) { f[14] = 0x4f })[:70], 10, true},
		{"IPv6 whose length is wrong", change(func(f []byte) { f[12], f[13], f[14] = 0x86, 0xdd, 0x60 }), 100, true},
		{"ARP", change(func(f []byte) { f[13] = 6 }), 100, true},
	} {
		before := count.Stats()
		if v := runTrain(t, count, tc.frame, tc.gso); v.Action != ActionDrop {
			t.Errorf("%s: counted, and then %v", tc.name, v.Action)
		}
		s := count.Stats()
		packets := s.Handled - before.Handled
		want := uint64(1)
		if !tc.uncut {
			want = uint64(len(cut(tc.frame, tc.gso)))
		}
		if packets != want || s.User[0].Sum-before.User[0].Sum < uint64(len(tc.frame)) {
			t.Errorf("%s: %d packets, want %d", tc.name, packets, want)
		}
		before = echo.Stats()
		v := runTrain(t, echo, tc.frame, tc.gso)
		s = echo.Stats()
		if uncut := s.Uncut-before.Uncut == 1; uncut != tc.uncut || uncut != (v.Action == ActionToStack) || uncut && !bytes.Equal(v.Frame, tc.frame) {
			t.Errorf("%s: echoed: %v, uncut is %v", tc.name, v.Action, uncut)
		}
		before = whole.Stats()
		runTrain(t, whole, tc.frame, tc.gso)
		if s = whole.Stats(); s.Handled-before.Handled != 1 {
			t.Errorf("%s: %d frames, though trains are wanted whole", tc.name, s.Handled-before.Handled)
		}
	}
	if s := count.Stats(); s.Failed != 0 || s.Fault.Code != spin.Success {
		t.Error(s.Fault)
	}
}

// What a handler has written is what functions that it calls afterwards go by.
func TestWrittenHeadersAreThoseThatAreRead(t *testing.T) {
	const source = `
XSPIN_PAYLOAD
{
	const __u8 port[2] = { 0x10, 0 }, none[4] = { 0, 0, '!', '?' };
	struct xspin_headers h;
	__u8 b[2];

	xspin_headers(ctx, her, &h);
	if (!h.udp || xspin_store(ctx, h.udp, port, 2) || xspin_store(ctx, h.udp + 6, none, 4))
		return XSPIN_DROP;
	if (xspin_load(ctx, h.udp, b, 2) || b[0] != 0x10)
		return XSPIN_DROP;
	return xspin_reply_udp(ctx, her) ? xspin_send(her) : XSPIN_DROP;
}
XSPIN_CONTEXT(PAYLOAD);
`
	atHooks(t, func(t *testing.T) {
		h := handlersOf(t, source, HandlersConfig{})
		frame := datagramOf(100)
		sizes := []int{0}
		if h.Hook() == TC {
			sizes = append(sizes, 30)
		}
		for _, gso := range sizes {
			v := runTrain(t, h, frame, gso)
			hdr := packet.Parse(v.Frame, len(v.Frame))
			if v.Action != ActionSend || hdr.UDP.DstPort() != 0x1000 || hdr.UDP.Checksum() != 0 || hdr.IPv4.Dst() != packet.IPv4(frame[14:]).Src() {
				t.Errorf("cut every %d bytes: %v, % x", gso, v.Action, v.Frame[:60])
			}
			if n := bytes.Count(v.Frame, []byte("!?")); n != 1 && gso == 0 || n != 4 && gso == 30 {
				t.Errorf("cut every %d bytes: %d payloads were written to", gso, n)
			}
		}
	})
}
