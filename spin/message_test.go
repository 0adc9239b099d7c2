// SPDX-License-Identifier: Apache-2.0

package spin

import "testing"

func TestLackIsTrueWhateverIsKnown(t *testing.T) {
	for _, tt := range []struct {
		name            string
		missing, length uint64
		want            string
	}{
		{"some bytes are missing", 1000, 3000, "1000 of its first 3000 bytes are missing"},
		{"nothing is missing but the end", 0, 1000, "its first 1000 bytes are there, but its end has not come, or found no room to be told"},
		{"only an empty segment has come", 0, 0, "its end has not come, or found no room to be told"},
	} {
		if got := Lack(tt.missing, tt.length); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}
