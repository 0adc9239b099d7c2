// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"cmp"
	"fmt"
	"math"
	"net"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/packet"
)

// udpTo returns a frame from the host's end of a lab to a port of the NIC's.
func udpTo(lab *netns.Lab, to uint16) []byte {
	b := make([]byte, 60)
	eth := packet.Ethernet(b)
	eth.SetDst([6]byte(lab.NIC.MAC))
	eth.SetSrc([6]byte(lab.Host.MAC))
	eth.SetEtherType(packet.EtherTypeIPv4)
	ip := packet.IPv4(eth.Payload())
	ip[0] = 0x45
	ip.SetTotalLen(uint16(len(ip)))
	ip.SetTTL(64)
	ip.SetProtocol(unix.IPPROTO_UDP)
	ip.SetSrc(lab.Host.Addr.Addr().As4())
	ip.SetDst(lab.NIC.Addr.Addr().As4())
	ip.SetChecksum(ip.HeaderChecksum())
	udp := packet.UDP(ip.Payload())
	udp.SetSrcPort(1000)
	udp.SetDstPort(to)
	udp.SetLength(uint16(len(udp)))
	return b
}

// overload sends frames in turn, more than anybody can handle, until enough is called
// or the test ends.
func overload(t testing.TB, lab *netns.Lab, frames ...[]byte) (enough func()) {
	t.Helper()
	stop, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- lab.Host.NS.Do(func() error {
			out, err := net.InterfaceByName(lab.Host.Device)
			if err != nil {
				return err
			}
			g, err := loader.NewGenerator(out)
			if err != nil {
				return err
			}
			defer g.Close()
			for i := 0; ; i++ {
				select {
				case <-stop:
					return nil
				default:
				}
				_, err := g.Feed(frames[i%len(frames)], func(sent int) int { return 64 - sent })
				if err != nil {
					return err
				}
			}
		})
	}()
	enough = sync.OnceFunc(func() {
		close(stop)
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(enough)
	return enough
}

// busy is a handler that keeps its HPU busy for so long.
func busy(d time.Duration) hpu.Handler {
	return func(h *hpu.HER) hpu.Code {
		for end := h.Now() + int64(d); h.Now() < end; {
		}
		return hpu.Success
	}
}

// handlerTime returns the time in handlers of contexts, while that adds up to so much
// more than before.
func handlerTime(t testing.TB, contexts []*nic.Context, sum time.Duration) []time.Duration {
	t.Helper()
	read := func() (all []time.Duration, sum time.Duration) {
		for _, c := range contexts {
			s := c.Stats().HandlerSum
			all = append(all, s)
			sum += s
		}
		return all, sum
	}
	before, from := read()
	for range 60_000 {
		now, to := read()
		if to-from >= sum {
			for i := range now {
				now[i] -= before[i]
			}
			return now
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatalf("handlers run for less than %v", sum)
	return nil
}

// Two contexts, of which one has handlers that take twenty times as long, bring more
// than the HPUs can do. Without sharing that one gets twenty times as much.
func TestCompetingContextsShareHandlerTime(t *testing.T) {
	const quick = 5 * time.Microsecond
	for _, tc := range []struct {
		name   string
		unfair bool
		shares [2]int    // of the quick and of the slow one
		masks  [2]uint64 // HPUs that they may use
		cfg    nic.Config
		slow   time.Duration
		want   float64 // time of the slow one for that of the quick one
		within float64 // times that, or a part of it
	}{
		{name: "unfair", unfair: true, cfg: nic.Config{HPUs: 1}, want: 20, within: 3},
		{name: "fair", cfg: nic.Config{HPUs: 1}, want: 1, within: 2},
		{name: "three to one", shares: [2]int{3, 1}, cfg: nic.Config{HPUs: 1}, want: 1. / 3, within: 1.7},
		{name: "many HPUs, one thread", cfg: nic.Config{HPUs: 8, Workers: 1}, want: 1, within: 2},
		{name: "an HPU each, one thread", masks: [2]uint64{1, 2}, slow: 50 * time.Microsecond, cfg: nic.Config{HPUs: 2, Workers: 1}, want: 1, within: 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			lab := netnstest.Temp(t, netns.LabConfig{Queues: 1})
			n := open(t, lab, tc.cfg)
			n.SetUnfair(tc.unfair)
			var contexts []*nic.Context
			for i, d := range []time.Duration{quick, cmp.Or(tc.slow, 100*time.Microsecond)} {
				contexts = append(contexts, run(t, n, nic.ContextSpec{
					Name: fmt.Sprint(d), Rulesets: sets(matcher.UDPPort(uint16(7 + i))), Handlers: handle(busy(d)), Share: tc.shares[i], CoreMask: tc.masks[i],
				}))
			}
			enough := overload(t, lab, udpTo(lab, 7), udpTo(lab, 8))
			handlerTime(t, contexts, 300*time.Millisecond)
			// Whoever else wants the CPUs may upset it for a moment.
			var sum [2]time.Duration
			ratio := 0.
			off := func() bool { return math.Abs(math.Log(ratio/tc.want)) > math.Log(tc.within) }
			for i := 0; i == 0 || i < 8 && off(); i++ {
				got := handlerTime(t, contexts, 600*time.Millisecond)
				sum = [2]time.Duration{sum[0]/2 + got[0], sum[1]/2 + got[1]}
				ratio = float64(sum[1]) / float64(sum[0])
			}
			s, err := n.Stats()
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%v and %v, ratio %.2f, credits %d and %d", sum[0], sum[1], ratio, s.Contexts[0].Credits, s.Contexts[1].Credits)
			if off() {
				t.Errorf("time of the slow context is %.2f times that of the quick one, want %.2f, or off by a factor of %v", ratio, tc.want, tc.within)
			}
			for _, c := range s.Contexts {
				if c.Refused == 0 {
					t.Errorf("context %s brought no more than could be done: this shows nothing", c.Name)
				}
			}
			if tc.name != "fair" {
				return
			}
			enough()
			eventually(t, "the credit comes back", func() bool {
				s, err := n.Stats()
				return err == nil && s.Contexts[1].Granted == 1024 && s.Contexts[1].Credits == 1024
			})
		})
	}
}
