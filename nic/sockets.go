// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/matcher"
)

// warnOfSockets tells of UDP sockets of Linux to which a ruleset of the context leaves
// nothing, where its rules say plainly which port it takes. Whoever cannot look, for want
// of the kernel's udp_diag, says nothing.
func (n *NIC) warnOfSockets(c *Context) {
	ports := map[uint16]*matcher.Ruleset{}
	for i := range c.spec.Rulesets {
		if port, ok := c.spec.Rulesets[i].UDPPort(); ok && ports[port] == nil {
			ports[port] = &c.spec.Rulesets[i]
		}
	}
	if len(ports) == 0 {
		return
	}
	v4, _ := n.diag.SocketDiagUDP(unix.AF_INET)
	v6, _ := n.diag.SocketDiagUDP(unix.AF_INET6)
	for _, s := range slices.Concat(v4, v6) {
		rs := ports[s.ID.SourcePort]
		if rs == nil || s.ID.Interface != 0 && int(s.ID.Interface) != n.iface.Index {
			continue
		}
		// A socket on an address of another interface gets what comes there.
		a, _ := netip.AddrFromSlice(s.ID.Source)
		if a = a.Unmap(); !a.IsUnspecified() && !slices.Contains(n.neigh.Local().Addrs, a) {
			continue
		}
		n.cfg.Logger.Warn("a socket of Linux is on the UDP port that a ruleset matches: it gets none of these packets while the context is active",
			"interface", n.iface.Name, "context", c.spec.Name, "ruleset", rs.Name, "port", s.ID.SourcePort,
			"socket", netip.AddrPortFrom(a, s.ID.SourcePort), "uid", s.UID, "inode", s.INode, "program", ownerOf(s.INode))
	}
}

// ownerOf returns a program that has a socket, as far as this process may see.
func ownerOf(inode uint32) string {
	want := fmt.Sprintf("socket:[%d]", inode)
	fds, _ := filepath.Glob("/proc/[0-9]*/fd/[0-9]*")
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err != nil || to != want {
			continue
		}
		pid := strings.Split(fd, "/")[2]
		name, err := os.ReadFile("/proc/" + pid + "/comm")
		if err != nil {
			continue // it has ended
		}
		return fmt.Sprintf("%s (pid %s)", strings.TrimSpace(string(name)), pid)
	}
	return "unknown"
}

// openDiag opens what warnOfSockets asks, in the network namespace of the calling thread.
func openDiag() (*netlink.Handle, error) {
	h, err := netlink.NewHandle(unix.NETLINK_INET_DIAG)
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	return h, nil
}
