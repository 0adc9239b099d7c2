// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"io"
	"strings"
	"testing"
)

// What people have stumbled over.
func TestHelpSays(t *testing.T) {
	for args, want := range map[string][]string{
		"run":          {"CONFIG is /etc/xspin/xspin.yaml if left out", "not the file of --config (default /etc/xspin.yaml)", "values for the flags", "A window may have 4GiB, and all memory of contexts together 8GiB, unless limits: "},
		"ctx activate": {"stopped, because a handler ran past its time limit, or has failed, starts over"},
		"mem":          {"when its application detaches", "what was written is lost"},
		"mem write":    {"lost when the context starts over, as it does when its application detaches"},
	} {
		var out bytes.Buffer
		if err := xspin(t.Context(), nil, &out, io.Discard, append(strings.Fields(args), "--help")...); err != nil {
			t.Fatal(err)
		}
		text := strings.Join(strings.Fields(out.String()), " ")
		for _, s := range want {
			if !strings.Contains(text, s) {
				t.Errorf("xspin %s --help does not say %q", args, s)
			}
		}
	}
}
