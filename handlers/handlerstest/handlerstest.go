// SPDX-License-Identifier: Apache-2.0

// Package handlerstest runs the handlers of an execution context in a test: without a NIC,
// without privileges, and without waiting for anything but the handlers.
//
//	func TestEcho(t *testing.T) {
//		n := handlerstest.New(t, handlerstest.Config{
//			Handlers: hpu.Handlers{Payload: echo},
//			Rulesets: []matcher.Ruleset{matcher.UDPPort(7)},
//		})
//		out := n.Packet(handlerstest.UDP(handlerstest.Peer(4000), handlerstest.Here(7), []byte("hello")))
//		if out.Code() != spin.Success || len(out.Sent) != 1 { ... }
//	}
//
// Package hpu itself runs the handlers, on rings whose other end is the test. Package
// matcher's reference matches packets, as the XDP program does. The application is the
// test, see [NIC.Answer].
//
// There is one worker, whatever the number of HPUs, so handlers run one after the
// other, and a test does the same each time. Methods of a [NIC] must be called by the
// test's goroutine, and return when everything they started is done. Handlers run on a
// thread of the engine: use t.Error in them, because t.Fatal ends that thread, which the
// engine notices only after Config.Limit.
package handlerstest

import (
	"cmp"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// Config describes the context under test. Only Handlers is required.
type Config struct {
	hpu.Handlers
	Rulesets []matcher.Ruleset // which packets match. Defaults to matcher.MatchAll
	Format   *matcher.Format   // of messages. Defaults to that of the rulesets, or to `packet`
	HPUs     int               // Defaults to 1

	// For formats with messages.
	State     int               // bytes of state for each message
	Initial   []byte            // what the state starts with
	Binder    hpu.Binder        // Defaults to the start of the first window for all messages
	Protocol  hpu.Protocol      // Defaults to SLMP for the formats slmp and slmp6
	Checksums hpu.Checksums     // Defaults to hpu.VerifyComplete
	Limits    mpq.Config        // of messages: how many, how long, and how incomplete ones end
	Sequence  uint32            // packets that start in the same block of this many bytes stay on one HPU. Defaults to whole messages
	VHPUs     int               // with Sequence: virtual HPUs that the blocks go to in turn. Defaults to HPUs
	Windows   []hpu.NamedWindow // such as {"in", make(hpu.Memory, 4096)}

	Memory    []byte        // HPU memory of the context
	HPUMemory int           // bytes of each HPU
	Queue     bool          // there is an application, see NIC.Answer. It has no counting events
	Host      hpu.Host      // Optional: another application than the test, such as a hostq.Pair of one lane
	Requests  int           // how many fit into the ring to it. Defaults to hostq.DefaultRequests
	Full      hpu.Full      // what happens when that ring is full
	Resolver  spin.Resolver // Defaults to one that resolves all IPv4 addresses, see Hop

	Buffer int           // bytes of a frame in each of its buffers. Defaults to all that fit
	TxRing int           // frames that a batch can send. Defaults to 256
	Limit  time.Duration // how long a handler may run. Defaults to 10 s
	Clock  func() int64  // the time of messages and handlers, in ns; called on any goroutine. Defaults to CLOCK_MONOTONIC
}

// Of returns the configuration of a set, with all that it needs: application, state, memory
// and scheduling. The test sets what a context's configuration would add, such as windows.
func Of(set *handlers.Set) Config {
	return Config{
		Handlers: set.Handlers, Rulesets: set.Rulesets, Queue: set.Queue, State: set.State, Initial: set.Initial,
		Memory: make([]byte, set.Memory), HPUMemory: set.HPUMemory, Sequence: set.Sequence, VHPUs: set.VHPUs,
	}
}

// A NIC is a context with handlers under test.
type NIC struct {
	t      testing.TB
	cfg    Config
	wire   *wire
	pool   *hpu.Pool
	ctx    *hpu.Context
	table  *matcher.Table
	app    *application // nil without Queue
	answer func(Request) Answer
	task   func(*hpu.Task) error
	peers  neighbours
	next   int // HPU of the next packet that has no message

	mu   sync.Mutex // of out, which the worker writes too
	out  Outcome
	over bool // the test has ended
}

// An Outcome is what happened because of what a test did.
type Outcome struct {
	Verdicts []matcher.Verdict   // of the packets; those not delivered went to the Linux stack
	Calls    []Call              // of handlers, in order, without continuations, see NIC.Stats
	Sent     [][]byte            // frames, in order: those of handlers, and acknowledgements
	Stack    [][]byte            // packets that handlers handed to the Linux stack
	Messages []spin.MessageEvent // ends and failures of messages
	Faults   []spin.Fault        // what went wrong in handlers
	Requests []Request           // that the application got, answered or not
	Log      []string            // lines of Task.Logf
}

// A Call is a handler that ran.
type Call struct {
	Handler string // "header", "payload", "completion", "init", "timer"
	HPU     int
	Code    spin.Code // spin.Fail if it panicked
	Panic   any
}

// Code returns what the last handler returned, or -1 if none ran. It does not include what
// continuations returned, see NIC.Stats.
func (o *Outcome) Code() spin.Code {
	if len(o.Calls) == 0 {
		return -1
	}
	return o.Calls[len(o.Calls)-1].Code
}

// New installs the context on a NIC of its own and runs its init handler. If that fails,
// the test ends. The NIC is closed when the test ends; packets that handlers have kept
// and not released by then are errors.
func New(t testing.TB, cfg Config) *NIC {
	t.Helper()
	n := &NIC{t: t, cfg: cfg, peers: neighbours{known: map[netip.Addr]bool{}}}
	if err := n.open(); err != nil {
		t.Fatalf("handlerstest: %v", err)
	}
	n.peers.answer() // what Init has asked for
	return n
}

const contextID = 1

func (n *NIC) open() (err error) {
	cfg := &n.cfg
	cfg.HPUs = cmp.Or(cfg.HPUs, 1)
	cfg.TxRing = cmp.Or(cfg.TxRing, 256)
	cfg.Limit = cmp.Or(cfg.Limit, 10*time.Second)
	cfg.Requests = cmp.Or(cfg.Requests, hostq.DefaultRequests)
	cfg.VHPUs = cmp.Or(cfg.VHPUs, cfg.HPUs)
	if cfg.HPUs < 1 || cfg.HPUs > bpf.MaxHPUs {
		return fmt.Errorf("%d HPUs: want 1 to %d", cfg.HPUs, bpf.MaxHPUs)
	}
	if err := n.match(); err != nil {
		return err
	}
	if n.wire, err = newWire(cfg.HPUs, cfg.TxRing); err != nil {
		return err
	}
	cfg.Buffer = cmp.Or(cfg.Buffer, n.wire.room())
	if cfg.Buffer < 64 || cfg.Buffer > n.wire.room() {
		n.wire.close()
		return fmt.Errorf("buffers of %d bytes: want 64 to %d", cfg.Buffer, n.wire.room())
	}
	queue := hpu.Queue{Frames: n.wire, Shared: n.wire.queue}
	for _, r := range n.wire.rings {
		queue.Rings = append(queue.Rings, r)
	}
	n.pool, err = hpu.New(hpu.Config{
		Memory: n.wire.mem, Queues: []hpu.Queue{queue}, Share: n.wire.share, Buckets: make([]uint64, 1), Spare: n.wire.spare(),
		Stack: stack{n}, Workers: 1, Wait: hpu.Sleep, Limit: cfg.Limit, Clock: cfg.Clock, Faults: -1,
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)), // Faults has it all
	})
	if err != nil {
		n.wire.close()
		return err
	}
	n.t.Cleanup(n.close)
	if err := n.install(); err != nil {
		return err
	}
	if cfg.Init == nil {
		return nil
	}
	return n.run(func(t *hpu.Task) error {
		err := error(nil)
		n.call("init", t, func() (code spin.Code) {
			if err = cfg.Init(t); err != nil {
				code = spin.Fail
			}
			return code
		})
		return err
	})
}

// match makes the matching table.
func (n *NIC) match() error {
	cfg := &n.cfg
	if len(cfg.Rulesets) == 0 {
		cfg.Rulesets = []matcher.Ruleset{matcher.MatchAll()}
	}
	if cfg.Format == nil {
		cfg.Format = matcher.FormatByName(cmp.Or(cfg.Rulesets[0].Format, "packet"))
		if cfg.Format == nil {
			return fmt.Errorf("no message format %q: want %s", cfg.Rulesets[0].Format, strings.Join(matcher.FormatNames(), ", "))
		}
	}
	n.table = &matcher.Table{
		Local:   &matcher.Local{MAC: HereMAC, Addrs: []netip.Addr{HereAddr}},
		Entries: map[int]matcher.Entry{},
	}
	for i, rs := range cfg.Rulesets {
		n.table.Entries[i] = matcher.Entry{Ruleset: rs, Context: contextID, Format: cfg.Format}
	}
	return n.table.Validate()
}

func (n *NIC) install() (err error) {
	cfg := &n.cfg
	f := cfg.Format
	h := n.watched()
	if !f.Ends() {
		if len(f.Key) > 0 && (h.Header != nil || h.Completion != nil) {
			return fmt.Errorf("messages of format %s never end: there can be no header and no completion handler", f.Name)
		}
		n.ctx = hpu.NewContext(contextID, "test", h, bpf.Range{})
	} else {
		mc := hpu.MessageConfig{
			Config: cfg.Limits,
			Format: f, Protocol: cfg.Protocol, Binder: cfg.Binder, Default: spin.Binding{Events: events{n}},
			State: cfg.State, Initial: cfg.Initial, Checksums: cfg.Checksums, Shared: cfg.Sequence > 0,
		}
		if len(cfg.Windows) > 0 {
			mc.Default.Window = cfg.Windows[0].Window
		}
		if mc.Protocol == nil && (f.Name == "slmp" || f.Name == "slmp6") {
			mc.Protocol = slmp.Protocol{}
		}
		if n.ctx, err = hpu.NewMessageContext(contextID, "test", h, bpf.Range{}, math.MaxUint64, mc); err != nil {
			return err
		}
	}
	res := hpu.Resources{Windows: cfg.Windows, Full: cfg.Full, Resolver: cfg.Resolver, Log: logSink{n}}
	if res.Memory, err = hostq.WindowOn(cfg.Memory, spin.Read|spin.Write); err != nil {
		return err
	}
	if res.PerHPU, err = hostq.WindowOn(make([]byte, cfg.HPUs*cfg.HPUMemory), spin.Read|spin.Write); err != nil {
		return err
	}
	res.Host = cfg.Host
	if cfg.Queue && cfg.Host == nil {
		n.app = &application{w: n.wire, slots: cfg.Requests, asked: map[uint64]asked{}}
		res.Host = n.app
	}
	if res.Resolver == nil {
		res.Resolver = &n.peers
	}
	if err := n.ctx.SetResources(res); err != nil {
		return err
	}
	return n.pool.Install(n.ctx)
}

// watched returns the context's handlers so that their calls are noted. The timer handler
// is not among them: it runs when the test calls Tick.
func (n *NIC) watched() (h hpu.Handlers) {
	if f := n.cfg.Header; f != nil {
		h.Header = func(h *hpu.HER) spin.Code {
			return n.call("header", &h.Task, func() spin.Code { return f(h) })
		}
	}
	if f := n.cfg.Payload; f != nil {
		h.Payload = func(h *hpu.HER) spin.Code {
			return n.call("payload", &h.Task, func() spin.Code { return f(h) })
		}
	}
	if f := n.cfg.Completion; f != nil {
		h.Completion = func(c *hpu.Completion) spin.Code {
			return n.call("completion", &c.Task, func() spin.Code { return f(c) })
		}
	}
	h.Init = func(t *hpu.Task) error { return n.task(t) }
	return h
}

// call calls a handler, and notes what it returns.
func (n *NIC) call(name string, t *hpu.Task, f func() spin.Code) (code spin.Code) {
	c := Call{Handler: name, HPU: t.HPU(), Code: spin.Fail}
	returned := false
	defer func() {
		if !returned {
			c.Panic = recover()
		}
		n.note(func(o *Outcome) { o.Calls = append(o.Calls, c) })
		if c.Panic != nil {
			panic(c.Panic) // for the pool to contain
		}
	}()
	c.Code = f()
	returned = true
	return c.Code
}

// note writes to the outcome, until the test has ended.
func (n *NIC) note(f func(*Outcome)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.over {
		f(&n.out)
	}
}

// run runs f as a handler on HPU 0.
func (n *NIC) run(f func(*hpu.Task) error) error {
	n.task = f
	return n.during(func() error { return n.pool.Init(n.ctx) })
}

// Packet receives packets, all at once, and returns the outcome. A packet of a message
// goes to the HPU of that message, or with Config.Sequence to that of its sequence; other
// packets go to one HPU after the other.
func (n *NIC) Packet(frames ...[]byte) *Outcome {
	n.t.Helper()
	n.wire.mu.Lock()
	var verdicts []matcher.Verdict
	for i, f := range frames {
		v := n.table.Match(f)
		verdicts = append(verdicts, v)
		if v.Action != matcher.Deliver {
			continue
		}
		at, hash := n.next%n.cfg.HPUs, n.hash(&v)
		if v.NKey > 0 {
			at = int(hash % uint32(n.cfg.HPUs))
		} else {
			n.next++
		}
		if !n.wire.receive(at, hash, f, &v, contextID, n.cfg.Buffer) {
			n.wire.mu.Unlock()
			n.t.Fatalf("handlerstest: no frame is left for packet %d of %d: handlers have kept %d packets", i+1, len(frames), n.pool.Kept())
		}
	}
	n.wire.deliver()
	n.wire.mu.Unlock()
	n.note(func(o *Outcome) { o.Verdicts = verdicts })
	return n.Settle()
}

// hash stands for the XDP program's hash of a message's key and virtual HPU. It need not be
// the same function.
func (n *NIC) hash(v *matcher.Verdict) uint32 {
	h := uint32(2166136261)
	for _, k := range v.Key[:v.NKey] {
		h = (h ^ k) * 16777619
	}
	if n.cfg.Sequence > 0 {
		h += v.Offset / n.cfg.Sequence % uint32(n.cfg.VHPUs) * 0x9e3779b1
	}
	return h
}

// Tick runs the timer handler once.
func (n *NIC) Tick() *Outcome {
	n.t.Helper()
	if n.cfg.Timer == nil {
		n.t.Fatal("handlerstest: Tick: there is no timer handler")
	}
	_ = n.run(func(t *hpu.Task) error { // the handler's code is in the outcome
		n.call("timer", t, func() spin.Code { return n.cfg.Timer(t) })
		return nil
	})
	out := n.Settle()
	if c := out.Code(); c == spin.Fail || c == spin.Segv {
		out.Sent = nil // it ran as an init handler, whose sends are not taken back
	}
	return out
}

// Trigger runs the handlers for a host message.
func (n *NIC) Trigger(tr hpu.Trigger) *Outcome {
	n.t.Helper()
	if err := n.during(func() error { return n.pool.Trigger(n.ctx, tr) }); err != nil {
		n.t.Fatalf("handlerstest: trigger: %v", err)
	}
	return n.Settle()
}

// Answer makes f the application: it answers requests of handlers, including those that
// wait already, from the next call of another method on. f is called on the test's
// goroutine; what it returns for a request without Reply is ignored. With nil, requests
// wait.
func (n *NIC) Answer(f func(Request) Answer) {
	n.t.Helper()
	if n.app == nil {
		n.t.Fatal("handlerstest: Answer: the test is not the application, see Config.Queue")
	}
	n.answer = f
}

// Detach ends the application: requests fail, including those that wait.
func (n *NIC) Detach() *Outcome {
	n.t.Helper()
	if n.app == nil {
		n.t.Fatal("handlerstest: Detach: the test is not the application, see Config.Queue")
	}
	n.app.Detach()
	return n.Settle()
}

// Remove removes the context, as a NIC does: open messages end.
func (n *NIC) Remove() *Outcome {
	n.t.Helper()
	if err := n.during(func() error { return n.pool.Drain(n.ctx, n.cfg.Limit) }); err != nil {
		n.t.Errorf("handlerstest: %v", err)
	}
	return n.Settle()
}

// Settle waits until nothing more happens, and returns what has happened since the last
// Outcome. It is for what a test starts by itself, such as the release of a kept packet.
func (n *NIC) Settle() *Outcome {
	n.t.Helper()
	for !n.wire.settle(n.asked) {
		n.serve()
	}
	n.peers.answer()
	sent := n.wire.take()
	n.mu.Lock()
	defer n.mu.Unlock()
	out := n.out
	n.out = Outcome{}
	out.Sent = sent
	if n.app != nil {
		out.Requests = n.app.news()
	}
	for {
		select {
		case e := <-n.pool.Events():
			out.Faults = append(out.Faults, e)
			continue
		default:
		}
		return &out
	}
}

// during runs f on another goroutine, and serves requests meanwhile.
func (n *NIC) during(f func() error) (err error) {
	w := n.wire
	over := false
	go func() {
		e := f()
		w.mu.Lock()
		defer w.mu.Unlock()
		err, over = e, true
		w.quiet.Broadcast()
	}()
	for {
		w.mu.Lock()
		for !over && !n.asked() {
			w.quiet.Wait()
		}
		ended := over
		w.mu.Unlock()
		if ended {
			return err
		}
		n.serve()
	}
}

// asked reports whether there are requests for Answer's function. The caller has the
// wire's lock.
func (n *NIC) asked() bool { return n.answer != nil && n.app != nil && len(n.app.waiting) > 0 }

// serve has Answer's function answer all requests.
func (n *NIC) serve() {
	for n.answer != nil {
		r, ok := n.app.take()
		if !ok {
			return
		}
		n.app.respond(r.id, n.answer(r.Request))
	}
}

// Stats returns the context's statistics, user counters included. Dropped and Failed
// also count what continuations returned.
func (n *NIC) Stats() spin.ContextStats { return n.ctx.Stats() }

// MessageStats returns the statistics of the context's messages; zero if it has none.
func (n *NIC) MessageStats() spin.MessageStats {
	s, _ := n.ctx.Messages()
	return s
}

func (n *NIC) close() {
	kept := n.pool.Kept()
	n.pool.Close()
	n.mu.Lock()
	n.over = true
	n.mu.Unlock()
	n.wire.close()
	if kept > 0 {
		n.t.Errorf("handlerstest: handlers have kept %d packets and not released them", kept)
	}
}
