// SPDX-License-Identifier: Apache-2.0

package hostq

import (
	"context"
	"time"
)

// A Host is the application's side of a Pair.
type Host struct{}

// A Call is a request as the application gets it. Calls may be answered in any order.
type Call struct {
	Tag     uint64
	Words   [2]uint64
	HPU     uint32
	Reply   bool   // a response is wanted
	Payload []byte // in shared memory, good until Respond or Done; may be changed

	id   uint64
	lane int
	pos  uint64
}

// OpenHost maps the application's side. It takes the descriptors, also if it fails.
func OpenHost(l Layout, memory, bell int, lanes []int) (*Host, error) { panic("not yet") }

// Event takes the next event. False: there is none.
func (h *Host) Event(e *Event) bool { panic("not yet") }

// Request takes the next request. False: there is none.
func (h *Host) Request(c *Call) bool { panic("not yet") }

// Respond answers a request, and is Done with it. The payload is copied; it may be
// the request's own.
func (h *Host) Respond(c *Call, status int32, payload []byte) error { panic("not yet") }

// Done gives a request's slot back. Without Respond, it must not have asked for a reply.
func (h *Host) Done(c *Call) { panic("not yet") }

// Wait returns when there is an event or a request, ctx ends, or the NIC has gone
// (ErrDetached). It spins for so long before it sleeps.
func (h *Host) Wait(ctx context.Context, spin time.Duration) error { panic("not yet") }

// WaitCounter returns when counter i is at least v.
func (h *Host) WaitCounter(ctx context.Context, i int, v uint64) error { panic("not yet") }

// FD returns a descriptor for epoll: readable when there is something, after Arm has
// returned true. Disarm before taking anything.
func (h *Host) FD() int { panic("not yet") }

// Arm says that the caller is about to wait for FD. It returns false, and is not
// armed, if there is something already.
func (h *Host) Arm() bool { panic("not yet") }

// Disarm says that the caller is awake, and empties FD.
func (h *Host) Disarm() { panic("not yet") }

// Counter returns counting event i, below Counters.
func (h *Host) Counter(i int) *Counter { panic("not yet") }

// Close unmaps it. A Wait returns with os.ErrClosed.
func (h *Host) Close() error { panic("not yet") }
