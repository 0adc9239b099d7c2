// SPDX-License-Identifier: Apache-2.0

package slmp

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// source is where the bytes of one message come from; one of the three is set.
// The loop reads it, as often as segments are sent again.
type source struct {
	bytes []byte
	at    io.ReaderAt
	base  int64 // of the message in at
	fd    int   // of at, if that is a file; or -1
	spool *spool
}

// newSource chooses how to read r, and tells how long the message is; false if
// only the end will tell.
func newSource(r io.Reader, buffer int) (s source, size uint64, known bool, err error) {
	if at, ok := r.(io.ReaderAt); ok {
		base, n, err := extent(r)
		if err != nil {
			return s, 0, false, err
		}
		if n > 0 {
			return source{at: at, base: base, fd: -1}, uint64(n), true, nil
		}
	}
	return source{spool: &spool{buf: make([]byte, buffer), room: make(chan struct{}, 1)}}, 0, false, nil
}

// extent tells where r stands and how much comes after that, without moving it:
// others may be reading the same file. 0 when it cannot tell: pipes, and files
// of the kernel that do not know their length.
func extent(r io.Reader) (base, n int64, err error) {
	var size int64
	switch f := r.(type) {
	case interface{ Stat() (fs.FileInfo, error) }:
		info, err := f.Stat()
		if err != nil {
			return 0, 0, err // names the file and the errno
		}
		if !info.Mode().IsRegular() {
			return 0, 0, nil
		}
		size = info.Size()
	case interface{ Size() int64 }:
		size = f.Size()
	default:
		return 0, 0, nil
	}
	seeker, ok := r.(io.Seeker)
	if !ok {
		return 0, 0, nil
	}
	base, err = seeker.Seek(0, io.SeekCurrent)
	if err != nil {
		return 0, 0, nil
	}
	return base, max(size-base, 0), nil
}

// open takes a descriptor of its own of r, if that is a file: its bytes go straight to where segments are
// staged then. To map the file costs more than that copy, by page faults and by what ends the mapping.
func (s *source) open(r io.Reader) {
	f, ok := r.(*os.File)
	if !ok {
		return
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		if d, err := unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0); err == nil { // else it is read by way of f
			s.fd = d
		}
	})
}

func (s *source) close() {
	if s.isFile() {
		unix.Close(s.fd)
		s.fd = -1
	}
}

// isFile tells whether there is a descriptor, for scatter.
func (s *source) isFile() bool { return s.at != nil && s.fd >= 0 }

// scatter reads the message's bytes from off on, n of them, to iovs, which it changes.
func (s *source) scatter(iovs []unix.Iovec, off uint64, n int) error {
	for at := s.base + int64(off); n > 0; {
		got, _, errno := unix.Syscall6(unix.SYS_PREADV, uintptr(s.fd), uintptr(unsafe.Pointer(&iovs[0])), uintptr(len(iovs)), uintptr(at), 0, 0)
		switch {
		case errno == unix.EINTR:
			continue
		case errno != 0:
			return fmt.Errorf("read %d bytes at %d: %w", n, at, errno)
		case got == 0:
			return fmt.Errorf("read %d bytes at %d, got none: %w", n, at, io.ErrUnexpectedEOF)
		}
		at, n = at+int64(got), n-int(got)
		for ; len(iovs) > 0 && uint64(got) >= iovs[0].Len; iovs = iovs[1:] {
			got -= uintptr(iovs[0].Len)
		}
		if len(iovs) > 0 {
			iovs[0].Base = (*byte)(unsafe.Add(unsafe.Pointer(iovs[0].Base), got))
			iovs[0].SetLen(int(uint64(iovs[0].Len) - uint64(got)))
		}
	}
	return nil
}

// inPlace returns the message's bytes where the kernel can fetch them, nil if they
// have to be read.
func (s *source) inPlace(off uint64, n int) []byte {
	if n < copyBelow || s.bytes == nil {
		return nil
	}
	return s.bytes[off : off+uint64(n)]
}

const copyBelow = 256 // bytes that are cheaper to copy than to describe

// read fills p with the message's bytes from off on.
func (s *source) read(p []byte, off uint64) error {
	switch {
	case s.at != nil:
		n, err := s.at.ReadAt(p, s.base+int64(off))
		if n == len(p) {
			return nil
		}
		if err == nil || err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return fmt.Errorf("read %d bytes at %d, got %d: %w", len(p), s.base+int64(off), n, err)
	case s.spool != nil:
		s.spool.copy(p, off)
	default:
		copy(p, s.bytes[off:])
	}
	return nil
}

// spool holds the part of a message that is read but not acknowledged, in a
// circle. Its reader, a goroutine, owns the bytes from filled on, the loop those
// before; freed comes back to the reader.
type spool struct {
	buf     []byte
	filled  atomic.Uint64 // bytes of the message read, by the reader
	freed   atomic.Uint64 // bytes of the message acknowledged, by the loop
	ended   atomic.Bool   // filled is the whole message, or err is set
	err     error         // why it is not, set before ended
	waiting atomic.Bool   // the reader sleeps on room
	room    chan struct{}
}

// fill reads r until it ends or gone is closed, and calls notify whenever there is more.
func (s *spool) fill(r io.Reader, gone <-chan struct{}, notify func()) {
	size := uint64(len(s.buf))
	var filled uint64
	empty := 0
	for {
		used := filled - s.freed.Load()
		if used == size {
			s.waiting.Store(true)
			if s.freed.Load() == filled-used {
				select {
				case <-s.room:
				case <-gone:
					return
				}
			}
			s.waiting.Store(false)
			continue
		}
		at := filled % size
		n, err := r.Read(s.buf[at:min(at+size-used, size)])
		select {
		case <-gone:
			return
		default:
		}
		filled += uint64(n)
		if filled > MaxMessage {
			s.err = fmt.Errorf("%w: more than %d bytes", ErrTooLong, uint64(MaxMessage))
			s.ended.Store(true)
			notify()
			return
		}
		s.filled.Store(filled)
		if n > 0 {
			empty = 0
		} else if empty++; empty == 100 && err == nil {
			err = io.ErrNoProgress
		}
		if err != nil {
			if err != io.EOF {
				s.err = err
			}
			s.ended.Store(true)
			notify()
			return
		}
		notify()
	}
}

// free lets the reader overwrite what comes before n. A reader that waits is
// woken when it can read a good piece.
func (s *spool) free(n uint64) {
	s.freed.Store(n)
	if s.waiting.Load() && n+uint64(len(s.buf))-s.filled.Load() >= uint64(len(s.buf))/4 {
		select {
		case s.room <- struct{}{}:
		default:
		}
	}
}

// copy reads bytes between freed and filled.
func (s *spool) copy(p []byte, off uint64) {
	at := off % uint64(len(s.buf))
	n := copy(p, s.buf[at:])
	copy(p[n:], s.buf)
}
