// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// What the commands tell of a context in the kernel, beside one that HPUs run.
func TestContextsOfTheKernelAreTold(t *testing.T) {
	d := startDaemon(t, `kernel: administrators
contexts:
  - {name: ping, tier: kernel, handler: echo-icmp}
  - {name: echo, handler: echo-udp}
`)
	var out, diag bytes.Buffer
	run := func(args ...string) error {
		out.Reset()
		diag.Reset()
		return xspin(t.Context(), nil, &out, &diag, args...)
	}
	if err := run("ctx", "ls", "--socket", d.socket); err != nil {
		t.Fatal(err)
	}
	tiers, hooks := map[string]string{}, map[string]string{}
	for line := range strings.Lines(out.String()) {
		f := strings.Fields(line)
		tiers[f[0]], hooks[f[0]] = f[3], f[4]
	}
	if tiers["NAME"] != "TIER" || tiers["ping"] != "kernel" || tiers["echo"] != "user" || hooks["NAME"] != "HOOK" || hooks["ping"] != "tc" || hooks["echo"] != "xdp" {
		t.Errorf("the tiers are %v, the hooks %v in\n%s", tiers, hooks, &out)
	}

	if err := run("stats", "--json", "--socket", d.socket); err != nil {
		t.Fatal(err)
	}
	var doc struct {
		NICs []struct{ Contexts []map[string]any }
	}
	if err := json.Unmarshal(out.Bytes(), &doc); err != nil {
		t.Fatal(err)
	}
	if len(doc.NICs) != 1 || len(doc.NICs[0].Contexts) != 2 {
		t.Fatalf("%+v", doc)
	}
	for _, c := range doc.NICs[0].Contexts {
		for _, key := range []string{"refused", "spilled", "share", "credits", "granted", "in_flight", "stopped"} {
			if _, is := c[key]; is != (c["name"] == "echo") {
				t.Errorf("context %v, of tier %v: key %s is %v", c["name"], c["tier"], key, c[key])
			}
		}
		if c["handled"] == nil || c["rulesets"] == nil || c["active"] != true {
			t.Errorf("not all is told of %v", c)
		}
	}

	file := filepath.Join(t.TempDir(), "x.pcapng")
	for _, to := range []string{file, "-"} {
		err := run("capture", "ping", "-w", to, "--socket", d.socket)
		if err == nil || !strings.Contains(err.Error(), `context "ping" is in the kernel`) {
			t.Errorf("capture: %v", err)
		}
		if all := slices.Concat(out.Bytes(), diag.Bytes()); len(all) > 0 {
			t.Errorf("capture to %s says %q before it refuses", to, all)
		}
	}
	if _, err := os.Stat(file); err == nil {
		t.Error("a capture that is refused leaves a file")
	}
}
