// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"math"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"

	"github.com/xspin/xspin/eval/report"
)

// nice are the digits of ticks.
var nice = []float64{1, 2, 5}

// linear has some five ticks, at 1, 2 or 5 times a power of ten.
type linear struct{}

func (linear) Ticks(low, high float64) (ticks []plot.Tick) {
	const many = 6
	rough := (high - low) / many
	power := math.Pow(10, math.Floor(math.Log10(rough)))
	step := 10 * power
	for _, d := range nice {
		if d*power >= rough {
			step = d * power
			break
		}
	}
	for i := math.Ceil(low/step - 1e-9); i*step <= high*(1+1e-9); i++ {
		x := i*step + 0 // and not -0
		ticks = append(ticks, plot.Tick{Value: x, Label: number(x)})
	}
	return ticks
}

// logarithmic has a label at each power of ten, and at 2 and 5 times one too if there is room.
type logarithmic struct{}

func (logarithmic) Ticks(low, high float64) (ticks []plot.Tick) {
	const slack = 1 + 1e-9
	few := math.Log10(high/low) < 2.5
	for k := int(math.Floor(math.Log10(low))); math.Pow10(k) <= high*slack; k++ {
		for i := 1.0; i < 10; i++ {
			x := i * math.Pow10(k)
			if x < low/slack || x > high*slack {
				continue
			}
			t := plot.Tick{Value: x}
			if i == 1 || few && (i == 2 || i == 5) {
				t.Label = number(x)
			}
			ticks = append(ticks, t)
		}
	}
	return ticks
}

// around returns the nearest ticks of a logarithmic axis below and above, or at them.
func around(low, high float64) (from, to float64) {
	const slack = 1 + 1e-9
	from, to = math.Pow(10, math.Floor(math.Log10(low))), math.Pow(10, math.Ceil(math.Log10(high)))
	for _, d := range nice {
		if x := d * math.Pow(10, math.Floor(math.Log10(low))); x <= low*slack {
			from = x
		}
	}
	for _, d := range []float64{5, 2, 1} {
		if x := d * math.Pow(10, math.Floor(math.Log10(high))); x >= high/slack {
			to = x
		}
	}
	if from == to {
		from, to = from/2, to*2
	}
	return from, to
}

// at returns ticks at places of the x axis. Labels that have no room beside the one before
// are left out.
func at(a *plot.Axis, xs []float64, unit string) (ticks plot.ConstantTicks) {
	const letter = 0.012 // of the axis
	scale, end := plot.Normalizer(plot.LinearScale{}), -1.0
	if a.Scale != nil {
		scale = a.Scale
	}
	for _, x := range xs {
		label := short(x, unit)
		place, half := scale.Normalize(a.Min, a.Max, x), letter*float64(len(label)+1)/2
		if place-half < end {
			label = ""
		} else {
			end = place + half
		}
		ticks = append(ticks, plot.Tick{Value: x, Label: label})
	}
	return ticks
}

// short prints what stands at a place: 64Ki rather than 65536, if they are bytes.
func short(x float64, unit string) string {
	if strings.HasPrefix(unit, "bytes") {
		for i, prefix := range []string{"Gi", "Mi", "Ki"} {
			if u := math.Pow(2, float64(30-10*i)); x >= u && math.Mod(x, u) == 0 {
				return strconv.FormatFloat(x/u, 'f', -1, 64) + prefix
			}
		}
	}
	return number(x)
}

// number prints a round one as people write it: 2500, 10,000, 2 M.
func number(x float64) string {
	a := math.Abs(x)
	for _, u := range []struct {
		of   float64
		name string
	}{{1e12, "T"}, {1e9, "G"}, {1e6, "M"}} {
		if a >= u.of {
			return strconv.FormatFloat(x/u.of, 'g', 4, 64) + " " + u.name
		}
	}
	if a >= 1e4 && x == math.Trunc(x) {
		s := strconv.FormatFloat(x, 'f', 0, 64)
		return s[:len(s)-3] + "," + s[len(s)-3:]
	}
	// Six digits hide what is wrong about 3 * 0.1.
	short, err := strconv.ParseFloat(strconv.FormatFloat(x, 'g', 6, 64), 64)
	if err != nil {
		short = x
	}
	return strconv.FormatFloat(short, 'f', -1, 64)
}

// fit sets the scales, limits and ticks of a plot's axes. A y axis that is not of logarithms
// begins at 0, so that lengths compare.
func fit(pic *plot.Plot, p *report.Plot, xs []float64) {
	switch {
	case len(p.X.Names) > 0:
		places(pic, p.X.Names)
		pic.X.Min, pic.X.Max = -0.5, float64(len(p.X.Names))-0.5
	case p.X.Log:
		pic.X.Scale = plot.LogScale{}
		pic.X.Min, pic.X.Max = pic.X.Min/1.1, pic.X.Max*1.1
		for _, m := range p.Marks {
			if m.X == math.Trunc(m.X) {
				xs = append(xs, m.X)
			}
		}
		slices.Sort(xs)
		pic.X.Tick.Marker = at(&pic.X, slices.Compact(xs), p.X.Unit)
	case len(xs) <= 8:
		pic.X.Tick.Marker = at(&pic.X, xs, p.X.Unit)
	default:
		pic.X.Tick.Marker = linear{}
	}
	if p.Y.Log {
		pic.Y.Scale, pic.Y.Tick.Marker = plot.LogScale{}, logarithmic{}
		pic.Y.Min, pic.Y.Max = around(pic.Y.Min, pic.Y.Max)
		return
	}
	pic.Y.Tick.Marker = linear{}
	pic.Y.Min = min(0, pic.Y.Min)
	if pic.Y.Max *= 1.05; pic.Y.Max <= pic.Y.Min {
		pic.Y.Max = pic.Y.Min + 1
	}
}
