// SPDX-License-Identifier: Apache-2.0

package hostq_test

import (
	"os"
	"testing"

	"github.com/xspin/xspin/hostq"
)

func TestMain(m *testing.M) {
	hostq.PlayRole()
	os.Exit(m.Run())
}
