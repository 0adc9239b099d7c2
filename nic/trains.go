// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"fmt"
	"time"
)

// trainLook is how often a NIC looks whether packets came several in one, where they may.
const trainLook = time.Second

// watchTrains tells of packets that came several in one and went to Linux, and what to do
// about it: once, as senders that find nobody there are many.
func (n *NIC) watchTrains() {
	tick := time.NewTicker(trainLook)
	defer tick.Stop()
	for {
		select {
		case <-n.done:
			return
		case <-tick.C:
		}
		if n.toldOfTrains() {
			return
		}
	}
}

func (n *NIC) toldOfTrains() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return true
	}
	prog, err := n.ingress.Stats()
	if err != nil || prog.Trains == 0 {
		return false
	}
	n.cfg.Logger.Warn(fmt.Sprintf("several packets came in one, and went to Linux: have handlers in eBPF at hook tc, or the sender's device cut them, `ethtool -K DEVICE tx-udp-segmentation off`, or this one not join them, `ethtool -K %s gro off`", n.iface.Name),
		"interface", n.iface.Name, "trains", prog.Trains)
	return true
}
