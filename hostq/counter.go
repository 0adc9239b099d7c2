// SPDX-License-Identifier: Apache-2.0

package hostq

// A Counter is a counting event: the NIC, its handlers and the application add to
// it, and the application can wait for a value. Safe for concurrent use.
type Counter struct {
	s    *sharedCounter
	ring func() // wakes the application
}

// Add adds to the counter and returns its new value.
func (c *Counter) Add(n uint64) uint64 {
	v := c.s.value.Add(n)
	c.check(v)
	return v
}

// Get returns the counter's value.
func (c *Counter) Get() uint64 { return c.s.value.Load() }

// Set sets the counter's value.
func (c *Counter) Set(v uint64) {
	c.s.value.Swap(v) // not Store: see doorbell.go
	c.check(v)
}

// check wakes the application if it sleeps for this value. Of several callers one does.
func (c *Counter) check(v uint64) {
	if w := c.s.want.Load(); w != 0 && v >= w && c.s.want.CompareAndSwap(w, 0) {
		c.ring()
	}
}
