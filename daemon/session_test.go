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
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/xspin/xspin/client"
	"github.com/xspin/xspin/control"
)

// A fakeSeat is an attachment that answers everything with a megabyte.
type fakeSeat struct {
	fds      []int
	windows  []control.AttachWindow
	over     chan string
	released chan string
	asked    atomic.Int64
	gate     chan struct{} // do waits for it, if it is there
}

func newSeat(fds ...int) *fakeSeat {
	return &fakeSeat{fds: fds, over: make(chan string, 1), released: make(chan string, 2)}
}

func (f *fakeSeat) reply() control.AttachReply {
	return control.AttachReply{Context: "box", Windows: f.windows, HPUs: 2}
}
func (f *fakeSeat) descriptors() []int           { return f.fds }
func (f *fakeSeat) handOver(*net.UnixConn) error { return nil }
func (f *fakeSeat) ended() <-chan string         { return f.over }
func (f *fakeSeat) release(reason string)        { f.released <- reason }
func (f *fakeSeat) do(a *control.Ask) control.Answer {
	f.asked.Add(1)
	if f.gate != nil {
		<-f.gate
	}
	if a.Do == "fail" {
		return control.Answer{Error: "no"}
	}
	return control.Answer{Data: make([]byte, control.MaxRead)}
}

// reason waits for a seat to be released, once.
func (f *fakeSeat) reason(t *testing.T) string {
	t.Helper()
	select {
	case r := <-f.released:
		select {
		case again := <-f.released:
			t.Errorf("released twice: %s; %s", r, again)
		case <-time.After(10 * time.Millisecond):
		}
		return r
	case <-time.After(time.Minute):
		t.Fatal("it is not released")
		return ""
	}
}

const upgrade = "POST /v1/contexts/box/attach HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: xspin-session/1\r\n\r\n"

// rawSession is what a client that was written from the document does.
func rawSession(t *testing.T, s *server) (*net.UnixConn, *bufio.Reader) {
	t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: s.l.path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(time.Minute))
	io.WriteString(c, upgrade)
	in := bufio.NewReader(c)
	w, err := http.ReadResponse(in, nil)
	if err != nil || w.StatusCode != 101 || w.Header.Get("Upgrade") != control.SessionProtocol {
		t.Fatalf("%+v, error %v", w, err)
	}
	var reply control.AttachReply
	b, err := in.ReadBytes('\n')
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &reply); err != nil || reply.Context != "box" {
		t.Fatalf("%s, error %v", b, err)
	}
	return c, in
}

func seated(t *testing.T, f *fakeSeat) *server {
	t.Helper()
	return start(t, &fake{seat: func() (attached, error) { return f, nil }})
}

func TestASessionEndsForWhoBreaksItsRules(t *testing.T) {
	for _, tc := range []struct {
		name  string
		sends string
		why   string // a part
	}{
		{"a line that never ends", strings.Repeat("x", maxAsk+1), "a line is longer than 16384 bytes"},
		{"no JSON", "hello\n", "not an ask: JSON: byte"},
		{"an empty line", "\n", "not an ask: no document"},
		{"something unknown", `{"seq": 1, "do": "read", "hurry": true}` + "\n", `unknown field "hurry"`},
		{"no number", `{"do": "read"}` + "\n", "no number (seq)"},
		{"a number that is negative", `{"seq": -1, "do": "read"}` + "\n", "seq cannot be a number"},
		{"two in a line", `{"seq": 1, "do": "read"} {"seq": 2, "do": "read"}` + "\n", "something behind the document"},
		{"bytes", "\x00\xff\xfe\n", "not an ask"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			seat := newSeat()
			c, in := rawSession(t, seated(t, seat))
			io.WriteString(c, tc.sends)
			var a control.Answer
			if err := json.NewDecoder(in).Decode(&a); err != nil || a.Seq != 0 || !strings.Contains(a.Bye, tc.why) {
				t.Errorf("the last words are %+v, error %v; want %q", a, err, tc.why)
			}
			if r := seat.reason(t); !strings.Contains(r, tc.why) || !strings.Contains(r, fmt.Sprintf("process %d of user %d", os.Getpid(), os.Getuid())) {
				t.Errorf("released: %s", r)
			}
			if _, err := in.ReadByte(); err == nil {
				t.Error("still connected")
			}
		})
	}
}

func TestASessionAnswersAndEnds(t *testing.T) {
	seat := newSeat()
	c, in := rawSession(t, seated(t, seat))
	// The last of these is the longest that is taken.
	io.WriteString(c, `{"seq": 7, "do": "fail"}`+"\n"+`{"seq": 6, "do": "read", "read": {"window": "w", "offset": 0, "length": 1048577}}`+"\n"+
		`{"seq": 8,`+strings.Repeat(" ", maxAsk-len(`{"seq": 8,"do": "x"}`)-1)+`"do": "x"}`+"\n")
	dec := json.NewDecoder(in)
	for i, want := range []struct {
		seq   uint64
		err   string
		bytes int
	}{{7, "no", 0}, {6, "read 1048577 bytes: want at most 1048576 at once", 0}, {8, "", control.MaxRead}} {
		var a control.Answer
		if err := dec.Decode(&a); err != nil || a.Seq != want.seq || a.Error != want.err || len(a.Data) != want.bytes {
			t.Errorf("answer %d: %d, %q, %d bytes, error %v; want %+v", i, a.Seq, a.Error, len(a.Data), err, want)
		}
	}
	if n := seat.asked.Load(); n != 2 {
		t.Errorf("asked %d times", n)
	}
	// Half of the connection is enough for the good-bye.
	c.CloseWrite()
	var a control.Answer
	if err := dec.Decode(&a); err != nil || !strings.Contains(a.Bye, "has closed its connection") {
		t.Errorf("%+v, error %v", a, err)
	}
	seat.reason(t)
}

// Asks that come with the request are not lost.
func TestAskingBeforeTheAnswer(t *testing.T) {
	seat := newSeat()
	s := seated(t, seat)
	c, err := net.Dial("unix", s.l.path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Minute))
	io.WriteString(c, upgrade+`{"seq": 1, "do": "fail"}`+"\n")
	in := bufio.NewReader(c)
	for {
		b, err := in.ReadBytes('\n')
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(b, []byte(`"seq":1,"error":"no"`)) {
			return
		}
	}
}

func TestAClientThatDoesNotReadLosesItsSession(t *testing.T) {
	defer func(d time.Duration) { stall = d }(stall)
	stall = 100 * time.Millisecond
	seat := newSeat()
	c, _ := rawSession(t, seated(t, seat))
	go func() {
		for i := 1; ; i++ { // as many as it takes
			if _, err := fmt.Fprintf(c, "{\"seq\": %d, \"do\": \"read\"}\n", i); err != nil {
				return
			}
		}
	}()
	if r := seat.reason(t); !strings.Contains(r, "does not read its answers") {
		t.Errorf("released: %s", r)
	}
	// Nothing was done ahead: the answers are larger than the socket's buffer.
	if n := seat.asked.Load(); n > 2 {
		t.Errorf("%d answers were made that nobody read", n)
	}
}

// The daemon's end of a session reaches a client that does not read, too.
func TestTheDaemonEndsSessions(t *testing.T) {
	for _, tc := range []struct {
		name  string
		flood bool
		end   func(s *server, seat *fakeSeat) string
	}{
		{"the context goes", false, func(_ *server, seat *fakeSeat) string {
			seat.over <- "the context was removed"
			return "the context was removed"
		}},
		{"the context goes, and the client does not read", true, func(_ *server, seat *fakeSeat) string {
			seat.over <- "the context was removed"
			return "the context was removed"
		}},
		{"the server closes", false, func(s *server, _ *fakeSeat) string {
			s.close(context.Background(), "it was night")
			return "it was night"
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			seat := newSeat()
			s := seated(t, seat)
			c, in := rawSession(t, s)
			if tc.flood {
				io.WriteString(c, `{"seq": 1, "do": "read"}`+"\n")
				for seat.asked.Load() == 0 {
					time.Sleep(time.Millisecond)
				}
			}
			why := tc.end(s, seat)
			if r := seat.reason(t); r != why {
				t.Errorf("released: %s, want %s", r, why)
			}
			if tc.flood {
				return
			}
			var a control.Answer
			if err := json.NewDecoder(in).Decode(&a); err != nil || a.Bye != why {
				t.Errorf("%+v, error %v", a, err)
			}
		})
	}
}

func TestPeersThatGoAtAnyMomentLeaveNothing(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	var seats sync.Map
	s := start(t, &fake{seat: func() (attached, error) {
		seat := newSeat(int(r.Fd()), int(w.Fd()))
		seats.Store(seat, true)
		return seat, nil
	}})
	c, err := control.Dial(s.l.path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Status(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := descriptors(t)
	all := upgrade + `{"seq": 1, "do": "read"}` + "\n"
	for n := range len(all) + 1 {
		c, err := net.Dial("unix", s.l.path)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(c, all[:n])
		c.Close()
	}
	// And with the descriptors in the socket, unread.
	for range 100 {
		c, err := net.Dial("unix", s.l.path)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(c, upgrade)
		c.Read(make([]byte, 16))
		c.Close()
	}
	admitted := 0
	seats.Range(func(seat, _ any) bool {
		admitted++
		seat.(*fakeSeat).reason(t)
		return true
	})
	if admitted < 100 {
		t.Errorf("%d were admitted", admitted)
	}
	if _, err := c.Status(t.Context()); err != nil {
		t.Error(err)
	}
	for until := time.Now().Add(time.Minute); descriptors(t) > before; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("%d descriptors before, %d after", before, descriptors(t))
		}
	}
}

func TestRefusedSessionsAreReleasedOrNeverBegun(t *testing.T) {
	seat := newSeat(make([]int, maxDescriptors+1)...)
	s := seated(t, seat)
	_, err := client.Attach(t.Context(), "box", client.Options{Socket: s.l.path})
	if err == nil || !strings.Contains(err.Error(), "254 descriptors, and a message takes 253") {
		t.Errorf("error %v", err)
	}
	seat.reason(t)

	for err, status := range map[error]int{errBusy: 409, errDenied: 403, errNotFound: 404} {
		s := start(t, &fake{seat: func() (attached, error) { return nil, fmt.Errorf("box: %w: says the daemon", err) }})
		_, got := client.Attach(t.Context(), "box", client.Options{Socket: s.l.path})
		var e *control.Error
		if !errors.As(got, &e) || e.Status != status || !strings.Contains(got.Error(), "says the daemon") {
			t.Errorf("error %v, want status %d", got, status)
		}
	}
}

func TestTheClientSaysWhyASessionEnded(t *testing.T) {
	seat := newSeat()
	s := seated(t, seat)
	attach := func() *client.App {
		app, err := client.Attach(t.Context(), "box", client.Options{Socket: s.l.path})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { app.Close() })
		return app
	}
	app := attach()
	waits := make(chan error, 3)
	go func() { waits <- app.Wait(context.Background()) }()
	go func() { waits <- app.Wait(t.Context()) }()
	seat.gate = make(chan struct{})
	go func() {
		_, err := app.Info(context.Background())
		waits <- err
	}()
	for seat.asked.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	seat.over <- "it rains"
	close(seat.gate)
	ended := 0
	for range 3 {
		var e *client.EndedError
		if err := <-waits; errors.As(err, &e) && e.Reason == "it rains" && e.Context == "box" {
			ended++
		}
	}
	if ended < 2 { // Info may have been answered in time
		t.Errorf("%d of 3 were told", ended)
	}
	<-app.Ended()
	if err := app.Post(context.Background(), control.Receive{}); err == nil || !strings.Contains(err.Error(), "it rains") {
		t.Errorf("afterwards: %v", err)
	}
	seat.reason(t)
}

// A server that is none, or of another version, must not hang or harm its clients.
func TestTheClientChecksWhatAnswers(t *testing.T) {
	devnull, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer devnull.Close()
	null := int(devnull.Fd())
	const head = "HTTP/1.1 101 Switching Protocols\r\n\r\n"
	for _, tc := range []struct {
		name  string
		says  string
		fds   int
		error string
	}{
		{"nothing", "", 0, "went away before it answered"},
		{"half of a head", "HTTP/1.1 101", 0, "went away before it answered"},
		{"another protocol", "SSH-2.0-OpenSSH\r\n\r\n", 0, "not the daemon"},
		{"half of a document", head + `{"context"`, 0, "went away before it answered"},
		{"no document", head + "hello\n", 0, "first document"},
		{"fewer descriptors than windows", head + `{"context": "box", "windows": [{"name": "w", "app": "rw", "size": 4096}]}` + "\n", 0, "0 descriptors came, want 1"},
		{"more descriptors than windows", head + `{"context": "box"}` + "\n", 3, "3 descriptors came, want 0"},
		{"descriptors of something else", head + `{"context": "box", "windows": [{"name": "w", "app": "rw", "size": 4096}]}` + "\n", 1, `window "w"`},
		{"a queue of something else", head + `{"context": "box", "pair": {"events": 16, "requests": 16, "payload": 64, "lanes": 1}}` + "\n", 3, "queues"},
		{"a queue with a negative number of lanes", head + `{"context": "box", "pair": {"events": 16, "requests": 16, "payload": 64, "lanes": -2}}` + "\n", 0, "0 descriptors came, want 2"},
		{"an endless head", strings.Repeat("x", 2<<20), 0, "more than"},
		{"an error", "HTTP/1.1 409 Conflict\r\nContent-Length: 16\r\n\r\n{\"error\": \"no!\"}", 0, "no!"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := socketDir(t) + "/s"
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			before := descriptors(t)
			go func() {
				c, err := l.AcceptUnix()
				if err != nil {
					return
				}
				defer c.Close()
				c.Read(make([]byte, 4096))
				var fds []int
				for range tc.fds {
					fds = append(fds, null)
				}
				var oob []byte
				if fds != nil {
					oob = syscall.UnixRights(fds...)
				}
				n, _, _ := c.WriteMsgUnix([]byte(tc.says), oob, nil)
				if n < len(tc.says) {
					io.WriteString(c, tc.says[n:])
				}
			}()
			app, err := client.Attach(t.Context(), "box", client.Options{Socket: path})
			if err == nil {
				app.Close()
			}
			if err == nil || !strings.Contains(err.Error(), tc.error) {
				t.Errorf("error %v, want %q", err, tc.error)
			}
			for until := time.Now().Add(time.Minute); descriptors(t) > before; time.Sleep(time.Millisecond) {
				if time.Now().After(until) {
					t.Fatalf("%d descriptors before, %d after", before, descriptors(t))
				}
			}
		})
	}
}

func TestAttachEndsWithItsContext(t *testing.T) {
	path := socketDir(t) + "/s"
	l, err := net.Listen("unix", path) // nobody accepts
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := client.Attach(ctx, "box", client.Options{Socket: path}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
}

// What limits slow peers is not for those that are silent.
func TestSessionsAndStreamsMayBeSilent(t *testing.T) {
	defer func(d time.Duration) { stall = d }(stall)
	stall = 50 * time.Millisecond
	seat := newSeat()
	s := seated(t, seat)
	c, in := rawSession(t, s)
	log, err := net.Dial("unix", s.l.path)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	io.WriteString(log, "GET /v1/contexts/box/log?follow=1 HTTP/1.1\r\nHost: x\r\n\r\n")
	time.Sleep(4 * stall)
	io.WriteString(c, `{"seq": 1, "do": "fail"}`+"\n")
	if b, err := in.ReadString('\n'); err != nil || !strings.Contains(b, `"seq":1`) {
		t.Errorf("session: %q, error %v", b, err)
	}
	log.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	if b, err := io.ReadAll(log); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the log has ended: %q, error %v", b, err)
	}
	// When the server closes it does, in order: with the last chunk of the answer.
	go s.close(context.Background(), "the test ends")
	log.SetReadDeadline(time.Now().Add(time.Minute))
	b, err := io.ReadAll(log)
	if err != nil || !bytes.HasSuffix(b, []byte("0\r\n\r\n")) {
		t.Errorf("log: %q, error %v", b, err)
	}
}
