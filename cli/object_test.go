// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/xspin/xspin/internal/pcapng"
	"github.com/xspin/xspin/loader/objecttest"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/packet"
)

// object runs `xspin object` with arguments.
func object(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	var out, diag bytes.Buffer
	err = xspin(t.Context(), nil, &out, &diag, append([]string{"object"}, args...)...)
	return out.String(), diag.String(), err
}

// A new folder compiles with its own Makefile, and its example is one that xspin takes.
func TestNewObject(t *testing.T) {
	netnstest.NeedRoot(t)
	dir := filepath.Join(t.TempDir(), "a", "b")
	out, _, err := object(t, "new", dir)
	if err != nil || strings.Count(out, "written  "+dir) != 6 {
		t.Fatalf("%q, %v", out, err)
	}
	make := func() string {
		t.Helper()
		cmd := exec.Command("make", "-C", dir)
		cmd.Env = append(os.Environ(), "MAKEFLAGS=")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("make: %v\n%s", err, out)
		}
		return string(out)
	}
	if out := make(); strings.Contains(out, "warning") {
		t.Errorf("make: %s", out)
	}
	file := filepath.Join(dir, "echo.bpf.o")
	out, _, err = object(t, "check", file)
	want := regexp.MustCompile(`^\Q` + file + `\E
  handlers      payload
  hooks         xdp, tc
  maps          none
  parameters    port = 7: whole number, 0 to 65535
  instructions  \d+ at xdp, \d+ at tc, which took the verifier \d+ and \d+ steps
$`)
	if err != nil || !want.MatchString(out) {
		t.Errorf("prints\n%s%v", out, err)
	}

	// What somebody has written stays; headers become this version's.
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("xspin_handler.h", "old\n")
	write("Makefile", "all:\n\techo mine\n")
	if err := os.Remove(filepath.Join(dir, "sum.bpf.c")); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(dir, "echo.bpf.c"), filepath.Join(dir, "mine.bpf.c")); err != nil {
		t.Fatal(err)
	}
	out, _, err = object(t, "new", dir)
	if err != nil || strings.Count(out, "written ") != 3 || !strings.Contains(out, "stays    "+filepath.Join(dir, "Makefile")) {
		t.Errorf("again: %q, %v", out, err)
	}
	if !strings.Contains(make(), "mine") {
		t.Error("the Makefile did not stay")
	}
	if _, err := os.Stat(filepath.Join(dir, "echo.bpf.c")); err == nil {
		t.Error("the example came back")
	}
	if b, _ := os.ReadFile(filepath.Join(dir, "xspin_handler.h")); !bytes.Contains(b, []byte("XSPIN_VERSION")) {
		t.Error("the header stayed")
	}
	if _, _, err := object(t, "new", file); err == nil || !strings.HasPrefix(err.Error(), "object new: ") {
		t.Errorf("a file instead of a folder: %v", err)
	}
}

const objectSource = `#include "xspin_handler.h"
const volatile __u16 port = 7;
XSPIN_PAYLOAD
{
	struct xspin_headers h;
	__u64 *n = xspin_memory(8, 8), *own = xspin_hpu_memory(her, 0, 8);
	__u16 to;

	xspin_headers(ctx, her, &h);
	if (!n || !own)
		return XSPIN_SEGV;
	if (!h.udp || xspin_load(ctx, h.udp + 2, &to, 2))
		return xspin_to_stack(her);
	if (to == bswap16(1))
		return XSPIN_FAIL;
	if (to != bswap16(port))
		return XSPIN_DROP;
	xspin_count(3, 10);
	return xspin_reply_udp(ctx, her) ? xspin_send(her) : XSPIN_DROP;
}
XSPIN_CONTEXT(PAYLOAD);
XSPIN_LICENSE("GPL");
`

func TestObjectCheckOnCapture(t *testing.T) {
	netnstest.NeedRoot(t)
	file := writeFile(t, "mine.o", objecttest.Compile(t, objectSource))
	arp := make([]byte, 60)
	arp[12], arp[13] = 0x08, 0x06
	long := udpFrame(7, make([]byte, 100)...)
	trace := writeFile(t, "trace.pcap", pcapFile(1,
		frameOf{arp, len(arp)}, frameOf{udpFrame(7, 'h', 'i'), 44}, frameOf{udpFrame(8), 42},
		frameOf{long[:60], len(long)}, frameOf{udpFrame(1), 42},
	))
	out, diag, err := object(t, "check", file, "-r", trace)
	_, table, _ := strings.Cut(out, "\n\n")
	want := `
  FRAME      LENGTH  VERDICT    CODE
      1          60  stack      Success
      2          44  send       Success
      3          42  drop       Drop
      4      60/142  stack      Success
      5          42  drop       Fail, from the payload handler
5 frames: 1 send, 2 drop, 2 stack, 0 malformed; handlers failed on 1
user counter 3: sum 10, count 1
`
	if err != nil || table != want[1:] {
		t.Errorf("prints\n%s\nwant\n%s%v", table, want, err)
	}
	if !strings.Contains(diag, "1 of 5 frames cut short") {
		t.Errorf("diagnostics: %q", diag)
	}
	out, _, err = object(t, "check", file, "-r", trace, "--param", "port=8", "--format", "flow", "--json")
	var doc objectReport
	if err != nil || json.Unmarshal([]byte(out), &doc) != nil {
		t.Fatalf("%s %v", out, err)
	}
	if doc.Schema != 1 || len(doc.Frames) != 5 || doc.Frames[1].Verdict != "drop" || doc.Frames[2].Verdict != "send" || doc.Frames[4].Failed != "payload" || doc.User[0].Number != 3 || doc.Verified == 0 {
		t.Errorf("%s", out)
	}
	short := writeFile(t, "short.pcap", pcapFile(1, frameOf{make([]byte, 10), 10}, frameOf{make([]byte, 20), 20}))
	out, _, err = object(t, "check", file, "-r", short, "--format", "flow")
	if err == nil || !strings.Contains(err.Error(), "1 of 2 frames without a verdict") || !strings.Contains(out, "      2          20  malformed\n") {
		t.Errorf("%s %v", out, err)
	}
}

// readCapture returns all frames of a capture.
func readCapture(t *testing.T, name string) (frames []pcapng.Frame) {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	c, err := pcapng.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	for {
		var g pcapng.Frame
		if err := c.Next(&g); err == io.EOF {
			return frames
		} else if err != nil {
			t.Fatal(err)
		}
		g.Data = bytes.Clone(g.Data)
		frames = append(frames, g)
	}
}

// What the handlers make of a frame is in a capture, not only what becomes of it.
func TestObjectCheckWritesTheFrames(t *testing.T) {
	netnstest.NeedRoot(t)
	file := writeFile(t, "mine.o", objecttest.Compile(t, objectSource))
	arp := make([]byte, 60)
	arp[12], arp[13] = 0x08, 0x06
	long := udpFrame(7, make([]byte, 100)...)
	trace := writeFile(t, "trace.pcap", pcapFile(1,
		frameOf{udpFrame(8), 42}, frameOf{udpFrame(7, 'h', 'i'), 44}, frameOf{arp, len(arp)}, frameOf{udpFrame(1), 42}, frameOf{long[:60], len(long)},
	))
	to := filepath.Join(t.TempDir(), "after.pcapng")
	if _, _, err := object(t, "check", file, "-r", trace, "-w", to); err != nil {
		t.Fatal(err)
	}
	frames := readCapture(t, to)
	if len(frames) != 3 {
		t.Fatalf("%d frames, want 3", len(frames))
	}
	next := func(comment string, direction pcapng.Direction, length int) []byte {
		t.Helper()
		g := frames[0]
		frames = frames[1:]
		if len(g.Comments) != 1 || g.Comments[0] != comment || g.Direction != direction || g.Length != length {
			t.Errorf("%q, direction %d, %d bytes; want %q, %d, %d", g.Comments, g.Direction, g.Length, comment, direction, length)
		}
		return g.Data
	}
	asked := udpFrame(7, 'h', 'i')
	if got := next("frame 2: send", pcapng.Out, 44); !bytes.Equal(got[:6], asked[6:12]) || !bytes.Equal(got[34:36], asked[36:38]) || !bytes.Equal(got[42:], asked[42:]) {
		t.Errorf("the answer is\n%x, asked was\n%x", got, asked)
	}
	if got := next("frame 3: stack", pcapng.In, 60); !bytes.Equal(got, arp) {
		t.Errorf("a frame that was left alone is\n%x", got)
	}
	next("frame 5: stack", pcapng.In, len(long))
	// The capture itself stays what it is, by whatever name.
	if err := os.Symlink(trace, to+"l"); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"-w", to}, {"-r", trace, "-w", to + "l"}} {
		if _, _, err := object(t, append([]string{"check", file}, args...)...); err == nil || !strings.Contains(err.Error(), "--pcap") {
			t.Errorf("%v: %v", args, err)
		}
	}
}

// object check lists an object's own maps as they would be in a context.
func TestObjectCheckListsMaps(t *testing.T) {
	netnstest.NeedRoot(t)
	file := writeFile(t, "mine.o", objecttest.Compile(t, `#include "xspin_handler.h"
struct { __uint(type, BPF_MAP_TYPE_HASH); __uint(max_entries, 16); __type(key, __u32); __type(value, __u64); } seen SEC(".maps");
static volatile __u32 last;
XSPIN_PAYLOAD { __u32 k = last = her->len; return bpf_map_lookup_elem(&seen, &k) ? XSPIN_DROP : XSPIN_SUCCESS; }
XSPIN_CONTEXT(PAYLOAD);
XSPIN_LICENSE("GPL");
`))
	want := regexp.MustCompile("(?m)^  maps          \\d+ for each context\n                \\.bss: global variables, 4 bytes\n                seen: hash, keys of 4 bytes, values of 8, 16 entries\n  instructions")
	if out, _, err := object(t, "check", file); err != nil || !want.MatchString(out) {
		t.Errorf("%s%v", out, err)
	}
	out, _, err := object(t, "check", file, "--json")
	var doc objectReport
	if err != nil || json.Unmarshal([]byte(out), &doc) != nil || !slices.Equal(doc.Maps, []string{"seen"}) || len(doc.OwnMaps) != 2 || doc.OwnMaps[1].Entries != 16 {
		t.Errorf("%s%v", out, err)
	}
}

// object check says at which hooks an object runs, and what is against the others.
func TestObjectCheckShowsHooks(t *testing.T) {
	netnstest.NeedRoot(t)
	const licence = "XSPIN_LICENSE(\"GPL\");\n"
	for _, tc := range []struct {
		name, source, want string
		hooks              []objectHook
	}{
		{"both", "#include \"xspin_handler.h\"\nXSPIN_PAYLOAD { return XSPIN_DROP; }\nXSPIN_CONTEXT(PAYLOAD);\n",
			"  hooks         xdp, tc\n  maps ", []objectHook{{Hook: "xdp"}, {Hook: "tc"}}},
		{"both, and trains", "#include \"xspin_handler.h\"\nXSPIN_PAYLOAD { return XSPIN_DROP; }\nXSPIN_CONTEXT(PAYLOAD | TRAINS);\n",
			"  hooks         xdp, tc\n  trains        whole, as the frame that each is at tc\n  maps ", []objectHook{{Hook: "xdp"}, {Hook: "tc"}}},
		{"both, of messages", "#include \"xspin_message.h\"\nXSPIN_HEADER { return XSPIN_PROCEED; }\nXSPIN_MESSAGES(HEADER);\n",
			"  hooks         xdp, tc\n  maps ", []objectHook{{Hook: "xdp"}, {Hook: "tc"}}},
		{"xdp alone", "#include \"xspin_handler.h\"\nXSPIN_HEADER { return ctx->ingress_ifindex & 1; }\nXSPIN_PAYLOAD { return ctx->rx_queue_index & 1; }\nXSPIN_CONTEXT(HEADER | PAYLOAD);\n",
			"  hooks         xdp\n                not tc: xspin_header, line 2: reads ctx->ingress_ifindex, and at tc it is another structure: it is for functions of xspin_handler.h alone\n" +
				"                not tc: xspin_payload, line 3: reads ctx->rx_queue_index, and at tc it is another structure: it is for functions of xspin_handler.h alone\n  maps ",
			[]objectHook{{Hook: "xdp"}, {Hook: "tc", Why: []string{
				"xspin_header, line 2: reads ctx->ingress_ifindex, and at tc it is another structure: it is for functions of xspin_handler.h alone",
				"xspin_payload, line 3: reads ctx->rx_queue_index, and at tc it is another structure: it is for functions of xspin_handler.h alone"}}}},
	} {
		file := writeFile(t, "hooks.o", objecttest.Compile(t, tc.source+licence))
		out, _, err := object(t, "check", file)
		if err != nil || !strings.Contains(out, tc.want) {
			t.Errorf("%s: %s%v\nwant\n%s", tc.name, out, err, tc.want)
		}
		out, _, err = object(t, "check", file, "--json")
		var doc objectReport
		if err != nil || json.Unmarshal([]byte(out), &doc) != nil || len(doc.Hooks) != len(tc.hooks) || doc.Trains != strings.Contains(tc.want, "trains") {
			t.Errorf("%s: %s%v", tc.name, out, err)
			continue
		}
		for i, at := range doc.Hooks {
			if want := tc.hooks[i]; at.Hook != want.Hook || !slices.Equal(at.Why, want.Why) || (at.Verified > 0) != (want.Why == nil) || (at.Instructions > 0) != (want.Why == nil) {
				t.Errorf("%s: %+v, want %+v", tc.name, at, want)
			}
		}
	}
}

// All files are checked, whichever are refused, and each error names its file.
func TestObjectCheckOfSeveralFiles(t *testing.T) {
	netnstest.NeedRoot(t)
	good := writeFile(t, "good.o", objecttest.Compile(t, objectSource))
	other := writeFile(t, "other.o", objecttest.Compile(t, strings.ReplaceAll(objectSource, "port", "prot")))
	late := writeFile(t, "late.o", objecttest.Compile(t, "#include \"xspin_handler.h\"\nXSPIN_PAYLOAD { return *(__u8 *)(long)ctx->data; }\nXSPIN_CONTEXT(PAYLOAD);\nXSPIN_LICENSE(\"GPL\");\n"))
	for _, tc := range []struct {
		name        string
		args        []string
		shown, errs []string // beginnings
	}{
		{"all are accepted", []string{good, other}, []string{good, other}, nil},
		{"the first and the last are refused", []string{"object_test.go", good, late}, []string{good}, []string{"object_test.go: ", "load " + late + ": "}},
		{"a file is missing", []string{good + "x", other}, []string{other}, []string{"open " + good + "x: "}},
		{"one does not have a parameter", []string{good, other, "--param", "prot=1"}, []string{other}, []string{good + `: param "prot": `}},
		{"each lacks a parameter, and one has a wrong value", []string{good, other, "--param", "prot=1", "--param", "port=x"}, nil,
			[]string{good + `: param "prot": `, good + `: param "port": `, other + `: param "port": `}},
		{"a flag is wrong", []string{good, other, "--memory", "lots"}, nil, []string{"--memory lots: "}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			out, _, err := object(t, append([]string{"check"}, tc.args...)...)
			var shown []string
			for _, text := range strings.Split(out, "\n\n") {
				if file, _, ok := strings.Cut(text, "\n"); ok {
					shown = append(shown, file)
				}
			}
			if !slices.Equal(shown, tc.shown) {
				t.Errorf("shows %q, want %q", shown, tc.shown)
			}
			errs := []string{}
			if err != nil {
				errs = strings.Split(strings.TrimPrefix(err.Error(), "object check: "), "\n")
				if len(errs) > 1 {
					errs = errs[1:] // the first says how many
				}
			}
			if !slices.EqualFunc(errs, tc.errs, strings.HasPrefix) {
				t.Errorf("%v\nwant errors that begin with %q", err, tc.errs)
			}
		})
	}
	out, _, err := object(t, "check", good, late, other, "--json")
	var doc struct {
		Schema  int
		Objects []objectReport
	}
	if err == nil || json.Unmarshal([]byte(out), &doc) != nil || doc.Schema != 1 || len(doc.Objects) != 2 || doc.Objects[1].File != other {
		t.Errorf("%s%v", out, err)
	}
	if _, _, err := object(t, "check", good, other, "-r", good, "-w", good+"w"); err == nil || !strings.Contains(err.Error(), "--write goes with one FILE") {
		t.Errorf("--write of several: %v", err)
	}
}

func TestObjectCheckRefuses(t *testing.T) {
	netnstest.NeedRoot(t)
	file := writeFile(t, "mine.o", objecttest.Compile(t, objectSource))
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"check", file + "x"}, "no such file"},
		{[]string{"check", "object_test.go"}, "object_test.go: not an object that XsPIN takes: it is not an ELF object file (is it the C source?)"},
		{[]string{"check", file, "--format", "slmp"}, "packet"},
		{[]string{"check", file, "--param", "port"}, "want NAME=VALUE"},
		{[]string{"check", file, "--param", "prot=1"}, `param "prot": no such parameter: there are port (whole number, 0 to 65535)`},
		{[]string{"check", file, "--param", "port=70000"}, `param "port": 70000: want whole number, 0 to 65535`},
		{[]string{"check", file, "--memory", "lots"}, "memory"},
		{[]string{"check", file, "--memory", "0"}, "--memory 0: want at least 1 byte"},
		{[]string{"check", file, "--hpu-memory", "0"}, "--hpu-memory 0: want at least 1 byte"},
		{[]string{"check", file, "--param", "prot=1", "--param", "port=70000"}, "prot\": no such parameter: there are port (whole number, 0 to 65535)\n" + file + ": param \"port\": 70000"},
		{[]string{"check", file, "-r", file + "x"}, "no such file"},
		{[]string{"check", file, "-r", file}, file + ": "},
	} {
		_, _, err := object(t, tc.args...)
		if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.HasPrefix(err.Error(), "object check: ") && tc.args[2] != "--format" {
			t.Errorf("%v: %v, want %q", tc.args, err, tc.want)
		}
	}
}

// Without root it says what is wrong with the file, and then who may ask the verifier.
func TestObjectCheckNeedsRoot(t *testing.T) {
	netnstest.NeedRoot(t)
	dir, err := os.MkdirTemp("", "check")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	good, bad := filepath.Join(dir, "good.o"), filepath.Join(dir, "bad.o")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(good, objecttest.Compile(t, objectSource), 0o644), os.WriteFile(bad, []byte("#include"), 0o644)); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{good: "object check: ask the kernel's verifier: missing capability CAP_NET_ADMIN, CAP_BPF, CAP_PERFMON: run it as root", bad: "it is not an ELF object file"} {
		cmd := exec.Command("/proc/self/exe", "object", "check", file)
		cmd.Env = append(os.Environ(), "XSPIN_TEST_DAEMON=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), want) {
			t.Errorf("%s%v, want %q", out, err, want)
		}
	}
}

// The handler of docs/kernel-handlers.md does what the page says, and the page shows all
// that the header has.
func TestKernelHandlersOfTheDocuments(t *testing.T) {
	netnstest.NeedRoot(t)
	doc, err := os.ReadFile("../docs/kernel-handlers.md")
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for _, m := range block.FindAllStringSubmatch(string(doc), -1) {
		files[m[1]] = writeFile(t, m[1], objecttest.Compile(t, m[2]))
	}
	if len(files) != 4 || files["split.bpf.c"] == "" || files["lengths.bpf.c"] == "" || files["stamp.bpf.c"] == "" || files["deposit.bpf.c"] == "" {
		t.Fatalf("files of the page: %q", files)
	}
	trace := writeFile(t, "trace.pcap", pcapFile(1, frameOf{udpFrame(7, 'h', 'i'), 44}))
	var out bytes.Buffer
	if err := xspin(t.Context(), nil, &out, io.Discard, "object", "check", files["lengths.bpf.c"], "-r", trace, "--param", "width=1"); err != nil || !strings.Contains(out.String(), "stack      Success") {
		t.Errorf("%s%v", out.String(), err)
	}
	checkStamps(t, files["stamp.bpf.c"])
	if out, _, err := object(t, "check", files["deposit.bpf.c"]); err != nil {
		t.Errorf("%s%v", out, err)
	}
	cost := regexp.MustCompile(`\d ns\b|\bFree\.|at the same cost`)
	for name, most := range map[string]int{"xspin_handler.h": 13, "xspin_message.h": 9} {
		header, err := os.ReadFile("../bpf/include/" + name)
		if err != nil {
			t.Fatal(err)
		}
		_, calls, _ := strings.Cut(string(header), "--- what handlers ")
		internal := regexp.MustCompile(`^xspin_(answerable|forget|sum_frame|ipv4_right|swap|csum_diff|window|window_frame|window_move|window_add|window_cas|log_line)$`)
		costs := map[string]string{} // the comments of functions
		for _, m := range regexp.MustCompile(`(?m)^/\*((?:[^*]|\*[^/])*)\*/\n(?:static __always_inline [^(]*?|#define |XSPIN_API\([^,]*, )(xspin_\w+)[(,]`).FindAllStringSubmatch(calls, -1) {
			costs[m[2]] = m[1]
		}
		found := 0
		for _, m := range regexp.MustCompile(`(?m)^(?:static __always_inline [^(]*?|#define |XSPIN_API\([^,]*, )(xspin_\w+)[(,]`).FindAllStringSubmatch(calls, -1) {
			if internal.MatchString(m[1]) {
				continue
			}
			found++
			if !strings.Contains(string(doc), "`"+m[1]+"(") {
				t.Errorf("the page lacks %s", m[1])
			}
			if !cost.MatchString(costs[m[1]]) {
				t.Errorf("%s does not say what %s costs: %q", name, m[1], costs[m[1]])
			}
		}
		if found < most {
			t.Errorf("%d functions in %s", found, name)
		}
	}
	// And Linux's helpers: those that are declared are those that may be called (see the
	// tests of loader), and the page lists them.
	declarations, err := os.ReadFile("../bpf/include/xspin_kernel.h")
	if err != nil {
		t.Fatal(err)
	}
	var helpers []string
	for _, m := range regexp.MustCompile(`\(\*const (bpf_\w+)\)`).FindAllStringSubmatch(string(declarations), -1) {
		helpers = append(helpers, m[1])
	}
	header, err := os.ReadFile("../bpf/include/xspin_handler.h")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`#define (bpf_\w+) xspin_`).FindAllStringSubmatch(string(header), -1) {
		helpers = append(helpers, m[1])
	}
	_, list, _ := strings.Cut(string(doc), "some helpers of Linux may be called: ")
	list, _, _ = strings.Cut(list, "`xspin_kernel.h`")
	var listed []string
	for _, m := range regexp.MustCompile("`(\\w+)`").FindAllStringSubmatch(list, -1) {
		listed = append(listed, m[1])
	}
	slices.Sort(helpers)
	slices.Sort(listed)
	if !slices.Equal(helpers, listed) || len(helpers) < 12 {
		t.Errorf("the page lists the helpers\n%v, and xspin_kernel.h declares\n%v", listed, helpers)
	}
}

// checkStamps has the handler of the page change datagrams with and without a checksum.
func checkStamps(t *testing.T, file string) {
	t.Helper()
	var frames []frameOf
	for _, payload := range []string{"12345678", "123456789", "\x00\x00\x00\x00\x00\x00\x00\x00", "without a checksum", "a longer one, of no even length"} {
		f := udpFrame(7, []byte(payload)...)
		h := packet.Parse(f, len(f))
		if payload != "without a checksum" {
			sum, ok := h.UDPChecksum()
			if !ok {
				t.Fatal("no checksum")
			}
			h.UDP.SetChecksum(sum)
		}
		frames = append(frames, frameOf{f, len(f)})
	}
	short := udpFrame(7, 'h', 'i')
	frames = append(frames, frameOf{short, len(short)})
	to := filepath.Join(t.TempDir(), "after.pcapng")
	if out, _, err := object(t, "check", file, "-r", writeFile(t, "trace.pcap", pcapFile(1, frames...)), "-w", to); err != nil || !strings.Contains(out, "6 frames: 5 send, 0 drop, 1 stack") {
		t.Fatalf("%s%v", out, err)
	}
	answers := readCapture(t, to)
	if len(answers) != 6 {
		t.Fatalf("%d frames, want 6", len(answers))
	}
	for i, asked := range frames[:5] {
		answer := answers[i]
		was, h := packet.Parse(asked.data, len(asked.data)), packet.Parse(answer.Data, len(answer.Data))
		if !h.UDPChecksumValid() || (h.UDP.Checksum() == 0) != (was.UDP.Checksum() == 0) {
			t.Errorf("checksum %#04x of\n%x", h.UDP.Checksum(), answer.Data)
		}
		// Little-endian ns since the machine has started.
		if at := binary.LittleEndian.Uint64(answer.Data[42:]); at == 0 || at > 1<<56 || !bytes.Equal(answer.Data[50:], asked.data[50:]) {
			t.Errorf("time %d in\n%x", at, answer.Data)
		}
	}
}

// What the page says of the verifier's words: each is what this handler is refused with, and
// what is to be written instead is accepted.
func TestVerifiersWordsOfTheDocuments(t *testing.T) {
	netnstest.NeedRoot(t)
	doc, err := os.ReadFile("../docs/kernel-handlers.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(doc), "| the error says | write |\n")
	table, _, _ = strings.Cut(table, "\n\n")
	const array = "__u8 b[16] = {}, i = 0; __u32 n = her->payload_len; if (xspin_load(ctx, 0, b, 16) || xspin_load(ctx, 20, &i, 1)) return XSPIN_DROP; "
	const frame = "__u8 *p = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end; "
	for _, tc := range []struct{ says, bad, good string }{
		{"invalid mem access", "__u64 *n = xspin_memory(0, 8); *n += 1; return 0;", "__u64 *n = xspin_memory(0, 8); if (!n) return XSPIN_SEGV; *n += 1; return 0;"},
		{"offset is outside of the packet", frame + "p += her->payload; return p + 4 <= end ? p[3] : 0;", frame + "p += her->payload & 127; return p + 4 <= end ? p[3] : 0;"},
		{"variable-offset read from stack", array + "return b[i] + n;", array + "return b[i & 15] + n;"},
		{"invalid zero-sized read", array + "if (n > sizeof(b)) return XSPIN_DROP; return xspin_load(ctx, 14, b, n) + b[i & 15];",
			array + "n &= 15; if (!n) return XSPIN_DROP; return xspin_load(ctx, 14, b, n) + b[i & 15];"},
		{"unbounded memory access", array + "if (n < 1) return XSPIN_DROP; return xspin_load(ctx, 14, b, n) + b[i & 15];", ""},
		{"bitwise operator &= on pointer", "__u8 *p = xspin_memory(0, 64); if (!p) return XSPIN_SEGV; return *(__u8 *)((long)(p + 9) & ~7L);",
			"__u8 *p = xspin_memory(0, 64); if (!p) return XSPIN_SEGV; return p[her->len & 56];"},
		{"it may loop without end", "while (bpf_get_prandom_u32()) xspin_count(0, 1); return 0;", "for (__u32 i = 0; i < 64 && i < her->len; i++) if (!bpf_get_prandom_u32()) break; return 0;"},
		{"combined stack size of 2 calls", "__u8 b[400]; if (xspin_load(ctx, 0, b, 400)) return XSPIN_DROP; for (int i = 0; i < 400; i += 8) xspin_count(i & 7, b[i]); return 0;",
			"__u8 b[176]; if (xspin_load(ctx, 0, b, 176)) return XSPIN_DROP; for (int i = 0; i < 176; i += 8) xspin_count(i & 7, b[i]); return 0;"},
	} {
		check := func(body string) error {
			o := objecttest.Compile(t, "#include \"xspin_handler.h\"\nXSPIN_PAYLOAD { (void)her; "+body+" }\nXSPIN_CONTEXT(PAYLOAD);\nXSPIN_LICENSE(\"GPL\");\n")
			_, _, err := object(t, "check", writeFile(t, "mine.o", o))
			return err
		}
		if !strings.Contains(table, "`"+tc.says+"`") {
			t.Errorf("the page lacks %s", tc.says)
		}
		// Linux 7 has other words for some.
		if err := check(tc.bad); err == nil || strings.Contains(err.Error(), "(Linux 6.") && !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: %v", tc.says, err)
		}
		if tc.good == "" {
			continue
		}
		if err := check(tc.good); err != nil {
			t.Errorf("instead of %s: %v", tc.says, err)
		}
	}
	if rows := strings.Count(table, "\n| "); rows != 8 {
		t.Errorf("the table has %d rows", rows)
	}
}
