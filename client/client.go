// SPDX-License-Identifier: Apache-2.0

// Package client is for applications: it attaches an unprivileged process to an
// execution context of the daemon. Handlers fill the application's windows, tell it
// of messages, and ask it things.
//
//	app, err := client.Attach(ctx, "inbox", client.Options{})
//	defer app.Close()
//	memory := app.Window("in").Bytes()
//	for {
//		err := app.Wait(ctx)
//		for app.Event(&e) { if e.Complete() { ... memory[e.User:][:e.Length] ... } }
//		for app.Request(&r) { app.Respond(&r, 0, answer) }
//	}
//
// What the daemon refuses is a *control.Error. When the daemon ends, or ends the
// session, methods return an *EndedError: Attach again makes a new App.
package client

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
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

// An EndedError says that the application is not attached any more.
type EndedError struct {
	Context string
	Reason  string // what the daemon said, or that it is gone
}

func (e *EndedError) Error() string {
	return fmt.Sprintf("no longer attached to %q: %s", e.Context, e.Reason)
}

// detachTime is how long Close waits for the daemon, which drains the context.
const detachTime = 10 * time.Second

// An App is an application attached to a context. When it is closed, or the process
// ends in whatever way, the daemon drains the context and starts it over.
//
// Its methods are safe for concurrent use, also with Close, and do nothing after it.
type App struct {
	name    string
	conn    *net.UnixConn
	windows []*Window
	spin    time.Duration

	// ctx ends with the session, its cause is why. What the daemon has sent before
	// can be taken until Close.
	ctx context.Context
	end context.CancelCauseFunc

	// mu is held for reading while mapped memory is used, for writing by Close.
	mu     sync.RWMutex
	host   *hostq.Host // nil: none
	closed bool
	left   chan struct{} // closed when listen is done
	err    error         // of Close
	once   sync.Once

	eitherMu sync.Mutex
	either   *either // of the last Wait

	sending sync.Mutex
	seq     uint64
	asked   sync.Mutex
	waiting map[uint64]chan<- control.Answer // nil: the session is over
}

// A Window is one of the context's windows.
type Window struct {
	app    *App
	info   control.AttachWindow
	memory *hostq.Memory // nil: to be read by asking
}

// Attach attaches to a context.
func Attach(ctx context.Context, name string, o Options) (_ *App, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("attach to context %q: %w", name, err)
		}
	}()
	conn, err := control.Connect(ctx, o.Socket)
	if err != nil {
		return nil, err
	}
	// ctx is for Attach only.
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	reply, fds, err := handshake(conn, name, o.Observer)
	if !stop() {
		err = ctx.Err()
	}
	if err != nil {
		closeAll(fds)
		conn.Close()
		return nil, err
	}
	a := &App{name: name, conn: conn, spin: o.Spin, left: make(chan struct{}), waiting: map[uint64]chan<- control.Answer{}}
	a.ctx, a.end = context.WithCancelCause(context.Background())
	go a.listen()
	if err := a.open(reply, fds); err != nil {
		return nil, errors.Join(err, a.Close())
	}
	return a, nil
}

// open maps what the daemon has sent. It takes the descriptors, also if it fails.
func (a *App) open(reply *control.AttachReply, fds []int) error {
	defer func() { closeAll(fds) }()
	take := func() (fd int) {
		fd, fds = fds[0], fds[1:]
		return fd
	}
	want := 0
	for _, w := range reply.Windows {
		if w.App == "rw" {
			want++
		}
	}
	if reply.Pair != nil {
		want += 2 + max(reply.Pair.Lanes, 0)
	}
	if len(fds) != want {
		return fmt.Errorf("%d descriptors came, want %d: the daemon speaks another version, or the limit on open files (ulimit -n) is too low", len(fds), want)
	}
	for _, w := range reply.Windows {
		win := &Window{app: a, info: w}
		if w.App == "rw" {
			m, err := hostq.OpenMemory(take(), w.Size)
			if err != nil {
				return fmt.Errorf("window %q: %w", w.Name, err)
			}
			win.memory = m
		}
		a.windows = append(a.windows, win)
	}
	if reply.Pair == nil {
		return nil
	}
	memory, doorbell := take(), take()
	lanes := fds
	fds = nil
	host, err := hostq.OpenHost(*reply.Pair, memory, doorbell, lanes)
	if err != nil {
		return fmt.Errorf("queues: %w", err)
	}
	a.host = host
	return nil
}

// listen takes what the daemon sends, until the session ends.
func (a *App) listen() {
	defer close(a.left)
	dec := json.NewDecoder(a.conn)
	reason := ""
	for reason == "" {
		var answer control.Answer
		switch err := dec.Decode(&answer); {
		case errors.Is(err, os.ErrClosed), errors.Is(err, os.ErrDeadlineExceeded):
			reason = "it was closed"
		case err != nil:
			reason = "the daemon is gone"
		case answer.Seq == 0:
			reason = answer.Bye
		default:
			a.asked.Lock()
			if c := a.waiting[answer.Seq]; c != nil {
				delete(a.waiting, answer.Seq)
				c <- answer // has room
			}
			a.asked.Unlock()
		}
	}
	a.end(&EndedError{a.name, reason}) // unless Close was first
	a.asked.Lock()
	a.waiting = nil
	a.asked.Unlock()
}

// ask asks the daemon something and waits for its answer.
func (a *App) ask(ctx context.Context, ask control.Ask) (*control.Answer, error) {
	// One for one: an ask is on its way only with its number taken.
	a.sending.Lock()
	a.seq++
	ask.Seq = a.seq
	answered := make(chan control.Answer, 1)
	a.asked.Lock()
	if a.waiting != nil {
		a.waiting[ask.Seq] = answered
	}
	a.asked.Unlock()
	b, err := json.Marshal(ask)
	if err == nil && a.ctx.Err() == nil {
		// The daemon reads, or it ends the session.
		_, err = a.conn.Write(append(b, '\n'))
	}
	a.sending.Unlock()
	defer func() {
		a.asked.Lock()
		delete(a.waiting, ask.Seq)
		a.asked.Unlock()
	}()
	if err != nil && a.ctx.Err() == nil {
		var op *net.OpError
		if !errors.As(err, &op) {
			return nil, err // not JSON
		}
		<-a.left // which knows why
	}
	select {
	case answer := <-answered:
		if answer.Error != "" {
			return nil, fmt.Errorf("%s: %s", a.name, answer.Error)
		}
		return &answer, nil
	case <-a.ctx.Done():
		return nil, context.Cause(a.ctx)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// Context returns the name of the context.
func (a *App) Context() string { return a.name }

// Window returns a window by name, nil if there is none.
func (a *App) Window(name string) *Window {
	for _, w := range a.windows {
		if w.info.Name == name {
			return w
		}
	}
	return nil
}

// Windows returns all windows, in the order of the context's configuration.
func (a *App) Windows() []*Window { return a.windows }

// Name returns the window's name.
func (w *Window) Name() string { return w.info.Name }

// Size returns how many bytes the window has.
func (w *Window) Size() int64 { return w.info.Size }

// Bytes returns the window's memory, which handlers change at any time; nil if the
// application has it for reading by ReadAt only, and after Close. After Close the
// memory is not there any more: a process that uses it then crashes.
func (w *Window) Bytes() []byte {
	w.app.mu.RLock()
	defer w.app.mu.RUnlock()
	if w.app.closed || w.memory == nil {
		return nil
	}
	return w.memory.Bytes()[:w.info.Size:w.info.Size]
}

// ReadAt copies from the window.
func (w *Window) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("window %q: offset %d is negative", w.info.Name, off)
	}
	var err error
	if left := max(w.info.Size-off, 0); int64(len(p)) > left {
		p, err = p[:left], io.EOF
	}
	n, e := w.copy(p, off)
	if e != nil {
		err = e
	}
	return n, err
}

func (w *Window) copy(p []byte, off int64) (done int, err error) {
	if w.memory != nil {
		w.app.mu.RLock()
		defer w.app.mu.RUnlock()
		if w.app.closed {
			return 0, w.app.gone()
		}
		return copy(p, w.memory.Bytes()[off:]), nil
	}
	for done < len(p) {
		n := min(len(p)-done, control.MaxRead)
		answer, err := w.app.ask(context.Background(), control.Ask{
			Do: "read", Read: &control.Range{Window: w.info.Name, Offset: off + int64(done), Length: int64(n)},
		})
		if err != nil {
			return done, err
		}
		if len(answer.Data) != n {
			return done, fmt.Errorf("window %q: the daemon answers %d bytes instead of %d", w.info.Name, len(answer.Data), n)
		}
		done += copy(p[done:], answer.Data)
	}
	return done, nil
}

// gone returns why nothing can be done any more.
func (a *App) gone() error {
	if err := context.Cause(a.ctx); err != nil {
		return err
	}
	return os.ErrClosed
}

// Ended is closed when the session ends, by Close or by the daemon; Err says why.
func (a *App) Ended() <-chan struct{} { return a.ctx.Done() }

// Err returns why the session has ended, nil as long as it has not.
func (a *App) Err() error { return context.Cause(a.ctx) }

// Wait returns when there is an event or a request; with an error when ctx or the
// session has ended. What the NIC has sent before is still there then. Without a queue (Host
// is nil) nothing ever comes, and it waits for the end.
func (a *App) Wait(ctx context.Context) error {
	return a.wait(ctx, func(ctx context.Context, h *hostq.Host) error { return h.Wait(ctx, a.spin) })
}

// WaitCounter returns when counter i is at least v.
func (a *App) WaitCounter(ctx context.Context, i int, v uint64) error {
	return a.wait(ctx, func(ctx context.Context, h *hostq.Host) error { return h.WaitCounter(ctx, i, v) })
}

// wait calls f with a context that ends with ctx, or with the session.
func (a *App) wait(ctx context.Context, f func(context.Context, *hostq.Host) error) error {
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.closed {
		return a.gone()
	}
	if a.host == nil { // there is nothing to wait for but the end
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-a.ctx.Done():
			return a.gone()
		}
	}
	both, done := a.until(ctx)
	err := f(both, a.host)
	done()
	switch {
	case err == nil:
		return nil
	case errors.Is(err, hostq.ErrDetached):
		// The daemon has left the queue. It says why, unless it was killed.
		select {
		case <-a.ctx.Done():
		case <-ctx.Done():
		case <-time.After(detachTime):
			return err
		}
	}
	if a.ctx.Err() != nil {
		return a.gone()
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// An either is a context that ends with another one or with the session.
type either struct {
	of     <-chan struct{} // Done of the other one
	ctx    context.Context
	cancel func()
	users  int
}

// until returns a context that ends with ctx or with the session. A caller that waits
// again and again with the same context pays for it once.
func (a *App) until(ctx context.Context) (_ context.Context, done func()) {
	if ctx.Done() == nil {
		return a.ctx, func() {}
	}
	a.eitherMu.Lock()
	defer a.eitherMu.Unlock()
	e := a.either
	if e == nil || e.of != ctx.Done() {
		if e != nil && e.users == 0 {
			e.cancel()
		}
		both, cancel := context.WithCancel(ctx)
		stop := context.AfterFunc(a.ctx, cancel)
		e = &either{of: ctx.Done(), ctx: both, cancel: func() { stop(); cancel() }}
		a.either = e
	}
	e.users++
	return e.ctx, func() {
		a.eitherMu.Lock()
		defer a.eitherMu.Unlock()
		if e.users--; e.users == 0 && e != a.either {
			e.cancel()
		}
	}
}

// Event takes the next event. False: there is none.
func (a *App) Event(e *hostq.Event) bool {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return !a.closed && a.host != nil && a.host.Event(e)
}

// Request takes the next request. False: there is none.
func (a *App) Request(c *hostq.Call) bool {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return !a.closed && a.host != nil && a.host.Request(c)
}

// Respond answers a request, with any status and as many bytes as the context's queue has
// for a payload, 2048 unless its configuration says otherwise; what handlers make of them
// is theirs to say. The payload is copied, and the request is done with. After an error it
// is not: hostq.ErrTooLong, answer with less; hostq.ErrFull, the NIC has not taken other
// answers yet, try again. With others the session has ended or is about to.
func (a *App) Respond(c *hostq.Call, status int32, payload []byte) error {
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.closed || a.host == nil {
		return a.gone()
	}
	return a.host.Respond(c, status, payload)
}

// Done gives a request's slot back: its payload is gone. A handler that wants an answer
// (Call.Reply) still waits for it, and Respond may give it later.
func (a *App) Done(c *hostq.Call) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	if !a.closed && a.host != nil {
		a.host.Done(c)
	}
}

// Host returns the queues themselves, for epoll and the like; nil for observers and
// contexts without queue. Close ends it, too: the caller makes sure that nobody does
// both at the same time.
func (a *App) Host() *hostq.Host { return a.host }

// Counter returns counting event i; nil without queues, and after Close. It must not
// be used after Close.
func (a *App) Counter(i int) *hostq.Counter {
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.closed || a.host == nil {
		return nil
	}
	return a.host.Counter(i)
}

// Post posts a receive: the next message that matches goes there.
func (a *App) Post(ctx context.Context, r control.Receive) error {
	_, err := a.ask(ctx, control.Ask{Do: "post", Receive: &r})
	return err
}

// Unpost takes back a receive that was posted just so. It is an error if a message has
// taken it.
func (a *App) Unpost(ctx context.Context, r control.Receive) error {
	_, err := a.ask(ctx, control.Ask{Do: "unpost", Receive: &r})
	return err
}

// Counters asks for all counting events: observers have no other way.
func (a *App) Counters(ctx context.Context) ([]uint64, error) {
	answer, err := a.ask(ctx, control.Ask{Do: "counters"})
	if err != nil {
		return nil, err
	}
	all := make([]uint64, len(answer.Data)/8)
	for i := range all {
		all[i] = binary.LittleEndian.Uint64(answer.Data[8*i:])
	}
	return all, nil
}

// Trigger activates the context, if it is host-activated.
func (a *App) Trigger(ctx context.Context, t control.Trigger) error {
	_, err := a.ask(ctx, control.Ask{Do: "trigger", Trigger: &t})
	return err
}

// Activate arms the context's rulesets, if that was left to the application.
func (a *App) Activate(ctx context.Context) error {
	_, err := a.ask(ctx, control.Ask{Do: "activate"})
	return err
}

// Deactivate disarms them: no more packets come. When it has returned, events of all
// messages that were acknowledged are in the queue: take them before Close.
func (a *App) Deactivate(ctx context.Context) error {
	_, err := a.ask(ctx, control.Ask{Do: "deactivate"})
	return err
}

// Info returns the context's state and counters.
func (a *App) Info(ctx context.Context) (*control.ContextInfo, error) {
	answer, err := a.ask(ctx, control.Ask{Do: "stats"})
	if err != nil {
		return nil, err
	}
	if answer.Info == nil {
		return nil, fmt.Errorf("%s: the daemon answers nothing about it", a.name)
	}
	return answer.Info, nil
}

// Close detaches. It returns when the daemon has drained the context and nothing of the
// application is left in it. Whoever attaches next waits until it has started over.
// Idempotent.
func (a *App) Close() error {
	a.once.Do(func() {
		a.end(os.ErrClosed) // wakes Wait
		// The daemon says good-bye when it is done.
		_ = a.conn.SetReadDeadline(time.Now().Add(detachTime))
		if err := a.conn.CloseWrite(); err == nil {
			<-a.left
		}
		a.conn.Close()
		<-a.left
		a.mu.Lock()
		defer a.mu.Unlock()
		a.closed = true
		if a.either != nil {
			a.either.cancel()
		}
		if a.host != nil {
			a.err = a.host.Close()
		}
		for _, w := range a.windows {
			if w.memory != nil {
				a.err = errors.Join(a.err, w.memory.Close())
			}
		}
	})
	return a.err
}
