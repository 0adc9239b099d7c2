// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"bytes"
	"errors"
	"net/netip"
	"runtime"
	"sync"
	"testing"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/slmp/fpspintest"
	"github.com/xspin/xspin/spin"
)

// TestFPsPINSender has messages sent as FPsPIN's library does, which sends nothing
// twice and waits for as many acknowledgements as it has sent packets.
func TestFPsPINSender(t *testing.T) {
	for _, p := range policies()[:3] {
		t.Run(p.name, func(t *testing.T) {
			lab := netnstest.Temp(t, netns.LabConfig{})
			n := open(t, lab, nic.Config{HPUs: 3, Workers: 2})
			w := newWitness(t, p.spec.Policy == nic.ByMessage)
			spec := p.spec
			spec.Name, spec.Rulesets, spec.Handlers = "slmp", sets(matcher.SLMP()), w.handlers()
			spec.Held = 512
			c := run(t, n, spec)
			to := netip.AddrPortFrom(lab.NIC.Addr.Addr(), slmp.Port)
			me := lab.Host.Addr.Addr()
			send := func(s fpspintest.Sender, id uint32, data []byte) (r fpspintest.Result, err error) {
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				err = lab.Host.NS.Do(func() (err error) {
					r, err = s.Send(to, id, data)
					return err
				})
				return r, err
			}
			id := uint32(0)
			for _, window := range []int{1, 4, 16, 64} {
				for _, align := range []int{64, 4} { // 1408 and 1460 bytes in a packet
					s := fpspintest.Sender{Window: window, Align: align}
					for _, size := range []int{0, 1, s.Payload() - 1, s.Payload(), s.Payload() + 1, 2 * s.Payload(), 20*s.Payload() + 5} {
						id++
						data := noise(size)
						r, err := send(s, id, data)
						if err != nil || r.ACKs != r.Sent || r.Other != 0 {
							t.Errorf("window %d, align %d, %d bytes: %v, %+v", window, align, size, err, r)
							continue
						}
						w.check(messageID{netip.AddrPortFrom(me, r.Port), id}, data)
					}
				}
			}
			// All with the same number: their ports tell them apart. What is on its way at once, 16 times 9 packets, fits
			// the 256 of a veth queue, however slow its reader is: these senders send nothing twice.
			var wg sync.WaitGroup
			var ports sync.Map
			for i := range 16 {
				wg.Go(func() {
					data := noise(30_000 + i)
					r, err := send(fpspintest.Sender{Window: 8, Align: 64}, 77, data)
					if err != nil {
						t.Errorf("one of 16: %v, %+v", err, r)
						return
					}
					if _, again := ports.LoadOrStore(r.Port, i); again {
						return // the kernel gives a port again when its sender is done: the same message for a receiver
					}
					w.check(messageID{netip.AddrPortFrom(me, r.Port), 77}, data)
				})
			}
			wg.Wait()
			// Without acknowledgements between the first and the last it sends
			// everything and reports a failure, which is FPsPIN's.
			data := noise(20_000)
			if p.spec.Policy == nic.ByPacket { // it takes its time, and the policy does not matter
				r, err := send(fpspintest.Sender{Align: 64}, 78, data)
				if !errors.Is(err, fpspintest.ErrData) {
					t.Errorf("window 0: %v, %+v", err, r)
				}
			}
			one, err := send(fpspintest.Sender{Align: 64}, 79, data[:100])
			if err != nil {
				t.Errorf("window 0, one packet: %v", err)
			}
			w.check(messageID{netip.AddrPortFrom(me, one.Port), 79}, data[:100])
			if st := c.Stats(); st.AckFull != 0 || st.Failed != 0 {
				t.Errorf("%+v", st)
			}
			idle(t, c)
		})
	}
}

// Its threads begin far apart: more segments lie ahead of the first hole than any
// reordering network would bring there.
func TestFPsPINSenderWithThreads(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{})
	s := fpspintest.Sender{Window: 64, Align: 732, Threads: 2}
	data := noise(140_000*s.Payload() - 5)
	memory := make(hpu.Memory, len(data))
	c := run(t, n, nic.ContextSpec{Name: "slmp", Rulesets: sets(matcher.SLMP()), Window: memory, Handlers: hpu.Handlers{
		Header: func(*hpu.HER) spin.Code { return spin.Proceed },
	}})
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := lab.Host.NS.Do(func() error {
		r, err := s.Send(netip.AddrPortFrom(lab.NIC.Addr.Addr(), slmp.Port), 1, data)
		if err != nil {
			t.Errorf("%v, %+v\n%+v\n%+v", err, r, c.Stats(), messages(t, c))
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(memory, data) {
		t.Error("other bytes came")
	}
	idle(t, c)
}
