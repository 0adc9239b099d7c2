// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/xspin/xspin/netns/netnstest"
)

func TestMain(m *testing.M) {
	if path := os.Getenv("XSPIN_TEST_PEER"); path != "" {
		c, err := net.Dial("unix", path)
		if err != nil {
			panic(err)
		}
		var b [1]byte
		c.Read(b[:]) // until the other end closes
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// The child has more groups than fit into the first buffer.
func TestOfTellsUserAndAllGroups(t *testing.T) {
	netnstest.NeedRoot(t)
	dir, err := os.MkdirTemp("", "peer")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	os.Chmod(dir, 0o755)
	path := filepath.Join(dir, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	os.Chmod(path, 0o666)
	for _, tc := range []struct {
		name   string
		groups []uint32
	}{
		{"no group beside its own", nil},
		{"two groups", []uint32{7, 4000000000}},
		{"a hundred groups", func() (g []uint32) {
			for i := range uint32(100) {
				g = append(g, 1000+i)
			}
			return g
		}()},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cmd := exec.Command("/proc/self/exe")
			cmd.Env = append(os.Environ(), "XSPIN_TEST_PEER="+path)
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 4242, Groups: tc.groups}}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer cmd.Wait()
			c, err := l.AcceptUnix()
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			p, err := Of(c)
			if err != nil {
				t.Fatal(err)
			}
			if p.PID != cmd.Process.Pid || p.UID != 65534 || p.GID != 4242 {
				t.Errorf("got %+v, want pid %d, uid 65534, gid 4242", p, cmd.Process.Pid)
			}
			var want []int
			for _, g := range tc.groups {
				want = append(want, int(g))
			}
			if !slices.Equal(p.Groups, want) {
				t.Errorf("groups %v, want %v", p.Groups, want)
			}
		})
	}
}
