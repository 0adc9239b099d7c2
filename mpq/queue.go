// SPDX-License-Identifier: Apache-2.0

package mpq

import (
	"math/bits"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"github.com/xspin/xspin/spin"
)

// slab is how many entries are allocated at once: as many as fill 16 KiB, one of
// the sizes that Go allocates.
const slab = 68

// A Queue has the messages in flight of one execution context. It is safe for
// concurrent use.
type Queue struct {
	c    Config
	seed [KeyWords / 2]uint64 // of the hash, random because senders choose keys
	held atomic.Int64         // packets
	done memory

	share int // bytes for the holes of one message

	mu     sync.Mutex
	tables []*Table
	shared list    // of the tables that threads share
	owners []*list // by slot, of the entries allocated
	open   atomic.Int64
	store  store
}

// A list has free entries, linked by next, the last one freed first. It is guarded by
// Queue.mu. A table that one thread uses has its own, because entries lie side by side and
// share cache lines with neighbours, and some processors fetch lines in pairs: from one
// list, two threads get neighbours, and each write of one takes the other's lines away.
type list struct{ first *Entry }

func (l *list) push(e *Entry) { e.next, l.first = l.first, e }

func (l *list) pop() *Entry {
	e := l.first
	if e != nil {
		l.first, e.next = e.next, nil
	}
	return e
}

// NewQueue returns a Queue. The error says which part of the Config is wrong.
func NewQueue(c Config) (*Queue, error) {
	if err := c.complete(); err != nil {
		return nil, err
	}
	q := &Queue{c: c}
	for i := range q.seed {
		q.seed[i] = rand.Uint64() | 1
	}
	q.done.remember = int64(c.Remember)
	q.done.word = c.Words - 1
	q.store.limit = c.Memory
	// At a bit for each segment the default, 2 MiB, is enough for 4 GiB in segments of
	// 256 bytes. A larger share would let one sender take what others need.
	q.share = max(c.Memory/8, 8<<10)
	return q, nil
}

// Open returns how many messages are in flight, those that wait for their header
// packet included.
func (q *Queue) Open() int { return int(q.open.Load()) }

// Held returns how many packets are held. The counter may exceed the limit for a
// moment, because reserve counts a packet before it knows whether there is room.
func (q *Queue) Held() int { return int(min(q.held.Load(), int64(max(q.c.Held, 0)))) }

// hash hashes a key by multiplication with the seed, which no sender knows.
func (q *Queue) hash(k *Key) uint64 {
	a, b := bits.Mul64(uint64(k[0])<<32|uint64(k[1])^q.seed[0], uint64(k[2])<<32|uint64(k[3])^q.seed[1])
	c, d := bits.Mul64(uint64(k[4])<<32|uint64(k[5])^q.seed[2], uint64(k[6])<<32|uint64(k[7])^q.seed[3])
	a, b = bits.Mul64(a^b^q.seed[2], c^d^q.seed[0])
	return a ^ b
}

// take returns an entry for a new message of a table, nil if there is no room: one of the
// table's list, a new one, or as a last resort one of another table's list.
func (q *Queue) take(t *Table) *Entry {
	q.mu.Lock()
	defer q.mu.Unlock()
	if int(q.open.Load()) == q.c.Messages {
		return nil
	}
	e := t.list.pop()
	if e == nil {
		q.allocate(t)
		e = t.list.pop()
	}
	for i := 0; e == nil; i++ {
		e = q.tables[i].list.pop()
	}
	q.open.Add(1)
	return e
}

// allocate makes entries for a table, as far as there may be more, but leaves some to the
// other tables.
func (q *Queue) allocate(t *Table) {
	slots := len(q.owners)
	n := min(slab, q.c.Messages-slots)
	if t.list != &q.shared {
		n = min(n, max(1, q.c.Messages/len(q.tables)))
	}
	entries := make([]Entry, n)
	for i := n - 1; i >= 0; i-- {
		entries[i].slot = uint32(slots + i)
		t.list.push(&entries[i])
	}
	for range entries {
		q.owners = append(q.owners, t.list)
	}
}

// give takes an entry back, for the table that it was made for.
func (q *Queue) give(e *Entry) {
	q.mu.Lock()
	q.owners[e.slot].push(e)
	q.open.Add(-1)
	q.mu.Unlock()
}

// Stats returns the counters.
func (q *Queue) Stats() spin.MessageStats {
	q.mu.Lock()
	tables := q.tables
	q.mu.Unlock()
	var s spin.MessageStats
	for _, t := range tables {
		c := &t.counters
		s.Started += c.started.Load()
		s.Ended += c.ended.Load()
		s.Failed += c.failed.Load()
		s.Abandoned += c.abandoned.Load()
		s.Discarded += c.discarded.Load()
		s.Refused += c.refused.Load()
		s.Duplicates += c.duplicates.Load()
		s.Waits += c.waits.Load()
		s.Held += c.held.Load()
		for r := range c.dropped {
			s.Dropped[r] += c.dropped[r].Load()
		}
	}
	s.Forgotten = q.done.forgotten.Load()
	s.Open, s.HeldNow, s.Memory = q.Open(), q.Held(), q.store.inUse()
	return s
}

// A store has the memory for holes that do not fit in entries: slices whose
// lengths are powers of two. Slices that are given back are kept for reuse, as far
// as the limit allows.
type store struct {
	mu    sync.Mutex
	limit int // bytes, used and kept together
	used  int
	kept  int
	free  [40][][]uint64 // by log2 of their length
}

// take returns a zeroed slice of n words, a power of two, or nil if that would
// exceed the limit.
func (s *store) take(n int) []uint64 {
	b, ok := s.find(n)
	if !ok {
		return nil
	}
	if b == nil {
		return make([]uint64, n)
	}
	clear(b)
	return b
}

// find accounts for n words. It returns a slice that was kept, not zeroed, or nil if
// one has to be allocated.
func (s *store) find(n int) (b []uint64, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used+8*n > s.limit {
		return nil, false
	}
	f := &s.free[bits.TrailingZeros(uint(n))]
	s.used += 8 * n
	if i := len(*f) - 1; i >= 0 {
		b = (*f)[i]
		(*f)[i] = nil
		*f = (*f)[:i]
		s.kept -= 8 * n
		return b, true
	}
	for i := len(s.free) - 1; i >= 0 && s.used+s.kept > s.limit; i-- {
		s.kept -= len(s.free[i]) << i * 8
		s.free[i] = nil
	}
	return nil, true
}

// give takes back what take returned.
func (s *store) give(b []uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.used -= 8 * len(b)
	s.kept += 8 * len(b)
	f := &s.free[bits.TrailingZeros(uint(len(b)))]
	*f = append(*f, b)
}

func (s *store) inUse() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used
}
