// SPDX-License-Identifier: Apache-2.0

package hostq

import (
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A doorbell is a descriptor, and a word in shared memory. A side about to sleep sets the
// word, looks whether there is something to do, and sleeps; a side that has published looks
// at the word, and only if it is set rings.
//
// Two processes that do not trust one another have the descriptors, so what counts is what
// the kernel does on our side while the other one is in the middle of a call. The ends of a
// pipe share a mutex that the kernel holds while it copies from or to user memory: whoever
// reads or writes one with a buffer on a page that never comes (userfaultfd, FUSE) has the
// other side wait for ever, in a state that no signal ends. There are two kinds of doorbells,
// which share no lock of that sort:
//
//   - The application's is a pair of sockets, one for each side. The NIC sends a byte, and
//     says with each call that it does not wait. Full is fine: then there is a byte that
//     nobody has read. Its own socket is shut down for reading: nothing can be sent there.
//   - A lane's is an eventfd, which the application adds to. It is one open file for both
//     sides: the application can have it block, or take what it added itself. The NIC neither
//     reads nor writes it, but has it in an epoll, edge-triggered, where each addition is an
//     edge. An eventfd of the NIC's own is in the same epoll, by which it rings itself.

// newSockets makes the doorbell of an application: the end that it reads, and the one that
// rings it.
func newSockets() (application, nic int, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, -1, os.NewSyscallError("socketpair", err)
	}
	if err := unix.Shutdown(fds[1], unix.SHUT_RD); err != nil {
		unix.Close(fds[0])
		unix.Close(fds[1])
		return -1, -1, os.NewSyscallError("shutdown", err)
	}
	return fds[0], fds[1], nil
}

// newEvent makes an eventfd.
func newEvent() (int, error) {
	fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	return fd, os.NewSyscallError("eventfd", err)
}

// newEpoll makes what has an edge for each ring of several eventfds.
func newEpoll(events ...int) (int, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return -1, os.NewSyscallError("epoll_create1", err)
	}
	for _, fd := range events {
		if err := unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET&0xffffffff}); err != nil {
			unix.Close(ep)
			return -1, os.NewSyscallError("epoll_ctl", err)
		}
	}
	return ep, nil
}

// That no wakeup is lost hangs on two pairs of a store and a load, of which neither may
// change places: arm, and the look after it; and what publishes, and needed. The words
// are of atomic types, so that there is no plain way to store them. And it is Swap that
// stores them: Store does as well, with the same instruction on x86, but under the race
// detector it is a release store, which may change places with a load.

// arm says that the caller sleeps, unless it finds something to do now.
func arm(word *atomic.Uint32) { word.Swap(1) }

// armFor is arm for a caller that sleeps until a counter is at v, which is not 0.
func armFor(word *atomic.Uint64, v uint64) { word.Swap(v) }

// needed tells whether the other side sleeps, so that the caller, who has just published
// something, must wake it. Of several callers only one is told so.
func needed(word *atomic.Uint32) bool {
	return word.Load() != 0 && word.Swap(0) != 0
}

var one = uint64(1)

// strike rings the application. RawSyscall: it is over in no time, so the scheduler need
// not know.
func strike(socket int) {
	_, _, _ = unix.RawSyscall6(unix.SYS_SENDTO, uintptr(socket), uintptr(unsafe.Pointer(&one)), 1, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
}

// add rings a lane. The eventfd does not block, or is the caller's to have block.
func add(event int) {
	_, _, _ = unix.RawSyscall(unix.SYS_WRITE, uintptr(event), uintptr(unsafe.Pointer(&one)), 8)
}

// drain empties the application's doorbell. It gives up after a while, lest a NIC that keeps
// ringing keeps us.
func drain(socket int) {
	var buf [512]byte
	for range 256 {
		k, _, e := unix.RawSyscall(unix.SYS_READ, uintptr(socket), uintptr(unsafe.Pointer(&buf[0])), uintptr(len(buf)))
		if e == unix.EINTR {
			continue
		}
		if e != 0 || int(k) < len(buf) {
			return
		}
	}
}

// isSocket tells whether a descriptor is a socket, as an application's doorbell is.
func isSocket(fd int) error {
	if _, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE); err != nil {
		return fmt.Errorf("not a socket: %w", err)
	}
	return nil
}

// isEvent tells whether a descriptor is an eventfd, as a lane's doorbell is.
func isEvent(fd int) error {
	name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err == nil && name != "anon_inode:[eventfd]" {
		return fmt.Errorf("not an eventfd, but %s", name)
	}
	return nil
}
