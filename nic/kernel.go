// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/regular"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// A Kernel has a context's packets processed in the kernel, by handlers in eBPF: where a
// packet arrives, see Hook, on the CPU that received it, and answered from there.
//
// Each life of a context has a program and maps of its own. Its HPUs are the CPUs of the
// machine, so Resources.PerHPU is cut in as many parts as there can be CPUs.
type Kernel struct {
	Object     *Object        // Required
	Parameters map[string]any // constants of the object that are not what it says
	Segments   int            // most of a message, for handlers of messages. Defaults to 65536
}

// An Object has handlers in eBPF, see bpf/include/xspin_handler.h. Contexts may share it.
type Object = loader.Object

// ObjectMemory is how much memory the maps of an object may take that LoadObject reads.
const ObjectMemory = 64 << 20

// MaxObjectFile is how many bytes an object file may have.
const MaxObjectFile = loader.MaxObjectFile

// LoadObject reads an object file, and checks it. What the verifier has against it is
// told when a context is installed.
func LoadObject(file string) (*Object, error) {
	b, err := regular.Read(file, MaxObjectFile)
	if err != nil {
		return nil, fmt.Errorf("load object: %w", err)
	}
	return ReadObject(file, b, ObjectMemory)
}

// ReadObject is LoadObject for bytes that were read, with a name for errors. The maps of
// each context that has the object may take limit bytes.
func ReadObject(name string, file []byte, limit int64) (*Object, error) {
	return loader.ReadObject(name, file, limit)
}

// BuiltinObjects lists the names of built-in objects.
func BuiltinObjects() string { return strings.Join(slices.Sorted(maps.Keys(bpf.Handlers)), ", ") }

// KernelHPUs returns how many HPUs a context in the kernel has: the CPUs that there can be.
func KernelHPUs() (int, error) { return loader.PossibleCPUs() }

// BuiltinObject returns the object of built-in handlers: "count", "deposit", "echo-icmp" or
// "echo-udp", each the twin of the handlers in Go of that name; or "noop", which drops all, or
// "noop-messages", which does for formats whose messages end.
func BuiltinObject(name string) (*Object, error) { return loader.BuiltinObject(name) }

// A kernelRule is about a setting that means nothing for some contexts in the kernel.
type kernelRule struct {
	key string // of a configuration file; of what that does not have, the field's name
	is  func(*ContextSpec) bool
	// Why it is refused: of handlers of packets, of messages, and of messages that they may
	// hand over. "": it has a meaning.
	packets, messages, handing string
}

// kernelRules are about all fields of a ContextSpec that not every context has a use for.
var kernelRules = func() []kernelRule {
	const (
		hpus = "it is about HPUs, and handlers in eBPF run in the kernel, where packets arrive"
		none = "handlers in eBPF for packets have none"
		each = none + ": each packet is a message, or none"
		host = "a triggered context runs on HPUs: handlers in eBPF are called by packets"
		ways = "handlers in eBPF abandon incomplete messages: want none of the other ways"
		bind = "handlers in eBPF put messages into the context's window: a binder is for handlers in Go"
		acks = "handlers in eBPF acknowledge messages of format slmp, in its protocol, and no others"
		tick = "handlers in eBPF have none"
		find = "handlers in eBPF answer whoever has sent, and look up nobody"
	)
	return []kernelRule{
		{"triggered", func(s *ContextSpec) bool { return s.HostActivated }, host, host, host},
		{"policy", func(s *ContextSpec) bool { return s.Policy != ByMessage }, hpus, hpus, ""},
		{"sequence", func(s *ContextSpec) bool { return s.Sequence != 0 }, hpus, hpus, ""},
		{"vhpus", func(s *ContextSpec) bool { return s.VHPUs != 0 }, hpus, hpus, ""},
		{"hpus", func(s *ContextSpec) bool { return s.CoreMask != 0 }, hpus, hpus, ""},
		{"credits", func(s *ContextSpec) bool { return s.Credits != 0 }, hpus, hpus, ""},
		{"share", func(s *ContextSpec) bool { return s.Share != 0 }, hpus, hpus, ""},
		{"overload", func(s *ContextSpec) bool { return s.Overload != OverloadDrops }, hpus, hpus, ""},
		{"timestamp", func(s *ContextSpec) bool { return s.Timestamp }, hpus, hpus, ""},
		{"messages", func(s *ContextSpec) bool { return s.Messages != 0 }, each, "", ""},
		{"segments", func(s *ContextSpec) bool { return s.Kernel.Segments != 0 }, each, "", ""},
		{"timeout", func(s *ContextSpec) bool { return s.Timeout != 0 }, none, "", ""},
		{"remember", func(s *ContextSpec) bool { return s.Remember != 0 }, none, "", ""},
		{"windows", func(s *ContextSpec) bool { return s.Window != nil || len(s.Resources.Windows) > 0 }, none + ": packets need no place", "", ""},
		{"binder", func(s *ContextSpec) bool { return s.Binder != nil }, none + ": packets need no place", bind, bind},
		{"queue", func(s *ContextSpec) bool { return s.Events != nil || s.Resources.Host != nil }, none + ": they count, see xspin_count", "", ""},
		{"queue.full", func(s *ContextSpec) bool { return s.Resources.Full != hpu.FullFails }, none, "", ""},
		{"log", func(s *ContextSpec) bool { return s.Resources.Log != nil }, none + ": they count, see xspin_count", "", ""},
		{"protocol", foreignProtocol, "nothing is acknowledged: " + none, acks, acks},
		{"state", func(s *ContextSpec) bool { return s.State != 0 || len(s.InitialState) > 0 }, none + ": want memory, which all packets have", "handlers in eBPF say themselves how much they have: XSPIN_STATE", ""},
		{"incomplete", func(s *ContextSpec) bool { return s.Incomplete != mpq.Abandon || s.Linger != 0 }, none + ": a message of one packet is complete", ways, ways},
		{"held", func(s *ContextSpec) bool { return !s.HostActivated && s.Held != 0 }, "no packet waits for another: " + none, "", ""},
		{"held", func(s *ContextSpec) bool { return s.Held > 0 }, "", "no packet waits in the kernel: it comes again", ""},
		{"tracking", func(s *ContextSpec) bool { return s.Memory != 0 }, "nothing comes out of order: " + none + ", and HPU memory is Resources.Memory", "handlers in eBPF have a bit for each segment that a message may have: want Kernel.Segments, and HPU memory is Resources.Memory", ""},
		{"checksums", func(s *ContextSpec) bool { return !s.HostActivated && s.Checksums != hpu.VerifyComplete }, "packets come to handlers in eBPF as they are: nothing is verified", "", ""},
		{"hpu_memory", func(s *ContextSpec) bool { return s.Resources.PerHPU != nil }, "", "", "the object hands messages over, and CPUs and HPUs would have different parts of it: want memory, which all have"},
		{"timer", func(s *ContextSpec) bool { return s.Resources.Timer != 0 }, tick, tick, ""},
		{"resolver", func(s *ContextSpec) bool { return s.Resources.Resolver != nil }, find, find, ""},
	}
}()

// foreignProtocol tells whether a context has a protocol that is not its format's.
func foreignProtocol(s *ContextSpec) bool {
	_, is := s.Protocol.(slmp.Protocol)
	return !s.HostActivated && s.Protocol != nil && !(is && s.isFormat("slmp"))
}

// why returns why a setting is refused for contexts with an object, "" if it is not.
func (r *kernelRule) why(o *Object) string {
	switch {
	case o == nil || !o.Messages():
		return r.packets
	case o.HandsOver():
		return r.handing
	}
	return r.messages
}

// KernelRefuses returns the settings that mean nothing for contexts in the kernel with this
// object, by the keys that a configuration file has for them, and why. Resolve refuses those
// that a spec has; somebody who reads a file also sees those that say what would be so anyway.
func KernelRefuses(o *Object) (all spin.Problems) {
	for i := range kernelRules {
		if why := kernelRules[i].why(o); why != "" {
			all.Add(kernelRules[i].key, "%s", why)
		}
	}
	return all
}

// resolveKernel judges what a context in the kernel has, and has not.
func (s *ContextSpec) resolveKernel(wrong *spin.Problems) {
	h, r, hands := &s.Handlers, &s.Resources, s.handsOver()
	for i := range kernelRules {
		rule := &kernelRules[i]
		if why := rule.why(s.Kernel.Object); why != "" && rule.is(s) {
			wrong.Add(rule.key, "%s", why)
		}
	}
	if s.Kernel.Object != nil && s.Kernel.Object.Messages() {
		s.resolveMessages(wrong)
	}
	if !hands {
		if h.Payload != nil || h.Header != nil || h.Completion != nil || h.Init != nil || h.Timer != nil {
			wrong.Add("handler", "there are handlers in Go and in eBPF: want only one of them, or an object that hands messages over")
		}
		rest := *r
		rest.Timer = 0 // is told
		*wrong = append(*wrong, rest.Check(&hpu.Handlers{})...)
		s.Policy, s.Share = ByPacket, 1
	}
	for _, m := range []struct {
		key string
		w   *hostq.Window
	}{{"memory", r.Memory}, {"hpu_memory", r.PerHPU}} {
		if m.w == nil {
			continue
		}
		const element = 1 << 20 // of its map
		switch mem, off := m.w.Memory(); {
		case mem == nil || off != 0:
			wrong.Add(m.key, "want a window on a hostq.Memory, from its beginning: handlers in eBPF are given its map")
		case int64(mem.Map().MaxEntries()) > (m.w.Size()+element-1)/element || m.w.Rights() != spin.All:
			wrong.Add(m.key, "want a window with all rights on all of a hostq.Memory: handlers in eBPF reach the whole MiB of its map, %d, and this window has %d bytes of it", mem.Map().MaxEntries(), m.w.Size())
		}
	}
	if s.Kernel.Object == nil {
		wrong.Add("object", "there is none")
		return
	}
	wrong.AddParams(s.Kernel.Object.CheckParameters(s.Kernel.Parameters))
	switch {
	case s.Format == nil: // told
		return
	case s.eom() == nil:
		wrong.Add("rulesets", "their EOM rules differ, and handlers in eBPF have one compiled in: make a context of each")
		return
	}
	if err := s.Kernel.Object.CheckFormat(s.Format); err != nil {
		wrong.Add("format", "%w", err)
	}
}

// eom returns what all rulesets say of where messages end, nil if they differ.
func (s *ContextSpec) eom() *matcher.Rule {
	var all *matcher.Rule
	for i := range s.Rulesets {
		eom := s.Rulesets[i].EOM
		if eom == nil {
			eom = s.Format.EOM
		}
		if eom == nil {
			eom = &matcher.False
		}
		if all != nil && *all != *eom {
			return nil
		}
		all = eom
	}
	if all == nil {
		all = &matcher.False // without rulesets, which is told
	}
	return all
}

// frameOverhead is what Linux keeps in the page that a frame is in: XDP_PACKET_HEADROOM in front
// of it, and behind it a struct skb_shared_info, of 320 bytes in cache lines of 64. What is longer
// than the rest comes in several buffers, with veth; other drivers have much the same limit.
const (
	frameOverhead = 256 + 320
	ethernetLen   = 14
)

// warnings returns what keeps packets from a context as its interface is now.
func (n *NIC) warnings(c *Context) (all []string) {
	mtu, most := n.neigh.MTU(), os.Getpagesize()-frameOverhead
	if c.spec.Kernel != nil && c.hook == loader.XDP && mtu+ethernetLen > most {
		all = append(all, fmt.Sprintf("the MTU of %d lets frames come in several buffers: handlers in eBPF get those in one, of up to some %d bytes, and the others go to Linux, counted as oversize, where nobody may listen: lower the MTU to %d, or use handlers in Go", mtu, most, most-ethernetLen))
	}
	return all
}

// faultLook is how often a context in the kernel is asked whether handlers have failed.
const faultLook = time.Second

// kernelTier is the tier whose handlers are in eBPF. The program at their hook calls them, and
// nothing of theirs comes to user space but counters and events. A packet is handled when the
// program has run, so none is ever on its way.
type kernelTier struct {
	n        *NIC
	id       uint16
	spec     *ContextSpec
	handlers *loader.Handlers
	queue    eventQueue // where ends of messages go; nil: nowhere

	messages *kernelMessages // nil: the handlers are for packets

	stopped chan struct{} // closed by stop

	mu    sync.Mutex // guards what follows
	ended bool
	told  []uint64 // by CPU: failures that events have told of
	long  uint64   // segments beyond the last of a message that faults have told of
	lost  uint64   // events that faults have told of
}

// A loadFunc loads an object as Object.Load does.
type loadFunc func(*Object, loader.HandlersConfig) (*loader.Handlers, error)

// loadKernel shows a context's object to the kernel.
func (n *NIC) loadKernel(s *ContextSpec, hook loader.Hook) (*loader.Handlers, error) {
	k, cfg := s.Kernel, loader.HandlersConfig{Hook: hook, Format: s.Format, EOM: s.eom(), Parameters: s.Kernel.Parameters}
	shared, each := k.Object.UsesMemory()
	if w := s.Resources.Memory; w != nil {
		mem, _ := w.Memory()
		cfg.Memory, cfg.MemorySize = mem.Map(), w.Size()
	} else if shared {
		return nil, errors.New("its handlers call xspin_memory(), and there is no memory")
	}
	if w := s.Resources.PerHPU; w != nil {
		cpus, err := KernelHPUs()
		if err != nil {
			return nil, err
		}
		mem, _ := w.Memory()
		cfg.HPUMemory, cfg.HPUMemorySize = mem.Map(), w.Size()/int64(cpus)
	} else if each {
		return nil, errors.New("its handlers call xspin_hpu_memory(), and there is no memory of each HPU")
	}
	if k.Object.HandsOver() {
		if err := n.ingress.LoadUser(); err != nil {
			return nil, err
		}
	}
	if k.Object.Messages() {
		cfg.Messages = s.messagesConfig()
	}
	return n.load(k.Object, cfg)
}

func (t *kernelTier) install() (err error) {
	if err := t.n.ingress.SetHandlers(t.id, t.handlers); err != nil {
		return err
	}
	if t.spec.Kernel.Object.Messages() {
		if t.messages, err = t.startMessages(); err != nil {
			return errors.Join(err, t.n.ingress.ClearHandlers(t.id))
		}
	}
	t.stopped, t.told = make(chan struct{}), make([]uint64, len(t.handlers.CPUs()))
	go t.watch()
	return nil
}

func (t *kernelTier) arm() error { return nil }

// drain: the table without the context is published, and no packet is in its handlers. What
// they have said of messages is on its way to the application.
func (t *kernelTier) drain(d time.Duration) error {
	if t.messages == nil {
		return nil
	}
	return t.messages.drain(d)
}

func (t *kernelTier) stop(d time.Duration) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended {
		return nil
	}
	if err := t.n.ingress.ClearHandlers(t.id); err != nil {
		return err
	}
	t.ended = true
	close(t.stopped)
	if t.messages != nil {
		t.messages.stop(d)
	}
	t.report()
	return t.handlers.Close()
}

func (t *kernelTier) close(d time.Duration) {
	// Nothing comes any more, but a handler may still run.
	if err := t.n.ingress.Synchronize(); err != nil {
		time.Sleep(loader.MaxPacketTime)
	}
	_ = t.stop(d)
}

// watch reports handlers that failed, until the context is stopped.
func (t *kernelTier) watch() {
	tick := time.NewTicker(faultLook)
	defer tick.Stop()
	for {
		select {
		case <-t.stopped:
			return
		case <-tick.C:
		}
		t.mu.Lock()
		if !t.ended {
			t.report()
		}
		t.mu.Unlock()
	}
}

// report tells of what has gone wrong since the last time: of handlers that failed the last
// failure on each CPU, and how many there were before it; and of messages that are too long,
// which otherwise only end by their timeout.
func (t *kernelTier) report() {
	for cpu, s := range t.handlers.CPUs() {
		if s.Failed == t.told[cpu] {
			continue
		}
		more := s.Failed - t.told[cpu] - 1
		t.told[cpu] = s.Failed
		t.n.pool.Report(spin.Fault{
			Kind: spin.HandlerFailed, Context: t.id, Name: t.spec.Name, HPU: cpu, More: more,
			Detail: s.Fault.Detail,
		})
	}
	if t.messages == nil {
		return
	}
	if n := t.handlers.Tally().Lost + t.messages.lost.Load(); n > t.lost {
		t.n.pool.Report(spin.Fault{
			Kind: spin.EventsLost, Context: t.id, Name: t.spec.Name,
			Detail: fmt.Sprintf("%d messages ended and were not told: the application's queue of events was full. Complete ones are counted as failed, and not acknowledged", n-t.lost),
		})
		t.lost = n
	}
	if n := t.handlers.Tally().Dropped[spin.DropMemory]; n > t.long {
		t.n.pool.Report(spin.Fault{
			Kind: spin.MessageTooLong, Context: t.id, Name: t.spec.Name,
			Detail: fmt.Sprintf("dropped %d segments beyond the %d that a message may have: raise segments", n-t.long, loader.MostSegments(t.spec.Kernel.Segments)),
		})
		t.long = n
	}
}

// Stats tells what the handlers did. The time of one packet in 64 is taken: the histogram
// has those, and the sum is what all would have taken.
func (t *kernelTier) Stats() spin.ContextStats {
	s := t.handlers.Stats()
	if s.Timed > 0 {
		s.HandlerSum = time.Duration(float64(s.HandlerSum) / float64(s.Timed) * float64(s.Handled))
	}
	c := spin.ContextStats{
		Handled: s.Handled, Dropped: s.Dropped, Failed: s.Failed, Sent: s.Sent, ToStack: s.ToStack,
		HandlerTime: s.HandlerTime, HandlerSum: s.HandlerSum, User: s.User, Uncut: s.Uncut, Mixed: s.Mixed,
	}
	if t.messages != nil {
		m := t.handlers.Tally()
		c.Requests, c.Unasked = t.messages.requests.Load(), t.messages.unasked.Load()
		c.Headers, c.Completions, c.Acks, c.AckFull = m.Headers, m.Complete, m.Acks, m.Mute+t.messages.unsent.Load()
		c.HandedOver = m.Handed
		c.Stray, c.Corrupt, c.Unverified, c.EventsLost = m.Stray, m.Corrupt, m.Unverified, m.Lost+t.messages.lost.Load()
	}
	return c
}

// Packets implements perCPU.
func (t *kernelTier) Packets() (n []uint64) {
	for _, s := range t.handlers.CPUs() {
		n = append(n, s.Handled)
	}
	return n
}

// ownMaps implements mapped.
func (t *kernelTier) ownMaps() ([]spin.OwnMap, error) { return t.handlers.OwnMaps() }

// Messages tells what became of messages.
func (t *kernelTier) Messages() (spin.MessageStats, bool) {
	return t.handlers.Tally().MessageStats, t.messages != nil
}

func (t *kernelTier) hpuTime() time.Duration { return 0 }
func (t *kernelTier) Stopped() bool          { return false }
func (t *kernelTier) Stuck() int             { return 0 }
