// SPDX-License-Identifier: Apache-2.0

package hostq_test

import (
	"os"
	"testing"

	"github.com/xspin/xspin/hostq/hostqbench"
)

func TestMain(m *testing.M) {
	hostqbench.Main()
	os.Exit(m.Run())
}
