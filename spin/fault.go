// SPDX-License-Identifier: Apache-2.0

package spin

import "fmt"

// A FaultKind says what went wrong.
type FaultKind int

// Kinds of faults.
const (
	HandlerFailed  FaultKind = iota // a handler returned Fail or Segv
	HandlerPanic                    // contained: the packet is lost, the context continues
	HandlerOverrun                  // past its time limit: the context is stopped
	MessageRefused                  // the binder refused a message
	MessageTooLong                  // it has more segments than a message may have in the kernel
	EventsLost                      // events of messages in the kernel found no room in time
	FaultKinds                      // number of kinds
)

func (k FaultKind) String() string {
	switch k {
	case HandlerFailed:
		return "handler failed"
	case HandlerPanic:
		return "handler panic"
	case HandlerOverrun:
		return "handler overrun"
	case MessageRefused:
		return "message refused"
	case MessageTooLong:
		return "message too long"
	case EventsLost:
		return "events lost"
	}
	return fmt.Sprintf("FaultKind(%d)", int(k))
}

// A Fault tells the application what went wrong in a handler. Every packet may cause one,
// so a context reports one of each kind per period, which is set when its NIC is opened.
// The others are counted, in the next report or, when the period or the context ends, in
// one of their own.
type Fault struct {
	Kind    FaultKind
	Context uint16
	Name    string // of the context
	HPU     int
	Detail  string // panic value and stack, the error, or the time; "" if only More is reported
	More    uint64 // faults of this kind that were held back before it
}

func (f Fault) String() string {
	return fmt.Sprintf("context %d (%s) on HPU %d: %s", f.Context, f.Name, f.HPU, f.Text())
}

// Text says what happened, and how often.
func (f Fault) Text() string {
	switch {
	case f.More == 0:
		return fmt.Sprintf("%s: %s", f.Kind, f.Detail)
	case f.Detail == "":
		return fmt.Sprintf("%s: %d more", f.Kind, f.More)
	}
	return fmt.Sprintf("%s (and %d before it): %s", f.Kind, f.More, f.Detail)
}
