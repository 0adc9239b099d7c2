// SPDX-License-Identifier: Apache-2.0

package hostqbench_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/xspin/xspin/eval/hostqbench"
)

func TestMain(m *testing.M) {
	if ok, err := hostqbench.Main(os.Args[1:]); ok {
		if err != nil {
			fmt.Fprintln(os.Stderr, "hostqbench:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}
