// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/xspin/xspin/bpf"
)

// Handlers are compiled once, and have a frame's struct xdp_md for ctx. At tc the engine calls them with a struct
// __sk_buff in its place, where other fields lie at the same offsets: the verifier would accept whatever they read there.
// So an object runs at tc if it leaves ctx to functions of the engine, which are those of the hook.

// opaqueSince is the first version of xspin_handler.h with functions that leave ctx to the engine.
const opaqueSince = 3

// CheckHook tells whether an object runs at a hook: nil, or all that is against it, joined.
func (o *Object) CheckHook(h Hook) error {
	switch {
	case h == XDP, h == TC && o.tc != nil:
		return nil
	case h != TC:
		return fmt.Errorf("there is no hook %v", h)
	}
	errs := flatten(o.notTC)
	for i, err := range errs {
		errs[i] = show(err)
	}
	return errors.Join(errs...)
}

// specOf returns what is loaded for a hook.
func (o *Object) specOf(h Hook) (*ebpf.CollectionSpec, error) {
	err := o.CheckHook(h)
	switch {
	case err != nil:
		return nil, fmt.Errorf("its handlers do not run at %v: %w", h, err)
	case h == TC:
		return o.tc, nil
	}
	return o.spec, nil
}

// againstTC returns why an object does not run at tc, as far as its own code says.
func (o *Object) againstTC(user functions) error {
	if o.version < opaqueSince { // what it has of the header is the reason for all others
		return fmt.Errorf("it was made with version %d of xspin_handler.h, whose functions read the frame as it is at xdp: compile again with version %d of xspin_handler.h: `xspin object new` writes it",
			o.version, bpf.HandlersVersion)
	}
	var handsOver error
	if o.HandsOver() {
		handsOver = errors.New("it hands messages over to HPUs, which get their packets by XDP: leave HAND_OVER out")
	}
	return errors.Join(handsOver, checkContext(user))
}

// A mayBe is what a value may be, in bits; 0 is what does not matter.
type mayBe uint8

const (
	isContext    mayBe = 1 << iota // ctx, by moves alone
	perhaps                        // ctx among others, from memory that it is in somewhere
	isFrame                        // an address of the stack, of the function or of those that called it
	kindsOfValue = iota
)

const (
	pointerSize = 8
	wholeStack  = ^uint64(0) // all slots: 512 bytes
)

// held is where values of each kind may be in a function: in which registers, and in which 8 bytes of
// its stack, from the frame pointer down.
type held [kindsOfValue]struct {
	regs  registers
	slots uint64
}

func (h held) or(other held) held {
	for i := range h {
		h[i].regs |= other[i].regs
		h[i].slots |= other[i].slots
	}
	return h
}

// in returns what any of the registers may be.
func (h *held) in(regs registers) (k mayBe) {
	for i := range h {
		if h[i].regs&regs != 0 {
			k |= 1 << i
		}
	}
	return k
}

// inStack returns what any of the slots may be.
func (h *held) inStack(slots uint64) (k mayBe) {
	for i := range h {
		if h[i].slots&slots != 0 {
			k |= 1 << i
		}
	}
	return k
}

// set has registers be something else.
func (h *held) set(regs registers, k mayBe) {
	for i := range h {
		if h[i].regs &^= regs; k>>i&1 != 0 {
			h[i].regs |= regs
		}
	}
}

// add adds to what may be in slots.
func (h *held) add(slots uint64, k mayBe) {
	for i := range h {
		if k>>i&1 != 0 {
			h[i].slots |= slots
		}
	}
}

// slotOf returns the slot that is 8 bytes at an offset from the frame pointer; false for one across two, or for none.
func slotOf(offset int16) (uint64, bool) {
	if offset%pointerSize != 0 || offset < -64*pointerSize || offset >= 0 {
		return wholeStack, false
	}
	return 1 << (-offset/pointerSize - 1), true
}

// isPointer tells whether an instruction loads or stores as many bytes as a pointer has. Fewer are a number to the verifier.
func isPointer(op asm.OpCode) bool { return op.Size() == asm.DWord }

// A contextFlow follows ctx through all functions of an object: it comes into handlers by the first argument.
type contextFlow struct {
	flows   map[string]*flow[held]
	calls   map[string][]call // of each static function
	returns map[string]mayBe
	handed  bool  // an address of a stack that ctx is in was handed on: what is read by addresses of stacks may be it
	stored  mayBe // by an address of a stack: so it may be in any
}

// A call is where a function is called.
type call struct {
	from *flow[held]
	at   int
}

func followContext(user functions) *contextFlow {
	c := &contextFlow{map[string]*flow[held]{}, map[string][]call{}, map[string]mayBe{}, false, 0}
	for fn, insns := range user {
		f := newFlow[held](insns)
		c.flows[fn] = f
		for i := range insns {
			if ref := insns[i].Reference(); insns[i].IsFunctionCall() && user[ref] != nil {
				c.calls[ref] = append(c.calls[ref], call{f, i})
			}
		}
		if handlerFuncs[fn] != "" {
			var h held
			h.set(1<<asm.R1, isContext)
			c.enter(f, h)
		}
	}
	for grown := true; grown; {
		grown = false
		for fn, f := range c.flows {
			grown = grown || len(f.todo) > 0
			f.follow(func(ins *asm.Instruction, h held) (held, bool) { return c.step(fn, ins, h), true })
		}
	}
	return c
}

// enter adds what arguments may be.
func (c *contextFlow) enter(f *flow[held], h held) {
	h.set(1<<asm.RFP, isFrame)
	f.reach(0, h)
}

// step returns what may be where behind an instruction.
func (c *contextFlow) step(fn string, ins *asm.Instruction, h held) held {
	op, dst, src := ins.OpCode, registers(1)<<ins.Dst, registers(1)<<ins.Src
	switch class := op.Class(); {
	case class == asm.LdClass:
		h.set(dst, 0)
	case class == asm.LdXClass:
		h.set(dst, c.loaded(ins, &h))
	case class.IsStore():
		c.store(ins, &h)
	case class.IsALU():
		k := h.in(dst)
		if op.ALUOp() == asm.Mov {
			k = 0
		}
		if op.Source() == asm.RegSource && op.ALUOp() != asm.Swap {
			k |= h.in(src)
		}
		if class == asm.ALUClass { // what has 32 bits is a number
			k = 0
		}
		h.set(dst, k)
	case ins.IsFunctionCall() && c.flows[ins.Reference()] != nil:
		c.call(c.flows[ins.Reference()], &h)
		h.set(clobbered, 0)
		h.set(1<<asm.R0, c.returns[ins.Reference()])
	case op.JumpOp() == asm.Call: // of a helper, or of the engine
		h.set(clobbered, 0)
	case op.JumpOp() == asm.Exit:
		if k := h.in(1<<asm.R0) | c.returns[fn]; k != c.returns[fn] {
			c.returns[fn] = k
			for _, call := range c.calls[fn] {
				call.again()
			}
		}
	}
	return h
}

// loaded returns what a load gets.
func (c *contextFlow) loaded(ins *asm.Instruction, h *held) mayBe {
	switch slot, one := slotOf(ins.Offset); {
	case !isPointer(ins.OpCode) || h.in(1<<ins.Src)&isFrame == 0:
		return 0
	case ins.Src == asm.RFP && one:
		return h.inStack(slot)
	}
	k := c.stored | isFrame
	if c.handed || h.inStack(wholeStack)&(isContext|perhaps) != 0 {
		k |= perhaps
	}
	return k
}

// store does what a store does. Wherever else than at a place of the function's stack that the instruction names ctx is
// stored, that is an error, and not followed.
func (c *contextFlow) store(ins *asm.Instruction, h *held) {
	var k mayBe
	if ins.OpCode.Class() == asm.StXClass {
		k = h.in(1 << ins.Src)
	}
	slot, one := slotOf(ins.Offset)
	switch {
	case !isPointer(ins.OpCode) || h.in(1<<ins.Dst)&isFrame == 0:
	case ins.OpCode.Mode() == asm.AtomicMode: // may return what is there, or not, in either of these
		got := c.loaded(&asm.Instruction{OpCode: ins.OpCode, Src: ins.Dst, Offset: ins.Offset}, h)
		h.set(1<<ins.Src, k|got)
		h.set(1<<asm.R0, h.in(1<<asm.R0)|got)
	case ins.Dst == asm.RFP && one:
		for i := range h {
			h[i].slots &^= slot
		}
		h.add(slot, k)
	case k&^isContext|c.stored != c.stored:
		c.stored |= k &^ isContext
		c.again()
		fallthrough
	default:
		h.add(wholeStack, k&^isContext)
	}
}

// call has a function have what its arguments may be, and do what it may to the stack.
func (c *contextFlow) call(f *flow[held], h *held) {
	var to held
	for r := registers(1 << asm.R1); r&arguments != 0; r <<= 1 {
		to.set(r, h.in(r))
	}
	c.enter(f, to)
	given := h.in(arguments)
	if given&isFrame == 0 {
		return
	}
	if !c.handed && (given|h.inStack(wholeStack))&(isContext|perhaps) != 0 {
		c.handed = true
		c.again()
	}
	h.add(wholeStack, c.stored)
}

// again has a call be looked at once more.
func (c *call) again() {
	if c.from.seen[c.at] {
		c.from.todo = append(c.from.todo, c.at)
	}
}

// again has all be looked at once more, which happens as often as there is something that holds of all.
func (c *contextFlow) again() {
	for _, f := range c.flows {
		for i, seen := range f.seen {
			if seen {
				f.todo = append(f.todo, i)
			}
		}
	}
}

// checkContext finds what handlers do with ctx, other than passing it to functions.
func checkContext(user functions) error {
	c := followContext(user)
	var errs []error
	for _, fn := range slices.Sorted(maps.Keys(user)) {
		f := c.flows[fn]
		var line *asm.Instruction // the last with a source line
		for i := range f.insns {
			ins := &f.insns[i]
			if ins.Source() != nil {
				line = ins
			}
			if !f.seen[i] || len(errs) == mostErrors {
				continue
			}
			if what := usesContext(ins, &f.before[i]); what != "" {
				err := fmt.Errorf("%s: %s", where(line, fn), what)
				if !slices.ContainsFunc(errs, func(e error) bool { return e.Error() == err.Error() }) {
					errs = append(errs, err)
				}
			}
		}
	}
	return errors.Join(errs...)
}

// xdpHelpers are helpers of Linux that only programs at xdp may call, and what to call or read instead.
var xdpHelpers = map[asm.BuiltinFunc]string{
	asm.FnXdpGetBuffLen: "her->len", asm.FnXdpLoadBytes: "xspin_load()", asm.FnXdpStoreBytes: "xspin_store()",
}

// xdpFields are those of struct xdp_md, each of 4 bytes.
var xdpFields = [...]string{"data", "data_end", "data_meta", "ingress_ifindex", "rx_queue_index", "egress_ifindex"}

// usesContext says what an instruction does with ctx that is something else at tc, and what to do instead; "" if it does nothing.
func usesContext(ins *asm.Instruction, h *held) string {
	const (
		another = ", and at tc it is another structure"
		opaque  = ": it is for functions of xspin_handler.h alone"
		apart   = ": pass it as an argument of its own, not in a structure"
	)
	op := ins.OpCode
	dst, src := h.in(1<<ins.Dst), h.in(1<<ins.Src)
	switch class := op.Class(); {
	case class == asm.LdXClass && src&isContext != 0:
		field := "ctx"
		if i := int(ins.Offset) / 4; ins.Offset >= 0 && ins.Offset%4 == 0 && i < len(xdpFields) {
			field = "ctx->" + xdpFields[i]
			if i < 3 {
				return "reads " + field + another + ": load the frame by xspin_load()"
			}
		}
		return "reads " + field + another + opaque
	case class == asm.LdXClass && src&perhaps != 0:
		return "reads by a pointer from the stack that may be ctx" + another + apart
	case class.IsStore() && dst&isContext != 0:
		return "writes to ctx" + another + opaque
	case class.IsStore() && dst&perhaps != 0:
		return "writes by a pointer from the stack that may be ctx" + another + apart
	case class == asm.StXClass && src&isContext != 0:
		if _, one := slotOf(ins.Offset); ins.Dst != asm.RFP || !one || !isPointer(op) || op.Mode() != asm.MemMode {
			return "keeps ctx in memory" + opaque
		}
	case class.IsALU():
		byRegister := op.Source() == asm.RegSource && op.ALUOp() != asm.Swap
		mov := op.ALUOp() == asm.Mov
		if !mov && dst&isContext != 0 || byRegister && src&isContext != 0 && !(mov && class == asm.ALU64Class) {
			return "calculates with ctx" + opaque
		}
	case ins.IsBuiltinCall():
		if f := asm.BuiltinFunc(ins.Constant); xdpHelpers[f] != "" {
			return fmt.Sprintf("calls %s, which is there at xdp only: %s is there at both hooks", helperName(f), xdpHelpers[f])
		}
	}
	return ""
}
