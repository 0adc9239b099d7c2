// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"image/png"
	"io"
	"strings"
	"testing"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/internal/quantile"
)

func change(name, verdict string, relative, low, high float64) bench.Change {
	return bench.Change{Name: name, Verdict: verdict, Relative: &relative, RelativeCI: &quantile.Interval{low, high}}
}

func comparison() *bench.Comparison {
	return &bench.Comparison{
		Before: bench.Measured{Name: "old.json"}, After: bench.Measured{Name: "dir/new.json"},
		Changes: []bench.Change{
			change("rx/first", bench.Better, 0.2, 0.1, 0.3),
			change("rx/second", bench.Worse, -0.2, -0.3, -0.1),
			change("rx/third", bench.Noise, 0, 0, 0),
			{Name: "rx/from_zero", After: 1, Verdict: bench.Worse},
		},
	}
}

func TestChangesAreDrawn(t *testing.T) {
	c, err := Changes(comparison())
	if err != nil {
		t.Fatal(err)
	}
	var svg bytes.Buffer
	if err := c.Write(&svg, ".svg"); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"rx/first", "rx/second", "dir/new.json, compared with old.json", "2 worse, 1 better, 1 within noise, 0 too few runs; the 2 largest are drawn, 1 are left out", "#0072B2", "#D55E00"} {
		if !strings.Contains(svg.String(), want) {
			t.Errorf("the SVG has no %s", want)
		}
	}
	if strings.Contains(svg.String(), "rx/third") || strings.Contains(svg.String(), "rx/from_zero") {
		t.Error("what is within noise is drawn, or a change from 0")
	}
	d := xml.NewDecoder(&svg)
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	var b bytes.Buffer
	if err := c.Write(&b, ".png"); err != nil {
		t.Fatal(err)
	}
	if img, err := png.Decode(&b); err != nil || img.Bounds().Dx() != 1800 {
		t.Errorf("PNG %v, error %v", img.Bounds(), err)
	}
	if err := c.Write(io.Discard, ".pdf"); err == nil {
		t.Error("a PDF was written")
	}
	none, err := Changes(new(bench.Comparison)) // that nothing has changed is no mistake
	if err != nil {
		t.Fatal(err)
	}
	svg.Reset()
	if err := none.Write(&svg, ".svg"); err != nil || !strings.Contains(svg.String(), "0 worse, 0 better") {
		t.Errorf("of no changes: %s, error %v", svg.String(), err)
	}
}

// Two full runs of different releases have hundreds of changes, and some are hundreds of
// percent: the picture stays one that people look at.
func TestManyChangesAreLimitedAndOutliersAtTheEdge(t *testing.T) {
	c := comparison()
	c.Changes = []bench.Change{change("rx/huge", bench.Worse, 50, 40, 60), change("rx/gone", bench.Better, -1, -1, -1)}
	for i := range 200 {
		x := 0.01 + float64(i)/1000
		c.Changes = append(c.Changes, change(fmt.Sprintf("rx/row%03d", i), bench.Worse, x, x-0.001, x+0.001))
	}
	pic, err := Changes(c)
	if err != nil {
		t.Fatal(err)
	}
	if pic.height > 1300 || pic.plot.X.Max > 100 {
		t.Errorf("height %v, axis to %g", pic.height, pic.plot.X.Max)
	}
	var svg bytes.Buffer
	if err := pic.Write(&svg, ".svg"); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"rx/huge (+5000 %)", "rx/gone (-100 %)", "rx/row199<", "the 60 largest are drawn, 142 are left out"} {
		if !strings.Contains(svg.String(), want) {
			t.Errorf("the SVG has no %s", want)
		}
	}
	if strings.Contains(svg.String(), "rx/row100") {
		t.Error("one of the smaller changes is drawn")
	}
}

func TestTitlesNameWhatDiffers(t *testing.T) {
	for _, tc := range [][3]string{
		{"new/results.json", "old/results.json", "new, compared with old"},
		{"/srv/a/new/results.json", "/srv/a/old/results.json", "new, compared with old"},
		{"/srv/a/results.json", "/srv/b/old/results.json", "a, compared with b/old"},
		{"after.json", "before.json", "after.json, compared with before.json"},
		{"x/results.json", "results.json", "x/results.json, compared with results.json"},
		{"x/../a/results.json", "a/results.json", "a, compared with a"},
	} {
		if got := differing(tc[0], tc[1]); got != tc[2] {
			t.Errorf("%s and %s: %s, want %s", tc[0], tc[1], got, tc[2])
		}
	}
}

func TestFormats(t *testing.T) {
	for name, want := range map[string]string{"a.svg": ".svg", "b/a.PNG": ".png"} {
		if f, err := Format(name); f != want || err != nil {
			t.Errorf("%s: %q, error %v", name, f, err)
		}
	}
	for _, name := range []string{"a", "a.pdf", ".png/a"} {
		if _, err := Format(name); err == nil || !strings.Contains(err.Error(), "want a name that ends with .svg or .png") {
			t.Errorf("%s: error %v", name, err)
		}
	}
}
