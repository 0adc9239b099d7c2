// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/xspin/xspin/bpf"
)

// ErrObject is wrapped by errors of object files that are not accepted.
var ErrObject = errors.New("not an object that XsPIN takes")

// An Object is an object file with handlers in eBPF (bpf/include/xspin_handler.h), which
// was read and checked, and not shown to the kernel yet. It does not change, so contexts
// may share it.
type Object struct {
	name     string
	spec     *ebpf.CollectionSpec
	handlers []string
	messages bool // its handlers are for messages: xspin_message.h
	params   []Parameter
	memory   int64
}

// The handlers by name, and their functions.
var handlerFuncs = map[string]string{"xspin_header": "header", "xspin_payload": "payload", "xspin_completion": "completion"}

// ReadObject reads an object and checks what the verifier does not: it lets a privileged
// program read kernel memory, redirect frames anywhere, and run for seconds. The name is
// for errors. The maps of each context that uses the object may take limit bytes.
//
// Each error wraps ErrObject; there may be several, joined.
func ReadObject(name string, file []byte, limit int64) (*Object, error) {
	o := &Object{name: name}
	fail := func(errs ...error) (*Object, error) {
		for i, err := range errs {
			errs[i] = fmt.Errorf("%s: %w: %w", name, ErrObject, err)
		}
		return nil, errors.Join(errs...)
	}
	const want = "want what clang -target bpf -g has compiled"
	if !bytes.HasPrefix(file, []byte(elf.ELFMAG)) {
		return fail(fmt.Errorf("it is not an ELF object file (is it the C source?): %s", want))
	}
	f, err := elf.NewFile(bytes.NewReader(file))
	switch {
	case err != nil:
		return fail(fmt.Errorf("it cannot be read: %w; %s", err, want))
	case f.Machine != elf.EM_BPF:
		return fail(fmt.Errorf("it is for %v: %s", f.Machine, want))
	case f.ByteOrder != binary.LittleEndian:
		return fail(errors.New("its byte order is big endian: compile with -target bpfel"))
	case f.Section(".BTF") == nil || f.Section(".BTF.ext") == nil:
		return fail(errors.New("it has no BTF: compile with -g"))
	}
	spec, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(file))
	if err != nil {
		return fail(fmt.Errorf("it cannot be read: %w", err))
	}
	o.spec = spec
	// What follows knows the header, so its version comes first.
	if err := checkVersion(spec); err != nil {
		return fail(err)
	}
	prog, expire, err := programs(spec)
	if err != nil {
		return fail(err)
	}
	o.messages = expire != nil
	if !o.messages && hasMessages(spec) {
		return fail(errors.New("xspin_message.h is for messages: write XSPIN_MESSAGES(...) in place of XSPIN_CONTEXT(...), or include xspin_handler.h"))
	}
	var errs []error
	if !compatible(prog.License) {
		errs = append(errs, fmt.Errorf("its licence is %q, and the kernel wants one that the GPL is compatible with: add XSPIN_LICENSE(\"GPL\"), or %s", prog.License, strings.Join(licences[1:], ", ")))
	}
	o.handlers, err = checkHandlers(f, prog, o.messages)
	errs = append(errs, err, checkCode(prog, o.messages))
	if o.messages {
		errs = append(errs, checkCode(expire, true))
	}
	o.memory, err = checkMaps(spec, limit)
	errs = append(errs, err)
	o.params, err = parameters(spec)
	if err := errors.Join(append(errs, err)...); err != nil {
		return fail(flatten(err)...)
	}
	return o, nil
}

// flatten undoes errors.Join.
func flatten(err error) (all []error) {
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		for _, err := range many.Unwrap() {
			all = append(all, flatten(err)...)
		}
		return all
	}
	return []error{err}
}

// BuiltinObject returns the object of a built-in handler.
func BuiltinObject(name string) (*Object, error) {
	file, ok := bpf.Handlers[name]
	if !ok {
		return nil, fmt.Errorf("no built-in handler in eBPF %q: there are %s", name, strings.Join(slices.Sorted(maps.Keys(bpf.Handlers)), ", "))
	}
	return ReadObject(name, file, builtinMemory)
}

// Include has the files that handlers in C include.
func Include() fs.FS {
	sub, err := fs.Sub(bpf.Include, "include")
	if err != nil {
		panic(err) // the folder is embedded
	}
	return sub
}

const builtinMemory = 1 << 20 // more than any of them has

// Name returns what ReadObject was given.
func (o *Object) Name() string { return o.name }

// Handlers returns which handlers there are: "header", "payload", "completion".
func (o *Object) Handlers() []string { return o.handlers }

// Messages tells whether the handlers are for messages of several packets.
func (o *Object) Messages() bool { return o.messages }

// Parameters returns what can be set, sorted by name.
func (o *Object) Parameters() []Parameter { return o.params }

// Memory returns how many bytes the maps of each context take, without HPU memory.
func (o *Object) Memory() int64 { return o.memory }

// UsesMemory tells whether handlers use HPU memory: the context's, and that of each HPU.
func (o *Object) UsesMemory() (shared, each bool) {
	return o.spec.Maps[bpf.HandlersShared] != nil, o.spec.Maps[bpf.HandlersOwn] != nil
}

// HandsOver tells whether handlers of messages leave some to handlers on HPUs.
func (o *Object) HandsOver() bool { return o.spec.Maps[bpf.MessagesUser] != nil }

// Notes tells whether handlers of messages tell the application of more than ends, or write
// to the log.
func (o *Object) Notes() bool {
	for _, p := range o.spec.Programs {
		if slices.ContainsFunc(p.Instructions, func(ins asm.Instruction) bool { return ins.IsFunctionCall() && ins.Reference() == noteFunc }) {
			return true
		}
	}
	return false
}

// Deposits tells whether all payload of messages goes into their window, as there is no
// payload handler.
func (o *Object) Deposits() bool { return o.messages && !slices.Contains(o.handlers, "payload") }

// Maps returns the names of the object's own maps, sorted.
func (o *Object) Maps() (names []string) {
	for name := range o.spec.Maps {
		if !strings.HasPrefix(name, reserved) && !isSection(name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// reserved begins the names that are the header's.
const reserved = "xspin"

func checkVersion(spec *ebpf.CollectionSpec) error {
	v := spec.Variables[bpf.HandlersVersionOf]
	if v == nil || len(v.Value) != 4 {
		return errors.New("it was not made with xspin_handler.h: `xspin object new` writes it")
	}
	if n := binary.LittleEndian.Uint32(v.Value); n != bpf.HandlersVersion {
		return fmt.Errorf("it was made with version %d of xspin_handler.h, and this is version %d: `xspin object new` writes that; compile again", n, bpf.HandlersVersion)
	}
	c := spec.Variables[bpf.HandlersConstants]
	if c == nil || int(c.Size()) != binary.Size(bpf.HandlerConstants{}) {
		return errors.New("its xspin_handler.h was changed: `xspin object new` writes the original")
	}
	return nil
}

// programs returns the program that XSPIN_CONTEXT makes; or the two of XSPIN_MESSAGES.
func programs(spec *ebpf.CollectionSpec) (prog, expire *ebpf.ProgramSpec, err error) {
	want := fmt.Sprintf("want one program, that of %s(...), and handlers as functions", macroOf(hasMessages(spec)))
	prog, expire = spec.Programs[bpf.HandlersProgram], spec.Programs[bpf.MessagesExpire]
	var others []string
	for _, name := range slices.Sorted(maps.Keys(spec.Programs)) {
		if p := spec.Programs[name]; p != prog && p != expire {
			others = append(others, fmt.Sprintf("%s in section %q", name, p.SectionName))
		}
	}
	switch {
	case len(others) > 0:
		return nil, nil, fmt.Errorf("it has other programs: %s: %s", strings.Join(others, ", "), want)
	case prog == nil:
		return nil, nil, fmt.Errorf("it has no program: %s", want)
	case expire != nil && spec.Variables[bpf.MessagesSettings] == nil:
		return nil, nil, fmt.Errorf("it has a program %s, and no xspin_message.h: %s", expire.Name, want)
	}
	for _, p := range []*ebpf.ProgramSpec{prog, expire} {
		// A program that does not take frames in fragments cannot be called by one that does.
		if p != nil && p.SectionName != "xdp.frags" {
			return nil, nil, fmt.Errorf("%s is in section %q, want \"xdp.frags\": %s", p.Name, p.SectionName, want)
		}
	}
	return prog, expire, nil
}

// hasMessages tells whether an object was made with xspin_message.h, whatever its program.
func hasMessages(spec *ebpf.CollectionSpec) bool {
	return spec.Variables[bpf.MessagesSettings] != nil && spec.Maps[bpf.MessagesSlots] != nil
}

// macroOf is what makes the program of handlers.
func macroOf(messages bool) string {
	return map[bool]string{false: "XSPIN_CONTEXT", true: "XSPIN_MESSAGES"}[messages]
}

// licences are those that the kernel takes for compatible (include/linux/license.h).
var licences = []string{"GPL", "GPL v2", "GPL and additional rights", "Dual BSD/GPL", "Dual MIT/GPL", "Dual MPL/GPL"}

func compatible(licence string) bool { return slices.Contains(licences, licence) }

// checkHandlers returns the handlers that the program calls, and complains about those
// that it calls and are not there, or that are there and not called.
func checkHandlers(f *elf.File, prog *ebpf.ProgramSpec, messages bool) (handlers []string, err error) {
	called, there := map[string]bool{}, map[string]bool{}
	for i := range prog.Instructions {
		if ins := &prog.Instructions[i]; ins.IsFunctionCall() {
			called[ins.Reference()] = true
		}
	}
	symbols, err := f.Symbols() // has functions that nothing calls, too
	if err != nil {
		return nil, err
	}
	for _, s := range symbols {
		if elf.ST_TYPE(s.Info) == elf.STT_FUNC && s.Section != elf.SHN_UNDEF {
			there[s.Name] = true
		}
	}
	var errs []error
	macro := macroOf(messages)
	for _, fn := range []string{"xspin_header", "xspin_payload", "xspin_completion"} {
		name := handlerFuncs[fn]
		word := strings.ToUpper(name)
		switch {
		case called[fn] && !there[fn]:
			errs = append(errs, fmt.Errorf("%s names %s, and there is no XSPIN_%s", macro, word, word))
		case there[fn] && !called[fn]:
			errs = append(errs, fmt.Errorf("there is an XSPIN_%s that never runs: %s does not name %s", word, macro, word))
		case called[fn]:
			handlers = append(handlers, name)
		}
	}
	if len(handlers) == 0 && len(errs) == 0 {
		errs = append(errs, fmt.Errorf("it has no handlers: %s names none", macro))
	}
	return handlers, errors.Join(errs...)
}
