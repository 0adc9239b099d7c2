// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"reflect"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/netns/netnstest"
)

// TestLabHelper is not a test: in a child process it runs command lines, the
// fields of a JSON [][]string, one after the other.
func TestLabHelper(t *testing.T) {
	script := os.Getenv("XSPIN_TEST_LAB")
	if script == "" {
		return
	}
	fail := func(err error) {
		os.Stderr.WriteString(err.Error() + "\n")
		os.Exit(99)
	}
	// The lab has fixed names: with a /run/netns of our own they meet nobody
	// else's, and go with this process.
	if err := os.MkdirAll("/run/netns", 0o755); err != nil {
		fail(err)
	}
	if err := unix.Mount("none", "/run/netns", "tmpfs", 0, ""); err != nil {
		fail(err)
	}
	var lines [][]string
	if err := json.Unmarshal([]byte(script), &lines); err != nil {
		fail(err)
	}
	for _, args := range lines {
		cmd := newLabCmd()
		cmd.SetArgs(args)
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		if err := cmd.Execute(); err != nil {
			fail(err)
		}
	}
	os.Exit(0)
}

// runLab runs command lines of `xspin lab` in a process of their own.
func runLab(t *testing.T, lines ...string) (stdout, stderr string, status int) {
	t.Helper()
	netnstest.NeedRoot(t)
	var script [][]string
	for _, l := range lines {
		script = append(script, strings.Fields(l))
	}
	b, err := json.Marshal(script)
	if err != nil {
		t.Fatal(err)
	}
	var out, errs strings.Builder
	c := exec.Command("/proc/self/exe", "-test.run=^TestLabHelper$")
	c.Env = append(os.Environ(), "XSPIN_TEST_LAB="+string(b))
	c.Stdout, c.Stderr = &out, &errs
	c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	var ee *exec.ExitError
	if err := c.Run(); err != nil && !errors.As(err, &ee) {
		t.Fatal(err)
	}
	return out.String(), errs.String(), c.ProcessState.ExitCode()
}

func TestLabUpDrawsTheLab(t *testing.T) {
	out, errs, status := runLab(t, "up --queues 2", "down", "down")
	const want = `  xspin-nic                   MTU 1500      xspin-host
  xs-nic 10.0.0.1/24      <---- veth ---->  xs-host 10.0.0.2/24
  02:00:00:00:00:01           queues 2      02:00:00:00:00:02
next: sudo xspin lab exec host -- ping -c 3 10.0.0.1
`
	if out != want || errs != "" || status != 0 {
		t.Errorf("got\n%s%s, status %d, want\n%s", out, errs, status, want)
	}
}

func TestLabUpDescribesTheLabAsJSON(t *testing.T) {
	out, errs, status := runLab(t, "up --mtu 9000 --queues 3 --json")
	var got any
	if err := json.Unmarshal([]byte(out), &got); err != nil || errs != "" || status != 0 {
		t.Fatalf("%v: %s%s, status %d", err, out, errs, status)
	}
	port := func(side, n string) map[string]any {
		return map[string]any{"namespace": "xspin-" + side, "device": "xs-" + side, "index": 2.0, "mac": "02:00:00:00:00:0" + n, "addr": "10.0.0." + n + "/24"}
	}
	want := map[string]any{"schema": 1.0, "mtu": 9000.0, "queues": 3.0, "nic": port("nic", "1"), "host": port("host", "2")}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestLabExecPassesOnWhatTheCommandDoes(t *testing.T) {
	out, errs, status := runLab(t, "up --json", "exec nic -- cat /proc/self/net/arp /does/not/exist")
	if !strings.Contains(out, "HW address") || !strings.Contains(errs, "/does/not/exist") || status != 1 {
		t.Errorf("got %q, %q, status %d, want output, complaint and status 1 of cat", out, errs, status)
	}
	out, errs, status = runLab(t, "up --json", "exec host grep -c xs-host /proc/self/net/dev")
	if !strings.HasSuffix(out, "\n1\n") || status != 0 {
		t.Errorf("got %q, %q, status %d, want one device xs-host", out, errs, status)
	}
}

func TestLabErrorsSayTheWayOut(t *testing.T) {
	for _, tc := range []struct{ name, line, want string }{
		{"exec without a lab", "exec host true", "xspin lab up"},
		{"exec in a namespace that is not there", "exec blue true", "xspin lab up"},
		{"exec with one word", "exec true", "no command for true"},
		{"exec without a command", "exec nic --", "no command for nic"},
		{"MTU 0", "up --mtu 0", "--mtu 0"},
		{"MTU 67", "up --mtu 67", "want 68 to 65535"},
		{"queues 0", "up --queues 0", "--queues 0"},
		{"257 queues", "up --queues 257", "want 1 to 256"},
		{"an MTU that is no number", "up --mtu x", "invalid argument"},
		{"an argument to up", "up x", "unknown command"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if out, errs, status := runLab(t, tc.line); !strings.Contains(errs, tc.want) || status != 99 || out != "" {
				t.Errorf("got %q, %q, status %d, want an error with %q", out, errs, status, tc.want)
			}
		})
	}
}

func TestSplitExec(t *testing.T) {
	for _, tc := range []struct {
		args   string
		dashed bool
		name   string
		argv   string
	}{
		{"ping -c 1 x", true, "xspin-host", "ping -c 1 x"},
		{"nic", true, "xspin-host", "nic"},
		{"nic ping -c 1 x", false, "xspin-nic", "ping -c 1 x"},
		{"nic -- ping -- x", false, "xspin-nic", "ping -- x"},
		{"host ping", false, "xspin-host", "ping"},
		{"blue ping", false, "blue", "ping"},
		{"nic", false, "", ""},
		{"nic --", false, "", ""},
		{"", false, "", ""},
		{"", true, "", ""},
	} {
		name, argv, err := splitExec(strings.Fields(tc.args), tc.dashed)
		if name != tc.name || strings.Join(argv, " ") != tc.argv || (err != nil) != (tc.name == "") {
			t.Errorf("%q, dashed %v: got %q, %q, %v, want %q, %q", tc.args, tc.dashed, name, argv, err, tc.name, tc.argv)
		}
	}
}
