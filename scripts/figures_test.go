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
	// point is the y of a plot's series.
	point := func(plot, series string, x float64) float64 {
		t.Helper()
		for _, e := range r.Experiments {
			for _, p := range e.Plots {
				for _, s := range p.Series {
					for _, at := range s.Points {
						if p.Name == plot && s.Name == series && at.X == x {
							return at.Y
						}
					}
				}
			}
		}
		t.Fatalf("no %s at %g in %s", series, x, plot)
		return 0
	}
	unpinned := row("rtt/udp_unpinned")
	both := slices.Concat(unpinned.A.Runs, unpinned.B.Runs)
	for says, want := range map[string][]float64{
		`a handler in eBPF answers UDP echo in # % of the time of a blocking socket on another CPU than the client's, in # % of one on the same, and a ping in # % of Linux's`: {
			100 * row("kernel/udp_echo_cross_core").Median, 100 * row("kernel/udp_echo_same_core").Median, 100 * row("kernel/icmp_16").Median,
		},
		`takes # % \(blocking client\) or # % \(spinning client\) of a blocking socket's time, and # % of that of a socket that spins`: {
			100 * row("rtt/udp_cross_core").Median, 100 * point("pingpong-udp", "handlers", 16) / point("pingpong-udp", "Linux", 16), 100 * row("rtt/udp_spin_over_spin").Median,
		},
		`leaves TCP from there # % of its`:                    {100 * row("bystander/tcp_over_none").Median},
		`those of ` + "`nic`" + ` to Linux's ICMP are # to #`: {row("rtt/icmp_awake_16").Median, row("rtt/icmp_awake_1416").Median},
		`take between # and # us`:                             {slices.Min(both), slices.Max(both)},
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
