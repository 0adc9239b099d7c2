// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"

	"github.com/xspin/xspin/bpf"
)

// allowed are the helpers that handlers may call. What reads or writes the kernel's
// memory, sends frames elsewhere, changes their length, calls other programs or
// calls back is not among them. A call in a branch that is never taken counts too.
// xspin_kernel.h declares the same ones.
var allowed = []asm.BuiltinFunc{
	asm.FnMapLookupElem, asm.FnMapUpdateElem, asm.FnMapDeleteElem,
	asm.FnKtimeGetNs, asm.FnKtimeGetCoarseNs, asm.FnJiffies64,
	asm.FnGetPrandomU32, asm.FnGetSmpProcessorId,
	asm.FnCsumDiff, asm.FnXdpGetBuffLen, asm.FnXdpLoadBytes, asm.FnXdpStoreBytes,
}

// engineAllowed are those that the engine of messages may call beside: it answers in the
// segment's frame, hands slots and events on, and packets to HPUs.
var engineAllowed = []asm.BuiltinFunc{
	asm.FnTailCall, asm.FnXdpAdjustTail, asm.FnMapPushElem, asm.FnMapPopElem, asm.FnRingbufOutput,
}

// engineFuncs are the functions of the engine of messages in xspin_message.h; true: a
// global one. They are nothing special in other objects.
var engineFuncs = map[string]bool{
	bpf.HandlersProgram: true, bpf.MessagesExpire: true,
	"xspin_copy": true, "xspin_verify": true, "xspin_answer": true, "xspin_bind": true,
	"xspin_begin": false, "xspin_hand_over": false, noteFunc: false, "xspin_end": false, "xspin_post": false, "xspin_fail": false, "xspin_conclude": false,
}

// noteFunc is what notes of handlers come from.
const noteFunc = "xspin_note"

// isProgram tells whether a function is a program, which calls handlers.
func isProgram(fn string) bool { return fn == bpf.HandlersProgram || fn == bpf.MessagesExpire }

// checkCode looks at each instruction of a program and of the functions that it calls.
//
// The verifier checks a global function once, wherever it is called from, so the
// instructions that it counts bound a run of each of them and not of all together: three
// that call each other in loops ran eight million steps after four thousand were
// verified. Hence the only global functions are handlers, which the program alone calls,
// and some of the engine's; and each is called at few places and on few ways, none in a loop.
func checkCode(prog *ebpf.ProgramSpec, messages bool) error {
	var errs []error
	add := func(ins *asm.Instruction, fn, format string, args ...any) {
		err := fmt.Errorf("%s: %s", where(ins, fn), fmt.Sprintf(format, args...))
		if !slices.ContainsFunc(errs, func(e error) bool { return e.Error() == err.Error() }) {
			errs = append(errs, err)
		}
	}
	fn := ""
	calls := map[string]int{} // of global functions
	var line *asm.Instruction // the last with a source line
	for i := range prog.Instructions {
		ins := &prog.Instructions[i]
		if f := btf.FuncMetadata(ins); f != nil {
			fn = f.Name
			if f.Linkage == btf.GlobalFunc && !isGlobal(fn, messages) {
				add(ins, fn, "a function that is not static: only handlers are global, add `static`")
			}
		}
		if ins.Source() != nil {
			line = ins
		}
		if ins.IsFunctionCall() && isGlobal(ins.Reference(), messages) {
			calls[ins.Reference()]++
			if calls[ins.Reference()] == mostCalls+1 {
				add(line, fn, "calls %s once more: it may be called at %d places", ins.Reference(), mostCalls)
			}
		}
		switch {
		case ins.OpCode.JumpOp() == asm.JCOND: // loops that the kernel cuts short
			add(line, fn, "may_goto: loops must have a bound that the verifier sees")
		case ins.IsBuiltinCall():
			_, engine := engineFuncs[fn]
			engine = engine && messages
			if f := asm.BuiltinFunc(ins.Constant); !slices.Contains(allowed, f) && !(engine && slices.Contains(engineAllowed, f)) {
				add(line, fn, "calls %s, which handlers may not: docs/kernel-handlers.md lists the helpers that they may call", helperName(f))
			}
		case ins.IsKfuncCall():
			add(line, fn, "calls the kernel function %s, and handlers may call none", ins.Reference())
		case ins.IsLoadOfFunctionPointer():
			add(line, fn, "takes the address of the function %s: callbacks are not possible", ins.Reference())
		case ins.OpCode.IsDWordLoad() && ins.Src != asm.R0 && !ins.IsLoadFromMap():
			add(line, fn, "refers to %s of the kernel, and handlers may refer to nothing there", ins.Reference())
		case ins.IsFunctionCall() && handlerFuncs[ins.Reference()] != "" && !isProgram(fn):
			add(line, fn, "calls %s: the program calls handlers, nothing else may", ins.Reference())
		}
	}
	return errors.Join(append(errs, checkCalls(prog.Instructions, messages))...)
}

// helperName returns what a helper is called in C: bpf_trace_printk for FnTracePrintk.
func helperName(f asm.BuiltinFunc) string {
	name, ok := strings.CutPrefix(f.String(), "Fn")
	switch {
	case !ok:
		return fmt.Sprintf("helper %d of the kernel", int(f))
	case f == asm.FnDPath:
		return "bpf_d_path"
	}
	var b strings.Builder
	b.WriteString("bpf")
	for i, c := range name {
		if unicode.IsUpper(c) && (i == 0 || !unicode.IsUpper(rune(name[i-1]))) {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(c))
	}
	return b.String()
}

// where tells the function and, if it is known, the source line.
func where(ins *asm.Instruction, fn string) string {
	if ins == nil || ins.Source() == nil {
		return fn
	}
	if l, ok := ins.Source().(*btf.Line); ok {
		return fmt.Sprintf("%s, line %d", fn, l.LineNumber())
	}
	return fn
}

// isGlobal tells whether a function is one that may be global.
func isGlobal(fn string, messages bool) bool {
	return fn == bpf.HandlersProgram || handlerFuncs[fn] != "" || messages && engineFuncs[fn]
}

const (
	// mostCalls is at how many places of a program a global function may be called. One is
	// enough for handlers, but clang makes several of one.
	mostCalls = 8
	// mostWays is on how many ways through a program's functions one of them may be reached.
	mostWays = 64
	// frames is how deep calls may be: the verifier takes no more.
	frames = 8
)

// callees returns what each function calls, once for each place.
func callees(insns asm.Instructions) map[string][]string {
	calls := map[string][]string{}
	fn := bpf.HandlersProgram
	for i := range insns {
		if f := btf.FuncMetadata(&insns[i]); f != nil {
			fn = f.Name
		}
		if insns[i].IsFunctionCall() {
			calls[fn] = append(calls[fn], insns[i].Reference())
		}
	}
	return calls
}

// checkCalls finds a global function that is called in a loop, be it by a static one that is
// (a call that can be reached from itself), and one that is reached on too many ways.
func checkCalls(insns asm.Instructions, messages bool) error {
	calls := callees(insns)
	reaches := map[string]string{} // by function: a global one that it is, or that it reaches
	for more := true; more; {
		more = false
		for fn, list := range calls {
			for _, callee := range list {
				if isGlobal(callee, messages) {
					reaches[callee] = callee
				}
				if to := reaches[callee]; to != "" && reaches[fn] == "" {
					reaches[fn], more = to, true
				}
			}
		}
	}
	var errs []error
	ways := map[string]int{}
	var walk func(fn string, depth int)
	walk = func(fn string, depth int) {
		if ways[fn]++; depth == frames || ways[fn] > mostWays+1 { // one more, for those that it calls
			return
		}
		for _, callee := range calls[fn] {
			walk(callee, depth+1)
		}
	}
	entry := ""
	for from := 0; from < len(insns); {
		to := from + 1
		for to < len(insns) && btf.FuncMetadata(&insns[to]) == nil {
			to++
		}
		fn := bpf.HandlersProgram
		if f := btf.FuncMetadata(&insns[from]); f != nil {
			fn = f.Name
		}
		if from == 0 {
			entry = fn
		}
		errs = append(errs, checkLoops(fn, insns[from:to], reaches))
		from = to
	}
	walk(entry, 0)
	for _, fn := range slices.Sorted(maps.Keys(ways)) {
		if isGlobal(fn, messages) && ways[fn] > mostWays {
			errs = append(errs, fmt.Errorf("%s is called on more than %d ways through the functions of %s", fn, mostWays, entry))
		}
	}
	return errors.Join(errs...)
}

// checkLoops is checkCalls for one function.
func checkLoops(fn string, insns asm.Instructions, reaches map[string]string) error {
	at := map[asm.RawInstructionOffset]int{} // index by offset
	var offsets []asm.RawInstructionOffset
	for iter := insns.Iterate(); iter.Next(); {
		at[iter.Offset] = len(offsets)
		offsets = append(offsets, iter.Offset)
	}
	next := func(i int) (to []int) {
		ins := &insns[i]
		jump := func(off int64) {
			if k, ok := at[asm.RawInstructionOffset(int64(offsets[i])+1+off)]; ok {
				to = append(to, k)
			}
		}
		switch ins.OpCode.JumpOp() {
		case asm.Exit:
			return nil
		case asm.Ja:
			if ins.OpCode.Class() == asm.Jump32Class { // gotol
				jump(ins.Constant)
			} else {
				jump(int64(ins.Offset))
			}
			return to
		case asm.InvalidJumpOp, asm.Call:
		default:
			jump(int64(ins.Offset))
		}
		if i+1 < len(offsets) {
			to = append(to, i+1)
		}
		return to
	}
	for call := range offsets {
		if ins := &insns[call]; !ins.IsFunctionCall() || reaches[ins.Reference()] == "" {
			continue
		}
		seen := make([]bool, len(offsets))
		for todo := next(call); len(todo) > 0; {
			i := todo[len(todo)-1]
			todo = todo[:len(todo)-1]
			if i == call {
				callee := insns[call].Reference()
				if to := reaches[callee]; to != callee {
					callee += ", and so " + to + ","
				}
				return fmt.Errorf("%s calls %s in a loop", fn, callee)
			}
			if !seen[i] {
				seen[i] = true
				todo = append(todo, next(i)...)
			}
		}
	}
	return nil
}

// stacks returns how many bytes of stack each function takes: up to the lowest that it reaches
// from the frame pointer, as the verifier counts.
func stacks(insns asm.Instructions) map[string]int {
	bytes := map[string]int{}
	fn := bpf.HandlersProgram
	var frame [asm.RFP + 1]bool // registers that have the frame pointer
	for i := range insns {
		ins := &insns[i]
		if f := btf.FuncMetadata(ins); f != nil {
			fn, frame = f.Name, [asm.RFP + 1]bool{asm.RFP: true}
		}
		low, op := 0, ins.OpCode
		switch class := op.Class(); {
		case ins.IsBuiltinCall(), ins.IsFunctionCall():
			clear(frame[asm.R0:asm.R6])
		case class.IsStore() && frame[ins.Dst], class.IsLoad() && !op.IsDWordLoad() && frame[ins.Src]:
			low = int(ins.Offset)
		case op.ALUOp() == asm.Add && op.Source() == asm.ImmSource && frame[ins.Dst]:
			low = int(ins.Constant)
		}
		if class := op.Class(); class.IsALU() || class.IsLoad() {
			frame[ins.Dst] = op.ALUOp() == asm.Mov && op.Source() == asm.RegSource && frame[ins.Src]
		}
		bytes[fn] = max(bytes[fn], -low)
	}
	return bytes
}

// deepest returns the handler that takes most stack, with the functions that it calls, and how
// much that is.
func deepest(insns asm.Instructions) (handler string, bytes int) {
	own, calls := stacks(insns), callees(insns)
	var with func(fn string, depth int) int
	with = func(fn string, depth int) (most int) {
		if depth == frames {
			return 0
		}
		for _, callee := range calls[fn] {
			most = max(most, with(callee, depth+1))
		}
		return own[fn] + most
	}
	for _, fn := range slices.Sorted(maps.Keys(handlerFuncs)) {
		if n := with(fn, 0); n > bytes {
			handler, bytes = fn, n
		}
	}
	return handler, bytes
}
