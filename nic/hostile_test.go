// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/loader/objecttest"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// hostileSource is as hostile as an object can be: its handlers do what the bytes of the packet say, which are
// random, with all that they reach. MESSAGES and HANDS say what they are for.
const hostileSource = `
#ifdef MESSAGES
#define XSPIN_STATE 64
#include "xspin_message.h"
#define WINDOW (64 << 10)
#define BEHIND 0 /* the format's header */
#else
#include "xspin_handler.h"
#define BEHIND 42 /* that of UDP: the format has none */
#endif
XSPIN_LICENSE("GPL");

const volatile __u64 salt = 0;

struct dice {
	__u64 w[9]; /* as long as a line of the log */
};

struct values {
	__u64 w[8];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 8);
	__type(key, __u32);
	__type(value, struct values);
} mapped SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16);
	__type(key, __u64);
	__type(value, struct values);
} few SEC(".maps");

__u64 global[512];

/* A message that times out has no packet: its completion handler takes what is left of another. */
static __always_inline void throw(struct xdp_md *ctx, struct xspin_her *her, struct dice *d)
{
	__u32 k = 0;
	struct values *v;

	__builtin_memset(d, 0, sizeof(*d));
	if (!xspin_load(ctx, (her->payload + BEHIND) & 0xffff, d, sizeof(*d)))
		return;
	v = bpf_map_lookup_elem(&mapped, &k);
	for (int i = 0; i < 8; i++)
		d->w[i] = (v ? v->w[i] : 0) ^ her->key[0];
}

/* A code: two of sixteen are any. */
static __always_inline int code(const struct dice *d)
{
	switch (d->w[8] & 15) {
	case 0:
		return (int)d->w[7];
	case 1:
		return d->w[7] & 31;
	case 2:
		return XSPIN_DROP;
	}
	return XSPIN_SUCCESS;
}

/* What packets have, too. */
static __always_inline int scribble(struct xdp_md *ctx, struct xspin_her *her, struct dice *d)
{
	volatile __u32 *word = (volatile __u32 *)her;
	const __u64 what = d->w[0] ^ salt;
	__u64 *p, at = what & 1 ? d->w[1] : d->w[1] & 0xffff8;
	struct values *v;
	__u32 k = d->w[2] & 15;

	if (what & 2)
		for (__u32 i = 0; i < sizeof(*her) / 4; i++)
			word[i] = d->w[i % 9];
	if (d->w[1] & 7) /* or no message would ever end */
		her->action = XDP_DROP + (d->w[3] & 15) % 3;
	if (what & 8 && (p = xspin_memory(at, 8)))
		*p = d->w[4];
#ifndef HANDS
	if (what & 16 && (p = xspin_hpu_memory(her, at & 0xfff8, 8)))
		*p = d->w[5];
#endif
	if (what & 32)
		xspin_store(ctx, d->w[6] & 1023, d, sizeof(*d));
	v = bpf_map_lookup_elem(&mapped, &k);
	if (v)
		*v = *(struct values *)d;
	if (what & 64)
		bpf_map_update_elem(&few, &d->w[3], d, BPF_ANY);
	if (what & 128)
		bpf_map_delete_elem(&few, &d->w[4]);
	global[d->w[5] & 511] = d->w[6];
	xspin_count(d->w[7] & 31, d->w[0]);
	return code(d);
}

#ifdef MESSAGES
static __always_inline int more(struct xdp_md *ctx, struct xspin_her *her, struct dice *d)
{
	const __u64 what = d->w[4] ^ salt;
	/* Anywhere, or at the end of a window. */
	__u64 at = what & 1 ? d->w[5] : WINDOW - 4096 + (d->w[5] & 8191), was = 0;
	struct values *state = xspin_state(her);
	struct xspin_info i;
	int bad = 0;

	if (state)
		*state = *(struct values *)d;
	if (what & 2)
		bad |= xspin_deposit(ctx, her);
	if (what & 4)
		bad |= xspin_window_write(ctx, 1, at, d->w[6] & 1023, d->w[7] & 4095);
	if (what & 8)
		bad |= xspin_window_store(2, at, &d->w[0], 64);
	if (what & 16)
		bad |= xspin_window_load(1, at, &d->w[0], 64);
	if (what & 32)
		bad |= xspin_window_add64(0, at, d->w[7], &was);
	if (what & 64)
		bad |= xspin_window_cas64(2, at & ~7ULL, was, d->w[6], &was);
	if (what & 128)
		bad |= xspin_window_move(d->w[6], at, &was, 8);
	if (what & 256)
		xspin_notify(d->w[1], d->w[2], was);
	if (what & 512)
		xspin_log_line(d, d->w[3], was);
	if (what & 1024 && xspin_about(her, &i))
		global[i.slot & 511] = i.length;
	return (what & 0x7000) ? code(d) : bad;
}

XSPIN_HEADER
{
	struct dice d;
	int is;

	throw(ctx, her, &d);
	is = scribble(ctx, her, &d);
	if (d.w[8] & 32 && is == XSPIN_SUCCESS)
		return XSPIN_PROCEED;
#ifdef HANDS
	if (d.w[8] & 64)
		return XSPIN_HAND_OVER;
#endif
	return is;
}

XSPIN_PAYLOAD
{
	struct dice d;

	throw(ctx, her, &d);
	scribble(ctx, her, &d);
	return more(ctx, her, &d);
}

XSPIN_COMPLETION
{
	struct dice d;

	throw(ctx, her, &d);
	scribble(ctx, her, &d);
	return more(ctx, her, &d);
}
#ifdef HANDS
XSPIN_MESSAGES(HEADER | PAYLOAD | COMPLETION | HAND_OVER);
#else
XSPIN_MESSAGES(HEADER | PAYLOAD | COMPLETION);
#endif
#else
XSPIN_PAYLOAD
{
	struct dice d;

	throw(ctx, her, &d);
	return scribble(ctx, her, &d);
}

XSPIN_CONTEXT(PAYLOAD);
#endif
`

// hostileObject compiles hostileSource.
func hostileObject(t *testing.T, flags ...string) *nic.Object {
	t.Helper()
	o, err := nic.ReadObject("hostile.o", objecttest.Compile(t, hostileSource, flags...), nic.ObjectMemory)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// within calls f, which returns in bounded time. If it takes many times as long there is a panic, with the stacks of all
// goroutines.
func within(what string, f func()) {
	defer time.AfterFunc(testenv.Slowness()*2*time.Minute, func() {
		buf := make([]byte, 1<<20)
		panic(fmt.Sprintf("%s does not return:\n%s", what, buf[:runtime.Stack(buf, true)]))
	}).Stop()
	f()
}

// A hostileParty is a context that comes and goes, whose handlers or whose application are hostile.
type hostileParty struct {
	name string
	port uint16
	// spec is that of a life, and what ends what it needs when the context has been removed.
	spec func(life int) (spec nic.ContextSpec, end func(), err error)
	slmp bool

	now   atomic.Pointer[nic.Context] // of this life, or of the last
	posts atomic.Bool                 // receives: else all messages take the window
	did   spin.ContextStats           // in all lives
}

// live has the context live so many times, and sees to it that packets come meanwhile. After an error it leaves all as it is.
func (p *hostileParty) live(t *testing.T, n *nic.NIC, lives int) {
	is := func(what string, err error) bool {
		if err != nil {
			t.Errorf("%s: %s: %v", p.name, what, err)
		}
		return err == nil
	}
	for life := range lives {
		spec, end, err := p.spec(life)
		if !is("what it needs", err) {
			return
		}
		var c *nic.Context
		within("Install of "+p.name, func() { c, err = n.Install(spec) })
		if !is("Install", err) {
			return
		}
		p.now.Store(c)
		p.posts.Store(life%2 == 1)
		for range 2 {
			within("Activate of "+p.name, func() { err = n.Activate(c) })
			if !is("Activate", err) {
				return
			}
			// Matched ones: without room for events, handlers get no new messages.
			eventually(t, p.name+" gets packets", func() bool {
				s, err := n.Stats()
				if err != nil {
					return !is("NIC.Stats", err)
				}
				i := slices.IndexFunc(s.Contexts, func(s nic.ContextStats) bool { return s.ID == c.ID() })
				return i >= 0 && len(s.Contexts[i].Rulesets) > 0 && s.Contexts[i].Rulesets[0].Matched >= 100
			})
			within("Deactivate of "+p.name, func() { err = n.Deactivate(c) })
			if !is("Deactivate", err) {
				return
			}
		}
		within("Activate of "+p.name, func() { err = n.Activate(c) })
		if !is("Activate", err) {
			return
		}
		begun := time.Now()
		within("Remove of "+p.name, func() { err = n.Remove(c) })
		if took := time.Since(begun); !is("Remove", err) || took > testenv.Slowness()*20*time.Second {
			t.Errorf("%s: Remove took %v", p.name, took)
			return
		}
		s := c.Stats()
		p.did.Add(&s)
		if err := n.Activate(c); !errors.Is(err, nic.ErrRemoved) {
			t.Errorf("%s: Activate after Remove: %v", p.name, err)
		}
		end()
	}
}

// call calls all that Go has of the context, or of the one that was removed last.
func (p *hostileParty) call(n *nic.NIC, w spin.Window, r *rand.Rand, over <-chan struct{}) {
	for {
		select {
		case <-over:
			return
		default:
		}
		time.Sleep(time.Millisecond) // leave some of the CPUs to the others
		c := p.now.Load()
		if c == nil {
			continue
		}
		receive := spin.Receive{Tag: r.Uint32N(8), Ignore: ^uint32(0) >> (r.IntN(2) * r.IntN(33)), Keep: r.IntN(8) == 0, Binding: spin.Binding{
			Window: w, Place: r.Int64N(80<<10) - 4096, Size: r.Int64N(8<<10) - 256, User: r.Uint64(),
		}}
		another := receive
		if r.IntN(2) == 0 { // most stay, for messages
			another.User = r.Uint64()
		}
		for _, call := range []struct {
			name string
			f    func()
		}{
			{"Stats", func() { c.Stats() }},
			{"Messages", func() { c.Messages() }},
			{"ClearCounters", func() { c.ClearCounters() }},
			{"Rulesets", func() { c.Rulesets() }},
			{"Stuck", func() { c.Stuck() }},
			{"Post", func() {
				if p.posts.Load() {
					_ = c.Post(receive)
				}
			}},
			{"Unpost", func() { c.Unpost(another) }},
			{"SetTap", func() { c.SetTap(blindTap{}) }},
			{"SetTap of nil", func() { c.SetTap(nil) }},
			{"NIC.Stats", func() { _, _ = n.Stats() }},
			{"Drained", func() { n.Drained(c) }},
		} {
			within(call.name+" of "+p.name, call.f)
		}
	}
}

// send sends what may be segments, and, if there is a connection, messages as they should be. It closes both.
func (p *hostileParty) send(t *testing.T, sock net.Conn, conn *slmp.Conn, r *rand.Rand, over <-chan struct{}) {
	var posted, heard atomic.Int64
	random := func(most int) []byte {
		b := make([]byte, r.IntN(most))
		for i := 0; i+8 <= len(b); i += 8 {
			v := r.Uint64()
			switch r.IntN(4) {
			case 0: // for a line of the log, with more verbs than there are words
				copy(b[i:], "%u%d%x%u")
				continue
			case 1: // small numbers
				v &= 7<<32 | 7
			}
			binary.NativeEndian.PutUint64(b[i:], v)
		}
		return b
	}
	id := uint32(0)
	for i := 0; ; i++ {
		select {
		case <-over:
			if conn != nil {
				within("slmp.Conn.Close", func() { conn.Close() })
				if posted.Load() != heard.Load() {
					t.Errorf("%s: %d messages were posted, and %d have ended", p.name, posted.Load(), heard.Load())
				}
			}
			sock.Close()
			return
		default:
		}
		flags := []slmp.Flags{0, slmp.SYN, slmp.EOM, slmp.SYN | slmp.EOM, slmp.SYN | slmp.EOM, slmp.Flags(r.Uint32())}[r.IntN(6)]
		offset := []uint32{0, 0, 0, 400, 800, r.Uint32()}[r.IntN(6)]
		body := random(1400)
		if r.IntN(2) == 0 {
			body = append(body, make([]byte, 400)...)[:400]
		}
		if r.IntN(4) > 0 {
			id = r.Uint32N(1 << 16)
		}
		_, _ = sock.Write(raw(flags, id, offset, body)) // nobody may be there
		if conn != nil && posted.Load()-heard.Load() < 8 {
			if conn.Post(random(5000), func(error) { heard.Add(1) }) == nil {
				posted.Add(1)
			}
		}
		if i%16 == 0 {
			time.Sleep(100 * time.Microsecond) // leave some of the CPUs to the others
		}
	}
}

type blindTap struct{}

func (blindTap) Packet(*hpu.TapRecord, []byte) {}

// A lineCount counts lines of a log.
type lineCount struct{ atomic.Int64 }

func (n *lineCount) Log(int64, int, []byte) { n.Add(1) }

// A hostileApplication scribbles over its queue, until it is ended.
func hostileApplication(t *testing.T, way int, r *rand.Rand) (p *hostq.Pair, end func(), err error) {
	p, err = hostq.NewPair(hostq.PairConfig{Name: "hostile", Layout: hostq.Layout{Lanes: 1, Events: 4, Requests: 4, Payload: 100}})
	if err != nil {
		return nil, nil, err
	}
	memory, _, lanes := p.Descriptors()
	fd, err := unix.FcntlInt(uintptr(memory), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, nil, errors.Join(err, p.Close())
	}
	l := p.Layout()
	mem, err := hostq.OpenMemory(fd, l.Size())
	if err != nil {
		return nil, nil, errors.Join(err, p.Close())
	}
	over := make(chan struct{})
	var scribbling sync.WaitGroup
	scribbling.Go(func() {
		words := mem.Size() / 8
		at := func(i int64) *uint64 { return (*uint64)(unsafe.Pointer(&mem.Bytes()[i*8])) }
		for i := 0; ; i++ {
			select {
			case <-over:
				return
			default:
			}
			switch way % 3 {
			case 0: // anything, anywhere
				atomic.StoreUint64(at(r.Int64N(words)), r.Uint64())
			case 1: // small numbers
				atomic.StoreUint64(at(r.Int64N(words)), r.Uint64N(4)|r.Uint64N(4)<<32)
			default: // heads, which go on until they are beyond what there is: see docs/control.md
				atomic.AddUint64(at(int64(768+256*(i%2))/8), r.Uint64N(2))
			}
			if i%64 == 0 {
				_, _ = unix.Write(lanes[0], binary.NativeEndian.AppendUint64(nil, r.Uint64()>>r.IntN(64))[:8-r.IntN(2)])
				time.Sleep(100 * time.Microsecond)
			}
		}
	})
	return p, sync.OnceFunc(func() {
		close(over)
		scribbling.Wait()
		within("Close of a queue", func() {
			if err := errors.Join(mem.Close(), p.Close()); err != nil {
				t.Error(err)
			}
		})
	}), nil
}

// Contexts whose handlers or applications write what they like to all that they reach come and go, while all that
// Go has is asked of them: nothing hangs, they reach nothing beyond their windows, messages and pings of their neighbours
// on the NIC arrive as ever, and nothing is left of them.
func TestHostileContextsHarmThemselvesAlone(t *testing.T) {
	seed, lives := uint64(1), 2*testenv.Soak()
	if testenv.Soak() > 1 {
		seed = rand.Uint64()
	}
	t.Logf("seed %d", seed)
	var seeds atomic.Uint64
	dice := func() *rand.Rand { return rand.New(rand.NewPCG(seed, seeds.Add(1))) }

	lab := netnstest.Temp(t, netns.LabConfig{})
	wire(t, lab)
	ofPackets, ofMessages, handing := hostileObject(t), hostileObject(t, "-DMESSAGES"), hostileObject(t, "-DMESSAGES", "-DHANDS")
	depositObject, err := nic.BuiltinObject("deposit")
	if err != nil {
		t.Fatal(err)
	}
	const size = 64 << 10 // as in hostileSource
	windows, intact := guarded(t, size, size, size, size)
	mem, off := windows[3].Memory()
	readable, err := mem.Window(off, size, spin.Read)
	if err != nil {
		t.Fatal(err)
	}
	cpus, err := nic.KernelHPUs()
	if err != nil {
		t.Fatal(err)
	}
	var memories []*hostq.Memory
	for range 2 {
		m, err := hostq.NewMemory("hostile", int64(cpus)<<12)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { m.Close() })
		memories = append(memories, m)
	}
	var lines lineCount
	salts := dice()
	var salting sync.Mutex
	hostile := func(o *nic.Object, port uint16) nic.ContextSpec {
		salting.Lock()
		defer salting.Unlock()
		return nic.ContextSpec{
			Name: fmt.Sprint("hostile-", port), Rulesets: sets(slmpAt(port)), Window: windows[1], Messages: 1024, Timeout: 50 * time.Millisecond,
			Kernel: &nic.Kernel{Object: o, Parameters: map[string]any{"salt": salts.Uint64()}, Segments: 256},
			Resources: hpu.Resources{
				Windows: []hpu.NamedWindow{{Name: "second", Window: windows[2]}, {Name: "for reading", Window: readable}},
				Memory:  memories[0].Whole(), PerHPU: memories[1].Whole(), Log: &lines,
			},
		}
	}
	events := make(chan spin.MessageEvent, 4)
	parties := []*hostileParty{
		{name: "handlers of messages", port: 9340, slmp: true, spec: func(life int) (nic.ContextSpec, func(), error) {
			s := hostile(ofMessages, 9340)
			s.Hook = nic.HookXDP // they have 216 bytes of stack, more than the 192 that there are at tc, too
			s.Events = events
			return s, func() {}, nil
		}},
		{name: "handlers that hand messages over", port: 9341, slmp: true, spec: func(life int) (nic.ContextSpec, func(), error) {
			s := hostile(handing, 9341)
			pair, end, err := hostileApplication(t, life, dice())
			s.Resources.Host, s.Resources.PerHPU = pair, nil
			s.Handlers.Payload = func(h *hpu.HER) spin.Code {
				_ = h.Deposit()
				_ = h.Notify(uint64(h.Offset()), h.Head()[:20])
				return spin.Code(h.Offset() % 5)
			}
			return s, end, err
		}},
		{name: "handlers of packets", port: 9342, spec: func(life int) (nic.ContextSpec, func(), error) {
			s := hostile(ofPackets, 9342)
			s.Rulesets, s.Window, s.Messages, s.Timeout, s.Kernel.Segments = sets(matcher.UDPPort(9342)), nil, 0, 0, 0
			s.Resources.Windows, s.Resources.Log = nil, nil
			return s, func() {}, nil
		}},
		{name: "an application", port: 9343, slmp: true, spec: func(life int) (nic.ContextSpec, func(), error) {
			pair, end, err := hostileApplication(t, life+2, dice())
			return nic.ContextSpec{
				Name: "hostile-9343", Rulesets: sets(slmpAt(9343)), Kernel: &nic.Kernel{Object: depositObject}, Window: windows[1],
				Messages: 1024, Timeout: 50 * time.Millisecond, Resources: hpu.Resources{Host: pair},
			}, end, err
		}},
	}
	goroutines, files := runtime.NumGoroutine(), len(descriptors(t))
	n := open(t, lab, nic.Config{HPUs: 2, Workers: 1})
	n.SetRemoveTime(testenv.Slowness() * 10 * time.Second) // on a slow machine, too, Deactivate has time enough

	// The neighbours.
	told := make(chan spin.MessageEvent, 10)
	spec := nic.ContextSpec{Name: "deposit", Rulesets: sets(slmpAt(9331)), Kernel: &nic.Kernel{Object: depositObject}, Window: windows[0], Events: told}
	inKernel := run(t, n, spec)
	w := newWitness(t, true)
	inGo := run(t, n, nic.ContextSpec{Name: "witness", Rulesets: sets(slmpAt(9332)), Handlers: w.handlers()})
	echo := run(t, n, builtin(t, "echo-icmp", matcher.ICMPEcho()))
	toKernel, toGo := connect(t, lab, 9331, slmp.Config{}), connect(t, lab, 9332, slmp.Config{})

	over := make(chan struct{})
	var living, others sync.WaitGroup
	for _, p := range parties {
		living.Go(func() { p.live(t, n, lives) })
		calling, sending := dice(), dice()
		others.Go(func() { p.call(n, windows[1], calling, over) })
		sock, conn := dialUDP(t, lab, p.port), (*slmp.Conn)(nil)
		if p.slmp {
			conn = connect(t, lab, int(p.port), slmp.Config{Patience: 50 * time.Millisecond, MaxRTO: 10 * time.Millisecond})
		}
		others.Go(func() { p.send(t, sock, conn, sending, over) })
	}
	scribbling := dice()
	others.Go(func() { // applications write, too
		for i := 0; ; i++ {
			select {
			case <-over:
				return
			case <-events:
			default:
				time.Sleep(100 * time.Microsecond)
			}
			for _, b := range [][]byte{memories[0].Bytes(), memories[1].Bytes()} {
				*(*uint64)(unsafe.Pointer(&b[scribbling.IntN(len(b)/8)*8])) = scribbling.Uint64()
			}
			for _, w := range windows[1:3] {
				_, _ = w.CompareAndSwap64(scribbling.Int64N(size/8)*8, 0, scribbling.Uint64())
			}
		}
	})
	ended := make(chan struct{})
	go func() { living.Wait(); close(ended) }()
	sent := 0
	for alive := true; alive || sent < 20; sent++ {
		data := noise([]int{1, 1000, 30_000, size, 0}[sent%5])
		d, err := toKernel.SendBytes(patient(t), data, slmp.Options{})
		if err != nil {
			t.Errorf("message %d to the neighbour in the kernel: %v", sent, err)
			break
		}
		if e := nextEvent(t, told); e.Cause != spin.Complete || e.Number != d.ID || e.Length != uint64(len(data)) || e.Missing != 0 {
			t.Errorf("message %d of %d bytes: %+v", sent, len(data), e)
		}
		holds(t, windows[0], 0, data)
		if d, err = toGo.SendBytes(patient(t), data, slmp.Options{}); err != nil {
			t.Errorf("message %d to the neighbour in Go: %v", sent, err)
			break
		}
		w.check(messageID{toGo.LocalAddr(), d.ID}, data)
		if sent%5 == 0 {
			ping(t, lab, "-c", "3", "-i", "0.01", "-W", "10")
		}
		select {
		case <-ended:
			alive = false
		default:
		}
	}
	within("all of the hostile contexts", living.Wait)
	close(over)
	others.Wait()

	for _, p := range parties {
		t.Logf("%s: %d packets handled, %d failed, %d sent, %d left to Linux, %d handed over", p.name, p.did.Handled, p.did.Failed, p.did.Sent, p.did.ToStack, p.did.HandedOver)
		if p.did.Handled == 0 {
			t.Errorf("%s were never called", p.name)
		}
	}
	if lines.Load() == 0 {
		t.Error("no handler has written a line")
	}
	if s := messages(t, inKernel); s.Started != uint64(sent) || s.Ended != uint64(sent) || s.Open != 0 || len(told) > 0 || inKernel.Stats().Failed != 0 {
		t.Errorf("%d messages to the neighbour in the kernel: %+v, and %d more events\n%+v", sent, s, len(told), inKernel.Stats())
	}
	if s := messages(t, inGo); s.Started != uint64(sent) || s.Ended != uint64(sent) || s.Open != 0 || inGo.Stats().Failed != 0 {
		t.Errorf("%d messages to the neighbour in Go: %+v\n%+v", sent, s, inGo.Stats())
	}
	if s := echo.Stats(); s.Sent == 0 || s.Failed != 0 {
		t.Errorf("the neighbour that answers pings: %+v", s)
	}
	intact()
	holds(t, windows[3], 0, make([]byte, size))
	toKernel.Close()
	toGo.Close()
	within("NIC.Close", func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	eventually(t, "their goroutines ended", func() bool { return runtime.NumGoroutine() <= goroutines })
	if now := len(descriptors(t)); now > files {
		t.Errorf("%d descriptors after Close, %d before Open", now, files)
	}
}
