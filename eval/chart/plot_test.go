// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/vg"

	"github.com/xspin/xspin/eval/report"
)

func labels(ticks []plot.Tick) string {
	var all []string
	for _, t := range ticks {
		if t.Label != "" {
			all = append(all, t.Label)
		}
	}
	return strings.Join(all, " ")
}

func TestTicksAreRoundNumbers(t *testing.T) {
	for _, tc := range []struct {
		plot.Ticker
		low, high float64
		want      string
	}{
		{linear{}, 0, 2600, "0 500 1000 1500 2000 2500"},
		{linear{}, 0, 0.65, "0 0.2 0.4 0.6"},
		{linear{}, 0, 30_000, "0 5000 10,000 15,000 20,000 25,000 30,000"},
		{linear{}, -1, 1, "-1 -0.5 0 0.5 1"},
		{logarithmic{}, 2, 50, "2 5 10 20 50"},
		{logarithmic{}, 1, 1e7, "1 10 100 1000 10,000 100,000 1 M 10 M"},
		{logarithmic{}, 0.001, 0.1, "0.001 0.002 0.005 0.01 0.02 0.05 0.1"},
	} {
		if got := labels(tc.Ticks(tc.low, tc.high)); got != tc.want {
			t.Errorf("%T from %g to %g: %s, want %s", tc.Ticker, tc.low, tc.high, got, tc.want)
		}
	}
	for _, tc := range [][4]float64{{3, 40, 2, 50}, {2, 50, 2, 50}, {7, 7, 5, 10}, {10, 10, 5, 20}, {0.3, 2000, 0.2, 2000}} {
		if from, to := around(tc[0], tc[1]); from != tc[2] || to != tc[3] {
			t.Errorf("around %g and %g: %g to %g, want %g to %g", tc[0], tc[1], from, to, tc[2], tc[3])
		}
	}
	a := plot.Axis{Min: 0, Max: 10}
	if got := labels(at(&a, []float64{0, 0.1, 0.5, 1, 2, 5, 10}, "%")); got != "0 0.5 1 2 5 10" {
		t.Errorf("labels %s", got)
	}
	if got := short(65536, "bytes") + " " + short(1024, "segments"); got != "64Ki 1024" {
		t.Errorf("sizes and counts %s", got)
	}
}

// What a legend needs is added to the height of the picture: no data are under it.
func TestLegendsStandAboveTheData(t *testing.T) {
	p := &report.Plot{Name: "p", Y: report.Axis{Log: true}}
	height := vg.Length(0)
	for i := range 12 {
		p.Series = append(p.Series, report.Series{Name: fmt.Sprintf("a series with a long name, number %d", i), Points: []report.Point{report.NewPoint(1, []float64{3}), report.NewPoint(2, []float64{40})}})
		c, err := Of(p)
		if err != nil {
			t.Fatal(err)
		}
		if c.plot.Y.Min != 2 || c.plot.Y.Max != 50 {
			t.Errorf("%d series: the axis is from %g to %g", i+1, c.plot.Y.Min, c.plot.Y.Max)
		}
		rows := c.legend.rows(c.width - 2*edge)
		n := 0
		for _, row := range rows {
			wide := vg.Length(0)
			for _, e := range row {
				wide += c.legend.width(e)
				n++
			}
			if wide > c.width-2*edge {
				t.Errorf("a row of %v", wide)
			}
		}
		if want := map[bool]int{false: i + 1}[i == 0]; n != want { // one alone needs no legend
			t.Errorf("%d entries of %d series", n, i+1)
		}
		if height = c.height - legendLine*vg.Length(len(rows)); height != plotHeight {
			t.Errorf("%d rows leave %v", len(rows), height)
		}
	}
}

// Points that are not to be trusted are question marks beside the line, and do not squeeze
// the others: one that is out of the axis's range is not drawn.
func TestDoubtedPointsAreQuestionMarks(t *testing.T) {
	doubted := func(x, y float64) report.Point {
		pt := report.NewPoint(x, []float64{y})
		pt.Doubt = "it did not settle"
		return pt
	}
	all := []report.Point{report.NewPoint(1, []float64{3}), doubted(2, 4), doubted(3, -3000), report.NewPoint(4, []float64{5})}
	for _, tc := range []struct {
		points    []report.Point
		marks     int
		low, high float64
	}{
		{all, 1, 0, 5.25},
		{all[1:3], 2, -3000, 4.2}, // or nothing would be there to see
	} {
		c, err := Of(&report.Plot{Name: "p", Series: []report.Series{{Name: "a", Points: tc.points}}})
		if err != nil {
			t.Fatal(err)
		}
		var svg bytes.Buffer
		if err := c.Write(&svg, ".svg"); err != nil {
			t.Fatal(err)
		}
		if got := strings.Count(svg.String(), ">?<"); got != tc.marks {
			t.Errorf("%d points: %d question marks, want %d", len(tc.points), got, tc.marks)
		}
		if y := c.plot.Y; y.Min != tc.low || y.Max != tc.high {
			t.Errorf("%d points: the axis is from %g to %g, want %g to %g", len(tc.points), y.Min, y.Max, tc.low, tc.high)
		}
	}
}

func TestMarksDifferFromSeries(t *testing.T) {
	p := &report.Plot{Name: "p", Marks: []report.Mark{{Name: "paper", X: 1, Y: 2}}}
	const mark = "#404040"
	for i := range len(palette) {
		p.Series = append(p.Series, report.Series{Name: fmt.Sprint(i), Points: []report.Point{report.NewPoint(1, []float64{3})}})
	}
	for _, want := range []int{1, 0} {
		c, err := Of(p)
		if err != nil {
			t.Fatal(err)
		}
		var svg bytes.Buffer
		if err := c.Write(&svg, ".svg"); err != nil {
			t.Fatal(err)
		}
		if got := strings.Count(svg.String(), mark); (got > 0) != (want > 0) {
			t.Errorf("%d strokes of the marks' colour, want %d marks", got, want)
		}
		p.Marks = nil
	}
}
