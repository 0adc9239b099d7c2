// SPDX-License-Identifier: Apache-2.0

package loader

import "github.com/cilium/ebpf/asm"

// A flow is what may hold before each instruction of a function, as far as it was followed. It only grows, so following
// it ends, and looks at each instruction no more often than what holds there can grow: however the
// instructions were made.
type flow[S state[S]] struct {
	insns  asm.Instructions
	next   [][]int
	before []S
	seen   []bool
	todo   []int // instructions before which it has grown
}

// A state is what may hold at one place: or returns what may by either.
type state[S any] interface {
	comparable
	or(S) S
}

func newFlow[S state[S]](insns asm.Instructions) *flow[S] {
	return &flow[S]{insns: insns, next: successors(insns), before: make([]S, len(insns)), seen: make([]bool, len(insns))}
}

// reach adds what may hold before an instruction.
func (f *flow[S]) reach(i int, s S) {
	if s = s.or(f.before[i]); !f.seen[i] || s != f.before[i] {
		f.seen[i], f.before[i] = true, s
		f.todo = append(f.todo, i)
	}
}

// follow takes all steps that are to be taken. A step returns what may hold behind an instruction, or false to have follow
// return that one at once; else it returns -1.
func (f *flow[S]) follow(step func(ins *asm.Instruction, s S) (S, bool)) int {
	for len(f.todo) > 0 {
		i := f.todo[len(f.todo)-1]
		f.todo = f.todo[:len(f.todo)-1]
		s, ok := step(&f.insns[i], f.before[i])
		if !ok {
			return i
		}
		for _, k := range f.next[i] {
			f.reach(k, s)
		}
	}
	return -1
}

// registers are some of a function's, by their numbers.
type registers uint16

func (r registers) or(other registers) registers { return r | other }

// Registers by what calls do with them: they take some as arguments, and leave nothing in others.
const (
	arguments registers = 0x3e // r1 to r5
	clobbered registers = 0x3f // r0 to r5
)
