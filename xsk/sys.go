// SPDX-License-Identifier: Apache-2.0

package xsk

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A Desc is laid over the kernel's struct xdp_desc.
var _ [unsafe.Sizeof(unix.XDPDesc{})]struct{} = [unsafe.Sizeof(Desc{})]struct{}{}

func setsockopt[T any](fd, opt int, val *T) error {
	_, _, errno := unix.Syscall6(unix.SYS_SETSOCKOPT, uintptr(fd), unix.SOL_XDP, uintptr(opt),
		uintptr(unsafe.Pointer(val)), unsafe.Sizeof(*val), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// getsockopt fails if the kernel's structure is shorter than ours.
func getsockopt[T any](fd, opt int, val *T) error {
	n := uint32(unsafe.Sizeof(*val))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_XDP, uintptr(opt),
		uintptr(unsafe.Pointer(val)), uintptr(unsafe.Pointer(&n)), 0)
	if errno != 0 {
		return errno
	}
	if want := uint32(unsafe.Sizeof(*val)); n != want {
		return fmt.Errorf("kernel returned %d bytes, want %d: Linux 5.10 or newer is needed: %w", n, want, unix.ENOPROTOOPT)
	}
	return nil
}

// kickTx makes the kernel look at the transmit ring of fd. unix.Sendto would do the
// same, but allocate.
func kickTx(fd int) unix.Errno {
	_, _, errno := unix.Syscall6(unix.SYS_SENDTO, uintptr(fd), 0, 0, unix.MSG_DONTWAIT, 0, 0)
	return errno
}

// kickFill makes the kernel look at the fill ring of the queue of fd, which must
// have a receive ring.
func kickFill(fd int) unix.Errno {
	_, _, errno := unix.Syscall6(unix.SYS_RECVFROM, uintptr(fd), 0, 0, unix.MSG_DONTWAIT, 0, 0)
	return errno
}

// mapRing maps the ring of n entries that fd has at the page offset pgoff.
func (r *ring[T]) mapRing(fd int, pgoff int64, off *unix.XDPRingOffset, n int) error {
	var t T
	length := off.Desc + uint64(n)*uint64(unsafe.Sizeof(t))
	mem, err := unix.Mmap(fd, pgoff, int(length), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		return fmt.Errorf("%d bytes at offset %#x: %w", length, pgoff, err)
	}
	r.lay(mem, off, n)
	return nil
}

// lay makes r our end of the ring of n entries in mem. Both indices of an empty
// ring are equal, so either will do as ours.
func (r *ring[T]) lay(mem []byte, off *unix.XDPRingOffset, n int) {
	r.producer = (*uint32)(unsafe.Pointer(&mem[off.Producer]))
	r.consumer = (*uint32)(unsafe.Pointer(&mem[off.Consumer]))
	r.flags = (*uint32)(unsafe.Pointer(&mem[off.Flags]))
	r.entries = unsafe.Slice((*T)(unsafe.Pointer(&mem[off.Desc])), n)
	r.size = uint32(n)
	r.own = atomic.LoadUint32(r.consumer)
	r.peer = r.own
	r.mem = mem
}

// address returns the address of mem, which must not be on the Go heap or stack.
func address(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) }
