// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"time"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/spin"
)

// A tier serves one context: it runs the handlers. Number, place in the matching table,
// credit, counters and life are the NIC's, which calls install, arm, drain and stop one
// at a time, and stats at any time from install on.
type tier interface {
	// install has everything ready but the context's own init. With an error nothing
	// is left of it. It does not wait: the NIC's lock is held.
	install() error

	// arm runs the context's init, before the first packet can come. It is called until
	// it has returned nil once.
	arm() error

	// drain waits for so long until what was on its way has been handled, and may be
	// followed by new packets. The rulesets are out of the table.
	drain(time.Duration) error

	// stop drains, ends what is open and stays, and frees what it has: no handler runs
	// from then on. With an error, packets are still out: it is called again, and does
	// not wait for more than it is told to, until they have come back.
	stop(time.Duration) error

	stats() tierStats
}

// What a tier may have in addition.
type (
	triggerable interface{ trigger(hpu.Trigger) error }
	tappable    interface{ SetTap(hpu.Tap) }
)

// tierStats are what a tier knows of its context. Counters only grow.
type tierStats struct {
	spin.ContextStats
	messages *spin.MessageStats // nil without messages
	stopped  bool               // a handler ran past its limit, and no other runs
	stuck    int                // handlers past their limit that have not returned
}
