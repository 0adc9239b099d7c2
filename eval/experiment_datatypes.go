// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/demos/datatypes"
	"github.com/xspin/xspin/demos/datatypes/gemm"
	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/mpich"
	"github.com/xspin/xspin/eval/report"
)

// A datatypeSweep is the places of figures 27 and 29 of D4.7: messages at a time, of the
// most elements, and elements of a message, of which there are the most at a time.
type datatypeSweep struct {
	parallel, elements []int
	duration           time.Duration // of a place in a run
}

var (
	fullDatatypes  = datatypeSweep{[]int{1, 2, 4, 8, 16}, []int{2, 6, 10, 14, 18, 20}, 500 * time.Millisecond}
	quickDatatypes = datatypeSweep{[]int{1, 16}, []int{2, 20}, 100 * time.Millisecond}
)

func datatypesPlots(ctx context.Context, t *trial) error {
	return pick(t, fullDatatypes, quickDatatypes).plots(ctx, t)
}

// A datatypeAxis is one of the two, and what FPsPIN has there, in Gbit/s: the data that its
// repository ships (p = 1 and 16), and the best that D4.7 tells by length.
type datatypeAxis struct {
	name, title string
	axis        report.Axis
	goodput     map[string][][2]float64 // by type; x and y
	ratio       [2]float64
	ratioName   string
}

var datatypeAxes = []datatypeAxis{
	{
		"parallel", "by number of messages at a time", report.Axis{Label: "messages at a time", Log: true},
		map[string][][2]float64{"Simple": {{1, 0.074}, {16, 1.152}}, "Complex": {{1, 0.052}, {16, 0.789}}},
		[2]float64{16, 0.99}, "FPsPIN, at least",
	},
	{
		"length", "by message length", report.Axis{Label: "message length", Unit: "KiB"},
		map[string][][2]float64{"Simple": {{1944, 1.1624}}, "Complex": {{1080, 0.8012}}},
		[2]float64{216, 0.94}, "FPsPIN, at least",
	},
}

const fpspinDatatypes = "FPsPIN (D4.7, figure %s), an FPGA at 40 MHz and a Ryzen 7 2700: another machine"

// A datatypePoint is a place of a sweep.
type datatypePoint struct {
	datatypes.Transfer
	x     [2]float64      // by axis; 0 if it is on the other one only
	bytes int64           // of a round
	gemms datatypes.GEMMs // that go on for about as long, since the first round
	doubt string          // why measures beside GEMMs are not to be trusted, since then
}

// points returns the places of a type. What is on both axes is there once.
func (s *datatypeSweep) points(typ string) (all []*datatypePoint, err error) {
	resolved, _, err := ddt.Resolve(typ)
	if err != nil {
		return nil, err
	}
	longest, most := slices.Max(s.elements), slices.Max(s.parallel)
	add := func(parallel, elements int) {
		p := &datatypePoint{Transfer: datatypes.Transfer{Name: fmt.Sprintf("%d at a time of %d %s", parallel, elements, typ), Type: typ, Count: int64(elements), Parallel: parallel, Strategy: ddt.Direct}}
		size := resolved.Size() * int64(elements)
		p.bytes = size * int64(parallel)
		if elements == longest {
			p.x[0] = float64(parallel)
		}
		if parallel == most {
			p.x[1] = float64(size) / 1024
		}
		all = append(all, p)
	}
	for _, n := range s.parallel {
		add(n, longest)
	}
	for _, n := range s.elements {
		if n != longest {
			add(most, n)
		}
	}
	return all, nil
}

// A datatypeSide is who receives: lines by axis.
type datatypeSide struct {
	alone, beside, gemms, ratio, hidden [2]*line
}

func newDatatypeSide(typ, who, tier string) *datatypeSide {
	s := &datatypeSide{}
	for axis := range datatypeAxes {
		s.alone[axis], s.beside[axis] = newLine(who, tier), newLine(who+", with GEMMs", tier)
		s.gemms[axis] = newLine("while "+who+" receives", tier)
		s.ratio[axis], s.hidden[axis] = newLine(typ+", "+who, tier), newLine(typ+", "+who, tier)
	}
	return s
}

// add adds a run of a place.
func (s *datatypeSide) add(p *datatypePoint, o overlapped, on string) {
	bits := 8 * float64(p.bytes) * float64(o.trials)
	lost := -1.0
	if o.segments > 0 {
		lost = float64(o.lost) / float64(o.segments)
	}
	var r overlapRuns
	r.add(o)
	for axis, x := range p.x {
		if x == 0 {
			continue
		}
		for _, l := range []struct {
			*line
			y, lost float64
		}{
			{s.alone[axis], bits / float64(o.transfer), -1}, {s.beside[axis], bits / float64(o.detected), lost},
			{s.gemms[axis], gemm.GFLOPS(p.gemms.N, p.gemms.Count*o.trials, o.computed), -1},
			{s.ratio[axis], r.ratio[0], -1}, {s.hidden[axis], r.hidden[0], -1},
		} {
			l.on = on
			l.add(x, l.y, l.lost)
		}
	}
}

// doubt notes at a place why what is measured beside GEMMs is not to be trusted there, if so.
func (s *datatypeSide) doubt(p *datatypePoint) {
	for axis, x := range p.x {
		if x == 0 || p.doubt == "" {
			continue
		}
		for _, l := range []*line{s.beside[axis], s.gemms[axis], s.ratio[axis], s.hidden[axis]} {
			l.doubts[x] = p.doubt
		}
	}
}

// A datatypePeer is an MPI library that is measured.
type datatypePeer struct {
	mpich.Library
	*pair                          // nil if it cannot be measured, or not any more
	sides map[string]*datatypeSide // by type
}

// without has the library's lines left out, for a reason that is told: the other lines are
// worth having nonetheless. It returns an error if the measurement is to end.
func (p *datatypePeer) without(ctx context.Context, b *ddtBench, reason error) error {
	p.close(&reason)
	p.pair = nil
	if ctx.Err() != nil {
		return reason
	}
	b.cfg.warn(fmt.Sprintf("no %s: %v", p.lines(), reason))
	return nil
}

func (p *datatypePeer) lines() string { return fmt.Sprintf("lines of %s in datatypes-*", p.Library) }

// plots measures figures 27 to 29 of D4.7.
func (s datatypeSweep) plots(ctx context.Context, t *trial) (err error) {
	b := t.ddt(s.duration)
	types := []string{"Simple", "Complex"}
	places := map[string][]*datatypePoint{}
	for _, typ := range types {
		if places[typ], err = s.points(typ); err != nil {
			return err
		}
	}
	peers := []*datatypePeer{{Library: mpich.MPICH}, {Library: mpich.OpenMPI}}
	for _, p := range peers {
		defer func() { p.close(&err) }()
		p.sides = map[string]*datatypeSide{}
		// It is prepared anew for each place.
		if p.pair, err = b.computing(ctx, p.Library, places[types[0]][0].Transfer, p.lines()); err != nil {
			if err = p.without(ctx, b, err); err != nil {
				return err
			}
		}
	}
	var sides []func(context.Context) error
	ours, alone := map[string]*datatypeSide{}, map[string]*datatypeSide{}
	var unsettled []string // places
	for _, typ := range types {
		ours[typ], alone[typ] = newDatatypeSide(typ, "XsPIN", "user"), newDatatypeSide(typ, "", "")
		sides = append(sides, func(ctx context.Context) error {
			n, err := b.datatypesOurs(ctx, places[typ], ours[typ], alone[typ])
			unsettled = append(unsettled, n...)
			return err
		})
		for _, p := range peers {
			p.sides[typ] = newDatatypeSide(typ, string(p.Library)+" over TCP", "")
			sides = append(sides, func(ctx context.Context) error {
				if p.pair == nil {
					return nil
				}
				if err := b.datatypesTheirs(ctx, p, places[typ], p.sides[typ]); err != nil {
					return p.without(ctx, b, err)
				}
				return nil
			})
		}
	}
	if err := bench.Rounds(ctx, min(t.runs, 3), sides...); err != nil {
		return err
	}
	if len(unsettled) > 0 {
		b.cfg.warn(fmt.Sprintf("datatypes-*: distrust what is measured beside GEMMs at these points, question marks in the plots: %s. The size of matrices had not settled there after FPsPIN's tuning, as happens if the machine is not left alone", strings.Join(unsettled, ", ")))
	}

	for i, a := range datatypeAxes {
		name := func(parts ...string) string {
			n := "datatypes"
			for _, p := range parts {
				n += "-" + p
			}
			return n + "-" + a.name
		}
		ratio := report.Plot{Name: name("ratio"), Title: "FPsPIN's overlap ratio, " + a.title, X: a.axis, Y: report.Axis{Label: "GEMMs' share of the time until messages are found", Unit: "ratio", Better: "higher"}}
		hidden := report.Plot{Name: name("hidden"), Title: "Share of the messages' time that is hidden behind GEMMs, " + a.title, X: a.axis, Y: report.Axis{Label: "(GEMMs + messages - both) / messages", Unit: "share", Better: "higher"}}
		ratio.Marks = []report.Mark{{Name: a.ratioName, X: a.ratio[0], Y: a.ratio[1], Source: fmt.Sprintf(fpspinDatatypes, "29")}}
		var ratios, hiddens []*line
		for _, typ := range types {
			file := map[string]string{"Simple": "simple", "Complex": "complex"}[typ]
			goodput := report.Plot{Name: name(file), Title: typ + ": goodput, " + a.title, X: a.axis, Y: report.Axis{Label: "goodput", Unit: "Gbit/s"}}
			for _, m := range a.goodput[typ] {
				goodput.Marks = append(goodput.Marks, report.Mark{Name: "FPsPIN", X: m[0], Y: m[1], Source: fmt.Sprintf(fpspinDatatypes, "27 and its data")})
			}
			alone[typ].gemms[i].name = "alone"
			var goodputs []*line
			gemms := []*line{alone[typ].gemms[i]}
			all := []*datatypeSide{ours[typ]}
			for _, p := range peers {
				if p.pair != nil {
					all = append(all, p.sides[typ])
				}
			}
			for _, side := range all {
				goodputs, gemms = append(goodputs, side.alone[i], side.beside[i]), append(gemms, side.gemms[i])
				ratios, hiddens = append(ratios, side.ratio[i]), append(hiddens, side.hidden[i])
			}
			t.plot(goodput, goodputs...)
			t.plot(report.Plot{
				Name: name(file, "gemm"), Title: "Speed of GEMMs while messages of " + typ + " arrive, " + a.title, X: a.axis, Y: report.Axis{Label: "GEMMs, one thread", Unit: "GFLOPS"},
			}, gemms...)
		}
		t.plot(ratio, ratios...)
		t.plot(hidden, hiddens...)
	}
	return nil
}

// datatypesOurs is a run of all places of a type, in a session. The first one tunes, as
// FPsPIN does; it returns the places where that did not settle.
func (b *ddtBench) datatypesOurs(ctx context.Context, points []*datatypePoint, to, alone *datatypeSide) (unsettled []string, err error) {
	var transfers []datatypes.Transfer
	for _, p := range points {
		transfers = append(transfers, p.Transfer)
	}
	s, err := datatypes.Open(ctx, b.Lab, b.setup(b.sender), transfers...)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	on, err := b.state()
	if err != nil {
		return nil, err
	}
	for i, p := range points {
		err := func() error {
			var round *datatypes.Round
			for range 2 { // the first one has memory and windows to find
				if round, err = s.Round(ctx, i); err != nil {
					return err
				}
			}
			if p.gemms.N == 0 {
				g, tuned, err := s.Tune(ctx, i, round.Took)
				if err != nil {
					return err
				}
				if p.gemms = g; !tuned {
					unsettled = append(unsettled, p.Name)
					p.doubt = "FPsPIN's tuning had not settled the size of the matrices, so the GEMMs were too long or too short for the messages"
				}
			}
			var o overlapped
			if err := b.overlapTrials(ctx, s, i, p.gemms, &o); err != nil {
				return err
			}
			to.add(p, o, on)
			to.doubt(p)
			o.computed = o.compute
			alone.add(p, o, "")
			return nil
		}()
		if err != nil {
			return unsettled, fmt.Errorf("%s: %w", p.Name, err)
		}
	}
	return unsettled, nil
}

// theirPatience is how long a library may take for a place before it counts as hanging.
const theirPatience = time.Minute

// datatypesTheirs is a run of all places of a type by an MPI library.
func (b *ddtBench) datatypesTheirs(ctx context.Context, peer *datatypePeer, points []*datatypePoint, to *datatypeSide) error {
	on, err := b.state()
	if err != nil {
		return err
	}
	place := func(p *datatypePoint) (o overlapped, err error) {
		ctx, cancel := context.WithTimeout(ctx, theirPatience)
		defer cancel()
		typ, _, err := ddt.Resolve(p.Type)
		if err != nil {
			return o, err
		}
		if err := peer.Prepare(ctx, mpich.Transfer{Type: typ, Count: p.Count, Messages: p.Parallel}); err != nil {
			return o, err
		}
		return b.overlapTheirs(ctx, peer.pair, p.gemms)
	}
	for _, p := range points {
		o, err := place(p)
		if err != nil {
			return fmt.Errorf("%s, %s: %w", peer.Library, p.Name, err)
		}
		to.add(p, o, on)
		to.doubt(p)
	}
	return nil
}

// overlapRowsPlot draws rows of ddt: both measures of overlap, beside each other.
func overlapRowsPlot(_ context.Context, t *trial) error {
	x := report.Axis{Label: "measure", Names: []string{"FPsPIN's ratio", "share of the messages' time that is hidden"}}
	var lines []*line
	for _, typ := range []string{"simple", "complex"} {
		for _, peer := range []struct{ suffix, name, tier string }{{"", "XsPIN", "user"}, {"_mpich", "MPICH over TCP", ""}} {
			l := newLine(strings.ToUpper(typ[:1])+typ[1:]+", "+peer.name, peer.tier)
			for i, row := range []string{"ddt/overlap_ratio_", "ddt/hidden_"} {
				if r := t.row(row + typ + peer.suffix); r != nil {
					l.row(float64(i), r.A)
				}
			}
			lines = append(lines, l)
		}
	}
	t.plot(report.Plot{
		Name: "datatypes-overlap", Title: "How well 16 messages of 20 elements overlap with GEMMs, by two measures",
		X: x, Y: report.Axis{Label: "overlap", Unit: "share", Better: "higher"},
	}, lines...)
	return nil
}
