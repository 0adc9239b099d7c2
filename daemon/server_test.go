// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
)

// nobody is a user that is not root.
const nobody = 65534

// A fake is a backend with one context, "box", of which user 1000 may read.
type fake struct {
	mu     sync.Mutex
	calls  []string
	memory []byte
	lines  []control.LogLine
	seat   func() (attached, error)
}

func (f *fake) called(format string, a ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, fmt.Sprintf(format, a...))
}

func (f *fake) exists(name string) error {
	if name != "box" {
		return fmt.Errorf("context %q: %w", name, errNotFound)
	}
	return nil
}

func (f *fake) status() control.Status      { return control.Status{Version: "test", PID: os.Getpid()} }
func (f *fake) stats() ([]nic.Stats, error) { return []nic.Stats{{Interface: "eth9"}}, nil }

func (f *fake) infos() []control.ContextInfo {
	c, _ := f.info("box")
	return []control.ContextInfo{*c}
}

func (f *fake) info(name string) (*control.ContextInfo, error) {
	return &control.ContextInfo{
		Context: control.Context{Name: name, Interface: "eth9", Params: map[string]any{"key": "secret"}},
		Rules:   []control.Rule{{Number: -1, Text: "off"}, {Number: 3, Text: "udp 7"}, {Number: 1, Text: "slmp"}},
	}, f.exists(name)
}

func (f *fake) install(c *control.Context) (*control.ContextInfo, error) {
	f.called("install %s", c.Name)
	if c.Name == "box" {
		return nil, fmt.Errorf("context box: %w: installed already", errBusy)
	}
	return &control.ContextInfo{Context: *c}, nil
}

func (f *fake) activate(name string) error {
	f.called("activate %s", name)
	return f.exists(name)
}

func (f *fake) deactivate(name string) error {
	f.called("deactivate %s", name)
	return f.exists(name)
}

func (f *fake) remove(name string) error {
	f.called("remove %s", name)
	return f.exists(name)
}

func (f *fake) trigger(name string, t control.Trigger) error {
	f.called("trigger %s %d", name, t.Words[3])
	return f.exists(name)
}

func (f *fake) withMemory(name string, hpu int, do func([]byte) error) error {
	if err := f.exists(name); err != nil {
		return err
	}
	if hpu >= 2 {
		return fmt.Errorf("HPU %d: %w: want 0 to 1", hpu, errInvalid)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return do(f.memory)
}

func (f *fake) log(ctx context.Context, name string, _ int, follow bool, line func(control.LogLine) error) error {
	if err := f.exists(name); err != nil {
		return err
	}
	for _, l := range f.lines {
		if err := line(l); err != nil {
			return err
		}
	}
	if follow {
		<-ctx.Done()
		return ctx.Err()
	}
	return nil
}

func (f *fake) capture(_ context.Context, _ int, name string, o control.CaptureOptions, w io.Writer) error {
	if err := f.exists(name); err != nil {
		return err
	}
	fmt.Fprintf(w, "%+v", o)
	if o.Count == 13 {
		return errors.New("broken")
	}
	return nil
}

func (f *fake) Reload() ([]string, error) {
	f.called("reload")
	return nil, nil
}

func (f *fake) mayAdmin(p control.Peer) error {
	if p.UID != 0 {
		return fmt.Errorf("user %d: %w: only administrators may", p.UID, errDenied)
	}
	return nil
}

func (f *fake) mayRead(p control.Peer, _ string) error {
	if p.UID != 0 && p.UID != 1000 {
		return fmt.Errorf("user %d: %w", p.UID, errDenied)
	}
	return nil
}

func (f *fake) admit(name string, _ control.Peer, _ bool) (attached, error) {
	if err := f.exists(name); err != nil {
		return nil, err
	}
	return f.seat()
}

// socketDir is a directory that all users reach.
func socketDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "xspin-socket")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// start serves a fake.
func start(t *testing.T, f *fake) *server {
	t.Helper()
	s, err := newServer(filepath.Join(socketDir(t), "s"), f, quiet())
	if err != nil {
		t.Fatal(err)
	}
	s.serve()
	t.Cleanup(func() {
		if err := s.close(context.Background(), "the test ends"); err != nil {
			t.Error(err)
		}
	})
	return s
}

// curl is what a user types. It returns status and document.
func curl(t *testing.T, s *server, uid int, args ...string) (status int, doc string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "curl", append([]string{"-sS", "--unix-socket", s.l.path, "-w", "\n%{http_code}"}, args...)...)
	if uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
		cmd.Dir = "/"
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("curl %v: %v: %s", args, err, stderr.Bytes())
	}
	i := bytes.LastIndexByte(out, '\n')
	if status, err = strconv.Atoi(string(out[i+1:])); err != nil {
		t.Fatal(err)
	}
	return status, string(out[:i])
}

func TestRequestsOfCurl(t *testing.T) {
	netnstest.NeedRoot(t)
	long := filepath.Join(t.TempDir(), "long")
	if err := os.WriteFile(long, bytes.Repeat([]byte(" "), maxBody+1), 0o644); err != nil {
		t.Fatal(err)
	}
	post := func(path string, args ...string) []string {
		return append([]string{"-X", "POST", "http://x" + path}, args...)
	}
	for _, tc := range []struct {
		name   string
		uid    int
		args   []string
		status int
		doc    string // a part
		call   string // of the backend
	}{
		{"status is for everybody", nobody, []string{"http://x/v1/status"}, 200, `"version": "test"`, ""},
		{"counters are for everybody", nobody, []string{"http://x/v1/stats"}, 200, `"interface": "eth9"`, ""},
		{"contexts are for everybody", nobody, []string{"http://x/v1/contexts"}, 200, `"name": "box"`, ""},
		{"one context is for everybody", nobody, []string{"http://x/v1/contexts/box"}, 200, `"name": "box"`, ""},
		{"parameters are for those who may read", 1000, []string{"http://x/v1/contexts/box"}, 200, `"key": "secret"`, ""},
		{"rules are sorted by number", nobody, []string{"http://x/v1/rules"}, 200, "slmp", ""},
		{"a context that is not there", 0, []string{"http://x/v1/contexts/bx"}, 404, `context \"bx\": there is no such thing`, ""},
		{"names are unescaped once", 0, []string{"http://x/v1/contexts/a%2Fb%2525"}, 404, `context \"a/b%25\"`, ""},
		{"a path that is not there", 0, []string{"http://x/v1/contxts"}, 404, "no such path", ""},
		{"a method that is not there", 0, post("/v1/status"), 405, "want GET", ""},
		{"two methods are possible", 0, post("/v1/contexts/box/memory"), 405, "want GET, PUT", ""},
		{"a parameter that is not there", 0, []string{"http://x/v1/status?jsn=1"}, 400, `parameter \"jsn\": possible here: none`, ""},
		{"a parameter that is misspelt", 0, []string{"http://x/v1/contexts/box/memory?ofset=1"}, 400, `parameter \"ofset\": possible here: hpu, offset, length`, ""},
		{"a parameter twice", 0, []string{"http://x/v1/contexts/box/memory?hpu=1&hpu=2"}, 400, "given 2 times", ""},
		{"a parameter that is no number", 0, []string{"http://x/v1/contexts/box/memory?hpu=one"}, 400, `hpu=\"one\": want a number`, ""},
		{"an HPU that is not there", 0, []string{"http://x/v1/contexts/box/memory?hpu=99"}, 400, `HPU 99: `, ""},
		{"an HPU with a sign, of memory", 0, []string{"http://x/v1/contexts/box/memory?hpu=-1"}, 400, `hpu=\"-1\": want a number from 0`, ""},
		{"an HPU with a sign, of a log", 0, []string{"http://x/v1/contexts/box/log?hpu=-1"}, 400, `hpu=\"-1\": want a number from 0`, ""},
		{"an HPU with a sign, of a capture", 0, []string{"http://x/v1/contexts/box/capture?hpu=-1"}, 400, `hpu=\"-1\": want a number from 0`, ""},
		{"a document nobody asked for", 0, post("/v1/contexts/box/activate", "-d", "{}"), 400, "takes no document", ""},

		{"install", 0, post("/v1/contexts", "-d", `{"name": "new", "handler": "echo"}`), 201, `"name": "new"`, "install new"},
		{"install without a document", 0, post("/v1/contexts"), 400, "no document", ""},
		{"install with a key that is unknown", 0, post("/v1/contexts", "-d", `{"name": "new", "handlr": "echo"}`), 400, `unknown field \"handlr\"`, ""},
		{"install with a key of the wrong kind", 0, post("/v1/contexts", "-d", `{"name": "new", "vhpus": "two"}`), 400, "vhpus cannot be a string", ""},
		{"install with an array where there is none", 0, post("/v1/contexts", "-d", `{"name": ["new"]}`), 400, "name cannot be an array", ""},
		{"install with a key twice", 0, post("/v1/contexts", "-d", `{"name": "new", "params": {"port": 7}, "Name": "box"}`), 400, `JSON: byte 45: key \"Name\" appears twice`, ""},
		{"install with a parameter twice", 0, post("/v1/contexts", "-d", `{"name": "new", "params": {"a": [{}, {"port": 7, "port": 8}]}}`), 400, `key \"port\" appears twice`, ""},
		{"install with half a document", 0, post("/v1/contexts", "-d", `{"name": "new"`), 400, "ends in the middle", ""},
		{"install with two documents", 0, post("/v1/contexts", "-d", `{"name": "new"} {}`), 400, "something behind", ""},
		{"install with a document too long", 0, post("/v1/contexts", "--data-binary", "@"+long), 413, "too large", ""},
		{"install what is there", 0, post("/v1/contexts", "-d", `{"name": "box"}`), 409, "busy", "install box"},
		{"a user may not install", nobody, post("/v1/contexts", "-d", `{"name": "new"}`), 403, "user 65534: not allowed", ""},
		{"activate", 0, post("/v1/contexts/box/activate"), 200, `"name": "box"`, "activate box"},
		{"a user may not activate", nobody, post("/v1/contexts/box/activate"), 403, "", ""},
		{"deactivate", 0, post("/v1/contexts/box/deactivate"), 200, `"name": "box"`, "deactivate box"},
		{"a user may not deactivate", nobody, post("/v1/contexts/box/deactivate"), 403, "", ""},
		{"trigger", 0, post("/v1/contexts/box/trigger", "-d", `{"words": [1,2,3,4]}`), 204, "", "trigger box 4"},
		{"trigger with too many words", 0, post("/v1/contexts/box/trigger", "-d", `{"words": [1,2,3,4,5]}`), 400, "words: 5 of them: want at most 4", ""},
		{"a user may not trigger", nobody, post("/v1/contexts/box/trigger", "-d", `{}`), 403, "", ""},
		{"remove", 0, []string{"-X", "DELETE", "http://x/v1/contexts/box"}, 204, "", "remove box"},
		{"a user may not remove", nobody, []string{"-X", "DELETE", "http://x/v1/contexts/box"}, 403, "", ""},
		{"reload", 0, post("/v1/reload"), 200, `"changes": []`, "reload"},
		{"a user may not reload", nobody, post("/v1/reload"), 403, "", ""},
		{"attach without an upgrade", 0, post("/v1/contexts/box/attach"), 426, "Upgrade: xspin-session/1", ""},

		{"the log", 1000, []string{"http://x/v1/contexts/box/log"}, 200, `"text":"<one>"`, ""},
		{"the log is not for everybody", nobody, []string{"http://x/v1/contexts/box/log"}, 403, "", ""},
		{"the log of a context that is not there", 0, []string{"http://x/v1/contexts/bx/log"}, 404, "", ""},
		{"capture", 1000, []string{"http://x/v1/contexts/box/capture?filter=udp+7&verdict=drop&hpu=2&snap=64&count=5"}, 200, "{Filter:udp 7 Verdict:drop HPU:2 Snap:64 Count:5}", ""},
		{"capture is not for everybody", nobody, []string{"http://x/v1/contexts/box/capture"}, 403, "", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := &fake{lines: []control.LogLine{{Seq: 1, Text: "<one>"}}}
			s := start(t, f)
			status, doc := curl(t, s, tc.uid, tc.args...)
			if status != tc.status || !strings.Contains(doc, tc.doc) {
				t.Errorf("status %d, document %s\nwant %d and %s", status, doc, tc.status, tc.doc)
			}
			if got := strings.Join(f.calls, ", "); got != tc.call {
				t.Errorf("calls %q, want %q", got, tc.call)
			}
			if strings.Contains(doc, "secret") && tc.uid == nobody {
				t.Errorf("parameters shown to everybody: %s", doc)
			}
			var e struct{ Error string }
			if status >= 400 && (json.Unmarshal([]byte(doc), &e) != nil || e.Error == "") {
				t.Errorf("no error in the document: %s", doc)
			}
		})
	}
}

func TestRulesAreInTheOrderOfTheTable(t *testing.T) {
	s := start(t, &fake{})
	c, err := control.Dial(s.l.path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	rules, err := c.Rules(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(rules); got != "[{eth9 box {1 slmp 0}} {eth9 box {3 udp 7 0}} {eth9 box {-1 off 0}}]" {
		t.Errorf("got %s", got)
	}
}

func TestMemoryIsWrittenInWholeOrNotAtAll(t *testing.T) {
	const size = 3*memoryChunk + 5
	pattern := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(i*7 + i>>8 + 1)
		}
		return b
	}
	for _, tc := range []struct {
		name   string
		hpu    int
		offset int64
		length int
		err    string // a part
	}{
		{"all of it", -1, 0, size, ""},
		{"a part", -1, memoryChunk - 1, 2*memoryChunk + 2, ""},
		{"the last byte", -1, size - 1, 1, ""},
		{"nothing, at the end", -1, size, 0, ""},
		{"one byte too many", -1, 1, size, "nothing was written"},
		{"behind the end", -1, size + 1, 0, "has " + strconv.Itoa(size) + " bytes"},
		{"an HPU that is not there", 2, 0, 1, "want 0 to 1"},
		{"an HPU that no NIC has", 1 << 40, 0, 1, "want 0 to 1"},
	} {
		for _, known := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, length known: %v", tc.name, known), func(t *testing.T) {
				f := &fake{memory: make([]byte, size)}
				s := start(t, f)
				c, err := control.Dial(s.l.path)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				p := pattern(tc.length)
				var r io.Reader = bytes.NewReader(p)
				if !known {
					r = io.MultiReader(r)
				}
				n, err := c.WriteMemory(t.Context(), "box", tc.hpu, tc.offset, r)
				want := make([]byte, size)
				if tc.err != "" {
					if err == nil || !strings.Contains(err.Error(), tc.err) {
						t.Errorf("error %v, want %q", err, tc.err)
					}
				} else {
					if err != nil || n != int64(tc.length) {
						t.Errorf("%d bytes, error %v", n, err)
					}
					copy(want[tc.offset:], p)
				}
				if !bytes.Equal(f.memory, want) {
					t.Error("memory is not what it should be")
				}
				if tc.err != "" || tc.length == 0 {
					return
				}
				var back bytes.Buffer
				if _, err := c.ReadMemory(t.Context(), "box", tc.hpu, tc.offset, int64(tc.length), &back); err != nil || !bytes.Equal(back.Bytes(), p) {
					t.Errorf("read back %d bytes, error %v", back.Len(), err)
				}
			})
		}
	}
}

func TestReadingMemoryBehindItsEndFails(t *testing.T) {
	s := start(t, &fake{memory: make([]byte, 100)})
	c, err := control.Dial(s.l.path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, at := range [][2]int64{{101, 0}, {100, 1}, {1, 100}, {1, 1<<63 - 1}, {1<<63 - 1, 1}} {
		var e *control.Error
		if n, err := c.ReadMemory(t.Context(), "box", -1, at[0], at[1], io.Discard); !errors.As(err, &e) || e.Status != 400 || n != 0 {
			t.Errorf("%d bytes at %d: got %d, error %v", at[1], at[0], n, err)
		}
	}
}

// What broke after it had begun must not look whole.
func TestACaptureThatBreaksIsCutShort(t *testing.T) {
	s := start(t, &fake{})
	c, err := control.Dial(s.l.path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Capture(t.Context(), "box", control.CaptureOptions{HPU: -1, Count: 12}, io.Discard); err != nil {
		t.Error(err)
	}
	if err := c.Capture(t.Context(), "box", control.CaptureOptions{HPU: -1, Count: 13}, io.Discard); err == nil {
		t.Error("no error")
	}
}

func TestFollowedLogComesAtOnceAndEndsWithTheServer(t *testing.T) {
	s := start(t, &fake{lines: []control.LogLine{{Seq: 1, Text: "one"}, {Seq: 2, Text: "two"}}})
	c, err := control.Dial(s.l.path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var got []string
	err = c.Log(ctx, "box", -1, true, func(l control.LogLine) error {
		if got = append(got, l.Text); l.Seq == 2 {
			go s.close(context.Background(), "enough")
		}
		return nil
	})
	if err != nil || strings.Join(got, " ") != "one two" {
		t.Errorf("got %q, error %v", got, err)
	}
}

func TestASocketIsTakenOverOnlyFromTheDead(t *testing.T) {
	unix := func(t *testing.T, path string) *net.UnixListener {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		return l
	}
	for _, tc := range []struct {
		name  string
		there func(t *testing.T, path string)
		err   string // a part
	}{
		{"nothing there", func(*testing.T, string) {}, ""},
		{"a socket of a daemon that was killed", func(t *testing.T, path string) { unix(t, path).Close() }, ""},
		{"a socket of one that lives", func(t *testing.T, path string) {
			l := unix(t, path)
			t.Cleanup(func() { l.Close() })
		}, fmt.Sprintf("process %d answers there already", os.Getpid())},
		{"a socket of another kind", func(t *testing.T, path string) {
			c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
		}, "cannot tell whether a daemon answers there"},
		{"a file", func(t *testing.T, path string) { os.WriteFile(path, []byte("precious"), 0o644) }, "is not a socket"},
		{"a directory", func(t *testing.T, path string) { os.Mkdir(path, 0o755) }, "is not a socket"},
		{"a link to a socket", func(t *testing.T, path string) {
			unix(t, path+"2").Close()
			os.Symlink(path+"2", path)
		}, "is not a socket"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "new", "s")
			os.Mkdir(filepath.Dir(path), 0o755)
			tc.there(t, path)
			before, _ := os.Lstat(path)
			l, err := listen(path, quiet())
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) || !strings.Contains(err.Error(), path) {
					t.Errorf("error %v, want %q", err, tc.err)
				}
				if after, err := os.Lstat(path); err != nil || !os.SameFile(before, after) {
					t.Errorf("it is not there any more: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if i, err := os.Stat(path); err != nil || i.Mode().Perm() != 0o666 {
				t.Errorf("mode %v, error %v", i.Mode(), err)
			}
			l.Close()
			if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("after Close: %v", err)
			}
		})
	}
	if _, err := listen("/tmp/"+strings.Repeat("x", 103), quiet()); err == nil || !strings.Contains(err.Error(), "Linux allows 107") {
		t.Errorf("a long path: %v", err)
	}
}

func TestOfDaemonsThatStartTogetherOneGetsTheSocket(t *testing.T) {
	for range 20 {
		path := filepath.Join(t.TempDir(), "s")
		stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		stale.SetUnlinkOnClose(false)
		stale.Close()
		var wg sync.WaitGroup
		got := make([]*listener, 8)
		for i := range got {
			wg.Go(func() { got[i], _ = listen(path, quiet()) })
		}
		wg.Wait()
		n := 0
		for _, l := range got {
			if l != nil {
				n++
				defer l.Close()
			}
		}
		if n != 1 {
			t.Fatalf("%d daemons have the socket", n)
		}
	}
}

// peerRole makes the test binary a peer of the socket: it opens connections, asks for
// the status on each, says what it was told, and stays until stdin ends. It begins with
// a line on stdin.
const peerRole = "XSPIN_DAEMON_TEST_PEER"

func init() {
	path, ok := os.LookupEnv(peerRole)
	if !ok {
		return
	}
	n, _ := strconv.Atoi(os.Getenv(peerRole + "_N"))
	in := bufio.NewReader(os.Stdin)
	in.ReadString('\n')
	for range n {
		c, err := net.Dial("unix", path)
		if err != nil {
			fmt.Println("dial:", err)
			continue
		}
		fmt.Fprintf(c, "GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n")
		w, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			fmt.Println("read:", err)
			continue
		}
		b, _ := io.ReadAll(w.Body)
		fmt.Println(w.StatusCode, strings.Join(strings.Fields(string(b)), " "))
	}
	fmt.Println("end")
	io.Copy(io.Discard, in)
	os.Exit(0)
}

// peers starts such a process.
func peers(t *testing.T, path string, uid, n int) (begin func(), lines *bufio.Scanner, stop func()) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), peerRole+"="+path, peerRole+"_N="+strconv.Itoa(n))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stop = sync.OnceFunc(func() {
		in.Close()
		cmd.Wait()
	})
	t.Cleanup(stop)
	return func() { io.WriteString(in, "\n") }, bufio.NewScanner(out), stop
}

func TestAUserWithManyConnectionsKeepsNobodyOut(t *testing.T) {
	netnstest.NeedRoot(t)
	s := start(t, &fake{})
	begin, lines, stop := peers(t, s.l.path, nobody, maxPerUser+100)
	begin()
	count := map[string]int{}
	for lines.Scan() && lines.Text() != "end" {
		what, _, _ := strings.Cut(lines.Text(), " ")
		count[what]++
		if what == "503" && !strings.Contains(lines.Text(), "user 65534 has 64 connections") {
			t.Errorf("it was told: %s", lines.Text())
		}
	}
	if count["200"] != maxPerUser || count["503"] != 100 {
		t.Errorf("the user was told %v, want 200 %d times and 503 100 times", count, maxPerUser)
	}
	for _, uid := range []int{0, 1000} {
		if status, doc := curl(t, s, uid, "http://x/v1/status"); status != 200 {
			t.Errorf("user %d: %d %s", uid, status, doc)
		}
	}
	stop()
	// Its connections end, and their number is forgotten.
	for end, status := time.Now().Add(20*time.Second), 0; status != 200; {
		if status, _ = curl(t, s, nobody, "http://x/v1/status"); time.Now().After(end) {
			t.Fatalf("the user is told %d still", status)
		}
	}
}

// A counter counts records by message.
type counter struct {
	slog.Handler
	mu sync.Mutex
	n  map[string]int
}

func (c *counter) Enabled(context.Context, slog.Level) bool { return true }
func (c *counter) Handle(_ context.Context, r slog.Record) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n[r.Message]++
	return nil
}

func descriptors(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all) - 1 // the directory's own
}

func TestWithoutDescriptorsConnectionsWait(t *testing.T) {
	netnstest.NeedRoot(t)
	logged := &counter{Handler: slog.DiscardHandler, n: map[string]int{}}
	s, err := newServer(filepath.Join(socketDir(t), "s"), &fake{}, slog.New(logged))
	if err != nil {
		t.Fatal(err)
	}
	s.serve()
	defer s.close(context.Background(), "the test ends")

	const some, all = 4, 100
	begin, lines, stop := peers(t, s.l.path, 0, all) // root may have any number
	var old syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	var eaten []*os.File
	defer func() {
		for _, f := range eaten {
			f.Close()
		}
	}()
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 200, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	restore := sync.OnceFunc(func() { syscall.Setrlimit(syscall.RLIMIT_NOFILE, &old) })
	defer restore()
	warned := func() int {
		logged.mu.Lock()
		defer logged.mu.Unlock()
		return logged.n["no more connections can be accepted for now"]
	}
	for {
		f, err := os.Open(os.DevNull)
		if err != nil {
			break
		}
		eaten = append(eaten, f)
	}
	for _, f := range eaten[:some] {
		f.Close()
	}
	begin()
	served := 0
	for end := time.Now().Add(20 * time.Second); warned() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not one connection is refused")
		}
	}
	time.Sleep(50 * time.Millisecond) // some more attempts, which are not told
	if n := warned(); n != 1 {
		t.Errorf("warned %d times", n)
	}
	restore()
	for lines.Scan() && lines.Text() != "end" {
		if strings.HasPrefix(lines.Text(), "200 ") {
			served++
		}
	}
	if served != all {
		t.Errorf("%d of %d connections were served in the end", served, all)
	}
	stop()
}

// What is no HTTP is answered with a document too.
func TestRequestsThatAreNoneGetDocuments(t *testing.T) {
	s := start(t, &fake{})
	const good = "GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n"
	for _, tc := range []struct {
		name, sends string
		status      int
		says        string
	}{
		{"no Host", "GET /v1/status HTTP/1.1\r\n\r\n", 400, "missing required Host header"},
		{"no HTTP", "hello\r\n\r\n", 400, "400 Bad Request"},
		{"another version", "GET /v1/status HTTP/3.0\r\nHost: x\r\n\r\n", 505, "unsupported protocol version"},
		{"a long header", "GET /v1/status HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 2*maxHeader) + "\r\n\r\n", 431, "431"},
		{"an encoding", "POST /v1/reload HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: best\r\n\r\n", 501, "Unsupported transfer encoding"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, err := net.Dial("unix", s.l.path)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
				t.Fatal(err)
			}
			go io.WriteString(c, good+tc.sends) // after one that is in order
			in := bufio.NewReader(c)
			for i, want := range []int{200, tc.status} {
				r, err := http.ReadResponse(in, nil)
				if err != nil {
					t.Fatal(err)
				}
				var doc struct{ Error string }
				err = json.NewDecoder(r.Body).Decode(&doc)
				if kind := r.Header.Get("Content-Type"); r.StatusCode != want || kind != "application/json" || err != nil || i == 1 && !strings.Contains(doc.Error, tc.says) {
					t.Errorf("answer %d: %s, %s, %+v, error %v", i, r.Status, kind, doc, err)
				}
				if _, err := io.Copy(io.Discard, r.Body); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// A peer that connects and says nothing, or half of something, is disconnected.
func TestPeersThatDoNothingAreDisconnected(t *testing.T) {
	defer func(d time.Duration) { stall = d }(stall)
	stall = 100 * time.Millisecond
	for _, tc := range []struct{ name, sends string }{
		{"nothing", ""},
		{"half a header", "GET /v1/st"},
		{"half a document", "POST /v1/contexts HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"},
		{"half of what goes to memory", "PUT /v1/contexts/box/memory HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := start(t, &fake{memory: make([]byte, 1000)})
			c, err := net.Dial("unix", s.l.path)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			io.WriteString(c, tc.sends)
			c.SetReadDeadline(time.Now().Add(time.Minute))
			if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("still connected")
			}
		})
	}
}

// A peer that does not read what it has asked for holds its connection only.
func TestPeersThatDoNotReadAreDisconnected(t *testing.T) {
	defer func(d time.Duration) { stall = d }(stall)
	stall = 100 * time.Millisecond
	f := &fake{memory: make([]byte, 16<<20)}
	s := start(t, f)
	c, err := net.Dial("unix", s.l.path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprintf(c, "GET /v1/contexts/box/memory HTTP/1.1\r\nHost: x\r\n\r\n")
	// It can be used by others meanwhile.
	if status, _ := curl(t, s, 0, "-o", "/dev/null", "http://x/v1/contexts/box/memory?length=1"); status != 200 {
		t.Errorf("status %d", status)
	}
	// The server has given up when its side is closed, which ends the reading here.
	for {
		if _, err := c.Write([]byte("x")); err != nil {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
}
