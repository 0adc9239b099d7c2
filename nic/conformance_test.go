// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/ethtool"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/impair"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/packet"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/slmp/fpspintest"
	"github.com/xspin/xspin/slmp/slmptest"
	"github.com/xspin/xspin/spin"
)

// A tier is what runs the handlers, with what it does in its own way, and may.
type tier struct {
	name string

	// holds: packets that overtake their message's header packet wait for it. In the
	// kernel nothing waits: they are dropped, unacknowledged, and come again.
	holds bool
	// fewer: answers have fewer words than slmp.Answer's where the segment's frame has no
	// room for more, which a frame of a socket mostly has not.
	fewer bool
	// both: a late segment that completes its message is answered, and EOM behind it. In the
	// kernel this holds for senders that take no cumulative acknowledgements; for the others
	// EOM's answer says all.
	both bool
	// begun is the least part of messages, through the bad network, that begin and end in
	// the tier.
	begun float64

	// serve has the witness handle a context's messages. HPUs do what XDP can only do so:
	// packets of a message go to any of them (policy packet). Both abandon incomplete
	// messages, which for HPUs is the default.
	serve func(r *rig, s *nic.ContextSpec, deposits bool)
}

var tiers = []tier{
	{
		name: "user", holds: true, both: true, begun: 1,
		serve: func(r *rig, s *nic.ContextSpec, deposits bool) {
			s.Policy, s.Handlers = nic.ByPacket, r.record.handlers(deposits)
		},
	},
	{
		name: "kernel", fewer: true, begun: 0.95,
		serve: func(r *rig, s *nic.ContextSpec, deposits bool) {
			o, err := nic.ReadObject("witness", bpf.Witness(), nic.ObjectMemory)
			if err != nil {
				r.t.Fatal(err)
			}
			s.Kernel = &nic.Kernel{Object: o, Parameters: map[string]any{"deposits": deposits}}
			s.Resources.Memory = r.record.mem.Whole()
		},
	},
}

// The scenarios of the contract of messages (docs/messages.md), which each tier passes.
var scenarios = []struct {
	name string
	path *impair.Config // a bad network
	run  func(r *rig)
}{
	{"8 copies from two CPUs", nil, copies(30, 24)},
	{"8 copies from two CPUs of messages of one segment", nil, copies(100, 1)},
	{"a bad network", &impair.Config{Loss: 0.01, Reorder: 0.03, Duplicate: 0.02, Delay: time.Millisecond, Seed: 5}, badPath},
	{"answers", nil, sameAnswers},
	{"segments before their header", nil, overtaken},
	{"empty messages and EOM alone", nil, emptyOnes},
	{"messages that begin with an empty segment", nil, emptyHeaders},
	{"FPsPIN's sender", nil, fpspinSender},
	{"FPsPIN's sender on a path that reorders", nil, fpspinReordered},
	{"FPsPIN's sender, and an application that wants no events", nil, fpspinUnheard},
	{"an application that takes one event at a time", nil, oneEvent},
	{"copies after the end", nil, lateCopies},
	{"return codes", nil, returnCodes},
	{"handlers that fail", nil, failures},
	{"timeouts", nil, timeouts},
	{"an application that takes no events", nil, noEvents},
	{"two windows", nil, twoWindows},
	{"removal with messages open", nil, removals},
}

func TestConformance(t *testing.T) {
	user, kernel := &tiers[0], &tiers[1]
	for _, tt := range []struct {
		name string
		tier *tier
		cfg  nic.Config
	}{
		{"user", user, nic.Config{Mode: nic.Native}},
		{"user, generic XDP", user, nic.Config{Mode: nic.Generic}},
		{"kernel, at xdp", kernel, nic.Config{Hook: nic.HookXDP}},
		{"kernel, at tc", kernel, nic.Config{Hook: nic.HookTC}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			lab, n := conformant(t, tt.cfg, netns.LabConfig{})
			for _, s := range scenarios {
				t.Run(s.name, func(t *testing.T) {
					r := &rig{t: t, tier: tt.tier, lab: lab, n: n, port: slmp.Port}
					if s.path != nil {
						r.lab, r.n = conformant(t, tt.cfg, netns.LabConfig{Path: s.path})
					}
					s.run(r)
				})
			}
		})
	}
}

// conformant makes a lab with a NIC. In generic mode the sender's device cuts datagrams: see
// TestTrainsAreLeftToLinux.
func conformant(t *testing.T, nc nic.Config, cfg netns.LabConfig) (*netns.Lab, *nic.NIC) {
	lab := netnstest.Temp(t, cfg)
	if cfg.Path == nil && nc.Hook != nic.HookTC {
		wire(t, lab)
	}
	if nc.Mode == nic.Generic {
		if err := lab.Host.NS.Do(func() error { return ethtool.UDPSegment.Enable(lab.Host.Device, false) }); err != nil {
			t.Fatal(err)
		}
	}
	nc.HPUs, nc.Workers = 2, 2
	return lab, open(t, lab, nc)
}

// A rig is a NIC with a context whose handlers are the witness.
type rig struct {
	t    *testing.T
	tier *tier
	lab  *netns.Lab
	n    *nic.NIC

	record *record
	spec   nic.ContextSpec
	c      *nic.Context
	events chan spin.MessageEvent
	posted hpu.Receives // of HPUs
	port   uint16

	unheard bool // the application wants no events
}

// slots is how many messages a context has room for.
const slots = 64

// start runs a context. With a window the payload handler puts payload into it.
func (r *rig) start(window *hostq.Window, change func(*nic.ContextSpec)) {
	r.t.Helper()
	r.record, r.events = newRecord(r.t), make(chan spin.MessageEvent, 4096)
	r.spec = nic.ContextSpec{Name: "witness", Rulesets: sets(matcher.SLMP()), Messages: slots}
	r.tier.serve(r, &r.spec, window != nil)
	if window != nil {
		r.spec.Window = window
	}
	if change != nil {
		change(&r.spec)
	}
	if r.spec.Events == nil && !r.unheard {
		r.spec.Events = r.events
	}
	r.c = run(r.t, r.n, r.spec)
	r.t.Cleanup(r.end)
}

// end removes the context if it is still there. All of its slots can be used until then, and
// nothing runs afterwards.
func (r *rig) end() {
	if r.c == nil {
		return
	}
	if r.t.Failed() {
		r.remove()
		return
	}
	for len(r.events) > 0 {
		<-r.events
	}
	before := r.settled()
	conn := dialUDP(r.t, r.lab, r.port)
	slots := uint64(r.spec.Messages)
	eventually(r.t, "each slot takes a message", func() bool {
		for id := range slots {
			write(r.t, conn, raw(0, uint32(id), 0, noise(20)))
		}
		time.Sleep(time.Millisecond)
		return r.stats().Started >= before.Started+slots
	})
	st := r.stats()
	r.remove()
	if st.Started != before.Started+slots {
		r.t.Errorf("with a message in each of %d slots: %+v", slots, st)
		return
	}
	for range slots {
		if e := nextEvent(r.t, r.events); e.Cause != spin.Removed && r.spec.Timeout == 0 {
			r.t.Errorf("event %+v, want one of a removal", e)
		}
	}
}

func (r *rig) remove() {
	if err := r.n.Remove(r.c); err != nil {
		r.t.Error(err)
	}
	for _, run := range r.record.all() {
		if run.Last == 0 {
			r.t.Errorf("it runs after Remove: %+v", run)
		}
	}
	r.c = nil
}

func (r *rig) stats() spin.MessageStats { return messages(r.t, r.c) }

// settled returns the counters once no message is open: an event is posted before its message
// is counted and leaves its slot.
func (r *rig) settled() spin.MessageStats {
	r.t.Helper()
	eventually(r.t, "no message is open", func() bool { return r.stats().Open == 0 })
	return r.stats()
}

// post posts a receive for any message.
func (r *rig) post(b spin.Binding) {
	r.t.Helper()
	err := error(nil)
	if rec := (spin.Receive{Binding: b, Ignore: ^uint32(0)}); r.spec.Kernel != nil {
		err = r.c.Post(rec)
	} else {
		rec.Events = spin.EventChan(r.events)
		err = r.posted.Post(rec)
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

// event says that there is an event of a message, and returns it.
func (r *rig) event(number uint32, want spin.Result) spin.MessageEvent {
	r.t.Helper()
	e := nextEvent(r.t, r.events)
	want.Time = e.Time
	if e.Number != number || e.Result != want || e.Context != r.spec.Name || (e.Err != nil) != (e.Cause == spin.Failed) {
		r.t.Errorf("event %+v, want one of message %d: %+v", e, number, want)
	}
	return e
}

// noEvent says that there is none.
func (r *rig) noEvent() {
	r.t.Helper()
	if len(r.events) > 0 {
		r.t.Errorf("event %+v", <-r.events)
	}
}

// window is memory for one window, with guards before and after it.
func guarded(t *testing.T, sizes ...int64) (windows []*hostq.Window, intact func()) {
	t.Helper()
	const guard = 4096
	at := int64(guard)
	total := at
	for _, size := range sizes {
		total += size + guard
	}
	mem, err := hostq.NewMemory("guarded", total)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mem.Close() })
	whole := mem.Bytes()
	var guards [][]byte
	protect := func(from, to int64) {
		guards = append(guards, whole[from:to])
		for i := from; i < to; i++ {
			whole[i] = 0xa5
		}
	}
	protect(0, guard)
	for _, size := range sizes {
		w, err := mem.Window(at, size, spin.All)
		if err != nil {
			t.Fatal(err)
		}
		windows = append(windows, w)
		protect(at+size, at+size+guard)
		at += size + guard
	}
	return windows, func() {
		t.Helper()
		for i, g := range guards {
			if !bytes.Equal(g, bytes.Repeat([]byte{0xa5}, len(g))) {
				t.Errorf("something was written outside of the windows, in guard %d", i)
			}
		}
	}
}

// holds says that a window begins with these bytes.
func holds(t *testing.T, w *hostq.Window, at int64, want []byte) {
	t.Helper()
	got := make([]byte, len(want))
	if _, err := w.ReadAt(got, at); err != nil || !bytes.Equal(got, want) {
		t.Errorf("other than the %d bytes that were sent are in the window at %d, %v", len(want), at, err)
	}
}

// A record is what the witness has noted: bpf/src/handlers/witness.bpf.c, whose handlers
// these are in Go.
type record struct {
	t    *testing.T
	mem  *hostq.Memory
	head *bpf.WitnessHead
	runs []bpf.WitnessRun
}

func newRecord(t *testing.T) *record {
	t.Helper()
	mem, err := hostq.NewMemory("record", 2<<20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mem.Close() })
	const head, each = unsafe.Sizeof(bpf.WitnessHead{}), unsafe.Sizeof(bpf.WitnessRun{})
	b := unsafe.Pointer(unsafe.SliceData(mem.Bytes()))
	return &record{
		t: t, mem: mem, head: (*bpf.WitnessHead)(b),
		runs: unsafe.Slice((*bpf.WitnessRun)(unsafe.Add(b, head)), (uintptr(mem.Size())-head)/each),
	}
}

func monotonic() uint64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // fails for other clocks
	return uint64(now.Nano())
}

func (w *record) begin(handler uint32, m *hpu.Message, task *hpu.Task) *bpf.WitnessRun {
	r := &w.runs[atomic.AddUint32(&w.head.Runs, 1)-1]
	r.Handler, r.Number, r.Port = handler, m.Number(), m.Source().Port()
	r.Hpu, r.Slot, r.Begun = uint16(task.HPU()), uint32(m.Slot()), monotonic()
	atomic.StoreUint32(&r.First, atomic.AddUint32(&w.head.Steps, 1))
	return r
}

func (w *record) end(r *bpf.WitnessRun) {
	r.Ended = monotonic()
	atomic.StoreUint32(&r.Last, atomic.AddUint32(&w.head.Steps, 1))
}

// dawdle has some runs take longer: what is done or told too early shows.
func dawdle() {
	for end := monotonic() + 12_000; monotonic() < end; {
	}
}

func (w *record) handlers(deposits bool) hpu.Handlers {
	return hpu.Handlers{
		Header: func(h *hpu.HER) spin.Code {
			r := w.begin(bpf.WitnessHeader, h.Message(), &h.Task)
			r.Offset = uint64(h.Offset())
			dawdle()
			w.end(r)
			switch r.Number >> 8 {
			case bpf.WitnessProceed:
				return spin.Proceed
			case bpf.WitnessDropMessage:
				return spin.Drop
			case bpf.WitnessFailHeader:
				return spin.Fail
			}
			return spin.ProcessData
		},
		Payload: func(h *hpu.HER) spin.Code {
			r := w.begin(bpf.WitnessPayload, h.Message(), &h.Task)
			r.Offset, r.Length = uint64(h.Offset()), uint64(h.PayloadLen())
			for b := range h.Payload() {
				if len(b) >= 8 {
					r.Start = binary.NativeEndian.Uint64(b)
				}
				break
			}
			if h.Offset()%16 == 0 {
				dawdle()
			}
			code := spin.Success
			if deposits && h.Deposit() != nil {
				code = spin.Segv
			}
			if h.Offset() > 0 && r.Number>>8 == bpf.WitnessDropPayload {
				code = spin.Drop
			}
			if h.Offset() > 0 && r.Number>>8 == bpf.WitnessFailPayload {
				code = spin.Fail
			}
			w.end(r)
			return code
		},
		Completion: func(c *hpu.Completion) spin.Code {
			r := w.begin(bpf.WitnessCompletion, c.Message(), &c.Task)
			r.Offset, r.Length = c.Length, c.Length-c.Missing
			dawdle()
			w.end(r)
			if r.Number>>8 == bpf.WitnessFailCompletion {
				return spin.Fail
			}
			return spin.Success
		},
	}
}

// all returns the runs that have begun.
func (w *record) all() (all []bpf.WitnessRun) {
	n := int(atomic.LoadUint32(&w.head.Runs))
	if n > len(w.runs) {
		w.t.Fatalf("%d runs, and the record has room for %d", n, len(w.runs))
	}
	for i := range w.runs[:n] {
		// Last is set when the rest is.
		if r := &w.runs[i]; atomic.LoadUint32(&r.First) != 0 {
			last := atomic.LoadUint32(&r.Last)
			run := *r
			run.Last = last
			all = append(all, run)
		}
	}
	return all
}

// A history is what ran for a message.
type history struct{ headers, payloads, completions []bpf.WitnessRun }

func (w *record) histories() map[messageID]*history {
	all := map[messageID]*history{}
	for _, run := range w.all() {
		// All come from the host of the lab.
		id := messageID{netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, 2}), run.Port), run.Number}
		h := all[id]
		if h == nil {
			h = new(history)
			all[id] = h
		}
		switch run.Handler {
		case bpf.WitnessHeader:
			h.headers = append(h.headers, run)
		case bpf.WitnessPayload:
			h.payloads = append(h.payloads, run)
		case bpf.WitnessCompletion:
			h.completions = append(h.completions, run)
		default:
			w.t.Errorf("no handler: %+v", run)
		}
	}
	return all
}

// order says that the runs of a message were in order: header once and before all others,
// payload once for each segment, completion once and after all others; and that it had a
// slot of its own.
func (h *history) order() error {
	if len(h.headers) != 1 || len(h.completions) > 1 {
		return fmt.Errorf("%d header and %d completion handlers", len(h.headers), len(h.completions))
	}
	header := h.headers[0]
	if header.Last == 0 || header.Offset != 0 {
		return fmt.Errorf("the header handler: %+v", header)
	}
	begun := map[uint64]bool{}
	for _, p := range h.payloads {
		switch {
		case p.First < header.Last:
			return fmt.Errorf("the payload handler ran at %d before the header handler had ended", p.Offset)
		case begun[p.Offset]:
			return fmt.Errorf("the payload handler ran again at %d", p.Offset)
		case len(h.completions) > 0 && (p.Last == 0 || p.Last > h.completions[0].First):
			return fmt.Errorf("the completion handler ran before the payload handler had ended at %d", p.Offset)
		case p.Slot != header.Slot:
			return fmt.Errorf("the message is in slots %d and %d", header.Slot, p.Slot)
		}
		begun[p.Offset] = true
	}
	if len(h.completions) > 0 && (h.completions[0].Last == 0 || h.completions[0].First < header.Last || h.completions[0].Slot != header.Slot) {
		return fmt.Errorf("the completion handler: %+v", h.completions[0])
	}
	return nil
}

// whole says that a message was handled as it was sent.
func (h *history) whole(want []byte) error {
	if h == nil {
		return errors.New("nothing ran")
	}
	if err := h.order(); err != nil {
		return err
	}
	all := slices.SortedFunc(slices.Values(h.payloads), func(a, b bpf.WitnessRun) int { return int(int64(a.Offset) - int64(b.Offset)) })
	at := uint64(0)
	for _, p := range all {
		if p.Offset != at || p.Offset+p.Length > uint64(len(want)) {
			return fmt.Errorf("the payload handler ran for %d bytes at %d, and before for all to %d of %d", p.Length, p.Offset, at, len(want))
		}
		if p.Length >= 8 && p.Start != binary.NativeEndian.Uint64(want[p.Offset:]) {
			return fmt.Errorf("the payload handler got other bytes at %d", p.Offset)
		}
		at += p.Length
	}
	if at != uint64(len(want)) || len(all) == 0 {
		return fmt.Errorf("the payload handler ran %d times, for %d bytes of %d", len(all), at, len(want))
	}
	if len(h.completions) != 1 || h.completions[0].Offset != at || h.completions[0].Length != at {
		return fmt.Errorf("completion handlers of %d bytes: %+v", at, h.completions)
	}
	return nil
}

// check says that these messages, and no others, were handled as they were sent.
func (w *record) check(want map[messageID][]byte) {
	w.t.Helper()
	all := w.histories()
	for id, data := range want {
		if err := all[id].whole(data); err != nil {
			w.t.Errorf("message %v: %v", id, err)
		}
		delete(all, id)
	}
	for id, h := range all {
		w.t.Errorf("message %v, which was not sent: %+v", id, h)
	}
}

// ledger is when what was done, for audit.
func (w *record) ledger() *ledger {
	// The same clock but for a constant.
	var offset, best int64
	for i := range 100 {
		before := monotonic()
		now := time.Now().UnixNano()
		if took := int64(monotonic() - before); i == 0 || took < best {
			offset, best = now-int64(before)-took/2, took
		}
	}
	at := func(mono uint64) time.Time { return time.Unix(0, int64(mono)+offset) }
	l := newLedger()
	for id, h := range w.histories() {
		for _, p := range h.payloads {
			l.segments[segmentID{id, p.Offset}] = at(p.Ended)
		}
		for _, c := range h.completions {
			l.completed[id] = at(c.Ended)
		}
	}
	return l
}

// spread says that several HPUs had runs, which for the kernel are CPUs.
func (w *record) spread() {
	w.t.Helper()
	all := w.all()
	on := map[uint16]int{}
	beside := 0
	for i, r := range all {
		on[r.Hpu]++
		if i > 0 && r.First < all[i-1].Last {
			beside++
		}
	}
	w.t.Logf("runs by HPU: %v; %d began beside another", on, beside)
	if len(on) < 2 && runtime.NumCPU() > 1 {
		w.t.Errorf("all ran on one HPU: this shows nothing")
	}
}

// frame is a datagram from the lab's host to SLMP's port of its NIC.
func (r *rig) frame(from uint16, payload []byte) []byte {
	b := datagram(r.lab, from, slmp.Port, payload)
	copy(b, r.lab.NIC.MAC)
	copy(b[6:], r.lab.Host.MAC)
	ip := packet.IPv4(b[14:])
	ip.SetSrc(r.lab.Host.Addr.Addr().As4()) // the sums are the same
	ip.SetDst(r.lab.NIC.Addr.Addr().As4())
	return b
}

// onCPU runs f on a CPU, with a function that sends frames from there: to the receive queue
// of that number, which then is served there.
func (r *rig) onCPU(cpu int, f func(send func([]byte)) error) error {
	fd, err := -1, error(nil)
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and ends with the thread
		var set unix.CPUSet
		set.Set(cpu % runtime.NumCPU())
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			done <- err
			return
		}
		if err = r.lab.Host.NS.Do(func() error {
			fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
			return err
		}); err != nil {
			done <- err
			return
		}
		defer unix.Close(fd)
		if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, 1); err != nil {
			done <- err
			return
		}
		to := &unix.SockaddrLinklayer{Ifindex: r.lab.Host.Index, Protocol: 0x0008} // IPv4
		done <- f(func(b []byte) {
			// What finds no room is lost, as anywhere.
			_ = unix.Sendto(fd, b, 0, to)
		})
	}()
	return <-done
}

// copies sends messages of so many segments, each at least 8 times and in orders of their
// own, from two CPUs at the same time.
func copies(count, segments int) func(r *rig) {
	return func(r *rig) {
		const size, port, least = 48, 40000, 8 // the offsets are those for which handlers take long
		r.start(nil, nil)
		listenUDP(r.t, r.lab.Host, port)
		answers := answersAt(r.t, r.lab.Host.NS, r.lab.Host.Device)
		want, ids, lengths := map[messageID][]byte{}, []messageID{}, []int{}
		for i := range count {
			id := messageID{netip.AddrPortFrom(r.lab.Host.Addr.Addr(), port), uint32(i)}
			want[id] = noise(segments*size - i%size)
			ids, lengths = append(ids, id), append(lengths, len(want[id]))
		}
		sent := make([]atomic.Int32, count)
		here := make([]atomic.Int32, count)
		var failed atomic.Bool
		worker := func(cpu int) error {
			defer failed.Store(true) // the other does not wait for this one
			return r.onCPU(cpu, func(send func([]byte)) error {
				rng := rand.New(rand.NewPCG(7, uint64(cpu)))
				for i := range count {
					var frames [][]byte
					data := want[ids[i]]
					for k := range segments {
						flags := slmp.SYN | slmp.Cumulative
						if k == segments-1 {
							flags |= slmp.EOM
						}
						frames = append(frames, r.frame(port, raw(flags, uint32(i), uint32(k*size), data[k*size:min((k+1)*size, len(data))])))
					}
					for here[i].Add(1); here[i].Load() < 2 && !failed.Load(); {
					}
					end := time.Now().Add(testenv.Slowness() * 20 * time.Second)
					for round := 0; round < least/2 || r.stats().Ended <= uint64(i); round++ {
						if time.Now().After(end) {
							return fmt.Errorf("message %d of %d segments does not end: %+v", i, segments, r.stats())
						}
						for _, k := range rng.Perm(segments) {
							if round == 0 {
								k = min(k, rng.IntN(segments)) // the first ones earlier, and more often
							}
							send(frames[k])
						}
						if round >= least/2 {
							time.Sleep(200 * time.Microsecond)
						}
						sent[i].Add(1)
					}
				}
				return nil
			})
		}
		errs := make(chan error, 2)
		for cpu := range 2 {
			go func() { errs <- worker(cpu) }()
		}
		for range 2 {
			if err := <-errs; err != nil {
				r.t.Error(err)
			}
		}
		idle(r.t, r.c)
		r.record.check(want)
		r.record.spread()
		for range ids {
			e := nextEvent(r.t, r.events)
			if int(e.Number) >= count || e.Cause != spin.Complete || e.Length != uint64(lengths[e.Number]) || e.Missing != 0 {
				r.t.Errorf("event %+v", e)
			}
		}
		r.noEvent()
		st, cs := r.settled(), r.c.Stats()
		if all := uint64(count); st.Started != all || st.Ended != all || st.Duplicates == 0 ||
			cs.Headers != all || cs.Completions != all || cs.Handled != all*uint64(segments) || cs.Failed != 0 {
			r.t.Errorf("%+v\n%+v", st, cs)
		}
		said := answers()
		if claims := r.record.ledger().audit(r.t, said, ids, lengths, size, false); len(said) < count || segments > 1 && claims < 100 {
			r.t.Errorf("%d answers claim %d things", len(said), claims)
		}
	}
}

// badPath sends messages of all sizes, several at a time, each to a place of its own.
func badPath(r *rig) {
	const count, place, senders = 120, 32 << 10, 6
	windows, intact := guarded(r.t, count*place)
	w := windows[0]
	for _, plain := range []bool{false, true} {
		r.start(w, func(s *nic.ContextSpec) {
			s.Checksums = hpu.VerifyAll
			if s.Kernel == nil {
				s.Binder, s.Window = &r.posted, nil
			}
		})
		for i := range count {
			r.post(spin.Binding{Window: w, Place: int64(i * place), Size: place, User: uint64(i + 1)})
		}
		conn := connect(r.t, r.lab, slmp.Port, slmp.Config{Plain: plain})
		answers := answersAt(r.t, r.lab.PathNS, impair.NICPort)
		size := conn.Stats().Payload
		ids, lengths := make([]messageID, count), make([]int, count)
		want := map[messageID][]byte{}
		var mu sync.Mutex
		var wg sync.WaitGroup
		for s := range senders {
			wg.Go(func() {
				for i := s; i < count; i += senders {
					length := []int{0, 1, size, size + 1, 3*size - 1, place}[(i/senders+s)%6]
					data := noise(length + i)[i:] // others for each
					d, err := conn.SendBytes(patient(r.t), data, slmp.Options{})
					if err != nil {
						r.t.Errorf("message %d of %d bytes: %v\n%+v\n%+v", i, length, err, conn.Stats(), r.c.Stats())
						return
					}
					mu.Lock()
					ids[i], lengths[i] = messageID{conn.LocalAddr(), d.ID}, length
					want[ids[i]] = data
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		if r.t.Failed() {
			r.t.FailNow()
		}
		idle(r.t, r.c)
		r.record.check(want)
		for range ids {
			e := nextEvent(r.t, r.events)
			data, sent := want[messageID{e.Source, e.Number}]
			i, ok := e.User.(uint64)
			if !sent || !ok || e.Cause != spin.Complete || e.Length != uint64(len(data)) || e.Missing != 0 {
				r.t.Errorf("event %+v", e)
				continue
			}
			holds(r.t, w, int64(i-1)*place, data)
		}
		r.noEvent()
		intact()
		st, cs := r.settled(), r.c.Stats()
		part := float64(st.Ended) / count
		r.t.Logf("plain=%v: %.1f %% of messages began and ended here; %d segments came again, %d before their header packet", plain, 100*part, st.Duplicates, st.Dropped[spin.DropNoHeader]+st.Held)
		if part < r.tier.begun || st.Started != st.Ended || cs.Headers != st.Started || cs.Failed != 0 || st.Refused != 0 {
			r.t.Errorf("%+v\n%+v", st, cs)
		}
		if st.Dropped[spin.DropNoHeader] > 0 && r.tier.holds {
			r.t.Logf("%d packets found no room to wait for their header packet", st.Dropped[spin.DropNoHeader])
		}
		if claims := r.record.ledger().audit(r.t, answers(), ids, lengths, uint64(size), plain); claims < 100 {
			r.t.Errorf("answers claim %d things", claims)
		}
		// Another life, without what was posted; this one has no room for what end sends.
		r.remove()
		r.posted = hpu.Receives{}
	}
	state, err := r.lab.PathState()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, n := range []impair.Counters{state.FromHost, state.ToHost} {
		if n.Lost == 0 || n.Duplicated == 0 || n.Reordered == 0 {
			r.t.Errorf("this was another network: %+v", n)
		}
	}
}

// sameAnswers compares answers with those of slmp.Answer, byte for byte.
func sameAnswers(r *rig) {
	const room = 64 << 10
	windows, intact := guarded(r.t, room)
	const slots = 2 // each has one message after the other, and those that came before do not show
	r.start(windows[0], func(s *nic.ContextSpec) {
		s.Messages = slots
		if s.Kernel == nil {
			s.CoreMask = 1 // so that they are handled in order, answered or not
		}
	})
	ref := slmptest.New(slots, make([]byte, room))
	conn := dialUDP(r.t, r.lab, slmp.Port)
	port := conn.LocalAddr().(*net.UDPAddr).Port
	buf := make([]byte, 2000)
	number := uint32(0)
	want := map[messageID][]byte{}
	compared, shorter := 0, 0
	for _, size := range []int{1, 12, 100, 1462} {
		rng := rand.New(rand.NewPCG(1, uint64(size)))
		for _, n := range []int{1, 2, 5, 40, min(900, room/size)} {
			number++
			last := rng.IntN(size + 1)
			if n == 1 && last == 0 {
				last = size
			}
			data := noise((n-1)*size + last)
			plain := rng.IntN(4) == 0
			exchange := func(k int) {
				from, to := k*size, min((k+1)*size, len(data))
				h := slmp.Header{Flags: slmp.SYN, ID: number, Offset: uint32(from)}
				if !plain {
					h.Flags |= slmp.Cumulative
				}
				if k == n-1 {
					h.Flags |= slmp.EOM
				}
				answer := ref.Take(mpq.Key{uint32(port), number}, h, data[from:to])
				write(r.t, conn, raw(h.Flags, number, h.Offset, data[from:to]))
				frame := 42 + slmp.HeaderLen + to - from
				fits := 42+len(answer) <= frame
				patience := testenv.Slowness() * 5 * time.Second
				if r.tier.fewer && !fits && answer != nil {
					patience = testenv.Slowness() * 20 * time.Millisecond
				}
				if answer == nil {
					return // what came nevertheless would be the next one's
				}
				conn.SetReadDeadline(time.Now().Add(patience))
				l, err := conn.Read(buf)
				if own := slices.Concat(answer[:6], binary.BigEndian.AppendUint32(nil, h.Offset), answer[10:]); (r.tier.both || plain) && !bytes.Equal(own, answer) {
					if err != nil || !bytes.Equal(buf[:l], own) {
						r.t.Errorf("segment %d of %d of %d bytes, the last to come: %v\n got %x\nwant %x", k, n, size, err, buf[:l], own)
					}
					l, err = conn.Read(buf)
				}
				compared++
				switch {
				case err == nil && bytes.Equal(buf[:l], answer):
				case !r.tier.fewer || fits || !fewer(buf[:l], answer, err):
					r.t.Fatalf("segment %d of %d of %d bytes, flags %#x: %v\n got %x\nwant %x\n%+v", k, n, size, h.Flags, err, buf[:l], answer, r.stats())
				default:
					shorter++
				}
			}
			exchange(0)
			// A window that slides, in which segments come in any order, and more than once.
			for low := 1; low < n; {
				high := min(low+1+rng.IntN(64), n)
				for _, k := range rng.Perm(high - low) {
					if rng.IntN(8) > 0 {
						exchange(low + k)
					}
					if rng.IntN(8) == 0 {
						exchange(rng.IntN(high))
					}
				}
				low = high
			}
			for range 2 {
				for _, k := range rng.Perm(n) {
					exchange(k)
				}
			}
			want[messageID{conn.LocalAddr().(*net.UDPAddr).AddrPort(), number}] = data
			r.event(number, spin.Result{Length: uint64(len(data))})
			holds(r.t, windows[0], 0, data)
		}
	}
	r.t.Logf("%d answers, of which %d had fewer words", compared, shorter)
	if shorter > 0 && !r.tier.fewer || shorter == compared {
		r.t.Errorf("%d of %d answers are not slmp.Answer's", shorter, compared)
	}
	r.record.check(want)
	intact()
}

// fewer says that an answer is what was wanted but for words of its bitmap, or all of them
// and the end. Without room for a word, Wait cannot be said.
func fewer(got, want []byte, err error) bool {
	w, werr := slmp.ParseAck(want)
	if werr != nil || err != nil {
		return werr == nil && w.Wait && errors.Is(err, unix.EAGAIN) || isTimeout(err) && w.Wait
	}
	g, gerr := slmp.ParseAck(got)
	switch {
	case gerr != nil || g.ID != w.ID || g.Offset != w.Offset || !w.Cumulative:
		return false
	case !g.Cumulative:
		return !w.Wait
	}
	return g.Wait == w.Wait && g.End == w.End && len(g.Bitmap) < len(w.Bitmap) && slices.Equal(g.Bitmap, w.Bitmap[:len(g.Bitmap)])
}

func isTimeout(err error) bool {
	var nerr net.Error
	return errors.As(err, &nerr) && nerr.Timeout()
}

// talk sends a segment that wants to be acknowledged, and says that it is.
func (r *rig) talk(conn *net.UDPConn, flags slmp.Flags, id, offset uint32, payload []byte) {
	r.t.Helper()
	write(r.t, conn, raw(flags|slmp.SYN, id, offset, payload))
	if a := answer(r.t, conn); a.ID != id || a.Offset != offset || a.Wait {
		r.t.Errorf("message %d at %d: %+v", id, offset, a)
	}
}

// unanswered sends a segment that wants to be acknowledged, and says that it is not, once
// it has been counted.
func (r *rig) unanswered(conn *net.UDPConn, flags slmp.Flags, id, offset uint32, payload []byte, counted func(*spin.MessageStats) uint64) {
	r.t.Helper()
	st := r.stats()
	before := counted(&st)
	write(r.t, conn, raw(flags|slmp.SYN, id, offset, payload))
	eventually(r.t, fmt.Sprintf("the segment of message %d at %d is counted", id, offset), func() bool {
		st := r.stats()
		return counted(&st) == before+1
	})
	silent(r.t, conn)
	// That was a message, too.
	if e := nextEvent(r.t, r.events); e.Number == id {
		r.t.Errorf("event %+v", e)
	}
}

func droppedDead(st *spin.MessageStats) uint64 { return st.Dropped[spin.DropDead] }

// only returns what ran for a message, and says that it was in order.
func (r *rig) only(conn *net.UDPConn, id uint32) *history {
	r.t.Helper()
	h := r.record.histories()[messageID{conn.LocalAddr().(*net.UDPAddr).AddrPort(), id}]
	if h == nil {
		h = new(history)
	}
	if err := h.order(); err != nil {
		r.t.Errorf("message %d: %v", id, err)
	}
	return h
}

// ran says how often handlers ran for a message.
func (r *rig) ran(conn *net.UDPConn, id uint32, payloads, completions int) {
	r.t.Helper()
	if h := r.only(conn, id); len(h.payloads) != payloads || len(h.completions) != completions {
		r.t.Errorf("message %d: payload handlers %d times, completion %d; want %d and %d", id, len(h.payloads), len(h.completions), payloads, completions)
	}
}

// overtaken sends what belongs behind the header packet before it.
func overtaken(r *rig) {
	r.start(nil, nil)
	conn := dialUDP(r.t, r.lab, slmp.Port)
	data := noise(250)
	write(r.t, conn, raw(slmp.SYN, 1, 100, data[100:200]))
	write(r.t, conn, raw(slmp.SYN|slmp.EOM, 1, 200, data[200:]))
	eventually(r.t, "both are held, or dropped", func() bool {
		st := r.stats()
		return r.tier.holds && st.Held == 2 || !r.tier.holds && st.Dropped[spin.DropNoHeader] == 2
	})
	if n := len(r.record.all()); n > 0 {
		r.t.Errorf("%d handlers have run before the header packet came", n)
	}
	write(r.t, conn, raw(slmp.SYN, 1, 0, data[:100]))
	acked := map[uint32]bool{}
	if !r.tier.holds { // the sender hears nothing of them
		acked[answer(r.t, conn).Offset] = true
		write(r.t, conn, raw(slmp.SYN, 1, 100, data[100:200]))
		acked[answer(r.t, conn).Offset] = true
		write(r.t, conn, raw(slmp.SYN|slmp.EOM, 1, 200, data[200:]))
	}
	for len(acked) < 3 {
		if a := answer(r.t, conn); a.ID != 1 || acked[a.Offset] {
			r.t.Fatalf("%+v, after those at %v", a, acked)
		} else {
			acked[a.Offset] = true
		}
	}
	r.event(1, spin.Result{Length: 250})
	r.record.check(map[messageID][]byte{{conn.LocalAddr().(*net.UDPAddr).AddrPort(), 1}: data})
}

// emptyOnes sends messages without bytes, and ends without any.
func emptyOnes(r *rig) {
	windows, intact := guarded(r.t, 4096)
	r.start(windows[0], nil)
	conn := dialUDP(r.t, r.lab, slmp.Port)
	data := noise(200)
	want := map[messageID][]byte{}
	ended := func(id uint32, data []byte) {
		r.t.Helper()
		r.event(id, spin.Result{Length: uint64(len(data))})
		want[messageID{conn.LocalAddr().(*net.UDPAddr).AddrPort(), id}] = data
		r.record.check(want)
		holds(r.t, windows[0], 0, data)
	}
	r.talk(conn, slmp.EOM, 1, 0, nil)
	ended(1, nil)
	r.talk(conn, slmp.EOM, 1, 0, nil) // again
	r.record.check(want)

	r.talk(conn, 0, 2, 0, data[:100])
	r.talk(conn, 0, 2, 100, data[100:])
	r.talk(conn, slmp.EOM, 2, 200, nil)
	ended(2, data)

	// EOM before the last segment with bytes, which is answered by EOM's answer, or both are.
	r.talk(conn, 0, 3, 0, data[:100])
	before := r.stats().Waits
	write(r.t, conn, raw(slmp.EOM|slmp.SYN, 3, 200, nil))
	write(r.t, conn, raw(slmp.EOM|slmp.SYN, 3, 200, nil))
	eventually(r.t, "EOM waits", func() bool { return r.stats().Waits == before+1 })
	write(r.t, conn, raw(slmp.SYN, 3, 100, data[100:]))
	for {
		a := answer(r.t, conn)
		if a.ID != 3 || a.Offset < 100 {
			r.t.Errorf("%+v", a)
		}
		if a.Offset == 200 {
			break
		}
	}
	ended(3, data)
	r.noEvent()
	intact()
}

// fpspinSender has messages sent as FPsPIN does: cut so, each segment once, and as many
// acknowledgements awaited.
func fpspinSender(r *rig) {
	windows, intact := guarded(r.t, 64<<10)
	r.start(windows[0], nil)
	want := map[messageID][]byte{}
	id := uint32(100)
	for _, by := range []struct{ window, threads int }{{1, 1}, {16, 1}, {64, 1}, {64, 4}} {
		for _, align := range []int{64, 4} { // 1408 and 1460 bytes in a packet
			s := fpspintest.Sender{Window: by.window, Align: align, Threads: by.threads}
			for _, size := range []int{0, 1, s.Payload() - 1, s.Payload(), s.Payload() + 1, 2 * s.Payload(), 20*s.Payload() + 5} {
				id++
				data := noise(size)
				var sent fpspintest.Result
				err := r.lab.Host.NS.Do(func() (err error) {
					sent, err = s.Send(netip.AddrPortFrom(r.lab.NIC.Addr.Addr(), slmp.Port), id, data)
					return err
				})
				if err != nil || sent.ACKs != sent.Sent || sent.Other != 0 {
					r.t.Errorf("window %d, %d threads, align %d, %d bytes: %v, %+v", by.window, by.threads, align, size, err, sent)
					continue
				}
				want[messageID{netip.AddrPortFrom(r.lab.Host.Addr.Addr(), sent.Port), id}] = data
				r.event(id, spin.Result{Length: uint64(size)})
				holds(r.t, windows[0], 0, data)
			}
		}
	}
	r.record.check(want)
	intact()
}

// emptyHeaders has messages begin with a segment of offset 0 without bytes, which says nothing of how long the others are.
func emptyHeaders(r *rig) {
	windows, intact := guarded(r.t, 4096)
	r.start(windows[0], nil)
	conn := dialUDP(r.t, r.lab, slmp.Port)
	data := noise(250)
	want := map[messageID][]byte{}
	type part struct {
		flags    slmp.Flags
		from, to int
	}
	for id, parts := range [][]part{
		{{0, 0, 0}, {0, 0, 100}, {0, 100, 200}, {slmp.EOM, 200, 250}},
		{{0, 0, 0}, {0, 0, 0}, {0, 100, 200}, {0, 0, 100}, {slmp.EOM, 200, 250}},
		{{0, 0, 0}, {0, 0, 100}, {0, 0, 0}, {0, 100, 200}, {slmp.EOM, 200, 200}},
		{{0, 0, 0}, {slmp.EOM, 0, 250}},
		{{0, 0, 0}, {slmp.EOM, 0, 0}},
	} {
		last := 0
		for _, p := range parts {
			r.talk(conn, p.flags, uint32(id), uint32(p.from), data[p.from:p.to])
			last = p.to
		}
		r.event(uint32(id), spin.Result{Length: uint64(last)})
		want[messageID{conn.LocalAddr().(*net.UDPAddr).AddrPort(), uint32(id)}] = data[:last]
		holds(r.t, windows[0], 0, data[:last])
	}
	for id, h := range r.record.histories() {
		if len(h.headers) != 1 || len(h.completions) != 1 {
			r.t.Errorf("message %v: %d header handlers, %d completion handlers", id, len(h.headers), len(h.completions))
		}
	}
	if h := r.record.histories(); len(h) != len(want) {
		r.t.Errorf("%d messages, want %d", len(h), len(want))
	}
	r.noEvent()
	intact()
}

// fpspinReordered has EOM overtake the last other segment. FPsPIN's sender counts acknowledgements, whatever they say, and
// each that is missing is a failed message.
func fpspinReordered(r *rig) {
	windows, intact := guarded(r.t, 4096)
	r.start(windows[0], nil)
	data := noise(2500)
	for id := range uint32(60) {
		conn := dialUDP(r.t, r.lab, slmp.Port) // a socket for each message
		got := map[uint32]int{}
		take := func(n int) {
			r.t.Helper()
			for range n {
				a := answer(r.t, conn)
				if a.ID != id || a.Cumulative {
					r.t.Fatalf("message %d: %+v", id, a)
				}
				got[a.Offset]++
			}
		}
		write(r.t, conn, raw(slmp.SYN, id, 0, data[:1000]))
		take(1)
		write(r.t, conn, raw(slmp.SYN|slmp.EOM, id, 2000, data[2000:]))
		write(r.t, conn, raw(slmp.SYN, id, 1000, data[1000:2000]))
		take(2)
		if got[0] != 1 || got[1000] != 1 || got[2000] != 1 {
			r.t.Errorf("message %d: acknowledgements by offset: %v", id, got)
		}
		if !r.unheard {
			r.event(id, spin.Result{Length: 2500})
		}
		holds(r.t, windows[0], 0, data)
		conn.Close()
	}
	r.noEvent()
	intact()
}

func fpspinUnheard(r *rig) {
	r.unheard = true
	fpspinReordered(r)
	r.remove() // end would wait for events
}

// oneEvent has an application with room for one event, which takes each a while after it came. Messages of senders that send
// once wait, and go on without another packet; those that were acknowledged were told.
func oneEvent(r *rig) {
	taken := make(chan spin.MessageEvent, 1)
	r.start(nil, func(s *nic.ContextSpec) { s.Events, s.Timeout = taken, time.Minute })
	conn := dialUDP(r.t, r.lab, slmp.Port)
	data := noise(20)
	const count = slots / 2
	for id := range uint32(count) {
		write(r.t, conn, raw(slmp.SYN|slmp.EOM, id, 0, data)) // once, and as FPsPIN does
	}
	eventually(r.t, "all messages have come", func() bool { return r.stats().Started == count })
	acked := map[uint32]bool{}
	hear := func(d time.Duration) {
		for {
			_ = conn.SetReadDeadline(time.Now().Add(d))
			b := make([]byte, 2000)
			n, err := conn.Read(b)
			if err != nil {
				return
			}
			var a slmp.Ack
			if a, err = slmp.ParseAck(b[:n]); err != nil {
				r.t.Fatal(err)
			}
			if acked[a.ID] {
				r.t.Errorf("message %d is acknowledged twice", a.ID)
			}
			acked[a.ID] = true
		}
	}
	told := map[uint32]bool{}
	for range count {
		hear(5 * time.Millisecond)
		if most := len(told) + cap(taken); len(acked) > most {
			r.t.Fatalf("%d messages are acknowledged, and there was room for the events of %d", len(acked), most)
		}
		e := nextEvent(r.t, taken)
		if e.Cause != spin.Complete || e.Length != 20 || told[e.Number] {
			r.t.Fatalf("event %+v", e)
		}
		told[e.Number] = true
	}
	for deadline := time.Now().Add(testenv.Slowness() * 10 * time.Second); len(acked) < count && time.Now().Before(deadline); {
		hear(20 * time.Millisecond)
	}
	if len(acked) != count {
		r.t.Errorf("%d of %d messages are acknowledged, and all were told", len(acked), count)
	}
	if st := r.settled(); st.Ended != count {
		r.t.Errorf("%+v", st)
	}
	r.remove()
}

// lateCopies sends all of a message again when it has ended.
func lateCopies(r *rig) {
	r.start(nil, nil)
	conn := dialUDP(r.t, r.lab, slmp.Port)
	const segments, size = 6, 100
	data := noise(segments*size - 10)
	for round := range 4 {
		for k := range segments {
			flags := slmp.Flags(0)
			if k == segments-1 {
				flags = slmp.EOM
			}
			if round%2 == 1 {
				flags |= slmp.Cumulative
			}
			part := data[k*size : min((k+1)*size, len(data))]
			if round < 2 || k%2 == 0 {
				r.talk(conn, flags, 7, uint32(k*size), part)
				continue
			}
			// Whatever it says, it is a copy.
			write(r.t, conn, raw(flags|slmp.SYN|slmp.Cumulative, 7, uint32(k*size), noise(len(part))))
			if a := answer(r.t, conn); a.Wait || a.End != slmp.EndMax {
				r.t.Errorf("%+v", a)
			}
		}
		if round == 0 {
			r.event(7, spin.Result{Length: uint64(len(data))})
		}
	}
	r.record.check(map[messageID][]byte{{conn.LocalAddr().(*net.UDPAddr).AddrPort(), 7}: data})
	r.noEvent()
	if st := r.stats(); st.Started != 1 || st.Ended != 1 || st.Duplicates != 3*segments {
		r.t.Errorf("%+v", st)
	}
}

// returnCodes has handlers say what becomes of payload.
func returnCodes(r *rig) {
	windows, intact := guarded(r.t, 4096)
	r.start(windows[0], nil)
	conn := dialUDP(r.t, r.lab, slmp.Port)
	for i, tt := range []struct {
		what     string
		order    uint32
		payloads int
		dropped  uint64
		there    int // bytes in the window
	}{
		{"ProcessData", 0, 3, 0, 250},
		{"Proceed", bpf.WitnessProceed, 0, 0, 250},
		{"a header handler's Drop", bpf.WitnessDropMessage, 0, 250, 0},
		{"a payload handler's Drop", bpf.WitnessDropPayload, 3, 150, 250}, // deposited by itself
	} {
		if _, err := windows[0].WriteAt(make([]byte, 4096), 0); err != nil {
			r.t.Fatal(err)
		}
		id := tt.order<<8 | uint32(i)
		data := noise(250)
		r.talk(conn, 0, id, 0, data[:100])
		r.talk(conn, 0, id, 100, data[100:200])
		r.talk(conn, slmp.EOM, id, 200, data[200:])
		r.event(id, spin.Result{Length: 250, Dropped: tt.dropped})
		r.ran(conn, id, tt.payloads, 1)
		if c := r.only(conn, id).completions; len(c) == 1 && (c[0].Offset != 250 || c[0].Length != 250) {
			r.t.Errorf("%s: the completion handler: %+v", tt.what, c[0])
		}
		holds(r.t, windows[0], 0, append(slices.Clip(data[:tt.there]), make([]byte, 4096-tt.there)...))
	}
	r.noEvent()
	intact()
}

// failures has each of the handlers fail: the application hears once, the sender nothing any
// more, and nothing else runs for the message.
func failures(r *rig) {
	r.start(nil, nil)
	conn := dialUDP(r.t, r.lab, slmp.Port)
	data := noise(250)
	failed := func(id uint32, length, missing uint64) {
		r.t.Helper()
		if e := r.event(id, spin.Result{Cause: spin.Failed, Length: length, Missing: missing}); e.Err == nil {
			r.t.Errorf("event %+v", e)
		}
	}
	handlers := func() uint64 { return r.c.Stats().Failed }
	fail := func(flags slmp.Flags, id, offset uint32, payload []byte) {
		r.t.Helper()
		before := handlers()
		write(r.t, conn, raw(flags|slmp.SYN, id, offset, payload))
		eventually(r.t, "the handler has failed", func() bool { return handlers() == before+1 })
	}

	id := bpf.WitnessFailHeader << 8
	fail(0, id, 0, data[:100])
	failed(id, 100, 100)
	r.unanswered(conn, 0, id, 100, data[100:200], droppedDead)
	r.unanswered(conn, 0, id, 0, data[:100], droppedDead)
	r.ran(conn, id, 0, 0)

	id = bpf.WitnessFailPayload << 8
	r.talk(conn, 0, id, 0, data[:100])
	fail(0, id, 100, data[100:200])
	failed(id, 200, 100)
	r.unanswered(conn, 0, id, 100, data[100:200], droppedDead)
	r.unanswered(conn, slmp.EOM, id, 200, data[200:], droppedDead)
	r.unanswered(conn, 0, id, 0, data[:100], droppedDead)
	r.ran(conn, id, 2, 0)

	id = bpf.WitnessFailCompletion << 8
	r.talk(conn, 0, id, 0, data[:100])
	r.talk(conn, 0, id, 100, data[100:200])
	fail(slmp.EOM, id, 200, data[200:])
	failed(id, 250, 0)
	r.unanswered(conn, slmp.EOM, id, 200, data[200:], droppedDead)
	r.unanswered(conn, 0, id, 0, data[:100], droppedDead)
	r.ran(conn, id, 3, 1)
	r.noEvent()
	if st := r.stats(); st.Failed != 3 || st.Started != st.Failed+st.Ended {
		r.t.Errorf("%+v", st)
	}
}

// timeouts lets messages lie.
func timeouts(r *rig) {
	const timeout = 200 * time.Millisecond
	r.start(nil, func(s *nic.ContextSpec) { s.Timeout = testenv.Slowness() * timeout })
	conn := dialUDP(r.t, r.lab, slmp.Port)
	data := noise(400)
	r.talk(conn, 0, 1, 0, data[:100])
	r.talk(conn, 0, 1, 300, data[300:])
	r.event(1, spin.Result{Cause: spin.TimedOut, Length: 400, Missing: 200})
	r.ran(conn, 1, 2, 1)
	if c := r.only(conn, 1).completions; len(c) == 1 && (c[0].Offset != 400 || c[0].Length != 200) {
		r.t.Errorf("the completion handler: %+v", c[0])
	}
	r.unanswered(conn, 0, 1, 100, data[100:200], droppedDead)
	r.unanswered(conn, slmp.EOM, 1, 200, data[200:300], droppedDead)
	r.ran(conn, 1, 2, 1)

	// With its end, and without what lies before.
	r.talk(conn, 0, 2, 0, data[:100])
	write(r.t, conn, raw(slmp.EOM, 2, 300, data[300:]))
	r.event(2, spin.Result{Cause: spin.TimedOut, Length: 400, Missing: 200})
	r.ran(conn, 2, 2, 1)

	// News keep a message, however old it is.
	for k := range uint32(8) {
		r.talk(conn, 0, 3, 10*k, data[:10])
		time.Sleep(r.spec.Timeout / 3)
	}
	r.noEvent()
	r.event(3, spin.Result{Cause: spin.TimedOut, Length: 80})
	if st := r.settled(); st.Abandoned != 3 {
		r.t.Errorf("%+v", st)
	}
}

// noEvents has an application take no events: EOM is acknowledged if there is room, and each
// message's event comes once, in the end.
func noEvents(r *rig) {
	taken := make(chan spin.MessageEvent, 1)
	r.start(nil, func(s *nic.ContextSpec) { s.Events, s.Timeout = taken, time.Minute })
	conn := dialUDP(r.t, r.lab, slmp.Port)
	data := noise(20)
	send := func(id uint32) slmp.Ack {
		write(r.t, conn, raw(slmp.SYN|slmp.EOM|slmp.Cumulative, id, 0, data))
		return answer(r.t, conn)
	}
	id := uint32(0)
	for ; ; id++ {
		a := send(id)
		if a.ID != id || a.Wait && a.End != 20 {
			r.t.Fatalf("message %d: %+v", id, a)
		}
		if a.Wait {
			break
		}
	}
	if int(id) != cap(taken) {
		r.t.Errorf("%d messages are acknowledged, and there is room for %d events", id, cap(taken))
	}
	if a := send(id); !a.Wait {
		r.t.Errorf("again, without room: %+v", a)
	}
	h := r.only(conn, id)
	if len(h.completions) != 1 || len(h.payloads) != 1 {
		r.t.Errorf("what ran for the message: %+v", h)
	}
	for next := uint32(0); next <= id; next++ {
		if next == id {
			eventually(r.t, "EOM is acknowledged when there is room", func() bool { return !send(id).Wait })
		}
		if e := nextEvent(r.t, taken); e.Number != next || e.Cause != spin.Complete || e.Length != 20 {
			r.t.Fatalf("event %+v, want that of message %d", e, next)
		}
	}
	r.settled()
	r.remove()
	if len(taken) > 0 {
		r.t.Errorf("one more event: %+v", <-taken)
	}
	all := r.record.histories()
	for i := range id + 1 {
		if err := all[messageID{conn.LocalAddr().(*net.UDPAddr).AddrPort(), i}].whole(data); err != nil {
			r.t.Fatalf("message %d: %v", i, err)
		}
	}
}

// twoWindows has two contexts side by side, each with a window of its own in the same memory.
func twoWindows(r *rig) {
	const size = 16 << 10
	windows, intact := guarded(r.t, size, size)
	second := &rig{t: r.t, tier: r.tier, lab: r.lab, n: r.n, port: 9331}
	second.start(windows[1], func(s *nic.ContextSpec) { s.Name, s.Rulesets = "second", sets(slmpAt(9331)) })
	r.start(windows[0], nil)
	var wg sync.WaitGroup
	for i, at := range []*rig{r, second} {
		w := windows[i]
		conn := connect(r.t, r.lab, slmp.Port+i, slmp.Config{})
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(9, uint64(i)))
			for range 60 {
				data := noise(rng.IntN(size + 1))
				if rng.IntN(8) == 0 {
					data = noise(size)
				}
				d, err := conn.SendBytes(patient(r.t), data, slmp.Options{})
				if err != nil {
					r.t.Errorf("%d bytes to %s: %v", len(data), at.spec.Name, err)
					return
				}
				at.event(d.ID, spin.Result{Length: uint64(len(data))})
				holds(r.t, w, 0, data)
			}
		})
	}
	wg.Wait()
	intact()
	// A message that has no room: what fits is written, and no byte behind it, by its handler
	// or without one.
	for i, at := range []*rig{r, second} {
		conn := dialUDP(r.t, r.lab, uint16(slmp.Port+i))
		for _, id := range []uint32{1, bpf.WitnessProceed << 8} {
			kept := make([]byte, size)
			if _, err := windows[1-i].ReadAt(kept, 0); err != nil {
				r.t.Fatal(err)
			}
			data := noise(128)
			at.talk(conn, 0, id, 0, data)
			at.talk(conn, 0, id, size-128, data)
			write(r.t, conn, raw(slmp.SYN, id, size, data))
			at.event(id, spin.Result{Cause: spin.Failed, Length: size + 128, Missing: size - 128})
			holds(r.t, windows[i], size-128, data)
			holds(r.t, windows[1-i], 0, kept)
		}
	}
	intact()
	second.end()
}

// removals removes contexts with messages open, while more come: 10,000 times in a soak of
// SOAK=500, otherwise 20 times.
func removals(r *rig) {
	rounds := 4 * testenv.Soak()
	const open = 8
	conn := dialUDP(r.t, r.lab, slmp.Port)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	stream := dialUDP(r.t, r.lab, slmp.Port)
	wg.Go(func() {
		data := noise(64)
		for id := uint32(1000); ; id++ {
			select {
			case <-stop:
				return
			default:
			}
			_, _ = stream.Write(raw(0, id/3, id%3*64, data)) // when nobody takes it, Linux answers
			time.Sleep(50 * time.Microsecond)
		}
	})
	var fds, goroutines int
	var before map[object]bool
	lived := map[object]bool{}
	for round := range rounds {
		r.start(nil, func(s *nic.ContextSpec) { s.Messages = 1024 })
		maps.Copy(lived, objects(r.t))
		c, first := r.c, uint32(round*open)
		for i := range uint32(open) {
			r.talk(conn, 0, first+i, 0, noise(100))
			if i%2 == 0 {
				write(r.t, conn, raw(slmp.SYN|slmp.EOM|slmp.Cumulative, first+i, 200+100*i, noise(7)))
				if a := answer(r.t, conn); !a.Wait || a.End != 100 {
					r.t.Errorf("EOM of message %d: %+v", first+i, a)
				}
			}
		}
		r.remove()
		ran := len(r.record.all())
		st := messages(r.t, c)
		if st.Open != 0 || st.Abandoned < open || st.Started != st.Ended+st.Abandoned || c.Stats().EventsLost != 0 {
			r.t.Fatalf("round %d: %+v", round, st)
		}
		told := map[uint32]bool{}
		for range st.Started {
			e := nextEvent(r.t, r.events)
			i := e.Number - first
			if e.Source.Port() != uint16(conn.LocalAddr().(*net.UDPAddr).Port) {
				continue // of the stream
			}
			want := spin.Result{Cause: spin.Removed, Length: 100, Time: e.Time}
			if i%2 == 0 {
				want.Length, want.Missing = uint64(207+100*i), uint64(100+100*i)
			}
			if i >= open || told[i] || e.Result != want {
				r.t.Errorf("round %d: event %+v", round, e)
			}
			told[i] = true
		}
		r.noEvent()
		all := r.record.histories()
		for i := range uint32(open) {
			h := all[messageID{conn.LocalAddr().(*net.UDPAddr).AddrPort(), first + i}]
			if !told[i] || h == nil || h.order() != nil || len(h.completions) != 1 || len(h.payloads) != 2-int(i%2) {
				r.t.Errorf("round %d, message %d: told: %v, %+v", round, i, told[i], h)
			}
		}
		if now := len(r.record.all()); now != ran {
			r.t.Errorf("round %d: %d handlers ran after Remove", round, now-ran)
		}
		if err := r.record.mem.Close(); err != nil {
			r.t.Error(err)
		}
		r.record = nil
		if round == 0 {
			fds, goroutines = len(descriptors(r.t)), runtime.NumGoroutine()
			before = objects(r.t) // with what the NIC has loaded for its first context
		}
		if r.t.Failed() {
			break
		}
	}
	close(stop)
	wg.Wait()
	eventually(r.t, "goroutines ended", func() bool { return runtime.NumGoroutine() <= goroutines })
	if now := len(descriptors(r.t)); now > fds {
		r.t.Errorf("%d descriptors after %d rounds, %d before", now, rounds, fds)
	}
	lost(r.t, before, lived)
}

// lost waits until none of the maps and programs that have lived is left, but for those from before.
func lost(t *testing.T, before, lived map[object]bool) {
	t.Helper()
	for what := range before {
		delete(lived, what)
	}
	if len(lived) == 0 {
		t.Error("no map and no program has lived")
	}
	eventually(t, fmt.Sprintf("none of %d maps and programs is left", len(lived)), func() bool {
		runtime.GC() // package ebpf leaves its own mappings to it, and nothing else may need it for minutes
		for what := range lived {
			if !what.gone() {
				return false
			}
			delete(lived, what)
		}
		return true
	})
	for what := range lived {
		if !what.gone() {
			t.Errorf("left: %v", what)
		}
	}
}

// An object is a program or a map in the kernel.
type object struct {
	program bool
	id      uint32
}

// objects returns those that this process has descriptors of, and the maps of the programs.
func objects(t *testing.T) map[object]bool {
	t.Helper()
	all := map[object]bool{}
	fds, err := os.ReadDir("/proc/self/fdinfo")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		info, err := os.ReadFile("/proc/self/fdinfo/" + fd.Name())
		if err != nil {
			continue // closed meanwhile
		}
		for line := range strings.Lines(string(info)) {
			var o object
			if n, _ := fmt.Sscanf(line, "map_id: %d", &o.id); n == 1 {
				all[o] = true
			} else if n, _ := fmt.Sscanf(line, "prog_id: %d", &o.id); n == 1 {
				o.program = true
				all[o] = true
			}
		}
	}
	for o := range maps.Clone(all) {
		if !o.program {
			continue
		}
		p, err := ebpf.NewProgramFromID(ebpf.ProgramID(o.id))
		if err != nil {
			continue
		}
		if info, err := p.Info(); err != nil {
			t.Error(err)
		} else if ids, ok := info.MapIDs(); ok {
			for _, id := range ids {
				all[object{id: uint32(id)}] = true
			}
		}
		p.Close()
	}
	return all
}

// gone tells whether the kernel has an object no more.
// String names what is there.
func (o object) String() string {
	if o.program {
		if p, err := ebpf.NewProgramFromID(ebpf.ProgramID(o.id)); err == nil {
			defer p.Close()
			return p.String()
		}
		return fmt.Sprintf("program %d", o.id)
	}
	if m, err := ebpf.NewMapFromID(ebpf.MapID(o.id)); err == nil {
		defer m.Close()
		return m.String()
	}
	return fmt.Sprintf("map %d", o.id)
}

func (o object) gone() bool {
	var err error
	var c io.Closer
	if o.program {
		c, err = ebpf.NewProgramFromID(ebpf.ProgramID(o.id))
	} else {
		c, err = ebpf.NewMapFromID(ebpf.MapID(o.id))
	}
	if err == nil {
		c.Close()
	}
	return errors.Is(err, os.ErrNotExist)
}
