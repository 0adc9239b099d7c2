// SPDX-License-Identifier: Apache-2.0

package pingpong

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/internal/quantile"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/testbed"
)

// Report is what the demo prints: WriteJSON for programs, WriteText for people.
type Report struct {
	Schema  int      `json:"schema"` // 1
	Env     Env      `json:"env"`
	Results []Result `json:"results"`
}

// Env is under which conditions it was measured.
type Env struct {
	Kernel     string `json:"kernel"`
	CPU        string `json:"cpu"`
	CPUs       int    `json:"cpus"` // that this process may use
	Go         string `json:"go"`
	GOMAXPROCS int    `json:"gomaxprocs"`

	ClientWait rtt.Wait `json:"client_wait"`
	ClientCPU  int      `json:"client_cpu"` // -1: any
	IntervalUS float64  `json:"interval_us"`
	Warmup     int      `json:"warmup"`
	HostWait   rtt.Wait `json:"host_wait"` // of the UDP echo in mode host
	HPUs       int      `json:"hpus"`
	NICWait    string   `json:"nic_wait"`
	NICCPUs    []int    `json:"nic_cpus"`    // empty: any; the first is the UDP echo's in mode host, and the application's
	AppSpinUS  float64  `json:"app_spin_us"` // of the application in mode host+nic, before it sleeps
	Queues     int      `json:"queues"`      // of each device

	// Links is, by mode, the state of the NIC's end and of the host's.
	Links map[Mode][]rtt.LinkState `json:"links"`
}

// Result is one protocol and size in one mode.
type Result struct {
	Proto rtt.Proto `json:"proto"`
	Mode  Mode      `json:"mode"`
	Tier  string    `json:"tier,omitempty"` // where the handlers ran: user or kernel; mode host has none
	Hook  string    `json:"hook,omitempty"` // of tier kernel: xdp or tc
	Size  int       `json:"size"`           // payload, bytes
	Count int       `json:"count"`
	Lost  int       `json:"lost"`
	Bad   int       `json:"bad,omitempty"` // wrong replies

	RTT *RTT `json:"rtt_us"` // null if there was no reply
	// Breakdown is null if pings were lost or answered twice, because replies cannot
	// be matched to pings then.
	Breakdown *Micros `json:"breakdown_us,omitempty"`
}

// RTT summarizes the round trips of a Result, in microseconds.
type RTT struct {
	Min  float64           `json:"min"`
	P50  float64           `json:"p50"`
	P95  float64           `json:"p95"`
	P99  float64           `json:"p99"`
	CI95 quantile.Interval `json:"ci95"` // bootstrap interval of P50
}

// Micros says where a round trip through the NIC goes, in microseconds: means over the
// middle half of the pings, those from the first quartile to the third. The parts add up
// to the mean round trip of these.
type Micros struct {
	WireAndClient    float64 `json:"wire_and_client"`
	ArrivalToHandler float64 `json:"arrival_to_handler,omitempty"` // part of the rest if left out
	Handler          float64 `json:"handler"`
	Host             float64 `json:"host,omitempty"` // with mode host+nic
}

func newResult(p rtt.Proto, m Mode, size int, pings rtt.Result) Result {
	tier, hook := "user", ""
	switch m {
	case Host:
		tier = ""
	case XDP:
		m, tier, hook = NIC, "kernel", "xdp"
	case TC:
		m, tier, hook = NIC, "kernel", "tc"
	}
	r := Result{Proto: p, Mode: m, Tier: tier, Hook: hook, Size: size, Count: pings.Sent, Lost: pings.Lost, Bad: pings.Bad}
	if len(pings.Samples) > 0 {
		us := make([]float64, len(pings.Samples))
		for i, ns := range pings.Samples {
			us[i] = float64(ns) / 1e3
		}
		s := quantile.Summarize(us)
		r.RTT = &RTT{s.Min, s.P50, s.P95, s.P99, s.CI95}
	}
	return r
}

// Measured is the Mode that the result was measured in.
func (r *Result) Measured() Mode {
	switch r.Hook {
	case "xdp":
		return XDP
	case "tc":
		return TC
	}
	return r.Mode
}

// newMicros makes means of round trips, in sending order, and of what the NIC noted,
// which includes the pings of the warm-up. Of more pings than a series takes, it uses
// the first.
func newMicros(b Breakdown, rtts []int64, warmup int) *Micros {
	all := min(warmup+len(rtts), len(series{}.ns))
	for _, part := range [][]int64{b.ArrivalToHandler, b.Handler, b.Host} {
		if n := len(part); n != all && n != 0 || all <= warmup {
			return nil
		}
	}
	rtts = rtts[:all-warmup]
	middle := make([]int, len(rtts))
	for i := range middle {
		middle[i] = i
	}
	slices.SortFunc(middle, func(x, y int) int { return cmp.Compare(rtts[x], rtts[y]) })
	middle = middle[len(middle)/4 : len(middle)-len(middle)/4]
	mean := func(ns []int64) float64 {
		if len(ns) == 0 {
			return 0
		}
		sum := int64(0)
		for _, i := range middle {
			sum += ns[len(ns)-len(rtts)+i] // after the warm-up
		}
		return float64(sum) / float64(len(middle)) / 1e3
	}
	m := &Micros{ArrivalToHandler: mean(b.ArrivalToHandler), Handler: mean(b.Handler), Host: mean(b.Host)}
	m.WireAndClient = max(0, mean(rtts)-m.ArrivalToHandler-m.Handler-m.Host)
	return m
}

// verdict returns an error if pings were lost or answered wrongly.
func (r *Report) verdict() error {
	for _, res := range r.Results {
		if res.Bad > 0 || res.RTT == nil {
			return fmt.Errorf("%w: %s by %s, %d bytes: of %d pings %d lost, %d with a wrong reply",
				ErrReplies, res.Proto, res.Measured(), res.Size, res.Count, res.Lost, res.Bad)
		}
	}
	return nil
}

func environment(lab *netns.Lab, c Config) Env {
	return Env{
		Kernel: testbed.Kernel(), CPU: testbed.CPU(), CPUs: runtime.NumCPU(), Go: runtime.Version(), GOMAXPROCS: runtime.GOMAXPROCS(0),
		ClientWait: c.ClientWait, ClientCPU: c.ClientCPU, IntervalUS: float64(c.Interval.Nanoseconds()) / 1e3, Warmup: c.Warmup,
		HostWait: rtt.Block, HPUs: c.Server.HPUs, NICWait: c.Server.Wait, NICCPUs: append([]int{}, c.Server.CPUs...),
		AppSpinUS: float64(c.Server.AppSpin.Nanoseconds()) / 1e3, Queues: lab.Queues, Links: map[Mode][]rtt.LinkState{},
	}
}

// WriteJSON writes the report as one JSON document.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// WriteText writes the report as tables of at most 100 columns.
func (r *Report) WriteText(w io.Writer) error {
	var b strings.Builder
	e := r.Env
	fmt.Fprintf(&b, "%s, %s, %d CPUs, %s\n", e.Kernel, e.CPU, e.CPUs, e.Go)
	fmt.Fprintf(&b, "client: waits by %s, %s, interval %g us, warm-up %d; link: %d queues\n", e.ClientWait, cpuList(e.ClientCPU), e.IntervalUS, e.Warmup, e.Queues)
	for _, m := range r.modes() {
		first := append(slices.Clone(e.NICCPUs), -1)[0]
		hpus := fmt.Sprintf("%d HPUs, wait by %s, %s", e.HPUs, e.NICWait, cpuList(append(slices.Clone(e.NICCPUs), -1)[:max(1, len(e.NICCPUs))]...))
		switch m {
		case Host:
			fmt.Fprintf(&b, "host: Linux's ICMP responder; UDP socket, waits by %s, %s\n", e.HostWait, cpuList(first))
		case NIC:
			fmt.Fprintf(&b, "nic: %s\n", hpus)
		case XDP, TC:
			fmt.Fprintf(&b, "%s: handlers in eBPF, on the CPU that the request comes from\n", m)
		case HostNIC:
			fmt.Fprintf(&b, "host+nic: %s;\n  application, user %d, spins %g us before it sleeps, %s\n", hpus, rtt.Nobody, e.AppSpinUS, cpuList(first))
		}
		for _, l := range e.Links[m] {
			fmt.Fprintf(&b, "  %s: XDP %s, TSO %s, GSO %s, GRO %s, transmit checksums %s\n", l.Device, l.XDP,
				l.TSO, l.GSO, l.GRO, l.Checksums())
		}
	}
	r.compare(&b)
	r.list(&b)
	_, err := io.WriteString(w, b.String())
	return err
}

// modes are those that ran.
func (r *Report) modes() (ran []Mode) {
	for _, m := range Modes {
		if r.Env.Links[m] != nil {
			ran = append(ran, m)
		}
	}
	return ran
}

// A pinged is what the rows of compare are about.
type pinged struct {
	proto rtt.Proto
	size  int
}

// compare is one row per protocol and size, with the modes side by side. With more than
// three the ratios need a table of their own; with more than four there is no room for intervals.
func (r *Report) compare(w io.Writer) {
	rows := map[pinged]map[Mode]*Result{}
	var order []pinged
	for i, res := range r.Results {
		k := pinged{res.Proto, res.Size}
		if rows[k] == nil {
			rows[k] = map[Mode]*Result{}
			order = append(order, k)
		}
		rows[k][res.Measured()] = &r.Results[i]
	}

	modes := r.modes()
	var ratios []Mode // to Host
	for _, m := range modes {
		if m != Host && modes[0] == Host {
			ratios = append(ratios, m)
		}
	}
	const wide, wider = 3, 4
	if len(modes) <= wider {
		fmt.Fprint(w, "\nMedian round trip [95 % interval], us\n\n")
	} else {
		fmt.Fprint(w, "\nMedian round trip, us (--json has the 95 % intervals)\n\n")
	}
	t := newTable(w)
	fmt.Fprint(t, "proto\tsize\t")
	for _, m := range modes {
		fmt.Fprintf(t, "%s\t", m)
	}
	if len(modes) <= wide {
		writeRatioNames(t, ratios)
	}
	fmt.Fprintln(t)
	for _, k := range order {
		fmt.Fprintf(t, "%s\t%d\t", k.proto, k.size)
		for _, m := range modes {
			switch res := rows[k][m]; {
			case res == nil:
				fmt.Fprint(t, "-\t")
			case res.RTT == nil:
				fmt.Fprint(t, "none\t")
			case len(modes) > wider:
				fmt.Fprintf(t, "%s\t", digits(res.RTT.P50))
			default:
				fmt.Fprintf(t, "%s [%s,%s]\t", digits(res.RTT.P50), digits(res.RTT.CI95[0]), digits(res.RTT.CI95[1]))
			}
		}
		if len(modes) <= wide {
			writeRatios(t, rows[k], ratios)
		}
		fmt.Fprintln(t)
	}
	t.Flush()
	if len(modes) <= wide || len(ratios) == 0 {
		return
	}
	fmt.Fprint(w, "\nMedians, over those of host\n\n")
	t = newTable(w)
	fmt.Fprint(t, "proto\tsize\t")
	writeRatioNames(t, ratios)
	fmt.Fprintln(t)
	for _, k := range order {
		if rows[k][Host] == nil {
			continue
		}
		fmt.Fprintf(t, "%s\t%d\t", k.proto, k.size)
		writeRatios(t, rows[k], ratios)
		fmt.Fprintln(t)
	}
	t.Flush()
}

func writeRatioNames(t io.Writer, modes []Mode) {
	for _, m := range modes {
		fmt.Fprint(t, map[Mode]string{NIC: "nic/host\t", XDP: "xdp/host\t", TC: "tc/host\t", HostNIC: "h+n/host\t"}[m])
	}
}

func writeRatios(t io.Writer, row map[Mode]*Result, modes []Mode) {
	for _, m := range modes {
		a, b := row[m], row[Host]
		if a != nil && b != nil && a.RTT != nil && b.RTT != nil {
			fmt.Fprintf(t, "%.2f\t", a.RTT.P50/b.RTT.P50)
		} else {
			fmt.Fprint(t, "-\t")
		}
	}
}

// list is one row per result, with everything but the interval.
func (r *Report) list(w io.Writer) {
	fmt.Fprint(w, "\nAll round trips, us; where handlers run also the parts of those in the middle half: wire and\n"+
		"client, frame arrival to handler start (wait), handlers (hpu), the application's answer (host)\n\n")
	t := newTable(w)
	fmt.Fprint(t, "proto\tmode\tsize\tcount\tlost\tbad\tmin\tp50\tp95\tp99\twire\twait\thpu\thost\t\n")
	for _, res := range r.Results {
		fmt.Fprintf(t, "%s\t%s\t%d\t%d\t%d\t%d\t", res.Proto, res.Measured(), res.Size, res.Count, res.Lost, res.Bad)
		if v := res.RTT; v != nil {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t", digits(v.Min), digits(v.P50), digits(v.P95), digits(v.P99))
		} else {
			fmt.Fprint(t, "-\t-\t-\t-\t")
		}
		b := res.Breakdown
		if b == nil {
			b = &Micros{}
		}
		for _, us := range []float64{b.WireAndClient, b.ArrivalToHandler, b.Handler, b.Host} {
			if us == 0 {
				fmt.Fprint(t, "-\t")
			} else {
				fmt.Fprintf(t, "%s\t", digits(us))
			}
		}
		fmt.Fprintln(t)
	}
	t.Flush()
}

func newTable(w io.Writer) *tabwriter.Writer {
	return tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
}

// digits keeps long times, which are outliers, from widening a column.
func digits(us float64) string {
	switch {
	case us < 100:
		return fmt.Sprintf("%.2f", us)
	case us < 1000:
		return fmt.Sprintf("%.1f", us)
	}
	return fmt.Sprintf("%.0f", us)
}

func cpuList(cpus ...int) string {
	if cpus[0] < 0 {
		return "on any CPU"
	}
	return "on CPU " + strings.Trim(fmt.Sprint(cpus), "[]")
}
