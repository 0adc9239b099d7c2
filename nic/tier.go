// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"time"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/spin"
)

// A tier serves one context: it runs the handlers. Number, place in the matching table,
// credit, counters and life are the NIC's, which calls install, arm, drain, stop and close
// one at a time, and the rest at any time from install on, also after stop.
type tier interface {
	// install has everything ready but the context's own init. With an error nothing
	// is left of it. It does not wait: the NIC's lock is held.
	install() error

	// arm runs the context's init, before the first packet can come. It is called until
	// it has returned nil once.
	arm() error

	// drain waits until what was on its way has been handled, but no longer than that.
	// The rulesets are out of the table; they may be put back.
	drain(time.Duration) error

	// stop drains, ends open messages and frees all: no handler runs from then on. An
	// error says what is still out; it is called again until there is none.
	stop(time.Duration) error

	// close ends what must not outlive the NIC, or must end before its HPUs do. No packets
	// come any more. What is still out by then the pool tells of.
	close(time.Duration)

	// What the tier knows of its context. They are asked often, each by itself: one that
	// takes the locks of all messages must not cost those who want another. Counters
	// only grow.
	Stats() spin.ContextStats
	Messages() (s spin.MessageStats, ok bool) // not ok: it has no messages
	hpuTime() time.Duration                   // that handlers took of HPUs
	Stopped() bool                            // a handler ran past its limit, and no other runs
	Stuck() int                               // handlers past their limit that have not returned
}

// What a tier may have in addition.
type (
	triggerable interface{ trigger(hpu.Trigger) error }
	tappable    interface{ SetTap(hpu.Tap) }
	perCPU      interface{ Packets() []uint64 } // handled, by CPU that received them
	mapped      interface {                     // its handlers may have maps of their own
		ownMaps() ([]spin.OwnMap, error)
	}
)
