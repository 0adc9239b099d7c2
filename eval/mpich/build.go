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

// A Library is an implementation of MPI.
type Library string

// The two that there are.
const (
	MPICH   Library = "MPICH"
	OpenMPI Library = "Open MPI"
)

// ErrMissing is that a library is not there to build with.
var ErrMissing = errors.New("no MPI library to build with")

// parts are what a library has of its own: names of its mpicc, a macro of its mpi.h, and
// Debian's packages. Where there are both libraries, mpicc is that of either.
var parts = map[Library]struct {
	mpicc           []string
	macro, packages string
}{
	MPICH:   {[]string{"mpicc.mpich", "mpicc"}, "MPICH_VERSION", "mpich libmpich-dev"},
	OpenMPI: {[]string{"mpicc.openmpi"}, "OPEN_MPI", "openmpi-bin libopenmpi-dev"},
}

// A missingError is ErrMissing of a library, with what to do.
type missingError Library

func (e missingError) Error() string {
	return fmt.Sprintf("no %s to build with: apt-get install %s gcc libc6-dev", Library(e), parts[Library(e)].packages)
}

func (missingError) Is(target error) bool { return target == ErrMissing }

// What mpicc says if a part is missing, with gcc's names for files. The last is of our
// sources: it may be another library's mpicc.
var missing = []string{"mpi.h: No such file", "stdio.h: No such file", "cannot find -lmpi", "gcc: not found", "find the specified compiler", "mpi.h is another library's"}

// Build compiles a program of src, "mpi_compare" say, with MPICH into dir and returns its path.
// The error wraps ErrMissing if there is no compiler or no library.
func Build(ctx context.Context, dir, program string) (path string, err error) {
	return MPICH.build(ctx, dir, program)
}

// build is Build with a library.
func (l Library) build(ctx context.Context, dir, program string) (path string, err error) {
	var mpicc string
	for _, name := range parts[l].mpicc {
		if mpicc, err = exec.LookPath(name); err == nil {
			break
		}
	}
	if err != nil {
		return "", fmt.Errorf("build %s: %w: %w", program, missingError(l), err)
	}
	src := filepath.Join(dir, "src")
	if err := unpack(src); err != nil {
		return "", fmt.Errorf("build %s: %w", program, err)
	}
	path = filepath.Join(dir, program)
	cmd := exec.CommandContext(ctx, mpicc, "-O3", "-Wall", "-DWANT_"+parts[l].macro, "-o", path, filepath.Join(src, program+".c"), "-lm")
	cmd.Env = append(os.Environ(), "LC_ALL=C") // for missing
	out, err := cmd.CombinedOutput()
	if err == nil {
		return path, nil
	}
	if ctx.Err() != nil {
		return "", fmt.Errorf("build %s: %w", program, ctx.Err())
	}
	for line := range bytes.Lines(out) {
		if slices.ContainsFunc(missing, func(s string) bool { return bytes.Contains(line, []byte(s)) }) {
			return "", fmt.Errorf("build %s: %w: %s", program, missingError(l), bytes.TrimSpace(line))
		}
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
