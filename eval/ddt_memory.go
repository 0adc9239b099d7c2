// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/mpich"
	"github.com/xspin/xspin/internal/quantile"
	"github.com/xspin/xspin/netns/testbed"
)

// ddtPacket is how many bytes of a message the ranges have that are placed one by one.
const ddtPacket = 1408

// An order is how ranges of a message come.
type order struct {
	name   string
	places func(ranges int) []int
}

// ddtOrders are in order, and out of order: the same random permutation in each run.
var ddtOrders = []order{
	{"in_order", func(n int) []int {
		all := make([]int, n)
		for i := range all {
			all[i] = i
		}
		return all
	}},
	{"any_order", func(n int) []int { return rand.New(rand.NewPCG(1408, 1)).Perm(n) }},
}

// ranges returns where the ranges of a message begin.
func (o order) ranges(size int64) (first []int64) {
	for _, i := range o.places(int((size + ddtPacket - 1) / ddtPacket)) {
		first = append(first, int64(i)*ddtPacket)
	}
	return first
}

// part returns bytes of a type's stream, from first to the end of the range.
func (a *arena) part(t *ddtType, first int64) []byte {
	return a.stream[first:min(first+ddtPacket, t.data.Size())]
}

// unpack places all of a message in ranges, with Committed.Unpack.
func (a *arena) unpack(t *ddtType, ranges []int64) {
	for _, first := range ranges {
		if _, err := t.data.Unpack(a.mem, 0, first, a.part(t, first)); err != nil {
			panic(err) // mem has room for all of the type
		}
	}
}

// pinned has f run on the receiver's CPU, in a thread of its own.
func (b *ddtBench) pinned(f func() error) error {
	runtime.GC() // not meanwhile
	return testbed.OnCPU(b.receiver, f)
}

func (b *ddtBench) caches() string {
	return fmt.Sprintf("warm: as the repetition before has left the caches, repetitions together at least %v, median of %d; cold: %d MiB of other memory, twice the last-level cache but at most 256 MiB, are written before each of %d, on both sides",
		span, b.warmRuns(), coldBytes(b.receiver)>>20, b.coldRuns())
}

// placed is what a type has to show in part place, run by run, in GB/s.
type placed struct {
	direct [2][2][]float64 // by order and cold
	mpich  [2][]float64    // by cold
}

var temperatures = [2]string{"warm", "cold"}

// placeRows compares placement in memory with MPICH's.
func (b *ddtBench) placeRows(ctx context.Context) (err error) {
	apps, err := b.o.appTypes()
	if err != nil {
		return err
	}
	vectors, err := b.o.vectorTypes(ddt.Byte, ddt.Int, ddt.Float, ddt.Double)
	if err != nil {
		return err
	}
	types := slices.Concat(apps, vectors)
	u, err := mpich.StartUnpacker(ctx, b.receiver)
	if err != nil {
		return b.without("rows ddt/place_over_unpack*", err)
	}
	defer func() { err = errors.Join(err, u.Close()) }()
	a, err := b.newArena(types)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.free()) }()

	runs := make([]placed, len(types))
	var sides []func(context.Context) error
	for i, t := range types {
		sides = append(sides, func(ctx context.Context) error {
			for cold := range temperatures {
				if err := b.placeOnce(ctx, u, a, t, &runs[i], cold); err != nil {
					return fmt.Errorf("%s: %w", t.name, err)
				}
			}
			return nil
		})
	}
	if err := bench.Rounds(ctx, b.cfg.runs, sides...); err != nil {
		return err
	}

	conditions := fmt.Sprintf("in memory, one thread each, both on CPU %d, taking turns; a message of the type from a stream that is packed; %s", b.receiver, b.caches())
	direct := fmt.Sprintf("direct (ddt.Committed.Unpack), in ranges of %d bytes", ddtPacket)
	whole := "MPI_Unpack of the whole"
	four := "; geometric mean of in order and in a fixed random order, warm and cold"
	var all, ofBytes, ofWide []duel
	for i, t := range types {
		var duels []duel
		for o, order := range ddtOrders {
			for cold, temperature := range temperatures {
				duels = append(duels, duel{fmt.Sprintf("%s, %s, %s", t.name, order.name, temperature), runs[i].direct[o][cold], runs[i].mpich[cold]})
			}
		}
		all = append(all, duels...)
		if t.bytes {
			ofBytes = append(ofBytes, duels...)
		} else {
			ofWide = append(ofWide, duels...)
		}
	}
	x, y := geomean(all)
	if err := b.ratio("ddt/place_over_unpack", bench.AtLeast(1), fmt.Sprintf("geometric mean over %d types, both orders, warm and cold, run by run; %s", len(types), conditions),
		bench.NewSide(direct+four, "GB/s", x), bench.NewSide(whole+four, "GB/s", y).Of("MPICH")); err != nil {
		return err
	}
	if err := b.leastRow("ddt/place_over_unpack_byte_least", bench.AtLeast(0.7), "of types with leaves of MPI_BYTE, each order, warm and cold; "+conditions, direct, whole, ofBytes); err != nil {
		return err
	}
	if err := b.leastRow("ddt/place_over_unpack_wide_least", bench.AtLeast(0.25), "of types with leaves wider than MPI_BYTE, each order, warm and cold; "+conditions, direct, whole, ofWide); err != nil {
		return err
	}
	for i, t := range types {
		x, y := geomean(all[4*i : 4*i+4])
		one, two := bench.NewSide(direct+four, "GB/s", x), bench.NewSide(whole+four, "GB/s", y).Of("MPICH")
		for cold, temperature := range temperatures {
			for o, order := range ddtOrders {
				one.Add(order.name+"_"+temperature+"_GBps", runs[i].direct[o][cold])
			}
			two.Add(temperature+"_GBps", runs[i].mpich[cold])
		}
		if err := b.ratio("ddt/place_over_unpack/"+t.name, bench.Higher, conditions, one, two); err != nil {
			return err
		}
	}
	return nil
}

// An unpacker is MPICH's, see mpich.Unpacker.
type unpacker interface {
	Measure(ctx context.Context, t *ddt.Type, count int64, repetitions int, flush int64) (mpich.Unpacked, error)
}

// placeOnce is a run of a type, warm or cold.
func (b *ddtBench) placeOnce(ctx context.Context, u unpacker, a *arena, t *ddtType, runs *placed, cold int) error {
	n, flush := b.warmRuns(), int64(0)
	if cold > 0 {
		n, flush = b.coldRuns(), int64(len(a.cold))
	}
	m, err := u.Measure(ctx, t.typ, t.count, n, flush)
	if err != nil {
		return err
	}
	runs.mpich[cold] = append(runs.mpich[cold], gigabytes(t.data.Size(), medianNS(m.Unpack)))
	return b.pinned(func() error {
		for o := range ddtOrders {
			runs.direct[o][cold] = append(runs.direct[o][cold], a.placeOnce(t, ddtOrders[o], n, cold))
		}
		return nil
	})
}

// placeOnce is direct's side of it, in GB/s.
func (a *arena) placeOnce(t *ddtType, o order, n, cold int) float64 {
	ranges := o.ranges(t.data.Size())
	return gigabytes(t.data.Size(), a.measure(n, cold > 0, func() { a.unpack(t, ranges) }))
}

// loopRows compares placement in memory with loops written by hand.
func (b *ddtBench) loopRows(ctx context.Context) (err error) {
	apps, err := b.o.appTypes()
	if err != nil {
		return err
	}
	vectors, err := b.o.vectorTypes(ddt.Byte)
	if err != nil {
		return err
	}
	types := slices.Concat(apps, vectors)
	a, err := b.newArena(types)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.free()) }()

	type runs struct{ ranges, whole, loop []float64 }
	of := make([]runs, len(types))
	var sides []func(context.Context) error
	for i, t := range types {
		ranges, size := ddtOrders[0].ranges(t.data.Size()), t.data.Size()
		stream := a.stream[:size]
		for _, s := range []struct {
			runs *[]float64
			call func()
		}{
			{&of[i].ranges, func() { a.unpack(t, ranges) }},
			{&of[i].loop, func() { t.loop(a.mem, stream) }},
			{&of[i].whole, func() {
				if _, err := t.data.Unpack(a.mem, 0, 0, stream); err != nil {
					panic(err) // mem has room for all of the type
				}
			}},
		} {
			sides = append(sides, func(context.Context) error {
				return b.pinned(func() error {
					*s.runs = append(*s.runs, gigabytes(size, a.measure(b.warmRuns(), false, s.call)))
					return nil
				})
			})
		}
	}
	if err := bench.Rounds(ctx, b.cfg.runs, sides...); err != nil {
		return err
	}

	conditions := fmt.Sprintf("in memory, one thread, on CPU %d, warm: repetitions together at least %v, median of %d", b.receiver, span, b.warmRuns())
	const direct, whole, loop = "direct, in ranges of 1408 bytes, in order", "direct, the whole at once", "a loop written by hand for the type, the whole at once"
	var inRanges, atOnce []duel
	for i, t := range types {
		inRanges = append(inRanges, duel{t.name, of[i].ranges, of[i].loop})
		atOnce = append(atOnce, duel{t.name, of[i].whole, of[i].loop})
	}
	if err := b.leastRow("ddt/direct_over_loop_least", bench.AtLeast(0.7), conditions, direct, loop, inRanges); err != nil {
		return err
	}
	if err := b.leastRow("ddt/direct_whole_over_loop_least", bench.Higher, conditions, whole, loop, atOnce); err != nil {
		return err
	}
	for i, t := range types {
		l := bench.NewSide(loop, "GB/s", of[i].loop)
		if err := b.ratio("ddt/direct_over_loop/"+t.name, bench.Higher, conditions, bench.NewSide(direct, "GB/s", of[i].ranges), l); err != nil {
			return err
		}
		if err := b.ratio("ddt/direct_whole_over_loop/"+t.name, bench.Higher, conditions, bench.NewSide(whole, "GB/s", of[i].whole), l); err != nil {
			return err
		}
	}
	return nil
}

// A contender is a placement of a type, and its speed in each order.
type contender struct {
	ddt.Placement
	strategy, name string
	gbps           [2][]float64
}

const (
	// ddtHPUs is for how many HPUs the placements are made; another set of them is made
	// for a single one, which is best in order.
	ddtHPUs     = 4
	ddtMessages = 16
)

// contenders returns the placements of a type, with a warning for each that cannot be had.
func (b *ddtBench) contenders(t *ddtType) (all []*contender) {
	for _, hpus := range []int{ddtHPUs, 1} {
		for _, s := range ddt.Strategies() {
			if (s == ddt.Direct || s == ddt.Specialized) && hpus == 1 {
				continue // it makes no difference
			}
			if root, _ := t.data.Root(); s == ddt.Specialized && root != nil && root.Depth > 2 {
				continue // it is for flat types only
			}
			name := fmt.Sprintf("%s made for %d HPUs", s, hpus)
			if hpus == 1 {
				name = s + " made for 1 HPU"
			}
			p, err := ddt.NewPlacement(t.data, ddt.Config{Strategy: s, HPUs: hpus, Messages: ddtMessages, Packet: ddtPacket})
			if err != nil {
				b.cfg.warn(fmt.Sprintf("%s: direct is compared without %s: %v", t.name, name, err))
				continue
			}
			all = append(all, &contender{Placement: p, strategy: s, name: name})
		}
	}
	return all
}

// badly returns a placement with one checkpoint for all of a message, and nil if that is
// what the model has chosen or, with a warning, there is none.
func (b *ddtBench) badly(t *ddtType, strategy string) *contender {
	c := ddt.Config{Strategy: strategy, HPUs: ddtHPUs, Messages: ddtMessages, Packet: ddtPacket, Interval: t.data.Size()}
	good, err := ddt.Interval(t.data, ddtPacket, ddtHPUs, ddt.Model{})
	var p ddt.Placement
	if err == nil && good < t.data.Size() {
		p, err = ddt.NewPlacement(t.data, c)
	}
	if err != nil {
		b.cfg.warn(fmt.Sprintf("no row ddt/bad_interval/%s/%s: %v", t.name, strategy, err))
	}
	if p == nil {
		return nil
	}
	return &contender{Placement: p, strategy: strategy, name: strategy}
}

// place places a message in ranges. Who asks is always HPU 0: strategies go by the range.
func (c *contender) place(a *arena, t *ddtType, ranges []int64) {
	for _, first := range ranges {
		if _, err := c.Place(0, 0, a.mem, 0, first, first, a.part(t, first)); err != nil {
			panic(err) // mem has room for all of the type
		}
	}
}

// detailed are the types whose strategies have rows of their own.
var detailed = []string{"Complex", "FFT2D", "LAMMPS_full", "SPECFEM3D_cm", "WRF_x"}

// strategyRows compares strategies with each other.
func (b *ddtBench) strategyRows(ctx context.Context) (err error) {
	types, err := b.o.appTypes()
	if err != nil {
		return err
	}
	a, err := b.newArena(types)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.free()) }()

	good, bad := make([][]*contender, len(types)), make([][2]*contender, len(types))
	var sides []func(context.Context) error
	for i, t := range types {
		good[i] = b.contenders(t)
		list := slices.Clone(good[i])
		if slices.Contains(detailed, t.name) {
			for k, s := range []string{ddt.ROCP, ddt.RWCP} {
				if bad[i][k] = b.badly(t, s); bad[i][k] != nil {
					list = append(list, bad[i][k])
				}
			}
		}
		for o, order := range ddtOrders {
			ranges := order.ranges(t.data.Size())
			for _, c := range list {
				sides = append(sides, func(context.Context) error {
					return b.pinned(func() error {
						ns := a.measure(b.warmRuns(), false, func() { c.place(a, t, ranges) })
						c.gbps[o] = append(c.gbps[o], gigabytes(t.data.Size(), ns))
						return nil
					})
				})
			}
		}
	}
	if err := bench.Rounds(ctx, b.cfg.runs, sides...); err != nil {
		return err
	}

	conditions := fmt.Sprintf("in memory, in ranges of %d bytes, warm, one thread on CPU %d; placements for %d messages in flight, checkpoint intervals as the model has them; specialized finds its first block by itself and then is direct's code for a leaf", ddtPacket, b.receiver, ddtMessages)
	var all []duel
	for i, t := range types {
		direct := good[i][0]
		for o, order := range ddtOrders {
			best := slices.MaxFunc(good[i][1:], func(x, y *contender) int {
				if quantile.Median(x.gbps[o]) < quantile.Median(y.gbps[o]) {
					return -1
				}
				return 1
			})
			all = append(all, duel{fmt.Sprintf("%s, %s, best %s", t.name, order.name, best.name), direct.gbps[o], best.gbps[o]})
		}
	}
	conditions += "; the best is chosen by the medians of these runs, which favours it"
	if err := b.leastRow("ddt/direct_over_best_least", bench.AtLeast(0.95), "each application type and order; "+conditions, "direct", "the best of specialized, hpu-local, ro-cp and rw-cp, each made for 4 HPUs and for 1", all); err != nil {
		return err
	}
	for i, t := range types {
		for o, order := range ddtOrders {
			d := all[2*i+o]
			if err := b.ratio(fmt.Sprintf("ddt/direct_over_best/%s/%s", t.name, order.name), bench.Higher, conditions,
				bench.NewSide("direct", "GB/s", d.a), bench.NewSide(d.what, "GB/s", d.b)); err != nil {
				return err
			}
		}
	}
	for i, t := range types {
		if !slices.Contains(detailed, t.name) {
			continue
		}
		if err := b.strategyDetails(t, good[i], bad[i], conditions); err != nil {
			return err
		}
	}
	return b.strategyHPURows(ctx)
}

// strategyDetails adds rows of each strategy, and of bad checkpoint intervals.
func (b *ddtBench) strategyDetails(t *ddtType, good []*contender, bad [2]*contender, conditions string) error {
	of := map[string]*contender{}
	for _, c := range good {
		if of[c.strategy] != nil {
			continue // for one HPU
		}
		of[c.strategy] = c
		s := bench.NewSide(c.name+", in order", "GB/s", c.gbps[0])
		s.Add("any_order_GBps", c.gbps[1])
		m := c.Memory()
		s.Add("memory_type_bytes", []float64{float64(m.Type)})
		s.Add("memory_checkpoints_bytes", []float64{float64(m.Checkpoints)})
		s.Add("memory_segments_bytes", []float64{float64(m.Segments)})
		if n := c.Scheduling().Sequence; n > 0 {
			s.Add("sequence_bytes", []float64{float64(n)})
		}
		if err := b.absolute(fmt.Sprintf("ddt/strategy/%s/%s", t.name, c.strategy), bench.Higher, conditions, s); err != nil {
			return err
		}
	}
	for k, c := range bad {
		if c == nil || of[c.strategy] == nil {
			continue
		}
		// ro-cp catches up for each packet, rw-cp for those that come too early.
		if err := b.ratio(fmt.Sprintf("ddt/bad_interval/%s/%s", t.name, c.strategy), bench.Lower, ddtOrders[k].name+"; "+conditions,
			bench.NewSide(c.strategy+" with one checkpoint, for all of the message", "GB/s", c.gbps[k]),
			bench.NewSide(c.strategy+" with the model's interval", "GB/s", of[c.strategy].gbps[k])); err != nil {
			return err
		}
	}
	return nil
}
