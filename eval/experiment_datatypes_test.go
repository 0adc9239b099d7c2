// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/demos/datatypes"
	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/report"
)

// Figures 27 to 29 come out of real messages, in as little time as may be.
func TestDatatypesMeasureEveryRow(t *testing.T) {
	if !measures(t) {
		return
	}
	if testing.Short() {
		t.Skip("takes seconds")
	}
	row, err := bench.Absolute("ddt/hidden_simple_mpich", bench.Higher, bench.NewSide("it", "share", []float64{0.1, 0.2}))
	if err != nil {
		t.Fatal(err)
	}
	e := report.Experiment{Name: "datatypes", Rows: []bench.Row{row}}
	var warned []string
	err = inLab(func(msg string) { t.Log(msg) }, func(lab *benchLab) error {
		trial := &trial{lab, benchConfig{runs: 1, warn: func(msg string) { warned = append(warned, msg) }}, true, &e}
		return errors.Join(overlapRowsPlot(t.Context(), trial), datatypeSweep{[]int{1, 2}, []int{1, 2}, time.Millisecond}.plots(t.Context(), trial))
	})
	if err = errors.Join(err, e.Prune()); err != nil {
		t.Fatal(err)
	}
	want := "datatypes-overlap 1"
	for _, axis := range []string{"parallel", "length"} {
		for _, plot := range []string{"simple-%[1]s 2 2 2 2 2 2", "simple-gemm-%[1]s 2 2 2 2", "complex-%[1]s 2 2 2 2 2 2", "complex-gemm-%[1]s 2 2 2 2", "ratio-%[1]s 2 2 2 2 2 2", "hidden-%[1]s 2 2 2 2 2 2"} {
			want += " datatypes-" + fmt.Sprintf(plot, axis)
		}
	}
	var got []string
	for _, p := range e.Plots {
		got = append(got, p.Name)
		for _, s := range p.Series {
			got = append(got, fmt.Sprint(len(s.Points)))
			if ours := strings.Contains(s.Name, "XsPIN"); ours != (s.Tier == "user") {
				t.Errorf("%s: series %s is of tier %q", p.Name, s.Name, s.Tier)
			}
			if p.Name != "datatypes-overlap" && s.Name != "alone" && strings.Contains(s.On, "xs-nic: XDP native") != strings.Contains(s.Name, "XsPIN") {
				t.Errorf("%s: series %s: on: %q", p.Name, s.Name, s.On)
			}
		}
		if marks := strings.HasPrefix(p.Name, "datatypes-ratio") || !strings.Contains(p.Name, "gemm") && !strings.Contains(p.Name, "hidden") && !strings.Contains(p.Name, "overlap"); marks != (len(p.Marks) > 0) {
			t.Errorf("%s: marks %+v", p.Name, p.Marks)
		}
	}
	if got := strings.Join(got, " "); got != want {
		t.Errorf("plots and points %s\nwant %s", got, want)
	}
	for _, w := range warned {
		if strings.Contains(w, "no lines") {
			t.Errorf("warned %q", w)
		}
	}
	nothingIsLeft(t)
}

// What a machine does not have, or what fails there, costs its own lines.
func TestEveryRowOfOursWithoutMPI(t *testing.T) {
	if !measures(t) {
		return
	}
	bin := t.TempDir()
	for name, says := range map[string]string{"mpicc.mpich": "mpi.h: No such file or directory", "mpirun.openmpi": "it is broken"} {
		if err := os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\necho "+says+" >&2; exit 1\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	e := report.Experiment{Name: "datatypes"}
	var warned []string
	err := inLab(func(msg string) { t.Log(msg) }, func(lab *benchLab) error {
		trial := &trial{lab, benchConfig{runs: 1, warn: func(msg string) { warned = append(warned, msg) }}, true, &e}
		return datatypeSweep{[]int{1}, []int{1}, time.Millisecond}.plots(t.Context(), trial)
	})
	if err = errors.Join(err, e.Prune()); err != nil {
		t.Fatal(err)
	}
	if len(e.Plots) != 12 {
		t.Errorf("%d plots", len(e.Plots))
	}
	for _, p := range e.Plots {
		for _, s := range p.Series {
			if strings.Contains(s.Name, "MPI") {
				t.Errorf("%s: series %s", p.Name, s.Name)
			}
		}
	}
	for i, want := range [][]string{
		{"no lines of MPICH in datatypes-*: ", "apt-get install mpich"},
		{"no lines of Open MPI in datatypes-*: ", "it is broken"},
	} {
		if len(warned) < 2 || !strings.HasPrefix(warned[i], want[0]) || !strings.Contains(warned[i], want[1]) {
			t.Errorf("warned %q, want one of %q", warned, want)
		}
	}
	nothingIsLeft(t)
}

func TestPlacesOfDatatypes(t *testing.T) {
	s := datatypeSweep{parallel: []int{1, 16}, elements: []int{2, 20}}
	points, err := s.points("Complex")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range points {
		got = append(got, fmt.Sprint(p.Parallel, p.Count, p.x, p.bytes))
	}
	if got, want := strings.Join(got, "; "), "1 20 [1 0] 2211840; 16 20 [16 2160] 35389440; 16 2 [0 216] 3538944"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// By hand: two trials of 1 Mbit, 1 and 2 ms, in which 2 products of 100 by 100 take 1 and 4 ms.
func TestFiguresOfPlaces(t *testing.T) {
	const ms = time.Millisecond
	s := newDatatypeSide("Simple", "XsPIN", "user")
	p := &datatypePoint{x: [2]float64{0, 216}, bytes: 125000, gemms: datatypes.GEMMs{N: 100, Count: 2}}
	s.add(p, overlapped{trials: 2, compute: 2 * ms, transfer: 2 * ms, both: 3 * ms, computed: 8 * ms, detected: 4 * ms, ratio: 1.8, segments: 100, lost: 5}, "on")
	for _, f := range []struct {
		what string
		*line
		want float64
	}{{"alone", s.alone[1], 1}, {"beside", s.beside[1], 0.5}, {"GEMMs", s.gemms[1], 1}, {"ratio", s.ratio[1], 0.9}, {"hidden", s.hidden[1], 0.5}} {
		same(t, f.what, f.runs[216], []float64{f.want})
		if f.on != "on" {
			t.Errorf("%s: on %q", f.what, f.on)
		}
	}
	same(t, "lost", s.beside[1].lost[216], []float64{0.05})
	// Without GEMMs nothing depends on how long they are.
	p.doubt = "not settled"
	s.doubt(p)
	for _, l := range []*line{s.beside[1], s.gemms[1], s.ratio[1], s.hidden[1]} {
		if pt := l.series().Points[0]; pt.Doubt != "not settled" {
			t.Errorf("%s: %+v", l.name, pt)
		}
	}
	if pt := s.alone[1].series().Points[0]; pt.Doubt != "" {
		t.Errorf("%+v", pt)
	}
	if len(s.alone[0].runs) > 0 || len(s.alone[1].lost) > 0 {
		t.Errorf("%+v, %+v", s.alone[0], s.alone[1])
	}
}
