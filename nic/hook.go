// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/xspin/xspin/loader"
)

// A Hook is where handlers in eBPF are called.
type Hook int

// Hooks.
const (
	HookAuto Hook = iota // of a context: that of its NIC, if it can be there. Of a NIC: xdp
	HookXDP              // in the driver, frame by frame. Packets for HPUs come from there
	HookTC               // at the entry of Linux's stack: what a local sender has not cut comes whole
)

func (h Hook) String() string {
	if h < HookAuto || h > HookTC {
		return fmt.Sprintf("Hook(%d)", int(h))
	}
	return [...]string{"auto", "xdp", "tc"}[h]
}

// hookPatience is for how long the program at xdp stays when no context needs it any more: drivers begin anew with each
// program, and the other end of a veth loses its offloads.
const hookPatience = 5 * time.Second

// hooks are which programs are attached for whom.
type hooks struct {
	patience time.Duration // hookPatience, but for tests

	mu    sync.Mutex // guards what follows
	users [2]int     // contexts at each hook, and the NIC itself
	off   [2]*time.Timer
	gone  bool // no program is attached any more
}

// atHook returns the hook that a context of the NIC is at, and why it is not that of the NIC.
func (n *NIC) atHook(s *ContextSpec) (h loader.Hook, why error) {
	want := s.Hook
	if want == HookAuto {
		want = n.cfg.Hook
	}
	if want != HookTC {
		return loader.XDP, nil
	}
	switch {
	case s.onHPUs() && s.Kernel == nil:
		return loader.XDP, errors.New("its handlers are on HPUs, which get their packets by XDP")
	default:
		if err := s.Kernel.Object.CheckHook(loader.TC); err != nil {
			return loader.XDP, err
		}
	}
	return loader.TC, nil
}

// resolveHook chooses the hook of a context. It tells of contexts that are not where their NIC would have them.
func (n *NIC) resolveHook(s *ContextSpec) (loader.Hook, error) {
	h, why := n.atHook(s)
	if why == nil {
		return h, nil
	}
	if s.Hook == HookTC {
		return h, fmt.Errorf("hook tc: %w", why)
	}
	n.cfg.Logger.Info(fmt.Sprintf("the context needs the program at xdp, before which senders on this machine cut their packets, for whomever they are: %v", why),
		"interface", n.iface.Name, "context", s.Name)
	return h, nil
}

// useHook has the program of a hook attached until as many call leaveHook.
func (n *NIC) useHook(h loader.Hook) error {
	n.hooks.mu.Lock()
	defer n.hooks.mu.Unlock()
	if n.hooks.gone {
		return ErrClosed
	}
	if t := n.hooks.off[h]; t != nil {
		t.Stop()
	}
	var err error
	if h == loader.TC {
		err = n.ingress.AttachTC(n.cfg.Order)
	} else {
		err = n.ingress.AttachXDP()
	}
	if err != nil {
		return err
	}
	n.hooks.users[h]++
	return nil
}

// leaveHook takes back one useHook.
func (n *NIC) leaveHook(h loader.Hook) {
	n.hooks.mu.Lock()
	defer n.hooks.mu.Unlock()
	if n.hooks.users[h]--; n.hooks.users[h] > 0 || n.hooks.gone {
		return
	}
	n.hooks.off[h] = time.AfterFunc(n.hooks.patience, func() {
		n.hooks.mu.Lock()
		defer n.hooks.mu.Unlock()
		if n.hooks.users[h] > 0 || n.hooks.gone {
			return
		}
		if err := n.ingress.DetachHook(h); err != nil {
			n.cfg.Logger.Error("a program that nobody needs stays attached", "interface", n.iface.Name, "hook", h, "err", err)
		}
	})
}

// leaveHooks takes all programs off, for good.
func (n *NIC) leaveHooks() error {
	n.hooks.mu.Lock()
	defer n.hooks.mu.Unlock()
	n.hooks.gone = true
	for _, t := range n.hooks.off {
		if t != nil {
			t.Stop()
		}
	}
	return n.ingress.Detach()
}

// isVeth tells whether the interface is one end of a pair, whose driver has XDP.
func (n *NIC) isVeth() bool {
	l, err := netlink.LinkByIndex(n.iface.Index)
	return err == nil && l.Type() == (&netlink.Veth{}).Type()
}
