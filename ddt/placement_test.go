// SPDX-License-Identifier: Apache-2.0

package ddt_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"weak"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/ddt/ddttest"
)

// configs returns one of each strategy for a type, with all else by chance.
func configs(r *rand.Rand, c *ddt.Committed) []ddt.Config {
	var all []ddt.Config
	for _, s := range ddt.Strategies() {
		cfg := ddt.Config{
			Strategy: s, HPUs: 1 + r.IntN(4), Messages: 1 + r.IntN(3), Packet: 1 + r.IntN(int(c.Size())/(1+r.IntN(30))+1),
			Model: ddt.Model{Handler: time.Duration(1 + r.IntN(10000))},
		}
		if r.IntN(3) > 0 {
			cfg.Interval = 1 + r.Int64N(c.Size()/int64(1+r.IntN(30))+1)
		}
		all = append(all, cfg)
	}
	return all
}

// placement returns none if the type is not for this strategy, which is said of nested
// ones only.
func placement(t *testing.T, c *ddt.Committed, cfg ddt.Config) ddt.Placement {
	t.Helper()
	p, err := ddt.NewPlacement(c, cfg)
	if err != nil {
		root, _ := c.Root()
		if cfg.Strategy == ddt.Specialized && root.Depth > 2 && strings.Contains(err.Error(), "levels") {
			return nil
		}
		t.Fatalf("%+v: %v", cfg, err)
	}
	return p
}

// A piece is bytes [first, last) of a stream: a packet, of any length.
type piece struct{ first, last int64 }

// arrivals returns packets that have all bytes of a stream, cut like the config says or by
// chance, in order or not, some of them twice.
func arrivals(r *rand.Rand, size int64, cfg ddt.Config) []piece {
	var all []piece
	if r.IntN(2) == 0 {
		for first := int64(0); first < size; first += int64(cfg.Packet) {
			all = append(all, piece{first, min(first+int64(cfg.Packet), size)})
		}
	} else {
		at := cuts(r, size)
		for i := range len(at) - 1 {
			all = append(all, piece{at[i], at[i+1]})
		}
	}
	switch r.IntN(4) {
	case 0:
	case 1:
		slices.Reverse(all)
	default:
		r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	}
	for range r.IntN(5) * min(len(all), 1) {
		all = slices.Insert(all, r.IntN(len(all)+1), all[r.IntN(len(all))])
	}
	return all
}

// parts cuts a packet, as often as not, like the buffers that it came in.
func parts(r *rand.Rand, p piece) []piece {
	all := []piece{p}
	for range r.IntN(4) - 1 {
		last := &all[len(all)-1]
		at := last.first + r.Int64N(last.last-last.first+1)
		all = append(all, piece{at, last.last})
		all[len(all)-2].last = at
	}
	return all
}

// A message is one in flight.
type message struct {
	image
	want   []byte
	stream []byte
	comes  []piece
}

func newMessage(r *rand.Rand, places []int64, cfg ddt.Config) *message {
	m := &message{image: imageFor(r, places), stream: make([]byte, len(places))}
	for i := range m.stream {
		m.stream[i] = byte(r.Uint32())
	}
	m.want = bytes.Clone(m.mem)
	m.comes = arrivals(r, int64(len(places)), cfg)
	for _, p := range m.comes {
		for i, at := range places[p.first:p.last] {
			m.want[m.origin+at] = m.stream[int(p.first)+i]
		}
	}
	return m
}

// Every strategy puts every byte where the definition has it, whatever packets come in
// whatever order, with messages in between each other, and slots used again.
func TestStrategiesPlaceEachByte(t *testing.T) {
	seeds(t, 200, ddttest.Options{MaxBytes: 4 << 10, MaxExtent: 32 << 10}, func(t *testing.T, r *rand.Rand, c *ddt.Committed, places []int64) {
		spare := imageFor(r, places).mem
		for _, cfg := range configs(r, c) {
			p := placement(t, c, cfg)
			if p == nil {
				continue
			}
			var inFlight []*message
			for range cfg.Messages {
				inFlight = append(inFlight, nil)
			}
			for more := 2 * cfg.Messages; ; {
				slot := r.IntN(cfg.Messages)
				m := inFlight[slot]
				switch {
				case m == nil && more > 0:
					more--
					inFlight[slot] = newMessage(r, places, cfg)
				case m == nil:
				case len(m.comes) == 0 || more > 0 && r.IntN(40) == 0: // the end, or it is given up
					if len(m.comes) == 0 && !bytes.Equal(m.mem, m.want) {
						t.Errorf("%+v: the memory differs", cfg)
						return
					}
					inFlight[slot] = nil
				default:
					next := m.comes[0]
					m.comes = m.comes[1:]
					for _, part := range parts(r, next) {
						n, err := p.Place(slot, r.IntN(cfg.HPUs), m.mem, m.origin, next.first, part.first, m.stream[part.first:part.last])
						if err != nil {
							t.Fatalf("%+v: %v", cfg, err)
						}
						want, err := c.Unpack(spare, m.origin, part.first, m.stream[part.first:part.last])
						if n != want || err != nil {
							t.Errorf("%+v: bytes %d to %d of packet %v in %d pieces, by Unpack %d, %v", cfg, part.first, part.last, next, n, want, err)
							return
						}
					}
				}
				if more == 0 && !slices.ContainsFunc(inFlight, func(m *message) bool { return m != nil }) {
					break
				}
			}
		}
	})
}

// HPUs at once, with no more order between them than what Scheduling asks for.
func TestStrategiesOnSeveralHPUs(t *testing.T) {
	type task struct {
		slot int
		m    *message
		piece
		parts []piece
		done  *sync.WaitGroup
	}
	seeds(t, 60, ddttest.Options{NoOverlap: true, MaxBytes: 4 << 10, MaxExtent: 32 << 10}, func(t *testing.T, r *rand.Rand, c *ddt.Committed, places []int64) {
		for _, cfg := range configs(r, c) {
			p := placement(t, c, cfg)
			if p == nil {
				continue
			}
			sched := p.Scheduling()
			var hpus sync.WaitGroup
			queues := make([]chan task, cfg.HPUs)
			for hpu := range queues {
				queues[hpu] = make(chan task, 4)
				hpus.Go(func() {
					for k := range queues[hpu] {
						for _, part := range k.parts {
							if _, err := p.Place(k.slot, hpu, k.m.mem, k.m.origin, k.first, part.first, k.m.stream[part.first:part.last]); err != nil {
								t.Error(err)
							}
						}
						k.done.Done()
					}
				})
			}
			var messages sync.WaitGroup
			for slot := range cfg.Messages {
				rounds, cut := make([]*message, 2), make([][][]piece, 2)
				for i := range rounds {
					rounds[i] = newMessage(r, places, cfg)
					for _, next := range rounds[i].comes {
						cut[i] = append(cut[i], parts(r, next))
					}
				}
				messages.Go(func() {
					for round, m := range rounds {
						cut := cut[round]
						var done sync.WaitGroup
						for i, next := range m.comes {
							// Who gets it, with all parts of it: anybody, but the same for
							// what must not be processed at the same time. That is so of a packet that
							// comes twice, too: the engine drops the second.
							hpu := int(next.first)
							if sched.Sequence > 0 {
								hpu = int(next.first/int64(sched.Sequence)) % sched.VHPUs
							}
							done.Add(1)
							queues[(hpu+slot+round)%cfg.HPUs] <- task{slot, m, next, cut[i], &done}
							if i%7 == 6 && sched.Sequence > 0 {
								done.Wait() // and virtual HPUs go on elsewhere
								round++
							}
						}
						done.Wait()
						if !bytes.Equal(m.mem, m.want) {
							t.Errorf("%+v: the memory of a message in slot %d differs", cfg, slot)
						}
					}
				})
			}
			messages.Wait()
			for _, q := range queues {
				close(q)
			}
			hpus.Wait()
		}
	})
}

func TestPlacementRefuses(t *testing.T) {
	made := func(d *ddt.Type, err error) *ddt.Type {
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	commit := func(d *ddt.Type, count int64) *ddt.Committed {
		c, err := ddt.Commit(d, count)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	small := commit(made(ddt.NewVector(1000, 1, 2, ddt.Int)), 1)
	nested := commit(made(ddt.HVector(500, 1, 1<<20, made(ddt.NewVector(500, 1, 3, made(ddt.Contiguous(200, ddt.Int)))))), 1)
	many := commit(made(ddt.HVector(1<<31, 1, 2, ddt.Byte)), 1)
	long := commit(ddt.Byte, 1<<40)
	// One large block and many small ones: few on the average.
	uneven := commit(made(ddt.Struct([]int64{1 << 30, 1}, []int64{-(1 << 30), 0}, []*ddt.Type{ddt.Byte, made(ddt.HVector(1<<25, 1, 2, ddt.Byte))})), 1)
	good := ddt.Config{HPUs: 2, Messages: 2, Packet: 1408, Interval: 1408}
	for _, tc := range []struct {
		name string
		c    *ddt.Committed
		set  func(*ddt.Config)
		want string // "": it is good
	}{
		{"nothing", small, func(*ddt.Config) {}, ""},
		{"no type", nil, func(*ddt.Config) {}, "no type"},
		{"a strategy that there is not", small, func(c *ddt.Config) { c.Strategy = "fast" }, `strategy "fast": want one of direct, specialized, hpu-local, ro-cp, rw-cp`},
		{"no HPUs", small, func(c *ddt.Config) { c.HPUs = 0 }, "0 HPUs"},
		{"too many HPUs", small, func(c *ddt.Config) { c.HPUs = 1 << 16 }, "1 to 65535"},
		{"no messages", small, func(c *ddt.Config) { c.Messages = 0 }, "0 messages"},
		{"no packets", small, func(c *ddt.Config) { c.Packet = 0 }, "packets of 0 bytes"},
		{"packets beyond 32 bits", small, func(c *ddt.Config) { c.Packet = 1 << 32 }, "packets of 4294967296 bytes"},
		{"a negative interval", small, func(c *ddt.Config) { c.Interval = -1 }, "interval of -1"},
		{"memory for less", small, func(c *ddt.Config) { c.Most = small.Memory() - 1 }, fmt.Sprintf("direct of this type for 2 messages takes %d bytes", small.Memory())},
		{"memory for less, as is said", small, func(c *ddt.Config) { c.Most = small.Memory() - 1 }, fmt.Sprintf("at most %d", small.Memory()-1)},
		{"memory for just so much", small, func(c *ddt.Config) { c.Most = small.Memory() }, ""},
		{"memory for less, specialized", small, func(c *ddt.Config) { c.Strategy, c.Most = ddt.Specialized, small.Memory()-1 }, "specialized of this type"},
		{"memory for the description only", small, func(c *ddt.Config) { c.Strategy, c.Most = ddt.HPULocal, small.Memory() }, "direct needs no more than the description"},
		{"no memory", small, func(c *ddt.Config) { c.Most = -1 }, "at most 0"},
		{"memory beyond the most", small, func(c *ddt.Config) { c.Strategy, c.Messages, c.Most = ddt.HPULocal, 1<<30, 1<<50 }, "at most 1073741824"},
		{"a negative epsilon", small, func(c *ddt.Config) { c.Epsilon = -1 }, "epsilon -1"},
		{"specialized for a vector", small, func(c *ddt.Config) { c.Strategy = ddt.Specialized }, ""},
		{"specialized for a block", long, func(c *ddt.Config) { c.Strategy = ddt.Specialized }, ""},
		{"specialized for what is nested", nested, func(c *ddt.Config) { c.Strategy = ddt.Specialized }, "2 levels"},
		{"segments beyond all memory", small, func(c *ddt.Config) { c.Strategy, c.Messages = ddt.HPULocal, 1<<30 }, "at most 1073741824"},
		{"segments beyond 64 bits", small, func(c *ddt.Config) { c.Strategy, c.Messages, c.HPUs = ddt.HPULocal, math.MaxInt, 65535 }, "at most 1073741824"},
		{"checkpoints beyond all memory", long, func(c *ddt.Config) { c.Strategy = ddt.ROCP }, "at most 1073741824"},
		{"sequences beyond all memory", long, func(c *ddt.Config) { c.Strategy, c.Interval = ddt.RWCP, 1<<18 }, "at most 1073741824"},
		{"a sequence beyond 32 bits", long, func(c *ddt.Config) { c.Strategy, c.Interval = ddt.RWCP, 1<<32 }, "at most 4294967295"},
		{"an interval beyond 64 bits", long, func(c *ddt.Config) { c.Strategy, c.Interval = ddt.RWCP, math.MaxInt64 }, "at most 4294967295"},
		{"an interval beyond the type", small, func(c *ddt.Config) { c.Strategy, c.Interval = ddt.RWCP, math.MaxInt64 }, ""},
		{"too many blocks for ro-cp", many, func(c *ddt.Config) { c.Strategy, c.Interval = ddt.ROCP, 1<<30 }, "2147483648 blocks"},
		{"too many blocks for rw-cp", many, func(c *ddt.Config) { c.Strategy, c.Interval = ddt.RWCP, 1<<30 }, "2147483648 blocks"},
		{"any number for direct", many, func(c *ddt.Config) { c.Strategy = ddt.Direct }, ""},
		{"too many blocks for hpu-local", commit(made(ddt.HVector(1<<24+1, 1, 2, ddt.Byte)), 1), func(c *ddt.Config) { c.Strategy = ddt.HPULocal }, "16777217 blocks: at most 16777216; direct need not"},
		{"as many blocks as may be for hpu-local", commit(made(ddt.HVector(1<<24, 1, 2, ddt.Byte)), 1), func(c *ddt.Config) { c.Strategy = ddt.HPULocal }, ""},
		{"too much to catch up by for ro-cp", uneven, func(c *ddt.Config) { c.Strategy, c.Interval = ddt.ROCP, 1<<24+1 }, "16777217 steps through the type, and a packet may have to catch up by at most 16777216"},
		{"too much to catch up by for rw-cp", uneven, func(c *ddt.Config) { c.Strategy, c.Interval = ddt.RWCP, 1<<25 }, "at most 16777216; a shorter interval has fewer, and direct needs none"},
		{"just not too much", uneven, func(c *ddt.Config) { c.Strategy, c.Interval = ddt.ROCP, 1<<24-2 }, ""},
		{"no memory in the model", nested, func(c *ddt.Config) { c.Strategy, c.Interval, c.Memory = ddt.RWCP, 0, 10 }, "rw-cp: checkpoint interval: 10 bytes of memory"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := good
			tc.set(&cfg)
			p, err := ddt.NewPlacement(tc.c, cfg)
			switch {
			case tc.want == "" && err != nil:
				t.Error(err)
			case tc.want != "" && (err == nil || p != nil || !strings.Contains(err.Error(), tc.want)):
				t.Errorf("%v, want %q", err, tc.want)
			}
		})
	}
}

// A placement keeps nothing of the type but its normal form.
func TestPlacementKeepsNoType(t *testing.T) {
	for _, s := range ddt.Strategies() {
		p, typ := func() (ddt.Placement, weak.Pointer[ddt.Type]) {
			d, err := ddt.NewVector(1000, 1, 2, ddt.Int)
			if err != nil {
				t.Fatal(err)
			}
			c, err := ddt.Commit(d, 1)
			if err != nil {
				t.Fatal(err)
			}
			if c.Type() != d {
				t.Fatal("the type that was committed is another")
			}
			return placement(t, c, ddt.Config{Strategy: s, HPUs: 1, Messages: 1, Packet: 100, Interval: 1000}), weak.Make(d)
		}()
		runtime.GC()
		if typ.Value() != nil {
			t.Errorf("%s keeps the type", s)
		}
		runtime.KeepAlive(p)
	}
}

// A handler may panic in the middle of a packet, as one does that writes to memory that is
// gone. Its message is over then; the next one in the slot is not the worse for it.
func TestPlaceAfterPanic(t *testing.T) {
	if debug.SetPanicOnFault(true) {
		t.Fatal("faults panic already")
	}
	defer debug.SetPanicOnFault(false)
	page := os.Getpagesize()
	mem, err := syscall.Mmap(-1, 0, 2*page, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := syscall.Munmap(mem); err != nil {
			t.Error(err)
		}
	}()
	d, err := ddt.Parse("hvec(8 1 1000)[hvec(20 1 32)[int]]") // a part of it in the second page
	if err != nil {
		t.Fatal(err)
	}
	c, err := ddt.Commit(d, 1)
	if err != nil {
		t.Fatal(err)
	}
	stream := make([]byte, c.Size())
	for i := range stream {
		stream[i] = byte(i) | 1
	}
	const packet = 490
	for _, s := range ddt.Strategies() {
		p := placement(t, c, ddt.Config{Strategy: s, HPUs: 1, Messages: 1, Packet: packet, Interval: c.Size()})
		if p == nil {
			continue
		}
		if err := syscall.Mprotect(mem[page:], syscall.PROT_NONE); err != nil {
			t.Fatal(err)
		}
		func() {
			defer func() {
				if recover() == nil {
					t.Fatalf("%s: the second page is there", s)
				}
			}()
			_, err := p.Place(0, 0, mem, 0, 0, 0, stream[:packet])
			t.Errorf("%s: %v", s, err)
		}()
		if err := syscall.Mprotect(mem[page:], syscall.PROT_READ|syscall.PROT_WRITE); err != nil {
			t.Fatal(err)
		}
		clear(mem)
		if _, err := p.Place(0, 0, mem, 0, packet, packet, stream[packet:]); err != nil {
			t.Fatal(err)
		}
		for i, at := range ddttest.Places(d, 1) {
			if want := stream[i]; i >= packet && mem[at] != want {
				t.Errorf("%s: byte %d of the stream is %#x at %d, want %#x", s, i, mem[at], at, want)
				break
			}
		}
	}
}

func TestPlacementScheduling(t *testing.T) {
	c, err := ddt.Commit(ddt.Double, 1000) // 6 packets of 1408 bytes
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		strategy string
		interval int64
		want     ddt.Scheduling
	}{
		{ddt.Direct, 0, ddt.Scheduling{}},
		{ddt.Specialized, 0, ddt.Scheduling{}},
		{ddt.HPULocal, 0, ddt.Scheduling{Sequence: 1408, VHPUs: 3}},
		{ddt.ROCP, 1000, ddt.Scheduling{}},
		{ddt.RWCP, 1, ddt.Scheduling{Sequence: 1408, VHPUs: 6}},
		{ddt.RWCP, 1408, ddt.Scheduling{Sequence: 1408, VHPUs: 6}},
		{ddt.RWCP, 1409, ddt.Scheduling{Sequence: 2816, VHPUs: 3}},
		{ddt.RWCP, 8000, ddt.Scheduling{Sequence: 8448, VHPUs: 1}},
		{ddt.RWCP, 1 << 50, ddt.Scheduling{Sequence: 8448, VHPUs: 1}},
		{ddt.RWCP, 0, ddt.Scheduling{Sequence: 2816, VHPUs: 3}}, // work for all three
	} {
		p, err := ddt.NewPlacement(c, ddt.Config{
			Strategy: tc.strategy, HPUs: 3, Messages: 1, Packet: 1408, Interval: tc.interval, Model: ddt.Model{Handler: time.Second},
		})
		if err != nil {
			t.Fatal(err)
		}
		if got := p.Scheduling(); got != tc.want {
			t.Errorf("%s, every %d bytes: %+v, want %+v", tc.strategy, tc.interval, got, tc.want)
		}
	}
	bytes, err := ddt.Commit(ddt.Byte, 100000)
	if err != nil {
		t.Fatal(err)
	}
	p, err := ddt.NewPlacement(bytes, ddt.Config{Strategy: ddt.RWCP, HPUs: 1, Messages: 1, Packet: 1, Interval: 1})
	if err != nil {
		t.Fatal(err)
	}
	if want := (ddt.Scheduling{Sequence: 1, VHPUs: 65535}); p.Scheduling() != want {
		t.Errorf("100000 sequences: %+v, want %+v", p.Scheduling(), want)
	}
}

func TestPlaceOutOfBounds(t *testing.T) {
	d, err := ddt.HIndexed([]int64{4, 4}, []int64{-8, 8}, ddt.Byte) // touches -8..11
	if err != nil {
		t.Fatal(err)
	}
	c, err := ddt.Commit(d, 1)
	if err != nil {
		t.Fatal(err)
	}
	empty, err := ddt.Commit(d, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range ddt.Strategies() {
		cfg := ddt.Config{Strategy: s, HPUs: 2, Messages: 3, Packet: 3, Interval: 3}
		p := placement(t, c, cfg)
		for _, tc := range []struct {
			slot, hpu     int
			size          int
			origin, first int64
			n             int
			want          string // "": it is good
		}{
			{0, 0, 20, 8, 0, 8, ""},
			{2, 1, 20, 8, 7, 1, ""},
			{2, 1, 20, 8, 8, 0, ""},
			{0, 0, 20, 8, 0, 9, "bounds"},
			{0, 0, 20, 8, 8, 1, "bounds"},
			{0, 0, 20, 8, 9, 0, "bounds"},
			{0, 0, 20, 8, -1, 1, "bounds"},
			{0, 0, 20, 8, -1, 0, "bounds"},
			{0, 0, 20, 8, math.MaxInt64, 1, "bounds"},
			{0, 0, 20, 8, math.MinInt64, 1, "bounds"},
			{0, 0, 19, 8, 0, 1, "bounds"},
			{0, 0, 20, 7, 7, 1, "bounds"},
			{0, 0, 20, 9, 0, 1, "bounds"},
			{0, 0, 20, -1, 0, 1, "bounds"},
			{0, 0, 20, math.MaxInt64, 0, 1, "bounds"},
			{0, 0, 20, math.MinInt64, 0, 1, "bounds"},
			{0, 0, 0, 0, 0, 1, "bounds"},
			{3, 0, 20, 8, 0, 8, "slot 3 of a placement for 3"},
			{-1, 0, 20, 8, 0, 8, "slot -1"},
			{0, 2, 20, 8, 0, 8, "HPU 2 of a placement for 2"},
			{0, -1, 20, 8, 0, 8, "HPU -1"},
		} {
			mem, stream := make([]byte, tc.size), slices.Repeat([]byte{1}, tc.n)
			n, err := p.Place(tc.slot, tc.hpu, mem, tc.origin, tc.first, tc.first, stream)
			good := tc.want == ""
			if good != (err == nil) || !good && n != 0 || !good && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%s: %+v: %d copies, %v", s, tc, n, err)
			}
			if tc.want == "bounds" && !errors.Is(err, ddt.ErrBounds) {
				t.Errorf("%s: %v is not ErrBounds", s, err)
			}
			if got := bytes.Count(mem, []byte{1}); good && got != tc.n || !good && got != 0 {
				t.Errorf("%s: %+v: %d bytes written", s, tc, got)
			}
		}
		for _, packet := range []int64{-1, 4, math.MinInt64, math.MaxInt64} {
			mem := make([]byte, 20)
			if n, err := p.Place(0, 0, mem, 8, packet, 3, []byte{1}); n != 0 || !errors.Is(err, ddt.ErrBounds) || bytes.Count(mem, []byte{1}) != 0 {
				t.Errorf("%s: byte 3 of a packet that begins at %d: %d copies, %v", s, packet, n, err)
			}
		}
		p = placement(t, empty, cfg)
		if _, err := p.Place(0, 0, nil, 0, 0, 0, nil); err != nil {
			t.Errorf("%s: nothing into nothing: %v", s, err)
		}
		if _, err := p.Place(0, 0, make([]byte, 100), 50, 0, 0, make([]byte, 1)); !errors.Is(err, ddt.ErrBounds) {
			t.Errorf("%s: a byte of nothing: %v", s, err)
		}
	}
}

// What Commit makes of them is deeper than what was written, or shallower.
func TestStrategiesOfUnusualForms(t *testing.T) {
	made := func(d *ddt.Type, err error) *ddt.Type {
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	few := made(ddt.HVector(3, 1, 10, ddt.Int))
	groups := made(ddt.HVector(1001, 1, 64, few)) // groups of some, and a rest
	wide := made(ddt.HVector(700, 1, 900, made(ddt.Contiguous(600, ddt.Byte))))
	for name, d := range map[string]*ddt.Type{
		"groups":           groups,
		"groups in a list": made(ddt.Struct([]int64{1, 1}, []int64{0, 70000}, []*ddt.Type{groups, wide})),
		"in lists":         made(ddt.Struct([]int64{2, 1}, []int64{0, 1 << 21}, []*ddt.Type{made(ddt.Resized(made(ddt.Struct([]int64{1, 1}, []int64{0, 70000}, []*ddt.Type{groups, wide})), 0, 1<<20)), wide})),
		"in a vector":      made(ddt.HVector(3, 1, 100000, groups)),
		"of lists":         made(ddt.HVector(3, 1, 1<<21, made(ddt.Struct([]int64{1, 1}, []int64{0, 70000}, []*ddt.Type{groups, wide})))),
	} {
		t.Run(name, func(t *testing.T) {
			c, err := ddt.Commit(d, 1)
			if err != nil {
				t.Fatal(err)
			}
			r := rand.New(rand.NewPCG(1, 2))
			places := ddttest.Places(d, 1)
			for _, s := range ddt.Strategies() {
				cfg := ddt.Config{Strategy: s, HPUs: 3, Messages: 1, Packet: 1001, Interval: 10000}
				p := placement(t, c, cfg)
				if p == nil {
					continue
				}
				m := newMessage(r, places, cfg)
				for _, next := range m.comes {
					if _, err := p.Place(0, 0, m.mem, m.origin, next.first, next.first, m.stream[next.first:next.last]); err != nil {
						t.Fatal(err)
					}
				}
				if !bytes.Equal(m.mem, m.want) {
					t.Errorf("%s: the memory differs", s)
				}
			}
		})
	}
}

func TestPlaceDoesNotAllocate(t *testing.T) {
	for _, d := range benchTypes(t) {
		mem, stream := make([]byte, d.hi()), make([]byte, 1408)
		for _, s := range ddt.Strategies() {
			p := placement(t, d.Committed, ddt.Config{Strategy: s, HPUs: 2, Messages: 2, Packet: 1408, Interval: 10000})
			if p == nil {
				continue
			}
			i := int64(0)
			if n := testing.AllocsPerRun(100, func() {
				i++
				first := i * 7919 % (d.Size() - 1408) // not in order
				if _, err := p.Place(1, 1, mem, 0, first, first, stream); err != nil {
					t.Fatal(err)
				}
			}); n != 0 {
				t.Errorf("%s of %s: %v allocations", s, d.name, n)
			}
		}
	}
}

type benchType struct {
	name string
	*ddt.Committed
}

func (b *benchType) hi() int64 {
	_, hi := b.Bounds()
	return hi
}

// benchTypes returns types of about 2 MiB.
func benchTypes(t testing.TB) []benchType {
	made := func(d *ddt.Type, err error) *ddt.Type {
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	complexType := made(ddt.NewVector(32, 6, 8, made(ddt.Contiguous(18, ddt.Float))))
	for _, stride := range []int64{6144, 12288, 18432} {
		complexType = made(ddt.HVector(2, 1, stride, complexType))
	}
	displs := make([]int64, 32<<10)
	for i, v := range rand.New(rand.NewPCG(1, 2)).Perm(len(displs)) {
		displs[i] = 128 * int64(v)
	}
	var all []benchType
	for _, b := range []struct {
		name  string
		typ   *ddt.Type
		count int64
	}{
		{"Complex", complexType, 19},
		{"vector64", made(ddt.NewVector(32<<10, 64, 128, ddt.Byte)), 1},
		{"vector4", made(ddt.NewVector(512<<10, 1, 2, ddt.Int)), 1},
		{"index64", made(ddt.HIndexedBlock(64, displs, ddt.Byte)), 1},
		{"nested", made(ddt.HVector(64, 1, 1<<17, made(ddt.HVector(1000, 1, 100, made(ddt.HIndexed([]int64{8, 16, 8}, []int64{0, 24, 60}, ddt.Byte)))))), 1},
	} {
		c, err := ddt.Commit(b.typ, b.count)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, benchType{b.name, c})
	}
	return all
}
