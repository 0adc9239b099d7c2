// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/httpserver"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/nic/neigh"
	"github.com/xspin/xspin/spin"
)

// A metricsSource is a Daemon.
type metricsSource interface {
	status() control.Status
	stats() ([]nic.Stats, error)
	infos() []control.ContextInfo
}

// A metricsServer answers Prometheus on /metrics of a TCP address.
type metricsServer struct {
	http     *http.Server
	listener *httpserver.Listener
	logger   *slog.Logger
	serving  bool
	done     chan struct{}
}

// listenMetrics takes the address, for serve to answer on until close.
func listenMetrics(address string, source metricsSource, logger *slog.Logger) (*metricsServer, error) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("address for metrics: %w: another one is metrics of the configuration, or leave it out", err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(metricsRegistry(source), promhttp.HandlerOpts{
		ErrorLog: slog.NewLogLogger(logger.Handler(), slog.LevelWarn), MaxRequestsInFlight: 4, Timeout: stall, EnableOpenMetrics: true,
	}))
	loopback := l.Addr().(*net.TCPAddr).IP.IsLoopback()
	s := &metricsServer{logger: logger, done: make(chan struct{})}
	s.http, s.listener = httpserver.New(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if loopback && !httpserver.Local(r.Host) {
			http.Error(w, fmt.Sprintf("host %q: metrics are on http://%s/, or localhost with that port", r.Host, l.Addr()), http.StatusForbidden)
			return
		}
		mux.ServeHTTP(w, r)
	}), stall, logger)
	return s, nil
}

// metricsRegistry has all that is told.
func metricsRegistry(source metricsSource) *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(newMetrics(source), collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return reg
}

// serve answers from here on.
func (s *metricsServer) serve() {
	s.serving = true
	go func() {
		defer close(s.done)
		if err := s.http.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
			s.logger.Error("metrics are not served any more", "address", s.listener.Addr(), "error", err)
		}
	}()
}

// close ends it, if need be in the middle of an answer.
func (s *metricsServer) close(ctx context.Context) {
	if !s.serving {
		s.listener.Close()
		return
	}
	if s.http.Shutdown(ctx) != nil {
		_ = s.http.Close()
	}
	<-s.done
}

// metrics is a collector: it asks the daemon each time. Names and units are by
// Prometheus' conventions. Labels are interfaces, contexts, rulesets, HPUs, and words
// that are named here.
type metrics struct {
	source metricsSource
	build  *prometheus.Desc
	iface  []metric[nic.Stats]
	hpu    []metric[hpu.Stats]
	ctx    []metric[nic.ContextStats]
	msg    []metric[spin.MessageStats]
	pair   []metric[hostq.PairStats]

	ruleset, time, user, userCount, state, hook, attached *prometheus.Desc
}

// A metric is a number in a T. Several may share a name and differ in a label.
type metric[T any] struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	label []string // of this one, behind those that all of the T have
	value func(*T) float64
}

// A family is metrics of a T with the same name.
type family[T any] struct {
	name, help string
	label      string
	values     map[string]func(*T) uint64 // by value of the label
}

func counters[T any](common []string, list ...family[T]) (all []metric[T]) {
	for _, f := range list {
		labels := common
		if f.label != "" {
			labels = append(append([]string{}, common...), f.label)
		}
		desc := prometheus.NewDesc("xspin_"+f.name, f.help, labels, nil)
		for l, v := range f.values {
			m := metric[T]{desc: desc, kind: prometheus.CounterValue, value: func(t *T) float64 { return float64(v(t)) }}
			if f.label != "" {
				m.label = []string{l}
			}
			all = append(all, m)
		}
	}
	return all
}

// one returns a family of a single metric.
func one[T any](name, help string, v func(*T) uint64) family[T] {
	return family[T]{name: name, help: help, values: map[string]func(*T) uint64{"": v}}
}

func scalar[T any](kind prometheus.ValueType, common []string, name, help string, v func(*T) float64) metric[T] {
	return metric[T]{desc: prometheus.NewDesc("xspin_"+name, help, common, nil), kind: kind, value: v}
}

func gauge[T any](common []string, name, help string, v func(*T) float64) metric[T] {
	return scalar(prometheus.GaugeValue, common, name, help, v)
}

func (m *metric[T]) send(to chan<- prometheus.Metric, t *T, labels ...string) {
	to <- prometheus.MustNewConstMetric(m.desc, m.kind, m.value(t), append(labels[:len(labels):len(labels)], m.label...)...)
}

func newMetrics(source metricsSource) *metrics {
	ofInterface := []string{"interface"}
	ofHPU := []string{"interface", "hpu"}
	ofContext := []string{"interface", "context"}
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("xspin_"+name, help, labels, nil)
	}
	type ifaceValue = func(*nic.Stats) uint64
	type ctxValue = func(*nic.ContextStats) uint64
	type msgValue = func(*spin.MessageStats) uint64
	m := &metrics{
		source: source,
		build:  desc("build_info", "Which XsPIN this is; always 1.", "version", "goversion"),

		iface: counters(ofInterface,
			family[nic.Stats]{"frames_total", "Frames by what the programs at xdp and tc did with them: redirected ones went to an HPU, kernel ones to handlers in eBPF; passed and malformed ones, and those that failed, were oversize, trains of packets or spilled, went to the Linux stack; refused ones were dropped because their context had no credit.", "verdict", map[string]ifaceValue{
				"passed":     func(s *nic.Stats) uint64 { return s.Program.Passed },
				"redirected": func(s *nic.Stats) uint64 { return s.Program.Redirected },
				"kernel":     func(s *nic.Stats) uint64 { return s.Program.Kernel },
				"refused":    func(s *nic.Stats) uint64 { return s.Program.Refused },
				"spilled":    func(s *nic.Stats) uint64 { return s.Program.Spilled },
				"failed":     func(s *nic.Stats) uint64 { return s.Program.Failed },
				"malformed":  func(s *nic.Stats) uint64 { return s.Program.Malformed },
				"trains":     func(s *nic.Stats) uint64 { return s.Program.Trains },
				"oversize":   func(s *nic.Stats) uint64 { return s.Program.Oversize },
			}},
			family[nic.Stats]{"socket_rx_dropped_total", "Frames that the kernel lost on their way to an AF_XDP socket.", "reason", map[string]ifaceValue{
				"no_buffer": func(s *nic.Stats) uint64 { return s.Sockets.RxDropped },
				"ring_full": func(s *nic.Stats) uint64 { return s.Sockets.RxRingFull },
			}},
			one("socket_tx_invalid_total", "Descriptors on tx rings that the kernel refused.", func(s *nic.Stats) uint64 { return s.Sockets.TxInvalidDescs }),
			one("socket_kicks_total", "System calls to send.", func(s *nic.Stats) uint64 { return s.Sockets.Kicks }),
			one("stack_failures_total", "Packets for the Linux stack that it refused.", func(s *nic.Stats) uint64 { return s.StackFailures }),
			one("nic_events_lost_total", "Faults that were not read in time.", func(s *nic.Stats) uint64 { return s.EventsLost }),
		),
		hpu: counters(ofHPU,
			one("hpu_executions_total", "Handler execution requests that an HPU has served.", func(s *hpu.Stats) uint64 { return s.Handled }),
			one("hpu_batches_total", "Batches of handler execution requests that an HPU has served.", func(s *hpu.Stats) uint64 { return s.Batches }),
		),
		ctx: counters(ofContext,
			family[nic.ContextStats]{"context_handlers_total", "Handlers by how they ended.", "result", map[string]ctxValue{
				"success": func(s *nic.ContextStats) uint64 { return s.Handled - min(s.Handled, s.Dropped+s.Failed) },
				"drop":    func(s *nic.ContextStats) uint64 { return s.Dropped },
				"fail":    func(s *nic.ContextStats) uint64 { return s.Failed },
				"panic":   func(s *nic.ContextStats) uint64 { return s.Panics },
				"overrun": func(s *nic.ContextStats) uint64 { return s.Overruns },
			}},
			family[nic.ContextStats]{"context_packets_dropped_total", "Packets of a context without a handler: refused for lack of credit, lost by the kernel on the way, of a context that was stopped, not a segment, malformed, corrupt, or of a message that the binder refused.", "reason", map[string]ctxValue{
				"refused":   func(s *nic.ContextStats) uint64 { return s.Refused },
				"lost":      func(s *nic.ContextStats) uint64 { return s.Lost },
				"unrun":     func(s *nic.ContextStats) uint64 { return s.Unrun },
				"stray":     func(s *nic.ContextStats) uint64 { return s.Stray },
				"malformed": func(s *nic.ContextStats) uint64 { return s.Malformed },
				"corrupt":   func(s *nic.ContextStats) uint64 { return s.Corrupt },
				"unbound":   func(s *nic.ContextStats) uint64 { return s.Unbound },
			}},
			one("context_packets_spilled_total", "Packets left to the Linux stack for lack of credit.", func(s *nic.ContextStats) uint64 { return s.Spilled }),
			one("context_packets_to_stack_total", "Packets that handlers handed to the Linux stack.", func(s *nic.ContextStats) uint64 { return s.ToStack }),
			one("context_trains_uncut_total", "Trains at tc that went to the stack, as handlers would write to their packets.", func(s *nic.ContextStats) uint64 { return s.Uncut }),
			one("context_trains_mixed_total", "Trains at tc that were dropped, as handlers wanted different things of their packets.", func(s *nic.ContextStats) uint64 { return s.Mixed }),
			one("context_packets_handed_over_total", "Packets that handlers in eBPF left to those on HPUs.", func(s *nic.ContextStats) uint64 { return s.HandedOver }),
			one("context_packets_unverified_total", "Packets accepted without a complete checksum.", func(s *nic.ContextStats) uint64 { return s.Unverified }),
			one("context_frames_sent_total", "Frames of handlers given to a tx ring.", func(s *nic.ContextStats) uint64 { return s.Sent }),
			one("context_sends_refused_total", "Sends of handlers that found a ring full, or no frame.", func(s *nic.ContextStats) uint64 { return s.SendFull }),
			one("context_acks_total", "Acknowledgements given to a tx ring.", func(s *nic.ContextStats) uint64 { return s.Acks }),
			one("context_acks_refused_total", "Acknowledgements that found a ring full, or no frame.", func(s *nic.ContextStats) uint64 { return s.AckFull }),
			one("context_message_events_lost_total", "Events of messages that found no room.", func(s *nic.ContextStats) uint64 { return s.EventsLost }),
			one("context_requests_total", "Requests of handlers to the application.", func(s *nic.ContextStats) uint64 { return s.Requests }),
			one("context_requests_dropped_total", "Requests dropped because the ring was full.", func(s *nic.ContextStats) uint64 { return s.Unasked }),
			one("context_requests_unanswered_total", "Requests given up: no answer in time, or no application.", func(s *nic.ContextStats) uint64 { return s.Unanswered }),
			one("context_timers_total", "Timer handlers that returned.", func(s *nic.ContextStats) uint64 { return s.Timers }),
			one("context_triggers_total", "Messages started by the host.", func(s *nic.ContextStats) uint64 { return s.Triggers }),
		),
		msg: counters(ofContext,
			one("context_messages_started_total", "Messages whose header packet arrived.", func(s *spin.MessageStats) uint64 { return s.Started }),
			family[spin.MessageStats]{"context_messages_ended_total", "Messages by how they ended; abandoned and discarded ones were incomplete, refused ones never started.", "result", map[string]msgValue{
				"complete":  func(s *spin.MessageStats) uint64 { return s.Ended },
				"failed":    func(s *spin.MessageStats) uint64 { return s.Failed },
				"abandoned": func(s *spin.MessageStats) uint64 { return s.Abandoned },
				"discarded": func(s *spin.MessageStats) uint64 { return s.Discarded },
				"refused":   func(s *spin.MessageStats) uint64 { return s.Refused },
			}},
			one("context_segments_duplicate_total", "Segments that had been processed before.", func(s *spin.MessageStats) uint64 { return s.Duplicates }),
			one("context_segments_held_total", "Segments that arrived before their message was open.", func(s *spin.MessageStats) uint64 { return s.Held }),
			segmentsDropped(),
		),
		pair: counters(ofContext,
			one("queue_events_total", "Events given to the application.", func(s *hostq.PairStats) uint64 { return s.Events }),
			one("queue_events_lost_total", "Events that the application will never get.", func(s *hostq.PairStats) uint64 { return s.EventsLost }),
			one("queue_requests_total", "Requests given to the application.", func(s *hostq.PairStats) uint64 { return s.Requests }),
			one("queue_requests_refused_total", "Requests that found no room at first, each counted once.", func(s *hostq.PairStats) uint64 { return s.Full }),
			family[hostq.PairStats]{"queue_responses_total", "Responses of the application: taken, late ones for requests that were given up, and bogus ones for no request.", "result", map[string]func(*hostq.PairStats) uint64{
				"taken": func(s *hostq.PairStats) uint64 { return s.Responses },
				"late":  func(s *hostq.PairStats) uint64 { return s.Late },
				"bogus": func(s *hostq.PairStats) uint64 { return s.Bogus },
			}},
			one("queue_wakeups_total", "System calls to wake the application.", func(s *hostq.PairStats) uint64 { return s.Rung }),
		),

		ruleset:   desc("ruleset_packets_total", "Frames that a ruleset matched.", "interface", "context", "ruleset"),
		time:      desc("context_handler_duration_seconds", "Time of handlers, from one packet to the next in a batch.", ofContext...),
		user:      desc("context_user_value_total", "What handlers have added to a user counter.", "interface", "context", "counter"),
		userCount: desc("context_user_counts_total", "How often handlers have added to a user counter.", "interface", "context", "counter"),
		state:     desc("context_state", "1 for the state that the context is in.", "interface", "context", "state"),
		hook:      desc("context_hook", "1 for the hook that the context's packets come from.", "interface", "context", "hook"),
		attached:  desc("context_attached_processes", "Processes attached to the context.", "interface", "context", "role"),
	}
	m.iface = append(m.iface,
		gauge(ofInterface, "link_up", "1 if the interface is up and has a carrier.", func(s *nic.Stats) float64 {
			if s.Link == neigh.Up {
				return 1
			}
			return 0
		}),
		gauge(ofInterface, "table_generation", "Generation of the matching table.", func(s *nic.Stats) float64 { return float64(s.Generation) }),
		gauge(ofInterface, "handlers_stuck", "Handlers past their time limit that have not returned.", func(s *nic.Stats) float64 { return float64(s.Stuck) }))
	m.hpu = append(m.hpu,
		scalar(prometheus.CounterValue, ofHPU, "hpu_busy_seconds_total", "Time that an HPU has spent on batches.", func(s *hpu.Stats) float64 { return s.Busy.Seconds() }),
		gauge(ofHPU, "hpu_occupancy_buffers", "Buffers on their way to an HPU, or held by it.", func(s *hpu.Stats) float64 { return float64(s.Occupancy) }))
	m.ctx = append(m.ctx,
		gauge(ofContext, "context_credit_buffers", "Buffers that the context may have in flight on a receive queue.", func(s *nic.ContextStats) float64 { return float64(s.Credits) }),
		gauge(ofContext, "context_in_flight_buffers", "Buffers that it has, on the queue with the most.", func(s *nic.ContextStats) float64 { return float64(s.InFlight) }))
	m.msg = append(m.msg,
		gauge(ofContext, "context_messages_open", "Messages in flight.", func(s *spin.MessageStats) float64 { return float64(s.Open) }),
		gauge(ofContext, "context_holes_bytes", "Memory for what is missing in messages in flight.", func(s *spin.MessageStats) float64 { return float64(s.Memory) }))
	m.pair = append(m.pair,
		gauge(ofContext, "queue_requests_outstanding", "Requests without their response yet.", func(s *hostq.PairStats) float64 { return float64(s.Outstanding) }),
		gauge(ofContext, "queue_waiting", "Events and requests that the application has not taken.", func(s *hostq.PairStats) float64 { return float64(s.Waiting) }),
		gauge(ofContext, "queue_broken", "1 if the application has broken the rules of the rings.", func(s *hostq.PairStats) float64 {
			if s.Broken {
				return 1
			}
			return 0
		}))
	return m
}

func segmentsDropped() family[spin.MessageStats] {
	f := family[spin.MessageStats]{"context_segments_dropped_total", "Segments that were dropped, by reason.", "reason", map[string]func(*spin.MessageStats) uint64{}}
	for r := spin.NotDropped + 1; r < spin.DropReasons; r++ {
		f.values[r.String()] = func(s *spin.MessageStats) uint64 { return s.Dropped[r] }
	}
	return f
}

// Describe is for prometheus.Collector.
func (m *metrics) Describe(to chan<- *prometheus.Desc) {
	seen := map[*prometheus.Desc]bool{}
	describe := func(d *prometheus.Desc) {
		if !seen[d] {
			seen[d] = true
			to <- d
		}
	}
	for _, d := range []*prometheus.Desc{m.build, m.ruleset, m.time, m.user, m.userCount, m.state, m.hook, m.attached} {
		describe(d)
	}
	for _, x := range m.iface {
		describe(x.desc)
	}
	for _, x := range m.hpu {
		describe(x.desc)
	}
	for _, x := range m.ctx {
		describe(x.desc)
	}
	for _, x := range m.msg {
		describe(x.desc)
	}
	for _, x := range m.pair {
		describe(x.desc)
	}
}

// Collect is for prometheus.Collector.
func (m *metrics) Collect(to chan<- prometheus.Metric) {
	to <- prometheus.MustNewConstMetric(m.build, prometheus.GaugeValue, 1, m.source.status().Version, runtime.Version())
	all, err := m.source.stats()
	if err != nil {
		to <- prometheus.NewInvalidMetric(m.build, err)
		return
	}
	infos := m.source.infos()
	type key struct{ device, name string }
	number := map[key]int{} // that a context has now: one that is being removed has it no more
	for i := range infos {
		number[key{infos[i].Interface, infos[i].Name}] = infos[i].ID
		m.info(to, &infos[i])
	}
	for i := range all {
		s := &all[i]
		for _, x := range m.iface {
			x.send(to, s, s.Interface)
		}
		for k := range s.HPUs {
			for _, x := range m.hpu {
				x.send(to, &s.HPUs[k], s.Interface, strconv.Itoa(s.HPUs[k].HPU))
			}
		}
		for k := range s.Contexts {
			c := &s.Contexts[k]
			if id, ok := number[key{s.Interface, c.Name}]; ok && id == c.ID {
				m.context(to, s.Interface, c)
			}
		}
	}
}

// info sends what the daemon knows of a context.
func (m *metrics) info(to chan<- prometheus.Metric, i *control.ContextInfo) {
	gauge := func(d *prometheus.Desc, v float64, label string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, i.Interface, i.Name, label)
	}
	for _, s := range []string{installing, installed, active, draining, stopped, failed, ifaceGone} {
		v := 0.0
		if i.State == s {
			v = 1
		}
		gauge(m.state, v, s)
	}
	if i.At != "" {
		gauge(m.hook, 1, i.At)
	}
	observers := 0
	for _, p := range i.Attached {
		if p.Observer {
			observers++
		}
	}
	gauge(m.attached, float64(observers), "observer")
	gauge(m.attached, float64(len(i.Attached)-observers), "application")
	if i.Pair != nil {
		for _, x := range m.pair {
			x.send(to, i.Pair, i.Interface, i.Name)
		}
	}
}

// context sends what the NIC knows of a context.
func (m *metrics) context(to chan<- prometheus.Metric, device string, s *nic.ContextStats) {
	for _, x := range m.ctx {
		x.send(to, s, device, s.Name)
	}
	if s.Messages != nil {
		for _, x := range m.msg {
			x.send(to, s.Messages, device, s.Name)
		}
	}
	matched := map[string]uint64{} // names need not be distinct
	for _, r := range s.Rulesets {
		matched[r.Name] += r.Matched
	}
	for name, n := range matched {
		to <- prometheus.MustNewConstMetric(m.ruleset, prometheus.CounterValue, float64(n), device, s.Name, name)
	}
	for i, u := range s.User {
		if u.Count > 0 {
			to <- prometheus.MustNewConstMetric(m.user, prometheus.CounterValue, float64(u.Sum), device, s.Name, strconv.Itoa(i))
			to <- prometheus.MustNewConstMetric(m.userCount, prometheus.CounterValue, float64(u.Count), device, s.Name, strconv.Itoa(i))
		}
	}
	to <- durations(m.time, &s.HandlerTime, s.HandlerSum, device, s.Name)
}

// durations makes a histogram with seconds from one that counts by powers of two of
// nanoseconds. What is below 64 ns is one bucket, what is above a second another.
func durations(d *prometheus.Desc, h *spin.Histogram, sum time.Duration, labels ...string) prometheus.Metric {
	const first, last = 6, 30
	buckets := map[float64]uint64{}
	var n uint64
	for i, count := range h {
		n += count
		if i >= first && i <= last {
			buckets[float64(uint64(1)<<i)/1e9] = n
		}
	}
	return prometheus.MustNewConstHistogram(d, n, sum.Seconds(), buckets, labels...)
}
