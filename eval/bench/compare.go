// SPDX-License-Identifier: Apache-2.0

package bench

import (
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
	if d.Schema != schema {
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
	Row string `json:"row"`
	Why string `json:"why"`
}

// Measured is one of the documents compared.
type Measured struct {
	Name string `json:"name"` // of the file
	Env  Env    `json:"env"`
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

// leastRuns is how many runs of both documents a verdict takes. The interval of a median of
// fewer is that of the least and the most, which is no 95 %.
const leastRuns = 5

// A Change is that of one row.
type Change struct {
	Name       string             `json:"name"`
	Unit       string             `json:"unit"`
	Better     string             `json:"better"` // higher or lower
	Before     float64            `json:"before"`
	After      float64            `json:"after"`
	CI95       quantile.Interval  `json:"ci95"`                    // of After less Before, in Unit
	Relative   *float64           `json:"relative,omitempty"`      // 0.1 is 10 % more than before; not if that was 0 or less
	RelativeCI *quantile.Interval `json:"relative_ci95,omitempty"` // of Relative
	Verdict    string             `json:"verdict"`
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
	c := Change{Name: after.Name, Unit: after.Unit, Better: after.Better, Before: before.Median, After: after.Median}
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
	case min(len(before.A.Runs), len(after.A.Runs)) < leastRuns:
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
		Schema: schema, Before: Measured{beforeName, before.Env}, After: Measured{afterName, after.Env},
		Changes: []Change{},
	}
	c.differ()
	for i := range after.Results {
		a := &after.Results[i]
		j := slices.IndexFunc(before.Results, func(r Row) bool { return r.Name == a.Name })
		if j < 0 {
			c.Others = append(c.Others, Named{a.Name, "only in " + afterName})
			continue
		}
		ch, err := change(&before.Results[j], a)
		if err != nil {
			c.Others = append(c.Others, Named{a.Name, err.Error()})
			continue
		}
		c.Changes = append(c.Changes, ch)
		if what := conditions(&before.Results[j], a); what != "" {
			c.Differs = append(c.Differs, fmt.Sprintf("%s: other %s", a.Name, what))
		}
	}
	for _, b := range before.Results {
		if !slices.ContainsFunc(after.Results, func(r Row) bool { return r.Name == b.Name }) {
			c.Others = append(c.Others, Named{b.Name, "only in " + beforeName})
		}
	}
	return c
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
	for _, e := range []Measured{c.Before, c.After} {
		if e.Env.Busy {
			c.Differs = append(c.Differs, fmt.Sprintf("%s: the machine was busy, with a load of %s on %d CPUs", e.Name, e.Env.Load, e.Env.CPUs))
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

// WriteText writes the comparison for people.
func (c *Comparison) WriteText(w io.Writer) error {
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
	b.WriteByte('\n')
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "row\tunit\tbefore\tafter\tchange\t95 % interval\t\t\n")
	for _, ch := range c.Changes {
		verdict := ch.Verdict
		if verdict == Worse {
			verdict = "WORSE"
		}
		change, ci, print := ch.After-ch.Before, ch.CI95, difference
		if ch.Relative != nil {
			change, ci, print = *ch.Relative, *ch.RelativeCI, percent
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t[%s, %s]\t%s\t\n", ch.Name, ch.Unit, Figure(ch.Before), Figure(ch.After),
			print(change), print(ci[0]), print(ci[1]), verdict)
	}
	t.Flush()
	fmt.Fprintf(&b, "\nRows: %d %s, %d %s, %d %s, %d %s.\n"+
		"Within noise: 0 is in the interval. One row in twenty that has not changed is called better or\n"+
		"worse by chance: measure those again.\n", c.Count(Better), Better, c.Count(Worse), Worse, c.Count(Noise), Noise, c.Count(TooFew), TooFew)
	if len(c.Others) > 0 {
		b.WriteString("\nNot compared\n")
		for _, o := range c.Others {
			fmt.Fprintf(&b, "  %s: %s\n", o.Row, o.Why)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
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
