// SPDX-License-Identifier: Apache-2.0

// Package web is the daemon's live page: what a NIC is doing now, and what it did in the
// last minutes. Nothing can be changed through it. The daemon hands in what it tells
// everybody; docs/web.md says who can read it.
package web

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/xspin/xspin/internal/httpserver"
)

const goodbye = time.Second // for answers under way at the end

// patience is how long a request may take to come, and an answer to be read. Tests have less.
var patience = 10 * time.Second

//go:embed files
var embedded embed.FS

// policy has browsers take nothing from elsewhere, run nothing that is written into the
// page, and show the page in no other.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// A Server answers browsers. Its methods are for one caller, in the order Serve, Close.
type Server struct {
	listener *httpserver.Listener
	loopback bool
	logger   *slog.Logger
	http     *http.Server
	serving  chan struct{} // closed when it ends, nil before it begins

	recorder recorder
}

// Listen takes an address, "[ADDRESS:]PORT", for Serve to answer on. Without an address it
// is the loopback's.
func Listen(address string, logger *slog.Logger) (*Server, error) {
	address, err := Address(address)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("address of the page: %w: name another one, or leave --web out", err)
	}
	s := &Server{loopback: l.Addr().(*net.TCPAddr).IP.IsLoopback(), logger: logger}
	if !s.loopback {
		logger.Warn("whoever reaches the address of the page can read it: nobody is asked who they are", "address", l.Addr())
	}
	s.http, s.listener = httpserver.New(l, s.handler(), patience, logger)
	return s, nil
}

// Address checks one as Listen takes it, and adds that of the loopback if there is none.
func Address(address string) (string, error) {
	host, port := "", address
	if strings.Contains(address, ":") {
		var err error
		if host, port, err = net.SplitHostPort(address); err != nil {
			return "", fmt.Errorf("address of the page: %q: want [ADDRESS:]PORT, such as 9466, 127.0.0.1:9466 or [::1]:9466", address)
		}
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return "", fmt.Errorf("address of the page: %q: want [ADDRESS:]PORT, such as 9466, with a port of 0 to 65535", address)
	}
	if host == "" {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port), nil
}

// URL is where the page is.
func (s *Server) URL() string { return "http://" + s.listener.Addr().String() + "/" }

// Serve answers from here on, and looks once a second at what source tells. It does not
// wait.
func (s *Server) Serve(source Source) {
	s.serving = make(chan struct{})
	stop := make(chan struct{})
	s.http.RegisterOnShutdown(func() { close(stop) })
	ended := make(chan struct{})
	s.recorder.record(source, time.Now()) // the first to ask finds something
	go func() {
		defer close(ended)
		for tick := time.Tick(time.Second); ; {
			select {
			case now := <-tick:
				s.recorder.record(source, now)
			case <-stop:
				return
			}
		}
	}()
	go func() {
		defer close(s.serving)
		if err := s.http.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
			s.logger.Error("the page is not served any more", "address", s.listener.Addr(), "error", err)
		}
		<-ended
	}()
}

// Close ends it, if need be in the middle of an answer.
func (s *Server) Close(ctx context.Context) {
	if s.serving == nil {
		s.listener.Close()
		return
	}
	ctx, cancel := context.WithTimeout(ctx, goodbye)
	defer cancel()
	if s.http.Shutdown(ctx) != nil {
		_ = s.http.Close()
	}
	<-s.serving
}

// handler answers GET and HEAD, with the files and /state.
func (s *Server) handler() http.Handler {
	files, err := fs.Sub(embedded, "files")
	if err != nil {
		panic(err) // of the package
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-store")
		switch {
		case s.loopback && !httpserver.Local(r.Host):
			http.Error(w, fmt.Sprintf("host %q: this page is http://%s/, or localhost with that port", r.Host, s.listener.Addr()), http.StatusForbidden)
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			h.Set("Allow", "GET, HEAD")
			http.Error(w, r.Method+": want GET or HEAD: nothing can be changed here", http.StatusMethodNotAllowed)
		case r.URL.Path == "/state":
			s.state(w, r)
		default:
			name := strings.TrimPrefix(path.Clean(r.URL.Path), "/")
			if name == "" {
				name = "index.html"
			}
			if st, err := fs.Stat(files, name); err != nil || st.IsDir() {
				http.NotFound(w, r)
				return
			}
			http.ServeFileFS(w, r, files, name)
		}
	})
}

// state answers with the document, and with the samples that came after the one that the
// parameter since has the number of.
func (s *Server) state(w http.ResponseWriter, r *http.Request) {
	var since uint64
	if text := r.URL.Query().Get("since"); text != "" {
		var err error
		if since, err = strconv.ParseUint(text, 10, 64); err != nil {
			http.Error(w, fmt.Sprintf("since=%q: want the number of a sample", text), http.StatusBadRequest)
			return
		}
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(s.recorder.document(since)) // a client that does not read it does not want it
}
