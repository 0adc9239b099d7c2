// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/loader/objecttest"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns/netnstest"
)

// Whatever the kernel would take of a program that is loaded with all rights, an object can
// use it only for what is its own. Each way is written as an instruction, since no compiler makes it. The
// descriptor is of a map that exists, and that no object has.
func TestWhatAnObjectCannotReach(t *testing.T) {
	secret, err := ebpf.NewMap(&ebpf.MapSpec{Name: "secret", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1, Flags: unix.BPF_F_MMAPABLE})
	if err != nil {
		netnstest.NeedRoot(t)
		t.Fatal(err)
	}
	defer secret.Close()
	// wide loads 64 bits into r0, with src as the instruction's source register.
	wide := func(src int) string {
		return fmt.Sprintf("\t__u64 v;\n\tasm volatile(\".byte 0x18, %#x, 0, 0\\n.long %d\\n.quad 0\\n%%0 = r0\" : \"=r\"(v) : : \"r0\");\n\treturn v & 1;", src<<4, secret.FD())
	}
	// one is an instruction of opcode, registers, offset and number.
	one := func(op, regs, off, imm int) string {
		return fmt.Sprintf("\t__u64 v;\n\tasm volatile(\"r0 = 0\\n.byte %#x, %#x\\n.short %d\\n.long %d\\n%%0 = r0\" : \"=r\"(v) : : \"r0\", \"r1\", \"r2\", \"r3\", \"r4\", \"r5\");\n\treturn v & 1;", op, regs, off, imm)
	}
	const strange = "an instruction that handlers may not have"
	for _, tc := range []struct{ name, globals, body, want string }{
		{"a map by the number of a descriptor", "", wide(1), "xspin_payload, line 6: refers to a map that is none of the object's own"},
		{"the memory of a map by the number of a descriptor", "", wide(2), "refers to a map that is none of the object's own"},
		{"a map by its place in a list of descriptors", "", wide(5), "refers to something of the kernel"},
		{"the memory of a map by its place in a list", "", wide(6), "refers to something of the kernel"},
		{"a variable of the kernel's by the number of its type", "", wide(3), "refers to something of the kernel"},
		{"a function by its place", "", wide(4), "an error"},
		{"a kind that there is not yet", "", wide(7), "refers to something of the kernel"},
		{"a number", "", wide(0), ""},
		{"a map of the engine's by its name", "struct { __uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, 1); __type(key, __u32); __type(value, __u64); } xspin_posted SEC(\".maps\");",
			"\t__u32 zero = 0;\n\treturn !bpf_map_lookup_elem(&xspin_posted, &zero);", "map xspin_posted: names that begin with xspin are xspin_handler.h's"},
		{"the engine's constants by the section", "", "\treturn xspin_version == 7;", "refers to a map that is none of the object's own"},
		{"a function by its distance", "", one(0x85, 0x10, 0, 5), "an error"},
		{"a function of the kernel's by its number", "", one(0x85, 0x20, 0, 5), "calls the kernel function"},
		{"a helper by its number", "", one(0x85, 0, 0, 113), "calls bpf_probe_read_kernel, which handlers may not"},
		{"bpf_csum_diff by its number", "", one(0x85, 0, 0, 28), "calls bpf_csum_diff by its number: xspin_handler.h has it with a bound"},
		{"a helper that there is not", "", one(0x85, 0, 0, 4000), "which handlers may not"},
		{"a cast between address spaces", "", one(0xbf, 0x00, 1, 1), strange},
		{"memory of a CPU", "", one(0xbf, 0x00, -1, 0), strange},
		{"a load from the packet by number", "", one(0x30, 0, 0, 0), strange},
		{"a jump to where a register says", "", one(0x0d, 0x00, 0, 0), strange},
		{"a load of the kernel's own kind", "", one(0x20|0x01, 0x00, 0, 0), strange},
		{"a register that there is not", "", one(0xbf, 0xb0, 0, 0), strange},
		{"a call of 32 bits", "", one(0x86, 0x10, 0, 0), strange},
		{"a type of the kernel's", "struct task_struct { int pid; } __attribute__((preserve_access_index));", "\treturn __builtin_preserve_field_info(((struct task_struct *)0)->pid, 0) == 5;", "refers to a type of the kernel"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			file := objecttest.Compile(t, around(tc.globals, tc.body), "-Wno-everything")
			_, err := ReadObject("test.o", file, 1<<20)
			switch {
			case tc.want == "" && err == nil:
			case tc.want == "an error" && errors.Is(err, ErrObject):
			case tc.want == "" || err == nil || !errors.Is(err, ErrObject) || !strings.Contains(err.Error(), tc.want):
				t.Errorf("%v\nwant %q", err, tc.want)
			}
		})
	}
}

// The address of a map is good for helpers. Behind it lies a structure of the kernel's, with pointers to others.
func TestAddressesOfMapsGoToHelpersAlone(t *testing.T) {
	const mine = "struct { __uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, 4); __type(key, __u32); __type(value, __u64); } mine SEC(\".maps\");\n__u64 out;"
	const refused = "uses the address of a map, which is for the first argument of a helper alone"
	code := func(code string) string {
		return "\t__u64 v = her->len;\n\tasm volatile(\"r1 = %1 ll\\n" + code + "\\n%0 = r2\" : \"+r\"(v) : \"i\"(&mine) : \"r0\", \"r1\", \"r2\", \"r3\", \"r4\", \"r5\");\n\tout = v;\n\treturn XSPIN_DROP;"
	}
	for _, tc := range []struct{ name, globals, body, want string }{
		{"a lookup", mine, "\t__u32 zero = 0;\n\treturn !bpf_map_lookup_elem(&mine, &zero);", ""},
		{"one by a copy of the address", mine, code("r3 = r1; r2 = 0; *(u32 *)(r10 - 4) = r2; r2 = r10; r2 += -4; r1 = r3; call 1; r2 = 0"), ""},
		{"a load from behind it", mine, code("r2 = *(u64 *)(r1 + 40)"), refused},
		{"a load from behind a copy of it", mine, code("r3 = r1; r2 = 7; r2 = *(u64 *)(r3 + 128)"), refused},
		{"a load on one of two ways", mine, code("r3 = r10; if r3 == 0 goto +1; r3 = r1; r2 = *(u64 *)(r3 - 8)"), refused},
		{"a store to it", mine, code("r2 = 0; *(u64 *)(r1 + 40) = r2"), refused},
		{"a store of it", mine, code("r2 = 0; *(u64 *)(r10 - 8) = r1"), refused},
		{"arithmetic", mine, code("r1 += 40; r2 = r1"), refused},
		{"a comparison", mine, code("r2 = 0; if r1 > r2 goto +0"), refused},
		{"a function of its own", mine + "\nstatic __attribute__((noinline)) long take(void *m) { asm volatile(\"\" : \"+r\"(m)); return *(long *)m; }", "\treturn take(&mine);", refused},
		{"a function of the engine's", mine, "\tasm volatile(\"\" ::: \"memory\");\n\treturn !xspin_memory((__u64)&mine, 8);", refused},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			_, err := ReadObject("test.o", objecttest.Compile(t, around(tc.globals, tc.body), "-Wno-everything"), 1<<20)
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v\nwant %q", err, tc.want)
			}
		})
	}
}

// A call that names a function of the headers, and says beside it how far away another one is, calls the other.
func TestCallsByDistance(t *testing.T) {
	file := objecttest.Compile(t, around("", "\txspin_count(0, 1);\n\treturn XSPIN_DROP;"))
	f, err := elf.NewFile(bytes.NewReader(file))
	if err != nil {
		t.Fatal(err)
	}
	b, n := sectionOf(f, file, ".text"), 0
	for i := 0; i+8 <= len(b); i += 8 {
		if bytes.Equal(b[i:][:8], []byte{0x85, 0x10, 0, 0, 0xff, 0xff, 0xff, 0xff}) {
			b[i+4], b[i+5], b[i+6], b[i+7] = 5, 0, 0, 0
			n++
		}
	}
	if _, err := ReadObject("test.o", file, 1<<20); n != 1 || err == nil || !strings.Contains(err.Error(), "calls xspin_count by a distance") {
		t.Errorf("%d calls: %v", n, err)
	}
}

// A header of a few bytes is not believed, whatever sizes it says.
func TestObjectsThatSayTheyAreLarge(t *testing.T) {
	file := objecttest.Compile(t, around("int x[2];", "\tx[0]++;\n\treturn XSPIN_DROP;"))
	f, err := elf.NewFile(bytes.NewReader(file))
	if err != nil {
		t.Fatal(err)
	}
	le := binary.LittleEndian
	headers := le.Uint64(file[0x28:])
	section := func(name string, off int, v uint64) []byte {
		b := bytes.Clone(file)
		i := slices.IndexFunc(f.Sections, func(s *elf.Section) bool { return s.Name == name })
		le.PutUint64(b[headers+64*uint64(i)+uint64(off):], v)
		return b
	}
	symbol := func(name string, size uint64) []byte {
		b := bytes.Clone(file)
		symbols, err := f.Symbols()
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(symbols, func(s elf.Symbol) bool { return s.Name == name })
		le.PutUint64(sectionOf(f, b, ".symtab")[24*(i+1)+16:], size)
		return b
	}
	for _, tc := range []struct {
		name string
		file []byte
		want string
	}{
		{"as it is", file, ""},
		{"half a gigabyte of zeros", section(".bss", 0x20, 1<<29), "its sections have more than"},
		{"all that there is", section(".bss", 0x20, ^uint64(0)), "invalid section size"},
		{"compressed", section(".text", 8, uint64(elf.SHF_COMPRESSED|elf.SHF_EXECINSTR)), "section .text is compressed"},
		{"a function as large as all", symbol("xspin_count", 1<<20), "its functions overlap"},
		{"a function over another", symbol("xspin_count", f.Section(".text").Size-8), "its functions overlap"},
		{"a file without end", append(bytes.Clone(file), make([]byte, MaxObjectFile)...), "bytes: want at most"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := ReadObject("test.o", tc.file, 1<<20)
			runtime.ReadMemStats(&after)
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v, want %q", err, tc.want)
			}
			if n := after.TotalAlloc - before.TotalAlloc; n > 32<<20 {
				t.Errorf("it takes %d bytes to read", n)
			}
		})
	}
}

// A vandal damages objects.
type vandal struct {
	rand *rand.Rand
	fd   int // of a map that is none of its own
}

// sectionOf returns the bytes of a section, nil if there is none.
func sectionOf(f *elf.File, file []byte, name string) []byte {
	s := f.Section(name)
	if s == nil || s.Type == elf.SHT_NOBITS || s.Offset+s.Size > uint64(len(file)) {
		return nil
	}
	return file[s.Offset:][:s.Size]
}

// instructions damages some instructions: bits, or a load of a map that is not its own.
func (d *vandal) instructions(f *elf.File, file []byte) {
	b := sectionOf(f, file, []string{".text", "xdp.frags"}[d.rand.IntN(2)])
	if len(b) < 16 {
		return
	}
	i := d.rand.IntN(len(b)/8-1) * 8
	switch d.rand.IntN(4) {
	case 0:
		b[i] ^= 1 << d.rand.IntN(8)
	case 1:
		b[i+d.rand.IntN(8)] = byte(d.rand.Uint32())
	case 2:
		b[i], b[i+1] = 0x18, byte(d.rand.IntN(8)<<4|d.rand.IntN(10))
		binary.LittleEndian.PutUint16(b[i+2:], 0)
		binary.LittleEndian.PutUint32(b[i+4:], uint32(d.fd))
		binary.LittleEndian.PutUint64(b[i+8:], 0)
	default:
		b[i], b[i+1] = 0x85, byte(d.rand.IntN(3)<<4)
		binary.LittleEndian.PutUint16(b[i+2:], 0)
		binary.LittleEndian.PutUint32(b[i+4:], uint32(d.rand.IntN(220)))
	}
}

// sections damages one of these sections anywhere, with bytes or with a number from it elsewhere, so that
// types name themselves, and relocations other symbols.
func (d *vandal) sections(names ...string) func(*elf.File, []byte) {
	return func(f *elf.File, file []byte) {
		b := sectionOf(f, file, names[d.rand.IntN(len(names))])
		if len(b) < 8 {
			return
		}
		for range 1 + d.rand.IntN(3) {
			to, from := d.rand.IntN(len(b)/4)*4, d.rand.IntN(len(b)/4)*4
			switch d.rand.IntN(4) {
			case 0:
				copy(b[to:][:4], b[from:][:4])
			case 1:
				binary.LittleEndian.PutUint32(b[to:], uint32(d.rand.IntN(200)))
			case 2:
				b[to+d.rand.IntN(4)] ^= 1 << d.rand.IntN(8)
			default:
				binary.LittleEndian.PutUint32(b[to:], d.rand.Uint32())
			}
		}
	}
}

// Objects that were damaged, at random and on purpose, are errors, or harmless: nothing panics, or takes
// for ever, and none reaches a map that is not its own: one lies beside it, and its descriptor is known.
func TestDamagedObjects(t *testing.T) {
	netnstest.NeedRoot(t)
	oracle, err := ebpf.NewMap(&ebpf.MapSpec{Name: "oracle", Type: ebpf.Array, KeySize: 4, ValueSize: 64, MaxEntries: 1, Flags: unix.BPF_F_MMAPABLE})
	if err != nil {
		t.Fatal(err)
	}
	defer oracle.Close()
	canary := bytes.Repeat([]byte{0xa5}, 64)
	if err := oracle.Put(uint32(0), canary); err != nil {
		t.Fatal(err)
	}
	info, err := oracle.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, _ := info.ID()

	type subject struct {
		file []byte
		cfg  HandlersConfig
		load int // one in so many that are accepted is loaded: the engine of messages takes the verifier longer
	}
	messages, _ := messagesConfig(t, 1<<20, MessagesConfig{Messages: 2, Segments: 64})
	subjects := []subject{
		{bpf.Handlers["count"], HandlersConfig{Format: matcher.FormatByName("packet")}, 2},
		{bpf.Handlers["echo-udp"], HandlersConfig{Format: matcher.FormatByName("packet")}, 2},
		{objecttest.Compile(t, include+`
struct { __uint(type, BPF_MAP_TYPE_HASH); __uint(max_entries, 4); __type(key, __u32); __type(value, __u64); } mine SEC(".maps");
const volatile __u32 port = 7;
__u64 total;
XSPIN_PAYLOAD
{
	__u32 key = her->len;
	__u64 *n = bpf_map_lookup_elem(&mine, &key), one = 1;

	total += port;
	if (n)
		__sync_fetch_and_add(n, 1);
	else
		bpf_map_update_elem(&mine, &key, &one, 0);
	return XSPIN_DROP;
}
`+named+licence), HandlersConfig{Format: matcher.FormatByName("packet")}, 2},
		{bpf.Handlers["deposit"], messages, 40},
		{objecttest.Compile(t, tellingSource), messages, 40},
	}
	n := 10_000 * testenv.Soak()
	if testenv.Race || testing.Short() {
		n = 1_000
	}
	d := vandal{rand.New(rand.NewPCG(1, 2)), oracle.FD()}
	ways := []func(*elf.File, []byte){
		d.instructions, d.instructions,
		d.sections(".rel.text", ".relxdp.frags", ".rel.maps"), d.sections(".BTF"), d.sections(".BTF.ext", ".maps", ".symtab"),
		func(_ *elf.File, file []byte) { file[d.rand.IntN(len(file))] = byte(d.rand.Uint32()) },
	}
	accepted, loaded, ran := 0, 0, 0
	frame := make([]byte, 100)
	for i := range n {
		s := &subjects[i%len(subjects)]
		file := bytes.Clone(s.file)
		f, err := elf.NewFile(bytes.NewReader(file))
		if err != nil {
			t.Fatal(err)
		}
		for range 1 + d.rand.IntN(2) {
			ways[d.rand.IntN(len(ways))](f, file)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			o, err := ReadObject("damaged.o", file, 1<<20)
			if err != nil {
				if !errors.Is(err, ErrObject) {
					t.Errorf("%d: %v", i, err)
				}
				return
			}
			accepted++
			if accepted%s.load != 0 {
				return
			}
			loaded++
			h, err := o.Load(s.cfg)
			if err != nil {
				return
			}
			defer h.Close()
			for _, p := range h.coll.Programs {
				info, err := p.Info()
				if err != nil {
					t.Errorf("%d: %v", i, err)
					continue
				}
				if ids, _ := info.MapIDs(); slices.Contains(ids, id) {
					t.Errorf("%d: a program has a map that is none of its own", i)
				}
			}
			if _, err := h.Run(frame); err == nil {
				ran++
			}
			h.Stats()
		}()
		select {
		case <-done:
		case <-time.After(time.Minute * testenv.Slowness()):
			buf := make([]byte, 1<<16)
			t.Fatalf("%d: it has taken a minute:\n%s", i, buf[:runtime.Stack(buf, true)])
		}
		if t.Failed() {
			break
		}
	}
	got := make([]byte, 64)
	if err := oracle.Lookup(uint32(0), &got); err != nil || !bytes.Equal(got, canary) {
		t.Errorf("the map beside is % x, %v", got, err)
	}
	t.Logf("%d objects: %d accepted, %d loaded, %d run", n, accepted, loaded, ran)
	if accepted < n/20 || ran < n/100 {
		t.Errorf("of %d objects %d were accepted, %d loaded and %d run: too few for this to tell much", n, accepted, loaded, ran)
	}
}

// Parameters have sizes that values fit in, whatever the types of an object say.
func TestParametersOfStrangeSizes(t *testing.T) {
	for size, want := range map[uint32]bool{0: false, 1: true, 2: true, 3: false, 4: true, 8: true, 9: false, 16: false, 1 << 31: false} {
		for _, typ := range []btf.Type{&btf.Int{Size: size}, &btf.Enum{Size: size}, &btf.Enum{Size: size, Values: []btf.EnumValue{{Name: "a", Value: 1}}}} {
			if _, ok := kindOf(typ); ok != want {
				t.Errorf("%v of %d bytes: %v, want %v", typ, size, ok, want)
			}
		}
	}
}
