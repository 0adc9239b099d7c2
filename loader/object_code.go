// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"cmp"
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
	asm.FnXdpGetBuffLen, asm.FnXdpLoadBytes, asm.FnXdpStoreBytes,
}

// checkCode looks at each instruction of an object's functions, and leaves each with what was
// looked at, and nothing else: what a file says beside an instruction may change it when it
// is loaded. Instructions are of the kinds that are listed here. They refer to maps and functions of the object,
// and call functions of the engine that are for handlers, all by name.
//
// The verifier checks a global function once, wherever it is called from, so the
// instructions that it counts bound a run of each of them and not of all together: three
// that call each other in loops ran eight million steps after four thousand were
// verified. Hence the only global functions are handlers, which the engine alone calls.
func checkCode(user functions, e *engine, object *ebpf.CollectionSpec) error {
	var errs []error
	for _, fn := range slices.Sorted(maps.Keys(user)) {
		var line *asm.Instruction // the last with a source line
		add := func(format string, args ...any) {
			if len(errs) == mostErrors {
				return
			}
			err := fmt.Errorf("%s: %s", where(line, fn), fmt.Sprintf(format, args...))
			if !slices.ContainsFunc(errs, func(e error) bool { return e.Error() == err.Error() }) {
				errs = append(errs, err)
			}
		}
		insns := user[fn]
		clean := make(asm.Instructions, len(insns))
		for i := range insns {
			ins := &insns[i]
			if ins.Source() != nil {
				line = ins
			}
			if what := wrong(ins, user, e, object); what != "" {
				add("%s", what)
			}
			clean[i] = asm.Instruction{OpCode: ins.OpCode, Dst: ins.Dst, Src: ins.Src, Offset: ins.Offset, Constant: ins.Constant}
			if ref := ins.Reference(); ref != "" {
				clean[i] = clean[i].WithReference(ref)
			}
			if src, ok := ins.Source().(*btf.Line); ok {
				clean[i] = clean[i].WithSource(src)
			}
		}
		if i := leaksMap(clean); i >= 0 {
			line = &insns[i]
			add("uses the address of a map, which is for the first argument of a helper alone")
		}
		t := btf.FuncMetadata(&insns[0])
		if handlerFuncs[fn] != "" {
			t = btf.FuncMetadata(&e.funcs[fn][0]) // whatever the object says of its arguments
		} else if t.Linkage != btf.StaticFunc {
			line = &insns[0]
			add("a function that is not static: only handlers are global, add `static`")
		}
		clean[0] = btf.WithFuncMetadata(clean[0].WithSymbol(fn), t)
		user[fn] = clean
	}
	return errors.Join(errs...)
}

// mostErrors is how many errors of its code an object gets.
const mostErrors = 20

// leaksMap finds an instruction of a function that does something else with the address of a map than passing it
// to a helper: -1 if there is none. With the rights that handlers are loaded with the verifier lets programs read the
// kernel's structure behind it, and follow the pointers there.
func leaksMap(insns asm.Instructions) int {
	f := newFlow[registers](insns) // those that may have a map's address
	f.reach(0, 0)
	return f.follow(func(ins *asm.Instruction, has registers) (registers, bool) {
		op, dst, src := ins.OpCode, registers(1)<<ins.Dst, registers(1)<<ins.Src
		byRegister := op.Source() == asm.RegSource
		leaks := false
		switch class := op.Class(); {
		case class == asm.LdClass:
			if has &^= dst; ins.Src == asm.PseudoMapFD {
				has |= dst
			}
		case class == asm.LdXClass:
			leaks = has&src != 0
			has &^= dst
		case class.IsStore():
			leaks = has&dst != 0 || class == asm.StXClass && has&src != 0
		case class.IsALU():
			byRegister = byRegister && op.ALUOp() != asm.Swap
			switch mov := op.ALUOp() == asm.Mov; {
			case mov && byRegister && has&src != 0 && class == asm.ALU64Class:
				has |= dst
			case mov && (!byRegister || has&src == 0):
				has &^= dst
			default:
				leaks = has&dst != 0 || byRegister && has&src != 0
			}
		case ins.IsFunctionCall():
			leaks = has&arguments != 0
			has &^= clobbered
		case op.JumpOp() == asm.Call: // of a helper: the verifier knows which arguments are maps
			has &^= clobbered
		case op.JumpOp() == asm.Exit:
			leaks = has&(1<<asm.R0) != 0
		case op.JumpOp() != asm.Ja:
			leaks = has&dst != 0 || byRegister && has&src != 0
		}
		return has, !leaks
	})
}

// wrong says what an instruction does that handlers may not, "" if they may.
func wrong(ins *asm.Instruction, user functions, e *engine, object *ebpf.CollectionSpec) string {
	const strange = "an instruction that handlers may not have"
	op, ref := ins.OpCode, ins.Reference()
	isMap := object.Maps[ref] != nil && ref != bpf.HandlersSection
	if ins.Dst > asm.RFP || ins.Src > asm.RFP {
		return strange
	}
	switch op.Class() {
	case asm.ALUClass, asm.ALU64Class:
		if ins.Offset != 0 { // casts between address spaces, and what is the kernel's own
			return strange
		}
	case asm.LdXClass:
		if m := op.Mode(); m != asm.MemMode && m != asm.MemSXMode {
			return strange
		}
	case asm.StClass:
		if op.Mode() != asm.MemMode {
			return strange
		}
	case asm.StXClass:
		if m := op.Mode(); m != asm.MemMode && m != asm.AtomicMode {
			return strange
		}
	case asm.LdClass:
		switch {
		case !op.IsDWordLoad():
			return strange
		case ins.IsLoadOfFunctionPointer():
			return fmt.Sprintf("takes the address of the function %s: callbacks are not possible", ref)
		case ins.Src == asm.R0 && ref == "": // a number
		case ins.Src == asm.PseudoMapFD && isMap && !isSection(ref):
		case ins.Src == asm.PseudoMapValue && isMap && isSection(ref):
		case ins.Src == asm.PseudoMapFD || ins.Src == asm.PseudoMapValue:
			return "refers to a map that is none of the object's own"
		default:
			return fmt.Sprintf("refers to %s of the kernel, and handlers may refer to nothing there", cmp.Or(ref, "something"))
		}
		return ""
	case asm.JumpClass, asm.Jump32Class:
		switch jump := op.JumpOp(); {
		case jump == asm.JCOND: // loops that the kernel cuts short
			return "may_goto: loops must have a bound that the verifier sees"
		case ins.IsBuiltinCall() && op.Class() == asm.JumpClass:
			if f := asm.BuiltinFunc(ins.Constant); f == asm.FnCsumDiff {
				return "calls bpf_csum_diff by its number: xspin_handler.h has it with a bound"
			} else if !slices.Contains(allowed, f) {
				return fmt.Sprintf("calls %s, which handlers may not: docs/kernel-handlers.md lists the helpers that they may call", helperName(f))
			}
		case ins.IsKfuncCall():
			return fmt.Sprintf("calls the kernel function %s, and handlers may call none", ref)
		case ins.IsFunctionCall() && op.Class() == asm.JumpClass:
			switch {
			case handlerFuncs[ref] != "":
				return fmt.Sprintf("calls %s: the program calls handlers, nothing else may", ref)
			case user[ref] == nil && !e.api[ref]:
				return fmt.Sprintf("calls a function that is not there: %q", ref)
			case ins.Constant != -1 || ins.Dst != asm.R0 || ins.Offset != 0: // only in the place of -1 a name is a distance
				return fmt.Sprintf("calls %s by a distance: calls name what they call", ref)
			}
			return ""
		case jump == asm.Call, jump == asm.InvalidJumpOp, jump == asm.Ja && op.Source() != asm.ImmSource:
			return strange
		}
	}
	if ref != "" || btf.CORERelocationMetadata(ins) != nil {
		return fmt.Sprintf("refers to %s of the kernel, and handlers may refer to nothing there", cmp.Or(ref, "a type"))
	}
	return ""
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

const (
	// mostCalls is at how many places of a program a global function may be called.
	mostCalls = 8
	// mostWays is on how many ways through a program's functions one of them may be reached.
	mostWays = 64
	// frames is how deep calls may be: the verifier takes no more.
	frames = 8
)

// callees returns what each function calls, and at how many places.
func callees(insns asm.Instructions) map[string]map[string]int {
	calls := map[string]map[string]int{}
	fn := bpf.HandlersProgram
	for i := range insns {
		if f := btf.FuncMetadata(&insns[i]); f != nil {
			fn = f.Name
		}
		if insns[i].IsFunctionCall() {
			if calls[fn] == nil {
				calls[fn] = map[string]int{}
			}
			calls[fn][insns[i].Reference()]++
		}
	}
	return calls
}

// checkCalls finds a global function that is called in a loop, be it by a static one that is
// (a call that can be reached from itself), and one that is called at too many places, or is reached on too
// many ways.
func checkCalls(insns asm.Instructions) error {
	calls := callees(insns)
	global := map[string]bool{}
	for i := range insns {
		if f := btf.FuncMetadata(&insns[i]); f != nil && f.Linkage == btf.GlobalFunc {
			global[f.Name] = true
		}
	}
	callers, places := map[string][]string{}, map[string]int{}
	for fn, list := range calls {
		for callee, n := range list {
			callers[callee] = append(callers[callee], fn)
			places[callee] += n
		}
	}
	reaches := map[string]string{} // by function: a global one that it is, or that it reaches
	todo := slices.Sorted(maps.Keys(global))
	for _, fn := range todo {
		reaches[fn] = fn
	}
	for len(todo) > 0 {
		fn := todo[0]
		todo = todo[1:]
		for _, caller := range callers[fn] {
			if reaches[caller] == "" {
				reaches[caller] = reaches[fn]
				todo = append(todo, caller)
			}
		}
	}
	var errs []error
	entry := ""
	for from := 0; from < len(insns); {
		to := from + 1
		for to < len(insns) && btf.FuncMetadata(&insns[to]) == nil {
			to++
		}
		fn := btf.FuncMetadata(&insns[from]).Name
		if from == 0 {
			entry = fn
		}
		errs = append(errs, checkLoops(fn, insns[from:to], reaches))
		from = to
	}
	ways := waysTo(entry, calls)
	for _, fn := range slices.Sorted(maps.Keys(ways)) {
		switch {
		case !global[fn]:
		case places[fn] > mostCalls:
			errs = append(errs, fmt.Errorf("%s is called at %d places: it may be called at %d", fn, places[fn], mostCalls))
		case ways[fn] > mostWays:
			errs = append(errs, fmt.Errorf("%s is called on more than %d ways through the functions of %s", fn, mostWays, entry))
		}
	}
	return errors.Join(errs...)
}

// waysTo counts on how many ways through calls of at most so many frames each function is reached, up to more than mostWays.
// Each depth looks at each pair of functions once, however many ways lead there.
func waysTo(entry string, calls map[string]map[string]int) map[string]int {
	ways := map[string]int{}
	now := map[string]int{entry: 1}
	for range frames + 1 {
		next := map[string]int{}
		for fn, n := range now {
			ways[fn] = min(ways[fn]+n, mostWays+1)
			for callee, times := range calls[fn] {
				next[callee] = min(next[callee]+n*times, mostWays+1)
			}
		}
		now = next
	}
	return ways
}

// checkLoops is checkCalls for one function.
func checkLoops(fn string, insns asm.Instructions, reaches map[string]string) error {
	loops := inLoops(insns)
	for i := range insns {
		ins := &insns[i]
		if !loops[i] || !ins.IsFunctionCall() || reaches[ins.Reference()] == "" {
			continue
		}
		callee := ins.Reference()
		if to := reaches[callee]; to != callee {
			callee += ", and so " + to + ","
		}
		return fmt.Errorf("%s calls %s in a loop", fn, callee)
	}
	return nil
}

// successors returns which instructions of a function may follow each.
func successors(insns asm.Instructions) [][]int {
	at := make(map[asm.RawInstructionOffset]int, len(insns)) // index by offset
	offsets := make([]asm.RawInstructionOffset, 0, len(insns))
	for iter := insns.Iterate(); iter.Next(); {
		at[iter.Offset] = len(offsets)
		offsets = append(offsets, iter.Offset)
	}
	next := make([][]int, len(insns))
	for i := range insns {
		ins := &insns[i]
		jump := func(off int64) {
			if k, ok := at[asm.RawInstructionOffset(int64(offsets[i])+1+off)]; ok {
				next[i] = append(next[i], k)
			}
		}
		switch ins.OpCode.JumpOp() {
		case asm.Exit:
			continue
		case asm.Ja:
			if ins.OpCode.Class() == asm.Jump32Class { // gotol
				jump(ins.Constant)
			} else {
				jump(int64(ins.Offset))
			}
			continue
		case asm.InvalidJumpOp, asm.Call:
		default:
			jump(int64(ins.Offset))
		}
		if i+1 < len(insns) {
			next[i] = append(next[i], i+1)
		}
	}
	return next
}

// inLoops tells of each instruction of a function whether it may run again after it has run: whether it lies in a
// strongly connected component with others, or jumps to itself. By Tarjan's algorithm, so that
// it takes no longer than the function is long, whoever has made it.
func inLoops(insns asm.Instructions) []bool {
	next := successors(insns)
	loops := make([]bool, len(insns))
	order, low := make([]int, len(insns)), make([]int, len(insns)) // 0: not seen yet
	onStack := make([]bool, len(insns))
	var stack, path []int
	edge := make([]int, len(insns)) // the next of next[i] to follow
	n := 0
	for root := range insns {
		if order[root] != 0 {
			continue
		}
		for path = append(path, root); len(path) > 0; {
			i := path[len(path)-1]
			if edge[i] == 0 && order[i] == 0 {
				n++
				order[i], low[i], onStack[i] = n, n, true
				stack = append(stack, i)
			}
			if edge[i] < len(next[i]) {
				k := next[i][edge[i]]
				edge[i]++
				switch {
				case k == i:
					loops[i] = true
				case order[k] == 0:
					path = append(path, k)
				case onStack[k]:
					low[i] = min(low[i], order[k])
				}
				continue
			}
			path = path[:len(path)-1]
			if len(path) > 0 {
				up := path[len(path)-1]
				low[up] = min(low[up], low[i])
			}
			if low[i] != order[i] {
				continue
			}
			several := stack[len(stack)-1] != i
			for {
				k := stack[len(stack)-1]
				stack = stack[:len(stack)-1]
				onStack[k] = false
				loops[k] = loops[k] || several
				if k == i {
					break
				}
			}
		}
	}
	return loops
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
	type at struct {
		fn    string
		depth int
	}
	known := map[at]int{}
	var with func(fn string, depth int) int
	with = func(fn string, depth int) (most int) {
		if depth == frames {
			return 0
		}
		if n, ok := known[at{fn, depth}]; ok {
			return n
		}
		for callee := range calls[fn] {
			most = max(most, with(callee, depth+1))
		}
		known[at{fn, depth}] = own[fn] + most
		return own[fn] + most
	}
	for _, fn := range slices.Sorted(maps.Keys(handlerFuncs)) {
		if n := with(fn, 0); n > bytes {
			handler, bytes = fn, n
		}
	}
	return handler, bytes
}
