// SPDX-License-Identifier: Apache-2.0

//go:build race

package hostq

func init() { raced = true }
