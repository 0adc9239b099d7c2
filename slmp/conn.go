// SPDX-License-Identifier: Apache-2.0

package slmp

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/internal/clock"
)

var (
	// ErrRefused is returned, wrapped, when the peer's host answers that no
	// program receives on the port. That is Linux, to which a NIC leaves what it has
	// no context for, and what is too long for handlers in eBPF.
	ErrRefused = errors.New("nobody listens")
	// ErrPathMTU is returned, wrapped, by messages under way whose segments no
	// longer fit the path. Sent again they go in smaller ones.
	ErrPathMTU = errors.New("segments no longer fit the path")
)

// Config is how a connection sends. The zero value is good: every segment
// acknowledged, the window found by itself, segments as the path's MTU allows.
type Config struct {
	Mode    Mode
	Window  int           // segments in flight per message, 0 for auto
	Gap     time.Duration // least time between two segments
	Payload int           // bytes per segment, 0 for what the path's MTU allows
	Align   int           // Payload is rounded down to a multiple of this, 0 and 1 for as it is
	Plain   bool          // ask for one acknowledgement per segment, as FPsPIN does

	// See SenderConfig for these. Zero fields take its defaults.
	Retries        int
	Patience       time.Duration
	MinRTO, MaxRTO time.Duration

	Buffer  int            // bytes kept of a message that cannot be read again, 0 for 4 MiB
	Offload Offload        // where to start; the connection falls back by itself
	Local   netip.AddrPort // where to send from, zero for any
}

func (c *Conn) senderConfig() SenderConfig {
	return SenderConfig{
		Mode: c.cfg.Mode, Payload: c.payload, Window: c.cfg.Window, Gap: c.cfg.Gap, Plain: c.cfg.Plain,
		Retries: c.cfg.Retries, Patience: c.cfg.Patience, MinRTO: c.cfg.MinRTO, MaxRTO: c.cfg.MaxRTO,
	}
}

const (
	defaultBuffer = 4 << 20
	minBuffer     = 256 << 10 // several segments, however long

	// maxSpin is how long the loop looks for acknowledgements before it sleeps:
	// about what a sleep and a wakeup cost.
	maxSpin = 50 * time.Microsecond
	// minSpin is where spinning restarts after it was given up.
	minSpin = int64(2 * time.Microsecond)
	// timerSlack is how late the kernel wakes a thread that waits for a time
	// (prctl PR_SET_TIMERSLACK). The rest is spun.
	timerSlack = 60 * time.Microsecond
	// minNap is how long to wait when the device's queue is full, at first: poll
	// tells of room in the socket only. maxNap is the longest.
	minNap = 100 * time.Microsecond
	maxNap = 5 * time.Millisecond
	// fullLimit is for how long a queue that takes nothing is a full one: some frames
	// leave within it even at 1 Mbit/s. After that the device loses what it is given.
	fullLimit = 20 * time.Millisecond
	// refusedLimit times in a row, refusedGap apart, end the messages of a peer that has answered
	// before: one may be a stray, or a receiver that is starting again, and many messages
	// are refused at once.
	refusedLimit = 3
	refusedGap   = 50 * time.Millisecond
)

// Conn sends messages to one peer over one UDP socket. All methods may be called
// at the same time from any goroutine.
//
// One goroutine, the loop, owns the socket, the Sender and all messages between
// their submission and their end. Others hand messages over in inbox, under mu,
// and then raise attention; the loop takes them all at once. The bytes of a
// message are the loop's to read until it ends; those of a stream travel as
// described there. Nothing is exchanged per segment.
type Conn struct {
	cfg  Config
	sock *socket
	wake int // eventfd; written, under mu, to end a sleep
	over chan struct{}

	attention atomic.Bool // something below, or in a stream, is for the loop
	asleep    atomic.Bool // the loop is in poll, or about to be

	mu     sync.Mutex
	inbox  []*message
	cancel []*message
	asks   []chan<- ConnStats
	spare  []*message // posted messages that are over, to be used again
	closed bool       // by Close; nothing is accepted any more
	ended  bool       // wake is closed

	// All below is the loop's.
	sender    *Sender
	nextID    uint32
	spools    []*message // open, from a stream
	watched   []*message // open, with somebody who wants to know how far they are
	taken     []*message
	gone      []*message
	outs      [txSegments]Outbound
	scratch   []byte
	payload   int
	alone     bool        // the process has one CPU
	spin      int64       // ns to look for acknowledgements before sleeping, found by itself
	leaving   []*Outgoing // unacknowledged, and complete when what is staged is sent
	nap       int64       // when to try again after ENOBUFS, 0 for now
	doze      int64       // ns that the next nap takes
	full      int64       // since when the device has taken nothing, 0 if it has
	blocked   bool        // until there is room in the socket
	blockedAt int64       // since when
	heard     int64       // when the last acknowledgement came
	refused   int         // ICMP port unreachable since the last acknowledgement, refusedGap apart
	refusedAt int64       // when the last of these came
	passing   unix.Errno  // the last error that was no reason to stop
	stats     ConnStats
	pollFds   [2]unix.PollFd
	timeout   unix.Timespec
}

// ConnStats is what a connection has done so far. SenderStats begins again when
// the path's MTU becomes smaller.
type ConnStats struct {
	SenderStats
	Payload     int     // bytes per segment
	Offload     Offload // in use
	SystemCalls uint64  // that sent something
	Sleeps      uint64
}

// Options are for one message.
type Options struct {
	// Progress is called from time to time while the message is on its way, and
	// once when it is over, by the goroutine that called Send.
	Progress func(Progress)
}

// Progress is how far a message is.
type Progress struct {
	Bytes         uint64 // acknowledged; sent, if the mode has not all acknowledged
	Total         uint64 // 0 as long as the end of a stream is not known
	Segments      uint64 // sent, each counted once
	Retransmitted uint64
}

// Result is what became of a message.
type Result struct {
	ID            uint32
	Bytes         uint64        // as in Progress, in the end
	Segments      uint64        // sent, each counted once
	Retransmitted uint64        // segments sent again
	Duration      time.Duration // from the call to the acknowledgement of the last byte
	RTT           RTT           // of the connection
}

// RTT is the time from a segment to its acknowledgement, which includes the
// handlers. 0 as long as none was measured.
type RTT struct{ Smoothed, Variation, Min time.Duration }

// progressEvery is how often Progress is called.
const progressEvery = 100 * time.Millisecond

// message is one that is being sent. The goroutine that submitted it has it
// back when done is closed, or posted called.
type message struct {
	source
	size   uint64
	out    *Outgoing
	begun  int64
	watch  bool
	abort  error // why it was cancelled; under Conn.mu until the loop takes it
	posted func(error)
	done   chan struct{}

	acked, segments, again, total atomic.Uint64 // what Progress tells
	result                        Result
	err                           error
}

// Dial opens a connection to address, "host:port" or "host" for port 9330.
// Nothing is sent yet: whether there is a peer shows with the first message.
// The context bounds the resolution of the name only.
func Dial(ctx context.Context, address string, cfg Config) (*Conn, error) {
	c, err := dial(ctx, address, cfg)
	if err != nil {
		return nil, fmt.Errorf("SLMP to %s: %w", address, err)
	}
	go c.run()
	return c, nil
}

func dial(ctx context.Context, address string, cfg Config) (c *Conn, err error) {
	switch {
	case cfg.Align < 0:
		return nil, fmt.Errorf("align %d: want 0 or more bytes", cfg.Align)
	case cfg.Buffer < 0:
		return nil, fmt.Errorf("buffer %d: want 0 or more bytes", cfg.Buffer)
	case cfg.Offload < OffloadSegments || cfg.Offload > OffloadNone:
		return nil, fmt.Errorf("offload %d: want %d to %d", cfg.Offload, OffloadSegments, OffloadNone)
	}
	if cfg.Buffer == 0 {
		cfg.Buffer = defaultBuffer
	}
	cfg.Buffer = max(cfg.Buffer, minBuffer)
	c = &Conn{cfg: cfg, over: make(chan struct{}), spin: int64(maxSpin), alone: runtime.GOMAXPROCS(0) == 1}
	sock, err := dialSocket(ctx, address, cfg.Local, cfg.Offload)
	if err != nil {
		return nil, err
	}
	c.sock = sock
	c.nextID = firstID(sock.local, sock.remote, time.Now())
	defer func() {
		if err != nil {
			sock.close()
		}
	}()
	if err := c.measure(); err != nil {
		return nil, err
	}
	if c.sender, err = NewSender(c.senderConfig()); err != nil {
		return nil, err
	}
	if c.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	c.pollFds[0].Fd, c.pollFds[1].Fd = int32(c.sock.fd), int32(c.wake)
	c.pollFds[1].Events = unix.POLLIN
	return c, nil
}

// firstID returns the id of a connection's first message. A later connection from the same
// port, of this program or another, must not use ids that the peer may remember. So ids
// follow the clock, at one in 256 ns, which is more than messages: those of the later
// connection lie beyond. Other hosts cannot tell where: that depends on a number of the
// machine's own.
func firstID(local, remote netip.AddrPort, now time.Time) uint32 {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return rand.Uint32()
	}
	sum := sha256.Sum256(fmt.Appendf(boot, "%v %v", local, remote))
	return binary.BigEndian.Uint32(sum[:]) + uint32(now.UnixNano()>>8)
}

// LocalAddr returns the address and port that the connection sends from.
func (c *Conn) LocalAddr() netip.AddrPort { return c.sock.local }

// RemoteAddr returns the peer's address and port.
func (c *Conn) RemoteAddr() netip.AddrPort { return c.sock.remote }

// Send sends what r has, to its end, as one message, and returns when the peer
// has acknowledged all of it, or in mode Unacknowledged when it is sent. The
// Result says how far it came, also with an error.
//
// A file, and any r that is an io.ReaderAt, an io.Seeker and knows its size, is
// read where it stands, and again for retransmissions. Its position does not
// move, so several calls can send the same file at the same time. The
// connection's goroutine reads it, and other messages wait for a slow one.
// Of anything else a piece is kept in memory until it is acknowledged
// (Config.Buffer), and if Read is blocked when ctx ends, Send returns and r is in
// use until Read does.
//
// When ctx ends, the message does. The peer is not told; it forgets what it has
// after a while.
func (c *Conn) Send(ctx context.Context, r io.Reader, o Options) (Result, error) {
	src, size, known, err := newSource(r, c.cfg.Buffer)
	if err == nil && known && size > MaxMessage {
		err = fmt.Errorf("%w: %d bytes, at most %d", ErrTooLong, size, uint64(MaxMessage))
	}
	if err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return Result{}, c.explain(err)
	}
	m := &message{source: src, size: size}
	m.open(r)
	defer m.close() // the loop is done with it
	return c.send(ctx, m, r, o)
}

// SendBytes sends msg as one message. It is not copied: it must stay as it is
// until SendBytes returns.
func (c *Conn) SendBytes(ctx context.Context, msg []byte, o Options) (Result, error) {
	if err := checkLength(msg); err != nil {
		return Result{}, c.explain(err)
	}
	return c.send(ctx, &message{source: source{bytes: msg}, size: uint64(len(msg))}, nil, o)
}

// Post begins to send msg as one message and returns. It is for many small
// messages: it allocates nothing in the long run, and wakes nobody while others
// are on their way. When the message is over, done is called with nil, or with
// what went wrong. Until then msg must stay as it is. The connection's goroutine
// calls done, so it must be quick and must not wait for this connection; it may
// call Post. Post does not wait: how many messages are on their way at a time is
// for the caller to bound. After an error of Post itself done is not called; nil
// will do where nobody wants to know.
func (c *Conn) Post(msg []byte, done func(error)) error {
	if err := checkLength(msg); err != nil {
		return c.explain(err)
	}
	if done == nil {
		done = func(error) {}
	}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return c.explain(net.ErrClosed)
	}
	var m *message
	if n := len(c.spare); n > 0 {
		m, c.spare = c.spare[n-1], c.spare[:n-1]
	} else {
		m = new(message)
	}
	m.bytes, m.size, m.posted = msg, uint64(len(msg)), done
	c.inbox = append(c.inbox, m)
	c.mu.Unlock()
	c.notify()
	return nil
}

func checkLength(msg []byte) error {
	if uint64(len(msg)) > MaxMessage {
		return fmt.Errorf("%w: %d bytes, at most %d", ErrTooLong, len(msg), uint64(MaxMessage))
	}
	return nil
}

// Stats returns what the connection has done so far.
func (c *Conn) Stats() ConnStats {
	answer := make(chan ConnStats, 1)
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		<-c.over
		return c.stats
	}
	c.asks = append(c.asks, answer)
	c.mu.Unlock()
	c.notify()
	return <-answer
}

// Close ends the messages that are on their way with an error that wraps
// net.ErrClosed, and closes the socket.
func (c *Conn) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.notify()
	<-c.over
	return nil
}

// explain says whose error it is.
func (c *Conn) explain(err error) error {
	if m := (*MessageError)(nil); errors.As(err, &m) {
		return fmt.Errorf("to %s: %w", c.sock.remote, err)
	}
	return fmt.Errorf("SLMP to %s: %w", c.sock.remote, err)
}

// send submits m, whose stream, if it is one, comes from r, waits until it is over,
// and ends it when ctx does.
func (c *Conn) send(ctx context.Context, m *message, r io.Reader, o Options) (Result, error) {
	m.begun = clock.Monotonic()
	m.watch = o.Progress != nil
	m.total.Store(m.size)
	m.done = make(chan struct{})
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return Result{}, c.explain(net.ErrClosed)
	}
	c.inbox = append(c.inbox, m)
	c.mu.Unlock()
	c.notify()
	if m.spool != nil {
		go m.spool.fill(r, m.done, c.notify)
	}
	var tick <-chan time.Time
	if o.Progress != nil {
		t := time.NewTicker(progressEvery)
		defer t.Stop()
		tick = t.C
	}
	ended := ctx.Done()
	for {
		select {
		case <-m.done:
			if o.Progress != nil {
				o.Progress(m.progress())
			}
			return m.result, m.err
		case <-ended:
			ended = nil
			c.mu.Lock()
			m.abort = context.Cause(ctx)
			c.cancel = append(c.cancel, m)
			c.mu.Unlock()
			c.notify()
		case <-tick:
			o.Progress(m.progress())
		}
	}
}

func (m *message) progress() Progress {
	return Progress{Bytes: m.acked.Load(), Total: m.total.Load(), Segments: m.segments.Load(), Retransmitted: m.again.Load()}
}

// notify makes the loop look at what it was given. It sees attention before it
// sleeps, or is seen asleep.
func (c *Conn) notify() {
	if c.attention.Swap(true) || !c.asleep.Load() {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.ended {
		var one [8]byte
		binary.NativeEndian.PutUint64(one[:], 1)
		// Fails only when a wakeup is pending anyway.
		_, _ = unix.Write(c.wake, one[:])
	}
}
