// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/spin"
)

// HandlersConfig is what one life of a context sets in its object.
type HandlersConfig struct {
	Hook       Hook            // that the program is for
	Format     *matcher.Format // whose messages end if the handlers are for messages, else not: "packet", "flow"
	EOM        *matcher.Rule   // of the context's rulesets. Defaults to the format's
	Parameters map[string]any  // values as decoded from YAML or JSON

	// HPU memory, as package hostq makes it; nil if there is none. The maps stay the
	// caller's.
	Memory        *ebpf.Map
	MemorySize    int64
	HPUMemory     *ebpf.Map
	HPUMemorySize int64 // of each HPU: a divisor or a multiple of 1 MiB if there are several

	Messages MessagesConfig // for handlers of messages
}

// Handlers are an object in the kernel, for one life of a context: a program, which
// somebody calls, and its maps. Safe for concurrent use, except for Run.
type Handlers struct {
	hook Hook
	coll *ebpf.Collection
	prog *ebpf.Program
	rows []byte    // mapped
	user *ebpf.Map // of the program that takes messages to HPUs; nil: they hand nothing over

	messages *messages // nil: the handlers are for packets
	own      []spin.OwnMap

	mu    sync.Mutex     // guards what follows, and rows
	base  []HandlerStats // what was cleared, of each CPU
	final []HandlerStats // after Close: what had been counted

	finalTally MessageTally // the same

	last []HandlerStats // of Run
	out  []byte
}

// rowSize is the distance of the counters of two CPUs.
const rowSize = int(unsafe.Sizeof(bpf.HandlerCounters{}))

// Load loads the object for a life of a context. If the verifier refuses it, the error
// is a [*Rejection].
func (o *Object) Load(cfg HandlersConfig) (_ *Handlers, err error) {
	fail := func(err error) (*Handlers, error) { return nil, show(fmt.Errorf("load %s: %w", o.name, err)) }
	if err := needToRun("load " + o.name); err != nil {
		return nil, show(err)
	}
	cpus, err := PossibleCPUs()
	if err != nil {
		return fail(err)
	}
	constants, err := o.constants(&cfg, cpus)
	if err != nil {
		return fail(err)
	}
	spec, err := o.specOf(cfg.Hook)
	if err != nil {
		return fail(err)
	}
	spec = spec.Copy()
	if err := spec.Variables[bpf.HandlersConstants].Set(*constants); err != nil {
		return fail(err)
	}
	if err := o.setParameters(spec, cfg.Parameters); err != nil {
		return fail(err)
	}
	spec.Maps[bpf.HandlersCPU].MaxEntries = uint32(cpus)
	given := map[string]*ebpf.Map{bpf.HandlersShared: cfg.Memory, bpf.HandlersOwn: cfg.HPUMemory}
	if o.messages {
		if err := cfg.Messages.set(o, spec, given, cpus); err != nil {
			return fail(err)
		}
	}
	instead := map[string]*ebpf.Map{}
	for name, m := range given {
		switch s := spec.Maps[name]; {
		case s == nil: // not used
		case m == nil:
			// Never looked up: the code is switched off. Without its type, which has the
			// old size.
			s.ValueSize, s.Key, s.Value = 8, nil, nil
		default:
			s.MaxEntries = m.MaxEntries()
			// The load may outlive this call, and the caller's map.
			if instead[name], err = m.Clone(); err != nil {
				closeMaps(instead)
				return fail(err)
			}
		}
	}
	coll, err := within(loadTime, func() (*ebpf.Collection, error) {
		defer closeMaps(instead)
		return loadObject(spec, instead)
	})
	if err != nil {
		return fail(err)
	}
	h := &Handlers{hook: cfg.Hook, own: o.OwnMaps(), coll: coll, prog: coll.Programs[bpf.HandlersProgram], base: make([]HandlerStats, cpus)}
	h.user = coll.Maps[bpf.MessagesUser]
	h.rows, err = unix.Mmap(coll.Maps[bpf.HandlersCPU].FD(), 0, cpus*rowSize, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		coll.Close()
		return fail(fmt.Errorf("map the counters of %d CPUs: %w", cpus, err))
	}
	if o.messages {
		if h.messages, err = openMessages(coll, &cfg.Messages, cpus); err != nil {
			h.Close()
			return fail(err)
		}
	}
	if err := o.checkTime(h, &cfg); err != nil {
		h.Close()
		return fail(err)
	}
	return h, nil
}

func closeMaps(all map[string]*ebpf.Map) {
	for _, m := range all {
		m.Close()
	}
}

// loadTime is how long the kernel may take for an object. A verifier takes seconds for the
// longest loop that it follows. A variable for tests on machines where it takes longer.
var loadTime = time.Minute

// ErrNoAnswer is wrapped by the error of an object for which the kernel takes too long.
var ErrNoAnswer = errors.New("its verifier may have crashed; look at dmesg, and bound the handler's loops")

// within loads on a thread of its own, and waits for a limited time: when a verifier
// crashes, the kernel ends the thread inside of the system call, which never returns. What
// is loaded later is closed.
func within(limit time.Duration, load func() (*ebpf.Collection, error)) (*ebpf.Collection, error) {
	type answer struct {
		coll *ebpf.Collection
		err  error
	}
	answers := make(chan answer)
	late := make(chan struct{})
	go func() {
		coll, err := load()
		select {
		case answers <- answer{coll, err}:
		case <-late:
			if err == nil {
				coll.Close()
			}
		}
	}()
	timeout := time.NewTimer(limit)
	defer timeout.Stop()
	select {
	case a := <-answers:
		return a.coll, a.err
	case <-timeout.C:
		close(late)
		return nil, fmt.Errorf("the kernel has not answered for %g s: %w", limit.Seconds(), ErrNoAnswer)
	}
}

// loadObject loads without a log first: most objects need none, and that of an endless loop has millions of bytes.
func loadObject(spec *ebpf.CollectionSpec, instead map[string]*ebpf.Map) (*ebpf.Collection, error) {
	opts := ebpf.CollectionOptions{MapReplacements: instead, Programs: ebpf.ProgramOptions{LogDisabled: true}}
	coll, err := ebpf.NewCollectionWithOptions(spec.Copy(), opts)
	var ve *ebpf.VerifierError
	switch {
	case err == nil:
		return coll, nil
	case outOfBounds(err):
		return nil, gaveUp(spec, instead, err)
	case !errors.As(err, &ve):
		return nil, loadError(err)
	}
	name, cut := bpf.HandlersProgram, false
	if len(ve.Log) == 0 { // else it is that of the types
		if name, ve.Log, cut, _ = verifierLog(spec, instead); len(ve.Log) == 0 {
			return nil, loadError(err)
		}
	}
	return nil, newRejection(ve, spec.Programs[name].Instructions, cut)
}

// CheckFormat tells whether the handlers go with a message format, and CheckParameters
// whether these are parameters of theirs. Nothing is loaded.
func (o *Object) CheckFormat(f *matcher.Format) error {
	_, err := o.constants(&HandlersConfig{Format: f}, 1)
	return show(err)
}

// CheckParameters is explained at CheckFormat.
func (o *Object) CheckParameters(values map[string]any) error {
	return o.setParameters(o.spec.Copy(), values)
}

// constants checks a configuration, and makes what the program has for constants.
func (o *Object) constants(cfg *HandlersConfig, cpus int) (*bpf.HandlerConstants, error) {
	f := cfg.Format
	switch {
	case o.messages && !f.Ends():
		return nil, fmt.Errorf("messages of format %s do not end, and these handlers are for messages that do: want slmp", f.Name)
	case o.messages && f.Name == "slmp6":
		return nil, errors.New("format slmp6: handlers in eBPF answer over IPv4 only: want slmp, or handlers in Go (tier: user)")
	case !o.messages && f.Ends():
		return nil, fmt.Errorf("format %s has messages of several packets, and these handlers take single packets: want packet or flow, or handlers made with xspin_message.h", f.Name)
	}
	eom := cfg.EOM
	if eom == nil {
		eom = f.EOM
	}
	if eom == nil {
		eom = &matcher.False
	}
	c := &bpf.HandlerConstants{
		Eom:      handlerWord(matcher.Field{Index: eom.Index, Mask: eom.Mask}),
		EomStart: eom.Start,
		EomEnd:   eom.End,
		Header:   uint32(f.Header),
		Has:      o.declared.Handlers,
		Nkey:     uint8(len(f.Key)),
		Hpus:     uint32(cpus),
	}
	if o.writes {
		c.Writes = 1
	}
	if o.reads {
		c.Reads = 1
	}
	for i, k := range f.Key {
		c.Key[i] = handlerWord(k)
	}
	if f.Offset != nil {
		c.Offset = handlerWord(*f.Offset)
		c.OffsetShift = uint8(bits.TrailingZeros32(f.Offset.Mask))
	}
	if f.Length != nil {
		c.Length = handlerWord(f.Length.Field)
		c.LengthShift = uint8(bits.TrailingZeros32(f.Length.Mask))
		c.LengthFrom = uint32(f.Length.From)
	}
	if o.messages {
		// All handlers have their place.
	} else if len(f.Key) == 0 && *eom == matcher.Empty {
		c.Whole = 1
	} else if !slices.Contains(o.handlers, "payload") {
		return nil, fmt.Errorf("messages of format %s neither start nor end, and it has no payload handler: no handler would run", f.Name)
	}
	var err error
	if c.Memory, err = memorySize("memory", cfg.Memory, cfg.MemorySize, 1); err != nil {
		return nil, err
	}
	c.HpuMemory, err = memorySize("HPU memory", cfg.HPUMemory, cfg.HPUMemorySize, cpus)
	return c, err
}

func handlerWord(f matcher.Field) bpf.HandlerWord {
	w := field(f)
	return bpf.HandlerWord{Mask: w.Mask, Off: w.Off, Need: w.Need}
}

// memorySize checks that a map has n pieces of size bytes, and that handlers reach them.
func memorySize(what string, m *ebpf.Map, size int64, n int) (uint64, error) {
	switch {
	case m == nil && size == 0:
		return 0, nil
	case m == nil || size <= 0 || size > 1<<40:
		return 0, fmt.Errorf("%s of %d bytes: there is no such map", what, size)
	case m.Type() != ebpf.Array || m.ValueSize() != memoryElement || m.Flags() != memoryFlags:
		return 0, fmt.Errorf("%s is %v with flags %#x: want an array of elements of %d bytes with flags %#x", what, m, m.Flags(), memoryElement, memoryFlags)
	case int64(m.MaxEntries())*memoryElement < size*int64(n):
		return 0, fmt.Errorf("%s is %v: want %d times %d bytes", what, m, n, size)
	case n > 1 && memoryElement%size != 0 && size%memoryElement != 0:
		// What lies in two elements cannot be reached, wherever the handler believes
		// the border to be.
		return 0, fmt.Errorf("%s of %d bytes: want a divisor or a multiple of %d", what, size, memoryElement)
	}
	return uint64(size), nil
}

// Hook returns which hook the program is for.
func (h *Handlers) Hook() Hook { return h.hook }

// Program is what runs the handlers, for a program array. It lives until Close, and as
// long as it is in an array.
func (h *Handlers) Program() *ebpf.Program { return h.prog }

// Instructions returns how many the program has, and how many steps the verifier took
// through it, which is 0 where the kernel does not tell.
func (h *Handlers) Instructions() (program, verified int, err error) {
	info, err := h.prog.Info()
	if err != nil {
		return 0, 0, fmt.Errorf("ask the kernel for the program: %w", err)
	}
	size, err := info.TranslatedSize()
	if err != nil {
		return 0, 0, fmt.Errorf("ask the kernel for the program: %w", err)
	}
	n, _ := info.VerifiedInstructions()
	return size / asm.InstructionSize, int(n), nil
}

// Close gives everything back but the statistics, which stay what they were. Idempotent.
func (h *Handlers) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.rows == nil {
		return nil
	}
	h.final = h.read()
	h.finalTally = h.tally()
	err := errors.Join(unix.Munmap(h.rows), h.messages.close())
	h.rows = nil
	h.coll.Close()
	if err != nil {
		return fmt.Errorf("unmap the counters of handlers: %w", err)
	}
	return nil
}

// HandlerStats count what handlers in eBPF did.
type HandlerStats struct {
	Handled uint64 // packets that handlers were called for; on each CPU the last may be with them still
	Dropped uint64 // of these: Drop
	Failed  uint64 // of these: neither Success nor Drop
	Sent    uint64 // of these: sent back
	ToStack uint64 // of these: left to Linux
	Uncut   uint64 // trains that went to Linux, as handlers would write to their packets
	Mixed   uint64 // trains that were dropped, as handlers wanted different things of their packets
	Fault   Fault  // the last of Failed

	// A clock costs as much as a short handler, so one packet in 64 is timed.
	Timed       uint64
	HandlerSum  time.Duration
	HandlerTime spin.Histogram

	User [spin.UserCounters]spin.UserCounter
}

// A Fault is what a handler returned that failed.
type Fault struct {
	Handler string // "header", "payload", "completion", or "deposit" in the place of one; "": none failed
	Code    spin.Code
	Detail  string // handler and code in words, and what it did to get XSPIN_SEGV
}

// add adds, and with sign -1 subtracts. Of faults that of a stays.
func (s *HandlerStats) add(a *HandlerStats, sign uint64) {
	s.Handled += sign * a.Handled
	s.Dropped += sign * a.Dropped
	s.Failed += sign * a.Failed
	s.Sent += sign * a.Sent
	s.ToStack += sign * a.ToStack
	s.Uncut += sign * a.Uncut
	s.Mixed += sign * a.Mixed
	s.Timed += sign * a.Timed
	s.HandlerSum += time.Duration(sign) * a.HandlerSum
	for i, n := range a.HandlerTime {
		s.HandlerTime[i] += sign * n
	}
	for i, c := range a.User {
		s.User[i].Sum += sign * c.Sum
		s.User[i].Count += sign * c.Count
	}
	if a.Fault.Handler != "" && sign == 1 {
		s.Fault = a.Fault
	}
}

// CPUs returns the statistics of each possible CPU since the last Clear.
func (h *Handlers) CPUs() []HandlerStats {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := h.read()
	for i := range all {
		all[i].add(&h.base[i], ^uint64(0))
		if all[i].Failed == 0 {
			all[i].Fault = Fault{}
		}
	}
	return all
}

// Stats returns the sum of CPUs.
func (h *Handlers) Stats() (sum HandlerStats) {
	for _, s := range h.CPUs() {
		sum.add(&s, 1)
	}
	return sum
}

// Clear has statistics start at 0 again. The program goes on counting: only it writes.
func (h *Handlers) Clear() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.base = h.read()
}

// read reads what the program has counted.
func (h *Handlers) read() []HandlerStats {
	if h.rows == nil {
		return slices.Clone(h.final)
	}
	all := make([]HandlerStats, len(h.base))
	for i := range all {
		row := (*bpf.HandlerCounters)(unsafe.Pointer(unsafe.SliceData(h.rows[i*rowSize:][:rowSize])))
		s := &all[i]
		s.Handled = atomic.LoadUint64(&row.Handled)
		s.Dropped = atomic.LoadUint64(&row.Dropped)
		s.Failed = atomic.LoadUint64(&row.Failed)
		s.Sent = atomic.LoadUint64(&row.Sent)
		s.ToStack = atomic.LoadUint64(&row.ToStack)
		s.Uncut = atomic.LoadUint64(&row.Uncut)
		s.Mixed = atomic.LoadUint64(&row.Mixed)
		s.Timed = atomic.LoadUint64(&row.Timed)
		s.HandlerSum = time.Duration(atomic.LoadUint64(&row.Time))
		for k := range s.HandlerTime {
			s.HandlerTime[k] = atomic.LoadUint64(&row.TimeLog2[k])
		}
		for k := range s.User {
			s.User[k] = readPair(&row.User[k])
		}
		if fault := atomic.LoadUint64(&row.Fault); fault != 0 {
			s.Fault = h.fault(i, uint32(fault>>32), spin.Code(int32(fault)))
		}
	}
	return all
}

// fault is that of a CPU.
func (h *Handlers) fault(cpu int, bit uint32, code spin.Code) Fault {
	var slip *bpf.MessageSlip
	if h.messages != nil && h.messages.tallies != nil {
		told := h.messages.tallies[cpu].Told
		slip = &told
	}
	return Fault{handlerName(bit), code, failure(bit, code, slip)}
}

const deposits = "deposit"

// handlerName names a handler by its bit: see xspin_has.
func handlerName(bit uint32) string {
	names := [...]string{"header", "payload", "completion", "", deposits}
	return names[min(bits.TrailingZeros32(bit), len(names)-1)]
}

// readPair reads a sum and its count while the program may write them: begin first, end
// last. It waits for no lock, only for the three stores of a program that is under way; if they
// seem never to end, a pair is returned that may not belong together.
func readPair(p *bpf.HandlerPair) (c spin.UserCounter) {
	for range 1000 {
		var whole bool
		if c, whole = tryPair(p); whole {
			break
		}
	}
	return c
}

// tryPair reads a sum and its count once, and tells whether they belong together.
func tryPair(p *bpf.HandlerPair) (c spin.UserCounter, whole bool) {
	end := atomic.LoadUint64(&p.End)
	c = spin.UserCounter{Sum: atomic.LoadUint64(&p.Sum), Count: atomic.LoadUint64(&p.Count)}
	return c, atomic.LoadUint64(&p.Begin) == end
}

// An Action is what becomes of a frame.
type Action uint32

// Actions, as XDP has them.
const (
	ActionDrop    Action = 1
	ActionToStack Action = xdpPass
	ActionSend    Action = 3
)

func (a Action) String() string {
	switch a {
	case ActionDrop:
		return "drop"
	case ActionToStack:
		return "stack"
	case ActionSend:
		return "send"
	}
	return fmt.Sprintf("Action(%d)", uint32(a))
}

// A HandlersVerdict is what handlers made of a frame.
type HandlersVerdict struct {
	Ran    bool // false: the frame is not what the format says, and goes to Linux
	Action Action
	Code   spin.Code // Success; Drop if any of them returned it; what the handler returned that failed
	Failed string    // the handler that failed
	Detail string    // in words: see Fault
	Frame  []byte    // as they left it; valid until the next Run
}

// skBuff is struct __sk_buff of include/uapi/linux/bpf.h.
type skBuff struct {
	_       [176]byte
	GSOSize uint32
	_       [12]byte
}

// Run runs the handlers over a frame, attached to nothing. The kernel takes frames of 14
// bytes to some 70 KiB, and at tc those of some 3,500 bytes, with the whole of an IP header; for any
// other the error wraps ErrFrame. The verdict
// assumes that nobody else runs them.
func (h *Handlers) Run(frame []byte) (HandlersVerdict, error) { return h.RunTrain(frame, 0) }

// RunTrain is Run for a frame as Linux's stack has it at tc, which it cuts every gso bytes of payload. One of 0 is
// none.
func (h *Handlers) RunTrain(frame []byte, gso int) (v HandlersVerdict, err error) {
	if len(frame) < 14 {
		return v, fmt.Errorf("%w: %d bytes, an Ethernet header has 14", ErrFrame, len(frame))
	}
	const answer = 256 // may be longer than its segment
	if len(frame)+answer > len(h.out) {
		h.out = make([]byte, len(frame)+answer)
	}
	if h.last == nil {
		h.last = h.read()
	}
	// Repeat stays 1: for more, the kernel patches a function that all XDP programs run
	// through, which takes a grace period, and has stopped emulated machines.
	opts := &ebpf.RunOptions{Data: frame, DataOut: h.out, Repeat: 1}
	if gso != 0 {
		opts.Context = &skBuff{GSOSize: uint32(gso)}
	}
	ret, err := h.prog.Run(opts)
	if err != nil {
		return v, fmt.Errorf("%w: %d bytes: %w", ErrFrame, len(frame), err)
	}
	v.Action, v.Frame = h.hook.verdict(ret), opts.DataOut
	now := h.read()
	for i := range now {
		s, before := &now[i], &h.last[i]
		v.Ran = v.Ran || s.Handled != before.Handled
		if s.Dropped != before.Dropped {
			v.Code = spin.Drop
		}
		if s.Failed != before.Failed {
			v.Code, v.Failed, v.Detail = s.Fault.Code, s.Fault.Handler, s.Fault.Detail
		}
	}
	if h.messages != nil { // a duplicate is answered, and runs nothing
		v.Ran = v.Action != ActionToStack || v.Ran
	}
	h.last = now
	return v, nil
}
