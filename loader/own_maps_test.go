// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"strings"
	"testing"

	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/spin"
)

// The maps of an object's own are described by their sizes, and those that are loaded by what is in them, too.
func TestOwnMaps(t *testing.T) {
	netnstest.NeedRoot(t)
	source := include
	for _, m := range [][2]string{{"few", "HASH"}, {"many", "LRU_HASH"}, {"words", "ARRAY"}, {"each", "PERCPU_HASH"}} {
		source += fmt.Sprintf("struct { __uint(type, BPF_MAP_TYPE_%s); __uint(max_entries, 2000); __type(key, __u32); __type(value, __u64); } %s SEC(\".maps\");\n", m[1], m[0])
	}
	source += "const volatile __u32 port = 7;\nstatic volatile __u32 seen;\nXSPIN_PAYLOAD\n{\n\t__u32 k = her->len + port;\n\t__u64 v = ++seen;\n"
	for _, m := range []string{"few", "many", "words", "each"} {
		source += "\tbpf_map_update_elem(&" + m + ", &k, &v, 0);\n"
	}
	source += "\treturn XSPIN_DROP;\n}\n" + named + licence

	o := object(t, source)
	describe := func(all []spin.OwnMap) string {
		var b strings.Builder
		for i := range all {
			fmt.Fprintf(&b, "%s: %v\n", all[i].Name, &all[i])
		}
		return b.String()
	}
	const sizes = ", keys of 4 bytes, values of 8, "
	want := ".bss: global variables, 4 bytes\neach: percpu_hash" + sizes + "2000 entries\nfew: hash" + sizes + "2000 entries\nmany: lru_hash" + sizes + "2000 entries\nwords: array" + sizes + "2000 entries\n"
	if got := describe(o.OwnMaps()); got != want {
		t.Errorf("before it is loaded:\n%swant\n%s", got, want)
	}

	h := load(t, o, HandlersConfig{Format: matcher.FormatByName("packet")})
	for _, length := range []int{60, 61, 62} {
		if _, err := h.Run(make([]byte, length)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range uint32(1500) {
		if err := h.coll.Maps["many"].Put(i, uint64(i)); err != nil {
			t.Fatal(err)
		}
	}
	all, err := h.OwnMaps()
	if err != nil {
		t.Fatal(err)
	}
	for i := range all {
		if all[i].ID == 0 {
			t.Errorf("%s has no number", all[i].Name)
		}
		all[i].ID = 0 // differs each time
	}
	want = strings.NewReplacer("each: percpu_hash"+sizes, "each: percpu_hash"+sizes+"3 of ", "few: hash"+sizes, "few: hash"+sizes+"3 of ", "many: lru_hash"+sizes, "many: lru_hash"+sizes+"1024 or more of ").Replace(want)
	if got := describe(all); got != want {
		t.Errorf("loaded:\n%swant\n%s", got, want)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	if all, err := h.OwnMaps(); all != nil || err != nil {
		t.Errorf("after the end: %v, %v", all, err)
	}
}
