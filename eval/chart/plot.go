// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"fmt"
	"image/color"
	"math"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/xspin/xspin/eval/report"
)

// palette has the colours of series, from Okabe and Ito. Series also differ in glyphs, so
// that they are told apart in print.
var palette = []color.RGBA{
	blue, orange, {0x00, 0x9e, 0x73, 0xff}, {0xcc, 0x79, 0xa7, 0xff},
	{0xe6, 0x9f, 0x00, 0xff}, {0x56, 0xb4, 0xe9, 0xff}, {0x00, 0x00, 0x00, 0xff}, grey,
}

var glyphs = []draw.GlyphDrawer{
	draw.CircleGlyph{}, draw.BoxGlyph{}, draw.PyramidGlyph{}, draw.RingGlyph{}, draw.SquareGlyph{}, draw.TriangleGlyph{}, draw.PlusGlyph{},
}

const (
	plotWidth, plotHeight = 720, 430
	dotRadius             = 3.5
)

// Of draws a plot: lines with the intervals of their points, or stacked bars. There must be
// a point.
func Of(p *report.Plot) (*Chart, error) {
	n := 0
	for _, s := range p.Series {
		n += len(s.Points)
	}
	if n == 0 {
		return nil, fmt.Errorf("plot %s: no points", p.Name)
	}
	pic := newPlot()
	pic.Title.Text = p.Title
	pic.X.Label.Text, pic.Y.Label.Text = p.X.Title(), p.Y.Title()
	pic.Add(plotter.NewGrid())
	pic.Legend.Top = true
	pic.Legend.Padding = 3
	draw := lines
	if p.Stack {
		draw = bars
	}
	if err := draw(pic, p); err != nil {
		return nil, fmt.Errorf("plot %s: %w", p.Name, err)
	}
	return &Chart{pic, plotWidth, plotHeight}, nil
}

// spread is the points of a series with their intervals.
type spread struct {
	plotter.XYs
	plotter.YErrors
}

func lines(pic *plot.Plot, p *report.Plot) error {
	var xs []float64
	for i, s := range p.Series {
		if len(s.Points) == 0 {
			continue
		}
		var d spread
		aside := 0.0 // so that dots at the same named place do not hide each other
		if len(p.X.Names) > 0 {
			aside = 0.6 * (float64(i) - float64(len(p.Series)-1)/2) / float64(len(p.Series))
		}
		for _, pt := range s.Points {
			d.XYs = append(d.XYs, plotter.XY{X: pt.X + aside, Y: pt.Y})
			d.YErrors = append(d.YErrors, struct{ Low, High float64 }{pt.Y - pt.CI95[0], pt.CI95[1] - pt.Y})
			xs = append(xs, pt.X)
		}
		line, dots, err := plotter.NewLinePoints(d.XYs)
		if err != nil {
			return fmt.Errorf("series %s: %w", s.Name, err)
		}
		bar, err := plotter.NewYErrorBars(d)
		if err != nil {
			return fmt.Errorf("series %s: %w", s.Name, err)
		}
		c := palette[i%len(palette)]
		line.Color, line.Width = c, 1.5
		dots.Color, dots.Shape, dots.Radius = c, glyphs[i%len(glyphs)], dotRadius
		bar.Color, bar.CapWidth = c, 6
		pic.Add(bar, dots)
		if len(p.X.Names) > 0 {
			pic.Legend.Add(s.Name, dots)
			continue
		}
		pic.Add(line)
		pic.Legend.Add(s.Name, line, dots)
	}
	names := map[string]plotter.XYs{}
	var order []string
	for _, m := range p.Marks {
		if names[m.Name] == nil {
			order = append(order, m.Name)
		}
		names[m.Name] = append(names[m.Name], plotter.XY{X: m.X, Y: m.Y})
	}
	for i, name := range order {
		marks, err := plotter.NewScatter(names[name])
		if err != nil {
			return fmt.Errorf("marks %s: %w", name, err)
		}
		marks.Color, marks.Shape, marks.Radius = palette[i%len(palette)], draw.CrossGlyph{}, dotRadius
		pic.Add(marks)
		pic.Legend.Add(name, marks)
	}
	axes(pic, p, xs, len(order))
	return nil
}

// axes sets scales and ticks. A y axis that is not of logarithms begins at 0, so that
// lengths compare. There is room for the legend above.
func axes(pic *plot.Plot, p *report.Plot, xs []float64, marks int) {
	slices.Sort(xs)
	xs = slices.Compact(xs)
	if p.X.Log {
		pic.X.Scale = plot.LogScale{}
		pic.X.Min, pic.X.Max = pic.X.Min/1.2, pic.X.Max*1.2
	}
	if len(p.X.Names) > 0 {
		places(pic, p.X.Names)
		pic.X.Min, pic.X.Max = -0.5, float64(len(p.X.Names))-0.5
	} else if p.X.Log || len(xs) <= 8 {
		var ticks plot.ConstantTicks
		for _, x := range xs {
			ticks = append(ticks, plot.Tick{Value: x, Label: short(x)})
		}
		pic.X.Tick.Marker = ticks
	}
	if p.Y.Log {
		pic.Y.Scale, pic.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
		low, high := math.Floor(math.Log10(pic.Y.Min)), math.Ceil(math.Log10(pic.Y.Max))
		high = max(high, low+1)
		high += (high - low) * legendRoom(len(p.Series)+marks)
		pic.Y.Min, pic.Y.Max = math.Pow(10, low), math.Pow(10, high)
		return
	}
	pic.Y.Min = math.Min(0, pic.Y.Min)
	legend(pic, len(p.Series)+marks)
}

// places names those of the x axis, aslant if they are too long beside each other.
func places(pic *plot.Plot, names []string) {
	const letters = 60 // that fit, with room between names
	pic.NominalX(names...)
	if len(names) > 8 && len(strings.Join(names, "")) > letters {
		pic.X.Tick.Label.Rotation, pic.X.Tick.Label.XAlign, pic.X.Tick.Label.YAlign = math.Pi/4, text.XRight, text.YTop
	}
}

// legend makes room for so many lines above the data.
func legend(pic *plot.Plot, lines int) {
	pic.Y.Max += (pic.Y.Max - pic.Y.Min) * legendRoom(lines)
}

// legendRoom is how much higher an axis is, for so many lines above the data.
func legendRoom(lines int) float64 {
	const line = 0.06 // of the height
	share := min(line*float64(lines), 0.5)
	return share / (1 - share)
}

// short prints sizes and counts: 64Ki rather than 65536.
func short(x float64) string {
	for i, unit := range []string{"Gi", "Mi", "Ki"} {
		if u := math.Pow(2, float64(30-10*i)); x >= u && math.Mod(x, u) == 0 {
			return strconv.FormatFloat(x/u, 'f', -1, 64) + unit
		}
	}
	return strconv.FormatFloat(x, 'g', -1, 64)
}

func bars(pic *plot.Plot, p *report.Plot) error {
	var xs []float64
	for _, s := range p.Series {
		for _, pt := range s.Points {
			xs = append(xs, pt.X)
		}
	}
	slices.Sort(xs)
	xs = slices.Compact(xs)
	var below *plotter.BarChart
	for i, s := range p.Series {
		v := make(plotter.Values, len(xs))
		for _, pt := range s.Points {
			v[slices.Index(xs, pt.X)] = pt.Y
		}
		b, err := plotter.NewBarChart(v, vg.Length(math.Min(40, 400/float64(len(xs)))))
		if err != nil {
			return fmt.Errorf("series %s: %w", s.Name, err)
		}
		b.Color, b.LineStyle.Width = palette[i%len(palette)], 0
		if below != nil {
			b.StackOn(below)
		}
		below = b
		pic.Add(b)
		pic.Legend.Add(s.Name, b)
	}
	names := make([]string, len(xs))
	for i, x := range xs {
		names[i] = short(x)
		if len(p.X.Names) > 0 {
			names[i] = p.X.Names[int(x)]
		}
	}
	places(pic, names)
	pic.Y.Min = 0
	legend(pic, len(p.Series))
	return nil
}
