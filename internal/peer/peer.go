// SPDX-License-Identifier: Apache-2.0

// Package peer tells who is at the other end of a Unix socket.
package peer

import (
	"fmt"
	"net"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Cred is who a process was when it connected, or began to listen.
type Cred struct {
	PID, UID, GID int
	Groups        []int // supplementary
}

// Of asks the kernel. What a process does to its credentials later has no effect.
func Of(c *net.UnixConn) (p Cred, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return p, fmt.Errorf("peer credentials: %w", err)
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		var u *unix.Ucred
		if u, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); failed != nil {
			failed = fmt.Errorf("SO_PEERCRED: %w", failed)
			return
		}
		p.PID, p.UID, p.GID = int(u.Pid), int(u.Uid), int(u.Gid)
		if p.Groups, failed = groups(fd); failed != nil {
			failed = fmt.Errorf("SO_PEERGROUPS: %w", failed)
		}
	})
	if err == nil {
		err = failed
	}
	if err != nil {
		return Cred{}, fmt.Errorf("peer credentials: %w", err)
	}
	return p, nil
}

// groups reads SO_PEERGROUPS, for which x/sys has no function. The kernel says how
// many there are when the buffer is too small.
func groups(fd uintptr) ([]int, error) {
	buf := make([]uint32, 32)
	for {
		size := uint32(len(buf) * 4)
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_PEERGROUPS,
			uintptr(unsafe.Pointer(&buf[0])), uintptr(unsafe.Pointer(&size)), 0)
		if errno == unix.ERANGE && int(size/4) > len(buf) {
			buf = make([]uint32, size/4)
			continue
		}
		if errno != 0 {
			return nil, errno
		}
		var all []int
		for _, g := range buf[:size/4] {
			all = append(all, int(g))
		}
		return all, nil
	}
}
