// SPDX-License-Identifier: Apache-2.0

package testenv

import "testing"

func TestNeedTime(t *testing.T) {
	for value, want := range map[string]bool{"": false, "0": false, "1": true} {
		t.Setenv("XSPIN_EMULATED", value)
		var skipped bool
		t.Run("asks", func(t *testing.T) {
			defer func() { skipped = t.Skipped() }()
			NeedTime(t)
		})
		if skipped != want {
			t.Errorf("XSPIN_EMULATED=%q: skipped %v", value, skipped)
		}
	}
}
