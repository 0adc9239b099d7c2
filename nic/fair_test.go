// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/eval/yardstick"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/packet"
	"github.com/xspin/xspin/spin"
)

// udpTo returns a frame from a lab's host to a port of its NIC.
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
			g, err := yardstick.NewGenerator(out)
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
	return func(h *hpu.HER) spin.Code {
		for end := h.Now() + int64(d); h.Now() < end; {
		}
		return spin.Success
	}
}

// Two contexts, of which one may have handlers that take twenty times as long, bring
// more than the HPUs can do. What they get of the time follows from their credits, see
// adjust; what is looked at here is the credits, and that they come back.
func TestCompetingContextsShareHandlerTime(t *testing.T) {
	const quick, slow = 5 * time.Microsecond, 100 * time.Microsecond
	for _, tc := range []struct {
		name   string
		unfair bool
		times  [2]time.Duration // of their handlers
		shares [2]int
		masks  [2]uint64 // HPUs that they may use
		cfg    nic.Config
	}{
		{name: "unfair", unfair: true, times: [2]time.Duration{quick, slow}, cfg: nic.Config{HPUs: 1}},
		{name: "fair", times: [2]time.Duration{quick, slow}, cfg: nic.Config{HPUs: 1}},
		{name: "three to one", times: [2]time.Duration{slow, slow}, shares: [2]int{3, 1}, cfg: nic.Config{HPUs: 1}},
		{name: "many HPUs, one thread", times: [2]time.Duration{quick, slow}, cfg: nic.Config{HPUs: 8, Workers: 1}},
		{name: "an HPU each, one thread", times: [2]time.Duration{quick, slow}, masks: [2]uint64{1, 2}, cfg: nic.Config{HPUs: 2, Workers: 1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			lab := netnstest.Temp(t, netns.LabConfig{Queues: 1})
			n := open(t, lab, tc.cfg)
			n.SetUnfair(tc.unfair)
			var contexts []*nic.Context
			for i, d := range tc.times {
				contexts = append(contexts, run(t, n, nic.ContextSpec{
					Name: fmt.Sprint("context ", i), Rulesets: sets(matcher.UDPPort(uint16(7 + i))), Handlers: handle(busy(d)), Share: tc.shares[i], CoreMask: tc.masks[i],
				}))
			}
			enough := overload(t, lab, udpTo(lab, 7), udpTo(lab, 8))
			eventually(t, "both bring more than can be done", func() bool {
				s := stats(t, n).Contexts
				return s[0].Refused > 1000 && s[1].Refused > 1000
			})
			if tc.unfair {
				for _, c := range stats(t, n).Contexts {
					if c.Credits != c.Granted {
						t.Errorf("%s has %d credits of %d", c.Name, c.Credits, c.Granted)
					}
				}
				return
			}
			eventually(t, "the second has less than half of the first's credit", func() bool {
				s := stats(t, n).Contexts
				return s[1].Credits < s[1].Granted && 2*s[1].Credits < s[0].Credits
			})
			for _, c := range contexts {
				before := c.Stats().Handled
				eventually(t, "it goes on", func() bool { return c.Stats().Handled > before })
			}
			if tc.name != "fair" {
				return
			}
			enough()
			eventually(t, "the credit comes back", func() bool {
				s := stats(t, n).Contexts[1]
				return s.Granted == 1024 && s.Credits == s.Granted
			})
		})
	}
}
