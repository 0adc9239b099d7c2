// SPDX-License-Identifier: Apache-2.0

// Command evaldoc puts what a run of `xspin bench all` has found into the documentation:
// plots, tables and verdicts between the two marks of a Markdown page, the plots' files and
// results.json into a folder beside it.
//
//	evaldoc REPORT docs/evaluation.md
//
// REPORT is the directory of a report; without files of plots, those of the folder stay.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/xspin/xspin/eval/bench"
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
	files := []string{report.File}
	for _, e := range r.Experiments {
		for _, p := range e.Plots {
			files = append(files, p.Name+".svg")
		}
	}
	for _, f := range files {
		b, err := os.ReadFile(filepath.Join(dir, f))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(folder, f), b, 0o644)
		}
		if err != nil {
			return err
		}
	}
	var b bytes.Buffer
	results(&b, r, filepath.Base(folder))
	return os.WriteFile(to, []byte(before+begin+b.String()+end+after), 0o644)
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
	b.WriteString("\n### Targets\n\n| figure | target | measured | 95 % interval | verdict | why |\n|---|---|---|---|---|---|\n")
	for _, row := range r.Verdicts() {
		sign := "≥"
		if row.Better == "lower" {
			sign = "≤"
		}
		verdict, why := row.Verdict, ""
		if verdict == "missed" {
			verdict, why = "**missed**", page.Reason(row.Name)
		}
		fmt.Fprintf(b, "| `%s` | %s %s | %s | %s to %s | %s | %s |\n", row.Name, sign, bench.Figure(*row.Target), bench.Figure(row.Median), bench.Figure(row.CI95[0]), bench.Figure(row.CI95[1]), verdict, why)
	}
	for _, e := range r.Experiments {
		fmt.Fprintf(b, "\n### %s\n\n%s\n", e.Title, e.Shows)
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
			b.WriteString("\n<details><summary>Figures</summary>\n\n| figure | median | unit | 95 % interval | better |\n|---|---|---|---|---|\n")
			for _, row := range e.Rows {
				fmt.Fprintf(b, "| `%s` | %s | %s | %s to %s | %s |\n", row.Name, bench.Figure(row.Median), row.Unit, bench.Figure(row.CI95[0]), bench.Figure(row.CI95[1]), row.Better)
			}
			b.WriteString("\n</details>\n")
		}
	}
	b.WriteString("\n")
}

// cell is a text that does not end a table's cell.
func cell(s string) string { return strings.ReplaceAll(strings.ReplaceAll(s, "|", `\|`), "\n", " ") }
