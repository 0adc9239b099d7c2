// SPDX-License-Identifier: Apache-2.0

package datatypes

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/netns"
)

// ServeConfig says how to receive from any sender.
type ServeConfig struct {
	Setup
	Transfer                // with Parallel places for messages
	Sender   netip.AddrPort // to ask for messages at the start. Optional
	Verify   bool           // compare messages, which must have FPsPIN's pattern: see Send
	Dir      string         // where the memory of each message becomes a file, written by the application's user. Optional
}

// A Message is a message that was received.
type Message struct {
	Source   netip.AddrPort `json:"source"`
	Number   uint32         `json:"number"`
	Bytes    uint64         `json:"bytes"` // of its stream
	Err      string         `json:"err,omitempty"`
	Verified bool           `json:"verified,omitempty"`
	File     string         `json:"file,omitempty"`
}

// Serve receives until ctx ends. It calls ready when it is ready, and told with each message.
func Serve(ctx context.Context, lab *netns.Lab, c ServeConfig, ready func(Info), told func(Message)) (err error) {
	if c.Dir != "" {
		if c.Dir, err = filepath.Abs(c.Dir); err != nil { // the application may not be able to reach our working directory
			return err
		}
	}
	s, err := open(ctx, lab, c.Setup, false, c.Sender, c.Transfer)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if err := s.app.tell(ask{Serve: &serveAsk{Verify: c.Verify, Dir: c.Dir, Ask: c.Sender.IsValid()}}); err != nil {
		return s.because(err)
	}
	for first := true; ; first = false {
		select {
		case a := <-s.app.answers:
			switch {
			case a.err() != nil:
				return a.err()
			case first:
				ready(s.Info(0))
			default:
				told(*a.Message)
			}
		case <-s.app.over:
			return s.because(s.app.err)
		case <-ctx.Done():
			return nil
		}
	}
}

// A serveAsk has the application receive, in the places of its only transfer. It answers
// once when it is ready, and then with each message.
type serveAsk struct {
	Verify bool   `json:"verify"`
	Dir    string `json:"dir"`
	Ask    bool   `json:"ask"` // the sender
}

func (a *application) serve(ctx context.Context, q *serveAsk, t *terminal) error {
	if q.Dir != "" {
		if err := writable(q.Dir); err != nil {
			return err
		}
	}
	w := a.windows[0]
	if err := a.arm(ctx, w); err != nil {
		return err
	}
	for i := range w.Parallel {
		if err := a.offer(ctx, w, q, i); err != nil {
			return err
		}
	}
	t.say(answer{})
	a.rts.Parallel, a.rts.Elements = uint32(w.Parallel), uint32(w.Count)
	asking := asking{application: a, window: w, over: !q.Ask}
	for {
		soon, cancel, err := asking.next(ctx)
		if err != nil {
			return err
		}
		err = w.app.Wait(soon)
		cancel()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, context.DeadlineExceeded):
			continue
		case err != nil:
			return err
		}
		var e hostq.Event
		for w.app.Event(&e) {
			if e.Kind != hostq.MessageEnded && e.Kind != hostq.MessageFailed {
				if _, err := w.judge(&e); err != nil {
					return err
				}
				continue
			}
			if e.User >= uint64(w.Parallel) {
				return fmt.Errorf("event of a message in place %d: want a place below %d", e.User, w.Parallel)
			}
			asking.heard(e.Source.Addr())
			m := w.take(&e, q)
			t.say(answer{Message: &m})
			if err := a.offer(ctx, w, q, int(e.User)); err != nil {
				return err
			}
		}
	}
}

// asking asks a sender for messages, and again, with growing pauses, until one of its
// messages has started: to FPsPIN's sender each request is for a new round.
type asking struct {
	*application
	*window
	over   bool // the sender need not be asked any more
	pause  time.Duration
	due    time.Time // the next time; zero before the first
	others uint64    // messages of others that have ended
}

const longestPause = 5 * time.Second

// next asks if it is time to, and says when it wants to be called again.
func (k *asking) next(ctx context.Context) (soon context.Context, cancel context.CancelFunc, err error) {
	if k.over {
		return ctx, func() {}, nil
	}
	if !time.Now().Before(k.due) {
		silent := k.due.IsZero()
		if !silent {
			info, err := k.window.app.Info(ctx)
			if ctx.Err() != nil {
				return ctx, func() {}, nil
			}
			if err != nil {
				return nil, nil, err
			}
			// Whose an open message is, the statistics do not say.
			silent = info.MessageStats == nil || info.MessageStats.Started <= k.others
		}
		if silent {
			if err := k.request(); err != nil {
				return nil, nil, err
			}
			k.pause = min(max(2*k.pause, again), longestPause)
		}
		k.due = time.Now().Add(k.pause)
	}
	soon, cancel = context.WithDeadline(ctx, k.due)
	return soon, cancel, nil
}

// heard notes that a message from a sender has ended.
func (k *asking) heard(from netip.Addr) {
	switch {
	case k.over:
	case k.udp.RemoteAddr().(*net.UDPAddr).AddrPort().Addr().Unmap() == from.Unmap():
		k.over = true
	default:
		k.others++
	}
}

// offer clears a place and posts it.
func (a *application) offer(ctx context.Context, w *window, q *serveAsk, place int) error {
	if from, to := w.around(place); q.Verify {
		w.clear(w.memory, from, to)
	} else {
		clear(w.memory[from:to])
	}
	return w.app.Post(ctx, w.receive(place))
}

// writable fails unless this process can create files in a directory.
func writable(dir string) error {
	f, err := os.CreateTemp(dir, ".xspin-*")
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%s: %w: the application is user %d: choose a directory that it may write to, and which it can reach", dir, err, os.Getuid())
	}
	if err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

// take verifies and saves a message, as the ask says.
func (w *window) take(e *hostq.Event, q *serveAsk) Message {
	m := Message{Source: e.Source, Number: e.Number, Bytes: e.Length}
	if _, err := w.judge(e); err != nil {
		m.Err = err.Error()
		return m
	}
	place := int(e.User)
	if q.Verify {
		if err := w.compare(w.memory, place, 0); err != nil {
			m.Err = fmt.Sprintf("not what the demo's or FPsPIN's sender sends for this type: %v", err)
		} else {
			m.Verified = true
		}
	}
	if q.Dir == "" {
		return m
	}
	m.File = filepath.Join(q.Dir, fmt.Sprintf("%v-%d-%d", e.Source.Addr(), e.Source.Port(), e.Number))
	at := w.origin(place)
	if err := os.WriteFile(m.File, w.memory[at+w.lo:at+w.hi], 0o644); err != nil {
		m.Err = err.Error()
	}
	return m
}

// A Request is what a sender is asked for.
type Request struct {
	From     netip.AddrPort
	Messages int
	Elements int64
	Err      error // why it is not, or was not, answered
}

// Send is the demo's sender: it serves requests until ctx ends. All messages have FPsPIN's
// pattern. It needs no privileges. It calls ready when it listens, and told with each
// request, and with messages that do not arrive.
func Send(ctx context.Context, local netip.AddrPort, t Transfer, ready func(), told func(Request)) error {
	t.Parallel, t.Strategy = max(t.Parallel, 1), "direct"
	s, err := listen(local, func(err error) { told(Request{Err: err}) })
	if err != nil {
		return err
	}
	s.asked = func(r request, from netip.AddrPort) {
		told(Request{From: from, Messages: int(r.Parallel), Elements: int64(r.Elements)})
	}
	if err := s.add(t); err != nil {
		return errors.Join(err, s.close())
	}
	stop := context.AfterFunc(ctx, func() { _ = s.udp.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	ready()
	s.serve(ctx)
	return s.close()
}
