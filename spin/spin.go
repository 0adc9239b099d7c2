// SPDX-License-Identifier: Apache-2.0

// Package spin defines what all parts of XsPIN share, whatever runs the handlers: return
// codes, bindings, how messages end, windows, faults, counters. The names are those of
// sPIN (SC 2017) and FPsPIN. It imports no other package of XsPIN.
package spin

import "fmt"

// A Code is what a handler returns. docs/messages.md has a table of the effects.
type Code int

// Return codes.
const (
	Success  Code = iota
	Drop          // the packet's bytes count as dropped; from a header handler, the whole message's
	Fail          // the handler failed: nothing it asked for is sent or kept
	Segv          // the same, for an access outside a window
	Proceed       // from a header handler: put the payload into the window, run no payload handler
	HandOver      // from a header handler in eBPF: handlers on HPUs take the message; from any other it is as Fail

	// ProcessData, from a header handler: run the payload handler.
	ProcessData = Success

	// Pending, added to the code of a header or completion handler, keeps
	// the message's binding after the message has ended.
	Pending Code = 16
)

func (c Code) String() string {
	if c&Pending != 0 {
		return (c &^ Pending).String() + "|Pending"
	}
	if c >= 0 && int(c) < len(codes) {
		return codes[c]
	}
	return fmt.Sprintf("Code(%d)", int(c))
}

var codes = []string{"Success", "Drop", "Fail", "Segv", "Proceed", "HandOver"}
