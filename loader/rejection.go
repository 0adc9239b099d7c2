// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
)

// A Rejection says why the verifier refused an object of a user's. What is first in its
// text is what he can act on.
type Rejection struct {
	Release string   // of Linux
	Reason  string   // in the verifier's words
	Handler string   // the function, such as "xspin_payload"; "" if the log does not say
	Place   string   // such as "echo.bpf.c:7"; "" if the log does not say
	Source  string   // the line there
	Hint    string   // what to do about it; "" if we know no better than the reason
	Log     []string // its end, of at most 256 KiB; nil if the verifier has given up
	Err     error
}

func (r *Rejection) Error() string {
	var b strings.Builder
	b.WriteString("the verifier refuses it: " + r.Reason + r.where())
	fmt.Fprintf(&b, " (Linux %s)", r.Release)
	if r.Hint != "" {
		b.WriteString("; " + r.Hint)
	}
	return b.String()
}

// where tells the handler and the line, after a reason: ", in xspin_payload at echo.bpf.c:7: *n += 1;".
func (r *Rejection) where() string {
	var b strings.Builder
	if r.Handler != "" {
		b.WriteString(", in " + r.Handler)
	}
	if r.Place != "" {
		b.WriteString(" at " + r.Place)
	}
	if r.Source != "" {
		b.WriteString(": " + r.Source)
	}
	return b.String()
}

func (r *Rejection) Unwrap() error { return r.Err }

var (
	// Before it checks a global function. A reason that follows is about it.
	validating = regexp.MustCompile(`^Validating (\w+)\(\) func#\d+`)
	// After it has accepted one. What follows is not about it.
	valid = regexp.MustCompile(`^Func#\d+ \('\w+'\) is safe`)
	// A comment with the source line of the instructions that follow.
	comment = regexp.MustCompile(`^; (.*) @ ([^ ]*:\d+)$`)
	// Lines that are no reason: instructions, and the state of registers.
	instruction = regexp.MustCompile(`^(from \d+ to \d+|\d+)(: \(|: [RP]|:)|^mark_precise|^processed |^(cur|old) state: `)
	// The number of an instruction that was looked at.
	number = regexp.MustCompile(`^(\d+): \(`)
	// What newer kernels write under At:, as `xspin_payload @ echo.bpf.c:7:12`.
	at = regexp.MustCompile(`^(\w+) @ ([^ ]+?:\d+)(?::\d+)?$`)
)

// hints say what to do about a reason, in whose words it is found.
var hints = []struct {
	words *regexp.Regexp
	hint  string
}{
	{orNull, "compare what xspin_memory(), xspin_state() or a map returned with null before it is used"},
	{noPointer, "compare what xspin_memory(), xspin_state() or a map returned with null: a number is no pointer"},
	{regexp.MustCompile(`invalid zero-sized read`), "n must be at least 1 for the verifier: compare it before"},
	{regexp.MustCompile(`outside of the packet`), "compare the end of what is read with ctx->data_end before"},
	{tooDeep, "a handler has 192 bytes of stack on all kernels: keep what is larger in a map or in HPU memory"},
}

var (
	orNull    = regexp.MustCompile(`_or_null`)
	noPointer = regexp.MustCompile(`invalid mem access 'scalar'`)
)

// Of all functions together. The log does not say whose the stack is.
var tooDeep = regexp.MustCompile(`combined stack size`)

// Reasons that are ours.
const (
	endless = "it may loop without end"
	tooMuch = "it has too many branches or steps for the verifier: bound the loop, or make it smaller"
)

// outOfBounds tells whether the verifier has given up: at its limit of steps, or at that of
// pending branches, for which some kernels say EFAULT.
func outOfBounds(err error) bool { return errors.Is(err, unix.E2BIG) || errors.Is(err, unix.EFAULT) }

// gaveUp says where a verifier was that has given up: it is asked once more, with a log. What it says at its end,
// apart from that, is of no use.
func gaveUp(spec *ebpf.CollectionSpec, instead map[string]*ebpf.Map, err error) *Rejection {
	r := &Rejection{Release: release(), Reason: tooMuch, Err: err}
	name, log, _, _ := verifierLog(spec, instead)
	if name == "" {
		return r
	}
	insns := spec.Programs[name].Instructions
	if _, _, last := readLog(&ebpf.VerifierError{Cause: err, Log: log}); last >= 0 {
		fn := functionAt(insns, last)
		r.Handler = handlerOf(insns, fn)
		r.Place, r.Source = usersLine(insns, fn, last)
		r.Place, r.Source = shown(r.Place), shown(r.Source)
	}
	return r
}

// newRejection finds the reason in a log, and what to do about it. The instructions are
// those that were loaded. Of a log that was cut the first lines are missing, which have the handler, and
// have the source line if it is that of a whole loop.
func newRejection(ve *ebpf.VerifierError, insns asm.Instructions, cut bool) *Rejection {
	for i := range ve.Log { // it has lines of the source
		ve.Log[i] = shown(ve.Log[i])
	}
	r, words, last := readLog(ve)
	if cut && r.Handler == "" {
		r.Handler = functionAt(insns, last)
		if r.Place == "" {
			r.Place, r.Source = usersLine(insns, r.Handler, last)
		}
	}
	r.Handler = handlerOf(insns, r.Handler) // newer kernels name the function
	if isNobodys(r.Place, r.Source) {
		if place, source := usersLine(insns, r.Handler, last); place != "" {
			r.Place, r.Source = place, source
		}
	}
	if strings.Contains(words, "infinite loop detected") {
		r.Reason = endless
	}
	if handler, n := deepest(insns); handler != "" && tooDeep.MatchString(words) {
		r.Handler = handler
		r.Reason = fmt.Sprintf("%s: %d bytes are the handler's", r.Reason, n)
	}
	for _, h := range hints {
		if h.words.MatchString(words) {
			r.Hint = h.hint
			fn := ""
			switch h.words {
			case orNull:
				fn = nullable(ve.Log, words, insns)
			case noPointer:
				fn = returned(ve.Log)
			}
			if fn != "" {
				r.Hint = fmt.Sprintf("compare what %s returned with null before it is used", fn)
			}
			break
		}
	}
	r.Place, r.Source = shown(r.Place), shown(r.Source)
	return r
}

// functionAt returns the function of an instruction.
func functionAt(insns asm.Instructions, number int) (fn string) {
	for iter := insns.Iterate(); iter.Next() && int(iter.Offset) <= number; {
		if f := btf.FuncMetadata(iter.Ins); f != nil {
			fn = f.Name
		}
	}
	return fn
}

// handlerOf returns the handler that alone calls a function. If several do, or none, the function stands for them, as
// does a global one, which is judged on its own.
func handlerOf(insns asm.Instructions, fn string) string {
	for i := range insns {
		if f := btf.FuncMetadata(&insns[i]); f != nil && f.Name == fn && f.Linkage == btf.GlobalFunc {
			return fn
		}
	}
	calls := callees(insns)
	handler := ""
	for _, h := range slices.Sorted(maps.Keys(handlerFuncs)) {
		seen := map[string]bool{h: true}
		for todo := []string{h}; len(todo) > 0; todo = todo[1:] {
			for callee := range calls[todo[0]] {
				if !seen[callee] {
					seen[callee] = true
					todo = append(todo, callee)
				}
			}
		}
		switch {
		case !seen[fn]:
		case handler != "":
			return fn
		default:
			handler = h
		}
	}
	return cmp.Or(handler, fn)
}

var (
	// The register that a reason is about.
	register = regexp.MustCompile(`^R(\d+) `)
	// A register that has an element of a map, as far as is known.
	element = regexp.MustCompile(`\bR(\d+)(?:_\w+)?=map_value_or_null\([^)]*\bmap=([\w.]+)`)
)

// nullable finds the function that has returned what was not compared with null, by the map
// that it looks into; "" if the log does not say.
func nullable(log []string, words string, insns asm.Instructions) string {
	about := register.FindStringSubmatch(words)
	if about == nil {
		return ""
	}
	name := ""
	for _, line := range log {
		if validating.MatchString(strings.TrimSpace(line)) {
			name = ""
		}
		for _, m := range element.FindAllStringSubmatch(line, -1) {
			if m[1] == about[1] {
				name = m[2]
			}
		}
	}
	if name == "" {
		return ""
	}
	if name == bpf.MessagesState {
		return "xspin_state()"
	}
	for i := range insns {
		// The kernel keeps 15 characters of a name.
		if ins := &insns[i]; ins.IsLoadFromMap() && !strings.HasPrefix(name, reserved) && strings.HasPrefix(ins.Reference(), name) {
			return fmt.Sprintf("bpf_map_lookup_elem(&%s, ...)", ins.Reference())
		}
	}
	return returned(log)
}

// The first line of a function of the engine's that returns a pointer.
var pointer = regexp.MustCompile(`^; __weak void \*(xspin_\w+)\(`)

// returned finds the function of the engine's that the handler has called last, if it returns a
// pointer; "" if the log does not say.
func returned(log []string) (fn string) {
	for _, line := range log {
		line = strings.TrimSpace(line)
		if validating.MatchString(line) || line == "caller:" {
			fn = ""
		} else if m := pointer.FindStringSubmatch(line); m != nil {
			fn = m[1] + "()"
		}
	}
	return fn
}

// isNobodys tells whether a line is none of a handler's body: one of the headers, whose
// functions are inlined, or the one that begins the handler.
func isNobodys(place, source string) bool {
	file, _, _ := strings.Cut(place, ":")
	switch file {
	case "xspin_handler.h", "xspin_message.h", "hook.h", "engine.h", "frame.h", "train.h", "packets.bpf.c", "messages.bpf.c":
		return true
	}
	return begins.MatchString(source)
}

var begins = regexp.MustCompile(`^XSPIN_(HEADER|PAYLOAD|COMPLETION)\s*{?$`)

// usersLine finds the last line of the user's before an instruction of a handler, or the
// next one: clang may have put all that is the user's behind what it has inlined.
func usersLine(insns asm.Instructions, handler string, number int) (place, source string) {
	fn := ""
	for iter := insns.Iterate(); iter.Next(); {
		if f := btf.FuncMetadata(iter.Ins); f != nil {
			fn = f.Name
		}
		line, ok := iter.Ins.Source().(*btf.Line)
		if !ok || fn != handler {
			continue
		}
		if int(iter.Offset) > number && place != "" {
			break
		}
		at, text := fmt.Sprintf("%s:%d", filepath.Base(line.FileName()), line.LineNumber()), strings.TrimSpace(line.Line())
		if !isNobodys(at, text) {
			place, source = at, text
		}
	}
	return place, source
}

// readLog finds the reason in a log, the words in which older kernels would tell it, and the
// last instruction that was looked at, -1 if there is none. There are two forms. Up to some 7.0, the reason
// is the last line before the statistics, and the source line the last comment. Linux 7.3
// has them under headings in the middle, followed by how it came to that and suggestions;
// for some reasons it still has the old form.
func readLog(ve *ebpf.VerifierError) (r *Rejection, words string, insn int) {
	r, insn = &Rejection{Release: release(), Log: ve.Log, Err: ve}, -1
	var last string // what may be the reason
	headed := false
	for i := 0; i < len(ve.Log); i++ {
		line := strings.TrimSpace(ve.Log[i])
		if line == "" {
			continue
		}
		if reason, ok := strings.CutPrefix(line, "Verification failed: "); ok {
			headed = true
			r.Reason = reason
			r.Place, r.Source = "", ""
			continue
		}
		if headed {
			switch {
			case line == "Reason:": // up to an empty line
				sep := ": "
				for ; i+1 < len(ve.Log) && strings.TrimSpace(ve.Log[i+1]) != ""; i++ {
					r.Reason += sep + strings.TrimSpace(ve.Log[i+1])
					sep = " "
				}
			case line == "At:":
				r.readAt(ve.Log[i+1:])
				return r, last, insn
			}
			continue
		}
		if m := validating.FindStringSubmatch(line); m != nil {
			r.Handler, r.Place, r.Source = m[1], "", ""
			last = ""
			continue
		}
		if valid.MatchString(line) {
			r.Handler, r.Place, r.Source = "", "", ""
			last = ""
			continue
		}
		if m := comment.FindStringSubmatch(line); m != nil {
			// A line of the header is of a function that was called in the line before, if
			// clang has left that in place.
			if r.Place == "" || isNobodys(r.Place, r.Source) || !isNobodys(m[2], m[1]) {
				r.Source, r.Place = m[1], m[2]
			}
			continue
		}
		if m := number.FindStringSubmatch(line); m != nil {
			insn, _ = strconv.Atoi(m[1])
		}
		if !instruction.MatchString(line) {
			last = line
		}
	}
	if !headed {
		r.Reason = last
	}
	if r.Reason == "" {
		r.Reason = ve.Cause.Error()
	}
	return r, cmp.Or(last, r.Reason), insn
}

// A line of the source under At:, with its number, and >>> before the one that matters.
var context = regexp.MustCompile(`^(>>> +)?\d+ \|\s+(.*)$`)

// readAt reads what stands under At:.
func (r *Rejection) readAt(lines []string) {
	for _, line := range lines[:min(8, len(lines))] {
		line = strings.TrimSpace(line)
		around := context.FindStringSubmatch(line)
		switch m := at.FindStringSubmatch(line); {
		case m != nil && r.Place == "":
			r.Handler, r.Place = m[1], m[2]
		case r.Place == "" || line == "" || line == "Source context:" || around != nil && around[1] == "":
		case around != nil:
			r.Source = around[2]
			return
		default:
			r.Source = line
			return
		}
	}
}

// release is the kernel's, as uname -r has it.
func release() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "(" + err.Error() + ")"
	}
	return string(bytes.TrimRight(u.Release[:], "\x00"))
}
