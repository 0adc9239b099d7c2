// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/control"
)

// A tenant is a process to which descriptors of memory were passed. It may keep them, and
// mappings, when it has detached, so the memory counts until the process has ended. What
// it passes on to other processes, its children too, is not known here.
type tenant struct {
	pid     int // in messages only, 0 for one that cannot be seen
	fd      int // pidfd
	charges []*charge
}

// tenants waits for processes to end, in a goroutine from the first one on.
type tenants struct {
	mu     sync.Mutex
	list   []*tenant
	wake   int // eventfd, if watching
	closed bool
	done   chan struct{} // nil: not watching yet
}

// pidfd returns a descriptor of the process at the other end, or ESRCH if it has ended.
func pidfd(c *net.UnixConn, pid int) (fd int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return -1, err
	}
	if ctl := raw.Control(func(s uintptr) { fd, err = unix.GetsockoptInt(int(s), unix.SOL_SOCKET, unix.SO_PEERPIDFD) }); ctl != nil {
		return -1, ctl
	}
	if errors.Is(err, unix.ENOPROTOOPT) { // before Linux 6.5
		fd, err = unix.PidfdOpen(pid, 0)
	}
	return fd, err
}

// ended tells whether the process of a pidfd has ended.
func ended(fd int) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(p, 0)
		if !errors.Is(err, unix.EINTR) {
			return n != 0
		}
	}
}

// add counts memory for the process at the other end of a connection, until it ends.
func (k *tenants) add(c *net.UnixConn, pid int, charges []*charge, log *slog.Logger) error {
	fd, err := pidfd(c, pid)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("watch process %d: %w", pid, err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.watch(log); err != nil {
		unix.Close(fd)
		return fmt.Errorf("watch process %d: %w", pid, err)
	}
	for _, c := range charges {
		c.keep()
	}
	for _, t := range k.list {
		// A number is nobody else's until its process has ended.
		if pid != 0 && t.pid == pid && !ended(t.fd) {
			unix.Close(fd)
			t.charges = append(t.charges, charges...)
			return nil
		}
	}
	k.list = append(k.list, &tenant{pid: pid, fd: fd, charges: slices.Clone(charges)})
	k.rouse()
	return nil
}

// rouse has the watcher look again. The caller has mu.
func (k *tenants) rouse() {
	_, _ = unix.Write(k.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
}

// watch begins to watch, if nobody does. The caller has mu.
func (k *tenants) watch(log *slog.Logger) (err error) {
	switch {
	case k.closed:
		return failf(errBusy, "%s", whyClosing)
	case k.done != nil:
		return nil
	}
	if k.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("eventfd: %w", err)
	}
	k.done = make(chan struct{})
	go k.run(log)
	return nil
}

func (k *tenants) run(log *slog.Logger) {
	defer close(k.done)
	for {
		k.mu.Lock()
		if k.closed {
			k.mu.Unlock()
			return
		}
		fds := []unix.PollFd{{Fd: int32(k.wake), Events: unix.POLLIN}}
		for _, t := range k.list {
			fds = append(fds, unix.PollFd{Fd: int32(t.fd), Events: unix.POLLIN})
		}
		k.mu.Unlock()
		if _, err := unix.Poll(fds, -1); err != nil {
			continue // EINTR
		}
		if fds[0].Revents != 0 {
			var b [8]byte
			_, _ = unix.Read(k.wake, b[:])
		}
		k.mu.Lock()
		gone := map[int]bool{}
		for _, f := range fds[1:] {
			gone[int(f.Fd)] = f.Revents != 0
		}
		k.list = slices.DeleteFunc(k.list, func(t *tenant) bool {
			if !gone[t.fd] {
				return false
			}
			log.Info("a process has ended that was attached", "pid", t.pid, "freed", t.end())
			return true
		})
		k.mu.Unlock()
	}
}

// end gives back what the process had, and returns how much became free.
func (t *tenant) end() (n control.Size) {
	unix.Close(t.fd)
	for _, c := range t.charges {
		n += control.Size(c.unkeep())
	}
	return n
}

// close ends the watching. Processes that still run are nobody's business any more.
func (k *tenants) close() {
	k.mu.Lock()
	closed := k.closed
	k.closed = true
	watching := k.done != nil
	if watching && !closed {
		k.rouse()
	}
	k.mu.Unlock()
	if !watching || closed {
		return
	}
	<-k.done
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, t := range k.list {
		t.end()
	}
	k.list = nil
	unix.Close(k.wake)
}
