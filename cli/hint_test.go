// SPDX-License-Identifier: Apache-2.0

package cli

import "testing"

func TestHintsCanBePasted(t *testing.T) {
	const message = "no lab: run `xspin lab up`, or `sudo xspin run`; xspin is not a command"
	for _, tc := range []struct {
		caller
		line, message string
	}{
		{caller{name: "xspin"}, "xspin ctx ls", message},
		{caller{name: "xspin", root: true, sudo: true}, "sudo xspin ctx ls", "no lab: run `sudo xspin lab up`, or `sudo xspin run`; xspin is not a command"},
		{caller{name: "xspin", root: true}, "xspin ctx ls", "no lab: run `xspin lab up`, or `xspin run`; xspin is not a command"},
		{caller{name: "bin/xspin", root: true}, "bin/xspin ctx ls", "no lab: run `bin/xspin lab up`, or `bin/xspin run`; xspin is not a command"},
		{caller{name: "../my", root: true, sudo: true}, "sudo ../my ctx ls", "no lab: run `sudo ../my lab up`, or `sudo ../my run`; xspin is not a command"},
		{caller{name: "./xspin"}, "./xspin ctx ls", "no lab: run `./xspin lab up`, or `sudo ./xspin run`; xspin is not a command"},
	} {
		if got := tc.caller.line("ctx ls"); got != tc.line {
			t.Errorf("%+v: %q, want %q", tc.caller, got, tc.line)
		}
		if got := tc.rewrite(message); got != tc.message {
			t.Errorf("%+v: %q, want %q", tc.caller, got, tc.message)
		}
	}
}
