// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xspin/xspin/control"
)

// echoes is a context of the configuration that sends datagrams to a port back.
func echoes(name string, port int, more string) string {
	if more != "" {
		more = ", " + more
	}
	return fmt.Sprintf("- {name: %s, handler: echo-udp, params: {port: %d}%s}\n", name, port, more)
}

// answers says whether a port answers, and with what.
func (f *fixture) answers(t *testing.T, port int) {
	t.Helper()
	if got, err := exchange(t, f.lab, port, "hello"); err != nil || got != "hello" {
		t.Errorf("port %d answers %q, error %v", port, got, err)
	}
}

// silent checks that no context takes datagrams to a port.
func (f *fixture) silent(t *testing.T, port int) {
	t.Helper()
	for _, i := range f.infos() {
		for _, r := range i.Rules {
			if r.Number >= 0 && strings.Contains(r.Text, fmt.Sprintf("9&0xffff0000=0x%04x0000", port)) {
				t.Errorf("context %s takes port %d", i.Name, port)
			}
		}
	}
}

func (f *fixture) reloaded(t *testing.T, text string, want ...string) {
	t.Helper()
	f.write(t, text)
	got, err := f.Reload()
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(append([]string{}, got...), append([]string{}, want...)) {
		t.Errorf("changes %q, want %q", got, want)
	}
}

func TestReloadChangesWhatHasChanged(t *testing.T) {
	shared := func(size string) string { return "windows: [{name: s, size: " + size + "}]\n" }
	users := "windows: [{name: s}]"
	f := launch(t, shared("1MiB")+"contexts:\n"+echoes("a", 7, "first: 3")+echoes("b", 8, "first: 4")+echoes("c", 9, users)+echoes("d", 10, ""))
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	id := func(name string) (int, time.Time) {
		t.Helper()
		i, err := f.info(name)
		must(nil, err)
		return i.ID, i.Since
	}
	dID, dSince := id("d")
	must(f.install(&control.Context{Name: "other", Handler: "echo-udp", Params: map[string]any{"port": 11}}))

	f.reloaded(t, shared("1MiB")+"contexts:\n"+echoes("a", 7, "first: 3")+echoes("b", 8, "first: 4")+echoes("c", 9, users)+echoes("d", 10, ""))
	// Two contexts take each other's numbers, a third one's window grows, and so on.
	f.reloaded(t, "admins: {users: [5]}\n"+shared("2MiB")+"contexts:\n"+echoes("a", 17, "first: 4")+echoes("b", 8, "first: 3")+echoes("c", 9, users)+echoes("d", 10, "")+echoes("e", 12, "attach: {users: [1]}"),
		"admins", "window s changed", "context a changed: began anew", "context b changed: began anew", "context c changed: began anew", "context e added", "other ruleset numbers: other")
	for _, port := range []int{17, 8, 9, 10, 11, 12} {
		f.answers(t, port)
	}
	f.silent(t, 7)
	if n, since := id("d"); n != dID || since != dSince {
		t.Error("a context that has not changed was touched")
	}
	if err := f.mayAdmin(someone(5)); err != nil {
		t.Error(err)
	}
	// Who may attach can change while somebody is attached.
	a := f.admitted(t, "e", someone(1), false)
	f.reloaded(t, "limits: {memory: 100MiB}\ncontexts:\n"+echoes("d", 10, "")+echoes("e", 12, "attach: {users: [2]}"),
		"admins", "limits", "window s removed", "context e changed: who may attach", "context a removed", "context b removed", "context c removed", "other ruleset numbers: d, e, other")
	select {
	case why := <-a.ended():
		t.Errorf("the application is sent away: %s", why)
	default:
	}
	left(a, "done")
	_, err := f.admit("e", someone(1), false)
	fails(t, "attach", err, errDenied, "not for user 1")
	left(f.admitted(t, "e", someone(2), false), "done")
	f.silent(t, 8)
	if n, since := id("d"); n != dID || since != dSince {
		t.Error("a context that has not changed was touched")
	}
	f.answers(t, 11)
	if used := f.inUse(); used != 0 {
		t.Errorf("%d bytes are in use, of contexts without memory", used)
	}
}

func TestReloadThatCannotBeChangesNothing(t *testing.T) {
	base := "contexts:\n" + echoes("a", 7, "windows: [{name: w, size: 1MiB}]") + echoes("b", 8, "queue: {}")
	f := launch(t, base)
	before := func() string {
		var all []string
		for _, i := range f.infos() {
			all = append(all, fmt.Sprint(i.Name, i.ID, i.State, i.Params, i.Rules[0].Number, i.Rules[0].Text))
		}
		return fmt.Sprint(all, f.inUse(), len(f.windows))
	}
	a := f.admitted(t, "a", root, false)
	_, err := f.install(&control.Context{Name: "other", Handler: "echo-udp", Params: map[string]any{"port": 11}, First: 2})
	must(t, err)
	was := before()
	bad := "- {name: bad, handler: test-init, params: {fail: true}, rulesets: 'x: udp(99)'}\n"
	for _, tc := range []struct {
		name, text string
		kind       error
		want       []string
	}{
		{"a typo", "contxts: []\n", errInvalid, []string{`unknown key "contxts": is it contexts?`, "x.yaml:4:1"}},
		{"what takes a restart", "log: {lines: 5}\nmetrics: :9999\nuser: nobody\n" + base, errInvalid,
			[]string{"log has changed: that takes a restart", "metrics has changed", "user has changed"}},
		{"a live context changes", "contexts:\n" + echoes("a", 17, "") + echoes("b", 18, ""), errBusy,
			[]string{`context "a" would be changed or removed, and it is live: application (pid 1, uid 0) is attached; stop it, or ` + "`xspin ctx rm a`" + `, which detaches it, and reload again`}},
		{"a live context goes, and another's name is taken", "contexts:\n" + echoes("other", 18, ""), errBusy,
			[]string{`context "other" was installed by other means than the file: remove it first`, `context "a" would be changed or removed`}},
		{"a context cannot be installed", "windows: [{name: s, size: 1MiB}]\n" + base[:strings.Index(base, "- {name: b")] + echoes("c", 20, "") + echoes("b", 28, "") + bad, errBusy,
			[]string{`context "bad"`, "not today"}},
		{"a context that goes cannot be replaced", base[:strings.Index(base, "- {name: b")] + bad, errBusy,
			[]string{`context "bad"`, "not today"}},
		{"a number is taken", base[:strings.Index(base, "- {name: b")] + echoes("b", 8, "first: 2"), errBusy, []string{"ruleset number 2 is taken by context"}},
	} {
		f.write(t, tc.text)
		changes, err := f.Reload()
		for _, want := range tc.want {
			fails(t, tc.name, err, tc.kind, want)
		}
		if changes != nil {
			t.Errorf("%s: changes %q", tc.name, changes)
		}
		// A life that was put back has kept its number; its ruleset may have another.
		if now := before(); now != was {
			t.Errorf("%s: now\n%s\nbefore\n%s", tc.name, now, was)
		}
		for _, port := range []int{7, 8, 11} {
			f.answers(t, port)
		}
		for _, port := range []int{17, 18, 28, 20, 99} {
			f.silent(t, port)
		}
		if t.Failed() {
			t.FailNow()
		}
	}
	select {
	case why := <-a.ended():
		t.Errorf("the application was sent away: %s", why)
	default:
	}
	left(a, "done")
	if !strings.Contains(f.logs.String(), "reload failed, and nothing was changed") {
		t.Error("the log does not say that a reload failed")
	}
}

// Each way out that a refused reload names leads out.
func TestWaysOutOfAReload(t *testing.T) {
	base, changed := "contexts:\n"+echoes("a", 7, "queue: {}"), "contexts:\n"+echoes("a", 17, "queue: {}")
	for name, tc := range map[string]struct {
		leave func(t *testing.T, f *fixture, a *attachment)
		told  string
	}{
		"the application stops": {func(_ *testing.T, _ *fixture, a *attachment) { left(a, "done") }, "context a changed: began anew"},
		"the context is removed": {func(t *testing.T, f *fixture, a *attachment) {
			must(t, f.remove("a"))
			<-a.ended()
			left(a, "done")
		}, "context a added"},
	} {
		t.Run(name, func(t *testing.T) {
			f := launch(t, base)
			a := f.admitted(t, "a", root, false)
			f.write(t, changed)
			_, err := f.Reload()
			fails(t, "reload", err, errBusy, "and reload again")
			tc.leave(t, f, a)
			f.reloaded(t, changed, tc.told)
			f.answers(t, 17)
		})
	}
}

// Whoever attaches while a reload fails has the life that was there before, and stays.
func TestAttachWhileAReloadFails(t *testing.T) {
	in := func(size, more string) string {
		return "- {name: in, handler: deposit, activate: attach, windows: [{name: w, size: " + size + "}]" + more + "}\n"
	}
	f := launch(t, "contexts:\n"+in("1MiB", ", attach: {users: [1]}"))
	h, err := f.find("in")
	must(t, err)
	before := h.ctx
	// What comes first is undone last, and takes its time.
	bad := echoes("first", 98, "windows: [{name: v, size: 64MiB}]") +
		"- {name: bad, handler: test-init, params: {fail: true, sleep: 20}, rulesets: 'x: udp(99)'}\n"
	for round := range 20 {
		// It would let another user in, and take the administrators away.
		f.write(t, "admins: {users: [3]}\ncontexts:\n"+in("2MiB", ", attach: {users: [2], observers: true}")+bad)
		failed := make(chan error, 1)
		go func() {
			_, err := f.Reload()
			failed <- err
		}()
		eventually(t, "the new life is there", func() bool {
			h.mu.Lock()
			defer h.mu.Unlock()
			return h.ctx != nil && h.ctx != before
		})
		denied := make(chan error, 1)
		go func() {
			_, err := f.admit("in", someone(2), false)
			denied <- err
		}()
		if err := f.mayAdmin(someone(3)); err == nil {
			t.Error("who would be an administrator is one already")
		}
		a := f.admitted(t, "in", someone(1), false)
		fails(t, "reload", <-failed, errBusy, "not today")
		fails(t, "attach", <-denied, errDenied, "not for user 2")
		if h.ctx != before || a.has != h.has || h.owner != a || h.currentState() != active {
			t.Fatalf("round %d: context %p is %s, its application has %p of %p; before it was %p", round, h.ctx, h.state, a.has, h.has, before)
		}
		msg := bytes.Repeat([]byte{byte(round + 1)}, 10_000)
		must(t, f.send(t, msg))
		if got := open(t, a).windows["w"].Bytes()[:len(msg)]; !bytes.Equal(got, msg) {
			t.Fatalf("round %d: the message is not in the application's window", round)
		}
		select {
		case why := <-a.ended():
			t.Fatalf("round %d: the application is sent away: %s", round, why)
		default:
		}
		left(a, "done")
		before = h.ctx
	}
}

func TestReloadWithoutFile(t *testing.T) {
	d := &Daemon{}
	_, err := d.Reload()
	fails(t, "reload", err, errInvalid, "without a configuration file")
}

// Under a sender that counts what comes back, contexts come, change and go.
func TestUnchangedContextsLoseNoPacketInReloads(t *testing.T) {
	always := "contexts:\n" + echoes("a", 7, "")
	f := launch(t, always)
	var stop atomic.Bool
	var sent uint64
	failed := make(chan error, 1)
	go func() {
		failed <- f.lab.Host.NS.Do(func() error {
			c, err := net.Dial("udp", fmt.Sprintf("%v:7", f.lab.NIC.Addr.Addr()))
			if err != nil {
				return err
			}
			defer c.Close()
			b := make([]byte, 100)
			const burst = 32
			for !stop.Load() {
				for i := range uint64(burst) {
					binary.BigEndian.PutUint64(b, sent+i)
					if _, err := c.Write(b); err != nil {
						return err
					}
				}
				c.SetReadDeadline(time.Now().Add(5 * time.Second))
				var got [burst]bool
				for range burst {
					if _, err := c.Read(b); err != nil {
						return fmt.Errorf("of datagrams %d to %d these came back: %v: %w", sent, sent+burst-1, got, err)
					}
					n := binary.BigEndian.Uint64(b) - sent
					if n >= burst || got[n] {
						return fmt.Errorf("datagram %d comes back out of place", n+sent)
					}
					got[n] = true
				}
				sent += burst
			}
			return nil
		})
	}()
	for i := range 12 {
		others := always + echoes("b", 100+i, "windows: [{name: w, size: 1MiB}]")
		if i%3 != 0 {
			others += echoes("c", 50, "queue: {}, credits: 100")
		}
		f.write(t, others)
		if _, err := f.Reload(); err != nil {
			t.Error(err)
		}
	}
	stop.Store(true)
	if err := <-failed; err != nil {
		t.Error(err)
	}
	eventually(t, "all that were sent are counted", func() bool {
		i, err := f.info("a")
		must(t, err)
		return i.HandlerStats.Handled >= sent
	})
	s, err := f.stats()
	must(t, err)
	i, err := f.info("a")
	must(t, err)
	if i.HandlerStats.Handled != sent || sent == 0 || s[0].Program.Refused != 0 {
		t.Errorf("%d datagrams were sent, %d handled, %d refused", sent, i.HandlerStats.Handled, s[0].Program.Refused)
	}
	t.Logf("%d datagrams during 12 reloads", sent)
}
