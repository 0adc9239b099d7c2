// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/spin"
)

// The handlers of a daemon that has something to say. The test binary is that daemon.
func init() {
	handlers.Register("test-chatty", "", func(handlers.Params) (*handlers.Set, error) {
		return &handlers.Set{
			Rulesets: []matcher.Ruleset{matcher.UDPPort(7)},
			Handlers: hpu.Handlers{Payload: func(h *hpu.HER) spin.Code {
				hdr := h.Headers()
				h.Logf("%s %s\x1b", h.Memory()[:5], hdr.UDP.Payload())
				if !hdr.ReplyUDP() || h.Send() != nil {
					return spin.Fail
				}
				return spin.Success
			}},
		}, nil
	})
}

// eventually waits until f finds nothing wrong.
func eventually(t *testing.T, f func() error) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

// What an administrator sees of a daemon under traffic.
func TestObserveADaemon(t *testing.T) {
	logs := t.TempDir()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	metrics := l.Addr().String()
	l.Close()
	d := startDaemon(t, fmt.Sprintf("metrics: %q\nlog: {dir: %q}\ncontexts:\n  - {name: chatty, handler: test-chatty, memory: 4KiB, hpu_memory: 64}\n", metrics, logs))
	device := d.lab.NIC.NS.Name() + "/" + d.lab.NIC.Device
	run := func(stdin string, args ...string) (stdout, stderr string) {
		t.Helper()
		var out, diag bytes.Buffer
		if err := xspin(t.Context(), strings.NewReader(stdin), &out, &diag, append(args, "--socket", d.socket)...); err != nil {
			t.Fatalf("%s: %v", args, err)
		}
		return out.String(), diag.String()
	}

	run("HELLO", "mem", "write", "chatty")
	run("\x01\x02", "mem", "write", "chatty", "--hpu", "1", "--offset", "62")
	if got, _ := run("", "mem", "read", "chatty", "--hpu", "1", "--offset", "61"); got != "\x00\x01\x02" {
		t.Errorf("memory of HPU 1 has %q", got)
	}
	if err := xspin(t.Context(), strings.NewReader("too long"), io.Discard, io.Discard, "mem", "write", "chatty", "--hpu", "1", "--offset", "60", "--socket", d.socket); err == nil {
		t.Error("what does not fit is written")
	}
	if got, _ := run("", "mem", "read", "chatty", "--hpu", "1", "--offset", "60"); got != "\x00\x00\x01\x02" {
		t.Errorf("and memory of HPU 1 has %q", got)
	}

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var follow syncBuffer
	followed := make(chan error, 1)
	go func() {
		followed <- xspin(ctx, nil, &follow, io.Discard, "log", "chatty", "-f", "--socket", d.socket)
	}()
	const n = 10
	file := filepath.Join(t.TempDir(), "chatty.pcapng")
	var summary syncBuffer
	captured := make(chan error, 1)
	go func() {
		captured <- xspin(t.Context(), nil, io.Discard, &summary, "capture", "chatty", "-w", file, "-c", fmt.Sprint(2*n), "--filter", "udp", "--socket", d.socket)
	}()
	eventually(t, func() error {
		if i, err := os.Stat(file); err != nil || i.Size() == 0 {
			return fmt.Errorf("the capture does not begin: %v", err)
		}
		return nil
	})
	echo := func(n int) {
		t.Helper()
		if err := d.lab.Host.NS.Do(func() error { return udpEchoes(d.lab.NIC.Addr.Addr().String(), n) }); err != nil {
			t.Fatal(err)
		}
	}
	echo(n)
	select {
	case err := <-captured:
		if err != nil || !strings.HasPrefix(summary.String(), fmt.Sprintf("%d frames, ", 2*n)) || !strings.HasSuffix(summary.String(), "; lost 0\n") {
			t.Errorf("capture: %v, %q", err, summary.String())
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the capture does not end")
	}
	seen, err := exec.Command("tshark", "-r", file, "-T", "fields", "-E", "separator=|", "-e", "frame.interface_name", "-e", "frame.packet_flags_direction",
		"-e", "udp.srcport", "-e", "udp.payload", "-e", "frame.comment", "-Y", "udp.port == 7").Output()
	if err != nil {
		t.Fatal(err)
	}
	in, out := 0, 0
	for l := range strings.Lines(string(seen)) {
		f := strings.Fields(strings.ReplaceAll(l, "|", " "))
		if len(f) < 5 || f[0] != device || f[3] != fmt.Sprintf("%x", "hello") || f[4] != "context=chatty" {
			t.Errorf("tshark reads %q", l)
			continue
		}
		verdict := f[len(f)-1]
		switch {
		case f[1] == "0x00000001" && f[2] != "7" && verdict == "verdict=success":
			in++
		case f[1] == "0x00000002" && f[2] == "7" && verdict == "verdict=sent":
			out++
		default:
			t.Errorf("tshark reads %q", l)
		}
	}
	if in != n || out != n {
		t.Errorf("%d frames in and %d out, want %d each:\n%s", in, out, n, seen)
	}

	const line = " HELLO hello\\x1b\n"
	for what, read := range map[string]func() string{
		"log": func() string { s, _ := run("", "log", "chatty"); return s },
		"log of HPUs": func() string {
			a, _ := run("", "log", "chatty", "--hpu", "0")
			b, _ := run("", "log", "chatty", "--hpu", "1")
			return a + b
		},
		"log -f":       follow.String,
		"the log file": func() string { b, _ := os.ReadFile(filepath.Join(logs, "chatty.log")); return string(b) },
	} {
		eventually(t, func() error {
			if s := read(); strings.Count(s, line) != n || strings.Count(s, "\n") != n {
				return fmt.Errorf("%s has\n%s", what, s)
			}
			return nil
		})
	}
	cancel()
	if err := <-followed; err != nil {
		t.Errorf("log -f: %v", err)
	}

	eventually(t, func() error {
		s, _ := run("", "stats")
		if !strings.HasPrefix(s, device+": ") || !strings.Contains(strings.Join(strings.Fields(s), " "), fmt.Sprintf(" sent %d frames of handlers given", n)) {
			return fmt.Errorf("stats prints\n%s", s)
		}
		return nil
	})
	if s, _ := run("", "top", "--interval", "100ms"); !strings.Contains(s, "\nchatty ") || !strings.Contains(s, "\n"+device) {
		t.Errorf("top prints\n%s", s)
	}
	r, err := http.Get("http://" + metrics + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(r.Body)
	r.Body.Close()
	if want := fmt.Sprintf("\nxspin_context_handlers_total{context=\"chatty\",interface=%q,result=\"success\"} %d\n", device, n); err != nil || !strings.Contains(string(body), want) {
		t.Errorf("metrics: %v, no%s", err, want)
	}

	// A capture ends with its context, and so does a log that is followed.
	go func() {
		captured <- xspin(t.Context(), nil, &follow, io.Discard, "capture", "chatty", "-w", "-", "--socket", d.socket)
	}()
	go func() {
		followed <- xspin(t.Context(), nil, io.Discard, io.Discard, "log", "chatty", "-f", "--socket", d.socket)
	}()
	eventually(t, func() error {
		if !strings.Contains(follow.String(), "context chatty") {
			return fmt.Errorf("no second capture")
		}
		return nil
	})
	run("", "ctx", "rm", "chatty")
	for what, ended := range map[string]chan error{"capture": captured, "log -f": followed} {
		select {
		case err := <-ended:
			// The log may not have begun.
			if err != nil && !strings.Contains(err.Error(), `no context "chatty"`) {
				t.Errorf("%s: %v", what, err)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("%s does not end with its context", what)
		}
	}
	if err := d.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	for range d.lines { // until it has ended
	}
	if err := d.cmd.Wait(); err != nil {
		t.Errorf("the daemon: %v", err)
	}
}
