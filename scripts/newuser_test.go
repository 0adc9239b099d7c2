// SPDX-License-Identifier: Apache-2.0

// Package scripts holds tests of the repository as a newcomer meets it.
package scripts

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xspin/xspin/netns/netnstest"
)

// TestNewUserRunsDemo clones what is committed, and runs make demo there with
// nothing in PATH but make, git, a shell and Go.
func TestNewUserRunsDemo(t *testing.T) {
	netnstest.NeedRoot(t)
	const count = 50

	// A place that others may read: somebody without root tries it as well.
	dir := t.TempDir()
	for _, d := range []string{filepath.Dir(dir), dir} {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	u := user{env: environ(t, dir), dir: dir}
	repo, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	if out, err := u.run(t, 0, "git", "clone", "-q", repo, "xspin"); err != nil {
		t.Fatalf("git clone: %v\n%s", err, out)
	}
	u.dir = filepath.Join(dir, "xspin")

	const nobody = 65534
	out, err := u.run(t, nobody, "make", "demo")
	if err == nil || !strings.Contains(out, "sudo") {
		t.Errorf("make demo without root: %v, want an error that tells how to get it\n%s", err, out)
	}
	if _, err := os.Stat(filepath.Join(u.dir, "bin")); err == nil {
		t.Error("make demo without root built before it refused")
	}

	before := network(t)
	out, err = u.run(t, 0, "make", "demo", fmt.Sprintf("COUNT=%d", count), "SIZE=16MiB", "RUNS=1")
	if err != nil {
		t.Fatalf("make demo: %v\n%s", err, out)
	}
	for _, proto := range []string{"icmp", "udp"} {
		for _, mode := range []string{"host", "nic", "host+nic"} {
			for _, size := range []string{"16", "516", "1016", "1416"} {
				if err := checkRow(out, proto, mode, size, count); err != nil {
					t.Error(err)
				}
			}
		}
	}
	for _, what := range []string{"SLMP, aggregated acknowledgements", "SLMP, into an application's window"} {
		if err := checkTransfer(out, "16 MiB", what); err != nil {
			t.Error(err)
		}
	}
	for _, name := range network(t) {
		if !slices.Contains(before, name) && !strings.HasPrefix(filepath.Base(name), netnstest.Prefix) { // other tests'

			t.Errorf("make demo left %s behind", name)
		}
	}
	if t.Failed() {
		t.Logf("make demo printed\n%s", out)
	}
}

// user is somebody at a shell.
type user struct {
	env []string
	dir string
}

// run runs a command as uid, and returns all that it prints.
func (u user) run(t *testing.T, uid uint32, name string, arg ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, name, arg...)
	c.Dir, c.Env = u.dir, append(slices.Clip(u.env), "PWD="+u.dir)
	// One group, so that a run that hangs ends whole, and cleans up.
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	c.Cancel = func() error { return syscall.Kill(-c.Process.Pid, syscall.SIGTERM) }
	c.WaitDelay = 10 * time.Second
	out, err := c.CombinedOutput()
	return string(out), err
}

// environ is the environment of this process, without what make test put
// there, and with a PATH made below dir.
func environ(t *testing.T, dir string) []string {
	t.Helper()
	bin := filepath.Join(dir, "bin")
	if err := os.Mkdir(bin, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"git", "go", "id", "make", "sh"} {
		path, err := exec.LookPath(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(path, filepath.Join(bin, name)); err != nil {
			t.Fatal(err)
		}
	}
	// git clones from a checkout of somebody else only when told to.
	conf := filepath.Join(dir, "gitconfig")
	if err := os.WriteFile(conf, []byte("[safe]\n\tdirectory = *\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	env := slices.DeleteFunc(os.Environ(), func(kv string) bool {
		k, _, _ := strings.Cut(kv, "=")
		return slices.Contains([]string{"CGO_ENABLED", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "XSPIN_NO_SKIP"}, k)
	})
	return append(env, "PATH="+bin, "GIT_CONFIG_GLOBAL="+conf)
}

// checkRow finds the row of proto, mode and size in the table with a column
// for each, and judges that all pings are accounted for, none lost, and the
// median is a time.
func checkRow(out, proto, mode, size string, count int) error {
	var head []string
	for line := range strings.Lines(out) {
		cells := strings.Fields(line)
		if slices.Contains(cells, "proto") && slices.Contains(cells, "mode") && slices.Contains(cells, "size") {
			head = cells
			continue
		}
		cell := func(name string) string {
			if i := slices.Index(head, name); i >= 0 && i < len(cells) {
				return cells[i]
			}
			return ""
		}
		if cell("proto") != proto || cell("mode") != mode || cell("size") != size {
			continue
		}
		if got := cell("count"); got != strconv.Itoa(count) {
			return fmt.Errorf("%s %s %s: count %q, want %d", proto, mode, size, got, count)
		}
		if got := cell("lost"); got != "0" {
			return fmt.Errorf("%s %s %s: lost %q, want 0", proto, mode, size, got)
		}
		if us, err := strconv.ParseFloat(cell("p50"), 64); err != nil || us <= 0 || us > 1e6 {
			return fmt.Errorf("%s %s %s: median %q, want microseconds", proto, mode, size, cell("p50"))
		}
		return nil
	}
	return fmt.Errorf("%s %s %s: no such row", proto, mode, size)
}

func TestCheckRow(t *testing.T) {
	const table = `
proto  size  host           nic
 icmp    16  9.1  [9,10]    4.2
Results, us
proto  mode  size  count  lost  p50
 icmp  host    16     50     0  9.10
 icmp   nic    16     50     1  4.20
  udp  host    16     49     0  9.10
  udp   nic    16     50     0     -
`
	for _, tc := range []struct{ proto, mode, size, want string }{
		{"icmp", "host", "16", ""},
		{"icmp", "nic", "16", "lost"},
		{"udp", "host", "16", "count"},
		{"udp", "nic", "16", "median"},
		{"udp", "nic", "1416", "no such row"},
		{"icmp", "16", "host", "no such row"},
	} {
		t.Run(tc.proto+" "+tc.mode+" "+tc.size, func(t *testing.T) {
			err := checkRow(table, tc.proto, tc.mode, tc.size, 50)
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

// checkTransfer finds a transfer in the table of files of that size, and judges that it
// has a rate and a time, and what was received is what was sent.
func checkTransfer(out, size, what string) error {
	_, table, ok := strings.Cut(out, "A file of "+size)
	if !ok {
		return fmt.Errorf("no file of %s", size)
	}
	if !strings.Contains(table, "\nevery file received has its source's SHA-256, ") {
		return fmt.Errorf("nothing says that what was received is what was sent")
	}
	for line := range strings.Lines(table) {
		rest, ok := strings.CutPrefix(strings.TrimSpace(line), what+" ")
		if !ok {
			continue
		}
		fields := strings.FieldsFunc(rest, func(r rune) bool { return strings.ContainsRune(" [],\n", r) })
		var cells []float64
		for _, f := range fields[:min(len(fields), 4)] {
			v, err := strconv.ParseFloat(f, 64)
			if err != nil || v <= 0 {
				return fmt.Errorf("%s: %q is no rate or time", what, f)
			}
			cells = append(cells, v)
		}
		if len(cells) < 4 || cells[0] < cells[1] || cells[0] > cells[2] {
			return fmt.Errorf("%s: want a median within least and most, and a time: %q", what, rest)
		}
		return nil
	}
	return fmt.Errorf("%s: no such row", what)
}

func TestCheckTransfer(t *testing.T) {
	const table = `
A file of 16 MiB, from a process to handlers on a NIC, into
/tmp

                                               Gbit/s   [least, most]  seconds   sent again
  SLMP, aggregated acknowledgements              2.81  [2.60, 2.90]    0.048  0 of 11651
  SLMP, into an application's window             2.71  [2.80, 2.90]    0.048  0 of 11651
  SLMP, one acknowledgement per segment          0.00  [0.00, 0.00]    0.048  0 of 11651

every file received has its source's SHA-256, 00ff
`
	for _, tc := range []struct{ out, size, what, want string }{
		{table, "16 MiB", "SLMP, aggregated acknowledgements", ""},
		{table, "16 MiB", "SLMP, into an application's window", "median"},
		{table, "16 MiB", "SLMP, one acknowledgement per segment", "no rate"},
		{table, "16 MiB", "TCP (iperf3), the same frames", "no such row"},
		{table, "256 MiB", "SLMP, aggregated acknowledgements", "no file"},
		{strings.Replace(table, "every", "no", 1), "16 MiB", "SLMP, aggregated acknowledgements", "nothing says"},
	} {
		err := checkTransfer(tc.out, tc.size, tc.what)
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: got %v, want %q", tc.what, err, tc.want)
		}
	}
}

// network lists the interfaces and the named namespaces.
func network(t *testing.T) []string {
	t.Helper()
	var names []string
	for _, dir := range []string{"/sys/class/net", "/run/netns"} {
		entries, err := os.ReadDir(dir)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		for _, e := range entries {
			names = append(names, filepath.Join(dir, e.Name()))
		}
	}
	return names
}
