// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/demos/inbox"
	"github.com/xspin/xspin/loader/objecttest"
)

const nobody = 65534

// asNobody runs a command of xspin as a user who may do nothing.
func (d *daemonProcess) asNobody(args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", append(args, "--socket", d.socket)...)
	cmd.Env = append(os.Environ(), "XSPIN_TEST_DAEMON=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	return cmd
}

// send sends messages from the lab's other end.
func (d *daemonProcess) send(files ...string) {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	to := d.lab.NIC.Addr.Addr().String()
	cmd := d.lab.Host.NS.Command(ctx, "/proc/self/exe", append([]string{"send", "--to", to}, files...)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		d.t.Fatalf("send: %v\n%s", err, out)
	}
}

// TestInbox has an application of a user who is not root take messages out of a window
// that the daemon's handlers fill: more of them than the window has room for at once.
func TestInbox(t *testing.T) {
	d := startDaemon(t, fmt.Sprintf(`contexts:
  - name: inbox
    handler: deposit
    windows: [{name: in, size: 2MiB}]
    attach: {users: ["%d"]}
    activate: manual
`, nobody))
	dir := t.TempDir()
	var files []string
	want := map[string]int{}
	for i := range 10 {
		content := bytes.Repeat([]byte{byte(i), byte(i + 1), 7}, 20000*i)
		file := filepath.Join(dir, fmt.Sprint(i))
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
		sum := sha256.Sum256(content)
		want[hex.EncodeToString(sum[:])]++
	}
	out := filepath.Join(dir, "out")
	if err := os.Mkdir(out, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(out, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	cmd := d.asNobody("demo", "inbox", "--count", "10", "--slots", "3", "--json", "--dir", out)
	var stdout bytes.Buffer
	cmd.Stdout = &stdout
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill()
	lines := bufio.NewScanner(stderr)
	if !lines.Scan() || lines.Text() != "attached to inbox: waiting for messages, in 3 slots of 682.7 KiB" {
		t.Fatalf("inbox: %s", lines.Text())
	}
	// The inbox ends with its last message. From then on nobody repeats an acknowledgement
	// that was lost, as happens on a busy machine. So the last message comes alone.
	d.send(files[1:]...)
	d.send(files[0])
	if err := cmd.Wait(); err != nil {
		t.Fatalf("inbox: %v", err)
	}
	var doc struct {
		Messages []inbox.Message `json:"messages"`
		Lost     uint64          `json:"lost"`
	}
	if err := json.Unmarshal(stdout.Bytes(), &doc); err != nil || len(doc.Messages) != 10 || doc.Lost != 0 {
		t.Fatalf("%v, %s", err, &stdout)
	}
	for _, m := range doc.Messages {
		if m.Error != "" || m.Missing != 0 || want[m.SHA256] == 0 {
			t.Errorf("message %+v", m)
			continue
		}
		want[m.SHA256]--
		content, err := os.ReadFile(m.File)
		if sum := sha256.Sum256(content); err != nil || hex.EncodeToString(sum[:]) != m.SHA256 {
			t.Errorf("file %s is not what came: %v", m.File, err)
		}
	}
	// Somebody else may not.
	other := d.asNobody("demo", "inbox")
	other.SysProcAttr.Credential.Uid--
	if out, err := other.CombinedOutput(); err == nil || !strings.Contains(string(out), "inbox") {
		t.Errorf("another user: %v\n%s", err, out)
	}
}

// startInbox starts a daemon and an inbox for one message, in a window of 4 MiB.
func startInbox(t *testing.T, slots, said string) (*daemonProcess, *exec.Cmd, *bufio.Scanner) {
	t.Helper()
	d := startDaemon(t, fmt.Sprintf(`contexts:
  - name: inbox
    handler: deposit
    windows: [{name: in, size: 4MiB}]
    attach: {users: ["%d"]}
    activate: manual
`, nobody))
	cmd := d.asNobody("demo", "inbox", "--count", "1", "--slots", slots)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	lines := bufio.NewScanner(stdout)
	if !lines.Scan() || lines.Text() != "attached to inbox: waiting for messages, in "+said {
		t.Fatalf("said %q", lines.Text())
	}
	return d, cmd, lines
}

// TestInboxNamesSlots has a message come that fits the window, but no slot of it: what the handler
// says of it is shown, and what to do.
func TestInboxNamesSlots(t *testing.T) {
	d, cmd, lines := startInbox(t, "4", "4 slots of 1 MiB")
	long := filepath.Join(t.TempDir(), "long")
	if err := os.WriteFile(long, make([]byte, 2<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	sender := d.lab.Host.NS.Command(t.Context(), "/proc/self/exe", "send", "--to", d.lab.NIC.Addr.Addr().String(), long)
	if out, err := sender.CombinedOutput(); err == nil {
		t.Errorf("sent 2 MiB into 1: %s", out)
	}
	if !lines.Scan() || !regexp.MustCompile(`: deposit bytes \d+ to \d+ of a message with room for 1048576: out of bounds; `).MatchString(lines.Text()) || !strings.HasSuffix(lines.Text(), "; it is longer than a slot of 1048576 bytes: choose fewer slots, or a larger window") {
		t.Errorf("said %q", lines.Text())
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// TestInboxAnswers has the application answer datagrams, and end by a signal.
// TestInboxSaysWhenAllSlotsAreInUse has a message come while another one, whose sender takes
// its time, has the only slot.
func TestInboxSaysWhenAllSlotsAreInUse(t *testing.T) {
	d, cmd, lines := startInbox(t, "1", "1 slot of 4 MiB")
	to := d.lab.NIC.Addr.Addr().String()
	slow := d.lab.Host.NS.Command(t.Context(), "/proc/self/exe", "send", "--to", to, "-")
	in, err := slow.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := slow.Start(); err != nil {
		t.Fatal(err)
	}
	defer slow.Process.Kill()
	if _, err := in.Write(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	client, err := control.Dial(d.socket)
	if err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		info, err := client.Context(t.Context(), "inbox")
		if err != nil || time.Now().After(end) {
			t.Fatalf("the slow message does not begin: %v", err)
		}
		if info.MessageStats.Open == 1 {
			break
		}
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("hello"), 0o600); err != nil {
		t.Fatal(err)
	}
	other := d.lab.Host.NS.Command(t.Context(), "/proc/self/exe", "send", "--to", to, "--timeout", "200ms", file)
	if out, err := other.CombinedOutput(); err == nil {
		t.Errorf("sent a second message into the only slot: %s", out)
	}
	if !lines.Scan() || !regexp.MustCompile(`^\d+ packets? refused: the only slot, of 4 MiB, was in use; for more messages at a time raise --slots, `).MatchString(lines.Text()) {
		t.Errorf("said %q", lines.Text())
	}
	if err := errors.Join(in.Close(), slow.Wait()); err != nil {
		t.Error(err)
	}
	if !lines.Scan() || !strings.Contains(lines.Text(), ": 1 MiB, sha256 ") {
		t.Errorf("said %q", lines.Text())
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

func TestInboxAnswers(t *testing.T) {
	d := startDaemon(t, fmt.Sprintf(`contexts:
  - name: shout
    handler: requests
    params: {port: 5000}
    attach: {users: ["%d"]}
    activate: attach
`, nobody))
	cmd := d.asNobody("demo", "inbox", "shout")
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill()
	lines := bufio.NewScanner(stdout)
	if !lines.Scan() || lines.Text() != "attached to shout: waiting for requests" {
		t.Fatalf("said %q", lines.Text())
	}
	// As long as it comes, and no text: the answer must fit where the question was.
	binary := strings.Repeat("\xff", 1400)
	var answers []string
	err = d.lab.Host.NS.Do(func() error {
		c, err := net.Dial("udp4", net.JoinHostPort(d.lab.NIC.Addr.Addr().String(), "5000"))
		if err != nil {
			return err
		}
		defer c.Close()
		b := make([]byte, 2000)
		for _, question := range []string{"hello", binary, "who is there?"} {
			if _, err := c.Write([]byte(question)); err != nil {
				return err
			}
			if err := c.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
				return err
			}
			n, err := c.Read(b)
			if err != nil {
				return err
			}
			answers = append(answers, string(b[:n]))
		}
		return nil
	})
	if err != nil || !slices.Equal(answers, []string{"HELLO", binary, "WHO IS THERE?"}) {
		t.Fatalf("answers %q, %v", answers, err)
	}
	if err := cmd.Process.Signal(unix.SIGINT); err != nil {
		t.Fatal(err)
	}
	said := ""
	for lines.Scan() {
		said += lines.Text() + "\n"
	}
	if err := cmd.Wait(); err != nil || !strings.Contains(said, `"hello", answered`) {
		t.Errorf("%v, said\n%s", err, said)
	}
}

// TestInboxOfObjects has messages come to handlers in eBPF that say so, in a context that
// says as little as it can; and tells of one that never hears of anything.
func TestInboxOfObjects(t *testing.T) {
	object := objecttest.Compile(t, `#include "xspin_message.h"

XSPIN_HEADER { return XSPIN_PROCEED; }
XSPIN_COMPLETION { xspin_notify(7, her->payload_len, 2); return XSPIN_SUCCESS; }

XSPIN_MESSAGES(HEADER | COMPLETION);
XSPIN_LICENSE("GPL");
`)
	d := startDaemon(t, "kernel: administrators\ncontexts:\n"+
		"- {name: inbox, tier: kernel, object: "+writeFile(t, "told.o", object)+", windows: [{name: in, size: 64KiB}]}\n"+
		"- {name: deaf, handler: echo-udp, windows: [{name: in, size: 64KiB}]}\n")
	deaf := exec.Command("/proc/self/exe", "demo", "inbox", "deaf", "--socket", d.socket)
	deaf.Env = append(os.Environ(), "XSPIN_TEST_DAEMON=1")
	if out, err := deaf.CombinedOutput(); err == nil || !strings.Contains(string(out), "demo inbox: context \"deaf\" has no queue, so no event") {
		t.Errorf("an inbox without a queue: %v\n%s", err, out)
	}
	cmd := exec.Command("/proc/self/exe", "demo", "inbox", "--count", "1", "--slots", "1", "--socket", d.socket)
	cmd.Env = deaf.Env
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill()
	lines := bufio.NewScanner(stdout)
	if !lines.Scan() || lines.Text() != "attached to inbox: waiting for messages, in 1 slot of 64 KiB" {
		t.Fatalf("said %q", lines.Text())
	}
	w, err := d.lab.Host.Wire()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	d.send(writeFile(t, "message", []byte("hello")))
	said := ""
	for lines.Scan() {
		said += lines.Text() + "\n"
	}
	if err := cmd.Wait(); err != nil || !strings.Contains(said, ": 5 B, sha256 2cf24dba5fb0a30e…\n") || !strings.Contains(said, "notification 0x7: 5 2\n") {
		t.Errorf("%v, said\n%s", err, said)
	}
}

func TestInboxRefusesFlags(t *testing.T) {
	for args, want := range map[string]string{
		"--slots 0":  "--slots 0: want 1 to 1024",
		"--count -1": "--count -1: want 1 or more",
		"a b":        `unexpected argument "b": xspin demo inbox [CONTEXT]`,
	} {
		root := newRootCmd()
		root.SetArgs(append([]string{"demo", "inbox"}, strings.Fields(args)...))
		if err := root.Execute(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}

// Of a message whose end has not come, what is missing is of what is known of it.
func TestInboxSaysOfWhatSomethingIsMissing(t *testing.T) {
	var out strings.Builder
	(inboxLines{&out}).Message(inbox.Message{Bytes: 8 << 20, Missing: 3 << 10, Error: "timed out"})
	if !strings.HasSuffix(out.String(), ": timed out (3 KiB of the first 8 MiB missing)\n") {
		t.Errorf("said %q", &out)
	}
}

func TestInboxShowsThatSumsAreCut(t *testing.T) {
	for _, m := range []inbox.Message{{SHA256: strings.Repeat("0123456789abcdef", 4)}, {SHA256: strings.Repeat("0123456789abcdef", 4), File: "f"}} {
		var out strings.Builder
		if (inboxLines{&out}).Message(m); !strings.Contains(out.String(), "sha256 0123456789abcdef…") {
			t.Errorf("%+v: %s", m, &out)
		}
	}
}
