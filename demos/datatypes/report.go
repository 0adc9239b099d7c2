// SPDX-License-Identifier: Apache-2.0

package datatypes

import (
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

// Env is what was on while it was measured.
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
	AppCPU    int             `json:"app_cpu"`    // -1: any; also MPICH's receiver's
	SenderCPU int             `json:"sender_cpu"` // -1: any; also MPICH's sender's
	Runs      int             `json:"runs"`
	Links     []rtt.LinkState `json:"links"` // the NIC's end and the host's
}

// Result is one transfer. The stream was packed before all rounds, and times begin with
// the request to the sender.
type Result struct {
	Type     string `json:"type"`
	Text     string `json:"text,omitempty"` // if the type has another name
	Strategy string `json:"strategy"`
	Interval int64  `json:"interval,omitempty"` // between checkpoints, as asked for
	Tier     string `json:"tier"`               // of the handlers: user

	Elements int64 `json:"elements"`      // in a message
	Parallel int   `json:"parallel"`      // messages in a round
	Message  int64 `json:"message_bytes"` // of its stream
	Bytes    int64 `json:"round_bytes"`   // of all streams
	Span     int64 `json:"span_bytes"`    // of memory, from the first that a message touches to the last

	Gbps    Figure `json:"gbps"`        // until the application knew that all was there
	Seconds Figure `json:"seconds"`     // for that
	NIC     Figure `json:"nic_seconds"` // until the last message was over, by the NIC's timestamp

	Packets       uint64  `json:"packets"`       // that handlers have placed, a round; 0: not counted
	Segments      uint64  `json:"segments"`      // sent, each counted once, all runs together
	Retransmitted uint64  `json:"retransmitted"` // sent again, all runs together
	Blocks        int64   `json:"blocks"`        // pieces in a row of a message
	Copies        uint64  `json:"copies"`        // that handlers made, a round: of each packet's pieces
	PerPacket     float64 `json:"copies_per_packet,omitempty"`

	Placement placement `json:"placement_memory"` // bytes of the NIC's memory
	CPU       cpuPerGB  `json:"cpu_s_per_gb"`     // user and system time of the processes, medians

	Verified *bool    `json:"verified"` // null: was not looked at
	Overlap  *Overlap `json:"overlap,omitempty"`

	transfer           *transfer
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

// Overlap is computation and transfers at the same time.
type Overlap struct {
	N      int       `json:"n"`      // rows and columns of the matrices
	GEMMs  int       `json:"gemms"`  // products, one after the other
	GFLOPS float64   `json:"gflops"` // of them alone, in one thread
	XsPIN  *Overlaps `json:"xspin"`
	MPICH  *Overlaps `json:"mpich,omitempty"`
}

// Overlaps are figures of one receiver. Times are of all GEMMs and of all messages of a
// round, in seconds.
type Overlaps struct {
	GEMMs    Figure  `json:"gemms_s"`    // alone
	Transfer Figure  `json:"transfer_s"` // alone
	Both     Figure  `json:"both_s"`     // together, until both were done
	NIC      *Figure `json:"nic_s,omitempty"`

	Hidden         Figure  `json:"hidden"`          // (gemms + transfer - both) / transfer
	GEMMsSlower    Figure  `json:"gemms_slower"`    // by the transfer: a factor
	TransferSlower Figure  `json:"transfer_slower"` // by the GEMMs, until it is detected
	NICSlower      *Figure `json:"nic_slower,omitempty"`

	Ratio  Figure `json:"fpspin_ratio"`     // time of GEMMs by time to detection
	Misses *int   `json:"misses,omitempty"` // XsPIN: trials in which the GEMMs were over first
}

func newResult(i Info) *Result {
	r := &Result{
		Type: i.name(), Strategy: i.Strategy, Interval: i.Interval, Tier: "user", Elements: i.Count, Parallel: i.Parallel,
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
	fmt.Fprintf(&b, "%s, %d CPUs, MTU %d; application on CPU %s, sender on %s, NIC on %s; %d HPUs wait: %s\n\n",
		r.Env.Kernel, r.Env.CPUs, r.Env.MTU, cpus(r.Env.AppCPU), cpus(r.Env.SenderCPU), cpus(r.Env.NICCPUs...), r.Env.HPUs, r.Env.NICWait)

	w := tabwriter.NewWriter(&b, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "type\tstrategy\tmessages\tGbit/s\t[95 %]\tpackets\tagain\tcopies/packet\tNIC memory\tverified\t")
	for _, res := range r.Results {
		again := fmt.Sprintf("%.1f %%", 100*float64(res.Retransmitted)/float64(max(res.Segments, 1)))
		packets, copies := "-", "-"
		if res.Packets > 0 {
			packets, copies = fmt.Sprint(res.Packets), fmt.Sprintf("%.1f", res.PerPacket)
		}
		fmt.Fprintf(w, "%s\t%s\t%d of %s\t%.2f\t[%.2f, %.2f]\t%s\t%s\t%s\t%s\t%s\t\n", short(res.Type), res.Strategy, res.Parallel, file.Bytes(res.Message),
			res.Gbps.Median, res.Gbps.CI95[0], res.Gbps.CI95[1], packets, again, copies, file.Bytes(res.Placement.Total), verdict(res.Verified))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, res := range r.Results {
		if res.Overlap != nil {
			res.writeOverlap(&b)
		}
	}
	r.writeNotes(&b)
	_, err := io.WriteString(out, b.String())
	return err
}

// writeOverlap writes the table of a type's overlap.
func (r *Result) writeOverlap(b *strings.Builder) {
	o := r.Overlap
	fmt.Fprintf(b, "\n%s: %d of %s, and %d products of %d x %d doubles (%.1f GFLOP/s in one thread); ms\n\n",
		short(r.Type), r.Parallel, file.Bytes(r.Message), o.GEMMs, o.N, o.N, o.GFLOPS)
	w := tabwriter.NewWriter(b, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "\tproducts\tmessages\tboth\thidden\tproducts slower\tmessages slower\tat the NIC\tFPsPIN's ratio\tmissed\t")
	for _, x := range []struct {
		name string
		*Overlaps
	}{{"XsPIN", o.XsPIN}, {"MPICH", o.MPICH}} {
		if x.Overlaps == nil {
			continue
		}
		nic, missed := "-", "-"
		if x.NIC != nil {
			nic = ms(*x.NIC)
		}
		if x.Misses != nil {
			missed = fmt.Sprint(*x.Misses)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%.0f %%\t%.2f\t%.2f\t%s\t%.3f\t%s\t\n", x.name, ms(x.GEMMs), ms(x.Transfer), ms(x.Both), 100*x.Hidden.Median,
			x.GEMMsSlower.Median, x.TransferSlower.Median, nic, x.Ratio.Median, missed)
	}
	_ = w.Flush()
	if o.MPICH != nil {
		fmt.Fprintf(b, "\nboth together, XsPIN / MPICH: %.2f\n", o.XsPIN.Both.Median/o.MPICH.Both.Median)
	}
}

// writeNotes says what the tables mean.
func (r *Report) writeNotes(b *strings.Builder) {
	b.WriteString("\nmessages were packed before; times begin with the request to the sender\n")
	if slices.ContainsFunc(r.Results, func(s *Result) bool { return s.Overlap != nil }) {
		b.WriteString("hidden: (products + messages - both) / messages. FPsPIN's ratio: products / time until a look between two\n" +
			"products finds all messages; it tends to 1 by construction. MPICH: Irecv, a test between products, TCP without XDP\n")
	}
	if len(r.Env.Links) == 2 {
		n, h := r.Env.Links[0], r.Env.Links[1]
		fmt.Fprintf(b, "on: %s: XDP %s; %s: TSO %s, checksums %s\n", n.Device, n.XDP, h.Device, h.TSO, h.Checksums())
	}
	for _, n := range r.Notes {
		fmt.Fprintf(b, "note: %s\n", n)
	}
}

func ms(f Figure) string { return fmt.Sprintf("%.1f", 1e3*f.Median) }

// cpus names CPUs, -1 being any.
func cpus(list ...int) string {
	if len(list) == 0 || list[0] < 0 {
		return "any"
	}
	return strings.Trim(fmt.Sprint(list), "[]")
}

// short is a name that fits a table.
func short(s string) string {
	const most = 24
	if len(s) <= most {
		return s
	}
	return s[:most-3] + "..."
}

func verdict(v *bool) string {
	switch {
	case v == nil:
		return "-"
	case *v:
		return "yes"
	}
	return "NO"
}
