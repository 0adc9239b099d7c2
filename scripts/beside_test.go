// SPDX-License-Identifier: Apache-2.0

package scripts

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// The tests that are left out with the race detector, in all packages, are those of a few that
// run without it. Packages that run without it have no second goroutine.
func TestWhatIsNotRacedRuns(t *testing.T) {
	text, err := os.ReadFile("../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	variable := func(name string) string {
		m := regexp.MustCompile(`(?m)^` + name + ` *:= (.+)$`).FindSubmatch(text)
		if m == nil {
			t.Fatalf("the Makefile has no %s", name)
		}
		return string(m[1])
	}
	unraced, test := regexp.MustCompile(variable("UNRACED")), regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	in, found := strings.Fields(variable("UNRACED_IN")), map[string]int{}
	single, second := strings.Fields(variable("SINGLE")), regexp.MustCompile(`(?m)^\s*go |\.Go\(|"sync|\.Parallel\(`)
	err = filepath.WalkDir("..", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") {
			return err
		}
		source, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		pkg, err := filepath.Rel("..", filepath.Dir(path))
		if err != nil {
			return err
		}
		if where := second.Find(source); slices.Contains(single, pkg) && where != nil {
			t.Errorf("%s has %q: the race detector has to watch %s", path, where, pkg)
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		for _, f := range test.FindAllSubmatch(source, -1) {
			switch {
			case !unraced.Match(f[1]):
			case !slices.Contains(in, pkg):
				t.Errorf("%s: no make target runs %s: rename it", path, f[1])
			default:
				found[pkg]++
			}
		}
		return nil
	})
	if err != nil || len(found) != len(in) {
		t.Errorf("tests that are not raced: %v, want some in each of %v; error %v", found, in, err)
	}
}

// TestWhatRunsBesideIsAllTold has the linter fail, and each of the tests that run beside the
// others, and wants the others to run nevertheless, and make to know.
func TestWhatRunsBesideIsAllTold(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"go", "gofmt"} {
		// It says what it was told to run, and fails if that is what shall fail.
		script := "#!/bin/sh\necho \"" + name + " $*\" >>\"$LOG\"\ncase \"" + name + " $*\" in $FAIL) exit 3 ;; esac\n"
		if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for fail, want := range map[string]bool{
		"nothing": true, "gofmt*": false, "*golangci*": false, "*-run ^Test(Model|Auto*": false, "*/packet*": false, "*-skip*/loader*": false,
	} {
		log := filepath.Join(t.TempDir(), "log")
		cmd := exec.Command("make", "-C", "..", "--no-print-directory", "--eval", "beside-alone: ; @$(test-beside)", "beside-alone")
		cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool {
			return strings.HasPrefix(kv, "MAKE") || strings.HasPrefix(kv, "MFLAGS=")
		})
		cmd.Env = append(cmd.Env, "PATH="+dir+":"+os.Getenv("PATH"), "LOG="+log, "FAIL="+fail)
		out, err := cmd.CombinedOutput()
		if (err == nil) != want {
			t.Errorf("%s fails: %v\n%s", fail, err, out)
		}
		ran, err := os.ReadFile(log)
		if err != nil {
			t.Fatal(err)
		}
		for _, run := range []string{"gofmt -l", "golangci-lint", "MemoryIsBounded|ParseIsBounded|StringIsBounded) ./slmp ./loader ./ddt ./mpq", "./packet", "-p 1 ./loader ./ddt ./mpq"} {
			if fail == "gofmt*" && run == "golangci-lint" {
				continue // one command, make lint
			}
			if !strings.Contains(string(ran), run) {
				t.Errorf("%s fails: %s did not run, but\n%s", fail, run, ran)
			}
		}
	}
}
