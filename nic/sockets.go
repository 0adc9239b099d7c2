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
// of the kernel's udp_diag, is silent.
func (n *NIC) warnOfSockets(c *Context) {
	type service struct {
		six  bool // on IPv6
		port uint16
	}
	taken := map[service]*matcher.Ruleset{}
	for i := range c.spec.Rulesets {
		rs := &c.spec.Rulesets[i]
		port, ok := rs.UDPPort()
		et, _ := rs.EtherType()
		if s := (service{et == unix.ETH_P_IPV6, port}); ok && taken[s] == nil {
			taken[s] = rs
		}
	}
	if len(taken) == 0 || n.diag == nil {
		return
	}
	v4, _ := n.diag.SocketDiagUDP(unix.AF_INET)
	v6, _ := n.diag.SocketDiagUDP(unix.AF_INET6)
	var found []*netlink.Socket
	var by []*matcher.Ruleset
	for _, s := range slices.Concat(v4, v6) {
		a, _ := netip.AddrFromSlice(s.ID.Source)
		a = a.Unmap()
		// An IPv6 socket on no address has those of IPv4 too, as a rule.
		rs := taken[service{a.Is6(), s.ID.SourcePort}]
		if rs == nil && s.Family == unix.AF_INET6 && a.IsUnspecified() {
			rs = taken[service{false, s.ID.SourcePort}]
		}
		if rs == nil || s.ID.Interface != 0 && int(s.ID.Interface) != n.iface.Index {
			continue
		}
		// A socket on an address of another interface gets what comes there.
		if !a.IsUnspecified() && !slices.Contains(n.neigh.Local().Addrs, a) {
			continue
		}
		found, by = append(found, s), append(by, rs)
	}
	if len(found) == 0 {
		return
	}
	owners := socketOwners()
	for i, s := range found {
		a, _ := netip.AddrFromSlice(s.ID.Source)
		owner := owners[s.INode]
		if owner == "" {
			owner = "unknown"
		}
		n.cfg.Logger.Warn("a Linux socket uses the UDP port of a ruleset: it gets none of these packets while the context is active",
			"interface", n.iface.Name, "context", c.spec.Name, "ruleset", by[i].Name, "port", s.ID.SourcePort,
			"socket", netip.AddrPortFrom(a.Unmap(), s.ID.SourcePort), "uid", s.UID, "inode", s.INode, "program", owner)
	}
}

// socketOwners returns a program for each socket, by inode, as far as this process may see.
func socketOwners() map[uint32]string {
	owners := map[uint32]string{}
	fds, _ := filepath.Glob("/proc/[0-9]*/fd/[0-9]*")
	for _, fd := range fds {
		to, err := os.Readlink(fd)
		var inode uint32
		if err != nil {
			continue
		}
		if _, err := fmt.Sscanf(to, "socket:[%d]", &inode); err != nil {
			continue
		}
		pid := strings.Split(fd, "/")[2]
		if name, err := os.ReadFile("/proc/" + pid + "/comm"); err == nil {
			owners[inode] = fmt.Sprintf("%s (pid %s)", strings.TrimSpace(string(name)), pid)
		}
	}
	return owners
}
