// SPDX-License-Identifier: Apache-2.0

package netns

import "github.com/xspin/xspin/internal/capability"

// ErrPrivilege is returned, wrapped, when the process lacks a capability that
// namespaces and links need.
var ErrPrivilege = capability.ErrMissing

// checkPrivilege asks for what links and addresses need, and what unshare, setns
// and mount need.
func checkPrivilege(op string) error {
	return capability.Need(op, capability.NetAdmin, capability.SysAdmin)
}

// Probe tells why a lab cannot be built here, nil when it can. It creates a
// network namespace that nobody else sees and drops it again.
func Probe() error {
	if err := checkPrivilege("probe"); err != nil {
		return err
	}
	ns, err := create("probe")
	if err != nil {
		return err
	}
	return ns.Close()
}
