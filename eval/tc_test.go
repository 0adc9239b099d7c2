// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"testing"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/report"
)

func TestFilesAtTCAreDrawn(t *testing.T) {
	e := &report.Experiment{Name: "test"}
	draw := func() {
		t.Helper()
		if err := tcPlot(t.Context(), &trial{e: e}); err != nil {
			t.Fatal(err)
		}
	}
	if draw(); len(e.Plots) != 0 {
		t.Errorf("plots of no rows: %+v", e.Plots)
	}
	side := func(gbps float64) bench.Side {
		s := bench.NewSide("", "Gbit/s", []float64{gbps, gbps})
		s.On = "no XDP"
		return s
	}
	for i, name := range []string{"file_over_tcp", "two_files_over_tcp", "file_stored_over_tcp"} {
		row, err := bench.Ratio("tc/"+name, bench.Higher, side(float64(10+i)), side(float64(20+i)))
		if err != nil {
			t.Fatal(err)
		}
		e.Rows = append(e.Rows, row)
	}
	draw()
	wantPlots(t, plotsOf(t, e), "tc-files: SLMP, handlers in eBPF at tc 3, TCP 3")
	for i, s := range e.Plots[0].Series {
		if p := s.Points[2]; p.Y != float64(10*i+12) || s.On != "no XDP" {
			t.Errorf("%s: %g", s.Name, p.Y)
		}
	}
}
