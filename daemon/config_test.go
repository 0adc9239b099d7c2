// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"encoding"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
)

// load loads a configuration with this text. In the error the file is called F.
func load(t *testing.T, text string) (*Config, string) {
	t.Helper()
	file := writeFile(t, filepath.Join(t.TempDir(), "x.yaml"), text)
	cfg, err := Load(file)
	if err == nil {
		return cfg, ""
	}
	return nil, strings.ReplaceAll(err.Error(), file, "F")
}

const eth = "interfaces: [{name: eth1}]\n"

// datatype is a context with such parameters.
func datatype(params string) string {
	return "contexts:\n- name: a\n  handler: datatype\n  params:\n    " + params + "\n  windows: [{name: in, size: 64KiB}]\n"
}

func TestErrorsOfConfigurationsAreToldWithTheirPlaces(t *testing.T) {
	t.Setenv("XSPIN_RUN_SOCKET", "") // as if it were not there
	for _, tc := range []struct{ name, text, want string }{
		{"nothing", "", `F: interfaces: there is none: name at least one, such as "- name: eth1"`},
		{"a comment", "# nothing\n", `F: interfaces: there is none: name at least one, such as "- name: eth1"`},
		{"not YAML", "interfaces: [\nx", "F:2:1: did not find expected ',' or ']'"},
		{"a tab further down", "interfaces:\n- name: x\n \thpus: 3\n", "F:3:2: found a tab character that violates indentation"},
		{"a tab", "interfaces:\n\t- name: eth1\n", "F:2:1: found character that cannot start any token"},
		{"two documents", eth + "---\n" + eth, "F: unexpected second document, after ---"},
		{"a list", "- eth1\n", "F:1:1: want keys with values, found a list\n" +
			`F:1:1: interfaces: there is none: name at least one, such as "- name: eth1"`},
		{"no value", eth + "socket:\n", "F:2:8: socket: has no value"},
		{"typo", eth + "contxts: []\n", `F:2:1: unknown key "contxts": is it contexts?`},
		{"typo in letters", eth + "Contexts: []\n", `F:2:1: unknown key "Contexts": is it contexts?`},
		{"nothing like it", eth + "frobnicate: 1\n", `F:2:1: unknown key "frobnicate": want admins, contexts, interfaces, kernel, limits, log, metrics, socket, user, windows`},
		{"typo below", "interfaces:\n- name: eth1\n  hpu: 3\n", `F:3:3: interfaces[0]: unknown key "hpu": is it hpus?`},
		{"twice", eth + "socket: /a\nsocket: /b\n", "F:3:1: socket: appears twice, first on line 2"},
		{"size", eth + "limits: {memory: 64MB}\n", `F:2:18: limits.memory: size "64MB": want a whole number of bytes, or one with KiB, MiB or GiB, such as "64MiB"`},
		{"negative size", eth + "limits: {memory: -1}\n", `F:2:18: limits.memory: size "-1": want a whole number of bytes, or one with KiB, MiB or GiB, such as "64MiB"`},
		{"duration", "interfaces:\n- name: eth1\n  limit: 3\n", `F:3:10: interfaces[0].limit: duration "3": want a number with a unit, such as "10s", "1.5s", "200ms" or "1m30s"`},
		{"number", "interfaces: [{name: eth1, hpus: many}]\n", `F:1:33: interfaces[0].hpus: "many" is not a whole number`},
		{"bool for a name", "interfaces: [{name: true}]\n", "F:1:21: interfaces[0].name: true is not text: put it in quotes if it is meant as a name"},
		{"a list for a name", "interfaces: [{name: [a]}]\n", "F:1:21: interfaces[0].name: want a single value, found a list"},
		{"alias of itself", "interfaces: &a\n- *a\n", "F:1:13: interfaces[0]: want keys with values, found a list"},

		{"socket", eth + "socket: run/x\n", `F:2:9: socket: "run/x": want an absolute path`},
		{"abstract socket", eth + "socket: '@xspin'\n", `F:2:9: socket: "@xspin": abstract sockets have no owner and no mode: want an absolute path`},
		{"metrics", eth + "metrics: 9465\n", `F:2:10: metrics: "9465": want an address and port, such as "127.0.0.1:9465" or "[::1]:9465"`},
		{"metrics port", eth + "metrics: :prom\n", `F:2:10: metrics: ":prom": the port is a number up to 65535`},
		{"user", eth + "user: nobody-at-all\n", `F:2:7: user: "nobody-at-all": there is no such user`},
		{"admins", eth + "admins: {users: [0, me-not], groups: [no-group]}\n",
			"F:2:21: admins.users[1]: \"me-not\": there is no such user\nF:2:39: admins.groups[0]: \"no-group\": there is no such group"},
		{"log", eth + "log: {lines: -1, dir: here}\n", "F:2:14: log.lines: -1: want 1 to 1048576\nF:2:23: log.dir: \"here\": want an absolute path"},

		{"interface", "interfaces:\n- {name: a/b, mode: fast, wait: never, hpus: 65, ring: 100, cpus: [-1], netns: ..}\n", strings.Join([]string{
			`F:2:10: interfaces[0].name: "a/b" is not an interface name: want 1 to 15 characters, without spaces and /`,
			`F:2:21: interfaces[0].mode: "fast": want auto, generic, native`,
			`F:2:33: interfaces[0].wait: "never": want adaptive, sleep, spin`,
			`F:2:46: interfaces[0].hpus: 65: want 1 to 64`,
			`F:2:56: interfaces[0].ring: 100: want a power of two, 64 to 32768`,
			`F:2:68: interfaces[0].cpus[0]: -1 is not a CPU number`,
			`F:2:80: interfaces[0].netns: ".." is not the name of a network namespace: see ip netns list`,
		}, "\n")},
		{"hook", "interfaces: [{name: eth1, hook: bpf, order: middle}]\n", "F:1:33: interfaces[0].hook: \"bpf\": want auto, tc, xdp\nF:1:45: interfaces[0].order: \"middle\": want first, last"},
		{"more workers than HPUs", "interfaces: [{name: eth1, hpus: 2, workers: 3}]\n", "F:1:45: interfaces[0].workers: 3: want 1 to 2"},
		{"interface twice", "interfaces: [{name: eth1}, {name: eth1}]\n", "F:1:35: interfaces[1].name: interface eth1 is there already"},

		{"window", eth + "windows:\n- {name: a, size: 5GiB}\n- {name: a}\n- {size: 1KiB, rights: r}\n", strings.Join([]string{
			"F:3:19: windows[0].size: a window of 5GiB is larger than the limit of 4GiB: raise limits.window",
			"F:4:3: windows[1].size: a window needs a size",
			`F:4:10: windows[1].name: window "a" is there already: windows[0].name`,
			"F:5:3: windows[2].name: a window needs a name",
			"F:5:3: windows[2]: rights and app go with the contexts that use the window",
		}, "\n")},

		{"handler", eth + "contexts:\n- {name: a, handler: deposti}\n", `F:3:22: contexts[0].handler: no handler "deposti": is it deposit?`},
		{"no window", eth + "contexts:\n- {name: a, handler: deposit}\n",
			`F:3:3: contexts[0].windows: handler deposit: no window: messages would be acknowledged and thrown away; add one, such as "windows: [{name: in, size: 64MiB}]"`},
		{"no handler", eth + "contexts:\n- {name: a}\n", `F:3:3: contexts[0].handler: is missing: `},
		{"name", eth + "contexts:\n- {name: a/b, handler: echo-udp}\n- {name: x, handler: echo-icmp}\n- {name: x, handler: echo-icmp}\n",
			"F:3:10: contexts[0].name: \"a/b\": names have up to 63 of the characters A-Z a-z 0-9 . _ -, and do not begin with . or -\n" +
				"F:5:10: contexts[2].name: context \"x\" is there already: contexts[1].name"},
		{"params", eth + "contexts:\n- name: a\n  handler: echo-udp\n  params: {prot: 8}\n", `F:5:18: contexts[0].params.prot: handler echo-udp: no such parameter: want port (whole number, 0 to 65535)`},
		{"params twice", eth + "contexts:\n- name: a\n  handler: echo-udp\n  params: {port: 8, port: 9}\n",
			`F:5:21: contexts[0].params.port: appears twice, first on line 5`},
		{"interface of a context", eth + "contexts: [{name: a, handler: deposit, interface: eth2}]\n", `F:2:51: contexts[0].interface: no interface "eth2": want eth1`},
		{"which interface", "interfaces: [{name: eth1}, {name: eth2}]\ncontexts: [{name: a, handler: deposit}]\n", `F:2:12: contexts[0].interface: name one of eth1, eth2`},
		{"interface in several namespaces", "interfaces: [{name: e, netns: x}, {name: e, netns: y}]\ncontexts: [{name: a, handler: deposit, interface: e}]\n",
			`F:2:51: contexts[0].interface: "e" is in several network namespaces: want x/e, y/e`},

		{"rulesets", eth + "contexts:\n- name: a\n  handler: deposit\n  rulesets: |\n    # two\n    in: slmp\n    web: tcp(80000)\n\n      x: 3&0xff==1\n", strings.Join([]string{
			`F:8:10: contexts[0].rulesets: port "80000": want a decimal number, 0 to 65535`,
			`F:10:17: contexts[0].rulesets: expected a value, found '='`,
		}, "\n")},
		{"rulesets with indentation", eth + "contexts:\n- name: a\n  handler: deposit\n  rulesets: |2\n      in: slmpp\n",
			`F:6:11: contexts[0].rulesets: no predefined ruleset "slmpp": want `},
		{"rulesets in quotes", eth + "contexts:\n- name: a\n  handler: deposit\n  rulesets: \"in: slmpp\"\n",
			`F:5:18: contexts[0].rulesets: no predefined ruleset "slmpp": want `},
		{"rulesets without", eth + "contexts:\n- {name: ä, handler: deposit, rulesets: 'in: slmpp'}\n", strings.Join([]string{
			`F:3:10: contexts[0].name: "ä": names have up to 63 of the characters A-Z a-z 0-9 . _ -, and do not begin with . or -`,
			`F:3:47: contexts[0].rulesets: no predefined ruleset "slmpp": want `}, "\n")},
		{"rulesets with escapes", eth + "contexts:\n- name: a\n  handler: deposit\n  rulesets: \"\\x69n: slmpp\"\n",
			`F:5:13: contexts[0].rulesets:1:5: no predefined ruleset "slmpp": want `},
		{"rulesets folded", eth + "contexts:\n- name: a\n  handler: deposit\n  rulesets: >\n    in: slmpp\n",
			`F:5:13: contexts[0].rulesets:1:5: no predefined ruleset "slmpp": want `},
		{"no rulesets in the text", eth + "contexts: [{name: a, handler: deposit, rulesets: '# none'}]\n", "F:2:50: contexts[0].rulesets: no packet would ever match: give rulesets, or triggered: true for a host-activated context"},
		{"rulesets of two formats", eth + "contexts: [{name: a, handler: deposit, rulesets: \"a: slmp\\nb: udp\"}]\n",
			`F:2:12: contexts[0].format: rulesets a and b have different message formats, "slmp" and "": name one`},
		{"format", eth + "contexts: [{name: a, handler: deposit, format: slpm}]\n", `F:2:48: contexts[0].format: no message format "slpm": want packet, flow, slmp, slmp6`},
		{"triggered with rulesets", eth + "contexts: [{name: a, handler: deposit, triggered: true, rulesets: 'a: slmp'}]\n",
			"F:2:67: contexts[0].rulesets: a triggered context has none: the host activates it"},
		{"handlers that the host triggers, with rulesets", eth + "contexts: [{name: a, handler: push, params: {to: '10.0.0.2:1'}, rulesets: 'a: slmp'}]\n",
			"F:2:75: contexts[0].rulesets: handler push is activated by the host: there can be none"},
		{"ruleset numbers", eth + "contexts:\n- {name: a, handler: deposit, first: 300}\n- {name: b, handler: echo-udp, first: 3}\n- {name: c, handler: echo-udp, first: 3}\n", strings.Join([]string{
			"F:3:38: contexts[0].first: ruleset numbers 300 to 300: want 0 to 255",
			`F:5:39: contexts[2].first: ruleset number 3 is that of context "b" already`}, "\n")},

		{"scheduling", eth + "contexts:\n- {name: a, handler: deposit, policy: any, overload: keep, hpus: '0-20', credits: -1, share: 2000, messages: -5}\n", strings.Join([]string{
			`F:3:39: contexts[0].policy: "any": want blocked-rr, message, packet`,
			`F:3:54: contexts[0].overload: "keep": want drop, stack`,
			`F:3:66: contexts[0].hpus: "0-20": want HPUs 0 to 15`,
			`F:3:83: contexts[0].credits: -1: want 1 to 32768`,
			`F:3:94: contexts[0].share: 2000: want 1 to 1000`,
			`F:3:110: contexts[0].messages: -5: want 1 to 262144`}, "\n")},
		{"core mask", eth + "contexts: [{name: a, handler: deposit, hpus: '3-1'}]\n", `F:2:46: contexts[0].hpus: "3-1": want a list such as "0-3,8"`},
		{"blocked-rr", eth + "contexts: [{name: a, handler: deposit, policy: blocked-rr, vhpus: 0}]\n",
			"F:2:12: contexts[0].sequence: blocked-rr needs the bytes of a sequence\nF:2:67: contexts[0].vhpus: blocked-rr with 0 virtual HPUs: want 1 to 65535"},
		{"timer", eth + "contexts: [{name: a, handler: deposit, timer: 1s}]\n", "F:2:47: contexts[0].timer: 1s: the handlers have no timer handler"},

		{"windows of a context", eth + "windows: [{name: s, size: 1MiB}]\ncontexts:\n- name: a\n  handler: deposit\n  windows:\n  - {name: x}\n  - {name: s, size: 2MiB}\n  - {name: y, size: 8GiB, rights: rx, app: w}\n", strings.Join([]string{
			`F:7:5: contexts[0].windows[0]: window "x" has no size, and is not a shared window (s)`,
			`F:8:21: contexts[0].windows[1].size: window "s" is shared, with a size of 1MiB: leave out the size, or choose another name`,
			`F:9:21: contexts[0].windows[2].size: a window of 8GiB is larger than the limit of 4GiB: raise limits.window`,
			`F:9:35: contexts[0].windows[2].rights: rights "rx": want r, w and a (atomic), each once`,
			`F:9:44: contexts[0].windows[2].app: "w": want rw (mapped), r (by copying) or none`}, "\n")},
		{"all memory", eth + "limits: {memory: 10MiB}\ncontexts:\n- {name: a, handler: echo-udp, windows: [{name: w, size: 6MiB}]}\n- {name: b, handler: echo-udp, memory: 5MiB}\n",
			"F:2:18: limits.memory: windows, queues and HPU memory take 11MiB, and 10MiB are allowed: raise limits.memory, or make windows smaller"},
		{"memory of a context", eth + "limits: {memory: 10MiB}\ncontexts:\n- {name: a, handler: echo-udp, windows: [{name: w, size: 11MiB}]}\n",
			"F:4:3: contexts[0]: windows, queue and HPU memory take 11MiB, and 10MiB are allowed for all: raise limits.memory"},
		{"memory of HPUs", eth + "contexts:\n- {name: a, handler: deposit, hpu_memory: 1GiB}\n", "F:3:43: contexts[0].hpu_memory: 1GiB for each of 16 HPUs is more than the limit of 4GiB: raise limits.window"},

		{"datatype: column of the type", eth + datatype("type: 'vec(3 1)[int]'"), `F:6:19: contexts[0].params.type: handler datatype: `},
		{"datatype: line and column of the type", eth + datatype("type: |\n      vec(3 1 2)\n      [itn]"), `F:8:8: contexts[0].params.type: handler datatype: `},
		{"datatype: column of what is written otherwise", eth + datatype("Type: 'vec(3 1)[int]'"), `F:6:5: contexts[0].params.type:1:8: handler datatype: `},
		{"datatype: no type", eth + datatype("count: 3"), `F:6:5: contexts[0].params.type: handler datatype: is missing: want string`},
		{"datatype: strategy", eth + datatype("type: int\n    strategy: fast"),
			`F:7:15: contexts[0].params.strategy: handler datatype: "fast": want direct, specialized, hpu-local, ro-cp, rw-cp`},
		{"datatype: larger than the windows", eth + datatype("type: 'hvec(3 1 40000)[int]'"),
			`F:6:5: contexts[0].params: handler datatype: the type touches bytes 0 to 80003, and the largest window has 65536: make it larger, or count smaller`},
		{"datatype: windows to be read", eth + strings.Replace(datatype("type: int"), "64KiB", "64KiB, rights: r", 1),
			`F:6:5: contexts[0].params: handler datatype: handlers may not write any of the windows`},
		{"datatype: no windows", eth + "contexts: [{name: a, handler: datatype, params: {type: int}}]\n",
			`F:2:12: contexts[0].windows: handler datatype: no window: messages would be acknowledged and thrown away; add one, such as "windows: [{name: in, size: 64MiB}]"`},
		{"datatype: policy", eth + datatype("type: 'hvec(3 100 400)[int]'\n    strategy: rw-cp\n    interval: 300\n    packet: 100\n  policy: packet"),
			`F:10:11: contexts[0].policy: packet: handler datatype needs blocked-rr with sequences of 300 bytes and 4 virtual HPUs, which it gets if policy is left out, or message`},
		{"datatype: sequence", eth + datatype("type: 'hvec(3 100 400)[int]'\n    strategy: rw-cp\n    interval: 300\n    packet: 100\n  policy: blocked-rr\n  sequence: 600"),
			`F:11:13: contexts[0].sequence: 600 bytes: handler datatype needs 300, which it gets if sequence is left out`},
		{"datatype: virtual HPUs", eth + datatype("type: 'hvec(3 100 400)[int]'\n    strategy: hpu-local\n  vhpus: 3"),
			`F:8:10: contexts[0].vhpus: 3 virtual HPUs: handler datatype needs 16, which it gets if vhpus is left out`},
		{"datatype: all of the scheduling", eth + datatype("type: 'hvec(3 100 400)[int]'\n    strategy: hpu-local\n  policy: packet\n  sequence: 5\n  overload: keep\n  hpus: 0-99\n  credits: -1"), strings.Join([]string{
			`F:8:11: contexts[0].policy: packet: handler datatype needs blocked-rr with sequences of `,
			`F:10:13: contexts[0].overload: "keep": want drop, stack`,
			`F:11:9: contexts[0].hpus: "0-99": want HPUs 0 to 15`,
			`F:12:12: contexts[0].credits: -1: want 1 to 32768`}, "\n")},
		{"datatype: both numbers of the scheduling", eth + datatype("type: 'hvec(3 100 400)[int]'\n    strategy: rw-cp\n    interval: 300\n    packet: 100\n  sequence: 600\n  vhpus: 9\n  share: -1"), strings.Join([]string{
			`F:10:13: contexts[0].sequence: 600 bytes: handler datatype needs 300, which it gets if sequence is left out`,
			`F:11:10: contexts[0].vhpus: 9 virtual HPUs: handler datatype needs 4, which it gets if vhpus is left out`,
			`F:12:10: contexts[0].share: -1: want 1 to 1000`}, "\n")},
		{"datatype: a window without size", eth + strings.Replace(datatype("type: int"), ", size: 64KiB", "", 1),
			`F:7:13: contexts[0].windows[0]: window "in" has no size, and is not a shared window`},
		{"datatype: a window with wrong rights", eth + strings.Replace(datatype("type: int"), "64KiB", "64KiB, rights: x", 1),
			`F:7:45: contexts[0].windows[0].rights: rights "x": want r, w and a (atomic), each once`},
		{"datatype: messages that do not end", eth + datatype("type: int\n  rulesets: 'a: udp(7)'"),
			`F:4:12: contexts[0].handler: messages are put into windows, and format packet has none that begin and end, as those of slmp do`},
		{"datatype: memory", "limits: {memory: 20MiB}\n" + eth + datatype("type: 'hvec(3 100 400)[int]'\n    strategy: hpu-local\n  messages: 50000"),
			`F:7:5: contexts[0].params: handler datatype: not enough memory: hpu-local of this type for 50000 messages takes `},
		{"datatype: memory of windows", "limits: {memory: 20MiB}\n" + eth + strings.Replace(datatype("type: 'hvec(3 100 400)[int]'\n    strategy: hpu-local\n  messages: 50000"), "64KiB", "21MiB", 1),
			`F:4:3: contexts[0]: windows, queue and HPU memory take 21MiB, and 20MiB are allowed for all: raise limits.memory`},

		{"queue", eth + "contexts:\n- name: a\n  handler: deposit\n  queue: {events: 3, requests: 2000000, payload: 1MiB, full: block}\n", strings.Join([]string{
			`F:5:19: contexts[0].queue.events: 3: want 1 to 1048576, a power of two`,
			`F:5:32: contexts[0].queue.requests: 2000000: want 1 to 1048576, a power of two`,
			`F:5:50: contexts[0].queue.payload: 1048576: want 0 to 65536`,
			`F:5:62: contexts[0].queue.full: "block": want drop, fail, wait`}, "\n")},
		{"no window to write", eth + "contexts:\n- name: a\n  handler: deposit\n  windows: [{name: w, size: 1MiB, rights: r}, {name: v, size: 1MiB, rights: r}]\n",
			`F:5:12: contexts[0].windows: handler deposit: handlers may not write any of the windows: messages would be acknowledged and thrown away; allow it with "rights: rw"`},
		{"empty queue", eth + "contexts:\n- name: a\n  handler: echo-udp\n  queue:\n", "F:5:9: contexts[0].queue: want keys with values, found nothing: write {} for the defaults"},
		{"attach", eth + "contexts:\n- {name: a, handler: deposit, attach: {users: [no-user]}, activate: sometimes}\n",
			"F:3:48: contexts[0].attach.users[0]: \"no-user\": there is no such user\nF:3:69: contexts[0].activate: \"sometimes\": want start, attach or manual"},
		{"all at once", "socket: x\ninterfaces: []\ncontexts:\n- nam: a\n", strings.Join([]string{
			`F:1:9: socket: "x": want an absolute path`,
			`F:2:13: interfaces: there is none: name at least one, such as "- name: eth1"`,
			`F:4:3: contexts[0]: unknown key "nam": is it name?`,
			`F:4:3: contexts[0].name: a context needs a name`,
			`F:4:3: contexts[0].handler: is missing: `}, "\n")},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, got := load(t, tc.text)
			g, w := strings.Split(got, "\n"), strings.Split(tc.want, "\n")
			ok := len(g) == len(w)
			for i := range min(len(g), len(w)) {
				// What ends in a space is followed by a list that may grow.
				if g[i] != w[i] && !(strings.HasSuffix(w[i], " ") && strings.HasPrefix(g[i], w[i])) {
					ok = false
				}
			}
			if !ok {
				t.Errorf("got\n%s\nwant\n%s", got, tc.want)
			}
		})
	}
}

func TestConfigurationIsRead(t *testing.T) {
	cfg, err := load(t, `
socket: /run/x.sock
limits: {window: 1GiB}
interfaces: [{name: eth1, netns: lab, hpus: 4, cpus: [0, 1], limit: 250ms}]
windows: [{name: shared, size: 2MiB}]
contexts:
- name: inbox
  handler: echo-udp
  params: {port: 9}
  hpus: 0-1,3
  windows: [{name: in, size: 65536, rights: rw}, {name: shared}]
  queue: {}
  attach: {users: [0], groups: [12]}
  timeout: 1.5s
`)
	if err != "" {
		t.Fatal(err)
	}
	want := &Config{
		Socket:     "/run/x.sock",
		Limits:     Limits{Window: 1 << 30},
		Interfaces: []Interface{{Name: "eth1", Netns: "lab", HPUs: 4, CPUs: []int{0, 1}, Limit: control.Duration(250 * time.Millisecond)}},
		Windows:    []control.Window{{Name: "shared", Size: 2 << 20}},
		Contexts: []control.Context{{
			Name: "inbox", Handler: "echo-udp", Params: map[string]any{"port": 9}, HPUs: "0-1,3",
			Windows: []control.Window{{Name: "in", Size: 65536, Rights: "rw"}, {Name: "shared"}},
			Queue:   &control.Queue{}, Attach: &control.Attach{Users: []string{"0"}, Groups: []string{"12"}},
			Timeout: control.Duration(1500 * time.Millisecond),
		}},
	}
	if !reflect.DeepEqual(cfg, want) {
		a, _ := json.Marshal(cfg)
		b, _ := json.Marshal(want)
		t.Errorf("read\n%s\nwant\n%s", a, b)
	}
	var c checker
	b := checkConfig(&c, cfg)
	if len(b) != 1 || b[0].spec.CoreMask != 0b1011 || b[0].iface != "lab/eth1" || b[0].doc.Activate != atStart {
		t.Errorf("contextPlan %+v", b)
	}
}

func TestEnvironmentOverridesTheFile(t *testing.T) {
	t.Setenv("XSPIN_RUN_SOCKET", "/run/other.sock")
	t.Setenv("XSPIN_RUN_LIMITS_MEMORY", "3GiB")
	t.Setenv("XSPIN_RUN_LOG_LINES", "7")
	cfg, err := load(t, eth+"socket: /run/x.sock\n")
	if err != "" {
		t.Fatal(err)
	}
	if cfg.Socket != "/run/other.sock" || cfg.Limits.Memory != 3<<30 || cfg.Log.Lines != 7 {
		t.Errorf("%+v", cfg)
	}
	t.Setenv("XSPIN_RUN_LIMITS_MEMORY", "much")
	t.Setenv("XSPIN_RUN_SOCKET", "here")
	_, err = load(t, eth)
	want := `environment XSPIN_RUN_LIMITS_MEMORY: size "much": want a whole number of bytes, or one with KiB, MiB or GiB, such as "64MiB"` + "\n" +
		`environment XSPIN_RUN_SOCKET: "here": want an absolute path`
	if err != want {
		t.Errorf("got\n%s\nwant\n%s", err, want)
	}
}

func TestFilesThatAreNoConfiguration(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{filepath.Dir(pipe): "is a directory: want a file", pipe: "is a pipe: want a file", "/dev/zero": "is a device: want a file"} {
		if _, err := Load(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", path, err)
		}
	}
	if _, err := Load("/nowhere/x.yaml"); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("no file: %v", err)
	}
}

func TestExampleConfigurationIsGood(t *testing.T) {
	cfg, err := Load("../dist/xspin.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if len(cfg.Contexts) == 0 {
		t.Error("it has no context")
	}
	// What is commented out is good as well, and all that there is.
	text, err := os.ReadFile("../dist/xspin.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keysOf(reflect.TypeFor[Config](), "") {
		name := key[strings.LastIndexByte(key, '.')+1:]
		if !regexp.MustCompile(`(?m)(^|[{,~-]|  ) *` + name + `:( |$)`).Match(text) {
			t.Errorf("it does not say that there is %s", key)
		}
	}
	all := strings.NewReplacer("\n#~", "\n", "user: xspin", "user: nobody").Replace(string(text))
	if _, bad := load(t, all); bad != "" {
		t.Errorf("with what is commented out:\n%s", bad)
	}
}

// keysOf returns the keys of a document, with those of what is in it.
func keysOf(t reflect.Type, path string) (keys []string) {
	if reflect.PointerTo(t).Implements(reflect.TypeFor[encoding.TextUnmarshaler]()) {
		return nil // a single value
	}
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice:
		return keysOf(t.Elem(), path)
	case reflect.Struct:
		for i := range t.NumField() {
			key := join(path, jsonName(t.Field(i)))
			keys = append(append(keys, key), keysOf(t.Field(i).Type, key)...)
		}
	}
	return keys
}

// Documents over the socket are checked as the file is.
func TestContextsOfTheSocketAreCheckedTheSame(t *testing.T) {
	d := &Daemon{cfg: &Config{Interfaces: []Interface{{Name: "eth1"}}}}
	_, err := d.check(&control.Context{Name: "x", Handler: "deposit", Rulesets: "in: slmp\nweb: tcp(80000)", HPUs: "99"})
	want := "rulesets:2:6: port \"80000\": want a decimal number, 0 to 65535\nhpus: \"99\": want HPUs 0 to 15"
	if err == nil || err.Error() != want {
		t.Errorf("got\n%v\nwant\n%s", err, want)
	}
}

// What a set needs of scheduling it gets, unless the configuration says the same.
func TestHandlersGetTheSchedulingThatTheyNeed(t *testing.T) {
	const rwcp = "type: 'hvec(3 100 400)[int]'\n    strategy: rw-cp\n    interval: 300\n    packet: 100"
	for _, tc := range []struct {
		name, params string
		policy       nic.Policy
		sequence     uint32
		vhpus        int
	}{
		{"nothing", "type: int", nic.ByMessage, 0, 0},
		{"any", "type: int\n  policy: packet", nic.ByPacket, 0, 0},
		{"any sequences", "type: int\n  policy: blocked-rr\n  sequence: 7\n  vhpus: 8", nic.BlockedRR, 7, 8},
		{"needed", rwcp, nic.BlockedRR, 300, 4},
		{"said", rwcp + "\n  policy: blocked-rr", nic.BlockedRR, 300, 4},
		{"all said", rwcp + "\n  policy: blocked-rr\n  sequence: 300\n  vhpus: 4", nic.BlockedRR, 300, 4},
		{"one after the other", rwcp + "\n  policy: message", nic.ByMessage, 0, 0},
		{"for each HPU", "type: int\n    strategy: hpu-local\n    packet: 1000", nic.BlockedRR, 1000, 16},
		{"the host's", rwcp + "\n  triggered: true", nic.ByMessage, 0, 0},
	} {
		cfg, err := load(t, eth+datatype(tc.params))
		if err != "" {
			t.Errorf("%s: %s", tc.name, err)
			continue
		}
		b := checkConfig(new(checker), cfg)[0]
		if s := &b.spec; s.Policy != tc.policy || s.Sequence != tc.sequence || s.VHPUs != tc.vhpus {
			t.Errorf("%s: policy %v with sequences of %d bytes and %d virtual HPUs", tc.name, s.Policy, s.Sequence, s.VHPUs)
		}
		if !reflect.DeepEqual(b.doc.Policy, cfg.Contexts[0].Policy) || b.doc.Sequence != cfg.Contexts[0].Sequence {
			t.Errorf("%s: the document has changed, so that it would be another one when it is read again", tc.name)
		}
	}
}

// What counts for limits.memory is what the kernel gives.
func TestQueuesAreCountedAsLargeAsTheyAre(t *testing.T) {
	netnstest.NeedRoot(t)
	for _, l := range []hostq.Layout{
		{Events: 1, Requests: 1, Payload: 0, Lanes: 1},
		{Events: 1024, Requests: 1024, Payload: 2048, Lanes: 2},
		{Events: 16384, Requests: 1, Payload: 0, Lanes: 1}, // 3 MiB of events
	} {
		p, err := hostq.NewPair(hostq.PairConfig{Layout: l})
		if err != nil {
			t.Fatal(err)
		}
		fd, _, _ := p.Descriptors()
		info, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", fd))
		if err != nil {
			t.Fatal(err)
		}
		size := int64(1)
		for line := range strings.Lines(string(info)) {
			var n int64
			for _, key := range []string{"value_size", "max_entries"} {
				if _, err := fmt.Sscanf(line, key+":%d", &n); err == nil {
					size *= n
				}
			}
		}
		if got := queueBytes(l); got != size {
			t.Errorf("%+v: %d bytes are counted, of %d", l, got, size)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
}
