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
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/slmp"
)

func TestBenchSLMPFlags(t *testing.T) {
	judged(t, slmpFlags, map[string]string{
		"":                                      "",
		"--only file,auto --size 1MiB":          "",
		"--rates 10mbit,0 --delays 0s,20ms":     "",
		"--only files":                          "--only files: want file, noop,",
		"--size 1000":                           "--size 1000: want 1MiB to",
		"--size 5GiB":                           "--size 5GiB: want 1MiB to 4GiB",
		"--rates 1":                             "--rates 1: want a rate as tc has it",
		"--delays 2":                            "--delays 2: want times as in 2ms",
		"--delays -1ms":                         "--delays -1ms: want times as in 2ms",
		"--losses 0.01":                         "--losses 0.01: want 0% to 100%",
		"--losses 1% --delays 2s --rates 1gbit": "--delays 2s: want times as in 2ms, 0s to 1s",
	})
}

// The flags of slmp are judged before anything is set up, with those of all.
func TestBenchSLMPRefusesFlagsBeforeAnythingIsSetUp(t *testing.T) {
	root := benchCmd()
	root.SetArgs([]string{"slmp", "--only", "nothing"})
	root.SetOut(io.Discard)
	root.SetErr(io.Discard)
	if err := root.Execute(); err == nil || !strings.Contains(err.Error(), "bench slmp: --only nothing: want file") {
		t.Errorf("error %v", err)
	}
}

// smallest is every row of it in as little time as may be.
func smallest() slmpOptions {
	o := slmpDefaults()
	o.size = 1 << 20
	o.rates, o.delays, o.losses = []uint64{0, 100e6}, []time.Duration{time.Millisecond}, []float64{0.01}
	o.candidates, o.parallels, o.outstanding = []int{4, 256}, []int{1, 2}, []int{16}
	return o
}

func TestBenchSLMPMeasuresEveryRow(t *testing.T) {
	if !measures(t) {
		return
	}
	for _, tc := range []struct {
		only string
		path string // PATH
		rows string
		warn string
	}{
		{"file", "", "slmp/file_over_tcp_same_frames slmp/file_over_tcp slmp/file_plain_over_tcp_same_frames slmp/file_stored_over_tcp_same_frames slmp/file_stored_over_tcp slmp/file slmp/file_plain slmp/file_stored slmp/allocs_per_packet", ""},
		{"file", "/nonexistent", "slmp/file slmp/file_plain slmp/file_stored slmp/allocs_per_packet", "TCP is not measured: iperf3 is needed"},
		{"noop", "", "slmp/noop3_over_bare slmp/noop3_syn_over_bare slmp/noop3_cumulative_over_bare slmp/noop3_over_bare_1514B", ""},
		{"small", "", "slmp/small_over_udp_echo/16 slmp/allocs_per_packet_small", ""},
		{"small", "/nonexistent", "slmp/allocs_per_packet_small", "TCP is not measured: iperf3 is needed (apt-get install iperf3): exec: \"iperf3\": executable file not found in $PATH\nno rows slmp/small_over_udp_echo/*: no C compiler"},
		{"policy", "", "slmp/packet2_over_message1", ""},
		{"state", "", "slmp/state_bytes slmp/state_bytes_hole", ""},
		{"fairness", "", "slmp/fairness8", ""},
		{"loss", "", "slmp/loss1_over_loss0 tcp/loss1_over_loss0 slmp/loss1_over_tcp_loss1", ""},
		{"window", "", "slmp/window/4/1 slmp/window/256/1 slmp/window/4/2 slmp/window/256/2 kernel/window/4/1 kernel/window/256/1 slmp/predicted_window slmp/window_knee", ""},
		{"auto", "", "slmp/auto_over_best/unlimited/1ms/loss1 slmp/auto_over_best/100mbit/1ms/loss1", ""},
	} {
		t.Run(tc.only+tc.path, func(t *testing.T) {
			if tc.path != "" {
				t.Setenv("PATH", tc.path)
			} else if testing.Short() {
				t.Skip("takes seconds")
			}
			before := inMemory(t)
			var warnings []string
			cfg := benchConfig{1, 40 * time.Millisecond, time.Millisecond, func(s string) { warnings = append(warnings, s) }}
			if tc.only == "small" {
				cfg.duration = 250 * time.Millisecond // a first segment that is lost comes again after 50 ms
			}
			o := smallest()
			o.only = []string{tc.only}
			doc := bench.NewDocument(bench.Environment("slmp", cfg.runs, cfg.duration))
			if err := runBench(t.Context(), cfg, doc, o.measure); err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, r := range doc.Results {
				names = append(names, r.Name)
				if r.Conditions == "" || r.A == nil || len(r.A.Runs) != 1 || r.B != nil && len(r.B.Runs) != 1 || r.Unit == "ratio" && r.B == nil || r.Median < 0 {
					t.Errorf("%+v", r)
				}
				for _, s := range []*bench.Side{r.A, r.B} {
					counted := strings.Contains(r.Name, "allocs") || strings.Contains(r.Name, "predicted") || strings.Contains(r.Name, "knee")
					if s != nil && !counted && !strings.Contains(s.On, "xs-host: XDP") {
						t.Errorf("%s: %s: on: %q", r.Name, s.What, s.On)
					}
				}
			}
			if got := strings.Join(names, " "); got != tc.rows {
				t.Errorf("rows %s\nwant %s", got, tc.rows)
			}
			if got := strings.Join(warnings, "\n"); !strings.HasPrefix(got, tc.warn) || (got == "") != (tc.warn == "") {
				t.Errorf("warned %q, want %q", got, tc.warn)
			}
			var out bytes.Buffer
			if err := doc.WriteJSON(&out); err != nil || !json.Valid(out.Bytes()) {
				t.Errorf("JSON %s, error %v", out.String(), err)
			}
			noBenchLab(t, os.Getpid())
			if after := inMemory(t); !slices.Equal(after, before) {
				t.Errorf("files %v are left", after)
			}
		})
	}
}

// inMemory returns what this process has in memory: others measure at the same time.
func inMemory(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/dev/shm/xspin-bench-%d-*", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// Whatever it is at when it is interrupted, it leaves nothing.
func TestInterruptedBenchSLMPCleansUp(t *testing.T) {
	netnstest.NeedRoot(t)
	if testing.Short() {
		t.Skip("takes seconds")
	}
	for _, only := range []string{"file", "small", "fairness", "loss", "auto"} {
		t.Run(only, func(t *testing.T) {
			before := inMemory(t)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			o := smallest()
			o.only = []string{only}
			cfg := benchConfig{1000, 300 * time.Millisecond, time.Millisecond, func(string) {}}
			err := runBench(ctx, cfg, bench.NewDocument(bench.Env{}), func(ctx context.Context, lab *benchLab, cfg benchConfig, doc *bench.Document) error {
				time.AfterFunc(400*time.Millisecond, cancel)
				return o.measure(ctx, lab, cfg, doc)
			})
			if !errors.Is(err, context.Canceled) {
				t.Errorf("error %v", err)
			}
			noBenchLab(t, os.Getpid())
			if after := inMemory(t); !slices.Equal(after, before) {
				t.Errorf("files %v are left", after)
			}
			if left := children(t); len(left) > 0 {
				t.Errorf("processes are left: %v", left)
			}
		})
	}
}

// children returns the command lines of this process's children.
func children(t *testing.T) (lines []string) {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range tasks {
		list, err := os.ReadFile(f)
		if err != nil {
			continue // the thread has ended
		}
		for pid := range strings.FieldsSeq(string(list)) {
			line, _ := os.ReadFile("/proc/" + pid + "/cmdline")
			lines = append(lines, pid+" "+strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return lines
}

func TestSLMPFramesMatch(t *testing.T) {
	b := &slmpBench{benchLab: ends()}
	f := b.slmpFrame(rxFrame)
	slmp.Header{Flags: slmp.EOM, ID: 7, Offset: 24}.Put(f[slmpHeaders-slmp.HeaderLen:])
	table := table([]matcher.Ruleset{matcher.SLMP()})
	e := table.Entries[0]
	e.Format = matcher.FormatByName("slmp")
	table.Entries[0] = e
	v := table.Match(f)
	if v.Action != matcher.Deliver || !v.EOM || v.Offset != 24 || v.Key[v.NKey-1] != 7 {
		t.Errorf("%+v", v)
	}
}

func TestJainsIndex(t *testing.T) {
	for _, tc := range []struct {
		rates             []float64
		index, sum, least float64
	}{
		{[]float64{2, 2, 2, 2}, 1, 8, 2},
		{[]float64{8, 0, 0, 0}, 0.25, 8, 0},
		{[]float64{1, 3}, 0.8, 4, 1},
		{[]float64{0, 0}, 0, 0, 0},
	} {
		index, sum, least := jainIndex(tc.rates)
		if math.Abs(index-tc.index) > 1e-9 || sum != tc.sum || least != tc.least {
			t.Errorf("%v: %g, %g, %g", tc.rates, index, sum, least)
		}
	}
}

func TestPredictedWindow(t *testing.T) {
	for _, tc := range []struct{ send, receive, want float64 }{
		{200, 100, 4096},                       // fills at half the speed
		{1000, 1, 2048 * 1000. / 999},          // the buffer, and hardly more
		{101, 100, slmp.MaxWindow},             // more than can be asked for
		{100, 100, slmp.MaxWindow},             // never fills
		{100, 300, slmp.MaxWindow},             // nor here
		{300, 100, 2048 * 300. / (300. - 100)}, //
	} {
		if got := predictWindow(tc.send, tc.receive); math.Abs(got-tc.want) > 1e-9 {
			t.Errorf("%g into %g: %g, want %g", tc.send, tc.receive, got, tc.want)
		}
	}
}

func TestLoadOfNobodyEnds(t *testing.T) {
	arg, err := json.Marshal(load{To: "127.0.0.1:9", Size: 1, Outstanding: 1, For: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if err := sendLoad(t.Context(), string(arg), io.Discard, strings.NewReader("")); !errors.Is(err, io.EOF) {
		t.Errorf("whoever started it is gone: error %v", err)
	}
	if err := sendLoad(t.Context(), string(arg), io.Discard, strings.NewReader("\n")); !errors.Is(err, slmp.ErrRefused) {
		t.Errorf("nobody receives: error %v", err)
	}
}
