// SPDX-License-Identifier: Apache-2.0

package neigh

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/matcher"
)

// groups of rtnetlink that are listened to.
const groups = 1<<(unix.RTNLGRP_LINK-1) | 1<<(unix.RTNLGRP_NEIGH-1) |
	1<<(unix.RTNLGRP_IPV4_IFADDR-1) | 1<<(unix.RTNLGRP_IPV6_IFADDR-1) |
	1<<(unix.RTNLGRP_IPV4_ROUTE-1) | 1<<(unix.RTNLGRP_IPV6_ROUTE-1)

// again is when something is tried again that the kernel has refused.
const again = time.Second

// subscribe opens a socket on which the kernel tells what changes.
func subscribe() (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("subscribe to changes of routes and neighbours: %w", err)
	}
	return os.NewFile(uintptr(fd), "rtnetlink"), nil
}

// listen hands on what the kernel tells, until Close. An empty message says that
// some was lost.
func (r *Resolver) listen() {
	conn, err := r.sub.SyscallConn()
	if err != nil {
		return // closed already
	}
	buf := make([]byte, 64<<10)
	for {
		var n int
		var from unix.Sockaddr
		var errno error
		err := conn.Read(func(fd uintptr) bool {
			n, from, errno = unix.Recvfrom(int(fd), buf, 0)
			return !errors.Is(errno, unix.EAGAIN)
		})
		var m []byte
		switch k, ok := from.(*unix.SockaddrNetlink); {
		case err != nil:
			return
		case errors.Is(errno, unix.EINTR):
			continue
		case errors.Is(errno, unix.ENOBUFS): // it had more to tell than fits the socket
		case errno != nil: // what was to be told is lost, whatever it is
			r.logger.Warn("changes of routes and neighbours cannot be read: reading all of them again", "interface", r.name, "err", errno)
			select {
			case <-time.After(again):
			case <-r.done:
				return
			}
		case !ok || k.Pid != 0: // not the kernel
			continue
		default:
			m = append(m, buf[:n]...)
		}
		select {
		case r.news <- m:
		case <-r.done:
			return
		}
	}
}

// hear takes in what the kernel has told.
func (r *Resolver) hear(b []byte) {
	if len(b) == 0 {
		r.unsure = false
		if err := r.load(); err != nil {
			// Without what was lost, nothing is sure: ask for all of it again.
			clear(r.table)
			r.fail(err)
		}
		r.recheckAll()
		return
	}
	msgs, err := syscall.ParseNetlinkMessage(b)
	if err != nil {
		r.fail(fmt.Errorf("news of %d bytes: %w", len(b), err))
		return
	}
	for i := range msgs {
		switch m := &msgs[i]; m.Header.Type {
		case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
			if index, ok := word(m.Data, 4, unix.SizeofNdMsg); ok && index == r.index {
				if n, err := netlink.NeighDeserialize(m.Data); err == nil {
					r.changed(n, m.Header.Type == unix.RTM_DELNEIGH)
				}
			}
		case unix.RTM_NEWLINK:
			if index, ok := word(m.Data, 4, unix.SizeofIfInfomsg); ok && index == r.index {
				r.fail(r.loadLink())
				r.recheckAll()
			}
		case unix.RTM_DELLINK:
			// Of family AF_BRIDGE it is a port that leaves its bridge.
			if index, ok := word(m.Data, 4, unix.SizeofIfInfomsg); ok && index == r.index && m.Data[0] == unix.AF_UNSPEC {
				r.lost()
				r.recheckAll()
			}
		case unix.RTM_NEWADDR, unix.RTM_DELADDR:
			if index, ok := word(m.Data, 4, unix.SizeofIfAddrmsg); ok && index == r.index {
				r.fail(r.loadAddrs())
			}
			r.recheckAll()
		case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
			r.recheckAll()
		}
	}
}

// fail takes note of what could not be read, if the interface is still there: all is read
// again after a while.
func (r *Resolver) fail(err error) {
	select {
	case <-r.gone:
		return
	default:
	}
	if err == nil || r.unsure {
		return
	}
	r.unsure = true
	r.logger.Warn("routes and neighbours cannot be read: trying again", "interface", r.name, "err", err)
}

// lost says that the interface is gone: deleted, or in another network namespace.
func (r *Resolver) lost() {
	r.setState(Gone)
	r.loss.Do(func() { close(r.gone) })
}

// word reads a 32-bit word of a message that has size bytes at least.
func word(b []byte, off, size int) (int, bool) {
	if len(b) < size {
		return 0, false
	}
	return int(binary.NativeEndian.Uint32(b[off:])), true
}

// changed takes in what the kernel says of a neighbour.
func (r *Resolver) changed(k *netlink.Neigh, gone bool) {
	ip, ok := netip.AddrFromSlice(k.IP)
	if !ok {
		return
	}
	ip = ip.Unmap()
	n := neighbour{state: k.State}
	if copy(n.mac[:], k.HardwareAddr) != len(n.mac) {
		n.state &^= valid
	}
	switch {
	case gone:
		delete(r.table, ip)
		delete(r.pending, ip)
	case n.state&netlink.NUD_FAILED != 0:
		r.table[ip] = n
		delete(r.pending, ip)
		r.failed[ip] = failure{time.Now().Add(r.fails), fmt.Errorf("%w: %v on %s", ErrNeighbour, ip, r.link.Name)}
	default:
		r.table[ip] = n
		if n.state&valid != 0 {
			delete(r.failed, ip)
			delete(r.pending, ip)
		}
	}
	r.each(ip, func(dst netip.Addr, e *entry) {
		r.learn(e)
		r.settle(dst, e)
	})
}

// recheckAll has the routes to all destinations looked up again. Until then they
// stay what they were.
func (r *Resolver) recheckAll() {
	r.recheck = r.recheck[:0]
	all := *r.cache.Load()
	if r.next != nil {
		all = r.next
	}
	for dst := range all {
		r.recheck = append(r.recheck, dst)
	}
}

// load reads the interface and its neighbours.
func (r *Resolver) load() error {
	if err := r.loadLink(); err != nil {
		return err
	}
	if err := r.loadAddrs(); err != nil {
		return err
	}
	list, err := r.nl.NeighList(r.index, netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("list neighbours: %w", err)
	}
	clear(r.table)
	for i := range list {
		r.changed(&list[i], false)
	}
	return nil
}

func (r *Resolver) loadLink() error {
	l, err := r.nl.LinkByIndex(r.index)
	if err != nil {
		if errors.As(err, new(netlink.LinkNotFoundError)) {
			r.lost()
		}
		return fmt.Errorf("interface %d: %w", r.index, err)
	}
	r.link = *l.Attrs()
	r.setState(stateOf(r.link.RawFlags))
	r.mtu.Store(int64(r.link.MTU))
	if was := r.local.Load(); was != nil {
		r.move(was.Addrs)
	}
	return nil
}

// loadAddrs reads the addresses of the interface.
func (r *Resolver) loadAddrs() error {
	list, err := r.nl.AddrList(&netlink.Dummy{LinkAttrs: r.link}, netlink.FAMILY_ALL)
	for try := 0; errors.Is(err, netlink.ErrDumpInterrupted) && try < 8; try++ { // they have just changed
		list, err = r.nl.AddrList(&netlink.Dummy{LinkAttrs: r.link}, netlink.FAMILY_ALL)
	}
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	var addrs []netip.Addr
	for i := range list {
		if a, ok := netip.AddrFromSlice(list[i].IP); ok {
			addrs = append(addrs, a.Unmap())
		}
	}
	r.move(addrs)
	return nil
}

// move notes who the interface is, and says so if that is news.
func (r *Resolver) move(addrs []netip.Addr) {
	now := &matcher.Local{Addrs: addrs}
	copy(now.MAC[:], r.link.HardwareAddr)
	was := r.local.Swap(now)
	if was == nil || was.MAC == now.MAC && slices.Equal(was.Addrs, now.Addrs) {
		return
	}
	select {
	case r.moved <- struct{}{}:
	default:
	}
}

func stateOf(flags uint32) string {
	switch {
	case flags&unix.IFF_UP == 0:
		return Down
	case flags&unix.IFF_RUNNING == 0:
		return NoCarrier
	}
	return Up
}

func (r *Resolver) setState(s string) {
	old := r.state.Load()
	if old != nil && (*old == s || *old == Gone) {
		return // what has the number of an interface that is gone is another one
	}
	r.state.Store(&s)
	select {
	case r.turned <- struct{}{}:
	default:
	}
}
