// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"strings"
	"testing"

	"github.com/xspin/xspin/control"
)

// A whole configuration is one mistake, and not one for each of its keys.
func TestConfigurationIsNoContext(t *testing.T) {
	for _, text := range []string{
		"kernel: administrators\ninterfaces:\n- {name: xs-nic, netns: xspin-nic}\ncontexts:\n- {name: ping, handler: echo-icmp}\n",
		"interfaces: [{name: xs-nic}]\n",
		"admins: {users: [5]}\ncontexts: []\n",
	} {
		_, err := ParseContext("x.yaml", []byte(text))
		if err == nil || !strings.HasPrefix(err.Error(), "x.yaml: this is a daemon's configuration, not a context's: ") || strings.Contains(err.Error(), "unknown key") {
			t.Errorf("%q: %v", text, err)
		}
	}
	if _, err := ParseContext("x.yaml", []byte("[contexts]")); err == nil || !strings.Contains(err.Error(), "want keys with values, found a list") {
		t.Errorf("a list: %v", err)
	}
}

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
