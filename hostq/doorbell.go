// SPDX-License-Identifier: Apache-2.0

package hostq

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A doorbell is a pipe, and a word in shared memory. A side about to sleep sets the word,
// looks whether there is something to do, and sleeps; a side that has published looks
// at the word, and only if it is set writes a byte into the pipe. A full pipe is fine:
// then there is a byte that nobody has read.
//
// It is no eventfd, because an eventfd is one open file for all who have it: the other
// side could make it blocking, so that our write waits for ever, or read our wakeups.
// Of a pipe each end is an open file of its own. An end that the other side has
// as well (SCM_RIGHTS duplicates descriptors of the same open file) is used with care:
// its O_NONBLOCK is whatever the other side wants.

// newPipe makes a doorbell.
func newPipe() (r, w int, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_NONBLOCK|unix.O_CLOEXEC); err != nil {
		return -1, -1, fmt.Errorf("pipe2: %w", os.NewSyscallError("pipe2", err))
	}
	return fds[0], fds[1], nil
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

var one = [1]byte{1}

// strike writes to a pipe. RawSyscall: it is over in no time, so the scheduler need
// not know. The end must not block.
func strike(fd int) error {
	_, _, e := unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&one[0])), 1)
	if e != 0 && e != unix.EAGAIN {
		return e
	}
	return nil
}

// drain empties a pipe of which we have the only reading end, or whose other holders
// gain nothing from making it block. It gives up after a while, lest somebody who
// keeps writing keeps us; then it returns more than 0 as well.
func drain(fd int) (n int) {
	var buf [512]byte
	for range 256 {
		k, _, e := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&buf[0])), uintptr(len(buf)))
		if e == unix.EINTR {
			continue
		}
		if e != 0 || int(k) <= 0 {
			return n
		}
		if n += int(k); int(k) < len(buf) {
			return n
		}
	}
	return n
}

// isPipe tells whether a descriptor is an end of a pipe that can be read, or written.
func isPipe(fd int, mode int) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return os.NewSyscallError("fcntl", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFIFO || flags&unix.O_ACCMODE != mode {
		return errors.New("not the right end of a pipe")
	}
	return nil
}
