// SPDX-License-Identifier: Apache-2.0

// Package pagetest looks at pages of reports in a browser.
package pagetest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xspin/xspin/eval/page"
	"github.com/xspin/xspin/internal/testenv/chromium"
)

// Look opens the page of a directory as somebody with a phone does, and on a desk, light and
// dark and by keyboard, wants texts in it, and returns what is in it. With XSPIN_SCREENSHOTS
// it leaves pictures there.
func Look(t *testing.T, dir string, want ...string) (text string) {
	t.Helper()
	p := chromium.Start(t).Page(390, 844)
	p.Open("file://" + filepath.Join(dir, page.Index))
	picture := func(name string) {
		if to := os.Getenv("XSPIN_SCREENSHOTS"); to != "" {
			p.Screenshot(filepath.Join(to, name+".png"))
		}
	}
	picture("phone")
	var wide int
	if p.Eval("document.documentElement.scrollWidth", &wide); wide > 390 {
		t.Errorf("the page is %d pixels wide on a phone of 390", wide)
	}
	p.Resize(1200, 900)
	picture("light")
	const ground = "getComputedStyle(document.body).backgroundColor"
	var light, dark string
	p.Eval(ground, &light)
	p.Media("prefers-color-scheme", "dark")
	if p.Eval(ground, &dark); light == dark {
		t.Errorf("the page has the ground %s, light and dark", light)
	}
	picture("dark")

	// Everything that opens is opened with keys.
	var details, opened int
	p.Eval("document.querySelectorAll('details').length", &details)
	p.Eval("document.activeElement.blur(), 0", &opened)
	var last string
	for range 10_000 {
		p.Press("Tab")
		var at string
		p.Eval("document.activeElement.localName + (document.activeElement.getAttribute('href') || '')", &at)
		if at == "body" && last != "" {
			break // round again
		}
		if last = at; at == "summary" {
			p.Press("Enter")
		}
	}
	if p.Eval("document.querySelectorAll('details[open]').length", &opened); opened != details {
		t.Errorf("%d of %d details were opened with keys", opened, details)
	}
	p.Resize(390, 844)
	if p.Eval("document.documentElement.scrollWidth", &wide); wide > 390 {
		t.Errorf("with all details open the page is %d pixels wide on a phone of 390", wide)
	}
	picture("open")
	p.Eval("document.body.innerText", &text)
	for _, w := range want {
		if !strings.Contains(text, w) {
			t.Errorf("the page lacks %q", w)
		}
	}
	// Titles of plots are text, which search and screen readers find.
	var pictures, named int
	p.Eval("document.querySelectorAll('figure svg').length", &pictures)
	if p.Eval("document.querySelectorAll('figure svg[role=img][aria-label]').length", &named); pictures != named {
		t.Errorf("%d of %d plots have a name", named, pictures)
	}
	if bad := p.Problems(); len(bad) > 0 {
		t.Errorf("the browser has %q", bad)
	}
	return text
}
