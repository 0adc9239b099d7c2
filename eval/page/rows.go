// SPDX-License-Identifier: Apache-2.0

package page

import (
	"slices"

	"github.com/xspin/xspin/eval/bench"
)

// Reading says how to read tables of figures.
var Reading = []string{
	"The figure of a name X_over_Y, with the unit \u201cratio\u201d, is that of X divided by that of Y. In results.json, X is side a and Y is side b.",
	"\u201cBetter\u201d says whether higher or lower figures are; nothing stands there if neither is.",
	"The interval is a 95 % interval, by a bootstrap over the runs. With 3 to 5 runs that is practically from the smallest run to the largest, which are too few for 95 %: about 75 % with 3 runs, and 94 % with 5.",
	"The runs of a report are of one process, so an interval does not tell what differs from one process to the next: match/hit256_ns was 45 ns in one and 57 ns in another, each with a narrow interval. Before you take a small difference between two reports for a change, measure one of the releases twice.",
	"Some figures have a target, which is the project's own. Met or missed: the whole interval is on that side of the target. Within noise: the target is in the interval, so this run cannot tell.",
}

// Shown is a row as people read it.
type Shown struct{ Median, Low, High, Unit, Target string }

// Show returns a row in a unit that fits its size.
func Show(r bench.Row) Shown {
	by, unit := 1.0, r.Unit
	if unit == "bytes" {
		for _, u := range []string{"KiB", "MiB", "GiB"} {
			if r.Median/by < 1024 {
				break
			}
			by, unit = by*1024, u
		}
	}
	s := Shown{bench.Figure(r.Median / by), bench.Figure(r.CI95[0] / by), bench.Figure(r.CI95[1] / by), unit, ""}
	if r.Target != nil {
		s.Target = map[bool]string{true: "\u2265 ", false: "\u2264 "}[r.Better == "higher"] + bench.Figure(*r.Target/by)
	}
	return s
}

// Notes returns why targets are missed, each reason once, and for each row the number of its
// reason, from 1; 0 is for those that are not missed.
func Notes(rows []bench.Row) (number []int, reasons []string) {
	for _, r := range rows {
		if r.Verdict != "missed" {
			number = append(number, 0)
			continue
		}
		why := Reason(r.Name)
		i := slices.Index(reasons, why)
		if i < 0 {
			i = len(reasons)
			reasons = append(reasons, why)
		}
		number = append(number, i+1)
	}
	return number, reasons
}

// Reason is why the target of a row is missed, as far as that is known: that of the longest
// beginning of its name that has one.
func Reason(row string) string {
	for n := len(row); n > 0; n-- {
		if why, ok := reasons[row[:n]]; ok {
			return why
		}
	}
	return "not looked into yet"
}
