// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"math"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/regular"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// Contexts whose handlers are in eBPF.

// Where a context's handlers run.
const (
	tierUser   = "user"
	tierKernel = "kernel"
)

// kernelAdmins is the word of Config.Kernel that allows such contexts.
const kernelAdmins = "administrators"

// maxObject is how many bytes an object file may have; it is less than a request may have.
const maxObject = nic.MaxObjectFile

// ReadObject reads an object file, for a request.
func ReadObject(path string) (*control.Object, error) {
	b, err := regular.Read(path, maxObject)
	if err != nil {
		return nil, err
	}
	return &control.Object{Name: path, Code: b}, nil
}

// readObject has a context's object hold what its file has. Paths are relative to dir.
func readObject(doc *control.Context, dir string) error {
	o := doc.Object
	if o == nil || o.Code != nil {
		return nil
	}
	path := o.Name
	if !filepath.IsAbs(path) {
		path = filepath.Join(dir, path)
	}
	read, err := ReadObject(path)
	if err != nil {
		return err
	}
	o.Code = read.Code
	return nil
}

// readKernel reads the handlers of a context in the kernel. True: those in eBPF hand messages
// over to others in Go, which the context has, too.
func (b *contextPlan) readKernel(c *checker, path string, env *surroundings) bool {
	doc := &b.doc
	at := func(key string) string { return join(path, key) }
	b.spec.Kernel = &nic.Kernel{Segments: doc.Segments}
	if !env.kernel {
		c.fail(at("tier"), "handlers in eBPF are not allowed here: the configuration's `kernel: administrators` does that, from the daemon's start")
	}
	var err error
	if b.cpus, err = nic.KernelHPUs(); err != nil {
		c.fail(path, "%v", err)
		return false
	}
	k := b.spec.Kernel
	k.Object = b.readObject(c, at)
	if k.Object == nil || !k.Object.HandsOver() {
		return false
	}
	if doc.Handler == "" {
		c.fail(at("handler"), "is missing: the object hands messages over to handlers in Go, which it names")
	}
	b.refuse(c, at)
	b.maps = b.ofObject()
	// Each takes the parameters that it knows; what the object does not know is the handler's.
	k.Parameters, b.params = map[string]any{}, map[string]any{}
	known := map[string]bool{}
	for _, p := range k.Object.Parameters() {
		known[p.Name] = true
	}
	for name, v := range doc.Params {
		if known[name] {
			k.Parameters[name] = v
		} else {
			b.params[name] = v
		}
	}
	return true
}

// readObject reads the object that a context names, nil if it names none or there is
// something wrong.
func (b *contextPlan) readObject(c *checker, at func(string) string) *nic.Object {
	o := b.doc.Object
	switch {
	case o == nil:
		return nil
	case o.Code == nil:
		if !c.told(at("object")) { // that its file could not be read
			c.fail(at("object"), "%s: its bytes are missing: they travel in the request", o.Name)
		}
		return nil
	}
	// What its maps take counts with the rest.
	object, err := nic.ReadObject(o.Name, o.Code, math.MaxInt64)
	if err != nil {
		for _, err := range spin.Flatten(err) {
			c.fail(at("object"), "%v", err)
		}
		return nil
	}
	return object
}

// checkKernel checks a context all of whose handlers are in eBPF, after readKernel. It returns nil
// if anything is wrong, or was before.
func (b *contextPlan) checkKernel(c *checker, path string, env *surroundings, wrong int) *contextPlan {
	doc := &b.doc
	at := func(key string) string { return join(path, key) }
	if b.cpus == 0 {
		return nil // told
	}
	cpus := b.cpus
	b.hpus = cpus
	b.env = handlers.Env{HPUs: cpus, Messages: nic.DefaultMessages, Memory: hostq.Element}
	k := b.spec.Kernel
	twin := b.readHandlers(c, at)
	messages := k.Object != nil && k.Object.Messages()
	if messages {
		b.checkWindows(c, at, env)
		b.checkQueue(c, at)
		b.wantQueue()
		if doc.Attach != nil {
			b.attach = checkWho(c, at("attach"), doc.Attach)
		}
	} else if k.Object != nil {
		// Of these the NIC knows nothing.
		if doc.Attach != nil {
			c.fail(at("attach"), "there is nothing to attach to: handlers in eBPF for packets have neither windows nor a queue")
		}
		if doc.Activate == atAttach {
			c.fail(at("activate"), "nobody attaches to handlers in eBPF for packets: want start or manual")
		}
	}
	if k.Object != nil {
		memory, perHPU := k.Object.MemoryFor(int64(doc.Memory), int64(doc.HPUMemory))
		b.checkMemory(c, at, env, memory, perHPU)
	}
	b.readRulesets(c, at, ofMessages(k.Object, doc, twin))
	b.readScheduling(c, at, nil)
	b.timer = time.Duration(doc.Timer)
	if k.Object != nil {
		b.refuse(c, at)
		b.judge(c, at, nil)
		b.reserve = b.ofObject()
	}
	if messages && len(c.problems) == wrong && !slices.Contains(k.Object.Handlers(), "payload") {
		who := "handlers in eBPF without a payload handler"
		if doc.Handler != "" {
			who = "handler " + doc.Handler
		}
		b.needsWindow(c, at, who)
	}
	b.checkActivate(c, at, b.queue != nil)
	if len(c.problems) > wrong {
		return nil
	}
	if messages {
		b.hintWindows()
	}
	if b.charge() > int64(env.limits.Memory) {
		b.tooLarge(c, path, env, "")
		return nil
	}
	return b
}

// wantQueue has a context of messages in the kernel have a queue if an application has
// something of it: it would attach, and never hear of a message.
func (b *contextPlan) wantQueue() {
	if b.queue == nil && b.spec.Kernel.Object.Messages() && (len(b.windows) > 0 || b.doc.Attach != nil) {
		b.setQueue(&control.Queue{})
	}
}

// hintWindows tells of messages that do not go where the order of the windows says, and of windows that are used and
// are not there.
func (b *contextPlan) hintWindows() {
	if b.spec.Kernel.Object.UsesWindows() && len(b.windows) == 0 {
		b.hints = append(b.hints, problem{path: "windows", msg: `the handlers use windows, and there is none, so that messages fail where they do: add one, such as "windows: [{name: in, size: 64MiB}]"`})
	}
	to := slices.IndexFunc(b.windows, func(w windowUse) bool { return w.rights&spin.Write != 0 })
	if b.spec.Kernel.Object.Deposits() && to > 0 {
		b.hints = append(b.hints, problem{path: "windows", msg: fmt.Sprintf(
			`messages go to %s, the first that handlers may write, and not to %s: put it first, or give %[2]s "rights: rw"`, b.windows[to].name, b.windows[0].name)})
	}
}

// ofMessages returns the set that says what a context's rulesets are if it names none. Messages
// are those of SLMP if nobody says otherwise.
func ofMessages(o *nic.Object, doc *control.Context, set *handlers.Set) *handlers.Set {
	if o == nil || !o.Messages() || doc.Format != "" && doc.Format != "slmp" || set != nil && len(set.Rulesets) > 0 {
		return set
	}
	all := handlers.Set{}
	if set != nil {
		all = *set
	}
	all.Rulesets = []matcher.Ruleset{matcher.SLMP()}
	return &all
}

// refuse says which of the context's keys mean nothing in the kernel, also those whose value
// is what a NIC takes for left out, such as `policy: message`.
func (b *contextPlan) refuse(c *checker, at func(string) string) {
	for _, p := range nic.KernelRefuses(b.spec.Kernel.Object) {
		if has(&b.doc, p.Path) && !c.told(at(p.Path)) {
			c.fail(at(p.Path), "%v", p.Err)
		}
	}
}

// has tells whether a context says something for a key.
func has(doc *control.Context, key string) bool {
	v := reflect.ValueOf(doc).Elem()
	for i := range v.NumField() {
		if name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ","); name == key {
			f := v.Field(i)
			return !f.IsZero() && (f.Kind() != reflect.Slice || f.Len() > 0)
		}
	}
	return false // the NIC knows more than a file may say
}

// ofObject returns how many bytes the object's maps, counters and messages take.
func (b *contextPlan) ofObject() int64 {
	o := b.spec.Kernel.Object
	n := o.Memory() + int64(b.cpus)<<10
	if o.Messages() {
		if messages, err := nic.MessagesMemory(o, b.doc.Messages, b.doc.Segments); err == nil { // else told by the NIC
			n += messages
		}
	}
	return n
}

// readHandlers reads which handlers a context in the kernel has: those of an object file, which
// was read, or built-in ones, with the default rulesets of the set in Go whose twin they are.
func (b *contextPlan) readHandlers(c *checker, at func(string) string) (twin *handlers.Set) {
	doc, k := &b.doc, b.spec.Kernel
	k.Parameters = doc.Params
	var err error
	switch {
	case doc.Object != nil && doc.Handler != "" && k.Object != nil: // else it may be one that does
		c.fail(at("object"), "there is a handler, too: want only one of them, or an object that hands messages over")
	case doc.Object != nil: // was read, or told
	case doc.Handler == "":
		c.fail(at("handler"), "is missing: want one of %s, or an object", nic.BuiltinObjects())
	default:
		if k.Object, err = nic.BuiltinObject(doc.Handler); err != nil {
			c.fail(at("handler"), "%v", err)
			break
		}
		reg, ok := handlers.Lookup(doc.Handler)
		if !ok {
			break // it has no twin
		}
		// The twin takes all parameters, and those that its rulesets are made of the object
		// does not know.
		b.factory = reg.New
		set, err := b.makeSet(b.env)
		if err != nil {
			c.params(at("params"), doc.Handler, err)
			k.Parameters = nil // told
			break
		}
		twin = &handlers.Set{Rulesets: set.Rulesets}
		k.Parameters = map[string]any{}
		for _, p := range k.Object.Parameters() {
			if v, ok := doc.Params[p.Name]; ok {
				k.Parameters[p.Name] = v
			}
		}
	}
	return twin
}

// onHPUs tells whether HPUs have packets of the context.
func (b *contextPlan) onHPUs() bool { return b.spec.Kernel == nil || b.maps > 0 }

// kernelSet is what a context in the kernel has for a set: nothing but what its object's
// maps take.
func (b *contextPlan) kernelSet() *handlers.Set {
	return &handlers.Set{Handlers: hpu.Handlers{}, Reserved: map[string]int64{"maps": b.reserve}}
}
