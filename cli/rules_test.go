// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/gopacket"
	"github.com/google/gopacket/layers"
	"github.com/google/gopacket/pcapgo"

	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/packet"
)

// run runs `xspin rules` with arguments.
func runRules(t *testing.T, stdin string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	var out, diag bytes.Buffer
	cmd := newRulesCmd()
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	cmd.SetArgs(args)
	cmd.SetIn(strings.NewReader(stdin))
	cmd.SetOut(&out)
	cmd.SetErr(&diag)
	err = cmd.Execute()
	return out.String(), diag.String(), err
}

func writeFile(t *testing.T, name string, data []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// udpFrame returns a UDP packet from 192.0.2.1:1000 to 198.51.100.2.
func udpFrame(dst uint16, payload ...byte) []byte {
	f := []byte{
		0x02, 0, 0, 0, 0, 2, 0x02, 0, 0, 0, 0, 1, 0x08, 0x00,
		0x45, 0, 0, byte(28 + len(payload)), 0, 0, 0x40, 0, 64, 17, 0, 0, 192, 0, 2, 1, 198, 51, 100, 2,
		0x03, 0xe8, byte(dst >> 8), byte(dst), 0, byte(8 + len(payload)), 0, 0,
	}
	ip := packet.IPv4(f[packet.EthernetLen:])
	ip.SetChecksum(ip.HeaderChecksum())
	return append(f, payload...)
}

const testRules = `other: udp(7001)
echo:  udp(7000)   # our echo service
files: slmp
`

// testCapture has one frame of each kind.
func testCapture() []byte {
	arp := make([]byte, 60)
	arp[12], arp[13] = 0x08, 0x06
	slmp := udpFrame(9330, 0xc0, 0, 0, 0, 0, 7, 0, 0, 0x05, 0x80, 'x', 'y')
	return pcapFile(1,
		frameOf{arp, len(arp)},
		frameOf{udpFrame(7000, 'h', 'i'), 44},
		frameOf{slmp, len(slmp)},
		frameOf{slmp[:50], len(slmp)},
	)
}

func TestRulesCheck(t *testing.T) {
	good := writeFile(t, "good.rules", []byte(testRules))
	bad := writeFile(t, "bad.rules", []byte("a: udp\nb: 3&0xff=0x100\nc: 200=1\n"))

	out, diag, err := runRules(t, "", "check", good)
	if err != nil || out != good+": 3 rulesets\n" || diag != "" {
		t.Errorf("a good file: %q, %q, %v", out, diag, err)
	}
	out, diag, err = runRules(t, "", "check", good, bad)
	if err == nil || err.Error() != "rules check: 1 of 2 files not valid" || out != good+": 3 rulesets\n" {
		t.Errorf("a good and a bad file: %q, %v", out, err)
	}
	want := bad + `:2:11: value 0x00000100 has bits 0x00000100 outside mask 0x000000ff, so it can never be equal
b: 3&0xff=0x100
          ^
` + bad + `:3:4: word 200 is out of range: rules reach words 0 to 127, the first 512 bytes of the frame
c: 200=1
   ^
` + bad + ": 2 errors\n"
	if diag != want {
		t.Errorf("diagnostics are\n%s\nwant\n%s", diag, want)
	}
	if out, _, err = runRules(t, testRules, "check", "-"); err != nil || out != "-: 3 rulesets\n" {
		t.Errorf("standard input: %q, %v", out, err)
	}
	if _, diag, err = runRules(t, "", "check", good+"x"); err == nil || !strings.Contains(diag, "no such file") {
		t.Errorf("a missing file: %q, %v", diag, err)
	}
	if _, _, err = runRules(t, "", "check"); err == nil {
		t.Error("no file is accepted")
	}
}

func TestRulesExplain(t *testing.T) {
	file := writeFile(t, "my.rules", []byte(testRules))
	out, _, err := runRules(t, "", "explain", file)
	if err != nil || strings.Count(out, "UDP destination port") != 3 {
		t.Errorf("explains %s, %v", out, err)
	}
	out, _, err = runRules(t, "", "explain", file, "echo")
	if err != nil || !strings.HasPrefix(out, "1 echo: 3&0x") || !strings.Contains(out, "UDP destination port 7000, addressed to the interface itself") || strings.Contains(out, "7001") {
		t.Errorf("explains %s, %v", out, err)
	}
	if _, _, err = runRules(t, "", "explain", file, "ecco"); err == nil || !strings.Contains(err.Error(), "other, echo, files") {
		t.Errorf("an unknown name: %v", err)
	}
}

func TestRulesTest(t *testing.T) {
	file := writeFile(t, "my.rules", []byte(testRules))
	trace := writeFile(t, "trace.pcap", testCapture())
	out, diag, err := runRules(t, "", "test", "--engine", "reference", "--pcap", trace, file)
	if err != nil {
		t.Fatal(err)
	}
	want := `
  FRAME      LENGTH  VERDICT    RULESET  CONTEXT  EOM      OFFSET  KEY
      1          60  pass       -              -  -             -
      2          44  deliver    echo           1  yes           0
      3          54  deliver    files          2  yes        1408  0000c000 02010000 000003e8 00000007
      4       50/54  malformed  files          2  -             -
4 frames, engine reference: 2 deliver, 1 malformed, 1 pass
`
	if out != want[1:] {
		t.Errorf("prints\n%s\nwant\n%s", out, want[1:])
	}
	if !strings.Contains(diag, "1 of 4 frames cut short") {
		t.Errorf("diagnostics are %q", diag)
	}
}

func TestRulesCheckJSON(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"good": testRules, "bad": "a: udp\nb: 3&0xff=0x100\nc: 200=1\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
	out, diag, err := runRules(t, "", "check", "--json", "good", "bad", "none")
	if err == nil || err.Error() != "rules check: 2 of 3 files not valid" || diag != "" {
		t.Errorf("error %v, diagnostics %q", err, diag)
	}
	const want = `{
  "schema": 1,
  "files": [
    {
      "file": "good",
      "ok": true,
      "rulesets": 3,
      "errors": []
    },
    {
      "file": "bad",
      "ok": false,
      "rulesets": 0,
      "errors": [
        {
          "line": 2,
          "column": 11,
          "message": "value 0x00000100 has bits 0x00000100 outside mask 0x000000ff, so it can never be equal"
        },
        {
          "line": 3,
          "column": 4,
          "message": "word 200 is out of range: rules reach words 0 to 127, the first 512 bytes of the frame"
        }
      ]
    },
    {
      "file": "none",
      "ok": false,
      "rulesets": 0,
      "errors": [
        {
          "message": "open none: no such file or directory"
        }
      ]
    }
  ]
}
`
	if out != want {
		t.Errorf("prints\n%s\nwant\n%s", out, want)
	}
	if _, _, err := runRules(t, testRules, "check", "--json", "-"); err != nil {
		t.Errorf("a good file: %v", err)
	}
}

func TestRulesExplainJSON(t *testing.T) {
	const rules = "web: tcp(80)\nlow: 3&0xff=1:2\n"
	const want = `{
  "schema": 1,
  "rulesets": [
    {
      "number": 1,
      "name": "low",
      "text": "low: 3&0x000000ff=0x00000001:0x00000002",
      "words": "frames with byte 15 from 0x01 to 0x02. The context's message format decides which frame ends its message."
    }
  ]
}
`
	if out, _, err := runRules(t, rules, "explain", "--json", "-", "low"); err != nil || out != want {
		t.Errorf("error %v, prints\n%s\nwant\n%s", err, out, want)
	}
	out, _, err := runRules(t, rules, "explain", "--json", "-")
	if web, low := strings.Index(out, `"web"`), strings.Index(out, `"low"`); err != nil || web < 0 || low < web {
		t.Errorf("error %v, prints\n%s\nwant web, then low", err, out)
	}
	if out, _, err := runRules(t, "a: udq\n", "explain", "--json", "-"); err == nil || out != "" {
		t.Errorf("a bad file: error %v, prints %q", err, out)
	}
}

const wantJSON = `{
  "schema": 1,
  "engine": "ENGINE",
  "frames": [
    {
      "number": 1,
      "length": 60,
      "captured": 60,
      "verdict": "pass"
    },
    {
      "number": 2,
      "length": 44,
      "captured": 44,
      "verdict": "deliver",
      "ruleset": "echo",
      "context": 1,
      "eom": true,
      "offset": 0
    },
    {
      "number": 3,
      "length": 54,
      "captured": 54,
      "verdict": "deliver",
      "ruleset": "files",
      "context": 2,
      "eom": true,
      "key": [
        49152,
        33619968,
        1000,
        7
      ],
      "offset": 1408
    },
    {
      "number": 4,
      "length": 54,
      "captured": 50,
      "verdict": "malformed",
      "ruleset": "files",
      "context": 2
    }
  ]
}
`

func TestRulesTestJSON(t *testing.T) {
	file := writeFile(t, "my.rules", []byte(testRules))
	trace := writeFile(t, "trace.pcap", testCapture())
	out, _, err := runRules(t, "", "test", "--engine", "reference", "--json", "--pcap", trace, file)
	if want := strings.ReplaceAll(wantJSON, "ENGINE", "reference"); err != nil || out != want {
		t.Errorf("%v, prints\n%s\nwant\n%s", err, out, want)
	}
}

func TestRulesTestInTheKernel(t *testing.T) {
	netnstest.NeedRoot(t)
	file := writeFile(t, "my.rules", []byte(testRules))
	trace := writeFile(t, "trace.pcap", testCapture())
	for _, engine := range []string{"kernel", "auto"} {
		out, _, err := runRules(t, "", "test", "--engine", engine, "--json", "--pcap", trace, file)
		if want := strings.ReplaceAll(wantJSON, "ENGINE", "kernel"); err != nil || out != want {
			t.Errorf("%s: %v, prints\n%s\nwant\n%s", engine, err, out, want)
		}
	}
}

// picky decides about no frame of 44 bytes.
type picky struct {
	reference
	closed *bool
}

var errPicky = errors.New("not this one")

func (p picky) Verdict(frame []byte) (matcher.Verdict, error) {
	if len(frame) == 44 {
		return matcher.Verdict{}, errPicky
	}
	return p.reference.Verdict(frame)
}

func (p picky) Close() error {
	*p.closed = true
	return nil
}

func TestAFrameWithoutAVerdictIsShownAndAnError(t *testing.T) {
	closed := false
	old := newKernelEngine
	newKernelEngine = func(tab *matcher.Table) (verdictEngine, error) { return picky{reference{tab}, &closed}, nil }
	defer func() { newKernelEngine = old }()

	file := writeFile(t, "my.rules", []byte(testRules))
	trace := writeFile(t, "trace.pcap", testCapture())
	out, _, err := runRules(t, "", "test", "--engine", "kernel", "--json", "--pcap", trace, file)
	if !errors.Is(err, errPicky) || !strings.Contains(err.Error(), "1 of 4 frames without a verdict, the first: frame 2:") {
		t.Errorf("error is %v", err)
	}
	var doc struct{ Frames []frameVerdict }
	if err := json.Unmarshal([]byte(out), &doc); err != nil || len(doc.Frames) != 4 || doc.Frames[1].Error != errPicky.Error() {
		t.Errorf("%v, prints %s", err, out)
	}
	if !closed {
		t.Error("the engine is still open")
	}
}

func TestTheEngineIsChosen(t *testing.T) {
	works := func(*matcher.Table) (verdictEngine, error) { return picky{}, nil }
	fails := func(*matcher.Table) (verdictEngine, error) { return nil, errPicky }
	old := newKernelEngine
	defer func() { newKernelEngine = old }()
	for _, tt := range []struct {
		name, flag string
		root       bool
		kernel     func(*matcher.Table) (verdictEngine, error)
		want       string // "" for an error
		warns      bool
	}{
		{"auto as root", "auto", true, works, "kernel", false},
		{"auto as anybody", "auto", false, works, "reference", false},
		{"auto as root where it does not work", "auto", true, fails, "reference", true},
		{"kernel where it does not work", "kernel", true, fails, "", false},
		{"reference as root", "reference", true, works, "reference", false},
		{"a typing error", "colonel", true, works, "", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			newKernelEngine = tt.kernel
			var warn bytes.Buffer
			_, name, err := newEngine(tt.flag, tt.root, &matcher.Table{}, &warn)
			if name != tt.want || (err == nil) != (tt.want != "") || (warn.Len() > 0) != tt.warns {
				t.Errorf("engine %q, error %v, warning %q", name, err, &warn)
			}
		})
	}
}

func TestRulesTestErrors(t *testing.T) {
	file := writeFile(t, "my.rules", []byte(testRules))
	bad := writeFile(t, "bad.rules", []byte("a: udq\n"))
	trace := testCapture()
	good := writeFile(t, "trace.pcap", trace)
	for _, tt := range []struct {
		name, want string
		args       []string
	}{
		{"no capture named", `"pcap" not set`, []string{file}},
		{"no such capture", "no such file", []string{"--pcap", good + "x", file}},
		{"no capture", "neither pcap nor pcapng", []string{"--pcap", file, file}},
		{"no such rules", "no such file", []string{"--pcap", good, file + "x"}},
		{"bad rules", "1 error", []string{"--pcap", good, bad}},
		{"an unknown engine", `no engine "x"`, []string{"--pcap", good, "--engine", "x", file}},
		{"a cut capture", "after frame 3: capture file: damaged", []string{"--pcap", writeFile(t, "cut.pcap", trace[:len(trace)-1]), "--engine", "reference", file}},
		{"a capture on any", "link type 113", []string{"--pcap", writeFile(t, "any.pcap", pcapFile(113, frameOf{make([]byte, 60), 60})), file}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, _, err := runRules(t, "", append([]string{"test"}, tt.args...)...)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error is %v, want %q", err, tt.want)
			}
		})
	}
}

type frameOf struct {
	data   []byte
	length int
}

// pcapFile makes a capture.
func pcapFile(link layers.LinkType, frames ...frameOf) []byte {
	var b bytes.Buffer
	w := pcapgo.NewWriter(&b)
	_ = w.WriteFileHeader(262144, link)
	for _, f := range frames {
		_ = w.WritePacket(gopacket.CaptureInfo{CaptureLength: len(f.data), Length: f.length}, f.data)
	}
	return b.Bytes()
}
