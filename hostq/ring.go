// SPDX-License-Identifier: Apache-2.0

package hostq

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"unsafe"
)

// A ring is a power of two of slots in shared memory, which both sides have mapped.
//
// Positions count from 0 and never wrap. The slot of position p begins with a lap
// word, which the producer's side alone writes: it is p/slots until p is published,
// and p/slots+1 from then on. Zeroed memory is an empty ring. The consumer's side
// writes one word, the head: all positions before it are free again.
//
// So each side believes one thing of the other, can check it, and does: a lap word is
// one of two values, a head is between the last one and the tail. Everything else
// that a side needs to know is its own, out of reach of the other.
type ring struct {
	mem    []byte // of all slots
	stride uint64 // of a slot, a multiple of 8
	mask   uint64
	shift  int
}

func newRing(mem []byte, slots, stride int) ring {
	return ring{
		mem:    mem[: slots*stride : slots*stride],
		stride: uint64(stride),
		mask:   uint64(slots - 1),
		shift:  bits.TrailingZeros64(uint64(slots)),
	}
}

func (r *ring) slots() uint64 { return r.mask + 1 }

// slot returns the slot of a position.
func (r *ring) slot(pos uint64) []byte {
	off := (pos & r.mask) * r.stride
	return r.mem[off : off+r.stride : off+r.stride]
}

// lap returns the lap word of a position.
func (r *ring) lap(pos uint64) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(unsafe.SliceData(r.slot(pos))))
}

// unpublished is what the lap word says before the position is published. 32 bits
// are enough: a slot's word is never more than one lap behind.
func (r *ring) unpublished(pos uint64) uint32 { return uint32(pos >> r.shift) }

// pad keeps words of different threads out of each other's cache lines; two lines,
// because x86 prefetches lines in pairs.
type pad [128]byte

// A producer is the end of a ring that puts. Safe for concurrent use.
type producer struct {
	ring
	head *uint64 // shared: the consumer's
	_    pad
	tail atomic.Uint64 // the next position to claim
	seen atomic.Uint64 // the consumer's head as last read, and found possible
	_    pad
}

// claim takes up to n positions for the caller to fill and publish; k is how many, at
// least one. The error is ErrFull or ErrBroken, as they are.
func (p *producer) claim(n uint64) (pos, k uint64, err error) {
	for {
		pos = p.tail.Load()
		used := pos - p.seen.Load()
		if used+n > p.slots() {
			head, ok := p.look()
			if !ok {
				return 0, 0, ErrBroken
			}
			if used = pos - head; used == p.slots() {
				if p.tail.Load() == pos {
					return 0, 0, ErrFull
				}
				continue
			}
			if used > p.slots() {
				continue // pos is an old one: others have claimed it, and more
			}
		}
		k = min(n, p.slots()-used)
		if p.tail.CompareAndSwap(pos, pos+k) {
			return pos, k, nil
		}
	}
}

// look reads the consumer's head. It returns ok false if that cannot be right.
func (p *producer) look() (head uint64, ok bool) {
	// In this order: the head that an honest consumer shows is not before one that
	// was seen before, and not beyond what is claimed after.
	last := p.seen.Load()
	head = atomic.LoadUint64(p.head)
	tail := p.tail.Load()
	if head < last || head > tail {
		return 0, false
	}
	for last < head && !p.seen.CompareAndSwap(last, head) {
		last = p.seen.Load()
	}
	return head, true
}

// publish gives a claimed position to the consumer, with all that was written to its
// slot, and to memory, before. What the caller then reads is read after.
func (p *producer) publish(pos uint64) {
	p.lap(pos).Swap(p.unpublished(pos) + 1) // not Store: see doorbell.go
}

// free returns how many positions can be claimed. If want can by what it knows, it does not look at what the consumer
// says. It returns ok false if that cannot be right.
func (p *producer) free(want int) (n int, ok bool) {
	for i := 0; ; i++ {
		// In this order: seen is never beyond what the tail is then.
		seen := p.seen.Load()
		if free := int(p.slots() - min(p.tail.Load()-seen, p.slots())); free >= want || i > 0 {
			return free, true
		}
		if _, ok := p.look(); !ok {
			return 0, false
		}
	}
}

// held returns how many positions the consumer has not freed, as far as it can be
// believed.
func (p *producer) held() int {
	head, tail := atomic.LoadUint64(p.head), p.tail.Load()
	return int(min(tail-min(head, tail), p.slots()))
}

// A consumer is the end of a ring that takes. Safe for concurrent use; positions may
// be released in any order.
type consumer struct {
	ring
	head  *uint64 // shared: ours, never read
	batch uint64  // how many positions may be released before the head says so
	_     pad
	next  atomic.Uint64 // the next position to take
	freed atomic.Uint64 // all before are released
	shown atomic.Uint64 // what the head says
	mu    sync.Mutex    // of head and shown
	_     pad
	// early has position+1 of what was released before its turn.
	early []atomic.Uint64
}

func (c *consumer) init(r ring, head *uint64) {
	c.ring = r
	c.head = head
	c.batch = lag(r.slots())
	c.early = make([]atomic.Uint64, r.slots())
}

// ready tells whether there is something to take. After what the caller has stored
// before, in the order of all: see the package's documentation.
func (c *consumer) ready() bool {
	pos := c.next.Load()
	return c.lap(pos).Load() != c.unpublished(pos)
}

// take returns a position that is published, for the caller to read and release.
// False: there is none. The error is ErrBroken, as it is.
func (c *consumer) take() (pos uint64, ok bool, err error) {
	for {
		pos = c.next.Load()
		switch lap := c.unpublished(pos); c.lap(pos).Load() {
		case lap + 1:
			if c.next.CompareAndSwap(pos, pos+1) {
				return pos, true, nil
			}
		case lap:
			if c.next.Load() == pos {
				c.flush()
				return 0, false, nil
			}
		default:
			if c.next.Load() == pos {
				return 0, false, ErrBroken
			}
		}
		// Others have taken it.
	}
}

// release frees a position.
func (c *consumer) release(pos uint64) {
	if c.freed.Load() != pos || !c.freed.CompareAndSwap(pos, pos+1) {
		c.early[pos&c.mask].Swap(pos + 1) // not Store: see doorbell.go
	}
	// Either who frees the position before sees this one, or it is seen here that
	// that was done.
	f := c.freed.Load()
	for c.early[f&c.mask].Load() == f+1 {
		c.freed.CompareAndSwap(f, f+1)
		f = c.freed.Load()
	}
	if f-c.shown.Load() >= c.batch {
		c.flush()
	}
}

// lag is how many positions may be free before the head says so: writing it each time
// would cost more than all the rest.
func lag(slots uint64) uint64 { return min(max(slots/8, 1), 32) }

// flush shows the producer what has been freed.
func (c *consumer) flush() {
	// Whoever finds it locked leaves it to the one who has it locked, and whoever looks
	// again.
	for c.freed.Load() != c.shown.Load() && c.mu.TryLock() {
		f := c.freed.Load()
		c.shown.Store(f)
		atomic.StoreUint64(c.head, f)
		c.mu.Unlock()
	}
}
