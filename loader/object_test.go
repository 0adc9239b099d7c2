// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf/asm"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/loader/objecttest"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns/netnstest"
)

// A source that is accepted, in parts.
const (
	segments = "#include \"xspin_message.h\"\n"
	include  = "#include \"xspin_handler.h\"\n"
	licence  = "XSPIN_LICENSE(\"GPL\");\n"
	named    = "XSPIN_CONTEXT(PAYLOAD);\n"
	payload  = "XSPIN_PAYLOAD { return XSPIN_SUCCESS; }\n"
)

// How a source names what the kernel has.
const (
	ksyms   = "__attribute__((section(\".ksyms\")));"
	kconfig = "__attribute__((section(\".kconfig\")));"
)

// around returns a source whose payload handler has this body.
func around(globals, body string) string {
	return include + globals + "\nXSPIN_PAYLOAD\n{\n" + body + "\n}\n" + named + licence
}

// again is a static function that calls one of the engine's at so many places, which calls a global one.
func again(places int) string {
	return "static __attribute__((noinline)) int again(struct xdp_md *ctx, __u64 at)\n{\n\tint n = 0;\n" +
		strings.Repeat("\tn += xspin_window_write(ctx, 0, at, 0, 8);\n", places) + "\treturn n;\n}\n"
}

// What XSPIN_CONTEXT(PAYLOAD) makes.
const byHand = "SEC(\"xdp.frags\") int xspin_context(struct xdp_md *ctx)\n{\n\tstatic const volatile struct xspin_declared declared XSPIN_DECLARED = { .handlers = 2 };\n\treturn xspin_names(ctx, 2);\n}\n"

// mapOf declares a map and uses it.
func mapOf(declaration string) string {
	return around("struct {\n"+declaration+"\n} mine SEC(\".maps\");",
		"\t__u32 zero = 0;\n\treturn bpf_map_lookup_elem(&mine, &zero) ? XSPIN_DROP : XSPIN_SUCCESS;")
}

const plainMap = "__uint(type, BPF_MAP_TYPE_ARRAY);\n__uint(max_entries, 4);\n__type(key, __u32);\n"

// Whoever opens a NIC, or installs handlers, waits until the verifier has seen all of a program;
// and of the million steps that it takes handlers need some.
func TestTheVerifierIsSoonDone(t *testing.T) {
	const most = 200_000 // steps; on Linux 6.18 some 143,000 and 92,000
	_, in := onLab(t)
	info, err := in.objs.XspinIngress.Info()
	if err != nil {
		t.Fatal(err)
	}
	if steps, ok := info.VerifiedInstructions(); !ok || steps > most {
		t.Errorf("the ingress program takes %d steps, want at most %d", steps, most)
	} else {
		t.Logf("ingress: %d steps", steps)
	}
	for _, name := range []string{"deposit", "noop-messages"} {
		o, err := BuiltinObject(name)
		if err != nil {
			t.Fatal(err)
		}
		cfg, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: 64, Segments: 4096, Events: 1 << 14})
		h := load(t, o, cfg)
		_, steps, err := h.Instructions()
		if err != nil || steps == 0 || steps > most {
			t.Errorf("%s takes %d steps, %v: want at most %d", name, steps, err, most)
		}
		t.Logf("%s: %d steps", name, steps)
	}
}

// What the verifier would let pass, or would say in words that help nobody.
func TestObjectsThatAreRefused(t *testing.T) {
	value := func(v string) string { return mapOf(plainMap + "__type(value, " + v + ");") }
	for _, tc := range []struct{ name, source, want string }{
		{"none", include + payload + named + licence, ""},
		{"no licence", include + payload + named, `licence is ""`},
		{"another licence", include + payload + named + `XSPIN_LICENSE("Proprietary");`, `licence is "Proprietary", and the kernel wants one that the GPL is compatible with: add XSPIN_LICENSE("GPL")`},
		{"a licence of two", include + payload + named + `XSPIN_LICENSE("Dual MIT/GPL");`, ""},
		{"no header", "#include \"xspin_kernel.h\"\nSEC(\"xdp.frags\") int xspin_context(struct xdp_md *ctx) { return XDP_PASS + (long)ctx * 0; }\nchar _license[] SEC(\"license\") = \"GPL\";\n",
			"not made with xspin_handler.h: `xspin object new` writes it"},
		{"no program", include + payload + licence, "it has no program: want one, that of XSPIN_CONTEXT(...)"},
		{"two programs", include + payload + named + licence + `SEC("xdp.frags") int more(struct xdp_md *ctx) { return ctx->data ? XDP_PASS : XDP_DROP; }`, `other programs: more in section "xdp.frags"`},
		{"wrong section", include + payload + strings.ReplaceAll(byHand, "xdp.frags", "xdp") + licence, `xspin_context is in section "xdp", want "xdp.frags"`},
		{"no such handler", include + payload + strings.ReplaceAll(byHand, ".handlers = 2", ".handlers = 18") + licence, "its xspin_handler.h was changed"},
		{"trains of messages", include + payload + strings.ReplaceAll(byHand, ".handlers = 2", ".handlers = 34, .messages = 1") + licence, "its xspin_handler.h was changed"},
		{"state of packets", include + payload + strings.ReplaceAll(byHand, ".handlers = 2", ".handlers = 2, .state = 8") + licence, "its xspin_handler.h was changed"},
		{"no handlers", include + "XSPIN_CONTEXT(0);\n" + licence, "it has no handlers"},
		{"a handler that is not there", include + "XSPIN_CONTEXT(HEADER | PAYLOAD);\n" + payload + licence, "XSPIN_CONTEXT names HEADER, and there is no XSPIN_HEADER"},
		{"a handler that never runs", include + payload + "XSPIN_COMPLETION { return XSPIN_SUCCESS; }\n" + named + licence, "there is an XSPIN_COMPLETION that never runs"},

		{"handlers of packets that include what is for messages, too", segments + payload + named + licence, ""},
		{"handlers of packets that call what is for messages", segments + "XSPIN_PAYLOAD { return xspin_notify(1, 2, 3); }\n" + named + licence, "function xspin_notify is for handlers of messages: write XSPIN_MESSAGES(...) in place of XSPIN_CONTEXT(...)"},
		{"handlers of messages, and no program", segments + payload + licence, "it has no program: want one, that of XSPIN_CONTEXT(...), or of XSPIN_MESSAGES(...)"},
		{"a handler of messages that is not there", segments + "XSPIN_MESSAGES(HEADER | PAYLOAD);\n" + payload + licence, "XSPIN_MESSAGES names HEADER, and there is no XSPIN_HEADER"},
		{"a handler of messages that never runs", segments + payload + "XSPIN_COMPLETION { return XSPIN_SUCCESS; }\nXSPIN_MESSAGES(PAYLOAD);\n" + licence, "there is an XSPIN_COMPLETION that never runs: XSPIN_MESSAGES does not name COMPLETION"},
		{"messages without handlers", segments + "XSPIN_MESSAGES(0);\n" + licence, "it has no handlers: XSPIN_MESSAGES names none"},

		{"a helper", around("static long (*const bpf_redirect)(__u32, __u64) = (void *)23;", "\tbpf_redirect(1, 0);\n\treturn XSPIN_DROP;"), "xspin_payload, line 5: calls bpf_redirect, which handlers may not: docs/kernel-handlers.md lists"},
		{"a helper in a branch that is never taken", around("const volatile __u32 never = 0;\nstatic long (*const bpf_probe_read_kernel)(void *, __u32, const void *) = (void *)113;",
			"\t__u32 x = 0;\n\tif (never)\n\t\tbpf_probe_read_kernel(&x, 4, (void *)0);\n\treturn x;"), "calls bpf_probe_read_kernel, which handlers may not: docs/kernel-handlers.md lists"},
		{"a helper in a static function", around("static long (*const bpf_xdp_adjust_tail)(struct xdp_md *, int) = (void *)65;\nstatic __attribute__((noinline)) long cut(struct xdp_md *ctx) { return bpf_xdp_adjust_tail(ctx, -1); }",
			"\treturn cut(ctx) ? XSPIN_FAIL : XSPIN_SUCCESS;"), "cut, line 3: calls bpf_xdp_adjust_tail, which handlers may not: docs/kernel-handlers.md lists"},
		{"a tail call", around("static long (*const bpf_tail_call)(void *, void *, __u32) = (void *)12;\nstruct { __uint(type, 3); __uint(max_entries, 1); __uint(key_size, 4); __uint(value_size, 4); } others SEC(\".maps\");",
			"\tbpf_tail_call(ctx, &others, 0);\n\treturn XSPIN_DROP;"), "calls bpf_tail_call, which handlers may not: docs/kernel-handlers.md lists"},
		{"a callback", around("static long (*const bpf_loop)(__u32, void *, void *, __u64) = (void *)181;\nstatic long step(__u32 i, void *arg) { return i > 5 && arg; }",
			"\tbpf_loop(10, step, 0, 0);\n\treturn XSPIN_DROP;"), "takes the address of the function step"},
		{"a kernel function", around("extern void bpf_rcu_read_lock(void) "+ksyms, "\tbpf_rcu_read_lock();\n\treturn XSPIN_DROP;"), "calls the kernel function bpf_rcu_read_lock"},
		{"a variable of the kernel's", around("extern const int bpf_prog_active "+ksyms, "\treturn (long)&bpf_prog_active >> 3 & 1;"), ".ksyms"},
		{"a setting of the kernel's", around("extern int CONFIG_HZ "+kconfig, "\treturn CONFIG_HZ == 5;"), "the kernel's configuration"},
		{"may_goto", around("", "\tfor (__u32 i = 0;; i++) {\n\t\tasm volatile goto(\"1: .byte 0xe5; .byte 0; .long ((%l[out] - 1b - 8) / 8) & 0xffff; .short 0\" :::: out);\n\t\txspin_count(0, i);\n\t}\nout:\n\treturn XSPIN_DROP;"), "may_goto"},

		{"a global function", around("__attribute__((noinline)) int twice(__u32 i) { asm volatile(\"\" : \"+r\"(i)); return i; }", "\treturn twice(her->len) + twice(her->offset);"), "twice, line 2: a function that is not static: only handlers are global, add `static`"},
		{"a static function", around("static __attribute__((noinline)) int twice(__u32 i) { asm volatile(\"\" : \"+r\"(i)); return i; }", "\treturn twice(her->len) + twice(her->offset);"), ""},
		{"a handler that calls another", include + "XSPIN_COMPLETION { return XSPIN_SUCCESS; }\nXSPIN_PAYLOAD { return xspin_completion(ctx, her); }\nXSPIN_CONTEXT(PAYLOAD | COMPLETION);\n" + licence, "xspin_payload, line 3: calls xspin_completion: the program calls handlers, nothing else may"},
		{"a static function in a loop that calls a global one", segments + again(1) + "XSPIN_PAYLOAD\n{\n\tint n = 0;\n#pragma clang loop unroll(disable)\n\tfor (int i = 0; i < 100; i++)\n\t\tn += again(ctx, n + i);\n\treturn n & 1;\n}\nXSPIN_MESSAGES(PAYLOAD);\n" + licence, "xspin_payload calls again, and so xspin_copy, in a loop"},
		{"a global function on seventy ways", segments + again(7) + "XSPIN_PAYLOAD\n{\n\tint n = 0;\n" + strings.Repeat("\tn += again(ctx, n);\n", 10) + "\treturn n & 1;\n}\nXSPIN_MESSAGES(PAYLOAD);\n" + licence, "xspin_copy is called on more than 64 ways through the functions of xspin_context"},
		{"a global function at one place of another that is called at seventy", segments + again(1) + "XSPIN_PAYLOAD\n{\n\tint n = 0;\n" + strings.Repeat("\tn += again(ctx, n);\n", 70) + "\treturn n & 1;\n}\nXSPIN_MESSAGES(PAYLOAD);\n" + licence, "xspin_copy is called on more than 64 ways through the functions of xspin_context"},
		{"a global function on sixty ways", segments + again(6) + "XSPIN_PAYLOAD\n{\n\tint n = 0;\n" + strings.Repeat("\tn += again(ctx, n);\n", 10) + "\treturn n & 1;\n}\nXSPIN_MESSAGES(PAYLOAD);\n" + licence, ""},
		{"a function of the engine's in a loop that calls a global one", segments + "XSPIN_PAYLOAD\n{\n\tint n = 0;\n#pragma clang loop unroll(disable)\n\tfor (int i = 0; i < 100; i++)\n\t\tn += xspin_deposit(ctx, her);\n\treturn n & 1;\n}\nXSPIN_MESSAGES(PAYLOAD);\n" + licence, "xspin_payload calls xspin_deposit, and so xspin_copy, in a loop"},
		{"a function with a name of the engine's", around("static __attribute__((noinline)) int xspin_copy(__u32 i) { asm volatile(\"\" : \"+r\"(i)); return i; }", "\treturn xspin_copy(her->len);"), "function xspin_copy: names that begin with xspin are xspin_handler.h's"},
		{"a variable with a name of the engine's", around("__u32 xspin;", "\txspin++;\n\treturn XSPIN_DROP;"), "variable xspin: names that begin with xspin are xspin_handler.h's"},
		{"a loop around no handler", around("", "\t__u32 n = 0;\n#pragma clang loop unroll(disable)\n\tfor (__u32 i = 0; i < 100; i++)\n\t\tn += bpf_get_prandom_u32();\n\treturn n & 1;"), ""},

		{"an array", value("__u64"), ""},
		{"a map with a name of the header's", strings.ReplaceAll(value("__u64"), "mine", "xspin_mine"), "map xspin_mine: names that begin with xspin are xspin_handler.h's"},
		{"a map of programs", mapOf("__uint(type, 3);\n__uint(max_entries, 1);\n__uint(key_size, 4);\n__uint(value_size, 4);"), "map mine: type ProgramArray: want an array, a hash or an LRU hash"},
		{"a ring buffer", mapOf("__uint(type, 27);\n__uint(max_entries, 4096);"), "map mine: type RingBuf"},
		{"a pinned map", mapOf(plainMap + "__type(value, __u64);\n__uint(pinning, 1);"), "map mine: it would be pinned"},
		{"a flag", mapOf(plainMap + "__type(value, __u64);\n__uint(map_flags, 1 << 12);"), "map mine: flags 0x1000"},
		{"a hash without preallocation", mapOf("__uint(type, BPF_MAP_TYPE_HASH);\n__uint(max_entries, 4);\n__type(key, __u32);\n__type(value, __u32);\n__uint(map_flags, 1);"), ""},
		{"a timer", "struct bpf_timer { unsigned long long o[2]; };\n" + value("struct { int x; struct bpf_timer t; }"), "map mine: its values hold a struct bpf_timer"},
		{"a lock in an array in a typedef", "struct bpf_spin_lock { unsigned v; };\ntypedef struct bpf_spin_lock lock[2];\n" + value("struct { int x; const lock l; }"), "its values hold a struct bpf_spin_lock"},
		{"a pointer into the kernel", "struct task_struct { int i; };\n" + value("struct { struct task_struct __attribute__((btf_type_tag(\"kptr\"))) *p; }"), `a type with the tag "kptr"`},
		{"a plain pointer", value("struct { struct xspin_her *p; }"), ""},
		{"a lock among global variables", around("struct bpf_spin_lock { __u32 v; };\nstruct bpf_spin_lock lock;", "\treturn lock.v;"), "map .bss: its values hold a struct bpf_spin_lock"},
		{"too much memory", mapOf("__uint(type, BPF_MAP_TYPE_ARRAY);\n__uint(max_entries, 1 << 20);\n__type(key, __u32);\n__type(value, __u64);"), " bytes for each context, and the limit is 1048576"},
		{"far too much memory", mapOf("__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);\n__uint(max_entries, 0xffffffff);\n__type(key, __u32);\n__uint(value_size, 4096);"), "and the limit is 1048576"},
		{"values that take long to copy", mapOf("__uint(type, BPF_MAP_TYPE_ARRAY);\n__uint(max_entries, 1);\n__type(key, __u32);\n__uint(value_size, 4104);"), "map mine: keys of 4 bytes and values of 4104: a call copies them, so want at most 512 and 4096"},
		{"values that do not take long", mapOf("__uint(type, BPF_MAP_TYPE_ARRAY);\n__uint(max_entries, 1);\n__type(key, __u32);\n__uint(value_size, 4096);"), ""},
		{"keys that take long", mapOf("__uint(type, BPF_MAP_TYPE_HASH);\n__uint(max_entries, 1);\n__uint(key_size, 520);\n__uint(value_size, 8);"), "map mine: keys of 520 bytes and values of 8"},
		{"values of many CPUs that take long", mapOf("__uint(type, BPF_MAP_TYPE_PERCPU_HASH);\n__uint(max_entries, 1);\n__type(key, __u32);\n__uint(value_size, 4096);"), map[bool]string{true: "map mine: keys of 4 bytes and values of 4096"}[manyCPUs(t)]},
		{"global variables as large as memory allows", around("__u8 all[100000];", "\treturn all[her->len & 0xffff] & 1;"), ""},
		{"a map that nothing uses", include + "struct {\n__uint(type, 27);\n__uint(max_entries, 4096);\n} mine SEC(\".maps\");\n" + payload + named + licence, ""},
		{"a parameter that is a structure", around("const volatile struct { int a, b; } two = {};", "\treturn two.a;"), "const volatile two: a parameter is a number, a bool, an enum or an array of char"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			o, err := ReadObject("test.o", objecttest.Compile(t, tc.source), 1<<20)
			switch {
			case tc.want == "" && err != nil:
				t.Error(err)
			case tc.want == "":
				if got := o.Handlers(); !slices.Equal(got, []string{"payload"}) {
					t.Errorf("handlers %v", got)
				}
			case err == nil:
				t.Errorf("it is accepted; want %q", tc.want)
			case !errors.Is(err, ErrObject) || !strings.Contains(err.Error(), tc.want) || !strings.HasPrefix(err.Error(), "test.o: "):
				t.Errorf("%v\nwant %q", err, tc.want)
			}
		})
	}
}

// manyCPUs tells whether values of 4096 bytes of all CPUs are too many.
func manyCPUs(t *testing.T) bool {
	t.Helper()
	n, err := PossibleCPUs()
	if err != nil {
		t.Fatal(err)
	}
	return n > 4
}

func TestFilesThatAreNoObjects(t *testing.T) {
	good := objecttest.Compile(t, include+payload+named+licence)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	host, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	f, err := elf.NewFile(bytes.NewReader(good))
	if err != nil {
		t.Fatal(err)
	}
	symbols, err := f.Symbols()
	if err != nil {
		t.Fatal(err)
	}
	version := bytes.Clone(good)
	for _, s := range symbols {
		if s.Name == bpf.HandlersVersionOf {
			version[f.Sections[s.Section].Offset+s.Value] = 9
		}
	}
	for _, tc := range []struct {
		name string
		file []byte
		want string
	}{
		{"empty", nil, "it is not an ELF object file"},
		{"text", []byte("#include <stdio.h>\n"), "it is not an ELF object file (is it the C source?): want what clang -target bpf -g has compiled"},
		{"cut off", good[:len(good)/2], "cannot be read"},
		{"for this machine", host, "want what clang -target bpf -g has compiled"},
		{"big endian", objecttest.Compile(t, include+payload+named+licence, "-target", "bpfeb"), "big endian"},
		{"without -g", objecttest.Compile(t, include+payload+named+licence, "-g0"), "no BTF: compile with -g"},
		{"another version", version, "made with version 9 of xspin_handler.h, and this is version 3"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if _, err := ReadObject("test.o", tc.file, 1<<20); !errors.Is(err, ErrObject) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v, want %q", err, tc.want)
			}
		})
	}
	// A damaged file is an error and no panic.
	for i := 0; i < len(good); i += 97 {
		bad := bytes.Clone(good)
		bad[i] ^= 0xff
		_, _ = ReadObject("test.o", bad, 1<<20)
	}
}

// Helpers have their names in C: those that linux/bpf.h has, where there is one.
func TestHelperNames(t *testing.T) {
	for f, want := range map[asm.BuiltinFunc]string{
		asm.FnTracePrintk: "bpf_trace_printk", asm.FnGetPrandomU32: "bpf_get_prandom_u32", asm.FnL3CsumReplace: "bpf_l3_csum_replace",
		asm.FnDPath: "bpf_d_path", asm.FnSkcToTcp6Sock: "bpf_skc_to_tcp6_sock", asm.FnLoop: "bpf_loop", 9999: "helper 9999 of the kernel",
	} {
		if got := helperName(f); got != want {
			t.Errorf("%v is %s, want %s", f, got, want)
		}
	}
	header, err := os.ReadFile("/usr/include/linux/bpf.h")
	if err != nil {
		t.Skip(err)
	}
	for _, m := range regexp.MustCompile(`FN\((\w+), (\d+), `).FindAllStringSubmatch(string(header), -1) {
		f, _ := strconv.Atoi(m[2])
		if got := helperName(asm.BuiltinFunc(f)); f > 0 && got != "bpf_"+m[1] && !strings.HasPrefix(got, "helper ") {
			t.Errorf("helper %d is %s, want bpf_%s", f, got, m[1])
		}
	}
}

// The helpers that xspin_kernel.h declares are those that handlers may call.
func TestHelpersAreDeclared(t *testing.T) {
	header, err := fs.ReadFile(Include(), "xspin_kernel.h")
	if err != nil {
		t.Fatal(err)
	}
	var declared, want []string
	for _, m := range regexp.MustCompile(`\(\*const (bpf_\w+)\)\(.*\(void \*\)(\d+);`).FindAllStringSubmatch(string(header), -1) {
		f, _ := strconv.Atoi(m[2])
		if got := helperName(asm.BuiltinFunc(f)); got != m[1] {
			t.Errorf("%s is helper %d, which is %s", m[1], f, got)
		}
		declared = append(declared, m[1])
	}
	for _, f := range allowed {
		want = append(want, helperName(f))
	}
	slices.Sort(declared)
	slices.Sort(want)
	if !slices.Equal(declared, want) {
		t.Errorf("xspin_kernel.h declares\n%v, and allowed are\n%v", declared, want)
	}
}

// All that is wrong is told at once.
func TestAllErrorsOfAnObject(t *testing.T) {
	const (
		redirect = "static long (*const bpf_redirect)(__u32, __u64) = (void *)23;\n"
		pinned   = "struct { __uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, 1); __type(key, __u32); __type(value, __u32); __uint(pinning, 1); } mine SEC(\".maps\");\n"
	)
	file := objecttest.Compile(t, include+redirect+pinned+"XSPIN_HEADER { return 0; }\nXSPIN_PAYLOAD { __u32 zero = 0; return bpf_redirect(1, !bpf_map_lookup_elem(&mine, &zero)); }\n"+named)
	_, err := ReadObject("test.o", file, 1<<20)
	if err == nil {
		t.Fatal("it is accepted")
	}
	if n := strings.Count(err.Error(), "test.o: "); n != 4 || strings.Count(err.Error(), "\n") != 3 {
		t.Errorf("%v\nwant 4 lines", err)
	}
}

func TestBuiltinObjects(t *testing.T) {
	for name := range bpf.Handlers {
		o, err := BuiltinObject(name)
		if err != nil {
			t.Error(err)
			continue
		}
		if o.Name() != name || len(o.Handlers()) == 0 || o.Messages() != (name == "deposit" || name == "noop-messages") || o.Maps() != nil {
			t.Errorf("%s: handlers %v, maps %v", o.Name(), o.Handlers(), o.Maps())
		}
	}
	if _, err := BuiltinObject("echo"); err == nil || !strings.Contains(err.Error(), "there are count, deposit, echo-icmp, echo-udp, noop, noop-messages") {
		t.Error(err)
	}
}

// Every built-in handler loads with its engine: the canary of a kernel.
func TestEveryProgramLoads(t *testing.T) {
	netnstest.NeedRoot(t)
	memory := newMemory(t)
	for name, file := range bpf.Handlers {
		o, err := ReadObject(name, file, 1<<20)
		if err != nil {
			t.Error(err)
			continue
		}
		format := "packet"
		if o.Messages() {
			format = "slmp"
		}
		for _, hook := range []Hook{XDP, TC} {
			if o.CheckHook(hook) == nil {
				load(t, o, HandlersConfig{Hook: hook, Format: matcher.FormatByName(format), Memory: memory, MemorySize: 4096})
			}
		}
	}
}

// What the verifier refuses is told by reason, handler and source line. The words are the
// verifier's, and differ from kernel to kernel.
func TestRejections(t *testing.T) {
	netnstest.NeedRoot(t)
	for _, tc := range []struct {
		name, source string
		line         int    // of the source; 0: the log does not say
		handler      string // as line
		reason       string // in it, if all kernels have the word
		hint         string // as reason
	}{
		{"a value that may be null", around("struct { __uint(type, BPF_MAP_TYPE_HASH); __uint(max_entries, 4); __type(key, __u32); __type(value, __u32); } mine SEC(\".maps\");",
			"\t__u32 zero = 0, *n = bpf_map_lookup_elem(&mine, &zero);\n\n\treturn *n;"), 7, "xspin_payload", "", ""},
		{"behind the memory", around("", "\t__u64 *p = xspin_memory(0, 8);\n\n\tif (!p)\n\t\treturn XSPIN_FAIL;\n\treturn p[1 << 20];"), 9, "xspin_payload", "", ""},
		{"a frame without a check", around("", "\t__u8 *frame = (void *)(long)ctx->data;\n\n\treturn frame[20];"), 7, "xspin_payload", "", ""},
		{"the completion handler", include + payload + "XSPIN_COMPLETION\n{\n\treturn *(__u8 *)(long)ctx->data;\n}\nXSPIN_CONTEXT(PAYLOAD | COMPLETION);\n" + licence, 5, "xspin_completion", "", ""},
		{"too much stack", around("", "\tvolatile char big[480];\n\n\tbig[her->len & 255] = 1;\n\treturn big[3];"), 0, "xspin_payload", "480 bytes are the handler's", "a handler has 192 bytes of stack"},
		{"too much stack, in a function of the second handler's", include + payload + "static __noinline int deep(__u32 i)\n{\n\tvolatile char big[400];\n\n\tbig[i & 255] = 1;\n\treturn big[3];\n}\nXSPIN_COMPLETION\n{\n\tvolatile char own[48];\n\n\town[her->len & 31] = 1;\n\treturn deep(her->len) + own[3];\n}\nXSPIN_CONTEXT(PAYLOAD | COMPLETION);\n" + licence, 0, "xspin_completion", "448 bytes are the handler's", "a handler has 192 bytes of stack"},
		{"too many steps", around("", "\t__u32 n = 0;\n\n\tfor (__u32 i = 0; i < 10000000; i++) { n += i; asm volatile(\"\" : \"+r\"(n)); }\n\treturn n & 1;"), 7, "xspin_payload", "too many branches or steps for the verifier: bound the loop, or make it smaller", ""},
		{"a loop without end", around("", "\tfor (;;)\n\t\t;\n\treturn XSPIN_SUCCESS;"), 5, "xspin_payload", "it may loop without end", ""},
		{"another", around("", "\twhile (her->len)\n\t\txspin_now();\n\treturn XSPIN_SUCCESS;"), 5, "xspin_payload", "it may loop without end", ""},
		{"memory without a check", around("", "\t__u64 *n = xspin_memory(8 * (her->len & 7), 8);\n\n\t*n += 1;\n\treturn XSPIN_SUCCESS;"), 7, "xspin_payload", "", "what xspin_memory() returned with null"},
		{"memory without a check, and a parameter", around("const volatile __u32 width = 128;", "\t__u64 *n = xspin_memory(8, 8);\n\n\t*n += width;\n\treturn xspin_to_stack(her);"), 7, "xspin_payload", "", "with null"},
		{"memory of a HPU without a check", around("", "\t__u64 *n = xspin_hpu_memory(her, 8, 8);\n\n\treturn *n == 5;"), 7, "xspin_payload", "", "with null"},
		{"memory without a check, counted", around("", "\t__u64 *n = xspin_memory(8, 8);\n\n\t__sync_fetch_and_add(n, 1);\n\treturn XSPIN_SUCCESS;"), 7, "xspin_payload", "", "with null"},
		{"a length that may be 0", around("", "\t__u8 b[64];\n\t__u32 n = her->payload_len;\n\n\tif (n > 64)\n\t\tn = 64;\n\tif (xspin_load(ctx, her->payload, b, n))\n\t\treturn XSPIN_DROP;\n\treturn b[0] == 1;"), 10, "xspin_payload", "", "n must be at least 1 for the verifier"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			memory := newMemory(t)
			h, err := object(t, tc.source).Load(HandlersConfig{Format: matcher.FormatByName("packet"), Memory: memory, MemorySize: 4096, HPUMemory: memory, HPUMemorySize: 4096})
			if err == nil {
				h.Close()
				t.Fatal("it is loaded")
			}
			var r *Rejection
			if !errors.As(err, &r) {
				t.Fatalf("%v is no rejection", err)
			}
			place := ""
			if tc.line > 0 {
				place = fmt.Sprintf("test.bpf.c:%d", tc.line)
			}
			if r.Handler != tc.handler || r.Place != place || r.Reason == "" || !strings.Contains(r.Reason, tc.reason) || !strings.Contains(r.Hint, tc.hint) || tc.line > 0 && r.Source == "" {
				t.Errorf("%v\nhandler %q, place %q, source %q, reason %q, hint %q; want %q, %q\nlog:\n%s", err, r.Handler, r.Place, r.Source, r.Reason, r.Hint, tc.handler, place, strings.Join(r.Log, "\n"))
			}
			if strings.Count(err.Error(), "\n") > 0 || !strings.HasPrefix(err.Error(), "load test.o: the verifier refuses it: "+r.Reason) {
				t.Errorf("%q: want one line, with the reason first", err)
			}
			if len(r.Log) > 2000 {
				t.Errorf("a log of %d lines", len(r.Log))
			}
		})
	}
}

// A late refusal has a log of hundreds of thousands of lines. The end of it has the reason, and is all that is kept;
// the handler and the line of a loop stand before that.
func TestLateRejections(t *testing.T) {
	netnstest.NeedRoot(t)
	const bad = "*(volatile __u8 *)(long)ctx->data"
	loop := func(body string) string {
		return "#pragma clang loop unroll(disable)\n\tfor (__u32 i = 0; i < 20000; i++)" + body
	}
	for _, tc := range []struct {
		name, source  string
		line          int
		handler, code string
	}{
		{"behind a loop", around("", "\t__u32 n = 0;\n"+loop(" {\n\t\tn = n * 3 + i;\n\t\tasm volatile(\"\" : \"+r\"(n));\n\t\tasm volatile(\"\" : \"+r\"(n));\n\t}")+"\n\treturn n + "+bad+";"),
			12, "xspin_payload", "return n + " + bad + ";"},
		{"at the end of a loop of one line", around("", "\t__u32 n = 0;\n"+loop(" { asm volatile(\"\" : \"+r\"(n)); if (i == 19999) n += "+bad+"; }")+"\n\treturn n & 1;"),
			7, "xspin_payload", "for (__u32 i = 0; i < 20000; i++) { asm volatile(\"\" : \"+r\"(n)); if (i == 19999) n += " + bad + "; }"},
		{"in a function of the second handler's", include + payload + "static __noinline int late(struct xdp_md *ctx)\n{\n\t__u32 n = 0;\n" + loop(" asm volatile(\"\" : \"+r\"(n));") +
			"\n\treturn n + " + bad + ";\n}\nXSPIN_COMPLETION\n{\n\treturn late(ctx) + her->len;\n}\nXSPIN_CONTEXT(PAYLOAD | COMPLETION);\n" + licence,
			8, "xspin_completion", "return n + " + bad + ";"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o := object(t, tc.source)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			h, err := o.Load(HandlersConfig{Format: matcher.FormatByName("packet")})
			runtime.ReadMemStats(&after)
			if err == nil {
				h.Close()
				t.Fatal("it is loaded")
			}
			var r *Rejection
			if !errors.As(err, &r) {
				t.Fatalf("%v is no rejection", err)
			}
			if r.Reason == "" || r.Handler != tc.handler || r.Place != fmt.Sprintf("test.bpf.c:%d", tc.line) || r.Source == "" || !strings.HasPrefix(tc.code, strings.TrimSuffix(r.Source, "...")) { // some kernels cut long lines
				t.Errorf("%v\nhandler %q, place %q, source %q, want %q, line %d, %q\nlog ends:\n%s", err, r.Handler, r.Place, r.Source, tc.handler, tc.line, tc.code, strings.Join(r.Log[max(0, len(r.Log)-30):], "\n"))
			}
			if n := len(strings.Join(r.Log, "\n")); n < logSize/2 || n > logSize {
				t.Errorf("a log of %d bytes, want the end, up to %d", n, logSize)
			}
			// With the race detector pools lose what they hold: make test runs this without it, too.
			if n := after.TotalAlloc - before.TotalAlloc; n > 32<<20 && !testenv.Race {
				t.Errorf("it takes %d bytes", n)
			}
			t.Logf("%v: %d bytes", err, after.TotalAlloc-before.TotalAlloc)
		})
	}
}

// What was not compared with null is named: the verifier knows only maps.
func TestWhatWasNotComparedIsNamed(t *testing.T) {
	netnstest.NeedRoot(t)
	own := "struct { __uint(type, BPF_MAP_TYPE_HASH); __uint(max_entries, 4); __type(key, __u32); __type(value, __u64); } mine SEC(\".maps\");\n"
	for _, tc := range []struct{ body, source, hint string }{
		{"__u64 *n = xspin_state(her);\n\t__u64 *m = xspin_memory(0, 8);\n\n\tif (!m)\n\t\treturn XSPIN_SEGV;\n\t*m += 1;\n\t*n += 1;", "*n += 1;", "compare what xspin_state() returned with null"},
		{"__u64 *n = xspin_state(her);\n\n\t__sync_fetch_and_add(n, 1);", "__sync_fetch_and_add(n, 1);", "compare what xspin_state() returned with null"},
		{"__u32 zero = 0;\n\t__u64 *n = bpf_map_lookup_elem(&mine, &zero);\n\n\t*n += 1;", "*n += 1;", "compare what bpf_map_lookup_elem(&mine, ...) returned with null"},
		{"__u64 *n = xspin_memory(8 * (her->len & 7), 8);\n\n\t*n += 1;", "*n += 1;", "compare what xspin_memory() returned with null"},
	} {
		file := objecttest.Compile(t, "#define XSPIN_STATE 16\n"+segments+own+"XSPIN_PAYLOAD\n{\n\t"+tc.body+"\n\treturn XSPIN_SUCCESS;\n}\nXSPIN_MESSAGES(PAYLOAD);\n"+licence)
		o, err := ReadObject("test.o", file, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		memory := newMemory(t)
		h, err := o.Load(HandlersConfig{Format: matcher.FormatByName("slmp"), Memory: memory, MemorySize: 4096})
		if err == nil {
			h.Close()
			t.Fatalf("%s: it is loaded", tc.body)
		}
		var r *Rejection
		if !errors.As(err, &r) || !strings.Contains(r.Hint, tc.hint) || r.Source != tc.source {
			t.Errorf("%s: %v\nwant %q and the hint %q\nlog:\n%s", tc.body, err, tc.source, tc.hint, strings.Join(r.Log[max(0, len(r.Log)-40):], "\n"))
		}
	}
}

// A handler has the stack that the documents give it, whatever else runs.
func TestStackOfAHandler(t *testing.T) {
	body := "{\n\tvolatile char own[192];\n\n\town[her->len & 127] = 1;\n\treturn own[3];\n}\n"
	o := object(t, include+"XSPIN_HEADER "+body+"XSPIN_PAYLOAD "+body+"XSPIN_COMPLETION "+body+"XSPIN_CONTEXT(HEADER | PAYLOAD | COMPLETION);\n"+licence)
	load(t, o, HandlersConfig{})
}

// What the engine takes leaves that much, on kernels that round each frame up to 32 bytes,
// too: there are 512. A handler may call xspin_copy(), with messages.
func TestStackOfTheEngine(t *testing.T) {
	up := func(n int) int { return (n + 31) &^ 31 }
	for name := range bpf.Handlers {
		o, err := BuiltinObject(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, prog := range o.spec.Programs {
			all := stacks(prog.Instructions)
			if all[prog.Name] == 0 {
				t.Errorf("%s: %s seems to have no stack: %v", name, prog.Name, all)
			}
			if n := all[prog.Name]; n > 200 && !o.Messages() || up(n)+192+up(all["xspin_copy"]) > 512 {
				t.Errorf("%s: %s takes %d bytes of stack, and xspin_copy %d", name, prog.Name, n, all["xspin_copy"])
			}
		}
	}
}
