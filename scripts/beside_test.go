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

// The tests that are left out with the race detector, in all packages, are those of slmp that
// run without it.
func TestWhatIsNotRacedRuns(t *testing.T) {
	text, err := os.ReadFile("../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^UNRACED := (.+)$`).FindSubmatch(text)
	if m == nil {
		t.Fatal("the Makefile has no UNRACED")
	}
	unraced, test := regexp.MustCompile(string(m[1])), regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	n := 0
	err = filepath.WalkDir("..", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, f := range test.FindAllSubmatch(source, -1) {
			switch {
			case !unraced.Match(f[1]):
			case filepath.Dir(path) != filepath.Join("..", "slmp"):
				t.Errorf("%s: no make target runs %s: rename it", path, f[1])
			default:
				n++
			}
		}
		return nil
	})
	if err != nil || n < 5 {
		t.Errorf("%d tests of slmp, error %v", n, err)
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
		"nothing": true, "gofmt*": false, "*golangci*": false, "*(Model|Auto)*": false, "*IsBounded*": false, "*/packet*": false,
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
		for _, run := range []string{"gofmt -l", "golangci-lint", "./slmp", "IsBounded ./ddt", "./packet"} {
			if fail == "gofmt*" && run == "golangci-lint" {
				continue // one command, make lint
			}
			if !strings.Contains(string(ran), run) {
				t.Errorf("%s fails: %s did not run, but\n%s", fail, run, ran)
			}
		}
	}
}
