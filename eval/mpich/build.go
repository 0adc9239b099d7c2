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
	"slices"
)

// The C programs, and what they include, so that an installed binary can build them where
// it is.
//
//go:embed src/*.c src/*.h
var sources embed.FS

// ErrMissing is that there is no MPICH to build with.
var ErrMissing = errors.New("no MPICH to build with: apt-get install mpich libmpich-dev gcc libc6-dev")

// What mpicc says if a part is missing, with gcc's names for files.
var missing = []string{"mpi.h: No such file", "stdio.h: No such file", "cannot find -lmpich", "gcc: not found"}

// Build compiles a program of src, "mpi_compare" say, into dir and returns its path.
// The error wraps ErrMissing if there is no compiler or no library.
func Build(ctx context.Context, dir, program string) (path string, err error) {
	// Where there is Open MPI as well, mpicc may be its own.
	mpicc, err := exec.LookPath("mpicc.mpich")
	if err != nil {
		mpicc, err = exec.LookPath("mpicc")
	}
	if err != nil {
		return "", fmt.Errorf("build %s: %w: %w", program, ErrMissing, err)
	}
	src := filepath.Join(dir, "src")
	if err := unpack(src); err != nil {
		return "", fmt.Errorf("build %s: %w", program, err)
	}
	path = filepath.Join(dir, program)
	cmd := exec.CommandContext(ctx, mpicc, "-O3", "-Wall", "-o", path, filepath.Join(src, program+".c"), "-lm")
	cmd.Env = append(os.Environ(), "LC_ALL=C") // for missing
	out, err := cmd.CombinedOutput()
	switch {
	case err == nil:
		return path, nil
	case ctx.Err() != nil:
		return "", fmt.Errorf("build %s: %w", program, ctx.Err())
	case slices.ContainsFunc(missing, func(s string) bool { return bytes.Contains(out, []byte(s)) }):
		return "", fmt.Errorf("build %s: %w: %s", program, ErrMissing, bytes.TrimSpace(out))
	}
	return "", fmt.Errorf("%s: %w: %s", cmd, err, bytes.TrimSpace(out))
}

// unpack writes the sources to a directory.
func unpack(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return fs.WalkDir(sources, "src", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := sources.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(dir, d.Name()), text, 0o644)
	})
}
