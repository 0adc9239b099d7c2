// SPDX-License-Identifier: Apache-2.0

package mpich

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/xspin/xspin/demos/datatypes/gemm"
)

// The C program prints what the library's matrices are after two runs.
const gemmClient = `
#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char **argv)
{
	void *l = dlopen(argv[1], RTLD_NOW);
	if (!l) {
		puts(dlerror());
		return 1;
	}
	((void (*)(long))dlsym(l, "gemm_new"))(100);
	((void (*)(void))dlsym(l, "gemm_run"))();
	((void (*)(void))dlsym(l, "gemm_run"))();
	puts("done");
	return 0;
}
`

func TestGEMMLibrary(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "libgemm.so")
	if err := buildGEMM(t.Context(), path); errors.Is(err, ErrNoGo) && os.Getenv("XSPIN_NO_SKIP") != "1" {
		t.Skip(err)
	} else if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("beside the library: %v, error %v", entries, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "client.c"), []byte(gemmClient), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cc", "-o", filepath.Join(dir, "client"), filepath.Join(dir, "client.c")).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if out, err := exec.Command(filepath.Join(dir, "client"), path).CombinedOutput(); err != nil || string(out) != "done\n" {
		t.Errorf("%q, error %v", out, err)
	}
}

func TestGEMMLibraryFails(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	dir := t.TempDir()
	if err := buildGEMM(ctx, filepath.Join(dir, "l.so")); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v when cancelled", err)
	}
	t.Setenv("GOMODCACHE", filepath.Join(dir, "empty"))
	t.Setenv("GOPROXY", "off")
	if err := buildGEMM(t.Context(), filepath.Join(dir, "l.so")); !errors.Is(err, ErrNoGo) || !strings.Contains(err.Error(), "gonum") {
		t.Errorf("error %v without gonum", err)
	}
	t.Setenv("PATH", dir)
	if err := buildGEMM(t.Context(), filepath.Join(dir, "l.so")); !errors.Is(err, ErrNoGo) {
		t.Errorf("error %v without go", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "gemm*")); left != nil {
		t.Errorf("left behind: %q", left)
	}
}

// The library has the instructions that XsPIN has.
func TestGEMMLibraryIsOfTheSameGonum(t *testing.T) {
	for name, text := range map[string]string{"go.mod": gemmModule, "go.sum": gemmSums} {
		ours, err := os.ReadFile(filepath.Join("..", "..", name))
		if err != nil {
			t.Fatal(err)
		}
		found := 0
		for line := range strings.Lines(text) {
			if _, line, ok := strings.Cut(line, "gonum.org"); ok {
				found++
				if !strings.Contains(string(ours), "gonum.org"+line) {
					t.Errorf("%s: gonum.org%s is not in XsPIN's", name, line)
				}
			}
		}
		if found == 0 {
			t.Errorf("%s: no gonum", name)
		}
	}
	if runtime.GOARCH == "amd64" && len(gemm.Source) == 0 {
		t.Error("no source")
	}
}
