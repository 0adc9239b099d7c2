// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrPrivilege is returned, wrapped, when the calling thread lacks a
// capability that namespaces and links need.
var ErrPrivilege = errors.New("missing privilege")

// checkPrivilege looks at the effective set of the calling thread and not at
// the user id: root in a container may lack what a service user was given.
func checkPrivilege(op string) error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return fmt.Errorf("%s: read capabilities: %w", op, err)
	}
	var missing []string
	for _, c := range []struct {
		bit  uint
		name string
	}{
		{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"}, // links, addresses
		{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN"}, // unshare, setns, mount
	} {
		if data[c.bit/32].Effective&(1<<(c.bit%32)) == 0 {
			missing = append(missing, c.name)
		}
	}
	if missing != nil {
		return fmt.Errorf("%s: %w: uid %d without %s: run it with sudo",
			op, ErrPrivilege, os.Geteuid(), strings.Join(missing, " and "))
	}
	return nil
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
