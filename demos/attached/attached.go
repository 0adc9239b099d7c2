// SPDX-License-Identifier: Apache-2.0

// Package attached is what the demos with an application have in common: a daemon
// with a NIC in this process, and the application in another, as an unprivileged
// user.
package attached

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/daemon"
	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/testbed"
)

// closeTime is how long the daemon may take to end.
const closeTime = 10 * time.Second

// Config says what to start.
type Config struct {
	Interface daemon.Interface // its name and namespace are the lab's
	Limits    daemon.Limits
	Context   control.Context // only the application may attach to it
	Command   string          // hidden command that is the application
	Options   any             // its argument
}

// An App is an application and its daemon.
type App struct {
	Socket string        // of the daemon
	Out    *bufio.Reader // the application's stdout after its first line

	dir     string
	daemon  *daemon.Daemon
	process *rtt.Process
}

// Start starts a daemon on the lab's NIC end, and the application, which finds the
// daemon by XSPIN_SOCKET. It returns when the application has printed a line, which
// says that it is ready.
func Start(ctx context.Context, lab *netns.Lab, c Config) (_ *App, err error) {
	a := &App{}
	defer func() {
		if err != nil {
			err = errors.Join(err, a.Close())
		}
	}()
	if a.dir, err = testbed.TempDir(os.TempDir(), "demo"); err != nil {
		return nil, err
	}
	// The application runs as another user, which must reach the socket.
	if err := os.Chmod(a.dir, 0o711); err != nil {
		return nil, err
	}
	a.Socket = filepath.Join(a.dir, "socket")
	c.Interface.Name, c.Interface.Netns = lab.NIC.Device, lab.NIC.NS.Name()
	c.Context.Attach = &control.Attach{Users: []string{strconv.Itoa(rtt.Nobody)}}
	kernel := "off"
	if c.Context.Tier == "kernel" {
		kernel = "administrators"
	}
	if a.daemon, err = daemon.Start(&daemon.Config{
		Socket:     a.Socket,
		Kernel:     kernel,
		Limits:     c.Limits,
		Interfaces: []daemon.Interface{c.Interface},
		Contexts:   []control.Context{c.Context},
	}, daemon.Options{
		KeepPrivileges: true, // the demo needs them later
		Logger:         slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
	}); err != nil {
		return nil, err
	}
	if a.process, err = rtt.Start(c.Command, c.Options, rtt.ProcessOptions{User: rtt.Nobody, Env: []string{"XSPIN_SOCKET=" + a.Socket}}); err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, a.End)
	a.Out = bufio.NewReader(a.process.Stdout)
	_, err = a.Out.ReadString('\n')
	if !stop() {
		return nil, ctx.Err()
	}
	if err != nil {
		err = a.process.Stop(err)
		a.process = nil // stopped; Close must not report its error again
		return nil, fmt.Errorf("start the application: %w", err)
	}
	return a, nil
}

// Pid returns the application's process id.
func (a *App) Pid() int { return a.process.Pid() }

// Kill kills the application.
func (a *App) Kill() error { return a.process.Kill() }

// End closes the application's stdin, which asks it to end. Read Out to its end before
// Close.
func (a *App) End() { a.process.End() }

// Close ends the application and the daemon. If the application failed before, Close
// returns the reason.
func (a *App) Close() (err error) {
	if a.process != nil {
		err = a.process.Stop(nil)
	}
	if a.daemon != nil {
		ctx, cancel := context.WithTimeout(context.Background(), closeTime)
		defer cancel()
		err = errors.Join(err, a.daemon.Close(ctx))
	}
	if a.dir != "" {
		err = errors.Join(err, os.RemoveAll(a.dir))
	}
	return err
}
