// SPDX-License-Identifier: Apache-2.0

package hostq_test

import (
	"os"
	"testing"

	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hostq/hostqbench"
)

func TestMain(m *testing.M) {
	hostqbench.Main()
	hostq.PlayRole()
	os.Exit(m.Run())
}
