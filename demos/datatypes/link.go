// SPDX-License-Identifier: Apache-2.0

package datatypes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/netns/testbed"
)

// The demo tells its processes what to do, and they answer, in JSON documents on a Unix
// socket: one ask at a time, and one answer to each. A process may also say, at any time,
// why it cannot continue.

// An ask is what the demo wants. One field is set.
type ask struct {
	Open     *Transfer `json:"open,omitempty"`     // add a transfer, with the next number
	Round    *roundAsk `json:"round,omitempty"`    // application
	Compute  *GEMMs    `json:"compute,omitempty"`  // application
	Serve    *serveAsk `json:"serve,omitempty"`    // application: until the connection ends
	Transfer *int      `json:"transfer,omitempty"` // sender: its number; requests are for that one from now on
	Differ   bool      `json:"differ,omitempty"`   // with Transfer: messages of a round differ, see layout.contents
	Sent     bool      `json:"sent,omitempty"`     // sender: what was sent, if all of it has arrived
}

// A roundAsk is about a transfer by its number.
type roundAsk struct {
	Transfer int    `json:"transfer"`
	Verify   bool   `json:"verify"`
	GEMMs    *GEMMs `json:"gemms,omitempty"`
}

// An answer to an ask, which decides which fields are set.
type answer struct {
	Error    string      `json:"error,omitempty"`
	Contents bool        `json:"contents,omitempty"` // the error is ErrContents
	Round    *Overlapped `json:"round,omitempty"`
	Took     int64       `json:"took,omitempty"` // ns
	Sent     *sentSoFar  `json:"sent,omitempty"`
	Message  *Message    `json:"message,omitempty"` // to Serve, many
	Failed   bool        `json:"failed,omitempty"`  // answers no ask: the process cannot continue
}

// sentSoFar is what a sender has sent in its life, in segments.
type sentSoFar struct {
	Segments      uint64 `json:"segments"` // each counted once
	Retransmitted uint64 `json:"retransmitted"`
}

func refused(err error) answer {
	return answer{Error: err.Error(), Contents: errors.Is(err, ErrContents)}
}

// err is what went wrong at the other end.
func (a *answer) err() error {
	switch {
	case a.Error == "":
		return nil
	case a.Contents:
		return contentsError(a.Error)
	}
	return errors.New(a.Error)
}

// contentsError is an ErrContents of another process, with its text.
type contentsError string

func (e contentsError) Error() string { return string(e) }
func (contentsError) Unwrap() error   { return ErrContents }

// A switchboard is the socket that processes connect to.
type switchboard struct {
	dir    string
	listen *net.UnixListener
}

func newSwitchboard() (_ *switchboard, err error) {
	s := &switchboard{}
	if s.dir, err = testbed.TempDir(os.TempDir(), "datatypes"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	s.listen, err = net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: s.path()})
	if err != nil {
		return nil, err
	}
	// The processes run as another user. Only that user may reach the socket.
	return s, errors.Join(os.Chown(s.path(), rtt.Nobody, rtt.Nobody), os.Chown(s.dir, rtt.Nobody, rtt.Nobody))
}

func (s *switchboard) path() string { return filepath.Join(s.dir, "link") }

// accept returns the link of a process that has connected.
func (s *switchboard) accept(name string) (*link, error) {
	if err := s.listen.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return nil, err
	}
	conn, err := s.listen.Accept()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	l := &link{name: name, conn: conn, answers: make(chan answer), closed: make(chan struct{}), over: make(chan struct{})}
	go l.read()
	return l, nil
}

func (s *switchboard) close() (err error) {
	if s.listen != nil {
		err = s.listen.Close()
	}
	return errors.Join(err, os.RemoveAll(s.dir))
}

// A link is the demo's end of a connection.
type link struct {
	name    string
	conn    net.Conn
	answers chan answer
	closed  chan struct{}
	once    sync.Once
	over    chan struct{} // closed when no more answers will come
	err     error         // why, before over is closed
}

// errGone says that a process has ended. Whoever stops it learns why.
var errGone = errors.New("has ended")

func (l *link) read() {
	defer close(l.over)
	for d := json.NewDecoder(l.conn); ; {
		var a answer
		if err := d.Decode(&a); err != nil {
			l.err = fmt.Errorf("the %s %w", l.name, errGone)
			return
		}
		if a.Failed {
			l.err = fmt.Errorf("%s: %w", l.name, a.err())
			return
		}
		select {
		case l.answers <- a:
		case <-l.closed:
			l.err = net.ErrClosed
			return
		}
	}
}

// close tells the process to end.
func (l *link) close() {
	l.once.Do(func() {
		close(l.closed)
		l.conn.Close()
	})
	<-l.over
}

func (l *link) tell(a ask) error {
	if err := json.NewEncoder(l.conn).Encode(a); err != nil {
		return fmt.Errorf("the %s %w", l.name, errGone)
	}
	return nil
}

// ask asks and returns the answer, or why there is none. That may be because the other
// process, if any, cannot continue.
func (l *link) ask(ctx context.Context, a ask, other *link) (answer, error) {
	if err := l.tell(a); err != nil {
		return answer{}, err
	}
	var gone <-chan struct{}
	if other != nil {
		gone = other.over
	}
	select {
	case a := <-l.answers:
		if err := a.err(); err != nil {
			return a, fmt.Errorf("%s: %w", l.name, err)
		}
		return a, nil
	case <-l.over:
		return answer{}, l.err
	case <-gone:
		return answer{}, other.err
	case <-ctx.Done():
		return answer{}, ctx.Err()
	}
}

// A terminal is a process's end of a connection.
type terminal struct {
	conn net.Conn
	mu   sync.Mutex // of writing
}

// dial connects to the demo, which ends the process by closing the connection, or stdin.
func dial(path string) (*terminal, error) {
	conn, err := net.Dial("unix", path)
	return &terminal{conn: conn}, err
}

func (t *terminal) say(a answer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	_ = json.NewEncoder(t.conn).Encode(a) // it fails only if the demo is gone
}

// serve answers asks, one at a time, until the connection ends. Then the ctx of f ends
// too.
func (t *terminal) serve(f func(context.Context, ask) answer) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	asks := make(chan ask)
	go func() {
		defer close(asks)
		defer cancel()
		for d := json.NewDecoder(t.conn); ; {
			var a ask
			if d.Decode(&a) != nil {
				return
			}
			select {
			case asks <- a:
			case <-ctx.Done():
				return
			}
		}
	}()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		t.conn.Close()
	}()
	for a := range asks {
		t.say(f(ctx, a))
	}
}
