// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"fmt"
	"regexp"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// A Rejection says why the verifier refused an object of a user's. What is first in its
// text is what he can act on.
type Rejection struct {
	Release string   // of Linux
	Reason  string   // in the verifier's words
	Handler string   // the function, such as "xspin_payload"; "" if the log does not say
	Place   string   // such as "echo.bpf.c:7"; "" if the log does not say
	Source  string   // the line there
	Log     []string // all of it; nil if it would have been millions of lines
	Err     error
}

func (r *Rejection) Error() string {
	var b strings.Builder
	b.WriteString("the verifier refuses it: " + r.Reason)
	if r.Handler != "" {
		b.WriteString(", in " + r.Handler)
	}
	if r.Place != "" {
		b.WriteString(" at " + r.Place)
	}
	if r.Source != "" {
		b.WriteString(": " + r.Source)
	}
	fmt.Fprintf(&b, " (Linux %s)", r.Release)
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
	instruction = regexp.MustCompile(`^(from \d+ to \d+|\d+)(: \(|: [RP]|:)|^mark_precise|^processed `)
	// What newer kernels write under At:, as `xspin_payload @ echo.bpf.c:7:12`.
	at = regexp.MustCompile(`^(\w+) @ ([^ ]+?:\d+)(?::\d+)?$`)
)

// newRejection finds the reason in a log. There are two forms. Up to some 7.0, the reason
// is the last line before the statistics, and the source line the last comment. Linux 7.3
// has them under headings in the middle, followed by how it came to that and suggestions;
// for some reasons it still has the old form.
func newRejection(ve *ebpf.VerifierError) *Rejection {
	r := &Rejection{Release: release(), Log: ve.Log, Err: ve}
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
			case line == "Reason:" && i+1 < len(ve.Log):
				i++
				r.Reason += ": " + strings.TrimSpace(ve.Log[i])
			case line == "At:":
				r.readAt(ve.Log[i+1:])
				return r
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
			if ours := "xspin_handler.h:"; r.Place == "" || strings.HasPrefix(r.Place, ours) || !strings.HasPrefix(m[2], ours) {
				r.Source, r.Place = m[1], m[2]
			}
			continue
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
	return r
}

// readAt reads what stands under At:.
func (r *Rejection) readAt(lines []string) {
	for _, line := range lines[:min(4, len(lines))] {
		line = strings.TrimSpace(line)
		if m := at.FindStringSubmatch(line); m != nil {
			r.Handler, r.Place = m[1], m[2]
		} else if r.Place != "" && line != "" {
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
