// SPDX-License-Identifier: Apache-2.0

// Package spin has the words that all parts of XsPIN share, whatever runs the handlers:
// what handlers return, where messages go and how they end, windows, faults, counters.
// They are those of sPIN (SC 2017) and of FPsPIN. It imports nothing of XsPIN.
package spin

import "fmt"

// A Code is what a handler returns, see the table of return codes in
// docs/architecture.md.
type Code int

// Return codes.
const (
	Success Code = iota
	Drop         // the packet's bytes count as dropped; of a header handler: all packets' bytes
	Fail         // an error of the handler's: nothing it asked for is sent or kept
	Segv         // the same, for an access outside of a window
	Proceed      // of a header handler: put the payload into the window, no payload handler

	// ProcessData, of a header handler: run the payload handler.
	ProcessData = Success

	// Pending, added to a code of a header or completion handler: the
	// message's binding stays when the message has ended.
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

var codes = []string{"Success", "Drop", "Fail", "Segv", "Proceed"}
