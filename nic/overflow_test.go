// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"testing"

	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/loader/objecttest"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// An application that does not take its events hears of each message nevertheless: by an event,
// or by the number of those that found no room, in its queue or in the kernel.
func TestNoEventIsLostUntold(t *testing.T) {
	o, err := nic.ReadObject("test.o", objecttest.Compile(t, `#include "xspin_message.h"

XSPIN_HEADER
{
	char first = 0;

	if (xspin_load(ctx, her->payload, &first, 1))
		return XSPIN_SEGV;
	return first == 'F' ? XSPIN_FAIL : XSPIN_DROP;
}

XSPIN_MESSAGES(HEADER);
XSPIN_LICENSE("GPL");
`), nic.ObjectMemory)
	if err != nil {
		t.Fatal(err)
	}
	const (
		room    = 4
		ring    = 2048 // events that the kernel keeps
		waiting = room + 3
	)
	for _, tt := range []struct {
		name     string
		complete int // messages that are complete while nobody takes an event
		fail     int // and those that fail behind them
		remove   bool
	}{
		{"failures that find the kernel's ring full", waiting, ring + 200, false},
		{"failures that find the queue full", room, 100, false},
		{"complete messages of a context that is removed", waiting, 0, true},
		{"failures of a context that is removed", waiting, ring + 200, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			lab := netnstest.Temp(t, netns.LabConfig{})
			wire(t, lab)
			p, h := application(t, hostq.Layout{Events: room, Lanes: 1})
			n := open(t, lab, nic.Config{HPUs: 1})
			spec := nic.ContextSpec{Name: "telling", Rulesets: sets(matcher.SLMP()), Kernel: &nic.Kernel{Object: o}, Messages: 4096}
			spec.Resources.Host = p
			c := run(t, n, spec)
			sock := dialUDP(t, lab, slmp.Port)
			sent := 0
			send := func(count int, what byte) {
				t.Helper()
				for i := range count {
					write(t, sock, raw(slmp.EOM, uint32(sent), 0, []byte{what}))
					if sent++; i%64 == 63 || i == count-1 {
						eventually(t, "they have come", func() bool { return messages(t, c).Started == uint64(sent) })
					}
				}
			}
			send(tt.complete, 'C')
			send(tt.fail, 'F')
			if tt.remove {
				if err := n.Remove(c); err != nil {
					t.Fatal(err)
				}
			}
			var got [spin.Failed + 1]int
			told, lost := 0, 0
			eventually(t, "all are told", func() bool {
				for e := (hostq.Event{}); h.Event(&e); {
					switch e.Kind {
					case hostq.Overflow:
						lost += int(e.Lost)
					default:
						got[e.Cause]++
						told++
					}
				}
				return told+lost >= sent
			})
			t.Logf("%d told, %d lost", told, lost)
			if told+lost != sent || !tt.remove && got[spin.Complete] != tt.complete {
				t.Errorf("of %d messages, %d of them complete, %v were told, and that %d are lost", sent, tt.complete, got, lost)
			}
			if most := sent - tt.complete; !tt.remove && lost > most {
				t.Errorf("%d are lost, at most %d could be", lost, most)
			}
		})
	}
}
