// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// Anybody may open the directory and lock it.
func TestALockedDirectoryDelaysNobody(t *testing.T) {
	dir := socketDir(t)
	d, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := syscall.Flock(int(d.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "s")
	l, err := listen(path, quiet())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if files, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(files) != 1 {
		t.Errorf("there are %v, %v, want the socket alone", files, err)
	}
}

// A descriptor in a message is closed by whoever reads it, and that may take long.
func TestDescriptorsOfPeersAreRefused(t *testing.T) {
	path := filepath.Join(socketDir(t), "s")
	l, err := listen(path, quiet())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	own, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(own)
	if _, err := syscall.GetsockoptInt(own, syscall.SOL_SOCKET, passRights); errors.Is(err, syscall.ENOPROTOOPT) {
		t.Skip("the kernel has no SO_PASSRIGHTS, which came with Linux 6.16")
	}
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	before := func(what string) {
		// As net/http would have it: accepted or not yet, it is the same.
		if _, _, err := c.WriteMsgUnix([]byte("GET "), syscall.UnixRights(0), nil); !errors.Is(err, syscall.EPERM) {
			t.Errorf("%s: a descriptor was sent (%v)", what, err)
		}
	}
	before("not accepted")
	u, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	before("accepted")
}
