// SPDX-License-Identifier: Apache-2.0

// Package chromium shows pages to tests in a Chromium without a screen, and tells what
// became of them: it speaks the DevTools protocol over a pipe, so there is no port that
// somebody else could find.
package chromium

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/xspin/xspin/internal/testenv"
)

// patience is how long the browser may take over anything that it is asked.
func patience() time.Duration { return 30 * time.Second * testenv.Slowness() }

// A Browser is a running Chromium with a profile of its own, which reaches nothing but
// this machine. It is safe for concurrent use, its pages are not.
type Browser struct {
	t      testing.TB
	cmd    *exec.Cmd
	to     *os.File // orders
	from   *os.File // answers and events
	stderr bytes.Buffer
	ended  chan struct{} // closed when it says nothing any more

	mu    sync.Mutex // of what is below, and of writing
	last  int
	calls map[int]chan message
	pages map[string]*Page // by session
}

// A message is any of the protocol: an order, its answer, or an event.
type message struct {
	ID      int             `json:"id,omitempty"`
	Session string          `json:"sessionId,omitempty"`
	Method  string          `json:"method,omitempty"`
	Params  json.RawMessage `json:"params,omitempty"`
	Result  json.RawMessage `json:"result,omitempty"`
	Error   *struct {
		Message string `json:"message"`
	} `json:"error,omitempty"`
}

// Start starts a browser, which ends with the test.
func Start(t testing.TB) *Browser {
	t.Helper()
	profile := t.TempDir()
	// Root may not have Chromium's sandbox. Names are not looked up, so that a page with
	// an address of the network in it fails wherever the test runs.
	cmd := exec.Command("chromium-headless-shell", "--remote-debugging-pipe", "--no-sandbox", "--no-zygote", "--disable-gpu",
		"--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking", "--disable-component-update",
		"--disable-breakpad", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1, EXCLUDE [::1]",
		"--user-data-dir="+profile, "about:blank")
	cmd.Env = append(os.Environ(), "HOME="+profile, "XDG_CONFIG_HOME="+profile, "XDG_CACHE_HOME="+profile, "TZ=UTC")
	b := &Browser{t: t, cmd: cmd, ended: make(chan struct{}), calls: map[int]chan message{}, pages: map[string]*Page{}}
	cmd.Stderr = &b.stderr
	cmd.WaitDelay = 5 * time.Second
	// A group of its own, to end its children with it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	orders, to, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	from, answers, err := os.Pipe()
	if err != nil {
		t.Fatal(errors.Join(err, orders.Close(), to.Close()))
	}
	b.to, b.from = to, from
	cmd.ExtraFiles = []*os.File{orders, answers} // 3 and 4
	err = cmd.Start()
	if err := errors.Join(err, orders.Close(), answers.Close()); err != nil {
		t.Fatal(errors.Join(fmt.Errorf("start Chromium: %w", err), to.Close(), from.Close()))
	}
	go b.listen()
	t.Cleanup(b.end)
	return b
}

// end asks the browser to, and makes it.
func (b *Browser) end() {
	go func() { _, _ = b.call("", "Browser.close", nil) }()
	select {
	case <-b.ended:
	case <-time.After(5 * time.Second * testenv.Slowness()):
	}
	// Whoever is left of the group; the leader is not reaped, so the number is still ours.
	_ = syscall.Kill(-b.cmd.Process.Pid, syscall.SIGKILL)
	_ = b.cmd.Wait()
	_ = b.to.Close()
	_ = b.from.Close()
	<-b.ended
	if b.t.Failed() && b.stderr.Len() > 0 {
		b.t.Logf("Chromium's standard error:\n%s", b.stderr.Bytes())
	}
}

// listen takes answers and events, until the browser ends.
func (b *Browser) listen() {
	defer close(b.ended)
	for r := bufio.NewReader(b.from); ; {
		text, err := r.ReadBytes(0)
		if err != nil {
			return
		}
		var m message
		if err := json.Unmarshal(text[:len(text)-1], &m); err != nil {
			continue // nobody waits for what has no number
		}
		b.mu.Lock()
		if ch := b.calls[m.ID]; m.ID != 0 && ch != nil {
			delete(b.calls, m.ID)
			ch <- m
		} else if p := b.pages[m.Session]; p != nil {
			p.event(&m)
		}
		b.mu.Unlock()
	}
}

// call gives an order and waits for the answer.
func (b *Browser) call(session, method string, params any) (json.RawMessage, error) {
	raw, err := json.Marshal(params)
	if err != nil {
		return nil, err
	}
	ch := make(chan message, 1)
	b.mu.Lock()
	b.last++
	b.calls[b.last] = ch
	text, err := json.Marshal(message{ID: b.last, Session: session, Method: method, Params: raw})
	if err == nil {
		_, err = b.to.Write(append(text, 0))
	}
	b.mu.Unlock()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", method, err)
	}
	select {
	case m := <-ch:
		if m.Error != nil {
			return nil, fmt.Errorf("%s: %s", method, m.Error.Message)
		}
		return m.Result, nil
	case <-b.ended:
		return nil, fmt.Errorf("%s: the browser has ended", method)
	case <-time.After(patience()):
		return nil, fmt.Errorf("%s: no answer in %v", method, patience())
	}
}

// A Page is a tab. All methods fail the test if the browser does not do as it is told.
type Page struct {
	b       *Browser
	session string

	// Under b.mu.
	loaded   chan struct{}     // closed when what was opened last is there
	urls     map[string]string // of requests
	console  []string
	problems []string
}

// Page makes an empty tab of this size, in pixels.
func (b *Browser) Page(width, height int) *Page {
	b.t.Helper()
	var target struct{ TargetID, SessionID string }
	p := &Page{b: b, loaded: make(chan struct{}), urls: map[string]string{}}
	p.do("Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	p.do("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &target)
	p.session = target.SessionID
	b.mu.Lock()
	b.pages[p.session] = p
	b.mu.Unlock()
	for _, domain := range []string{"Page", "Runtime", "Log", "Network"} {
		p.do(domain+".enable", nil, nil)
	}
	p.Resize(width, height)
	return p
}

// do gives the page an order, and stores the answer.
func (p *Page) do(method string, params, into any) {
	p.b.t.Helper()
	raw, err := p.b.call(p.session, method, params)
	if err == nil && into != nil {
		err = json.Unmarshal(raw, into)
	}
	if err != nil {
		p.b.t.Fatalf("Chromium: %v", err)
	}
}

// Resize gives the page another size, in pixels.
func (p *Page) Resize(width, height int) {
	p.b.t.Helper()
	p.do("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false}, nil)
}

// Media sets a feature that style sheets ask for, such as prefers-color-scheme to dark.
func (p *Page) Media(feature, value string) {
	p.b.t.Helper()
	p.do("Emulation.setEmulatedMedia", map[string]any{"features": []any{map[string]any{"name": feature, "value": value}}}, nil)
}

// Open opens an address and waits until it is loaded.
func (p *Page) Open(url string) {
	p.b.t.Helper()
	loaded := make(chan struct{})
	p.b.mu.Lock()
	p.loaded = loaded
	p.b.mu.Unlock()
	var answer struct{ ErrorText string }
	p.do("Page.navigate", map[string]any{"url": url}, &answer)
	if answer.ErrorText != "" {
		p.b.t.Fatalf("Chromium: open %s: %s", url, answer.ErrorText)
	}
	select {
	case <-loaded:
	case <-time.After(patience()):
		p.b.t.Fatalf("Chromium: %s is not loaded after %v", url, patience())
	}
}

// Eval evaluates JavaScript in the page, waits if it is a promise, and stores its JSON.
func (p *Page) Eval(script string, into any) {
	p.b.t.Helper()
	if err := p.eval(script, into); err != nil {
		p.b.t.Fatalf("Chromium: %s: %v", script, err)
	}
}

func (p *Page) eval(script string, into any) error {
	raw, err := p.b.call(p.session, "Runtime.evaluate", map[string]any{"expression": script, "awaitPromise": true, "returnByValue": true})
	if err != nil {
		return err
	}
	var answer struct {
		Result    struct{ Value json.RawMessage }
		Exception *exception `json:"exceptionDetails"`
	}
	if err := json.Unmarshal(raw, &answer); err != nil {
		return err
	}
	if answer.Exception != nil {
		return errors.New(answer.Exception.String())
	}
	if into == nil {
		return nil
	}
	if answer.Result.Value == nil {
		return errors.New("the value is undefined")
	}
	return json.Unmarshal(answer.Result.Value, into)
}

// Until waits until JavaScript gives true. If it does not, the test fails with what why,
// JavaScript too, gives then.
func (p *Page) Until(script, why string) {
	p.b.t.Helper()
	for end := time.Now().Add(patience()); ; time.Sleep(20 * time.Millisecond) {
		var is bool
		err := p.eval(script, &is)
		if err == nil && is {
			return
		}
		if time.Now().After(end) {
			var text any
			p.b.t.Fatalf("Chromium: %s is not true after %v (%v): %s is %v, %v", script, patience(), err, why, p.eval(why, &text), text)
		}
	}
}

// Press presses a key by its name, such as Tab, Enter, ArrowDown, or a letter; with shift
// held if its name begins with Shift+.
func (p *Page) Press(key string) {
	p.b.t.Helper()
	name, shift := strings.CutPrefix(key, "Shift+")
	code := map[string]int{"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}[name]
	event := map[string]any{"type": "keyDown", "key": name, "code": name, "windowsVirtualKeyCode": code}
	switch {
	case name == "Enter":
		event["text"] = "\r"
	case len(name) == 1:
		event["text"] = name
	}
	if shift {
		event["modifiers"] = 8
	}
	p.do("Input.dispatchKeyEvent", event, nil)
	event["type"] = "keyUp"
	delete(event, "text")
	p.do("Input.dispatchKeyEvent", event, nil)
}

// Screenshot writes the whole page to a file, as PNG.
func (p *Page) Screenshot(file string) {
	p.b.t.Helper()
	var answer struct{ Data string }
	p.do("Page.captureScreenshot", map[string]any{"format": "png", "captureBeyondViewport": true}, &answer)
	png, err := base64.StdEncoding.DecodeString(answer.Data)
	if err == nil {
		err = os.WriteFile(file, png, 0o644)
	}
	if err != nil {
		p.b.t.Fatalf("screenshot: %v", err)
	}
}

// Console returns what the page has printed, each line with its kind before it.
func (p *Page) Console() []string {
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	return append([]string{}, p.console...)
}

// Problems returns what went wrong in the page since it was made: warnings and errors on
// the console, exceptions that nobody has caught, requests that failed.
func (p *Page) Problems() []string {
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	return append([]string{}, p.problems...)
}

// An exception is one of JavaScript's.
type exception struct {
	Text      string
	URL       string
	Line      int `json:"lineNumber"` // from 0
	Exception struct{ Description, Value any }
}

func (e *exception) String() string {
	s := e.Text
	for _, v := range []any{e.Exception.Description, e.Exception.Value} {
		if v != nil {
			s += fmt.Sprintf(" %v", v)
		}
	}
	return fmt.Sprintf("%s:%d: %s", e.URL, e.Line+1, s)
}

// event notes one. b.mu is held.
func (p *Page) event(m *message) {
	var e struct {
		Type string // of a console message
		Args []struct{ Value, Description any }

		Entry     struct{ Level, Text, URL string }
		Exception exception `json:"exceptionDetails"`

		RequestID, ErrorText string
		Canceled             bool
		Request              struct{ URL string }
		Response             struct {
			URL    string
			Status int
		}
	}
	if json.Unmarshal(m.Params, &e) != nil {
		return
	}
	problem := func(format string, args ...any) { p.problems = append(p.problems, fmt.Sprintf(format, args...)) }
	switch m.Method {
	case "Page.loadEventFired":
		select {
		case <-p.loaded:
		default:
			close(p.loaded)
		}
	case "Runtime.consoleAPICalled":
		line := "console." + e.Type + ":"
		for _, a := range e.Args {
			if a.Value == nil {
				a.Value = a.Description
			}
			line += fmt.Sprintf(" %v", a.Value)
		}
		p.console = append(p.console, line)
		if e.Type == "error" || e.Type == "warning" || e.Type == "assert" {
			problem("%s", line)
		}
	case "Log.entryAdded": // the browser's own, such as about a content security policy
		if e.Entry.Level == "error" || e.Entry.Level == "warning" {
			problem("%s: %s %s", e.Entry.Level, e.Entry.Text, e.Entry.URL)
		}
	case "Runtime.exceptionThrown":
		problem("exception: %s", e.Exception.String())
	case "Network.requestWillBeSent":
		p.urls[e.RequestID] = e.Request.URL
	case "Network.responseReceived":
		if e.Response.Status >= 400 {
			problem("request: %s: status %d", e.Response.URL, e.Response.Status)
		}
	case "Network.loadingFailed":
		if !e.Canceled {
			problem("request: %s: %s", p.urls[e.RequestID], e.ErrorText)
		}
	}
}
