// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/spin"
)

// hungry is what became of sets of test-hungry, by their parameter who.
var hungry struct {
	sync.Mutex
	may  map[string][]int64 // Env.Memory of each that was to be made
	more map[string]int64   // bytes that the next reserve beyond their parameter
}

func init() {
	hungry.may, hungry.more = map[string][]int64{}, map[string]int64{}
	handlers.RegisterEnv("test-hungry", "", func(p handlers.Params, env handlers.Env) (*handlers.Set, error) {
		c := struct {
			Who  string `param:"who"`
			Want int64  `param:"want"`
		}{}
		if err := p.Decode(&c); err != nil {
			return nil, err
		}
		hungry.Lock()
		defer hungry.Unlock()
		hungry.may[c.Who] = append(hungry.may[c.Who], env.Memory)
		if c.Want += hungry.more[c.Who]; c.Want > env.Memory {
			return nil, fmt.Errorf("%w: %d bytes of food: at most %d", handlers.ErrMemory, c.Want, env.Memory)
		}
		return &handlers.Set{
			Handlers: hpu.Handlers{Payload: func(*hpu.HER) spin.Code { return spin.Success }},
			Reserved: map[string]int64{"food": c.Want},
		}, nil
	})
	handlers.Register("test-stateful", "has state of each message", func(handlers.Params) (*handlers.Set, error) {
		return &handlers.Set{
			Handlers: hpu.Handlers{Payload: func(*hpu.HER) spin.Code { return spin.Success }},
			State:    4096,
		}, nil
	})
}

// feed forgets what sets of a name were told, and has the next want more than they say.
func feed(who string, more int64) {
	hungry.Lock()
	defer hungry.Unlock()
	hungry.may[who], hungry.more[who] = nil, more
}

// told is what sets of a name may have reserved, since feed.
func told(who string) []int64 {
	hungry.Lock()
	defer hungry.Unlock()
	return slices.Clone(hungry.may[who])
}

// eater is a context of test-hungry.
func eater(who string, want int64, windows ...control.Window) *control.Context {
	return &control.Context{
		Name: who, Handler: "test-hungry", Params: map[string]any{"who": who, "want": want},
		Rulesets: "a: udp(9)", Activate: atAttach, Windows: windows,
	}
}

// By limits.memory is decided before anything is allocated.
func TestTypesLargerThanLimitsMemoryAreNotAllocated(t *testing.T) {
	const params = "type: 'hvec(3 100 400)[int]'\n    strategy: rw-cp\n    interval: 300\n    packet: 100\n  messages: 200000"
	check := func(limit string) (bytes uint64, err string) {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err = load(t, "limits: {memory: "+limit+"}\n"+eth+datatype(params))
		runtime.ReadMemStats(&after)
		return after.TotalAlloc - before.TotalAlloc, err
	}
	const least = 64 << 20
	if n, err := check("1GiB"); err != "" || n < least {
		t.Fatalf("with memory enough, %d bytes are allocated: want at least %d: %s", n, least, err)
	}
	n, err := check("20MiB")
	if n > 10<<20 {
		t.Errorf("%d bytes are allocated for what is refused", n)
	}
	for _, want := range []string{
		"F:7:5: contexts[0].params: handler datatype: not enough memory: rw-cp of this type for 200000 messages takes ",
		fmt.Sprintf(", at most %d", 19<<20),
		"; limits.memory leaves no more than 19MiB: raise it, lower messages, or make windows smaller",
	} {
		if !strings.Contains(err, want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
}

func TestHandlersMayReserveWhatLimitsMemoryLeaves(t *testing.T) {
	const text = `
limits: {memory: 100MiB}
windows: [{name: ours, size: 7MiB}]
contexts:
- name: a
  handler: test-hungry
  rulesets: "a: udp(9)"
  params: {who: a, want: 3145729}
  windows: [{name: in, size: 5MiB}, {name: ours}]
  memory: 2MiB
  hpu_memory: 192KiB
  queue: {}
- name: b
  handler: test-hungry
  rulesets: "b: udp(10)"
  params: {who: b, want: %d}
  windows: [{name: in, size: 1MiB}]
`
	cfg, err := load(t, eth+fmt.Sprintf(text, 1))
	if err != "" {
		t.Fatal(err)
	}
	feed("a", 0)
	feed("b", 0)
	var c checker
	all := checkConfig(&c, cfg)
	if len(all) != 2 {
		t.Fatal(c.err())
	}
	queue := queueBytes(all[0].queue.Layout)
	a := int64(100-7-5-2-3)<<20 - queue // 16 HPUs, of 192 KiB each
	b := a - 4<<20 - 1<<20              // less what a has reserved, and a window
	if got := told("a"); !slices.Equal(got, []int64{a}) {
		t.Errorf("the first may reserve %d, want %d", got, a)
	}
	if got := told("b"); !slices.Equal(got, []int64{b}) {
		t.Errorf("the second may reserve %d, want %d", got, b)
	}

	if _, err := load(t, eth+fmt.Sprintf(text, b)); err != "" {
		t.Errorf("all that is left: %s", err)
	}
	_, err = load(t, eth+fmt.Sprintf(text, b+1))
	want := fmt.Sprintf("F:17:11: contexts[1].params: handler test-hungry: not enough memory: %d bytes of food: at most %d; limits.memory leaves no more than %v: raise it, lower messages, or make windows smaller", b+1, b, control.Size(b))
	if err != want {
		t.Errorf("got\n%s\nwant\n%s", err, want)
	}
	// If windows take too much, handlers are not to blame.
	_, err = load(t, eth+fmt.Sprintf(strings.Replace(text, "size: 5MiB", "size: 95MiB", 1), 1))
	if len(strings.Split(err, "\n")) != 1 || !strings.Contains(err, "contexts[0]: windows, queue and HPU memory take ") || !strings.Contains(err, "100MiB are allowed for all: raise limits.memory") {
		t.Errorf("windows that are too large: %s", err)
	}
}

// What is in use, by whomever, is not there to be reserved; and a set that needs more
// than there is waits for it.
func TestHandlersMayReserveWhatIsNotInUse(t *testing.T) {
	f := launch(t, "limits: {memory: 40MiB}\ncontexts: [{name: other, handler: test-init, rulesets: 'a: udp(9)', windows: [{name: w, size: 10MiB}]}]\n")
	feed("x", 0)
	_, err := f.install(eater("x", 26<<20, control.Window{Name: "w", Size: 5 << 20}))
	fails(t, "more than there is", err, errInvalid, fmt.Sprintf("params: handler test-hungry: not enough memory: %d bytes of food: at most %d; limits.memory leaves no more than 25MiB", 26<<20, 25<<20))
	if used := f.inUse(); used != 10<<20 {
		t.Errorf("%d bytes are in use after that", used)
	}
	_, err = f.install(eater("x", 20<<20, control.Window{Name: "w", Size: 5 << 20}))
	must(t, err)
	if got := told("x"); !slices.Equal(got, []int64{25 << 20, 25 << 20, 25 << 20}) {
		t.Errorf("it may reserve %d", got)
	}
	if used := f.inUse(); used != 35<<20 {
		t.Errorf("%d bytes are in use", used)
	}

	// Now it wants more each time, and another one has taken some meanwhile.
	_, err = f.install(eater("y", 4<<20))
	must(t, err)
	feed("x", 3<<20)
	left(f.admitted(t, "x", root, false), "to have it start over")
	want := fmt.Sprintf("handler test-hungry: not enough memory: %d bytes of food: at most %d; limits.memory leaves", 23<<20, 21<<20)
	waits := func(name, want string) bool { // it tries again now and then
		i, err := f.info(name)
		return err == nil && i.State == failed && strings.Contains(i.Error, want)
	}
	eventually(t, "it waits for memory", func() bool { return waits("x", want) })
	if got := slices.Compact(told("x")); !slices.Equal(got, []int64{21 << 20}) {
		t.Errorf("it may reserve %d", got)
	}
	must(t, f.remove("y"))
	eventually(t, "it starts over", func() bool { return f.state(t, "x") == installed })
	if used := f.inUse(); used != 38<<20 {
		t.Errorf("%d bytes are in use", used)
	}

	// What goes, and is there only because an observer still refers to it, does not count.
	feed("x", 0)
	o := f.admitted(t, "x", root, true)
	left(f.admitted(t, "x", root, false), "to have it start over")
	if i, err := f.info("x"); err != nil || i.State != installed {
		t.Errorf("with an observer, %+v: %v", i, err)
	}
	left(o, "told")

	// Where not even what was checked fits, no set is made.
	if _, err := f.install(eater("z", 1)); err != nil {
		t.Fatal(err)
	}
	feed("z", 0)
	f.memory.setLimit(20 << 20)
	left(f.admitted(t, "z", root, false), "to have it start over")
	eventually(t, "it waits for memory", func() bool { return waits("z", "1MiB more memory is wanted") })
	if got := told("z"); len(got) != 0 {
		t.Errorf("it may reserve %d", got)
	}
	f.memory.setLimit(40 << 20)
	eventually(t, "it starts over", func() bool { return f.state(t, "z") == installed })
}

func TestStateOfMessagesCounts(t *testing.T) {
	const text = `
limits: {memory: %d}
contexts:
- name: a
  handler: test-stateful
  rulesets: "a: slmp"
  messages: 1000
`
	if _, err := load(t, eth+fmt.Sprintf(text, roundUpToElement(4096*1000))); err != "" {
		t.Errorf("just enough: %s", err)
	}
	_, err := load(t, eth+fmt.Sprintf(text, roundUpToElement(4096*1000)-1))
	for _, want := range []string{"contexts[0]: ", "lower messages", "for 1000 in flight"} {
		if !strings.Contains(err, want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
}
