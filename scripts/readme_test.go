// SPDX-License-Identifier: Apache-2.0

package scripts

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/netns/netnstest"
)

// newcomer is the head of a script for a machine of its own: namespaces of processes, of
// network and of mounts, with nothing in /tmp and no lab. There, commands run as they
// stand, with the names that all share; whoever is root needs no sudo.
const newcomer = `set -eu
mount --make-rprivate /
mount -t proc proc /proc
for d in /tmp /run; do mount -t tmpfs tmpfs $d; done
ip link set lo up
sudo() { "$@"; }
# What goes on until Ctrl-C is there when it has said so.
begin() {
	"$@" >/tmp/said.$n 2>&1 & pids="$! ${pids-}"
	until [ -s /tmp/said.$n ]; do kill -0 $! || exit 1; sleep 0.01; done
}
# The last one first.
end() {
	for p in ${pids-}; do kill -INT $p; wait $p || { echo "$p ends with $?" >&2; cat /tmp/said.* >&2; exit 1; }; done
	pids=
}
`

// readmeBlock returns the lines of the first block below a heading of the README that has
// a command.
func readmeBlock(t *testing.T, heading, command string) []string {
	t.Helper()
	b, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(b), "\n## "+heading+"\n")
	section, _, _ = strings.Cut(section, "\n## ")
	blocks := strings.Split(section, "\n```\n")
	for i := 1; i < len(blocks); i += 2 {
		if strings.Contains(blocks[i], command) {
			return strings.Split(blocks[i], "\n")
		}
	}
	t.Fatalf("README.md has no %q below %q", command, heading)
	return nil
}

// asTyped is a script that does what the lines say: what runs until Ctrl-C beside the
// others, and Ctrl-C at the end.
func asTyped(lines []string) string {
	var b strings.Builder
	for i, line := range lines {
		fmt.Fprintf(&b, "n=%d\n", i)
		if strings.Contains(line, "until Ctrl-C") {
			line = "begin " + strings.TrimPrefix(line, "sudo ")
		}
		b.WriteString(line + "\n")
	}
	return b.String() + "end\n"
}

// TestReadmeCommands types what the README says about the demos that wait for somebody,
// and about networks that are bad, as it stands there. What else it has: TestReadmeSession,
// TestNewUserRunsDemo, and the example of its own folder is package nic's.
func TestReadmeCommands(t *testing.T) {
	netnstest.NeedRoot(t)
	dir := t.TempDir()
	checkout(t, dir)
	serve := readmeBlock(t, "Send files to a NIC", "--serve")
	types := readmeBlock(t, "Put messages where they belong", "ddt describe")
	bad := readmeBlock(t, "Send files to a NIC", "--loss")
	type try struct {
		name, script string
		says         []string
	}
	tries := []try{
		{"ping", asTyped(readmeBlock(t, "Point your own programs at it", "--serve")), []string{"3 received", "handled"}},
		{"files", asTyped(serve) + "cmp /tmp/in/* README.md\n", []string{"Gbit/s"}},
		{"files on a bad network", bad[0] + "\n" + asTyped(serve) + "cmp /tmp/in/* README.md\n" + strings.Join(bad[1:], "\n") + "\nsudo bin/xspin lab down\n", []string{"lost"}},
		{"datatypes", types[0] + "\n", []string{"64 bytes"}},
	}
	if testenv.Soak() > 1 { // minutes; make demo does the like
		tries = append(tries, try{"datatypes that arrive", strings.Join(types[1:], "\n") + "\n", []string{"WRF_x", "complex", "hidden"}})
	}
	for _, c := range tries {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), testenv.SoakTime(time.Minute))
			defer cancel()
			sh := exec.CommandContext(ctx, "bash", "-c", newcomer+c.script)
			sh.Dir = dir
			sh.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWPID}
			out, err := sh.CombinedOutput()
			if err != nil {
				t.Fatalf("%v in\n%s\n%s", err, c.script, out)
			}
			for _, s := range c.says {
				if !strings.Contains(string(out), s) {
					t.Errorf("%s\nsays nothing of %q:\n%s", c.script, s, out)
				}
			}
			t.Logf("%s\n%s", c.script, out)
		})
	}
}
