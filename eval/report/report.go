// SPDX-License-Identifier: Apache-2.0

// Package report is what `xspin bench all` finds: experiments with plots, tables and
// verdicts, kept in one file, and the page and the other files that are made of it.
package report

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/internal/quantile"
)

// Schema is the version of the documents that this package writes and reads. It grows
// when a reader of the one before would misunderstand.
const Schema = 1

// Most is how many bytes a report has at most.
const Most = 256 << 20

// name is what experiments and plots can be called: files in the report's directory are,
// and who makes them is root.
var name = regexp.MustCompile(`^[a-z0-9][a-z0-9-]*$`)

// File is the name of a report in its directory.
const File = "results.json"

// A Report is all that a run of the evaluation has found, results.json.
type Report struct {
	Schema      int           `json:"schema"`
	Release     string        `json:"release"`        // of XsPIN
	Quick       bool          `json:"quick"`          // fewer and shorter runs than for good figures
	Env         bench.Env     `json:"env"`            // when it began
	Machine     []Fact        `json:"machine"`        // what else may matter
	Todo        []string      `json:"todo,omitempty"` // experiments that were asked for and have not been tried
	Experiments []*Experiment `json:"experiments"`
}

// A Fact is a property of the machine or of a peer.
type Fact struct {
	Name  string `json:"name"`
	Value string `json:"value"`         // "": it is not there
	For   string `json:"for,omitempty"` // what is not measured without it
}

// Status is how far an experiment got.
type Status string

const (
	Done    Status = "done"
	Skipped Status = "skipped" // something that it needs is not there
	Failed  Status = "failed"  // what it has found before that is there
)

// An Experiment answers one question.
type Experiment struct {
	Name     string      `json:"name"`   // as --only takes it
	Title    string      `json:"title"`  // for people
	Shows    string      `json:"shows"`  // one sentence
	Method   string      `json:"method"` // how it is measured
	Status   Status      `json:"status"`
	Why      string      `json:"why,omitempty"` // it was skipped or has failed
	Warnings []string    `json:"warnings,omitempty"`
	Started  string      `json:"started"` // RFC 3339
	Took     float64     `json:"took_s"`
	Runs     int         `json:"runs"`              // of each side, at most
	Benches  []string    `json:"benches,omitempty"` // commands that measure the same rows
	Weather  Weather     `json:"weather"`
	Plots    []*Plot     `json:"plots,omitempty"`
	Rows     []bench.Row `json:"rows,omitempty"`
}

// Weather is what else the machine had to do.
type Weather struct {
	Before string  `json:"load_before"` // average over the minute before, of experiments before too
	Most   float64 `json:"load_most"`   // the most such average meanwhile: most of it is what is measured
	Stolen float64 `json:"stolen"`      // share of the CPUs' time that a hypervisor gave to others
}

// A Plot is a picture with one axis of each kind, and the figures in it.
type Plot struct {
	Name   string   `json:"name"` // of its files
	Title  string   `json:"title"`
	X      Axis     `json:"x"`
	Y      Axis     `json:"y"`
	Stack  bool     `json:"stack,omitempty"` // series are parts of a whole: bars on top of each other
	Series []Series `json:"series"`
	Marks  []Mark   `json:"marks,omitempty"` // of the paper
}

// An Axis of a plot.
type Axis struct {
	Label string   `json:"label"`
	Unit  string   `json:"unit"`
	Log   bool     `json:"log,omitempty"`
	Names []string `json:"names,omitempty"` // of the places 0, 1, 2... if they are no numbers; x only
	// Better is higher or lower, where the unit does not tell which.
	Better string `json:"better,omitempty"`
}

// Title is an axis's label with its unit.
func (a Axis) Title() string {
	if a.Unit == "" {
		return a.Label
	}
	return a.Label + " (" + a.Unit + ")"
}

// A Series is a line or the bars of one thing measured.
type Series struct {
	Name   string  `json:"name"`
	Tier   string  `json:"tier,omitempty"` // of the handlers, if some were at work: user, kernel
	On     string  `json:"on,omitempty"`   // XDP, offloads and checksums on either end, waiting
	Points []Point `json:"points"`
}

// A Point is a figure at a place of the x axis.
type Point struct {
	X    float64           `json:"x"`
	Y    float64           `json:"y"` // median of Runs
	CI95 quantile.Interval `json:"ci95"`
	Runs []float64         `json:"runs"`
	Lost *float64          `json:"lost,omitempty"` // fraction of what was sent, median
	// Doubt is why the figure is not to be trusted, "" if it is.
	Doubt string `json:"doubt,omitempty"`
}

// NewPoint makes a point of runs.
func NewPoint(x float64, runs []float64) Point {
	s := quantile.Summarize(runs)
	return Point{X: x, Y: s.P50, CI95: s.CI95, Runs: runs}
}

// A Mark is a figure of a paper.
type Mark struct {
	Name   string  `json:"name"`
	X      float64 `json:"x"`
	Y      float64 `json:"y"`
	Source string  `json:"source"`
}

// Differs says why the figures of another run cannot stand beside these, "" if they can.
func (r *Report) Differs(o *Report) string {
	for _, d := range []struct {
		what     string
		old, new any
	}{
		{"release", r.Release, o.Release}, {"--quick", r.Quick, o.Quick}, {"kernel", r.Env.Kernel, o.Env.Kernel},
		{"CPU", r.Env.CPU, o.Env.CPU}, {"CPUs", r.Env.CPUs, o.Env.CPUs},
	} {
		if d.old != d.new {
			return fmt.Sprintf("%s %v and not %v", d.what, d.old, d.new)
		}
	}
	return ""
}

// Experiment returns that of a name, nil if there is none.
func (r *Report) Experiment(name string) *Experiment {
	for _, e := range r.Experiments {
		if e.Name == name {
			return e
		}
	}
	return nil
}

// Put adds an experiment, in the place of the one of its name if there is one.
func (r *Report) Put(e *Experiment) {
	for i, old := range r.Experiments {
		if old.Name == e.Name {
			r.Experiments[i] = e
			return
		}
	}
	r.Experiments = append(r.Experiments, e)
}

// Verdicts returns the rows with a target, of all experiments.
func (r *Report) Verdicts() (rows []bench.Row) {
	for _, e := range r.Experiments {
		for _, row := range e.Rows {
			if row.Target != nil {
				rows = append(rows, row)
			}
		}
	}
	return rows
}

// Document returns the rows of all experiments, and the points of the plots whose unit says
// what is better, unless they are not to be trusted, as rows of their own, for bench.Compare.
func (r *Report) Document() *bench.Document {
	d := bench.NewDocument(r.Env)
	d.Quick = r.Quick
	for _, e := range r.Experiments {
		d.Env.Runs = max(d.Env.Runs, e.Runs)
		for _, row := range e.Rows {
			row.Experiment = e.Name
			d.Results = append(d.Results, row)
		}
		for _, p := range e.Plots {
			better := p.Y.Goal()
			if better == "" {
				continue
			}
			for _, s := range p.Series {
				for _, pt := range s.Points {
					if pt.Doubt != "" {
						continue
					}
					side := bench.NewSide(s.Name, p.Y.Unit, pt.Runs)
					side.Lost, side.On = pt.Lost, s.On
					d.Results = append(d.Results, bench.Row{
						Name: fmt.Sprintf("%s/%s/%s", p.Name, s.Name, p.X.Place(pt.X)), Unit: p.Y.Unit,
						Median: pt.Y, CI95: pt.CI95, Better: better, A: &side, Conditions: e.Method, Experiment: e.Name,
					})
				}
			}
		}
	}
	return d
}

// Doubts are why points of the plot are not to be trusted, each once.
func (p *Plot) Doubts() (all []string) {
	for _, s := range p.Series {
		for _, pt := range s.Points {
			if pt.Doubt != "" && !slices.Contains(all, pt.Doubt) {
				all = append(all, pt.Doubt)
			}
		}
	}
	return all
}

// Goal says which way figures of the axis are better, higher or lower: by its unit, unless
// it says so itself. Of other units it is "".
func (a Axis) Goal() string {
	if a.Better != "" {
		return a.Better
	}
	unit, _, _ := strings.Cut(a.Unit, " ")
	switch unit {
	case "s", "ms", "us", "ns", "s/GB", "s/million", "bytes", "KiB", "MiB", "GiB":
		return "lower"
	case "Gbit/s", "GB/s", "GFLOPS", "k/s", "Mpps", "million", "million/s":
		return "higher"
	}
	return ""
}

// Place returns what stands at a place of the axis.
func (a Axis) Place(x float64) string {
	if i := int(x); i >= 0 && i < len(a.Names) {
		return a.Names[i]
	}
	return strconv.FormatFloat(x, 'f', -1, 64)
}

// Spread is how wide the intervals of ratios are: the median of their half widths, as a
// fraction of the ratio. Without any it is 0.
func (r *Report) Spread() float64 {
	var wide []float64
	for _, e := range r.Experiments {
		for _, row := range e.Rows {
			if row.Unit == "ratio" && row.Median > 0 {
				wide = append(wide, (row.CI95[1]-row.CI95[0])/2/row.Median)
			}
		}
	}
	if len(wide) == 0 {
		return 0
	}
	return quantile.Median(wide)
}

// Duration is how long the experiments took together.
func (r *Report) Duration() time.Duration {
	s := 0.0
	for _, e := range r.Experiments {
		s += e.Took
	}
	return time.Duration(s * float64(time.Second)).Round(time.Second)
}

// Load reads the report of a directory. Without one, the error is fs.ErrNotExist.
func Load(dir string) (r *Report, err error) {
	path := filepath.Join(dir, File)
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if r, err = Read(f); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return r, nil
}

// Read reads a report, and checks what the page relies on.
func Read(from io.Reader) (*Report, error) {
	var r Report
	if err := bench.ReadJSON(from, Most, "a report of xspin bench all", &r); err != nil {
		return nil, err
	}
	switch r.Schema {
	case Schema:
	case 0: // which none of ours has
		return nil, errors.New("not a report of xspin bench all")
	default:
		return nil, fmt.Errorf("schema %d: want %d, of this release", r.Schema, Schema)
	}
	names := map[string]bool{}
	for i, e := range r.Experiments {
		if e == nil || !name.MatchString(e.Name) {
			return nil, fmt.Errorf("experiments[%d]: no name that a file can have", i)
		}
		if !slices.Contains([]Status{Done, Skipped, Failed}, e.Status) {
			return nil, fmt.Errorf("experiment %s: status %q: want %s, %s or %s", e.Name, e.Status, Done, Skipped, Failed)
		}
		if err := e.Prune(); err != nil {
			return nil, fmt.Errorf("experiment %s: %w", e.Name, err)
		}
		files := []string{e.Name + "-rows"}
		for _, p := range e.Plots {
			files = append(files, p.Name)
		}
		for _, f := range files {
			if names[f] {
				return nil, fmt.Errorf("experiment %s: a second file of the name %s", e.Name, f)
			}
			names[f] = true
		}
	}
	return &r, nil
}

// Prune takes away the plots and rows that can be neither kept nor drawn, and says why.
func (e *Experiment) Prune() (err error) {
	e.Plots = slices.DeleteFunc(e.Plots, func(p *Plot) bool {
		why := p.check()
		err = errors.Join(err, why)
		return why != nil
	})
	e.Rows = slices.DeleteFunc(e.Rows, func(r bench.Row) bool {
		why := checkRow(&r)
		err = errors.Join(err, why)
		return why != nil
	})
	return err
}

// The numbers that a report may have. Those of a logarithmic axis are least or more.
const (
	most  = 1e15
	least = 1e-9
)

func checkNumbers(x ...float64) error {
	for _, v := range x {
		if !(math.Abs(v) <= most) { // NaN is not, either
			return fmt.Errorf("%g: want a number of %g at most", v, most)
		}
	}
	return nil
}

func checkRow(r *bench.Row) error {
	err := checkNumbers(r.Median, r.CI95[0], r.CI95[1])
	if r.Target != nil {
		err = errors.Join(err, checkNumbers(*r.Target))
	}
	if r.A == nil {
		err = errors.Join(err, errors.New("no side a"))
	}
	for _, s := range []*bench.Side{r.A, r.B} {
		if s == nil {
			continue
		}
		err = errors.Join(err, checkNumbers(s.Median), checkNumbers(s.Runs...), checkNumbers(slices.Collect(maps.Values(s.More))...))
		if s.Lost != nil {
			err = errors.Join(err, checkNumbers(*s.Lost))
		}
	}
	if err != nil {
		return fmt.Errorf("row %s: %w", r.Name, err)
	}
	return nil
}

// check says whether the plot can be drawn, and be kept in files of its name.
func (p *Plot) check() error {
	if p == nil || !name.MatchString(p.Name) {
		return errors.New("a plot without a name that a file can have")
	}
	n := 0
	for _, s := range p.Series {
		for _, pt := range s.Points {
			n++
			err := errors.Join(p.checkPlace(pt.X, min(pt.Y, pt.CI95[0])), checkNumbers(pt.Y, pt.CI95[1]), checkNumbers(pt.Runs...))
			if pt.Lost != nil {
				err = errors.Join(err, checkNumbers(*pt.Lost))
			}
			if !(pt.CI95[0] <= pt.Y && pt.Y <= pt.CI95[1]) {
				err = errors.Join(err, fmt.Errorf("%g is not in its interval [%g, %g]", pt.Y, pt.CI95[0], pt.CI95[1]))
			}
			if err != nil {
				return fmt.Errorf("plot %s: series %s: %w", p.Name, s.Name, err)
			}
		}
	}
	if p.Stack && len(p.Doubts()) > 0 {
		return fmt.Errorf("plot %s: stacked bars cannot show doubts", p.Name)
	}
	if b := p.Y.Better; b != "" && b != "higher" && b != "lower" {
		return fmt.Errorf("plot %s: better %q: want higher or lower", p.Name, b)
	}
	for _, m := range p.Marks {
		if err := p.checkPlace(m.X, m.Y); err != nil {
			return fmt.Errorf("plot %s: mark %s: %w", p.Name, m.Name, err)
		}
	}
	if n == 0 {
		return fmt.Errorf("plot %s: no points", p.Name)
	}
	return nil
}

// checkPlace says whether the axes have a place.
func (p *Plot) checkPlace(x, y float64) error {
	if n := len(p.X.Names); n > 0 && (x != math.Trunc(x) || x < 0 || x >= float64(n)) {
		return fmt.Errorf("%g at %g: want a place from 0 to %d, which have names", y, x, n-1)
	}
	if p.X.Log && x < least || p.Y.Log && y < least {
		return fmt.Errorf("%g at %g: a logarithmic axis needs %g or more", y, x, least)
	}
	return checkNumbers(x, y)
}

// Save writes the report into a directory, which is there. A reader finds the old one or
// the new one, whole, whenever the machine stops.
func (r *Report) Save(dir string) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return Replace(filepath.Join(dir, File), append(b, '\n'))
}

// Replace writes a file beside, and then puts it in the place of the old one.
func Replace(name string, b []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(name), filepath.Base(name)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("write %s: %w", name, err), os.Remove(f.Name()))
		}
	}()
	_, err = f.Write(b)
	if err == nil {
		err = f.Chmod(0o644)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), name)
}

// Prepare makes the directory of a report and tries whether files can be written there:
// before minutes of measuring rather than after.
func Prepare(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	const room = 16 << 20 // bytes
	if free := fs.Bavail * uint64(fs.Bsize); free < room {
		return fmt.Errorf("%s: %d bytes are free: want %d", dir, free, room)
	}
	f, err := os.CreateTemp(dir, ".try*")
	if err != nil {
		return err
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

// Absent tells whether an error of Load says that there is no report.
func Absent(err error) bool { return errors.Is(err, fs.ErrNotExist) }
