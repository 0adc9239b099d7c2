// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// A Client talks to a daemon. It is safe for concurrent use. If the daemon refuses a
// request, the error is an *[Error].
type Client struct {
	socket string
	http   http.Client
}

// An Error is the daemon's answer to a request that it refuses.
type Error struct {
	Status   int // of HTTP: 404 if there is no such context, 403, 409, ...
	Text     string
	Problems []Problem // with the document that was sent: what Text says, with places
}

func (e *Error) Error() string { return e.Text }

// ErrNoDaemon is wrapped by the error if no daemon listens.
var ErrNoDaemon = errors.New("no daemon answers")

// SocketPath returns the path of a socket: "" stands for that of XSPIN_SOCKET, or Socket.
func SocketPath(socket string) string {
	return cmp.Or(socket, os.Getenv("XSPIN_SOCKET"), Socket)
}

// Connect returns a connection to the daemon at a socket, "" for XSPIN_SOCKET or
// Socket.
func Connect(ctx context.Context, socket string) (*net.UnixConn, error) {
	socket = SocketPath(socket)
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", socket)
	switch {
	case err == nil:
		return c.(*net.UnixConn), nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ENOTDIR):
		return nil, fmt.Errorf("%w at %s: start one with `sudo xspin run`, or name its socket with --socket or XSPIN_SOCKET (%w)", ErrNoDaemon, socket, errno(err))
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("this user may not connect to the daemon at %s: its socket is closed to others (%w)", socket, errno(err))
	}
	return nil, fmt.Errorf("ask the daemon at %s: %w", socket, errno(err))
}

// errno returns the errno in an error, if there is one, because the caller says the rest.
func errno(err error) error {
	var e syscall.Errno
	if errors.As(err, &e) {
		return e
	}
	return err
}

// Dial returns a client for the daemon at a socket, "" for XSPIN_SOCKET or Socket. It
// fails at once, with a hint, if no daemon listens or this user may not connect.
func Dial(socket string) (*Client, error) {
	c := &Client{socket: SocketPath(socket)}
	probe, err := Connect(context.Background(), c.socket)
	if err != nil {
		return nil, err
	}
	probe.Close()
	c.http.Transport = &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return Connect(ctx, c.socket) },
		// Do not send a document that is refused: wait for 100 Continue.
		ExpectContinueTimeout: 10 * time.Second,
		IdleConnTimeout:       10 * time.Second, // shorter than the daemon's
		DisableCompression:    true,
	}
	return c, nil
}

// Close closes idle connections. The client can still be used.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// do sends a request. The body of the response is the caller's to close.
func (c *Client) do(ctx context.Context, method, path string, q url.Values, size int64, body io.Reader) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, method, "http://xspin"+path, body)
	if err != nil {
		return nil, err
	}
	r.URL.RawQuery = q.Encode()
	if body != nil {
		r.Header.Set("Content-Type", "application/octet-stream")
		r.Header.Set("Expect", "100-continue")
		r.ContentLength = size
	}
	w, err := c.http.Do(r)
	if err != nil {
		return nil, c.failed(ctx, err)
	}
	if w.StatusCode/100 == 2 {
		return w, nil
	}
	defer w.Body.Close()
	return nil, ReadError(w)
}

// failed makes an error of a failed request: ctx's, or one that says that the daemon is gone.
func (c *Client) failed(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
		return fmt.Errorf("the daemon at %s went away before it answered (%w): is it still running?", c.socket, errno(err))
	}
	return err
}

// ReadError returns the *[Error] of a response that is not 2xx.
func ReadError(w *http.Response) error {
	b, _ := io.ReadAll(io.LimitReader(w.Body, 64<<10))
	var doc struct {
		Error    string    `json:"error"`
		Problems []Problem `json:"problems"`
	}
	if err := json.Unmarshal(b, &doc); err != nil || doc.Error == "" {
		doc.Error = strings.TrimSpace(fmt.Sprintf("the daemon answers %s: %s", w.Status, b))
	}
	return &Error{w.StatusCode, doc.Error, doc.Problems}
}

// call sends a document, nil for none, and decodes the one that comes back.
func (c *Client) call(ctx context.Context, method, path string, doc, into any) error {
	var body io.Reader
	var size int64
	if doc != nil {
		b, err := json.Marshal(doc)
		if err != nil {
			return err
		}
		body, size = bytes.NewReader(b), int64(len(b))
	}
	w, err := c.do(ctx, method, path, nil, size, body)
	if err != nil {
		return err
	}
	defer w.Body.Close()
	if into != nil {
		if err := json.NewDecoder(w.Body).Decode(into); err != nil {
			return fmt.Errorf("answer of the daemon at %s: %w", c.socket, c.failed(ctx, err))
		}
	}
	_, _ = io.Copy(io.Discard, w.Body) // to its end, so that the connection can be reused
	return nil
}

func of(name string, what ...string) string {
	return strings.Join(append([]string{"/v1/contexts", url.PathEscape(name)}, what...), "/")
}

// Status asks for the daemon's status.
func (c *Client) Status(ctx context.Context) (*Status, error) {
	var s Status
	if err := c.call(ctx, http.MethodGet, "/v1/status", nil, &s); err != nil {
		return nil, err
	}
	return &s, nil
}

// Stats asks for the counters of all interfaces: *into is a []nic.Stats, or any type for
// the same JSON.
func (c *Client) Stats(ctx context.Context, into any) error {
	return c.call(ctx, http.MethodGet, "/v1/stats", nil, into)
}

// Contexts asks for all contexts.
func (c *Client) Contexts(ctx context.Context) (all []ContextInfo, err error) {
	err = c.call(ctx, http.MethodGet, "/v1/contexts", nil, &all)
	return all, err
}

// Context asks for one context.
func (c *Client) Context(ctx context.Context, name string) (*ContextInfo, error) {
	var info ContextInfo
	if err := c.call(ctx, http.MethodGet, of(name), nil, &info); err != nil {
		return nil, err
	}
	return &info, nil
}

// Rules asks for the rulesets of all matching tables, in order.
func (c *Client) Rules(ctx context.Context) (all []TableRule, err error) {
	err = c.call(ctx, http.MethodGet, "/v1/rules", nil, &all)
	return all, err
}

// Install installs a context.
func (c *Client) Install(ctx context.Context, spec *Context) (*ContextInfo, error) {
	var info ContextInfo
	if err := c.call(ctx, http.MethodPost, "/v1/contexts", spec, &info); err != nil {
		return nil, err
	}
	return &info, nil
}

// Activate arms a context's rulesets.
func (c *Client) Activate(ctx context.Context, name string) error {
	return c.call(ctx, http.MethodPost, of(name, "activate"), nil, nil)
}

// Deactivate disarms a context's rulesets; the context stays installed.
func (c *Client) Deactivate(ctx context.Context, name string) error {
	return c.call(ctx, http.MethodPost, of(name, "deactivate"), nil, nil)
}

// Remove removes a context.
func (c *Client) Remove(ctx context.Context, name string) error {
	return c.call(ctx, http.MethodDelete, of(name), nil, nil)
}

// Trigger triggers a host-activated context.
func (c *Client) Trigger(ctx context.Context, name string, t Trigger) error {
	return c.call(ctx, http.MethodPost, of(name, "trigger"), t, nil)
}

func memoryQuery(hpu int, offset, length int64) url.Values {
	q := url.Values{"offset": {strconv.FormatInt(offset, 10)}}
	if hpu >= 0 {
		q.Set("hpu", strconv.Itoa(hpu))
	}
	if length != 0 {
		q.Set("length", strconv.FormatInt(length, 10))
	}
	return q
}

// ReadMemory copies HPU memory to w: that of the context, or with hpu >= 0 that of an HPU.
// With length 0, it copies to the end.
func (c *Client) ReadMemory(ctx context.Context, name string, hpu int, offset, length int64, w io.Writer) (int64, error) {
	r, err := c.do(ctx, http.MethodGet, of(name, "memory"), memoryQuery(hpu, offset, length), 0, nil)
	if err != nil {
		return 0, err
	}
	defer r.Body.Close()
	return c.stream(ctx, w, r.Body)
}

// stream copies an answer to w. It keeps errors of reading and of writing apart.
func (c *Client) stream(ctx context.Context, w io.Writer, body io.Reader) (n int64, err error) {
	in := &source{Reader: body}
	n, err = io.Copy(w, in)
	if in.err != nil {
		err = c.failed(ctx, in.err)
	}
	return n, err
}

// A source remembers how reading failed.
type source struct {
	io.Reader
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.Reader.Read(p)
	if err != nil && !errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		s.err = err
	}
	return n, err
}

// WriteMemory copies r to HPU memory. If it does not fit, that is an error, and nothing is
// written.
func (c *Client) WriteMemory(ctx context.Context, name string, hpu int, offset int64, r io.Reader) (int64, error) {
	// If the length is known, the daemon can refuse it before anything is sent.
	size := int64(-1)
	switch v := r.(type) {
	case interface{ Len() int }:
		size = int64(v.Len())
	case *os.File:
		if i, err := v.Stat(); err == nil && i.Mode().IsRegular() {
			if at, err := v.Seek(0, io.SeekCurrent); err == nil {
				size = max(0, i.Size()-at)
				r = io.LimitReader(r, size)
			}
		}
	}
	if size == 0 {
		r = http.NoBody
	}
	w, err := c.do(ctx, http.MethodPut, of(name, "memory"), memoryQuery(hpu, offset, 0), size, r)
	if err != nil {
		return 0, err
	}
	defer w.Body.Close()
	var doc struct {
		Written int64 `json:"written"`
	}
	if err := json.NewDecoder(w.Body).Decode(&doc); err != nil {
		return 0, c.failed(ctx, err)
	}
	return doc.Written, nil
}

// Log calls f for each line of a context's log, or with hpu >= 0 of that HPU. With follow
// it continues until ctx ends, and returns ctx's error.
func (c *Client) Log(ctx context.Context, name string, hpu int, follow bool, f func(LogLine) error) error {
	q := url.Values{}
	if hpu >= 0 {
		q.Set("hpu", strconv.Itoa(hpu))
	}
	if follow {
		q.Set("follow", "1")
	}
	r, err := c.do(ctx, http.MethodGet, of(name, "log"), q, 0, nil)
	if err != nil {
		return err
	}
	defer r.Body.Close()
	dec := json.NewDecoder(r.Body)
	for {
		var l LogLine
		err := dec.Decode(&l)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return c.failed(ctx, err)
		}
		if err := f(l); err != nil {
			return err
		}
	}
}

// Capture copies frames of a context to w as pcapng, until o.Count frames (0: any number)
// are written, or ctx ends. In that case it returns ctx's error.
func (c *Client) Capture(ctx context.Context, name string, o CaptureOptions, w io.Writer) error {
	q := url.Values{}
	for key, v := range map[string]string{"filter": o.Filter, "verdict": o.Verdict} {
		if v != "" {
			q.Set(key, v)
		}
	}
	for key, v := range map[string]int{"snap": o.Snap, "count": o.Count} {
		if v != 0 {
			q.Set(key, strconv.Itoa(v))
		}
	}
	if o.HPU >= 0 {
		q.Set("hpu", strconv.Itoa(o.HPU))
	}
	r, err := c.do(ctx, http.MethodGet, of(name, "capture"), q, 0, nil)
	if err != nil {
		return err
	}
	defer r.Body.Close()
	_, err = c.stream(ctx, w, r.Body)
	return err
}

// CaptureOptions say what to capture.
type CaptureOptions struct {
	Filter  string `json:"filter,omitempty"`  // rulesets in text form: only frames that match one
	Verdict string `json:"verdict,omitempty"` // only frames with this verdict
	HPU     int    `json:"hpu"`               // only of this HPU, -1 for all
	Snap    int    `json:"snap,omitempty"`    // bytes of each frame, 0 for all
	Count   int    `json:"count,omitempty"`
}

// Reload has the daemon read its configuration file again, and returns what changed.
func (c *Client) Reload(ctx context.Context) (changes []string, err error) {
	var doc struct {
		Changes []string `json:"changes"`
	}
	err = c.call(ctx, http.MethodPost, "/v1/reload", nil, &doc)
	return doc.Changes, err
}
