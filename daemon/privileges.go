// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"os/user"
	"strconv"

	"github.com/xspin/xspin/internal/capability"
)

// needed are the capabilities that a daemon needs when it has opened its NICs. Network
// namespaces (CAP_SYS_ADMIN), programs (CAP_PERFMON), AF_XDP sockets (CAP_NET_RAW) and
// frame memory (CAP_IPC_LOCK) are of the start; what has been opened then stays open.
var needed = []capability.Cap{
	capability.BPF,      // to make memory that is shared, and matching tables
	capability.NetAdmin, // to have the kernel ask for neighbours
}

// dropPrivileges gives up what the daemon does not need any more.
func (d *Daemon) dropPrivileges() error {
	if d.opts.KeepPrivileges {
		return nil
	}
	uid, gid := -1, -1
	if name := d.cfg.User; name != "" {
		u, err := lookupAccount(name)
		if err != nil {
			return err
		}
		uid, _ = strconv.Atoi(u.Uid)
		gid, _ = strconv.Atoi(u.Gid)
	}
	err := capability.Drop(uid, gid, needed...)
	if errors.Is(err, capability.ErrThreads) {
		if uid >= 0 {
			return fmt.Errorf("become user %s: %w", d.cfg.User, err)
		}
		d.logger.Warn("privileges that are not needed any more are kept", "error", err)
		return nil
	}
	if err != nil {
		return fmt.Errorf("give up privileges that are not needed any more: %w", err)
	}
	return nil
}

// lookupAccount finds a user by name or number.
func lookupAccount(name string) (*user.User, error) {
	u, err := user.Lookup(name)
	if err != nil {
		var byNumber error
		if u, byNumber = user.LookupId(name); byNumber != nil {
			return nil, fmt.Errorf("%q: there is no such user", name)
		}
	}
	return u, nil
}
