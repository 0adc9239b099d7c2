// SPDX-License-Identifier: Apache-2.0

//go:build !race

package testenv

// Race says that the race detector watches: everything takes ten times as long.
const Race = false
