// SPDX-License-Identifier: Apache-2.0

// Package objecttest compiles handlers in eBPF for tests, as a user would.
package objecttest

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/xspin/xspin/bpf"
)

// Compile compiles a source file that includes xspin_handler.h, and returns the object.
// Flags are further ones. Without clang it skips the test; with XSPIN_NO_SKIP=1 it fails.
func Compile(t testing.TB, source string, flags ...string) []byte {
	t.Helper()
	key := strings.Join(append([]string{source}, flags...), "\x00")
	if object, ok := compiled.Load(key); ok {
		return bytes.Clone(object.([]byte))
	}
	object, out, err := compile(t, source, flags)
	if err != nil {
		t.Fatalf("clang-19: %v\n%s", err, out)
	}
	compiled.Store(key, bytes.Clone(object))
	return object
}

// compiled has the objects of sources and flags that this process has compiled: tests run
// them at several hooks, or in several rounds.
var compiled sync.Map

// Refusal is what clang says of a source file that it does not compile.
func Refusal(t testing.TB, source string) string {
	t.Helper()
	_, out, err := compile(t, source, nil)
	if err == nil {
		t.Error("it compiles")
	}
	return string(out)
}

func compile(t testing.TB, source string, flags []string) (object, out []byte, err error) {
	t.Helper()
	if _, err := exec.LookPath("clang-19"); err != nil {
		if os.Getenv("XSPIN_NO_SKIP") == "1" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	dir := t.TempDir()
	if err := os.CopyFS(dir, bpf.Include); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "test.bpf.c"), []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	args := append([]string{"-target", "bpf", "-O2", "-g", "-mcpu=v3", "-Wall", "-Wextra", "-Werror", "-Iinclude", "-c", "test.bpf.c", "-o", "test.o"}, flags...)
	cmd := exec.Command("clang-19", args...)
	cmd.Dir = dir
	if out, err = cmd.CombinedOutput(); err != nil {
		return nil, out, err
	}
	object, err = os.ReadFile(filepath.Join(dir, "test.o"))
	return object, out, err
}
