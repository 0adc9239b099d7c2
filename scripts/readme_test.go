// SPDX-License-Identifier: Apache-2.0

package scripts

import (
	"cmp"
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
mkdir -p "$PWD"; mount -c --bind /proc/self/cwd "$PWD"; cd "$PWD" # may have been in /tmp
ip link set lo up
# There may be no program kill; every shell has one.
mkdir /tmp/bin && printf '#!/bin/sh\n[ "$1" != kill ] || { "$@"; exit; }\nexec "$@"\n' > /tmp/bin/sudo && chmod +x /tmp/bin/sudo && PATH=/tmp/bin:$PATH
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

// datatypesSession returns the commands of docs/datatypes.md, and those that take minutes.
func datatypesSession(t *testing.T) (script, long string) {
	t.Helper()
	b, err := os.ReadFile("../docs/datatypes.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(b), "\n## In five minutes\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var blocks []string
	for _, part := range strings.Split(section, "\n```sh\n")[1:] {
		block, _, _ := strings.Cut(part, "\n```")
		blocks = append(blocks, block+"\n")
	}
	if len(blocks) != 3 {
		t.Fatalf("docs/datatypes.md has %d blocks of commands in five minutes", len(blocks))
	}
	// A module of one's own needs the network; that it builds is TestOwnXspin's.
	before, rest, ok := strings.Cut(blocks[2], "(xspin=$PWD;")
	_, after, found := strings.Cut(rest, "go build)\n")
	if !ok || !found {
		t.Fatal("docs/datatypes.md builds its example in another way")
	}
	return blocks[0] + before + "go build -o $dir/columns $dir/main.go\n" + after, blocks[1]
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
	docs, long := datatypesSession(t)
	type try struct {
		name, script string
		says         []string
		dir          string // else that of the README alone
	}
	tries := []try{
		{"docs/datatypes.md", docs, []string{"\ncolumn 0: 0 64 ... 4032\n", "\ncolumn 1: 1 65 ... 4033\n"}, ".."},
		{"ping", asTyped(readmeBlock(t, "Point your own programs at it", "--serve")), []string{"3 received", "handled"}, ""},
		{"files", asTyped(serve) + "cmp /tmp/in/* README.md\n", []string{"Gbit/s"}, ""},
		{"files, by handlers in eBPF", strings.Replace(asTyped(serve), "--serve", "--serve --tier kernel", 1) + "cmp /tmp/in/* README.md\n", []string{"Gbit/s"}, ""},
		{"files on a bad network", bad[0] + "\n" + asTyped(serve) + "cmp /tmp/in/* README.md\n" + strings.Join(bad[1:], "\n") + "\nsudo bin/xspin lab down\n", []string{"lost"}, ""},
		{"datatypes", types[0] + "\n", []string{"64 bytes"}, ""},
	}
	if testenv.Soak() > 1 { // minutes; make demo does the like
		tries = append(tries, try{"datatypes that arrive", strings.Join(types[1:], "\n") + "\n", []string{"WRF_x", "complex", "hidden"}, ""}, try{"docs/datatypes.md, the demo", long, []string{"hidden"}, ""})
	}
	for _, c := range tries {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), testenv.SoakTime(time.Minute))
			defer cancel()
			sh := exec.CommandContext(ctx, "bash", "-c", newcomer+c.script)
			sh.Dir = cmp.Or(c.dir, dir)
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
