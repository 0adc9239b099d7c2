// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/nicsock"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/spin"
)

// Stats are all counters of a NIC at about one moment.
type Stats struct {
	Interface   string `json:"interface"`
	Link        string `json:"link"`      // up, down, no carrier, or gone
	Mode        string `json:"mode"`      // of XDP: native, generic, or off while no context needs it
	ZeroCopy    bool   `json:"zero_copy"` // as granted
	MultiBuffer bool   `json:"multi_buffer"`
	Queues      int    `json:"queues"`
	Generation  uint32 `json:"generation"` // of the matching table

	Program  ProgramStats   `json:"program"`
	Contexts []ContextStats `json:"contexts"`
	HPUs     []hpu.Stats    `json:"hpus"`
	Sockets  SocketStats    `json:"sockets"`

	StackFailures uint64 `json:"stack_failures"` // packets for the Linux stack that it refused
	EventsLost    uint64 `json:"events_lost"`    // that nobody took in time
	Stuck         int    `json:"stuck"`          // handlers past their limit that have not returned
}

// ProgramStats are frames, counted by the programs at xdp and tc. Seen is the sum of the others.
type ProgramStats struct {
	Seen       uint64 `json:"seen"`
	Passed     uint64 `json:"passed"`     // no ruleset matched: to the Linux stack
	Redirected uint64 `json:"redirected"` // to an HPU
	Kernel     uint64 `json:"kernel"`     // to handlers in eBPF
	Refused    uint64 `json:"refused"`    // dropped: their context had no credit
	Spilled    uint64 `json:"spilled"`    // their context had no credit, and spills: to the stack
	Failed     uint64 `json:"failed"`     // matched, could not be redirected: to the stack
	Malformed  uint64 `json:"malformed"`  // matched, against their message format: to the stack
	Trains     uint64 `json:"trains"`     // matched, several packets in one: to the stack
	Oversize   uint64 `json:"oversize"`   // matched, too long for AF_XDP here, or for handlers in eBPF: to the stack
}

// ContextStats are what became of a context's packets.
type ContextStats struct {
	ID       int            `json:"id"`
	Name     string         `json:"name"`
	Rulesets []RulesetStats `json:"rulesets"`
	Tier     string         `json:"tier"`               // that its handlers run in: user or kernel
	Hook     string         `json:"hook,omitempty"`     // that its packets come from: xdp or tc; none for one that is triggered
	HookWhy  string         `json:"hook_why,omitempty"` // why that is xdp, on a NIC at tc
	Active   bool           `json:"active"`             // it gets packets, or may be triggered
	Refused  uint64         `json:"refused"`            // frames dropped for lack of credit
	Spilled  uint64         `json:"spilled"`            // frames left to the Linux stack for lack of credit
	Share    int            `json:"share"`              // weight of its HPU time
	Credits  uint32         `json:"credits"`            // buffers it may have in flight on a queue, now
	Granted  uint32         `json:"granted"`            // the same, while contexts do not compete for HPUs
	InFlight int            `json:"in_flight"`
	Stopped  bool           `json:"stopped"`            // a handler ran past its limit
	CPUs     []uint64       `json:"cpus,omitempty"`     // in the kernel: packets handled, by CPU
	Warnings []string       `json:"warnings,omitempty"` // what keeps packets from it
	spin.ContextStats
	Messages  *spin.MessageStats `json:"messages,omitempty"`  // of contexts with messages
	Checksums *hpu.Checksums     `json:"checksums,omitempty"` // and which of them it verifies
}

// MarshalJSON leaves out, in the kernel tier, what only HPUs have: there is no credit to run
// out of, and no HPU time to share.
func (s ContextStats) MarshalJSON() ([]byte, error) {
	type plain ContextStats // without this method
	if s.Tier != "kernel" {
		return json.Marshal(plain(s))
	}
	type none *struct{}
	return json.Marshal(struct {
		plain
		Refused  none `json:"refused,omitempty"`
		Spilled  none `json:"spilled,omitempty"`
		Share    none `json:"share,omitempty"`
		Credits  none `json:"credits,omitempty"`
		Granted  none `json:"granted,omitempty"`
		InFlight none `json:"in_flight,omitempty"`
		Stopped  none `json:"stopped,omitempty"`
	}{plain: plain(s)})
}

// RulesetStats count the frames that a ruleset matched.
type RulesetStats struct {
	Number  int    `json:"number"`
	Name    string `json:"name"`
	Matched uint64 `json:"matched"`
}

// SocketStats are the kernel's counters, summed over all AF_XDP sockets.
type SocketStats struct {
	RxDropped      uint64 `json:"rx_dropped"`   // no buffer on the fill ring
	RxRingFull     uint64 `json:"rx_ring_full"` // the HPU's ring was full
	TxInvalidDescs uint64 `json:"tx_invalid_descs"`
	Kicks          uint64 `json:"kicks"`       // system calls to send
	KicksAgain     uint64 `json:"kicks_again"` // of these: more calls were needed
}

// xdpMode says how the program at xdp is attached, "off" if none is.
func (n *NIC) xdpMode() string {
	if !n.ingress.Attached(loader.XDP) {
		return "off"
	}
	return n.ingress.Mode().String()
}

// Stats reads all counters.
func (n *NIC) Stats() (*Stats, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil, ErrClosed
	}
	prog, err := n.ingress.Stats()
	if err != nil {
		return nil, fmt.Errorf("statistics of %s: %w", n.iface.Name, err)
	}
	granted := n.queues[0].Granted()
	s := &Stats{
		Interface:   n.iface.Name,
		Link:        n.Link(),
		Mode:        n.xdpMode(),
		ZeroCopy:    granted.ZeroCopy,
		MultiBuffer: granted.MultiBuffer,
		Queues:      len(n.queues),
		Generation:  n.gen,
		Program: ProgramStats{
			Seen: prog.Seen, Passed: prog.Passed, Redirected: prog.Redirected,
			Failed: prog.Failed, Malformed: prog.Malformed, Oversize: prog.Oversize, Trains: prog.Trains,
		},
		Contexts: []ContextStats{},
		Stuck:    n.pool.Stuck(),
	}
	for _, refused := range prog.Refused {
		s.Program.Refused += refused
	}
	for _, spilled := range prog.Spilled {
		s.Program.Spilled += spilled
	}
	for _, kernel := range prog.Kernel {
		s.Program.Kernel += kernel
	}
	s.HPUs, s.EventsLost = n.pool.Stats()
	s.EventsLost += n.eventsLost.Load()
	for id, c := range n.contexts {
		cs := ContextStats{
			ID:           int(id),
			Name:         c.spec.Name,
			Rulesets:     []RulesetStats{},
			Tier:         c.spec.Tier(),
			Active:       c.active,
			Refused:      prog.Refused[id] - c.refused,
			Spilled:      prog.Spilled[id] - c.spilled,
			Share:        c.spec.Share,
			Granted:      c.credit.granted,
			Credits:      atomic.LoadUint32(&n.ingress.Share().Credit[id]),
			InFlight:     n.inFlight(c),
			Stopped:      c.tier.Stopped(),
			Warnings:     n.warnings(c),
			ContextStats: c.Stats(),
		}
		if !c.spec.HostActivated {
			cs.Hook = c.hook.String()
		}
		if c.why != nil {
			cs.HookWhy = oneLine(c.why)
		}
		if m, ok := c.Messages(); ok {
			cs.Messages, cs.Checksums = &m, &c.spec.Checksums
		}
		if t, ok := c.tier.(perCPU); ok {
			cs.CPUs = t.Packets()
		}
		for i, slot := range c.rules.slots {
			cs.Rulesets = append(cs.Rulesets, RulesetStats{Number: slot, Name: c.spec.Rulesets[i].Name, Matched: prog.Matched[slot] - c.rules.matched[i]})
		}
		s.Contexts = append(s.Contexts, cs)
	}
	slices.SortFunc(s.Contexts, func(a, b ContextStats) int { return cmp.Compare(a.ID, b.ID) })
	for _, sock := range n.sockets {
		st, err := sock.Stats()
		if err != nil {
			return nil, fmt.Errorf("statistics of %s: %w", n.iface.Name, err)
		}
		s.Sockets.RxDropped += st.RxDropped
		s.Sockets.RxRingFull += st.RxRingFull
		s.Sockets.TxInvalidDescs += st.TxInvalidDescs
		s.Sockets.Kicks += st.Kicks
		s.Sockets.KicksAgain += st.KickEAGAIN
	}
	if n.injector != nil {
		s.StackFailures = n.injector.Failures.Load()
	}
	return s, nil
}

// ServeStats lets `xspin stats` ask this NIC, under the interface's name, until
// Close. When a NIC on an interface of that name in another network namespace
// has it already, the process id is added.
func (n *NIC) ServeStats() error {
	report := func() (any, error) { return n.Stats() }
	s, err := nicsock.Serve(n.iface.Name, report)
	if errors.Is(err, nicsock.ErrTaken) {
		s, err = nicsock.Serve(fmt.Sprintf("%s-%d", n.iface.Name, os.Getpid()), report)
	}
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed || n.control != nil {
		return s.Close()
	}
	n.control = s
	return nil
}
