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

// maxChanges bounds the height of a chart. All benches together have some 200 rows.
const maxChanges = 1000

// Changes draws each change of a comparison as a dot with its interval, in percent: what
// has got better in blue, worse in orange, neither in grey. Those
// from 0, which have no percent, are left out; there must be another one.
func Changes(c *bench.Comparison) (*Chart, error) {
	changes := slices.DeleteFunc(slices.Clone(c.Changes), func(ch bench.Change) bool { return ch.Relative == nil })
	n := len(changes)
	switch {
	case n == 0:
		return nil, fmt.Errorf("%s and %s have no changes in percent: there is nothing to draw", c.Before.Name, c.After.Name)
	case n > maxChanges:
		return nil, fmt.Errorf("%d changes: a chart has at most %d", n, maxChanges)
	}
	p := newPlot()
	p.X.Label.Text = "change in %, with its 95 % interval: blue is better, orange worse, grey within noise"
	p.Add(plotter.NewGrid())
	names := make([]string, n)
	for i, ch := range changes {
		y := float64(n - 1 - i) // the first on top
		names[n-1-i] = ch.Name
		dot := color.RGBA(grey)
		switch ch.Verdict {
		case bench.Better:
			dot = blue
		case bench.Worse:
			dot = orange
		}
		line, err := plotter.NewLine(plotter.XYs{{X: 100 * ch.RelativeCI[0], Y: y}, {X: 100 * ch.RelativeCI[1], Y: y}})
		if err != nil {
			return nil, fmt.Errorf("row %s: %w", ch.Name, err)
		}
		line.Color, line.Width = dot, 2
		at, err := plotter.NewScatter(plotter.XYs{{X: 100 * *ch.Relative, Y: y}})
		if err != nil {
			return nil, fmt.Errorf("row %s: %w", ch.Name, err)
		}
		at.Color, at.Shape, at.Radius = dot, draw.CircleGlyph{}, 4
		p.Add(line, at)
	}
	p.NominalY(names...)
	p.X.Min, p.X.Max = math.Min(1.05*p.X.Min, -1), math.Max(1.05*p.X.Max, 1)
	p.Y.Min, p.Y.Max = -0.5, float64(n)-0.5
	zero, err := plotter.NewLine(plotter.XYs{{X: 0, Y: p.Y.Min}, {X: 0, Y: p.Y.Max}})
	if err != nil {
		return nil, err
	}
	p.Add(zero)
	title := fmt.Sprintf("%s, compared with %s", filepath.Base(c.After.Name), filepath.Base(c.Before.Name))
	return &Chart{plot: p, title: title, width: 900, height: vg.Length(90 + 18*n)}, nil
}
