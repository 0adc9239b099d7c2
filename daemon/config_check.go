// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"net"
	"os/user"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// What words of a configuration mean.
var (
	hooks     = map[string]nic.Hook{"auto": nic.HookAuto, "xdp": nic.HookXDP, "tc": nic.HookTC}
	orders    = map[string]nic.Order{"last": nic.Last, "first": nic.First}
	modes     = map[string]nic.Mode{"auto": nic.Auto, "native": nic.Native, "generic": nic.Generic}
	waits     = map[string]hpu.Wait{"adaptive": hpu.Adaptive, "spin": hpu.Spin, "sleep": hpu.Sleep}
	policies  = map[string]nic.Policy{"message": nic.ByMessage, "packet": nic.ByPacket, "blocked-rr": nic.BlockedRR}
	overloads = map[string]nic.Overload{"drop": nic.OverloadDrops, "stack": nic.OverloadSpills}
	fulls     = map[string]hpu.Full{"fail": hpu.FullFails, "drop": hpu.FullDrops, "wait": hpu.FullWaits}
)

// When a context is activated.
const (
	atStart  = "start"
	atAttach = "attach"
	manually = "manual"
)

// What an application may do with a window.
const (
	appMapped = "rw"
	appCopies = "r"
	appNone   = "none"
)

// nameForm is what names of contexts and windows look like: they are parts of paths,
// of URLs and of command lines.
var nameForm = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,62}$`)

// A checker collects what is wrong.
type checker struct{ problems problems }

func (c *checker) fail(path, format string, args ...any) {
	c.problems = append(c.problems, problem{path: path, msg: fmt.Sprintf(format, args...)})
}

// told says whether something is wrong at a path already.
func (c *checker) told(path string) bool {
	return slices.ContainsFunc(c.problems, func(p problem) bool { return p.path == path })
}

func (c *checker) err() error {
	if c.problems == nil {
		return nil
	}
	return c.problems
}

// problems are an error that says all of them.
type problems []problem

func (all problems) Error() string {
	var b strings.Builder
	for i, p := range all {
		if i > 0 {
			b.WriteByte('\n')
		}
		b.WriteString(p.Error())
	}
	return b.String()
}

// word looks up a word, whose zero value is the first.
func word[T any](c *checker, path, s string, words map[string]T) (v T) {
	if s == "" {
		return v
	}
	v, ok := words[s]
	if !ok {
		var known []string
		for w := range words {
			known = append(known, w)
		}
		slices.Sort(known)
		c.fail(path, "%q: want %s", s, strings.Join(known, ", "))
	}
	return v
}

// name checks a name that must be its only one.
func (c *checker) name(path, name, what string, taken map[string]string) {
	switch first, twice := taken[name]; {
	case name == "":
		c.fail(path, "a %s needs a name", what)
	case !nameForm.MatchString(name):
		c.fail(path, "%q: names have up to 63 of the characters A-Z a-z 0-9 . _ -, and do not begin with . or -", name)
	case twice:
		c.fail(path, "%s %q is there already: %s", what, name, first)
	default:
		taken[name] = path
	}
}

// between checks a number that may be left out, as 0.
func (c *checker) between(path string, v, lo, hi int) {
	if v != 0 && (v < lo || v > hi) {
		c.fail(path, "%d: want %d to %d", v, lo, hi)
	}
}

// surroundings are what a context is checked against: the rest of the configuration.
type surroundings struct {
	kernel     bool // handlers in eBPF are allowed
	limits     Limits
	interfaces []Interface
	windows    map[string]control.Size // shared ones
	left       int64                   // of limits.memory
}

// checkConfig checks a configuration as a whole.
func checkConfig(c *checker, cfg *Config) []*contextPlan {
	if strings.HasPrefix(cfg.Socket, "@") {
		c.fail("socket", "%q: abstract sockets have no owner and no mode: want an absolute path", cfg.Socket)
	} else if cfg.Socket != "" && !filepath.IsAbs(cfg.Socket) {
		c.fail("socket", "%q: want an absolute path", cfg.Socket)
	}
	if cfg.Metrics != "" {
		if _, port, err := net.SplitHostPort(cfg.Metrics); err != nil {
			c.fail("metrics", `%q: want an address and port, such as "127.0.0.1:9465" or "[::1]:9465"`, cfg.Metrics)
		} else if _, err := strconv.ParseUint(port, 10, 16); err != nil {
			c.fail("metrics", "%q: the port is a number up to 65535", cfg.Metrics)
		}
	}
	if cfg.User != "" {
		if _, err := lookupAccount(cfg.User); err != nil {
			c.fail("user", "%v", err)
		}
	}
	if cfg.Admins.Observers {
		c.fail("admins.observers", "goes with a context's attach")
	}
	checkWho(c, "admins", &cfg.Admins)
	env := &surroundings{kernel: cfg.Kernel == kernelAdmins, limits: cfg.Limits.complete(), interfaces: cfg.Interfaces, windows: map[string]control.Size{}}
	if cfg.Kernel != "" && cfg.Kernel != "off" && cfg.Kernel != kernelAdmins {
		c.fail("kernel", "%q: want off or administrators", cfg.Kernel)
	}
	c.between("log.lines", cfg.Log.Lines, 1, 1<<20)
	c.between("log.rate", cfg.Log.Rate, 1, 1<<20)
	if cfg.Log.Dir != "" && !filepath.IsAbs(cfg.Log.Dir) {
		c.fail("log.dir", "%q: want an absolute path", cfg.Log.Dir)
	}
	checkInterfaces(c, cfg.Interfaces)

	var shared int64
	names := map[string]string{}
	for i, w := range cfg.Windows {
		path := fmt.Sprintf("windows[%d]", i)
		c.name(path+".name", w.Name, "window", names)
		if w.Size == 0 {
			c.fail(path+".size", "a window needs a size")
		}
		checkSize(c, path+".size", "window", w.Size, env.limits)
		if w.Rights != "" || w.App != "" {
			c.fail(path, "rights and app go with the contexts that use the window")
		}
		env.windows[w.Name] = w.Size
		shared += roundUpToElement(int64(w.Size))
	}
	env.left = int64(env.limits.Memory) - shared
	var all []*contextPlan
	taken := map[string]string{}
	numbers := map[string]string{} // ruleset numbers that are asked for, by interface
	for i := range cfg.Contexts {
		path := fmt.Sprintf("contexts[%d]", i)
		c.name(path+".name", cfg.Contexts[i].Name, "context", taken)
		b := checkContext(c, path, &cfg.Contexts[i], env)
		if b == nil {
			continue
		}
		all = append(all, b)
		env.left -= b.charge()
		first := cfg.Contexts[i].First
		for n := range len(b.spec.Rulesets) {
			if first == 0 {
				break
			}
			key := fmt.Sprintf("%s %d", b.iface, first+n)
			if other, twice := numbers[key]; twice {
				c.fail(path+".first", "ruleset number %d is that of %s already", first+n, other)
				break
			}
			numbers[key] = fmt.Sprintf("context %q", b.doc.Name)
		}
	}
	if len(c.problems) == 0 {
		if _, err := dealAll(all, nil); err != nil {
			c.fail("contexts", "%v", err)
		}
	}
	if env.left < 0 {
		c.fail("limits.memory", "windows, queues and HPU memory take %v, and %v are allowed: raise limits.memory, or make windows smaller", env.limits.Memory-control.Size(env.left), env.limits.Memory)
	}
	return all
}

func checkInterfaces(c *checker, all []Interface) {
	if len(all) == 0 {
		c.fail("interfaces", `there is none: name at least one, such as "- name: eth1"`)
	}
	taken := map[string]bool{}
	for i := range all {
		f, path := &all[i], fmt.Sprintf("interfaces[%d]", i)
		if f.Name == "" || len(f.Name) > 15 || strings.ContainsAny(f.Name, "/ \t\n") {
			c.fail(path+".name", "%q is not an interface name: want 1 to 15 characters, without spaces and /", f.Name)
		} else if taken[f.key()] {
			c.fail(path+".name", "interface %s is there already", f.key())
		}
		taken[f.key()] = true
		word(c, path+".mode", f.Mode, modes)
		word(c, path+".hook", f.Hook, hooks)
		word(c, path+".order", f.Order, orders)
		word(c, path+".wait", f.Wait, waits)
		if strings.ContainsAny(f.Netns, "/ \t\n") || f.Netns == "." || f.Netns == ".." {
			c.fail(path+".netns", "%q is not the name of a network namespace: see ip netns list", f.Netns)
		}
		c.between(path+".hpus", f.HPUs, 1, nic.MaxHPUs)
		c.between(path+".workers", f.Workers, 1, cmp.Or(f.HPUs, nic.DefaultHPUs))
		if r := f.Ring; r != 0 && (r < 64 || r > nic.MaxRing || bits.OnesCount(uint(r)) != 1) {
			c.fail(path+".ring", "%d: want a power of two, 64 to %d", r, nic.MaxRing)
		}
		for j, cpu := range f.CPUs {
			if cpu < 0 || cpu > 1<<13 {
				c.fail(fmt.Sprintf("%s.cpus[%d]", path, j), "%d is not a CPU number", cpu)
			}
		}
	}
}

func checkSize(c *checker, path, what string, s control.Size, l Limits) {
	if s > l.Window {
		c.fail(path, "a %s of %v is larger than the limit of %v: raise limits.window", what, s, l.Window)
	}
}

// roundUpToElement returns how much memory is taken for a number of bytes.
func roundUpToElement(n int64) int64 { return (n + hostq.Element - 1) / hostq.Element * hostq.Element }

// A who is a list of users and groups, by number.
type who struct{ users, groups []int }

func (w who) has(p control.Peer) bool {
	if slices.Contains(w.users, p.UID) || slices.Contains(w.groups, p.GID) {
		return true
	}
	return slices.ContainsFunc(p.Groups, func(g int) bool { return slices.Contains(w.groups, g) })
}

// checkWho finds the numbers of users and groups, which must exist if they are named.
func checkWho(c *checker, path string, a *control.Attach) (w who) {
	for i, name := range a.Users {
		id, err := lookupUser(name)
		if err != nil {
			c.fail(fmt.Sprintf("%s.users[%d]", path, i), "%v", err)
		}
		w.users = append(w.users, id)
	}
	for i, name := range a.Groups {
		id, err := strconv.ParseUint(name, 10, 32)
		if err != nil {
			g, lookup := user.LookupGroup(name)
			if lookup != nil {
				c.fail(fmt.Sprintf("%s.groups[%d]", path, i), "%q: there is no such group", name)
				continue
			}
			id, _ = strconv.ParseUint(g.Gid, 10, 32)
		}
		w.groups = append(w.groups, int(id))
	}
	return w
}

func lookupUser(name string) (int, error) {
	if id, err := strconv.ParseUint(name, 10, 32); err == nil {
		return int(id), nil
	}
	u, err := user.Lookup(name)
	if err != nil {
		return -1, fmt.Errorf("%q: there is no such user", name)
	}
	return strconv.Atoi(u.Uid)
}

// A contextPlan is a context that was checked, with all that is known before it is made.
type contextPlan struct {
	doc     control.Context
	iface   string // key
	hpus    int    // of the interface; 0: unknown
	workers int    // that serve them
	factory handlers.EnvFactory
	params  map[string]any  // that it gets, if not all of the context's
	env     handlers.Env    // that it got when it was checked
	spec    nic.ContextSpec // all but handlers and resources
	ending  bool            // its messages end: they have a binding
	windows []windowUse
	memory  int64 // bytes of HPU memory
	perHPU  int64 // of each
	reserve int64 // bytes that handlers have reserved, and of their messages' state
	maps    int64 // of these: of handlers in eBPF that hand messages over
	cpus    int   // that such handlers run on, or 0
	queue   *hostq.PairConfig
	full    hpu.Full
	timer   time.Duration
	attach  who
	hints   problems // what is hardly meant, though it may be
}

// A windowUse is a window of a context's.
type windowUse struct {
	name   string
	size   int64
	shared bool
	rights spin.Rights
	app    string
}

// charge returns how much memory of its own the context takes.
func (b *contextPlan) charge() int64 {
	n := roundUpToElement(b.memory) + roundUpToElement(b.perHPU*int64(b.hpus)) + roundUpToElement(b.reserve)
	for _, w := range b.windows {
		if !w.shared {
			n += roundUpToElement(w.size)
		}
	}
	if b.queue != nil {
		n += queueBytes(b.queue.Layout)
	}
	return n
}

// reserved returns how many bytes a set takes for itself: what it has allocated, and the
// state of each message that can be in flight.
func (b *contextPlan) reserved(set *handlers.Set) int64 {
	return set.ReservedBytes() + int64(set.State)*int64(b.env.Messages)
}

// queueBytes returns how much memory a pair takes.
func queueBytes(l hostq.Layout) int64 { return roundUpToElement(l.Size()) }

// checkContext checks a context of the file, or one of POST /v1/contexts. It returns
// nil if anything is wrong.
func checkContext(c *checker, path string, doc *control.Context, env *surroundings) *contextPlan {
	before := len(c.problems)
	at := func(key string) string { return join(path, key) }
	b := &contextPlan{doc: *doc}
	b.spec.Name = doc.Name
	f := findInterface(c, at("interface"), doc.Interface, env.interfaces)
	if f != nil {
		b.iface = f.key()
		if n := cmp.Or(f.HPUs, nic.DefaultHPUs); n > 0 && n <= nic.MaxHPUs { // else told elsewhere
			b.hpus = n
		}
		b.workers = min(cmp.Or(max(f.Workers, 0), runtime.GOMAXPROCS(0)), b.hpus)
	}
	switch {
	case doc.Tier == tierKernel:
		if !b.readKernel(c, path, env) {
			return b.checkKernel(c, path, env, before)
		}
		// What follows is about the handlers that messages are handed over to.
	case doc.Tier != "" && doc.Tier != tierUser:
		c.fail(at("tier"), "%q: want user or kernel", doc.Tier)
	case doc.Object != nil:
		c.fail(at("object"), "needs tier: kernel, since its handlers are in eBPF")
		return nil // or the handlers in Go are found missing
	}

	if doc.Segments != 0 && b.spec.Kernel == nil {
		c.fail(at("segments"), "how many a message may have is said for handlers in eBPF only: tier: kernel")
	}
	b.checkWindows(c, at, env)
	memory := int64(doc.Memory)
	if k := b.spec.Kernel; k != nil {
		memory, _ = k.Object.MemoryFor(memory, 0)
	}
	b.checkMemory(c, at, env, memory, int64(doc.HPUMemory))
	b.checkQueue(c, at)
	// What is wrong so far may be sizes that have no sum. A queue that only the handlers
	// ask for is not known yet: what it takes is found missing below.
	left, large := env.left, false
	if len(c.problems) == before {
		n := b.charge()
		if left, large = left-n, n > int64(env.limits.Memory); large {
			b.tooLarge(c, path, env, "")
		}
	}
	b.env = handlers.Env{HPUs: cmp.Or(b.hpus, nic.DefaultHPUs), Messages: doc.Messages, Window: b.largest(), Memory: spare(left)}
	if b.spec.Kernel != nil { // it hands over
		b.env.Messages = nic.HandOverSlots(doc.Messages)
	}
	if b.env.Messages < 1 || b.env.Messages > bpf.MaxBuckets {
		b.env.Messages = nic.DefaultMessages
	}
	var set *handlers.Set
	if reg, ok := handlers.Lookup(doc.Handler); ok {
		b.factory = reg.New
		var err error
		if set, err = b.makeSet(b.env); err != nil && !(large && errors.Is(err, handlers.ErrMemory)) {
			c.params(at("params"), doc.Handler, err)
		}
	} else {
		var known []string
		for _, r := range handlers.All() {
			known = append(known, r.Name)
		}
		switch {
		case c.told(at("handler")):
		case doc.Handler == "":
			c.fail(at("handler"), "is missing: %s", suggest("", known))
		default:
			c.fail(at("handler"), "no handler %q: %s", doc.Handler, suggest(doc.Handler, known))
		}
	}
	rules := set
	if k := b.spec.Kernel; k != nil {
		rules = ofMessages(k.Object, doc, set)
	}
	b.readRulesets(c, at, rules)
	b.readScheduling(c, at, set)

	b.timer = time.Duration(doc.Timer)
	if set != nil {
		b.checkMemory(c, at, env, int64(set.Memory), int64(set.HPUMemory))
		b.reserve = b.reserved(set) + b.maps
		if set.Queue && b.queue == nil {
			b.setQueue(&control.Queue{})
		}
		if set.Handlers.Timer != nil {
			b.timer = cmp.Or(b.timer, set.Timer)
		}
	}
	if b.spec.Kernel != nil {
		b.wantQueue()
	}
	b.judge(c, at, set)

	if doc.Attach != nil {
		b.attach = checkWho(c, at("attach"), doc.Attach)
	}
	b.checkActivate(c, at, set != nil && set.Queue || b.spec.Kernel != nil && b.queue != nil)
	if set != nil && set.Window && len(c.problems) == before {
		b.needsWindow(c, at, "handler "+doc.Handler)
	}
	if len(c.problems) > before {
		return nil
	}
	if b.spec.Kernel != nil {
		b.hintWindows()
	}
	if n := b.charge(); n > int64(env.limits.Memory) {
		hint := ""
		if n-roundUpToElement(b.reserve) <= int64(env.limits.Memory) {
			hint = fmt.Sprintf(", or lower messages: %v are what handler %s has reserved for %d in flight", control.Size(b.reserve), doc.Handler, b.env.Messages)
		}
		b.tooLarge(c, path, env, hint)
		return nil
	}
	return b
}

// checkActivate checks when the context is activated.
func (b *contextPlan) checkActivate(c *checker, at func(string) string, queue bool) {
	switch b.doc.Activate {
	case "":
		b.doc.Activate = atStart
		if queue {
			// With nobody there, requests would take all credits, and wait for
			// whoever comes.
			b.doc.Activate = atAttach
		}
	case atStart, atAttach, manually:
	default:
		c.fail(at("activate"), "%q: want start, attach or manual", b.doc.Activate)
	}
}

// needsWindow has the context have a window that its handlers may write.
func (b *contextPlan) needsWindow(c *checker, at func(string) string, who string) {
	if len(b.doc.Windows) == 0 {
		c.fail(at("windows"), `%s: no window: messages would be acknowledged and thrown away; add one, such as "windows: [{name: in, size: 64MiB}]"`, who)
	} else if b.largest() < 0 {
		c.fail(at("windows"), "%s: handlers may not write any of the windows: messages would be acknowledged and thrown away; allow it with \"rights: rw\"", who)
	}
}

// tooLarge says that the context takes more memory than there can be.
func (b *contextPlan) tooLarge(c *checker, path string, env *surroundings, hint string) {
	what := "windows, queue and HPU memory"
	if b.spec.Kernel != nil {
		what = "windows, queue, HPU memory and maps"
	}
	c.fail(path, "%s take %v, and %v are allowed for all: raise limits.memory%s", what, control.Size(b.charge()), env.limits.Memory, hint)
}

// largest returns the size of the largest window that handlers may write, -1 if they may
// write none of those that are there.
func (b *contextPlan) largest() (size int64) {
	writable := func(w windowUse) bool { return w.rights&spin.Write != 0 }
	if len(b.windows) > 0 && !slices.ContainsFunc(b.windows, writable) {
		return -1
	}
	for _, w := range b.windows {
		if writable(w) {
			size = max(size, w.size)
		}
	}
	return size
}

// params says what is wrong with parameters, and in which, if that is known.
func (c *checker) params(path, handler string, err error) {
	for _, err := range spin.Flatten(err) {
		p := problem{path: path, msg: fmt.Sprintf("handler %s: %v", handler, err)}
		if wrong := (*spin.ParamError)(nil); errors.As(err, &wrong) {
			p = problem{join(path, wrong.Param), wrong.Line, wrong.Column, fmt.Sprintf("handler %s: %v", handler, wrong.Err)}
		}
		c.problems = append(c.problems, p)
	}
}

// checkMemory has the context have at least so much HPU memory, and so much of each HPU.
func (b *contextPlan) checkMemory(c *checker, at func(string) string, env *surroundings, memory, perHPU int64) {
	if memory > b.memory {
		b.memory = memory
		checkSize(c, at("memory"), "memory", control.Size(memory), env.limits)
	}
	if perHPU > b.perHPU {
		if b.perHPU = perHPU; b.hpus > 0 && perHPU > int64(env.limits.Window)/int64(b.hpus) {
			c.fail(at("hpu_memory"), "%v for each of %d HPUs is more than the limit of %v: raise limits.window", control.Size(perHPU), b.hpus, env.limits.Window)
		}
	}
}

// spare returns how much memory handlers may reserve if so much is left. The least is
// what is taken anyway for a byte: the few bytes of a small set are not what to complain
// of where windows and queues are too large.
func spare(left int64) int64 { return max(left/hostq.Element, 1) * hostq.Element }

// makeSet calls the factory, which is not ours.
func (b *contextPlan) makeSet(env handlers.Env) (set *handlers.Set, err error) {
	defer func() {
		if r := recover(); r != nil {
			set, err = nil, fmt.Errorf("panic: %v", r)
		}
	}()
	params := b.doc.Params
	if b.params != nil {
		params = b.params
	}
	set, err = b.factory(handlers.Params(params), env)
	switch {
	case errors.Is(err, handlers.ErrMemory):
		return nil, fmt.Errorf("%w; limits.memory leaves no more than %v: raise it, lower messages, or make windows smaller", err, control.Size(env.Memory))
	case err != nil:
		return nil, err
	case set == nil:
		return nil, errors.New("it returned no set of handlers")
	}
	return set, nil
}

func findInterface(c *checker, path, name string, all []Interface) *Interface {
	var found []*Interface
	var known []string
	for i := range all {
		known = append(known, all[i].key())
		if name == "" || all[i].Name == name || all[i].key() == name {
			found = append(found, &all[i])
		}
	}
	switch {
	case len(found) == 1:
		return found[0]
	case len(all) == 0: // told elsewhere
	case name == "":
		c.fail(path, "name one of %s", strings.Join(known, ", "))
	case found == nil:
		c.fail(path, "no interface %q: want %s", name, strings.Join(known, ", "))
	default:
		c.fail(path, "%q is in several network namespaces: want %s", name, strings.Join(known, ", "))
	}
	return nil
}

// readRulesets reads the rulesets and the message format.
func (b *contextPlan) readRulesets(c *checker, at func(string) string, set *handlers.Set) {
	doc := &b.doc
	if set != nil && set.Triggered && !doc.Triggered {
		doc.Triggered = true
		if doc.Rulesets != "" {
			c.fail(at("rulesets"), "handler %s is activated by the host: there can be none", doc.Handler)
			return
		}
	}
	if doc.Rulesets != "" {
		rules, err := matcher.ParseFile("", strings.NewReader(doc.Rulesets))
		for _, err := range spin.Flatten(err) {
			p := problem{path: at("rulesets"), msg: err.Error()}
			var parse *matcher.ParseError
			if errors.As(err, &parse) {
				p.line, p.column, p.msg = parse.Line, parse.Column, parse.Msg
			}
			c.problems = append(c.problems, p)
		}
		b.spec.Rulesets = rules
	} else if set != nil && !doc.Triggered {
		b.spec.Rulesets = slices.Clone(set.Rulesets)
	}
	b.spec.HostActivated = doc.Triggered
	if doc.Format != "" {
		if b.spec.Format = matcher.FormatByName(doc.Format); b.spec.Format == nil {
			c.fail(at("format"), "no message format %q: want %s", doc.Format, strings.Join(matcher.FormatNames(), ", "))
		}
	}
}

// readScheduling reads what is about HPUs, credit, overload and time.
func (b *contextPlan) readScheduling(c *checker, at func(string) string, set *handlers.Set) {
	doc, s := &b.doc, &b.spec
	s.Policy = word(c, at("policy"), doc.Policy, policies)
	s.Sequence, s.VHPUs = doc.Sequence, doc.VHPUs
	if set != nil {
		for _, wrong := range b.schedule(s, set) {
			c.fail(at(wrong.Path), "%v", wrong.Err)
		}
	}
	s.Overload = word(c, at("overload"), doc.Overload, overloads)
	s.Hook = word(c, at("hook"), doc.Hook, hooks)
	if doc.HPUs != "" && b.onHPUs() { // else it is refused, whatever it says
		mask, err := nic.ParseHPUs(doc.HPUs, b.hpus)
		if err != nil {
			c.fail(at("hpus"), "%v", err)
		}
		s.CoreMask = mask
	}
	s.Credits, s.Share, s.Messages = doc.Credits, doc.Share, doc.Messages
	s.Timeout, s.Remember = time.Duration(doc.Timeout), time.Duration(doc.Remember)
}

// judge has the NIC say what is wrong with what was read. What could not be read is told
// already, and the rest is not judged by it.
func (b *contextPlan) judge(c *checker, at func(string) string, set *handlers.Set) {
	s := b.spec
	s.First = b.doc.First // as asked: the daemon deals out numbers for all contexts
	s.Resources = hpu.Resources{Timer: b.timer, Full: b.full}
	if set != nil {
		s.Handlers, s.State = set.Handlers, set.State
		if set.Window && s.Kernel == nil {
			s.Binder = &receives{} // whose windows are not made yet
		}
	}
	resolved, err := s.Resolve(b.hpus)
	b.ending = resolved.Format != nil && resolved.Format.Ends()
	if why := resolved.ForgetsEarly(); why != "" {
		b.hints = append(b.hints, problem{path: "remember", msg: why})
	}
	noSet := set == nil && s.Kernel == nil
	// Those of the handlers are made of their parameters.
	noRules := b.doc.Rulesets == "" && (noSet || slices.ContainsFunc(c.problems, func(p problem) bool { return strings.HasPrefix(p.path, at("params")) }))
	var wrong spin.Problems
	errors.As(err, &wrong)
	for _, p := range wrong {
		unknown := noSet && (p.Path == "handler" || p.Path == "timer") || noRules && p.Path == "rulesets"
		if !unknown && !c.told(at(p.Path)) {
			c.fail(at(p.Path), "%v", p.Err)
		}
	}
}

// schedule gives a context the scheduling that a set needs, as far as the configuration
// leaves it open. Errors are about values that the set cannot do with.
func (b *contextPlan) schedule(s *nic.ContextSpec, set *handlers.Set) (wrong spin.Problems) {
	doc := &b.doc
	switch {
	case set.Sequence == 0 || doc.Triggered: // the host's messages have one HPU each
		return nil
	case doc.Policy == "" || s.Policy == nic.BlockedRR:
	case s.Policy == nic.ByMessage:
		return nil
	default:
		wrong.Add("policy", "%s: handler %s needs blocked-rr with sequences of %d bytes and %d virtual HPUs, which it gets if policy is left out, or message", doc.Policy, doc.Handler, set.Sequence, set.VHPUs)
		return wrong
	}
	if doc.Sequence != 0 && doc.Sequence != set.Sequence {
		wrong.Add("sequence", "%d bytes: handler %s needs %d, which it gets if sequence is left out", doc.Sequence, doc.Handler, set.Sequence)
	}
	if doc.VHPUs != 0 && doc.VHPUs != set.VHPUs {
		wrong.Add("vhpus", "%d virtual HPUs: handler %s needs %d, which it gets if vhpus is left out", doc.VHPUs, doc.Handler, set.VHPUs)
	}
	s.Policy, s.Sequence, s.VHPUs = nic.BlockedRR, set.Sequence, set.VHPUs
	return wrong
}

func (b *contextPlan) checkWindows(c *checker, at func(string) string, env *surroundings) {
	taken := map[string]string{}
	for i, w := range b.doc.Windows {
		path := at(fmt.Sprintf("windows[%d]", i))
		c.name(path+".name", w.Name, "window", taken)
		use := windowUse{name: w.Name, size: int64(w.Size), rights: spin.All, app: cmp.Or(w.App, w.DefaultApp())}
		size, shared := env.windows[w.Name]
		switch {
		case w.Size == 0 && !shared:
			c.fail(path, "window %q has no size, and is not a shared window%s", w.Name, list(env.windows))
		case w.Size != 0 && shared:
			c.fail(path+".size", "window %q is shared, with a size of %v: leave out the size, or choose another name", w.Name, size)
		case shared:
			use.size, use.shared = int64(size), true
		}
		checkSize(c, path+".size", "window", w.Size, env.limits)
		if w.Rights != "" {
			if rights, err := spin.ParseRights(w.Rights); err != nil {
				c.fail(path+".rights", "%v", err)
			} else {
				use.rights = rights
			}
		}
		if w.App != "" && w.App != appMapped && w.App != appCopies && w.App != appNone {
			c.fail(path+".app", "%q: want rw (mapped), r (by copying) or none", w.App)
		}
		b.windows = append(b.windows, use)
	}
	if b.spec.Kernel != nil {
		if err := nic.CheckKernelWindows(len(b.windows)); err != nil {
			c.fail(at("windows"), "%v", err)
		}
	}
}

func list(windows map[string]control.Size) string {
	if len(windows) == 0 {
		return ""
	}
	var names []string
	for n := range windows {
		names = append(names, n)
	}
	slices.Sort(names)
	return " (" + strings.Join(names, ", ") + ")"
}

func (b *contextPlan) checkQueue(c *checker, at func(string) string) {
	q := b.doc.Queue
	if q == nil {
		return
	}
	b.full = word(c, at("queue.full"), q.Full, fulls)
	b.setQueue(q)
	for _, p := range b.queue.Check() {
		if p.Path != "lanes" { // of workers, which are told elsewhere
			c.fail(at("queue."+p.Path), "%v", p.Err)
		}
	}
}

func (b *contextPlan) setQueue(q *control.Queue) {
	b.queue = &hostq.PairConfig{Name: b.doc.Name, Layout: hostq.Layout{
		Events:   cmp.Or(q.Events, hostq.DefaultEvents),
		Requests: cmp.Or(q.Requests, hostq.DefaultRequests),
		Payload:  cmp.Or(int(q.Payload), hostq.DefaultPayload),
		Lanes:    b.workers,
	}}
}
