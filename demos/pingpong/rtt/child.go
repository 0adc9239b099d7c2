// SPDX-License-Identifier: Apache-2.0

package rtt

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/xspin/xspin/netns"
)

// Hidden commands of the binary, for Ping and StartEcho. Each takes one
// argument, its options as JSON.
const (
	EchoCommand = "_udp-echo"
	PingCommand = "_ping"
)

// ErrChild is returned, wrapped, when a helper process ended too early. The error
// has what it wrote to stderr.
var ErrChild = errors.New("helper process failed")

// grace is how long a child may take to end before it is killed.
const grace = 2 * time.Second

// Main runs a hidden command: args as in os.Args[1:]. ok tells whether args
// are one.
func Main(args []string) (ok bool, err error) {
	if len(args) == 0 || args[0] != EchoCommand && args[0] != PingCommand {
		return false, nil
	}
	if len(args) != 2 {
		return true, fmt.Errorf("%s: %d arguments, want 1: this command is for xspin's own use", args[0], len(args)-1)
	}
	if args[0] == EchoCommand {
		return true, runEcho([]byte(args[1]))
	}
	return true, runPing([]byte(args[1]))
}

// Ping runs a Client in a process of its own inside the namespace. When ctx
// ends, it returns the results so far, with ctx's error.
func Ping(ctx context.Context, ns *netns.Namespace, o Options) (Result, error) {
	o = o.withDefaults()
	if err := o.check(); err != nil {
		return Result{}, err
	}
	if err := ctx.Err(); err != nil {
		return Result{}, err
	}
	c, err := Start(PingCommand, o, ProcessOptions{NS: ns})
	if err != nil {
		return Result{}, fmt.Errorf("ping %v: %w", o.Remote, err)
	}
	defer context.AfterFunc(ctx, c.End)()

	var r Result
	err = json.NewDecoder(c.Stdout).Decode(&r)
	if err := c.Stop(err); err != nil {
		return r, fmt.Errorf("ping %v: %w", o.Remote, err)
	}
	// A run that was complete before ctx ended is complete.
	if r.Sent < o.Count {
		if err := ctx.Err(); err != nil {
			return r, err
		}
		return r, fmt.Errorf("ping %v: %w: %d of %d pings sent", o.Remote, ErrChild, r.Sent, o.Count)
	}
	return r, nil
}

// runPing is the process that Ping starts. It writes the result to stdout.
func runPing(options []byte) error {
	var o Options
	if err := json.Unmarshal(options, &o); err != nil {
		return fmt.Errorf("%w: %w", ErrOptions, err)
	}
	c, err := Dial(o)
	if err != nil {
		return err
	}
	defer c.Close()
	// As in runEcho.
	runtime.GOMAXPROCS(max(2, runtime.GOMAXPROCS(0)))
	debug.SetGCPercent(-1)
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	r, err := c.Run(ctx)
	if err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}

// Nobody is the uid and gid of the unprivileged user nobody.
const Nobody = 65534

// ProcessOptions say how a process is started. Zero fields are as in this process.
type ProcessOptions struct {
	NS   *netns.Namespace // Optional
	User int              // uid and gid, without supplementary groups; 0: root
	Env  []string         // added to this process's environment
}

// A Process runs a hidden command of this binary. It ends when its stdin does, and
// so also when this process is killed. A parent-death signal would not do: it comes
// as soon as the thread that forked the process ends.
type Process struct {
	Stdout io.Reader

	cmd    *exec.Cmd
	stdin  io.Closer
	stderr bytes.Buffer

	once sync.Once
	err  error
}

// Start starts a hidden command, whose argument is options as JSON.
func Start(command string, options any, o ProcessOptions) (*Process, error) {
	arg, err := json.Marshal(options)
	if err != nil {
		return nil, err
	}
	// Not by its path, which another user may not reach.
	c := &Process{cmd: exec.Command("/proc/self/exe", command, string(arg))}
	c.cmd.Args[0] = os.Args[0] // what ps shows
	c.cmd.Stderr = &c.stderr
	c.cmd.Env = append(os.Environ(), o.Env...)
	// In a process group of its own it does not get Ctrl-C; this process passes it on.
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if o.User != 0 {
		id := uint32(o.User)
		c.cmd.SysProcAttr.Credential = &syscall.Credential{Uid: id, Gid: id}
		c.cmd.Dir = "/"
	}
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if c.Stdout, err = c.cmd.StdoutPipe(); err != nil {
		return nil, err
	}
	start := c.cmd.Start
	if o.NS != nil {
		// A child gets the namespace of the thread that forks it.
		start = func() error { return o.NS.Do(c.cmd.Start) }
	}
	if err := start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", command, err)
	}
	return c, nil
}

// Pid returns the process's id.
func (c *Process) Pid() int { return c.cmd.Process.Pid }

// Kill kills the process.
func (c *Process) Kill() error { return c.cmd.Process.Kill() }

// End closes its stdin.
func (c *Process) End() { c.stdin.Close() }

// Stop ends the process. If the process has failed, Stop returns why, or else because,
// the caller's own error or nil.
func (c *Process) Stop(because error) error {
	c.once.Do(func() {
		c.End()
		var slow atomic.Bool
		kill := time.AfterFunc(grace, func() {
			slow.Store(true)
			c.cmd.Process.Kill()
		})
		defer kill.Stop()
		err := c.cmd.Wait()
		msg := strings.TrimSpace(c.stderr.String())
		var exit *exec.ExitError
		switch {
		case err != nil && slow.Load():
			c.err = fmt.Errorf("%w: %s had not ended %v after it was asked to, and was killed", ErrChild, strings.TrimPrefix(c.cmd.Args[1], "_"), grace)
			if msg != "" {
				c.err = fmt.Errorf("%w; it had said: %s", c.err, msg)
			}
		case errors.As(err, &exit) && msg != "":
			c.err = fmt.Errorf("%w: %s", ErrChild, msg)
		case err != nil:
			c.err = fmt.Errorf("%w: %w", ErrChild, err)
		}
	})
	if c.err != nil {
		return c.err
	}
	return because
}
