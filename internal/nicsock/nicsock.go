// SPDX-License-Identifier: Apache-2.0

// Package nicsock lets one xspin process ask another, on the same machine, how
// it is: a directory of Unix sockets, each of which answers a connection with
// one JSON document.
package nicsock

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Dir is where the sockets are.
const Dir = "/run/xspin/nic"

// ErrTaken says that another process answers under a name.
var ErrTaken = errors.New("another process answers there")

// ErrNone says that no xspin process answers.
var ErrNone = errors.New("no running NIC")

const suffix = ".sock"

// timeout of everything that waits for the other process.
const timeout = 5 * time.Second

// retry is the pause after a connection could not be accepted.
const retry = 100 * time.Millisecond

// A Server answers for one NIC until Close.
type Server struct {
	l    *net.UnixListener
	done chan struct{}
}

// Serve answers under a name, which is an interface's. report is called for
// each connection.
func Serve(name string, report func() (any, error)) (*Server, error) {
	path := filepath.Join(Dir, name+suffix)
	if strings.ContainsRune(name, '/') {
		return nil, fmt.Errorf("control socket %q: not a file name", path)
	}
	if err := os.MkdirAll(Dir, 0o755); err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	if c, err := net.DialTimeout("unix", path, timeout); err == nil {
		c.Close()
		return nil, fmt.Errorf("control socket %s: %w", path, ErrTaken)
	}
	os.Remove(path) // of a process that was killed
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, fmt.Errorf("control socket: %w", err)
	}
	s := &Server{l: l, done: make(chan struct{})}
	go s.run(report)
	return s, nil
}

func (s *Server) run(report func() (any, error)) {
	defer close(s.done)
	for {
		c, err := s.l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // no descriptor left, which passes
			time.Sleep(retry)
			continue
		}
		_ = c.SetDeadline(time.Now().Add(timeout))
		reply := struct {
			Report any    `json:"report,omitempty"`
			Error  string `json:"error,omitempty"`
		}{}
		if reply.Report, err = report(); err != nil {
			reply.Error = err.Error()
		}
		_ = json.NewEncoder(c).Encode(reply) // a peer that is gone has no use for it
		c.Close()
	}
}

// Close stops answering and removes the socket.
func (s *Server) Close() error {
	err := s.l.Close()
	<-s.done
	return err
}

// Names returns the names that somebody answers for.
func Names() ([]string, error) {
	paths, err := filepath.Glob(filepath.Join(Dir, "*"+suffix))
	if err != nil {
		return nil, err
	}
	var names []string
	for _, p := range paths {
		c, err := net.DialTimeout("unix", p, timeout)
		if errors.Is(err, os.ErrPermission) {
			return nil, fmt.Errorf("control socket %s: %w: run it as the user who runs the NIC", p, err)
		}
		if err != nil {
			continue // left by a process that was killed
		}
		c.Close()
		names = append(names, strings.TrimSuffix(filepath.Base(p), suffix))
	}
	return names, nil
}

// Ask decodes the answer for a name into report.
func Ask(name string, report any) error {
	path := filepath.Join(Dir, name+suffix)
	c, err := net.DialTimeout("unix", path, timeout)
	if err != nil {
		return fmt.Errorf("%w on %q: %w", ErrNone, name, err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(timeout))
	var reply struct {
		Report json.RawMessage
		Error  string
	}
	if err := json.NewDecoder(io.LimitReader(c, 64<<20)).Decode(&reply); err != nil {
		return fmt.Errorf("ask NIC on %q: %w", name, err)
	}
	if reply.Error != "" {
		return fmt.Errorf("NIC on %q: %s", name, reply.Error)
	}
	return json.Unmarshal(reply.Report, report)
}
