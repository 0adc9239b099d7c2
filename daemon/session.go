// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/xspin/xspin/control"
)

// An attached application, or observer: an *attachment.
type attached interface {
	reply() control.AttachReply
	descriptors() []int           // which stay the attachment's
	handOver(*net.UnixConn) error // before they are passed on
	do(*control.Ask) control.Answer
	release(reason string)
	ended() <-chan string // the daemon ends it, and why
}

const (
	maxAsk         = 16 << 10 // of one line
	maxDescriptors = 253      // of one message: SCM_MAX_FD
)

// attach makes a session of a connection: see docs/control.md.
func (s *server) attach(w http.ResponseWriter, r *http.Request) (any, error) {
	q, err := query(r, "observer")
	if err != nil {
		return nil, err
	}
	observer, err := boolean(q, "observer")
	if err != nil {
		return nil, err
	}
	if err := body(w, r, nil); err != nil {
		return nil, err
	}
	if !wants(r.Header, "Connection", "upgrade") || !wants(r.Header, "Upgrade", control.SessionProtocol) {
		w.Header().Set("Upgrade", control.SessionProtocol)
		return nil, statusError{http.StatusUpgradeRequired, fmt.Errorf("attach: want the headers Connection: Upgrade and Upgrade: %s", control.SessionProtocol)}
	}
	if !s.enter() {
		return nil, statusError{http.StatusServiceUnavailable, errors.New("attach: the daemon is about to end")}
	}
	defer s.sessions.Done()
	name := r.PathValue("name")
	a, err := s.d.admit(name, peerOf(r), observer)
	if err != nil {
		return nil, err
	}
	reason := "the daemon failed" // if it panics
	var release sync.Once
	leave := func() { release.Do(func() { a.release(reason) }) }
	defer leave()
	if n := len(a.descriptors()); n > maxDescriptors {
		reason = fmt.Sprintf("it has %d descriptors, and a message takes %d: use fewer windows", n, maxDescriptors)
		return nil, fmt.Errorf("attach to %s: %s", name, reason)
	}
	if err := a.handOver(connOf(r).UnixConn); err != nil {
		reason = err.Error()
		return nil, fmt.Errorf("attach to %s: %w", name, err)
	}
	hijacked, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		reason = err.Error()
		return nil, err
	}
	c := hijacked.(*conn)
	defer c.Close()
	early, _ := rw.Reader.Peek(rw.Reader.Buffered()) // from who does not wait for us
	e := &session{a: a, c: c, in: bufio.NewReaderSize(io.MultiReader(bytes.NewReader(early), c), maxAsk)}
	reason = e.run(s.ctx)
	leave()
	e.bye(reason) // for whoever waits until nothing is left of it
	return nil, nil
}

// wants tells whether a header has a token.
func wants(h http.Header, key, token string) bool {
	for _, v := range h.Values(key) {
		for t := range strings.SplitSeq(v, ",") {
			if strings.EqualFold(strings.TrimSpace(t), token) {
				return true
			}
		}
	}
	return false
}

// A session is a connection with which somebody is attached. It holds one line and one
// answer: a peer that asks faster, or does not read, waits for itself.
type session struct {
	a  attached
	c  *conn
	in *bufio.Reader

	mu  sync.Mutex // write deadline
	end string     // why the daemon ends it, if it does
	cut bool       // a document was written in part
}

// run does what the peer asks, until either of them ends it. It returns why.
func (e *session) run(ctx context.Context) string {
	_ = e.c.SetDeadline(time.Time{})
	if err := e.begin(); err != nil {
		return fmt.Sprintf("%v did not take its descriptors: %v", e.c, err)
	}
	over := make(chan struct{})
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		var why string
		select {
		case why = <-e.a.ended():
		case <-ctx.Done():
			why = context.Cause(ctx).Error()
		case <-over:
			return
		}
		e.mu.Lock()
		e.end = why
		_ = e.c.SetWriteDeadline(time.Now().Add(goodbye)) // for an answer that nobody reads
		e.mu.Unlock()
		_ = e.c.SetReadDeadline(time.Unix(1, 0))
	}()
	err := e.answer()
	close(over)
	<-watched
	switch {
	case e.end != "":
		return e.end
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return fmt.Sprintf("%v has closed its connection", e.c)
	default:
		return fmt.Sprintf("%v: %v", e.c, err)
	}
}

// begin switches protocols, and sends the first document with the descriptors.
func (e *session) begin() error {
	_ = e.c.SetWriteDeadline(time.Now().Add(stall))
	if _, err := io.WriteString(e.c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+control.SessionProtocol+"\r\n\r\n"); err != nil {
		return err
	}
	b, err := line(e.a.reply())
	if err != nil {
		return err
	}
	var oob []byte
	if fds := e.a.descriptors(); len(fds) > 0 {
		oob = syscall.UnixRights(fds...)
	}
	// They travel with the first byte.
	n, _, err := e.c.WriteMsgUnix(b, oob, nil)
	if err != nil {
		return err
	}
	_, err = e.c.Write(b[n:])
	return err
}

// line is a document as sessions have them.
func line(doc any) ([]byte, error) {
	b, err := json.Marshal(doc)
	return append(b, '\n'), err
}

// answer does what is asked, one after the other.
func (e *session) answer() error {
	for {
		b, err := e.in.ReadSlice('\n')
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			return fmt.Errorf("a line is longer than %d bytes", maxAsk)
		case err != nil:
			return err
		}
		var ask control.Ask
		if err := strict(bytes.TrimSpace(b), &ask); err != nil {
			return fmt.Errorf("not an ask: %w", err)
		}
		if ask.Seq == 0 {
			return errors.New("an ask has no number (seq)")
		}
		answer := control.Answer{}
		if r := ask.Read; r != nil && (r.Length < 0 || r.Length > control.MaxRead) {
			answer.Error = fmt.Sprintf("read %d bytes: want at most %d at once", r.Length, control.MaxRead)
		} else {
			answer = e.a.do(&ask)
		}
		answer.Seq, answer.Bye = ask.Seq, ""
		if err := e.write(answer, stall); err != nil {
			return err
		}
	}
}

// write sends a document. A peer that does not read it in time is at its end.
func (e *session) write(a control.Answer, timeout time.Duration) error {
	b, err := line(a)
	if err != nil {
		return err
	}
	e.mu.Lock()
	if e.end != "" {
		timeout = goodbye
	}
	_ = e.c.SetWriteDeadline(time.Now().Add(timeout))
	e.mu.Unlock()
	_, err = e.c.Write(b)
	e.cut = err != nil
	var slow net.Error
	if errors.As(err, &slow) && slow.Timeout() {
		err = fmt.Errorf("it does not read its answers: %w", err)
	}
	return err
}

// bye is the last document.
func (e *session) bye(reason string) {
	if !e.cut {
		_ = e.write(control.Answer{Bye: reason}, goodbye)
	}
}
