// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// A package with a test of each kind, one that ends early, and one that cannot be run.
func TestReport(t *testing.T) {
	dir := t.TempDir()
	build := func(to string, args ...string) {
		t.Helper()
		c := exec.Command("go", append(args, "-o", to)...)
		c.Dir = dir
		if args[len(args)-1] == "cmd/test2json" {
			c = exec.Command("go", "build", "-o", to, "cmd/test2json")
		}
		c.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	test2json := filepath.Join(dir, "test2json")
	build(test2json, "build", "cmd/test2json")
	source := func(text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "x_test.go"), []byte("package x\nimport (\"fmt\"; \"os\"; \"testing\")\nvar _ = os.Exit\nvar _ = fmt.Print\n"+text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module x\n\ngo 1.26\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	source(`
func TestGood(t *testing.T) { fmt.Print("no line end"); t.Run("sub", func(t *testing.T) { t.Log("quiet") }) }
func TestBad(t *testing.T) { t.Run("sub", func(t *testing.T) { t.Error("sub: it is bad") }) }
func TestSkipped(t *testing.T) { t.Skip("needs: a thing") }
func TestParallel(t *testing.T) { t.Parallel(); t.Log("not shown") }
func TestPanics(t *testing.T) { panic("boom") }
`)
	build(filepath.Join(dir, "one.test"), "test", "-c")
	source(`func TestMain(m *testing.M) { fmt.Println("cannot start"); os.Exit(3) }`)
	build(filepath.Join(dir, "two.test"), "test", "-c")

	var text strings.Builder
	out := &report{w: &text, count: map[string]int{}}
	for _, name := range []string{"one.test", "two.test"} {
		if err := run(out, test2json, dir, filepath.Join(dir, name), nil); err != nil {
			t.Error(err)
		}
	}
	if err := run(out, test2json, dir, filepath.Join(dir, "three.test"), nil); err != nil {
		out.line("three", "fail", 0, []string{err.Error()})
	}
	got := regexp.MustCompile(`[0-9.]+ s\n`).ReplaceAllString(strings.ReplaceAll(text.String(), dir, "x"), "T s\n")
	for _, want := range []string{
		"ok 1 x TestGood # T s\n",
		"not ok 2 x TestBad # T s\n#     x_test.go:7: sub: it is bad\n",
		"ok 3 x TestSkipped # SKIP needs: a thing\n",
		"not ok 4 x TestPanics # T s\n",
		"panic: boom",
		"not ok 5 x # T s\n# cannot start\n",
		"not ok 6 ",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	if strings.Contains(got, "quiet") || strings.Contains(got, "not shown") {
		t.Errorf("what passed is told\n%s", got)
	}
	if out.count["pass"] != 1 || out.count["skip"] != 1 || out.count["fail"] < 4 {
		t.Errorf("%v", out.count)
	}
}

func TestEventsThatEndEarly(t *testing.T) {
	out := &report{w: io.Discard, count: map[string]int{}}
	for _, events := range []string{"", `{"Action":"run","Test":"TestA"}`, `{"Action":"pass","Test":"TestA"}` + "\nrubbish"} {
		if err := parse(out, "x", strings.NewReader(events)); err == nil {
			t.Errorf("%q: no error", events)
		}
	}
}

// Of a package all tests run, or those that the expression behind the binary names.
func TestTestsOfAPackageCanBeNamed(t *testing.T) {
	for arg, want := range map[string][3]string{
		"cli=bin/cli.test":                   {"cli", "bin/cli.test"},
		"cli=bin/cli.test=^TestA$|x=y":       {"cli", "bin/cli.test", "^TestA$|x=y"},
		"demos/file=bin/demos-file.test=A|B": {"demos/file", "bin/demos-file.test", "A|B"},
	} {
		dir, binary, tests, ok := split(arg)
		if got := [3]string{dir, binary, tests}; !ok || got != want {
			t.Errorf("%s: %q, %t", arg, got, ok)
		}
	}
	if _, _, _, ok := split("cli"); ok {
		t.Error("no binary is taken")
	}
}
