// SPDX-License-Identifier: Apache-2.0

package client_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/slmp"
)

// reference is what docs/control.md says.
func reference(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("../docs/control.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// Every line of the reference with curl works, in its order.
func TestTheReferencesCurl(t *testing.T) {
	f := newFixture(t, inbox)
	f.daemon()
	dir := t.TempDir()
	status := regexp.MustCompile(`\nstatus (\d+)$`)
	n := 0
	for line := range strings.SplitSeq(reference(t), "\n") {
		if !strings.HasPrefix(line, "    ") || !strings.Contains(line, "curl ") {
			continue
		}
		n++
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		cmd := exec.CommandContext(ctx, "bash", "-c", `curl() { command curl -sS -w '\nstatus %{http_code}' "$@"; };`+strings.TrimSpace(line))
		cmd.Env = append(os.Environ(), "S="+f.socket)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		cancel()
		var e *exec.ExitError
		timeout := strings.Contains(line, " -m ") && errors.As(err, &e) && e.ExitCode() == 28
		if err != nil && !timeout {
			t.Errorf("%s\n%v: %s", line, err, out)
			continue
		}
		if m := status.FindSubmatch(out); m == nil || m[1][0] != '2' {
			t.Errorf("%s\n%s", line, out)
		}
	}
	if n < 15 {
		t.Errorf("%d lines", n)
	}
	for name, size := range map[string]int64{"memory": 4096, "hpu0": 4096} {
		if i, err := os.Stat(filepath.Join(dir, name)); err != nil || i.Size() != size {
			t.Errorf("%s: %v, error %v", name, i, err)
		}
	}
}

// The client in Python that the reference has is told of messages.
func TestTheReferencesClient(t *testing.T) {
	_, program, ok := strings.Cut(reference(t), "```python\n")
	program, _, _ = strings.Cut(program, "```")
	if !ok {
		t.Fatal("no program")
	}
	python, err := exec.LookPath("python3")
	if err != nil {
		if os.Getenv("XSPIN_NO_SKIP") == "1" {
			t.Fatal("needs python3: apt-get install python3")
		}
		t.Skip(err)
	}
	f := newFixture(t, strings.NewReplacer("handler: deposit\n", "handler: deposit\n  timeout: 200ms\n", "size: 1MiB}", "size: 1MiB}, {name: seen, size: 4KiB, app: r}, {name: more, size: 4KiB}").Replace(inbox)+ask)
	d := f.daemon()
	start := func(context string) (next func() string, cmd *exec.Cmd, stderr *bytes.Buffer) {
		cmd = exec.CommandContext(t.Context(), python, "-c", program, f.socket, context)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		stderr = new(bytes.Buffer)
		cmd.Stderr = stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill() })
		lines := bufio.NewScanner(out)
		next = func() string {
			if !lines.Scan() {
				cmd.Wait()
				t.Fatalf("%s: it has ended: %s", context, stderr)
			}
			return lines.Text()
		}
		if line := next(); line != "attached" {
			t.Fatal(line)
		}
		return next, cmd, stderr
	}

	// Requests, more than a ring has slots.
	_, asker, _ := start("ask")
	q := f.udp(7001)
	q.SetDeadline(time.Now().Add(time.Minute))
	for i := range hostq.DefaultRequests + 10 {
		b := make([]byte, 100)
		if _, err := fmt.Fprintf(q, "question %d", i); err != nil {
			t.Fatal(err)
		}
		if n, err := q.Read(b); err != nil || string(b[:n]) != fmt.Sprintf("QUESTION %d", i) {
			t.Fatalf("question %d: %q, %v", i, b[:n], err)
		}
	}
	asker.Process.Kill()

	next, cmd, stderr := start("inbox")
	c := f.dial()
	for _, text := range []string{"hello, Python", "and again"} {
		if _, err := c.SendBytes(t.Context(), []byte(text), slmp.Options{}); err != nil {
			t.Fatal(err)
		}
		// Kind 1, cause 0, nothing dropped or missing.
		if line, want := next(), fmt.Sprintf(`^message \d+ 1 0 %d 0 0 %v %x$`, len(text), c.LocalAddr(), text); !regexp.MustCompile(want).MatchString(line) {
			t.Errorf("it was told %q, want %q", line, want)
		}
	}
	// 10 bytes, a hole of 20, and EOM's 5: cause 1.
	hole := f.udp(slmp.Port)
	for _, h := range []slmp.Header{{ID: 77}, {ID: 77, Offset: 30, Flags: slmp.EOM}} {
		b := make([]byte, slmp.HeaderLen+10-int(h.Offset)/6)
		h.Put(b)
		if _, err := hole.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	if line, want := next(), fmt.Sprintf("message 77 1 1 35 0 20 %v ", hole.LocalAddr()); !strings.HasPrefix(line, want) {
		t.Errorf("it was told %q, want %q", line, want)
	}
	d.stop()
	if err := cmd.Wait(); err == nil || !strings.Contains(stderr.String(), `"bye":"`) && !strings.Contains(stderr.String(), "the NIC has left") {
		t.Errorf("in the end: %v, %s", err, stderr)
	}
}
