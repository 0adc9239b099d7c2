// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// A cuttable passes datagrams on between a sender and a port of the NIC, unless it is cut.
type cuttable struct {
	addr         string // where the sender sends to
	there, back  atomic.Bool
	passed, cuts atomic.Uint64
}

func cut(t *testing.T, lab *netns.Lab, port uint16) *cuttable {
	t.Helper()
	var near, far *net.UDPConn
	err := lab.Host.NS.Do(func() (err error) {
		if near, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)}); err == nil {
			far, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(lab.NIC.Addr.Addr(), port)))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	c := &cuttable{addr: near.LocalAddr().String()}
	var sender atomic.Pointer[netip.AddrPort]
	var running sync.WaitGroup
	t.Cleanup(func() {
		near.Close()
		far.Close()
		running.Wait()
	})
	pass := func(is *atomic.Bool, from *net.UDPConn, to func(b []byte)) {
		for b := make([]byte, 2048); ; {
			n, who, err := from.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			if from == near {
				sender.Store(&who)
			}
			if is.Load() {
				c.cuts.Add(1)
				continue
			}
			c.passed.Add(1)
			to(b[:n])
		}
	}
	running.Go(func() { pass(&c.there, near, func(b []byte) { far.Write(b) }) })
	running.Go(func() {
		pass(&c.back, far, func(b []byte) {
			if to := sender.Load(); to != nil {
				near.WriteToUDPAddrPort(b, *to)
			}
		})
	})
	return c
}

// While messages are sent the path fails, both ways or only for answers. However long that is, each message begins and
// ends at most once, and what its sender was told is what the application was.
func TestOutages(t *testing.T) {
	const count, size, payload, port = 60, 2500, 1000, 9500
	lengths := []time.Duration{100 * time.Millisecond, 2 * time.Second, 6 * time.Second}
	if testenv.Soak() > 1 {
		for s := range 21 {
			lengths = append(lengths, time.Duration(3*s)*time.Second)
		}
	}
	lab := netnstest.Temp(t, netns.LabConfig{})
	wire(t, lab)
	n := open(t, lab, nic.Config{HPUs: 2, Workers: 2})
	var all sync.WaitGroup
	defer all.Wait()
	at := uint16(port)
	for i := range tiers {
		for _, answers := range []bool{false, true} {
			for _, length := range lengths {
				name := fmt.Sprintf("%s, %v, answers alone: %v", tiers[i].name, length, answers)
				r := &rig{t: t, tier: &tiers[i], lab: lab, n: n, port: at}
				r.start(nil, func(s *nic.ContextSpec) { s.Name, s.Rulesets = name, sets(slmpAt(r.port)) })
				path := cut(t, lab, at)
				at++
				var conn *slmp.Conn
				err := lab.Host.NS.Do(func() (err error) {
					conn, err = slmp.Dial(context.Background(), path.addr, slmp.Config{Payload: payload, Retries: 1000, Patience: time.Minute})
					return err
				})
				if err != nil {
					t.Fatal(err)
				}
				all.Go(func() {
					defer conn.Close()
					done := make(chan error, count)
					for k := range count {
						if err := conn.Post(noise(size), func(err error) { done <- err }); err != nil {
							t.Errorf("%s: %v", name, err)
							return
						}
						if k == count/2 {
							path.back.Store(true)
							path.there.Store(!answers)
							time.AfterFunc(length, func() {
								path.back.Store(false)
								path.there.Store(false)
							})
						}
						time.Sleep(2 * time.Millisecond)
					}
					good := 0
					for range count {
						if err := <-done; err == nil {
							good++
						} else if length < slmp.MaxSilence/2 {
							t.Errorf("%s: %v", name, err)
						}
					}
					type run struct{ handler, number uint32 }
					runs := map[run]int{}
					for _, w := range r.record.all() {
						if w.Handler != bpf.WitnessPayload {
							runs[run{w.Handler, w.Number}]++
						}
					}
					for w, n := range runs {
						if n > 1 {
							t.Errorf("%s: handler %d of message %d has run %d times", name, w.handler, w.number, n)
						}
					}
					// An event in the kernel's ring is acknowledged, and still to come.
					eventually(t, name+": all are told", func() bool { return len(r.events) >= good })
					told := map[uint32]int{}
					for len(r.events) > 0 {
						if e := <-r.events; e.Cause == spin.Complete {
							told[e.Number]++
						}
					}
					for number, n := range told {
						if n > 1 {
							t.Errorf("%s: message %d is told %d times", name, number, n)
						}
					}
					if len(told) < good || path.cuts.Load() == 0 {
						t.Errorf("%s: %d messages are acknowledged and %d told, %d datagrams were cut", name, good, len(told), path.cuts.Load())
					}
				})
			}
		}
	}
}
