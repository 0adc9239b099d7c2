// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xspin/xspin/eval/page"
	"github.com/xspin/xspin/eval/report"
)

const doc, folder = "../../docs/evaluation.md", "../../docs/evaluation"

// What the documentation shows is what was measured.
func TestTheResultsAreThoseOfTheReport(t *testing.T) {
	want, err := os.ReadFile(doc)
	if err != nil {
		t.Fatal(err)
	}
	copied := filepath.Join(t.TempDir(), "evaluation.md")
	if err := os.WriteFile(copied, want, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := write(folder, copied); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(copied)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != string(want) {
		t.Error("docs/evaluation.md is not what scripts/evaldoc makes of docs/evaluation/results.json")
	}
	r, err := report.Load(folder)
	if err != nil {
		t.Fatal(err)
	}
	if r.Quick || len(r.Todo) > 0 {
		t.Error("the documentation has a quick run, or an unfinished one")
	}
	if strings.Contains(string(want), page.Reason("")) {
		t.Error("docs/evaluation.md does not say why a target is missed: eval/page/words.go has the reasons")
	}
	for _, e := range r.Experiments {
		for _, p := range e.Plots {
			if _, err := os.Stat(filepath.Join(folder, p.Name+".svg")); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestAPageWithoutAPlaceIsRefused(t *testing.T) {
	name := filepath.Join(t.TempDir(), "page.md")
	if err := os.WriteFile(name, []byte("# Nothing\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := write(folder, name); err == nil || !strings.Contains(err.Error(), "no place for results") {
		t.Errorf("error %v", err)
	}
	if err := write(t.TempDir(), doc); err == nil {
		t.Error("a directory without a report is taken")
	}
}
