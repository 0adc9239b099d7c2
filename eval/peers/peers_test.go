// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestPeersThatAreNotThereAreInstalled(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	missing := Missing()
	if len(missing) != len(All) {
		t.Errorf("missing of nothing: %+v", missing)
	}
	var told bytes.Buffer
	if err := Install(t.Context(), missing, &told); err == nil || !strings.Contains(err.Error(), "install iperf3, mpich, libmpich-dev, openmpi-bin, libopenmpi-dev, gcc, libc6-dev: this system has no apt-get") {
		t.Errorf("without apt-get: %v", err)
	}
	program := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	program("apt-get", "echo apt-get \"$@\"; echo \"$DEBIAN_FRONTEND\"")
	if err := Install(t.Context(), missing[:1], &told); err != nil {
		t.Error(err)
	}
	if want := "apt-get update -q\nnoninteractive\napt-get install -q -y --no-install-recommends iperf3\nnoninteractive\n"; told.String() != want {
		t.Errorf("started %q, want %q", told.String(), want)
	}
	program("apt-get", "exit 100")
	if err := Install(t.Context(), missing, &told); err == nil || !strings.Contains(err.Error(), "apt-get install iperf3 mpich libmpich-dev openmpi-bin libopenmpi-dev gcc libc6-dev: exit status 100") {
		t.Errorf("of one that fails: %v", err)
	}
	program("iperf3", "echo 'iperf  3.12 (cJSON)'; echo more")
	if v := All[0].Version(); v != "iperf 3.12 (cJSON)" || len(Missing()) != len(All)-1 {
		t.Errorf("version %q", v)
	}
}
