// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
)

func TestNumbersSayWhichOfTwoRulesetsMatches(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 1})
	install := func(name string, numbers []int, rules ...matcher.Ruleset) *nic.Context {
		t.Helper()
		c, err := n.Install(nic.ContextSpec{Name: name, Rulesets: rules, Numbers: numbers, Handlers: handle(echo)})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	special := install("special", []int{3}, matcher.UDPPort(7))
	rest := install("rest", []int{9, 4}, matcher.UDPPort(8), matcher.UDP())
	activate := func(all ...*nic.Context) {
		t.Helper()
		for _, c := range all {
			if err := n.Activate(c); err != nil {
				t.Fatal(err)
			}
		}
	}
	activate(rest, special)
	handled := func(c *nic.Context) uint64 { return c.Stats().Handled }
	takes := func(who *nic.Context, port uint16) {
		t.Helper()
		before := handled(who)
		roundTrip(t, dialUDP(t, lab, port), []byte("hello"))
		eventually(t, fmt.Sprintf("%s handles port %d", who.Name(), port), func() bool { return handled(who) == before+1 })
	}
	takes(special, 7)
	takes(rest, 8)
	// They change places, in one step; what was counted stays.
	if err := n.Renumber(map[*nic.Context][]int{special: {4}, rest: {9, 3}}); err != nil {
		t.Fatal(err)
	}
	takes(rest, 7)
	takes(rest, 7)
	s, err := n.Stats()
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range [][][2]uint64{{{4, 1}}, {{9, 0}, {3, 3}}} {
		for k, r := range s.Contexts[i].Rulesets {
			if uint64(r.Number) != want[k][0] || r.Matched != want[k][1] {
				t.Errorf("context %s, ruleset %d: number %d has matched %d packets, want %d and %d", s.Contexts[i].Name, k, r.Number, r.Matched, want[k][0], want[k][1])
			}
		}
	}
	// Numbers are kept while a context is not active, and can be changed then.
	if err := n.Deactivate(special); err != nil {
		t.Fatal(err)
	}
	if err := n.Renumber(map[*nic.Context][]int{special: {2}}); err != nil {
		t.Fatal(err)
	}
	activate(special)
	takes(special, 7)

	numbers := func() string { return fmt.Sprint(special.Rulesets(), rest.Rulesets()) }
	was := numbers()
	for _, tc := range []struct {
		name    string
		numbers map[*nic.Context][]int
		want    []string
	}{
		{"too few", map[*nic.Context][]int{rest: {9}}, []string{`context "rest"`, "1 numbers for 2 rulesets"}},
		{"twice", map[*nic.Context][]int{rest: {9, 9}}, []string{"ruleset number 9 appears twice"}},
		{"too high", map[*nic.Context][]int{rest: {9, 256}}, []string{"ruleset number 256: want 0 to 255"}},
		{"somebody else's", map[*nic.Context][]int{rest: {9, 2}}, []string{`ruleset number 2 is wanted for context "rest", and taken by context "special"`}},
		{"the same for two", map[*nic.Context][]int{rest: {9, 5}, special: {5}}, []string{"ruleset number 5 is wanted for context"}},
	} {
		refused(t, n.Renumber(tc.numbers), tc.want...)
		if got := numbers(); got != was {
			t.Errorf("%s: numbers are %s, were %s", tc.name, got, was)
		}
	}
	takes(special, 7)
	takes(rest, 8)
	_, err = n.Install(nic.ContextSpec{Name: "both", Rulesets: sets(matcher.UDP()), First: 3, Numbers: []int{5}, Handlers: handle(echo)})
	refused(t, err, "want only one")
	clash := install("clash", []int{9}, matcher.UDPPort(9))
	refused(t, n.Activate(clash), "ruleset number 9 is taken", `"rest"`)
	if !slices.Equal(rest.Rulesets(), []int{9, 3}) {
		t.Errorf("numbers %v", rest.Rulesets())
	}
}
