// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/internal/capability"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
)

// inside runs fn on a thread in the namespace of a port.
func inside(t *testing.T, p netns.Port, fn func(iface *net.Interface)) {
	t.Helper()
	if err := p.NS.Do(func() error {
		iface, err := net.InterfaceByName(p.Device)
		if err == nil {
			fn(iface)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// foreign attaches a program of somebody else's for the rest of the test.
func foreign(t *testing.T, iface *net.Interface, mode Mode) (id ebpf.ProgramID, detach func()) {
	t.Helper()
	spec, err := bpf.LoadBench()
	if err != nil {
		t.Fatal(err)
	}
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(coll.Close)
	prog := coll.Programs[bpf.BenchProgXspinPass]
	info, err := prog.Info()
	if err != nil {
		t.Fatal(err)
	}
	flags := link.XDPDriverMode
	if mode == Generic {
		flags = link.XDPGenericMode
	}
	l, err := link.AttachXDP(link.XDPOptions{Program: prog, Interface: iface.Index, Flags: flags})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	id, _ = info.ID()
	return id, func() { l.Close() }
}

// attached returns the program on the interface, 0 for none, and its mode.
func attached(t *testing.T, iface *net.Interface) (ebpf.ProgramID, uint32) {
	t.Helper()
	l, err := netlink.LinkByIndex(iface.Index)
	if err != nil {
		t.Fatal(err)
	}
	x := l.Attrs().Xdp
	if x == nil {
		return 0, 0
	}
	return ebpf.ProgramID(x.ProgId), x.AttachMode
}

// says checks that an error wraps target and says all of these.
func says(t *testing.T, err, target error, all ...string) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Errorf("error %v, want one that wraps %q", err, target)
		return
	}
	for _, s := range all {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("%q does not say %q", err, s)
		}
	}
}

func config(iface *net.Interface, mode Mode) Config {
	return Config{Interface: iface, Mode: mode, HPUs: 4, Queues: 2, BufferSize: 2000, MaxBuffers: 1}
}

func TestAttach(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{Queues: 2})
	inside(t, lab.NIC, func(nic *net.Interface) {
		lo, err := net.InterfaceByName("lo")
		if err != nil {
			t.Fatal(err)
		}
		if err := netlink.LinkSetUp(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "lo", Index: lo.Index}}); err != nil {
			t.Fatal(err)
		}
		for _, tt := range []struct {
			name  string
			iface *net.Interface
			ask   Mode
			get   Mode
			kind  uint32 // XDP_ATTACHED_* of linux/if_link.h
			prog  string // of the program
		}{
			{"auto takes native", nic, Auto, Native, 1, bpf.IngressProgXspinIngress},
			{"native", nic, Native, Native, 1, bpf.IngressProgXspinIngress},
			{"generic", nic, Generic, Generic, 2, bpf.IngressProgXspinTrains},
			{"auto falls back to generic", lo, Auto, Generic, 2, bpf.IngressProgXspinTrains},
		} {
			in, err := Attach(config(tt.iface, tt.ask))
			if err != nil {
				t.Fatalf("%s: %v", tt.name, err)
			}
			info, err := in.objs.XspinIngress.Info()
			if err != nil {
				t.Fatal(err)
			}
			want, _ := info.ID()
			if id, kind := attached(t, tt.iface); in.Mode() != tt.get || id != want || kind != tt.kind {
				t.Errorf("%s: mode %v, program %d in mode %d; want %v, %d, %d", tt.name, in.Mode(), id, kind, tt.get, want, tt.kind)
			}
			// One XsPIN does not put out another.
			_, err = Attach(config(tt.iface, tt.ask))
			says(t, err, ErrOccupied, tt.prog, fmt.Sprint(want), tt.get.String(), "another XsPIN runs here")
			for range 2 {
				if err := in.Detach(); err != nil {
					t.Errorf("%s: %v", tt.name, err)
				}
				if id, _ := attached(t, tt.iface); id != 0 {
					t.Errorf("%s: program %d is still there", tt.name, id)
				}
				// HPUs still give their buffers back.
				in.Share().Dequeued[1][3]++
				in.Queue(1).Done[255]++
				in.Buckets()[bpf.MaxBuckets-1]++
				if _, err := in.Stats(); err != nil {
					t.Errorf("%s: %v", tt.name, err)
				}
			}
			for range 2 {
				if err := in.Close(); err != nil {
					t.Errorf("%s: %v", tt.name, err)
				}
			}
		}
		_, err = Attach(config(lo, Native))
		says(t, err, ErrNoNative, "lo", "native", "generic mode works")

		// Close takes the program away as well.
		in, err := Attach(config(nic, Native))
		if err != nil {
			t.Fatal(err)
		}
		if err := in.Close(); err != nil {
			t.Error(err)
		}
		if id, _ := attached(t, nic); id != 0 {
			t.Errorf("program %d is still there", id)
		}
	})
}

// attachOnly attaches without a look at what is there.
func attachOnly(t *testing.T, cfg Config) error {
	t.Helper()
	in, err := Load(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	return in.attachXDP(cfg.Mode)
}

// A program of somebody else's is named, and stays.
func TestForeignProgramsAreNeverEvicted(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	inside(t, lab.NIC, func(nic *net.Interface) {
		for _, theirs := range []Mode{Native, Generic} {
			id, detach := foreign(t, nic, theirs)
			for _, ours := range []Mode{Auto, Native, Generic} {
				_, err := Attach(config(nic, ours))
				says(t, err, ErrOccupied, nic.Name, `"xspin_pass"`, fmt.Sprintf("id %d", id), theirs.String()+" mode", "detach it first")

				// Somebody may come between the check and the attachment.
				if ours != Auto {
					err = attachOnly(t, config(nic, ours))
					says(t, err, ErrOccupied, nic.Name, ours.String())
				}
				if now, _ := attached(t, nic); now != id {
					t.Fatalf("%v before %v: program %d is attached, want %d", theirs, ours, now, id)
				}
			}
			detach()
			if err := Check(nic); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestAttachRefuses(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	inside(t, lab.NIC, func(nic *net.Interface) {
		for _, tt := range []struct {
			name   string
			change func(*Config)
			want   []string
		}{
			{"no HPU", func(c *Config) { c.HPUs = 0 }, []string{"0 HPUs", "1 to 64"}},
			{"too many HPUs", func(c *Config) { c.HPUs = 65 }, []string{"65 HPUs", "1 to 64"}},
			{"no queue", func(c *Config) { c.Queues = 0 }, []string{nic.Name, "0 receive queues", "1 to 64"}},
			{"too many queues", func(c *Config) { c.Queues = 65 }, []string{nic.Name, "65 receive queues", "1 to 64"}},
			{"no buffer size", func(c *Config) { c.BufferSize = 0 }, []string{"0 bytes"}},
			{"no buffers", func(c *Config) { c.MaxBuffers = 0 }, []string{"0 for a frame"}},
			{"an interface that is not there", func(c *Config) { c.Interface = &net.Interface{Index: 9999, Name: "gone"} }, []string{"attach to gone"}},
		} {
			cfg := config(nic, Auto)
			tt.change(&cfg)
			_, err := Attach(cfg)
			if err == nil {
				t.Fatalf("%s: attached", tt.name)
			}
			for _, s := range tt.want {
				if !strings.Contains(err.Error(), s) {
					t.Errorf("%s: %q does not say %q", tt.name, err, s)
				}
			}
		}
		l, err := netlink.LinkByIndex(nic.Index)
		if err != nil {
			t.Fatal(err)
		}
		if err := netlink.LinkSetDown(l); err != nil {
			t.Fatal(err)
		}
		if _, err := Attach(config(nic, Auto)); err == nil || !strings.Contains(err.Error(), nic.Name+": the interface is down: `ip link set "+nic.Name+" up`") {
			t.Errorf("interface down: %v", err)
		}
		if id, _ := attached(t, nic); id != 0 {
			t.Errorf("program %d was attached", id)
		}
	})
}

func TestCheckNamesTheMissingCapability(t *testing.T) {
	netnstest.NeedRoot(t)
	lo := &net.Interface{Index: 1, Name: "lo"} // looked at by nobody
	for _, tt := range []struct {
		caps []capability.Cap
		want string
	}{
		{[]capability.Cap{capability.NetAdmin}, "CAP_NET_ADMIN:"},
		{[]capability.Cap{capability.NetRaw}, "CAP_NET_RAW:"},
		{[]capability.Cap{capability.BPF, capability.SysAdmin}, "CAP_BPF:"},
		{[]capability.Cap{capability.NetAdmin, capability.NetRaw, capability.Perfmon, capability.SysAdmin}, "CAP_NET_ADMIN, CAP_NET_RAW, CAP_PERFMON:"},
	} {
		without(t, func() { says(t, Check(lo), capability.ErrMissing, "attach to lo", tt.want) }, tt.caps...)
	}
}

// More metadata than any kernel takes stands for a kernel that takes less.
func TestMissingFeature(t *testing.T) {
	netnstest.NeedRoot(t)
	if err := haveMetadata(bpf.MetaSize); err != nil {
		t.Error(err)
	}
	err := haveMetadata(1024)
	says(t, err, ErrKernel, "1024 bytes of XDP metadata", "invalid argument", "Linux 6.9")
	if !errors.Is(err, unix.EINVAL) {
		t.Errorf("%v hides the errno", err)
	}
}

func TestSocketsAreChecked(t *testing.T) {
	netnstest.NeedRoot(t)
	tester, err := newTester(&matcher.Table{}, nil, Config{Mode: Native, HPUs: 2, Queues: 2, BufferSize: 2000, MaxBuffers: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer tester.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if err := tester.in.SetSocket(1, 1, int(null.Fd())); err == nil || !strings.Contains(err.Error(), "HPU 1 on queue 1") {
		t.Errorf("a file that is no socket: %v", err)
	}
	for range 2 {
		if err := tester.in.ClearSockets(); err != nil {
			t.Error(err)
		}
	}
}

func TestAttachLeaksNoDescriptors(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	inside(t, lab.NIC, func(nic *net.Interface) {
		round := func() {
			in, err := Attach(config(nic, Auto))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := Attach(config(nic, Auto)); err == nil {
				t.Error("attached twice")
			}
			if err := attachOnly(t, config(nic, Native)); err == nil {
				t.Error("attached twice")
			}
			inj, err := NewInjector(nic)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := Queues(nic); err != nil {
				t.Error(err)
			}
			if err := errors.Join(inj.Close(), in.Close()); err != nil {
				t.Error(err)
			}
		}
		round() // what is opened once for all
		before := descriptors(t)
		for range 5 {
			round()
		}
		if after := descriptors(t); after != before {
			t.Errorf("%d descriptors after five rounds, %d before", after, before)
		}
	})
}

func TestQueues(t *testing.T) {
	for _, n := range []int{1, 3} {
		lab := netnstest.Temp(t, netns.LabConfig{Queues: n})
		inside(t, lab.NIC, func(nic *net.Interface) {
			if got, err := Queues(nic); err != nil || got != n {
				t.Errorf("%d queues, %v; want %d", got, err, n)
			}
			lo, err := net.InterfaceByName("lo")
			if err != nil {
				t.Fatal(err)
			}
			if got, err := Queues(lo); err != nil || got != 1 { // its driver has no channels
				t.Errorf("%s: %d queues, %v", lo.Name, got, err)
			}
			if got, err := Queues(&net.Interface{Index: 9999, Name: "gone"}); err == nil || !strings.Contains(err.Error(), "queues of gone") {
				t.Errorf("an interface that is not there: %d, %v", got, err)
			}
		})
	}
}
