// SPDX-License-Identifier: Apache-2.0

package loader

import "fmt"

// A Hook is where in the kernel a program sees frames.
type Hook int

// Hooks.
const (
	XDP Hook = iota // in the driver, before Linux has made a packet of the frame
	TC              // behind that, at the entry of Linux's stack: several packets may still be one
)

func (h Hook) String() string {
	if h < XDP || h > TC {
		return fmt.Sprintf("Hook(%d)", int(h))
	}
	return [...]string{"xdp", "tc"}[h]
}

// ParseHook reads what String writes.
func ParseHook(s string) (Hook, error) {
	for h := XDP; h <= TC; h++ {
		if s == h.String() {
			return h, nil
		}
	}
	return 0, fmt.Errorf("hook %q: want xdp or tc", s)
}

// verdict returns what becomes of a frame by what a program at the hook has returned.
func (h Hook) verdict(returned uint32) Action {
	if h == XDP {
		return Action(returned)
	}
	switch int32(returned) {
	case tcxNext:
		return ActionToStack
	case tcRedirect:
		return ActionSend
	}
	return ActionDrop
}

// include/uapi/linux/bpf.h, pkt_cls.h.
const (
	tcxNext    = -1
	tcRedirect = 7
)
