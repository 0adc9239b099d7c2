// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"log/slog"
	"time"

	systemd "github.com/coreos/go-systemd/v22/daemon"

	"github.com/xspin/xspin/internal/clock"
)

// The service manager hears what the daemon is doing, if it has asked for that with
// NOTIFY_SOCKET: see sd_notify(3).

func notifyReady(log *slog.Logger)    { notify(log, systemd.SdNotifyReady) }
func notifyStopping(log *slog.Logger) { notify(log, systemd.SdNotifyStopping) }

// notifyReloading says also when, so that the service manager can tell reloads apart.
func notifyReloading(log *slog.Logger) {
	notify(log, fmt.Sprintf("%s\nMONOTONIC_USEC=%d", systemd.SdNotifyReloading, clock.Monotonic()/int64(time.Microsecond)))
}

func notify(log *slog.Logger, state string) {
	if _, err := systemd.SdNotify(false, state); err != nil {
		log.Warn("the service manager cannot be told", "state", state, "error", err)
	}
}
