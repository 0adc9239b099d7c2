// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
)

// MaxObjectFile is how many bytes an object file may have: more than any with handlers has.
const MaxObjectFile = 512 << 10

// Bounds of an object file. Each is far above what handlers need, or is the kernel's. Whoever reads a
// file multiplies some of these numbers, so a file of that size would otherwise take gigabytes or minutes.
const (
	mostSections  = 1 << 8
	mostSymbols   = 1 << 14
	mostFunctions = 256 // of a program that is loaded, as in the kernel: BPF_MAX_SUBPROGS
	mostMaps      = 64  // the same: MAX_USED_MAPS
	mostParams    = 256
	mostValues    = 256      // of a parameter that is an enum
	mostName      = 511      // bytes of a name: the kernel's KSYM_NAME_LEN without its end
	mostPrograms  = 8        // one is right. Each that calls a function gets a copy of it, three times as large
	mostRefs      = 256      // to types of the kernel, which are errors, and to its settings
	mostTypes     = 4 << 20  // bytes, times variables
	mostMemory    = 64 << 20 // of sections that are not in the file
)

// checkHeader refuses a file for another machine, one that is too long, and one whose sections would take much to
// list. It reads the file before anything else does.
func checkHeader(file []byte) error {
	const header, entry = 64, 64
	if len(file) < header {
		return nil // for elf.NewFile to refuse
	}
	order := binary.ByteOrder(binary.LittleEndian)
	if file[elf.EI_DATA] == byte(elf.ELFDATA2MSB) {
		order = binary.BigEndian
	}
	if m := elf.Machine(order.Uint16(file[0x12:])); m != elf.EM_BPF {
		return fmt.Errorf("it is for %v: %s", m, wantClang)
	}
	if file[elf.EI_CLASS] != byte(elf.ELFCLASS64) {
		return errors.New("it is not for a machine of 64 bits")
	}
	if len(file) > MaxObjectFile {
		return fmt.Errorf("it has %d bytes: want at most %d", len(file), MaxObjectFile)
	}
	sections, size := order.Uint64(file[0x28:]), order.Uint16(file[0x3a:])
	// A number that is too large for its place is in the first section.
	n, names := order.Uint16(file[0x3c:]), order.Uint16(file[0x3e:])
	if n == 0 && sections != 0 || n > mostSections {
		return fmt.Errorf("it has more than %d sections", mostSections)
	}
	if at := sections + uint64(names)*uint64(size); names < n && at < uint64(len(file)) && uint64(len(file))-at >= entry {
		off, size := order.Uint64(file[at+24:]), order.Uint64(file[at+32:])
		if off < uint64(len(file)) {
			return checkNames(file[off:][:min(size, uint64(len(file))-off)], "sections")
		}
	}
	return nil
}

// checkNames refuses a table of names in which one is too long: many may have the same, and each gets a copy.
func checkNames(table []byte, of string) error {
	for len(table) > 0 {
		n := bytes.IndexByte(table, 0)
		if n < 0 {
			n = len(table) - 1
		}
		if n > mostName {
			return fmt.Errorf("names of %s have up to %d bytes: want at most %d", of, n, mostName)
		}
		table = table[n+1:]
	}
	return nil
}

// strangeName is the error of a name that would be shown, and that no C has.
func strangeName(of, name string) error {
	return fmt.Errorf("%s has the name %q: want printable ASCII", of, name)
}

// checkSizes refuses a file that would take much more memory or time to read than it has bytes: what a few bytes of a header say
// of sizes is believed by nobody.
func checkSizes(f *elf.File, file []byte, limit int64) error {
	var inFile, others uint64
	most := uint64(min(limit, mostMemory)) + MaxObjectFile
	seen := map[string]bool{}
	for _, s := range f.Sections {
		if !isPlain(s.Name) {
			return strangeName("a section", s.Name)
		}
		if seen[s.Name] {
			return fmt.Errorf("it has two sections %q", s.Name)
		}
		seen[s.Name] = true
		if s.Flags&elf.SHF_COMPRESSED != 0 {
			return fmt.Errorf("section %s is compressed", s.Name)
		}
		switch {
		case s.Type == elf.SHT_NULL:
		case s.Type != elf.SHT_NOBITS:
			if s.Size > uint64(len(file)) || inFile+s.Size > uint64(len(file)) {
				return fmt.Errorf("its sections have more than the %d bytes of the file, up to %s", len(file), s.Name)
			}
			inFile += s.Size
		case s.Name == ".maps" || strings.HasPrefix(s.Name, "maps"):
			return fmt.Errorf("section %s is not in the file", s.Name)
		default:
			if s.Size > most || others+s.Size > most {
				return fmt.Errorf("its sections have more than %d bytes, up to %s", most, s.Name)
			}
			others += s.Size
		}
		if s.Type == elf.SHT_SYMTAB {
			if n := s.Size / elf.Sym64Size; n > mostSymbols {
				return fmt.Errorf("it has %d symbols: want at most %d", n, mostSymbols)
			}
			if int(s.Link) < len(f.Sections) {
				names, err := f.Sections[s.Link].Data()
				if err == nil {
					err = checkNames(names, "symbols")
				}
				if err != nil {
					return err
				}
			}
		}
	}
	if err := checkSymbols(f); err != nil {
		return err
	}
	return checkTypes(f)
}

// hasVariables tells whether package ebpf takes a section for one of variables: it goes by the name.
func hasVariables(section string) bool {
	return section == ".bss" || strings.HasPrefix(section, ".data") || strings.HasPrefix(section, ".rodata")
}

// checkSymbols refuses symbols that overlap, since each gets a copy of what it names, and too many of a kind.
// It counts whatever package ebpf may take, also symbols without a type.
func checkSymbols(f *elf.File) error {
	symbols, err := f.Symbols()
	if err != nil {
		return err
	}
	named := make([]uint64, len(f.Sections)) // bytes of each section
	var functions, programs, ownMaps, variables uint64
	for _, s := range symbols {
		if !isPlain(s.Name) {
			return strangeName("a symbol", s.Name)
		}
		if int(s.Section) >= len(f.Sections) || s.Section == elf.SHN_UNDEF {
			continue
		}
		section, kind := f.Sections[s.Section], elf.ST_TYPE(s.Info)
		if kind == elf.STT_SECTION {
			continue
		}
		code := section.Flags&elf.SHF_EXECINSTR != 0 && !hasVariables(section.Name)
		if named[s.Section] += min(s.Size, section.Size+1); named[s.Section] > section.Size {
			return fmt.Errorf("its %s overlap", map[bool]string{true: "functions", false: "variables"}[code])
		}
		switch {
		case code:
			if kind == elf.STT_FUNC || elf.ST_BIND(s.Info) != elf.STB_LOCAL {
				if functions++; section.Name != ".text" {
					programs++
				}
			}
		case section.Name == ".maps" || strings.HasPrefix(section.Name, "maps"):
			ownMaps++
		case elf.ST_BIND(s.Info) != elf.STB_LOCAL:
			variables++
		}
	}
	switch {
	case functions > 4*mostFunctions: // linking leaves some behind
		return fmt.Errorf("it has %d functions: the kernel takes programs of at most %d", functions, mostFunctions)
	case programs > mostPrograms:
		return fmt.Errorf("it has %d programs, and no more than %d are looked at: want one, and handlers as functions", programs, mostPrograms)
	case ownMaps > mostMaps:
		return fmt.Errorf("it has %d maps: the kernel takes programs with at most %d", ownMaps, mostMaps)
	}
	// A variable has a copy of its type, and of all that this names.
	if n := f.Section(".BTF").Size; variables*n > mostTypes {
		return fmt.Errorf("it has %d variables and %d bytes of types, each of which may be copied for each variable: want a product of at most %d", variables, n, mostTypes)
	}
	return nil
}

// checkTypes looks at BTF before others unfold it. What it does not understand is for them to refuse.
func checkTypes(f *elf.File) error {
	ext, err := f.Section(".BTF.ext").Data()
	if err != nil {
		return err
	}
	// Magic number, header size, and pairs of offset and size, of which the third is of references to types of the kernel.
	if le := binary.LittleEndian; len(ext) >= 32 && le.Uint32(ext[4:]) >= 32 {
		if n := le.Uint32(ext[28:]) / 16; n > mostRefs {
			return fmt.Errorf("it refers to types of the kernel at %d places, and handlers may refer to nothing there", n)
		}
	}
	b, err := f.Section(".BTF").Data()
	if err != nil {
		return err
	}
	const header = 24
	if len(b) < header {
		return nil
	}
	word := func(at int) uint64 { return uint64(binary.LittleEndian.Uint32(b[at:])) }
	from := word(4)
	part := func(at int) []byte { // of offset and size there
		lo := min(from+word(at), uint64(len(b)))
		return b[lo:min(lo+word(at+4), uint64(len(b)))]
	}
	types, texts := part(8), part(16)
	checkName := func(off uint32) error {
		if uint64(off) >= uint64(len(texts)) {
			return nil
		}
		name, _, ends := bytes.Cut(texts[off:min(uint64(off)+mostName+1, uint64(len(texts)))], []byte{0})
		switch {
		case !ends:
			return fmt.Errorf("a name among its types has more than %d bytes", mostName)
		case !isPlain(name):
			return strangeName("one of its types", string(name))
		}
		return nil
	}
	for len(types) >= 12 {
		le := binary.LittleEndian
		name, info := le.Uint32(types), le.Uint32(types[4:])
		kind, n := info>>24&0x1f, int(info&0xffff)
		types = types[12:]
		size, each, named := 0, 0, false // bytes beside, and for each of n, which may have names
		switch kind {
		case 1, 14, 17: // int, variable, declaration tag
			size = 4
		case 3: // array
			size = 12
		case 4, 5, 19: // structure, union, enum of 64 bits
			each, named = 12, true
		case 6, 13: // enum, arguments
			each, named = 8, true
		case 15: // section
			each = 12
			if off := int(name); off < len(texts) && n > mostRefs && (bytes.HasPrefix(texts[off:], []byte(".kconfig\x00")) || bytes.HasPrefix(texts[off:], []byte(".ksyms\x00"))) {
				return fmt.Errorf("it refers to %d variables of the kernel, and handlers may refer to nothing there", n)
			}
		}
		size += each * n
		if size > len(types) {
			return nil
		}
		err := checkName(name)
		for i := 0; named && i < size && err == nil; i += each {
			err = checkName(le.Uint32(types[i:]))
		}
		if err != nil {
			return err
		}
		types = types[size:]
	}
	return nil
}

// checkPrograms refuses programs that the kernel would not take, however small their parts are.
func checkPrograms(spec *ebpf.CollectionSpec) error {
	for _, p := range spec.Programs {
		used, functions := map[string]bool{}, 0
		for i := range p.Instructions {
			ins := &p.Instructions[i]
			if ins.Symbol() != "" {
				functions++
			}
		}
		usedMaps(p.Instructions, used)
		if functions > mostFunctions {
			return fmt.Errorf("with the engine's it has %d functions: the kernel takes programs of at most %d", functions, mostFunctions)
		}
		if len(used) > mostMaps {
			return fmt.Errorf("with the engine's it uses %d maps: the kernel takes programs with at most %d; sections of variables are maps, too", len(used), mostMaps)
		}
	}
	return nil
}
