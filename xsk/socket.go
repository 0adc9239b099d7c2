// SPDX-License-Identifier: Apache-2.0

package xsk

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// SocketConfig sizes the rings of one socket, in entries: powers of two, or zero
// for no ring. At least one ring is needed.
type SocketConfig struct {
	RxSize, TxSize int
}

// Stats are the counters of a socket: the kernel's first, since the socket was
// opened, then ours.
type Stats struct {
	RxDropped       uint64 // no frame to receive into, or too long for a frame
	RxInvalidDescs  uint64 // refused addresses on the fill ring; the whole queue's
	TxInvalidDescs  uint64 // refused descriptors, see Send
	RxRingFull      uint64 // frames lost because this socket was slow
	RxFillRingEmpty uint64 // the fill ring was empty; the whole queue's, so do not add up sockets
	TxRingEmpty     uint64 // the kernel looked for something to send and found nothing

	Kicks        uint64 // calls by Kick
	KickEAGAIN   uint64 // of these: not everything was sent in one go, or completions are not taken
	KickEBUSY    uint64 // of these: the device's queue was full
	KickENOBUFS  uint64 // of these: no memory
	KickFailures uint64 // of these: an error, which Kick returned
	RingCorrupt  uint64 // indices of the receive and transmit ring refused, see ErrRingCorrupt
}

// Socket is an AF_XDP socket bound to a queue, with a receive ring, a transmit
// ring, or both.
//
// Receive and RxAvailable belong to one goroutine, Send, Kick, TxFree and
// TxOutstanding to one goroutine; the two may differ. The other methods are safe
// for concurrent use, except for Close: only Stats, Err and system calls on FD may
// run at the same time. A closed socket receives nothing and sends nothing.
type Socket struct {
	queue *Queue
	cfg   SocketConfig
	fd    int // -1 when closed; written under umem.mu

	kicks, kickEAGAIN, kickEBUSY, kickENOBUFS, kickFailures atomic.Uint64

	_  pad
	rx consumer[Desc]
	_  pad
	tx producer[Desc]
	_  pad
}

// open opens and binds a socket. initial goes on the fill ring if it is the
// first of the queue. The caller holds umem.mu.
func (q *Queue) open(cfg SocketConfig, initial []uint64) (_ *Socket, err error) {
	if cfg.RxSize == 0 && cfg.TxSize == 0 {
		return nil, fmt.Errorf("xsk: receive ring of %d and transmit ring of %d entries: want at least one ring: %w", cfg.RxSize, cfg.TxSize, ErrConfig)
	}
	if cfg.RxSize != 0 {
		if err := checkRing("receive ring", cfg.RxSize); err != nil {
			return nil, err
		}
	}
	if cfg.TxSize != 0 {
		if err := checkRing("transmit ring", cfg.TxSize); err != nil {
			return nil, err
		}
	}

	s := &Socket{queue: q, cfg: cfg, fd: -1}
	s.rx.reset()
	s.tx.reset()
	founder := len(q.sockets) == 0 // the queue's first, which brings fill and completion ring
	if s.fd, err = unix.Socket(unix.AF_XDP, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
		return nil, s.fail("socket", err)
	}
	defer func() {
		if err == nil {
			return
		}
		fd, _ := s.release() // err says why we are here
		_ = s.close(fd)
		if founder {
			_ = q.unmap()
			if raceEnabled {
				q.umem.reclaim(q)
			}
		}
	}()

	if err := s.size(founder); err != nil {
		return nil, err
	}
	var off unix.XDPMmapOffsets
	if err := getsockopt(s.fd, unix.XDP_MMAP_OFFSETS, &off); err != nil {
		return nil, s.fail("getsockopt XDP_MMAP_OFFSETS", err)
	}
	if cfg.RxSize != 0 {
		if err := s.rx.mapRing(s.fd, unix.XDP_PGOFF_RX_RING, &off.Rx, cfg.RxSize); err != nil {
			return nil, s.fail("mmap receive ring", err)
		}
	}
	if cfg.TxSize != 0 {
		if err := s.tx.mapRing(s.fd, unix.XDP_PGOFF_TX_RING, &off.Tx, cfg.TxSize); err != nil {
			return nil, s.fail("mmap transmit ring", err)
		}
	}
	if founder {
		// These two mappings keep the kernel's half of this socket alive until
		// the queue's last socket is closed.
		if err := q.fill.mapRing(s.fd, unix.XDP_UMEM_PGOFF_FILL_RING, &off.Fr, q.cfg.FillSize); err != nil {
			return nil, s.fail("mmap fill ring", err)
		}
		if err := q.completion.mapRing(s.fd, unix.XDP_UMEM_PGOFF_COMPLETION_RING, &off.Cr, q.cfg.CompletionSize); err != nil {
			return nil, s.fail("mmap completion ring", err)
		}
		q.post(initial)
	}
	if err := s.bind(founder); err != nil {
		return nil, err
	}
	q.admit(s)
	return s, nil
}

// size creates the rings, and registers the UMEM if no open socket has done so.
func (s *Socket) size(founder bool) error {
	q, u := s.queue, s.queue.umem
	if founder && u.member() == nil {
		reg := unix.XDPUmemReg{
			Addr:     address(u.mem),
			Len:      uint64(len(u.mem)),
			Size:     uint32(u.cfg.FrameSize),
			Headroom: uint32(u.cfg.Headroom),
		}
		if err := setsockopt(s.fd, unix.XDP_UMEM_REG, &reg); err != nil {
			return s.fail(fmt.Sprintf("register UMEM of %d frames of %d bytes", u.cfg.Frames, u.cfg.FrameSize), err)
		}
	}
	rings := [...]struct {
		name   string
		opt, n int
	}{
		{"receive", unix.XDP_RX_RING, s.cfg.RxSize},
		{"transmit", unix.XDP_TX_RING, s.cfg.TxSize},
		{"fill", unix.XDP_UMEM_FILL_RING, q.cfg.FillSize},
		{"completion", unix.XDP_UMEM_COMPLETION_RING, q.cfg.CompletionSize},
	}
	for i, r := range rings {
		if r.n == 0 || i >= 2 && !founder {
			continue
		}
		n := uint32(r.n)
		if err := setsockopt(s.fd, r.opt, &n); err != nil {
			return s.fail(fmt.Sprintf("create %s ring of %d entries", r.name, r.n), err)
		}
	}
	return nil
}

// bind binds the socket and, for the first of a queue, records what was granted.
func (s *Socket) bind(founder bool) error {
	q := s.queue
	sa := unix.SockaddrXDP{Ifindex: uint32(q.cfg.Ifindex), QueueID: uint32(q.cfg.Queue)}
	if !founder {
		// To share the queue's buffer pool, name a socket of that queue. The kernel
		// refuses any other flag with this one: all is inherited.
		sa.Flags, sa.SharedUmemFD = unix.XDP_SHARED_UMEM, uint32(q.sockets[0].fd)
		return s.try(&sa)
	}

	if m := q.umem.member(); m != nil {
		sa.Flags, sa.SharedUmemFD = unix.XDP_SHARED_UMEM, uint32(m.fd)
		q.granted = m.queue.granted
		if err := s.try(&sa); err != nil {
			return err
		}
	} else {
		sa.Flags = q.cfg.flags()
		q.granted = Granted{NeedWakeup: true, MultiBuffer: true}
		err := s.try(&sa)
		if errors.Is(err, unix.EINVAL) {
			// Before Linux 6.6 XDP_USE_SG was an unknown flag.
			sa.Flags &^= unix.XDP_USE_SG
			q.granted.MultiBuffer = false
			err = s.try(&sa)
		}
		if err != nil {
			return err
		}
	}
	var opts uint32
	if err := getsockopt(s.fd, unix.XDP_OPTIONS, &opts); err != nil {
		return s.fail("getsockopt XDP_OPTIONS", err)
	}
	q.granted.ZeroCopy = opts&unix.XDP_OPTIONS_ZEROCOPY != 0
	got := Copy
	if q.granted.ZeroCopy {
		got = ZeroCopy
	}
	if want := q.cfg.Mode; want != Auto && want != got {
		return fmt.Errorf("xsk: ifindex %d queue %d: %v requested, %v granted, as for the first queue of the UMEM: %w",
			q.cfg.Ifindex, q.cfg.Queue, want, got, ErrMode)
	}
	return nil
}

// try binds to sa. The kernel releases a queue some time after its last socket was
// closed, in a work item that takes the RTNL lock. So EBUSY is an error only if it
// persists.
func (s *Socket) try(sa *unix.SockaddrXDP) error {
	const patience, pause = 3 * time.Second, 2 * time.Millisecond
	for start := time.Now(); ; time.Sleep(pause) {
		err := unix.Bind(s.fd, sa)
		if err == nil {
			return nil
		}
		if err != unix.EBUSY || time.Since(start) > patience {
			return s.fail("bind", err)
		}
	}
}

// FD returns the file descriptor, for the XSKMAP and for poll: readable means
// that there is something to receive, writable that there is room to send. The
// socket keeps ownership. FD returns -1 when closed.
//
// Close does not interrupt a poll, and the queue stays bound until the poll
// returns. So poll with a timeout, or on a second descriptor that can end it.
func (s *Socket) FD() int { return s.fd }

// Granted returns what the kernel granted to the sockets of this queue.
func (s *Socket) Granted() Granted { return s.queue.granted }

// Receive takes up to len(descs) descriptors and returns their number; the
// caller owns their frames until it gives them to [Queue.Exchange] or Send. All
// descriptors of a frame but the last have Continued set; the rest of a frame may
// come with the next call.
//
// The descriptors are as the kernel wrote them. [UMEM.Bytes] checks them.
func (s *Socket) Receive(descs []Desc) int {
	n := s.rx.take(descs)
	if raceEnabled {
		for i := range descs[:n] {
			s.queue.umem.take(descs[i].Addr, s.queue.kernel(viaFill))
		}
	}
	return n
}

// RxAvailable returns how many descriptors wait to be received. It costs one
// atomic load.
func (s *Socket) RxAvailable() uint32 { return s.rx.available() }

// Send queues frames for transmission, as many from the front as there is room
// for, and returns how many descriptors it took. A frame of several descriptors,
// where all but the last have Continued set, is queued as a whole or not at all,
// and so an incomplete one at the end is not. Call Kick afterwards.
//
// The kernel drops a frame with a descriptor that is empty or extends beyond its
// frame in the UMEM, counts it as Stats.TxInvalidDescs, and stops there until the
// next Kick. Whether the descriptor ever completes depends on the kernel's version.
func (s *Socket) Send(descs []Desc) int {
	n := s.tx.room(len(descs))
	for n > 0 && descs[n-1].Options&Continued != 0 {
		n--
	}
	if raceEnabled {
		for _, d := range descs[:n] {
			s.queue.umem.give(d.Addr, s.queue.kernel(viaTx))
		}
	}
	s.tx.put(descs[:n])
	return n
}

// TxFree returns how many descriptors Send has room for.
func (s *Socket) TxFree() int { return s.tx.room(int(s.tx.size)) }

// TxOutstanding returns how many descriptors sent are still in the ring. A frame
// that has left it is not yet complete: Exchange reports that.
func (s *Socket) TxOutstanding() int {
	n, _ := s.tx.held()
	return int(n)
}

// Kick has the kernel send what is in the ring, if the kernel asks to be woken. In
// copy mode it always does, and one call sends at most 32 descriptors and stops
// when the completion ring or the device's queue is full. If pending is true there
// is more to send: call Exchange, then Kick again. The error is an *OpError, for
// example with ENETDOWN or ErrRingCorrupt; nothing is lost, and Kick may be tried
// again.
func (s *Socket) Kick() (pending bool, err error) {
	n, ok := s.tx.held()
	if !ok {
		return false, s.corrupt("transmit")
	}
	if n == 0 || !s.tx.needWakeup() {
		return false, nil
	}
	s.kicks.Add(1)
	switch errno := kickTx(s.fd); errno {
	case 0, unix.EINTR:
	case unix.EAGAIN:
		s.kickEAGAIN.Add(1)
	case unix.EBUSY:
		s.kickEBUSY.Add(1)
	case unix.ENOBUFS:
		s.kickENOBUFS.Add(1)
	default:
		s.kickFailures.Add(1)
		return true, s.fail("sendto", errno)
	}
	n, ok = s.tx.held()
	if !ok {
		return false, s.corrupt("transmit")
	}
	return n > 0 && s.tx.needWakeup(), nil
}

// Err returns an error that wraps ErrRingCorrupt if the kernel's index of one
// of the socket's rings was ever refused.
func (s *Socket) Err() error {
	switch {
	case s.rx.corrupt.Load() > 0:
		return s.corrupt("receive")
	case s.tx.corrupt.Load() > 0:
		return s.corrupt("transmit")
	}
	return nil
}

// Stats reads the counters. It makes a system call.
func (s *Socket) Stats() (Stats, error) {
	st := Stats{
		Kicks:        s.kicks.Load(),
		KickEAGAIN:   s.kickEAGAIN.Load(),
		KickEBUSY:    s.kickEBUSY.Load(),
		KickENOBUFS:  s.kickENOBUFS.Load(),
		KickFailures: s.kickFailures.Load(),
		RingCorrupt:  s.rx.corrupt.Load() + s.tx.corrupt.Load(),
	}
	s.queue.umem.mu.Lock()
	defer s.queue.umem.mu.Unlock()
	if s.fd < 0 {
		return st, s.fail("statistics", ErrClosed)
	}
	var k unix.XDPStatistics
	if err := getsockopt(s.fd, unix.XDP_STATISTICS, &k); err != nil {
		return st, s.fail("getsockopt XDP_STATISTICS", err)
	}
	st.RxDropped = k.Rx_dropped
	st.RxInvalidDescs = k.Rx_invalid_descs
	st.TxInvalidDescs = k.Tx_invalid_descs
	st.RxRingFull = k.Rx_ring_full
	st.RxFillRingEmpty = k.Rx_fill_ring_empty_descs
	st.TxRingEmpty = k.Tx_ring_empty_descs
	return st, nil
}

// Close unmaps the rings and closes the descriptor; closing again does nothing, and does not
// wait either. Several sockets can be closed at the same time, which takes no longer than one.
// Take the socket out of the XSKMAP first, or frames are still redirected to it
// while the queue has other sockets. Frames that were recycled or sent and have not
// come back belong to the caller again once Close has returned for all of the queue's sockets;
// Exchange does not return them.
func (s *Socket) Close() error {
	if s == nil {
		return nil
	}
	u := s.queue.umem
	u.mu.Lock()
	if s.fd < 0 {
		u.mu.Unlock()
		return nil
	}
	err := s.queue.dismiss(s)
	fd, rerr := s.release()
	u.mu.Unlock()
	return errors.Join(err, rerr, s.close(fd))
}

// release unmaps the socket's own rings, and hands over the descriptor, which is to be
// closed. The caller holds umem.mu.
func (s *Socket) release() (fd int, err error) {
	fd, s.fd = s.fd, -1
	return fd, errors.Join(unmap(s.rx.reset()), unmap(s.tx.reset()))
}

// close closes what release has handed over. If the socket was bound, the kernel waits for two
// grace periods of RCU, some 20 ms: without umem.mu, so that sockets that are closed at the
// same time wait together.
func (s *Socket) close(fd int) error {
	if err := unix.Close(fd); err != nil {
		return s.fail("close", err)
	}
	return nil
}

func (s *Socket) fail(op string, err error) error {
	return &OpError{Op: op, Ifindex: s.queue.cfg.Ifindex, Queue: s.queue.cfg.Queue, Err: err}
}

func (s *Socket) corrupt(ring string) error {
	return s.fail("check "+ring+" ring", ErrRingCorrupt)
}

// unmap unmaps the memory of a ring, if it has any.
func unmap(mem []byte) error {
	if mem == nil {
		return nil
	}
	if err := unix.Munmap(mem); err != nil {
		return fmt.Errorf("xsk: unmap ring of %d bytes: %w", len(mem), err)
	}
	return nil
}
