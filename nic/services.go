// SPDX-License-Identifier: Apache-2.0

package nic

import "github.com/xspin/xspin/hpu"

// Workers returns how many threads serve the HPUs.
func (n *NIC) Workers() int { panic("not yet") }

// HPUs returns how many HPUs the NIC has.
func (n *NIC) HPUs() int { return n.cfg.HPUs }

// Deactivate disarms the context's rulesets and waits, for a bounded time, until what
// was on its way has been handled. Messages stay open. It can be activated again.
func (n *NIC) Deactivate(c *Context) error { panic("not yet") }

// Trigger has the handlers of a host-activated context run for a message of the
// host's, see [hpu.Trigger].
func (n *NIC) Trigger(c *Context, t hpu.Trigger) error { panic("not yet") }

// SetTap has a tap see the context's frames; nil ends that.
func (c *Context) SetTap(t hpu.Tap) { c.hpu.SetTap(t) }
