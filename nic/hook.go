// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/spin"
)

// A Hook is where handlers in eBPF are called.
type Hook int

// Hooks.
const (
	HookAuto Hook = iota // of a context: that of its NIC, if it can be there. Of a NIC: tc on a veth, and where the driver has no XDP; else xdp
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

// notTC tells why a context cannot be at tc.
func (s *ContextSpec) notTC() error {
	switch {
	case s.Kernel == nil:
		return errors.New("its handlers are on HPUs, which get their packets by XDP")
	case s.Kernel.Object == nil:
		return nil // is told
	}
	for i := range s.Rulesets {
		if err := s.Rulesets[i].CheckTrain(); err != nil {
			return fmt.Errorf("ruleset %q: %w", s.Rulesets[i].Name, err)
		}
	}
	return s.Kernel.Object.CheckHook(loader.TC)
}

func (s *ContextSpec) resolveHook(wrong *spin.Problems) {
	if s.Hook < HookAuto || s.Hook > HookTC {
		wrong.Add("hook", "%d: want HookAuto, HookXDP or HookTC", int(s.Hook))
	}
	if s.Hook == HookTC {
		if err := s.notTC(); err != nil {
			wrong.Add("hook", "tc: %w", err)
		}
	}
}

// hookOf chooses the hook of a context that was resolved, and tells why that is not the NIC's own.
func (n *NIC) hookOf(s *ContextSpec) (h loader.Hook, why error) {
	want := s.Hook
	if want == HookAuto {
		want = n.cfg.Hook
	}
	switch {
	case s.HostActivated: // it has no packets
		return loader.XDP, nil
	case want == HookTC:
		if why = s.notTC(); why == nil {
			return loader.TC, nil
		}
	case n.cfg.Hook == HookTC:
		why = errors.New("it asks for that")
	}
	if why != nil {
		n.tellXDP(s, why)
	}
	return loader.XDP, why
}

// tellXDP tells of a context that is at xdp on a NIC at tc.
func (n *NIC) tellXDP(s *ContextSpec, why error) {
	n.cfg.Logger.Info(fmt.Sprintf("the context is at xdp: %s. While one is there, senders at the other end of a veth pair have no TSO", oneLine(why)),
		"interface", n.iface.Name, "context", s.Name)
}

// oneLine is an error, or what it joins, without what follows a first line.
func oneLine(err error) string {
	var all []string
	for _, e := range spin.Flatten(err) {
		line, _, _ := strings.Cut(e.Error(), "\n")
		all = append(all, line)
	}
	return strings.Join(all, "; ")
}

// loadAnywhere is loadKernel at a hook, or at xdp if it fails there and the context may be at either. With an error
// in why it is at xdp, which it uses then.
func (n *NIC) loadAnywhere(s *ContextSpec, hook loader.Hook) (h *loader.Handlers, why, err error) {
	h, err = n.loadKernel(s, hook)
	if err == nil || hook != loader.TC || s.Hook != HookAuto || errors.Is(err, loader.ErrNoAnswer) { // each load without an answer leaves a thread behind
		return h, nil, err
	}
	h, other := n.loadKernel(s, loader.XDP)
	if other != nil {
		return nil, nil, err
	}
	if other := n.useHook(loader.XDP); other != nil {
		return nil, nil, errors.Join(err, other, h.Close())
	}
	n.leaveHook(loader.TC)
	n.tellXDP(s, err)
	return h, err, nil
}

// PrepareHooks loads the programs for both hooks. Without it each is loaded when a context needs it, which takes
// CAP_PERFMON; with it a process may give that up, and install contexts at either hook later.
func (n *NIC) PrepareHooks() error {
	if err := n.ingress.Prepare(); err != nil {
		return fmt.Errorf("prepare both hooks of %s: %w", n.iface.Name, err)
	}
	return nil
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
		} else if h == loader.XDP {
			n.cfg.Logger.Info("no context needs the program at xdp any more: it is detached", "interface", n.iface.Name)
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
func isVeth(i *net.Interface) bool {
	l, err := netlink.LinkByIndex(i.Index)
	return err == nil && l.Type() == (&netlink.Veth{}).Type()
}
