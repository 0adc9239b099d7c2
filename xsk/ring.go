// SPDX-License-Identifier: Apache-2.0

package xsk

import (
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Desc describes one buffer of a frame: where its bytes start in the UMEM, and how
// many there are. It has the layout of the kernel's struct xdp_desc.
type Desc struct {
	Addr    uint64
	Len     uint32
	Options uint32
}

// Continued is set in Desc.Options when the frame continues in the next Desc.
const Continued = unix.XDP_PKT_CONTD

// pad keeps fields of different goroutines out of each other's cache lines. It is
// two lines long because x86 prefetches lines in pairs.
type pad [128]byte

// ring is our end of a ring with a single producer and a single consumer; the
// kernel has the other end. One goroutine at a time may use it, except for
// corrupt, which anyone may read. reset must be called on a zero ring; then it has
// no entries, and is empty as well as full.
//
// Indices have 32 bits, run freely and wrap: only differences mean anything.
type ring[T uint64 | Desc] struct {
	producer *uint32 // shared: written by the producer
	consumer *uint32 // shared: written by the consumer
	flags    *uint32 // shared: written by the kernel
	entries  []T     // shared: a power of two of them, or none
	size     uint32  // len(entries)
	own      uint32  // our index; the shared copy is written once per batch
	peer     uint32  // the kernel's index as last read, never further from own than size
	mem      []byte  // the mapping, nil after reset

	corrupt atomic.Uint64 // reads of the kernel's index that were refused
}

// reset makes r a ring without entries and returns its mapping.
func (r *ring[T]) reset() (mem []byte) {
	mem = r.mem
	idle := new(uint32)
	r.producer, r.consumer, r.flags = idle, idle, idle
	r.entries, r.size, r.own, r.peer, r.mem = nil, 0, 0, 0, nil
	return mem
}

// needWakeup says whether the kernel asks to be woken.
func (r *ring[T]) needWakeup() bool {
	return atomic.LoadUint32(r.flags)&unix.XDP_RING_NEED_WAKEUP != 0
}

// consumer is the end that takes: of a receive or completion ring.
type consumer[T uint64 | Desc] struct{ ring[T] }

// available reads the kernel's index and returns the number of entries to take.
func (c *consumer[T]) available() uint32 {
	p := atomic.LoadUint32(c.producer)
	n := p - c.own
	if n > c.size {
		c.corrupt.Add(1)
		return 0
	}
	c.peer = p
	return n
}

// take copies out up to len(dst) entries and hands their places back to the
// kernel. The kernel's index is read only when the known entries are used up.
func (c *consumer[T]) take(dst []T) int {
	n := c.peer - c.own
	if n == 0 {
		if n = c.available(); n == 0 {
			return 0
		}
	}
	if uint(n) > uint(len(dst)) {
		n = uint32(len(dst))
		if n == 0 {
			return 0
		}
	}
	k := copy(dst[:n], c.entries[c.own&(c.size-1):])
	copy(dst[k:n], c.entries)
	c.own += n
	// Releases: the kernel may overwrite the entries from here on.
	atomic.StoreUint32(c.consumer, c.own)
	return int(n)
}

// producer is the end that puts: of a fill or transmit ring.
type producer[T uint64 | Desc] struct{ ring[T] }

// held returns how many entries the kernel has not consumed; ok is false when
// its index cannot be right.
func (p *producer[T]) held() (n uint32, ok bool) {
	c := atomic.LoadUint32(p.consumer)
	n = p.own - c
	if n > p.size {
		p.corrupt.Add(1)
		return 0, false
	}
	p.peer = c
	return n, true
}

// room returns how many of want entries can be put. The kernel's index is read
// only when the known room does not suffice.
func (p *producer[T]) room(want int) int {
	free := p.size - (p.own - p.peer)
	if uint(free) < uint(want) {
		n, ok := p.held()
		if !ok {
			return 0
		}
		free = p.size - n
	}
	return min(int(free), want)
}

// put publishes src. The caller must have found room for it.
func (p *producer[T]) put(src []T) {
	if len(src) == 0 {
		return
	}
	k := copy(p.entries[p.own&(p.size-1):], src)
	copy(p.entries, src[k:])
	p.own += uint32(len(src))
	// Publishes: the kernel owns the entries from here on. On amd64 this is an
	// XCHG, a full barrier, so a need_wakeup flag read afterwards is not stale.
	atomic.StoreUint32(p.producer, p.own)
}
