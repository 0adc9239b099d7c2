// SPDX-License-Identifier: Apache-2.0

package datatypes

import (
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/internal/quantile"
)

// near compares what differs in the last digits only.
func near(t *testing.T, what string, got, want float64) {
	t.Helper()
	if math.Abs(got-want) > 1e-9*max(math.Abs(want), 1) {
		t.Errorf("%s is %v, want %v", what, got, want)
	}
}

// is checks a figure. The interval of three samples is from the least to the largest.
func is(t *testing.T, what string, got Figure, least, median, largest float64) {
	t.Helper()
	near(t, what, got.Median, median)
	near(t, what+"'s lower end", got.CI95[0], least)
	near(t, what+"'s upper end", got.CI95[1], largest)
}

const millisecond = time.Millisecond

func ourTrials() trials {
	return trials{
		{compute: 40 * millisecond, transfer: 20 * millisecond, both: 45 * millisecond, computed: 44 * millisecond, detected: 30 * millisecond, nic: 24 * millisecond, nicAlone: 16 * millisecond, ratio: 0.96, hit: true},
		{compute: 50 * millisecond, transfer: 25 * millisecond, both: 60 * millisecond, computed: 60 * millisecond, detected: 50 * millisecond, nic: 30 * millisecond, nicAlone: 24 * millisecond, ratio: 0.98},
		{compute: 60 * millisecond, transfer: 40 * millisecond, both: 75 * millisecond, computed: 63 * millisecond, detected: 70 * millisecond, nic: 54 * millisecond, nicAlone: 36 * millisecond, ratio: 0.97, hit: true},
	}
}

func TestOverlapIsSummarized(t *testing.T) {
	o := newOverlap(GEMMs{N: 100, Count: 20}, true, ourTrials())
	if o.N != 100 || o.Count != 20 || !o.Converged || !o.Steady {
		t.Errorf("%+v", o)
	}
	if newOverlap(GEMMs{N: 100, Count: 20}, false, ourTrials()).Converged {
		t.Error("converged")
	}
	near(t, "gflops", o.GFLOPS, 0.8) // 2 x 100^3 x 20 in 50 ms
	is(t, "gemms_s", o.GEMMs, 0.04, 0.05, 0.06)
	is(t, "transfer_s", o.Transfer, 0.02, 0.025, 0.04)
	is(t, "both_s", o.Both, 0.045, 0.06, 0.075)
	is(t, "hidden", o.Hidden, 0.6, 0.625, 0.75)              // 15/20, 15/25, 25/40
	is(t, "gemms_slower", o.GEMMsSlower, 1.05, 1.1, 1.2)     // 44/40, 60/50, 63/60
	is(t, "transfer_slower", o.TransferSlower, 1.5, 1.75, 2) // 30/20, 50/25, 70/40
	is(t, "fpspin_ratio", o.Ratio, 0.96, 0.97, 0.98)
	is(t, "nic_s", o.NIC, 0.024, 0.03, 0.054)
	is(t, "nic_slower", o.NICSlower, 1.25, 1.5, 1.5) // 24/16, 30/24, 54/36
	if o.Misses != 1 {
		t.Errorf("%d misses, want 1", o.Misses)
	}

	// Products that are faster during a transfer.
	odd := ourTrials()
	for i := range odd {
		odd[i].computed = odd[i].compute * 8 / 10
	}
	o = newOverlap(GEMMs{N: 100, Count: 20}, true, odd)
	r := &Report{Env: Env{GEMM: &GEMM{}}}
	r.doubt(&Result{Type: "x", Strategy: "direct", Overlap: o})
	if want := []string{"x, direct: the machine was not steady: the same products took 50.0 ms alone, and 0.80 of that during a transfer"}; o.Steady || !slices.Equal(r.Notes, want) {
		t.Errorf("steady %v, notes %q", o.Steady, r.Notes)
	}
}

func TestRatio(t *testing.T) {
	o := Overlapped{Round: Round{Took: 80 * millisecond}, Compute: 100 * millisecond, ComputeBefore: 76 * millisecond}
	near(t, "ratio", o.Ratio(), 0.95)
}

func TestResult(t *testing.T) {
	r := newResult(Info{
		Transfer: Transfer{Name: "x", Type: "int", Count: 5, Parallel: 2, Strategy: ddt.RWCP, Interval: 7},
		Message:  1000, Span: 3000, Blocks: 11, Placement: ddt.Memory{Type: 1, Checkpoints: 20, Segments: 300},
	})
	for i, took := range []time.Duration{2, 4, 8} { // ms
		used := time.Duration(i+1) * millisecond
		r.add(&Round{
			Bytes: 1e6, Messages: 2, Took: took * millisecond, NIC: took * millisecond / 2,
			Segments: 100, Retransmitted: 3, Duplicates: 2, Packets: 99 + uint64(i), Copies: 250 + uint64(i),
			CPU: CPU{NIC: used, App: 2 * used, Sender: 3 * used},
		})
	}
	is(t, "gbps", r.Gbps, 1, 2, 4) // 8 Mbit in 8, 4 and 2 ms
	is(t, "seconds", r.Seconds, 0.002, 0.004, 0.008)
	is(t, "nic_seconds", r.NIC, 0.001, 0.002, 0.004)
	near(t, "copies_per_packet", r.PerPacket, 252.0/101)
	if want := (cpuPerGB{2, 4, 6}); r.CPU != want { // 2 ms for 10^6 bytes
		t.Errorf("CPU %+v, want %+v", r.CPU, want)
	}
	if r.Segments != 300 || r.Retransmitted != 9 || r.Duplicates != 6 || r.Packets != 101 || r.Copies != 252 {
		t.Errorf("%+v", r)
	}
	if r.Type != "x" || r.Text != "int" || r.Bytes != 2000 || r.Message != 1000 || r.Elements != 5 || r.Parallel != 2 || r.Span != 3000 ||
		r.Blocks != 11 || r.Interval != 7 || r.Placement != (placement{1, 20, 300, 321}) {
		t.Errorf("%+v", r)
	}
}

func TestCPUSum(t *testing.T) {
	if got := (CPU{NIC: 1, App: 20, Sender: 300, Machine: 4000}).Sum(); got != 321 {
		t.Errorf("%d, want 321", got)
	}
}

func TestTuningFindsTheSize(t *testing.T) {
	// The first guess: a GEMM of 200 rows takes 4 ms, and the transfer as long as 17.5
	// that take 1/8 of it.
	tune := newTuning(35*millisecond/4, 4*millisecond, 200)
	if g := tune.gemms(); g != (GEMMs{N: 100, Count: 20}) {
		t.Errorf("%+v", g)
	}
	hit := &Overlapped{Hit: true, Multiplied: 15}
	for range 4 {
		if tune.learn(hit) {
			t.Fatal("that was enough")
		}
	}
	// Found after 14, which is too early: GEMMs become 14/17.5 of what they are.
	if tune.learn(&Overlapped{Hit: true, Multiplied: 14}) || tune.hits != 0 {
		t.Error("too early is no hit")
	}
	near(t, "rows", tune.size, 100*math.Cbrt(14/17.5))
	// Not found: it would have taken 40.
	tune.size = 100
	tune.learn(&Overlapped{Round: Round{Took: 80 * millisecond}, Multiplied: 20, ComputeBefore: 40 * millisecond})
	near(t, "rows", tune.size, 100*math.Cbrt(2))
	for i := range 5 {
		if done := tune.learn(hit); done != (i == 4) {
			t.Errorf("hit %d: done %v", i+1, done)
		}
	}
	for size, want := range map[float64]int{1: 8, 1e6: 4096, 99.6: 100} {
		if g := (&tuning{size: size}).gemms(); g.N != want {
			t.Errorf("size %g: %d rows, want %d", size, g.N, want)
		}
	}
}

func TestWhyPacketsWereSentAgain(t *testing.T) {
	for _, tc := range []struct {
		again, duplicates uint64
		policy, want      string
	}{
		{50, 0, "", ""},
		{51, 51, "blocked-rr", "none was lost: HPUs share a message"},
		{60, 54, "", "none was lost: answers came late"},
		{60, 45, "blocked-rr", "25 % were lost"},
	} {
		r := Result{Segments: 1000, Retransmitted: tc.again, Duplicates: tc.duplicates, policy: tc.policy}
		if got := r.again(); !strings.HasPrefix(got, tc.want) || (got == "") != (tc.want == "") {
			t.Errorf("%+v: %q", tc, got)
		}
	}
}

func TestNamesInTables(t *testing.T) {
	r := Report{Results: []*Result{
		{Type: "Simple"}, {Type: "vec(1024 16 32)[vec(2 3 4)[int]]"}, {Type: "Simple"},
		{Type: "vec(1024 16 32)[vec(2 3 4)[long]]"}, {Type: "vec(1024 16 33)[vec(2 3 4)[int]]"},
		{Type: "vec(1024 16 32)[vec(2 3 4)[int]]", Strategy: ddt.ROCP},
	}}
	want := []string{"Simple", "vec(1024 16...3 4)[int]]", "Simple", "vec(1024 16... 4)[long]]", "vec(1024 16...3 4)[int]] #2", "vec(1024 16...3 4)[int]]"}
	if got := r.names(); !slices.Equal(got, want) {
		t.Errorf("%q\nwant %q", got, want)
	}
}

func TestMessagesOfARoundDiffer(t *testing.T) {
	for _, tc := range []struct{ parallel, size, want int64 }{{1, 1, 1}, {1024, 1, 1024}, {16, 64 << 20, 4}, {16, 1 << 30, 1}} {
		l := &layout{Transfer: Transfer{Parallel: int(tc.parallel)}, size: tc.size}
		if got := l.contents(); int64(got) != tc.want {
			t.Errorf("%+v: %d", tc, got)
		}
	}
	// FPsPIN's pattern, and others that neither repeat nor are the same.
	buffer := func(message int) (b []byte) {
		for off := range int64(4096) {
			b = append(b, sent(message, off))
		}
		return b
	}
	fpspin := buffer(0)
	for i, b := range fpspin {
		if b != byte(32+i%95) {
			t.Fatalf("byte %d of FPsPIN's pattern is %d", i, b)
		}
	}
	same := func(a, b []byte) (n int) {
		for i := range min(len(a), len(b)) {
			if a[i] == b[i] {
				n++
			}
		}
		return n
	}
	for _, message := range []int{1, 2, 95, 96, 1023} {
		b := buffer(message)
		for _, c := range b {
			if c < 32 || c > 126 {
				t.Fatalf("message %d has %d", message, c)
			}
		}
		for _, other := range []int{0, 1, 3, 94, 190} {
			if n := same(b, buffer(other)); other != message && n > 120 { // by chance 43
				t.Errorf("messages %d and %d have %d bytes in common", message, other, n)
			}
		}
		for _, shift := range []int{1, 95, 190, 256, 1462} {
			if n := same(b, b[shift:]); n > 120 {
				t.Errorf("message %d and %d bytes further have %d bytes in common", message, shift, n)
			}
		}
	}
}

func TestMessagesAreKnownByTheirNumbers(t *testing.T) {
	l, err := newLayout(Transfer{Type: strided, Count: 1, Parallel: 3, Strategy: ddt.Direct})
	if err != nil {
		t.Fatal(err)
	}
	w := &wanted{window: &window{layout: l, memory: make([]byte, l.window())}}
	l.clear(w.memory, 0, l.window())
	for place, message := range []int{2, 0, 1} {
		stream, err := l.pack(message)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.data.Unpack(w.memory, l.origin(place), 0, stream); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		numbers []uint32
		want    string
	}{
		{[]uint32{9, 7, 8}, ""},
		{[]uint32{1, math.MaxUint32, 0}, ""},
		{[]uint32{7, 8, 9}, "message 0 of the round"},
		{[]uint32{10, 7, 8}, "message 10 after 7, in a round of 3"},
	} {
		w.sent = tc.numbers
		err := w.compare()
		if (err == nil) != (tc.want == "") || err != nil && !strings.HasPrefix(err.Error(), tc.want) {
			t.Errorf("%v: error %v, want %q", tc.numbers, err, tc.want)
		}
	}
}

func TestFigureIsAMedian(t *testing.T) {
	if got, want := newFigure([]float64{5, 1, 3}), (Figure{3, quantile.Interval{1, 5}}); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// A share that looks like a mistake is explained, and no other is.
func TestAShareOutsideOfAllIsExplained(t *testing.T) {
	for hidden, want := range map[float64]bool{-0.39: true, 0: false, 0.5: false, 1: false, 1.07: true} {
		o := newOverlap(GEMMs{N: 100, Count: 20}, true, ourTrials())
		o.Hidden.Median = hidden
		r := &Report{Env: Env{GEMM: &GEMM{}}}
		var b strings.Builder
		r.writeOverlap(&b, "milc", &Result{Overlap: o})
		if strings.Contains(b.String(), "hidden below 0 %: ") != want {
			t.Errorf("%g hidden:\n%s", hidden, &b)
		}
	}
}
