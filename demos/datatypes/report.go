// SPDX-License-Identifier: Apache-2.0

package datatypes

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/xspin/xspin/demos/file"
	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/internal/quantile"
)

// Report is what the demo prints: WriteJSON for programs, WriteText for people.
type Report struct {
	Schema  int       `json:"schema"` // 1
	Env     Env       `json:"env"`
	Results []*Result `json:"results"`
	Notes   []string  `json:"notes,omitempty"`
}

// Env is under which conditions it was measured.
type Env struct {
	Kernel    string          `json:"kernel"`
	CPU       string          `json:"cpu"`
	CPUs      int             `json:"cpus"` // that this process may use
	Go        string          `json:"go"`
	MTU       int             `json:"mtu"`
	Queues    int             `json:"queues"` // of each device
	HPUs      int             `json:"hpus"`
	NICWait   string          `json:"nic_wait"`
	NICCPUs   []int           `json:"nic_cpus"`   // empty: any
	AppCPU    int             `json:"app_cpu"`    // -1: any
	SenderCPU int             `json:"sender_cpu"` // -1: any
	Runs      int             `json:"runs"`
	Load      string          `json:"load"`           // average over the minute before; other load spoils the figures
	GEMM      *GEMM           `json:"gemm,omitempty"` // with Overlap
	Links     []rtt.LinkState `json:"links"`          // the NIC's end and the host's
}

// GEMM is what matrices are multiplied with.
type GEMM struct {
	Library string `json:"library"`
	Threads int    `json:"threads"`
}

// Model is what the checkpoint interval was chosen from.
type Model struct {
	PacketTime int64 `json:"packet_time_ns"` // between packets, of the same messages put in a row
	Handler    int64 `json:"handler_ns"`     // that places a packet
}

// Result is one transfer. The stream was packed before all rounds, and times start with
// the request to the sender.
type Result struct {
	Type     string `json:"type"`
	Text     string `json:"text,omitempty"` // of the type, if it has a name
	Strategy string `json:"strategy"`
	Interval int64  `json:"interval,omitempty"` // bytes between checkpoints
	Model    *Model `json:"model,omitempty"`    // by which the interval was chosen, unless it was given
	Tier     string `json:"tier"`               // of the handlers: user

	Elements int64 `json:"elements"`      // in a message
	Parallel int   `json:"parallel"`      // messages in a round
	Message  int64 `json:"message_bytes"` // of its stream
	Bytes    int64 `json:"round_bytes"`   // of all streams
	Span     int64 `json:"span_bytes"`    // of memory, from the first that a message touches to the last

	Gbps    Figure `json:"gbps"`        // until the application knew that all was there
	Seconds Figure `json:"seconds"`     // for that
	NIC     Figure `json:"nic_seconds"` // until the last message ended, by the NIC's timestamp

	Packets       uint64  `json:"packets"`       // placed by handlers, per round; 0: not counted
	Segments      uint64  `json:"segments"`      // sent, each counted once, all runs together
	Retransmitted uint64  `json:"retransmitted"` // sent again, all runs together
	Duplicates    uint64  `json:"duplicates"`    // received again by the NIC, all runs together
	Blocks        int64   `json:"blocks"`        // contiguous pieces of a message
	Copies        uint64  `json:"copies"`        // made by handlers, per round: one for each piece of a packet
	PerPacket     float64 `json:"copies_per_packet,omitempty"`

	Placement placement `json:"placement_memory"` // bytes of the NIC's memory
	CPU       cpuPerGB  `json:"cpu_s_per_gb"`     // user and system time of the processes, medians

	Verified *bool    `json:"verified"` // null: was not looked at
	Overlap  *Overlap `json:"overlap,omitempty"`

	policy             string // that packets are scheduled by
	gbps, seconds, nic []float64
	cpus               [3][]float64
}

type placement struct {
	Type        int64 `json:"type"`
	Checkpoints int64 `json:"checkpoints"`
	Segments    int64 `json:"segments"`
	Total       int64 `json:"total"`
}

// cpuPerGB are CPU seconds for 10^9 bytes.
type cpuPerGB struct {
	NIC    float64 `json:"nic"`
	App    float64 `json:"app"`
	Sender float64 `json:"sender"` // with the softirqs of both ends
}

// Overlap is computation and transfers at the same time. Times are of all GEMMs and of all
// messages of a round, in seconds.
type Overlap struct {
	N         int     `json:"n"`         // rows and columns of the matrices
	Count     int     `json:"gemms"`     // products, one after the other
	Converged bool    `json:"converged"` // the matrices' size was found
	Steady    bool    `json:"steady"`    // products alone took no longer than with messages; 10 % are allowed
	GFLOPS    float64 `json:"gflops"`    // of products alone

	GEMMs    Figure `json:"gemms_s"`    // alone
	Transfer Figure `json:"transfer_s"` // alone
	Both     Figure `json:"both_s"`     // together, until both were done
	NIC      Figure `json:"nic_s"`      // until the last message ended, by the NIC's timestamp

	Hidden         Figure `json:"hidden"`          // (gemms + transfer - both) / transfer
	GEMMsSlower    Figure `json:"gemms_slower"`    // by the transfer: a factor
	TransferSlower Figure `json:"transfer_slower"` // by the GEMMs, until it is detected
	NICSlower      Figure `json:"nic_slower"`

	Ratio  Figure `json:"fpspin_ratio"` // time of GEMMs by time to detection
	Misses int    `json:"misses"`       // trials in which the GEMMs were over first
}

func newResult(i Info) *Result {
	r := &Result{
		Type: i.name(), policy: i.Policy, Strategy: i.Strategy, Interval: i.Interval, Tier: "user", Elements: i.Count, Parallel: i.Parallel,
		Message: i.Message, Bytes: i.Message * int64(i.Parallel), Span: i.Span, Blocks: i.Blocks,
		Placement: placement{i.Placement.Type, i.Placement.Checkpoints, i.Placement.Segments, i.Placement.Total()},
	}
	if r.Type != i.Type {
		r.Text = i.Type
	}
	return r
}

// add adds a round.
func (r *Result) add(round *Round) {
	seconds := round.Took.Seconds()
	r.gbps = append(r.gbps, float64(round.Bytes)*8/1e9/seconds)
	r.seconds = append(r.seconds, seconds)
	r.nic = append(r.nic, round.NIC.Seconds())
	r.Gbps, r.Seconds, r.NIC = newFigure(r.gbps), newFigure(r.seconds), newFigure(r.nic)
	r.Segments += round.Segments
	r.Retransmitted += round.Retransmitted
	r.Duplicates += round.Duplicates
	r.Packets, r.Copies = round.Packets, round.Copies
	if r.Packets > 0 {
		r.PerPacket = float64(r.Copies) / float64(r.Packets)
	}
	gb := float64(round.Bytes) / 1e9
	for i, used := range []float64{round.CPU.NIC.Seconds(), round.CPU.App.Seconds(), round.CPU.Sender.Seconds()} {
		r.cpus[i] = append(r.cpus[i], used/gb)
	}
	r.CPU = cpuPerGB{quantile.Median(r.cpus[0]), quantile.Median(r.cpus[1]), quantile.Median(r.cpus[2])}
}

// doubt notes why the figures of an overlap may be unreliable.
func (r *Report) doubt(res *Result) {
	o := res.Overlap
	who := short(res.Type) + ", " + res.Strategy
	if !o.Converged {
		r.note(who + ": no size of matrices was found with which messages arrive during the last products; it is the last one tried")
	}
	if o.Steady {
		return
	}
	r.note(fmt.Sprintf("%s: the machine was not steady: the same products took %s ms alone, and %.2f of that during a transfer",
		who, ms(o.GEMMs.Median), o.GEMMsSlower.Median))
}

func (r *Report) note(s string) {
	if !slices.Contains(r.Notes, s) {
		r.Notes = append(r.Notes, s)
	}
}

// WriteJSON writes the report as one document.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// WriteText writes the report as tables.
func (r *Report) WriteText(out io.Writer) error {
	var b strings.Builder
	b.WriteString("Messages of MPI datatypes, scattered into an application's window by handlers on a NIC\n")
	fmt.Fprintf(&b, "%s, %d CPUs, load %s before; MTU %d\napplication on CPU %s, sender on %s, NIC on %s; %d HPUs wait: %s\n\n",
		r.Env.Kernel, r.Env.CPUs, r.Env.Load, r.Env.MTU, cpus(r.Env.AppCPU), cpus(r.Env.SenderCPU), cpus(r.Env.NICCPUs...), r.Env.HPUs, r.Env.NICWait)

	names := r.names()
	w := tabwriter.NewWriter(&b, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "type\tstrategy\tmessages\tGbit/s\t[95 %]\tpackets\tagain\tcopies/packet\tNIC memory\tverified\t")
	for i, res := range r.Results {
		again := fmt.Sprintf("%.1f %%", 100*float64(res.Retransmitted)/float64(max(res.Segments, 1)))
		packets, copies := "-", "-"
		if res.Packets > 0 {
			packets, copies = fmt.Sprint(res.Packets), fmt.Sprintf("%.1f", res.PerPacket)
		}
		fmt.Fprintf(w, "%s\t%s\t%d of %s\t%.2f\t[%.2f, %.2f]\t%s\t%s\t%s\t%s\t%s\t\n", names[i], res.Strategy, res.Parallel, file.Bytes(res.Message),
			res.Gbps.Median, res.Gbps.CI95[0], res.Gbps.CI95[1], packets, again, copies, file.Bytes(res.Placement.Total), verdict(res.Verified))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for i, res := range r.Results {
		who := names[i] + ", " + res.Strategy
		if m := res.Model; m != nil {
			fmt.Fprintf(&b, "%s: a checkpoint every %d bytes, for a packet every %d ns and handlers of %d ns\n", who, res.Interval, m.PacketTime, m.Handler)
		}
		if why := res.again(); why != "" {
			fmt.Fprintf(&b, "%s: sent again: %s\n", who, why)
		}
	}
	for i, res := range r.Results {
		if res.Overlap != nil {
			r.writeOverlap(&b, names[i], res)
		}
	}
	r.writeNotes(&b)
	_, err := io.WriteString(out, b.String())
	return err
}

// names returns the types' names for tables: shortened, with a number where shortened
// names are the same.
func (r *Report) names() []string {
	first := map[string][]string{} // types that look so
	var names []string
	for _, res := range r.Results {
		s := short(res.Type)
		whole := cmp.Or(res.Text, res.Type)
		if !slices.Contains(first[s], whole) {
			first[s] = append(first[s], whole)
		}
		if n := slices.Index(first[s], whole); n > 0 {
			s = fmt.Sprintf("%s #%d", s, n+1)
		}
		names = append(names, s)
	}
	return names
}

// again says why packets were sent again, if many were.
func (r *Result) again() string {
	switch {
	case r.Retransmitted*20 <= r.Segments:
		return ""
	case r.Duplicates*10 < r.Retransmitted*9:
		return fmt.Sprintf("%d %% were lost", 100-100*r.Duplicates/r.Retransmitted)
	case r.policy == "blocked-rr":
		return "none was lost: HPUs share a message and answer out of order (blocked-rr)"
	}
	return "none was lost: answers came late"
}

// writeOverlap writes the table of a type's overlap.
func (r *Report) writeOverlap(b *strings.Builder, name string, res *Result) {
	o := res.Overlap
	g := r.Env.GEMM
	fmt.Fprintf(b, "\n%s: %d of %s, and %d products of %d x %d doubles (%s, threads: %d, %.1f GFLOP/s); times in ms\n\n",
		name, res.Parallel, file.Bytes(res.Message), o.Count, o.N, o.N, g.Library, g.Threads, o.GFLOPS)
	w := tabwriter.NewWriter(b, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "\t\t[95 %]\t")
	factor := func(v float64) string { return fmt.Sprintf("%.2f", v) }
	for _, row := range []struct {
		name   string
		figure Figure
		print  func(float64) string
	}{
		{"products alone", o.GEMMs, ms},
		{"messages alone", o.Transfer, ms},
		{"both together", o.Both, ms},
		{"hidden", o.Hidden, func(v float64) string { return fmt.Sprintf("%.0f %%", 100*v) }},
		{"products slower", o.GEMMsSlower, factor},
		{"messages slower", o.TransferSlower, factor},
		{"at the NIC", o.NIC, ms},
		{"FPsPIN's ratio", o.Ratio, func(v float64) string { return fmt.Sprintf("%.3f", v) }},
	} {
		f := row.figure
		fmt.Fprintf(w, "%s\t%s\t[%s, %s]\t\n", row.name, row.print(f.Median), row.print(f.CI95[0]), row.print(f.CI95[1]))
	}
	fmt.Fprintf(w, "missed\t%d\t\t\n", o.Misses)
	_ = w.Flush()
	if h := o.Hidden.Median; h < 0 || h > 1 {
		b.WriteString("\nhidden below 0 %: both together took longer than one after the other, as they share CPUs, caches and memory;\n" +
			"above 100 %: both together took less than the products alone, which is noise: more runs make it smaller\n")
	}
}

// writeNotes says what the tables mean.
func (r *Report) writeNotes(b *strings.Builder) {
	b.WriteString("\nmessages were packed before; times begin with the request to the sender\n")
	if slices.ContainsFunc(r.Results, func(s *Result) bool { return s.Overlap != nil }) {
		b.WriteString("hidden: (products + messages - both) / messages. FPsPIN's ratio: products / time until a look between two\n" +
			"products finds all messages; it tends to 1 by construction. missed: times that products were over before messages\n")
	}
	if len(r.Env.Links) == 2 {
		n, h := r.Env.Links[0], r.Env.Links[1]
		fmt.Fprintf(b, "on: %s: XDP %s; %s: TSO %s, checksums %s\n", n.Device, n.XDP, h.Device, h.TSO, h.Checksums())
	}
	for _, n := range r.Notes {
		fmt.Fprintf(b, "note: %s\n", n)
	}
}

func ms(seconds float64) string { return fmt.Sprintf("%.1f", 1e3*seconds) }

// cpus names CPUs, -1 being any.
func cpus(list ...int) string {
	if len(list) == 0 || list[0] < 0 {
		return "any"
	}
	return strings.Trim(fmt.Sprint(list), "[]")
}

// short is a name that fits a table.
func short(s string) string { return cut(s, 24) }

func verdict(v *bool) string {
	switch {
	case v == nil:
		return "-"
	case *v:
		return "yes"
	}
	return "NO"
}
