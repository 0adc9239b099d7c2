// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/xspin/xspin/control"
)

// errMemory is of errors that end when memory is free again.
var errMemory = errors.New("limits.memory is reached")

// A budget is limits.memory: what windows, queues and HPU memory take, also those that
// a process has kept to which the daemon has passed their descriptors.
type budget struct {
	mu          sync.Mutex
	used, limit int64
	lent        int64         // beyond the limit, while old and new are there at the same time
	left        int64         // of used: what only processes have
	freed       chan struct{} // room for one: there is more memory than before
}

// A charge is memory that counts, as long as the daemon uses it or a process may.
type charge struct {
	b       *budget
	n       int64
	used    bool // by the daemon
	tenants int  // how often processes have it
}

// charge takes memory. The error is errMemory.
func (b *budget) charge(n int64) (*charge, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.fits(n); err != nil {
		return nil, err
	}
	b.used += n
	return &charge{b: b, n: n, used: true}, nil
}

// fits returns an error if there is not so much memory. The caller has mu.
func (b *budget) fits(n int64) error {
	if b.used+n > b.limit+b.lent {
		return kindError{errMemory, fmt.Errorf("%v more memory is wanted, and %v of %v are in use", control.Size(n), control.Size(b.used), control.Size(b.limit))}
	}
	return nil
}

// room returns how much memory can be taken.
func (b *budget) room() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.limit + b.lent - b.used
}

// free says that the daemon does not use the memory any more. A nil charge is none.
func (c *charge) free() {
	if c == nil {
		return
	}
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	c.used = false
	c.b.left += c.n
	c.settle()
}

// keep says that a process has the memory, and unkeep that one has it no more.
func (c *charge) keep() {
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	c.tenants++
}

func (c *charge) unkeep() (freed int64) {
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	c.tenants--
	return c.settle()
}

// settle gives memory back that nobody has any more. The caller has mu.
func (c *charge) settle() (freed int64) {
	if c.used || c.tenants > 0 {
		return 0
	}
	c.b.left -= c.n
	c.b.used -= c.n
	c.b.wake()
	return c.n
}

// wake has whoever waits for memory try again. The caller has mu.
func (b *budget) wake() {
	select {
	case b.freed <- struct{}{}:
	default:
	}
}

// setLimit changes the limit; what is in use already stays.
func (b *budget) setLimit(n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.limit = n
	b.wake()
}

// lend lets so much more be in use than the limit says.
func (b *budget) lend(n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lent += n
}

// charge takes memory, or says who has it.
func (d *Daemon) charge(n int64) (*charge, error) {
	c, err := d.memory.charge(n)
	return c, d.full(err)
}

// enough returns an error if there is not so much memory.
func (d *Daemon) enough(n int64) error {
	d.memory.mu.Lock()
	err := d.memory.fits(n)
	d.memory.mu.Unlock()
	return d.full(err)
}

// full says what to do about an error of the budget.
func (d *Daemon) full(err error) error {
	if err == nil {
		return nil
	}
	d.memory.mu.Lock()
	left := d.memory.left
	d.memory.mu.Unlock()
	if left == 0 {
		return kindError{errBusy, fmt.Errorf("%w: raise limits.memory, or remove contexts", err)}
	}
	return kindError{errBusy, fmt.Errorf("%w, %v of these by processes that have detached and not ended (%s): end them, or raise limits.memory", err, control.Size(left), d.tenants.names())}
}

// names are the process ids of tenants, not too many.
func (k *tenants) names() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	var all []string
	for _, t := range k.list {
		all = append(all, fmt.Sprint(t.pid))
	}
	slices.Sort(all)
	if most := 8; len(all) > most {
		all = append(all[:most], "...")
	}
	return strings.Join(slices.Compact(all), ", ")
}
