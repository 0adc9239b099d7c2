// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// A standIn answers like a daemon that has one context, and notes what it was asked.
type standIn struct {
	socket string
	asked  []string // "METHOD path body"
}

func newStandIn(t *testing.T) *standIn {
	t.Helper()
	s := &standIn{socket: filepath.Join(t.TempDir(), "d.sock")}
	l, err := net.Listen("unix", s.socket)
	if err != nil {
		t.Fatal(err)
	}
	inbox := control.ContextInfo{
		Context: control.Context{
			Name: "inbox", Handler: "deposit", Interface: "eth1", Params: map[string]any{"port": 7},
			Windows: []control.Window{{Name: "in", Size: 64 << 20}, {Name: "all", Rights: "r", App: "none"}},
		},
		ID: 3, State: "active", At: "xdp", Since: time.Unix(0, 0),
		Rules:        []control.Rule{{Number: 5, Text: "slmp: slmp", Matched: 70}, {Number: -1, Text: "more: udp(7)"}},
		Attached:     []control.Peer{{PID: 77, UID: 1000, GID: 1001}, {PID: 78, Observer: true}},
		HandlerStats: spin.ContextStats{Handled: 12, Dropped: 2, Failed: 1, Panics: 3},
		Pair:         &hostq.PairStats{Events: 9, Requests: 8, Broken: true},
	}
	inbox.HandlerStats.User[2] = spin.UserCounter{Sum: 30, Count: 3}
	reply := func(w http.ResponseWriter, status int, doc any) {
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(doc)
	}
	refusal := map[string]string{"error": `there is no context "nobody"`}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		s.asked = append(s.asked, strings.TrimSpace(fmt.Sprintf("%s %s %s", r.Method, r.URL.Path, body)))
		switch {
		case strings.Contains(r.URL.Path, "nobody"):
			reply(w, http.StatusNotFound, refusal)
		case r.URL.Path == "/v1/rules":
			reply(w, 200, []control.TableRule{{Interface: "eth1", Context: "inbox", Rule: inbox.Rules[0]}, {Interface: "eth2", Context: "x", Rule: inbox.Rules[1]}})
		case r.URL.Path == "/v1/status":
			reply(w, 200, control.Status{Interfaces: []string{"eth1", "eth2"}})
		case r.URL.Path == "/v1/stats":
			reply(w, 200, []nic.Stats{{Interface: "eth1"}})
		case r.URL.Path == "/v1/reload":
			reply(w, 200, map[string][]string{"changes": {"context a: added", "context b: removed"}})
		case r.Method == http.MethodPost && r.URL.Path == "/v1/contexts":
			reply(w, 201, inbox)
		case r.URL.Path == "/v1/contexts":
			reply(w, 200, []control.ContextInfo{inbox})
		case r.Method == http.MethodGet:
			reply(w, 200, inbox)
		default:
			w.WriteHeader(http.StatusNoContent)
		}
	})}
	go srv.Serve(l)
	t.Cleanup(func() { srv.Close() })
	return s
}

// run runs xspin with the daemon's socket.
func (s *standIn) run(stdin string, args ...string) (stdout string, err error) {
	root := newRootCmd()
	var out bytes.Buffer
	root.SetOut(&out)
	root.SetErr(io.Discard)
	root.SetIn(strings.NewReader(stdin))
	root.SetArgs(append(args, "--socket", s.socket))
	err = root.Execute()
	return out.String(), err
}

func TestCtxTellsAndAsks(t *testing.T) {
	file := writeFile(t, "ctx.yaml", []byte("name: ping\nhandler: echo-icmp\ntimer: 1s\nwindows: [{name: in, size: 2MiB}]\nparams: {deep: {er: [1, x]}}\n"))
	object := writeFile(t, "mine.o", []byte("bytes"))
	beside := filepath.Join(filepath.Dir(object), "mine.yaml")
	if err := os.WriteFile(beside, []byte("{name: mine, tier: kernel, object: mine.o}"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		args  string
		stdin string
		asked []string
		out   []string // on lines of the output, columns by single spaces
	}{
		{"ls", "ctx ls", "", []string{"GET /v1/contexts"}, []string{
			"NAME ID STATE TIER HOOK HANDLER INTERFACE ATTACHED HANDLED DROPPED FAILED RULESETS",
			"inbox 3 active user xdp deposit eth1 pid 77, pid 78 (observer) 12 2 4 5:slmp, more",
		}},
		{"show", "ctx show inbox", "", []string{"GET /v1/contexts/inbox"}, []string{
			"context 3, inbox: active since",
			`handler deposit {"port":7}`,
			"ruleset slmp: slmp (number 5, matched 70)",
			"ruleset more: udp(7) (not armed)",
			"window in, 64MiB, handlers rwa, application rw",
			"window all, shared, handlers r, application none",
			"application pid 77, uid 1000, gid 1001",
			"observer pid 78",
			"queue BROKEN",
			"counter 2 30, counted 3 times, mean 10.0",
		}},
		{"install", "ctx install " + file, "", []string{
			`POST /v1/contexts {"name":"ping","handler":"echo-icmp","params":{"deep":{"er":[1,"x"]}},"timer":"1s","windows":[{"name":"in","size":"2MiB"}]}`,
		}, []string{"context 3, inbox: active"}},
		{"install JSON from standard input", "ctx install -", `{"name": "a", "handler": "b"}`, []string{`POST /v1/contexts {"name":"a","handler":"b"}`}, nil},
		{"install by flags", "ctx install --name ping --tier kernel --handler echo-udp --param port=7 --param to=stack --interface eth1", "", []string{
			`POST /v1/contexts {"name":"ping","interface":"eth1","tier":"kernel","handler":"echo-udp","params":{"port":7,"to":"stack"}}`,
		}, []string{"context 3, inbox: active"}},
		{"install with memory", "ctx install --name mine --handler count --memory 64KiB --hpu-memory 24", "", []string{
			`POST /v1/contexts {"name":"mine","handler":"count","memory":"64KiB","hpu_memory":24}`,
		}, []string{"context 3, inbox: active"}},
		{"install with windows", `ctx install --name in --handler deposit --window {"name":"in","size":"64KiB"} --window "name":"all","rights":"r" --attach {"users":["alice"]} --activate attach --messages 8`, "", []string{
			`POST /v1/contexts {"name":"in","handler":"deposit","messages":8,"windows":[{"name":"in","size":"64KiB"},{"name":"all","rights":"r"}],"attach":{"users":["alice"]},"activate":"attach"}`,
		}, []string{"context 3, inbox: active"}},
		{"install an object", "ctx install --name mine --object " + object + " --rulesets mine:udp(7)", "", []string{
			`POST /v1/contexts {"name":"mine","rulesets":"mine:udp(7)","tier":"kernel","handler":"","object":{"name":"` + object + `","code":"Ynl0ZXM="}}`,
		}, []string{"context 3, inbox: active"}},
		{"install an object beside a file", "ctx install " + beside, "", []string{
			`POST /v1/contexts {"name":"mine","tier":"kernel","handler":"","object":{"name":"mine.o","code":"Ynl0ZXM="}}`,
		}, []string{"context 3, inbox: active"}},
		{"activate", "ctx activate a b", "", []string{"POST /v1/contexts/a/activate", "POST /v1/contexts/b/activate"}, nil},
		{"deactivate", "ctx deactivate a", "", []string{"POST /v1/contexts/a/deactivate"}, nil},
		{"rm", "ctx rm a", "", []string{"DELETE /v1/contexts/a"}, []string{"context a removed"}},
		{"trigger", "ctx trigger a --words 9500,0x10 --window out --offset 4KiB --length 100 --slice 50", "", []string{
			`POST /v1/contexts/a/trigger {"words":[9500,16,0,0],"window":"out","offset":4096,"length":100,"slice":50}`,
		}, nil},
		{"trigger without anything", "ctx trigger a", "", []string{`POST /v1/contexts/a/trigger {"words":[0,0,0,0]}`}, nil},
		{"reload", "ctx reload", "", []string{"POST /v1/reload"}, []string{"context a: added", "context b: removed"}},
		{"rules ls", "rules ls", "", []string{"GET /v1/rules"}, []string{
			"INTERFACE NUMBER CONTEXT MATCHED RULESET",
			"eth1 5 inbox 70 slmp: slmp",
			"eth2 - x 0 more: udp(7)",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStandIn(t)
			out, err := s.run(c.stdin, strings.Fields(c.args)...)
			if err != nil {
				t.Fatal(err)
			}
			if got, want := strings.Join(s.asked, "\n"), strings.Join(c.asked, "\n"); got != want {
				t.Errorf("asked\n%s\nwant\n%s", got, want)
			}
			lines := map[string]bool{}
			plain := "\n"
			for line := range strings.Lines(out) {
				plain += strings.Join(strings.Fields(line), " ") + "\n"
				lines[line] = true
			}
			for _, want := range c.out {
				if !strings.Contains(plain, "\n"+want) {
					t.Errorf("no line begins with %q in\n%s", want, out)
				}
			}
			if c.out == nil && c.stdin == "" && out != "" {
				t.Errorf("said %q", out)
			}
		})
	}
}

func TestCtxShowTellsTheWayOut(t *testing.T) {
	for state, want := range map[string]bool{"stopped": true, "failed": true, "installed": false, "active": false} {
		var out bytes.Buffer
		if err := writeContext(&out, &control.ContextInfo{Context: control.Context{Name: "a"}, State: state}); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(out.String(), hint("ctx activate a: it starts over")) != want {
			t.Errorf("%s:\n%s", state, &out)
		}
	}
}

func TestCtxShowTellsWhatHandlersNeed(t *testing.T) {
	info := control.ContextInfo{
		Context:  control.Context{Name: "a", Policy: "blocked-rr", Sequence: 1000, VHPUs: 4},
		Reserved: map[string]int64{"type": 96, "checkpoints": 2048},
	}
	var out bytes.Buffer
	if err := writeContext(&out, &info); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"2048 bytes of checkpoints, 96 bytes of type\n", "blocked-rr, sequences of 1000 bytes, 4 virtual HPUs\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
}

func TestCtxShowTellsOfRefusals(t *testing.T) {
	for refused, want := range map[uint64]bool{0: false, 9: true} {
		var out bytes.Buffer
		if err := writeContext(&out, &control.ContextInfo{MessageStats: &spin.MessageStats{Refused: refused}}); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(out.String(), "9 packets of messages that had nowhere to go") != want {
			t.Errorf("%d refused:\n%s", refused, &out)
		}
	}
}

func TestCtxShowTellsThatNoPacketsCome(t *testing.T) {
	for link, want := range map[string]string{"up": ": active\n", "down": ": active (link down)\n", "no carrier": ": active (no carrier)\n"} {
		var out bytes.Buffer
		if err := writeContext(&out, &control.ContextInfo{State: "active", Link: link}); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(out.String(), want) {
			t.Errorf("an interface that is %s:\n%s", link, &out)
		}
	}
}

// What "sent" means is the same in stats, top and here: frames of handlers. Acknowledgements
// are counted beside them.
func TestSentIsWhatHandlersHaveSent(t *testing.T) {
	h := spin.ContextStats{Sent: 5, Acks: 70}
	var show, stats bytes.Buffer
	err1 := writeContext(&show, &control.ContextInfo{HandlerStats: h})
	err2 := writeStats(&stats, &nicStats{Stats: &nic.Stats{Contexts: []nic.ContextStats{{ContextStats: h, Messages: &spin.MessageStats{}, Checksums: new(hpu.Checksums)}}}})
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ out, want string }{
		{show.String(), "frames 5 of handlers sent"},
		{show.String(), "acks 70 sent"},
		{stats.String(), "sent 5 frames of handlers given"},
		{stats.String(), "acks 70 acknowledgements given"},
	} {
		if !strings.Contains(strings.Join(strings.Fields(c.out), " "), c.want) {
			t.Errorf("no %q in\n%s", c.want, c.out)
		}
	}
}

// What keeps packets from a context is said wherever somebody looks for it.
func TestWarningsAreShown(t *testing.T) {
	warnings := []string{"the MTU lets frames come in several buffers", "another"}
	var show, stats bytes.Buffer
	err1 := writeContext(&show, &control.ContextInfo{Warnings: warnings})
	err2 := writeStats(&stats, &nicStats{Stats: &nic.Stats{Contexts: []nic.ContextStats{{Warnings: warnings}}}})
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	for _, w := range warnings {
		if !strings.Contains(show.String(), w) || !strings.Contains(stats.String(), w) {
			t.Errorf("no %q in\n%s\n%s", w, &show, &stats)
		}
	}
}

func TestCtxJSON(t *testing.T) {
	s := newStandIn(t)
	for args, key := range map[string]string{"ctx ls --json": "contexts", "ctx show inbox --json": "handler_stats", "rules ls --json": "rules"} {
		out, err := s.run("", strings.Fields(args)...)
		if err != nil {
			t.Fatal(err)
		}
		var doc map[string]any
		dec := json.NewDecoder(strings.NewReader(out))
		if err := dec.Decode(&doc); err != nil || doc["schema"] != 1.0 || doc[key] == nil {
			t.Errorf("%s: %v, %s", args, err, out)
		}
		if err := dec.Decode(&doc); err != io.EOF {
			t.Errorf("%s: more than a document: %v", args, err)
		}
	}
}

func TestCtxErrors(t *testing.T) {
	for _, c := range []struct {
		name, args, stdin, want string
		asked                   int
	}{
		{"no such context", "ctx show nobody", "", `ctx show: there is no context "nobody"`, 1},
		{"one of two", "ctx rm nobody inbox", "", `ctx rm: there is no context "nobody"`, 2},
		{"unknown key", "ctx install -", "name: x\ncolour: red\n", "-:2:1: unknown key \"colour\": want ", 0},
		{"nothing", "ctx install -", "", "- is empty", 0},
		{"neither file nor flags", "ctx install", "", "missing argument: FILE, or --name and what the context has", 0},
		{"no name", "ctx install --handler echo-udp", "", "missing argument: FILE, or --name", 0},
		{"file and flags", "ctx install - --name x", "", "--name goes without FILE, which says what the context is", 0},
		{"parameter", "ctx install --name x --param port", "", "--param port: want NAME=VALUE", 0},
		{"no object", "ctx install --name x --object /nowhere.o", "", "open /nowhere.o: no such file or directory", 0},
		{"no object beside a file", "ctx install -", "{name: x, object: /nowhere.o}", "-:1:19: object: open /nowhere.o: no such file or directory", 0},
		{"no YAML", "ctx install -", "name: x\n\tfoo", "-:2:1: ", 0},
		{"two documents", "ctx install -", "name: x\n---\nname: y\n", "unexpected second document", 0},
		{"a list", "ctx install -", "[1]", "-:1:1: want keys with values, found a list", 0},
		{"twice the same key", "ctx install -", "name: x\nname: y\n", "-:2:1: name: appears twice, first on line 1", 0},
		{"duration", "ctx install -", "{name: x,\n timer: 5,\n first: many}", "2 errors:\n-:2:9: timer: duration \"5\": want a number with a unit, such as \"10s\", \"1.5s\", \"200ms\" or \"1m30s\"\n-:3:9: first: ", 0},
		{"no file", "ctx install /nonexistent.yaml", "", "no such file", 0},
		{"words", "ctx trigger a --words 1,2,3,4,5", "", "at most 4", 0},
		{"word", "ctx trigger a --words x", "", "want numbers", 0},
		{"offset", "ctx trigger a --window w --offset -1", "", "--offset -1: want a whole number", 0},
		{"offset of nothing", "ctx trigger a --length 4", "", "name it with --window", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStandIn(t)
			_, err := s.run(c.stdin, strings.Fields(c.args)...)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one with %q", err, c.want)
			}
			if len(s.asked) != c.asked {
				t.Errorf("asked %q", s.asked)
			}
		})
	}
	for args, want := range map[string]string{
		"ctx sl":              `unknown command "sl" for "xspin ctx": did you mean ls or rm?`,
		"ctx nonsense":        `unknown command "nonsense" for "xspin ctx"`,
		"stast":               `unknown command "stast" for "xspin": did you mean stats?`,
		"ctx show":            "ctx show: NAME is missing: xspin ctx show NAME",
		"ctx show a b":        `ctx show: unexpected argument "b": xspin ctx show NAME`,
		"ctx install a b":     `ctx install: unexpected argument "b": xspin ctx install FILE | --name NAME ...`,
		"ctx rm":              "ctx rm: NAME is missing: xspin ctx rm NAME...",
		"capture -w x":        "capture: CONTEXT is missing: xspin capture CONTEXT [-w FILE]",
		"rules explain":       "rules explain: FILE is missing: xspin rules explain FILE [NAME]",
		"rules explain a b c": `rules explain: unexpected argument "c": xspin rules explain FILE [NAME]`,
	} {
		root := newRootCmd()
		root.SetArgs(strings.Fields(args))
		if err := root.Execute(); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", args, err, want)
		}
	}
	// A command that nobody answers says what to do.
	s := &standIn{socket: filepath.Join(t.TempDir(), "none.sock")}
	if _, err := s.run("", "ctx", "ls"); err == nil || !strings.Contains(err.Error(), "xspin run") {
		t.Error(err)
	}
}

// Flags with keys of a configuration are read as one, and say what is wrong with each.
func TestCtxInstallReadsKeysInFlags(t *testing.T) {
	for _, tc := range []struct {
		args []string
		want string // "": it is asked of the daemon
	}{
		{[]string{"--window", "name: in, size: 64MiB"}, ""},
		{[]string{"--window", "{name: in, size: 64MiB}"}, ""},
		{[]string{"--window", "name: in, sise: 1"}, `--window "name: in, sise: 1": unknown key "sise": is it size?`},
		{[]string{"--window", "name: in, size: lots", "--attach", "users: 7"}, "2 errors:\n--window \"name: in, size: lots\": size: size \"lots\": want a whole number of bytes, or one with KiB, MiB or GiB, such as \"64MiB\"\n--attach \"users: 7\": users: want a list, found a single value"},
		{[]string{"--window", "in"}, `--window "in": unknown key "in": want app, name, rights, size`},
		{[]string{"--window", ""}, `--window "": want keys with values`},
		{[]string{"--window", "name: in}"}, `--window "name: in}": `},
	} {
		_, err := newStandIn(t).run("", append([]string{"ctx", "install", "--name", "a", "--handler", "deposit"}, tc.args...)...)
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.HasPrefix(err.Error(), "ctx install: "+tc.want)) {
			t.Errorf("%q: %v\nwant %s", tc.args, err, tc.want)
		}
	}
}

// What the daemon finds wrong has its place in the file.
func TestCtxInstallSaysWhereInTheFile(t *testing.T) {
	socket := answering(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusBadRequest)
		_, _ = io.WriteString(w, `{"error": "rulesets:1:5: bad\nhpus: worse", "problems": [{"path": "rulesets", "line": 1, "column": 5, "text": "bad"}, {"path": "hpus", "text": "worse"}]}`)
	})
	err := xspin(t.Context(), strings.NewReader("name: a\nrulesets: |\n   in: slmpp\nhpus: x\n"), io.Discard, io.Discard, "ctx", "install", "-", "--socket", socket)
	if want := "ctx install: 2 errors:\n-:3:8: rulesets: bad\n-:4:7: hpus: worse"; err == nil || err.Error() != want {
		t.Errorf("got\n%v\nwant\n%s", err, want)
	}
}

// Of a context that hands messages over both kinds of handlers are named, and how many
// packets went from one to the other.
func TestContextsThatHandOverAreShown(t *testing.T) {
	x := control.ContextInfo{
		Context: control.Context{Name: "both", Tier: "kernel", Object: &control.Object{Name: "long.bpf.o"}, Handler: "deposit"},
		Maps: []spin.OwnMap{{Name: ".bss", Type: "array", Key: 4, Value: 12, Entries: 1, ID: 8},
			{Name: "seen", Type: "hash", Key: 4, Value: 8, Entries: 16, ID: 9, Used: new(int)}},
	}
	x.HandlerStats.HandedOver = 10
	var out strings.Builder
	if err := writeContext(&out, &x); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"long.bpf.o, in the kernel; what that hands over goes to deposit, on HPUs\n", "10 packets, to handlers on HPUs\n",
		".bss: global variables, 12 bytes, the kernel's map 8\n", "seen: hash, keys of 4 bytes, values of 8, 0 of 16 entries, the kernel's map 9\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("not %q in\n%s", want, &out)
		}
	}
	if got := handlerName(&x); got != "long.bpf.o+deposit" {
		t.Errorf("the list has %q", got)
	}
}
