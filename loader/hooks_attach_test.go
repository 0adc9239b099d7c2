// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/internal/capability"
	"github.com/xspin/xspin/internal/ethtool"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
)

// must ends the test if there is an error.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// loaded is an Ingress that is attached to nothing yet.
func loaded(t *testing.T, iface *net.Interface, mode Mode) *Ingress {
	t.Helper()
	in, err := Load(config(iface, mode))
	must(t, err)
	t.Cleanup(func() { in.Close() })
	return in
}

// Auto is open until a program was attached, not just tried.
func TestAttachmentsThatFailDecideNoMode(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	inside(t, lab.NIC, func(*net.Interface) {
		lo, err := net.InterfaceByName("lo")
		must(t, err)
		must(t, netlink.LinkSetUp(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "lo", Index: lo.Index}}))
		in := loaded(t, lo, Auto)
		says(t, in.attachXDP(Native), ErrNoNative, "lo")
		if m, counting := in.Mode(), atomic.LoadUint32(in.counting); m != Auto || counting != 0 {
			t.Errorf("mode %v, counting is %d", m, counting)
		}
		if err := in.AttachXDP(); err != nil || in.Mode() != Generic {
			t.Errorf("mode %v: %v", in.Mode(), err)
		}
	})
}

// Until the mode is known, several CPUs may run the program that is loaded.
func TestProgramsOfUnknownModesCountWithAtomics(t *testing.T) {
	for _, tt := range []struct {
		mode            Mode
		tap             bool
		atomic, generic uint32
	}{
		{Auto, false, 1, 0},
		{Native, false, 0, 0},
		{Native, true, 1, 0},
		{Generic, false, 1, 1},
	} {
		in := &Ingress{cfg: Config{HPUs: 1, Queues: 1, BufferSize: 2000, MaxBuffers: 1}, tap: tt.tap}
		spec, err := in.spec(bpf.IngressProgXspinUser, tt.mode)
		must(t, err)
		var c bpf.Config
		must(t, spec.Variables[bpf.IngressVarConfig].Get(&c))
		if c.Atomic != tt.atomic || c.Generic != tt.generic {
			t.Errorf("%v, a tap: %v: atomic %d, generic %d; want %d, %d", tt.mode, tt.tap, c.Atomic, c.Generic, tt.atomic, tt.generic)
		}
	}
}

func TestCheckTC(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	inside(t, lab.NIC, func(nic *net.Interface) {
		l, err := netlink.LinkByIndex(nic.Index)
		must(t, err)
		tun := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "xs-tun"}, Mode: netlink.TUNTAP_MODE_TUN}
		must(t, netlink.LinkAdd(tun))
		packets, err := net.InterfaceByName("xs-tun")
		must(t, err)
		for _, tt := range []struct {
			name  string
			iface *net.Interface
			want  []string // none: it can be
		}{
			{"an interface that is up", nic, nil},
			{"one that has no Ethernet headers", packets, []string{"attach to xs-tun (tc)", "no Ethernet headers"}},
			{"one that is not there", &net.Interface{Index: 9999, Name: "gone"}, []string{"attach to gone (tc)"}},
		} {
			for what, err := range map[string]error{"check": CheckTC(tt.iface), "attach": attachTC(t, tt.iface)} {
				if (err == nil) != (tt.want == nil) {
					t.Errorf("%s, %s: %v", tt.name, what, err)
				}
				for _, s := range tt.want {
					if err != nil && !strings.Contains(err.Error(), s) {
						t.Errorf("%s, %s: %q does not say %q", tt.name, what, err, s)
					}
				}
			}
		}
		// Unlike at xdp, others are in nobody's way, and there need not be a carrier.
		foreign(t, nic, Native)
		foreignTC(t, nic, nil, returns(tcxNext)...)
		must(t, netlink.LinkSetDown(l))
		for what, err := range map[string]error{"check": CheckTC(nic), "attach": attachTC(t, nic)} {
			if err != nil {
				t.Errorf("an interface that is down, with programs: %s: %v", what, err)
			}
		}
		without(t, func() { says(t, CheckTC(nic), capability.ErrMissing, "attach to "+nic.Name, "CAP_BPF, CAP_PERFMON:") }, capability.BPF, capability.Perfmon, capability.SysAdmin)
		without(t, func() { must(t, CheckTC(nic)) }, capability.NetRaw)
	})
}

// attachTC attaches to an interface that may not be there, and detaches.
func attachTC(t *testing.T, iface *net.Interface) error {
	t.Helper()
	at := *iface
	lo, err := net.InterfaceByName("lo")
	must(t, err)
	in, err := Load(config(lo, Auto))
	must(t, err)
	defer in.Close()
	in.cfg.Interface = &at
	return in.AttachTC(Last)
}

// returns is a program that does nothing else.
func returns(verdict int32) asm.Instructions {
	return asm.Instructions{asm.Mov.Imm(asm.R0, verdict), asm.Return()}
}

// foreignTC attaches a program of somebody else's at tc, for the rest of the test.
func foreignTC(t *testing.T, iface *net.Interface, anchor link.Anchor, ins ...asm.Instruction) (id ebpf.ProgramID, detach func()) {
	t.Helper()
	prog := schedCLS(t, ins...)
	l, err := link.AttachTCX(link.TCXOptions{Program: prog, Interface: iface.Index, Attach: ebpf.AttachTCXIngress, Anchor: anchor})
	must(t, err)
	t.Cleanup(func() { l.Close() })
	return programID(t, prog), func() { l.Close() }
}

func programID(t *testing.T, prog *ebpf.Program) ebpf.ProgramID {
	t.Helper()
	info, err := prog.Info()
	must(t, err)
	id, _ := info.ID()
	return id
}

// atTC returns the programs at tc, as they are called.
func atTC(t *testing.T, iface *net.Interface) (ids []ebpf.ProgramID) {
	t.Helper()
	q, err := link.QueryPrograms(link.QueryOptions{Target: iface.Index, Attach: ebpf.AttachTCXIngress})
	must(t, err)
	for _, p := range q.Programs {
		ids = append(ids, p.ID)
	}
	return ids
}

// Ours stands where it was asked to, and others stay where they are.
func TestOrderAtTC(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	inside(t, lab.NIC, func(nic *net.Interface) {
		a, _ := foreignTC(t, nic, link.Tail(), returns(tcxNext)...)
		b, _ := foreignTC(t, nic, link.Tail(), returns(tcxNext)...)
		in := loaded(t, nic, Native)
		ours := func() ebpf.ProgramID { return programID(t, in.tc.XspinIngressTc) }
		for _, tt := range []struct {
			name  string
			order Order
			want  func() []ebpf.ProgramID
		}{
			{"last", Last, func() []ebpf.ProgramID { return []ebpf.ProgramID{a, b, ours()} }},
			{"first", First, func() []ebpf.ProgramID { return []ebpf.ProgramID{ours(), a, b} }},
		} {
			for range 2 { // idempotent
				must(t, in.AttachTC(tt.order))
				if got := atTC(t, nic); !slices.Equal(got, tt.want()) || !in.Attached(TC) {
					t.Errorf("%s: programs %d, want %d", tt.name, got, tt.want())
				}
			}
			// Somebody who comes later and asks for it is last.
			c, detach := foreignTC(t, nic, link.Tail(), returns(tcxNext)...)
			if got, want := atTC(t, nic), append(tt.want(), c); !slices.Equal(got, want) {
				t.Errorf("%s, and one later: programs %d, want %d", tt.name, got, want)
			}
			detach()
			for range 2 {
				must(t, in.DetachHook(TC))
				if got := atTC(t, nic); !slices.Equal(got, []ebpf.ProgramID{a, b}) || in.Attached(TC) {
					t.Errorf("%s, detached: programs %d, want %d", tt.name, got, []ebpf.ProgramID{a, b})
				}
			}
		}
	})
}

// Close takes away the programs at both hooks. There is no second XsPIN at tc.
func TestCloseDetachesBothHooks(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	inside(t, lab.NIC, func(nic *net.Interface) {
		in, other := loaded(t, nic, Native), loaded(t, nic, Native)
		must(t, errors.Join(in.AttachXDP(), in.AttachTC(Last)))
		for _, err := range []error{other.AttachTC(First), CheckTC(nic)} {
			if !errors.Is(err, ErrOccupied) || !strings.Contains(err.Error(), "another XsPIN") {
				t.Errorf("a second program of XsPIN at tc: %v", err)
			}
		}
		if id, _ := attached(t, nic); id == 0 || len(atTC(t, nic)) != 1 {
			t.Errorf("program %d at xdp, %d at tc", id, atTC(t, nic))
		}
		for range 2 {
			must(t, in.Close())
			if id, _ := attached(t, nic); id != 0 || len(atTC(t, nic)) != 0 {
				t.Errorf("closed: program %d at xdp, %d at tc", id, atTC(t, nic))
			}
		}
		must(t, other.AttachTC(First))
	})
}

// A program at xdp takes TSO from the far end of a veth pair until it is gone; one at tc takes nothing.
func TestFarEndKeepsItsOffloadsWithoutXDP(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	var in *Ingress
	inside(t, lab.NIC, func(nic *net.Interface) { in = loaded(t, nic, Native) })
	all := []ethtool.Feature{ethtool.TxChecksum, ethtool.TSO, ethtool.GSO, ethtool.GRO, ethtool.UDPSegment}
	features := func() (on [5]bool) {
		inside(t, lab.Host, func(host *net.Interface) {
			for i, f := range all {
				is, err := f.Enabled(host.Name)
				must(t, err)
				on[i] = is
			}
		})
		return on
	}
	before := features()
	if !before[1] || !before[4] {
		t.Fatalf("%v is %v to begin with", all, before)
	}
	for round := range 2 { // the second time programs are loaded
		for _, step := range []struct {
			name string
			do   func() error
			same bool
		}{
			{"attached at tc", func() error { return in.AttachTC(Last) }, true},
			{"at xdp as well", in.AttachXDP, false},
			{"at tc again", func() error { return in.DetachHook(XDP) }, true},
			{"detached", in.Detach, true},
			{"at xdp alone", in.AttachXDP, false},
			{"at none", in.Detach, true},
		} {
			must(t, step.do())
			if now := features(); (now == before) != step.same || now[1] == !step.same {
				t.Errorf("round %d, %s: %v is %v, was %v", round, step.name, all, now, before)
			}
		}
	}
}

// counting is a program that counts what comes by, and returns a verdict.
func counting(t *testing.T, size int32, verdict int32) (count func() uint64, ins asm.Instructions) {
	t.Helper()
	came, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	must(t, err)
	t.Cleanup(func() { came.Close() })
	count = func() (n uint64) {
		t.Helper()
		must(t, came.Lookup(uint32(0), &n))
		return n
	}
	return count, asm.Instructions{
		asm.Mov.Imm(asm.R0, tcxNext),
		asm.LoadMem(asm.R2, asm.R1, 0, asm.Word), // __sk_buff.len
		asm.JNE.Imm(asm.R2, size, "out"),
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.LoadMapPtr(asm.R1, came.FD()),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.Mov.Imm(asm.R1, 1),
		asm.AddAtomic.Mem(asm.R0, asm.R1, asm.DWord, 0),
		asm.Mov.Imm(asm.R0, verdict),
		asm.Return().WithSymbol("out"),
	}
}

const sentSize = 14 + 20 + 8 + 2 // bytes of a frame of sendTo

// While the program at xdp comes and goes, no frame is counted by it and by the one at tc.
func TestNoFrameIsCountedTwice(t *testing.T) {
	risky(t)
	lab, in, client := withClient(t)
	must(t, in.SetHandlers(handled, builtin(t, "count", map[string]any{"to": "stack"})))
	must(t, in.AttachTC(Last))
	// A program before ours at tc counts frames that the one at xdp passes, and those that come while there is none.
	count, ins := counting(t, sentSize, tcxNext)
	inside(t, lab.NIC, func(nic *net.Interface) { foreignTC(t, nic, link.Head(), ins...) })
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for !stop.Load() {
			_, _ = client.Write([]byte("hi"))
		}
	})
	for range 20 {
		before := in.mustStats(t)
		must(t, in.DetachHook(XDP))
		soon(t, "frames come by at tc alone", func() bool { return in.mustStats(t).Failed > before.Failed })
		must(t, in.AttachXDP())
		soon(t, "frames come by at xdp", func() bool { return in.mustStats(t).Kernel[handled] > before.Kernel[handled] })
	}
	stop.Store(true)
	wg.Wait()
	must(t, in.Detach())
	n, s := count(), addUp(t, in)
	t.Logf("%d came, %d of them before there was XDP or after; %d were counted", n, s.Failed, s.Matched[9])
	if s.Matched[9] > n {
		t.Errorf("%d frames were counted %d times: %d handled at xdp, %d passed at tc", n, s.Matched[9], s.Kernel[handled], s.Failed)
	}
}
