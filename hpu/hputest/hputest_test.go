// SPDX-License-Identifier: Apache-2.0

package hputest

import (
	"testing"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
)

func TestEcho(t *testing.T) {
	n := New(t, Config{
		Handlers: hpu.Handlers{Payload: func(h *hpu.HER) hpu.Code {
			if !h.Headers().ReplyUDP() || h.Send() != nil {
				return hpu.Drop
			}
			return hpu.Success
		}},
		Rulesets: []matcher.Ruleset{matcher.UDPPort(7)},
	})
	for range 1000 {
		out := n.Packet(UDP(Peer(4000), Here(7), []byte("hello")))
		if out.Code() != hpu.Success || len(out.Sent) != 1 || len(out.Calls) != 1 {
			t.Fatalf("%+v", out)
		}
	}
	if out := n.Packet(UDP(Peer(4000), Here(8), []byte("hello"))); len(out.Calls) != 0 || out.Verdicts[0].Action != matcher.Pass {
		t.Errorf("%+v", out)
	}
}
