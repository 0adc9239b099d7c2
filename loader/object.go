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

	"github.com/xspin/xspin/bpf"
)

// ErrObject is wrapped by errors of object files that are not accepted.
var ErrObject = errors.New("not an object that XsPIN takes")

// An Object is an object file with handlers in eBPF (bpf/include/xspin_handler.h), which
// was read and checked, and not shown to the kernel yet. It does not change, so contexts
// may share it.
type Object struct {
	name     string
	spec     *ebpf.CollectionSpec // linked to the engine of XDP
	tc       *ebpf.CollectionSpec // linked to that of tc; nil: it does not run there
	notTC    error                // why
	declared bpf.HandlersDeclared
	version  uint32 // of xspin_handler.h
	handlers []string
	messages bool // its handlers are for messages: xspin_message.h
	notes    bool // they tell the application of more than ends, or write to the log
	windows  bool // they call what reaches windows
	writes   bool // they call what writes to the frame
	reads    bool // they call what reads it
	time     timeBound
	params   []Parameter
	memory   int64
}

// The handlers by name, and their functions.
var handlerFuncs = map[string]string{"xspin_header": "header", "xspin_payload": "payload", "xspin_completion": "completion"}

// wantClang ends errors of files that are something else.
const wantClang = "want what clang -target bpf -g has compiled"

// ReadObject reads an object and checks what the verifier does not: it lets a privileged
// program read kernel memory, redirect frames anywhere, and run for seconds. The name is
// for errors. The maps of each context that uses the object may take limit bytes.
//
// Each error wraps ErrObject; there may be several, joined.
func ReadObject(name string, file []byte, limit int64) (made *Object, err error) {
	o := &Object{name: name}
	fail := func(errs ...error) (*Object, error) {
		for i, err := range errs {
			errs[i] = show(fmt.Errorf("%s: %w: %w", name, ErrObject, err))
		}
		return nil, errors.Join(errs...)
	}
	defer func() { // nobody has made the readers that follow for what somebody may have damaged on purpose
		if r := recover(); r != nil {
			made, err = fail(fmt.Errorf("it is damaged: %v", r))
		}
	}()
	if !bytes.HasPrefix(file, []byte(elf.ELFMAG)) {
		return fail(fmt.Errorf("it is not an ELF object file (is it the C source?): %s", wantClang))
	}
	if err := checkHeader(file); err != nil {
		return fail(err)
	}
	f, err := elf.NewFile(bytes.NewReader(file))
	switch {
	case err != nil:
		return fail(fmt.Errorf("it cannot be read: %w; %s", err, wantClang))
	case f.ByteOrder != binary.LittleEndian:
		return fail(errors.New("its byte order is big endian: compile with -target bpfel"))
	case f.Section(".BTF") == nil || f.Section(".BTF.ext") == nil:
		return fail(errors.New("it has no BTF: compile with -g"))
	}
	if err := checkSizes(f, file, limit); err != nil {
		return fail(err)
	}
	spec, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(file))
	if err != nil {
		return fail(fmt.Errorf("it cannot be read: %w", err))
	}
	// The rest knows the header, so its version comes first.
	if o.declared, o.version, err = declared(f, spec); err != nil {
		return fail(err)
	}
	o.messages = o.declared.Messages != 0
	prog, err := program(spec, macroOf(o.messages))
	if err != nil {
		return fail(err)
	}
	engine, err := engineOf(o.messages, XDP)
	if err != nil {
		return fail(err)
	}
	user, err := usersFunctions(prog, engine)
	if err != nil {
		return fail(err)
	}
	var errs []error
	if !compatible(prog.License) {
		errs = append(errs, fmt.Errorf("its licence is %q, and the kernel wants one that the GPL is compatible with: add XSPIN_LICENSE(\"GPL\"), or %s", prog.License, strings.Join(licences[1:], ", ")))
	}
	o.handlers, err = checkHandlers(f, user, &o.declared)
	errs = append(errs, err, checkCode(user, engine, spec), checkMaps(user, spec, engine))
	if err := errors.Join(errs...); err != nil {
		return fail(flatten(err)...)
	}
	for _, f := range user {
		for _, fn := range calls(f) {
			o.notes = o.notes || fn == "xspin_notify" || fn == "xspin_log_line"
			o.windows = o.windows || fn == "xspin_deposit" || strings.HasPrefix(fn, "xspin_window_")
			o.reads = o.reads || slices.Contains([]string{"xspin_load", "xspin_headers", "xspin_window_frame"}, fn)
			o.writes = o.writes || fn == "xspin_store" || strings.HasPrefix(fn, "xspin_reply_")
		}
	}
	o.time = boundTime(user, spec)
	if o.spec, o.memory, err = engine.complete(user, spec, prog.License, limit); o.spec == nil {
		return fail(err)
	}
	errs = append(errs, err)
	o.params, err = parameters(o.spec)
	if err := errors.Join(append(errs, err)...); err != nil {
		return fail(flatten(err)...)
	}
	if o.notTC = o.againstTC(user); o.notTC != nil {
		return o, nil
	}
	if engine, err = engineOf(o.messages, TC); err != nil {
		return fail(err)
	}
	if o.tc, _, err = engine.complete(user, spec, prog.License, limit); err != nil {
		o.tc, o.notTC = nil, err
	}
	return o, nil
}

// complete links an object to the engine, and checks what only the whole shows. It also returns how many bytes
// the object's own maps take. With some errors it returns what it has linked, for whoever looks for others.
func (e *engine) complete(user functions, object *ebpf.CollectionSpec, license string, limit int64) (*ebpf.CollectionSpec, int64, error) {
	spec := e.link(user, object, license)
	if err := checkPrograms(spec); err != nil {
		return nil, 0, err
	}
	var errs []error
	for _, p := range spec.Programs {
		errs = append(errs, checkCalls(p.Instructions))
	}
	memory, err := keepMaps(spec, e, limit)
	return spec, memory, errors.Join(append(errs, err)...)
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
func (o *Object) HandsOver() bool { return o.declared.Handlers&hasHandOver != 0 }

// Trains tells whether handlers of packets get a train whole at tc, and not each packet of it.
func (o *Object) Trains() bool { return o.declared.Handlers&hasTrains != 0 }

// Notes tells whether handlers of messages tell the application of more than ends, or write
// to the log.
func (o *Object) Notes() bool { return o.notes }

// Deposits tells whether all payload of messages goes into their window, as there is no
// payload handler.
func (o *Object) Deposits() bool { return o.messages && !slices.Contains(o.handlers, "payload") }

// UsesWindows tells whether handlers of messages reach windows, by what they call. Those that Deposits
// tells of need not.
func (o *Object) UsesWindows() bool { return o.windows }

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

// What an object declares to have: xspin_has.
const (
	hasHeader     = 1
	hasPayload    = 2
	hasCompletion = 4
	hasHandOver   = 8
	hasTrains     = 32
)

// declared returns what xspin_handler.h has the object declare, and the version of it.
func declared(f *elf.File, spec *ebpf.CollectionSpec) (d bpf.HandlersDeclared, version uint32, err error) {
	v := spec.Variables[bpf.HandlersVersionOf]
	if v == nil || len(v.Value) != 4 {
		return d, 0, errors.New("it was not made with xspin_handler.h: `xspin object new` writes it")
	}
	if version = binary.LittleEndian.Uint32(v.Value); version < bpf.HandlersOldest || version > bpf.HandlersVersion {
		return d, 0, fmt.Errorf("it was made with version %d of xspin_handler.h, and this is version %d: `xspin object new` writes that; compile again", version, bpf.HandlersVersion)
	}
	symbols, err := f.Symbols()
	if err != nil {
		return d, 0, err
	}
	i := slices.IndexFunc(symbols, func(s elf.Symbol) bool { return s.Name == bpf.HandlersDeclares })
	if i < 0 {
		return d, 0, errors.New("it has no program: want one, that of XSPIN_CONTEXT(...), or of XSPIN_MESSAGES(...) if its handlers are for messages")
	}
	changed := errors.New("its xspin_handler.h was changed: `xspin object new` writes the original")
	size := uint64(binary.Size(d))
	s := symbols[i]
	if int(s.Section) >= len(f.Sections) || s.Size != size {
		return d, 0, changed
	}
	b, err := f.Sections[s.Section].Data()
	if err != nil || uint64(len(b)) < size || s.Value > uint64(len(b))-size {
		return d, 0, changed
	}
	b = b[s.Value:][:size]
	d = bpf.HandlersDeclared{Handlers: binary.LittleEndian.Uint32(b), Messages: binary.LittleEndian.Uint32(b[4:]), State: binary.LittleEndian.Uint32(b[8:])}
	most := uint32(hasHeader | hasPayload | hasCompletion)
	if d.Messages == 1 {
		most |= hasHandOver
	} else {
		most |= hasTrains // each segment of a message has a header of its own
	}
	if d.Handlers&^most != 0 || d.Messages > 1 || d.State > mostState*d.Messages || d.State%8 != 0 {
		return d, 0, changed
	}
	return d, version, nil
}

// program returns the program that names the handlers: the one that a macro makes. It is not
// loaded.
func program(spec *ebpf.CollectionSpec, macro string) (*ebpf.ProgramSpec, error) {
	want := fmt.Sprintf("want one program, that of %s(...), and handlers as functions", macro)
	prog := spec.Programs[bpf.HandlersProgram]
	var others []string
	for _, name := range slices.Sorted(maps.Keys(spec.Programs)) {
		if p := spec.Programs[name]; p != prog {
			others = append(others, fmt.Sprintf("%s in section %q", name, p.SectionName))
		}
	}
	switch {
	case len(others) > 0:
		return nil, fmt.Errorf("it has other programs: %s: %s", strings.Join(others, ", "), want)
	case prog == nil:
		return nil, fmt.Errorf("it has no program: %s", want)
	case prog.SectionName != "xdp.frags":
		return nil, fmt.Errorf("%s is in section %q, want \"xdp.frags\": %s", prog.Name, prog.SectionName, want)
	}
	return prog, nil
}

// usersFunctions returns the handlers of an object, and the functions that they call: neither the
// program that names them, nor what the header has in the place of the engine's functions.
func usersFunctions(prog *ebpf.ProgramSpec, e *engine) (functions, error) {
	all, err := split(prog.Instructions)
	if err != nil {
		return nil, err
	}
	others, err := messagesEngine()
	if err != nil {
		return nil, err
	}
	for name := range all {
		switch {
		case name == prog.Name, e.api[name]:
			delete(all, name)
		case others.api[name]:
			return nil, fmt.Errorf("function %s is for handlers of messages: write XSPIN_MESSAGES(...) in place of XSPIN_CONTEXT(...)", name)
		case strings.HasPrefix(name, reserved) && handlerFuncs[name] == "":
			return nil, fmt.Errorf("function %s: names that begin with %s are xspin_handler.h's", name, reserved)
		}
	}
	return all, nil
}

// macroOf is what names handlers.
func macroOf(messages bool) string {
	return map[bool]string{false: "XSPIN_CONTEXT", true: "XSPIN_MESSAGES"}[messages]
}

// licences are those that the kernel takes for compatible (include/linux/license.h).
var licences = []string{"GPL", "GPL v2", "GPL and additional rights", "Dual BSD/GPL", "Dual MIT/GPL", "Dual MPL/GPL"}

func compatible(licence string) bool { return slices.Contains(licences, licence) }

// checkHandlers returns the handlers that an object declares, and complains about those
// that are not there, or that are there and not declared.
func checkHandlers(f *elf.File, user functions, d *bpf.HandlersDeclared) (handlers []string, err error) {
	there := map[string]bool{}
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
	macro := macroOf(d.Messages != 0)
	for bit, fn := range []string{"xspin_header", "xspin_payload", "xspin_completion"} {
		name := handlerFuncs[fn]
		word := strings.ToUpper(name)
		named := d.Handlers&(1<<bit) != 0
		switch {
		case named && user[fn] == nil:
			errs = append(errs, fmt.Errorf("%s names %s, and there is no XSPIN_%s", macro, word, word))
		case there[fn] && !named:
			errs = append(errs, fmt.Errorf("there is an XSPIN_%s that never runs: %s does not name %s", word, macro, word))
		case named:
			handlers = append(handlers, name)
		}
	}
	if len(handlers) == 0 && len(errs) == 0 {
		errs = append(errs, fmt.Errorf("it has no handlers: %s names none", macro))
	}
	return handlers, errors.Join(errs...)
}
