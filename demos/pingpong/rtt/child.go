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

// ErrChild is returned, wrapped, when a process of our own ended too early; the
// error has what it wrote to stderr.
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
// ends, it returns what there is by then, with ctx's error.
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

// Nobody is a user who may do nothing in particular: nobody, by its number.
const Nobody = 65534

// ProcessOptions say how a process begins. The zero value is as this one is.
type ProcessOptions struct {
	NS   *netns.Namespace // Optional
	User int              // uid and gid, in no other group; 0: root
	Env  []string         // beside this one's
}

// A Process runs a hidden command of this binary. It ends by itself when its
// stdin does, so also when this process is killed: a parent-death signal would
// come as soon as the thread that forked it ends.
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
	// By this name, because another user may not reach the executable by its path.
	c := &Process{cmd: exec.Command("/proc/self/exe", command, string(arg))}
	c.cmd.Args[0] = os.Args[0] // what ps shows
	c.cmd.Stderr = &c.stderr
	c.cmd.Env = append(os.Environ(), o.Env...)
	// Ctrl-C is for us to pass on.
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
		// A child is born into the namespace of the thread that forks it.
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

// End ends its stdin.
func (c *Process) End() { c.stdin.Close() }

// Stop ends the process. It returns why the process had failed before, or else
// because, which is nil if nothing went wrong so far.
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
