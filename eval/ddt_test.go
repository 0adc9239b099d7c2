// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/ddt/ddttest"
	"github.com/xspin/xspin/demos/datatypes"
	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/mpich"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/netns/testbed"
)

func TestBenchDDTFlags(t *testing.T) {
	judged(t, ddtFlags, map[string]string{
		"":                     "",
		"--only place,scale":   "",
		"--only cpu,strategie": "--only strategie: want place, loop, strategy, scale, cpu, overlap, commit",
	})
	root := benchCmd()
	root.SetArgs([]string{"ddt", "--only", "nothing"})
	root.SetOut(io.Discard)
	root.SetErr(io.Discard)
	if err := root.Execute(); err == nil || !strings.Contains(err.Error(), "bench ddt: --only nothing: want place") {
		t.Errorf("error %v", err)
	}
}

// All that the table of types asks for, each once.
func TestBenchDDTTypes(t *testing.T) {
	o := ddtDefaults()
	apps, err := o.appTypes()
	if err != nil {
		t.Fatal(err)
	}
	vectors, err := o.vectorTypes(ddt.Byte, ddt.Int, ddt.Float, ddt.Double)
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]*ddtType{}
	for _, d := range append(apps, vectors...) {
		if names[d.name] != nil {
			t.Errorf("two types are called %s", d.name)
		}
		names[d.name] = d
		if lo, _ := d.data.Bounds(); lo < 0 {
			t.Errorf("%s reaches before its buffer, where there is no memory", d.name)
		}
		if d.loop == nil {
			t.Errorf("%s has no loop", d.name)
		}
		if d.bytes != strings.HasSuffix(d.name, "_byte") {
			t.Errorf("%s: all leaves are MPI_BYTE: %v", d.name, d.bytes)
		}
	}
	if len(apps) != 15 || len(vectors) != 10+10+10+9 {
		t.Errorf("%d applications' types and %d vectors", len(apps), len(vectors))
	}
	for _, name := range detailed {
		if names[name] == nil {
			t.Errorf("there is no %s", name)
		}
	}
	v := names["vector_64B_double"]
	if v == nil || v.data.Size() != vectorBytes || v.data.Blocks() != vectorBytes/64 {
		t.Fatalf("vector of 64 bytes: %+v", v)
	}
	if _, hi := v.data.Bounds(); hi != 2*vectorBytes-64 {
		t.Errorf("it ends at %d", hi)
	}
}

func TestOrdersHaveEachRangeOnce(t *testing.T) {
	const size = 100*ddtPacket + 1
	for i, o := range ddtOrders {
		first := o.ranges(size)
		if inOrder := slices.IsSorted(first); inOrder != (i == 0) {
			t.Errorf("%s: %v", o.name, first)
		}
		if again := o.ranges(size); !slices.Equal(first, again) {
			t.Errorf("%s is another one each time", o.name)
		}
		slices.Sort(first)
		for k, at := range first {
			if at != int64(k)*ddtPacket {
				t.Fatalf("%s: range %d at %d", o.name, k, at)
			}
		}
		if len(first) != 101 {
			t.Errorf("%s: %d ranges", o.name, len(first))
		}
	}
}

func TestGeometricMeansAreOfEachRun(t *testing.T) {
	a, b := geomean([]duel{
		{"x", []float64{1, 4}, []float64{2, 2}},
		{"y", []float64{4, 16}, []float64{8, 2}},
	})
	for i, want := range []float64{2, 8} {
		if math.Abs(a[i]-want) > 1e-12 || math.Abs(b[i]-[]float64{4, 2}[i]) > 1e-12 {
			t.Errorf("run %d: %g, %g", i, a[i], b[i])
		}
	}
	// By medians, which one bad run does not change.
	if d := least([]duel{
		{"steady", []float64{2, 2, 2}, []float64{2, 2, 2}},
		{"worst", []float64{9, 1, 1}, []float64{2, 2, 2}},
		{"once", []float64{3, 0.1, 3}, []float64{2, 2, 2}},
	}); d.what != "worst" {
		t.Errorf("the least is %s", d.what)
	}
}

// What is measured in ranges, in whatever order, is that all of a message is placed.
func TestContendersPlaceAllOfAMessage(t *testing.T) {
	o := ddtOptions{apps: []string{"SPECFEM3D_cm", "WRF_x", "MILC"}}
	types, err := o.appTypes()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range types {
		_, hi := d.data.Bounds()
		a := &arena{mem: make([]byte, hi), stream: make([]byte, d.data.Size())}
		for i := range a.stream {
			a.stream[i] = byte(1 + i%255)
		}
		want := make([]byte, hi)
		if _, err := d.data.Unpack(want, 0, 0, a.stream); err != nil {
			t.Fatal(err)
		}
		b := &ddtBench{cfg: benchConfig{warn: func(s string) { t.Errorf("%s: warned: %s", d.name, s) }}}
		all := b.contenders(d)
		if all[0].strategy != ddt.Direct {
			t.Fatalf("%s: the first is %s", d.name, all[0].name)
		}
		for _, s := range []string{ddt.ROCP, ddt.RWCP} {
			c := b.badly(d, s)
			if c == nil {
				t.Fatalf("%s: no bad interval for %s", d.name, s)
			}
			all = append(all, c)
		}
		for _, o := range ddtOrders {
			ranges := o.ranges(d.data.Size())
			for _, c := range all {
				clear(a.mem)
				if c.place(a, d, ranges); !bytes.Equal(a.mem, want) {
					t.Errorf("%s, %s, %s: not as the whole at once", d.name, o.name, c.name)
				}
			}
			clear(a.mem)
			if a.unpack(d, ranges); !bytes.Equal(a.mem, want) {
				t.Errorf("%s, %s, direct: not as the whole at once", d.name, o.name)
			}
		}
		clear(a.mem)
		if d.loop(a.mem, a.stream); !bytes.Equal(a.mem, want) {
			t.Errorf("%s: the loop does something else", d.name)
		}
	}
}

// What is measured for direct places every byte, in either order, warm and cold; cold
// means that other memory was written before each measurement.
func TestPlacingOncePlacesAll(t *testing.T) {
	o := ddtOptions{apps: []string{"NAS_LU", "SPECFEM3D_oc", "MILC"}}
	types, err := o.appTypes()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range types {
		_, hi := d.data.Bounds()
		a := &arena{mem: make([]byte, hi), stream: make([]byte, d.data.Size()), cold: make([]byte, 65)}
		want := make([]byte, hi)
		for i, place := range ddttest.Places(d.typ, d.count) {
			a.stream[i] = byte(1 + i%251)
			want[place] = a.stream[i]
		}
		flushed := byte(0)
		for _, o := range ddtOrders {
			for cold, temperature := range temperatures {
				clear(a.mem)
				if gbps := a.placeOnce(d, o, 3, cold); gbps <= 0 {
					t.Errorf("%s, %s, %s: %g GB/s", d.name, o.name, temperature, gbps)
				}
				if !bytes.Equal(a.mem, want) {
					t.Errorf("%s, %s, %s: not as the type says", d.name, o.name, temperature)
				}
				if flushed += byte(3 * cold); a.cold[0] != flushed || a.cold[64] != flushed {
					t.Errorf("%s, %s, %s: other memory was written %d times, want %d", d.name, o.name, temperature, a.cold[0], flushed)
				}
			}
		}
	}
}

// noted is an unpacker that notes what it is asked for.
type noted struct {
	count, flush int64
	repetitions  int
}

func (n *noted) Measure(_ context.Context, _ *ddt.Type, count int64, repetitions int, flush int64) (mpich.Unpacked, error) {
	*n = noted{count, flush, repetitions}
	return mpich.Unpacked{Unpack: []time.Duration{9000, 2000, 1000}, Pack: []time.Duration{1}}, nil
}

// Both sides are measured as often, as cold, and the figures are where they belong.
func TestPlacingOnceOnBothSides(t *testing.T) {
	o := ddtOptions{apps: []string{"NAS_LU"}}
	types, err := o.appTypes()
	if err != nil {
		t.Fatal(err)
	}
	cfg := benchConfig{1, 600 * time.Millisecond, time.Millisecond, func(s string) { t.Error(s) }}
	b := &ddtBench{benchLab: &benchLab{receiver: testbed.CPUs()[0]}, cfg: cfg}
	a, err := b.newArena(types)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = a.free() }()
	a.cold = a.cold[:1<<20]
	var runs placed
	for cold, want := range []noted{{types[0].count, 0, 12}, {types[0].count, 1 << 20, 3}} {
		var u noted
		if err := b.placeOnce(t.Context(), &u, a, types[0], &runs, cold); err != nil {
			t.Fatal(err)
		}
		if u != want {
			t.Errorf("%s: MPICH was asked for %+v, want %+v", temperatures[cold], u, want)
		}
		if want := byte(2 * want.repetitions * cold); a.cold[0] != want {
			t.Errorf("%s: other memory was written %d times, want %d", temperatures[cold], a.cold[0], want)
		}
		same(t, temperatures[cold], runs.mpich[cold], []float64{float64(types[0].data.Size()) / 2000})
		for o := range ddtOrders {
			if len(runs.direct[o][cold]) != 1 || cold == 0 && runs.direct[o][1] != nil {
				t.Errorf("after %s: %+v", temperatures[cold], runs)
			}
		}
	}
}

// By hand: 3 GB in 6 s are 4 Gbit/s.
func TestFiguresOfTransfers(t *testing.T) {
	var m moved
	for range 2 {
		m.ours(&datatypes.Round{
			Bytes: 1.5e9, Took: 3 * time.Second, Segments: 1000, Retransmitted: 25, NIC: 90 * time.Second,
			CPU: datatypes.CPU{NIC: 1 * time.Second, App: 2 * time.Second, Sender: 1500 * time.Millisecond, Machine: 6 * time.Second},
		})
	}
	var r movedRuns
	r.add(m)
	m = moved{}
	m.theirs(1e9, mpich.Rounds{Times: []time.Duration{time.Second, 3 * time.Second}, Receiver: 3 * time.Second, Sender: 2 * time.Second}, 8*time.Second)
	r.add(m)
	for _, f := range []struct {
		what      string
		got, want []float64
	}{
		{"Gbit/s", r.gbps, []float64{4, 4}},
		{"s/GB of the machine", r.machine, []float64{4, 4}},
		{"s/GB of processes", r.processes, []float64{3, 2.5}},
		{"% again", r.again, []float64{2.5}},
	} {
		same(t, f.what, f.got, f.want)
	}
	s := r.cpu("x")
	same(t, "runs of CPU time", s.Runs, r.machine)
	for name, want := range map[string]float64{"of_processes_s_per_GB": 2.75, "goodput_gbps": 4, "sent_again_percent": 2.5} {
		same(t, name, []float64{s.More[name]}, []float64{want})
	}
	s = r.goodput("x")
	same(t, "runs of goodput", s.Runs, r.gbps)
	same(t, "machine_s_per_GB", []float64{s.More["machine_s_per_GB"]}, []float64{4})
}

func same(t *testing.T, what string, got, want []float64) {
	t.Helper()
	if !slices.EqualFunc(got, want, func(x, y float64) bool { return math.Abs(x-y) <= 1e-9*math.Abs(y) }) {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

// By hand: in two trials GEMMs take 10 ms alone and 11 with messages, these 4 ms and 5
// until they are found, and both 12.
func TestFiguresOfOverlap(t *testing.T) {
	const ms = time.Millisecond
	var ours, theirs overlapped
	for i := range 2 {
		// FPsPIN's: 4.5 and 3.5 of 5 ms.
		ours.ours(10*ms, 4*ms, &datatypes.Overlapped{
			Round: datatypes.Round{Took: 5 * ms, NIC: 3 * ms, Segments: 100, Retransmitted: 5, Duplicates: uint64(9 * i)}, Compute: 11 * ms, Both: 12 * ms, Hit: i == 0,
			ComputeBefore: time.Duration(4500-1000*i) * time.Microsecond,
		})
		theirs.theirs(10*ms, 8*ms, mpich.Overlap{Computed: 10 * ms, Detected: 12 * ms, Total: 16 * ms}, mpich.Overlap{Computed: 3 * ms, Detected: 4 * ms, Total: 4 * ms})
	}
	if ours.segments != 200 || ours.lost != 5 { // 5, and those that were sent again for nothing
		t.Errorf("%d of %d segments were lost", ours.lost, ours.segments)
	}
	for _, c := range []struct {
		who  string
		o    overlapped
		want map[string]float64
	}{
		{"ours", ours, map[string]float64{"both": 12, "gemms": 10, "messages": 4, "nic": 3, "hidden": 0.5, "gemms slower": 1.1, "messages slower": 1.25, "ratio": 0.8, "missed": 0.5}},
		{"theirs", theirs, map[string]float64{"both": 16, "gemms": 10, "messages": 8, "hidden": 0.25, "gemms slower": 1, "messages slower": 1.5, "ratio": 0.75}},
	} {
		var r overlapRuns
		r.add(c.o)
		for what, got := range map[string][]float64{
			"both": r.both, "gemms": r.compute, "messages": r.transfer, "nic": r.nic, "hidden": r.hidden,
			"gemms slower": r.computeSlower, "messages slower": r.transferSlower, "ratio": r.ratio, "missed": r.misses,
		} {
			var want []float64
			if w, ok := c.want[what]; ok {
				want = []float64{w}
			}
			same(t, c.who+", "+what, got, want)
		}
		s := r.side("x", "ms", r.both)
		same(t, "runs", s.Runs, r.both)
		for name, what := range map[string]string{"gemms_alone_ms": "gemms", "messages_alone_ms": "messages", "gemms_slower": "gemms slower", "messages_slower": "messages slower"} {
			same(t, c.who+", "+name, []float64{s.More[name]}, []float64{c.want[what]})
		}
	}
}

// All that CPUs do counts, in whatever mode, but not that they wait.
func TestBusyTimeOfTheMachine(t *testing.T) {
	counted := func() (sum time.Duration) {
		stat, err := os.ReadFile("/proc/stat")
		if err != nil {
			t.Fatal(err)
		}
		f := strings.Fields(strings.SplitN(string(stat), "\n", 2)[0])
		for _, column := range []int{1, 2, 3, 6, 7} { // user, nice, system, irq, softirq
			n, err := strconv.Atoi(f[column])
			if err != nil {
				t.Fatal(err)
			}
			sum += time.Duration(n) * 10 * time.Millisecond
		}
		return sum
	}
	before := counted()
	busy, err := datatypes.BusyCPUs()
	if err != nil {
		t.Fatal(err)
	}
	if after := counted(); busy < before || busy > after {
		t.Errorf("%v, want %v to %v", busy, before, after)
	}
}

func TestFiguresOfThreads(t *testing.T) {
	const s = time.Second
	all := []threadDone{
		{packets: 8e6, busy: 2 * s, cpu: 1 * s, begin: 10 * s, end: 14 * s},
		{packets: 3e6, busy: 3 * s, cpu: 2 * s, begin: 13 * s, end: 15 * s},
	}
	var one, two scaledRuns
	one.add(all, 0)
	two.add(all, 1)
	all[1].begin, all[1].end = 14*s, 16*s // one after the other
	one.add(all, 0)
	same(t, "busy", append(one.busy, two.busy...), []float64{4, 4, 1})
	same(t, "CPU", append(one.cpu, two.cpu...), []float64{8, 8, 1.5})
	same(t, "together", append(one.together, two.together...), []float64{0.25, 0, 0.5})
	same(t, "together, alone", []float64{together(all[:1], 0)}, []float64{1})
}

func TestThreadsCopyTogether(t *testing.T) {
	cpus := testbed.CPUs()
	all, err := copies(t.Context(), []int{cpus[0], cpus[len(cpus)-1]}, 100, 300_000, 20*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	for i, d := range all {
		if d.packets == 0 || d.cpu <= 0 || d.busy != d.end-d.begin || together(all, i) <= 0 {
			t.Errorf("thread %d: %+v, together for %g of its time", i, d, together(all, i))
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := copies(ctx, cpus[:1], 100, 300_000, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	if _, err := copies(t.Context(), []int{cpus[0], 1023}, 100, 300_000, time.Millisecond); err == nil {
		t.Error("there is CPU 1023")
	}
}

// A strategy that cannot be had is missed, but not specialized where it is for other
// types.
func TestMissingStrategiesAreWarnedOf(t *testing.T) {
	typ, err := ddt.Parse("ctg(3000000000)[hvec(2 1 9)[ctg(3)[byte]]]")
	if err != nil {
		t.Fatal(err)
	}
	d, err := newDDTType("huge", typ, 1) // more blocks than checkpoints are made of
	if err != nil {
		t.Fatal(err)
	}
	var warnings []string
	b := &ddtBench{cfg: benchConfig{warn: func(s string) { warnings = append(warnings, s) }}}
	var names []string
	for _, c := range b.contenders(d) {
		names = append(names, c.name)
	}
	for _, name := range []string{ddt.ROCP, ddt.RWCP} {
		if b.badly(d, name) != nil {
			t.Errorf("there is a bad %s", name)
		}
	}
	b.crews(d)
	if got := strings.Join(names, ", "); got != "direct made for 4 HPUs" {
		t.Errorf("there are %s", got)
	}
	want := []string{
		"huge: direct is compared without hpu-local made for 4 HPUs: ",
		"huge: direct is compared without ro-cp made for 4 HPUs: ", "huge: direct is compared without rw-cp made for 4 HPUs: ",
		"huge: direct is compared without hpu-local made for 1 HPU: ",
		"huge: direct is compared without ro-cp made for 1 HPU: ", "huge: direct is compared without rw-cp made for 1 HPU: ",
		"no row ddt/bad_interval/huge/ro-cp: ", "no row ddt/bad_interval/huge/rw-cp: ",
		"no row ddt/strategy_hpus/huge/hpu-local: ", "no row ddt/strategy_hpus/huge/ro-cp: ", "no row ddt/strategy_hpus/huge/rw-cp: ",
		"no row ddt/strategy_hpus/huge/rw-cp_one_sequence: ", "no row ddt/strategy_hpus/huge/rw-cp_one_packet: ",
	}
	if !slices.EqualFunc(warnings, want, strings.HasPrefix) {
		t.Errorf("warned:\n%s\nwant:\n%s", strings.Join(warnings, "\n"), strings.Join(want, "\n"))
	}
}

// HPUs place messages of these together: no byte may be in two packets.
func TestSharedTypesDoNotOverlap(t *testing.T) {
	o := ddtDefaults()
	types, err := o.shared()
	if err != nil {
		t.Fatal(err)
	}
	if len(types) != len(sharedTypes) {
		t.Errorf("%d types of %d", len(types), len(sharedTypes))
	}
	for _, d := range types {
		if n := d.data.Size(); n < 19*vectorBytes || n > 20*vectorBytes {
			t.Errorf("%s: messages of %d bytes", d.name, n)
		}
		_, hi := d.data.Bounds()
		seen := make([]bool, hi)
		for _, place := range ddttest.Places(d.typ, d.count) {
			if seen[place] {
				t.Fatalf("%s: byte %d twice", d.name, place)
			}
			seen[place] = true
		}
	}
	// As Complex, but for the room.
	apart, complexType := types[0].data, resolve(t, "Complex")
	if apart.Size()/types[0].count != complexType.Size() {
		t.Errorf("%s has %d bytes, Complex %d", types[0].name, apart.Size()/types[0].count, complexType.Size())
	}
}

func resolve(t *testing.T, name string) *ddt.Type {
	t.Helper()
	typ, _, err := ddt.Resolve(name)
	if err != nil {
		t.Fatal(err)
	}
	return typ
}

func TestShuffledWithin(t *testing.T) {
	all := shuffled(100, 32)
	if slices.IsSorted(all) {
		t.Error("in order")
	}
	for i, k := range all {
		if k/32 != i/32 {
			t.Errorf("packet %d is at %d", k, i)
		}
	}
	slices.Sort(all)
	for i, k := range all {
		if i != k {
			t.Fatalf("packet %d is not there once", i)
		}
	}
}

func TestCallsAreMeasured(t *testing.T) {
	a := &arena{cold: make([]byte, 130)}
	calls := 0
	if ns := a.measure(3, true, func() { calls++ }); ns < 0 || calls != 1+3 {
		t.Errorf("cold: %g ns, %d calls", ns, calls)
	}
	if a.cold[0] != 3 || a.cold[64] != 3 || a.cold[128] != 3 {
		t.Errorf("other memory was written %d, %d and %d times", a.cold[0], a.cold[64], a.cold[128])
	}
	calls = 0
	if ns := a.measure(3, false, func() { calls++; time.Sleep(span / 4) }); ns < float64(span/4) || calls < 1+1+3 {
		t.Errorf("warm: %g ns, %d calls", ns, calls)
	}
	if a.cold[0] != 3 {
		t.Error("other memory was written although it is to be warm")
	}
}

// smallDDT is every row of it in as little time as may be.
func smallDDT(only string) ddtOptions {
	return ddtOptions{only: []string{only}, elements: 1, parallel: 2, vectors: []int64{64}, apps: []string{"Complex", "NAS_LU"}}
}

func TestBenchDDTMeasuresEveryRow(t *testing.T) {
	if !measures(t) {
		return
	}
	scale, hpus := "", ""
	if len(testbed.CPUs()) > 1 {
		scale = "ddt/scale/hpu0>0.85 ddt/scale/hpu1>0.85 ddt/scale_copies/hpu0 ddt/scale_copies/hpu1"
		for _, order := range []string{"in_order", "within_32"} {
			for _, c := range []string{"direct", "direct_by_message", "hpu-local", "ro-cp", "rw-cp", "rw-cp_one_sequence", "rw-cp_one_packet"} {
				hpus += " ddt/strategy_hpus/Complex_apart/" + order + "/" + c
			}
		}
	}
	const (
		contiguous = "ddt/cpu_simple_over_contiguous<1.1 ddt/cpu_complex_over_contiguous<1.3"
		overlap    = "ddt/overlap_%[1]s_over_mpich<0.9 ddt/overlap_ratio_%[1]s ddt/hidden_%[1]s ddt/overlap_ratio_%[1]s_mpich ddt/hidden_%[1]s_mpich"
		commit     = "ddt/commit_over_transfer/NAS_LU ddt/commit_over_transfer/Complex"
		strategies = "ddt/strategy/Complex/direct ddt/strategy/Complex/hpu-local ddt/strategy/Complex/ro-cp ddt/strategy/Complex/rw-cp ddt/bad_interval/Complex/ro-cp ddt/bad_interval/Complex/rw-cp"
	)
	for _, tc := range []struct {
		only string
		path string // PATH
		rows string // with targets
		warn string
	}{
		{"place", "", "ddt/place_over_unpack>1 ddt/place_over_unpack_byte_least>0.7 ddt/place_over_unpack_wide_least>0.25 " +
			"ddt/place_over_unpack/NAS_LU ddt/place_over_unpack/Complex ddt/place_over_unpack/vector_64B_byte " +
			"ddt/place_over_unpack/vector_64B_int ddt/place_over_unpack/vector_64B_float ddt/place_over_unpack/vector_64B_double", ""},
		{"place", "/nonexistent", "", "no rows ddt/place_over_unpack*: MPICH unpacker: build mpi_unpack: no MPICH to build with: apt-get install mpich libmpich-dev"},
		{"loop", "", "ddt/direct_over_loop_least>0.7 ddt/direct_whole_over_loop_least " +
			"ddt/direct_over_loop/NAS_LU ddt/direct_whole_over_loop/NAS_LU ddt/direct_over_loop/Complex ddt/direct_whole_over_loop/Complex " +
			"ddt/direct_over_loop/vector_64B_byte ddt/direct_whole_over_loop/vector_64B_byte", ""},
		{"strategy", "", "ddt/direct_over_best_least>0.95 ddt/direct_over_best/NAS_LU/in_order ddt/direct_over_best/NAS_LU/any_order " +
			"ddt/direct_over_best/Complex/in_order ddt/direct_over_best/Complex/any_order " + strategies + hpus, ""},
		{"scale", "", scale, ""},
		{"cpu", "", contiguous + " ddt/cpu_simple_over_mpich ddt/goodput_simple_over_mpich ddt/goodput_simple " +
			"ddt/cpu_complex_over_mpich ddt/goodput_complex_over_mpich ddt/goodput_complex " +
			"ddt/cpu_vector_64B_over_mpich ddt/goodput_vector_64B_over_mpich ddt/goodput_vector_64B", ""},
		{"cpu", "/nonexistent", contiguous + " ddt/goodput_simple ddt/goodput_complex ddt/goodput_vector_64B", "no rows ddt/*_over_mpich of part cpu: "},
		{"overlap", "", fmt.Sprintf(overlap, "simple") + " " + fmt.Sprintf(overlap, "complex"), ""},
		{"overlap", "/nonexistent", "ddt/overlap_ratio_simple ddt/hidden_simple ddt/overlap_ratio_complex ddt/hidden_complex", "no rows ddt/*_mpich of part overlap: "},
		{"commit", "", commit, ""},
		{"commit", "/nonexistent", commit, "no figures of MPI_Type_commit in ddt/commit_over_transfer/*: "},
	} {
		t.Run(tc.only+tc.path, func(t *testing.T) {
			if tc.path != "" {
				t.Setenv("PATH", tc.path)
			} else if testing.Short() {
				t.Skip("takes seconds")
			}
			var warnings []string
			cfg := benchConfig{2, 20 * time.Millisecond, time.Millisecond, func(s string) { warnings = append(warnings, s) }}
			if (tc.only == "cpu" || tc.only == "overlap") && tc.path == "" {
				cfg.runs = 1 // a run of MPICH's takes seconds, and two of ours are measured without it
			}
			doc := bench.NewDocument(bench.Environment("ddt", cfg.runs, cfg.duration))
			if err := runBench(t.Context(), cfg, doc, smallDDT(tc.only).measure); err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, r := range doc.Results {
				name := r.Name
				if r.Target != nil {
					name += map[string]string{"higher": ">", "lower": "<"}[r.Better] + fmt.Sprint(*r.Target)
				}
				names = append(names, name)
				if r.Conditions == "" || r.A == nil || len(r.A.Runs) != cfg.runs || r.B != nil && len(r.B.Runs) != cfg.runs || r.Unit == "ratio" && r.B == nil && !strings.Contains(name, "overlap_ratio") {
					t.Errorf("%+v", r)
				}
				if strings.HasPrefix(name, "ddt/scale") && (r.A.More["together_share"] <= 0 || r.B.More["together_share"] != 1) {
					t.Errorf("%s: one of two was at it next to the other for %g of its time, and the only one for %g", name, r.A.More["together_share"], r.B.More["together_share"])
				}
				for _, s := range []*bench.Side{r.A, r.B} {
					// Which end has XDP is what makes the difference to MPICH.
					if s != nil && strings.Contains("cpu overlap", tc.only) && (!strings.Contains(s.On, "xs-nic: XDP native") == strings.Contains(s.What, "SLMP")) {
						t.Errorf("%s: %s: on: %q", r.Name, s.What, s.On)
					}
				}
			}
			if got := strings.Join(names, " "); got != tc.rows {
				t.Errorf("rows %s\nwant %s", got, tc.rows)
			}
			// Part overlap says so for each type.
			if got := strings.Join(warnings, "\n"); !strings.HasPrefix(got, tc.warn) || (got == "") != (tc.warn == "") {
				t.Errorf("warned %q, want %q", got, tc.warn)
			}
			var out bytes.Buffer
			if err := doc.WriteJSON(&out); err != nil || !json.Valid(out.Bytes()) {
				t.Errorf("JSON %s, error %v", out.String(), err)
			}
			nothingIsLeft(t)
		})
	}
}

// nothingIsLeft looks for what a benchmark has had.
func nothingIsLeft(t *testing.T) {
	t.Helper()
	noBenchLab(t, os.Getpid())
	if left := children(t); len(left) > 0 {
		t.Errorf("processes are left: %v", left)
	}
	files, err := filepath.Glob(filepath.Join(os.TempDir(), fmt.Sprintf("xspin-mpich-%d-*", os.Getpid())))
	if err != nil || len(files) > 0 {
		t.Errorf("files are left: %v, error %v", files, err)
	}
}

// Whatever it is at when it is interrupted, it leaves nothing.
func TestInterruptedBenchDDTCleansUp(t *testing.T) {
	netnstest.NeedRoot(t)
	if testing.Short() {
		t.Skip("takes seconds")
	}
	for only, after := range map[string]time.Duration{"place": 700, "scale": 300, "cpu": 1500, "overlap": 2000, "commit": 900} {
		t.Run(only, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			cfg := benchConfig{1000, 300 * time.Millisecond, time.Millisecond, func(s string) { t.Log(s) }}
			err := runBench(ctx, cfg, bench.NewDocument(bench.Env{}), func(ctx context.Context, lab *benchLab, cfg benchConfig, doc *bench.Document) error {
				time.AfterFunc(after*time.Millisecond, cancel)
				return smallDDT(only).measure(ctx, lab, cfg, doc)
			})
			if !errors.Is(err, context.Canceled) && !(only == "scale" && len(testbed.CPUs()) < 2 && err == nil) {
				t.Errorf("error %v", err)
			}
			nothingIsLeft(t)
		})
	}
}
