// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package capability

import (
	"errors"
	_ "runtime/cgo" // there is C in the process, whoever else brings it
	"testing"
)

func TestDropRefusesWithCgo(t *testing.T) {
	if err := Drop(-1, -1); !errors.Is(err, ErrThreads) {
		t.Errorf("error %v, want %v", err, ErrThreads)
	}
}
