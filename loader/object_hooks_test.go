// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/loader/objecttest"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns/netnstest"
)

// Handlers whose ctx another hook can give them run there, and others are told why not.
func TestHooksOfObjects(t *testing.T) {
	const (
		static = "static __attribute__((noinline)) "
		read   = "reads ctx->data, and at tc it is another structure: load the frame by xspin_load()"
		maybe  = "reads by a pointer from the stack that may be ctx, and at tc it is another structure: pass it as an argument of its own, not in a structure"
		keeps  = "keeps ctx in memory: it is for functions of xspin_handler.h alone"
		sums   = "calculates with ctx: it is for functions of xspin_handler.h alone"
		other  = "reads ctx, and at tc it is another structure: it is for functions of xspin_handler.h alone"
	)
	// code runs with ctx in r1 and her in r2, which it may lose, and returns r0.
	code := func(code string) string {
		return "\tregister __u64 r0 asm(\"r0\");\n\tregister void *r1 asm(\"r1\") = ctx, *r2 asm(\"r2\") = her;\n\tasm volatile(\"" + code + "\" : \"=r\"(r0), \"+r\"(r1), \"+r\"(r2) :: \"r3\", \"r4\", \"r5\", \"memory\");\n\treturn r0 & 1;"
	}
	for _, tc := range []struct{ name, globals, body, want string }{
		{"functions of the engine", "", "\t__u8 b = 0;\n\txspin_load(ctx, 0, &b, 1);\n\treturn b & 1 ? xspin_reply_udp(ctx, her) : XSPIN_DROP;", ""},
		{"nothing", "", "\treturn XSPIN_DROP;", ""},

		{"the frame", "", "\treturn ctx->data + 14 > ctx->data_end;", "xspin_payload, line 5: " + read},
		{"its end alone", "", "\treturn ctx->data_end & 1;", "xspin_payload, line 5: reads ctx->data_end, and at tc it is another structure: load the frame by xspin_load()"},
		{"the interface", "", "\treturn ctx->ingress_ifindex & 1;", "xspin_payload, line 5: reads ctx->ingress_ifindex, and at tc it is another structure: it is for functions of xspin_handler.h alone"},
		{"what is behind the fields", "", code("r0 = *(u32 *)(r1 + 176)"), other},
		{"what is before them", "", code("r0 = *(u32 *)(r1 - 4)"), other},
		{"her, at the same offset", "", "\treturn her->len & 1;", ""},
		{"a branch that is never taken", "const volatile __u32 never = 0;", "\treturn never ? ctx->data & 1 : XSPIN_DROP;", read},
		{"a field that is written to", "", code("r0 = 0; *(u32 *)(r1 + 8) = r0"), "writes to ctx, and at tc it is another structure: it is for functions of xspin_handler.h alone"},
		{"a field that a number is written to", "", code("r0 = 0; .byte 0x62; .byte 1; .short 8; .long 7"), "writes to ctx"},
		{"a field that is added to", "", code("r0 = 0; lock *(u32 *)(r1 + 8) += r0"), "writes to ctx"},

		{"a copy", "", code("r3 = r1; r1 = 0; r0 = *(u32 *)(r3 + 0)"), read},
		{"a register that had it before", "", code("r1 = r2; r0 = *(u32 *)(r1 + 0)"), ""},
		{"a register that has a large number now", "", code("r1 = 5 ll; r0 = r1"), ""},
		{"one of two", "", "\tvoid *p = her->len > 100 ? (void *)ctx : her;\n\tasm volatile(\"\" : \"+r\"(p));\n\treturn *(__u32 *)p & 1;", read},
		{"one of two that is passed on", "", "\tstruct xdp_md *p = her->len > 100 ? ctx : 0;\n\t__u8 b;\n\tasm volatile(\"\" : \"+r\"(p));\n\treturn p && xspin_load(p, 0, &b, 1);", ""},
		{"one of two by a jump", "", code("r3 = r2; if r0 == 0 goto +1; r3 = r1; r0 = *(u32 *)(r3 + 0)"), read},
		{"a loop that comes by it the second time", "", code("r0 = 0; r3 = r2; r0 = *(u32 *)(r3 + 0); r3 = r1; if r0 == 0 goto -3"), read},
		{"a register that a call has used", "", "\t__u8 b;\n\tasm volatile(\"r1 = %0; call 5; r0 = r1\" :: \"r\"(ctx) : \"r0\", \"r1\", \"r2\", \"r3\", \"r4\", \"r5\");\n\treturn xspin_load(ctx, 0, &b, 1) & 1;", ""},

		{"nothing added", "", "\tstruct xdp_md *p = ctx;\n\t__u8 b;\n\tasm volatile(\"%0 += 0\" : \"+r\"(p));\n\treturn xspin_load(p, 0, &b, 1) & 1;", sums},
		{"something added to it", "", code("r0 = 4; r0 += r1; r0 = 0"), sums},
		{"a half", "", code("w0 = w1"), sums},
		{"its bytes in another order", "", code("r1 = be64 r1; r0 = 0"), sums},
		{"a register that is cleared by a half", "", code("w1 = 0; r1 += 4; r0 = r1"), ""},
		{"a comparison", "", "\treturn ctx == (void *)her;", ""},

		{"a spill", "", code("*(u64 *)(r10 - 192) = r1; r1 = 0; r3 = *(u64 *)(r10 - 192); r0 = *(u32 *)(r3 + 0)"), read},
		{"a spill beside it", "", code("*(u64 *)(r10 - 192) = r1; *(u64 *)(r10 - 184) = r2; r3 = *(u64 *)(r10 - 184); r0 = *(u32 *)(r3 + 0)"), ""},
		{"a spill over it", "", code("*(u64 *)(r10 - 192) = r1; *(u64 *)(r10 - 192) = r2; r3 = *(u64 *)(r10 - 192); r0 = *(u32 *)(r3 + 0)"), ""},
		{"a half of a spill", "", code("*(u64 *)(r10 - 192) = r1; w0 = *(u32 *)(r10 - 192)"), ""},
		{"a spill that is read by another address of the stack", "", code("*(u64 *)(r10 - 192) = r1; r3 = r10; r3 += -192; r3 = *(u64 *)(r3 + 0); r0 = *(u32 *)(r3 + 0)"), maybe},
		{"a spill whose address is spilled", "", code("*(u64 *)(r10 - 192) = r1; r3 = r10; *(u64 *)(r10 - 184) = r3; r4 = *(u64 *)(r10 - 184); r3 = *(u64 *)(r4 - 192); r0 = *(u32 *)(r3 + 0)"), maybe},
		{"a number that is read by another address of the stack", "", code("*(u64 *)(r10 - 192) = r1; r0 = 7; *(u64 *)(r10 - 184) = r0; r3 = r10; r3 += -184; r0 = *(u64 *)(r3 + 0); r0 += 7"), ""},
		{"a spill by another address of the stack", "", code("r3 = r10; r3 += -192; *(u64 *)(r3 + 0) = r1; r0 = 0"), keeps},
		{"a spill that is exchanged", "", code("*(u64 *)(r10 - 192) = r1; r4 = 0; .byte 0xdb; .byte 0x4a; .short -192; .long 0xe1; r0 = *(u32 *)(r4 + 0)"), read},
		{"a spill that is compared and exchanged", "", code("*(u64 *)(r10 - 192) = r1; r0 = 0; r4 = 0; .byte 0xdb; .byte 0x4a; .short -192; .long 0xf1; r0 = *(u32 *)(r0 + 0)"), read},
		{"a spill that was written to by another address", "",
			code("*(u64 *)(r10 - 192) = r1; r3 = r10; r4 = *(u64 *)(r3 - 192); *(u64 *)(r3 - 184) = r4; r3 = *(u64 *)(r10 - 184); r0 = *(u32 *)(r3 + 0)"), maybe},
		{"HPU memory", "", "\tvoid **p = xspin_memory(0, 8);\n\tif (p)\n\t\t*p = ctx;\n\treturn 0;", keeps},
		{"a global variable", "struct xdp_md *mine;", "\tmine = ctx;\n\treturn 0;", keeps},
		{"many live values", static + "__u32 some(__u32 i) { asm volatile(\"\" : \"+r\"(i)); return i; }",
			"\t__u32 a = some(1), b = some(2), c = some(3), d = some(4), e = some(5), f = some(6);\n\treturn (a ^ some(b) ^ some(c) ^ some(d) ^ some(e) ^ some(f) ^ some(a) ^ b ^ c ^ d ^ e ^ f ^ ctx->data) & 1;", read},

		{"the second argument", static + "__u32 end(struct xspin_her *her, struct xdp_md *c)\n{\n\tasm volatile(\"\" : \"+r\"(her));\n\treturn c->data;\n}", "\treturn end(her, ctx) & 1;", "end, line 5: " + read},
		{"the second argument, to be passed on", static + "__u32 has(__u32 n, struct xdp_md *c)\n{\n\t__u8 b;\n\tasm volatile(\"\" : \"+r\"(n));\n\treturn !xspin_load(c, n, &b, 1);\n}", "\treturn has(her->len, ctx) & has(7, ctx);", ""},
		{"the argument of a function that calls itself", static + "__u32 deep(struct xdp_md *c, __u32 n)\n{\n\tasm volatile(\"\" : \"+r\"(n));\n\treturn n > 1 ? deep(c, n - 1) + n : c->data;\n}", "\treturn deep(ctx, her->len & 3) & 1;", "deep, line 5: " + read},
		{"a result", static + "void *same(void *p, __u32 n) { asm volatile(\"\" : \"+r\"(p), \"+r\"(n)); return p; }", "\treturn *(__u32 *)same(ctx, 7) & 1;", read},
		{"a result of another function", static + "void *same(void *p) { asm volatile(\"\" : \"+r\"(p)); return p; }\n" + static + "void *again(void *p) { asm volatile(\"\" : \"+r\"(p)); return same(p); }\n" + static + "void *none(void *p) { asm volatile(\"\" : \"+r\"(p)); return (void *)7; }",
			"\tvoid *p = none(ctx), *q = again(ctx);\n\tasm volatile(\"%0 += 7\" : \"+r\"(p));\n\treturn *(__u32 *)q & (__u64)p & 1;", read},
		{"a result that is another", static + "void *same(void *p, void *q) { asm volatile(\"\" : \"+r\"(p), \"+r\"(q)); return q; }", "\treturn *(__u32 *)same(ctx, her) & 1;", ""},

		{"a structure", "struct given { __u64 n; struct xdp_md *ctx; };\n" + static + "__u32 end(struct given *g)\n{\n\treturn g->ctx->data;\n}", "\tstruct given g = { 1, ctx };\n\treturn end(&g) & 1;", "end, line 5: " + maybe},
		{"a structure that is given on", "struct given { __u64 n; struct xdp_md *ctx; };\n" + static + "__u32 end(struct given *g)\n{\n\treturn g->ctx->data;\n}\n" + static + "__u32 on(struct given *g)\n{\n\tasm volatile(\"\" : \"+r\"(g));\n\treturn end(g) + 1;\n}", "\tstruct given g = { 1, ctx };\n\treturn on(&g) & 1;", "end, line 5: " + maybe},
		{"a structure whose ctx is calculated with, and read by", "struct given { __u64 n; char *ctx; };\n" + static + "__u32 end(struct given *g)\n{\n\tchar *p = g->ctx;\n\tasm volatile(\"%0 += 4\" : \"+r\"(p));\n\treturn *p;\n}", "\tstruct given g = { 1, (char *)ctx };\n\treturn end(&g) & 1;", "end, line 7: " + maybe},
		{"a structure that is written to", "struct given { __u64 n; struct xdp_md *ctx; };\n" + static + "__u32 end(struct given *g)\n{\n\tg->ctx->data = 0;\n\treturn 1;\n}", "\tstruct given g = { 1, ctx };\n\treturn end(&g) & 1;", "end, line 5: writes by a pointer from the stack that may be ctx"},
		{"a structure that it is put into", "struct given { __u64 n; struct xdp_md *ctx; };\n" + static + "__u32 put(struct given *g, struct xdp_md *c)\n{\n\tg->ctx = c;\n\treturn 1;\n}", "\tstruct given g = {};\n\treturn put(&g, ctx) & g.ctx->data & 1;", "put, line 5: " + keeps},
		{"a structure in which it changes its place", "struct given { __u64 n; struct xdp_md *ctx, *too; };\n" + static + "__u32 put(struct given *g)\n{\n\tg->too = g->ctx;\n\treturn 1;\n}", "\tstruct given g = { .ctx = ctx };\n\treturn put(&g) & g.too->data & 1;", maybe},
		{"a structure that is for functions of the engine", "struct given { __u64 n; struct xdp_md *ctx; };\n" + static + "__u32 end(struct given *g)\n{\n\t__u8 b;\n\tg->n += 7;\n\treturn xspin_load(g->ctx, 0, &b, 1);\n}", "\tstruct given g = { 1, ctx };\n\treturn end(&g) & 1;", ""},
		{"a structure without it", "struct given { __u64 n; struct xspin_her *her; };\n" + static + "__u32 end(struct given *g)\n{\n\tasm volatile(\"\" ::: \"memory\");\n\treturn g->her->len + g->n;\n}", "\tstruct given g = { 1, her };\n\t__u8 b;\n\treturn (end(&g) + xspin_load(ctx, 0, &b, 1)) & 1;", ""},

		{"a helper that loads", "", "\t__u8 b = 0;\n\treturn bpf_xdp_load_bytes(ctx, 0, &b, 1) ? b & 1 : 0;", "xspin_payload, line 6: calls bpf_xdp_load_bytes, which is there at xdp only: xspin_load() is there at both hooks"},
		{"a helper that stores", "", "\t__u8 b = 0;\n\treturn bpf_xdp_store_bytes(ctx, 0, &b, 1) & 1;", "xspin_payload, line 6: calls bpf_xdp_store_bytes, which is there at xdp only: xspin_store() is there at both hooks"},
		{"a helper that has the length", "", "\treturn bpf_xdp_get_buff_len(ctx) & 1;", "xspin_payload, line 5: calls bpf_xdp_get_buff_len, which is there at xdp only: her->len is there at both hooks"},
		{"a helper of both hooks", "", "\treturn bpf_ktime_get_ns() & 1;", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			o, err := ReadObject("test.o", objecttest.Compile(t, around(tc.globals, tc.body), "-Wno-everything"), 1<<20)
			if err != nil {
				t.Fatal(err)
			}
			if err := o.CheckHook(XDP); err != nil {
				t.Errorf("at xdp: %v", err)
			}
			err = o.CheckHook(TC)
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v\nwant %q", err, tc.want)
			}
		})
	}
}

// Objects that clang or somebody else has made otherwise say it at once, and all of it.
func TestHooksOfOtherObjects(t *testing.T) {
	compiled := func(source string) []byte { return objecttest.Compile(t, source, "-Wno-everything") }
	testdata := func(name string) []byte {
		file, err := os.ReadFile("testdata/" + name)
		if err != nil {
			t.Fatal(err)
		}
		return file
	}
	const older = "it was made with version 2 of xspin_handler.h, whose functions read the frame as it is at xdp: compile again with version 3 of xspin_handler.h: `xspin object new` writes it"
	for _, tc := range []struct {
		name string
		file []byte
		want []string
	}{
		{"of packets, of version 2", testdata("echo-udp.version2.o"), []string{older}},
		{"of messages, of version 2", testdata("witness.version2.o"), []string{older}},
		{"of messages", compiled(segments + "XSPIN_HEADER { return XSPIN_PROCEED; }\nXSPIN_MESSAGES(HEADER);\n" + licence), nil},
		{"of messages, in three handlers", compiled(segments + "XSPIN_HEADER { return ctx->data & 1; }\nXSPIN_PAYLOAD { return ctx->data_end & 1; }\nXSPIN_COMPLETION { return ctx->rx_queue_index & 1; }\nXSPIN_MESSAGES(HEADER | PAYLOAD | COMPLETION);\n" + licence), []string{
			"xspin_completion, line 4: reads ctx->rx_queue_index, ", "xspin_header, line 2: reads ctx->data, ", "xspin_payload, line 3: reads ctx->data_end, "}},
		{"that hands messages over, and reads by itself", compiled(segments + "XSPIN_HEADER { return ctx->data & 1 ? XSPIN_HAND_OVER : XSPIN_PROCEED; }\nXSPIN_MESSAGES(HEADER | HAND_OVER);\n" + licence), []string{
			"it hands messages over to HPUs, which get their packets by XDP: leave HAND_OVER out", "xspin_header, line 2: reads ctx->data, "}},
	} {
		o, err := ReadObject("test.o", tc.file, 1<<20)
		if err != nil {
			t.Errorf("%s: %v", tc.name, err)
			continue
		}
		var got []string
		if err := o.CheckHook(TC); err != nil {
			got = strings.Split(err.Error(), "\n")
		}
		if !slices.EqualFunc(got, tc.want, strings.HasPrefix) {
			t.Errorf("%s: %q\nwant %q", tc.name, got, tc.want)
		}
		if err := o.CheckHook(XDP); err != nil {
			t.Errorf("%s: at xdp: %v", tc.name, err)
		}
		if err := o.CheckHook(TC + 1); err == nil || err.Error() != "there is no hook Hook(2)" {
			t.Errorf("%s: at another: %v", tc.name, err)
		}
	}
	for name := range bpf.Handlers {
		o, err := BuiltinObject(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, h := range []Hook{XDP, TC} {
			if err := o.CheckHook(h); err != nil {
				t.Errorf("%s at %v: %v", name, h, err)
			}
		}
	}
}

// Load refuses an object at a hook that it is not for, and says why.
func TestObjectsAreLoadedWhereTheyRun(t *testing.T) {
	netnstest.NeedRoot(t)
	o := object(t, around("", "\treturn ctx->ingress_ifindex & 1;"))
	load(t, o, HandlersConfig{})
	_, err := o.Load(HandlersConfig{Hook: TC, Format: matcher.FormatByName("packet")})
	if want := "its handlers do not run at tc: xspin_payload, line 5: reads ctx->ingress_ifindex, "; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v\nwant %q", err, want)
	}
}

func TestHooksHaveNames(t *testing.T) {
	for _, h := range []Hook{XDP, TC} {
		if got, err := ParseHook(h.String()); err != nil || got != h {
			t.Errorf("%v is read as %v, %v", h, got, err)
		}
	}
	for _, s := range []string{"", "XDP", "auto", "tcx", "Hook(2)"} {
		if _, err := ParseHook(s); err == nil || !strings.Contains(err.Error(), "want xdp or tc") {
			t.Errorf("%q: %v", s, err)
		}
	}
}
