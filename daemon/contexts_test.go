// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// stuckGate holds the handlers of test-stuck while it is there.
var (
	stuckGate atomic.Pointer[chan struct{}]
	stuckIn   atomic.Int32 // of them, ever
)

// lastSlots is the slot of the last message of test-slots, and how many there are.
var lastSlots atomic.Pointer[[2]int]

// makeGate holds who makes test-made while it is there.
var makeGate atomic.Pointer[chan struct{}]

func init() {
	port := func(p handlers.Params, h hpu.Handlers) (*handlers.Set, error) {
		if _, ok := p["rulesets"]; ok {
			return nil, errors.New("no")
		}
		return &handlers.Set{Handlers: h}, nil
	}
	handlers.Register("test-stuck", "", func(p handlers.Params) (*handlers.Set, error) {
		return port(p, hpu.Handlers{Payload: func(h *hpu.HER) spin.Code {
			if ch := stuckGate.Load(); ch != nil {
				stuckIn.Add(1)
				<-*ch
			}
			if w := h.Window("own"); w != nil {
				_, _ = w.WriteAt([]byte("late"), 0)
			}
			return spin.Drop
		}})
	})
	handlers.Register("test-init", "", func(p handlers.Params) (*handlers.Set, error) {
		return port(p, hpu.Handlers{
			Init: func(t *hpu.Task) error {
				if ms, ok := p["sleep"].(int); ok {
					time.Sleep(time.Duration(ms) * time.Millisecond)
				}
				if p["fail"] == true {
					return errors.New("not today")
				}
				return nil
			},
			Payload: func(*hpu.HER) spin.Code { return spin.Success },
		})
	})
	handlers.Register("test-fault", "", func(p handlers.Params) (*handlers.Set, error) {
		return port(p, hpu.Handlers{Payload: func(*hpu.HER) spin.Code {
			if p["panic"] == true {
				panic("out of cheese")
			}
			return spin.Fail
		}})
	})
	handlers.Register("test-made", "", func(p handlers.Params) (*handlers.Set, error) {
		if ch := makeGate.Load(); ch != nil {
			<-*ch
		}
		return port(p, hpu.Handlers{Payload: func(*hpu.HER) spin.Code { return spin.Success }})
	})
	handlers.RegisterEnv("test-slots", "", func(p handlers.Params, env handlers.Env) (*handlers.Set, error) {
		return port(p, hpu.Handlers{Header: func(h *hpu.HER) spin.Code {
			lastSlots.Store(&[2]int{h.Message().Slot(), env.Messages})
			return spin.Success
		}})
	})
	handlers.Register("test-memory", "", func(p handlers.Params) (*handlers.Set, error) {
		set, err := port(p, hpu.Handlers{Payload: func(*hpu.HER) spin.Code { return spin.Success }})
		set.Memory, set.HPUMemory = 4096, 64
		return set, err
	})
	handlers.Register("test-panic", "", func(p handlers.Params) (*handlers.Set, error) { panic("no set") })
}

// A fixture is a daemon on the NIC's end of a lab.
type fixture struct {
	*Daemon
	lab  *netns.Lab
	file string
	logs *syncBuffer
}

// configText is the beginning of all configurations.
func configText(lab *netns.Lab, dir string) string {
	return fmt.Sprintf("socket: %s/s\ninterfaces:\n- {name: %s, netns: %s, hpus: 2, limit: 300ms}\n", dir, lab.NIC.Device, lab.NIC.Namespace)
}

// launch starts a daemon with a configuration, less its beginning.
func launch(t *testing.T, text string) *fixture {
	t.Helper()
	return launchIn(t, t.TempDir(), text)
}

// launchIn is launch with the configuration in a directory.
func launchIn(t *testing.T, dir, text string) *fixture {
	t.Helper()
	lab := netnstest.Temp(t, netns.LabConfig{})
	f := &fixture{lab: lab, file: filepath.Join(dir, "x.yaml"), logs: &syncBuffer{}}
	f.write(t, text)
	cfg, err := Load(f.file)
	if err != nil {
		t.Fatal(err)
	}
	f.Daemon, err = Start(cfg, Options{File: f.file, KeepPrivileges: true, Logger: slog.New(slog.NewTextHandler(f.logs, nil))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := f.Close(ctx); err != nil {
			t.Error(err)
		}
		if used := f.inUse(); used != 0 {
			t.Errorf("%v of memory are in use after the daemon's end", control.Size(used))
		}
		if t.Failed() {
			t.Logf("the daemon's log:\n%s", f.logs)
		}
	})
	return f
}

func (f *fixture) write(t *testing.T, text string) {
	t.Helper()
	writeFile(t, f.file, configText(f.lab, filepath.Dir(f.file))+text)
}

func (f *fixture) inUse() int64 {
	f.memory.mu.Lock()
	defer f.memory.mu.Unlock()
	return f.memory.used
}

var root = control.Peer{PID: 1}

func someone(uid int) control.Peer { return control.Peer{PID: 1000 + uid, UID: uid, GID: uid} }

// admitted attaches somebody, for sure.
func (f *fixture) admitted(t *testing.T, name string, p control.Peer, observer bool) *attachment {
	t.Helper()
	a, err := f.admit(name, p, observer)
	if err != nil {
		t.Fatal(err)
	}
	return a.(*attachment)
}

// left detaches somebody and waits until the context has started over, if it does.
func left(a *attachment, why string) {
	a.release(why)
	a.h.op <- struct{}{}
	a.h.end()
}

// An app is an application's side of an attachment, with descriptors of its own.
type app struct {
	windows map[string]*hostq.Memory
	host    *hostq.Host
}

func open(t *testing.T, a *attachment) *app {
	t.Helper()
	dup := func(fd int) int {
		n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	fds := a.descriptors()
	r := a.reply()
	p := &app{windows: map[string]*hostq.Memory{}}
	for _, w := range r.Windows {
		if w.App != "rw" {
			continue
		}
		m, err := hostq.OpenMemory(dup(fds[0]), w.Size)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { m.Close() })
		p.windows[w.Name] = m
		fds = fds[1:]
	}
	if r.Pair != nil {
		var lanes []int
		for _, fd := range fds[2:] {
			lanes = append(lanes, dup(fd))
		}
		var err error
		if p.host, err = hostq.OpenHost(*r.Pair, dup(fds[0]), dup(fds[1]), lanes); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { p.host.Close() })
	}
	return p
}

// send sends an SLMP message and returns when it is acknowledged.
func (f *fixture) send(t *testing.T, msg []byte) error {
	t.Helper()
	return f.lab.Host.NS.Do(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		c, err := slmp.Dial(ctx, fmt.Sprintf("%v:%d", f.lab.NIC.Addr.Addr(), slmp.Port), slmp.Config{})
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.SendBytes(ctx, msg, slmp.Options{})
		return err
	})
}

// datagram sends one to a port of the NIC.
func (f *fixture) datagram(t *testing.T, port int) {
	t.Helper()
	err := f.lab.Host.NS.Do(func() error {
		c, err := net.Dial("udp", fmt.Sprintf("%v:%d", f.lab.NIC.Addr.Addr(), port))
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write([]byte("datagram"))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// event waits for the application's next event.
func (p *app) event(t *testing.T) hostq.Event {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var e hostq.Event
	for !p.host.Event(&e) {
		if err := p.host.Wait(ctx, 0); err != nil {
			t.Fatalf("no event: %v", err)
		}
	}
	return e
}

// eventually waits until something is so.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !is(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not so: %s", what)
		}
	}
}

func (f *fixture) state(t *testing.T, name string) string {
	t.Helper()
	i, err := f.info(name)
	if err != nil {
		t.Fatal(err)
	}
	return i.State
}

// fails compares an error with one of the four kinds, and a part of its text.
func fails(t *testing.T, what string, err, kind error, text string) {
	t.Helper()
	if err == nil || kind != nil && !errors.Is(err, kind) || !strings.Contains(err.Error(), text) {
		t.Errorf("%s: error %v, want %v: ... %s ...", what, err, kind, text)
	}
}

const inbox = `
windows: [{name: common, size: 1MiB}, {name: ours, size: 4KiB}]
contexts:
- name: inbox
  handler: deposit
  windows: [{name: in, size: 1MiB}, {name: common, app: rw}, {name: ours}, {name: hidden, size: 4KiB, app: none}, {name: seen, size: 4KiB, app: r}]
  memory: 64
  hpu_memory: 32
  queue: {events: 16, requests: 16, payload: 64}
  attach: {users: [77], groups: [88], observers: true}
  activate: attach
`

func TestTheNextApplicationSeesNothingOfTheLast(t *testing.T) {
	f := launch(t, inbox)
	msg := bytes.Repeat([]byte("secret "), 1000)

	a := f.admitted(t, "inbox", someone(77), false)
	one := open(t, a)
	if got := fmt.Sprint(a.reply()); !strings.Contains(got, "[{in 1048576 rw rwa} {common 1048576 rw rwa} {seen 4096 r rwa}]") {
		t.Errorf("reply %s", got)
	}
	if err := f.send(t, msg); err != nil {
		t.Fatal(err)
	}
	e := one.event(t)
	if e.Kind != hostq.MessageEnded || e.Length != uint64(len(msg)) || !bytes.HasPrefix(one.windows["in"].Bytes(), msg) {
		t.Fatalf("event %+v", e)
	}
	one.host.Counter(3).Add(7)
	must(t, f.withMemory("inbox", -1, func(b []byte) error { copy(b, "secret"); return nil }))
	must(t, f.withMemory("inbox", 1, func(b []byte) error { copy(b, "secret"); return nil }))
	copy(one.windows["common"].Bytes(), "shared")
	left(a, "it is gone")
	left(a, "and says so twice")

	// What it has mapped is still there, for itself.
	if !bytes.HasPrefix(one.windows["in"].Bytes(), msg) {
		t.Error("the old mapping has changed")
	}
	if got := f.state(t, "inbox"); got != installed {
		t.Errorf("context is %s", got)
	}

	b := f.admitted(t, "inbox", control.Peer{PID: 5, UID: 5, GID: 5, Groups: []int{4, 88}}, false)
	two := open(t, b)
	for _, name := range []string{"in"} {
		if i := bytes.IndexFunc(two.windows[name].Bytes(), func(r rune) bool { return r != 0 }); i >= 0 {
			t.Errorf("window %s has something at %d", name, i)
		}
	}
	if two.host.Counter(3).Get() != 0 {
		t.Error("a counter is not zero")
	}
	var ev hostq.Event
	if two.host.Event(&ev) {
		t.Errorf("there is an event: %+v", ev)
	}
	for hpu := -1; hpu < 2; hpu++ {
		must(t, f.withMemory("inbox", hpu, func(m []byte) error {
			if want := map[bool]int{true: 64, false: 32}[hpu < 0]; len(m) != want || !bytes.Equal(m, make([]byte, want)) {
				t.Errorf("HPU memory %d: %q", hpu, m)
			}
			return nil
		}))
	}
	if !bytes.HasPrefix(two.windows["common"].Bytes(), []byte("shared")) {
		t.Error("the shared window is another")
	}
	// What the first one writes, nobody sees.
	copy(one.windows["in"].Bytes(), "graffiti")
	if err := f.send(t, []byte("for two")); err != nil {
		t.Fatal(err)
	}
	two.event(t)
	if got := two.windows["in"].Bytes()[:8]; string(got) != "for two\x00" {
		t.Errorf("window has %q", got)
	}
	left(b, "done")
	for _, want := range []string{"uid=77", `reason="it is gone"`, "messages_ended=0", "requests_failed=0"} {
		if !strings.Contains(f.logs.String(), want) {
			t.Errorf("the log does not say %s", want)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestWhoMayDoWhat(t *testing.T) {
	f := launch(t, "admins: {users: [99]}\n"+inbox)
	_, err := f.admit("nothing", root, false)
	fails(t, "no context", err, errNotFound, `no context "nothing": the daemon has inbox`)
	_, err = f.admit("inbox", someone(5), false)
	fails(t, "somebody else", err, errDenied, `context "inbox" is not for user 5: see attach`)
	fails(t, "somebody else reads", f.mayRead(someone(5), "inbox"), errDenied, `not for user 5`)
	must(t, f.mayRead(someone(77), "inbox"))
	must(t, f.mayRead(someone(99), "inbox"))
	fails(t, "read nothing", f.mayRead(someone(77), "nothing"), errNotFound, "nothing")
	fails(t, "no admin", f.mayAdmin(someone(77)), errDenied, "user 77 may not do this")
	must(t, f.mayAdmin(someone(99)))
	must(t, f.mayAdmin(root))

	a := f.admitted(t, "inbox", someone(77), false)
	if got := f.state(t, "inbox"); got != active {
		t.Errorf("with an application the context is %s", got)
	}
	_, err = f.admit("inbox", someone(77), false)
	fails(t, "a second application", err, errBusy, `context "inbox" is taken: application (pid 1077, uid 77) is attached since`)
	o := f.admitted(t, "inbox", someone(77), true)
	if r := o.reply(); r.Pair != nil || len(o.descriptors()) != 0 || r.Windows[0].App != "r" || len(r.Windows) != 3 {
		t.Errorf("an observer gets %+v and descriptors %v", r, o.descriptors())
	}
	i, err := f.info("inbox")
	must(t, err)
	if len(i.Attached) != 2 || i.Attached[0].Observer || !i.Attached[1].Observer || i.Rules[0].Number != 0 {
		t.Errorf("info %+v", i)
	}

	ask := func(a *attachment, ask control.Ask) string { return a.do(&ask).Error }
	for _, tc := range []struct {
		who  *attachment
		ask  control.Ask
		want string
	}{
		{o, control.Ask{Do: "post", Receive: &control.Receive{}}, "post: observers cannot"},
		{o, control.Ask{Do: "deactivate"}, "deactivate: observers cannot"},
		{o, control.Ask{Do: "read", Read: &control.Range{Window: "in", Offset: 1 << 20, Length: 0}}, ""},
		{o, control.Ask{Do: "read", Read: &control.Range{Window: "in", Offset: 1<<20 - 1, Length: 2}}, `2 bytes at 1048575 of window "in" of 1048576: out of bounds`},
		{o, control.Ask{Do: "read", Read: &control.Range{Window: "in", Offset: -1, Length: 2}}, "read: want a range"},
		{o, control.Ask{Do: "read", Read: &control.Range{Window: "hidden", Length: 2}}, `window "hidden" is not for applications`},
		{o, control.Ask{Do: "read", Read: &control.Range{Window: "x", Length: 2}}, `the context has no window "x"`},
		{o, control.Ask{Do: "read"}, "read: want a range"},
		{a, control.Ask{Do: "dance"}, `"dance": want post, unpost,`},
		{a, control.Ask{Do: "post"}, "post: the receive is missing"},
		{a, control.Ask{Do: "post", Receive: &control.Receive{Window: "in", Place: 1<<20 - 4, Size: 5}}, `5 bytes at 1048572 of window "in" of 1048576: out of bounds`},
		{a, control.Ask{Do: "post", Receive: &control.Receive{Window: "in", Place: 1<<20 + 1}}, `0 bytes at 1048577 of window "in" of 1048576: out of bounds`},
		{a, control.Ask{Do: "post", Receive: &control.Receive{Window: "in", Size: math.MaxInt64}}, `9223372036854775807 bytes at 0 of window "in" of 1048576: out of bounds`},
		{a, control.Ask{Do: "post", Receive: &control.Receive{Window: "in", Place: math.MaxInt64, Size: math.MaxInt64}}, "out of bounds"},
		{a, control.Ask{Do: "post", Receive: &control.Receive{Window: "in", Place: -1}}, `0 bytes at -1 of window "in" of 1048576: out of bounds`},
		{a, control.Ask{Do: "post", Receive: &control.Receive{Window: "in", Place: math.MinInt64, Size: math.MaxInt64}}, "out of bounds"},
		{a, control.Ask{Do: "post", Receive: &control.Receive{Window: "in", Size: -1}}, `-1 bytes at 0 of window "in" of 1048576: out of bounds`},
		{a, control.Ask{Do: "post", Receive: &control.Receive{Window: "hidden"}}, "not for applications"},
		{a, control.Ask{Do: "post", Receive: &control.Receive{Window: "ours"}}, `window "ours" is not for applications`},
		{a, control.Ask{Do: "unpost", Receive: &control.Receive{Window: "in"}}, "no such receive"},
		{a, control.Ask{Do: "trigger"}, "trigger: what is missing"},
		{a, control.Ask{Do: "trigger", Trigger: &control.Trigger{}}, "not host-activated"},
		{a, control.Ask{Do: "trigger", Trigger: &control.Trigger{Window: "hidden"}}, "not for applications"},
		{a, control.Ask{Do: "deactivate"}, ""},
		{a, control.Ask{Do: "activate"}, ""},
	} {
		if got := ask(tc.who, tc.ask); got != tc.want && (tc.want == "" || !strings.Contains(got, tc.want)) {
			t.Errorf("%s by %v: %q, want %q", tc.ask.Do, tc.who, got, tc.want)
		}
	}
	if c := o.do(&control.Ask{Do: "counters"}); c.Error != "" || len(c.Data) != 8*hostq.Counters {
		t.Errorf("counters: %d bytes, %s", len(c.Data), c.Error)
	}
	if c := o.do(&control.Ask{Do: "stats"}); c.Info == nil || c.Info.State != active {
		t.Errorf("stats %+v", c)
	}
	left(a, "done")
	select {
	case why := <-o.ended():
		if !strings.Contains(why, "the application has detached") {
			t.Errorf("the observer is told %q", why)
		}
	default:
		t.Error("the observer is not told")
	}
	left(o, "told")
	if got := f.state(t, "inbox"); got != installed {
		t.Errorf("without an application the context is %s", got)
	}
}

func TestMessagesGoWhereReceivesSay(t *testing.T) {
	f := launch(t, inbox)
	a := f.admitted(t, "inbox", root, false)
	defer left(a, "done")
	p := open(t, a)
	in := p.windows["in"].Bytes()
	post := func(do string, r control.Receive) {
		t.Helper()
		if ans := a.do(&control.Ask{Do: do, Receive: &r}); ans.Error != "" {
			t.Fatal(ans.Error)
		}
	}
	// Without receives each message goes to the start.
	must(t, f.send(t, []byte("first")))
	must(t, f.send(t, []byte("FIR")))
	if p.event(t); string(in[:5]) != "FIRst" {
		t.Errorf("window begins with %q", in[:5])
	}
	p.event(t)
	all := control.Receive{Window: "in", Ignore: 0xffffffff}
	one, two, three := all, all, all
	one.Place, one.User = 1000, 41
	two.Place, two.User = 2000, 42
	three.Place, three.User, three.Window = 300, 43, "common"
	post("post", one)
	post("post", two)
	post("post", three)
	post("unpost", two)
	must(t, f.send(t, []byte("to one")))
	if e := p.event(t); e.User != 41 || string(in[1000:1006]) != "to one" {
		t.Errorf("event %+v, window %q", e, in[1000:1006])
	}
	must(t, f.send(t, []byte("to three")))
	if e := p.event(t); e.User != 43 || string(p.windows["common"].Bytes()[300:308]) != "to three" {
		t.Errorf("event %+v", e)
	}
	// From now on a message waits for its receive.
	sent := make(chan error, 1)
	go func() { sent <- f.send(t, []byte("waiting")) }()
	eventually(t, "a message is refused", func() bool {
		i, err := f.info("inbox")
		return err == nil && i.HandlerStats.Unbound > 0
	})
	if string(in[:5]) != "FIRst" {
		t.Errorf("the window's begin was written: %q", in[:7])
	}
	post("post", two)
	must(t, <-sent)
	if e := p.event(t); e.User != 42 || string(in[2000:2007]) != "waiting" {
		t.Errorf("event %+v, window %q", e, in[2000:2007])
	}
}

func TestRequestsFailWhenTheApplicationGoes(t *testing.T) {
	f := launch(t, `
contexts:
- name: ask
  handler: requests
  params: {port: 9}
  activate: start
`)
	a := f.admitted(t, "ask", root, false)
	f.datagram(t, 9)
	eventually(t, "a request is outstanding", func() bool {
		i, err := f.info("ask")
		return err == nil && i.Pair.Outstanding == 1
	})
	left(a, "it was killed")
	if log := f.logs.String(); !strings.Contains(log, "requests_failed=1") || !strings.Contains(log, `reason="it was killed"`) {
		t.Errorf("the log does not say what was ended:\n%s", log)
	}
	if got := f.state(t, "ask"); got != active {
		t.Errorf("the context is %s: it is to be armed again", got)
	}
	b := f.admitted(t, "ask", root, false)
	defer left(b, "done")
	p := open(t, b)
	f.datagram(t, 9)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var c hostq.Call
	for !p.host.Request(&c) {
		if err := p.host.Wait(ctx, 0); err != nil {
			t.Fatal(err)
		}
	}
	must(t, p.host.Respond(&c, 0, []byte("answer")))
}

// With nobody to ask, the first application would get requests of long ago.
func TestWhoAsksTakesPacketsWhileSomebodyIsAttached(t *testing.T) {
	f := launch(t, "contexts:\n- {name: ask, handler: requests, params: {port: 9}}\n- {name: echo, handler: echo-udp, queue: {}}\n")
	if ask, echo := f.state(t, "ask"), f.state(t, "echo"); ask != installed || echo != active {
		t.Errorf("the context that asks is %s, the other %s", ask, echo)
	}
	a := f.admitted(t, "ask", root, false)
	if got := f.state(t, "ask"); got != active {
		t.Errorf("with an application it is %s", got)
	}
	left(a, "done")
	if got := f.state(t, "ask"); got != installed {
		t.Errorf("after that it is %s", got)
	}
}

func TestStuckHandlersStopTheirContextUntilItIsActivated(t *testing.T) {
	f := launch(t, `
contexts:
- name: stuck
  handler: test-stuck
  rulesets: "nine: udp(9)"
  windows: [{name: own, size: 2MiB}]
  queue: {}
- name: echo
  handler: echo-udp
  params: {port: 7}
`)
	ch := make(chan struct{})
	stuckGate.Store(&ch)
	opened := false
	release := func() {
		if !opened {
			opened = true
			stuckGate.Store(nil)
			close(ch)
		}
	}
	t.Cleanup(release)
	before := f.inUse()
	a := f.admitted(t, "stuck", root, false)
	p := open(t, a)
	f.datagram(t, 9)
	why := <-a.ended()
	if !strings.Contains(why, "the context is stopped: a handler has run for more than 300ms") {
		t.Errorf("the session ends with %q", why)
	}
	if e := p.event(t); e.Kind != hostq.ContextFault {
		t.Errorf("event %+v", e)
	}
	a.release(why)
	if got := f.state(t, "stuck"); got != stopped {
		t.Fatalf("the context is %s", got)
	}
	_, err := f.admit("stuck", root, false)
	fails(t, "attach", err, errBusy, `context "stuck" is stopped (a handler has run for more than 300ms`)
	if got, err := exchange(t, f.lab, 7, "hello"); err != nil || got != "hello" {
		t.Errorf("the other context answers %q, error %v", got, err)
	}
	// Somebody has looked into it. The handler still hangs.
	stuckGate.Store(nil)
	must(t, f.activate("stuck"))
	if got := f.state(t, "stuck"); got != active {
		t.Errorf("the context is %s", got)
	}
	if used := f.inUse(); used <= before {
		t.Errorf("%d bytes are in use, as many as before: the handler may still write there", used)
	}
	b := f.admitted(t, "stuck", root, false)
	q := open(t, b)
	release()
	eventually(t, "memory is free again", func() bool { return f.inUse() == before })
	eventually(t, "the log says so", func() bool {
		return strings.Contains(f.logs.String(), "the handlers have returned: their memory is free")
	})
	if string(q.windows["own"].Bytes()[:4]) != "\x00\x00\x00\x00" || string(p.windows["own"].Bytes()[:4]) != "late" {
		t.Errorf("the late handler has written %q to the new window, %q to the old", q.windows["own"].Bytes()[:4], p.windows["own"].Bytes()[:4])
	}
	left(b, "done")
}

// A handler that hangs keeps the memory of its own context counted, and no other's.
func TestStuckHandlersKeepTheirOwnMemoryOnly(t *testing.T) {
	f := launch(t, `
contexts:
- {name: short, handler: test-stuck, rulesets: "eight: udp(8)", windows: [{name: own, size: 2MiB}]}
- {name: long, handler: test-stuck, rulesets: "nine: udp(9)", windows: [{name: own, size: 4MiB}]}
`)
	before := f.inUse()
	names := []string{"short", "long"}
	var release []func()
	for i, name := range names {
		ch := make(chan struct{})
		release = append(release, sync.OnceFunc(func() { close(ch) }))
		t.Cleanup(release[i])
		a := f.admitted(t, name, root, false)
		in := stuckIn.Load()
		stuckGate.Store(&ch)
		f.datagram(t, 8+i)
		why := <-a.ended()
		stuckGate.Store(nil)
		if stuckIn.Load() != in+1 || !strings.Contains(why, "a handler has run for more than 300ms") {
			t.Fatalf("%s: %d handlers more are stuck, the session ends with %q", name, stuckIn.Load()-in, why)
		}
		a.release(why)
	}
	for _, name := range names { // anew: somebody has looked into it
		must(t, f.activate(name))
	}
	both := f.inUse()
	if both-before < 6<<20 {
		t.Fatalf("%d bytes are counted for two handlers that hang, want 6 MiB at least", both-before)
	}
	release[0]()
	eventually(t, "the memory of the one that has returned is free", func() bool { return f.inUse() <= both-2<<20 })
	if used := f.inUse(); used-before < 4<<20 {
		t.Errorf("%d bytes are counted for the other, which hangs, want 4 MiB at least", used-before)
	}
	release[1]()
	eventually(t, "all memory is free", func() bool { return f.inUse() == before })
}

// The daemon tells once that no packets come, and goes on when they do.
func TestAnInterfaceThatGoesDownIsTold(t *testing.T) {
	f := launch(t, `
contexts:
- {name: ten, handler: test-fault, rulesets: "ten: udp(10)"}
`)
	key := f.devices[0].key
	set := func(end netns.Port, do func(netlink.Link) error) {
		t.Helper()
		must(t, end.NS.Do(func() error {
			link, err := netlink.LinkByName(end.Device)
			if err != nil {
				return err
			}
			return do(link)
		}))
	}
	link := func(want, log string, times int) {
		t.Helper()
		eventually(t, "the interface is told to be "+want, func() bool {
			i, err := f.info("ten")
			must(t, err)
			s, err := f.stats()
			must(t, err)
			return i.Link == want && i.State == active && s[0].Link == want && f.status().Links[0] == want && strings.Count(f.logs.String(), log) >= times
		})
	}
	link("up", "", 0)
	for i, c := range []struct {
		end       netns.Port
		down, log string
	}{
		{f.lab.NIC, "down", "interface " + key + " is down"},
		{f.lab.Host, "no carrier", "interface " + key + " has no carrier"},
	} {
		set(c.end, netlink.LinkSetDown)
		link(c.down, c.log, 1)
		set(c.end, netlink.LinkSetUp)
		link("up", "is up again", i+1)
		if n := strings.Count(f.logs.String(), c.log); n != 1 {
			t.Errorf("the log says %d times %q", n, c.log)
		}
		before, err := f.info("ten")
		must(t, err)
		eventually(t, "packets come again", func() bool {
			f.datagram(t, 10)
			i, err := f.info("ten")
			must(t, err)
			return i.Rules[0].Matched > before.Rules[0].Matched
		})
	}
}

func TestAnInterfaceThatIsGoneIsTold(t *testing.T) {
	f := launch(t, inbox)
	a := f.admitted(t, "inbox", someone(77), false)
	key := f.devices[0].key
	must(t, f.lab.NIC.NS.Do(func() error {
		link, err := netlink.LinkByName(f.lab.NIC.Device)
		if err != nil {
			return err
		}
		return netlink.LinkDel(link)
	}))
	select {
	case why := <-a.ended():
		if !strings.Contains(why, "interface "+key+" is gone") {
			t.Errorf("the session ends with %q", why)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the session goes on")
	}
	left(a, "told")
	i, err := f.info("inbox")
	must(t, err)
	if i.State != ifaceGone || !strings.Contains(i.Error, "is gone: restart the daemon") {
		t.Errorf("the context is %s, error %q", i.State, i.Error)
	}
	_, err = f.admit("inbox", someone(77), false)
	fails(t, "attach", err, errBusy, "is gone")
	fails(t, "activate", f.activate("inbox"), errBusy, "is gone")
	_, err = f.install(&control.Context{Name: "late", Handler: "echo-icmp"})
	fails(t, "install", err, errBusy, "is gone")
	changes, err := f.Reload()
	must(t, err)
	if len(changes) != 1 || !strings.Contains(changes[0], "is gone") {
		t.Errorf("a reload says %q", changes)
	}
	if _, err := f.stats(); err != nil {
		t.Errorf("stats: %v", err)
	}
	if !strings.Contains(f.logs.String(), "interface "+key+" is gone") {
		t.Error("the log does not say so")
	}
}

func TestFaultsOfHandlersAreInTheirLog(t *testing.T) {
	f := launch(t, `
contexts:
- {name: panics, handler: test-fault, params: {panic: true}, rulesets: "nine: udp(9)"}
- {name: fails, handler: test-fault, rulesets: "ten: udp(10)"}
`)
	for _, tc := range []struct {
		name string
		port int
		want []string
	}{
		{"panics", 9, []string{"handler panic: out of cheese", "goroutine ", "contexts_test.go:"}},
		{"fails", 10, []string{"handler failed: the handler returned Fail"}},
	} {
		f.datagram(t, tc.port)
		eventually(t, fmt.Sprintf("the log of %s has %q", tc.name, tc.want), func() bool {
			var text []string
			must(t, f.log(t.Context(), tc.name, -1, false, func(l control.LogLine) error {
				text = append(text, l.Text)
				return nil
			}))
			for _, want := range tc.want {
				if !slices.ContainsFunc(text, func(l string) bool { return strings.Contains(l, want) && !strings.Contains(l, `\n`) }) {
					return false
				}
			}
			return true
		})
	}
}

// What there is of HPU memory is told, whoever has asked for it.
func TestHPUMemoryThatHandlersAskForIsTold(t *testing.T) {
	f := launch(t, `
contexts:
- {name: asks, handler: test-memory, rulesets: "nine: udp(9)"}
- {name: has-more, handler: test-memory, memory: 8KiB, hpu_memory: 1KiB, rulesets: "ten: udp(10)"}
`)
	for name, want := range map[string][2]control.Size{"asks": {4096, 64}, "has-more": {8192, 1024}} {
		i, err := f.info(name)
		must(t, err)
		if got := [2]control.Size{i.Memory, i.HPUMemory}; got != want {
			t.Errorf("context %q has %v of HPU memory, want %v", name, got, want)
		}
	}
}

// However many lines there are, they tell of all failures when the daemon has ended.
func TestTheLogTellsOfAllFailures(t *testing.T) {
	dir := t.TempDir()
	f := launch(t, `
log: {dir: `+dir+`}
contexts:
- {name: fails, handler: test-fault, rulesets: "ten: udp(10)"}
`)
	for range 5 {
		f.datagram(t, 10)
	}
	eventually(t, "all have failed", func() bool {
		i, err := f.info("fails")
		must(t, err)
		return i.HandlerStats.Failed == 5
	})
	must(t, f.Close(t.Context()))
	text, err := os.ReadFile(filepath.Join(dir, "fails.log"))
	must(t, err)
	told := 0
	for _, m := range regexp.MustCompile(`handler failed(?: \(and (\d+) before it\))?: (?:(\d+) more|the handler)`).FindAllSubmatch(text, -1) {
		before, _ := strconv.Atoi(string(m[1]))
		more, _ := strconv.Atoi(string(m[2]))
		if told += before + more; len(m[2]) == 0 {
			told++
		}
	}
	if told != 5 {
		t.Errorf("of 5 failures the log tells %d:\n%s", told, text)
	}
}

// An application that goes before the handler is past its limit, again and again, must
// not have a thread hang each time.
func TestDetachingBeforeTheLimitDoesNotBeginAnew(t *testing.T) {
	f := launch(t, `
contexts:
- name: stuck
  handler: test-stuck
  rulesets: "nine: udp(9)"
`)
	ch := make(chan struct{})
	stuckGate.Store(&ch)
	defer func() {
		stuckGate.Store(nil)
		close(ch)
		eventually(t, "all have returned", func() bool { s, err := f.devices[0].nic.Stats(); return err == nil && s.Stuck == 0 })
	}()
	in := stuckIn.Load()
	a := f.admitted(t, "stuck", root, false)
	f.datagram(t, 9)
	eventually(t, "the handler runs", func() bool { return stuckIn.Load() > in })
	left(a, "it is gone")
	if got := f.state(t, "stuck"); got != stopped {
		t.Errorf("the context is %s, and its handler hangs", got)
	}
	_, err := f.admit("stuck", root, false)
	fails(t, "the next", err, nil, "stopped")
	must(t, f.activate("stuck"))
}

func TestInstallAndRemove(t *testing.T) {
	f := launch(t, "limits: {memory: 8MiB, window: 4MiB}\n")
	_, err := f.install(&control.Context{Name: "x/y", Handler: "deposit"})
	fails(t, "name", err, errInvalid, `name: "x/y": names have`)
	_, err = f.install(&control.Context{Name: "x", Handler: "test-panic"})
	fails(t, "panic", err, errInvalid, "params: handler test-panic: panic: no set")
	_, err = f.install(&control.Context{Name: "x", Handler: "echo-udp", Windows: []control.Window{{Name: "w", Size: 5 << 20}}})
	fails(t, "window", err, errInvalid, "windows[0].size: a window of 5MiB is larger than the limit of 4MiB: raise limits.window")
	_, err = f.install(&control.Context{Name: "x", Handler: "test-init", Params: map[string]any{"fail": true}, Rulesets: "a: udp(9)"})
	fails(t, "init", err, errBusy, `context "x": `)
	fails(t, "init", err, errBusy, "not today")
	if strings.Count(err.Error(), `"x"`) != 1 {
		t.Errorf("%v: want the context named once", err)
	}
	if _, err := f.info("x"); !errors.Is(err, errNotFound) {
		t.Errorf("something is left of a context that was not installed: %v", err)
	}

	one := control.Context{Name: "one", Handler: "test-init", Rulesets: "a: udp(9)", First: 5, Windows: []control.Window{{Name: "w", Size: 4 << 20}}}
	i, err := f.install(&one)
	must(t, err)
	if i.State != active || i.ID < 0 || i.Rules[0].Number != 5 || i.Rules[0].Text != `a: 3&0xffffff00=0x08004500 && 5&0x3fff00ff=0x00000011 && 9&0xffff0000=0x00090000 && 10&0xffff0000=0x00000000:0xffff0000; dst local` {
		t.Errorf("installed: %+v", i)
	}
	_, err = f.install(&one)
	fails(t, "twice", err, errBusy, `context "one" is there already`)
	two := one
	two.Name, two.First = "two", 5
	two.Windows = nil
	_, err = f.install(&two)
	fails(t, "numbers", err, errBusy, `ruleset number 5 is taken by context "one"`)
	two.First, two.Windows = 0, []control.Window{{Name: "a", Size: 3 << 20}, {Name: "b", Size: 2 << 20}}
	used := f.inUse()
	_, err = f.install(&two)
	fails(t, "memory", err, errBusy, `context "two": 5MiB more memory is wanted, and 4MiB of 8MiB are in use: raise limits.memory, or remove contexts`)
	if f.inUse() != used {
		t.Errorf("%d bytes are in use after that, %d before", f.inUse(), used)
	}

	must(t, f.deactivate("one"))
	if got := f.state(t, "one"); got != installed {
		t.Errorf("deactivated, it is %s", got)
	}
	a := f.admitted(t, "one", root, false)
	if ans := a.do(&control.Ask{Do: "activate"}); !strings.Contains(ans.Error, "was deactivated by an administrator, who can undo that: `xspin ctx activate ") {
		t.Errorf("an application activates it: %q", ans.Error)
	}
	left(a, "done")
	if got := f.state(t, "one"); got != installed {
		t.Errorf("the application has gone, and it is %s", got)
	}
	must(t, f.activate("one"))

	// Memory is not unmapped under whoever reads it, nor under whoever is attached.
	b := f.admitted(t, "one", root, false)
	fds := b.descriptors()
	must(t, f.remove("one"))
	if why := <-b.ended(); why != whyRemoved {
		t.Errorf("the session ends with %q", why)
	}
	if _, err := unix.FcntlInt(uintptr(fds[0]), unix.F_GETFD, 0); err != nil {
		t.Errorf("a descriptor that may be under way is closed: %v", err)
	}
	if ans := b.do(&control.Ask{Do: "activate"}); !strings.Contains(ans.Error, "no context") {
		t.Errorf("activate after removal: %q", ans.Error)
	}
	left(b, "told")
	if f.inUse() != 0 {
		t.Errorf("%d bytes are in use after removal", f.inUse())
	}
	fails(t, "remove", f.remove("one"), errNotFound, `no context "one"`)
	fails(t, "memory", f.withMemory("one", -1, nil), errNotFound, "one")
}

func TestHPUMemoryIsHeldWhileSomebodyUsesIt(t *testing.T) {
	f := launch(t, "")
	_, err := f.install(&control.Context{Name: "m", Handler: "test-init", Rulesets: "a: udp(9)", Memory: 100, Activate: manually})
	must(t, err)
	fails(t, "no memory of HPUs", f.withMemory("m", 0, nil), errInvalid, "the HPUs of context \"m\" have no memory")
	fails(t, "no such HPU", f.withMemory("m", 2, nil), errInvalid, "HPU 2: want 0 to 1")
	must(t, f.withMemory("m", -1, func(b []byte) error {
		must(t, f.remove("m"))
		if f.inUse() == 0 {
			t.Error("the memory is free already")
		}
		copy(b, "still there")
		return nil
	}))
	if f.inUse() != 0 {
		t.Errorf("%d bytes are in use", f.inUse())
	}
}

func TestTriggeredContexts(t *testing.T) {
	f := launch(t, "")
	_, err := f.install(&control.Context{
		Name: "push", Handler: "push", Params: map[string]any{"to": fmt.Sprintf("%v:5000", f.lab.Host.Addr.Addr())},
		Windows: []control.Window{{Name: "out", Size: 1 << 20}}, Queue: &control.Queue{}, Activate: manually,
	})
	must(t, err)
	if i, err := f.info("push"); err != nil || !i.Triggered || len(i.Rules) != 0 {
		t.Errorf("%+v, error %v", i, err)
	}
	fails(t, "not active", f.trigger("push", control.Trigger{}), errBusy, `context "push" is installed: it must be active`)
	must(t, f.activate("push"))
	fails(t, "no window", f.trigger("push", control.Trigger{Window: "in"}), errInvalid, `no window "in"`)
	fails(t, "bounds", f.trigger("push", control.Trigger{Window: "out", Offset: 1 << 20, Length: 1}), errInvalid, "out of bounds")
	a := f.admitted(t, "push", root, false)
	defer left(a, "done")
	pushed(t, f.lab, 5000, func() {
		if ans := a.do(&control.Ask{Do: "trigger", Trigger: &control.Trigger{Window: "out", Length: 64}}); ans.Error != "" {
			t.Error(ans.Error)
		}
	})
}

func TestCloseEndsEverything(t *testing.T) {
	f := launch(t, inbox)
	a := f.admitted(t, "inbox", root, false)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if why := <-a.ended(); why != whyClosing {
			t.Errorf("the session ends with %q", why)
		}
		left(a, "told")
	}()
	must(t, f.Close(context.Background()))
	<-done
	must(t, f.Close(context.Background()))
	_, err := f.admit("inbox", root, false)
	fails(t, "attach", err, nil, "")
	_, err = f.install(&control.Context{Name: "late", Handler: "echo-icmp"})
	fails(t, "install", err, errBusy, whyClosing)
}

func TestFailedStartLeavesNothing(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	dir := t.TempDir()
	fds, maps := openResources(t)
	for name, tc := range map[string]struct{ text, want string }{
		"init":      {"contexts:\n- {name: ok, handler: deposit, windows: [{name: in, size: 2MiB}]}\n- {name: bad, handler: test-init, params: {fail: true}, rulesets: 'a: udp(9)'}\n", `context "bad"`},
		"interface": {"", `no such network interface`},
		"namespace": {"", `open namespace "xspin-no-such"`},
	} {
		text := configText(lab, dir) + tc.text
		switch name {
		case "interface":
			text = strings.Replace(text, lab.NIC.Device, "nothing0", 1)
		case "namespace":
			text = strings.Replace(text, lab.NIC.Namespace, "xspin-no-such", 1)
		}
		cfg, err := Load(writeFile(t, filepath.Join(dir, "x.yaml"), text))
		must(t, err)
		_, err = Start(cfg, Options{KeepPrivileges: true, Logger: slog.New(slog.DiscardHandler)})
		fails(t, name, err, nil, tc.want)
		if _, err := os.Stat(cfg.Socket); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: the socket is left: %v", name, err)
		}
	}
	eventually(t, "nothing is left", func() bool {
		f, m := openResources(t)
		return f <= fds+2 && m <= maps+8 // of the runtime
	})
}

// resources returns how many descriptors and BPF mappings the process has.
func openResources(t *testing.T) (fds, maps int) {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	text, err := os.ReadFile("/proc/self/maps")
	must(t, err)
	return len(list), strings.Count(string(text), "anon_inode:bpf-map")
}

func TestAThousandSessionsLeaveNothing(t *testing.T) {
	f := launch(t, `
contexts:
- name: small
  handler: test-init
  rulesets: "a: udp(9)"
  windows: [{name: w, size: 4KiB}]
  memory: 16
  queue: {events: 16, requests: 16, payload: 64}
  activate: manual
`)
	left(f.admitted(t, "small", root, false), "the first")
	fds, maps := openResources(t)
	used := f.inUse()
	for i := range 1000 {
		a := f.admitted(t, "small", root, false)
		if i%100 == 0 {
			p := open(t, a)
			for _, m := range p.windows {
				must(t, m.Close())
			}
			must(t, p.host.Close())
		}
		left(a, "next")
	}
	if n := f.inUse(); n != used {
		t.Errorf("%d bytes are in use, %d before", n, used)
	}
	eventually(t, "descriptors and mappings are as many as before", func() bool {
		n, m := openResources(t)
		return n <= fds && m <= maps
	})
}

// begin sends the first segment of a message that never ends.
func (f *fixture) begin(t *testing.T) {
	t.Helper()
	must(t, f.lab.Host.NS.Do(func() error {
		c, err := net.Dial("udp", fmt.Sprintf("%v:%d", f.lab.NIC.Addr.Addr(), slmp.Port))
		if err != nil {
			return err
		}
		defer c.Close()
		b := make([]byte, slmp.HeaderLen, 20)
		slmp.Header{Flags: slmp.SYN, ID: 1}.Put(b)
		_, err = c.Write(append(b, "begin"...))
		return err
	}))
	eventually(t, "a message is open", func() bool {
		i, err := f.info("inbox")
		return err == nil && i.MessageStats.Open == 1
	})
}

func TestOpenMessagesEndWithTheirApplication(t *testing.T) {
	always := strings.Replace(inbox, "activate: attach", "activate: start", 1)
	f := launch(t, always)
	f.begin(t)
	// Nobody is attached, and still it is not to be taken away.
	f.write(t, "")
	_, err := f.Reload()
	fails(t, "reload", err, errBusy, `context "inbox" would be changed or removed, and it is live: 1 messages are open; wait for their ends, or `+"`xspin ctx rm inbox`"+`, which ends them, and reload again`)
	left(f.admitted(t, "inbox", root, false), "gone")
	if !strings.Contains(f.logs.String(), "messages_ended=1") {
		t.Error("the log does not say that a message was ended")
	}
	if got := f.state(t, "inbox"); got != active {
		t.Errorf("the context is %s", got)
	}
	f.reloaded(t, "", "window common removed", "window ours removed", "context inbox removed")
}

// An application that takes no events has its senders wait, and can go all the same.
func TestAnApplicationThatHearsNothingCanGo(t *testing.T) {
	f := launch(t, strings.Replace(inbox, "events: 16", "events: 1", 1))
	used := f.inUse()
	a := f.admitted(t, "inbox", root, false)
	p := open(t, a)
	must(t, f.send(t, []byte("one"))) // its event fits
	sent := make(chan error, 1)
	go func() { sent <- f.send(t, []byte("two")) }()
	eventually(t, "a message waits for room", func() bool {
		i, err := f.info("inbox")
		return err == nil && i.Pair.EventsFull > 0
	})
	left(a, "it was killed")
	if f.inUse() != used {
		t.Errorf("%d bytes are in use, %d before: %s", f.inUse(), used, f.logs)
	}
	// The sender goes on trying, and reaches the next.
	b := f.admitted(t, "inbox", root, false)
	defer left(b, "done")
	q := open(t, b)
	must(t, <-sent)
	if e := q.event(t); e.Length != 3 || string(q.windows["in"].Bytes()[:3]) != "two" {
		t.Errorf("event %+v", e)
	}
	if e := p.event(t); e.Length != 3 {
		t.Errorf("the first application has missed its event: %+v", e)
	}
}

// A process that goes does not wait for the memory of the next one, which does.
func TestDetachingDoesNotWaitForTheNextLife(t *testing.T) {
	f := launch(t, "contexts:\n- {name: c, handler: test-made, rulesets: 'a: udp(9)', windows: [{name: w, size: 1MiB}]}\n")
	a := f.admitted(t, "c", root, false)
	gate := make(chan struct{})
	makeGate.Store(&gate)
	defer makeGate.Store(nil)
	open := sync.OnceFunc(func() { close(gate) })
	defer open()
	released := make(chan struct{})
	go func() {
		a.release("done")
		close(released)
	}()
	select {
	case <-released:
	case <-time.After(10 * time.Second):
		t.Fatal("a process waits for the life after it")
	}
	if i, err := f.info("c"); err != nil || i.State != installing {
		t.Errorf("the context is %+v: %v", i, err)
	}
	next := make(chan attached, 1)
	go func() {
		b, err := f.admit("c", root, false)
		if err != nil {
			t.Error(err)
		}
		next <- b
	}()
	select {
	case <-next:
		t.Error("somebody is attached to a context that is being made")
	case <-time.After(50 * time.Millisecond):
	}
	makeGate.Store(nil)
	open()
	b := (<-next).(*attachment)
	if b.has == a.has || f.contexts["c"].has != b.has {
		t.Error("the next process has another life than the context")
	}
	left(b, "done")
}

// The context of an application that holds what has come starts over in vain for nobody:
// neither does another one fail that starts over, nor does it find less credit.
func TestContextsKeepTheirCreditWhileOthersBeginAnew(t *testing.T) {
	echo := func(name string, port int) string {
		return fmt.Sprintf("- {name: %s, handler: echo-udp, params: {port: %d}}\n", name, port)
	}
	f := launch(t, "contexts:\n- {name: holder, handler: echo-host, params: {port: 7}, queue: {}}\n"+echo("a", 8)+
		"- {name: b, handler: deposit, windows: [{name: w, size: 1MiB}]}\n")
	credits := func() map[string]uint32 {
		all := map[string]uint32{}
		s, err := f.stats()
		must(t, err)
		for _, c := range s[0].Contexts {
			all[c.Name] = c.Credits
		}
		return all
	}
	before := credits()
	// It takes whatever credit it gets, and answers nothing.
	h := f.admitted(t, "holder", root, false)
	done := make(chan struct{})
	var sender sync.WaitGroup
	defer sender.Wait()
	defer close(done)
	sender.Go(func() {
		_ = f.lab.Host.NS.Do(func() error {
			c, err := net.Dial("udp", fmt.Sprintf("%v:7", f.lab.NIC.Addr.Addr()))
			if err != nil {
				t.Error(err)
				return err
			}
			defer c.Close()
			for {
				select {
				case <-done:
					return nil
				case <-time.After(time.Millisecond):
				}
				for range 64 {
					_, _ = c.Write([]byte("hold this"))
				}
			}
		})
	})
	eventually(t, "it has all it may", func() bool {
		i, err := f.info("holder")
		return err == nil && i.Pair.Outstanding >= int(before["holder"])
	})
	for range 3 {
		start := time.Now()
		left(f.admitted(t, "b", root, false), "done")
		left(f.admitted(t, "b", root, false), "again")
		if d := time.Since(start); d > 5*time.Second {
			t.Errorf("to start over twice took %v", d)
		}
	}
	b := f.admitted(t, "b", root, false)
	if now := credits(); !maps.Equal(now, before) {
		t.Errorf("credits are %v, and were %v", now, before)
	}
	f.answers(t, 8)
	must(t, f.send(t, []byte("there is credit for this")))
	left(b, "done")
	left(h, "done")
}
