// SPDX-License-Identifier: Apache-2.0

//go:build !amd64

package clock

const hasCounter = false

func counter() int64 { return Monotonic() }
