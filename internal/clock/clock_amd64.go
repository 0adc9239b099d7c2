// SPDX-License-Identifier: Apache-2.0

package clock

const hasCounter = true

// counter reads the time stamp counter. It is not ordered against the loads and
// stores around it: good for durations of tens of nanoseconds and more.
func counter() int64
