// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode"

	"github.com/xspin/xspin/internal/quantile"
)

// schema is the version of documents that this package writes and reads.
const schema = 1

// maxDocument bounds a document that is read, in bytes. All benches together take less
// than one megabyte.
const maxDocument = 16 << 20

// ReadDocument reads what WriteJSON has written. The rows are checked as far as Compare
// relies on them.
func ReadDocument(r io.Reader) (*Document, error) {
	var d Document
	if err := ReadJSON(r, maxDocument, "the output of xspin bench --json", &d); err != nil {
		return nil, err
	}
	switch d.Schema {
	case schema:
	case 0: // which none of ours has
		return nil, errors.New("neither the output of xspin bench X --json nor a report of xspin bench all")
	default:
		return nil, fmt.Errorf("schema %d: want %d, of this release", d.Schema, schema)
	}
	if err := d.Check(); err != nil {
		return nil, err
	}
	return &d, nil
}

// Check says what Compare cannot rely on.
func (d *Document) Check() error {
	if len(d.Results) == 0 {
		return errors.New("no rows: not the output of xspin bench X --json")
	}
	seen := map[string]bool{}
	for i, r := range d.Results {
		switch {
		case r.Name == "" || strings.ContainsFunc(r.Name+r.Unit, unicode.IsControl):
			return fmt.Errorf("results[%d]: no name and unit that can be printed", i)
		case seen[r.Name]:
			return fmt.Errorf("results[%d]: a second row %s", i, r.Name)
		case r.A == nil || len(r.A.Runs) == 0:
			return fmt.Errorf("row %s: no runs", r.Name)
		case r.B != nil && len(r.B.Runs) != len(r.A.Runs):
			return fmt.Errorf("row %s: %d runs of a and %d of b: want pairs", r.Name, len(r.A.Runs), len(r.B.Runs))
		case r.Better != Higher.better && r.Better != Lower.better && r.Better != Neither.better:
			return fmt.Errorf("row %s: better %q: want %s, %s or nothing", r.Name, r.Better, Higher.better, Lower.better)
		}
		seen[r.Name] = true
	}
	return nil
}

// ReadJSON reads a document of so many bytes at most. What says in an error what it should be.
func ReadJSON(r io.Reader, limit int64, what string, into any) error {
	b, err := io.ReadAll(io.LimitReader(r, limit+1))
	switch {
	case err != nil:
		return err
	case int64(len(b)) > limit:
		return fmt.Errorf("more than %d bytes: not %s", limit, what)
	}
	if err := json.Unmarshal(b, into); err != nil {
		return fmt.Errorf("not %s: %w", what, err)
	}
	return nil
}

// Named is a row that is not compared.
type Named struct {
	Row        string `json:"row"`
	Experiment string `json:"experiment,omitempty"`
	Why        string `json:"why"`
}

// Measured is one of the documents compared.
type Measured struct {
	Name  string `json:"name"` // of the file
	Quick bool   `json:"quick,omitempty"`
	Env   Env    `json:"env"`
}

// A Comparison is what has changed from one document to another.
type Comparison struct {
	Schema  int      `json:"schema"`
	Before  Measured `json:"before"`
	After   Measured `json:"after"`
	Differs []string `json:"differs,omitempty"` // about the machines and the runs
	Changes []Change `json:"changes"`
	Others  []Named  `json:"not_compared,omitempty"`
}

// Verdicts of a Change.
const (
	Better = "better"
	Worse  = "worse"
	Noise  = "within noise"
	TooFew = "too few runs" // to tell
)

// LeastRuns is how many runs of both documents a verdict takes. The interval of a median of
// fewer is that of the least and the most, which is no 95 %.
const LeastRuns = 5

// A Change is that of one row.
type Change struct {
	Name       string             `json:"name"`
	Experiment string             `json:"experiment,omitempty"`
	Unit       string             `json:"unit"`
	Better     string             `json:"better"` // higher or lower
	Before     float64            `json:"before"`
	After      float64            `json:"after"`
	CI95       quantile.Interval  `json:"ci95"`                    // of After less Before, in Unit
	Relative   *float64           `json:"relative,omitempty"`      // 0.1 is 10 % more than before; not if that was 0 or less
	RelativeCI *quantile.Interval `json:"relative_ci95,omitempty"` // of Relative
	Verdict    string             `json:"verdict"`
	Other      string             `json:"other,omitempty"` // what was different about measuring it
}

// figure is what a row states of runs, which are drawn from its own: all of them in their
// order if pick is nil.
func (r *Row) figure(pick func(n int) int) float64 {
	n := len(r.A.Runs)
	a, b := make([]float64, n), make([]float64, n)
	for i := range n {
		j := i
		if pick != nil {
			j = pick(n)
		}
		a[i] = r.A.Runs[j]
		switch {
		case r.B == nil:
		case r.Unit == "ratio":
			b[i] = r.B.Runs[j]
		default:
			a[i] -= r.B.Runs[j]
		}
	}
	if r.B != nil && r.Unit == "ratio" {
		return quantile.Median(a) / quantile.Median(b)
	}
	return quantile.Median(a)
}

// change compares a row with itself in another document: the interval is a bootstrap's
// that draws the runs of both.
func change(before, after *Row) (Change, error) {
	c := Change{Name: after.Name, Experiment: after.Experiment, Unit: after.Unit, Better: after.Better, Before: before.Median, After: after.Median}
	switch {
	case before.Unit != after.Unit:
		return c, fmt.Errorf("in %s before, in %s after", before.Unit, after.Unit)
	case after.Better == Neither.better:
		return c, errors.New("neither higher nor lower is better")
	case before.Better != after.Better:
		return c, fmt.Errorf("better if %s before, better if %s after", before.Better, after.Better)
	case (before.B == nil) != (after.B == nil):
		return c, errors.New("compares in one of the documents only")
	}
	for _, r := range []*Row{before, after} {
		if x := r.figure(nil); math.Abs(x-r.Median) > 1e-6*math.Abs(r.Median) {
			return c, fmt.Errorf("a median of %g is not that of its runs, %g", r.Median, x)
		}
	}
	relative := before.Median > 0
	var rel []float64
	c.CI95 = quantile.Bootstrap(func(rnd *rand.Rand) float64 {
		b, a := before.figure(rnd.IntN), after.figure(rnd.IntN)
		relative = relative && b > 0
		rel = append(rel, a/b-1)
		return a - b
	})
	if relative {
		x, ci := c.After/c.Before-1, quantile.Percentile(rel)
		c.Relative, c.RelativeCI = &x, &ci
	}
	for _, x := range []float64{c.CI95[0], c.CI95[1]} {
		if math.IsNaN(x) || math.IsInf(x, 0) {
			return c, fmt.Errorf("not a number for some of its runs: from %g to %g", c.Before, c.After)
		}
	}
	switch {
	case min(len(before.A.Runs), len(after.A.Runs)) < LeastRuns:
		c.Verdict = TooFew
	case c.CI95[0] <= 0 && c.CI95[1] >= 0:
		c.Verdict = Noise
	case (c.After > c.Before) == (c.Better == Higher.better):
		c.Verdict = Better
	default:
		c.Verdict = Worse
	}
	return c, nil
}

// Compare says what has changed, row by row. The names are those of the documents.
func Compare(beforeName string, before *Document, afterName string, after *Document) *Comparison {
	c := &Comparison{
		Schema: schema, Before: Measured{beforeName, before.Quick, before.Env}, After: Measured{afterName, after.Quick, after.Env},
		Changes: []Change{},
	}
	old, now := byName(before), byName(after)
	for i := range after.Results {
		a := &after.Results[i]
		b := old[a.Name]
		if b == nil {
			c.Others = append(c.Others, Named{a.Name, a.Experiment, "only in " + afterName})
			continue
		}
		ch, err := change(b, a)
		if err != nil {
			c.Others = append(c.Others, Named{a.Name, a.Experiment, err.Error()})
			continue
		}
		ch.Other = conditions(b, a)
		c.Changes = append(c.Changes, ch)
	}
	for i := range before.Results {
		if b := &before.Results[i]; now[b.Name] == nil {
			c.Others = append(c.Others, Named{b.Name, b.Experiment, "only in " + beforeName})
		}
	}
	c.differ()
	return c
}

func byName(d *Document) map[string]*Row {
	m := map[string]*Row{}
	for i := range d.Results {
		m[d.Results[i].Name] = &d.Results[i]
	}
	return m
}

// group is what rows are counted as that have something in common: an experiment or, where
// the document is of one bench, a part of it.
func group(experiment, row string) string {
	if experiment != "" {
		return "experiment " + experiment
	}
	part, _, _ := strings.Cut(row, "/")
	return part + "/*"
}

// conditions says what is different about how a row was measured.
func conditions(before, after *Row) string {
	switch {
	case before.Conditions != after.Conditions:
		return "conditions"
	case before.A.On != after.A.On || before.B != nil && before.B.On != after.B.On:
		return "settings of XDP, offloads or checksums"
	}
	return ""
}

// differ notes what is different about the runs, and may be why figures have changed.
func (c *Comparison) differ() {
	b, a := c.Before.Env, c.After.Env
	for _, d := range []struct {
		what          string
		before, after any
	}{
		{"kernel", b.Kernel, a.Kernel},
		{"CPU", b.CPU, a.CPU},
		{"CPUs", b.CPUs, a.CPUs},
		{"architecture", b.Arch, a.Arch},
		{"Go", b.Go, a.Go},
		{"GOMAXPROCS", b.GOMAXPROCS, a.GOMAXPROCS},
		{"command", b.Command, a.Command},
		{"seconds a run", b.DurationS, a.DurationS},
	} {
		if d.before != d.after {
			c.Differs = append(c.Differs, fmt.Sprintf("%s: %v before, %v after", d.what, d.before, d.after))
		}
	}
	var other tally
	for _, ch := range c.Changes {
		if ch.Other != "" {
			other.add(group(ch.Experiment, ch.Name) + ": other " + ch.Other)
		}
	}
	switch quick, full := c.Before, c.After; {
	case quick.Quick == full.Quick:
		for _, k := range other.keys {
			c.Differs = append(c.Differs, fmt.Sprintf("%s of %s", rowCount(other.n[k]), k))
		}
	default:
		if full.Quick {
			quick, full = full, quick
		}
		c.Differs = append(c.Differs, fmt.Sprintf("%s is a quick run, %s is a full one: a quick run has fewer and shorter runs, and leaves rows out", quick.Name, full.Name))
	}
	for _, e := range []Measured{c.Before, c.After} {
		if w := e.Env.Warning(); w != "" {
			c.Differs = append(c.Differs, fmt.Sprintf("%s: %s", e.Name, w))
		}
	}
}

// Count returns how many rows have a verdict.
func (c *Comparison) Count(verdict string) (n int) {
	for _, ch := range c.Changes {
		if ch.Verdict == verdict {
			n++
		}
	}
	return n
}

// WriteJSON writes the comparison for programs.
func (c *Comparison) WriteJSON(w io.Writer) error { return writeJSON(w, c) }

// A tally counts what is the same, and keeps the order in which it came.
type tally struct {
	keys []string
	n    map[string]int
}

func (t *tally) add(key string) {
	if t.n == nil {
		t.n = map[string]int{}
	}
	if t.n[key] == 0 {
		t.keys = append(t.keys, key)
	}
	t.n[key]++
}

func rowCount(n int) string {
	if n == 1 {
		return "1 row"
	}
	return fmt.Sprintf("%d rows", n)
}

// verdicts are in the order in which rows are listed: who compares looks for what is worse.
var verdicts = []struct {
	verdict, heading string
	unchanged        bool
}{
	{Worse, "Worse", false},
	{Better, "Better", false},
	{Noise, "Within noise", true},
	{TooFew, "Too few runs", true},
}

// Summary says how many rows have which verdict.
func (c *Comparison) Summary() string {
	var counts []string
	for _, v := range verdicts {
		counts = append(counts, fmt.Sprintf("%d %s", c.Count(v.verdict), v.verdict))
	}
	return strings.Join(counts, ", ")
}

// WriteText writes the comparison for people: counts, and the rows that have changed. All
// rows are listed if asked for.
func (c *Comparison) WriteText(w io.Writer, all bool) error {
	var b strings.Builder
	for _, m := range []struct {
		when string
		Measured
	}{{"before", c.Before}, {"after", c.After}} {
		fmt.Fprintf(&b, "%-6s  %s: %s, %s, %s\n", m.when, m.Name, m.Env.Command, m.Env.Kernel, m.Env.Started)
	}
	for _, d := range c.Differs {
		fmt.Fprintf(&b, "WARNING %s\n", d)
	}
	fmt.Fprintf(&b, "\nRows: %s.\n"+
		"Within noise: 0 is in the interval. One row in twenty that has not changed is called better or\n"+
		"worse by chance: measure those again.\n", c.Summary())
	if c.Count(TooFew) > 0 {
		fmt.Fprintf(&b, "Too few runs: a verdict takes %d or more on both sides. A full run has them for most rows.\n", LeastRuns)
	}
	for _, v := range verdicts {
		if c.Count(v.verdict) > 0 && (all || !v.unchanged) {
			fmt.Fprintf(&b, "\n%s\n", v.heading)
			c.table(&b, v.verdict)
		}
	}
	if len(c.Others) > 0 {
		b.WriteString("\nNot compared\n")
		c.writeOthers(&b, all)
	}
	if n := c.Count(Noise) + c.Count(TooFew) + len(c.Others); n > 0 && !all {
		b.WriteString("\n--all lists the other rows, too.\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// table writes the rows that have a verdict, the largest change first.
func (c *Comparison) table(b *strings.Builder, verdict string) {
	t := tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "row\tunit\tbefore\tafter\tchange\t95 % interval\t\n")
	for _, ch := range c.Largest(verdict) {
		change, ci, print := ch.After-ch.Before, ch.CI95, difference
		if ch.Relative != nil {
			change, ci, print = *ch.Relative, *ch.RelativeCI, percent
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t[%s, %s]\t\n", ch.Name, ch.Unit, Figure(ch.Before), Figure(ch.After),
			print(change), print(ci[0]), print(ci[1]))
	}
	t.Flush()
}

// Largest returns the rows that have one of these verdicts, the largest change first: that is
// the one of the largest factor. Changes from 0 come before all others.
func (c *Comparison) Largest(verdicts ...string) (list []Change) {
	for _, ch := range c.Changes {
		if slices.Contains(verdicts, ch.Verdict) {
			list = append(list, ch)
		}
	}
	slices.SortStableFunc(list, func(a, b Change) int { return cmp.Compare(b.factor(), a.factor()) })
	return list
}

// factor is by how much the larger figure is more than the smaller, as a logarithm.
func (c *Change) factor() float64 {
	if c.Relative == nil || *c.Relative <= -1 {
		return math.Inf(1)
	}
	return math.Abs(math.Log1p(*c.Relative))
}

// writeOthers writes which rows are not compared, and why: how many of each experiment, or
// all.
func (c *Comparison) writeOthers(b *strings.Builder, all bool) {
	compared := map[string]bool{}
	for _, ch := range c.Changes {
		compared[group(ch.Experiment, ch.Name)] = true
	}
	var t tally
	for _, o := range c.Others {
		if all {
			fmt.Fprintf(b, "  %s: %s\n", o.Row, o.Why)
			continue
		}
		t.add(o.Why + ": |" + group(o.Experiment, o.Row))
	}
	for _, k := range t.keys {
		why, g, _ := strings.Cut(k, "|")
		if compared[g] { // a part of it
			fmt.Fprintf(b, "  %s%s of %s\n", why, rowCount(t.n[k]), g)
		} else {
			fmt.Fprintf(b, "  %s%s, %s\n", why, g, rowCount(t.n[k]))
		}
	}
}

// difference prints a change in the unit of its row.
func difference(x float64) string {
	if x > 0 {
		return "+" + Figure(x)
	}
	return Figure(x)
}

// percent prints a relative change.
func percent(x float64) string { return fmt.Sprintf("%+.1f %%", 100*x) }
