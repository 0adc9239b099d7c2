// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/internal/capability"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/matcher/matchertest"
	"github.com/xspin/xspin/netns/netnstest"
)

// A differ compares the in-kernel program with the reference: verdict,
// metadata, and that the frame comes out as it went in.
type differ struct {
	testing.TB
	rnd    *rand.Rand
	seed   uint64
	tester *Tester
	ref    *matcher.Table
	count  [3]int // by action
	eom    int
}

// newDiffer has the test run beside others like it: changing a table is mostly
// waiting.
func newDiffer(t *testing.T) *differ {
	netnstest.NeedRoot(t)
	t.Parallel()
	tester, err := NewTester(&matcher.Table{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tester.Close() })
	seed := rand.Uint64()
	return &differ{TB: t, rnd: rand.New(rand.NewPCG(seed, 2)), seed: seed, tester: tester}
}

// use gives the tester another table, at a tenth of the price of a new one.
func (d *differ) use(ref *matcher.Table) {
	d.Helper()
	for slot, e := range ref.Entries {
		e.Context = uint16(slot) // the generators' contexts have several formats
		ref.Entries[slot] = e
	}
	if err := d.tester.in.Publish(ref, onOneHPU(ref)); err != nil {
		d.Fatal(err)
	}
	d.ref = ref
}

func (d *differ) compare(frame []byte, md any) {
	d.Helper()
	want := d.ref.Match(frame)
	got, out, err := d.tester.run(frame, md)
	if err != nil {
		d.Fatal(err)
	}
	if got != want {
		d.Fatalf("seed %d: context %+v, frame of %d bytes % x\ntable %+v\nprogram   %+v\nreference %+v",
			d.seed, md, len(frame), frame[:min(len(frame), matchertest.MaxFrame)], d.ref, got, want)
	}
	d.count[want.Action]++
	if want.EOM {
		d.eom++
	}
	if want.Action == matcher.Deliver {
		meta := bpf.MetaOf(out)
		if meta.Generation != d.ref.Generation {
			d.Fatalf("generation %d, want %d", meta.Generation, d.ref.Generation)
		}
		out = out[bpf.MetaSize:]
	}
	if !bytes.Equal(out, frame) {
		d.Fatalf("seed %d: the frame was changed", d.seed)
	}
}

// finish fails if the frames were too much alike to prove anything.
func (d *differ) finish() {
	d.Helper()
	all := d.count[0] + d.count[1] + d.count[2]
	d.Logf("%d pairs: %d pass, %d malformed, %d deliver (%d EOM)", all, d.count[0], d.count[1], d.count[2], d.eom)
	for a, n := range d.count {
		if n < all/100 {
			d.Errorf("only %d of the frames are %v: the generator has drifted", n, matcher.Action(a))
		}
	}
}

// The in-kernel program and the Go reference give the same verdict, metadata
// and bytes for random tables and frames that come close to matching.
func TestProgramAgreesWithReference(t *testing.T) {
	const parts, frames = 4, 350
	tables := 30 * testenv.Soak() // 42,000 pairs
	for i := range parts {
		t.Run(fmt.Sprintf("part %d", i), func(t *testing.T) {
			d := newDiffer(t)
			for range tables {
				d.use(matchertest.Table(d.rnd))
				for range frames {
					d.compare(matchertest.Frame(d.rnd, d.ref), nil)
				}
			}
			d.finish()
		})
	}
}

// linear has the program see only the first n bytes in one piece, and the rest
// as a fragment: words then straddle the two.
func linear(n int) xdpMD { return xdpMD{DataEnd: uint32(n)} }

// needSplit ends the test where the kernel does not let the caller choose where
// the linear part ends (Linux 6.18 does).
func (d *differ) needSplit() {
	d.use(&matcher.Table{})
	if _, _, err := d.tester.run(make([]byte, 64), linear(20)); err != nil {
		d.Skipf("this kernel does not split test frames: %v", err)
	}
}

// A word may lie in the linear part, in a fragment, or in both.
func TestProgramAgreesOnFramesInFragments(t *testing.T) {
	d := newDiffer(t)
	d.needSplit()
	for range 60 {
		d.use(matchertest.Table(d.rnd))
		for range 100 {
			frame := matchertest.Frame(d.rnd, d.ref)
			d.compare(frame, linear(d.rnd.IntN(min(len(frame), 80)+1)))
			d.compare(frame, linear(d.rnd.IntN(len(frame)+1)))
		}
	}
	d.finish()
}

// Frames of more than a page, as large MTUs and GRO make them.
func TestProgramAgreesOnLongFrames(t *testing.T) {
	d := newDiffer(t)
	for range 50 {
		d.use(matchertest.Table(d.rnd))
		for range 100 {
			frame := make([]byte, 5000+d.rnd.IntN(15001))
			head := matchertest.Frame(d.rnd, d.ref)
			for i := 0; i+len(head) <= len(frame); i += len(head) {
				copy(frame[i:], head)
			}
			d.compare(frame, nil)
		}
	}
	d.finish()
}

// The reference and the program agree where a header ends, byte for byte.
func TestProgramAgreesAtEveryShortLength(t *testing.T) {
	d := newDiffer(t)
	for range 60 {
		d.use(matchertest.Table(d.rnd))
		frame := matchertest.Frame(d.rnd, d.ref)
		frame = append(frame, make([]byte, max(0, 60-len(frame)))...)
		for n := 14; n <= 60; n++ {
			d.compare(frame[:n:n], nil)
		}
	}
	d.finish()
}

// fields returns n distinct words and masks, the words first..last.
func fields(rnd *rand.Rand, n, first, last int) []matcher.Field {
	seen := map[matcher.Field]bool{}
	var all []matcher.Field
	for len(all) < n {
		f := matcher.Field{Index: first + rnd.IntN(last-first+1), Mask: rnd.Uint32() & rnd.Uint32()}
		if rnd.IntN(3) == 0 {
			f.Mask = 0xff << (8 * rnd.UintN(4))
		}
		if f.Mask != 0 && !seen[f] {
			seen[f] = true
			all = append(all, f)
		}
	}
	return all
}

// crowd returns a table of n rulesets, most of them And, over the fields.
func crowd(rnd *rand.Rand, n int, fs []matcher.Field) *matcher.Table {
	formats := []*matcher.Format{matcher.FormatByName("packet"), matcher.FormatByName("flow"), matcher.FormatByName("slmp"), matcher.FormatByName("slmp6")}
	formats = append(formats, &matcher.Format{
		Name: "edge", Header: 512,
		Key:    []matcher.Field{{Index: 127, Mask: 0xff}, {Index: 126, Mask: 0xffff0000}, {Index: 0, Mask: 1}},
		Offset: &matcher.Field{Index: 127, Mask: 0xffff00},
		EOM:    &matcher.Rule{Index: 127, Mask: 1, Start: 1, End: 1},
	})
	t := &matcher.Table{Generation: rnd.Uint32(), Entries: map[int]matcher.Entry{}}
	for _, slot := range rnd.Perm(matcher.MaxRulesets)[:n] {
		e := matcher.Entry{Ruleset: matcher.Ruleset{Name: fmt.Sprintf("r%d", slot)}, Format: formats[rnd.IntN(len(formats))]}
		if rnd.IntN(20) == 0 {
			e.Mode = matcher.Or
		}
		for _, k := range rnd.Perm(len(fs))[:min(1+rnd.IntN(matcher.MaxRules), len(fs))] {
			f := fs[k]
			v := rnd.Uint32() & f.Mask
			r := matcher.Rule{Index: f.Index, Mask: f.Mask, Start: v, End: v}
			if rnd.IntN(3) == 0 {
				r.End = v + rnd.Uint32N(math.MaxUint32-v)
			}
			e.Rules = append(e.Rules, r)
		}
		t.Entries[slot] = e
	}
	return t
}

// Tables that leave the program's short ways: vectors of four words, fields
// beyond those matched without a call, the last words that a rule can name.
func TestProgramAgreesOnCrowdedTables(t *testing.T) {
	for _, shape := range []struct {
		name        string
		rulesets    [2]int
		fields      [2]int
		first, last int
		frame       func(d *differ) []byte
	}{
		{"up to 64 rulesets over more than 16 fields", [2]int{1, 64}, [2]int{17, 100}, 0, 127, nil},
		{"65 to 256 rulesets over up to 16 fields", [2]int{65, 256}, [2]int{1, 16}, 0, 20, nil},
		{"65 to 256 rulesets over more than 16 fields", [2]int{65, 256}, [2]int{17, 300}, 0, 127, nil},
		{"rules on the last words of the window", [2]int{1, 256}, [2]int{1, 30}, 122, 127, func(d *differ) []byte {
			frame := make([]byte, matchertest.MaxFrame)
			copy(frame, matchertest.Frame(d.rnd, d.ref))
			return frame[:484+d.rnd.IntN(40)]
		}},
	} {
		t.Run(shape.name, func(t *testing.T) {
			d := newDiffer(t)
			between := func(r [2]int) int { return r[0] + d.rnd.IntN(r[1]-r[0]+1) }
			for range 25 {
				d.use(crowd(d.rnd, between(shape.rulesets), fields(d.rnd, between(shape.fields), shape.first, shape.last)))
				for range 160 {
					frame := matchertest.Frame(d.rnd, d.ref)
					if shape.frame != nil {
						frame = shape.frame(d)
					}
					d.compare(frame, nil)
				}
			}
			d.finish()
		})
	}
}

// The largest search: 256 x 8 values of one word, no two of them neighbours, cut
// it in 4097 intervals. And the longest walk: 2048 fields.
func TestProgramAgreesOnFullTables(t *testing.T) {
	packet := matcher.FormatByName("packet")

	t.Run("one word cut in 4097 intervals", func(t *testing.T) {
		d := newDiffer(t)
		ref := &matcher.Table{Entries: map[int]matcher.Entry{}}
		order := d.rnd.Perm(matcher.MaxTableRules)
		for slot := range matcher.MaxRulesets {
			rs := matcher.Ruleset{Name: fmt.Sprintf("r%d", slot), Mode: matcher.Or}
			for _, k := range order[8*slot:][:8] {
				v := 1<<31 - 2048 + 2*uint32(k)
				rs.Rules = append(rs.Rules, matcher.Rule{Index: 1, Mask: 0xffffffff, Start: v, End: v})
			}
			ref.Entries[slot] = matcher.Entry{Ruleset: rs, Format: packet}
		}
		x, err := matcher.Compile(ref)
		if err != nil || len(x.Fields) != 1 || x.Fields[0].N != 4097 {
			t.Fatalf("%+v, %v", x.Fields, err)
		}
		d.use(ref)
		frame := make([]byte, 60)
		word := func(v uint32) {
			frame[4], frame[5], frame[6], frame[7] = byte(v>>24), byte(v>>16), byte(v>>8), byte(v)
			d.compare(frame, nil)
		}
		for k := range uint32(4098) {
			word(1<<31 - 2049 + k)
		}
		word(0)
		word(math.MaxUint32)
		if d.count != [3]int{2048 + 4, 0, 2048} {
			t.Errorf("pass, malformed, deliver: %v", d.count)
		}
	})

	t.Run("2048 fields", func(t *testing.T) {
		d := newDiffer(t)
		ref := &matcher.Table{Entries: map[int]matcher.Entry{}}
		for i := range matcher.MaxFields {
			slot := i % matcher.MaxRulesets
			e := ref.Entries[slot]
			e.Name, e.Mode, e.Format = fmt.Sprintf("r%d", slot), matcher.Mode(slot%2), packet
			mask := 0xffff0000 | uint32(i)
			v := d.rnd.Uint32() & mask
			e.Rules = append(e.Rules, matcher.Rule{Index: i / 16, Mask: mask, Start: v, End: v})
			ref.Entries[slot] = e
		}
		if x, err := matcher.Compile(ref); err != nil || len(x.Fields) != matcher.MaxFields {
			t.Fatalf("%d fields, %v", len(x.Fields), err)
		}
		d.use(ref)
		for range 1000 {
			d.compare(matchertest.Frame(d.rnd, d.ref), nil)
		}
		if d.count[matcher.Deliver] == 0 {
			t.Errorf("pass, malformed, deliver: %v", d.count)
		}
	})
}

// What cannot be tested is an error, and the next frame can be.
func TestTesterRefusesFramesThatNoProgramCanSee(t *testing.T) {
	netnstest.NeedRoot(t)
	tester, err := NewTester(one(matcher.MatchAll(), "packet"))
	if err != nil {
		t.Fatal(err)
	}
	defer tester.Close()
	for n, ok := range map[int]bool{0: false, 13: false, 14: true, 65536: true, 65550: true, 70000: true, 1 << 17: false} {
		v, err := tester.Verdict(make([]byte, n))
		if ok != (err == nil) || !ok && !errors.Is(err, ErrFrame) || ok && v.Action != matcher.Deliver {
			t.Errorf("%d bytes: %+v, %v", n, v, err)
		}
	}
	if v, err := tester.Verdict(make([]byte, 60)); err != nil || v.Action != matcher.Deliver {
		t.Errorf("afterwards: %+v, %v", v, err)
	}
	if err := tester.Close(); err != nil {
		t.Error(err)
	}
}

// one returns a table of one ruleset, number 7 for context 9.
func one(rs matcher.Ruleset, format string) *matcher.Table {
	return &matcher.Table{Generation: 5, Entries: map[int]matcher.Entry{7: {Ruleset: rs, Context: 9, Format: matcher.FormatByName(format)}}}
}

func TestTesterRefusesTables(t *testing.T) {
	netnstest.NeedRoot(t)
	two := func(a, b *matcher.Format) *matcher.Table {
		return &matcher.Table{Entries: map[int]matcher.Entry{
			1: {Ruleset: matcher.UDP(), Context: 3, Format: a},
			2: {Ruleset: matcher.ICMPEcho(), Context: 3, Format: b},
		}}
	}
	for _, tt := range []struct {
		name  string
		table *matcher.Table
		want  []string // none: it loads
	}{
		{"a context with two formats", two(matcher.FormatByName("packet"), matcher.FormatByName("flow")), []string{"context 3", "two message formats", "packet", "flow"}},
		{"a context with two copies of a format", two(matcher.FormatByName("flow"), matcher.FormatByName("flow")), nil},
		{"an entry without format beside one with", two(matcher.FormatByName("flow"), nil), []string{"icmp-echo", "no message format"}},
		{"a context out of range", &matcher.Table{Entries: map[int]matcher.Entry{0: {Ruleset: matcher.UDP(), Context: 256, Format: matcher.FormatByName("flow")}}}, []string{"context 256", "0 to 255"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tester, err := NewTester(tt.table)
			if (err == nil) != (tt.want == nil) {
				t.Fatalf("error %v", err)
			}
			if err == nil {
				tester.Close()
				return
			}
			for _, s := range tt.want {
				if !strings.Contains(err.Error(), s) {
					t.Errorf("%q does not say %q", err, s)
				}
			}
		})
	}
}

// without runs fn on a thread that lacks capabilities, and ends the thread.
func without(t *testing.T, fn func(), caps ...capability.Cap) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: nobody else shall get this thread
		hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		err := unix.Capget(&hdr, &data[0])
		for _, c := range caps {
			data[c/32].Effective &^= 1 << (c % 32)
		}
		if err == nil {
			err = unix.Capset(&hdr, &data[0])
		}
		if err == nil {
			fn()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// Frames that are tested, and handlers in eBPF.
func TestTheMissingCapabilityIsNamed(t *testing.T) {
	netnstest.NeedRoot(t)
	o, err := BuiltinObject("noop")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		caps []capability.Cap
		want string // nothing: it loads
	}{
		{[]capability.Cap{capability.NetAdmin}, "CAP_NET_ADMIN:"},
		{[]capability.Cap{capability.BPF, capability.Perfmon, capability.SysAdmin}, "CAP_BPF, CAP_PERFMON:"},
		{[]capability.Cap{capability.Perfmon, capability.SysAdmin}, "CAP_PERFMON:"},
		{[]capability.Cap{capability.NetRaw}, ""}, // which only sockets need
	} {
		without(t, func() {
			tester, err := NewTester(one(matcher.UDP(), "flow"))
			switch {
			case tt.want == "" && err == nil:
				tester.Close()
			case tt.want == "" || !errors.Is(err, capability.ErrMissing) || !strings.Contains(err.Error(), tt.want):
				t.Errorf("without %v: %v", tt.caps, err)
			}
			h, err := o.Load(HandlersConfig{Format: matcher.FormatByName("packet")})
			switch {
			case tt.want == "" && err == nil:
				h.Close()
			case tt.want == "" || !errors.Is(err, capability.ErrMissing) || !strings.Contains(err.Error(), tt.want):
				t.Errorf("handlers without %v: %v", tt.caps, err)
			}
		}, tt.caps...)
	}
}
