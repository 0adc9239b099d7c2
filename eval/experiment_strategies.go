// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/mpich"
	"github.com/xspin/xspin/eval/replay"
	"github.com/xspin/xspin/eval/report"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/internal/quantile"
	"github.com/xspin/xspin/netns/testbed"
)

// strategyBytes is how long the messages of figures 8, 12 and 13 of SC 2019 are.
const strategyBytes = 4 << 20

// strategyNames are the strategies, as legends have them.
var strategyNames = map[string]string{
	ddt.Direct: "direct, XsPIN's own", ddt.Specialized: "specialized", ddt.HPULocal: "HPU-local", ddt.ROCP: "RO-CP", ddt.RWCP: "RW-CP",
}

// ddt returns what measures datatypes, for so long a run.
func (t *trial) ddt(d time.Duration) *ddtBench {
	b := &ddtBench{benchLab: t.benchLab, cfg: t.benchConfig, o: ddtDefaults()}
	b.cfg.duration = d
	return b
}

// blocksType returns a message of blocks that are half of their stride.
func blocksType(message, block int64, leaf *ddt.Type) (*ddtType, error) {
	typ, err := ddt.HVector(max(message/block, 1), block/leaf.Size(), 2*block, leaf)
	if err != nil {
		return nil, err
	}
	return newDDTType(fmt.Sprintf("blocks of %d bytes", block), typ, 1)
}

// unpackers starts MPICH, if it is there. What it returns is to be closed.
func (b *ddtBench) unpackers(ctx context.Context, lines string) (u *mpich.Unpacker, end func() error, err error) {
	u, err = mpich.StartUnpacker(ctx, b.receiver)
	if err != nil {
		return nil, func() error { return nil }, b.without(lines, err)
	}
	return u, u.Close, nil
}

// timed has a call measured on the receiver's CPU.
func (b *ddtBench) timed(a *arena, cold bool, n int, call func()) (ns float64, err error) {
	err = b.pinned(func() error {
		ns = a.measure(n, cold, call)
		return nil
	})
	return ns, err
}

// placing returns a placement for a single message at a time.
func placing(t *ddtType, strategy string, hpus int, interval int64) (*contender, error) {
	p, err := ddt.NewPlacement(t.data, ddt.Config{Strategy: strategy, HPUs: hpus, Messages: 1, Packet: ddtPacket, Interval: interval})
	return &contender{Placement: p, strategy: strategy, name: strategyNames[strategy]}, err
}

// blocksPlot measures figure 8 of SC 2019: throughput by the length of blocks.
func blocksPlot(ctx context.Context, t *trial) (err error) {
	b := t.ddt(pick(t, 250*time.Millisecond, 50*time.Millisecond))
	u, end, err := b.unpackers(ctx, "lines of MPICH in strategies-blocks")
	defer func() { err = errors.Join(err, end()) }()
	if err != nil {
		return err
	}
	var types []*ddtType
	peers := []struct {
		leaf *ddt.Type
		*line
	}{{ddt.Int, newLine("MPICH, of MPI_INT", "")}, {ddt.Byte, newLine("MPICH, of MPI_BYTE", "")}}
	var lines []*line
	for _, s := range ddt.Strategies() {
		lines = append(lines, newLine(strategyNames[s], "user"))
	}
	var sides []func(context.Context) error
	a := &arena{}
	for _, block := range pick(t, []int64{4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096}, []int64{4, 32, 256, 1024, 4096}) {
		d, err := blocksType(strategyBytes, block, ddt.Byte)
		if err != nil {
			return err
		}
		types = append(types, d)
		ranges := ddtOrders[0].ranges(d.data.Size())
		for i, s := range ddt.Strategies() {
			p, err := placing(d, s, ddtHPUs, 0)
			if err != nil {
				return err
			}
			sides = append(sides, func(context.Context) error {
				ns, err := b.timed(a, false, b.warmRuns(), func() { p.place(a, d, ranges) })
				lines[i].add(float64(block), gigabytes(d.data.Size(), ns), -1)
				return err
			})
		}
		for _, p := range peers {
			if u == nil {
				continue
			}
			theirs, err := blocksType(strategyBytes, block, p.leaf)
			if err != nil {
				return err
			}
			sides = append(sides, func(ctx context.Context) error {
				m, err := u.Measure(ctx, theirs.typ, 1, b.warmRuns(), 0)
				if err == nil {
					p.add(float64(block), gigabytes(theirs.data.Size(), medianNS(m.Unpack)), -1)
				}
				return err
			})
		}
	}
	room, err := b.newArena(types)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, room.free()) }()
	*a = *room
	if err := bench.Rounds(ctx, t.runs, sides...); err != nil {
		return err
	}
	for _, p := range peers {
		lines = append(lines, p.line)
	}
	t.plot(report.Plot{
		Name: "strategies-blocks", Title: "Putting a message of 4 MiB in place, by block length",
		X: report.Axis{Label: "block length", Unit: "bytes", Log: true}, Y: report.Axis{Label: "placed", Unit: "GB/s", Log: true},
	}, lines...)
	return nil
}

// partsBlocks are blocks of a packet in figure 12 of SC 2019.
var partsBlocks = []int64{1, 4, 16}

// partsPlot measures figure 12 of SC 2019: what a handler spends its time on.
func partsPlot(ctx context.Context, t *trial) (err error) {
	b := t.ddt(pick(t, 250*time.Millisecond, 50*time.Millisecond))
	const packets = 1024
	parts := []*line{newLine("init: checks, RO-CP's copy of a checkpoint", "user"), newLine("setup: finding the first byte", "user"), newLine("processing: copying", "user")}
	x := report.Axis{Label: "strategy, and blocks per packet"}
	a := &arena{}
	var types []*ddtType
	var sides []func(context.Context) error
	for _, s := range ddt.Strategies() {
		for _, n := range partsBlocks {
			d, err := blocksType(packets*ddtPacket, ddtPacket/n, ddt.Byte)
			if err != nil {
				return err
			}
			types = append(types, d)
			at := float64(len(x.Names))
			x.Names = append(x.Names, fmt.Sprintf("%s, %d", strings.TrimSuffix(strategyNames[s], ", XsPIN's own"), n))
			p, err := placing(d, s, ddtHPUs, 0)
			if err != nil {
				return err
			}
			caughtUp := p // the same with nothing to catch up
			if s == ddt.ROCP {
				if caughtUp, err = placing(d, s, ddtHPUs, ddtPacket); err != nil {
					return err
				}
			}
			ranges := ddtOrders[0].ranges(d.data.Size())
			whole := func() {
				if _, err := p.Place(0, 0, a.mem, 0, 0, 0, a.stream[:d.data.Size()]); err != nil {
					panic(err) // mem has room for all of the type
				}
			}
			empty := func() {
				for _, first := range ranges {
					if _, err := p.Place(0, 0, a.mem, 0, first, first, nil); err != nil {
						panic(err) // no bytes are always inside
					}
				}
			}
			sides = append(sides, func(context.Context) error {
				var ns [4]float64
				for i, call := range []func(){empty, whole, func() { caughtUp.place(a, d, ranges) }, func() { p.place(a, d, ranges) }} {
					took, err := b.timed(a, false, b.warmRuns(), call)
					if err != nil {
						return err
					}
					ns[i] = took / packets
				}
				for i, part := range handlerParts(s == ddt.ROCP, ns[0], ns[1], ns[2], ns[3]) {
					parts[i].add(at, part, -1)
				}
				return nil
			})
		}
	}
	room, err := b.newArena(types)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, room.free()) }()
	*a = *room
	if err := bench.Rounds(ctx, t.runs, sides...); err != nil {
		return err
	}
	t.plot(report.Plot{
		Name: "strategies-parts", Title: "What a handler spends its time on, by strategy and blocks per packet", Stack: true,
		X: x, Y: report.Axis{Label: "time per packet", Unit: "ns"},
	}, parts...)
	return nil
}

// handlerParts returns init, setup and processing of a packet: of the time for one without
// bytes, for its share of all of the message at once, for one that finds its checkpoint
// where it begins, and for one as it is. What noise makes of a part is not less than 0.
func handlerParts(copies bool, empty, whole, caughtUp, all float64) [3]float64 {
	first := empty
	if copies {
		first = max(caughtUp-whole, empty)
	}
	return [3]float64{first, max(all-first-whole, 0), whole}
}

// hpusPlots measures figure 13 of SC 2019: throughput and memory by HPUs, and memory by
// the length of blocks.
func hpusPlots(ctx context.Context, t *trial) error {
	b := t.ddt(pick(t, 250*time.Millisecond, 50*time.Millisecond))
	const block = 64
	cpus := []int{b.receiver}
	for _, c := range append([]int{b.sender}, testbed.CPUs()...) {
		if !slices.Contains(cpus, c) {
			cpus = append(cpus, c)
		}
	}
	d, err := blocksType(1<<20, block, ddt.Byte)
	if err != nil {
		return err
	}
	_, hi := d.data.Bounds()
	var speed, byBlock, byHPUs []*line
	var sides []func(context.Context) error
	placeOn := func(l *line, o handlers.DatatypeOptions, byMessage bool) error {
		o.Packet, o.Window = ddtPacket, hi
		for n := 1; n <= min(len(cpus), 16); n *= 2 {
			o.HPUs = n
			set, err := handlers.Datatype(d.data, o)
			if err != nil {
				return err
			}
			c := &crew{set: set, byMessage: byMessage}
			sides = append(sides, func(ctx context.Context) error {
				err := c.replay(ctx, replay.Config{Stream: make([]byte, d.data.Size()), Packet: ddtPacket, Place: hi, CPUs: cpus[:n]}, 0, b.cfg.duration)
				if err == nil {
					l.add(float64(n), c.mpps[0][len(c.mpps[0])-1]*ddtPacket/1e3, -1)
				}
				return err
			})
		}
		return nil
	}
	for i, s := range ddt.Strategies() {
		for _, lines := range []*[]*line{&speed, &byBlock, &byHPUs} {
			*lines = append(*lines, newLine(strategyNames[s], "user"))
		}
		if err := placeOn(speed[i], handlers.DatatypeOptions{Strategy: s, Messages: replay.SharedMessages}, false); err != nil {
			return err
		}
		memory := func(l *line, x float64, hpus int, block int64) {
			sides = append(sides, func(context.Context) error {
				d, err := blocksType(strategyBytes, block, ddt.Byte)
				if err != nil {
					return err
				}
				p, err := ddt.NewPlacement(d.data, ddt.Config{Strategy: s, HPUs: hpus, Messages: 1, Packet: ddtPacket})
				if err == nil {
					l.add(x, float64(p.Memory().Total())/1024, -1)
				}
				return err
			})
		}
		for block := int64(4); block <= 4096; block *= 4 {
			memory(byBlock[i], float64(block), 16, block)
		}
		for n := 1; n <= 32; n *= 2 {
			memory(byHPUs[i], float64(n), n, 2048)
		}
	}
	apart := newLine("direct, each HPU with messages of its own", "user")
	speed = append(speed, apart)
	if err := placeOn(apart, handlers.DatatypeOptions{Strategy: ddt.Direct, Messages: replay.Messages}, true); err != nil {
		return err
	}
	if err := bench.Rounds(ctx, min(t.runs, 3), sides...); err != nil {
		return err
	}
	t.plot(report.Plot{
		Name: "strategies-hpus", Title: fmt.Sprintf("Putting messages of 1 MiB in blocks of %d bytes in place, by number of HPUs, each on its own CPU", block),
		X: report.Axis{Label: "HPUs"}, Y: report.Axis{Label: "placed", Unit: "GB/s"},
	}, speed...)
	kib := report.Axis{Label: "memory", Unit: "KiB", Log: true}
	t.plot(report.Plot{
		Name: "strategies-memory-blocks", Title: "NIC memory for a message of 4 MiB with 16 HPUs: the same for all block lengths",
		X: report.Axis{Label: "block length", Unit: "bytes", Log: true}, Y: kib,
	}, byBlock...)
	t.plot(report.Plot{
		Name: "strategies-memory-hpus", Title: "NIC memory for a message of 4 MiB in blocks of 2048 bytes, by number of HPUs",
		X: report.Axis{Label: "HPUs", Log: true}, Y: kib,
	}, byHPUs...)
	return nil
}

// An iovec is a scatter list as a card has it that knows 32 places: after each 32 blocks
// it fetches the next from a list in the host's memory. Packets come in order.
type iovec struct {
	list []piece   // in the host's memory
	card [32]piece // the next ones
	left []piece   // of card, the first of them from its first byte that is missing
	next int       // of list
	size int64     // bytes of a message
	done int64     // of them
}

type piece struct{ off, n int64 }

func newIovec(c *ddt.Committed) *iovec {
	v := &iovec{size: c.Size()}
	c.Each(0, c.Size(), func(off, n int64) bool {
		v.list = append(v.list, piece{off, n})
		return true
	})
	return v
}

// place places the next bytes of a message, or the first of another.
func (v *iovec) place(mem, stream []byte) {
	if v.done == v.size {
		v.left, v.next, v.done = nil, 0, 0
	}
	v.done += int64(len(stream))
	for len(stream) > 0 {
		if len(v.left) == 0 {
			v.left = v.card[:copy(v.card[:], v.list[v.next:])]
			v.next += len(v.left)
		}
		p := &v.left[0]
		n := copy(mem[p.off:p.off+p.n], stream)
		stream = stream[n:]
		if p.off, p.n = p.off+int64(n), p.n-int64(n); p.n == 0 {
			v.left = v.left[1:]
		}
	}
}

// appRuns are the figures of a type in figures 16 and 18 of SC 2019, run by run, in ns.
type appRuns struct {
	*ddtType
	place  [3][]float64 // by placers
	peer   []float64    // MPICH's
	commit [2][]float64 // by strategies
}

// appStrategies are those of figures 16 and 18. A scatter list comes behind them.
var appStrategies = []string{ddt.RWCP, ddt.Direct}

// appsPlots measures figures 16 and 18 of SC 2019: types of applications next to MPICH,
// and how often a type has to be used until having it committed has paid off.
func appsPlots(ctx context.Context, t *trial) (err error) {
	b := t.ddt(pick(t, 250*time.Millisecond, 50*time.Millisecond))
	if t.quick {
		b.o.apps = detailed
	}
	u, end, err := b.unpackers(ctx, "plots strategies-applications and strategies-reuses")
	defer func() { err = errors.Join(err, end()) }()
	if err != nil || u == nil {
		return err
	}
	types, err := b.o.appTypes()
	if err != nil {
		return err
	}
	a, err := b.newArena(types)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.free()) }()
	all := make([]appRuns, len(types))
	var sides []func(context.Context) error
	for i, d := range types {
		r := &all[i]
		r.ddtType = d
		ranges, list := ddtOrders[0].ranges(d.data.Size()), newIovec(d.data)
		placers := [3]func(){2: func() {
			for _, first := range ranges {
				list.place(a.mem, a.part(d, first))
			}
		}}
		for k, s := range appStrategies {
			p, err := placing(d, s, ddtHPUs, 0)
			if err != nil {
				return err
			}
			placers[k] = func() { p.place(a, d, ranges) }
			sides = append(sides, func(context.Context) error {
				ns, err := b.timed(a, false, b.warmRuns(), func() {
					c, e := ddt.Commit(d.typ, d.count)
					if e == nil {
						// What the model finds is given, lest it is its own measuring that counts.
						_, e = ddt.NewPlacement(c, ddt.Config{Strategy: s, HPUs: ddtHPUs, Messages: 1, Packet: ddtPacket, Interval: int64(p.Scheduling().Sequence)})
					}
					if e != nil {
						panic(e) // it was possible before
					}
				})
				r.commit[k] = append(r.commit[k], ns)
				return err
			})
		}
		for k, place := range placers {
			sides = append(sides, func(context.Context) error {
				ns, err := b.timed(a, true, b.coldRuns(), place)
				r.place[k] = append(r.place[k], ns)
				return err
			})
		}
		sides = append(sides, func(ctx context.Context) error {
			m, err := u.Measure(ctx, d.typ, d.count, b.coldRuns(), int64(len(a.cold)))
			if err == nil {
				r.peer = append(r.peer, medianNS(m.Unpack))
			}
			return err
		})
	}
	if err := bench.Rounds(ctx, t.runs, sides...); err != nil {
		return err
	}
	x := report.Axis{Label: "type, and mean blocks per packet"}
	var lines []*line
	for _, s := range appStrategies {
		lines = append(lines, newLine(strategyNames[s], "user"))
	}
	lines = append(lines, newLine("scatter list, 32 entries at a time", ""))
	for i, r := range all {
		x.Names = append(x.Names, fmt.Sprintf("%s, %s", r.name, bench.Figure(float64(r.data.Blocks())*ddtPacket/float64(max(r.data.Size(), ddtPacket)))))
		for k, l := range lines {
			for run, ns := range r.place[k] {
				l.add(float64(i), r.peer[run]/ns, -1)
			}
		}
	}
	t.plot(report.Plot{
		Name: "strategies-applications", Title: "Types of real applications: speed-up over MPI_Unpack, with cold caches",
		X: x, Y: report.Axis{Label: "speed-up over MPI_Unpack", Unit: "ratio", Log: true, Better: "higher"},
	}, lines...)
	t.plot(report.Plot{
		Name: "strategies-reuses", Title: "Messages until committing a type has paid off, over the types of applications",
		X: report.Axis{Label: "share of the types for which it has", Unit: "%"}, Y: report.Axis{Label: "messages", Log: true, Better: "lower"},
		Marks: []report.Mark{{Name: "RW-CP, SC 2019", X: 75, Y: 4, Source: "SC 2019, section 5.3, figure 18: 4 or fewer for 75 % of its types, in a simulated NIC of 200 Gbit/s: another machine"}},
	}, reuses(all)...)
	return nil
}

// reuses returns the types for which committing pays off in every run, by after how many
// messages it does: what it takes by what a message is faster than MPI_Unpack.
func reuses(all []appRuns) (lines []*line) {
	for k, s := range appStrategies {
		l := newLine(strategyNames[s], "user")
		var types [][]float64
		for _, r := range all {
			var runs []float64
			for run, ns := range r.place[k] {
				if saved := r.peer[run] - ns; saved > 0 {
					runs = append(runs, r.commit[k][run]/saved)
				}
			}
			if len(runs) > 0 && len(runs) == len(r.peer) {
				types = append(types, runs)
			}
		}
		slices.SortFunc(types, func(a, b []float64) int { return cmp.Compare(quantile.Median(a), quantile.Median(b)) })
		for i, runs := range types {
			for _, n := range runs {
				l.add(100*float64(i+1)/float64(len(all)), n, -1)
			}
		}
		lines = append(lines, l)
	}
	return lines
}

// strategySpelling turns what rows call strategies into what plots do.
var strategySpelling = strings.NewReplacer("_", " ", "hpu-local", "HPU-local", "ro-cp", "RO-CP", "rw-cp", "RW-CP")

// strategyRowsPlots draws rows of ddt: order and HPUs, and what committing takes.
func strategyRowsPlots(_ context.Context, t *trial) error {
	x := report.Axis{Label: "strategy"}
	var lines []*line
	for _, s := range sharedTypes {
		for _, o := range []struct{ row, name string }{{"in_order", "in order"}, {"within_32", "shuffled within 32"}} {
			l := newLine(fmt.Sprintf("%s, %s", s.name, o.name), "user")
			prefix := fmt.Sprintf("ddt/strategy_hpus/%s/%s/", s.name, o.row)
			for _, r := range t.e.Rows {
				name, ok := strings.CutPrefix(r.Name, prefix)
				if !ok {
					continue
				}
				name = strategySpelling.Replace(name)
				if !slices.Contains(x.Names, name) {
					x.Names = append(x.Names, name)
				}
				l.row(float64(slices.Index(x.Names, name)), r.A)
			}
			lines = append(lines, l)
		}
	}
	t.plot(report.Plot{
		Name: "strategies-order", Title: "Two HPUs that share messages, by order of packets",
		X: x, Y: report.Axis{Label: "packets placed", Unit: "million/s"},
	}, lines...)

	x = report.Axis{Label: "type"}
	commit := newLine("direct, over the network", "user")
	for _, r := range t.e.Rows {
		if name, ok := strings.CutPrefix(r.Name, "ddt/commit_over_transfer/"); ok {
			commit.on = r.B.On
			for run := range r.A.Runs {
				commit.add(float64(len(x.Names)), r.A.Runs[run]/r.B.Runs[run], -1)
			}
			x.Names = append(x.Names, name)
		}
	}
	t.plot(report.Plot{
		Name: "strategies-commit", Title: "Time to commit a type for direct, divided by time of a message over the network",
		X: x, Y: report.Axis{Label: "time to commit / time of a message", Unit: "ratio", Log: true, Better: "lower"},
	}, commit)
	return nil
}
