// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/demos/datatypes"
	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/mpich"
)

// A moved is what a run of a transfer took.
type moved struct {
	bytes           int64
	took            time.Duration // from ready-to-send on
	machine         time.Duration // CPU time of all
	processes       time.Duration // CPU time of sender and receiver
	segments, again uint64
}

// movedRuns are the figures of a transfer, run by run.
type movedRuns struct {
	gbps, machine, processes, again []float64
	on                              string
}

func (r *movedRuns) add(m moved) {
	gb := float64(m.bytes) / 1e9
	r.gbps = append(r.gbps, 8*gb/m.took.Seconds())
	r.machine = append(r.machine, m.machine.Seconds()/gb)
	r.processes = append(r.processes, m.processes.Seconds()/gb)
	if m.segments > 0 {
		r.again = append(r.again, 100*float64(m.again)/float64(m.segments))
	}
}

// cpu is the side of CPU time.
func (r *movedRuns) cpu(what string) bench.Side {
	s := bench.NewSide(what, "s/GB", r.machine)
	s.On = r.on
	s.Add("of_processes_s_per_GB", r.processes)
	s.Add("goodput_gbps", r.gbps)
	s.Add("sent_again_percent", r.again)
	return s
}

// goodput is the side of goodput.
func (r *movedRuns) goodput(what string) bench.Side {
	s := bench.NewSide(what, "Gbit/s", r.gbps)
	s.On = r.on
	s.Add("machine_s_per_GB", r.machine)
	s.Add("sent_again_percent", r.again)
	return s
}

// transfers returns Simple, Complex and vectors of 64 bytes, in messages of the same
// length.
func (b *ddtBench) transfers() []datatypes.Transfer {
	blocks := b.o.elements * vectorBytes / 64
	list := []datatypes.Transfer{
		{Name: "simple", Type: "Simple", Count: b.o.elements},
		{Name: "complex", Type: "Complex", Count: b.o.elements},
		{Name: "vector_64B", Type: fmt.Sprintf("hvec(%d 64 128)[byte]", blocks), Count: 1},
	}
	for i := range list {
		list[i].Parallel, list[i].Strategy = b.o.parallel, ddt.Direct
	}
	return list
}

// setup pins what a session consists of. The NIC is on the given CPU.
func (b *ddtBench) setup(nicCPU int) datatypes.Setup {
	return datatypes.Setup{HPUs: 1, Wait: "adaptive", NICCPUs: []int{nicCPU}, AppCPU: b.receiver, SenderCPU: b.sender}
}

// rounds transfers for the time of a run, after a round that does not count.
func (b *ddtBench) rounds(ctx context.Context, s *datatypes.Session, i int) (m moved, err error) {
	if _, err := s.Round(ctx, i); err != nil {
		return m, err
	}
	for m.took < b.cfg.duration || m.machine == 0 {
		r, err := s.Round(ctx, i)
		if err != nil {
			return m, err
		}
		m.ours(r)
	}
	return m, nil
}

// ours adds a round of a session.
func (m *moved) ours(r *datatypes.Round) {
	m.bytes += r.Bytes
	m.took += r.Took
	m.machine += r.CPU.Machine
	m.processes += r.CPU.Sum()
	m.segments += r.Segments
	m.again += r.Retransmitted
}

// theirs adds rounds of MPICH, each of so many bytes.
func (m *moved) theirs(bytes int64, r mpich.Rounds, machine time.Duration) {
	for _, t := range r.Times {
		m.took += t
		m.bytes += bytes
	}
	m.machine += machine
	m.processes += r.Receiver + r.Sender
}

// A pair is MPICH, or Open MPI, with one of the transfers.
type pair struct {
	*mpich.Pair
	bytes int64 // of a round
}

func (p *pair) close(err *error) {
	if p != nil {
		*err = errors.Join(*err, p.Close())
	}
}

// prepare starts an MPI library for a transfer. There must be no NIC.
func (b *ddtBench) prepare(ctx context.Context, l mpich.Library, t datatypes.Transfer) (_ *pair, err error) {
	typ, _, err := ddt.Resolve(t.Type)
	if err != nil {
		return nil, err
	}
	p, err := mpich.Start(ctx, mpich.PairConfig{Lab: b.Lab, ReceiverCPU: b.receiver, SenderCPU: b.sender, Library: l})
	if err != nil {
		return nil, err
	}
	if err := p.Prepare(ctx, mpich.Transfer{Type: typ, Count: t.Count, Messages: t.Parallel}); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return &pair{p, typ.Size() * t.Count * int64(t.Parallel)}, nil
}

// computing is prepare with the GEMM. If the library or that cannot be had, it warns of what
// there is not, and returns nil.
func (b *ddtBench) computing(ctx context.Context, l mpich.Library, t datatypes.Transfer, lines string) (*pair, error) {
	p, err := b.prepare(ctx, l, t)
	if err != nil {
		return nil, b.without(lines, err)
	}
	// The library with the GEMM is built now, or not at all.
	if _, err = p.Compute(ctx, mpich.Compute{Dim: 64, GEMMs: 1}, 1); err == nil {
		return p, nil
	}
	if errors.Is(err, mpich.ErrNoGo) {
		b.cfg.warn(fmt.Sprintf("no %s: %v", lines, err))
		err = nil
	}
	p.close(&err)
	return nil, err
}

// receive has MPICH transfer for the time of a run, after a round that does not count.
func (b *ddtBench) receive(ctx context.Context, p *pair) (m moved, err error) {
	warm, err := p.Receive(ctx, 1)
	if err != nil {
		return m, err
	}
	for m.took < b.cfg.duration || m.machine == 0 {
		n := int(max(b.cfg.duration-m.took, 0)/max(warm.Times[0], time.Microsecond)) + 1
		before, err := datatypes.BusyCPUs()
		if err != nil {
			return m, err
		}
		r, err := p.Receive(ctx, n)
		if err != nil {
			return m, err
		}
		after, err := datatypes.BusyCPUs()
		if err != nil {
			return m, err
		}
		m.theirs(p.bytes, r, after-before)
	}
	return m, nil
}

const tcpPeer = "MPICH over TCP, derived datatype posted with MPI_Irecv, the sender sends the packed stream; waits spinning; no XDP program on either end"

// cpuRows says what receiving costs the machine.
func (b *ddtBench) cpuRows(ctx context.Context) (err error) {
	transfers := b.transfers()
	contiguous := make([]datatypes.Transfer, 0, 2)
	for _, t := range transfers[:2] {
		t.Name, t.Strategy = t.Name+" in a row", datatypes.Deposit
		contiguous = append(contiguous, t)
	}
	pairs := make([]*pair, len(transfers))
	for i, t := range transfers {
		p, err2 := b.prepare(ctx, mpich.MPICH, t)
		if err2 != nil {
			if err := b.without("rows ddt/*_over_mpich of part cpu", err2); err != nil {
				return err
			}
			pairs = nil
			break
		}
		defer p.close(&err)
		pairs[i] = p
	}

	var session *datatypes.Session
	end := func() (err error) {
		if session != nil {
			err = session.Close()
			session = nil
		}
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	all := append(contiguous, transfers...)
	ours, theirs := make([]movedRuns, len(all)), make([]movedRuns, len(pairs))
	sides := []func(context.Context) error{func(ctx context.Context) (err error) {
		if session, err = datatypes.Open(ctx, b.Lab, b.setup(b.receiver), all...); err != nil {
			return err
		}
		on, err := b.state()
		for i := range ours {
			ours[i].on = on
		}
		return err
	}}
	// What is divided by each other is next to each other.
	for _, i := range []int{0, 2, 1, 3, 4} {
		sides = append(sides, func(ctx context.Context) error {
			m, err := b.rounds(ctx, session, i)
			if err != nil {
				return fmt.Errorf("%s: %w", all[i].Name, err)
			}
			ours[i].add(m)
			return nil
		})
	}
	var idle []float64
	sides = append(sides, func(ctx context.Context) error {
		v, err := b.idleCPUs(ctx)
		idle = append(idle, v)
		return err
	}, func(context.Context) error { return end() })
	for i, p := range pairs {
		sides = append(sides, func(ctx context.Context) (err error) {
			if theirs[i].on, err = b.state(); err != nil {
				return err
			}
			m, err := b.receive(ctx, p)
			if err != nil {
				return fmt.Errorf("MPICH, %s: %w", transfers[i].Name, err)
			}
			theirs[i].add(m)
			return nil
		})
	}
	if err := bench.Rounds(ctx, b.cfg.runs, sides...); err != nil {
		return err
	}

	conditions := fmt.Sprintf("%d messages at a time of %d bytes, from ready-to-send until the application knows that all are there, packed before; sender on CPU %d, receiver on CPU %d: application, asleep meanwhile, and NIC with 1 HPU, adaptive; "+
		"CPU seconds of the whole machine (/proc/stat), all processes and softirqs of both ends, for 10^9 bytes of messages; of_processes: of sender and receiver alone, with the softirqs on their account; MTU %d",
		b.o.parallel, b.o.elements*vectorBytes, b.sender, b.receiver, b.MTU)
	datatype := func(t datatypes.Transfer) string {
		return fmt.Sprintf("SLMP, handler set datatype, direct, %d of %s in a message", t.Count, t.Type)
	}
	for i, c := range []struct {
		name string
		goal bench.Goal
	}{{"ddt/cpu_simple_over_contiguous", bench.AtMost(1.1)}, {"ddt/cpu_complex_over_contiguous", bench.AtMost(1.3)}} {
		one := ours[2+i].cpu(datatype(transfers[i]))
		one.Add("idle_machine_cpus", idle)
		if err := b.ratio(c.name, c.goal, conditions, one, ours[i].cpu("SLMP, handler set deposit: the same messages, put in a row")); err != nil {
			return err
		}
	}
	for i, t := range transfers {
		one := &ours[2+i]
		if pairs != nil {
			if err := b.ratio("ddt/cpu_"+t.Name+"_over_mpich", bench.Lower, conditions, one.cpu(datatype(t)), theirs[i].cpu(tcpPeer).Of("MPICH")); err != nil {
				return err
			}
			if err := b.ratio("ddt/goodput_"+t.Name+"_over_mpich", bench.Higher, conditions, one.goodput(datatype(t)), theirs[i].goodput(tcpPeer).Of("MPICH")); err != nil {
				return err
			}
		}
		if err := b.absolute("ddt/goodput_"+t.Name, bench.Higher, conditions, one.goodput(datatype(t))); err != nil {
			return err
		}
	}
	return nil
}

// idleCPUs returns how many CPUs are busy while nothing is measured.
func (b *ddtBench) idleCPUs(ctx context.Context) (float64, error) {
	before, err := datatypes.BusyCPUs()
	if err != nil {
		return 0, err
	}
	begin := time.Now()
	select {
	case <-time.After(b.cfg.duration):
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	after, err := datatypes.BusyCPUs()
	return float64(after-before) / float64(time.Since(begin)), err
}

// overlapped is what a run with computation took.
type overlapped struct {
	compute, transfer, both time.Duration // GEMMs alone, messages alone, and both
	computed, detected, nic time.Duration // of both: GEMMs; until the messages were found there; until the NIC had them
	ratio                   float64       // FPsPIN's, of all trials together
	trials, misses          int
	segments, lost          uint64 // of both; of ours only
	tuned                   bool   // the matrices' size had settled
}

// overlapRuns are the figures of one receiver, run by run.
type overlapRuns struct {
	both, compute, transfer, nic, hidden, computeSlower, transferSlower, ratio, misses []float64
	rows                                                                               []float64 // of the matrices
	tuned                                                                              []float64 // share of the runs in which their size had settled
	on                                                                                 string
}

func (r *overlapRuns) add(o overlapped) {
	n := float64(o.trials)
	ms := func(d time.Duration) float64 { return d.Seconds() * 1e3 / n }
	r.both = append(r.both, ms(o.both))
	r.compute = append(r.compute, ms(o.compute))
	r.transfer = append(r.transfer, ms(o.transfer))
	r.hidden = append(r.hidden, float64(o.compute+o.transfer-o.both)/float64(o.transfer))
	r.computeSlower = append(r.computeSlower, float64(o.computed)/float64(o.compute))
	r.transferSlower = append(r.transferSlower, float64(o.detected)/float64(o.transfer))
	r.ratio = append(r.ratio, o.ratio/n)
	if o.nic > 0 {
		r.nic = append(r.nic, ms(o.nic))
		r.misses = append(r.misses, float64(o.misses)/n)
	}
}

// side has all figures of a receiver, with one of them in front.
func (r *overlapRuns) side(what, unit string, runs []float64) bench.Side {
	s := bench.NewSide(what, unit, runs)
	s.On = r.on
	s.Add("both_ms", r.both)
	s.Add("gemms_alone_ms", r.compute)
	s.Add("messages_alone_ms", r.transfer)
	s.Add("nic_ms", r.nic)
	s.Add("gemms_slower", r.computeSlower)
	s.Add("messages_slower", r.transferSlower)
	s.Add("missed_share", r.misses)
	s.Add("matrix_rows", r.rows)
	s.Add("tuned_share", r.tuned)
	return s
}

// overlapRows has the receiver compute while messages arrive.
func (b *ddtBench) overlapRows(ctx context.Context) error {
	for _, t := range b.transfers()[:2] {
		if err := b.overlap(ctx, t); err != nil {
			return fmt.Errorf("%s: %w", t.Name, err)
		}
	}
	return nil
}

func (b *ddtBench) overlap(ctx context.Context, t datatypes.Transfer) (err error) {
	p, err := b.computing(ctx, mpich.MPICH, t, "rows ddt/*_mpich of part overlap")
	if err != nil {
		return err
	}
	defer p.close(&err)
	var g datatypes.GEMMs // of the run
	var rows []float64
	tuned := 0.0 // share of the runs
	var ours, theirs overlapRuns
	sides := []func(context.Context) error{func(ctx context.Context) (err error) {
		var o overlapped
		if g, o, err = b.overlapOurs(ctx, t, &ours.on); err == nil {
			ours.add(o)
			rows = append(rows, float64(g.N))
			if o.tuned {
				tuned += 1 / float64(b.cfg.runs)
			}
		}
		return err
	}}
	if p != nil {
		sides = append(sides, func(ctx context.Context) (err error) {
			if theirs.on, err = b.state(); err != nil {
				return err
			}
			o, err := b.overlapTheirs(ctx, p, g)
			if err == nil {
				theirs.add(o)
			}
			return err
		})
	}
	if err := bench.Rounds(ctx, b.cfg.runs, sides...); err != nil {
		return err
	}

	conditions := fmt.Sprintf("%d products of square matrices of doubles (gonum, one thread, the same code on both sides) and %d messages of %d bytes; application, which computes, on CPU %d, sender on CPU %d; times from ready-to-send on; means of a run's trials; "+
		"the matrices' size, tuned for each run, is one at which XsPIN's messages are found after the 15th to the last product, and the same for both sides; MTU %d", g.Count, b.o.parallel, b.o.elements*vectorBytes, b.receiver, b.sender, b.MTU)
	one := fmt.Sprintf("SLMP, handler set datatype, direct, NIC with 1 HPU, adaptive, on the sender's CPU; %d of %s in a message", t.Count, t.Type)
	two := tcpPeer + "; MPI_Testall between two products"
	ours.rows, theirs.rows = rows, rows
	ours.tuned = []float64{tuned}
	if p != nil {
		if err := b.ratio("ddt/overlap_"+t.Name+"_over_mpich", bench.AtMost(0.9), conditions, ours.side(one, "ms", ours.both), theirs.side(two, "ms", theirs.both).Of("MPICH")); err != nil {
			return err
		}
	}
	paper := "FPsPIN's ratio: time of products by time until the look between two products that finds all messages; it tends to 1 by construction; " + conditions
	hidden := "share of the messages' time that is hidden: (products + messages - both) / messages, of the first two alone; " + conditions
	// It has no target: long products meet any.
	if err := b.absolute("ddt/overlap_ratio_"+t.Name, bench.Higher, paper, ours.side(one, "ratio", ours.ratio)); err != nil {
		return err
	}
	if err := b.absolute("ddt/hidden_"+t.Name, bench.Higher, hidden, ours.side(one, "share", ours.hidden)); err != nil || p == nil {
		return err
	}
	if err := b.absolute("ddt/overlap_ratio_"+t.Name+"_mpich", bench.Higher, paper, theirs.side(two, "ratio", theirs.ratio)); err != nil {
		return err
	}
	return b.absolute("ddt/hidden_"+t.Name+"_mpich", bench.Higher, hidden, theirs.side(two, "share", theirs.hidden))
}

// overlapOurs is a run of a session, which also chooses what is computed in that run.
func (b *ddtBench) overlapOurs(ctx context.Context, t datatypes.Transfer, on *string) (g datatypes.GEMMs, o overlapped, err error) {
	s, err := datatypes.Open(ctx, b.Lab, b.setup(b.sender), t)
	if err != nil {
		return g, o, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if *on, err = b.state(); err != nil {
		return g, o, err
	}
	var alone *datatypes.Round
	for range 2 { // the first one has memory and windows to find
		if alone, err = s.Round(ctx, 0); err != nil {
			return g, o, err
		}
	}
	if g, o.tuned, err = s.Tune(ctx, 0, alone.Took); err != nil {
		return g, o, err
	}
	err = b.overlapTrials(ctx, s, 0, g, &o)
	return g, o, err
}

// overlapTrials adds trials of a session for the time of a run.
func (b *ddtBench) overlapTrials(ctx context.Context, s *datatypes.Session, i int, g datatypes.GEMMs, o *overlapped) error {
	for o.trials == 0 || o.compute+o.transfer+o.both < b.cfg.duration {
		compute, err := s.Compute(ctx, g)
		if err != nil {
			return err
		}
		alone, err := s.Round(ctx, i)
		if err != nil {
			return err
		}
		both, err := s.Overlap(ctx, i, g)
		if err != nil {
			return err
		}
		o.ours(compute, alone.Took, both)
	}
	return nil
}

// ours adds a trial of a session.
func (o *overlapped) ours(compute, transfer time.Duration, both *datatypes.Overlapped) {
	o.trials++
	o.compute += compute
	o.transfer += transfer
	o.both += both.Both
	o.computed += both.Compute
	o.detected += both.Took
	o.nic += both.NIC
	o.ratio += both.Ratio()
	o.segments += both.Segments
	o.lost += max(both.Retransmitted, both.Duplicates) - both.Duplicates
	if !both.Hit {
		o.misses++
	}
}

// theirs adds a trial of MPICH.
func (o *overlapped) theirs(compute, transfer time.Duration, both, found mpich.Overlap) {
	o.trials++
	o.compute += compute
	o.transfer += transfer
	o.both += both.Total
	o.computed += both.Computed
	o.detected += both.Detected
	o.ratio += found.Ratio()
}

// overlapTheirs is a run of MPICH.
func (b *ddtBench) overlapTheirs(ctx context.Context, p *pair, g datatypes.GEMMs) (o overlapped, err error) {
	c := mpich.Compute{Dim: g.N, GEMMs: g.Count}
	if _, err := p.Receive(ctx, 1); err != nil {
		return o, err
	}
	for o.trials == 0 || o.compute+o.transfer+o.both < b.cfg.duration {
		compute, err := p.Compute(ctx, c, 1)
		if err != nil {
			return o, err
		}
		alone, err := p.Receive(ctx, 1)
		if err != nil {
			return o, err
		}
		both, err := p.Overlap(ctx, c, 1)
		if err != nil {
			return o, err
		}
		found, err := p.Detect(ctx, c, 1)
		if err != nil {
			return o, err
		}
		o.theirs(compute[0], alone.Times[0], both[0], found[0])
	}
	return o, nil
}

// commitParallel is how many messages of a type are transferred at a time to know how
// long one takes.
const commitParallel = 4

// commitRows says how long it takes to have a type ready, in messages of it.
func (b *ddtBench) commitRows(ctx context.Context) (err error) {
	types, err := b.o.appTypes()
	if err != nil {
		return err
	}
	var transfers []datatypes.Transfer
	for _, t := range types {
		transfers = append(transfers, datatypes.Transfer{Type: t.name, Count: t.count, Parallel: commitParallel, Strategy: ddt.Direct})
	}
	u, err := mpich.StartUnpacker(ctx, b.receiver)
	if err != nil {
		if err := b.without("figures of MPI_Type_commit in ddt/commit_over_transfer/*", err); err != nil {
			return err
		}
		u = nil
	} else {
		defer func() { err = errors.Join(err, u.Close()) }()
	}
	session, err := datatypes.Open(ctx, b.Lab, b.setup(b.receiver), transfers...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, session.Close()) }()
	on, err := b.state()
	if err != nil {
		return err
	}

	type runs struct{ commit, message, gbps, peer []float64 }
	of := make([]runs, len(types))
	var sides []func(context.Context) error
	for i, t := range types {
		r := &of[i]
		sides = append(sides, func(context.Context) error {
			return b.pinned(func() (err error) {
				var ns []float64
				for range b.warmRuns() {
					begin := time.Now()
					c, e := ddt.Commit(t.typ, t.count)
					if e == nil {
						_, e = ddt.NewPlacement(c, ddt.Config{HPUs: ddtHPUs, Messages: ddtMessages, Packet: ddtPacket})
					}
					ns = append(ns, float64(time.Since(begin)))
					err = errors.Join(err, e)
				}
				r.commit = append(r.commit, bench.NewSide("", "", ns).Median/1e3)
				return err
			})
		}, func(ctx context.Context) error {
			var bytes int64
			var took time.Duration
			for n := 0; n < 3 || took < b.cfg.duration/20; n++ {
				round, err := session.Round(ctx, i)
				if err != nil {
					return fmt.Errorf("%s: %w", t.name, err)
				}
				if n > 0 { // the first one has the context activated
					bytes, took = bytes+round.Bytes, took+round.Took
				}
			}
			speed := float64(bytes) / took.Seconds()
			r.gbps = append(r.gbps, 8*speed/1e9)
			r.message = append(r.message, float64(t.data.Size())/speed*1e6)
			return nil
		})
		if u != nil {
			sides = append(sides, func(ctx context.Context) error {
				m, err := u.Measure(ctx, t.typ, t.count, 3, 0)
				if err == nil {
					r.peer = append(r.peer, medianNS(m.Commit)/1e3)
				}
				return err
			})
		}
	}
	if err := bench.Rounds(ctx, b.cfg.runs, sides...); err != nil {
		return err
	}
	for i, t := range types {
		one := bench.NewSide(fmt.Sprintf("ddt.Commit of a type that is built, and NewPlacement, direct, on CPU %d", b.receiver), "us", of[i].commit)
		one.Add("mpi_type_commit_us", of[i].peer)
		two := bench.NewSide(fmt.Sprintf("a message: its bytes by the goodput of %d at a time", commitParallel), "us", of[i].message)
		two.On = on
		two.Add("goodput_gbps", of[i].gbps)
		two.Add("message_bytes", []float64{float64(t.data.Size())})
		if err := b.ratio("ddt/commit_over_transfer/"+t.name, bench.Lower,
			fmt.Sprintf("messages of one element; sender on CPU %d, application and NIC with 1 HPU, adaptive, on CPU %d; MTU %d", b.sender, b.receiver, b.MTU), one, two); err != nil {
			return err
		}
	}
	return nil
}
