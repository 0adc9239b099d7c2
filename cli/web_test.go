// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/internal/testenv/chromium"
)

// picture keeps how a page looks, if somebody wants to see it.
func picture(t *testing.T, p *chromium.Page, name string) {
	t.Helper()
	if dir := os.Getenv("XSPIN_SCREENSHOTS"); dir != "" {
		p.Screenshot(filepath.Join(dir, name+".png"))
	}
}

// cell is JavaScript for the text of a context's cell in the table.
func cell(context string, column int) string {
	return fmt.Sprintf(`[...document.querySelectorAll("#contexts tbody tr")].find(r => r.cells[0].textContent === %q)?.cells[%d].textContent`, context, column)
}

// What somebody sees in a browser of a daemon under traffic.
func TestPageOfADaemon(t *testing.T) {
	const contexts = `kernel: administrators
contexts:
  - name: inbox
    handler: deposit
    windows: [{name: in, size: 2MiB}]
    attach: {users: ["65534"]}
    activate: manual
  - {name: ping, handler: echo-icmp}
  - {name: telnet, rulesets: "telnet: tcp(23)", handler: count, params: {to: drop}, activate: manual}
  - {name: xdp, tier: kernel, handler: echo-udp, params: {port: 9}}
`
	d := startDaemon(t, contexts, "--web", "0")
	url := d.page
	client, err := control.Dial(d.socket)
	if err != nil {
		t.Fatal(err)
	}
	browser := chromium.Start(t)
	page := browser.Page(1280, 900)
	page.Open(url)
	page.Until(`document.getElementById("live").textContent === "live" && document.querySelector(".picture")?.textContent.includes("no process")`, "document.body.innerText")
	page.Until(`document.getElementById("no-drops").checkVisibility()`, "document.body.innerText")
	page.Until(`document.getElementById("log").textContent.includes("running")`, `document.getElementById("log").innerText`)

	// An application takes a message, and pings go on while we look.
	app := d.asNobody("demo", "inbox", "--count", "2", "--slots", "2", "--dir", nobodysDir(t))
	if err := app.Start(); err != nil {
		t.Fatal(err)
	}
	waited := false
	defer func() {
		if !waited {
			_ = app.Process.Kill()
			_ = app.Wait()
		}
	}()
	page.Until(cell("inbox", 10)+fmt.Sprintf(" === 'process %d'", app.Process.Pid), "document.body.innerText")
	file := filepath.Join(t.TempDir(), "message")
	if err := os.WriteFile(file, []byte(strings.Repeat("message", 50_000)), 0o600); err != nil {
		t.Fatal(err)
	}
	d.send(file)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ping := d.lab.Host.NS.Command(ctx, "ping", "-q", "-i", "0.01", d.lab.NIC.Addr.Addr().String())
	if err := ping.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { stop(); _ = ping.Wait() }()

	// Figures are those that everybody may have from the socket.
	page.Until("Number("+cell("ping", 3)+") > 10", "document.body.innerText")
	page.Until(`samples.some(s => s.contexts.inbox && s.contexts.inbox.messages > 0)`, "samples")
	infos, err := client.Contexts(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range infos {
		state, handler := c.State, c.Handler
		if c.Tier == "kernel" {
			handler += ", in the kernel at " + c.At
		}
		page.Until(fmt.Sprintf("%s === %q && %s === %q", cell(c.Name, 1), state, cell(c.Name, 2), handler), "document.body.innerText")
	}
	var handled, ended uint64
	page.Eval(`last.contexts.find(c => c.name === "inbox").ended`, &ended)
	page.Eval(`last.contexts.find(c => c.name === "ping").handled`, &handled)
	stats, err := client.Context(t.Context(), "ping")
	if err != nil {
		t.Fatal(err)
	}
	if ended != 1 || handled == 0 || handled > stats.HandlerStats.Handled {
		t.Errorf("%d messages and %d pings on the page; pings are %d a moment later", ended, handled, stats.HandlerStats.Handled)
	}
	// Frames of handlers in the kernel have a wire and a line of their own, and HPUs none of them.
	if err := d.lab.Host.NS.Do(func() error {
		c, err := net.Dial("udp", net.JoinHostPort(d.lab.NIC.Addr.Addr().String(), "9"))
		for range 200 {
			if err == nil {
				_, err = c.Write([]byte("hello"))
			}
		}
		return errors.Join(err, c.Close())
	}); err != nil {
		t.Fatal(err)
	}
	page.Until(`samples.some(s => Object.values(s.interfaces).some(i => i.kernel > 0)) && [...cards.values()][0].frames.legend.textContent.includes("to handlers in the kernel")`, "samples")
	page.Until(`[...cards.values()].every(({picture: {parts: p}}) => p["to kernel"].path.getTotalLength() > 0 && p["into xdp"].kind === "kernel" && p["into ping"].kind === "hpus" && !p["context xdp"].meter)`, "document.body.innerText")
	// What is dropped, and why.
	if err := client.Activate(t.Context(), "telnet"); err != nil {
		t.Fatal(err)
	}
	if err := d.lab.Host.NS.Do(func() error {
		c, err := net.DialTimeout("tcp", net.JoinHostPort(d.lab.NIC.Addr.Addr().String(), "23"), 100*time.Millisecond)
		if err == nil {
			c.Close()
			return fmt.Errorf("somebody answers")
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	page.Until(`[...document.querySelectorAll("#drops tbody tr")].some(r => r.cells[0].textContent === "telnet" && r.cells[1].textContent === "dropped" && Number(r.cells[3].textContent) > 0 && r.cells[4].textContent === "a handler returned Drop")`,
		"document.getElementById('drops').innerText")
	var text string
	page.Eval("document.body.innerText", &text)
	for _, want := range []string{"XsPIN", "2 HPUs", "Frames a second", "HPU occupancy", "Messages in flight", "Handler time", "Drops", "attached", "in 2MiB"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in %s", want, text)
		}
	}
	var label string
	if page.Eval(`document.querySelector(".picture svg").getAttribute("aria-label")`, &label); !strings.Contains(label, "ping: ") || !strings.Contains(label, d.lab.NIC.Device) {
		t.Errorf("who does not see the picture is told %q", label)
	}
	picture(t, page, "wide")

	// What a user has written stays text: the daemon has this in its log.
	d.write("\"<img src=x onerror=document.title='bad'>\": 1\n" + contexts)
	if err := d.cmd.Process.Signal(unix.SIGHUP); err != nil {
		t.Fatal(err)
	}
	page.Until(`document.getElementById("log").textContent.includes("<img src=x onerror=") && !document.querySelector("#log img") && document.title === "XsPIN"`, `document.getElementById("log").innerText`)

	t.Run("keyboard", func(t *testing.T) { keyboard(t, page) })
	t.Run("sizes", func(t *testing.T) { sizes(t, page) })
	t.Run("hidden", func(t *testing.T) { hidden(t, page) })

	// The other message, so that the application ends.
	d.send(file)
	if err := app.Wait(); err != nil {
		t.Errorf("the application: %v", err)
	}
	waited = true
	page.Until(cell("inbox", 10)+" === '–'", "document.body.innerText")
	if got := page.Problems(); len(got) > 0 {
		t.Errorf("the browser complains: %q", got)
	}

	// It ends, which the page says; and another one comes to the same address.
	if err := d.cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	d.await("msg=ended")
	page.Until(`!document.getElementById("alarm").hidden && document.getElementById("alarm").textContent.includes("The daemon has not answered since") && document.getElementById("live").textContent === "gone"`, "document.body.innerText")
	picture(t, page, "gone")
	startDaemon(t, "contexts:\n  - {name: later, handler: echo-icmp}\n", "--web", strings.TrimSuffix(strings.TrimPrefix(url, "http://"), "/"))
	page.Until(`document.getElementById("alarm").hidden && document.getElementById("live").textContent === "live"`, "document.body.innerText")
	page.Until(cell("later", 1)+` === "active" && `+cell("ping", 1)+" === undefined", "document.body.innerText")
}

// nobodysDir is a directory for a user who may do nothing.
func nobodysDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(dir, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	return dir
}

// keyboard reaches all that there is to reach, in the order of the page, and uses it.
func keyboard(t *testing.T, page *chromium.Page) {
	var want, got []string
	const name = `(e => e.id || e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") || e.textContent)`
	page.Eval(`[...document.querySelectorAll("button, summary, [tabindex='0']")].filter(e => e.checkVisibility()).map(`+name+`)`, &want)
	page.Eval("document.activeElement.blur()", nil)
	for range want {
		var at string
		page.Press("Tab")
		if page.Eval(name+"(document.activeElement)", &at); at == "" {
			t.Errorf("something without a name has the focus, after %q", got)
		}
		got = append(got, at)
	}
	// The figures of charts change meanwhile.
	for i := range want {
		if w, _, _ := strings.Cut(want[i], ","); !strings.HasPrefix(got[i], w) {
			t.Errorf("the key Tab goes to %q, want %q\nof %q", got[i], want[i], want)
			break
		}
	}
	if len(want) < 15 {
		t.Errorf("only %d things can be reached: %q", len(want), want)
	}
	// A chart: a cursor that arrow keys move. A table: it opens. A context: it is chosen.
	page.Eval(`charts.handled.drawing.focus()`, nil)
	page.Press("ArrowLeft")
	page.Press("ArrowLeft")
	page.Until(`charts.handled.cursor >= 0 && charts.handled.drawing.querySelector(".cursor") !== null && /^\d\d:\d\d:\d\d/.test(charts.handled.legend.textContent)`, "charts.handled.legend.textContent")
	page.Press("Escape")
	page.Until(`charts.handled.cursor === -1`, "charts.handled.cursor")
	page.Press("Tab")
	page.Press("Enter")
	page.Until(`charts.handled.details.open && charts.handled.table.rows.length > 0 && charts.handled.head.cells.length === 5`, "charts.handled.figure.innerText")
	page.Press("Enter")
	page.Until(`!charts.handled.details.open`, "charts.handled.figure.innerText")
	page.Eval(`[...document.querySelectorAll("#contexts button")].find(b => b.textContent === "ping").focus()`, nil)
	page.Press("Enter")
	page.Until(`charts.handled.series.length === 1 && charts.handled.series[0].name === "ping" && document.activeElement.textContent === "ping"`, "charts.handled.legend.textContent")
	page.Press("Enter")
	page.Until(`charts.handled.series.length === 4`, "charts.handled.legend.textContent")
}

// sizes has the page fit a telephone, and be dark where people like that.
func sizes(t *testing.T, page *chromium.Page) {
	for _, width := range []int{360, 768, 1280} {
		page.Resize(width, 740)
		var is int
		page.Eval("show(last), document.documentElement.scrollWidth", &is)
		if is > width {
			t.Errorf("on %d pixels the page is %d wide", width, is)
		}
		picture(t, page, fmt.Sprintf("light-%d", width))
	}
	const ground = "getComputedStyle(document.body).backgroundColor"
	var light, dark string
	page.Eval(ground, &light)
	page.Media("prefers-color-scheme", "dark")
	if page.Eval(ground, &dark); light == dark {
		t.Errorf("light and dark, the ground is %s", light)
	}
	picture(t, page, "dark")
	page.Resize(360, 740)
	picture(t, page, "dark-360")
	page.Media("prefers-color-scheme", "light")
	page.Resize(1280, 900)
}

// hidden pages ask nothing, and catch up afterwards.
func hidden(t *testing.T, page *chromium.Page) {
	page.Eval(`Object.defineProperty(document, "hidden", {value: true, configurable: true}); document.dispatchEvent(new Event("visibilitychange"))`, nil)
	page.Until("!asking", "asking")
	var before, after float64
	page.Eval("samples.at(-1).seq", &before)
	page.Eval("new Promise(r => setTimeout(r, 2500))", nil)
	if page.Eval("samples.at(-1).seq", &after); after != before {
		t.Errorf("the page asks though nobody sees it: sample %v, then %v", before, after)
	}
	page.Eval(`delete document.hidden; document.dispatchEvent(new Event("visibilitychange"))`, nil)
	page.Until(fmt.Sprintf("samples.at(-1).seq >= %v && samples.every((s, i) => i === 0 || s.seq === samples[i-1].seq + 1)", before+2), "samples.map(s => s.seq)")
	page.Eval(`document.getElementById("pause").click()`, nil)
	page.Until(`document.getElementById("live").textContent === "paused"`, `document.getElementById("live").textContent`)
	page.Eval(`document.getElementById("pause").click()`, nil)
	page.Until(`document.getElementById("live").textContent === "live"`, `document.getElementById("live").textContent`)
}

// An address that cannot be had is told before the interface is touched.
func TestRunWithoutAnAddressForThePage(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	config := writeFile(t, "nothing.yaml", []byte("interfaces:\n  - {name: not-there-0}\n"))
	for address, want := range map[string]string{
		"nonsense":         `run: address of the page: "nonsense": want [ADDRESS:]PORT`,
		l.Addr().String():  "address already in use: name another one, or leave --web out",
		"127.0.0.1:777777": "with a port of 0 to 65535",
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		err := xspin(ctx, nil, nil, nil, "run", config, "--socket", filepath.Join(t.TempDir(), "s"), "--web", address)
		cancel()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", address, err, want)
		}
	}
	if _, err := runCheck(t, "--check", "--web", "nonsense", config); err == nil || !strings.Contains(err.Error(), "want [ADDRESS:]PORT") {
		t.Errorf("with --check: %v", err)
	}
}
