// SPDX-License-Identifier: Apache-2.0

package chromium

import (
	"bytes"
	"fmt"
	"image/png"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const document = `<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>t</title><link rel="icon" href="data:,">
<style>@media (prefers-color-scheme: dark) { body { background: rgb(1, 2, 3) } }</style></head>
<body><button id="a" onclick="document.title = 'pressed'">a</button><button id="b">b</button></body></html>`

func TestPage(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/" {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprint(w, document)
	}))
	defer s.Close()
	b := Start(t)
	p := b.Page(400, 300)
	p.Open(s.URL)
	var width int
	if p.Eval("innerWidth", &width); width != 400 {
		t.Errorf("the page is %d pixels wide", width)
	}
	p.Press("Tab")
	p.Press("Tab")
	p.Press("Shift+Tab")
	p.Press("Enter")
	p.Until("document.title === 'pressed'", "[document.title, document.activeElement.id]")
	const color = "getComputedStyle(document.body).backgroundColor"
	var light, dark string
	p.Eval(color, &light)
	p.Media("prefers-color-scheme", "dark")
	if p.Eval(color, &dark); light == dark || dark != "rgb(1, 2, 3)" {
		t.Errorf("the background is %s, and with dark %s", light, dark)
	}
	p.Resize(200, 100)
	file := filepath.Join(t.TempDir(), "page.png")
	p.Screenshot(file)
	picture, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if size, err := png.DecodeConfig(bytes.NewReader(picture)); err != nil || size.Width != 200 {
		t.Errorf("the picture is %d pixels wide: %v", size.Width, err)
	}
	if got := p.Problems(); len(got) != 0 {
		t.Errorf("a page without faults has %q", got)
	}

	// What goes wrong in a page, none of it through what Eval returns.
	var done int
	p.Eval(`new Promise(done => {
		console.log("hello", 7); console.warn("look out")
		setTimeout(() => { throw new Error("nobody catches it") })
		const missing = fetch("/missing"), outside = fetch("http://example.org/").catch(() => 0)
		Promise.all([missing, outside]).then(() => setTimeout(() => done(1), 50))
	})`, &done)
	for _, want := range []string{"console.warning: look out", "nobody catches it", "/missing: status 404", "http://example.org/: net::ERR_NAME_NOT_RESOLVED"} {
		if !slices.ContainsFunc(p.Problems(), func(s string) bool { return strings.Contains(s, want) }) {
			t.Errorf("no %q in %q", want, p.Problems())
		}
	}
	if !slices.Contains(p.Console(), "console.log: hello 7") {
		t.Errorf("the console has %q", p.Console())
	}
	if err := p.eval("throw new Error('mine')", nil); err == nil || !strings.Contains(err.Error(), "mine") {
		t.Errorf("an exception is %v", err)
	}
	if err := p.eval("nothing.there", &done); err == nil || !strings.Contains(err.Error(), "ReferenceError") {
		t.Errorf("an unknown name is %v", err)
	}
}

// With the test, the browser and all that it has started are gone.
func TestNothingIsLeft(t *testing.T) {
	var profile string
	t.Run("browser", func(t *testing.T) {
		b := Start(t)
		b.Page(100, 100).Open("about:blank")
		for _, a := range b.cmd.Args {
			if dir, ok := strings.CutPrefix(a, "--user-data-dir="); ok {
				profile = dir
			}
		}
		if n := processes(t, profile); n < 2 {
			t.Errorf("%d processes have the profile: want the browser and its children", n)
		}
	})
	if n := processes(t, profile); n != 0 {
		t.Errorf("%d processes are left", n)
	}
	if _, err := os.Stat(profile); !os.IsNotExist(err) {
		t.Errorf("the profile is there: %v", err)
	}
}

// processes counts those that have a word of their command line.
func processes(t *testing.T, word string) (n int) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range all {
		if line, err := os.ReadFile(file); err == nil && bytes.Contains(line, []byte(word)) {
			n++
		}
	}
	return n
}
