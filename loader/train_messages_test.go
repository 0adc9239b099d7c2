// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/packet"
	"github.com/xspin/xspin/slmp"
)

// asTrain is the train of segments, which are of one sender and, but for the last, as long as the first.
func asTrain(all []segment) (train []byte, gso int) {
	train = all[0].frame()
	for i := range all[1:] {
		train = append(train, all[i+1].frame()[42:]...)
	}
	headers(train, clientIP, nicIP, uint16(10000+all[0].from), slmp.Port, 7, 2, 1)
	partial(train)
	return train, slmp.HeaderLen + len(all[0].payload)
}

// answerIn parses the answer that a verdict has.
func answerIn(t *testing.T, v HandlersVerdict) (a slmp.Ack, ok bool) {
	t.Helper()
	if v.Action != ActionSend {
		return a, false
	}
	n := 34 + int(binary.BigEndian.Uint16(v.Frame[38:]))
	a, err := slmp.ParseAck(v.Frame[42:n])
	if err != nil {
		t.Fatalf("%v: %x", err, v.Frame)
	}
	if n := int(binary.BigEndian.Uint16(v.Frame[16:])); max(n+14, 60) != len(v.Frame) {
		t.Fatalf("an answer of %d bytes whose IPv4 header says %d: %x", len(v.Frame), n, v.Frame)
	}
	return a, true
}

// A train of segments does to messages what its segments do one by one: the same bytes, events and counters; and
// one answer says what has come of the message that the last one was for.
func TestTrainsOfSegments(t *testing.T) {
	const window, most = 2 << 20, 3000
	o := depositObject(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	cfg, w := messagesConfig(t, window, MessagesConfig{Messages: 8, Segments: 4096, Events: 1 << 16})
	cfg.Hook = TC
	trains := load(t, o, cfg)
	cfg, w1 := messagesConfig(t, window, MessagesConfig{Messages: 8, Segments: 4096, Events: 1 << 16})
	alone := load(t, o, cfg)
	ended, unasked, ran := 0, 0, 0
	for round := 0; ran < 20000*testenv.Soak(); round++ {
		size := []int{1, 12, 40, 200, 700, 1400}[rng.IntN(6)]
		n := 1 + rng.IntN([]int{3, 40, 400, 1000}[rng.IntN(4)])
		last := 1 + rng.IntN(size)
		all := make([]byte, (n-1)*size+last)
		for i := range all {
			all[i] = byte(rng.Uint32())
		}
		asks := []int{4, 300}[rng.IntN(2)]
		of := func(k int) segment {
			from, to := k*size, min((k+1)*size, len(all))
			s := segment{from: round, id: uint32(round), offset: uint32(from), payload: all[from:to], flags: slmp.Cumulative, sum: partialSum}
			if rng.IntN(asks) == 0 {
				s.flags |= slmp.SYN
			}
			if k == n-1 {
				s.flags |= slmp.EOM | slmp.SYN
			}
			return s
		}
		// The segments in an order that is not quite theirs, some of them twice or of another message, and all of
		// them once more in the end.
		var list []segment
		apart := 0 // a train begins there, counted with the first segment
		order := rng.Perm(n)
		way := rng.IntN(4)
		if way > 0 {
			for i := range order {
				order[i] = i
			}
			if way == 1 { // EOM early, so that others complete the message
				at := rng.IntN(n)
				copy(order[at+1:], order[at:n-1])
				order[at] = n - 1
			}
		}
		for _, k := range order {
			if rng.IntN(20) == 0 {
				list = append(list, of(rng.IntN(n)))
			}
			if rng.IntN(40) == 0 { // has no header
				s := of(k)
				s.id += 1 << 20
				s.offset += uint32(size)
				list = append(list, s)
			}
			if way > 1 && k > 1 && rng.IntN(100) == 0 { // an end that is too early, behind some that lie beyond
				s := of(k / 2)
				s.flags = slmp.Cumulative | slmp.EOM // nobody answers it
				list = append(list, of(k), s)
			}
			liar := k == n-2 && order[n-1] == k && rng.IntN(2) == 0
			if liar { // in a train that comes behind EOM: of one that has both, the end may be refused
				apart = len(list) + 1
			}
			if liar || rng.IntN(30) != 0 || k == n-1 && order[n-1] != k {
				list = append(list, of(k))
			}
			if liar { // beyond the end, which is known
				for j := range rng.IntN(40) {
					list = append(list, segment{from: round, id: uint32(round), offset: uint32((n - 1 + j) * size),
						payload: bytes.Repeat([]byte{0xee}, size), flags: slmp.Cumulative, sum: partialSum})
				}
			}
		}
		list = append([]segment{of(0)}, list...)
		for k := range n {
			list = append(list, of(k))
		}
		for len(list) > 0 {
			k := 1
			for most := 1 + rng.IntN(min(128, most/(size+slmp.HeaderLen))); k < len(list) && k < most && k != apart && len(list[k-1].payload) == len(list[0].payload) && len(list[k].payload) <= len(list[0].payload); {
				k++
			}
			train, gso := asTrain(list[:k])
			if k == 1 {
				gso = 0
			}
			if list[0].offset > 0 && !slices.ContainsFunc(list[:k], func(s segment) bool { return s.offset == 0 }) && rng.IntN(10) == 0 {
				// Segments of another sender follow, which has begun no message.
				foreign := slices.Clone(list[:k])
				for i := range foreign {
					foreign[i].from = round + 30000
					run(t, alone, foreign[i].frame())
				}
				train, gso := asTrain(foreign)
				if k == 1 {
					gso = 0
				}
				runTrain(t, trains, train, gso)
			}
			ran++
			got, sent := answerIn(t, runTrain(t, trains, train, gso))
			var want slmp.Ack
			var wanted bool
			complete := false // EOM is acknowledged
			for i := range list[:k] {
				v := run(t, alone, list[i].frame())
				if a, ok := answerIn(t, v); ok {
					want, wanted = a, true
					complete = complete || a.ID == uint32(round) && !a.Wait && int(a.Offset) == (n-1)*size
				}
			}
			if sent != wanted {
				t.Fatalf("round %d: %d segments of %d bytes: answered is %v, want %v", round, k, size, sent, wanted)
			}
			if s := &list[k-1]; complete && got.ID == uint32(round) {
				if got.Wait || int(got.Offset) != (n-1)*size || int(got.End) < len(all) { // no other answer says so
					t.Fatalf("round %d: %d segments of %d bytes: %+v does not acknowledge EOM", round, k, size, got)
				}
			} else if sent && s.flags&slmp.SYN != 0 && s.id == uint32(round) {
				if string(got.Append(nil)) != string(want.Append(nil)) {
					t.Fatalf("round %d: %d segments of %d bytes: %+v, want %+v", round, k, size, got, want)
				}
			} else if sent && got.End < want.End {
				t.Fatalf("round %d: %d segments of %d bytes: %+v, less than %+v", round, k, size, got, want)
			}
			list, apart = list[k:], apart-k
		}
		got, want := make([]byte, len(all)), make([]byte, len(all))
		if _, err := w.ReadAt(got, 0); err != nil {
			t.Fatal(err)
		}
		if _, err := w1.ReadAt(want, 0); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) || !bytes.Equal(got, all) {
			t.Fatalf("round %d: other bytes in the window", round)
		}
		a, b := trains.Tally(), alone.Tally()
		unasked += int(b.Acks - a.Acks)
		a.Acks, b.Acks = 0, 0
		a.Memory, b.Memory = 0, 0
		if a != b {
			t.Fatalf("round %d:\n%+v\nsegments one by one:\n%+v", round, a, b)
		}
		one, other := event(t, trains), event(t, alone)
		one.Time, other.Time = 0, 0
		if one != other {
			t.Fatalf("round %d: %+v is told, of segments one by one %+v", round, one, other)
		}
		ended++
	}
	if s := trains.Stats(); s.Mixed != 0 || s.Uncut != 0 || s.Failed != 0 {
		t.Errorf("%+v", s)
	}
	if unasked < ended {
		t.Errorf("trains of %d messages have %d answers fewer than their segments: the generator has drifted", ended, unasked)
	}
}

// A train that nobody can cut is no segment of a message, whatever its first bytes say: it goes to Linux.
func TestTrainsThatAreNoSegments(t *testing.T) {
	const size = 100
	cfg, w := messagesConfig(t, 1<<20, MessagesConfig{Messages: 8, Segments: 4096, Events: 1 << 16})
	cfg.Hook = TC
	h := load(t, depositObject(t), cfg)
	all := bytes.Repeat([]byte("segments"), 200*size/8)
	of := func(id, n int) (list []segment) {
		for k := range n {
			list = append(list, segment{id: uint32(id), offset: uint32(k * size), payload: all[:size], flags: slmp.Cumulative | slmp.SYN, sum: partialSum})
		}
		return list
	}
	train, gso := asTrain(of(1, 8))
	change := func(change func(f []byte)) []byte {
		f := bytes.Clone(train)
		change(f)
		return f
	}
	hollow := of(1, 1)
	for range 128 {
		hollow = append(hollow, segment{id: 1, flags: slmp.Cumulative, sum: partialSum})
	}
	short, _ := asTrain(hollow)
	for name, tc := range map[string]struct {
		frame []byte
		gso   int
	}{
		"of a byte each":                      {train, 1},
		"of 5 bytes each":                     {train, 5},
		"129 headers":                         {short, slmp.HeaderLen},
		"a UDP length that is too short":      {change(func(f []byte) { f[39]-- }), gso},
		"a UDP length that is too long":       {change(func(f []byte) { f[38]++ }), gso},
		"an IPv4 length that is too short":    {change(func(f []byte) { packet.IPv4(f[14:]).SetTotalLen(500) }), gso},
		"the UDP length of its first segment": {change(func(f []byte) { binary.BigEndian.PutUint16(f[38:], uint16(8+gso)) }), gso},
	} {
		was, before := h.Tally(), h.Stats()
		v := runTrain(t, h, tc.frame, tc.gso)
		if s := h.Stats(); v.Action != ActionToStack || !bytes.Equal(v.Frame, tc.frame) || s.Uncut != before.Uncut+1 || h.Tally() != was {
			t.Errorf("%s: %v, %d uncut, %+v, want %+v", name, v.Action, s.Uncut-before.Uncut, h.Tally(), was)
		}
	}
	got := make([]byte, 1<<20)
	if _, err := w.ReadAt(got, 0); err != nil {
		t.Fatal(err)
	}
	if i := slices.IndexFunc(got, func(b byte) bool { return b != 0 }); i >= 0 {
		t.Errorf("byte %d of the window was written", i)
	}

	// As many segments as a train may have, of headers alone behind the first, are each judged: all but it say nothing.
	list := append(of(2, 1), make([]segment, 127)...)
	for i := range list[1:] {
		list[1+i] = segment{id: 2, flags: slmp.Cumulative, sum: partialSum}
	}
	before := h.Tally()
	for i := range list {
		run(t, h, list[i].frame())
	}
	alone := h.Tally()
	for i := range list {
		list[i].id = 3
	}
	list[0].payload = nil // all are as long as the first
	frame, gso := asTrain(list)
	runTrain(t, h, frame, gso)
	if s, now := h.Stats(), h.Tally(); now.Duplicates-alone.Duplicates != 127 || alone.Duplicates-before.Duplicates != 127 || s.Failed != 0 {
		t.Errorf("of 127 headers %d were judged alone, and %d in a train", alone.Duplicates-before.Duplicates, now.Duplicates-alone.Duplicates)
	}
}
