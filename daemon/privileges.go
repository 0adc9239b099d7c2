// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/xspin/xspin/internal/capability"
)

// needed are the capabilities that a daemon needs when it has opened its NICs. Network
// namespaces (CAP_SYS_ADMIN), the programs of both hooks (CAP_PERFMON), AF_XDP sockets
// (CAP_NET_RAW) and frame memory (CAP_IPC_LOCK) are of the start; what has been opened then
// stays open.
var needed = []capability.Cap{
	capability.BPF,      // to make memory that is shared, and matching tables
	capability.NetAdmin, // to have the kernel ask for neighbours, and to attach programs
}

// neededInKernel is needed, too, if contexts may have handlers in eBPF: they begin anew,
// and their programs with them.
const neededInKernel = capability.Perfmon

// dropPrivileges gives up what the daemon does not need any more.
func (d *Daemon) dropPrivileges() error {
	if d.opts.KeepPrivileges {
		return nil
	}
	for _, c := range d.devices {
		if err := c.nic.PrepareHooks(); err != nil {
			return err
		}
	}
	uid, gid := -1, -1
	if name := d.cfg.User; name != "" {
		u, err := lookupAccount(name)
		if err != nil {
			return err
		}
		uid, _ = strconv.Atoi(u.Uid)
		gid, _ = strconv.Atoi(u.Gid)
		if err := makeLogDir(d.cfg.Log.Dir, uid, gid); err != nil {
			return err
		}
	}
	keep := slices.Clone(needed)
	if d.cfg.Kernel == kernelAdmins {
		keep = append(keep, neededInKernel)
	}
	err := capability.Drop(uid, gid, keep...)
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

// makeLogDir makes the directory for log files, if it is not there, for a user who could
// not. One that is there is left as it is.
func makeLogDir(dir string, uid, gid int) error {
	if dir == "" {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return fmt.Errorf("log.dir: %w", err)
	}
	err := os.Mkdir(dir, 0o750)
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	if err == nil {
		err = os.Lchown(dir, uid, gid)
	}
	if err != nil {
		return fmt.Errorf("log.dir: %w", err)
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
