// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/client"
)

// The test is also the application: it does what its stdin says, a line each, and says
// so on stdout.
func TestMain(m *testing.M) {
	if socket := os.Getenv("XSPIN_TEST_APPLICATION"); socket != "" {
		application(socket)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func application(socket string) {
	var app *client.App
	for s := bufio.NewScanner(os.Stdin); s.Scan(); {
		var err error
		switch what, arg, _ := strings.Cut(s.Text(), " "); what {
		case "attach":
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			app, err = client.Attach(ctx, arg, client.Options{Socket: socket})
			cancel()
		case "detach":
			err = app.Close()
		}
		fmt.Println("done:", err)
	}
}

// runApplication starts one.
func runApplication(t *testing.T, socket string) *process {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "XSPIN_TEST_APPLICATION="+socket)
	return run(t, cmd)
}

// What a process has got counts until it ends, for it may keep it: limits.memory bounds
// what who may attach can have the kernel keep.
func TestMemoryOfWhoHasDetachedCountsUntilItEnds(t *testing.T) {
	f := launch(t, `
limits: {memory: 13MiB}
windows: [{name: ours, size: 1MiB}]
contexts:
- name: big
  handler: test-init
  rulesets: "a: udp(9)"
  windows: [{name: w, size: 3MiB}, {name: ours, app: rw}, {name: seen, size: 4KiB, app: r}]
- {name: other, handler: echo-udp, params: {port: 7}, activate: attach}
`)
	const start = 5 << 20 // the shared window, and a life
	if got := f.inUse(); got != start {
		t.Fatalf("%d bytes are in use", got)
	}
	one, two := runApplication(t, f.Socket()), runApplication(t, f.Socket())
	detached := func() {
		t.Helper()
		eventually(t, "the context is free", func() bool {
			i, err := f.info("big")
			return err == nil && len(i.Attached) == 0 && i.State != draining && i.State != installing
		})
	}
	// 3 MiB of a life may be kept, and one is there already: the third does not fit.
	for i, p := range []*process{one, two, one} {
		p.ask(t, "attach big", "done: <nil>")
		if got := f.inUse(); got != start+int64(i)*3<<20 {
			t.Errorf("attached %d times, %d bytes are in use", i+1, got)
		}
		p.ask(t, "detach", "done: <nil>")
		detached()
	}
	// Any memory that becomes free has it try again, for a moment.
	eventually(t, "the context waits for memory", func() bool { return f.state(t, "big") == failed })
	got := two.ask(t, "attach big", "done:")
	for _, want := range []string{
		`context "big" waits for memory: 4MiB more memory is wanted, and 10MiB of 13MiB are in use, 9MiB of these by processes that have detached and not ended (`,
		fmt.Sprint(one.cmd.Process.Pid), fmt.Sprint(two.cmd.Process.Pid), "): end them, or raise limits.memory",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%q does not say %q", got, want)
		}
	}
	if n := len(f.tenants.list); n != 2 {
		t.Errorf("%d processes are watched, want 2", n)
	}
	two.ask(t, "attach other", "done: <nil>")

	// It starts over as soon as one has ended, and there is memory.
	one.stdin.Close()
	eventually(t, "the context starts over", func() bool { return f.state(t, "big") == active })
	if got := f.inUse(); got != start+3<<20 {
		t.Errorf("one has ended, and %d bytes are in use", got)
	}
	two.stdin.Close()
	eventually(t, "memory is free again", func() bool { return f.inUse() == start })
	if log := f.logs.String(); !strings.Contains(log, "waits for memory to start over") || !strings.Contains(log, "there is memory again") {
		t.Error("the log does not say what happened")
	}

	// A higher limit is as good.
	three := runApplication(t, f.Socket())
	for range 3 {
		three.ask(t, "attach big", "done: <nil>")
		three.ask(t, "detach", "done: <nil>")
		detached()
	}
	eventually(t, "the context waits for memory", func() bool { return f.state(t, "big") == failed })
	text, err := os.ReadFile(f.file)
	must(t, err)
	writeFile(t, f.file, strings.Replace(string(text), "13MiB", "20MiB", 1))
	_, err = f.Reload()
	must(t, err)
	eventually(t, "the context starts over", func() bool { return f.state(t, "big") == active })
}

// An observer has no descriptors: its session may end a little later than the life
// that it has looked at.
func TestObserversDoNotKeepAContextFromStartingOver(t *testing.T) {
	f := launch(t, `
limits: {memory: 4MiB}
contexts:
- name: big
  handler: test-init
  rulesets: "a: udp(9)"
  windows: [{name: w, size: 4MiB}]
`)
	a := f.admitted(t, "big", root, false)
	o := f.admitted(t, "big", root, true)
	left(a, "done")
	if got := f.state(t, "big"); got != active {
		t.Errorf("the context is %s", got)
	}
	left(o, "told")
	if got := f.inUse(); got != 4<<20 {
		t.Errorf("%d bytes are in use", got)
	}
}
