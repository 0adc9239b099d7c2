// SPDX-License-Identifier: Apache-2.0

// Package yardstick has what XsPIN is measured with inside the kernel: XDP programs to
// compare it with, and a generator of packets.
package yardstick

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/matcher"
	"golang.org/x/sys/unix"
)

// A Plain is one of the programs that XsPIN is compared with.
type Plain string

// Plain programs.
const (
	Pass Plain = bpf.BenchProgXspinPass // every frame to the stack
	Drop Plain = bpf.BenchProgXspinDrop // every frame away
	Bare Plain = bpf.BenchProgXspinBare // every frame to the AF_XDP socket of its queue
)

// A Program is one to measure with: a plain one, or the matching engine
// alone. Not safe for concurrent use.
type Program struct {
	prog    *ebpf.Program
	sockets *ebpf.Map // of Bare
	link    link.Link
	owner   io.Closer
}

// LoadPlain loads a plain program, attached to nothing.
func LoadPlain(p Plain) (*Program, error) {
	coll, err := loader.LoadBench(string(p), nil)
	if err != nil {
		return nil, err
	}
	return &Program{prog: coll.Programs[string(p)], sockets: coll.Maps[bpf.BenchMapBareSockets], owner: closer(coll.Close)}, nil
}

// LoadEcho loads a program that sends datagrams to a port back.
func LoadEcho(port uint16) (*Program, error) {
	coll, err := loader.LoadBench(bpf.BenchProgXspinEcho, map[string]any{bpf.BenchVarTarget: uint32(port)})
	if err != nil {
		return nil, err
	}
	return &Program{prog: coll.Programs[bpf.BenchProgXspinEcho], owner: closer(coll.Close)}, nil
}

// LoadMatch loads the matching engine with a table, see [loader.LoadMatch].
func LoadMatch(t *matcher.Table) (*Program, error) {
	in, err := loader.LoadMatch(t)
	if err != nil {
		return nil, err
	}
	return &Program{prog: in.Program(), owner: in}, nil
}

type closer func()

func (c closer) Close() error { c(); return nil }

// Attach attaches the program to an interface in native mode. The link dies
// with the process.
func (y *Program) Attach(iface *net.Interface) (err error) {
	y.link, err = link.AttachXDP(link.XDPOptions{Program: y.prog, Interface: iface.Index, Flags: link.XDPDriverMode})
	if err != nil {
		return fmt.Errorf("attach %v to %s: %w", y.prog, iface.Name, err)
	}
	return nil
}

// SetSocket has frames that arrive on a queue go to an AF_XDP socket. For Bare.
func (y *Program) SetSocket(queue, fd int) error {
	if err := y.sockets.Put(uint32(queue), uint32(fd)); err != nil {
		return fmt.Errorf("socket %d for queue %d: %w", fd, queue, err)
	}
	return nil
}

// Sockets returns a descriptor of the map of sockets, by queue, for another
// process. The caller closes it. For Bare.
func (y *Program) Sockets() (*os.File, error) {
	fd, err := unix.FcntlInt(uintptr(y.sockets.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate the map of sockets: %w", err)
	}
	return os.NewFile(uintptr(fd), "sockets"), nil
}

// Time runs the program over a frame again and again on the calling CPU, with
// nothing around it, and returns its verdict and what a run took on average,
// in whole nanoseconds as the kernel tells it.
func (y *Program) Time(frame []byte, repeat int) (verdict uint32, each time.Duration, err error) {
	verdict, each, err = y.prog.Benchmark(frame, repeat, nil)
	if err != nil {
		return 0, 0, fmt.Errorf("run %v %d times: %w", y.prog, repeat, err)
	}
	return verdict, each, nil
}

// Close detaches the program and frees it.
func (y *Program) Close() error {
	var err error
	if y.link != nil {
		err = y.link.Close()
	}
	return errors.Join(err, y.owner.Close())
}
