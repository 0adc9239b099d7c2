// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"encoding/json"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// A dashboard is as much of Grafana's as must be right.
type dashboard struct {
	Templating struct {
		List []struct{ Type, Name, Definition string }
	}
	Panels []struct {
		ID          int
		Type, Title string
		GridPos     struct{ X, Y, W, H int }
		Targets     []struct{ Expr, LegendFormat string }
	}
}

// Each expression of the dashboard is about what the daemon exports: names, labels and
// their values are there, and rates are of what grows.
func TestDashboard(t *testing.T) {
	text, err := os.ReadFile("../dist/grafana.json")
	if err != nil {
		t.Fatal(err)
	}
	var d dashboard
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	check := newExported(t)
	variables := []string{"__rate_interval"}
	for _, v := range d.Templating.List {
		variables = append(variables, v.Name)
		if v.Type == "query" {
			check(t, v.Name, strings.TrimSuffix(strings.TrimPrefix(v.Definition, "label_values("), ")"), "", variables)
		}
	}
	ids := map[int]bool{}
	taken := map[[2]int]string{}
	used := ""
	for _, p := range d.Panels {
		if ids[p.ID] {
			t.Errorf("%s: another panel has number %d", p.Title, p.ID)
		}
		ids[p.ID] = true
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				at := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
				if other := taken[at]; other != "" || at[0] >= 24 {
					t.Fatalf("%s: not on the grid, or over %q", p.Title, other)
				}
				taken[at] = p.Title
			}
		}
		if (p.Type == "row") != (len(p.Targets) == 0) {
			t.Errorf("%s: a %s with %d expressions", p.Title, p.Type, len(p.Targets))
		}
		for _, target := range p.Targets {
			check(t, p.Title, target.Expr, target.LegendFormat, variables)
			used += target.Expr
		}
	}
	// The ones that somebody who is called at night wants.
	for _, name := range []string{"xspin_frames_total", "xspin_hpu_busy_seconds_total", "xspin_context_handler_duration_seconds_bucket", "xspin_context_messages_open", "xspin_context_packets_dropped_total", "xspin_link_up", "xspin_handlers_stuck"} {
		if !strings.Contains(used, name+"{") {
			t.Errorf("nothing shows %s", name)
		}
	}
	// It sees what is wrong.
	for _, wrong := range []string{
		`rate(xspin_frames_totals{interface=~"$interface"}[$__rate_interval])`, // a name
		`xspin_frames_total{interface=~"$interface"}`,                          // no rate
		`rate(xspin_link_up{interface=~"$interface"}[$__rate_interval])`,       // of a gauge
		`xspin_link_up{context="a"}`, `sum by (hpu) (xspin_link_up{})`,
		`rate(xspin_frames_total{verdict="dropped"}[$__rate_interval])`, `xspin_link_up{interface="$nic"}`, `sum(xspin_link_up{}`, `1`,
	} {
		var quiet probe
		if check(&quiet, "wrong", wrong, "", variables); quiet == 0 {
			t.Errorf("%s is taken for right", wrong)
		}
	}
}

// A probe counts errors.
type probe int

func (p *probe) Errorf(string, ...any) { *p++ }

type errorer interface{ Errorf(string, ...any) }

// newExported returns what checks an expression, and its legend, against what is exported.
func newExported(t *testing.T) func(t errorer, where, expr, legend string, variables []string) {
	t.Helper()
	families, err := metricsRegistry(someSource()).Gather()
	if err != nil {
		t.Fatal(err)
	}
	// What there is by name: values of labels, and whether it grows.
	type metric struct {
		values map[string][]string
		grows  bool
	}
	exported := map[string]metric{}
	for _, f := range families {
		values := map[string][]string{"job": nil, "instance": nil} // Prometheus adds these
		for _, x := range f.GetMetric() {
			for _, l := range x.GetLabel() {
				values[l.GetName()] = append(values[l.GetName()], l.GetValue())
			}
		}
		switch f.GetType().String() {
		case "HISTOGRAM":
			exported[f.GetName()+"_sum"], exported[f.GetName()+"_count"] = metric{values, true}, metric{values, true}
			values = maps.Clone(values)
			values["le"] = nil
			exported[f.GetName()+"_bucket"] = metric{values, true}
		default:
			exported[f.GetName()] = metric{values, f.GetType().String() == "COUNTER"}
		}
	}
	var (
		selector = regexp.MustCompile(`(rate\()?\b((?:xspin|go|process)_[a-z0-9_]+)(?:\{([^}]*)\})?`)
		matcher  = regexp.MustCompile(`([a-z]+)=~?"([^"]*)"`)
		grouping = regexp.MustCompile(`by \(([^)]*)\)|, ([a-z]+)$`)
		mention  = regexp.MustCompile(`\{\{([a-z]+)\}\}`)
		variable = regexp.MustCompile(`\$([a-z_]+)`)
	)
	return func(t errorer, where, expr, legend string, variables []string) {
		if strings.Count(expr, "(") != strings.Count(expr, ")") || strings.Count(expr, "{") != strings.Count(expr, "}") {
			t.Errorf("%s: %s: parentheses", where, expr)
		}
		for _, v := range variable.FindAllStringSubmatch(expr, -1) {
			if !slices.Contains(variables, v[1]) {
				t.Errorf("%s: %s: no variable %s", where, expr, v[1])
			}
		}
		all := selector.FindAllStringSubmatch(expr, -1)
		if len(all) == 0 {
			t.Errorf("%s: %s: names no metric", where, expr)
		}
		for _, m := range all {
			is, ok := exported[m[2]]
			if !ok {
				t.Errorf("%s: %s: the daemon exports no %s", where, expr, m[2])
				continue
			}
			if is.grows != (m[1] != "") {
				t.Errorf("%s: %s: rate is for what grows, and only for that: %s", where, expr, m[2])
			}
			for _, l := range matcher.FindAllStringSubmatch(m[3], -1) {
				have, ok := is.values[l[1]]
				if !ok {
					t.Errorf("%s: %s: %s has no label %s", where, expr, m[2], l[1])
				}
				for v := range strings.SplitSeq(l[2], "|") {
					if !strings.HasPrefix(v, "$") && !slices.Contains(have, v) {
						t.Errorf("%s: %s: label %s of %s is never %q", where, expr, l[1], m[2], v)
					}
				}
			}
			var names []string
			for _, g := range grouping.FindAllStringSubmatch(expr, -1) {
				names = append(names, strings.Split(g[1]+g[2], ", ")...)
			}
			for _, g := range mention.FindAllStringSubmatch(legend, -1) {
				names = append(names, g[1])
				if by := grouping.FindStringSubmatch(expr); by != nil && !slices.Contains(strings.Split(by[1], ", "), g[1]) {
					t.Errorf("%s: %s: label %s is not there any more for the legend", where, expr, g[1])
				}
			}
			for _, name := range names {
				if _, ok := is.values[name]; !ok {
					t.Errorf("%s: %s: %s has no label %s", where, expr, m[2], name)
				}
			}
		}
	}
}
