// SPDX-License-Identifier: Apache-2.0

package mpich

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/xspin/xspin/demos/datatypes/gemm"
)

// ErrNoGo is returned, wrapped, where the library cannot be built.
var ErrNoGo = errors.New("the GEMM for C programs is built by the go command, with a C compiler: https://go.dev/dl/, apt-get install gcc")

// gemmModule has what package gemm imports. Its version and sums are those of XsPIN's own.
const gemmModule = `module gemm

go 1.26.0

require gonum.org/v1/gonum v0.17.0
`

const gemmSums = `gonum.org/v1/gonum v0.17.0 h1:VbpOemQlsSMrYmn7T2OUvQ4dqxQXU+ouZFQsZOx50z4=
gonum.org/v1/gonum v0.17.0/go.mod h1:El3tOrEuMpv2UdMrbNlKEh9vd86bmQ6vqIcDwxEOc1E=
`

const gemmLibrary = `package main

// There is one at a time: C holds no pointers of Go.

import "C"

import (
	"gemm/gemm"
	"runtime"
)

var g *gemm.GEMM

//export gemm_new
func gemm_new(n C.long) {
	runtime.GOMAXPROCS(1)
	if g == nil || g.Dim() != int(n) {
		g = gemm.New(int(n))
	}
}

//export gemm_run
func gemm_run() { g.Run() }

func main() {}
`

// buildGEMM makes a shared library of package gemm at path, for C programs:
//
//	void gemm_new(long n);
//	void gemm_run(void);
//
// They run the same instructions as Go programs do, in the thread that calls them. The go
// command has to have gonum in its cache, where building XsPIN leaves it, or to fetch it.
func buildGEMM(ctx context.Context, path string) (err error) {
	gocmd, err := exec.LookPath("go")
	if err != nil {
		return fmt.Errorf("%w (%w)", ErrNoGo, err)
	}
	dir, err := os.MkdirTemp(filepath.Dir(path), "gemm")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := os.Mkdir(filepath.Join(dir, "gemm"), 0o755); err != nil {
		return err
	}
	for name, text := range map[string][]byte{
		"go.mod": []byte(gemmModule), "go.sum": []byte(gemmSums), "main.go": []byte(gemmLibrary), "gemm/gemm.go": gemm.Source,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
			return err
		}
	}
	cmd := exec.CommandContext(ctx, gocmd, "build", "-buildmode=c-shared", "-o", path, ".")
	cmd.Dir = dir
	// Compilers are its children.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1", "GOFLAGS=-buildvcs=false", "GOWORK=off", "GO111MODULE=on")
	if out, err := cmd.CombinedOutput(); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("%w (go build: %w: %s)", ErrNoGo, err, bytes.TrimSpace(out))
	}
	// cgo leaves a header, which nobody needs.
	return os.Remove(path[:len(path)-len(filepath.Ext(path))] + ".h")
}
