// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"io"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// parseFlags parses a line with the flags that bind adds.
func parseFlags(bind func(*pflag.FlagSet), line string) (*pflag.FlagSet, error) {
	fl := pflag.NewFlagSet("demo", pflag.ContinueOnError)
	bind(fl)
	return fl, fl.Parse(strings.Fields(line))
}

// A flagCase is a line that is taken, and one next to it that is not.
type flagCase struct{ good, bad, says string }

func checkFlags[C any](t *testing.T, parse func(line string) (C, error), cases []flagCase) {
	t.Helper()
	for _, tc := range cases {
		if _, err := parse(tc.good); err != nil {
			t.Errorf("%s: %v", tc.good, err)
		}
		if _, err := parse(tc.bad); err == nil || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: error %v, want %q", tc.bad, err, tc.says)
		}
	}
}

// refusedFirst sees a wrong flag found before anything is set up: without a lab and
// perhaps without root.
func refusedFirst(t *testing.T, cmd *cobra.Command, says string, args ...string) {
	t.Helper()
	cmd.SetArgs(args)
	cmd.SetOut(io.Discard)
	cmd.SetErr(io.Discard)
	if err := cmd.Execute(); err == nil || !strings.Contains(err.Error(), says) {
		t.Errorf("error %v, want %q", err, says)
	}
}
