// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"

	vns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// runDir is where `ip netns` and every tool after it mount named namespaces.
const runDir = "/run/netns"

// Namespace is a handle on a network namespace. The namespace lives at least
// as long as the handle is open, whatever happens to its name.
//
// All methods are safe for concurrent use.
type Namespace struct {
	name string
	f    *os.File
}

// OpenNamespace opens the namespace mounted at /run/netns/NAME. The error
// matches os.ErrNotExist if there is none.
func OpenNamespace(name string) (*Namespace, error) {
	if err := checkName(name); err != nil {
		return nil, fmt.Errorf("open namespace: %w", err)
	}
	f, err := os.Open(filepath.Join(runDir, name))
	if err != nil {
		return nil, fmt.Errorf("open namespace %q: %w", name, err)
	}
	// A crash between creating and mounting leaves a plain file, which opens too.
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		f.Close()
		return nil, fmt.Errorf("open namespace %q: statfs: %w", name, err)
	}
	if st.Type != unix.NSFS_MAGIC {
		f.Close()
		return nil, fmt.Errorf("open namespace %q: %s: %w", name, f.Name(), errNoMount)
	}
	return &Namespace{name, f}, nil
}

// errNoMount marks a name under runDir with no namespace mounted on it.
var errNoMount = errors.New("no namespace is mounted there")

// create makes a namespace without a name in the file system. It ends with its
// last handle, so a process killed now leaves nothing behind.
func create(name string) (*Namespace, error) {
	n := &Namespace{name: name}
	err := onThread(func() error { return unix.Unshare(unix.CLONE_NEWNET) }, func() (err error) {
		n.f, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("create namespace %q: %w", name, err)
	}
	return n, nil
}

// Name returns the name under /run/netns.
func (n *Namespace) Name() string { return n.name }

// Path returns a path to the namespace that other programs can open.
func (n *Namespace) Path() string { return filepath.Join(runDir, n.name) }

// Close closes the handle; the namespace stays if it has a name. A second Close
// does nothing.
func (n *Namespace) Close() error {
	if n == nil {
		return nil
	}
	if err := n.f.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return fmt.Errorf("close namespace %q: %w", n.name, err)
	}
	return nil
}

// Do runs fn on an OS thread that is inside the namespace, and waits for it.
// Goroutines that fn starts are not inside. Sockets that fn opens belong to
// the namespace for good.
//
// If fn panics, Do panics with a *Panic; if fn calls runtime.Goexit, as testing's
// FailNow does, so does Do.
func (n *Namespace) Do(fn func() error) error {
	return onThread(func() error {
		c, err := n.f.SyscallConn()
		if err != nil {
			return fmt.Errorf("enter namespace %q: %w", n.name, err)
		}
		var errno error
		if err := c.Control(func(fd uintptr) { errno = unix.Setns(int(fd), unix.CLONE_NEWNET) }); err != nil {
			return fmt.Errorf("enter namespace %q: %w", n.name, os.ErrClosed)
		}
		if errno == unix.EPERM {
			if err := checkPrivilege(fmt.Sprintf("enter namespace %q", n.name)); err != nil {
				return err
			}
		}
		if errno != nil {
			return fmt.Errorf("enter namespace %q: setns: %w", n.name, errno)
		}
		return nil
	}, fn)
}

// Panic carries a panic out of the thread that Do ran it on.
type Panic struct {
	Value any    // what was passed to panic
	Stack []byte // where, as debug.Stack prints it
}

func (p *Panic) Error() string { return fmt.Sprintf("%v\n\n%s", p.Value, p.Stack) }

// Unwrap returns Value when it is an error.
func (p *Panic) Unwrap() error {
	err, _ := p.Value.(error)
	return err
}

// onThread runs enter, which changes the thread's namespace, and then fn on a
// locked thread, and moves the thread back. It does not use the caller's thread,
// which the caller may have locked.
func onThread(enter, fn func() error) error {
	type outcome struct {
		err      error
		panicked *Panic
		exited   bool
	}
	result := make(chan outcome, 1)
	go func() {
		out := outcome{exited: true} // stays if fn calls Goexit
		defer func() { result <- out }()

		runtime.LockOSThread()
		home, err := vns.Get()
		if err != nil {
			runtime.UnlockOSThread()
			out = outcome{err: fmt.Errorf("remember the thread's namespace: %w", err)}
			return
		}
		defer home.Close()
		if err := enter(); err != nil {
			runtime.UnlockOSThread()
			out = outcome{err: err}
			return
		}
		defer func() {
			// A thread that cannot be moved back stays locked: the runtime
			// ends it with this goroutine instead of reusing it.
			if vns.Set(home) == nil {
				runtime.UnlockOSThread()
			}
		}()
		out = func() (out outcome) {
			defer func() {
				if r := recover(); r != nil {
					out = outcome{panicked: &Panic{r, debug.Stack()}}
				}
			}()
			return outcome{err: fn()}
		}()
	}()
	out := <-result
	switch {
	case out.panicked != nil:
		panic(out.panicked)
	case out.exited:
		runtime.Goexit()
	}
	return out.err
}

// Cmd is an exec.Cmd that starts inside a network namespace. The file system,
// including the mounted /sys, stays the caller's.
type Cmd struct {
	*exec.Cmd
	ns *Namespace
}

// Command is exec.CommandContext for a command to run inside the namespace.
func (n *Namespace) Command(ctx context.Context, name string, arg ...string) *Cmd {
	return &Cmd{exec.CommandContext(ctx, name, arg...), n}
}

// Start is exec.Cmd.Start inside the namespace. A child gets the namespace of the
// thread that forks it.
func (c *Cmd) Start() error { return c.ns.Do(c.Cmd.Start) }

// Run is exec.Cmd.Run inside the namespace.
func (c *Cmd) Run() error { return c.ns.Do(c.Cmd.Run) }

// Output is exec.Cmd.Output inside the namespace.
func (c *Cmd) Output() (out []byte, err error) {
	err = c.ns.Do(func() (err error) {
		out, err = c.Cmd.Output()
		return err
	})
	return out, err
}

// CombinedOutput is exec.Cmd.CombinedOutput inside the namespace.
func (c *Cmd) CombinedOutput() (out []byte, err error) {
	err = c.ns.Do(func() (err error) {
		out, err = c.Cmd.CombinedOutput()
		return err
	})
	return out, err
}

// Exec replaces the calling process with argv, found through PATH, inside the
// namespace. The program gets the terminal, the signals and the exit status. Exec
// returns only on error.
func (n *Namespace) Exec(argv, env []string) error {
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return fmt.Errorf("exec in namespace %q: %w", n.name, err)
	}
	return n.Do(func() error {
		// execve keeps the calling thread, and so its namespace, and ends
		// all others.
		return fmt.Errorf("exec %s in namespace %q: %w", path, n.name, syscall.Exec(path, argv, env))
	})
}

// SNMP reads the IPv4 counters of the namespace, by protocol and name as in
// /proc/net/snmp: snmp["Icmp"]["InEchos"]. Tcp MaxConn, which is -1, is left
// out.
func (n *Namespace) SNMP() (map[string]map[string]uint64, error) {
	var snmp map[string]map[string]uint64
	err := n.Do(func() error {
		// /proc/net would be that of the main thread.
		f, err := os.Open("/proc/thread-self/net/snmp")
		if err != nil {
			return err
		}
		defer f.Close()
		snmp, err = parseSNMP(f)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read snmp of namespace %q: %w", n.name, err)
	}
	return snmp, nil
}

// parseSNMP reads pairs of lines: names after a protocol, then their values.
func parseSNMP(r io.Reader) (map[string]map[string]uint64, error) {
	snmp := make(map[string]map[string]uint64)
	for sc := bufio.NewScanner(r); ; {
		if !sc.Scan() {
			return snmp, sc.Err()
		}
		names := strings.Fields(sc.Text())
		if !sc.Scan() {
			return nil, errors.Join(fmt.Errorf("names without values: %q", names), sc.Err())
		}
		values := strings.Fields(sc.Text())
		if len(names) != len(values) || len(names) == 0 || names[0] != values[0] {
			return nil, fmt.Errorf("names %q do not match values %q", names, values)
		}
		proto := make(map[string]uint64)
		for i := 1; i < len(names); i++ {
			if strings.HasPrefix(values[i], "-") {
				continue
			}
			v, err := strconv.ParseUint(values[i], 10, 64)
			if err != nil {
				return nil, fmt.Errorf("%s %s: %w", names[0], names[i], err)
			}
			proto[names[i]] = v
		}
		snmp[strings.TrimSuffix(names[0], ":")] = proto
	}
}

// Pids returns the processes, other than the calling one, with a thread
// inside the namespace, in ascending order.
func (n *Namespace) Pids() ([]int, error) {
	info, err := n.f.Stat()
	if err != nil {
		return nil, fmt.Errorf("list processes in namespace %q: %w", n.name, err)
	}
	want := fmt.Sprintf("net:[%d]", info.Sys().(*syscall.Stat_t).Ino)
	processes, err := entries("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes in namespace %q: %w", n.name, err)
	}
	var pids []int
	for _, process := range processes {
		pid, err := strconv.Atoi(process)
		if err != nil || pid == os.Getpid() {
			continue
		}
		// Threads may end meanwhile: what cannot be read is not inside.
		threads, _ := entries("/proc/" + process + "/task")
		if slices.ContainsFunc(threads, func(thread string) bool {
			l, err := os.Readlink("/proc/" + process + "/task/" + thread + "/ns/net")
			return err == nil && l == want
		}) {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return pids, nil
}

// entries lists a directory, unsorted.
func entries(dir string) ([]string, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return d.Readdirnames(-1)
}
