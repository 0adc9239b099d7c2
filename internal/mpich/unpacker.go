// SPDX-License-Identifier: Apache-2.0

package mpich

import (
	"context"
	"time"

	"github.com/xspin/xspin/ddt"
)

// An Unpacker is an MPI program of one rank that packs and unpacks in memory. It is not
// safe for concurrent use; a call that fails, or whose context ends, ends the program.
type Unpacker struct {
}

// StartUnpacker builds the program and starts it on a CPU, -1 for any.
func StartUnpacker(ctx context.Context, cpu int) (*Unpacker, error) { panic("not yet") }

// Close ends the program.
func (u *Unpacker) Close() error { panic("not yet") }

// Unpacked are measurements of packing in memory.
type Unpacked struct {
	Unpack, Pack []time.Duration // MPI_Unpack and MPI_Pack of the whole stream
	Commit       []time.Duration // MPI_Type_commit of a type just built
}

// Measure measures some repetitions with count elements of a type. If flush is not 0, as
// many bytes of other memory are written before each, so that none of the stream and of
// the buffer is in caches that are smaller; else they are there as the repetition before
// has left them.
func (u *Unpacker) Measure(ctx context.Context, t *ddt.Type, count int64, repetitions int, flush int64) (Unpacked, error) {
	panic("not yet")
}
