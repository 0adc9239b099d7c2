// SPDX-License-Identifier: Apache-2.0

package rtt

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/testbed"
)

// EchoOptions says where a UDP echo server listens and how it waits.
type EchoOptions struct {
	Addr netip.AddrPort `json:"addr"` // IPv4; port 0 takes a free one
	Wait Wait           `json:"wait"` // "" is Block
	CPU  int            `json:"cpu"`  // the only CPU it runs on, -1 for any
}

func (o EchoOptions) check() error {
	if !o.Addr.Addr().Is4() {
		return fmt.Errorf("%w: echo address %v: want IPv4", ErrOptions, o.Addr)
	}
	return checkServing(o.Wait, o.CPU)
}

// Echo is a UDP echo server in a process of its own, the usual way without a SmartNIC.
// It is safe for concurrent use.
type Echo struct {
	Addr  netip.AddrPort // where it listens, with the port it got
	child *Process
}

// StartEcho starts a server inside a namespace and returns when it listens. It
// ends with Close, or when the calling process ends for any reason.
func StartEcho(ns *netns.Namespace, o EchoOptions) (*Echo, error) {
	if o.Wait == "" {
		o.Wait = Block
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	c, err := Start(EchoCommand, o, ProcessOptions{NS: ns})
	if err != nil {
		return nil, fmt.Errorf("start UDP echo on %v: %w", o.Addr, err)
	}
	line, err := bufio.NewReader(c.Stdout).ReadString('\n')
	if err != nil {
		return nil, fmt.Errorf("start UDP echo on %v: %w", o.Addr, c.Stop(err))
	}
	addr, err := netip.ParseAddrPort(strings.TrimSpace(line))
	if err != nil {
		return nil, fmt.Errorf("start UDP echo on %v: %w", o.Addr, c.Stop(err))
	}
	return &Echo{Addr: addr, child: c}, nil
}

// Pid returns the server's process id.
func (e *Echo) Pid() int { return e.child.Pid() }

// Close ends the server and waits for its end. If the server failed before, Close
// returns the reason.
func (e *Echo) Close() error { return e.child.Stop(nil) }

// echo serves until an error; the process ends when its stdin does. It writes the
// address to w once the socket is bound, so that no packet sent there is lost.
//
// The loop is that of a C server: two system calls per datagram, on one buffer.
func echo(o EchoOptions, w io.Writer) error {
	if err := o.check(); err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.IPPROTO_UDP)
	if err != nil {
		return fmt.Errorf("open UDP socket: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: o.Addr.Addr().As4(), Port: int(o.Addr.Port())}); err != nil {
		return fmt.Errorf("bind UDP socket to %v: %w", o.Addr, err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return fmt.Errorf("name of UDP socket: %w", err)
	}
	unpin, err := testbed.Pin(o.CPU)
	if err != nil {
		return err
	}
	defer unpin()
	if _, err := fmt.Fprintln(w, netip.AddrPortFrom(o.Addr.Addr(), uint16(sa.(*unix.SockaddrInet4).Port))); err != nil {
		return err
	}

	var flags uintptr
	if o.Wait == Spin {
		flags = unix.MSG_DONTWAIT
	}
	var peer unix.RawSockaddrInet4
	buf := make([]byte, 1<<16)
	for {
		size := uint32(unix.SizeofSockaddrInet4)
		n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&buf[0])), uintptr(len(buf)), flags,
			uintptr(unsafe.Pointer(&peer)), uintptr(unsafe.Pointer(&size)))
		switch errno {
		case 0:
		case unix.EAGAIN, unix.EINTR:
			continue
		default:
			return fmt.Errorf("receive on %v: %w", o.Addr, errno)
		}
		// If the reply cannot be sent, the client counts a lost ping.
		unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&buf[0])), n, 0, uintptr(unsafe.Pointer(&peer)), uintptr(size))
	}
}

// runEcho is the process that StartEcho starts.
func runEcho(options []byte) error {
	var o EchoOptions
	if err := json.Unmarshal(options, &o); err != nil {
		return fmt.Errorf("%w: %w", ErrOptions, err)
	}
	// The loop keeps a P for ever, and the goroutine that waits for the end of
	// stdin needs one too.
	runtime.GOMAXPROCS(max(2, runtime.GOMAXPROCS(0)))
	debug.SetGCPercent(-1)
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	return echo(o, os.Stdout)
}
