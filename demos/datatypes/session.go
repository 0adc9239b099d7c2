// SPDX-License-Identifier: Apache-2.0

// Package datatypes is the third demo: handlers scatter messages to where an MPI datatype
// says, while the application computes.
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

// Deposit is a strategy in addition to those of ddt, without a datatype: the handler set
// "deposit" places the stream contiguously. Datatypes are compared with it.
const Deposit = "deposit"

// A Transfer is what a round moves: messages of one type, each into a place of its own.
type Transfer struct {
	Name     string // for the user. Defaults to Type
	Type     string // as ddt.Resolve takes it
	Count    int64  // elements of it in a message. Defaults to what ddt.Resolve says
	Parallel int    // messages of a round, all in flight at once
	Strategy string // one of ddt.Strategies, or Deposit
	Interval int64  // bytes of the stream between checkpoints; 0: chosen by the model
}

// modelled reports whether the model chooses the interval.
func (t *Transfer) modelled() bool {
	return t.Interval == 0 && (t.Strategy == ddt.ROCP || t.Strategy == ddt.RWCP)
}

// A Setup says how and on which CPUs a session runs.
type Setup struct {
	HPUs      int
	Wait      string // of the HPUs: adaptive, sleep or spin
	NICCPUs   []int  // for the threads that serve the HPUs, empty for any
	AppCPU    int    // for the application, -1 for any
	SenderCPU int    // -1 for any
}

// A Session is a NIC in this process, an application that is attached to it, and a sender
// at the other end, each in a process of its own. Its transfers take turns: each has an
// execution context, and one of them is active at a time. It is not safe for concurrent
// use.
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

// transfer is a Transfer as the session has it.
type transfer struct {
	*layout
	placement ddt.Memory
	policy    string // that packets are scheduled by; empty: message
}

const windowName = "in"

func contextName(i int) string { return "datatypes-" + strconv.Itoa(i) }

// Open starts a session on a lab. Nothing else may use the lab's ends.
func Open(ctx context.Context, lab *netns.Lab, setup Setup, transfers ...Transfer) (_ *Session, err error) {
	return open(ctx, lab, setup, true, netip.AddrPortFrom(lab.Host.Addr.Addr(), RequestPort), transfers...)
}

// open is Open with a sender or without. It asks the peer, if any, for messages.
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

// startSender starts the sender at the host's end, without privileges.
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
		s.process = nil // stopped; Close must not report its error again
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
	// The application starts at the NIC's end, from where it can reach the sender.
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

// Info returns what is known of transfer i before it runs.
func (s *Session) Info(i int) Info {
	t := s.transfers[i]
	info := Info{Transfer: t.Transfer, Message: t.size, Span: t.hi - t.lo, Blocks: t.data.Blocks(), Placement: t.placement, Policy: t.policy}
	if t.Strategy == Deposit {
		info.Blocks = 1
	}
	return info
}

// Round has the sender send transfer i once. After an error, including ctx's, the session
// can only be closed.
func (s *Session) Round(ctx context.Context, i int) (*Round, error) {
	o, err := s.round(ctx, roundAsk{Transfer: i})
	if err != nil {
		return nil, err
	}
	return &o.Round, nil
}

// Verify is Round, and then compares every byte of the window with what must be there. If
// any differs, the error wraps ErrContents.
func (s *Session) Verify(ctx context.Context, i int) (*Round, error) {
	o, err := s.round(ctx, roundAsk{Transfer: i, Verify: true})
	if err != nil {
		return nil, err
	}
	return &o.Round, nil
}

// Compute has the application multiply matrices, and do nothing else.
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
	// HPUs count after they have acknowledged, so counters may lag.
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

// counts are the counters of the sender and the NIC.
type counts struct {
	sent            sentSoFar
	packets, copies uint64
	duplicates      uint64
}

// look prepares the sender for a transfer, with messages that differ or not, and reads the
// counters. All that was sent before has been acknowledged then.
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

// cpu returns the CPU time used so far.
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

// BusyCPUs returns the time since boot in which CPUs of this machine were not idle, for
// all processes and interrupts. It has steps of 10 ms for each CPU.
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

// because adds to an error why a process has ended, if that is the reason.
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

// Close ends the session, and leaves the interface as it was.
func (s *Session) Close() (err error) {
	// The sender first, or it would continue to send.
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
	Blocks    int64      // contiguous pieces that a message is placed in
	Placement ddt.Memory // NIC memory that the strategy uses
	Policy    string     // that packets are scheduled by; empty: message
}

// A Round is what a round took.
type Round struct {
	Bytes    int64 // of all streams
	Messages int

	// Since the request to the sender.
	Took time.Duration // until the application knew that everything was there
	NIC  time.Duration // until the last message ended, by the NIC's timestamp

	Segments      uint64 // sent, each counted once
	Retransmitted uint64 // sent again
	Duplicates    uint64 // of these, those that the NIC had already received
	// Counted by handlers; 0 with Deposit, whose handlers do not count.
	Packets uint64 // placed
	Copies  uint64 // contiguous pieces that they were placed in

	CPU CPU
}

// CPU is the time that processes used during a round, in user and system mode. Softirqs
// count for the process that sends.
type CPU struct {
	NIC, App, Sender time.Duration
	// Machine is the time of all processes and interrupts, but in steps of 10 ms for
	// each CPU: use it for long rounds, or the sum of many.
	Machine time.Duration
}

// Sum returns the time of the three processes.
func (c CPU) Sum() time.Duration { return c.NIC + c.App + c.Sender }

// GEMMs are double-precision products of square matrices, one after the other.
type GEMMs struct {
	N     int // rows and columns
	Count int
}

// Overlapped is a round during which the application computes. Times start with the
// request to the sender.
type Overlapped struct {
	Round
	Compute time.Duration // all GEMMs together, without looking for messages between them
	Both    time.Duration // until all GEMMs were done and all messages known of

	// What FPsPIN measures: everything up to the look, after a GEMM, that found all
	// messages there.
	Hit           bool          // the look was before the last GEMM ended
	Multiplied    int           // GEMMs until then
	ComputeBefore time.Duration // of these
}

// Ratio is FPsPIN's overlap ratio: the time of GEMMs divided by the time to detection.
func (o *Overlapped) Ratio() float64 { return o.ComputeBefore.Seconds() / o.Took.Seconds() }
