// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"errors"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// What is wrong with a context is told in the same words by `xspin run --check`, by the
// daemon and by a NIC.
func TestWrongContextsAreToldAlike(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	var n *nic.NIC
	err := lab.NIC.NS.Do(func() (err error) {
		n, err = nic.Open(nic.Config{Interface: lab.NIC.Device, HPUs: 2})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	d := startDaemon(t, "")
	client, err := control.Dial(d.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()

	window, err := hostq.WindowOn(make([]byte, 64), spin.All)
	if err != nil {
		t.Fatal(err)
	}
	done := func(*hpu.HER) spin.Code { return spin.Success }
	at7 := matcher.UDPPort(7)
	slmp := matcher.SLMP()
	tick := func(*hpu.Task) spin.Code { return spin.Success }
	for _, tc := range []struct {
		name string
		doc  string // JSON, which is YAML as well; less what is the same in all
		spec nic.ContextSpec
		want []string
	}{
		{"name", `"name": "", "rulesets": "a: udp(7)"`,
			nic.ContextSpec{Name: "-", Rulesets: []matcher.Ruleset{at7}},
			[]string{"name: a context needs a name"}},
		{"rulesets: none", `"rulesets": "# none"`,
			nic.ContextSpec{},
			[]string{"rulesets: no packet would ever match: give rulesets, or triggered: true for a host-activated context"}},
		{"rulesets: two formats", `"rulesets": "a: slmp\nb: udp(7)"`,
			nic.ContextSpec{Rulesets: []matcher.Ruleset{named("a", slmp), named("b", at7)}},
			[]string{`format: rulesets a and b have different message formats, "slmp" and "": name one`}},
		{"first", `"rulesets": "a: udp(7)\nb: udp(7)", "first": 255`,
			nic.ContextSpec{Rulesets: []matcher.Ruleset{at7, at7}, First: 255},
			[]string{"first: ruleset numbers 255 to 256: want 0 to 255"}},
		{"numbers", `"rulesets": "a: udp(7)", "share": 1001, "credits": 32769, "messages": -5`,
			nic.ContextSpec{Rulesets: []matcher.Ruleset{at7}, Share: 1001, Credits: 32769, Messages: -5},
			[]string{"credits: 32769: want 1 to 32768", "messages: -5: want 1 to 262144", "share: 1001: want 1 to 1000"}},
		{"HPUs", `"rulesets": "a: udp(7)", "hpus": "0-5,7"`,
			nic.ContextSpec{Rulesets: []matcher.Ruleset{at7}, CoreMask: 0xbf},
			[]string{`hpus: "0-5,7": want HPUs 0 to 1`}},
		{"blocked-rr", `"rulesets": "a: udp(7)", "policy": "blocked-rr", "vhpus": 65536`,
			nic.ContextSpec{Rulesets: []matcher.Ruleset{at7}, Policy: nic.BlockedRR, VHPUs: 65536},
			[]string{"policy: blocked-rr needs a message format with offsets, and packet has none", "sequence: blocked-rr needs the bytes of a sequence", "vhpus: blocked-rr with 65536 virtual HPUs: want 1 to 65535"}},
		{"a sequence without blocked-rr", `"rulesets": "a: slmp", "sequence": 1`,
			nic.ContextSpec{Rulesets: []matcher.Ruleset{slmp}, Sequence: 1},
			[]string{"policy: sequence and vhpus go with blocked-rr"}},
		{"timer without a handler", `"rulesets": "a: udp(7)", "timer": "1s"`,
			nic.ContextSpec{Rulesets: []matcher.Ruleset{at7}, Resources: hpu.Resources{Timer: time.Second}},
			[]string{"timer: 1s: the handlers have no timer handler"}},
		{"timer too fast", `"handler": "tick", "params": {"to": "10.0.0.1:7"}, "rulesets": "a: udp(7)", "timer": "1us"`,
			nic.ContextSpec{Rulesets: []matcher.Ruleset{at7}, Handlers: hpu.Handlers{Payload: done, Timer: tick}, Resources: hpu.Resources{Timer: time.Microsecond}},
			[]string{"timer: 1µs: at least 1ms"}},
		{"windows without messages", `"handler": "datatype", "params": {"type": "int"}, "rulesets": "a: udp(7)", "windows": [{"name": "in", "size": 4096}]`,
			nic.ContextSpec{Rulesets: []matcher.Ruleset{at7}, Window: window},
			[]string{"handler: messages are put into windows, and format packet has none that begin and end, as those of slmp do"}},
		{"no payload handler", `"handler": "deposit", "rulesets": "a: udp(7)"`,
			nic.ContextSpec{Rulesets: []matcher.Ruleset{at7}, Handlers: hpu.Handlers{Init: func(*hpu.Task) error { return nil }}},
			[]string{"handler: there is no payload handler, and format packet has packets only"}},
		{"triggered", `"triggered": true, "rulesets": "a: udp(7)", "first": 3, "format": "slmp", "policy": "blocked-rr", "sequence": 1, "vhpus": 1, "credits": 8, "overload": "stack"`,
			nic.ContextSpec{HostActivated: true, Rulesets: []matcher.Ruleset{at7}, First: 3, Format: matcher.FormatByName("slmp"), Policy: nic.BlockedRR, Sequence: 1, VHPUs: 1, Credits: 8, Overload: nic.OverloadSpills},
			[]string{
				"credits: a triggered context has none: no packets come",
				"first: a triggered context has no rulesets to number",
				"format: a triggered context has none, nor a protocol: its messages are not packets",
				"overload: a triggered context has none: no packets come",
				"policy: blocked-rr schedules packets, and a triggered context has none",
				"rulesets: a triggered context has none: the host activates it"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			text := tc.doc
			if !strings.Contains(text, `"name"`) || strings.Contains(text, `"windows"`) {
				text = `"name": "x", ` + text
			}
			if !strings.Contains(text, `"handler"`) {
				text += `, "handler": "count"`
			}
			text = "{" + text + "}"
			told := func(who string, err error, lines []string) {
				t.Helper()
				slices.Sort(lines)
				if !slices.Equal(lines, tc.want) {
					t.Errorf("%s says\n%v\nwant\n%s", who, err, strings.Join(tc.want, "\n"))
				}
			}

			file := writeFile(t, "x.yaml", []byte("interfaces: [{name: eth1, hpus: 2}]\ncontexts:\n- "+text+"\n"))
			_, err := runCheck(t, file, "--check")
			told("run --check", err, partsOf(err, `(?m)^(?:run: )?.*?:\d+:\d+: contexts\[0\]\.(.*)$`))

			doc := new(control.Context)
			if err := json.Unmarshal([]byte(text), doc); err != nil {
				t.Fatal(err)
			}
			_, err = client.Install(t.Context(), doc)
			told("the daemon", err, partsOf(err, `(?m)^(.*)$`))

			spec := tc.spec
			switch spec.Name {
			case "":
				spec.Name = "x"
			case "-":
				spec.Name = ""
			}
			if h := &spec.Handlers; h.Payload == nil && h.Init == nil {
				h.Payload = done
			}
			_, err = n.Install(spec)
			var wrong spin.Problems
			errors.As(err, &wrong)
			var lines []string
			for _, p := range wrong {
				lines = append(lines, p.Error())
			}
			told("the NIC", err, lines)
		})
	}
}

func named(name string, r matcher.Ruleset) matcher.Ruleset {
	r.Name = name
	return r
}

// partsOf returns the parts of an error's text that a pattern has in parentheses.
func partsOf(err error, pattern string) (all []string) {
	if err == nil {
		return nil
	}
	for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(err.Error(), -1) {
		all = append(all, m[1])
	}
	return all
}
