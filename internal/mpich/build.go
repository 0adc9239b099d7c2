// SPDX-License-Identifier: Apache-2.0

package mpich

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Sources are the C programs, and what they include, so that an installed binary can build
// them where it is.
//
//go:embed src/*.c src/*.h
var Sources embed.FS

// ErrMissing is that there is no MPICH to build with.
var ErrMissing = errors.New("no MPICH here: apt-get install mpich libmpich-dev")

// Build compiles a program of Sources, "mpi_compare" say, into dir and returns its path.
// The error wraps ErrMissing if there is no compiler or no library.
func Build(ctx context.Context, dir, program string) (path string, err error) {
	// Where Open MPI is the default, mpicc is another one's.
	mpicc, err := exec.LookPath("mpicc.mpich")
	if err != nil {
		if mpicc, err = exec.LookPath("mpicc"); err != nil {
			return "", fmt.Errorf("%w (%w)", ErrMissing, err)
		}
	}
	src := filepath.Join(dir, "src")
	if err := unpack(src); err != nil {
		return "", err
	}
	path = filepath.Join(dir, program)
	cmd := exec.CommandContext(ctx, mpicc, "-O3", "-Wall", "-o", path, filepath.Join(src, program+".c"), "-lm")
	if out, err := cmd.CombinedOutput(); err != nil {
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		if bytes.Contains(out, []byte("mpi.h: No such file")) || bytes.Contains(out, []byte("cannot find -lmpich")) {
			return "", fmt.Errorf("%w (%s)", ErrMissing, firstLine(out))
		}
		return "", fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, bytes.TrimSpace(out))
	}
	return path, nil
}

func firstLine(out []byte) []byte {
	line, _, _ := bytes.Cut(bytes.TrimSpace(out), []byte("\n"))
	return line
}

// unpack writes the sources to a directory, which may have them.
func unpack(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return fs.WalkDir(Sources, "src", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := Sources.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(dir, d.Name()), text, 0o644)
	})
}
