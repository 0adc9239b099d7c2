// SPDX-License-Identifier: Apache-2.0

package web

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/httpserver"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// some is a source of which every counter is n times what it is with 1.
func some(n uint64) Source {
	return Source{
		Status: func() control.Status { return control.Status{Version: "v1", PID: 7} },
		Stats: func() ([]nic.Stats, error) {
			return []nic.Stats{{
				Interface: "lab/nic", Link: "up", Queues: 1,
				Program:  nic.ProgramStats{Passed: 10 * n, Redirected: 15 * n, Kernel: 5 * n, Refused: 3 * n, Malformed: n},
				Sockets:  nic.SocketStats{RxRingFull: 2 * n},
				HPUs:     []hpu.Stats{{HPU: 0, Handled: 20 * n, Busy: time.Duration(n) * 500 * time.Millisecond}, {HPU: 1}},
				Contexts: []nic.ContextStats{{ID: 1, Name: "box", InFlight: 4, Credits: 8, Refused: 3 * n}},
			}}, nil
		},
		Contexts: func() []control.ContextInfo {
			return []control.ContextInfo{{
				Context: control.Context{Name: "box", Interface: "lab/nic", Handler: "deposit", Params: map[string]any{"key": "secret"}}, ID: 1, State: "active",
				HandlerStats: spin.ContextStats{Handled: 20 * n, Dropped: 5 * n, HandlerTime: spin.Histogram{10: 15 * n, 20: 5 * n}},
				MessageStats: &spin.MessageStats{Open: 6, Ended: 2 * n, Dropped: spin.Drops{spin.DropDead: n}},
			}, {Context: control.Context{Name: "idle", Interface: "lab/nic", Tier: "kernel", Object: &control.Object{Name: "mine.o"}}, State: "installed", At: "tc"}}
		},
		Log: &Tail{},
	}
}

// A document is what /state answers.
type document struct {
	State
	Samples []Sample
}

func (r *recorder) get(t *testing.T, since uint64) (d document) {
	t.Helper()
	text := r.document(since)
	if bytes.Contains(text, []byte("secret")) {
		t.Errorf("parameters of handlers are told: %s", text)
	}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return d
}

func TestSamplesAreDifferences(t *testing.T) {
	var r recorder
	start := time.Unix(1000, 0)
	r.record(some(1), start)
	if d := r.get(t, 0); len(d.Samples) != 0 || d.Contexts[0].Name != "box" || d.Contexts[0].Open != 6 || d.Contexts[0].InFlight != 4 || d.Interfaces[0].Frames.Redirected != 15 || d.Contexts[1].Handler != "mine.o, in the kernel at tc" || d.Contexts[0].Tier != "user" || d.Contexts[1].Tier != "kernel" {
		t.Errorf("%+v", d)
	}
	r.record(some(3), start.Add(2*time.Second))
	d := r.get(t, 0)
	if len(d.Samples) != 1 {
		t.Fatalf("%+v", d.Samples)
	}
	s := d.Samples[0]
	if i := s.Interfaces["lab/nic"]; s.Seq != 1 || s.Time != 1002_000 || i.HPUs != 15 || i.Kernel != 5 || i.Linux != 11 || i.Dropped != 5 || !slices.Equal(i.Busy, []float64{50, 0}) {
		t.Errorf("%+v", s)
	}
	if c := s.Contexts["box"]; c != (ContextRates{Handled: 20, Messages: 2, Open: 6, P50: 1 << 10, P99: 1 << 20}) {
		t.Errorf("%+v", c)
	}
	if len(s.Contexts) != 1 {
		t.Errorf("a context that does nothing is there: %+v", s.Contexts)
	}
	for reason, count := range map[string]uint64{"refused": 9, "dropped": 15, "ring full": 6, "malformed": 3, "segments: dead": 3} {
		if !slices.ContainsFunc(d.Drops, func(x Drop) bool { return x.Reason == reason && x.Count == count && x.Meaning != "" }) {
			t.Errorf("no %d %s in %+v", count, reason, d.Drops)
		}
	}
	// A NIC that has started over, and one that fails.
	r.record(some(1), start.Add(3*time.Second))
	if s := r.get(t, 1).Samples; len(s) != 1 || s[0].Seq != 2 || s[0].Interfaces["lab/nic"].HPUs != 15 {
		t.Errorf("%+v", s)
	}
	broken := some(1)
	broken.Stats = func() ([]nic.Stats, error) { return nil, errors.New("the NIC is closed") }
	r.record(broken, start.Add(4*time.Second))
	if d := r.get(t, 2); d.Error != "the NIC is closed" || len(d.Samples) != 0 {
		t.Errorf("%+v", d)
	}
}

func TestHistoryIsBounded(t *testing.T) {
	var r recorder
	for i := range history + 51 {
		r.record(some(uint64(i)), time.Unix(int64(i), 0))
	}
	for since, want := range map[uint64][2]uint64{0: {51, history}, 51: {52, history - 1}, history + 49: {history + 50, 1}, history + 50: {0, 0}, 1 << 60: {51, history}} {
		s := r.get(t, since).Samples
		if uint64(len(s)) != want[1] || len(s) > 0 && s[0].Seq != want[0] {
			t.Errorf("since %d: %d samples from %+v", since, len(s), s[:min(1, len(s))])
		}
	}
}

func TestTail(t *testing.T) {
	var tail Tail
	var out bytes.Buffer
	l := tail.Keep(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelInfo})))
	l.Debug("not logged")
	l.With("a", 1).WithGroup("g").Warn("hello", "b", "<b>\n")
	want := Line{Level: "WARN", Message: "hello", More: `a=1 g.b="<b>\n"`}
	got := tail.all()
	if len(got) != 1 || got[0].Time.IsZero() || got[0].Level != want.Level || got[0].Message != want.Message || got[0].More != want.More {
		t.Errorf("%+v", got)
	}
	if !strings.Contains(out.String(), `level=WARN msg=hello a=1 g.b="<b>\n"`) {
		t.Errorf("the log has %q", out.String())
	}
	for i := range 3 * logLines {
		l.Info(strings.Repeat("ä", maxLine), "i", i)
	}
	got = tail.all()
	if last := got[len(got)-1]; len(got) != logLines || last.More != fmt.Sprint("i=", 3*logLines-1) || len(last.Message) > maxLine+3 || !strings.HasSuffix(last.Message, "ä...") {
		t.Errorf("%d lines, the last %+v", len(got), got[len(got)-1])
	}
}

// serve starts a server, with less patience than in life.
func serve(t *testing.T, address string) *Server {
	t.Helper()
	was := patience
	patience = 500 * time.Millisecond
	t.Cleanup(func() { patience = was })
	s, err := Listen(address, quiet())
	if err != nil {
		t.Fatal(err)
	}
	s.Serve(some(1))
	t.Cleanup(func() { s.Close(t.Context()) })
	return s
}

func do(t *testing.T, method, url, host string) (*http.Response, string) {
	t.Helper()
	q, err := http.NewRequestWithContext(t.Context(), method, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	q.Host = host
	r, err := http.DefaultClient.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r, string(body)
}

func TestOnlyReading(t *testing.T) {
	s := serve(t, "0")
	for path, kind := range map[string]string{
		"": "text/html; charset=utf-8", "page.js": "text/javascript; charset=utf-8", "page.css": "text/css; charset=utf-8",
		"icon.svg": "image/svg+xml", "state": "application/json", "state?since=3": "application/json",
	} {
		for _, method := range []string{"GET", "HEAD"} {
			r, body := do(t, method, s.URL()+path, "")
			if r.StatusCode != 200 || r.Header.Get("Content-Type") != kind || (body == "") != (method == "HEAD") {
				t.Errorf("%s /%s: %s, %s, %d bytes", method, path, r.Status, r.Header.Get("Content-Type"), len(body))
			}
		}
	}
	for _, method := range []string{"POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"} {
		for _, path := range []string{"", "state", "nothing"} {
			if r, _ := do(t, method, s.URL()+path, ""); r.StatusCode != 405 || r.Header.Get("Allow") != "GET, HEAD" {
				t.Errorf("%s /%s: %s, allowed is %q", method, path, r.Status, r.Header.Get("Allow"))
			}
		}
	}
	for path, want := range map[string]int{"nothing": 404, "../web.go": 404, "files/page.js": 404, "v1/contexts": 404, "metrics": 404, "state/": 404, "state?since=-1": 400, "state?since=x": 400} {
		r, _ := do(t, "GET", s.URL()+path, "")
		if r.StatusCode != want {
			t.Errorf("/%s: %s, want %d", path, r.Status, want)
		}
		for h, want := range map[string]string{"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin", "Cache-Control": "no-store"} {
			if got := r.Header.Get(h); got != want {
				t.Errorf("/%s: %s is %q", path, h, got)
			}
		}
		if r.Header.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("/%s: pages of others may read it", path)
		}
	}
}

// A page of somebody else's may have its name mean this machine, and then read what is
// here; but its name is in the request.
func TestOtherNamesAreRefused(t *testing.T) {
	s := serve(t, "127.0.0.1:0")
	for host, want := range map[string]int{
		"localhost": 200, "LOCALHOST:80": 200, "127.0.0.1": 200, "127.9.9.9:1": 200, "[::1]": 200, "[::1]:80": 200,
		"evil.example": 403, "evil.example:80": 403, "127.0.0.1.evil.example": 403, "localhost.evil.example": 403, "192.0.2.1": 403, "0.0.0.0": 403, "[2001:db8::1]:80": 403,
	} {
		for _, path := range []string{"", "state"} {
			if r, body := do(t, "GET", s.URL()+path, host); r.StatusCode != want || want == 403 && strings.Contains(body, "box") {
				t.Errorf("/%s for %s: %s", path, host, r.Status)
			}
		}
	}
	// Who has asked for another address than the loopback's is asked under any name.
	s.loopback = false
	if r, _ := do(t, "GET", s.URL(), "nic.example"); r.StatusCode != 200 {
		t.Errorf("under its name: %s", r.Status)
	}
}

func TestNonsense(t *testing.T) {
	s := serve(t, "127.0.0.1:0")
	for name, c := range map[string]struct{ text, want string }{
		"binary":          {"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", "HTTP/1.1 400 "},
		"another version": {"GET / HTTP/9.7\r\nHost: localhost\r\n\r\n", "HTTP/1.1 505 "},
		"no host":         {"GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 400 "},
		"two hosts":       {"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", "HTTP/1.1 400 "},
		"old, no host":    {"GET / HTTP/1.0\r\n\r\n", "HTTP/1.0 403 "},
		"huge header":     {"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + strings.Repeat("a", 1<<20), "HTTP/1.1 431 "},
		"slow header":     {"GET / HTTP/1.1\r\nHost: loc", ""},
		"silence":         {"", ""},
		"a body":          {"GET /state HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\nx", "HTTP/1.1 200 "},
	} {
		t.Run(name, func(t *testing.T) {
			nc, err := net.Dial("tcp", s.listener.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer nc.Close()
			_ = nc.SetDeadline(time.Now().Add(30 * time.Second))
			go func() { _, _ = io.WriteString(nc, c.text) }() // of which it may take only a part
			// The answer, and then the end of the connection.
			line, err := bufio.NewReader(nc).ReadString('\n')
			var late net.Error
			if !strings.HasPrefix(line, c.want) || c.want == "" && (line != "" || errors.As(err, &late) && late.Timeout()) {
				t.Errorf("%q, %v: want %q", line, err, c.want)
			}
		})
	}
	// Connections that ask nothing make room.
	for range 2 * httpserver.MaxConns {
		nc, err := net.Dial("tcp", s.listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
	}
	if r, _ := do(t, "GET", s.URL()+"state", ""); r.StatusCode != 200 {
		t.Error(r.Status)
	}
}

func TestAddresses(t *testing.T) {
	for address, want := range map[string]string{
		"9466": "127.0.0.1:9466", ":9466": "127.0.0.1:9466", "0.0.0.0:9466": "0.0.0.0:9466", "[::1]:9466": "[::1]:9466", "localhost:9466": "localhost:9466",
		"": "want [ADDRESS:]PORT", "web": "want [ADDRESS:]PORT", "65536": "0 to 65535", "127.0.0.1": "want [ADDRESS:]PORT", "::1:9466": "want [ADDRESS:]PORT", "localhost:http": "0 to 65535",
	} {
		if got, err := Address(address); got != want && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %q, %v, want %q", address, got, err, want)
		}
	}
	var log bytes.Buffer
	s, err := Listen("0.0.0.0:0", slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close(t.Context())
	if !strings.Contains(log.String(), "nobody is asked who they are") {
		t.Errorf("an address that others reach: %q", log.String())
	}
	if _, err := Listen(s.listener.Addr().String(), quiet()); err == nil || !strings.Contains(err.Error(), "address already in use: name another one") {
		t.Errorf("an address in use: %v", err)
	}
	if _, err := Listen("192.0.2.1:0", quiet()); err == nil || !strings.Contains(err.Error(), "cannot assign requested address") {
		t.Errorf("an address of somebody else: %v", err)
	}
}

// No file names anything elsewhere, but a name space of XML; nor has it a script or a
// style in it, which the policy forbids.
func TestFilesStandAlone(t *testing.T) {
	files, err := os.ReadDir("files")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		text, err := embedded.ReadFile(path.Join("files", f.Name()))
		if err != nil {
			t.Errorf("%s is not part of the program: %v", f.Name(), err)
		}
		for _, m := range regexp.MustCompile(`(?i)(?:https?:)?//[a-z0-9.-]+\.[a-z]+[^"' ]*|\sstyle=|\son[a-z]+="|<style|<script(?: [^>]*)?>[^<]|innerHTML|insertAdjacentHTML|document\.write`).FindAllString(string(text), -1) {
			if m != "http://www.w3.org/2000/svg" {
				t.Errorf("%s has %q", f.Name(), m)
			}
		}
	}
}
