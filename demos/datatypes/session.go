// SPDX-License-Identifier: Apache-2.0

// Package datatypes is the third demo: messages that handlers scatter to where an MPI
// datatype says, while the application computes.
package datatypes

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/daemon"
	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/demos/attached"
	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/slmp"
)

// Deposit is a strategy beside those of ddt: no datatype. The stream is placed as it
// comes, in a row, by the handler set "deposit". It is what datatypes are compared with.
const Deposit = "deposit"

// A Transfer is what a round moves: messages that are all the same, each into a place of
// its own.
type Transfer struct {
	Name     string // that the user knows it by. Defaults to Type
	Type     string // as ddt.Resolve takes it
	Count    int64  // elements of it in a message. Defaults to what ddt.Resolve says
	Parallel int    // messages of a round, all at the same time
	Strategy string // one of ddt.Strategies, or Deposit
	Interval int64  // bytes of the stream between checkpoints; 0: chosen by the model
}

// modelled tells whether the model chooses the interval.
func (t *Transfer) modelled() bool {
	return t.Interval == 0 && (t.Strategy == ddt.ROCP || t.Strategy == ddt.RWCP)
}

// A Setup is where a session runs, and how.
type Setup struct {
	HPUs      int
	Wait      string // of the HPUs: adaptive, sleep or spin
	NICCPUs   []int  // for the threads that serve the HPUs, empty for any
	AppCPU    int    // for the application, -1 for any
	SenderCPU int    // -1 for any
}

// A Session is a NIC, an application that is attached to it, and a sender at the other
// end, each a process of its own but the NIC, which is in this one. Its transfers take
// turns: each has an execution context, and one of them is active at a time. It is not
// safe for concurrent use.
type Session struct {
	transfers []*transfer
	packet    int // bytes of a message in a packet, as the lab's MTU allows
	board     *switchboard
	attached  *attached.App
	daemon    *control.Client
	process   *rtt.Process // the sender's
	app       *link
	sender    *link
}

// transfer is what the session has of one.
type transfer struct {
	*layout
	placement ddt.Memory
	policy    string // that packets are scheduled by; empty: message
}

const windowName = "in"

func contextName(i int) string { return "datatypes-" + strconv.Itoa(i) }

// Open starts a session on a lab, with nobody else on the lab's ends.
func Open(ctx context.Context, lab *netns.Lab, setup Setup, transfers ...Transfer) (_ *Session, err error) {
	return open(ctx, lab, setup, true, netip.AddrPortFrom(lab.Host.Addr.Addr(), RequestPort), transfers...)
}

// open is Open with a sender or without. The peer, if there is one, is asked for messages.
func open(ctx context.Context, lab *netns.Lab, setup Setup, sender bool, peer netip.AddrPort, transfers ...Transfer) (_ *Session, err error) {
	s := &Session{packet: packetOf(lab)}
	for _, t := range transfers {
		l, err := newLayout(t)
		if err != nil {
			return nil, err
		}
		s.transfers = append(s.transfers, &transfer{layout: l})
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	if s.board, err = newSwitchboard(); err != nil {
		return nil, err
	}
	if sender {
		if err := s.startSender(ctx, lab, setup); err != nil {
			return nil, err
		}
	}
	if err := s.startApplication(ctx, lab, setup, peer); err != nil {
		return nil, err
	}
	for _, t := range s.transfers {
		if _, err := s.app.ask(ctx, ask{Open: &t.Transfer}, s.sender); err != nil {
			return nil, s.because(err)
		}
		if sender {
			if _, err := s.sender.ask(ctx, ask{Open: &t.Transfer}, s.app); err != nil {
				return nil, s.because(err)
			}
		}
	}
	return s, nil
}

// startSender starts the sender at the host's end. It may do nothing in particular.
func (s *Session) startSender(ctx context.Context, lab *netns.Lab, setup Setup) (err error) {
	o := processOptions{
		Link: s.board.path(), CPU: setup.SenderCPU,
		Local: netip.AddrPortFrom(lab.Host.Addr.Addr(), RequestPort),
	}
	if s.process, err = rtt.Start(SenderCommand, o, rtt.ProcessOptions{NS: lab.Host.NS, User: rtt.Nobody}); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, s.process.End)
	_, err = bufio.NewReader(s.process.Stdout).ReadString('\n')
	if !stop() {
		return ctx.Err()
	}
	if err != nil {
		err = s.process.Stop(err)
		s.process = nil // Close has nothing to add
		return fmt.Errorf("start the sender: %w", err)
	}
	s.sender, err = s.board.accept("sender")
	return err
}

// startApplication starts the NIC with a context for each transfer, and the application.
func (s *Session) startApplication(ctx context.Context, lab *netns.Lab, setup Setup, peer netip.AddrPort) error {
	memory := control.Size(1 << 30)
	for _, t := range s.transfers {
		memory += control.Size(t.window())
	}
	cfg := attached.Config{
		Interface: daemon.Interface{HPUs: setup.HPUs, Wait: setup.Wait, CPUs: setup.NICCPUs, Workers: min(len(setup.NICCPUs), setup.HPUs)},
		Limits:    daemon.Limits{Window: memory, Memory: memory},
		Context:   s.transfers[0].context(0, s.packet),
		Command:   AppCommand,
		Options:   processOptions{Link: s.board.path(), CPU: setup.AppCPU, Peer: peer},
	}
	// The application is born at the NIC's end, where its requests can leave.
	err := lab.NIC.NS.Do(func() (err error) {
		s.attached, err = attached.Start(ctx, lab, cfg)
		return err
	})
	if err != nil {
		return err
	}
	if s.app, err = s.board.accept("application"); err != nil {
		return err
	}
	if s.daemon, err = control.Dial(s.attached.Socket); err != nil {
		return err
	}
	for i, t := range s.transfers {
		if i > 0 {
			c := t.context(i, s.packet)
			c.Attach = &control.Attach{Users: []string{strconv.Itoa(rtt.Nobody)}}
			if _, err := s.daemon.Install(ctx, &c); err != nil {
				return err
			}
		}
		info, err := s.daemon.Context(ctx, contextName(i))
		if err != nil {
			return err
		}
		t.policy = info.Policy
		if t.Strategy == ddt.RWCP {
			t.Interval = int64(info.Sequence) // whole packets
		}
		t.placement = ddt.Memory{Type: info.Reserved["type"], Checkpoints: info.Reserved["checkpoints"], Segments: info.Reserved["segments"]}
	}
	return nil
}

// packetOf returns how many bytes of a message fit a packet of the lab.
func packetOf(lab *netns.Lab) int {
	const headers = 20 + 8 + slmp.HeaderLen
	return max(min(lab.MTU-headers, slmp.MaxPayload), 1)
}

// context is the execution context of a transfer. It is active when there are receives.
func (t *transfer) context(i, packet int) control.Context {
	c := control.Context{
		Name:     contextName(i),
		Handler:  "datatype",
		Params:   t.params(),
		Messages: max(t.Parallel, 16),
		Windows:  []control.Window{{Name: windowName, Size: control.Size(t.window())}},
		Queue:    &control.Queue{Events: 1 << bits.Len(uint(2*t.Parallel))},
		Activate: "manual",
	}
	c.Params["packet"] = packet
	if t.Strategy == Deposit {
		c.Handler, c.Params = "deposit", nil
	}
	return c
}

// Info tells about transfer i.
func (s *Session) Info(i int) Info {
	t := s.transfers[i]
	info := Info{Transfer: t.Transfer, Message: t.size, Span: t.hi - t.lo, Blocks: t.data.Blocks(), Placement: t.placement, Policy: t.policy}
	if t.Strategy == Deposit {
		info.Blocks = 1
	}
	return info
}

// Round has the sender send transfer i once. After an error, ctx's too, the session is
// good for Close only.
func (s *Session) Round(ctx context.Context, i int) (*Round, error) {
	o, err := s.round(ctx, roundAsk{Transfer: i})
	if err != nil {
		return nil, err
	}
	return &o.Round, nil
}

// Verify is Round, after which every byte of the window is compared with what must be
// there. What is wrong is an error that wraps ErrContents.
func (s *Session) Verify(ctx context.Context, i int) (*Round, error) {
	o, err := s.round(ctx, roundAsk{Transfer: i, Verify: true})
	if err != nil {
		return nil, err
	}
	return &o.Round, nil
}

// Compute has the application multiply matrices, with nothing else to do.
func (s *Session) Compute(ctx context.Context, g GEMMs) (time.Duration, error) {
	a, err := s.app.ask(ctx, ask{Compute: &g}, s.sender)
	if err != nil {
		return 0, s.because(err)
	}
	return time.Duration(a.Took), nil
}

// Overlap is Round while the application multiplies matrices.
func (s *Session) Overlap(ctx context.Context, i int, g GEMMs) (*Overlapped, error) {
	return s.round(ctx, roundAsk{Transfer: i, GEMMs: &g})
}

func (s *Session) round(ctx context.Context, q roundAsk) (*Overlapped, error) {
	before, err := s.look(ctx, q.Transfer, q.Verify)
	if err != nil {
		return nil, err
	}
	cpu, err := s.cpu()
	if err != nil {
		return nil, err
	}
	a, err := s.app.ask(ctx, ask{Round: &q}, s.sender)
	if err != nil {
		return nil, s.because(err)
	}
	o := a.Round
	now, err := s.cpu()
	if err != nil {
		return nil, err
	}
	o.CPU = CPU{now.NIC - cpu.NIC, now.App - cpu.App, now.Sender - cpu.Sender, now.Machine - cpu.Machine}
	after, err := s.look(ctx, q.Transfer, false)
	if err != nil {
		return nil, err
	}
	o.Segments = after.sent.Segments - before.sent.Segments
	o.Retransmitted = after.sent.Retransmitted - before.sent.Retransmitted
	// HPUs count when they have acknowledged, so they may be behind.
	for limit := time.Now().Add(time.Second); s.transfers[q.Transfer].Strategy != Deposit &&
		after.packets-before.packets < o.Segments && time.Now().Before(limit); {
		if after, err = s.look(ctx, q.Transfer, false); err != nil {
			return nil, err
		}
	}
	o.Packets, o.Copies = after.packets-before.packets, after.copies-before.copies
	o.Duplicates = after.duplicates - before.duplicates
	return o, nil
}

// counts are what others than the application know.
type counts struct {
	sent            sentSoFar
	packets, copies uint64
	duplicates      uint64
}

// look has the sender get ready for a transfer, of messages that differ or not, and asks
// who counts. All that was sent is acknowledged then.
func (s *Session) look(ctx context.Context, i int, differ bool) (c counts, err error) {
	if _, err := s.sender.ask(ctx, ask{Transfer: &i, Differ: differ}, s.app); err != nil {
		return c, s.because(err)
	}
	a, err := s.sender.ask(ctx, ask{Sent: true}, s.app)
	if err != nil {
		return c, s.because(err)
	}
	c.sent = *a.Sent
	info, err := s.daemon.Context(ctx, contextName(i))
	if err != nil {
		return c, err
	}
	if info.MessageStats != nil {
		c.duplicates = info.MessageStats.Duplicates
	}
	if s.transfers[i].Strategy == Deposit {
		return c, nil // whose handlers do not count
	}
	user := &info.HandlerStats.User
	c.packets, c.copies = user[handlers.DatatypeBytes].Count, user[handlers.DatatypeCopies].Sum
	return c, nil
}

// cpu returns what all have used so far.
func (s *Session) cpu() (c CPU, err error) {
	for _, p := range []struct {
		pid  int
		used *time.Duration
	}{{os.Getpid(), &c.NIC}, {s.attached.Pid(), &c.App}, {s.process.Pid(), &c.Sender}} {
		var ts unix.Timespec
		// The clock of another process's CPU time: clock_getcpuclockid(3).
		if err := unix.ClockGettime(int32(^p.pid<<3|2), &ts); err != nil {
			return c, fmt.Errorf("CPU time of process %d: %w", p.pid, err)
		}
		*p.used = time.Duration(ts.Nano())
	}
	c.Machine, err = BusyCPUs()
	return c, err
}

// BusyCPUs returns the time in which CPUs of this machine were not idle, of all processes
// and interrupts, since it was booted. It comes in steps of 10 ms for each CPU.
func BusyCPUs() (time.Duration, error) {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(string(stat), "\n")
	var user, nice, system, idle, iowait, irq, softirq, steal int64
	if _, err := fmt.Sscanf(line, "cpu %d %d %d %d %d %d %d %d", &user, &nice, &system, &idle, &iowait, &irq, &softirq, &steal); err != nil {
		return 0, fmt.Errorf("/proc/stat: %q: %w", line, err)
	}
	const tick = 10 * time.Millisecond // USER_HZ is 100 wherever Go runs
	return time.Duration(user+nice+system+irq+softirq) * tick, nil
}

// because finds out more about the end of a process.
func (s *Session) because(err error) error {
	if !errors.Is(err, errGone) {
		return err
	}
	for _, p := range []struct {
		link *link
		stop func() error
	}{{s.app, s.stopApplication}, {s.sender, s.stopSender}} {
		if p.link == nil {
			continue
		}
		select {
		case <-p.link.over:
			if why := p.stop(); why != nil {
				return fmt.Errorf("%s: %w", p.link.name, why)
			}
		default:
		}
	}
	return err
}

func (s *Session) stopApplication() (err error) {
	if s.attached != nil {
		err = s.attached.Close()
		s.attached = nil
	}
	return err
}

func (s *Session) stopSender() (err error) {
	if s.process != nil {
		err = s.process.Stop(nil)
		s.process = nil
	}
	return err
}

// Close ends all of it, and leaves the interface as it was.
func (s *Session) Close() (err error) {
	// First who would go on sending.
	for _, l := range []*link{s.sender, s.app} {
		if l != nil {
			l.close()
		}
	}
	err = errors.Join(s.stopSender(), s.stopApplication())
	if s.daemon != nil {
		s.daemon.Close()
	}
	if s.board != nil {
		err = errors.Join(err, s.board.close())
	}
	return err
}

// Info is what is known of a Transfer before it runs.
type Info struct {
	Transfer
	Message   int64      // bytes of a message's stream
	Span      int64      // bytes of the window from the first that a message touches to the last
	Blocks    int64      // pieces in a row that a message is placed in
	Placement ddt.Memory // what the strategy takes of the NIC's memory
	Policy    string     // that packets are scheduled by; empty: message
}

// A Round is what one took.
type Round struct {
	Bytes    int64 // of all streams
	Messages int

	// From the request to the sender, ready-to-send, on.
	Took time.Duration // until the application knew that everything was there
	NIC  time.Duration // until the last message was over, by the NIC's timestamp

	Segments      uint64 // sent, each counted once
	Retransmitted uint64 // sent again
	Duplicates    uint64 // that the NIC had already: of these, those that were not lost
	// Of handlers, 0 with Deposit, which has none that count.
	Packets uint64 // that they have placed
	Copies  uint64 // pieces in a row that they were placed in

	CPU CPU
}

// CPU is the time that processes have used during a round, in user and system mode.
// Softirqs run on the account of who sends.
type CPU struct {
	NIC, App, Sender time.Duration
	// Machine is of all processes and interrupts there are, but in steps of 10 ms for
	// each CPU: for long rounds, or the sum of many.
	Machine time.Duration
}

// Sum returns the time of the three processes.
func (c CPU) Sum() time.Duration { return c.NIC + c.App + c.Sender }

// GEMMs are double-precision products of square matrices, one after the other.
type GEMMs struct {
	N     int // rows and columns
	Count int
}

// Overlapped is a round with computation beside it. Times begin with the request to the
// sender.
type Overlapped struct {
	Round
	Compute time.Duration // all GEMMs together, without looking for messages between them
	Both    time.Duration // until all GEMMs were done and all messages known of

	// What FPsPIN measures: everything up to the look, after a GEMM, that found all
	// messages there.
	Hit           bool          // it was before the last GEMM was over
	Multiplied    int           // GEMMs until then
	ComputeBefore time.Duration // of these
}

// Ratio is FPsPIN's overlap ratio: the time of GEMMs by the time to detection.
func (o *Overlapped) Ratio() float64 { return o.ComputeBefore.Seconds() / o.Took.Seconds() }
