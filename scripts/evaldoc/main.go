// SPDX-License-Identifier: Apache-2.0

// Command evaldoc puts what a run of `xspin bench all` has found into the documentation:
// plots, tables and verdicts between the two marks of a Markdown page, the plots' files and
// results.json into a folder beside it.
//
//	evaldoc REPORT docs/evaluation.md
//
// REPORT is the directory of a report. Plots are drawn anew from its results.json.
package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/chart"
	"github.com/xspin/xspin/eval/page"
	"github.com/xspin/xspin/eval/report"
)

const begin, end = "<!-- results: written by scripts/evaldoc -->\n", "<!-- end of results -->\n"

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: evaldoc REPORT PAGE.md")
		os.Exit(2)
	}
	if err := write(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "evaldoc:", err)
		os.Exit(1)
	}
}

// write puts the report into a Markdown page and the folder of its name.
func write(dir, to string) error {
	r, err := report.Load(dir)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(to)
	if err != nil {
		return err
	}
	folder := strings.TrimSuffix(to, ".md")
	before, rest, ok := strings.Cut(string(text), begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return fmt.Errorf("%s: no place for results: want the lines %q and %q", to, strings.TrimSpace(begin), strings.TrimSpace(end))
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	all, err := os.ReadFile(filepath.Join(dir, report.File))
	if err == nil {
		err = os.WriteFile(filepath.Join(folder, report.File), all, 0o644)
	}
	if err != nil {
		return err
	}
	for _, e := range r.Experiments {
		for _, p := range e.Plots {
			if err := draw(p, filepath.Join(folder, p.Name+".svg")); err != nil {
				return err
			}
		}
	}
	var b bytes.Buffer
	results(&b, r, filepath.Base(folder))
	return os.WriteFile(to, []byte(before+begin+b.String()+end+after), 0o644)
}

// draw draws a plot as this release does, whichever measured it.
func draw(p *report.Plot, to string) error {
	c, err := chart.Of(p)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if err := c.Write(&b, ".svg"); err != nil {
		return err
	}
	return os.WriteFile(to, b.Bytes(), 0o644)
}

// results writes what a report has found, with plots from a folder.
func results(b *bytes.Buffer, r *report.Report, folder string) {
	fmt.Fprintf(b, "\nMeasured %s on %s, %d CPUs, %s, with %s; %v of measuring. All runs of all figures: [results.json](%s/%s).\n",
		r.Env.Started, r.Env.CPU, r.Env.CPUs, r.Env.Kernel, r.Env.Go, r.Duration().Round(time.Minute), folder, report.File)
	for _, f := range r.Machine {
		if f.Value == "" {
			fmt.Fprintf(b, "%s was not installed, so %s was not measured.\n", f.Name, f.For)
		}
	}
	b.WriteString("\n| | |\n|---|---|\n")
	for _, f := range r.Machine {
		if f.Value != "" {
			fmt.Fprintf(b, "| %s | %s |\n", f.Name, cell(f.Value))
		}
	}
	if conclusions := page.Conclude(r); len(conclusions) > 0 {
		b.WriteString("\n### In short\n\nRatios of this run, with their intervals.\n")
		for _, c := range conclusions {
			fmt.Fprintf(b, "\n%s:\n\n", c.Heading)
			for _, l := range c.Lines {
				fmt.Fprintf(b, "* %s\n", l)
			}
		}
	}
	b.WriteString("\n### How to read the tables\n\n")
	for _, l := range page.Reading {
		fmt.Fprintf(b, "* %s\n", l)
	}
	b.WriteString("\n<details><summary>Words</summary>\n\n")
	for _, w := range page.Words {
		fmt.Fprintf(b, "* **%s**: %s\n", w.Word, w.Is)
	}
	b.WriteString("\n</details>\n")
	targets(b, r.Verdicts())
	for _, e := range r.Experiments {
		fmt.Fprintf(b, "\n### %s\n\n%s\n\nHow: %s\n", e.Title, e.Shows, e.Method)
		if e.Status != report.Done {
			fmt.Fprintf(b, "\n%s: %s\n", strings.ToUpper(string(e.Status[:1]))+string(e.Status[1:]), cell(e.Why))
		}
		for _, w := range e.Warnings {
			fmt.Fprintf(b, "\n%s\n", cell(w))
		}
		for _, p := range e.Plots {
			fmt.Fprintf(b, "\n![%s](%s/%s.svg)\n", p.Title, folder, p.Name)
		}
		if len(e.Rows) > 0 {
			b.WriteString("\n<details><summary>Figures</summary>\n\n| figure | median | unit | interval | runs | better |\n|---|---|---|---|---|---|\n")
			for _, row := range e.Rows {
				s := page.Show(row)
				fmt.Fprintf(b, "| `%s` | %s | %s | %s to %s | %d | %s |\n", row.Name, s.Median, s.Unit, s.Low, s.High, len(row.A.Runs), row.Better)
			}
			b.WriteString("\n</details>\n")
		}
	}
	b.WriteString("\n")
}

// targets writes the rows that have one.
func targets(b *bytes.Buffer, rows []bench.Row) {
	b.WriteString("\n### Targets\n\n| figure | better | target | measured | interval | verdict |\n|---|---|---|---|---|---|\n")
	notes, reasons := page.Notes(rows)
	for i, row := range rows {
		verdict := row.Verdict
		if notes[i] > 0 {
			verdict = fmt.Sprintf("**missed** (%d)", notes[i])
		}
		s := page.Show(row)
		fmt.Fprintf(b, "| `%s` | %s | %s | %s | %s to %s | %s |\n", row.Name, row.Better, s.Target, s.Median, s.Low, s.High, verdict)
	}
	if len(reasons) > 0 {
		b.WriteString("\nWhy targets are missed, by the numbers behind the verdicts:\n\n")
	}
	for i, why := range reasons {
		fmt.Fprintf(b, "%d. %s\n", i+1, why)
	}
}

// cell is a text that does not end a table's cell.
func cell(s string) string { return strings.ReplaceAll(strings.ReplaceAll(s, "|", `\|`), "\n", " ") }
