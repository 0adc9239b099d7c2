// SPDX-License-Identifier: Apache-2.0

// Package page makes of a report what people look at: a page that needs nothing but
// itself, each plot as SVG and PNG, and each table as CSV.
package page

import (
	"bytes"
	"cmp"
	_ "embed"
	"encoding/csv"
	"errors"
	"fmt"
	"html/template"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/chart"
	"github.com/xspin/xspin/eval/report"
)

// Index is the name of the page in the directory of a report.
const Index = "index.html"

//go:embed page.html
var source string

var page = template.Must(template.New("page").Funcs(template.FuncMap{
	"figure": bench.Figure, "sources": sources, "percent": percent, "noisy": func(spread float64) bool { return spread > 0.2 }, "svg": svg, "table": table, "join": strings.Join, "states": states, "level": func() string { return fmt.Sprintf("%g %%", 100*level) }, "class": class, "lost": lost,
	"times": times, "show": Show, "words": func() any { return Words }, "reading": func() any { return Reading },
	"seconds": func(s float64) string { return time.Duration(s * float64(time.Second)).Round(time.Second).String() },
}).Parse(source))

// Write writes the page into the directory of the report, and the plots and tables of the
// experiments of these names, or of all if none is named: PNGs take a while.
func Write(dir string, r *report.Report, names ...string) error {
	var b bytes.Buffer
	if err := page.Execute(&b, newView(r)); err != nil {
		return fmt.Errorf("page: %w", err)
	}
	if err := report.Replace(filepath.Join(dir, Index), b.Bytes()); err != nil {
		return err
	}
	for _, e := range r.Experiments {
		if len(names) > 0 && !slices.Contains(names, e.Name) {
			continue
		}
		if len(e.Rows) > 0 {
			if err := writeCSV(filepath.Join(dir, e.Name+"-rows.csv"), rows(e.Rows)); err != nil {
				return err
			}
		}
		for _, p := range e.Plots {
			if err := writePlot(dir, p); err != nil {
				return fmt.Errorf("experiment %s: %w", e.Name, err)
			}
		}
	}
	return nil
}

// Remove removes the files that an experiment had when it was measured before, and has not now.
func Remove(dir string, old, now *report.Experiment) (err error) {
	keep := files(now)
	for _, name := range files(old) {
		if slices.Contains(keep, name) {
			continue
		}
		if rerr := os.Remove(filepath.Join(dir, name)); !errors.Is(rerr, fs.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
	}
	return err
}

// files are those that Write writes for an experiment.
func files(e *report.Experiment) (names []string) {
	if len(e.Rows) > 0 {
		names = append(names, e.Name+"-rows.csv")
	}
	for _, p := range e.Plots {
		for _, kind := range append([]string{".csv"}, chart.Formats...) {
			names = append(names, p.Name+kind)
		}
	}
	return names
}

// view is what the page shows.
type view struct {
	*report.Report
	Ahead, Behind []bench.Row
	Conclusions   []Conclusions
	Targets       []bench.Row
	Notes         []int    // of the targets, see Notes
	Reasons       []string // by those, from 1
}

func newView(r *report.Report) view {
	v := view{Report: r, Ahead: ahead(r, true), Behind: ahead(r, false), Conclusions: Conclude(r), Targets: r.Verdicts()}
	v.Notes, v.Reasons = Notes(v.Targets)
	return v
}

// Count returns how many targets have a verdict.
func (v view) Count(verdict string) (n int) {
	for _, r := range v.Targets {
		if r.Verdict == verdict {
			n++
		}
	}
	return n
}

// ahead returns the ratios to a peer that are better than about the same with their whole
// interval, or worse, the farthest first.
func ahead(r *report.Report, better bool) (list []bench.Row) {
	for _, e := range r.Experiments {
		for _, row := range e.Rows {
			if row.Unit != "ratio" || row.B == nil || row.B.Peer == "" || row.CI95[0] <= 0 {
				continue
			}
			if standing(&row) == map[bool]int{true: 1, false: -1}[better] {
				list = append(list, row)
			}
		}
	}
	slices.SortStableFunc(list, func(a, b bench.Row) int {
		return cmp.Compare(math.Abs(math.Log(b.Median)), math.Abs(math.Log(a.Median)))
	})
	return list
}

// times says of a ratio how much better or worse than the peer XsPIN is.
func times(r bench.Row) string {
	x, better, worse := r.Median, "faster", "slower"
	if r.Better == "lower" {
		x = 1 / x
	}
	if strings.HasPrefix(r.A.Unit, "s/") { // CPU time
		better, worse = "cheaper", "more costly"
	}
	if x >= 1 {
		return bench.Figure(x) + " times " + better
	}
	return bench.Figure(1/x) + " times " + worse
}

// svg draws a plot for the page itself.
func svg(p *report.Plot) (template.HTML, error) {
	c, err := chart.Of(p)
	if err != nil {
		return "", err
	}
	var b bytes.Buffer
	if err := c.Write(&b, ".svg"); err != nil {
		return "", err
	}
	_, s, ok := strings.Cut(b.String(), "<svg ") // what stands before is for files
	if !ok {
		return "", fmt.Errorf("plot %s: no SVG", p.Name)
	}
	return template.HTML(`<svg role="img" aria-label="` + template.HTMLEscapeString(p.Title) + `" ` + s), nil //nolint:gosec // chart escapes texts, as the tests see
}

// table is a plot's figures: a line for each x, a column for each series.
func table(p *report.Plot) (t struct{ Head, Rows [][]string }) {
	head := []string{p.X.Title()}
	var xs []float64
	for _, s := range p.Series {
		head = append(head, s.Name)
		for _, pt := range s.Points {
			xs = append(xs, pt.X)
		}
	}
	slices.Sort(xs)
	xs = slices.Compact(xs)
	t.Head = [][]string{head}
	for _, x := range xs {
		row := []string{p.X.Place(x)}
		for _, s := range p.Series {
			cell := ""
			for _, pt := range s.Points {
				if pt.X == x {
					cell = fmt.Sprintf("%s [%s, %s]", bench.Figure(pt.Y), bench.Figure(pt.CI95[0]), bench.Figure(pt.CI95[1]))
					cell += lost(pt.Lost)
					if pt.Doubt != "" {
						cell += " ?"
					}
				}
			}
			row = append(row, cell)
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

// A state is what was on at the ends of the link, and for which series.
type state struct {
	Of []string
	On string
}

// states returns those of an experiment, each once: most series of all plots have the same.
func states(e *report.Experiment) (all []state) {
	for _, p := range e.Plots {
		for _, s := range p.Series {
			i := slices.IndexFunc(all, func(st state) bool { return st.On == s.On })
			switch {
			case s.On == "":
				continue
			case i < 0:
				all = append(all, state{[]string{s.Name}, s.On})
			case !slices.Contains(all[i].Of, s.Name):
				all[i].Of = append(all[i].Of, s.Name)
			}
		}
	}
	return all
}

// sources are where the marks of a plot come from.
func sources(p *report.Plot) (all []string) {
	for _, m := range p.Marks {
		if !slices.Contains(all, m.Source) {
			all = append(all, m.Source)
		}
	}
	return all
}

// lost says which fraction was lost, if any.
func lost(fraction *float64) string {
	if fraction == nil || *fraction == 0 {
		return ""
	}
	return ", " + percent(*fraction) + " lost"
}

func percent(x float64) string { return bench.Figure(100*x) + " %" }

// class is the style of a verdict.
func class(verdict string) string { return strings.ReplaceAll(verdict, " ", "-") }

func writePlot(dir string, p *report.Plot) error {
	c, err := chart.Of(p)
	if err != nil {
		return err
	}
	for _, format := range chart.Formats {
		var b bytes.Buffer
		if err := c.Write(&b, format); err != nil {
			return err
		}
		if err := report.Replace(filepath.Join(dir, p.Name+format), b.Bytes()); err != nil {
			return err
		}
	}
	lines := [][]string{{"series", "tier", p.X.Title(), p.Y.Title(), "low", "high", "lost", "runs", "on", "doubt"}}
	for _, s := range p.Series {
		for _, pt := range s.Points {
			lost := ""
			if pt.Lost != nil {
				lost = number(*pt.Lost)
			}
			lines = append(lines, []string{s.Name, s.Tier, number(pt.X), number(pt.Y), number(pt.CI95[0]), number(pt.CI95[1]), lost, numbers(pt.Runs), s.On, pt.Doubt})
		}
	}
	for _, m := range p.Marks {
		lines = append(lines, []string{m.Name, "", number(m.X), number(m.Y), "", "", "", "", m.Source, ""})
	}
	return writeCSV(filepath.Join(dir, p.Name+".csv"), lines)
}

func rows(list []bench.Row) [][]string {
	lines := [][]string{{"row", "unit", "median", "low", "high", "better", "target", "verdict", "a", "a runs", "b", "b runs", "conditions"}}
	for _, r := range list {
		target, b, bRuns := "", "", ""
		if r.Target != nil {
			target = number(*r.Target)
		}
		if r.B != nil {
			b, bRuns = r.B.What, numbers(r.B.Runs)
		}
		lines = append(lines, []string{
			r.Name, r.Unit, number(r.Median), number(r.CI95[0]), number(r.CI95[1]), r.Better, target, r.Verdict,
			r.A.What, numbers(r.A.Runs), b, bRuns, r.Conditions,
		})
	}
	return lines
}

func number(x float64) string { return strconv.FormatFloat(x, 'g', -1, 64) }

func numbers(x []float64) string {
	var s []string
	for _, v := range x {
		s = append(s, number(v))
	}
	return strings.Join(s, " ")
}

func writeCSV(name string, lines [][]string) error {
	var b bytes.Buffer
	if err := csv.NewWriter(&b).WriteAll(lines); err != nil {
		return err
	}
	return report.Replace(name, b.Bytes())
}
