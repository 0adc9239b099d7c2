// SPDX-License-Identifier: Apache-2.0

// Package testenv has what tests ask of the environment that they run in, besides
// root (see netns/netnstest).
package testenv

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Soak is how many times longer than in `make test` random searches go on: the
// number in XSPIN_SOAK, which `make soak` sets, or 1.
func Soak() int { return soak() }

// SoakTime multiplies a duration by Soak.
func SoakTime(d time.Duration) time.Duration { return time.Duration(Soak()) * d }

var soak = sync.OnceValue(func() int {
	s := os.Getenv("XSPIN_SOAK")
	if s == "" {
		return 1
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		panic(fmt.Sprintf("XSPIN_SOAK=%q is not a number of 1 or more", s))
	}
	return n
})

// Slowness is how many times longer than on other machines things may take that are
// waited for, or limited: 30 on an emulated one (XSPIN_EMULATED=1, as `make vmtest` sets),
// else 1.
func Slowness() time.Duration {
	if emulated() {
		return 30
	}
	return 1
}

func emulated() bool { return os.Getenv("XSPIN_EMULATED") == "1" }

// NeedTime skips a test that fails on a machine which is many times slower than
// others.
func NeedTime(t testing.TB) {
	t.Helper()
	if emulated() {
		t.Skip("depends on time, and this machine is emulated")
	}
}

// ReadBuffer gives a socket a receive buffer of size bytes, beyond what the system
// lets everybody have (208 KiB up to Linux 6.15) if the test runs as root.
func ReadBuffer(c *net.UDPConn, size int) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var errno error
	if err := raw.Control(func(fd uintptr) {
		errno = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, size)
	}); err != nil || errno == nil {
		return err
	}
	return c.SetReadBuffer(size)
}
