// SPDX-License-Identifier: Apache-2.0

package mpich

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestBuildSaysWhichPackagesAreMissing(t *testing.T) {
	for _, tc := range []struct {
		name, mpicc string // a script, "" for none
		missing     bool
	}{
		{"no mpicc", "", true},
		{"no header", "echo 'mpi_compare.c:15:10: fatal error: mpi.h: No such file or directory' >&2; exit 1", true},
		{"no compiler", "echo '/usr/bin/mpicc: 1: gcc: not found' >&2; exit 127", true},
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
