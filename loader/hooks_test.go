// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/handlers/handlerstest"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/matcher/matchertest"
	"github.com/xspin/xspin/netns/netnstest"
)

// A pair is the programs of both hooks, with one table, attached to nothing. A context at tc has a program that
// returns tcHandled and its number.
type pair struct {
	testing.TB
	rnd    *rand.Rand
	seed   uint64
	in     *Ingress
	tc     *ebpf.Program // what is run at tc: the ingress program, or what comes before it
	ref    *matcher.Table
	at     map[uint16]Delivery
	last   Stats
	out    []byte
	count  [3][2]int // by action and hook
	cannot int       // frames that PROG_RUN refuses at tc
}

const tcHandled = 1000

func newPair(t testing.TB) *pair {
	t.Helper()
	netnstest.NeedRoot(t)
	in := &Ingress{cfg: Config{Mode: Native, HPUs: 1, Queues: 1, BufferSize: 1 << 20, MaxBuffers: 1}, mode: Native}
	t.Cleanup(func() { in.Close() })
	if err := errors.Join(in.load(bpf.IngressProgXspinVerdict), in.loadTC()); err != nil {
		t.Fatal(err)
	}
	for i := range in.Share().Credit {
		in.Share().Credit[i] = 1 << 31
	}
	for context := range bpf.MaxContexts {
		put(t, in.tc.Programs, uint32(context), schedCLS(t, asm.Mov.Imm(asm.R0, int32(tcHandled+context)), asm.Return()))
	}
	seed := rand.Uint64()
	return &pair{TB: t, rnd: rand.New(rand.NewPCG(seed, 3)), seed: seed, in: in, tc: in.tc.XspinIngressTc}
}

// schedCLS loads a program for tc.
func schedCLS(t testing.TB, ins ...asm.Instruction) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "test_tc", Type: ebpf.SchedCLS, AttachType: ebpf.AttachTCXIngress, License: "GPL", Instructions: ins})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func put(t testing.TB, m *ebpf.Map, key uint32, p *ebpf.Program) {
	t.Helper()
	if err := m.Put(key, p); err != nil {
		t.Fatal(err)
	}
}

// use publishes a table, with each context at either hook, or all at one.
func (p *pair) use(ref *matcher.Table, hooks ...Hook) {
	p.Helper()
	p.at = onOneHPU(&matcher.Table{})
	for slot, e := range ref.Entries {
		e.Context = uint16(slot) // the generators' contexts have several formats
		ref.Entries[slot] = e
		d := Delivery{Policy: ByPacket, CoreMask: 1}
		if hooks[p.rnd.IntN(len(hooks))] == TC {
			d = Delivery{Kernel: true, Hook: TC}
		}
		p.at[e.Context] = d
	}
	if err := p.in.Publish(ref, p.at); err != nil {
		p.Fatal(err)
	}
	p.ref = ref
}

// counted returns what was counted since it was called last, as text: of the fate of one frame.
func (p *pair) counted() string {
	p.Helper()
	now, err := p.in.Stats()
	if err != nil {
		p.Fatal(err)
	}
	last := p.last
	p.last = now
	text := ""
	add := func(name string, now, last uint64) {
		if now != last {
			text += fmt.Sprintf(" %s+%d", name, int64(now-last))
		}
	}
	add("seen", now.Seen, last.Seen)
	add("passed", now.Passed, last.Passed)
	add("redirected", now.Redirected, last.Redirected)
	add("failed", now.Failed, last.Failed)
	add("malformed", now.Malformed, last.Malformed)
	add("oversize", now.Oversize, last.Oversize)
	add("trains", now.Trains, last.Trains)
	each := func(name string, now, last []uint64) {
		for i, n := range now {
			if n != last[i] {
				add(fmt.Sprintf("%s[%d]", name, i), n, last[i])
			}
		}
	}
	each("matched", now.Matched[:], last.Matched[:])
	each("kernel", now.Kernel[:], last.Kernel[:])
	each("refused", now.Refused[:], last.Refused[:])
	each("spilled", now.Spilled[:], last.Spilled[:])
	return text
}

func (p *pair) run(prog *ebpf.Program, frame []byte, md any) (int32, error) {
	if n := bpf.MetaSize + len(frame); n > len(p.out) {
		p.out = make([]byte, n)
	}
	opts := &ebpf.RunOptions{Data: frame, DataOut: p.out, Context: md, Repeat: 1}
	ret, err := prog.Run(opts)
	if err == nil && !bytes.HasSuffix(opts.DataOut, frame) {
		p.Fatalf("seed %d: the frame was changed", p.seed)
	}
	return int32(ret), err
}

// refuses tells whether a kernel may refuse a test run at tc: that takes the whole of an IP header for granted.
func refuses(frame []byte) bool {
	switch {
	case len(frame) < 15:
		return true
	case frame[12] == 8 && frame[13] == 0:
		return len(frame) < 14+20
	case frame[12] == 0x86 && frame[13] == 0xdd:
		return len(frame) < 14+40
	}
	return false
}

// compare has a frame come by at xdp, and then at tc as if XDP had passed it whatever it is, and holds what both
// do, and count, against the reference.
func (p *pair) compare(frame []byte) {
	p.Helper()
	want := p.ref.Match(frame)
	hook := p.at[want.Context].Hook
	xdp, tc, counts := int32(xdpPass), int32(tcxNext), [2]string{}
	switch want.Action {
	case matcher.Pass:
		hook, counts[XDP] = XDP, " seen+1 passed+1"
	case matcher.Malformed:
		counts[hook] = fmt.Sprintf(" seen+1 malformed+1 matched[%d]+1", want.Ruleset)
	case matcher.Deliver:
		if hook == XDP {
			xdp, counts[XDP] = xdpRedirect, fmt.Sprintf(" seen+1 redirected+1 matched[%d]+1", want.Ruleset)
		} else {
			tc, counts[TC] = int32(tcHandled+want.Context), fmt.Sprintf(" seen+1 matched[%d]+1 kernel[%d]+1", want.Ruleset, want.Context)
		}
	}
	p.count[want.Action][hook]++
	at := func(hook Hook, prog *ebpf.Program, ret int32, count string) {
		p.Helper()
		got, err := p.run(prog, frame, nil)
		if err != nil && hook == TC && refuses(frame) {
			p.cannot++
			return
		}
		if err != nil {
			p.Fatalf("%v: frame of %d bytes % x: %v", hook, len(frame), frame[:min(len(frame), 64)], err)
		}
		if counted := p.counted(); got != ret || counted != count {
			p.Fatalf("seed %d: frame of %d bytes % x\ntable %+v\n%v returned %d, want %d, and counted%s, want%s; the reference says %+v",
				p.seed, len(frame), frame[:min(len(frame), matchertest.MaxFrame)], p.ref, hook, got, ret, counted, count, want)
		}
	}
	at(XDP, p.in.objs.XspinIngress, xdp, counts[XDP])
	at(TC, p.tc, tc, counts[TC])
}

// attached has the programs believe that the one at xdp is attached.
func (p *pair) attached(is uint32) { atomic.StoreUint32(p.in.counting, is) }

// finish fails if the frames were too much alike to prove anything.
func (p *pair) finish() {
	p.Helper()
	p.Logf("pass, malformed, deliver at xdp and tc: %v; %d not tried at tc", p.count, p.cannot)
	all := 0
	for _, n := range p.count {
		all += n[0] + n[1]
	}
	for a, n := range p.count {
		for hook := range n {
			if n[hook] == 0 && (hook == int(XDP) || matcher.Action(a) != matcher.Pass) {
				p.Errorf("none of the frames is %v at %v: the generator has drifted", matcher.Action(a), Hook(hook))
			}
		}
	}
	if p.cannot > all/2 { // some 26 of 100 of the short ones
		p.Errorf("%d of %d frames were not tried at tc", p.cannot, all)
	}
}

// The lowest-numbered ruleset that matches decides, whichever hook its context is at; the other program lets the
// frame pass. One of both counts it.
func TestProgramsOfBothHooksAgreeWithReference(t *testing.T) {
	short := func(p *pair) []byte {
		frame := matchertest.Frame(p.rnd, p.ref)
		return frame[:14+p.rnd.IntN(len(frame)-13)]
	}
	long := func(p *pair) []byte {
		frame := make([]byte, 1500+p.rnd.IntN(1500))
		copy(frame[copy(frame, matchertest.Frame(p.rnd, p.ref)):], matchertest.Frame(p.rnd, p.ref))
		return frame
	}
	for _, tt := range []struct {
		name  string
		table func(p *pair) *matcher.Table
		frame func(p *pair) []byte
	}{
		{"few rulesets", func(p *pair) *matcher.Table { return matchertest.Table(p.rnd) }, nil},
		{"short frames", func(p *pair) *matcher.Table { return matchertest.Table(p.rnd) }, short},
		{"long frames", func(p *pair) *matcher.Table { return matchertest.Table(p.rnd) }, long},
		{"65 to 256 rulesets over many fields", func(p *pair) *matcher.Table {
			return crowd(p.rnd, 65+p.rnd.IntN(192), fields(p.rnd, 1+p.rnd.IntN(100), 0, 127))
		}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			p := newPair(t)
			p.attached(1)
			for range 30 * testenv.Soak() {
				p.use(tt.table(p), XDP, TC)
				for range 70 {
					frame := matchertest.Frame(p.rnd, p.ref)
					if tt.frame != nil {
						frame = tt.frame(p)
					}
					p.compare(frame)
				}
			}
			p.finish()
		})
	}
}

// While no program is at xdp, the one at tc counts whatever comes by.
func TestProgramAtTCCountsWhatNobodyElseDoes(t *testing.T) {
	p := newPair(t)
	p.use(&matcher.Table{Entries: map[int]matcher.Entry{
		2: {Ruleset: matcher.UDPPort(7), Format: matcher.FormatByName("flow")},
		3: {Ruleset: matcher.ICMPEcho(), Format: matcher.FormatByName("flow")},
	}}, TC)
	p.at[3] = Delivery{Policy: ByPacket, CoreMask: 1}
	if err := p.in.Publish(p.ref, p.at); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name     string
		frame    []byte
		want     int32
		counting string // while the program at xdp is attached
		alone    string
	}{
		{"of a context at tc", datagramOf(10), tcHandled + 2, " seen+1 matched[2]+1 kernel[2]+1", " seen+1 matched[2]+1 kernel[2]+1"},
		{"of a context at xdp", handlerstest.ICMPEcho(handlerstest.PeerAddr, handlerstest.HereAddr, 1, 1, make([]byte, 20)), tcxNext, "", " seen+1 failed+1 matched[3]+1"},
		{"of nobody", make([]byte, 60), tcxNext, "", " seen+1 passed+1"},
	} {
		for i, count := range []string{tt.alone, tt.counting} {
			p.attached(uint32(i))
			if got, err := p.run(p.tc, tt.frame, nil); err != nil || got != tt.want {
				t.Errorf("%s: returned %d, want %d; %v", tt.name, got, tt.want, err)
			}
			if counted := p.counted(); counted != count {
				t.Errorf("%s, counting is %d: counted%s, want%s", tt.name, i, counted, count)
			}
		}
	}
}

// A frame whose tag was taken out of it is no frame without a tag.
func TestTaggedFramesAtTCAreNotMatched(t *testing.T) {
	p := newPair(t)
	p.use(&matcher.Table{Entries: map[int]matcher.Entry{
		0: {Ruleset: matcher.MatchAll(), Format: matcher.FormatByName("packet")},
	}}, TC)
	array, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer array.Close()
	put(t, array, 0, p.tc)
	// Linux takes the tags of a test run's frames for bytes.
	const tagged = 1<<12 | 5
	p.tc = schedCLS(t,
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.Mov.Imm(asm.R2, 0x0081), // 802.1Q, as on the wire
		asm.Mov.Imm(asm.R3, tagged),
		asm.FnSkbVlanPush.Call(),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.LoadMapPtr(asm.R2, array.FD()),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnTailCall.Call(),
		asm.Mov.Imm(asm.R0, -5),
		asm.Return(),
	)
	frame := datagramOf(10)
	if got, err := p.run(p.in.tc.XspinIngressTc, frame, nil); err != nil || got != tcHandled {
		t.Errorf("without a tag: returned %d, %v", got, err)
	}
	p.counted()
	if got, err := p.run(p.tc, frame, nil); err != nil || got != tcxNext {
		t.Errorf("with a tag: returned %d, %v", got, err)
	}
	if counted := p.counted(); counted != " seen+1 passed+1" {
		t.Errorf("with a tag: counted%s", counted)
	}
}

// A train is matched by the headers that its packets have in common, and by the lengths of all of them.
func TestTrainsAreMatchedByTheirHeaders(t *testing.T) {
	p := newPair(t)
	slmp := matcher.FormatByName("slmp")
	p.use(&matcher.Table{Entries: map[int]matcher.Entry{
		1: {Ruleset: matcher.UDPPort(7), Format: matcher.FormatByName("flow")},
		2: {Ruleset: matcher.SLMP(), Format: slmp},
	}}, TC)
	rnd := rand.New(rand.NewPCG(1, 4))
	flow := trainOf(rnd, 3000, 0)
	message := bytes.Clone(flow)
	message[36], message[37] = 0x24, 0x72 // SLMP's port
	lying := bytes.Clone(message)
	lying[38]++ // 256 bytes more than there are
	for _, tt := range []struct {
		name  string
		frame []byte
		want  int32
		count string
	}{
		{"of datagrams", flow, tcHandled + 1, " seen+1 matched[1]+1 kernel[1]+1"},
		{"of SLMP", message, tcHandled + 2, " seen+1 matched[2]+1 kernel[2]+1"},
		{"of SLMP, whose UDP length is too long", lying, tcxNext, " seen+1 malformed+1 matched[2]+1"},
		{"of what no ruleset matches", make([]byte, 3000), tcxNext, " seen+1 passed+1"},
	} {
		for _, gso := range []uint32{0, 1, 7, 1400, 65535} {
			var md any
			if gso != 0 {
				md = &skBuff{GSOSize: gso}
			}
			got, err := p.run(p.tc, tt.frame, md)
			if counted := p.counted(); err != nil || got != tt.want || counted != tt.count {
				t.Errorf("%s, gso_size %d: returned %d, want %d; counted%s, want%s; %v", tt.name, gso, got, tt.want, counted, tt.count, err)
			}
		}
	}
}

// Handlers that are not there leave their frames to Linux, and take them as soon as they are.
func TestContextsAtTCWithoutHandlers(t *testing.T) {
	p := newPair(t)
	p.use(&matcher.Table{Entries: map[int]matcher.Entry{
		4: {Ruleset: matcher.UDPPort(7), Format: matcher.FormatByName("packet")},
	}}, TC)
	h := builtinAt(t, TC, "count", map[string]any{"to": "drop"})
	step := func(what string, want int32, count string) {
		t.Helper()
		if got, err := p.run(p.tc, datagramOf(20), nil); err != nil || got != want {
			t.Errorf("%s: returned %d, want %d; %v", what, got, want, err)
		}
		if counted := p.counted(); counted != count {
			t.Errorf("%s: counted%s, want%s", what, counted, count)
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(p.in.ClearHandlers(4))
	step("no handlers", tcxNext, " seen+1 failed+1 matched[4]+1")
	must(p.in.SetHandlers(4, h))
	step("handlers", 2 /* TC_ACT_SHOT */, " seen+1 matched[4]+1 kernel[4]+1")
	if n := h.Stats().Handled; n != 1 {
		t.Errorf("%d handled", n)
	}
	must(p.in.SetHandlers(4, builtin(t, "count", map[string]any{"to": "drop"})))
	step("others at xdp as well", 2, " seen+1 matched[4]+1 kernel[4]+1")
	must(p.in.ClearHandlers(4))
	step("none any more", tcxNext, " seen+1 failed+1 matched[4]+1")
}
