// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/ddtloops"
	"github.com/xspin/xspin/eval/mpich"
	"github.com/xspin/xspin/internal/flags"
	"github.com/xspin/xspin/internal/quantile"
)

// ddtParts are what --only chooses from, in the order in which they are measured.
var ddtParts = []struct {
	name    string
	measure func(*ddtBench, context.Context) error
}{
	{"place", (*ddtBench).placeRows},
	{"loop", (*ddtBench).loopRows},
	{"strategy", (*ddtBench).strategyRows},
	{"scale", (*ddtBench).scaleRows},
	{"cpu", (*ddtBench).cpuRows},
	{"overlap", (*ddtBench).overlapRows},
	{"commit", (*ddtBench).commitRows},
}

// ddtOptions are what can be chosen of `xspin bench ddt`.
type ddtOptions struct {
	only     []string // parts; none: all
	elements int64    // of Simple and Complex in a message that is transferred
	parallel int      // messages of a round
	vectors  []int64  // block sizes, in bytes
	apps     []string // of ddt.Apps; none: all
}

func ddtDefaults() ddtOptions {
	o := ddtOptions{elements: 20, parallel: 16}
	for block := int64(4); block <= 2048; block *= 2 {
		o.vectors = append(o.vectors, block)
	}
	return o
}

// ddtFlags adds the flags of `xspin bench ddt`.
func ddtFlags(fl *pflag.FlagSet) func() (measureFunc, error) {
	o := ddtDefaults()
	var names []string
	for _, p := range ddtParts {
		names = append(names, p.name)
	}
	fl.StringSliceVar(&o.only, "only", nil, "parts to measure: "+strings.Join(names, ", ")+" (default all)")
	flags.ListOf(fl, "only", names)
	return func() (measureFunc, error) {
		for _, name := range o.only {
			if !slices.Contains(names, name) {
				return nil, flags.Error("only", name, "want "+strings.Join(names, ", "))
			}
		}
		return o.measure, nil
	}
}

// measure is `xspin bench ddt`.
func (o ddtOptions) measure(ctx context.Context, lab *benchLab, cfg benchConfig, doc *bench.Document) error {
	b := &ddtBench{benchLab: lab, cfg: cfg, o: o, doc: doc}
	for _, p := range ddtParts {
		if len(o.only) > 0 && !slices.Contains(o.only, p.name) {
			continue
		}
		if err := p.measure(b, ctx); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return nil
}

// ddtBench is one run of `xspin bench ddt`.
type ddtBench struct {
	*benchLab
	cfg benchConfig
	o   ddtOptions
	doc *bench.Document
}

// without warns of rows that are not there because MPICH, or the GEMM for it, cannot be
// had. Other errors it returns.
func (b *ddtBench) without(rows string, err error) error {
	if errors.Is(err, mpich.ErrMissing) {
		b.cfg.warn(fmt.Sprintf("no %s: %v", rows, err))
		return nil
	}
	return err
}

// A ddtType is one that is measured.
type ddtType struct {
	name   string // in rows
	typ    *ddt.Type
	count  int64
	data   *ddt.Committed
	bytes  bool // all leaves are MPI_BYTE
	loop   ddtloops.Loop
	vector bool
}

func newDDTType(name string, t *ddt.Type, count int64) (*ddtType, error) {
	c, err := ddt.Commit(t, count)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return &ddtType{name: name, typ: t, count: count, data: c, bytes: onlyBytes(t)}, nil
}

// onlyBytes tells whether a type has no elements but MPI_BYTE.
func onlyBytes(t *ddt.Type) bool {
	c := t.Contents()
	if c.Combiner == ddt.CombinerNamed {
		return t == ddt.Byte
	}
	return !slices.ContainsFunc(c.Types, func(t *ddt.Type) bool { return !onlyBytes(t) })
}

// apps returns the applications' types, Simple and Complex among them.
func (o *ddtOptions) appTypes() (types []*ddtType, err error) {
	for _, app := range ddt.Apps() {
		if len(o.apps) > 0 && !slices.Contains(o.apps, app.Name) {
			continue
		}
		typ, count, err := app.Make(nil)
		if err != nil {
			return nil, err
		}
		t, err := newDDTType(app.Name, typ, count)
		if err != nil {
			return nil, err
		}
		t.loop, _ = ddtloops.For(app.Name)
		types = append(types, t)
	}
	return types, nil
}

// vectorBytes is how long the messages of vectors are: as those of Simple and Complex.
const vectorBytes = 110592

// vectorTypes returns vectors whose blocks are half of their stride, with these leaves.
func (o *ddtOptions) vectorTypes(leaves ...*ddt.Type) (types []*ddtType, err error) {
	for _, leaf := range leaves {
		for _, block := range o.vectors {
			if block%leaf.Size() != 0 {
				continue
			}
			count := vectorBytes / block
			typ, err := ddt.HVector(count, block/leaf.Size(), 2*block, leaf)
			if err != nil {
				return nil, err
			}
			t, err := newDDTType(fmt.Sprintf("vector_%dB_%s", block, leaf.Contents().Name), typ, 1)
			if err != nil {
				return nil, err
			}
			t.loop, t.vector = ddtloops.Vector(int(count), int(block), int(2*block)), true
			types = append(types, t)
		}
	}
	return types, nil
}

// A duel is two things measured in the same runs, each figure the larger the better.
type duel struct {
	what string // is compared: a type, and how
	a, b []float64
}

// geomean returns the geometric mean over duels, run by run.
func geomean(duels []duel) (a, b []float64) {
	for run := range duels[0].a {
		x, y := 0.0, 0.0
		for _, d := range duels {
			x += math.Log(d.a[run])
			y += math.Log(d.b[run])
		}
		n := float64(len(duels))
		a, b = append(a, math.Exp(x/n)), append(b, math.Exp(y/n))
	}
	return a, b
}

// least returns the duel with the least ratio of medians.
func least(duels []duel) duel {
	ratio := func(d duel) float64 { return quantile.Median(d.a) / quantile.Median(d.b) }
	return slices.MinFunc(duels, func(x, y duel) int {
		if ratio(x) < ratio(y) {
			return -1
		}
		return 1
	})
}

// ratio adds a row.
func (b *ddtBench) ratio(name string, goal bench.Goal, conditions string, one, two bench.Side) error {
	row, err := bench.Ratio(name, goal, one, two)
	return b.doc.Add(conditions, row, err)
}

// absolute adds a row.
func (b *ddtBench) absolute(name string, goal bench.Goal, conditions string, s bench.Side) error {
	row, err := bench.Absolute(name, goal, s)
	return b.doc.Add(conditions, row, err)
}

// leastRow adds the row of the duel with the least ratio, if there is any duel.
func (b *ddtBench) leastRow(name string, goal bench.Goal, conditions, what, than string, duels []duel) error {
	if len(duels) == 0 {
		return nil
	}
	d := least(duels)
	return b.ratio(name, goal, fmt.Sprintf("the least of %d medians, with its own interval; %s", len(duels), conditions),
		bench.NewSide(d.what+": "+what, "GB/s", d.a), bench.NewSide(d.what+": "+than, "GB/s", d.b))
}

// lastLevel returns how many bytes the largest cache of a CPU has, 32 MiB if that is not
// known.
func lastLevel(cpu int) (most int64) {
	files, _ := filepath.Glob(fmt.Sprintf("/sys/devices/system/cpu/cpu%d/cache/index*/size", cpu))
	for _, f := range files {
		text, err := os.ReadFile(f)
		var kib int64
		if _, e := fmt.Sscanf(string(text), "%dK", &kib); err == nil && e == nil {
			most = max(most, kib<<10)
		}
	}
	if most == 0 {
		most = 32 << 20
	}
	return most
}

// coldBytes returns how much other memory is written to have the caches of a CPU cold: twice
// what the largest has. A virtual machine may be told of one that it has a small share of,
// and writing twice 480 MiB takes longer than all that is measured: 256 MiB are enough.
func coldBytes(cpu int) int64 { return min(2*lastLevel(cpu), 256<<20) }

// An arena is memory that types are placed in. It is used by one thread, pinned.
type arena struct {
	mem, stream []byte
	cold        []byte // what is written to have nothing of the others in caches
	free        func() error
}

// newArena returns one that has room for each of the types.
func (b *ddtBench) newArena(types []*ddtType) (*arena, error) {
	var sizes [3]int64
	for _, t := range types {
		_, hi := t.data.Bounds()
		sizes[0], sizes[1] = max(sizes[0], hi), max(sizes[1], t.data.Size())
	}
	sizes[2] = coldBytes(b.receiver)
	a := &arena{free: func() error { return nil }}
	for i, m := range []*[]byte{&a.mem, &a.stream, &a.cold} {
		bytes, free, err := memory(sizes[i])
		if err != nil {
			return nil, errors.Join(err, a.free())
		}
		*m = bytes
		before := a.free
		a.free = func() error { return errors.Join(before(), free()) }
	}
	for i := range a.stream {
		a.stream[i] = byte(i)
	}
	return a, nil
}

// span is how long a measurement in memory takes at least: what is shorter is repeated,
// and divided. It is MPICH's side's too (src/mpi_unpack.c).
const span = 50 * time.Microsecond

// warmRuns and coldRuns are how many measurements in memory a run has, of which the
// median counts.
func (b *ddtBench) warmRuns() int { return max(3, int(b.cfg.duration/(50*time.Millisecond))) }
func (b *ddtBench) coldRuns() int { return max(3, int(b.cfg.duration/(200*time.Millisecond))) }

// measure returns how long a call takes, in ns: the median of some measurements, before
// each of which, if it is to be cold, other memory is written.
func (a *arena) measure(runs int, cold bool, call func()) float64 {
	times := 1
	took := func() time.Duration {
		begin := time.Now()
		for range times {
			call()
		}
		return time.Since(begin)
	}
	call()
	for !cold && times < 1<<20 && took() < span {
		times *= 2
	}
	var ns []float64
	for range runs {
		for i := 0; cold && i < len(a.cold); i += 64 {
			a.cold[i]++
		}
		ns = append(ns, float64(took())/float64(times))
	}
	return quantile.Median(ns)
}

// gigabytes makes GB/s of bytes and ns.
func gigabytes(bytes int64, ns float64) float64 { return float64(bytes) / ns }

func medianNS(all []time.Duration) float64 {
	var ns []float64
	for _, d := range all {
		ns = append(ns, float64(d))
	}
	return quantile.Median(ns)
}
