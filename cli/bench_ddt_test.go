// SPDX-License-Identifier: Apache-2.0

package cli

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
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/internal/bench"
	"github.com/xspin/xspin/netns/netnstest"
)

func TestBenchDDTFlags(t *testing.T) {
	for line, want := range map[string]string{
		"":                     "",
		"--only place,scale":   "",
		"--only cpu,strategie": "--only strategie: want place, loop, strategy, scale, cpu, overlap, commit",
	} {
		fl := pflag.NewFlagSet("ddt", pflag.ContinueOnError)
		judge := ddtFlags(fl)
		if err := fl.Parse(strings.Fields(line)); err != nil {
			t.Fatal(err)
		}
		measure, err := judge()
		if want == "" {
			if err != nil || measure == nil {
				t.Errorf("%s: error %v", line, err)
			}
		} else if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one with %q", line, err, want)
		}
	}
	root := newRootCmd()
	root.SetArgs([]string{"bench", "ddt", "--only", "nothing"})
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
		all := contenders(d)
		if all[0].strategy != ddt.Direct {
			t.Fatalf("%s: the first is %s", d.name, all[0].name)
		}
		for _, s := range []string{ddt.ROCP, ddt.RWCP} {
			c := badly(d, s)
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
	netnstest.NeedRoot(t)
	scale := ""
	if len(usableCPUs()) > 1 {
		scale = "ddt/scale/hpu0>0.85 ddt/scale/hpu1>0.85"
	}
	const (
		contiguous = "ddt/cpu_simple_over_contiguous<1.1 ddt/cpu_complex_over_contiguous<1.3"
		overlap    = "ddt/overlap_%[1]s_over_mpich<0.9 ddt/overlap_ratio_%[1]s>0.99 ddt/hidden_%[1]s ddt/overlap_ratio_%[1]s_mpich ddt/hidden_%[1]s_mpich"
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
			"ddt/direct_over_best/Complex/in_order ddt/direct_over_best/Complex/any_order " + strategies, ""},
		{"scale", "", scale, ""},
		{"cpu", "", contiguous + " ddt/cpu_simple_over_mpich ddt/goodput_simple_over_mpich ddt/goodput_simple " +
			"ddt/cpu_complex_over_mpich ddt/goodput_complex_over_mpich ddt/goodput_complex " +
			"ddt/cpu_vector_64B_over_mpich ddt/goodput_vector_64B_over_mpich ddt/goodput_vector_64B", ""},
		{"cpu", "/nonexistent", contiguous + " ddt/goodput_simple ddt/goodput_complex ddt/goodput_vector_64B", "no rows ddt/*_over_mpich of part cpu: "},
		{"overlap", "", fmt.Sprintf(overlap, "simple") + " " + fmt.Sprintf(overlap, "complex"), ""},
		{"overlap", "/nonexistent", "ddt/overlap_ratio_simple>0.99 ddt/hidden_simple ddt/overlap_ratio_complex>0.99 ddt/hidden_complex", "no rows ddt/*_mpich of part overlap: "},
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
				if r.Conditions == "" || r.A == nil || len(r.A.Runs) != 2 || r.B != nil && len(r.B.Runs) != 2 || r.Unit == "ratio" && r.B == nil && !strings.Contains(name, "overlap_ratio") {
					t.Errorf("%+v", r)
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
			if !errors.Is(err, context.Canceled) && !(only == "scale" && len(usableCPUs()) < 2 && err == nil) {
				t.Errorf("error %v", err)
			}
			nothingIsLeft(t)
		})
	}
}
