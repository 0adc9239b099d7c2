// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns/netnstest"
)

// rivals returns one of two tables of 250 rulesets that have everything about
// them different: what number a frame matches, the context and generation that
// it gets, the key that it has. Frames that start with 1 are refused by their
// context, those that start with 2 delivered.
func rivals(generation uint32) *matcher.Table {
	refuse, deliver, context := 200, 201, uint16(1)
	word := 5
	if generation%2 == 1 {
		refuse, deliver, context = 10, 11, 3
		word = 6
	}
	t := &matcher.Table{Generation: generation, Entries: map[int]matcher.Entry{}}
	format := &matcher.Format{Name: "key", Key: []matcher.Field{{Index: word, Mask: 0xffffffff}}, Header: 14}
	equals := func(index int, v uint32) matcher.Rule {
		return matcher.Rule{Index: index, Mask: 0xffffffff, Start: v, End: v}
	}
	for slot := range 250 {
		// Fields of their own, in tables of their own order, so that half of one
		// table and half of the other decide nothing right.
		rules := []matcher.Rule{equals(0, uint32(slot)+100), equals((slot+word)%20, 7)}
		switch slot {
		case refuse:
			rules = []matcher.Rule{equals(0, 1), equals(word, uint32(word))}
		case deliver:
			rules = []matcher.Rule{equals(0, 2), equals(word, uint32(word))}
		}
		e := matcher.Entry{Ruleset: matcher.Ruleset{Name: fmt.Sprintf("r%d", slot), Rules: rules}, Context: context, Format: format}
		if slot == deliver {
			e.Context++
		}
		t.Entries[slot] = e
	}
	return t
}

// Each packet is matched by one table or by the other, never by some of both:
// number, context, generation and key always belong together, and none is
// missed between the two.
func TestTableChangesAreAtomic(t *testing.T) {
	netnstest.NeedRoot(t)
	const changes, packets = 110, 100_000
	tester, err := newTester(rivals(0), onOneHPU(rivals(0)), Config{Mode: Generic, HPUs: 1, Queues: 1, BufferSize: 2000, MaxBuffers: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer tester.Close()
	in := tester.in
	in.Share().Credit[1], in.Share().Credit[3] = 0, 0

	frame := func(first byte) []byte {
		b := make([]byte, 64)
		b[3], b[4*5+3], b[4*6+3] = first, 5, 6
		return b
	}
	var stop atomic.Bool
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop.Store(true)

	// The kernel's own loop spends nearly all its time in the program, so a
	// change meets it there. It ends with a refusal, which leaves the frame as
	// it was for the next round.
	wg.Go(func() {
		for !stop.Load() {
			ret, err := in.objs.XspinIngress.Run(&ebpf.RunOptions{Data: frame(1), Repeat: 1000})
			if err != nil || ret != xdpDrop {
				t.Errorf("verdict %d, %v", ret, err)
				return
			}
		}
	})
	// Single runs show all that is said about a frame.
	var seen [2]atomic.Uint64
	wg.Go(func() {
		data, out := frame(2), make([]byte, bpf.MetaSize+64)
		for last := uint32(0); !stop.Load(); {
			ret, err := in.objs.XspinIngress.Run(&ebpf.RunOptions{Data: data, DataOut: out})
			if err != nil || ret != xdpRedirect {
				t.Errorf("verdict %d, %v", ret, err)
				return
			}
			m := bpf.MetaOf(out)
			ruleset, context, key := uint8(201), uint16(2), uint32(5)
			if m.Generation%2 == 1 {
				ruleset, context, key = 11, 4, 6
			}
			if m.Ruleset != ruleset || m.Context != context || m.Key != [bpf.MaxKey]uint32{key} || m.Generation < last {
				t.Errorf("mixed, after generation %d: %+v", last, *m)
				return
			}
			last = m.Generation
			seen[last%2].Add(1)
		}
	})

	for g := uint32(1); g <= changes || seen[0].Load()+seen[1].Load() < packets/10; g++ {
		if t.Failed() {
			return
		}
		if err := in.Publish(rivals(g), onOneHPU(rivals(g))); err != nil {
			t.Fatal(err)
		}
		// Runs and changes both wait for grace periods: now out of step with
		// each other, now as close as can be.
		if g%4 == 0 {
			time.Sleep(rand.N(10 * time.Millisecond))
		}
		// Whoever returns from Publish never sees the old table again.
		out := make([]byte, bpf.MetaSize+64)
		if _, err := in.objs.XspinIngress.Run(&ebpf.RunOptions{Data: frame(2), DataOut: out}); err != nil {
			t.Fatal(err)
		}
		if m := bpf.MetaOf(out); m.Generation != g {
			t.Fatalf("generation %d after %d was published", m.Generation, g)
		}
	}
	stop.Store(true)
	wg.Wait()

	s := addUp(t, in)
	if s.Passed+s.Malformed+s.Failed+s.Oversize != 0 {
		t.Errorf("some packets met no table: %d passed, %d malformed, %d failed, %d oversize", s.Passed, s.Malformed, s.Failed, s.Oversize)
	}
	if s.Matched[200] != s.Refused[1] || s.Matched[10] != s.Refused[3] || s.Matched[201]+s.Matched[11] != s.Redirected ||
		s.Matched[201] != uint64(in.Queue(0).Issued[2]) || s.Matched[11] != uint64(in.Queue(0).Issued[4]) {
		t.Errorf("ruleset and context do not go together: matched %d %d %d %d, refused %d %d, redirected %d",
			s.Matched[200], s.Matched[10], s.Matched[201], s.Matched[11], s.Refused[1], s.Refused[3], s.Redirected)
	}
	if s.Seen < packets || s.Matched[200] == 0 || s.Matched[10] == 0 || seen[0].Load() == 0 || seen[1].Load() == 0 {
		t.Errorf("too little to prove anything: %d packets, %d and %d by table; singly %d and %d", s.Seen, s.Matched[200], s.Matched[10], seen[0].Load(), seen[1].Load())
	}
	t.Logf("%d packets by one table and %d by the other", s.Matched[200]+s.Matched[201], s.Matched[10]+s.Matched[11])
}

// Each change goes through the map of maps, because the kernel waits for a grace
// period there and nowhere else that we can reach. What it is good for, two
// changes within the time of one run of the program, is too rare to be met.
func TestPublishWaitsForAGracePeriod(t *testing.T) {
	netnstest.NeedRoot(t)
	tester, err := newTester(rivals(0), onOneHPU(rivals(0)), Config{Mode: Native, HPUs: 1, Queues: 1, BufferSize: 2000, MaxBuffers: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer tester.Close()
	barrier := tester.in.barrier
	if kind := barrier.Type(); kind != ebpf.ArrayOfMaps {
		t.Errorf("the barrier is a map of type %v", kind)
	}
	if err := barrier.Delete(uint32(0)); err != nil {
		t.Fatal(err)
	}
	if err := tester.in.Publish(rivals(1), onOneHPU(rivals(1))); err != nil {
		t.Fatal(err)
	}
	var id ebpf.MapID
	if err := barrier.Lookup(uint32(0), &id); err != nil {
		t.Errorf("after Publish the barrier was not updated: %v", err)
	}
}

// Publishing leaves nothing behind.
func TestPublishingOpensNothing(t *testing.T) {
	netnstest.NeedRoot(t)
	tester, err := newTester(rivals(0), onOneHPU(rivals(0)), Config{Mode: Native, HPUs: 1, Queues: 1, BufferSize: 2000, MaxBuffers: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer tester.Close()
	before := descriptors(t)
	for i := range 200 {
		next := rivals(uint32(i))
		if err := tester.in.Publish(next, onOneHPU(next)); err != nil {
			t.Fatal(err)
		}
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors, before %d", after, before)
	}
}

// descriptors counts the open files of the process.
func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// What cannot be published leaves the table that was there.
func TestPublishRefusesTables(t *testing.T) {
	netnstest.NeedRoot(t)
	tester, err := NewTester(one(matcher.MatchAll(), "packet"))
	if err != nil {
		t.Fatal(err)
	}
	defer tester.Close()
	flow := matcher.FormatByName("flow")
	udp := func(slot int, id uint16, f *matcher.Format) *matcher.Table {
		return &matcher.Table{Entries: map[int]matcher.Entry{slot: {Ruleset: matcher.UDP(), Context: id, Format: f}}}
	}
	slmp := matcher.FormatByName("slmp")
	message := func(base, size int) Delivery {
		return Delivery{Policy: ByMessage, CoreMask: 1, Buckets: bpf.Range{Base: base, Size: size}}
	}
	blocked := func(size int, sequence uint32, vhpus int) Delivery {
		return Delivery{Policy: BlockedRR, CoreMask: 1, Buckets: bpf.Range{Size: size}, Sequence: sequence, VHPUs: vhpus}
	}
	for _, tt := range []struct {
		name    string
		table   *matcher.Table
		context Delivery // 3
		want    string   // none: it is published
	}{
		{"a ruleset of a context that is missing", udp(4, 8, flow), Delivery{}, "ruleset 4 (udp): context 8 is missing"},
		{"a ruleset number out of range", udp(256, 3, flow), Delivery{Policy: ByPacket}, "256"},
		{"a context number out of range", udp(4, 256, flow), Delivery{}, "context 256, want 0 to 255"},
		{"a context without format", udp(4, 3, nil), Delivery{Policy: ByPacket}, "ruleset udp (number 4) has no message format"},
		{"a context with a bad format", udp(4, 3, &matcher.Format{Name: "bad", Key: make([]matcher.Field, 9)}), Delivery{Policy: ByPacket}, "9 key words"},
		{"no buckets", udp(4, 3, flow), message(0, 0), "context 3: buckets 0+0"},
		{"buckets that are no power of two", udp(4, 3, flow), message(0, 3), "power of two"},
		{"buckets before the first", udp(4, 3, flow), message(-1, 2), "context 3: buckets -1+2"},
		{"buckets beyond the last", udp(4, 3, flow), message(bpf.MaxBuckets-1, 2), "context 3: buckets 262143+2"},
		{"no such policy", udp(4, 3, flow), Delivery{Policy: 3, CoreMask: 1}, "context 3: policy: 3: want ByMessage"},
		{"blocked-rr without an offset", udp(4, 3, flow), blocked(64, 1, 1), "context 3: policy: blocked-rr needs a message format with offsets, and flow has none"},
		{"blocked-rr without buckets", udp(4, 3, slmp), blocked(0, 1, 1), "context 3: buckets 0+0"},
		{"blocked-rr with empty sequences", udp(4, 3, slmp), blocked(64, 0, 1), "context 3: sequence: blocked-rr needs the bytes of a sequence"},
		{"blocked-rr without virtual HPUs", udp(4, 3, slmp), blocked(64, 1, 0), "context 3: vhpus: blocked-rr with 0 virtual HPUs: want 1 to 65535"},
		{"blocked-rr with too many virtual HPUs", udp(4, 3, slmp), blocked(64, 1, 65536), "context 3: vhpus: blocked-rr with 65536 virtual HPUs"},
		{"a sequence without blocked-rr", udp(4, 3, slmp), Delivery{Policy: ByPacket, CoreMask: 1, Sequence: 1}, "context 3: policy: sequence and vhpus go with blocked-rr"},
		{"the last two buckets", udp(4, 3, flow), message(bpf.MaxBuckets-2, 2), ""},
		{"all buckets", udp(4, 3, flow), message(0, bpf.MaxBuckets), ""},
		{"blocked-rr with the shortest sequence and one virtual HPU", udp(4, 3, slmp), blocked(64, 1, 1), ""},
		{"blocked-rr with the longest sequence and the most virtual HPUs", udp(4, 3, slmp), blocked(64, 1<<32-1, 65535), ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := tester.in.Publish(tt.table, map[uint16]Delivery{3: tt.context})
			if tt.want == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
			if v, err := tester.Verdict(make([]byte, 60)); err != nil || v.Context != 9 {
				t.Errorf("afterwards: %+v, %v", v, err)
			}
		})
	}
}

// The engine's capacities, in C, and the matcher's, in Go, are the same.
func TestCapacitiesAgree(t *testing.T) {
	for _, c := range []struct {
		name      string
		inC, inGo int
	}{
		{"rulesets", bpf.MaxRulesets, matcher.MaxRulesets},
		{"contexts", bpf.MaxContexts, matcher.MaxContexts},
		{"key words", bpf.MaxKey, matcher.MaxKey},
		{"fields", bpf.MaxFields, matcher.MaxFields},
		{"intervals", bpf.MaxBounds, matcher.MaxIntervals},
		{"vector words", bpf.VecWords, matcher.MaxWords},
		{"window", int(bpf.IngressXspinLimitsXSPIN_WINDOW), 4 * (matcher.MaxIndex + 1)},
	} {
		if c.inC != c.inGo {
			t.Errorf("%s: %d in C, %d in Go", c.name, c.inC, c.inGo)
		}
	}
}
