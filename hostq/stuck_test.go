// SPDX-License-Identifier: Apache-2.0

package hostq

import (
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/netns/netnstest"
)

// From linux/userfaultfd.h.
const (
	uffdAPI       = 0xaa
	ioctlAPI      = 0xc018aa3f // _IOWR(UFFDIO, 0x3f, struct uffdio_api)
	ioctlRegister = 0xc020aa00 // _IOWR(UFFDIO, 0, struct uffdio_register)
	modeMissing   = 1
)

// stuck makes a system call with a buffer on a page that does not come, and returns when the
// call waits for it. The page comes with the end of the test, or when it is released.
func stuck(t *testing.T, call func(buf []byte) error) (release func()) {
	t.Helper()
	r, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0)
	if errno != 0 {
		t.Fatal(fmt.Errorf("userfaultfd: %w", errno))
	}
	uffd := int(r)
	page, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	api := struct{ api, features, ioctls uint64 }{api: uffdAPI}
	register := struct{ start, length, mode, ioctls uint64 }{start: uint64(uintptr(unsafe.Pointer(&page[0]))), length: 4096, mode: modeMissing}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, r, ioctlAPI, uintptr(unsafe.Pointer(&api))); errno != 0 {
		t.Fatal(fmt.Errorf("UFFDIO_API: %w", errno))
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, r, ioctlRegister, uintptr(unsafe.Pointer(&register))); errno != 0 {
		t.Fatal(fmt.Errorf("UFFDIO_REGISTER: %w", errno))
	}
	returned := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		returned <- call(page)
	}()
	fds := []unix.PollFd{{Fd: int32(uffd), Events: unix.POLLIN}}
	for deadline := time.Now().Add(testenv.Slowness() * 10 * time.Second); ; {
		n, err := unix.Poll(fds, 100)
		if n == 1 {
			break
		}
		select {
		case err := <-returned:
			t.Fatalf("the call did not wait for the page: %v", err)
		default:
		}
		if time.Now().After(deadline) {
			t.Fatalf("no page is missed: %v", err)
		}
	}
	released := false
	release = func() {
		if released {
			return
		}
		released = true
		unix.Close(uffd)
		<-returned
		_ = unix.Munmap(page)
	}
	t.Cleanup(release)
	return release
}

// An application that is in the middle of a call on what it shares with the NIC has nothing of the
// NIC's wait: neither traffic, nor the end of the pair.
func TestApplicationStuckInACall(t *testing.T) {
	netnstest.NeedRoot(t)
	read := func(fd int) func([]byte) error {
		return func(b []byte) error { _, err := unix.Read(fd, b[:8]); return err }
	}
	write := func(fd int) func([]byte) error {
		return func(b []byte) error { _, err := unix.Write(fd, b[:8]); return err }
	}
	for _, tc := range []struct {
		name string
		call func(doorbell, lane int) func([]byte) error
	}{
		{"reads its doorbell", func(doorbell, _ int) func([]byte) error { return read(doorbell) }},
		{"peeks at its doorbell", func(doorbell, _ int) func([]byte) error {
			return func(b []byte) error { _, _, err := unix.Recvfrom(doorbell, b[:8], unix.MSG_PEEK); return err }
		}},
		{"writes to the lane's doorbell", func(_, lane int) func([]byte) error { return write(lane) }},
		{"reads the lane's doorbell", func(_, lane int) func([]byte) error { return read(lane) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newTestPair(t, PairConfig{Layout: Layout{Lanes: 2, Events: 16, Requests: 16, Payload: 64}})
			fds := dup(t, p.fds()...)
			h, err := OpenHost(p.Layout(), fds[0], fds[1], fds[2:])
			if err != nil {
				t.Fatal(err)
			}
			_, doorbell, lanes := p.Descriptors()
			edge := edges(t, p.Doorbell(0))
			add(lanes[0]) // there is something to read
			h.Arm()
			if !p.Event(&Event{Kind: MessageEnded}) {
				t.Fatal("no room")
			}
			release := stuck(t, tc.call(doorbell, lanes[0]))
			done := make(chan error, 1)
			go func() {
				edge()
				for range 100 {
					h.waiting.Store(1) // each rings
					p.Event(&Event{Kind: MessageEnded})
					h.waiting.Store(1)
					_, _ = p.Request(0, &Request{Reply: true}, nil)
					p.Arm(0)
					p.Disarm(0)
					p.Poll(0, 9, func(*Response) {})
				}
				p.Detach()
				var none error
				if !edge() {
					none = errors.New("the end is no edge")
				}
				done <- errors.Join(none, p.Close())
			}()
			select {
			case err := <-done:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(testenv.Slowness() * 10 * time.Second):
				t.Error("the NIC waits for the application")
				release()
				<-done
			}
			release()
			if err := h.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}
