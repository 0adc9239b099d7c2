// SPDX-License-Identifier: Apache-2.0

package netns_test

import (
	"bufio"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/internal/ethtool"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/impair"
)

// pathName is the name of the namespace between the ends, for names that end
// with nic.
func pathName(cfg netns.LabConfig) string {
	return strings.TrimSuffix(cfg.NIC.Namespace, "nic") + "path"
}

// startRelay starts this binary as the relay of a namespace. mark is in its
// environment, so that it can be found whoever its parent is.
func startRelay(path *os.File, mark string) (*exec.Cmd, error) {
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), helperEnv+"=relay", "XSPIN_TEST_MARK="+mark)
	c.ExtraFiles = []*os.File{path}
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	out, err := c.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.Start(); err != nil {
		return nil, err
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		return nil, fmt.Errorf("relay: %s, %v, %w", line, err, c.Wait())
	}
	return c, nil
}

// marked returns the processes with that mark.
func marked(t testing.TB, mark string) (pids []string) {
	t.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range paths {
		if b, err := os.ReadFile(p); err == nil && strings.Contains(string(b), "XSPIN_TEST_MARK="+mark+"\x00") {
			pids = append(pids, p)
		}
	}
	return pids
}

// wantNoProcess fails the test if processes with the mark do not end by
// themselves.
func wantNoProcess(t testing.TB, mark string) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		pids := marked(t, mark)
		if len(pids) == 0 {
			return
		}
		if time.Now().After(end) {
			t.Errorf("still there: %v", pids)
			return
		}
	}
}

// waitingPath returns a config whose relay is a process, and what becomes of it.
func waitingPath(t *testing.T) (cfg netns.LabConfig, relay func() *exec.Cmd) {
	t.Helper()
	cfg = unique(t)
	var c *exec.Cmd
	cfg.Path = &impair.Config{Delay: time.Millisecond}
	cfg.StartRelay = func(path *os.File) (err error) {
		c, err = startRelay(path, cfg.NIC.Namespace)
		return err
	}
	t.Cleanup(func() {
		wantNoProcess(t, cfg.NIC.Namespace)
	})
	return cfg, func() *exec.Cmd { return c }
}

// plain is cfg without impairments.
func plain(cfg netns.LabConfig) netns.LabConfig {
	cfg.Path = nil
	return cfg
}

func TestPathIsKeptOrBuiltAnew(t *testing.T) {
	inPath := func(fn func() error) func(*netns.Lab, *netns.LabConfig) error {
		return func(l *netns.Lab, _ *netns.LabConfig) error { return l.PathNS.Do(fn) }
	}
	device := func(name string, fn func(netlink.Link) error) func() error {
		return func() error {
			l, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			return fn(l)
		}
	}
	for _, tc := range []struct {
		name   string
		path   impair.Config
		change func(l *netns.Lab, c *netns.LabConfig) error
		diff   string // "": it is kept
	}{
		{"nothing changed", impair.Config{Loss: 0.01, Rate: 1e9}, func(*netns.Lab, *netns.LabConfig) error { return nil }, ""},
		{"nothing changed behind a relay", impair.Config{Delay: time.Millisecond}, func(*netns.Lab, *netns.LabConfig) error { return nil }, ""},
		{"the seed in words", impair.Config{Loss: 0.01}, func(_ *netns.Lab, c *netns.LabConfig) error { c.Path.Seed = 1; return nil }, ""},
		{"what Open found asked", impair.Config{Duplicate: 1.0 / 3}, func(l *netns.Lab, c *netns.LabConfig) error { c.Path = l.Path; return nil }, ""},
		{"another seed asked", impair.Config{Loss: 0.01}, func(_ *netns.Lab, c *netns.LabConfig) error { c.Path.Seed = 2; return nil }, "seed 1, not loss 1%, seed 2"},
		{"another loss asked", impair.Config{Loss: 0.01}, func(_ *netns.Lab, c *netns.LabConfig) error { c.Path.Loss = 0.02; return nil }, "loss 1%"},
		{"another direction asked", impair.Config{Loss: 0.01}, func(_ *netns.Lab, c *netns.LabConfig) error { c.Path.Direction = impair.ToHost; return nil }, "direction to-host"},
		{"another MTU asked", impair.Config{}, func(_ *netns.Lab, c *netns.LabConfig) error { c.MTU = 2000; return nil }, "MTU 1500, not 2000"},
		{"a port set down", impair.Config{}, inPath(device(impair.NICPort, netlink.LinkSetDown)), "p-nic is down"},
		{"the filters removed", impair.Config{}, inPath(device(impair.HostPort, func(l netlink.Link) error {
			return netlink.QdiscDel(&netlink.GenericQdisc{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}, QdiscType: "clsact"})
		})), "no filter on p-host"},
		{"the rate removed", impair.Config{Rate: 1e9}, inPath(device(impair.HostPort, func(l netlink.Link) error {
			return netlink.QdiscDel(&netlink.GenericQdisc{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}, QdiscType: "tbf"})
		})), "no queueing discipline"},
		{"the relay's pair removed", impair.Config{Delay: time.Millisecond}, inPath(device("d-nic", netlink.LinkDel)), "impairment stage is gone"},
		{"a checksum offload turned on", impair.Config{}, func(l *netns.Lab, _ *netns.LabConfig) error {
			return l.Host.NS.Do(func() error { return ethtool.TxChecksum.Enable(l.Host.Device, true) })
		}, "tx-checksumming of xs-host is on"},
		{"a segmentation offload turned on", impair.Config{Trains: true}, func(l *netns.Lab, _ *netns.LabConfig) error {
			return l.Host.NS.Do(func() error { return ethtool.TSO.Enable(l.Host.Device, true) })
		}, "tcp-segmentation-offload of xs-host is on"},
		{"the name of the namespace between removed", impair.Config{}, func(l *netns.Lab, _ *netns.LabConfig) error {
			return errors.Join(unix.Unmount(l.PathNS.Path(), unix.MNT_DETACH), os.Remove(l.PathNS.Path()))
		}, "no namespace"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := unique(t)
			cfg.Path = &tc.path
			a := up(t, cfg)
			ping(t, a)
			first := inodeOf(t, a.NIC.NS)
			c := *cfg.Path
			cfg.Path = &c
			if err := tc.change(a, &cfg); err != nil {
				t.Fatal(err)
			}
			if b, err := netns.Open(cfg); tc.diff != "" && (!errors.Is(err, netns.ErrNotUp) || !strings.Contains(err.Error(), tc.diff)) {
				t.Errorf("Open: got %v, want %v with %q", err, netns.ErrNotUp, tc.diff)
				b.Close()
			} else if tc.diff == "" && err != nil {
				t.Error(err)
			} else {
				b.Close()
			}
			b := up(t, cfg)
			if second := inodeOf(t, b.NIC.NS); (first == second) != (tc.diff == "") {
				t.Errorf("namespace %s, then %s; want it kept: %v", first, second, tc.diff == "")
			}
			ping(t, b)
			down(t, cfg)
		})
	}
}

func TestPathComesAndGoes(t *testing.T) {
	cfg := unique(t)
	cfg.Path = &impair.Config{Loss: 0.01, Seed: 7}
	for _, c := range []netns.LabConfig{plain(cfg), cfg, plain(cfg), cfg} {
		l := up(t, c)
		ping(t, l)
		found, err := netns.Open(plain(cfg))
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range []*netns.Lab{l, found} {
			st, err := l.PathState()
			switch {
			case err != nil:
				t.Error(err)
			case c.Path == nil && (l.Path != nil || l.PathNS != nil || st != nil):
				t.Errorf("got %v in %v, want a plain pair", l.Path, l.PathNS)
			case c.Path != nil && (l.Path == nil || *l.Path != *cfg.Path || st.Config != *cfg.Path || st.FromHost.Frames == 0 || l.PathNS.Name() != pathName(cfg)):
				t.Errorf("got %v, %+v, want %v", l.Path, st, cfg.Path)
			}
		}
		found.Close()
		if _, err := os.Stat(filepath.Join("/run/netns", pathName(cfg))); (err == nil) != (c.Path != nil) {
			t.Errorf("namespace between the ends: %v, wanted: %v", err, c.Path != nil)
		}
	}
	down(t, plain(cfg))
}

func TestForeignNamespaceBetweenIsNotTouched(t *testing.T) {
	cfg := unique(t)
	name := pathName(cfg)
	inNew(t, name, addVeth("a", "b", "mine"))
	ping(t, up(t, cfg)) // a plain pair does not need it
	if l, err := netns.Open(cfg); err != nil {
		t.Error(err)
	} else {
		l.Close()
	}
	bad := cfg
	bad.Path = &impair.Config{}
	if _, err := netns.Up(bad); !errors.Is(err, netns.ErrForeign) || !strings.Contains(err.Error(), name) {
		t.Errorf("Up: got %v, want %v naming %s", err, netns.ErrForeign, name)
	}
	down(t, cfg)
	ns, err := netns.OpenNamespace(name)
	if err != nil {
		t.Fatalf("removed: %v", err)
	}
	defer ns.Close()
	within(t, ns, func() error {
		l, err := netlink.LinkByName("a")
		if err != nil {
			return err
		}
		return netlink.LinkDel(l)
	})
	down(t, cfg) // empty now, so it goes
}

// When Down returns, the relay has ended.
func TestDownEndsTheRelay(t *testing.T) {
	cfg, relay := waitingPath(t)
	l := up(t, cfg)
	ping(t, l)
	c := relay()
	if n := len(marked(t, cfg.NIC.Namespace)); n != 1 {
		t.Fatalf("%d relays, want 1", n)
	}
	down(t, plain(cfg)) // by somebody who does not know of it
	wantEnd(t, c)
}

// wantEnd fails the test unless the process ends by itself, and well.
func wantEnd(t *testing.T, c *exec.Cmd) {
	t.Helper()
	impatience := time.AfterFunc(20*time.Second, func() { _ = c.Process.Kill() })
	defer impatience.Stop()
	if err := c.Wait(); err != nil {
		t.Errorf("relay: %v, want it to end by itself, and well", err)
	}
}

// Whoever looks at the lab of a relay that was killed is told so, and the way out
// works.
func TestKilledRelayIsTold(t *testing.T) {
	cfg, relay := waitingPath(t)
	l := up(t, cfg)
	ping(t, l)
	c := relay()
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait()
	_, err := netns.Open(plain(cfg))
	if !errors.Is(err, netns.ErrNotUp) || !errors.Is(err, impair.ErrNoRelay) || !strings.Contains(err.Error(), "xspin lab up") {
		t.Errorf("Open: got %v, want %v, %v and the way out", err, netns.ErrNotUp, impair.ErrNoRelay)
	}
	within(t, l.Host.NS, func() error { // somebody sends all the same
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, []byte("x"), 0, &unix.SockaddrInet4{Port: 9, Addr: l.NIC.Addr.Addr().As4()})
	})
	if st, err := l.PathState(); err != nil || st.FromHost.Unserved == 0 {
		t.Errorf("%+v, %v, want frames counted that nobody served", st, err)
	}
	ping(t, up(t, cfg))
	if relay() == c {
		t.Error("Up started no other relay")
	}
	if err := relay().Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = relay().Wait()
	down(t, cfg)
}

// A relay ends when a device goes, whoever takes it away.
func TestRelayEndsWithItsDevices(t *testing.T) {
	for _, side := range []string{"nic", "host", "between"} {
		t.Run(side, func(t *testing.T) {
			cfg, relay := waitingPath(t)
			l := up(t, cfg)
			ping(t, l)
			ns, name := l.NIC.NS, l.NIC.Device
			switch side {
			case "host":
				ns, name = l.Host.NS, l.Host.Device
			case "between":
				ns, name = l.PathNS, "d-host"
			}
			within(t, ns, func() error {
				link, err := netlink.LinkByName(name)
				if err != nil {
					return err
				}
				return netlink.LinkDel(link)
			})
			wantEnd(t, relay())
			down(t, cfg)
		})
	}
}

// In this process frames wait as long as the handle is open.
func TestRelayInThisProcessEndsWithTheHandle(t *testing.T) {
	cfg := unique(t)
	cfg.Path = &impair.Config{Delay: time.Millisecond}
	l := up(t, cfg)
	ping(t, l)
	up(t, cfg).Close() // kept, and the relay is the first one's
	ping(t, l)
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if _, err := netns.Open(cfg); !errors.Is(err, impair.ErrNoRelay) {
		t.Errorf("Open: got %v, want %v", err, impair.ErrNoRelay)
	}
	ping(t, up(t, cfg))
	down(t, cfg)
}

func TestRelayThatDoesNotStartMakesNoLab(t *testing.T) {
	cfg := unique(t)
	cfg.Path = &impair.Config{Delay: time.Millisecond}
	boom := errors.New("boom")
	cfg.StartRelay = func(*os.File) error { return boom }
	if _, err := netns.Up(cfg); !errors.Is(err, boom) {
		t.Errorf("got %v, want %v", err, boom)
	}
	wantNoNames(t, cfg)
	cfg.StartRelay = func(*os.File) error { return nil } // says so
	if _, err := netns.Up(cfg); err == nil || !strings.Contains(err.Error(), "no relay runs") {
		t.Errorf("got %v, want it noticed", err)
	}
	wantNoNames(t, cfg)
}

func TestFailedUpOfAPathLeavesNothing(t *testing.T) {
	cfg := unique(t)
	cfg.Path = &impair.Config{Loss: 0.01, Delay: time.Millisecond, Rate: 1e9}
	l := up(t, cfg) // whatever is opened once and for all is open now
	if err := l.Down(); err != nil {
		t.Fatal(err)
	}
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &old)
	fds := settledFDs(t, 0)
	for spare := 0; ; spare++ {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(fds - 1 + spare), Max: old.Max}); err != nil {
			t.Fatal(err)
		}
		l, err := netns.Up(cfg)
		if e := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); e != nil {
			t.Fatal(e)
		}
		if err == nil {
			if spare < 10 {
				t.Errorf("Up failed only %d times: the limit does not bite", spare)
			}
			if err := l.Down(); err != nil {
				t.Error(err)
			}
			break
		}
		wantNoNames(t, cfg)
		if n := settledFDs(t, fds); n > fds {
			t.Fatalf("%d descriptors open after %v, %d before", n, err, fds)
		}
	}
	if n := settledFDs(t, fds); n > fds {
		t.Errorf("%d descriptors open, %d before", n, fds)
	}
}

// settledFDs waits until no more than want descriptors are open, or for a second:
// a subscription to events is closed by a goroutine of its own.
func settledFDs(t *testing.T, want int) (n int) {
	t.Helper()
	for end := time.Now().Add(time.Second); ; time.Sleep(time.Millisecond) {
		if n = openFDs(t); n <= want || time.Now().After(end) {
			return n
		}
	}
}

// However `lab up` and its relay are killed, the next Up has a lab, and no relay
// is left in the end.
func TestKilledUpOfAPathIsHealed(t *testing.T) {
	cfg, _ := waitingPath(t)
	mark := cfg.NIC.Namespace
	for range 4 {
		c := exec.Command("/proc/self/exe")
		c.Env = append(os.Environ(), helperEnv+"=updown", "XSPIN_TEST_ARGV="+cfg.NIC.Namespace+"\x1f"+cfg.Host.Namespace+"\x1f"+mark)
		c.Stderr = os.Stderr
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
		time.Sleep(rand.N(300 * time.Millisecond))
		if err := c.Process.Kill(); err != nil {
			t.Error(err)
		}
		if err := c.Wait(); c.ProcessState.ExitCode() != -1 {
			t.Errorf("helper ended by itself: %v", err)
		}
		l, err := netns.Up(cfg)
		if err != nil {
			t.Fatal(err)
		}
		ping(t, l)
		l.Close()
	}
	down(t, cfg)
}
