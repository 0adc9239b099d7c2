// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/packet"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/slmp/slmptest"
	"github.com/xspin/xspin/spin"
)

// A segment of SLMP, from port 10000 + from of 10.0.0.2.
type segment struct {
	from    int
	flags   slmp.Flags
	id      uint32
	offset  uint32
	payload []byte
	sum     sumKind
}

// A sumKind says what UDP checksum a segment has.
type sumKind int

const (
	rightSum sumKind = iota
	noSum
	partialSum
	wrongSum
)

var (
	clientIP = [4]byte{10, 0, 0, 2}
	nicIP    = [4]byte{10, 0, 0, 1}
)

// frame is the segment as it arrives.
func (s *segment) frame() []byte {
	b := make([]byte, 42+slmp.HeaderLen, 42+slmp.HeaderLen+len(s.payload))
	slmp.Header{Flags: s.flags, ID: s.id, Offset: s.offset}.Put(b[42:])
	b = append(b, s.payload...)
	headers(b, clientIP, nicIP, uint16(10000+s.from), slmp.Port, 7, 2, 1)
	sum := udpSum(b)
	switch s.sum {
	case rightSum:
		binary.BigEndian.PutUint16(b[40:], sum)
	case wrongSum:
		binary.BigEndian.PutUint16(b[40:], sum^0x0101)
	case partialSum:
		var c packet.Checksum
		c.AddPseudo(clientIP, nicIP, 17, len(b)-34)
		binary.BigEndian.PutUint16(b[40:], c.Folded())
	}
	return b
}

// headers writes those of a datagram, but for the UDP checksum.
func headers(b []byte, src, dst [4]byte, from, to uint16, id uint16, dstMAC, srcMAC byte) {
	copy(b, []byte{2, 0, 0, 0, 0, dstMAC, 2, 0, 0, 0, 0, srcMAC, 8, 0, 0x45, 0})
	binary.BigEndian.PutUint16(b[16:], uint16(len(b)-14))
	binary.BigEndian.PutUint16(b[18:], id)
	copy(b[20:], []byte{0x40, 0, 64, 17, 0, 0})
	copy(b[26:], src[:])
	copy(b[30:], dst[:])
	binary.BigEndian.PutUint16(b[24:], packet.ChecksumOf(b[14:34]))
	binary.BigEndian.PutUint16(b[34:], from)
	binary.BigEndian.PutUint16(b[36:], to)
	binary.BigEndian.PutUint16(b[38:], uint16(len(b)-34))
	binary.BigEndian.PutUint16(b[40:], 0)
}

// udpSum is the right checksum of a datagram whose field is 0.
func udpSum(b []byte) uint16 {
	var c packet.Checksum
	c.AddPseudo([4]byte(b[26:]), [4]byte(b[30:]), 17, len(b)-34)
	c.Add(b[34:])
	if v := c.Value(); v != 0 {
		return v
	}
	return 0xffff
}

// answerFrame is an answer to a segment as it leaves.
func (s *segment) answerFrame(ack []byte) []byte {
	b := append(make([]byte, 42), ack...)
	headers(b, nicIP, clientIP, slmp.Port, uint16(10000+s.from), 0, 1, 2)
	binary.BigEndian.PutUint16(b[40:], udpSum(b))
	for len(b) < 60 {
		b = append(b, 0)
	}
	return b
}

// messagesConfig is for SLMP into one window.
func messagesConfig(t *testing.T, size int64, cfg MessagesConfig) (HandlersConfig, *hostq.Window) {
	t.Helper()
	mem, err := hostq.NewMemory("test", size+4096)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mem.Close() })
	w, err := mem.Window(8, size, spin.All)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Protocol = SLMP
	cfg.Windows = []WindowConfig{{Map: mem.Map(), Off: 8, Size: size, Rights: spin.All}}
	return HandlersConfig{Format: matcher.FormatByName("slmp"), Messages: cfg}, w
}

func depositObject(t *testing.T) *Object {
	t.Helper()
	o, err := BuiltinObject("deposit")
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// key is of the segment's message, as format slmp has it.
func (s *segment) key() mpq.Key { return mpq.Key{0x0a00, 2 << 16, uint32(10000 + s.from), s.id} }

// What a program makes of segments in any order, more than once, is what the engine on HPUs
// makes of them: the same answers, byte for byte, and the same bytes in the window.
func TestMessagesAsInGo(t *testing.T) { atHooks(t, testMessagesAsInGo) }

func testMessagesAsInGo(t *testing.T) {
	const window = 3 << 20
	o := depositObject(t)
	for _, size := range []int{1, 12, 100, 1000, 1462} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, uint64(size)))
			cfg, w := messagesConfig(t, window, MessagesConfig{Messages: 8, Segments: 4096})
			h := load(t, o, cfg)
			ref := slmptest.New(8, make([]byte, window))
			for round := range 30 {
				n := 1 + rng.IntN([]int{1, 3, 40, 700, 2000}[rng.IntN(5)])
				last := rng.IntN(size + 1)
				if n == 1 && last == 0 {
					last = size
				}
				all := make([]byte, (n-1)*size+last)
				for i := range all {
					all[i] = byte(rng.Uint32())
				}
				cumulative := slmp.Flags(0)
				if rng.IntN(4) > 0 {
					cumulative = slmp.Cumulative
				}
				of := func(k int) *segment {
					from, to := k*size, min((k+1)*size, len(all))
					s := &segment{from: round, id: uint32(round * 7), offset: uint32(from), payload: all[from:to], flags: cumulative, sum: sumKind(rng.IntN(3))}
					if rng.IntN(5) > 0 {
						s.flags |= slmp.SYN
					}
					if k == n-1 {
						s.flags |= slmp.EOM
					}
					return s
				}
				check := func(s *segment) {
					t.Helper()
					want := ref.Take(s.key(), slmp.Header{Flags: s.flags, ID: s.id, Offset: s.offset}, s.payload)
					v, err := h.Run(s.frame())
					if err != nil {
						t.Fatal(err)
					}
					var got []byte
					if v.Action == ActionSend {
						got = v.Frame
					}
					if want != nil {
						want = s.answerFrame(want)
					}
					if !bytes.Equal(got, want) {
						t.Fatalf("round %d: segment %d of %d, flags %#x:\n got %x\nwant %x\n%+v", round, s.offset/uint32(size), n, s.flags, got, want, h.Tally())
					}
				}
				check(of(0))
				// A window of segments that slides, in which they come in any order.
				for low := 1; low < n; {
					high := min(low+1+rng.IntN(64), n)
					for _, k := range rng.Perm(high - low) {
						if rng.IntN(8) > 0 {
							check(of(low + k))
						}
						if rng.IntN(8) == 0 {
							check(of(rng.IntN(high)))
						}
					}
					low = high
				}
				for range 3 {
					for _, k := range rng.Perm(n) {
						check(of(k))
					}
				}
				got := make([]byte, len(all))
				if _, err := w.ReadAt(got, 0); err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(got, all) {
					t.Fatalf("round %d: another message in the window, of %d bytes", round, len(all))
				}
				if s := h.Tally(); s.Ended != uint64(round+1) || s.Open != 0 || s.Leaked != 0 {
					t.Fatalf("round %d: %+v", round, s)
				}
			}
		})
	}
}

// runs runs segments, and returns which of them were answered.
func runs(t *testing.T, h *Handlers, all ...segment) (answers []*slmp.Ack) {
	t.Helper()
	for i := range all {
		v, err := h.Run(all[i].frame())
		if err != nil {
			t.Fatal(err)
		}
		var a *slmp.Ack
		if v.Action == ActionSend {
			n := 34 + int(binary.BigEndian.Uint16(v.Frame[38:]))
			a = new(slmp.Ack)
			if err := a.Parse(v.Frame[42:n]); err != nil {
				t.Fatalf("segment %d: %v: %x", i, err, v.Frame)
			}
		}
		answers = append(answers, a)
	}
	return answers
}

// What is wrong with a segment is counted, and harms no other message.
func TestWrongSegmentsOfMessages(t *testing.T) { atHooks(t, testWrongSegmentsOfMessages) }

func testWrongSegmentsOfMessages(t *testing.T) {
	o := depositObject(t)
	const syn, eom = slmp.SYN, slmp.EOM
	ten := make([]byte, 10)
	for _, tt := range []struct {
		name string
		all  []segment
		want func(s *MessageTally) uint64 // 1: as many as the last n segments
		n    int
	}{
		{"no header packet", []segment{{offset: 10, payload: ten}}, func(s *MessageTally) uint64 { return s.Dropped[spin.DropNoHeader] }, 1},
		{"an acknowledgement", []segment{{flags: slmp.ACK, payload: ten}}, func(s *MessageTally) uint64 { return s.Stray }, 1},
		{"a wrong checksum", []segment{{payload: ten, sum: wrongSum}}, func(s *MessageTally) uint64 { return s.Corrupt }, 1},
		{"another cut", []segment{{payload: ten}, {offset: 15, payload: ten}, {offset: 10, payload: ten[:5]}, {offset: 10, payload: make([]byte, 20)}}, func(s *MessageTally) uint64 { return s.Dropped[spin.DropOverlap] }, 3},
		{"beyond the end", []segment{{payload: ten}, {offset: 10, payload: ten, flags: eom}, {offset: 20, payload: ten}}, func(s *MessageTally) uint64 { return s.Duplicates }, 1},
		{"two ends", []segment{{payload: ten}, {offset: 30, payload: ten, flags: eom}, {offset: 40, payload: ten, flags: eom}, {offset: 20, payload: ten, flags: eom}, {offset: 40, payload: ten}}, func(s *MessageTally) uint64 { return s.Dropped[spin.DropTwoEnds] }, 3},
		{"an end before what has come", []segment{{payload: ten}, {offset: 30, payload: ten}, {offset: 20, payload: ten, flags: eom}}, func(s *MessageTally) uint64 { return s.Dropped[spin.DropTwoEnds] }, 1},
		{"an end without bytes, and one with", []segment{{payload: ten}, {offset: 30, flags: eom}, {offset: 20, payload: ten, flags: eom}}, func(s *MessageTally) uint64 { return s.Dropped[spin.DropOverlap] }, 1},
		{"the last one without EOM", []segment{{payload: ten}, {offset: 20, payload: ten, flags: eom}, {offset: 20, payload: ten}}, func(s *MessageTally) uint64 { return s.Dropped[spin.DropOverlap] }, 1},
		{"near 4 GiB", []segment{{payload: ten}, {offset: 0xfffffffa, payload: ten}}, func(s *MessageTally) uint64 { return s.Dropped[spin.DropBeyond] }, 1},
		{"too many segments", []segment{{payload: ten}, {offset: 10 * 4096, payload: ten}}, func(s *MessageTally) uint64 { return s.Dropped[spin.DropMemory] }, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: 2, Segments: 4096})
			h := load(t, o, cfg)
			for i := range tt.all {
				tt.all[i].flags |= syn
			}
			bad := len(tt.all) - tt.n
			runs(t, h, tt.all[:bad]...)
			before := h.Tally()
			answers := runs(t, h, tt.all[bad:]...)
			after := h.Tally()
			if n := tt.want(&after) - tt.want(&before); n != uint64(tt.n) {
				t.Errorf("%d counted, want %d: %+v", n, tt.n, after)
			}
			for i, a := range answers {
				if a != nil && after.Ended == 0 {
					t.Errorf("segment %d is answered: %+v", bad+i, a)
				}
			}
			other := runs(t, h, segment{from: 1, payload: ten, flags: syn}, segment{from: 1, offset: 10, payload: ten[:3], flags: syn | eom})
			if other[0] == nil || other[1] == nil || other[1].Offset != 10 {
				t.Errorf("another message is answered by %v", other)
			}
		})
	}
}

// A segment that does not fit its place fails the message, which says so once, and writes
// nothing. Its slot is free when it has been expired.
func TestMessageWithoutRoom(t *testing.T) {
	cfg, w := messagesConfig(t, 2048, MessagesConfig{Messages: 1, Segments: 4096, Events: 1 << 16})
	h := load(t, depositObject(t), cfg)
	kilo := bytes.Repeat([]byte{7}, 1000)
	answers := runs(t, h,
		segment{payload: kilo, flags: slmp.SYN}, segment{offset: 1000, payload: kilo, flags: slmp.SYN},
		segment{offset: 2000, payload: kilo, flags: slmp.SYN}, segment{offset: 1000, payload: kilo, flags: slmp.SYN},
		segment{from: 1, payload: kilo, flags: slmp.SYN})
	if answers[0] == nil || answers[1] == nil || answers[2] != nil || answers[3] != nil || answers[4] != nil {
		t.Errorf("answers: %v", answers)
	}
	if s, c := h.Tally(), h.Stats(); s.Failed != 1 || s.Dropped[spin.DropDead] != 1 || s.Dropped[spin.DropMessages] != 1 || c.Failed != 1 || c.Fault != (Fault{"deposit", spin.Segv, "deposit bytes 2000 to 3000 of a message with room for 2048: out of bounds"}) {
		t.Errorf("%+v\n%+v", s, c)
	}
	e := event(t, h)
	if e.Cause != uint32(spin.Failed) || EventFailure(&e) != "deposit bytes 2000 to 3000 of a message with room for 2048: out of bounds" || e.Port != uint32(swap16(10000)) || e.Length != 3000 || e.Missing != 1000 {
		t.Errorf("event: %+v", e)
	}
	rest := make([]byte, 48)
	if _, err := w.ReadAt(rest, 2000); err != nil || !bytes.Equal(rest, make([]byte, 48)) {
		t.Errorf("behind the last that fits: %x, %v", rest, err)
	}
	if n, err := h.Expire(h.Stop(0, spin.TimedOut)); n != 1 || err != nil {
		t.Fatalf("%d expired, %v", n, err)
	}
	if a := runs(t, h, segment{payload: kilo, flags: slmp.SYN}, segment{from: 1, payload: kilo, flags: slmp.SYN}); a[0] != nil || a[1] == nil {
		t.Errorf("after it has ended: %v; want none for its first segment, and one for another message's", a)
	}
	noEvent(t, h)
}

// A message that stays incomplete is stopped; its sender, should he come again, is not
// answered, and its slot is another's.
func TestMessageExpires(t *testing.T) { atHooks(t, testMessageExpires) }

func testMessageExpires(t *testing.T) {
	cfg, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: 1, Segments: 4096, Events: 1 << 16})
	h := load(t, depositObject(t), cfg)
	ten := make([]byte, 10)
	runs(t, h, segment{payload: ten}, segment{offset: 20, payload: ten, flags: slmp.EOM})
	if all := h.Stop(time.Hour, spin.TimedOut); len(all) != 0 {
		t.Fatalf("%d are stopped that are not an hour old", len(all))
	}
	all := h.Stop(0, spin.TimedOut)
	if len(all) != 1 || len(h.Stop(0, spin.TimedOut)) != 0 {
		t.Fatalf("%d are stopped, want 1, and once", len(all))
	}
	if a := runs(t, h, segment{offset: 10, payload: ten, flags: slmp.SYN}); a[0] != nil {
		t.Errorf("a stopped message is answered: %v", a[0])
	}
	for i := range 2 {
		if n, err := h.Expire(all); n != 1-i || err != nil {
			t.Fatalf("%d expired, %v; want %d", n, err, 1-i)
		}
	}
	if e := event(t, h); e.Cause != uint32(spin.TimedOut) || e.Length != 30 || e.Missing != 10 {
		t.Errorf("event: %+v", e)
	}
	if a := runs(t, h, segment{payload: ten, flags: slmp.SYN}, segment{from: 1, payload: ten, flags: slmp.SYN | slmp.EOM}); a[0] != nil || a[1] == nil {
		t.Errorf("answers %v, want one to the second", a)
	}
	if s := h.Tally(); s.Abandoned != 1 || s.Ended != 1 || s.Open != 0 || s.Lost != 0 || s.Leaked != 0 {
		t.Errorf("%+v", s)
	}
}

// Messages that the kernel does not end are not left stopped for ever.
func TestMessageThatIsNotExpired(t *testing.T) {
	cfg, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: 2, Segments: 4096, Events: 1 << 16})
	h := load(t, depositObject(t), cfg)
	ten := make([]byte, 10)
	runs(t, h, segment{payload: ten}, segment{from: 1, payload: ten})
	expire := h.messages.expire
	var err error
	if h.messages.expire, err = expire.Clone(); err != nil {
		t.Fatal(err)
	}
	h.messages.expire.Close()
	if n, err := h.Expire(h.Stop(0, spin.TimedOut)); n != 0 || err == nil {
		t.Fatalf("%d expired, by a program that is closed", n)
	}
	h.messages.expire = expire
	if a := runs(t, h, segment{payload: ten, offset: 10, flags: slmp.SYN | slmp.EOM}); a[0] == nil {
		t.Error("a message that goes on is not answered")
	}
	if n, err := h.Expire(h.Stop(0, spin.TimedOut)); n != 1 || err != nil {
		t.Errorf("%d expired, %v; want the other", n, err)
	}
	if s := h.Tally(); s.Ended != 1 || s.Abandoned != 1 || s.Open != 0 {
		t.Errorf("%+v", s)
	}
}

// EOM is not acknowledged before the application can know.
func TestEventsWithoutRoom(t *testing.T) {
	const room = 1 << 12 / 128
	cfg, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: 2 * room, Segments: 4096, Events: 1 << 12})
	h := load(t, depositObject(t), cfg)
	last := func(i int) segment {
		return segment{from: i, id: uint32(i), payload: []byte{1, 2, 3}, flags: slmp.SYN | slmp.EOM | slmp.Cumulative}
	}
	answered := 0
	for i := range room + 8 {
		a := runs(t, h, last(i))[0]
		switch {
		case a != nil && !a.Wait && i == answered:
			answered++
		case a == nil || !a.Wait || a.End != 3:
			t.Fatalf("message %d: %+v", i, a)
		}
	}
	if answered < room/2 || answered > room {
		t.Fatalf("%d messages are answered, and the ring has room for %d", answered, room)
	}
	if a := runs(t, h, last(answered))[0]; a == nil || !a.Wait {
		t.Errorf("without room, again: %+v", a)
	}
	// The end is said as it is, though the last segment is shorter than others.
	two := []segment{{id: 900, payload: make([]byte, 10), flags: slmp.SYN | slmp.Cumulative}, {id: 900, offset: 10, payload: []byte{1, 2, 3}, flags: slmp.SYN | slmp.EOM | slmp.Cumulative}}
	if a := runs(t, h, two[0], two[1], two[0]); a[1] == nil || !a[1].Wait || a[1].End != 13 || a[2] == nil || a[2].Wait || a[2].End != 13 {
		t.Errorf("two segments, without room: %+v, then %+v", a[1], a[2])
	}
	for range answered {
		event(t, h)
	}
	if a := runs(t, h, last(answered))[0]; a == nil || a.Wait {
		t.Errorf("with room: %+v", a)
	}
	event(t, h)
	// Those whose senders do not come again are told when their time is up.
	n, err := h.Expire(h.Stop(0, spin.TimedOut))
	if want := room + 8 - answered; n != want || err != nil {
		t.Errorf("%d expired, %v, want %d", n, err, want)
	}
	for range n {
		if e := event(t, h); e.Cause != uint32(spin.Complete) || e.Length != 3 && e.Key[3] != 900 || e.Missing != 0 {
			t.Errorf("event: %+v", e)
		}
	}
	if s := h.Tally(); s.Ended != room+9 || s.Open != 0 || s.Lost != 0 {
		t.Errorf("%+v", s)
	}

	// If there is no room then either, nobody knows of the message, and it is not acknowledged.
	before := h.Tally()
	id := 1000
	for ; ; id++ {
		if a := runs(t, h, last(id))[0]; a == nil || a.Wait {
			break
		}
	}
	if n, err := h.Expire(h.Stop(0, spin.TimedOut)); n != 1 || err != nil {
		t.Errorf("%d expired, %v, want the one without room", n, err)
	}
	if a := runs(t, h, last(id))[0]; a != nil {
		t.Errorf("the application was never told, and the sender is: %+v", a)
	}
	if s := h.Tally(); s.Ended-before.Ended != uint64(id-1000) || s.Failed != 1 || s.Lost != 1 || s.Open != 0 {
		t.Errorf("%+v", s)
	}
}

// EOM of messages that wait for room comes again on two CPUs at the same time: each ends once.
func TestEventsWithoutRoomOnTwoCPUs(t *testing.T) {
	const rounds, waiting = 60, 16
	cfg, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: 2 * waiting, Segments: 4096, Events: 1 << 12})
	h := load(t, depositObject(t), cfg)
	whole := func(id int) *segment {
		return &segment{id: uint32(id), payload: []byte{1}, flags: slmp.SYN | slmp.EOM, sum: noSum}
	}
	told := map[uint32]int{}
	r, err := ringbuf.NewReader(h.Events())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	read := func() {
		for r.AvailableBytes() > 0 {
			rec, err := r.Read()
			if err != nil {
				t.Fatal(err)
			}
			e, _ := ReadEvent(rec.RawSample)
			told[e.Key[3]]++
		}
	}
	id := 0
	for range rounds {
		for runs(t, h, *whole(id))[0] != nil {
			id++
		}
		first := id // of those that wait
		for range waiting - 1 {
			id++
			runs(t, h, *whole(id))
		}
		id++
		read()
		var here [waiting]atomic.Int32 // how many begin with a message, so that they collide
		sender := func(cpu int) error {
			runtime.LockOSThread() // and ends with the thread: it stays on its CPU
			var set unix.CPUSet
			set.Set(cpu % runtime.NumCPU())
			if err := unix.SchedSetaffinity(0, &set); err != nil {
				return err
			}
			out := make([]byte, 512)
			for i := range waiting {
				frame := whole(first + i).frame()
				for here[i].Add(1); here[i].Load() < 2; {
				}
				if _, err := h.prog.Run(&ebpf.RunOptions{Data: frame, DataOut: out, Repeat: 1}); err != nil {
					return err
				}
			}
			return nil
		}
		errs := make(chan error, 2)
		for cpu := range 2 {
			go func() { errs <- sender(cpu) }()
		}
		for range 2 {
			if err := <-errs; err != nil {
				t.Fatal(err)
			}
		}
		read()
	}
	for i := range uint32(id) {
		if told[i] != 1 {
			t.Errorf("message %d was told %d times", i, told[i])
		}
	}
	if s := h.Tally(); s.Ended != uint64(id) || s.Open != 0 || s.Leaked != 0 || s.Lost != 0 || s.Deferred != rounds*waiting {
		t.Errorf("%d messages: %+v", id, s)
	}
}

// event reads the next event.
func event(t *testing.T, h *Handlers) (e bpf.MessageEvent) {
	t.Helper()
	r := eventReader(t, h)
	defer r.Close() // thousands are read
	rec, err := r.Read()
	if err != nil {
		t.Fatal(err)
	}
	e, ok := ReadEvent(rec.RawSample)
	if !ok {
		t.Fatalf("an event of %d bytes", len(rec.RawSample))
	}
	return e
}

func noEvent(t *testing.T, h *Handlers) {
	t.Helper()
	if rec, err := eventReader(t, h).Read(); err == nil {
		t.Errorf("another event: %x", rec.RawSample)
	}
}

// eventReader is a reader that waits only shortly.
func eventReader(t *testing.T, h *Handlers) *ringbuf.Reader {
	t.Helper()
	r, err := ringbuf.NewReader(h.Events())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	r.SetDeadline(time.Now().Add(100 * time.Millisecond))
	return r
}

func swap16(v uint16) uint16 { return v<<8 | v>>8 }

// witnessSource notes in HPU memory what ran: a row of 8 KiB a message.
const witnessSource = `
#include "xspin_message.h"

struct row {
	__u32 header, completion, wrong, pad;
};

static __always_inline struct row *row(const struct xspin_her *her)
{
	return xspin_memory((__u64)(her->key[3] & 1023) << 13, sizeof(struct row));
}

XSPIN_HEADER
{
	struct row *r = row(her);

	if (!r)
		return XSPIN_SEGV;
	__sync_fetch_and_add(&r->header, 1);
	return XSPIN_PROCESS_DATA;
}

XSPIN_PAYLOAD
{
	struct row *r = row(her);
	__u32 *n = xspin_memory(((__u64)(her->key[3] & 1023) << 13) + 64 + her->offset / 10 * 4, 4);

	if (!r || !n)
		return XSPIN_SEGV;
	if (r->header != 1 || r->completion)
		__sync_fetch_and_add(&r->wrong, 1);
	if (her->offset % 20)
		xspin_now(); /* some take longer than others */
	__sync_fetch_and_add(n, 1);
	return XSPIN_SUCCESS;
}

XSPIN_COMPLETION
{
	struct row *r = row(her);

	if (!r)
		return XSPIN_SEGV;
	__sync_fetch_and_add(&r->completion, 1);
	return XSPIN_SUCCESS;
}

XSPIN_MESSAGES(HEADER | PAYLOAD | COMPLETION);
XSPIN_LICENSE("GPL");
`

// Two CPUs get all segments, each in an order of its own and several times: the header
// handler runs once and first, the payload handler once for each segment, the completion
// handler once and last; nothing is acknowledged before it has run.
func TestMessagesOnTwoCPUs(t *testing.T) { atHooks(t, testMessagesOnTwoCPUs) }

func testMessagesOnTwoCPUs(t *testing.T) {
	const messages, size = 300, 10
	mem, err := hostq.NewMemory("test", messages<<13)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mem.Close() })
	cfg, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: 3, Segments: 2048})
	cfg.Memory, cfg.MemorySize = mem.Map(), messages<<13
	h := load(t, object(t, witnessSource), cfg)
	word := func(i, at int) uint32 {
		return atomic.LoadUint32((*uint32)(unsafe.Pointer(&mem.Bytes()[i<<13+at])))
	}
	segments := func(i int) int { return 1 + i*7919%97*(i%11) }
	var failed atomic.Int32
	var here [messages]atomic.Int32 // how many begin with a message, so that they collide
	worker := func(cpu int) error {
		runtime.LockOSThread() // and ends with the thread: it stays on its CPU
		var set unix.CPUSet
		set.Set(cpu % runtime.NumCPU())
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			return err
		}
		rng := rand.New(rand.NewPCG(3, uint64(cpu)))
		out := make([]byte, 512)
		for i := range messages {
			n := segments(i)
			for here[i].Add(1); here[i].Load() < 2 && failed.Load() == 0; {
			}
			for round := 0; ; round++ {
				if round == 1000 {
					return fmt.Errorf("message %d of %d segments does not end: %+v", i, n, h.Tally())
				}
				ended := false
				for _, k := range rng.Perm(n) {
					if round == 0 {
						k = min(k, rng.IntN(n)) // the first ones earlier, and more often
					}
					s := segment{id: uint32(i), offset: uint32(k * size), payload: out[:size], flags: slmp.SYN, sum: noSum}
					if k == n-1 {
						s.flags |= slmp.EOM
					}
					frame := s.frame()
					opts := &ebpf.RunOptions{Data: frame, DataOut: out, Repeat: 1}
					ret, err := h.prog.Run(opts)
					if err != nil {
						return err
					}
					if h.hook.verdict(ret) != ActionSend {
						continue
					}
					a, err := slmp.ParseAck(opts.DataOut[42:52])
					if err != nil {
						return fmt.Errorf("message %d, segment %d: %w", i, k, err)
					}
					acked := int(a.Offset) / size
					if word(i, 64+4*acked) != 1 {
						return fmt.Errorf("message %d: segment %d is acknowledged, and has run %d times", i, acked, word(i, 64+4*acked))
					}
					if acked == n-1 {
						if word(i, 4) != 1 {
							return fmt.Errorf("message %d: EOM is acknowledged, and completion has run %d times", i, word(i, 4))
						}
						ended = true
					}
				}
				if ended {
					break
				}
			}
		}
		return nil
	}
	errs := make(chan error, 2)
	for cpu := range 2 {
		go func() {
			err := worker(cpu)
			if err != nil {
				failed.Add(1)
			}
			errs <- err
		}()
	}
	for range 2 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	for i := range messages {
		if word(i, 0) != 1 || word(i, 4) != 1 || word(i, 8) != 0 {
			t.Errorf("message %d: header %d times, completion %d, and %d segments at a wrong time", i, word(i, 0), word(i, 4), word(i, 8))
		}
		for k := range segments(i) {
			if n := word(i, 64+4*k); n != 1 {
				t.Errorf("message %d: segment %d has run %d times", i, k, n)
			}
		}
	}
	if s := h.Tally(); s.Ended != messages || s.Open != 0 || s.Leaked != 0 || s.Mute != 0 {
		t.Errorf("%+v", s)
	} else {
		t.Logf("%+v", s)
	}
}

// What the kernel finds in a hash may be another key's when it is read: so an entry that
// names another message, or one that has ended, leads nowhere.
func TestEntriesOfOtherMessages(t *testing.T) {
	cfg, w := messagesConfig(t, 1<<20, MessagesConfig{Messages: 1, Segments: 4096})
	h := load(t, depositObject(t), cfg)
	ten := []byte("0123456789")
	runs(t, h, segment{payload: ten})
	// The free list had slot 0 first, for its first lap.
	table := h.coll.Maps[bpf.MessagesTable]
	key := func(from int, id uint32) [8]uint32 { return [8]uint32{0x0a00, 2 << 16, uint32(10000 + from), id} }
	var is uint64
	if err := table.Lookup(key(0, 0), &is); err != nil || is != 1 {
		t.Fatalf("the message is slot and lap %#x, %v", is, err)
	}
	move := func(from, to [8]uint32, as uint64) {
		t.Helper()
		if err := table.Delete(from); err != nil {
			t.Fatal(err)
		}
		if err := table.Update(to, as, ebpf.UpdateNoExist); err != nil {
			t.Fatal(err)
		}
	}
	evil := bytes.Repeat([]byte{0xff}, 10)
	for i, as := range []uint64{1, 0, 2} {
		move(key(i, 0), key(i+1, 0), as)
		a := runs(t, h, segment{from: i + 1, offset: 10, payload: evil, flags: slmp.SYN}, segment{from: i + 1, offset: 20, payload: evil, flags: slmp.SYN | slmp.EOM})
		if a[0] != nil || a[1] != nil {
			t.Errorf("entry %#x: answers %v", as, a)
		}
	}
	if s := h.Tally(); s.Busy != 6 {
		t.Errorf("%d segments led nowhere, want 6: %+v", s.Busy, s)
	}
	move(key(3, 0), key(0, 0), 1)
	a := runs(t, h, segment{offset: 10, payload: ten, flags: slmp.SYN | slmp.EOM})
	got := make([]byte, 30)
	if _, err := w.ReadAt(got, 0); err != nil {
		t.Fatal(err)
	}
	if want := append([]byte("01234567890123456789"), make([]byte, 10)...); a[0] == nil || !bytes.Equal(got, want) {
		t.Errorf("the message itself: answer %v, %q", a[0], got)
	}
}

// A message that ended long ago does not keep one with its key from beginning, also when
// several CPUs get it at once; and that one is remembered in its place.
func TestForgottenMessages(t *testing.T) {
	cfg, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: 2, Segments: 4096})
	h := load(t, depositObject(t), cfg)
	all := segment{payload: make([]byte, 10), flags: slmp.SYN | slmp.EOM}
	for _, failed := range []uint64{0, 1} {
		key := [8]uint32{0x0a00, 2 << 16, 10000, 0} // of the record of numbers 0 to 127
		past := bpf.MessagePast{Since: 1}
		past.Done[0], past.Failed[0] = (1-failed)<<all.id, failed<<all.id
		if err := h.coll.Maps[bpf.MessagesEnded].Update(key, past, ebpf.UpdateAny); err != nil {
			t.Fatal(err)
		}
		before := h.Tally()
		for i, a := range runs(t, h, all, all) {
			if a == nil {
				t.Errorf("copy %d of message %d is not answered", i, all.id)
			}
		}
		if s := h.Tally(); s.Ended != before.Ended+1 || s.Duplicates != before.Duplicates+1 || s.Open != 0 || s.Leaked != 0 {
			t.Errorf("message %d: %+v", all.id, s)
		}
		all.id++
	}
}

// A sender that numbers its messages in order is remembered, however many it sends, and so is who sends seldom.
func TestManyEndedMessages(t *testing.T) {
	const count = 80_000 // more than there are records
	cfg, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: 4, Segments: 64, Remember: time.Hour})
	h := load(t, depositObject(t), cfg)
	other := segment{from: 7, id: 12345, payload: make([]byte, 10), flags: slmp.SYN | slmp.EOM}
	runs(t, h, other)
	s := segment{from: 1, payload: make([]byte, 10), flags: slmp.SYN | slmp.EOM, sum: noSum}
	frame := s.frame()
	send := func(id uint32) {
		t.Helper()
		binary.BigEndian.PutUint32(frame[44:], id)
		if v, err := h.Run(slices.Clone(frame)); err != nil || v.Action != ActionSend {
			t.Fatalf("message %d: %+v, %v", id, v, err)
		}
	}
	const first = ^uint32(0) - count/2 // numbers wrap
	for i := range uint32(count) {
		send(first + i)
	}
	before := h.Tally()
	if before.Ended != count+1 || before.Forgotten != 0 {
		t.Fatalf("%+v", before)
	}
	for i := uint32(0); i < count; i += 997 {
		send(first + i)
	}
	runs(t, h, other)
	if now := h.Tally(); now.Started != before.Started || now.Duplicates != before.Duplicates+1+(count+996)/997 {
		t.Errorf("copies have begun messages: %+v, before %+v", now, before)
	}
}

// A sender whose numbers are far apart takes its own oldest records when it has a quarter of all, and nobody else's; they
// are counted.
func TestForgottenMessagesAreTheSendersOwn(t *testing.T) {
	const records, count = 1 << 14, 1<<14 + 1000
	cfg, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: 4, Segments: 64, Remember: time.Hour})
	h := load(t, depositObject(t), cfg)
	other := segment{from: 7, id: 12345, payload: make([]byte, 10), flags: slmp.SYN | slmp.EOM}
	runs(t, h, other)
	s := segment{from: 1, payload: make([]byte, 10), flags: slmp.SYN | slmp.EOM, sum: noSum}
	frame := s.frame()
	for i := range uint32(count) {
		binary.BigEndian.PutUint32(frame[44:], i*128)
		if _, err := h.Run(slices.Clone(frame)); err != nil {
			t.Fatal(err)
		}
	}
	if s := h.Tally(); s.Ended != count+1 || s.Forgotten != count-records {
		t.Errorf("%d have ended and %d are forgotten, want %d", s.Ended, s.Forgotten, count-records)
	}
	before := h.Tally().Started
	runs(t, h, other, segment{from: 1, id: (count - 1) * 128, payload: make([]byte, 10), flags: slmp.SYN | slmp.EOM}, segment{from: 1, id: 1000 * 128, payload: make([]byte, 10), flags: slmp.SYN | slmp.EOM})
	if s := h.Tally(); s.Started != before {
		t.Errorf("%d messages begin anew", s.Started-before)
	}
	if a := runs(t, h, segment{from: 1, id: 999 * 128, payload: make([]byte, 10), flags: slmp.SYN | slmp.EOM}); a[0] == nil || h.Tally().Started != before+1 {
		t.Errorf("the last that was forgotten does not begin anew: %v", a)
	}
}

// A message beyond the room that was granted waits. When it is resumed, its event lies in the ring, and behind that its
// acknowledgement: the frame that XDP would have sent, and none where XDP would send none.
func TestResumedMessagesAreAcknowledged(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(frame []byte)
		acked  bool
	}{
		{"a sender", func([]byte) {}, true},
		{"one that takes cumulative acknowledgements", func(b []byte) { b[42] |= byte(slmp.Cumulative >> 8) }, true},
		{"one that wants no answer", func(b []byte) { b[42] &^= byte(slmp.SYN >> 8) }, false},
		{"a group's address of Ethernet", func(b []byte) { b[0] |= 1 }, false},
		{"a group's address of IPv4", func(b []byte) { b[30] = 224 }, false},
		{"a sender that all are", func(b []byte) { copy(b[26:], []byte{255, 255, 255, 255}) }, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: 4, Segments: 64, Events: 1 << 14})
			h := load(t, depositObject(t), cfg)
			r := eventReader(t, h)
			s := segment{from: 1, id: 7, payload: make([]byte, 20), flags: slmp.SYN | slmp.EOM, sum: noSum}
			frame := s.frame()
			tc.change(frame)
			if posted, turns := h.Grant(0); posted != 0 || turns != 0 {
				t.Fatalf("%d are posted, %d deferred", posted, turns)
			}
			first := ActionDrop
			if frame[42]&byte(slmp.Cumulative>>8) != 0 {
				first = ActionSend // it is told to wait
			}
			if v, err := h.Run(slices.Clone(frame)); err != nil || v.Action != first {
				t.Fatalf("%+v, %v", v, err)
			}
			rec, err := r.Read()
			if err != nil {
				t.Fatal(err)
			}
			waits, ok := ReadDeferred(rec.RawSample)
			if all, _ := h.Deferred(); !ok || len(all) != 1 || all[0] != waits {
				t.Fatalf("%+v waits, of %+v", waits, all)
			}
			if h.Resume(DeferredMessage{waits.Slot, waits.Lap + 1, waits.Turn}) != ResumeTooLate {
				t.Error("another message of the slot is resumed")
			}
			if h.Resume(waits) != Resumed || h.Resume(waits) != ResumeTooLate {
				t.Error("it is not resumed once")
			}
			if posted, turns := h.Grant(0); posted != 1 || turns != waits.Turn {
				t.Errorf("%d are posted, the last turn is %d of %d", posted, turns, waits.Turn)
			}
			if rec, err = r.Read(); err != nil {
				t.Fatal(err)
			}
			if e, ok := ReadEvent(rec.RawSample); !ok || spin.Cause(e.Cause) != spin.Complete || e.Length != 20 || e.Key[3] != 7 {
				t.Errorf("%+v", e)
			}
			rec, err = r.Read()
			if !tc.acked {
				if err == nil {
					t.Errorf("there is more: % x", rec.RawSample)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			got, _ := ReadOwed(rec.RawSample)
			// A copy is answered by XDP.
			v, err := h.Run(frame)
			if err != nil || v.Action != ActionSend || !bytes.Equal(got, v.Frame) {
				t.Errorf("%v, got\n% x, want\n% x", err, got, v.Frame)
			}
		})
	}
}

// A copy that another CPU handles while its message begins and ends begins nothing: between its look for a message that
// has ended and its own beginning, the message may have ended. In one of some 10,000 tries it has.
func TestCopiesBesideTheMessage(t *testing.T) {
	const count = 20_000
	cfg, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: 64, Segments: 64})
	h := load(t, depositObject(t), cfg)
	var ready atomic.Int64
	var both sync.WaitGroup
	for cpu := range 2 {
		both.Go(func() {
			runtime.LockOSThread()
			s := segment{from: 1, payload: make([]byte, 10), flags: slmp.SYN | slmp.EOM, sum: noSum}
			frame, out := s.frame(), make([]byte, 2000)
			for i := range int64(count) {
				binary.BigEndian.PutUint32(frame[44:], uint32(i))
				for ready.Add(1); ready.Load() < 2*(i+1); {
					runtime.Gosched()
				}
				for range cpu * int(i%40) * 3 { // one comes a little later, differently each time
					_ = ready.Load()
				}
				if _, err := h.Program().Run(&ebpf.RunOptions{Data: frame, DataOut: out, Repeat: 1}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	both.Wait()
	if s := h.Tally(); s.Started != count || s.Ended != count {
		t.Errorf("%d messages with a copy each: %+v", count, s)
	}
}

// As long as copies come of a message that has ended, or failed, it is known.
func TestCopiesKeepMessagesKnown(t *testing.T) {
	const remember = 500 * time.Millisecond
	failing := object(t, "#include \"xspin_message.h\"\nXSPIN_COMPLETION { return XSPIN_FAIL; }\nXSPIN_MESSAGES(COMPLETION);\nXSPIN_LICENSE(\"GPL\");\n")
	for name, o := range map[string]*Object{"one that has ended": depositObject(t), "one that has failed": failing} {
		t.Run(name, func(t *testing.T) {
			cfg, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: 4, Segments: 64, Remember: remember})
			h := load(t, o, cfg)
			s := segment{from: 1, id: 1, payload: make([]byte, 10), flags: slmp.SYN | slmp.EOM}
			for round := 0; ; round++ {
				s.id++
				before := h.Tally().Started
				longest, last := time.Duration(0), time.Now()
				for begun := last; last.Sub(begun) < 3*remember; last = time.Now() {
					runs(t, h, s)
					longest = max(longest, time.Since(last))
					time.Sleep(remember / 10)
				}
				n := h.Tally().Started - before
				if n == 1 {
					return
				}
				// Unless this machine has held the test up for too long.
				if longest < remember/2 || round == 5 {
					t.Fatalf("it has begun %d times, with copies every %v", n, longest)
				}
			}
		})
	}
}

// Somebody who begins messages from ever more ports, and ends none, takes the slots that
// there are until their time is up, and no more. Open messages are not harmed.
func TestManyStarts(t *testing.T) {
	const slots, starts = 64, 100_000
	cfg, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: slots, Segments: 4096})
	h := load(t, depositObject(t), cfg)
	ten := make([]byte, 10)
	runs(t, h, segment{payload: ten})
	s := segment{id: 1, payload: ten, sum: noSum}
	frame := s.frame()
	for i := range starts {
		binary.BigEndian.PutUint16(frame[34:], uint16(i))
		binary.BigEndian.PutUint32(frame[44:], 1+uint32(i>>16))
		if v, err := h.Run(frame); err != nil || v.Action != ActionDrop {
			t.Fatalf("start %d: %+v, %v", i, v, err)
		}
	}
	is := h.Tally()
	if is.Started != slots || is.Dropped[spin.DropMessages] != starts-slots+1 || is.Open != slots || is.Leaked != 0 {
		t.Errorf("%+v", is)
	}
	if a := runs(t, h, segment{offset: 10, payload: ten, flags: slmp.SYN | slmp.EOM}); a[0] == nil {
		t.Error("the open message is not answered")
	}
	if n, err := h.Expire(h.Stop(0, spin.TimedOut)); n != slots-1 || err != nil {
		t.Errorf("%d expired, %v", n, err)
	}
	for i := range slots {
		if a := runs(t, h, segment{from: i, id: 99, payload: ten, flags: slmp.SYN}); a[0] == nil {
			t.Errorf("when their time is up, message %d does not begin", i)
		}
	}
	if is := h.Tally(); is.Open != slots || is.Leaked != 0 {
		t.Errorf("%+v", is)
	}
}

// Segments of few kinds, one after the other: answers are those of the engine on HPUs.
func TestMessagesAsInGoAtTheEdges(t *testing.T) { atHooks(t, testMessagesAsInGoAtTheEdges) }

func testMessagesAsInGoAtTheEdges(t *testing.T) {
	const syn, eom = slmp.SYN, slmp.EOM
	ten := make([]byte, 10)
	for _, tt := range []struct {
		name string
		all  []segment
	}{
		{"an empty header segment, then EOM", []segment{{}, {flags: eom}, {flags: eom}}},
		{"an empty header segment again and again, one that lies, then EOM", []segment{{}, {}, {offset: 10}, {flags: eom}, {}, {offset: 10}}},
		{"empty segments of a message with bytes", []segment{{payload: ten}, {}, {offset: 10}, {offset: 33}, {offset: 10, flags: eom, payload: ten[:3]}, {offset: 20}}},
		{"empty segments before and behind the end", []segment{{payload: ten}, {offset: 20, flags: eom, payload: ten}, {offset: 10}, {offset: 30}, {offset: 31}, {offset: 10, payload: ten}}},
		{"two ends", []segment{{payload: ten}, {offset: 20, flags: eom, payload: ten}, {offset: 10, flags: eom, payload: ten}, {offset: 20, flags: eom}, {offset: 30, flags: eom}, {offset: 10, payload: ten}}},
		{"EOM alone, empty", []segment{{flags: eom}, {flags: eom}}},
		{"EOM alone", []segment{{payload: ten, flags: eom}, {payload: ten, flags: eom}}},
		{"a segment, then again as EOM, then EOM behind it", []segment{{payload: ten}, {offset: 10, payload: ten}, {offset: 10, payload: ten, flags: eom}, {offset: 20, flags: eom}}},
		{"the header segment, then again as EOM, then EOM behind it", []segment{{payload: ten}, {payload: ten, flags: eom}, {offset: 10, flags: eom}}},
	} {
		for _, more := range []slmp.Flags{syn, syn | slmp.Cumulative} {
			t.Run(fmt.Sprintf("%s, flags %#x", tt.name, more), func(t *testing.T) {
				cfg, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: 2, Segments: 4096})
				h := load(t, depositObject(t), cfg)
				ref := slmptest.New(2, make([]byte, 1<<20))
				for i, s := range tt.all {
					s.flags |= more
					v, err := h.Run(s.frame())
					if err != nil {
						t.Fatal(err)
					}
					want := ref.Take(s.key(), slmp.Header{Flags: s.flags, ID: s.id, Offset: s.offset}, s.payload)
					switch {
					case want == nil && v.Action != ActionDrop, want != nil && v.Action != ActionSend:
						t.Errorf("segment %d: %v, and on HPUs %x", i, v.Action, want)
					case want != nil && len(want) <= len(s.frame())-42 && !bytes.Equal(v.Frame, s.answerFrame(want)):
						t.Errorf("segment %d: % x, want % x", i, v.Frame[42:], want)
					}
				}
			})
		}
	}
}

// Nobody is answered who may not be (RFC 1122, 3.2.1.3).
func TestUnanswerableSegments(t *testing.T) { atHooks(t, testUnanswerableSegments) }

func testUnanswerableSegments(t *testing.T) {
	for name, spoil := range map[string]func(b []byte){
		"from a multicast address":   func(b []byte) { b[26] = 224 },
		"from the broadcast address": func(b []byte) { copy(b[26:], []byte{255, 255, 255, 255}) },
		"from loopback":              func(b []byte) { b[26] = 127 },
		"to a multicast address":     func(b []byte) { b[30] = 224 },
		"from a group MAC":           func(b []byte) { b[6] |= 1 },
		"to a group MAC":             func(b []byte) { b[0] |= 1 },
		"from its own address":       func(b []byte) { copy(b[26:30], b[30:34]) },
	} {
		cfg, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: 2, Segments: 4096})
		h := load(t, depositObject(t), cfg)
		s := segment{payload: make([]byte, 10), flags: slmp.SYN | slmp.EOM, sum: noSum}
		b := s.frame()
		spoil(b)
		if v, err := h.Run(b); err != nil || v.Action == ActionSend {
			t.Errorf("%s: %v, %v", name, v.Action, err)
		}
	}
}

// A slot whose laps are used up is not used again, and counted; others are.
func TestLapsUsedUp(t *testing.T) {
	cfg, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: 2, Segments: 4096})
	h := load(t, depositObject(t), cfg)
	ten := make([]byte, 10)
	h.messages.slots[0].Word = (1<<31 - 2) << 32
	all := func(id uint32) *slmp.Ack {
		return runs(t, h, segment{id: id, payload: ten, flags: slmp.SYN | slmp.EOM})[0]
	}
	for id := range uint32(8) {
		a := all(id)
		if a == nil && all(id) == nil {
			t.Errorf("message %d is not answered when it comes again", id)
		}
	}
	if s := h.Tally(); s.Ended != 8 || s.Open != 0 || s.Leaked != 1 {
		t.Errorf("%+v", s)
	}
}
