// SPDX-License-Identifier: Apache-2.0

package datatypes

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/client"
	"github.com/xspin/xspin/demos/datatypes/gemm"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/spin"
)

// Hidden commands: the application and the sender. The binary hands them to Main.
const (
	AppCommand    = "_datatypes-app"
	SenderCommand = "_datatypes-sender"
)

// Main runs a hidden command: args as in os.Args[1:]. ok tells whether args are one.
func Main(args []string) (ok bool, err error) {
	if len(args) == 0 || args[0] != AppCommand && args[0] != SenderCommand {
		return false, nil
	}
	var o processOptions
	if len(args) != 2 || json.Unmarshal([]byte(args[1]), &o) != nil {
		return true, fmt.Errorf("%s: this command is for xspin's own use", args[0])
	}
	if err := o.pin(); err != nil {
		return true, err
	}
	t, err := dial(o.Link)
	if err != nil {
		return true, err
	}
	if args[0] == SenderCommand {
		return true, runSender(t, o.Local)
	}
	return true, runApplication(t, o.Peer)
}

type processOptions struct {
	Link  string         `json:"link"`
	CPU   int            `json:"cpu"`   // -1 for any
	Peer  netip.AddrPort `json:"peer"`  // of the application: where the sender is asked
	Local netip.AddrPort `json:"local"` // of the sender: where it is asked
}

// pin lets one thread run Go at a time, and pins all to a CPU.
func (o processOptions) pin() error {
	if o.CPU < 0 {
		return nil
	}
	runtime.GOMAXPROCS(1)
	var one unix.CPUSet
	one.Set(o.CPU)
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err
	}
	// New threads inherit the CPUs of the thread that creates them.
	for _, t := range tasks {
		id, err := strconv.Atoi(t.Name())
		if err == nil {
			err = unix.SchedSetaffinity(id, &one)
		}
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("CPU %d: %w", o.CPU, err)
		}
	}
	return nil
}

// An application has a window for each transfer, and posts receives in them.
type application struct {
	udp     *net.UDPConn // to the sender; nil: none is known
	rts     request
	windows []*window
	active  *window // whose context is armed
	gemm    *gemm.GEMM
	n       int // of gemm
}

// A window is a transfer as the application has it.
type window struct {
	*layout
	app    *client.App
	memory []byte
}

// runApplication is the process.
func runApplication(t *terminal, peer netip.AddrPort) (err error) {
	runtime.GOMAXPROCS(1) // so that it computes on one CPU
	a := &application{rts: request{Run: rand.Uint64()}}
	if peer.IsValid() {
		if a.udp, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(peer)); err != nil {
			return err
		}
		defer a.udp.Close()
	}
	defer func() {
		for _, w := range a.windows {
			err = errors.Join(err, w.app.Close())
		}
	}()
	if _, err := fmt.Println("ready"); err != nil {
		return err
	}
	t.serve(func(ctx context.Context, q ask) answer {
		ans, err := a.do(ctx, q, t)
		if err != nil {
			return refused(err)
		}
		return ans
	})
	return nil
}

func (a *application) do(ctx context.Context, q ask, t *terminal) (answer, error) {
	switch {
	case q.Open != nil:
		return answer{}, a.open(ctx, *q.Open)
	case q.Round != nil:
		o, err := a.round(ctx, q.Round)
		return answer{Round: o}, err
	case q.Compute != nil:
		a.prepare(*q.Compute)
		begun := time.Now()
		for range q.Compute.Count {
			a.gemm.Run()
		}
		return answer{Took: int64(time.Since(begun))}, nil
	case q.Serve != nil:
		return answer{}, a.serve(ctx, q.Serve, t)
	}
	return answer{}, errors.New("not understood")
}

// open attaches to the context of another transfer.
func (a *application) open(ctx context.Context, t Transfer) error {
	l, err := newLayout(t)
	if err != nil {
		return err
	}
	app, err := client.Attach(ctx, contextName(len(a.windows)), client.Options{})
	if err != nil {
		return err
	}
	w := &window{layout: l, app: app}
	a.windows = append(a.windows, w)
	if w.memory = app.Window(windowName).Bytes(); int64(len(w.memory)) < l.window() {
		return fmt.Errorf("window of %d bytes: want %d", len(w.memory), l.window())
	}
	w.memory = w.memory[:l.window()]
	w.clear(w.memory, 0, w.window()) // also touches it, so that the first round is like the others
	return nil
}

// arm activates the context of a window, and deactivates the others.
func (a *application) arm(ctx context.Context, w *window) error {
	if a.active == w {
		return nil
	}
	if a.active != nil {
		if err := a.active.app.Deactivate(ctx); err != nil {
			return err
		}
		a.active = nil
	}
	if err := w.app.Activate(ctx); err != nil {
		return err
	}
	a.active = w
	return nil
}

// prepare makes the matrices, and computes once.
func (a *application) prepare(g GEMMs) {
	if a.n != g.N {
		a.gemm, a.n = gemm.New(g.N), g.N
	}
	a.gemm.Run()
}

// A wanted is the progress of a round.
type wanted struct {
	*window
	left int   // messages
	last int64 // when the last of those received ended, CLOCK_MONOTONIC in ns
	seen []bool
	sent []uint32 // the number of the message in each place
}

// again is how long to wait before asking the sender again. Our sender recognises a
// repeated request.
const again = 200 * time.Millisecond

// round is a round, with computation or without.
func (a *application) round(ctx context.Context, q *roundAsk) (*Overlapped, error) {
	w := a.windows[q.Transfer]
	if err := a.arm(ctx, w); err != nil {
		return nil, err
	}
	for i := range w.Parallel {
		if err := w.app.Post(ctx, w.receive(i)); err != nil {
			return nil, err
		}
	}
	var g GEMMs
	if q.GEMMs != nil {
		g = *q.GEMMs
		a.prepare(g)
	}
	if q.Verify {
		w.clear(w.memory, 0, w.window())
	}
	a.rts.Parallel, a.rts.Elements = uint32(w.Parallel), uint32(w.Count)
	a.rts.Run++

	o := &Overlapped{Round: Round{Bytes: w.size * int64(w.Parallel), Messages: w.Parallel}}
	left := &wanted{window: w, left: w.Parallel, seen: make([]bool, w.Parallel), sent: make([]uint32, w.Parallel)}
	begun, zero := time.Now(), monotonic()
	if err := a.request(); err != nil {
		return nil, err
	}
	asked := begun
	for i := range g.Count {
		start := time.Now()
		a.gemm.Run()
		now := time.Now()
		o.Compute += now.Sub(start)
		if o.Took > 0 {
			continue
		}
		if err := left.take(); err != nil {
			return nil, err
		}
		switch {
		case left.left == 0:
			o.Took, o.Multiplied, o.ComputeBefore, o.Hit = time.Since(begun), i+1, o.Compute, true
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case now.Sub(asked) >= again:
			if err := a.request(); err != nil {
				return nil, err
			}
			asked = now
		}
	}
	if o.Took == 0 {
		if err := a.wait(ctx, left); err != nil {
			return nil, err
		}
		o.Took, o.Multiplied, o.ComputeBefore = time.Since(begun), g.Count, o.Compute
	}
	o.Both = time.Since(begun)
	o.NIC = time.Duration(left.last - zero)
	if q.Verify {
		return o, left.compare()
	}
	return o, nil
}

// compare checks the messages of a round that has ended. The NIC decides which message is
// in which place; their numbers are in the order in which the sender made them.
func (w *wanted) compare() error {
	first := w.sent[0]
	for _, n := range w.sent {
		if int32(n-first) < 0 {
			first = n
		}
	}
	for place, n := range w.sent {
		message := n - first
		if message >= uint32(w.Parallel) {
			return fmt.Errorf("message %d after %d, in a round of %d", n, first, w.Parallel)
		}
		if err := w.window.compare(w.memory, place, int(message)%w.contents()); err != nil {
			return fmt.Errorf("message %d of the round: %w", message, err)
		}
	}
	return nil
}

// wait sleeps until all messages are there.
func (a *application) wait(ctx context.Context, w *wanted) error {
	for {
		if err := w.take(); err != nil || w.left == 0 {
			return err
		}
		soon, cancel := context.WithTimeout(ctx, again)
		err := w.app.Wait(soon)
		cancel()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, context.DeadlineExceeded):
			if err := a.request(); err != nil {
				return err
			}
		case err != nil:
			return err
		}
	}
}

// take takes the events that are there.
func (w *wanted) take() error {
	var e hostq.Event
	for w.app.Event(&e) {
		switch known, err := w.judge(&e); {
		case err != nil:
			return err
		case !known:
		case w.seen[e.User]:
			return fmt.Errorf("two messages in place %d", e.User)
		default:
			w.seen[e.User], w.sent[e.User] = true, e.Number
			w.left--
			w.last = max(w.last, e.Time)
		}
	}
	return nil
}

// judge reports whether an event is the end of a complete message. It returns an error if
// a message will not be complete.
func (w *window) judge(e *hostq.Event) (known bool, err error) {
	switch e.Kind {
	case hostq.ContextFault:
		return false, fmt.Errorf("the NIC has stopped the context: %s", strings.TrimSpace(e.Text))
	case hostq.Overflow:
		return false, fmt.Errorf("%d events were lost", e.Lost)
	case hostq.MessageFailed:
		return false, fmt.Errorf("message %d: %s", e.Number, strings.TrimSpace(e.Text))
	case hostq.MessageEnded:
	default:
		return false, nil // an event of a later version
	}
	switch {
	case spin.Cause(e.Cause) != spin.Complete:
		return false, fmt.Errorf("message %d: %v: %s", e.Number, spin.Cause(e.Cause), spin.Lack(e.Missing, e.Length))
	case e.User >= uint64(w.Parallel):
		return false, fmt.Errorf("event of a message in place %d: want a place below %d", e.User, w.Parallel)
	case e.Length != uint64(w.size):
		return false, fmt.Errorf("message %d has %d bytes, and the type %d", e.Number, e.Length, w.size)
	}
	return true, nil
}

// monotonic is the clock of events.
func monotonic() int64 {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // cannot fail
	return ts.Nano()
}

// request asks for the messages of a round. Repeating the request does no harm.
func (a *application) request() error {
	_, err := a.udp.Write(a.rts.append(nil))
	if errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("nobody at %v takes requests for messages", a.udp.RemoteAddr())
	}
	return err
}

// A request is FPsPIN's ready-to-send (RTS) with a number after it, by which the sender
// recognises it: a datagram that is lost is sent again.
type request struct {
	Parallel uint32 // messages
	Elements uint32 // of the type in each
	Run      uint64 // the number of the round. FPsPIN has none: each of its requests is a new round
}

// RequestPort is the UDP port on which senders are asked.
const RequestPort = 9331

const (
	requestLen = 16
	fpspinLen  = 8
)

func (r request) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, r.Parallel)
	b = binary.LittleEndian.AppendUint32(b, r.Elements)
	return binary.LittleEndian.AppendUint64(b, r.Run)
}

// parseRequest parses a request. numbered says whether it has a number.
func parseRequest(b []byte) (r request, numbered bool, err error) {
	if len(b) != requestLen && len(b) != fpspinLen {
		return r, false, fmt.Errorf("request of %d bytes: want %d, or %d with a number", len(b), fpspinLen, requestLen)
	}
	r.Parallel, r.Elements = binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:])
	if r.Parallel < 1 || r.Parallel > MaxParallel || r.Elements < 1 {
		return r, false, fmt.Errorf("request for %d messages of %d elements: want 1 to %d, of at least 1", r.Parallel, r.Elements, MaxParallel)
	}
	if numbered = len(b) == requestLen; numbered {
		r.Run = binary.LittleEndian.Uint64(b[8:])
	}
	return r, numbered, nil
}
