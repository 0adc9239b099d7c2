// SPDX-License-Identifier: Apache-2.0

package netns

var ParseSNMP = parseSNMP

// Check judges a config as Up does first.
func (c LabConfig) Check() error { return c.withDefaults().check() }

// DefaultQueues is the default of LabConfig.Queues.
var DefaultQueues = defaultQueues
