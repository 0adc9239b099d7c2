// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/pcapng"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// answering listens where a daemon would, and answers by f. It returns the socket.
func answering(t *testing.T, f http.HandlerFunc) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "d.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: f}
	go srv.Serve(l)
	t.Cleanup(func() { srv.Close() })
	return socket
}

func replyError(w http.ResponseWriter, status int, text string) {
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]string{"error": text})
}

// xspin runs a command of words.
func xspin(ctx context.Context, in io.Reader, out, diag io.Writer, args ...string) error {
	root := newRootCmd()
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(diag)
	root.SetArgs(args)
	return root.ExecuteContext(ctx)
}

// terminal returns both ends of one.
func terminal(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close() })
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { slave.Close() })
	return master, slave
}

func TestLogPrintsLines(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 678901000, time.Local)
	lines := []control.LogLine{{Seq: 1, Time: at, HPU: 0, Text: "<hello>"}, {Seq: 9, Time: at, HPU: 1, Text: "bye", Lost: 7}, {Seq: 11, Time: at, HPU: 1, Text: "x", Lost: 1}}
	socket := answering(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v1/contexts/in box/log" {
			replyError(w, 404, `no context "nobody"`)
			return
		}
		for _, l := range lines {
			if q := r.URL.Query().Get("hpu"); q == "" || q == strconv.Itoa(l.HPU) {
				_ = json.NewEncoder(w).Encode(l)
			}
		}
		if r.URL.Query().Get("follow") == "1" {
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}
	})
	run := func(ctx context.Context, args ...string) (string, error) {
		var out syncBuffer
		err := xspin(ctx, nil, &out, io.Discard, append(args, "--socket", socket)...)
		return out.String(), err
	}
	for args, want := range map[string]string{
		"log": "Jan  2 03:04:05.678901 hpu=0 <hello>\n" +
			"Jan  2 03:04:05.678901 hpu=1 (7 lines lost)\n" +
			"Jan  2 03:04:05.678901 hpu=1 bye\n" +
			"Jan  2 03:04:05.678901 hpu=1 (1 line lost)\n" +
			"Jan  2 03:04:05.678901 hpu=1 x\n",
		"log --hpu 0": "Jan  2 03:04:05.678901 hpu=0 <hello>\n",
	} {
		if out, err := run(t.Context(), append(strings.Fields(args), "in box")...); err != nil || out != want {
			t.Errorf("%s: %v\n%swant\n%s", args, err, out, want)
		}
	}
	out, err := run(t.Context(), "log", "in box", "--json")
	if err != nil {
		t.Fatal(err)
	}
	for i, l := range strings.Split(strings.TrimSpace(out), "\n") {
		var got control.LogLine
		if err := json.Unmarshal([]byte(l), &got); err != nil || got.Text != lines[i].Text || got.Seq != lines[i].Seq || got.Lost != lines[i].Lost || !got.Time.Equal(at) {
			t.Errorf("line %d: %v: %s", i, err, l)
		}
	}
	if _, err := run(t.Context(), "log", "nobody"); err == nil || err.Error() != `log nobody: no context "nobody"` {
		t.Errorf("error %v", err)
	}
	if _, err := run(t.Context(), "log", "x", "--hpu", "-2"); err == nil || !strings.Contains(err.Error(), "--hpu -2") {
		t.Errorf("error %v", err)
	}
	// Following ends as it should.
	ctx, cancel := context.WithCancel(t.Context())
	var follow syncBuffer
	done := make(chan error)
	go func() { done <- xspin(ctx, nil, &follow, io.Discard, "log", "in box", "-f", "--socket", socket) }()
	for end := time.Now().Add(20 * time.Second); strings.Count(follow.String(), "\n") < 5; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("follow: %q", follow.String())
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("follow ends with %v", err)
	}
	// Somebody who looks at nothing is told that there is nothing.
	_, tty := terminal(t)
	lines = nil
	for _, c := range []struct {
		out  io.Writer
		want string
	}{{tty, "nothing logged yet\n"}, {io.Discard, ""}} {
		var diag syncBuffer
		if err := xspin(t.Context(), nil, c.out, &diag, "log", "in box", "--socket", socket); err != nil || diag.String() != c.want {
			t.Errorf("nothing: %v, says %q, want %q", err, diag.String(), c.want)
		}
	}
}

// A syncBuffer may be read while somebody writes.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func TestMemCopies(t *testing.T) {
	memory := []byte("\x00binary\xff memory of an HPU")
	var asked, wrote string
	socket := answering(t, func(w http.ResponseWriter, r *http.Request) {
		asked = r.Method + " " + r.URL.RequestURI()
		b, _ := io.ReadAll(r.Body)
		switch {
		case !strings.HasPrefix(r.URL.Path, "/v1/contexts/inbox/memory"):
			replyError(w, 404, "no such context")
		case r.Method == http.MethodPut:
			wrote = string(b)
			fmt.Fprintf(w, `{"written": %d}`, len(b))
		default:
			off, _ := strconv.Atoi(r.URL.Query().Get("offset"))
			_, _ = w.Write(memory[off:])
		}
	})
	var out, diag bytes.Buffer
	run := func(stdin string, args ...string) error {
		out.Reset()
		diag.Reset()
		return xspin(t.Context(), strings.NewReader(stdin), &out, &diag, append(args, "--socket", socket)...)
	}
	if err := run("", "mem", "read", "inbox"); err != nil || !bytes.Equal(out.Bytes(), memory) {
		t.Errorf("read: %v, %q", err, out.String())
	}
	if asked != "GET /v1/contexts/inbox/memory?offset=0" {
		t.Errorf("asked %s", asked)
	}
	if err := run("", "mem", "inbox", "--offset", "1"); err != nil || !bytes.Equal(out.Bytes(), memory[1:]) {
		t.Errorf("without read: %v, %q", err, out.Bytes())
	}
	if err := run("", "mem", "read", "inbox", "--hpu", "3", "--offset", "7", "--length", "18"); err != nil || out.String() != string(memory[7:]) {
		t.Errorf("read: %v, %q", err, out.String())
	}
	if asked != "GET /v1/contexts/inbox/memory?hpu=3&length=18&offset=7" {
		t.Errorf("asked %s", asked)
	}
	if err := run("", "mem", "read", "inbox", "--length", "1KiB"); err == nil || !strings.Contains(err.Error(), "received 25 bytes, want 1024") {
		t.Errorf("a short answer: %v", err)
	}
	if err := run("\x07\x00", "mem", "write", "inbox", "--offset", "4KiB", "--hpu", "0"); err != nil || wrote != "\x07\x00" || diag.String() != "2 bytes written at offset 4096\n" {
		t.Errorf("write: %v, wrote %q, says %q", err, wrote, diag.String())
	}
	if asked != "PUT /v1/contexts/inbox/memory?hpu=0&offset=4096" {
		t.Errorf("asked %s", asked)
	}
	for args, want := range map[string]string{
		"mem read nobody":                   "mem read nobody: no such context",
		"mem read inbox --offset -1":        "--offset -1",
		"mem read inbox --length many":      "--length many",
		"mem write inbox --hpu -5":          "--hpu -5",
		"mem raed inbox":                    `unknown command "raed" for "xspin mem": did you mean read?`,
		"mem write":                         "mem write: CONTEXT is missing: xspin mem write CONTEXT",
		"mem read inbox --offset 1 --hpu x": "--hpu",
	} {
		if err := run("", strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
	// Terminals are not for memory.
	_, tty := terminal(t)
	asked = ""
	if err := xspin(t.Context(), nil, tty, io.Discard, "mem", "read", "inbox", "--socket", socket); err == nil || !strings.Contains(err.Error(), "standard output is a terminal") {
		t.Errorf("to a terminal: %v", err)
	}
	if err := xspin(t.Context(), tty, io.Discard, io.Discard, "mem", "write", "inbox", "--socket", socket); err == nil || !strings.Contains(err.Error(), "standard input is a terminal") {
		t.Errorf("from a terminal: %v", err)
	}
	if asked != "" {
		t.Errorf("asked %s", asked)
	}
}

// someFrames is a capture of three frames, with losses.
func someFrames(w io.Writer) {
	out := pcapng.NewWriter(w, "test", pcapng.Interface{Name: "eth1"})
	for i := range uint64(3) {
		_ = out.Frame(&pcapng.Frame{Data: make([]byte, 60), Dropped: i}, 1e18)
	}
	out.Statistics(0, 1e18, 7, 4)
	_ = out.Flush()
}

func TestCaptureToFiles(t *testing.T) {
	var whole bytes.Buffer
	someFrames(&whole)
	var mu sync.Mutex
	asked := ""
	socket := answering(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		asked = r.URL.Query().Encode()
		mu.Unlock()
		switch r.URL.Path {
		case "/v1/contexts/inbox/capture":
			_, _ = w.Write(whole.Bytes())
		case "/v1/contexts/endless/capture":
			_, _ = w.Write(whole.Bytes())
			_, _ = w.Write(whole.Bytes()[:20]) // the client goes in the middle of a block
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		case "/v1/contexts/dying/capture":
			_, _ = w.Write(whole.Bytes()[:whole.Len()-5])
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		default:
			replyError(w, 404, "no such context")
		}
	})
	dir := t.TempDir()
	file := filepath.Join(dir, "x.pcapng")
	var out, diag bytes.Buffer
	run := func(args ...string) error {
		out.Reset()
		diag.Reset()
		return xspin(t.Context(), nil, &out, &diag, append(args, "--socket", socket)...)
	}
	const summary = "3 frames, 180 bytes; lost 4\n"
	if err := run("capture", "inbox", "-w", file); err != nil || diag.String() != summary || out.Len() > 0 {
		t.Errorf("to a file: %v, %q", err, diag.String())
	}
	if got, err := os.ReadFile(file); err != nil || !bytes.Equal(got, whole.Bytes()) {
		t.Errorf("the file has %d bytes: %v", len(got), err)
	}
	if asked != "" {
		t.Errorf("asked %q", asked)
	}
	rules := writeFile(t, "my.rules", []byte("a: udp(7)\nb: udp(8)\n"))
	if err := run("capture", "inbox", "-w", "-", "--filter", rules, "--verdict", "fail,panic", "--hpu", "0", "--snap", "64", "-c", "3"); err != nil || !bytes.Equal(out.Bytes(), whole.Bytes()) || diag.String() != summary {
		t.Errorf("to standard output: %v, %d bytes, %q", err, out.Len(), diag.String())
	}
	if want := "count=3&filter=a%3A+udp%287%29%0Ab%3A+udp%288%29%0A&hpu=0&snap=64&verdict=fail%2Cpanic"; asked != want {
		t.Errorf("asked %q, want %q", asked, want)
	}
	if err := run("capture", "inbox"); err != nil || asked != "" || !bytes.Equal(out.Bytes(), whole.Bytes()) || diag.String() != summary {
		t.Errorf("without -w: %v, asked %q, %d bytes, %q", err, asked, out.Len(), diag.String())
	}
	if err := run("capture", "inbox", "-w", "-", "--filter", "udp(7)"); err != nil || asked != "filter=udp%287%29" {
		t.Errorf("a filter as text: %v, asked %q", err, asked)
	}
	other := filepath.Join(dir, "other")
	for args, want := range map[string]string{
		"capture nobody -w " + other:                  "capture nobody: no such context",
		"capture inbox -w " + other + " --hpu -3":     "--hpu -3",
		"capture inbox -w " + other + " --snap -1":    "--snap -1",
		"capture inbox -w " + other + " -c -1":        "--count -1",
		"capture inbox -w " + other + "/no/dir":       "no/dir",
		"capture inbox --filter /etc -w " + other:     "filter: ",
		"capture inbox -w /dev/full":                  "no space left",
		"capture dying -w " + filepath.Join(dir, "d"): "went away",
	} {
		if err := run(strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
		if _, err := os.Stat(other); err == nil {
			t.Errorf("%s: left a file", args)
		}
	}
	_, tty := terminal(t)
	if err := xspin(t.Context(), nil, tty, io.Discard, "capture", "inbox", "-w", "-", "--socket", socket); err == nil || !strings.Contains(err.Error(), "is a terminal") {
		t.Errorf("to a terminal: %v", err)
	}
	// Ctrl-C: whole blocks only, and a summary.
	ctx, cancel := context.WithCancel(t.Context())
	var live syncBuffer
	diag.Reset()
	done := make(chan error)
	go func() { done <- xspin(ctx, nil, &live, &diag, "capture", "endless", "-w", "-", "--socket", socket) }()
	for end := time.Now().Add(20 * time.Second); len(live.String()) < whole.Len(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d bytes come", len(live.String()))
		}
	}
	cancel()
	if err := <-done; err != nil || live.String() != whole.String() || diag.String() != summary {
		t.Errorf("interrupted: %v, %d bytes, %q", err, len(live.String()), diag.String())
	}
}

// twoSamples are what a daemon says, and what it says two seconds later.
func twoSamples() (before, now *sample) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.Local)
	make1 := func(k uint64) *sample {
		mk := func(x control.ContextInfo) control.ContextInfo { return x }
		s := &sample{at: at.Add(time.Duration(k) * 2 * time.Second), status: &control.Status{PID: 42, Started: at.Add(-time.Hour)}}
		s.contexts = []control.ContextInfo{
			mk(control.ContextInfo{
				Context: control.Context{Name: "inbox", Interface: "lab/xs-nic"}, ID: 3, State: "active", At: "tc",
				HandlerStats: spin.ContextStats{Handled: 1000 + k*2_400_000, HandlerSum: time.Duration(k) * 1500 * time.Millisecond, Dropped: 5 + k*3, Failed: k, Panics: k, Sent: k * 10, Acks: k * 30},
				MessageStats: &spin.MessageStats{Ended: k * 20, Open: 17},
				Pair:         &hostq.PairStats{Requests: k * 8, Full: k * 2, Waiting: 6},
				Attached:     []control.Peer{{PID: 77}},
			}),
			{Context: control.Context{Name: "echo", Interface: "eth9"}, ID: 1 + int(k), State: "installed", HandlerStats: spin.ContextStats{Handled: 100 - k*60}},
		}
		s.nics = []nic.Stats{
			{
				Interface: "lab/xs-nic", Mode: "native", ZeroCopy: true, Stuck: 1,
				Program:  nic.ProgramStats{Seen: k * 2000, Passed: k * 1000, Redirected: k * 900, Refused: k * 70, Spilled: k * 20, Malformed: k * 10},
				Contexts: []nic.ContextStats{{ID: 3, Name: "inbox", Refused: k * 70, Spilled: k * 20, InFlight: 9}},
				HPUs:     []hpu.Stats{{HPU: 0, Handled: k * 640, Batches: k * 64, Busy: time.Duration(k) * time.Second, Occupancy: 4}, {HPU: 1}},
			},
			{Interface: "eth9", Mode: "generic"},
		}
		return s
	}
	return make1(0), make1(1)
}

func columnsOf(lines []pageLine) string {
	var b strings.Builder
	for _, l := range lines {
		b.WriteString(strings.Join(strings.Fields(l.text), " ") + "\n")
	}
	return b.String()
}

func TestTopPage(t *testing.T) {
	before, now := twoSamples()
	const want = `xspin top 03:04:07 daemon 42, up 1h0m2s, 2 interfaces, 2 contexts

INTERFACE MODE COPY SEEN TO LINUX TO HPUS REFUSED SPILL MALFORMED STUCK
lab/xs-nic native zero-copy 1000 500 450 35 10 5.0 1
eth9 generic copy 0 0 0 0 0 0 0

CONTEXT STATE HOOK PACKETS MESSAGES OPEN HPU% DROP FAIL REFUSED SPILL SENT ACKS REQUESTS FULL WAIT IN FLIGHT ATTACHED
echo installed - 20 - - 0.0 0 0 0 0 0 0 - - - 0 -
inbox active tc 1.20M 10 17 75.0 1.5 1.0 35 10 5.0 15 4.0 1.0 6 9 pid 77

INTERFACE HPU PACKETS BUSY% BATCH DEPTH
lab/xs-nic 0 320 50.0 10.0 4
lab/xs-nic 1 0 0.0 - 0
eth9 1
`
	got := columnsOf(page(before, now, 0))
	if got != strings.TrimSuffix(want, "eth9 1\n") {
		t.Errorf("shows\n%swant\n%s", got, want)
	}
	if got := columnsOf(page(now, now, 0)); !strings.Contains(got, "inbox active tc 0 0 17 0.0 0 0 0 0 0 0 0 0 6 9 pid 77\n") {
		t.Errorf("at the start, without a time to divide by:\n%s", got)
	}
	// A narrow screen gets the columns that matter most.
	for width, want := range map[int]string{
		80: "CONTEXT STATE PACKETS OPEN HPU% DROP FAIL REFUSED WAIT ATTACHED\n",
		10: "CONTEXT PACKETS OPEN HPU% DROP REFUSED ATTACHED\n",
	} {
		lines := page(before, now, width)
		if got := columnsOf(lines[6:7]); got != want {
			t.Errorf("%d columns: %q, want %q", width, got, want)
		}
		for _, l := range lines {
			if width == 80 && len(l.text) > width {
				t.Errorf("%d columns: %q", width, l.text)
			}
		}
	}
	// Columns stand below each other.
	lines := page(before, now, 0)
	if at := strings.Index(lines[6].text, "PACKETS") + len("PACKETS"); lines[8].text[at-5:at+1] != "1.20M " || lines[7].text[at-3:at+1] != " 20 " {
		t.Errorf("columns are not right-aligned:\n%s\n%s\n%s", lines[6].text, lines[7].text, lines[8].text)
	}
}

func TestShortNumbers(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 0.04: "0.0", 1: "1.0", 9.94: "9.9", 9.96: "10", 123.4: "123", 9999: "9999", 10000: "10.0k", 99949: "99.9k", 99960: "100k",
		999499: "999k", 999600: "1.00M", 1234567: "1.23M", 12345678: "12.3M", 1e9: "1.00G", 123e9: "123G", 5e12: "5.00T",
	} {
		if got := short(v); got != want {
			t.Errorf("%v is %s, want %s", v, got, want)
		}
	}
}

func TestTopFitsTheScreen(t *testing.T) {
	lines := []pageLine{{text: "one is längér"}, {text: "two", head: true}, {text: "three"}, {text: "four"}}
	for _, tt := range []struct {
		width, height int
		want          string
	}{
		{20, 10, "\x1b[Hone is längér\x1b[K\r\n\x1b[7mtwo                 \x1b[m\x1b[K\r\nthree\x1b[K\r\nfour\x1b[K\x1b[J"},
		{9, 3, "\x1b[Hone is lä\x1b[K\r\n\x1b[7mtwo      \x1b[m\x1b[K\r\n... 2 lin\x1b[K\x1b[J"},
		{4, 1, "\x1b[H... \x1b[K\x1b[J"},
	} {
		if got := fit(lines, tt.width, tt.height); got != tt.want {
			t.Errorf("%d x %d: %q\nwant %q", tt.width, tt.height, got, tt.want)
		}
	}
}

// samples answers with one after the other, and the last again and again.
func samples(all ...*sample) func() (*sample, error) {
	i := -1
	return func() (*sample, error) {
		if i++; i < len(all) {
			return all[i], nil
		}
		return all[len(all)-1], nil
	}
}

func TestTopWithoutATerminal(t *testing.T) {
	before, now := twoSamples()
	for reports, want := range map[int]int{0: 1, 1: 1, 3: 3} {
		var out bytes.Buffer
		tp := &top{sample: samples(before, now), interval: time.Millisecond, reports: reports}
		if err := tp.plain(t.Context(), &out); err != nil || strings.Count(out.String(), "xspin top") != want || strings.Contains(out.String(), "\x1b") || !strings.Contains(out.String(), "1.20M") {
			t.Errorf("%d reports: %v\n%s", reports, err, out.String())
		}
	}
	gone := errors.New("the daemon went away")
	n := 0
	tp := &top{interval: time.Millisecond, reports: 5, sample: func() (*sample, error) {
		if n++; n > 2 {
			return nil, gone
		}
		return now, nil
	}}
	if err := tp.plain(t.Context(), io.Discard); err != gone {
		t.Errorf("error %v", err)
	}
}

func TestTopOnATerminal(t *testing.T) {
	before, now := twoSamples()
	for _, end := range []string{"q", "n", "ctx", "error", "hangup"} {
		t.Run(end, func(t *testing.T) {
			master, tty := terminal(t)
			if err := unix.IoctlSetWinsize(int(master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 8, Col: 60}); err != nil {
				t.Fatal(err)
			}
			mode, err := unix.IoctlGetTermios(int(tty.Fd()), unix.TCGETS)
			if err != nil {
				t.Fatal(err)
			}
			var seen syncBuffer
			go io.Copy(&seen, master)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			fail := make(chan bool, 1)
			next := samples(before, now)
			tp := &top{interval: 5 * time.Millisecond, sample: func() (*sample, error) {
				select {
				case <-fail:
					return nil, errors.New("went away")
				default:
					return next()
				}
			}}
			if end == "n" {
				tp.reports = 2
			}
			done := make(chan error, 1)
			go func() { done <- tp.live(ctx, tty, tty) }()
			for late := time.Now().Add(20 * time.Second); !strings.Contains(seen.String(), "03:04:07"); time.Sleep(time.Millisecond) {
				if time.Now().After(late) {
					t.Fatalf("shows %q", seen.String())
				}
			}
			switch end {
			case "q":
				_, _ = master.Write([]byte("xq"))
			case "ctx":
				cancel()
			case "error":
				fail <- true
			case "hangup":
				master.Close()
			}
			select {
			case err = <-done:
			case <-time.After(20 * time.Second):
				t.Fatal("it does not end")
			}
			if end == "hangup" {
				return // nobody to see what it leaves
			}
			if (end == "error") != (err != nil) {
				t.Errorf("ends with %v", err)
			}
			for late := time.Now().Add(20 * time.Second); !strings.HasSuffix(seen.String(), leaveScreen); time.Sleep(time.Millisecond) {
				if time.Now().After(late) {
					t.Fatalf("ends with %q", seen.String())
				}
			}
			all := seen.String()
			if !strings.HasPrefix(all, enterScreen+"\x1b[H") || strings.Count(all, enterScreen) != 1 || !strings.Contains(all, "lines more\x1b[K\x1b[J") {
				t.Errorf("shows %q", all)
			}
			after, err := unix.IoctlGetTermios(int(tty.Fd()), unix.TCGETS)
			if err != nil || *after != *mode {
				t.Errorf("the terminal is not as it was: %v", err)
			}
		})
	}
}

func TestTopAsksTheDaemon(t *testing.T) {
	_, now := twoSamples()
	socket := answering(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/v1/stats":
			_ = json.NewEncoder(w).Encode(now.nics)
		case "/v1/contexts":
			_ = json.NewEncoder(w).Encode(now.contexts)
		case "/v1/status":
			_ = json.NewEncoder(w).Encode(now.status)
		default:
			replyError(w, 404, r.URL.Path)
		}
	})
	var out bytes.Buffer
	if err := xspin(t.Context(), nil, &out, io.Discard, "top", "--interval", "100ms", "--socket", socket); err != nil || !strings.Contains(out.String(), "inbox") || !strings.Contains(out.String(), "daemon 42") {
		t.Errorf("%v\n%s", err, out.String())
	}
	for args, want := range map[string]string{"--interval 1ms": "--interval 1ms", "-n -1": "--number -1", "--socket /nonexistent": "no daemon answers"} {
		if err := xspin(t.Context(), nil, &out, io.Discard, append([]string{"top"}, strings.Fields(args)...)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("top %s: %v", args, err)
		}
	}

	// stats asks the same daemon.
	out.Reset()
	if err := xspin(t.Context(), nil, &out, io.Discard, "stats", "--json", "--socket", socket); err != nil {
		t.Fatal(err)
	}
	var doc struct {
		Schema int
		NICs   []struct {
			nic.Stats
			Apps map[string]*hostq.PairStats
		}
	}
	if err := json.Unmarshal(out.Bytes(), &doc); err != nil || doc.Schema != 1 || len(doc.NICs) != 2 || doc.NICs[0].Program.Seen != 2000 || doc.NICs[0].Apps["inbox"].Requests != 8 || doc.NICs[1].Apps != nil {
		t.Errorf("%v: %s", err, out.String())
	}
	out.Reset()
	if err := xspin(t.Context(), nil, &out, io.Discard, "stats", "lab/xs-nic", "--json", "--socket", socket); err != nil {
		t.Fatal(err)
	}
	var flat struct {
		Schema    int
		Interface string
		Apps      map[string]*hostq.PairStats
	}
	if err := json.Unmarshal(out.Bytes(), &flat); err != nil || flat.Schema != 1 || flat.Interface != "lab/xs-nic" || flat.Apps["inbox"].Full != 2 {
		t.Errorf("%v: %s", err, out.String())
	}
	out.Reset()
	if err := xspin(t.Context(), nil, &out, io.Discard, "stats", "--socket", socket); err != nil {
		t.Fatal(err)
	}
	rows := columnsOf([]pageLine{{text: ""}})
	for l := range strings.Lines(out.String()) {
		rows += strings.Join(strings.Fields(l), " ") + "\n"
	}
	for _, want := range []string{
		"lab/xs-nic: native XDP, zero-copy,", "eth9: generic XDP, copy,", "spilled 20 frames left to the Linux stack for lack of credit",
		"spilled 20 their context had no credit left, and spills: to the Linux stack", "queue: full 2 requests that found no room at first, each counted once", "queue: waiting 6 events and",
	} {
		if !strings.Contains(rows, "\n"+want) {
			t.Errorf("no %q in\n%s", want, rows)
		}
	}
	if err := xspin(t.Context(), nil, &out, io.Discard, "stats", "eth7", "--socket", socket); err == nil || !strings.Contains(err.Error(), "has lab/xs-nic, eth9") {
		t.Errorf("another interface: %v", err)
	}
}
