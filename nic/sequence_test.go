// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// What goes to one virtual HPU of a message is handled one after the other, also the
// packets that had to wait for the header handler.
func TestVirtualHPUsHandleOnePacketAtATime(t *testing.T) {
	const sequence, vhpus = 5000, 5
	lab := netnstest.Temp(t, netns.LabConfig{})
	n := open(t, lab, nic.Config{HPUs: 4, Workers: 2})
	var busy [vhpus]atomic.Int32
	var together atomic.Int32
	c := run(t, n, nic.ContextSpec{
		Name: "slmp", Rulesets: sets(matcher.SLMP()), Policy: nic.BlockedRR, Sequence: sequence, VHPUs: vhpus, Held: 1024,
		Handlers: hpu.Handlers{
			Header: func(*hpu.HER) spin.Code {
				time.Sleep(2 * time.Millisecond) // others come meanwhile
				return spin.ProcessData
			},
			Payload: func(h *hpu.HER) spin.Code {
				b := &busy[h.Offset()/sequence%vhpus]
				if b.Add(1) > 1 {
					together.Add(1)
				}
				time.Sleep(20 * time.Microsecond)
				b.Add(-1)
				return spin.Success
			},
		},
	})
	conn := connect(t, lab, slmp.Port, slmp.Config{Payload: 1000})
	for range 10 {
		if _, err := conn.SendBytes(patient(t), noise(300_000), slmp.Options{}); err != nil {
			t.Fatal(err)
		}
	}
	if st := messages(t, c); st.Held == 0 {
		t.Error("no packet had to wait for the header handler")
	}
	if n := together.Load(); n > 0 {
		t.Errorf("%d packets were handled while another of their virtual HPU was", n)
	}
}
