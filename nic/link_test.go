// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/slmp"
)

// onLink does something with the device of an end of a lab.
func onLink(t testing.TB, p netns.Port, f func(netlink.Link) error) {
	t.Helper()
	err := p.NS.Do(func() error {
		l, err := netlink.LinkByIndex(p.Index)
		if err != nil {
			return err
		}
		return f(l)
	})
	if err != nil {
		t.Fatalf("%s: %v", p.Device, err)
	}
}

// askAll sends datagrams of a size, each with its number, and takes what comes back,
// until the test ends. It returns how many have come back.
func askAll(t testing.TB, lab *netns.Lab, port uint16, size int) *atomic.Uint64 {
	t.Helper()
	conn := dialUDP(t, lab, port)
	var back atomic.Uint64
	var wg sync.WaitGroup
	stop := make(chan struct{})
	t.Cleanup(func() {
		close(stop)
		conn.Close()
		wg.Wait()
	})
	wg.Go(func() {
		msg := bytes.Repeat([]byte("m"), size)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(100 * time.Microsecond):
			}
			copy(msg, fmt.Sprintf("%08d", i))
			_, _ = conn.Write(msg) // it fails while the link is down
		}
	})
	wg.Go(func() {
		b := make([]byte, 1<<16)
		for {
			k, err := conn.Read(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				continue // unreachable, while the link is down
			}
			if k != size || !bytes.Equal(b[8:k], bytes.Repeat([]byte("m"), size-8)) {
				t.Errorf("%d bytes %.20q came back, %d were sent", k, b[:k], size)
			}
			back.Add(1)
		}
	})
	return &back
}

// moves says that something is counted further.
func moves(t testing.TB, what string, n func() uint64) {
	t.Helper()
	before := n()
	eventually(t, what, func() bool { return n() > before+20 })
}

// Whoever takes the link down and up again, at either end and under traffic, has lost
// what was sent meanwhile, and nothing else: all buffers come back, and the counters say
// what happened.
func TestLinkGoesDownAndUpUnderTraffic(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 2, Workers: 2})
	udp := run(t, n, nic.ContextSpec{Name: "udp", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(echo)})
	w := newWitness(t, true)
	msgs := run(t, n, nic.ContextSpec{Name: "slmp", Rulesets: sets(matcher.SLMP()), Handlers: w.handlers(), Timeout: time.Minute})
	id := attached(t, lab)
	back := askAll(t, lab, 7, 900)
	conn := connect(t, lab, slmp.Port, slmp.Config{Patience: 30 * time.Second, MaxRTO: 50 * time.Millisecond})
	for _, p := range []netns.Port{lab.NIC, lab.Host} {
		t.Run(p.Device, func(t *testing.T) {
			for range 2 {
				moves(t, "datagrams come back", back.Load)
				data := noise(1 << 20)
				type result struct {
					id  uint32
					err error
				}
				sent, started := make(chan result, 1), messages(t, msgs).Started
				go func() {
					d, err := conn.SendBytes(patient(t), data, slmp.Options{})
					sent <- result{d.ID, err}
				}()
				eventually(t, "a message begins", func() bool { return messages(t, msgs).Started > started })
				onLink(t, p, netlink.LinkSetDown)
				handled := udp.Stats().Handled
				eventually(t, "nothing comes any more", func() bool {
					before := handled
					time.Sleep(20 * time.Millisecond)
					handled = udp.Stats().Handled
					return handled == before
				})
				onLink(t, p, netlink.LinkSetUp)
				moves(t, "datagrams come back", back.Load)
				r := <-sent
				if r.err != nil {
					t.Fatalf("a message through a link that was down for a moment: %v\n%+v\n%+v", r.err, conn.Stats(), messages(t, msgs))
				}
				w.check(messageID{conn.LocalAddr(), r.id}, data)
			}
			if now := attached(t, lab); now != id {
				t.Errorf("program %d is attached, it was %d", now, id)
			}
		})
	}
	accounted(t, n, udp, msgs)
}

// accounted stops contexts and says that every packet of theirs is counted once.
func accounted(t *testing.T, n *nic.NIC, contexts ...*nic.Context) {
	t.Helper()
	came := uint64(0)
	for _, c := range contexts {
		if err := n.Deactivate(c); err != nil {
			t.Error(err)
		}
		idle(t, c)
		s := c.Stats()
		if s.Failed+s.Panics+s.Overruns != 0 {
			t.Errorf("%s: %+v", c.Name(), s)
		}
	}
	st := stats(t, n)
	for _, c := range contexts {
		s := c.Stats()
		came += s.Handled + s.Lost + s.Unrun
		if m, ok := c.Messages(); ok {
			came += m.Duplicates
		}
	}
	if redirected := program(t, n).Redirected; came != redirected {
		t.Errorf("%d packets are accounted for, the program let in %d\n%+v", came, redirected, st)
	}
}

// The MTU changes at both ends: packets that fit are handled, whatever it is and was.
func TestMTUChangesUnderTraffic(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 2, Workers: 2})
	udp := run(t, n, nic.ContextSpec{Name: "udp", Rulesets: sets(matcher.UDPPort(7)), Handlers: handle(echoAll)})
	back := askAll(t, lab, 7, 400)
	conn := dialUDP(t, lab, 7)
	for _, mtu := range []int{600, 1500, 1400, 9000, 1500, 3000} {
		moves(t, "datagrams come back", back.Load)
		for _, p := range []netns.Port{lab.NIC, lab.Host} {
			onLink(t, p, func(l netlink.Link) error { return netlink.LinkSetMTU(l, mtu) })
		}
		moves(t, "datagrams come back", back.Load)
		eventually(t, fmt.Sprintf("the largest datagram at an MTU of %d comes back", mtu), func() bool {
			msg := bytes.Repeat([]byte{byte(mtu)}, mtu-28)
			if _, err := conn.Write(msg); err != nil {
				t.Fatalf("%d bytes at an MTU of %d: %v", len(msg), mtu, err)
			}
			b := make([]byte, 1<<16)
			_ = conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
			k, err := conn.Read(b)
			if err != nil && !os.IsTimeout(err) {
				t.Fatal(err)
			}
			return err == nil && bytes.Equal(b[:k], msg)
		})
	}
	accounted(t, n, udp)
}
