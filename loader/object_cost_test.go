// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"math/bits"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/loader/objecttest"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns/netnstest"
)

// A handler that makes a call so often, with keys and values as large as they may be.
func often(n int, call string) string {
	return include + `
struct key { __u8 b[256]; };
struct value { __u8 b[4096]; };
struct { __uint(type, BPF_MAP_TYPE_HASH); __uint(max_entries, 4); __type(key, struct key); __type(value, struct value); } mine SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, 2); __type(key, __u32); __type(value, struct value); } values SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, 1); __type(key, __u32); __type(value, struct key); } keys SEC(".maps");
XSPIN_PAYLOAD
{
	__u32 zero = 0, one = 1, b[128] = {};
	struct value *v = bpf_map_lookup_elem(&values, &zero);
	struct key *k = bpf_map_lookup_elem(&keys, &zero);

	if (!v || !k)
		return XSPIN_SEGV;
	(void)one, (void)b;
#pragma clang loop unroll(disable)
	for (int i = 0; i < ` + fmt.Sprint(n) + `; i++)
		{ ` + call + `; }
	return XSPIN_DROP;
}
` + named + licence
}

// dearCalls are the dearest calls of handlers, and what takes long without arguments; so often they are refused, and
// a tenth as often they are not.
var dearCalls = map[string]struct {
	call    string
	refused int
}{
	"a lookup in a hash":            {"bpf_map_lookup_elem(&mine, k)", 60_000},
	"an update of a hash":           {"bpf_map_update_elem(&mine, k, v, 0)", 16_000},
	"an update of an array":         {"bpf_map_update_elem(&values, &one, v, 0)", 50_000},
	"a checksum":                    {"zero += bpf_csum_diff(0, 0, (__u32 *)v, 512, 0)", 50_000},
	"a load from the frame":         {"xspin_load(ctx, 0, v, 1400)", 80_000},
	"the time":                      {hundred("call 5"), 2500},
	"the time of the last tick":     {hundred("call 160"), 2500},
	"a random number":               {hundred("call 7"), 3000},
	"the number of a CPU":           {hundred("call 8"), 3000},
	"a division of 64 bits":         {hundred("r0 = -1\nr0 /= 3"), 4000},
	"a signed division of 64 bits":  {hundred("r0 s/= 3"), 8000},
	"a remainder of 64 bits":        {hundred("r0 %%= 3"), 8000},
	"a signed remainder of 64 bits": {hundred("r0 s%%= 3"), 8000},
	"an atomic operation, unrolled": {"__u64 *p = (void *)v; " + strings.Repeat("asm volatile(\"lock *(u64 *)(%0 + 0) += %0\" :: \"r\"(p)); ", 100), 2500},
}

// hundred returns instructions in C, a hundred times. They may use r0 to r5; r0 is a number.
func hundred(instructions string) string {
	return fmt.Sprintf("asm volatile(\"r0 = -7\\n.rept 100\\n%s\\n.endr\" ::: \"r0\", \"r1\", \"r2\", \"r3\", \"r4\", \"r5\")", strings.ReplaceAll(instructions, "\n", "\\n"))
}

// takesLong tells whether an object is refused since a packet may take too long. Anything else against it is an error.
func takesLong(t *testing.T, source string, limit int64, flags ...string) bool {
	t.Helper()
	o, err := ReadObject("test.o", objecttest.Compile(t, source, append(flags, "-Wno-unused")...), limit)
	if err != nil {
		t.Fatal(err)
	}
	h, err := o.Load(HandlersConfig{Format: matcher.FormatByName("packet")})
	if err == nil {
		h.Close()
		return false
	}
	if !strings.Contains(err.Error(), "a packet may take ") {
		t.Error(err)
	}
	return true
}

// The steps that the verifier counts bound how long a packet takes, since each call has a bound, too.
func TestHandlersThatTakeLongAreRefused(t *testing.T) {
	netnstest.NeedRoot(t)
	for name, tc := range dearCalls {
		for n, refused := range map[int]bool{tc.refused / 10: false, tc.refused: true} {
			if is := takesLong(t, often(n, tc.call), 1<<20, "-mcpu=v4"); is != refused {
				t.Errorf("%d times %s is refused: %v, want %v", n, name, is, refused)
			}
		}
	}
	// Atomic operations contend with other CPUs, and much memory is not in a cache.
	for name, source := range map[string]string{
		"an atomic operation": often(90_000, "__sync_fetch_and_add(&v->b[8 * (i & 63)], 1)"),
		"much memory":         strings.Replace(often(90_000, "zero += all[bpf_get_prandom_u32() & 0xfffff]"), "XSPIN_PAYLOAD", "__u8 all[1 << 20];\nXSPIN_PAYLOAD", 1),
	} {
		if !takesLong(t, strings.ReplaceAll(source, "&v->b[8 *", "(__u64 *)&v->b[8 *"), 4<<20, "-Wno-sync-alignment") {
			t.Errorf("%s is accepted", name)
		}
	}
	// All elements of a hash may be in one bucket.
	for entries, refused := range map[string]bool{"4": false, "1000": true} {
		for _, call := range []string{"bpf_map_lookup_elem(&mine, k)", "bpf_map_delete_elem(&mine, k)"} {
			source := strings.Replace(often(5_000, call), "max_entries, 4)", "max_entries, "+entries+")", 1)
			if is := takesLong(t, source, 8<<20); is != refused {
				t.Errorf("%s in a hash of %s is refused: %v, want %v", call, entries, is, refused)
			}
		}
	}
	// The engine's own steps are none of the handlers'.
	few := object(t, `#include "xspin_message.h"
struct { __uint(type, BPF_MAP_TYPE_HASH); __uint(max_entries, 1000); __type(key, __u32); __type(value, __u32); } mine SEC(".maps");
XSPIN_PAYLOAD
{
#pragma clang loop unroll(disable)
	for (__u32 i = 0; i < 4; i++) {
		__u32 k = her->key[0] + i;
		if (bpf_map_lookup_elem(&mine, &k))
			return XSPIN_DROP;
	}
	return XSPIN_SUCCESS;
}
XSPIN_MESSAGES(PAYLOAD);
XSPIN_LICENSE("GPL");
`)
	cfg, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: 4, Segments: 64})
	load(t, few, cfg)
	// Once, even the dearest may stand beside a loop.
	source := strings.Replace(often(5_000, `asm volatile("" : "+r"(zero))`), "\treturn XSPIN_DROP;\n", "\tbpf_map_update_elem(&mine, k, v, 0);\n\treturn XSPIN_DROP;\n", 1)
	load(t, object(t, source), HandlersConfig{})
}

// A refusal names the handler, and the line of it that takes longest.
func TestWhatTakesLongIsNamed(t *testing.T) {
	netnstest.NeedRoot(t)
	const dear, cheap = "for (int i = 0; i < 16000; i++) bpf_map_update_elem(&mine, k, v, 0);", "bpf_map_lookup_elem(&mine, k);"
	static := "static __noinline int many(struct key *k, struct value *v)\n{\n\t" + dear + "\n\treturn 0;\n}\n"
	for _, tc := range []struct{ name, source, want string }{
		{"in a handler", often(1, cheap+" } "+dear+" {"), ", in xspin_payload at test.bpf.c:19: { bpf_map_lookup_elem(&mine, k); } " + dear + " {; }"},
		{"in a function that one handler calls", strings.Replace(often(1, "many(k, v)"), "XSPIN_PAYLOAD\n", static+"XSPIN_PAYLOAD\n", 1), ", in xspin_payload at test.bpf.c:10: " + dear},
		{"a load that is in no cache", strings.Replace(often(90_000, "zero += all[bpf_get_prandom_u32() & 0xfffff]"), "XSPIN_PAYLOAD", "__u8 all[1 << 20];\nXSPIN_PAYLOAD", 1),
			"a load or store that is in no cache, which takes up to 100 ns, in xspin_payload at test.bpf.c:20: { zero += all[bpf_get_prandom_u32() & 0xfffff]; }"},
	} {
		o, err := ReadObject("test.o", objecttest.Compile(t, tc.source, "-Wno-unused", "-mcpu=v4"), 4<<20)
		if err != nil {
			t.Fatal(err)
		}
		h, err := o.Load(HandlersConfig{Format: matcher.FormatByName("packet")})
		if err == nil {
			h.Close()
			t.Errorf("%s: it is loaded", tc.name)
		} else if !strings.HasSuffix(err.Error(), tc.want) {
			t.Errorf("%s: %v\nwant at its end %s", tc.name, err, tc.want)
		}
	}
}

// The longest chain is reckoned of each call outside of loops, and of the element for which an LRU hash makes room.
func TestChainsOutsideOfLoops(t *testing.T) {
	once := func(kind, entries, call string) int64 {
		source := around("struct { __uint(type, "+kind+"); __uint(max_entries, "+entries+"); __type(key, __u32); __type(value, __u32); } mine SEC(\".maps\");",
			"\t__u32 k = her->len;\n\t"+call+";\n\treturn XSPIN_DROP;")
		return object(t, source).time.once
	}
	for _, tc := range []struct {
		name, kind, call string
		want             int64 // ns more with 5000 elements than with 10
	}{
		{"an array", "BPF_MAP_TYPE_ARRAY", "bpf_map_lookup_elem(&mine, &k)", 0},
		{"a lookup", "BPF_MAP_TYPE_HASH", "bpf_map_lookup_elem(&mine, &k)", 990 * hop},
		{"an update", "BPF_MAP_TYPE_HASH", "bpf_map_update_elem(&mine, &k, &k, 0)", 990 * hop},
		{"an update of each CPU", "BPF_MAP_TYPE_PERCPU_HASH", "bpf_map_update_elem(&mine, &k, &k, 0)", 990 * hop},
		{"a lookup in an LRU hash", "BPF_MAP_TYPE_LRU_HASH", "bpf_map_lookup_elem(&mine, &k)", 990 * hop * (lruBatch + 1)},
		{"an update of an LRU hash", "BPF_MAP_TYPE_LRU_HASH", "bpf_map_update_elem(&mine, &k, &k, 0)", 990 * hop * (lruBatch + 2)},
		{"an update of an LRU hash of each CPU", "BPF_MAP_TYPE_LRU_PERCPU_HASH", "bpf_map_update_elem(&mine, &k, &k, 0)", 990 * hop * (lruBatch + 2)},
	} {
		if got := once(tc.kind, "5000", tc.call) - once(tc.kind, "10", tc.call); got != tc.want {
			t.Errorf("%s: a longer chain takes %d ns more, want %d", tc.name, got, tc.want)
		}
	}
}

// BenchmarkDearCalls measures what calls take next to what is assumed of them: of the packets that take longest of
// those that are accepted, how long one takes, of the bound.
func BenchmarkDearCalls(b *testing.B) {
	nothing := func(*Object, *Handlers) {}
	for name, tc := range dearCalls {
		b.Run(name, func(b *testing.B) {
			benchmarkLongest(b, tc.refused, func(n int) string { return often(n, tc.call) }, nothing)
		})
	}
	const chain = 1000 // keys in a bucket
	b.Run("a lookup at the end of a chain", func(b *testing.B) {
		benchmarkLongest(b, 20_000, func(n int) string {
			return around(fmt.Sprintf("struct { __uint(type, BPF_MAP_TYPE_HASH); __uint(max_entries, %d); __type(key, __u64); __type(value, __u64); } mine SEC(\".maps\");", chain),
				fmt.Sprintf("\t__u64 k = %d;\n#pragma clang loop unroll(disable)\n\tfor (int i = 0; i < %d; i++)\n\t\tbpf_map_lookup_elem(&mine, &k);\n\treturn XSPIN_DROP;", colliding(chain)[0], n))
		}, func(o *Object, h *Handlers) {
			if h == nil {
				o.spec.Maps["mine"].Flags |= unix.BPF_F_ZERO_SEED
				return
			}
			for _, k := range colliding(chain) { // each goes to the front
				if err := h.coll.Maps["mine"].Put(k, k); err != nil {
					b.Fatal(err)
				}
			}
		})
	})
}

// benchmarkLongest measures the longest loop that is accepted. Prepare gets what was read, and then what was loaded, too.
func benchmarkLongest(b *testing.B, refused int, source func(n int) string, prepare func(*Object, *Handlers)) {
	var h *Handlers
	var o *Object
	for n := refused; h == nil && n > 0; n -= (n + 15) / 16 {
		var err error
		if o, err = ReadObject("test.o", objecttest.Compile(b, source(n), "-Wno-unused", "-mcpu=v4"), 1<<20); err != nil {
			b.Fatal(err)
		}
		prepare(o, nil)
		h, _ = o.Load(HandlersConfig{Format: matcher.FormatByName("packet")})
	}
	defer h.Close()
	prepare(o, h)
	_, steps, err := h.Instructions()
	if err != nil {
		b.Fatal(err)
	}
	frame := make([]byte, 1500)
	for b.Loop() {
		if _, err := h.Run(frame); err != nil {
			b.Fatal(err)
		}
	}
	bound, _, _ := o.time.of(steps, o.memory)
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(bound.Nanoseconds()), "of-the-bound")
}

// colliding returns keys of 64 bits that a hash of n elements whose seed is zero has in one bucket: those of the same jhash2.
func colliding(n int) (keys []uint64) {
	mask := uint32(1)<<bits.Len(uint(n-1)) - 1
	rol := bits.RotateLeft32
	for key := uint64(1); len(keys) < n; key++ {
		const start = 0xdeadbeef + 2*4
		a, b, c := start+uint32(key), start+uint32(key>>32), uint32(start)
		c = (c ^ b) - rol(b, 14)
		a = (a ^ c) - rol(c, 11)
		b = (b ^ a) - rol(a, 25)
		c = (c ^ b) - rol(b, 16)
		a = (a ^ c) - rol(c, 4)
		b = (b ^ a) - rol(a, 14)
		c = (c ^ b) - rol(b, 24)
		if c&mask == 0 {
			keys = append(keys, key)
		}
	}
	return keys
}
