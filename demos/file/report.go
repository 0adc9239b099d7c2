// SPDX-License-Identifier: Apache-2.0

package file

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/internal/quantile"
)

// Report is what the demo prints: WriteJSON for programs, WriteText for people.
type Report struct {
	Schema   int       `json:"schema"` // 1
	Env      Env       `json:"env"`
	Size     int64     `json:"size"`     // of the file, bytes
	Parallel int       `json:"parallel"` // how many times it was sent at once
	SHA256   string    `json:"sha256"`   // of source and every file received
	Files    []string  `json:"files,omitempty"`
	Results  []*Result `json:"results"`
	Notes    []string  `json:"notes,omitempty"`
}

// Env is under which conditions it was measured.
type Env struct {
	Kernel    string `json:"kernel"`
	CPUs      int    `json:"cpus"` // that this process may use
	Go        string `json:"go"`
	MTU       int    `json:"mtu"`
	Queues    int    `json:"queues"` // of each device
	HPUs      int    `json:"hpus"`
	NICWait   string `json:"nic_wait"`
	NICCPUs   []int  `json:"nic_cpus"`   // empty: any; the first is also iperf3's server's
	SenderCPU int    `json:"sender_cpu"` // -1: any; also iperf3's client's
	Window    string `json:"window"`     // segments in flight per message
	Dir       string `json:"dir"`        // where the files go
}

// Result is one mode.
type Result struct {
	Mode    Mode      `json:"mode"`
	Gbps    Spread    `json:"gbps"`    // goodput, first byte to last acknowledgement
	Seconds []float64 `json:"seconds"` // run by run

	Retransmitted uint64 `json:"retransmitted"` // segments, all runs together

	// With SLMP, all runs together.
	Segments   uint64    `json:"segments,omitempty"`
	Unverified uint64    `json:"unverified,omitempty"` // segments whose UDP checksum a local sender left to the device
	RTT        []float64 `json:"rtt_us,omitempty"`     // smoothed, run by run

	Links []rtt.LinkState `json:"links"` // the NIC's end and the host's

	gbps []float64
}

// Spread summarizes the runs.
type Spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// result returns the entry for a mode.
func (r *Report) result(m Mode, links []rtt.LinkState) *Result {
	for _, res := range r.Results {
		if res.Mode == m {
			return res
		}
	}
	res := &Result{Mode: m, Links: links}
	r.Results = append(r.Results, res)
	slices.SortFunc(r.Results, func(a, b *Result) int { return slices.Index(modes, a.Mode) - slices.Index(modes, b.Mode) })
	return res
}

// add adds a run.
func (r *Result) add(gbps, seconds float64) {
	r.Seconds = append(r.Seconds, seconds)
	r.gbps = append(r.gbps, gbps)
	r.Gbps = Spread{quantile.Median(r.gbps), slices.Min(r.gbps), slices.Max(r.gbps)}
}

func (r *Report) note(s string) {
	if !slices.Contains(r.Notes, s) {
		r.Notes = append(r.Notes, s)
	}
}

func (m Mode) describe() string {
	return map[Mode]string{
		SLMP:      "SLMP, aggregated acknowledgements",
		Plain:     "SLMP, one acknowledgement per segment",
		Window:    "SLMP, into an application's window",
		XDP:       "SLMP, into an application's window, by XDP",
		TC:        "SLMP, into an application's window, at tc",
		TCPFrames: "TCP (iperf3), the same frames: NIC attached",
		TCP:       "TCP (iperf3), no XDP program on either end",
	}[m]
}

// WriteJSON writes the report as one document.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// WriteText writes the report as a table.
func (r *Report) WriteText(out io.Writer) error {
	var b strings.Builder
	what := "A file of " + Bytes(r.Size)
	if r.Parallel > 1 {
		what += fmt.Sprintf(", %d times at once", r.Parallel)
	}
	fmt.Fprintf(&b, "%s, from a process to handlers on a NIC, into\n%s\n", what, r.Env.Dir)
	if r.find(Window) != nil || r.find(XDP) != nil || r.find(TC) != nil {
		b.WriteString("(an application writes what is in its window there: that time is not in the figures)\n")
	}
	fmt.Fprintf(&b, "%s, %d CPUs, MTU %d; HPUs wait: %s; window: %s\n\n", r.Env.Kernel, r.Env.CPUs, r.Env.MTU, r.Env.NICWait, r.Env.Window)

	w := tabwriter.NewWriter(&b, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "Gbit/s\t[least, most]\tseconds\tsent again\t")
	var lines []string
	for _, res := range r.Results {
		again := fmt.Sprint(res.Retransmitted)
		if res.Segments > 0 {
			again += fmt.Sprintf(" of %d", res.Segments)
		}
		fmt.Fprintf(w, "%.2f\t[%.2f, %.2f]\t%.3f\t%s\t\n", res.Gbps.Median, res.Gbps.Min, res.Gbps.Max, quantile.Median(res.Seconds), again)
		lines = append(lines, res.Mode.describe())
	}
	if err := w.Flush(); err != nil {
		return err
	}
	head, table, _ := strings.Cut(b.String(), "\n\n")
	fmt.Fprintf(out, "%s\n\n", head)
	for i, line := range strings.Split(strings.TrimSuffix(table, "\n"), "\n") {
		name := ""
		if i > 0 {
			name = lines[i-1]
		}
		fmt.Fprintf(out, "  %-45s%s\n", name, line)
	}
	return r.writeNotes(out)
}

// writeNotes says what the table means.
func (r *Report) writeNotes(out io.Writer) error {
	var b strings.Builder
	b.WriteString("\n")
	fmt.Fprintf(&b, "Gbit/s and seconds: the median of %d runs, and the least and most of them; sent again: in all runs together\n", r.runs())
	user := r.find(Window)
	for _, hook := range []Mode{XDP, TC} {
		if kernel := r.find(hook); kernel != nil && user != nil {
			fmt.Fprintf(&b, "into a window, handlers in eBPF %s / in Go: %.2f\n", map[Mode]string{XDP: "at xdp", TC: "at tc"}[hook], kernel.Gbps.Median/user.Gbps.Median)
		}
	}
	frames, plain := r.find(TCPFrames), r.find(TCP)
	for _, mine := range []struct {
		mode Mode
		name string
	}{{SLMP, "SLMP"}, {Window, "SLMP into a window"}, {XDP, "SLMP into a window by XDP"}, {TC, "SLMP into a window at tc"}} {
		s := r.find(mine.mode)
		if s == nil || frames == nil && plain == nil {
			continue
		}
		var ratios []string
		if frames != nil && mine.mode != TC { // whose frames are TCP's
			ratios = append(ratios, fmt.Sprintf("/ TCP with the same frames: %.2f", s.Gbps.Median/frames.Gbps.Median))
		}
		if plain != nil {
			ratios = append(ratios, fmt.Sprintf("/ TCP without XDP: %.2f", s.Gbps.Median/plain.Gbps.Median))
		}
		fmt.Fprintf(&b, "%s %s\n", mine.name, strings.Join(ratios, ", "))
	}
	if frames != nil {
		b.WriteString("the same frames: as with SLMP each segment is one, since XDP takes TSO from the other end of a veth pair\n")
	}
	for _, res := range r.Results {
		if len(res.Links) == 2 {
			n, h := res.Links[0], res.Links[1]
			program := ""
			if h.XDP != "none" {
				program = "XDP, "
			}
			fmt.Fprintf(&b, "on: %-44s %s: XDP %s; %s: %sTSO %s, checksums %s\n", res.Mode.describe(), n.Device, n.XDP,
				h.Device, program, h.TSO, h.Checksums())
		}
	}
	if slices.ContainsFunc(r.Results, func(s *Result) bool { return s.Unverified > 0 }) {
		b.WriteString("UDP checksums: left to the device by a sender on the same machine, nothing to verify\n")
	}
	fmt.Fprintf(&b, "every file received has its source's SHA-256, %s\n", r.SHA256)
	for _, f := range r.Files {
		fmt.Fprintf(&b, "kept: %s\n", f)
	}
	for _, n := range r.Notes {
		fmt.Fprintf(&b, "note: %s\n", n)
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// runs is how many of each mode there were; fewer of the last if it was interrupted.
func (r *Report) runs() (n int) {
	for _, res := range r.Results {
		n = max(n, len(res.gbps))
	}
	return n
}

func (r *Report) find(m Mode) *Result {
	for _, res := range r.Results {
		if res.Mode == m && len(res.gbps) > 0 {
			return res
		}
	}
	return nil
}

// Bytes writes a number of bytes for people.
func Bytes[T int64 | uint64](n T) string {
	v, unit := float64(n), ""
	for _, u := range []string{"Ki", "Mi", "Gi", "Ti"} {
		if v < 1023.95 {
			break
		}
		v, unit = v/1024, u
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", v), ".0") + " " + unit + "B"
}
