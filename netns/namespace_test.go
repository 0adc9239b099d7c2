// SPDX-License-Identifier: Apache-2.0

package netns_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
)

// threadNS names the namespace of the calling thread.
func threadNS(t testing.TB) string {
	l, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Error(err)
	}
	return l
}

func inodeOf(t testing.TB, n *netns.Namespace) string {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(n.Path(), &st); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("net:[%d]", st.Ino)
}

func openFDs(t testing.TB) int {
	t.Helper()
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(e)
}

func TestDoRunsInsideAndTheThreadGoesHome(t *testing.T) {
	l := netnstest.Temp(t, netns.LabConfig{})
	want := map[*netns.Namespace]string{l.NIC.NS: inodeOf(t, l.NIC.NS), l.Host.NS: inodeOf(t, l.Host.NS)}
	home := threadNS(t)
	fds := openFDs(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 50 {
				for ns, inside := range want {
					if err := ns.Do(func() error {
						runtime.Gosched() // a thread not locked may change here
						if got := threadNS(t); got != inside {
							t.Errorf("fn ran in %s, want %s", got, inside)
						}
						return nil
					}); err != nil {
						t.Error(err)
					}
				}
				if got := threadNS(t); got != home {
					t.Errorf("outside Do: %s, want %s", got, home)
				}
			}
		})
	}
	wg.Wait()
	if n := openFDs(t); n != fds {
		t.Errorf("%d descriptors open, %d before", n, fds)
	}
	tasks, err := fs.Glob(os.DirFS("/proc/self/task"), "*/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		got, err := os.Readlink("/proc/self/task/" + task)
		for _, inside := range want {
			if err == nil && got == inside {
				t.Errorf("thread %s was left in %s", task, got)
			}
		}
	}
}

func TestDoNests(t *testing.T) {
	l := netnstest.Temp(t, netns.LabConfig{})
	nic, host := inodeOf(t, l.NIC.NS), inodeOf(t, l.Host.NS)
	err := l.NIC.NS.Do(func() error {
		err := l.Host.NS.Do(func() error {
			if got := threadNS(t); got != host {
				t.Errorf("inner fn ran in %s, want %s", got, host)
			}
			return nil
		})
		if got := threadNS(t); got != nic {
			t.Errorf("outer fn went on in %s, want %s", got, nic)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

func TestDoHandsOnHowFnEnds(t *testing.T) {
	l := netnstest.Temp(t, netns.LabConfig{})
	boom := errors.New("boom")

	if err := l.NIC.NS.Do(func() error { return boom }); err != boom {
		t.Errorf("error: got %v, want %v", err, boom)
	}
	func() {
		defer func() {
			p, ok := recover().(*netns.Panic)
			if !ok || !errors.Is(p, boom) || !strings.Contains(p.Error(), "namespace_test.go") {
				t.Errorf("panic: got %v, want boom and where it happened", p)
			}
		}()
		_ = l.NIC.NS.Do(func() error { panic(boom) })
		t.Error("Do returned after a panic")
	}()
	returned, done := false, make(chan struct{})
	go func() {
		defer close(done)
		_ = l.NIC.NS.Do(func() error { runtime.Goexit(); return nil })
		returned = true
	}()
	if <-done; returned {
		t.Error("Do returned after Goexit")
	}
	home := threadNS(t)
	for range 20 { // on whichever threads these were
		done := make(chan string)
		go func() { done <- threadNS(t) }()
		if got := <-done; got != home {
			t.Errorf("a thread was left in %s", got)
		}
	}
}

func TestClosedNamespaceRefuses(t *testing.T) {
	l := netnstest.Temp(t, netns.LabConfig{})
	ns, err := netns.OpenNamespace(l.NIC.Namespace)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := ns.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := ns.Do(func() error { t.Error("fn ran"); return nil }); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Do: got %v, want %v", err, os.ErrClosed)
	}
	if _, err := ns.Pids(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Pids: got %v, want %v", err, os.ErrClosed)
	}
}

func TestOpenNamespaceRefuses(t *testing.T) {
	netnstest.NeedRoot(t)
	if _, err := netns.OpenNamespace("xspin-never-there"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v, want %v", err, os.ErrNotExist)
	}
	for _, name := range []string{"", ".", "..", "../../etc/passwd", strings.Repeat("x", 256)} {
		if ns, err := netns.OpenNamespace(name); err == nil {
			ns.Close()
			t.Errorf("%q was opened", name)
		}
	}
}

func TestCommandRunsInside(t *testing.T) {
	l := netnstest.Temp(t, netns.LabConfig{})
	want := inodeOf(t, l.Host.NS)
	ctx := context.Background()

	out, err := l.Host.NS.Command(ctx, "readlink", "/proc/self/ns/net").Output()
	if err != nil || strings.TrimSpace(string(out)) != want {
		t.Errorf("Output: %q, %v, want %s", out, err, want)
	}
	out, err = l.Host.NS.Command(ctx, "readlink", "/proc/self/ns/net").CombinedOutput()
	if err != nil || strings.TrimSpace(string(out)) != want {
		t.Errorf("CombinedOutput: %q, %v, want %s", out, err, want)
	}
	var ee *exec.ExitError
	if err := l.Host.NS.Command(ctx, "sh", "-c", "exit 7").Run(); !errors.As(err, &ee) || ee.ExitCode() != 7 {
		t.Errorf("Run: %v, want exit status 7", err)
	}
	var sb strings.Builder
	c := l.Host.NS.Command(ctx, "readlink", "/proc/self/ns/net")
	c.Stdout = &sb
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err != nil || strings.TrimSpace(sb.String()) != want {
		t.Errorf("Start and Wait: %q, %v, want %s", sb.String(), err, want)
	}
}

func TestExecBecomesTheCommand(t *testing.T) {
	l := netnstest.Temp(t, netns.LabConfig{})
	run := func(argv ...string) *exec.Cmd {
		c := exec.Command("/proc/self/exe")
		c.Env = append(os.Environ(), helperEnv+"=exec", "XSPIN_TEST_ARGV="+strings.Join(append([]string{l.Host.Namespace}, argv...), "\x1f"))
		return c
	}
	const script = "readlink /proc/$$/ns/net; ls /proc/$$/fd; exit 7"
	plain, _ := exec.Command("sh", "-c", script).Output()
	c := run("sh", "-c", script)
	out, err := c.Output()
	var ee *exec.ExitError
	if !errors.As(err, &ee) || ee.ExitCode() != 7 {
		t.Errorf("got %v, want exit status 7", err)
	}
	// Descriptors: those of any child, which the parent may have got itself.
	if got, want := string(out), strings.Replace(string(plain), threadNS(t), inodeOf(t, l.Host.NS), 1); got != want {
		t.Errorf("namespace and descriptors: got %q, want %q", got, want)
	}

	c = run("sh", "-c", "trap 'exit 5' TERM; echo ready; while :; do sleep 0.01; done")
	r, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Read(make([]byte, 6)); err != nil {
		t.Error(err)
	}
	if err := c.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	if err := c.Wait(); !errors.As(err, &ee) || ee.ExitCode() != 5 {
		t.Errorf("after SIGTERM: got %v, want exit status 5", err)
	}

	if err := l.Host.NS.Exec([]string{"/does/not/exist"}, nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no such command: got %v, want %v", err, os.ErrNotExist)
	}
}

func TestParseSNMP(t *testing.T) {
	for _, tc := range []struct {
		name, in string
		want     map[string]map[string]uint64 // nil: an error
	}{
		{"two protocols", "Ip: A B\nIp: 1 2\nIcmp: C\nIcmp: 18446744073709551615\n",
			map[string]map[string]uint64{"Ip": {"A": 1, "B": 2}, "Icmp": {"C": 1<<64 - 1}}},
		{"a protocol without counters", "Ip:\nIp:\n", map[string]map[string]uint64{"Ip": {}}},
		{"an empty file", "", map[string]map[string]uint64{}},
		{"a negative value is left out", "Tcp: MaxConn X\nTcp: -1 3\n", map[string]map[string]uint64{"Tcp": {"X": 3}}},
		{"names without values", "Ip: A\n", nil},
		{"fewer values than names", "Ip: A B\nIp: 1\n", nil},
		{"values of another protocol", "Ip: A\nTcp: 1\n", nil},
		{"a value that is no number", "Ip: A\nIp: x\n", nil},
		{"a value over 64 bits", "Ip: A\nIp: 18446744073709551616\n", nil},
		{"empty lines", "\n\n", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := netns.ParseSNMP(strings.NewReader(tc.in))
			if (err != nil) != (tc.want == nil) || tc.want != nil && !reflect.DeepEqual(got, tc.want) {
				t.Errorf("got %v, %v, want %v", got, err, tc.want)
			}
		})
	}
}
