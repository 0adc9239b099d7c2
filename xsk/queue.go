// SPDX-License-Identifier: Apache-2.0

package xsk

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Mode says how frames get between the device and the UMEM.
type Mode int

const (
	Auto     Mode = iota // zero-copy if the driver can; see Granted.ZeroCopy
	Copy                 // the kernel copies each frame
	ZeroCopy             // the device reads and writes the UMEM; an error if it cannot
)

func (m Mode) String() string {
	switch m {
	case Auto:
		return "auto"
	case Copy:
		return "copy"
	case ZeroCopy:
		return "zero-copy"
	}
	return fmt.Sprintf("Mode(%d)", int(m))
}

// QueueConfig names a receive and transmit queue of an interface and sizes the
// rings that its sockets share.
type QueueConfig struct {
	Ifindex int // in the network namespace of the calling thread
	Queue   int

	// Number of entries, powers of two. FillSize is at most the number of frames.
	// While the completion ring is full the kernel sends nothing.
	FillSize, CompletionSize int

	Mode Mode
	// Generic says that the XDP program runs in generic (skb) mode, where only
	// Copy works. Optional.
	Generic bool
	// Initial frames are on the fill ring before the device knows of it; some
	// drivers stop for good if they find it empty. Optional, at most FillSize.
	Initial []uint64
}

// Granted says what the kernel granted, which may be less than was requested.
type Granted struct {
	ZeroCopy    bool // from XDP_OPTIONS
	NeedWakeup  bool // the kernel says when it wants to be woken: XDP_USE_NEED_WAKEUP
	MultiBuffer bool // frames may span several descriptors: XDP_USE_SG, Linux 6.6
}

// QueueStats are the counters of a queue since it was opened.
type QueueStats struct {
	FillWakeups uint64 // system calls because the kernel wanted frames
	WakeupFails uint64 // of these, failed ones; the next Exchange tries again
	RingCorrupt uint64 // indices of the fill and completion ring refused, see ErrRingCorrupt
}

// Queue is the fill and the completion ring of one UMEM on one queue of one
// interface. All sockets of the queue share them, behind a mutex that Exchange
// takes once per batch.
//
// A Queue is safe for concurrent use. It lives as long as it has open sockets.
type Queue struct {
	umem    *UMEM
	cfg     QueueConfig
	granted Granted
	serial  uint32
	sockets []*Socket // guarded by umem.mu

	fillWakeups, wakeupFails atomic.Uint64

	_          pad
	mu         sync.Mutex // guards what follows
	wakeFD     int        // an open socket with a receive ring, or -1
	fill       producer[uint64]
	completion consumer[uint64]
	_          pad
}

// OpenQueue opens a queue together with the first socket on it.
//
// The first queue of a UMEM decides about copy or zero-copy for all of them. Unless
// there is an error, the frames of cfg.Initial belong to the kernel on return.
func (u *UMEM) OpenQueue(cfg QueueConfig, first SocketConfig) (*Queue, *Socket, error) {
	if err := u.check(cfg); err != nil {
		return nil, nil, err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.closed {
		return nil, nil, errUMEMClosed
	}
	u.serial++
	q := &Queue{umem: u, cfg: cfg, serial: u.serial, wakeFD: -1}
	q.cfg.Initial = nil
	q.fill.reset()
	q.completion.reset()
	s, err := q.open(first, cfg.Initial)
	if err != nil {
		return nil, nil, err
	}
	return q, s, nil
}

// Open opens a further socket on the queue, with rings of its own.
func (q *Queue) Open(cfg SocketConfig) (*Socket, error) {
	q.umem.mu.Lock()
	defer q.umem.mu.Unlock()
	if len(q.sockets) == 0 {
		return nil, fmt.Errorf("xsk: open socket on ifindex %d queue %d: queue %w", q.cfg.Ifindex, q.cfg.Queue, ErrClosed)
	}
	return q.open(cfg, nil)
}

// Exchange gives the frames of recycle to the kernel to receive into, as many as
// fit, and takes the addresses of frames that have been sent into done, as many as
// there are. Then the kernel owns recycle[:filled], and the caller done[:completed].
// Exchange wakes the kernel if it waits for frames.
//
// Any address within a frame stands for the frame. A completed address may differ
// from the one sent: Linux 6.18 in copy mode clears its lowest bit.
func (q *Queue) Exchange(recycle, done []uint64) (filled, completed int) {
	q.mu.Lock()
	filled = q.post(recycle)
	completed = q.completion.take(done)
	if q.fill.needWakeup() {
		q.wake()
	}
	q.mu.Unlock()

	if raceEnabled {
		for _, addr := range done[:completed] {
			q.umem.take(addr, q.kernel(viaTx))
		}
	}
	return filled, completed
}

// post puts frames on the fill ring. The caller holds q.mu.
func (q *Queue) post(addrs []uint64) int {
	n := q.fill.room(len(addrs))
	if raceEnabled {
		for _, addr := range addrs[:n] {
			q.umem.give(addr, q.kernel(viaFill))
		}
	}
	q.fill.put(addrs[:n])
	return n
}

// wake wakes the kernel, which has flagged the fill ring, if there are frames on
// it. The caller holds q.mu, so that the socket cannot be closed meanwhile and its
// descriptor reused for another file.
func (q *Queue) wake() {
	if n, ok := q.fill.held(); !ok || n == 0 || q.wakeFD < 0 {
		return
	}
	q.fillWakeups.Add(1)
	if kickFill(q.wakeFD) != 0 {
		q.wakeupFails.Add(1)
	}
}

// Stats returns the counters of the queue.
func (q *Queue) Stats() QueueStats {
	return QueueStats{
		FillWakeups: q.fillWakeups.Load(),
		WakeupFails: q.wakeupFails.Load(),
		RingCorrupt: q.fill.corrupt.Load() + q.completion.corrupt.Load(),
	}
}

// Granted returns what the kernel granted to the sockets of this queue.
func (q *Queue) Granted() Granted { return q.granted }

// check refuses what no kernel would accept.
func (u *UMEM) check(cfg QueueConfig) error {
	switch {
	case cfg.Ifindex <= 0:
		return fmt.Errorf("xsk: interface index %d: want a positive one: %w", cfg.Ifindex, ErrConfig)
	case cfg.Queue < 0:
		return fmt.Errorf("xsk: queue %d: want 0 or more: %w", cfg.Queue, ErrConfig)
	case cfg.Mode < Auto || cfg.Mode > ZeroCopy:
		return fmt.Errorf("xsk: %v: want 0 to %d: %w", cfg.Mode, ZeroCopy, ErrConfig)
	case cfg.Generic && cfg.Mode == ZeroCopy:
		return fmt.Errorf("xsk: generic XDP has no zero-copy, ask for %v or %v: %w", Auto, Copy, ErrConfig)
	}
	if err := checkRing("fill ring", cfg.FillSize); err != nil {
		return err
	}
	if err := checkRing("completion ring", cfg.CompletionSize); err != nil {
		return err
	}
	if cfg.FillSize > u.cfg.Frames {
		return fmt.Errorf("xsk: fill ring of %d entries for %d frames: use a smaller ring or more frames: %w",
			cfg.FillSize, u.cfg.Frames, ErrConfig)
	}
	if len(cfg.Initial) > cfg.FillSize {
		return fmt.Errorf("xsk: %d initial frames for a fill ring of %d entries: %w", len(cfg.Initial), cfg.FillSize, ErrConfig)
	}
	for _, addr := range cfg.Initial {
		if u.Frame(addr) >= u.cfg.Frames {
			return fmt.Errorf("xsk: initial address %#x is in frame %d: want 0 to %d: %w", addr, u.Frame(addr), u.cfg.Frames-1, ErrConfig)
		}
	}
	return nil
}

// flags returns the bind flags of the first socket of a UMEM.
func (c *QueueConfig) flags() uint16 {
	const always = unix.XDP_USE_NEED_WAKEUP | unix.XDP_USE_SG
	switch {
	case c.Mode == Copy || c.Generic:
		return always | unix.XDP_COPY
	case c.Mode == ZeroCopy:
		return always | unix.XDP_ZEROCOPY
	}
	return always
}

// admit makes s, bound and complete, a socket of q. The caller holds umem.mu.
func (q *Queue) admit(s *Socket) {
	if len(q.sockets) == 0 {
		q.umem.queues = append(q.umem.queues, q)
	}
	q.sockets = append(q.sockets, s)
	q.elect()
}

// dismiss takes s out of q and unmaps the rings of the queue with its last
// socket. The caller holds umem.mu.
func (q *Queue) dismiss(s *Socket) error {
	q.sockets = slices.DeleteFunc(q.sockets, func(o *Socket) bool { return o == s })
	q.elect()
	if len(q.sockets) > 0 {
		return nil
	}
	u := q.umem
	u.queues = slices.DeleteFunc(u.queues, func(o *Queue) bool { return o == q })
	if raceEnabled {
		u.reclaim(q)
	}
	return q.unmap()
}

// elect chooses the socket that wakes the kernel for the fill ring.
func (q *Queue) elect() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.wakeFD = -1
	for _, s := range q.sockets {
		if s.cfg.RxSize > 0 {
			q.wakeFD = s.fd
			return
		}
	}
}

// unmap takes the rings from the queue; afterwards Exchange does nothing.
func (q *Queue) unmap() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return errors.Join(unmap(q.fill.reset()), unmap(q.completion.reset()))
}
