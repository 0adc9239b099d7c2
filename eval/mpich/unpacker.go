// SPDX-License-Identifier: Apache-2.0

package mpich

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/netns/testbed"
)

// An Unpacker is an MPI program of one rank that packs and unpacks in memory. Between
// calls it sleeps. It is not safe for concurrent use; a call that fails, or whose context
// ends, ends the program.
type Unpacker struct {
	job
}

// StartUnpacker builds the program and starts it on a CPU, -1 for any.
func StartUnpacker(ctx context.Context, cpu int) (_ *Unpacker, err error) {
	const op = "MPICH unpacker"
	dir, err := testbed.TempDir(os.TempDir(), "mpich")
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }() // a process keeps its program
	program, err := Build(ctx, dir, "mpi_unpack")
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	cmd := exec.Command(program)
	cmd.Env = environ("UCX_TLS=self")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for us to pass on
	r, err := startRank("unpacker", cmd, func() error { return testbed.OnCPU(cpu, cmd.Start) })
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	u := &Unpacker{job{ranks: []*rank{r}}}
	if _, err := u.call(ctx, "\n"); err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	return u, nil
}

// Close ends the program.
func (u *Unpacker) Close() error { return u.close() }

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
	const op = "MPICH unpack"
	switch {
	case count < 0 || count > math.MaxInt32:
		return Unpacked{}, fmt.Errorf("%s: %d elements: want 0 to %d, MPI-3 counts them in int", op, count, math.MaxInt32)
	case repetitions < 1 || repetitions > math.MaxInt32:
		return Unpacked{}, fmt.Errorf("%s: %d repetitions: want 1 to %d", op, repetitions, math.MaxInt32)
	case flush < 0:
		return Unpacked{}, fmt.Errorf("%s: %d bytes to write before each: want 0 or more", op, flush)
	}
	text := Encode(t)
	answers, err := u.call(ctx, fmt.Sprintf("%d %d %d %d\n%s", flush, repetitions, count, len(text), text))
	if err != nil {
		return Unpacked{}, fmt.Errorf("%s: %w", op, err)
	}
	a := answers[0]
	return Unpacked{a[:repetitions], a[repetitions : 2*repetitions], a[2*repetitions:]}, nil
}
