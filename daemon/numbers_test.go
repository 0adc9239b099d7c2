// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/xspin/xspin/control"
)

func TestNumbersAreDealtInOrder(t *testing.T) {
	one := func(name string, first, count int, numbers ...int) numbered {
		return numbered{name: name, iface: "e", first: first, count: count, numbers: numbers}
	}
	elsewhere := one("z", 0, 2)
	elsewhere.iface = "f"
	for _, tc := range []struct {
		name string
		all  []numbered
		want string // or a part of the error
	}{
		{"nobody", nil, "map[]"},
		{"in their order", []numbered{one("b", 0, 2), one("a", 0, 1), elsewhere}, "map[a:[2] b:[0 1] z:[0 1]]"},
		{"around those that are asked for", []numbered{one("a", 0, 2), one("b", 1, 2), one("c", 0, 1)}, "map[a:[0 3] b:[1 2] c:[4]]"},
		{"without rulesets", []numbered{one("a", 0, 0), one("b", 0, 1)}, "map[a:[] b:[0]]"},
		{"behind those that are there", []numbered{one("a", 0, 1, 3), one("b", 200, 1, 200), one("c", 0, 1)}, "map[a:[3] b:[200] c:[4]]"},
		{"the last", []numbered{one("a", 0, 256)}, " 255]]"},
		{"one too many", []numbered{one("a", 0, 256), one("b", 0, 1)}, `context "b": matching table is full: there are 256 numbers for rulesets of interface e`},
		{"taken", []numbered{one("a", 3, 2), one("b", 4, 1)}, `context "b": ruleset number 4 is taken by context "a"`},
	} {
		dealt, err := deal(tc.all)
		got := fmt.Sprint(dealt)
		if err != nil {
			got = err.Error()
		}
		if !strings.HasSuffix(got, tc.want) {
			t.Errorf("%s: %s, want %s", tc.name, got, tc.want)
		}
	}
}

// catches is a context that takes datagrams to a port, 0 for all.
func catches(name string, port int, more string) string {
	rule := fmt.Sprintf("udp(%d)", port)
	if port == 0 {
		rule = "udp"
	}
	return fmt.Sprintf("- {name: %s, handler: test-init, rulesets: 'r: %s', %s}\n", name, rule, more)
}

// takes checks who gets a datagram.
func (f *fixture) takes(t *testing.T, port int, who string) {
	t.Helper()
	before := map[string]uint64{}
	for _, i := range f.infos() {
		before[i.Name] = i.HandlerStats.Handled
	}
	f.datagram(t, port)
	var got string
	eventually(t, fmt.Sprintf("somebody gets the datagram to port %d", port), func() bool {
		for _, i := range f.infos() {
			if i.HandlerStats.Handled > before[i.Name] {
				got = i.Name
				return true
			}
		}
		return false
	})
	if got != who {
		t.Errorf("a datagram to port %d goes to %s, want %s", port, got, who)
	}
}

// numbersOf returns the numbers of contexts that are active.
func (f *fixture) numbersOf() map[string]int {
	all := map[string]int{}
	for _, i := range f.infos() {
		if i.Rules[0].Number >= 0 {
			all[i.Name] = i.Rules[0].Number
		}
	}
	return all
}

func (f *fixture) numbered(t *testing.T, want map[string]int) {
	t.Helper()
	if got := f.numbersOf(); !reflect.DeepEqual(got, want) {
		t.Errorf("numbers %v, want %v", got, want)
	}
}

// Which context gets a packet that several rulesets match is a matter of the
// configuration, and not of which was armed first.
func TestTheFilesOrderSaysWhoGetsAPacket(t *testing.T) {
	special, rest := catches("special", 5000, "activate: attach"), catches("rest", 0, "activate: start")
	f := launch(t, "contexts:\n"+special+rest)
	f.takes(t, 5000, "rest")
	a := f.admitted(t, "special", root, false)
	f.takes(t, 5000, "special")
	f.takes(t, 5001, "rest")
	left(a, "done")
	f.takes(t, 5000, "rest")
	f.numbered(t, map[string]int{"rest": 1})
	must(t, f.deactivate("rest"))
	a = f.admitted(t, "special", root, false)
	must(t, f.activate("rest"))
	f.takes(t, 5000, "special")
	left(a, "done")

	// Others come last, in their order; and do not take the place of one that starts over.
	install := func(name, rule string, first int) error {
		_, err := f.install(&control.Context{Name: name, Handler: "test-init", Rulesets: rule, First: first})
		return err
	}
	must(t, install("late", "r: udp(5001)", 0))
	must(t, install("later", "r: udp(5001)", 0))
	f.takes(t, 5001, "rest")
	must(t, f.deactivate("rest"))
	f.takes(t, 5001, "late")
	must(t, f.deactivate("late"))
	f.takes(t, 5001, "later")
	must(t, f.activate("late"))
	f.takes(t, 5001, "late")
	must(t, f.activate("rest"))
	f.numbered(t, map[string]int{"rest": 1, "late": 2, "later": 3})
	// A context that asks for a number gets it, unless another has asked for the same.
	must(t, install("asks", "r: udp(5003)", 2))
	fails(t, "number 2", install("asks-too", "r: udp(5003)", 2), errBusy, `ruleset number 2 is taken by context "asks"`)
	f.numbered(t, map[string]int{"rest": 1, "asks": 2, "late": 3, "later": 4})
	must(t, f.remove("asks"))

	// A reload numbers all again, contexts that do not change as well, at once.
	since := func() (all []string) {
		for _, i := range f.infos() {
			all = append(all, fmt.Sprint(i.Name, i.ID, i.Since))
		}
		return all
	}
	was := since()
	f.reloaded(t, "contexts:\n"+rest+special, "other ruleset numbers: late, later, rest, special")
	a = f.admitted(t, "special", root, false)
	f.takes(t, 5000, "rest")
	f.numbered(t, map[string]int{"rest": 0, "special": 1, "late": 2, "later": 3})
	f.reloaded(t, "contexts:\n"+special+rest, "other ruleset numbers: rest, special") // while it is attached
	f.takes(t, 5000, "special")
	left(a, "done")
	f.reloaded(t, "contexts:\n"+catches("one", 5002, "activate: start")+special+catches("two", 5000, "activate: start")+rest,
		"context one added", "context two added", "other ruleset numbers: late, later, rest, special")
	f.numbered(t, map[string]int{"one": 0, "two": 2, "rest": 3, "late": 4, "later": 5})
	f.takes(t, 5000, "two")
	a = f.admitted(t, "special", root, false)
	f.takes(t, 5000, "special")
	// What cannot be leaves the numbers as they were.
	f.write(t, "contexts:\n"+rest+special+"- {name: bad, handler: test-init, params: {fail: true}, rulesets: 'x: udp(99)'}\n")
	_, err := f.Reload()
	fails(t, "reload", err, errBusy, "not today")
	f.numbered(t, map[string]int{"one": 0, "special": 1, "two": 2, "rest": 3, "late": 4, "later": 5})
	f.takes(t, 5000, "special")
	left(a, "done")
	f.reloaded(t, "contexts:\n"+special+rest, "context one removed", "context two removed", "other ruleset numbers: late, later, rest, special")
	now := since()
	// Attaching has started special over; the others are as they were.
	for i := range was {
		if !strings.HasPrefix(was[i], "special") && was[i] != now[i] {
			t.Errorf("now %s, before %s", now[i], was[i])
		}
	}

	// When none is free behind the others, gaps are closed.
	var many []string
	for i := range 250 {
		many = append(many, fmt.Sprintf("r%d: tcp(%d)", i, 1000+i))
	}
	must(t, f.remove("late"))
	must(t, install("many", strings.Join(many, "\n"), 0))
	must(t, install("last", "r: udp(5003)", 0))
	f.numbered(t, map[string]int{"rest": 1, "later": 3, "many": 4, "last": 254})
	must(t, install("fits", "r: udp(5003)", 0))
	must(t, install("closes", "r: udp(5003)", 0))
	f.numbered(t, map[string]int{"rest": 1, "later": 2, "many": 3, "last": 253, "fits": 254, "closes": 255})
	fails(t, "one more", install("none", "r: udp(5003)", 0), errBusy, `context "none": matching table is full`)
	f.takes(t, 5001, "rest")
}

func TestShadowsAreTold(t *testing.T) {
	text := `contexts:
- {name: a, handler: echo-udp, params: {port: 7}}
- {name: b, handler: echo-udp, params: {port: 8}}
- {name: c, handler: count, rulesets: "mine: udp(7)"}
`
	want := `contexts[2]: ruleset mine is shadowed by the same one of context "a": it gets packets only while that is not active`
	cfg, bad := load(t, eth+text)
	if bad != "" {
		t.Fatal(bad)
	}
	if got := cfg.Warnings(); len(got) != 1 || got[0] != want {
		t.Errorf("got %q", got)
	}
	cfg.Contexts[0].First = 9 // behind the others
	if got := cfg.Warnings(); len(got) != 1 || !strings.Contains(got[0], `contexts[0]: ruleset udp-7 is shadowed by the same one of context "c"`) {
		t.Errorf("with the number 9: %q", got)
	}
	f := launch(t, text)
	i, err := f.install(&control.Context{Name: "late", Handler: "echo-udp", Params: map[string]any{"port": 8}})
	must(t, err)
	if want := `context "late": ruleset udp-8 is shadowed by the same one of context "b": it gets packets only while that is not active`; len(i.Warnings) != 1 || i.Warnings[0] != want {
		t.Errorf("warnings %q, want %q", i.Warnings, want)
	}
	for _, want := range []string{"contexts[2]: ruleset mine is shadowed", `shadowed by the same one of context \"b\"`, "context=late"} {
		if !strings.Contains(f.logs.String(), want) {
			t.Errorf("the log does not say %s", want)
		}
	}
}
