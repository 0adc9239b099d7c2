// SPDX-License-Identifier: Apache-2.0

// Package fpspintest sends SLMP messages as FPsPIN's sender library does, for
// tests of receivers: a second implementation, which shares nothing with package
// slmp. It trusts the network as FPsPIN does: nothing is retransmitted, and any
// acknowledgement counts for any packet.
package fpspintest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

const (
	headerLen  = 10   // flags, message id, offset
	maxPayload = 1462 // what is left of a frame of 1514 bytes: fixed when FPsPIN is compiled

	flagEOM = 0x8000
	flagSYN = 0x4000
	flagACK = 0x2000

	patience = time.Second // for an ACK, and for room in the socket's buffer
	drain    = 2 * time.Second
	pause    = 100 * time.Microsecond // between looks at the socket
	buffer   = 1 << 20                // of the socket, either way
)

// A Code is what FPsPIN's slmp_sendmsg returns. Errors of Send wrap one.
type Code int

// Codes of failure.
const (
	ErrData       Code = -1 // after the first packet: a packet could not be sent, or ACKs did not come
	ErrSYNTimeout Code = -2 // the first packet was not acknowledged
	ErrSYNUnsent  Code = -3 // the first packet could not be sent
)

func (c Code) Error() string {
	switch c {
	case ErrData:
		return "slmp_sendmsg: -1 (data phase)"
	case ErrSYNTimeout:
		return "slmp_sendmsg: -2 (SYN timed out)"
	case ErrSYNUnsent:
		return "slmp_sendmsg: -3 (SYN not sent)"
	}
	return fmt.Sprintf("slmp_sendmsg: %d", int(c))
}

// A Sender has the parameters of FPsPIN's slmp_socket.
type Sender struct {
	// Window is how many packets may be unacknowledged, the first one not
	// counted. 0 is said to be unlimited, and sends what lies between the
	// first packet and the last without SYN; but a message of more than one
	// packet then always ends with ErrData.
	Window int
	// Align: packets carry the largest multiple that 1462 bytes have room
	// for. FPsPIN's file sender has 64, its datatypes 4.
	Align int
	Gap   time.Duration // pause after each packet
	// Threads send a part of the message each, all at once, with as much of the
	// window. Here they take turns, which is one of the orders that FPsPIN's can
	// have. 0 is 1.
	Threads int
}

// Payload returns how many bytes a packet carries.
func (s Sender) Payload() int { return maxPayload / s.Align * s.Align }

// A Result says what happened on the way, whether or not it ended well.
type Result struct {
	Port  uint16 // that the packets came from, a new one for each message
	Sent  int    // packets
	ACKs  int    // datagrams taken for one
	Other int    // datagrams that were no ACK
}

// Send sends a message from a socket of its own, in the network namespace of the
// calling thread. It returns when as many ACKs have come as packets went out, or
// with an error that wraps a Code. It takes IPv4 addresses only.
func (s Sender) Send(to netip.AddrPort, id uint32, msg []byte) (r Result, err error) {
	if s.Window < 0 || s.Threads < 0 || s.Align < 1 || s.Align > maxPayload || !to.Addr().Is4() {
		return r, fmt.Errorf("FPsPIN sender to %v, window %d, %d threads, align %d: %w", to, s.Window, s.Threads, s.Align, unix.EINVAL)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return r, fmt.Errorf("UDP socket: %w", err)
	}
	defer unix.Close(fd)
	for _, option := range []int{unix.SO_SNDBUF, unix.SO_RCVBUF} {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, option, buffer); err != nil {
			return r, fmt.Errorf("UDP socket: buffer of %d bytes: %w: %w", buffer, err, ErrData)
		}
	}
	p := peer{fd: fd, to: &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}, id: id, msg: msg, gap: s.Gap, r: &r}
	size := s.Payload()
	last := 0 // offset of the last packet
	if len(msg) > 0 {
		last = (len(msg) - 1) / size * size
	}

	flags := uint16(flagSYN)
	if last == 0 {
		flags |= flagEOM
	}
	if err := p.send(flags, 0, size); err != nil {
		return r, fmt.Errorf("first packet to %v: %w: %w", to, err, ErrSYNUnsent)
	}
	if sa, err := unix.Getsockname(fd); err == nil {
		r.Port = uint16(sa.(*unix.SockaddrInet4).Port)
	}
	if _, err := p.await(1, patience); err != nil {
		return r, fmt.Errorf("first packet to %v: %w: %w", to, err, ErrSYNTimeout)
	}
	if last == 0 {
		return r, nil
	}

	parts := split(max(s.Threads, 1), s.Window, size, last)
	total := 0
	for _, t := range parts {
		total += t.left
	}
	room := func(t *part) error {
		if t.left != 0 {
			return nil
		}
		if s.Window == 0 {
			return fmt.Errorf("waiting for window: %w", errTimeout) // for no ACK at all
		}
		n, err := p.await(1, patience)
		t.left += n
		if err != nil {
			return fmt.Errorf("waiting for window: %w", err)
		}
		return nil
	}
	for {
		// The next one that has something to send, and the window to do it, or else
		// the next one that has to wait.
		i := slices.IndexFunc(parts, func(t *part) bool { return t.at < t.end && t.left != 0 })
		if i < 0 {
			i = slices.IndexFunc(parts, func(t *part) bool { return t.at < t.end })
		}
		if i < 0 {
			break
		}
		t := parts[i]
		parts = append(slices.Delete(parts, i, i+1), t) // others first, next time
		flags := uint16(0)
		if s.Window > 0 {
			if err := room(t); err != nil {
				return r, fmt.Errorf("packet at %d to %v: %w: %w", t.at, to, err, ErrData)
			}
			flags = flagSYN
		}
		if err := p.send(flags, t.at, size); err != nil {
			return r, fmt.Errorf("packet at %d to %v: %w: %w", t.at, to, err, ErrData)
		}
		t.at += size
		t.left--
	}
	// All threads have ended; what their windows have left is one.
	main := &part{}
	for _, t := range parts {
		main.left += t.left
	}
	if err := room(main); err != nil {
		return r, fmt.Errorf("last packet, at %d, to %v: %w: %w", last, to, err, ErrData)
	}
	if err := p.send(flagSYN|flagEOM, last, size); err != nil {
		return r, fmt.Errorf("last packet, at %d, to %v: %w: %w", last, to, err, ErrData)
	}
	main.left--
	if n, err := p.await(total-main.left, drain); err != nil {
		return r, fmt.Errorf("all sent to %v, %d of %d ACKs outstanding came: %w: %w", to, n, total-main.left, err, ErrData)
	}
	return r, nil
}

// A part of the message between the first packet and the last, and its thread.
type part struct {
	at, end int // offsets
	left    int // of the window; below 0 for one of 0
}

// split gives each thread as many packets, and as much of the window, rounded up.
func split(threads, window, size, last int) (parts []*part) {
	n := last/size - 1
	for i := range threads {
		parts = append(parts, &part{(1 + i*n/threads) * size, (1 + (i+1)*n/threads) * size, (window + threads - 1) / threads})
	}
	return parts
}

// A peer is the other side of a message under way.
type peer struct {
	fd  int
	to  unix.Sockaddr
	id  uint32
	msg []byte
	gap time.Duration
	r   *Result
	buf [headerLen + maxPayload]byte
}

var errTimeout = errors.New("timeout")

// send sends up to size bytes of the message from off on.
func (p *peer) send(flags uint16, off, size int) error {
	binary.BigEndian.PutUint16(p.buf[0:], flags)
	binary.BigEndian.PutUint32(p.buf[2:], p.id)
	binary.BigEndian.PutUint32(p.buf[6:], uint32(off))
	n := copy(p.buf[headerLen:][:size], p.msg[off:])
	for end := time.Now().Add(patience); ; time.Sleep(pause) {
		err := unix.Sendto(p.fd, p.buf[:headerLen+n], 0, p.to)
		switch {
		case err == nil:
			p.r.Sent++
			time.Sleep(p.gap)
			return nil
		case err == unix.EINTR:
		case err != unix.EAGAIN || time.Now().After(end):
			return fmt.Errorf("sendto: %w", err)
		}
	}
}

// await takes what ACKs there are until it has at least need. Whoever sent
// them, for whatever: 10 bytes and the flag are enough.
func (p *peer) await(need int, patience time.Duration) (got int, err error) {
	var b [64]byte
	for end := time.Now().Add(patience); ; {
		n, _, err := unix.Recvfrom(p.fd, b[:], 0)
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN && got >= need:
			return got, nil
		case err == unix.EAGAIN && time.Now().After(end):
			return got, errTimeout
		case err == unix.EAGAIN:
			time.Sleep(pause)
		case err != nil:
			return got, fmt.Errorf("recvfrom: %w", err)
		case n == headerLen && binary.BigEndian.Uint16(b[:])&flagACK != 0:
			got++
			p.r.ACKs++
		default:
			p.r.Other++
		}
	}
}
