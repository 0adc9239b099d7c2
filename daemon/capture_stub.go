// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"io"

	"github.com/xspin/xspin/control"
)

func (d *Daemon) capture(ctx context.Context, name string, o control.CaptureOptions, w io.Writer) error {
	return failf(errInvalid, "not yet")
}
