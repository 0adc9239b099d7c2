// SPDX-License-Identifier: Apache-2.0

package slmp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Offload is how segments reach the kernel.
type Offload int

// From the fastest to the plainest. A connection starts with the one that it was
// given and takes the next if the kernel or the route does not have it.
const (
	OffloadSegments Offload = iota // UDP_SEGMENT: one datagram for up to 64 segments, cut by the kernel or the device
	OffloadCalls                   // sendmmsg: one call for up to 128 datagrams
	OffloadNone                    // one call for each datagram
)

func (o Offload) String() string {
	switch o {
	case OffloadSegments:
		return "UDP_SEGMENT"
	case OffloadCalls:
		return "sendmmsg"
	}
	return "send"
}

const (
	// maxDatagram is what UDP over IPv4 can carry, all segments of one
	// UDP_SEGMENT datagram together.
	maxDatagram = 65507
	// maxCut is how many segments every kernel with UDP_SEGMENT makes of one
	// datagram (UDP_MAX_SEGMENTS, 128 since Linux 6.9).
	maxCut = 64

	txSegments = 128 // staged at a time
	txBytes    = 128 << 10
	rxBatch    = 64  // acknowledgements per system call
	rxBatches  = 4   // of them in a row
	rxBytes    = 256 // no acknowledgement is longer than 10 + 4 + 8*16
	sockBuffer = 4 << 20
)

// mmsghdr is the kernel's struct mmsghdr.
type mmsghdr struct {
	hdr unix.Msghdr
	len uint32
}

// cutMessage is the control message of UDP_SEGMENT, padded as CMSG_SPACE says.
type cutMessage struct {
	hdr  unix.Cmsghdr
	size uint16
	_    [unsafe.Sizeof(uintptr(0)) - 2]byte
}

// socket is a connected UDP socket with a stage for the segments of one system
// call. Only the connection's loop uses it.
type socket struct {
	fd            int
	ip6           bool
	local, remote netip.AddrPort
	offload       Offload

	// The stage: segments one after the other in buf, then messages made of
	// them. Those before next are sent.
	buf    []byte
	used   int
	ends   [txSegments]int    // where each segment ends in buf
	tails  [txSegments][]byte // what comes behind that and lies elsewhere
	count  int                // segments
	sealed bool
	msgs   [txSegments]mmsghdr
	iovs   [2 * txSegments]unix.Iovec
	cuts   [txSegments]cutMessage
	holds  [txSegments]int // segments in each message
	made   int
	next   int
	out    int // segments in the messages before next

	in     [rxBatch]mmsghdr
	inIovs [rxBatch]unix.Iovec
	inBuf  []byte
}

// dialSocket connects to an address and port, the latter Port unless given.
func dialSocket(ctx context.Context, address string, local netip.AddrPort, offload Offload) (*socket, error) {
	address, err := withPort(address)
	if err != nil {
		return nil, err
	}
	var d net.Dialer
	if local.IsValid() {
		d.LocalAddr = net.UDPAddrFromAddrPort(local)
	}
	// The standard library finds the address. Its own socket would be woken
	// for every acknowledgement, so ours is a duplicate that it does not watch.
	conn, err := d.DialContext(ctx, "udp", address)
	if err != nil {
		return nil, err // names the address and the errno
	}
	udp := conn.(*net.UDPConn)
	defer udp.Close()
	s := &socket{
		fd:      -1,
		local:   unmap(udp.LocalAddr()),
		remote:  unmap(udp.RemoteAddr()),
		offload: offload,
		buf:     make([]byte, txBytes),
		inBuf:   make([]byte, rxBatch*rxBytes),
	}
	s.ip6 = s.remote.Addr().Is6()
	raw, err := udp.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("UDP socket: %w", err)
	}
	if cerr := raw.Control(func(fd uintptr) {
		s.fd, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0)
	}); cerr != nil || err != nil {
		return nil, fmt.Errorf("UDP socket: duplicate: %w", errors.Join(cerr, err))
	}
	if err := s.options(); err != nil {
		unix.Close(s.fd)
		return nil, err
	}
	for i := range s.in {
		s.inIovs[i].Base = &s.inBuf[i*rxBytes]
		s.inIovs[i].SetLen(rxBytes)
		s.in[i].hdr.Iov = &s.inIovs[i]
		s.in[i].hdr.SetIovlen(1)
	}
	for i := range s.msgs {
		s.cuts[i].hdr.Level, s.cuts[i].hdr.Type = unix.IPPROTO_UDP, unix.UDP_SEGMENT
		s.cuts[i].hdr.SetLen(unix.CmsgLen(2))
	}
	return s, nil
}

func unmap(a net.Addr) netip.AddrPort {
	p := a.(*net.UDPAddr).AddrPort()
	return netip.AddrPortFrom(p.Addr().Unmap(), p.Port())
}

// withPort adds the default port to a bare address: 10.0.0.1, fe80::1%eth0,
// [::1], a name.
func withPort(address string) (string, error) {
	host, port := address, strconv.Itoa(Port)
	if ip, err := netip.ParseAddr(address); err == nil {
		host = ip.String()
	} else if h, p, err := net.SplitHostPort(address); err == nil {
		host, port = h, p
	} else if n := len(address); n > 2 && address[0] == '[' && address[n-1] == ']' {
		host = address[1 : n-1]
	}
	if host == "" {
		return "", fmt.Errorf("address %q: want a host, or host:port", address)
	}
	return net.JoinHostPort(host, port), nil
}

func (s *socket) options() error {
	level, discover, do, recverr := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO, unix.IP_RECVERR
	if s.ip6 {
		level, discover, do, recverr = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO, unix.IPV6_RECVERR
	}
	// A segment in fragments matches no ruleset: it must be refused instead.
	if err := unix.SetsockoptInt(s.fd, level, discover, do); err != nil {
		return fmt.Errorf("UDP socket: no fragments (IP_MTU_DISCOVER): %w", err)
	}
	// So that a host without a route to it, or without an ARP answer, is told apart from a silent one.
	if err := unix.SetsockoptInt(s.fd, level, recverr, 1); err != nil {
		return fmt.Errorf("UDP socket: report ICMP errors (IP_RECVERR): %w", err)
	}
	// The kernel cuts these to net.core.wmem_max and rmem_max, silently.
	for _, opt := range []int{unix.SO_SNDBUF, unix.SO_RCVBUF} {
		if err := unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, opt, sockBuffer); err != nil {
			return fmt.Errorf("UDP socket: buffer of %d bytes: %w", sockBuffer, err)
		}
	}
	return nil
}

// payload returns how many bytes of a message a datagram can carry on the path
// as the kernel knows it now.
func (s *socket) payload() (payload, mtu int, err error) {
	level, opt, headers := unix.IPPROTO_IP, unix.IP_MTU, 20+8
	if s.ip6 {
		level, opt, headers = unix.IPPROTO_IPV6, unix.IPV6_MTU, 40+8
	}
	mtu, err = unix.GetsockoptInt(s.fd, level, opt)
	if err != nil {
		return 0, 0, fmt.Errorf("path MTU to %s (IP_MTU): %w", s.remote, err)
	}
	return min(mtu-headers, maxDatagram) - HeaderLen, mtu, nil
}

func (s *socket) close() { unix.Close(s.fd) }

// empty tells whether everything staged is sent.
func (s *socket) empty() bool { return s.out == s.count }

// clear begins a new stage.
func (s *socket) clear() { s.used, s.count, s.sealed, s.out = 0, 0, false, 0 }

// room tells how many segments of n bytes an empty stage takes: whole trains, as long as
// a datagram may be.
func (s *socket) room(n int) int {
	fit := min(txSegments, len(s.buf)/n)
	if train := min(maxCut, maxDatagram/n); s.offload == OffloadSegments && fit > train {
		return fit - fit%train
	}
	return fit
}

// stage returns the place of the next segment of n bytes, header included.
func (s *socket) stage(n int) []byte {
	b := s.buf[s.used : s.used+n : s.used+n]
	s.used += n
	s.ends[s.count] = s.used
	s.tails[s.count] = nil
	s.count++
	return b
}

// stageWith returns the place of the next segment's header; tail comes behind it.
func (s *socket) stageWith(tail []byte) []byte {
	b := s.stage(HeaderLen)
	s.tails[s.count-1] = tail
	return b
}

// size returns the length of segment i.
func (s *socket) size(i int) int {
	begin := 0
	if i > 0 {
		begin = s.ends[i-1]
	}
	return s.ends[i] - begin + len(s.tails[i])
}

// gather adds segment i to iovs, of which n are taken and those from first on are
// of the same message. It returns how many are taken then.
func (s *socket) gather(i, first, n int) int {
	begin := 0
	if i > 0 {
		begin = s.ends[i-1]
	}
	if n > first && i > 0 && s.tails[i-1] == nil {
		// Behind the one before it.
		s.iovs[n-1].SetLen(int(s.iovs[n-1].Len) + s.ends[i] - begin)
	} else {
		s.iovs[n].Base = &s.buf[begin]
		s.iovs[n].SetLen(s.ends[i] - begin)
		n++
	}
	if t := s.tails[i]; t != nil {
		s.iovs[n].Base = &t[0]
		s.iovs[n].SetLen(len(t))
		n++
	}
	return n
}

// unstage takes the last segment, of n bytes, back.
func (s *socket) unstage(n int) {
	s.used -= n
	s.count--
}

// remove takes the segments of a message out of the stage.
func (s *socket) remove(id uint32) {
	begin, used, count := 0, 0, 0
	if s.out > 0 {
		begin = s.ends[s.out-1]
	}
	for i := s.out; i < s.count; i++ {
		b := s.buf[begin:s.ends[i]]
		begin = s.ends[i]
		if binary.BigEndian.Uint32(b[2:]) == id { // of its header
			continue
		}
		used += copy(s.buf[used:], b)
		s.ends[count], s.tails[count] = used, s.tails[i]
		count++
	}
	s.used, s.count, s.sealed, s.out = used, count, false, 0
}

// seal makes messages of the segments that are not sent. With UDP_SEGMENT one
// message takes a run of equal length, whose last may be shorter.
func (s *socket) seal() {
	s.sealed, s.made, s.next = true, 0, 0
	iov := 0
	for i := s.out; i < s.count; {
		first := iov
		size, n := s.size(i), 1
		iov = s.gather(i, first, iov)
		if s.offload == OffloadSegments {
			for total := size; i+n < s.count && n < maxCut; n++ {
				next := s.size(i + n)
				if total += next; next > size || total > maxDatagram {
					break
				}
				iov = s.gather(i+n, first, iov)
				if next < size {
					n++
					break
				}
			}
		}
		k := s.made
		h := &s.msgs[k].hdr
		h.Iov = &s.iovs[first]
		h.SetIovlen(iov - first)
		if n > 1 {
			s.cuts[k].size = uint16(size)
			h.Control = (*byte)(unsafe.Pointer(&s.cuts[k]))
			h.SetControllen(int(unsafe.Sizeof(s.cuts[k])))
		} else {
			h.Control = nil
			h.SetControllen(0)
		}
		s.holds[k] = n
		s.made++
		i += n
	}
}

// flush sends what is staged. Whatever errno it returns, the segments that
// were not sent are still staged: EAGAIN until there is room again.
func (s *socket) flush() unix.Errno {
	if !s.sealed {
		s.seal()
	}
	for s.next < s.made {
		n, errno := s.send()
		if errno != 0 {
			switch {
			case errno == unix.EINTR:
				continue
			case s.lacks(errno):
				s.offload++
				s.seal()
				continue
			}
			return errno
		}
		for range n {
			s.out += s.holds[s.next]
			s.next++
		}
	}
	return 0
}

// send makes one system call.
func (s *socket) send() (sent int, errno unix.Errno) {
	m := &s.msgs[s.next]
	if s.offload == OffloadNone {
		_, _, errno = unix.Syscall(unix.SYS_SENDMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&m.hdr)), unix.MSG_DONTWAIT)
		return 1, errno
	}
	n, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, uintptr(s.fd), uintptr(unsafe.Pointer(m)),
		uintptr(s.made-s.next), unix.MSG_DONTWAIT, 0, 0)
	return int(n), errno
}

// lacks tells whether errno says that the kernel, the route (IPsec, no
// checksums) or a filter on system calls does not have our way of sending.
func (s *socket) lacks(errno unix.Errno) bool {
	switch s.offload {
	case OffloadSegments:
		if s.holds[s.next] == 1 {
			return errno == unix.ENOSYS
		}
		switch errno {
		case unix.EINVAL, unix.EMSGSIZE:
			// Also what segments get that are too long for the route now.
			payload, _, err := s.payload()
			return err == nil && int(s.cuts[s.next].size) <= payload+HeaderLen
		case unix.EIO, unix.ENOPROTOOPT, unix.EOPNOTSUPP, unix.ENOSYS:
			return true
		}
	case OffloadCalls:
		return errno == unix.ENOSYS
	}
	return false
}

// drop forgets the next message of the stage unsent, as the network might have.
func (s *socket) drop() {
	s.out += s.holds[s.next]
	s.next++
}

// receive takes what has come, up to a batch, without waiting. It is called in a
// loop while the connection spins, and returns at once, so the Go scheduler need
// not know.
func (s *socket) receive() (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&s.in)),
		rxBatch, unix.MSG_DONTWAIT, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}

// datagram returns the i-th that receive took, valid until the next call. One
// that was longer than any acknowledgement is cut, and as bad as it was.
func (s *socket) datagram(i int) []byte {
	return s.inBuf[i*rxBytes : i*rxBytes+int(s.in[i].len)]
}

// drainErrors empties the queue of errors, which keeps poll from waiting until it
// is, and returns the last one. An ICMP error quotes the datagram that it is about:
// stale if all were about messages that are not open any more.
func (s *socket) drainErrors(open func(id uint32) bool) (last unix.Errno, stale bool) {
	var data, control [256]byte
	live := false
	for {
		n, nc, _, _, err := unix.Recvmsg(s.fd, data[:], control[:], unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
		if err != nil {
			return last, stale && !live
		}
		if h, err := ParseHeader(data[:n]); err == nil && !open(h.ID) {
			stale = true
			continue
		}
		live = true
		cmsgs, err := unix.ParseSocketControlMessage(control[:nc])
		if err != nil {
			continue
		}
		for _, m := range cmsgs {
			v4 := m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_RECVERR
			v6 := m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_RECVERR
			if (v4 || v6) && len(m.Data) >= 4 {
				last = unix.Errno(binary.NativeEndian.Uint32(m.Data)) // sock_extended_err.ee_errno
			}
		}
	}
}
