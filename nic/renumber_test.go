// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xspin/xspin/internal/testenv"
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

// A context in the kernel takes the place of another, and more get other numbers, in one
// step: a client in lock step notices nothing, whether it sends packets or trains. What cannot
// be changes nothing.
func TestReplace(t *testing.T) {
	t.Run("xdp", func(t *testing.T) { replaceContexts(t, nic.HookXDP, 1) })
	t.Run("tc", func(t *testing.T) { replaceContexts(t, nic.HookTC, 8) })
}

// replaceContexts has a client that sends so many datagrams at a time.
func replaceContexts(t *testing.T, hook nic.Hook, train int) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	wire(t, lab)
	n := open(t, lab, nic.Config{HPUs: 1, Hook: hook})
	install := func(name string, numbers ...int) *nic.Context {
		t.Helper()
		spec := builtin(t, "echo-udp", matcher.UDPPort(7))
		spec.Name, spec.Numbers = name, numbers
		c, err := n.Install(spec)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	spec := nic.ContextSpec{Name: "user", Rulesets: sets(matcher.UDPPort(8)), Numbers: []int{9}, Handlers: handle(echo)}
	if hook == nic.HookTC { // HPUs need the program at xdp, before which trains are cut
		spec = builtin(t, "echo-udp", matcher.UDPPort(8))
		spec.Name, spec.Numbers = "user", []int{9}
	}
	user := run(t, n, spec)
	now := install("round 0", 4)
	if err := n.Activate(now); err != nil {
		t.Fatal(err)
	}
	conn, stop, ended := dialUDP(t, lab, 7), make(chan bool), make(chan error, 1)
	if err := segments(conn, train/8); err != nil { // to a byte each, or not at all
		t.Fatal(err)
	}
	var asked atomic.Uint64
	go func() {
		defer close(ended)
		buf := make([]byte, 10)
		for {
			select {
			case <-stop:
				return
			default:
			}
			_, err := conn.Write(make([]byte, train))
			_ = conn.SetReadDeadline(time.Now().Add(testenv.Slowness() * 5 * time.Second))
			for i := 0; i < train && err == nil; i++ {
				_, err = conn.Read(buf)
			}
			if err != nil {
				ended <- fmt.Errorf("datagram %d: %w", asked.Load(), err)
				return
			}
			asked.Add(1)
		}
	}()
	rounds := map[nic.Hook]int{nic.HookXDP: 24, nic.HookTC: 10}[hook]
	handled := uint64(0)
	for i := range rounds {
		next := install(fmt.Sprintf("round %d", i+1), 3+i%2)
		if err := n.Replace(map[*nic.Context]*nic.Context{now: next}, map[*nic.Context][]int{user: {8 - i%2}}); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(now.Rulesets(), next.Rulesets(), user.Rulesets()); got != fmt.Sprintf("[] [%d] [%d]", 3+i%2, 8-i%2) {
			t.Errorf("the numbers are %s", got)
		}
		done := now.Stats().Handled
		if err := n.Remove(now); err != nil {
			t.Fatal(err)
		}
		if again := now.Stats().Handled; again != done {
			t.Errorf("of a context that was replaced %d handlers have run, and then %d", done, again)
		}
		handled += done
		for before := asked.Load(); asked.Load() < before+3 && len(ended) == 0; {
			time.Sleep(time.Millisecond)
		}
		now = next
	}
	roundTrip(t, dialUDP(t, lab, 8), []byte("hello"))

	if hook == nic.HookTC {
		close(stop)
		if err := <-ended; err != nil {
			t.Error(err)
		}
		handled += now.Stats().Handled
		if p := stats(t, n).Program; handled != uint64(train)*asked.Load() || p.Kernel != asked.Load()+1 {
			t.Errorf("%d trains were answered; %d of their datagrams were handled, in %d frames", asked.Load(), handled, p.Kernel-1)
		}
		t.Logf("%d trains during %d replacements", asked.Load(), rounds)
		return
	}
	idle := install("idle")
	was := fmt.Sprint(now.Rulesets(), user.Rulesets())
	for _, tc := range []struct {
		old     map[*nic.Context]*nic.Context
		numbers map[*nic.Context][]int
		want    string
	}{
		{map[*nic.Context]*nic.Context{user: idle}, nil, `context "user": HPUs have packets of it`},
		{map[*nic.Context]*nic.Context{now: user}, nil, `context "user": HPUs have packets of it`},
		{map[*nic.Context]*nic.Context{now: now}, nil, "is there twice"},
		{map[*nic.Context]*nic.Context{now: idle}, map[*nic.Context][]int{idle: {3}}, `context "idle" is there twice`},
		{map[*nic.Context]*nic.Context{idle: now}, nil, "active is "},
		{map[*nic.Context]*nic.Context{now: install("taken", 7)}, nil, `ruleset number 7 is taken by context "user"`},
		{map[*nic.Context]*nic.Context{now: idle}, map[*nic.Context][]int{user: {256}}, "want 0 to 255"},
	} {
		refused(t, n.Replace(tc.old, tc.numbers), "replace contexts on ", tc.want)
		if got := fmt.Sprint(now.Rulesets(), user.Rulesets()); got != was || len(idle.Rulesets()) > 0 {
			t.Errorf("%s: numbers are %s, were %s", tc.want, got, was)
		}
	}
	close(stop)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if handled += now.Stats().Handled; handled != asked.Load() {
		t.Errorf("%d datagrams were answered, and %d handled", asked.Load(), handled)
	}
	t.Logf("%d datagrams during %d replacements", asked.Load(), rounds)
}
