// SPDX-License-Identifier: Apache-2.0

package mpich

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// ErrRank is returned, wrapped, when a process ended that should not; the error has what
// it wrote to stderr.
var ErrRank = errors.New("MPI process failed")

// grace is how long a process may take to end before it is killed.
const grace = 2 * time.Second

// A rank is a process that reads commands from stdin, and answers each with numbers, one
// per line, and "ok". It ends with its stdin.
type rank struct {
	what   string
	stdin  io.WriteCloser
	stdout *bufio.Scanner
	kill   func()       // it has no error that matters: what has ended needs none
	wait   func() error // until it has ended: why it failed

	once sync.Once
	err  error // of wait, by end
}

func newRank(what string, stdin io.WriteCloser, stdout io.Reader, kill func(), wait func() error) *rank {
	return &rank{what: what, stdin: stdin, stdout: bufio.NewScanner(stdout), kill: kill, wait: wait}
}

// environ is ours without a launcher's variables, and with more. Stdout is for answers.
func environ(more ...string) []string {
	env := slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "PMI") || strings.HasPrefix(v, "OMPI_") || strings.HasPrefix(v, "PRTE_")
	})
	return append(append(env, "UCX_LOG_FILE=stderr"), more...)
}

// startRank starts a process, by start. It must be ended.
func startRank(what string, cmd *exec.Cmd, start func() error) (*rank, error) {
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", what, err)
	}
	return newRank(what, stdin, stdout, func() { _ = cmd.Process.Kill() }, func() error {
		err := cmd.Wait() // it closes stdin
		if msg := strings.TrimSpace(stderr.String()); err != nil && msg != "" {
			err = errors.New(msg)
		}
		return err
	}), nil
}

// answer reads the answer to a command.
func (r *rank) answer() (numbers []time.Duration, err error) {
	for r.stdout.Scan() {
		if r.stdout.Text() == "ok" {
			return numbers, nil
		}
		ns, err := strconv.ParseInt(r.stdout.Text(), 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%s: %w: %s", r.what, ErrRank, r.stdout.Text())
		}
		numbers = append(numbers, time.Duration(ns))
	}
	return nil, fmt.Errorf("%s: %w: %w", r.what, ErrRank, io.ErrUnexpectedEOF)
}

// end ends the process, at once or after it had time to do so itself, and returns why it
// failed.
func (r *rank) end(now bool) error {
	r.once.Do(func() {
		if now {
			r.kill()
		} else {
			kill := time.AfterFunc(grace, r.kill)
			defer kill.Stop()
		}
		if err := r.wait(); err != nil {
			r.err = fmt.Errorf("%s: %w: %w", r.what, ErrRank, err)
		}
	})
	return r.err
}

// A job is the processes of a program. A call that fails ends them all.
type job struct {
	ranks []*rank
	err   error // why they have ended, nil if not
}

// errClosed is what calls return after close.
var errClosed = errors.New("MPI program: closed")

// call gives each process its command, "" for none, and returns their answers.
func (j *job) call(ctx context.Context, commands ...string) (answers [][]time.Duration, err error) {
	if j.err != nil {
		return nil, j.err
	}
	if err := ctx.Err(); err != nil {
		return nil, j.fail(err)
	}
	answers = make([][]time.Duration, len(j.ranks))
	failed := make(chan int, len(j.ranks)) // ranks in order of their failing; -1 is none
	running := 0
	for i, command := range commands {
		if command == "" {
			continue
		}
		running++
		go func() {
			// What one cannot write or read, the process's end explains.
			_, err := io.WriteString(j.ranks[i].stdin, command)
			if err == nil {
				answers[i], err = j.ranks[i].answer()
			}
			if err != nil {
				failed <- i
				return
			}
			failed <- -1
		}()
	}
	first, done := -1, ctx.Done()
	for running > 0 {
		select {
		case i := <-failed:
			running--
			if i < 0 || first >= 0 || err != nil {
				continue
			}
			first = i
		case <-done:
			err, done = ctx.Err(), nil
			if first >= 0 {
				continue
			}
		}
		// The others wait for it forever.
		for i, r := range j.ranks {
			if i != first {
				r.kill()
			}
		}
	}
	switch {
	case err != nil:
		return nil, j.fail(err)
	case first >= 0:
		err := j.ranks[first].end(false)
		if err == nil {
			err = fmt.Errorf("%s: %w: %w", j.ranks[first].what, ErrRank, io.ErrUnexpectedEOF)
		}
		return nil, j.fail(err)
	}
	return answers, nil
}

// fail ends all processes because of an error, which it returns.
func (j *job) fail(err error) error {
	j.err = err
	for _, r := range j.ranks {
		_ = r.end(true) // killed
	}
	return err
}

// close has the processes end by themselves. It returns nil if they have failed before.
func (j *job) close() error {
	if j.err != nil {
		return nil
	}
	j.err = errClosed
	for _, r := range j.ranks {
		// Its stdin stays open, else it would end before MPI is done.
		_, _ = io.WriteString(r.stdin, "quit\n")
	}
	var errs []error
	for _, r := range j.ranks {
		errs = append(errs, r.end(false))
	}
	return errors.Join(errs...)
}
