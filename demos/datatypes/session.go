// SPDX-License-Identifier: Apache-2.0

// Package datatypes is the third demo: messages that handlers scatter to where an MPI
// datatype says, while the application computes.
package datatypes

import (
	"context"
	"time"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/netns"
)

// Deposit is a strategy beside those of ddt: no datatype. The stream is placed as it
// comes, in a row, by the handler set "deposit". It is what datatypes are compared with.
const Deposit = "deposit"

// A Transfer is what a round moves: messages that are all the same, each into a place of
// its own.
type Transfer struct {
	Type     string // as ddt.Resolve takes it
	Count    int64  // of what Type resolves to, in a message
	Parallel int    // messages of a round, all at the same time
	Strategy string // one of ddt.Strategies, or Deposit
	Interval int64  // bytes of the stream between checkpoints; 0: chosen by the model
}

// A Setup is where a session runs, and how.
type Setup struct {
	HPUs      int
	Wait      string // of the HPUs: adaptive, sleep or spin
	NICCPUs   []int  // for the threads that serve the HPUs, empty for any
	AppCPU    int    // for the application, -1 for any
	SenderCPU int    // -1 for any
}

// A Session is a NIC, an application that is attached to it, and a sender at the other
// end, each a process of its own but the NIC, which is in this one. Its transfers take
// turns: each has an execution context, and one of them is active at a time. It is not
// safe for concurrent use, but for Close.
type Session struct{}

// Open starts a session on a lab, with nobody else on the lab's ends.
func Open(ctx context.Context, lab *netns.Lab, s Setup, transfers ...Transfer) (*Session, error) {
	panic("not yet")
}

// Info tells about transfer i.
func (s *Session) Info(i int) Info { panic("not yet") }

// Round has the sender send transfer i once. After an error, ctx's too, the session is
// good for Close only.
func (s *Session) Round(ctx context.Context, i int) (*Round, error) { panic("not yet") }

// Verify is Round, after which every byte of the window is compared with what must be
// there. What is wrong is an error that wraps ErrContents.
func (s *Session) Verify(ctx context.Context, i int) (*Round, error) { panic("not yet") }

// Compute has the application multiply matrices, with nothing else to do.
func (s *Session) Compute(ctx context.Context, g GEMMs) (time.Duration, error) { panic("not yet") }

// Overlap is Round while the application multiplies matrices.
func (s *Session) Overlap(ctx context.Context, i int, g GEMMs) (*Overlapped, error) {
	panic("not yet")
}

// Close ends all of it, and leaves the interface as it was.
func (s *Session) Close() error { panic("not yet") }

// Info is what is known of a Transfer before it runs.
type Info struct {
	Transfer
	Elements  int64      // of the type, in a message
	Message   int64      // bytes of a message's stream
	Span      int64      // bytes of the window from the first that a message touches to the last
	Blocks    int64      // pieces in a row that a message is placed in
	Placement ddt.Memory // what the strategy takes of the NIC's memory
}

// A Round is what one took.
type Round struct {
	Bytes    int64 // of all streams
	Messages int

	// From the request to the sender, ready-to-send, on.
	Took time.Duration // until the application knew that everything was there
	NIC  time.Duration // until the last message was over, by the NIC's timestamp

	Segments      uint64 // sent, each counted once
	Retransmitted uint64 // sent again
	Packets       uint64 // that handlers were run for
	Copies        uint64 // that these made; 0: not known, with Deposit

	CPU CPU
}

// CPU is the time that processes have used during a round, in user and system mode.
// Softirqs run on the account of who sends.
type CPU struct {
	NIC, App, Sender time.Duration
	// Machine is of all processes and interrupts there are, but in steps of 10 ms for
	// each CPU: for long rounds, or the sum of many.
	Machine time.Duration
}

// Sum returns the time of the three processes.
func (c CPU) Sum() time.Duration { return c.NIC + c.App + c.Sender }

// GEMMs are double-precision products of square matrices, one after the other.
type GEMMs struct {
	N     int // rows and columns
	Count int
}

// Overlapped is a round with computation beside it. Times begin with the request to the
// sender.
type Overlapped struct {
	Round
	Compute time.Duration // all GEMMs together, without looking for messages between them
	Both    time.Duration // until all GEMMs were done and all messages known of

	// What FPsPIN measures: everything up to the look, after a GEMM, that found all
	// messages there.
	Hit           bool          // it was before the last GEMM was over
	Multiplied    int           // GEMMs until then
	ComputeBefore time.Duration // of these
}

// Ratio is FPsPIN's overlap ratio: the time of GEMMs by the time to detection.
func (o *Overlapped) Ratio() float64 { return o.ComputeBefore.Seconds() / o.Took.Seconds() }
