// SPDX-License-Identifier: Apache-2.0

package mpich

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/testbed"
)

var (
	// ErrXDP is returned, wrapped, when there is an XDP program on an end of the lab.
	ErrXDP = errors.New("an XDP program, which takes offloads away from MPI: use a lab without a NIC")
	// ErrPath is returned, wrapped, when messages did not pass through the lab.
	ErrPath = errors.New("messages took another way")
)

// PairConfig says where ranks run.
type PairConfig struct {
	// Lab joins them: the receiver is at the NIC's end, the sender at the host's. There
	// must be no XDP program on either.
	Lab *netns.Lab
	// CPUs that they are pinned to, -1 for any.
	ReceiverCPU, SenderCPU int
	// Library is what they are programs of.
	Library Library
}

// A Pair is a receiver and a sender that are ranks of an MPI program, connected by TCP
// through a lab. Between calls both sleep. It is not safe for concurrent use; a call that
// fails, or whose context ends, ends the ranks.
type Pair struct {
	job
	cfg    PairConfig
	dir    string
	round  uint64 // bytes of messages in a round; 0 before Prepare
	loaded bool   // the GEMM
}

const receiver, sender = 0, 1

// Start builds the program and starts it.
func Start(ctx context.Context, cfg PairConfig) (_ *Pair, err error) {
	if _, err := look(cfg.Lab); err != nil {
		return nil, fmt.Errorf("%s pair: %w", cfg.Library, err)
	}
	dir, err := testbed.TempDir(os.TempDir(), "mpich")
	if err != nil {
		return nil, fmt.Errorf("%s pair: %w", cfg.Library, err)
	}
	p := &Pair{cfg: cfg, dir: dir}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s pair: %w", cfg.Library, p.failed(err))
		}
	}()
	program, err := cfg.Library.build(ctx, dir, "mpi_transfer")
	if err != nil {
		return nil, err
	}
	opened := func() {}
	if cfg.Library == OpenMPI {
		var o *openMPI
		if o, p.ranks, err = startOpenMPI(program, dir, cfg); err == nil {
			opened = o.opened
		}
	} else {
		err = p.start(program)
	}
	if err != nil {
		return nil, err
	}
	// Ranks that do not reach each other try for ever.
	connect, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	// A newline is no command: what they answer is that they are connected.
	_, err = p.call(connect, "\n", "\n")
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		err = fmt.Errorf("%w: not connected to each other after %v", ErrRank, patience)
	}
	if err != nil {
		return nil, err
	}
	opened()
	return p, nil
}

// patience is how long ranks may take to find each other. It is a variable for a test.
var patience = time.Minute

// A place is where a rank runs.
type place struct {
	what string
	port netns.Port
	cpu  int
}

// places are those of the ranks.
func places(cfg PairConfig) []place {
	return []place{{"receiver", cfg.Lab.NIC, cfg.ReceiverCPU}, {"sender", cfg.Lab.Host, cfg.SenderCPU}}
}

// start starts MPICH's ranks.
func (p *Pair) start(program string) error {
	pmi := newPMI(2)
	for i, r := range places(p.cfg) {
		conn, env, err := pmi.connect(i)
		if err != nil {
			return err
		}
		cmd := exec.Command(program)
		cmd.Env = environ(append(env,
			"UCX_TLS=tcp,self", "UCX_NET_DEVICES="+r.port.Device, // not shared memory
			"GOMAXPROCS=1", // of the GEMM's runtime
		)...)
		cmd.ExtraFiles = []*os.File{conn}
		rank, err := startRank(r.what, cmd, func() error { return testbed.Start(r.port.NS, r.cpu, cmd) })
		conn.Close()
		if err != nil {
			pmi.ranks[i].Close()
			return err
		}
		p.ranks = append(p.ranks, rank)
		go pmi.serve(i, rank.kill)
	}
	return nil
}

// failed ends ranks that an error makes useless, and returns it.
func (p *Pair) failed(err error) error {
	if p.err == nil {
		_ = p.fail(err)
	}
	return errors.Join(err, os.RemoveAll(p.dir))
}

// Close ends the ranks.
func (p *Pair) Close() error { return errors.Join(p.close(), os.RemoveAll(p.dir)) }

// A Transfer is what all later rounds transfer. The sender has packed the stream before
// they begin, and sends it as it is; the receiver's messages have a buffer each.
type Transfer struct {
	Type     *ddt.Type
	Count    int64 // of elements in a message, at least 1
	Messages int   // in a round, all on their way at the same time: 1 to 65536
}

// Prepare says what to transfer. It does so once, and fails unless every byte of the
// receiver's buffers, holes included, is as it should be then.
func (p *Pair) Prepare(ctx context.Context, t Transfer) error {
	op := p.cfg.Library + " prepare"
	if t.Count < 1 || t.Count > math.MaxInt32 {
		return fmt.Errorf("%s: %d elements: want 1 to %d, MPI-3 counts them in int", op, t.Count, math.MaxInt32)
	}
	if t.Messages < 1 || t.Messages > 1<<16 {
		return fmt.Errorf("%s: %d messages: want 1 to %d", op, t.Messages, 1<<16)
	}
	command := fmt.Sprintf("prepare %d %d %s\n", t.Messages, t.Count, Encode(t.Type))
	p.round = uint64(t.Messages) * uint64(t.Count) * uint64(t.Type.Size())
	if _, err := p.pass(ctx, 1, command, command); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
}

// Rounds are measurements of transfers.
type Rounds struct {
	// Times are from ready-to-send, when all receives were posted, until the last
	// message was there.
	Times []time.Duration
	// CPU time of the ranks, all rounds together. They wait spinning.
	Receiver, Sender time.Duration
}

// Receive does some rounds. It fails if the bytes did not pass through the lab.
func (p *Pair) Receive(ctx context.Context, rounds int) (Rounds, error) {
	answers, err := p.pass(ctx, rounds, fmt.Sprintf("receive %d\n", rounds), fmt.Sprintf("send %d\n", rounds))
	if err != nil {
		return Rounds{}, fmt.Errorf("%s receive: %w", p.cfg.Library, err)
	}
	r := answers[receiver]
	return Rounds{r[1:], r[0], answers[sender][0]}, nil
}

// A Compute is GEMMs of the receiver, the same as package gemm's.
type Compute struct {
	Dim   int // of matrices, 1 to 16384
	GEMMs int // in a round
}

// Compute does some rounds of GEMMs alone. The sender sleeps meanwhile. As all calls with
// GEMMs, it computes one before it begins; the first of them builds the library that they
// are in, which needs the go command.
func (p *Pair) Compute(ctx context.Context, c Compute, rounds int) ([]time.Duration, error) {
	op := p.cfg.Library + " compute"
	command, err := p.computing(ctx, "gemm", c, rounds)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	answers, err := p.call(ctx, command, "")
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	return answers[receiver], nil
}

// An Overlap is a round of GEMMs and a transfer at the same time.
type Overlap struct {
	GEMMs    int           // that were computed
	Computed time.Duration // time in them
	Detected time.Duration // from ready-to-send until all messages were found there
	Total    time.Duration // from ready-to-send until both were done
}

// Ratio is FPsPIN's overlap ratio, of a round of Detect: the share of the time until
// detection that GEMMs took.
func (o Overlap) Ratio() float64 { return float64(o.Computed) / float64(o.Detected) }

// Overlap does some rounds of GEMMs and a transfer together: receives are posted, and
// tested after each GEMM until they are done. What is left of either at the end of the
// other follows.
func (p *Pair) Overlap(ctx context.Context, c Compute, rounds int) ([]Overlap, error) {
	return p.overlap(ctx, "overlap", c, rounds)
}

// Detect does rounds of FPsPIN's experiment: GEMMs one after the other, at most c.GEMMs,
// until the test after one finds all messages there.
func (p *Pair) Detect(ctx context.Context, c Compute, rounds int) ([]Overlap, error) {
	return p.overlap(ctx, "detect", c, rounds)
}

func (p *Pair) overlap(ctx context.Context, how string, c Compute, rounds int) ([]Overlap, error) {
	command, err := p.computing(ctx, how, c, rounds)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", p.cfg.Library, how, err)
	}
	answers, err := p.pass(ctx, rounds, command, fmt.Sprintf("send %d\n", rounds))
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", p.cfg.Library, how, err)
	}
	all := make([]Overlap, rounds)
	for i := range all {
		o := answers[receiver][4*i:]
		all[i] = Overlap{int(o[0]), o[1], o[2], o[3]}
	}
	return all, nil
}

// computing returns a command with GEMMs, for which the receiver has the library then.
func (p *Pair) computing(ctx context.Context, how string, c Compute, rounds int) (command string, err error) {
	if c.Dim < 1 || c.Dim > 1<<14 {
		return "", fmt.Errorf("matrices of dimension %d: want 1 to %d", c.Dim, 1<<14)
	}
	if c.GEMMs < 0 || c.GEMMs > math.MaxInt32 {
		return "", fmt.Errorf("%d GEMMs: want 0 to %d", c.GEMMs, math.MaxInt32)
	}
	if err := checkRounds(rounds); err != nil {
		return "", err
	}
	if !p.loaded && p.err == nil {
		library := filepath.Join(p.dir, "libgemm.so")
		if err := buildGEMM(ctx, library); err != nil {
			return "", err
		}
		if _, err := p.call(ctx, fmt.Sprintf("load %s\n", library), ""); err != nil {
			return "", err
		}
		p.loaded = true
	}
	return fmt.Sprintf("%s %d %d %d\n", how, c.Dim, c.GEMMs, rounds), nil
}

func checkRounds(rounds int) error {
	if rounds < 1 || rounds > math.MaxInt32 {
		return fmt.Errorf("%d rounds: want 1 to %d", rounds, math.MaxInt32)
	}
	return nil
}

// pass is call for rounds of transfers, whose bytes must arrive on the NIC's device.
func (p *Pair) pass(ctx context.Context, rounds int, commands ...string) (answers [][]time.Duration, err error) {
	if err := checkRounds(rounds); err != nil {
		return nil, err
	}
	if p.err != nil {
		return nil, p.err
	}
	before, err := look(p.cfg.Lab)
	if err != nil {
		return nil, err
	}
	if answers, err = p.call(ctx, commands...); err != nil {
		return nil, err
	}
	after, err := look(p.cfg.Lab)
	if err != nil {
		return nil, err
	}
	if want := uint64(rounds) * p.round; after-before < want {
		return nil, p.fail(fmt.Errorf("%w: %s received %d bytes of %d", ErrPath, p.cfg.Lab.NIC.Device, after-before, want))
	}
	return answers, nil
}

// look returns how many bytes the NIC's device has received, if MPI may use the lab.
func look(lab *netns.Lab) (received uint64, err error) {
	for _, p := range []netns.Port{lab.Host, lab.NIC} {
		err := p.NS.Do(func() error {
			l, err := netlink.LinkByName(p.Device)
			if err != nil {
				return err
			}
			a := l.Attrs()
			if a.Xdp != nil && a.Xdp.Attached {
				return ErrXDP
			}
			received = a.Statistics.RxBytes
			return nil
		})
		if err != nil {
			return 0, fmt.Errorf("%s in %s: %w", p.Device, p.Namespace, err)
		}
	}
	return received, nil
}
