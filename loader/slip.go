// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/spin"
)

// What a slip was: xspin_slip_of and xspin_slip_why.
const (
	hasActed = 1 << 8 // XSPIN_HAS_ACTED: beside the bit of a handler

	slipNone    = 0
	slipDeposit = 1

	slipBounds = 0
	slipRight  = 1
	slipWindow = 2
	slipAlign  = 3
	slipApart  = 4
	slipFrame  = 5
)

var slipFunctions = [...]string{"", "deposit", "xspin_window_write", "xspin_window_load", "xspin_window_store", "xspin_window_add64", "xspin_window_cas64"}

// failure says in words what handler failed, with what code, and of XSPIN_SEGV why the
// handler got that.
func failure(bit uint32, code spin.Code, slip *bpf.MessageSlip) string {
	why := ""
	if code == spin.Segv && slip != nil {
		why = slipText(slip)
	}
	name := handlerName(bit)
	switch {
	case bit&hasActed != 0:
		return fmt.Sprintf("the %s handler set her->action to something else: want XDP_DROP, XDP_TX or XDP_PASS", name)
	case name == "header" && code == spin.HandOver:
		return "the header handler returned HandOver, and the object does not say that it may: want XSPIN_MESSAGES(HEADER | HAND_OVER)"
	case name == deposits && why != "":
		return why
	case name == deposits:
		return fmt.Sprintf("the deposit failed: %v", code)
	case why != "":
		return fmt.Sprintf("the %s handler returned %v: %s", name, code, why)
	}
	return fmt.Sprintf("the %s handler returned %v", name, code)
}

// slipText is what a slip was, "" if there was none.
func slipText(s *bpf.MessageSlip) string {
	if s.What == slipNone || int(s.What) >= len(slipFunctions) {
		return ""
	}
	name, end := slipFunctions[s.What], s.At+uint64(s.N)
	span := fmt.Sprintf("bytes %d to %d", s.At, end)
	if end < s.At {
		span = fmt.Sprintf("%d bytes from %d on", s.N, s.At)
	}
	if s.What == slipDeposit {
		if s.Why == slipWindow {
			return "deposit for a message without a window"
		}
		return fmt.Sprintf("deposit %s of a message with room for %d: out of bounds", span, s.Limit)
	}
	switch s.Why {
	case slipRight:
		right := map[uint64]string{1: "r, to read", 2: "w, to write", 4: "a, for atomic operations"}[s.Limit]
		return fmt.Sprintf("%s on window %d, whose handlers lack the right %s", name, s.Window, right)
	case slipWindow:
		return fmt.Sprintf("%s on window %d, which the context does not have", name, s.Window)
	case slipAlign:
		return fmt.Sprintf("%s at %d of window %d: want a multiple of %d", name, s.At, s.Window, s.Limit)
	case slipApart:
		return fmt.Sprintf("%s of %s of window %d, which lie in two MiB of its memory", name, span, s.Window)
	case slipFrame:
		return fmt.Sprintf("%s of %s of a frame: only %d can be had", name, span, s.Limit)
	}
	return fmt.Sprintf("%s of %s of window %d, which has %d: out of bounds", name, span, s.Window, s.Limit)
}
