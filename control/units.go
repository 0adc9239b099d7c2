// SPDX-License-Identifier: Apache-2.0

package control

import "time"

// Duration is a time.Duration that JSON and YAML write as "10s".
type Duration time.Duration

// Size is a number of bytes that JSON and YAML write as "64MiB", or as a number.
type Size int64
