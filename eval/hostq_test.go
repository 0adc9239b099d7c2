// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/netns/testbed"
)

func TestBenchHostqFlags(t *testing.T) {
	judged(t, hostqFlags, map[string]string{
		"":                       "",
		"--only polling,window":  "",
		"--only pingpong,events": "--only events: want polling, sleeping, notify, pingpong, window",
	})
	root := benchCmd()
	root.SetArgs([]string{"hostq", "--only", "nothing"})
	root.SetOut(io.Discard)
	root.SetErr(io.Discard)
	if err := root.Execute(); err == nil || !strings.Contains(err.Error(), "bench hostq: --only nothing: want polling") {
		t.Errorf("error %v", err)
	}
}

func TestBenchHostqMeasuresEveryRow(t *testing.T) {
	if !measures(t) {
		return
	}
	two := ""
	if len(testbed.CPUs()) > 1 {
		two = "hostq/polling_over_atomic hostq/polling_over_two_atomics"
	}
	for part, rows := range map[string]string{
		"polling":  two,
		"sleeping": "hostq/sleeping_over_eventfd hostq/sleeping_over_eventfd_same_core hostq/sleeping_host_over_eventfd",
		"notify":   "hostq/notify_over_spsc hostq/notify_over_spsc_64B",
		"pingpong": "hostq/pingpong_over_host hostq/pingpong_over_host_client_blocks hostq/pingpong_over_host_same_core",
		"window":   "hostq/window_over_memcpy",
	} {
		t.Run(part, func(t *testing.T) {
			fl := pflag.NewFlagSet("hostq", pflag.ContinueOnError)
			judge := hostqFlags(fl)
			if err := fl.Parse([]string{"--only", part}); err != nil {
				t.Fatal(err)
			}
			measure, err := judge()
			if err != nil {
				t.Fatal(err)
			}
			cfg := benchConfig{runs: 2, duration: 10 * time.Millisecond, warn: func(s string) { t.Log(s) }}
			doc := bench.NewDocument(bench.Environment("hostq", cfg.runs, cfg.duration))
			if err := runBench(t.Context(), cfg, doc, measure); err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, r := range doc.Results {
				names = append(names, r.Name)
				if r.Conditions == "" || r.A == nil || r.B == nil || len(r.A.Runs) != 2 || len(r.B.Runs) != 2 || r.Median <= 0 || r.Unit != "ratio" {
					t.Errorf("%+v", r)
				}
			}
			if got := strings.Join(names, " "); got != rows {
				t.Errorf("rows %s\nwant %s", got, rows)
			}
			var out bytes.Buffer
			if err := doc.WriteJSON(&out); err != nil || !json.Valid(out.Bytes()) {
				t.Errorf("JSON %s, error %v", out.String(), err)
			}
			noBenchLab(t, os.Getpid())
		})
	}
}
