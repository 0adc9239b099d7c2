// SPDX-License-Identifier: Apache-2.0

package web

import (
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/testenv/chromium"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

const hostile = `</script><img src=x onerror="document.title='bad'">&lt;b&gt;`

// many is a source with more of everything than fits, and names that no daemon takes, at a
// second of its life.
func many(second int, tail *Tail) Source {
	wave := func(k int) float64 { return 1 + math.Sin(float64(second)/20+float64(k)) }
	sum := func(k int, per float64) (n uint64) { // of a rate that goes up and down
		return uint64(per * (float64(second) + 20*(1-math.Cos(float64(second)/20+float64(k)))))
	}
	names := []string{hostile}
	for i := range 40 {
		names = append(names, fmt.Sprintf("context-%d-with-a-long-name", i))
	}
	return Source{
		Status: func() control.Status {
			return control.Status{Version: "v1.2.3", PID: 4711, Started: time.Unix(0, 0)}
		},
		Stats: func() ([]nic.Stats, error) {
			s := nic.Stats{Interface: "eth1", Link: "up", Mode: "native", ZeroCopy: true, Queues: 4,
				Program: nic.ProgramStats{Passed: sum(1, 40_000), Redirected: sum(0, 800_000), Kernel: sum(2, 300_000), Refused: sum(3, 2000)}}
			for k := range 64 {
				s.HPUs = append(s.HPUs, hpu.Stats{HPU: k, Occupancy: uint32(k), Busy: time.Duration(float64(sum(k, 5e8)))})
			}
			for k, name := range names {
				s.Contexts = append(s.Contexts, nic.ContextStats{ID: k, Name: name, Refused: sum(3, 50), Credits: 682, InFlight: int(300 * wave(k))})
			}
			return []nic.Stats{s, {Interface: "lab/" + hostile, Link: "no carrier", Mode: "generic", Queues: 1, HPUs: []hpu.Stats{{}}}}, nil
		},
		Contexts: func() (all []control.ContextInfo) {
			for k, name := range names {
				c := control.ContextInfo{
					Context: control.Context{Name: name, Interface: "eth1", Handler: "deposit", Windows: []control.Window{{Name: hostile, Size: 64 << 20}, {Name: "shared"}, {Name: "third"}}},
					ID:      k, State: "active", Attached: []control.Peer{{PID: 1000 + k, UID: 1000}, {PID: 9, Observer: true}},
					HandlerStats: spin.ContextStats{Handled: sum(k, 20_000), Panics: uint64(k % 2)},
					MessageStats: &spin.MessageStats{Open: int(40 * wave(k)), Ended: sum(k, 90)},
				}
				c.HandlerStats.HandlerTime[9+k%8] = c.HandlerStats.Handled
				if k%4 == 3 {
					c.Tier, c.Windows, c.Attached, c.MessageStats = "kernel", nil, nil, nil
				}
				if k == 2 {
					c.State, c.Error, c.Attached = "failed", hostile, nil
				}
				all = append(all, c)
			}
			return all
		},
		Log: tail,
	}
}

// However much there is, and whatever it is called, the page shows it.
func TestPageOfMuch(t *testing.T) {
	s, err := Listen("0", quiet())
	if err != nil {
		t.Fatal(err)
	}
	var tail Tail
	tail.Keep(slog.New(slog.NewTextHandler(io.Discard, nil))).Error(hostile, "key", hostile)
	go func() { _ = s.http.Serve(s.listener) }() // the clock stands still
	defer s.http.Close()
	page := chromium.Start(t).Page(1280, 900)
	page.Open(s.URL())
	page.Until(`document.getElementById("live").textContent === "gone"`, "document.body.innerText")
	var said bool
	if page.Eval(`document.getElementById("no-drops").checkVisibility()`, &said); said {
		t.Error("without an answer, the page says that nothing has been dropped")
	}
	for i := range history + 2 {
		s.recorder.record(many(i, &tail), time.Unix(int64(1_000_000+i), 0))
	}
	// It may have asked while they were recorded, and asks for the rest a second later.
	page.Until(`document.getElementById("live").textContent === "live" && samples.length === 300`, "samples.length")
	for _, width := range []int{1280, 360} {
		page.Resize(width, 800)
		var is int
		if page.Eval("show(last), document.documentElement.scrollWidth", &is); is > width {
			t.Errorf("on %d pixels the page is %d wide", width, is)
		}
		if dir := os.Getenv("XSPIN_SCREENSHOTS"); dir != "" {
			page.Screenshot(filepath.Join(dir, fmt.Sprintf("much-%d.png", width)))
		}
	}
	for what, script := range map[string]string{
		"names are text":            fmt.Sprintf(`document.title === "XsPIN" && document.querySelectorAll("main img, main script").length === 0 && document.querySelector("#contexts button").textContent === %q`, hostile),
		"the kernel has a line":     `[...cards.values()].map(c => c.frames.series.map(s => s.name).join()).join("; ") === "to HPUs,to Linux,dropped by the NIC,to handlers in the kernel; to HPUs,to Linux,dropped by the NIC"`,
		"and wires of its own":      `(p => p.querySelectorAll(".wire.kernel").length === 4 && p.querySelector("svg").getAttribute("aria-label").includes("to handlers in the kernel"))(document.querySelector(".picture"))`,
		"the log is text":           fmt.Sprintf(`document.querySelector("#log li").textContent.includes(%q)`, hostile),
		"all contexts are there":    `document.querySelectorAll("#contexts tbody tr").length === 41`,
		"a failed one stands out":   `document.querySelectorAll("#contexts td.bad").length === 1 && document.querySelectorAll(".picture .box.bad").length === 2`,
		"the picture has no end":    `document.querySelector(".picture").textContent.includes("and 29 contexts more")`,
		"charts have five minutes":  `charts.handled.series.length === 6 && charts.handled.series[5].name === "36 others"`,
		"without a carrier it says": `document.querySelectorAll("h2 small")[1].textContent === "link no carrier, generic XDP, copying, 1 receive queue"`,
		"busiest of many HPUs":      `document.querySelector(".legend span b") && document.body.innerText.includes("mean of 64")`,
	} {
		var is bool
		if page.Eval(script, &is); !is {
			t.Errorf("not so: %s", what)
		}
	}
	if got := page.Problems(); len(got) > 0 {
		t.Errorf("the browser complains: %q", got)
	}
}
