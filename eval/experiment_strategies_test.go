// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"bytes"
	"errors"
	"fmt"
	"math/bits"
	"strings"
	"testing"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/report"
	"github.com/xspin/xspin/netns/testbed"
)

// Figures 8, 12, 13, 16 and 18 come out of real placing, in as little time as may be.
func TestStrategiesMeasureEveryRow(t *testing.T) {
	if !measures(t) {
		return
	}
	if testing.Short() {
		t.Skip("takes seconds")
	}
	row := func(r bench.Row, err error) bench.Row {
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	side := bench.NewSide("it", "Mpps", []float64{1, 2, 3})
	e := report.Experiment{Name: "strategies", Rows: []bench.Row{
		row(bench.Absolute("ddt/strategy_hpus/LAMMPS_full/in_order/direct", bench.Higher, side)),
		row(bench.Absolute("ddt/strategy_hpus/LAMMPS_full/in_order/rw-cp_one_packet", bench.Higher, side)),
		row(bench.Absolute("ddt/strategy_hpus/LAMMPS_full/within_32/rw-cp_one_packet", bench.Higher, side)),
		row(bench.Ratio("ddt/commit_over_transfer/MILC", bench.Lower, side, side)),
	}}
	err := inLab(func(msg string) { t.Log(msg) }, func(lab *benchLab) (err error) {
		trial := &trial{lab, benchConfig{runs: 1, warn: func(msg string) { t.Error(msg) }}, true, &e}
		for _, measure := range []step{strategyRowsPlots, blocksPlot, partsPlot, hpusPlots, appsPlots} {
			err = errors.Join(err, measure(t.Context(), trial))
		}
		return err
	})
	if err = errors.Join(err, e.Prune()); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range e.Plots {
		got = append(got, p.Name)
		for _, s := range p.Series {
			if p.Name == "strategies-reuses" { // as many as pay off
				continue
			}
			got = append(got, fmt.Sprint(len(s.Points)))
			if mine := !strings.Contains(s.Name, "MPICH") && !strings.Contains(s.Name, "scatter list"); mine != (s.Tier == "user") {
				t.Errorf("%s: series %s is of tier %q", p.Name, s.Name, s.Tier)
			}
		}
	}
	hpus := bits.Len(uint(min(len(testbed.CPUs()), 16)))
	if got, want := strings.Join(got, " "), "strategies-order 2 1 strategies-commit 1 strategies-blocks 5 5 5 5 5 5 5 strategies-parts 15 15 15 "+
		fmt.Sprintf("strategies-hpus %[1]d %[1]d %[1]d %[1]d %[1]d %[1]d ", hpus)+
		"strategies-memory-blocks 6 6 6 6 6 strategies-memory-hpus 6 6 6 6 6 strategies-applications 5 5 5 strategies-reuses"; got != want {
		t.Errorf("plots and points %s\nwant %s", got, want)
	}
}

func TestStrategiesWithoutMPICH(t *testing.T) {
	t.Setenv("PATH", "/nonexistent")
	var warned []string
	b := &ddtBench{benchLab: &benchLab{}, cfg: benchConfig{warn: func(msg string) { warned = append(warned, msg) }}}
	u, end, err := b.unpackers(t.Context(), "lines of MPICH")
	if u != nil || err != nil || end() != nil || len(warned) != 1 || !strings.HasPrefix(warned[0], "no lines of MPICH: ") || !strings.Contains(warned[0], "apt-get install mpich") {
		t.Errorf("%v, %v, warned %q", u, err, warned)
	}
}

func TestPartsOfHandlers(t *testing.T) {
	for _, tc := range []struct {
		name                        string
		copies                      bool
		empty, whole, caughtUp, all float64
		want                        [3]float64
	}{
		{"finds its place", false, 5, 60, 100, 100, [3]float64{5, 35, 60}},
		{"copies a checkpoint", true, 5, 60, 90, 130, [3]float64{30, 40, 60}},
		{"noise", true, 5, 60, 50, 55, [3]float64{5, 0, 60}},
	} {
		if got := handlerParts(tc.copies, tc.empty, tc.whole, tc.caughtUp, tc.all); got != tc.want {
			t.Errorf("%s: %v, want %v", tc.name, got, tc.want)
		}
	}
}

// A scatter list places, message after message, what a datatype does.
func TestScatterListPlacesAllOfAMessage(t *testing.T) {
	o := ddtOptions{apps: []string{"LAMMPS_full", "NAS_LU", "MILC"}}
	types, err := o.appTypes()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range types {
		_, hi := d.data.Bounds()
		a, want := &arena{mem: make([]byte, hi), stream: make([]byte, d.data.Size())}, make([]byte, hi)
		v := newIovec(d.data)
		if int64(len(v.list)) != d.data.Blocks() && !strings.HasPrefix(d.name, "LAMMPS") { // whose blocks may touch
			t.Errorf("%s: %d entries for %d blocks", d.name, len(v.list), d.data.Blocks())
		}
		for message := range 3 {
			for i := range a.stream {
				a.stream[i] = byte(i*7 + message)
			}
			if _, err := d.data.Unpack(want, 0, 0, a.stream); err != nil {
				t.Fatal(err)
			}
			for _, first := range ddtOrders[0].ranges(d.data.Size()) {
				v.place(a.mem, a.part(d, first))
			}
			if !bytes.Equal(a.mem, want) {
				t.Errorf("%s: message %d is not where it belongs", d.name, message)
			}
		}
	}
}

func TestReuses(t *testing.T) {
	const faster, slower = 10, 50 // than 30, in ns
	of := func(direct, rwcp []float64) appRuns {
		return appRuns{place: [3][]float64{rwcp, direct}, peer: []float64{30, 30}, commit: [2][]float64{{400, 400}, {100, 100}}}
	}
	all := []appRuns{
		of([]float64{faster, faster}, []float64{slower, faster}), // for certain, and perhaps
		of([]float64{25, 25}, []float64{faster, faster}),
		of([]float64{slower, slower}, []float64{slower, slower}),
		of([]float64{20, 20}, []float64{20, 20}),
	}
	for i, want := range [][][2]float64{{{25, 20}, {50, 40}}, {{25, 5}, {50, 10}, {75, 20}}} {
		l := reuses(all)[i]
		if l.name != strategyNames[[]string{ddt.RWCP, ddt.Direct}[i]] {
			t.Errorf("line %d is %s", i, l.name)
		}
		s := l.series()
		var got [][2]float64
		for _, p := range s.Points {
			got = append(got, [2]float64{p.X, p.Y})
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: %v, want %v", l.name, got, want)
		}
	}
}
