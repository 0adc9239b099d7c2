// SPDX-License-Identifier: Apache-2.0

package file

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// Spec is an execution context that receives files into the store.
func (s *Store) Spec() nic.ContextSpec {
	return nic.ContextSpec{
		Name:     "file",
		Rulesets: []matcher.Ruleset{matcher.SLMP()},
		Binder:   s, // gives each message a file of its own
		Handlers: hpu.Handlers{Payload: deposit, Completion: publish},
		Timeout:  s.cfg.Timeout,
	}
}

// deposit puts a packet's payload where it belongs in the file. The segment is
// acknowledged when it has returned. (The engine would do the same after a header
// handler that returns Proceed; this one remembers what went wrong.)
func deposit(h *hpu.HER) spin.Code {
	err := h.Deposit()
	if err == nil {
		return spin.Success
	}
	in := h.Message().Binding().User.(*incoming)
	if errors.Is(err, spin.ErrBounds) {
		in.fail(fmt.Errorf("longer than %d bytes, which is the limit: %w", in.Size(), err))
		return spin.Segv
	}
	in.fail(err)
	return spin.Fail
}

// publish makes a file of a complete message. The message is acknowledged when it
// has returned.
func publish(c *hpu.Completion) spin.Code {
	if c.Cause != spin.Complete {
		return spin.Success // Unbind reports what is missing
	}
	in := c.Message().Binding().User.(*incoming)
	if err := in.publish(c.Length); err != nil {
		in.fail(err)
		return spin.Fail
	}
	return spin.Success
}

// ServerConfig says how to receive.
type ServerConfig struct {
	Store StoreConfig
	HPUs  int
	Wait  string // of the HPUs: adaptive, sleep or spin
	CPUs  []int  // for the threads that serve the HPUs, empty for any
	Stats bool   // serve `xspin stats`

	Into   Into // for Serve
	Places int  // for a window: messages at a time, at least one
}

// Into is where handlers put messages.
type Into string

// Receivers.
const (
	IntoFile   Into = "file"   // a file for each
	IntoWindow Into = "window" // the window of an unprivileged application in another process, which writes the files
	IntoXDP    Into = "xdp"    // the same, by handlers in eBPF at xdp
	IntoTC     Into = "tc"     // the same, at tc
)

// Intos are all receivers.
var Intos = []Into{IntoFile, IntoWindow, IntoXDP, IntoTC}

// limit is how long a handler may take. Handlers make system calls on files, so a disk
// that stalls also stalls a handler. Beyond the limit, whose default is a second, the
// context is stopped for good, and all messages with it.
const limit = 30 * time.Second

// A Server is a NIC that receives files.
type Server struct {
	nic   *nic.NIC
	ctx   *nic.Context
	store *Store
}

// Start opens a NIC on the lab's NIC end and arms the context.
func Start(lab *netns.Lab, c ServerConfig) (_ *Server, err error) {
	wait, err := hpu.ParseWait(c.Wait)
	if err != nil {
		return nil, err
	}
	s := &Server{}
	if s.store, err = OpenStore(c.Store); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	if err := lab.NIC.NS.Do(func() (err error) {
		s.nic, err = nic.Open(nic.Config{Interface: lab.NIC.Device, Hook: nic.HookXDP, HPUs: c.HPUs, Wait: wait, CPUs: c.CPUs, Limit: limit})
		return err
	}); err != nil {
		return nil, err
	}
	if s.ctx, err = s.nic.Install(s.store.Spec()); err != nil {
		return nil, err
	}
	if err := s.nic.Activate(s.ctx); err != nil {
		return nil, err
	}
	if c.Stats {
		return s, s.nic.ServeStats()
	}
	return s, nil
}

func (s *Server) unverified() (uint64, error) { return s.ctx.Stats().Unverified, nil }

func (s *Server) places() int { return s.store.most }

// Close ends messages that are in flight, reports all that have ended, and leaves
// the interface as it was.
func (s *Server) Close() (err error) {
	if s.nic != nil {
		err = s.nic.Close()
	}
	return errors.Join(err, s.store.Close())
}

// A server receives files.
type server interface {
	unverified() (uint64, error) // segments whose checksum a local sender left to the device
	places() int                 // messages at a time; senders of more are not answered
	Close() error
}

func start(ctx context.Context, lab *netns.Lab, c ServerConfig) (server, error) {
	if c.Into != IntoFile && c.Into != "" {
		return startWindow(ctx, lab, c)
	}
	return Start(lab, c)
}

// Serve receives files until ctx ends. It calls ready when it is ready, with the number of
// messages that it can receive at a time, and the socket of the daemon that has the counters; ""
// if `xspin stats` asks this process.
func Serve(ctx context.Context, lab *netns.Lab, c ServerConfig, ready func(places int, socket string)) error {
	c.Stats = true
	s, err := start(ctx, lab, c)
	if err != nil {
		return err
	}
	socket := ""
	if w, ok := s.(*windowServer); ok {
		socket = w.Socket
	}
	ready(s.places(), socket)
	<-ctx.Done()
	return s.Close()
}
