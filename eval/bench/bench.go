// SPDX-License-Identifier: Apache-2.0

// Package bench is what all benchmarks have in common: rows that compare or
// state figures, the document they are printed as, and the order in which
// things that are compared take turns.
package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/xspin/xspin/internal/quantile"
	"github.com/xspin/xspin/netns/testbed"
)

// A Goal says which way a figure is better, and perhaps how good it must be.
type Goal struct {
	better string
	target float64
	set    bool
}

// Goals without a target. Neither is of figures that are not better if they are higher or
// lower.
var (
	Higher  = Goal{better: "higher"}
	Lower   = Goal{better: "lower"}
	Neither = Goal{}
)

// AtLeast is the goal of reaching x.
func AtLeast(x float64) Goal { return Goal{"higher", x, true} }

// AtMost is the goal of not exceeding x.
func AtMost(x float64) Goal { return Goal{"lower", x, true} }

// met tells whether a figure reaches the target.
func (g Goal) met(x float64) bool {
	if g.better == "higher" {
		return x >= g.target
	}
	return x <= g.target
}

// A Side is one of the things measured.
type Side struct {
	What   string             `json:"what"`
	Peer   string             `json:"peer,omitempty"` // whose it is, if it is not ours: what people use today
	Unit   string             `json:"unit"`
	Median float64            `json:"median"`         // of Runs
	Runs   []float64          `json:"runs"`           // in the order they were measured
	Lost   *float64           `json:"lost,omitempty"` // fraction of what was sent, median
	On     string             `json:"on,omitempty"`   // XDP, offloads and checksums on either end, waiting
	More   map[string]float64 `json:"more,omitempty"` // medians of other figures, units in the names
}

// NewSide describes runs of something.
func NewSide(what, unit string, runs []float64) Side {
	return Side{What: what, Unit: unit, Median: quantile.Median(runs), Runs: runs}
}

// Of returns the side as that of a peer.
func (s Side) Of(peer string) Side {
	s.Peer = peer
	return s
}

// Add adds the median of another figure, unless there is none.
func (s *Side) Add(name string, runs []float64) {
	if len(runs) == 0 {
		return
	}
	if s.More == nil {
		s.More = map[string]float64{}
	}
	s.More[name] = quantile.Median(runs)
}

// A Row is one figure under a stable name.
type Row struct {
	Name       string            `json:"name"`
	Unit       string            `json:"unit"` // "ratio" is that of A to B
	Median     float64           `json:"median"`
	CI95       quantile.Interval `json:"ci95"`
	Better     string            `json:"better"` // higher or lower, "" if neither is
	Target     *float64          `json:"target,omitempty"`
	Met        *bool             `json:"met,omitempty"`     // by the median alone, whatever the verdict
	Verdict    string            `json:"verdict,omitempty"` // met, missed, or within noise: the target is in the interval
	A          *Side             `json:"a,omitempty"`
	B          *Side             `json:"b,omitempty"`
	Conditions string            `json:"conditions"`
	Experiment string            `json:"-"` // of a report's rows, for Compare
}

func newRow(name, unit string, g Goal, median float64, ci quantile.Interval) (Row, error) {
	for _, x := range []float64{median, ci[0], ci[1]} {
		if math.IsNaN(x) || math.IsInf(x, 0) {
			return Row{}, fmt.Errorf("row %s: %g in [%g, %g]: %w", name, median, ci[0], ci[1], quantile.ErrSamples)
		}
	}
	r := Row{Name: name, Unit: unit, Median: median, CI95: ci, Better: g.better}
	if g.set {
		met := g.met(median)
		r.Target, r.Met = &g.target, &met
		switch {
		case g.met(ci[0]) != g.met(ci[1]):
			r.Verdict = "within noise"
		case met:
			r.Verdict = "met"
		default:
			r.Verdict = "missed"
		}
	}
	return r, nil
}

// Ratio compares A with B, run by run: see quantile.RatioCI.
func Ratio(name string, g Goal, a, b Side) (Row, error) {
	median, ci, err := quantile.RatioCI(a.Runs, b.Runs)
	if err != nil {
		return Row{}, fmt.Errorf("row %s: %w", name, err)
	}
	r, err := newRow(name, "ratio", g, median, ci)
	r.A, r.B = &a, &b
	return r, err
}

// Difference says how much more A is than B, run by run, in their unit.
func Difference(name string, g Goal, a, b Side) (Row, error) {
	if len(a.Runs) != len(b.Runs) {
		return Row{}, fmt.Errorf("row %s: %d runs less %d: want pairs: %w", name, len(a.Runs), len(b.Runs), quantile.ErrSamples)
	}
	d := make([]float64, len(a.Runs))
	for i := range d {
		d[i] = a.Runs[i] - b.Runs[i]
	}
	slices.Sort(d)
	r, err := newRow(name, a.Unit, g, quantile.At(d, 0.5), quantile.MedianCI(d))
	r.A, r.B = &a, &b
	return r, err
}

// Absolute states a figure as it is.
func Absolute(name string, g Goal, a Side) (Row, error) {
	sorted := slices.Sorted(slices.Values(a.Runs))
	r, err := newRow(name, a.Unit, g, a.Median, quantile.MedianCI(sorted))
	r.A = &a
	return r, err
}

// Rounds has the sides take turns, n times: A B A B.
func Rounds(ctx context.Context, n int, sides ...func(context.Context) error) error {
	for range n {
		for _, measure := range sides {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := measure(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// Env is where it was measured, and how often.
type Env struct {
	Kernel     string  `json:"kernel"`
	CPU        string  `json:"cpu"`
	CPUs       int     `json:"cpus"` // that the process may use
	Arch       string  `json:"arch"`
	Go         string  `json:"go"`
	GOMAXPROCS int     `json:"gomaxprocs"`
	Command    string  `json:"command"`
	Runs       int     `json:"runs"`       // of each side
	DurationS  float64 `json:"duration_s"` // of a run
	Started    string  `json:"started"`    // RFC 3339
	Load       string  `json:"load"`       // average over the minute before, of whatever ran then
	Busy       bool    `json:"busy"`       // the load is more than a quarter of the CPUs
	// Used is the share of the CPUs' time that something used just before, when this program
	// waited; nil if nobody looked. What has ended by then is not in it, unlike in Load.
	Used *float64 `json:"used,omitempty"`
}

// Warning says that others were at work, who spoil figures; "" if not.
func (e *Env) Warning() string {
	const much = 0.25
	switch {
	case e.Used == nil && e.Busy:
		return fmt.Sprintf("the machine was busy: a load of %s on %d CPUs in the minute before", e.Load, e.CPUs)
	case e.Used != nil && *e.Used > much:
		return fmt.Sprintf("the machine was busy: %.0f %% of the time of its CPUs was in use just before", 100**e.Used)
	}
	return ""
}

// Environment describes this machine.
func Environment(command string, runs int, d time.Duration) Env {
	kernel, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		kernel = []byte("unknown")
	}
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		load = []byte("unknown")
	}
	e := Env{
		Kernel: "Linux " + strings.TrimSpace(string(kernel)), CPU: testbed.CPU(), CPUs: runtime.NumCPU(), Arch: runtime.GOARCH,
		Go: runtime.Version(), GOMAXPROCS: runtime.GOMAXPROCS(0),
		Command: command, Runs: runs, DurationS: d.Seconds(), Started: time.Now().Format(time.RFC3339), Load: strings.Fields(string(load))[0],
	}
	e.Busy = busy(e.Load, e.CPUs)
	return e
}

func busy(load string, cpus int) bool {
	x, err := strconv.ParseFloat(load, 64)
	return err == nil && x > float64(cpus)/4
}

// A Document is the outcome of a benchmark.
type Document struct {
	Schema  int   `json:"schema"`
	Env     Env   `json:"env"`
	Results []Row `json:"results"`
	Quick   bool  `json:"-"` // of a report: it is of a quick run
}

// NewDocument returns a document without rows.
func NewDocument(e Env) *Document { return &Document{Schema: schema, Env: e, Results: []Row{}} }

// Add adds a row, or returns why there is none.
func (d *Document) Add(conditions string, r Row, err error) error {
	if err != nil {
		return err
	}
	r.Conditions = conditions
	d.Results = append(d.Results, r)
	return nil
}

// WriteJSON writes the document for programs.
func (d *Document) WriteJSON(w io.Writer) error { return writeJSON(w, d) }

func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// WriteText writes the document for people: the figures, what each of them compares, and
// notes on how it was measured. Targets, which are the project's own, stand there if asked
// for.
func (d *Document) WriteText(w io.Writer, targets bool) error {
	var b strings.Builder
	e := d.Env
	if w := e.Warning(); w != "" {
		fmt.Fprintf(&b, "WARNING: %s. Others at work spoil the figures: have them stop, and measure again\n\n", w)
	}
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprint(t, "ROW\tMEDIAN\tUNIT\t95 % INTERVAL\tBETTER")
	if targets {
		fmt.Fprint(t, "\tTARGET\tVERDICT")
	}
	fmt.Fprintln(t)
	for _, r := range d.Results {
		unit := r.Unit
		switch {
		case unit == "ratio":
			unit = "a / b"
		case r.B != nil:
			unit += ", a - b"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t[%s, %s]\t%s", r.Name, Figure(r.Median), unit, Figure(r.CI95[0]), Figure(r.CI95[1]), r.Better)
		switch {
		case targets && r.Target != nil:
			sign := "<="
			if r.Better == "higher" {
				sign = ">="
			}
			fmt.Fprintf(t, "\t%s %s\t%s", sign, Figure(*r.Target), r.Verdict)
		case targets:
			fmt.Fprint(t, "\t-\t-")
		}
		fmt.Fprintln(t)
	}
	t.Flush()
	if targets {
		b.WriteString("\nmet, missed: the whole interval is on that side of the target. within noise: the target is in the interval\n")
	}

	b.WriteString("\nWhat they mean, with the notes below in brackets\n")
	var n notes
	for _, r := range d.Results {
		fmt.Fprintf(&b, "\n  %s [%s]\n", r.Name, n.number(r.Conditions))
		r.A.describe(&b, "a", &n)
		r.B.describe(&b, "b", &n)
	}
	b.WriteString("\nNotes\n\n")
	for i, text := range n {
		fmt.Fprintf(&b, "%5d  %s\n", i+1, text)
	}
	fmt.Fprintf(&b, "\n%s, %s, %d CPUs, %s; %s: %d runs of %gs a side, taking turns; load before %s\n",
		e.Kernel, e.CPU, e.CPUs, e.Go, e.Command, e.Runs, e.DurationS, e.Load)
	_, err := io.WriteString(w, b.String())
	return err
}

// describe writes a side of a row, if there is one.
func (s *Side) describe(w io.Writer, name string, n *notes) {
	if s == nil {
		return
	}
	fmt.Fprintf(w, "    %s  %s %s", name, Figure(s.Median), s.Unit)
	if s.Lost != nil && *s.Lost > 0 {
		fmt.Fprintf(w, ", %s %% lost", Figure(100**s.Lost))
	}
	fmt.Fprintf(w, ": %s", s.What)
	if s.On != "" {
		fmt.Fprintf(w, " [%s]", n.number(s.On))
	}
	fmt.Fprintln(w)
	var list []string
	for _, k := range slices.Sorted(maps.Keys(s.More)) {
		list = append(list, k+" "+Figure(s.More[k]))
	}
	if len(list) > 0 {
		fmt.Fprintf(w, "       %s\n", strings.Join(list, ", "))
	}
}

// notes are texts that several rows refer to, each once.
type notes []string

// number returns the number of a text, from 1.
func (n *notes) number(text string) string {
	i := slices.Index(*n, text)
	if i < 0 {
		i = len(*n)
		*n = append(*n, text)
	}
	return strconv.Itoa(i + 1)
}

// Figure prints three digits that mean something, and no exponent.
func Figure(x float64) string {
	switch a := math.Abs(x); {
	case a == 0:
		return "0"
	case a >= 100:
		return fmt.Sprintf("%.0f", x)
	case a >= 10:
		return fmt.Sprintf("%.1f", x)
	case a >= 0.1:
		return fmt.Sprintf("%.2f", x)
	default:
		return fmt.Sprintf("%.4f", x)
	}
}
