// SPDX-License-Identifier: Apache-2.0

package daemon

import "errors"

// Reload reads the file again and does what has changed: all of it, or nothing.
func (d *Daemon) Reload() (changes []string, err error) { return nil, errors.New("not yet") }
