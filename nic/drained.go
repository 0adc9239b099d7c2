// SPDX-License-Identifier: Apache-2.0

package nic

// Stuck returns how many handlers of the context are past their limit and have not
// returned, also of one that was removed.
func (c *Context) Stuck() int { return c.hpu.Stuck() }

// Drained tells whether all packets have come back of a context that was removed: if
// Remove has returned an error, they may take their time. False once the NIC is closed.
func (n *NIC) Drained(c *Context) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return false
	}
	n.reap()
	return n.contexts[c.hpu.ID()] != c && n.retired[c.hpu.ID()] != c
}
