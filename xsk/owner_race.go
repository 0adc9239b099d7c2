// SPDX-License-Identifier: Apache-2.0

//go:build race

package xsk

// raceEnabled turns on the record of who owns each frame.
const raceEnabled = true
