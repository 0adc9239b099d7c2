// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/hpu"
)

// With all contexts in the kernel the HPUs have nothing to do, and as many lines would say so.
func TestTopSumsUpIdleHPUs(t *testing.T) {
	before, now := twoSamples()
	for _, s := range []*sample{before, now} {
		s.nics[1].HPUs = make([]hpu.Stats, 16)
	}
	const busy = "lab/xs-nic 0 320 50.0 10.0 4\nlab/xs-nic 1 0 0.0 - 0\n"
	if got := columnsOf(page(before, now, 0)); !strings.HasSuffix(got, busy+"eth9 16 idle 0 0.0 - 0\n") {
		t.Errorf("idle:\n%s", got)
	}
	now.nics[1].HPUs[3].Occupancy = 1
	if got := columnsOf(page(before, now, 0)); strings.Count(got, "\neth9 ") != 1+16 {
		t.Errorf("one of 16 has a packet:\n%s", got)
	}
	if r := newTopReport(before, before); len(r.HPUs) != 18 {
		t.Errorf("%d HPUs in the document", len(r.HPUs))
	}
}

func TestTopAsJSON(t *testing.T) {
	before, now := twoSamples()
	for reports, want := range map[int]int{0: 1, 1: 1, 3: 3} {
		var out bytes.Buffer
		tp := &top{sample: samples(before, now), interval: time.Millisecond, reports: reports, json: true}
		if err := tp.plain(t.Context(), &out); err != nil {
			t.Fatal(err)
		}
		dec := json.NewDecoder(&out)
		for i := range want {
			var r topReport
			if err := dec.Decode(&r); err != nil {
				t.Fatalf("report %d of %d: %v", i, want, err)
			}
			if i > 0 { // the same sample again: nothing happens
				continue
			}
			echo, inbox, h := r.Contexts[0], r.Contexts[1], r.HPUs[0]
			if r.Schema != 1 || r.Seconds != 2 || r.PID != 42 || len(r.Interfaces) != 2 || len(r.HPUs) != 2 ||
				r.Interfaces[0].Seen != 1000 || r.Interfaces[0].Stuck != 1 || !r.Interfaces[0].ZeroCopy {
				t.Errorf("%+v", r)
			}
			if inbox.Packets != 1.2e6 || inbox.HPU != 75 || inbox.Messages == nil || inbox.Messages.Ended != 10 || inbox.Messages.Open != 17 ||
				inbox.Queue == nil || inbox.Queue.Requests != 4 || inbox.Queue.Waiting != 6 || inbox.InFlight != 9 || inbox.Attached[0].PID != 77 {
				t.Errorf("%+v", inbox)
			}
			if echo.Name != "echo" || echo.Messages != nil || echo.Queue != nil || echo.Attached == nil {
				t.Errorf("%+v", echo)
			}
			if h.Packets != 320 || h.Busy != 50 || h.Batch != 10 || h.Depth != 4 || r.HPUs[1].Batch != 0 {
				t.Errorf("%+v", h)
			}
		}
		if _, err := dec.Token(); err != io.EOF {
			t.Errorf("with %d reports there is something behind %d documents: %v", reports, want, err)
		}
	}
}

func TestTopAsJSONIsNoScreen(t *testing.T) {
	_, now := twoSamples()
	socket := answering(t, func(w http.ResponseWriter, r *http.Request) {
		_ = json.NewEncoder(w).Encode(map[string]any{"/v1/stats": now.nics, "/v1/contexts": now.contexts, "/v1/status": now.status}[r.URL.Path])
	})
	master, tty := terminal(t)
	done := make(chan error, 1)
	go func() {
		err := xspin(t.Context(), tty, tty, io.Discard, "top", "--json", "--interval", "100ms", "--socket", socket)
		tty.Close()
		done <- err
	}()
	text, _ := io.ReadAll(master) // ends with EIO
	if err := <-done; err != nil {
		t.Error(err)
	}
	var r topReport
	if err := json.Unmarshal(text, &r); err != nil || strings.Contains(string(text), "\x1b") || len(r.Contexts) != 2 {
		t.Errorf("%v: %q", err, text)
	}
}
