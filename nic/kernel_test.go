// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"net"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/loader/objecttest"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// wire has the host's end take what XDP on the NIC's end sends.
func wire(t testing.TB, lab *netns.Lab) {
	t.Helper()
	w, err := lab.Host.Wire()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
}

// builtin is a context of built-in handlers in eBPF.
func builtin(t testing.TB, name string, rulesets ...matcher.Ruleset) nic.ContextSpec {
	t.Helper()
	o, err := nic.BuiltinObject(name)
	if err != nil {
		t.Fatal(err)
	}
	return nic.ContextSpec{Name: name, Rulesets: rulesets, Kernel: &nic.Kernel{Object: o}}
}

// compiled is a context of handlers in C.
func compiled(t testing.TB, source string, rulesets ...matcher.Ruleset) nic.ContextSpec {
	t.Helper()
	file := objecttest.Compile(t, "#include \"xspin_handler.h\"\nXSPIN_LICENSE(\"GPL\");\n"+source)
	o, err := loader.ReadObject("test.o", file, nic.ObjectMemory)
	if err != nil {
		t.Fatal(err)
	}
	return nic.ContextSpec{Name: "compiled", Rulesets: rulesets, Kernel: &nic.Kernel{Object: o}}
}

// statsOf returns the statistics of a context.
func statsOf(t testing.TB, n *nic.NIC, c *nic.Context) nic.ContextStats {
	t.Helper()
	for _, s := range stats(t, n).Contexts {
		if s.ID == c.ID() {
			return s
		}
	}
	t.Fatalf("context %d has no statistics", c.ID())
	return nic.ContextStats{}
}

// ask sends a datagram and returns what comes back.
func ask(t testing.TB, conn *net.UDPConn, msg []byte) []byte {
	t.Helper()
	if _, err := conn.Write(msg); err != nil {
		t.Fatal(err)
	}
	conn.SetReadDeadline(time.Now().Add(testenv.Slowness() * 5 * time.Second))
	buf := make([]byte, 2000)
	n, err := conn.Read(buf)
	if err != nil {
		t.Fatalf("%d bytes: %v", len(msg), err)
	}
	return buf[:n]
}

// Ping and a UDP client are answered at xdp, in either mode, and at tc: Linux's own responder sees
// nothing, and no HPU runs.
func TestHandlersInEBPFAnswer(t *testing.T) {
	for _, tc := range []struct {
		name string
		cfg  nic.Config
		mode string // of XDP
	}{
		{"native", nic.Config{Hook: nic.HookXDP, Mode: nic.Native}, "native"},
		{"generic", nic.Config{Hook: nic.HookXDP, Mode: nic.Generic}, "generic"},
		{"tc", nic.Config{Hook: nic.HookTC}, "off"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			lab := netnstest.Temp(t, netns.LabConfig{})
			n := open(t, lab, tc.cfg)
			if tc.cfg.Mode == nic.Native {
				wire(t, lab)
			}
			pings := run(t, n, builtin(t, "echo-icmp", matcher.ICMPEcho()))
			udp := run(t, n, builtin(t, "echo-udp", matcher.UDPPort(7)))
			before := snmp(t, lab.NIC.NS, "Icmp", "InEchos")
			count := uint64(0)
			for _, size := range []int{0, 16, 516, 1016, 1416, 1472} {
				ping(t, lab, "-c", "20", "-i", "0.002", "-s", fmt.Sprint(size))
				count += 20
			}
			if now := snmp(t, lab.NIC.NS, "Icmp", "InEchos"); now != before {
				t.Errorf("the kernel saw %d echo requests", now-before)
			}
			conn := dialUDP(t, lab, 7)
			for i := range 100 {
				msg := bytes.Repeat([]byte{byte(i)}, 1+14*i)
				if got := ask(t, conn, msg); !bytes.Equal(got, msg) {
					t.Fatalf("%d bytes came back for %d", len(got), len(msg))
				}
			}
			for c, want := range map[*nic.Context]uint64{pings: count, udp: 100} {
				s := statsOf(t, n, c)
				sum := uint64(0)
				for _, cpu := range s.CPUs {
					sum += cpu
				}
				if s.Handled != want || s.Sent != want || sum != want || s.Tier != "kernel" || len(s.CPUs) < runtime.NumCPU() || s.Credits != 0 || s.HandlerSum <= 0 {
					t.Errorf("%s: %+v, want %d handled and sent", c.Name(), s, want)
				}
			}
			s := stats(t, n)
			if s.Mode != tc.mode {
				t.Errorf("XDP is %s, want %s", s.Mode, tc.mode)
			}
			if p := s.Program; p.Kernel != count+100 || p.Redirected != 0 || p.Seen != p.Kernel+p.Passed+p.Malformed+p.Oversize+p.Failed {
				t.Errorf("the program counts %+v, want %d to the kernel", p, count+100)
			}
		})
	}
}

// The handlers' verdicts are the frame's, and a failure is an event.
func TestHandlersInEBPFDecideAndFail(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1})
	c := run(t, n, compiled(t, `
XSPIN_PAYLOAD
{
	__u8 what = 0;

	xspin_load(ctx, 42, &what, 1);
	xspin_count(3, what);
	switch (what) {
	case 1: return xspin_to_stack(her);
	case 2: return XSPIN_DROP;
	case 3: return XSPIN_SEGV;
	case 4: return 77;
	}
	return XSPIN_SUCCESS;
}
XSPIN_CONTEXT(PAYLOAD);
`, matcher.UDPPort(7)))
	var socket *net.UDPConn
	if err := lab.NIC.NS.Do(func() (err error) {
		socket, err = net.ListenUDP("udp4", &net.UDPAddr{IP: lab.NIC.Addr.Addr().AsSlice(), Port: 7})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	conn := dialUDP(t, lab, 7)
	for _, what := range []byte{0, 1, 2, 3, 4, 4, 1} {
		if _, err := conn.Write([]byte{what, 42}); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		buf := make([]byte, 10)
		socket.SetReadDeadline(time.Now().Add(testenv.Slowness() * 5 * time.Second))
		if k, _, err := socket.ReadFromUDP(buf); err != nil || !bytes.Equal(buf[:k], []byte{1, 42}) {
			t.Errorf("Linux got % x, %v", buf[:k], err)
		}
	}
	s := c.Stats()
	if s.Handled != 7 || s.Dropped != 1 || s.Failed != 3 || s.ToStack != 2 || s.Sent != 0 || s.User[3] != (spin.UserCounter{Sum: 15, Count: 7}) {
		t.Errorf("%+v", s)
	}
	told := uint64(0)
	eventually(t, "three failures are told", func() bool {
		select {
		case e := <-n.Events():
			told += 1 + e.More
			if e.Kind != spin.HandlerFailed || int(e.Context) != c.ID() || e.Name != "compiled" || !strings.Contains(e.Detail, "payload handler") {
				t.Errorf("%v", e)
			}
		default:
		}
		return told == 3
	})
	if cleared := c.ClearCounters(); cleared[3].Count != 7 || c.Stats().User[3].Count != 0 {
		t.Errorf("cleared %+v, %+v are left", cleared[3], c.Stats().User[3])
	}
	if err := n.Remove(c); err != nil {
		t.Fatal(err)
	}
	if after := c.Stats(); after.Handled != 7 || after.Failed != 3 {
		t.Errorf("after Remove: %+v", after)
	}
}

// Handlers use the context's memory, and each CPU its own part.
func TestHandlersInEBPFHaveMemory(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1})
	spec := compiled(t, `
XSPIN_PAYLOAD
{
	__u64 *all = xspin_memory(64, 8), *mine = xspin_hpu_memory(her, 8, 8);

	if (!all || !mine)
		return XSPIN_SEGV;
	__sync_fetch_and_add(all, 1);
	++*mine;
	return XSPIN_SUCCESS;
}
XSPIN_CONTEXT(PAYLOAD);
`, matcher.UDPPort(7))
	cpus, err := loader.PossibleCPUs()
	if err != nil {
		t.Fatal(err)
	}
	var mems [2]*hostq.Memory
	for i, size := range []int64{4096, int64(cpus) * 64} {
		if mems[i], err = hostq.NewMemory("test", size); err != nil {
			t.Fatal(err)
		}
		defer mems[i].Close()
	}
	spec.Resources.Memory, spec.Resources.PerHPU = mems[0].Whole(), mems[1].Whole()
	c := run(t, n, spec)
	conn := dialUDP(t, lab, 7)
	for range 50 {
		if _, err := conn.Write([]byte("hi")); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "50 are handled", func() bool { return c.Stats().Handled == 50 })
	if s := c.Stats(); s.Failed != 0 {
		t.Errorf("%+v", s)
	}
	if got := mems[0].Bytes()[64]; got != 50 {
		t.Errorf("the shared counter is %d, want 50", got)
	}
	for cpu, handled := range statsOf(t, n, c).CPUs {
		if got := mems[1].Bytes()[64*cpu+8]; uint64(got) != handled {
			t.Errorf("CPU %d counts %d in its memory, and handled %d", cpu, got, handled)
		}
	}
}

// A map is a life's own, whatever its name: another object has one of that name, of another
// shape, and that of a context's next life begins at 0.
func TestMapsOfHandlersInEBPFAreTheirOwn(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1})
	const source = `
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LAST + 1);
	__type(key, __u32);
	__type(value, __u64);
} seen SEC(".maps");

XSPIN_PAYLOAD
{
	__u32 key = LAST;
	__u64 *n = bpf_map_lookup_elem(&seen, &key);

	if (!n)
		return XSPIN_SEGV;
	xspin_count(0, __sync_fetch_and_add(n, STEP));
	return XSPIN_SUCCESS;
}
XSPIN_CONTEXT(PAYLOAD);
`
	first := compiled(t, "enum { LAST = 0, STEP = 1 };"+source, matcher.UDPPort(7))
	second := compiled(t, "enum { LAST = 5, STEP = 100 };"+source, matcher.UDPPort(9))
	second.Name = "second"
	third := first
	third.Name, third.Rulesets = "third", sets(matcher.UDPPort(11))
	count := func(port uint16, c *nic.Context, packets int, all, want uint64) {
		t.Helper()
		conn := dialUDP(t, lab, port)
		for range packets {
			if _, err := conn.Write([]byte("hi")); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, "all are counted", func() bool { return c.Stats().User[0].Count == all })
		if got := c.Stats().User[0].Sum; got != want {
			t.Errorf("port %d: the sum is %d, want %d", port, got, want)
		}
	}
	a, b, c := run(t, n, first), run(t, n, second), run(t, n, third)
	count(7, a, 4, 4, 0+1+2+3)
	count(9, b, 3, 3, 0+100+200)
	count(11, c, 2, 2, 0+1)
	count(7, a, 1, 5, 0+1+2+3+4)
	if err := n.Remove(a); err != nil {
		t.Fatal(err)
	}
	count(7, run(t, n, first), 2, 2, 0+1)
	count(9, b, 1, 4, 0+100+200+300)
	count(11, c, 1, 3, 0+1+2)
}

// Whatever is wrong with an object, it is told, and those who are there go on.
func TestObjectsThatAreRefusedHarmNobody(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1})
	wire(t, lab)
	run(t, n, builtin(t, "echo-udp", matcher.UDPPort(7)))
	run(t, n, nic.ContextSpec{Name: "user", Rulesets: sets(matcher.UDPPort(8)), Handlers: handle(echo)})
	kernel, user := dialUDP(t, lab, 7), dialUDP(t, lab, 8)
	const header, named, drop = "#include \"xspin_handler.h\"\n", "XSPIN_CONTEXT(PAYLOAD);\nXSPIN_LICENSE(\"GPL\");\n", "\treturn XSPIN_DROP;\n"
	around := func(body string) string { return header + "XSPIN_PAYLOAD\n{\n" + body + "}\n" + named }
	oldKernel := fmt.Errorf("%w: it has nothing of the sort", loader.ErrKernel)
	for _, tc := range []struct {
		name, source string
		load         func(func() error) error // how the kernel is asked; nil: directly
		params       map[string]any
		want         string
		flags        []string
	}{
		{name: "another section", source: header + "XSPIN_PAYLOAD\n{\n" + drop + "}\nSEC(\"xdp\") int xspin_context(struct xdp_md *ctx)\n{\n\tstatic const volatile struct xspin_declared declared XSPIN_DECLARED = { .handlers = 2 };\n\treturn xspin_names(ctx, 2);\n}\nXSPIN_LICENSE(\"GPL\");\n", want: `in section "xdp"`},
		{name: "no BTF", source: around(drop), flags: []string{"-g0"}, want: "no BTF: compile with -g"},
		{name: "another version of the header", source: "#define xspin_version xspin_other\n#include \"xspin_handler.h\"\n#undef xspin_version\nconst volatile __u32 xspin_version = 9;\n" + around(drop), want: "version 9 of xspin_handler.h"},
		{name: "a helper off the list", source: "static long (*const bpf_redirect)(unsigned int, unsigned long long) = (void *)23;\n" + around("\treturn bpf_redirect(1, 0);\n"), want: "calls bpf_redirect, which handlers may not"},
		{name: "a map off the list", source: header + "struct {\n__uint(type, BPF_MAP_TYPE_ARRAY + 25);\n__uint(max_entries, 4096);\n} ring SEC(\".maps\");\n" + around("\t__u32 zero = 0;\n\treturn bpf_map_lookup_elem(&ring, &zero) ? 0 : 1;\n"), want: "map ring: type RingBuf"},
		{name: "an endless loop", source: around("\tfor (;;)\n\t\t;\n" + drop), want: "it may loop without end, in xspin_payload"},
		{name: "too many steps", source: around("\t__u32 n = 0;\n\tfor (__u32 i = 0; i < 10000000; i++) {\n\t\tn += i;\n\t\tasm volatile(\"\" : \"+r\"(n));\n\t}\n\treturn n & 1;\n"), want: "too many branches or steps"},
		{name: "an access outside of memory", source: around("\t__u64 *p = xspin_memory(0, 8);\n\treturn p ? p[1 << 20] : XSPIN_FAIL;\n"), want: "in xspin_payload at test.bpf.c:5"},
		{name: "an access outside of the frame", source: around("\treturn *(__u8 *)(long)ctx->data;\n"), want: "in xspin_payload at test.bpf.c:4"},
		{name: "too much stack", source: around("\tvolatile char big[480];\n\tbig[her->len & 255] = 1;\n\treturn big[3];\n"), want: "stack"},
		{name: "an unknown constant", source: around(drop), params: map[string]any{"nope": 1}, want: "params.nope: no such parameter"},
		{name: "without CAP_PERFMON", source: around(drop), load: func(load func() error) error { return without([]int{unix.CAP_PERFMON, unix.CAP_SYS_ADMIN}, load) }, want: "missing capability CAP_PERFMON"},
		{name: "a kernel that is too old", source: around(drop), load: func(func() error) error { return oldKernel }, want: oldKernel.Error()},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n.LoadBy(func(o *nic.Object, cfg loader.HandlersConfig) (h *loader.Handlers, err error) {
				load := func() (err error) { h, err = o.Load(cfg); return err }
				if tc.load != nil {
					err = tc.load(load)
				} else {
					err = load()
				}
				return h, err
			})
			object, err := nic.ReadObject("test.o", objecttest.Compile(t, tc.source, tc.flags...), nic.ObjectMemory)
			if err == nil {
				spec := nic.ContextSpec{Name: "refused", Rulesets: sets(matcher.UDPPort(9)), Kernel: &nic.Kernel{Object: object, Parameters: tc.params}}
				mem, err2 := hostq.NewMemory("test", 4096)
				if err2 != nil {
					t.Fatal(err2)
				}
				defer mem.Close()
				spec.Resources.Memory = mem.Whole()
				_, err = n.Install(spec)
			}
			refused(t, err, tc.want)
			for name, conn := range map[string]*net.UDPConn{"in the kernel": kernel, "on HPUs": user} {
				if got := ask(t, conn, []byte(tc.name)); string(got) != tc.name {
					t.Errorf("the context %s answers %q", name, got)
				}
			}
			if s := stats(t, n); len(s.Contexts) != 2 || s.Contexts[0].Failed+s.Contexts[1].Failed > 0 {
				t.Errorf("%+v", s.Contexts)
			}
		})
	}
}

// What is about HPUs, or not there, is refused with its key.
func TestWrongContextsInTheKernel(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1})
	window, err := hostq.WindowOn(make([]byte, 64), spin.All)
	if err != nil {
		t.Fatal(err)
	}
	mem, err := hostq.NewMemory("test", 64)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	readOnly, err := mem.Window(0, 64, spin.Read)
	if err != nil {
		t.Fatal(err)
	}
	other := matcher.UDPPort(8)
	other.EOM = &matcher.Rule{Index: 3, Mask: 1, Start: 1, End: 1}
	for _, tc := range []struct {
		change func(*nic.ContextSpec)
		names  []string
	}{
		{func(s *nic.ContextSpec) { s.Kernel.Object = nil }, []string{"object: "}},
		{func(s *nic.ContextSpec) { s.Handlers = handle(echo) }, []string{"handler: ", "in Go and in eBPF"}},
		{func(s *nic.ContextSpec) { s.HostActivated, s.Rulesets = true, nil }, []string{"triggered: "}},
		{func(s *nic.ContextSpec) { s.Policy = nic.ByPacket }, []string{"policy: ", "about HPUs"}},
		{func(s *nic.ContextSpec) { s.VHPUs = 1 }, []string{"vhpus: ", "about HPUs"}},
		{func(s *nic.ContextSpec) { s.Sequence = 1 }, []string{"sequence: ", "about HPUs"}},
		{func(s *nic.ContextSpec) { s.CoreMask = 1 }, []string{"hpus: "}},
		{func(s *nic.ContextSpec) { s.Credits = 8 }, []string{"credits: "}},
		{func(s *nic.ContextSpec) { s.Share = 2 }, []string{"share: "}},
		{func(s *nic.ContextSpec) { s.Overload = nic.OverloadSpills }, []string{"overload: "}},
		{func(s *nic.ContextSpec) { s.Timestamp = true }, []string{"timestamp: "}},
		{func(s *nic.ContextSpec) { s.Window = window }, []string{"windows: "}},
		{func(s *nic.ContextSpec) { s.Resources.Windows = []hpu.NamedWindow{{Name: "w", Window: window}} }, []string{"windows: "}},
		{func(s *nic.ContextSpec) { s.Events = make(chan spin.MessageEvent, 1) }, []string{"queue: "}},
		{func(s *nic.ContextSpec) { s.Messages = 1 }, []string{"messages: "}},
		{func(s *nic.ContextSpec) { s.Timeout = time.Second }, []string{"timeout: "}},
		{func(s *nic.ContextSpec) { s.Remember = time.Second }, []string{"remember: "}},
		{func(s *nic.ContextSpec) { s.Protocol = slmp.Protocol{} }, []string{"protocol: ", "for packets"}},
		{func(s *nic.ContextSpec) { s.State = 8 }, []string{"state: "}},
		{func(s *nic.ContextSpec) { s.InitialState = []byte{1} }, []string{"state: "}},
		{func(s *nic.ContextSpec) { s.Incomplete = mpq.Linger }, []string{"incomplete: "}},
		{func(s *nic.ContextSpec) { s.Linger = time.Second }, []string{"incomplete: "}},
		{func(s *nic.ContextSpec) { s.Held = -1 }, []string{"held: "}},
		{func(s *nic.ContextSpec) { s.Memory = 1 << 20 }, []string{"tracking: ", "Resources.Memory"}},
		{func(s *nic.ContextSpec) { s.Resources.Memory = readOnly }, []string{"memory: ", "not permitted"}},
		{func(s *nic.ContextSpec) { s.Resources.Full = 9 }, []string{"queue.full: 9: want FullFails"}},
		{func(s *nic.ContextSpec) { s.Checksums = hpu.VerifyNone }, []string{"checksums: "}},
		{func(s *nic.ContextSpec) { s.Resources.Timer = time.Second }, []string{"timer: "}},
		{func(s *nic.ContextSpec) { s.Resources.Memory = window }, []string{"memory: ", "hostq.Memory"}},
		{func(s *nic.ContextSpec) { s.Rulesets = sets(matcher.SLMP()) }, []string{"format: ", "slmp", "several packets"}},
		{func(s *nic.ContextSpec) { s.Rulesets = append(s.Rulesets, other) }, []string{"rulesets: ", "EOM"}},
		{func(s *nic.ContextSpec) { s.Kernel.Parameters = map[string]any{"nope": 1} }, []string{"params.nope: no such parameter: "}},
		{func(s *nic.ContextSpec) { s.Rulesets = nil }, []string{"rulesets: "}},
		{func(s *nic.ContextSpec) { s.Name = "" }, []string{"name: "}},
	} {
		spec := builtin(t, "echo-udp", matcher.UDPPort(7))
		tc.change(&spec)
		_, err := n.Install(spec)
		refused(t, err, tc.names...)
	}
	// What the verifier refuses, too, by the name of the handler.
	_, err = n.Install(compiled(t, "XSPIN_PAYLOAD { return *(int *)(long)her->len; }\nXSPIN_CONTEXT(PAYLOAD);", matcher.UDPPort(7)))
	refused(t, err, "xspin_payload at test.bpf.c:3")
	if s := stats(t, n); len(s.Contexts) != 0 {
		t.Errorf("%+v", s.Contexts)
	}
}

// Each field of a description is used for a context in the kernel, or refused with its key:
// none is read and forgotten.
func TestFieldsOfContextsInTheKernel(t *testing.T) {
	netnstest.NeedRoot(t)
	mem, err := hostq.NewMemory("test", 4096)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	object := func(name string) *nic.Object { return builtin(t, name).Kernel.Object }
	type spec = nic.ContextSpec
	type field struct {
		used string      // by packets, messages, and those that are handed over
		key  string      // of the error where it is not
		set  func(*spec) // nil: it is there, or means nothing by itself
	}
	const all = "packets messages handed over"
	fields := map[string]field{
		"Name":          {used: all},
		"Rulesets":      {used: all},
		"First":         {all, "", func(s *spec) { s.First = 3 }},
		"Numbers":       {all, "", func(s *spec) { s.Numbers = []int{3} }},
		"Format":        {used: all},
		"Handlers":      {"handed over", "handler", func(s *spec) { s.Handlers.Payload = echo }},
		"Policy":        {"handed over", "policy", func(s *spec) { s.Policy = nic.ByPacket }},
		"CoreMask":      {"handed over", "hpus", func(s *spec) { s.CoreMask = 1 }},
		"Credits":       {"handed over", "credits", func(s *spec) { s.Credits = 1 }},
		"Place":         {used: all},
		"Timestamp":     {"handed over", "timestamp", func(s *spec) { s.Timestamp = true }},
		"Messages":      {"messages handed over", "messages", func(s *spec) { s.Messages = 1 }},
		"Protocol":      {"", "protocol", func(s *spec) { s.Protocol = ownProtocol{} }},
		"Binder":        {"", "binder", func(s *spec) { s.Binder = &hpu.Receives{} }},
		"Window":        {"messages handed over", "windows", func(s *spec) { s.Window = mem.Whole() }},
		"Events":        {"messages handed over", "queue", func(s *spec) { s.Events = make(chan spin.MessageEvent, 1) }},
		"State":         {"handed over", "state", func(s *spec) { s.State = 8 }},
		"InitialState":  {"handed over", "state", func(s *spec) { s.State, s.InitialState = 8, []byte{1} }},
		"Timeout":       {"messages handed over", "timeout", func(s *spec) { s.Timeout = time.Second }},
		"Remember":      {"messages handed over", "remember", func(s *spec) { s.Remember = time.Second }},
		"Incomplete":    {"", "incomplete", func(s *spec) { s.Incomplete = mpq.Linger }},
		"Linger":        {"", "incomplete", func(s *spec) { s.Linger = time.Second }},
		"Held":          {"handed over", "held", func(s *spec) { s.Held = 3 }},
		"Memory":        {"handed over", "tracking", func(s *spec) { s.Memory = 1 << 20 }},
		"Checksums":     {"messages handed over", "checksums", func(s *spec) { s.Checksums = hpu.VerifyAll }},
		"Overload":      {"handed over", "overload", func(s *spec) { s.Overload = nic.OverloadSpills }},
		"Share":         {"handed over", "share", func(s *spec) { s.Share = 2 }},
		"HostActivated": {"", "triggered", func(s *spec) { s.HostActivated = true }},
		"Hook":          {used: all}, // tc is refused where messages are handed over: see TestErrorsOfContextsInTheKernel of daemon
		"Sequence":      {"handed over", "sequence", func(s *spec) { s.Policy, s.Sequence, s.VHPUs = nic.BlockedRR, 1024, 2 }},
		"VHPUs":         {"handed over", "vhpus", func(s *spec) { s.Policy, s.Sequence, s.VHPUs = nic.BlockedRR, 1024, 2 }},

		"Resources.Windows": {"messages handed over", "windows", func(s *spec) { s.Resources.Windows = []hpu.NamedWindow{{Name: "w", Window: mem.Whole()}} }},
		"Resources.Memory":  {all, "", func(s *spec) { s.Resources.Memory = mem.Whole() }},
		"Resources.PerHPU":  {"packets messages", "hpu_memory", func(s *spec) { s.Resources.PerHPU = mem.Whole() }},
		"Resources.Host":    {"messages handed over", "queue", func(s *spec) { s.Resources.Host = &hostq.Pair{} }},
		"Resources.Full":    {"messages handed over", "queue.full", func(s *spec) { s.Resources.Full = hpu.FullWaits }},
		"Resources.Timer": {"handed over", "timer", func(s *spec) {
			s.Handlers.Timer, s.Resources.Timer = func(*hpu.Task) spin.Code { return spin.Success }, time.Second
		}},
		"Resources.Resolver": {"handed over", "resolver", func(s *spec) { s.Resources.Resolver = struct{ spin.Resolver }{} }},
		"Resources.Log":      {"messages handed over", "log", func(s *spec) { s.Resources.Log = struct{ hpu.LogSink }{} }},

		"Kernel.Object":     {used: all},
		"Kernel.Parameters": {used: all},
		"Kernel.Segments":   {"messages handed over", "segments", func(s *spec) { s.Kernel.Segments = 32 }},
	}
	names := func(of reflect.Type, prefix string) (all []string) {
		for _, f := range reflect.VisibleFields(of) {
			all = append(all, prefix+f.Name)
		}
		return all
	}
	there := slices.Concat(names(reflect.TypeFor[nic.ContextSpec](), ""), names(reflect.TypeFor[hpu.Resources](), "Resources."), names(reflect.TypeFor[nic.Kernel](), "Kernel."))
	there = slices.DeleteFunc(there, func(name string) bool { return name == "Resources" || name == "Kernel" })
	if known := slices.Sorted(maps.Keys(fields)); !slices.Equal(known, slices.Sorted(slices.Values(there))) {
		t.Errorf("known are the fields\n%q, and there are\n%q", known, there)
	}
	for _, base := range []struct {
		what   string
		object *nic.Object
		rules  matcher.Ruleset
	}{
		{"packets", object("echo-udp"), matcher.UDPPort(7)},
		{"messages", object("deposit"), matcher.SLMP()},
		{"handed over", handsOdd(t), matcher.SLMP()},
	} {
		refused := map[string]bool{}
		for _, p := range nic.KernelRefuses(base.object) {
			refused[p.Path] = true
		}
		for name, f := range fields {
			if f.set == nil {
				continue
			}
			s := spec{Name: "a", Rulesets: sets(base.rules), Kernel: &nic.Kernel{Object: base.object}}
			f.set(&s)
			_, err := s.Resolve(2)
			var wrong spin.Problems
			errors.As(err, &wrong)
			told := slices.ContainsFunc(wrong, func(p spin.Problem) bool { return p.Path == f.key })
			switch used := strings.Contains(f.used, base.what); {
			case used && err != nil:
				t.Errorf("%s of %s: %v", name, base.what, err)
			case !used && !told:
				t.Errorf("%s of %s: %v, want an error about %s", name, base.what, err, f.key)
			case !used && !refused[f.key] && name != "Handlers":
				t.Errorf("%s of %s: %s is refused, and KernelRefuses does not know it", name, base.what, f.key)
			}
		}
	}
	// The protocol that it is anyway.
	s := spec{Name: "a", Rulesets: sets(matcher.SLMP()), Kernel: &nic.Kernel{Object: object("deposit")}, Protocol: slmp.Protocol{}}
	if _, err := s.Resolve(2); err != nil {
		t.Error(err)
	}
}

// ownProtocol is none that the kernel has.
type ownProtocol struct{ slmp.Protocol }

// Two contexts in the kernel and one on HPUs; one is flooded, and the others answer. The
// credit of the one on HPUs is that of a context by itself.
func TestContextsOfBothTiers(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1, Ring: 64})
	wire(t, lab)
	flooded := run(t, n, builtin(t, "count", matcher.UDPPort(9)))
	kernel := run(t, n, builtin(t, "echo-udp", matcher.UDPPort(7)))
	user := run(t, n, nic.ContextSpec{Name: "user", Rulesets: sets(matcher.UDPPort(8)), Handlers: handle(echo)})
	if s := statsOf(t, n, user); s.Granted != 64 || s.Tier != "user" || s.CPUs != nil {
		t.Errorf("%+v", s)
	}
	flood, stop := dialUDP(t, lab, 9), make(chan bool)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			_, _ = flood.Write(make([]byte, 64)) // Linux says that nobody listens
		}
	})
	for _, port := range []uint16{7, 8} {
		conn := dialUDP(t, lab, port)
		answered := 0
		eventually(t, fmt.Sprintf("port %d answers 200 times", port), func() bool { // the veth's ring may be full
			buf := make([]byte, 10)
			if _, err := conn.Write([]byte{42}); err != nil {
				t.Fatal(err)
			}
			conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
			if k, err := conn.Read(buf); err == nil && k == 1 && buf[0] == 42 {
				answered++
			}
			return answered == 200
		})
	}
	close(stop)
	wg.Wait()
	eventually(t, "all are handled", func() bool {
		s := statsOf(t, n, flooded)
		return s.Handled == s.Rulesets[0].Matched && s.Handled > 1000
	})
	if k, u := kernel.Stats(), user.Stats(); k.Sent < 200 || u.Sent < 200 {
		t.Errorf("%d sent in the kernel, %d by HPUs; want 200 and more", k.Sent, u.Sent)
	}
}

// A context in the kernel comes and goes as often as it likes, while its own packets come.
func TestContextsInTheKernelLeakNothing(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1})
	wire(t, lab)
	user := run(t, n, nic.ContextSpec{Name: "user", Rulesets: sets(matcher.UDPPort(8)), Handlers: handle(echo)})
	spec := builtin(t, "echo-icmp", matcher.ICMPEcho())
	floodPing(t, lab)
	var handled, removed uint64
	round := func(with func(*nic.Context)) {
		c, err := n.Install(spec)
		if err != nil {
			t.Fatal(err)
		}
		with(c)
		if err := n.Remove(c); err != nil {
			t.Fatal(err)
		}
		if now := c.Stats().Handled; now > 0 {
			handled, removed = handled+now, removed+1
		}
		if c.ID() != user.ID()+1 {
			t.Fatalf("context %d, want %d, which is free", c.ID(), user.ID()+1)
		}
	}
	active := func(c *nic.Context) {
		if err := n.Activate(c); err != nil {
			t.Fatal(err)
		}
		eventually(t, "its handlers run", func() bool { return c.Stats().Handled > 0 })
	}
	round(active) // the NIC's own program for tc is loaded, and stays
	before, lived := objects(t), map[object]bool{}
	fds, goroutines := len(descriptors(t)), runtime.NumGoroutine()
	rounds := 40 * testenv.Soak()
	for i := range rounds {
		round(func(c *nic.Context) {
			if i%20 == 0 { // the table waits for a grace period
				active(c)
				maps.Copy(lived, objects(t))
			}
		})
	}
	if want := uint64(rounds/20 + 1); removed != want {
		t.Errorf("packets came to %d of the %d that were active", removed, want)
	}
	t.Logf("%d packets were handled", handled)
	eventually(t, "goroutines ended", func() bool { return runtime.NumGoroutine() <= goroutines })
	if now := len(descriptors(t)); now > fds {
		t.Errorf("%d descriptors after %d rounds, %d before", now, rounds, fds)
	}
	lost(t, before, lived)
}

// The interface goes down and comes up, and handlers answer again.
func TestHandlersInEBPFOutliveTheirLink(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1})
	wire(t, lab)
	c := run(t, n, builtin(t, "echo-icmp", matcher.ICMPEcho()))
	ping(t, lab, "-c", "3", "-i", "0.002")
	for _, set := range []func(netlink.Link) error{netlink.LinkSetDown, netlink.LinkSetUp} {
		if err := lab.NIC.NS.Do(func() error {
			l, err := netlink.LinkByIndex(lab.NIC.Index)
			if err != nil {
				return err
			}
			return set(l)
		}); err != nil {
			t.Fatal(err)
		}
	}
	ping(t, lab, "-c", "3", "-i", "0.01", "-W", "5")
	if s := c.Stats(); s.Sent != 6 {
		t.Errorf("%d sent, want 6", s.Sent)
	}
}

// Closing the NIC ends what its contexts in the kernel have.
func TestClosedNICLeavesNoHandlersBehind(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	spec := builtin(t, "echo-icmp", matcher.ICMPEcho())
	use := func() {
		n := open(t, lab, nic.Config{HPUs: 1})
		run(t, n, spec)
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
	use()
	fds, goroutines := len(descriptors(t)), runtime.NumGoroutine()
	for range 2 {
		use()
	}
	eventually(t, "goroutines ended", func() bool { return runtime.NumGoroutine() <= goroutines })
	eventually(t, "descriptors closed", func() bool { return len(descriptors(t)) <= fds })
}

// While the kernel looks at an object, the NIC goes on. When it is closed meanwhile,
// nothing of the context is left.
func TestSlowVerifierHoldsUpNothing(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1})
	asked, answer := make(chan struct{}), make(chan error)
	var loaded *loader.Handlers
	n.LoadBy(func(o *nic.Object, cfg loader.HandlersConfig) (_ *loader.Handlers, err error) {
		asked <- struct{}{}
		if err := <-answer; err != nil {
			return nil, err
		}
		loaded, err = o.Load(cfg)
		return loaded, err
	})
	install := func() (result chan error) {
		result = make(chan error)
		go func() {
			_, err := n.Install(builtin(t, "noop", matcher.UDPPort(7)))
			result <- err
		}()
		<-asked
		return result
	}
	slow := install()
	run(t, n, nic.ContextSpec{Name: "icmp", Rulesets: sets(matcher.ICMPEcho()), Handlers: handle(echo)})
	ping(t, lab, "-c", "3", "-i", "0.01")
	if got := stats(t, n).Contexts; len(got) != 1 {
		t.Errorf("statistics of %d contexts, want 1", len(got))
	}
	answer <- loader.ErrNoAnswer
	if err := <-slow; !errors.Is(err, loader.ErrNoAnswer) {
		t.Errorf("%v, want the load's error", err)
	}
	slow = install()
	answer <- nil
	if err := <-slow; err != nil {
		t.Fatal(err)
	}
	if got := stats(t, n).Contexts; len(got) != 2 {
		t.Errorf("statistics of %d contexts, want 2", len(got))
	}
	slow = install()
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	answer <- nil
	if err := <-slow; !errors.Is(err, nic.ErrClosed) {
		t.Errorf("%v, want %v", err, nic.ErrClosed)
	}
	if fd := loaded.Program().FD(); fd >= 0 {
		t.Errorf("the program is still open, as %d", fd)
	}
}

// Handlers that use memory are refused without: they would drop all that comes.
func TestHandlersWithoutTheirMemory(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1})
	large, err := hostq.NewMemory("large", 3<<20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { large.Close() })
	for _, tc := range []struct {
		off, size int64
		rights    spin.Rights
		refused   bool
	}{
		{0, 2<<20 + 1, spin.All, false}, {0, 2 << 20, spin.All, true}, {0, 3 << 20, spin.Read, true}, {8, 2<<20 + 1, spin.All, true},
	} {
		w, err := large.Window(tc.off, tc.size, tc.rights)
		if err != nil {
			t.Fatal(err)
		}
		spec := builtin(t, "noop", matcher.UDPPort(9))
		spec.Resources.Memory = w
		c, err := n.Install(spec)
		if (err != nil) != tc.refused || err != nil && !strings.Contains(err.Error(), "hostq.Memory") {
			t.Errorf("a window of %d bytes at %d of three MiB, with rights %v: %v", tc.size, tc.off, tc.rights, err)
		}
		if err == nil {
			if err := n.Remove(c); err != nil {
				t.Error(err)
			}
		}
	}
	for call, want := range map[string]string{"xspin_memory(0, 8)": "xspin_memory(), and there is no memory", "xspin_hpu_memory(her, 0, 8)": "xspin_hpu_memory(), and there is no memory of each HPU"} {
		_, err := n.Install(compiled(t, "XSPIN_PAYLOAD { return "+call+" ? XSPIN_SUCCESS : XSPIN_SEGV; }\nXSPIN_CONTEXT(PAYLOAD);", matcher.UDPPort(7)))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", call, err, want)
		}
	}
}
