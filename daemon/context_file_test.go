// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"testing"

	"github.com/xspin/xspin/control"
)

// What the daemon says of a document has its place in the file that it came from.
func TestProblemsOfDocumentsAreFoundInTheirFiles(t *testing.T) {
	f := launch(t, "limits: {window: 4MiB}\n")
	c, err := control.Dial(f.Socket())
	must(t, err)
	defer c.Close()
	for _, tc := range []struct{ name, text, want string }{
		{"rulesets in a block", "name: a\nhandler: deposit\nrulesets: |\n  # two\n  in: slmp\n  web: tcp(80000)\nhpus: '0-20'\n",
			"F:6:8: rulesets: port \"80000\": want a decimal number, 0 to 65535\nF:7:7: hpus: \"0-20\": want HPUs 0 to 1"},
		{"JSON", `{"name": "a", "handler": "deposit", "windows": [{"name": "w", "size": "5MiB"}]}`,
			"F:1:71: windows[0].size: a window of 5MiB is larger than the limit of 4MiB: raise limits.window"},
		{"what is missing", "# a context\nname: a\n", "F:2:1: handler: is missing: "},
		{"one line", "{name: a, handler: tick}", "F:1:1: params.to: handler tick: is missing"},
		{"what is no problem of the document", "{name: there, handler: echo-icmp}", `context "there" is there already`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.text == "{name: there, handler: echo-icmp}" {
				_, err := f.install(&control.Context{Name: "there", Handler: "echo-icmp"})
				must(t, err)
			}
			d, err := ParseContext("F", []byte(tc.text))
			must(t, err)
			_, err = c.Install(t.Context(), &d.Context)
			if err = d.Locate(err); err == nil || len(err.Error()) < len(tc.want) || err.Error()[:len(tc.want)] != tc.want {
				t.Errorf("got\n%v\nwant\n%s", err, tc.want)
			}
		})
	}
}
