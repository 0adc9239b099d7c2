// SPDX-License-Identifier: Apache-2.0

package xsk

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

var (
	// ErrConfig is wrapped by errors about sizes and addresses that no kernel
	// would accept. The message has the number and its limit.
	ErrConfig = errors.New("invalid configuration")
	// ErrMode is wrapped by the error when the kernel granted another mode than
	// the one requested.
	ErrMode = errors.New("bound in another mode")
	// ErrRingCorrupt says that the kernel's index of a ring was further from ours
	// than the ring is long. Such an index is not used, so the ring stands still
	// until the kernel writes a valid one.
	ErrRingCorrupt = errors.New("ring index out of range")
	// ErrClosed is returned by methods of a closed Socket, Queue or UMEM.
	ErrClosed = errors.New("closed")
	// ErrInUse is returned by UMEM.Close while sockets on it are open.
	ErrInUse = errors.New("in use")
)

// OpError is an operation that failed on a socket. Err is the errno, if it was a
// system call.
type OpError struct {
	Op      string // "socket", "bind", "sendto", ...
	Ifindex int    // interface index of the queue
	Queue   int    // queue index on that interface
	Err     error
}

func (e *OpError) Error() string {
	hint := ""
	if e.Op == "bind" {
		switch {
		case errors.Is(e.Err, unix.EINVAL):
			hint = " (does the device have that queue? see ethtool -l)"
		case errors.Is(e.Err, unix.ENODEV):
			hint = " (no such interface in this network namespace)"
		case errors.Is(e.Err, unix.EBUSY):
			hint = " (the queue belongs to another UMEM: another XsPIN runs here, or another AF_XDP program: end it first)"
		case errors.Is(e.Err, unix.EOPNOTSUPP):
			hint = " (the driver has no zero-copy; ask for Copy or Auto)"
		}
	}
	switch {
	case errors.Is(e.Err, unix.EPERM):
		hint = " (CAP_NET_RAW, and CAP_IPC_LOCK or a larger RLIMIT_MEMLOCK, are needed)"
	case errors.Is(e.Err, unix.ENETDOWN):
		hint = " (set the interface up)"
	}
	return fmt.Sprintf("xsk: %s on ifindex %d queue %d: %v%s", e.Op, e.Ifindex, e.Queue, e.Err, hint)
}

func (e *OpError) Unwrap() error { return e.Err }

// checkRing returns an error unless a ring can have n entries.
func checkRing(name string, n int) error {
	const most = 1 << 20
	if n <= 0 || n > most || n&(n-1) != 0 {
		return fmt.Errorf("xsk: %s of %d entries: want a power of two, at most %d: %w", name, n, most, ErrConfig)
	}
	return nil
}
