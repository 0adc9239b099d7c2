// SPDX-License-Identifier: Apache-2.0

package eval

import "testing"

func TestBenchKernelFlags(t *testing.T) {
	judged(t, kernelFlags, map[string]string{
		"":                           "",
		"--only messages":            "",
		"--only echo --size 1MiB":    "",
		"--only files":               "--only files: want packets, echo, messages, tc",
		"--size 1000":                "--size 1000: want 1MiB to 256MiB",
		"--size 1GiB":                "--size 1GiB: want 1MiB to 256MiB",
		"--size 1 --only everything": "--only everything: want packets",
	})
}
