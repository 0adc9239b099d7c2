// SPDX-License-Identifier: Apache-2.0

package scripts

import (
	"math"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/report"
)

// TestReadmeFigures compares what the README says of speed with what was measured: the report
// in docs/evaluation.
func TestReadmeFigures(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	r, err := report.Load("../docs/evaluation")
	if err != nil {
		t.Fatal(err)
	}
	var rows []bench.Row
	for _, e := range r.Experiments {
		rows = append(rows, e.Rows...)
	}
	row := func(name string) bench.Row {
		t.Helper()
		i := slices.IndexFunc(rows, func(r bench.Row) bool { return r.Name == name })
		if i < 0 {
			t.Fatalf("no row %s", name)
		}
		return rows[i]
	}
	var awake []float64
	for _, size := range []string{"16", "516", "1016", "1416"} {
		awake = append(awake, row("rtt/icmp_awake_"+size).Median)
	}
	unpinned := row("rtt/udp_unpinned")
	both := slices.Concat(unpinned.A.Runs, unpinned.B.Runs)
	for says, want := range map[string][]float64{
		`UDP echo of 16 bytes, handler in eBPF \| a blocking socket on another CPU \| # \[`:                {row("kernel/udp_echo_cross_core").Median},
		`UDP echo of 16 bytes, handler in Go on a CPU of its own \| the same \| # \[`:                      {row("rtt/udp_cross_core").Median},
		`ping of 16 bytes, handler in eBPF \| Linux \| # \[`:                                               {row("kernel/icmp_16").Median},
		`CPU time of a file of 1 GiB into memory of an application, handlers in eBPF at tc \| TCP \| # \[`: {row("tc/cpu_per_gb_over_tcp").Median},
		`that file \| TCP \| # \[`: {row("tc/file_over_tcp").Median},
		`other TCP traffic, with handlers in eBPF at tc \| without XsPIN \| # \[`: {row("tc/bystander_tcp").Median},
		`other TCP traffic, with handlers in Go \| without XsPIN \| # \[`:         {row("bystander/tcp_over_none").Median},
		`those of ` + "`nic`" + ` to Linux's ICMP are # to #`:                     {slices.Min(awake), slices.Max(awake)},
		`take between # and # us`: {slices.Min(both), slices.Max(both)},
	} {
		// A # is a figure, and lines break anywhere.
		says = strings.NewReplacer(" ", `\s+`, "#", `(\d+(?:\.\d+)?)`).Replace(says)
		m := regexp.MustCompile(says).FindSubmatch(readme)
		if m == nil {
			t.Errorf("README.md does not say %s", says)
			continue
		}
		for i, want := range want {
			if got, err := strconv.ParseFloat(string(m[i+1]), 64); err != nil || math.Abs(got-want) > 0.05*want {
				t.Errorf("README.md says %q, and measured was %.3g", m[0], want)
			}
		}
	}
}
