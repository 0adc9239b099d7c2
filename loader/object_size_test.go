// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf/btf"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/loader/objecttest"
)

// A forgery is an object file to which somebody adds what no compiler makes.
type forgery struct {
	sections []forged
	symbols  []byte
	texts    []byte // of symbols and sections
}

type forged struct {
	elf.Section64
	data []byte
}

// newForgery takes a built-in object apart.
func newForgery(t testing.TB) *forgery {
	t.Helper()
	file := bpf.Handlers["count"]
	f, err := elf.NewFile(bytes.NewReader(file))
	if err != nil {
		t.Fatal(err)
	}
	o := &forgery{texts: []byte{0}}
	for _, s := range f.Sections {
		h := elf.Section64{Name: o.text(s.Name), Type: uint32(s.Type), Flags: uint64(s.Flags), Size: s.Size, Link: s.Link, Info: s.Info, Addralign: s.Addralign, Entsize: s.Entsize}
		var data []byte
		if s.Type != elf.SHT_NULL && s.Type != elf.SHT_NOBITS {
			if data, err = s.Data(); err != nil {
				t.Fatal(err)
			}
		}
		o.sections = append(o.sections, forged{h, data})
	}
	o.symbols = make([]byte, elf.Sym64Size)
	symbols, err := f.Symbols()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range symbols {
		o.symbol(s.Name, s.Info, int(s.Section), s.Value, s.Size)
	}
	return o
}

func (o *forgery) text(s string) uint32 {
	at := len(o.texts)
	o.texts = append(append(o.texts, s...), 0)
	return uint32(at)
}

func (o *forgery) symbol(name string, info byte, section int, value, size uint64) {
	o.symbolAt(o.text(name), info, section, value, size)
}

func (o *forgery) symbolAt(name uint32, info byte, section int, value, size uint64) {
	le := binary.LittleEndian
	o.symbols = le.AppendUint32(o.symbols, name)
	o.symbols = append(o.symbols, info, 0)
	o.symbols = le.AppendUint16(o.symbols, uint16(section))
	o.symbols = le.AppendUint64(le.AppendUint64(o.symbols, value), size)
}

// section adds one, and returns its number.
func (o *forgery) section(name string, kind elf.SectionType, flags elf.SectionFlag, data []byte, size int) int {
	h := elf.Section64{Name: o.text(name), Type: uint32(kind), Flags: uint64(flags), Size: uint64(size), Addralign: 1}
	o.sections = append(o.sections, forged{h, data})
	return len(o.sections) - 1
}

func (o *forgery) find(name string) *forged {
	i := slices.IndexFunc(o.sections, func(s forged) bool { return bytes.HasPrefix(o.texts[s.Name:], append([]byte(name), 0)) })
	return &o.sections[i]
}

// types appends to the types, and a name to their names; make gets where the name is, and the number of its first type.
func (o *forgery) types(name string, make func(name, id uint32) []byte) {
	s := o.find(".BTF")
	le := binary.LittleEndian
	at := le.Uint32(s.data[4:])
	types := s.data[at:][le.Uint32(s.data[8:]):][:le.Uint32(s.data[12:])]
	texts := s.data[at:][le.Uint32(s.data[16:]):][:le.Uint32(s.data[20:])]
	spec, err := btf.LoadSpecFromReader(bytes.NewReader(s.data))
	if err != nil {
		panic(err)
	}
	id := uint32(1) // 0 is of no type
	for range spec.All() {
		id++
	}
	types = append(bytes.Clone(types), make(uint32(len(texts)), id)...)
	texts = append(append(bytes.Clone(texts), name...), 0)
	b := bytes.Clone(s.data[:at])
	le.PutUint32(b[8:], 0)
	le.PutUint32(b[12:], uint32(len(types)))
	le.PutUint32(b[16:], uint32(len(types)))
	le.PutUint32(b[20:], uint32(len(texts)))
	s.data = slices.Concat(b, types, texts)
	s.Size = uint64(len(s.data))
}

// bytes puts the file together. Sections with the same bytes share them.
func (o *forgery) bytes() []byte {
	le := binary.LittleEndian
	b := make([]byte, 64)
	copy(b, elf.ELFMAG+"\x02\x01\x01")
	le.PutUint16(b[16:], uint16(elf.ET_REL))
	le.PutUint16(b[18:], uint16(elf.EM_BPF))
	le.PutUint32(b[20:], 1)
	at := map[*byte]int{}
	names := 0
	for i := range o.sections {
		s := &o.sections[i]
		switch elf.SectionType(s.Type) {
		case elf.SHT_SYMTAB:
			s.data, s.Size = o.symbols, uint64(len(o.symbols))
		case elf.SHT_STRTAB:
			s.data, s.Size, names = o.texts, uint64(len(o.texts)), i
		}
		if len(s.data) == 0 {
			s.Off = uint64(len(b))
			continue
		}
		if at[&s.data[0]] == 0 {
			at[&s.data[0]] = len(b)
			b = append(b, s.data...)
		}
		s.Off = uint64(at[&s.data[0]])
	}
	headers := len(b)
	for _, s := range o.sections {
		var w bytes.Buffer
		binary.Write(&w, le, s.Section64)
		b = append(b, w.Bytes()...)
	}
	le.PutUint64(b[0x28:], uint64(headers))
	le.PutUint16(b[0x34:], 64)
	le.PutUint16(b[0x3a:], 64)
	le.PutUint16(b[0x3c:], uint16(len(o.sections)))
	le.PutUint16(b[0x3e:], uint16(names))
	return b
}

// Types in the form of BTF: a kind, n of something, and words.
func btfType(name, kind uint32, n int, words ...uint32) (b []byte) {
	for _, w := range append([]uint32{name, kind<<24 | uint32(n)}, words...) {
		b = binary.LittleEndian.AppendUint32(b, w)
	}
	return b
}

const (
	object8  = byte(elf.STB_GLOBAL)<<4 | byte(elf.STT_OBJECT)
	function = byte(elf.STB_GLOBAL)<<4 | byte(elf.STT_FUNC)
)

// variablesOf adds variables to a file with a large type.
func variablesOf(o *forgery, info byte, flags elf.SectionFlag) {
	n := o.section(".bss", elf.SHT_NOBITS, flags, nil, 1<<20)
	for i := range 1000 {
		o.symbol(fmt.Sprint("v", i), info, n, uint64(i), 1)
	}
	o.types("x", func(name, _ uint32) []byte {
		return append(btfType(name, 4, 10_000, 0), make([]byte, 12*10_000)...)
	})
}

// programsOf adds programs of one call each, of the same function, which has most of the file.
func programsOf(o *forgery, programs int) {
	const size = 400 << 10
	exit := []byte{0x95, 0, 0, 0, 0, 0, 0, 0}
	b := bytes.Repeat(exit, size/8+2*programs)
	for i := range programs { // a call and an exit each, after the function
		at := size/8 + 2*i
		b[8*at], b[8*at+1] = 0x85, 0x10
		binary.LittleEndian.PutUint32(b[8*at+4:], uint32(-(at + 1)))
	}
	n := o.section("xdp.more", elf.SHT_PROGBITS, elf.SHF_EXECINSTR, b, len(b))
	o.symbol("large", function, n, 0, size)
	for i := range programs {
		o.symbol(fmt.Sprint("p", i), function, n, size+16*uint64(i), 16)
	}
}

// forgeries are files of some 500 KiB in which numbers are multiplied by whoever reads them.
var forgeries = []struct {
	name string
	make func(o *forgery)
	want string // "": it is accepted
}{
	{"nothing", func(*forgery) {}, ""},
	{"a section with a name that a terminal obeys", func(o *forgery) {
		o.section(".data.\x1b[31m", elf.SHT_PROGBITS, elf.SHF_ALLOC, []byte{1}, 1)
	}, `a section has the name ".data.\x1b[31m": want printable ASCII`},
	{"a variable with such a name", func(o *forgery) {
		o.symbol("v\u009b31m", object8, o.section(".data", elf.SHT_PROGBITS, elf.SHF_ALLOC, []byte{1}, 1), 0, 1)
	}, `a symbol has the name "v\u009b31m": want printable ASCII`},
	{"a function that is elsewhere, with such a name", func(o *forgery) {
		o.symbol("f\xff", function, 0, 0, 0)
	}, `a symbol has the name "f\xff": want printable ASCII`},
	{"a type with such a name", func(o *forgery) {
		o.types("t\a", func(name, _ uint32) []byte { return btfType(name, 8, 0, 1) })
	}, `one of its types has the name "t\a": want printable ASCII`},
	{"a value of an enum with such a name", func(o *forgery) {
		o.types("\u202ex", func(name, _ uint32) []byte { return append(btfType(0, 6, 1, 4), btfType(name, 0, 7)...) })
	}, `one of its types has the name "\u202ex": want printable ASCII`},
	{"many sections", func(o *forgery) {
		for i := range 5000 {
			o.section(fmt.Sprint(".data.", i), elf.SHT_PROGBITS, elf.SHF_ALLOC, []byte{byte(i)}, 1)
		}
	}, "it has more than 256 sections"},
	{"sections with one long name", func(o *forgery) {
		o.section(strings.Repeat("x", 400<<10), elf.SHT_PROGBITS, 0, nil, 0)
		for range 200 {
			o.sections = append(o.sections, o.sections[len(o.sections)-1])
		}
	}, "names of sections have up to 409600 bytes: want at most 511"},
	{"sections that share their bytes", func(o *forgery) {
		b := make([]byte, 300<<10)
		for i := range 100 {
			o.section(fmt.Sprint("xdp.frags", i), elf.SHT_PROGBITS, elf.SHF_EXECINSTR, b, len(b))
		}
	}, "its sections have more than the"},
	{"many symbols", func(o *forgery) {
		for range 20_000 {
			o.symbolAt(1, object8, 0, 0, 0)
		}
	}, "symbols: want at most 16384"},
	{"variables that are all of a section", func(o *forgery) {
		n := o.section(".bss", elf.SHT_NOBITS, elf.SHF_ALLOC|elf.SHF_WRITE, nil, 1<<20)
		for i := range 10_000 {
			o.symbol(fmt.Sprint("v", i), object8, n, uint64(i), 1<<20-10_000)
		}
	}, "its variables overlap"},
	{"variables of a large type", func(o *forgery) { variablesOf(o, object8, elf.SHF_ALLOC|elf.SHF_WRITE) }, "variables and 12"},
	{"variables of a large type, without a type of symbol", func(o *forgery) { variablesOf(o, byte(elf.STB_GLOBAL)<<4, elf.SHF_ALLOC|elf.SHF_WRITE) }, "variables and 12"},
	{"variables of a large type, in a section of code", func(o *forgery) { variablesOf(o, object8, elf.SHF_ALLOC|elf.SHF_EXECINSTR) }, "variables and 12"},
	{"many functions", func(o *forgery) {
		b := bytes.Repeat([]byte{0x95, 0, 0, 0, 0, 0, 0, 0}, 5000)
		o.find(".text").Name = o.text("other")
		n := o.section(".text", elf.SHT_PROGBITS, elf.SHF_EXECINSTR, b, len(b))
		for i := range 5000 {
			o.symbol(fmt.Sprint("f", i), function, n, uint64(8*i), 8)
		}
	}, "functions: the kernel takes programs of at most 256"},
	{"many programs that call many functions", func(o *forgery) {
		b := bytes.Repeat([]byte{0x95, 0, 0, 0, 0, 0, 0, 0}, 500)
		n := o.section("xdp.more", elf.SHT_PROGBITS, elf.SHF_EXECINSTR, b, len(b))
		for i := range 500 {
			o.symbol(fmt.Sprint("f", i), function, n, uint64(8*i), 8)
		}
	}, "it has 501 programs, and no more than 8 are looked at: want one, and handlers as functions"},
	{"programs that call a large function", func(o *forgery) { programsOf(o, mostPrograms-1) }, "it has 9 programs, and no more than 8 are looked at"},
	{"as many programs that call a large function as are looked at", func(o *forgery) { programsOf(o, mostPrograms-2) }, "it has other programs: large"},
	{"many maps", func(o *forgery) {
		n := o.section(".maps", elf.SHT_PROGBITS, elf.SHF_ALLOC|elf.SHF_WRITE, make([]byte, 8000), 8000)
		for i := range 1000 {
			o.symbol(fmt.Sprint("m", i), object8, n, uint64(8*i), 8)
		}
	}, "maps: the kernel takes programs with at most 64"},
	{"a map as large as memory", func(o *forgery) {
		n := o.section(".maps", elf.SHT_NOBITS, elf.SHF_ALLOC|elf.SHF_WRITE, nil, 1<<20)
		o.symbol("m", object8, n, 0, 1<<20)
	}, "section .maps is not in the file"},
	{"two sections of types", func(o *forgery) {
		o.section(".BTF", elf.SHT_PROGBITS, 0, []byte{1}, 1)
	}, `it has two sections ".BTF"`},
	{"two sections of variables with one name", func(o *forgery) {
		for range 2 {
			o.section(".data.x", elf.SHT_PROGBITS, elf.SHF_ALLOC|elf.SHF_WRITE, []byte{1}, 1)
		}
	}, `it has two sections ".data.x"`},
	{"types with one long name", func(o *forgery) {
		o.types(strings.Repeat("x", 200<<10), func(name, _ uint32) (b []byte) {
			for range 20_000 {
				b = append(b, btfType(name, 8, 0, 1)...)
			}
			return b
		})
	}, "a name among its types has more than 511 bytes"},
	{"values with one long name", func(o *forgery) {
		o.types(strings.Repeat("x", 200<<10), func(name, _ uint32) []byte {
			b := btfType(0, 6, 20_000, 4)
			for i := range uint32(20_000) {
				b = binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(b, name), i)
			}
			return b
		})
	}, "a name among its types has more than 511 bytes"},
	{"many settings of the kernel", func(o *forgery) {
		o.types(".kconfig", func(name, _ uint32) []byte {
			return append(btfType(name, 15, 20_000, 0), make([]byte, 12*20_000)...)
		})
	}, "it refers to 20000 variables of the kernel"},
	{"many references to types of the kernel", func(o *forgery) {
		s := o.find(".BTF.ext")
		b := make([]byte, 300<<10)
		copy(b, s.data)
		binary.LittleEndian.PutUint32(b[24:], uint32(len(s.data)))
		binary.LittleEndian.PutUint32(b[28:], uint32(len(b)-len(s.data)))
		s.data, s.Size = b, uint64(len(b))
	}, "it refers to types of the kernel at"},
	{"a variable whose type is a pointer to a pointer, and so on", func(o *forgery) {
		const deep = 30_000
		n := o.section(".data.deep", elf.SHT_PROGBITS, elf.SHF_ALLOC|elf.SHF_WRITE, make([]byte, 8), 8)
		o.symbol("deep", object8, n, 0, 8)
		o.types("deep\x00.data.deep", func(name, id uint32) []byte {
			b := btfType(0, 2, 0, 0)
			for i := range uint32(deep - 1) {
				b = append(b, btfType(0, 2, 0, id+i)...)
			}
			b = append(b, btfType(name, 14, 0, id+deep-1, 1)...)
			return append(b, btfType(name+5, 15, 1, 8, id+deep, 0, 8)...)
		})
	}, ""},
	{"many relocations of one place", func(o *forgery) {
		b := bytes.Repeat([]byte{1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0}, 20_000)
		n := o.section(".rel.more", elf.SHT_REL, 0, b, len(b))
		o.sections[n].Entsize = 16
	}, ""},
}

// Files that were made to take long are refused before they take much memory.
func TestForgedObjects(t *testing.T) {
	for _, tc := range forgeries {
		t.Run(tc.name, func(t *testing.T) {
			o := newForgery(t)
			tc.make(o)
			file := o.bytes()
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := ReadObject("test.o", file, 2<<20)
			runtime.ReadMemStats(&after)
			if (err == nil) != (tc.want == "") || err != nil && (!errors.Is(err, ErrObject) || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("%v, want %q", err, tc.want)
			}
			if n := after.TotalAlloc - before.TotalAlloc; n > 64*uint64(len(file)) && n > 32<<20 {
				t.Errorf("it takes %d bytes to read %d", n, len(file))
			}
		})
	}
}

// ReadObject refuses more of a thing than the kernel takes, with the number and the cap, and accepts the cap itself.
func TestObjectsOfManyParts(t *testing.T) {
	functions := func(n int) string {
		var b, calls strings.Builder
		for i := range n {
			fmt.Fprintf(&b, "static __attribute__((noinline)) int f%d(__u32 i) { asm volatile(\"\" : \"+r\"(i)); return i; }\n", i)
			fmt.Fprintf(&calls, "\tn += f%d(n);\n", i)
		}
		return around(b.String(), "\tint n = 0;\n"+calls.String()+"\treturn n & 1;")
	}
	mapsOf := func(n int) string {
		var b, calls strings.Builder
		for i := range n {
			fmt.Fprintf(&b, "struct { %s __type(value, __u64); } m%d SEC(\".maps\");\n", plainMap, i)
			fmt.Fprintf(&calls, "\tif (bpf_map_lookup_elem(&m%d, &n))\n\t\tn++;\n", i)
		}
		return around(b.String(), "\t__u32 n = 0;\n"+calls.String()+"\treturn n & 1;")
	}
	parameters := func(n int) string {
		var b, calls strings.Builder
		for i := range n {
			fmt.Fprintf(&b, "const volatile __u32 p%d = %d;\n", i, i)
			fmt.Fprintf(&calls, "\tn += p%d;\n", i)
		}
		return around(b.String(), "\t__u32 n = 0;\n"+calls.String()+"\treturn n & 1;")
	}
	values := func(n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, "V%d, ", i)
		}
		return around("enum many { "+b.String()+"};\nconst volatile enum many p = V1;", "\treturn p == V0;")
	}
	e, err := packetsEngine()
	if err != nil {
		t.Fatal(err)
	}
	engines := map[string]int{}
	o := object(t, include+payload+named+licence)
	for _, p := range o.spec.Programs {
		used := map[string]bool{}
		for i := range p.Instructions {
			if p.Instructions[i].Symbol() != "" {
				engines["functions"]++
			}
			if p.Instructions[i].IsLoadFromMap() {
				used[p.Instructions[i].Reference()] = true
			}
		}
		engines["maps"] = len(used)
	}
	if len(e.spec.Programs) > 2 {
		t.Fatalf("the engine has %d programs", len(e.spec.Programs))
	}
	for _, tc := range []struct {
		name   string
		source string
		want   string
	}{
		{"functions, as many as go", functions(mostFunctions - engines["functions"]), ""},
		{"one function more", functions(mostFunctions - engines["functions"] + 1), "with the engine's it has 257 functions: the kernel takes programs of at most 256"},
		{"maps, as many as go", mapsOf(mostMaps - engines["maps"]), ""},
		{"one map more", mapsOf(mostMaps - engines["maps"] + 1), "with the engine's it uses 65 maps: the kernel takes programs with at most 64"},
		{"more maps than any program has", mapsOf(mostMaps + 1), "it has 65 maps: the kernel takes programs with at most 64"},
		{"parameters, as many as go", parameters(mostParams), ""},
		{"one parameter more", parameters(mostParams + 1), "it has more than 256 parameters"},
		{"a parameter of as many values as go", values(mostValues), ""},
		{"a parameter with one value more", values(mostValues + 1), "const volatile p: it has 257 values: want at most 256"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			_, err := ReadObject("test.o", objecttest.Compile(t, tc.source), 1<<20)
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v, want %q", err, tc.want)
			}
		})
	}
}

// BenchmarkForgedObjects measures what files take that were made to take long, by bytes of the file.
func BenchmarkForgedObjects(b *testing.B) {
	for _, tc := range forgeries {
		b.Run(tc.name, func(b *testing.B) {
			o := newForgery(b)
			tc.make(o)
			file := o.bytes()
			b.SetBytes(int64(len(file)))
			b.ReportAllocs()
			for b.Loop() {
				ReadObject("test.o", file, 2<<20)
			}
		})
	}
}
