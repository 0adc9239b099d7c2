// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"fmt"
	"image/color"
	"math"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"github.com/xspin/xspin/eval/report"
)

// palette has the colours of series, from Okabe and Ito. Series also differ in glyphs, so
// that they are told apart in print. Marks are crosses, in a grey that no series has.
var (
	palette = []color.RGBA{
		blue, orange, {0x00, 0x9e, 0x73, 0xff}, {0xcc, 0x79, 0xa7, 0xff},
		{0xe6, 0x9f, 0x00, 0xff}, {0x56, 0xb4, 0xe9, 0xff}, {0x00, 0x00, 0x00, 0xff}, grey,
	}
	markColour = color.RGBA{0x40, 0x40, 0x40, 0xff}
)

var (
	glyphs = []draw.GlyphDrawer{
		draw.CircleGlyph{}, draw.BoxGlyph{}, draw.PyramidGlyph{}, draw.RingGlyph{}, draw.SquareGlyph{}, draw.TriangleGlyph{}, strokes{0, 45, 90, 135},
	}
	crosses = []draw.GlyphDrawer{strokes{45, 135}, strokes{0, 90}, strokes{30, 90, 150}}
)

// strokes are a glyph of lines through a point, at these angles.
type strokes []float64

// DrawGlyph draws it.
func (s strokes) DrawGlyph(c *draw.Canvas, sty draw.GlyphStyle, pt vg.Point) {
	c.SetLineStyle(draw.LineStyle{Color: sty.Color, Width: 1.5})
	for _, angle := range s {
		sin, cos := math.Sincos(angle * math.Pi / 180)
		x, y := sty.Radius*vg.Length(cos), sty.Radius*vg.Length(sin)
		var p vg.Path
		p.Move(vg.Point{X: pt.X - x, Y: pt.Y - y})
		p.Line(vg.Point{X: pt.X + x, Y: pt.Y + y})
		c.Stroke(p)
	}
}

const (
	plotWidth, plotHeight = 720, 400 // without the legend
	dotRadius             = 3.5
	markRadius            = 4.5
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
	c := &Chart{plot: newPlot(), width: plotWidth}
	c.legend.style = c.plot.Legend.TextStyle
	c.plot.X.Label.Text, c.plot.Y.Label.Text = p.X.Title(), p.Y.Title()
	c.plot.Add(plotter.NewGrid())
	draw := c.lines
	if p.Stack {
		draw = c.bars
	}
	if err := draw(p); err != nil {
		return nil, fmt.Errorf("plot %s: %w", p.Name, err)
	}
	c.title = p.Title
	if len(c.legend.entries) == 1 { // the title says what it is
		c.legend.entries = nil
	}
	c.height = plotHeight + legendLine*vg.Length(len(c.legend.rows(c.width-2*edge)))
	return c, nil
}

// spread is the points of a series with their intervals.
type spread struct {
	plotter.XYs
	plotter.YErrors
}

// doubts are question marks at points that are not to be trusted. The y axis is not stretched
// to reach them if there are points that are.
type doubts struct {
	*plotter.Labels
	trusted bool // some are
}

// DataRange is what the axes have to show.
func (d doubts) DataRange() (xmin, xmax, ymin, ymax float64) {
	xmin, xmax, ymin, ymax = d.Labels.DataRange()
	if d.trusted {
		ymin, ymax = math.Inf(1), math.Inf(-1)
	}
	return xmin, xmax, ymin, ymax
}

// aside is how far beside its named place a point of a series is, so that those of others
// at that place do not hide it.
func aside(p *report.Plot, series int, x float64) float64 {
	n, before := 0, 0
	for i, s := range p.Series {
		if slices.ContainsFunc(s.Points, func(pt report.Point) bool { return pt.X == x }) {
			n++
			if i < series {
				before++
			}
		}
	}
	return 0.6 * (float64(before) - float64(n-1)/2) / float64(n)
}

func (c *Chart) lines(p *report.Plot) error {
	var xs []float64
	trusted := slices.ContainsFunc(p.Series, func(s report.Series) bool {
		return slices.ContainsFunc(s.Points, func(pt report.Point) bool { return pt.Doubt == "" })
	})
	for i, s := range p.Series {
		if len(s.Points) == 0 {
			continue
		}
		var d spread
		var doubted plotter.XYLabels
		for _, pt := range s.Points {
			x := pt.X
			if len(p.X.Names) > 0 {
				x += aside(p, i, pt.X)
			}
			xs = append(xs, pt.X)
			if at := (plotter.XY{X: x, Y: pt.Y}); pt.Doubt != "" {
				doubted.XYs, doubted.Labels = append(doubted.XYs, at), append(doubted.Labels, "?")
			} else {
				d.XYs = append(d.XYs, at)
				d.YErrors = append(d.YErrors, struct{ Low, High float64 }{pt.Y - pt.CI95[0], pt.CI95[1] - pt.Y})
			}
		}
		colour := palette[i%len(palette)]
		line := &plotter.Line{XYs: d.XYs, LineStyle: draw.LineStyle{Color: colour, Width: 1.5}}
		dots := &plotter.Scatter{XYs: d.XYs, GlyphStyle: draw.GlyphStyle{Color: colour, Shape: glyphs[i%len(glyphs)], Radius: dotRadius}}
		thumbs := []plot.Thumbnailer{line, dots}
		if len(p.X.Names) > 0 {
			thumbs = thumbs[1:]
		}
		c.legend.add(s.Name, thumbs...)
		if len(doubted.XYs) > 0 {
			labels, err := plotter.NewLabels(doubted)
			if err != nil {
				return fmt.Errorf("series %s: %w", s.Name, err)
			}
			style := c.legend.style
			style.Color, style.XAlign, style.YAlign, style.Font.Size = colour, text.XCenter, text.YCenter, 16
			for j := range labels.TextStyle {
				labels.TextStyle[j] = style
			}
			c.plot.Add(doubts{labels, trusted})
		}
		if len(d.XYs) == 0 {
			continue
		}
		bar, err := plotter.NewYErrorBars(d)
		if err != nil {
			return fmt.Errorf("series %s: %w", s.Name, err)
		}
		bar.Color, bar.CapWidth = colour, 6
		c.plot.Add(bar, dots)
		if len(p.X.Names) == 0 {
			c.plot.Add(line)
		}
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
		marks.Color, marks.Shape, marks.Radius = markColour, crosses[i%len(crosses)], markRadius
		c.plot.Add(marks)
		c.legend.add(name, marks)
	}
	slices.Sort(xs)
	fit(c.plot, p, slices.Compact(xs))
	return nil
}

// places names those of the x axis, aslant if they are too long beside each other.
func places(pic *plot.Plot, names []string) {
	const letters = 60 // that fit, with room between names
	pic.NominalX(names...)
	if len(names) > 8 && len(strings.Join(names, "")) > letters {
		pic.X.Tick.Label.Rotation, pic.X.Tick.Label.XAlign, pic.X.Tick.Label.YAlign = math.Pi/4, text.XRight, text.YTop
	}
}

func (c *Chart) bars(p *report.Plot) error {
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
		c.plot.Add(b)
		c.legend.add(s.Name, b)
	}
	names := make([]string, len(xs))
	for i, x := range xs {
		names[i] = short(x, p.X.Unit)
		if len(p.X.Names) > 0 {
			names[i] = p.X.Names[int(x)]
		}
	}
	places(c.plot, names)
	c.plot.X.Min, c.plot.X.Max = -0.5, float64(len(xs))-0.5
	c.plot.Y.Tick.Marker = linear{}
	c.plot.Y.Min, c.plot.Y.Max = 0, 1.05*c.plot.Y.Max
	return nil
}
