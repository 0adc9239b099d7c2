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
	c, err := spawn(ns, PingCommand, o)
	if err != nil {
		return Result{}, fmt.Errorf("ping %v: %w", o.Remote, err)
	}
	defer context.AfterFunc(ctx, func() { c.stdin.Close() })()

	var r Result
	err = json.NewDecoder(c.stdout).Decode(&r)
	if err := c.stop(err); err != nil {
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

// child is a process running a hidden command. It ends by itself when its
// stdin does, so also when this process is killed: a parent-death signal would
// come as soon as the thread that forked it ends.
type child struct {
	cmd    *netns.Cmd
	stdin  io.Closer
	stdout io.Reader
	stderr bytes.Buffer

	once sync.Once
	err  error
}

func spawn(ns *netns.Namespace, command string, options any) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find own executable: %w", err)
	}
	arg, err := json.Marshal(options)
	if err != nil {
		return nil, err
	}
	c := &child{cmd: ns.Command(context.Background(), self, command, string(arg))}
	c.cmd.Stderr = &c.stderr
	// Ctrl-C is for us to pass on.
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if c.stdout, err = c.cmd.StdoutPipe(); err != nil {
		return nil, err
	}
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	return c, nil
}

// stop ends the process. It returns why the process had failed before, or else
// because, which is nil if nothing went wrong so far.
func (c *child) stop(because error) error {
	c.once.Do(func() {
		c.stdin.Close()
		kill := time.AfterFunc(grace, func() { c.cmd.Process.Kill() })
		defer kill.Stop()
		err := c.cmd.Wait()
		msg := strings.TrimSpace(c.stderr.String())
		var exit *exec.ExitError
		switch {
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
