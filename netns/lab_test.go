// SPDX-License-Identifier: Apache-2.0

package netns_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/impair"
	"github.com/xspin/xspin/netns/netnstest"
)

// helperEnv makes the test binary another program.
const helperEnv = "XSPIN_TEST_HELPER"

func TestMain(m *testing.M) {
	switch argv := strings.Split(os.Getenv("XSPIN_TEST_ARGV"), "\x1f"); os.Getenv(helperEnv) {
	case "exec": // in namespace argv[0] the rest
		ns, err := netns.OpenNamespace(argv[0])
		if err == nil {
			err = ns.Exec(argv[1:], os.Environ())
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(99)
	case "full": // a lab where there is room for one name, not for two
		err := errors.Join(os.MkdirAll("/run/netns", 0o755), unix.Mount("none", "/run/netns", "tmpfs", 0, "nr_inodes=2"))
		if err == nil {
			_, err = netns.Up(netns.LabConfig{})
		}
		names, _ := os.ReadDir("/run/netns")
		fmt.Print(len(names), " names, no space: ", errors.Is(err, unix.ENOSPC))
		os.Exit(0)
	case "relay": // of the namespace that is descriptor 3
		err := netns.ServeRelay(os.NewFile(3, "path"), func() { fmt.Println("ready") })
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	case "updown": // the lab in namespaces argv[0] and argv[1], until killed
		cfg := config(argv[0], argv[1])
		if len(argv) > 2 { // with frames that wait in a process with the mark argv[2]
			cfg.Path = &impair.Config{Loss: 0.01, Delay: time.Millisecond}
			cfg.StartRelay = func(path *os.File) error {
				_, err := startRelay(path, argv[2])
				return err
			}
		}
		for fmt.Println("ready"); ; {
			if l, err := netns.Up(cfg); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(99)
			} else if err := l.Down(); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(98)
			}
		}
	}
	os.Exit(m.Run())
}

func config(nic, host string) netns.LabConfig {
	return netns.LabConfig{NIC: netns.End{Namespace: nic}, Host: netns.End{Namespace: host}}
}

// unique returns a config of its own for the test, and fails the test if it
// leaves one of the names behind.
func unique(t *testing.T) netns.LabConfig {
	t.Helper()
	netnstest.NeedRoot(t)
	cfg := netnstest.Unique(netns.LabConfig{})
	cfg.Warn = func(msg string) { t.Errorf("unexpected warning: %s", msg) }
	t.Cleanup(func() {
		wantNoNames(t, cfg)
		for _, name := range []string{cfg.NIC.Namespace, cfg.Host.Namespace, pathName(cfg)} {
			path := filepath.Join("/run/netns", name)
			_ = unix.Unmount(path, unix.MNT_DETACH)
			_ = os.Remove(path)
		}
	})
	return cfg
}

func wantNoNames(t testing.TB, cfg netns.LabConfig) {
	t.Helper()
	for _, name := range []string{cfg.NIC.Namespace, cfg.Host.Namespace, pathName(cfg)} {
		if _, err := os.Lstat(filepath.Join("/run/netns", name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("stat %s: %v, want it gone", name, err)
		}
	}
}

func up(t *testing.T, cfg netns.LabConfig) *netns.Lab {
	t.Helper()
	l, err := netns.Up(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func down(t *testing.T, cfg netns.LabConfig) {
	t.Helper()
	if err := netns.Down(cfg); err != nil {
		t.Fatal(err)
	}
}

// within runs fn in the namespace and fails the test with its error.
func within(t testing.TB, ns *netns.Namespace, fn func() error) {
	t.Helper()
	if err := ns.Do(fn); err != nil {
		t.Fatal(err)
	}
}

// inNew makes a named namespace, as `ip netns add` does, and runs fn in it.
func inNew(t *testing.T, name string, fn func() error) {
	t.Helper()
	path := filepath.Join("/run/netns", name)
	if err := os.WriteFile(path, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	errc := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends here
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			errc <- err
			return
		}
		if err := unix.Mount("/proc/thread-self/ns/net", path, "none", unix.MS_BIND, ""); err != nil {
			errc <- err
			return
		}
		errc <- fn()
	}()
	if err := <-errc; err != nil {
		t.Fatal(err)
	}
}

func addVeth(name, peer, alias string) func() error {
	return func() error {
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: peer}); err != nil {
			return err
		}
		if alias == "" {
			return nil
		}
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return netlink.LinkSetAlias(l, alias)
	}
}

// ping sends one echo request from the host end and waits for its reply.
func ping(t testing.TB, l *netns.Lab) {
	t.Helper()
	within(t, l.Host.NS, func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMP)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5}); err != nil {
			return err
		}
		// Type 8, and a checksum over nothing else.
		req := []byte{8, 0, 0xf7, 0xff, 0, 0, 0, 0}
		if err := unix.Sendto(fd, req, 0, &unix.SockaddrInet4{Addr: l.NIC.Addr.Addr().As4()}); err != nil {
			return err
		}
		buf := make([]byte, 128)
		n, _, err := unix.Recvfrom(fd, buf, 0)
		for err == unix.EINTR { // a time limit has the kernel not restart the call
			n, _, err = unix.Recvfrom(fd, buf, 0)
		}
		if err != nil {
			return fmt.Errorf("wait for echo reply: %w", err)
		}
		if n != 28 || buf[20] != 0 {
			return fmt.Errorf("got %x, want an echo reply", buf[:n])
		}
		return nil
	})
}

func TestConfigIsCheckedBeforeAnythingElse(t *testing.T) {
	mac := func(s string) net.HardwareAddr { m, _ := net.ParseMAC(s); return m }
	addr := netip.MustParsePrefix
	type cfg = netns.LabConfig
	type end = netns.End
	for _, tc := range []struct {
		name string
		cfg  cfg
		want string // "": it is fine
	}{
		{"defaults are fine", cfg{}, ""},
		{"MTU 68 is fine", cfg{MTU: 68}, ""},
		{"MTU 67 is too small", cfg{MTU: 67}, "MTU 67, want 68 to 65535"},
		{"MTU 65535 is fine", cfg{MTU: 65535}, ""},
		{"MTU 65536 is too large", cfg{MTU: 65536}, "MTU 65536, want 68 to 65535"},
		{"a negative MTU is refused", cfg{MTU: -1}, "MTU -1"},
		{"1 queue is fine", cfg{Queues: 1}, ""},
		{"256 queues are fine", cfg{Queues: 256}, ""},
		{"257 queues are too many", cfg{Queues: 257}, "257 queues, want 1 to 256"},
		{"negative queues are refused", cfg{Queues: -1}, "-1 queues"},
		{"one namespace for both ends is refused", cfg{NIC: end{Namespace: "a"}, Host: end{Namespace: "a"}}, `both ends in namespace "a"`},
		{"one end may take the other's default device in upper case", cfg{NIC: end{Device: "XS-HOST"}}, ""},
		{"one device name for both ends is refused", cfg{NIC: end{Device: "xs-host"}}, `both devices named "xs-host"`},
		{"one MAC for both ends is refused", cfg{NIC: end{MAC: mac("02:00:00:00:00:02")}}, "both devices with MAC 02:00:00:00:00:02"},
		{"one address for both ends is refused", cfg{NIC: end{Addr: addr("10.0.0.2/24")}}, "both devices with address 10.0.0.2"},
		{"an address in another subnet is refused", cfg{NIC: end{Addr: addr("10.0.1.1/24")}}, "not in one subnet"},
		{"an address with another prefix length is refused", cfg{NIC: end{Addr: addr("10.0.0.1/25")}}, "not in one subnet"},
		{"another subnet for both is fine", cfg{NIC: end{Addr: addr("192.168.7.1/30")}, Host: end{Addr: addr("192.168.7.2/30")}}, ""},
		{"the two addresses of a /31 are fine", cfg{NIC: end{Addr: addr("192.168.7.0/31")}, Host: end{Addr: addr("192.168.7.1/31")}}, ""},
		{"a /32 is refused", cfg{NIC: end{Addr: addr("10.0.0.1/32")}}, "not an IPv4 host address"},
		{"a network address is refused", cfg{NIC: end{Addr: addr("10.0.0.0/24")}}, "not an IPv4 host address"},
		{"a broadcast address is refused", cfg{NIC: end{Addr: addr("10.0.0.255/24")}}, "not an IPv4 host address"},
		{"the address under the broadcast address is fine", cfg{NIC: end{Addr: addr("10.0.0.254/24")}}, ""},
		{"an IPv6 address is refused", cfg{NIC: end{Addr: addr("fd00::1/64")}}, "not an IPv4 host address"},
		{"a multicast MAC is refused", cfg{NIC: end{MAC: mac("03:00:00:00:00:01")}}, "not a unicast"},
		{"a MAC of zeros is refused", cfg{NIC: end{MAC: mac("00:00:00:00:00:00")}}, "not a unicast"},
		{"a MAC of 8 bytes is refused", cfg{NIC: end{MAC: mac("02:00:00:00:00:00:00:01")}}, "not a unicast"},
		{"a device name of 15 bytes is fine", cfg{NIC: end{Device: "123456789012345"}}, ""},
		{"a device name of 16 bytes is refused", cfg{NIC: end{Device: "1234567890123456"}}, "not a valid device name"},
		{"a device name with a space is refused", cfg{NIC: end{Device: "xs nic"}}, "not a valid device name"},
		{"a device name that is a pattern is refused", cfg{NIC: end{Device: "xs%d"}}, "not a valid device name"},
		{"lo is refused", cfg{NIC: end{Device: "lo"}}, "not a valid device name"},
		{"a namespace name with a slash is refused", cfg{NIC: end{Namespace: "../x"}}, "not a valid namespace name"},
		{"a namespace called .. is refused", cfg{NIC: end{Namespace: ".."}}, "not a valid namespace name"},
		{"a namespace called ... is fine", cfg{NIC: end{Namespace: "..."}}, ""},
		{"an end in the namespace between the ends is refused", cfg{NIC: end{Namespace: "a-nic"}, Host: end{Namespace: "a-path"}}, `an end in namespace "a-path"`},
		{"an impairment is checked", cfg{Path: &impair.Config{Loss: 2}}, "loss 200%, want 0% to 100%"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := tc.cfg.Check()
			if tc.want == "" {
				if err != nil {
					t.Errorf("got %v, want no error", err)
				}
				return
			}
			if !errors.Is(err, netns.ErrConfig) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %v with %q", err, netns.ErrConfig, tc.want)
			}
			if _, err := netns.Up(tc.cfg); !errors.Is(err, netns.ErrConfig) {
				t.Errorf("Up: got %v, want %v", err, netns.ErrConfig)
			}
		})
	}
}

func TestMissingCapabilityIsNamed(t *testing.T) {
	cfg := unique(t)
	for _, tc := range []struct {
		drop      uint
		has, lack string
	}{
		{unix.CAP_NET_ADMIN, "CAP_SYS_ADMIN", "CAP_NET_ADMIN"},
		{unix.CAP_SYS_ADMIN, "CAP_NET_ADMIN", "CAP_SYS_ADMIN"},
	} {
		t.Run(tc.lack, func(t *testing.T) {
			done := make(chan struct{})
			go func() {
				defer close(done)
				runtime.LockOSThread() // and never unlocked: the thread ends here
				hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
				var data [2]unix.CapUserData
				if err := unix.Capget(&hdr, &data[0]); err != nil {
					t.Error(err)
				}
				data[tc.drop/32].Effective &^= 1 << (tc.drop % 32)
				if err := unix.Capset(&hdr, &data[0]); err != nil {
					t.Error(err)
				}
				_, upErr := netns.Up(cfg)
				_, openErr := netns.Open(cfg)
				for call, err := range map[string]error{"Up": upErr, "Open": openErr, "Down": netns.Down(cfg), "Probe": netns.Probe()} {
					if !errors.Is(err, netns.ErrPrivilege) || !strings.Contains(err.Error(), tc.lack) || strings.Contains(err.Error(), tc.has) || !strings.Contains(err.Error(), "sudo") {
						t.Errorf("%s: got %v, want %s named, and sudo", call, err, tc.lack)
					}
				}
			}()
			<-done
			wantNoNames(t, cfg)
		})
	}
}

func TestLabIsAsAsked(t *testing.T) {
	l := netnstest.Temp(t, netns.LabConfig{
		NIC:  netns.End{Device: "left", MAC: net.HardwareAddr{2, 1, 2, 3, 4, 5}, Addr: netip.MustParsePrefix("172.16.5.9/16")},
		Host: netns.End{Addr: netip.MustParsePrefix("172.16.9.5/16")},
		MTU:  9000, Queues: 3,
	})
	for _, want := range []netns.Port{l.NIC, l.Host} {
		within(t, want.NS, func() error {
			link, err := netlink.LinkByName(want.Device)
			if err != nil {
				return err
			}
			a := link.Attrs()
			if a.MTU != 9000 || a.NumRxQueues != 3 || a.NumTxQueues != 3 || a.HardwareAddr.String() != want.MAC.String() || a.Index != want.Index || a.OperState != netlink.OperUp {
				t.Errorf("%s: got %+v", want.Device, a)
			}
			// numrxqueues is what was asked for; these are what there is.
			for _, dir := range []string{"rx", "tx"} {
				if n := sysfsQueues(t, want.Device, dir); n != 3 {
					t.Errorf("%s has %d %s queues, want 3", want.Device, n, dir)
				}
			}
			if a.Statistics.TxPackets != 0 {
				t.Errorf("%s sent %d frames by itself", want.Device, a.Statistics.TxPackets)
			}
			if b, err := os.ReadFile("/proc/sys/net/ipv6/conf/" + want.Device + "/disable_ipv6"); err == nil && string(b) != "1\n" {
				t.Errorf("IPv6 is on on %s", want.Device)
			}
			addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
			if err != nil {
				return err
			}
			var got []string
			for _, a := range addrs {
				got = append(got, a.IPNet.String())
			}
			if w := []string{"127.0.0.1/8", want.Addr.String()}; strings.Join(got, " ") != strings.Join(w, " ") {
				t.Errorf("addresses %v, want %v", got, w)
			}
			return nil
		})
	}
	ping(t, l)
}

// sysfsQueues counts the queues of a device in the thread's namespace, through
// a sysfs of its own.
func sysfsQueues(t *testing.T, device, dir string) int {
	at := t.TempDir()
	if err := unix.Mount("none", at, "sysfs", unix.MS_RDONLY, ""); err != nil {
		t.Error(err)
		return -1
	}
	defer unix.Unmount(at, unix.MNT_DETACH)
	q, err := filepath.Glob(filepath.Join(at, "class/net", device, "queues", dir+"-*"))
	if err != nil {
		t.Error(err)
	}
	return len(q)
}

func TestNeighboursAreLearnedAndEchoIsCounted(t *testing.T) {
	l := netnstest.Temp(t, netns.LabConfig{})
	neigh := func() (list []netlink.Neigh) {
		within(t, l.Host.NS, func() (err error) {
			list, err = netlink.NeighList(l.Host.Index, netlink.FAMILY_V4)
			return err
		})
		return list
	}
	count := func() [2]uint64 {
		s, err := l.NIC.NS.SNMP()
		if err != nil {
			t.Fatal(err)
		}
		return [2]uint64{s["Icmp"]["InEchos"], s["Icmp"]["OutEchoReps"]}
	}
	if n := neigh(); len(n) != 0 {
		t.Errorf("neighbours before any traffic: %v", n)
	}
	before := count()
	ping(t, l)
	n := neigh()
	if len(n) != 1 || n[0].HardwareAddr.String() != l.NIC.MAC.String() || n[0].State&netlink.NUD_PERMANENT != 0 {
		t.Errorf("neighbours after an echo: %v, want %s learned", n, l.NIC.MAC)
	}
	if after := count(); after != [2]uint64{before[0] + 1, before[1] + 1} {
		t.Errorf("InEchos, OutEchoReps: %v before, %v after one echo", before, after)
	}
}

func TestUpKeepsWhatIsAsAskedAndRebuildsTheRest(t *testing.T) {
	link := func(p netns.Port, fn func(netlink.Link) error) func() error {
		return func() error {
			return p.NS.Do(func() error {
				l, err := netlink.LinkByName(p.Device)
				if err != nil {
					return err
				}
				return fn(l)
			})
		}
	}
	for _, tc := range []struct {
		name   string
		change func(l *netns.Lab, c *netns.LabConfig) error
		kept   bool
	}{
		{"nothing changed", func(*netns.Lab, *netns.LabConfig) error { return nil }, true},
		{"the same in words", func(l *netns.Lab, c *netns.LabConfig) error { c.MTU, c.NIC.Device = 1500, "xs-nic"; return nil }, true},
		{"a device added by somebody", func(l *netns.Lab, c *netns.LabConfig) error { return l.NIC.NS.Do(addVeth("x", "y", "")) }, true},
		{"another MTU asked", func(l *netns.Lab, c *netns.LabConfig) error { c.MTU = 1501; return nil }, false},
		{"another number of queues asked", func(l *netns.Lab, c *netns.LabConfig) error { c.Queues = 7; return nil }, false},
		{"another device name asked", func(l *netns.Lab, c *netns.LabConfig) error { c.Host.Device = "other"; return nil }, false},
		{"another MAC asked", func(l *netns.Lab, c *netns.LabConfig) error {
			c.NIC.MAC = net.HardwareAddr{2, 0, 0, 0, 0, 9}
			return nil
		}, false},
		{"another address asked", func(l *netns.Lab, c *netns.LabConfig) error {
			c.NIC.Addr = netip.MustParsePrefix("10.0.0.9/24")
			return nil
		}, false},
		{"the MTU of one end changed", func(l *netns.Lab, c *netns.LabConfig) error {
			return link(l.Host, func(l netlink.Link) error { return netlink.LinkSetMTU(l, 1400) })()
		}, false},
		{"a device set down", func(l *netns.Lab, c *netns.LabConfig) error { return link(l.NIC, netlink.LinkSetDown)() }, false},
		{"lo set down", func(l *netns.Lab, c *netns.LabConfig) error {
			p := l.NIC
			p.Device = "lo"
			return link(p, netlink.LinkSetDown)()
		}, false},
		{"the address removed", func(l *netns.Lab, c *netns.LabConfig) error {
			return link(l.NIC, func(k netlink.Link) error {
				a, err := netlink.ParseAddr(l.NIC.Addr.String())
				if err != nil {
					return err
				}
				return netlink.AddrDel(k, a)
			})()
		}, false},
		{"the host device exchanged for one of another pair", exchange, false},
		{"the pair removed", func(l *netns.Lab, c *netns.LabConfig) error { return link(l.NIC, netlink.LinkDel)() }, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := unique(t)
			a := up(t, cfg)
			first := inodeOf(t, a.NIC.NS)
			if err := tc.change(a, &cfg); err != nil {
				t.Fatal(err)
			}
			b := up(t, cfg)
			if second := inodeOf(t, b.NIC.NS); (first == second) != tc.kept {
				t.Errorf("namespace %s, then %s; want it kept: %v", first, second, tc.kept)
			}
			if tc.kept && (a.NIC.Index != b.NIC.Index || a.Host.Index != b.Host.Index) {
				t.Errorf("kept, but with other devices: %+v, %+v", a, b)
			}
			ping(t, b)
			down(t, cfg)
		})
	}
}

// exchange puts, in place of the host's device, one that looks like it but
// leads to another device of the NIC's namespace.
func exchange(l *netns.Lab, _ *netns.LabConfig) error {
	host, err := os.Open(l.Host.NS.Path())
	if err != nil {
		return err
	}
	defer host.Close()
	err = l.NIC.NS.Do(func() error {
		return netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: "x", MTU: l.MTU, NumRxQueues: l.Queues, NumTxQueues: l.Queues},
			PeerName:  "y", PeerHardwareAddr: l.Host.MAC, PeerNamespace: netlink.NsFd(host.Fd()),
		})
	})
	if err != nil {
		return err
	}
	return l.Host.NS.Do(func() error {
		old, err := netlink.LinkByName(l.Host.Device)
		if err != nil {
			return err
		}
		y, err := netlink.LinkByName("y")
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(l.Host.Addr.String())
		if err != nil {
			return err
		}
		return errors.Join(
			netlink.LinkSetDown(old), netlink.LinkSetName(old, "old"),
			netlink.LinkSetName(y, l.Host.Device), netlink.LinkSetAlias(y, "xspin lab"),
			netlink.AddrAdd(y, a), netlink.LinkSetUp(y))
	})
}

func TestLeftoversAreHealed(t *testing.T) {
	file := func(t *testing.T, name string) {
		if err := os.WriteFile(filepath.Join("/run/netns", name), nil, 0o444); err != nil {
			t.Fatal(err)
		}
	}
	nothing := func() error { return nil }
	for _, tc := range []struct {
		name string
		make func(t *testing.T, nic, host string)
	}{
		{"only the first namespace, empty", func(t *testing.T, nic, host string) { inNew(t, nic, nothing) }},
		{"only the second namespace, empty", func(t *testing.T, nic, host string) { inNew(t, host, nothing) }},
		{"both namespaces, empty", func(t *testing.T, nic, host string) { inNew(t, nic, nothing); inNew(t, host, nothing) }},
		{"a device without address", func(t *testing.T, nic, host string) {
			inNew(t, nic, addVeth("xs-nic", "xs-host", "xspin lab"))
			inNew(t, host, nothing)
		}},
		{"two ends that are not a pair", func(t *testing.T, nic, host string) {
			inNew(t, nic, addVeth("xs-nic", "x", "xspin lab"))
			inNew(t, host, addVeth("xs-host", "x", "xspin lab"))
		}},
		{"a name without a namespace", func(t *testing.T, nic, host string) { file(t, nic) }},
		{"a namespace and a name without one", func(t *testing.T, nic, host string) { inNew(t, nic, nothing); file(t, host) }},
		{"a whole lab with one name taken away", func(t *testing.T, nic, host string) {
			up(t, config(nic, host)).Close()
			path := filepath.Join("/run/netns", nic)
			if err := errors.Join(unix.Unmount(path, unix.MNT_DETACH), os.Remove(path)); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run("up heals "+tc.name, func(t *testing.T) {
			cfg := unique(t)
			tc.make(t, cfg.NIC.Namespace, cfg.Host.Namespace)
			if l, err := netns.Open(cfg); !errors.Is(err, netns.ErrNotUp) {
				l.Close()
				t.Errorf("Open: got %v, want %v", err, netns.ErrNotUp)
			}
			ping(t, up(t, cfg))
			down(t, cfg)
		})
		t.Run("down removes "+tc.name, func(t *testing.T) {
			cfg := unique(t)
			tc.make(t, cfg.NIC.Namespace, cfg.Host.Namespace)
			down(t, cfg)
		})
	}
}

func TestForeignNamespacesAreNotTouched(t *testing.T) {
	for _, side := range []string{"nic", "host"} {
		t.Run("with somebody's device in "+side, func(t *testing.T) {
			cfg := unique(t)
			name, other := cfg.NIC.Namespace, cfg.Host.Namespace
			if side == "host" {
				name, other = other, name
			}
			inNew(t, name, addVeth("xs-nic", "xs-host", "mine"))
			inNew(t, other, func() error { return nil })
			_, upErr := netns.Up(cfg)
			_, openErr := netns.Open(cfg)
			for call, err := range map[string]error{"Up": upErr, "Open": openErr, "Down": netns.Down(cfg)} {
				if !errors.Is(err, netns.ErrForeign) || !strings.Contains(err.Error(), name) {
					t.Errorf("%s: got %v, want %v naming %s", call, err, netns.ErrForeign, name)
				}
			}
			for _, n := range []string{name, other} {
				ns, err := netns.OpenNamespace(n)
				if err != nil {
					t.Fatalf("removed: %v", err)
				}
				defer ns.Close()
				if n == name {
					within(t, ns, func() error {
						l, err := netlink.LinkByName("xs-nic")
						if err != nil {
							return err
						}
						return netlink.LinkDel(l)
					})
				}
			}
			down(t, cfg) // empty now, so it goes
		})
	}
	t.Run("a file with something in it", func(t *testing.T) {
		cfg := unique(t)
		path := filepath.Join("/run/netns", cfg.NIC.Namespace)
		if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := netns.Up(cfg); !errors.Is(err, netns.ErrForeign) {
			t.Errorf("Up: got %v, want %v", err, netns.ErrForeign)
		}
		if err := netns.Down(cfg); !errors.Is(err, netns.ErrForeign) {
			t.Errorf("Down: got %v, want %v", err, netns.ErrForeign)
		}
		if err := os.Remove(path); err != nil {
			t.Error(err)
		}
	})
}

func TestOpenAttachesOnlyToWhatIsAsked(t *testing.T) {
	cfg := unique(t)
	if _, err := netns.Open(cfg); !errors.Is(err, netns.ErrNotUp) || !strings.Contains(err.Error(), "xspin lab up") {
		t.Errorf("no lab: got %v, want %v and the way out", err, netns.ErrNotUp)
	}
	asked := cfg
	asked.MTU, asked.Queues = 2000, 2
	a := up(t, asked)
	b, err := netns.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if b.MTU != 2000 || b.Queues != 2 || b.NIC.Index != a.NIC.Index || b.NIC.Device != "xs-nic" {
		t.Errorf("got %+v, want what is there", b)
	}
	asked.MTU++
	if _, err := netns.Open(asked); !errors.Is(err, netns.ErrNotUp) || !strings.Contains(err.Error(), "MTU 2000, not 2001") {
		t.Errorf("other MTU: got %v, want %v", err, netns.ErrNotUp)
	}
	for range 2 {
		if err := b.Down(); err != nil {
			t.Error(err)
		}
	}
}

func TestBorrowRemovesOnlyWhatItBuilt(t *testing.T) {
	cfg := unique(t)
	ends := func() (there int) {
		for _, name := range []string{cfg.NIC.Namespace, cfg.Host.Namespace} {
			if ns, err := netns.OpenNamespace(name); err == nil {
				there++
				ns.Close()
			}
		}
		return there
	}
	borrow := func(left int) {
		t.Helper()
		lab, release, err := netns.Borrow(cfg)
		if err != nil || lab == nil || ends() != 2 {
			t.Fatalf("error %v, %d ends", err, ends())
		}
		if err := release(); err != nil {
			t.Error(err)
		}
		if n := ends(); n != left {
			t.Errorf("%d ends are left, want %d", n, left)
		}
	}
	refused := func(left int, why string) {
		t.Helper()
		_, release, err := netns.Borrow(cfg)
		if !errors.Is(err, netns.ErrNotUp) || !strings.Contains(err.Error(), why) || !strings.Contains(err.Error(), "xspin lab up") {
			t.Errorf("error %v, want that %s, and the way out", err, why)
		}
		if release != nil {
			if err := release(); err != nil {
				t.Error(err)
			}
		}
		if n := ends(); n != left {
			t.Errorf("%d ends are left of somebody's lab, of %d", n, left)
		}
	}
	borrow(0)

	mine := up(t, cfg)
	borrow(2)
	set := func(f func(netlink.Link) error) {
		t.Helper()
		if err := mine.NIC.NS.Do(func() error {
			link, err := netlink.LinkByName(mine.NIC.Device)
			if err != nil {
				return err
			}
			return f(link)
		}); err != nil {
			t.Fatal(err)
		}
	}
	set(netlink.LinkSetDown)
	refused(2, mine.NIC.Device+" is down")
	set(netlink.LinkSetUp)
	borrow(2)
	more, err := netlink.ParseAddr("10.9.9.9/24")
	if err != nil {
		t.Fatal(err)
	}
	set(func(l netlink.Link) error { return netlink.AddrAdd(l, more) })
	borrow(2) // an address more is no other lab
	if err := exec.Command("ip", "netns", "delete", cfg.NIC.Namespace).Run(); err != nil {
		t.Fatal(err)
	}
	refused(1, "no namespace")

	slow := cfg
	slow.Path = &impair.Config{Delay: time.Millisecond}
	lab, err := netns.Up(slow)
	if err != nil {
		t.Fatal(err)
	}
	borrow(2)
	if err := lab.Close(); err != nil { // with the relay, which is ours
		t.Fatal(err)
	}
	refused(2, impair.ErrNoRelay.Error())
	if err := netns.Down(slow); err != nil {
		t.Error(err)
	}
}

func TestEndsOfTwoLabsAreNoLab(t *testing.T) {
	a, b := netnstest.Temp(t, netns.LabConfig{}), netnstest.Temp(t, netns.LabConfig{})
	if a.NIC.Index != b.NIC.Index || a.Host.Index != b.Host.Index {
		t.Errorf("the labs differ: %+v, %+v", a, b)
	}
	l, err := netns.Open(config(a.NIC.Namespace, b.Host.Namespace))
	if !errors.Is(err, netns.ErrNotUp) || !strings.Contains(err.Error(), "the peer of xs-nic is not in "+b.Host.Namespace) {
		l.Close()
		t.Errorf("got %v, want %v", err, netns.ErrNotUp)
	}
}

func TestDownNamesProcessesInsideAndLetsThemLive(t *testing.T) {
	cfg := unique(t)
	l := up(t, cfg)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	c := l.NIC.NS.Command(ctx, "sleep", "1000")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	var pids []int
	within(t, l.NIC.NS, func() (err error) { // the caller inside does not count
		pids, err = l.NIC.NS.Pids()
		return err
	})
	if len(pids) != 1 || pids[0] != c.Process.Pid {
		t.Errorf("Pids: %v, want %d", pids, c.Process.Pid)
	}
	var warned []string
	cfg.Warn = func(msg string) { warned = append(warned, msg) }
	down(t, cfg)
	want := fmt.Sprintf("inside %s lose its device: %d", cfg.NIC.Namespace, c.Process.Pid)
	if len(warned) != 1 || !strings.HasSuffix(warned[0], want) {
		t.Errorf("warned %q, want %q", warned, want)
	}
	if err := c.Process.Signal(unix.Signal(0)); err != nil {
		t.Errorf("the process is gone: %v", err)
	}
	within(t, l.NIC.NS, func() error {
		links, err := netlink.LinkList()
		for _, k := range links {
			if k.Type() == "veth" {
				t.Errorf("%s outlived the lab", k.Attrs().Name)
			}
		}
		return err
	})
	cancel()
	_ = c.Wait()
	down(t, cfg) // nothing there is no error
}

func TestConcurrentUpsAgree(t *testing.T) {
	cfg := unique(t)
	labs := make([]*netns.Lab, 6)
	var wg sync.WaitGroup
	for i := range labs {
		wg.Go(func() {
			var err error
			if labs[i], err = netns.Up(cfg); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	var first string
	for _, l := range labs {
		if l == nil {
			continue
		}
		within(t, l.NIC.NS, func() error {
			if got := threadNS(t); first == "" {
				first = got
			} else if got != first {
				t.Errorf("one got %s, another %s", first, got)
			}
			return nil
		})
		l.Close()
	}
	down(t, cfg)
}

func TestUpThatCannotNameBothNamespacesNamesNone(t *testing.T) {
	netnstest.NeedRoot(t)
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), helperEnv+"=full")
	c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
	out, err := c.CombinedOutput()
	if want := "0 names, no space: true"; string(out) != want || err != nil {
		t.Errorf("got %q, %v, want %q", out, err, want)
	}
}

// The process runs out of descriptors at one point after the other, until Up
// comes through.
func TestFailedUpLeavesNothing(t *testing.T) {
	cfg := unique(t)
	down(t, cfg) // whatever is opened once and for all is open now
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &old)
	fds := openFDs(t)
	for spare := 0; ; spare++ {
		// One less: openFDs counts the descriptor that it reads with.
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(fds - 1 + spare), Max: old.Max}); err != nil {
			t.Fatal(err)
		}
		l, err := netns.Up(cfg)
		if e := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); e != nil {
			t.Fatal(e)
		}
		if err == nil {
			if spare < 2 { // a descriptor or two of before may be closed meanwhile
				t.Errorf("Up failed only %d times: the limit does not bite", spare)
			}
			if err := l.Down(); err != nil {
				t.Error(err)
			}
			return
		}
		if !errors.Is(err, unix.EMFILE) {
			t.Errorf("with %d spare descriptors: %v", spare, err)
		}
		wantNoNames(t, cfg)
		if n := openFDs(t); n != fds {
			t.Fatalf("%d descriptors open after %v, %d before", n, err, fds)
		}
	}
}

func TestKilledUpIsHealed(t *testing.T) {
	cfg := unique(t)
	for range 8 {
		c := exec.Command("/proc/self/exe")
		c.Env = append(os.Environ(), helperEnv+"=updown", "XSPIN_TEST_ARGV="+cfg.NIC.Namespace+"\x1f"+cfg.Host.Namespace)
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
		time.Sleep(rand.N(100 * time.Millisecond))
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

func TestUpAndDownKeepNoDescriptors(t *testing.T) {
	cfg := unique(t)
	cycle := func() {
		l := up(t, cfg)
		if err := l.Down(); err != nil {
			t.Fatal(err)
		}
	}
	cycle()
	fds := openFDs(t)
	for range 10 {
		cycle()
	}
	if n := openFDs(t); n != fds {
		t.Errorf("%d descriptors open, %d before", n, fds)
	}
}

func TestALabHasNoMoreQueuesThanANICServes(t *testing.T) {
	for cpus, want := range map[int]int{1: 1, 64: 64, 65: 64, 512: 64} {
		if got := netns.DefaultQueues(cpus); got != want {
			t.Errorf("%d CPUs: %d queues, want %d", cpus, got, want)
		}
	}
}
