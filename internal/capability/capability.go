// SPDX-License-Identifier: Apache-2.0

// Package capability tells whether the process may do what XsPIN is about to
// do, before it does any of it.
package capability

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrMissing is wrapped by the errors of Need.
var ErrMissing = errors.New("missing capability")

// A Cap is a Linux capability, see capabilities(7).
type Cap int

// The capabilities that parts of XsPIN need.
const (
	NetAdmin Cap = unix.CAP_NET_ADMIN // attach XDP programs, make interfaces
	NetRaw   Cap = unix.CAP_NET_RAW   // AF_XDP and raw sockets
	SysAdmin Cap = unix.CAP_SYS_ADMIN // make network namespaces
	BPF      Cap = unix.CAP_BPF       // load eBPF programs
	Perfmon  Cap = unix.CAP_PERFMON   // load eBPF programs that compute with pointers
	IPCLock  Cap = unix.CAP_IPC_LOCK  // pin frame memory beyond the limit
)

var names = map[Cap]string{
	NetAdmin: "CAP_NET_ADMIN", NetRaw: "CAP_NET_RAW", SysAdmin: "CAP_SYS_ADMIN",
	BPF: "CAP_BPF", Perfmon: "CAP_PERFMON", IPCLock: "CAP_IPC_LOCK",
}

func (c Cap) String() string { return names[c] }

// Need returns nil if the process has all of caps in effect, and otherwise an
// error that names the missing ones and what they are wanted for.
func Need(what string, caps ...Cap) error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return fmt.Errorf("capget: %w", err)
	}
	have := uint64(data[1].Effective)<<32 | uint64(data[0].Effective)
	// CAP_SYS_ADMIN stands for the younger CAP_BPF and CAP_PERFMON.
	if have>>SysAdmin&1 == 1 {
		have |= 1<<BPF | 1<<Perfmon
	}
	var missing []string
	for _, c := range caps {
		if have>>c&1 == 0 {
			missing = append(missing, c.String())
		}
	}
	if missing == nil {
		return nil
	}
	return fmt.Errorf("%s: %w %s: run it as root (sudo), or give the binary these with setcap", what, ErrMissing, strings.Join(missing, ", "))
}
