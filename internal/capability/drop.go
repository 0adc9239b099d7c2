// SPDX-License-Identifier: Apache-2.0

package capability

import (
	"errors"
	"fmt"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrThreads says that this binary cannot change all of its threads at once: it was
// built with cgo, whose threads the Go runtime does not know.
var ErrThreads = errors.New("capabilities of all threads cannot be changed in a binary built with cgo: build it with CGO_ENABLED=0")

// Drop gives up all capabilities but keep, in all threads and for good: whatever the
// process starts gets none of the others either. What it has not got already it does
// not get. With uid >= 0 it becomes that user, and group gid, at the same time:
// without, a process of root's still owns root's files.
func Drop(uid, gid int, keep ...Cap) error {
	var kept uint64
	for _, c := range keep {
		kept |= 1 << c
	}
	if err := each("prctl(PR_SET_NO_NEW_PRIVS)", unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1); err != nil {
		return err
	}
	// The bounding set first: it takes CAP_SETPCAP, which then goes.
	for c := uintptr(0); c < 64; c++ {
		in, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, c, 0, 0, 0)
		if err != nil {
			break // the kernel has no more
		}
		if in == 0 || kept>>c&1 == 1 {
			continue
		}
		if err := each("prctl(PR_CAPBSET_DROP)", unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c); err != nil {
			if errors.Is(err, unix.EPERM) {
				break // nor can any program get them: no_new_privs
			}
			return err
		}
	}
	if uid >= 0 {
		if err := each("prctl(PR_SET_KEEPCAPS)", unix.SYS_PRCTL, unix.PR_SET_KEEPCAPS, 1); err != nil {
			return err
		}
		if err := errors.Join(syscall.Setgroups([]int{gid}), syscall.Setresgid(gid, gid, gid), syscall.Setresuid(uid, uid, uid)); err != nil {
			return fmt.Errorf("become user %d, group %d: %w", uid, gid, err)
		}
	}
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return fmt.Errorf("capget: %w", err)
	}
	for i := range data {
		data[i].Permitted &= uint32(kept >> (32 * i))
		data[i].Effective, data[i].Inheritable = data[i].Permitted, 0
	}
	// Ambient capabilities go with the inheritable ones.
	err := each("capset", unix.SYS_CAPSET, uintptr(unsafe.Pointer(&hdr)), uintptr(unsafe.Pointer(&data[0])))
	runtime.KeepAlive(&data)
	runtime.KeepAlive(&hdr)
	return err
}

// each makes a system call in all threads.
func each(what string, trap, a, b uintptr) error {
	_, _, errno := syscall.AllThreadsSyscall6(trap, a, b, 0, 0, 0, 0)
	switch {
	case errno == syscall.ENOTSUP:
		return ErrThreads
	case errno != 0:
		return fmt.Errorf("%s: %w", what, errno)
	}
	return nil
}
