// SPDX-License-Identifier: Apache-2.0

// Package httpserver serves strangers over TCP, with bounds on what they can make a process
// hold.
package httpserver

import (
	"container/list"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"
)

// Limits of a server.
const (
	MaxConns  = 64       // connections; see Listener
	MaxHeader = 16 << 10 // bytes of a request's head
	Idle      = 30 * time.Second
)

// New returns a server whose requests have to come, and answers to be read, within patience.
// It is to serve on the Listener that comes with it.
func New(l net.Listener, h http.Handler, patience time.Duration, logger *slog.Logger) (*http.Server, *Listener) {
	b := &Listener{Listener: l, max: MaxConns, waiting: list.New(), conns: map[net.Conn]*list.Element{}}
	return &http.Server{
		Handler: h, ConnState: b.state, MaxHeaderBytes: MaxHeader,
		ReadTimeout: patience, WriteTimeout: patience, IdleTimeout: Idle,
		ErrorLog: slog.NewLogLogger(logger.Handler(), slog.LevelWarn),
	}, b
}

// A Listener has at most MaxConns connections open. One more takes the place of the one that
// has asked nothing for the longest time; if each has a request under way, it is closed. So
// whoever asks at once is answered, however many connect and ask nothing.
type Listener struct {
	net.Listener
	max int

	mu      sync.Mutex
	conns   map[net.Conn]*list.Element // in waiting; nil: it has a request under way
	waiting *list.List                 // of net.Conn, the oldest first
}

// Accept is for http.Server.
func (b *Listener) Accept() (net.Conn, error) {
	for {
		c, err := b.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if b.enter(c) {
			return c, nil
		}
		_ = c.Close()
	}
}

func (b *Listener) enter(c net.Conn) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.conns) >= b.max {
		oldest := b.waiting.Front()
		if oldest == nil {
			return false
		}
		old := oldest.Value.(net.Conn)
		b.leave(old)
		_ = old.Close() // the server finds that out, and lets go of it
	}
	b.conns[c] = b.waiting.PushBack(c)
	return true
}

// leave forgets a connection. The caller has locked.
func (b *Listener) leave(c net.Conn) {
	if e := b.conns[c]; e != nil {
		b.waiting.Remove(e)
	}
	delete(b.conns, c)
}

// state is the server's http.Server.ConnState.
func (b *Listener) state(c net.Conn, s http.ConnState) {
	b.mu.Lock()
	defer b.mu.Unlock()
	e, open := b.conns[c]
	if !open {
		return
	}
	switch s {
	case http.StateActive:
		if e != nil {
			b.waiting.Remove(e)
			b.conns[c] = nil
		}
	case http.StateIdle:
		if e == nil {
			b.conns[c] = b.waiting.PushBack(c)
		}
	case http.StateClosed, http.StateHijacked:
		b.leave(c)
	}
}

// Local reports whether a Host header names this machine, whatever the port. Who serves on the
// loopback refuses others: a name of somebody else's may have been made to mean this machine.
func Local(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	if strings.EqualFold(host, "localhost") {
		return true
	}
	a, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return err == nil && a.Unmap().IsLoopback()
}
