// SPDX-License-Identifier: Apache-2.0

package handlers

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/spin"
)

func init() {
	Register("tick", "counts packets on their way to Linux, and reports to a collector every second; params to (address:port, required), port (9401, source)", newTick)
}

// tick is telemetry: its timer sends a datagram of three 64-bit numbers, big-endian: the
// number of the datagram, from 1, and packets and bytes so far.
type tick struct {
	To   netip.AddrPort `param:"to,required"`
	Port uint16         `param:"port"`

	packets, bytes atomic.Uint64
	sent           uint64 // the timer runs on one HPU at a time
}

// tickLen is the length of its datagrams.
const tickLen = 24

func newTick(p Params) (*Set, error) {
	t := &tick{Port: 9401}
	if err := p.Decode(t); err != nil {
		return nil, err
	}
	if !t.To.Addr().Is4() || t.To.Port() == 0 {
		return nil, badParam("to", "%v: want an IPv4 address and a port", t.To)
	}
	return &Set{
		Handlers: hpu.Handlers{Init: t.init, Payload: t.count, Timer: t.send},
		Rulesets: []matcher.Ruleset{matcher.ICMPEcho()},
		Timer:    time.Second,
	}, nil
}

// init starts the resolution of the collector's address, so that the first tick finds it
// known.
func (t *tick) init(task *hpu.Task) error {
	_, _ = task.Resolve(t.To.Addr())
	return nil
}

func (t *tick) count(h *hpu.HER) spin.Code {
	t.packets.Add(1)
	t.bytes.Add(uint64(h.Len()))
	if h.ToStack() != nil {
		return spin.Drop
	}
	return spin.Success
}

func (t *tick) send(task *hpu.Task) spin.Code {
	b, err := task.SendUDP(t.Port, t.To, tickLen)
	if err != nil {
		if !errors.Is(err, spin.ErrUnresolved) { // that is worth no line: the next tick may succeed
			task.Logf("telemetry to %v: %v", t.To, err)
		}
		return spin.Drop
	}
	t.sent++
	binary.BigEndian.PutUint64(b, t.sent)
	binary.BigEndian.PutUint64(b[8:], t.packets.Load())
	binary.BigEndian.PutUint64(b[16:], t.bytes.Load())
	return spin.Success
}
