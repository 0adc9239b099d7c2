// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/nic"
)

// A backend is what the server serves: a Daemon.
type backend interface {
	status() control.Status
	stats() ([]nic.Stats, error)
	infos() []control.ContextInfo
	info(name string) (*control.ContextInfo, error)
	install(*control.Context) (*control.ContextInfo, error)
	activate(name string) error
	deactivate(name string) error
	remove(name string) error
	trigger(name string, t control.Trigger) error
	// withMemory calls f with HPU memory of a context, which does not go away
	// meanwhile: hpu -1 for the context's.
	withMemory(name string, hpu int, f func([]byte) error) error
	// log calls f for lines of a context's log, until it has seen all of them, or with
	// follow until ctx ends or the context is removed.
	log(ctx context.Context, name string, hpu int, follow bool, f func(control.LogLine) error) error
	// capture writes frames of a context, until ctx ends, the context is removed or
	// there are as many as asked for.
	capture(ctx context.Context, uid int, name string, o control.CaptureOptions, w io.Writer) error
	Reload() (changes []string, err error)

	mayAdmin(control.Peer) error
	mayRead(p control.Peer, name string) error
	admit(name string, p control.Peer, observer bool) (attached, error)
}

// Limits on what a peer can make the server hold. Slow peers lose their connection;
// memory is bounded by connections.
const (
	maxBody     = 1 << 20         // of a JSON document
	maxHeader   = 16 << 10        // of a request
	maxPerUser  = 64              // connections of a user that is not root
	maxUsers    = 1024            // connections of all of these: a user may own many numbers
	idle        = 2 * time.Minute // between requests of a connection
	memoryChunk = 256 << 10       // of HPU memory that is copied at once
	goodbye     = 1 * time.Second // for the last document of a session
	patience    = 3 * time.Second // with requests when the server closes
	drain       = 64 << 20        // of a body that is not wanted: a peer that still writes may not read
)

// stall is how long a peer may take over its next bytes. Tests have less time.
var stall = 10 * time.Second

// A server answers on the daemon's socket.
type server struct {
	d    backend
	log  *slog.Logger
	l    *listener
	http *http.Server

	ctx      context.Context // of streams and sessions
	end      context.CancelCauseFunc
	mu       sync.Mutex // Add of sessions and Wait
	closed   bool
	sessions sync.WaitGroup
}

// newServer makes the socket. Peers can connect from here on, and wait until serve.
func newServer(path string, d backend, log *slog.Logger) (*server, error) {
	l, err := listen(path, log)
	if err != nil {
		return nil, err
	}
	s := &server{d: d, log: log, l: l}
	s.ctx, s.end = context.WithCancelCause(context.Background())
	s.http = &http.Server{
		Handler:           s.routes(),
		ReadHeaderTimeout: stall,
		IdleTimeout:       idle,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, c.(*conn))
		},
	}
	return s, nil
}

// serve answers until close. It does not wait.
func (s *server) serve() {
	go func() {
		if err := s.http.Serve(s.l); !errors.Is(err, http.ErrServerClosed) {
			s.log.Error("the control socket is dead", "socket", s.l.path, "error", err)
		}
	}()
}

// close stops answering. Sessions are told why, and release what they have; requests
// may end until ctx does, or for some seconds: peers that only hold a connection would
// have us wait.
func (s *server) close(ctx context.Context, reason string) error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.end(errors.New(reason))
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err := s.http.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		err = s.http.Close()
	}
	err = errors.Join(err, s.l.Close()) // if it was never served
	s.sessions.Wait()                   // bounded, see session
	return err
}

// enter begins a session, false if the server is closed.
func (s *server) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.sessions.Add(1)
	}
	return !s.closed
}

type connKey struct{}

// connOf returns the connection of a request, and peerOf who has sent it.
func connOf(r *http.Request) *conn        { return r.Context().Value(connKey{}).(*conn) }
func peerOf(r *http.Request) control.Peer { return connOf(r).peer }

// A handler answers a request, with a document for the peer (nil for none) or an error.
type handler func(w http.ResponseWriter, r *http.Request) (any, error)

func (s *server) routes() http.Handler {
	mux := http.NewServeMux()
	add := func(pattern string, h handler) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) { s.answer(w, r, h) })
	}
	add("GET /v1/status", plain(func(*http.Request) (any, error) { return s.d.status(), nil }))
	add("GET /v1/stats", plain(func(*http.Request) (any, error) {
		all, err := s.d.stats()
		return append([]nic.Stats{}, all...), err
	}))
	add("GET /v1/rules", plain(s.rules))
	add("GET /v1/contexts", plain(s.contexts))
	add("GET /v1/contexts/{name}", plain(s.context))
	add("POST /v1/contexts", s.install)
	add("DELETE /v1/contexts/{name}", s.admin(func(r *http.Request) (any, error) {
		return nil, s.d.remove(r.PathValue("name"))
	}))
	add("POST /v1/contexts/{name}/activate", s.admin(s.then(s.d.activate)))
	add("POST /v1/contexts/{name}/deactivate", s.admin(s.then(s.d.deactivate)))
	add("POST /v1/contexts/{name}/trigger", s.trigger)
	add("POST /v1/contexts/{name}/attach", s.attach)
	add("GET /v1/contexts/{name}/memory", s.readMemory)
	add("PUT /v1/contexts/{name}/memory", s.writeMemory)
	add("GET /v1/contexts/{name}/log", s.logLines)
	add("GET /v1/contexts/{name}/capture", s.capture)
	add("POST /v1/reload", s.admin(func(*http.Request) (any, error) {
		changes, err := s.d.Reload()
		return struct {
			Changes []string `json:"changes"`
		}{append([]string{}, changes...)}, err
	}))
	add("/", func(w http.ResponseWriter, r *http.Request) (any, error) {
		var allowed []string
		for _, m := range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete} {
			if _, pattern := mux.Handler(&http.Request{Method: m, URL: r.URL, Host: r.Host}); pattern != "/" {
				allowed = append(allowed, m)
			}
		}
		if allowed == nil {
			return nil, statusError{http.StatusNotFound, fmt.Errorf("%s: there is no such path, see docs/control.md", r.URL.Path)}
		}
		w.Header().Set("Allow", strings.Join(allowed, ", "))
		return nil, statusError{http.StatusMethodNotAllowed, fmt.Errorf("%s %s: want %s", r.Method, r.URL.Path, strings.Join(allowed, ", "))}
	})
	return mux
}

// answer calls a handler and writes what it returns.
func (s *server) answer(w http.ResponseWriter, r *http.Request, h handler) {
	connOf(r).answering.Store(true)
	defer connOf(r).answering.Store(false)
	ctl := http.NewResponseController(w)
	_ = ctl.SetReadDeadline(time.Now().Add(stall))
	_ = ctl.SetWriteDeadline(time.Now().Add(stall)) // handlers that do more than a bit move both
	doc, err := h(w, r)
	if err == nil && doc == nil {
		return // no document, or written already
	}
	status := http.StatusOK
	switch {
	case err != nil:
		status = statusOf(err)
		doc = struct {
			Error    string            `json:"error"`
			Problems []control.Problem `json:"problems,omitempty"`
		}{err.Error(), problemsOf(err)}
		if r.Header.Get("Expect") == "" {
			// A peer that is busy writing what nobody wants would not see the answer.
			_, _ = io.CopyN(io.Discard, r.Body, drain)
		}
	default:
		if c, ok := doc.(created); ok {
			status, doc = http.StatusCreated, c.ContextInfo
		}
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(doc); err != nil {
		status = http.StatusInternalServerError
		b.Reset()
		fmt.Fprintf(&b, "{\"error\": %q}\n", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(b.Len()))
	_ = ctl.SetWriteDeadline(time.Now().Add(stall))
	w.WriteHeader(status)
	_, _ = w.Write(b.Bytes()) // a client that does not read it does not want it
}

// problemsOf returns what an error says of a document, if that is all that it says.
func problemsOf(err error) (list []control.Problem) {
	var all problems
	if !errors.As(err, &all) || err.Error() != all.Error() {
		return nil
	}
	for _, p := range all {
		list = append(list, control.Problem{Path: p.path, Line: p.line, Column: p.column, Text: p.msg})
	}
	return list
}

// created is the document of something new.
type created struct{ *control.ContextInfo }

// A statusError is an error with an HTTP status of its own.
type statusError struct {
	status int
	error
}

func (e statusError) Unwrap() error { return e.error }

func statusOf(err error) int {
	var e statusError
	var long *http.MaxBytesError
	switch {
	case errors.As(err, &e):
		return e.status
	case errors.As(err, &long):
		return http.StatusRequestEntityTooLarge
	case errors.Is(err, errNotFound):
		return http.StatusNotFound
	case errors.Is(err, errDenied):
		return http.StatusForbidden
	case errors.Is(err, errBusy):
		return http.StatusConflict
	case errors.Is(err, errInvalid):
		return http.StatusBadRequest
	}
	return http.StatusInternalServerError
}

func invalid(format string, a ...any) error {
	return statusError{http.StatusBadRequest, fmt.Errorf(format, a...)}
}

// query returns the parameters of a request, of which only these may be there.
func query(r *http.Request, allowed ...string) (url.Values, error) {
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, invalid("parameters %q: %w", r.URL.RawQuery, err)
	}
	for k, v := range q {
		if !slices.Contains(allowed, k) {
			return nil, invalid("parameter %q: possible here: %s", k, cmp.Or(strings.Join(allowed, ", "), "none"))
		}
		if len(v) > 1 {
			return nil, invalid("parameter %q: given %d times", k, len(v))
		}
	}
	return q, nil
}

// number reads a parameter.
func number(q url.Values, key string, least, left int64) (int64, error) {
	if q.Get(key) == "" {
		return left, nil
	}
	n, err := strconv.ParseInt(q.Get(key), 10, 64)
	if err != nil || n < least {
		return 0, invalid("parameter %s=%q: want a number from %d", key, q.Get(key), least)
	}
	return n, nil
}

// hpuOf reads which HPU is meant, -1 without. Whether there is one the context says.
func hpuOf(q url.Values) (int, error) {
	n, err := number(q, "hpu", 0, -1)
	return int(n), err
}

func boolean(q url.Values, key string) (bool, error) {
	if q.Get(key) == "" {
		return false, nil
	}
	b, err := strconv.ParseBool(q.Get(key))
	if err != nil {
		return false, invalid("parameter %s=%q: want 1 or 0", key, q.Get(key))
	}
	return b, nil
}

// body decodes the document of a request; nil: there must be none.
func body(w http.ResponseWriter, r *http.Request, into any) error {
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		return fmt.Errorf("read the request's document: %w", err)
	}
	if into == nil {
		if len(bytes.TrimSpace(b)) > 0 {
			return invalid("%s %s takes no document", r.Method, r.URL.Path)
		}
		return nil
	}
	return strict(b, into)
}

// strict decodes a JSON document that has nothing unknown in it, and nothing behind it.
func strict(b []byte, into any) error {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	err := dec.Decode(into)
	var kind *json.UnmarshalTypeError
	switch {
	case errors.Is(err, io.EOF):
		return invalid("no document: want a JSON object")
	case errors.Is(err, io.ErrUnexpectedEOF):
		return invalid("JSON: the document ends in the middle")
	case errors.As(err, &kind):
		a := "a"
		if strings.HasPrefix(kind.Value, "a") || strings.HasPrefix(kind.Value, "o") {
			a = "an" // array, object
		}
		return invalid("JSON: byte %d: %s cannot be %s %s", kind.Offset, cmp.Or(kind.Field, "the document"), a, kind.Value)
	case err != nil:
		return invalid("JSON: byte %d: %s", dec.InputOffset(), strings.TrimPrefix(err.Error(), "json: "))
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return invalid("JSON: byte %d: something behind the document", dec.InputOffset())
	}
	return unique(json.NewDecoder(bytes.NewReader(b)))
}

// unique refuses a key that an object has twice, of which json takes the last. The next
// value of dec is known to be well formed. Letters are the same in both cases, as they
// are to json.
func unique(dec *json.Decoder) error {
	open, _ := dec.Token()
	if open != json.Delim('{') && open != json.Delim('[') {
		return nil
	}
	seen := map[string]bool{}
	for dec.More() {
		if open == json.Delim('{') {
			token, _ := dec.Token()
			key, _ := token.(string)
			if seen[strings.ToLower(key)] {
				return invalid("JSON: byte %d: key %q appears twice", dec.InputOffset(), key)
			}
			seen[strings.ToLower(key)] = true
		}
		if err := unique(dec); err != nil {
			return err
		}
	}
	_, err := dec.Token()
	return err
}

// plain is a handler without parameters and request document.
func plain(f func(*http.Request) (any, error)) handler {
	return func(w http.ResponseWriter, r *http.Request) (any, error) {
		if _, err := query(r); err != nil {
			return nil, err
		}
		if err := body(w, r, nil); err != nil {
			return nil, err
		}
		doc, err := f(r)
		if err == nil && doc == nil {
			w.WriteHeader(http.StatusNoContent)
		}
		return doc, err
	}
}

// admin is plain, for administrators.
func (s *server) admin(f func(*http.Request) (any, error)) handler {
	h := plain(f)
	return func(w http.ResponseWriter, r *http.Request) (any, error) {
		if err := s.d.mayAdmin(peerOf(r)); err != nil {
			return nil, err
		}
		return h(w, r)
	}
}

// then does something to a context and returns what it is like afterwards.
func (s *server) then(do func(string) error) func(*http.Request) (any, error) {
	return func(r *http.Request) (any, error) {
		if err := do(r.PathValue("name")); err != nil {
			return nil, err
		}
		return s.d.info(r.PathValue("name"))
	}
}

// show takes away what a peer may not see: parameters of handlers may be secrets.
func (s *server) show(r *http.Request, c *control.ContextInfo) {
	if c.Params != nil && s.d.mayRead(peerOf(r), c.Name) != nil {
		c.Params = nil
	}
}

func (s *server) contexts(r *http.Request) (any, error) {
	all := append([]control.ContextInfo{}, s.d.infos()...)
	for i := range all {
		s.show(r, &all[i])
	}
	return all, nil
}

func (s *server) context(r *http.Request) (any, error) {
	c, err := s.d.info(r.PathValue("name"))
	if err != nil {
		return nil, err
	}
	s.show(r, c)
	return c, nil
}

// rules returns the matching tables in their order; last what is not in one.
func (s *server) rules(*http.Request) (any, error) {
	all := []control.TableRule{}
	for _, c := range s.d.infos() {
		for _, rule := range c.Rules {
			all = append(all, control.TableRule{Interface: c.Interface, Context: c.Name, Rule: rule})
		}
	}
	slices.SortStableFunc(all, func(a, b control.TableRule) int {
		return cmp.Or(cmp.Compare(a.Interface, b.Interface), cmp.Compare(uint(a.Number), uint(b.Number)))
	})
	return all, nil
}

func (s *server) install(w http.ResponseWriter, r *http.Request) (any, error) {
	if err := s.d.mayAdmin(peerOf(r)); err != nil {
		return nil, err
	}
	if _, err := query(r); err != nil {
		return nil, err
	}
	var c control.Context
	if err := body(w, r, &c); err != nil {
		return nil, err
	}
	info, err := s.d.install(&c)
	if err != nil {
		return nil, err
	}
	return created{info}, nil
}

func (s *server) trigger(w http.ResponseWriter, r *http.Request) (any, error) {
	if err := s.d.mayAdmin(peerOf(r)); err != nil {
		return nil, err
	}
	if _, err := query(r); err != nil {
		return nil, err
	}
	var t control.Trigger
	if err := body(w, r, &t); err != nil {
		return nil, err
	}
	if err := s.d.trigger(r.PathValue("name"), t); err != nil {
		return nil, err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil, nil
}
