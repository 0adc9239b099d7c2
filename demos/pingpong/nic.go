// SPDX-License-Identifier: Apache-2.0

package pingpong

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// echoICMP answers a ping: it swaps the addresses, sets type 0, and computes the
// checksum over the whole payload, as FPsPIN's handler does.
func echoICMP(h *hpu.HER) spin.Code {
	var room [4][]byte
	if !h.Headers().ReplyICMPEcho(h.Rest(room[:0])...) || h.Send() != nil {
		return spin.Drop
	}
	return spin.Success
}

// echoUDP answers a datagram: it swaps the addresses and ports, which leaves the
// checksum valid.
func echoUDP(h *hpu.HER) spin.Code {
	var room [4][]byte
	if hdr := h.Headers(); !hdr.Hop() || !hdr.ReplyUDP(h.Rest(room[:0])...) || h.Send() != nil {
		return spin.Drop
	}
	return spin.Success
}

// timed runs a handler and notes when its packets arrived, and when it started and ended.
func timed(handler hpu.Handler, s *samples) hpu.Handler {
	return func(h *hpu.HER) spin.Code {
		start := h.Now()
		code := handler(h)
		s.arrival.add(start - h.Arrival())
		s.handler.add(h.Now() - start)
		return code
	}
}

// server is a NIC that echoes.
type server struct {
	*nic.NIC
	samples map[rtt.Proto]*samples
}

// start opens a NIC on the lab's NIC end and activates a context per protocol.
func start(ctx context.Context, lab *netns.Lab, c ServerConfig) (_ NICServer, err error) {
	switch c.Mode {
	case HostNIC:
		return startShared(ctx, lab, c)
	case XDP, TC:
		return startKernel(lab, c)
	}
	wait, err := hpu.ParseWait(c.Wait)
	if err != nil {
		return nil, err
	}
	s := &server{samples: map[rtt.Proto]*samples{}}
	err = lab.NIC.NS.Do(func() (err error) {
		s.NIC, err = nic.Open(nic.Config{Interface: lab.NIC.Device, Hook: nic.HookXDP, HPUs: c.HPUs, Wait: wait, CPUs: c.CPUs})
		return err
	})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	err = echo(s.NIC, c, func(p rtt.Proto, spec *nic.ContextSpec) error {
		handler := echoICMP
		if p == rtt.UDP {
			handler = echoUDP
		}
		s.samples[p] = new(samples)
		spec.Handlers.Payload = timed(handler, s.samples[p])
		spec.Timestamp = true
		return nil
	})
	if err != nil {
		return nil, err
	}
	return s, nil
}

// echo activates a context for each protocol; give adds its handlers.
func echo(n *nic.NIC, c ServerConfig, give func(rtt.Proto, *nic.ContextSpec) error) error {
	for _, p := range c.Protos {
		ruleset := matcher.ICMPEcho()
		if p == rtt.UDP {
			ruleset = matcher.UDPPort(Port)
		}
		spec := nic.ContextSpec{Name: string(p) + "-echo", Rulesets: []matcher.Ruleset{ruleset}}
		if err := give(p, &spec); err != nil {
			return err
		}
		ctx, err := n.Install(spec)
		if err != nil {
			return err
		}
		if err := n.Activate(ctx); err != nil {
			return err
		}
	}
	if c.Stats {
		return n.ServeStats()
	}
	return nil
}

// Breakdown implements NICServer.
func (s *server) Breakdown(p rtt.Proto, replies int) Breakdown { return s.samples[p].take(replies) }

// samples are how long the handlers of one protocol took and waited.
type samples struct {
	asks    bool   // an application is asked, and the reply leaves from the continuation
	arrival series // frame in the XDP program to handler start
	handler series // start to return, or to the request to the application
	host    series // request to answer
	rest    series // from there to the return of the continuation
}

// takeWait bounds the wait for handlers that have yet to note when they ended: they do so
// after the reply has left.
const takeWait = 50 * time.Millisecond

func (s *samples) take(replies int) Breakdown {
	for end := time.Now().Add(takeWait); s.ended() < uint64(replies) && time.Now().Before(end); {
		time.Sleep(100 * time.Microsecond)
	}
	b := Breakdown{ArrivalToHandler: s.arrival.take(), Handler: s.handler.take(), Host: s.host.take()}
	for i, ns := range s.rest.take() {
		if i < len(b.Handler) {
			b.Handler[i] += ns
		}
	}
	return b
}

// ended returns for how many replies all durations are known.
func (s *samples) ended() uint64 {
	if s.asks {
		return s.rest.n.Load()
	}
	return s.handler.n.Load()
}

// A series is durations in ns, of as many first replies as it has room for. Workers add
// while another goroutine takes; what is added meanwhile may be lost.
type series struct {
	n  atomic.Uint64
	ns [1 << 14]atomic.Int64
}

func (s *series) add(ns int64) {
	if i := s.n.Add(1) - 1; i < uint64(len(s.ns)) {
		s.ns[i].Store(ns)
	}
}

// take returns the durations, and starts over.
func (s *series) take() []int64 {
	v := make([]int64, min(s.n.Swap(0), uint64(len(s.ns))))
	for i := range v {
		v[i] = s.ns[i].Load()
	}
	return v
}
