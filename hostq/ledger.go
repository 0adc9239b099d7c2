// SPDX-License-Identifier: Apache-2.0

package hostq

import (
	"sync"
	"sync/atomic"
)

// A Ledger shares out the free places of a queue among all who fill it. A holder of places that were set aside finds room
// for as many entries, whatever the others do; so they can be promised to somebody else before the entry is there. Its methods
// are safe for concurrent use; Take and Give have no lock, and allocate nothing.
type Ledger struct {
	free  func(want int) int
	aside atomic.Int64

	mu      sync.Mutex // guards what follows
	watches map[*func()]struct{}
}

// NewLedger makes one of a queue. Free returns how many places are free, whether or not they are set aside; it may return
// fewer if that is want or more.
func NewLedger(free func(want int) int) *Ledger {
	l := &Ledger{}
	l.init(free)
	return l
}

func (l *Ledger) init(free func(want int) int) { l.free = free }

// Take sets n places aside, or as many as there are, and returns how many.
func (l *Ledger) Take(n int) int {
	if n <= 0 {
		return 0
	}
	// First the places, then the look: of two who take at once at least the second sees what the other has. A
	// place is given back after it was filled, so none counts as free meanwhile.
	aside := l.aside.Add(int64(n))
	over := int(min(max(aside-int64(l.free(int(aside))), 0), int64(n)))
	if over > 0 {
		l.aside.Add(-int64(over))
	}
	return n - over
}

// Give gives back places, which were filled or are not wanted any more.
func (l *Ledger) Give(n int) { l.aside.Add(-int64(n)) }

// Free returns how many places Take would find now.
func (l *Ledger) Free() int {
	aside := l.aside.Load()
	return max(l.free(int(aside)+1<<30)-int(aside), 0)
}

// Claim is Take of one place, for which holders of others give up some that they do not need. It may wait for their
// locks, so the caller has none that they take.
func (l *Ledger) Claim() bool {
	if l.Take(1) == 1 {
		return true
	}
	l.Short()
	return l.Take(1) == 1
}

// Holders returns how many there are: those of Watch.
func (l *Ledger) Holders() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.watches)
}

// Short has those who have set places aside give up some: Watch.
func (l *Ledger) Short() {
	if l.aside.Load() == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for f := range l.watches {
		(*f)()
	}
}

// Watch has f called when somebody has found all free places set aside: it gives back what its caller holds and does not
// need. It ends with stop.
func (l *Ledger) Watch(f func()) (stop func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.watches == nil {
		l.watches = map[*func()]struct{}{}
	}
	l.watches[&f] = struct{}{}
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.watches, &f)
	}
}
