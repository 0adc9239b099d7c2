// SPDX-License-Identifier: Apache-2.0

// Package chart draws the figures of the evaluation, as SVG and as PNG.
package chart

import (
	"fmt"
	"image/color"
	"io"
	"math"
	"path/filepath"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/internal/quantile"
)

// Colours that people with any colour vision tell apart, from Okabe and Ito, "Color
// Universal Design" (2008).
var (
	blue   = color.RGBA{0x00, 0x72, 0xb2, 0xff}
	orange = color.RGBA{0xd5, 0x5e, 0x00, 0xff}
	grey   = color.RGBA{0x88, 0x88, 0x88, 0xff}
)

// A Chart is a picture of one size.
type Chart struct {
	plot          *plot.Plot
	title         string
	legend        legend
	width, height vg.Length
}

// edge is around a chart.
const edge = vg.Length(10)

// Formats are those of files that a Chart can be written to, by their extensions.
var Formats = []string{".svg", ".png"}

// Format returns that of a file's name, or an error that says which there are.
func Format(name string) (string, error) {
	f := strings.ToLower(filepath.Ext(name))
	if !slices.Contains(Formats, f) {
		return "", fmt.Errorf("%s: want a name that ends with %s", name, strings.Join(Formats, " or "))
	}
	return f, nil
}

// Write writes the chart in one of Formats.
func (c *Chart) Write(w io.Writer, format string) error {
	var canvas interface {
		vg.CanvasSizer
		io.WriterTo
	}
	switch format {
	case ".svg":
		canvas = vgsvg.New(c.width, c.height)
	case ".png":
		canvas = vgimg.PngCanvas{Canvas: vgimg.NewWith(vgimg.UseWH(c.width, c.height), vgimg.UseDPI(144))}
	default:
		return fmt.Errorf("chart: no format %q", format)
	}
	all := draw.New(canvas)
	all.SetColor(color.White)
	all.Fill(all.Path())
	all = draw.Crop(all, edge, -edge, edge, -edge)
	style := c.plot.Title.TextStyle
	all.FillText(style, vg.Point{X: all.Center().X, Y: all.Max.Y}, c.title)
	all.Max.Y -= style.Height(c.title) + 10
	c.plot.Draw(c.legend.draw(all))
	_, err := canvas.WriteTo(w)
	return err
}

func newPlot() *plot.Plot {
	p := plot.New()
	sans := func(s *font.Font, size vg.Length) { s.Variant, s.Size = "Sans", size }
	sans(&p.Title.TextStyle.Font, 13)
	sans(&p.Legend.TextStyle.Font, 10)
	for _, a := range []*plot.Axis{&p.X, &p.Y} {
		sans(&a.Label.TextStyle.Font, 11)
		sans(&a.Tick.Label.Font, 10)
	}
	return p
}

// maxChanges bounds the height of a chart, to what a screen or a page has room for.
const maxChanges = 60

// Changes draws the changes of a comparison that are beyond the noise as dots with their
// intervals, in percent: what has got worse in orange, better in blue, the largest on top.
// Those from 0, which have no percent, are left out. The few that are much larger than
// the others are at the edge, as arrows, with their figures.
func Changes(c *bench.Comparison) (*Chart, error) {
	changed := c.Largest(bench.Worse, bench.Better)
	changes := slices.DeleteFunc(slices.Clone(changed), func(ch bench.Change) bool { return ch.Relative == nil })
	changes = changes[:min(len(changes), maxChanges)]
	n := len(changes)
	title := differing(c.After.Name, c.Before.Name) + "\n" + c.Summary()
	if left := len(changed) - n; left > 0 {
		title += fmt.Sprintf("; the %d largest are drawn, %d are left out", n, left)
	}
	p := newPlot()
	p.X.Label.Text = "change in %, with its 95 % interval: blue is better, orange worse"
	p.Add(plotter.NewGrid())
	edge := reach(changes)
	clip := func(x float64) float64 { return max(-edge, min(edge, x)) }
	names := make([]string, n)
	for i, ch := range changes {
		y := float64(n - 1 - i) // the first on top
		x, name := 100**ch.Relative, ch.Name
		dot := blue
		if ch.Verdict == bench.Worse {
			dot = orange
		}
		line, err := plotter.NewLine(plotter.XYs{{X: clip(100 * ch.RelativeCI[0]), Y: y}, {X: clip(100 * ch.RelativeCI[1]), Y: y}})
		if err != nil {
			return nil, fmt.Errorf("row %s: %w", ch.Name, err)
		}
		line.Color, line.Width = dot, 2
		at, err := plotter.NewScatter(plotter.XYs{{X: clip(x), Y: y}})
		if err != nil {
			return nil, fmt.Errorf("row %s: %w", ch.Name, err)
		}
		at.Color, at.Shape, at.Radius = dot, draw.CircleGlyph{}, 4
		if clip(x) != x {
			at.Shape, at.Radius = arrow{right: x > 0}, 6
			name += fmt.Sprintf(" (%+.0f %%)", x)
		}
		names[n-1-i] = name
		p.Add(line, at)
	}
	if n > 0 {
		p.NominalY(names...)
	} else {
		p.HideY()
	}
	p.X.Tick.Marker = linear{}
	p.X.Min, p.X.Max = -1.05*edge, 1.05*edge
	p.Y.Min, p.Y.Max = -0.5, math.Max(1, float64(n))-0.5
	zero, err := plotter.NewLine(plotter.XYs{{X: 0, Y: p.Y.Min}, {X: 0, Y: p.Y.Max}})
	if err != nil {
		return nil, err
	}
	p.Add(zero)
	return &Chart{plot: p, title: title, width: 900, height: vg.Length(110 + 18*n)}, nil
}

// reach returns how far the axis of changes goes, in percent: to the farthest end of an
// interval, but not to those that would press the others together.
func reach(changes []bench.Change) float64 {
	const far = 4 // times the middle one
	var ends []float64
	for _, ch := range changes {
		ends = append(ends, 100*math.Max(math.Abs(ch.RelativeCI[0]), math.Abs(ch.RelativeCI[1])))
	}
	if len(ends) == 0 {
		return 1
	}
	return math.Max(1, math.Min(slices.Max(ends), far*quantile.Median(ends)))
}

// An arrow stands for a dot that is beyond the edge.
type arrow struct{ right bool }

// DrawGlyph draws it.
func (a arrow) DrawGlyph(c *draw.Canvas, sty draw.GlyphStyle, pt vg.Point) {
	tip, back := sty.Radius, -sty.Radius/2
	if !a.right {
		tip, back = -tip, -back
	}
	var p vg.Path
	p.Move(vg.Point{X: pt.X + tip, Y: pt.Y})
	p.Line(vg.Point{X: pt.X + back, Y: pt.Y + sty.Radius})
	p.Line(vg.Point{X: pt.X + back, Y: pt.Y - sty.Radius})
	p.Close()
	c.SetColor(sty.Color)
	c.Fill(p)
}

// differing says what is compared with what: the parts of the paths that are not the same.
func differing(after, before string) string {
	a, b := strings.Split(filepath.Clean(after), "/"), strings.Split(filepath.Clean(before), "/")
	for len(a) > 1 && len(b) > 1 && a[len(a)-1] == b[len(b)-1] {
		a, b = a[:len(a)-1], b[:len(b)-1]
	}
	for len(a) > 1 && len(b) > 1 && a[0] == b[0] {
		a, b = a[1:], b[1:]
	}
	return fmt.Sprintf("%s, compared with %s", strings.Join(a, "/"), strings.Join(b, "/"))
}
