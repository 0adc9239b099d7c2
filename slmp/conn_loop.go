// SPDX-License-Identifier: Apache-2.0

package slmp

import (
	"errors"
	"fmt"
	"net"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/internal/clock"
)

// run is the loop: submissions, acknowledgements, segments, ended messages, and
// sleep when there is none of them.
func (c *Conn) run() {
	for {
		if c.attention.Load() && c.attention.Swap(false) && c.intake() {
			break
		}
		now := clock.Monotonic()
		received := c.receive(now)
		sent := c.transmit(now)
		c.collect()
		if !received && !sent {
			c.wait()
		}
	}
	c.stats = c.snapshot()
	c.mu.Lock()
	asks := c.asks
	c.ended = true
	unix.Close(c.wake)
	c.mu.Unlock()
	for _, a := range asks {
		a <- c.stats
	}
	c.sock.close()
	close(c.over)
}

// intake takes over what others have left. It returns true, all messages ended,
// when the connection was closed.
func (c *Conn) intake() (closed bool) {
	c.mu.Lock()
	c.inbox, c.taken = c.taken[:0], c.inbox
	c.cancel, c.gone = c.gone[:0], c.cancel
	asks := c.asks
	c.asks = nil
	closed = c.closed
	c.mu.Unlock()

	for _, m := range c.taken {
		c.begin(m)
	}
	clear(c.taken)
	for _, m := range c.gone {
		if m.out == nil {
			continue
		}
		m.out.Abandon(m.abort)
		if i := slices.Index(c.leaving, m.out); i >= 0 {
			c.leaving = slices.Delete(c.leaving, i, i+1)
			c.finish(m, m.abort)
		}
	}
	clear(c.gone)
	for _, m := range c.spools {
		c.supply(m)
	}
	for _, a := range asks {
		a <- c.snapshot()
	}
	if closed {
		c.endAll(net.ErrClosed)
		c.collect()
	}
	return closed
}

// begin gives m its id. Ids follow one another, so that none comes again on this port
// before 2^32 others. See firstID for later connections from the same port.
func (c *Conn) begin(m *message) {
	var err error
	for m.out, err = c.sender.Open(c.nextID); errors.Is(err, ErrInUse); m.out, err = c.sender.Open(c.nextID) {
		c.nextID++ // by a message as old as 2^32 others
	}
	c.nextID++
	m.out.Data = m
	if m.watch {
		c.watched = append(c.watched, m)
	}
	if m.spool != nil {
		c.spools = append(c.spools, m) // intake continues with supply
		return
	}
	m.out.Supply(m.size, true)
}

// supply tells the Sender what has come from the stream of m.
func (c *Conn) supply(m *message) {
	ended := m.spool.ended.Load() // before filled, which is then the last
	m.size = m.spool.filled.Load()
	if ended && m.spool.err != nil {
		m.out.Abandon(m.spool.err)
		return
	}
	if ended {
		m.total.Store(m.size)
	}
	m.out.Supply(m.size, ended)
}

// receive takes the acknowledgements that have come. False: there were none.
func (c *Conn) receive(now int64) (some bool) {
	for range rxBatches {
		n, errno := c.sock.receive()
		if errno == unix.EAGAIN || errno == unix.EINTR {
			break
		}
		if errno != 0 {
			return c.trouble(errno) || some
		}
		for i := range n {
			// An error is one more in the Sender's counters; the datagram is
			// none of ours, or damaged.
			if c.sender.Acknowledge(c.sock.datagram(i), now) == nil {
				c.refused = 0
			}
		}
		some, c.heard = true, now
		if n < rxBatch {
			break
		}
	}
	if some {
		c.publish()
	}
	return some
}

func (c *Conn) snapshot() ConnStats {
	st := c.stats
	st.SenderStats, st.Payload, st.Offload = c.sender.Stats(), c.payload, c.sock.offload
	return st
}

// publish lets those who read a stream, or watch a message, know how far it is.
func (c *Conn) publish() {
	for _, m := range c.spools {
		m.spool.free(m.out.Unacked())
	}
	for _, m := range c.watched {
		m.acked.Store(c.done(m))
		m.segments.Store(m.out.Segments())
		m.again.Store(m.out.Retransmitted())
	}
}

// done returns how many bytes of m are acknowledged, or sent if the mode does not
// tell.
func (c *Conn) done(m *message) uint64 {
	if c.cfg.Mode == EverySegment {
		return m.out.Acked()
	}
	return min(m.out.Segments()*uint64(c.payload), m.size)
}

// transmit sends what is due, one stage of it. False: there was nothing, or the
// kernel has no room.
func (c *Conn) transmit(now int64) bool {
	if c.blocked || now < c.nap {
		c.sender.expire(now) // time passes for those who wait, too
		if t := c.stuckAt(); t != 0 && now >= t {
			c.endAll(fmt.Errorf("to %s: %w: the socket's buffer has had no room for %v", c.sock.remote, ErrSilent, time.Duration(now-c.blockedAt).Round(time.Millisecond)))
		}
		return false
	}
	c.nap = 0
	if c.sock.empty() {
		c.sock.clear()
		c.full = 0
		n := c.sender.Next(c.outs[:c.sock.room(HeaderLen+c.payload)], now)
		if n == 0 {
			return false
		}
		c.load(c.outs[:n])
		if c.cfg.Mode != EverySegment {
			c.publish() // that is how far it is: no acknowledgement will tell
		}
	}
	failed := 0
	for {
		c.stats.SystemCalls++
		before := c.sock.out
		errno := c.sock.flush()
		if c.sock.out != before {
			c.full = 0
		}
		switch errno {
		case 0:
			return true
		case unix.EAGAIN:
			c.blocked, c.blockedAt = true, now
			return false
		case unix.ENOBUFS, unix.ENOMEM:
			c.noBuffers(errno)
			return false
		}
		// Often it is the answer to a datagram sent earlier, and this one was
		// not tried. A second time in a row it is about this one.
		if failed++; failed > 1 {
			c.sock.drop()
			failed = 0
		}
		if c.trouble(errno) {
			return true
		}
	}
}

// stuckAt returns when messages end that wait for room in the socket, 0 for never. A
// slow link brings acknowledgements, though room only when half of the buffer is empty.
// Without acknowledgements a full buffer is how a sender learns how fast it may be.
func (c *Conn) stuckAt() int64 {
	if !c.blocked || c.cfg.Mode == Unacknowledged || len(c.sender.messages) == 0 {
		return 0
	}
	return max(c.blockedAt, c.heard) + int64(c.sender.c.Patience)
}

// noBuffers naps, the longer the longer the device takes nothing. When that cannot be a
// queue that empties any more, the datagram that was refused counts as lost: a timer
// sends its segments again, or ends the message, and others may have more luck. Without
// acknowledgements nobody would send it again: then the device has Patience.
func (c *Conn) noBuffers(errno unix.Errno) {
	now := clock.Monotonic()
	if c.full == 0 {
		c.full, c.doze = now, int64(minNap)
	}
	c.nap = now + c.doze
	c.doze = min(2*c.doze, int64(maxNap))
	c.passing = errno
	if c.cfg.Mode == Unacknowledged {
		if now-c.full >= int64(c.sender.c.Patience) {
			c.endAll(fmt.Errorf("the device has taken nothing for %v: %w", time.Duration(now-c.full).Round(time.Millisecond), errno))
		}
		return
	}
	if now-c.full >= int64(fullLimit) {
		c.sock.drop()
	}
}

// load stages the segments with their bytes. Those of one message that follow
// one another are read from a file together.
func (c *Conn) load(outs []Outbound) {
	for len(outs) > 0 {
		m := outs[0].Message.Data.(*message)
		if b := m.inPlace(uint64(outs[0].Header.Offset), outs[0].Len); b != nil {
			outs[0].Header.Put(c.sock.stageWith(b))
			outs = outs[1:]
			continue
		}
		first, total, n := outs[0].Header.Offset, outs[0].Len, 1
		for m.at != nil && n < len(outs) && outs[n].Message == outs[0].Message && outs[n].Header.Offset == first+uint32(total) {
			total += outs[n].Len
			n++
		}
		run := outs[:n]
		outs = outs[n:]
		if m.isFile() {
			if err := c.loadFile(m, run, total); err != nil {
				m.out.Abandon(err)
			}
			continue
		}
		var data []byte
		var err error
		if n > 1 {
			if cap(c.scratch) < total {
				c.scratch = make([]byte, len(c.sock.buf))
			}
			data = c.scratch[:total]
			err = m.read(data, uint64(first))
		}
		for _, o := range run {
			if err != nil {
				break
			}
			b := c.sock.stage(HeaderLen + o.Len)
			o.Header.Put(b)
			if n > 1 {
				copy(b[HeaderLen:], data)
				data = data[o.Len:]
			} else if err = m.read(b[HeaderLen:], uint64(first)); err != nil {
				c.sock.unstage(HeaderLen + o.Len)
			}
		}
		if err != nil {
			m.out.Abandon(err)
		}
	}
}

// loadFile stages a run of segments of a message that is a file, by one call.
func (c *Conn) loadFile(m *message, run []Outbound, total int) error {
	iovs := c.sock.iovs[:0] // seal fills them in
	for _, o := range run {
		b := c.sock.stage(HeaderLen + o.Len)
		o.Header.Put(b)
		if o.Len > 0 {
			v := unix.Iovec{Base: &b[HeaderLen]}
			v.SetLen(o.Len)
			iovs = append(iovs, v)
		}
	}
	err := m.scatter(iovs, uint64(run[0].Header.Offset), total)
	for i := len(run) - 1; err != nil && i >= 0; i-- {
		c.sock.unstage(HeaderLen + run[i].Len)
	}
	return err
}

// collect gives ended messages back to those who submitted them. Without
// acknowledgements a message has ended well when the last of it is sent, which it is not
// while something is staged.
func (c *Conn) collect() {
	for o := c.sender.Finished(); o != nil; o = c.sender.Finished() {
		if c.cfg.Mode == Unacknowledged && o.Err() == nil && !c.sock.empty() {
			c.leaving = append(c.leaving, o)
			continue
		}
		c.finish(o.Data.(*message), o.Err())
	}
	if c.sock.empty() {
		c.leave(nil)
	}
}

// leave ends the messages that were waiting for the stage.
func (c *Conn) leave(err error) {
	for _, o := range c.leaving {
		c.finish(o.Data.(*message), err)
	}
	clear(c.leaving)
	c.leaving = c.leaving[:0]
}

// finish gives m back, with its bytes, of which none may be staged any more.
func (c *Conn) finish(m *message, err error) {
	o := m.out
	defer c.sender.Recycle(o)
	if !c.sock.empty() {
		c.sock.remove(o.ID())
	}
	if err != nil {
		if errors.Is(err, ErrSilent) && c.passing != 0 {
			err = fmt.Errorf("%w. Last error from the network: %w%s", err, c.passing, hint(c.passing))
		}
		err = c.explain(err)
	} else {
		c.passing = 0
	}
	if posted := m.posted; posted != nil {
		m.bytes, m.posted, m.out = nil, nil, nil
		c.mu.Lock()
		c.spare = append(c.spare, m)
		c.mu.Unlock()
		posted(err)
		return
	}
	if m.spool != nil {
		c.spools = without(c.spools, m)
	}
	if m.watch {
		c.watched = without(c.watched, m)
	}
	st := c.sender.Stats()
	m.result = Result{
		ID: m.out.ID(), Bytes: c.done(m), Segments: m.out.Segments(), Retransmitted: m.out.Retransmitted(),
		Duration: time.Duration(clock.Monotonic() - m.begun),
		RTT:      RTT{st.RTT, st.RTTVar, st.MinRTT},
	}
	if err == nil {
		m.result.Bytes = m.size
	}
	m.acked.Store(m.result.Bytes)
	m.segments.Store(m.result.Segments)
	m.again.Store(m.result.Retransmitted)
	m.out, m.err = nil, err
	close(m.done)
}

// hint says where to look for the reason of an error that might have passed.
func hint(errno unix.Errno) string {
	switch errno {
	case unix.EPERM:
		return " (a local firewall, or its full connection table, refuses segments)"
	case unix.ENOBUFS, unix.ENOMEM:
		return " (the device drops them: its queue is full, or the other end of the link has a smaller MTU)"
	}
	return ""
}

func without(list []*message, m *message) []*message {
	if i := slices.Index(list, m); i >= 0 {
		return slices.Delete(list, i, i+1)
	}
	return list
}

// trouble judges an error of the socket. It returns true when it has ended all
// messages.
func (c *Conn) trouble(errno unix.Errno) bool {
	if _, stale := c.sock.drainErrors(c.isOpen); stale {
		return false
	}
	return c.judge(errno)
}

func (c *Conn) judge(errno unix.Errno) bool {
	switch errno {
	case unix.ECONNREFUSED:
		if now := clock.Monotonic(); c.refused == 0 || now-c.refusedAt >= int64(refusedGap) {
			c.refused, c.refusedAt = c.refused+1, now
		}
		if c.refused < refusedLimit && c.sender.Stats().Acks > 0 {
			return false
		}
		c.endAll(fmt.Errorf("%w on UDP port %d of %s: %w: %s", ErrRefused, c.sock.remote.Port(), c.sock.remote.Addr(), errno, c.refusal()))
	case unix.EMSGSIZE, unix.EINVAL:
		return c.shrink(errno)
	case unix.EHOSTUNREACH, unix.ENETUNREACH, unix.EHOSTDOWN, unix.ENETDOWN, unix.EPROTO, unix.EPERM:
		// May pass: a segment was lost, no more. If it does not pass, the error
		// of the message says this.
		c.passing = errno
		return false
	case unix.EACCES:
		c.endAll(fmt.Errorf("send: %w: a route or security policy refuses it", errno))
	default:
		c.endAll(fmt.Errorf("UDP socket: %w", errno))
	}
	return true
}

// pageFrame is about how many bytes of a frame a driver puts into one buffer, a page with
// what Linux keeps in it. Handlers in eBPF at xdp get no longer ones.
const pageFrame = 3520

// refusal says what it may mean that nobody listens.
func (c *Conn) refusal() string {
	s := "check port and address, and that a receiver runs there"
	const headers = 14 + 20 + 8 + HeaderLen // of IPv4: handlers in eBPF take no other
	if frame := c.payload + headers; frame > pageFrame && c.sock.remote.Addr().Unmap().Is4() {
		s += fmt.Sprintf(". If one does at hook xdp, its NIC has left the segments to Linux: their frames have %d bytes, and handlers in eBPF get those of up to some %d there. Send segments with a payload of at most %d, or lower the MTU", frame, pageFrame, pageFrame-headers)
	}
	return s
}

func (c *Conn) isOpen(id uint32) bool { return c.sender.messages[id] != nil }

// endAll ends all messages that are open. What is staged is theirs.
func (c *Conn) endAll(err error) {
	c.sock.clear()
	c.blocked, c.nap = false, 0
	c.leave(err)
	for _, o := range c.sender.messages {
		o.Abandon(err)
	}
}

// wait looks for acknowledgements for a while, as long as that has proved
// worthwhile lately, and then sleeps until there is something to do. When
// nothing is on its way it sleeps at once, for as long as it takes.
func (c *Conn) wait() {
	begin := clock.Monotonic()
	until := c.sender.Deadline()
	switch {
	case c.blocked:
		until = c.sender.timer() // nothing can go, however due it is
		if t := c.stuckAt(); t != 0 && (until == 0 || t < until) {
			until = t
		}
	case c.nap != 0:
		until = c.nap
	}
	spinning := len(c.sender.messages) > 0 && !c.blocked && !c.alone
	now := begin
	if spinning {
		for ; now < begin+c.spin; now = clock.Monotonic() {
			if c.receive(now) {
				c.spin = min(2*c.spin, int64(maxSpin))
				return
			}
			if c.attention.Load() || until != 0 && now >= until {
				return
			}
		}
		if until != 0 && until-now < int64(timerSlack) {
			return // to come back here until it is time
		}
	}
	var timeout *unix.Timespec
	if until != 0 {
		d := until - now
		if spinning {
			d -= int64(timerSlack)
		}
		c.timeout = unix.NsecToTimespec(max(d, 0))
		timeout = &c.timeout
	}
	if c.alone {
		// Whoever was just given a message back runs first: a system call keeps the
		// only CPU from other goroutines for up to 10 ms.
		runtime.Gosched()
	}
	c.asleep.Store(true)
	if c.attention.Load() {
		c.asleep.Store(false)
		return
	}
	if c.sleep(timeout) {
		if clock.Monotonic()-begin < int64(maxSpin) {
			c.spin = min(max(2*c.spin, minSpin), int64(maxSpin))
		} else if c.spin /= 2; c.spin < minSpin {
			c.spin = 0
		}
	}
}

// sleep returns true when the socket has ended it.
func (c *Conn) sleep(timeout *unix.Timespec) bool {
	c.pollFds[0].Events = unix.POLLIN
	if c.blocked {
		c.pollFds[0].Events |= unix.POLLOUT
	}
	c.pollFds[0].Revents, c.pollFds[1].Revents = 0, 0
	c.stats.Sleeps++
	n, err := unix.Ppoll(c.pollFds[:], timeout, nil)
	c.asleep.Store(false)
	if err != nil || n == 0 {
		return false
	}
	if c.pollFds[1].Revents != 0 {
		var count [8]byte
		_, _ = unix.Read(c.wake, count[:])
	}
	got := c.pollFds[0].Revents
	if got&unix.POLLOUT != 0 {
		c.blocked = false
	}
	if got&unix.POLLERR != 0 {
		// Also left over from a send or receive that told a good part.
		if errno, stale := c.sock.drainErrors(c.isOpen); errno != 0 && !stale {
			c.judge(errno)
		}
	}
	return got&unix.POLLIN != 0
}

// shrink looks whether the path's MTU is behind errno: then new messages go in
// smaller segments, and the open ones, whose cuts are made, end.
func (c *Conn) shrink(errno unix.Errno) bool {
	before := c.payload
	if err := c.measure(); err != nil {
		c.endAll(err)
		return true
	}
	if c.payload >= before {
		c.passing = errno
		return false
	}
	c.endAll(fmt.Errorf("%w: they are %d bytes, %d fit now: %w", ErrPathMTU, before, c.payload, errno))
	c.collect()
	s, err := NewSender(c.senderConfig())
	if err != nil {
		panic(err) // the same was good but for the payload, and measure sees to that
	}
	c.sender = s
	return true
}

// measure sets payload from the configuration and the path.
func (c *Conn) measure() error {
	fits, mtu, err := c.sock.payload()
	if err != nil {
		return err
	}
	p := fits
	if c.cfg.Payload > 0 {
		p = c.cfg.Payload
	}
	align := max(c.cfg.Align, 1)
	p -= p % align
	switch {
	case p < 1:
		return fmt.Errorf("payload %d aligned to %d: no byte of a message is left", max(c.cfg.Payload, fits), align)
	case p > fits:
		return fmt.Errorf("payload %d: a path MTU of %d leaves room for %d: %w", p, mtu, fits, unix.EMSGSIZE)
	}
	c.payload = p
	return nil
}
