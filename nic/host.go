// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/spin"
)

// events returns where the application of a context takes its events, nil if
// there is none that does.
func (s *ContextSpec) events() pair {
	p, _ := s.Resources.Host.(pair)
	return p
}

// forward hands on what went wrong in handlers, until the pool is closed: to who
// asks Events, and to the application whose context does no more.
func (n *NIC) forward() {
	defer close(n.events)
	for e := range n.pool.Events() {
		if e.Kind == spin.HandlerOverrun && e.Detail != "" { // not one that only counts others
			n.fault(e)
		}
		select {
		case n.events <- e:
		default:
			n.eventsLost.Add(1)
		}
	}
}

// fault tells an application that its context is stopped. With the lock, so that
// its pair is not used after Remove or Close.
func (n *NIC) fault(e spin.Fault) {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := n.contexts[e.Context]
	if n.closed || c == nil || c.spec.Name != e.Name || !c.tier.Stopped() { // the number is another's by now
		return
	}
	if p := c.spec.events(); p != nil && !p.Event(&hostq.Event{Kind: hostq.ContextFault, Text: e.Detail}) {
		p.LoseEvent()
	}
}
