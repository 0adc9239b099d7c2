// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

type fakeSource struct {
	nics  []nic.Stats
	all   []control.ContextInfo
	error error
}

func (f *fakeSource) status() control.Status       { return control.Status{Version: "v1"} }
func (f *fakeSource) stats() ([]nic.Stats, error)  { return f.nics, f.error }
func (f *fakeSource) infos() []control.ContextInfo { return f.all }

// numberFields gives every counter in a struct another value.
func numberFields(v reflect.Value, next *uint64) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			numberFields(v.Field(i), next)
		}
	case reflect.Array, reflect.Slice:
		for i := range v.Len() {
			numberFields(v.Index(i), next)
		}
	case reflect.Uint64, reflect.Uint32:
		*next++
		v.SetUint(*next)
	case reflect.Int64, reflect.Int:
		*next++
		v.SetInt(int64(*next))
	}
}

func someSource() *fakeSource {
	var n uint64 = 1000
	full := nic.ContextStats{Messages: &spin.MessageStats{}}
	numberFields(reflect.ValueOf(&full).Elem(), &n)
	numberFields(reflect.ValueOf(full.Messages).Elem(), &n)
	full.ID, full.Name = 1, "files"
	full.Rulesets = []nic.RulesetStats{{Number: 0, Name: "slmp", Matched: 5}, {Number: 3, Name: "slmp", Matched: 6}}
	full.HandlerTime = spin.Histogram{3: 2, 10: 5, 31: 1}
	full.HandlerSum = 2500 * time.Millisecond
	pair := &hostq.PairStats{Broken: true}
	numberFields(reflect.ValueOf(pair).Elem(), &n)
	s := nic.Stats{Interface: "lab/xs-nic", HPUs: []hpu.Stats{{HPU: 0, Busy: 1500 * time.Millisecond, Handled: 7}, {HPU: 1, Occupancy: 3}}}
	numberFields(reflect.ValueOf(&s.Program).Elem(), &n)
	numberFields(reflect.ValueOf(&s.Sockets).Elem(), &n)
	old := nic.ContextStats{ID: 4, Name: "files"} // on its way out
	s.Contexts = []nic.ContextStats{old, full, {ID: 2, Name: "echo"}, old, {ID: 0, Name: "removed"}}
	return &fakeSource{nics: []nic.Stats{s, {Interface: "eth9", Contexts: []nic.ContextStats{{ID: 1, Name: "files"}}}}, all: []control.ContextInfo{
		{Context: control.Context{Name: "echo", Interface: "lab/xs-nic"}, ID: 2, State: active},
		{Context: control.Context{Name: "files", Interface: "lab/xs-nic"}, ID: 1, State: installed, At: "tc", Pair: pair,
			Attached: []control.Peer{{PID: 1}, {PID: 2, Observer: true}, {PID: 3, Observer: true}}},
		{Context: control.Context{Name: "broken", Interface: "eth9"}, ID: -1, State: failed},
	}}
}

func TestMetricsKeepToTheConventions(t *testing.T) {
	problems, err := testutil.CollectAndLint(newMetrics(someSource()))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(newMetrics(someSource()))
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if !strings.HasSuffix(f.GetHelp(), ".") && !strings.HasPrefix(f.GetHelp(), "1 ") && !strings.Contains(f.GetHelp(), "always 1") {
			t.Errorf("%s: help %q", f.GetName(), f.GetHelp())
		}
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == "interface" && !slices.Contains([]string{"lab/xs-nic", "eth9"}, l.GetValue()) || l.GetName() == "context" && !slices.Contains([]string{"echo", "files", "broken"}, l.GetValue()) {
					t.Errorf("%s has label %v", f.GetName(), l)
				}
			}
		}
	}
}

func TestMetricsValues(t *testing.T) {
	src := someSource()
	c := &src.nics[0].Contexts[1]
	out := scrape(t, src)
	f := `{context="files",interface="lab/xs-nic"`
	for _, want := range []string{
		`xspin_build_info{goversion="`,
		`xspin_hpu_busy_seconds_total{hpu="0",interface="lab/xs-nic"} 1.5`,
		`xspin_hpu_occupancy_buffers{hpu="1",interface="lab/xs-nic"} 3`,
		`xspin_ruleset_packets_total` + f + `,ruleset="slmp"} 11`,
		`xspin_context_handler_duration_seconds_bucket` + f + `,le="6.4e-08"} 2`,
		`xspin_context_handler_duration_seconds_bucket` + f + `,le="1.024e-06"} 7`,
		`xspin_context_handler_duration_seconds_bucket` + f + `,le="1.073741824"} 7`,
		`xspin_context_handler_duration_seconds_bucket` + f + `,le="+Inf"} 8`,
		`xspin_context_handler_duration_seconds_sum` + f + `} 2.5`,
		`xspin_context_handler_duration_seconds_count` + f + `} 8`,
		`xspin_context_state` + f + `,state="installed"} 1`,
		`xspin_context_state` + f + `,state="active"} 0`,
		`xspin_context_state{context="broken",interface="eth9",state="failed"} 1`,
		`xspin_context_hook{context="files",hook="tc",interface="lab/xs-nic"} 1`,
		`xspin_context_attached_processes` + f + `,role="application"} 1`,
		`xspin_context_attached_processes` + f + `,role="observer"} 2`,
		`xspin_queue_broken` + f + `} 1`,
		`xspin_context_packets_spilled_total` + f + `} ` + decimal(c.Spilled),
		`xspin_context_packets_dropped_total` + f + `,reason="refused"} ` + decimal(c.Refused),
		`xspin_context_messages_open` + f + `} ` + decimal(uint64(c.Messages.Open)),
		`xspin_context_messages_ended_total` + f + `,result="complete"} ` + decimal(c.Messages.Ended),
		`xspin_context_segments_dropped_total` + f + `,reason="two_ends"} ` + decimal(c.Messages.Dropped[spin.DropTwoEnds]),
		`xspin_queue_requests_refused_total` + f + `} ` + decimal(src.all[1].Pair.Full),
		`xspin_frames_total{interface="lab/xs-nic",verdict="spilled"} ` + decimal(src.nics[0].Program.Spilled),
		`xspin_context_user_value_total{context="files",counter="15",interface="lab/xs-nic"} ` + decimal(c.User[15].Sum),
		`xspin_context_handlers_total{context="echo",interface="lab/xs-nic",result="success"} 0`,
		`# TYPE xspin_context_handlers_total counter`,
		`# TYPE xspin_context_in_flight_buffers gauge`,
		`go_goroutines `,
		`process_resident_memory_bytes `,
	} {
		if !strings.Contains(out, "\n"+want) {
			t.Errorf("no %s", want)
		}
	}
	if strings.Contains(out, `{context="files",interface="eth9"`) {
		t.Error("a context that is not there any more is")
	}
	if strings.Contains(out, `context_user_value_total{context="echo"`) {
		t.Error("counters that nobody uses are there")
	}
	if t.Failed() {
		t.Log(out)
	}
}

func decimal(n uint64) string { return strconv.FormatFloat(float64(n), 'g', -1, 64) }

func scrape(t *testing.T, src metricsSource) string {
	t.Helper()
	s, err := listenMetrics("127.0.0.1:0", src, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer s.close(t.Context())
	s.serve()
	for path, want := range map[string]int{"/": 404, "/metrics/x": 404} {
		r, err := http.Get("http://" + s.listener.Addr().String() + path)
		if err != nil {
			t.Fatal(err)
		}
		r.Body.Close()
		if r.StatusCode != want {
			t.Errorf("%s is answered with %s", path, r.Status)
		}
	}
	r, err := http.Get("http://" + s.listener.Addr().String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != 200 || !strings.HasPrefix(r.Header.Get("Content-Type"), "text/plain; version=0.0.4") {
		t.Fatalf("%v: %s, %s: %s", err, r.Status, r.Header, body)
	}
	return "\n" + string(body)
}

func TestMetricsErrors(t *testing.T) {
	s, err := listenMetrics("127.0.0.1:0", &fakeSource{error: errors.New("the NIC is closed")}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	s.serve()
	r, err := http.Get("http://" + s.listener.Addr().String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(r.Body)
	r.Body.Close()
	if r.StatusCode != 500 || !strings.Contains(string(body), "the NIC is closed") {
		t.Errorf("%s: %s", r.Status, body)
	}
	if _, err := listenMetrics(s.listener.Addr().String(), nil, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "in use") || !strings.Contains(err.Error(), "metrics of the configuration") {
		t.Errorf("an address that is taken: %v", err)
	}
	// Ends though somebody is connected and says nothing.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s.close(ctx)
	if _, err := http.Get("http://" + s.listener.Addr().String() + "/metrics"); err == nil {
		t.Error("answers when it is closed")
	}
}

// A request that comes at once is answered, however many connections ask nothing. A foreign host name,
// which somebody has made to mean this machine, is refused.
func TestMetricsAreForWhoAsks(t *testing.T) {
	s, err := listenMetrics("127.0.0.1:0", someSource(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer s.close(t.Context())
	s.serve()
	for range 1000 {
		c, err := net.Dial("tcp", s.listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	for host, want := range map[string]int{s.listener.Addr().String(): 200, "localhost": 200, "metrics.example.com:9465": 403} {
		r, err := http.NewRequest(http.MethodGet, "http://"+s.listener.Addr().String()+"/metrics", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Host = host
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		if answer.StatusCode != want {
			t.Errorf("host %s: %s, want %d", host, answer.Status, want)
		}
	}
}
