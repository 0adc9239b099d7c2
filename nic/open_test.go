// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/internal/capability"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
)

// tryOpen opens a NIC on the NIC's end, closes it, and returns the error.
func tryOpen(t testing.TB, lab *netns.Lab, cfg nic.Config) error {
	t.Helper()
	if cfg.Interface == "" {
		cfg.Interface = lab.NIC.Device
	}
	var n *nic.NIC
	err := lab.NIC.NS.Do(func() (err error) {
		n, err = nic.Open(cfg)
		return err
	})
	if err == nil {
		if cerr := n.Close(); cerr != nil {
			t.Error(cerr)
		}
	}
	return err
}

// attached returns the id of the XDP program on the NIC's end, 0 for none.
func attached(t testing.TB, lab *netns.Lab) (id uint32) {
	t.Helper()
	err := lab.NIC.NS.Do(func() error {
		l, err := netlink.LinkByIndex(lab.NIC.Index)
		if err == nil && l.Attrs().Xdp != nil && l.Attrs().Xdp.Attached {
			id = l.Attrs().Xdp.ProgId
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// refused checks an error against what it must say.
func refused(t testing.TB, err error, says ...string) {
	t.Helper()
	if err == nil {
		t.Error("no error")
		return
	}
	for _, s := range says {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("the error does not say %q: %v", s, err)
		}
	}
}

func TestOpenRefusesBadConfigurations(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	for _, tc := range []struct {
		name string
		cfg  nic.Config
		says []string
	}{
		{"no such interface", nic.Config{Interface: "nope"}, []string{`"nope"`, "no such network interface"}},
		{"ring is no power of two", nic.Config{Ring: 1000}, []string{"1000", "power of two"}},
		{"ring too small", nic.Config{Ring: 32}, []string{"32", "64"}},
		{"ring too large", nic.Config{Ring: 1 << 16}, []string{"65536", "32768"}},
		{"negative ring", nic.Config{Ring: -64}, []string{"-64"}},
		{"negative HPUs", nic.Config{HPUs: -1}, []string{"-1 HPUs", "1 to 64"}},
		{"too many HPUs", nic.Config{HPUs: 65}, []string{"65 HPUs", "1 to 64"}},
		{"XDP mode that does not exist", nic.Config{Mode: 9}, []string{"mode 9", "Generic"}},
		{"more workers than HPUs", nic.Config{HPUs: 2, Workers: 3}, []string{"3 workers", "1 to 2"}},
		{"negative workers", nic.Config{Workers: -1}, []string{"-1 workers"}},
		{"negative time limit", nic.Config{Limit: -1}, []string{"negative"}},
		{"time limit too short", nic.Config{Limit: 1000}, []string{"1µs", "1ms"}},
		{"CPU that is not there", nic.Config{CPUs: []int{4095}}, []string{"4095"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			refused(t, tryOpen(t, lab, tc.cfg), append(tc.says, "open NIC")...)
			if id := attached(t, lab); id != 0 {
				t.Errorf("program %d is attached", id)
			}
		})
	}
	// What is just allowed.
	for _, cfg := range []nic.Config{{Ring: 64}, {Ring: 1 << 15, HPUs: 1}, {HPUs: 64, Ring: 64}, {HPUs: 2, Workers: 2}} {
		if err := tryOpen(t, lab, cfg); err != nil {
			t.Errorf("ring %d, %d HPUs, %d workers: %v", cfg.Ring, cfg.HPUs, cfg.Workers, err)
		}
	}
	err := lab.NIC.NS.Do(func() error { _, err := nic.Open(nic.Config{}); return err })
	refused(t, err, "no interface")
}

func TestOpenRefusesInterfaceThatIsDown(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	set := func(f func(netlink.Link) error) {
		err := lab.NIC.NS.Do(func() error {
			l, err := netlink.LinkByIndex(lab.NIC.Index)
			if err != nil {
				return err
			}
			return f(l)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	set(netlink.LinkSetDown)
	refused(t, tryOpen(t, lab, nic.Config{Hook: nic.HookXDP}), lab.NIC.Device, "down", "ip link set")
	set(netlink.LinkSetUp)
	if err := tryOpen(t, lab, nic.Config{}); err != nil {
		t.Error(err)
	}
}

func TestOpenNeverEvictsAnotherProgram(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	spec, err := bpf.LoadBench()
	if err != nil {
		t.Fatal(err)
	}
	spec.Programs = map[string]*ebpf.ProgramSpec{bpf.BenchProgXspinPass: spec.Programs[bpf.BenchProgXspinPass]}
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatal(err)
	}
	defer coll.Close()
	for _, foreign := range []struct {
		name string
		flag link.XDPAttachFlags
	}{{"native", link.XDPDriverMode}, {"generic", link.XDPGenericMode}} {
		t.Run(foreign.name, func(t *testing.T) {
			var l link.Link
			err := lab.NIC.NS.Do(func() (err error) {
				l, err = link.AttachXDP(link.XDPOptions{Program: coll.Programs[bpf.BenchProgXspinPass], Interface: lab.NIC.Index, Flags: foreign.flag})
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			id := attached(t, lab)
			for _, mode := range []loader.Mode{loader.Auto, loader.Native, loader.Generic} {
				err := tryOpen(t, lab, nic.Config{Hook: nic.HookXDP, Mode: mode})
				refused(t, err, lab.NIC.Device, bpf.BenchProgXspinPass, fmt.Sprintf("id %d", id), foreign.name)
				if !errors.Is(err, loader.ErrOccupied) {
					t.Errorf("%v mode: %v is no %v", mode, err, loader.ErrOccupied)
				}
			}
			if now := attached(t, lab); now != id || id == 0 {
				t.Errorf("program %d is attached, it was %d", now, id)
			}
			ping(t, lab, "-c", "1")
		})
	}
	if err := tryOpen(t, lab, nic.Config{}); err != nil {
		t.Errorf("with the other program gone: %v", err)
	}
}

func TestSecondNICOnAnInterfaceIsRefused(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{})
	c := run(t, n, nic.ContextSpec{Name: "icmp", Rulesets: sets(matcher.ICMPEcho()), Handlers: handle(echo)})
	err := tryOpen(t, lab, nic.Config{})
	refused(t, err, "another XsPIN runs here", lab.NIC.Device)
	if !errors.Is(err, unix.EBUSY) {
		t.Errorf("%v is no %v", err, unix.EBUSY)
	}
	ping(t, lab, "-c", "10", "-i", "0.002")
	eventually(t, "the first one goes on", func() bool { return c.Stats().Handled == 10 })
}

// without runs a function on a thread that lacks capabilities.
func without(caps []int, fn func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var all [2]unix.CapUserData
	if err := unix.Capget(&hdr, &all[0]); err != nil {
		return err
	}
	less := all
	for _, c := range caps {
		less[c/32].Effective &^= 1 << (c % 32)
	}
	if err := unix.Capset(&hdr, &less[0]); err != nil {
		return err
	}
	defer unix.Capset(&hdr, &all[0])
	return fn()
}

func TestOpenNamesMissingCapabilities(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	for _, tc := range []struct {
		missing string
		caps    []int
	}{
		{"CAP_NET_ADMIN", []int{unix.CAP_NET_ADMIN}},
		{"CAP_NET_RAW", []int{unix.CAP_NET_RAW}},
		{"CAP_BPF", []int{unix.CAP_BPF, unix.CAP_SYS_ADMIN}},
		{"CAP_PERFMON", []int{unix.CAP_PERFMON, unix.CAP_SYS_ADMIN}},
		{"CAP_IPC_LOCK", []int{unix.CAP_IPC_LOCK}},
	} {
		t.Run(tc.missing, func(t *testing.T) {
			if tc.missing == "CAP_IPC_LOCK" {
				var lim unix.Rlimit
				if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim); err != nil {
					t.Fatal(err)
				}
				small := lim
				small.Cur = 1 << 16
				if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &small); err != nil {
					t.Fatal(err)
				}
				defer unix.Setrlimit(unix.RLIMIT_MEMLOCK, &lim)
			}
			var n *nic.NIC
			err := lab.NIC.NS.Do(func() error {
				return without(tc.caps, func() (err error) {
					n, err = nic.Open(nic.Config{Interface: lab.NIC.Device})
					return err
				})
			})
			if err == nil {
				n.Close()
			}
			refused(t, err, tc.missing)
			if !errors.Is(err, capability.ErrMissing) {
				t.Errorf("%v is no %v", err, capability.ErrMissing)
			}
			if id := attached(t, lab); id != 0 {
				t.Errorf("program %d is attached", id)
			}
		})
	}
	if err := tryOpen(t, lab, nic.Config{}); err != nil {
		t.Errorf("with all capabilities: %v", err)
	}
}

// The loopback device has no XDP of its own.
func TestInterfaceWithoutNativeXDP(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	err := tryOpen(t, lab, nic.Config{Interface: "lo", Mode: loader.Native})
	refused(t, err, "lo", "native", "generic")
	if !errors.Is(err, loader.ErrNoNative) {
		t.Errorf("%v is no %v", err, loader.ErrNoNative)
	}
	var log bytes.Buffer
	if err := tryOpen(t, lab, nic.Config{Interface: "lo", Logger: slog.New(slog.NewTextHandler(&log, nil))}); err != nil {
		t.Error(err)
	}
	if !strings.Contains(log.String(), "generic mode") || !strings.Contains(log.String(), "interface=lo") {
		t.Errorf("the log does not say that generic mode is used: %q", log.String())
	}
}

func TestInstallRefusesBadContexts(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 4, Ring: 256})
	good := func() nic.ContextSpec {
		return nic.ContextSpec{Name: "good", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(echo)}
	}
	slmp, flow := matcher.SLMP(), matcher.UDPPort(8)
	flow.Format = "flow"
	unknown := matcher.UDPPort(7)
	unknown.Format = "nothing"
	for _, tc := range []struct {
		name string
		bad  func(*nic.ContextSpec)
		is   error
		says []string
	}{
		{"no name", func(s *nic.ContextSpec) { s.Name = "" }, nil, []string{"name: ", "needs a name"}},
		{"no ruleset", func(s *nic.ContextSpec) { s.Rulesets = nil }, nil, []string{"rulesets: ", "no packet would ever match"}},
		{"no handler", func(s *nic.ContextSpec) { s.Handlers.Payload = nil }, nil, []string{"no payload handler"}},
		{"rule beyond the first 512 bytes", func(s *nic.ContextSpec) {
			s.Rulesets[0].Rules[0].Index = matcher.MaxIndex + 1
		}, matcher.ErrRule, []string{"128"}},
		{"nine rules", func(s *nic.ContextSpec) {
			s.Rulesets[0].Rules = make([]matcher.Rule, matcher.MaxRules+1)
		}, matcher.ErrRuleset, []string{"9"}},
		{"two formats", func(s *nic.ContextSpec) { s.Rulesets = sets(slmp, flow) }, nil, []string{"slmp", "flow"}},
		{"unknown format", func(s *nic.ContextSpec) { s.Rulesets = sets(unknown) }, nil, []string{"nothing", "slmp"}},
		{"policy that does not exist", func(s *nic.ContextSpec) { s.Policy = 7 }, nil, []string{"policy: 7", "ByPacket"}},
		{"name with a control character", func(s *nic.ContextSpec) { s.Name = "a\nb" }, nil, []string{"printed"}},
		{"core mask naming only HPUs that are not there", func(s *nic.ContextSpec) { s.CoreMask = 0xf0 }, nil, []string{`hpus: "4-7"`, "0 to 3"}},
		{"core mask naming some that are not there", func(s *nic.ContextSpec) { s.CoreMask = 0x18 }, nil, []string{`hpus: "3-4"`, "0 to 3"}},
		{"negative credits", func(s *nic.ContextSpec) { s.Credits = -1 }, nil, []string{"-1"}},
		{"more credits than the ring", func(s *nic.ContextSpec) { s.Credits = 257 }, nic.ErrCredit, []string{"256", "257", "Ring"}},
		{"negative messages", func(s *nic.ContextSpec) { s.Messages = -1 }, nil, []string{"-1"}},
		{"too many messages", func(s *nic.ContextSpec) { s.Messages = nic.MaxBuckets + 1 }, nil, []string{fmt.Sprint(nic.MaxBuckets)}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			spec := good()
			tc.bad(&spec)
			_, err := n.Install(spec)
			refused(t, err, append(tc.says, "install", lab.NIC.Device)...)
			if tc.is != nil && !errors.Is(err, tc.is) {
				t.Errorf("%v is no %v", err, tc.is)
			}
		})
	}

	// Nothing of all that has stayed.
	spec := good()
	spec.Credits = 256 - 8
	spec.CoreMask = 0xf
	spec.Format, spec.Messages = matcher.FormatByName("flow"), nic.MaxBuckets
	c := run(t, n, spec)
	roundTrip(t, dialUDP(t, lab, 7), []byte("good"))

	tight := good()
	tight.Rulesets = sets(matcher.UDPPort(8))
	tight.Credits = 9
	if _, err := n.Install(tight); !errors.Is(err, nic.ErrCredit) {
		t.Errorf("9 credits of 8 left: %v", err)
	}
	tight.Credits, tight.Format = 8, matcher.FormatByName("flow")
	_, err := n.Install(tight)
	refused(t, err, "message buckets")
	tight.Format = nil
	second := run(t, n, tight)
	roundTrip(t, dialUDP(t, lab, 8), []byte("the last credits"))
	none := good()
	if _, err := n.Install(none); !errors.Is(err, nic.ErrCredit) {
		t.Errorf("a share of nothing: %v", err)
	}
	roundTrip(t, dialUDP(t, lab, 7), []byte("still good"))
	for _, c := range []*nic.Context{c, second} {
		if err := n.Remove(c); err != nil {
			t.Error(err)
		}
	}
}

func TestTableHasRoomFor256Rulesets(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1})
	ports := func(first, count int) (all []matcher.Ruleset) {
		for p := range count {
			all = append(all, matcher.UDPPort(uint16(first+p)))
		}
		return all
	}
	tooMany, err := n.Install(nic.ContextSpec{Name: "257", Rulesets: ports(1000, 257), Handlers: handle(echo)})
	if err == nil {
		err = n.Activate(tooMany)
	}
	if !errors.Is(err, nic.ErrTable) {
		t.Errorf("257 rulesets: %v", err)
	}
	refused(t, err, "257", "256")
	if tooMany != nil {
		if err := n.Remove(tooMany); err != nil {
			t.Error(err)
		}
	}

	full := run(t, n, nic.ContextSpec{Name: "256", Rulesets: ports(1000, 256), Handlers: handle(echo)})
	for _, port := range []uint16{1000, 1128, 1255} {
		roundTrip(t, dialUDP(t, lab, port), []byte("full"))
	}
	one, err := n.Install(nic.ContextSpec{Name: "one more", Rulesets: ports(2000, 1), Handlers: handle(echo)})
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Activate(one); !errors.Is(err, nic.ErrTable) {
		t.Errorf("one ruleset more: %v", err)
	}
	roundTrip(t, dialUDP(t, lab, 1255), []byte("still full"))
	if err := n.Remove(full); err != nil {
		t.Error(err)
	}
	if err := n.Activate(one); err != nil {
		t.Errorf("after room was made: %v", err)
	}
	roundTrip(t, dialUDP(t, lab, 2000), []byte("one"))

	taken := run(t, n, nic.ContextSpec{Name: "at 5", Rulesets: ports(3000, 2), First: 5, Handlers: handle(echo)})
	if r := taken.Rulesets(); len(r) != 2 || r[0] != 5 || r[1] != 6 {
		t.Errorf("rulesets from 5 on have numbers %v", r)
	}
	clash, err := n.Install(nic.ContextSpec{Name: "clash", Rulesets: ports(4000, 2), First: 4, Handlers: handle(echo)})
	if err != nil {
		t.Fatal(err)
	}
	refused(t, n.Activate(clash), "5", `"at 5"`)
	_, err = n.Install(nic.ContextSpec{Name: "high", Rulesets: ports(5000, 2), First: 255, Handlers: handle(echo)})
	refused(t, err, "255 to 256", "0 to 255")
}

// Numbers of contexts and rulesets are used again; what the program counted for
// those who had them before is not theirs.
func TestCountersOfNumbersThatAreUsedAgainStartAtZero(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1})
	spec := nic.ContextSpec{Name: "first", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(echo)}
	first := run(t, n, spec)
	for range 5 {
		roundTrip(t, dialUDP(t, lab, 7), []byte("hello"))
	}
	if err := n.Remove(first); err != nil {
		t.Fatal(err)
	}
	spec.Name = "second"
	second := run(t, n, spec)
	if second.ID() != first.ID() || second.Rulesets()[0] != 0 {
		t.Fatalf("context %d and ruleset %d: the test needs the same numbers again", second.ID(), second.Rulesets()[0])
	}
	roundTrip(t, dialUDP(t, lab, 7), []byte("hello"))
	s, err := n.Stats()
	if err != nil {
		t.Fatal(err)
	}
	if c := s.Contexts[0]; c.Rulesets[0].Matched != 1 || c.Refused != 0 {
		t.Errorf("matched %d and refused %d, want 1 and 0", c.Rulesets[0].Matched, c.Refused)
	}
}

func TestClosedNICRefusesEverything(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1})
	spec := nic.ContextSpec{Name: "echo", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(echo)}
	c := run(t, n, spec)
	for range 2 {
		if err := n.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if id := attached(t, lab); id != 0 {
		t.Errorf("program %d is still attached", id)
	}
	_, err := n.Install(spec)
	for what, err := range map[string]error{"install": err, "activate": n.Activate(c), "remove": n.Remove(c)} {
		if !errors.Is(err, nic.ErrClosed) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := n.Transmit(make([]byte, 60)); err == nil {
		t.Error("a closed NIC transmits")
	}
	if _, ok := <-n.Events(); ok {
		t.Error("an event of a closed NIC")
	}
	if _, ok := <-n.Events(); ok {
		t.Error("the channel of events is open")
	}
}
