// SPDX-License-Identifier: Apache-2.0

package hostq

import "sync/atomic"

// A Counter is a counting event: the NIC, its handlers and the application add to
// it, and the application can wait for a value. Safe for concurrent use.
type Counter struct {
	s    *sharedCounter
	ring func() // wakes the application
}

// Add adds to the counter and returns its new value.
func (c *Counter) Add(n uint64) uint64 {
	v := atomic.AddUint64(&c.s.value, n)
	c.check(v)
	return v
}

// Get returns the counter's value.
func (c *Counter) Get() uint64 { return atomic.LoadUint64(&c.s.value) }

// Set sets the counter's value.
func (c *Counter) Set(v uint64) {
	atomic.StoreUint64(&c.s.value, v)
	c.check(v)
}

// check wakes the application if it sleeps for this value. Of several callers one does.
func (c *Counter) check(v uint64) {
	if w := atomic.LoadUint64(&c.s.want); w != 0 && v >= w && atomic.CompareAndSwapUint64(&c.s.want, w, 0) {
		c.ring()
	}
}
