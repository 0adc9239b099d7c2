// SPDX-License-Identifier: Apache-2.0

// Package rtt measures round trips of ICMP echo and UDP echo, and has the UDP echo
// server to compare with.
//
// What it measures should be the wire and the responder, not the Go runtime. So the
// loops run on a locked thread, make raw system calls and allocate nothing, and Ping
// and StartEcho run them in processes of their own, where no other goroutine and no
// garbage collection competes with them. A binary that calls these two must call Main
// with its arguments, for the hidden commands that they start.
package rtt

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/netns/testbed"
)

// Proto is how a ping travels.
type Proto string

const (
	ICMP Proto = "icmp" // echo request and reply on a raw socket
	UDP  Proto = "udp"  // a datagram to an echo service
)

// Wait is how a socket waits for the next packet.
type Wait string

const (
	Block Wait = "block" // sleeping in the kernel
	Spin  Wait = "spin"  // polling without sleeping
)

// Sizes of the payload in bytes: of the ICMP message after its 8-byte header,
// of the UDP datagram. The payload starts with a sequence number and the number of
// the run, 4 bytes each, and cannot be shorter. The upper limit is that of IPv4, but
// nothing is fragmented, so the MTU lowers it: to 1472 on Ethernet.
const (
	MinSize = 8
	MaxSize = 65535 - 20 - 8
)

// MaxCount bounds Count and Warmup, and so the memory for samples (8 bytes each).
const MaxCount = 10_000_000

// ErrOptions is returned, wrapped, for invalid options.
var ErrOptions = errors.New("invalid options")

// Options says what a Client sends and how it waits.
type Options struct {
	Proto   Proto          `json:"proto"`
	Remote  netip.AddrPort `json:"remote"`  // IPv4; the port is for UDP
	Size    int            `json:"size"`    // payload, bytes
	Count   int            `json:"count"`   // pings measured
	Warmup  int            `json:"warmup"`  // pings before those, not reported
	Timeout time.Duration  `json:"timeout"` // until a ping counts as lost; 0 is one second
	// Interval is the least time between two pings, which the client sleeps. With 0
	// the next ping follows the reply at once.
	Interval time.Duration `json:"interval"`
	Wait     Wait          `json:"wait"` // "" is Block
	CPU      int           `json:"cpu"`  // the only CPU the client runs on, -1 for any
}

func (o Options) withDefaults() Options {
	if o.Timeout == 0 {
		o.Timeout = time.Second
	}
	if o.Wait == "" {
		o.Wait = Block
	}
	return o
}

func (o Options) check() error {
	bad := func(format string, a ...any) error {
		return fmt.Errorf("%w: "+format, append([]any{ErrOptions}, a...)...)
	}
	switch {
	case o.Proto != ICMP && o.Proto != UDP:
		return bad("protocol %q: want icmp or udp", o.Proto)
	case !o.Remote.Addr().Is4():
		return bad("remote %v: want an IPv4 address", o.Remote)
	case o.Proto == UDP && o.Remote.Port() == 0:
		return bad("remote %v: want a port", o.Remote)
	case o.Size < MinSize || o.Size > MaxSize:
		return bad("size %d: want %d (sequence and run number) to %d bytes", o.Size, MinSize, MaxSize)
	case o.Count < 1 || o.Count > MaxCount:
		return bad("count %d: want 1 to %d", o.Count, MaxCount)
	case o.Warmup < 0 || o.Warmup > MaxCount:
		return bad("warm-up %d: want 0 to %d", o.Warmup, MaxCount)
	case o.Timeout < 0:
		return bad("timeout %v: want a positive duration", o.Timeout)
	case o.Interval < 0:
		return bad("interval %v: want 0 or more", o.Interval)
	}
	return checkServing(o.Wait, o.CPU)
}

func checkServing(w Wait, cpu int) error {
	if w != Block && w != Spin {
		return fmt.Errorf("%w: wait %q: want block or spin", ErrOptions, w)
	}
	if cpu < -1 {
		return fmt.Errorf("%w: CPU %d: want a CPU number, or -1 for any", ErrOptions, cpu)
	}
	return nil
}

// Result is what became of the pings: each was answered (and has a sample), lost
// or bad. A run cut short has sent fewer than asked for.
type Result struct {
	Samples []int64 `json:"samples_ns"` // round trips in sending order, ns
	Sent    int     `json:"sent"`
	Lost    int     `json:"lost"` // no reply in time, or an ICMP error for one
	Bad     int     `json:"bad"`  // a reply with wrong contents, length or checksum
	// Late counts replies to earlier pings, which were lost or answered before.
	Late int `json:"late"`
}

// Client sends pings one at a time and waits for the reply to each. It is not
// safe for concurrent use.
type Client struct {
	o       Options
	fd      int
	base    time.Time     // its monotonic reading is the zero of now
	id      uint32        // run number: tells our replies from other clients'
	tx      []byte        // the packet, from its ICMP header if it has one
	head    int           // bytes of tx before the payload
	pattern []byte        // contents of all payloads, see fill
	rx      []byte        // room for any IPv4 packet
	recvMax time.Duration // SO_RCVTIMEO as set
	stop    atomic.Bool
	late    int
	pause   unix.Timespec // not a local variable, which would escape at every sleep
}

// slice is the longest time spent in one system call, and so the longest until
// cancellation is noticed.
const slice = 100 * time.Millisecond

// Dial opens the socket, in the network namespace of the calling thread; the
// client may run on any other. ICMP needs CAP_NET_RAW.
func Dial(o Options) (_ *Client, err error) {
	o = o.withDefaults()
	if err := o.check(); err != nil {
		return nil, err
	}
	c := &Client{
		o:       o,
		base:    time.Now(),
		id:      rand.Uint32(),
		rx:      make([]byte, 1<<16),
		pattern: make([]byte, o.Size+shifts),
	}
	fill(c.pattern, c.id)

	typ, proto := unix.SOCK_DGRAM, unix.IPPROTO_UDP
	if o.Proto == ICMP {
		typ, proto, c.head = unix.SOCK_RAW, unix.IPPROTO_ICMP, icmpHeader
	}
	c.tx = make([]byte, c.head+o.Size)
	c.fd, err = unix.Socket(unix.AF_INET, typ|unix.SOCK_CLOEXEC, proto)
	if err != nil {
		if errors.Is(err, unix.EPERM) {
			return nil, fmt.Errorf("open %s socket: %w: run as root or with CAP_NET_RAW", o.Proto, err)
		}
		return nil, fmt.Errorf("open %s socket: %w", o.Proto, err)
	}
	defer func() {
		if err != nil {
			unix.Close(c.fd)
		}
	}()
	if o.Proto == ICMP {
		filter := ownReplies(uint16(c.id))
		if err := unix.SetsockoptSockFprog(c.fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}); err != nil {
			return nil, fmt.Errorf("filter ICMP packets: %w", err)
		}
		// Discard what came before the filter.
		for errno := unix.Errno(0); errno == 0; {
			_, errno = c.recv(unix.MSG_DONTWAIT)
		}
	}
	if err := unix.SetsockoptInt(c.fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO); err != nil {
		return nil, fmt.Errorf("forbid fragmentation: %w", err)
	}
	if err := unix.Connect(c.fd, &unix.SockaddrInet4{Addr: o.Remote.Addr().As4(), Port: int(o.Remote.Port())}); err != nil {
		return nil, fmt.Errorf("connect %s socket to %v: %w", o.Proto, o.Remote, err)
	}
	return c, nil
}

// ownReplies returns a socket filter that accepts only echo replies with this id. A raw
// ICMP socket gets all ICMP packets, from the IPv4 header on. Replies to others would
// wake the client, and while it does not run fill its socket until its own reply finds
// no room.
func ownReplies(id uint16) []unix.SockFilter {
	return []unix.SockFilter{
		{Code: unix.BPF_LDX | unix.BPF_MSH | unix.BPF_B},                          // x = 4 * IHL
		{Code: unix.BPF_LD | unix.BPF_IND | unix.BPF_B},                           // ICMP type
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: icmpEchoReply, Jf: 3}, //
		{Code: unix.BPF_LD | unix.BPF_IND | unix.BPF_H, K: 4},                     // id
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: uint32(id), Jf: 1},    //
		{Code: unix.BPF_RET | unix.BPF_K, K: math.MaxUint32},                      // all of it
		{Code: unix.BPF_RET | unix.BPF_K},                                         // none
	}
}

// Close closes the socket.
func (c *Client) Close() error { return unix.Close(c.fd) }

// Run sends the warm-up and the pings asked for. When ctx ends it returns the results
// so far, with ctx's error, within a tenth of a second.
//
// A blocking client keeps a P of the Go scheduler while it waits, so use Ping if
// handlers run in the same process.
func (c *Client) Run(ctx context.Context) (Result, error) {
	unpin, err := testbed.Pin(c.o.CPU)
	if err != nil {
		return Result{}, err
	}
	defer unpin()
	c.stop.Store(false)
	defer context.AfterFunc(ctx, func() { c.stop.Store(true) })()

	c.late = 0
	r := Result{Samples: make([]int64, 0, c.o.Count)}
	for i := range c.o.Warmup + c.o.Count {
		if ctx.Err() != nil {
			return r, ctx.Err()
		}
		sent := c.now()
		rtt, v, err := c.ping(uint32(i))
		if err != nil {
			return r, err
		}
		if v == stopped {
			return r, ctx.Err()
		}
		if i >= c.o.Warmup {
			r.Sent++
			switch v {
			case answered:
				r.Samples = append(r.Samples, int64(rtt))
			case lost:
				r.Lost++
			case bad:
				r.Bad++
			}
			r.Late = c.late
		}
		c.sleepUntil(sent + c.o.Interval)
	}
	return r, nil
}

// now is CLOCK_MONOTONIC, read through the vDSO.
func (c *Client) now() time.Duration { return time.Since(c.base) }

// ping sends a ping and waits for the reply. It does not allocate, and making and
// checking packets is not part of the time measured.
func (c *Client) ping(seq uint32) (rtt time.Duration, v verdict, err error) {
	c.compose(seq)
	if c.o.Wait == Block {
		if err := c.limit(c.o.Timeout); err != nil {
			return 0, lost, err
		}
	}
	sent := c.now()
	if errno := c.send(); errno != 0 {
		// A connected socket reports an ICMP error about an earlier ping on the
		// next call, once.
		if !unreachable(errno) {
			return 0, lost, fmt.Errorf("send %d bytes by %s to %v: %w", c.o.Size, c.o.Proto, c.o.Remote, errno)
		}
		sent = c.now()
		if errno = c.send(); errno != 0 {
			return 0, lost, nil
		}
	}
	var flags uintptr
	if c.o.Wait == Spin {
		flags = unix.MSG_DONTWAIT
	}
	for {
		n, errno := c.recv(flags)
		took := c.now() - sent
		switch {
		case errno == 0:
			switch v := c.judge(c.rx[:n], seq); v {
			case answered:
				if took > c.o.Timeout {
					v = lost
				}
				return took, v, nil
			case bad:
				return 0, bad, nil
			case late:
				c.late++
			}
		case errno == unix.EAGAIN || errno == unix.EINTR:
		case unreachable(errno):
			return 0, lost, nil
		default:
			return 0, lost, fmt.Errorf("receive by %s from %v: %w", c.o.Proto, c.o.Remote, errno)
		}
		switch {
		case took >= c.o.Timeout:
			return 0, lost, nil
		case c.stop.Load():
			return 0, stopped, nil
		case c.o.Wait == Block:
			if err := c.limit(c.o.Timeout - took); err != nil {
				return 0, lost, err
			}
		}
	}
}

// unreachable reports whether an error is about the other end rather than about us.
func unreachable(e unix.Errno) bool {
	return e == unix.ECONNREFUSED || e == unix.EHOSTUNREACH || e == unix.ENETUNREACH || e == unix.EHOSTDOWN
}

func (c *Client) send() unix.Errno {
	_, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(c.fd), uintptr(unsafe.Pointer(&c.tx[0])), uintptr(len(c.tx)), 0, 0, 0)
	return errno
}

func (c *Client) recv(flags uintptr) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(c.fd), uintptr(unsafe.Pointer(&c.rx[0])), uintptr(len(c.rx)), flags, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}

// limit bounds the time that a blocking recv takes. It costs a system call only
// when the bound changes, which it does after a slow ping.
func (c *Client) limit(d time.Duration) error {
	d = max(min(d, slice), time.Microsecond) // 0 would mean no timeout
	if d == c.recvMax {
		return nil
	}
	tv := unix.NsecToTimeval(int64(d))
	if err := unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return fmt.Errorf("set receive timeout %v: %w", d, err)
	}
	c.recvMax = d
	return nil
}

func (c *Client) sleepUntil(t time.Duration) {
	for !c.stop.Load() {
		d := t - c.now()
		if d <= 0 {
			return
		}
		c.pause = unix.NsecToTimespec(int64(min(d, slice)))
		unix.RawSyscall6(unix.SYS_CLOCK_NANOSLEEP, unix.CLOCK_MONOTONIC, 0, uintptr(unsafe.Pointer(&c.pause)), 0, 0, 0)
	}
}
