// SPDX-License-Identifier: Apache-2.0

package xsk

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

var (
	// ErrConfig is wrapped by errors about sizes and addresses that no kernel
	// would take. The message carries the number and its limit.
	ErrConfig = errors.New("invalid configuration")
	// ErrMode is returned when the kernel bound in another mode than asked for.
	ErrMode = errors.New("bound in another mode")
	// ErrRingCorrupt says that the kernel's index of a ring was further from ours
	// than the ring is long. Nothing is read or written on the strength of such
	// an index, so the ring stands still while the index stays so.
	ErrRingCorrupt = errors.New("ring index out of range")
	// ErrClosed is returned by methods of a closed Socket, Queue or UMEM.
	ErrClosed = errors.New("closed")
	// ErrInUse is returned by UMEM.Close while sockets on it are open.
	ErrInUse = errors.New("in use")
)

// OpError is a system call that failed on a socket. Err is its errno.
type OpError struct {
	Op      string // the call: "socket", "bind", "sendto", ...
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
			hint = " (the queue belongs to another UMEM; close its sockets first)"
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

// checkRing says whether n can be the number of entries of a ring.
func checkRing(name string, n int) error {
	const most = 1 << 20
	if n <= 0 || n > most || n&(n-1) != 0 {
		return fmt.Errorf("xsk: %s is %d entries, not a power of two up to %d: %w", name, n, most, ErrConfig)
	}
	return nil
}
