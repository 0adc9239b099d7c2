// SPDX-License-Identifier: Apache-2.0

package impair

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/internal/clock"
	"github.com/xspin/xspin/xsk"
)

// relayAddress is an abstract socket, which belongs to a network namespace and ends
// with its process. A process that can connect to it knows that the relay runs.
const relayAddress = "@xspin-relay"

// ErrNoRelay is returned, wrapped, by DialRelay when no relay runs in the
// namespace.
var ErrNoRelay = errors.New("no relay runs")

// DialRelay connects to the relay of the thread's namespace. The connection carries no
// data, and ends with the relay.
func DialRelay() (net.Conn, error) {
	c, err := net.Dial("unix", relayAddress)
	if errors.Is(err, unix.ECONNREFUSED) {
		return nil, ErrNoRelay
	} else if err != nil {
		return nil, fmt.Errorf("impair: reach the relay: %w", err)
	}
	return c, nil
}

// A Relay delays the frames of a stage with a Delay. AF_XDP sockets bring them into
// memory, where they stay until they are due, and send them on. It has a thread for
// each direction, which sleeps until the next frame is due, or until one arrives if
// none waits.
//
// It ends by itself when one of the devices is removed.
type Relay struct {
	lanes    []*lane
	listener net.Listener
	paths    *ebpf.Map
	relays   *ebpf.Map
	counts   *ebpf.Memory
	unwatch  chan struct{} // closed to end the subscription

	done chan struct{} // closed when everything is released
	err  error         // why it ended, once done

	mu       sync.Mutex
	released bool // lanes cannot be interrupted any more
}

// StartRelay starts the relay of the stage in the thread's namespace, in this
// process.
func StartRelay() (_ *Relay, err error) {
	r := &Relay{unwatch: make(chan struct{}), done: make(chan struct{})}
	defer func() {
		if err != nil {
			err = fmt.Errorf("impair: relay: %w", errors.Join(err, r.release()))
		}
	}()
	// This comes first, so that there is one relay at a time.
	if r.listener, err = net.Listen("unix", relayAddress); err != nil {
		return nil, err
	}
	if r.paths, err = pathMap(); err != nil {
		return nil, err
	}
	entries, err := entriesOf(r.paths)
	if err != nil {
		return nil, err
	}
	if r.counts, err = r.paths.Memory(); err != nil {
		return nil, fmt.Errorf("map %s: %w", bpf.ImpairMapXspinPaths, err)
	}
	// Subscribe before looking for the devices, so that no removal is missed.
	updates := make(chan netlink.LinkUpdate, 16)
	if err := netlink.LinkSubscribe(updates, r.unwatch); err != nil {
		return nil, fmt.Errorf("watch devices: %w", err)
	}
	links, err := links(true)
	if err != nil {
		return nil, err
	}
	if r.relays, err = mapOf(ebpf.ProgramID(links[waitNIC].Attrs().Xdp.ProgId), bpf.ImpairMapXspinRelays); err != nil {
		return nil, fmt.Errorf("XDP program of %s: %w", waitNIC, err)
	}
	for i, w := range ways {
		if entries[i].Set.Delay == 0 {
			continue
		}
		l, err := openLane(&entries[i], links[w.leave], links[w.out])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", w.direction, err)
		}
		r.lanes = append(r.lanes, l)
		l.publish = func(c relayed) { r.store(w.slot, c) }
		if err := r.relays.Put(w.slot, uint32(l.rx.FD())); err != nil {
			return nil, fmt.Errorf("%s: put socket into map %s: %w", w.direction, bpf.ImpairMapXspinRelays, err)
		}
	}

	go r.serve()
	ended := make(chan error, len(r.lanes))
	for _, l := range r.lanes {
		go func() { ended <- l.run() }()
	}
	go r.watch(links, updates)
	go func() {
		for range r.lanes {
			err := <-ended
			r.err = errors.Join(r.err, err)
			r.stop() // one lane alone is useless
		}
		r.err = errors.Join(r.err, r.release())
		close(r.done)
	}()
	return r, nil
}

// Wait waits until the relay has ended, and returns why: nil after Close, and if the
// devices are gone.
func (r *Relay) Wait() error {
	<-r.done
	return r.err
}

// Close ends the relay and waits for it. Frames that wait are lost.
func (r *Relay) Close() error {
	if r == nil {
		return nil
	}
	r.stop()
	return r.Wait()
}

func (r *Relay) stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.released {
		return
	}
	for _, l := range r.lanes {
		l.interrupt()
	}
}

// release releases everything. The listener is last, because others take it as a sign
// that the relay runs.
func (r *Relay) release() error {
	r.mu.Lock()
	r.released = true
	r.mu.Unlock()
	var errs []error
	for _, l := range r.lanes {
		errs = append(errs, l.close())
	}
	close(r.unwatch)
	errs = append(errs, r.paths.Close(), r.relays.Close())
	if r.listener != nil {
		errs = append(errs, r.listener.Close())
	}
	return errors.Join(errs...)
}

// serve keeps connections of DialRelay open until the relay ends.
func (r *Relay) serve() {
	for {
		c, err := r.listener.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			gone := make(chan struct{})
			go func() { _, _ = io.Copy(io.Discard, c); close(gone) }()
			select {
			case <-gone:
			case <-r.done:
			}
		}()
	}
}

// watch stops the relay when a device is removed.
func (r *Relay) watch(links map[string]netlink.Link, updates <-chan netlink.LinkUpdate) {
	for u := range updates {
		for _, l := range links {
			if u.Header.Type == unix.RTM_DELLINK && int(u.Index) == l.Attrs().Index {
				r.stop()
			}
		}
	}
	r.stop() // unsubscribed, or events were lost and a removal might be missed
}

// relayed mirrors struct xspin_relayed.
type relayed struct{ delayed, reordered, overflowed, sent uint64 }

// store writes the counters of a direction into the map.
func (r *Relay) store(slot uint32, c relayed) {
	var e settings
	var b [4 * 8]byte
	for i, v := range []uint64{c.delayed, c.reordered, c.overflowed, c.sent} {
		binary.NativeEndian.PutUint64(b[i*8:], v)
	}
	_, _ = r.counts.WriteAt(b[:], int64(uintptr(slot)*unsafe.Sizeof(e)+unsafe.Offsetof(e.Relay)))
}

// The layout of struct xspin_wait_meta, which is in front of a frame.
const (
	metaSize    = 16
	metaArrived = 0
	metaFlow    = 8
)

const (
	fillSize = 8192 // frames for arrivals while the lane sleeps
	batch    = 64
	// grain is the least time between two rounds of a lane: frames leave in batches,
	// and late by at most that much.
	grain = 100 * time.Microsecond
	// longest is the longest sleep while frames wait. In that time, no more frames
	// should arrive than the rings hold.
	longest = time.Millisecond
)

// A lane is one direction of a relay. It belongs to its thread, except for interrupt.
type lane struct {
	set  setting
	umem *xsk.UMEM
	rxq  *xsk.Queue
	rx   *xsk.Socket
	tx   []*exit
	wake int // eventfd
	stop atomic.Bool

	express line       // reordered frames, which leave at once
	waiting line       // the others
	frame   []xsk.Desc // being received; a batch may end inside it
	leaving []xsk.Desc // being sent
	arrived int64      // when the frame being received arrived
	flow    uint32     // of that frame
	seen    uint64     // frames received
	free    []uint64   // buffers that are neither waiting nor the kernel's
	count   relayed
	late    uint64 // frames that the kernel dropped, part of count.overflowed
	looked  int64  // when that was last read, ns
	publish func(relayed)

	descs [batch]xsk.Desc
	addrs [batch]uint64
}

type setting struct {
	key, reorder uint64
	delay        int64
}

// An exit is a transmit queue of the device that frames leave by.
type exit struct {
	q    *xsk.Queue
	s    *xsk.Socket
	out  []xsk.Desc // not yet on the ring
	held int        // sent and not complete
}

// capacity is how many buffers may wait: enough for what arrives during the delay, at the
// rate or else at 10 Gbit/s, and half as much again, within bounds.
func capacity(delay time.Duration, rate uint64, mtu int) int {
	if rate == 0 {
		rate = 10_000_000_000
	}
	frames := 1.5 * float64(rate) / 8 * delay.Seconds() / float64(min(mtu+ethHeader, bufferSize(mtu)-xsk.PacketHeadroom))
	n := 1 << bits.Len(uint(frames))
	return min(max(n, 1<<14), 1<<17)
}

// bufferSize is the size of a buffer that holds a whole frame, or the largest one.
func bufferSize(mtu int) int {
	if mtu+ethHeader+vlanTag <= 2048-xsk.PacketHeadroom {
		return 2048
	}
	return 4096
}

const vlanTag = 4

func openLane(e *settings, from, to netlink.Link) (_ *lane, err error) {
	mtu, queues := to.Attrs().MTU, to.Attrs().NumTxQueues
	room := capacity(time.Duration(e.Set.Delay), e.Set.Rate, mtu)
	l := &lane{
		// A stream of decisions other than the program's.
		set:     setting{key: mix(^e.Set.Key), reorder: e.Set.Reorder, delay: int64(e.Set.Delay)},
		express: newLine(1024),
		waiting: newLine(room),
		count:   relayed{e.Relay.Delayed, e.Relay.Reordered, e.Relay.Overflowed, e.Relay.Sent},
		wake:    -1,
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close())
		}
	}()
	if l.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	// Buffers for waiting frames, for the fill ring, and as many for frames being sent.
	frames := room + 2*fillSize
	if l.umem, err = xsk.NewUMEM(xsk.UMEMConfig{Frames: frames, FrameSize: bufferSize(mtu)}); err != nil {
		return nil, err
	}
	for i := range frames {
		l.free = append(l.free, l.umem.Addr(i))
	}
	initial := l.free[frames-fillSize:]
	l.rxq, l.rx, err = l.umem.OpenQueue(xsk.QueueConfig{
		Ifindex: from.Attrs().Index, FillSize: fillSize, CompletionSize: batch, Mode: xsk.Copy, Initial: initial,
	}, xsk.SocketConfig{RxSize: fillSize})
	if err != nil {
		return nil, err
	}
	l.free = l.free[:frames-fillSize]
	size := max(2048>>bits.Len(uint(queues-1)), batch)
	for i := range queues {
		x := &exit{out: make([]xsk.Desc, 0, batch)}
		x.q, x.s, err = l.umem.OpenQueue(xsk.QueueConfig{
			Ifindex: to.Attrs().Index, Queue: i, FillSize: batch, CompletionSize: 4 * size, Mode: xsk.Copy,
		}, xsk.SocketConfig{TxSize: size})
		if err != nil {
			return nil, err
		}
		l.tx = append(l.tx, x)
	}
	return l, nil
}

func (l *lane) close() error {
	var errs []error
	for _, x := range l.tx {
		errs = append(errs, x.s.Close())
	}
	errs = append(errs, l.rx.Close(), l.umem.Close())
	if l.wake >= 0 {
		unix.Close(l.wake)
		l.wake = -1
	}
	return errors.Join(errs...)
}

// interrupt ends run.
func (l *lane) interrupt() {
	l.stop.Store(true)
	_, _ = unix.Write(l.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
}

// run moves frames until interrupt.
func (l *lane) run() error {
	runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1000, 0, 0, 0)
	// Delays should not depend on the load. Without the privilege, do without.
	_ = unix.Setpriority(unix.PRIO_PROCESS, 0, -10)
	for {
		l.receive()
		now := clock.Monotonic()
		blocked := l.send(now)
		l.refill()
		if now-l.looked > int64(10*time.Millisecond) || l.waiting.first() == nil {
			l.look(now)
		}
		l.publish(l.count)
		if err := l.rx.Err(); err != nil {
			return err
		}
		if err := l.sleep(blocked); err != nil {
			return err
		}
		if l.stop.Load() {
			return nil
		}
	}
}

// receive takes what has arrived, half a ring at most.
func (l *lane) receive() {
	for range fillSize / 2 / batch {
		n := l.rx.Receive(l.descs[:])
		for _, d := range l.descs[:n] {
			if len(l.frame) == 0 {
				l.arrived, l.flow = l.meta(d)
			}
			l.frame = append(l.frame, d)
			if d.Options&xsk.Continued == 0 {
				l.admit()
				l.frame = l.frame[:0]
			}
		}
		if n < len(l.descs) {
			return
		}
	}
}

// look counts the frames that the kernel dropped because the lane was late.
func (l *lane) look(now int64) {
	l.looked = now
	if st, err := l.rx.Stats(); err == nil {
		dropped := st.RxDropped + st.RxRingFull
		l.count.overflowed += dropped - l.late
		l.late = dropped
	}
}

// meta reads what the program left in front of a frame.
func (l *lane) meta(d xsk.Desc) (arrived int64, flow uint32) {
	m := l.umem.Front(d.Addr, metaSize)
	if m == nil {
		return clock.Monotonic(), 0
	}
	return int64(binary.NativeEndian.Uint64(m[metaArrived:])), binary.NativeEndian.Uint32(m[metaFlow:])
}

// admit queues the frame that was received, and decides how long it waits.
func (l *lane) admit() {
	n := l.seen
	l.seen++
	queue, due, counter := &l.waiting, l.arrived+l.set.delay, &l.count.delayed
	if happens(l.set.key, n, l.set.reorder) {
		queue, due, counter = &l.express, 0, &l.count.reordered
	}
	if !queue.push(due, l.flow, l.frame) {
		counter = &l.count.overflowed
		for _, d := range l.frame {
			l.free = append(l.free, d.Addr)
		}
	}
	*counter++
}

// send sends what is due. blocked says that some of it could not be sent yet.
func (l *lane) send(now int64) (blocked bool) {
	for _, queue := range [...]*line{&l.express, &l.waiting} {
		for s := queue.first(); s != nil && s.due <= now; s = queue.first() {
			x := l.tx[s.flow%uint32(len(l.tx))]
			l.leaving = queue.frame(l.leaving[:0])
			if len(x.out)+len(l.leaving) > batch && !l.flush(x) {
				break // the others of the line wait too, to keep their order
			}
			x.out = append(x.out, l.leaving...)
			queue.drop(len(l.leaving))
			l.count.sent++
		}
	}
	for _, x := range l.tx {
		if !l.flush(x) {
			blocked = true
		}
	}
	return blocked
}

// flush has the kernel send what x holds, and reports whether it took everything.
func (l *lane) flush(x *exit) bool {
	for len(x.out) > 0 || x.s.TxOutstanding() > 0 {
		n := x.s.Send(x.out)
		x.held += n
		x.out = x.out[:copy(x.out, x.out[n:])]
		before := x.s.TxOutstanding()
		// A device that is down may come up again, so it is treated like one
		// whose ring is full.
		_, _ = x.s.Kick()
		l.complete(x)
		if n == 0 && x.s.TxOutstanding() >= before {
			return false
		}
	}
	if x.held > 0 {
		l.complete(x)
	}
	return true
}

// complete takes buffers back that have been sent.
func (l *lane) complete(x *exit) {
	for {
		_, n := x.q.Exchange(nil, l.addrs[:])
		l.free = append(l.free, l.addrs[:n]...)
		x.held -= n
		if n < len(l.addrs) {
			return
		}
	}
}

// refill gives buffers to the kernel to receive into.
func (l *lane) refill() {
	for len(l.free) > 0 {
		last := l.free[max(len(l.free)-batch, 0):]
		n, _ := l.rxq.Exchange(last, nil)
		l.free = l.free[:len(l.free)-len(last)+copy(last, last[n:])]
		if n < batch {
			return
		}
	}
}

// sleep waits until there is something to do.
func (l *lane) sleep(blocked bool) error {
	fds := []unix.PollFd{{Fd: int32(l.wake), Events: unix.POLLIN}, {Fd: int32(l.rx.FD()), Events: unix.POLLIN}}
	var timeout *unix.Timespec
	if s := l.waiting.first(); s != nil || blocked {
		d := grain
		if !blocked {
			d = max(min(time.Duration(s.due-clock.Monotonic()), longest), l.grain())
			if l.set.reorder > 0 {
				d = l.grain()
			}
		}
		ts := unix.NsecToTimespec(int64(d))
		timeout, fds = &ts, fds[:1] // arrivals need not wake the lane
	}
	_, err := unix.Ppoll(fds, timeout, nil)
	if err != nil && err != unix.EINTR {
		return os.NewSyscallError("ppoll", err)
	}
	return nil
}

// grain is the constant grain, or less for short delays.
func (l *lane) grain() time.Duration {
	return min(grain, max(time.Duration(l.set.delay)/16, 20*time.Microsecond))
}
