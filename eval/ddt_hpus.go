// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/replay"
	"github.com/xspin/xspin/handlers"
)

// sharedHPUs is how many HPUs process messages together.
const sharedHPUs = 2

// sharedTypes are those whose messages are replayed to HPUs with each strategy, by the
// application's. Complex overlaps itself, so that it would be chance which bytes stay when
// two HPUs place it: this is the same with room for all. The second is a list of blocks of
// several sizes.
var sharedTypes = []struct{ app, name, text string }{
	{"Complex", "Complex_apart", "hvec(2 1 73728)[hvec(4 1 18432)[hvec(32 1 576)[ctg(432)[byte]]]]"},
	{"LAMMPS_full", "LAMMPS_full", "LAMMPS_full"},
}

// shared returns them in as many elements as are about as long as what is transferred.
func (o *ddtOptions) shared() (types []*ddtType, err error) {
	for _, s := range sharedTypes {
		if len(o.apps) > 0 && !slices.Contains(o.apps, s.app) {
			continue
		}
		typ, _, err := ddt.Resolve(s.text)
		if err != nil {
			return nil, err
		}
		t, err := newDDTType(s.name, typ, max(o.elements*vectorBytes/typ.Size(), 1))
		if err != nil {
			return nil, err
		}
		types = append(types, t)
	}
	return types, nil
}

// shuffled returns a fixed order in which no packet is farther than within places from
// where it was.
func shuffled(packets, within int) []int {
	all := make([]int, packets)
	for i := range all {
		all[i] = i
	}
	r := rand.New(rand.NewPCG(1408, uint64(within)))
	for part := range slices.Chunk(all, within) {
		r.Shuffle(len(part), func(i, j int) { part[i], part[j] = part[j], part[i] })
	}
	return all
}

// A crew is two HPUs with a strategy.
type crew struct {
	name, what string
	byMessage  bool // each has messages of its own
	set        *handlers.Set
	mpps, busy [2][]float64 // by order
}

// crews returns those for a type, with a warning for each that cannot be had.
func (b *ddtBench) crews(t *ddtType) (all []*crew) {
	_, hi := t.data.Bounds()
	for _, c := range []struct {
		name, strategy string
		interval       int64
		what           string
		byMessage      bool
	}{
		{"direct", ddt.Direct, 0, "direct, policy packet", false},
		{"direct_by_message", ddt.Direct, 0, "direct, policy message, a message on each HPU", true},
		{"hpu-local", ddt.HPULocal, 0, "hpu-local, blocked-rr", false},
		{"ro-cp", ddt.ROCP, 0, "ro-cp, policy packet, the model's interval", false},
		{"rw-cp", ddt.RWCP, 0, "rw-cp, blocked-rr, the model's interval", false},
		{"rw-cp_one_sequence", ddt.RWCP, t.data.Size(), "rw-cp, a single sequence for all of a message, so that it is on one HPU", false},
		{"rw-cp_one_packet", ddt.RWCP, ddtPacket, "rw-cp, blocked-rr, a sequence for each packet", false},
	} {
		o := handlers.DatatypeOptions{Strategy: c.strategy, HPUs: sharedHPUs, Messages: replay.SharedMessages, Packet: ddtPacket, Interval: c.interval, Window: hi}
		if c.byMessage {
			o.Messages = replay.Messages
		}
		set, err := handlers.Datatype(t.data, o)
		if err != nil {
			b.cfg.warn(fmt.Sprintf("no row ddt/strategy_hpus/%s/%s: %v", t.name, c.name, err))
			continue
		}
		all = append(all, &crew{name: c.name, what: c.what, byMessage: c.byMessage, set: set})
	}
	return all
}

// replay has HPUs process messages of a type for a time.
func (c *crew) replay(ctx context.Context, cfg replay.Config, order int, d time.Duration) error {
	cfg.Handlers, cfg.Flights = c.set.Handlers, 1
	var packets uint64
	var took, busy time.Duration
	if c.byMessage {
		done, err := replay.Run(ctx, cfg, d)
		if err != nil {
			return err
		}
		begin, end := done[0].Begin, done[0].End
		for _, d := range done {
			packets += d.Packets
			busy += d.Busy
			begin, end = min(begin, d.Begin), max(end, d.End)
		}
		took = end - begin
	} else {
		done, err := replay.RunShared(ctx, replay.Shared{Config: cfg, Sequence: c.set.Sequence, VHPUs: c.set.VHPUs}, d)
		if err != nil {
			return err
		}
		packets, took = done.Packets, done.Took
		for _, s := range done.HPUs {
			busy += s.Busy
		}
	}
	c.mpps[order] = append(c.mpps[order], float64(packets)/took.Seconds()/1e6)
	c.busy[order] = append(c.busy[order], busy.Seconds()/took.Seconds())
	return nil
}

// strategyHPURows compares strategies where they differ: in which HPUs have to wait.
func (b *ddtBench) strategyHPURows(ctx context.Context) error {
	if b.sender == b.receiver {
		b.cfg.warn("no rows ddt/strategy_hpus/*: two HPUs need a CPU each")
		return nil
	}
	const within = 32
	orders := []string{"in_order", fmt.Sprintf("within_%d", within)}
	types, err := b.o.shared()
	if err != nil {
		return err
	}
	of := map[string][]*crew{}
	var sides []func(context.Context) error
	for _, t := range types {
		of[t.name] = b.crews(t)
		_, hi := t.data.Bounds()
		cfg := replay.Config{Stream: make([]byte, t.data.Size()), Packet: ddtPacket, Place: hi, CPUs: []int{b.receiver, b.sender}}
		packets := int((t.data.Size() + ddtPacket - 1) / ddtPacket)
		for o, order := range [][]int{nil, shuffled(packets, within)} {
			for _, c := range of[t.name] {
				sides = append(sides, func(ctx context.Context) error {
					cfg := cfg
					cfg.Order = order
					if err := c.replay(ctx, cfg, o, b.cfg.duration/4); err != nil {
						return fmt.Errorf("%s, %s, %s: %w", t.name, orders[o], c.what, err)
					}
					return nil
				})
			}
		}
	}
	if err := bench.Rounds(ctx, b.cfg.runs, sides...); err != nil {
		return err
	}
	for _, t := range types {
		for o, order := range orders {
			for _, c := range of[t.name] {
				s := bench.NewSide(fmt.Sprintf("%d of it, ", t.count)+c.what+": packets per second of both HPUs together", "Mpps", c.mpps[o])
				s.Add("busy_hpus", c.busy[o])
				s.Add("memory_bytes", []float64{float64(c.set.ReservedBytes())})
				if c.set.Sequence > 0 {
					s.Add("sequence_bytes", []float64{float64(c.set.Sequence)})
				}
				if err := b.absolute(fmt.Sprintf("ddt/strategy_hpus/%s/%s/%s", t.name, order, c.name), bench.Higher,
					fmt.Sprintf("messages of %d bytes in packets of %d, replayed from memory to HPUs on CPUs %d and %d; the next message begins when the last is complete; "+
						"packets come as soon as there is room for %d in all that wait or are processed, %s; busy_hpus: how many HPUs process packets, in the mean; memory: of %d messages in flight",
						t.data.Size(), ddtPacket, b.receiver, b.sender, replay.SharedCredits,
						[]string{"in order", fmt.Sprintf("shuffled within each %d", within)}[o], replay.SharedMessages), s); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
