// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"fmt"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"

	"github.com/xspin/xspin/bpf"
)

// An object has handlers, the functions that they call, and maps of its own. The engine that
// calls handlers, and its maps, come from objects that are part of this program: an object is
// linked to one of them. Whatever else an object has is left behind. So only instructions of
// the engine name the engine's maps and windows, and handlers reach them by calling
// functions that check what they are asked for.

// functions are those of a program, by name. The first instruction of each has its name
// as symbol, and its type.
type functions map[string]asm.Instructions

// split takes the functions of a linked program apart.
func split(insns asm.Instructions) (functions, error) {
	all := functions{}
	for from := 0; from < len(insns); {
		to := from + 1
		for to < len(insns) && insns[to].Symbol() == "" {
			to++
		}
		name := insns[from].Symbol()
		if f := btf.FuncMetadata(&insns[from]); f == nil || f.Name != name || name == "" {
			return nil, fmt.Errorf("function %q has no type of its own: compile with -g", name)
		}
		if all[name] != nil {
			return nil, fmt.Errorf("there are two functions %s", name)
		}
		all[name] = insns[from:to]
		from = to
	}
	return all, nil
}

// calls returns the functions that a function calls, or has the kernel call, once for each place.
func calls(insns asm.Instructions) (all []string) {
	for i := range insns {
		if insns[i].IsFunctionCall() || insns[i].IsLoadOfFunctionPointer() {
			all = append(all, insns[i].Reference())
		}
	}
	return all
}

// An engine is an object with the functions and maps that XsPIN has for handlers.
type engine struct {
	spec  *ebpf.CollectionSpec
	funcs functions
	api   map[string]bool // functions that handlers may call
}

var (
	packetsEngine    = sync.OnceValues(func() (*engine, error) { return readEngine(bpf.EnginePackets()) })
	packetsEngineTC  = sync.OnceValues(func() (*engine, error) { return readEngine(bpf.EnginePacketsTC()) })
	messagesEngine   = sync.OnceValues(func() (*engine, error) { return readEngine(bpf.EngineMessages()) })
	messagesEngineTC = sync.OnceValues(func() (*engine, error) { return readEngine(bpf.EngineMessagesTC()) })
)

// engineOf returns the engine of a hook.
func engineOf(messages bool, hook Hook) (*engine, error) {
	switch {
	case messages && hook == TC:
		return messagesEngineTC()
	case messages:
		return messagesEngine()
	case hook == TC:
		return packetsEngineTC()
	}
	return packetsEngine()
}

func readEngine(file []byte) (*engine, error) {
	spec, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(file))
	if err != nil {
		return nil, fmt.Errorf("the engine of handlers: %w", err)
	}
	e := &engine{spec, functions{}, map[string]bool{}}
	for name, p := range spec.Programs {
		funcs, err := split(p.Instructions)
		if err != nil {
			return nil, fmt.Errorf("the engine of handlers: %w", err)
		}
		for name, f := range funcs {
			e.funcs[name] = f
		}
		if name == bpf.HandlersAPI {
			for _, fn := range calls(funcs[name]) {
				e.api[fn] = true
			}
		}
	}
	// The verifier is to look at each call of these with its arguments: they are static.
	for fn := range e.api {
		f := slices.Clone(e.funcs[fn])
		t := *btf.FuncMetadata(&f[0])
		t.Linkage = btf.StaticFunc
		f[0] = btf.WithFuncMetadata(f[0], &t)
		e.funcs[fn] = f
	}
	return e, nil
}

// link returns what is loaded for an object: its handlers, and what they call, in the
// programs of the engine, with its own maps and variables.
func (e *engine) link(user functions, object *ebpf.CollectionSpec, license string) *ebpf.CollectionSpec {
	out := &ebpf.CollectionSpec{
		Maps: map[string]*ebpf.MapSpec{}, Programs: map[string]*ebpf.ProgramSpec{}, Variables: map[string]*ebpf.VariableSpec{},
		Types: object.Types, ByteOrder: object.ByteOrder,
	}
	for name, m := range e.spec.Maps {
		out.Maps[name] = m.Copy()
	}
	for name, v := range e.spec.Variables {
		out.Variables[name] = v.Copy()
	}
	for name, m := range object.Maps {
		if name != bpf.HandlersSection {
			out.Maps[name] = m
		}
	}
	for name, v := range object.Variables {
		if v.SectionName != bpf.HandlersSection {
			out.Variables[name] = v
		}
	}
	for name, p := range e.spec.Programs {
		if name == bpf.HandlersAPI {
			continue
		}
		p = p.Copy()
		p.License = license
		p.Instructions = nil
		linked := map[string]bool{}
		for todo := []string{name}; len(todo) > 0; todo = todo[1:] {
			fn := todo[0]
			if linked[fn] {
				continue
			}
			linked[fn] = true
			f := user[fn]
			if f == nil {
				f = e.funcs[fn]
			} else if handlerFuncs[fn] != "" { // its first argument is the hook's, whatever the object says
				f = slices.Clone(f)
				f[0] = btf.WithFuncMetadata(f[0], btf.FuncMetadata(&e.funcs[fn][0]))
			}
			p.Instructions = append(p.Instructions, f...)
			todo = append(todo, calls(f)...)
		}
		out.Programs[name] = p
	}
	return out
}
