// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
)

func TestDirectoriesOfTheKilledAreRemovedAndOthersNot(t *testing.T) {
	gone := exec.Command("true")
	if err := gone.Run(); err != nil {
		t.Fatal(err)
	}
	parent := t.TempDir()
	stays := map[string]bool{
		fmt.Sprintf("xspin-a-%d-1", gone.Process.Pid): false,
		fmt.Sprintf("xspin-a-%d-1", os.Getppid()):     true,
		fmt.Sprintf("xspin-b-%d-1", gone.Process.Pid): true, // another's
		"xspin-a-1": true,
	}
	for name := range stays {
		if err := os.MkdirAll(filepath.Join(parent, name, "full"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // the first one's is in use
		dir, err := TempDir(parent, "a")
		if err != nil {
			t.Fatal(err)
		}
		stays[filepath.Base(dir)] = true
	}
	for name, want := range stays {
		if _, err := os.Stat(filepath.Join(parent, name)); (err == nil) != want {
			t.Errorf("%s: %v, want it to stay: %t", name, err, want)
		}
	}
	if _, err := TempDir(filepath.Join(parent, "none"), "a"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v without a parent", err)
	}
}

// allowed are the CPUs of the thread.
func allowed(t *testing.T) (s unix.CPUSet) {
	t.Helper()
	if err := unix.SchedGetaffinity(0, &s); err != nil {
		t.Fatal(err)
	}
	return s
}

func first(s unix.CPUSet) int {
	for cpu := range 1024 {
		if s.IsSet(cpu) {
			return cpu
		}
	}
	return -1
}

func TestOnCPU(t *testing.T) {
	unpin, err := Pin(-1) // so that it stays one thread
	if err != nil {
		t.Fatal(err)
	}
	defer unpin()
	before := allowed(t)
	cpu, broken := first(before), errors.New("broken")
	for _, want := range []int{cpu, -1} {
		if err := OnCPU(want, func() error {
			s := allowed(t)
			if want >= 0 && (s.Count() != 1 || !s.IsSet(want)) || want < 0 && s != before {
				t.Errorf("on CPU %d: may use %d", want, s.Count())
			}
			return broken
		}); err != broken {
			t.Errorf("error %v, want the function's", err)
		}
		if allowed(t) != before {
			t.Error("it stays pinned")
		}
	}
	if err := OnCPU(1023, func() error { t.Error("runs"); return nil }); err == nil || !strings.Contains(err.Error(), "CPU 1023 of ") {
		t.Errorf("error %v", err)
	}
}

func TestStart(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	cpu := first(allowed(t))
	cmd := exec.CommandContext(t.Context(), "sh", "-c", "ls /proc/self/net/dev_snmp6; grep Cpus_allowed_list /proc/self/status; cut -d' ' -f 1,5 /proc/$$/stat")
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := Start(lab.NIC.NS, cpu, cmd); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	got := strings.Join(strings.Fields(out.String()), " ")
	for _, want := range []string{lab.NIC.Device, fmt.Sprintf("Cpus_allowed_list: %d ", cpu), fmt.Sprintf("%[1]d %[1]d", cmd.Process.Pid)} {
		if !strings.Contains(got+" ", want) {
			t.Errorf("%q, want %q: its namespace, CPU and process group", got, want)
		}
	}
}

func TestIPerf(t *testing.T) {
	netnstest.NeedRoot(t)
	if _, err := exec.LookPath("iperf3"); err != nil {
		t.Skip(err)
	}
	lab := netnstest.Temp(t, netns.LabConfig{})
	for _, args := range [][]string{{"-n", "1000000"}, {"-n", "1000000", "-R"}} {
		if f, err := IPerf(t.Context(), lab, -1, first(allowed(t)), args...); err != nil || f.Gbps <= 0 || f.Seconds <= 0 {
			t.Errorf("%q: %+v, error %v", args, f, err)
		}
	}
	if f, err := IPerf(t.Context(), lab, -1, -1, "-u", "-b", "1M", "-t", "1"); err != nil || f.Gbps <= 0 || f.Lost < 0 || f.Lost > 1 {
		t.Errorf("UDP: %+v, error %v", f, err)
	}
	if _, err := IPerf(t.Context(), lab, -1, -1, "--nonsense"); err == nil || !strings.Contains(err.Error(), "iperf3: ") {
		t.Errorf("error %v of arguments that iperf3 refuses", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := IPerf(ctx, lab, -1, -1, "-t", "60"); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v with a context that has ended", err)
	}
}
