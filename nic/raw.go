// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"fmt"
	"net"
	"sync"

	"golang.org/x/sys/unix"
)

// A rawSocket sends frames that answer no frame at hand: seldom, so each costs a system call. It receives nothing.
type rawSocket struct {
	to unix.SockaddrLinklayer

	mu sync.Mutex // guards fd, which somebody may still use when it is closed
	fd int        // -1: closed
}

// openRaw opens one on an interface. The calling thread must be in the interface's network namespace.
func openRaw(iface *net.Interface) (*rawSocket, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open a packet socket on %s: %w", iface.Name, err)
	}
	return &rawSocket{fd: fd, to: unix.SockaddrLinklayer{Ifindex: iface.Index}}, nil
}

// send sends a frame, or fails at once.
func (s *rawSocket) send(frame []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return unix.Sendto(s.fd, frame, unix.MSG_DONTWAIT, &s.to)
}

func (s *rawSocket) close() error {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	fd := s.fd
	s.fd = -1
	return unix.Close(fd)
}
