// SPDX-License-Identifier: Apache-2.0

package netns

import "github.com/xspin/xspin/internal/capability"

// ErrPrivilege is returned, wrapped, when the process lacks a capability that
// namespaces and links need.
var ErrPrivilege = capability.ErrMissing

// checkPrivilege returns an error unless the process has the capabilities for links and
// addresses (CAP_NET_ADMIN), and for unshare, setns and mount (CAP_SYS_ADMIN).
func checkPrivilege(op string) error {
	return capability.Need(op, capability.NetAdmin, capability.SysAdmin)
}

// Probe returns the reason why a lab cannot be built here, or nil. It creates an
// unnamed network namespace and closes it.
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
