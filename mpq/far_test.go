// SPDX-License-Identifier: Apache-2.0

package mpq

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xspin/xspin/spin"
)

// FPsPIN's sender with threads has thread k begin k parts into the message, all of them
// at once: nothing is lost, and what is ahead of the first hole is most of the message.
func TestPartsThatBeginFarApart(t *testing.T) {
	const segment = 1408
	for _, tt := range []struct {
		threads int
		bytes   uint32
	}{{2, 200e6}, {4, 200e6}, {4, 1 << 30}} {
		q, tab := queue(t, Config{})
		k := Key{1}
		last := (tt.bytes - 1) / segment // EOM's segment, which goes when all others have gone
		e := begin(t, tab, &k, seg(0, segment), 1)
		tab.Finish(e, seg(0, segment), 1)
		at, end := make([]uint32, tt.threads), make([]uint32, tt.threads)
		for i := range tt.threads {
			at[i], end[i] = uint32(i)*last/uint32(tt.threads), uint32(i+1)*last/uint32(tt.threads)
		}
		at[0] = 1
		r := rand.New(rand.NewPCG(1, uint64(tt.threads)))
		for left := int(last) - 1; left > 0; {
			i := r.IntN(tt.threads)
			for range min(r.Uint32N(256), end[i]-at[i]) { // a window
				run(t, tab, &k, seg(at[i]*segment, segment), 1)
				at[i]++
				left--
			}
		}
		if e.Contiguous() != uint64(last)*segment {
			t.Fatalf("%d threads, %d bytes: contiguous to %d", tt.threads, tt.bytes, e.Contiguous())
		}
		s := Segment{Offset: last * segment, Len: int(tt.bytes - last*segment), EOM: true}
		if _, d, why := tab.Arrive(&k, s, 1); d != Run {
			t.Fatalf("%d threads, %d bytes: EOM: %v (%v)", tt.threads, tt.bytes, d, why)
		}
		if !tab.Finish(e, s, 1) || e.Missing() != 0 {
			t.Errorf("%d threads, %d bytes: not complete, %d bytes missing", tt.threads, tt.bytes, e.Missing())
		}
		if m := q.Stats().Memory; m != 0 {
			t.Errorf("%d bytes of memory for a message without holes", m)
		}
	}
}

// One message cannot take the room of others, however far ahead it goes.
func TestOneMessageGetsAnEighth(t *testing.T) {
	const memory = 1 << 20
	q, tab := queue(t, Config{Memory: memory})
	far, near := Key{1}, Key{2}
	begin(t, tab, &far, seg(0, 1), 1)
	begin(t, tab, &near, seg(0, 1), 1)
	run(t, tab, &far, seg(memory+1, 1), 1) // a bit for each behind low, in an eighth of the bytes
	arrive(t, tab, &far, seg(memory+2, 1), 1, Drop, spin.DropMemory)
	if m := q.Stats().Memory; m != memory/8 {
		t.Errorf("%d bytes in use, want %d", m, memory/8)
	}
	run(t, tab, &near, seg(memory, 1), 1)
}

// A message with too many stretches to be cut otherwise, of which the sender goes on to
// send other cuts: what is refused is to cost the same however long the ring is.
func BenchmarkRefusedCuts(b *testing.B) {
	for name, first := range map[string]uint32{"near": 2, "far": 16e6} {
		b.Run(name, func(b *testing.B) {
			_, tab := queue(b, Config{})
			k := Key{1}
			begin(b, tab, &k, seg(0, 2), 1)
			for i := range uint32(MaxIntervals) {
				run(b, tab, &k, seg(2*first+4*i, 2), 1)
			}
			for b.Loop() {
				arrive(b, tab, &k, seg(3, 1), 1, Drop, spin.DropMemory)
			}
		})
	}
}

// stretches counts those beyond the first hole.
func stretches(have []bool) (n int) {
	first := slices.Index(have, false)
	for i := first + 1; first >= 0 && i < len(have); i++ {
		if have[i] && !have[i-1] {
			n++
		}
	}
	return n
}

// Segments in any order, with jumps of all lengths, against a list of what has come: as
// regular message, and after it has become an irregular one.
func TestRingAgainstAList(t *testing.T) {
	r := rand.New(rand.NewPCG(rand.Uint64(), 0))
	for range 200 {
		q, tab := queue(t, Config{})
		k := Key{1}
		size := 1 + r.Uint32N(3)
		n := 2 + r.IntN(1<<(3+r.IntN(12)))
		have := make([]bool, n)
		have[0] = true
		e := begin(t, tab, &k, seg(0, int(size)), 1)
		tab.Finish(e, seg(0, int(size)), 1)
		left := n - 1
		claim := func(i int) {
			s := seg(uint32(i)*size, int(size))
			if have[i] {
				arrive(t, tab, &k, s, 1, Again, spin.NotDropped)
				return
			}
			run(t, tab, &k, s, 1)
			have[i], left = true, left-1
		}
		low := func() int {
			if i := slices.Index(have, false); i >= 0 {
				return i
			}
			return n
		}
		irregular := size > 1 && r.IntN(2) == 0
		stop := 0
		if irregular {
			stop = r.IntN(n)
		}
		for left > stop {
			at, length := r.IntN(n), 1+r.IntN(1+n/4)
			if r.IntN(3) == 0 {
				at = low()
			}
			for i := at; i < min(at+length, n) && left > 0; i++ {
				claim(i)
			}
			if got := e.Contiguous(); got != uint64(low())*uint64(size) {
				t.Fatalf("%d segments of %d: contiguous to %d, want %d segments", n, size, got, low())
			}
			if stretches := stretches(have); int(e.stretches) != stretches {
				t.Fatalf("%d segments: counted %d stretches, there are %d", n, e.stretches, stretches)
			}
			for range 20 {
				if i := r.IntN(n); uint64(i)*uint64(size) >= e.low && e.has(uint64(i)) != have[i] && uint64(i)*uint64(size) != e.low {
					t.Fatalf("%d segments: segment %d is claimed: %v, want %v", n, i, !have[i], have[i])
				}
			}
		}
		if !irregular || left == 0 {
			if left == 0 && q.Stats().Memory != 0 {
				t.Fatalf("%d bytes of memory for a message without holes", q.Stats().Memory)
			}
			continue
		}
		// One byte of a missing segment: now it is a list of stretches, or too many.
		i := low()
		_, d, why := tab.Arrive(&k, seg(uint32(i)*size+1, 1), 1)
		if d == Drop && why == spin.DropMemory && stretches(have) >= MaxIntervals-1 {
			continue
		}
		if d != Run {
			t.Fatalf("%d segments, %d stretches: %v (%v)", n, stretches(have), d, why)
		}
		tab.Finish(e, seg(uint32(i)*size+1, 1), 1)
		for j := range have {
			if all, some := e.cover(uint64(j)*uint64(size), uint64(j)*uint64(size)+uint64(size)-1); all != have[j] || some != (have[j] || j == i) {
				t.Fatalf("%d segments of %d: of segment %d all %v, some %v have come, want %v", n, size, j, all, some, have[j])
			}
		}
	}
}
