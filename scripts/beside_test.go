// SPDX-License-Identifier: Apache-2.0

package scripts

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

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
		"nothing": true, "gofmt*": false, "*golangci*": false, "*TestModel*": false, "*IsBounded*": false, "*/packet*": false,
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
