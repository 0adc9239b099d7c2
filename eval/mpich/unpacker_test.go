// SPDX-License-Identifier: Apache-2.0

package mpich

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func startUnpacker(t *testing.T) *Unpacker {
	t.Helper()
	needMPICH(t)
	u, err := StartUnpacker(t.Context(), -1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := u.Close(); err != nil {
			t.Error(err)
		}
		tasks, _ := filepath.Glob("/proc/self/task/*/children")
		for _, f := range tasks {
			pids, _ := os.ReadFile(f) // its thread may have ended
			for pid := range strings.FieldsSeq(string(pids)) {
				if name, _ := os.ReadFile("/proc/" + pid + "/comm"); string(name) == "mpi_unpack\n" {
					t.Errorf("its process %s has not ended", pid)
				}
			}
		}
	})
	return u
}

func TestUnpacker(t *testing.T) {
	u := startUnpacker(t)
	for _, x := range []struct {
		text  string
		count int64
		flush int64
	}{
		{"ctg(27648)[float]", 1, 0},
		{"vec(1000 1 -2)[double]", 3, 0},
		{"vec(1000 1 -2)[double]", 3, 1 << 20},
		{"resized(0,4)[int]", 0, 0},
		{"ctg(0)[int]", 5, 100},
	} {
		m, err := u.Measure(t.Context(), parse(t, x.text), x.count, 3, x.flush)
		if err != nil {
			t.Fatalf("%s: %v", x.text, err)
		}
		for what, times := range map[string]int{"unpack": len(m.Unpack), "pack": len(m.Pack), "commit": len(m.Commit)} {
			if times != 3 {
				t.Errorf("%s: %s measured %d times", x.text, what, times)
			}
		}
		if x.count > 1 && strings.HasPrefix(x.text, "vec") && (slices.Min(m.Unpack) <= 0 || slices.Min(m.Pack) <= 0) {
			t.Errorf("%s: %+v", x.text, m)
		}
	}
	for want, err := range map[string]error{
		"-1 elements":   second(u.Measure(t.Context(), parse(t, "int"), -1, 1, 0)),
		"0 repetitions": second(u.Measure(t.Context(), parse(t, "int"), 1, 0, 0)),
		"-5 bytes":      second(u.Measure(t.Context(), parse(t, "int"), 1, 1, -5)),
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one of %q", err, want)
		}
	}
	if _, err := u.Measure(t.Context(), parse(t, "int"), 1, 1, 0); err != nil {
		t.Error(err)
	}
	// MPI counts packed bytes in int.
	if _, err := u.Measure(t.Context(), parse(t, "ctg(100000)[int]"), 100000, 1, 0); !errors.Is(err, ErrRank) || !strings.Contains(err.Error(), "in int") {
		t.Errorf("error %v of 40 GB", err)
	}
	if _, err := u.Measure(t.Context(), parse(t, "int"), 1, 1, 0); !errors.Is(err, ErrRank) {
		t.Errorf("error %v of a later call", err)
	}
}

func second[T any](_ T, err error) error { return err }

func TestUnpackerIsCancelled(t *testing.T) {
	u := startUnpacker(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := u.Measure(ctx, parse(t, "int"), 1, 1, 0); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}
