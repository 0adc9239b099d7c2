// SPDX-License-Identifier: Apache-2.0

package gemm

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
)

func TestRun(t *testing.T) {
	for _, n := range []int{1, 2, 63, 64, 65, 130} {
		g := New(n)
		const runs = 3
		for range runs {
			g.Run()
		}
		for i := range n {
			for j := range n {
				var want float64
				for k := range n {
					want += g.a[i*n+k] * g.b[k*n+j]
				}
				if got := g.c[i*n+j]; got != runs*want { // small integers: exact
					t.Fatalf("n %d: C[%d,%d] is %g, want %g", n, i, j, got, runs*want)
				}
			}
		}
	}
}

func TestRunIsSingleThreadedAndDoesNotAllocate(t *testing.T) {
	g := New(200)
	if n := testing.AllocsPerRun(3, g.Run); n != 0 {
		t.Errorf("%g allocations", n) // a goroutine would be some
	}
}

func TestGFLOPS(t *testing.T) {
	if got := GFLOPS(1000, 3, 2*time.Second); got != 3 {
		t.Errorf("%g, want 3", got)
	}
}

// The C program prints what the library's matrices are after two runs.
const client = `
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

func TestLibrary(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "libgemm.so")
	if err := BuildLibrary(t.Context(), path); errors.Is(err, ErrNoGo) && os.Getenv("XSPIN_NO_SKIP") != "1" {
		t.Skip(err)
	} else if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("beside the library: %v, error %v", entries, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "client.c"), []byte(client), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cc", "-o", filepath.Join(dir, "client"), filepath.Join(dir, "client.c")).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if out, err := exec.Command(filepath.Join(dir, "client"), path).CombinedOutput(); err != nil || string(out) != "done\n" {
		t.Errorf("%q, error %v", out, err)
	}
}

func TestLibraryFails(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	dir := t.TempDir()
	if err := BuildLibrary(ctx, filepath.Join(dir, "l.so")); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v when cancelled", err)
	}
	t.Setenv("GOMODCACHE", filepath.Join(dir, "empty"))
	t.Setenv("GOPROXY", "off")
	if err := BuildLibrary(t.Context(), filepath.Join(dir, "l.so")); !errors.Is(err, ErrNoGo) || !strings.Contains(err.Error(), "gonum") {
		t.Errorf("error %v without gonum", err)
	}
	t.Setenv("PATH", dir)
	if err := BuildLibrary(t.Context(), filepath.Join(dir, "l.so")); !errors.Is(err, ErrNoGo) {
		t.Errorf("error %v without go", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "gemm*")); left != nil {
		t.Errorf("left behind: %q", left)
	}
}

// The library has the instructions that XsPIN has.
func TestLibraryIsOfTheSameGonum(t *testing.T) {
	for name, text := range map[string]string{"go.mod": module, "go.sum": sums} {
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
	if runtime.GOARCH == "amd64" && len(source) == 0 {
		t.Error("no source")
	}
}
