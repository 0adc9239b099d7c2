// SPDX-License-Identifier: Apache-2.0

package handlerstest

import (
	"fmt"
	"net/netip"
	"sync"

	"github.com/xspin/xspin/spin"
)

// stack is the Linux stack.
type stack struct{ n *NIC }

// Inject implements hpu.Stack.
func (s stack) Inject(size int, copyTo func([]byte, int) int) error {
	b := make([]byte, size)
	copyTo(b, 0)
	s.n.note(func(o *Outcome) { o.Stack = append(o.Stack, b) })
	return nil
}

// events takes the events of messages.
type events struct{ n *NIC }

// Post implements spin.EventSink.
func (s events) Post(e *spin.MessageEvent) bool {
	s.n.note(func(o *Outcome) { o.Messages = append(o.Messages, *e) })
	return true
}

// logSink takes what handlers print.
type logSink struct{ n *NIC }

// Log implements hpu.LogSink.
func (s logSink) Log(_ int64, _ int, text []byte) {
	line := string(text)
	s.n.note(func(o *Outcome) { o.Log = append(o.Log, line) })
}

// Hop is what handlers resolve addresses to, unless Config has another Resolver: all are
// reached through PeerMAC. As in a network, an address that is asked for the first time
// is ErrUnresolved; it is known once the method of the NIC has returned. The sender of a
// packet is known to its handler at once.
func Hop() spin.Hop {
	return spin.Hop{Source: HereAddr, SourceMAC: HereMAC, MAC: PeerMAC, MTU: 1500}
}

// neighbours resolves all IPv4 addresses that were asked for before.
type neighbours struct {
	mu    sync.Mutex
	known map[netip.Addr]bool // false: asked for, not answered yet
}

// Resolve implements spin.Resolver.
func (n *neighbours) Resolve(dst netip.Addr) (spin.Hop, error) {
	if !dst.Is4() {
		return spin.Hop{}, fmt.Errorf("resolve %v: not an IPv4 address", dst)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.known[dst] {
		n.known[dst] = false
		return spin.Hop{}, spin.ErrUnresolved
	}
	return Hop(), nil
}

// From implements spin.Resolver.
func (n *neighbours) From(src netip.Addr) (spin.Hop, bool) {
	hop := Hop()
	hop.Source, hop.MAC = src, [6]byte{}
	return hop, src == HereAddr
}

// answer makes all addresses known that were asked for.
func (n *neighbours) answer() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for a := range n.known {
		n.known[a] = true
	}
}
