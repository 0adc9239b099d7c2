// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// An entry of a legend: how a series is drawn, and its name.
type entry struct {
	name   string
	thumbs []plot.Thumbnailer
}

// A legend stands above the data and not in them. Its entries are in rows.
type legend struct {
	style   text.Style
	entries []entry
}

const (
	legendLine  = vg.Length(15) // of a row
	legendThumb = vg.Length(20)
	legendSpace = vg.Length(14) // between entries
)

func (l *legend) add(name string, thumbs ...plot.Thumbnailer) {
	l.entries = append(l.entries, entry{name, thumbs})
}

// width has some room to spare: whoever shows an SVG may have another font.
func (l *legend) width(e entry) vg.Length { return legendThumb + 5 + 1.15*l.style.Width(e.name) }

// rows breaks the entries into rows that are no wider.
func (l *legend) rows(wide vg.Length) (rows [][]entry) {
	var used vg.Length
	for _, e := range l.entries {
		w := l.width(e)
		if len(rows) == 0 || used+legendSpace+w > wide {
			rows, used = append(rows, nil), 0
		} else {
			used += legendSpace
		}
		rows[len(rows)-1] = append(rows[len(rows)-1], e)
		used += w
	}
	return rows
}

// draw draws it at the top of c, each row in the middle, and returns what is left below.
func (l *legend) draw(c draw.Canvas) draw.Canvas {
	for _, row := range l.rows(c.Size().X) {
		wide := legendSpace * vg.Length(len(row)-1)
		for _, e := range row {
			wide += l.width(e)
		}
		x := c.Min.X + max(0, (c.Size().X-wide)/2)
		for _, e := range row {
			icon := draw.Canvas{Canvas: c.Canvas, Rectangle: vg.Rectangle{
				Min: vg.Point{X: x, Y: c.Max.Y - legendLine + 3}, Max: vg.Point{X: x + legendThumb, Y: c.Max.Y - 3},
			}}
			for _, t := range e.thumbs {
				t.Thumbnail(&icon)
			}
			c.FillText(l.style, vg.Point{X: x + legendThumb + 5, Y: c.Max.Y - legendLine + 4}, e.name)
			x += l.width(e) + legendSpace
		}
		c.Max.Y -= legendLine
	}
	return c
}
