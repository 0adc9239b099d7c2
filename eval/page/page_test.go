// SPDX-License-Identifier: Apache-2.0

package page_test

import (
	"encoding/csv"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/html"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/page"
	"github.com/xspin/xspin/eval/page/pagetest"
	"github.com/xspin/xspin/eval/report"
)

var half = 0.5

const hostile = `<script>alert("1")</script> & 'more'`

func fixture(t *testing.T) *report.Report {
	t.Helper()
	row := func(name string, g bench.Goal, a, b []float64) bench.Row {
		r, err := bench.Ratio(name, g, bench.NewSide("ours "+hostile, "ns", a), bench.NewSide("theirs", "ns", b).Of("Linux"))
		if err != nil {
			t.Fatal(err)
		}
		r.Conditions = hostile
		r.A.Lost = &half
		return r
	}
	pt := report.NewPoint(64, []float64{1, 2, 3})
	pt.Lost = &half
	doubted := report.NewPoint(128, []float64{1e9})
	doubted.Doubt = "not settled " + hostile
	series := func(pts ...report.Point) []report.Series {
		return []report.Series{{Name: hostile, Tier: "user", On: hostile, Points: pts}, {Name: "empty"}}
	}
	last := report.NewPoint(65536, []float64{4, 5, 6})
	return &report.Report{
		Schema: report.Schema, Release: "XsPIN test", Quick: true, Env: bench.Environment("xspin bench all", 0, 0),
		Machine: []report.Fact{{Name: "iperf3", For: "TCP " + hostile}, {Name: "MPICH", Value: "4.0"}},
		Experiments: []*report.Experiment{
			{
				Name: "first", Title: "Title " + hostile, Shows: hostile, Method: hostile, Status: report.Done, Warnings: []string{hostile},
				Rows: []bench.Row{
					row("first/ahead", bench.AtLeast(2), []float64{4, 4, 4}, []float64{1, 1, 1}),
					row("first/behind", bench.AtMost(0.5), []float64{4, 4, 4}, []float64{2, 2, 2}),
					row("first/even", bench.Higher, []float64{1, 2, 3}, []float64{3, 1, 2}),
					row("first/too", bench.Higher, []float64{1, 2, 3}, []float64{3, 1, 2}),
				},
				Plots: []*report.Plot{
					{Name: "lines", Title: hostile, X: report.Axis{Label: "size", Unit: "bytes", Log: true}, Y: report.Axis{Label: hostile, Log: true}, Series: series(pt, doubted, last),
						Marks: []report.Mark{{Name: "paper", X: 64, Y: 2, Source: hostile}}},
					{Name: "bars", Title: "bars", Y: report.Axis{Unit: "ns"}, Stack: true, Series: series(pt, last)},
				},
			},
			{Name: "second", Title: "Second", Status: report.Skipped, Why: "iperf3 is needed"},
			{Name: "third", Title: "Third", Status: report.Failed, Why: "it broke"},
		},
	}
}

func TestThePageHasAllOfTheReport(t *testing.T) {
	dir := t.TempDir()
	if err := page.Write(dir, fixture(t)); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, page.Index))
	if err != nil {
		t.Fatal(err)
	}
	text := textOf(t, string(b))
	for _, want := range []string{
		"A quick run", "This run was noisy, so small differences do not show: half of the ratios have a 95 % interval of at most", "iperf3 was not installed, so TCP " + hostile + " was not measured", "Targets: 1 met, 1 missed, 0 within noise.", "Crosses: " + hostile, "Not measured: iperf3 is needed", "This failed: it broke",
		"first/ahead", "first/behind", "first/even", "Title " + hostile, "2.00 [1.00, 3.00], 50.0 % lost", "64Ki", "1000000000 [1000000000, 1000000000] ?", "are not to be trusted: not settled " + hostile + ".", "ours " + hostile, "4.00 ns: ours " + hostile + ", 50.0 % lost",
		"XsPIN is a SmartNIC in software", "With 3 to 5 runs that is practically from the smallest run to the largest", "an interval does not tell what differs from one process to the next", "handler processing unit", "Lower is better.", "not looked into yet",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	better, worse, _ := strings.Cut(text[strings.Index(text, "Faster than Linux, TCP, UDP or MPI today"):], "Slower than Linux, TCP, UDP or MPI today")
	worse, _, _ = strings.Cut(worse, "Title ")
	if !strings.Contains(better, "first/ahead") || strings.Contains(better, "first/behind") || !strings.Contains(worse, "first/behind") || strings.Contains(worse, "first/even") {
		t.Errorf("better: %s\nworse: %s", better, worse)
	}
	if !strings.Contains(better, "4.00 times faster") || !strings.Contains(worse, "2.00 times slower") {
		t.Errorf("better: %s\nworse: %s", better, worse)
	}
	// It needs no network, and each file that it names is there.
	refs := regexp.MustCompile(`(?:src|href|url\()\s*=?\s*["']?([^"'\s>)]+)`).FindAllStringSubmatch(string(b), -1)
	for _, r := range refs {
		switch ref := r[1]; {
		case strings.HasPrefix(ref, "#"), ref == "data:,":
		default:
			if _, err := os.Stat(filepath.Join(dir, ref)); err != nil {
				t.Errorf("reference to %q: %v", ref, err)
			}
		}
	}
	if len(refs) < 10 {
		t.Errorf("references: %q", refs)
	}
}

// Only experiments that were measured get new files; the page has all. What is measured anew
// leaves none that it does not have any more.
func TestFilesAreThoseOfNamedExperiments(t *testing.T) {
	dir := t.TempDir()
	write := func(names ...string) func() error {
		return func() error { return page.Write(dir, fixture(t), names...) }
	}
	old := fixture(t).Experiments[0]
	less := *old
	less.Rows, less.Plots = nil, old.Plots[1:]
	for _, tc := range []struct {
		name string
		do   func() error
		want string
	}{
		{"second", write("second"), "index.html"},
		{"first", write("first"), "bars.csv bars.png bars.svg first-rows.csv index.html lines.csv lines.png lines.svg"},
		{"the same", func() error { return page.Remove(dir, old, old) }, "bars.csv bars.png bars.svg first-rows.csv index.html lines.csv lines.png lines.svg"},
		{"less", func() error { return page.Remove(dir, old, &less) }, "bars.csv bars.png bars.svg index.html"},
		{"less again", func() error { return page.Remove(dir, old, &less) }, "bars.csv bars.png bars.svg index.html"},
	} {
		if err := tc.do(); err != nil {
			t.Fatalf("%s: %v", tc.name, err)
		}
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		if got := strings.Join(names, " "); got != tc.want {
			t.Errorf("%s: %s, want %s", tc.name, got, tc.want)
		}
	}
}

// textOf returns what a reader sees, and fails if a text has become markup.
func textOf(t *testing.T, source string) string {
	t.Helper()
	var text strings.Builder
	var open []string
	z := html.NewTokenizer(strings.NewReader(source))
	for {
		switch z.Next() {
		case html.ErrorToken:
			if !errors.Is(z.Err(), io.EOF) {
				t.Fatal(z.Err())
			}
			return text.String()
		case html.StartTagToken:
			name, _ := z.TagName()
			if string(name) == "script" {
				t.Error("the page has a script")
			}
			open = append(open, string(name))
		case html.EndTagToken:
			name, _ := z.TagName()
			if i := slices.Index(open, string(name)); i >= 0 {
				open = slices.Delete(open, i, i+1)
			}
		case html.TextToken:
			if !slices.Contains(open, "style") {
				text.Write(z.Text())
			}
		}
	}
}

// What was on at the ends of the link is told once, for all the series that had it.
func TestStatesOfTheLinkAreToldOnce(t *testing.T) {
	r := fixture(t)
	pt := []report.Point{report.NewPoint(64, []float64{1, 2, 3})}
	r.Experiments[0].Plots = []*report.Plot{
		{Name: "one", Series: []report.Series{{Name: "Linux", On: "TSO on", Points: pt}, {Name: "ours", On: "XDP native", Points: pt}, {Name: "none", Points: pt}}},
		{Name: "two", Series: []report.Series{{Name: "ours", On: "XDP native", Points: pt}, {Name: "ours too", On: "XDP native", Points: pt}}},
	}
	dir := t.TempDir()
	if err := page.Write(dir, r); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, page.Index))
	if err != nil {
		t.Fatal(err)
	}
	text := textOf(t, string(b))
	for _, once := range []string{"TSO on", "XDP native", "Linux: TSO on", "ours; ours too: XDP native"} {
		if n := strings.Count(text, once); n != 1 {
			t.Errorf("%q is there %d times", once, n)
		}
	}
}

func TestTablesHaveEveryFigure(t *testing.T) {
	dir := t.TempDir()
	if err := page.Write(dir, fixture(t)); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][]string{
		"lines.csv":      {"series", hostile, hostile, hostile, "paper"},
		"bars.csv":       {"series", hostile, hostile},
		"first-rows.csv": {"row", "first/ahead", "first/behind", "first/even", "first/too"},
	} {
		f, err := os.Open(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		lines, err := csv.NewReader(f).ReadAll()
		if err := errors.Join(err, f.Close()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		var first []string
		for _, l := range lines {
			first = append(first, l[0])
		}
		if !slices.Equal(first, want) {
			t.Errorf("%s: %q, want %q", name, first, want)
		}
		if name == "lines.csv" && (lines[1][7] != "1 2 3" || lines[1][6] != "0.5" || lines[1][9] != "" || lines[2][9] != "not settled "+hostile) {
			t.Errorf("%s: %q", name, lines[1:3])
		}
	}
}

func TestThePageInABrowser(t *testing.T) {
	dir := t.TempDir()
	if err := page.Write(dir, fixture(t)); err != nil {
		t.Fatal(err)
	}
	pagetest.Look(t, dir, "XsPIN, measured", "Targets: 1 met, 1 missed, 0 within noise.", "Title "+hostile, "first/ahead", "How it is measured", "2.00 [1.00, 3.00], 50.0 % lost")
}
