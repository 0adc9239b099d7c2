// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"bytes"
	"encoding/xml"
	"errors"
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
	for _, want := range []string{"rx/first", "rx/second", "rx/third", "new.json, compared with old.json", "#0072B2", "#D55E00", "#888888"} {
		if !strings.Contains(svg.String(), want) {
			t.Errorf("the SVG has no %s", want)
		}
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
	if _, err := Changes(new(bench.Comparison)); err == nil {
		t.Error("nothing was drawn")
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
