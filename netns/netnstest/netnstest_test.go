// SPDX-License-Identifier: Apache-2.0

package netnstest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/xspin/xspin/netns"
)

// verdict records what a test is told.
type verdict struct {
	testing.TB
	said string
}

func (v *verdict) Helper()                   {}
func (v *verdict) Fatalf(f string, a ...any) { v.said = "fail: " + fmt.Sprintf(f, a...) }
func (v *verdict) Skipf(f string, a ...any)  { v.said = "skip: " + fmt.Sprintf(f, a...) }

func TestNeedRootDecidesByProbeAndEnvironment(t *testing.T) {
	for _, tc := range []struct {
		name, env string
		err       error
		want      string
	}{
		{"a test that may run runs", "", nil, ""},
		{"a test that may run runs when skipping is forbidden", "1", nil, ""},
		{"a test that may not run is skipped", "", errors.New("no"), "skip: needs root: no"},
		{"a test that may not run fails when skipping is forbidden", "1", errors.New("no"), "fail: needs root: no"},
		{"a test that may not run is skipped when the variable is 0", "0", errors.New("no"), "skip: needs root: no"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Setenv("XSPIN_NO_SKIP", tc.env)
			v := &verdict{TB: t}
			decide(v, tc.err)
			if v.said != tc.want {
				t.Errorf("said %q, want %q", v.said, tc.want)
			}
		})
	}
}

func TestLabsOfKilledTestsAreSweptAndThoseOfLivingOnesStay(t *testing.T) {
	NeedRoot(t)
	gone := exec.Command("true")
	if err := gone.Run(); err != nil {
		t.Fatal(err)
	}
	up := func(pid int) netns.LabConfig {
		cfg := netns.LabConfig{
			NIC:  netns.End{Namespace: fmt.Sprintf(pattern+"nic", pid, 99)},
			Host: netns.End{Namespace: fmt.Sprintf(pattern+"host", pid, 99)},
		}
		l, err := netns.Up(cfg)
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		t.Cleanup(func() { netns.Down(cfg) })
		return cfg
	}
	dead, alive := up(gone.Process.Pid), up(os.Getpid())
	sweep(t)
	if _, err := os.Stat(filepath.Join("/run/netns", dead.NIC.Namespace)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("stat %s: %v, want it gone", dead.NIC.Namespace, err)
	}
	if l, err := netns.Open(alive); err != nil {
		t.Error(err)
	} else {
		l.Close()
	}
}
