// SPDX-License-Identifier: Apache-2.0

package client_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/client"
	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/loader/objecttest"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// Users that are not root.
const nobody, other = 65534, 65533

// Where contexts listen.
const askPort, wordsPort, stuckPort = 7001, 7002, 7003

func init() {
	handlers.Register("test-words", "changes words of the window, and puts the payload behind them", func(p handlers.Params) (*handlers.Set, error) {
		return &handlers.Set{
			Rulesets: []matcher.Ruleset{matcher.UDPPort(wordsPort)},
			Queue:    true,
			Handlers: hpu.Handlers{Payload: func(h *hpu.HER) spin.Code {
				w := h.Window("in")
				if err := changeWords(w.(spin.AtomicWindow), w.(spin.TransferWindow), bytes.Join(slices.Collect(h.Payload()), nil)); err != nil {
					h.Logf("%v", err)
					return spin.Fail
				}
				h.Counter(0).Add(1)
				return spin.Success
			}},
		}, nil
	})
	handlers.Register("test-stuck", "does not return", func(p handlers.Params) (*handlers.Set, error) {
		return &handlers.Set{
			Rulesets: []matcher.Ruleset{matcher.UDPPort(stuckPort)},
			Queue:    true,
			Handlers: hpu.Handlers{Payload: func(h *hpu.HER) spin.Code {
				h.Counter(0).Add(1)
				select {}
			}},
		}, nil
	})
	handlers.Register("test-all", "uses all that an application shares, with each datagram", func(p handlers.Params) (*handlers.Set, error) {
		return &handlers.Set{
			Rulesets: []matcher.Ruleset{matcher.UDPPort(askPort)},
			Queue:    true,
			Handlers: hpu.Handlers{Payload: func(h *hpu.HER) spin.Code {
				w := h.Window("mine")
				var b [64]byte
				_, _ = w.WriteAt(b[:], int64(h.Len()%1000))
				_, _ = w.ReadAt(b[:], 4096)
				h.Counter(0).Add(1)
				_ = h.Notify(1, b[:])
				if h.AskThen(2, b[:], func(*hpu.HER, *hpu.Reply) spin.Code { return spin.Drop }) != nil {
					return spin.Drop
				}
				return spin.Success
			}},
		}, nil
	})
}

func changeWords(w spin.AtomicWindow, tr spin.TransferWindow, payload []byte) error {
	_, err := w.FetchAdd32(4, 0x01020304)
	if _, e := w.FetchAdd64(8, 1<<40); e != nil {
		err = e
	}
	if _, e := w.CompareAndSwap32(16, 0, 0x05060708); e != nil {
		err = e
	}
	if _, e := w.CompareAndSwap64(24, 0, 1<<48); e != nil {
		err = e
	}
	start, e := tr.StartWrite(payload, 33)
	if e != nil {
		return e
	}
	start.Wait()
	return err
}

// A fixture is a lab with a daemon's configuration.
type fixture struct {
	t      *testing.T
	lab    *netns.Lab
	socket string
	file   string
}

func newFixture(t *testing.T, contexts string) *fixture {
	t.Helper()
	lab := netnstest.Temp(t, netns.LabConfig{})
	dir, err := os.MkdirTemp("", "xspin-client")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	os.Chmod(dir, 0o755)
	f := &fixture{t: t, lab: lab, socket: filepath.Join(dir, "s"), file: filepath.Join(dir, "xspin.yaml")}
	text := fmt.Sprintf("socket: %s\ninterfaces:\n- {name: %s, netns: %s, hpus: 4}\n%s", f.socket, lab.NIC.Device, lab.NIC.Namespace, contexts)
	if err := os.WriteFile(f.file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return f
}

// replace changes the configuration.
func (f *fixture) replace(old, new string) {
	f.t.Helper()
	b, err := os.ReadFile(f.file)
	if err != nil {
		f.t.Fatal(err)
	}
	if !bytes.Contains(b, []byte(old)) {
		f.t.Fatalf("no %q in the configuration", old)
	}
	if err := os.WriteFile(f.file, bytes.ReplaceAll(b, []byte(old), []byte(new)), 0o644); err != nil {
		f.t.Fatal(err)
	}
}

const inbox = `contexts:
- name: inbox
  handler: deposit
  windows: [{name: in, size: 1MiB}]
  attach: {users: ["65534"], observers: true}
`

// inKernel is the same with handlers in eBPF.
var inKernel = "kernel: administrators\n" + strings.Replace(inbox, "  handler: deposit\n", "  tier: kernel\n  handler: deposit\n", 1)

// tiers runs a test with an inbox in Go, and one in eBPF.
func tiers(t *testing.T, test func(t *testing.T, f *fixture)) {
	t.Run("user", func(t *testing.T) { test(t, newFixture(t, inbox)) })
	t.Run("kernel", func(t *testing.T) {
		f := newFixture(t, inKernel)
		w, err := f.lab.Host.Wire()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { w.Close() })
		test(t, f)
	})
	t.Run("both", func(t *testing.T) { // every other message is handed over
		f := newFixture(t, strings.Replace(inKernel, "  handler: deposit\n", "  handler: deposit\n  object: hands.o\n  params: {every: 2}\n", 1))
		object := objecttest.Compile(t, `#include "xspin_message.h"

const volatile __u32 every = 0;
__u32 n;

XSPIN_HEADER { return every && __sync_fetch_and_add(&n, 1) % every ? XSPIN_HAND_OVER : XSPIN_PROCEED; }

XSPIN_MESSAGES(HEADER | HAND_OVER);
XSPIN_LICENSE("GPL");
`)
		if err := os.WriteFile(filepath.Join(filepath.Dir(f.file), "hands.o"), object, 0o644); err != nil {
			t.Fatal(err)
		}
		w, err := f.lab.Host.Wire()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { w.Close() })
		test(t, f)
	})
}

const ask = `- name: ask
  handler: requests
  params: {port: 7001}
  windows: [{name: spare, size: 1MiB}]
  attach: {users: ["65534"]}
`

// A process is the test binary in a role.
type process struct {
	t     *testing.T
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines chan string // of stdout
	ended chan struct{}
	log   bytes.Buffer // stderr, to be read after the end
}

// start starts a role as a user.
func (f *fixture) start(uid int, role string, args ...string) *process {
	f.t.Helper()
	p := &process{t: f.t, lines: make(chan string, 1<<16), ended: make(chan struct{})}
	p.cmd = exec.Command("/proc/self/exe")
	p.cmd.Env = append(os.Environ(), roleEnv+"="+strings.Join(append([]string{role}, args...), " "))
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
	p.cmd.Stderr = &p.log
	p.cmd.Dir = "/"
	in, err := p.cmd.StdinPipe()
	if err != nil {
		f.t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		f.t.Fatal(err)
	}
	p.in = in
	if err := p.cmd.Start(); err != nil {
		f.t.Fatal(err)
	}
	go func() {
		for s := bufio.NewScanner(out); s.Scan(); {
			p.lines <- s.Text()
		}
		close(p.lines)
		p.cmd.Wait()
		close(p.ended)
	}()
	f.t.Cleanup(func() {
		p.stop()
		if f.t.Failed() && p.log.Len() > 0 {
			f.t.Logf("%s %v said:\n%s", role, args, &p.log)
		}
	})
	return p
}

// stop has the process end by itself, or else kills it.
func (p *process) stop() {
	p.in.Close()
	select {
	case <-p.ended:
	case <-time.After(20 * time.Second):
		p.kill()
	}
}

func (p *process) kill() {
	p.cmd.Process.Kill()
	<-p.ended
}

// ask has a shell do something, and waits for a line that matches.
func (p *process) ask(line, pattern string) string {
	p.t.Helper()
	fmt.Fprintln(p.in, line)
	return p.expect(pattern)
}

// expect waits for a line that matches.
func (p *process) expect(pattern string) string {
	p.t.Helper()
	re := regexp.MustCompile(pattern)
	timeout := time.After(time.Minute)
	var seen []string
	for {
		select {
		case line, ok := <-p.lines:
			if ok && re.MatchString(line) {
				return line
			}
			if seen = append(seen, line); ok {
				continue
			}
		case <-timeout:
		}
		p.t.Fatalf("no line %q; there were:\n%s", pattern, strings.Join(seen[max(0, len(seen)-20):], "\n"))
	}
}

// daemon starts the daemon, in a process of its own.
func (f *fixture) daemon() *process {
	f.t.Helper()
	p := f.start(0, "daemon", f.file)
	p.expect("^ready$")
	return p
}

func (f *fixture) client() *control.Client {
	f.t.Helper()
	c, err := control.Dial(f.socket)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(c.Close)
	return c
}

// dial returns an SLMP connection from the other end of the lab.
func (f *fixture) dial() *slmp.Conn {
	f.t.Helper()
	var c *slmp.Conn
	if err := f.lab.Host.NS.Do(func() (err error) {
		c, err = slmp.Dial(context.Background(), fmt.Sprintf("%v:%d", f.lab.NIC.Addr.Addr(), slmp.Port), slmp.Config{})
		return err
	}); err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { c.Close() })
	return c
}

// udp returns a socket at the other end of the lab.
func (f *fixture) udp(port int) net.Conn {
	f.t.Helper()
	var c net.Conn
	if err := f.lab.Host.NS.Do(func() (err error) {
		c, err = net.Dial("udp", fmt.Sprintf("%v:%d", f.lab.NIC.Addr.Addr(), port))
		return err
	}); err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { c.Close() })
	return c
}

// message sends a message and has the application tell of it.
func (f *fixture) message(c *slmp.Conn, app *process, n int) {
	f.t.Helper()
	msg := make([]byte, n)
	for i := range msg {
		msg[i] = byte(rand.Uint32())
	}
	ctx, cancel := context.WithTimeout(f.t.Context(), time.Minute)
	defer cancel()
	if _, err := c.SendBytes(ctx, msg, slmp.Options{}); err != nil {
		f.t.Fatal(err)
	}
	if got, want := app.expect("^(message|event|ended|no)"), fmt.Sprintf("message %d %x", n, sha256.Sum256(msg)); got != want {
		f.t.Fatalf("the application tells %q, want %q", got, want)
	}
}

// descriptors counts those of a process.
func descriptors(t *testing.T, p *process) int {
	t.Helper()
	all, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

func TestAnUnprivilegedApplication(t *testing.T) {
	f := newFixture(t, inbox+ask)
	f.daemon()
	app := f.start(nobody, "app", f.socket, "inbox")
	app.expect("^attached, memory is zero: true$")
	c := f.dial()
	for _, n := range []int{1, 1000, 128 << 10} {
		f.message(c, app, n)
	}

	asked := f.start(nobody, "app", f.socket, "ask")
	asked.expect("^attached")
	u := f.udp(askPort)
	u.SetDeadline(time.Now().Add(time.Minute))
	u.Write([]byte("hello, application"))
	answer := make([]byte, 100)
	if n, err := u.Read(answer); err != nil || string(answer[:n]) != "HELLO, APPLICATION" {
		t.Errorf("answer %q, error %v", answer[:n], err)
	}

	// It is there once, and for these users.
	f.start(nobody, "app", f.socket, "inbox").expect(fmt.Sprintf(`^no: attach to context "inbox": .*taken: application \(pid %d, uid 65534\)`, app.cmd.Process.Pid))
	f.start(other, "app", f.socket, "inbox").expect(`^no: .*"inbox" is not for user 65533: see attach`)
	f.start(nobody, "app", f.socket, "outbox").expect(`^no: attach to context "outbox": .*outbox`)
	for name, want := range map[string]int{"inbox": 409, "outbox": 404} {
		var e *control.Error
		if _, err := client.Attach(t.Context(), name, client.Options{Socket: f.socket}); !errors.As(err, &e) || e.Status != want {
			t.Errorf("%s: error %v, want status %d", name, err, want)
		}
	}

	// Observers look, and touch nothing.
	watch, err := client.Attach(t.Context(), "inbox", client.Options{Socket: f.socket, Observer: true})
	if err != nil {
		t.Fatal(err)
	}
	w := watch.Window("in")
	if w.Bytes() != nil || watch.Host() != nil || watch.Counter(0) != nil {
		t.Error("an observer has memory")
	}
	b := make([]byte, 1<<20)
	if n, err := w.ReadAt(b, 5); n != 1<<20-5 || err != io.EOF || bytes.Count(b, []byte{0}) == len(b) {
		t.Errorf("an observer reads %d bytes, error %v", n, err)
	}
	if counters, err := watch.Counters(t.Context()); err != nil || len(counters) != hostq.Counters {
		t.Errorf("%d counters, error %v", len(counters), err)
	}
	if err := watch.Post(t.Context(), control.Receive{Window: "in"}); err == nil || !strings.Contains(err.Error(), "observers cannot") {
		t.Errorf("an observer posts: %v", err)
	}
	if info, err := watch.Info(t.Context()); err != nil || len(info.Attached) != 2 {
		t.Errorf("info %+v, error %v", info, err)
	}
	// The application goes, and what they look at with it.
	app.kill()
	var e *client.EndedError
	if err := watch.Wait(t.Context()); !errors.As(err, &e) || !strings.Contains(e.Reason, "has detached") {
		t.Errorf("error %v", err)
	}
	if err := watch.Close(); err != nil {
		t.Error(err)
	}
}

// An application takes messages by receives, in whichever tier they are handled, and
// is told what it did wrong.
func TestReceivesInBothTiers(t *testing.T) {
	tiers(t, func(t *testing.T, f *fixture) {
		f.daemon()
		app := f.start(nobody, "app", f.socket, "inbox")
		app.expect("^attached, memory is zero: true$")
		c := f.dial()
		for i := range 3 * slots {
			f.message(c, app, 1+i*5000%(128<<10))
		}
		i, err := f.client().Context(t.Context(), "inbox")
		if err != nil {
			t.Fatal(err)
		}
		if i.State != "active" || i.MessageStats == nil || i.MessageStats.Ended != 3*slots || i.HandlerStats.Headers < 3*slots || i.Pair == nil {
			t.Errorf("%+v\n%+v", i, i.MessageStats)
		}
		app.stop()

		own := attachSoon(t, f, "inbox")
		defer own.Close()
		for _, tt := range []struct {
			r    control.Receive
			want string
		}{
			{control.Receive{Window: "out"}, `no window "out"`},
			{control.Receive{Window: "in", Place: 1 << 20, Size: 1}, "out of bounds"},
			{control.Receive{Window: "in", Place: -1}, "out of bounds"},
			{control.Receive{Window: "in", Place: 1, Size: 1<<63 - 1}, "out of bounds"},
		} {
			if err := own.Post(t.Context(), tt.r); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("post %+v: %v, want %q", tt.r, err, tt.want)
			}
		}
		r := control.Receive{Window: "in", Tag: 7, Place: 3, Size: 100, User: 9}
		if err := own.Post(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		if err := own.Unpost(t.Context(), r); err != nil {
			t.Error(err)
		}
		if err := own.Unpost(t.Context(), r); err == nil || !strings.Contains(err.Error(), "no such receive is posted") {
			t.Errorf("taken back twice: %v", err)
		}
	})
}

// What an application can do, one that is not root's does.
func TestEveryCall(t *testing.T) {
	f := newFixture(t, inbox+`- name: words
  handler: test-words
  windows: [{name: in, size: 1MiB}]
  attach: {users: ["65534"]}
- name: push
  handler: push
  params: {to: "HOST:7010"}
  triggered: true
  queue: {}
  windows: [{name: out, size: 1MiB, rights: r}]
  attach: {users: ["65534"]}
`)
	f.replace("HOST", f.lab.Host.Addr.Addr().String())
	d := f.daemon()

	app := f.start(nobody, "shell", f.socket)
	app.ask("attach inbox", "^attach <nil>$")
	app.ask("context", "^context inbox$")
	app.ask("err", "^err <nil>$")

	// Of two receives the first is taken back: the message goes to the second, which
	// then cannot be taken back.
	app.ask("post 4096 4096 1", "^post <nil>$")
	app.ask("post 8192 4096 2", "^post <nil>$")
	app.ask("unpost 4096 4096 3", "^unpost error: inbox: .*receive")
	app.ask("unpost 4096 4096 1", "^unpost <nil>$")
	c := f.dial()
	send := func(text string, limit time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		_, err := c.SendBytes(ctx, []byte(text), slmp.Options{})
		return err
	}
	if err := send("hello", time.Minute); err != nil {
		t.Fatal(err)
	}
	app.ask("event", "^event 1 cause 0 length 5 user 2$")
	app.ask("bytes 8192 6", "^bytes 68656c6c6f00$")
	app.ask("unpost 8192 4096 2", "^unpost error: ")

	// Nothing comes while it is deactivated.
	app.ask("post 0 4096 3", "^post <nil>$")
	app.ask("deactivate", "^deactivate <nil>$")
	app.ask("state", "^state installed$")
	if err := send("nobody", 300*time.Millisecond); err == nil {
		t.Error("a deactivated context has taken a message")
	}
	app.ask("activate", "^activate <nil>$")
	app.ask("state", "^state active$")
	c = f.dial()
	if err := send("again", time.Minute); err != nil {
		t.Fatal(err)
	}
	app.ask("event", "^event 1 cause 0 length 5 user 3$")
	app.ask("bytes 0 6", "^bytes 616761696e00$")

	// Words of the window: what handlers did is there when the counter says so.
	words := f.start(nobody, "shell", f.socket)
	words.ask("attach words", "^attach <nil>$")
	f.udp(wordsPort).Write([]byte("text"))
	words.ask("counter 0 1", "^counter <nil>$")
	words.ask("bytes 0 40", "^bytes 00000000"+"04030201"+"0000000000010000"+"0807060500000000"+"0000000000000100"+"00"+"74657874"+"000000$")

	// The application begins messages itself.
	push := f.start(nobody, "shell", f.socket)
	push.ask("attach push", "^attach <nil>$")
	var in net.PacketConn
	if err := f.lab.Host.NS.Do(func() (err error) {
		in, err = net.ListenPacket("udp4", f.lab.Host.Addr.Addr().String()+":7011")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	push.ask("fill 100 one,two,three", "^fill 13$")
	push.ask("trigger 7011 1048570 100 4", "^trigger error: push: .*out of bounds")
	for line := ""; line != "event 1 cause 0 length 13 user 0"; {
		// Until the neighbour is known.
		push.ask("trigger 7011 100 13 4", "^trigger <nil>$")
		line = push.ask("event", "^event 1 cause 0 length 13 user 0$|^event [12] cause 3")
	}
	in.SetReadDeadline(time.Now().Add(time.Minute))
	got := map[string]bool{}
	for b := make([]byte, 100); len(got) < 4; {
		n, _, err := in.ReadFrom(b)
		if err != nil {
			t.Fatalf("%v: %v", got, err)
		}
		got[string(b[:n])] = true
	}
	for _, text := range []string{"one,", "two,", "thre", "e"} {
		if !got[text] {
			t.Errorf("no %q in %v", text, got)
		}
	}

	// In the end all are told why.
	d.stop()
	for _, p := range []*process{app, words, push} {
		p.ask("ended", "^ended")
		p.ask("err", "^err no longer attached to .*: the daemon")
		p.ask("post 0 1 1", "^post error: no longer attached to .*: the daemon")
		p.ask("close", "^close <nil>$")
		p.ask("err", "^err no longer attached to .*: the daemon")
	}
}

// attachSoon attaches as soon as the context is free.
func attachSoon(t *testing.T, f *fixture, name string) *client.App {
	t.Helper()
	for until := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		app, err := client.Attach(t.Context(), name, client.Options{Socket: f.socket})
		if err == nil {
			return app
		}
		var e *control.Error
		if !errors.As(err, &e) || e.Status != 409 || time.Now().After(until) {
			t.Fatal(err)
		}
	}
}

func TestKillingTheApplicationAtEveryStep(t *testing.T) { tiers(t, killing) }

func killing(t *testing.T, f *fixture) {
	d := f.daemon()
	c := f.dial()
	// The first round makes what stays, such as connections that are kept.
	var before int
	for round, step := range []string{
		"traffic",
		"connect", "half-of-the-request", "request", "101", "descriptors", "mapped", "half-of-an-ask", "ask", "detach",
		"traffic",
	} {
		app := f.start(nobody, "step", f.socket, "inbox", step)
		if step == "traffic" {
			app.expect("^attached, memory is zero: true$")
			ctx, cancel := context.WithCancel(t.Context())
			var sending sync.WaitGroup
			for range 4 {
				sending.Go(func() {
					msg := bytes.Repeat([]byte{7}, 100<<10)
					for ctx.Err() == nil {
						_, _ = c.SendBytes(ctx, msg, slmp.Options{}) // some meet nobody
					}
				})
			}
			for range 5 {
				app.expect("^message")
			}
			app.kill()
			cancel()
			sending.Wait()
		} else {
			app.expect("^here$")
			app.kill()
		}
		// The context works for the next one, who finds nothing of the last.
		works := f.start(nobody, "app", f.socket, "inbox", "again")
		works.expect("^attached, memory is zero: true$")
		f.message(f.dial(), works, 1000)
		works.kill()
		next := attachSoon(t, f, "inbox")
		if b := next.Window("in").Bytes(); bytes.Count(b, []byte{0}) != len(b) {
			t.Errorf("%s: the next application finds something of the last", step)
		}
		if err := next.Close(); err != nil {
			t.Error(err)
		}
		// Whoever attaches waits until the context has started over, and observers change nothing.
		watch, err := client.Attach(t.Context(), "inbox", client.Options{Socket: f.socket, Observer: true})
		if err != nil {
			t.Fatal(err)
		}
		if err := watch.Close(); err != nil {
			t.Error(err)
		}
		if round == 0 {
			before = descriptors(t, d)
			continue
		}
		for until := time.Now().Add(30 * time.Second); descriptors(t, d) > before; time.Sleep(5 * time.Millisecond) {
			if time.Now().After(until) {
				t.Fatalf("%s: the daemon has %d descriptors, %d before", step, descriptors(t, d), before)
			}
		}
	}
}

// A use is what a process has taken: descriptors, mapped parts of memory, goroutines, and
// bytes of the heap that are not garbage.
type use [4]int

// What may come and go without being a leak, or be more later: the Go runtime's maps,
// connections that are kept, buffers that have grown.
var slack = use{4, 25, 4, 1 << 20}

// used is what this process has taken.
func used() use {
	runtime.GC()
	runtime.GC() // what finalizers have left
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	fds, _ := os.ReadDir("/proc/self/fd")
	maps, _ := os.ReadFile("/proc/self/maps")
	return use{len(fds), bytes.Count(maps, []byte("\n")), runtime.NumGoroutine(), int(m.HeapAlloc)}
}

// used asks a daemon the same.
func (p *process) used() (u use) {
	p.t.Helper()
	if _, err := fmt.Sscan(strings.Trim(p.ask("used", `^\[`), "[]"), &u[0], &u[1], &u[2], &u[3]); err != nil {
		p.t.Fatal(err)
	}
	return u
}

// A thousand applications and observers come and go, and nothing of them stays, here or in
// the daemon.
func TestAttachingManyTimesLeavesNothing(t *testing.T) {
	// As little memory as there can be: it is the kernel's to make, and takes most of the time.
	f := newFixture(t, `contexts:
- name: inbox
  handler: deposit
  windows: [{name: in, size: 4KiB}]
  queue: {events: 16, requests: 16, payload: 64}
  attach: {users: ["65534"], observers: true}
`)
	d := f.daemon()
	const warm = 50 // cycles after which there is all that stays
	cycles := 400 * testenv.Soak()
	if testing.Short() {
		cycles = 150
	}
	var before [2]use
	for i := range warm + cycles {
		if i == warm {
			before = [2]use{d.used(), used()}
		}
		app, err := client.Attach(t.Context(), "inbox", client.Options{Socket: f.socket, Observer: i%4 == 3})
		if err != nil {
			t.Fatalf("cycle %d: %v", i, err)
		}
		if err := app.Close(); err != nil {
			t.Fatalf("cycle %d: %v", i, err)
		}
	}
	// The daemon says good-bye, and then lets go.
	for until := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		after := [2]use{d.used(), used()}
		more := false
		for i := range after {
			for j, n := range after[i] {
				more = more || n > before[i][j]+slack[j]
			}
		}
		if !more {
			t.Logf("daemon and client: %v before %d cycles, %v after", before, cycles, after)
			break
		}
		if time.Now().After(until) {
			t.Fatalf("descriptors, mappings, goroutines and bytes of the daemon and of this process: %v before %d cycles, %v after", before, cycles, after)
		}
	}
}

func TestKillingTheDaemon(t *testing.T) {
	f := newFixture(t, inbox)
	d := f.daemon()
	app := f.start(nobody, "app", f.socket, "inbox", "again")
	app.expect("^attached, memory is zero: true$")
	f.message(f.dial(), app, 1000)
	asks := f.client()
	following := make(chan error, 1)
	began := make(chan struct{})
	go func() {
		close(began)
		following <- asks.Log(context.Background(), "inbox", -1, true, func(control.LogLine) error { return nil })
	}()
	<-began

	d.kill()
	app.expect(`^ended: no longer attached to "inbox": the daemon is gone$`)
	app.expect("^no: .*no daemon answers at .*/s: start one with `sudo xspin run`, or name its socket with --socket or XSPIN_SOCKET")
	if err := <-following; err == nil || !strings.Contains(err.Error(), "daemon") {
		t.Errorf("a follower of the log is told %v", err)
	}
	if _, err := asks.Status(t.Context()); !errors.Is(err, control.ErrNoDaemon) {
		t.Errorf("the caller is told %v", err)
	}
	if _, err := control.Dial(f.socket); !errors.Is(err, control.ErrNoDaemon) {
		t.Errorf("a caller that dials is told %v", err)
	}

	d = f.daemon()
	app.expect("^attached, memory is zero: true$")
	f.message(f.dial(), app, 1000)
	if _, err := asks.Status(t.Context()); err != nil {
		t.Errorf("the client of the first daemon asks the second: %v", err)
	}
	// One that ends in order says so.
	d.stop()
	line := app.expect("^ended: ")
	if !strings.Contains(line, "daemon") || strings.Contains(line, "gone") {
		t.Errorf("the application is told %q", line)
	}
}

// Wherever in its first answer the daemon dies, Attach says so, and keeps no descriptor.
func TestTheDaemonDiesAtEveryByteOfTheHandshake(t *testing.T) {
	f := newFixture(t, inbox)
	f.daemon()
	// What a daemon says.
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: f.socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprintf(c, "POST /v1/contexts/inbox/attach HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", control.SessionProtocol)
	head, err := readHead(c)
	if err != nil {
		t.Fatal(err)
	}
	reply, fds, err := readReply(c)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}()
	doc, err := json.Marshal(reply)
	if err != nil {
		t.Fatal(err)
	}
	said := head + string(doc) + "\n"

	// One that says the first part of it.
	socket := f.socket + "2"
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	answer := func(n int, reads bool) error {
		c, err := l.AcceptUnix()
		if err != nil {
			return err
		}
		defer c.Close() // if it has not read all, the client is reset
		if reads {
			if _, err := http.ReadRequest(bufio.NewReader(c)); err != nil {
				return err
			}
		}
		if _, err := io.WriteString(c, said[:min(n, len(head))]); err != nil || n <= len(head) {
			return err
		}
		_, _, err = c.WriteMsgUnix([]byte(said[len(head):n]), unix.UnixRights(fds...), nil)
		return err
	}
	attach := func(n int, reads bool) (*client.App, error) {
		answered := make(chan error, 1)
		go func() { answered <- answer(n, reads) }()
		app, err := client.Attach(t.Context(), "inbox", client.Options{Socket: socket})
		if e := <-answered; e != nil {
			t.Fatalf("%d bytes: %v", n, e)
		}
		return app, err
	}
	before := used()
	for n := range len(said) {
		for _, reads := range []bool{true, false} {
			if app, err := attach(n, reads); err == nil || !strings.Contains(err.Error(), `attach to context "inbox": the daemon went away`) {
				t.Fatalf("%d of %d bytes: %v, error %v", n, len(said), app, err)
			}
		}
	}
	app, err := attach(len(said), true)
	if err != nil {
		t.Fatal(err)
	}
	var e *client.EndedError
	if err := app.Wait(t.Context()); !errors.As(err, &e) || e.Reason != "the daemon is gone" {
		t.Errorf("in the end: %v", err)
	}
	if err := app.Close(); err != nil {
		t.Error(err)
	}
	if after := used(); after[0] > before[0] || after[2] > before[2] {
		t.Errorf("descriptors, mappings, goroutines: %v before, %v after", before, after)
	}
}

// connections counts those that wait to be accepted at a socket, or have been.
func (f *fixture) connections() int {
	f.t.Helper()
	b, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		f.t.Fatal(err)
	}
	return strings.Count(string(b), f.socket+"\n")
}

// soon waits for something.
func soon(t *testing.T, what string, there func() bool) {
	t.Helper()
	for until := time.Now().Add(time.Minute); !there(); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("%s: not in a minute", what)
		}
	}
}

// standsStill tells whether each thread of a process has stopped: a signal that stops it returns before.
func standsStill(t *testing.T, pid int) bool {
	t.Helper()
	all, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil || len(all) == 0 {
		t.Fatal(err, all)
	}
	for _, name := range all {
		b, err := os.ReadFile(name)
		if err == nil && !strings.Contains(string(b), ") T ") { // else it has ended
			return false
		}
	}
	return true
}

// One that is killed with clients waiting for its answer leaves none of them waiting.
func TestKillingTheDaemonInHandshakes(t *testing.T) {
	f := newFixture(t, inbox)
	d := f.daemon()
	if err := d.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	soon(t, "all threads stand still", func() bool { return standsStill(t, d.cmd.Process.Pid) })
	before := f.connections()
	const many = 10
	told := make(chan error, many)
	for range many {
		go func() {
			app, err := client.Attach(context.Background(), "inbox", client.Options{Socket: f.socket})
			if err == nil {
				app.Close()
			}
			told <- err
		}()
	}
	soon(t, "connections", func() bool { return f.connections() >= before+many })
	d.kill()
	for range many {
		select {
		case err := <-told:
			if err == nil || !strings.Contains(err.Error(), "the daemon went away before it answered") {
				t.Errorf("a caller that attaches is told %v", err)
			}
		case <-time.After(time.Minute):
			t.Fatal("somebody waits for an answer that will not come")
		}
	}
	f.daemon()
	f.start(nobody, "shell", f.socket).ask("attach inbox", "^attach <nil>$")
}

// One that is killed while messages arrive: the application hears of it and attaches to
// the next, and finds nothing of what there was.
func TestKillingTheDaemonUnderTraffic(t *testing.T) {
	f := newFixture(t, inbox)
	d := f.daemon()
	app := f.start(nobody, "app", f.socket, "inbox", "again")
	app.expect("^attached, memory is zero: true$")
	for round := range 3 {
		c := f.dial()
		ctx, cancel := context.WithCancel(t.Context())
		var sending sync.WaitGroup
		for range 4 {
			sending.Go(func() {
				msg := bytes.Repeat([]byte{7}, 100<<10)
				for ctx.Err() == nil {
					_, _ = c.SendBytes(ctx, msg, slmp.Options{}) // some meet nobody
				}
			})
		}
		for range 5 + round {
			app.expect("^message 102400 ")
		}
		d.kill()
		app.expect(`^ended: no longer attached to "inbox": the daemon is gone$`)
		cancel()
		sending.Wait()
		d = f.daemon()
		app.expect("^attached, memory is zero: true$")
		f.message(f.dial(), app, 1000)
	}
}

// One that is killed while it drains a context, for whatever reason it does.
func TestKillingTheDaemonThatDrains(t *testing.T) {
	f := newFixture(t, `contexts:
- name: stuck
  handler: test-stuck
  attach: {users: ["65534"]}
`)
	f.replace("hpus: 4}", "hpus: 4, limit: 1m}")
	d := f.daemon()
	app := f.start(nobody, "shell", f.socket)
	asks, removed := f.client(), make(chan error)
	for _, c := range []struct {
		name  string
		drain func()
		after func()
	}{
		{"detach", func() { fmt.Fprintln(app.in, "close") },
			func() { app.expect("^close <nil>$") }},
		{"crash", func() { app.kill() },
			func() { app = f.start(nobody, "shell", f.socket) }},
		{"remove", func() { go func() { removed <- asks.Remove(context.Background(), "stuck") }() },
			func() {
				if err := <-removed; err == nil || !strings.Contains(err.Error(), "the daemon") {
					t.Errorf("a caller that removes the context is told %v", err)
				}
				app.ask("ended", "^ended")
				app.ask("err", `^err no longer attached to "stuck": `)
			}},
	} {
		t.Log(c.name)
		app.ask("attach stuck", "^attach <nil>$")
		f.udp(stuckPort).Write([]byte("x"))
		app.ask("counter 0 1", "^counter <nil>$")
		c.drain()
		soon(t, "draining", func() bool {
			info, err := asks.Context(t.Context(), "stuck")
			return err == nil && info.State == "draining"
		})
		d.kill()
		c.after()
		d = f.daemon()
	}
}

// What is called after Close, or during it, returns; none of it touches memory that is
// not there any more.
func TestMethodsAfterClose(t *testing.T) {
	f := newFixture(t, inbox)
	f.daemon()
	app := attachSoon(t, f, "inbox")
	var callers sync.WaitGroup
	w := app.Window("in")
	stop := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var e hostq.Event
	var r hostq.Call
	for _, call := range []func(){
		func() { app.Event(&e) },
		func() { app.Request(&r) },
		func() { w.ReadAt(make([]byte, 100000), 17) },
		func() { app.Info(context.Background()) },
		func() { app.Wait(ctx) },
		func() { app.Wait(context.Background()) },
		func() { app.WaitCounter(ctx, 3, 1) },
	} {
		callers.Go(func() {
			for {
				call()
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	for range 2 {
		if err := app.Close(); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	callers.Wait()
	for name, err := range map[string]error{
		"Wait":        app.Wait(t.Context()),
		"WaitCounter": app.WaitCounter(t.Context(), 0, 1),
		"Post":        app.Post(t.Context(), control.Receive{}),
		"Respond":     app.Respond(new(hostq.Call), 0, nil),
		"ReadAt":      func() error { _, err := w.ReadAt(make([]byte, 1), 0); return err }(),
	} {
		if !errors.Is(err, os.ErrClosed) {
			t.Errorf("%s after Close: %v", name, err)
		}
	}
	app.Done(new(hostq.Call))
	if app.Event(&e) || app.Request(&r) || w.Bytes() != nil || app.Counter(0) != nil {
		t.Error("there is something after Close")
	}
	// When Close has returned, the next can come: at once.
	next, err := client.Attach(t.Context(), "inbox", client.Options{Socket: f.socket})
	if err != nil {
		t.Fatal(err)
	}
	next.Close()
}

// scribbleTime is how long each hostile client has. In a short run, a tenth of that.
const scribbleTime = 3 * time.Second / 2

// A client that writes random bytes into every page that it can map, all the time, harms
// itself alone, whoever handles its packets.
func TestAHostileClientHarmsItselfAlone(t *testing.T) {
	slmpRules := matcher.SLMP()
	for name, tt := range map[string]struct {
		handlers string
		port     int
		packet   func(n int) []byte
	}{
		"handlers in Go": {"  handler: test-all\n", askPort, func(n int) []byte { return make([]byte, n%1000) }},
		"handlers in eBPF, whose messages end": {"  tier: kernel\n  handler: deposit\n  timeout: 100ms\n  queue: {events: 16, requests: 16}\n  rulesets: \"" + strings.Replace(slmpRules.String(), "0x24720000", "0x24730000", 1) + "\"\n", 9331, func(n int) []byte {
			b := make([]byte, slmp.HeaderLen+n%1000)
			flags := slmp.SYN
			if n%4 > 0 {
				flags |= slmp.EOM
			}
			slmp.Header{Flags: flags, ID: uint32(n)}.Put(b)
			return b
		}},
	} {
		t.Run(name, func(t *testing.T) { hostileClient(t, tt.handlers, tt.port, tt.packet) })
	}
}

func hostileClient(t *testing.T, handlers string, port int, packet func(n int) []byte) {
	d := testenv.SoakTime(scribbleTime)
	if testing.Short() {
		d /= 10 / min(10, testenv.Slowness())
	}
	f := newFixture(t, "kernel: administrators\n"+inbox+"- name: enemy\n"+handlers+`  windows: [{name: mine, size: 1MiB}]
  attach: {users: ["65533"]}
`)
	root := f.daemon()
	victim := f.start(nobody, "app", f.socket, "inbox")
	victim.expect("^attached")
	enemy := f.start(other, "scribble", f.socket, "enemy")
	enemy.expect("^round")

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var sending sync.WaitGroup
	sending.Go(func() {
		u := f.udp(port)
		for n := 0; ctx.Err() == nil; n++ {
			_, _ = u.Write(packet(n))
			time.Sleep(100 * time.Microsecond) // leave some of the CPUs to the others
		}
	})
	c := f.dial()
	look := f.client()
	var n, bytes int
	var handled uint64 // for the enemy
	// Until there was traffic for it, too: it may be slow to attach again.
	for end := time.Now().Add(d); time.Now().Before(end) || handled == 0 && time.Now().Before(end.Add(testenv.Slowness()*time.Minute)); {
		size := 1 + rand.IntN(100<<10)
		f.message(c, victim, size)
		n, bytes = n+1, bytes+size
		if i, err := look.Context(t.Context(), "enemy"); err != nil {
			t.Fatal(err)
		} else {
			handled = max(handled, i.HandlerStats.Handled)
		}
	}
	cancel()
	sending.Wait()
	enemy.in.Close()
	line := enemy.expect("^scribbled")
	t.Logf("%d messages, %d bytes; the enemy %s, with up to %d packets", n, bytes, line, handled)
	if handled == 0 {
		t.Error("there was no traffic for the enemy")
	}
	select {
	case <-root.ended:
		t.Error("the daemon has ended")
	default:
	}
	root.in.Close()
	select {
	case <-root.ended:
	case <-time.After(testenv.Slowness() * time.Minute):
		t.Error("the daemon does not end")
	}
}
