// SPDX-License-Identifier: Apache-2.0

package mpq

import (
	"fmt"
	"math/bits"
	"slices"
)

// A State is how far a message is.
type State uint8

const (
	Free     State = iota // no message
	Waiting               // for its header packet
	Starting              // the header handler runs
	Open                  // payload handlers run
	Ending                // complete, the completion handler runs
	Deferred              // it has run, but the event found no room
	Failed                // a handler failed; segments that run have yet to Finish
)

func (s State) String() string {
	names := [...]string{"free", "waiting", "starting", "open", "ending", "deferred", "failed"}
	if int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// An Entry is the state of one message in flight, until End, Refuse, Fail or the
// last Finish after Fail; then it is reused for another message. It belongs to the
// thread that uses its table.
type Entry struct {
	// Entries lie one after the other, and neighbours may belong to different threads.
	// So the fields that are written for each segment, low to seen, are placed where
	// they share no cache line with a neighbour.

	User any // the caller's; it stays when the slot is reused

	key  Key
	hash uint64
	next *Entry // in a chain of the table, or in a list of free entries
	slot uint32
	size uint32 // of regular segments; 0: the message is irregular

	low    uint64 // all bytes below are claimed. Regular: a multiple of size, or the end
	high   uint64 // end of the last byte claimed
	beyond uint32 // how many segments, or intervals, are claimed beyond low
	// stretches is how many intervals the claimed set of a regular message would
	// make. It is kept up to date because a sender can make finding them expensive.
	stretches uint32

	// set is what is claimed beyond low. Regular: bit k modulo 64*len(set) is
	// segment k. The segment at low needs no bit; its place may have that of the
	// segment one lap ahead. Irregular: the first `beyond` words are stretches,
	// start<<32 | last, ascending and not adjacent.
	set []uint64
	bit [1]uint64 // backs set while one word is enough

	// running[first:] are the segments claimed but not processed, packed and in
	// ascending order.
	running []uint64
	first   int
	few     [2]uint64 // backs running while two words are enough

	processed uint64 // bytes
	seen      int64  // when the last new segment arrived

	started   int64
	eomSeen   int64
	length    uint64 // valid with eom
	eomOffset uint32 // of EOM's segment
	timer     int32  // position in the table's timers + 1
	held      uint32 // packets
	eom       bool   // EOM is claimed

	state   State
	stopped bool // it expired, or Stop was called; state is as it was then
	discard bool // it expired, and Incomplete is Discard
	blocked bool // it was due to expire while segments ran, or while it was ending
	late    bool // its event has found no room
}

// pack packs a segment into a word. Words order by offset.
func pack(s Segment) uint64 {
	w := uint64(s.Offset)<<32 | uint64(s.Len)<<1
	if s.EOM {
		w |= 1
	}
	return w
}

// span returns the range of bytes of a packed segment.
func span(w uint64) (start, end uint64) { return w >> 32, w>>32 + w>>1&(1<<31-1) }

// Key returns the message's identity.
func (e *Entry) Key() *Key { return &e.key }

// Slot returns the entry's number, 0 to Config.Messages-1, unique within the Queue.
// A table, or all that are shared, first uses the one that it freed last; then it gets the
// lowest new ones, up to 68 at a time; if there are none, one of another table. So numbers
// have gaps.
func (e *Entry) Slot() int { return int(e.slot) }

// State returns how far the message is, or after Expired or Stop how far it was.
func (e *Entry) State() State { return e.state }

// Length returns how long the message is, known once EOM has come.
func (e *Entry) Length() (n uint64, known bool) { return e.length, e.eom }

// EOM returns the segment that ends the message, once it has come.
func (e *Entry) EOM() (Segment, bool) {
	return Segment{Offset: e.eomOffset, Len: int(e.length - uint64(e.eomOffset)), EOM: true}, e.eom
}

// Processed returns how many bytes have been processed.
func (e *Entry) Processed() uint64 { return e.processed }

// Missing returns how many bytes have not been processed, up to Length or, while
// that is unknown, up to the last byte claimed.
func (e *Entry) Missing() uint64 {
	if e.eom {
		return e.length - e.processed
	}
	return e.high - e.processed
}

// Contiguous returns the position below which all bytes are processed.
func (e *Entry) Contiguous() uint64 {
	if e.idle() {
		return e.low
	}
	return min(e.low, e.running[e.first]>>32)
}

// Started returns when the message's first segment came.
func (e *Entry) Started() int64 { return e.started }

// Bitmap appends to dst which segments beyond Contiguous have been processed: bit i
// of word w stands for the segment at Contiguous + (64w+i+1)*S, where S is the length
// of the message's first segment. It appends as many words as the last such segment
// needs, at least one and at most max, and one zero word if the message is irregular.
func (e *Entry) Bitmap(dst []uint64, max int) []uint64 {
	at := len(dst)
	dst = append(dst, 0)
	if e.size == 0 || e.high <= e.low && e.idle() {
		return dst
	}
	size := uint64(e.size)
	k := e.Contiguous()/size + 1         // bit 0
	claimed := (e.low + size - 1) / size // all segments below
	end := (e.high + size - 1) / size    // none from here on
	for base := k; base < end; base += 64 {
		if base > k {
			if len(dst)-at == max {
				break
			}
			dst = append(dst, 0)
		}
		w := &dst[len(dst)-1]
		if base < claimed {
			*w = ^uint64(0)
			if n := claimed - base; n < 64 {
				*w = 1<<n - 1
			}
		}
		if base+64 > claimed && e.beyond > 0 {
			// Up to the segment at low, places may have bits of the next lap.
			b := e.ring(base)
			if base <= claimed {
				b &^= 1<<(claimed-base+1) - 1
			}
			if n := end - base; n < 64 {
				b &= 1<<n - 1
			}
			*w |= b
		}
	}
	limit := k + uint64(len(dst)-at)*64
	for _, r := range e.running[e.first:] {
		if i := r >> 32 / size; i >= k && i < limit {
			dst[at+int((i-k)/64)] &^= 1 << ((i - k) % 64)
		}
	}
	for len(dst) > at+1 && dst[len(dst)-1] == 0 {
		dst = dst[:len(dst)-1]
	}
	return dst
}

// idle reports whether no segment runs.
func (e *Entry) idle() bool { return e.first == len(e.running) }

// Of regular messages:

// ring returns the bits of segments k to k+63.
func (e *Entry) ring(k uint64) uint64 {
	n := uint64(len(e.set) - 1)
	i, shift := k/64, k%64
	w := e.set[i&n] >> shift
	if shift > 0 {
		w |= e.set[(i+1)&n] << (64 - shift)
	}
	return w
}

// has reports whether segment k, which is not below low, is claimed.
func (e *Entry) has(k uint64) bool {
	return e.hasFrom(e.low/uint64(e.size), k)
}

// hasFrom is has, at being the number of the segment at low.
func (e *Entry) hasFrom(at, k uint64) bool {
	ahead := k - at
	return e.beyond > 0 && ahead > 0 && ahead <= uint64(len(e.set))*64 &&
		e.set[k/64&uint64(len(e.set)-1)]>>(k%64)&1 != 0
}

// hasAny reports whether one of segments from to last, not below low, is claimed.
func (e *Entry) hasAny(from, last uint64) bool {
	if e.beyond == 0 {
		return false
	}
	at := e.low / uint64(e.size)
	from, last = max(from, at+1), min(last, at+uint64(len(e.set))*64)
	for ; from <= last; from += 64 {
		w := e.ring(from)
		if n := last - from + 1; n < 64 {
			w &= 1<<n - 1
		}
		if w != 0 {
			return true
		}
	}
	return false
}

// mark claims segment k beyond low. It returns false if there is no room.
func (e *Entry) mark(q *Queue, k uint64) bool {
	at := e.low / uint64(e.size)
	if n := uint64(len(e.set)) * 64; k-at > n && !e.grow(q, at, k-at) {
		return false
	}
	e.set[k/64&uint64(len(e.set)-1)] |= 1 << (k % 64)
	e.beyond++
	switch before, after := e.hasFrom(at, k-1), e.hasFrom(at, k+1); {
	case before && after:
		e.stretches--
	case !before && !after:
		e.stretches++
	}
	return true
}

// grow makes the ring large enough for that many segments beyond the one at low,
// whose number is at. It returns false if there is no room.
func (e *Entry) grow(q *Queue, at, segments uint64) bool {
	old := uint64(len(e.set))
	words := old
	for words*64 < segments {
		words *= 2
	}
	if 8*words > uint64(q.share) {
		return false
	}
	set := q.store.take(int(words))
	if set == nil {
		return false
	}
	if e.beyond > 0 {
		// The word with the segment at low is visited twice: the bits above that
		// segment belong to this lap of the ring, the others to the next.
		last := at + 64*old
		for k := at &^ 63; k <= last; k += 64 {
			w := e.set[k/64&(old-1)]
			if k == at&^63 {
				w &= ^uint64(0) << (at % 64) << 1
			}
			if k+63 > last {
				w &= 1<<(last-k+1) - 1
			}
			set[k/64&(words-1)] |= w
		}
	}
	e.release(q)
	e.set = set
	return true
}

// advance claims the segment at low: low moves past it, and past the claimed ones
// that follow, word by word since there may be millions.
func (e *Entry) advance(q *Queue) {
	if at := e.low / uint64(e.size); e.hasFrom(at, at+1) {
		e.stretches-- // low moves to its end
	}
	e.low += uint64(e.size)
	for e.beyond > 0 {
		k := e.low / uint64(e.size)
		w := &e.set[k/64&uint64(len(e.set)-1)]
		n := bits.TrailingZeros64(^(*w >> (k % 64))) // 64 only if k is the first of the word
		if n == 0 {
			return // EOM, if claimed, is further on
		}
		*w &^= ^uint64(0) >> (64 - n) << (k % 64)
		e.beyond -= uint32(n)
		e.low += uint64(n) * uint64(e.size)
	}
	if e.eom && e.low > uint64(e.eomOffset) {
		e.low = e.length // EOM's segment may be shorter
	}
	if len(e.set) > 1 {
		e.release(q)
	}
}

// release empties set.
func (e *Entry) release(q *Queue) {
	if len(e.set) > 1 {
		q.store.give(e.set)
	}
	e.bit[0] = 0
	e.set = e.bit[:]
}

// Of irregular messages:

// convert makes a regular message irregular. It returns false unless there is room
// for its stretches and one more.
func (e *Entry) convert(q *Queue) bool {
	size, at, n := uint64(e.size), e.low/uint64(e.size), e.stretches
	if n >= MaxIntervals {
		return false
	}
	if n == 0 {
		e.size = 0
		return true
	}
	words := 1 << bits.Len32(n)
	set := q.store.take(words)
	if set == nil {
		return false
	}
	end := (e.high + size - 1) / size
	// next returns the first segment from k on that is claimed, with flip 0, or that
	// is not, with all bits set; end if there is none.
	next := func(k, flip uint64) uint64 {
		for ; k < end; k += 64 {
			if w := e.ring(k) ^ flip; w != 0 {
				return min(k+uint64(bits.TrailingZeros64(w)), end)
			}
		}
		return end
	}
	for i, to := 0, at+1; i < int(n); i++ {
		from := next(to, 0)
		to = next(from, ^uint64(0))
		set[i] = from*size<<32 | (min(to*size, e.high) - 1)
	}
	e.release(q)
	e.set, e.beyond, e.stretches, e.size = set, n, 0, 0
	return true
}

// cover tells how much of bytes start to last is claimed: all, some or nothing.
func (e *Entry) cover(start, last uint64) (all, some bool) {
	if last < e.low {
		return true, true
	}
	if start < e.low {
		return false, true
	}
	list := e.set[:e.beyond]
	i, _ := slices.BinarySearchFunc(list, start, func(w, start uint64) int {
		if w&0xffffffff < start {
			return -1
		}
		return 1
	})
	if i == len(list) || list[i]>>32 > last {
		return false, false
	}
	return list[i]>>32 <= start && list[i]&0xffffffff >= last, true
}

// insert claims bytes start to last, none of which is claimed. It returns false if
// there is no room.
func (e *Entry) insert(q *Queue, start, last uint64) bool {
	if start == e.low {
		e.low = last + 1
		if e.beyond > 0 && e.set[0]>>32 == e.low {
			e.low = e.set[0]&0xffffffff + 1
			copy(e.set, e.set[1:e.beyond])
			e.beyond--
		}
		if e.beyond == 0 {
			e.release(q)
		}
		return true
	}
	list := e.set[:e.beyond]
	i, _ := slices.BinarySearch(list, start<<32)
	before := i > 0 && list[i-1]&0xffffffff+1 == start
	after := i < len(list) && list[i]>>32 == last+1
	switch {
	case before && after:
		list[i-1] = list[i-1]>>32<<32 | list[i]&0xffffffff
		copy(list[i:], list[i+1:])
		e.beyond--
	case before:
		list[i-1] = list[i-1]>>32<<32 | last
	case after:
		list[i] = start<<32 | list[i]&0xffffffff
	default:
		if len(list) == MaxIntervals {
			return false
		}
		if len(list) == len(e.set) {
			set := q.store.take(2 * len(e.set))
			if set == nil {
				return false
			}
			copy(set, list)
			e.release(q)
			e.set = set
		}
		copy(e.set[i+1:], e.set[i:e.beyond])
		e.set[i] = start<<32 | last
		e.beyond++
	}
	return true
}

// Segments that run:

// runRoom makes room in running for another segment. It returns false if there is
// none.
func (e *Entry) runRoom(q *Queue) bool {
	if len(e.running) < cap(e.running) {
		return true
	}
	if 4*e.first >= len(e.running) {
		e.running = e.running[:copy(e.running, e.running[e.first:])]
		e.first = 0
		return true
	}
	list := q.store.take(2 * cap(e.running))
	if list == nil {
		return false
	}
	n := copy(list, e.running[e.first:])
	e.runRelease(q)
	e.running = list[:n]
	return true
}

func (e *Entry) runRelease(q *Queue) {
	if cap(e.running) > len(e.few) {
		q.store.give(e.running[:cap(e.running)])
	}
	e.running, e.first = e.few[:0], 0
}

// run adds a segment to those that run. runRoom must have found room.
func (e *Entry) run(s Segment) {
	w, n := pack(s), len(e.running)
	if n == e.first || e.running[n-1] <= w {
		e.running = append(e.running, w)
		return
	}
	i, _ := slices.BinarySearch(e.running[e.first:], w)
	e.running = slices.Insert(e.running, e.first+i, w)
}

// stop removes a segment from those that run.
func (e *Entry) stop(q *Queue, s Segment) {
	w := pack(s)
	i := e.first
	if i == len(e.running) || e.running[i] != w {
		var found bool
		i, found = slices.BinarySearch(e.running[e.first:], w)
		if !found {
			panic(fmt.Sprintf("message queue: segment %+v of message %v finished, but was not running", s, e.key))
		}
		i += e.first
	}
	if i == e.first {
		e.first++
	} else {
		e.running = append(e.running[:i], e.running[i+1:]...)
	}
	if e.idle() {
		e.runRelease(q)
	}
}

// runs reports whether a segment, or any of its bytes, is running.
func (e *Entry) runs(s Segment) bool {
	list := e.running[e.first:]
	if len(list) == 0 {
		return false
	}
	w := pack(s)
	i, found := slices.BinarySearch(list, w)
	if found || s.Len == 0 {
		return found
	}
	if i < len(list) && list[i]>>32 < s.End() {
		return true
	}
	if i > 0 {
		start, end := span(list[i-1])
		return end > uint64(s.Offset) && start < s.End()
	}
	return false
}
