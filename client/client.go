// SPDX-License-Identifier: Apache-2.0

// Package client is for applications: it attaches an unprivileged process to an
// execution context of the daemon's. Handlers fill the application's windows, tell it
// of messages, and ask it things.
//
//	app, err := client.Attach(ctx, "inbox", client.Options{})
//	defer app.Close()
//	memory := app.Window("in").Bytes()
//	for {
//		err := app.Wait(ctx)
//		for app.Event(&e) { ... memory[e.User:][:e.Length] ... }
//		for app.Request(&r) { app.Respond(&r, 0, answer) }
//	}
package client

import (
	"context"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/hostq"
)

// Options of Attach. The zero value is good.
type Options struct {
	Socket   string        // of the daemon. Defaults to XSPIN_SOCKET, or control.Socket
	Observer bool          // windows and counters only
	Spin     time.Duration // that Wait spins before it sleeps
}

// An App is an application attached to a context. When it is closed, or the process
// ends in whatever way, the daemon drains the context and starts it anew.
type App struct{}

// A Window is a window of the context's.
type Window struct{}

// Attach attaches to a context.
func Attach(ctx context.Context, name string, o Options) (*App, error) { panic("not yet") }

// Window returns a window by name, nil if there is none.
func (a *App) Window(name string) *Window { panic("not yet") }

// Bytes returns the window's memory, which handlers change at any time; nil if the
// application has it for reading by ReadAt only. Good until Close.
func (w *Window) Bytes() []byte { panic("not yet") }

// Size returns how many bytes the window has.
func (w *Window) Size() int64 { panic("not yet") }

// ReadAt copies from the window.
func (w *Window) ReadAt(p []byte, off int64) (int, error) { panic("not yet") }

// Wait returns when there is an event or a request; with an error when ctx or the
// session has ended.
func (a *App) Wait(ctx context.Context) error { panic("not yet") }

// Event takes the next event. False: there is none.
func (a *App) Event(e *hostq.Event) bool { panic("not yet") }

// Request takes the next request. False: there is none.
func (a *App) Request(c *hostq.Call) bool { panic("not yet") }

// Respond answers a request.
func (a *App) Respond(c *hostq.Call, status int32, payload []byte) error { panic("not yet") }

// Done ends a request that wants no answer.
func (a *App) Done(c *hostq.Call) { panic("not yet") }

// Host returns the queues themselves, for epoll and the like; nil for observers and
// contexts without queue.
func (a *App) Host() *hostq.Host { panic("not yet") }

// Counter returns counting event i.
func (a *App) Counter(i int) *hostq.Counter { panic("not yet") }

// WaitCounter returns when counter i is at least v.
func (a *App) WaitCounter(ctx context.Context, i int, v uint64) error { panic("not yet") }

// Post posts a receive: the next message that matches goes there.
func (a *App) Post(ctx context.Context, r control.Receive) error { panic("not yet") }

// Trigger activates the context, if it is host-activated.
func (a *App) Trigger(ctx context.Context, t control.Trigger) error { panic("not yet") }

// Info returns the context's state and counters.
func (a *App) Info(ctx context.Context) (*control.ContextInfo, error) { panic("not yet") }

// Close detaches. Idempotent.
func (a *App) Close() error { panic("not yet") }
