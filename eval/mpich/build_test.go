// SPDX-License-Identifier: Apache-2.0

package mpich

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestBuildSaysWhichPackagesAreMissing(t *testing.T) {
	for _, tc := range []struct {
		name, mpicc string // a script of that name, "" for none
		missing     bool
	}{
		{"no mpicc", "", true},
		{"no header", "echo 'mpi_compare.c:15:10: fatal error: mpi.h: No such file or directory' >&2; exit 1", true},
		{"no compiler", "echo '/usr/bin/mpicc: 1: gcc: not found' >&2; exit 127", true},
		{"no compiler for Open MPI's", "echo 'The Open MPI wrapper compiler was unable to find the specified compiler' >&2; exit 1", true},
		{"another's", `echo "mpi_type.h:37:2: error: #error mpi.h is another library's" >&2; exit 1`, true},
		{"a mistake", "echo \"mpi_compare.c:15:10: error: expected ';'\" >&2; exit 1", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			bin := t.TempDir()
			t.Setenv("PATH", bin)
			if tc.mpicc != "" {
				if err := os.WriteFile(filepath.Join(bin, "mpicc"), []byte("#!/bin/sh\n"+tc.mpicc+"\n"), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			_, err := Build(t.Context(), t.TempDir(), "mpi_compare")
			if err == nil {
				t.Fatal("built")
			}
			if errors.Is(err, ErrMissing) != tc.missing {
				t.Errorf("%v: ErrMissing %t, want %t", err, !tc.missing, tc.missing)
			}
			if tc.missing && !strings.Contains(err.Error(), "mpich libmpich-dev") {
				t.Errorf("%v: names no packages", err)
			}
			if !tc.missing && !strings.Contains(err.Error(), "expected ';'") {
				t.Errorf("%v: not what the compiler says", err)
			}
		})
	}
}

// Where there is only one of the two, mpicc is its own, and MPICH's ranks would not find each
// other if they were built with the other's.
func TestBuildRefusesAnothersHeader(t *testing.T) {
	path := os.Getenv("PATH")
	real := map[Library]string{}
	for l, p := range parts {
		need(t, l)
		for _, name := range slices.Backward(p.mpicc) {
			if path, err := exec.LookPath(name); err == nil {
				real[l] = path
			}
		}
	}
	for l, other := range map[Library]Library{MPICH: OpenMPI, OpenMPI: MPICH} {
		bin := t.TempDir()
		// Open MPI's looks at the name by which it was called.
		script := fmt.Sprintf("#!/bin/sh\nPATH=%s exec %s \"$@\"\n", path, real[other])
		if err := os.WriteFile(filepath.Join(bin, parts[l].mpicc[0]), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
		t.Setenv("PATH", bin)
		if _, err := l.build(t.Context(), t.TempDir(), "mpi_unpack"); !errors.Is(err, ErrMissing) || !strings.Contains(err.Error(), "another library's") {
			t.Errorf("%s with the mpicc of %s: %v", l, other, err)
		}
	}
}

// All that it takes is in the binary.
func TestBuildNeedsNoSources(t *testing.T) {
	needMPICH(t)
	t.Chdir(t.TempDir())
	path, err := Build(t.Context(), t.TempDir(), "mpi_unpack")
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode()&0o111 == 0 {
		t.Errorf("%s: %v, %v", path, info, err)
	}
}
