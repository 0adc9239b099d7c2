// SPDX-License-Identifier: Apache-2.0

package mpich

import (
	"context"
	"time"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/netns"
)

// PairConfig says where ranks run.
type PairConfig struct {
	// Lab joins them: the receiver is at the NIC's end, the sender at the host's. There
	// must be no XDP program on either, which would take MPICH's offloads away.
	Lab *netns.Lab
	// CPUs that they are pinned to, -1 for any.
	ReceiverCPU, SenderCPU int
}

// A Pair is a receiver and a sender that are ranks of an MPI program, connected by TCP
// through a lab. Between calls both sleep. It is not safe for concurrent use; a call that
// fails, or whose context ends, ends the ranks.
type Pair struct {
}

// Start builds the program and starts it.
func Start(ctx context.Context, cfg PairConfig) (*Pair, error) { panic("not yet") }

// Close ends the ranks.
func (p *Pair) Close() error { panic("not yet") }

// A Transfer is what all later rounds transfer. The sender has packed the stream before
// they begin; the receiver's messages have a buffer each.
type Transfer struct {
	Type     *ddt.Type
	Count    int64 // of elements in a message
	Messages int   // in a round, all on their way at the same time
}

// Prepare says what to transfer. It does so once, and fails unless every byte of the
// receiver's buffers, holes included, is as it should be then.
func (p *Pair) Prepare(ctx context.Context, t Transfer) error { panic("not yet") }

// Rounds are measurements of transfers.
type Rounds struct {
	// Times are from ready-to-send, when all receives were posted, until the last
	// message was there.
	Times []time.Duration
	// CPU time of the ranks, all rounds together. MPICH waits spinning.
	Receiver, Sender time.Duration
}

// Receive does some rounds after one for warming up. It fails if the bytes did not pass
// through the lab.
func (p *Pair) Receive(ctx context.Context, rounds int) (Rounds, error) { panic("not yet") }

// A Compute is GEMMs of the receiver, the same as package gemm's.
type Compute struct {
	Dim   int // of matrices
	GEMMs int // in a round
}

// Compute does some rounds of GEMMs alone, after a GEMM for warming up. The sender sleeps
// meanwhile.
func (p *Pair) Compute(ctx context.Context, c Compute, rounds int) ([]time.Duration, error) {
	panic("not yet")
}

// An Overlap is a round of GEMMs and a transfer at the same time.
type Overlap struct {
	GEMMs    int           // that were computed
	Computed time.Duration // time in them
	Detected time.Duration // from ready-to-send until a test found all messages there
	Total    time.Duration // from ready-to-send until both were done
}

// Ratio is FPsPIN's overlap ratio: the share of the time until detection that GEMMs took,
// if nothing came after it.
func (o Overlap) Ratio() float64 { return float64(o.Computed) / float64(o.Detected) }

// Overlap does some rounds of GEMMs and a transfer together: receives are posted, and
// tested after each GEMM until they are done. What is left of either at the end of the
// other follows.
func (p *Pair) Overlap(ctx context.Context, c Compute, rounds int) ([]Overlap, error) {
	panic("not yet")
}

// Detect does rounds of FPsPIN's experiment: GEMMs one after the other, at most c.GEMMs,
// until the test after one finds all messages there.
func (p *Pair) Detect(ctx context.Context, c Compute, rounds int) ([]Overlap, error) {
	panic("not yet")
}
