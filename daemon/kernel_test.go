// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/internal/capability"
	"github.com/xspin/xspin/internal/pcapng"
	"github.com/xspin/xspin/loader/objecttest"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
)

const inKernel = "kernel: administrators\n"

// counting compiles handlers that count packets in HPU memory, by so much each.
func counting(t *testing.T, by int) []byte {
	t.Helper()
	return objecttest.Compile(t, fmt.Sprintf(`#include "xspin_handler.h"

const volatile __u32 twice = 0;

XSPIN_PAYLOAD
{
	__u64 *all = xspin_memory(8, 8), *mine = xspin_hpu_memory(her, 0, 8);

	if (!all || !mine)
		return XSPIN_SEGV;
	__sync_fetch_and_add(all, twice ? 2 * %[1]d : %[1]d);
	++*mine;
	return xspin_reply_udp(ctx, her) ? xspin_send(her) : XSPIN_DROP;
}

XSPIN_CONTEXT(PAYLOAD);
XSPIN_LICENSE("GPL");
`, by))
}

// handsLong compiles handlers that hand messages over that are longer than 5 bytes.
func handsLong(t *testing.T) []byte {
	t.Helper()
	return handlersOf(t, `const volatile __u32 most = 5;

XSPIN_HEADER { return her->payload_len > most ? XSPIN_HAND_OVER : XSPIN_PROCEED; }

XSPIN_MESSAGES(HEADER | HAND_OVER);
`)
}

// shown returns what the daemon tells of a context.
func (f *fixture) shown(t *testing.T, name string) *control.ContextInfo {
	t.Helper()
	i, err := f.info(name)
	must(t, err)
	return i
}

// A file has contexts in the kernel, of built-in handlers and of an object beside it;
// a reload sees when the object has changed.
func TestContextsInTheKernel(t *testing.T) {
	const text = inKernel + `contexts:
- {name: ping, tier: kernel, handler: echo-icmp}
- {name: echo, tier: kernel, hook: tc, handler: echo-udp, params: {port: 9}}
- name: mine
  tier: kernel
  hook: xdp
  object: mine.o
  params: {twice: 1}
  rulesets: "mine: udp(7)"
  memory: 64
  hpu_memory: 24
`
	f := launchBeside(t, text, map[string][]byte{"mine.o": counting(t, 1)})
	w, err := f.lab.Host.Wire()
	must(t, err)
	t.Cleanup(func() { w.Close() })
	f.answers(t, 7)
	f.answers(t, 9)
	if out, err := f.lab.Host.NS.Command(context.Background(), "ping", "-c", "3", "-i", "0.01", f.lab.NIC.Addr.Addr().String()).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	for name, want := range map[string]uint64{"ping": 3, "echo": 1, "mine": 1} {
		i := f.shown(t, name)
		sum := uint64(0)
		for _, n := range i.CPUs {
			sum += n
		}
		if i.State != active || i.Tier != tierKernel || i.At != map[string]string{"ping": "tc", "echo": "tc", "mine": "xdp"}[name] || i.HandlerStats.Handled < want || sum != i.HandlerStats.Handled || i.HandlerStats.Failed != 0 {
			t.Errorf("%s: %+v", name, i)
		}
	}
	mtu := func(bytes string) {
		t.Helper()
		if out, err := f.lab.NIC.NS.Command(context.Background(), "ip", "link", "set", f.lab.NIC.Device, "mtu", bytes).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	mtu("9000")
	eventually(t, "it is told that frames may be too long", func() bool {
		w := f.shown(t, "mine").Warnings
		return len(w) == 1 && strings.Contains(w[0], "the MTU of 9000 lets frames come in several buffers")
	})
	mtu("1500")
	eventually(t, "it is not told any more", func() bool { return f.shown(t, "mine").Warnings == nil })
	i := f.shown(t, "mine")
	if i.Object == nil || i.Object.Name != "mine.o" || i.Object.Code != nil || i.HPUMemory != 32 || i.Reserved["maps"] <= 0 {
		t.Errorf("object %v, %v for each HPU, reserved %v", i.Object, i.HPUMemory, i.Reserved)
	}
	count := func() (n uint64) {
		must(t, f.withMemory("mine", -1, func(b []byte) error {
			n = binary.NativeEndian.Uint64(b[8:])
			return nil
		}))
		return n
	}
	if n := count(); n != 2*i.HandlerStats.Handled {
		t.Errorf("%d is counted of %d packets, want twice as much", n, i.HandlerStats.Handled)
	}
	mine := uint64(0)
	for hpu := range len(i.CPUs) {
		must(t, f.withMemory("mine", hpu, func(b []byte) error {
			mine += binary.NativeEndian.Uint64(b)
			return nil
		}))
	}
	if mine != i.HandlerStats.Handled {
		t.Errorf("the HPUs count %d, want %d", mine, i.HandlerStats.Handled)
	}
	err = f.capture(context.Background(), 0, "mine", control.CaptureOptions{}, &bytes.Buffer{})
	fails(t, "capture", err, errInvalid, "in the kernel")

	// Unchanged, then changed on disk.
	if changes, err := f.Reload(); err != nil || len(changes) != 0 {
		t.Errorf("reload: %v, %v; want nothing", changes, err)
	}
	must(t, os.WriteFile(filepath.Join(filepath.Dir(f.file), "mine.o"), counting(t, 100), 0o644))
	if changes, err := f.Reload(); err != nil || strings.Join(changes, ";") != "context mine changed: began anew" {
		t.Errorf("reload: %v, %v; want mine to change", changes, err)
	}
	f.answers(t, 7)
	if n := count(); n == 0 || n%200 != 0 {
		t.Errorf("%d is counted, want multiples of 200", n)
	}
	f.write(t, "kernel: 'off'\n")
	if _, err := f.Reload(); err == nil || !strings.Contains(err.Error(), "kernel has changed: that takes a restart") {
		t.Errorf("reload without kernel: %v", err)
	}
}

// Handlers in Go that keep state by slots are made for those that messages of theirs have.
func TestHandlersOfMessagesHandedOverKnowTheirSlots(t *testing.T) {
	for _, tt := range []struct {
		name, messages string
		slot, slots    int
	}{
		{"messages are not said", "", 256, 512},
		{"two at a time", "messages: 2, ", 2, 4},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := launchBeside(t, inKernel+"contexts:\n- {name: both, tier: kernel, object: hands.o, handler: test-slots, "+tt.messages+"rulesets: 'a: slmp', activate: start}\n",
				map[string][]byte{"hands.o": handsLong(t)})
			w, err := f.lab.Host.Wire()
			must(t, err)
			t.Cleanup(func() { w.Close() })
			lastSlots.Store(nil)
			must(t, f.send(t, []byte("longer than five")))
			if got := lastSlots.Load(); got == nil || *got != [2]int{tt.slot, tt.slots} {
				t.Errorf("slot and slots are %v, want %d and %d", got, tt.slot, tt.slots)
			}
		})
	}
}

// Of a context that hands messages over, a capture has what comes to HPUs, and what is sent
// from there.
func TestCaptureOfMessagesThatAreHandedOver(t *testing.T) {
	f := launchBeside(t, inKernel+"contexts:\n- {name: both, tier: kernel, object: hands.o, handler: deposit, rulesets: 'a: slmp', windows: [{name: in, size: 64KiB}], activate: start}\n",
		map[string][]byte{"hands.o": handsLong(t)})
	w, err := f.lab.Host.Wire()
	must(t, err)
	t.Cleanup(func() { w.Close() })
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	h, err := f.find("both")
	must(t, err)
	var out bytes.Buffer
	ended := make(chan error, 1)
	go func() { ended <- f.capture(ctx, 0, "both", control.CaptureOptions{HPU: -1}, &out) }()
	eventually(t, "the capture begins", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.tap != nil
	})
	const long = 3000
	must(t, f.send(t, []byte("short")))
	must(t, f.send(t, bytes.Repeat([]byte("l"), long)))
	cancel()
	must(t, <-ended)
	frames, lost := readCapture(t, out.Bytes())
	in, acks := 0, 0
	for _, g := range frames {
		switch {
		case g.Direction == pcapng.Out:
			acks++
		case strings.HasSuffix(g.Comments[0], " verdict=success"), strings.HasSuffix(g.Comments[0], " verdict=deposit"):
			in += bytes.Count(g.Data[52:], []byte("l"))
		default:
			t.Errorf("%s", g.Comments)
		}
	}
	if in != long || acks == 0 || lost != 0 {
		t.Errorf("%d frames have %d bytes of the message that was handed over, %d are answers, %d are lost", len(frames), in, acks, lost)
	}
	if i := f.shown(t, "both"); i.MessageStats.Ended != 2 {
		t.Errorf("%+v", i.MessageStats)
	}
}

// Messages of handlers in eBPF are those of SLMP if nobody says otherwise, and whoever has
// their windows hears of them: contexts that say as little as they can have a queue.
func TestMessagesOfObjectsComeToAnApplication(t *testing.T) {
	f := launchBeside(t, inKernel+`contexts:
- {name: mine, tier: kernel, object: deposit.o, windows: [{name: in, size: 64KiB}]}
- {name: both, tier: kernel, object: hands.o, handler: test-made, windows: [{name: in, size: 64KiB}]}
- {name: alone, tier: kernel, object: noop.o, rulesets: "m: slmp"}
`, map[string][]byte{"deposit.o": bpf.Handlers["deposit"], "hands.o": handsLong(t), "noop.o": bpf.Handlers["noop-messages"]})
	w, err := f.lab.Host.Wire()
	must(t, err)
	t.Cleanup(func() { w.Close() })
	if got := f.state(t, "alone"); got != active { // it has nothing to tell
		t.Errorf("alone is %s", got)
	}
	for _, name := range []string{"mine", "both"} {
		if got := f.state(t, name); got != installed {
			t.Errorf("%s is %s before anybody is attached", name, got)
		}
		a := f.admitted(t, name, root, false)
		p := open(t, a)
		if p.host == nil {
			t.Errorf("%s has no queue", name)
			continue
		}
		must(t, f.send(t, []byte("hello")))
		if e := p.event(t); e.Kind != hostq.MessageEnded || e.Length != 5 || string(p.windows["in"].Bytes()[:5]) != "hello" {
			t.Errorf("%s: event %+v", name, e)
		}
		left(a, "done")
	}
}

// Maps of an object's own are told with the context, also of one that hands messages over.
func TestOwnMapsAreShown(t *testing.T) {
	seen := "struct { __uint(type, BPF_MAP_TYPE_HASH); __uint(max_entries, 16); __type(key, __u32); __type(value, __u64); } seen SEC(\".maps\");\n"
	source := seen + "XSPIN_HEADER\n{\n\t__u32 k = her->payload_len;\n\t__u64 v = 1;\n\tbpf_map_update_elem(&seen, &k, &v, 0);\n\treturn XSPIN_PROCEED;\n}\n"
	f := launchBeside(t, inKernel+`contexts:
- {name: mine, tier: kernel, object: mine.o, windows: [{name: in, size: 64KiB}]}
- {name: both, tier: kernel, object: both.o, handler: test-made, windows: [{name: in, size: 64KiB}]}
- {name: ping, tier: kernel, handler: echo-icmp}
`, map[string][]byte{"mine.o": handlersOf(t, source+"XSPIN_MESSAGES(HEADER);\n"), "both.o": handlersOf(t, source+"XSPIN_MESSAGES(HEADER | HAND_OVER);\n")})
	for _, name := range []string{"mine", "both"} {
		all := f.shown(t, name).Maps
		if len(all) != 1 || all[0].Name != "seen" || all[0].ID == 0 || all[0].Used == nil || *all[0].Used != 0 || all[0].Entries != 16 {
			t.Errorf("%s: %+v", name, all)
		}
	}
	if all := f.shown(t, "ping").Maps; all != nil {
		t.Errorf("ping: %+v", all)
	}
}

// handlersOf compiles handlers of messages.
func handlersOf(t *testing.T, source string) []byte {
	t.Helper()
	return objecttest.Compile(t, "#include \"xspin_message.h\"\n"+source+"XSPIN_LICENSE(\"GPL\");\n")
}

// What is hardly meant of windows is a warning.
func TestWindowsThatAreHardlyMeant(t *testing.T) {
	dir := t.TempDir()
	for name, source := range map[string]string{
		"counts":   "XSPIN_PAYLOAD { xspin_count(0, her->payload_len); return XSPIN_SUCCESS; }\nXSPIN_MESSAGES(PAYLOAD);\n",
		"calls":    "XSPIN_PAYLOAD { return xspin_deposit(ctx, her); }\nXSPIN_MESSAGES(PAYLOAD);\n",
		"stores":   "static __noinline int store(__u64 n) { return xspin_window_store(0, 8, &n, 8); }\nXSPIN_PAYLOAD { return store(her->len); }\nXSPIN_MESSAGES(PAYLOAD);\n",
		"deposits": "XSPIN_HEADER { return XSPIN_SUCCESS; }\nXSPIN_MESSAGES(HEADER);\n",
	} {
		writeFile(t, filepath.Join(dir, name+".o"), string(handlersOf(t, source)))
	}
	const none = `the handlers use windows, and there is none, so that messages fail where they do: add one, such as "windows: [{name: in, size: 64MiB}]"`
	for _, tc := range []struct{ object, windows, want string }{
		{"counts", "", ""},
		{"calls", "", none},
		{"calls", "{name: a, size: 1}", ""},
		{"stores", "", none},
		{"counts", "{name: a, size: 1, rights: r}, {name: b, size: 1}", ""},
		{"deposits", "{name: a, size: 1}, {name: b, size: 1, rights: r}", ""},
		{"deposits", "{name: a, size: 1, rights: r}, {name: b, size: 1}", `messages go to b, the first that handlers may write, and not to a: put it first, or give a "rights: rw"`},
	} {
		cfg, bad := load(t, fmt.Sprintf("%s%scontexts:\n- {name: a, tier: kernel, object: %s/%s.o, windows: [%s]}\n", inKernel, eth, dir, tc.object, tc.windows))
		if bad != "" {
			t.Errorf("%s with %q: %s", tc.object, tc.windows, bad)
			continue
		}
		if got := strings.TrimPrefix(strings.Join(cfg.Warnings(), "\n"), "contexts[0].windows: "); got != tc.want {
			t.Errorf("%s with %q:\n%s\nwant\n%s", tc.object, tc.windows, got, tc.want)
		}
	}
}

// A memory that is shorter than senders are patient is a warning, at both tiers.
func TestMemoryThatIsTooShort(t *testing.T) {
	const why = "senders send a message again for up to 15s while no acknowledgement comes: after an outage of more than 4s handlers may run a second time for it. Want 20s or more, or leave it out"
	for _, tc := range []struct{ name, context, want string }{
		{"the default", "handler: deposit, windows: [{name: a, size: 64}]", ""},
		{"less", "handler: deposit, windows: [{name: a, size: 64}], remember: 4s", why},
		{"as much", "handler: deposit, windows: [{name: a, size: 64}], remember: 20s", ""},
		{"less in the kernel", "tier: kernel, handler: deposit, windows: [{name: a, size: 64}], remember: 4s", why},
		{"less, of messages that nobody acknowledges", "handler: count, rulesets: \"mine: udp(7)\", remember: 4s", ""},
	} {
		cfg, bad := load(t, fmt.Sprintf("%s%scontexts:\n- {name: a, %s}\n", inKernel, eth, tc.context))
		if bad != "" {
			t.Errorf("%s: %s", tc.name, bad)
			continue
		}
		if got := strings.TrimPrefix(strings.Join(cfg.Warnings(), "\n"), "contexts[0].remember: "); got != tc.want {
			t.Errorf("%s:\n%s\nwant\n%s", tc.name, got, tc.want)
		}
	}
}

// launchBeside is launch with files beside the configuration.
func launchBeside(t *testing.T, text string, files map[string][]byte) *fixture {
	t.Helper()
	dir := t.TempDir()
	for name, b := range files {
		must(t, os.WriteFile(filepath.Join(dir, name), b, 0o644))
	}
	return launchIn(t, dir, text)
}

// Requests bring the object's bytes.
func TestObjectsTravelInRequests(t *testing.T) {
	f := launch(t, inKernel)
	file := filepath.Join(t.TempDir(), "mine.o")
	must(t, os.WriteFile(file, counting(t, 1), 0o644))
	o, err := ReadObject(file)
	must(t, err)
	i, err := f.install(&control.Context{
		Name: "mine", Tier: tierKernel, Object: o, Rulesets: "mine: udp(7)", Memory: 64, HPUMemory: 8,
	})
	must(t, err)
	if i.State != active || i.Object.Code != nil {
		t.Errorf("%+v", i)
	}
	must(t, f.deactivate("mine"))
	must(t, f.activate("mine"))
	must(t, f.remove("mine"))

	// Handlers that use memory have some, whoever forgets to say so.
	i, err = f.install(&control.Context{Name: "mine", Tier: tierKernel, Object: o, Rulesets: "mine: udp(7)"})
	must(t, err)
	if i.Memory != 64<<10 || i.HPUMemory != 4<<10 {
		t.Errorf("%v of memory, and %v of each HPU; want 64KiB and 4KiB", i.Memory, i.HPUMemory)
	}
	must(t, f.remove("mine"))
	_, err = f.install(&control.Context{Name: "mine", Tier: tierKernel, Object: &control.Object{Name: "mine.o"}, Rulesets: "mine: udp(7)"})
	fails(t, "without its bytes", err, errInvalid, "object: mine.o: its bytes are missing")
}

func TestErrorsOfContextsInTheKernel(t *testing.T) {
	file, err := filepath.Abs("../bpf/bench_bpfel.o")
	must(t, err)
	messages, err := filepath.Abs("../bpf/handlersdeposit_bpfel.o")
	must(t, err)
	packets, err := filepath.Abs("../bpf/handlersechoudp_bpfel.o")
	must(t, err)
	hands := writeFile(t, filepath.Join(t.TempDir(), "hands.o"), string(handsLong(t)))
	for _, tc := range []struct{ name, text, want string }{
		{"off", eth + "contexts:\n- {name: a, tier: kernel, handler: echo-icmp}\n", "F:3:19: contexts[0].tier: handlers in eBPF are not allowed here: the configuration's `kernel: administrators` does that, from the daemon's start"},
		{"another word", "kernel: everybody\n" + eth, `F:1:9: kernel: "everybody": want off or administrators`},
		{"no tier", eth + "contexts:\n- {name: a, tier: hardware, handler: echo-icmp}\n", `F:3:19: contexts[0].tier: "hardware": want user or kernel`},
		{"tc, of the user tier", eth + "contexts:\n- {name: a, hook: tc, handler: echo-udp}\n", "F:3:19: contexts[0].hook: tc: its handlers are on HPUs, which get their packets by XDP"},
		{"tc, and messages are handed over", inKernel + eth + "contexts:\n- {name: a, tier: kernel, hook: tc, object: " + hands + ", handler: deposit, windows: [{name: in, size: 1MiB}]}\n", "F:4:33: contexts[0].hook: tc: it hands messages over to HPUs"},
		{"object without a tier", inKernel + eth + "contexts:\n- {name: a, object: " + file + ", rulesets: 'a: udp(7)'}\n", "F:4:21: contexts[0].object: needs tier: kernel"},
		{"object of the user tier", eth + "contexts:\n- {name: a, object: /dev/null, handler: echo-icmp}\n", "F:3:21: contexts[0].object: /dev/null is a device: want a file\n"},
		{"no file", inKernel + eth + "contexts:\n- {name: a, tier: kernel, object: /nowhere.o}\n", "F:4:35: contexts[0].object: open /nowhere.o: no such file or directory"},
		{"no window", inKernel + eth + "contexts:\n- {name: a, tier: kernel, object: " + messages + ", rulesets: 'a: slmp'}\n", "F:4:3: contexts[0].windows: handlers in eBPF without a payload handler: no window: messages would be acknowledged and thrown away"},
		{"no right", inKernel + eth + "contexts:\n- {name: a, tier: kernel, handler: deposit, windows: [{name: in, size: 1MiB, rights: r}]}\n", "F:4:54: contexts[0].windows: handler deposit: handlers may not write any of the windows"},
		{"too many windows", inKernel + eth + "contexts:\n- {name: a, tier: kernel, handler: deposit, windows: [{name: a, size: 1}, {name: b, size: 1}, {name: c, size: 1}, {name: d, size: 1}, {name: e, size: 1}]}\n", "F:4:54: contexts[0].windows: 5, and handlers in eBPF can be given 4"},
		{"segments", inKernel + eth + "contexts:\n- {name: a, tier: kernel, handler: deposit, windows: [{name: in, size: 1MiB}], messages: 70000, segments: 5000000}\n", "F:4:90: contexts[0].messages: 70000: want 1 to 65536\nF:4:107: contexts[0].segments: 5000000: want 1 to 4194304"},
		{"too much of both", inKernel + eth + "contexts:\n- {name: a, tier: kernel, handler: deposit, windows: [{name: in, size: 1MiB}], messages: 8192}\n", "F:4:3: contexts[0].segments: 8192 messages of 65536 segments: want a product of at most 268435456"},
		{"handing over to nobody", inKernel + eth + "contexts:\n- {name: a, tier: kernel, object: " + hands + ", rulesets: 'a: slmp', windows: [{name: in, size: 1MiB}]}\n", "F:4:3: contexts[0].handler: is missing: the object hands messages over to handlers in Go, which it names"},
		{"handing over, all wrong", inKernel + eth + "contexts:\n- {name: a, tier: kernel, handler: deposit, hpu_memory: 64, params: {most: no, other: 1}, object: " + hands + "}\n",
			"F:4:57: contexts[0].hpu_memory: the object hands messages over, and CPUs and HPUs would have different parts of it\nF:4:76: contexts[0].params.most: \"no\": want whole number, 0 to 4294967295\nF:4:87: contexts[0].params.other: handler deposit: no such parameter"},
		{"no rulesets for packets", inKernel + eth + "contexts:\n- {name: a, tier: kernel, object: " + packets + "}\n", `F:4:3: contexts[0].rulesets: no packet would ever match: give rulesets, such as "echo: udp(7)"`},
		{"rulesets without a name", inKernel + eth + "contexts:\n- {name: a, tier: kernel, object: " + messages + ", windows: [{name: in, size: 1MiB}], rulesets: slmp}\n", fmt.Sprintf(`F:4:%d: contexts[0].rulesets: expected ":" after the name, as in "m: slmp", found the end`, len(messages)+86)},
		{"handing over, a broken object", inKernel + eth + "contexts:\n- {name: a, tier: kernel, object: /dev/null, handler: deposit}\n", "F:4:35: contexts[0].object: /dev/null is a device: want a file"},
		{"handing over, no object", inKernel + eth + "contexts:\n- {name: a, tier: kernel, object: " + file + ", handler: deposit}\n", "F:4:35: contexts[0].object: " + file + ": not an object that XsPIN takes: "},
		{"segments of packets", inKernel + eth + "contexts:\n- {name: a, tier: kernel, handler: echo-udp, segments: 64}\n", "F:4:56: contexts[0].segments: "},
		{"segments in Go", eth + "contexts:\n- {name: a, handler: deposit, windows: [{name: in, size: 1MiB}], segments: 64}\n", "F:3:76: contexts[0].segments: how many a message may have is said for handlers in eBPF only"},
		{"maps", inKernel + eth + "limits: {memory: 64MiB}\ncontexts:\n- {name: a, tier: kernel, handler: deposit, windows: [{name: in, size: 1MiB}], messages: 4096}\n", "F:5:3: contexts[0]: windows, queue, HPU memory and maps take "},
		{"neither", inKernel + eth + "contexts:\n- {name: a, tier: kernel}\n", "F:4:3: contexts[0].handler: is missing: want one of count, deposit, echo-icmp, echo-udp, noop, noop-messages, or an object"},
		{"no such twin", inKernel + eth + "contexts:\n- {name: a, tier: kernel, handler: inbox}\n", `F:4:36: contexts[0].handler: no built-in handler in eBPF "inbox": there are count, deposit, echo-icmp, echo-udp, noop, noop-messages`},
		{"parameter", inKernel + eth + "contexts:\n- {name: a, tier: kernel, handler: count, rulesets: 'a: udp(7)', params: {to: nowhere}}\n", `F:4:79: contexts[0].params.to: handler count: "nowhere": want stack or drop`},
		{"two parameters", inKernel + eth + "contexts:\n- {name: a, tier: kernel, handler: echo-udp, params: {prt: 9, port: many}}\n",
			"F:4:60: contexts[0].params.prt: handler echo-udp: no such parameter: want port (whole number, 0 to 65535)\nF:4:69: contexts[0].params.port: handler echo-udp: \"many\": want whole number, 0 to 65535"},
		{"format", inKernel + eth + "contexts:\n- {name: a, tier: kernel, handler: echo-udp, rulesets: 'a: slmp'}\n", "F:4:3: contexts[0].format: format slmp has messages of several packets"},
		{"scheduling", inKernel + eth + "contexts:\n- {name: a, tier: kernel, handler: echo-udp, policy: message, hpus: '0', share: 2}\n",
			"F:4:54: contexts[0].policy: it is about HPUs\nF:4:69: contexts[0].hpus: it is about HPUs\nF:4:81: contexts[0].share: it is about HPUs"},
		{"what would be so anyway", inKernel + eth + "contexts:\n- {name: a, tier: kernel, handler: deposit, windows: [{name: in, size: 1MiB}], policy: message, overload: drop, sequence: 1024}\n",
			"F:4:88: contexts[0].policy: it is about HPUs\nF:4:107: contexts[0].overload: it is about HPUs\nF:4:123: contexts[0].sequence: it is about HPUs"},
		{"HPUs that are none", inKernel + eth + "contexts:\n- {name: a, tier: kernel, handler: echo-udp, hpus: 0-9999, vhpus: 4}\n", "F:4:52: contexts[0].hpus: it is about HPUs\nF:4:67: contexts[0].vhpus: it is about HPUs"},
		{"another policy", inKernel + eth + "contexts:\n- {name: a, tier: kernel, handler: echo-udp, policy: mine}\n", `F:4:54: contexts[0].policy: "mine": want blocked-rr, message, packet`},
		{"no windows", inKernel + eth + "contexts:\n- {name: a, tier: kernel, handler: echo-udp, windows: []}\n", ""},
		{"application", inKernel + eth + "contexts:\n- {name: a, tier: kernel, handler: echo-udp, queue: {}, attach: {users: ['0']}, windows: [{name: w, size: 1MiB}], activate: attach}\n",
			"F:4:53: contexts[0].queue: handlers in eBPF for packets have none\nF:4:65: contexts[0].attach: \nF:4:90: contexts[0].windows: handlers in eBPF for packets have none\nF:4:125: contexts[0].activate: "},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, got := load(t, tc.text)
			g, w := strings.Split(got, "\n"), strings.Split(strings.TrimSuffix(tc.want, "\n"), "\n")
			for i := range max(len(g), len(w)) {
				if i >= len(w) && strings.HasSuffix(tc.want, "\n") {
					break // what else is wrong
				}
				if i >= len(g) || i >= len(w) || !strings.HasPrefix(g[i], w[i]) {
					t.Errorf("got\n%s\nwant\n%s", got, tc.want)
					return
				}
			}
		})
	}
}

// An object that is none is refused with all that is wrong, and its name.
func TestObjectsThatAreNone(t *testing.T) {
	f := launch(t, inKernel)
	for what, code := range map[string][]byte{"it is not an ELF object file": []byte("hello"), "xspin_handler.h": notOurs(t)} {
		_, err := f.install(&control.Context{Name: "mine", Tier: tierKernel, Object: &control.Object{Name: "mine.o", Code: code}, Rulesets: "mine: udp(7)"})
		fails(t, what, err, errInvalid, what)
	}
	// What the verifier refuses is told by the handler's name, and nothing stays.
	bad := objecttest.Compile(t, "#include \"xspin_handler.h\"\nXSPIN_PAYLOAD { return *(int *)(long)her->len; }\nXSPIN_CONTEXT(PAYLOAD);\nXSPIN_LICENSE(\"GPL\");\n")
	_, err := f.install(&control.Context{Name: "mine", Tier: tierKernel, Object: &control.Object{Name: "mine.o", Code: bad}, Rulesets: "mine: udp(7)"})
	fails(t, "verifier", err, errBusy, "in xspin_payload at test.bpf.c:2")
	if all := f.infos(); len(all) != 0 {
		t.Errorf("%v are there", all)
	}
}

// notOurs is an object of ours that handlers are not made like.
func notOurs(t *testing.T) []byte {
	t.Helper()
	b, err := os.ReadFile("../bpf/bench_bpfel.o")
	must(t, err)
	return b
}

// Without privileges, but for those that it needs, the daemon installs such contexts, at both hooks, and
// has them start over. None was there before.
func TestPrivilegesOfTheKernelTier(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	dir := openDir(t)
	text := fmt.Sprintf("user: nobody\nsocket: %s/s\n%sinterfaces:\n- {name: %s, netns: %s}\n", dir, inKernel, lab.NIC.Device, lab.NIC.Namespace)
	p := run(t, exec.Command(build(t), writeFile(t, filepath.Join(dir, "xspin.yaml"), text)))
	p.ask(t, "", "ready")
	want := fmt.Sprintf("CapPrm:%016x CapEff:%016[1]x", keptMask()|1<<capability.Perfmon)
	if caps := p.ask(t, "capabilities", "capabilities:"); !strings.Contains(caps, want) {
		t.Errorf("capabilities %s, want %s", caps, want)
	}
	c, err := control.Dial(filepath.Join(dir, "s"))
	must(t, err)
	ctx := context.Background()
	first := &control.Context{Name: "first", Tier: tierKernel, Handler: "count", Rulesets: "a: udp(9)"}
	_, err = c.Install(ctx, first)
	must(t, err)
	_, err = c.Install(ctx, &control.Context{Name: "second", Tier: tierKernel, Hook: "xdp", Rulesets: "b: udp(10)", Object: &control.Object{Name: "count.o", Code: bpf.Handlers["count"]}})
	must(t, err)
	must(t, c.Remove(ctx, "first"))
	_, err = c.Install(ctx, first)
	must(t, err)
	for _, port := range []int{9, 10} {
		linuxGets(t, lab, port, func(got string) {
			if got != "for linux" {
				t.Errorf("Linux got %q", got)
			}
		}, "for linux")
	}
	for _, name := range []string{"first", "second"} {
		i, err := c.Context(ctx, name)
		must(t, err)
		if hook := map[string]string{"first": "tc", "second": "xdp"}[name]; i.HandlerStats.ToStack == 0 || i.At != hook {
			t.Errorf("%s: at %s, %+v", name, i.At, i.HandlerStats)
		}
	}
	p.stdin.Close()
	if got := p.ask(t, "", "closed:"); got != "<nil>" {
		t.Errorf("closed with error %s", got)
	}
}

// A lockstep client sends a datagram to port 7 when the one before has been answered, or has
// not been for a while.
type lockstep struct {
	stop     atomic.Bool
	answered atomic.Uint64
	lost     uint64        // without an answer, or refused by Linux
	silence  time.Duration // the longest without an answer
	done     chan error
}

func (f *fixture) lockstep(t *testing.T, patience time.Duration) *lockstep {
	t.Helper()
	l := &lockstep{done: make(chan error, 1)}
	go func() {
		l.done <- f.lab.Host.NS.Do(func() error {
			c, err := net.Dial("udp", fmt.Sprintf("%v:7", f.lab.NIC.Addr.Addr()))
			if err != nil {
				return err
			}
			defer c.Close()
			b := make([]byte, 100)
			last := time.Now()
			for seq := uint64(1); !l.stop.Load(); seq++ {
				binary.BigEndian.PutUint64(b, seq)
				_, err := c.Write(b)
				c.SetReadDeadline(time.Now().Add(patience))
				for err == nil {
					if _, err = c.Read(b); err == nil && binary.BigEndian.Uint64(b) == seq {
						break
					}
				}
				if err != nil {
					l.lost++
					continue
				}
				l.silence = max(l.silence, time.Since(last))
				last = time.Now()
				l.answered.Add(1)
			}
			return nil
		})
	}()
	eventually(t, "the client is answered", func() bool { return l.answered.Load() > 10 })
	return l
}

func (l *lockstep) end(t *testing.T) {
	t.Helper()
	l.stop.Store(true)
	must(t, <-l.done)
}

// A context goes on while the object that is to replace its own is loaded, and those of
// contexts that are added. One that the verifier refuses, after it has taken its time,
// changes nothing.
func TestReloadsLoadObjectsFirst(t *testing.T) {
	const text = inKernel + `contexts:
- {name: mine, tier: kernel, object: mine.o, rulesets: "mine: udp(7)", memory: 64, hpu_memory: 24, params: {twice: %d}}
`
	mine := counting(t, 1)
	// The verifier follows the loop to its end, for a tenth of its million steps, and finds what it refuses there.
	late := objecttest.Compile(t, `#include "xspin_handler.h"

const volatile __u32 twice = 0;

XSPIN_PAYLOAD
{
	volatile __u64 x = twice;

	for (__u32 i = 0; i < 20000; i++)
		x ^= i;
	return *(int *)(long)x;
}

XSPIN_CONTEXT(PAYLOAD);
XSPIN_LICENSE("GPL");
`)
	f := launchBeside(t, fmt.Sprintf(text, 0), map[string][]byte{"mine.o": mine, "late.o": late})
	w, err := f.lab.Host.Wire()
	must(t, err)
	t.Cleanup(func() { w.Close() })
	was, used := f.shown(t, "mine"), f.inUse()
	for name, to := range map[string]string{
		"mine": strings.Replace(fmt.Sprintf(text, 0), "mine.o", "late.o", 1),
		"more": fmt.Sprintf(text, 1) + "- {name: more, tier: kernel, object: late.o, rulesets: 'more: udp(9)'}\n",
	} {
		f.write(t, to)
		l := f.lockstep(t, 5*time.Second)
		before, start := l.answered.Load(), time.Now()
		_, err = f.Reload()
		took, n := time.Since(start), l.answered.Load()-before
		l.end(t)
		fails(t, "reload", err, errBusy, fmt.Sprintf("nothing was changed: context %q: load late.o", name))
		t.Logf("refused after %v: %d datagrams answered meanwhile, longest silence %v", took, n, l.silence)
		if l.lost > 0 || n == 0 {
			t.Errorf("%d datagrams were lost as an object was refused, %d answered", l.lost, n)
		}
		now := f.shown(t, "mine")
		if now.ID != was.ID || now.State != active || !now.Since.Equal(was.Since) || f.inUse() != used || now.HandlerStats.Handled < l.answered.Load() {
			t.Errorf("the context is %+v, with %d bytes in use; it was %+v, with %d", now, f.inUse(), was, used)
		}
		if all := f.infos(); len(all) != 1 {
			t.Errorf("%+v", all)
		}
	}
}

// A context in the kernel changes under a client in lock step, which notices nothing: not of
// other numbers either, nor of a reload that fails late.
func TestReloadsOfContextsInTheKernelLoseNothing(t *testing.T) {
	const text = inKernel + `contexts:
%s- {name: mine, tier: kernel, object: mine.o, rulesets: "mine: udp(7)", memory: 64, hpu_memory: 24, params: {twice: %d}}
`
	more := []string{"", "- {name: more, tier: kernel, handler: noop, rulesets: 'more: udp(9)'}\n", "- {name: more, handler: echo-udp, params: {port: 9}}\n"}
	f := launchBeside(t, fmt.Sprintf(text, "", 0), map[string][]byte{"mine.o": counting(t, 1)})
	w, err := f.lab.Host.Wire()
	must(t, err)
	t.Cleanup(func() { w.Close() })
	used := f.inUse()
	l := f.lockstep(t, 5*time.Second)
	const rounds = 24
	start := time.Now()
	for i := range rounds {
		f.write(t, fmt.Sprintf(text, more[i/4%3], (i+1)%2))
		changes, err := f.Reload()
		must(t, err)
		if !slices.Contains(changes, "context mine changed: began anew") {
			t.Errorf("round %d: %q", i, changes)
		}
	}
	took := time.Since(start)
	was := f.shown(t, "mine")
	for range 5 {
		f.write(t, fmt.Sprintf(text, "- {name: bad, handler: test-init, params: {fail: true}, rulesets: 'x: udp(99)'}\n", 1))
		_, err := f.Reload()
		fails(t, "reload", err, errBusy, "not today")
	}
	l.end(t)
	t.Logf("%d replacements in %v: %d datagrams lost, %d answered, longest silence %v", rounds, took, l.lost, l.answered.Load(), l.silence)
	if l.lost > 0 {
		t.Errorf("%d datagrams were lost", l.lost)
	}
	now := f.shown(t, "mine")
	if now.ID != was.ID || now.State != active || !now.Since.Equal(was.Since) || now.Rules[0].Number != was.Rules[0].Number || now.HandlerStats.Handled <= was.HandlerStats.Handled {
		t.Errorf("the context is %+v; it was %+v", now, was)
	}
	f.answers(t, 7)
	if f.inUse() != used {
		t.Errorf("%d bytes are in use, want %d", f.inUse(), used)
	}
}

// However a context ends while messages come, its application finds all that was acknowledged.
func TestAcknowledgedIsToldWhenContextsEnd(t *testing.T) {
	for _, tier := range []string{"kernel", "user"} {
		text := inKernel + "contexts:\n- {name: c, tier: " + tier + ", handler: deposit, windows: [{name: in, size: 64KiB}]}\n"
		for name, end := range map[string]func(*testing.T, *fixture){
			"removed":         func(t *testing.T, f *fixture) { must(t, f.remove("c")) },
			"the daemon ends": func(t *testing.T, f *fixture) { must(t, f.Close(t.Context())) },
		} {
			t.Run(tier+", "+name, func(t *testing.T) {
				f := launch(t, text)
				w, err := f.lab.Host.Wire()
				must(t, err)
				t.Cleanup(func() { w.Close() })
				a := f.admitted(t, "c", root, false)
				host := open(t, a).host
				left, over := make(chan struct{}), make(chan struct{})
				told := 0
				var ended atomic.Bool
				go func() { // as a session does, whose application takes what is there, and leaves
					why := <-a.ended()
					ended.Store(true)
					<-over
					a.release(why)
					close(left)
				}()
				var acked atomic.Int64
				conn := f.dial(t)
				go func() {
					defer close(over)
					var e hostq.Event
					for {
						last := ended.Load()
						for host.Event(&e) {
							if e.Complete() {
								told++
							}
						}
						if last {
							return
						}
						time.Sleep(20 * time.Microsecond)
					}
				}()
				var posting sync.WaitGroup
				stop := make(chan struct{})
				tokens := make(chan struct{}, 64)
				posting.Go(func() {
					for msg := []byte("0123456789"); ; {
						select {
						case tokens <- struct{}{}:
						case <-stop:
							return
						}
						if conn.Post(msg, func(err error) {
							if err == nil {
								acked.Add(1)
							}
							<-tokens
						}) != nil {
							return
						}
					}
				})
				eventually(t, "many are acknowledged", func() bool { return acked.Load() > 1000 })
				end(t, f)
				<-over
				<-left
				close(stop)
				posting.Wait()
				conn.Close()
				if n := int(acked.Load()); told < n {
					t.Errorf("%d messages are acknowledged, and the application has %d", n, told)
				}
			})
		}
	}
}
