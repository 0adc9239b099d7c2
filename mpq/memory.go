// SPDX-License-Identifier: Apache-2.0

package mpq

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

const (
	shards = 16
	// maxRecords is the most records in each of a shard's two generations: 256 Ki in a
	// generation of all shards. Whether senders count, which is 16 million messages, or
	// each message has a sender of its own, they and those of the other generation take
	// 48 MiB at most.
	maxRecords = 16384
)

// A memory remembers which messages have ended, and how. A record covers 64
// consecutive numbers of one sender, so that a sender that numbers its messages
// in order costs next to nothing.
//
// There are two generations. The older is dropped when the younger has been filled
// for as long as messages are remembered, or is full. A message that is looked up
// moves to the younger.
type memory struct {
	remember  int64 // ns
	word      int   // of a key: the number
	forgotten atomic.Uint64
	shards    [shards]shard
}

type shard struct {
	mu    sync.Mutex
	since int64
	gen   [2]generation // younger first
	_     [64]byte
}

// A generation is a hash table with linear probing, at most half full.
type generation struct {
	records []record
	n       int
}

type record struct {
	key          Key // with the number divided by 64
	done, failed uint64
}

// place returns where a key is remembered: the key and hash of the record, and the
// bit in it.
func (m *memory) place(q *Queue, key *Key) (rec Key, bit uint64, hash uint64) {
	rec = *key
	bit = 1 << (rec[m.word] % 64)
	rec[m.word] /= 64
	return rec, bit, q.hash(&rec)
}

// add remembers a message that has ended.
func (m *memory) add(q *Queue, key *Key, failed bool, now int64) {
	k, bit, h := m.place(q, key)
	s := &m.shards[h%shards]
	s.mu.Lock()
	defer s.mu.Unlock()
	m.rotate(s, now)
	m.put(q, s, &k, bit, h, failed)
}

// get says whether a message is remembered, and whether it failed.
func (m *memory) get(q *Queue, key *Key, now int64) (known, failed bool) {
	k, bit, h := m.place(q, key)
	s := &m.shards[h%shards]
	s.mu.Lock()
	defer s.mu.Unlock()
	m.rotate(s, now)
	for i := range s.gen {
		r := s.gen[i].find(&k, h)
		if r == nil || (r.done|r.failed)&bit == 0 {
			continue
		}
		failed = r.failed&bit != 0
		if i == 1 {
			m.put(q, s, &k, bit, h, failed)
		}
		return true, failed
	}
	return false, false
}

func (m *memory) put(q *Queue, s *shard, k *Key, bit, h uint64, failed bool) {
	g := &s.gen[0]
	r := g.find(k, h)
	if r == nil || r.done|r.failed == 0 {
		if g.n == maxRecords {
			for i := range s.gen[1].records {
				o := &s.gen[1].records[i]
				m.forgotten.Add(uint64(bits.OnesCount64(o.done | o.failed)))
			}
			s.turn()
		}
		if 2*(g.n+1) > len(g.records) {
			g.grow(q)
		}
		g.n++
		r = g.find(k, h)
		r.key = *k
	}
	if failed {
		r.failed |= bit
		r.done &^= bit
	} else {
		r.done |= bit
		r.failed &^= bit
	}
}

// rotate drops generations that are old enough.
func (m *memory) rotate(s *shard, now int64) {
	age := now - s.since
	if age < m.remember {
		return
	}
	s.turn()
	if age >= 2*m.remember {
		s.turn()
	}
	s.since = now
}

// turn drops the older generation.
func (s *shard) turn() {
	s.gen[0], s.gen[1] = s.gen[1], s.gen[0]
	g := &s.gen[0]
	if 16*g.n < len(g.records) {
		g.records = nil
	}
	clear(g.records)
	g.n = 0
}

// find returns the record of a key, or the empty one where it belongs; nil if the
// generation has no records.
func (g *generation) find(k *Key, h uint64) *record {
	if len(g.records) == 0 {
		return nil
	}
	for i := h >> 32; ; i++ {
		r := &g.records[i&uint64(len(g.records)-1)]
		if r.done|r.failed == 0 || r.key == *k {
			return r
		}
	}
}

func (g *generation) grow(q *Queue) {
	old := g.records
	g.records = make([]record, max(16, 2*len(old)))
	for i := range old {
		if r := &old[i]; r.done|r.failed != 0 {
			*g.find(&r.key, q.hash(&r.key)) = *r
		}
	}
}
